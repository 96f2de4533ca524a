//! Requests whose KV is offered.

use super::*;
use kvferry_proto::handoff::BLOCKS_MAX;

#[test]
fn a_request_is_offered_with_its_first_blocks_and_later_steps_carry_only_new_ones_of_its_prompt() {
    let mut it = scheduler(&[FULL, FULL], true);
    let params = produces("x");
    it.arrived(&request("a", 10, &params));
    assert!(it.produces("a") && !it.produces("b"));

    let metadata = step(&mut it, [first("a", 5, &[&[7, 3], &[8, 4]])], &[]);
    let [compute] = &metadata.computes[..] else { panic!("{metadata:?}") };
    let offer = Offer { transfer: transfer("x"), tokens: 10, eager: true };
    assert_eq!((&compute.request[..], &compute.offer), ("a", &Some(offer)));
    assert_eq!(compute.until, 5);
    let tables = |first, blocks: [&[u32]; 2]| blocks.map(|it| BlockTable::new(first, it.to_vec()));
    assert_eq!(compute.blocks, tables(0, [&[7, 3], &[8, 4]]));

    let metadata = step(&mut it, [next("a", 5, 2, &[&[], &[]])], &[]);
    let [compute] = &metadata.computes[..] else { panic!("{metadata:?}") };
    assert_eq!((compute.until, &compute.offer, &compute.blocks), (7, &None, &vec![]));

    let metadata = step(&mut it, [next("a", 7, 3, &[&[9], &[5]])], &[]);
    let [compute] = &metadata.computes[..] else { panic!("{metadata:?}") };
    assert_eq!((compute.until, &compute.offer), (10, &None));
    assert_eq!(compute.blocks, tables(2, [&[9], &[5]]));
    assert!(!it.produces("a"), "the prompt is computed");
    assert!(step(&mut it, [next("a", 10, 1, &[&[6], &[]])], &[]).is_empty());
}

#[test]
fn requests_without_parameters_or_with_invalid_ones_get_no_handoff_and_leave_no_trace() {
    let mut it = scheduler(&[FULL], true);
    let empty = json!({});
    let invalid = [
        json!({"do_remote_decode": true, "transfer_id": 7}),
        json!({"do_remote_prefill": true}),
        json!({"do_remote_prefill": true, "do_remote_decode": true}),
    ];
    let params = invalid.iter().chain([&empty]).map(|it| it.as_object());
    for (params, arrives) in params.chain([None]).flat_map(|it| [(it, true), (it, false)]) {
        let request = Request { id: "a", prompt_tokens: 9, max_tokens: 1, params, prompt: None };
        if arrives {
            assert_eq!(it.arrived(&request), 9);
        }
        assert_eq!(it.match_request(&request, 0), Match::NONE);
        it.give_blocks(&request, 0, 0, &[vec![1]]);
        assert!(!it.produces("a"));
        assert!(step(&mut it, [first("a", 9, &[&[1]])], &["a"]).is_empty());
        assert_eq!(it.end_request(&request, FinishReason::Length, None, None), Finished::default());
        assert!(empty_step(&mut it).is_empty());
        assert_idle(&it);
    }
}

#[test]
fn a_prompt_of_more_than_u32_max_tokens_gets_no_handoff() {
    let mut it = scheduler(&[GroupRule { block_tokens: 4096, ..FULL }], true);
    let tokens = u64::from(u32::MAX) + 1;
    for params in [produces("x"), consumes("x")] {
        let request = request("a", tokens, &params);
        assert_eq!(it.match_request(&request, 0), Match::NONE);
        it.arrived(&request);
        assert_eq!(it.match_request(&request, 0), Match::NONE);
        assert!(!it.produces("a"));
        assert_eq!(it.end_request(&request, FinishReason::Length, None, None), Finished::default());
        assert!(empty_step(&mut it).is_empty());
        assert_idle(&it);
    }
    let longest = consumes("x");
    let longest = request("a", tokens - 1, &longest);
    assert_eq!(it.match_request(&longest, 1), Match::Tokens(tokens - 2));
}

