//! Lists of copies between the buffers, in the forms that each method takes.

use super::buffers::{Buffers, pinned};
use crate::error::Error;
use crate::job::{Direction, Job};
use crate::pinned::Pinned;
use kvferry_sys::cuda::{CopyBatch, DeviceAllocation};
use std::ops::Range;

/// Copies in each batch call of the driver, in the three ways that are tried. `usize::MAX` is one call for all copies.
pub(super) const CALLS: [usize; 3] = [128, 512, usize::MAX];

/// Bytes that are gathered before a copy of them begins.
const WINDOW_BYTES: u64 = 16 << 20;

/// Tables of at most this many bytes have jobs of the first length in [`JOB_BYTES`], larger ones of the second.
const SMALL_TABLE: u64 = 16 << 20;
const JOB_BYTES: [u64; 2] = [4 << 10, 32 << 10];

/// A contiguous piece of a table.
#[derive(Clone, Copy, Debug)]
pub struct Piece {
    /// Offset of the first byte in the device memory of the buffers.
    pub device_at: usize,
    /// Offset of the first byte in the host memory of the buffers.
    pub host_at: usize,
    /// Bytes, at least one.
    pub len: usize,
}

/// Pieces to be copied, with the lists that the driver reads.
#[derive(Debug)]
pub struct Table {
    pub(super) direction: Direction,
    pub(super) bytes: u64,
    /// Single copies: to, from, bytes.
    pub(super) copies: CopyBatch,
    /// The same copies, divided into calls, for each of [`CALLS`].
    pub(super) calls: Vec<Vec<CopyBatch>>,
    /// Jobs between mapped host memory and the device, then those between staging and the device.
    jobs: Pinned,
    /// The device's copy of `jobs`, which kernels read.
    pub(super) device_jobs: DeviceAllocation,
    pub(super) job_count: u32,
    /// Parts of the staging that are gathered and copied together, with their jobs.
    pub(super) windows: Vec<Window>,
}

/// A part of the gathered bytes.
#[derive(Debug)]
pub(super) struct Window {
    pub(super) jobs: Range<u32>,
    /// Bytes of the host memory, and of staging.
    pub(super) bytes: Range<u64>,
}

impl Table {
    /// A table of pieces that follow each other in the host memory from its first byte on.
    ///
    /// # Errors
    /// If the driver refuses, or the system has no memory for the lists.
    ///
    /// # Panics
    /// If a piece is outside the buffers, or the pieces do not follow each other.
    pub fn new(buffers: &Buffers, direction: Direction, pieces: &[Piece]) -> Result<Self, Error> {
        let mut bytes = 0;
        for piece in pieces {
            assert!(piece.len > 0 && piece.host_at == bytes, "pieces follow each other");
            bytes += piece.len;
            let end = piece.device_at.checked_add(piece.len);
            assert!(end.is_some_and(|end| end <= buffers.device_len()), "outside the device's");
        }
        assert!(bytes <= buffers.host_len() && bytes > 0, "outside the host's");
        let copies: CopyBatch = pieces
            .iter()
            .map(|piece| {
                let Job { src, dst, len } = job(buffers, direction, piece, buffers.host.address());
                (dst, src, len as usize)
            })
            .collect();
        let all: Vec<_> = copies.iter().collect();
        let calls = CALLS.map(|count| {
            all.chunks(count.min(all.len())).map(|call| call.iter().copied().collect()).collect()
        });
        let mapped = buffers.host.device_address()?;
        let bytes = bytes as u64;
        let job_bytes = JOB_BYTES[usize::from(bytes > SMALL_TABLE)];
        let mut jobs = Vec::new();
        for piece in pieces {
            divide(&mut jobs, job(buffers, direction, piece, mapped), job_bytes);
        }
        let job_count = u32::try_from(jobs.len()).expect("a few GiB in parts of some KiB");
        let windows = windows(buffers, direction, pieces, job_bytes, &mut jobs);
        let list = pinned(&buffers.context, jobs.len() * Job::BYTES)?;
        let text: Vec<u8> = jobs.iter().flat_map(Job::to_bytes).collect();
        list.memory().span(0, text.len()).copy_from(&text);
        let device_jobs = DeviceAllocation::new(&buffers.context, text.len())?;
        Ok(Self {
            direction,
            bytes,
            copies,
            calls: calls.into(),
            jobs: list,
            device_jobs,
            job_count,
            windows,
        })
    }

    /// Bytes of all pieces.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The jobs' address on the host, and their bytes.
    pub(super) fn job_list(&self) -> (u64, usize) {
        (self.jobs.address(), self.device_jobs.len())
    }
}

/// The copy of a piece, whose other side begins at `host`.
fn job(buffers: &Buffers, direction: Direction, piece: &Piece, host: u64) -> Job {
    let there = buffers.device.address() + piece.device_at as u64;
    let (here, len) = (host + piece.host_at as u64, piece.len as u64);
    match direction {
        Direction::Out => Job { src: there, dst: here, len },
        Direction::In => Job { src: here, dst: there, len },
    }
}

fn divide(jobs: &mut Vec<Job>, job: Job, job_bytes: u64) {
    let parts = (0..job.len).step_by(job_bytes as usize);
    jobs.extend(parts.map(|at| Job {
        src: job.src + at,
        dst: job.dst + at,
        len: job_bytes.min(job.len - at),
    }));
}

/// Adds the jobs between staging and the device, and returns the windows that they are in.
fn windows(
    buffers: &Buffers,
    direction: Direction,
    pieces: &[Piece],
    job_bytes: u64,
    jobs: &mut Vec<Job>,
) -> Vec<Window> {
    let index = |jobs: &Vec<Job>| u32::try_from(jobs.len()).expect("twice as many as before");
    let (mut windows, mut first, mut began) = (Vec::new(), index(jobs), 0);
    for (at, piece) in pieces.iter().enumerate() {
        divide(jobs, job(buffers, direction, piece, buffers.staging.address()), job_bytes);
        let end = (piece.host_at + piece.len) as u64;
        if end - began >= WINDOW_BYTES || at + 1 == pieces.len() {
            windows.push(Window { jobs: first..index(jobs), bytes: began..end });
            (first, began) = (index(jobs), end);
        }
    }
    windows
}
