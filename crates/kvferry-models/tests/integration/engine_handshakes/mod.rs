//! What engine handshakes promise, one sentence each, in virtual time.

mod lost;
mod meeting;
mod refused;

use kvferry_models::engines::{card, here, introduced, model, own_engine, topology};
use kvferry_proto::engine_handshake::{
    EngineHandshakeAction, EngineHandshakeMessage, EngineHandshakes, EngineId, Failure, Introduce,
    Model, OwnEngine, Pairing, Turned,
};
use kvferry_proto::handoff::PeerId;
use kvferry_proto::message::BODY_MAX;
use kvferry_proto::plan::RANKS_MAX;
use kvferry_proto::{Origin, Timestamp, WireCode};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

const PRODUCER: PeerId = PeerId(1);
const CONSUMER: PeerId = PeerId(100);
const BUDGET: Duration = Duration::from_secs(30);
const RECONNECT: Duration = Duration::from_secs(5);
const SILENCE: Duration = Duration::from_secs(3);
const NANO: Duration = Duration::from_nanos(1);
/// Engines of the consumer and the producer, and a later incarnation of the producer.
const OURS: u128 = 1;
const THEIRS: u128 = 2;
const LATER: u128 = 3;
const SMALL: usize = 8;
/// So that two of them fit into one answer.
const BIG: usize = BODY_MAX / 4;

type Result<T> = std::result::Result<T, Failure>;

/// A consumer rank, a producer rank, and what is between them.
struct Pair {
    now: Timestamp,
    consumer: EngineHandshakes,
    producer: EngineHandshakes,
    up: bool,
    /// What is under way, and whether to the producer.
    wire: VecDeque<(bool, EngineHandshakeMessage)>,
    /// What has arrived.
    arrived: Vec<EngineHandshakeMessage>,
    /// What the producer's rank is called by the consumer.
    producer_id: PeerId,
    met: Vec<(u64, Result<Arc<Pairing>>)>,
    refused: Vec<String>,
    watched: BTreeSet<PeerId>,
}

impl Pair {
    /// Neither knows its own engine.
    fn new() -> Self {
        Self {
            now: Timestamp::default() + Duration::from_secs(1000),
            consumer: EngineHandshakes::new(RECONNECT, SILENCE),
            producer: EngineHandshakes::new(RECONNECT, SILENCE),
            up: true,
            wire: VecDeque::new(),
            arrived: Vec::new(),
            producer_id: PRODUCER,
            met: Vec::new(),
            refused: Vec::new(),
            watched: BTreeSet::new(),
        }
    }

    /// Both know: a consumer of one rank that reads from all of these.
    fn knowing(ranks: u32, card_len: usize) -> Self {
        let mut pair = Self::new();
        pair.consumer.know(consumer(ranks));
        pair.producer.know(producer(ranks, card_len));
        pair
    }

    /// As [`Pair::knowing`], with the first two cards of the ranks received.
    fn halfway(ranks: u32) -> Self {
        let mut pair = Self::knowing(ranks, BIG);
        pair.meet(1);
        (0..2).for_each(|_| pair.step());
        pair
    }

    fn meet(&mut self, ticket: u64) {
        self.meet_within(ticket, BUDGET);
    }

    fn meet_within(&mut self, ticket: u64, budget: Duration) {
        self.consumer.meet(ticket, self.producer_id, self.up, budget, self.now);
        self.collect();
    }

    fn collect(&mut self) {
        while let Some(action) = self.consumer.poll() {
            match action {
                EngineHandshakeAction::Send { to, message } => {
                    assert_eq!(to, self.producer_id);
                    self.send(true, message);
                }
                EngineHandshakeAction::Watch { peer, on: true } => {
                    assert!(self.watched.insert(peer), "each is said once");
                }
                EngineHandshakeAction::Watch { peer, on: false } => {
                    assert!(self.watched.remove(&peer), "each is said once");
                }
                EngineHandshakeAction::Met { ticket, result } => {
                    let before = self.met.iter().filter(|(other, _)| *other == ticket).count();
                    assert_eq!(before, 0, "ticket {ticket} ends once");
                    self.met.push((ticket, result));
                }
                EngineHandshakeAction::Refused { .. } => panic!("the consumer is never asked"),
            }
        }
        while let Some(action) = self.producer.poll() {
            match action {
                EngineHandshakeAction::Send { to, message } => {
                    assert_eq!(to, CONSUMER);
                    self.send(false, message);
                }
                EngineHandshakeAction::Refused { peer, detail } => {
                    assert_eq!(peer, CONSUMER);
                    self.refused.push(detail);
                }
                action => panic!("the producer begins no handshake: {action:?}"),
            }
        }
    }

