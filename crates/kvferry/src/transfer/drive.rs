//! Shares of transfers, and those that the I/O threads drive.

use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::stages::Wake;
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::sync::Arc;
use crate::transfer::caller::drive;
use crate::transfer::job::{Frames, Job, STRIPE_BYTES_MIN, TransferStats};
use crate::transfer::kind::Transport;
use crate::transfer::lanes::{Lane, PERMIT_TIME};
use crate::transfer::link::{Link, Offered, Route};
use crate::transfer::slot::{INTERRUPT_EVERY, Interrupt, deadline_passed, interrupted, says_stop};
use crate::transfer::still_moving::StillMoving;
use kvferry_proto::Timestamp;
use kvferry_sys::poll::Interest;
use smallvec::SmallVec;
use std::io;
use std::os::fd::BorrowedFd;
use std::time::Duration;

/// Payload bytes sent in one system call.
///
/// A sender whose call is long processes the acknowledgements that arrive meanwhile itself, at the
/// end of the call: the acknowledged pages are freed on the processor that needs the next ones,
/// warm in its cache. A receiver whose calls are short acknowledges often. Against calls of 256 KiB
/// both ways, that doubles the rate on loopback under BBR and adds a tenth under Reno. The gain is
/// there for sends of 512 KiB to 1 MiB, and for receives of 64 to 128 KiB.
pub const SEND_CHUNK: usize = 768 * 1024;

/// Payload bytes received in one system call; see [`SEND_CHUNK`].
pub const RECEIVE_CHUNK: usize = 96 * 1024;

/// Payload bytes that one stream moves before the other streams of its thread go on.
pub const STEP_BYTES: usize = 4 * 1024 * 1024;

/// The event that a share waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing: it can go on at once, after the other shares of its thread.
    Again,
    /// Readiness of its descriptor.
    Wait(Interest),
    /// A call of its waker: memory is not ready, or a response is due.
    Memory,
    /// Nothing: it gave its lane back because other transfers wait for one. The job has more to
    /// move and needs a lane again.
    Yielded,
    /// Nothing: it has ended, given its lane back and reported to the job.
    Done,
}

/// A share of a transfer, driven by the caller's thread or by an I/O thread.
pub trait Drive: Send {
    /// The descriptor that [`Progress::Wait`] waits for; it never changes.
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Waits for its descriptor by its own means, on the caller's thread. `None`: by `poll`.
    fn wait(&mut self, _timeout: Duration) -> Option<io::Result<()>> {
        None
    }

    /// Does the work that needs no waiting, in bounded time. Called when the share begins, when what the last call waits
    /// for has happened, when its waker was called, at [`Drive::check_at`], and from time to time once its job is
    /// stopped; a few times also without an event: while its thread polls before it sleeps, and when its lane's permit
    /// ends. Not for events of other shares: each of them would ask again for memory that this one has given
    /// back because its peer is not ready. At `check_at`, the share itself has to see whether its peer is.
    fn progress(&mut self, now: Timestamp) -> Progress;

    /// What moves bytes of the share's memory without it, beside the copies of its lane. A share without a lane has to
    /// name its own gate.
    fn still_moving(&self) -> StillMoving {
        StillMoving::default()
    }

    /// Time of the next call of `progress` if no event comes. On the caller's thread it must not move before that call:
    /// it is asked for again when the thread has waited.
    fn check_at(&self) -> Option<Timestamp> {
        None
    }
}

/// Returns the number of lanes among which a job should be divided.
fn lanes_wanted(job: &Job) -> usize {
    let by_size = job.batch.bytes() / STRIPE_BYTES_MIN;
    shares(&job.core, by_size, job.core.sizing.stripe_default, job.streams)
}

/// Returns the number of lanes that a batch should use: as many as the caller asked for, else as
/// many as its size justifies, up to `default`.
pub(crate) fn shares(core: &Core, by_size: u64, default: usize, wished: Option<usize>) -> usize {
    let by_default = usize::try_from(by_size).unwrap_or(usize::MAX).min(default);
    wished.unwrap_or(by_default).clamp(1, core.sizing.streams_per_peer)
}

