//! Handoffs from a prefill to a decode engine over vLLM's seam.

use crate::kit::{Outputs, Pair, assert_right, config, dense, hybrid, models, prompt, windowed};
use kvferry_refengine::in_process::{FailureKey, Faults, InProcess, LoadMode};
use kvferry_refengine::{
    FinishReason, Launch, LoadFailurePolicy, Packing, Request, RequestId, RequestStatus,
    continuation,
};

const MODES: [LoadMode; 3] =
    [LoadMode::Sync, LoadMode::Async { steps: 1 }, LoadMode::Async { steps: 5 }];

#[test]
fn a_second_engine_decodes_the_tokens_that_one_engine_would() {
    for model in models() {
        for mode in MODES {
            for (tp, pp) in [(1, 1), (2, 1), (2, 2)] {
                for (launch, threads) in [(Launch::Eager, false), (Launch::Deferred, true)] {
                    let mut config = config(&model, 8, 64);
                    (config.tp, config.pp) = (tp, pp);
                    (config.launch, config.threads) = (launch, threads);
                    let mut pair = Pair::new(mode, Faults::none(3), &config, &config);
                    for n in 0..4 {
                        pair.hand_off(&format!("r{n}"), prompt(n, 30 + 7 * n as usize), 8);
                    }
                    pair.run();
                    for n in 0..4 {
                        pair.assert_right(&format!("r{n}"));
                    }
                    assert_eq!(pair.in_process.loads(), (4, 0));
                    pair.assert_empty();
                }
            }
        }
    }
}

#[test]
fn a_consumer_computes_only_the_last_token_of_a_prompt() {
    for mode in MODES {
        for model in [dense(), windowed()] {
            let config = config(&model, 8, 64);
            let mut pair = Pair::new(mode, Faults::none(1), &config, &config);
            pair.hand_off("a", prompt(1, 48), 5);
            pair.run();
            pair.assert_right("a");
            assert_eq!(pair.decoded, 5, "the last token of the prompt and four generated ones");
        }
    }
}

#[test]
fn the_last_token_of_a_loaded_prompt_has_its_whole_window() {
    // For every offset of the window in its first block.
    for len in 30..50 {
        let config = config(&windowed(), 8, 64);
        let mode = LoadMode::Async { steps: 1 };
        let mut pair = Pair::new(mode, Faults::none(1), &config, &config);
        pair.hand_off("a", prompt(1, len), 4);
        pair.run();
        pair.assert_right("a");
    }
}

#[test]
fn engines_of_different_layouts_stages_and_pools_hand_off() {
    for (n, layout) in Packing::ALL.into_iter().enumerate() {
        let mut prefill = config(&hybrid(), 8, 64);
        (prefill.tp, prefill.pp, prefill.layout) = (2, 1 + n % 3, layout);
        let mut decode = config(&hybrid(), 8, 40);
        (decode.tp, decode.layout) = (2, Packing::ALL[(n + 1) % 6]);
        let mut pair = Pair::new(LoadMode::Async { steps: 3 }, Faults::none(1), &prefill, &decode);
        pair.hand_off("a", prompt(1, 45), 9);
        pair.run();
        pair.assert_right("a");
        pair.assert_empty();
    }
}

#[test]
fn cached_tokens_of_the_consumer_are_not_moved() {
    for model in models() {
        for mode in MODES {
            let config = config(&model, 8, 64);
            let mut pair = Pair::new(mode, Faults::none(1), &config, &config);
            // 41 tokens: with a state, 40 of them are handed over, a whole number of blocks.
            for (n, len) in [41, 41, 57].into_iter().enumerate() {
                pair.hand_off(&format!("r{n}"), prompt(1, len), 4);
                pair.run();
                pair.assert_right(&format!("r{n}"));
            }
            pair.assert_empty();
            let full_hit = model.has_state() || mode == LoadMode::Sync;
            assert_eq!(pair.in_process.loads().0, if full_hit { 2 } else { 3 });
        }
    }
}

#[test]
fn a_request_that_stopped_early_is_not_handed_over() {
    let config = config(&dense(), 8, 64);
    let mut pair = Pair::new(LoadMode::Sync, Faults::none(1), &config, &config);
    pair.prefill_stop = Some(continuation(&dense(), &prompt(1, 30), 1)[0]);
    pair.hand_off("a", prompt(1, 30), 4);
    pair.run();
    assert_eq!(pair.in_process.loads(), (0, 0));
    let ended = &pair.prefilled.finished[&RequestId::from("a-prefill")];
    assert_eq!((ended.reason, &ended.params), (FinishReason::Stop, &None));
    pair.assert_empty();
}

