//! What the handoff protocol promises, one sentence each, in virtual time.

use kvferry_proto::handoff::{
    Announced, Ask, BlockTable, Confirmed, Consumer, ConsumerAction, Generation, HandoffId,
    HandoffMessage, Limits, Need, Offer, Outcome, PeerId, Producer, ProducerAction, ProducerRank,
    Progress, ReadId, Ready, Refusal, Slice, Stop,
};
use kvferry_proto::{Origin, Timestamp, WireCode};
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
        [ProducerRank { peer: PRODUCER, readers, connected: self.up, need: Need::ALL }]
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
            self.consumers[at].met(PRODUCER, self.now);
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

#[test]
fn i5_either_side_may_be_first() {
    for producer_first in [true, false] {
        let mut ranks = Ranks::new(1);
        if producer_first {
            ranks.produce();
            ranks.pass(Limits::default().offer_ttl - Duration::from_secs(1));
            ranks.want();
        } else {
            ranks.want();
            assert_eq!(ranks.producer.state(&id()), Some("awaited"));
            ranks.pass(Duration::from_secs(10));
            ranks.produce();
        }
        ranks.assert_ended(WireCode::Ok);
        assert_eq!(ranks.side_data, [b"token 7"]);
    }
}

#[test]
fn i10_peers_are_watched_while_something_is_expected_of_them() {
    let mut ranks = Ranks::new(1);
    ranks.reads_end = false;
    ranks.produce();
    assert!(ranks.watched.is_empty(), "no consumer has asked yet");
    ranks.want();
    assert_eq!(ranks.watched, BTreeSet::from([(PRODUCER, CONSUMER), (CONSUMER, PRODUCER)]));
    ranks.end_reads();
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn layers_and_chunks_are_read_as_they_become_ready() {
    let mut ranks = Ranks::new(1);
    ranks.offer();
    ranks.want();
    let steps = [
        (0, 2, Progress::NONE.and(1, 2)),
        (2, 0, Progress::tokens(2)),
        (2, 1, Progress::tokens(2).and(3, 3)),
    ];
    for (first, blocks, progress) in steps {
        ranks.advance(first, blocks, progress);
        let read = ranks.slices.last().map(|slice| (slice.to, slice.last));
        assert_eq!(read, Some((progress, false)));
    }
    ranks.complete(3);
    assert_eq!(ranks.slices.len(), 4, "and the rest");
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn what_becomes_ready_while_all_reads_are_busy_is_read_in_one() {
    let mut ranks = Ranks::with(1, Limits { reads: 1, ..Limits::default() });
    ranks.reads_end = false;
    ranks.offer();
    ranks.want();
    for layer in 1..20 {
        ranks.advance(0, 1, Progress::NONE.and(layer, 1));
    }
    assert_eq!(ranks.slices.len(), 1);
    ranks.reads_end = true;
    ranks.complete(1);
    assert_eq!(ranks.slices.len(), 2);
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn an_offer_without_a_consumer_expires_and_is_refused_later() {
    let mut ranks = Ranks::new(1);
    ranks.offer();
    // Not while it is computed.
    ranks.pass(LONG);
    ranks.complete(0);
    ranks.pass(ranks.limits.offer_ttl - MILLI);
    assert_eq!(ranks.produced, []);
    ranks.pass(MILLI);
    assert_eq!(ranks.produced.len(), 1);
    ranks.want();
    ranks.assert_ended(WireCode::Expired);
}

#[test]
fn an_offer_that_was_taken_does_not_expire() {
    let limits = Limits { offer_ttl: Duration::from_secs(1), ..Limits::default() };
    let mut ranks = Ranks::with(1, limits);
    ranks.reads_end = false;
    ranks.produce();
    ranks.want();
    ranks.pass(BUDGET / 2);
    assert_eq!(ranks.produced, []);
    ranks.end_reads();
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn what_its_producer_withdraws_even_before_it_offers_ends_at_its_consumer() {
    for (offered, wanted_first) in [(true, true), (true, false), (false, true), (false, false)] {
        let mut ranks = Ranks::new(1);
        if wanted_first {
            ranks.want();
        }
        if offered {
            ranks.offer();
            ranks.advance(0, 2, Progress::tokens(2));
        }
        ranks.withdraw(WireCode::Cancelled, "stop token");
        if !wanted_first {
            ranks.want();
        }
        let (_, outcome) = &ranks.consumed[0];
        assert_eq!((outcome.code, &outcome.detail[..]), (WireCode::Cancelled, "stop token"));
        assert_eq!(ranks.produced_codes(), [WireCode::Cancelled][..usize::from(offered)]);
        assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::Cancelled)));
        ranks.assert_empty();
    }
}

#[test]
fn a_consumer_that_needs_nothing_frees_the_producer_even_before_it_offers_or_after_a_reset() {
    for (offered, loses) in [(true, None), (false, None), (true, Some("stop"))] {
        let mut ranks = Ranks::new(1);
        if offered {
            ranks.produce();
        }
        ranks.loses = loses;
        let freed = ranks.consumers[0].free(&id(), &[PRODUCER], WireCode::NotNeeded, "", ranks.now);
        assert_eq!(freed, Ok(()));
        ranks.work();
        if loses.is_some() {
            assert_eq!(ranks.produced, []);
            ranks.reconnect();
        }
        assert_eq!(ranks.produced_codes(), [WireCode::NotNeeded][..usize::from(offered)]);
        assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::NotNeeded)));
        ranks.assert_empty();
    }
}

