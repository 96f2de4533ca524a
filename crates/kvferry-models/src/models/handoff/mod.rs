//! Random requests on random ranks, with random faults of ranks and network, in virtual time. What
//! must hold:
//!
//! * I1: each accepted offer and each accepted want ends exactly once, in bounded time; a claim ends
//!   unsaid;
//! * I2: nothing is written to a consumer's block after its handoff ended there; a producer's block
//!   is overwritten the moment its handoff ended there, and what a consumer calls done is right
//!   nevertheless;
//! * I3: if the consumers are done, so are the producers; if the producers are done, so are the
//!   consumers, unless they lost sight of each other at that moment;
//! * I5: either side may come first;
//! * I8: announcements never take more memory than they may, a handoff is refused for room only if one of its
//!   producers has more than an equal part of it, and at the end nothing is kept.
//!
//! The network loses connections, delays, delivers twice, delivers what belongs to an earlier
//! connection, stalls; ranks are stopped, killed and started again.

mod actions;
mod network;
mod requests;

use super::Model;
use crate::pair::ms;
use kvferry_proto::fuzzing::{Met, Script};
use kvferry_proto::handoff::{
    BlockTable, Consumer, ConsumerAction, HandoffId, HandoffMessage, Limits, NULL_BLOCK, Need,
    Outcome, PeerId, Producer, ProducerAction, ProducerRank, Progress, ReadId, Refusal, Slice,
};
use kvferry_proto::{Origin, Timestamp, WireCode};
use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

pub const MODEL: Model = Model {
    name: "handoff_model",
    run,
    rows: &ROWS,
    columns: &[
        "before",
        "expected",
        "claimed",
        "offered",
        "asking",
        "reading",
        "ending",
        "confirming",
        "unheard",
        "confirmed",
        "half",
        "ended",
    ],
    unreachable: &[],
    cases: (6000, 800),
};

const CUT: &str = "disconnect";
const PARTITION: &str = "partition";
const KILL_P: &str = "kill producer";
const KILL_D: &str = "kill consumer";
const STOP_P: &str = "stop producer";
const STOP_D: &str = "stop consumer";
const NAP_P: &str = "nap producer";
const NAP_D: &str = "nap consumer";
const DOUBLE: &str = "duplicate";
const LATE: &str = "reorder";
const SLOW: &str = "delay";
const BAD_READ: &str = "read fails";
const WITHDRAW: &str = "withdraw";
const RESTART: &str = "preempt";
const CANCEL: &str = "cancel";
const FREE: &str = "free";
const WAIT: &str = "time passes";
const AGAIN: &str = "name reused";

const ROWS: [&str; 18] = [
    CUT, PARTITION, KILL_P, KILL_D, STOP_P, STOP_D, NAP_P, NAP_D, DOUBLE, LATE, SLOW, BAD_READ,
    WITHDRAW, RESTART, CANCEL, FREE, WAIT, AGAIN,
];

/// States that do not last.
const MOMENTS: [&str; 7] =
    ["expected", "claimed", "reading", "ending", "confirming", "unheard", "confirmed"];

const LAYERS: u32 = 3;
const RANKS: usize = 2;
/// Where ranks are: two hosts of one network, and one of another.
const HOSTS: [Ipv4Addr; 3] =
    [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2), Ipv4Addr::new(10, 0, 1, 1)];
/// Bytes of announcements that a consumer has room for: more than all requests need, or less.
const ROOMS: [usize; 4] = [1 << 20, 160, 100, 60];
const REQUESTS: usize = 4;
const BLOCKS: u32 = 64;
/// Bytes of side data; the first two are its request and its rank.
const SIDE_BYTES: usize = 24;
const BUDGET: Duration = Duration::from_secs(20);
const SILENCE: Duration = Duration::from_secs(3);

fn limits() -> Limits {
    Limits { tomb_ttl: Duration::from_secs(1_000_000), ..Limits::default() }
}