/// Decides before which frame a share gives its lane to waiting transfers: never before its first.
#[derive(Debug, Default)]
pub struct Yielding {
    has_begun: bool,
    yields: bool,
}

impl Yielding {
    /// Called before each frame: whether other transfers should get the lane before it.
    pub fn before_frame(&mut self, link: &Link, job: &Job) -> bool {
        if self.has_begun && !self.yields {
            self.yields = link.lanes.has_waiters() && !job.is_handed_out();
        }
        self.has_begun = true;
        self.yields
    }

    /// Whether the lane goes to other transfers once everything sent is answered.
    pub fn yields(&self) -> bool {
        self.yields
    }
}

/// The lanes that a job is divided among: the lane it has, and idle lanes.
fn lanes_for(job: &Job, link: &Arc<Link>, first: Arc<Lane>) -> SmallVec<[Arc<Lane>; 1]> {
    let mut lanes = SmallVec::from_buf([first]);
    let wanted = lanes_wanted(job);
    if wanted > 1 {
        lanes.extend(link.acquire_idle(wanted - 1));
    }
    lanes
}

/// Drives a job on the caller's thread until it has its outcome.
pub(crate) fn run(
    job: &Arc<Job>,
    link: &Arc<Link>,
    interrupt: Interrupt<'_>,
) -> Result<TransferStats> {
    if let Err(e) = link.offer(|route| route.run(link, job, interrupt)) {
        job.finish(Err(e.with_quiesced(true)));
    }
    outcome(job, interrupt)
}

/// Drives a job on the I/O threads.
pub(crate) fn submit(job: &Arc<Job>, link: &Arc<Link>) {
    if job.is_stopped() {
        job.finish_unstarted();
    } else if let Err(e) = link.offer(|route| route.submit(link, job)) {
        job.finish(Err(e.with_quiesced(true)));
    }
}

/// A transport whose shares each use a lane. Clones are the same route.
pub trait OnLanes: Clone + Send + Sync + 'static {
    /// A lane's share of a transfer.
    type Share: Drive + 'static;

    /// The transport that the shares belong to.
    fn transport(&self) -> &'static dyn Transport;

    /// Begins a lane's share of a job. The memory calls `wake` when it may be ready after a share
    /// found that it was not.
    fn share(&self, link: &Arc<Link>, lane: Arc<Lane>, job: &Arc<Job>, wake: Wake) -> Self::Share;
}

/// The route of a transport whose shares each use a lane.
struct LaneRoute<T>(T);

impl<T: OnLanes> Route for LaneRoute<T> {
    fn uses_lanes(&self) -> bool {
        true
    }

    fn transport(&self) -> &'static dyn Transport {
        self.0.transport()
    }

    // On the caller's thread, or on an I/O thread while other transfers wait for a lane: an I/O
    // thread that has just moved bytes starts the next transfer at once, while a waiting caller
    // would have to be woken and would take a processor from another thread.
    fn run(&self, link: &Arc<Link>, job: &Arc<Job>, interrupt: Interrupt<'_>) -> Offered {
        let Some(first) = link.idle_lane(job.batch.bytes()) else {
            submit_to_lanes(&self.0, job, link);
            return Offered::Taken;
        };
        let lanes = lanes_for(job, link, first);
        link.begin();
        job.start_shares(lanes.len(), self.kind(), Frames::Messages);
        let shares =
            lanes.iter().map(|lane| move |wake| self.0.share(link, Arc::clone(lane), job, wake));
        let yielded = drive(job, link, &lanes, interrupt, shares);
        if yielded {
            submit_to_lanes(&self.0, job, link);
        }
        // The outcome may depend on the peer's response to a revoke.
        let _ = outcome(job, interrupt);
        link.finish();
        Offered::Taken
    }

    fn submit(&self, link: &Arc<Link>, job: &Arc<Job>) -> Offered {
        submit_to_lanes(&self.0, job, link);
        Offered::Taken
    }
}

impl Link {
    /// Adds a route of a transport whose shares each use a lane. It is faster than the existing ones.
    pub fn add_lanes(&self, transport: impl OnLanes) {
        self.add_route(Arc::new(LaneRoute(transport)));
    }
}

