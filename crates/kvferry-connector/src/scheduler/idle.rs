//! Blocks that are kept for other engines which do nothing with them.
//!
//! A client chooses what a request's parameters say. One that asks a prefill engine for a handoff which
//! no decode engine fetches has its blocks held until the offer expires; one that names a producer which
//! never answers has blocks of the decode engine wait for it. Both are bounded in time, and here in
//! number.

use rustc_hash::FxHashSet;
use std::collections::BTreeMap;

/// Requests that wait without blocks for room among the waiting loads, besides those asked for fewer than [`ASKED_MAX`]
/// times. With more, those that have waited longest are refused: the engine asks for each of them in each of its steps, and
/// every request of the step waits for that.
pub(super) const DEFERRED_MAX: usize = 32;

/// Number of times that the engine asks for a request that finds no room, before it may be refused: the answer to its claim
/// takes a step or two, and a request with an answer needs no room.
pub(super) const ASKED_MAX: u8 = 8;

/// The part of [`IdleLimit::idle_blocks`] that loads from producers which have never answered may have,
/// so that invented ones leave room for the others.
const STRANGERS: u32 = 4;

/// Addresses of producers that have answered, at most. All are forgotten when there are more.
const ANSWERED_MAX: usize = 4096;

/// Limit of the blocks that may be kept for other engines that do nothing with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IdleLimit {
    /// Blocks in the engine's pool. All groups share it, and block numbers are below this.
    pub pool_blocks: u32,
    /// Blocks that may be held for consumers which have not asked for them, besides those of the request
    /// that ended last: the oldest offers without a consumer are withdrawn. As many may belong to
    /// loads whose producers have not answered, besides those of one load: later requests wait without
    /// blocks, and are refused if too many wait.
    pub idle_blocks: u32,
}

/// Blocks of requests that have ended.
#[derive(Debug, Default)]
pub(super) struct HeldBlocks {
    limit: Option<IdleLimit>,
    all: BlockCounts,
    /// Blocks of the requests in `by_age`.
    unclaimed: BlockCounts,
    /// Requests that the worker halves have not been asked to give up, oldest first.
    by_age: BTreeMap<u64, String>,
    ages: u64,
}

/// The blocks of a request that has ended.
#[derive(Debug, Default)]
pub(super) struct HeldFor {
    blocks: Vec<u32>,
    /// The request's key in [`HeldBlocks::by_age`].
    age: Option<u64>,
}

impl HeldBlocks {
    pub(super) fn new(limit: Option<IdleLimit>) -> Self {
        Self { limit, ..Self::default() }
    }

    /// A request keeps these blocks. `offered`: for a consumer that may not have asked for it.
    pub(super) fn add(&mut self, request: &str, groups: &[Vec<u32>], offered: bool) -> HeldFor {
        let Some(limit) = self.limit else { return HeldFor::default() };
        let all = groups.iter().flatten().copied();
        let blocks: Vec<_> = all.filter(|block| *block < limit.pool_blocks).collect();
        self.all.add(&blocks, limit);
        let age = offered.then(|| {
            self.unclaimed.add(&blocks, limit);
            self.ages += 1;
            self.by_age.insert(self.ages, request.to_owned());
            self.ages
        });
        HeldFor { blocks, age }
    }

    /// The request whose blocks are to be given up if no consumer has asked for them.
    pub(super) fn overdue(&self) -> Option<&String> {
        let limit = self.limit?;
        let is_over = self.unclaimed.distinct > limit.idle_blocks as usize;
        let (_, oldest) = self.by_age.first_key_value().filter(|_| self.by_age.len() > 1)?;
        is_over.then_some(oldest)
    }

    /// Records that the worker halves give the request up if no consumer has asked for it.
    pub(super) fn given_up(&mut self, held: &mut HeldFor) {
        if let Some(age) = held.age.take() {
            self.by_age.remove(&age);
            self.unclaimed.remove(&held.blocks);
        }
    }

    pub(super) fn remove(&mut self, mut held: HeldFor) {
        self.given_up(&mut held);
        self.all.remove(&held.blocks);
    }

    /// Number of held blocks that the worker halves have not been asked to give up.
    pub(super) const fn unclaimed(&self) -> usize {
        self.unclaimed.distinct
    }

    /// The number of held blocks.
    pub(super) const fn len(&self) -> usize {
        self.all.distinct
    }
}

/// Number of holders of each block. Requests share those of a common prefix.
#[derive(Debug, Default)]
struct BlockCounts {
    counts: Vec<u32>,
    distinct: usize,
}

impl BlockCounts {
    fn add(&mut self, blocks: &[u32], limit: IdleLimit) {
        self.counts.resize(limit.pool_blocks as usize, 0);
        for block in blocks {
            let count = &mut self.counts[*block as usize];
            self.distinct += usize::from(*count == 0);
            *count += 1;
        }
    }

    fn remove(&mut self, blocks: &[u32]) {
        for block in blocks {
            let count = &mut self.counts[*block as usize];
            *count -= 1;
            self.distinct -= usize::from(*count == 0);
        }
    }
}

/// Loads whose producers have not answered.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    limit: Option<IdleLimit>,
    loads: usize,
    blocks: u64,
    /// Blocks of the loads from producers that have never answered.
    strangers_blocks: u64,
    answered: FxHashSet<String>,
}

/// A load in [`Waiting`].
#[derive(Debug)]
pub(super) struct WaitingLoad {
    blocks: u64,
    is_stranger: bool,
}

impl Waiting {
    pub(super) fn new(limit: Option<IdleLimit>) -> Self {
        Self { limit, ..Self::default() }
    }

    /// True if a load from this producer must not begin to wait.
    pub(super) fn is_full_for(&self, producer: &str) -> bool {
        let Some(IdleLimit { idle_blocks, .. }) = self.limit else { return false };
        let strangers = u64::from((idle_blocks / STRANGERS).max(1));
        self.blocks >= u64::from(idle_blocks)
            || self.strangers_blocks >= strangers && !self.answered.contains(producer)
    }

    /// A load with so many blocks of its own begins.
    pub(super) fn begin(&mut self, producer: &str, blocks: u64) -> WaitingLoad {
        let is_stranger = !self.answered.contains(producer);
        self.loads += 1;
        self.blocks += blocks;
        self.strangers_blocks += if is_stranger { blocks } else { 0 };
        WaitingLoad { blocks, is_stranger }
    }

    /// A producer of this address has answered.
    pub(super) fn answered(&mut self, producer: &str) {
        if !self.answered.contains(producer) {
            if self.answered.len() >= ANSWERED_MAX {
                self.answered.clear();
            }
            self.answered.insert(producer.to_owned());
        }
    }

    /// The load has got an answer, or has ended.
    pub(super) fn end(&mut self, load: Option<WaitingLoad>) {
        let Some(WaitingLoad { blocks, is_stranger }) = load else { return };
        self.loads -= 1;
        self.blocks -= blocks;
        self.strangers_blocks -= if is_stranger { blocks } else { 0 };
    }

    pub(super) const fn loads(&self) -> usize {
        self.loads
    }
}
