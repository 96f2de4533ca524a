//! Connecting to a peer: one search at a time per peer, for all callers.
//!
//! [`Search`] holds the rules, without I/O. One handler on the control thread drives it; other threads
//! only report events to it and wake the handler.

use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::session::control::Control;
use crate::session::native::Native;
use crate::session::search::{Search, Step};
use crate::session::sessions::Sessions;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, Weak};
use crate::transfer::job::Job;
use crate::transfer::link::{Link, unreachable_peer};
use crate::transfer::requests::PROBE;
use crate::transfer::slot::{Interrupt, Slot};
use crate::transport::service::{Dialed, Directory};
use kvferry_proto::{Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::net::SocketAddr;
use std::time::Duration;

/// Ended jobs kept per peer for reuse: enough for 16 concurrent callers.
const JOBS_KEPT: usize = 16;

/// Called exactly once, with a link or the error.
pub(crate) type OnLink = Box<dyn FnOnce(Result<Arc<Link>>) + Send>;

/// A peer, by address: its live link, or the search for it.
pub(crate) struct PeerState {
    sessions: Weak<Sessions>,
    pub(crate) address: String,
    addrs: Vec<SocketAddr>,
    /// The last search failed, so the peer's name must be resolved again.
    is_unreached: AtomicBool,
    status: Mutex<Status>,
    ended_jobs: Mutex<Vec<Arc<Job>>>,
}

enum Status {
    Idle,
    Searching(Box<Searching>),
    Live(Arc<Link>),
}

struct Searching {
    /// The token of the handler that drives the search, on the control thread. Identifies the search.
    driver: u64,
    search: Search<OnLink>,
    /// A session that was idle for long. If its peer answers a probe, the search ends with it.
    checked: Option<Arc<Link>>,
}

impl std::fmt::Debug for PeerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PeerState[{}]", self.address)
    }
}

impl PeerState {
    pub(crate) fn new(
        sessions: &Arc<Sessions>,
        address: String,
        addrs: Vec<SocketAddr>,
    ) -> Arc<Self> {
        Arc::new(Self {
            sessions: Arc::downgrade(sessions),
            address,
            addrs,
            is_unreached: AtomicBool::new(false),
            status: Mutex::new(Status::Idle),
            ended_jobs: Mutex::default(),
        })
    }

    pub(crate) fn ended_job(&self) -> Option<Arc<Job>> {
        self.ended_jobs.lock().pop()
    }

    /// Keeps an ended job for reuse, unless a caller still holds a handle of it.
    pub(crate) fn keep_job(&self, mut job: Arc<Job>) {
        let Some(alone) = Arc::get_mut(&mut job) else { return };
        alone.release();
        let mut kept = self.ended_jobs.lock();
        if kept.len() < JOBS_KEPT {
            kept.push(job);
        }
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock()
    }

    /// Whether the last search failed. The peer's name must be resolved again: its host may have
    /// moved.
    pub(crate) fn is_unreached(&self) -> bool {
        self.is_unreached.load(Ordering::Relaxed)
    }

    /// Addresses of the peer, from the last resolution of its name.
    pub(crate) fn addrs(&self) -> &[SocketAddr] {
        &self.addrs
    }

    /// Whether the peer's name still has exactly these addresses.
    pub(crate) fn has_addrs(&self, addrs: &[SocketAddr]) -> bool {
        self.addrs == addrs
    }

    pub(crate) fn live(&self) -> Option<Arc<Link>> {
        let status = self.status();
        let link = match &*status {
            Status::Live(link) => Some(link),
            Status::Searching(searching) => searching.checked.as_ref(),
            Status::Idle => None,
        };
        link.filter(|link| link.end().is_none()).map(Arc::clone)
    }

    pub(crate) fn take_live(&self) -> Option<Arc<Link>> {
        let mut status = self.status();
        match std::mem::replace(&mut *status, Status::Idle) {
            Status::Live(link) => Some(link),
            Status::Searching(searching) => {
                // When that session ends, the search goes on.
                let checked = searching.checked.as_ref().map(Arc::clone);
                *status = Status::Searching(searching);
                checked
            }
            Status::Idle => None,
        }
    }

    /// Gets a link, and connects for it if necessary. Does not block. `on_link` runs on any thread; on
    /// the calling thread, before this returns, if the outcome is known.
    pub(crate) fn link(self: &Arc<Self>, on_link: OnLink) {
        self.link_within(Duration::ZERO, on_link);
    }

