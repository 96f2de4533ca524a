//! Messages of engine handshakes that have arrived and wait to be worked out.

use super::{EngineHandshakeMessage, Model};
use crate::handoff::PeerId;
use crate::origin::Origin;
use crate::plan::RANKS_MAX;
use crate::shares::Shares;
use crate::turns::Turns;
use std::collections::HashMap;

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

/// The last message of each kind and peer. Networks, their hosts and their peers take turns ([`Turns`]).
#[derive(Debug)]
pub(super) struct Waiting {
    messages: HashMap<(PeerId, Kind), (Origin, EngineHandshakeMessage)>,
    turns: Turns<(PeerId, Kind)>,
    shares: Shares<(PeerId, Kind)>,
}

impl Default for Waiting {
    fn default() -> Self {
        Self { messages: HashMap::new(), turns: Turns::default(), shares: Shares::new(BYTES_MAX) }
    }
}

impl Waiting {
    /// Adds a message; in the place of the peer's earlier one of its kind, if that waits. Returns the messages that there
    /// is no room for: they are removed.
    pub(super) fn add(
        &mut self,
        from: PeerId,
        origin: Origin,
        message: EngineHandshakeMessage,
    ) -> Vec<(PeerId, Kind)> {
        let Some(kind) = Kind::of(&message) else { return Vec::new() };
        let key = (from, kind);
        self.shares.remove(&key);
        self.shares.add(&key, origin, from.0, size_of(&message));
        self.turns.add(&key, origin, from.0);
        self.messages.insert(key, (origin, message));
        let mut dropped = Vec::new();
        while let Some(excess) = self.shares.excess(&key) {
            self.remove(excess.0, excess.1);
            dropped.push(excess);
        }
        dropped
    }

    /// Removes the message whose turn it is.
    pub(super) fn pop(&mut self) -> Option<(PeerId, Origin, EngineHandshakeMessage)> {
        let key = self.turns.pop()?;
        self.shares.remove(&key);
        let (origin, message) = self.messages.remove(&key).expect("each that waits is there");
        Some((key.0, origin, message))
    }

    /// Removes a peer's message. Nothing happens if there is none.
    pub(super) fn remove(&mut self, from: PeerId, kind: Kind) {
        let key = (from, kind);
        if self.messages.remove(&key).is_some() {
            self.turns.remove(&key);
            self.shares.remove(&key);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.turns.len()
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
