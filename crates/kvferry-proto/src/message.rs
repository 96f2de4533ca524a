//! Control messages: MessagePack maps behind a length.
//!
//! A frame is a `u32` length (little-endian) and that many bytes of one MessagePack map with named
//! fields; the field `t` says which message it is. Unknown fields are ignored. Unknown messages
//! are kept as [`Message::Unknown`]: an established session skips them, a handshake refuses them.

use crate::auth::{MAC_LEN, NONCE_LEN};
use crate::code::WireCode;
use crate::id::{Incarnation, SessionId, StreamId};
use crate::keyed::{Forged, Seal, TAG_LEN};
use crate::pack;
use crate::text::truncated;
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use thiserror::Error;

/// The longest control message of an established session, in bytes.
pub const CONTROL_MAX: usize = 1024 * 1024;

/// The longest control message before the peer has proved anything, in bytes.
pub const PREAUTH_MAX: usize = 4 * 1024;

/// The longest name of an agent, in bytes.
pub const NAME_MAX: usize = 256;

/// The longest explanation that goes with a code, in bytes.
pub const DETAIL_MAX: usize = 512;

/// The longest advertised address, in bytes.
pub const ADVERTISED_MAX: usize = 1024;

/// The longest layout fingerprint, in bytes.
pub const FINGERPRINT_MAX: usize = 256;

/// The longest body of a [`Request`] or [`Response`], in bytes.
pub const BODY_MAX: usize = CONTROL_MAX - 1024;

/// The most streams one [`Revoke`] names.
pub const REVOKE_STREAMS_MAX: usize = 4096;

/// The longest kind of an unknown message that is kept, in bytes.
const KIND_MAX: usize = 32;

/// Initiator to acceptor, first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Lowest and highest protocol version the initiator speaks.
    pub versions: (u16, u16),
    /// Capability bits of the initiator.
    #[serde(default)]
    pub capabilities: u64,
    /// The initiator's incarnation.
    pub incarnation: Incarnation,
    /// The initiator's name, for logs; at most [`NAME_MAX`] bytes.
    #[serde(default)]
    pub name: String,
    /// Fresh.
    #[serde(with = "serde_bytes")]
    pub nonce: [u8; NONCE_LEN],
    /// Whether the initiator has a secret. Then both sides must prove it.
    pub authenticate: bool,
    /// Whether the initiator wants payload checksums.
    #[serde(default)]
    pub checksum: bool,
    /// Address where the initiator listens, or empty; at most [`ADVERTISED_MAX`] bytes.
    #[serde(default)]
    pub advertised: String,
    /// Identifies the initiator's layout; at most [`FINGERPRINT_MAX`] bytes.
    #[serde(default, with = "serde_bytes")]
    pub fingerprint: Option<Vec<u8>>,
}

/// Acceptor to initiator, in answer to [`Hello`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Challenge {
    /// The protocol version of the session.
    pub version: u16,
    /// Capability bits of the acceptor.
    #[serde(default)]
    pub capabilities: u64,
    /// The acceptor's incarnation.
    pub incarnation: Incarnation,
    /// The acceptor's name, for logs; at most [`NAME_MAX`] bytes.
    #[serde(default)]
    pub name: String,
    /// Fresh.
    #[serde(with = "serde_bytes")]
    pub nonce: [u8; NONCE_LEN],
    /// Whether the acceptor has a secret.
    pub authenticate: bool,
}

/// Initiator to acceptor, in answer to [`Challenge`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Proof {
    /// The initiator's MAC over the transcript.
    #[serde(with = "serde_bytes")]
    pub mac: [u8; MAC_LEN],
}

/// Acceptor to initiator, in answer to [`Proof`]: the session is established.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// The session's id at the acceptor.
    pub session: SessionId,
    /// The acceptor's MAC over the transcript and the other fields.
    #[serde(with = "serde_bytes")]
    pub mac: [u8; MAC_LEN],
    /// Whether payload carries checksums in this session.
    pub checksum: bool,
    /// Address where the acceptor listens, or empty; at most [`ADVERTISED_MAX`] bytes.
    #[serde(default)]
    pub advertised: String,
}

/// The acceptor refuses this session or stream, and closes the connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    /// Reason for the refusal.
    pub code: WireCode,
    /// Explanation of the refusal; at most [`DETAIL_MAX`] bytes.
    #[serde(default)]
    pub detail: String,
    /// A number that goes with the code.
    #[serde(default)]
    pub aux: u64,
    /// The acceptor's proof, as in [`StreamReady`], if this answers a stream of a known session.
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub mac: Option<Vec<u8>>,
}

/// Asks for a sign of life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ping {
    /// Counts up.
    pub seq: u64,
    /// Whether something is in flight or granted at the sender.
    #[serde(default)]
    pub active: bool,
}

