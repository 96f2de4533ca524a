//! The two ways a transfer is moved on: by the caller's own thread, or by the I/O threads.

use crate::agent::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::device::Wake;
use crate::reactor::{Cause, Cx, Handler, LINGER, Next, now};
use crate::session::link::{Lane, Link, Route, TURN_TIME};
use crate::sync::{Arc, Condvar, Mutex, PoisonError};
use crate::transfer::Options;
use crate::transfer::batch::Batch;
use crate::transfer::job::{COPIER_BYTES_MIN, Job, Moved, Op, STRIPE_BYTES_MIN, is_stop};
use crate::transport::local::{LocalShare, copy_all};
use crate::transport::{Drive, Moving, Progress, TransportKind};
use kvferry_proto::Timestamp;
use kvferry_sys::poll::{self, EventFd, Interest};
use smallvec::SmallVec;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// How often a blocked caller is asked whether it was interrupted.
pub(crate) const INTERRUPT_EVERY: Duration = Duration::from_millis(100);

/// Whether the caller wants to stop.
pub(crate) type Interrupt<'a> = Option<&'a (dyn Fn() -> bool + Sync)>;

fn interrupted() -> Error {
    Error::new(ErrorKind::Interrupted, "the caller was interrupted")
}

fn deadline_passed() -> Error {
    Error::new(ErrorKind::Deadline, "the transfer did not end in time")
}

/// What ends a call early: its deadline, or its caller.
pub(crate) struct Watch<'a> {
    deadline: Timestamp,
    interrupt: Interrupt<'a>,
    asked: Timestamp,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(deadline: Timestamp, interrupt: Interrupt<'a>, now: Timestamp) -> Self {
        Self { deadline, interrupt, asked: now }
    }

    pub(crate) fn check(&mut self, now: Timestamp) -> Result<()> {
        if now >= self.deadline {
            return Err(deadline_passed());
        }
        if let Some(asked) = self.interrupt
            && now.saturating_since(self.asked) >= INTERRUPT_EVERY
        {
            self.asked = now;
            if asked() {
                return Err(interrupted());
            }
        }
        Ok(())
    }
}

/// A value that another thread puts in.
pub(crate) struct Slot<T> {
    value: Mutex<Option<T>>,
    filled: Condvar,
}

impl<T> Slot<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { value: Mutex::new(None), filled: Condvar::new() })
    }

    pub(crate) fn fill(&self, value: T) {
        *self.value.lock().unwrap_or_else(PoisonError::into_inner) = Some(value);
        self.filled.notify_one();
    }

    /// Waits for the value; an error if time is up or the caller was interrupted.
    pub(crate) fn wait(&self, deadline: Timestamp, interrupt: Interrupt<'_>) -> Result<T> {
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(value) = value.take() {
                return Ok(value);
            }
            let left = deadline.saturating_since(now());
            if left.is_zero() {
                return Err(deadline_passed());
            }
            let step = if interrupt.is_some() { left.min(INTERRUPT_EVERY) } else { left };
            value = self.filled.wait_timeout(value, step).unwrap_or_else(PoisonError::into_inner).0;
            if value.is_none() && interrupt.is_some_and(|asked| asked()) {
                return Err(interrupted());
            }
        }
    }
}

/// How many lanes a job should be divided among.
pub(crate) fn lanes_wanted(job: &Job) -> usize {
    let by_size = job.batch.bytes() / STRIPE_BYTES_MIN;
    shares(&job.core, by_size, job.core.stripe_default, job.streams)
}

/// How many threads should copy a job within the host, the caller's own included.
fn copiers_wanted(job: &Job) -> usize {
    copiers_for(&job.core, job.batch.bytes(), job.streams)
}

/// How many threads should copy so many bytes within the host, the caller's own included.
fn copiers_for(core: &Core, bytes: u64, streams: Option<usize>) -> usize {
    shares(core, bytes / COPIER_BYTES_MIN, core.copiers_default, streams)
}

fn shares(core: &Core, by_size: u64, default: usize, wished: Option<usize>) -> usize {
    let by_default = usize::try_from(by_size).unwrap_or(usize::MAX).min(default);
    wished.unwrap_or(by_default).clamp(1, core.streams_per_peer)
}

