//! The multiplexer of the messages that ranks exchange.

use super::{engine_handshake, handoff};
use kvferry_proto::engine_handshake::EngineHandshakeMessage;
use kvferry_proto::handoff::HandoffMessage;
use kvferry_proto::rank_message::{RankMessage, Reader, ReaderKey, ReaderMessage};

/// One message: at most one protocol knows its kind, and reads the same in it.
pub fn message(bytes: &[u8]) {
    let (handoff, handshake) =
        (HandoffMessage::decode(bytes), EngineHandshakeMessage::decode(bytes));
    match RankMessage::decode(bytes) {
        Ok(RankMessage::Handoff(message)) => {
            let kind = message.kind().to_owned();
            assert_eq!(handoff, Ok(message));
            assert_eq!(handshake, Ok(EngineHandshakeMessage::Unknown { kind }));
        }
        Ok(RankMessage::EngineHandshake(message)) => {
            let kind = message.kind().to_owned();
            assert_eq!(handshake, Ok(message));
            assert_eq!(handoff, Ok(HandoffMessage::Unknown { kind }));
        }
        Ok(RankMessage::Reader(message)) => {
            let kind = message.kind().to_owned();
            assert_eq!(ReaderMessage::decode(&message.encode()), Ok(message));
            assert_eq!(handoff, Ok(HandoffMessage::Unknown { kind: kind.clone() }));
            assert_eq!(handshake, Ok(EngineHandshakeMessage::Unknown { kind }));
        }
        Ok(RankMessage::Unknown { kind }) => {
            assert_eq!(handoff, Ok(HandoffMessage::Unknown { kind: kind.clone() }));
            assert_eq!(handshake, Ok(EngineHandshakeMessage::Unknown { kind }));
        }
        Err(_) => {
            let reader = ReaderMessage::decode(bytes);
            assert!(handoff.is_err() || handshake.is_err() || reader.is_err());
        }
    }
}

/// Messages of honest peers.
pub fn seeds() -> Vec<Vec<u8>> {
    let reader = ReaderMessage::from(Reader { key: ReaderKey([0x5a; 16]) }).encode();
    [handoff::message_seeds(), engine_handshake::message_seeds(), vec![reader]].concat()
}
