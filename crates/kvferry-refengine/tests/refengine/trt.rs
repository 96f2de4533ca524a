//! TensorRT-LLM's seam.

use crate::kit::{Dice, Said, config, dense, hybrid, prompt, run, windowed};
use crate::script::Script;
use kvferry_refengine::contract::trt::RequestState;
use kvferry_refengine::contract::{Channel, Violation};
use kvferry_refengine::teleport::{FailureKey, Faults, LoadMode, Teleport};
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
fn a_match_is_asked_for_once_however_long_a_request_waits() {
    let mut config = tp(1);
    config.groups[0].blocks = 7;
    let (mut engine, script) = scripted(&config);
    for n in 0..3 {
        engine.submit(Request::new(format!("r{n}"), prompt(n, 20), 20)).unwrap();
    }
    let said = run(&mut engine);
    for n in 0..3 {
        assert_eq!(said.of(&format!("r{n}")), continuation(&dense(), &prompt(n, 20), 20));
    }
    // Nobody was evicted, though the three never fit together.
    assert_eq!(engine.preemptions(), 0);
    let log = script.take_log();
    for call in ["get_num_new_matched_tokens", "update_state_after_alloc", "request_finished"] {
        assert_eq!(log.iter().filter(|it| it.contains(call)).count(), 3, "{call}");
    }
}

#[test]
fn metadata_carries_what_is_new_since_the_last_time() {
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
    // What the window has left behind is -1, in place.
    let end = state.log.iter().find(|it| it.contains("request_finished")).unwrap();
    assert_eq!(*end, "s request_finished 1 [1, 2, 3, 4, 5, 6]");
}

#[test]
fn a_window_s_pages_that_are_gone_are_minus_one_in_place() {
    let model =
        kvferry_refengine::ModelSpec::new(vec![kvferry_refengine::GroupSpec::window(2, 8, 10)], 2);
    let (mut engine, script) = scripted(&config(&model, 8, 32));
    engine.submit(Request::new("a", prompt(1, 30), 4)).unwrap();
    run(&mut engine);
    assert!(script.take_log().contains(&"s request_finished 1 [-1, -1, 3, 4, 5]".to_owned()));
}

#[test]
fn a_load_counts_when_every_rank_has_reported_it_at_whatever_time() {
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
    // Now it is in the metadata, and not asked for again.
    assert_eq!(script.state().trt_plans[0].new_requests[0].computed_position, 0);
    assert!(!script.take_log().iter().any(|it| it.contains("matched")));
}

#[test]
fn ids_that_were_not_handed_in_or_come_twice_are_named() {
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
fn a_match_that_tensorrt_llm_would_refuse_counts_as_none() {
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
fn what_tensorrt_llm_refuses_is_refused() {
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
    teleport: Teleport,
    said: Said,
}

impl Two {
    fn new(config: &EngineConfig, mode: LoadMode, faults: Faults) -> Self {
        let teleport = Teleport::new(mode, faults);
        let engine = |produces| {
            let connector = Connector::Trt(teleport.trt(config, produces));
            Engine::new(config.clone(), connector).unwrap()
        };
        Self { prefill: engine(true), decode: engine(false), teleport, said: Said::default() }
    }

    fn prefill(&mut self, requests: &[Request]) {
        for request in requests {
            let request = Request::new(request.id.clone(), request.prompt.clone(), 1);
            self.prefill.submit(request).unwrap();
        }
        while self.teleport.offers() < requests.len() {
            self.prefill.step().unwrap();
        }
    }

    /// One step of each engine that has something to do; whether there was one.
    fn tick(&mut self) -> Result<bool, EngineError> {
        let mut worked = false;
        for engine in [&mut self.prefill, &mut self.decode] {
            if engine.has_work() {
                engine.step()?;
                worked = true;
            }
        }
        self.said.add(self.decode.take_outputs());
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
fn what_is_decoded_elsewhere_is_what_one_engine_says() {
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
                    assert_eq!(two.said.of(request.id.as_str()), right);
                }
                assert_eq!(two.teleport.loads(), (4, 0));
            }
        }
    }
}

#[test]
fn a_request_that_is_aborted_wherever_it_is_gives_everything_back() {
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
        // While it loads it cannot be cancelled: that is remembered.
        let loading = status == Some(RequestStatus::WaitingForRemoteKvs);
        assert_eq!(two.decode.status(&id).is_some(), loading);
        two.run().unwrap();
        if aborted {
            assert_eq!(two.said.finished[&id].reason, FinishReason::Abort);
        }
        assert_eq!(two.said.of("r1"), continuation(&dense(), &requests[1].prompt, 6));
        assert_eq!(two.teleport.offers(), 0);
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
fn whatever_chance_does_tokens_are_right_and_nothing_is_left() {
    for seed in 0..30 {
        let mut dice = Dice::new(seed);
        let model = dice.pick(&[dense(), windowed()]);
        let mut config = config(&model, dice.pick(&[4, 8]), 40);
        config.tp = dice.pick(&[1, 2]);
        (config.chunk_tokens, config.max_running) = (1 + dice.roll(40), 1 + dice.roll(6));
        let steps = 1 + dice.roll(6) as u64;
        let mode = dice.pick(&[LoadMode::Sync, LoadMode::Async { steps }]);
        let mut two = Two::new(&config, mode, Faults::none(seed));
        let requests: Vec<_> = (0..40)
            .map(|n| {
                let mut tokens = if dice.percent(50) { prompt(seed, 12) } else { vec![] };
                tokens.extend(prompt(seed << 32 | n, 2 + dice.roll(40)));
                Request::new(format!("r{n}"), tokens, 1 + dice.roll(20))
            })
            .collect();
        let (mut next, mut aborted) = (0, vec![]);
        while next < requests.len() {
            // Prefilled some steps before it is asked for, or not at all.
            let request = &requests[next];
            if dice.percent(80) {
                let first = Request::new(request.id.clone(), request.prompt.clone(), 1);
                two.prefill.submit(first).unwrap();
            }
            for _ in 0..dice.roll(6) {
                two.tick().unwrap();
            }
            two.decode.submit(request.clone()).unwrap();
            next += 1;
            let victim = &requests[next - 1 - dice.roll(next.min(5))].id;
            if dice.percent(20) && two.decode.abort(victim) {
                aborted.push(victim.clone());
            }
        }
        while two.decode.has_work() {
            two.tick().unwrap();
        }
        // What was prefilled for a request that came too early is taken by nobody.
        while two.prefill.has_work() {
            two.teleport.withdraw();
            two.tick().unwrap();
        }
        two.run().unwrap();
        for request in &requests {
            if aborted.contains(&request.id) {
                assert_eq!(two.said.finished[&request.id].reason, FinishReason::Abort);
                continue;
            }
            let right = continuation(&model, &request.prompt, request.max_tokens);
            assert_eq!(two.said.of(request.id.as_str()), right, "{seed}, {}", request.id);
        }
        assert!(two.prefill.violations().is_empty() && two.decode.violations().is_empty());
    }
}
