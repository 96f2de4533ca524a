//! A producer's requests on one rank: what of them is computed, and when that is said.
//!
//! The engine says what a step *will* compute when it is scheduled, and that it *was* computed when
//! an event has happened, perhaps long after. In between the request may lose its blocks, and be
//! computed again: each time is an *attempt*, and what belongs to an earlier one is dropped.

use crate::orders::Offer;
use crate::rank::{Fault, Rank};
use crate::worker::{Announce, Computed};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId, Outcome, Progress, Refusal};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A producer's request. Locked for no longer than a call of the protocol takes.
#[derive(Debug)]
pub(crate) struct Produced(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    transfer: HandoffId,
    /// Tokens that are handed over.
    tokens: u32,
    eager: bool,
    attempt: u32,
    /// The protocol knows of it.
    offered: bool,
    /// Blocks that have not been said yet.
    unsaid: Vec<BlockTable>,
    /// Tokens that are there after the steps so far, of this attempt.
    until: u32,
    complete: bool,
    ended: Option<Outcome>,
    held: bool,
}

/// A request's part of a step.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    request: Arc<Produced>,
    attempt: u32,
    /// Tokens there before and after.
    from: u32,
    until: u32,
}

impl Produced {
    pub(crate) fn new(transfer: HandoffId) -> Self {
        Self(Mutex::new(Inner {
            transfer,
            tokens: 0,
            eager: false,
            attempt: 0,
            offered: false,
            unsaid: Vec::new(),
            until: 0,
            complete: false,
            ended: None,
            held: false,
        }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A step is going to compute some of it.
    ///
    /// # Errors
    /// The protocol refuses to offer it.
    pub(crate) fn compute(
        self: &Arc<Self>,
        rank: &Rank,
        offer: Option<Offer>,
        until: u32,
        blocks: Vec<BlockTable>,
    ) -> Result<Option<Part>, Fault> {
        let mut inner = self.lock();
        if inner.ended.is_some() {
            return Ok(None);
        }
        if let Some(offer) = offer {
            (inner.tokens, inner.eager) = (offer.tokens, offer.eager);
            (inner.until, inner.complete) = (0, false);
            inner.unsaid.clear();
            if !inner.offered {
                rank.offer(&inner.transfer)?;
                inner.offered = true;
            }
        }
        if !inner.offered || !inner.add(blocks) {
            return Ok(None);
        }
        let (from, until) = (inner.until, until.min(inner.tokens));
        if until <= from {
            return Ok(None);
        }
        inner.until = until;
        Ok(Some(Part { request: Arc::clone(self), attempt: inner.attempt, from, until }))
    }

    /// Its blocks are gone.
    pub(crate) fn restart(&self, rank: &Rank) {
        let mut inner = self.lock();
        inner.attempt += 1;
        (inner.until, inner.complete) = (0, false);
        inner.unsaid.clear();
        if inner.offered && inner.ended.is_none() {
            match rank.restart(&inner.transfer) {
                // It may have ended just now, which will be said.
                Ok(()) | Err(Fault::Refused(Refusal::Unknown)) => {}
                // It was complete, and some of its readers may be through with it already.
                Err(_) => {
                    let detail = "the producer's request lost its blocks when it was complete";
                    drop(rank.withdraw(&inner.transfer, WireCode::Revoked, detail));
                }
            }
        }
    }

    /// There is nothing to fetch of it any more.
    pub(crate) fn withdraw(&self, rank: &Rank, code: WireCode, detail: &str) {
        let mut inner = self.lock();
        inner.attempt += 1;
        if inner.ended.is_none() {
            drop(rank.withdraw(&inner.transfer, code, detail));
        }
    }

    /// The request has ended, its blocks are kept. In order with what was computed of it.
    fn finish(&self, rank: &Rank, side_data: Option<Vec<u8>>) {
        let mut inner = self.lock();
        if inner.ended.is_some() || inner.complete || !inner.offered {
            return;
        }
        if inner.until < inner.tokens {
            let (until, tokens) = (inner.until, inner.tokens);
            let detail = format!("{until} of {tokens} tokens were computed when it ended");
            drop(rank.withdraw(&inner.transfer, WireCode::Internal, &detail));
            return;
        }
        inner.complete(rank, side_data);
    }

    /// From now on its end is reported. Whether it has ended already.
    pub(crate) fn hold(&self, rank: &Rank) -> bool {
        let mut inner = self.lock();
        inner.held = true;
        if !inner.offered {
            // It could not be offered here, and will not be: whoever asks for it hears so.
            let why = "the producer could not offer it";
            drop(rank.withdraw(&inner.transfer, WireCode::Busy, why));
        }
        inner.ended.is_some() || !inner.offered
    }

    /// Its handoff has ended; whether it is held.
    pub(crate) fn ended(&self, outcome: Outcome) -> bool {
        let mut inner = self.lock();
        inner.ended = Some(outcome);
        inner.held
    }
}

impl Inner {
    /// Adds blocks to those that are to be said; whether they go on.
    fn add(&mut self, blocks: Vec<BlockTable>) -> bool {
        if self.unsaid.is_empty() {
            self.unsaid = blocks;
            return true;
        }
        blocks.is_empty()
            || (blocks.len() == self.unsaid.len()
                && self.unsaid.iter_mut().zip(&blocks).all(|(all, new)| all.merge(new).is_ok()))
    }

    fn complete(&mut self, rank: &Rank, side_data: Option<Vec<u8>>) {
        let tables = std::mem::take(&mut self.unsaid);
        let progress = Progress::tokens(self.tokens);
        self.complete = true;
        let said = rank.complete(&self.transfer, tables, progress, side_data);
        self.unless_refused(rank, said);
    }

    fn advance(&mut self, rank: &Rank, progress: Progress) {
        let tables = std::mem::take(&mut self.unsaid);
        let said = rank.advance(&self.transfer, tables, progress);
        self.unless_refused(rank, said);
    }

    /// If what was said does not go on what was said before, that is a bug, of which nobody is to
    /// suffer but this request.
    fn unless_refused(&self, rank: &Rank, said: Result<(), Fault>) {
        match said {
            // It may have ended just now, which will be said.
            Ok(()) | Err(Fault::Refused(Refusal::Unknown)) => {}
            Err(error) => {
                tracing::error!(transfer = %self.transfer, %error, "a handoff can't be announced");
                drop(rank.withdraw(&self.transfer, WireCode::Internal, &error.to_string()));
            }
        }
    }
}

impl Part {
    /// The first `layers` layers of the step are computed.
    fn layers(&self, rank: &Rank, layers: u32) {
        if let Some(mut inner) = self.current() {
            inner.advance(rank, Progress::tokens(self.from).and(layers, self.until));
        }
    }

    /// All of the step is computed.
    fn step(&self, rank: &Rank, announce: Announce) {
        let Some(mut inner) = self.current() else { return };
        if inner.eager && self.until >= inner.tokens {
            inner.complete(rank, None);
        } else if announce != Announce::End {
            inner.advance(rank, Progress::tokens(self.until));
        }
    }

    /// The request, if there is still something to be said of this attempt at it.
    fn current(&self) -> Option<MutexGuard<'_, Inner>> {
        let inner = self.request.lock();
        let is_over = inner.complete || inner.ended.is_some();
        (inner.attempt == self.attempt && !is_over).then_some(inner)
    }
}

/// Something to be said once something has been computed.
pub(crate) enum Job {
    /// So many layers of a step.
    Layers(Arc<[Part]>, u32),
    /// A step.
    Step(Arc<[Part]>),
    /// The end of a request.
    Finish(Arc<Produced>, Option<Vec<u8>>),
}

impl Job {
    fn run(self, rank: &Rank, announce: Announce) {
        match self {
            Self::Layers(parts, layers) => parts.iter().for_each(|part| part.layers(rank, layers)),
            Self::Step(parts) => parts.iter().for_each(|part| part.step(rank, announce)),
            Self::Finish(request, side_data) => request.finish(rank, side_data),
        }
    }

    /// It will never be known when what it waits for happens.
    fn abandon(self, rank: &Rank) {
        let why = "the event of a layer or step panicked";
        let withdraw = |request: &Produced| request.withdraw(rank, WireCode::Internal, why);
        match self {
            Self::Layers(parts, _) | Self::Step(parts) => {
                parts.iter().for_each(|part| withdraw(&part.request));
            }
            Self::Finish(request, _) => withdraw(&request),
        }
    }
}

/// What waits for events, in the order in which they happen.
#[derive(Default)]
pub(crate) struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
}

#[derive(Default)]
struct QueueState {
    jobs: VecDeque<(Option<Box<dyn Computed>>, Job)>,
    /// One is being waited for or done.
    busy: bool,
    closed: bool,
}

/// A job is being waited for or done for as long as this is there.
struct Busy<'a>(&'a Queue);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.lock().busy = false;
        self.0.changed.notify_one();
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does a job after all that came before it and once `computed` says so: here and now, if that
    /// is now.
    pub(crate) fn run(
        &self,
        computed: Option<Box<dyn Computed>>,
        job: Job,
        rank: &Rank,
        announce: Announce,
    ) {
        let mut state = self.lock();
        let is_first = state.jobs.is_empty() && !state.busy;
        if is_first && computed.as_ref().is_none_or(|event| event.is_ready()) {
            // Whoever comes meanwhile must not overtake it.
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

    /// Waits for events, and does what they are waited for, until the queue is closed. `rank` gives
    /// access to what must not be kept alive by waiting.
    pub(crate) fn serve(&self, announce: Announce, with_rank: impl Fn(&mut dyn FnMut(&Rank))) {
        loop {
            let state = self.lock();
            let idle =
                |state: &mut QueueState| !state.closed && (state.jobs.is_empty() || state.busy);
            let mut state =
                self.changed.wait_while(state, idle).unwrap_or_else(PoisonError::into_inner);
            if state.closed {
                return;
            }
            let (computed, job) = state.jobs.pop_front().expect("not idle");
            state.busy = true;
            drop(state);
            let _busy = Busy(self);
            // It is not ours, and may do anything.
            let happened = catch_unwind(AssertUnwindSafe(|| {
                if let Some(computed) = &computed {
                    computed.wait();
                }
            }));
            let mut job = Some(job);
            with_rank(&mut |rank| match job.take() {
                Some(job) if happened.is_ok() => job.run(rank, announce),
                Some(job) => job.abandon(rank),
                None => {}
            });
        }
    }

    pub(crate) fn len(&self) -> usize {
        let state = self.lock();
        state.jobs.len() + usize::from(state.busy)
    }

    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        state.jobs.clear();
        drop(state);
        self.changed.notify_all();
    }
}
