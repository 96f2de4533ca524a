//! The agent: one kvferry endpoint in a process.
//!
//! It owns one control thread (sessions, handshakes, heartbeats) and a few I/O threads (inbound
//! streams, asynchronous transfers), all of them reactors. Handlers share [`Core`]; the threads
//! themselves belong to [`Agent`], so that no handler can keep its own thread alive.

use crate::address;
use crate::channel::Correspondent;
use crate::config::{Checksum, Config, SecretString};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gates;
use crate::memory::region::RegionTable;
use crate::memory::writers::Writers;
use crate::notify::{Inbox, Notification};
use crate::peer::Peer;
use crate::reactor::{self, Cause, Cx, Handler, LINGER, Next, Reactor, Remote, now};
use crate::session::connect::PeerState;
use crate::session::greet::Listener;
use crate::session::link::Link;
use crate::session::pulse::{Pulse, PulseTimer};
use crate::stats::{Counters, Stats};
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use crate::transfer::drive::Slot;
use crate::transport::local::{self, LocalListener};
use crate::transport::{Approach, TransportKind, Transports, choose, mooncake};
use kvferry_proto::{
    CAPABILITY_LOCAL, ChecksumPolicy, Incarnation, Secret, Session, SessionConfig, SessionId,
    TransferId, WireCode,
};
use kvferry_sys::socket::Socket;
use kvferry_sys::unix::Channel;
use kvferry_sys::{fd, random};
use rustc_hash::FxHashMap;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// How long meeting a peer may take at least, connecting included, however short silence may be.
const HANDSHAKE_MIN: Duration = Duration::from_secs(1);
/// Peers whose state is kept although nobody uses it.
const PEERS_KEPT: usize = 4096;
/// How long a shutdown waits for its farewells to be written.
const FAREWELL: Duration = Duration::from_millis(200);

