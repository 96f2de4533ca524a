use super::processes::{joined, killed, spawn};
use super::threads::churn;
use super::*;
use crate::index::layout::STRIPES;
use crate::index::tests::crash::POINTS;
use crate::index::{Changes, Polled, RING_KEYS};
use kvferry_testkit::eventually;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

/// A set that follows an index by its changes alone.
struct Shadow<'a> {
    index: &'a Index,
    changes: Changes,
    set: HashSet<Key>,
    snapshots: u32,
}

impl<'a> Shadow<'a> {
    fn new(member: &'a Member) -> Self {
        let changes = member.subscribe();
        let mut shadow = Self { index: member, changes, set: HashSet::new(), snapshots: 0 };
        shadow.follow(1000);
        shadow
    }

    /// Reads all that there is, `max` keys at once.
    fn follow(&mut self, max: usize) {
        loop {
            let mut keys = Vec::new();
            let polled = self.index.poll(&mut self.changes, max, &mut keys);
            assert!(keys.len() <= max);
            if polled == Polled::Lost {
                self.snapshots += 1;
                self.set = self.index.snapshot().collect();
                continue;
            }
            for key in keys {
                match self.index.find(&key) {
                    Some(_) => self.set.insert(key),
                    None => self.set.remove(&key),
                };
            }
            if polled == Polled::All {
                return;
            }
        }
    }

    fn assert_is_right(&mut self, why: &str) {
        self.follow(1000);
        let there: HashSet<Key> = self.index.iter().map(|entry| entry.key).collect();
        assert_eq!(self.set, there, "{why}");
    }
}

fn remove(member: &Member, n: u64) -> bool {
    member.find(&key(n)).is_some_and(|entry| member.remove(&entry))
}

#[test]
fn a_subscriber_sees_what_was_there_what_comes_and_what_goes_and_no_move() {
    let index = index(100);
    let (writer, reader) = (index.join().expect("a member"), index.join().expect("a member"));
    insert(&writer, 1, 0);
    let mut shadow = Shadow::new(&reader);
    assert_eq!(shadow.set, HashSet::from([key(1)]));
    insert(&writer, 2, 0);
    insert(&reader, 3, 0);
    assert!(remove(&reader, 1));
    shadow.assert_is_right("three changes");
    assert_eq!((shadow.set.clone(), shadow.snapshots), (HashSet::from([key(2), key(3)]), 1));
    let moved = writer.find(&key(2)).expect("there");
    assert!(writer.relocate(&moved, VARIANTS));
    let mut keys = Vec::new();
    assert_eq!(reader.poll(&mut shadow.changes, 10, &mut keys), Polled::All);
    assert_eq!(keys, []);
}

#[test]
fn changes_before_the_first_subscription_take_no_room_and_after_the_last_neither() {
    let index = index(100);
    let member = index.join().expect("a member");
    let end = || index.poll(&mut member.subscribe(), 0, &mut Vec::new());
    insert(&member, 1, 0);
    let changes = member.subscribe();
    assert_eq!(member.member_word(0, super::super::member::PUBLISHED).load(SeqCst), 0);
    insert(&member, 2, 0);
    assert_eq!(member.member_word(0, super::super::member::PUBLISHED).load(SeqCst), 1);
    member.unsubscribe(&changes);
    insert(&member, 3, 0);
    assert_eq!(member.member_word(0, super::super::member::PUBLISHED).load(SeqCst), 1);
    assert_eq!(end(), Polled::Lost, "a new subscriber begins with a snapshot");
}

#[test]
fn a_call_reads_no_more_than_it_is_asked_for() {
    let index = index(100);
    let members = [(); 3].map(|()| index.join().expect("a member"));
    let mut shadow = Shadow::new(&members[0]);
    for n in 0..60 {
        insert(&members[n as usize % 3], n, 0);
    }
    let (mut keys, mut calls) = (Vec::new(), 0);
    while index.poll(&mut shadow.changes, 7, &mut keys) == Polled::More {
        calls += 1;
        assert!(keys.len() <= 7 * calls);
    }
    let all: HashSet<Key> = keys.into_iter().collect();
    assert_eq!(all, (0..60).map(key).collect());
}

#[test]
fn a_subscriber_that_was_lapped_is_told_to_begin_again() {
    let index = index(10);
    let (writer, reader) = (index.join().expect("a member"), index.join().expect("a member"));
    let mut shadow = Shadow::new(&reader);
    // Each round is two entries; the last key stays.
    for _ in 0..RING_KEYS / 2 + 1 {
        insert(&writer, 1, 0);
        assert!(remove(&writer, 1));
    }
    insert(&writer, 2, 0);
    shadow.assert_is_right("lapped");
    assert_eq!(shadow.snapshots, 2);
    for _ in 0..RING_KEYS / 2 {
        insert(&writer, 1, 0);
        assert!(remove(&writer, 1));
    }
    shadow.assert_is_right("exactly a ring");
    assert_eq!(shadow.snapshots, 2);
}

