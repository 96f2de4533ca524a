//! Requests that end early, or lose their blocks, on either side and in any state.

use crate::kvferry_adapter::kit::{
    Asserts, Flow, Node, alike, bounded, config, dense, hybrid, kvferry_adapter, models, pair,
    prompt, there, windowed,
};
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
use kvferry_refengine::{FinishReason, Launch, LoadFailurePolicy, Request, RequestStatus, Storage};
use std::collections::HashSet;

#[test]
fn an_abort_in_any_state_of_either_side_gives_everything_back() {
    let _watched = bounded();
    let mut states = HashSet::new();
    for model in models() {
        for flow in Flow::ALL {
            for tick in 0..16 {
                for decode in [false, true] {
                    let mut config = config(&model, 8, 64);
                    (config.tp, config.chunk_tokens) = (2, 16);
                    config.load_failure = LoadFailurePolicy::Recompute;
                    let mut pair = pair(flow, &config, &config);
                    pair.hand_off("a", prompt(1, 40), 6);
                    pair.hand_off("b", prompt(2, 40), 6);
                    pair.ticks(tick);
                    if decode && tick == 15 {
                        // How many ticks a load takes depends on the machine.
                        let runs = Some(RequestStatus::Running);
                        pair.tick_until(|pair| {
                            pair.status(false, "a") == runs || pair.ended("a").is_some()
                        });
                    }
                    let status = pair.status(!decode, "a");
                    states.insert((decode, status));
                    let aborted = match decode {
                        true => pair.decode.engine.abort(&"a".into()),
                        false => pair.prefill.engine.abort(&there("a")),
                    };
                    let unfinished = !matches!(status, None | Some(RequestStatus::Finished(_)));
                    assert_eq!(aborted, unfinished);
                    pair.finish(&["b"]);
                    match (decode, aborted, flow) {
                        (true, true, _) => assert_eq!(pair.ended("a"), Some(FinishReason::Abort)),
                        (false, true, Flow::Sequential) => assert_eq!(pair.ended("a"), None),
                        // Computed by the decode engine, if it was admitted.
                        _ => pair.assert_right("a"),
                    }
                }
            }
        }
    }
    let finished = RequestStatus::Finished(FinishReason::Length);
    for state in [
        (false, None),
        (false, Some(RequestStatus::Waiting)),
        (false, Some(RequestStatus::Running)),
        (false, Some(finished)),
        (true, None),
        (true, Some(RequestStatus::WaitingForRemoteKvs)),
        (true, Some(RequestStatus::Running)),
    ] {
        assert!(states.contains(&state), "{state:?} of {states:?}");
    }
}

/// Rejects a request, or aborts it before it is scheduled.
fn end_unscheduled(node: &mut Node, request: Request, reject: bool) {
    let id = request.id.clone();
    if reject {
        node.engine.reject(request).unwrap();
    } else {
        node.engine.submit(request).unwrap();
        assert!(node.engine.abort(&id));
    }
}

#[test]
fn a_consumer_does_not_wait_for_a_producer_request_that_was_never_scheduled() {
    let _watched = bounded();
    for reject in [true, false] {
        for ahead in [0, 5] {
            let mut config = config(&dense(), 8, 64);
            config.load_failure = LoadFailurePolicy::Recompute;
            let mut pair = pair(Flow::ConsumerFirst, &config, &config);
            pair.hand_off("a", prompt(1, 40), 6);
            let at = pair.later.iter().position(|(_, prefill, _)| *prefill).unwrap();
            let (_, _, request) = pair.later.remove(at);
            pair.ticks(ahead);
            end_unscheduled(&mut pair.prefill, request, reject);
            pair.finish(&["a"]);
            assert_eq!((pair.prefill.computed, pair.fetched().0), (0, 0));
        }
    }
}

#[test]
fn a_consumer_request_that_was_never_scheduled_frees_the_producer() {
    let _watched = bounded();
    for flow in [Flow::Sequential, Flow::ProducerFirst] {
        for reject in [true, false] {
            let config = config(&hybrid(), 8, 64);
            let mut pair = pair(flow, &config, &config);
            pair.hold_decodes = true;
            pair.hand_off("a", prompt(1, 40), 6);
            pair.ticks(20);
            assert!(pair.prefill.engine.check_empty().is_err(), "its blocks are held");
            let (_, _, request) = pair.later.pop().unwrap();
            end_unscheduled(&mut pair.decode, request, reject);
            pair.assert_empty();
            assert_eq!(pair.ended("a"), Some(FinishReason::Abort));
            assert_eq!(pair.fetched(), (0, 0));
        }
    }
}

