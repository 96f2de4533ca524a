//! What lives between this agent and one incarnation of a peer: the session's shared state, and
//! the pool of lanes that data moves on.
//!
//! Lanes are handed out first come, first served, to callers and asynchronous transfers alike, so
//! that no caller starves another (invariant I5 of fairness is a queue, not a lottery); a small
//! transfer may pass large ones every other time.
//!
//! Transfers of more than [`SMALL_BYTES`] also need a *turn*, of which there are as many as
//! processors can move bytes at the same time: more would only take the processor from one another
//! and the bytes from its cache. A turn lasts [`TURN_TIME`] at most, so one that waits for something
//! else than the processor, a device or a slow peer, does not hold up the others for long.
//!
//! When the link ends, every lane's socket is shut down, which wakes whoever waits on one; they
//! find the reason in [`Link::end`].

use crate::agent::{Core, is_on_this_host};
use crate::channel::Mail;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gate;
use crate::reactor::{Remote, now};
use crate::session::control::close_error;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use crate::transfer::batch::Batch;
use crate::transfer::job::{Job, Op};
use crate::transport::local::{LocalPeer, Targets, Unreached};
use crate::transport::{Transport, TransportKind};
use kvferry_proto::{PeerInfo, Session, StreamId, Timestamp, WireCode};
use kvferry_sys::socket::Socket;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::net::{Shutdown, SocketAddr};
use std::time::Duration;

/// Callers that may wait for a lane of one link.
const WAITERS_MAX: usize = 65_536;

/// Ended jobs that are kept to be used again: as many as there are callers at once, about.
const JOBS_KEPT: usize = 16;

/// How long a turn lasts.
pub(crate) const TURN_TIME: Duration = Duration::from_millis(20);

/// Transfers of so many bytes need a lane and nothing else.
pub(crate) const SMALL_BYTES: u64 = 256 * 1024;

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One connection that data moves on, used by one transfer at a time.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) id: StreamId,
    pub(crate) socket: Socket,
    pub(crate) gate: Arc<Gate>,
    /// Whoever has the lane has a turn.
    has_turn: AtomicBool,
    /// Where the head of the next request goes.
    room: Mutex<Vec<u8>>,
}

/// Bytes of room that a lane keeps for the head of its next request.
const ROOM_KEPT: usize = 256 * 1024;

impl Lane {
    pub(crate) fn new(id: StreamId, socket: Socket, gate: Arc<Gate>) -> Arc<Self> {
        let (has_turn, room) = (AtomicBool::new(false), Mutex::default());
        Arc::new(Self { id, socket, gate, has_turn, room })
    }

    /// Room that may have been used before.
    pub(crate) fn take_room(&self) -> Vec<u8> {
        std::mem::take(&mut *lock(&self.room))
    }

    pub(crate) fn put_room(&self, room: Vec<u8>) {
        if room.capacity() <= ROOM_KEPT {
            *lock(&self.room) = room;
        }
    }
}

/// Called with a lane, or with why there is none; exactly once.
pub(crate) type LaneGiven = Box<dyn FnOnce(Result<Arc<Lane>>) + Send>;

struct Waiter {
    id: u64,
    deadline: Timestamp,
    give: LaneGiven,
}

/// Those who wait for a lane, in their order.
#[derive(Default)]
struct Waiters {
    /// They need a lane and nothing else.
    small: VecDeque<Waiter>,
    /// They need a turn, too.
    large: VecDeque<Waiter>,
    last: u64,
    /// The last who got a lane had not waited the longest.
    jumped: bool,
}

