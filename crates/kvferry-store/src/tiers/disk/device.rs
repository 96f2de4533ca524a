//! One directory of a store: its files, which of them are open, and what is in progress there.
//!
//! What needs no memory of a caller is carried out by another thread where the store has several directories
//! ([`Device::patiently`]): the caller waits only until the directory hangs. An operation that was given up goes on,
//! with memory of its own. Until it ends its segment is *held*: nothing else is done to the segment, and its owner must
//! not give it away, as a late write would land in what another process has put there.
//!
//! # Locks
//! A device may also carry out a write that a process had begun which was killed since: no thread waits for what io_uring
//! has given to a device. So a process locks the segment that its transfers write to (`flock`, shared), by the open files
//! that they use. Operations under way hold these files, also when their process has ended. A segment is begun only if no
//! other open file has a lock of it ([`WrittenLate`](super::errors::WrittenLate)). File systems without such locks do without.

mod listing;
mod open_files;

pub(super) use open_files::Segment;

use super::errors::{EIO, is_gone, is_of_device, is_read_only, is_written_late, system_error};
use crate::fault_points::{Op, step, sync_directory};
use crate::index::Index;
use crate::log::{self, Superblock};
use crate::opening::owner::{self, FileUser};
use crate::threads::helpers::Helpers;
use crate::tiers::disk::gate::{Entered, Gate, LOOK_EVERY, Pace, is_hang};
use kvferry::{Agent, DirectIo, FileOptions};
use kvferry_sys::fd::Tracked;
use kvferry_sys::private;
use kvferry_sys::sync::{Condvar, Mutex, MutexGuard};
use open_files::{OpenFiles, open_max};
use rustc_hash::FxHashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Time for which it stays known whether a directory can be written to.
const KNOWN_FOR: Duration = Duration::from_secs(1);

/// A directory. No lock of it is held during an operation on a file.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) agent: Agent,
    pub(super) path: PathBuf,
    pub(super) number: usize,
    /// Number of directories that the store has.
    pub(super) directories: usize,
    /// Set if the directory could not be read when the store was opened.
    pub(super) is_lost: AtomicBool,
    /// Set if the directory has a superblock, so that another file system in its place is noticed.
    pub(super) is_marked: bool,
    /// The id that its superblock has; 0: none.
    pub(super) id: u64,
    /// Has the ids that the processes of the store agree on, once this one has joined them.
    pub(super) index: OnceLock<Arc<Index>>,
    pub(super) user: FileUser,
    pub(super) store: [u8; 16],
    pub(super) segment_bytes: u64,
    pub(super) direct: DirectIo,
    pub(super) gate: Arc<Gate>,
    pub(super) helpers: Arc<Helpers>,
    pub(super) state: State,
}

#[derive(Debug, Default)]
pub(super) struct State {
    open: Mutex<OpenFiles>,
    /// Files whose names this process has synced. Another process may have made a file and been killed.
    named: Mutex<FxHashSet<u32>>,
    /// Whether the directory could be written to, and when that was found out.
    writable: Mutex<Option<(Instant, bool)>>,
    /// Segments of which a sync has failed after it was given up: a later one would succeed although blocks are lost.
    unsynced: Mutex<FxHashSet<u32>>,
    /// A thread is in [`Device::ask`].
    is_asked: AtomicBool,
    /// Memory of the last operation that was carried out by another thread.
    spare: Mutex<Vec<u8>>,
    counted: Mutex<Counted>,
}

/// The number of segments that have a file, as far as it is known.
#[derive(Debug, Default)]
struct Counted {
    segments: u64,
    /// A thread lists the directory.
    is_counting: bool,
    /// Files that this process makes or removes at the moment, and those that it has made or removed. What was listed
    /// meanwhile does not count.
    changing: usize,
    changed: u64,
}

/// State of an operation that another thread carries out.
enum Outcome<T> {
    Running,
    Ended(std::thread::Result<io::Result<T>>),
    GivenUp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperationKind {
    Sync,
    Other,
}

impl Device {
    /// Begins an operation that this thread carries out.
    pub(super) fn enter(&self, pace: Pace) -> io::Result<Entered> {
        self.gate.enter(pace)
    }

    /// Carries out an operation, on a segment if one is given, which uses no memory of a caller. Where there are other
    /// directories, it is given up once this one hangs.
    pub(super) fn patiently<T: Send + 'static>(
        self: &Arc<Self>,
        pace: Pace,
        segment: Option<u32>,
        run: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        self.carry_out(pace, OperationKind::Other, segment, run)
    }

