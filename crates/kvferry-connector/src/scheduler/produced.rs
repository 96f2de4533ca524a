//! Requests whose KV this engine hands over.

use super::idle::{HeldBlocks, HeldFor, IdleLimit};
use super::{FinishReason, GroupRule, Scheduled, Stats};
use crate::metadata::{Compute, ConnectorMetadata, Ending, EndingKind, Expect, Offer};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BLOCKS_MAX, BlockTable, HandoffId, NULL_BLOCK};
use kvferry_proto::layout::Kind;
use rustc_hash::{FxHashMap, FxHashSet};
use std::ops::Range;

/// Requests by the engine's ids.
#[derive(Debug, Default)]
pub(super) struct Produced {
    pub(super) requests: FxHashMap<String, Request>,
    transfers: FxHashSet<HandoffId>,
    /// Requests that have arrived since the last step, whose handoff's id the router knows.
    arrived: Vec<String>,
    /// Number of requests that are held.
    pub(super) held: usize,
    pub(super) held_blocks: HeldBlocks,
    pub(super) stats: Stats,
}

#[derive(Debug)]
pub(super) struct Request {
    transfer: HandoffId,
    /// The worker halves or the router know the handoff's id.
    named: bool,
    /// Tokens to hand over.
    tokens: u32,
    /// Set if the handoff is complete with these tokens; else it is with the request's end.
    eager: bool,
    /// The worker halves know the request's current blocks.
    offered: bool,
    /// Blocks of the request in the steps so far, per group.
    blocks: Vec<Vec<u32>>,
    /// Tokens whose KV exists after the last step.
    until: u32,
    /// The end of its handoff on a rank, if no consumer caused that, or the reason why it was given up.
    lost: Option<(WireCode, String)>,
    /// Blocks that the request keeps since its end.
    held: HeldFor,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    /// The worker halves were informed, before the request's end, that it is not handed over.
    Withdrawn,
    /// The request has ended, and its blocks are kept until all ranks report it sent.
    Held,
}

/// Outcome of a request's end for its blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// The request's blocks are free.
    Free,
    /// The request's blocks are held until all ranks have withdrawn it.
    Withdrawn,
    /// The request's blocks are held for a consumer of this handoff of so many tokens.
    Offered(HandoffId, u32),
}

impl Produced {
    pub(super) fn new(limit: Option<IdleLimit>) -> Self {
        Self { held_blocks: HeldBlocks::new(limit), ..Self::default() }
    }

    /// Adds a request. False if another live request has the handoff's id.
    pub(super) fn add(
        &mut self,
        request: &str,
        transfer: HandoffId,
        named: bool,
        tokens: u32,
        eager: bool,
    ) -> bool {
        if !self.transfers.insert(transfer.clone()) {
            return false;
        }
        if named {
            self.arrived.push(request.to_owned());
        }
        let new = Request {
            transfer,
            named,
            tokens,
            eager,
            offered: false,
            blocks: Vec::new(),
            until: 0,
            lost: None,
            held: HeldFor::default(),
            stage: Stage::Open,
        };
        self.requests.insert(request.to_owned(), new);
        true
    }

    pub(super) fn contains(&self, request: &str) -> bool {
        self.requests.contains_key(request)
    }

    /// Returns the number of tokens of a request that are handed over.
    pub(super) fn tokens(&self, request: &str) -> Option<u32> {
        self.requests.get(request).map(|request| request.tokens)
    }

    /// True if a request has not ended and may still be handed over.
    pub(super) fn is_open(&self, request: &str) -> bool {
        self.requests.get(request).is_some_and(Request::is_open)
    }

    /// True if the steps of a request matter.
    pub(super) fn is_followed(&self, request: &str, groups: &[GroupRule]) -> bool {
        self.requests.get(request).is_some_and(|request| {
            request.is_open()
                && (!request.is_complete() || groups.iter().any(|group| group.kind != Kind::Full))
        })
    }

