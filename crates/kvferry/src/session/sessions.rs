//! The tables of an agent's peers and links, by session and by address; the suspend timer.

use crate::address;
use crate::config::Checksum;
use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::host::is_same_host;
use crate::quota::Permit;
use crate::reactor::{self, Cause, Cx, Handler, Next, now};
use crate::session::channel::MessageHandler;
use crate::session::connect::PeerState;
use crate::session::native::Native;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, OnceLock, Weak};
use crate::transfer::link::Link;
use crate::transport::Services;
use crate::transport::service::Directory;
use kvferry_proto::{
    ChecksumPolicy, Origin, ProofLabel, Secret, Session, SessionConfig, SessionId, StreamHello,
    Timestamp, WireCode,
};
use kvferry_sys::poll::Interest;
use kvferry_sys::random;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

/// The number of peers above which unused ones are removed.
const PEERS_KEPT: usize = 4096;

/// What this agent tells its peers about itself.
pub(crate) struct Identity {
    pub(crate) secret: Option<Secret>,
    pub(crate) checksum: Checksum,
    /// The `host:port` that the agent tells its peers.
    pub(crate) advertised: String,
    /// The address that the agent listens on.
    pub(crate) local_addr: SocketAddr,
}

type Accepted = (Arc<Link>, Arc<Native>);

/// The peers and links of an agent.
pub(crate) struct Sessions {
    pub(crate) core: Arc<Core>,
    pub(crate) identity: Identity,
    /// The agent uses the native protocol.
    pub(crate) speaks_native: bool,
    services: OnceLock<Services>,
    message_handler: OnceLock<Arc<dyn MessageHandler>>,
    next_session: AtomicU64,
    /// All live links; ended ones are removed later.
    links: Mutex<Vec<Arc<Link>>>,
    accepted: Mutex<FxHashMap<SessionId, Accepted>>,
    peers: Mutex<HashMap<String, Arc<PeerState>>>,
}

impl std::fmt::Debug for Sessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Sessions[{}]", self.identity.advertised)
    }
}

impl Sessions {
    pub(crate) fn new(core: Arc<Core>, identity: Identity, speaks_native: bool) -> Arc<Self> {
        Arc::new(Self {
            core,
            identity,
            speaks_native,
            services: OnceLock::new(),
            message_handler: OnceLock::new(),
            next_session: AtomicU64::new(1),
            links: Mutex::default(),
            accepted: Mutex::default(),
            peers: Mutex::default(),
        })
    }

    /// Sets the transports, once, before the agent is used.
    pub(crate) fn set_services(&self, services: Services) {
        let _ = self.services.set(services);
    }

    pub(crate) fn services(&self) -> &Services {
        self.services.get().expect("set when the agent starts")
    }

    pub(crate) fn message_handler(&self) -> Option<&dyn MessageHandler> {
        self.message_handler.get().map(Arc::as_ref)
    }

    /// Sets the message handler. Returns false if one is set already.
    pub(crate) fn set_message_handler(&self, handler: Arc<dyn MessageHandler>) -> bool {
        self.message_handler.set(handler).is_ok()
    }

    // ---- protocol sessions ----

    fn session_config(&self, same_host: bool, advertised: String) -> SessionConfig {
        let settings = &self.core.settings;
        let mut config = SessionConfig::new(self.core.incarnation, settings.name.clone());
        config.secret = self.identity.secret.clone();
        config.checksum = match (self.identity.checksum, same_host) {
            (Checksum::On, _) | (Checksum::Auto, false) => ChecksumPolicy::On,
            (Checksum::Off, _) | (Checksum::Auto, true) => ChecksumPolicy::Off,
        };
        config.capabilities = self.services().announces();
        config.advertised = advertised;
        config.handshake_timeout = settings.handshake_timeout();
        config.silence = settings.silence;
        config.ping_interval = settings.ping_interval();
        config
    }

    pub(crate) fn new_session_initiator(&self, peer: SocketAddr) -> Result<Session> {
        let source = kvferry_sys::net::source_towards(peer)
            .map_err(|e| Error::io("can't look up the route to the peer", e))?;
        let same_host = is_same_host(source, peer);
        let advertised = self.advertised_to(same_host, SocketAddr::new(source, 0));
        let nonce = random::bytes().map_err(no_random)?;
        Ok(Session::initiator(self.session_config(same_host, advertised), None, nonce, now()))
    }

    pub(crate) fn new_session_acceptor(
        &self,
        peer: SocketAddr,
        here: Option<SocketAddr>,
        handshake: Duration,
    ) -> Result<Session> {
        let here = here.unwrap_or(self.identity.local_addr);
        let same_host = is_same_host(here.ip(), peer);
        let advertised = self.advertised_to(same_host, here);
        let id = SessionId(self.next_session.fetch_add(1, Ordering::Relaxed));
        let nonce = random::bytes().map_err(no_random)?;
        let mut config = self.session_config(same_host, advertised);
        config.handshake_timeout = handshake;
        Ok(Session::acceptor(config, id, nonce, now()))
    }

