//! What a listener does before it knows who is calling.
//!
//! ```text
//! accepted socket -> Sniffer (8 bytes) -> Native   -> Opener (one message) -> Session or Stream
//!                                      -> Mooncake -> the compatibility transport
//!                                      -> Unknown  -> dropped
//! ```
//!
//! All of it within the deadline and the cap of [`Handshakes`]: whoever connects and says nothing
//! costs one of a fixed number of places, for seconds.

use crate::code::WireCode;
use crate::frame::MAGIC;
use crate::message::{Decoder, Message, MessageError, PREAUTH_MAX, StreamHello};
use crate::time::Timestamp;
use std::collections::VecDeque;
use std::time::Duration;

/// Connections that have not proved themselves yet, that a listener keeps by default.
pub const PENDING_MAX: usize = 256;

/// How long a connection may take to prove itself, by default.
pub const PENDING_DEADLINE: Duration = Duration::from_secs(5);

/// The longest handshake of Mooncake, in bytes.
pub const MOONCAKE_MAX: u64 = 128 * 1024 * 1024;

/// What the first eight bytes of a connection say. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sniff {
    /// Fewer than eight bytes so far.
    NeedMore,
    /// A kvferry peer: a `Hello` or `StreamHello` follows.
    Native,
    /// A Mooncake handshake of [`Sniffer::mooncake_len`] bytes follows.
    Mooncake,
    /// Somebody else.
    Unknown,
}

/// Collects the first eight bytes of a connection.
#[derive(Clone, Debug, Default)]
pub struct Sniffer {
    bytes: [u8; 8],
    filled: usize,
}

impl Sniffer {
    /// A sniffer that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// How many more bytes are wanted; read no more than this from the socket.
    pub const fn wanted(&self) -> usize {
        self.bytes.len() - self.filled
    }

    /// Takes the first [`Sniffer::wanted`] of `bytes`; the rest is the caller's to pass on.
    pub fn feed(&mut self, bytes: &[u8]) -> Sniff {
        let taken = &bytes[..bytes.len().min(self.wanted())];
        self.bytes[self.filled..self.filled + taken.len()].copy_from_slice(taken);
        self.filled += taken.len();
        if self.wanted() > 0 {
            return Sniff::NeedMore;
        }
        if self.bytes == MAGIC {
            return Sniff::Native;
        }
        match self.mooncake_len() {
            1..=MOONCAKE_MAX => Sniff::Mooncake,
            _ => Sniff::Unknown,
        }
    }

    /// The first eight bytes as Mooncake reads them: the length in bytes of what follows. Means
    /// something only after [`Sniff::Mooncake`].
    pub const fn mooncake_len(&self) -> u64 {
        u64::from_le_bytes(self.bytes)
    }
}

/// What a native connection turned out to be. Exhaustive on purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A control connection.
    Session {
        /// Everything received after the magic, to be fed to a new `Session::acceptor`.
        bytes: Vec<u8>,
    },
    /// A data stream of a session.
    Stream {
        /// To be verified by that session.
        hello: StreamHello,
        /// What was received after it: the start of the first data frame.
        rest: Vec<u8>,
    },
}

/// Reads the first message after the magic, and no more of an unknown peer than that.
#[derive(Debug)]
pub struct Opener {
    decoder: Decoder,
}

impl Default for Opener {
    fn default() -> Self {
        Self::new()
    }
}

impl Opener {
    /// An opener that has seen nothing.
    pub const fn new() -> Self {
        Self { decoder: Decoder::new(PREAUTH_MAX) }
    }

    /// Takes bytes after the magic; `Ok(None)` means that more are needed.
    ///
    /// # Errors
    /// The code to refuse the connection with.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<Option<Opening>, WireCode> {
        match self.decoder.read_frame(&mut bytes) {
            Ok(None) => Ok(None),
            Ok(Some((Message::Hello(_), mut frame))) => {
                frame.extend_from_slice(bytes);
                Ok(Some(Opening::Session { bytes: frame }))
            }
            Ok(Some((Message::StreamHello(hello), _))) => {
                Ok(Some(Opening::Stream { hello, rest: bytes.to_vec() }))
            }
            Ok(Some(_)) => Err(WireCode::Malformed),
            Err(error) => Err(MessageError::code(&error)),
        }
    }
}

/// Connections that have not proved themselves yet: a cap, and a deadline for each.
///
/// `K` is the listener's name for a connection.
#[derive(Clone, Debug)]
pub struct Handshakes<K> {
    capacity: usize,
    deadline: Duration,
    /// Oldest first; since all have the same deadline, also the first to expire first.
    pending: VecDeque<(K, Timestamp)>,
}

impl<K> Default for Handshakes<K> {
    /// [`PENDING_MAX`] connections of [`PENDING_DEADLINE`] each.
    fn default() -> Self {
        Self { capacity: PENDING_MAX, deadline: PENDING_DEADLINE, pending: VecDeque::new() }
    }
}

impl<K: PartialEq> Handshakes<K> {
    /// Room for `capacity` connections (at least one), each for at most `deadline`.
    pub fn new(capacity: usize, deadline: Duration) -> Self {
        Self { capacity: capacity.max(1), deadline, pending: VecDeque::new() }
    }

    /// Admits a new connection. When full, the oldest makes room and is returned, to be dropped:
    /// refusing the newest would let whoever holds all places keep everybody out.
    pub fn admit(&mut self, key: K, now: Timestamp) -> Option<K> {
        let evicted =
            if self.pending.len() >= self.capacity { self.pending.pop_front() } else { None };
        self.pending.push_back((key, now + self.deadline));
        evicted.map(|(key, _)| key)
    }

    /// The connection proved itself or ended; whether it was pending.
    pub fn done(&mut self, key: &K) -> bool {
        // At most a few hundred entries, once per connection.
        match self.pending.iter().position(|(pending, _)| pending == key) {
            Some(at) => {
                self.pending.remove(at);
                true
            }
            None => false,
        }
    }

    /// Whether the connection is pending: neither done, nor evicted, nor expired.
    pub fn contains(&self, key: &K) -> bool {
        self.pending.iter().any(|(pending, _)| pending == key)
    }

    /// Removes and returns one connection whose time is up.
    pub fn pop_expired(&mut self, now: Timestamp) -> Option<K> {
        let (_, deadline) = self.pending.front()?;
        if *deadline <= now { self.pending.pop_front().map(|(key, _)| key) } else { None }
    }

    /// When the next connection's time is up.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        self.pending.front().map(|(_, deadline)| *deadline)
    }

    /// Connections pending.
    pub fn len(&self) -> usize {
        self.pending.len()
    }

    /// Whether no connection is pending.
    pub fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }
}