/// The answer to a [`Ping`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// The latest ping's.
    pub seq: u64,
}

/// Demands that the receiver stops touching the sender's memory through these streams, and confirms
/// it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoke {
    /// Chosen by the sender.
    pub id: u64,
    /// Streams to stop; at most [`REVOKE_STREAMS_MAX`].
    pub streams: Vec<StreamId>,
}

/// Confirms a [`Revoke`]: nothing at the sender touches memory through its streams any more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revoked {
    /// Id of the [`Revoke`].
    pub id: u64,
}

/// A request of the layers above.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// Chosen by the sender; counts up.
    pub id: u64,
    /// Service that the request is for. Not interpreted here.
    pub kind: u16,
    /// Milliseconds the sender waits for the answer; 0 for unknown.
    #[serde(default)]
    pub budget_ms: u32,
    /// Not interpreted here; at most [`BODY_MAX`] bytes.
    #[serde(with = "serde_bytes")]
    pub body: Vec<u8>,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Response {
    /// The request's.
    pub id: u64,
    /// Result of the request.
    pub code: WireCode,
    /// Not interpreted here; at most [`BODY_MAX`] bytes.
    #[serde(default, with = "serde_bytes")]
    pub body: Vec<u8>,
}

/// Ends the session. Answered with a `Close`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Close {
    /// Reason for the end.
    pub code: WireCode,
    /// Explanation of the end; at most [`DETAIL_MAX`] bytes.
    #[serde(default)]
    pub detail: String,
}

/// The first message of a data stream, or of a connection of another transport that proves the
/// session's key, from the session's initiator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamHello {
    /// The session it belongs to.
    pub session: SessionId,
    /// The stream's id, never used before in this session.
    pub stream: StreamId,
    /// The acceptor that the initiator expects.
    pub incarnation: Incarnation,
    /// [`crate::auth::stream_mac`] or [`crate::auth::ProofLabel::hello_mac`].
    #[serde(with = "serde_bytes")]
    pub mac: [u8; MAC_LEN],
}

/// The stream is accepted; data frames follow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamReady {
    /// The acceptor's proof, of sessions with a secret. See [`crate::Session::stream_answer`].
    #[serde(default, with = "serde_bytes", skip_serializing_if = "Option::is_none")]
    pub mac: Option<Vec<u8>>,
}

