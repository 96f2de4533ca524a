//! Offers, claims and expectations, and what ends them.

use super::*;

#[test]
fn a_claimed_offer_waits_for_its_consumer_and_others_expire() {
    let _bounded = bounded();
    for tp in [1, 2] {
        let p = Engine::new(Build { limits: short_offers, ..Build::new(1, 2) }, "tcp", b"");
        let d = Engine::new(Build::new(2, tp), "tcp", b"");
        let (there, here) = (blocks(8, 1), blocks(8, 5));
        d.claim("a", &p.address);
        d.await_gauge("claimed");
        // The claim has reached the producer: its offer does not expire.
        p.await_gauge("watched");
        p.compute("a", 1, &there, 0..32);
        p.hold("a");
        p.compute("b", 1, &there, 0..32);
        p.hold("b");
        p.assert_sent("b");
        std::thread::sleep(BEYOND_SHORT);
        assert!(!d.ranks[0].has(1, &here, 0, 0), "nothing is read before there are blocks");
        d.fetch_request("a", &p.address, &here, 0..32);
        d.assert_fetched("a");
        d.assert_has(1, &here, 0..32);
        p.assert_sent("a");
        d.fetch_request("b", &p.address, &here, 0..32);
        assert!(d.fetched("b").iter().all(|(code, _)| *code == WireCode::Expired));
        p.assert_idle();
        d.assert_idle();
    }
}

#[test]
fn held_blocks_that_the_engine_needs_are_given_up_unless_a_consumer_has_asked_for_them() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.claim("a", &p.address);
    d.await_gauge("claimed");
    for request in ["a", "b"] {
        p.compute(request, 1, &there, 0..32);
        p.hold(request);
    }
    p.await_gauge("watched");
    let reclaims = ["a", "b", "unknown"].map(str::to_owned).to_vec();
    p.apply(&ConnectorMetadata { reclaims, ..metadata() });
    let rank = &p.ranks[0].worker;
    assert!(rank.wait(PATIENCE / 2), "it is never sent");
    let reports = rank.reports();
    assert_eq!(reports.sent, ["b"]);
    let lost = Notes::decode(&reports.notes.expect("it was lost")).expect("just encoded").lost;
    assert_eq!((&lost[0].request[..], lost[0].code), ("b", WireCode::Expired));
    d.fetch_request("a", &p.address, &here, 0..32);
    d.assert_fetched("a");
    p.assert_sent("a");
    d.fetch_request("b", &p.address, &here, 0..32);
    assert!(d.fetched("b").iter().all(|(code, _)| *code == WireCode::Expired));
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_fetch_is_reported_as_answered_once_when_its_producer_has_it_or_its_request() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let here = blocks(8, 5);
    let expect = Expect { request: "a".to_owned(), transfer: id("a") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("a", &p.address, &here, 0..32);
    d.fetch_request("invented", &p.address, &here, 0..32);
    let mut answered = Vec::new();
    while answered.is_empty() {
        let notes = d.ranks[0].worker.reports().notes;
        answered.extend(notes.map(|notes| Notes::decode(&notes).expect("just encoded").answered));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(answered, [["a"]]);
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    d.assert_fetched("a");
}

#[test]
fn an_expected_request_is_waited_for_and_one_that_never_arrives_fails_its_consumer() {
    let _bounded = bounded();
    let p = Engine::new(Build { limits: short_limits, ..Build::new(1, 1) }, "tcp", b"");
    let d = Engine::new(Build::new(2, 2), "tcp", b"");
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.fetch_request("b", &p.address, &here, 0..32);
    for (code, detail) in d.fetched("b") {
        assert_eq!(code, WireCode::UnknownHandoff);
        assert!(detail.contains("no such request arrived at the producer"), "{detail}");
    }
    let expect = Expect { request: "a".to_owned(), transfer: id("a") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("a", &p.address, &here, 0..32);
    // An offer that all ranks have asked for does not expire.
    d.await_answer("a");
    std::thread::sleep(BEYOND_SHORT);
    p.compute("a", 1, &there, 0..32);
    d.assert_fetched("a");
    d.assert_has(1, &here, 0..32);
    p.hold("a");
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn the_end_of_an_expected_or_claimed_request_ends_its_handoff_on_the_other_side() {
    let _bounded = bounded();
    let (p, mut d) = two_engines();
    // A producer's, never computed.
    let expect = Expect { request: "a".to_owned(), transfer: id("a") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    p.await_gauge("watched");
    let (code, detail) = (WireCode::Cancelled, "the client left".to_owned());
    let how = EndingKind::Withdrawn { code, detail, held: false };
    let ending = Ending { request: "a".to_owned(), transfer: id("a"), how };
    p.apply(&ConnectorMetadata { endings: vec![ending], ..metadata() });
    assert_eq!(d.fetched("a")[0].0, WireCode::Cancelled);
    // One that ends held, although nothing of it was computed here.
    let expect = Expect { request: "h".to_owned(), transfer: id("h") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("h", &p.address, &blocks(8, 5), 0..32);
    d.await_answer("h");
    p.hold("h");
    p.assert_sent("h");
    assert_eq!(d.fetched("h")[0].0, WireCode::Busy);
    // A consumer's, never fetched.
    d.claim("b", &p.address);
    d.await_gauge("claimed");
    p.compute("b", 1, &blocks(8, 1), 0..32);
    p.hold("b");
    let (transfer, address) = (id("b"), p.address.clone());
    let (code, budget_ms) = (WireCode::Cancelled, BUDGET_MS);
    let free = Free {
        transfer,
        address: address.parse().expect("an address"),
        engine: None,
        code,
        budget_ms,
    };
    d.apply(&ConnectorMetadata { frees: vec![free], ..metadata() });
    d.fetch();
    p.assert_sent("b");
    d.assert_idle();
    // A consumer that dies.
    d.claim("c", &p.address);
    d.await_gauge("claimed");
    p.compute("c", 1, &blocks(8, 1), 0..32);
    p.hold("c");
    drop(d.ranks.pop().expect("a rank"));
    p.assert_sent("c");
    p.assert_idle();
}
