//! The result codes of requests, streams and sessions on the wire.

use serde::{Deserialize, Serialize};
use std::fmt;

/// How a request, a stream or a session ended, as a number on the wire.
///
/// The mapping to `u16` is total: a code of a later version is kept as [`WireCode::Other`] and
/// survives a round trip. It is a bijection over the values that [`WireCode::from_u16`] returns;
/// `Other` with a known number is none of them and must not be built.
///
/// Exhaustive on purpose: a new code must be considered wherever codes are translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "u16", into = "u16")]
pub enum WireCode {
    /// Done.
    Ok,
    /// A descriptor reaches beyond its region.
    OutOfBounds,
    /// A descriptor names a region that is not registered (any more).
    UnknownRegion,
    /// An absolute descriptor covers more than one region.
    Straddles,
    /// The region does not allow this access, or was not granted to this peer.
    AccessDenied,
    /// The grant or registration was withdrawn.
    Revoked,
    /// Offset plus length, or a sum of lengths, does not fit its integer.
    Overflow,
    /// A descriptor of no bytes.
    ZeroLength,
    /// What was received is not this protocol.
    Malformed,
    /// Beyond a limit of the receiver.
    TooLarge,
    /// Bytes differ from their checksum.
    Checksum,
    /// Withdrawn by the side that asked.
    Cancelled,
    /// The budget ran out.
    Deadline,
    /// A queue is full. A later attempt may succeed.
    Busy,
    /// No protocol version in common.
    VersionMismatch,
    /// The acceptor wants a secret and the initiator has none.
    AuthRequired,
    /// The initiator has a secret and the acceptor has none.
    AuthUnsupported,
    /// The proof does not fit: the secrets differ.
    AuthFailed,
    /// The peer has another incarnation than was expected: it was restarted.
    StaleIncarnation,
    /// No such session (any more).
    UnknownSession,
    /// The stream id was used before.
    StreamReplayed,
    /// No byte arrived during the silence window.
    Silent,
    /// The machine of the reporting side was suspended, and its sessions ended.
    Slept,
    /// The session or connection ended.
    Closed,
    /// The agent is being shut down.
    Shutdown,
    /// A fault of the reporting side.
    Internal,
    /// The two sides' layouts cannot be mapped to each other.
    LayoutMismatch,
    /// Known, but not offered by this side.
    Unsupported,
    /// There is no handoff of this name that this peer takes part in.
    UnknownHandoff,
    /// No consumer asked for an offer in time.
    Expired,
    /// The consumer has the KV already, or will never compute on it.
    NotNeeded,
    /// Another handoff has or had this name.
    Duplicate,
    /// A code of a later version.
    Other(u16),
}

/// One line per code: the number, which never changes, and the sentence fragment.
macro_rules! codes {
    ($($number:literal => $code:ident, $text:literal;)*) => {
        impl WireCode {
            /// Every code this version knows, in the order of their numbers.
            pub const KNOWN: &[Self] = &[$(Self::$code),*];

            /// The code with this number. Never fails: unknown numbers are [`WireCode::Other`].
            pub const fn from_u16(number: u16) -> Self {
                match number {
                    $($number => Self::$code,)*
                    other => Self::Other(other),
                }
            }

            /// The number that crosses the wire.
            pub const fn to_u16(self) -> u16 {
                match self {
                    $(Self::$code => $number,)*
                    Self::Other(number) => number,
                }
            }
        }

        impl fmt::Display for WireCode {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$code => f.write_str($text),)*
                    Self::Other(number) => write!(f, "code {number} of a later version"),
                }
            }
        }
    };
}

codes! {
    0 => Ok, "done";
    1 => OutOfBounds, "out of the region's bounds";
    2 => UnknownRegion, "unknown region";
    3 => Straddles, "straddles several regions";
    4 => AccessDenied, "access denied";
    5 => Revoked, "revoked";
    6 => Overflow, "integer overflow in a descriptor";
    7 => ZeroLength, "descriptor of zero length";
    8 => Malformed, "malformed";
    9 => TooLarge, "too large";
    10 => Checksum, "checksum mismatch";
    11 => Cancelled, "cancelled";
    12 => Deadline, "deadline passed";
    13 => Busy, "busy";
    14 => VersionMismatch, "no protocol version in common";
    15 => AuthRequired, "a secret is required and none was offered";
    16 => AuthUnsupported, "a secret was offered and none is configured";
    17 => AuthFailed, "the secrets differ";
    18 => StaleIncarnation, "the peer was restarted";
    19 => UnknownSession, "unknown session";
    20 => StreamReplayed, "stream id used before";
    21 => Silent, "peer is silent";
    22 => Slept, "machine was suspended";
    23 => Closed, "closed";
    24 => Shutdown, "shutting down";
    25 => Internal, "internal fault";
    26 => LayoutMismatch, "layouts do not match";
    27 => Unsupported, "unsupported";
    28 => UnknownHandoff, "unknown handoff";
    29 => Expired, "expired";
    30 => NotNeeded, "not needed";
    31 => Duplicate, "duplicate name";
}

impl WireCode {
    /// Whether the code is [`WireCode::Ok`].
    pub const fn is_ok(self) -> bool {
        matches!(self, Self::Ok)
    }
}

impl From<u16> for WireCode {
    fn from(number: u16) -> Self {
        Self::from_u16(number)
    }
}

impl From<WireCode> for u16 {
    fn from(code: WireCode) -> Self {
        code.to_u16()
    }
}
