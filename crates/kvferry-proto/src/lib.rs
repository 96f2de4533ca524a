//! kvferry's protocols as values.
//!
//! Nothing here reads a clock, opens a socket, starts a thread or draws a random number: bytes,
//! nonces and an explicit [`Timestamp`] go in; bytes, events and the next timer come out. Every
//! path of the protocol therefore runs in virtual time, both ends in one thread.
//!
//! # What is where
//!
//! * [`code`]: result codes on the wire.
//! * [`frame`]: data frames, the fixed little-endian headers of a stream, and their checksums.
//! * [`lane`]: the two ends of one stream of data frames.
//! * [`message`]: control messages, MessagePack maps behind a length.
//! * [`auth`]: mutual authentication by a shared secret, and the key of a session.
//! * [`session`]: the state machine of one control connection.
//! * [`handoff`]: one request's KV from producer to consumer, a state machine for each.
//! * [`engine_handshake`]: what the ranks of two engines exchange before the first handoff.
//! * [`rank_message`]: which of these protocols a message between two ranks belongs to.
//! * [`layout`]: how the KV blocks of one rank lie in its regions, and what must be equal at both ends.
//! * [`plan`]: which bytes of a producer rank become which bytes of a consumer rank.
//! * [`pack`]: small bodies in MessagePack.
//! * [`local`]: packets between two agents of one host.
//! * [`admission`]: what a listener does with a connection before the peer has proved itself.
//!
//! # A connection's life
//!
//! ```text
//! initiator                                acceptor
//!   MAGIC, Hello          ------------->   sniffed, admitted
//!                         <-------------   Challenge
//!   Proof                 ------------->   verified before the acceptor sends any MAC
//!                         <-------------   Ready          Established on both sides
//!   Ping/Pong while active, Revoke/Revoked, Request/Response, both ways
//!   Close                 <------------>   Close          exactly one Closed on each side
//!
//!   MAGIC, StreamHello    ------------->   a further connection: proves the session's key
//!                         <-------------   StreamReady    from here on only data frames
//! ```
#![forbid(unsafe_code)]

pub mod admission;
pub mod auth;
pub mod code;
pub mod engine_handshake;
pub mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod handoff;
mod id;
pub mod lane;
pub mod layout;
pub mod local;
pub mod message;
pub mod pack;
pub mod plan;
pub mod rank_message;
pub mod session;
mod text;
mod time;

pub use admission::{Handshakes, Opener, Opening, PENDING_MAX, Sniff, Sniffer};
pub use auth::{Secret, SessionKey};
pub use code::WireCode;
pub use frame::{
    CHECKSUM_PIECE, Flags, FrameError, Limits, MAGIC, Notification, Op, PieceDigest, RequestHeader,
    ResponseHeader, WireDescriptor, crc32c, crc32c_append,
};
pub use id::{Incarnation, RegionId, SessionId, StreamId, TransferId};
pub use local::LocalPacket;
pub use message::{CONTROL_MAX, Decoder, Message, MessageError, PREAUTH_MAX, StreamHello};
pub use session::{
    CAPABILITY_LOCAL, ChecksumPolicy, CloseReason, PeerInfo, Session, SessionConfig, SessionEvent,
    Side,
};
pub use time::Timestamp;
