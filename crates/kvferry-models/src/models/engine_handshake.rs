//! A consumer rank that makes handshakes with producer ranks, with random faults, in virtual time.
//! What must hold:
//!
//! * I1: each ticket ends exactly once, and not after its deadline;
//! * the engine returned is the incarnation that answered, with the cards of all ranks that the
//!   consumer reads from;
//! * a peer is watched exactly while a handshake with it is in progress;
//! * I8: at the end nothing is kept.
//!
//! Connections are lost with what is under way, and come back or do not; messages arrive twice, or
//! after their connection; either side learns what its own engine is at any time, and may become
//! another.

use super::Model;
use crate::engines::{card, here, own_engine, topology};
use kvferry_proto::engine_handshake::{
    EngineHandshakeAction, EngineHandshakeMessage, EngineHandshakes, OwnEngine, Pairing,
};
use kvferry_proto::fuzzing::{Met, Script};
use kvferry_proto::handoff::PeerId;
use kvferry_proto::message::BODY_MAX;
use kvferry_proto::{Timestamp, WireCode};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

pub const MODEL: Model = Model {
    name: "engine_handshake_model",
    run,
    rows: &ROWS,
    columns: &["idle", "away", "unknowing", "asking", "halfway"],
    unreachable: &[],
    cases: (2000, 300),
};

const MEET: &str = "meet";
const STEP: &str = "a message arrives";
const TWICE: &str = "a message arrives twice";
const LATE: &str = "a message arrives again";
const CUT: &str = "disconnect";
const GONE: &str = "gone";
const BACK: &str = "reconnect";
const MOVE: &str = "another incarnation";
const KNOW_C: &str = "consumer knows";
const KNOW_P: &str = "producer knows";
const WAIT: &str = "time passes";

const ROWS: [&str; 11] = [MEET, STEP, TWICE, LATE, CUT, GONE, BACK, MOVE, KNOW_C, KNOW_P, WAIT];

const PRODUCERS: usize = 2;
const HEADS: u32 = 4;
const RECONNECT: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_secs(3);
const CONSUMER: PeerId = PeerId(1000);

/// A producer rank at its place.
struct Place {
    id: PeerId,
    machine: EngineHandshakes,
    /// Id of the rank's engine, if the rank knows it.
    engine: Option<u128>,
    up: bool,
    /// Messages in flight; the flag is true for those to the producer.
    wire: VecDeque<(bool, EngineHandshakeMessage)>,
    last: Option<(bool, EngineHandshakeMessage)>,
    watched: bool,
    /// Whether the consumer received a card of it.
    halfway: bool,
}

struct World<'a> {
    script: Script<'a>,
    now: Timestamp,
    numbers: u64,
    engines: u128,
    consumer: EngineHandshakes,
    knows: bool,
    places: Vec<Place>,
    /// Open tickets: their deadlines, and at which place.
    open: BTreeMap<u64, (Timestamp, usize)>,
    tickets: u64,
    /// Lengths of cards of each engine.
    cards: BTreeMap<u128, usize>,
}

fn run(bytes: &[u8], met: Met<'_>) {
    let mut world = World::new(bytes);
    while !world.script.is_empty() {
        let place = world.script.below(PRODUCERS);
        let row = world.script.pick(&[
            MEET, STEP, STEP, STEP, TWICE, LATE, CUT, GONE, BACK, BACK, MOVE, KNOW_C, KNOW_P, WAIT,
        ]);
        met(row, world.state(place));
        world.act(row, place);
    }
    world.settle();
}

impl<'a> World<'a> {
    fn new(bytes: &'a [u8]) -> Self {
        let place = |number: usize| Place {
            id: PeerId(number as u64),
            machine: EngineHandshakes::new(RECONNECT, SILENCE),
            engine: None,
            up: true,
            wire: VecDeque::new(),
            last: None,
            watched: false,
            halfway: false,
        };
        Self {
            script: Script::new(bytes),
            now: Timestamp::default(),
            numbers: PRODUCERS as u64,
            engines: 0,
            consumer: EngineHandshakes::new(RECONNECT, SILENCE),
            knows: false,
            places: (0..PRODUCERS).map(place).collect(),
            open: BTreeMap::new(),
            tickets: 0,
            cards: BTreeMap::new(),
        }
    }

