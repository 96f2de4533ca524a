//! The messages of Mooncake's protocol: handshake frames, the segment descriptor, data requests.
//!
//! All integers are little-endian. The functions are pure; decoding returns a value or an error for
//! every input.

use kvferry_proto::Incarnation;
use serde::{Deserialize, Serialize};
use std::fmt;

/// Bytes of a handshake request from a peer, at most: the limit of stock peers.
pub(super) const REQUEST_MAX: u64 = 1 << 20;
/// Bytes of a handshake answer from a peer, at most: some 200 000 registered buffers.
pub(super) const ANSWER_MAX: u64 = 16 << 20;
/// Bytes of a handshake answer to a peer, at most: the limit of stock peers.
const ANSWER_SENT_MAX: usize = 1 << 20;
/// Bytes of the length before a handshake frame.
pub(super) const LENGTH: usize = 8;
/// The first version of the protocol whose initiators may ask for a status.
pub(super) const STATUS_VERSION: u32 = 2;

/// The purpose of a handshake connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Setting up RDMA queue pairs, which kvferry does not support.
    Connection = 0,
    /// Exchange of segment descriptors.
    Metadata = 1,
    /// A notification.
    Notify = 2,
    Probe = 3,
}

impl Kind {
    const ALL: [Self; 4] = [Self::Connection, Self::Metadata, Self::Notify, Self::Probe];

    pub(super) const fn to_byte(self) -> u8 {
        self as u8
    }

    /// `None` for an unknown byte: releases without a type byte sent the JSON's brace in its place.
    pub(super) fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.to_byte() == byte)
    }
}

/// A handshake frame: length, type, JSON.
pub(super) fn frame(kind: Kind, json: &impl Serialize) -> Vec<u8> {
    let mut bytes = vec![0; LENGTH];
    bytes.push(kind.to_byte());
    serde_json::to_writer(&mut bytes, json).expect("plain values always encode");
    let len = (bytes.len() - LENGTH) as u64;
    bytes[..LENGTH].copy_from_slice(&len.to_le_bytes());
    bytes
}

/// The type and the JSON of a frame whose length was read before.
pub(super) fn split(body: &[u8]) -> Option<(Kind, &[u8])> {
    let (first, json) = body.split_first()?;
    Some((Kind::from_byte(*first)?, json))
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Buffer {
    pub(super) name: String,
    pub(super) addr: u64,
    pub(super) length: u64,
}

/// The extra field by which kvferry agents recognise each other.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Mark {
    pub(super) version: u32,
    /// Hexadecimal.
    pub(super) incarnation: String,
}

impl Mark {
    pub(super) fn new(incarnation: Incarnation) -> Self {
        Self { version: 1, incarnation: format!("{:032x}", incarnation.0) }
    }
}

/// How to reach a peer's memory over TCP. Unknown fields are ignored, as stock peers ignore
/// kvferry's.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Descriptor {
    pub(super) name: String,
    pub(super) protocol: String,
    /// Releases without this field use the host of the handshake.
    #[serde(default)]
    pub(super) tcp_data_host: String,
    #[serde(default)]
    pub(super) tcp_data_port: u16,
    /// Releases without this field speak version 1.
    #[serde(default)]
    pub(super) tcp_proto_version: u32,
    #[serde(default)]
    pub(super) rdma_server_name: String,
    #[serde(default)]
    pub(super) timestamp: String,
    #[serde(default)]
    pub(super) buffers: Vec<Buffer>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) kvferry: Option<Mark>,
}

/// The fields of a request's descriptor that kvferry uses; peers that differ in others are served alike.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Caller {
    #[serde(default)]
    tcp_proto_version: u32,
    #[serde(default)]
    pub(super) kvferry: Option<Mark>,
}

impl Caller {
    /// Whether its writes come without asking for a status: it takes them for done once they are sent, and closes the
    /// connection.
    pub(super) const fn writes_without_status(&self) -> bool {
        self.tcp_proto_version < STATUS_VERSION && self.kvferry.is_none()
    }
}