    /// The address to tell a peer: never a loopback address to a peer on another host.
    fn advertised_to(&self, same_host: bool, here: SocketAddr) -> String {
        let own: Option<SocketAddr> = self.identity.advertised.parse().ok();
        match own {
            Some(own) if own.ip().is_loopback() && !same_host => {
                SocketAddr::new(here.ip(), own.port()).to_string()
            }
            _ => self.identity.advertised.clone(),
        }
    }

    // ---- links ----

    pub(crate) fn add_accepted(&self, id: SessionId, link: &Arc<Link>, native: &Arc<Native>) {
        self.accepted.lock().insert(id, (Arc::clone(link), Arc::clone(native)));
    }

    pub(crate) fn remove_accepted(&self, id: SessionId) {
        self.accepted.lock().remove(&id);
    }

    /// Whether a session can give its place to one of a peer at `address`.
    pub(crate) fn has_place_for(&self, address: IpAddr) -> bool {
        dispensable(&self.accepted.lock(), Origin::from(address)).is_some()
    }

    /// Ends a session that can be dispensed with, for a new one of a peer at `address`, and returns its permit. See
    /// [`dispensable`].
    pub(crate) fn displace_for(&self, address: IpAddr) -> Option<Permit> {
        let ((link, native), why) = {
            let accepted = self.accepted.lock();
            let (id, why) = dispensable(&accepted, Origin::from(address))?;
            (accepted.get(&id)?.clone(), why)
        };
        let permit = native.displace(&link, why)?;
        self.core.counters.sessions_displaced.one();
        tracing::debug!(peer = %link.address, why, "ended a session for a newer one");
        Some(permit)
    }

    /// The session that a new connection names and whose key it proves, as `verify` finds.
    pub(crate) fn session_of(
        &self,
        hello: &StreamHello,
        verify: impl FnOnce(&mut Session, &StreamHello) -> Result<(), WireCode>,
    ) -> Result<Accepted, WireCode> {
        let found = self.accepted.lock().get(&hello.session).cloned();
        let verdict = found.ok_or(WireCode::UnknownSession).and_then(|(link, native)| {
            let verdict = verify(&mut native.session(), hello);
            verdict.map(|()| (link, native))
        });
        verdict.inspect_err(|code| {
            self.core.counters.handshakes_failed.one();
            warn_limited!(session = %hello.session, %code, "refused a stream");
        })
    }

    fn has_links(&self) -> bool {
        let mut links = self.links.lock();
        links.retain(|link| link.end().is_none());
        !links.is_empty()
    }

    /// Ends every session. Peers get `code`.
    pub(crate) fn close_all(&self, code: WireCode, error: impl Fn() -> Error) {
        let links = std::mem::take(&mut *self.links.lock());
        for link in links {
            link.close(code, error().with("peer", &link.address));
        }
    }

    /// Removes every peer. Called after the threads have stopped.
    pub(crate) fn clear(&self) {
        self.peers.lock().clear();
        self.accepted.lock().clear();
    }

    // ---- peers ----

    pub(crate) fn peer(self: &Arc<Self>, address: &str) -> Result<Arc<PeerState>> {
        // Resolve the name again if the last connection attempt failed.
        let named = address.parse::<SocketAddr>().is_err();
        let known = self.peers.lock().get(address).map(Arc::clone);
        if let Some(state) = known.filter(|state| !(named && state.is_unreached())) {
            return Ok(state);
        }
        // Resolve without the lock: it may block.
        let addrs = address::resolve_peer(address)?;
        let mut peers = self.peers.lock();
        if peers.len() >= PEERS_KEPT {
            peers.retain(|_, state| Arc::strong_count(state) > 1 || state.live().is_some());
        }
        // Keep the known state while the name has the same addresses.
        if let Some(state) = peers.get(address).filter(|state| state.has_addrs(&addrs)) {
            return Ok(Arc::clone(state));
        }
        let state = PeerState::new(self, address.to_owned(), addrs);
        peers.insert(address.to_owned(), Arc::clone(&state));
        Ok(state)
    }
}

impl Directory for Sessions {
    fn add(&self, link: &Arc<Link>) {
        let first = {
            let mut links = self.links.lock();
            links.retain(|link| link.end().is_none());
            links.push(Arc::clone(link));
            links.len() == 1
        };
        if first {
            // The suspend detector does not run while there is no session.
            self.core.suspend.beat(now());
            self.core.threads.control.wake(reactor::FIRST);
        }
    }

