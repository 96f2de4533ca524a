//! One transfer: what it moves, what became of it, and who is told.
//!
//! A job is driven by one or more *shares*, one per lane. Shares take frames from the job until
//! there are none; whoever ends last concludes the job. A job has exactly one outcome (I1): it is
//! set under the lock, once, and everybody who asks gets a clone of it.
//!
//! A job that ends early first stops its shares. For a write that leaves lanes with bytes under
//! way; those are killed here and revoked at the peer, and the outcome waits for the answer, which
//! the session bounds (I2).

use crate::agent::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::notify::Notification;
use crate::reactor::{Remote, now};
use crate::session::link::Link;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use crate::transfer::batch::{Batch, Cutter, Frame};
use crate::transport::TransportKind;
use kvferry_proto::{Limits, StreamId, Timestamp, TransferId};
use kvferry_sys::poll::EventFd;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::Waker;
use std::time::Duration;

/// Bytes of one frame at most. Between frames, a transfer lets others that wait have its lane.
const FRAME_BYTES_MAX: u64 = 64 << 20;
/// Bytes below which a batch is not divided among lanes.
pub(crate) const STRIPE_BYTES_MIN: u64 = 32 << 20;
/// Bytes below which waking another thread to copy within the host does not pay: a millisecond's.
pub(crate) const COPIER_BYTES_MIN: u64 = 8 << 20;

/// Which way the bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Op {
    Write,
    Read,
}

/// A transfer that is done.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Payload bytes.
    pub bytes: u64,
    /// Pairs of the batch.
    pub descriptors: usize,
    /// Streams that carried them.
    pub streams: usize,
    /// The transport that moved them; `None` for an empty batch.
    pub transport: Option<TransportKind>,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Result<Moved>>,
    /// Shares that have not ended.
    shares: usize,
    /// Lanes used so far.
    streams: usize,
    acknowledged: u64,
    /// Frames may be pending at the peer through these.
    dirty: Vec<StreamId>,
    error: Option<Error>,
    notified: bool,
    /// The peer has not confirmed the notification that follows the data.
    owes_note: bool,
    wakers: Vec<Waker>,
    /// Threads in [`Job::wait`]: without any there is nobody to notify, which costs a call.
    waiting_threads: usize,
    /// Handlers of shares on I/O threads.
    handlers: Vec<(Remote, u64)>,
    /// A wish for a lane that is not granted yet.
    waiting: Option<(Arc<Link>, u64)>,
}

