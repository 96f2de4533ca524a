//! What a session tells the layers above.

use crate::code::WireCode;
use crate::id::{Incarnation, SessionId, StreamId};

/// An event for the layers above. Exhaustive on purpose: the driver must act on each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum SessionEvent {
    /// The handshake succeeded. At most once, and before every event but `Closed` and the answers
    /// to requests that were made too early.
    Established(PeerInfo),
    /// The peer demands that its memory is not touched any more. Stop these streams, then call
    /// [`Session::confirm_revoked`](super::Session::confirm_revoked) with the id.
    RevokeRequested { id: u64, streams: Vec<StreamId> },
    /// The peer confirmed the revoke of this side that [`Session::revoke`](super::Session::revoke) returned this id for:
    /// nothing at the peer touches memory through those streams any more.
    Revoked { id: u64 },
    /// A request of the peer, as in [`Session::request`](super::Session::request), to be answered with [`Session::respond`](super::Session::respond).
    Request { id: u64, kind: u16, body: Vec<u8> },
    /// The answer to a request of this side; exactly one for each. The code is from the peer, or
    /// `Deadline`, `Busy`, `TooLarge` or `Closed` from this session, then with an empty body.
    Response { id: u64, code: WireCode, body: Vec<u8> },
    /// The session ended. Exactly once, after every other event.
    Closed(CloseReason),
}

/// The peer of an established session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Incarnation of the peer.
    pub incarnation: Incarnation,
    /// The peer's name, without control characters.
    pub name: String,
    /// The protocol version of this session.
    pub version: u16,
    /// Capability bits that both sides have.
    pub capabilities: u64,
    /// Chosen by the acceptor.
    pub session: SessionId,
    /// Whether payload carries checksums.
    pub checksum: bool,
    /// Address where the peer listens, as the peer reports it; empty if nowhere.
    pub advertised: String,
    /// Whether both sides proved a shared secret.
    pub authenticated: bool,
}

/// Reason for the end of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloseReason {
    /// Code of the reason.
    pub code: WireCode,
    /// Whether the peer or the loss of the connection ended the session, and not this side.
    pub by_peer: bool,
    /// Explanation, without control characters.
    pub detail: String,
    /// Whether the session had been established.
    pub established: bool,
}