#[test]
fn i3_whatever_message_is_lost_with_its_connection_the_handoff_goes_on() {
    for kind in ["ask", "expected", "offer", "ready", "confirm", "confirmed"] {
        let mut ranks = Ranks::new(1);
        ranks.loses = Some(kind);
        ranks.claim();
        ranks.expect();
        ranks.offer();
        ranks.want();
        ranks.advance(0, 2, Progress::tokens(2));
        ranks.advance(2, 2, Progress::tokens(4));
        ranks.complete(4);
        assert!(!ranks.up, "{kind} was said");
        assert_eq!(ranks.consumed, [], "{kind}");
        ranks.pass(ranks.limits.reconnect / 2);
        ranks.reconnect();
        ranks.assert_ended(WireCode::Ok);
    }
}

#[test]
fn i3_the_producer_confirms_as_often_as_it_is_asked_and_a_cancel_waits_for_it() {
    for is_cancelled in [false, true] {
        let mut ranks = Ranks::new(1);
        ranks.produce();
        ranks.loses = Some("confirmed");
        ranks.want();
        assert_eq!(ranks.produced, [Outcome::DONE]);
        if is_cancelled {
            ranks.cancel("");
        }
        for _ in 0..3 {
            ranks.loses = Some("confirmed");
            ranks.reconnect();
            assert_eq!(ranks.consumed, []);
        }
        ranks.reconnect();
        ranks.assert_ended(WireCode::Ok);
    }
}

#[test]
fn i2_a_consumer_ends_when_the_last_of_its_reads_has() {
    let mut ranks = Ranks::reading();
    ranks.cancel("left");
    assert_eq!(ranks.produced.len(), 1, "the producer's blocks are free at once");
    ranks.pass(LONG);
    assert_eq!(ranks.consumed, []);
    ranks.end_read(Err((WireCode::Cancelled, String::new())));
    ranks.work();
    ranks.assert_ended(WireCode::Cancelled);
}

