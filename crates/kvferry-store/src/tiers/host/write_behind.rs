//! Writes blocks that wait in host memory to the disk.
//!
//! A block waits in the tier in host memory ([`crate::tiers::host`]), which owns its bytes, until it is on the disk. One
//! thread writes what waits, in the order in which it was put, in *passes*: from the oldest block to the newest one
//! there was at the beginning. Where no segment is free, a pass waits as long as segments are freed; after
//! [`NO_SPACE_MAX`](crate::waits::NO_SPACE_MAX) in which none was, or at an error of a device, it ends, and all that waits is *left*: it says why
//! it could not be written. Blocks that are left wait as before. Where the thread can't be started, the threads that
//! put and sync carry the passes out, and the one that closes the store the last.
//!
//! A pass begins when a put or a sync asks for it, when a segment was freed since a pass that left blocks, and each
//! [`RETRY_EVERY`](crate::waits::RETRY_EVERY) while blocks wait. The last one begins when the store is closed. A pass that begins with a block
//! that was left tries this one alone first. A block whose lock a stopped process holds is left out of passes for a
//! time, unless a sync asks for one, or the store is closed: each try costs space on the disk.
//!
//! Where one of several directories hangs, a write to it is given up, and the same pass writes its blocks to another
//! one. Their memory is the tier's own, and stays until the device has answered. So each pass ends, even while a device
//! hangs, and callers that wait for a pass need not give up.
//!
//! Calls ask the tier about a block: a block that waits is present, and a block that is left was not stored. A sync
//! succeeds if a pass that began after it has left none of the blocks that were put before it.

mod passes;

use crate::index::Member;
use crate::tiers::host::HostTier;
use kvferry_sys::sync::{Condvar, Mutex};
#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread::JoinHandle;
use std::time::Instant;

/// The thread that writes, and what it is asked for.
#[derive(Debug, Default)]
pub(crate) struct WriteBehind {
    work: Mutex<Work>,
    changed: Condvar,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The thread can't be started.
    #[cfg(test)]
    has_no_thread: AtomicBool,
}

#[derive(Debug, Default)]
struct Work {
    /// Numbers of the passes that were asked for and that have ended. A pass answers all that were asked for before it.
    asked: u64,
    done: u64,
    /// The next pass is also for blocks that are to be tried later.
    is_for_all: bool,
    /// State of the current pass: the last one of `asked` that it answers, and the number below which it has tried all
    /// blocks.
    under_way: Option<(u64, u64)>,
    /// Callers wait no longer: the store is being closed.
    is_hurried: bool,
    /// The last pass ends the thread.
    is_closing: bool,
    /// The thread waits in [`crate::index::Index::wait_freed`], and not for [`WriteBehind::changed`].
    waits_for_space: bool,
    #[cfg(test)]
    passes: u64,
    /// Number of times that the thread has waited, or looked whether to begin a pass.
    #[cfg(test)]
    looks: u64,
}

impl Work {
    fn is_due(&self) -> bool {
        self.asked != self.done || self.is_closing
    }

    /// Whether a pass that was asked for as number `asked`, or a later one, has tried all blocks with numbers below
    /// `end`.
    fn has_tried(&self, asked: u64, end: u64) -> bool {
        let has_tried = |(answers, tried): (u64, u64)| answers >= asked && tried >= end;
        self.done >= asked || self.under_way.is_some_and(has_tried)
    }
}

impl WriteBehind {
    /// Waits until the blocks with numbers below `end` are written, or a pass that was asked for has tried them; until
    /// `until`, or until the store is closed, if a time is given.
    pub(crate) fn wait(&self, host: &HostTier, asked: u64, end: u64, until: Option<Instant>) {
        let mut work = self.work.lock();
        while !work.has_tried(asked, end) && host.has_waiting(end) {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero() || work.is_hurried) {
                return;
            }
            work = self.changed.wait(work, left);
        }
    }

    /// Callers that wait for space, and have something else to say, wait no longer.
    pub(crate) fn hurry(&self) {
        self.work.lock().is_hurried = true;
        self.changed.notify_all();
    }

    /// Changes what the thread is asked for, and wakes it.
    fn change<T>(&self, member: &Member, change: impl FnOnce(&mut Work) -> T) -> T {
        let mut work = self.work.lock();
        let changed = change(&mut work);
        let waits_for_space = work.waits_for_space;
        drop(work);
        self.changed.notify_all();
        if waits_for_space {
            member.wake_waiting();
        }
        changed
    }

    /// The pass that is under way has tried all blocks with numbers below `end`.
    fn note_tried(&self, end: u64) {
        if let Some((_, tried)) = &mut self.work.lock().under_way {
            *tried = end;
        }
        self.changed.notify_all();
    }

    /// No thread can be started from now on, as beyond the limit of threads.
    #[cfg(test)]
    pub(crate) fn refuse_thread(&self) {
        self.has_no_thread.store(true, Relaxed);
    }

    /// The number of passes that were asked for.
    #[cfg(test)]
    pub(crate) fn asked(&self) -> u64 {
        self.work.lock().asked
    }

    #[cfg(test)]
    pub(crate) fn passes(&self) -> u64 {
        self.work.lock().passes
    }

    #[cfg(test)]
    pub(crate) fn looks(&self) -> u64 {
        self.work.lock().looks
    }
}
