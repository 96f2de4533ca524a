//! One rule of the contract per test.

use super::{
    CHUNK, ENGINE, FULL, PRODUCER, RANKS, STATE, WINDOW, assert_idle, config, consumes, fetched,
    first, lost, next, offered, produces, request, scheduler, step, transfer,
};
use kvferry::{Access, Incarnation, RemoteRegion};
use kvferry_connector::{
    BlockTable, Cancel, Claim, ConnectorMetadata, ConsumerParams, EndingKind, EngineError, Expect,
    FetchRequest, FinishReason, Finished, Free, GroupRule, IdleLimit, Match, Model, NULL_BLOCK,
    Notes, Offer, Params, Producers, PromptId, RankMetadata, Refused, Request, Role, Scheduler,
    SchedulerConfig, Stats, producer_params,
};
use kvferry_models::engines::layout_of_rank;
use kvferry_proto::WireCode;
use kvferry_proto::layout::{Kind, Region};
use serde_json::json;

const NULL: u32 = NULL_BLOCK;

/// The metadata of tensor-parallel rank `rank`.
fn rank_metadata(rank: u32) -> Vec<u8> {
    let layout = layout_of_rank(rank, RANKS as u32, RANKS as u32);
    let (incarnation, addr, access) = (Incarnation(7), 4096, Access::READ);
    let remote = |it: &Region| RemoteRegion { incarnation, id: it.id, addr, len: it.len, access };
    let regions = layout.regions().iter().map(remote).collect();
    let address = format!("10.0.0.1:{rank}").parse().expect("an address");
    RankMetadata { address, model: Model::default(), layout, regions }.encode()
}

fn metadata_of_ranks() -> Vec<Vec<u8>> {
    (0..RANKS as u32).map(rank_metadata).collect()
}

/// The metadata of a step that computes nothing.
fn empty_step(scheduler: &mut Scheduler) -> ConnectorMetadata {
    step(scheduler, [], &[])
}

/// The only ending of metadata that have nothing else.
fn ending(metadata: ConnectorMetadata) -> EndingKind {
    let [ending] = <[_; 1]>::try_from(metadata.endings.clone()).expect("one ending");
    let rest = ConnectorMetadata { endings: vec![], ..metadata };
    assert!(rest.is_empty(), "{rest:?}");
    ending.how
}

fn withdrawn(metadata: ConnectorMetadata) -> WireCode {
    match ending(metadata) {
        EndingKind::Withdrawn { code, .. } => code,
        how @ EndingKind::Held { .. } => panic!("{how:?}"),
    }
}

#[test]
fn the_worker_halves_get_the_engine_once() {
    let mut it = scheduler(&[FULL], true);
    it.set_ranks(metadata_of_ranks()).expect("an engine");
    assert!(it.has_pending_work());
    let engine = empty_step(&mut it).engine.expect("the engine");
    assert_eq!(engine.id, ENGINE);
    assert_eq!(engine.ranks, metadata_of_ranks());
    assert!(empty_step(&mut it).is_empty());
    assert_idle(&it);
}

#[test]
fn ranks_that_contradict_each_other_are_refused() {
    let mut it = scheduler(&[FULL], true);
    let refused = it.set_ranks(metadata_of_ranks()[1..].to_vec()).expect_err("one is missing");
    assert!(matches!(refused, EngineError::Ranks { given: 2, ranks: RANKS }), "{refused}");
    let mut broken = metadata_of_ranks();
    broken[1] = b"hello".to_vec();
    let refused = it.set_ranks(broken).expect_err("one is malformed");
    assert!(matches!(refused, EngineError::Rank { rank: 1, .. }), "{refused}");
    let same = vec![rank_metadata(0); RANKS];
    let refused = it.set_ranks(same).expect_err("heads are on no rank");
    assert!(matches!(refused, EngineError::Topology(_)), "{refused}");
    assert_idle(&it);
}

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
            it.arrived(&request);
        }
        assert_eq!(it.prompt_tokens_to_prefill(&request), 9);
        assert_eq!(it.matched(&request, 0), Match::NONE);
        it.allocated(&request, 0, 0, &[vec![1]]);
        assert!(!it.produces("a"));
        assert!(step(&mut it, [first("a", 9, &[&[1]])], &["a"]).is_empty());
        assert_eq!(it.finished(&request, FinishReason::Length, None, None), Finished::default());
        assert!(empty_step(&mut it).is_empty());
        assert_idle(&it);
    }
}

