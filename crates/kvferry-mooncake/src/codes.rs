//! The codes that Mooncake's calls return.

/// Success.
pub const OK: i32 = 0;
/// Any failure without a code of its own.
pub const INVALID: i32 = -1;
/// A table is full.
pub const TOO_MANY: i32 = -2;
/// No memory is registered at the address.
pub const NOT_REGISTERED: i32 = -3;
/// The batch has transfers that are not complete.
pub const BUSY: i32 = -4;
/// The range overlaps a registered one.
pub const OVERLAP: i32 = -7;
/// The peer's name can't be resolved.
pub const NAME: i32 = -101;
/// The peer does not answer.
pub const SOCKET: i32 = -102;
/// The metadata server does not know the peer, or does not answer.
pub const METADATA: i32 = -200;

/// Return values of `transfer_check_status`.
pub(crate) mod status {
    pub(crate) const RUNNING: i32 = 0;
    pub(crate) const DONE: i32 = 1;
    pub(crate) const FAILED: i32 = -1;
    /// The transfer timed out.
    pub(crate) const OUT_OF_TIME: i32 = -2;
}

/// Calls that start a transfer return it instead of an id if they fail.
pub const NO_ID: u64 = 0;