/// Time between two looks at a device beyond which this process was suspended.
const SUSPENDED_MIN: Duration = Duration::from_secs(1);

/// How long a share of a stopped job has waited for its device.
#[derive(Default)]
pub(super) struct DeviceWait {
    since: Option<Timestamp>,
    looked_at: Timestamp,
}

impl DeviceWait {
    /// Whether the device has been silent for as long as a peer may be. `last` is the result of the share's call at
    /// `at`: the share of a stopped job waits for no other memory than a device's copies.
    pub(super) fn is_over(&mut self, job: &Job, last: Progress, at: Timestamp) -> bool {
        let waits = last == Progress::Memory && job.is_stopped();
        self.is_longer(job.core.settings.silence, waits, at)
    }

    fn is_longer(&mut self, silence: Duration, waits: bool, at: Timestamp) -> bool {
        // A look that is late by half the time means that this process was suspended: the device gets the time anew.
        // Looks follow each other within a tenth of a second.
        let is_late = at.saturating_since(self.looked_at) > (silence / 2).max(SUSPENDED_MIN);
        self.looked_at = at;
        let since = self.since.take_if(|_| !is_late).unwrap_or(at);
        self.since = waits.then_some(since);
        waits && at.saturating_since(since) >= silence
    }
}

/// Ends a share of a stopped job whose device does not end a copy. The copy keeps its stage and its regions. `left` is
/// that of the share.
pub(super) fn abandon(
    job: &Arc<Job>,
    link: &Arc<Link>,
    lane: Option<&Arc<Lane>>,
    left: StillMoving,
) {
    warn_limited!(
        transfer = %job.id, peer = %link.address,
        "a device does not end a copy of a stopped transfer; its stage and its regions stay in use"
    );
    if let Some(lane) = lane {
        link.kill(lane);
    }
    job.share_abandoned(link, lane.map(|lane| lane.id), left.with_lane(lane));
}

/// A waker for shares that never wait for memory.
pub(crate) fn no_wake() -> Wake {
    static NO_WAKE: std::sync::OnceLock<Wake> = std::sync::OnceLock::new();
    Arc::clone(NO_WAKE.get_or_init(|| Arc::new(|| {})))
}

/// Waits for the outcome of a job whose shares, if it has any, have ended or are on other threads: they keep its
/// deadline. A quiesce may be in progress; the session bounds its duration.
pub(crate) fn outcome(job: &Job, interrupt: Interrupt<'_>) -> Result<TransferStats> {
    loop {
        if let Some(outcome) = job.wait(INTERRUPT_EVERY) {
            return outcome;
        }
        // The interrupt check runs for every Ctrl-C; the quiesce goes on regardless.
        if interrupt.is_some_and(says_stop) {
            job.stop(interrupted());
        }
    }
}

/// Starts the job's shares once there is a lane. The lane may be granted on any thread.
fn submit_to_lanes<T: OnLanes>(route: &T, job: &Arc<Job>, link: &Arc<Link>) {
    let (route2, job2, link2) = (route.clone(), Arc::clone(job), Arc::clone(link));
    let request = link.acquire(
        job.batch.bytes(),
        job.deadline,
        Box::new(move |lane| match lane {
            Ok(lane) => start(&route2, &job2, &link2, lane),
            // Between two shares of a job, the peer has no request of it.
            Err(e) => job2.finish(Err(e.with("peer", &link2.address).with_quiesced(true))),
        }),
    );
    job.waits(link, request);
}

fn start<T: OnLanes>(route: &T, job: &Arc<Job>, link: &Arc<Link>, first: Arc<Lane>) {
    if job.is_stopped() {
        link.put(first);
        job.finish_unstarted();
        return;
    }
    let lanes = lanes_for(job, link, first);
    job.start_shares(lanes.len(), route.transport().kind(), Frames::Messages);
    for lane in lanes {
        let again = {
            let route = route.clone();
            move |job: &Arc<Job>, link: &Arc<Link>| submit_to_lanes(&route, job, link)
        };
        let share = |wake| route.share(link, Arc::clone(&lane), job, wake);
        background(job, link, Some(&lane), again, share);
    }
}

