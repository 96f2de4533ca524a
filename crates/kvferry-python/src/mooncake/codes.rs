//! What Mooncake's calls return.

/// Done.
pub(crate) const OK: i32 = 0;
/// Failed, for whatever reason has no code of its own.
pub(crate) const INVALID: i32 = -1;
/// Nothing is registered at the address.
pub(crate) const NOT_REGISTERED: i32 = -3;
/// The range overlaps a registered one.
pub(crate) const OVERLAP: i32 = -7;
/// The peer's name has no address.
pub(crate) const NAME: i32 = -101;
/// The peer does not answer.
pub(crate) const SOCKET: i32 = -102;

/// The metadata server does not know the peer, or is of no help.
pub(crate) const METADATA: i32 = -200;

/// What `transfer_check_status` says.
pub(crate) mod status {
    /// The transfer runs.
    pub(crate) const RUNNING: i32 = 0;
    /// It is done.
    pub(crate) const DONE: i32 = 1;
    /// It failed.
    pub(crate) const FAILED: i32 = -1;
    /// Its time ran out.
    pub(crate) const OUT_OF_TIME: i32 = -2;
}

/// What asynchronous calls return instead of an id.
pub(crate) const NO_ID: u64 = 0;