#[test]
fn a_prompt_of_more_blocks_than_a_table_may_have_gets_no_handoff() {
    let mut it = scheduler(&[GroupRule { block_tokens: 1 << 20, ..FULL }, FULL], true);
    let most = BLOCKS_MAX as u64 * u64::from(FULL.block_tokens);
    for params in [produces("x"), consumes("x")] {
        let request = request("a", most + 1, &params);
        it.arrived(&request);
        assert_eq!(it.match_request(&request, 0), Match::NONE);
        assert!(!it.produces("a"));
        assert_eq!(it.end_request(&request, FinishReason::Length, None, None), Finished::default());
        assert!(empty_step(&mut it).is_empty());
        assert_idle(&it);
    }
    assert_eq!(it.refusals(), [(Refused::LongPrompt, 2)]);
    // An engine may give a request blocks for tokens after its prompt.
    let blocks: Vec<_> = (1..=BLOCKS_MAX as u32 + 1).collect();
    let (produces, consumes) = (produces("y"), consumes("z"));
    it.arrived(&request("b", most, &produces));
    let metadata = step(&mut it, [first("b", most, &[&[1, 2, 3, 4], &blocks[..]])], &[]);
    assert_eq!(metadata.computes[0].blocks[1].blocks, blocks[..BLOCKS_MAX]);
    it.give_blocks(&request("c", most, &consumes), 0, most, &[vec![1, 2, 3, 4], blocks.clone()]);
    let metadata = empty_step(&mut it);
    assert_eq!(metadata.fetches[0].blocks[1].blocks, blocks[..BLOCKS_MAX]);
}

#[test]
fn a_handoff_without_an_id_gets_a_unique_one_that_nobody_can_guess() {
    // Two engines with one id: what peers know of an engine does not tell its names.
    let mut both = [(); 2].map(|()| scheduler(&[FULL], true));
    let params = producer_params(None);
    let mut names = vec![];
    for (at, id) in [(0, "a"), (0, "b"), (0, "a"), (1, "a")] {
        let it = &mut both[at];
        let request = request(id, 4, &params);
        it.arrived(&request);
        let metadata = step(it, [first(id, 4, &[&[7]])], &[]);
        names.push(metadata.computes[0].offer.clone().expect("the first time").transfer);
        if id == "a" {
            it.end_request(&request, FinishReason::Abort, None, None);
            it.sent([id]);
        }
    }
    names.sort();
    names.dedup();
    assert_eq!(names.len(), 4);
    let digits = |name: &str| name.len() == 32 && name.bytes().all(|it| it.is_ascii_hexdigit());
    assert!(names.iter().all(|name| digits(name.as_str())), "{names:?}");
}

#[test]
fn of_two_live_producers_of_one_handoff_only_the_first_is_handed_over() {
    let mut it = scheduler(&[FULL], true);
    let params = produces("x");
    it.arrived(&request("a", 4, &params));
    it.arrived(&request("b", 4, &params));
    assert!(it.produces("a") && !it.produces("b"));
    let metadata = step(&mut it, [first("a", 4, &[&[7]]), first("b", 4, &[&[8]])], &[]);
    assert_eq!(metadata.computes.len(), 1);
    assert!(!it.end_request(&request("b", 4, &params), FinishReason::Length, None, None).held);
    assert!(empty_step(&mut it).is_empty());
    assert!(it.end_request(&request("a", 4, &params), FinishReason::Length, None, None).held);
    // Its id is in use while its blocks are held.
    it.arrived(&request("c", 4, &params));
    assert!(!it.produces("c"));
    it.end_request(&request("c", 4, &params), FinishReason::Abort, None, None);
    it.sent(["a"]);
    it.arrived(&request("d", 4, &params));
    assert!(it.produces("d"));
}

#[test]
fn blocks_that_leave_the_window_before_the_prompt_ends_are_null_from_the_first_step() {
    let mut it = scheduler(&[FULL, WINDOW, CHUNK], true);
    // The last of 14 tokens looks back to token 8, which is in block 4; its chunk begins with 8.
    it.arrived(&request("a", 14, &produces("x")));
    let (full, blocks): (&[u32], &[u32]) = (&[20, 21], &[30, 31, 32, 33, 34]);
    let metadata = step(&mut it, [first("a", 8, &[full, blocks, blocks])], &[]);
    let blocks_of = |metadata: &ConnectorMetadata| metadata.computes[0].blocks.clone();
    let left = BlockTable::new(0, vec![NULL, NULL, NULL, NULL, 34]);
    assert_eq!(blocks_of(&metadata), [BlockTable::new(0, full.to_vec()), left.clone(), left]);
    let (full, blocks): (&[u32], &[u32]) = (&[22, 23], &[35, 36]);
    let metadata = step(&mut it, [next("a", 8, 5, &[full, blocks, blocks])], &[]);
    let new = BlockTable::new(5, blocks.to_vec());
    assert_eq!(blocks_of(&metadata), [BlockTable::new(2, full.to_vec()), new.clone(), new]);
}

