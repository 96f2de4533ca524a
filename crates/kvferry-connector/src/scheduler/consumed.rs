//! Requests that fetch their KV from another engine.

use super::Match;
use crate::metadata::{Cancel, ConnectorMetadata, FetchRequest, Free, RequestOutcome};
use crate::params::ConsumerParams;
use crate::quorum::{Counted, Quorum};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId};
use rustc_hash::{FxHashMap, FxHashSet};

/// Requests by the engine's ids.
#[derive(Debug)]
pub(super) struct Consumed {
    pub(super) requests: FxHashMap<String, Request>,
    /// The handoffs of the requests that own them.
    transfers: FxHashSet<HandoffId>,
    pub(super) quorum: Quorum,
    pub(super) fetching: usize,
    budget_ms: u32,
    pub(super) outcomes: Vec<(WireCode, u64)>,
}

#[derive(Debug)]
pub(super) struct Request {
    from: ConsumerParams,
    /// The first live request with this handoff owns it: only that one fetches or frees it.
    owns: bool,
    stage: Stage,
    ended: bool,
    side_data: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    Fetching {
        /// The worker halves were told to end the fetch.
        cancelled: bool,
    },
    /// It was fetched or freed.
    Taken,
}

impl Consumed {
    pub(super) fn new(ranks: usize, budget_ms: u32) -> Self {
        Self {
            requests: FxHashMap::default(),
            transfers: FxHashSet::default(),
            quorum: Quorum::new(ranks),
            fetching: 0,
            budget_ms,
            outcomes: Vec::new(),
        }
    }

    /// Adds a request. True if it owns its handoff.
    pub(super) fn add(&mut self, request: &str, from: ConsumerParams) -> bool {
        let owns = self.transfers.insert(from.transfer.clone());
        let new = Request { from, owns, stage: Stage::Open, ended: false, side_data: Vec::new() };
        self.requests.insert(request.to_owned(), new);
        owns
    }

    pub(super) fn contains(&self, request: &str) -> bool {
        self.requests.contains_key(request)
    }

    /// How much of a known request can be fetched, of `usable` tokens.
    pub(super) fn matched(&self, request: &str, computed: u64, usable: u64) -> Option<Match> {
        let request = self.requests.get(request)?;
        let open = request.owns && request.stage == Stage::Open;
        Some(if open { request.from.matched(computed, usable) } else { Match::NONE })
    }

    /// As [`Consumed::matched`] of a request that was not added.
    pub(super) fn matched_unseen(
        &self,
        from: &ConsumerParams,
        computed: u64,
        usable: u64,
    ) -> Match {
        let open = !self.transfers.contains(&from.transfer);
        if open { from.matched(computed, usable) } else { Match::NONE }
    }

    /// A request has got blocks, to fetch the tokens of a range that may be empty.
    ///
    /// A request that does not own its handoff is fetched too, because the engine waits for it. The
    /// worker halves refuse it and report that.
    pub(super) fn allocated(
        &mut self,
        request: &str,
        tokens: (u32, u32),
        blocks: &[Vec<u32>],
        metadata: &mut ConnectorMetadata,
    ) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage != Stage::Open {
            return;
        }
        if tokens.0 == tokens.1 {
            known.free(WireCode::NotNeeded, self.budget_ms, metadata);
            return;
        }
        known.stage = Stage::Fetching { cancelled: false };
        self.fetching += 1;
        self.quorum.open(request);
        let ConsumerParams { transfer, address, engine, .. } = known.from.clone();
        metadata.fetches.push(FetchRequest {
            request: request.to_owned(),
            transfer,
            address,
            engine,
            tokens,
            blocks: blocks.iter().map(|blocks| BlockTable::new(0, blocks.clone())).collect(),
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
            known.free(code, self.budget_ms, metadata);
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
        let counted = self.quorum.report(rank, report);
        let Some(known) = self.requests.get_mut(&request) else { return };
        match counted {
            Counted::Failing { code, detail } => known.cancel(&request, code, &detail, metadata),
            Counted::Complete { code, side_data } => {
                if !known.ended {
                    known.side_data = side_data;
                }
                self.count(code);
            }
            Counted::Unknown | Counted::Again | Counted::Waiting => {
                tracing::trace!(rank, request, ?counted, "a rank reported a fetch");
            }
        }
    }

    /// The fetch of a request has ended on all ranks, whether their notes arrived or not.
    pub(super) fn received(&mut self, request: &str) {
        let Some(known) = self.requests.get_mut(request) else { return };
        let Stage::Fetching { .. } = known.stage else { return };
        known.stage = Stage::Taken;
        self.fetching -= 1;
        self.quorum.forget(request);
        if known.ended {
            self.remove(request);
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

    fn remove(&mut self, request: &str) {
        if let Some(request) = self.requests.remove(request)
            && request.owns
        {
            self.transfers.remove(&request.from.transfer);
        }
    }
}

impl Request {
    /// Tells the producer that no rank needs it.
    fn free(&mut self, code: WireCode, budget_ms: u32, metadata: &mut ConnectorMetadata) {
        self.stage = Stage::Taken;
        if self.owns {
            let ConsumerParams { transfer, address, engine, .. } = self.from.clone();
            metadata.frees.push(Free { transfer, address, engine, code, budget_ms });
        }
    }

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