    /// As [`PeerState::link`], for a caller that waits for a silent peer as long as for a handshake: no
    /// thread waits meanwhile.
    pub(crate) fn link_patiently(self: &Arc<Self>, on_link: OnLink) {
        let patience = self.sessions.upgrade().map(|it| it.core.settings.handshake_timeout());
        self.link_within(patience.unwrap_or_default(), on_link);
    }

    fn link_within(self: &Arc<Self>, patience: Duration, on_link: OnLink) {
        let Some(sessions) = self.sessions.upgrade() else {
            return on_link(Err(Error::shutdown()));
        };
        let core = &sessions.core;
        let mut status = self.status();
        let checked = match &mut *status {
            Status::Searching(searching) => {
                let driver = searching.driver;
                let refused = searching.search.ask(on_link, patience, now());
                drop(status);
                return match refused {
                    Some((on_link, error)) => on_link(Err(error.with("peer", &self.address))),
                    None => core.threads.control.wake(driver),
                };
            }
            Status::Live(link) if link.end().is_none() => {
                let link = Arc::clone(link);
                if !link.is_idle_for_long() {
                    drop(status);
                    return on_link(Ok(link));
                }
                Some(link)
            }
            Status::Live(_) | Status::Idle => None,
        };
        let patience = core.settings.handshake_timeout();
        let mut search = Search::new(self.addrs.len(), patience, vec![on_link], now());
        if sessions.services().dialer().is_none() {
            search.retry_lost();
        }
        if checked.is_some() {
            search.hold();
        }
        let driver = self.search(core, status, search, checked.clone());
        if let Some(link) = checked {
            self.check(core, driver, &link);
        }
    }

    /// Starts the handler that drives a search. Returns its token.
    fn search(
        self: &Arc<Self>,
        core: &Arc<Core>,
        mut status: MutexGuard<'_, Status>,
        search: Search<OnLink>,
        checked: Option<Arc<Link>>,
    ) -> u64 {
        let driver = core.threads.control.token();
        *status = Status::Searching(Box::new(Searching { driver, search, checked }));
        drop(status);
        let handler = SearchDriver { state: Arc::clone(self), token: driver, is_over: false };
        core.threads.control.add(driver, Box::new(handler));
        driver
    }

    /// Probes the peer of a session that was idle for long: a NAT on the way may have dropped its
    /// connections.
    fn check(self: &Arc<Self>, core: &Core, driver: u64, link: &Arc<Link>) {
        let (state, asked) = (Arc::clone(self), Arc::clone(link));
        let answered = move |code, _| {
            state.checked(
                driver,
                &asked,
                code != WireCode::Deadline && asked.session_end().is_none(),
            );
        };
        link.request(PROBE, Vec::new(), core.settings.check_timeout(), Box::new(answered));
    }

    fn checked(&self, driver: u64, link: &Arc<Link>, answers: bool) {
        let mut status = self.status();
        let waiting = match &mut *status {
            Status::Searching(searching) if searching.driver == driver => {
                searching.checked = None;
                if answers {
                    let waiting = searching.search.take_waiting();
                    *status = Status::Live(Arc::clone(link));
                    waiting
                } else {
                    searching.search.release(now());
                    Vec::new()
                }
            }
            _ => Vec::new(),
        };
        drop(status);
        link.core.threads.control.wake(driver);
        if answers {
            link.was_used();
        } else if link.end().is_none() {
            let what = "the peer did not answer a probe on an idle session";
            let error = Error::new(ErrorKind::PeerSilent, what).with("peer", &link.address);
            link.close(WireCode::Closed, error);
        }
        for on_link in waiting {
            on_link(Ok(Arc::clone(link)));
        }
    }

    /// Returns the link as [`PeerState::link`] does, but blocks until the outcome is known.
    pub(crate) fn wait_link(
        self: &Arc<Self>,
        deadline: Timestamp,
        interrupt: Interrupt<'_>,
    ) -> Result<Arc<Link>> {
        if let Some(link) = self.live()
            && !link.is_idle_for_long()
        {
            return Ok(link);
        }
        let slot = Slot::new();
        let fill = Arc::clone(&slot);
        self.link(Box::new(move |link| fill.fill(link)));
        slot.wait(deadline, interrupt)
            .and_then(|link| link)
            .map_err(|e| e.with("peer", &self.address))
    }

    /// The next step of a search; `None` if the search is over.
    fn step(&self, driver: u64, core: &Core) -> Option<Step<OnLink>> {
        let mut status = self.status();
        let Status::Searching(searching) = &mut *status else { return None };
        if searching.driver != driver {
            return None;
        }
        let step = searching.search.poll(now(), || core.threads.control.token());
        if matches!(step, Step::GiveUp(..)) {
            *status = Status::Idle;
        }
        Some(step)
    }