impl Descriptor {
    /// The frame that answers a metadata request. The list of buffers is cut where stock peers
    /// would stop reading; they do not use the list for writes and reads over TCP.
    pub(super) fn into_answer(mut self) -> Vec<u8> {
        loop {
            let bytes = frame(Kind::Metadata, &self);
            if bytes.len() <= ANSWER_SENT_MAX || self.buffers.is_empty() {
                return bytes;
            }
            let fitting = self.buffers.len() * ANSWER_SENT_MAX / bytes.len();
            tracing::debug!(
                buffers = self.buffers.len(),
                told = fitting,
                "a segment descriptor is too long"
            );
            self.buffers.truncate(fitting.min(self.buffers.len() - 1));
        }
    }
}

/// A notification on the wire. Stock peers send text.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Notify {
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) notify_msg: String,
}

/// The answer to a probe.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Alive {
    #[serde(default)]
    pub(super) status: String,
}

/// The result "done" in answers to notifications and probes.
pub(super) const SUCCESS: &str = "success";

/// The answer to an RDMA peer.
#[derive(Debug, Serialize)]
pub(super) struct NoEndpoint {
    pub(super) local_nic_path: &'static str,
    pub(super) peer_nic_path: &'static str,
    pub(super) qp_num: [u32; 0],
    pub(super) reply_msg: &'static str,
}

/// The operation of a data request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opcode {
    Read,
    Write,
}

/// Set in the opcode by peers that expect a status.
const WITH_STATUS: u8 = 0x80;

/// The head of a data request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) size: u64,
    pub(super) addr: u64,
    pub(super) opcode: Opcode,
    /// The peer expects a status (version 2).
    pub(super) status: bool,
}

impl Request {
    /// Bytes on the wire.
    pub(super) const LEN: usize = 24;

    pub(super) fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&self.size.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.addr.to_le_bytes());
        bytes[16] = match self.opcode {
            Opcode::Read => 0,
            Opcode::Write => 1,
        } | if self.status { WITH_STATUS } else { 0 };
        bytes
    }

    /// Never fails: an unknown opcode is a read, as in stock targets.
    pub(super) fn decode(bytes: &[u8; Self::LEN]) -> Self {
        let word = |at: usize| {
            u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes are a word"))
        };
        Self {
            size: word(0),
            addr: word(8),
            opcode: if bytes[16] & !WITH_STATUS == 1 { Opcode::Write } else { Opcode::Read },
            status: bytes[16] & WITH_STATUS != 0,
        }
    }
}

/// The answer to a request of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Status {
    /// Success; for a read, the payload follows.
    Done,
    /// The address was refused; the connection is closed next.
    Refused,
    /// A code of a later release.
    Other(u32),
}

/// "MCTV", in the upper half of a status.
const STATUS_MAGIC: u32 = 0x4d43_5456;

/// The eight bytes are not a status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NoStatus(u64);

impl fmt::Display for NoStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#018x} where a status belongs", self.0)
    }
}

impl Status {
    /// Bytes on the wire.
    pub(super) const LEN: usize = 8;

    pub(super) fn encode(self) -> [u8; Self::LEN] {
        let code = match self {
            Self::Done => 0,
            Self::Refused => 1,
            Self::Other(code) => code,
        };
        (u64::from(STATUS_MAGIC) << 32 | u64::from(code)).to_le_bytes()
    }