    fn verify(&self, label: ProofLabel, hello: &StreamHello) -> Result<Arc<Link>, WireCode> {
        let verify = |session: &mut Session, hello: &_| session.verify_proof(label, hello);
        self.session_of(hello, verify).map(|(link, _)| link)
    }
}

/// The session that gives its place to one of a peer at `newcomer`, and why.
///
/// First a session in which nothing is in progress: of the network that has most such sessions, the one that was idle
/// for longest. So idle sessions keep no peer out, and a host that opens many displaces its own first.
///
/// A peer may say for ever that it waits for something, and may have this side wait for messages. So if there is no idle
/// session, the network that has most gives one up to a network that has fewer, whatever its peers say: one in which
/// nothing is moved, of the host that has most. Of `n` networks each gets an `n`th of all sessions at least.
fn dispensable(
    accepted: &FxHashMap<SessionId, Accepted>,
    newcomer: Origin,
) -> Option<(SessionId, &'static str)> {
    longest_idle(accepted)
        .map(|id| (id, "idle"))
        .or_else(|| Some((of_the_crowd(accepted, newcomer)?, "one of too many of its network")))
}

fn longest_idle(accepted: &FxHashMap<SessionId, Accepted>) -> Option<SessionId> {
    let at = now();
    let mut idle_of: FxHashMap<IpAddr, (usize, Reverse<(Timestamp, SessionId)>)> =
        FxHashMap::default();
    for (id, session) in accepted {
        let Some(since) = idle_since(session, at) else { continue };
        let longest = Reverse((since, *id));
        let (count, oldest) = idle_of.entry(origin_of(session).network()).or_insert((0, longest));
        *count += 1;
        *oldest = longest.max(*oldest);
    }
    let (_, Reverse((_, id))) = idle_of.into_values().max()?;
    Some(id)
}

fn of_the_crowd(accepted: &FxHashMap<SessionId, Accepted>, newcomer: Origin) -> Option<SessionId> {
    let (mut of_networks, mut of_hosts) = (FxHashMap::default(), FxHashMap::default());
    for session in accepted.values().filter(|(_, native)| native.has_permit()) {
        let origin = origin_of(session);
        *of_networks.entry(origin.network()).or_insert(0) += 1;
        *of_hosts.entry(origin.host()).or_insert(0) += 1;
    }
    let own = of_networks.get(&newcomer.network()).copied().unwrap_or(0);
    let (crowd, count) = of_networks.into_iter().max_by_key(|(_, count)| *count)?;
    // Equal shares do not change hands.
    if count <= own + 1 {
        return None;
    }
    let candidates = accepted.iter().filter(|(_, session)| {
        let (link, native) = session;
        origin_of(session).network() == crowd && native.has_permit() && !link.is_in_use()
    });
    let rank = |(id, session): &(&SessionId, &Accepted)| {
        let of_host = of_hosts.get(&origin_of(session).host()).copied().unwrap_or(0);
        let is_needed = session.0.is_needed();
        (of_host, Reverse((is_needed, session.1.session().last_receive(), **id)))
    };
    candidates.max_by_key(rank).map(|(id, _)| *id)
}

fn origin_of((link, _): &Accepted) -> Origin {
    Origin::from(link.peer_addr.ip())
}

/// Since when nothing is in progress in an accepted session, if it can give its place to another one.
fn idle_since((link, native): &Accepted, at: Timestamp) -> Option<Timestamp> {
    let since = native.session().idle_since(at)?;
    (native.has_permit() && !link.is_needed()).then_some(since)
}

fn no_random(e: std::io::Error) -> Error {
    Error::io("the kernel returned no random bytes", e)
}

/// Beats the suspend detector from the control thread while there are sessions.
pub(crate) struct SuspendTimer {
    sessions: Weak<Sessions>,
    beating: bool,
}

impl SuspendTimer {
    pub(crate) fn new(sessions: Weak<Sessions>) -> Self {
        Self { sessions, beating: false }
    }
}

