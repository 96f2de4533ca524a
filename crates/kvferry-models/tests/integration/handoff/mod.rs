//! What the handoff protocol promises, one sentence each, in virtual time.

mod course;
mod ends;
mod room;
mod time;

use kvferry_proto::handoff::{
    Announced, Ask, BlockTable, Confirmed, Consumer, ConsumerAction, Generation, HandoffId,
    HandoffMessage, Limits, Need, Offer, Outcome, PeerId, Producer, ProducerAction, ProducerRank,
    Progress, ReadId, Ready, Refusal, Slice, Stop,
};
use kvferry_proto::{Incarnation, Origin, Timestamp, WireCode};
use std::collections::{BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

const PRODUCER: PeerId = PeerId(1);
const CONSUMER: PeerId = PeerId(100);
const BUDGET: Duration = Duration::from_secs(60);
/// Beyond every limit but the tombstones'.
const LONG: Duration = Duration::from_secs(600);
const MILLI: Duration = Duration::from_millis(1);

fn at(host: &str) -> Origin {
    Origin::from(host.parse::<IpAddr>().expect("an address"))
}

fn here() -> Origin {
    at("127.0.0.1")
}

fn id() -> HandoffId {
    HandoffId::new("xfer-1").expect("short enough")
}

fn ask(id: &HandoffId) -> HandoffMessage {
    Ask { id: id.clone(), readers: 1, budget_ms: 5000 }.into()
}

/// One producer rank and one or more consumer ranks, and what is between them.
struct Ranks {
    now: Timestamp,
    limits: Limits,
    producer: Producer,
    consumers: Vec<Consumer>,
    up: bool,
    /// The connection is cut by the first message of this kind, which is lost.
    loses: Option<&'static str>,
    /// Reads that were asked for and have not ended.
    reads: VecDeque<(usize, ReadId, Slice)>,
    /// Whether reads end by themselves.
    reads_end: bool,
    slices: Vec<Slice>,
    produced: Vec<Outcome>,
    /// The consumers that a producer has answered.
    answered: Vec<usize>,
    consumed: Vec<(usize, Outcome)>,
    side_data: Vec<Vec<u8>>,
    bytes: usize,
    watched: BTreeSet<(PeerId, PeerId)>,
}

impl Ranks {
    fn new(consumers: usize) -> Self {
        Self::with(consumers, Limits::default())
    }

    fn with(consumers: usize, limits: Limits) -> Self {
        Self {
            now: Timestamp::default() + Duration::from_secs(1000),
            producer: Producer::new(limits.clone()),
            consumers: (0..consumers).map(|_| Consumer::new(limits.clone())).collect(),
            limits,
            up: true,
            loses: None,
            reads: VecDeque::new(),
            reads_end: true,
            slices: Vec::new(),
            produced: Vec::new(),
            answered: Vec::new(),
            consumed: Vec::new(),
            side_data: Vec::new(),
            bytes: 0,
            watched: BTreeSet::new(),
        }
    }

    fn expect(&mut self) {
        assert_eq!(self.producer.expect(&id(), self.now), Ok(()));
        self.work();
    }

    fn offer(&mut self) {
        assert_eq!(self.producer.offer(&id(), self.now), Ok(()));
        self.work();
    }

    fn advance(&mut self, first: u32, blocks: u32, progress: Progress) {
        let tables = vec![BlockTable::new(first, (first + 50..first + 50 + blocks).collect())];
        assert_eq!(self.producer.advance(&id(), tables, progress), Ok(()));
        self.work();
    }

    fn complete(&mut self, tokens: u32) {
        let side = Some(b"token 7".to_vec());
        let progress = Progress::tokens(tokens);
        let said = self.producer.complete(&id(), Vec::new(), progress, side, self.now);
        assert_eq!(said, Ok(()));
        self.work();
    }

    /// Offers and computes everything.
    fn produce(&mut self) {
        self.offer();
        self.advance(0, 4, Progress::tokens(4));
        self.complete(4);
    }

    /// A consumer that reads everything; its read has not ended.
    fn reading() -> Self {
        let mut ranks = Self::new(1);
        ranks.reads_end = false;
        ranks.produce();
        ranks.want();
        ranks
    }

    /// A consumer that reads the first two tokens; its read has not ended.
    fn halfway() -> Self {
        let mut ranks = Self::new(1);
        ranks.reads_end = false;
        ranks.want();
        ranks.offer();
        ranks.advance(0, 2, Progress::tokens(2));
        ranks
    }

    fn withdraw(&mut self, code: WireCode, detail: &str) {
        assert_eq!(self.producer.withdraw(&id(), code, detail, self.now), Ok(()));
        self.work();
    }

    fn cancel(&mut self, detail: &str) {
        let now = self.now;
        assert_eq!(self.consumers[0].cancel(&id(), WireCode::Cancelled, detail, now), Ok(()));
        self.work();
    }

    fn end_reads(&mut self) {
        self.reads_end = true;
        self.work();
    }

    fn want(&mut self) {
        (0..self.consumers.len()).for_each(|consumer| self.want_at(consumer));
    }

    fn want_at(&mut self, consumer: usize) {
        let (from, budget) = (self.sources(), self.limits.cap);
        assert_eq!(self.consumers[consumer].want(&id(), &from, budget, self.now), Ok(()));
        self.work();
    }

    fn claim(&mut self) {
        let from = self.sources();
        for consumer in &mut self.consumers {
            assert_eq!(consumer.claim(&id(), &from, self.now), Ok(()));
        }
        self.work();
    }

    fn sources(&self) -> [ProducerRank; 1] {
        let readers = self.consumers.len() as u32;
        [ProducerRank {
            peer: PRODUCER,
            incarnation: None,
            readers,
            connected: self.up,
            need: Need::ALL,
        }]
    }

    /// Until no machine has anything to do.
    fn work(&mut self) {
        loop {
            let mut idle = true;
            while let Some(action) = self.producer.poll() {
                idle = false;
                self.for_producer(action);
            }
            for at in 0..self.consumers.len() {
                while let Some(action) = self.consumers[at].poll() {
                    idle = false;
                    self.for_consumer(at, action);
                }
            }
            if idle && self.reads_end && !self.reads.is_empty() {
                self.end_read(Ok(()));
            } else if idle {
                return;
            }
        }
    }

    fn for_producer(&mut self, action: ProducerAction) {
        match action {
            ProducerAction::Send { to, message } => {
                if self.crosses(&message) {
                    let at = (to.0 - CONSUMER.0) as usize;
                    self.consumers[at].receive(PRODUCER, here(), message, self.now);
                }
            }
            ProducerAction::Watch { peer, on } => self.watch(PRODUCER, peer, on),
            ProducerAction::Ended { outcome, .. } => self.produced.push(outcome),
        }
    }

    fn for_consumer(&mut self, at: usize, action: ConsumerAction) {
        match action {
            ConsumerAction::Send { message, .. } => {
                if self.crosses(&message) {
                    self.producer.receive(
                        PeerId(CONSUMER.0 + at as u64),
                        here(),
                        message,
                        self.now,
                    );
                }
            }
            ConsumerAction::Read { read, slice, .. } => {
                self.slices.push(slice);
                self.reads.push_back((at, read, slice));
            }
            ConsumerAction::CancelRead(_) => {}
            ConsumerAction::Watch { peer, on } => {
                self.watch(PeerId(CONSUMER.0 + at as u64), peer, on);
            }
            ConsumerAction::Answered { .. } => self.answered.push(at),
            ConsumerAction::Ended { outcome, side_data, .. } => {
                assert!(self.reads.iter().all(|(of, ..)| *of != at), "ended, and still read");
                self.consumed.push((at, outcome));
                self.side_data.extend(side_data.into_iter().map(|(_, data)| data));
            }
        }
    }

    fn watch(&mut self, by: PeerId, peer: PeerId, on: bool) {
        let changed =
            if on { self.watched.insert((by, peer)) } else { self.watched.remove(&(by, peer)) };
        assert!(changed, "each is said once");
    }

    fn end_read(&mut self, result: Result<(), (WireCode, String)>) {
        let (at, read, _) = self.reads.pop_front().expect("one is under way");
        self.consumers[at].read_ended(read, result, self.now);
    }

    fn crosses(&mut self, message: &HandoffMessage) -> bool {
        if !self.up {
            return false;
        }
        if self.loses == Some(message.kind()) {
            self.loses = None;
            self.cut(WireCode::Closed, false);
            return false;
        }
        self.bytes += message.encode().len();
        true
    }

    fn cut(&mut self, code: WireCode, gone: bool) {
        self.up = false;
        for at in 0..self.consumers.len() {
            self.producer.lost(PeerId(CONSUMER.0 + at as u64), code, gone, self.now);
            self.consumers[at].lost(PRODUCER, code, gone, self.now);
        }
    }

    fn reconnect(&mut self) {
        self.up = true;
        for at in 0..self.consumers.len() {
            self.producer.met(PeerId(CONSUMER.0 + at as u64));
            self.consumers[at].met(PRODUCER, Incarnation(PRODUCER.0.into()), self.now);
        }
        self.work();
    }

    /// Lets time pass, and stops at each due time.
    fn pass(&mut self, time: Duration) {
        let until = self.now + time;
        loop {
            self.work();
            let timeouts = self.consumers.iter().map(Consumer::next_timeout);
            let next = timeouts.chain([self.producer.next_timeout()]).flatten().min();
            let Some(next) = next.filter(|next| *next <= until) else { break };
            self.now = self.now.max(next);
            self.producer.expire(self.now);
            self.consumers.iter_mut().for_each(|consumer| consumer.expire(self.now));
        }
        self.now = until;
    }

    fn offer_again(&mut self) -> Result<(), Refusal> {
        self.producer.offer(&id(), self.now)
    }

    fn produced_codes(&self) -> Vec<WireCode> {
        self.produced.iter().map(|outcome| outcome.code).collect()
    }

    fn consumed_codes(&self) -> Vec<WireCode> {
        self.consumed.iter().map(|(_, outcome)| outcome.code).collect()
    }

    fn assert_both(&self, code: WireCode) {
        assert_eq!(self.produced_codes(), [code], "the producer, once");
        assert_eq!(self.consumed_codes(), vec![code; self.consumers.len()], "each consumer, once");
    }

    fn assert_ended(&self, code: WireCode) {
        self.assert_both(code);
        self.assert_empty();
    }

    /// Nothing is left, tombstones apart.
    fn assert_empty(&self) {
        let consumers = self.consumers.iter().flat_map(Consumer::gauges);
        for (name, count) in consumers.chain(self.producer.gauges()) {
            assert!(count == 0 || name == "tombstones", "{count} {name}");
        }
        assert!(self.watched.is_empty(), "{:?}", self.watched);
    }
}