/// Drives one share on an I/O thread. `lane` is the share's lane, which may hold a permit. If the
/// share yields, `again` acquires another lane for the job.
pub(crate) fn background<S: Drive + 'static>(
    job: &Arc<Job>,
    link: &Arc<Link>,
    lane: Option<&Arc<Lane>>,
    again: impl Fn(&Arc<Job>, &Arc<Link>) + Send + 'static,
    share: impl FnOnce(Wake) -> S,
) {
    link.begin();
    let threads = &link.core.threads;
    let remote = if lane.is_some() { threads.io() } else { threads.copier() };
    let token = remote.token();
    job.add_handler(&remote, token);
    let background = Background {
        drive: share(remote.waker(token)),
        permit_until: lane.map(|_| now() + PERMIT_TIME),
        lane: lane.cloned(),
        again,
        job: Arc::clone(job),
        link: Arc::clone(link),
        device: DeviceWait::default(),
        done: false,
    };
    remote.add(token, Box::new(background));
}

/// A share on an I/O thread.
struct Background<S: Drive, A> {
    drive: S,
    lane: Option<Arc<Lane>>,
    again: A,
    permit_until: Option<Timestamp>,
    job: Arc<Job>,
    link: Arc<Link>,
    device: DeviceWait,
    done: bool,
}

impl<S: Drive, A: Fn(&Arc<Job>, &Arc<Link>) + Send> Handler for Background<S, A> {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.drive.fd()
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        if cx.now >= self.job.deadline && !self.job.is_stopped() {
            self.job.stop(deadline_passed());
        }
        if self.permit_until.take_if(|until| cx.now >= *until).is_some()
            && let Some(lane) = &self.lane
        {
            self.link.pass_permit(lane);
        }
        let until = self.permit_until.unwrap_or(self.job.deadline);
        let deadline = |drive: &S, job: &Job| {
            let at = if job.is_stopped() {
                cx.now + Duration::from_millis(1)
            } else {
                job.deadline.min(until)
            };
            drive.check_at().map_or(at, |check| check.min(at))
        };
        let last = self.drive.progress(cx.now);
        if self.device.is_over(&self.job, last, cx.now) {
            abandon(&self.job, &self.link, self.lane.as_ref(), self.drive.still_moving());
            self.done = true;
            return Next::Close;
        }
        match last {
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
                (self.again)(&self.job, &self.link);
                Next::Close
            }
        }
    }
}

