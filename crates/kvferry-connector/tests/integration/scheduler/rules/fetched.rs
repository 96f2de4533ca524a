//! Requests whose KV is fetched.

use super::*;

#[test]
fn tokens_to_fetch_are_those_that_the_producer_has_minus_cached_and_unusable_ones() {
    for (groups, prompt, there, computed, expected) in [
        (&[FULL, WINDOW][..], 10, None, 0, 9),
        (&[FULL], 10, None, 4, 6),
        (&[FULL], 10, Some(7), 4, 3),
        (&[FULL], 10, Some(700), 4, 6),
        (&[FULL], 10, Some(7), 8, 0),
        (&[FULL], 10, None, 10, 0),
        (&[FULL, STATE], 10, None, 0, 9),
        (&[FULL, STATE], 10, Some(9), 4, 5),
        (&[FULL, STATE], 1, None, 0, 0),
    ] {
        let mut it = scheduler(groups, true);
        let params = offered("x", there).to_params();
        let request = request("a", prompt, &params);
        let case = format!("{groups:?} {prompt} {there:?} {computed}");
        assert_eq!(it.match_request(&request, computed), Match::Tokens(expected), "{case}");
        it.arrived(&request);
        for _ in 0..3 {
            assert_eq!(it.match_request(&request, computed), Match::Tokens(expected), "{case}");
        }
    }
}

#[test]
fn a_fetch_is_requested_once_with_all_blocks() {
    let mut it = fetching();
    assert!(it.has_pending_work());
    let metadata = empty_step(&mut it);
    let fetch = FetchRequest {
        request: "b".to_owned(),
        transfer: transfer("x"),
        address: "10.0.0.9:4711".parse().expect("an address"),
        engine: Some(PRODUCER),
        tokens: (4, 10),
        blocks: vec![BlockTable::new(0, vec![1, 2, 3]), BlockTable::new(0, vec![NULL, 5])],
        budget_ms: 7000,
    };
    assert_eq!(
        metadata,
        ConnectorMetadata { fetches: vec![fetch], ..ConnectorMetadata::default() }
    );
    assert!(it.has_pending_work());
    assert!(empty_step(&mut it).is_empty());
}

#[test]
fn the_tokens_to_fetch_begin_after_those_that_were_cached_at_the_last_match() {
    let mut it = scheduler(&[FULL], true);
    it.arrived(&request("b", 10, &consumes("x")));
    for (computed, expected) in [(8, 2), (0, 10), (4, 6)] {
        assert_eq!(it.matched("b", computed), Match::Tokens(expected));
    }
    it.allocated("b", 6, &[vec![1, 2, 3]]);
    assert_eq!(empty_step(&mut it).fetches[0].tokens, (4, 10));
    assert_eq!(it.matched("b", 0), Match::NONE);
}

#[test]
fn a_request_that_has_not_arrived_has_no_match_no_blocks_and_no_end() {
    let mut it = scheduler(&[FULL], true);
    for _ in 0..2 {
        assert_eq!(it.matched("b", 0), Match::NONE);
        assert!(!it.waits_for_blocks("b"));
        it.allocated("b", 8, &[vec![1, 2]]);
        assert_eq!(it.finished("b", FinishReason::Length, None, None), None);
        assert!(empty_step(&mut it).is_empty());
        assert_idle(&it);
        // As little as one that has ended.
        it.arrived(&request("b", 8, &consumes("x")));
        assert!(it.waits_for_blocks("b"));
        let ended = it.finished("b", FinishReason::Abort, None, None);
        assert_eq!(ended, Some(Finished::default()));
        empty_step(&mut it);
    }
}

#[test]
fn a_request_whose_tokens_are_all_cached_frees_its_handoff() {
    let mut it = scheduler(&[FULL], true);
    let params = consumes("x");
    let request = request("b", 10, &params);
    it.give_blocks(&request, 10, 0, &[vec![1, 2, 3]]);
    it.give_blocks(&request, 10, 0, &[vec![1, 2, 3]]);
    let free = Free {
        transfer: transfer("x"),
        address: "10.0.0.9:4711".parse().expect("an address"),
        engine: Some(PRODUCER),
        code: WireCode::NotNeeded,
        budget_ms: 7000,
    };
    assert_eq!(
        empty_step(&mut it),
        ConnectorMetadata { frees: vec![free], ..ConnectorMetadata::default() }
    );
    assert_eq!(it.match_request(&request, 0), Match::NONE);
    end_fetching(&mut it, FinishReason::Length);
    assert!(empty_step(&mut it).is_empty());
    assert_idle(&it);
}