/// What all parts of an agent share.
#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) config: Config,
    pub(crate) incarnation: Incarnation,
    pub(crate) regions: RegionTable,
    pub(crate) gates: Gates,
    /// Processes of this host that copy to and from our memory by themselves.
    pub(crate) writers: Writers,
    /// Whether transfers within the host are possible, or why not.
    local: std::result::Result<(), String>,
    pub(crate) inbox: Inbox,
    correspondent: Correspondence,
    pub(crate) counters: Counters,
    pub(crate) pulse: Pulse,
    pub(crate) control: Remote,
    io: Vec<Remote>,
    pub(crate) approach: Approach,
    transports: Transports,
    pub(crate) streams_per_peer: usize,
    /// Lanes a large batch is divided among if its caller does not say.
    pub(crate) stripe_default: usize,
    /// Threads a large batch within the host is divided among if its caller does not say.
    pub(crate) copiers_default: usize,
    pub(crate) advertised: String,
    pub(crate) local_addr: SocketAddr,
    /// Mooncake's data port, while stock peers are served.
    pub(crate) mooncake_port: Option<u16>,
    pub(crate) mooncake: mooncake::Doors,
    secret: Option<Secret>,
    forks: u32,
    closed: AtomicBool,
    next_io: AtomicUsize,
    next_transfer: AtomicU64,
    next_session: AtomicU64,
    sessions: Mutex<Vec<Arc<Link>>>,
    accepted: Mutex<FxHashMap<SessionId, Arc<Link>>>,
    peers: Mutex<HashMap<String, Arc<PeerState>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    /// Refuses what can't be done any more: after a fork, after a shutdown.
    pub(crate) fn check(&self) -> Result<()> {
        if fd::forked_since(self.forks) {
            return Err(Error::new(
                ErrorKind::Forked,
                "this process was forked from the one that started the agent; start another here",
            ));
        }
        if self.is_closed() {
            return Err(Error::new(ErrorKind::Shutdown, "the agent was shut down"));
        }
        Ok(())
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    pub(crate) fn next_transfer(&self) -> TransferId {
        TransferId(self.next_transfer.fetch_add(1, Ordering::Relaxed))
    }

    /// The I/O threads take turns.
    pub(crate) fn io_thread(&self) -> Remote {
        let at = self.next_io.fetch_add(1, Ordering::Relaxed);
        self.io[at % self.io.len()].clone()
    }

    pub(crate) fn ping_interval(&self) -> Duration {
        self.config.silence() / 6
    }

    /// A peer that is stopped before it is met is noticed as soon as one that is stopped later,
    /// but a slow network gets a second. Whoever allows more silence expects a slow machine.
    pub(crate) fn handshake_timeout(&self) -> Duration {
        self.config.silence().max(HANDSHAKE_MIN)
    }

    /// Whether this agent takes part in transfers within the host.
    pub(crate) fn is_local(&self) -> bool {
        self.local.is_ok()
    }

    /// Why it does not.
    pub(crate) fn local_obstacle(&self) -> String {
        self.local.clone().err().unwrap_or_default()
    }

    pub(crate) fn allows(&self, kind: TransportKind) -> bool {
        self.transports.contains(kind)
    }

    /// Who receives messages, if anybody does.
    pub(crate) fn correspondent(&self) -> Option<&dyn Correspondent> {
        self.correspondent.0.get().map(Arc::as_ref)
    }

    pub(crate) fn has_secret(&self) -> bool {
        self.secret.is_some()
    }

    /// Transfers of many bytes to one peer that are moved at the same time. On one host both ends
    /// share the processors, and two of them carry one stream: the sender's and the receiver's.
    pub(crate) fn turns_max(&self, peer: SocketAddr) -> usize {
        if is_on_this_host(peer) {
            (kvferry_sys::thread::cores() / 2).max(1)
        } else {
            self.streams_per_peer
        }
    }

    fn session_config(&self, same_host: bool, advertised: String) -> SessionConfig {
        let mut config = SessionConfig::new(self.incarnation, self.config.name.clone());
        config.secret = self.secret.clone();
        config.checksum = match (self.config.checksum, same_host) {
            (Checksum::On, _) | (Checksum::Auto, false) => ChecksumPolicy::On,
            (Checksum::Off, _) | (Checksum::Auto, true) => ChecksumPolicy::Off,
        };
        config.capabilities = if self.is_local() { CAPABILITY_LOCAL } else { 0 };
        config.advertised = advertised;
        config.handshake_timeout = self.handshake_timeout();
        config.silence = self.config.silence();
        config.ping_interval = self.ping_interval();
        config
    }

    pub(crate) fn new_session_initiator(&self, peer: SocketAddr) -> Result<Session> {
        let source = kvferry_sys::net::source_towards(peer)
            .map_err(|e| Error::io("no route to the peer can be looked up", e))?;
        let same_host = is_same_host(source, peer);
        let advertised = self.advertised_to(same_host, SocketAddr::new(source, 0));
        let nonce = random::bytes().map_err(no_random)?;
        Ok(Session::initiator(self.session_config(same_host, advertised), None, nonce, now()))
    }

    pub(crate) fn new_session_acceptor(
        &self,
        peer: SocketAddr,
        here: Option<SocketAddr>,
    ) -> Result<Session> {
        let same_host = is_same_host(here.unwrap_or(self.local_addr).ip(), peer);
        let advertised = self.advertised_to(same_host, here.unwrap_or(self.local_addr));
        let id = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed));
        let nonce = random::bytes().map_err(no_random)?;
        Ok(Session::acceptor(self.session_config(same_host, advertised), id, nonce, now()))
    }

    /// Loopback is never told to a peer on another host.
    fn advertised_to(&self, same_host: bool, here: SocketAddr) -> String {
        let own: Option<SocketAddr> = self.advertised.parse().ok();
        match own {
            Some(own) if own.ip().is_loopback() && !same_host => {
                SocketAddr::new(here.ip(), own.port()).to_string()
            }
            _ => self.advertised.clone(),
        }
    }

    // ---- sessions ----

    pub(crate) fn add_session(&self, link: &Arc<Link>) {
        let first = {
            let mut sessions = lock(&self.sessions);
            sessions.push(Arc::clone(link));
            sessions.len() == 1
        };
        if first {
            // Nobody looked at the time while there was no session.
            self.pulse.beat(now());
            self.control.wake(reactor::FIRST);
        }
    }

    pub(crate) fn add_accepted(&self, id: SessionId, link: &Arc<Link>) {
        lock(&self.accepted).insert(id, Arc::clone(link));
    }

    pub(crate) fn accepted(&self, id: SessionId) -> Option<Arc<Link>> {
        lock(&self.accepted).get(&id).cloned()
    }

    pub(crate) fn remove_session(&self, link: &Arc<Link>) {
        lock(&self.sessions).retain(|l| !Arc::ptr_eq(l, link));
        lock(&self.accepted).retain(|_, l| !Arc::ptr_eq(l, link));
    }

    pub(crate) fn has_sessions(&self) -> bool {
        !lock(&self.sessions).is_empty()
    }

    /// Ends every session: this process was away.
    pub(crate) fn void_sessions(&self) {
        self.close_sessions(WireCode::Slept, || {
            Error::new(
                ErrorKind::PeerSilent,
                "this process was away for longer than peers wait; the session is void",
            )
        });
    }

    fn close_sessions(&self, code: WireCode, error: impl Fn() -> Error) {
        let sessions: Vec<_> = std::mem::take(&mut *lock(&self.sessions));
        for link in sessions {
            if let Some(native) = &link.native {
                lock(&native.session).close(code, "", now());
            }
            link.terminate(error().with("peer", &link.address));
            link.wake_control();
        }
    }

    // ---- peers ----

    pub(crate) fn peer_state(self: &Arc<Self>, address: &str) -> Result<Arc<PeerState>> {
        if let Some(state) = lock(&self.peers).get(address) {
            return Ok(Arc::clone(state));
        }
        // Resolving a name may take its time: not under the lock.
        let addrs = address::resolve_peer(address)?;
        let mut peers = lock(&self.peers);
        if peers.len() >= PEERS_KEPT {
            peers.retain(|_, state| Arc::strong_count(state) > 1 || state.live().is_some());
        }
        let state = peers
            .entry(address.to_owned())
            .or_insert_with(|| PeerState::new(self, address.to_owned(), addrs));
        Ok(Arc::clone(state))
    }

    /// Nobody was met at what a name stands for: it is looked up anew the next time, as its host may
    /// have moved.
    pub(crate) fn forget_addresses(&self, address: &str) {
        if address.parse::<SocketAddr>().is_err() {
            lock(&self.peers).remove(address);
        }
    }
}

