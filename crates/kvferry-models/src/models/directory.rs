//! Engines that decode follow engines that prefill, with random faults, in virtual time. What must hold:
//!
//! * a subscriber that follows knows all prompts that its publisher has on offer, but for those that it has taken in this
//!   term, and it finds no prompt whose publisher has retracted it or was restarted (I3, I12);
//! * a subscriber finds only what a publisher has offered, of the engine that is there, under the right key;
//! * a publisher that is paused is not asked;
//! * a session is watched exactly while an answer is due (I6, I10);
//! * nothing is beyond its limit, and at the end nothing is kept (I8).
//!
//! Sessions are lost with what is under way; either end restarts as another incarnation; time passes; a publisher stops
//! answering for a while.

use super::Model;
use crate::engines::here;
use crate::pair::ms;
use kvferry_proto::Timestamp;
use kvferry_proto::directory::{
    ContentKey, DirectoryMessage, Limits, Place, Publisher, PublisherAction, Subscriber,
    SubscriberAction,
};
use kvferry_proto::engine_handshake::EngineId;
use kvferry_proto::fuzzing::{Met, Script};
use kvferry_proto::handoff::{HandoffId, PeerId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

pub const MODEL: Model = Model {
    name: "directory_model",
    run,
    rows: &ROWS,
    columns: &["away", "asking", "following", "refused"],
    unreachable: &[],
    cases: (2000, 300),
};

const PUBLISH: &str = "publish";
const RETRACT: &str = "retract";
const STEP: &str = "a message arrives";
const CUT: &str = "disconnect";
const RESTART_P: &str = "publisher restarts";
const RESTART_S: &str = "subscriber restarts";
const TAKE: &str = "take";
const TIMED_OUT: &str = "a fetch times out";
const WORKED: &str = "a fetch works";
const WAIT: &str = "time passes";

const ROWS: [&str; 10] =
    [PUBLISH, RETRACT, STEP, CUT, RESTART_P, RESTART_S, TAKE, TIMED_OUT, WORKED, WAIT];

const PUBLISHERS: usize = 2;
const SUBSCRIBERS: usize = 3;
const KEYS: usize = 4;

/// One publisher has room for one subscriber.
fn limits(of: usize) -> Limits {
    Limits {
        followers: if of == 0 { 1 } else { SUBSCRIBERS },
        offers: 12,
        heard: 16,
        heard_of_prompt: 6,
        offer_ttl: Duration::from_secs(30),
        ..Limits::default()
    }
}

/// The session of a subscriber and a publisher.
#[derive(Default)]
struct Link {
    /// The publisher's number of the session, while there is one.
    up: Option<PeerId>,
    /// Messages in flight; the flag is true for those to the publisher.
    wire: VecDeque<(bool, DirectoryMessage)>,
    watched: bool,
    connecting: bool,
    was_refused: bool,
    /// What the subscriber has taken since the publisher last began to list its offers to it.
    taken: BTreeSet<HandoffId>,
}

struct PublisherState {
    machine: Publisher,
    engine: EngineId,
    /// What is on offer: key, and the end of its time.
    offers: BTreeMap<HandoffId, (ContentKey, Timestamp)>,
}

struct World<'a> {
    script: Script<'a>,
    now: Timestamp,
    numbers: u64,
    publishers: Vec<PublisherState>,
    subscribers: Vec<Subscriber>,
    /// By subscriber, then publisher.
    links: Vec<Vec<Link>>,
    /// Until when a subscriber does not ask a publisher, and for how long it paused last.
    pauses: BTreeMap<(usize, usize), (Timestamp, Duration)>,
}

fn run(bytes: &[u8], met: Met<'_>) {
    let mut world = World::new(bytes);
    world.expire();
    world.work();
    while !world.script.is_empty() {
        let (s, p) = (world.script.below(SUBSCRIBERS), world.script.below(PUBLISHERS));
        let row = world.script.pick(&[
            PUBLISH, PUBLISH, RETRACT, STEP, STEP, STEP, STEP, CUT, RESTART_P, RESTART_S, TAKE,
            TAKE, TIMED_OUT, WORKED, WAIT, WAIT,
        ]);
        met(row, world.state(s, p));
        world.act(row, s, p);
    }
    world.settle();
}

