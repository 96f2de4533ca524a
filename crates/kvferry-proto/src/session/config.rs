//! What one side of a session is started with.

use crate::auth::Secret;
use crate::id::Incarnation;
use std::time::Duration;

/// The protocol versions this build speaks.
pub const VERSIONS: (u16, u16) = (1, KEYED_VERSION);

/// The version from which on the frames of sessions with a secret have keyed tags. A side with a
/// secret speaks no lower one.
pub const KEYED_VERSION: u16 = 2;

/// Settings of one side of a session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Incarnation of this agent.
    pub incarnation: Incarnation,
    /// Name of this agent, for logs and errors. Cut to 256 bytes.
    pub name: String,
    /// The secret shared with the peers. Without one, peers are not authenticated.
    pub secret: Option<Secret>,
    /// Lowest and highest protocol version of this build.
    pub versions: (u16, u16),
    /// Capability bits. A session has those that both sides have.
    pub capabilities: u64,
    /// Payload carries checksums if either side asks for them.
    pub checksum: ChecksumPolicy,
    /// Identifies the layout of the KV blocks. Sessions between different fingerprints are
    /// refused; a side without one fits every peer.
    pub fingerprint: Option<Vec<u8>>,
    /// Address where this agent listens, `host:port`, or empty. Left out if longer than 1024 bytes.
    pub advertised: String,
    /// The handshake fails if it takes longer.
    pub handshake_timeout: Duration,
    /// Longest time without a byte from the peer while something is in flight. The session ends after it.
    pub silence: Duration,
    /// Time between pings while something is in flight. Clamped between 1 ms and a third of
    /// `silence`; a sixth of it is a good value.
    pub ping_interval: Duration,
}

impl SessionConfig {
    /// No secret, no checksums, silence after 3 s, a handshake of at most 5 s.
    pub fn new(incarnation: Incarnation, name: impl Into<String>) -> Self {
        Self {
            incarnation,
            name: name.into(),
            secret: None,
            versions: VERSIONS,
            capabilities: 0,
            checksum: ChecksumPolicy::Off,
            fingerprint: None,
            advertised: String::new(),
            handshake_timeout: Duration::from_secs(5),
            silence: Duration::from_secs(3),
            ping_interval: Duration::from_millis(500),
        }
    }
}

/// Whether a side asks for payload checksums. They are on if either side asks. Exhaustive on
/// purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ChecksumPolicy {
    /// Does not ask for checksums.
    #[default]
    Off,
    /// Asks for checksums.
    On,
}
