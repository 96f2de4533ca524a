//! A handoff from its first message to its last, with resets and reads that fail.

use super::*;

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
        let freed =
            ranks.consumers[0].free(&id(), &[(PRODUCER, None)], WireCode::NotNeeded, "", ranks.now);
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