impl<S: Drive, A> Drop for Background<S, A> {
    fn drop(&mut self) {
        self.link.finish();
        if !self.done {
            if let Some(lane) = &self.lane {
                lane.gate.shut();
                self.link.discard(lane);
            }
            let error = if self.link.core.is_closed() {
                Error::shutdown()
            } else {
                let what = "an I/O thread gave the transfer up; the log says why";
                Error::new(ErrorKind::Internal, what).with("peer", &self.link.address)
            };
            let left = self.drive.still_moving().with_lane(self.lane.as_ref());
            self.job.share_lost(error, left);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::notify::Notification;
    use crate::transfer::job::{Frames, Op};
    use crate::transfer::kind::{Capabilities, Fence, TransportKind};
    use crate::transfer::link::tests::NoPeer;
    use crate::{Access, Agent, Batch};
    use kvferry_proto::{Guard, Limits, StreamId};
    use kvferry_sys::socket::Socket;

    #[test]
    fn i6_a_suspended_process_does_not_give_up_its_device() {
        let silence = Duration::from_secs(8);
        let second = |n: u64| Timestamp::from_nanos(n * 1_000_000_000);
        let mut wait = DeviceWait::default();
        assert!((100..108).all(|n| !wait.is_longer(silence, true, second(n))));
        assert!(!wait.is_longer(silence, true, second(200)), "a late look");
        assert!((201..208).all(|n| !wait.is_longer(silence, true, second(n))));
        assert!(wait.is_longer(silence, true, second(208)));
        assert!(!wait.is_longer(silence, false, second(209)), "it waits for something else");
        assert!(!wait.is_longer(silence, true, second(210)));
        let (short, tenth) = (Duration::from_millis(150), Duration::from_millis(100));
        let mut wait = DeviceWait::default();
        let looks = (0..3).map(|n| wait.is_longer(short, true, second(300) + tenth * n));
        assert_eq!(looks.collect::<Vec<_>>(), [false, false, true], "less than two looks apart");
    }

    #[derive(Clone)]
    struct Panics;

    impl Transport for Panics {
        fn kind(&self) -> TransportKind {
            TransportKind::new("panics")
        }

        fn capabilities(&self) -> Capabilities {
            let (write_fence, read_fence) = (Fence::Local, Fence::Local);
            Capabilities { write_fence, read_fence, notifications: true, checksums: false }
        }
    }

    impl OnLanes for Panics {
        type Share = Self;

        fn transport(&self) -> &'static dyn Transport {
            &Self
        }

        fn share(&self, _: &Arc<Link>, _: Arc<Lane>, _: &Arc<Job>, _: Wake) -> Self {
            Self
        }
    }

    impl Drive for Panics {
        fn progress(&mut self, _: Timestamp) -> Progress {
            panic!("a share of a test");
        }
    }

    #[test]
    fn a_share_that_panics_fails_its_transfer_and_frees_the_place_of_its_lane() {
        let agent = Agent::builder().start().expect("an agent");
        let (core, at) = (agent.core(), agent.local_addr());
        let link = Link::new(Arc::clone(core), "peer".into(), at, Arc::new(NoPeer::default()), 1);
        link.add_lanes(Panics);
        let socket = Socket::connect(at).expect("the agent listens");
        link.lane_opened(Lane::new(StreamId(1), socket, core.memory.gates.gate(), Guard::Crc));
        let region = agent.allocate_private(4096, Access::READ_WRITE).expect("memory");
        let mut batch = Batch::new();
        batch.push(&region, 0, &region.remote(), 0, 4096).expect("inside");
        let timeout = Duration::from_secs(60);
        let job = Arc::new(Job::new(Arc::clone(core), Op::Write, batch, None, timeout, None));
        submit(&job, &link);
        let outcome = job.wait(Duration::from_secs(30)).expect("it ends");
        let error = outcome.expect_err("the share panicked");
        assert_eq!((error.kind(), error.quiesced()), (ErrorKind::Internal, Some(false)));
        assert!(!link.lanes.has_lanes(0), "the lane still takes a place");
        assert_eq!(agent.stats().streams, 0);
        agent.shutdown();
    }

    #[test]
    fn i1_a_transfer_that_is_stopped_before_its_notification_is_confirmed_is_no_success() {
        let agent = Agent::builder().start().expect("an agent");
        let (core, at) = (agent.core(), agent.local_addr());
        let link = Link::new(Arc::clone(core), "peer".into(), at, Arc::new(NoPeer::default()), 1);
        let region = agent.allocate_private(4096, Access::READ_WRITE).expect("memory");
        for is_confirmed in [false, true] {
            let mut batch = Batch::new();
            batch.push(&region, 0, &region.remote(), 0, 4096).expect("inside");
            let (note, timeout) = (Notification::new("done", b""), Duration::from_secs(60));
            let job = Job::new(Arc::clone(core), Op::Read, batch, Some(note), timeout, None);
            let job = Arc::new(job);
            job.start_shares(1, Panics.kind(), Frames::Messages);
            let frame = job.next_frame(&Limits::default()).expect("bytes are left");
            assert!(job.acknowledged(&frame).is_some(), "a read carries no notification");
            if is_confirmed {
                job.noted();
            }
            job.stop(Error::new(ErrorKind::Cancelled, "the test cancels"));
            job.share_ended(&link, None);
            let outcome = job.outcome().expect("its only share has ended");
            assert_eq!(
                outcome.map_err(|e| e.kind()).err(),
                (!is_confirmed).then_some(ErrorKind::Cancelled)
            );
        }
        agent.shutdown();
    }
}
