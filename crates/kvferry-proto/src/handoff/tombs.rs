//! What is remembered of handoffs that have ended.

use super::{HandoffId, Limits};
use crate::time::Timestamp;
use std::collections::{HashMap, VecDeque};

/// Ended handoffs, each with what is to be said of it, for a time; the oldest go first.
#[derive(Debug)]
pub(super) struct Tombs<T> {
    of: HashMap<HandoffId, T>,
    by_age: VecDeque<(Timestamp, HandoffId)>,
}

impl<T> Default for Tombs<T> {
    fn default() -> Self {
        Self { of: HashMap::default(), by_age: VecDeque::new() }
    }
}

impl<T> Tombs<T> {
    pub(super) fn get(&self, id: &HandoffId) -> Option<&T> {
        self.of.get(id)
    }

    /// Remembers one. Its name is not among those remembered.
    pub(super) fn bury(&mut self, id: HandoffId, tomb: T, now: Timestamp, limits: &Limits) {
        while self.by_age.len() >= limits.tombs.max(1) {
            self.forget_oldest();
        }
        self.by_age.push_back((now + limits.tomb_ttl, id.clone()));
        let before = self.of.insert(id, tomb);
        debug_assert!(before.is_none(), "a handoff ends once");
    }

    /// Forgets those whose time is over.
    pub(super) fn expire(&mut self, now: Timestamp) {
        while self.by_age.front().is_some_and(|(until, _)| *until <= now) {
            self.forget_oldest();
        }
    }

    /// When the next is forgotten.
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
