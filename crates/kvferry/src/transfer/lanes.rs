//! The lanes of one link: a pool of connections, and the queue of transfers that wait for one.
//!
//! Lanes are granted first come, first served, to callers and asynchronous transfers alike, so no
//! caller starves another. A small transfer may pass large ones every other time.
//!
//! A transfer of more than [`SMALL_BYTES`] also needs a *permit*. There are as many permits as
//! processors can move bytes at the same time: more transfers would only compete for processors and
//! caches. A permit lasts [`PERMIT_TIME`] at most, so a transfer that waits for a device or a slow
//! peer does not delay the others for long.
//!
//! [`Lanes`] opens no connection and counts no activity: its methods return how many lanes the link
//! should open ([`Open`]), and the link opens them.

use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gate;
use crate::reactor::now;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, OnceLock};
use kvferry_proto::{Guard, StreamId, Timestamp, WireCode};
use kvferry_sys::socket::Socket;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::net::Shutdown;
// For times, which need no memory order.
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// Transfers that may wait for a lane of one link.
const WAITERS_MAX: usize = 65_536;

/// Longest time for which a transfer keeps a permit.
pub(crate) const PERMIT_TIME: Duration = Duration::from_millis(20);

/// The largest transfer that needs no permit, in bytes.
pub(crate) const SMALL_BYTES: u64 = 256 * 1024;

/// Bytes that a lane keeps allocated for the head of its next request.
const HEAD_KEPT: usize = 256 * 1024;

/// A connection that data moves on, used by one transfer at a time.
#[derive(Debug)]
pub struct Lane {
    /// The number of the connection on its link.
    pub id: StreamId,
    /// The connection.
    pub socket: Socket,
    /// The transfer that uses the lane touches memory inside this gate.
    pub gate: Arc<Gate>,
    /// The transfer that uses the lane holds a permit.
    has_permit: AtomicBool,
    head_buffer: Mutex<Vec<u8>>,
    is_keyed: bool,
    /// The keyed tags of heads; `None` while a transfer uses the lane, and if there are none.
    guard: Mutex<Option<Guard>>,
    /// Time at which the lane's last transfer ended, on the agent's clock.
    used_ns: AtomicU64,
}

impl Lane {
    /// A lane over a connection. `guard` is the protection of its frames.
    pub fn new(id: StreamId, socket: Socket, gate: Arc<Gate>, guard: Guard) -> Arc<Self> {
        let (has_permit, head_buffer) = (AtomicBool::new(false), Mutex::default());
        let (is_keyed, used_ns) = (guard.is_keyed(), AtomicU64::new(0));
        let guard = Mutex::new(is_keyed.then_some(guard));
        Arc::new(Self { id, socket, gate, has_permit, head_buffer, is_keyed, guard, used_ns })
    }

    /// The guard, for the transfer that uses the lane from now on.
    ///
    /// # Panics
    /// If another transfer has it: a lane is used by one at a time, and one that ended in the middle
    /// of a request is not used again.
    pub(crate) fn take_guard(&self) -> Guard {
        if !self.is_keyed {
            return Guard::Crc;
        }
        self.guard.lock().take().expect("the last transfer gave the guard back with the lane")
    }

    pub(crate) fn put_guard(&self, guard: Guard) {
        if !self.is_keyed {
            return;
        }
        *self.guard.lock() = Some(guard);
    }

    /// A buffer for the head of a request; it may hold bytes of an earlier request.
    pub(crate) fn take_head_buffer(&self) -> Vec<u8> {
        std::mem::take(&mut *self.head_buffer.lock())
    }

    pub(crate) fn put_head_buffer(&self, buffer: Vec<u8>) {
        if buffer.capacity() <= HEAD_KEPT {
            *self.head_buffer.lock() = buffer;
        }
    }
}

/// Called exactly once, with a lane or with the reason why there will be none.
pub(crate) type LaneGiven = Box<dyn FnOnce(Result<Arc<Lane>>) + Send>;

