//! A reactor neither loses a wake-up nor forgets a handler.

use super::explore;
use crate::reactor::now;
use crate::reactor::{Cause, Cx, Handler, Next, Reactor};
use crate::sync::{Condvar, Mutant, Mutex};
use crate::transfer::slot::Slot;
use kvferry_sys::poll::Interest;
use loom::thread;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Counts its calls and its drops.
struct Counted {
    wanted: Arc<(Mutex<bool>, Condvar)>,
    seen: Arc<(Mutex<bool>, Condvar)>,
    drops: Arc<AtomicUsize>,
}

impl Handler for Counted {
    fn handle(&mut self, _: Cause, _: &Cx<'_>) -> Next {
        if *self.wanted.0.lock() {
            *self.seen.0.lock() = true;
            self.seen.1.notify_one();
        }
        Next::Wait { interest: Interest::None, deadline: None }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

fn flag() -> Arc<(Mutex<bool>, Condvar)> {
    Arc::new((Mutex::new(false), Condvar::new()))
}

fn wait_for(flag: &(Mutex<bool>, Condvar)) {
    let mut set = flag.0.lock();
    while !*set {
        set = flag.1.wait(set, Duration::from_secs(3600));
    }
}

fn wake_from_another_thread() {
    let reactor = Reactor::start("model".into(), Duration::ZERO).expect("no descriptors needed");
    let (wanted, seen, drops) = (flag(), flag(), Arc::new(AtomicUsize::new(0)));
    let counted =
        Counted { wanted: Arc::clone(&wanted), seen: Arc::clone(&seen), drops: Arc::clone(&drops) };
    let token = reactor.remote().token();
    reactor.remote().add(token, Box::new(counted));
    let waker = {
        let remote = reactor.remote().clone();
        thread::spawn(move || {
            *wanted.0.lock() = true;
            remote.wake(token);
        })
    };
    wait_for(&seen);
    waker.join().expect("the waker ends");
    reactor.stop();
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

#[test]
fn loom_a_wake_up_is_never_lost() {
    explore(wake_from_another_thread);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_noticed_a_wake_up_that_is_cleared_after_the_queue_was_read() {
    Mutant::LateClear.enable();
    explore(wake_from_another_thread);
}

fn stop_against_add() {
    let reactor = Reactor::start("model".into(), Duration::ZERO).expect("no descriptors needed");
    let drops = Arc::new(AtomicUsize::new(0));
    let adder = {
        let (remote, drops) = (reactor.remote().clone(), Arc::clone(&drops));
        thread::spawn(move || {
            for _ in 0..2 {
                let counted = Counted { wanted: flag(), seen: flag(), drops: Arc::clone(&drops) };
                remote.add(remote.token(), Box::new(counted));
            }
        })
    };
    reactor.stop();
    adder.join().expect("the adder ends");
    assert_eq!(drops.load(Ordering::Relaxed), 2, "each handler is dropped once");
}

#[test]
fn loom_a_reactor_that_is_stopped_during_an_add_drops_all_handlers() {
    explore(stop_against_add);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_noticed_a_stop_that_does_not_signal() {
    Mutant::LostNotify.enable();
    explore(stop_against_add);
}

fn fill_against_wait() {
    let slot = Slot::new();
    let filler = {
        let slot = Arc::clone(&slot);
        thread::spawn(move || slot.fill(5))
    };
    let value = slot.wait(now() + Duration::from_secs(3600), None).expect("filled");
    assert_eq!(value, 5);
    filler.join().expect("the filler ends");
}

#[test]
fn loom_a_waiter_for_a_value_gets_it() {
    explore(fill_against_wait);
}

#[test]
#[should_panic(expected = "deadlock")]
fn loom_noticed_a_value_that_wakes_no_waiter() {
    Mutant::LostNotify.enable();
    explore(fill_against_wait);
}
