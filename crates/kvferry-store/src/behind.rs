//! Writes blocks that wait in host memory to the disk.
//!
//! A block waits in the tier in host memory ([`crate::host`]), which owns its bytes, until it is on the disk. One
//! thread writes what waits, in the order in which it was put, in *passes*: from the oldest block to the newest one
//! there was at the beginning. Where no segment is free, a pass waits as long as segments are freed; after
//! [`NO_SPACE_MAX`] in which none was, or at an error of a device, it ends, and all that waits is *left*: it says why
//! it could not be written. Blocks that are left wait as before. Where the thread can't be started, the threads that
//! put and sync carry the passes out, and the one that closes the store the last.
//!
//! A pass begins when a put or a sync asks for it, when a segment was freed since a pass that left blocks, and each
//! [`RETRY_EVERY`] while blocks wait. The last one begins when the store is closed. A pass that begins with a block
//! that was left tries this one alone first. A block whose lock a stopped process holds is left out of passes for a
//! time, unless a sync asks for one, or the store is closed: each try costs space on the disk.
//!
//! Where one of several directories hangs, a write to it is given up, and the same pass writes its blocks to another
//! one. Their memory is the tier's own, and stays until the device has answered. So each pass ends, even while a device
//! hangs, and callers that wait for a pass need not give up.
//!
//! Calls ask the tier about a block: a block that waits is present, and a block that is left was not stored. A sync
//! succeeds if a pass that began after it has left none of the blocks that were put before it.

use crate::host::{Host, Waiting};
use crate::index::Member;
use crate::put::{Patience, WRITE_BEHIND};
use crate::stats::Counters;
use crate::store::{CHUNK_BYTES, Inner, NotStored, Put, Refusal, Space};
use crate::sync::lock;
use crate::task_pool::join_unless;
use crate::writer::Candidate;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(test)]
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Longest time that a pass waits while no segment is freed.
pub(crate) const NO_SPACE_MAX: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Interval between tries of blocks that are left, while no segment is freed.
pub(crate) const RETRY_EVERY: Duration = Duration::from_secs(1);
/// The least time between two passes that nothing has asked for.
const PASS_EVERY: Duration = Duration::from_millis(20);

/// The thread that writes, and what it is asked for.
#[derive(Debug, Default)]
pub(crate) struct Behind {
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
    /// The thread waits in [`crate::index::Index::wait_freed`], and not for [`Behind::changed`].
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

impl Behind {
    /// Asks for a pass. Returns its number.
    pub(crate) fn ask(&self, space: &Space) -> u64 {
        self.ask_for(space, false)
    }

    /// Like [`Behind::ask`]; if `all`, also for blocks that are to be tried later.
    fn ask_for(&self, space: &Space, all: bool) -> u64 {
        let asked = self.change(&space.store.core.member, |work| {
            work.asked += 1;
            work.is_for_all |= all;
            work.asked
        });
        let mut thread = lock(&self.thread);
        if !self.start(&mut thread, space) {
            // By this thread, then, while the lock keeps others from doing the same.
            self.pass_for(asked, space, Patience::behind(), all);
        }
        asked
    }

    /// Starts the thread unless it runs. False if it can't be started.
    fn start(&self, thread: &mut Option<JoinHandle<()>>, space: &Space) -> bool {
        #[cfg(test)]
        if self.has_no_thread.load(Relaxed) {
            return false;
        }
        if thread.is_none() {
            let own = space.for_task();
            let serve = move || own.store.behind.serve(&own);
            *thread = kvferry_sys::thread::spawn("kvferry-store-io".into(), serve).ok();
        }
        thread.is_some()
    }