#[test]
fn a_prompt_of_more_than_u32_max_tokens_gets_no_handoff() {
    let mut it = scheduler(&[FULL], true);
    let tokens = u64::from(u32::MAX) + 1;
    for params in [produces("x"), consumes("x")] {
        let request = request("a", tokens, &params);
        assert_eq!(it.matched(&request, 0), Match::NONE);
        it.arrived(&request);
        assert_eq!(it.matched(&request, 0), Match::NONE);
        assert!(!it.produces("a"));
        assert_eq!(it.finished(&request, FinishReason::Length, None, None), Finished::default());
        assert!(empty_step(&mut it).is_empty());
        assert_idle(&it);
    }
    let longest = consumes("x");
    let longest = request("a", tokens - 1, &longest);
    assert_eq!(it.matched(&longest, 1), Match::Tokens(tokens - 2));
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
            it.finished(&request, FinishReason::Abort, None, None);
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
    assert!(!it.finished(&request("b", 4, &params), FinishReason::Length, None, None).held);
    assert!(empty_step(&mut it).is_empty());
    assert!(it.finished(&request("a", 4, &params), FinishReason::Length, None, None).held);
    // Its id is in use while its blocks are held.
    it.arrived(&request("c", 4, &params));
    assert!(!it.produces("c"));
    it.finished(&request("c", 4, &params), FinishReason::Abort, None, None);
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
        it.finished(&request("a", 15, &produces("x")), FinishReason::Length, Some(&last), None);
    assert!(finished.held);
    assert_eq!(ending(empty_step(&mut it)), EndingKind::Held { side_data: None });
    // The consumer's scratch blocks are not taken for the state.
    let params = consumes("y");
    it.allocated(&request("b", 16, &params), 0, 15, &[vec![0, 0, 0, 1, 2, 3]]);
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
            let finished = it.finished(&request("a", 9, &params), how, Some(&blocks), None);
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
        it.finished(&request, FinishReason::Stop, None, Some(b"data".to_vec()));
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
        assert_eq!(it.prompt_tokens_to_prefill(&request("a", 9, &params)), cut);
        it.arrived(&request("a", 9, &params));
        assert_eq!(it.prompt_tokens_to_prefill(&request("a", 9, &params)), cut);
        // The engine has cut the prompt.
        assert_eq!(it.prompt_tokens_to_prefill(&request("a", cut, &params)), cut);
        let metadata = step(&mut it, [first("a", cut, &vec![&[1, 2, 3][..]; groups.len()])], &[]);
        let offer = metadata.computes[0].offer.as_ref().expect("the first time");
        assert_eq!(u64::from(offer.tokens), cut);
        assert_eq!(it.prompt_tokens_to_prefill(&request("b", 9, &other)), 9);
        assert_eq!(it.matched(&request("b", 9, &other), 0), Match::Tokens(cut));
        assert_eq!(it.prompt_tokens_to_prefill(&request("b", 9, &none)), 9);
        assert_eq!(it.prompt_tokens_to_prefill(&request("b", 1, &produces("z"))), 1);
    }
}

