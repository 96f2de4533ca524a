//! Requests whose KV another engine has.

use super::Match;
use crate::orders::{Cancel, Fetched, Free, Orders, Want};
use crate::params::Offered;
use crate::quorum::{Counted, Quorum};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId};
use rustc_hash::{FxHashMap, FxHashSet};

/// All of them, by the engine's names for them.
#[derive(Debug)]
pub(super) struct Consumed {
    requests: FxHashMap<String, Request>,
    /// Of those requests above that were the first to name them.
    transfers: FxHashSet<HandoffId>,
    /// Fetches that some rank has not reported.
    quorum: Quorum,
    fetching: usize,
    budget_ms: u32,
    outcomes: Vec<(WireCode, u64)>,
}

#[derive(Debug)]
struct Request {
    from: Offered,
    /// Whether no other live request named the handoff before: it is this one's to fetch or free.
    owns: bool,
    stage: Stage,
    /// Whether the engine has ended it.
    ended: bool,
    side_data: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Its handoff is still to be had.
    Open,
    /// It is being fetched.
    Fetching {
        /// Whether the worker halves were told to end that.
        cancelled: bool,
    },
    /// It was fetched, or not needed: not again.
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

    /// Adds a request; whether its handoff is no other live one's.
    pub(super) fn add(&mut self, request: &str, from: Offered) -> bool {
        let owns = self.transfers.insert(from.transfer.clone());
        let new = Request { from, owns, stage: Stage::Open, ended: false, side_data: Vec::new() };
        self.requests.insert(request.to_owned(), new);
        owns
    }

    pub(super) fn contains(&self, request: &str) -> bool {
        self.requests.contains_key(request)
    }

    /// How much of a request that was added can be fetched, up to `usable` tokens.
    pub(super) fn matched(&self, request: &str, computed: u64, usable: u64) -> Option<Match> {
        let request = self.requests.get(request)?;
        let open = request.owns && request.stage == Stage::Open;
        Some(if open { request.from.matched(computed, usable) } else { Match::NONE })
    }

    /// The same of one that was not.
    pub(super) fn matched_unseen(&self, from: &Offered, computed: u64, usable: u64) -> Match {
        let open = !self.transfers.contains(&from.transfer);
        if open { from.matched(computed, usable) } else { Match::NONE }
    }

    /// A request has blocks: tokens from `computed` on are to be fetched into them, if any.
    ///
    /// It is fetched even if another one has its handoff: the engine waits for it already. The
    /// worker halves will refuse it, and say so.
    pub(super) fn allocated(
        &mut self,
        request: &str,
        tokens: (u32, u32),
        blocks: &[Vec<u32>],
        orders: &mut Orders,
    ) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage != Stage::Open {
            return;
        }
        if tokens.0 == tokens.1 {
            known.free(WireCode::NotNeeded, self.budget_ms, orders);
            return;
        }
        known.stage = Stage::Fetching { cancelled: false };
        self.fetching += 1;
        self.quorum.open(request);
        let Offered { transfer, address, engine, .. } = known.from.clone();
        orders.wants.push(Want {
            request: request.to_owned(),
            transfer,
            address,
            engine,
            tokens,
            blocks: blocks.iter().map(|blocks| BlockTable::new(0, blocks.clone())).collect(),
            budget_ms: self.budget_ms,
        });
    }

    /// A request has ended; `code` is why it needs no KV.
    pub(super) fn finished(&mut self, request: &str, code: WireCode, orders: &mut Orders) {
        let Some(known) = self.requests.get_mut(request) else { return };
        known.side_data.clear();
        if let Stage::Fetching { .. } = known.stage {
            known.ended = true;
            known.cancel(request, WireCode::Cancelled, "the request has ended", orders);
            return;
        }
        if known.stage == Stage::Open {
            known.free(code, self.budget_ms, orders);
        }
        self.remove(request);
    }

    /// A rank is through with a request.
    pub(super) fn reported(&mut self, rank: usize, report: Fetched, orders: &mut Orders) {
        let request = report.request.clone();
        let counted = self.quorum.report(rank, report);
        let Some(known) = self.requests.get_mut(&request) else { return };
        match counted {
            Counted::Failing { code, detail } => known.cancel(&request, code, &detail, orders),
            Counted::Complete { code, side_data } => {
                if !known.ended {
                    known.side_data = side_data;
                }
                self.count(code);
            }
            Counted::Unknown | Counted::Again | Counted::Waiting => {
                tracing::trace!(rank, request, ?counted, "a report of a fetch");
            }
        }
    }

    /// All ranks are through with a request, whether they have said how or not.
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

    /// How fetches ended so far, of which the ranks have said so.
    pub(super) fn outcomes(&self) -> &[(WireCode, u64)] {
        &self.outcomes
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// How many are being fetched.
    pub(super) const fn fetching(&self) -> usize {
        self.fetching
    }

    /// Of how many some rank has not said how it ended.
    pub(super) fn unreported(&self) -> usize {
        self.quorum.len()
    }

    fn count(&mut self, code: WireCode) {
        // Whatever later versions say is one entry: there may be any number of those.
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
    /// Nobody here needs it.
    fn free(&mut self, code: WireCode, budget_ms: u32, orders: &mut Orders) {
        self.stage = Stage::Taken;
        if self.owns {
            let Offered { transfer, address, engine, .. } = self.from.clone();
            orders.frees.push(Free { transfer, address, engine, code, budget_ms });
        }
    }

    /// Ends its fetching on all ranks, once.
    fn cancel(&mut self, request: &str, code: WireCode, detail: &str, orders: &mut Orders) {
        let cancelled = Stage::Fetching { cancelled: true };
        if std::mem::replace(&mut self.stage, cancelled) != cancelled {
            let (request, detail) = (request.to_owned(), detail.to_owned());
            orders.cancels.push(Cancel { request, code, detail });
        }
    }
}

impl Offered {
    fn matched(&self, computed: u64, usable: u64) -> Match {
        let there = self.tokens.map_or(usable, |tokens| tokens.min(usable));
        Match::Tokens(there.saturating_sub(computed))
    }
}
