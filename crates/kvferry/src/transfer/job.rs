//! One transfer: what it moves, its outcome, and the threads that wait for it.
//!
//! A job is driven by one or more *shares*, one per lane. Shares take frames from the job until all
//! are taken; the share that ends last concludes the job. A job has exactly one outcome (I1): it is
//! set under the lock, once, and every query returns a clone of it.
//!
//! A job that ends early first stops its shares. A stopped write can leave lanes with requests in
//! progress; those lanes are closed here and revoked at the peer, and the outcome waits for the
//! peer's confirmation, whose time the session bounds (I2).

use crate::callback::contain;
use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::cursor::Cursor;
use crate::memory::device::Direction;
use crate::memory::gate::Gate;
use crate::memory::stages::Wake;
use crate::notify::Notification;
use crate::reactor::{Cause, Cx, Handler, Next, Remote, now};
use crate::stats::Counters;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use crate::transfer::batch::{Batch, Cutter, Frame, Part, Parts};
use crate::transfer::kind::TransportKind;
use crate::transfer::link::Link;
use crate::transfer::still_moving::StillMoving;
use kvferry_proto::{Limits, StreamId, Timestamp, TransferId};
use kvferry_sys::poll::EventFd;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::task::Waker;
use std::time::Duration;

/// Bytes of one frame at most. Between frames, a transfer can yield its lane to waiting transfers.
const FRAME_BYTES_MAX: u64 = 64 << 20;
/// Bytes below which a batch is not divided among lanes.
pub(crate) const STRIPE_BYTES_MIN: u64 = 32 << 20;

/// Called exactly once, with whether the peer has confirmed a revoke.
pub(crate) type RevokeDone = Box<dyn FnOnce(bool) + Send>;

/// Called once with a job's outcome; see [`Job::on_end`].
pub(crate) struct Callback(pub(crate) Box<dyn FnOnce(Result<TransferStats>) + Send>);

thread_local! {
    /// Set while this thread is inside the callback of a transfer.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
    /// Callbacks that wait until the one that this thread is inside has returned.
    static POSTPONED: RefCell<VecDeque<Postponed>> = const { RefCell::new(VecDeque::new()) };
}

impl Callback {
    /// Calls it now. From within another callback, it is called later, by an I/O thread: a callback that
    /// tries again after each error would otherwise nest until the stack is full.
    fn call(self, core: &Core, outcome: Result<TransferStats>) {
        let postponed = Postponed(Some((self, outcome)));
        if IN_CALLBACK.get() {
            let io = core.threads.io();
            io.add(io.token(), Box::new(postponed));
        } else {
            drop(postponed);
        }
    }

    /// Calls it as the outermost callback of this thread.
    fn call_now(self, outcome: Result<TransferStats>) {
        IN_CALLBACK.set(true);
        contain("the callback of a transfer", || (self.0)(outcome));
        IN_CALLBACK.set(false);
    }
}

/// A callback and its outcome. Dropped, it calls the callback, or leaves that to the callback that this
/// thread is inside: so it is called once also if the I/O thread has ended.
struct Postponed(Option<(Callback, Result<TransferStats>)>);

impl Handler for Postponed {
    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        Next::Close
    }
}

impl Drop for Postponed {
    fn drop(&mut self) {
        let Some((callback, outcome)) = self.0.take() else { return };
        if IN_CALLBACK.get() {
            let again = Self(Some((callback, outcome)));
            POSTPONED.with_borrow_mut(|waiting| waiting.push_back(again));
            return;
        }
        callback.call_now(outcome);
        while let Some(mut next) = POSTPONED.with_borrow_mut(VecDeque::pop_front) {
            if let Some((callback, outcome)) = next.0.take() {
                callback.call_now(outcome);
            }
        }
    }
}

impl std::fmt::Debug for Callback {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Callback")
    }
}

/// The form in which a job's data reaches the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frames {
    /// Data is sent in messages; one of them may carry the notification.
    Messages,
    /// Data is copied. The notification follows it as a separate request, and the job waits for its response.
    Copies {
        /// Bytes below which a further thread does not pay.
        bytes_min: u64,
    },
}

