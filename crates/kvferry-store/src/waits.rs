//! Waits for a free segment, and for a lock of the index.

use crate::index::Member;
use crate::threads::task_pool::after;
use kvferry_sys::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// Longest time that blocks in host memory wait while no segment is freed, or, in a pass for all, for the lock of one.
pub(crate) const NO_SPACE_MAX: Duration = Duration::from_secs(if cfg!(test) { 1 } else { 10 });
/// Interval between tries of blocks that are left, while no segment is freed.
pub(crate) const RETRY_EVERY: Duration = Duration::from_secs(1);
/// Longest wait of the last blocks of a store that is closed for a keeper that does not answer.
const ANSWER_MAX: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 10 });
/// Time for which it is remembered that no segment was freed, if nothing asks for space.
const DRY_FOR: Duration = Duration::from_secs(10);

/// Limits of the waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// End of the wait. `None`: it lasts as long as segments are freed, also while the store is being closed.
    pub(crate) until: Option<Instant>,
    /// Longest time in which no segment is freed. Time that other threads have waited in vain counts.
    dry: Duration,
    /// Shortest wait, even if `dry` has passed.
    last: Option<LastTry>,
    /// End of the wait for a lock of the index that another thread or process holds. `None`: it is tried once.
    lock_until: Option<Instant>,
}

/// Last chance of blocks while the store is being closed: the keeper looks once more for a segment that it can free.
#[derive(Clone, Copy, Debug)]
struct LastTry {
    since: Instant,
    /// [`crate::index::Index::vain_looks`] at that time.
    vain_looks: u32,
}

impl LastTry {
    fn left(&self, member: &Member) -> Duration {
        // A look that had begun before may have seen less than the next one.
        let has_looked = member.vain_looks().wrapping_sub(self.vain_looks) > 1;
        let in_all = if has_looked { RETRY_EVERY } else { ANSWER_MAX };
        in_all.saturating_sub(self.since.elapsed())
    }
}

impl Patience {
    /// Patience of a pass over the blocks that wait in host memory. One that is not `is_for_all` leaves blocks whose lock is
    /// held to a later one.
    pub(crate) fn behind(is_for_all: bool) -> Self {
        let lock_until = is_for_all.then(|| after(Instant::now(), NO_SPACE_MAX));
        Self { until: None, dry: NO_SPACE_MAX, last: None, lock_until }
    }

    /// Patience of blocks that wait there when the store is closed.
    pub(crate) fn last(member: &Member) -> Self {
        let last = LastTry { since: Instant::now(), vain_looks: member.vain_looks() };
        Self { last: Some(last), ..Self::behind(true) }
    }

    /// Patience of a put that waits for `dry` at most, from `since` on.
    pub(crate) fn of_put(dry: Duration, since: Instant) -> Self {
        let until = Some(after(since, dry));
        Self { until, dry, last: None, lock_until: until }
    }
}

/// State that the threads of this process share while they wait.
#[derive(Debug, Default)]
pub(crate) struct SpaceWaits {
    dry: Mutex<Option<DrySpell>>,
    /// The store is being closed: no call waits for space any more.
    is_closing: AtomicBool,
    #[cfg(test)]
    count: std::sync::atomic::AtomicUsize,
    /// Number of times that a block whose lock was held was tried again.
    #[cfg(test)]
    pub(crate) lock_tries: std::sync::atomic::AtomicUsize,
}

/// No segment was free, and none was freed.
#[derive(Clone, Copy, Debug)]
struct DrySpell {
    /// [`crate::index::Index::freed`], all the time.
    freed: u32,
    since: Instant,
    /// Time at which space was last asked for.
    last: Instant,
}

impl SpaceWaits {
    /// Number of times that a thread has waited.
    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    #[cfg(test)]
    pub(crate) fn note_wait(&self) {
        self.count.fetch_add(1, Relaxed);
    }

    /// No call waits for space from now on.
    pub(crate) fn end(&self) {
        self.is_closing.store(true, Relaxed);
    }

    /// Returns since when space is asked for in vain, while the count of freed segments is `freed`. Notes that it is
    /// asked for.
    fn dry_since(&self, freed: u32) -> Instant {
        let (mut dry, now) = (self.dry.lock(), Instant::now());
        let goes_on = |it: &DrySpell| it.freed == freed && now.duration_since(it.last) < DRY_FOR;
        let since = dry.filter(goes_on).map_or(now, |it| it.since);
        *dry = Some(DrySpell { freed, since, last: now });
        since
    }

    /// True while a block whose lock is held may be tried again.
    pub(crate) fn may_wait_for_lock(&self, patience: Patience) -> bool {
        let is_ended = patience.until.is_some() && self.is_closing.load(Relaxed);
        !is_ended && patience.lock_until.is_some_and(|until| Instant::now() < until)
    }

    /// Remaining time to wait for space.
    pub(crate) fn left(&self, member: &Member, freed: u32, patience: Patience) -> Duration {
        let waited = self.dry_since(freed).elapsed();
        let left = patience.dry.saturating_sub(waited);
        match patience.until {
            Some(_) if self.is_closing.load(Relaxed) => Duration::ZERO,
            Some(until) => left.min(until.saturating_duration_since(Instant::now())),
            None => left.max(patience.last.map_or(Duration::ZERO, |it| it.left(member))),
        }
    }
}