impl<'a> World<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let mut world = Self {
            script: Script::new(bytes),
            now: Timestamp::default() + Duration::from_secs(1000),
            numbers: 0,
            publishers: Vec::new(),
            subscribers: Vec::new(),
            links: Vec::new(),
            pauses: BTreeMap::new(),
        };
        for p in 0..PUBLISHERS {
            let made = world.publisher(p);
            world.publishers.push(made);
        }
        for _ in 0..SUBSCRIBERS {
            let made = world.subscriber();
            world.subscribers.push(made);
            world.links.push((0..PUBLISHERS).map(|_| Link::default()).collect());
        }
        world
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        self.numbers
    }

    fn publisher(&mut self, p: usize) -> PublisherState {
        let engine = EngineId(self.number().into());
        let machine = Publisher::new(engine, address(engine), limits(p));
        PublisherState { machine, engine, offers: BTreeMap::new() }
    }

    fn subscriber(&mut self) -> Subscriber {
        let engine = EngineId(self.number().into());
        Subscriber::new(engine, PUBLISHERS, limits(1), self.now)
    }

    fn state(&self, s: usize, p: usize) -> &'static str {
        let link = &self.links[s][p];
        match link.up {
            None => "away",
            Some(_) if link.watched => "asking",
            Some(_) if link.was_refused => "refused",
            Some(_) => "following",
        }
    }

    fn act(&mut self, row: &'static str, s: usize, p: usize) {
        match row {
            PUBLISH => self.publish(p),
            RETRACT => {
                let live: Vec<_> = self.publishers[p].offers.keys().cloned().collect();
                if !live.is_empty() {
                    let transfer = live[self.script.below(live.len())].clone();
                    self.publishers[p].machine.retract(&transfer);
                    self.publishers[p].offers.remove(&transfer);
                }
            }
            STEP => {
                let is_waiting = !self.links[s][p].wire.is_empty();
                if let Some((s, p)) = Some((s, p)).filter(|_| is_waiting).or_else(|| self.waiting())
                {
                    self.deliver(s, p);
                }
            }
            CUT => self.cut(s, p),
            RESTART_P => {
                (0..SUBSCRIBERS).for_each(|s| self.cut(s, p));
                self.publishers[p] = self.publisher(p);
            }
            RESTART_S => {
                for p in 0..PUBLISHERS {
                    self.cut(s, p);
                    self.links[s][p] = Link::default();
                    self.pauses.remove(&(s, p));
                }
                self.subscribers[s] = self.subscriber();
            }
            TAKE => {
                let key = key(self.script.below(KEYS));
                self.take(s, key);
            }
            TIMED_OUT => {
                let pause = self.subscribers[s].failed(Place(p), ms(2), ms(2), self.now);
                let before = self.pauses.get(&(s, p)).map_or(Duration::ZERO, |it| it.1);
                let (first, longest) = limits(1).pause;
                let pause = pause.expect("it took all the time");
                assert_eq!(pause, (2 * before).clamp(first, longest));
                self.pauses.insert((s, p), (self.now + pause, pause));
            }
            WORKED => {
                self.subscribers[s].worked(Place(p));
                self.pauses.remove(&(s, p));
            }
            _ => {
                let time = ms(self.script.below(200) as u64 * 50);
                self.pass(time);
            }
        }
        self.work();
    }

    fn publish(&mut self, p: usize) {
        let (key, number) = (key(self.script.below(KEYS)), self.number());
        let transfer = HandoffId::new(&format!("x{number}")).unwrap();
        let at = &mut self.publishers[p];
        let is_full = at.offers.len() >= limits(p).offers;
        let published = at.machine.publish(key, &transfer, self.now);
        assert_eq!(published.is_err(), is_full);
        if published.is_ok() {
            assert!(at.machine.publish(key, &transfer, self.now).is_err(), "a name is used once");
            at.offers.insert(transfer, (key, self.now + limits(p).offer_ttl));
        }
    }

    fn take(&mut self, s: usize, key: ContentKey) {
        let Some(found) = self.subscribers[s].take(&key, self.now) else { return };
        let p = found.place.0;
        assert_eq!(found.address, address(found.engine));
        let pause = self.pauses.get(&(s, p));
        assert!(
            pause.is_none_or(|(until, _)| *until <= self.now),
            "a paused publisher is not asked"
        );
        let at = &self.publishers[p];
        if found.engine == at.engine
            && let Some((of, _)) = at.offers.get(&found.transfer)
        {
            assert_eq!(*of, key, "it is the prompt that was looked for");
        }
        let is_new = self.links[s][p].taken.insert(found.transfer);
        assert!(is_new, "an offer is found once in a term");
    }

    fn deliver(&mut self, s: usize, p: usize) {
        let link = &mut self.links[s][p];
        let (Some(peer), Some((to_publisher, message))) = (link.up, link.wire.pop_front()) else {
            return;
        };
        if to_publisher {
            self.publishers[p].machine.receive(peer, here(), &message, self.now);
        } else {
            match &message {
                DirectoryMessage::NotFollowed(_) => link.was_refused = true,
                DirectoryMessage::Followed(_) => link.was_refused = false,
                _ => {}
            }
            self.subscribers[s].receive(Place(p), message, self.now);
        }
        self.work();
    }

    fn cut(&mut self, s: usize, p: usize) {
        let link = &mut self.links[s][p];
        link.connecting = false;
        link.wire.clear();
        if let Some(peer) = link.up.take() {
            self.publishers[p].machine.lost(peer);
        }
        self.subscribers[s].lost(Place(p), self.now);
        self.work();
        assert!(!self.links[s][p].watched, "a session that has ended is not watched");
    }

    /// Lets time pass, and stops at each due time.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            let of_publishers = self.publishers.iter().filter_map(|at| at.machine.next_timeout());
            let of_subscribers = self.subscribers.iter().filter_map(Subscriber::next_timeout);
            let Some(next) = of_publishers.chain(of_subscribers).min().filter(|it| *it <= until)
            else {
                break;
            };
            self.now = self.now.max(next);
            self.expire();
            self.work();
        }
        self.now = until;
        self.expire();
    }

    fn expire(&mut self) {
        let now = self.now;
        for at in &mut self.publishers {
            at.machine.expire(now);
            at.offers.retain(|_, (_, until)| *until > now);
            assert!(at.machine.next_timeout().is_none_or(|due| due > now), "it was done");
        }
        for subscriber in &mut self.subscribers {
            subscriber.expire(now);
            assert!(subscriber.next_timeout().is_none_or(|due| due > now), "it was done");
        }
    }

    /// Does what the machines say.
    fn work(&mut self) {
        for s in 0..SUBSCRIBERS {
            while let Some(action) = self.subscribers[s].poll() {
                match action {
                    SubscriberAction::Connect { place } => {
                        assert!(self.links[s][place.0].up.is_none(), "there is no session");
                        let peer = PeerId(self.number());
                        let link = &mut self.links[s][place.0];
                        link.connecting = true;
                        if self.script.below(4) == 3 {
                            self.cut(s, place.0);
                        } else {
                            (link.up, link.connecting) = (Some(peer), false);
                            self.subscribers[s].opened(place, here(), self.now);
                        }
                    }
                    SubscriberAction::Send { place, message } => {
                        self.links[s][place.0].wire.push_back((true, message));
                    }
                    SubscriberAction::Watch { place, on } => {
                        let link = &mut self.links[s][place.0];
                        assert_ne!(link.watched, on, "each is said once");
                        link.watched = on;
                    }
                    SubscriberAction::Disconnect { place } => self.cut(s, place.0),
                    SubscriberAction::Refused { code, .. } => assert!(!code.is_ok()),
                }
            }
        }
        for p in 0..PUBLISHERS {
            while let Some(action) = self.publishers[p].machine.poll() {
                match action {
                    PublisherAction::Send { to, message } => {
                        let Some(s) = self.follower(p, to) else { continue };
                        let link = &mut self.links[s][p];
                        if matches!(message, DirectoryMessage::Followed(_)) {
                            // Whether a new term begins shows in what follows; taken offers may be listed anew.
                            link.taken.retain(|it| !self.publishers[p].offers.contains_key(it));
                        }
                        link.wire.push_back((false, message));
                    }
                    PublisherAction::Refused { .. } => {
                        assert_eq!(p, 0, "the other publisher has room for all");
                    }
                    PublisherAction::Disconnect { peer } => {
                        if let Some(s) = self.follower(p, peer) {
                            self.cut(s, p);
                        }
                    }
                }
            }
            let at = &self.publishers[p];
            assert!(at.machine.followers() <= limits(p).followers);
            assert_eq!(at.machine.gauges()[1].1, at.offers.len());
        }
        for subscriber in &self.subscribers {
            assert!(subscriber.gauges()[0].1 <= limits(1).heard);
        }
    }

    fn follower(&self, p: usize, peer: PeerId) -> Option<usize> {
        (0..SUBSCRIBERS).find(|s| self.links[*s][p].up == Some(peer))
    }

    /// Delivers everything until all subscribers that have room follow, and compares what they find.
    fn settle(&mut self) {
        // Beyond each wait, and within the time of offers that are made now.
        self.pass(limits(1).offer_ttl);
        self.work();
        for _ in 0..10 {
            self.pass(limits(1).lease / 3);
            self.deliver_all();
        }
        (0..PUBLISHERS).for_each(|p| self.publish(p));
        self.work();
        self.deliver_all();
        for s in 0..SUBSCRIBERS {
            (0..PUBLISHERS).for_each(|p| self.subscribers[s].worked(Place(p)));
            let mut found = [(); PUBLISHERS].map(|()| BTreeSet::new());
            for key in (0..KEYS).map(key) {
                while let Some(it) = self.subscribers[s].take(&key, self.now) {
                    assert_eq!(it.engine, self.publishers[it.place.0].engine);
                    assert!(found[it.place.0].insert(it.transfer), "each is found once");
                }
            }
            for (p, found) in found.iter().enumerate() {
                let at = &self.publishers[p];
                assert!(found.iter().all(|it| at.offers.contains_key(it)), "none has ended");
                if self.state(s, p) == "following" {
                    assert!(found.len() == at.offers.len(), "{found:?} of {:?}", at.offers);
                }
            }
        }
        for p in 0..PUBLISHERS {
            assert_eq!(self.publishers[p].machine.followers(), limits(p).followers);
        }
        for s in 0..SUBSCRIBERS {
            (0..PUBLISHERS).for_each(|p| self.cut(s, p));
        }
        self.publishers.iter_mut().for_each(|at| at.machine.expire(self.now + limits(1).offer_ttl));
        let left = self.publishers.iter().flat_map(|at| at.machine.gauges());
        for (name, count) in left.chain(self.subscribers.iter().flat_map(Subscriber::gauges)) {
            assert_eq!(count, 0, "{name}");
        }
    }

    fn deliver_all(&mut self) {
        while let Some((s, p)) = self.waiting() {
            self.deliver(s, p);
        }
    }

    fn waiting(&self) -> Option<(usize, usize)> {
        let all = (0..SUBSCRIBERS).flat_map(|s| (0..PUBLISHERS).map(move |p| (s, p)));
        all.into_iter().find(|(s, p)| !self.links[*s][*p].wire.is_empty())
    }
}

fn address(engine: EngineId) -> String {
    format!("10.0.0.1:{}", engine.0)
}

fn key(number: usize) -> ContentKey {
    ContentKey([number as u8; 32])
}
