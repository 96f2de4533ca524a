//! A lane has one user at a time, every waiter gets one, and the heartbeat runs whenever something
//! is in progress.

use super::{bare, explore};
use crate::core::Core;
use crate::error::Result;
use crate::memory::region::RemoteRegion;
use crate::memory::stages::Wake;
use crate::reactor::now;
use crate::sync::Mutant;
use crate::transfer::drive::{Drive, OnLanes, Progress};
use crate::transfer::job::Job;
use crate::transfer::kind::{Capabilities, Fence, Transport, TransportKind};
use crate::transfer::lanes::Lane;
use crate::transfer::link::{Backend, Link};
use crate::transfer::slot::Slot;
use kvferry_proto::{Guard, Limits, StreamId, Timestamp};
use kvferry_sys::socket::Socket;
use loom::thread;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(3600);

/// A route that moves everything at once.
#[derive(Clone)]
struct Instant;

impl Transport for Instant {
    fn kind(&self) -> TransportKind {
        TransportKind::new("model")
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_fence: Fence::Local,
            read_fence: Fence::Local,
            notifications: true,
            checksums: false,
        }
    }
}

impl OnLanes for Instant {
    type Share = Share;

    fn transport(&self) -> &'static dyn Transport {
        &Self
    }

    fn share(&self, link: &Arc<Link>, lane: Arc<Lane>, job: &Arc<Job>, _: Wake) -> Share {
        Share { link: Arc::clone(link), lane, job: Arc::clone(job) }
    }
}

struct Share {
    link: Arc<Link>,
    lane: Arc<Lane>,
    job: Arc<Job>,
}

impl Drive for Share {
    fn progress(&mut self, _: Timestamp) -> Progress {
        while let Some(frame) = self.job.next_frame(&Limits::default()) {
            self.job.acknowledged(&frame);
        }
        self.link.put(Arc::clone(&self.lane));
        self.job.share_ended(&self.link, None);
        Progress::Done
    }
}

/// A peer that does nothing: the model opens the lanes.
struct Idle;

const CONTROL: u64 = 99;

impl Backend for Idle {
    fn open_lane(&self, _: &Arc<Link>) {}

    fn wake(&self, core: &Core) {
        core.threads.control.wake(CONTROL);
    }

    fn regions(&self, _: &Arc<Link>, _: Duration) -> Result<Vec<RemoteRegion>> {
        Ok(Vec::new())
    }

    fn probe(&self, _: &Arc<Link>, timeout: Duration) -> Result<Duration> {
        Ok(timeout)
    }
}

/// A link with at most one lane and one permit.
pub(super) fn link(core: &Arc<Core>) -> Arc<Link> {
    let peer = SocketAddr::from(([127, 0, 0, 1], 1));
    let link = Link::new(Arc::clone(core), "model".into(), peer, Arc::new(Idle), 1);
    link.add_lanes(Instant);
    link
}

/// A lane on which nothing is sent.
pub(super) fn lane(core: &Arc<Core>) -> Arc<Lane> {
    let socket = Socket::listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    Lane::new(StreamId(1), socket, core.memory.gates.gate(), Guard::Crc)
}

fn two_users_of_one_lane() {
    let core = bare();
    let link = link(&core);
    link.lane_opened(lane(&core));
    let users = Arc::new(AtomicUsize::new(0));
    let threads: Vec<_> = [1, 1 << 30]
        .into_iter()
        .map(|bytes| {
            let (link, users) = (Arc::clone(&link), Arc::clone(&users));
            thread::spawn(move || {
                let slot = Slot::new();
                let given = Arc::clone(&slot);
                link.acquire(
                    bytes,
                    now() + LONG,
                    Box::new(move |lane| given.fill(lane.expect("the link lives"))),
                );
                let lane = slot.wait(now() + LONG, None).expect("given");
                assert_eq!(users.fetch_add(1, Ordering::Relaxed), 0, "one user at a time");
                thread::yield_now();
                link.pass_permit(&lane);
                users.fetch_sub(1, Ordering::Relaxed);
                link.put(lane);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("each is served"));
    // The lane and the permit were given back.
    assert!(link.idle_lane(1 << 30).is_some() && !link.lanes.has_waiters());
}

#[test]
fn loom_a_lane_has_one_user_at_a_time_and_every_waiter_gets_it() {
    explore(two_users_of_one_lane);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_noticed_a_lane_that_wakes_no_waiter() {
    Mutant::LostNotify.enable();
    explore(two_users_of_one_lane);
}

#[test]
fn loom_a_withdrawal_during_a_grant_succeeds_or_the_waiter_has_the_lane() {
    explore(|| {
        let core = bare();
        let link = link(&core);
        let given = Slot::new();
        let request = {
            let given = Arc::clone(&given);
            link.acquire(1, now() + LONG, Box::new(move |lane| given.fill(lane.is_ok())))
        };
        let opener = {
            let (core, link) = (Arc::clone(&core), Arc::clone(&link));
            thread::spawn(move || link.lane_opened(lane(&core)))
        };
        let withdrawn = link.lanes.withdraw(request);
        opener.join().expect("the opener ends");
        let has_it = link.idle_lane(1).is_none();
        assert_ne!(withdrawn, has_it);
        if has_it {
            assert!(given.wait(now() + LONG, None).expect("given"));
        }
    });
}

fn begin_against_the_check_whether_anything_is_in_progress() {
    let core = bare();
    let link = link(&core);
    // Something was in progress before, so the control thread watches.
    link.begin();
    link.finish();
    let before = core.threads.control.wakes().len();
    let beginner = {
        let link = Arc::clone(&link);
        thread::spawn(move || link.begin())
    };
    let active = link.is_active();
    beginner.join().expect("the beginner ends");
    let woken = core.threads.control.wakes().len() > before;
    assert!(active || woken, "something is in progress without a heartbeat");
}

#[test]
fn loom_i6_what_begins_while_the_heartbeat_is_stopped_starts_it_again() {
    explore(begin_against_the_check_whether_anything_is_in_progress);
}

#[test]
#[should_panic(expected = "without a heartbeat")]
fn loom_noticed_a_heartbeat_that_is_stopped_with_a_weaker_order() {
    Mutant::WeakOrder.enable();
    explore(begin_against_the_check_whether_anything_is_in_progress);
}
