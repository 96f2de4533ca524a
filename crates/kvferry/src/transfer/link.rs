//! The connection between this agent and one incarnation of a peer, as transfers use it: routes,
//! lanes, activity and the end.
//!
//! A link knows its peer through one [`Backend`] (a native session, a process of another protocol) and
//! its transports through [`Route`]s, fastest first. It knows neither by name.
//!
//! When a link ends, it shuts down every lane's socket, which wakes the threads that wait on one;
//! they find the reason in [`Link::end`].

use super::fallback::{Fallback, Fallbacks};
use super::lanes::{Lane, LaneGiven, Lanes, Open};
use super::messages::MessageQueue;
use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::region::RemoteRegion;
use crate::notify::Notification;
use crate::peer_memory::Memory;
use crate::reactor::now;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, OnceLock, RwLock};
use crate::transfer::Options;
use crate::transfer::batch::Batch;
use crate::transfer::job::{Job, Op, RevokeDone, TransferStats};
use crate::transfer::kind::{Capabilities, Transport, TransportKind};
use crate::transfer::slot::Interrupt;
use kvferry_proto::auth::MAC_LEN;
use kvferry_proto::{PeerInfo, ProofLabel, StreamId, Timestamp, WireCode};
use smallvec::SmallVec;
use std::fmt;
use std::net::{Shutdown, SocketAddr};
// For times, which need no memory order.
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Called exactly once with the response to a request.
pub(crate) type Answered = Box<dyn FnOnce(WireCode, Vec<u8>) + Send>;

/// The peer behind a link, and the connection for control messages to it.
///
/// All methods may be called on any thread and do not block, except where they take a `timeout`.
pub trait Backend: Send + Sync {
    /// The peer's part of the native handshake; `None` before it is complete, and for peers that do
    /// not speak the native protocol.
    fn info(&self) -> Option<&PeerInfo> {
        None
    }

    /// Opens one lane. The result comes through [`Link::lane_opened`] or [`Link::lane_failed`].
    fn open_lane(&self, link: &Arc<Link>);

    /// Wakes the peer's handler on the control thread.
    fn wake(&self, core: &Core);

    /// Asks the peer to stop touching memory through these streams. Calls `done` exactly once, with
    /// whether the peer has confirmed it.
    fn revoke(&self, _link: &Link, _streams: Vec<StreamId>, done: RevokeDone) {
        done(false);
    }

    /// Sends a request over the control connection.
    fn request(
        &self,
        _link: &Link,
        _kind: u16,
        _body: Vec<u8>,
        _budget: Duration,
        answered: Answered,
    ) {
        answered(WireCode::Unsupported, Vec::new());
    }

    /// Sends the requests that were made.
    fn flush(&self, _link: &Link) {}

    /// Acknowledges a message of the peer; no effect once the session has ended.
    fn acknowledge(&self, _link: &Link, _id: u64) {}

    /// Lists the regions that the peer makes accessible. Blocks.
    fn regions(&self, link: &Arc<Link>, timeout: Duration) -> Result<Vec<RemoteRegion>>;

    /// Looks up the peer's region of that name. Blocks.
    fn region(&self, link: &Arc<Link>, _name: &str, _timeout: Duration) -> Result<RemoteRegion> {
        let what = "the peer is not a kvferry agent: its regions have no names";
        Err(Error::new(ErrorKind::Unsupported, what).with("peer", &link.address))
    }

    /// Measures one round trip. Blocks.
    fn probe(&self, link: &Arc<Link>, timeout: Duration) -> Result<Duration>;

    /// Sends a notification without data, for peers to which an empty write does not carry it.
    /// Blocks.
    fn notify(
        &self,
        _link: &Arc<Link>,
        _notification: &Notification,
        _timeout: Duration,
    ) -> Option<Result<()>> {
        None
    }

    /// Tells the peer that the session ends, for the reason in `code`.
    fn close(&self, _code: WireCode) {}

