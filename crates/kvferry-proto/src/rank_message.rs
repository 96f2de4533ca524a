//! The multiplexer of the messages that two ranks exchange.
//!
//! Ranks speak several protocols over one channel. Every message is a map whose field `t` names its
//! kind, and each kind belongs to exactly one protocol. [`RankMessage::decode`] reads the kind once
//! and parses the message as that protocol's; no message is tried as several protocols in turn.

use crate::engine_handshake::EngineHandshakeMessage;
use crate::handoff::HandoffMessage;
use crate::message::{MessageError, bodies, check_body_len, kind_of, messages};
use serde::{Deserialize, Serialize};
use std::fmt;

/// A random number that a consumer rank draws for a producer rank, and tells that one alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ReaderKey(#[serde(with = "serde_bytes")] pub [u8; 16]);

impl fmt::Debug for ReaderKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ReaderKey(..)")
    }
}

/// Consumer rank to producer rank, as the first message of a session: sessions with one key are one reader's. Without
/// it each session is another reader, which can't go on in the next session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reader {
    /// Key of the reader, the same in all sessions with one incarnation of the producer rank at one
    /// of its addresses.
    pub key: ReaderKey,
}

messages! {
    /// A message about who reads.
    ReaderMessage, "reader":
    "reader" => /** See [`Reader`]. */ Reader;
}

bodies!(ReaderMessage);

impl ReaderMessage {
    #[allow(
        clippy::unnecessary_wraps,
        reason = "the protocols of ranks check their messages alike"
    )]
    const fn check(&self) -> Result<(), MessageError> {
        Ok(())
    }
}

/// A message from another rank, of one of the protocols that ranks speak.
///
/// Exhaustive on purpose: a rank must route each protocol to its state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankMessage {
    /// A message about a handoff with that rank.
    Handoff(HandoffMessage),
    /// A message of the handshake with that rank's engine.
    EngineHandshake(EngineHandshakeMessage),
    /// Says which reader speaks.
    Reader(ReaderMessage),
    /// A kind that belongs to no protocol of this build: a later version's. To be skipped.
    Unknown {
        /// The kind, cut to 32 bytes.
        kind: String,
    },
}

impl RankMessage {
    /// Parses the message that `bytes` are.
    ///
    /// # Errors
    /// The bytes are not one map with a kind, not the fields of their kind, or longer than the
    /// body of a control message may be.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        check_body_len(bytes)?;
        let kind = kind_of(bytes, "rank")?;
        if HandoffMessage::KINDS.contains(&kind.as_str()) {
            HandoffMessage::parse_as(kind, bytes).map(Self::Handoff)
        } else if EngineHandshakeMessage::KINDS.contains(&kind.as_str()) {
            EngineHandshakeMessage::parse_as(kind, bytes).map(Self::EngineHandshake)
        } else if ReaderMessage::KINDS.contains(&kind.as_str()) {
            ReaderMessage::parse_as(kind, bytes).map(Self::Reader)
        } else {
            Ok(Self::Unknown { kind })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_kind_of_message_belongs_to_two_protocols() {
        let all =
            [HandoffMessage::KINDS, EngineHandshakeMessage::KINDS, ReaderMessage::KINDS].concat();
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len(), "{all:?}");
    }

    #[test]
    fn a_malformed_message_of_one_protocol_is_not_tried_as_another() {
        // A map with the kind of a handoff message, and none of its fields.
        let bytes = b"\x81\xa1t\xa7confirm";
        let error = RankMessage::decode(bytes).expect_err("no fields");
        assert!(matches!(error, MessageError::Malformed { kind: "confirm", .. }), "{error}");
        assert!(RankMessage::decode(b"\xc0").is_err(), "not a map");
    }
}
