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
struct Made {
    blocks: Vec<u32>,
    progress: Progress,
    complete: bool,
    ended: Option<Outcome>,
}

/// A request at a consumer rank.
#[derive(Default)]
struct Got {
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
    made: BTreeMap<(usize, usize), Made>,
    got: BTreeMap<(usize, usize), Got>,
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
                let from: Vec<_> = self.producers.iter().map(|rank| rank.incarnation).collect();
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

    fn expect_everywhere(&mut self, request: usize) {
        for p in 0..self.producers.len() {
            let known = self.made.contains_key(&(request, p));
            if self.producers[p].runs() {
                let expected = self.producers[p].machine.expect(&id(request), self.now);
                assert!(
                    expected.is_err() || !known,
                    "a name is good for one handoff in an incarnation"
                );
            }
        }
    }

    fn offer_everywhere(&mut self, request: usize) {
        (0..self.producers.len()).for_each(|p| self.offer(request, p));
    }

    fn offer(&mut self, request: usize, p: usize) {
        if !self.producers[p].runs() {
            return;
        }
        let known = self.made.contains_key(&(request, p));
        match self.producers[p].machine.offer(&id(request), self.now) {
            Ok(()) => {
                assert!(!known, "a name is good for one handoff in an incarnation");
                let (blocks, progress) = (Vec::new(), Progress::NONE);
                let made = Made { blocks, progress, complete: false, ended: None };
                self.made.insert((request, p), made);
            }
            Err(Refusal::InUse | Refusal::Ended(_)) => {}
            Err(refusal) => panic!("{refusal}"),
        }
    }

    /// The producers' ranks as a consumer rank sees them.
    fn sources(&self, d: usize) -> Vec<ProducerRank> {
        let readers = self.consumers.len() as u32;
        let rank = |(p, rank): (usize, &Rank<Producer>)| ProducerRank {
            peer: rank.incarnation,
            readers,
            connected: self.wires[&(p, d)].up,
            need: Need::ALL,
        };
        self.producers.iter().enumerate().map(rank).collect()
    }

    fn claim_everywhere(&mut self, request: usize) {
        for d in 0..self.consumers.len() {
            let (from, known) = (self.sources(d), self.got.contains_key(&(request, d)));
            if self.consumers[d].runs() {
                let claimed = self.consumers[d].machine.claim(&id(request), &from, self.now);
                assert!(
                    claimed.is_err() || !known,
                    "a name is good for one handoff in an incarnation"
                );
            }
        }
    }

    fn want_everywhere(&mut self, request: usize) {
        (0..self.consumers.len()).for_each(|d| self.want(request, d));
    }

    fn want(&mut self, request: usize, d: usize) {
        if !self.consumers[d].runs() {
            return;
        }
        let (from, known) = (self.sources(d), self.got.contains_key(&(request, d)));
        match self.consumers[d].machine.want(&id(request), &from, BUDGET, self.now) {
            Ok(()) => {
                assert!(!known, "a name is good for one handoff in an incarnation");
                self.got.insert((request, d), Got::default());
            }
            Err(Refusal::InUse | Refusal::Ended(_)) => {}
            Err(refusal) => panic!("{refusal}"),
        }
    }

    /// The next layer, or the next chunk.
    fn compute(&mut self, request: usize, p: usize) {
        let Some(made) = self.made.get_mut(&(request, p)) else { return };
        if made.ended.is_some() || made.complete || !self.producers[p].runs() {
            return;
        }
        let at = made.progress;
        let next = if at.layers > 0 {
            match at.layers + 1 {
                LAYERS => Progress::tokens(at.layer_tokens),
                layers => at.and(layers, at.layer_tokens),
            }
        } else if at.tokens < tokens_of(request) {
            let chunk = 1 + self.script.below(3) as u32;
            at.and(1, (at.tokens + chunk).min(tokens_of(request)))
        } else {
            return;
        };
        self.publish(request, p, next, false);
    }