    /// The error with which the session ends or has ended, if the link has not ended yet.
    fn closing(&self, _link: &Link) -> Option<Error> {
        None
    }

    /// The link has ended: fails every pending request.
    fn ended(&self) {}

    /// Time at which [`Backend::expire`] is due.
    fn next_deadline(&self) -> Option<Timestamp> {
        None
    }

    /// Fails the requests that the peer did not answer in time.
    fn expire(&self, _link: &Link, _now: Timestamp) {}

    /// The hello by which a connection of a transport proves the session's key, and the number of the
    /// stream. `None` once the session has ended.
    fn prove(&self, _label: ProofLabel) -> Option<(StreamId, Vec<u8>)> {
        None
    }

    /// The proof with which the acceptor answers such a hello.
    fn answer_proof(&self, _label: ProofLabel, _stream: StreamId) -> Option<[u8; MAC_LEN]> {
        None
    }

    /// A stream that the peer opened has ended; its gate is shut.
    fn inbound_ended(&self, _stream: StreamId) {}
}

/// The result of offering a batch to a route.
pub(crate) enum Offered {
    /// The route moves the batch; the job gets its outcome.
    Taken,
    /// The route can't reach the batch's memory, for this reason; another route may.
    Elsewhere(Fallback),
    /// The peer would refuse the batch.
    Refused(Error),
}

/// A transport's route to the peer of one link.
pub(crate) trait Route: Send + Sync {
    fn transport(&self) -> &'static dyn Transport;

    fn kind(&self) -> TransportKind {
        self.transport().kind()
    }

    /// Whether bytes cross the network, on lanes.
    fn uses_lanes(&self) -> bool {
        false
    }

    /// Whether the route can be used.
    fn is_open(&self) -> bool {
        true
    }

    /// The reason why the route reaches only a part of the peer's memory, if so.
    fn obstacle(&self) -> Option<&str> {
        None
    }

    /// Moves a batch on the caller's thread, without a job and without allocating. `None` if the
    /// batch needs a job: for a notification, device memory, several threads, or another route.
    fn run_direct(
        &self,
        _link: &Arc<Link>,
        _op: Op,
        _batch: &Batch,
        _options: &Options<'_>,
        _timeout: Duration,
    ) -> Option<Result<TransferStats>> {
        None
    }

    /// Drives a job, on the caller's thread if that is fastest, until its last share has ended.
    fn run(&self, link: &Arc<Link>, job: &Arc<Job>, interrupt: Interrupt<'_>) -> Offered;

    /// Starts a job on I/O threads; returns at once.
    fn submit(&self, link: &Arc<Link>, job: &Arc<Job>) -> Offered;

    /// The error of a peer that is gone, if the route has evidence of that. Called when no route took a batch.
    fn peer_loss(&self, _link: &Arc<Link>) -> Option<Error> {
        None
    }

    /// Called when the link has ended.
    fn close(&self, _link: &Link) {}
}

/// The connection to one incarnation of a peer.
pub struct Link {
    /// The agent's state.
    pub core: Arc<Core>,
    /// The peer's address as the user wrote it, for errors.
    pub address: String,
    /// The address that the session connects to, or comes from.
    pub peer_addr: SocketAddr,
    backend: Arc<dyn Backend>,
    /// Routes to the peer, fastest first.
    routes: RwLock<SmallVec<[Arc<dyn Route>; 2]>>,
    /// The reason why there is no faster route.
    obstacle: OnceLock<String>,
    fallbacks: Fallbacks,
    pub(crate) lanes: Lanes,
    pub(crate) messages: MessageQueue,
    /// Transfers of this side and requests of the peer that are in progress.
    in_flight: AtomicUsize,
    /// Number of waits of this side that only the peer's messages can end.
    watches: AtomicUsize,
    /// Processes that copy directly, out of this process's sight. See [`Copying`].
    copying: AtomicUsize,
    /// Set when the control thread has been woken since the link was last idle for a heartbeat interval.
    watched: AtomicBool,
    /// Time at which something was in progress last, on the agent's clock; valid while `watched` is not set.
    used_ns: AtomicU64,
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Link[{}]", self.address)
    }
}

