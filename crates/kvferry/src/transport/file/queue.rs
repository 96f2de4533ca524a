//! Operations on files, and a queue of them as an engine gives it.

use super::filled::Filled;
use crate::memory::region::RegionUse;
use crate::sync::Arc;
use kvferry_sys::file::File;
use kvferry_sys::poll::{self, Interest};
use kvferry_sys::span::HostSpan;
use kvferry_sys::uring::Way;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Operations under way in one queue, at most.
pub(super) const DEPTH: usize = 256;
/// Bytes of one operation at most. An operation can't be stopped.
pub(super) const OPERATION_BYTES_MAX: u64 = 1 << 20;

/// A read or write of a contiguous range. Holds all that it needs.
pub(super) struct Operation {
    pub(super) way: Way,
    pub(super) file: Arc<File>,
    /// Offset in the file, not in the region.
    pub(super) offset: u64,
    pub(super) span: HostSpan,
    /// Past the page cache: the device reads or writes the memory, whose pages the kernel has to keep
    /// meanwhile. Through the page cache, bytes are copied.
    pub(super) is_direct: bool,
    pub(super) memory: Memory,
    /// The pair of the batch, or the first of several pairs that are neighbours in the file.
    pub(super) pair: usize,
    /// Shows the share that the operation has not ended.
    pub(super) _share: Arc<()>,
}

/// The owner that keeps the memory of an operation in place.
pub(super) enum Memory {
    Region(RegionUse),
    Stage(Arc<Filled>),
}

/// Operations under way. One share uses it at a time.
///
/// Device memory that an engine can reach, as GPUDirect Storage can, would be another kind of [`Memory`], and its
/// engine another implementation of this.
pub(super) trait Queue: Send {
    /// Operations that were pushed and not returned by [`Queue::completed`].
    fn in_flight(&self) -> usize;

    fn is_full(&self) -> bool {
        self.in_flight() >= DEPTH
    }

    /// Adds an operation; the caller has looked whether the queue is full.
    fn push(&mut self, operation: Operation);

    /// Starts the operations that were pushed.
    fn submit(&mut self) -> io::Result<()>;

    /// Whether everything that was submitted was taken; else [`Queue::submit`] has to be called again.
    fn is_submitted(&self) -> bool {
        true
    }

    /// Gives up operations that have not begun, where that is possible: they come back from
    /// [`Queue::completed`] as interrupted. May be called again and again.
    fn stop(&mut self);

    /// Takes an operation that has ended, and the bytes it moved.
    fn completed(&mut self) -> Option<(Operation, io::Result<usize>)>;

    /// Starts what was pushed and waits until operations have ended, for `timeout` at most: one, or a
    /// part of those under way, so that a thread wakes up less often.
    fn wait(&mut self, timeout: Duration) -> io::Result<()> {
        self.submit()?;
        poll::wait_one(self.fd(), Interest::Read, Some(timeout)).map(drop)
    }

    /// Readable while there are completions.
    fn fd(&self) -> BorrowedFd<'_>;
}