#[test]
fn a_failed_load_ends_the_request_or_is_computed_by_policy() {
    for policy in [LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute] {
        for (model, mode, key) in [
            (dense(), LoadMode::Sync, FailureKey::Block),
            (dense(), LoadMode::Async { steps: 3 }, FailureKey::Block),
            (dense(), LoadMode::Async { steps: 3 }, FailureKey::Request),
            (windowed(), LoadMode::Async { steps: 3 }, FailureKey::Request),
            (hybrid(), LoadMode::Async { steps: 3 }, FailureKey::Request),
        ] {
            for tp in [1, 2] {
                let mut config = config(&model, 8, 64);
                (config.tp, config.load_failure) = (tp, policy);
                let faults = Faults { seed: 1, percent: 100, key };
                let mut pair = Pair::new(mode, faults, &config, &config);
                pair.hand_off("a", prompt(1, 44), 6);
                pair.run();
                assert_eq!(pair.in_process.loads(), (1, 1));
                let ended = pair.decoded_of("a");
                match policy {
                    LoadFailurePolicy::Fail => assert_eq!(ended, Some(FinishReason::Error)),
                    LoadFailurePolicy::Recompute => {
                        assert_eq!(ended, Some(FinishReason::Length));
                        pair.assert_right("a");
                    }
                }
                // A block error costs the block's tokens, a failed request all of its tokens.
                let extra = if key == FailureKey::Block { 4 } else { 44 };
                if policy == LoadFailurePolicy::Recompute {
                    let discarded = usize::from(mode == LoadMode::Sync);
                    assert_eq!(pair.decoded, extra + 5 + discarded);
                }
                pair.assert_empty();
                // Blocks of a failed load are not in the cache.
                pair.in_process.withdraw();
                let decode = pair.into_decode();
                assert_right(decode, &[Request::new("b", prompt(1, 44), 6)]);
            }
        }
    }
}

#[test]
fn a_request_with_a_half_loaded_window_starts_over() {
    use kvferry_refengine::{GroupSpec, ModelSpec};
    let model = ModelSpec::new(vec![GroupSpec::window(2, 8, 19)], 2);
    for mode in [LoadMode::Sync, LoadMode::Async { steps: 2 }] {
        let mut config = config(&model, 8, 64);
        config.load_failure = LoadFailurePolicy::Recompute;
        let faults = Faults { seed: 1, percent: 100, key: FailureKey::Block };
        let mut pair = Pair::new(mode, faults, &config, &config);
        pair.hand_off("a", prompt(1, 44), 6);
        pair.run();
        pair.assert_right("a");
        pair.assert_empty();
    }
}

#[test]
fn an_abort_in_any_state_of_either_side_gives_everything_back() {
    let mut states = std::collections::HashSet::new();
    for model in models() {
        for mode in MODES {
            for tick in 0..24 {
                for decode in [false, true] {
                    let mut config = config(&model, 8, 64);
                    (config.tp, config.chunk_tokens) = (2, 16);
                    let mut pair = Pair::new(mode, Faults::none(tick), &config, &config);
                    pair.hand_off("a", prompt(1, 40), 6);
                    pair.hand_off("b", prompt(2, 40), 6);
                    for _ in 0..tick {
                        pair.tick();
                    }
                    let (engine, id) = match decode {
                        true => (&mut pair.decode, RequestId::from("a")),
                        false => (&mut pair.prefill, RequestId::from("a-prefill")),
                    };
                    let status = engine.status(&id);
                    states.insert((decode, status));
                    let unfinished = !matches!(status, None | Some(RequestStatus::Finished(_)));
                    assert_eq!(engine.abort(&id), unfinished);
                    pair.run();
                    pair.assert_right("b");
                    if !decode && unfinished {
                        assert_eq!(pair.decoded_of("a"), None);
                    }
                    pair.assert_empty();
                }
            }
        }
    }
    let finished = RequestStatus::Finished(FinishReason::Length);
    for state in [
        (false, Some(RequestStatus::Waiting)),
        (false, Some(RequestStatus::Running)),
        (false, Some(finished)),
        (true, Some(RequestStatus::WaitingForRemoteKvs)),
        (true, Some(RequestStatus::Running)),
        (true, None),
    ] {
        assert!(states.contains(&state), "{state:?} of {states:?}");
    }
}