/// The lanes a job is divided among: the one it has, and idle ones.
fn lanes_for(job: &Job, link: &Arc<Link>, first: Arc<Lane>) -> SmallVec<[Arc<Lane>; 1]> {
    let mut lanes = SmallVec::from_buf([first]);
    let wanted = lanes_wanted(job);
    if wanted > 1 {
        lanes.extend(link.acquire_idle(wanted - 1));
    }
    lanes
}

/// Copies a batch within the host on the caller's thread, without a job; `None` if it takes more
/// than that: a notification, device memory, several threads, another transport.
pub(crate) fn run_direct(
    link: &Arc<Link>,
    op: Op,
    batch: &Batch,
    options: &Options<'_>,
    timeout: Duration,
) -> Option<Result<Moved>> {
    let peer = link.local()?;
    if options.notify.is_some()
        || copiers_for(&link.core, batch.bytes(), options.streams) > 1
        || !batch.local.all_host()
    {
        return None;
    }
    let at = now();
    let watch = Watch::new(at + timeout, options.interrupt, at);
    let counters = &link.core.counters;
    counters.transfers_in_flight.one();
    let copied = copy_all(link, &peer, op, batch, watch, nobody());
    counters.transfers_in_flight.less_one();
    let copied = copied?;
    counters.transfers_started.one();
    let bytes = batch.bytes();
    Some(match copied {
        Ok(()) => {
            counters.transfers_done.one();
            match op {
                Op::Write => counters.bytes_written.add(bytes),
                Op::Read => counters.bytes_read.add(bytes),
            }
            let transport = Some(TransportKind::Local);
            Ok(Moved { bytes, descriptors: batch.len(), streams: 1, transport })
        }
        Err(e) => {
            if is_stop(e.kind()) {
                counters.transfers_cancelled.one();
            } else {
                counters.transfers_failed.one();
            }
            // The copier was this thread.
            Err(e.with("peer", &link.address).with_quiesced(true))
        }
    })
}

/// Moves a job on the caller's thread until it has its outcome, or on an I/O thread where others
/// are before it: a thread that has just moved something goes on at once, where one that waits
/// would have to be woken, and would push another off its processor.
pub(crate) fn run(job: &Arc<Job>, link: &Arc<Link>, interrupt: Interrupt<'_>) -> Result<Moved> {
    match link.route(&job.batch, job.op) {
        Ok(Route::Lanes) => {}
        Ok(Route::Local(peer, targets)) => {
            let copiers = copiers_wanted(job);
            job.start_shares(copiers, TransportKind::Local);
            for _ in 1..copiers {
                background(job, link, None, |wake| {
                    Moving::Local(LocalShare::new(link, &peer, job, &targets, wake))
                });
            }
            drive(job, link, &[], interrupt, |wake| {
                let share = LocalShare::new(link, &peer, job, &targets, Arc::clone(wake));
                SmallVec::from_buf([Share::new(Moving::Local(share))])
            });
            return outcome(job, interrupt);
        }
        Err(e) => {
            job.finish(Err(e.with_quiesced(true)));
            return outcome(job, interrupt);
        }
    }
    let Some(first) = link.idle_lane(job.batch.bytes()) else {
        submit_to_lanes(job, link);
        return outcome(job, interrupt);
    };
    let lanes = lanes_for(job, link, first);
    link.begin();
    job.start_shares(lanes.len(), link.transport.kind());
    let yielded = drive(job, link, &lanes, interrupt, |wake| {
        let share =
            |lane| Share::new(link.transport.drive(link, lane, Arc::clone(job), Arc::clone(wake)));
        lanes.iter().map(Arc::clone).map(share).collect()
    });
    if yielded {
        submit_to_lanes(job, link);
    }
    let outcome = outcome(job, interrupt);
    link.finish();
    outcome
}

