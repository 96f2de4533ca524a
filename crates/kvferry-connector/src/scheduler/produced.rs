//! Requests whose KV this engine hands over.

use super::{FinishReason, GroupRule, Scheduled};
use crate::metadata::{Compute, ConnectorMetadata, Ending, EndingKind, Expect, Offer};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId, NULL_BLOCK};
use kvferry_proto::layout::Kind;
use rustc_hash::{FxHashMap, FxHashSet};

/// Requests by the engine's ids.
#[derive(Debug, Default)]
pub(super) struct Produced {
    pub(super) requests: FxHashMap<String, Request>,
    transfers: FxHashSet<HandoffId>,
    /// Requests that have arrived since the last step, whose handoff's id the router knows.
    arrived: Vec<String>,
    /// How many requests are held.
    pub(super) held: usize,
}

#[derive(Debug)]
pub(super) struct Request {
    transfer: HandoffId,
    /// The worker halves or the router know the handoff's id.
    named: bool,
    /// Tokens to hand over.
    tokens: u32,
    /// The worker halves know the request's current blocks.
    offered: bool,
    /// How many blocks the worker halves know, per group.
    known: Vec<u32>,
    /// Tokens whose KV exists after the last step.
    until: u32,
    /// How its handoff ended on a rank, if that was before the request's end.
    lost: Option<(WireCode, String)>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Open,
    /// The worker halves were told, before its end, that it is not handed over.
    Withdrawn,
    /// It has ended, and its blocks are kept until all ranks report it sent.
    Held,
}

/// What becomes of a request that ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// Its blocks are free.
    Free,
    /// Its blocks are held until all ranks have withdrawn it.
    Withdrawn,
    /// Its blocks are held for a consumer of this handoff of so many tokens.
    Offered(HandoffId, u32),
}

impl Produced {
    /// Adds a request. False if another live request has the handoff's id.
    pub(super) fn add(
        &mut self,
        request: &str,
        transfer: HandoffId,
        named: bool,
        tokens: u32,
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
            offered: false,
            known: Vec::new(),
            until: 0,
            lost: None,
            stage: Stage::Open,
        };
        self.requests.insert(request.to_owned(), new);
        true
    }

    pub(super) fn contains(&self, request: &str) -> bool {
        self.requests.contains_key(request)
    }

    /// How many tokens of a request are handed over.
    pub(super) fn tokens(&self, request: &str) -> Option<u32> {
        self.requests.get(request).map(|request| request.tokens)
    }

    /// Whether the steps of a request matter.
    pub(super) fn is_followed(&self, request: &str, groups: &[GroupRule]) -> bool {
        self.requests.get(request).is_some_and(|request| {
            request.stage == Stage::Open
                && (!request.is_complete() || groups.iter().any(|group| group.kind != Kind::Full))
        })
    }

    pub(super) fn preempted(&mut self, request: &str, metadata: &mut ConnectorMetadata) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage == Stage::Open {
            known.start_over(request, metadata);
        }
    }

    pub(super) fn computed(
        &mut self,
        scheduled: Scheduled<'_>,
        groups: &[GroupRule],
        eager: bool,
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
            metadata.computes.push(request.compute(scheduled, groups, eager));
        }
    }

    /// A request's handoff has ended on a rank before the request did.
    pub(super) fn lost(&mut self, request: &str, code: WireCode, detail: String) {
        let Some(known) = self.requests.get_mut(request) else { return };
        // A handoff that is done on this rank is still read on others.
        if known.stage == Stage::Open && known.lost.is_none() && !code.is_ok() {
            tracing::warn!(request, %code, detail, "a handoff ended before its request");
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

    /// A request has ended.
    pub(super) fn finished(
        &mut self,
        request: &str,
        how: FinishReason,
        side_data: Option<Vec<u8>>,
        metadata: &mut ConnectorMetadata,
    ) -> End {
        let Some(known) = self.requests.get_mut(request) else { return End::Free };
        let end = match (known.stage, known.verdict(how)) {
            (Stage::Held, _) => return End::Free,
            (Stage::Open, None) => {
                let transfer = known.transfer.clone();
                let (request, how) = (request.to_owned(), EndingKind::Held { side_data });
                metadata.endings.push(Ending { request, transfer: transfer.clone(), how });
                End::Offered(transfer, known.tokens)
            }
            (Stage::Open, Some((code, detail))) => {
                // A consumer may be reading until all ranks have withdrawn it.
                let held = known.offered;
                known.withdraw(request, code, &detail, held, metadata);
                if held { End::Withdrawn } else { End::Free }
            }
            (Stage::Withdrawn, _) => End::Free,
        };
        if end == End::Free {
            self.remove(request);
        } else {
            known.stage = Stage::Held;
            self.held += 1;
        }
        end
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
        }
    }
}

