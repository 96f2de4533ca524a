//! Least recently used, as the engines' own caches are.

use std::collections::{BTreeMap, HashMap};

use super::Cache;

/// Blocks in the order of their last use.
#[derive(Debug)]
pub(in crate::store) struct Lru {
    capacity: usize,
    uses: u64,
    used: HashMap<u64, u64>,
    by_use: BTreeMap<u64, u64>,
}

impl Lru {
    pub(in crate::store) fn new(capacity: usize) -> Self {
        Self { capacity, uses: 0, used: HashMap::new(), by_use: BTreeMap::new() }
    }

    /// Takes a block out. False if it is missing.
    pub(super) fn remove(&mut self, block: u64) -> bool {
        self.used.remove(&block).is_some_and(|use_of| self.by_use.remove(&use_of).is_some())
    }
}

impl Cache for Lru {
    fn contains(&self, block: u64) -> bool {
        self.used.contains_key(&block)
    }

    fn used(&mut self, block: u64) {
        self.remove(block);
        self.uses += 1;
        self.used.insert(block, self.uses);
        self.by_use.insert(self.uses, block);
        if self.by_use.len() > self.capacity {
            let (_, oldest) = self.by_use.pop_first().expect("more than the capacity");
            self.used.remove(&oldest);
        }
    }
}