impl Waiters {
    fn len(&self) -> usize {
        self.small.len() + self.large.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn push(&mut self, needs_turn: bool, deadline: Timestamp, give: LaneGiven) -> u64 {
        self.last += 1;
        let queue = if needs_turn { &mut self.large } else { &mut self.small };
        queue.push_back(Waiter { id: self.last, deadline, give });
        self.last
    }

    /// Whether who gets the next lane needs a turn; `None` if nobody could go on with a lane. It is
    /// the first who lacks nothing else, but every other time a small transfer may go before large
    /// ones, which it delays by next to nothing.
    fn next_needs_turn(&self, is_turn: bool) -> Option<bool> {
        match (self.small.front(), self.large.front().filter(|_| is_turn)) {
            (None, None) => None,
            (Some(_), None) => Some(false),
            (None, Some(_)) => Some(true),
            (Some(small), Some(large)) => Some(self.jumped && large.id < small.id),
        }
    }

    fn pop(&mut self, needs_turn: bool) -> Option<Waiter> {
        let waited_longer = |other: &VecDeque<Waiter>, id| other.front().is_some_and(|w| w.id < id);
        let waiter = if needs_turn { self.large.pop_front() } else { self.small.pop_front() }?;
        self.jumped = !needs_turn && waited_longer(&self.large, waiter.id);
        Some(waiter)
    }

    fn withdraw(&mut self, id: u64) -> Option<Waiter> {
        [&mut self.small, &mut self.large].into_iter().find_map(|queue| {
            // In the order of their ids.
            let at = queue.binary_search_by_key(&id, |w| w.id).ok()?;
            queue.remove(at)
        })
    }

    fn iter(&self) -> impl Iterator<Item = &Waiter> {
        self.small.iter().chain(&self.large)
    }

    fn take(&mut self) -> impl Iterator<Item = Waiter> + use<> {
        std::mem::take(&mut self.small).into_iter().chain(std::mem::take(&mut self.large))
    }

    /// Those whose time is up.
    fn take_late(&mut self, now: Timestamp) -> Vec<Waiter> {
        let mut late = Vec::new();
        for queue in [&mut self.small, &mut self.large] {
            if queue.iter().any(|w| w.deadline <= now) {
                let (gone, kept): (VecDeque<_>, VecDeque<_>) =
                    std::mem::take(queue).into_iter().partition(|w| w.deadline <= now);
                *queue = kept;
                late.extend(gone);
            }
        }
        late
    }
}

/// Why the peer ended a lane in the middle of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamFault {
    pub(crate) code: WireCode,
    /// Of the descriptor in its request.
    pub(crate) index: u32,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Arc<Lane>>,
    open: FxHashMap<StreamId, Arc<Lane>>,
    /// Of open lanes only.
    faults: FxHashMap<StreamId, StreamFault>,
    opening: usize,
    waiters: Waiters,
    /// Turns that are taken.
    turns: usize,
}

/// A data stream that the peer opened.
#[derive(Debug)]
pub(crate) struct InboundLane {
    /// Gone once the stream has ended.
    pub(crate) socket: Option<Arc<Socket>>,
    pub(crate) gate: Arc<Gate>,
}

/// Called when the peer confirmed a revoke (true) or can't any more (false).
pub(crate) type RevokeDone = Box<dyn FnOnce(bool) + Send>;
/// Called with the answer to a request.
pub(crate) type Answered = Box<dyn FnOnce(WireCode, Vec<u8>) + Send>;

/// The native session of a link.
pub(crate) struct Native {
    pub(crate) session: Mutex<Session>,
    /// The handler of the control connection, on the control thread.
    pub(crate) token: u64,
    pub(crate) info: OnceLock<PeerInfo>,
    pub(crate) inbound: Mutex<FxHashMap<StreamId, InboundLane>>,
    /// Revokes the peer has not confirmed, and until when it may.
    pub(crate) revokes: Mutex<FxHashMap<u64, (Timestamp, RevokeDone)>>,
    pub(crate) requests: Mutex<FxHashMap<u64, Answered>>,
}

/// How a batch moves.
pub(crate) enum Route {
    /// Over lanes.
    Lanes,
    /// By copying within the host.
    Local(Arc<LocalPeer>, Arc<Targets>),
}

/// How further lanes of a link are opened; answers through [`Link::lane_opened`] or
/// [`Link::lane_failed`].
pub(crate) trait OpenLane: Send + Sync {
    fn open_lane(&self, link: &Arc<Link>);
}