#[test]
fn a_request_that_ends_before_it_has_blocks_frees_its_handoff() {
    for arrives in [true, false] {
        for (how, code) in [
            (FinishReason::Abort, WireCode::Cancelled),
            (FinishReason::Error, WireCode::Cancelled),
            (FinishReason::Stop, WireCode::NotNeeded),
            (FinishReason::Length, WireCode::NotNeeded),
        ] {
            let mut it = scheduler(&[FULL], true);
            if arrives {
                it.arrived(&request("b", 10, &consumes("x")));
            }
            end_fetching(&mut it, how);
            assert_eq!(freed(&empty_step(&mut it)), [("x", code)]);
            assert_idle(&it);
        }
    }
}

#[test]
fn a_request_that_ends_during_its_fetch_is_cancelled_once_and_awaited() {
    for known in [true, false] {
        let mut it = fetching();
        if known {
            assert_eq!(empty_step(&mut it).fetches.len(), 1);
        }
        end_fetching(&mut it, FinishReason::Abort);
        end_fetching(&mut it, FinishReason::Abort);
        let metadata = empty_step(&mut it);
        assert_eq!(metadata.fetches.len(), usize::from(!known));
        let [Cancel { request, code: WireCode::Cancelled, .. }] = &metadata.cancels[..] else {
            panic!("{metadata:?}")
        };
        assert_eq!(request, "b");
        assert!(metadata.frees.is_empty());
        assert!(it.has_pending_work());
        it.reported(0, &fetched("b", WireCode::Cancelled).encode());
        assert!(empty_step(&mut it).is_empty(), "it was cancelled before");
        it.received(["b"]);
        assert_idle(&it);
    }
}

#[test]
fn of_several_requests_with_one_handoff_the_first_with_blocks_fetches_it_and_the_others_wait() {
    let mut it = scheduler(&[FULL], true);
    let params = consumes("x");
    let [b, c, d] = ["b", "c", "d"].map(|id| request(id, 10, &params));
    it.arrived(&b);
    it.arrived(&c);
    it.arrived(&d);
    for request in [&b, &c, &d] {
        assert_eq!(it.match_request(request, 4), Match::Tokens(6));
    }
    it.give_blocks(&c, 4, 6, &[vec![1, 2, 3]]);
    for request in [&b, &d] {
        assert_eq!(it.match_request(request, 4), Match::Unknown);
        assert_eq!(it.match_request(request, 10), Match::NONE, "all of it is cached");
    }
    // It ends, but its blocks are still written.
    it.end_request(&c, FinishReason::Abort, None, None);
    let metadata = empty_step(&mut it);
    assert_eq!((metadata.fetches.len(), metadata.cancels.len()), (1, 1));
    assert_eq!(it.match_request(&b, 4), Match::Unknown);
    it.received(["c"]);
    for request in [&b, &d] {
        assert_eq!(it.match_request(request, 4), Match::NONE, "it is cached, or computed");
        it.give_blocks(request, 4, 0, &[vec![1, 2, 3]]);
        it.end_request(request, FinishReason::Length, None, None);
    }
    assert!(empty_step(&mut it).is_empty(), "it is neither fetched again nor freed");
    assert_idle(&it);
}

#[test]
fn a_request_that_ends_before_it_loads_leaves_the_handoff_to_the_next_and_the_last_one_frees_it() {
    let mut it = scheduler(&[FULL], true);
    let params = consumes("x");
    let [b, c, d] = ["b", "c", "d"].map(|id| request(id, 10, &params));
    for request in [&b, &c, &d] {
        it.arrived(request);
    }
    let claims = |it: &mut Scheduler| {
        let claims = empty_step(it).claims.into_iter();
        claims.map(|claim| claim.request).collect::<Vec<_>>()
    };
    assert_eq!(claims(&mut it), ["b"]);
    end_fetching(&mut it, FinishReason::Abort);
    assert_eq!(claims(&mut it), ["c"]);
    // It is in the cache.
    it.give_blocks(&c, 10, 0, &[vec![1, 2, 3]]);
    assert_eq!(it.match_request(&d, 0), Match::Tokens(10));
    it.end_request(&c, FinishReason::Length, None, None);
    assert_eq!(claims(&mut it), ["d"]);
    it.end_request(&d, FinishReason::Abort, None, None);
    assert_eq!(freed(&empty_step(&mut it)), [("x", WireCode::Cancelled)]);
    assert_idle(&it);
}

