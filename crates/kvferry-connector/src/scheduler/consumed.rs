//! Requests that fetch their KV from another engine.

use super::idle::{ASKED_MAX, DEFERRED_MAX, IdleLimit, Waiting, WaitingLoad};
use super::{Match, Stats};
use crate::metadata::{Cancel, Claim, ConnectorMetadata, FetchRequest, Free, RequestOutcome};
use crate::params::ConsumerParams;
use crate::quorum::{Counted, Quorum};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId};
use rustc_hash::FxHashMap;
use std::collections::hash_map::Entry;

/// Requests by the engine's ids.
#[derive(Debug)]
pub(super) struct Consumed {
    pub(super) requests: FxHashMap<String, Request>,
    handoffs: FxHashMap<HandoffId, Handoff>,
    /// Requests whose claim the next metadata carry, if nothing else ends their handoff before.
    claiming: Vec<String>,
    pub(super) quorum: Quorum,
    pub(super) fetching: usize,
    pub(super) waiting: Waiting,
    /// The number of requests that wait for room in `waiting`.
    pub(super) deferred: usize,
    budget_ms: u32,
    pub(super) outcomes: Vec<(WireCode, u64)>,
    pub(super) stats: Stats,
}

#[derive(Debug)]
pub(super) struct Request {
    from: ConsumerParams,
    prompt_tokens: u32,
    /// Tokens of the prompt that can be fetched at most.
    usable: u64,
    /// Cached tokens at the last match: engines do not repeat the number when the request gets blocks.
    computed: u64,
    stage: Stage,
    /// Number of tokens that are fetched.
    tokens: u32,
    ended: bool,
    /// The request waits without blocks, for room among the loads that wait.
    deferred: bool,
    /// The producer has answered that it has, or will have, the KV.
    answered: bool,
    /// The engine's questions for the request while there was no room.
    asked: u8,
    /// The load, while the request is fetched and its producer has not answered.
    waiting: Option<WaitingLoad>,
    side_data: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The request has no blocks yet.
    Open,
    Fetching {
        /// Set once the worker halves have been asked to end the fetch.
        cancelled: bool,
    },
    /// The request was fetched, or is computed.
    Taken,
}

