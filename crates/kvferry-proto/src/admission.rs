//! What a listener does with a connection before the peer has proved itself.
//!
//! ```text
//! accepted socket -> Sniffer (8 bytes) -> Native  -> Opener (one message) -> Session or Stream
//!                                      -> Foreign -> the transport that knows the protocol, or dropped
//! ```
//!
//! The deadline and the cap of [`Handshakes`] bound all of it: a connection that sends nothing takes
//! one of a fixed number of places, for seconds.

use crate::code::WireCode;
use crate::frame::MAGIC;
use crate::message::{Decoder, Message, MessageError, PREAUTH_MAX, StreamHello};
use crate::origin::Origin;
use crate::time::Timestamp;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

/// The default cap on connections that have not proved themselves yet.
pub const PENDING_MAX: usize = 256;

/// Default time that a connection has to prove itself.
pub const PENDING_DEADLINE: Duration = Duration::from_secs(5);

/// The protocol of a connection, by its first eight bytes. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sniff {
    /// Fewer than eight bytes so far.
    NeedMore,
    /// A kvferry peer: a `Hello` or `StreamHello` follows.
    Native,
    /// Another protocol, which a transport may know by these bytes: [`Sniffer::first`].
    Foreign,
}

/// Collects the first eight bytes of a connection.
#[derive(Clone, Debug, Default)]
pub struct Sniffer {
    bytes: [u8; 8],
    filled: usize,
}

impl Sniffer {
    /// A sniffer without a byte.
    pub fn new() -> Self {
        Self::default()
    }

    /// Bytes that are missing. The driver must not read more than these from the socket.
    pub const fn wanted(&self) -> usize {
        self.bytes.len() - self.filled
    }

    /// Takes the first [`Sniffer::wanted`] of `bytes` and ignores the rest.
    pub fn feed(&mut self, bytes: &[u8]) -> Sniff {
        let taken = &bytes[..bytes.len().min(self.wanted())];
        self.bytes[self.filled..self.filled + taken.len()].copy_from_slice(taken);
        self.filled += taken.len();
        if self.wanted() > 0 {
            return Sniff::NeedMore;
        }
        if self.bytes == MAGIC { Sniff::Native } else { Sniff::Foreign }
    }

    /// The first eight bytes as a little-endian number. Complete after [`Sniff::Foreign`].
    pub const fn first(&self) -> u64 {
        u64::from_le_bytes(self.bytes)
    }
}

/// The kind of a native connection. Exhaustive on purpose.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// A control connection.
    Session {
        /// Everything received after the magic, for [`Session::receive`](crate::Session::receive) of
        /// a new acceptor.
        bytes: Vec<u8>,
    },
    /// A data stream of a session.
    Stream {
        /// The stream's hello, for [`Session::verify_stream`](crate::Session::verify_stream).
        hello: StreamHello,
        /// Bytes after it: the start of the first data frame.
        rest: Vec<u8>,
    },
}

/// Reads the first message after the magic, and nothing else of an unauthenticated peer.
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
    /// An opener without a byte.
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

/// Time for which a connection's place is certain after the listener has read it and found nothing.
pub const SILENT_GRACE: Duration = Duration::from_millis(50);

/// Time for which a connection's place is certain if the listener has not read it yet, or if it has sent a well-formed
/// first message: enough for the rest of the handshake between continents.
pub const SPOKEN_GRACE: Duration = Duration::from_millis(500);

/// Connections that have not proved themselves yet: a cap, and a deadline for each.
///
/// `K` is the listener's key for a connection. When all places are taken, a listener waits until
/// [`Handshakes::room_at`] before it accepts the next connection. Peers that connect at the same time
/// then wait in the kernel's queue and do not evict each other, and connections that send nothing
/// hold a place for [`SILENT_GRACE`] only.
#[derive(Clone, Debug)]
pub struct Handshakes<K> {
    capacity: usize,
    deadline: Duration,
    /// Connections in the order of their admission, which is the order in which they expire.
    pending: VecDeque<Pending<K>>,
}