/// Everything between this agent and one life of a peer.
pub(crate) struct Link {
    pub(crate) core: Arc<Core>,
    /// As the user wrote it; for errors.
    pub(crate) address: String,
    pub(crate) peer_addr: SocketAddr,
    pub(crate) transport: Arc<dyn Transport>,
    pub(crate) native: Option<Native>,
    pub(crate) mooncake: Option<crate::transport::mooncake::MooncakePeer>,
    /// The peer's memory within reach, if it is on this host.
    local: RwLock<Option<Arc<LocalPeer>>>,
    /// Why it is not, or not all of it.
    obstacle: OnceLock<String>,
    opener: Arc<dyn OpenLane>,
    pool: Mutex<Pool>,
    /// Messages for the peer's correspondent.
    pub(crate) mail: Mail,
    /// Jobs that have ended and nobody has any more.
    ended_jobs: Mutex<Vec<Arc<Job>>>,
    /// Transfers that may move many bytes at the same time.
    turns_max: usize,
    end: OnceLock<Error>,
    /// Transfers (our side) and requests (peer's) that have something under way.
    in_flight: AtomicUsize,
    /// The control thread knows that something was in flight lately.
    watched: AtomicBool,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Link[{} {}]", self.address, self.transport.kind())
    }
}

impl Link {
    pub(crate) fn new(
        core: Arc<Core>,
        address: String,
        peer_addr: SocketAddr,
        transport: Arc<dyn Transport>,
        native: Option<Native>,
        mooncake: Option<crate::transport::mooncake::MooncakePeer>,
        opener: Arc<dyn OpenLane>,
    ) -> Arc<Self> {
        // What a stock Mooncake peer does at its end is not known well enough to ration it.
        let turns_max = native.as_ref().map_or(usize::MAX, |_| core.turns_max(peer_addr));
        Arc::new(Self {
            core,
            address,
            peer_addr,
            transport,
            native,
            mooncake,
            local: RwLock::default(),
            obstacle: OnceLock::new(),
            opener,
            pool: Mutex::new(Pool::default()),
            mail: Mail::default(),
            ended_jobs: Mutex::default(),
            turns_max,
            end: OnceLock::new(),
            in_flight: AtomicUsize::new(0),
            watched: AtomicBool::new(false),
        })
    }

    /// Why the link ended, if it did.
    pub(crate) fn end(&self) -> Option<&Error> {
        self.end.get()
    }

    pub(crate) fn info(&self) -> Option<&PeerInfo> {
        self.native.as_ref().and_then(|n| n.info.get())
    }

    /// The life of the peer this link leads to; none with stock Mooncake peers.
    pub(crate) fn incarnation(&self) -> Option<kvferry_proto::Incarnation> {
        self.info().map(|info| info.incarnation)
    }

    pub(crate) fn checksum(&self) -> bool {
        self.info().is_some_and(|info| info.checksum)
    }

    // ---- the same host ----

    /// Whether the peer's address is this host's.
    pub(crate) fn is_same_host(&self) -> bool {
        is_on_this_host(self.peer_addr)
    }