    /// Computes up to `to` and says so.
    fn publish(&mut self, request: usize, p: usize, to: Progress, last: bool) {
        let made = self.made.get_mut(&(request, p)).unwrap();
        let known = made.blocks.len();
        while (made.blocks.len() as u32) < to.reach() {
            let Some(block) = self.free[p].pop_last() else { return };
            // Others are preferred, so that tables are not all in order.
            made.blocks.push(block);
        }
        for rectangle in made.progress.until(&to, LAYERS) {
            for layer in rectangle.layers {
                for token in rectangle.tokens.clone() {
                    let block = made.blocks[token as usize] as usize;
                    self.memory[p][block][layer as usize] = truth(request, p, token, layer);
                }
            }
        }
        made.progress = to;
        made.complete = last;
        let added = BlockTable::new(known as u32, made.blocks[known..].to_vec());
        let tables = if added.blocks.is_empty() { Vec::new() } else { vec![added] };
        let machine = &mut self.producers[p].machine;
        let side = last.then(|| side_data_of(request, p));
        let said = match last {
            true => machine.complete(&id(request), tables, to, side, self.now),
            false => machine.advance(&id(request), tables, to),
        };
        assert_eq!(said, Ok(()), "it is under way");
    }

    fn finish_everywhere(&mut self, request: usize) {
        for p in 0..self.producers.len() {
            let Some(made) = self.made.get(&(request, p)) else { continue };
            if made.ended.is_none() && !made.complete && self.producers[p].runs() {
                self.publish(request, p, Progress::tokens(tokens_of(request)), true);
            }
        }
    }

    fn preempt(&mut self, request: usize, p: usize) {
        if !self.producers[p].runs() {
            return;
        }
        if self.producers[p].machine.restart(&id(request)).is_ok() {
            self.take_back(request, p);
            self.made.get_mut(&(request, p)).unwrap().progress = Progress::NONE;
        }
    }

    /// The blocks of a request get other content at once, and other owners.
    fn take_back(&mut self, request: usize, p: usize) {
        let Some(made) = self.made.get_mut(&(request, p)) else { return };
        for block in made.blocks.drain(..) {
            self.memory[p][block as usize] = [0; LAYERS as usize];
            self.free[p].insert(block);
        }
    }

    fn cut(&mut self, p: usize, d: usize, code: WireCode, comes_back: bool) {
        let wire = self.wires.get_mut(&(p, d)).unwrap();
        if !wire.up {
            return;
        }
        wire.up = false;
        wire.dead = false;
        wire.connection += 1;
        let (producer, consumer) = (self.producers[p].incarnation, self.consumers[d].incarnation);
        let gone = !comes_back;
        self.producers[p].machine.lost(consumer, code, gone, self.now);
        self.consumers[d].machine.lost(producer, code, gone, self.now);
        let after = ms(self.script.below(150) as u64 * 10);
        self.at(self.now + after, Event::Reconnect(p, d));
    }

    fn reconnect(&mut self, p: usize, d: usize) {
        if !self.producers[p].runs() || !self.consumers[d].runs() {
            let later = self.now + ms(100);
            return self.at(later, Event::Reconnect(p, d));
        }
        let wire = self.wires.get_mut(&(p, d)).unwrap();
        if wire.up {
            return;
        }
        wire.up = true;
        wire.delay = 1;
        wire.busy = [self.now; 2];
        let (producer, consumer) = (self.producers[p].incarnation, self.consumers[d].incarnation);
        self.producers[p].machine.met(consumer);
        self.consumers[d].machine.met(producer, self.now);
    }

