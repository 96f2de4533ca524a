//! Requests whose KV is handed over by this engine.

use super::{Finish, GroupRule, Scheduled};
use crate::orders::{Compute, Ending, How, Offer, Orders};
use kvferry_proto::WireCode;
use kvferry_proto::handoff::{BlockTable, HandoffId, NULL_BLOCK};
use kvferry_proto::layout::Kind;
use rustc_hash::{FxHashMap, FxHashSet};

/// All of them, by the engine's names for them.
#[derive(Debug, Default)]
pub(super) struct Produced {
    requests: FxHashMap<String, Request>,
    /// Of the requests above.
    transfers: FxHashSet<HandoffId>,
    held: usize,
}

#[derive(Debug)]
struct Request {
    transfer: HandoffId,
    /// Whether anybody else knows the name of the handoff: the worker halves, or who gave it.
    named: bool,
    /// How many tokens are handed over.
    tokens: u32,
    /// Whether the worker halves know of these blocks; not any more after they were lost.
    offered: bool,
    /// Per group, how many blocks the worker halves know.
    told: Vec<u32>,
    /// Tokens whose KV is there after the last step that was told.
    until: u32,
    /// How its handoff ended on a rank, if it did before the request.
    lost: Option<(WireCode, String)>,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// It may become a handoff.
    Open,
    /// The worker halves were told that it does not, before it ended.
    Withdrawn,
    /// It has ended, its blocks are being read.
    Held,
}

/// A request that ended, and is held.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) transfer: HandoffId,
    pub(super) tokens: u32,
}

