//! Deadlines, silence and peers that are gone.

use super::*;

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
