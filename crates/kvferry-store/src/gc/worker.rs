//! The thread of a process that seals its segments and, in the keeper, frees space.
//!
//! Most of both is to wait for the device. While puts wait for space, a second thread seals, beside the one that frees
//! segments: what was put last is not what is freed next.

use crate::core::Core;
use crate::gc::keeper::Keeper;
use crate::gc::sealing::{SealScope, seal};
use crate::index::{Member, MemberId};
use crate::membership::Keep;
use crate::writer::Writer;
use kvferry_sys::poll::EventFd;
use kvferry_sys::sync::{Condvar, Mutex};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// No put for so long is a pause.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest time until a keeper that can free no segment looks again. After so long without one, it is logged.
const LOOK_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Worker {
    core: Arc<Core>,
    pub(crate) writer: Writer,
    tasks: Mutex<Tasks>,
    changed: Condvar,
    /// Ends the freeing of space early.
    is_stopping: AtomicBool,
    /// Signalled when members are to seal what they do not write to.
    asks_to_seal: EventFd,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct Tasks {
    look: bool,
    /// Set when this process has become the keeper.
    begin: bool,
    /// Processes have left: there may be something to repair.
    repair: bool,
    /// The keeper finds no segment that it could free.
    seal: bool,
    stop: bool,
}

impl Tasks {
    fn is_pause(&self) -> bool {
        !(self.look || self.begin || self.repair || self.seal || self.stop)
    }
}

/// Times at which a keeper looks again if it can free no segment, or waits for the end of a process.
#[derive(Debug, Default)]
struct Retries {
    /// The time between two looks, and when the next one is due. `None`: none is.
    next: Option<(Duration, Instant)>,
    /// Time since which no look has found a segment that could be freed.
    stuck_since: Option<Instant>,
    /// Set once this was logged.
    is_told: bool,
}

impl Retries {
    fn left(&self, now: Instant) -> Option<Duration> {
        self.next.map(|(_, at)| at.saturating_duration_since(now))
    }

    fn is_due(&self, now: Instant) -> bool {
        self.left(now).is_some_and(|left| left.is_zero())
    }

    /// Notes how a look has ended. Looks that others ask for do not change when the next one is due.
    fn looked(&mut self, now: Instant, is_stuck: bool, awaits_end: bool) {
        let is_due = self.is_due(now);
        let after = |every| Some((every, now + every));
        self.next = match self.next {
            _ if !is_stuck && !awaits_end => None,
            None => after(PAUSE),
            Some((every, _)) if is_due => after((every * 2).min(LOOK_MAX)),
            waits => waits,
        };
        self.stuck_since = is_stuck.then(|| self.stuck_since.unwrap_or(now));
        self.is_told &= is_stuck;
    }

    /// Whether no segment could be freed for so long that it is to be logged.
    fn is_stuck_for_long(&self, now: Instant) -> bool {
        !self.is_told && self.stuck_since.is_some_and(|since| now - since >= LOOK_MAX)
    }
}

impl Worker {
    pub(crate) fn start(core: Arc<Core>) -> io::Result<Arc<Self>> {
        let worker = Arc::new(Self {
            core,
            writer: Writer::default(),
            tasks: Mutex::default(),
            changed: Condvar::new(),
            is_stopping: AtomicBool::new(false),
            asks_to_seal: EventFd::new()?,
            thread: Mutex::default(),
        });
        let run = Arc::clone(&worker);
        let thread = kvferry_sys::thread::spawn("kvferry-store-gc".into(), move || run.run())?;
        *worker.thread.lock() = Some(thread);
        Ok(worker)
    }

    /// Has the thread look whether there is something to do.
    pub(crate) fn wake(&self) {
        self.ask(|tasks| tasks.look = true);
    }

    /// Seals what this process has written, and ends the thread. Idempotent.
    pub(crate) fn stop(&self) {
        self.is_stopping.store(true, Ordering::Relaxed);
        self.ask(|tasks| tasks.stop = true);
        if let Some(thread) = self.thread.lock().take() {
            let _ = thread.join();
        }
    }

    fn ask(&self, change: impl FnOnce(&mut Tasks)) {
        change(&mut self.tasks.lock());
        self.changed.notify_one();
    }

    fn run(&self) {
        let mut is_keeper = false;
        let mut keeper: Option<Keeper> = None;
        let mut begun = 0;
        let mut retries = Retries::default();
        // Operations that were given up, as a device hangs, are in progress.
        let mut awaits_device = false;
        // The last look has left work.
        let mut goes_on = false;
        loop {
            let at_most = match goes_on {
                true => Some(Duration::ZERO),
                false => retries.left(Instant::now()).or(awaits_device.then_some(PAUSE)),
            };
            let mut tasks = self.next_tasks(at_most);
            tasks.look |= goes_on || retries.is_due(Instant::now());
            // The time since the last look is no pause.
            let is_quiet = !goes_on && self.writer.begun() == begun;
            begun = self.writer.begun();
            if tasks.stop {
                break;
            }
            is_keeper |= tasks.begin;
            if tasks.begin
                && let Some(mut keeper) = keeper.take()
            {
                keeper.abandon();
            }
            goes_on = false;
            let work = || {
                // What waits for a directory that hangs.
                self.core.seal_kept(seal);
                self.core.settle_late();
                let which =
                    if is_quiet || self.is_short() { SealScope::Full } else { SealScope::Excess };
                let looks = is_keeper && !tasks.is_pause();
                let seals_beside = looks && keeper.as_mut().is_some_and(Keeper::is_pressed);
                if !seals_beside {
                    // First: the keeper frees sealed segments only, and would evict more than it must.
                    self.writer.seal(&self.core, which);
                }
                if tasks.seal && is_quiet {
                    // This process holds a segment and puts nothing, and others need space.
                    self.writer.seal(&self.core, SealScope::All);
                }
                if looks {
                    let new = || Keeper::new(Arc::clone(&self.core));
                    let keeper = keeper.get_or_insert_with(new);
                    if tasks.repair || keeper.awaits_end() {
                        keeper.repair();
                    }
                    let is_sealed = if seals_beside && self.writer.has_full() {
                        self.seal_beside(which, || keeper.run_once(&self.is_stopping))
                    } else {
                        keeper.run_once(&self.is_stopping);
                        false
                    };
                    // What is sealed now may be what could not be freed.
                    goes_on = keeper.goes_on() || is_sealed;
                    let now = Instant::now();
                    retries.looked(now, keeper.is_stuck(), keeper.awaits_end());
                    if keeper.is_stuck() {
                        retries.is_told |= retries.is_stuck_for_long(now) && self.core.stuck();
                        if is_quiet {
                            self.writer.seal(&self.core, SealScope::All);
                        }
                        self.asks_to_seal.signal();
                    }
                }
            };
            if catch_unwind(AssertUnwindSafe(work)).is_err() {
                // What it knows may be half changed. The index is as it was: all processes change it so that it
                // is right at each moment.
                tracing::error!("the store's thread that frees space has panicked; it begins anew");
                if let Some(mut keeper) = keeper.take() {
                    keeper.abandon();
                }
            }
            awaits_device = self.core.awaits_device();
        }
        if let Some(keeper) = &mut keeper {
            keeper.stop();
        }
        self.writer.seal(&self.core, SealScope::All);
    }

    /// Seals segments on another thread, while this one does something else. Returns whether one was sealed.
    fn seal_beside(&self, which: SealScope, work: impl FnOnce()) -> bool {
        let is_sealed = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let seal = || {
                is_sealed.store(self.writer.seal(&self.core, which), Ordering::Relaxed);
            };
            let thread = std::thread::Builder::new().name("kvferry-store-seal".into());
            // Where no thread can be had, this one seals first.
            if thread.spawn_scoped(scope, seal).is_err() {
                seal();
            }
            work();
        });
        is_sealed.into_inner()
    }

    /// Whether the keeper may soon need the space of segments that are not sealed.
    fn is_short(&self) -> bool {
        self.core.free_segments() <= 2 * self.core.wanted_segments()
    }

    /// Waits for tasks: at most for this time, if given; while segments wait to be sealed, for no longer than puts
    /// pause.
    fn next_tasks(&self, at_most: Option<Duration>) -> Tasks {
        let idle = |tasks: &mut Tasks| tasks.is_pause();
        let tasks = self.tasks.lock();
        let at_most = match self.writer.has_full() {
            true => Some(at_most.unwrap_or(PAUSE).min(PAUSE)),
            false => at_most,
        };
        let mut tasks = self.changed.wait_while(tasks, at_most, idle);
        std::mem::take(&mut *tasks)
    }
}

