//! Engines that meet, and what each side may not know yet.

use super::*;

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

/// The peers that a producer answers next, one for each message that it works out.
fn answered(producer: &mut EngineHandshakes) -> Option<PeerId> {
    let examination = producer.examine()?;
    producer.accept(examination.run());
    match producer.poll() {
        Some(EngineHandshakeAction::Send { to, .. }) => Some(to),
        other => panic!("{other:?}"),
    }
}

#[test]
fn i8_a_question_waits_for_one_of_each_network_host_and_peer_however_many_others_ask() {
    let mut producer = EngineHandshakes::new(RECONNECT, SILENCE);
    for peer in 0..200 {
        producer.arrived(PeerId(peer), at("10.0.0.1"), question().into());
    }
    producer.arrived(PeerId(200), at("10.0.0.2"), question().into());
    producer.arrived(PeerId(201), at("10.0.1.1"), question().into());
    producer.set_own(own_engine(THEIRS, 0, topology(1, 4), SMALL));
    let first: Vec<_> = (0..4).filter_map(|_| answered(&mut producer)).collect();
    assert_eq!(first, [0, 201, 200, 1].map(PeerId));
    // Who asks again has no other turn.
    producer.arrived(PeerId(2), at("10.0.0.1"), question().into());
    assert_eq!(answered(&mut producer), Some(PeerId(2)));
    producer.arrived(PeerId(2), at("10.0.0.1"), question().into());
    let rest: Vec<_> = std::iter::from_fn(|| answered(&mut producer)).collect();
    assert_eq!(rest, (3..200).chain([2]).map(PeerId).collect::<Vec<_>>());
}

/// A consumer rank that reads from all ranks of an engine with so many.
fn reader_of(ranks: u32) -> EngineHandshakes {
    let mut machine = EngineHandshakes::new(RECONNECT, SILENCE);
    machine.know(consumer(ranks));
    machine
}

/// The tickets that have ended, with their codes.
fn ended(machine: &mut EngineHandshakes) -> Vec<(u64, WireCode)> {
    let of = |action| match action {
        EngineHandshakeAction::Met { ticket, result } => {
            Some((ticket, result.map_or_else(|failure| failure.code, |_| WireCode::Ok)))
        }
        _ => None,
    };
    std::iter::from_fn(|| machine.poll()).filter_map(of).collect()
}

#[test]
fn i8_an_engine_whose_cards_are_too_long_is_refused() {
    let mut machine = reader_of(32);
    machine.meet(1, PRODUCER, true, BUDGET, Timestamp::default());
    // All but the last of 32 are half as long as a message.
    let engine = own_engine(THEIRS, 0, topology(32, 32), BODY_MAX / 2 + 1024);
    for rank in 0..31 {
        machine.receive(PRODUCER, here(), introduced(&engine, rank..rank + 1).into());
        assert_eq!(ended(&mut machine), []);
    }
    machine.receive(PRODUCER, here(), introduced(&engine, 31..32).into());
    assert_eq!(ended(&mut machine), [(1, WireCode::TooLarge)]);
    assert!(machine.gauges().iter().all(|(_, count)| *count == 0));
}

#[test]
fn i8_cards_of_engines_of_one_network_leave_those_of_another_their_room() {
    let mut machine = reader_of(32);
    let engine = own_engine(THEIRS, 0, topology(32, 32), BODY_MAX / 2);
    let now = Timestamp::default();
    let most = |machine: &mut EngineHandshakes, peer: u64, host| {
        machine.meet(peer, PeerId(peer), true, BUDGET, now);
        for rank in 0..30 {
            machine.receive(PeerId(peer), host, introduced(&engine, rank..rank + 1).into());
        }
    };
    // Each takes 15 of the 64 MiB.
    (0..4).for_each(|peer| most(&mut machine, peer, at("10.0.0.1")));
    assert_eq!(ended(&mut machine), []);
    most(&mut machine, 4, at("10.0.1.1"));
    let gone = ended(&mut machine);
    assert!(matches!(gone[..], [(0..4, WireCode::Busy)]), "{gone:?}");
    for rank in 30..32 {
        machine.receive(PeerId(4), at("10.0.1.1"), introduced(&engine, rank..rank + 1).into());
    }
    assert_eq!(ended(&mut machine), [(4, WireCode::Ok)]);
    // There is room again.
    most(&mut machine, 5, at("10.0.0.1"));
    assert_eq!(ended(&mut machine), []);
}
