//! The tier in host memory: blocks of this process, in front of the disk.
//!
//! It belongs to one process, unlike the disk tier: no other process can reuse its memory while it is copied, and
//! a process that dies leaves nothing behind. A block that is copied out is held by a reference; its memory is
//! free once the block has left and the last reference is dropped.
//!
//! What is put is copied here, and its caller goes on. It is *waiting* until it is on the disk, and does not
//! leave before. At most half of the tier waits: what is put beyond that goes to the disk directly.

mod arena;

pub(crate) use arena::Extent;

use crate::error::Result;
use crate::key::Key;
use crate::memory::{BlockMemory, PAGE};
use crate::policy::{Policy, Retention, Slot};
use crate::sync::lock;
use arena::Arena;
use kvferry::Agent;
use rustc_hash::FxHashMap;
use std::sync::{Arc, Mutex};

/// Bytes of a tier, at least.
pub(crate) const HOST_BYTES_MIN: u64 = 1 << 20;
/// Blocks of a tier, at most.
const BLOCKS_MAX: u64 = 1 << 24;
/// The part of the tier that may wait to be written.
const WAITING_SHARE: u64 = 2;

#[derive(Debug)]
pub(crate) struct Host {
    arena: Arc<Arena>,
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    policy: Policy,
    slots: FxHashMap<Key, Slot>,
    blocks: Vec<Option<Arc<Block>>>,
    free: Vec<Slot>,
    waiting: u64,
}

/// A block in host memory. Its bytes do not change.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) key: Key,
    /// Of the whole name.
    pub(crate) check: u64,
    pub(crate) len: u64,
    extent: Extent,
}

impl Block {
    /// `extent` has the block's bytes.
    pub(crate) fn new(key: Key, check: u64, len: u64, extent: Extent) -> Self {
        Self { key, check, len, extent }
    }

    pub(crate) fn memory(&self) -> BlockMemory {
        self.extent.memory(self.len)
    }
}

/// What a tier holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    pub(crate) waiting: u64,
}

impl Host {
    pub(crate) fn new(agent: &Agent, bytes: u64) -> Result<Self> {
        let blocks = (bytes / PAGE as u64).clamp(1, BLOCKS_MAX);
        let blocks = usize::try_from(blocks).expect("at most 2^24");
        let state = State {
            policy: Policy::new(blocks),
            slots: FxHashMap::default(),
            blocks: Vec::new(),
            free: Vec::new(),
            waiting: 0,
        };
        Ok(Self { arena: Arena::new(agent, bytes)?, bytes, state: Mutex::new(state) })
    }

    pub(crate) fn held(&self) -> Held {
        let state = lock(&self.state);
        let (blocks, waiting) = (state.slots.len() as u64, state.waiting);
        Held { blocks, bytes: self.arena.used(), waiting }
    }

    /// How many of these blocks, from the first, are here.
    pub(crate) fn prefix(&self, keys: &[Key]) -> usize {
        let state = lock(&self.state);
        keys.iter().take_while(|key| state.slots.contains_key(key)).count()
    }

    /// Those of these blocks that are here. A block of another name that has the same key is not.
    pub(crate) fn find(&self, names: impl Iterator<Item = (Key, u64)>) -> Vec<Option<Arc<Block>>> {
        let state = lock(&self.state);
        let find = |(key, check)| {
            let slot = *state.slots.get(&key)?;
            state.blocks[slot as usize].as_ref().filter(|block| block.check == check).cloned()
        };
        names.map(find).collect()
    }

    /// A request used these blocks, the first of its prompt first; `missing` more were nowhere.
    pub(crate) fn note_use(&self, now_ms: u64, keys: &[Key], missing: usize) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let chain: Vec<Slot> = keys.iter().map_while(|key| state.slots.get(key).copied()).collect();
        state.policy.used(now_ms, &chain, keys.len() - chain.len() + missing);
    }

    /// Memory for a block of `len` bytes, for which others leave. `None` if none can, or if the block is to
    /// wait and too many do.
    pub(crate) fn reserve(&self, now_ms: u64, len: u64, is_waiting: bool) -> Option<Extent> {
        let mut state = lock(&self.state);
        let most = self.bytes / WAITING_SHARE;
        // One that is as long would have all others leave.
        if len > most || is_waiting && state.waiting + len > most {
            return None;
        }
        loop {
            if let Some(extent) = self.arena.take(len) {
                return Some(extent);
            }
            // Dropped without the lock of the arena's free ranges, which this takes.
            drop(state.evict(now_ms)?);
        }
    }

    /// Takes in blocks that follow each other in a prompt, the first behind `parent`. Those that are here are
    /// left out.
    pub(crate) fn add(
        &self,
        now_ms: u64,
        parent: Option<Key>,
        blocks: &[Arc<Block>],
        retention: Retention,
        is_waiting: bool,
    ) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        let mut parent = parent.and_then(|key| state.slots.get(&key).copied());
        let mut added = Vec::with_capacity(blocks.len());
        for block in blocks {
            if let Some(slot) = state.slots.get(&block.key) {
                if added.is_empty() {
                    parent = Some(*slot);
                }
                continue;
            }
            let Some(slot) = state.free_slot(now_ms) else { break };
            added.push((slot, block.key.0[0]));
            state.waiting += if is_waiting { block.len } else { 0 };
            state.slots.insert(block.key, slot);
            state.blocks[slot as usize] = Some(Arc::clone(block));
        }
        state.policy.added(now_ms, parent, &added, retention);
        if is_waiting {
            for (slot, _) in added {
                state.policy.pin(slot);
            }
        }
    }

    /// Blocks wait no more: they may leave.
    pub(crate) fn written(&self, keys: impl Iterator<Item = Key>) {
        let mut state = lock(&self.state);
        let state = &mut *state;
        for key in keys {
            let Some(slot) = state.slots.get(&key).copied() else { continue };
            if state.policy.unpin(slot) {
                let block = state.blocks[slot as usize].as_ref().expect("of a slot in use");
                state.waiting -= block.len;
            }
        }
    }
}

impl State {
    /// Has the block leave that is worth least. `None`: none can.
    fn evict(&mut self, now_ms: u64) -> Option<Arc<Block>> {
        let blocks = &self.blocks;
        let key_of = |slot: Slot| {
            blocks.get(slot as usize).and_then(Option::as_ref).map_or(0, |block| block.key.0[0])
        };
        let slot = self.policy.evict(now_ms, key_of)?;
        let block = self.blocks[slot as usize].take().expect("the policy knows blocks only");
        self.slots.remove(&block.key);
        self.free.push(slot);
        Some(block)
    }

    fn free_slot(&mut self, now_ms: u64) -> Option<Slot> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.blocks.len() < BLOCKS_MAX as usize {
            self.blocks.push(None);
            return Slot::try_from(self.blocks.len() - 1).ok();
        }
        drop(self.evict(now_ms)?);
        self.free.pop()
    }
}