#[derive(Clone, Debug)]
struct Pending<K> {
    key: K,
    since: Timestamp,
    is_silent: bool,
}

impl<K> Pending<K> {
    /// End of the time in which its place is certain.
    fn certain_until(&self) -> Timestamp {
        self.since + if self.is_silent { SILENT_GRACE } else { SPOKEN_GRACE }
    }
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

    /// Time when a connection can be admitted without evicting one whose place is certain; `None` if a place is free.
    pub fn room_at(&self) -> Option<Timestamp> {
        self.next_evicted().map(|at| self.pending[at].certain_until())
    }

    /// The connection to evict for the next one: the oldest silent one or the oldest of all,
    /// whichever place is certain for less time. `None` while a place is free.
    fn next_evicted(&self) -> Option<usize> {
        if self.pending.len() < self.capacity {
            return None;
        }
        let silent = self.pending.iter().position(|pending| pending.is_silent).unwrap_or(0);
        let sooner = self.pending[silent].certain_until() < self.pending[0].certain_until();
        Some(if sooner { silent } else { 0 })
    }

    /// Admits a new connection. When full, another one is evicted and returned, to be dropped: if
    /// the newest were refused, one caller that holds all places could keep all others out.
    pub fn admit(&mut self, key: K, now: Timestamp) -> Option<K> {
        let evicted = self.next_evicted().and_then(|at| self.pending.remove(at));
        self.pending.push_back(Pending { key, since: now, is_silent: false });
        evicted.map(|pending| pending.key)
    }

    /// The listener has read the connection, and found less than a first message.
    pub fn waits(&mut self, key: &K) {
        if let Some(pending) = self.pending.iter_mut().find(|pending| pending.key == *key) {
            pending.is_silent = true;
        }
    }

    /// The connection sent a well-formed first message. Returns its deadline; `None` if it has no
    /// place any more.
    pub fn spoke(&mut self, key: &K) -> Option<Timestamp> {
        let pending = self.pending.iter_mut().find(|pending| pending.key == *key)?;
        pending.is_silent = false;
        Some(pending.since + self.deadline)
    }

    /// The connection proved itself or ended. Returns whether it was pending.
    pub fn done(&mut self, key: &K) -> bool {
        // At most a few hundred entries, once per connection.
        let at = self.pending.iter().position(|pending| pending.key == *key);
        at.and_then(|at| self.pending.remove(at)).is_some()
    }

    /// Whether the connection is pending: neither done, nor evicted, nor expired.
    pub fn contains(&self, key: &K) -> bool {
        self.pending.iter().any(|pending| pending.key == *key)
    }

    /// Removes and returns one connection whose deadline has passed.
    pub fn pop_expired(&mut self, now: Timestamp) -> Option<K> {
        self.next_timeout().filter(|at| *at <= now)?;
        self.pending.pop_front().map(|pending| pending.key)
    }

    /// The earliest deadline.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        self.pending.front().map(|pending| pending.since + self.deadline)
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

/// The default cap on connections that wait for a place.
pub const WAITING_ROOM_MAX: usize = 1024;

/// Connections that were accepted while all places of [`Handshakes`] are held. They get the next places,
/// network by network in turn, and within a network address by address: however many come from one network,
/// or from one address of it, the first of another one is next.
///
/// In the kernel's queue, where order is that of arrival, one host that keeps connecting keeps all others
/// waiting.
#[derive(Debug)]
pub struct WaitingRoom<K> {
    capacity: usize,
    patience: Duration,
    len: usize,
    /// The network whose turn it is first. No network is empty.
    networks: VecDeque<Network<K>>,
}

#[derive(Debug)]
struct Network<K> {
    network: IpAddr,
    len: usize,
    /// The address whose turn it is first. No queue is empty.
    addresses: VecDeque<(IpAddr, VecDeque<(Timestamp, K)>)>,
}

impl<K> Network<K> {
    fn waiting_from(&self, address: IpAddr) -> usize {
        let queue = self.addresses.iter().find(|(it, _)| *it == address);
        queue.map_or(0, |(_, queue)| queue.len())
    }

