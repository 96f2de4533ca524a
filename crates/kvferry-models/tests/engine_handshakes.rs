//! What engine handshakes promise, one sentence each, in virtual time.

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

#[test]
fn engines_meet_in_one_round_trip_when_all_cards_fit() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.meet(1);
    assert_eq!(pair.watched, BTreeSet::from([PRODUCER]));
    pair.work();
    let kinds: Vec<_> = pair.arrived.iter().map(EngineHandshakeMessage::kind).collect();
    assert_eq!(kinds, ["introduce", "introduced"]);
    let pairing = pair.pairing();
    assert_eq!(pairing.engine, EngineId(THEIRS));
    assert_eq!(pairing.addresses, producer(4, SMALL).addresses);
    assert_eq!(pairing.cards, cards(THEIRS, 0..4, SMALL));
    assert_eq!(pairing.routing.sources_of(0), [0, 1, 2, 3]);
}

#[test]
fn cards_that_do_not_fit_one_answer_are_asked_for_until_all_are_there() {
    let big: [&[u32]; 4] = [&[], &[2, 3, 4, 5, 6, 7], &[4, 5, 6, 7], &[6, 7]];
    let one_at_a_time: [&[u32]; 4] = [&[], &[1, 2, 3], &[2, 3], &[3]];
    for (ranks, len, asked) in [(8, BIG, big), (4, BODY_MAX / 2 + 1, one_at_a_time)] {
        let mut pair = Pair::knowing(ranks, len);
        pair.meet(1);
        pair.work();
        assert_eq!(pair.asked(), asked);
        assert_eq!(pair.pairing().cards, cards(THEIRS, 0..ranks as usize, len));
    }
}

#[test]
fn the_cards_that_fit_first_may_all_be_of_ranks_that_the_reader_does_not_deal_with() {
    let mut pair = Pair::new();
    pair.consumer.know(own_engine(OURS, 7, topology(8, 8), SMALL));
    pair.producer.know(producer(8, BIG));
    pair.meet(1);
    pair.work();
    assert_eq!(pair.asked(), [vec![], vec![7]]);
    assert_eq!(pair.pairing().cards, cards(THEIRS, [7], BIG), "and of no others");
}

#[test]
fn a_consumer_that_gets_the_same_answer_twice_waits_for_the_missing_cards() {
    let mut pair = Pair::knowing(4, BIG);
    pair.meet(1);
    pair.reconnect();
    pair.work();
    assert_eq!(pair.asked(), [vec![], vec![], vec![2, 3]], "nothing is asked for again");
    assert_eq!(pair.pairing().cards, cards(THEIRS, 0..4, BIG));
}

#[test]
fn a_producer_that_does_not_know_its_own_engine_yet_answers_when_it_does() {
    let mut pair = Pair::new();
    pair.consumer.know(consumer(4));
    pair.meet(1);
    pair.work();
    assert_eq!(pair.producer.gauges()[1], ("engine_handshakes", 1));
    assert_eq!(pair.arrived.len(), 1, "no answer yet");
    pair.producer.know(producer(4, SMALL));
    pair.work();
    assert_eq!(pair.pairing().cards, cards(THEIRS, 0..4, SMALL));
}

#[test]
fn who_waits_for_a_producer_is_forgotten_with_its_connection() {
    let mut pair = Pair::new();
    pair.consumer.know(consumer(4));
    pair.meet(1);
    pair.work();
    pair.cut(WireCode::Closed, false);
    assert_eq!(pair.producer.gauges()[1], ("engine_handshakes", 0));
    pair.producer.know(producer(4, SMALL));
    pair.reconnect();
    pair.work();
    assert_eq!(pair.arrived.len(), 3, "asked again, and answered once");
    assert!(pair.pairing().cards.len() == 4);
}

fn question() -> Introduce {
    Introduce { topology: topology(1, 4).encode(), model: Model::default(), ranks: Vec::new() }
}

/// The peers that a producer turns because it is busy.
fn busy(producer: &mut EngineHandshakes) -> Vec<PeerId> {
    let of = |action| match action {
        EngineHandshakeAction::Send { to, message: EngineHandshakeMessage::Turned(turned) } => {
            (turned.code == WireCode::Busy).then_some(to)
        }
        _ => None,
    };
    std::iter::from_fn(|| producer.poll()).filter_map(of).collect()
}

