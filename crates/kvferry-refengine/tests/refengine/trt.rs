//! TensorRT-LLM's seam.

use crate::kit::{Outputs, Random, config, dense, hybrid, prompt, run, windowed};
use crate::script::Script;
use kvferry_refengine::contract::trt::RequestState;
use kvferry_refengine::contract::{Channel, Violation};
use kvferry_refengine::in_process::{FailureKey, Faults, InProcess, LoadMode};
use kvferry_refengine::{
    ConfigError, Connector, Engine, EngineConfig, EngineError, FinishReason, Rank, Request,
    RequestId, RequestStatus, continuation,
};

fn scripted(config: &EngineConfig) -> (Engine, Script) {
    let script = Script::new();
    let connector = script.trt(config.ranks().len());
    (Engine::new(config.clone(), Connector::Trt(connector)).unwrap(), script)
}

fn tp(ranks: usize) -> EngineConfig {
    let mut config = config(&dense(), 8, 32);
    config.tp = ranks;
    config
}

fn finished(script: &Script, rank: usize, saved: &[u64], loaded: &[u64]) {
    script.state().trt_finished.insert(rank, (saved.to_vec(), loaded.to_vec()));
}

#[test]
fn calls_come_in_tensorrt_llm_s_order() {
    let (mut engine, script) = scripted(&tp(2));
    script.take_log();
    script.state().holds = true;
    engine.submit(Request::new("a", prompt(1, 20), 1)).unwrap();
    engine.step().unwrap();
    let both = |call: &str| [format!("0 {call}"), format!("1 {call}")];
    let mut step = vec![
        "s get_num_new_matched_tokens 1 0".to_owned(),
        "s update_state_after_alloc 1 [1, 2, 3]".to_owned(),
        "s build_connector_meta".to_owned(),
    ];
    step.extend(both("bind_connector_meta"));
    step.extend(both("start_load_kv"));
    for layer in 0..3 {
        step.extend(both(&format!("wait_for_layer_load {layer}")));
        step.extend(both(&format!("save_kv_layer {layer}")));
    }
    step.extend(both("forward_done"));
    step.extend(both("wait_for_save"));
    step.push("s request_finished 1 [1, 2, 3]".to_owned());
    step.extend(both("get_finished [1] []"));
    assert_eq!(script.take_log(), step);
    let states = [RequestState::ContextInit, RequestState::DisaggContextTransInProgress];
    assert_eq!(script.state().trt_states, states);
}

#[test]
fn a_match_is_asked_for_once_even_if_the_request_waits() {
    let mut config = tp(1);
    config.groups[0].blocks = 7;
    let (mut engine, script) = scripted(&config);
    for n in 0..3 {
        engine.submit(Request::new(format!("r{n}"), prompt(n, 20), 20)).unwrap();
    }
    let outputs = run(&mut engine);
    for n in 0..3 {
        assert_eq!(outputs.of(&format!("r{n}")), continuation(&dense(), &prompt(n, 20), 20));
    }
    // No request was evicted, although the three never fit together.
    assert_eq!(engine.preemptions(), 0);
    let log = script.take_log();
    for call in ["get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"] {
        assert_eq!(log.iter().filter(|it| it.contains(call)).count(), 3, "{call}");
    }
}