#[test]
fn i2_after_a_preemption_everything_is_read_again_once_the_old_reads_have_ended() {
    let mut ranks = Ranks::halfway();
    assert_eq!(ranks.reads.len(), 1);
    assert_eq!(ranks.producer.restart(&id()), Ok(()));
    ranks.work();
    let tables = vec![BlockTable::new(0, vec![90, 91])];
    assert_eq!(ranks.producer.advance(&id(), tables, Progress::tokens(2)), Ok(()));
    ranks.work();
    assert_eq!(ranks.slices.len(), 1, "both would write to the same blocks");
    ranks.end_read(Ok(()));
    ranks.work();
    assert_eq!(ranks.slices[1].from, Progress::NONE);
    let table = ranks.consumers[0].table(&id(), PRODUCER).and_then(|mut it| it.next());
    assert_eq!(table.expect("a group").blocks, [90, 91]);
    ranks.reads_end = true;
    ranks.complete(2);
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn a_read_that_fails_fails_the_handoff_with_its_reason_on_both_sides() {
    let mut ranks = Ranks::reading();
    ranks.end_read(Err((WireCode::Checksum, "piece 3 differs".to_owned())));
    ranks.work();
    ranks.assert_ended(WireCode::Checksum);
    assert_eq!(ranks.produced[0].detail, "piece 3 differs");
}

#[test]
fn a_read_lost_with_its_connection_is_done_again_from_where_it_was() {
    let mut ranks = Ranks::halfway();
    ranks.end_read(Ok(()));
    ranks.advance(2, 2, Progress::tokens(4));
    ranks.end_read(Err((WireCode::Closed, String::new())));
    ranks.cut(WireCode::Closed, false);
    ranks.reconnect();
    assert_eq!(ranks.slices.last().expect("again").from, Progress::tokens(2));
    ranks.reads_end = true;
    ranks.complete(4);
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn i6_a_peer_that_is_gone_ends_its_handoffs_at_once_and_one_that_was_reset_within_the_window() {
    for (gone, step) in [true, false].into_iter().flat_map(|gone| (0..4).map(move |n| (gone, n))) {
        let mut ranks = Ranks::new(1);
        ranks.reads_end = false;
        ranks.want();
        ranks.offer();
        if step > 0 {
            ranks.advance(0, 2, Progress::tokens(2));
        }
        if step > 1 {
            ranks.end_read(Ok(()));
            ranks.work();
        }
        if step > 2 {
            ranks.complete(2);
        }
        ranks.cut(WireCode::Closed, gone);
        ranks.end_reads();
        if !gone {
            ranks.pass(ranks.limits.reconnect - MILLI);
            assert!(ranks.produced.is_empty() && ranks.consumed.is_empty(), "step {step}");
            ranks.pass(MILLI);
        }
        ranks.assert_both(WireCode::Closed);
        assert_eq!(ranks.produced[0].peer, Some(CONSUMER));
        assert_eq!(ranks.consumed[0].1.peer, Some(PRODUCER));
        ranks.pass(ranks.limits.offer_ttl);
        ranks.assert_empty();
    }
}

#[test]
fn i6_a_request_that_never_arrives_at_its_producer_costs_the_rendezvous_time_and_is_named() {
    let Limits { rendezvous, grace, .. } = Limits::default();
    let unreached = "deadline passed: the producer has not answered (peer 1)";
    let unknown = "unknown handoff: no such request arrived at the producer within 30 s (peer 1)";
    for (up, time, expected) in
        [(false, rendezvous + grace, unreached), (true, rendezvous, unknown)]
    {
        let mut ranks = Ranks::new(1);
        ranks.up = up;
        ranks.want();
        ranks.pass(time - MILLI);
        assert_eq!(ranks.consumed, []);
        ranks.pass(MILLI);
        assert_eq!(ranks.consumed[0].1.to_string(), expected);
        ranks.pass(LONG);
        ranks.assert_empty();
    }
}

#[test]
fn a_consumer_whose_prompt_is_another_than_the_producers_is_told_so() {
    let name = |digit: &str| HandoffId::new(&format!("t#{}", digit.repeat(32))).expect("short");
    let t2 = HandoffId::new(&format!("t2#{}", "b".repeat(32))).expect("short");
    for (theirs, is_other) in [(name("b"), true), (t2, false)] {
        for is_offered in [false, true] {
            let mut ranks = Ranks::new(1);
            ranks.producer.expect(&theirs, ranks.now).expect("new");
            if is_offered {
                ranks.producer.offer(&theirs, ranks.now).expect("expected");
            }
            let from = ranks.sources();
            let wanted = ranks.consumers[0].want(&name("a"), &from, BUDGET, ranks.now);
            assert_eq!(wanted, Ok(()));
            ranks.pass(ranks.limits.rendezvous);
            let detail = &ranks.consumed[0].1.detail;
            let other = "the producer's request of this transfer id has another prompt";
            assert_eq!(detail == other, is_other, "{detail}");
        }
    }
}

#[test]
fn a_request_that_waits_two_minutes_at_its_consumer_before_it_is_scheduled_finds_its_kv_there() {
    for producer_first in [true, false] {
        let mut ranks = Ranks::new(2);
        if producer_first {
            ranks.produce();
            ranks.pass(ranks.limits.offer_ttl - MILLI);
            ranks.claim();
        } else {
            ranks.claim();
            ranks.produce();
        }
        ranks.pass(4 * ranks.limits.offer_ttl - Duration::from_secs(1));
        assert_eq!((&ranks.produced[..], &ranks.slices[..]), (&[][..], &[][..]));
        ranks.want();
        let all = Slice { from: Progress::NONE, to: Progress::tokens(4), last: true };
        assert_eq!(ranks.slices, [all, all]);
        ranks.assert_ended(WireCode::Ok);
    }
}

#[test]
fn a_request_that_waits_two_minutes_at_its_producer_is_waited_for() {
    for is_claimed in [false, true] {
        for asks_first in [false, true] {
            let mut ranks = Ranks::new(1);
            if !asks_first {
                ranks.expect();
                ranks.pass(Duration::from_secs(60));
            }
            if is_claimed {
                ranks.claim()
            } else {
                ranks.want()
            }
            if asks_first {
                ranks.pass(ranks.limits.rendezvous - MILLI);
                ranks.expect();
            }
            ranks.pass(Duration::from_secs(200));
            assert_eq!(ranks.producer.state(&id()), Some("expected"));
            assert_eq!(ranks.consumed, []);
            ranks.produce();
            if is_claimed {
                ranks.want();
            }
            ranks.assert_ended(WireCode::Ok);
        }
    }
}

#[test]
fn i6_a_claimer_that_dies_ends_the_offer_within_the_reconnection_window() {
    // After the silence window the connection's end says that the peer is gone.
    for (code, gone) in [(WireCode::Closed, false), (WireCode::Silent, true)] {
        let mut ranks = Ranks::new(1);
        ranks.produce();
        ranks.claim();
        ranks.pass(ranks.limits.silence);
        ranks.cut(code, gone);
        if !gone {
            ranks.pass(ranks.limits.reconnect - MILLI);
            assert_eq!(ranks.produced, []);
        }
        ranks.pass(MILLI);
        assert_eq!(ranks.produced_codes(), [code]);
        assert_eq!(ranks.consumed, [], "a claim ends unsaid");
        ranks.assert_empty();
    }
}

#[test]
fn a_handoff_that_began_just_before_its_session_was_found_silent_waits_for_another_session() {
    for is_claimed in [true, false] {
        let mut ranks = Ranks::new(1);
        let silence = ranks.limits.silence;
        if is_claimed {
            ranks.claim();
        }
        ranks.want();
        ranks.pass(MILLI);
        // The peer was stopped for longer than the window, and runs again.
        ranks.consumers[0].lost(PRODUCER, WireCode::Silent, true, ranks.now);
        ranks.up = false;
        ranks.pass(silence / 2);
        assert_eq!(ranks.consumed, []);
        ranks.reconnect();
        ranks.produce();
        ranks.assert_ended(WireCode::Ok);
    }
}

#[test]
fn a_handoff_to_a_peer_that_stays_silent_ends_a_silence_window_after_it_began() {
    let mut ranks = Ranks::new(1);
    let silence = ranks.limits.silence;
    ranks.want();
    ranks.pass(MILLI);
    ranks.cut(WireCode::Silent, true);
    ranks.pass(silence - MILLI - MILLI);
    assert_eq!(ranks.consumed, []);
    ranks.pass(MILLI);
    assert_eq!(ranks.consumed_codes(), [WireCode::Silent]);
    // The window of an older handoff has passed.
    let mut ranks = Ranks::new(1);
    ranks.want();
    ranks.pass(silence);
    ranks.cut(WireCode::Silent, true);
    ranks.work();
    assert_eq!(ranks.consumed_codes(), [WireCode::Silent]);
    // A peer that has ended is not waited for.
    let mut ranks = Ranks::new(1);
    ranks.want();
    ranks.cut(WireCode::Closed, true);
    ranks.work();
    assert_eq!(ranks.consumed_codes(), [WireCode::Closed]);
}

#[test]
fn i8_announcements_take_no_more_memory_than_they_may_however_few_bytes_they_are_on_the_wire() {
    let blocks = 1000;
    let takes = 4 * blocks as usize;
    for (bytes, code) in [(takes, WireCode::Ok), (takes - 1, WireCode::Busy)] {
        let mut ranks = Ranks::with(1, Limits { announced_bytes: bytes, ..Limits::default() });
        ranks.want();
        ranks.offer();
        ranks.advance(0, blocks, Progress::tokens(blocks));
        assert!(ranks.bytes < 300, "{} bytes on the wire", ranks.bytes);
        if code.is_ok() {
            let held = ranks.consumers[0].gauges();
            assert!(held.contains(&("announced_bytes", takes)), "{held:?}");
            ranks.withdraw(WireCode::Cancelled, "enough");
        }
        let expected = if code.is_ok() { WireCode::Cancelled } else { code };
        assert_eq!(ranks.consumed_codes(), [expected]);
        ranks.assert_empty();
    }
}

/// A consumer's view of an offer of one table with so many blocks.
fn announcement(id: &HandoffId, blocks: u32) -> Offer {
    let announced = Announced {
        count: 1,
        tables: vec![BlockTable::new(0, (0..blocks).collect()).into()],
        progress: Progress::tokens(blocks),
        ..Announced::default()
    };
    Offer { id: id.clone(), generation: Generation(1), announced }
}

#[test]
fn i8_announcements_of_one_host_leave_room_for_those_of_another_whatever_lives_it_claims() {
    let now = Timestamp::from_nanos(1);
    let limits = Limits { announced_bytes: 64 * 1024, ..Limits::default() };
    let mut consumer = Consumer::new(limits);
    let from =
        |peer| [ProducerRank { peer: PeerId(peer), readers: 1, connected: true, need: Need::ALL }];
    for n in 0..100 {
        let hostile = HandoffId::new(&format!("hostile-{n}")).expect("short");
        assert_eq!(consumer.claim(&hostile, &from(n), now), Ok(()));
        let announcement = announcement(&hostile, 4096);
        consumer.receive(PeerId(n), at("10.0.0.1"), announcement.into(), now);
    }
    let gauge = |consumer: &Consumer, name| {
        let mut gauges = consumer.gauges().into_iter();
        gauges.find(|(it, _)| *it == name).expect("a gauge").1
    };
    assert_eq!(gauge(&consumer, "announced_bytes"), 64 * 1024, "it gets all that no other wants");
    assert_eq!(consumer.want(&id(), &from(200), BUDGET, now), Ok(()));
    consumer.receive(PeerId(200), at("10.0.1.1"), announcement(&id(), 6144).into(), now);
    let is_read = |action| matches!(action, ConsumerAction::Read { from: PeerId(200), .. });
    assert!(std::iter::from_fn(|| consumer.poll()).any(is_read));
    let held = (gauge(&consumer, "announced_bytes"), gauge(&consumer, "claimed"));
    assert_eq!(held, (56 * 1024, 2), "two of the others have failed");
}

#[test]
fn i8_a_handoff_that_gives_its_memory_up_fails_as_busy_when_its_reads_have_stopped() {
    let now = Timestamp::from_nanos(1);
    let limits = Limits { announced_bytes: 16 * 1024, ..Limits::default() };
    let mut consumer = Consumer::new(limits);
    let from =
        |peer| [ProducerRank { peer: PeerId(peer), readers: 1, connected: true, need: Need::ALL }];
    let first = HandoffId::new("first").expect("short");
    assert_eq!(consumer.want(&first, &from(1), BUDGET, now), Ok(()));
    consumer.receive(PeerId(1), at("10.0.0.1"), announcement(&first, 4096).into(), now);
    let actions: Vec<_> = std::iter::from_fn(|| consumer.poll()).collect();
    let read = actions.iter().find_map(|it| match it {
        ConsumerAction::Read { read, .. } => Some(*read),
        _ => None,
    });
    assert_eq!(consumer.want(&id(), &from(2), BUDGET, now), Ok(()));
    consumer.receive(PeerId(2), at("10.0.1.1"), announcement(&id(), 1024).into(), now);
    let actions: Vec<_> = std::iter::from_fn(|| consumer.poll()).collect();
    let read = read.expect("it is read");
    assert!(actions.contains(&ConsumerAction::CancelRead(read)), "{actions:?}");
    let is_end = |it: &ConsumerAction| matches!(it, ConsumerAction::Ended { .. });
    assert!(!actions.iter().any(is_end), "{actions:?}");
    consumer.read_ended(read, Ok(()), now);
    let ended = std::iter::from_fn(|| consumer.poll()).find_map(|it| match it {
        ConsumerAction::Ended { id, outcome, .. } => Some((id, outcome.code)),
        _ => None,
    });
    assert_eq!(ended, Some((first, WireCode::Busy)));
}

#[test]
fn i8_a_handoff_that_has_been_read_loses_side_data_for_room_and_is_done() {
    let now = Timestamp::from_nanos(1);
    let from =
        |peer| [ProducerRank { peer: PeerId(peer), readers: 1, connected: true, need: Need::ALL }];
    let take = |consumer: &mut Consumer| std::iter::from_fn(|| consumer.poll()).collect::<Vec<_>>();
    let gauge = |consumer: &Consumer| {
        let mut gauges = consumer.gauges().into_iter();
        gauges.find(|(name, _)| *name == "announced_bytes").expect("a gauge").1
    };
    // The connection may be lost before the confirmation is asked for.
    for is_lost in [false, true] {
        let limits = Limits { announced_bytes: 32 * 1024, ..Limits::default() };
        let mut consumer = Consumer::new(limits);
        let first = HandoffId::new("first").expect("short");
        assert_eq!(consumer.want(&first, &from(1), BUDGET, now), Ok(()));
        let mut offer = announcement(&first, 4096);
        (offer.announced.last, offer.announced.side_data) = (true, Some(vec![7; 16 * 1024]));
        consumer.receive(PeerId(1), at("10.0.0.1"), offer.clone().into(), now);
        let read = take(&mut consumer).into_iter().find_map(|it| match it {
            ConsumerAction::Read { read, .. } => Some(read),
            _ => None,
        });
        if is_lost {
            consumer.lost(PeerId(1), WireCode::Closed, false, now);
        }
        consumer.read_ended(read.expect("it is read"), Ok(()), now);
        assert_eq!(gauge(&consumer), 16 * 1024, "the tables are not needed");
        let (second, third) = (id(), HandoffId::new("third").expect("short"));
        for (id, peer, blocks) in [(&second, 2, 2048), (&third, 3, 3072)] {
            assert_eq!(consumer.want(id, &from(peer), BUDGET, now), Ok(()));
            let origin = at(&format!("10.0.{peer}.1"));
            consumer.receive(PeerId(peer), origin, announcement(id, blocks).into(), now);
        }
        assert_eq!(gauge(&consumer), 4 * (2048 + 3072), "the side data is dropped");
        if is_lost {
            consumer.met(PeerId(1), now);
            consumer.receive(PeerId(1), at("10.0.0.1"), offer.into(), now);
        }
        let confirmed = Confirmed { id: first.clone(), generation: Generation(1) };
        consumer.receive(PeerId(1), at("10.0.0.1"), confirmed.into(), now);
        let ends = take(&mut consumer).into_iter().filter_map(|it| match it {
            ConsumerAction::Ended { id, outcome, side_data } => Some((id, outcome, side_data)),
            _ => None,
        });
        assert_eq!(ends.collect::<Vec<_>>(), [(first, Outcome::DONE, vec![])]);
    }
}

#[test]
fn i8_blocks_that_a_consumer_has_no_use_for_are_not_kept() {
    let now = Timestamp::from_nanos(1);
    let mut consumer = Consumer::new(Limits::default());
    let need = Need { groups: 1, blocks: 10 };
    let from = [ProducerRank { peer: PRODUCER, readers: 1, connected: true, need }];
    assert_eq!(consumer.want(&id(), &from, BUDGET, now), Ok(()));
    let held = |consumer: &Consumer| {
        let bytes = consumer.gauges().into_iter().find(|(name, _)| *name == "announced_bytes");
        let tables = consumer.table(&id(), PRODUCER).expect("under way");
        (bytes.expect("a gauge").1, tables.map(|it| it.blocks.clone()).collect::<Vec<_>>())
    };
    consumer.receive(PRODUCER, here(), announcement(&id(), 1 << 19).into(), now);
    assert_eq!(held(&consumer), (40, vec![(0..10).collect()]));
    // What follows them is no gap.
    let mut more = announcement(&id(), 5).announced;
    more.tables = vec![BlockTable::new(1 << 19, (7..12).collect()).into()];
    (more.count, more.progress) = (2, Progress::tokens((1 << 19) + 5));
    let ready = Ready { id: id(), generation: Generation(1), announced: more };
    consumer.receive(PRODUCER, here(), ready.into(), now);
    assert_eq!(held(&consumer), (40, vec![(0..10).collect()]));
    assert_eq!(consumer.state(&id(), PRODUCER), Some("reading"));
    // The producer has one group.
    let mut wrong = announcement(&id(), 1);
    wrong.generation = Generation(2);
    wrong.announced.tables = vec![BlockTable::new(0, vec![1]).into(); 2];
    consumer.receive(PRODUCER, here(), wrong.into(), now);
    assert_eq!(consumer.state(&id(), PRODUCER), Some("ending"));
}

#[test]
fn a_claim_that_fails_is_not_reported_and_a_later_fetch_starts_afresh() {
    let mut ranks = Ranks::new(1);
    ranks.claim();
    ranks.pass(ranks.limits.rendezvous);
    assert_eq!(ranks.consumed, []);
    ranks.assert_empty();
    ranks.produce();
    ranks.want();
    ranks.assert_ended(WireCode::Ok);
    // The producer was restarted between the claim and the fetch.
    let mut ranks = Ranks::new(1);
    ranks.claim();
    let from = [ProducerRank { peer: PeerId(2), readers: 1, connected: true, need: Need::ALL }];
    assert_eq!(ranks.consumers[0].want(&id(), &from, BUDGET, ranks.now), Ok(()));
    let asks = std::iter::from_fn(|| ranks.consumers[0].poll()).any(|action| {
        matches!(action, ConsumerAction::Send { to: PeerId(2), message: HandoffMessage::Ask(_) })
    });
    assert!(asks);
}

#[test]
fn an_answer_is_said_once_for_a_claim_and_once_for_the_fetch_that_continues_it() {
    let mut ranks = Ranks::new(1);
    ranks.claim();
    assert_eq!(ranks.answered, []);
    ranks.expect();
    assert_eq!(ranks.answered, [0]);
    ranks.produce();
    assert_eq!(ranks.answered, [0]);
    ranks.want();
    ranks.assert_ended(WireCode::Ok);
    assert_eq!(ranks.answered, [0, 0]);
    // An offer is an answer, too.
    let mut ranks = Ranks::new(1);
    ranks.produce();
    ranks.want();
    ranks.assert_ended(WireCode::Ok);
    assert_eq!(ranks.answered, [0]);
    // The claim is not answered.
    let mut ranks = Ranks::new(1);
    ranks.claim();
    ranks.want();
    assert_eq!(ranks.answered, []);
    ranks.offer();
    assert_eq!(ranks.answered, [0]);
    ranks.withdraw(WireCode::Shutdown, "");
    assert_eq!(ranks.answered, [0]);
}

#[test]
fn a_claim_that_is_freed_cancelled_or_closed_frees_the_producer() {
    for way in ["free", "cancel", "close"] {
        for is_offered in [true, false] {
            let mut ranks = Ranks::new(1);
            ranks.expect();
            if is_offered {
                ranks.produce();
            }
            ranks.claim();
            let (consumer, now) = (&mut ranks.consumers[0], ranks.now);
            let code = WireCode::Shutdown;
            let ended = match way {
                "free" => consumer.free(&id(), &[PRODUCER], code, "", now),
                "cancel" => consumer.cancel(&id(), code, "", now),
                _ => {
                    consumer.close(now);
                    Ok(())
                }
            };
            assert_eq!(ended, Ok(()), "{way}");
            ranks.work();
            assert_eq!(ranks.produced_codes(), [code][..usize::from(is_offered)]);
            assert_eq!(ranks.offer_again(), Err(Refusal::Ended(code)), "{way}");
            assert_eq!(ranks.consumed, [], "{way}");
            ranks.assert_empty();
        }
    }
}

#[test]
fn an_expectation_ends_with_its_request_or_at_the_cap_and_its_consumer_gets_the_reason() {
    for is_withdrawn in [true, false] {
        let mut ranks = Ranks::new(1);
        ranks.expect();
        ranks.pass(Duration::from_secs(1));
        ranks.want();
        let code = if is_withdrawn { WireCode::Cancelled } else { WireCode::Deadline };
        if is_withdrawn {
            ranks.withdraw(code, "the client left");
        } else {
            ranks.pass(ranks.limits.cap);
        }
        assert_eq!(ranks.consumed[0].1.code, code);
        assert_eq!(ranks.offer_again(), Err(Refusal::Ended(code)));
        assert_eq!(ranks.produced, [], "it was never offered");
        ranks.assert_empty();
    }
}

#[test]
fn i6_a_consumer_that_never_confirms_is_given_up_after_its_budget() {
    let mut ranks = Ranks::new(1);
    ranks.produce();
    // It sends nothing more.
    ranks.up = false;
    ranks.producer.receive(CONSUMER, here(), ask(&id()), ranks.now);
    ranks.pass(Duration::from_secs(5) + ranks.limits.grace);
    assert_eq!(ranks.produced_codes(), [WireCode::Deadline]);
}

#[test]
fn all_readers_must_confirm_and_each_gets_an_answer() {
    let mut ranks = Ranks::new(3);
    ranks.produce();
    ranks.want_at(0);
    ranks.want_at(2);
    assert_eq!(ranks.consumed, [(0, Outcome::DONE), (2, Outcome::DONE)]);
    assert_eq!(ranks.produced, []);
    ranks.want_at(1);
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn one_reader_that_fails_ends_it_for_those_that_are_still_reading() {
    let mut ranks = Ranks::new(2);
    ranks.reads_end = false;
    ranks.produce();
    ranks.want();
    ranks.cancel("left");
    ranks.end_reads();
    ranks.assert_ended(WireCode::Cancelled);
}

#[test]
fn a_second_consumer_of_the_same_name_is_refused_and_the_first_is_not_disturbed() {
    let mut ranks = Ranks::reading();
    ranks.producer.receive(PeerId(999), here(), ask(&id()), ranks.now);
    let refused = std::iter::from_fn(|| ranks.producer.poll()).any(|action| {
        matches!(action, ProducerAction::Send { to: PeerId(999), message: HandoffMessage::Stop(stop) }
            if stop.code == WireCode::Duplicate)
    });
    assert!(refused);
    // Nor can it end what is not its own.
    let (code, detail) = (WireCode::Cancelled, String::new());
    let stop = Stop { id: id(), by_consumer: true, code, detail };
    ranks.producer.receive(PeerId(999), here(), stop.into(), ranks.now);
    while ranks.producer.poll().is_some() {}
    assert_eq!(ranks.producer.state(&id()), Some("serving"));
    ranks.end_reads();
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn i1_a_name_is_good_for_one_handoff() {
    let mut ranks = Ranks::new(1);
    ranks.produce();
    ranks.want();
    let from = [ProducerRank { peer: PRODUCER, readers: 1, connected: true, need: Need::ALL }];
    let again = ranks.consumers[0].want(&id(), &from, BUDGET, ranks.now);
    assert_eq!(again, Err(Refusal::Ended(WireCode::Ok)));
    assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::Ok)));
    // Until no message of the first can be under way any more.
    ranks.pass(ranks.limits.tomb_ttl);
    ranks.produce();
    ranks.want();
    assert_eq!(ranks.produced, [Outcome::DONE, Outcome::DONE]);
}

#[test]
fn i12_a_restarted_producer_refuses_earlier_handoffs_as_unknown() {
    let mut ranks = Ranks::new(1);
    ranks.produce();
    ranks.loses = Some("confirm");
    ranks.want();
    ranks.producer = Producer::new(Limits::default());
    ranks.watched.retain(|(by, _)| *by != PRODUCER);
    ranks.reconnect();
    assert_eq!(ranks.consumed[0].1.code, WireCode::UnknownHandoff);
    ranks.assert_empty();
}

#[test]
fn i12_a_fetch_that_no_producer_has_answered_may_be_asked_again_of_the_restarted_one() {
    let restarted = PeerId(2);
    let from = [ProducerRank { peer: restarted, readers: 1, connected: true, need: Need::ALL }];
    for is_answered in [false, true] {
        let mut ranks = Ranks::new(1);
        ranks.want();
        if is_answered {
            ranks.expect();
        }
        let (code, now) = (WireCode::StaleIncarnation, ranks.now);
        ranks.consumers[0].lost(PRODUCER, code, true, now);
        ranks.up = false;
        ranks.work();
        assert_eq!(ranks.consumed_codes(), [code]);
        let gauges = ranks.consumers[0].gauges();
        let kept: Vec<_> = gauges.into_iter().filter(|(_, count)| *count > 0).collect();
        let again = ranks.consumers[0].want(&id(), &from, BUDGET, now);
        if is_answered {
            assert_eq!((kept, again), (vec![("tombstones", 1)], Err(Refusal::Ended(code))));
            continue;
        }
        assert_eq!((kept, again), (vec![], Ok(())));
        let asks = std::iter::from_fn(|| ranks.consumers[0].poll()).any(|action| {
            matches!(action, ConsumerAction::Send { to, message: HandoffMessage::Ask(_) } if to == restarted)
        });
        assert!(asks);
    }
}

#[test]
fn i8_generation_zero_is_refused_and_a_restart_of_its_producer_leaves_no_memory_counted() {
    let now = Timestamp::from_nanos(1);
    let from =
        |peer| [ProducerRank { peer: PeerId(peer), readers: 1, connected: true, need: Need::ALL }];
    let limits = Limits { announced_bytes: 32 * 1024, ..Limits::default() };
    let mut consumer = Consumer::new(limits);
    // As often as fits, and once more.
    for peer in 0..4 {
        let hostile = HandoffId::new(&format!("hostile-{peer}")).expect("short");
        assert_eq!(consumer.want(&hostile, &from(peer), BUDGET, now), Ok(()));
        let offer = Offer { generation: Generation(0), ..announcement(&hostile, 4096) };
        consumer.receive(PeerId(peer), at("10.0.0.1"), offer.into(), now);
        consumer.lost(PeerId(peer), WireCode::StaleIncarnation, true, now);
        let ended = std::iter::from_fn(|| consumer.poll()).find_map(|it| match it {
            ConsumerAction::Ended { outcome, .. } => Some(outcome.code),
            _ => None,
        });
        assert_eq!(ended, Some(WireCode::Malformed));
    }
    let held = consumer.gauges();
    assert!(held.contains(&("announced_bytes", 0)), "{held:?}");
    assert_eq!(consumer.want(&id(), &from(200), BUDGET, now), Ok(()));
    consumer.receive(PeerId(200), at("10.0.1.1"), announcement(&id(), 4096).into(), now);
    let is_read = |action| matches!(action, ConsumerAction::Read { from: PeerId(200), .. });
    assert!(std::iter::from_fn(|| consumer.poll()).any(is_read));
}

#[test]
fn i8_full_is_an_answer() {
    let mut ranks = Ranks::with(1, Limits { handoffs: 1, ..Limits::default() });
    let names = ["a", "b", "c"].map(|name| HandoffId::new(name).expect("short"));
    ranks.producer.receive(CONSUMER, here(), ask(&names[0]), ranks.now);
    // Whatever others ask for, what is here can be offered.
    assert_eq!(ranks.producer.offer(&names[1], ranks.now), Ok(()));
    let full = Err(Refusal::Full { limit: 1 });
    assert_eq!(ranks.producer.offer(&names[2], ranks.now), full);
    assert_eq!(ranks.producer.expect(&names[2], ranks.now), full);
    assert_eq!(ranks.producer.expect(&names[1], ranks.now), Err(Refusal::InUse));
    ranks.producer.receive(PeerId(5), here(), ask(&names[2]), ranks.now);
    let stop = Stop {
        id: names[2].clone(),
        by_consumer: false,
        code: WireCode::Busy,
        detail: "1 handoffs are awaited, which is the limit".to_owned(),
    };
    let busy = ProducerAction::Send { to: PeerId(5), message: stop.into() };
    assert!(std::iter::from_fn(|| ranks.producer.poll()).any(|action| action == busy));
    assert_eq!(ranks.producer.offer(&names[0], ranks.now), Ok(()), "it has its place already");
    ranks.producer.receive(PeerId(5), here(), ask(&names[2]), ranks.now);
    let busy = |action| matches!(action, ProducerAction::Send { to: PeerId(5), .. });
    assert!(!std::iter::from_fn(|| ranks.producer.poll()).any(busy));
}

fn name(number: usize) -> HandoffId {
    HandoffId::new(&format!("invented-{number}")).expect("short")
}

fn decline(id: &HandoffId) -> HandoffMessage {
    let (code, detail) = (WireCode::NotNeeded, String::new());
    Stop { id: id.clone(), by_consumer: true, code, detail }.into()
}

#[test]
fn names_that_a_peer_invents_push_out_neither_ended_handoffs_nor_what_others_have_declined() {
    const STRANGER: PeerId = PeerId(999);
    let mut ranks = Ranks::with(1, Limits { tombstones: 64, ..Limits::default() });
    ranks.produce();
    ranks.want();
    let declined = HandoffId::new("declined").expect("short");
    ranks.producer.receive(CONSUMER, here(), decline(&declined), ranks.now);
    for number in 0..1000 {
        // Declined without a question, and after one.
        if number % 2 == 0 {
            ranks.producer.receive(STRANGER, here(), ask(&name(number)), ranks.now);
        }
        ranks.producer.receive(STRANGER, here(), decline(&name(number)), ranks.now);
    }
    while ranks.producer.poll().is_some() {}
    assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::Ok)));
    let not_needed = Err(Refusal::Ended(WireCode::NotNeeded));
    assert_eq!(ranks.producer.offer(&declined, ranks.now), not_needed);
    assert_eq!(ranks.producer.offer(&name(999), ranks.now), not_needed, "its last one");
    assert_eq!(ranks.producer.offer(&name(0), ranks.now), Ok(()), "its first one is forgotten");
    // Nor do many incarnations of one peer.
    for incarnation in 0..1000 {
        ranks.producer.receive(
            PeerId(1000 + incarnation),
            here(),
            decline(&name(2000 + incarnation as usize)),
            ranks.now,
        );
    }
    while ranks.producer.poll().is_some() {}
    assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::Ok)));
    let gauges = ranks.producer.gauges();
    let tombstones = gauges.iter().find(|(name, _)| *name == "tombstones").expect("a gauge").1;
    assert!(tombstones <= 2 * 64, "{tombstones}");
    ranks.pass(ranks.limits.tomb_ttl);
    assert_eq!(ranks.producer.offer(&declined, ranks.now), Ok(()));
}