/// The direction in which the bytes move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// From this agent's memory to the peer's.
    Write,
    /// From the peer's memory to this agent's.
    Read,
}

/// Figures of a completed transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransferStats {
    /// Payload bytes.
    pub bytes: u64,
    /// Pairs in the batch.
    pub descriptors: usize,
    /// Lanes or copying threads that moved the bytes.
    pub streams: usize,
    /// The transport that moved the bytes; `None` for an empty batch.
    pub transport: Option<TransportKind>,
}

#[derive(Debug, Default)]
struct State {
    outcome: Option<Result<TransferStats>>,
    /// Shares that have not ended.
    shares: usize,
    /// Lanes used so far.
    streams: usize,
    acknowledged: u64,
    /// Streams on which the peer may still have frames in progress.
    dirty: Vec<StreamId>,
    /// Copies, reads and writes of shares that ended before these did.
    still_moving: Vec<StillMoving>,
    error: Option<Error>,
    notified: bool,
    /// The peer has not confirmed the notification that follows the data.
    owes_note: bool,
    wakers: Vec<Waker>,
    callbacks: Vec<Callback>,
    /// Threads in [`Job::wait`]. If there are none, the outcome skips the system call that wakes
    /// them.
    waiting_threads: usize,
    /// Handlers of the shares on I/O threads.
    handlers: Vec<(Remote, u64)>,
    /// A request for a lane that is not granted yet.
    waiting: Option<(Arc<Link>, u64)>,
}

/// A transfer, from submission to outcome.
#[derive(Debug)]
pub struct Job {
    pub(crate) core: Arc<Core>,
    pub(crate) id: TransferId,
    /// The direction.
    pub op: Op,
    pub(crate) batch: Batch,
    /// The time at which the transfer is stopped.
    pub deadline: Timestamp,
    /// The notification that follows the data.
    pub notify: Option<Notification>,
    /// The number of lanes that the caller asked for.
    pub(crate) streams: Option<usize>,
    /// The transport, once it is chosen.
    moved_by: OnceLock<(TransportKind, Frames)>,
    cutter: Mutex<(Cutter, u64)>,
    state: Mutex<State>,
    changed: Condvar,
    event: OnceLock<EventFd>,
    /// Set when shares must end as soon as they can.
    stopped: AtomicBool,
}

impl Job {
    pub(crate) fn new(
        core: Arc<Core>,
        op: Op,
        batch: Batch,
        notify: Option<Notification>,
        timeout: Duration,
        streams: Option<usize>,
    ) -> Self {
        core.counters.transfers_started.one();
        core.counters.transfers_in_flight.one();
        let cutter = Cutter::new(&batch);
        Self {
            id: core.next_transfer(),
            core,
            op,
            batch,
            deadline: now() + timeout,
            notify,
            streams,
            moved_by: OnceLock::new(),
            cutter: Mutex::new((cutter, FRAME_BYTES_MAX)),
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            event: OnceLock::new(),
            stopped: AtomicBool::new(false),
        }
    }

    /// Drops the batch, the notification and the event of a job that has ended. Its allocation can
    /// take a new job.
    pub(crate) fn release(&mut self) {
        static NOTHING: std::sync::OnceLock<Batch> = std::sync::OnceLock::new();
        self.batch = NOTHING.get_or_init(Batch::new).clone();
        self.notify = None;
        self.event.take();
    }

    // ---- for shares ----

    /// Announces `n` shares and sets the size of frames so that they end at about the same time.
    pub(crate) fn start_shares(&self, n: usize, kind: TransportKind, frames: Frames) {
        let _ = self.moved_by.set((kind, frames));
        let mut state = self.state.lock();
        state.shares += n;
        state.streams += n;
        if n > 1 {
            let least = match frames {
                Frames::Messages => STRIPE_BYTES_MIN,
                Frames::Copies { bytes_min } => bytes_min,
            };
            let fair = (self.batch.bytes() / (4 * n as u64)).max(least / 4);
            self.cutter.lock().1 = fair.min(FRAME_BYTES_MAX);
        }
    }

    /// The next frame; `None` if all are taken or the job is stopping.
    pub fn next_frame(&self, limits: &Limits) -> Option<Frame> {
        if self.is_stopped() {
            return None;
        }
        let mut cutter = self.cutter.lock();
        let bytes_max = cutter.1;
        cutter.0.next(&self.batch, bytes_max, limits.descriptors_max)
    }

