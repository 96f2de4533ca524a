//! Bounds of blocks that are held, and of loads that wait.

use super::*;

#[test]
fn the_oldest_offers_are_given_up_when_too_many_blocks_are_held() {
    let mut it = limited(&[FULL]);
    assert!(produce(&mut it, "a", [1, 2, 3]).reclaims.is_empty());
    // Requests share the blocks of a common prefix.
    assert!(produce(&mut it, "b", [1, 2, 4]).reclaims.is_empty());
    assert!(produce(&mut it, "c", [1, 2, 5]).reclaims.is_empty());
    assert_eq!(gauge(&it, "held_blocks"), 5);
    assert!(produce(&mut it, "d", [6, 7, 8]).reclaims.is_empty());
    // 9 blocks without those of one of the oldest.
    assert_eq!(produce(&mut it, "e", [9, 10, 11]).reclaims, ["a", "b", "c"]);
    assert_eq!(gauge(&it, "held_blocks"), 11, "a consumer may have asked for them");
    it.sent(["a", "b"]);
    assert_eq!(gauge(&it, "held_blocks"), 9);
    // Each is given up once.
    assert_eq!(produce(&mut it, "f", [12, 13, 14]).reclaims, ["d"]);
    it.sent(["c", "d", "e", "f"]);
    assert_idle(&it);
}

#[test]
fn a_request_with_more_blocks_than_may_be_held_is_held_until_the_next_one_ends() {
    let idle = Some(IdleLimit { pool_blocks: 100, idle_blocks: 2 });
    let mut it = Scheduler::new(SchedulerConfig { idle, ..config(&[FULL], true) }, ENGINE);
    assert!(produce(&mut it, "a", [1, 2, 3]).reclaims.is_empty());
    assert_eq!(produce(&mut it, "b", [4, 5, 6]).reclaims, ["a"]);
    it.sent(["a", "b"]);
    assert_idle(&it);
}

#[test]
fn an_offer_that_no_consumer_asked_for_is_counted_once_when_it_ends() {
    let mut it = limited(&[FULL]);
    for (id, code, counted) in [
        ("a", WireCode::Expired, Some("expired")),
        ("b", WireCode::Silent, Some("silent")),
        ("c", WireCode::NotNeeded, None),
        ("d", WireCode::Cancelled, None),
    ] {
        produce(&mut it, id, [1, 2, 3]);
        for rank in 0..RANKS {
            it.reported(rank, &lost(id, code).encode());
        }
        it.sent([id]);
        let withdrawn = it.take_stats().withdrawn;
        let expected = counted.map(|name| (name.to_owned(), 1));
        assert_eq!(withdrawn.into_iter().collect::<Vec<_>>(), Vec::from_iter(expected));
    }
    assert_idle(&it);
}

#[test]
fn loads_wait_without_blocks_while_too_many_blocks_wait_for_producers_that_have_not_answered() {
    let mut it = limited(&[FULL]);
    let all = Match::Tokens(8);
    // A quarter is for producers that have never answered.
    load(&mut it, "a", "10.0.0.9", all);
    assert_eq!(gauge(&it, "waiting_loads"), 1);
    load(&mut it, "b", "10.0.0.8", Match::Unknown);
    it.reported(1, &answered("a"));
    it.reported(0, &answered("a"));
    assert_eq!(gauge(&it, "waiting_loads"), 0);
    // All of it is for the others.
    for id in ["c", "d", "e", "f"] {
        load(&mut it, id, "10.0.0.9", all);
    }
    load(&mut it, "g", "10.0.0.9", Match::Unknown);
    load(&mut it, "b", "10.0.0.8", Match::Unknown);
    assert_eq!((gauge(&it, "waiting_loads"), gauge(&it, "deferred")), (4, 2));
    // A load that ends makes room.
    it.received(["c"]);
    load(&mut it, "g", "10.0.0.9", all);
    load(&mut it, "b", "10.0.0.8", Match::Unknown);
    it.received(["a", "d", "e", "f", "g"]);
    load(&mut it, "b", "10.0.0.8", all);
    it.received(["b"]);
    for id in ["a", "b", "c", "d", "e", "f", "g"] {
        it.end_request(&request(id, 8, &consumes(id)), FinishReason::Length, None, None);
    }
    empty_step(&mut it);
    assert_idle(&it);
}

#[test]
fn invented_producers_leave_room_for_loads_from_producers_that_have_answered() {
    let mut it = limited(&[FULL]);
    load(&mut it, "a", "10.0.0.9", Match::Tokens(8));
    it.reported(0, &fetched("a", WireCode::Ok).encode());
    load(&mut it, "b", "10.0.0.1", Match::Tokens(8));
    for n in 2..9 {
        load(&mut it, &format!("invented {n}"), &format!("10.0.0.{n}"), Match::Unknown);
    }
    load(&mut it, "c", "10.0.0.9", Match::Tokens(8));
}

#[test]
fn a_request_whose_producer_has_answered_its_claim_needs_no_room_beside_made_up_ones() {
    let mut it = limited(&[FULL]);
    load(&mut it, "invented", "10.0.0.1", Match::Tokens(8));
    for n in 0..40 {
        load(&mut it, &format!("w{n}"), "10.0.0.1", Match::Unknown);
    }
    load(&mut it, "real", "10.0.0.9", Match::Unknown);
    it.reported(0, &answered("real"));
    load(&mut it, "real", "10.0.0.9", Match::Tokens(8));
    assert_eq!(gauge(&it, "waiting_loads"), 1);
}

#[test]
fn of_more_requests_than_may_wait_for_room_the_longest_waiting_are_refused_counted_and_freed() {
    let mut it = limited(&[FULL]);
    load(&mut it, "a", "10.0.0.9", Match::Tokens(8));
    let ids: Vec<_> = (0..33).map(|n| format!("w{n}")).collect();
    let ask = |it: &mut Scheduler, id: &str| it.match_request(&request(id, 8, &consumes(id)), 0);
    for id in &ids[..32] {
        it.arrived(&request(id, 8, &consumes(id)));
        assert!((0..100).all(|_| ask(&mut it, id) == Match::Unknown), "there is a place for it");
    }
    let late = &ids[32];
    it.arrived(&request(late, 8, &consumes(late)));
    assert!((0..7).all(|_| ask(&mut it, late) == Match::Unknown), "its claim may be answered soon");
    assert_eq!(gauge(&it, "deferred"), 33);

    // The engine's next step: it asks in the order of arrival.
    assert_eq!(ask(&mut it, "w0"), Match::NONE);
    assert!(ids[1..].iter().all(|id| ask(&mut it, id) == Match::Unknown));
    assert_eq!(gauge(&it, "deferred"), 32);
    assert_eq!(it.refusals(), [(Refused::Busy, 1)]);
    assert_eq!(it.take_stats().refused, [("busy".to_owned(), 1)].into());
    assert_eq!(freed(&empty_step(&mut it)), [("w0", WireCode::Busy)]);
    // Room does not bring it back: the engine computes it.
    it.received(["a"]);
    assert_eq!(ask(&mut it, "w0"), Match::NONE);
    assert_eq!(ask(&mut it, "w1"), Match::Tokens(8));
    for id in ids.iter().map(String::as_str).chain(["a"]) {
        it.end_request(&request(id, 8, &consumes(id)), FinishReason::Abort, None, None);
    }
    empty_step(&mut it);
    assert_idle(&it);
}