#[test]
fn an_abort_before_the_consumer_was_scheduled_frees_the_producer() {
    let config = config(&dense(), 8, 64);
    for reject in [false, true] {
        let mut pair = Pair::new(LoadMode::Async { steps: 2 }, Faults::none(1), &config, &config);
        pair.hold_decodes = true;
        pair.hand_off("a", prompt(1, 40), 6);
        for _ in 0..5 {
            pair.tick();
        }
        let request = pair.decodes.pop().unwrap();
        assert_eq!((pair.in_process.offers(), pair.prefill.step().unwrap().held), (1, 1));
        if reject {
            pair.decode.reject(request).unwrap();
        } else {
            pair.decode.submit(request).unwrap();
            assert!(pair.decode.abort(&"a".into()));
        }
        pair.run();
        assert_eq!(
            (pair.in_process.loads(), pair.decoded_of("a")),
            ((0, 0), Some(FinishReason::Abort))
        );
        pair.assert_empty();
    }
}

#[test]
fn blocks_of_an_aborted_load_are_kept_until_every_rank_has_reported() {
    let mut config = config(&dense(), 8, 64);
    config.tp = 4;
    let mut pair = Pair::new(LoadMode::Async { steps: 9 }, Faults::none(11), &config, &config);
    pair.hand_off("a", prompt(1, 40), 6);
    let id = RequestId::from("a");
    while pair.decode.status(&id) != Some(RequestStatus::WaitingForRemoteKvs) {
        pair.tick();
    }
    assert!(pair.decode.abort(&id));
    let mut held = 0;
    while pair.decode.has_work() {
        held += usize::from(pair.decode.check_empty().is_err());
        pair.decode.step().unwrap();
    }
    assert!(held > 2, "{held}");
    pair.run();
    pair.assert_empty();
}

#[test]
fn loaded_requests_that_hold_all_blocks_do_not_starve_each_other() {
    // 24 tokens are three blocks, and a state's last token needs a fourth.
    let model = hybrid();
    let mut decode = config(&model, 8, 11);
    decode.max_running = 4;
    let prefill = config(&model, 8, 64);
    let mut pair = Pair::new(LoadMode::Async { steps: 4 }, Faults::none(2), &prefill, &decode);
    for n in 0..6 {
        pair.hand_off(&format!("r{n}"), prompt(n, 25), 30);
    }
    pair.run();
    for n in 0..6 {
        pair.assert_right(&format!("r{n}"));
    }
    pair.assert_empty();
}

#[test]
fn a_lost_load_is_a_wrong_token_even_if_the_blocks_had_the_same_bytes_before() {
    use crate::script::Script;
    use kvferry_refengine::Connector;
    let mut config = config(&dense(), 8, 7);
    config.prefix_caching = false;
    let script = Script::new();
    let mut engine =
        kvferry_refengine::Engine::new(config.clone(), Connector::Vllm(script.connector(1)))
            .unwrap();
    // The same prompt twice in the same blocks; the second time the connector claims to load it.
    let mut outputs = Outputs::default();
    for (id, tokens) in [("a", 0), ("b", 30)] {
        script.matches(tokens, false);
        engine.submit(Request::new(id, prompt(1, 40), 4)).unwrap();
        while engine.has_work() {
            engine.step().unwrap();
        }
        outputs.add(engine.take_outputs());
    }
    let right = continuation(&config.model, &prompt(1, 40), 4);
    assert_eq!(outputs.of("a"), right);
    assert_ne!(outputs.of("b"), right);
}

#[test]
fn the_consumer_computes_a_request_whose_offer_was_withdrawn() {
    let config = config(&windowed(), 8, 64);
    let mut pair = Pair::new(LoadMode::Async { steps: 2 }, Faults::none(1), &config, &config);
    pair.hold_decodes = true;
    pair.hand_off("a", prompt(1, 40), 6);
    for _ in 0..5 {
        pair.tick();
    }
    pair.in_process.withdraw();
    pair.hold_decodes = false;
    pair.run();
    pair.assert_right("a");
    assert_eq!(pair.in_process.loads(), (0, 0));
    pair.assert_empty();
}

#[test]
fn an_in_process_connector_distinguishes_its_engines() {
    let in_process = InProcess::new(LoadMode::Sync, Faults::none(1));
    let config = config(&dense(), 8, 64);
    let mut a = Pair::of(&in_process, &config, &config);
    let mut b = Pair::of(&in_process, &config, &config);
    a.hand_off("x", prompt(1, 20), 4);
    b.hand_off("x", prompt(2, 20), 4);
    for _ in 0..50 {
        a.tick();
        b.tick();
    }
    a.assert_right("x");
    b.assert_right("x");
    a.assert_empty();
    b.assert_empty();
}
