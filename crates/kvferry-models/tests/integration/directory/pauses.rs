//! Publishers that time out are not asked for a while.

use super::*;

/// A subscriber that follows `publishers` publishers.
fn follows(publishers: usize) -> Subscriber {
    let mut subscriber = Subscriber::new(DECODE, publishers, Limits::default(), start());
    subscriber.expire(start());
    for place in (0..publishers).map(Place) {
        subscriber.opened(place, at("10.0.0.1"), start());
        let engine = EngineId(10 + place.0 as u128);
        let followed = Followed { engine, address: address(engine), lease_ms: 10_000, term: 1 };
        subscriber.receive(place, followed.into(), start());
    }
    subscriber
}

fn offer(subscriber: &mut Subscriber, place: usize, of: u8, number: usize, now: Timestamp) {
    let offer = Offer { key: key(of), transfer: transfer(number), budget_ms: u32::MAX };
    subscriber.receive(Place(place), Offered { offers: vec![offer] }.into(), now);
}

#[test]
fn a_publisher_that_timed_out_is_not_asked_for_a_while_and_others_are() {
    let mut subscriber = follows(2);
    let mut now = start();
    subscriber.worked(Place(1));
    let (first, longest) = Limits::default().pause;
    let mut pause = first;
    for number in 0..8 {
        assert_eq!(subscriber.failed(Place(0), SECOND, SECOND, now), Some(pause));
        offer(&mut subscriber, 1, 1, 1000 + number, now);
        offer(&mut subscriber, 0, 1, number, now);
        let found = subscriber.take(&key(1), now).map(|it| it.place);
        assert_eq!(found, Some(Place(1)), "the newest is of the paused publisher");
        let before = now + pause - Duration::from_nanos(1);
        assert_eq!(subscriber.take(&key(1), before), None);
        now = now + pause;
        // One that comes later than its offer has ended finds another one.
        offer(&mut subscriber, 0, 1, 100 + number, now);
        assert_eq!(subscriber.take(&key(1), now).map(|it| it.place), Some(Place(0)));
        while subscriber.take(&key(1), now).is_some() {}
        pause = (2 * pause).min(longest);
    }
    assert_eq!(pause, longest);
    subscriber.worked(Place(0));
    assert_eq!(subscriber.failed(Place(0), SECOND, SECOND, now), Some(first));
}

#[test]
fn a_publisher_is_paused_only_for_what_it_cost_itself() {
    let mut subscriber = follows(3);
    (1..3).map(Place).for_each(|place| subscriber.worked(place));
    let (now, whole, first) = (start(), 4 * SECOND, Limits::default().pause.0);
    // The session of the first one ends after three seconds, and the second one has the rest.
    assert_eq!(subscriber.failed(Place(0), 3 * SECOND, whole, now), Some(first));
    assert_eq!(subscriber.failed(Place(1), SECOND, whole, now), None);
    for place in 0..3 {
        offer(&mut subscriber, place, place as u8, place, now);
    }
    let found = [0, 1, 2].map(|of| subscriber.take(&key(of), now).is_some());
    assert_eq!(found, [false, true, true]);
    assert_eq!(subscriber.failed(Place(1), whole, whole, now), Some(first));
}

#[test]
fn i6_publishers_that_fail_sooner_hold_the_caller_no_longer_together() {
    let mut subscriber = follows(16);
    (0..8).map(Place).for_each(|place| subscriber.worked(place));
    let (now, whole) = (start(), 10 * SECOND);
    // Half of a look-up's time, in parts.
    for place in (0..5).map(Place) {
        assert_eq!(subscriber.failed(place, SECOND, whole, now), None);
    }
    for place in 0..16 {
        offer(&mut subscriber, place, place as u8, place, now);
        assert_eq!(subscriber.take(&key(place as u8), now), None);
    }
    let now = now + Limits::default().pause.0;
    assert!((0..16).all(|of| subscriber.take(&key(of), now).is_some()));
}

