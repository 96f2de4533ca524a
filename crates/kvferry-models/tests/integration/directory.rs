//! What the directory promises, one sentence each, in virtual time.

mod pauses;

use kvferry_proto::directory::{
    ContentKey, DirectoryMessage, Follow, Followed, Gone, Limits, OFFERS_MAX, Offer, Offered,
    Place, Publisher, PublisherAction, Subscriber, SubscriberAction,
};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::handoff::{HandoffId, PeerId, Refusal};
use kvferry_proto::{Origin, Timestamp, WireCode};
use std::collections::VecDeque;
use std::net::IpAddr;
use std::time::Duration;

const PREFILL: EngineId = EngineId(1);
const DECODE: EngineId = EngineId(2);
const PLACE: Place = Place(0);
const SECOND: Duration = Duration::from_secs(1);

fn at(host: &str) -> Origin {
    Origin::from(host.parse::<IpAddr>().expect("an address"))
}

fn start() -> Timestamp {
    Timestamp::default() + Duration::from_secs(1000)
}

fn key(number: u8) -> ContentKey {
    ContentKey([number; 32])
}

fn transfer(number: usize) -> HandoffId {
    HandoffId::new(&format!("xfer-{number}")).expect("short enough")
}

fn address(engine: EngineId) -> String {
    format!("10.0.0.{}:7600", engine.0)
}

/// A publisher, a subscriber, and the session between them.
struct Pair {
    now: Timestamp,
    limits: Limits,
    publisher: Publisher,
    subscriber: Subscriber,
    /// The publisher's number of the session, while there is one.
    session: Option<PeerId>,
    sessions: u64,
    /// Messages under way; the flag is true for those to the publisher.
    wire: VecDeque<(bool, DirectoryMessage)>,
    /// Messages wait on their way until they are let through.
    stalled: bool,
    /// Attempts to connect fail.
    is_away: bool,
    connects: usize,
    watched: bool,
    refused: Vec<WireCode>,
    sent: usize,
}

impl Pair {
    fn new() -> Self {
        Self::with(Limits::default())
    }

    fn with(limits: Limits) -> Self {
        Self {
            now: start(),
            publisher: Publisher::new(PREFILL, address(PREFILL), limits.clone()),
            subscriber: Subscriber::new(DECODE, 1, limits.clone(), start()),
            limits,
            session: None,
            sessions: 0,
            wire: VecDeque::new(),
            stalled: false,
            is_away: false,
            connects: 0,
            watched: false,
            refused: Vec::new(),
            sent: 0,
        }
    }

    /// A subscriber that follows.
    fn following() -> Self {
        let mut pair = Self::new();
        pair.pass(Duration::ZERO);
        assert_eq!((pair.publisher.followers(), pair.is_following()), (1, true));
        pair
    }

    fn is_following(&self) -> bool {
        self.subscriber.gauges()[1].1 == 1
    }

    fn heard(&self) -> usize {
        self.subscriber.gauges()[0].1
    }

    fn publish(&mut self, of: u8, number: usize) {
        assert_eq!(self.publisher.publish(key(of), &transfer(number), self.now), Ok(()));
        self.work();
    }

    fn retract(&mut self, number: usize) {
        self.publisher.retract(&transfer(number));
        self.work();
    }

    fn take(&mut self, of: u8) -> Option<HandoffId> {
        let found = self.subscriber.take(&key(of), self.now)?;
        assert_eq!((found.place, found.address), (PLACE, address(found.engine)));
        Some(found.transfer)
    }

    /// The session ends, with what is under way.
    fn cut(&mut self) {
        self.wire.clear();
        if let Some(peer) = self.session.take() {
            self.publisher.lost(peer);
        }
        self.subscriber.lost(PLACE, self.now);
        self.work();
    }

    fn restart_publisher(&mut self, engine: EngineId) {
        self.cut();
        self.publisher = Publisher::new(engine, address(engine), self.limits.clone());
    }

    fn restart_subscriber(&mut self) {
        self.cut();
        self.watched = false;
        self.subscriber = Subscriber::new(EngineId(9), 1, self.limits.clone(), self.now);
    }

