//! A transfer ends exactly once, on whichever thread it ends (invariant I1).

use super::{bare, explore};
use crate::core::Core;
use crate::error::{Error, ErrorKind};
use crate::interleavings::links::{lane, link};
use crate::memory::Access;
use crate::memory::region::Backing;
use crate::sync::Mutant;
use crate::transfer::batch::Batch;
use crate::transfer::drive::submit;
use crate::transfer::job::{Frames, Job, Op};
use crate::transfer::kind::TransportKind;
use crate::transfer::link::Link;
use kvferry_proto::{Incarnation, Limits};
use loom::thread;
use std::sync::Arc;
use std::time::Duration;

const BYTES: u64 = 16;
const LONG: Duration = Duration::from_secs(3600);

fn job(core: &Arc<Core>) -> Arc<Job> {
    let region = core
        .memory
        .regions
        .insert(Incarnation(7), 0x1000, 64, Access::READ_WRITE, Backing::Borrowed)
        .expect("the first region overlaps none");
    let mut batch = Batch::new();
    batch.push_to_address(&region, 0, 0x2000, BYTES).expect("inside the region");
    Arc::new(Job::new(Arc::clone(core), Op::Write, batch, None, LONG, None))
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "the model cancels")
}

fn ended_once(core: &Core, job: &Job) {
    let stats = core.counters.snapshot();
    let ended = stats.transfers_done + stats.transfers_cancelled + stats.transfers_failed;
    let counts = (stats.transfers_started, ended, stats.transfers_in_flight);
    assert_eq!(counts, (1, 1, 0), "started, one outcome, none in flight");
    let outcome = job.outcome().expect("ended");
    assert_eq!(outcome.is_ok(), stats.transfers_done == 1);
}

/// Does what a share does: takes frames until none is left, then ends.
fn share(job: &Arc<Job>, link: &Arc<Link>) {
    while let Some(frame) = job.next_frame(&Limits::default()) {
        assert!(job.acknowledged(&frame).is_none(), "there is no notification");
    }
    job.share_ended(link, None);
}

fn two_shares_against_cancel_and_wait() {
    let core = bare();
    let (job, link) = (job(&core), link(&core));
    job.start_shares(2, TransportKind::new("model"), Frames::Messages);
    let shares: Vec<_> = (0..2)
        .map(|_| {
            let (job, link) = (Arc::clone(&job), Arc::clone(&link));
            thread::spawn(move || share(&job, &link))
        })
        .collect();
    job.stop(cancelled());
    // The thread that ends the job has to wake this one.
    assert!(job.wait(LONG).is_some());
    shares.into_iter().for_each(|share| share.join().expect("a share ends"));
    ended_once(&core, &job);
}

#[test]
fn loom_i1_two_shares_and_a_cancel_make_one_outcome_and_wake_who_waits() {
    explore(two_shares_against_cancel_and_wait);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_noticed_an_outcome_that_wakes_no_thread() {
    Mutant::LostNotify.enable();
    explore(two_shares_against_cancel_and_wait);
}

/// A request for a lane against its withdrawal by `cancel` and against the end of the link.
fn request(cancel: fn(&Job), peer_ends: bool) {
    let core = bare();
    let (job, link) = (job(&core), link(&core));
    let canceller = {
        let job = Arc::clone(&job);
        thread::spawn(move || cancel(&job))
    };
    let ender = peer_ends.then(|| {
        let link = Arc::clone(&link);
        thread::spawn(move || {
            link.terminate(Error::new(ErrorKind::PeerReset, "the model's peer is gone"));
        })
    });
    submit(&job, &link);
    canceller.join().expect("the canceller ends");
    ender.into_iter().for_each(|ender| ender.join().expect("the ender ends"));
    ended_once(&core, &job);
    assert!(!link.lanes.has_waiters());
}

#[test]
fn loom_i1_a_wish_for_a_lane_that_is_withdrawn_or_granted_or_refused_makes_one_outcome() {
    explore(|| request(|job| job.stop(cancelled()), false));
    explore(|| request(|job| job.stop(cancelled()), true));
}

#[test]
#[should_panic(expected = "one outcome")]
fn loom_noticed_a_cancel_that_does_not_withdraw_the_request_for_a_lane() {
    explore(|| request(|job| job.fail(cancelled()), false));
}

#[test]
fn loom_i1_a_lane_that_comes_while_its_job_is_cancelled_is_used_or_given_back() {
    explore(|| {
        let core = bare();
        let (job, link) = (job(&core), link(&core));
        let canceller = {
            let job = Arc::clone(&job);
            thread::spawn(move || job.stop(cancelled()))
        };
        let opener = {
            let (core, link) = (Arc::clone(&core), Arc::clone(&link));
            thread::spawn(move || link.lane_opened(lane(&core)))
        };
        submit(&job, &link);
        canceller.join().expect("the canceller ends");
        opener.join().expect("the opener ends");
        // An I/O thread would do this with the shares it was given.
        core.threads.io().play();
        ended_once(&core, &job);
        assert!(!link.lanes.has_waiters());
        assert!(link.idle_lane(1).is_some(), "the lane is idle again");
    });
}

fn two_waiters_for_one_outcome() {
    let core = bare();
    let (job, link) = (job(&core), link(&core));
    job.start_shares(1, TransportKind::new("model"), Frames::Messages);
    let waiter = {
        let job = Arc::clone(&job);
        thread::spawn(move || job.wait(LONG).expect("ended").is_ok())
    };
    let worker = {
        let (job, link) = (Arc::clone(&job), Arc::clone(&link));
        thread::spawn(move || share(&job, &link))
    };
    let ok = job.wait(LONG).expect("ended").is_ok();
    assert_eq!(waiter.join().expect("the waiter ends"), ok);
    worker.join().expect("the worker ends");
    ended_once(&core, &job);
}

#[test]
fn loom_every_waiter_gets_the_same_outcome() {
    explore(two_waiters_for_one_outcome);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_noticed_a_waiter_that_is_not_woken() {
    Mutant::LostNotify.enable();
    explore(two_waiters_for_one_outcome);
}
