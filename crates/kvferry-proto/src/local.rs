//! Packets between two agents of one host, which carry file descriptors.
//!
//! ```text
//! initiator                                            acceptor
//!   StreamHello, with the local proof + its writers page ->
//!   <- Offer: where its probe lies, and its MAC          + its registry
//!   Probe: what it read there, or why it could not ->
//!   <- Attached
//!   Map: a region ->
//!   <- Mapped: its length                                + its memory
//!   <- Unmapped: a region
//! ```
//!
//! A process number proves nothing. The probe proves that the initiator reaches the acceptor's memory
//! under that number: random bytes of which the acceptor sends only the address.

use crate::auth::{MAC_LEN, ProofLabel};
use crate::code::WireCode;
use crate::id::RegionId;
use thiserror::Error;

const MAGIC: [u8; 4] = *b"KVFL";

/// The capability bit of agents that take part in transfers within one host.
pub const CAPABILITY_LOCAL: u64 = 1;

/// The label of the proofs in the hello and in `Offer`.
pub const PROOF: ProofLabel = ProofLabel::new("local");

/// Random bytes of a probe.
pub const PROBE_LEN: usize = 16;

/// Bytes of every packet but the first.
pub const PACKET_LEN: usize = 64;

const FIXED: usize = 4 + 2 + 2 + 4 + 4 + 8 + 8;
const _: () = assert!(FIXED + MAC_LEN == PACKET_LEN);

/// A packet of the local socket. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum LocalPacket {
    /// The acceptor agrees to transfers within the host, or refuses them. `probe` is the address of
    /// the probe in the acceptor's process, `mac` its proof that it holds the session's key.
    Offer { code: WireCode, probe: u64, mac: [u8; MAC_LEN] },
    /// The probe that the initiator read; the code is `Unsupported` if the kernel refused to read.
    Probe { code: WireCode, bytes: [u8; PROBE_LEN] },
    /// The initiator may begin, or is refused.
    Attached { code: WireCode },
    /// The initiator wants to map a region.
    Map { region: RegionId },
    /// The answer to `Map`. A descriptor of the region's memory, of `len` bytes, comes with it.
    Mapped { region: RegionId, code: WireCode, len: u64 },
    /// A region was unregistered: the initiator must unmap its memory.
    Unmapped { region: RegionId },
}

/// Error for bytes that are not a valid packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum LocalError {
    /// The length differs from that of a packet.
    #[error("a packet of {len} bytes where {PACKET_LEN} were expected")]
    Length { len: usize },
    /// The magic differs.
    #[error("a packet of another protocol")]
    Magic,
    /// A kind of a later version.
    #[error("a packet of unknown kind {kind}")]
    Kind { kind: u16 },
}

struct Fields {
    kind: u16,
    code: WireCode,
    region: RegionId,
    value: u64,
    bytes: [u8; MAC_LEN],
}

impl LocalPacket {
    /// The packet's bytes on the wire.
    pub fn encode(&self) -> [u8; PACKET_LEN] {
        let none = Fields {
            kind: 0,
            code: WireCode::Ok,
            region: RegionId(0),
            value: 0,
            bytes: [0; MAC_LEN],
        };
        let fields = match *self {
            Self::Offer { code, probe, mac } => {
                Fields { kind: 1, code, value: probe, bytes: mac, ..none }
            }
            Self::Probe { code, bytes: probe } => {
                let mut bytes = none.bytes;
                bytes[..PROBE_LEN].copy_from_slice(&probe);
                Fields { kind: 2, code, bytes, ..none }
            }
            Self::Attached { code } => Fields { kind: 3, code, ..none },
            Self::Map { region } => Fields { kind: 4, region, ..none },
            Self::Mapped { region, code, len } => {
                Fields { kind: 5, region, code, value: len, ..none }
            }
            Self::Unmapped { region } => Fields { kind: 6, region, ..none },
        };
        let mut out = [0; PACKET_LEN];
        out[..4].copy_from_slice(&MAGIC);
        out[4..6].copy_from_slice(&fields.kind.to_le_bytes());
        out[6..8].copy_from_slice(&fields.code.to_u16().to_le_bytes());
        out[8..12].copy_from_slice(&fields.region.0.to_le_bytes());
        out[16..24].copy_from_slice(&fields.value.to_le_bytes());
        out[FIXED..].copy_from_slice(&fields.bytes);
        out
    }

    /// Parses a packet. Bytes that its kind does not use are ignored.
    ///
    /// # Errors
    /// The length, the magic or the kind is wrong.
    pub fn decode(bytes: &[u8]) -> Result<Self, LocalError> {
        let bytes: &[u8; PACKET_LEN] =
            bytes.try_into().map_err(|_| LocalError::Length { len: bytes.len() })?;
        if bytes[..4] != MAGIC {
            return Err(LocalError::Magic);
        }
        let kind = u16::from_le_bytes([bytes[4], bytes[5]]);
        let code = WireCode::from_u16(u16::from_le_bytes([bytes[6], bytes[7]]));
        let region = RegionId(u32::from_le_bytes([bytes[8], bytes[9], bytes[10], bytes[11]]));
        let value = u64::from_le_bytes(*bytes[16..].first_chunk().expect("a whole packet"));
        let mac: [u8; MAC_LEN] = *bytes[FIXED..].first_chunk().expect("a whole packet");
        Ok(match kind {
            1 => Self::Offer { code, probe: value, mac },
            2 => Self::Probe { code, bytes: *mac.first_chunk().expect("longer than a probe") },
            3 => Self::Attached { code },
            4 => Self::Map { region },
            5 => Self::Mapped { region, code, len: value },
            6 => Self::Unmapped { region },
            kind => return Err(LocalError::Kind { kind }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_kind_survives_a_round_trip() {
        let region = RegionId(77);
        for packet in [
            LocalPacket::Offer { code: WireCode::Ok, probe: u64::MAX - 1, mac: [3; MAC_LEN] },
            LocalPacket::Probe { code: WireCode::Unsupported, bytes: [9; PROBE_LEN] },
            LocalPacket::Attached { code: WireCode::AuthFailed },
            LocalPacket::Map { region },
            LocalPacket::Mapped { region, code: WireCode::Ok, len: 1 << 40 },
            LocalPacket::Unmapped { region },
        ] {
            assert_eq!(LocalPacket::decode(&packet.encode()), Ok(packet));
        }
    }

    proptest! {
        #[test]
        fn bytes_are_a_packet_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(packet) = LocalPacket::decode(&bytes) {
                prop_assert_eq!(LocalPacket::decode(&packet.encode()), Ok(packet));
            }
        }
    }

    #[test]
    fn a_packet_of_a_later_version_is_told_apart() {
        let mut bytes = LocalPacket::Map { region: RegionId(1) }.encode();
        bytes[4] = 200;
        assert_eq!(LocalPacket::decode(&bytes), Err(LocalError::Kind { kind: 200 }));
        bytes[0] = 0;
        assert_eq!(LocalPacket::decode(&bytes), Err(LocalError::Magic));
        assert_eq!(LocalPacket::decode(&bytes[1..]), Err(LocalError::Length { len: 63 }));
    }
}