    pub(crate) fn set_local(&self, peer: &Arc<LocalPeer>) {
        *self.local.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(peer));
        if self.end.get().is_some() {
            self.detach();
        }
    }

    pub(crate) fn set_obstacle(&self, obstacle: String) {
        let _ = self.obstacle.set(obstacle);
    }

    /// Why not everything goes by the fastest way within a host, if the session had the choice.
    pub(crate) fn obstacle(&self) -> Option<&str> {
        self.obstacle.get().map(String::as_str)
    }

    /// The peer's memory, as long as it is within reach.
    pub(crate) fn local(&self) -> Option<Arc<LocalPeer>> {
        let local = self.local.read().unwrap_or_else(PoisonError::into_inner);
        local.as_ref().filter(|peer| peer.is_attached()).map(Arc::clone)
    }

    fn detach(&self) {
        let local = self.local.write().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(peer) = local {
            peer.detach();
            self.control().wake(peer.handler);
        }
    }

    /// How most bytes move.
    pub(crate) fn kind(&self) -> TransportKind {
        let by_number = |peer: &Arc<LocalPeer>| peer.obstacle().is_none();
        if self.local().as_ref().is_some_and(by_number) {
            TransportKind::Local
        } else {
            self.transport.kind()
        }
    }

    /// How a batch moves.
    ///
    /// # Errors
    /// No transport that is allowed reaches it, or the peer would refuse it.
    pub(crate) fn route(self: &Arc<Self>, batch: &Batch, op: Op) -> Result<Route> {
        if batch.is_empty() || self.native.is_none() {
            return Ok(Route::Lanes);
        }
        let obstacle = match self.local().map(|peer| (peer.targets(batch, op), peer)) {
            Some((Ok(targets), peer)) => return Ok(Route::Local(peer, Arc::new(targets))),
            Some((Err(Unreached::Refused { code, pair }), peer)) => {
                return Err(peer.refused(self, batch, code, pair));
            }
            Some((Err(Unreached::Elsewhere), _)) => "a region is not host memory within reach",
            None => "the peer's memory is not within reach",
        };
        if self.core.allows(TransportKind::Tcp) {
            return Ok(Route::Lanes);
        }
        if let Some(end) = self.end() {
            return Err(end.clone());
        }
        let error =
            Error::new(ErrorKind::Unsupported, format!("only local is allowed, and {obstacle}"));
        Err(error.with("peer", &self.address))
    }

    /// A job that has ended, to be used again.
    pub(crate) fn ended_job(&self) -> Option<Arc<Job>> {
        lock(&self.ended_jobs).pop()
    }

    /// Keeps a job that has ended, unless somebody still has it.
    pub(crate) fn keep_job(&self, mut job: Arc<Job>) {
        let Some(alone) = Arc::get_mut(&mut job) else { return };
        alone.let_go();
        let mut kept = lock(&self.ended_jobs);
        if kept.len() < JOBS_KEPT && self.end.get().is_none() {
            kept.push(job);
        }
    }

    fn control(&self) -> &Remote {
        &self.core.control
    }

    /// Has the control thread look at the session.
    pub(crate) fn wake_control(&self) {
        if let Some(native) = &self.native {
            self.control().wake(native.token);
        }
        if let Some(mooncake) = &self.mooncake {
            self.control().wake(mooncake.keeper());
        }
    }

    // ---- activity: the heartbeat runs only while something is in flight ----

    /// Something is under way. Costs an atomic increment; the control thread is woken only when
    /// nothing was under way for a heartbeat's interval.
    pub(crate) fn begin(&self) {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        self.watch();
    }

    fn watch(&self) {
        if !self.watched.swap(true, Ordering::SeqCst) {
            self.wake_control();
        }
    }

    /// Something is under way, or waits for a lane, which the peer may have to let us open.
    fn is_busy(&self) -> bool {
        self.in_flight.load(Ordering::SeqCst) > 0 || self.has_waiters()
    }

    /// The counterpart of [`Link::begin`].
    pub(crate) fn finish(&self) {
        self.in_flight.fetch_sub(1, Ordering::SeqCst);
    }

    /// Control thread: whether the heartbeat has to run. Called about once per interval; when
    /// nothing is in flight, the next [`Link::begin`] wakes the control thread again.
    pub(crate) fn is_active(&self) -> bool {
        if self.is_busy() {
            return true;
        }
        self.watched.store(false, Ordering::SeqCst);
        // A begin between the two: it saw `watched` set and woke nobody, or it will wake us.
        if self.is_busy() {
            self.watched.store(true, Ordering::SeqCst);
            return true;
        }
        false
    }

    // ---- lanes ----

    /// A lane that is idle now, if nobody waits for one; with a turn if so many bytes need one.
    pub(crate) fn idle_lane(&self, bytes: u64) -> Option<Arc<Lane>> {
        let mut pool = lock(&self.pool);
        if !pool.waiters.is_empty() || self.end.get().is_some() {
            return None;
        }
        self.take_idle(&mut pool, bytes > SMALL_BYTES)
    }

    fn take_idle(&self, pool: &mut Pool, needs_turn: bool) -> Option<Arc<Lane>> {
        if needs_turn && pool.turns >= self.turns_max {
            return None;
        }
        let lane = pool.idle.pop()?;
        if needs_turn {
            pool.turns += 1;
            lane.has_turn.store(true, Ordering::Relaxed);
        }
        Some(lane)
    }

    /// Asks for a lane to move so many bytes on. `give` may be called at once, on this thread.
    /// Returns a number to withdraw the wish with.
    pub(crate) fn acquire(
        self: &Arc<Self>,
        bytes: u64,
        deadline: Timestamp,
        give: LaneGiven,
    ) -> u64 {
        let needs_turn = bytes > SMALL_BYTES;
        let mut pool = lock(&self.pool);
        if let Some(end) = self.end.get() {
            let end = end.clone();
            drop(pool);
            give(Err(end));
            return 0;
        }
        if pool.waiters.is_empty()
            && let Some(lane) = self.take_idle(&mut pool, needs_turn)
        {
            drop(pool);
            give(Ok(lane));
            return 0;
        }
        if pool.waiters.len() >= WAITERS_MAX {
            drop(pool);
            give(Err(Error::new(ErrorKind::Busy, "too many transfers wait for this peer")
                .with("peer", &self.address)
                .with("waiting", WAITERS_MAX)));
            return 0;
        }
        let id = pool.waiters.push(needs_turn, deadline, give);
        self.serve(pool);
        self.watch();
        id
    }

    /// Gives idle lanes to those who wait, in their order; who needs a turn is passed over while
    /// there is none. Opens lanes for those who could go on if there were more.
    fn serve(self: &Arc<Self>, mut pool: MutexGuard<'_, Pool>) {
        let mut granted = Vec::new();
        while let Some(needs_turn) = self.next_needs_turn(&pool) {
            let Some(lane) = self.take_idle(&mut pool, needs_turn) else { break };
            let waiter = pool.waiters.pop(needs_turn).expect("there is a next one");
            granted.push((waiter, lane));
        }
        let open = self.next_needs_turn(&pool).is_some() && self.wants_lane(&mut pool, 1);
        drop(pool);
        for (waiter, lane) in granted {
            (waiter.give)(Ok(lane));
        }
        if open {
            self.opener.open_lane(self);
        }
    }

    fn next_needs_turn(&self, pool: &Pool) -> Option<bool> {
        pool.waiters.next_needs_turn(pool.turns < self.turns_max)
    }

    /// The user of a lane has had its turn for as long as one lasts; it goes on without.
    pub(crate) fn pass_turn(self: &Arc<Self>, lane: &Lane) {
        if lane.has_turn.load(Ordering::Relaxed) {
            let mut pool = lock(&self.pool);
            Self::end_turn(&mut pool, lane);
            self.serve(pool);
        }
    }

    fn end_turn(pool: &mut Pool, lane: &Lane) {
        if lane.has_turn.swap(false, Ordering::Relaxed) {
            pool.turns -= 1;
        }
    }

    /// Withdraws a wish. False if it was granted (or failed) already.
    pub(crate) fn withdraw(&self, id: u64) -> bool {
        let mut pool = lock(&self.pool);
        let withdrawn = pool.waiters.withdraw(id);
        drop(pool);
        withdrawn.is_some()
    }

    /// At most `more` lanes that are idle now. Opens further ones for the next time.
    pub(crate) fn acquire_idle(self: &Arc<Self>, more: usize) -> Vec<Arc<Lane>> {
        let mut pool = lock(&self.pool);
        if !pool.waiters.is_empty() || self.end.get().is_some() {
            return Vec::new();
        }
        // They belong to a transfer that has its turn, and count as much as others' do.
        let n = more.min(pool.idle.len());
        let at = pool.idle.len() - n;
        let lanes = pool.idle.split_off(at);
        pool.turns += n;
        lanes.iter().for_each(|lane| lane.has_turn.store(true, Ordering::Relaxed));
        let missing = more - n;
        let mut opens = 0;
        while opens < missing && self.wants_lane(&mut pool, missing) {
            opens += 1;
        }
        drop(pool);
        for _ in 0..opens {
            self.opener.open_lane(self);
        }
        lanes
    }

    /// Whether one more lane should be opened for so many who need one; counts it as being
    /// opened.
    fn wants_lane(&self, pool: &mut Pool, needed: usize) -> bool {
        let room = pool.open.len() + pool.opening < self.core.streams_per_peer;
        let needed = pool.opening < needed;
        if room && needed {
            pool.opening += 1;
        }
        room && needed
    }

    /// Opens one lane ahead of need.
    pub(crate) fn open_ahead(self: &Arc<Self>) {
        let open = {
            let mut pool = lock(&self.pool);
            let none = pool.open.is_empty() && pool.opening == 0;
            if none {
                pool.opening = 1;
            }
            none
        };
        if open {
            self.opener.open_lane(self);
        }
    }

    /// A lane that was asked for is there.
    pub(crate) fn lane_opened(self: &Arc<Self>, lane: Arc<Lane>) {
        let mut pool = lock(&self.pool);
        pool.opening = pool.opening.saturating_sub(1);
        if self.end.get().is_some() {
            lane.socket.shutdown(Shutdown::Both);
            return;
        }
        pool.open.insert(lane.id, Arc::clone(&lane));
        drop(pool);
        self.core.counters.streams.one();
        self.put(lane);
    }

    /// A lane that was asked for can't be had.
    pub(crate) fn lane_failed(self: &Arc<Self>, error: &Error) {
        let mut pool = lock(&self.pool);
        pool.opening = pool.opening.saturating_sub(1);
        if !pool.open.is_empty() || pool.opening > 0 {
            // Those who wait get one of the others.
            return;
        }
        let waiters = pool.waiters.take();
        drop(pool);
        for waiter in waiters {
            (waiter.give)(Err(error.clone()));
        }
    }

    /// Gives back a lane whose last request was answered.
    pub(crate) fn put(self: &Arc<Self>, lane: Arc<Lane>) {
        let mut pool = lock(&self.pool);
        Self::end_turn(&mut pool, &lane);
        if pool.open.contains_key(&lane.id) {
            pool.idle.push(lane);
        }
        self.serve(pool);
    }

    /// The peer said why it is about to end a lane.
    pub(crate) fn note_fault(&self, stream: StreamId, fault: StreamFault) {
        let mut pool = lock(&self.pool);
        if pool.open.contains_key(&stream) {
            pool.faults.insert(stream, fault);
        }
    }

    /// Why the peer ended a lane, if it said so.
    pub(crate) fn fault_of(&self, stream: StreamId) -> Option<StreamFault> {
        lock(&self.pool).faults.get(&stream).copied()
    }

    /// Takes a lane out of the pool because its peer closed it; whoever uses it finds out, and
    /// does not give it back. True if nobody used it.
    pub(crate) fn retire(&self, lane: &Lane) -> bool {
        let mut pool = lock(&self.pool);
        if pool.open.remove(&lane.id).is_none() {
            return false;
        }
        let idle = pool.idle.iter().position(|idle| idle.id == lane.id);
        if let Some(at) = idle {
            pool.idle.remove(at);
        }
        drop(pool);
        self.core.counters.streams.less_one();
        idle.is_some()
    }

    /// Whether there is a lane, or will be one soon, besides so many that are being opened.
    pub(crate) fn has_lanes(&self, besides: usize) -> bool {
        let pool = lock(&self.pool);
        !pool.open.is_empty() || pool.opening > besides
    }

    /// Whether somebody waits for a lane.
    pub(crate) fn has_waiters(&self) -> bool {
        !lock(&self.pool).waiters.is_empty()
    }

    /// Ends a lane: its copier is stopped, its socket reset, and another may take its place.
    pub(crate) fn kill(self: &Arc<Self>, lane: &Lane) {
        lane.gate.shut_and_wait();
        // Closed with a reset when its last user lets go: what is still in the send buffer is
        // dropped, and the peer is told to drop what it has received.
        lane.socket.reset_on_close();
        let mut pool = lock(&self.pool);
        pool.faults.remove(&lane.id);
        if pool.open.remove(&lane.id).is_some() {
            self.core.counters.streams.less_one();
        }
        Self::end_turn(&mut pool, lane);
        self.serve(pool);
    }

    /// When the first of those who wait for a lane, or for the peer to confirm a revoke, gives up.
    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        let lane = lock(&self.pool).waiters.iter().map(|w| w.deadline).min();
        let revokes = self.native.as_ref().map(|native| lock(&native.revokes));
        let revoke = revokes.and_then(|revokes| revokes.values().map(|(until, _)| *until).min());
        lane.into_iter().chain(revoke).min()
    }

    /// Lets those whose time is up give up.
    pub(crate) fn expire(&self, now: Timestamp) {
        self.expire_revokes(now);
        self.expire_waiters(now);
    }

    fn expire_revokes(&self, now: Timestamp) {
        let Some(native) = &self.native else { return };
        let late: Vec<_> =
            lock(&native.revokes).extract_if(|_, (until, _)| *until <= now).collect();
        for (id, (_, done)) in late {
            // Alive, but a copy on its side does not end: a device is stuck.
            tracing::warn!(peer = %self.address, revoke = id, "the peer does not confirm a revoke");
            done(false);
        }
    }

    fn expire_waiters(&self, now: Timestamp) {
        let late = lock(&self.pool).waiters.take_late(now);
        for waiter in late {
            (waiter.give)(Err(Error::new(
                ErrorKind::Deadline,
                "no stream to the peer became free in time",
            )
            .with("peer", &self.address)));
        }
    }

    // ---- the session ----

    /// Asks the peer to stop touching memory through these streams; `done` is called exactly
    /// once, with whether it confirmed. A peer whose copier does not stop within the silence
    /// limit has not confirmed.
    pub(crate) fn revoke(&self, streams: Vec<StreamId>, done: RevokeDone) {
        let Some(native) = &self.native else { return done(false) };
        let id = {
            let mut session = lock(&native.session);
            let mut revokes = lock(&native.revokes);
            let id = if self.end.get().is_some() { 0 } else { session.revoke(streams, now()) };
            if id != 0 {
                revokes.insert(id, (now() + self.core.config.silence(), done));
                drop(revokes);
                drop(session);
                self.wake_control();
                return;
            }
            id
        };
        debug_assert_eq!(id, 0);
        done(false);
    }

    /// Asks the peer something; `answered` is called exactly once.
    pub(crate) fn request(&self, kind: u16, body: Vec<u8>, budget: Duration, answered: Answered) {
        let Some(native) = &self.native else { return answered(WireCode::Unsupported, Vec::new()) };
        {
            let mut session = lock(&native.session);
            let mut requests = lock(&native.requests);
            let id = if self.end.get().is_some() {
                0
            } else {
                session.request(kind, body, budget, now())
            };
            if id != 0 {
                requests.insert(id, answered);
                drop(requests);
                drop(session);
                self.wake_control();
                return;
            }
        }
        answered(WireCode::Closed, Vec::new());
    }

    /// Why the session is over, or ending, which the link may not know yet.
    pub(crate) fn session_end(&self) -> Option<Error> {
        self.end().cloned().or_else(|| {
            let session = lock(&self.native.as_ref()?.session);
            Some(close_error(&session.close_reason()?, &self.address))
        })
    }

    /// Ends the session in order, from our side.
    pub(crate) fn close(self: &Arc<Self>, error: Error) {
        if let Some(native) = &self.native {
            lock(&native.session).close(WireCode::Closed, "", now());
        }
        self.core.remove_session(self);
        self.terminate(error);
        self.wake_control();
    }

    /// Ends the link, once: lanes are shut down, everybody who waits is told.
    pub(crate) fn terminate(&self, error: Error) {
        let mut pool = lock(&self.pool);
        if self.end.set(error.clone()).is_err() {
            return;
        }
        let waiters = pool.waiters.take();
        pool.idle.clear();
        let lanes: Vec<_> = pool.open.drain().map(|(_, lane)| lane).collect();
        drop(pool);
        self.detach();
        lock(&self.ended_jobs).clear();
        for lane in lanes {
            lane.socket.reset_on_close();
            lane.socket.shutdown(Shutdown::Both);
            self.core.counters.streams.less_one();
        }
        if let Some(native) = &self.native {
            let inbound: Vec<_> = lock(&native.inbound).drain().collect();
            for (_, lane) in inbound {
                lane.gate.shut();
                if let Some(socket) = lane.socket {
                    socket.shutdown(Shutdown::Both);
                }
            }
            let revokes: Vec<_> = lock(&native.revokes).drain().collect();
            for (_, (_, done)) in revokes {
                done(false);
            }
            let requests: Vec<_> = lock(&native.requests).drain().collect();
            for (_, answered) in requests {
                answered(WireCode::Closed, Vec::new());
            }
        }
        for waiter in waiters {
            (waiter.give)(Err(error.clone()));
        }
    }
}