#[test]
fn metadata_carries_only_what_is_new() {
    let mut config = config(&windowed(), 8, 32);
    config.chunk_tokens = 16;
    let (mut engine, script) = scripted(&config);
    script.matches(8, false);
    engine.submit(Request::new("a", prompt(1, 30), 12)).unwrap();
    run(&mut engine);
    let state = script.state();
    let first = &state.trt_plans[0].new_requests[0];
    assert_eq!((first.request_id, &first.new_tokens), (1, &prompt(1, 30)));
    assert_eq!((first.computed_position, first.num_scheduled_tokens), (0, 16));
    assert_eq!(first.new_block_ids, [vec![1, 2, 3], vec![1, 2, 3]]);
    let second = &state.trt_plans[1].cached_requests[0];
    assert_eq!((second.computed_position, second.num_scheduled_tokens), (24, 6));
    assert_eq!((&second.new_tokens, &second.new_block_ids), (&vec![], &vec![vec![4], vec![4]]));
    let third = &state.trt_plans[2].cached_requests[0];
    assert_eq!((third.computed_position, third.new_tokens.len()), (30, 1));
    assert!(state.trt_plans[2].new_requests.is_empty());
    // Pages that left the window become -1.
    let end = state.log.iter().find(|it| it.contains("request_finished")).unwrap();
    assert_eq!(*end, "s request_finished 1 [1, 2, 3, 4, 5, 6]");
}

#[test]
fn pages_that_left_a_window_become_minus_one_in_place() {
    let model =
        kvferry_refengine::ModelSpec::new(vec![kvferry_refengine::GroupSpec::window(2, 8, 10)], 2);
    let (mut engine, script) = scripted(&config(&model, 8, 32));
    engine.submit(Request::new("a", prompt(1, 30), 4)).unwrap();
    run(&mut engine);
    assert!(script.take_log().contains(&"s request_finished 1 [-1, -1, 3, 4, 5]".to_owned()));
}

#[test]
fn a_load_counts_when_every_rank_has_reported_it_in_any_step() {
    let (mut engine, script) = scripted(&tp(4));
    script.matches(19, true);
    engine.submit(Request::new("a", prompt(1, 20), 2)).unwrap();
    engine.step().unwrap();
    assert!(script.take_log().contains(&"3 get_finished [] [1]".to_owned()));
    for rank in [2, 0, 3, 1] {
        assert_eq!(engine.status(&"a".into()), Some(RequestStatus::WaitingForRemoteKvs));
        finished(&script, rank, &[], &[1]);
        engine.step().unwrap();
    }
    script.state().trt_plans.clear();
    assert_eq!(engine.step().unwrap().tokens, 1);
    // It is in the metadata now, and there is no second match.
    assert_eq!(script.state().trt_plans[0].new_requests[0].computed_position, 0);
    assert!(!script.take_log().iter().any(|it| it.contains("matched")));
}

#[test]
fn ids_that_were_not_handed_in_or_are_reported_twice_are_violations() {
    let (mut engine, script) = scripted(&tp(2));
    finished(&script, 1, &[9], &[]);
    let rank = |tp| Rank { pp: 0, tp };
    let not_handed = Violation::NotHandedIn { rank: rank(1), channel: Channel::Sending, number: 9 };
    assert_eq!(engine.step().unwrap_err(), EngineError::Violation(not_handed));

    script.matches(10, true);
    engine.submit(Request::new("a", prompt(1, 20), 2)).unwrap();
    engine.step().unwrap();
    finished(&script, 0, &[], &[1, 1]);
    let twice =
        Violation::ReportedTwice { rank: rank(0), channel: Channel::Recving, id: "a".into() };
    assert_eq!(engine.step().unwrap_err(), EngineError::Violation(twice));
    finished(&script, 0, &[1], &[]);
    let wrong = Violation::NotHandedIn { rank: rank(0), channel: Channel::Sending, number: 1 };
    assert_eq!(engine.step().unwrap_err(), EngineError::Violation(wrong));
    assert_eq!(engine.status(&"a".into()), Some(RequestStatus::WaitingForRemoteKvs));
}

#[test]
fn a_match_that_tensorrt_llm_would_refuse_counts_as_no_match() {
    for (tokens, load_async) in [(0, true), (20, true), (20, false)] {
        let (mut engine, script) = scripted(&tp(1));
        script.matches(tokens, load_async);
        engine.submit(Request::new("a", prompt(1, 20), 2)).unwrap();
        let violation = engine.step().unwrap_err();
        assert!(matches!(
            violation,
            EngineError::Violation(
                Violation::AsyncWithoutTokens { .. }
                    | Violation::TooManyTokens { available: 19, .. }
            )
        ));
    }
}