#[test]
fn only_the_block_of_a_states_last_token_is_offered_and_only_with_the_last_step() {
    let mut it = scheduler(&[STATE], true);
    it.arrived(&request("a", 16, &produces("x")));
    let scratch: &[u32] = &[5, 6, 7];
    let metadata = step(&mut it, [first("a", 4, &[scratch])], &[]);
    assert!(metadata.computes[0].blocks.is_empty(), "the state moves on");
    // The engine moves scratch blocks of speculative decoding behind the state.
    let metadata = step(&mut it, [next("a", 4, 11, &[&[6, 7, 8]])], &[]);
    assert_eq!(metadata.computes[0].blocks, [BlockTable::new(3, vec![6])]);
    let last = [vec![0, 0, 0, 6, 7, 8]];
    let finished =
        it.end_request(&request("a", 15, &produces("x")), FinishReason::Length, Some(&last), None);
    assert!(finished.held);
    assert_eq!(ending(empty_step(&mut it)), EndingKind::Held { side_data: None });
    // The consumer's scratch blocks are not taken for the state.
    let params = consumes("y");
    it.give_blocks(&request("b", 16, &params), 0, 15, &[vec![0, 0, 0, 1, 2, 3]]);
    assert_eq!(empty_step(&mut it).fetches[0].blocks, [BlockTable::new(3, vec![1])]);
}

#[test]
fn a_request_whose_offered_blocks_were_freed_or_moved_before_its_end_is_withdrawn() {
    let groups = [FULL, WINDOW, STATE];
    let all: [&[u32]; 3] = [&[1, 2, 3], &[10, 11, 12, 13, 14], &[20, 21, 22]];
    // 9 tokens are handed over: a window begins in block 2, the state is in block 2.
    for (group, block, last, held) in [
        (0, 0, 1, true),
        (0, 0, 9, false),
        (0, 2, 0, false),
        (1, 0, 0, true),
        (1, 1, 0, true),
        (1, 2, 0, false),
        (1, 4, 19, false),
        (2, 1, 0, true),
        (2, 2, 0, false),
        (2, 2, 29, false),
    ] {
        for how in [FinishReason::Length, FinishReason::Stop] {
            let mut it = scheduler(&groups, true);
            let params = produces("x");
            it.arrived(&request("a", 10, &params));
            step(&mut it, [first("a", 9, &all)], &[]);
            let mut blocks = all.map(<[u32]>::to_vec);
            blocks[group][block] = last;
            let finished = it.end_request(&request("a", 9, &params), how, Some(&blocks), None);
            assert!(finished.held, "until all ranks have withdrawn it");
            let case = format!("{group} {block} {last}");
            match ending(empty_step(&mut it)) {
                EndingKind::Held { .. } => assert!(held, "{case}"),
                EndingKind::Withdrawn { code, held: is_held, .. } => {
                    assert_eq!((code, is_held, held), (WireCode::Revoked, true, false), "{case}");
                }
            }
            // The engine may list only what was computed.
            it.sent(["a"]);
            assert_idle(&it);
        }
    }
}

#[test]
fn a_request_that_goes_on_after_its_prompt_is_complete_only_with_its_end() {
    for (max_tokens, eager) in [(1, true), (2, false)] {
        let mut it = scheduler(&[FULL], true);
        let params = produces("x");
        let request = Request { max_tokens, ..request("a", 8, &params) };
        it.arrived(&request);
        let metadata = step(&mut it, [first("a", 8, &[&[1, 2]])], &[]);
        assert_eq!(metadata.computes[0].offer.as_ref().expect("the first time").eager, eager);
        it.end_request(&request, FinishReason::Stop, None, Some(b"data".to_vec()));
        let side_data = (!eager).then(|| b"data".to_vec());
        assert_eq!(ending(empty_step(&mut it)), EndingKind::Held { side_data });
    }
}