/// Error for bytes that are not a valid control message.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum MessageError {
    /// The announced length, in bytes, exceeds the limit of this state.
    #[error("message of {len} bytes is beyond the limit of {limit}")]
    TooLong { len: usize, limit: usize },
    /// The bytes are no MessagePack map with a kind, or lack fields of their kind.
    #[error("malformed {kind} message: {detail}")]
    Malformed { kind: &'static str, detail: String },
    /// A field is longer than it may be.
    #[error("{field} is longer than {limit}")]
    FieldTooLong { field: &'static str, limit: usize },
    /// The frame's keyed tag does not fit.
    #[error("a control frame was changed, replayed or lost on its way")]
    Forged,
}

impl MessageError {
    /// The code for the sender.
    pub const fn code(&self) -> WireCode {
        match self {
            Self::TooLong { .. } | Self::FieldTooLong { .. } => WireCode::TooLarge,
            Self::Malformed { .. } => WireCode::Malformed,
            Self::Forged => WireCode::Forged,
        }
    }
}

/// One line per message: the variant and its kind on the wire, which never changes. The type's method
/// `check` has the bounds of the fields, which are checked when a message is parsed.
macro_rules! messages {
    (
        $(#[$of:meta])* $all:ident, $what:literal:
        $($kind:literal => $(#[$doc:meta])* $name:ident;)*
    ) => {
        $(#[$of])*
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum $all {
            $($(#[$doc])* $name($name),)*
            /// A message of a later version.
            Unknown {
                /// Kind of the message, cut to 32 bytes.
                kind: String,
            },
        }

        impl $all {
            /// The message's kind on the wire.
            pub fn kind(&self) -> &str {
                match self {
                    $(Self::$name(_) => $kind,)*
                    Self::Unknown { kind } => kind,
                }
            }

            /// The kinds of this protocol.
            #[allow(dead_code, reason = "read for protocols that share a channel with others")]
            pub(crate) const KINDS: &[&str] = &[$($kind),*];

            /// Parses one message from its map.
            fn parse(bytes: &[u8]) -> Result<Self, $crate::message::MessageError> {
                let kind = $crate::message::kind_of(bytes, $what)?;
                Self::parse_as(kind, bytes)
            }

            /// Parses the map of a message whose kind is known already.
            pub(crate) fn parse_as(
                kind: String,
                bytes: &[u8],
            ) -> Result<Self, $crate::message::MessageError> {
                use $crate::{message::malformed, pack};
                let message = match kind.as_str() {
                    $($kind => Self::$name(pack::decode(bytes).map_err(|e| malformed($kind, &e))?),)*
                    _ => Self::Unknown { kind },
                };
                message.check()?;
                Ok(message)
            }

            /// Appends the message's map.
            fn write_to(&self, out: &mut Vec<u8>) {
                use $crate::message::write;
                match self {
                    $(Self::$name(body) => write(out, $kind, Some(body)),)*
                    Self::Unknown { kind } => write(out, kind, None::<&()>),
                }
            }
        }

        $(impl From<$name> for $all {
            fn from(message: $name) -> Self {
                Self::$name(message)
            }
        })*
    };
}
pub(crate) use messages;

/// Messages that are sent as bodies, without a length of their own.
macro_rules! bodies {
    ($all:ident) => {
        impl $all {
            /// The message as bytes.
            pub fn encode(&self) -> Vec<u8> {
                let mut bytes = Vec::new();
                self.write_to(&mut bytes);
                bytes
            }

            /// Parses one message.
            ///
            /// # Errors
            /// The bytes are malformed, or longer than the body of a control message may be.
            pub fn decode(bytes: &[u8]) -> Result<Self, $crate::message::MessageError> {
                $crate::message::check_body_len(bytes)?;
                Self::parse(bytes)
            }
        }
    };
}
pub(crate) use bodies;

messages! {
    /// A control message.
    ///
    /// Exhaustive on purpose: the session must decide about each in each state.
    Message, "control":
    "hello" => /** See [`Hello`]. */ Hello;
    "challenge" => /** See [`Challenge`]. */ Challenge;
    "proof" => /** See [`Proof`]. */ Proof;
    "ready" => /** See [`Ready`]. */ Ready;
    "refused" => /** See [`Refused`]. */ Refused;
    "ping" => /** See [`Ping`]. */ Ping;
    "pong" => /** See [`Pong`]. */ Pong;
    "revoke" => /** See [`Revoke`]. */ Revoke;
    "revoked" => /** See [`Revoked`]. */ Revoked;
    "request" => /** See [`Request`]. */ Request;
    "response" => /** See [`Response`]. */ Response;
    "close" => /** See [`Close`]. */ Close;
    "stream_hello" => /** See [`StreamHello`]. */ StreamHello;
    "stream_ready" => /** See [`StreamReady`]. */ StreamReady;
}

#[derive(Serialize, Deserialize)]
struct Tag<'a> {
    #[serde(borrow)]
    t: Cow<'a, str>,
}

#[derive(Serialize)]
struct Tagged<'a, T> {
    t: &'a str,
    #[serde(flatten)]
    body: &'a T,
}

/// Checks the length of a message that is sent as the body of a [`Request`].
pub(crate) const fn check_body_len(bytes: &[u8]) -> Result<(), MessageError> {
    let (len, limit) = (bytes.len(), BODY_MAX);
    if len > limit { Err(MessageError::TooLong { len, limit }) } else { Ok(()) }
}

/// Returns the kind of the message in `bytes`, cut to [`KIND_MAX`] bytes.
pub(crate) fn kind_of(bytes: &[u8], what: &'static str) -> Result<String, MessageError> {
    // Walks over everything, and so bounds the depth for the second pass, too.
    let mut tag = rmp_serde::Deserializer::from_read_ref(bytes);
    tag.set_max_depth(pack::DEPTH_MAX);
    let tag = Tag::deserialize(&mut tag).map_err(|e| malformed(what, &e))?;
    Ok(truncated(&tag.t, KIND_MAX).to_owned())
}

/// Appends a message's map.
pub(crate) fn write<T: Serialize>(out: &mut Vec<u8>, kind: &str, body: Option<&T>) {
    let written = match body {
        Some(body) => rmp_serde::encode::write_named(out, &Tagged { t: kind, body }),
        None => rmp_serde::encode::write_named(out, &Tag { t: kind.into() }),
    };
    written.expect("a Vec takes any bytes, and messages are plain maps");
}

impl Message {
    fn check(&self) -> Result<(), MessageError> {
        match self {
            Self::Hello(m) => {
                at_most("name", m.name.len(), NAME_MAX)?;
                at_most("advertised", m.advertised.len(), ADVERTISED_MAX)?;
                at_most(
                    "fingerprint",
                    m.fingerprint.as_ref().map_or(0, Vec::len),
                    FINGERPRINT_MAX,
                )?;
                if m.versions.0 > m.versions.1 {
                    return Err(refused("hello", "version range is empty"));
                }
                Ok(())
            }
            Self::Challenge(m) => at_most("name", m.name.len(), NAME_MAX),
            Self::Ready(m) => at_most("advertised", m.advertised.len(), ADVERTISED_MAX),
            Self::Refused(Refused { detail, .. }) | Self::Close(Close { detail, .. }) => {
                at_most("detail", detail.len(), DETAIL_MAX)
            }
            Self::Revoke(m) => at_most("streams", m.streams.len(), REVOKE_STREAMS_MAX),
            Self::Request(Request { body, .. }) | Self::Response(Response { body, .. }) => {
                at_most("body", body.len(), BODY_MAX)
            }
            Self::Proof(_)
            | Self::Ping(_)
            | Self::Pong(_)
            | Self::Revoked(_)
            | Self::StreamHello(_)
            | Self::StreamReady(_)
            | Self::Unknown { .. } => Ok(()),
        }
    }
}

/// The frame of `message`: length and map.
pub fn encode(message: &Message) -> Vec<u8> {
    let mut frame = vec![0; 4];
    message.write_to(&mut frame);
    let len = u32::try_from(frame.len() - 4).expect("bodies are bounded far below 4 GiB");
    frame[..4].copy_from_slice(&len.to_le_bytes());
    frame
}

/// Splits a byte stream into messages. Where the stream is split makes no difference.
///
/// Holds at most one frame, and of it only what has arrived: an announced length alone allocates
/// nothing.
#[derive(Debug)]
pub struct Decoder {
    limit: usize,
    frame: Vec<u8>,
    seal: Option<Seal>,
}

impl Decoder {
    /// A decoder that refuses messages longer than `limit` bytes.
    pub const fn new(limit: usize) -> Self {
        Self { limit, frame: Vec::new(), seal: None }
    }

    /// Drops the part of a frame that has arrived.
    pub(crate) fn clear(&mut self) {
        self.frame = Vec::new();
    }

    /// Expects a keyed tag behind each frame, from the next frame on.
    pub(crate) fn open_with(&mut self, seal: Seal) {
        self.seal = Some(seal);
    }

    /// Changes the limit for frames whose length has not arrived yet.
    pub const fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Takes bytes from the front of `input` until a message is complete or the input is empty.
    ///
    /// `Ok(None)` means that all input was taken and more is needed. Bytes behind a complete message
    /// are left in `input`.
    ///
    /// # Errors
    /// The bytes are malformed. The stream is out of step and of no further use.
    pub fn read(&mut self, input: &mut &[u8]) -> Result<Option<Message>, MessageError> {
        Ok(self.read_frame(input)?.map(|(message, _)| message))
    }

    /// Like [`Decoder::read`], with the whole frame as it crossed the wire.
    ///
    /// # Errors
    /// As [`Decoder::read`].
    pub fn read_frame(
        &mut self,
        input: &mut &[u8],
    ) -> Result<Option<(Message, Vec<u8>)>, MessageError> {
        self.take(input, 4);
        let Some(len) = self.frame.first_chunk::<4>() else { return Ok(None) };
        let len = usize::try_from(u32::from_le_bytes(*len)).unwrap_or(usize::MAX);
        if len > self.limit {
            return Err(MessageError::TooLong { len, limit: self.limit });
        }
        let tag = if self.seal.is_some() { TAG_LEN } else { 0 };
        self.take(input, 4 + len + tag);
        if self.frame.len() < 4 + len + tag {
            return Ok(None);
        }
        let mut frame = std::mem::take(&mut self.frame);
        if let Some(seal) = &mut self.seal {
            seal.open(&mut frame, 4 + len).map_err(|Forged| MessageError::Forged)?;
            frame.truncate(4 + len);
        }
        Ok(Some((Message::parse(&frame[4..])?, frame)))
    }

    /// Whether frames have keyed tags.
    pub(crate) const fn is_keyed(&self) -> bool {
        self.seal.is_some()
    }

    /// The announced length of an incomplete message; 0 until it is known.
    pub fn announced(&self) -> usize {
        let len = self.frame.first_chunk::<4>().map_or(0, |len| u32::from_le_bytes(*len));
        usize::try_from(len).unwrap_or(usize::MAX)
    }

    /// Bytes of an incomplete message that are held.
    pub const fn buffered(&self) -> usize {
        self.frame.len()
    }

    fn take(&mut self, input: &mut &[u8], up_to: usize) {
        let missing = up_to.saturating_sub(self.frame.len());
        let (taken, rest) = input.split_at(missing.min(input.len()));
        self.frame.extend_from_slice(taken);
        *input = rest;
    }
}

pub(crate) fn malformed(kind: &'static str, error: &rmp_serde::decode::Error) -> MessageError {
    MessageError::Malformed { kind, detail: error.to_string() }
}

pub(crate) fn refused(kind: &'static str, detail: &str) -> MessageError {
    MessageError::Malformed { kind, detail: detail.to_owned() }
}

pub(crate) fn at_most(field: &'static str, len: usize, limit: usize) -> Result<(), MessageError> {
    if len > limit { Err(MessageError::FieldTooLong { field, limit }) } else { Ok(()) }
}
