//! The multiplexer of the messages that two ranks exchange.
//!
//! Ranks speak several protocols over one channel. Every message is a map whose field `t` names its
//! kind, and each kind belongs to exactly one protocol. [`RankMessage::decode`] reads the kind once
//! and parses the message as that protocol's; no message is tried as several protocols in turn.

use crate::engine_handshake::EngineHandshakeMessage;
use crate::handoff::HandoffMessage;
use crate::message::{MessageError, check_body_len, kind_of};

/// A message from another rank, of one of the protocols that ranks speak.
///
/// Exhaustive on purpose: a rank must route each protocol to its state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankMessage {
    /// For the handoffs with that rank.
    Handoff(HandoffMessage),
    /// For the handshake with that rank's engine.
    EngineHandshake(EngineHandshakeMessage),
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
        for kind in HandoffMessage::KINDS {
            assert!(!EngineHandshakeMessage::KINDS.contains(kind), "{kind} is in both");
        }
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