#[test]
fn a_producer_leaves_the_tokens_that_the_consumer_computes_again_to_it() {
    for (groups, recomputed_tokens, left) in [
        (&[FULL][..], 0, 0),
        (&[FULL], 3, 3),
        (&[FULL, STATE], 0, 1),
        (&[FULL, WINDOW], 0, 1),
        (&[CHUNK], 0, 1),
        (&[FULL, STATE], 3, 3),
    ] {
        let mut it =
            Scheduler::new(SchedulerConfig { recomputed_tokens, ..config(groups, true) }, ENGINE);
        let (params, other, none) = (produces("x"), consumes("y"), Params::new());
        let cut = 9 - left;
        assert_eq!(it.arrived(&request("a", 9, &params)), cut);
        assert_eq!(it.arrived(&request("a", 9, &params)), cut);
        // The engine has cut the prompt.
        assert_eq!(it.arrived(&request("a", cut, &params)), cut);
        let metadata = step(&mut it, [first("a", cut, &vec![&[1, 2, 3][..]; groups.len()])], &[]);
        let offer = metadata.computes[0].offer.as_ref().expect("the first time");
        assert_eq!(u64::from(offer.tokens), cut);
        assert_eq!(it.arrived(&request("b", 9, &other)), 9);
        assert_eq!(it.match_request(&request("b", 9, &other), 0), Match::Tokens(cut));
        assert_eq!(it.arrived(&request("c", 9, &none)), 9);
        assert_eq!(it.arrived(&request("d", 1, &produces("z"))), 1);
    }
}

#[test]
fn a_step_that_computes_a_prompt_beyond_what_is_handed_over_completes_the_offer() {
    // The engine has not cut the prompt: 7 of 8 tokens are handed over.
    for (group, blocks, offered) in
        [(WINDOW, &[10, 11, 12, 13][..], Some(vec![NULL, 11, 12, 13])), (STATE, &[20, 21], None)]
    {
        let mut it = scheduler(&[FULL, group], true);
        let params = produces("x");
        assert_eq!(it.arrived(&request("a", 8, &params)), 7);
        let full: &[u32] = &[1, 2];
        let metadata = step(&mut it, [first("a", 8, &[full, blocks])], &[]);
        let Some(offered) = offered else {
            assert_eq!(withdrawn(metadata), WireCode::Unsupported, "the state has moved on");
            assert_eq!(end(&mut it, FinishReason::Length), Finished::default());
            assert_idle(&it);
            continue;
        };
        let [compute] = &metadata.computes[..] else { panic!("{metadata:?}") };
        let offer = compute.offer.as_ref().expect("the first time");
        assert_eq!((offer.tokens, compute.until), (7, 8));
        let tables = [BlockTable::new(0, full.to_vec()), BlockTable::new(0, offered)];
        assert_eq!(compute.blocks, tables);
        let last = [full.to_vec(), blocks.to_vec()];
        assert!(
            it.end_request(&request("a", 8, &params), FinishReason::Length, Some(&last), None).held
        );
        assert_eq!(ending(empty_step(&mut it)), EndingKind::Held { side_data: None });
        it.sent(["a"]);
        assert_idle(&it);
    }
}

#[test]
fn a_request_whose_end_is_told_again_is_still_held() {
    let mut it = scheduler(&[FULL], true);
    let params = produces("x");
    it.arrived(&request("a", 8, &params));
    step(&mut it, [first("a", 8, &[&[1, 2]])], &[]);
    assert!(it.end_request(&request("a", 8, &params), FinishReason::Length, None, None).held);
    assert!(it.end_request(&request("a", 8, &params), FinishReason::Error, None, None).held);
    empty_step(&mut it);
    it.sent(["a"]);
    assert!(!it.has_pending_work());
}

#[test]
fn a_request_whose_prompt_was_computed_may_restart_until_its_end() {
    let mut it = computed(true);
    assert!(!it.produces("a"), "nothing of it is computed any more");
    assert!(it.may_restart("a") && it.reads_blocks("a") && it.has_producers());
    assert!(
        it.end_request(&request("a", 8, &produces("x")), FinishReason::Length, None, None).held
    );
    assert!(!it.may_restart("a") && !it.has_producers());
    it.arrived(&request("b", 8, &consumes("y")));
    assert!(!it.may_restart("b") && !it.reads_blocks("b") && !it.has_producers());
}

