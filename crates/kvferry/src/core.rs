//! The state that every layer of an agent shares, from memory to sessions.
//!
//! Handlers hold a [`Core`], never the agent itself, so no handler keeps its own thread alive.

use crate::error::{Error, ErrorKind, Result};
use crate::host::is_on_this_host;
use crate::memory::cursor::Cursor;
use crate::memory::device::Direction;
use crate::memory::gate::Gate;
use crate::memory::stages::Wake;
use crate::memory::{Memory, Region};
use crate::notify::{Inbox, Notification};
use crate::peer_memory::{self, Account, PeerMemory};
use crate::quota::{self, Quota};
use crate::reactor::Threads;
use crate::stats::Counters;
use crate::suspend::SuspendDetector;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::users::{Owner, Users};
use kvferry_proto::{Incarnation, Timestamp, TransferId, WireCode};
use kvferry_sys::fd;
use kvferry_sys::socket::Socket;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// The minimum time for connecting to a peer, however short the silence limit is.
const HANDSHAKE_MIN: Duration = Duration::from_secs(1);

/// The settings that several layers need.
#[derive(Debug)]
pub(crate) struct Settings {
    pub(crate) name: String,
    /// Longest silence of a peer while something is in progress.
    pub(crate) silence: Duration,
    /// The time of a transfer whose caller sets none.
    pub(crate) timeout: Duration,
    /// Bytes that peers may make this agent hold.
    pub(crate) peer_memory: usize,
}

impl Settings {
    pub(crate) fn ping_interval(&self) -> Duration {
        self.silence / 6
    }

    /// The time for connecting to a peer, handshake included: the silence limit, but at least a
    /// second for slow networks.
    pub(crate) fn handshake_timeout(&self) -> Duration {
        self.silence.max(HANDSHAKE_MIN)
    }

    /// The idle time after which the network may have dropped a connection.
    pub(crate) fn idle_max(&self) -> Duration {
        self.silence * 10
    }

    /// The time in which the peer of a long-idle session has to answer.
    pub(crate) fn check_timeout(&self) -> Duration {
        self.silence / 6
    }
}

/// Numbers of lanes and threads that one transfer may use.
#[derive(Debug)]
pub(crate) struct Sizing {
    /// Lanes to one peer, at most.
    pub(crate) streams_per_peer: usize,
    /// Lanes that a large batch is divided among if its caller does not choose.
    pub(crate) stripe_default: usize,
    /// Threads that a large batch within the host is divided among if its caller does not choose.
    pub(crate) copiers_default: usize,
}

impl Sizing {
    /// Large transfers to one peer that move at the same time. Within a host both ends share the
    /// processors, and one stream occupies two of them: the sender's and the receiver's.
    pub(crate) fn permits_max(&self, peer: SocketAddr) -> usize {
        if is_on_this_host(peer) {
            (kvferry_sys::thread::cores() / 2).max(1)
        } else {
            self.streams_per_peer
        }
    }
}

/// The state that every layer of an agent shares. The public methods are for transports; all may be called
/// on any thread.
#[derive(Debug)]
pub struct Core {
    /// The random id that the agent drew when it started.
    pub incarnation: Incarnation,
    pub(crate) settings: Settings,
    pub(crate) sizing: Sizing,
    pub(crate) memory: Memory,
    /// The agent's threads.
    pub threads: Threads,
    pub(crate) suspend: SuspendDetector,
    pub(crate) inbox: Inbox,
    /// The agent's counters.
    pub counters: Counters,
    /// The users of this host that may connect without a secret.
    pub(crate) users: Users,
    /// Limits the connections that peers open.
    pub(crate) quota: Quota,
    /// Limits the memory that peers take.
    pub(crate) peer_memory: Arc<PeerMemory>,
    next_transfer: AtomicU64,
    /// The process's fork count when the agent started.
    forks: u32,
    closed: AtomicBool,
}