    pub(super) fn decode(bytes: [u8; Self::LEN]) -> Result<Self, NoStatus> {
        let word = u64::from_le_bytes(bytes);
        let code = u32::try_from(word & 0xffff_ffff).expect("masked to 32 bits");
        match (word >> 32 == u64::from(STATUS_MAGIC), code) {
            (false, _) => Err(NoStatus(word)),
            (true, 0) => Ok(Self::Done),
            (true, 1) => Ok(Self::Refused),
            (true, code) => Ok(Self::Other(code)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn descriptor(buffers: usize) -> Descriptor {
        let buffer = |i: usize| Buffer {
            name: "10.0.0.1:15000".into(),
            addr: 0x7f00_0000_0000 + 4096 * i as u64,
            length: 4096,
        };
        Descriptor {
            name: "10.0.0.1:15000".into(),
            protocol: "tcp".into(),
            tcp_data_host: "10.0.0.1".into(),
            tcp_data_port: 15001,
            tcp_proto_version: 2,
            buffers: (0..buffers).map(buffer).collect(),
            kvferry: Some(Mark::new(Incarnation(0xabc))),
            ..Descriptor::default()
        }
    }

    #[test]
    fn the_status_words_are_those_of_stock_peers() {
        assert_eq!(Status::Done.encode(), 0x4d43_5456_0000_0000u64.to_le_bytes());
        assert_eq!(Status::Refused.encode(), 0x4d43_5456_0000_0001u64.to_le_bytes());
    }

    #[test]
    fn a_stock_descriptor_of_either_version_is_decoded() {
        let v2 = r#"{"name":"127.0.0.1:15986","protocol":"tcp","tcp_data_host":"127.0.0.1",
            "tcp_data_port":16086,"tcp_proto_version":2,"rdma_server_name":"","timestamp":"x",
            "devices":[{"gid":"x"}],"buffers":[{"name":"a:1","addr":1,"length":2,"rkey":[1]}]}"#;
        let read: Descriptor = serde_json::from_str(v2).expect("as on the wire");
        assert_eq!((read.tcp_data_port, read.tcp_proto_version), (16086, 2));
        assert_eq!(read.buffers[0].length, 2);
        assert_eq!(read.kvferry, None);
        let v1 = r#"{"name":"h:1","protocol":"tcp","tcp_data_port":7,"buffers":[]}"#;
        let read: Descriptor = serde_json::from_str(v1).expect("as on the wire");
        assert_eq!((read.tcp_proto_version, read.tcp_data_host.as_str()), (0, ""));
    }

    #[test]
    fn a_caller_of_version_1_writes_without_status() {
        let own = serde_json::to_string(&descriptor(1)).expect("plain values");
        for (json, expected) in [
            // As 0.3.7.post2 and 0.3.13.post1 send it.
            (
                r#"{"buffers":[{"addr":1,"length":2,"name":"a:1"}],"name":"a:1","protocol":"tcp",
                "tcp_data_port":16269,"timestamp":"2026-11-27 02:10:17.597210"}"#,
                true,
            ),
            (
                r#"{"buffers":[],"name":"a:1","protocol":"tcp","rdma_server_name":"",
                "tcp_data_host":"127.0.0.1","tcp_data_port":16715,"tcp_proto_version":2,"timestamp":"x"}"#,
                false,
            ),
            (own.as_str(), false),
            (r#"{"kvferry":{"version":1,"incarnation":"abc"}}"#, false),
        ] {
            let caller: Caller = serde_json::from_str(json).expect("as on the wire");
            assert_eq!(caller.writes_without_status(), expected, "{json}");
        }
    }

    #[test]
    fn wrong_types_and_missing_names_are_errors() {
        for json in [
            r#"{"name":7,"protocol":"tcp","tcp_data_port":7}"#,
            r#"{"name":"a","protocol":"tcp","tcp_data_port":"7"}"#,
            r#"{"name":"a","protocol":"tcp","tcp_data_port":70000}"#,
            r#"{"name":"a","protocol":"tcp","buffers":{"a":1}}"#,
            r#"{"protocol":"tcp"}"#,
            r#"{"name":"a","protocol":"tcp""#,
            "[]",
            "",
        ] {
            assert!(serde_json::from_str::<Descriptor>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn an_answer_is_never_longer_than_stock_peers_read() {
        for buffers in [0, 1, 10_000, 100_000] {
            let bytes = descriptor(buffers).into_answer();
            assert!(bytes.len() <= ANSWER_SENT_MAX, "{buffers} buffers: {}", bytes.len());
            let (kind, json) = split(&bytes[LENGTH..]).expect("a frame");
            assert_eq!(kind, Kind::Metadata);
            let read: Descriptor = serde_json::from_slice(json).expect("own output");
            assert_eq!(read.buffers.len() == buffers, buffers <= 10_000, "{buffers} buffers");
        }
    }
}