    /// Lets time pass, and stops at each due time.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let due = [self.publisher.next_timeout(), self.subscriber.next_timeout()];
            let due = due.into_iter().flatten().min().filter(|due| *due <= until);
            self.now = due.unwrap_or(until).max(self.now);
            self.publisher.expire(self.now);
            self.subscriber.expire(self.now);
            self.work();
            if due.is_none() {
                break;
            }
        }
    }

    fn work(&mut self) {
        loop {
            while let Some(action) = self.subscriber.poll() {
                match action {
                    SubscriberAction::Connect { place } => {
                        self.connects += 1;
                        self.sessions += 1;
                        if self.is_away {
                            self.subscriber.lost(place, self.now);
                        } else {
                            self.session = Some(PeerId(self.sessions));
                            self.subscriber.opened(place, at("10.0.0.1"), self.now);
                        }
                    }
                    SubscriberAction::Send { message, .. } => self.wire.push_back((true, message)),
                    SubscriberAction::Watch { on, .. } => self.watched = on,
                    SubscriberAction::Disconnect { .. } => self.cut(),
                    SubscriberAction::Refused { code, .. } => self.refused.push(code),
                }
            }
            while let Some(action) = self.publisher.poll() {
                match action {
                    PublisherAction::Send { to, message } if self.session == Some(to) => {
                        self.wire.push_back((false, message));
                    }
                    PublisherAction::Disconnect { peer } if self.session == Some(peer) => {
                        self.cut()
                    }
                    _ => {}
                }
            }
            if self.stalled {
                return;
            }
            let Some((to_publisher, message)) = self.wire.pop_front() else { return };
            self.sent += 1;
            match (to_publisher, self.session) {
                (true, Some(peer)) => {
                    self.publisher.receive(peer, at("10.0.0.2"), &message, self.now);
                }
                (false, Some(_)) => self.subscriber.receive(PLACE, message, self.now),
                (_, None) => {}
            }
        }
    }
}

/// The actions of a publisher that follow a message of a peer.
fn tell(
    publisher: &mut Publisher,
    peer: u64,
    host: &str,
    message: impl Into<DirectoryMessage>,
    now: Timestamp,
) -> Vec<PublisherAction> {
    publisher.receive(PeerId(peer), at(host), &message.into(), now);
    std::iter::from_fn(|| publisher.poll()).collect()
}

fn follow(
    publisher: &mut Publisher,
    peer: u64,
    host: &str,
    now: Timestamp,
) -> Vec<PublisherAction> {
    tell(publisher, peer, host, Follow { engine: EngineId(peer.into()) }, now)
}

#[test]
fn i5_a_prompt_is_found_whether_it_was_offered_before_its_engine_was_followed_or_after() {
    let mut pair = Pair::new();
    pair.publish(1, 1);
    pair.pass(Duration::ZERO);
    pair.publish(2, 2);
    assert_eq!((pair.take(1), pair.take(2)), (Some(transfer(1)), Some(transfer(2))));
    assert_eq!((pair.take(1), pair.take(3)), (None, None));
}

#[test]
fn the_newest_offer_of_a_prompt_is_found_first_and_each_once() {
    let mut pair = Pair::following();
    (0..3).for_each(|number| pair.publish(1, number));
    pair.retract(1);
    let found: Vec<_> = std::iter::from_fn(|| pair.take(1)).collect();
    assert_eq!(found, [transfer(2), transfer(0)]);
}

#[test]
fn a_listing_is_as_many_messages_as_it_needs_and_no_more() {
    let mut publisher = Publisher::new(PREFILL, address(PREFILL), Limits::default());
    for number in 0..2 * OFFERS_MAX + 1 {
        assert_eq!(publisher.publish(key(1), &transfer(number), start()), Ok(()));
    }
    let told = follow(&mut publisher, 5, "10.0.0.5", start());
    let lens: Vec<_> = told
        .iter()
        .filter_map(|it| match it {
            PublisherAction::Send { message: DirectoryMessage::Offered(it), .. } => {
                Some(it.offers.len())
            }
            _ => None,
        })
        .collect();
    assert_eq!((told.len(), lens), (4, vec![OFFERS_MAX, OFFERS_MAX, 1]));
}

