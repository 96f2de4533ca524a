//! The block tables of requests, and the prefix cache over them.

use crate::block_pool::{BlockHash, BlockPins, BlockPool};
use crate::config::{EngineConfig, Storage};
use crate::layout::BlockId;
use crate::model::Attention;
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::sync::Arc;

#[derive(Clone, Copy, Debug)]
struct Group {
    attention: Attention,
    block_tokens: usize,
    /// See [`crate::GroupCache::scratch`].
    scratch: usize,
    pool: usize,
}

impl Group {
    /// Number of leading blocks that are not read any more once `next` is the first position to
    /// compute.
    fn left_behind(&self, next: usize) -> usize {
        match self.attention {
            Attention::Full => 0,
            Attention::Window { tokens } => (next + 1).saturating_sub(tokens) / self.block_tokens,
            Attention::State => next.saturating_sub(1) / self.block_tokens,
        }
    }
}

impl Group {
    /// Gives a state the block for the last of `total` tokens, with the scratch blocks behind it. Entries
    /// that are skipped are null; scratch blocks there move to the end.
    fn move_on(
        &self,
        table: &mut Vec<BlockId>,
        total: usize,
        has_scratch: bool,
        mut take: impl FnMut() -> BlockId,
    ) {
        let (had, end) = (table.len(), total.div_ceil(self.block_tokens) + self.scratch);
        if end <= had {
            return;
        }
        let state = end - self.scratch - 1;
        table.resize(had.max(state), BlockId::NULL);
        for at in if has_scratch { had - self.scratch..had.min(state) } else { 0..0 } {
            let moved = std::mem::replace(&mut table[at], BlockId::NULL);
            table.push(moved);
        }
        while table.len() < end {
            table.push(take());
        }
    }
}

/// The blocks of one request.
#[derive(Debug, Default)]
pub(crate) struct Tables {
    /// Blocks of each group, one entry per `block_tokens` positions.
    pub(crate) blocks: Vec<Vec<BlockId>>,
    /// Number of blocks that were offered to the prefix cache, per group.
    offered: Vec<usize>,
    /// Whether the last blocks of groups that have scratch blocks are these.
    has_scratch: bool,
}

impl Tables {
    pub(crate) fn is_empty(&self) -> bool {
        self.blocks.iter().all(Vec::is_empty)
    }
}

/// The cached prefix of a request.
#[derive(Debug, Default)]
pub(crate) struct Hit {
    pub(crate) tokens: usize,
    blocks: Vec<Vec<BlockId>>,
}

/// All blocks of an engine: one pool per group, or one for all.
#[derive(Debug)]
pub(crate) struct CacheManager {
    groups: Vec<Group>,
    pools: Arc<Mutex<Vec<BlockPool>>>,
    pool_of_group: Arc<[usize]>,
    /// A hit ends at a multiple of this: every group has a whole block there.
    alignment: usize,
    prefix_caching: bool,
}

fn lcm(a: usize, b: usize) -> usize {
    let (mut x, mut y) = (a, b);
    while y > 0 {
        (x, y) = (y, x % y);
    }
    a / x * b
}

impl CacheManager {
    pub(crate) fn new(config: &EngineConfig) -> Self {
        let shared = config.storage == Storage::Shared;
        let groups: Vec<_> = config
            .model
            .groups
            .iter()
            .zip(&config.groups)
            .enumerate()
            .map(|(at, (group, cache))| Group {
                attention: group.attention,
                block_tokens: cache.block_tokens,
                scratch: cache.scratch,
                pool: if shared { 0 } else { at },
            })
            .collect();
        let pools = config.groups[..if shared { 1 } else { groups.len() }]
            .iter()
            .map(|cache| BlockPool::new(cache.blocks))
            .collect();
        Self {
            pool_of_group: groups.iter().map(|group| group.pool).collect(),
            alignment: groups.iter().fold(1, |all, group| lcm(all, group.block_tokens)),
            groups,
            pools: Arc::new(Mutex::new(pools)),
            prefix_caching: config.prefix_caching,
        }
    }