#[test]
fn a_preempted_producer_request_is_handed_over_after_its_recomputation() {
    let _watched = bounded();
    for model in [dense(), windowed(), hybrid()] {
        for launch in [Launch::Eager, Launch::Deferred] {
            for flow in Flow::ALL {
                let mut few = config(&model, 8, 16);
                (few.chunk_tokens, few.step_tokens, few.launch) = (8, 24, launch);
                (few.storage, few.prefix_caching) = (Storage::Separate, false);
                let decode = config(&model, 8, 120);
                let mut pair = pair(flow, &few, &decode);
                let ids: Vec<_> = (0..4).map(|n| format!("r{n}")).collect();
                for (n, id) in ids.iter().enumerate() {
                    pair.hand_off(id, prompt(n as u64, 70), 4);
                }
                pair.finish(&ids.iter().map(String::as_str).collect::<Vec<_>>());
                assert!(pair.prefill.engine.preemptions() > 0, "nothing was preempted");
                assert_eq!((pair.fetched(), pair.decode.computed), ((4, 0), 16), "{flow:?}");
            }
        }
    }
}

#[test]
fn reads_of_a_request_that_lost_its_blocks_are_not_accepted() {
    let _watched = bounded();
    let mut preempted = HashSet::new();
    for tick in 12..32 {
        let mut few = config(&dense(), 8, 16);
        few.prefix_caching = false;
        let mut decode = config(&dense(), 8, 64);
        decode.load_failure = LoadFailurePolicy::Recompute;
        let mut pair = pair(Flow::ConsumerFirst, &few, &decode);
        pair.hand_off("warm", prompt(9, 20), 1);
        pair.run();
        // Another request takes the blocks after this one is complete, while it goes on.
        pair.prefill.engine.submit(Request::new("other", prompt(3, 40), 60)).unwrap();
        (pair.flow, pair.hold_decodes, pair.prefill_tokens) = (Flow::ProducerFirst, true, 40);
        pair.hand_off("a", prompt(1, 40), 4);
        pair.ticks(tick);
        pair.hold_decodes = false;
        let before = pair.prefill.engine.preemptions();
        pair.ticks(2);
        preempted.insert(pair.prefill.engine.preemptions() - before);
        pair.finish(&["a"]);
    }
    assert!(preempted.contains(&1), "nothing was preempted when it was fetched");
}

#[test]
fn a_preempted_consumer_request_computes_what_it_had_fetched() {
    let _watched = bounded();
    for model in [dense(), hybrid()] {
        let prefill = config(&model, 8, 120);
        let mut few = config(&model, 8, 14);
        (few.max_running, few.prefix_caching) = (4, false);
        let mut pair = pair(Flow::Sequential, &prefill, &few);
        let ids: Vec<_> = (0..6).map(|n| format!("r{n}")).collect();
        for (n, id) in ids.iter().enumerate() {
            pair.hand_off(id, prompt(n as u64, 25), 30);
        }
        pair.finish(&ids.iter().map(String::as_str).collect::<Vec<_>>());
        assert!(pair.decode.engine.preemptions() > 0, "nothing was preempted");
        assert_eq!(pair.fetched(), (6, 0));
    }
}

#[test]
fn a_producer_that_goes_on_decoding_hands_over_what_it_does_not_overwrite() {
    let _watched = bounded();
    for model in models() {
        for flow in Flow::ALL {
            for eager in [true, false] {
                let mut config = config(&model, 8, 64);
                config.load_failure = LoadFailurePolicy::Recompute;
                let kvferry_adapter = KvferryAdapterConfig { eager, ..kvferry_adapter() };
                let mut pair = alike(flow, &config, &kvferry_adapter);
                pair.prefill_tokens = 12;
                pair.hand_off("a", prompt(1, 40), 6);
                pair.assert_empty();
                let answered = pair.prefilled.finished[&there("a")].params.is_some();
                if flow != Flow::Sequential || answered {
                    pair.assert_right("a");
                }
                if model == dense() {
                    assert_eq!((answered, pair.fetched()), (true, (1, 0)));
                }
            }
        }
    }
}

#[test]
fn successive_requests_with_one_id_have_separate_handoffs() {
    let _watched = bounded();
    let config = config(&dense(), 8, 64);
    let mut pair = pair(Flow::Sequential, &config, &config);
    for n in 0..5 {
        pair.hand_off("a", prompt(n, 30), 4);
        pair.finish(&["a"]);
        (pair.outputs, pair.prefilled) = Default::default();
    }
    assert_eq!(pair.fetched(), (5, 0));
}

#[test]
fn the_blocks_of_an_aborted_offer_are_held_until_all_ranks_have_withdrawn_it() {
    let _watched = bounded();
    let mut config = config(&hybrid(), 8, 64);
    (config.tp, config.chunk_tokens) = (2, 8);
    config.load_failure = LoadFailurePolicy::Recompute;
    for flow in [Flow::ConsumerFirst, Flow::ProducerFirst] {
        let mut pair = pair(flow, &config, &config);
        pair.hand_off("a", prompt(1, 60), 6);
        pair.tick_until(|pair| pair.status(true, "a") == Some(RequestStatus::Running));
        pair.tick();
        assert!(pair.prefill.engine.abort(&there("a")));
        let aborted = Some(RequestStatus::Finished(FinishReason::Abort));
        assert_eq!(pair.status(true, "a"), aborted, "a consumer may read its blocks");
        pair.prefill.step();
        assert_eq!(pair.status(true, "a"), None, "no consumer accepts what it reads of them");
        pair.prefill.engine.check_empty().unwrap();
        pair.finish(&["a"]);
    }
}