#[test]
fn i3_what_was_lost_with_a_session_is_made_up_for_by_the_next() {
    let mut pair = Pair::following();
    (1..=3).for_each(|number| pair.publish(number as u8, number));
    assert_eq!(pair.heard(), 3);
    pair.stalled = true;
    pair.retract(1);
    pair.publish(4, 4);
    pair.cut();
    pair.stalled = false;
    // What is known is used until more is known.
    assert_eq!(pair.heard(), 3);
    pair.pass(SECOND);
    assert!(pair.is_following());
    assert_eq!(
        [1, 2, 3, 4].map(|of| pair.take(of)),
        [None, Some(transfer(2)), Some(transfer(3)), Some(transfer(4))]
    );
}

#[test]
fn i12_a_restarted_publisher_is_followed_anew_and_its_earlier_offers_are_forgotten() {
    let mut pair = Pair::following();
    pair.publish(1, 1);
    // The number of the first term is the same again.
    pair.restart_publisher(EngineId(3));
    pair.pass(SECOND);
    assert_eq!((pair.publisher.followers(), pair.take(1)), (1, None));
    pair.publish(1, 7);
    let found = pair.subscriber.take(&key(1), pair.now).expect("it is on offer");
    assert_eq!(
        (found.engine, found.address, found.transfer),
        (EngineId(3), address(EngineId(3)), transfer(7))
    );
}

#[test]
fn i12_a_restarted_subscriber_is_told_of_everything() {
    let mut pair = Pair::following();
    pair.publish(1, 1);
    assert_eq!(pair.take(1), Some(transfer(1)));
    pair.restart_subscriber();
    pair.pass(Duration::ZERO);
    assert_eq!((pair.publisher.followers(), pair.take(1)), (1, Some(transfer(1))));
}

#[test]
fn a_publisher_that_is_away_is_tried_again_after_waits_that_double_up_to_the_longest() {
    let mut pair = Pair::new();
    pair.is_away = true;
    let (first, longest) = pair.limits.retry;
    pair.pass(Duration::ZERO);
    let mut wait = first;
    for attempt in 1..8 {
        assert_eq!(pair.connects, attempt);
        pair.pass(wait - Duration::from_nanos(1));
        assert_eq!(pair.connects, attempt, "not before its time");
        pair.pass(Duration::from_nanos(1));
        wait = (2 * wait).min(longest);
    }
    assert_eq!(wait, longest);
    pair.is_away = false;
    pair.pass(longest);
    assert!(pair.is_following());
    // What has worked is tried again soon.
    pair.cut();
    pair.pass(first);
    assert!(pair.is_following());
}

#[test]
fn i6_a_publisher_that_does_not_answer_is_watched_until_its_session_is_ended_and_tried_again() {
    let mut pair = Pair::new();
    pair.stalled = true;
    pair.pass(Duration::ZERO);
    assert!(pair.watched && pair.session.is_some());
    pair.pass(pair.limits.answer - Duration::from_nanos(1));
    assert!(pair.watched && pair.session.is_some());
    pair.pass(Duration::from_nanos(1));
    assert!(!pair.watched && pair.session.is_none());
    pair.stalled = false;
    pair.pass(pair.limits.retry.0);
    assert!(pair.is_following() && !pair.watched);
}

#[test]
fn i6_a_follower_that_is_silent_is_forgotten_when_its_lease_is_over() {
    let mut publisher = Publisher::new(PREFILL, address(PREFILL), Limits::default());
    let lease = Limits::default().lease;
    follow(&mut publisher, 5, "10.0.0.5", start());
    follow(&mut publisher, 6, "10.0.0.6", start() + SECOND);
    assert_eq!(publisher.next_timeout(), Some(start() + lease));
    publisher.expire(start() + lease);
    assert_eq!(publisher.poll(), Some(PublisherAction::Disconnect { peer: PeerId(5) }));
    assert_eq!((publisher.poll(), publisher.followers()), (None, 1));
    // The publisher sends it nothing, and the offer to the other one.
    assert_eq!(publisher.publish(key(1), &transfer(1), start() + lease), Ok(()));
    assert!(matches!(publisher.poll(), Some(PublisherAction::Send { to: PeerId(6), .. })));
    assert_eq!(publisher.poll(), None);
}

#[test]
fn i10_following_costs_two_messages_in_a_third_of_the_lease() {
    let mut pair = Pair::following();
    let (before, thirds) = (pair.sent, 30);
    pair.pass(pair.limits.lease / 3 * thirds);
    assert!(pair.is_following());
    assert_eq!((pair.sent - before, pair.connects), (2 * thirds as usize, 1));
}