#[test]
fn settings_that_tensorrt_llm_refuses_are_refused() {
    let refused = |config: &EngineConfig| {
        let ranks = config.ranks().len();
        Engine::new(config.clone(), Connector::Trt(Script::new().trt(ranks))).unwrap_err()
    };
    let mut staged = tp(1);
    staged.pp = 2;
    assert_eq!(refused(&staged), ConfigError::NotWithTrt { what: "PP" });
    assert_eq!(refused(&config(&hybrid(), 8, 32)), ConfigError::NotWithTrt { what: "states" });
    let few = Engine::new(tp(2), Connector::Trt(Script::new().trt(1))).unwrap_err();
    assert_eq!(few, ConfigError::Workers { workers: 1, ranks: 2 });
}

/// A prefill and a decode engine.
struct Two {
    prefill: Engine,
    decode: Engine,
    in_process: InProcess,
    outputs: Outputs,
}

impl Two {
    fn new(config: &EngineConfig, mode: LoadMode, faults: Faults) -> Self {
        let in_process = InProcess::new(mode, faults);
        let engine = |produces| {
            let connector = Connector::Trt(in_process.trt(config, produces));
            Engine::new(config.clone(), connector).unwrap()
        };
        Self {
            prefill: engine(true),
            decode: engine(false),
            in_process,
            outputs: Outputs::default(),
        }
    }

    fn prefill(&mut self, requests: &[Request]) {
        for request in requests {
            let request = Request::new(request.id.clone(), request.prompt.clone(), 1);
            self.prefill.submit(request).unwrap();
        }
        while self.in_process.offers() < requests.len() {
            self.prefill.step().unwrap();
        }
    }

    /// Steps each engine that has work. False if neither has.
    fn tick(&mut self) -> Result<bool, EngineError> {
        let mut worked = false;
        for engine in [&mut self.prefill, &mut self.decode] {
            if engine.has_work() {
                engine.step()?;
                worked = true;
            }
        }
        self.outputs.add(self.decode.take_outputs());
        Ok(worked)
    }

    fn run(&mut self) -> Result<(), EngineError> {
        for _ in 0..100_000 {
            if !self.tick()? {
                break;
            }
        }
        self.prefill.check_empty().unwrap();
        self.decode.check_empty().unwrap();
        Ok(())
    }
}

#[test]
fn a_second_engine_decodes_the_tokens_that_one_engine_would() {
    for model in [dense(), windowed()] {
        for mode in [LoadMode::Sync, LoadMode::Async { steps: 1 }, LoadMode::Async { steps: 5 }] {
            for (tp, threads) in [(1, false), (2, true), (4, false)] {
                let mut config = config(&model, 8, 64);
                (config.tp, config.threads) = (tp, threads);
                let mut two = Two::new(&config, mode, Faults::none(4));
                let requests = crate::kit::requests(4, 30, 9);
                two.prefill(&requests);
                for request in &requests {
                    two.decode.submit(request.clone()).unwrap();
                }
                two.run().unwrap();
                for request in &requests {
                    let right = continuation(&model, &request.prompt, 9);
                    assert_eq!(two.outputs.of(request.id.as_str()), right);
                }
                assert_eq!(two.in_process.loads(), (4, 0));
            }
        }
    }
}