fn at(host: &str) -> Origin {
    Origin::from(host.parse::<IpAddr>().expect("an address"))
}

#[test]
fn i8_many_sessions_of_one_host_leave_questions_of_others_their_room() {
    let mut producer = EngineHandshakes::new(RECONNECT, SILENCE);
    let (host, other) = (at("10.0.0.1"), at("10.0.1.1"));
    let many = 16 * RANKS_MAX as u64;
    (0..many).for_each(|peer| producer.arrived(PeerId(peer), host, question().into()));
    let all = producer.gauges()[1].1;
    assert_eq!(busy(&mut producer).len(), many as usize - all);
    for peer in many..many + RANKS_MAX as u64 {
        producer.arrived(PeerId(peer), other, question().into());
    }
    let turned = busy(&mut producer);
    assert!(turned.len() == RANKS_MAX && turned.iter().all(|peer| peer.0 < many), "{turned:?}");
    // One that is repeated counts once.
    (0..many).for_each(|_| producer.arrived(PeerId(many), other, question().into()));
    assert_eq!((busy(&mut producer).len(), producer.gauges()[1].1), (0, all));
    // So does one long question.
    let long = Introduce { topology: vec![0; BODY_MAX / 2], ..question() };
    for peer in 2 * many..3 * many {
        producer.arrived(PeerId(peer), at("10.0.2.1"), long.clone().into());
    }
    let turned = busy(&mut producer);
    assert!(turned.iter().all(|peer| peer.0 < many || peer.0 >= 2 * many), "{turned:?}");
    producer.know(own_engine(THEIRS, 0, topology(1, 4), SMALL));
    assert_eq!(producer.gauges()[1].1, 0);
}

#[test]
fn i8_answers_that_no_handshake_waits_for_take_no_room() {
    let mut consumer = EngineHandshakes::new(RECONNECT, SILENCE);
    consumer.know(own_engine(OURS, 0, topology(1, 4), SMALL));
    let answer = introduced(&producer(4, SMALL), 0..4);
    consumer.arrived(PRODUCER, here(), answer.clone().into());
    assert_eq!((consumer.has_work(), consumer.gauges()[1].1), (false, 0));
    consumer.meet(1, PRODUCER, true, BUDGET, Timestamp::default());
    consumer.arrived(PRODUCER, here(), answer.into());
    assert!(consumer.has_work());
}

#[test]
fn i8_no_more_wait_for_a_producer_than_an_engine_has_ranks_a_few_times() {
    let mut producer = EngineHandshakes::new(RECONNECT, SILENCE);
    let many = 16 * RANKS_MAX as u64;
    for peer in 0..many {
        producer.receive(PeerId(peer), here(), question().into());
    }
    let (_, waiting) = producer.gauges()[1];
    assert!((RANKS_MAX..many as usize).contains(&waiting), "{waiting}");
    // The others hear it at once.
    assert_eq!(busy(&mut producer).len(), many as usize - waiting);
    producer.know(own_engine(THEIRS, 0, topology(1, 4), SMALL));
    let answers = std::iter::from_fn(|| producer.poll()).count();
    assert_eq!((answers, producer.gauges()[1].1), (waiting, 0));
}

#[test]
fn a_consumer_that_does_not_know_its_own_engine_yet_asks_when_it_does() {
    let mut pair = Pair::new();
    pair.producer.know(producer(4, SMALL));
    pair.meet(1);
    pair.reconnect();
    pair.work();
    assert!(pair.arrived.is_empty(), "there is nothing to say yet");
    pair.consumer.know(consumer(4));
    pair.work();
    assert_eq!(pair.asked().len(), 1);
    assert_eq!(pair.pairing().cards.len(), 4);
}

#[test]
fn who_becomes_another_engine_while_it_meets_one_starts_over() {
    let mut pair = Pair::new();
    pair.consumer.know(own_engine(OURS, 3, topology(4, 8), SMALL));
    pair.producer.know(producer(8, BIG));
    pair.meet(1);
    pair.step();
    pair.step();
    assert!(pair.met.is_empty());
    pair.consumer.know(own_engine(LATER, 0, topology(2, 8), SMALL));
    pair.work();
    let pairing = pair.pairing();
    assert_eq!(pairing.routing.sources_of(0), [0, 1, 2, 3]);
    assert_eq!(pairing.cards, cards(THEIRS, 0..4, BIG));
}