#[test]
fn an_engine_does_not_follow_itself() {
    let mut publisher = Publisher::new(PREFILL, address(PREFILL), Limits::default());
    let told = tell(&mut publisher, 5, "10.0.0.1", Follow { engine: PREFILL }, start());
    assert_eq!(publisher.followers(), 0);
    let [PublisherAction::Send { message: DirectoryMessage::NotFollowed(it), .. }] = &told[..]
    else {
        panic!("{told:?}")
    };
    assert_eq!((it.code, &*it.detail), (WireCode::Unsupported, "an engine does not follow itself"));
    // Nor does it fetch from itself what a publisher passes off as its own.
    let mut pair = Pair::following();
    let followed = Followed { engine: DECODE, address: String::new(), lease_ms: 1, term: 8 };
    pair.subscriber.receive(PLACE, followed.into(), pair.now);
    let offer = Offer { key: key(1), transfer: transfer(1), budget_ms: 1000 };
    pair.subscriber.receive(PLACE, Offered { offers: vec![offer] }.into(), pair.now);
    assert_eq!(pair.heard(), 0);
}

#[test]
fn i8_a_host_that_follows_often_leaves_others_their_places() {
    let limits = Limits { followers: 8, ..Limits::default() };
    let mut publisher = Publisher::new(PREFILL, address(PREFILL), limits);
    let number = std::cell::Cell::new(100);
    let followed = |publisher: &mut Publisher, host: &str, count: usize| -> (usize, usize) {
        let (mut followed, mut refused) = (0, 0);
        for _ in 0..count {
            number.set(number.get() + 1);
            for action in follow(publisher, number.get(), host, start()) {
                match action {
                    PublisherAction::Send { message: DirectoryMessage::Followed(_), .. } => {
                        followed += 1;
                    }
                    PublisherAction::Send {
                        message: DirectoryMessage::NotFollowed(it), ..
                    } => {
                        assert_eq!(it.code, WireCode::Busy);
                    }
                    PublisherAction::Refused { .. } => refused += 1,
                    action => panic!("{action:?}"),
                }
            }
        }
        (followed, refused)
    };
    // A host alone may have all places.
    assert_eq!(followed(&mut publisher, "10.0.0.1", 1000), (8, 992));
    // The newest of the host that has most go, until both have as many.
    assert_eq!(followed(&mut publisher, "fd00::1", 5), (4, 5));
    assert_eq!(followed(&mut publisher, "10.0.1.1", 5), (2, 5));
    assert_eq!(publisher.followers(), 8);
    (1..=number.get()).for_each(|peer| publisher.lost(PeerId(peer)));
    assert_eq!(publisher.gauges(), [("followers", 0), ("published", 0)]);
    assert_eq!(followed(&mut publisher, "10.0.0.1", 9), (8, 1), "the places are free again");
}

#[test]
fn a_follower_that_was_refused_asks_again_and_its_earlier_offers_are_forgotten() {
    let mut pair = Pair::with(Limits { followers: 1, ..Limits::default() });
    pair.pass(Duration::ZERO);
    pair.publish(1, 1);
    assert_eq!(pair.heard(), 1);
    // Another network needs the place as much, and has it for as long as it follows.
    pair.cut();
    follow(&mut pair.publisher, 1000, "10.9.9.9", pair.now);
    pair.pass(SECOND);
    assert_eq!(
        (&pair.refused[..], pair.is_following(), pair.heard()),
        (&[WireCode::Busy][..], false, 0)
    );
    assert!(!pair.watched);
    pair.publisher.lost(PeerId(1000));
    pair.pass(pair.limits.retry.1);
    assert_eq!((pair.is_following(), pair.take(1)), (true, Some(transfer(1))));
}