impl Request {
    /// Whether the worker halves know everything that is handed over.
    const fn is_complete(&self) -> bool {
        self.offered && self.until >= self.tokens
    }

    /// The first token that the model reads when the last one handed over is computed again.
    fn horizon(&self, group: &GroupRule) -> u64 {
        group.kind.horizon(u64::from(self.tokens).saturating_sub(1))
    }

    /// Whether a step computes so far beyond the tokens to hand over that it overwrites some of them: a
    /// state changes in place, and blocks that leave a window are reused.
    fn is_overwritten(&self, scheduled: &Scheduled<'_>, groups: &[GroupRule]) -> bool {
        let until = scheduled.computed.saturating_add(scheduled.tokens);
        until > u64::from(self.tokens)
            && groups.iter().any(|group| match group.kind {
                Kind::Full => false,
                Kind::State => true,
                kind => group.block_of(kind.horizon(scheduled.computed)) > self.from(group),
            })
    }

    /// The first block of a group that is handed over.
    ///
    /// Earlier blocks have left the window, or the chunk, when the prompt is computed. The engine reuses
    /// them then, or even before, so a consumer must never read them.
    fn from(&self, group: &GroupRule) -> u64 {
        group.block_of(self.horizon(group))
    }

    fn compute(&mut self, scheduled: Scheduled<'_>, groups: &[GroupRule], eager: bool) -> Compute {
        let offer = (!self.offered).then(|| Offer {
            transfer: self.transfer.clone(),
            tokens: self.tokens,
            eager,
        });
        (self.offered, self.named) = (true, true);
        let until = scheduled.computed.saturating_add(scheduled.tokens);
        self.until = u32::try_from(until).unwrap_or(u32::MAX);
        self.known.resize(groups.len(), 0);
        let mut has_new_blocks = false;
        let mut tables = Vec::with_capacity(groups.len());
        for (blocks, (at, group)) in scheduled.blocks.into_iter().zip(groups.iter().enumerate()) {
            let first = self.known[at];
            has_new_blocks |= !blocks.is_empty();
            self.known[at] = first.saturating_add(u32::try_from(blocks.len()).unwrap_or(u32::MAX));
            tables.push(BlockTable::new(first, self.needed(blocks, first, group)));
        }
        let blocks = if has_new_blocks { tables } else { Vec::new() };
        Compute { request: scheduled.request.to_owned(), offer, until: self.until, blocks }
    }

    /// Blocks of a group from its `first` on; null where a block is not handed over.
    fn needed(&self, mut blocks: Vec<u32>, first: u32, group: &GroupRule) -> Vec<u32> {
        let left = self.from(group).saturating_sub(u64::from(first));
        let left = usize::try_from(left).unwrap_or(usize::MAX).min(blocks.len());
        blocks[..left].fill(NULL_BLOCK);
        blocks
    }

    /// Why a request with this end is not handed over; `None` if it is.
    fn verdict(&self, how: FinishReason) -> Option<(WireCode, String)> {
        let (code, detail) = match how {
            FinishReason::Length | FinishReason::Stop => {
                if self.lost.is_some() {
                    return self.lost.clone();
                }
                if self.is_complete() {
                    return None;
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
        self.known.clear();
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

impl GroupRule {
    fn block_of(&self, token: u64) -> u64 {
        token.checked_div(u64::from(self.block_tokens)).unwrap_or(0)
    }
}