    fn pools(&self) -> MutexGuard<'_, Vec<BlockPool>> {
        self.pools.lock()
    }

    pub(crate) fn pins(&self) -> BlockPins {
        BlockPins { pools: self.pools.clone(), pool_of_group: self.pool_of_group.clone() }
    }

    pub(crate) fn tables(&self) -> Tables {
        let groups = self.groups.len();
        Tables { blocks: vec![vec![]; groups], offered: vec![0; groups], has_scratch: false }
    }

    /// Adds the hashes of the blocks that `tokens` fill.
    pub(crate) fn extend_hashes(&self, hashes: &mut Vec<Vec<BlockHash>>, tokens: &[u32]) {
        hashes.resize(self.groups.len(), vec![]);
        for (at, group) in self.groups.iter().enumerate() {
            // Groups of the same block size have the same hashes.
            let same =
                self.groups[..at].iter().position(|it| it.block_tokens == group.block_tokens);
            if let Some(same) = same {
                let (done, rest) = hashes.split_at_mut(at);
                let known = rest[0].len();
                rest[0].extend_from_slice(&done[same][known..]);
                continue;
            }
            let hashes = &mut hashes[at];
            while let Some(block) =
                tokens[hashes.len() * group.block_tokens..].get(..group.block_tokens)
            {
                hashes.push(BlockHash::next(hashes.last(), block));
            }
        }
    }

    /// The cached prefix of the first `most` tokens of a request.
    pub(crate) fn find(&self, hashes: &[Vec<BlockHash>], most: usize) -> Hit {
        let none = Hit { tokens: 0, blocks: vec![vec![]; self.groups.len()] };
        if !self.prefix_caching {
            return none;
        }
        let pools = self.pools();
        let found = |at: usize, block: usize| {
            let hash = *hashes[at].get(block)?;
            pools[self.groups[at].pool].find(&(at, hash))
        };
        // Full attention needs every block: no hit is longer than the first gap.
        let mut longest = most;
        for (at, group) in self.groups.iter().enumerate() {
            if group.attention == Attention::Full {
                let blocks =
                    (0..most / group.block_tokens).take_while(|it| found(at, *it).is_some());
                longest = longest.min(blocks.count() * group.block_tokens);
            }
        }
        for tokens in (1..=longest / self.alignment).rev().map(|blocks| blocks * self.alignment) {
            let tables = self.groups.iter().enumerate().map(|(at, group)| {
                let first = group.left_behind(tokens);
                (0..tokens / group.block_tokens)
                    .map(|block| if block < first { Some(BlockId::NULL) } else { found(at, block) })
                    .collect::<Option<Vec<_>>>()
            });
            if let Some(blocks) = tables.collect::<Option<Vec<_>>>() {
                return Hit { tokens, blocks };
            }
        }
        none
    }

    /// Gives a request the blocks for its first `total` tokens, of which `next` is the first to compute.
    /// Only a request without blocks may have a hit. Returns the new blocks; `None`, with nothing
    /// taken, if there are not enough.
    pub(crate) fn allocate(
        &self,
        tables: &mut Tables,
        hit: Option<&Hit>,
        next: usize,
        total: usize,
    ) -> Option<Vec<Vec<BlockId>>> {
        let mut pools = self.pools();
        self.leave_behind(&mut pools, tables, next);
        let cached = |at: usize| hit.map_or(&[][..], |hit| &hit.blocks[at]);
        let mut needed = vec![0; pools.len()];
        for (at, group) in self.groups.iter().enumerate() {
            let (first, blocks) = (group.left_behind(next), total.div_ceil(group.block_tokens));
            let have = tables.blocks[at].len() + cached(at).len();
            needed[group.pool] += if group.scratch == 0 {
                blocks.saturating_sub(have.max(first))
            } else if blocks + group.scratch <= have {
                0
            } else {
                // At most the block of the state, and the scratch blocks once.
                let scratch = if tables.has_scratch { 0 } else { group.scratch };
                scratch + usize::from(have < blocks || tables.has_scratch)
            };
            let idle = |id: &&BlockId| !id.is_null() && pools[group.pool].refs(**id) == 0;
            needed[group.pool] += cached(at).iter().skip(first).filter(idle).count();
        }
        if pools.iter().zip(&needed).any(|(pool, needed)| pool.free() < *needed) {
            return None;
        }
        // Hold all hits before taking blocks: taking evicts.
        for (at, group) in self.groups.iter().enumerate() {
            // A hit may begin before the first block that is still read after a load.
            let first = group.left_behind(next);
            for (block, id) in cached(at).iter().enumerate() {
                let id = if block < first { BlockId::NULL } else { *id };
                if !id.is_null() {
                    pools[group.pool].hold(id);
                }
                tables.blocks[at].push(id);
            }
            tables.offered[at] = tables.offered[at].max(cached(at).len());
        }
        let mut new = vec![];
        for (at, group) in self.groups.iter().enumerate() {
            let (table, first) = (&mut tables.blocks[at], group.left_behind(next));
            let had = table.len();
            if group.scratch > 0 {
                let take = || pools[group.pool].take().expect("free blocks were counted above");
                group.move_on(table, total, tables.has_scratch, take);
                new.push(table.get(had..).unwrap_or_default().to_vec());
                continue;
            }
            for block in had..total.div_ceil(group.block_tokens) {
                table.push(if block < first {
                    BlockId::NULL
                } else {
                    pools[group.pool].take().expect("free blocks were counted above")
                });
            }
            new.push(table[had..].to_vec());
        }
        tables.has_scratch = true;
        Some(new)
    }

    /// Frees the blocks that an ended request no longer reads: vLLM does before it lists them.
    pub(crate) fn leave_behind_at_end(&self, tables: &mut Tables, computed: usize) {
        self.leave_behind(&mut self.pools(), tables, computed);
    }

    fn leave_behind(&self, pools: &mut [BlockPool], tables: &mut Tables, next: usize) {
        for (group, table) in self.groups.iter().zip(&mut tables.blocks) {
            let last = group.left_behind(next).min(table.len());
            for id in table[..last].iter_mut().filter(|id| !id.is_null()) {
                pools[group.pool].release(*id);
                *id = BlockId::NULL;
            }
        }
    }

    /// Caches the blocks that the first `computed` tokens fill.
    pub(crate) fn offer(&self, tables: &mut Tables, hashes: &[Vec<BlockHash>], computed: usize) {
        let mut pools = self.pools();
        for (at, group) in self.groups.iter().enumerate() {
            let full = (computed / group.block_tokens).min(tables.blocks[at].len());
            let filled = tables.blocks[at].iter().zip(&hashes[at]).take(full);
            for (id, hash) in filled.skip(tables.offered[at]).filter(|(id, _)| !id.is_null()) {
                if self.prefix_caching {
                    pools[group.pool].remember((at, *hash), *id);
                }
            }
            tables.offered[at] = tables.offered[at].max(full);
        }
    }

    /// Removes from the cache what lies beyond the first `computed` tokens.
    pub(crate) fn retract(&self, tables: &mut Tables, computed: usize) {
        let mut pools = self.pools();
        for (at, group) in self.groups.iter().enumerate() {
            let kept = computed / group.block_tokens;
            for id in tables.blocks[at].iter().skip(kept).filter(|id| !id.is_null()) {
                pools[group.pool].forget(*id);
            }
            tables.offered[at] = tables.offered[at].min(kept);
        }
    }

    /// Takes all blocks of a request.
    pub(crate) fn release(&self, tables: &mut Tables) {
        let mut pools = self.pools();
        for (group, table) in self.groups.iter().zip(&mut tables.blocks) {
            // Later blocks of a prompt are evicted first: hits need the earlier ones.
            for id in table.drain(..).rev().filter(|id| !id.is_null()) {
                pools[group.pool].release(id);
            }
        }
        tables.offered.fill(0);
        tables.has_scratch = false;
    }

    /// Blocks that a request of `total` tokens may need at once in the scarcest pool, and the
    /// pool's capacity.
    pub(crate) fn worst(&self, total: usize, chunk: usize) -> (usize, usize) {
        let demand = self.demand(total, chunk);
        let pools = self.pools();
        let scarcest = demand.iter().zip(&*pools).max_by_key(|(needed, pool)| {
            // The pool with the largest deficit.
            (needed.saturating_sub(pool.capacity()), **needed)
        });
        scarcest.map_or((0, 0), |(needed, pool)| (*needed, pool.capacity()))
    }

    /// Blocks that a request of `total` tokens may need at once, per pool.
    fn demand(&self, total: usize, chunk: usize) -> Vec<usize> {
        let mut demand = vec![0; self.pools().len()];
        for group in &self.groups {
            let all = total.div_ceil(group.block_tokens);
            demand[group.pool] += match group.attention {
                Attention::Full => all,
                Attention::Window { tokens } => {
                    all.min((tokens + chunk).div_ceil(group.block_tokens) + 1)
                }
                Attention::State => all.min(chunk.div_ceil(group.block_tokens) + 2) + group.scratch,
            };
        }
        demand
    }

    /// Takes the blocks whose bytes became invalid, with each group that may read them.
    pub(crate) fn drain_void(&self) -> Vec<(usize, BlockId)> {
        let mut void = vec![];
        for (pool, it) in self.pools().iter_mut().enumerate() {
            for id in it.drain_void() {
                let groups = self.groups.iter().enumerate().filter(|(_, it)| it.pool == pool);
                void.extend(groups.map(|(at, _)| (at, id)));
            }
        }
        void
    }

    /// Blocks with users, as (pool, block).
    pub(crate) fn used(&self) -> Vec<(usize, BlockId)> {
        let pools = self.pools();
        let used = pools.iter().enumerate();
        used.flat_map(|(at, pool)| pool.used().into_iter().map(move |id| (at, id))).collect()
    }

    /// Whether every group keeps all its blocks: only then can computing resume at any token.
    pub(crate) fn keeps_all(&self) -> bool {
        self.groups.iter().all(|group| group.attention == Attention::Full)
    }

    pub(crate) fn block_tokens(&self, group: usize) -> usize {
        self.groups[group].block_tokens
    }

    /// Empties the prefix cache if no block has users. False if one has.
    pub(crate) fn reset(&self) -> bool {
        let mut pools = self.pools();
        pools.iter().all(|pool| pool.used().is_empty()) && pools.iter_mut().all(BlockPool::reset)
    }
}