/// Moves the shares of a job on until they have ended; true if the last of them yielded.
fn drive(
    job: &Arc<Job>,
    link: &Arc<Link>,
    lanes: &[Arc<Lane>],
    interrupt: Interrupt<'_>,
    shares: impl FnOnce(&Wake) -> SmallVec<[Share; 1]>,
) -> bool {
    let may_be_woken = !job.batch.local.all_host() || (lanes.is_empty() && job.notify.is_some());
    let bell = may_be_woken.then(EventFd::new).transpose();
    let bell = match bell {
        Ok(bell) => bell.map(Arc::new),
        Err(e) => {
            job.fail(Error::io("no descriptor for the transfer can be made", e));
            None
        }
    };
    let wake: Wake = match &bell {
        Some(bell) => {
            let bell = Arc::clone(bell);
            Arc::new(move || bell.signal())
        }
        None => nobody(),
    };
    let mut shares = shares(&wake);
    let mut at = now();
    let mut asked = at;
    let mut turn_until = (!lanes.is_empty()).then(|| at + TURN_TIME);
    let mut yielded = false;
    let mut lingering: Option<Timestamp> = None;
    loop {
        if at >= job.deadline && !job.is_stopped() {
            job.stop(deadline_passed());
        }
        if turn_until.is_some_and(|until| at >= until) {
            turn_until = None;
            lanes.iter().for_each(|lane| link.pass_turn(lane));
        }
        if interrupt.is_some() && at.saturating_since(asked) >= INTERRUPT_EVERY {
            asked = at;
            if interrupt.is_some_and(|asked| asked()) {
                job.stop(interrupted());
            }
        }
        shares.retain_mut(|share| {
            share.last = share.drive.progress(at);
            yielded |= share.last == Progress::Yielded;
            !matches!(share.last, Progress::Done | Progress::Yielded)
        });
        if shares.is_empty() {
            return yielded;
        }
        if shares.iter().any(|share| share.last == Progress::Again) {
            lingering = None;
        } else if let [Share { last: Progress::Wait(Interest::Read), .. }] = &shares[..]
            && at.saturating_since(*lingering.get_or_insert(at)) < LINGER
        {
            // An answer is due: looking is cheaper than waking up.
            std::thread::yield_now();
        } else {
            lingering = None;
            wait(job, &shares, bell.as_deref(), turn_until, interrupt.is_some());
        }
        at = now();
    }
}

struct Share {
    drive: Moving,
    last: Progress,
}

impl Share {
    fn new(drive: Moving) -> Self {
        Self { drive, last: Progress::Memory }
    }
}

fn nobody() -> Wake {
    static NOBODY: std::sync::OnceLock<Wake> = std::sync::OnceLock::new();
    Arc::clone(NOBODY.get_or_init(|| Arc::new(|| {})))
}