/// One transfer, from submission to outcome.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) core: Arc<Core>,
    pub(crate) id: TransferId,
    pub(crate) op: Op,
    pub(crate) batch: Batch,
    pub(crate) deadline: Timestamp,
    pub(crate) notify: Option<Notification>,
    /// Lanes wished for, if the caller said so.
    pub(crate) streams: Option<usize>,
    /// What moves it, once that is known.
    transport: OnceLock<TransportKind>,
    cutter: Mutex<(Cutter, u64)>,
    state: Mutex<State>,
    changed: Condvar,
    event: OnceLock<EventFd>,
    /// Shares must stop as soon as they can.
    stopped: AtomicBool,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Job {
    pub(crate) fn new(
        core: Arc<Core>,
        op: Op,
        batch: Batch,
        notify: Option<Notification>,
        timeout: Duration,
        streams: Option<usize>,
    ) -> Arc<Self> {
        core.counters.transfers_started.one();
        core.counters.transfers_in_flight.one();
        let cutter = Cutter::new(&batch);
        Arc::new(Self {
            id: core.next_transfer(),
            core,
            op,
            batch,
            deadline: now() + timeout,
            notify,
            streams,
            transport: OnceLock::new(),
            cutter: Mutex::new((cutter, FRAME_BYTES_MAX)),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            event: OnceLock::new(),
            stopped: AtomicBool::new(false),
        })
    }

    /// Lets go of everything but its room. It has ended.
    pub(crate) fn let_go(&mut self) {
        static NOTHING: std::sync::OnceLock<Batch> = std::sync::OnceLock::new();
        self.batch = NOTHING.get_or_init(Batch::new).clone();
        self.notify = None;
        self.event.take();
    }

    /// Makes a job that has ended and was let go another one.
    pub(crate) fn renew(
        &mut self,
        op: Op,
        batch: Batch,
        notify: Option<Notification>,
        timeout: Duration,
        streams: Option<usize>,
    ) {
        self.core.counters.transfers_started.one();
        self.core.counters.transfers_in_flight.one();
        self.id = self.core.next_transfer();
        self.op = op;
        *lock(&self.cutter) = (Cutter::new(&batch), FRAME_BYTES_MAX);
        self.batch = batch;
        self.deadline = now() + timeout;
        self.notify = notify;
        self.streams = streams;
        self.transport.take();
        *lock(&self.state) = State::default();
        self.stopped.store(false, Ordering::Release);
    }

    // ---- for shares ----

    /// Announces `n` shares and sets the size of frames so that they end at about the same time.
    pub(crate) fn start_shares(&self, n: usize, transport: TransportKind) {
        let _ = self.transport.set(transport);
        let mut state = lock(&self.state);
        state.shares += n;
        state.streams += n;
        if n > 1 {
            let least = if self.is_local() { COPIER_BYTES_MIN } else { STRIPE_BYTES_MIN } / 4;
            let fair = (self.batch.bytes() / (4 * n as u64)).max(least);
            lock(&self.cutter).1 = fair.min(FRAME_BYTES_MAX);
        }
    }

    /// The next part to be moved; `None` if there is none or the job is stopping.
    pub(crate) fn next_frame(&self, limits: &Limits) -> Option<Frame> {
        if self.is_stopped() {
            return None;
        }
        let mut cutter = lock(&self.cutter);
        let bytes_max = cutter.1;
        cutter.0.next(&self.batch, bytes_max, limits.descriptors_max)
    }

    /// Whether shares must stop without finishing what they are at.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// A frame is done. Returns the notification if this was the last of a batch whose frames did
    /// not carry it: the caller sends it now.
    pub(crate) fn acknowledged(&self, frame: &Frame) -> Option<Notification> {
        let mut state = lock(&self.state);
        state.acknowledged += frame.bytes;
        let last = state.acknowledged == self.batch.bytes() && state.error.is_none();
        if last && !self.carries_notification(frame) && !state.notified {
            state.notified = true;
            // Where it is a frame of its own, its lane tells whether it arrived.
            state.owes_note = self.notify.is_some() && self.is_local();
            return self.notify.clone();
        }
        None
    }

    /// The notification that followed the data has arrived.
    pub(crate) fn noted(&self) {
        lock(&self.state).owes_note = false;
    }

    /// Whether the notification travels in the same message as a frame. Only with a write that
    /// is one frame: then the peer delivers it when the bytes are in place.
    pub(crate) fn carries_notification(&self, frame: &Frame) -> bool {
        self.op == Op::Write && frame.whole && !self.is_local()
    }

    fn is_local(&self) -> bool {
        self.transport.get() == Some(&TransportKind::Local)
    }

    /// The notification of a job that moves nothing; once.
    pub(crate) fn bare_notification(&self) -> Option<Notification> {
        let mut state = lock(&self.state);
        if !self.batch.is_empty() || state.notified {
            return None;
        }
        state.notified = true;
        self.notify.clone()
    }

    /// The first error decides what the transfer ends with.
    pub(crate) fn fail(&self, error: Error) {
        let handlers = {
            let mut state = lock(&self.state);
            if state.outcome.is_some() {
                return;
            }
            state.error.get_or_insert(error);
            self.stopped.store(true, Ordering::Release);
            state.handlers.clone()
        };
        for (remote, token) in handlers {
            remote.wake(token);
        }
    }

    /// Whether all parts were handed out.
    pub(crate) fn is_handed_out(&self) -> bool {
        lock(&self.cutter).0.is_done()
    }

    /// A share gave its lane to others. True if no other share goes on with the job: the caller
    /// has to wish for a lane again.
    pub(crate) fn share_yielded(&self) -> bool {
        let mut state = lock(&self.state);
        state.shares -= 1;
        state.shares == 0
    }

    /// A share ended. `dirty` is its lane if requests on it may still be under way at the peer;
    /// the share has killed it.
    pub(crate) fn share_ended(self: &Arc<Self>, link: &Arc<Link>, dirty: Option<StreamId>) {
        let mut state = lock(&self.state);
        state.shares -= 1;
        state.dirty.extend(dirty);
        if state.shares > 0 || state.outcome.is_some() {
            return;
        }
        let done = state.acknowledged == self.batch.bytes() && !state.owes_note;
        match (done && state.dirty.is_empty(), state.error.take()) {
            // A stop that comes after everything was acknowledged is too late.
            (true, error) if error.as_ref().is_none_or(|e| is_stop(e.kind())) => {
                let moved = Moved {
                    bytes: self.batch.bytes(),
                    descriptors: self.batch.len(),
                    streams: state.streams,
                    transport: self.transport.get().copied(),
                };
                self.set_outcome(state, Ok(moved));
            }
            (_, error) => {
                let error = error.unwrap_or_else(|| {
                    Error::new(ErrorKind::Internal, "a transfer ended without having moved all")
                });
                let error = error.with("peer", &link.address);
                if state.dirty.is_empty() || self.op == Op::Read {
                    // Nothing of ours is pending at the peer, or what is can only reach a socket
                    // that we closed.
                    self.set_outcome(state, Err(error.with_quiesced(true)));
                    return;
                }
                let dirty = std::mem::take(&mut state.dirty);
                drop(state);
                let job = Arc::clone(self);
                link.revoke(
                    dirty,
                    Box::new(move |confirmed| job.finish(Err(error.with_quiesced(confirmed)))),
                );
            }
        }
    }

    // ---- the outcome ----

    /// Ends the job before any share began, or after its quiesce.
    pub(crate) fn finish(&self, outcome: Result<Moved>) {
        self.set_outcome(lock(&self.state), outcome);
    }

    fn set_outcome(&self, mut state: MutexGuard<'_, State>, outcome: Result<Moved>) {
        if state.outcome.is_some() {
            return;
        }
        let counters = &self.core.counters;
        match &outcome {
            Ok(moved) => {
                counters.transfers_done.one();
                match self.op {
                    Op::Write => counters.bytes_written.add(moved.bytes),
                    Op::Read => counters.bytes_read.add(moved.bytes),
                }
            }
            Err(e) => {
                if is_stop(e.kind()) {
                    counters.transfers_cancelled.one();
                } else {
                    counters.transfers_failed.one();
                }
                if e.quiesced() == Some(false) {
                    counters.transfers_unconfirmed.one();
                }
                tracing::debug!(transfer = %self.id, error = %e, "transfer ended early");
            }
        }
        counters.transfers_in_flight.less_one();
        state.outcome = Some(outcome);
        let wakers = std::mem::take(&mut state.wakers);
        state.handlers.clear();
        state.waiting = None;
        if let Some(event) = self.event.get() {
            event.signal();
        }
        let anybody_waits = state.waiting_threads > 0;
        drop(state);
        if anybody_waits {
            self.changed.notify_all();
        }
        for waker in wakers {
            waker.wake();
        }
    }

    /// The outcome, if there is one.
    pub(crate) fn outcome(&self) -> Option<Result<Moved>> {
        lock(&self.state).outcome.clone()
    }

    /// Waits for the outcome.
    pub(crate) fn wait(&self, timeout: Duration) -> Option<Result<Moved>> {
        let until = now() + timeout;
        let mut state = lock(&self.state);
        loop {
            if let Some(outcome) = &state.outcome {
                return Some(outcome.clone());
            }
            let left = until.saturating_since(now());
            if left.is_zero() {
                return None;
            }
            state.waiting_threads += 1;
            state =
                self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.waiting_threads -= 1;
        }
    }

    /// The outcome, or the waker is kept.
    pub(crate) fn poll(&self, waker: &Waker) -> Option<Result<Moved>> {
        let mut state = lock(&self.state);
        if state.outcome.is_none() && !state.wakers.iter().any(|w| w.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
        state.outcome.clone()
    }

    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        if self.event.get().is_none() {
            let event = EventFd::new()
                .map_err(|e| Error::io("no descriptor for the transfer can be made", e))?;
            let _ = self.event.set(event);
        }
        let event = self.event.get().expect("set above");
        if lock(&self.state).outcome.is_some() {
            event.signal();
        }
        Ok(event.as_fd())
    }

    // ---- stopping ----

    /// Stops the job: shares end as soon as they can, a wish for a lane is withdrawn.
    pub(crate) fn stop(&self, error: Error) {
        self.fail(error);
        // Looked at after that: whoever notes a wish from now on sees the job stopped, and
        // withdraws it by itself.
        let waiting = lock(&self.state).waiting.take();
        if let Some((link, wish)) = waiting
            && link.withdraw(wish)
        {
            self.finish_unstarted();
        }
    }

    /// Ends a job that no share works on, with the error it was stopped by.
    pub(crate) fn finish_unstarted(&self) {
        let mut state = lock(&self.state);
        if state.shares == 0
            && let Some(error) = state.error.take()
        {
            self.set_outcome(state, Err(error.with_quiesced(true)));
        }
    }

    /// Notes that the job waits for a lane; false if it was stopped meanwhile.
    pub(crate) fn waits(&self, link: &Arc<Link>, wish: u64) {
        let withdraw = {
            let mut state = lock(&self.state);
            if wish == 0 || state.shares > 0 || state.outcome.is_some() {
                return;
            }
            state.waiting = Some((Arc::clone(link), wish));
            self.is_stopped()
        };
        if withdraw && link.withdraw(wish) {
            self.finish_unstarted();
        }
    }

    /// Notes which handlers to wake when the job is stopped.
    pub(crate) fn add_handler(&self, remote: &Remote, token: u64) {
        let mut state = lock(&self.state);
        state.handlers.push((remote.clone(), token));
    }
}

/// Kinds that say "somebody stopped it" rather than "it failed".
pub(crate) fn is_stop(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Cancelled | ErrorKind::Deadline | ErrorKind::Interrupted)
}

impl Drop for Job {
    fn drop(&mut self) {
        // Only if an agent was shut down between submission and start: nobody can be waiting,
        // but the gauge must return to zero.
        if lock(&self.state).outcome.is_none() {
            self.finish(Err(Error::new(ErrorKind::Shutdown, "the agent was shut down")));
        }
    }
}
