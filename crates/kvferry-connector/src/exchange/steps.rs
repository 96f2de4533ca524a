//! The steps of handoffs: what workers report, what was copied to slots, and fetches.

use super::{Event, Fetch, Missed, Prompt, Shared, State, request_of};
use crate::address::AgentAddress;
use crate::params::ConsumerParams;
use crate::scheduler::{FinishReason, Match, Request, Scheduled};
use crate::wakeup::Wakeup;
use kvferry::After;
use kvferry_proto::directory::{Found, Place};
use kvferry_sys::sync::MutexGuard;
use rustc_hash::FxHashSet;
use std::ops::Range;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// Interval at which a fetch that waits asks whether it is interrupted.
const INTERRUPT_INTERVAL: Duration = Duration::from_millis(100);

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn tokens(&self, prompt: &Prompt) -> u64 {
        u64::from(prompt.blocks) * u64::from(self.block_tokens)
    }

    pub(super) fn address(&self, place: Place) -> &str {
        self.follows.get(place.0).map_or("", String::as_str)
    }

    pub(super) fn run(shared: &Weak<Self>, wakeup: &Wakeup) {
        loop {
            wakeup.wait(None);
            let Some(shared) = shared.upgrade() else { return };
            let mut state = shared.lock();
            if state.closed {
                return;
            }
            shared.pump(&mut state);
        }
    }

    /// Takes the requests on: announces what was copied, and takes what the workers report.
    pub(super) fn pump(&self, state: &mut State) {
        while state.events.front().is_some_and(|event| event.copy <= state.copied)
            && let Some(event) = state.events.pop_front()
        {
            self.happened(state, event);
        }
        for (rank, worker) in self.workers.iter().enumerate() {
            let reports = worker.reports();
            if let Some(notes) = &reports.notes {
                state.scheduler.reported(rank, notes);
            }
            for request in &reports.received {
                self.received(state, rank, request, reports.failed.contains(request));
            }
            for request in &reports.sent {
                self.sent(state, rank, request);
            }
        }
        self.carry(state, None);
    }

    /// Carries a step of the scheduler to the workers.
    pub(super) fn carry(&self, state: &mut State, computed: Option<Scheduled<'_>>) {
        let is_computed = computed.is_some();
        let metadata = state.scheduler.step(computed, []).encode();
        if metadata.is_empty() || state.closed {
            return;
        }
        for worker in &self.workers {
            // Nothing uses slots that were given back, whatever memory they are in.
            if let Err(error) = worker.apply_after(&metadata, || Ok(After::host())) {
                tracing::error!(%error, "a rank can't carry out a step of handoffs");
            }
            worker.fetch();
            if is_computed {
                worker.step_computed(None);
            }
        }
    }

    fn happened(&self, state: &mut State, Event { copy, offer: number, blocks }: Event) {
        let lost = state.lost;
        let Some(offer) = state.offers.get_mut(&number) else { return };
        // A forward pass that fails ends before its copies are made.
        offer.is_lost |= 0 < copy && copy <= lost;
        let (prompt, request) = (offer.prompt, request_of('p', number));
        let Some(blocks) = blocks else {
            let how = if offer.is_told { FinishReason::Length } else { FinishReason::Abort };
            let finished = state.scheduler.finished(&request, how, None, None);
            self.carry(state, None);
            if !finished.is_some_and(|finished| finished.held) {
                self.gone(state, number);
            }
            return;
        };
        if offer.is_lost {
            return;
        }
        let numbers = offer.slots.start + blocks.start..offer.slots.start + blocks.end;
        let tokens = u64::from(self.block_tokens);
        let scheduled = Scheduled {
            request: &request,
            computed: u64::from(blocks.start) * tokens,
            tokens: u64::from(blocks.end - blocks.start) * tokens,
            all: blocks.start == 0,
            blocks: vec![numbers.collect(); self.groups],
        };
        self.carry(state, Some(scheduled));
        if blocks.end == prompt.blocks
            && let Some(offer) = state.offers.get_mut(&number)
        {
            let told = self.directory.publish(prompt.key, &offer.transfer);
            offer.is_told = told.is_ok();
            if let Err(error) = told {
                kvferry::warn_limited!(%error, "followers are not told of a prompt");
            }
        }
    }

    /// No peer can fetch an offer any more.
    fn gone(&self, state: &mut State, number: u64) {
        let Some(offer) = state.offers.remove(&number) else { return };
        state.give(offer.slots);
        if offer.is_told {
            self.directory.retract(&offer.transfer);
        }
    }

    fn sent(&self, state: &mut State, rank: usize, request: &str) {
        let number = request.strip_prefix('p').and_then(|number| number.parse().ok());
        let Some((number, offer)) =
            number.and_then(|number| Some((number, state.offers.get_mut(&number)?)))
        else {
            return;
        };
        offer.sent.insert(rank);
        if offer.sent.len() == self.workers.len() {
            state.scheduler.sent([request]);
            self.gone(state, number);
        }
    }

    pub(super) fn received(&self, state: &mut State, rank: usize, request: &str, has_failed: bool) {
        let Some(fetch) = state.fetches.get_mut(request) else { return };
        fetch.received.insert(rank);
        fetch.has_failed |= has_failed;
        if fetch.received.len() < self.workers.len() {
            return;
        }
        fetch.has_ended = true;
        state.scheduler.received([request]);
        if state.fetches.get(request).is_some_and(|fetch| fetch.is_abandoned) {
            self.observer.failures.lock().remove(request);
            self.end(state, request);
        }
        self.ended.notify_all();
    }

    /// Removes a fetch. Returns its slots, or why it has failed.
    pub(super) fn end(&self, state: &mut State, request: &str) -> Option<Range<u32>> {
        let fetch = state.fetches.remove(request)?;
        if fetch.has_failed || fetch.is_abandoned {
            state.give(fetch.slots);
            return None;
        }
        Some(fetch.slots)
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
        let Some(request) = self.begin(&mut guard, prompt, first, found)? else { return Ok(None) };
        let runs = |state: &mut State| {
            !state.closed && state.fetches.get(&request).is_some_and(|fetch| !fetch.has_ended)
        };
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
                guard = self.lock();
            }
        }
        let state = &mut *guard;
        if let Some(fetch) = state.fetches.get_mut(&request).filter(|fetch| !fetch.has_ended) {
            fetch.is_abandoned = true;
            drop(state.scheduler.finished(&request, FinishReason::Abort, None, None));
            self.carry(state, None);
            if state.closed || interrupted {
                return Ok(None);
            }
            let (address, pause) = (self.address(found.place).to_owned(), Duration::ZERO);
            return Err(Missed::TimedOut { address, pause });
        }
        drop(state.scheduler.finished(&request, FinishReason::Length, None, None));
        self.carry(state, None);
        let why = self.observer.failures.lock().remove(&request);
        match self.end(state, &request) {
            // The caller does not take them: the interrupt raises an error there.
            Some(slots) if interrupted => {
                state.give(slots);
                Ok(None)
            }
            None => Err(Missed::Failed(why.unwrap_or_default())),
            slots => Ok(slots),
        }
    }

    /// Begins a fetch. `None` if the publisher has nothing that is needed; the scheduler frees it there.
    fn begin(
        &self,
        state: &mut State,
        prompt: &Prompt,
        first: u32,
        found: &Found,
    ) -> Result<Option<String>, Missed> {
        // A publisher names an agent, never a server that is to be asked by HTTP.
        let Ok(address) = found.address.parse::<AgentAddress>() else {
            return Err(Missed::Failed(format!("{:?} is no address", found.address)));
        };
        state.last += 1;
        let request = request_of('d', state.last);
        let (transfer, engine) = (found.transfer.clone(), Some(found.engine));
        let address = address.into();
        let params = ConsumerParams { transfer, address, engine, tokens: None }.to_params();
        state.scheduler.arrived(&Request {
            id: &request,
            prompt_tokens: self.tokens(prompt),
            max_tokens: 1,
            params: Some(&params),
            prompt: Some(prompt.identity),
        });
        let (cached, wanted) = (first.min(prompt.blocks), prompt.blocks.saturating_sub(first));
        let computed = u64::from(cached) * u64::from(self.block_tokens);
        let slots = state.slots.take(wanted);
        let tokens = match slots.is_some().then(|| state.scheduler.matched(&request, computed)) {
            Some(Match::Tokens(tokens)) => tokens,
            Some(Match::Unknown) | None => 0,
        };
        let mut numbers = vec![state.null_block; cached as usize];
        numbers.extend(slots.clone().into_iter().flatten());
        let blocks = vec![numbers; self.groups];
        if let Some(slots) = slots.clone().filter(|_| tokens > 0) {
            let fetch = Fetch {
                slots,
                received: FxHashSet::default(),
                has_failed: false,
                has_ended: false,
                is_abandoned: false,
            };
            state.fetches.insert(request.clone(), fetch);
            state.scheduler.allocated(&request, tokens, &blocks);
            self.carry(state, None);
            return Ok(Some(request));
        }
        let is_full = wanted > 0 && slots.is_none();
        state.give(slots.unwrap_or_default());
        // Tells the publisher that its handoff is not needed.
        state.scheduler.allocated(&request, 0, &blocks);
        drop(state.scheduler.finished(&request, FinishReason::Length, None, None));
        self.carry(state, None);
        if is_full { Err(Missed::NoRoom { blocks: wanted }) } else { Ok(None) }
    }
}

impl State {
    pub(super) fn give(&mut self, slots: Range<u32>) {
        if let Err(error) = self.slots.give(slots) {
            tracing::error!(%error, "slots of staging memory");
        }
    }
}