#[test]
fn a_request_whose_end_is_told_again_is_still_held() {
    let mut it = scheduler(&[FULL], true);
    let params = produces("x");
    it.arrived(&request("a", 8, &params));
    step(&mut it, [first("a", 8, &[&[1, 2]])], &[]);
    assert!(it.finished(&request("a", 8, &params), FinishReason::Length, None, None).held);
    assert!(it.finished(&request("a", 8, &params), FinishReason::Error, None, None).held);
    empty_step(&mut it);
    it.sent(["a"]);
    assert!(!it.has_pending_work());
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

/// A producer's request `a` of handoff `x`, whose prompt of 8 tokens is computed.
fn computed(eager: bool) -> Scheduler {
    let mut it = scheduler(&[FULL], eager);
    it.set_ranks(metadata_of_ranks()).expect("an engine");
    it.arrived(&request("a", 8, &produces("x")));
    assert_eq!(step(&mut it, [first("a", 8, &[&[1, 2, 3, 4]])], &[]).computes.len(), 1);
    it
}

fn end(it: &mut Scheduler, how: FinishReason) -> Finished {
    it.finished(&request("a", 8, &produces("x")), how, None, None)
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
        it.finished(&request("a", 8, &params), FinishReason::Abort, None, None);
        assert_eq!(empty_step(&mut it).endings.len(), endings);
        assert_idle(&it);
    }
}

#[test]
fn side_data_is_carried_only_if_the_handoff_completes_with_the_end() {
    for (eager, carried) in [(true, None), (false, Some(b"token".to_vec()))] {
        let mut it = computed(eager);
        let (params, side_data) = (produces("x"), Some(b"token".to_vec()));
        assert!(it.finished(&request("a", 8, &params), FinishReason::Length, None, side_data).held);
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
        it.arrived(&request("a", 8, &params));
        let prompt = it.prompt_tokens_to_prefill(&request("a", 8, &params));
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
        assert_eq!(it.matched(&request, computed), Match::Tokens(expected), "{case}");
        it.arrived(&request);
        for _ in 0..3 {
            assert_eq!(it.matched(&request, computed), Match::Tokens(expected), "{case}");
        }
    }
}

/// A consumer's request `b` of handoff `x`, whose tokens 4 to 10 are being fetched.
fn fetching() -> Scheduler {
    let mut it = scheduler(&[FULL, WINDOW], true);
    it.allocated(&request("b", 10, &consumes("x")), 4, 6, &[vec![1, 2, 3], vec![NULL, 5]]);
    it
}

