//! The files of a directory's segments that are open.

use crate::tiers::disk::errors::WrittenLate;
use kvferry::{Agent, ErrorKind, FileRegion};
use kvferry_sys::fd::Tracked;
use rustc_hash::FxHashMap;
use std::fs::{File, TryLockError};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

#[derive(Debug, Default)]
pub(super) struct OpenFiles {
    pub(super) files: FxHashMap<u32, (Arc<Segment>, u64)>,
    /// Counts uses, to find the file that was not used for longest.
    uses: u64,
    /// Counts the closings. A file that was opened before one may have been removed.
    pub(super) closed: u64,
}

/// An open segment. Closes its region when the last operation on it has ended.
#[derive(Debug)]
pub(crate) struct Segment {
    pub(super) agent: Agent,
    /// A forked child has no descriptor of it: with one, the lock would outlive this process.
    pub(crate) file: Tracked<File>,
    pub(crate) region: FileRegion,
    /// False if the file system is read-only, or this user may only read.
    pub(super) is_writable: bool,
    /// Transfers of this process may write to it.
    pub(super) is_locked: AtomicBool,
    /// The agent was shut down while a transfer was under way: nothing says when it ends.
    pub(super) is_left: AtomicBool,
}

impl Segment {
    /// Locks the file, before the first transfer that writes to it.
    pub(super) fn lock(&self) -> io::Result<()> {
        match self.region.lock_shared() {
            Err(e) if e.kind() == ErrorKind::Busy => return Err(io::Error::other(e)),
            Err(error) => {
                let path = self.region.path().display();
                tracing::debug!(%error, "{path} is written without a lock");
            }
            Ok(()) => {}
        }
        self.is_locked.store(true, Relaxed);
        Ok(())
    }

    pub(super) fn unlock(&self) {
        if !self.is_left.load(Relaxed) && self.is_locked.swap(false, Relaxed) {
            let _ = self.region.unlock();
        }
    }

    /// The lock stays until this process has ended: a transfer that was left may be under way.
    pub(crate) fn leave(&self) {
        self.is_left.store(true, Relaxed);
    }

    /// Fails if a write may be under way that was begun by another open file of the segment. This process has the segment
    /// to itself, and writes nothing to it at the moment.
    pub(super) fn check_unwritten(&self) -> io::Result<()> {
        let late = || WrittenLate::error(self.region.path().to_path_buf());
        self.unlock();
        if self.is_left.load(Relaxed) {
            return Err(late());
        }
        match self.file.try_lock() {
            Ok(()) => self.file.unlock(),
            Err(TryLockError::WouldBlock) => Err(late()),
            // Such as: the file system has no locks.
            Err(TryLockError::Error(_)) => Ok(()),
        }
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // Fails if the agent was shut down, which closed the region.
        let _ = self.agent.close_file(&self.region);
    }
}

impl OpenFiles {
    pub(super) fn find(&mut self, segment: u32, to_write: bool) -> Option<Arc<Segment>> {
        self.uses += 1;
        let now = self.uses;
        let (known, used) = self.files.get_mut(&segment)?;
        if to_write && !known.is_writable {
            return None;
        }
        *used = now;
        Some(Arc::clone(known))
    }

    /// Adds a file. Returns those that have to be closed for it, so that no more than `most` are open.
    pub(super) fn add(
        &mut self,
        segment: u32,
        new: &Arc<Segment>,
        most: usize,
    ) -> Vec<Arc<Segment>> {
        let mut oldest = Vec::new();
        let before = self.files.insert(segment, (Arc::clone(new), self.uses));
        oldest.extend(before.map(|(file, _)| file));
        while self.files.len() > most {
            let used = |(number, (_, used)): (&u32, &(Arc<Segment>, u64))| (*used, *number);
            let Some((_, number)) = self.files.iter().map(used).min() else { break };
            oldest.extend(self.files.remove(&number).map(|(file, _)| file));
        }
        oldest
    }

    pub(super) fn close(&mut self, segment: u32) -> Option<Arc<Segment>> {
        self.closed += 1;
        self.files.remove(&segment).map(|(file, _)| file)
    }
}
