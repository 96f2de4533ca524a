//! Handoffs of an exchange as a value: what is offered and fetched, and in which slots. No threads, sockets and clocks.

use super::{Missed, Prompt};
use crate::address::AgentAddress;
use crate::params::{ConsumerParams, producer_params};
use crate::scheduler::{FinishReason, Match, Request, Scheduled, Scheduler};
use kvferry_proto::directory::{ContentKey, Found, Slots};
use kvferry_proto::handoff::HandoffId;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::ops::Range;

/// The engine's ranks and its directory, as a [`Machine`] needs them.
pub(super) trait Seam {
    /// All ranks carry a step's metadata out. `is_computed`: blocks of its requests are in their slots.
    fn carry(&mut self, metadata: &[u8], is_computed: bool);

    /// Followers are told of a prompt. False if they can't be.
    fn publish(&mut self, key: ContentKey, transfer: &HandoffId) -> bool;

    /// A prompt that followers were told of is gone.
    fn retract(&mut self, transfer: &HandoffId);
}

pub(super) struct Machine {
    scheduler: Scheduler,
    ranks: usize,
    groups: usize,
    block_tokens: u32,
    slots: Slots,
    /// The number of no block.
    null_block: u32,
    last: u64,
    offers: FxHashMap<u64, Offer>,
    events: VecDeque<Event>,
    /// The last copy that all ranks have made, and the last that a rank has not.
    copied: u64,
    lost: u64,
    fetches: FxHashMap<String, Fetch>,
}

/// A prompt that this engine computes for another one.
struct Offer {
    prompt: Prompt,
    transfer: HandoffId,
    slots: Range<u32>,
    /// A rank has not made a copy.
    is_lost: bool,
    is_told: bool,
    /// The ranks on which no peer reads it any more.
    sent: FxHashSet<usize>,
}

/// What is done once all ranks have made a copy: blocks are there, or the request has ended.
pub(super) struct Event {
    pub(super) copy: u64,
    pub(super) offer: u64,
    pub(super) blocks: Option<Range<u32>>,
}

struct Fetch {
    slots: Range<u32>,
    /// The ranks on which it has ended.
    received: FxHashSet<usize>,
    has_failed: bool,
    has_ended: bool,
    /// Nothing waits for its end.
    is_abandoned: bool,
}

fn request_of(kind: char, number: u64) -> String {
    format!("{kind}{number}")
}

impl Machine {
    /// Of an engine with so many ranks and groups of layers, and `slots` slots.
    pub(super) fn new(
        scheduler: Scheduler,
        ranks: usize,
        groups: usize,
        block_tokens: u32,
        slots: u32,
    ) -> Self {
        Self {
            scheduler,
            ranks,
            groups,
            block_tokens,
            slots: Slots::new(slots),
            null_block: slots,
            last: 0,
            offers: FxHashMap::default(),
            events: VecDeque::new(),
            copied: 0,
            lost: 0,
            fetches: FxHashMap::default(),
        }
    }

    fn tokens(&self, prompt: &Prompt) -> u64 {
        u64::from(prompt.blocks) * u64::from(self.block_tokens)
    }

    /// Carries a step of the scheduler to the ranks.
    pub(super) fn carry(&mut self, seam: &mut dyn Seam, computed: Option<Scheduled<'_>>) {
        let is_computed = computed.is_some();
        let metadata = self.scheduler.step(computed, []).encode();
        if !metadata.is_empty() {
            seam.carry(&metadata, is_computed);
        }
    }

    /// This engine computes a prompt, whose handoff has this name. Returns a number for it and its first slot.
    pub(super) fn offer(
        &mut self,
        seam: &mut dyn Seam,
        prompt: &Prompt,
        transfer: HandoffId,
    ) -> Result<(u64, u32), Missed> {
        let Some(slots) = self.slots.take(prompt.blocks) else {
            return Err(Missed::NoRoom { blocks: prompt.blocks });
        };
        self.last += 1;
        let (number, first) = (self.last, slots.start);
        let (request, params) = (request_of('p', number), producer_params(Some(&transfer)));
        self.scheduler.arrived(&Request {
            id: &request,
            prompt_tokens: self.tokens(prompt),
            max_tokens: 1,
            params: Some(&params),
            prompt: Some(prompt.identity),
        });
        let sent = FxHashSet::default();
        let offer =
            Offer { prompt: *prompt, transfer, slots, is_lost: false, is_told: false, sent };
        self.offers.insert(number, offer);
        self.carry(seam, None);
        Ok((number, first))
    }