#[test]
fn a_request_that_is_given_up_takes_back_its_offer_and_is_withdrawn_at_its_end() {
    let mut it = scheduler(&[FULL], true);
    let names = ["offered", "waiting", "ended"];
    for name in names {
        it.arrived(&request(name, 8, &produces(name)));
    }
    it.arrived(&request("consumer", 8, &consumes("y")));
    step(&mut it, [first("offered", 4, &[&[1]]), first("ended", 8, &[&[2, 3]])], &[]);
    let end = |it: &mut Scheduler, name| it.finished(name, FinishReason::Length, None, None);
    assert!(end(&mut it, "ended").expect("known").held);
    empty_step(&mut it);

    it.give_up(names.into_iter().chain(["consumer", "unknown"]));
    for name in names {
        assert!(!it.produces(name) && !it.may_restart(name), "{name}");
    }
    assert_eq!(it.matched("consumer", 0), Match::Tokens(8), "it does not produce");
    let scheduled = [next("offered", 4, 4, &[&[4]]), first("waiting", 8, &[&[5, 6]])];
    let metadata = step(&mut it, scheduled, &[]);
    assert_eq!(metadata.restarts, ["offered"]);
    assert!(metadata.computes.is_empty() && metadata.endings.is_empty());
    for name in ["offered", "waiting"] {
        assert_eq!(end(&mut it, name), Some(Finished::default()), "{name}");
        assert_eq!(withdrawn(empty_step(&mut it)), WireCode::Internal, "{name}");
    }
    assert_eq!(it.take_stats().withdrawn, [("internal".to_owned(), 2)].into());
    it.sent(["ended"]);
    it.end_request(&request("consumer", 8, &consumes("y")), FinishReason::Abort, None, None);
    empty_step(&mut it);
    assert_idle(&it);
}

#[test]
fn a_request_that_lost_its_blocks_is_restarted_and_offered_again_with_its_new_blocks() {
    let mut it = scheduler(&[FULL], true);
    it.arrived(&request("a", 8, &produces("x")));
    it.arrived(&request("b", 8, &produces("y")));
    step(&mut it, [first("a", 5, &[&[1, 2]])], &[]);
    let metadata = step(&mut it, [], &["a", "b", "unknown"]);
    assert_eq!(metadata.restarts, ["a"]);
    assert!(ConnectorMetadata { restarts: vec![], ..metadata }.is_empty());
    assert!(step(&mut it, [], &["a"]).is_empty(), "it has no blocks to lose");
    let metadata = step(&mut it, [first("a", 8, &[&[3, 4]])], &[]);
    let compute = &metadata.computes[0];
    assert_eq!(compute.offer.as_ref().expect("again").transfer, transfer("x"));
    assert_eq!(compute.blocks, [BlockTable::new(0, vec![3, 4])]);
    assert!(!it.produces("a"));
    step(&mut it, [], &["a"]);
    assert!(it.produces("a"), "it is computed once more");
    // A second step with all blocks is a restart without a preemption.
    step(&mut it, [first("a", 5, &[&[1, 2]])], &[]);
    let metadata = step(&mut it, [first("a", 5, &[&[3, 4]])], &[]);
    assert_eq!(metadata.restarts, ["a"]);
    assert!(metadata.computes[0].offer.is_some());
}

#[test]
fn a_request_that_ends_is_held_until_it_is_sent_and_its_response_has_the_address() {
    for how in [FinishReason::Length, FinishReason::Stop] {
        let mut it = computed(true);
        assert!(!it.has_pending_work(), "a running request makes the engine step");
        let finished = end(&mut it, how);
        assert!(finished.held, "{how:?}");
        let expected = ConsumerParams {
            transfer: transfer("x"),
            address: "10.0.0.1:0".parse().expect("an address"),
            engine: Some(ENGINE),
            tokens: Some(8),
        };
        let parsed = Role::parse(finished.params.as_ref());
        assert_eq!(parsed, Ok(Some(Role::Consume(expected))));
        assert_eq!(ending(empty_step(&mut it)), EndingKind::Held { side_data: None });
        assert!(it.has_pending_work());
        it.sent(["unknown", "a"]);
        it.sent(["a"]);
        assert_idle(&it);
    }
}

#[test]
fn a_request_that_ends_too_early_or_is_aborted_or_fails_is_withdrawn_with_a_reason() {
    for (computed, how, expected) in [
        (8, FinishReason::Abort, WireCode::Cancelled),
        (8, FinishReason::Error, WireCode::Internal),
        (7, FinishReason::Length, WireCode::Internal),
        (7, FinishReason::Stop, WireCode::Internal),
        (0, FinishReason::Length, WireCode::Internal),
        (0, FinishReason::Abort, WireCode::Cancelled),
    ] {
        let mut it = scheduler(&[FULL], true);
        it.arrived(&request("a", 8, &produces("x")));
        if computed > 0 {
            step(&mut it, [first("a", computed, &[&[1, 2]])], &[]);
        }
        // Consumers may read the blocks of an offered request until all ranks have withdrawn it.
        let offered = computed > 0;
        assert_eq!(end(&mut it, how), Finished { held: offered, params: None });
        let how = ending(empty_step(&mut it));
        let EndingKind::Withdrawn { code, detail, held } = how else { panic!("{how:?}") };
        assert_eq!((code, detail.is_empty(), held), (expected, false, offered));
        assert_eq!(it.has_pending_work(), offered);
        it.sent(["a"]);
        assert_idle(&it);
    }
}