impl Keep for Worker {
    fn member(&self) -> &Member {
        &self.core.member
    }

    fn became_keeper(&self) {
        self.ask(|tasks| tasks.begin = true);
    }

    fn connected(&self, member: MemberId) {
        self.core.connected(member);
    }

    fn left(&self, member: MemberId) {
        self.core.hung_up(member);
        self.ask(|tasks| tasks.repair = true);
    }

    fn woken(&self) {
        self.wake();
    }

    fn asks_to_seal(&self) -> &EventFd {
        &self.asks_to_seal
    }

    fn asked_to_seal(&self) {
        self.ask(|tasks| tasks.seal = true);
    }

    fn wait_quiet(&self) {
        self.core.wait_quiet();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LITTLE: Duration = Duration::from_millis(1);

    #[test]
    fn that_no_space_can_be_freed_is_logged_once_after_seconds_however_often_puts_ask() {
        let mut now = Instant::now();
        let (began, mut retries) = (now, Retries::default());
        while now - began < LOOK_MAX {
            assert!(!retries.is_stuck_for_long(now), "after {:?}", now - began);
            retries.looked(now, true, false);
            now += LITTLE;
        }
        retries.looked(now, true, false);
        assert!(retries.is_stuck_for_long(now));
        retries.is_told = true;
        retries.looked(now + LOOK_MAX, true, false);
        assert!(!retries.is_stuck_for_long(now + 2 * LOOK_MAX));
        // It has been freed, and is not any more.
        retries.looked(now, false, false);
        retries.looked(now, true, false);
        assert!(!retries.is_stuck_for_long(now + LOOK_MAX - LITTLE));
        assert!(retries.is_stuck_for_long(now + LOOK_MAX));
    }

    #[test]
    fn the_time_between_two_looks_grows_only_with_looks_that_were_due() {
        let mut now = Instant::now();
        let mut retries = Retries::default();
        assert_eq!(retries.left(now), None);
        for _ in 0..20 {
            retries.looked(now, true, false);
        }
        assert_eq!(retries.left(now), Some(PAUSE));
        now += PAUSE;
        retries.looked(now, false, true);
        assert_eq!(retries.left(now), Some(2 * PAUSE));
        for _ in 0..20 {
            now += LOOK_MAX;
            retries.looked(now, false, true);
        }
        assert_eq!(retries.left(now), Some(LOOK_MAX));
        retries.looked(now, false, false);
        assert_eq!(retries.left(now), None);
    }
}
