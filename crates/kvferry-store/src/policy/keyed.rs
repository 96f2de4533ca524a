//! The policy by keys instead of slots, for replays: each request is one call.

use super::{Key, Policy, Retention, Slot};
use rustc_hash::FxHashMap;

/// A tier of a bounded number of blocks that stores every block of every request, and evicts when a
/// request is done.
#[derive(Debug)]
pub struct Keyed {
    policy: Policy,
    blocks: usize,
    slots: FxHashMap<Key, Slot>,
    keys: Vec<Key>,
    free: Vec<Slot>,
}

impl Keyed {
    /// A tier of `blocks` blocks, for prompts of up to `longest` blocks; what is behind is not stored.
    pub fn new(blocks: usize, longest: usize) -> Self {
        let policy = Policy::new(blocks.max(1).saturating_add(longest));
        let slots = policy.blocks.slots();
        Self {
            policy,
            blocks: blocks.max(1),
            slots: FxHashMap::default(),
            keys: vec![0; slots],
            free: (0..slots).rev().filter_map(|slot| Slot::try_from(slot).ok()).collect(),
        }
    }

    /// Blocks that are stored.
    pub fn len(&self) -> usize {
        self.policy.len()
    }

    /// Whether no block is stored.
    pub fn is_empty(&self) -> bool {
        self.policy.is_empty()
    }

    /// Whether a block is stored.
    pub fn contains(&self, key: Key) -> bool {
        self.slots.contains_key(&key)
    }

    #[cfg(test)]
    pub(super) fn policy(&self) -> &Policy {
        &self.policy
    }

    /// A request at `now_ms` uses the blocks of `chain`, the first of its prompt first. Returns how many
    /// of them, from the beginning, were stored. The blocks that had to leave are added to `left`.
    pub fn request(&mut self, now_ms: u64, chain: &[Key], left: &mut Vec<Key>) -> usize {
        let stored: Vec<Slot> =
            chain.iter().map_while(|key| self.slots.get(key).copied()).collect();
        self.policy.used(now_ms, &stored, chain.len() - stored.len());
        let mut added = Vec::new();
        for &key in &chain[stored.len()..] {
            // The key is stored behind another prefix: the trace's keys are not chained.
            if self.slots.contains_key(&key) {
                break;
            }
            let Some(slot) = self.free.pop() else { break };
            self.keys[slot as usize] = key;
            self.slots.insert(key, slot);
            added.push((slot, key));
        }
        let parent = stored.last().copied();
        self.policy.added(now_ms, parent, &added, Retention::DEFAULT);
        while self.policy.len() > self.blocks {
            let keys = &self.keys;
            let evicted = self.policy.evict(now_ms, |slot| keys[slot as usize]);
            let slot = evicted.expect("nothing is pinned");
            let key = self.keys[slot as usize];
            self.slots.remove(&key);
            self.free.push(slot);
            left.push(key);
        }
        stored.len()
    }
}