struct Waiter {
    id: u64,
    deadline: Timestamp,
    give: LaneGiven,
}

/// The transfers that wait for a lane, in the order of their requests.
#[derive(Default)]
struct Waiters {
    /// Transfers that need only a lane.
    small: VecDeque<Waiter>,
    /// Transfers that also need a permit.
    large: VecDeque<Waiter>,
    last: u64,
    /// Set if the transfer that got a lane last passed one that had waited longer.
    passed: bool,
}

impl Waiters {
    fn len(&self) -> usize {
        self.small.len() + self.large.len()
    }

    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn push(&mut self, needs_permit: bool, deadline: Timestamp, give: LaneGiven) -> u64 {
        self.last += 1;
        let queue = if needs_permit { &mut self.large } else { &mut self.small };
        queue.push_back(Waiter { id: self.last, deadline, give });
        self.last
    }

    /// Whether the transfer that gets the next lane needs a permit; `None` if no transfer could use
    /// a lane. It is the first one that lacks only a lane. Every other time a small transfer goes
    /// before large ones, which delays them little.
    fn next_needs_permit(&self, is_permit_free: bool) -> Option<bool> {
        match (self.small.front(), self.large.front().filter(|_| is_permit_free)) {
            (None, None) => None,
            (Some(_), None) => Some(false),
            (None, Some(_)) => Some(true),
            (Some(small), Some(large)) => Some(self.passed && large.id < small.id),
        }
    }

    fn pop(&mut self, needs_permit: bool) -> Option<Waiter> {
        let waited_longer = |other: &VecDeque<Waiter>, id| other.front().is_some_and(|w| w.id < id);
        let waiter = if needs_permit { self.large.pop_front() } else { self.small.pop_front() }?;
        self.passed = !needs_permit && waited_longer(&self.large, waiter.id);
        Some(waiter)
    }