    fn kill_producer(&mut self, p: usize) {
        for request in 0..REQUESTS {
            if let Some(made) = self.made.remove(&(request, p)) {
                self.disturbed.insert(request);
                self.free[p].extend(made.blocks);
            }
            if self.got.keys().any(|(other, _)| *other == request) {
                self.disturbed.insert(request);
            }
        }
        self.memory[p] = [[0; LAYERS as usize]; BLOCKS as usize];
        let is_noticed = self.script.flip();
        for d in 0..self.consumers.len() {
            if is_noticed {
                // Refused when it is tried again, or answered by another incarnation.
                self.cut(p, d, WireCode::Closed, false);
            } else {
                // No session led to it, or one that was open in name only.
                self.cut(p, d, WireCode::Closed, true);
            }
            let incarnation = self.producers[p].incarnation;
            self.consumers[d].machine.lost(incarnation, WireCode::StaleIncarnation, true, self.now);
        }
        self.producers[p] = self.producer(self.producers[p].origin);
    }

    fn kill_consumer(&mut self, d: usize) {
        for request in 0..REQUESTS {
            self.got.remove(&(request, d));
            self.disturbed.insert(request);
        }
        self.reads.retain(|(consumer, _), _| *consumer != d);
        for p in 0..self.producers.len() {
            self.cut(p, d, WireCode::Closed, false);
            let incarnation = self.consumers[d].incarnation;
            self.producers[p].machine.lost(incarnation, WireCode::StaleIncarnation, true, self.now);
        }
        let (machine, origin) = (Consumer::new(self.limits.clone()), self.consumers[d].origin);
        self.consumers[d] = self.rank(machine, origin);
    }