fn end_fetching(it: &mut Scheduler, how: FinishReason) {
    let params = consumes("x");
    assert_eq!(it.finished(&request("b", 10, &params), how, None, None), Finished::default());
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

fn freed(metadata: &ConnectorMetadata) -> Vec<(&str, WireCode)> {
    metadata.frees.iter().map(|free| (free.transfer.as_str(), free.code)).collect()
}

#[test]
fn a_request_whose_tokens_are_all_cached_frees_its_handoff() {
    let mut it = scheduler(&[FULL], true);
    let params = consumes("x");
    let request = request("b", 10, &params);
    it.allocated(&request, 10, 0, &[vec![1, 2, 3]]);
    it.allocated(&request, 10, 0, &[vec![1, 2, 3]]);
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
    assert_eq!(it.matched(&request, 0), Match::NONE);
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
        assert_eq!(it.matched(request, 4), Match::Tokens(6));
    }
    it.allocated(&c, 4, 6, &[vec![1, 2, 3]]);
    for request in [&b, &d] {
        assert_eq!(it.matched(request, 4), Match::Unknown);
        assert_eq!(it.matched(request, 10), Match::NONE, "all of it is cached");
    }
    // It ends, but its blocks are still written.
    it.finished(&c, FinishReason::Abort, None, None);
    let metadata = empty_step(&mut it);
    assert_eq!((metadata.fetches.len(), metadata.cancels.len()), (1, 1));
    assert_eq!(it.matched(&b, 4), Match::Unknown);
    it.received(["c"]);
    for request in [&b, &d] {
        assert_eq!(it.matched(request, 4), Match::NONE, "it is cached, or computed");
        it.allocated(request, 4, 0, &[vec![1, 2, 3]]);
        it.finished(request, FinishReason::Length, None, None);
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
    it.allocated(&c, 10, 0, &[vec![1, 2, 3]]);
    assert_eq!(it.matched(&d, 0), Match::Tokens(10));
    it.finished(&c, FinishReason::Length, None, None);
    assert_eq!(claims(&mut it), ["d"]);
    it.finished(&d, FinishReason::Abort, None, None);
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
    assert_eq!(empty_step(&mut it), expected, "nobody can know the id that was drawn");
    assert!(empty_step(&mut it).is_empty());
    // Requests that do not wait are only offered, fetched, freed or withdrawn.
    let (named, consumed, freed) = (produces("v"), consumes("w"), consumes("z"));
    it.arrived(&request("d", 4, &named));
    it.allocated(&request("e", 10, &consumed), 0, 10, &[vec![1, 2, 3]]);
    it.finished(&request("f", 10, &freed), FinishReason::Abort, None, None);
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
        let ends = [a, b].map(|request| it.finished(&request, FinishReason::Length, None, None));
        let responses = ends.map(|end| end.params.expect("handed over"));
        it.sent(["a", "b"]);
        // Decode gets the first response.
        let [first, second] = [("c", one), ("d", two)]
            .map(|(id, prompt)| Request { prompt, ..request(id, 4, &responses[0]) });
        assert_eq!(it.matched(&first, 0), Match::Tokens(4));
        assert_eq!(it.matched(&second, 0), Match::NONE);
        it.arrived(&second);
        assert_eq!(it.finished(&second, FinishReason::Abort, None, None), Finished::default());
        assert!(empty_step(&mut it).frees.is_empty(), "another request fetches it");
        assert_eq!(it.refusals().last().map(|(why, _)| *why), Some(Refused::OtherPrompt));
        // Without an identity nothing is compared.
        let unknown = request("e", 4, &responses[0]);
        assert_eq!(it.matched(&unknown, 0), Match::Tokens(4));
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
fn a_response_has_what_routers_pass_on_under_nixls_names() {
    let params = end(&mut computed(true), FinishReason::Length).params.expect("handed over");
    for (key, value) in [
        ("do_remote_prefill", json!(true)),
        ("do_remote_decode", json!(false)),
        ("remote_engine_id", json!(ENGINE.to_string())),
        ("remote_request_id", json!("x")),
        ("remote_host", json!("10.0.0.1")),
        ("remote_port", json!(0)),
        ("remote_block_ids", json!([[]])),
        ("tp_size", json!(RANKS)),
    ] {
        assert_eq!(params.get(key), Some(&value), "{key}");
    }
}

#[test]
fn refusals_are_counted_by_reason() {
    let mut it = scheduler(&[FULL], true);
    let foreign = json!({"do_remote_prefill": true, "remote_engine_id": "a-b", "transfer_id": "x"});
    let invalid = json!({"do_remote_prefill": true});
    let taken = json!({"do_remote_decode": true, "transfer_id": "x"});
    let all = [&foreign, &invalid, &foreign, &taken, &taken];
    for (n, params) in all.into_iter().enumerate() {
        it.arrived(&request(&n.to_string(), 9, params.as_object().expect("an object")));
    }
    let counts =
        [(Refused::ForeignProducer, 2), (Refused::InvalidParams, 1), (Refused::Duplicate, 1)];
    assert_eq!(it.refusals(), counts);
}

#[test]
fn a_request_that_names_a_producer_outside_a_list_of_names_is_refused() {
    let mut it = scheduler(&[FULL], true);
    it.set_producers(Producers::parse(&["prefill-0", "*.prefill.svc"]).expect("names"));
    let mut arrives = |id: &str, address: &str| {
        let params =
            json!({"do_remote_prefill": true, "transfer_id": id, "remote_address": address});
        it.arrived(&request(id, 9, params.as_object().expect("an object")));
        it.refusals().to_vec()
    };
    assert_eq!(arrives("a", "prefill-0:7"), []);
    assert_eq!(arrives("b", "one.prefill.svc:7"), []);
    let others =
        ["prefill-00:7", "prefill.svc.example:7", "prefill.svc:7", "10.0.0.1:7", "[::1]:7"];
    for (at, address) in (1..).zip(others) {
        let refusals = arrives(address, address);
        assert_eq!(refusals, [(Refused::ForbiddenProducer, at)], "{address}");
    }
}

#[test]
fn a_reset_withdraws_all_offers_and_cancels_all_fetches() {
    let mut it = scheduler(&[FULL], true);
    let [held, running, waiting] = ["x", "y", "z"].map(produces);
    let consumed = consumes("w");
    it.arrived(&request("waiting", 8, &waiting));
    it.arrived(&request("held", 8, &held));
    it.arrived(&request("running", 8, &running));
    it.allocated(&request("fetched", 10, &consumed), 0, 10, &[vec![4, 5, 6]]);
    step(&mut it, [first("held", 8, &[&[1, 2]]), first("running", 4, &[&[3]])], &[]);
    assert!(it.finished(&request("held", 8, &held), FinishReason::Length, None, None).held);
    empty_step(&mut it);

    it.reset_cache();
    // It ends before the worker halves know.
    assert!(it.finished(&request("running", 8, &running), FinishReason::Abort, None, None).held);
    let metadata = empty_step(&mut it);
    let mut endings = metadata.endings;
    endings.sort_by(|a, b| a.request.cmp(&b.request));
    for (ending, (request, is_held)) in endings.iter().zip([("held", false), ("running", true)]) {
        let EndingKind::Withdrawn { code, held, .. } = ending.how else { panic!("{ending:?}") };
        assert_eq!((&ending.request[..], code, held), (request, WireCode::Revoked, is_held));
    }
    assert_eq!(endings.len(), 2);
    assert_eq!(metadata.cancels[0].request, "fetched");
    assert!(it.has_pending_work());
    it.sent(["held", "running"]);
    it.received(["fetched"]);
    it.finished(&request("fetched", 10, &consumed), FinishReason::Length, None, None);

    assert_eq!(step(&mut it, [first("waiting", 8, &[&[1, 2]])], &[]).computes.len(), 1);
    assert!(it.finished(&request("waiting", 8, &waiting), FinishReason::Stop, None, None).held);
    it.sent(["waiting"]);
    empty_step(&mut it);
    assert_idle(&it);
}

#[test]
fn counts_of_an_interval_are_taken_once_and_can_be_added_and_carried() {
    let mut it = computed(true);
    end(&mut it, FinishReason::Length);
    it.sent(["a"]);
    it.arrived(&request("b", 8, &produces("y")));
    step(&mut it, [first("b", 4, &[&[1]])], &[]);
    it.finished(&request("b", 8, &produces("y")), FinishReason::Abort, None, None);
    let (invalid, consumed) = (json!({"do_remote_prefill": true}), ["v", "w", "z"].map(consumes));
    it.arrived(&request("c", 9, invalid.as_object().expect("an object")));
    it.allocated(&request("d", 10, &consumed[0]), 4, 6, &[vec![1, 2, 3]]);
    it.allocated(&request("e", 10, &consumed[1]), 4, 6, &[vec![4, 5, 6]]);
    it.finished(&request("f", 10, &consumed[2]), FinishReason::Abort, None, None);
    for rank in 0..RANKS {
        it.reported(rank, &fetched("d", WireCode::Ok).encode());
        it.reported(rank, &fetched("e", WireCode::LayoutMismatch).encode());
    }
    let count = |name: &str| [(name.to_owned(), 1)].into();
    let expected = Stats {
        fetched: [("ok".to_owned(), 1), ("layout_mismatch".to_owned(), 1)].into(),
        fetched_tokens: 6,
        freed: 1,
        offered: 1,
        offered_tokens: 8,
        withdrawn: count("cancelled"),
        refused: count("invalid_params"),
    };
    let stats = it.take_stats();
    assert_eq!(stats, expected);
    assert!(it.take_stats().is_empty());
    let json = serde_json::to_string(&stats).expect("counts");
    let mut sum: Stats = serde_json::from_str(&json).expect("counts");
    sum.add(&stats);
    assert_eq!((sum.fetched["ok"], sum.offered_tokens, sum.refused["invalid_params"]), (2, 16, 2));
}

#[test]
fn the_null_block_of_the_engine_is_no_block() {
    let mut it = scheduler(&[FULL, WINDOW], true);
    it.arrived(&request("a", 8, &produces("x")));
    let metadata = step(&mut it, [first("a", 8, &[&[1, 2], &[0, 0, 5, 6]])], &[]);
    assert_eq!(metadata.computes[0].blocks[1], BlockTable::new(0, vec![NULL, NULL, 5, 6]));
    let blocks = [vec![1, 2, 3], vec![0, 0, 0, 5, 6]];
    it.allocated(&request("b", 10, &consumes("y")), 0, 10, &blocks);
    let fetch = &empty_step(&mut it).fetches[0];
    assert_eq!(fetch.blocks[1], BlockTable::new(0, vec![NULL, NULL, NULL, 5, 6]));
}

#[test]
fn a_request_with_blocks_is_fetched_even_if_another_one_owns_its_handoff() {
    let mut it = scheduler(&[FULL], true);
    let params = consumes("x");
    // Both were matched before either had blocks.
    it.allocated(&request("b", 10, &params), 0, 10, &[vec![1, 2, 3]]);
    it.allocated(&request("c", 10, &params), 0, 10, &[vec![4, 5, 6]]);
    assert_eq!(empty_step(&mut it).fetches.len(), 2);
    it.received(["b", "c"]);
    it.finished(&request("c", 10, &params), FinishReason::Length, None, None);
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

fn done(data: &[u8]) -> Vec<u8> {
    let mut notes = fetched("b", WireCode::Ok);
    notes.fetched[0].side_data = vec![data.to_vec().into()];
    notes.encode()
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

#[test]
fn outcomes_are_counted_by_code_and_unknown_codes_together() {
    let mut it = scheduler(&[FULL], true);
    let codes = [WireCode::Ok, WireCode::Other(900), WireCode::Ok, WireCode::Other(901)];
    for (n, code) in codes.into_iter().enumerate() {
        let (id, params) = (n.to_string(), consumes(&n.to_string()));
        it.allocated(&request(&id, 10, &params), 0, 10, &[vec![1, 2, 3]]);
        (0..RANKS).for_each(|rank| it.reported(rank, &fetched(&id, code).encode()));
    }
    let counts: Vec<u64> = it.outcomes().iter().map(|(_, count)| *count).collect();
    assert_eq!((it.outcomes()[0].0, counts), (WireCode::Ok, vec![2, 2]));
}

#[test]
fn malformed_notes_and_notes_of_unknown_ranks_or_requests_change_nothing() {
    let mut it = fetching();
    empty_step(&mut it);
    it.reported(0, b"hello");
    it.reported(RANKS, &fetched("b", WireCode::Closed).encode());
    it.reported(0, &fetched("unknown", WireCode::Closed).encode());
    it.reported(0, &lost("unknown", WireCode::Closed).encode());
    it.reported(0, &Notes::default().encode());
    assert!(empty_step(&mut it).is_empty());
    for _ in 0..2 * RANKS {
        it.reported(0, &fetched("b", WireCode::Ok).encode());
    }
    assert!(it.outcomes().is_empty(), "only one rank has reported");
}

/// A pool of 100 blocks, 8 of which may be kept for engines that do nothing with them.
fn limited(groups: &[GroupRule]) -> Scheduler {
    let idle = Some(IdleLimit { pool_blocks: 100, idle_blocks: 8 });
    Scheduler::new(SchedulerConfig { idle, ..config(groups, true) }, ENGINE)
}

fn gauge(scheduler: &Scheduler, name: &str) -> usize {
    let found = scheduler.gauges().into_iter().find(|(is, _)| *is == name);
    found.expect("there is such a gauge").1
}

/// A producer's request of 12 tokens computes and ends with these blocks.
fn produce(it: &mut Scheduler, id: &str, blocks: [u32; 3]) -> ConnectorMetadata {
    let params = produces(id);
    it.arrived(&request(id, 12, &params));
    step(it, [first(id, 12, &[&blocks])], &[]);
    let blocks = vec![blocks.to_vec()];
    let how = FinishReason::Length;
    assert!(it.finished(&request(id, 12, &params), how, Some(&blocks), None).held);
    empty_step(it)
}

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

/// Loads all 8 tokens of a request into two blocks, from this producer.
fn load(it: &mut Scheduler, id: &str, producer: &str, allowed: Match) -> bool {
    let address = format!("{producer}:4711").parse().expect("an address");
    let params = ConsumerParams { address, ..offered(id, None) }.to_params();
    let request = request(id, 8, &params);
    it.arrived(&request);
    assert_eq!(it.matched(&request, 0), allowed, "{id}");
    let loads = allowed == Match::Tokens(8);
    if loads {
        it.allocated(&request, 0, 8, &[vec![1, 2]]);
    }
    loads
}

fn answered(request: &str) -> Vec<u8> {
    Notes { answered: vec![request.to_owned()], ..Notes::default() }.encode()
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
        it.finished(&request(id, 8, &consumes(id)), FinishReason::Length, None, None);
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
    for n in 0..300 {
        load(&mut it, &format!("w{n}"), "10.0.0.1", Match::Unknown);
    }
    load(&mut it, "real", "10.0.0.9", Match::Unknown);
    it.reported(0, &answered("real"));
    load(&mut it, "real", "10.0.0.9", Match::Tokens(8));
    assert_eq!(gauge(&it, "waiting_loads"), 1);
}

#[test]
fn requests_beyond_those_that_may_wait_for_room_are_refused_counted_and_freed_at_their_producer() {
    let mut it = limited(&[FULL]);
    load(&mut it, "a", "10.0.0.9", Match::Tokens(8));
    let mut waiting = 0;
    let refused = loop {
        let id = format!("w{waiting}");
        let params = consumes(&id);
        let request = request(&id, 8, &params);
        it.arrived(&request);
        assert_eq!(it.matched(&request, 0), Match::Unknown, "its claim may be answered soon");
        if gauge(&it, "deferred") == waiting {
            // The engine asks again in its next steps.
            let found = (0..100).map(|_| it.matched(&request, 0)).find(|it| *it != Match::Unknown);
            assert_eq!(found, Some(Match::NONE));
            break id;
        }
        waiting += 1;
    };
    assert_eq!((waiting, gauge(&it, "deferred")), (256, 256));
    assert_eq!(it.refusals(), [(Refused::Busy, 1)]);
    assert_eq!(it.take_stats().refused, [("busy".to_owned(), 1)].into());
    assert_eq!(freed(&empty_step(&mut it)), [(&refused[..], WireCode::Busy)]);
    // Room does not bring it back: the engine computes it.
    it.received(["a"]);
    assert_eq!(it.matched(&request(&refused, 8, &consumes(&refused)), 0), Match::NONE);
    assert_eq!(it.matched(&request("w0", 8, &consumes("w0")), 0), Match::Tokens(8));
    for n in 0..=waiting {
        let (id, params) = (format!("w{n}"), consumes("a"));
        it.finished(&request(&id, 8, &params), FinishReason::Abort, None, None);
    }
    it.finished(&request("a", 8, &consumes("a")), FinishReason::Abort, None, None);
    empty_step(&mut it);
    assert_idle(&it);
}
