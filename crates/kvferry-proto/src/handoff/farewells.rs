//! Producers that do not know yet that a handoff has ended.

use super::message::Stop;
use super::{HandoffId, Limits, Outcome, PeerId, cut};
use crate::code::WireCode;
use crate::id::Incarnation;
use crate::time::Timestamp;
use std::collections::{BTreeMap, VecDeque};

#[derive(Debug)]
struct Farewell {
    /// The incarnation that knows the handoff; `None` for the next that is met. Another one would end a handoff of the
    /// same name that it has with another consumer.
    meant: Option<Incarnation>,
    code: WireCode,
    detail: String,
}

impl Farewell {
    fn stop(&self, id: &HandoffId) -> Stop {
        let (code, detail) = (self.code, self.detail.clone());
        Stop { id: id.clone(), by_consumer: true, code, detail }
    }
}

/// Ends of handoffs that producers have not answered yet. The consumer sends them again after each reconnection, for a
/// limited time.
#[derive(Debug, Default)]
pub(super) struct Farewells {
    of: BTreeMap<(PeerId, HandoffId), Farewell>,
    by_age: VecDeque<(Timestamp, (PeerId, HandoffId))>,
}

impl Farewells {
    /// Adds a producer. Returns the message for it, unless there is room for none.
    pub(super) fn bid(
        &mut self,
        id: &HandoffId,
        (to, meant): (PeerId, Option<Incarnation>),
        outcome: &Outcome,
        now: Timestamp,
        limits: &Limits,
    ) -> Option<Stop> {
        let key = (to, id.clone());
        let farewell = Farewell { meant, code: outcome.code, detail: cut(&outcome.detail) };
        if self.of.insert(key.clone(), farewell).is_none() {
            self.by_age.push_back((now + limits.offer_ttl, key.clone()));
            // Producers beyond the limit free their blocks by timer.
            if self.by_age.len() > limits.tombstones {
                self.forget_oldest();
            }
        }
        self.of.get(&key).map(|farewell| farewell.stop(id))
    }

    /// The producer knows. False if it was not to be told.
    pub(super) fn answered(&mut self, peer: PeerId, id: &HandoffId) -> bool {
        self.of.remove(&(peer, id.clone())).is_some()
    }

    /// A connection to a producer is up. Returns the messages for it. A restarted one keeps nothing.
    pub(super) fn met(
        &mut self,
        peer: PeerId,
        incarnation: Incarnation,
    ) -> impl Iterator<Item = Stop> + '_ {
        self.of.retain(|(other, _), farewell| {
            *other != peer || *farewell.meant.get_or_insert(incarnation) == incarnation
        });
        let of_peer = self.of.iter().filter(move |((other, _), _)| *other == peer);
        of_peer.map(|((_, id), farewell)| farewell.stop(id))
    }

    /// A producer keeps nothing any more.
    pub(super) fn forget(&mut self, peer: PeerId) {
        self.of.retain(|(other, _), _| *other != peer);
    }

    /// The producers to tell.
    pub(super) fn peers(&self) -> impl Iterator<Item = PeerId> + '_ {
        let mut last = None;
        let peers = self.of.keys().map(|(peer, _)| *peer);
        peers.filter(move |peer| last.replace(*peer) != Some(*peer))
    }

    /// Drops those whose time has passed.
    pub(super) fn expire(&mut self, now: Timestamp) {
        while self.next().is_some_and(|until| until <= now) {
            self.forget_oldest();
        }
    }

    /// Time when the next one is dropped.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.by_age.front().map(|(until, _)| *until)
    }

    pub(super) fn len(&self) -> usize {
        self.of.len()
    }

    fn forget_oldest(&mut self) {
        if let Some((_, key)) = self.by_age.pop_front() {
            self.of.remove(&key);
        }
    }
}
