//! A transport's name and capabilities.

use serde::Serialize;
use std::fmt;

/// A transport, by name. The constants are the transports of this crate.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(transparent)]
pub struct TransportKind(&'static str);

impl TransportKind {
    /// The kind of a transport with this name.
    pub const fn new(name: &'static str) -> Self {
        Self(name)
    }

    /// The transport's name, as in `KVFERRY_TRANSPORTS`.
    pub const fn as_str(self) -> &'static str {
        self.0
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl fmt::Debug for TransportKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// A transport's names and capabilities; each transport has one static value.
pub trait Transport: Send + Sync {
    /// The transport's name.
    fn kind(&self) -> TransportKind;

    /// Alternative names in `KVFERRY_TRANSPORTS`.
    fn aliases(&self) -> &'static [&'static str] {
        &[]
    }

    /// The transport's capabilities.
    fn capabilities(&self) -> Capabilities;
}

/// The side that can stop a copier for certain (invariant I2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fence {
    /// The side whose memory is written can stop it alone.
    Local,
    /// Only the writer can stop it, or its exit.
    PeerExit,
}

/// The capabilities of a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// The fence when this side writes to the peer.
    pub write_fence: Fence,
    /// The fence when this side reads from the peer.
    pub read_fence: Fence,
    /// Whether notifications can travel with data.
    pub notifications: bool,
    /// Whether payload can carry checksums.
    pub checksums: bool,
}

impl Capabilities {
    /// The capabilities of a transport with these fences, without notifications and checksums.
    pub const fn new(write_fence: Fence, read_fence: Fence) -> Self {
        Self { write_fence, read_fence, notifications: false, checksums: false }
    }
}