#[test]
fn one_host_that_asks_for_handoffs_nobody_offers_leaves_room_for_the_questions_of_others() {
    let limits = Limits { handoffs: 8, ..Limits::default() };
    let (mut producer, now) = (Producer::new(limits), Timestamp::default());
    /// The peers that were told that there is no room.
    fn asks(producer: &mut Producer, from: u64, host: &str, number: usize) -> Vec<u64> {
        producer.receive(PeerId(from), at(host), ask(&name(number)), Timestamp::default());
        let refused = |action| match action {
            ProducerAction::Send { to, message: HandoffMessage::Stop(stop) }
                if stop.code == WireCode::Busy =>
            {
                Some(to.0)
            }
            _ => None,
        };
        std::iter::from_fn(|| producer.poll()).filter_map(refused).collect()
    }
    // Each question in a session of its own: the host gets all that no other asks for.
    for number in 0..100 {
        let refused = asks(&mut producer, number, "10.0.0.1", number as usize);
        assert_eq!(refused, if number < 8 { vec![] } else { vec![number] });
    }
    // A host of another network gets half of it.
    for number in 100..200 {
        let refused = asks(&mut producer, 500, "10.0.1.1", number as usize);
        assert_eq!(refused.contains(&500), number >= 104, "{number}");
        assert_eq!(refused.len(), 1);
    }
    // What is offered, or was given up, is not counted any more.
    for number in 100..104 {
        producer.offer(&name(number), now).expect("it is awaited");
    }
    let refused = (200..300).flat_map(|number| asks(&mut producer, 600, "10.0.0.1", number));
    assert_eq!(refused.count(), 96);
    producer.expire(now + Duration::from_secs(30));
    while producer.poll().is_some() {}
    let refused = (300..400).flat_map(|number| asks(&mut producer, 1, "10.0.0.1", number));
    assert_eq!(refused.count(), 92);
    let awaited = producer.gauges().into_iter().find(|(name, _)| *name == "awaited");
    assert_eq!(awaited, Some(("awaited", 8)));
}

