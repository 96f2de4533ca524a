//! Connections that end, deadlines, and engines that restart.

use super::*;

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