/// State that the live requests with one handoff share. There are several of them if a request asks for
/// several answers (`n > 1`). The first of them that gets blocks fetches the handoff. The others wait for
/// that, and find the tokens in the engine's cache or compute them.
#[derive(Debug)]
struct Handoff {
    state: HandoffState,
    /// Number of `requests` that are [`Stage::Open`].
    open: usize,
    /// Requests in the order of their arrival. The first one's claim holds.
    requests: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HandoffState {
    Open,
    Fetching,
    /// The handoff was fetched or freed.
    Taken,
}

impl Consumed {
    pub(super) fn new(ranks: usize, budget_ms: u32, limit: Option<IdleLimit>) -> Self {
        Self {
            requests: FxHashMap::default(),
            handoffs: FxHashMap::default(),
            claiming: Vec::new(),
            quorum: Quorum::new(ranks),
            fetching: 0,
            waiting: Waiting::new(limit),
            deferred: 0,
            budget_ms,
            outcomes: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// Adds a request that can fetch `usable` tokens of its prompt at most.
    pub(super) fn add(&mut self, request: &str, from: ConsumerParams, prompt: u64, usable: u64) {
        let new = Handoff { state: HandoffState::Open, open: 0, requests: Vec::new() };
        let handoff = self.handoffs.entry(from.transfer.clone()).or_insert(new);
        handoff.open += 1;
        handoff.requests.push(request.to_owned());
        if handoff.requests.len() == 1 {
            self.claiming.push(request.to_owned());
        }
        let (stage, side_data) = (Stage::Open, Vec::new());
        let new = Request {
            from,
            prompt_tokens: u32::try_from(prompt).unwrap_or(u32::MAX),
            usable,
            computed: 0,
            stage,
            tokens: 0,
            ended: false,
            deferred: false,
            answered: false,
            asked: 0,
            waiting: None,
            side_data,
        };
        self.requests.insert(request.to_owned(), new);
    }

    pub(super) fn contains(&self, request: &str) -> bool {
        self.requests.contains_key(request)
    }

    /// True if the request has no blocks yet.
    pub(super) fn is_open(&self, request: &str) -> bool {
        self.requests.get(request).is_some_and(|request| request.stage == Stage::Open)
    }

    /// Returns the number of tokens that were cached at the last match of a request without blocks.
    pub(super) fn computed(&self, request: &str) -> Option<u64> {
        let request = self.requests.get(request).filter(|request| request.stage == Stage::Open);
        request.map(|request| request.computed)
    }

    /// Returns how many tokens of a request can be fetched if `computed` of them are cached.
    pub(super) fn matched(&mut self, request: &str, computed: u64) -> Match {
        let Some(known) = self.requests.get_mut(request) else { return Match::NONE };
        known.computed = computed;
        if known.stage != Stage::Open {
            return Match::NONE;
        }
        let all = known.from.matched(computed, known.usable);
        match self.handoffs.get(&known.from.transfer).map(|handoff| handoff.state) {
            None | Some(HandoffState::Open) => all,
            // When it is fetched, the engine may have the tokens in its cache.
            Some(HandoffState::Fetching) if all != Match::NONE => Match::Unknown,
            Some(HandoffState::Fetching | HandoffState::Taken) => Match::NONE,
        }
    }

    /// Decides whether a request that matched `found` gets blocks: while too many blocks wait for producers that have
    /// not answered, it waits without any. `None` if too many requests do: it is not fetched.
    pub(super) fn admit(&mut self, request: &str, found: Match) -> Option<Match> {
        let Some(known) = self.requests.get_mut(request) else { return Some(found) };
        let is_fetched = !matches!(found, Match::NONE | Match::Unknown);
        if !is_fetched || known.answered || !self.waiting.is_full_for(known.from.address.as_str()) {
            return Some(found);
        }
        known.asked = known.asked.saturating_add(1);
        self.deferred += usize::from(!std::mem::replace(&mut known.deferred, true));
        // The engine asks first for those that have waited longest without an answer. Made-up ones would otherwise keep
        // the places of later ones, whose claims are about to be answered.
        let leaves = self.deferred > DEFERRED_MAX && known.asked >= ASKED_MAX;
        (!leaves).then_some(Match::Unknown)
    }

    /// Adds the claims of requests that have arrived and wait.
    pub(super) fn claim(&mut self, metadata: &mut ConnectorMetadata) {
        for request in self.claiming.drain(..) {
            let Some(Request { from, prompt_tokens, .. }) = self.requests.get(&request) else {
                continue;
            };
            let tokens = *prompt_tokens;
            let ConsumerParams { transfer, address, engine, .. } = from.clone();
            let handoff = self.handoffs.get(&transfer);
            if handoff.is_some_and(|handoff| handoff.state == HandoffState::Open) {
                metadata.claims.push(Claim { request, transfer, address, engine, tokens });
            }
        }
    }

    /// A request has got blocks, to fetch the tokens of a range that may be empty.
    ///
    /// A request whose handoff another one fetches is fetched too, because the engine waits for it. The
    /// worker halves refuse it and report that.
    pub(super) fn allocated(
        &mut self,
        request: &str,
        tokens: (u32, u32),
        blocks: Vec<BlockTable>,
        new_blocks: u64,
        metadata: &mut ConnectorMetadata,
    ) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage != Stage::Open {
            return;
        }
        if tokens.0 == tokens.1 {
            self.close(request, WireCode::NotNeeded, metadata);
            return;
        }
        if let Some(handoff) = self.handoffs.get_mut(&known.from.transfer) {
            handoff.state = HandoffState::Fetching;
            handoff.open -= 1;
        }
        known.stage = Stage::Fetching { cancelled: false };
        self.deferred -= usize::from(std::mem::take(&mut known.deferred));
        known.waiting =
            (!known.answered).then(|| self.waiting.begin(known.from.address.as_str(), new_blocks));
        known.tokens = tokens.1.saturating_sub(tokens.0);
        self.fetching += 1;
        self.quorum.open(request);
        let ConsumerParams { transfer, address, engine, .. } = known.from.clone();
        metadata.fetches.push(FetchRequest {
            request: request.to_owned(),
            transfer,
            address,
            engine,
            tokens,
            blocks,
            budget_ms: self.budget_ms,
        });
    }

    /// A request has ended. `code` tells the producer why its KV is not needed.
    pub(super) fn finished(
        &mut self,
        request: &str,
        code: WireCode,
        metadata: &mut ConnectorMetadata,
    ) {
        let Some(known) = self.requests.get_mut(request) else { return };
        known.side_data.clear();
        if let Stage::Fetching { .. } = known.stage {
            known.ended = true;
            known.cancel(request, WireCode::Cancelled, "the request has ended", metadata);
            return;
        }
        if known.stage == Stage::Open {
            self.close(request, code, metadata);
        }
        self.remove(request);
    }

    /// The fetch of a request has ended on a rank.
    pub(super) fn reported(
        &mut self,
        rank: usize,
        report: RequestOutcome,
        metadata: &mut ConnectorMetadata,
    ) {
        let request = report.request.clone();
        if report.code.is_ok() {
            self.answered(&request);
        }
        let counted = self.quorum.report(rank, report);
        let Some(known) = self.requests.get_mut(&request) else { return };
        match counted {
            Counted::Failing { code, detail } => known.cancel(&request, code, &detail, metadata),
            Counted::Complete { code, side_data } => {
                if !known.ended {
                    known.side_data = side_data;
                }
                self.stats.count_fetch(code, known.tokens);
                self.count(code);
            }
            Counted::Unknown | Counted::Again | Counted::Waiting => {
                tracing::trace!(rank, request, ?counted, "a rank reported a fetch");
            }
        }
    }

    /// The producer of a request that is claimed or fetched has answered a rank.
    pub(super) fn answered(&mut self, request: &str) {
        let Some(known) = self.requests.get_mut(request) else { return };
        known.answered = true;
        self.waiting.answered(known.from.address.as_str());
        self.waiting.end(known.waiting.take());
    }

    /// The fetch of a request has ended on all ranks, whether their notes arrived or not.
    pub(super) fn received(&mut self, request: &str) {
        let Some(known) = self.requests.get_mut(request) else { return };
        let Stage::Fetching { .. } = known.stage else { return };
        known.stage = Stage::Taken;
        if let Some(handoff) = self.handoffs.get_mut(&known.from.transfer) {
            handoff.state = HandoffState::Taken;
        }
        self.fetching -= 1;
        self.waiting.end(known.waiting.take());
        self.quorum.forget(request);
        if known.ended {
            self.remove(request);
        }
    }

    /// Has no request fetched that has no blocks yet.
    pub(super) fn give_up_all(&mut self, metadata: &mut ConnectorMetadata) {
        let open = self.requests.iter().filter(|(_, request)| request.stage == Stage::Open);
        let open: Vec<_> = open.map(|(id, _)| id.clone()).collect();
        for request in open {
            self.close(&request, WireCode::NotNeeded, metadata);
        }
    }

    /// Cancels all running fetches.
    pub(super) fn reset(&mut self, detail: &str, metadata: &mut ConnectorMetadata) {
        for (request, known) in &mut self.requests {
            if let Stage::Fetching { .. } = known.stage {
                known.cancel(request, WireCode::Cancelled, detail, metadata);
            }
        }
    }

    pub(super) fn take_side_data(&mut self, request: &str) -> Vec<Vec<u8>> {
        let request = self.requests.get_mut(request);
        request.map_or_else(Vec::new, |request| std::mem::take(&mut request.side_data))
    }

    fn count(&mut self, code: WireCode) {
        // All codes of later versions share one entry: there may be any number of them.
        let same = |other: WireCode| match (code, other) {
            (WireCode::Other(_), WireCode::Other(_)) => true,
            (code, other) => code == other,
        };
        match self.outcomes.iter_mut().find(|(other, _)| same(*other)) {
            Some((_, count)) => *count += 1,
            None => self.outcomes.push((code, 1)),
        }
    }

    /// Closes an open request, which will not be fetched. Frees the handoff at the producer if no other
    /// request may fetch it.
    pub(super) fn close(
        &mut self,
        request: &str,
        code: WireCode,
        metadata: &mut ConnectorMetadata,
    ) {
        let Some(known) = self.requests.get_mut(request) else { return };
        known.stage = Stage::Taken;
        self.deferred -= usize::from(std::mem::take(&mut known.deferred));
        let ConsumerParams { transfer, address, engine, .. } = &known.from;
        let Some(handoff) = self.handoffs.get_mut(transfer) else { return };
        handoff.open -= 1;
        if handoff.open == 0 && handoff.state == HandoffState::Open {
            handoff.state = HandoffState::Taken;
            self.stats.freed += 1;
            let (transfer, address, budget_ms) =
                (transfer.clone(), address.clone(), self.budget_ms);
            metadata.frees.push(Free { transfer, address, engine: *engine, code, budget_ms });
        }
    }

    fn remove(&mut self, request: &str) {
        let Some(Request { from, .. }) = self.requests.remove(request) else { return };
        let Entry::Occupied(mut entry) = self.handoffs.entry(from.transfer) else { return };
        let requests = &mut entry.get_mut().requests;
        let was_first = requests.first().is_some_and(|first| first == request);
        requests.retain(|other| other != request);
        match requests.first() {
            None => drop(entry.remove()),
            Some(next) if was_first => self.claiming.push(next.clone()),
            Some(_) => {}
        }
    }
}

impl Request {
    /// Ends its fetch on all ranks, once.
    fn cancel(
        &mut self,
        request: &str,
        code: WireCode,
        detail: &str,
        metadata: &mut ConnectorMetadata,
    ) {
        let cancelled = Stage::Fetching { cancelled: true };
        if std::mem::replace(&mut self.stage, cancelled) != cancelled {
            let (request, detail) = (request.to_owned(), detail.to_owned());
            metadata.cancels.push(Cancel { request, code, detail });
        }
    }
}

impl ConsumerParams {
    fn matched(&self, computed: u64, usable: u64) -> Match {
        let there = self.tokens.map_or(usable, |tokens| tokens.min(usable));
        Match::Tokens(there.saturating_sub(computed))
    }
}
