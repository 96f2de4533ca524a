//! Blocks: references, cached content, and the order of eviction.

use crate::layout::BlockId;
use kvferry_sys::sync::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use std::fmt;
use std::sync::Arc;

/// The content of a full block: a hash over its tokens and all earlier ones.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// The hash of the block that `tokens` fill after the block `parent`; without one, of the first block.
    pub fn next(parent: Option<&Self>, tokens: &[u32]) -> Self {
        let mut hasher = blake3::Hasher::new_derive_key("kvferry-refengine block of tokens, v1");
        hasher.update(&parent.map_or([0; 32], |parent| parent.0));
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        Self(*hasher.finalize().as_bytes())
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for byte in &self.0[..8] {
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

/// A group and a hash: groups hold different bytes for the same tokens.
pub(crate) type Key = (usize, BlockHash);

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    refs: u32,
    key: Option<Key>,
    /// Neighbours in the ring of free blocks. The null block, which is never free, closes the ring.
    before: u32,
    after: u32,
}

/// Blocks of one or several groups, with references, a prefix cache, and least-recently-used eviction.
#[derive(Debug)]
pub(crate) struct BlockPool {
    blocks: Vec<Block>,
    free: usize,
    cached: FxHashMap<Key, BlockId>,
    /// Blocks whose bytes became invalid since the last [`BlockPool::drain_void`].
    void: Vec<BlockId>,
}

impl BlockPool {
    /// A pool of `blocks` blocks, of which the first is the null block.
    pub(crate) fn new(blocks: usize) -> Self {
        let count = u32::try_from(blocks).expect("block ids are 32 bits");
        let ring = (0..count)
            .map(|at| Block {
                before: at.checked_sub(1).unwrap_or(count - 1),
                after: (at + 1) % count,
                ..Block::default()
            })
            .collect();
        Self { blocks: ring, free: blocks - 1, cached: FxHashMap::default(), void: vec![] }
    }

    /// Blocks, without the null block.
    pub(crate) fn capacity(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Blocks without users, cached or not.
    pub(crate) fn free(&self) -> usize {
        self.free
    }

    /// Takes a block for one user. Evicts what was cached in it.
    pub(crate) fn take(&mut self) -> Option<BlockId> {
        let id = BlockId(self.blocks[0].after);
        if id.is_null() {
            return None;
        }
        self.unqueue(id);
        self.forget(id);
        self.blocks[id.index()].refs = 1;
        Some(id)
    }

    /// Adds a user to a block.
    pub(crate) fn hold(&mut self, id: BlockId) {
        debug_assert!(!id.is_null());
        if self.blocks[id.index()].refs == 0 {
            self.unqueue(id);
        }
        self.blocks[id.index()].refs += 1;
    }

    /// Removes a user. Blocks that are not cached are taken before those that are.
    ///
    /// # Panics
    /// If the block had no user.
    pub(crate) fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        block.refs = block.refs.checked_sub(1).expect("only a user of a block releases it");
        if block.refs > 0 {
            return;
        }
        if block.key.is_some() {
            self.queue(self.blocks[0].before, id);
        } else {
            self.void.push(id);
            self.queue(0, id);
        }
    }

    pub(crate) fn refs(&self, id: BlockId) -> u32 {
        self.blocks[id.index()].refs
    }

    pub(crate) fn find(&self, key: &Key) -> Option<BlockId> {
        self.cached.get(key).copied()
    }

    /// Caches a block. A block that was cached with the same content remains the one found.
    pub(crate) fn remember(&mut self, key: Key, id: BlockId) {
        if self.blocks[id.index()].key.is_none() && !self.cached.contains_key(&key) {
            self.blocks[id.index()].key = Some(key);
            self.cached.insert(key, id);
        }
    }

    /// Removes a block from the cache.
    pub(crate) fn forget(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.index()];
        if let Some(key) = block.key.take() {
            if block.refs == 0 {
                self.void.push(id);
            }
            self.cached.remove(&key);
        }
    }

    /// Empties the cache if no block has users. False if one has.
    pub(crate) fn reset(&mut self) -> bool {
        if self.free < self.capacity() {
            return false;
        }
        for at in 1..self.blocks.len() {
            self.forget(BlockId(u32::try_from(at).expect("ids are 32 bits")));
        }
        true
    }

    /// Takes the blocks whose bytes became invalid.
    pub(crate) fn drain_void(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.void)
    }

    /// Blocks with users.
    pub(crate) fn used(&self) -> Vec<BlockId> {
        let ids = (1..self.blocks.len()).map(|at| BlockId(u32::try_from(at).expect("32 bits")));
        ids.filter(|id| self.refs(*id) > 0).collect()
    }

    fn unqueue(&mut self, id: BlockId) {
        let Block { before, after, .. } = self.blocks[id.index()];
        self.blocks[before as usize].after = after;
        self.blocks[after as usize].before = before;
        self.free -= 1;
    }

    fn queue(&mut self, before: u32, id: BlockId) {
        let after = std::mem::replace(&mut self.blocks[before as usize].after, id.0);
        self.blocks[after as usize].before = id.0;
        let block = &mut self.blocks[id.index()];
        (block.before, block.after) = (before, after);
        self.free += 1;
    }
}