#[test]
fn i1_several_tickets_for_one_peer_share_a_handshake_and_each_ends_once() {
    let mut pair = Pair::knowing(4, SMALL);
    (1..4).for_each(|ticket| pair.meet(ticket));
    assert_eq!(pair.consumer.gauges()[0], ("meetings", 1));
    pair.work();
    assert_eq!(pair.asked().len(), 1);
    assert_eq!(pair.ended(), [1, 2, 3]);
    assert!(pair.met.iter().all(|(_, result)| result.is_ok()));
    pair.assert_empty();
    pair.meet(4);
    pair.work();
    assert_eq!(pair.asked().len(), 2, "another meeting is another engine_handshake");
    assert_eq!(pair.ended(), [1, 2, 3, 4]);
    pair.assert_empty();
}

#[test]
fn a_mismatch_is_refused_with_both_numbers_and_all_addresses_whichever_side_finds_it() {
    for producer_finds_it in [true, false] {
        let mut pair = Pair::new();
        pair.consumer.know(own_engine(OURS, 0, topology(1, 32), SMALL));
        pair.meet(1);
        if producer_finds_it {
            pair.producer.know(producer(8, SMALL));
            pair.work();
            assert_eq!(pair.refused.len(), 1);
        } else {
            pair.hear(introduced(&producer(8, SMALL), 0..8));
        }
        let failure = pair.failure();
        assert_eq!(failure.code, WireCode::LayoutMismatch);
        for detail in pair.refused.iter().chain([&failure.detail]) {
            assert!(detail.contains("32") && detail.contains('8'), "{detail}");
        }
        assert_eq!(failure.addresses, producer(8, SMALL).addresses);
    }
}

#[test]
fn engines_of_two_models_refuse_each_other_with_both_values_whichever_side_finds_it() {
    for producer_finds_it in [true, false] {
        let mut pair = Pair::new();
        pair.consumer.know(OwnEngine { model: model("llama"), ..consumer(4) });
        pair.meet(1);
        let theirs = OwnEngine { model: model("mistral"), ..producer(4, SMALL) };
        if producer_finds_it {
            pair.producer.know(theirs.clone());
            pair.work();
            assert_eq!(pair.refused.len(), 1);
        } else {
            pair.hear(introduced(&theirs, 0..4));
        }
        let failure = pair.failure();
        assert_eq!(failure.code, WireCode::ModelMismatch);
        for detail in pair.refused.iter().chain([&failure.detail]) {
            assert!(detail.contains("mistral") && detail.contains("llama"), "{detail}");
        }
        assert_eq!(failure.addresses, theirs.addresses);
    }
}

#[test]
fn properties_of_a_model_that_one_engine_does_not_give_are_not_compared() {
    let mut more = model("llama");
    more.0.insert("revision".to_owned(), "7".to_owned());
    for (theirs, ours) in [(model("llama"), more.clone()), (more, Model::default())] {
        let mut pair = Pair::new();
        pair.consumer.know(OwnEngine { model: ours, ..consumer(4) });
        pair.producer.know(OwnEngine { model: theirs, ..producer(4, SMALL) });
        pair.meet(1);
        pair.work();
        assert_eq!(pair.pairing().cards.len(), 4);
    }
}

#[test]
fn a_topology_that_is_none_is_refused() {
    let mut pair = Pair::knowing(4, SMALL);
    let (model, ranks) = (Model::default(), Vec::new());
    let nonsense = Introduce { topology: b"nonsense".to_vec(), model, ranks };
    pair.deliver(true, nonsense.into());
    assert_eq!(pair.refused.len(), 1);
    let [(false, EngineHandshakeMessage::Turned(turned))] = pair.wire.make_contiguous() else {
        panic!("{:?}", pair.wire)
    };
    assert_eq!(turned.code, WireCode::LayoutMismatch);
    pair.assert_empty();
}

#[test]
fn a_refusal_with_the_code_for_success_is_malformed() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.meet(1);
    pair.hear(Turned { code: WireCode::Ok, detail: String::new(), addresses: Vec::new() });
    assert_eq!(pair.failure().code, WireCode::Malformed);
}

