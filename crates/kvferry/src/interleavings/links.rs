//! Lanes are handed out one at a time, nobody who waits is forgotten, and the heartbeat runs
//! whenever something is in flight.

use super::explore;
use crate::agent::Core;
use crate::memory::device::Wake;
use crate::reactor::now;
use crate::session::link::{Lane, Link, Native, OpenLane};
use crate::sync::{Mutant, Mutex};
use crate::transfer::drive::Slot;
use crate::transfer::job::Job;
use crate::transport::{Capabilities, Drive, Fence, Moving, Progress, Transport, TransportKind};
use kvferry_proto::{Incarnation, Limits, Session, SessionConfig, StreamId, Timestamp};
use kvferry_sys::socket::Socket;
use loom::thread;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

const LONG: Duration = Duration::from_secs(3600);

/// Moves everything at once.
#[derive(Debug)]
struct Instant;

impl Transport for Instant {
    fn kind(&self) -> TransportKind {
        TransportKind::Tcp
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            write_fence: Fence::Local,
            read_fence: Fence::Local,
            confirms_cancel: true,
            notifications: true,
            checksums: false,
            regions: true,
        }
    }

    fn drive(&self, link: &Arc<Link>, lane: Arc<Lane>, job: Arc<Job>, _: Wake) -> Moving {
        Moving::Other(Box::new(Share { link: Arc::clone(link), lane, job }))
    }
}

struct Share {
    link: Arc<Link>,
    lane: Arc<Lane>,
    job: Arc<Job>,
}

impl Drive for Share {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn progress(&mut self, _: Timestamp) -> Progress {
        while let Some(frame) = self.job.next_frame(&Limits::default()) {
            self.job.acknowledged(&frame);
        }
        self.link.put(Arc::clone(&self.lane));
        self.job.share_ended(&self.link, None);
        Progress::Done
    }
}

/// Lanes come when the model says so.
struct Nobody;

impl OpenLane for Nobody {
    fn open_lane(&self, _: &Arc<Link>) {}
}

fn peer() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], 1))
}

/// A link with room for one lane.
pub(super) fn link(core: &Arc<Core>) -> Arc<Link> {
    let session = Session::initiator(
        SessionConfig::new(Incarnation(7), "model"),
        None,
        [1; 32],
        Timestamp::default(),
    );
    let native = Native {
        session: Mutex::new(session),
        token: 99,
        info: OnceLock::new(),
        inbound: Mutex::default(),
        revokes: Mutex::default(),
        requests: Mutex::default(),
    };
    Link::new(
        Arc::clone(core),
        "model".into(),
        peer(),
        Arc::new(Instant),
        Some(native),
        None,
        Arc::new(Nobody),
    )
}

/// A lane that nothing is ever sent on.
pub(super) fn lane(core: &Arc<Core>) -> Arc<Lane> {
    let socket = Socket::listen(SocketAddr::from(([127, 0, 0, 1], 0))).expect("a port");
    Lane::new(StreamId(1), socket, core.gates.gate())
}

fn two_users_of_one_lane() {
    let core = Core::bare();
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
                link.pass_turn(&lane);
                users.fetch_sub(1, Ordering::Relaxed);
                link.put(lane);
            })
        })
        .collect();
    threads.into_iter().for_each(|thread| thread.join().expect("everybody is served"));
    // Lane and turn are back.
    assert!(link.idle_lane(1 << 30).is_some() && !link.has_waiters());
}

#[test]
fn loom_a_lane_has_one_user_at_a_time_and_everybody_gets_it() {
    explore(two_users_of_one_lane);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_noticed_a_lane_that_nobody_is_told_of() {
    Mutant::LostNotify.breed();
    explore(two_users_of_one_lane);
}

#[test]
fn loom_who_withdraws_while_it_is_given_a_lane_either_withdrew_or_has_it() {
    explore(|| {
        let core = Core::bare();
        let link = link(&core);
        let given = Slot::new();
        let wish = {
            let given = Arc::clone(&given);
            link.acquire(1, now() + LONG, Box::new(move |lane| given.fill(lane.is_ok())))
        };
        let opener = {
            let (core, link) = (Arc::clone(&core), Arc::clone(&link));
            thread::spawn(move || link.lane_opened(lane(&core)))
        };
        let withdrawn = link.withdraw(wish);
        opener.join().expect("the opener ends");
        let has_it = link.idle_lane(1).is_none();
        assert_ne!(withdrawn, has_it);
        if has_it {
            assert!(given.wait(now() + LONG, None).expect("given"));
        }
    });
}

fn begin_against_the_look_whether_anything_is_in_flight() {
    let core = Core::bare();
    let link = link(&core);
    // Something was in flight before, so the control thread watches.
    link.begin();
    link.finish();
    let before = core.control.wakes().len();
    let beginner = {
        let link = Arc::clone(&link);
        thread::spawn(move || link.begin())
    };
    let active = link.is_active();
    beginner.join().expect("the beginner ends");
    let woken = core.control.wakes().len() > before;
    assert!(active || woken, "in flight, and nobody watches the peer");
}

#[test]
fn loom_i6_what_begins_while_the_heartbeat_is_stopped_starts_it_again() {
    explore(begin_against_the_look_whether_anything_is_in_flight);
}

#[test]
#[should_panic(expected = "nobody watches the peer")]
fn loom_noticed_a_heartbeat_that_is_stopped_with_a_weaker_order() {
    Mutant::WeakOrder.breed();
    explore(begin_against_the_look_whether_anything_is_in_flight);
}