    pub(super) fn preempted(&mut self, request: &str, metadata: &mut ConnectorMetadata) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage == Stage::Open {
            known.start_over(request, metadata);
        }
    }

    /// Has a request that has not ended not handed over. Its consumer learns that at its end.
    pub(super) fn give_up(&mut self, request: &str, why: &str, metadata: &mut ConnectorMetadata) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage == Stage::Open {
            known.start_over(request, metadata);
            known.give_up(why);
        }
    }

    /// Does so with all requests of which nothing is offered.
    pub(super) fn give_up_all(&mut self, why: &str) {
        for known in self.requests.values_mut() {
            if known.stage == Stage::Open && !known.offered {
                known.give_up(why);
            }
        }
    }

    pub(super) fn computed(
        &mut self,
        scheduled: Scheduled<'_>,
        groups: &[GroupRule],
        metadata: &mut ConnectorMetadata,
    ) {
        let Some(request) = self.requests.get_mut(scheduled.request) else { return };
        if request.stage != Stage::Open {
            return;
        }
        if scheduled.all {
            request.start_over(scheduled.request, metadata);
        }
        // It has ended on one rank, so no consumer can get all of it.
        if request.lost.is_some() {
            return;
        }
        if request.is_overwritten(&scheduled, groups) {
            self.stats.count_withdrawal(WireCode::Unsupported);
            request.withdraw(
                scheduled.request,
                WireCode::Unsupported,
                "the producer overwrote the KV by computing beyond the prompt",
                false,
                metadata,
            );
            return;
        }
        if !request.is_complete() {
            metadata.computes.push(request.compute(scheduled, groups));
        }
    }

    /// A request's handoff has ended on a rank before the request did.
    pub(super) fn lost(&mut self, request: &str, code: WireCode, detail: String) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage == Stage::Held && known.lost.is_none() && !is_by_consumer(code) {
            self.stats.count_withdrawal(code);
            known.lost = Some((code, detail));
            return;
        }
        // A handoff that is done on this rank is still read on others.
        if known.stage == Stage::Open && known.lost.is_none() && !code.is_ok() {
            let why = "a handoff ended before its request";
            if is_by_consumer(code) {
                // The consumer's client may cause it with each request.
                tracing::debug!(request, %code, detail, "{why}");
            } else {
                tracing::warn!(request, %code, detail, "{why}");
            }
            known.lost = Some((code, detail));
        }
    }

    /// Announces the requests that have arrived and wait.
    pub(super) fn expect(&mut self, metadata: &mut ConnectorMetadata) {
        for request in self.arrived.drain(..) {
            let Some(known) = self.requests.get(&request) else { continue };
            if known.stage == Stage::Open && !known.offered {
                metadata.expects.push(Expect { request, transfer: known.transfer.clone() });
            }
        }
    }

    /// A request has ended, with these blocks. `side_data` is dropped if its handoff is complete.
    pub(super) fn finished(
        &mut self,
        request: &str,
        how: FinishReason,
        blocks: Option<&[Vec<u32>]>,
        groups: &[GroupRule],
        side_data: Option<Vec<u8>>,
        metadata: &mut ConnectorMetadata,
    ) -> End {
        let Some(known) = self.requests.get_mut(request) else { return End::Free };
        let side_data = side_data.filter(|_| !known.eager);
        let end = match (known.stage, known.verdict(how, blocks, groups)) {
            // The caller has lost the answer, and asks again.
            (Stage::Held, _) => return End::Withdrawn,
            (Stage::Open, None) => {
                let transfer = known.transfer.clone();
                let (request, how) = (request.to_owned(), EndingKind::Held { side_data });
                metadata.endings.push(Ending { request, transfer: transfer.clone(), how });
                self.stats.offered += 1;
                self.stats.offered_tokens += u64::from(known.tokens);
                End::Offered(transfer, known.tokens)
            }
            (Stage::Open, Some((code, detail))) => {
                // A consumer may be reading until all ranks have withdrawn it.
                let held = known.offered;
                self.stats.count_withdrawal(code);
                known.withdraw(request, code, &detail, held, metadata);
                known.lost = Some((code, detail));
                if held { End::Withdrawn } else { End::Free }
            }
            // The worker halves may not know it yet: a reset withdraws between steps.
            (Stage::Withdrawn, _) => {
                match metadata.endings.iter_mut().find(|it| it.request == request) {
                    Some(Ending { how: EndingKind::Withdrawn { held, .. }, .. }) => {
                        *held = true;
                        End::Withdrawn
                    }
                    _ => End::Free,
                }
            }
        };
        if end == End::Free {
            self.remove(request);
        } else {
            known.stage = Stage::Held;
            self.held += 1;
            let announced = std::mem::take(&mut known.blocks);
            let blocks = blocks.unwrap_or(&announced);
            let offered = matches!(end, End::Offered(..));
            known.held = self.held_blocks.add(request, blocks, offered);
            self.reclaim(metadata);
        }
        end
    }

    /// Has the oldest offers withdrawn that no consumer has asked for, if too many blocks are held.
    fn reclaim(&mut self, metadata: &mut ConnectorMetadata) {
        while let Some(request) = self.held_blocks.overdue().cloned() {
            let known = self.requests.get_mut(&request).expect("it is held");
            self.held_blocks.given_up(&mut known.held);
            metadata.reclaims.push(request);
        }
    }

    /// Withdraws every offer, complete or not. Held requests stay held until all ranks have done so.
    pub(super) fn reset(&mut self, detail: &str, metadata: &mut ConnectorMetadata) {
        for (request, known) in &mut self.requests {
            let stage = known.stage;
            if stage == Stage::Held || stage == Stage::Open && known.offered {
                self.stats.count_withdrawal(WireCode::Revoked);
                known.withdraw(request, WireCode::Revoked, detail, false, metadata);
            }
            if stage == Stage::Held {
                known.lost = Some((WireCode::Revoked, detail.to_owned()));
                known.stage = stage;
            }
        }
    }

    /// No consumer reads the blocks of a held request any more.
    pub(super) fn sent(&mut self, request: &str) {
        if self.requests.get(request).is_some_and(|request| request.stage == Stage::Held) {
            self.held -= 1;
            self.remove(request);
        }
    }

    fn remove(&mut self, request: &str) {
        if let Some(request) = self.requests.remove(request) {
            self.transfers.remove(&request.transfer);
            self.held_blocks.remove(request.held);
        }
    }
}