#[test]
fn a_request_that_was_never_scheduled_is_withdrawn_only_if_the_router_knows_its_handoff() {
    for (params, endings) in [(produces("x"), 1), (producer_params(None), 0)] {
        let mut it = scheduler(&[FULL], true);
        it.end_request(&request("a", 8, &params), FinishReason::Abort, None, None);
        assert_eq!(empty_step(&mut it).endings.len(), endings);
        assert_idle(&it);
    }
}

#[test]
fn side_data_is_carried_only_if_the_handoff_completes_with_the_end() {
    for (eager, carried) in [(true, None), (false, Some(b"token".to_vec()))] {
        let mut it = computed(eager);
        let (params, side_data) = (produces("x"), Some(b"token".to_vec()));
        assert!(
            it.end_request(&request("a", 8, &params), FinishReason::Length, None, side_data).held
        );
        assert_eq!(ending(empty_step(&mut it)), EndingKind::Held { side_data: carried });
    }
}

#[test]
fn a_handoff_that_is_done_on_a_rank_is_held_for_the_others() {
    let mut it = computed(true);
    it.reported(1, &lost("a", WireCode::Ok).encode());
    assert!(end(&mut it, FinishReason::Length).held);
    it.reported(2, &lost("a", WireCode::Expired).encode());
    assert_eq!(ending(empty_step(&mut it)), EndingKind::Held { side_data: None });
    it.sent(["a"]);
    assert_idle(&it);
}

#[test]
fn a_request_whose_handoff_was_lost_is_only_restarted_and_withdrawn() {
    let mut it = scheduler(&[FULL], true);
    it.arrived(&request("a", 8, &produces("x")));
    step(&mut it, [first("a", 4, &[&[1]])], &[]);
    it.reported(0, &lost("a", WireCode::Cancelled).encode());
    it.reported(2, &lost("a", WireCode::Closed).encode());
    assert!(step(&mut it, [next("a", 4, 2, &[&[2]])], &[]).is_empty());
    assert_eq!(step(&mut it, [], &["a"]).restarts, ["a"]);
    assert!(step(&mut it, [first("a", 8, &[&[3, 4]])], &[]).is_empty());
    assert!(!end(&mut it, FinishReason::Length).held, "its new blocks were not offered");
    assert_eq!(withdrawn(empty_step(&mut it)), WireCode::Cancelled, "the first reason");
    assert_idle(&it);
}

#[test]
fn a_request_that_computes_over_its_window_or_state_is_withdrawn_at_once_and_once() {
    // The window of the second token after the 7 handed over begins one token later: in the same block,
    // or in the next.
    let tight = GroupRule { kind: Kind::Window { tokens: 5 }, block_tokens: 2 };
    let other = GroupRule { kind: Kind::Window { tokens: 4 }, block_tokens: 2 };
    for (group, overwrites) in [(FULL, false), (other, false), (tight, true), (STATE, true)] {
        let mut it = scheduler(&[group], true);
        let params = produces("x");
        let prompt = it.arrived(&request("a", 8, &params));
        step(&mut it, [first("a", prompt, &[&[1, 2, 3, 4]])], &[]);
        let mut metadata = step(&mut it, [next("a", prompt, 1, &[&[5]])], &[]);
        let mut until = prompt + 1;
        if metadata.is_empty() {
            metadata = step(&mut it, [next("a", until, 1, &[&[]])], &[]);
            until += 1;
        }
        if overwrites {
            assert_eq!(withdrawn(metadata), WireCode::Unsupported, "{group:?}");
            assert!(!it.produces("a"));
            assert!(step(&mut it, [next("a", until, 1, &[&[]])], &["a"]).is_empty());
            assert_eq!(end(&mut it, FinishReason::Length), Finished::default());
            assert!(empty_step(&mut it).is_empty());
        } else {
            assert!(metadata.is_empty(), "{group:?}: {metadata:?}");
            assert!(end(&mut it, FinishReason::Length).held);
            it.sent(["a"]);
            empty_step(&mut it);
        }
        assert_idle(&it);
    }
}