    pub(super) fn push(&mut self, event: Event) {
        self.events.push_back(event);
    }

    /// `copied`: the last copy that all ranks have made; `lost`: the last that a rank has not made, and those before it.
    pub(super) fn made(&mut self, copied: u64, lost: u64) {
        (self.copied, self.lost) = (copied, lost);
    }

    /// Announces what was copied.
    pub(super) fn announce(&mut self, seam: &mut dyn Seam) {
        while self.events.front().is_some_and(|event| event.copy <= self.copied)
            && let Some(event) = self.events.pop_front()
        {
            self.happened(seam, event);
        }
    }

    fn happened(&mut self, seam: &mut dyn Seam, Event { copy, offer: number, blocks }: Event) {
        let lost = self.lost;
        let Some(offer) = self.offers.get_mut(&number) else { return };
        // A forward pass that fails ends before its copies are made.
        offer.is_lost |= 0 < copy && copy <= lost;
        let (prompt, request) = (offer.prompt, request_of('p', number));
        let Some(blocks) = blocks else {
            let how = if offer.is_told { FinishReason::Length } else { FinishReason::Abort };
            let finished = self.scheduler.finished(&request, how, None, None);
            self.carry(seam, None);
            if !finished.is_some_and(|finished| finished.held) {
                self.gone(seam, number);
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
        self.carry(seam, Some(scheduled));
        if blocks.end == prompt.blocks
            && let Some(offer) = self.offers.get_mut(&number)
        {
            offer.is_told = seam.publish(prompt.key, &offer.transfer);
        }
    }

    /// No peer can fetch an offer any more.
    fn gone(&mut self, seam: &mut dyn Seam, number: u64) {
        let Some(offer) = self.offers.remove(&number) else { return };
        self.give(offer.slots);
        if offer.is_told {
            seam.retract(&offer.transfer);
        }
    }

    /// A rank's notes for the scheduler.
    pub(super) fn noted(&mut self, rank: usize, notes: &[u8]) {
        self.scheduler.reported(rank, notes);
    }

    /// No peer reads an offer from a rank any more.
    pub(super) fn sent(&mut self, seam: &mut dyn Seam, rank: usize, request: &str) {
        let number = request.strip_prefix('p').and_then(|number| number.parse().ok());
        let Some((number, offer)) =
            number.and_then(|number| Some((number, self.offers.get_mut(&number)?)))
        else {
            return;
        };
        offer.sent.insert(rank);
        if offer.sent.len() == self.ranks {
            self.scheduler.sent([request]);
            self.gone(seam, number);
        }
    }

    /// A fetch has ended on a rank. True if it has on all.
    pub(super) fn received(&mut self, rank: usize, request: &str, has_failed: bool) -> bool {
        let Some(fetch) = self.fetches.get_mut(request) else { return false };
        fetch.received.insert(rank);
        fetch.has_failed |= has_failed;
        if fetch.received.len() < self.ranks {
            return false;
        }
        fetch.has_ended = true;
        let is_abandoned = fetch.is_abandoned;
        self.scheduler.received([request]);
        if is_abandoned {
            self.end(request);
        }
        true
    }

    /// True until a fetch has ended on all ranks.
    pub(super) fn is_under_way(&self, request: &str) -> bool {
        self.fetches.get(request).is_some_and(|fetch| !fetch.has_ended)
    }

    /// True while a fetch has slots.
    pub(super) fn is_fetched(&self, request: &str) -> bool {
        self.fetches.contains_key(request)
    }

    /// Removes a fetch. Returns its slots, unless it has failed.
    fn end(&mut self, request: &str) -> Option<Range<u32>> {
        let fetch = self.fetches.remove(request)?;
        if fetch.has_failed || fetch.is_abandoned {
            self.give(fetch.slots);
            return None;
        }
        Some(fetch.slots)
    }

    /// Begins a fetch from one publisher. `None` if it has nothing that is needed; the scheduler frees it there.
    pub(super) fn begin(
        &mut self,
        seam: &mut dyn Seam,
        prompt: &Prompt,
        first: u32,
        found: &Found,
    ) -> Result<Option<String>, Missed> {
        // A publisher names an agent, never a server that is to be asked by HTTP.
        let Ok(address) = found.address.parse::<AgentAddress>() else {
            return Err(Missed::Failed(format!("{:?} is no address", found.address)));
        };
        self.last += 1;
        let request = request_of('d', self.last);
        let (transfer, engine) = (found.transfer.clone(), Some(found.engine));
        let address = address.into();
        let params = ConsumerParams { transfer, address, engine, tokens: None }.to_params();
        self.scheduler.arrived(&Request {
            id: &request,
            prompt_tokens: self.tokens(prompt),
            max_tokens: 1,
            params: Some(&params),
            prompt: Some(prompt.identity),
        });
        let (cached, wanted) = (first.min(prompt.blocks), prompt.blocks.saturating_sub(first));
        let computed = u64::from(cached) * u64::from(self.block_tokens);
        let slots = self.slots.take(wanted);
        let tokens = match slots.is_some().then(|| self.scheduler.matched(&request, computed)) {
            Some(Match::Tokens(tokens)) => tokens,
            Some(Match::Unknown) | None => 0,
        };
        let mut numbers = vec![self.null_block; cached as usize];
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
            self.fetches.insert(request.clone(), fetch);
            self.scheduler.allocated(&request, tokens, &blocks);
            self.carry(seam, None);
            return Ok(Some(request));
        }
        let is_full = wanted > 0 && slots.is_none();
        self.give(slots.unwrap_or_default());
        // Tells the publisher that its handoff is not needed.
        self.scheduler.allocated(&request, 0, &blocks);
        drop(self.scheduler.finished(&request, FinishReason::Length, None, None));
        self.carry(seam, None);
        if is_full { Err(Missed::NoRoom { blocks: wanted }) } else { Ok(None) }
    }

    /// Nothing waits for a fetch any more. Returns false if it has ended.
    pub(super) fn abandon(&mut self, seam: &mut dyn Seam, request: &str) -> bool {
        let Some(fetch) = self.fetches.get_mut(request).filter(|fetch| !fetch.has_ended) else {
            return false;
        };
        fetch.is_abandoned = true;
        drop(self.scheduler.finished(request, FinishReason::Abort, None, None));
        self.carry(seam, None);
        true
    }

    /// Takes a fetch that has ended. Returns its slots, unless it has failed.
    pub(super) fn take(&mut self, seam: &mut dyn Seam, request: &str) -> Option<Range<u32>> {
        drop(self.scheduler.finished(request, FinishReason::Length, None, None));
        self.carry(seam, None);
        self.end(request)
    }

    /// Gives the slots of a fetch back.
    pub(super) fn give(&mut self, slots: Range<u32>) {
        if let Err(error) = self.slots.give(slots) {
            tracing::error!(%error, "slots of staging memory");
        }
    }

    /// Counts of what is under way, by name.
    pub(super) fn gauges(&self) -> Vec<(&'static str, usize)> {
        let own = [
            ("events", self.events.len()),
            ("offers", self.offers.len()),
            ("fetches", self.fetches.len()),
            ("slots", self.slots.taken() as usize),
        ];
        own.into_iter().chain(self.scheduler.gauges()).collect()
    }

    /// The slots of an offer.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn offered(&self, number: u64) -> Option<Range<u32>> {
        self.offers.get(&number).map(|offer| offer.slots.clone())
    }

    /// The slots of all offers.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn all_offered(&self) -> impl Iterator<Item = Range<u32>> {
        self.offers.values().map(|offer| offer.slots.clone())
    }

    /// The slots of all fetches.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn all_fetched(&self) -> impl Iterator<Item = Range<u32>> {
        self.fetches.values().map(|fetch| fetch.slots.clone())
    }

    /// The slots of a fetch.
    #[cfg(any(test, feature = "fuzzing"))]
    pub(super) fn fetched(&self, request: &str) -> Option<Range<u32>> {
        self.fetches.get(request).map(|fetch| fetch.slots.clone())
    }
}
