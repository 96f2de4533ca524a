//! Handoffs from a prefill to a decode engine over vLLM's seam.

use crate::kit::{Outputs, Pair, assert_right, config, dense, hybrid, models, prompt, windowed};
use crate::script::Script;
use kvferry_refengine::in_process::{FailureKey, Faults, LoadMode};
use kvferry_refengine::{
    Connector, Engine, FinishReason, GroupSpec, Launch, LoadFailurePolicy, ModelSpec, Request,
    RequestId, RequestStatus, continuation,
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
                    // The last token of each prompt, and seven generated ones.
                    assert_eq!(pair.decoded, 4 * 8);
                    pair.assert_empty();
                }
            }
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
                assert_right(pair.decode, &[Request::new("b", prompt(1, 44), 6)]);
            }
        }
    }
}

#[test]
fn a_request_with_a_half_loaded_window_starts_over() {
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
fn a_lost_load_is_a_wrong_token_even_if_the_blocks_had_the_same_bytes_before() {
    let mut config = config(&dense(), 8, 7);
    config.prefix_caching = false;
    let script = Script::new();
    let connector = Connector::Vllm(script.connector(1));
    let mut engine = Engine::new(config.clone(), connector).unwrap();
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