    fn state(&self, place: usize) -> &'static str {
        let at = &self.places[place];
        match (at.watched, at.up) {
            (false, _) => "idle",
            (_, false) => "away",
            _ if at.halfway => "halfway",
            _ if self.knows && at.engine.is_some() => "asking",
            _ => "unknowing",
        }
    }

    fn act(&mut self, row: &'static str, place: usize) {
        match row {
            MEET => {
                self.tickets += 1;
                let budget = Duration::from_secs(1 + self.script.below(20) as u64);
                self.open.insert(self.tickets, (self.now + budget, place));
                let at = &self.places[place];
                self.consumer.meet(self.tickets, at.id, at.up, budget, self.now);
            }
            STEP | TWICE => {
                if let Some(message) = self.places[place].wire.pop_front() {
                    self.deliver(place, message.clone());
                    if row == TWICE {
                        self.deliver(place, message);
                    }
                }
            }
            LATE => {
                if let Some(message) = self.places[place].last.clone() {
                    self.deliver(place, message);
                }
            }
            CUT => self.lose(place, WireCode::Closed, false),
            GONE => self.lose(place, WireCode::StaleIncarnation, true),
            BACK => self.reconnect(place),
            MOVE => self.restart(place),
            KNOW_C => {
                let engine = self.engine(true);
                self.consumer.know(engine);
                self.knows = true;
            }
            KNOW_P => self.know(place),
            _ => {
                let ms = self.script.below(200) as u64 * 50;
                self.pass(Duration::from_millis(ms));
            }
        }
        self.work();
    }

    /// Another engine, of any shape and size of cards.
    fn engine(&mut self, is_consumer: bool) -> OwnEngine {
        self.engines += 1;
        let ranks = self.script.pick(&[1, 2, HEADS]);
        let heads = if self.script.below(8) == 0 { 2 * HEADS } else { HEADS };
        let len = if is_consumer { 0 } else { self.script.pick(&[8, BODY_MAX / 4]) };
        let rank = self.script.below(ranks as usize);
        self.cards.insert(self.engines, len);
        own_engine(self.engines, rank, topology(ranks, heads), len)
    }

    fn know(&mut self, place: usize) {
        let engine = self.engine(false);
        self.places[place].engine = Some(engine.id.0);
        self.places[place].machine.know(engine);
    }

    fn deliver(&mut self, place: usize, message: (bool, EngineHandshakeMessage)) {
        let at = &mut self.places[place];
        at.last = Some(message.clone());
        let (to_producer, message) = message;
        if to_producer {
            at.machine.receive(CONSUMER, here(), message);
        } else {
            at.halfway = self.knows && at.watched;
            self.consumer.receive(at.id, here(), message);
        }
        self.work();
    }

    fn lose(&mut self, place: usize, code: WireCode, gone: bool) {
        let at = &mut self.places[place];
        at.up = false;
        at.wire.clear();
        at.machine.lost(CONSUMER, code, gone, self.now);
        self.consumer.lost(at.id, code, gone, self.now);
        self.work();
        assert!(!(gone && self.places[place].watched), "who is gone is not met");
    }

    fn reconnect(&mut self, place: usize) {
        let at = &mut self.places[place];
        at.up = true;
        at.machine.met(CONSUMER);
        self.consumer.met(at.id);
        self.work();
    }

    /// Restarts the rank at the place as a new incarnation, which knows nothing.
    fn restart(&mut self, place: usize) {
        self.numbers += 1;
        let fresh = PeerId(self.numbers);
        let at = &mut self.places[place];
        let before = std::mem::replace(&mut at.id, fresh);
        (at.machine, at.engine, at.last) = (EngineHandshakes::new(RECONNECT, SILENCE), None, None);
        at.wire.clear();
        at.halfway = false;
        self.consumer.moved(before, fresh);
        self.reconnect(place);
    }

    /// Lets time pass, and stops at each due time.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        while let Some(next) = self.consumer.next_timeout().filter(|next| *next <= until) {
            assert!(next >= self.now, "nothing is overdue");
            self.now = next;
            self.consumer.expire(next);
            self.work();
            assert!(self.consumer.next_timeout().is_none_or(|later| later > next), "it was done");
        }
        self.now = until;
        let late = self.open.values().any(|(deadline, _)| *deadline <= self.now);
        assert!(!late, "a ticket is beyond its deadline");
    }

    /// Does what the machines say.
    fn work(&mut self) {
        while let Some(action) = self.consumer.poll() {
            match action {
                EngineHandshakeAction::Send { to, message } => {
                    self.send(self.place(to), true, message)
                }
                EngineHandshakeAction::Watch { peer, on } => {
                    let place = self.place(peer);
                    let at = &mut self.places[place];
                    assert_ne!(at.watched, on, "each is said once");
                    (at.watched, at.halfway) = (on, false);
                }
                EngineHandshakeAction::Met { ticket, result } => {
                    let was_open = self.open.remove(&ticket).is_some();
                    assert!(was_open, "it ends once");
                    match result {
                        Ok(pairing) => self.check(&pairing),
                        Err(failure) => {
                            assert!(!failure.code.is_ok() && !failure.detail.is_empty())
                        }
                    }
                }
                EngineHandshakeAction::Refused { .. } => panic!("the consumer is never asked"),
            }
        }
        for place in 0..PRODUCERS {
            while let Some(action) = self.places[place].machine.poll() {
                match action {
                    EngineHandshakeAction::Send { to, message } => {
                        assert_eq!(to, CONSUMER);
                        self.send(place, false, message);
                    }
                    EngineHandshakeAction::Refused { .. } => {}
                    action => panic!("the producer begins no handshake: {action:?}"),
                }
            }
        }
        for (place, at) in self.places.iter().enumerate() {
            let is_wanted = self.open.values().any(|(_, its)| *its == place);
            assert_eq!(at.watched, is_wanted, "watched while it is being met");
        }
    }

    fn place(&self, id: PeerId) -> usize {
        self.places.iter().position(|at| at.id == id).unwrap()
    }

    fn send(&mut self, place: usize, to_producer: bool, message: EngineHandshakeMessage) {
        if self.places[place].up {
            self.places[place].wire.push_back((to_producer, message));
        }
    }

    /// Checks that the cards are of one incarnation, and of the ranks that the consumer reads from.
    fn check(&self, pairing: &Pairing) {
        let id = pairing.engine.0;
        let len = self.cards[&id];
        assert!(!pairing.cards.is_empty());
        for (&rank, shown) in &pairing.cards {
            assert!(rank < pairing.addresses.len());
            assert_eq!(*shown, card(id, rank, len));
        }
    }

    /// Connects all ranks and sets their engines. Every ticket must end long before its deadline.
    fn settle(&mut self) {
        if !self.knows {
            let engine = self.engine(true);
            self.consumer.know(engine);
        }
        for place in 0..PRODUCERS {
            if self.places[place].engine.is_none() {
                self.know(place);
            }
            self.reconnect(place);
            while let Some(message) = self.places[place].wire.pop_front() {
                self.deliver(place, message);
            }
        }
        assert!(self.open.is_empty(), "{:?}", self.open);
        let machines = self.places.iter().map(|at| &at.machine).chain([&self.consumer]);
        for (name, count) in machines.flat_map(EngineHandshakes::gauges) {
            assert_eq!(count, 0, "{name}");
        }
        assert_eq!(self.consumer.next_timeout(), None);
    }
}
