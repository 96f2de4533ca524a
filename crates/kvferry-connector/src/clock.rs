//! The clock of the protocol.

use kvferry_proto::Timestamp;

/// The time on a clock that goes on while the machine sleeps.
pub(crate) fn now() -> Timestamp {
    Timestamp::from_nanos(kvferry_sys::clock::boottime_ns())
}
