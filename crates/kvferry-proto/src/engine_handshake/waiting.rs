//! Messages of engine handshakes that have arrived and wait to be worked out.

use super::{EngineHandshakeMessage, Model};
use crate::handoff::PeerId;
use crate::origin::Origin;
use crate::plan::RANKS_MAX;
use crate::shares::Shares;
use std::collections::{BTreeMap, HashMap};

/// Bytes of messages that wait at most, and their number. A message counts with as many bytes at least as a share
/// of the number has.
const BYTES_MAX: usize = 64 * 1024 * 1024;
const MESSAGES_MAX: usize = 4 * RANKS_MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    Introduce,
    Introduced,
    Turned,
}

/// The last message of each kind and peer, in the order of their arrival.
#[derive(Debug)]
pub(super) struct Waiting {
    by_arrival: BTreeMap<u64, (PeerId, EngineHandshakeMessage)>,
    arrivals: HashMap<(PeerId, Kind), u64>,
    shares: Shares<(PeerId, Kind)>,
    last: u64,
}

impl Default for Waiting {
    fn default() -> Self {
        Self {
            by_arrival: BTreeMap::new(),
            arrivals: HashMap::new(),
            shares: Shares::new(BYTES_MAX),
            last: 0,
        }
    }
}

impl Waiting {
    /// Adds a message at the end, in place of the peer's earlier one of its kind. Afterwards,
    /// [`Waiting::pop_excess`] must be called until it returns nothing.
    pub(super) fn add(&mut self, from: PeerId, origin: Origin, message: EngineHandshakeMessage) {
        let Some(kind) = Kind::of(&message) else { return };
        self.remove(from, kind);
        self.last += 1;
        self.shares.add(&(from, kind), origin, from.0, size_of(&message));
        self.arrivals.insert((from, kind), self.last);
        self.by_arrival.insert(self.last, (from, message));
    }

    /// Removes a message that there is no room for. Called after [`Waiting::add`].
    pub(super) fn pop_excess(&mut self) -> Option<(PeerId, Kind)> {
        let (_, (from, message)) = self.by_arrival.last_key_value()?;
        let excess = self.shares.excess(&(*from, Kind::of(message)?))?;
        self.remove(excess.0, excess.1);
        Some(excess)
    }

    /// Removes the message that has waited longest.
    pub(super) fn pop(&mut self) -> Option<(PeerId, EngineHandshakeMessage)> {
        let (_, (from, message)) = self.by_arrival.pop_first()?;
        if let Some(kind) = Kind::of(&message) {
            self.arrivals.remove(&(from, kind));
            self.shares.remove(&(from, kind));
        }
        Some((from, message))
    }

    /// Removes a peer's message. Nothing happens if there is none.
    pub(super) fn remove(&mut self, from: PeerId, kind: Kind) {
        if let Some(arrival) = self.arrivals.remove(&(from, kind)) {
            self.by_arrival.remove(&arrival);
            self.shares.remove(&(from, kind));
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_arrival.len()
    }
}

impl Kind {
    /// The kind of a message; `None` for one of a later version.
    const fn of(message: &EngineHandshakeMessage) -> Option<Self> {
        match message {
            EngineHandshakeMessage::Introduce(_) => Some(Self::Introduce),
            EngineHandshakeMessage::Introduced(_) => Some(Self::Introduced),
            EngineHandshakeMessage::Turned(_) => Some(Self::Turned),
            EngineHandshakeMessage::Unknown { .. } => None,
        }
    }
}

/// Bytes of memory that count for a message.
fn size_of(message: &EngineHandshakeMessage) -> usize {
    let model = |model: &Model| model.0.iter().map(|(name, it)| name.len() + it.len()).sum();
    let addresses = |of: &[String]| of.iter().map(|it| size_of_val(it) + it.len()).sum();
    let parts: [usize; 4] = match message {
        EngineHandshakeMessage::Introduce(m) => {
            [m.topology.len(), model(&m.model), size_of_val(&m.ranks[..]), 0]
        }
        EngineHandshakeMessage::Introduced(m) => {
            let cards = m.cards.values().map(|card| card.len()).sum();
            [m.topology.len(), model(&m.model), addresses(&m.addresses), cards]
        }
        EngineHandshakeMessage::Turned(m) => [m.detail.len(), addresses(&m.addresses), 0, 0],
        EngineHandshakeMessage::Unknown { .. } => [0; 4],
    };
    parts.into_iter().sum::<usize>().max(BYTES_MAX / MESSAGES_MAX)
}