    /// Like [`Device::patiently`], for an operation of the kind `kind`.
    pub(super) fn carry_out<T: Send + 'static>(
        self: &Arc<Self>,
        pace: Pace,
        kind: OperationKind,
        segment: Option<u32>,
        run: impl FnOnce(&Self) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let entered = self.enter(pace)?;
        if self.directories == 1 {
            return run(self);
        }
        if segment.is_some_and(|it| self.gate.is_held(it)) {
            return Err(self.gate.busy());
        }
        let waiter = entered.waiter();
        let shared = Arc::new((Mutex::new(Outcome::Running), Condvar::new()));
        let (of_job, device) = (Arc::clone(&shared), Arc::clone(self));
        let job = move || {
            if matches!(*of_job.0.lock(), Outcome::GivenUp) {
                return;
            }
            let outcome = catch_unwind(AssertUnwindSafe(|| run(&device)));
            let (state, changed) = &*of_job;
            let mut state = state.lock();
            if matches!(*state, Outcome::GivenUp) {
                let is_lost = match outcome {
                    Ok(outcome) => outcome.is_err_and(|e| is_of_device(&e)),
                    Err(_) => true,
                };
                if kind == OperationKind::Sync
                    && is_lost
                    && let Some(segment) = segment
                {
                    device.note_unsynced(segment);
                }
            } else {
                *state = Outcome::Ended(outcome);
                changed.notify_one();
            }
            drop(state);
            // Not before: who waits until nothing is in progress finds the segment as it is left.
            drop(entered);
        };
        self.helpers.submit(Box::new(job))?;
        // `None` is later than any clock.
        let mut ask_at = Instant::now().checked_add(self.gate.limit());
        let (state, changed) = &*shared;
        let mut state = state.lock();
        loop {
            if let Outcome::Ended(_) = &*state {
                return match std::mem::replace(&mut *state, Outcome::Running) {
                    Outcome::Ended(Ok(outcome)) => outcome,
                    Outcome::Ended(Err(panic)) => resume_unwind(panic),
                    _ => unreachable!("it was just looked at"),
                };
            }
            if let Some(hangs) = self.gate.hangs() {
                *state = Outcome::GivenUp;
                if let Some(segment) = segment {
                    waiter.give_up(segment);
                }
                return Err(hangs);
            }
            let mut most = self.gate.left().min(LOOK_EVERY);
            let asked = Instant::now();
            if pace == Pace::Slow
                && let Some(at) = ask_at
            {
                // The device may hang, or have much to do.
                if asked >= at {
                    self.ask();
                    ask_at = asked.checked_add(self.gate.limit());
                    continue;
                }
                most = most.min(at - asked);
            }
            state = changed.wait(state, most);
            self.gate.looked_late(asked, asked.elapsed().saturating_sub(most));
        }
    }

    /// Carries out what changes the number of files by one.
    fn change<T>(&self, by: i64, op: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.state.counted.lock().changing += 1;
        let outcome = op();
        let mut counted = self.state.counted.lock();
        counted.changing -= 1;
        counted.changed += 1;
        if outcome.is_ok() {
            counted.segments = counted.segments.saturating_add_signed(by);
        }
        outcome
    }

    /// Has another thread read something from the device, unless one does: while it does not answer, the directory hangs
    /// as soon as by any other read.
    fn ask(self: &Arc<Self>) {
        if self.state.is_asked.swap(true, Relaxed) {
            return;
        }
        let (entered, device) = (self.enter(Pace::Quick), Arc::clone(self));
        let ask = move || {
            let path = device.path.join(log::superblock::FILE);
            // What it answers is not asked.
            let _ = kvferry_sys::file::read_device(&path);
            device.state.is_asked.store(false, Relaxed);
            drop(entered);
        };
        if self.helpers.submit(Box::new(ask)).is_err() {
            self.state.is_asked.store(false, Relaxed);
        }
    }

    /// A sync that was given up has failed.
    fn note_unsynced(&self, segment: u32) {
        if let Some(index) = self.index.get() {
            // The kernel reports the error once: after this process has ended, the sync of another one may succeed.
            index.note_unsynced(segment);
        }
        self.state.unsynced.lock().insert(segment);
    }

    pub(super) fn path_of(&self, segment: u32) -> PathBuf {
        self.path.join(log::superblock::segment_file(segment))
    }

    pub(super) fn named(&self) -> MutexGuard<'_, FxHashSet<u32>> {
        self.state.named.lock()
    }

    /// An open segment, for an operation that the caller's thread carries out.
    pub(super) fn find_open(
        self: &Arc<Self>,
        segment: u32,
        to_write: bool,
    ) -> io::Result<Arc<Segment>> {
        let known = self.state.open.lock().find(segment, to_write);
        match known {
            Some(known) => Ok(known),
            None => self.patiently(Pace::Quick, None, move |it| it.opened(segment, to_write)),
        }
    }

    /// An open segment, to which a transfer is to write.
    pub(super) fn find_to_write(self: &Arc<Self>, segment: u32) -> io::Result<Arc<Segment>> {
        let open = self.find_open(segment, true)?;
        if !open.is_locked.load(Relaxed) {
            let file = Arc::clone(&open);
            self.patiently(Pace::Quick, None, move |_| file.lock())?;
        }
        Ok(open)
    }

    fn opened(&self, segment: u32, to_write: bool) -> io::Result<Arc<Segment>> {
        let closed = {
            let mut open = self.state.open.lock();
            if let Some(known) = open.find(segment, to_write) {
                return Ok(known);
            }
            open.closed
        };
        let new = match self.open_segment(segment, true) {
            Err(e) if is_read_only(&e) && !to_write => self.open_segment(segment, false)?,
            new => new?,
        };
        let most = open_max(kvferry_sys::fd::limit(), self.direct, self.directories);
        let mut open = self.state.open.lock();
        if let Some(known) = open.find(segment, to_write) {
            // Another thread was faster.
            return Ok(known);
        }
        if open.closed != closed {
            return Ok(new);
        }
        let oldest = open.add(segment, &new, most);
        drop(open);
        // Not under the lock: to close a file may wait for the device.
        drop(oldest);
        Ok(new)
    }

    fn open_segment(&self, segment: u32, is_writable: bool) -> io::Result<Arc<Segment>> {
        let path = self.path_of(segment);
        step(|| Op::Open { path: path.clone(), to_write: is_writable }, || Ok(()))?;
        let file = owner::open(&path, is_writable, &self.user)?;
        // Behind it: a device that is mounted over the directory hides the file, and what is found is the device's.
        self.check()?;
        let options =
            if is_writable { FileOptions::read_write() } else { FileOptions::read_only() };
        self.register(path, file, options, is_writable)
    }

    /// The agent gets the file that was looked at, whatever its name leads to by then.
    fn register(
        &self,
        path: PathBuf,
        file: File,
        options: FileOptions,
        is_writable: bool,
    ) -> io::Result<Arc<Segment>> {
        let options = options.direct(self.direct).name(path);
        let region =
            self.agent.register_file(file.try_clone()?.into(), &options).map_err(system_error)?;
        Ok(Arc::new(Segment {
            agent: self.agent.clone(),
            file: Tracked::new(file),
            region,
            is_writable,
            is_locked: AtomicBool::new(false),
            is_left: AtomicBool::new(false),
        }))
    }

    /// See [`super::Directories::is_written_late`].
    pub(super) fn is_written_late(self: &Arc<Self>, segment: u32) -> bool {
        let check = move |it: &Self| it.opened(segment, true)?.check_unwritten();
        match self.patiently(Pace::Quick, None, check) {
            Ok(()) => false,
            // A file that is gone, or can't be opened, can't be begun either.
            Err(e) => is_written_late(&e) || is_hang(&e) || !is_of_device(&e),
        }
    }

    /// See [`super::Directories::unlock`].
    pub(super) fn unlock(self: &Arc<Self>, segment: u32) -> io::Result<()> {
        if self.known(segment).is_none_or(|it| !it.is_locked.load(Relaxed)) {
            return Ok(());
        }
        // A file server may be asked for it.
        self.patiently(Pace::Quick, Some(segment), move |it| {
            it.unlock_at_end(segment);
            Ok(())
        })
    }

    /// The part of [`super::Directories::unlock_at_end`] that concerns one directory.
    pub(super) fn unlock_at_end(&self, segment: u32) {
        if let Some(open) = self.known(segment) {
            open.unlock();
        }
    }

    fn known(&self, segment: u32) -> Option<Arc<Segment>> {
        self.state.open.lock().files.get(&segment).map(|(it, _)| Arc::clone(it))
    }

    #[cfg(test)]
    pub(super) fn close_all(&self) {
        self.state.open.lock().files.clear();
    }

    /// Closes a segment's file once nothing reads it.
    pub(super) fn close(&self, segment: u32) {
        let Some(closed) = self.state.open.lock().close(segment) else { return };
        if self.directories > 1 {
            // Its last user waits for the device, if it hangs.
            let _ = self.helpers.submit(Box::new(move || drop(closed)));
        }
    }

    /// See [`super::Directories::close_files`].
    pub(super) fn close_files(&self) {
        let files = {
            let mut open = self.state.open.lock();
            open.closed += 1;
            std::mem::take(&mut open.files)
        };
        if self.directories > 1 {
            // As in `close`.
            let _ = self.helpers.submit(Box::new(move || drop(files)));
        }
    }

    /// See [`super::Directories::forget_cached`].
    pub(super) fn forget_cached(self: &Arc<Self>, segment: u32) {
        let _ = self.patiently(Pace::Quick, None, move |it| {
            kvferry_sys::file::forget_cached(&it.opened(segment, false)?.file);
            Ok(())
        });
    }

    /// See [`super::Directories::ensure`].
    pub(super) fn ensure(self: &Arc<Self>, segment: u32) -> io::Result<()> {
        // It is used anew.
        self.state.unsynced.lock().remove(&segment);
        // First: it takes less time to find out that the device hangs.
        let exists = self.patiently(Pace::Quick, Some(segment), move |it| {
            Ok(std::fs::symlink_metadata(it.path_of(segment)).is_ok())
        });
        exists?;
        self.patiently(Pace::Slow, Some(segment), move |it| it.ensure_now(segment))
    }

    fn ensure_now(&self, segment: u32) -> io::Result<()> {
        self.check()?;
        match std::fs::symlink_metadata(self.path_of(segment)) {
            Ok(file) if !file.is_symlink() && file.len() == self.segment_bytes => {
                return self.opened(segment, true)?.check_unwritten();
            }
            Ok(_) => self.remove_now(segment)?,
            Err(e) if e.kind() == io::ErrorKind::NotFound => self.close(segment),
            Err(e) => return Err(e),
        }
        self.change(1, || {
            self.create_now(segment).inspect_err(|_| {
                let _ = self.remove_file(segment);
            })
        })
    }

    /// Fails if the directory is not the store's any more, such as the empty folder that a device was mounted at, or
    /// another device than when it was opened.
    fn check(&self) -> io::Result<()> {
        if !self.is_marked && !self.is_lost.load(Relaxed) {
            return Ok(());
        }
        let path = &self.path;
        match Superblock::read_own(path, &self.user) {
            Ok(Some((it, _)))
                if it.store == self.store
                    && it.directory as usize == self.number
                    && self.is_same(it.id) =>
            {
                Ok(())
            }
            Err(log::Error::Directory { source, .. }) => Err(source),
            Err(refused @ log::Error::Refused(_)) => {
                Err(io::Error::new(io::ErrorKind::PermissionDenied, refused))
            }
            _ => {
                let what = format!("{} is not a directory of the store any more", path.display());
                Err(io::Error::new(io::ErrorKind::NotFound, what))
            }
        }
    }

    /// Whether the directory with the id that was found is the one that all processes of the store use. One that was lost
    /// gets the id that is found first.
    fn is_same(&self, found: u64) -> bool {
        match self.index.get() {
            Some(index) => index.agree_on_directory(self.number, found) == found,
            None => [0, found].contains(&self.id),
        }
    }

    pub(super) fn create(self: &Arc<Self>, segment: u32) -> io::Result<()> {
        let create = move |it: &Self| it.change(1, || it.create_now(segment));
        self.patiently(Pace::Slow, Some(segment), create)
    }

    fn create_now(&self, segment: u32) -> io::Result<()> {
        let path = self.path_of(segment);
        let create = || {
            // A file that is there, or a link, was not made by this process: it is not used.
            let file = private::create(&path)?;
            self.register(path.clone(), file, FileOptions::create(self.segment_bytes), true)
        };
        step(|| Op::Create { path: path.clone(), len: self.segment_bytes }, create)?;
        self.named().remove(&segment);
        Ok(())
    }

    pub(super) fn remove(self: &Arc<Self>, segment: u32) -> io::Result<()> {
        self.patiently(Pace::Slow, Some(segment), move |it| it.remove_now(segment))
    }

    fn remove_now(&self, segment: u32) -> io::Result<()> {
        self.change(-1, || self.remove_file(segment))
    }

    fn remove_file(&self, segment: u32) -> io::Result<()> {
        self.close(segment);
        let path = self.path_of(segment);
        let removed = step(|| Op::Remove(path.clone()), || std::fs::remove_file(&path));
        // Once more: it may have been opened before it was removed.
        self.close(segment);
        removed
    }

    pub(super) fn read_at(
        self: &Arc<Self>,
        segment: u32,
        offset: u64,
        into: &mut [u8],
    ) -> io::Result<()> {
        let read = move |it: &Self, into: &mut [u8]| {
            let file = it.opened(segment, false)?;
            step(|| Op::Read(it.path_of(segment)), || file.file.read_exact_at(into, offset))
        };
        if self.directories == 1 {
            let _entered = self.enter(Pace::Quick)?;
            return read(self, into);
        }
        let (mut buffer, len) = (self.spare(), into.len());
        let bytes = self.patiently(Pace::Quick, Some(segment), move |it| {
            buffer.resize(len, 0);
            read(it, &mut buffer).map(|()| buffer)
        })?;
        into.copy_from_slice(&bytes);
        self.keep(bytes);
        Ok(())
    }

    pub(super) fn write_at(
        self: &Arc<Self>,
        segment: u32,
        offset: u64,
        bytes: &[u8],
    ) -> io::Result<()> {
        let write = move |it: &Self, bytes: &[u8]| {
            let file = it.opened(segment, true)?;
            let op = || Op::write(it.path_of(segment), offset, bytes);
            step(op, || file.file.write_all_at(bytes, offset))
        };
        if self.directories == 1 {
            let _entered = self.enter(Pace::Quick)?;
            return write(self, bytes);
        }
        let mut buffer = self.spare();
        buffer.clear();
        buffer.extend_from_slice(bytes);
        let buffer = self
            .patiently(Pace::Quick, Some(segment), move |it| write(it, &buffer).map(|()| buffer))?;
        self.keep(buffer);
        Ok(())
    }

    fn spare(&self) -> Vec<u8> {
        std::mem::take(&mut *self.state.spare.lock())
    }

    fn keep(&self, buffer: Vec<u8>) {
        *self.state.spare.lock() = buffer;
    }

    pub(super) fn sync(self: &Arc<Self>, segment: u32) -> io::Result<()> {
        if self.state.unsynced.lock().remove(&segment) {
            return Err(io::Error::from_raw_os_error(EIO));
        }
        self.carry_out(Pace::Slow, OperationKind::Sync, Some(segment), move |it| {
            it.sync_now(segment)
        })
    }

    fn sync_now(&self, segment: u32) -> io::Result<()> {
        step(
            || Op::SyncSegment(self.path_of(segment)),
            || {
                let file = self.opened(segment, false)?;
                step(|| Op::Sync(self.path_of(segment)), || file.file.sync_data())?;
                let is_named = self.named().contains(&segment);
                if !is_named {
                    sync_directory(&self.path)?;
                    self.named().insert(segment);
                }
                Ok(())
            },
        )
    }

    /// Whether segments can be written to. It is known for a moment.
    pub(super) fn is_writable(self: &Arc<Self>) -> bool {
        let known = *self.state.writable.lock();
        match known {
            _ if self.gate.is_hanging() => false,
            Some((at, is_writable)) if at.elapsed() < KNOWN_FOR => is_writable,
            _ => self.patiently(Pace::Quick, None, |it| Ok(it.find_writable())).unwrap_or(false),
        }
    }

    fn find_writable(&self) -> bool {
        let superblock = self.path.join(log::superblock::FILE);
        let open = || private::open(&superblock, true);
        let is_writable = match step(|| Op::Open { path: superblock.clone(), to_write: true }, open)
        {
            Ok(_) => true,
            // Of format 1.
            Err(e) => e.kind() == io::ErrorKind::NotFound && self.path.exists(),
        };
        *self.state.writable.lock() = Some((Instant::now(), is_writable));
        is_writable
    }

    /// See [`super::Directories::is_lost`].
    pub(super) fn is_lost(self: &Arc<Self>, segment: u32, offset: u64, len: u32) -> bool {
        let read = self.patiently(Pace::Quick, None, move |it| {
            // The file that is found there may be another device's.
            it.check()?;
            let mut bytes = vec![0; usize::try_from(len).expect("at most a segment")];
            let path = it.path_of(segment);
            let read = || {
                private::open(&path, false).and_then(|file| file.read_exact_at(&mut bytes, offset))
            };
            step(|| Op::Read(path.clone()), read)
        });
        read.is_err_and(|e| is_gone(&e))
    }
}