impl Link {
    /// A link without routes. At most `permits_max` large transfers move at the same time.
    pub fn new(
        core: Arc<Core>,
        address: String,
        peer_addr: SocketAddr,
        backend: Arc<dyn Backend>,
        permits_max: usize,
    ) -> Arc<Self> {
        let lanes = Lanes::new(core.sizing.streams_per_peer, permits_max);
        let account = core.peer_memory.account(peer_addr.ip(), Memory::Queued);
        Arc::new(Self {
            core,
            address,
            peer_addr,
            backend,
            routes: RwLock::default(),
            obstacle: OnceLock::new(),
            fallbacks: Fallbacks::default(),
            lanes,
            messages: MessageQueue::new(account),
            in_flight: AtomicUsize::new(0),
            watches: AtomicUsize::new(0),
            copying: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
            used_ns: AtomicU64::new(now().as_nanos()),
        })
    }

    /// The error that the link has ended with; `None` while it is live.
    pub fn end(&self) -> Option<&Error> {
        self.lanes.end()
    }

    // ---- the peer ----

    pub(crate) fn backend(&self) -> &dyn Backend {
        &*self.backend
    }

    pub(crate) fn info(&self) -> Option<&PeerInfo> {
        self.backend.info()
    }

    /// The incarnation of the peer; `None` with peers of another protocol.
    pub(crate) fn incarnation(&self) -> Option<kvferry_proto::Incarnation> {
        self.info().map(|info| info.incarnation)
    }

    /// Whether all frames have keyed tags.
    pub(crate) fn is_keyed(&self) -> bool {
        self.info().is_some_and(|info| info.authenticated)
    }

    pub(crate) fn checksum(&self) -> bool {
        self.info().is_some_and(|info| info.checksum)
    }

    /// Sends a request to the peer; calls `answered` exactly once.
    pub(crate) fn request(&self, kind: u16, body: Vec<u8>, budget: Duration, answered: Answered) {
        self.queue_request(kind, body, budget, answered);
        self.flush();
    }

    /// Queues a request as [`Link::request`] does; it leaves with the next [`Link::flush`].
    pub(crate) fn queue_request(
        &self,
        kind: u16,
        body: Vec<u8>,
        budget: Duration,
        answered: Answered,
    ) {
        self.backend.request(self, kind, body, budget, answered);
    }

    /// Sends the requests that were made, on this thread if the socket takes them.
    pub(crate) fn flush(&self) {
        self.backend.flush(self);
    }

    /// The error with which the session ends or has ended, even if the link has not ended yet.
    pub(crate) fn session_end(&self) -> Option<Error> {
        self.end().cloned().or_else(|| self.backend.closing(self))
    }

    /// Wakes the session's handler on the control thread.
    pub fn wake_control(&self) {
        self.backend.wake(&self.core);
    }

    /// Ends the session from this side, with a goodbye to the peer.
    pub(crate) fn close(&self, code: WireCode, error: Error) {
        self.backend.close(code);
        self.terminate(error);
        self.wake_control();
    }

    /// Ends the link, once: shuts down the lanes and fails everything that waits.
    pub fn terminate(&self, error: Error) {
        let Some((lanes, waiters)) = self.lanes.close(&error) else { return };
        // Not in the head of the loop, which would hold the lock until its end.
        let routes = std::mem::take(&mut *self.routes.write());
        for route in routes {
            route.close(self);
        }
        for lane in lanes {
            lane.socket.reset_on_close();
            lane.socket.shutdown(Shutdown::Both);
            self.core.counters.streams.less_one();
        }
        self.backend.ended();
        self.messages.drop_waiting();
        // Last: a transfer's waker is the user's code and may take its time.
        for give in waiters {
            give(Err(error.clone()));
        }
    }

    // ---- routes ----