    fn refuse(&self, waiting: Vec<OnLink>, error: &Error) {
        self.is_unreached.store(true, Ordering::Relaxed);
        for on_link in waiting {
            on_link(Err(error.clone().with("peer", &self.address)));
        }
    }

    /// Ends a search because the control thread stops.
    fn abandon(&self, driver: u64) {
        let mut status = self.status();
        let waiting = match &mut *status {
            Status::Searching(searching) if searching.driver == driver => {
                let waiting = searching.search.take_waiting();
                *status = Status::Idle;
                waiting
            }
            _ => return,
        };
        drop(status);
        self.refuse(waiting, &Error::shutdown());
    }
}

/// Runs the steps of a search on the control thread, until the search is over.
struct SearchDriver {
    state: Arc<PeerState>,
    token: u64,
    is_over: bool,
}

impl Handler for SearchDriver {
    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(sessions) = self.state.sessions.upgrade() else { return Next::Close };
        loop {
            match self.state.step(self.token, &sessions.core) {
                Some(Step::Start { id, address }) => {
                    let addr = self.state.addrs[address];
                    Attempt { peer: Arc::clone(&self.state), id, addr }.begin(&sessions);
                }
                Some(Step::Drop(attempt)) => cx.remote.wake(attempt),
                Some(Step::Refuse(waiting, error) | Step::GiveUp(waiting, error)) => {
                    self.state.refuse(waiting, &error);
                }
                Some(Step::Wait(deadline)) => {
                    return Next::Wait { interest: Interest::None, deadline };
                }
                None => {
                    self.is_over = true;
                    return Next::Close;
                }
            }
        }
    }
}

impl Drop for SearchDriver {
    fn drop(&mut self) {
        if !self.is_over {
            self.state.abandon(self.token);
        }
    }
}

/// An attempt to connect to a peer at one of its addresses.
#[derive(Clone)]
pub(crate) struct Attempt {
    pub(crate) peer: Arc<PeerState>,
    pub(crate) addr: SocketAddr,
    /// The number of the attempt in its search, and the token of its handler on the control thread.
    id: u64,
}

impl Attempt {
    fn begin(self, sessions: &Arc<Sessions>) {
        let Some(dialer) = sessions.services().dialer() else {
            return self.connect_native(sessions);
        };
        let (address, addr) = (self.peer.address.clone(), self.addr);
        let of = Arc::clone(sessions);
        let dialed = move |dialed| match dialed {
            Dialed::Native => self.connect_native(&of),
            Dialed::Failed(error) => self.ended(&of.core, Err(error)),
            Dialed::Link(link) => {
                of.add(&link);
                self.ended(&of.core, Ok(link));
            }
        };
        dialer.dial(&address, addr, sessions.speaks_native, Box::new(dialed));
    }

    fn connect_native(self, sessions: &Arc<Sessions>) {
        let (addr, core) = (self.addr, &sessions.core);
        let begun = sessions.new_session_initiator(addr).and_then(|session| {
            let socket =
                Socket::connect(addr).map_err(|e| unreachable_peer(e).with("address", addr))?;
            Ok((session, socket))
        });
        let (session, socket) = match begun {
            Ok(both) => both,
            Err(e) => return self.ended(core, Err(e)),
        };
        let token = self.id;
        let socket = Arc::new(socket);
        let native = Native::new(session, &socket, token);
        let permits_max = core.sizing.permits_max(addr);
        let backend = Arc::clone(&native) as _;
        let address = self.peer.address.clone();
        let link = Link::new(Arc::clone(core), address, addr, backend, permits_max);
        let (attempt, of) = (self.clone(), Arc::clone(sessions));
        let established = Box::new(move |link: &Arc<Link>, result: Result<()>| match result {
            Ok(()) => attempt.attach(&of, link, 0),
            Err(error) => attempt.ended(&of.core, Err(error)),
        });
        let control = Control::initiator(sessions, link, native, socket, self, established);
        core.threads.control.add(token, Box::new(control));
    }

    /// Lets the transports add their routes to a new link, in order, beginning with number `next`.
    fn attach(self, sessions: &Arc<Sessions>, link: &Arc<Link>, next: usize) {
        let Some(service) = sessions.services().native().nth(next) else {
            return self.attached(sessions, link);
        };
        let (of, link2) = (Arc::clone(sessions), Arc::clone(link));
        let attached = move |obstacle| {
            if let Some(obstacle) = obstacle {
                link2.set_obstacle(obstacle);
            }
            self.attach(&of, &link2, next + 1);
        };
        service.attach(link, Box::new(attached));
    }