    fn withdraw(&mut self, id: u64) -> Option<Waiter> {
        [&mut self.small, &mut self.large].into_iter().find_map(|queue| {
            // Each queue is sorted by id.
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

    /// Removes the waiters whose deadline has passed.
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

/// The reason for which the peer ended a lane in the middle of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamFault {
    pub(crate) code: WireCode,
    /// The index of the descriptor in its request.
    pub(crate) index: u32,
}

#[derive(Default)]
struct Pool {
    idle: Vec<Arc<Lane>>,
    open: FxHashMap<StreamId, Arc<Lane>>,
    /// Faults of open lanes only.
    faults: FxHashMap<StreamId, StreamFault>,
    opening: usize,
    waiters: Waiters,
    permits_taken: usize,
}

/// Number of lanes that the link should open; the pool already counts them as opening.
#[must_use]
pub(crate) struct Open(pub(crate) usize);

impl Open {
    const NONE: Self = Self(0);
}

/// A link's lanes; see the module.
pub(crate) struct Lanes {
    pool: Mutex<Pool>,
    lanes_max: usize,
    permits_max: usize,
    /// Set under the pool's lock, so no lane is granted afterwards.
    end: OnceLock<Error>,
}

impl Lanes {
    pub(crate) fn new(lanes_max: usize, permits_max: usize) -> Self {
        Self { pool: Mutex::default(), lanes_max, permits_max, end: OnceLock::new() }
    }

    /// The error that ended the pool, after which no lane is granted.
    pub(crate) fn end(&self) -> Option<&Error> {
        self.end.get()
    }

    /// Ends the pool, once: `None` if it has ended before. The caller shuts the lanes down, then
    /// answers the transfers that waited.
    pub(crate) fn close(&self, error: &Error) -> Option<(Vec<Arc<Lane>>, Vec<LaneGiven>)> {
        let mut pool = self.pool.lock();
        self.end.set(error.clone()).ok()?;
        pool.idle.clear();
        let lanes = pool.open.drain().map(|(_, lane)| lane).collect();
        Some((lanes, pool.waiters.take().map(|waiter| waiter.give).collect()))
    }

    /// Takes the lanes out of the pool that were not used since `since`.
    pub(crate) fn take_unused_since(&self, since: Timestamp) -> Vec<Arc<Lane>> {
        let mut pool = self.pool.lock();
        // Idle lanes are in the order in which they were given back.
        let unused = |lane: &Arc<Lane>| lane.used_ns.load(Ordering::Relaxed) < since.as_nanos();
        let n = pool.idle.iter().take_while(|lane| unused(lane)).count();
        let lanes: Vec<_> = pool.idle.drain(..n).collect();
        for lane in &lanes {
            pool.open.remove(&lane.id);
        }
        lanes
    }

    /// An idle lane, if no transfer waits for one; with a permit if a transfer of `bytes` needs
    /// one.
    pub(crate) fn idle(&self, bytes: u64) -> Option<Arc<Lane>> {
        let mut pool = self.pool.lock();
        if !pool.waiters.is_empty() || self.end.get().is_some() {
            return None;
        }
        self.take_idle(&mut pool, bytes > SMALL_BYTES)
    }

    fn take_idle(&self, pool: &mut Pool, needs_permit: bool) -> Option<Arc<Lane>> {
        if needs_permit && pool.permits_taken >= self.permits_max {
            return None;
        }
        let lane = pool.idle.pop()?;
        if needs_permit {
            pool.permits_taken += 1;
            lane.has_permit.store(true, Ordering::Relaxed);
        }
        Some(lane)
    }

    /// Requests a lane for a transfer of `bytes`. If `give` was called before this returns, on this
    /// thread, the returned id is 0; otherwise the id withdraws the request.
    pub(crate) fn acquire(&self, bytes: u64, deadline: Timestamp, give: LaneGiven) -> (u64, Open) {
        let needs_permit = bytes > SMALL_BYTES;
        let mut pool = self.pool.lock();
        let now = if let Some(end) = self.end.get() {
            Some(Err(end.clone()))
        } else if pool.waiters.is_empty()
            && let Some(lane) = self.take_idle(&mut pool, needs_permit)
        {
            Some(Ok(lane))
        } else if pool.waiters.len() >= WAITERS_MAX {
            Some(Err(Error::new(ErrorKind::Busy, "too many transfers wait for this peer")
                .with("waiting", WAITERS_MAX)))
        } else {
            None
        };
        if let Some(answer) = now {
            drop(pool);
            give(answer);
            return (0, Open::NONE);
        }
        let id = pool.waiters.push(needs_permit, deadline, give);
        (id, self.serve(pool))
    }

    /// Grants idle lanes to waiting transfers, in their order, and skips those that need a permit
    /// while all permits are taken.
    fn serve(&self, mut pool: MutexGuard<'_, Pool>) -> Open {
        let mut granted = Vec::new();
        while let Some(needs_permit) = self.next_needs_permit(&pool) {
            let Some(lane) = self.take_idle(&mut pool, needs_permit) else { break };
            let waiter = pool.waiters.pop(needs_permit).expect("next_needs_permit found a waiter");
            granted.push((waiter, lane));
        }
        let open = self.next_needs_permit(&pool).is_some() && self.wants_lane(&mut pool, 1);
        drop(pool);
        for (waiter, lane) in granted {
            (waiter.give)(Ok(lane));
        }
        Open(usize::from(open))
    }

    fn next_needs_permit(&self, pool: &Pool) -> Option<bool> {
        pool.waiters.next_needs_permit(pool.permits_taken < self.permits_max)
    }

    /// Withdraws the expired permit of a lane's transfer; the transfer goes on without it.
    pub(crate) fn pass_permit(&self, lane: &Lane) -> Open {
        if !lane.has_permit.load(Ordering::Relaxed) {
            return Open::NONE;
        }
        let mut pool = self.pool.lock();
        Self::end_permit(&mut pool, lane);
        self.serve(pool)
    }

    fn end_permit(pool: &mut Pool, lane: &Lane) {
        if lane.has_permit.swap(false, Ordering::Relaxed) {
            pool.permits_taken -= 1;
        }
    }

    /// Withdraws a request for a lane. False if it was granted or has failed already.
    pub(crate) fn withdraw(&self, id: u64) -> bool {
        let mut pool = self.pool.lock();
        let withdrawn = pool.waiters.withdraw(id);
        drop(pool);
        withdrawn.is_some()
    }

    /// Takes at most `more` idle lanes for a transfer that has a lane already.
    pub(crate) fn acquire_idle(&self, more: usize) -> (Vec<Arc<Lane>>, Open) {
        let mut pool = self.pool.lock();
        if !pool.waiters.is_empty() || self.end.get().is_some() {
            return (Vec::new(), Open::NONE);
        }
        // The transfer has a permit for its first lane. Each further lane takes a permit, too.
        let n = more.min(pool.idle.len());
        let at = pool.idle.len() - n;
        let lanes = pool.idle.split_off(at);
        pool.permits_taken += n;
        lanes.iter().for_each(|lane| lane.has_permit.store(true, Ordering::Relaxed));
        let missing = more - n;
        let mut opens = 0;
        while opens < missing && self.wants_lane(&mut pool, missing) {
            opens += 1;
        }
        (lanes, Open(opens))
    }

    /// Whether one more lane should be opened for `needed` transfers; if so, counts it as opening.
    fn wants_lane(&self, pool: &mut Pool, needed: usize) -> bool {
        let below_max = pool.open.len() + pool.opening < self.lanes_max;
        let wants = below_max && pool.opening < needed;
        pool.opening += usize::from(wants);
        wants
    }

    /// Opens the first lane ahead of need.
    pub(crate) fn ahead(&self) -> Open {
        let mut pool = self.pool.lock();
        let none = pool.open.is_empty() && pool.opening == 0;
        pool.opening += usize::from(none);
        Open(usize::from(none))
    }

    /// A lane was opened, and goes to the first waiter or becomes idle. `None` if the link has ended;
    /// then the lane is shut down.
    ///
    /// Both under one lock: a transfer that came between would ask for another lane.
    pub(crate) fn opened(&self, lane: Arc<Lane>) -> Option<Open> {
        let mut pool = self.pool.lock();
        pool.opening = pool.opening.saturating_sub(1);
        if self.end.get().is_some() {
            lane.socket.shutdown(Shutdown::Both);
            return None;
        }
        pool.open.insert(lane.id, Arc::clone(&lane));
        Some(self.make_idle(pool, lane))
    }

    /// A lane could not be opened. The waiters fail unless the link has or opens other lanes.
    pub(crate) fn failed(&self, error: &Error) {
        let mut pool = self.pool.lock();
        pool.opening = pool.opening.saturating_sub(1);
        if !pool.open.is_empty() || pool.opening > 0 {
            return;
        }
        let waiters = pool.waiters.take();
        drop(pool);
        for waiter in waiters {
            (waiter.give)(Err(error.clone()));
        }
    }

    /// Takes back a lane whose last request was answered.
    pub(crate) fn put(&self, lane: Arc<Lane>) -> Open {
        let mut pool = self.pool.lock();
        Self::end_permit(&mut pool, &lane);
        match pool.open.contains_key(&lane.id) {
            true => self.make_idle(pool, lane),
            false => self.serve(pool),
        }
    }

    /// Grants an open lane to the first waiter, or keeps it for the next transfer.
    fn make_idle(&self, mut pool: MutexGuard<'_, Pool>, lane: Arc<Lane>) -> Open {
        lane.used_ns.store(now().as_nanos(), Ordering::Relaxed);
        pool.idle.push(lane);
        self.serve(pool)
    }

    /// Keeps the reason that the peer gave for ending a lane, until the lane ends.
    pub(crate) fn note_fault(&self, stream: StreamId, fault: StreamFault) {
        let mut pool = self.pool.lock();
        if pool.open.contains_key(&stream) {
            pool.faults.insert(stream, fault);
        }
    }

    /// The reason that the peer gave for ending a lane.
    pub(crate) fn fault_of(&self, stream: StreamId) -> Option<StreamFault> {
        self.pool.lock().faults.get(&stream).copied()
    }

    /// Removes a lane that its peer closed. `None` if it was removed before, else whether it was
    /// idle. A transfer that uses it notices the end by itself and does not give the lane back.
    pub(crate) fn retire(&self, lane: &Lane) -> Option<bool> {
        let mut pool = self.pool.lock();
        pool.open.remove(&lane.id)?;
        let idle = pool.idle.iter().position(|idle| idle.id == lane.id);
        if let Some(at) = idle {
            pool.idle.remove(at);
        }
        Some(idle.is_some())
    }

    /// Removes a lane whose copier was stopped. True if it was in the pool.
    pub(crate) fn kill(&self, lane: &Lane) -> (bool, Open) {
        let mut pool = self.pool.lock();
        pool.faults.remove(&lane.id);
        let removed = pool.open.remove(&lane.id).is_some();
        Self::end_permit(&mut pool, lane);
        (removed, self.serve(pool))
    }

    /// Whether a lane is open or being opened, `besides` opening ones not counted.
    pub(crate) fn has_lanes(&self, besides: usize) -> bool {
        let pool = self.pool.lock();
        !pool.open.is_empty() || pool.opening > besides
    }

    /// Whether a transfer waits for a lane.
    pub(crate) fn has_waiters(&self) -> bool {
        !self.pool.lock().waiters.is_empty()
    }

    /// The earliest deadline of a waiting transfer.
    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        self.pool.lock().waiters.iter().map(|w| w.deadline).min()
    }

    /// Fails the waiting transfers whose deadline has passed.
    pub(crate) fn expire(&self, now: Timestamp) {
        let late = self.pool.lock().waiters.take_late(now);
        for waiter in late {
            (waiter.give)(Err(Error::new(
                ErrorKind::Deadline,
                "no stream to the peer became free in time",
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(waiters: &mut Waiters, needs_permit: bool, seconds: u64) -> u64 {
        let deadline = Timestamp::default() + Duration::from_secs(seconds);
        waiters.push(needs_permit, deadline, Box::new(|_| {}))
    }

    /// The ids in the order in which they get a lane while permits are free.
    fn served(waiters: &mut Waiters) -> Vec<u64> {
        let mut ids = Vec::new();
        while let Some(needs_permit) = waiters.next_needs_permit(true) {
            ids.push(waiters.pop(needs_permit).expect("next_needs_permit found a waiter").id);
        }
        ids
    }

    #[test]
    fn only_a_small_transfer_passes_large_ones_and_only_every_other_time() {
        let mut waiters = Waiters::default();
        for needs_permit in [true, true, true, false, false, true, false] {
            push(&mut waiters, needs_permit, 1);
        }
        assert_eq!(served(&mut waiters), [4, 1, 5, 2, 7, 3, 6]);
        assert!(waiters.is_empty());
    }

    #[test]
    fn without_a_free_permit_only_small_transfers_go_on() {
        let mut waiters = Waiters::default();
        push(&mut waiters, true, 1);
        assert_eq!(waiters.next_needs_permit(false), None);
        push(&mut waiters, false, 1);
        assert_eq!(waiters.next_needs_permit(false), Some(false));
    }

    #[test]
    fn a_waiter_that_withdraws_or_whose_deadline_passes_is_removed() {
        let mut waiters = Waiters::default();
        for (needs_permit, seconds) in [(true, 9), (false, 3), (true, 3), (false, 9), (true, 9)] {
            push(&mut waiters, needs_permit, seconds);
        }
        let late = waiters.take_late(Timestamp::default() + Duration::from_secs(3));
        assert_eq!(late.iter().map(|w| w.id).collect::<Vec<_>>(), [2, 3]);
        assert!(waiters.withdraw(4).is_some() && waiters.withdraw(4).is_none());
        assert!(waiters.withdraw(3).is_none());
        assert_eq!((served(&mut waiters), waiters.len()), (vec![1, 5], 0));
    }
}