    /// The position of the address from which most connections wait, and their number.
    fn most(&self) -> (usize, usize) {
        let lens = self.addresses.iter().map(|(_, queue)| queue.len());
        lens.enumerate().max_by_key(|(_, len)| *len).unwrap_or_default()
    }
}

impl<K> WaitingRoom<K> {
    /// Room for `capacity` connections (at least one). A connection leaves after `patience`, when its
    /// peer has given up.
    pub fn new(capacity: usize, patience: Duration) -> Self {
        Self { capacity: capacity.max(1), patience, len: 0, networks: VecDeque::new() }
    }

    /// Has a connection wait. When full, one is returned, to be refused: the newest of the address that has
    /// most, in the network that has most. It gives way only to one that then has no more than it. Else the newcomer's
    /// own network decides by the same rule, and last the newcomer is refused.
    pub fn push(&mut self, from: Origin, key: K, now: Timestamp) -> Option<K> {
        let (network, address) = (from.network(), from.host());
        let refused = if self.len < self.capacity {
            None
        } else {
            let Some((at, of)) = self.gives_way(network, address) else { return Some(key) };
            self.take(at, of, VecDeque::pop_back)
        };
        let known = self.networks.iter().position(|it| it.network == network);
        let at = known.unwrap_or_else(|| {
            self.networks.push_back(Network { network, len: 0, addresses: VecDeque::new() });
            self.networks.len() - 1
        });
        let into = &mut self.networks[at];
        match into.addresses.iter_mut().find(|(it, _)| *it == address) {
            Some((_, queue)) => queue.push_back((now, key)),
            None => into.addresses.push_back((address, VecDeque::from([(now, key)]))),
        }
        into.len += 1;
        self.len += 1;
        refused.map(|(_, key)| key)
    }

    /// The positions of the network and of the address in it that lose a connection to a newcomer.
    fn gives_way(&self, network: IpAddr, address: IpAddr) -> Option<(usize, usize)> {
        let own = self.networks.iter().position(|it| it.network == network);
        let own_len = own.map_or(0, |at| self.networks[at].len);
        let longest = (0..self.networks.len()).max_by_key(|at| self.networks[*at].len)?;
        if own_len + 1 < self.networks[longest].len {
            return Some((longest, self.networks[longest].most().0));
        }
        let own = own?;
        let (of, most) = self.networks[own].most();
        (self.networks[own].waiting_from(address) + 1 < most).then_some((own, of))
    }

    /// The connection that gets the next place. Drops those that have waited for too long.
    pub fn pop(&mut self, now: Timestamp) -> Option<K> {
        while let Some(first) = self.networks.front() {
            let network = first.network;
            let address = first.addresses.front()?.0;
            let (since, key) = self.take(0, 0, VecDeque::pop_front)?;
            if since + self.patience <= now {
                continue;
            }
            if let Some(first) = self.networks.front_mut().filter(|it| it.network == network) {
                if first.addresses.front().is_some_and(|(it, _)| *it == address) {
                    first.addresses.rotate_left(1);
                }
                self.networks.rotate_left(1);
            }
            return Some(key);
        }
        None
    }

    /// Connections that wait.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether no connection waits.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn take(
        &mut self,
        at: usize,
        of: usize,
        which: impl FnOnce(&mut VecDeque<(Timestamp, K)>) -> Option<(Timestamp, K)>,
    ) -> Option<(Timestamp, K)> {
        let network = &mut self.networks[at];
        let queue = &mut network.addresses[of].1;
        let taken = which(queue)?;
        if queue.is_empty() {
            network.addresses.remove(of);
        }
        network.len -= 1;
        if network.len == 0 {
            self.networks.remove(at);
        }
        self.len -= 1;
        Some(taken)
    }
}