impl Produced {
    /// Adds a request; whether its handoff has a name that no other live one has.
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
        let new = Request {
            transfer,
            named,
            tokens,
            offered: false,
            told: Vec::new(),
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

    /// How many tokens of it are handed over.
    pub(super) fn tokens(&self, request: &str) -> Option<u32> {
        self.requests.get(request).map(|request| request.tokens)
    }

    /// Whether it matters if a step computes something of it.
    pub(super) fn is_followed(&self, request: &str, groups: &[GroupRule]) -> bool {
        self.requests.get(request).is_some_and(|request| {
            request.stage == Stage::Open
                && (!request.is_complete() || groups.iter().any(|group| group.kind != Kind::Full))
        })
    }

    /// A request lost its blocks.
    pub(super) fn preempted(&mut self, request: &str, orders: &mut Orders) {
        let Some(known) = self.requests.get_mut(request) else { return };
        if known.stage == Stage::Open {
            known.start_over(request, orders);
        }
    }

    /// A step computes a part of a request.
    pub(super) fn computed(
        &mut self,
        scheduled: Scheduled<'_>,
        groups: &[GroupRule],
        eager: bool,
        orders: &mut Orders,
    ) {
        let Some(request) = self.requests.get_mut(scheduled.request) else { return };
        if request.stage != Stage::Open {
            return;
        }
        if scheduled.all {
            request.start_over(scheduled.request, orders);
        }
        // What has ended on one rank cannot be had by any consumer as a whole.
        if request.lost.is_some() {
            return;
        }
        if request.is_overwritten(&scheduled, groups) {
            request.withdraw(
                scheduled.request,
                WireCode::Unsupported,
                "the producer went on computing over what was to be handed over",
                orders,
            );
            return;
        }
        if !request.is_complete() {
            orders.computes.push(request.compute(scheduled, groups, eager));
        }
    }

    /// A request has ended on a rank before it did here.
    pub(super) fn lost(&mut self, request: &str, code: WireCode, detail: String) {
        let Some(known) = self.requests.get_mut(request) else { return };
        // What was handed over on this rank already is still being read on others.
        if known.stage == Stage::Open && known.lost.is_none() && !code.is_ok() {
            tracing::warn!(request, %code, detail, "a handoff ended before its request");
            known.lost = Some((code, detail));
        }
    }

    /// A request has ended; what is held of it.
    pub(super) fn finished(
        &mut self,
        request: &str,
        how: Finish,
        side_data: Option<Vec<u8>>,
        orders: &mut Orders,
    ) -> Option<Held> {
        let known = self.requests.get_mut(request)?;
        match (known.stage, known.verdict(how)) {
            (Stage::Held, _) => return None,
            (Stage::Open, None) => {
                known.stage = Stage::Held;
                self.held += 1;
                let transfer = known.transfer.clone();
                let how = How::Held { side_data };
                orders.endings.push(Ending {
                    request: request.to_owned(),
                    transfer: transfer.clone(),
                    how,
                });
                return Some(Held { transfer, tokens: known.tokens });
            }
            (Stage::Open, Some((code, detail))) => {
                known.withdraw(request, code, &detail, orders);
            }
            (Stage::Withdrawn, _) => {}
        }
        self.remove(request);
        None
    }

    /// Nobody reads a request's blocks any more.
    pub(super) fn sent(&mut self, request: &str) {
        if self.requests.get(request).is_some_and(|request| request.stage == Stage::Held) {
            self.held -= 1;
            self.remove(request);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// How many have ended and are held.
    pub(super) const fn held(&self) -> usize {
        self.held
    }

    fn remove(&mut self, request: &str) {
        if let Some(request) = self.requests.remove(request) {
            self.transfers.remove(&request.transfer);
        }
    }
}

impl Request {
    /// Whether the worker halves know all that is handed over.
    const fn is_complete(&self) -> bool {
        self.offered && self.until >= self.tokens
    }

    /// The first token that is looked at when the last one that is handed over is computed again.
    fn horizon(&self, group: &GroupRule) -> u64 {
        group.kind.horizon(u64::from(self.tokens).saturating_sub(1))
    }

    /// Whether a step computes so far beyond what is handed over that it spoils that: a state is
    /// carried on in place, and blocks that leave a window are given to others.
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
    /// Those before it have left the window, or the chunk, when the prompt is computed. The engine
    /// gives them to others then, or already while the rest of the prompt is computed, so that a
    /// consumer must not read them even while they are there.
    fn from(&self, group: &GroupRule) -> u64 {
        group.block_of(self.horizon(group))
    }

    /// What the worker halves have to know of a step.
    fn compute(&mut self, scheduled: Scheduled<'_>, groups: &[GroupRule], eager: bool) -> Compute {
        let offer = (!self.offered).then(|| Offer {
            transfer: self.transfer.clone(),
            tokens: self.tokens,
            eager,
        });
        (self.offered, self.named) = (true, true);
        let until = scheduled.computed.saturating_add(scheduled.tokens);
        self.until = u32::try_from(until).unwrap_or(u32::MAX);
        self.told.resize(groups.len(), 0);
        let mut news = false;
        let mut tables = Vec::with_capacity(groups.len());
        for (blocks, (at, group)) in scheduled.blocks.into_iter().zip(groups.iter().enumerate()) {
            let first = self.told[at];
            news |= !blocks.is_empty();
            self.told[at] = first.saturating_add(u32::try_from(blocks.len()).unwrap_or(u32::MAX));
            tables.push(BlockTable::new(first, self.needed(blocks, first, group)));
        }
        let blocks = if news { tables } else { Vec::new() };
        Compute { request: scheduled.request.to_owned(), offer, until: self.until, blocks }
    }

    /// Blocks of a group from its `first` on, without those that are not handed over.
    fn needed(&self, mut blocks: Vec<u32>, first: u32, group: &GroupRule) -> Vec<u32> {
        let left = self.from(group).saturating_sub(u64::from(first));
        let left = usize::try_from(left).unwrap_or(usize::MAX).min(blocks.len());
        blocks[..left].fill(NULL_BLOCK);
        blocks
    }

    /// Why it is not handed over if it ends like that; none if it is.
    fn verdict(&self, how: Finish) -> Option<(WireCode, String)> {
        let (code, detail) = match how {
            Finish::Length if self.lost.is_some() => return self.lost.clone(),
            Finish::Length if self.is_complete() => return None,
            Finish::Length => (WireCode::Internal, "it ended before its prompt was computed"),
            Finish::Stop => (WireCode::NotNeeded, "it said all it has to say"),
            Finish::Abort => (WireCode::Cancelled, "the producer's request was aborted"),
            Finish::Error => (WireCode::Internal, "the producer's request failed"),
        };
        Some((code, detail.to_owned()))
    }

    fn start_over(&mut self, request: &str, orders: &mut Orders) {
        if self.offered {
            orders.restarts.push(request.to_owned());
        }
        self.offered = false;
        self.told.clear();
        self.until = 0;
    }

    /// Tells the worker halves that there will be nothing to fetch, if anybody may know of it.
    fn withdraw(&mut self, request: &str, code: WireCode, detail: &str, orders: &mut Orders) {
        self.stage = Stage::Withdrawn;
        if self.named {
            let how = How::Withdrawn { code, detail: detail.to_owned() };
            let (request, transfer) = (request.to_owned(), self.transfer.clone());
            orders.endings.push(Ending { request, transfer, how });
        }
    }
}

impl GroupRule {
    /// Which block a token is in.
    fn block_of(&self, token: u64) -> u64 {
        token.checked_div(u64::from(self.block_tokens)).unwrap_or(0)
    }
}