    fn send(&mut self, to_producer: bool, message: EngineHandshakeMessage) {
        let bytes = message.encode();
        let decoded = EngineHandshakeMessage::decode(&bytes).expect("it can be sent");
        assert_eq!(decoded, message);
        if self.up {
            self.wire.push_back((to_producer, decoded));
        }
    }

    /// Has one message arrive.
    fn step(&mut self) {
        self.collect();
        let (to_producer, message) = self.wire.pop_front().expect("one is under way");
        self.deliver(to_producer, message);
    }

    fn deliver(&mut self, to_producer: bool, message: EngineHandshakeMessage) {
        self.arrived.push(message.clone());
        if to_producer {
            self.producer.receive(CONSUMER, here(), message);
        } else {
            self.consumer.receive(self.producer_id, here(), message);
        }
        self.collect();
    }

    /// The producer says it, whatever it is.
    fn hear(&mut self, message: impl Into<EngineHandshakeMessage>) {
        self.deliver(false, message.into());
    }

    /// Until no machine has anything to send.
    fn work(&mut self) {
        self.collect();
        while !self.wire.is_empty() {
            assert!(self.arrived.len() < 1000, "it is no loop");
            self.step();
        }
    }

    fn cut(&mut self, code: WireCode, gone: bool) {
        self.up = false;
        self.wire.clear();
        self.consumer.lost(self.producer_id, code, gone, self.now);
        self.producer.lost(CONSUMER, code, gone, self.now);
        self.collect();
    }

    fn reconnect(&mut self) {
        self.up = true;
        self.consumer.met(self.producer_id);
        self.producer.met(CONSUMER);
        self.collect();
    }

    fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        self.consumer.expire(self.now);
        self.producer.expire(self.now);
        self.collect();
    }

    /// The ranks that were asked for, one list per question.
    fn asked(&self) -> Vec<Vec<u32>> {
        let asked = self.arrived.iter().filter_map(|message| match message {
            EngineHandshakeMessage::Introduce(introduce) => Some(introduce.ranks.clone()),
            _ => None,
        });
        asked.collect()
    }

    /// The only ticket has ended well, and nothing is left.
    #[track_caller]
    fn pairing(&self) -> Arc<Pairing> {
        self.assert_empty();
        let [(_, Ok(pairing))] = &self.met[..] else { panic!("{:?}", self.met) };
        Arc::clone(pairing)
    }

    /// The only ticket has failed, and nothing is left.
    #[track_caller]
    fn failure(&self) -> Failure {
        self.assert_empty();
        let [(_, Err(failure))] = &self.met[..] else { panic!("{:?}", self.met) };
        failure.clone()
    }

    fn ended(&self) -> Vec<u64> {
        self.met.iter().map(|(ticket, _)| *ticket).collect()
    }

    /// Nothing is left.
    #[track_caller]
    fn assert_empty(&self) {
        for (name, count) in self.consumer.gauges().into_iter().chain(self.producer.gauges()) {
            assert_eq!(count, 0, "{name}");
        }
        assert!(self.watched.is_empty(), "{:?}", self.watched);
        assert_eq!(self.consumer.next_timeout(), None);
        assert_eq!(self.producer.next_timeout(), None);
    }
}

fn consumer(heads: u32) -> OwnEngine {
    own_engine(OURS, 0, topology(1, heads), SMALL)
}

fn producer(ranks: u32, card_len: usize) -> OwnEngine {
    own_engine(THEIRS, 0, topology(ranks, ranks), card_len)
}

fn cards(id: u128, ranks: impl IntoIterator<Item = usize>, len: usize) -> BTreeMap<usize, Vec<u8>> {
    ranks.into_iter().map(|rank| (rank, card(id, rank, len))).collect()
}