#[test]
fn lives_of_one_host_that_decline_a_name_each_push_out_no_name_of_another_host() {
    let limits = Limits { tombstones: 64, ..Limits::default() };
    let (mut producer, now) = (Producer::new(limits), Timestamp::default());
    producer.receive(CONSUMER, at("10.0.1.1"), decline(&name(0)), now);
    for number in 1..1000 {
        let stranger = PeerId(1000 + number as u64);
        producer.receive(stranger, at("10.0.0.1"), decline(&name(number)), now);
    }
    while producer.poll().is_some() {}
    assert_eq!(producer.offer(&name(0), now), Err(Refusal::Ended(WireCode::NotNeeded)));
}

#[test]
fn i1_what_goes_on_after_it_was_complete_is_a_failure_and_nothing_is_read_after_the_end() {
    let mut ranks = Ranks::new(1);
    ranks.want();
    let announced = |count, tokens, last| Announced {
        count,
        tables: vec![BlockTable::new(0, vec![1, 2, 3, 4]).into()],
        progress: Progress::tokens(tokens),
        last,
        side_data: None,
    };
    let generation = Generation(7);
    let offer = Offer { id: id(), generation, announced: announced(1, 8, true) };
    ranks.consumers[0].receive(PRODUCER, here(), offer.into(), ranks.now);
    let more = Ready { id: id(), generation, announced: announced(2, 16, false) };
    ranks.consumers[0].receive(PRODUCER, here(), more.into(), ranks.now);
    ranks.work();
    assert_eq!(ranks.consumed.len(), 1);
    assert_eq!(ranks.consumed[0].1.code, WireCode::Malformed);
}

