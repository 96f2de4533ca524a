//! Batches of numbered tasks, as the C API has them.
//!
//! The tasks of one call that go to one segment in one direction are one transfer, and share its
//! outcome. When a transfer ends, its thread stores the outcome where [`MooncakeEngine::task`](crate::MooncakeEngine::task) reads
//! it: callers poll every task once per millisecond, and that takes no lock of the data path.
//!
//! Callers leave batches whose transfers failed. The oldest batch whose transfers have all ended is
//! dropped when there are too many. Numbers are counted up and never used again, so a stale, freed or
//! invented number is an error.

use crate::codes;
use crate::refusal::{Answer, Refusal};
use kvferry::Error;
use kvferry_sys::sync::RwLock;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Stands for no batch.
pub const INVALID_BATCH: u64 = u64::MAX;

/// The most batches of an engine.
const BATCHES_MAX: usize = 16_384;
/// The most tasks of a batch. Mooncake's limit is what the caller gave to `allocateBatchID`.
pub(crate) const TASKS_MAX: usize = 1 << 20;

/// A task, which copies bytes between local memory and a segment.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// True: to the segment's memory; false: from it.
    pub write: bool,
    /// The address in this process.
    pub local: u64,
    /// The segment's number.
    pub segment: i32,
    /// The address in the segment owner's process.
    pub remote: u64,
    /// Bytes to move. A task of no bytes completes at once.
    pub len: u64,
}

/// Progress of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskState {
    /// Bytes move, or wait to be moved.
    Running,
    /// The bytes have arrived. The count is the task's length.
    Completed(u64),
    /// The transfer failed, and kvferry does not touch the task's local memory any more.
    Failed,
}

/// A transfer that several tasks share.
#[derive(Debug, Default)]
pub(crate) struct Group(pub(crate) OnceLock<Result<(), Error>>);

#[derive(Debug)]
pub(crate) struct Task {
    pub(crate) len: u64,
    pub(crate) group: Arc<Group>,
}

#[derive(Debug, Default)]
pub(crate) struct Tasks(pub(crate) RwLock<Vec<Task>>);

impl Tasks {
    fn have_ended(&self) -> bool {
        let tasks = self.0.read();
        tasks.iter().all(|task| task.group.0.get().is_some())
    }

    fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }
}

/// The batches of one engine, by number.
#[derive(Debug, Default)]
pub(crate) struct Batches(RwLock<BTreeMap<u64, Arc<Tasks>>>);

impl Batches {
    pub(crate) fn get(&self, number: u64) -> Answer<Arc<Tasks>> {
        let batches = self.0.read();
        let unknown = || Refusal::invalid(format_args!("no batch has the number {number}"));
        batches.get(&number).cloned().ok_or_else(unknown)
    }

    pub(crate) fn allocate(&self) -> Answer<u64> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut batches = self.0.write();
        if batches.len() >= BATCHES_MAX {
            let ended = |tasks: &Tasks| !tasks.is_empty() && tasks.have_ended();
            let oldest = batches.iter().find(|(_, tasks)| ended(tasks)).map(|(number, _)| *number);
            let oldest = oldest.ok_or_else(|| {
                Refusal::new(codes::TOO_MANY, format_args!("{BATCHES_MAX} batches are in use"))
            })?;
            batches.remove(&oldest);
        }
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        batches.insert(number, Arc::default());
        Ok(number)
    }

    pub(crate) fn free(&self, number: u64) -> Answer<()> {
        if !self.get(number)?.have_ended() {
            let why = format_args!("transfers of the batch {number} are not complete");
            return Err(Refusal::new(codes::BUSY, why));
        }
        self.0.write().remove(&number);
        Ok(())
    }
}