#[test]
fn who_has_not_asked_yet_is_not_turned_away() {
    let mut pair = Pair::new();
    pair.producer.know(producer(4, SMALL));
    pair.meet(1);
    let (code, detail) = (WireCode::LayoutMismatch, "of another day".to_owned());
    pair.hear(Turned { code, detail, addresses: Vec::new() });
    pair.consumer.know(consumer(4));
    pair.work();
    assert_eq!(pair.pairing().cards.len(), 4);
}

#[test]
fn a_reset_within_the_window_is_survived_and_what_is_known_stays_known() {
    let mut pair = Pair::halfway(8);
    pair.cut(WireCode::Closed, false);
    pair.pass(RECONNECT - NANO);
    assert!(pair.met.is_empty());
    pair.reconnect();
    pair.pass(RECONNECT);
    pair.work();
    assert_eq!(pair.asked()[1], [2, 3, 4, 5, 6, 7]);
    assert_eq!(pair.pairing().cards, cards(THEIRS, 0..8, BIG));
}

#[test]
fn a_reset_beyond_the_window_or_a_deadline_is_a_failure_with_the_addresses_that_are_known() {
    for (code, limit) in [(WireCode::Silent, RECONNECT), (WireCode::Deadline, BUDGET)] {
        let mut pair = Pair::halfway(8);
        let is_reset = code == WireCode::Silent;
        if is_reset {
            pair.cut(code, false);
        }
        assert_eq!(pair.consumer.next_timeout(), Some(pair.now + limit));
        pair.pass(limit - NANO);
        assert!(pair.met.is_empty());
        if is_reset {
            pair.cut(code, false);
        }
        pair.pass(NANO);
        let failure = pair.failure();
        assert_eq!(failure.code, code);
        assert_eq!(failure.addresses, producer(8, BIG).addresses);
    }
}

#[test]
fn a_peer_that_is_gone_fails_all_its_tickets_at_once() {
    for was_reset in [false, true] {
        let mut pair = Pair::knowing(4, SMALL);
        pair.meet(1);
        pair.meet(2);
        if was_reset {
            pair.cut(WireCode::Closed, false);
        }
        pair.cut(WireCode::StaleIncarnation, true);
        assert_eq!(pair.ended(), [1, 2]);
        for (_, result) in &pair.met {
            let code = result.as_ref().map_err(|e| e.code).err();
            assert_eq!(code, Some(WireCode::StaleIncarnation));
        }
        pair.assert_empty();
    }
}

#[test]
fn a_handshake_that_began_just_before_its_session_was_found_silent_waits_for_another_session() {
    let moment = Duration::from_millis(1);
    for comes_back in [true, false] {
        let mut pair = Pair::knowing(4, SMALL);
        pair.meet(1);
        pair.pass(moment);
        pair.cut(WireCode::Silent, true);
        pair.pass(SILENCE - 2 * moment);
        assert!(pair.met.is_empty());
        if comes_back {
            pair.reconnect();
            pair.work();
            assert_eq!(pair.pairing().cards.len(), 4);
        } else {
            pair.pass(moment);
            assert_eq!(pair.ended(), [1]);
        }
    }
}

#[test]
fn a_peer_that_was_never_there_is_not_asked_before_it_is() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.up = false;
    pair.meet(1);
    assert_eq!(pair.watched.len(), 1);
    pair.up = true;
    pair.work();
    assert!(pair.arrived.is_empty());
    pair.reconnect();
    pair.work();
    assert_eq!(pair.pairing().cards.len(), 4);
}

#[test]
fn i6_a_deadline_ends_its_own_ticket_to_the_nanosecond_and_no_other() {
    let mut pair = Pair::new();
    pair.consumer.know(consumer(4));
    pair.meet_within(1, BUDGET);
    pair.meet_within(2, Duration::from_secs(2));
    pair.work();
    assert_eq!(pair.consumer.next_timeout(), Some(pair.now + Duration::from_secs(2)));
    pair.pass(Duration::from_secs(2) - NANO);
    assert!(pair.met.is_empty());
    pair.pass(NANO);
    assert!(matches!(&pair.met[..], [(2, Err(e))] if e.code == WireCode::Deadline));
    assert_eq!(pair.watched.len(), 1, "the other goes on");
    assert_eq!(pair.consumer.next_timeout(), Some(pair.now + BUDGET - Duration::from_secs(2)));
    pair.producer.know(producer(4, SMALL));
    pair.work();
    assert_eq!(pair.ended(), [2, 1]);
    assert!(pair.met[1].1.is_ok());
    pair.assert_empty();
}