fn no_random(e: std::io::Error) -> Error {
    Error::io("the kernel gives no random bytes", e)
}

struct Inner {
    core: Arc<Core>,
    control: Reactor,
    io: Vec<Reactor>,
}

impl Inner {
    fn shutdown(&self) {
        if self.core.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.core.inbox.close();
        let error = || Error::new(ErrorKind::Shutdown, "the agent was shut down");
        self.core.close_sessions(WireCode::Shutdown, error);
        // Commands are carried out in order: when this one is, the farewells were written.
        let said = Slot::new();
        let marker = Marker(Some(Arc::clone(&said)));
        self.control.remote().add(self.control.remote().token(), Box::new(marker));
        let _ = said.wait(now() + FAREWELL, None);
        self.control.stop();
        for io in &self.io {
            io.stop();
        }
        lock(&self.core.peers).clear();
        lock(&self.core.accepted).clear();
        self.core.regions.close();
        let regions = self.core.regions.clear();
        self.core.gates.quiesce();
        let occupied = self.core.writers.quiesce(None, now() + self.core.config.silence());
        if let Some(gate) = occupied.first() {
            tracing::error!(
                peer = %gate.writer.name,
                "a process of this host that may be writing to this agent's memory does not \
                 answer; the agent is shut down, and its memory must not be reused"
            );
            self.core.regions.quarantine(&regions, &occupied);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        if fd::forked_since(self.core.forks) {
            // The threads are the parent's; locks may be held by them for ever.
            self.control.abandon();
            for io in &self.io {
                io.abandon();
            }
            return;
        }
        self.shutdown();
    }
}

/// Tells that the control thread has done everything before it.
struct Marker(Option<Arc<Slot<()>>>);

impl Handler for Marker {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        if let Some(slot) = self.0.take() {
            slot.fill(());
        }
        Next::Close
    }
}

