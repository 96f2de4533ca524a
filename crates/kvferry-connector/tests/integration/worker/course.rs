//! Handoffs that go well, layer by layer and step by step.

use super::*;

#[test]
fn computed_kv_is_fetched_in_either_order_over_either_transport_between_any_ranks() {
    let _bounded = bounded();
    for transports in ["tcp", "local"] {
        for (theirs, ours) in [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)] {
            let p = Engine::new(Build::new(1, theirs), transports, b"");
            let build = Build { packing: Packing::Bhlnc, ..Build::new(2, ours) };
            let d = Engine::new(build, transports, b"");
            let (there, here) = (blocks(8, 1), blocks(8, 5));
            // The producer first.
            p.compute("a", 1, &there, 0..20);
            p.compute("a", 1, &there, 20..32);
            p.hold("a");
            d.fetch_request("a", &p.address, &here, 0..32);
            d.assert_fetched("a");
            d.assert_has(1, &here, 0..32);
            p.assert_sent("a");
            // The consumer first. It has some of the tokens.
            d.fetch_request("b", &p.address, &here, 8..32);
            std::thread::sleep(Duration::from_millis(20));
            p.compute("b", 2, &there, 0..12);
            p.compute("b", 2, &there, 12..32);
            d.assert_fetched("b");
            d.assert_has(2, &here, 8..32);
            d.assert_has(1, &here, 0..8);
            p.hold("b");
            p.assert_sent("b");
            p.assert_idle();
            d.assert_idle();
        }
    }
}

#[test]
fn a_consumer_fetches_only_what_it_needs_of_what_is_offered_and_computed() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    for (request, seed, fetched) in [("all", 1, 28), ("less", 2, 24)] {
        d.fetch_request(request, &p.address, &here, 0..fetched);
        // The step computes four tokens that are not handed over.
        let step = compute(request, &there);
        let offer = step.offer.clone().map(|offer| Offer { tokens: 28, ..offer });
        let computes = vec![Compute { offer, ..step }];
        p.apply(&ConnectorMetadata { computes, ..metadata() });
        (0..LAYERS).for_each(|layer| p.ranks[0].fill(seed, &there, 0..32, layer));
        p.ranks[0].worker.step_computed(None);
        d.assert_fetched(request);
        d.assert_has(seed, &here, 0..fetched);
        assert!(!d.ranks[0].has(seed, &here, fetched, 0), "{request}: more was fetched");
        p.hold(request);
        p.assert_sent(request);
    }
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_layer_is_fetched_after_its_event_not_after_its_call() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.fetch_request("a", &p.address, &here, 0..32);
    p.apply(&ConnectorMetadata { computes: vec![compute("a", &there)], ..metadata() });
    let events: Vec<Signal> = (0..LAYERS).map(|_| Signal::default()).collect();
    let rank = &p.ranks[0];
    for (layer, event) in events.iter().enumerate() {
        rank.worker.layer_computed(layer, Some(Box::new(event.clone())));
    }
    rank.worker.step_computed(Some(Box::new(events[3].clone())));
    // The engine ends the step long before the device does.
    p.hold("a");
    let is_there = |layer: u32| d.ranks[0].has(1, &here, 0, layer);
    for layer in 0..LAYERS {
        rank.fill(1, &there, 0..32, layer);
        std::thread::sleep(Duration::from_millis(30));
        assert!(!is_there(layer), "layer {layer} was fetched before it was computed");
        events[layer as usize].0.get_or_init(|| ());
        let until = Instant::now() + PATIENCE / 2;
        while !is_there(layer) {
            assert!(Instant::now() < until, "layer {layer} is never fetched");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    d.assert_fetched("a");
    d.assert_has(1, &here, 0..32);
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_step_that_failed_announces_nothing_and_fails_what_was_announced_of_it() {
    let _bounded = bounded();
    for layers in [0, 2, LAYERS] {
        let (p, d) = two_engines();
        let (there, here) = (blocks(8, 1), blocks(8, 5));
        d.fetch_request("a", &p.address, &here, 0..32);
        let (b_there, b_here) = (blocks(8, 2), blocks(8, 6));
        d.fetch_request("b", &p.address, &b_here, 0..32);
        p.compute("b", 2, &b_there, 0..12);
        p.apply(&ConnectorMetadata { computes: vec![compute("a", &there)], ..metadata() });
        let rank = &p.ranks[0];
        for layer in 0..layers {
            rank.fill(1, &there, 0..32, layer);
            rank.worker.layer_computed(layer as usize, None);
        }
        rank.worker.step_failed("the kernel failed");
        // A second report of the step changes nothing.
        rank.worker.step_computed(None);
        let (code, detail) = d.fetched("a").remove(0);
        assert_eq!(code, WireCode::Internal);
        assert!(detail.contains("the kernel failed"), "{detail}");
        p.hold("a");
        p.assert_sent("a");
        // A request that the step did not compute goes on.
        p.compute("b", 2, &b_there, 12..32);
        d.assert_fetched("b");
        d.assert_has(2, &b_here, 0..32);
        p.hold("b");
        p.assert_sent("b");
        p.assert_idle();
        d.assert_idle();
    }
}

#[test]
fn a_later_step_of_a_request_whose_step_failed_is_not_handed_over() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.fetch_request("a", &p.address, &here, 0..32);
    p.apply(&ConnectorMetadata {
        computes: vec![Compute { until: 12, ..compute("a", &there) }],
        ..metadata()
    });
    p.ranks[0].worker.step_failed("the kernel failed");
    p.compute("a", 1, &there, 12..32);
    assert_eq!(d.fetched("a").remove(0).0, WireCode::Internal);
    p.hold("a");
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_request_that_loses_its_blocks_is_fetched_from_its_new_ones() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (before, there, here) = (blocks(8, 1), blocks(8, 9), blocks(8, 5));
    d.fetch_request("a", &p.address, &here, 0..32);
    p.compute("a", 7, &before, 0..20);
    p.apply(&ConnectorMetadata { restarts: vec!["a".to_owned()], ..metadata() });
    // Another request's bytes.
    (0..LAYERS).for_each(|layer| p.ranks[0].fill(99, &before, 0..32, layer));
    p.compute("a", 8, &there, 0..32);
    d.assert_fetched("a");
    d.assert_has(8, &here, 0..32);
    p.hold("a");
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn boundaries_at_layers_that_are_never_reported_are_announced_with_the_next_one() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let (producer, worker) = (&p.ranks[0], &p.ranks[0].worker);
    assert!((0..4).all(|layer| !worker.wants_layer(layer)), "nothing is handed over");
    d.fetch_request("a", &p.address, &here, 0..32);
    p.apply(&ConnectorMetadata { computes: vec![compute("a", &there)], ..metadata() });
    (0..LAYERS).for_each(|layer| producer.fill(1, &there, 0..32, layer));
    assert_eq!([0, 1, 2, 3].map(|layer| worker.wants_layer(layer)), [true, true, true, false]);
    // Layers 0 and 2 have no attention.
    worker.layer_computed(1, None);
    let until = Instant::now() + PATIENCE / 2;
    while !(0..2).all(|layer| d.ranks[0].has(1, &here, 0, layer)) {
        assert!(Instant::now() < until, "layers 0 and 1 are never fetched");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!([0, 1, 2, 3].map(|layer| worker.wants_layer(layer)), [false, false, true, false]);
    worker.step_computed(None);
    d.assert_fetched("a");
    d.assert_has(1, &here, 0..32);
}