    /// The memory of a frame, to be sent or received into. It is touched inside the gate of the share's lane;
    /// memory that was not ready calls `wake` once it may be.
    pub fn cursor(&self, frame: &Frame, gate: &Arc<Gate>, wake: &Wake) -> Cursor {
        let direction = match self.op {
            Op::Write => Direction::Out,
            Op::Read => Direction::In,
        };
        let (pieces, gate, wake) =
            (Arc::clone(&self.batch.local), Arc::clone(gate), Arc::clone(wake));
        Cursor::new(direction, pieces, frame.at, frame.bytes, gate, wake)
    }

    /// Takes the next range of a frame, of at most `bytes_max` bytes; `None` at the end of the frame.
    pub fn next_part(&self, parts: &mut Parts, bytes_max: u64) -> Option<Part> {
        parts.next(&self.batch, bytes_max)
    }

    /// The whole range of a pair of the batch.
    ///
    /// # Panics
    /// If the batch has no such pair.
    pub fn part(&self, pair: usize) -> Part {
        self.batch.part(pair)
    }

    /// Whether shares must end without completing their frame.
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// A frame is complete. Returns the notification if this was the last frame of a batch whose
    /// frames did not carry it: the caller must send it now, and call [`Job::noted`] when the peer has confirmed it.
    pub fn acknowledged(&self, frame: &Frame) -> Option<Notification> {
        let mut state = self.state.lock();
        state.acknowledged += frame.bytes;
        let last = state.acknowledged == self.batch.bytes() && state.error.is_none();
        if last && !self.carries_notification(frame) && !state.notified {
            state.notified = true;
            state.owes_note = self.notify.is_some();
            return self.notify.clone();
        }
        None
    }

    /// The notification of a frame that would carry it follows on a connection of its own: a stop before the peer has
    /// confirmed it is in time.
    pub fn owe_note(&self) {
        self.state.lock().owes_note = true;
    }

    /// The peer has confirmed the notification that followed the data.
    pub fn noted(&self) {
        self.state.lock().owes_note = false;
    }

    /// Whether the notification travels in the message of a frame. This requires a write of a
    /// single frame: then the peer delivers the notification when the bytes are in place.
    pub fn carries_notification(&self, frame: &Frame) -> bool {
        self.op == Op::Write && frame.whole && !self.is_copied()
    }

    fn is_copied(&self) -> bool {
        matches!(self.moved_by.get(), Some((_, Frames::Copies { .. })))
    }

    /// The notification of a job without bytes; `None` on every further call. Its arrival is reported as that of
    /// [`Job::acknowledged`].
    pub fn bare_notification(&self) -> Option<Notification> {
        let mut state = self.state.lock();
        if !self.batch.is_empty() || state.notified {
            return None;
        }
        state.notified = true;
        state.owes_note = self.notify.is_some();
        self.notify.clone()
    }