#[test]
fn the_messages_of_8k_tokens_in_random_blocks_fit_into_4_kib() {
    let mut ranks = Ranks::new(1);
    ranks.want();
    ranks.offer();
    let mut state = 1_u64;
    let mut block = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u32 % 60_000
    };
    for chunk in 0..4 {
        let table = BlockTable::new(chunk * 128, (0..128).map(|_| block()).collect());
        let progress = Progress::tokens((chunk + 1) * 2048);
        assert_eq!(ranks.producer.advance(&id(), vec![table], progress), Ok(()));
        ranks.work();
    }
    ranks.complete(8192);
    ranks.assert_ended(WireCode::Ok);
    assert!(ranks.bytes <= 4096, "{}", ranks.bytes);
}

#[test]
fn an_announcement_that_changes_a_block_is_refused() {
    let mut ranks = Ranks::new(1);
    ranks.want();
    ranks.offer();
    ranks.advance(0, 2, Progress::tokens(2));
    let offer = Offer {
        id: id(),
        generation: Generation(1),
        announced: Announced {
            count: 2,
            tables: vec![BlockTable::new(0, vec![1, 2]).into()],
            progress: Progress::tokens(2),
            ..Default::default()
        },
    };
    ranks.consumers[0].receive(PRODUCER, here(), offer.into(), ranks.now);
    ranks.work();
    ranks.assert_ended(WireCode::Malformed);
    let detail = &ranks.consumed[0].1.detail;
    assert_eq!(detail, "block 0 was announced as number 50, and now as 1");
}