    /// Adds a route that is faster than the existing ones.
    pub(crate) fn add_route(&self, route: Arc<dyn Route>) {
        self.routes.write().insert(0, Arc::clone(&route));
        if self.end().is_some() {
            route.close(self);
        }
    }

    /// Records why there is no faster route; later reasons are ignored.
    pub(crate) fn set_obstacle(&self, obstacle: String) {
        let _ = self.obstacle.set(obstacle);
    }

    /// The reason why not every byte takes the fastest route; `None` if the session had no choice.
    pub(crate) fn obstacle(&self) -> Option<String> {
        let of_routes =
            || self.routes.read().iter().find_map(|route| route.obstacle().map(str::to_owned));
        let of_batches = || self.fallbacks.first().map(str::to_owned);
        self.obstacle.get().cloned().or_else(of_routes).or_else(of_batches)
    }

    pub(crate) fn has_routes(&self) -> bool {
        !self.routes.read().is_empty()
    }

    /// The fastest open route, which most bytes take.
    fn main_route(&self) -> Option<Arc<dyn Route>> {
        let routes = self.routes.read();
        let open = || routes.iter().filter(|route| route.is_open());
        open().find(|route| route.obstacle().is_none()).or_else(|| open().next()).map(Arc::clone)
    }

    /// The transport of the fastest open route; `None` once the link has ended.
    pub(crate) fn kind(&self) -> Option<TransportKind> {
        self.main_route().map(|route| route.kind())
    }

    /// The transport of the link's lanes; `None` if it has none.
    pub(crate) fn lane_kind(&self) -> Option<TransportKind> {
        self.routes.read().iter().find(|route| route.uses_lanes()).map(|route| route.kind())
    }

    /// The capabilities of the transport of the fastest open route.
    pub(crate) fn capabilities(&self) -> Option<Capabilities> {
        self.main_route().map(|route| route.transport().capabilities())
    }

    /// Offers a batch to each open route, fastest first, until one accepts it. A batch that goes to a slower route
    /// is counted by the reason.
    pub(crate) fn offer(
        self: &Arc<Self>,
        mut to: impl FnMut(&Arc<dyn Route>) -> Offered,
    ) -> Result<(), Error> {
        let mut obstacle = "no transport is attached";
        let mut left = None;
        for at in 0.. {
            let Some(route) = self.routes.read().get(at).map(Arc::clone) else { break };
            if !route.is_open() {
                obstacle = "the peer's memory is out of reach";
                continue;
            }
            if let Some((why, from)) = left.take() {
                let kinds = (from, route.kind());
                self.fallbacks.count(why, kinds, &self.address, &self.core.counters);
            }
            match to(&route) {
                Offered::Taken => return Ok(()),
                Offered::Elsewhere(why) => {
                    obstacle = why.in_words();
                    left = Some((why, route.kind()));
                }
                Offered::Refused(error) => return Err(error),
            }
        }
        let routes = self.routes.read().clone();
        let lost = routes.iter().find_map(|route| route.peer_loss(self));
        let end = lost.or_else(|| self.session_end());
        Err(end.unwrap_or_else(|| self.no_route(obstacle)))
    }

    /// The error of a batch that no route accepts, or of a peer without any route.
    pub(crate) fn no_route(&self, obstacle: &str) -> Error {
        let obstacle = self.obstacle.get().map_or(obstacle, String::as_str);
        let what = format!("no permitted transport reaches the peer's memory: {obstacle}");
        Error::new(ErrorKind::Unsupported, what).with("peer", &self.address)
    }

    pub(crate) fn run_direct(
        self: &Arc<Self>,
        op: Op,
        batch: &Batch,
        options: &Options<'_>,
        timeout: Duration,
    ) -> Option<Result<TransferStats>> {
        let route = self.routes.read().first().filter(|route| route.is_open()).map(Arc::clone)?;
        route.run_direct(self, op, batch, options, timeout)
    }

    // ---- activity: the heartbeat runs only while something is in progress ----