/// One kvferry endpoint in a process: registered memory, sessions with peers, transfers.
///
/// Clones are the same agent. It is shut down by [`Agent::shutdown`], or when the last clone is
/// dropped. All methods may be called from any thread.
///
/// ```
/// use kvferry::{Access, Agent, Batch, Options};
///
/// let prefill = Agent::builder().name("prefill").start()?;
/// let decode = Agent::builder().name("decode").start()?;
/// let from = prefill.allocate(4096, Access::READ)?;
/// let to = decode.allocate(4096, Access::WRITE)?;
/// from.write_at(0, b"key and value")?;
///
/// let peer = prefill.peer(decode.advertised())?;
/// let mut batch = Batch::new();
/// batch.push(&from, 0, &to.remote(), 0, 4096)?;
/// peer.write(&batch, &Options::default())?;
///
/// let mut bytes = [0; 13];
/// to.read_at(0, &mut bytes)?;
/// assert_eq!(&bytes, b"key and value");
/// # Ok::<(), kvferry::Error>(())
/// ```
#[derive(Clone)]
pub struct Agent(Arc<Inner>);

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent")
            .field("name", &self.name())
            .field("incarnation", &self.incarnation())
            .field("address", &self.advertised())
            .finish_non_exhaustive()
    }
}

impl Agent {
    /// A builder that starts from what the environment says.
    pub fn builder() -> AgentBuilder {
        AgentBuilder::default()
    }

    /// Starts an agent: opens its port, starts its threads.
    ///
    /// # Errors
    /// `InvalidArgument` for nonsense in the configuration, `Io` if the port or the threads can't
    /// be had.
    pub fn start(config: Config) -> Result<Self> {
        config.check()?;
        fd::install_fork_handlers().map_err(|e| Error::io("no descriptor is left", e))?;
        let listen = config.listen_addr()?;
        let socket = Socket::listen(listen).map_err(|e| Error::io("can't listen", e))?;
        let local_addr =
            socket.local_addr().map_err(|e| Error::io("the port can't be found out", e))?;
        let advertised = address::advertised(config.advertise.as_deref(), local_addr)?;
        let secret = config.secret.as_ref().and_then(SecretString::to_secret);
        let transports = config.transports()?;
        let approach = choose(transports, config.mooncake, secret.is_some())?;
        say_if_open(local_addr, secret.is_some());
        let serves_mooncake = config.mooncake
            && secret.is_none()
            && transports.contains(crate::TransportKind::Mooncake);
        let data = serves_mooncake.then(|| mooncake::listen(local_addr)).transpose()?;

        if config.ptracer_any
            && let Err(e) = kvferry_sys::unix::let_any_process_attach()
        {
            tracing::debug!(error = %e, "there is no Yama to be told");
        }

        let start = |name: String, linger: Duration| {
            Reactor::start(name, linger).map_err(|e| Error::io("a thread can't be started", e))
        };
        let control = start("kvferry-control".into(), Duration::ZERO)?;
        let io = (0..config.io_threads())
            .map(|i| start(format!("kvferry-io-{i}"), LINGER))
            .collect::<Result<Vec<_>>>()?;
        let incarnation = Incarnation(u128::from_le_bytes(random::bytes().map_err(no_random)?));
        let remote = control.remote().clone();
        let regions = RegionTable::default();
        let local = begin_local(&config, transports, incarnation, &regions);
        let (local, doorbell) = match local {
            Ok(channel) => (Ok(()), Some(channel)),
            Err(why) => (Err(why), None),
        };
        let core = Arc::new(Core {
            incarnation,
            regions,
            gates: Gates::default(),
            writers: Writers::default(),
            local,
            transports,
            inbox: Inbox::default(),
            correspondent: Correspondence::default(),
            counters: Counters::default(),
            pulse: Pulse::new(config.silence(), now()),
            control: remote,
            io: io.iter().map(|r| r.remote().clone()).collect(),
            approach,
            streams_per_peer: config.streams_per_peer(),
            stripe_default: (kvferry_sys::thread::cores() / 2).clamp(1, 4),
            copiers_default: (config.io_threads() + 1)
                .min(kvferry_sys::thread::cores())
                .clamp(1, 4),
            advertised,
            local_addr,
            mooncake_port: data.as_ref().map(|(_, port)| *port),
            mooncake: mooncake::Doors::default(),
            secret,
            forks: fd::forks(),
            closed: AtomicBool::new(false),
            next_io: AtomicUsize::new(0),
            next_transfer: AtomicU64::new(1),
            next_session: AtomicU64::new(1),
            sessions: Mutex::default(),
            accepted: Mutex::default(),
            peers: Mutex::default(),
            config,
        });
        let remote = &core.control;
        remote.add(reactor::FIRST, Box::new(PulseTimer::new(Arc::downgrade(&core))));
        remote.add(remote.token(), Box::new(Listener::new(Arc::downgrade(&core), socket)));
        if let Some(channel) = doorbell {
            let listener = LocalListener::new(Arc::downgrade(&core), channel);
            remote.add(remote.token(), Box::new(listener));
        }
        if let Some((socket, _)) = data {
            mooncake::serve(&core, socket);
        }
        tracing::info!(
            name = %core.config.name, %incarnation, listening = %local_addr,
            advertised = %core.advertised, "agent started"
        );
        Ok(Self(Arc::new(Inner { core, control, io })))
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.0.core
    }