impl Handler for SuspendTimer {
    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        // Read the clock here: the time since the wait ended counts as well.
        let at = now();
        let Some(sessions) = self.sessions.upgrade() else { return Next::Close };
        let core = &sessions.core;
        if self.beating && !core.suspend.is_fresh(at) {
            core.counters.slept.one();
            tracing::warn!("this process was suspended; all sessions end");
            let what = "this process was suspended for longer than the silence limit";
            sessions.close_all(WireCode::Slept, || Error::new(ErrorKind::PeerSilent, what));
        }
        // Only now: until this beat, other threads see the old time and touch no memory.
        core.suspend.beat(at);
        self.beating = sessions.has_links();
        let deadline = self.beating.then(|| at + core.suspend.every);
        Next::Wait { interest: Interest::None, deadline }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Access, Agent, Batch, Options, Transports};
    use kvferry_sys::socket::Socket;
    use std::net::TcpListener;

    /// Sessions of peers at these addresses, which have said nothing yet.
    fn accepted(agent: &Agent, addresses: &[&str]) -> FxHashMap<SessionId, Accepted> {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let here = listener.local_addr().expect("bound");
        let core = agent.core();
        let session = |(number, address): (u64, &&str)| {
            let peer = SocketAddr::new(address.parse().expect("an address"), 1);
            let socket = Arc::new(Socket::connect(here).expect("it listens"));
            let config = SessionConfig::new(core.incarnation, String::new());
            let session = Session::acceptor(config, SessionId(number), [0; 32], now());
            let native = Native::new(session, &socket, 0);
            native.keep_permit(core.quota.session().expect("there is room"));
            let backend = Arc::clone(&native) as _;
            let link = Link::new(Arc::clone(core), peer.to_string(), peer, backend, 1);
            (SessionId(number), (link, native))
        };
        (1..).zip(addresses).map(session).collect()
    }

    #[test]
    fn the_network_with_most_sessions_gives_one_up_to_a_network_that_has_fewer() {
        let agent = Agent::builder().listen(([127, 0, 0, 1], 0)).start().expect("an agent");
        let crowd = ["10.0.0.1", "10.0.0.2", "10.0.0.1", "10.0.1.1", "10.0.0.1", "fd00::1"];
        let sessions = accepted(&agent, &crowd);
        let origin = |address: &str| Origin::from(address.parse::<IpAddr>().expect("an address"));
        let taken = |address| dispensable(&sessions, origin(address)).map(|(id, _)| id.0);
        // None of them is idle. The host with most sessions gives up the one that was silent for longest.
        assert_eq!(taken("10.0.2.1"), Some(1));
        assert_eq!(taken("10.0.0.9"), None, "its network has most itself");
        // A peer that has this side wait for messages keeps no place by that.
        [1, 3, 5].iter().for_each(|number| sessions[&SessionId(*number)].0.begin_watch());
        assert_eq!(taken("10.0.2.1"), Some(1));
        sessions[&SessionId(3)].0.end_watch();
        assert_eq!(taken("10.0.2.1"), Some(3), "of one host, that one which nothing waits for");
        sessions[&SessionId(1)].0.begin();
        assert_eq!(taken("10.0.2.1"), Some(3), "the first one is in use");
        [3, 5].iter().for_each(|number| sessions[&SessionId(*number)].0.begin());
        assert_eq!(taken("10.0.2.1"), Some(2), "another host of the network");
        sessions[&SessionId(2)].0.begin();
        assert_eq!(taken("10.0.2.1"), None, "all of them are in use");
        // Networks of which none has more than half.
        let some = accepted(&agent, &crowd[2..]);
        let taken = |address| dispensable(&some, origin(address)).map(|(id, _)| id.0);
        assert_eq!(taken("10.0.2.1"), Some(1), "two of four are more than none");
        assert_eq!(taken("10.0.1.9"), None, "with another one it would have as many");
    }

    #[test]
    fn an_agent_that_was_dropped_leaves_nothing_behind() {
        let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
        let silent = silent.local_addr().expect("bound").to_string();
        for names in ["tcp", "local", "all"] {
            let start = |names: &str| {
                let transports = Transports::parse(names).expect("names");
                let builder = Agent::builder().transports(transports);
                builder.silence(Duration::from_secs(600)).start().expect("an agent")
            };
            let (near, far) = (start(names), start("all"));
            let alive: Vec<_> = [&near, &far]
                .map(|agent| (Arc::downgrade(agent.core()), Arc::downgrade(agent.sessions())))
                .into();
            let from = near.allocate(4096, Access::NONE).expect("memory");
            let _to = far.allocate(4096, Access::WRITE).expect("memory");
            let peer = near.peer(far.advertised()).expect("an address");
            let remote = peer.regions(None).expect("a list").remove(0);
            let mut batch = Batch::new();
            batch.push(&from, 0, &remote, 0, 4096).expect("inside");
            peer.write(&batch, &Options::default()).expect("a healthy write");
            let unanswered = near.peer(&silent).expect("an address");
            let waits = unanswered.write_async(&batch, &Options::default());
            drop((near, far));
            assert!(waits.outcome().is_some(), "{names}: the search ended with the agent");
            drop((peer, unanswered, waits, from, _to));
            for (core, sessions) in alive {
                assert!(sessions.upgrade().is_none(), "{names}: sessions are left");
                assert!(core.upgrade().is_none(), "{names}: the core is left");
            }
        }
    }
}