/// The time of a look-up.
const WAIT: Duration = Duration::from_secs(2);

/// A caller with requests all the time, for prompts that each publisher goes on to offer.
struct Caller {
    subscriber: Subscriber,
    now: Timestamp,
    hangs: Vec<bool>,
    requests: usize,
    /// The time that hanging fetches have held the executor.
    held: Duration,
    /// Prompts that each publisher has handed over.
    handed: Vec<usize>,
}

impl Caller {
    fn new(hangs: &[bool]) -> Self {
        Self {
            subscriber: follows(hangs.len()),
            now: start(),
            hangs: hangs.to_vec(),
            requests: 0,
            held: Duration::ZERO,
            handed: vec![0; hangs.len()],
        }
    }

    /// Returns for how long the caller was held within a time.
    fn runs(&mut self, time: Duration) -> Duration {
        let (until, before) = (self.now + time, self.held);
        while self.now < until {
            let place = self.requests % self.hangs.len();
            self.requests += 1;
            offer(&mut self.subscriber, place, place as u8, self.requests, self.now);
            let found = self.subscriber.take(&key(place as u8), self.now);
            if found.is_some() && self.hangs[place] {
                (self.now, self.held) = (self.now + WAIT, self.held + WAIT);
                let pause = self.subscriber.failed(Place(place), WAIT, WAIT, self.now);
                assert!(pause.is_some());
            } else if found.is_some() {
                self.subscriber.worked(Place(place));
                self.handed[place] += 1;
            }
            self.now = self.now + SECOND / 10;
        }
        self.held - before
    }
}

const HOUR: Duration = Duration::from_secs(3600);

#[test]
fn i6_publishers_that_hang_hold_the_caller_no_longer_than_one_does() {
    for have_worked in [false, true] {
        let held = [1, 8, 31].map(|publishers| {
            let mut caller = Caller::new(&vec![!have_worked; publishers]);
            assert!(!have_worked || caller.runs(60 * SECOND).is_zero());
            caller.hangs.fill(true);
            [60 * SECOND, HOUR, HOUR].map(|time| caller.runs(time))
        });
        let [one, others @ ..] = held;
        assert!(one[0] <= 6 * WAIT, "{one:?}");
        // A look-up a minute: the longest pause, and the look-up.
        assert!(one[2] <= 60 * WAIT, "{one:?}");
        for other in others {
            assert!(other.iter().zip(one).all(|(other, one)| *other <= one), "{other:?} {one:?}");
        }
    }
}

#[test]
fn publishers_that_work_are_asked_while_others_hang_and_those_that_recover_again() {
    for hanging in [1, 8, 31] {
        let mut hangs = vec![true; hanging];
        hangs.extend([false; 4]);
        let mut caller = Caller::new(&hangs);
        let one = Caller::new(&[true]).runs(HOUR);
        assert!(caller.runs(HOUR) <= one);
        let (before, requests) = (caller.handed.clone(), caller.requests);
        caller.runs(HOUR);
        let asked = (caller.requests - requests) / hangs.len();
        for (after, before) in caller.handed.iter().zip(&before).skip(hanging) {
            let handed = after - before;
            assert!(handed >= asked, "{handed} of {asked} with {hanging}");
        }
        // All are asked again soon after they work, and the next pause is as short as the first.
        let all_are_asked = |caller: &mut Caller| {
            caller.hangs.fill(false);
            caller.runs(300 * SECOND);
            let (before, requests) = (caller.handed.iter().sum::<usize>(), caller.requests);
            assert_eq!(caller.runs(60 * SECOND), Duration::ZERO);
            let handed = caller.handed.iter().sum::<usize>() - before;
            assert_eq!(handed, caller.requests - requests);
        };
        all_are_asked(&mut caller);
        caller.hangs[0] = true;
        assert_eq!(caller.runs(WAIT + SECOND), WAIT);
        all_are_asked(&mut caller);
    }
}