/// Whether a consumer's engine ended the handoff. Its client may cause that with each request.
const fn is_by_consumer(code: WireCode) -> bool {
    matches!(code, WireCode::Ok | WireCode::NotNeeded | WireCode::Cancelled)
}

impl Request {
    /// The steps of a lost request matter only while blocks of it are offered.
    fn is_open(&self) -> bool {
        self.stage == Stage::Open && (self.lost.is_none() || self.offered)
    }

    fn give_up(&mut self, why: &str) {
        self.lost.get_or_insert_with(|| (WireCode::Internal, why.to_owned()));
    }

    /// Whether the worker halves know everything that is handed over.
    const fn is_complete(&self) -> bool {
        self.offered && self.until >= self.tokens
    }

    /// Whether a step computes so far beyond the tokens to hand over that it overwrites some of them: a
    /// state changes in place, and blocks that leave a window are reused.
    fn is_overwritten(&self, scheduled: &Scheduled<'_>, groups: &[GroupRule]) -> bool {
        let until = scheduled.computed.saturating_add(scheduled.tokens);
        until > u64::from(self.tokens)
            && groups.iter().any(|group| match group.kind {
                Kind::Full => false,
                Kind::State => true,
                kind => {
                    let from = group.block_of(kind.horizon(scheduled.computed));
                    from > self.range(group).start as u64
                }
            })
    }

    /// The blocks of a group that are handed over.
    ///
    /// Earlier ones have left the window, or the chunk, when the next token is computed. The engine
    /// frees them when the request ends, or even before, so a consumer must never read them. Of a state
    /// only the block of the last token is handed over: earlier ones have earlier states, and later ones
    /// are scratch space of speculative decoding.
    fn range(&self, group: &GroupRule) -> Range<usize> {
        let (tokens, size) = (u64::from(self.tokens), u64::from(group.block_tokens.max(1)));
        let end = tokens.div_ceil(size);
        let from = match group.kind {
            Kind::State => end.saturating_sub(1),
            kind => group.block_of(kind.horizon(tokens)),
        };
        from as usize..end as usize
    }