/// What the KV of a request is, at a producer rank, a position and a layer.
fn truth(request: usize, rank: usize, token: u32, layer: u32) -> u64 {
    let place = (request as u64) << 48 | (rank as u64) << 40 | u64::from(token) << 8;
    (place | u64::from(layer)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

/// How many tokens a request has.
fn tokens_of(request: usize) -> u32 {
    1 + (request as u32 * 3 + 2) % 7
}

fn side_data_of(request: usize, rank: usize) -> Vec<u8> {
    let mut data = vec![request as u8, rank as u8];
    data.resize(SIDE_BYTES, 0);
    data
}

/// Bytes of a request's announcements from one producer rank at most.
fn announced_bytes(request: usize) -> usize {
    4 * tokens_of(request) as usize + SIDE_BYTES
}

/// A rank with its KV, in one of its incarnations.
struct Rank<M> {
    incarnation: PeerId,
    origin: Origin,
    machine: M,
    /// Does nothing until then.
    stopped: Option<Timestamp>,
}

impl<M> Rank<M> {
    fn runs(&self) -> bool {
        self.stopped.is_none()
    }
}

/// A request at a producer rank.
struct ProducedRequest {
    blocks: Vec<u32>,
    progress: Progress,
    complete: bool,
    ended: Option<Outcome>,
}

/// A request at a consumer rank.
#[derive(Default)]
struct ConsumedRequest {
    values: BTreeMap<(usize, u32, u32), u64>,
    is_answered: bool,
    ended: Option<Outcome>,
}

struct Reading {
    request: usize,
    producer: usize,
    incarnation: PeerId,
    places: Vec<(u32, u32, u32)>,
    cancelled: bool,
}

#[derive(Clone, Debug)]
enum Event {
    Message { to: PeerId, from: PeerId, message: HandoffMessage, connection: Option<u64> },
    Step { consumer: usize, incarnation: PeerId, read: ReadId },
    Reconnect(usize, usize),
    Silent(usize, usize, u64),
    Wake(bool, usize),
}

/// What is between a producer and a consumer rank.
#[derive(Default)]
struct Wire {
    up: bool,
    connection: u64,
    /// Nothing arrives, and no end is notified.
    dead: bool,
    delay: u64,
    /// The last thing that was sent, either way.
    last: Option<Event>,
    /// In order: nothing overtakes what was sent before.
    busy: [Timestamp; 2],
}

struct World<'a, 'b> {
    script: Script<'a>,
    limits: Limits,
    /// Where each incarnation of a producer was.
    origins: BTreeMap<PeerId, Origin>,
    now: Timestamp,
    events: BTreeMap<(Timestamp, u64), Event>,
    events_made: u64,
    incarnations: u64,
    producers: Vec<Rank<Producer>>,
    consumers: Vec<Rank<Consumer>>,
    memory: Vec<[[u64; LAYERS as usize]; BLOCKS as usize]>,
    free: Vec<BTreeSet<u32>>,
    made: BTreeMap<(usize, usize), ProducedRequest>,
    got: BTreeMap<(usize, usize), ConsumedRequest>,
    reads: BTreeMap<(usize, ReadId), Reading>,
    wires: BTreeMap<(usize, usize), Wire>,
    /// Ranks and names whose agreement is not judged: an incarnation ended while they were under way.
    disturbed: BTreeSet<usize>,
    fail_next_read: bool,
    met: Met<'b>,
}

fn id(request: usize) -> HandoffId {
    HandoffId::new(&format!("request-{request}")).unwrap()
}

fn gauge(machine: &Consumer, name: &str) -> usize {
    let mut gauges = machine.gauges().into_iter();
    gauges.find(|(it, _)| *it == name).expect("a gauge").1
}

fn request_of(id: &HandoffId) -> usize {
    id.as_str().strip_prefix("request-").unwrap().parse().unwrap()
}

fn run(bytes: &[u8], met: Met<'_>) {
    let mut world = World::new(bytes, met);
    while !world.script.is_empty() {
        world.act();
    }
    world.settle();
}

impl<'a, 'b> World<'a, 'b> {
    fn new(bytes: &'a [u8], met: Met<'b>) -> Self {
        let mut script = Script::new(bytes);
        let ranks = [1 + script.below(RANKS), 1 + script.below(RANKS)];
        let limits = Limits { announced_bytes: script.pick(&ROOMS), ..limits() };
        let mut world = World {
            script,
            limits,
            origins: BTreeMap::new(),
            now: Timestamp::default() + Duration::from_secs(1000),
            events: BTreeMap::new(),
            events_made: 0,
            incarnations: 0,
            producers: Vec::new(),
            consumers: Vec::new(),
            memory: vec![[[0; LAYERS as usize]; BLOCKS as usize]; ranks[0]],
            free: vec![(0..BLOCKS).collect(); ranks[0]],
            made: BTreeMap::new(),
            got: BTreeMap::new(),
            reads: BTreeMap::new(),
            wires: BTreeMap::new(),
            disturbed: BTreeSet::new(),
            fail_next_read: false,
            met,
        };
        for _ in 0..ranks[0] {
            let origin = world.host();
            let rank = world.producer(origin);
            world.producers.push(rank);
        }
        for _ in 0..ranks[1] {
            let origin = world.host();
            let rank = world.rank(Consumer::new(world.limits.clone()), origin);
            world.consumers.push(rank);
        }
        for p in 0..ranks[0] {
            for d in 0..ranks[1] {
                world.wires.insert((p, d), Wire { up: true, delay: 1, ..Wire::default() });
            }
        }
        world
    }

    fn host(&mut self) -> Origin {
        Origin::from(IpAddr::V4(self.script.pick(&HOSTS)))
    }

    fn rank<M>(&mut self, machine: M, origin: Origin) -> Rank<M> {
        self.incarnations += 1;
        Rank { incarnation: PeerId(self.incarnations), origin, machine, stopped: None }
    }

    fn producer(&mut self, origin: Origin) -> Rank<Producer> {
        let rank = self.rank(Producer::new(self.limits.clone()), origin);
        self.origins.insert(rank.incarnation, origin);
        rank
    }

    fn at(&mut self, when: Timestamp, event: Event) {
        self.events_made += 1;
        self.events.insert((when, self.events_made), event);
    }

    /// One operation or fault, at a random request and pair of ranks, after a random while.
    fn act(&mut self) {
        let pause = match self.script.below(4) {
            0 => 0,
            1 => self.script.below(4) as u64,
            2 => self.script.below(40) as u64,
            _ => self.script.below(40) as u64 * 10,
        };
        self.pass(ms(pause));
        let (request, p) = (self.script.below(REQUESTS), self.script.below(self.producers.len()));
        let d = self.script.below(self.consumers.len());
        let what = self.script.below(72);
        match what {
            0..2 => self.expect_everywhere(request),
            2..8 => self.offer_everywhere(request),
            8..12 => self.claim_everywhere(request),
            12..16 => self.want_everywhere(request),
            16..26 => self.compute(request, p),
            26..30 => self.finish_everywhere(request),
            30..48 => self.disturb(ROWS[what - 30], request, p, d),
            _ => {
                let target = self.script.pick(&MOMENTS);
                let fault = self.script.pick(&ROWS);
                if self.approach(target, request, p, d) {
                    self.disturb(fault, request, p, d);
                }
            }
        }
        self.work();
    }

    /// Goes on until a handoff is in a state that does not last.
    fn approach(&mut self, target: &'static str, request: usize, p: usize, d: usize) -> bool {
        match target {
            "expected" => {
                self.expect_everywhere(request);
                return self.state(request, p, d) == target;
            }
            "claimed" => {
                self.claim_everywhere(request);
                if self.script.flip() {
                    self.offer_everywhere(request);
                    self.compute(request, p);
                    self.pass(ms(2));
                }
                return self.state(request, p, d) == target;
            }
            _ => {}
        }
        self.offer_everywhere(request);
        self.want_everywhere(request);
        self.work();
        let reading = if target == "ending" { "reading" } else { target };
        for _ in 0..60 {
            if target != "ending" || self.script.flip() {
                self.compute(request, p);
            }
            if target != "reading" && target != "ending" {
                self.finish_everywhere(request);
            }
            self.work();
            let is_there = self.state(request, p, d) == reading;
            let is_read = |reading: &Reading| reading.request == request;
            if is_there && (target != "ending" || self.reads.values().any(is_read)) {
                break;
            }
            self.pass(ms(1));
        }
        if target == "ending" && self.consumers[d].runs() {
            let machine = &mut self.consumers[d].machine;
            drop(machine.cancel(&id(request), WireCode::Cancelled, "the client left", self.now));
        }
        self.state(request, p, d) == target
    }

    fn state(&self, request: usize, p: usize, d: usize) -> &'static str {
        let id = id(request);
        let made = self.made.get(&(request, p));
        let got = self.got.get(&(request, d));
        let here = self.consumers[d].machine.state(&id, self.producers[p].incarnation);
        let p_done = made.is_some_and(|made| made.ended.as_ref().is_some_and(Outcome::is_done));
        match (here, made, got) {
            (Some("confirming"), ..) if p_done => "unheard",
            (Some(state), ..) => state,
            (None, Some(made), None) if made.ended.is_none() => "offered",
            (None, Some(made), Some(_)) if made.ended.is_none() => "half",
            (None, Some(_), _) | (None, None, Some(_)) => "ended",
            (None, None, None) => match self.producers[p].machine.state(&id) {
                Some("expected") => "expected",
                _ => "before",
            },
        }
    }

    fn disturb(&mut self, fault: &'static str, request: usize, p: usize, d: usize) {
        // Faults are rarer than they are drawn: most of what is tried is to get somewhere.
        let state = self.state(request, p, d);
        (self.met)(fault, state);
        let id = id(request);
        let now = self.now;
        match fault {
            CUT => self.cut(p, d, WireCode::Closed, true),
            PARTITION => {
                let wire = self.wires.get_mut(&(p, d)).unwrap();
                wire.dead = true;
                let connection = wire.connection;
                self.at(now + SILENCE, Event::Silent(p, d, connection));
            }
            KILL_P => self.kill_producer(p),
            KILL_D => self.kill_consumer(d),
            STOP_P | NAP_P | STOP_D | NAP_D => {
                let is_producer = matches!(fault, STOP_P | NAP_P);
                let is_long = matches!(fault, STOP_P | STOP_D);
                let until = now + if is_long { SILENCE * 2 } else { ms(200) };
                let rank = if is_producer { p } else { d };
                *self.stopped(is_producer, rank) = Some(until);
                let is_its = |at: &(usize, usize)| rank == if is_producer { at.0 } else { at.1 };
                let wires = self.wires.iter().filter(|(at, _)| is_long && is_its(at));
                let silent: Vec<_> =
                    wires.map(|(&(p, d), wire)| Event::Silent(p, d, wire.connection)).collect();
                silent.into_iter().for_each(|event| self.at(now + SILENCE, event));
                self.at(until, Event::Wake(is_producer, rank));
            }
            DOUBLE => {
                let last = self.wires[&(p, d)].last.clone();
                last.into_iter().for_each(|event| self.at(now + ms(1), event));
            }
            LATE => {
                // Of a connection that is gone by then, and handled all the same.
                if let Some(mut event) = self.wires[&(p, d)].last.clone() {
                    if let Event::Message { connection, .. } = &mut event {
                        *connection = None;
                    }
                    self.at(now + ms(900), event);
                }
                self.cut(p, d, WireCode::Closed, true);
            }
            SLOW => self.wires.get_mut(&(p, d)).unwrap().delay = 1 + self.script.below(200) as u64,
            BAD_READ => self.fail_next_read = true,
            WITHDRAW => {
                for rank in self.producers.iter_mut().filter(|rank| rank.runs()) {
                    drop(rank.machine.withdraw(&id, WireCode::Cancelled, "the client left", now));
                }
            }
            RESTART => self.preempt(request, p),
            CANCEL => {
                for rank in self.consumers.iter_mut().filter(|rank| rank.runs()) {
                    drop(rank.machine.cancel(&id, WireCode::Cancelled, "the client left", now));
                }
            }
            FREE => {
                let from: Vec<_> =
                    self.producers.iter().map(|rank| (rank.incarnation, None)).collect();
                for rank in self.consumers.iter_mut().filter(|rank| rank.runs()) {
                    drop(rank.machine.free(&id, &from, WireCode::NotNeeded, "", now));
                }
            }
            WAIT => {
                let seconds = 5 + self.script.below(200) as u64;
                self.pass(Duration::from_secs(seconds));
            }
            AGAIN => {
                self.offer(request, p);
                self.want(request, d);
            }
            other => unreachable!("{other}"),
        }
    }

    /// Stops all faults. Every handoff must end, with the same outcome on both sides.
    fn settle(&mut self) {
        for wire in self.wires.values_mut() {
            wire.delay = 1;
        }
        self.pass(SILENCE * 3);
        (0..REQUESTS).for_each(|request| self.finish_everywhere(request));
        self.pass(limits().cap + Duration::from_secs(60) + limits().offer_ttl);
        for ((request, p), made) in &self.made {
            assert!(made.ended.is_some(), "I1: request {request} never ended at producer {p}");
        }
        for ((request, d), got) in &self.got {
            assert!(got.ended.is_some(), "I1: request {request} never ended at consumer {d}");
        }
        assert!(self.reads.is_empty());
        (0..REQUESTS).filter(|r| !self.disturbed.contains(r)).for_each(|r| self.agree(r));
        // Tombstones, and farewells to incarnations that are over, go with time.
        self.pass(limits().tomb_ttl + limits().offer_ttl);
        let producers = self.producers.iter().flat_map(|rank| rank.machine.gauges());
        let consumers = self.consumers.iter().flat_map(|rank| rank.machine.gauges());
        for (name, count) in producers.chain(consumers) {
            assert_eq!(count, 0, "I8: {name}");
        }
    }

    /// I3, over all ranks, as engines see it.
    fn agree(&self, request: usize) {
        let made: Vec<_> =
            (0..self.producers.len()).filter_map(|p| self.made.get(&(request, p))).collect();
        let got: Vec<_> =
            (0..self.consumers.len()).filter_map(|d| self.got.get(&(request, d))).collect();
        let ends = |outcomes: Vec<&Outcome>| -> Vec<String> {
            outcomes.iter().map(ToString::to_string).collect()
        };
        let p_ends: Vec<_> = made.iter().filter_map(|made| made.ended.as_ref()).collect();
        let d_ends: Vec<_> = got.iter().filter_map(|got| got.ended.as_ref()).collect();
        let p_done = made.len() == self.producers.len() && p_ends.iter().all(|end| end.is_done());
        let d_done = got.len() == self.consumers.len() && d_ends.iter().all(|end| end.is_done());
        if d_done {
            assert!(p_done, "I3: consumers are done and producers are not: {:?}", ends(p_ends));
        } else if p_done {
            let lost = [WireCode::Closed, WireCode::Silent, WireCode::Deadline];
            let was_lost = d_ends.iter().any(|end| lost.contains(&end.code));
            assert!(was_lost, "I3: producers are done and consumers are not: {:?}", ends(d_ends));
        }
    }
}
