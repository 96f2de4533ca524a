//! Names of handoffs that peers have ended before this engine knew them.
//!
//! A request whose handoff has such a name is not computed when it arrives later, as no consumer is left. Peers may
//! invent any number of names, so these names are kept apart from the handoffs of this engine
//! ([`super::tombstones`]): each peer has a share of the room, in which its new names push out its own old ones.

use super::{HandoffId, Limits, Outcome, PeerId};
use crate::time::Timestamp;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// One peer's share: this part of all places.
const PEERS_PART: usize = 16;

/// When a name is forgotten, and a number that tells names of one time apart.
type Age = (Timestamp, u64);

#[derive(Debug)]
struct Declination {
    by: PeerId,
    age: Age,
    outcome: Outcome,
}

/// As many at most as there are tombstones.
#[derive(Debug, Default)]
pub(super) struct Declined {
    of: HashMap<HandoffId, Declination>,
    by_age: BTreeMap<Age, HandoffId>,
    by_peer: HashMap<PeerId, BTreeSet<Age>>,
    last: u64,
}

impl Declined {
    pub(super) fn get(&self, id: &HandoffId) -> Option<&Outcome> {
        self.of.get(id).map(|it| &it.outcome)
    }

    /// Adds a name. One that is remembered stays as it is.
    pub(super) fn add(
        &mut self,
        id: HandoffId,
        by: PeerId,
        outcome: Outcome,
        now: Timestamp,
        limits: &Limits,
    ) {
        if self.of.contains_key(&id) {
            return;
        }
        let (all, share) = (limits.tombstones.max(1), (limits.tombstones / PEERS_PART).max(1));
        if let Some(oldest) = self.by_peer.get(&by).filter(|own| own.len() >= share) {
            let oldest = *oldest.first().expect("a share is not empty");
            self.forget(oldest);
        } else if self.of.len() >= all {
            // There are many peers, or many lives of one.
            let most = self.by_peer.values().max_by_key(|own| own.len()).and_then(BTreeSet::first);
            let oldest = *most.expect("it is full");
            self.forget(oldest);
        }
        self.last += 1;
        let age = (now + limits.tomb_ttl, self.last);
        self.by_age.insert(age, id.clone());
        self.by_peer.entry(by).or_default().insert(age);
        self.of.insert(id, Declination { by, age, outcome });
    }

    /// Drops those whose time has passed.
    pub(super) fn expire(&mut self, now: Timestamp) {
        while let Some((&age, _)) = self.by_age.first_key_value().filter(|((at, _), _)| *at <= now)
        {
            self.forget(age);
        }
    }

    /// When the next one is dropped.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.by_age.first_key_value().map(|((at, _), _)| *at)
    }

    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    fn forget(&mut self, age: Age) {
        let id = self.by_age.remove(&age).expect("it has a name");
        let Declination { by, age, .. } = self.of.remove(&id).expect("the name is remembered");
        let own = self.by_peer.get_mut(&by).expect("the peer has a share");
        own.remove(&age);
        if own.is_empty() {
            self.by_peer.remove(&by);
        }
    }
}
