//! Keys to remember for a while.

use crate::key::Key;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// Set of at most `keys_max` keys, each kept for the same time. The oldest leave first.
#[derive(Debug)]
pub(crate) struct Remembered {
    keys_max: usize,
    for_ms: u64,
    until_ms: FxHashMap<Key, u64>,
    /// Keys and their ends, in the order of the ends. A key that was inserted again is there twice.
    order: VecDeque<(Key, u64)>,
}

impl Remembered {
    pub(crate) fn new(keys_max: usize, for_ms: u64) -> Self {
        Self { keys_max, for_ms, until_ms: FxHashMap::default(), order: VecDeque::new() }
    }

    pub(crate) fn insert(&mut self, key: Key, now_ms: u64) {
        if self.for_ms == 0 {
            return;
        }
        let until_ms = now_ms.saturating_add(self.for_ms);
        self.until_ms.insert(key, until_ms);
        self.order.push_back((key, until_ms));
        while let Some((oldest, end_ms)) = self.order.front().copied() {
            if end_ms > now_ms && self.order.len() <= self.keys_max {
                break;
            }
            self.order.pop_front();
            if self.until_ms.get(&oldest) == Some(&end_ms) {
                self.until_ms.remove(&oldest);
            }
        }
    }

    pub(crate) fn remove(&mut self, key: &Key) -> bool {
        self.until_ms.remove(key).is_some()
    }

    pub(crate) fn contains(&self, key: &Key, now_ms: u64) -> bool {
        self.until_ms.get(key).is_some_and(|until_ms| now_ms < *until_ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_forgotten_when_its_time_has_passed() {
        let mut keys = Remembered::new(10, 5000);
        keys.insert(Key([1, 1]), 0);
        keys.insert(Key([2, 2]), 3000);
        assert!(keys.contains(&Key([1, 1]), 4999) && !keys.contains(&Key([1, 1]), 5000));
        // Again, which makes it longer.
        keys.insert(Key([2, 2]), 7000);
        assert!(keys.contains(&Key([2, 2]), 11_999));
        assert!(keys.remove(&Key([2, 2])) && !keys.contains(&Key([2, 2]), 7000));
        assert_eq!((keys.until_ms.len(), keys.order.len()), (0, 2));
    }

    #[test]
    fn no_more_keys_are_remembered_than_allowed() {
        let mut keys = Remembered::new(4, 1000);
        for number in 1..100 {
            keys.insert(Key([number, 0]), 0);
            keys.insert(Key([number, 0]), 1);
        }
        assert!(keys.order.len() <= 4 && keys.until_ms.len() <= 4);
        assert!(keys.contains(&Key([99, 0]), 2) && !keys.contains(&Key([90, 0]), 2));
    }
}