    /// Waits until the blocks with numbers below `end` are written, or a pass that was asked for has tried them; until
    /// `until`, or until the store is closed, if a time is given.
    pub(crate) fn wait(&self, host: &Host, asked: u64, end: u64, until: Option<Instant>) {
        let mut work = lock(&self.work);
        while !work.has_tried(asked, end) && host.has_waiting(end) {
            let Some(until) = until else {
                work = self.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || work.is_hurried {
                return;
            }
            let waited = self.changed.wait_timeout(work, left);
            work = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Returns how many of the blocks that were put before can't be written; the others are.
    pub(crate) fn drain(&self, space: &Space, host: &Host) -> usize {
        let end = host.next_number();
        if !host.has_waiting(end) {
            return 0;
        }
        let asked = self.ask_for(space, true);
        self.wait(host, asked, end, None);
        host.left(end)
    }

    /// Callers that wait for space, and have something else to say, wait no longer.
    pub(crate) fn hurry(&self) {
        lock(&self.work).is_hurried = true;
        self.changed.notify_all();
    }

    /// Ends the thread, after one more pass. Nothing asks any more.
    /// If it is at work when `gives_up` says so, it ends later.
    pub(crate) fn close_unless(&self, space: &Space, gives_up: impl Fn() -> bool) {
        let Some(host) = &space.store.host else { return };
        let member = &space.store.core.member;
        let asked = self.change(member, |work| {
            work.is_closing = true;
            work.asked
        });
        let mut thread = lock(&self.thread);
        if thread.is_none() && !host.has_waiting(u64::MAX) {
            return;
        }
        if self.start(&mut thread, space)
            && let Some(thread) = thread.take()
        {
            join_unless(thread, gives_up);
        } else {
            self.pass_for(asked, space, Patience::last(member), true);
        }
    }

    /// Changes what the thread is asked for, and wakes it.
    fn change<T>(&self, member: &Member, change: impl FnOnce(&mut Work) -> T) -> T {
        let mut work = lock(&self.work);
        let changed = change(&mut work);
        let waits_for_space = work.waits_for_space;
        drop(work);
        self.changed.notify_all();
        if waits_for_space {
            member.wake_waiting();
        }
        changed
    }

    fn serve(&self, space: &Space) {
        let Some(host) = &space.store.host else { return };
        let member = &space.store.core.member;
        // Of the last pass: when it ended, and how many segments had been freed when it began.
        let mut last: Option<(Instant, u32)> = None;
        loop {
            let mut work = lock(&self.work);
            while !work.is_due() {
                #[cfg(test)]
                {
                    work.looks += 1;
                }
                let has_left = !host.next_waiting(0..u64::MAX, 0, None).is_empty();
                let Some((at, freed)) = last.filter(|_| has_left) else {
                    work = self.changed.wait(work).unwrap_or_else(PoisonError::into_inner);
                    continue;
                };
                let is_freed = member.freed() != freed;
                let after = if is_freed { PASS_EVERY } else { RETRY_EVERY };
                let left = after.saturating_sub(at.elapsed());
                if left.is_zero() {
                    break;
                }
                if is_freed {
                    let waited = self.changed.wait_timeout(work, left);
                    work = waited.unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
                work.waits_for_space = true;
                drop(work);
                member.wait_freed(freed, left, || lock(&self.work).is_due());
                work = lock(&self.work);
                work.waits_for_space = false;
            }
            let (asked, is_closing) = (work.asked, work.is_closing);
            let is_for_all = std::mem::take(&mut work.is_for_all) || is_closing;
            drop(work);
            let freed = member.freed();
            let patience = if is_closing { Patience::last(member) } else { Patience::behind() };
            self.pass_for(asked, space, patience, is_for_all);
            last = Some((Instant::now(), freed));
            if is_closing {
                return;
            }
        }
    }

    fn pass_for(&self, asked: u64, space: &Space, patience: Patience, is_for_all: bool) {
        let Some(host) = &space.store.host else { return };
        let end = host.next_number();
        let due = (!is_for_all).then(Instant::now);
        lock(&self.work).under_way = Some((asked, 0));
        if catch_unwind(AssertUnwindSafe(|| pass(space, host, end, patience, due))).is_err() {
            host.leave(0..end, NotStored::Failed);
        }
        let mut work = lock(&self.work);
        work.under_way = None;
        work.done = work.done.max(asked);
        #[cfg(test)]
        {
            work.passes += 1;
        }
        self.changed.notify_all();
    }

    /// The pass that is under way has tried all blocks with numbers below `end`.
    fn note_tried(&self, end: u64) {
        if let Some((_, tried)) = &mut lock(&self.work).under_way {
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
        lock(&self.work).asked
    }

    #[cfg(test)]
    pub(crate) fn passes(&self) -> u64 {
        lock(&self.work).passes
    }

    #[cfg(test)]
    pub(crate) fn looks(&self) -> u64 {
        lock(&self.work).looks
    }
}

/// Writes the blocks that wait with numbers below `end`. Without those that are to be tried after `due`, if it is
/// given.
fn pass(space: &Space, host: &Host, end: u64, patience: Patience, due: Option<Instant>) {
    let Inner { core, behind, .. } = &*space.store;
    let (mut next, mut is_tried) = (0, false);
    // A part is tried once more for each directory that may hang: those that do get nothing meanwhile.
    let mut again = core.disk.count() - 1;
    loop {
        let mut chain = host.next_waiting(next..end, WRITE_BEHIND as u64 * CHUNK_BYTES, due);
        if !is_tried && chain.first().is_some_and(|(_, first)| first.left.is_some()) {
            chain.truncate(1);
        }
        let (Some((first, _)), Some((last, _))) = (chain.first(), chain.last()) else { return };
        let first = *first;
        next = last + 1;
        // Kept, so that a write to a device that hangs is not waited for.
        let candidate = |it: &Waiting| Candidate {
            block: it.record,
            memory: it.block.memory().kept_by(&it.block),
        };
        let candidates: Vec<_> = chain.iter().map(|(_, it)| candidate(it)).collect();
        let mut put = Put::default();
        let hangs = space.write_all(&candidates, patience, &mut put);
        Counters::add(&core.counters.stored, put.stored);
        Counters::add(&core.counters.present, put.present);
        let is_written = |(_, it): &&(u64, Waiting)| {
            if put.refused + put.failed == 0 {
                return true;
            }
            // Another process may have written it, and not synced it.
            let found = core.find_whole(&it.block.key, || it.record.check);
            space.store.worker.writer.note_present(core, found.iter());
            found.is_some()
        };
        host.written(chain.iter().filter(is_written).map(|(number, _)| *number));
        match not_stored(&put) {
            None => is_tried = true,
            Some(NotStored::Failed) if hangs && again > 0 => {
                again -= 1;
                next = first;
                continue;
            }
            // A process that is stopped holds the lock of these blocks. It has nothing to do with others.
            Some(why @ NotStored::Refused(Refusal::Contended)) => {
                host.leave_for_long(chain.iter().map(|(number, _)| *number), why);
            }
            Some(why) => return host.leave(0..end, why),
        }
        behind.note_tried(next);
    }
}

/// The reason why not all blocks of a put were stored; `None` if all were.
fn not_stored(put: &Put) -> Option<NotStored> {
    match put {
        Put { failed: 1.., .. } => Some(NotStored::Failed),
        Put { refused_no_space: 1.., .. } => Some(NotStored::Refused(Refusal::NoSpace)),
        Put { refused_index_full: 1.., .. } => Some(NotStored::Refused(Refusal::IndexFull)),
        Put { refused: 1.., .. } => Some(NotStored::Refused(Refusal::Contended)),
        _ => None,
    }
}