    /// The agent's name.
    pub fn name(&self) -> &str {
        &self.core().config.name
    }

    /// This life of the agent.
    pub fn incarnation(&self) -> Incarnation {
        self.core().incarnation
    }

    /// The address it listens on.
    pub fn local_addr(&self) -> SocketAddr {
        self.core().local_addr
    }

    /// The `host:port` that peers should use.
    pub fn advertised(&self) -> &str {
        &self.core().advertised
    }

    /// The configuration it was started with.
    pub fn config(&self) -> &Config {
        &self.core().config
    }

    /// The transports it may use.
    pub fn transports(&self) -> Transports {
        self.core().transports
    }

    /// Has somebody receive the messages that peers send over their [`crate::Channel`]s. Before the
    /// first peer is met, if nothing is to be missed: sessions that are up already are not announced.
    ///
    /// # Errors
    /// `InvalidArgument` if there is somebody already.
    pub fn correspond(&self, correspondent: Arc<dyn Correspondent>) -> Result<()> {
        let core = self.core();
        core.check()?;
        core.correspondent.0.set(correspondent).map_err(|_| {
            Error::new(
                ErrorKind::InvalidArgument,
                "somebody receives this agent's messages already",
            )
        })
    }

    /// A peer by its `host:port`. Nothing is sent yet; the first transfer meets it.
    ///
    /// # Errors
    /// `InvalidArgument` or `Unreachable` if the address can't be resolved.
    pub fn peer(&self, address: &str) -> Result<Peer> {
        self.core().check()?;
        let state = self.core().peer_state(address)?;
        Ok(Peer::new(Arc::clone(self.core()), state))
    }

    /// Takes all notifications that have arrived.
    pub fn notifications(&self) -> Vec<Notification> {
        self.core().inbox.drain()
    }

    /// Takes the next notification; waits for one for at most `timeout`.
    pub fn wait_notification(&self, timeout: Duration) -> Option<Notification> {
        self.core().inbox.wait(timeout)
    }

    /// A descriptor that is readable while notifications are queued.
    ///
    /// # Errors
    /// `Io` if the process has no descriptor left.
    pub fn notification_fd(&self) -> Result<BorrowedFd<'_>> {
        self.core().check()?;
        self.core().inbox.event_fd()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        let mut stats = self.core().counters.snapshot();
        stats.regions = self.core().regions.count() as u64;
        stats.gates = self.core().gates.live() as u64;
        self.core().writers.forget_gone();
        stats.writers = self.core().writers.count() as u64;
        stats.regions_quarantined = self.core().regions.quarantined() as u64;
        // What processes of this host did by themselves they count themselves.
        let theirs = self.core().writers.totals();
        stats.bytes_received = stats.bytes_received.wrapping_add(theirs.written);
        stats.bytes_served = stats.bytes_served.wrapping_add(theirs.read);
        stats.requests_served = stats.requests_served.wrapping_add(theirs.batches);
        stats
    }

    /// Ends every session, fails every transfer, unregisters every region, joins the threads.
    /// When it returns, nothing of this agent touches memory any more. Idempotent.
    pub fn shutdown(&self) {
        if !fd::forked_since(self.core().forks) {
            self.0.shutdown();
        }
    }
}

