//! Steps of an exchange: what workers report, what was copied to slots, and the caller of a fetch, who waits.

use super::machine::Seam;
use super::{Missed, Prompt, Shared, State};
use crate::wakeup::Wakeup;
use crate::worker::Worker;
use kvferry::After;
use kvferry_proto::directory::{ContentKey, Found, Place};
use kvferry_proto::handoff::HandoffId;
use kvferry_sys::sync::MutexGuard;
use std::ops::Range;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Interval at which a fetch that waits asks whether it is interrupted.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);

/// The workers and the directory.
pub(super) struct Carrier<'a> {
    shared: &'a Shared,
    closed: bool,
}

impl Seam for Carrier<'_> {
    fn carry(&mut self, metadata: &[u8], is_computed: bool) {
        if self.closed {
            return;
        }
        for worker in &self.shared.workers {
            // Nothing uses slots that were given back, whatever memory they are in.
            if let Err(error) = worker.apply_after(metadata, || Ok(After::host())) {
                tracing::error!(%error, "a rank can't carry out a step of handoffs");
            }
            worker.fetch();
            if is_computed {
                worker.step_computed(None);
            }
        }
    }

    fn publish(&mut self, key: ContentKey, transfer: &HandoffId) -> bool {
        let told = self.shared.directory.publish(key, transfer);
        if let Err(error) = &told {
            kvferry::warn_limited!(%error, "followers are not told of a prompt");
        }
        told.is_ok()
    }

    fn retract(&mut self, transfer: &HandoffId) {
        self.shared.directory.retract(transfer);
    }
}

impl Shared {
    /// `closed`: nothing is carried to the workers any more.
    pub(super) const fn seam(&self, closed: bool) -> Carrier<'_> {
        Carrier { shared: self, closed }
    }

    pub(super) fn address(&self, place: Place) -> &str {
        self.follows.get(place.0).map_or("", String::as_str)
    }

    pub(super) fn run(shared: &Weak<Self>, wakeup: &Wakeup) {
        loop {
            wakeup.wait(None);
            let Some(shared) = shared.upgrade() else { return };
            let mut state = shared.state.lock();
            if state.closed {
                return;
            }
            shared.pump(&mut state);
        }
    }

    /// Takes the requests on: announces what was copied, and takes what the workers report.
    fn pump(&self, State { machine, closed }: &mut State) {
        let seam = &mut self.seam(*closed);
        machine.announce(seam);
        for (rank, reports) in self.workers.iter().map(Worker::reports).enumerate() {
            if let Some(notes) = &reports.notes {
                machine.noted(rank, notes);
            }
            for request in &reports.received {
                if machine.received(rank, request, reports.failed.contains(request)) {
                    self.ended.notify_all();
                }
                if !machine.is_fetched(request) {
                    self.observer.failures.lock().remove(request);
                }
            }
            for request in &reports.sent {
                machine.sent(seam, rank, request);
            }
        }
        machine.carry(seam, None);
    }

    /// Fetches from one publisher. `Ok(None)` if there is nothing to fetch.
    pub(super) fn fetch<'a>(
        &'a self,
        mut guard: MutexGuard<'a, State>,
        prompt: &Prompt,
        first: u32,
        found: &Found,
        (deadline, is_interrupted): (Option<Instant>, &dyn Fn() -> bool),
    ) -> Result<Option<Range<u32>>, Missed> {
        let State { machine, closed } = &mut *guard;
        let Some(request) = machine.begin(&mut self.seam(*closed), prompt, first, found)? else {
            return Ok(None);
        };
        let runs = |state: &mut State| !state.closed && state.machine.is_under_way(&request);
        let mut interrupted = false;
        while runs(&mut guard) && !interrupted {
            let left = deadline.map(|it| it.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            let slice = left.map_or(INTERRUPT_INTERVAL, |left| left.min(INTERRUPT_INTERVAL));
            guard = self.ended.wait_while(guard, slice, runs);
            if runs(&mut guard) {
                drop(guard);
                interrupted = is_interrupted();
                guard = self.state.lock();
            }
        }
        let State { machine, closed } = &mut *guard;
        let seam = &mut self.seam(*closed);
        if machine.abandon(seam, &request) {
            if *closed || interrupted {
                return Ok(None);
            }
            let (address, pause) = (self.address(found.place).to_owned(), Duration::ZERO);
            return Err(Missed::TimedOut { address, pause });
        }
        let why = self.observer.failures.lock().remove(&request);
        match machine.take(seam, &request) {
            // The caller does not take them: the interrupt raises an error there.
            Some(slots) if interrupted => {
                machine.give(slots);
                Ok(None)
            }
            None => Err(Missed::Failed(why.unwrap_or_default())),
            slots => Ok(slots),
        }
    }
}