    fn compute(&mut self, scheduled: Scheduled<'_>, groups: &[GroupRule]) -> Compute {
        let offer = (!self.offered).then(|| Offer {
            transfer: self.transfer.clone(),
            tokens: self.tokens,
            eager: self.eager,
        });
        (self.offered, self.named) = (true, true);
        let until = scheduled.computed.saturating_add(scheduled.tokens);
        self.until = u32::try_from(until).unwrap_or(u32::MAX);
        self.blocks.resize(groups.len(), Vec::new());
        let mut tables = Vec::with_capacity(groups.len());
        for (mut new, (at, group)) in scheduled.blocks.into_iter().zip(groups.iter().enumerate()) {
            let (range, first) = (self.range(group), self.blocks[at].len());
            // Those behind have nothing of the prompt.
            new.truncate(BLOCKS_MAX - first);
            self.blocks[at].extend_from_slice(&new);
            tables.push(if group.kind == Kind::State {
                // A state moves from block to block until the last token is computed.
                let state =
                    self.blocks[at].get(range.clone()).filter(|_| until >= self.tokens.into());
                BlockTable::new(range.start as u32, state.unwrap_or_default().to_vec())
            } else {
                BlockTable::new(first as u32, needed(new, first, range.start))
            });
        }
        let has_blocks = tables.iter().any(|table| !table.blocks.is_empty());
        let blocks = if has_blocks { tables } else { Vec::new() };
        Compute { request: scheduled.request.to_owned(), offer, until: self.until, blocks }
    }

    /// The first group in which the engine has freed or moved a block that is handed over, if the
    /// request ended with these blocks.
    fn moved(&self, blocks: &[Vec<u32>], groups: &[GroupRule]) -> Option<usize> {
        let mut tables = self.blocks.iter().zip(groups).zip(blocks);
        tables.position(|((announced, group), last)| {
            self.range(group).any(|at| announced.get(at) != last.get(at))
        })
    }

    /// Returns the reason why a request with this end is not handed over; `None` if it is.
    fn verdict(
        &self,
        how: FinishReason,
        blocks: Option<&[Vec<u32>]>,
        groups: &[GroupRule],
    ) -> Option<(WireCode, String)> {
        let (code, detail) = match how {
            FinishReason::Length | FinishReason::Stop => {
                if self.lost.is_some() {
                    return self.lost.clone();
                }
                if self.is_complete() {
                    let group = blocks.and_then(|blocks| self.moved(blocks, groups))?;
                    let why = "the producer freed or moved blocks that it had offered";
                    return Some((WireCode::Revoked, format!("{why}, of group {group}")));
                }
                (WireCode::Internal, "the request ended before its prompt was computed")
            }
            FinishReason::Abort => (WireCode::Cancelled, "the producer's request was aborted"),
            FinishReason::Error => (WireCode::Internal, "the producer's request failed"),
        };
        Some((code, detail.to_owned()))
    }

    fn start_over(&mut self, request: &str, metadata: &mut ConnectorMetadata) {
        if self.offered {
            metadata.restarts.push(request.to_owned());
        }
        self.offered = false;
        self.blocks.clear();
        self.until = 0;
    }

    /// Tells the worker halves, if the handoff's id is known, that nothing can be fetched.
    fn withdraw(
        &mut self,
        request: &str,
        code: WireCode,
        detail: &str,
        held: bool,
        metadata: &mut ConnectorMetadata,
    ) {
        self.stage = Stage::Withdrawn;
        if self.named {
            let how = EndingKind::Withdrawn { code, detail: detail.to_owned(), held };
            let (request, transfer) = (request.to_owned(), self.transfer.clone());
            metadata.endings.push(Ending { request, transfer, how });
        }
    }
}

/// Blocks of a group from its `first` on; null where a block is not handed over.
fn needed(mut blocks: Vec<u32>, first: usize, from: usize) -> Vec<u32> {
    let left = from.saturating_sub(first).min(blocks.len());
    blocks[..left].fill(NULL_BLOCK);
    blocks
}

impl GroupRule {
    fn block_of(&self, token: u64) -> u64 {
        token.checked_div(u64::from(self.block_tokens)).unwrap_or(0)
    }
}