/// Opens the door for processes of this host, or says why there is none.
fn begin_local(
    config: &Config,
    transports: Transports,
    incarnation: Incarnation,
    regions: &RegionTable,
) -> std::result::Result<Channel, String> {
    if !transports.contains(TransportKind::Local) {
        return Err("this agent does not allow local".into());
    }
    if config.checksum == Checksum::On {
        return Err("checksums are on, which copies within a host don't have".into());
    }
    match local::listen(incarnation) {
        Ok((channel, registry)) => {
            regions.publish_to(registry);
            Ok(channel)
        }
        Err(e) => {
            tracing::warn!(error = %e, "transfers within the host go over tcp");
            Err(e.to_string())
        }
    }
}

/// Who receives messages; set once.
#[derive(Default)]
struct Correspondence(OnceLock<Arc<dyn Correspondent>>);

impl std::fmt::Debug for Correspondence {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if self.0.get().is_some() { "somebody" } else { "nobody" })
    }
}

/// Whether a peer's address is this host's.
pub(crate) fn is_on_this_host(peer: SocketAddr) -> bool {
    kvferry_sys::net::source_towards(peer).is_ok_and(|here| is_same_host(here, peer))
}

/// Whether a peer that is reached from `here` is on this host.
pub(crate) fn is_same_host(here: IpAddr, peer: SocketAddr) -> bool {
    peer.ip().is_loopback() || here == peer.ip()
}

/// Said once per process: anybody who reaches the port may read and write registered memory.
fn say_if_open(addr: SocketAddr, secret: bool) {
    static SAID: std::sync::atomic::AtomicBool = std::sync::atomic::AtomicBool::new(false);
    if !secret && !addr.ip().is_loopback() && !SAID.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            listening = %addr,
            "listening beyond loopback without a secret: whoever reaches this port can reach \
             registered memory; set KVFERRY_SECRET_FILE"
        );
    }
}

/// Settings of an agent to be started. Starts from the environment; what is set here wins.
#[derive(Debug, Default)]
pub struct AgentBuilder {
    config: Option<Config>,
    edits: Vec<Edit>,
}

enum Edit {
    Name(String),
    Listen(String),
    Advertise(String),
    Secret(SecretString),
    Transports(String),
    IoThreads(usize),
    StreamsPerPeer(usize),
    Checksum(Checksum),
    SilenceMs(u64),
    TimeoutMs(u64),
    Mooncake(bool),
    PtracerAny(bool),
}

impl std::fmt::Debug for Edit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Edit")
    }
}

impl AgentBuilder {
    fn edit(mut self, edit: Edit) -> Self {
        self.edits.push(edit);
        self
    }

    /// Starts from this configuration instead of the environment.
    #[must_use]
    pub fn config(mut self, config: Config) -> Self {
        self.config = Some(config);
        self
    }

    /// The agent's name, 1 to 256 bytes.
    #[must_use]
    pub fn name(self, name: impl Into<String>) -> Self {
        self.edit(Edit::Name(name.into()))
    }

    /// The address to listen on; port 0 lets the kernel choose.
    #[must_use]
    pub fn listen(self, addr: impl Into<SocketAddr>) -> Self {
        self.edit(Edit::Listen(addr.into().to_string()))
    }

    /// `host` or `host:port` that peers are told.
    ///
    /// Without it: `KVFERRY_ADVERTISE`, `HOST_IP`, `POD_IP`, the first that is set, unless the agent
    /// listens on loopback only; else the address listened on, if it is one interface's; else the
    /// address that the default route leaves by. Loopback is never told to a peer on another host:
    /// it is told the address it came to.
    #[must_use]
    pub fn advertise(self, address: impl Into<String>) -> Self {
        self.edit(Edit::Advertise(address.into()))
    }

    /// The secret shared by all agents that may talk to each other; an empty one is none.
    #[must_use]
    pub fn secret(self, secret: &[u8]) -> Self {
        self.edit(Edit::Secret(SecretString::new(secret)))
    }

    /// The transports that may be used.
    #[must_use]
    pub fn transports(self, transports: Transports) -> Self {
        self.edit(Edit::Transports(transports.to_string()))
    }