#[test]
fn a_request_aborted_in_any_state_gives_everything_back() {
    let mut seen = std::collections::HashSet::new();
    for tick in 0..14 {
        let config = tp(2);
        let mut two = Two::new(&config, LoadMode::Async { steps: 5 }, Faults::none(tick));
        let requests = crate::kit::requests(2, 30, 6);
        two.prefill(&requests);
        for request in &requests {
            two.decode.submit(request.clone()).unwrap();
        }
        for _ in 0..tick {
            two.decode.step().unwrap();
        }
        let id = RequestId::from("r0");
        let status = two.decode.status(&id);
        seen.insert(status);
        let aborted = two.decode.abort(&id);
        assert_eq!(aborted, status.is_some());
        // It cannot be cancelled while it loads. The abort takes effect afterwards.
        let loading = status == Some(RequestStatus::WaitingForRemoteKvs);
        assert_eq!(two.decode.status(&id).is_some(), loading);
        two.run().unwrap();
        if aborted {
            assert_eq!(two.outputs.finished[&id].reason, FinishReason::Abort);
        }
        assert_eq!(two.outputs.of("r1"), continuation(&dense(), &requests[1].prompt, 6));
        assert_eq!(two.in_process.offers(), 0);
    }
    assert!(seen.len() >= 4, "{seen:?}");
}

#[test]
fn a_worker_that_cannot_load_ends_the_engine() {
    for mode in [LoadMode::Sync, LoadMode::Async { steps: 3 }] {
        let faults = Faults { seed: 1, percent: 100, key: FailureKey::Request };
        let mut two = Two::new(&tp(2), mode, faults);
        let requests = crate::kit::requests(1, 30, 6);
        two.prefill(&requests);
        two.decode.submit(requests[0].clone()).unwrap();
        let error = two.run().unwrap_err();
        assert!(matches!(error, EngineError::Worker { .. }));
        assert!(error.to_string().ends_with("transfer 1 failed"), "{error}");
    }
}

#[test]
fn random_scenarios_produce_right_tokens_and_leave_nothing() {
    for seed in 0..30 {
        let mut random = Random::new(seed);
        let model = random.pick(&[dense(), windowed()]);
        let mut config = config(&model, random.pick(&[4, 8]), 40);
        config.tp = random.pick(&[1, 2]);
        (config.chunk_tokens, config.max_running) = (1 + random.below(40), 1 + random.below(6));
        let steps = 1 + random.below(6) as u64;
        let mode = random.pick(&[LoadMode::Sync, LoadMode::Async { steps }]);
        let mut two = Two::new(&config, mode, Faults::none(seed));
        let requests: Vec<_> = (0..40)
            .map(|n| {
                let mut tokens = if random.percent(50) { prompt(seed, 12) } else { vec![] };
                tokens.extend(prompt(seed << 32 | n, 2 + random.below(40)));
                Request::new(format!("r{n}"), tokens, 1 + random.below(20))
            })
            .collect();
        let (mut next, mut aborted) = (0, vec![]);
        while next < requests.len() {
            // Prefilled some steps before the decode request, or not at all.
            let request = &requests[next];
            if random.percent(80) {
                let first = Request::new(request.id.clone(), request.prompt.clone(), 1);
                two.prefill.submit(first).unwrap();
            }
            for _ in 0..random.below(6) {
                two.tick().unwrap();
            }
            two.decode.submit(request.clone()).unwrap();
            next += 1;
            let victim = &requests[next - 1 - random.below(next.min(5))].id;
            if random.percent(20) && two.decode.abort(victim) {
                aborted.push(victim.clone());
            }
        }
        while two.decode.has_work() {
            two.tick().unwrap();
        }
        // The prefill for a request that came too early is never fetched.
        while two.prefill.has_work() {
            two.in_process.withdraw();
            two.tick().unwrap();
        }
        two.run().unwrap();
        for request in &requests {
            if aborted.contains(&request.id) {
                assert_eq!(two.outputs.finished[&request.id].reason, FinishReason::Abort);
                continue;
            }
            let right = continuation(&model, &request.prompt, request.max_tokens);
            assert_eq!(two.outputs.of(request.id.as_str()), right, "{seed}, {}", request.id);
        }
        assert!(two.prefill.violations().is_empty() && two.decode.violations().is_empty());
    }
}