/// Waits until a share can go on.
fn wait(job: &Job, shares: &[Share], bell: Option<&EventFd>, until: Option<Timestamp>, ask: bool) {
    let at = now();
    let until = until.map_or(job.deadline, |until| until.min(job.deadline));
    let mut timeout = until.saturating_since(at);
    if job.is_stopped() {
        // A share that could not stop at once looks again soon.
        timeout = Duration::from_millis(1);
    }
    if ask {
        timeout = timeout.min(INTERRUPT_EVERY);
    }
    for share in shares {
        if let Some(check) = share.drive.check_at() {
            timeout = timeout.min(check.saturating_since(at));
        }
    }
    let result = match (shares, bell) {
        ([share], None) => {
            let (Progress::Wait(interest), Some(fd)) = (share.last, share.drive.fd()) else {
                return;
            };
            poll::wait_one(fd, interest, Some(timeout)).map(drop)
        }
        _ => {
            let mut fds: Vec<(BorrowedFd<'_>, Interest)> = Vec::with_capacity(shares.len() + 1);
            for share in shares {
                if let (Progress::Wait(interest), Some(fd)) = (share.last, share.drive.fd()) {
                    fds.push((fd, interest));
                }
            }
            if let Some(bell) = bell {
                fds.push((bell.as_fd(), Interest::Read));
            }
            let result = poll::wait_any(&fds, Some(timeout)).map(drop);
            if let Some(bell) = bell {
                bell.clear();
            }
            result
        }
    };
    if let Err(e) = result {
        job.fail(Error::io("waiting for the network failed", e));
    }
}

/// Waits for the outcome of a job whose shares have ended: a quiesce may be under way, which the
/// session bounds.
fn outcome(job: &Job, interrupt: Interrupt<'_>) -> Result<Moved> {
    loop {
        if let Some(outcome) = job.wait(INTERRUPT_EVERY) {
            return outcome;
        }
        // An impatient user presses Ctrl-C twice: the check runs, the quiesce goes on.
        if interrupt.is_some_and(|asked| asked()) {
            job.stop(interrupted());
        }
    }
}

/// Has I/O threads move a job on.
pub(crate) fn submit(job: &Arc<Job>, link: &Arc<Link>) {
    if job.is_stopped() {
        job.finish_unstarted();
        return;
    }
    match link.route(&job.batch, job.op) {
        Ok(Route::Lanes) => submit_to_lanes(job, link),
        Ok(Route::Local(peer, targets)) => {
            let copiers = copiers_wanted(job);
            job.start_shares(copiers, TransportKind::Local);
            for _ in 0..copiers {
                background(job, link, None, |wake| {
                    Moving::Local(LocalShare::new(link, &peer, job, &targets, wake))
                });
            }
        }
        Err(e) => job.finish(Err(e.with_quiesced(true))),
    }
}

/// As soon as there is a lane. The link's answer may come on any thread.
fn submit_to_lanes(job: &Arc<Job>, link: &Arc<Link>) {
    let (job2, link2) = (Arc::clone(job), Arc::clone(link));
    let wish = link.acquire(
        job.batch.bytes(),
        job.deadline,
        Box::new(move |lane| match lane {
            Ok(lane) => start(&job2, &link2, lane),
            // Between two shares of a job nothing of it is under way.
            Err(e) => job2.finish(Err(e.with("peer", &link2.address).with_quiesced(true))),
        }),
    );
    job.waits(link, wish);
}

fn start(job: &Arc<Job>, link: &Arc<Link>, first: Arc<Lane>) {
    if job.is_stopped() {
        link.put(first);
        job.finish_unstarted();
        return;
    }
    let lanes = lanes_for(job, link, first);
    job.start_shares(lanes.len(), link.transport.kind());
    for lane in lanes {
        background(job, link, Some(Arc::clone(&lane)), |wake| {
            link.transport.drive(link, lane, Arc::clone(job), wake)
        });
    }
}

/// Has an I/O thread move one share on.
fn background(
    job: &Arc<Job>,
    link: &Arc<Link>,
    lane: Option<Arc<Lane>>,
    share: impl FnOnce(Wake) -> Moving,
) {
    link.begin();
    let remote = link.core.io_thread();
    let token = remote.token();
    let wake: Wake = {
        let remote = remote.clone();
        Arc::new(move || remote.wake(token))
    };
    job.add_handler(&remote, token);
    let background = Background {
        drive: share(wake),
        turn: lane.map(|lane| (lane, now() + TURN_TIME)),
        job: Arc::clone(job),
        link: Arc::clone(link),
        done: false,
    };
    remote.add(token, Box::new(background));
}

/// A share on an I/O thread.
struct Background {
    drive: Moving,
    /// The lane, and until when it has its turn.
    turn: Option<(Arc<Lane>, Timestamp)>,
    job: Arc<Job>,
    link: Arc<Link>,
    done: bool,
}

impl Handler for Background {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.drive.fd()
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        if cx.now >= self.job.deadline && !self.job.is_stopped() {
            self.job.stop(deadline_passed());
        }
        if let Some((lane, _)) = self.turn.take_if(|(_, until)| cx.now >= *until) {
            self.link.pass_turn(&lane);
        }
        let until = self.turn.as_ref().map_or(self.job.deadline, |(_, until)| *until);
        let deadline = |drive: &dyn Drive, job: &Job| {
            let at = if job.is_stopped() {
                cx.now + Duration::from_millis(1)
            } else {
                job.deadline.min(until)
            };
            drive.check_at().map_or(at, |check| check.min(at))
        };
        match self.drive.progress(cx.now) {
            Progress::Wait(interest) => {
                Next::Wait { interest, deadline: Some(deadline(&self.drive, &self.job)) }
            }
            Progress::Again => Next::Again,
            Progress::Memory => Next::Wait {
                interest: Interest::None,
                deadline: Some(deadline(&self.drive, &self.job)),
            },
            Progress::Done => {
                self.done = true;
                Next::Close
            }
            Progress::Yielded => {
                self.done = true;
                submit_to_lanes(&self.job, &self.link);
                Next::Close
            }
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        self.link.finish();
        if !self.done {
            // The I/O thread was stopped under the transfer.
            let error = Error::new(ErrorKind::Shutdown, "the agent was shut down");
            self.job.finish(Err(error.with_quiesced(false)));
        }
    }
}
