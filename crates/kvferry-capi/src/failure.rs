//! Codes, and the reason why a function fails.

use kvferry::ErrorKind;
use std::ffi::c_int;

/// Success.
pub const KVFERRY_OK: c_int = 0;
/// Not an error: the transfer has not ended, or no notification came in time.
pub const KVFERRY_PENDING: c_int = 1;
/// A handle is NULL, was freed, or is of another kind.
pub const KVFERRY_BAD_HANDLE: c_int = 2;
/// The receiver of a task wants a block that the sender lacks, or of another length.
pub const KVFERRY_MISMATCH: c_int = 3;
/// Another task has the key.
pub const KVFERRY_DUPLICATE: c_int = 4;

macro_rules! codes {
    ($($(#[$doc:meta])* $kind:ident = $name:ident,)*) => {
        /// The code of an error of the core.
        pub(crate) fn code(kind: ErrorKind) -> c_int {
            match kind {
                $(ErrorKind::$kind => $name,)*
                // A kind that is newer than this table.
                _ => KVFERRY_INTERNAL,
            }
        }

        pub(crate) fn kind(code: c_int) -> Option<ErrorKind> {
            match code {
                $($name => Some(ErrorKind::$kind),)*
                _ => None,
            }
        }
    };
}

codes! {
    InvalidArgument = KVFERRY_INVALID_ARGUMENT,
    Overlap = KVFERRY_OVERLAP,
    NotRegistered = KVFERRY_NOT_REGISTERED,
    OutOfBounds = KVFERRY_OUT_OF_BOUNDS,
    AccessDenied = KVFERRY_ACCESS_DENIED,
    Revoked = KVFERRY_REVOKED,
    Quarantined = KVFERRY_QUARANTINED,
    Unreachable = KVFERRY_UNREACHABLE,
    PeerReset = KVFERRY_PEER_RESET,
    PeerSilent = KVFERRY_PEER_SILENT,
    PeerClosed = KVFERRY_PEER_CLOSED,
    AuthRequired = KVFERRY_AUTH_REQUIRED,
    AuthUnsupported = KVFERRY_AUTH_UNSUPPORTED,
    AuthFailed = KVFERRY_AUTH_FAILED,
    VersionMismatch = KVFERRY_VERSION_MISMATCH,
    StaleIncarnation = KVFERRY_STALE_INCARNATION,
    Deadline = KVFERRY_DEADLINE,
    Cancelled = KVFERRY_CANCELLED,
    Interrupted = KVFERRY_INTERRUPTED,
    Checksum = KVFERRY_CHECKSUM,
    TooLarge = KVFERRY_TOO_LARGE,
    Busy = KVFERRY_BUSY,
    Shutdown = KVFERRY_SHUTDOWN,
    Forked = KVFERRY_FORKED,
    Unsupported = KVFERRY_UNSUPPORTED,
    Protocol = KVFERRY_PROTOCOL,
    Io = KVFERRY_IO,
    Internal = KVFERRY_INTERNAL,
}

/// An argument is invalid: a zero length, a size that is not sizeof, text that is not UTF-8.
pub const KVFERRY_INVALID_ARGUMENT: c_int = 10;
/// The range overlaps a registered one.
pub const KVFERRY_OVERLAP: c_int = 11;
/// The range or region is not registered, or not any more.
pub const KVFERRY_NOT_REGISTERED: c_int = 12;
/// A range reaches beyond its region.
pub const KVFERRY_OUT_OF_BOUNDS: c_int = 13;
/// The region does not permit the access.
pub const KVFERRY_ACCESS_DENIED: c_int = 14;
/// The region was unregistered while it was in use.
pub const KVFERRY_REVOKED: c_int = 15;
/// A process that does not answer may still write to memory that was unregistered: do not reuse it.
pub const KVFERRY_QUARANTINED: c_int = 16;
/// No connection to the peer could be made.
pub const KVFERRY_UNREACHABLE: c_int = 17;
/// The connection to the peer broke.
pub const KVFERRY_PEER_RESET: c_int = 18;
/// The peer is connected but silent.
pub const KVFERRY_PEER_SILENT: c_int = 19;
/// The peer ended the session.
pub const KVFERRY_PEER_CLOSED: c_int = 20;
/// The peer requires a secret and this agent has none.
pub const KVFERRY_AUTH_REQUIRED: c_int = 21;
/// This agent has a secret and the peer has none.
pub const KVFERRY_AUTH_UNSUPPORTED: c_int = 22;
/// The secrets of the two agents differ.
pub const KVFERRY_AUTH_FAILED: c_int = 23;
/// The two agents share no protocol version.
pub const KVFERRY_VERSION_MISMATCH: c_int = 24;
/// A description belongs to an earlier incarnation of the peer.
pub const KVFERRY_STALE_INCARNATION: c_int = 25;
/// The call did not end within its time.
pub const KVFERRY_DEADLINE: c_int = 26;
/// The caller cancelled the transfer.
pub const KVFERRY_CANCELLED: c_int = 27;
/// The call was interrupted. No function of this header returns it.
pub const KVFERRY_INTERRUPTED: c_int = 28;
/// The received bytes differ from the sent bytes.
pub const KVFERRY_CHECKSUM: c_int = 29;
/// A limit was exceeded, or a buffer of the caller is too small.
pub const KVFERRY_TOO_LARGE: c_int = 30;
/// A bounded queue is full.
pub const KVFERRY_BUSY: c_int = 31;
/// The agent is shut down.
pub const KVFERRY_SHUTDOWN: c_int = 32;
/// The handle belongs to the process that forked this one.
pub const KVFERRY_FORKED: c_int = 33;
/// No permitted transport, or this version of the library, supports the operation.
pub const KVFERRY_UNSUPPORTED: c_int = 34;
/// The peer violated the protocol.
pub const KVFERRY_PROTOCOL: c_int = 35;
/// The operating system reported an error.
pub const KVFERRY_IO: c_int = 36;
/// A defect in kvferry.
pub const KVFERRY_INTERNAL: c_int = 37;

/// Reason why a function fails.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) code: c_int,
    pub(crate) text: String,
    pub(crate) quiesced: Option<bool>,
}

impl Failure {
    pub(crate) fn new(code: c_int, text: impl Into<String>) -> Self {
        Self { code, text: text.into(), quiesced: None }
    }

    pub(crate) fn handle(text: String) -> Self {
        Self::new(KVFERRY_BAD_HANDLE, text)
    }

    pub(crate) fn forked(text: String) -> Self {
        Self::new(KVFERRY_FORKED, text)
    }

    pub(crate) fn invalid(text: impl Into<String>) -> Self {
        Self::new(KVFERRY_INVALID_ARGUMENT, text)
    }
}

impl From<kvferry::Error> for Failure {
    fn from(error: kvferry::Error) -> Self {
        let code = code(error.kind());
        Self { code, text: error.to_string(), quiesced: error.quiesced() }
    }
}
