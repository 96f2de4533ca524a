//! Announcements that wait for events of the device.

use super::request::{Part, ProducedRequest};
use super::state::Inner;
use super::types::{Announce, ComputeEvent};
use crate::rank::Rank;
use kvferry_proto::WireCode;
use kvferry_sys::sync::{Condvar, Mutex};
use std::collections::VecDeque;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};

/// An announcement that waits for an event.
pub(super) enum Job {
    /// Layers of a step, after those with which the last piece ended.
    Layers(Arc<[Part]>, Range<u32>),
    Step(Arc<[Part]>),
    /// The end of a request, with its side data.
    Finish(Arc<ProducedRequest>, Option<Vec<u8>>),
}

impl Job {
    fn run(self, rank: &Rank, announce: Announce) {
        match self {
            Self::Layers(parts, layers) => parts.iter().for_each(|part| part.layers(rank, &layers)),
            Self::Step(parts) => parts.iter().for_each(|part| part.step(rank, announce)),
            Self::Finish(request, side_data) => request.finish(rank, side_data),
        }
    }

    /// Withdraws the requests of the job: its event never happens, or is never known to have happened.
    fn abandon(self, rank: &Rank, why: &str) {
        let withdraw = |request: &ProducedRequest| request.withdraw(rank, WireCode::Internal, why);
        match self {
            Self::Layers(parts, _) | Self::Step(parts) => {
                parts.iter().for_each(|part| withdraw(part.request()));
            }
            Self::Finish(request, _) => withdraw(&request),
        }
    }
}

/// Jobs with their events, in the order in which the events happen.
#[derive(Default)]
pub(super) struct EventQueue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<(Option<Box<dyn ComputeEvent>>, Job)>,
    /// A thread waits for a job's event, or runs the job.
    busy: bool,
    closed: bool,
}

/// Keeps [`QueueState::busy`] set while it lives.
struct Busy<'a>(&'a EventQueue);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.state.lock().busy = false;
        self.0.changed.notify_one();
    }
}

impl EventQueue {
    /// Runs a job after all earlier ones and once `computed` has happened: on this thread if both are
    /// the case now.
    pub(super) fn run(
        &self,
        computed: Option<Box<dyn ComputeEvent>>,
        job: Job,
        rank: &Rank,
        announce: Announce,
    ) {
        let _together = rank.hold();
        let mut state = self.state.lock();
        let is_first = state.jobs.is_empty() && !state.busy;
        if is_first && computed.as_ref().is_none_or(|event| event.is_ready()) {
            // Later jobs must not overtake this one.
            state.busy = true;
            drop(state);
            let _busy = Busy(self);
            job.run(rank, announce);
            return;
        }
        state.jobs.push_back((computed, job));
        drop(state);
        self.changed.notify_one();
    }

    /// Waits for events and runs their jobs until the queue is closed. Waiting does not keep the
    /// worker half alive: an event of the device may never happen.
    pub(super) fn serve(&self, inner: &Weak<Inner>) {
        loop {
            let idle =
                |state: &mut QueueState| !state.closed && (state.jobs.is_empty() || state.busy);
            let mut state = self.changed.wait_while(self.state.lock(), None, idle);
            if state.closed {
                return;
            }
            let (computed, job) = state.jobs.pop_front().expect("not idle");
            state.busy = true;
            drop(state);
            let busy = Busy(self);
            // The event is the engine's code and may panic.
            let happened = catch_unwind(AssertUnwindSafe(|| {
                let computed = computed.as_ref()?;
                computed.wait(&|| self.state.lock().closed);
                computed.failure()
            }));
            if self.state.lock().closed {
                return;
            }
            let Some(inner) = inner.upgrade() else { return };
            let together = inner.rank().hold();
            match happened {
                Ok(None) => job.run(inner.rank(), inner.config.announce),
                Ok(Some(why)) => job.abandon(inner.rank(), &why),
                Err(_) => job.abandon(inner.rank(), "the event of a layer or step panicked"),
            }
            drop(busy);
            drop(together);
        }
    }

    pub(super) fn len(&self) -> usize {
        let state = self.state.lock();
        state.jobs.len() + usize::from(state.busy)
    }

    pub(super) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        state.jobs.clear();
        drop(state);
        self.changed.notify_all();
    }
}