#[test]
fn requests_that_wait_are_announced_once_with_the_step_after_their_arrival() {
    let mut it = scheduler(&[FULL], true);
    let (drawn, named, consumed) = (producer_params(None), produces("x"), consumes("y"));
    it.arrived(&request("a", 8, &drawn));
    it.arrived(&request("b", 8, &named));
    it.arrived(&request("c", 10, &consumed));
    let expect = Expect { request: "b".to_owned(), transfer: transfer("x") };
    let claim = Claim {
        request: "c".to_owned(),
        transfer: transfer("y"),
        address: "10.0.0.9:4711".parse().expect("an address"),
        engine: Some(PRODUCER),
        tokens: 10,
    };
    let (expects, claims) = (vec![expect], vec![claim]);
    let expected = ConnectorMetadata { expects, claims, ..ConnectorMetadata::default() };
    assert_eq!(empty_step(&mut it), expected, "no peer can know the id that was drawn");
    assert!(empty_step(&mut it).is_empty());
    // Requests that do not wait are only offered, fetched, freed or withdrawn.
    let (named, consumed, freed) = (produces("v"), consumes("w"), consumes("z"));
    it.arrived(&request("d", 4, &named));
    it.give_blocks(&request("e", 10, &consumed), 0, 10, &[vec![1, 2, 3]]);
    it.end_request(&request("f", 10, &freed), FinishReason::Abort, None, None);
    let metadata = step(&mut it, [first("d", 4, &[&[7]])], &[]);
    let counts = (metadata.computes.len(), metadata.fetches.len(), metadata.frees.len());
    assert_eq!(counts, (1, 1, 1));
    assert!(metadata.expects.is_empty() && metadata.claims.is_empty());
}

#[test]
fn handoffs_of_different_prompts_differ_and_a_consumer_with_another_prompt_computes_it() {
    let mut it = scheduler(&[FULL], true);
    it.set_ranks(metadata_of_ranks()).expect("an engine");
    let [one, two] = [1, 2].map(|token| Some(PromptId::new(&[], &[token; 4])));
    for params in [produces("x"), producer_params(None)] {
        // One transfer_id for all prompts of a batch.
        let [a, b] = [("a", one), ("b", two)]
            .map(|(id, prompt)| Request { prompt, ..request(id, 4, &params) });
        it.arrived(&a);
        it.arrived(&b);
        let metadata = step(&mut it, [first("a", 4, &[&[7]]), first("b", 4, &[&[8]])], &[]);
        assert_eq!(metadata.computes.len(), 2);
        let ends = [a, b].map(|request| it.end_request(&request, FinishReason::Length, None, None));
        let responses = ends.map(|end| end.params.expect("handed over"));
        it.sent(["a", "b"]);
        // Decode gets the first response.
        let [first, second] = [("c", one), ("d", two)]
            .map(|(id, prompt)| Request { prompt, ..request(id, 4, &responses[0]) });
        assert_eq!(it.match_request(&first, 0), Match::Tokens(4));
        assert_eq!(it.match_request(&second, 0), Match::NONE);
        it.arrived(&second);
        assert_eq!(it.end_request(&second, FinishReason::Abort, None, None), Finished::default());
        assert!(empty_step(&mut it).frees.is_empty(), "another request fetches it");
        assert_eq!(it.refusals().last().map(|(why, _)| *why), Some(Refused::OtherPrompt));
        // Without an identity nothing is compared.
        let unknown = request("e", 4, &responses[0]);
        assert_eq!(it.match_request(&unknown, 0), Match::Tokens(4));
        for request in [first, unknown] {
            it.end_request(&request, FinishReason::Abort, None, None);
        }
        empty_step(&mut it);
    }
    // In the concurrent flow both sides append their own.
    let (producer, consumer) = (produces("x"), consumes("x"));
    it.arrived(&Request { prompt: one, ..request("f", 4, &producer) });
    it.arrived(&Request { prompt: one, ..request("g", 4, &consumer) });
    let metadata = empty_step(&mut it);
    assert_eq!(metadata.expects[0].transfer, metadata.claims[0].transfer);
    let expected = format!("x#{}", one.expect("known"));
    assert_eq!(metadata.claims[0].transfer.as_str(), expected);
}

