//! The files of a directory's segments that are open.

use crate::tiers::disk::errors::WrittenLate;
use kvferry::{Agent, DirectIo, ErrorKind, FileRegion};
use kvferry_sys::fd::Tracked;
use rustc_hash::FxHashMap;
use std::fs::{File, TryLockError};
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The part of the process's descriptors that the open segments of a store take, at most.
const DESCRIPTORS_SHARE: usize = 4;
/// Segments of a directory whose files are kept open, however few descriptors the process may have.
const OPEN_MIN: usize = 4;

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

/// Segments of a directory whose files are kept open at most, in a process that may have `limit` descriptors.
pub(super) fn open_max(limit: usize, direct: DirectIo, directories: usize) -> usize {
    // A file for the agent, one past the page cache, and one for what is not moved by the agent.
    let descriptors = if direct == DirectIo::Off { 2 } else { 3 };
    (limit / DESCRIPTORS_SHARE / descriptors / directories).max(OPEN_MIN)
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

    /// Adds a file. Returns those that have to be closed for it, so that no more than `most` are open: of the others, first
    /// those that this process does not write to, then those that were not used for longest.
    ///
    /// A file to which this process writes has the segment's lock, and its descriptor sees each error of writing pages
    /// back. Linux reports an error that no descriptor has seen to one that is opened later, but only while it has the inode
    /// in memory. So a sync may say nothing of a loss only where all files that are open are written to, one of them is
    /// closed, a write-back of it fails, and its inode leaves the memory before the sync.
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
            let rank = |(number, (file, used)): (&u32, &(Arc<Segment>, u64))| {
                (file.is_locked.load(Relaxed), *used, *number)
            };
            let others = self.files.iter().filter(|(number, _)| **number != segment);
            let Some((.., number)) = others.map(rank).min() else { break };
            oldest.extend(self.files.remove(&number).map(|(file, _)| file));
        }
        oldest
    }

    pub(super) fn close(&mut self, segment: u32) -> Option<Arc<Segment>> {
        self.closed += 1;
        self.files.remove(&segment).map(|(file, _)| file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Bench;
    use kvferry::FileOptions;

    #[test]
    fn the_segments_that_stay_open_take_a_quarter_of_the_descriptors_but_are_four_at_least() {
        assert_eq!(open_max(1024, DirectIo::Off, 1), 128);
        assert_eq!(open_max(1 << 20, DirectIo::Auto, 4), 21_845);
        assert_eq!(open_max(64, DirectIo::Auto, 4), 4);
    }

    #[test]
    fn a_file_that_is_written_to_is_closed_only_if_all_others_are_written_to_as_well() {
        let bench = Bench::new("open-files", 4096);
        std::fs::create_dir_all(&bench.folder).expect("a folder");
        let file = |number: u32, is_locked: bool| {
            let path = bench.folder.join(number.to_string());
            std::fs::write(&path, [0; 4096]).expect("room");
            let file = File::options().read(true).write(true).open(&path).expect("it exists");
            let copy = file.try_clone().expect("a descriptor").into();
            let region = bench.agent.register_file(copy, &FileOptions::read_write().name(path));
            Arc::new(Segment {
                agent: bench.agent.clone(),
                file: Tracked::new(file),
                region: region.expect("a file"),
                is_writable: true,
                is_locked: AtomicBool::new(is_locked),
                is_left: AtomicBool::new(false),
            })
        };
        let mut open = OpenFiles::default();
        let mut closed = Vec::new();
        for (number, is_locked) in
            [true, true, false, false, false, true, true].into_iter().enumerate()
        {
            let number = u32::try_from(number).expect("few");
            let before: Vec<_> = open.files.keys().copied().collect();
            open.add(number, &file(number, is_locked), 4);
            // As its first user does.
            open.find(number, true);
            closed.extend(before.into_iter().filter(|it| !open.files.contains_key(it)));
        }
        // 0 and 1 are written to and were used least lately.
        assert_eq!(closed, [2, 3, 4]);
        let mut left: Vec<_> = open.files.keys().copied().collect();
        left.sort_unstable();
        assert_eq!(left, [0, 1, 5, 6]);
        open.add(7, &file(7, true), 4);
        assert!(!open.files.contains_key(&0) && open.files.len() == 4);
        // Never the one that was just opened.
        open.add(8, &file(8, false), 4);
        assert!(open.files.contains_key(&8) && !open.files.contains_key(&1));
    }
}