    /// I/O threads, 1 to 64.
    #[must_use]
    pub fn io_threads(self, n: usize) -> Self {
        self.edit(Edit::IoThreads(n))
    }

    /// Data streams to one peer at most, 1 to 64.
    #[must_use]
    pub fn streams_per_peer(self, n: usize) -> Self {
        self.edit(Edit::StreamsPerPeer(n))
    }

    /// Whether payload carries checksums.
    #[must_use]
    pub fn checksum(self, checksum: Checksum) -> Self {
        self.edit(Edit::Checksum(checksum))
    }

    /// How long a peer may be silent while something is in flight, 0.1 to 600 s.
    #[must_use]
    pub fn silence(self, silence: Duration) -> Self {
        self.edit(Edit::SilenceMs(u64::try_from(silence.as_millis()).unwrap_or(u64::MAX)))
    }

    /// How long a transfer may take if its caller does not say.
    #[must_use]
    pub fn timeout(self, timeout: Duration) -> Self {
        self.edit(Edit::TimeoutMs(u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Whether stock Mooncake peers are served and met.
    #[must_use]
    pub fn mooncake(self, on: bool) -> Self {
        self.edit(Edit::Mooncake(on))
    }

    /// Whether any process of the same user may attach to this one, as `local` needs under Yama's
    /// `ptrace_scope` 1. It holds for the process, debuggers included, and is not taken back.
    #[must_use]
    pub fn ptracer_any(self, on: bool) -> Self {
        self.edit(Edit::PtracerAny(on))
    }

    /// The configuration as it would be used.
    ///
    /// # Errors
    /// As [`Config::from_env`].
    pub fn build(self) -> Result<Config> {
        let mut config = match self.config {
            Some(config) => config,
            None => Config::from_env()?,
        };
        for edit in self.edits {
            match edit {
                Edit::Name(v) => config.name = v,
                Edit::Listen(v) => config.listen = Some(v),
                Edit::Advertise(v) => config.advertise = Some(v),
                Edit::Secret(v) => config.secret = Some(v),
                Edit::Transports(v) => config.transports = Some(v),
                Edit::IoThreads(v) => config.io_threads = Some(v),
                Edit::StreamsPerPeer(v) => config.streams_per_peer = Some(v),
                Edit::Checksum(v) => config.checksum = v,
                Edit::SilenceMs(v) => config.silence_ms = v,
                Edit::TimeoutMs(v) => config.timeout_ms = v,
                Edit::Mooncake(v) => config.mooncake = v,
                Edit::PtracerAny(v) => config.ptracer_any = v,
            }
        }
        Ok(config)
    }

    /// Starts the agent.
    ///
    /// # Errors
    /// As [`Agent::start`] and [`Config::from_env`].
    pub fn start(self) -> Result<Agent> {
        Agent::start(self.build()?)
    }
}

#[cfg(all(loom, test))]
mod bare {
    use super::*;

    impl Core {
        /// An agent without threads and sockets, for models of what its parts do to each other.
        pub(crate) fn bare() -> Arc<Self> {
            let config = Config::default();
            Arc::new(Self {
                incarnation: Incarnation(7),
                regions: RegionTable::default(),
                writers: Writers::default(),
                local: Err("a model has no host".into()),
                transports: Transports::only(TransportKind::Tcp),
                gates: Gates::default(),
                inbox: Inbox::default(),
                correspondent: Correspondence::default(),
                counters: Counters::default(),
                pulse: Pulse::new(config.silence(), now()),
                control: Remote::without_thread(),
                io: vec![Remote::without_thread()],
                approach: Approach::Native,
                streams_per_peer: 1,
                stripe_default: 1,
                copiers_default: 1,
                advertised: String::new(),
                local_addr: SocketAddr::from(([127, 0, 0, 1], 1)),
                mooncake_port: None,
                mooncake: mooncake::Doors::default(),
                secret: None,
                forks: fd::forks(),
                closed: AtomicBool::new(false),
                next_io: AtomicUsize::new(0),
                next_transfer: AtomicU64::new(1),
                next_session: AtomicU64::new(1),
                sessions: Mutex::default(),
                accepted: Mutex::default(),
                peers: Mutex::default(),
                config,
            })
        }
    }
}