#[test]
fn i8_offers_are_bounded_in_all_and_of_one_prompt() {
    let limits = Limits { heard: 100, heard_of_prompt: 10, ..Limits::default() };
    let mut pair = Pair::with(limits);
    pair.pass(Duration::ZERO);
    (0..50).for_each(|number| pair.publish(1, number));
    assert_eq!((pair.heard(), pair.take(1)), (10, Some(transfer(49))));
    (100..300).for_each(|number| pair.publish(2 + (number % 100) as u8, number));
    assert_eq!((pair.heard(), pair.take(1)), (100, None), "the oldest are dropped first");
    // Of a publisher, its own limit.
    let limits = Limits { offers: 2, ..Limits::default() };
    let mut publisher = Publisher::new(PREFILL, address(PREFILL), limits);
    let published = [1, 1, 2, 3].map(|it| publisher.publish(key(1), &transfer(it), start()));
    assert_eq!(published, [Ok(()), Err(Refusal::InUse), Ok(()), Err(Refusal::Full { limit: 2 })]);
    publisher.retract(&transfer(1));
    assert_eq!(publisher.publish(key(1), &transfer(3), start()), Ok(()));
}

#[test]
fn i8_a_publisher_that_offers_much_leaves_others_their_part() {
    let limits = Limits { heard: 100, ..Limits::default() };
    let mut subscriber = Subscriber::new(DECODE, 2, limits, start());
    subscriber.expire(start());
    for (place, host) in [(Place(0), "10.0.0.1"), (Place(1), "10.0.1.1")] {
        subscriber.opened(place, at(host), start());
        let engine = EngineId(10 + place.0 as u128);
        let followed = Followed { engine, address: address(engine), lease_ms: 10_000, term: 1 };
        subscriber.receive(place, followed.into(), start());
    }
    let mut offer = |place: usize, of: u8, number: usize| {
        let offer = Offer { key: key(of), transfer: transfer(number), budget_ms: 1000 };
        subscriber.receive(Place(place), Offered { offers: vec![offer] }.into(), start());
    };
    (0..20).for_each(|number| offer(1, 200, number));
    (0..1000).for_each(|number| offer(0, (number % 50) as u8, number));
    let found = std::iter::from_fn(|| subscriber.take(&key(200), start())).count();
    assert_eq!((found, subscriber.gauges()[0].1), (20, 80));
}

#[test]
fn i6_an_offer_ends_with_its_time_on_both_sides() {
    let mut pair = Pair::following();
    pair.publish(1, 1);
    pair.pass(SECOND);
    pair.publish(2, 2);
    pair.pass(pair.limits.offer_ttl - SECOND);
    assert_eq!((pair.heard(), pair.publisher.gauges()[1].1), (1, 1));
    assert_eq!((pair.take(1), pair.take(2)), (None, Some(transfer(2))));
    pair.pass(SECOND);
    assert_eq!((pair.heard(), pair.publisher.gauges()[1].1), (0, 0));
    // A publisher that names a longer time is not believed.
    let offer = Offer { key: key(1), transfer: transfer(3), budget_ms: u32::MAX };
    pair.subscriber.receive(PLACE, Offered { offers: vec![offer] }.into(), pair.now);
    pair.pass(pair.limits.offer_ttl);
    assert_eq!(pair.heard(), 0);
}

#[test]
fn what_a_peer_says_before_it_is_asked_or_of_another_role_changes_nothing() {
    let mut pair = Pair::new();
    let offer = Offer { key: key(1), transfer: transfer(1), budget_ms: 1000 };
    let offered = || DirectoryMessage::from(Offered { offers: vec![offer.clone()] });
    pair.subscriber.receive(PLACE, offered(), pair.now);
    pair.subscriber.receive(Place(7), offered(), pair.now);
    pair.stalled = true;
    pair.pass(Duration::ZERO);
    pair.subscriber.receive(PLACE, offered(), pair.now);
    assert_eq!((pair.heard(), pair.publisher.followers()), (0, 0), "it is not followed yet");
    pair.subscriber.receive(PLACE, Follow { engine: PREFILL }.into(), pair.now);
    assert_eq!(tell(&mut pair.publisher, 9, "10.0.0.9", offered(), pair.now), []);
    assert_eq!(
        tell(&mut pair.publisher, 9, "10.0.0.9", Gone { transfer: transfer(1) }, pair.now),
        []
    );
    pair.subscriber.lost(Place(7), pair.now);
    pair.subscriber.opened(Place(7), at("10.0.0.1"), pair.now);
    assert_eq!(pair.subscriber.failed(Place(7), SECOND, SECOND, pair.now), None);
    pair.subscriber.worked(Place(7));
}
