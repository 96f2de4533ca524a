//! Handoffs that have ended, remembered so that late messages get the same answer.

use super::{HandoffId, Limits};
use crate::time::Timestamp;
use std::collections::{HashMap, VecDeque};

/// Ended handoffs and the answer for each, for a limited time. The oldest are dropped first.
#[derive(Debug)]
pub(super) struct Tombstones<T> {
    of: HashMap<HandoffId, T>,
    by_age: VecDeque<(Timestamp, HandoffId)>,
}

impl<T> Default for Tombstones<T> {
    fn default() -> Self {
        Self { of: HashMap::default(), by_age: VecDeque::new() }
    }
}

impl<T> Tombstones<T> {
    pub(super) fn get(&self, id: &HandoffId) -> Option<&T> {
        self.of.get(id)
    }

    /// Adds one whose name is not remembered yet.
    pub(super) fn bury(&mut self, id: HandoffId, tombstone: T, now: Timestamp, limits: &Limits) {
        while self.by_age.len() >= limits.tombstones.max(1) {
            self.forget_oldest();
        }
        self.by_age.push_back((now + limits.tomb_ttl, id.clone()));
        let before = self.of.insert(id, tombstone);
        debug_assert!(before.is_none(), "a handoff ends once");
    }

    /// Drops those whose time has passed.
    pub(super) fn expire(&mut self, now: Timestamp) {
        while self.by_age.front().is_some_and(|(until, _)| *until <= now) {
            self.forget_oldest();
        }
    }

    /// Time when the next tombstone is dropped.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.by_age.front().map(|(until, _)| *until)
    }

    pub(super) fn len(&self) -> usize {
        self.by_age.len()
    }

    fn forget_oldest(&mut self) {
        if let Some((_, id)) = self.by_age.pop_front() {
            self.of.remove(&id);
        }
    }
}