impl Core {
    pub(crate) fn new(
        incarnation: Incarnation,
        settings: Settings,
        sizing: Sizing,
        threads: Threads,
        suspend: SuspendDetector,
        users: Users,
    ) -> Self {
        Self {
            incarnation,
            peer_memory: PeerMemory::new(settings.peer_memory),
            settings,
            sizing,
            memory: Memory::default(),
            threads,
            suspend,
            inbox: Inbox::default(),
            counters: Counters::default(),
            users,
            quota: Quota::default(),
            next_transfer: AtomicU64::new(1),
            forks: fd::forks(),
            closed: AtomicBool::new(false),
        }
    }

    /// Fails after a fork and after a shutdown.
    pub(crate) fn check(&self) -> Result<()> {
        if self.was_forked() {
            return Err(Error::new(
                ErrorKind::Forked,
                "this process was forked from the one that started the agent; start another here",
            ));
        }
        if self.is_closed() {
            return Err(Error::shutdown());
        }
        Ok(())
    }

    /// Whether this process was forked after the agent started.
    pub(crate) fn was_forked(&self) -> bool {
        fd::forked_since(self.forks)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Marks the agent as shut down.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Longest silence of a peer while something is in progress.
    pub fn silence(&self) -> Duration {
        self.settings.silence
    }

    /// The time for connecting to a peer, handshake included.
    pub fn handshake_timeout(&self) -> Duration {
        self.settings.handshake_timeout()
    }

    /// The interval at which a link is looked at while something is in progress.
    pub fn ping_interval(&self) -> Duration {
        self.settings.ping_interval()
    }

    /// Whether this process has been running without a stop. After one, nothing of a peer may be applied to
    /// memory: the peer may have given this process up, and the memory may be in other use.
    pub fn is_awake(&self, now: Timestamp) -> bool {
        self.suspend.is_fresh(now)
    }

    /// The number of connections of one kind that peers may open, by the descriptors that the process may
    /// have now.
    pub fn connections_max(&self) -> usize {
        quota::quarter()
    }

    /// A new gate, for one copier.
    pub fn gate(&self) -> Arc<Gate> {
        self.memory.gates.gate()
    }

    /// The registered regions, by their ids.
    pub fn regions(&self) -> Vec<Region> {
        self.memory.regions.all()
    }

    /// A cursor over `len` bytes of host memory at an address, for the request of a peer: `Direction::In` if the
    /// peer writes. One region must hold all of it. Touched inside `gate`; `wake` is for device memory.
    ///
    /// # Errors
    /// The code to refuse the request with.
    pub fn cursor_at(
        &self,
        direction: Direction,
        addr: u64,
        len: u64,
        gate: &Arc<Gate>,
        wake: &Wake,
    ) -> Result<Cursor, WireCode> {
        self.memory.cursor_at(direction, addr, len, gate, wake)
    }

    /// The account of a new connection of a peer, which counts the bytes that the peer makes this agent hold.
    pub fn account(&self, peer: IpAddr) -> Account {
        self.peer_memory.account(peer, peer_memory::Memory::Received)
    }

    /// Queues a notification for the agent's user. `Busy` if the queue is full, `TooLarge` if it exceeds the
    /// limit of a notification.
    pub fn deliver(&self, notification: Notification) -> WireCode {
        let code = self.inbox.push(notification);
        if code.is_ok() {
            self.counters.notifications_received.one();
        }
        code
    }

    /// The user whose process has opened a connection that proves no session's key.
    pub fn owner_of(&self, socket: &Socket) -> Owner {
        self.users.caller(socket)
    }

    /// Checks the process that this agent has connected to, before anything is sent to it.
    ///
    /// # Errors
    /// `AccessDenied` if it is another user's, `PeerReset` if its user can't be known any more.
    pub fn check_target(&self, socket: &Socket) -> Result<()> {
        self.users.check_target(socket)
    }

    pub(crate) fn next_transfer(&self) -> TransferId {
        TransferId(self.next_transfer.fetch_add(1, Ordering::Relaxed))
    }
}