    /// Something starts. Costs an atomic increment; wakes the control thread only if nothing was in
    /// progress for a heartbeat interval.
    pub(crate) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        self.watch();
    }

    /// Begins a wait of this side for a message of the peer, which ends with [`Link::end_watch`]. Runs the heartbeat as
    /// [`Link::begin`] does. A peer can have this side wait for it, so a watch does not count as use of the session.
    pub(crate) fn begin_watch(&self) {
        self.watches.fetch_add(1, Ordering::SeqCst);
        self.watch();
    }

    pub(crate) fn end_watch(&self) {
        self.watches.fetch_sub(1, Ordering::SeqCst);
    }

    /// Starts the heartbeat; it ends by itself if nothing is in progress.
    pub(crate) fn watch(&self) {
        if !self.watched.swap(true, Ordering::SeqCst) {
            self.wake_control();
        }
    }

    /// Whether something is in progress, or waits for a lane: only a live peer can let this side
    /// open one.
    fn is_moving(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) > 0 || self.lanes.has_waiters()
    }

    /// Whether something is in progress, or waits for the peer.
    fn is_busy(&self) -> bool {
        self.is_moving() || self.watches.load(Ordering::SeqCst) > 0
    }

    /// Whether anything is in progress, as far as this process can see. Without what only waits for messages.
    pub(crate) fn is_in_use(&self) -> bool {
        self.is_moving() || self.copying.load(Ordering::SeqCst) > 0
    }

    /// Whether this side waits for the peer, or anything is in progress.
    pub(crate) fn is_needed(&self) -> bool {
        self.is_busy() || self.is_in_use()
    }

    /// Something that [`Link::begin`] counted has ended.
    pub(crate) fn finish(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// Whether the heartbeat has to run. The control thread calls this about once per interval.
    /// While nothing is in progress, the next transfer wakes the control thread ([`Backend::wake`]).
    pub fn is_active(&self) -> bool {
        if self.is_busy() {
            return true;
        }
        self.was_used();
        self.watched.store(false, Ordering::SeqCst);
        // A `begin` between the two stores saw `watched` set and did not wake this thread; a later
        // one wakes it. So look again.
        if self.is_busy() {
            self.watched.store(true, Ordering::SeqCst);
            return true;
        }
        false
    }

    // ---- lanes; see `lanes` ----

    fn open(self: &Arc<Self>, open: Open) {
        for _ in 0..open.0 {
            self.backend.open_lane(self);
        }
    }

    /// A message crossed the control connection now.
    pub(crate) fn was_used(&self) {
        self.used_ns.store(now().as_nanos(), Ordering::Relaxed);
    }

    /// Whether nothing was in progress for so long that the network may have dropped the
    /// connections. Copies within the host need no connection.
    pub(crate) fn is_idle_for_long(&self) -> bool {
        let used = Timestamp::from_nanos(self.used_ns.load(Ordering::Relaxed));
        self.info().is_some()
            && !self.watched.load(Ordering::SeqCst)
            && now().saturating_since(used) > self.core.settings.idle_max()
            && self.main_route().is_some_and(|route| route.uses_lanes())
    }

    /// Closes lanes that were idle for so long that the network may have dropped them.
    fn close_idle(&self) {
        if self.info().is_some() {
            let closed = self.lanes.take_unused_since(now() - self.core.settings.idle_max());
            closed.iter().for_each(|_| self.core.counters.streams.less_one());
        }
    }

    pub(crate) fn idle_lane(&self, bytes: u64) -> Option<Arc<Lane>> {
        self.close_idle();
        self.lanes.idle(bytes)
    }

    /// See [`Lanes::acquire`].
    pub(crate) fn acquire(
        self: &Arc<Self>,
        bytes: u64,
        deadline: Timestamp,
        give: LaneGiven,
    ) -> u64 {
        let (id, open) = self.lanes.acquire(bytes, deadline, give);
        if id != 0 {
            self.open(open);
            self.watch();
        }
        id
    }

    pub(crate) fn acquire_idle(self: &Arc<Self>, more: usize) -> Vec<Arc<Lane>> {
        self.close_idle();
        let (lanes, open) = self.lanes.acquire_idle(more);
        self.open(open);
        lanes
    }

    pub(crate) fn pass_permit(self: &Arc<Self>, lane: &Lane) {
        let open = self.lanes.pass_permit(lane);
        self.open(open);
    }

    /// Opens the first lane ahead of need.
    pub fn open_ahead(self: &Arc<Self>) {
        self.open(self.lanes.ahead());
    }

    /// A lane that [`Backend::open_lane`] was asked for is open. If the link has ended, the lane is shut down.
    pub fn lane_opened(self: &Arc<Self>, lane: Arc<Lane>) {
        // Before another thread can end the lane.
        self.core.counters.streams.one();
        match self.lanes.opened(lane) {
            Some(open) => self.open(open),
            None => self.core.counters.streams.less_one(),
        }
    }

    /// A lane that [`Backend::open_lane`] was asked for can't be opened: the transfers that wait for one fail,
    /// unless the link has or opens other lanes.
    pub fn lane_failed(&self, error: &Error) {
        self.lanes.failed(error);
    }

    /// Whether a lane is open or being opened, `besides` opening ones not counted.
    pub fn has_lanes(&self, besides: usize) -> bool {
        self.lanes.has_lanes(besides)
    }

    /// Gives back a lane whose last request was answered.
    pub fn put(self: &Arc<Self>, lane: Arc<Lane>) {
        let open = self.lanes.put(lane);
        self.open(open);
    }

    /// Removes a lane that its peer closed. True if no transfer used it.
    pub fn retire(&self, lane: &Lane) -> bool {
        let was_idle = self.lanes.retire(lane);
        if was_idle.is_some() {
            self.core.counters.streams.less_one();
        }
        was_idle == Some(true)
    }

    /// Ends a lane: shuts its gate, resets its socket, and lets another lane replace it.
    ///
    /// Only the lane's copier calls this, so it is not inside the gate, and nothing is waited for. A device may
    /// still copy for it; the copier's share ends after that.
    pub fn kill(self: &Arc<Self>, lane: &Lane) {
        lane.gate.shut();
        self.discard(lane);
    }

    /// Ends a lane whose gate is shut.
    pub(crate) fn discard(self: &Arc<Self>, lane: &Lane) {
        // The last holder closes the socket with a reset: the kernel drops what is still in the
        // send buffer, and the peer's kernel drops what it has received.
        lane.socket.reset_on_close();
        let (removed, open) = self.lanes.kill(lane);
        if removed {
            self.core.counters.streams.less_one();
        }
        self.open(open);
    }

    /// Asks the peer to stop touching memory through these streams.
    pub(crate) fn revoke(&self, streams: Vec<StreamId>, done: RevokeDone) {
        self.backend.revoke(self, streams, done);
    }

    /// Time at which [`Link::expire`] is due.
    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        self.lanes.next_deadline().into_iter().chain(self.backend.next_deadline()).min()
    }

    /// Fails the requests and waiting transfers whose time has passed.
    pub fn expire(&self, now: Timestamp) {
        self.backend.expire(self, now);
        self.lanes.expire(now);
    }
}

/// A process that copies directly belongs to this link's peer. Its link counts as in use until this value is
/// dropped, because its copies are not seen here.
pub(crate) struct Copying(Arc<Link>);

impl Copying {
    pub(crate) fn new(link: Arc<Link>) -> Self {
        link.copying.fetch_add(1, Ordering::SeqCst);
        Self(link)
    }
}

impl Drop for Copying {
    fn drop(&mut self) {
        self.0.copying.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The error for a peer whose address refuses connections.
pub fn unreachable_peer(e: std::io::Error) -> Error {
    Error::new(ErrorKind::Unreachable, "can't connect to the peer").caused_by(e)
}

#[cfg(test)]
pub(crate) mod tests;