    /// Records an error and stops the shares. The first error becomes the outcome.
    pub fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        if state.outcome.is_some() {
            return;
        }
        state.error.get_or_insert(error);
        self.stopped.store(true, Ordering::Release);
        let handlers = state.handlers.clone();
        drop(state);
        wake_all(handlers);
    }

    /// Whether all frames were taken.
    pub(crate) fn is_handed_out(&self) -> bool {
        self.cutter.lock().0.is_done()
    }

    /// A share gave its lane to other transfers. True if no other share continues the job: then the
    /// caller has to request a lane again.
    pub fn share_yielded(&self) -> bool {
        let mut state = self.state.lock();
        state.shares -= 1;
        state.shares == 0
    }

    /// A share has ended. `dirty` is its lane if the peer may still have requests of it in
    /// progress; the share has closed it.
    pub fn share_ended(self: &Arc<Self>, link: &Link, dirty: Option<StreamId>) {
        self.end_share(link, dirty, None);
    }

    /// A share of a stopped job has ended although its bytes may still move: a device does not answer.
    pub(crate) fn share_abandoned(
        self: &Arc<Self>,
        link: &Link,
        dirty: Option<StreamId>,
        left: StillMoving,
    ) {
        self.end_share(link, dirty, Some(left));
    }

    /// A share was lost, and the job with it. Stops the shares that have not ended.
    pub(crate) fn share_lost(&self, error: Error, left: StillMoving) {
        let mut state = self.state.lock();
        state.shares -= 1;
        state.still_moving.push(left);
        self.set_outcome(state, Err(error.with_quiesced(false)));
    }

    /// Whether the job has ended, and nothing on this side moves its bytes any more.
    pub(crate) fn is_quiet(&self) -> bool {
        let state = self.state.lock();
        let has_ended = state.outcome.is_some() && state.shares == 0;
        has_ended && state.still_moving.iter().all(StillMoving::is_over)
    }

    fn end_share(
        self: &Arc<Self>,
        link: &Link,
        dirty: Option<StreamId>,
        left: Option<StillMoving>,
    ) {
        let mut state = self.state.lock();
        state.shares -= 1;
        state.still_moving.extend(left);
        state.dirty.extend(dirty);
        if state.shares > 0 || state.outcome.is_some() {
            return;
        }
        let is_quiet = state.still_moving.is_empty();
        let done = state.acknowledged == self.batch.bytes() && !state.owes_note && is_quiet;
        match (done && state.dirty.is_empty(), state.error.take()) {
            // A stop after everything was acknowledged comes too late.
            (true, error) if error.as_ref().is_none_or(|e| is_stop(e.kind())) => {
                let moved = TransferStats {
                    bytes: self.batch.bytes(),
                    descriptors: self.batch.len(),
                    streams: state.streams,
                    transport: self.moved_by.get().map(|(kind, _)| *kind),
                };
                self.set_outcome(state, Ok(moved));
            }
            (_, error) => {
                let error = error.unwrap_or_else(|| {
                    Error::new(
                        ErrorKind::Internal,
                        "a transfer ended before it had moved all bytes",
                    )
                });
                let error = error.with("peer", &link.address);
                if state.dirty.is_empty() || self.op == Op::Read {
                    // The peer has no request of this job in progress, or the bytes of such a
                    // request can only reach a socket that is closed.
                    self.set_outcome(state, Err(error.with_quiesced(is_quiet)));
                    return;
                }
                let dirty = std::mem::take(&mut state.dirty);
                drop(state);
                let job = Arc::clone(self);
                let revoked = move |confirmed| {
                    job.finish(Err(error.with_quiesced(confirmed && is_quiet)));
                };
                link.revoke(dirty, Box::new(revoked));
            }
        }
    }

    // ---- the outcome ----

    /// Ends the job before any share began, after its quiesce, or when a share is lost. Stops the shares that have not
    /// ended.
    pub(crate) fn finish(&self, outcome: Result<TransferStats>) {
        self.set_outcome(self.state.lock(), outcome);
    }

    fn set_outcome(&self, mut state: MutexGuard<'_, State>, outcome: Result<TransferStats>) {
        if state.outcome.is_some() {
            return;
        }
        count_outcome(&self.core.counters, self.op, &outcome);
        if let Err(e) = &outcome {
            tracing::debug!(transfer = %self.id, error = %e, "transfer ended early");
        }
        self.core.counters.transfers_in_flight.less_one();
        let wakers = std::mem::take(&mut state.wakers);
        let callbacks = std::mem::take(&mut state.callbacks);
        let told = (!callbacks.is_empty()).then(|| outcome.clone());
        state.outcome = Some(outcome);
        // Before anything else can look for the outcome: `fail` does not stop a job that has one.
        self.stopped.store(true, Ordering::Release);
        let handlers = std::mem::take(&mut state.handlers);
        let has_shares = state.shares > 0;
        state.waiting = None;
        if let Some(event) = self.event.get() {
            event.signal();
        }
        let anybody_waits = state.waiting_threads > 0;
        drop(state);
        if has_shares {
            wake_all(handlers);
        }
        if anybody_waits {
            self.changed.notify_all();
        }
        for waker in wakers {
            contain("the waker of a transfer", || waker.wake());
        }
        if let Some(outcome) = told {
            for callback in callbacks {
                callback.call(&self.core, outcome.clone());
            }
        }
    }

    /// Has the callback called with the outcome: by the thread that ends the job, or at once if the
    /// job has ended. Within the callback of a transfer, by an I/O thread.
    pub(crate) fn on_end(&self, callback: Callback) {
        let mut state = self.state.lock();
        match state.outcome.clone() {
            None => state.callbacks.push(callback),
            Some(outcome) => {
                drop(state);
                callback.call(&self.core, outcome);
            }
        }
    }

    pub(crate) fn outcome(&self) -> Option<Result<TransferStats>> {
        self.state.lock().outcome.clone()
    }

    pub(crate) fn wait(
        &self,
        timeout: impl Into<Option<Duration>>,
    ) -> Option<Result<TransferStats>> {
        let until = timeout.into().map(|timeout| now() + timeout);
        let mut state = self.state.lock();
        loop {
            if let Some(outcome) = &state.outcome {
                return Some(outcome.clone());
            }
            let left = until.map_or(Duration::MAX, |until| until.saturating_since(now()));
            if left.is_zero() {
                return None;
            }
            state.waiting_threads += 1;
            state = self.changed.wait(state, left);
            state.waiting_threads -= 1;
        }
    }

    /// The outcome; if there is none yet, keeps the waker.
    pub(crate) fn poll(&self, waker: &Waker) -> Option<Result<TransferStats>> {
        let mut state = self.state.lock();
        if state.outcome.is_none() && !state.wakers.iter().any(|w| w.will_wake(waker)) {
            state.wakers.push(waker.clone());
        }
        state.outcome.clone()
    }

    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        if self.event.get().is_none() {
            let event = EventFd::new()
                .map_err(|e| Error::io("the event descriptor of a transfer can't be made", e))?;
            let _ = self.event.set(event);
        }
        let event = self.event.get().expect("set above");
        if self.state.lock().outcome.is_some() {
            event.signal();
        }
        Ok(event.as_fd())
    }

    // ---- stopping ----

    /// Stops the job: shares end as soon as they can, and a request for a lane is withdrawn.
    pub(crate) fn stop(&self, error: Error) {
        self.fail(error);
        // Taken after the job was marked as stopped: a thread that records a request later sees the
        // mark and withdraws the request itself.
        let waiting = self.state.lock().waiting.take();
        if let Some((link, request)) = waiting
            && link.lanes.withdraw(request)
        {
            self.finish_unstarted();
        }
    }

    /// Ends a job without shares, with the error that stopped it.
    pub(crate) fn finish_unstarted(&self) {
        let mut state = self.state.lock();
        if state.shares == 0
            && let Some(error) = state.error.take()
        {
            self.set_outcome(state, Err(error.with_quiesced(true)));
        }
    }

    /// Records the job's request for a lane. Withdraws it if the job was stopped meanwhile.
    pub(crate) fn waits(&self, link: &Arc<Link>, request: u64) {
        let withdraw = {
            let mut state = self.state.lock();
            if request == 0 || state.shares > 0 || state.outcome.is_some() {
                return;
            }
            state.waiting = Some((Arc::clone(link), request));
            self.is_stopped()
        };
        if withdraw && link.lanes.withdraw(request) {
            self.finish_unstarted();
        }
    }

    pub(crate) fn add_handler(&self, remote: &Remote, token: u64) {
        let mut state = self.state.lock();
        state.handlers.push((remote.clone(), token));
    }
}

fn wake_all(handlers: Vec<(Remote, u64)>) {
    for (remote, token) in handlers {
        remote.wake(token);
    }
}

pub(crate) fn count_outcome(counters: &Counters, op: Op, outcome: &Result<TransferStats>) {
    match outcome {
        Ok(moved) => {
            counters.transfers_done.one();
            match op {
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
        }
    }
}

/// Whether an error of this kind means that the caller stopped the transfer.
fn is_stop(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Cancelled | ErrorKind::Deadline | ErrorKind::Interrupted)
}

impl Drop for Job {
    fn drop(&mut self) {
        // Only if the agent was shut down between submission and start. No thread can be waiting,
        // but the gauge must return to zero.
        if self.state.lock().outcome.is_none() {
            self.finish(Err(Error::shutdown()));
        }
    }
}