#[test]
fn i6_a_failure_by_deadline_names_what_was_missing() {
    let waits =
        [(false, true, "its own engine"), (true, true, "did not answer"), (true, false, "reached")];
    for (knows, up, why) in waits {
        let mut pair = Pair::new();
        pair.up = up;
        if knows {
            pair.consumer.know(consumer(4));
        }
        pair.meet(1);
        pair.pass(BUDGET);
        let failure = pair.failure();
        assert_eq!(failure.code, WireCode::Deadline);
        assert!(failure.detail.contains(why), "{failure:?}");
    }
}

#[test]
fn i12_an_answer_of_another_engine_incarnation_in_the_middle_starts_over() {
    let mut pair = Pair::halfway(4);
    pair.producer.know(own_engine(LATER, 0, topology(4, 4), BIG));
    pair.work();
    assert_eq!(pair.asked(), [vec![], vec![2, 3], vec![0, 1]]);
    let pairing = pair.pairing();
    assert_eq!(pairing.engine, EngineId(LATER));
    assert_eq!(pairing.addresses, own_engine(LATER, 0, topology(4, 4), BIG).addresses);
    assert_eq!(pairing.cards, cards(LATER, 0..4, BIG), "none of the incarnation before");
}

#[test]
fn a_producer_that_does_not_show_all_of_its_ranks_is_an_error_and_no_loop() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.producer.know(OwnEngine { cards: Vec::new(), ..producer(4, SMALL) });
    pair.meet(1);
    pair.work();
    let failure = pair.failure();
    assert_eq!(failure.code, WireCode::Malformed);
    assert_eq!(failure.addresses, producer(4, SMALL).addresses);
}

#[test]
fn a_producer_that_shows_ever_the_same_of_its_ranks_is_not_asked_for_ever() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.meet(1);
    for _ in 0..20 {
        pair.hear(introduced(&producer(4, SMALL), 0..2));
    }
    assert_eq!(pair.wire.len(), 2, "the first question, and the one for the rest");
    pair.wire.clear();
    pair.pass(BUDGET);
    assert!(!pair.failure().code.is_ok());
}

#[test]
fn as_many_addresses_as_ranks_or_it_is_an_error() {
    for addresses in [0, 3, 5] {
        let mut pair = Pair::knowing(4, SMALL);
        let wrong = vec!["host:1".to_owned(); addresses];
        pair.producer.know(OwnEngine { addresses: wrong, ..producer(4, SMALL) });
        pair.meet(1);
        pair.work();
        let failure = pair.failure();
        assert!(!failure.code.is_ok());
        let said = format!("4 ranks, and {addresses} addresses");
        assert!(failure.detail.contains(&said), "{failure:?}");
    }
}

#[test]
fn i12_a_meeting_that_moves_to_another_incarnation_is_kept_and_starts_over_there() {
    let mut pair = Pair::halfway(4);
    pair.wire.clear();
    let later = PeerId(2);
    pair.producer.know(own_engine(LATER, 0, topology(4, 4), BIG));
    pair.consumer.moved(PRODUCER, later);
    // A watch moves with the place at which both are met.
    assert!(pair.watched.remove(&PRODUCER) && pair.watched.insert(later));
    pair.producer_id = later;
    // What the incarnation before said late is nothing to the meeting.
    pair.consumer.receive(PRODUCER, here(), introduced(&producer(4, BIG), 2..4).into());
    pair.reconnect();
    pair.work();
    assert_eq!(pair.asked(), [vec![], vec![], vec![2, 3]]);
    assert_eq!(pair.pairing().cards, cards(LATER, 0..4, BIG));
}

#[test]
fn i12_a_meeting_that_moves_keeps_its_deadline() {
    let mut pair = Pair::knowing(4, SMALL);
    pair.up = false;
    pair.meet(1);
    pair.consumer.moved(PRODUCER, PeerId(2));
    pair.watched = BTreeSet::from([PeerId(2)]);
    pair.pass(BUDGET - NANO);
    assert!(pair.met.is_empty());
    pair.pass(NANO);
    assert_eq!(pair.failure().code, WireCode::Deadline);
}