impl Link {
    /// An inbound stream ended; its gate is shut. While a device still copies for it, the gate
    /// stays known, so that a revoke that comes after the reset is confirmed only afterwards.
    pub(crate) fn forget_inbound(&self, id: StreamId) {
        if let Some(native) = &self.native {
            let mut inbound = lock(&native.inbound);
            if let Some(lane) = inbound.get_mut(&id) {
                lane.socket = None;
            }
            inbound.retain(|_, lane| lane.socket.is_some() || !lane.gate.is_quiet());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(waiters: &mut Waiters, needs_turn: bool, seconds: u64) -> u64 {
        let deadline = Timestamp::default() + Duration::from_secs(seconds);
        waiters.push(needs_turn, deadline, Box::new(|_| {}))
    }

    /// The ids in the order in which they get a lane, while there is a turn for everybody.
    fn served(waiters: &mut Waiters) -> Vec<u64> {
        let mut ids = Vec::new();
        while let Some(needs_turn) = waiters.next_needs_turn(true) {
            ids.push(waiters.pop(needs_turn).expect("there is a next one").id);
        }
        ids
    }

    #[test]
    fn a_small_one_passes_large_ones_every_other_time_and_nobody_else_passes_anybody() {
        let mut waiters = Waiters::default();
        for needs_turn in [true, true, true, false, false, true, false] {
            push(&mut waiters, needs_turn, 1);
        }
        assert_eq!(served(&mut waiters), [4, 1, 5, 2, 7, 3, 6]);
        assert!(waiters.is_empty());
    }

    #[test]
    fn without_a_turn_only_small_ones_go_on() {
        let mut waiters = Waiters::default();
        push(&mut waiters, true, 1);
        assert_eq!(waiters.next_needs_turn(false), None);
        push(&mut waiters, false, 1);
        assert_eq!(waiters.next_needs_turn(false), Some(false));
    }

    #[test]
    fn who_withdraws_or_is_late_is_gone() {
        let mut waiters = Waiters::default();
        for (needs_turn, seconds) in [(true, 9), (false, 3), (true, 3), (false, 9), (true, 9)] {
            push(&mut waiters, needs_turn, seconds);
        }
        let late = waiters.take_late(Timestamp::default() + Duration::from_secs(3));
        assert_eq!(late.iter().map(|w| w.id).collect::<Vec<_>>(), [2, 3]);
        assert!(waiters.withdraw(4).is_some() && waiters.withdraw(4).is_none());
        assert!(waiters.withdraw(3).is_none());
        assert_eq!((served(&mut waiters), waiters.len()), (vec![1, 5], 0));
    }
}
