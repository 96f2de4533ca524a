//! kvferry's protocols as values.
//!
//! Nothing here reads a clock, opens a socket, starts a thread or draws a random number: bytes,
//! nonces and an explicit [`Timestamp`] go in; bytes, events and the next timer come out. Every
//! path of the protocol therefore runs in virtual time, both ends in one thread.
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
pub mod directory;
pub mod engine_handshake;
pub mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
pub mod handoff;
mod id;
pub mod keyed;
pub mod lane;
pub mod layout;
pub mod local;
pub mod message;
mod origin;
pub mod pack;
pub mod plan;
pub mod rank_message;
pub mod session;
mod shares;
mod side;
pub mod tasks;
mod text;
mod time;
mod turns;

pub use admission::{
    Handshakes, Opener, Opening, PENDING_MAX, Sniff, Sniffer, WAITING_ROOM_MAX, WaitingRoom,
};
pub use auth::{ProofLabel, Secret, SessionKey};
pub use code::WireCode;
pub use frame::{
    CHECKSUM_PIECE, Flags, FrameError, Limits, MAGIC, Notification, Op, PieceDigest, RequestHeader,
    ResponseHeader, WireDescriptor, crc32c, crc32c_append,
};
pub use id::{Incarnation, RegionId, SessionId, StreamId, TransferId};
pub use keyed::Guard;
pub use local::{CAPABILITY_LOCAL, LocalPacket};
pub use message::{CONTROL_MAX, Decoder, Message, MessageError, PREAUTH_MAX, StreamHello};
pub use origin::Origin;
pub use session::{ChecksumPolicy, CloseReason, PeerInfo, Session, SessionConfig, SessionEvent};
pub use shares::Shares;
pub use side::Side;
pub use time::Timestamp;
pub use turns::Turns;