    /// Ends the attempt once every transport has been attached: succeeds if the link has a route.
    fn attached(self, sessions: &Arc<Sessions>, link: &Arc<Link>) {
        let core = &sessions.core;
        if let Some(end) = link.session_end() {
            return self.ended(core, Err(end));
        }
        if link.has_routes() {
            if let Some(obstacle) = sessions.services().obstacle() {
                link.set_obstacle(obstacle);
            }
            return self.ended(core, Ok(Arc::clone(link)));
        }
        // A peer that shuts down also has no routes. Probe it: its close message arrives before an
        // answer would, and gives the better error.
        let link2 = Arc::clone(link);
        let answered = move |_, _| {
            let error = link2.session_end().unwrap_or_else(|| {
                let error = link2.no_route("");
                link2.close(WireCode::Closed, error.clone());
                error
            });
            self.ended(&link2.core, Err(error));
        };
        let budget = core.settings.handshake_timeout();
        link.request(PROBE, Vec::new(), budget, Box::new(answered));
    }

    fn search<T: Default>(&self, look: impl FnOnce(&mut Searching) -> T) -> T {
        match &mut *self.peer.status() {
            Status::Searching(searching) => look(searching),
            Status::Idle | Status::Live(_) => T::default(),
        }
    }

    /// Whether the attempt is still needed: false once another address has answered.
    pub(crate) fn is_running(&self) -> bool {
        self.search(|searching| searching.search.is_running(self.id))
    }

    /// Reports the first bytes from the peer. Returns whether the attempt goes on.
    pub(crate) fn answered(&self, core: &Core) -> bool {
        let (goes_on, driver) =
            self.search(|searching| (searching.search.answered(self.id), Some(searching.driver)));
        if let Some(driver) = driver {
            core.threads.control.wake(driver);
        }
        goes_on
    }

    /// Reports the outcome of the attempt.
    pub(crate) fn ended(&self, core: &Core, result: Result<Arc<Link>>) {
        let mut status = self.peer.status();
        let Status::Searching(searching) = &mut *status else {
            drop(status);
            return Self::not_needed(result);
        };
        let driver = searching.driver;
        match result {
            Ok(link) => {
                let Some(waiting) = searching.search.connected(self.id) else {
                    drop(status);
                    return Self::not_needed(Ok(link));
                };
                *status = Status::Live(Arc::clone(&link));
                drop(status);
                self.peer.is_unreached.store(false, Ordering::Relaxed);
                for on_link in waiting {
                    on_link(Ok(Arc::clone(&link)));
                }
            }
            Err(error) => {
                searching.search.failed(self.id, error, now());
                drop(status);
            }
        }
        core.threads.control.wake(driver);
    }

    fn not_needed(result: Result<Arc<Link>>) {
        if let Ok(link) = result {
            let what = "closed a second session with the same peer";
            let error = Error::new(ErrorKind::PeerClosed, what).with("peer", &link.address);
            link.close(WireCode::Closed, error);
        }
    }

    /// The session of this attempt ends because the peer is silent.
    pub(crate) fn fell_silent(&self, link: &Arc<Link>) {
        let status = self.peer.status();
        if matches!(&*status, Status::Live(live) if Arc::ptr_eq(live, link)) {
            let at = now();
            let since = at - link.core.settings.silence;
            let search = Search::silent(self.peer.addrs.len(), since, at);
            self.peer.search(&link.core, status, search, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Agent;
    use std::net::{TcpListener, TcpStream};
    use std::time::Duration;

    /// A listener that accepts no connection. If its queue is full, the kernel drops SYN packets.
    fn listener(is_full: bool) -> (SocketAddr, TcpListener, Vec<TcpStream>) {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let addr = listener.local_addr().expect("bound");
        let patience = Duration::from_millis(100);
        let queue = std::iter::from_fn(|| TcpStream::connect_timeout(&addr, patience).ok());
        let queue = queue.take(if is_full { 10_000 } else { 0 }).collect();
        (addr, listener, queue)
    }

    #[test]
    fn a_peer_is_reached_at_its_last_address_if_the_first_ones_are_silent() {
        let tcp = crate::Transports::parse("tcp").expect("a transport");
        let start = || Agent::builder().transports(tcp).start().expect("an agent");
        let (near, far) = (start(), start());
        let (drops_syn, never_answers) = (listener(true), listener(false));
        let addrs = vec![drops_syn.0, never_answers.0, far.local_addr()];
        let state = PeerState::new(near.sessions(), "three.addresses:1".into(), addrs);
        state.wait_link(now() + Duration::from_secs(60), None).expect("the last address answers");
        assert_eq!((near.stats().sessions, far.stats().sessions), (1, 1));
    }
}
