//! Runs that have left, remembered for a while.

use super::Key;
use super::reuse::IntervalId;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// A run that has left, or whose end has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ghost {
    pub(super) uses: u32,
    pub(super) used_at: u64,
    /// Blocks of the run.
    pub(super) len: u32,
    pub(super) interval: IntervalId,
}

/// Ghosts by the last block of their run. The oldest are forgotten first.
#[derive(Debug)]
pub(super) struct Ghosts {
    capacity: usize,
    by_key: FxHashMap<Key, Ghost>,
    /// Ghosts, the oldest first, including those that were taken or replaced since.
    by_age: VecDeque<(Key, IntervalId)>,
}

impl Ghosts {
    pub(super) fn new(capacity: usize) -> Self {
        Self { capacity, by_key: FxHashMap::default(), by_age: VecDeque::new() }
    }

    pub(super) fn remember(&mut self, key: Key, ghost: Ghost) {
        self.by_age.push_back((key, ghost.interval));
        self.by_key.insert(key, ghost);
        while self.by_key.len() > self.capacity || self.by_age.len() > 2 * self.capacity {
            let Some((key, interval)) = self.by_age.pop_front() else { return };
            if self.by_key.get(&key).is_some_and(|ghost| ghost.interval == interval) {
                self.by_key.remove(&key);
            }
        }
    }

    pub(super) fn take(&mut self, key: Key) -> Option<Ghost> {
        self.by_key.remove(&key)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) fn bytes(&self) -> usize {
        // A hash map adds a byte for each entry, and keeps an eighth free.
        self.by_key.capacity() * 8 / 7 * (size_of::<(Key, Ghost)>() + 1)
            + self.by_age.capacity() * size_of::<(Key, IntervalId)>()
    }
}