#[test]
fn the_null_block_of_the_engine_is_no_block() {
    let mut it = scheduler(&[FULL, WINDOW], true);
    it.arrived(&request("a", 8, &produces("x")));
    let metadata = step(&mut it, [first("a", 8, &[&[1, 2], &[0, 0, 5, 6]])], &[]);
    assert_eq!(metadata.computes[0].blocks[1], BlockTable::new(0, vec![NULL, NULL, 5, 6]));
    let blocks = [vec![1, 2, 3], vec![0, 0, 0, 5, 6]];
    it.give_blocks(&request("b", 10, &consumes("y")), 0, 10, &blocks);
    let fetch = &empty_step(&mut it).fetches[0];
    assert_eq!(fetch.blocks[1], BlockTable::new(0, vec![NULL, NULL, NULL, 5, 6]));
}

#[test]
fn a_request_with_blocks_is_fetched_even_if_another_one_owns_its_handoff() {
    let mut it = scheduler(&[FULL], true);
    let params = consumes("x");
    // Both were matched before either had blocks.
    it.give_blocks(&request("b", 10, &params), 0, 10, &[vec![1, 2, 3]]);
    it.give_blocks(&request("c", 10, &params), 0, 10, &[vec![4, 5, 6]]);
    assert_eq!(empty_step(&mut it).fetches.len(), 2);
    it.received(["b", "c"]);
    it.end_request(&request("c", 10, &params), FinishReason::Length, None, None);
    end_fetching(&mut it, FinishReason::Length);
    assert!(empty_step(&mut it).is_empty());
    assert_idle(&it);
}

#[test]
fn the_first_failure_of_a_rank_cancels_the_fetch_on_all_ranks_once() {
    let mut it = fetching();
    empty_step(&mut it);
    it.reported(2, &fetched("b", WireCode::Silent).encode());
    let cancel = Cancel {
        request: "b".to_owned(),
        code: WireCode::Silent,
        detail: format!("because {}", WireCode::Silent),
    };
    assert_eq!(
        empty_step(&mut it),
        ConnectorMetadata { cancels: vec![cancel], ..ConnectorMetadata::default() }
    );
    it.reported(0, &fetched("b", WireCode::Cancelled).encode());
    assert!(it.outcomes().is_empty());
    it.reported(1, &fetched("b", WireCode::Ok).encode());
    assert_eq!(it.outcomes(), [(WireCode::Silent, 1)]);
    end_fetching(&mut it, FinishReason::Abort);
    assert!(empty_step(&mut it).is_empty(), "it was cancelled before");
    it.received(["b"]);
    assert_idle(&it);
}

#[test]
fn side_data_of_all_ranks_is_returned_once_in_the_order_of_the_ranks() {
    let mut it = fetching();
    empty_step(&mut it);
    it.reported(1, &done(b"one"));
    it.reported(0, &done(b"zero"));
    assert!(it.take_side_data("b").is_empty());
    it.reported(2, &done(b"two"));
    it.received(["b"]);
    assert_eq!(it.take_side_data("b"), [&b"zero"[..], b"one", b"two"]);
    assert!(it.take_side_data("b").is_empty());
    assert!(it.take_side_data("unknown").is_empty());
    assert_eq!(it.outcomes(), [(WireCode::Ok, 1)]);
}

#[test]
fn side_data_of_failed_and_ended_requests_is_dropped() {
    let mut it = fetching();
    it.reported(0, &done(b"zero"));
    it.reported(1, &fetched("b", WireCode::Closed).encode());
    it.reported(2, &done(b"two"));
    assert!(it.take_side_data("b").is_empty());

    let mut it = fetching();
    (0..RANKS).for_each(|rank| it.reported(rank, &done(b"early")));
    end_fetching(&mut it, FinishReason::Abort);
    assert!(it.take_side_data("b").is_empty());

    let mut it = fetching();
    end_fetching(&mut it, FinishReason::Abort);
    (0..RANKS).for_each(|rank| it.reported(rank, &done(b"late")));
    assert!(it.take_side_data("b").is_empty());
    it.received(["b"]);
    empty_step(&mut it);
    assert_idle(&it);
}
