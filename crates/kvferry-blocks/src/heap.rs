//! A heap of items that are numbered: the smallest one, and any one by its number, leave in O(log n).

use crate::NONE;

/// Children of an entry. Four entries are a cache line.
const ARITY: usize = 4;

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: u64,
    item: u32,
}

#[derive(Debug)]
pub(crate) struct IndexedHeap {
    entries: Vec<Entry>,
    /// Position of each item in `entries`, or `NONE`.
    at: Vec<u32>,
}

impl IndexedHeap {
    /// Makes an empty heap for items `0..items`. Later calls allocate nothing.
    pub(crate) fn new(items: usize) -> Self {
        Self { entries: Vec::with_capacity(items), at: vec![NONE; items] }
    }

    pub(crate) fn peek(&self) -> Option<(u64, u32)> {
        self.entries.first().map(|first| (first.key, first.item))
    }

    pub(crate) fn key(&self, item: u32) -> Option<u64> {
        match self.at[item as usize] {
            NONE => None,
            at => Some(self.entries[at as usize].key),
        }
    }

    /// Adds an item, or changes its key.
    pub(crate) fn insert(&mut self, item: u32, key: u64) {
        let entry = Entry { key, item };
        match self.at[item as usize] {
            NONE => {
                self.entries.push(entry);
                self.up(self.entries.len() - 1, entry);
            }
            at => self.settle(at as usize, entry),
        }
    }

    pub(crate) fn remove(&mut self, item: u32) -> bool {
        let at = std::mem::replace(&mut self.at[item as usize], NONE);
        if at == NONE {
            return false;
        }
        let last = self.entries.pop().expect("the item is in it");
        if last.item != item {
            self.settle(at as usize, last);
        }
        true
    }

    /// Puts an entry at a place that is free, and moves it to where it belongs.
    fn settle(&mut self, at: usize, entry: Entry) {
        if at > 0 && entry.key < self.entries[(at - 1) / ARITY].key {
            self.up(at, entry);
        } else {
            self.down(at, entry);
        }
    }

    fn up(&mut self, mut at: usize, entry: Entry) {
        while at > 0 {
            let parent = (at - 1) / ARITY;
            if self.entries[parent].key <= entry.key {
                break;
            }
            self.place(at, self.entries[parent]);
            at = parent;
        }
        self.place(at, entry);
    }

    fn down(&mut self, mut at: usize, entry: Entry) {
        loop {
            let first = at * ARITY + 1;
            let children = first..(first + ARITY).min(self.entries.len());
            let Some(least) = children.min_by_key(|&child| self.entries[child].key) else { break };
            if self.entries[least].key >= entry.key {
                break;
            }
            self.place(at, self.entries[least]);
            at = least;
        }
        self.place(at, entry);
    }

    fn place(&mut self, at: usize, entry: Entry) {
        self.entries[at] = entry;
        self.at[entry.item as usize] = at as u32;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn items_leave_in_the_order_of_their_keys_whatever_was_removed_or_changed() {
        const ITEMS: u32 = 200;
        let mut rng = fastrand::Rng::with_seed(7);
        let mut heap = IndexedHeap::new(ITEMS as usize);
        let mut model: BTreeMap<u32, u64> = BTreeMap::new();
        for key in 0..20_000 {
            let item = rng.u32(0..ITEMS);
            match rng.u32(0..5) {
                0 => assert_eq!(heap.remove(item), model.remove(&item).is_some()),
                1 => {
                    let least = model.iter().min_by_key(|(_, key)| **key);
                    let least = least.map(|(&item, &key)| (key, item));
                    assert_eq!(heap.peek(), least);
                    if let Some((_, item)) = least {
                        assert!(heap.remove(item));
                        model.remove(&item);
                    }
                }
                _ => {
                    let key = u64::from(rng.u32(..)) << 32 | key;
                    heap.insert(item, key);
                    model.insert(item, key);
                }
            }
            assert_eq!(heap.key(item), model.get(&item).copied());
        }
    }
}