#[test]
fn subscribers_that_begin_and_read_at_any_time_agree_with_the_index_at_rest() {
    // Fewer slots than keys.
    let index = index(16);
    let members = [(); 3].map(|()| index.join().expect("a member"));
    for _ in 0..20 {
        let runs = AtomicBool::new(true);
        let running = || runs.load(SeqCst);
        std::thread::scope(|scope| {
            let writers: Vec<_> = (0..)
                .zip(&members[..2])
                .map(|(seed, member)| scope.spawn(move || churn(member, seed, running)))
                .collect();
            let shadows: Vec<_> = (0..2)
                .map(|late| {
                    let (reader, running) = (&members[2], &running);
                    scope.spawn(move || {
                        std::thread::sleep(Duration::from_millis(late * 5));
                        let mut shadow = Shadow::new(reader);
                        while running() {
                            shadow.follow(5);
                        }
                        shadow
                    })
                })
                .collect();
            std::thread::sleep(Duration::from_millis(30));
            runs.store(false, SeqCst);
            writers.into_iter().for_each(|it| it.join().expect("no panic"));
            for shadow in shadows {
                let mut shadow = shadow.join().expect("no panic");
                shadow.assert_is_right("at rest");
                members[2].unsubscribe(&shadow.changes);
            }
        });
    }
    assert_eq!(index.shared.word(super::super::layout::SUBSCRIBERS).load(SeqCst), 0);
}

#[test]
fn no_change_of_a_member_that_dies_at_any_point_of_it_is_lost() {
    for point in POINTS {
        let index = index(16);
        let keeper = index.join().expect("a member");
        let mut shadow = Shadow::new(&keeper);
        let child = spawn(&index, "churn", Some(point));
        let dead = joined(&index, &keeper);
        eventually(point, || index.has_died(dead));
        shadow.follow(1000);
        killed(child);
        assert!(keeper.sweep(dead));
        shadow.assert_is_right(point);
    }
}

#[test]
fn a_change_of_a_member_that_died_is_published_by_the_next_one_that_changes_the_stripe() {
    let index = index(16);
    let keeper = index.join().expect("a member");
    let mut shadow = Shadow::new(&keeper);
    // Killed when the block is live and its key is in no ring.
    let child = spawn(&index, "churn", Some("publish: begun"));
    let dead = joined(&index, &keeper);
    eventually("it dies", || index.has_died(dead));
    killed(child);
    // Not the keeper's sweep: each stripe is locked once, as a put does.
    for n in 0..24 {
        if !remove(&keeper, n) {
            insert(&keeper, n, 0);
        }
    }
    shadow.assert_is_right("the stripes were taken over");
}

#[test]
fn changes_of_a_dead_member_are_published_though_a_stopped_one_keeps_its_slots_from_being_freed() {
    let index = index(64);
    let [keeper, stopped] = [(); 2].map(|()| index.join().expect("a member"));
    let mut shadow = Shadow::new(&keeper);
    let child = spawn(&index, "churn", Some("publish: begun"));
    let others = || index.members().find(|it| *it != keeper.id() && *it != stopped.id());
    eventually("it joins", || others().is_some());
    let dead = others().expect("it has joined");
    eventually("it dies", || index.has_died(dead));
    killed(child);
    let stripe = |n| index.bucket_of(&key(n)) % STRIPES;
    let n = (1000..).find(|n| index.stripe_owner(stripe(*n)) == 0).expect("most are free");
    let Inserted::New(slot) = insert(&keeper, n, 0) else { panic!("there is room") };
    assert!(remove(&keeper, n));
    assert!(index.slot(slot).try_hold(dead));
    let held = stopped.lock(stripe(n)).expect("free");
    assert!(!keeper.sweep(dead));
    shadow.assert_is_right("the sweep has failed");
    drop(held);
    assert!(keeper.sweep(dead));
}

#[test]
fn the_subscriptions_of_a_dead_member_end_with_its_sweep() {
    let index = index(16);
    let keeper = index.join().expect("a member");
    let child = spawn(&index, "subscribe", None);
    let dead = joined(&index, &keeper);
    let count = || index.shared.word(super::super::layout::SUBSCRIBERS).load(SeqCst);
    eventually("it subscribes", || count() == 3);
    super::processes::signal(&child, rustix::process::Signal::KILL);
    killed(child);
    assert!(keeper.sweep(dead));
    assert_eq!(count(), 0);
}

#[test]
fn a_subscription_that_meets_a_stopped_owner_begins_again_when_the_owner_has_gone_on() {
    let index = index(16);
    let reader = index.join().expect("a member");
    let writer = index.join().expect("a member");
    let held = writer.lock(writer.bucket_of(&key(1))).expect("free");
    let mut shadow = Shadow::new(&reader);
    shadow.follow(10);
    assert_eq!(shadow.snapshots, 1);
    drop(held);
    shadow.follow(10);
    assert_eq!(shadow.snapshots, 2);
}

#[test]
fn a_subscriber_that_waits_is_woken_by_the_first_change_of_any_member() {
    let index = index(100);
    let (writer, reader) = (index.join().expect("a member"), index.join().expect("a member"));
    let mut shadows = [Shadow::new(&reader), Shadow::new(&reader)];
    assert!(!index.wait_changed(&shadows[0].changes, Duration::ZERO, || false));
    for round in 0..200 {
        std::thread::scope(|scope| {
            let waiting = shadows.each_ref().map(|shadow| {
                let index = &index;
                scope.spawn(move || {
                    let began = Instant::now();
                    // A wake-up that is lost ends the test.
                    assert!(index.wait_changed(&shadow.changes, Duration::from_secs(60), || false));
                    began.elapsed()
                })
            });
            match round % 2 {
                0 => assert_eq!(insert(&writer, 1, 0), Inserted::New(0)),
                _ => assert!(remove(&writer, 1)),
            }
            for waiting in waiting {
                assert!(waiting.join().expect("no panic") < Duration::from_secs(60));
            }
        });
        shadows.iter_mut().for_each(|shadow| shadow.follow(10));
    }
}
