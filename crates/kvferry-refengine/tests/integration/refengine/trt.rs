//! TensorRT-LLM's seam.

use crate::refengine::contract::tp;
use crate::refengine::kit::{config, dense, hybrid, prompt, run, windowed};
use crate::refengine::script::Script;
use kvferry_refengine::contract::trt::RequestState;
use kvferry_refengine::contract::{Channel, Violation};
use kvferry_refengine::{
    ConfigError, Connector, Engine, EngineConfig, EngineError, GroupSpec, ModelSpec, Rank, Request,
    RequestStatus, continuation,
};

fn scripted(config: &EngineConfig) -> (Engine, Script) {
    let script = Script::new();
    let connector = script.trt(config.ranks().len());
    (Engine::new(config.clone(), Connector::Trt(connector)).unwrap(), script)
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
    let model = ModelSpec::new(vec![GroupSpec::window(2, 8, 10)], 2);
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