/// Lets a connector's scheduler half keep blocks that it still saves: vLLM's `bind_gpu_block_pool`.
#[derive(Clone, Debug)]
pub struct BlockPins {
    pub(crate) pools: Arc<Mutex<Vec<BlockPool>>>,
    pub(crate) pool_of_group: Arc<[usize]>,
}

impl BlockPins {
    fn pools(&self) -> MutexGuard<'_, Vec<BlockPool>> {
        self.pools.lock()
    }

    /// Keeps a block that has users. False if it has none.
    pub fn pin(&self, group: usize, block: BlockId) -> bool {
        let mut pools = self.pools();
        let pool = &mut pools[self.pool_of_group[group]];
        let used = block.index() <= pool.capacity() && pool.refs(block) > 0;
        if used {
            pool.hold(block);
        }
        used
    }

    /// Undoes one [`BlockPins::pin`].
    ///
    /// # Panics
    /// If the block has no user.
    pub fn unpin(&self, group: usize, block: BlockId) {
        self.pools()[self.pool_of_group[group]].release(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(n: u32) -> Key {
        (0, BlockHash::next(None, &[n]))
    }

    #[test]
    fn the_null_block_is_never_taken() {
        let mut pool = BlockPool::new(4);
        let mut taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        taken.sort_unstable();
        assert_eq!(taken, [BlockId(1), BlockId(2), BlockId(3)]);
        assert_eq!((pool.free(), pool.capacity()), (0, 3));
        for id in taken {
            pool.release(id);
        }
        assert_eq!((pool.free(), pool.used()), (3, vec![]));
    }

    #[test]
    fn what_was_used_longest_ago_is_evicted_first_and_the_empty_before_it() {
        let mut pool = BlockPool::new(5);
        let ids: Vec<_> = (0..4).map(|_| pool.take().unwrap()).collect();
        for (n, id) in ids[..3].iter().enumerate() {
            pool.remember(key(u32::try_from(n).unwrap()), *id);
        }
        for id in [ids[1], ids[0], ids[3], ids[2]] {
            pool.release(id);
        }
        // A hit on the second makes it the most recently used.
        let found = pool.find(&key(1)).unwrap();
        pool.hold(found);
        pool.release(found);
        assert_eq!(pool.drain_void(), [ids[3]]);
        let order: Vec<_> = (0..4).map(|_| pool.take().unwrap()).collect();
        assert_eq!(order, [ids[3], ids[0], ids[2], ids[1]]);
        assert!((0..3).all(|n| pool.find(&key(n)).is_none()));
        assert_eq!(pool.drain_void(), [ids[0], ids[2], ids[1]]);
    }

    #[test]
    fn the_first_block_of_a_hash_stays_the_one_found() {
        let mut pool = BlockPool::new(3);
        let (a, b) = (pool.take().unwrap(), pool.take().unwrap());
        pool.remember(key(1), a);
        pool.remember(key(1), b);
        assert_eq!(pool.find(&key(1)), Some(a));
        pool.forget(b);
        assert_eq!(pool.find(&key(1)), Some(a));
    }

    #[test]
    fn a_hash_covers_all_tokens_before_it() {
        let first = BlockHash::next(None, &[1, 2]);
        assert_ne!(BlockHash::next(Some(&first), &[3]), BlockHash::next(None, &[3]));
        let other = BlockHash::next(None, &[1, 3]);
        assert_ne!(BlockHash::next(Some(&first), &[3]), BlockHash::next(Some(&other), &[3]));
    }
}
