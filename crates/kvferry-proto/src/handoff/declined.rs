//! Names of handoffs that peers have ended before this engine knew them.
//!
//! A request whose handoff has such a name is not computed when it arrives later, as no consumer is left. Peers may
//! invent any number of names, so these names are kept apart from the handoffs of this engine
//! ([`super::tombstones`]), and peers share the room: those who have most lose their oldest names first.

use super::{HandoffId, Limits, Outcome, PeerId};
use crate::origin::Origin;
use crate::shares::Shares;
use crate::time::Timestamp;
use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

/// Time when a name is forgotten, and a number that distinguishes names of one time.
type Age = (Timestamp, u64);

/// Names with their outcomes, at most as many as there are tombstones.
#[derive(Debug)]
pub(super) struct Declined {
    of: HashMap<HandoffId, (Age, Outcome)>,
    by_age: BTreeMap<Age, HandoffId>,
    shares: Shares<HandoffId>,
    ttl: Duration,
    last: u64,
}

impl Declined {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            of: HashMap::new(),
            by_age: BTreeMap::new(),
            shares: Shares::new(limits.tombstones.max(1)),
            ttl: limits.tomb_ttl,
            last: 0,
        }
    }

    pub(super) fn get(&self, id: &HandoffId) -> Option<&Outcome> {
        self.of.get(id).map(|(_, outcome)| outcome)
    }

    /// Adds a name. One that is remembered stays as it is.
    pub(super) fn add(
        &mut self,
        id: HandoffId,
        (by, origin): (PeerId, Origin),
        outcome: Outcome,
        now: Timestamp,
    ) {
        if self.of.contains_key(&id) {
            return;
        }
        self.last += 1;
        let age = (now + self.ttl, self.last);
        self.shares.add(&id, origin, by.0, 1);
        self.by_age.insert(age, id.clone());
        self.of.insert(id.clone(), (age, outcome));
        if let Some(oldest) = self.shares.oldest_excess(&id) {
            self.forget(&oldest);
        }
    }

    /// Drops those whose time has passed.
    pub(super) fn expire(&mut self, now: Timestamp) {
        while let Some((_, id)) = self.by_age.first_key_value().filter(|((at, _), _)| *at <= now) {
            let id = id.clone();
            self.forget(&id);
        }
    }

    /// Time when the next name is dropped.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.by_age.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    fn forget(&mut self, id: &HandoffId) {
        self.shares.remove(id);
        if let Some((age, _)) = self.of.remove(id) {
            self.by_age.remove(&age);
        }
    }
}
