//! The passes, and the thread that carries them out.

use super::WriteBehind;
use crate::calls::writing::WRITE_BEHIND;
use crate::open_store::OpenStore;
use crate::outcome::{NotStored, Put, Refusal};
use crate::space::{CHUNK_BYTES, Space};
use crate::stats::Counters;
use crate::threads::task_pool::join_unless;
use crate::tiers::host::{HostTier, Waiting};
use crate::waits::{Patience, RETRY_EVERY};
use crate::writer::Candidate;
use std::panic::{AssertUnwindSafe, catch_unwind};
#[cfg(test)]
use std::sync::atomic::Ordering::Relaxed;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The least time between two passes that nothing has asked for.
const PASS_EVERY: Duration = Duration::from_millis(20);

impl WriteBehind {
    /// Asks for a pass. Returns its number.
    pub(crate) fn ask(&self, space: &Space) -> u64 {
        self.ask_for(space, false)
    }

    /// Like [`WriteBehind::ask`]; if `all`, also for blocks that are to be tried later.
    fn ask_for(&self, space: &Space, all: bool) -> u64 {
        let asked = self.change(&space.store.core.member, |work| {
            work.asked += 1;
            work.is_for_all |= all;
            work.asked
        });
        let mut thread = self.thread.lock();
        if !self.start(&mut thread, space) {
            // By this thread, then, while the lock keeps others from doing the same.
            self.pass_for(asked, space, Patience::behind(all), all);
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

    /// Returns how many of the blocks that were put before can't be written; the others are.
    pub(crate) fn drain(&self, space: &Space, host: &HostTier) -> usize {
        let end = host.next_number();
        if !host.has_waiting(end) {
            return 0;
        }
        let asked = self.ask_for(space, true);
        self.wait(host, asked, end, None);
        host.left(end)
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
        let mut thread = self.thread.lock();
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

    fn serve(&self, space: &Space) {
        let Some(host) = &space.store.host else { return };
        let member = &space.store.core.member;
        // Of the last pass: when it ended, and how many segments had been freed when it began.
        let mut last: Option<(Instant, u32)> = None;
        loop {
            let mut work = self.work.lock();
            while !work.is_due() {
                #[cfg(test)]
                {
                    work.looks += 1;
                }
                let has_left = !host.next_waiting(0..u64::MAX, 0, None).is_empty();
                let Some((at, freed)) = last.filter(|_| has_left) else {
                    work = self.changed.wait(work, None);
                    continue;
                };
                let is_freed = member.freed() != freed;
                let after = if is_freed { PASS_EVERY } else { RETRY_EVERY };
                let left = after.saturating_sub(at.elapsed());
                if left.is_zero() {
                    break;
                }
                if is_freed {
                    work = self.changed.wait(work, left);
                    continue;
                }
                work.waits_for_space = true;
                drop(work);
                member.wait_freed(freed, left, || self.work.lock().is_due());
                work = self.work.lock();
                work.waits_for_space = false;
            }
            let (asked, is_closing) = (work.asked, work.is_closing);
            let is_for_all = std::mem::take(&mut work.is_for_all) || is_closing;
            drop(work);
            let freed = member.freed();
            let patience = match is_closing {
                true => Patience::last(member),
                false => Patience::behind(is_for_all),
            };
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
        self.work.lock().under_way = Some((asked, 0));
        if catch_unwind(AssertUnwindSafe(|| pass(space, host, end, patience, due))).is_err() {
            host.leave(0..end, NotStored::Failed);
        }
        let mut work = self.work.lock();
        work.under_way = None;
        work.done = work.done.max(asked);
        #[cfg(test)]
        {
            work.passes += 1;
        }
        self.changed.notify_all();
    }
}

/// Writes the blocks that wait with numbers below `end`. Without those that are to be tried after `due`, if it is
/// given.
fn pass(space: &Space, host: &HostTier, end: u64, patience: Patience, due: Option<Instant>) {
    let OpenStore { core, behind, .. } = &*space.store;
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
            memory: it.block.memory().kept_by(it.block.clone()),
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
        let written = chain.iter().filter(is_written).map(|(number, _)| *number);
        for (key, behind) in host.written(written) {
            space.join_behind(&key, &behind);
        }
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
