//! Arrays of jobs that the kernel reads, in pinned host memory.
//!
//! Ownership: a batch holds its tables until an event behind its launches has been reached; then they can be written
//! again. A batch that is leaked keeps them.

#![allow(unsafe_code, reason = "the driver pins the tables")]

use crate::job::Job;
use crate::pinned::Pinned;
use kvferry_sys::cuda::{self, Context};
use kvferry_sys::map::Mapping;
use kvferry_sys::sync::Mutex;
use std::io;
use std::sync::Arc;

/// Jobs of a table, at most: more than division makes of the pieces of one batch.
pub(super) const JOBS_MAX: usize = 5120;

/// Bytes of a table: whole pages of 64 KiB.
const BYTES: usize = 128 << 10;

/// Tables of one GPU: as many as its batches have needed at a time.
#[derive(Debug, Default)]
pub(super) struct Tables {
    spare: Arc<Mutex<Vec<Memory>>>,
}

#[derive(Debug)]
struct Memory {
    pinned: Pinned,
    device_address: u64,
}

/// A table that is in use until it is dropped.
#[derive(Debug)]
pub(super) struct Table {
    /// `None` only while the table is dropped.
    memory: Option<Memory>,
    spare: Arc<Mutex<Vec<Memory>>>,
}

/// Reason why there is no table.
#[derive(Debug, thiserror::Error)]
pub(super) enum TableError {
    #[error("no memory for jobs: {0}")]
    Memory(#[from] io::Error),
    #[error("memory for jobs can't be pinned: {0}")]
    Driver(#[from] cuda::Error),
}

impl Tables {
    /// Writes the jobs to a table.
    ///
    /// # Panics
    /// If there are more jobs than [`JOBS_MAX`].
    pub(super) fn write(&self, context: &Context, jobs: &[Job]) -> Result<Table, TableError> {
        let spare = self.spare.lock().pop();
        let memory = spare.map_or_else(|| Memory::new(context), Ok)?;
        // SAFETY: a job has three numbers of eight bytes, in the order in which the kernel reads them, and nothing between
        // them; the platforms of GPUs have the kernel's order of bytes.
        let bytes =
            unsafe { std::slice::from_raw_parts(jobs.as_ptr().cast::<u8>(), size_of_val(jobs)) };
        memory.pinned.memory().span(0, BYTES).copy_from(bytes);
        Ok(Table { memory: Some(memory), spare: Arc::clone(&self.spare) })
    }
}

const _: () = assert!(size_of::<Job>() == Job::BYTES && JOBS_MAX * Job::BYTES <= BYTES);
const _: () = assert!(cfg!(target_endian = "little"));

impl Memory {
    fn new(context: &Context) -> Result<Self, TableError> {
        let mapping = Mapping::kept_from_children(BYTES)?;
        // SAFETY: a table that a kernel may read is with its batch, and not dropped.
        let pinned = unsafe { Pinned::new(context, mapping) }?;
        let device_address = pinned.device_address()?;
        Ok(Self { pinned, device_address })
    }
}

impl Table {
    /// The address at which the kernel finds the first job.
    pub(super) fn device_address(&self) -> u64 {
        self.memory.as_ref().expect("there until it is dropped").device_address
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        self.spare.lock().extend(self.memory.take());
    }
}