    /// Lets time pass, event by event.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            self.work();
            let producers = self.producers.iter().filter(|rank| rank.runs());
            let consumers = self.consumers.iter().filter(|rank| rank.runs());
            let timers = producers.filter_map(|rank| rank.machine.next_timeout());
            let others = consumers.filter_map(|rank| rank.machine.next_timeout());
            let event = self.events.keys().next().map(|(at, _)| *at);
            let next = timers.chain(others).chain(event).min();
            let Some(next) = next.filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            while let Some(first) = self.events.first_entry()
                && first.key().0 <= self.now
            {
                let event = first.remove();
                self.happen(event);
            }
            for rank in self.producers.iter_mut().filter(|rank| rank.runs()) {
                rank.machine.expire(self.now);
            }
            for rank in self.consumers.iter_mut().filter(|rank| rank.runs()) {
                rank.machine.expire(self.now);
            }
        }
        self.now = until;
        self.work();
    }

    fn happen(&mut self, event: Event) {
        match event.clone() {
            Event::Message { to, from, message, connection } => {
                let Some((p, d)) = self.places(from, to) else { return };
                let wire = &self.wires[&(p, d)];
                if connection.is_some_and(|c| c != wire.connection || !wire.up) || wire.dead {
                    return;
                }
                let is_producer = self.producers[p].incarnation == to;
                let stopped = *self.stopped(is_producer, if is_producer { p } else { d });
                match stopped {
                    Some(until) => self.at(until + ms(1), event),
                    None if is_producer => {
                        let origin = self.consumers[d].origin;
                        self.producers[p].machine.receive(from, origin, message, self.now);
                    }
                    None => self.hear(d, from, message),
                }
            }
            Event::Step { consumer, incarnation, read } => self.step(consumer, incarnation, read),
            Event::Reconnect(p, d) => self.reconnect(p, d),
            Event::Silent(p, d, connection) => {
                // A stopped rank notices when it goes on; here both notice at once.
                if self.wires[&(p, d)].connection == connection {
                    self.cut(p, d, WireCode::Silent, false);
                }
            }
            Event::Wake(is_producer, rank) => {
                let now = self.now;
                let stopped = self.stopped(is_producer, rank);
                *stopped = stopped.filter(|until| *until > now);
            }
        }
        self.work();
    }

    /// A message arrives at a consumer. What it refuses for room, it refuses to those that have too much of what it has
    /// not read.
    fn hear(&mut self, d: usize, from: PeerId, message: HandoffMessage) {
        let (origin, now) = (self.origins[&from], self.now);
        let more = match &message {
            HandoffMessage::Offer(it) => Some(request_of(&it.id)),
            HandoffMessage::Ready(it) => Some(request_of(&it.id)),
            _ => None,
        };
        let machine = &mut self.consumers[d].machine;
        machine.expire(now);
        let (before, mut held) = (self.under_way(d), self.held(d));
        self.consumers[d].machine.receive(from, origin, message, now);
        let announced = gauge(&self.consumers[d].machine, "announced_bytes");
        let room = self.limits.announced_bytes;
        assert!(announced <= room, "I8: announcements take {announced} of {room} bytes");
        let Some(more) = more else { return };
        *held.entry(from).or_default() += announced_bytes(more);
        let after = self.under_way(d);
        for request in before.keys().filter(|request| !after.contains_key(*request)) {
            let is_over = before[request].iter().any(|peer| self.has_too_much(&held, *peer));
            assert!(is_over, "I8: request {request} is refused for what others have: {held:?}");
        }
    }

    /// Requests that a consumer asks for, each with the producers from which it has not read everything.
    fn under_way(&self, d: usize) -> BTreeMap<usize, Vec<PeerId>> {
        let machine = &self.consumers[d].machine;
        let states = |request| {
            let state = move |peer: &PeerId| Some((*peer, machine.state(&id(request), *peer)?));
            self.origins.keys().filter_map(state).filter(|(_, state)| *state != "ending")
        };
        let is_read = |state: &str| matches!(state, "confirming" | "confirmed");
        let all = (0..REQUESTS).filter(|request| states(*request).next().is_some());
        let unread = |request| states(request).filter(|(_, state)| !is_read(state));
        all.map(|it| (it, unread(it).map(|(peer, _)| peer).collect())).collect()
    }

    /// Bytes of the announcements of each producer that a consumer keeps, at most.
    fn held(&self, d: usize) -> BTreeMap<PeerId, usize> {
        let machine = &self.consumers[d].machine;
        let of_peer = |peer: PeerId| {
            let tables = (0..REQUESTS).filter_map(|request| machine.table(&id(request), peer));
            let bytes = |it: &BlockTable| 4 * it.blocks.len();
            tables.map(|tables| tables.map(bytes).sum::<usize>() + SIDE_BYTES).sum()
        };
        self.origins.keys().map(|peer| (*peer, of_peer(*peer))).collect()
    }

    /// Whether a producer, its host and its network may each have more than an equal part of the room.
    fn has_too_much(&self, held: &BTreeMap<PeerId, usize>, peer: PeerId) -> bool {
        let network = |peer: PeerId| self.origins[&peer].network();
        let host = |peer: PeerId| self.origins[&peer].host();
        let held = || held.iter().filter(|(_, bytes)| **bytes > 0).map(|(peer, it)| (*peer, *it));
        let networks: BTreeSet<_> = held().map(|(other, _)| network(other)).collect();
        let of_network = || held().filter(|(other, _)| network(*other) == network(peer));
        let hosts: BTreeSet<_> = of_network().map(|(other, _)| host(other)).collect();
        let of_host = || of_network().filter(|(other, _)| host(*other) == host(peer));
        let own = of_host().filter(|(other, _)| *other == peer).map(|(_, bytes)| bytes).sum();
        let sum = |all: &mut dyn Iterator<Item = (PeerId, usize)>| all.map(|(_, it)| it).sum();
        let sizes: [usize; 3] = [sum(&mut of_network()), sum(&mut of_host()), own];
        let (networks, hosts, peers) = (networks.len(), hosts.len(), of_host().count());
        let parts = [networks, networks * hosts, networks * hosts * peers];
        sizes.into_iter().zip(parts).all(|(size, parts)| size * parts > self.limits.announced_bytes)
    }

    fn stopped(&mut self, is_producer: bool, rank: usize) -> &mut Option<Timestamp> {
        match is_producer {
            true => &mut self.producers[rank].stopped,
            false => &mut self.consumers[rank].stopped,
        }
    }

    /// The ranks of two incarnations, a producer's and a consumer's in any order, unless one is over.
    fn places(&self, a: PeerId, b: PeerId) -> Option<(usize, usize)> {
        let producer = self
            .producers
            .iter()
            .position(|rank| rank.incarnation == a || rank.incarnation == b)?;
        let consumer = self
            .consumers
            .iter()
            .position(|rank| rank.incarnation == a || rank.incarnation == b)?;
        Some((producer, consumer))
    }

    /// A read copies a little, or finds that it can't.
    fn step(&mut self, d: usize, incarnation: PeerId, read: ReadId) {
        if self.consumers[d].incarnation != incarnation {
            return;
        }
        if let Some(until) = self.consumers[d].stopped {
            return self.at(until + ms(1), Event::Step { consumer: d, incarnation, read });
        }
        let Some(reading) = self.reads.get_mut(&(d, read)) else { return };
        let p = reading.producer;
        let wire = &self.wires[&(p, d)];
        let is_same = self.producers[p].incarnation == reading.incarnation;
        // A cancelled read may end later.
        let end = if reading.cancelled && self.script.below(4) == 0 {
            Err((WireCode::Cancelled, String::new()))
        } else if !is_same || !wire.up {
            Err((WireCode::Closed, String::new()))
        } else if std::mem::take(&mut self.fail_next_read) {
            Err((WireCode::Checksum, "a piece differs".to_owned()))
        } else if wire.dead {
            let later = self.now + ms(100);
            return self.at(later, Event::Step { consumer: d, incarnation, read });
        } else if let Some((token, layer, block)) = reading.places.pop() {
            let request = reading.request;
            let value = self.memory[p][block as usize][layer as usize];
            let got = self.got.get_mut(&(request, d)).expect("it was wanted");
            assert!(got.ended.is_none(), "I2: written to after it ended");
            got.values.insert((p, token, layer), value);
            let later = self.now + ms(self.script.below(8) as u64);
            return self.at(later, Event::Step { consumer: d, incarnation, read });
        } else {
            Ok(())
        };
        self.reads.remove(&(d, read));
        self.consumers[d].machine.read_ended(read, end, self.now);
    }

    /// Does what the machines ask for, until they ask for nothing.
    fn work(&mut self) {
        for p in 0..self.producers.len() {
            while self.producers[p].runs()
                && let Some(action) = self.producers[p].machine.poll()
            {
                self.do_for_producer(p, action);
            }
        }
        for d in 0..self.consumers.len() {
            while self.consumers[d].runs()
                && let Some(action) = self.consumers[d].machine.poll()
            {
                self.do_for_consumer(d, action);
            }
        }
    }

    fn do_for_producer(&mut self, p: usize, action: ProducerAction) {
        match action {
            ProducerAction::Send { to, message } => {
                self.send(self.producers[p].incarnation, to, message);
            }
            ProducerAction::Watch { .. } => {}
            ProducerAction::Ended { id, outcome } => {
                let request = request_of(&id);
                let made = self.made.get_mut(&(request, p)).expect("I1: it was offered");
                assert_eq!(made.ended, None, "I1: it ends once");
                made.ended = Some(outcome);
                self.take_back(request, p);
            }
        }
    }

    fn do_for_consumer(&mut self, d: usize, action: ConsumerAction) {
        match action {
            ConsumerAction::Send { to, message } => {
                self.send(self.consumers[d].incarnation, to, message);
            }
            ConsumerAction::Read { read, id, from, slice } => {
                self.begin_read(d, read, &id, from, slice)
            }
            ConsumerAction::Watch { .. } => {}
            ConsumerAction::CancelRead(read) => {
                if let Some(reading) = self.reads.get_mut(&(d, read)) {
                    reading.cancelled = true;
                }
            }
            ConsumerAction::Answered { id } => {
                // A claim that a want has not continued yet is answered, too.
                if let Some(got) = self.got.get_mut(&(request_of(&id), d)) {
                    assert_eq!(got.ended, None, "the answer comes before the end");
                    assert!(!got.is_answered, "one answer is said of a want");
                    got.is_answered = true;
                }
            }
            ConsumerAction::Ended { id, outcome, side_data } => {
                let request = request_of(&id);
                let mut reads = self.reads.iter();
                let is_read = reads.any(|((of, _), read)| *of == d && read.request == request);
                assert!(!is_read, "I2: nothing is read any more");
                let got = self.got.get_mut(&(request, d)).expect("I1: it was wanted");
                assert_eq!(got.ended, None, "I1: it ends once");
                if outcome.code == WireCode::StaleIncarnation && !got.is_answered {
                    // It may be wanted again, from the incarnation that is there.
                    self.got.remove(&(request, d));
                    return;
                }
                if outcome.is_done() {
                    assert!(got.is_answered, "what is done was answered");
                    let places = (0..self.producers.len()).flat_map(|p| {
                        let tokens = 0..tokens_of(request);
                        tokens.flat_map(move |token| (0..LAYERS).map(move |l| (p, token, l)))
                    });
                    for (p, token, layer) in places {
                        let right = truth(request, p, token, layer);
                        let value = got.values.get(&(p, token, layer));
                        assert_eq!(value, Some(&right), "I2, I7: right bytes");
                    }
                    let mut sides: Vec<_> = side_data.into_iter().map(|(_, data)| data).collect();
                    sides.sort();
                    let expected: Vec<_> =
                        (0..self.producers.len()).map(|p| side_data_of(request, p)).collect();
                    let is_some_dropped = self.limits.announced_bytes < ROOMS[0];
                    assert!(sides.iter().all(|side| expected.contains(side)));
                    assert!(is_some_dropped || sides == expected, "all side data is handed over");
                }
                got.ended = Some(outcome);
            }
        }
    }

    fn begin_read(&mut self, d: usize, read: ReadId, id: &HandoffId, from: PeerId, slice: Slice) {
        let request = request_of(id);
        let tables = self.consumers[d].machine.table(id, from).expect("it is under way");
        let tables: Vec<_> = tables.collect();
        let mut places = Vec::new();
        for rectangle in slice.from.until(&slice.to, LAYERS) {
            for token in rectangle.tokens {
                let block = tables[0].block(token).expect("what is ready has a block");
                assert_ne!(block, NULL_BLOCK);
                places.extend(rectangle.layers.clone().map(|layer| (token, layer, block)));
            }
        }
        let Some((producer, _)) = self.places(from, self.consumers[d].incarnation) else {
            // It was killed a moment ago.
            let lost = Err((WireCode::Closed, String::new()));
            return self.consumers[d].machine.read_ended(read, lost, self.now);
        };
        let reading = Reading { request, producer, incarnation: from, places, cancelled: false };
        self.reads.insert((d, read), reading);
        let incarnation = self.consumers[d].incarnation;
        let soon = self.now + ms(self.script.below(8) as u64);
        self.at(soon, Event::Step { consumer: d, incarnation, read });
    }

    fn send(&mut self, from: PeerId, to: PeerId, message: HandoffMessage) {
        let read = HandoffMessage::decode(&message.encode());
        assert_eq!(read.as_ref(), Ok(&message), "what is sent can be read");
        let Some((p, d)) = self.places(from, to) else { return };
        let way = usize::from(self.producers[p].incarnation == to);
        let wire = self.wires.get_mut(&(p, d)).unwrap();
        if !wire.up {
            return;
        }
        let event = Event::Message { to, from, message, connection: Some(wire.connection) };
        let arrives = (self.now + ms(wire.delay)).max(wire.busy[way]);
        wire.busy[way] = arrives;
        wire.last = Some(event.clone());
        self.at(arrives, event);
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
