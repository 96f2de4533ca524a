//! Wire codes of the agent's errors.

use kvferry::ErrorKind;
use kvferry_proto::WireCode;

/// The code that a handoff ends with after an error of the agent.
pub(crate) fn code_of(kind: ErrorKind) -> WireCode {
    match kind {
        ErrorKind::PeerReset | ErrorKind::PeerClosed | ErrorKind::Unreachable => WireCode::Closed,
        ErrorKind::PeerSilent => WireCode::Silent,
        ErrorKind::StaleIncarnation => WireCode::StaleIncarnation,
        ErrorKind::OutOfBounds => WireCode::OutOfBounds,
        ErrorKind::NotRegistered => WireCode::UnknownRegion,
        ErrorKind::AccessDenied => WireCode::AccessDenied,
        ErrorKind::Revoked | ErrorKind::Quarantined => WireCode::Revoked,
        ErrorKind::VersionMismatch => WireCode::VersionMismatch,
        ErrorKind::AuthRequired => WireCode::AuthRequired,
        ErrorKind::AuthUnsupported => WireCode::AuthUnsupported,
        ErrorKind::AuthFailed => WireCode::AuthFailed,
        ErrorKind::Deadline => WireCode::Deadline,
        ErrorKind::Cancelled | ErrorKind::Interrupted => WireCode::Cancelled,
        ErrorKind::Checksum => WireCode::Checksum,
        ErrorKind::TooLarge => WireCode::TooLarge,
        ErrorKind::Busy => WireCode::Busy,
        ErrorKind::Shutdown | ErrorKind::Forked => WireCode::Shutdown,
        ErrorKind::Unsupported => WireCode::Unsupported,
        ErrorKind::Protocol => WireCode::Malformed,
        _ => WireCode::Internal,
    }
}

/// Whether the same incarnation of the peer may come back after a session that ended with this error.
pub(crate) fn may_return(kind: ErrorKind) -> bool {
    kind == ErrorKind::PeerReset
}
