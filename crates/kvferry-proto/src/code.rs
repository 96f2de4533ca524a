//! The result codes of requests, streams and sessions on the wire.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One entry per code: the number, which never changes, and the sentence fragment.
macro_rules! codes {
    ($($(#[$doc:meta])* $number:literal => $code:ident, $text:literal;)*) => {
        /// Result of a request, a stream or a session, as a number on the wire.
        ///
        /// The mapping to `u16` is total: a code of a later version is kept as [`WireCode::Other`] and
        /// survives a round trip. It is a bijection over the values that [`WireCode::from_u16`] returns;
        /// never construct `Other` with a known code.
        ///
        /// Exhaustive on purpose: a new code must be considered wherever codes are translated.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(from = "u16", into = "u16")]
        pub enum WireCode {
            $($(#[$doc])* $code,)*
            /// A code of a later version.
            Other(u16),
        }

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
    /// Done.
    0 => Ok, "done";
    /// A descriptor reaches beyond its region.
    1 => OutOfBounds, "out of the region's bounds";
    /// A descriptor names a region that is not registered (any more).
    2 => UnknownRegion, "unknown region";
    /// An absolute descriptor covers more than one region.
    3 => Straddles, "straddles several regions";
    /// The region does not allow this access, or was not granted to this peer.
    4 => AccessDenied, "access denied";
    /// The grant or registration was withdrawn.
    5 => Revoked, "revoked";
    /// Offset plus length, or a sum of lengths, does not fit its integer.
    6 => Overflow, "integer overflow in a descriptor";
    /// A descriptor of no bytes.
    7 => ZeroLength, "descriptor of zero length";
    /// The received bytes do not follow this protocol.
    8 => Malformed, "malformed";
    /// A size or count exceeds a limit of the receiver.
    9 => TooLarge, "too large";
    /// Bytes differ from their checksum.
    10 => Checksum, "checksum mismatch";
    /// Withdrawn by the side that asked.
    11 => Cancelled, "cancelled";
    /// The budget ran out.
    12 => Deadline, "deadline passed";
    /// A queue is full. A later attempt may succeed.
    13 => Busy, "busy";
    /// No protocol version in common.
    14 => VersionMismatch, "no protocol version in common";
    /// The acceptor wants a secret and the initiator has none.
    15 => AuthRequired, "a secret is required and none was offered";
    /// The initiator has a secret and the acceptor has none.
    16 => AuthUnsupported, "a secret was offered and none is configured";
    /// The proof does not fit: the secrets differ.
    17 => AuthFailed, "the secrets differ";
    /// The peer has another incarnation than was expected: it was restarted.
    18 => StaleIncarnation, "the peer was restarted";
    /// No such session (any more).
    19 => UnknownSession, "unknown session";
    /// The stream id was used before.
    20 => StreamReplayed, "stream id used before";
    /// No byte arrived during the silence window.
    21 => Silent, "peer is silent";
    /// The machine of the reporting side was suspended, and its sessions ended.
    22 => Slept, "machine was suspended";
    /// The session or connection ended.
    23 => Closed, "closed";
    /// The agent is being shut down.
    24 => Shutdown, "shutting down";
    /// A fault of the reporting side.
    25 => Internal, "internal fault";
    /// The two sides' layouts cannot be mapped to each other.
    26 => LayoutMismatch, "layouts do not match";
    /// Known, but not offered by this side.
    27 => Unsupported, "unsupported";
    /// There is no handoff of this name that this peer takes part in.
    28 => UnknownHandoff, "unknown handoff";
    /// No consumer asked for an offer in time.
    29 => Expired, "expired";
    /// The consumer has the KV already, or will never compute on it.
    30 => NotNeeded, "not needed";
    /// Another handoff has or had this name.
    31 => Duplicate, "duplicate name";
    /// The two sides compute with different models.
    32 => ModelMismatch, "models do not match";
    /// A frame of an authenticated session was changed, replayed or lost on its way.
    33 => Forged, "a frame's keyed tag does not fit";
    /// The request names a producer that this engine does not accept.
    34 => ForbiddenProducer, "producer not accepted";
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
