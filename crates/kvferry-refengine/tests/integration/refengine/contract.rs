//! vLLM's seam: the order of calls, and the violations of connectors that break the contract.

mod workers;

use crate::refengine::kit::{config, dense, hybrid, prompt, run, windowed};
use crate::refengine::script::Script;
use kvferry_refengine::contract::vllm::{ConnectorMeta, Match, TransferResults, WorkerConnector};
use kvferry_refengine::contract::{Channel, Violation};
use kvferry_refengine::{
    BlockId, ConfigError, Connector, Engine, EngineConfig, FinishReason, HeapMemory, KvCaches,
    KvMemory, Launch, LayerEvent, LoadFailurePolicy, Rank, Request, RequestId, RequestStatus,
    continuation,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

pub(crate) fn scripted(config: &EngineConfig) -> (Engine, Script) {
    let script = Script::new();
    let connector = script.connector(config.ranks().len());
    (Engine::new(config.clone(), Connector::Vllm(connector)).unwrap(), script)
}

fn tp(ranks: usize) -> EngineConfig {
    let mut config = config(&dense(), 8, 32);
    config.tp = ranks;
    config
}

/// Submits one request of 20 tokens.
fn submit(engine: &mut Engine, id: &str, max_tokens: usize) {
    engine.submit(Request::new(id, prompt(1, 20), max_tokens)).unwrap();
}

fn rank(tp: usize) -> Rank {
    Rank { pp: 0, tp }
}

/// The violations of one step.
fn broken(engine: &mut Engine) -> Vec<Violation> {
    let before = engine.violations().len();
    let first = engine.step().unwrap_err();
    let new = engine.violations()[before..].to_vec();
    assert_eq!(first, new[0]);
    new
}

#[test]
fn calls_come_in_vllm_s_order() {
    let mut config = config(&dense(), 8, 32);
    config.pp = 2;
    let (mut engine, script) = scripted(&config);
    assert_eq!(
        script.take_log(),
        [
            "0 register_kv_caches",
            "1 register_kv_caches",
            "s bind_block_pools",
            "0 get_handshake_metadata",
            "1 get_handshake_metadata",
            "s set_xfer_handshake_metadata 2",
        ]
    );

    // An asynchronous load: a step without tokens.
    script.matches(20, true);
    submit(&mut engine, "a", 2);
    engine.step().unwrap();
    let both = |call: &str| [format!("0 {call}"), format!("1 {call}")];
    let mut step = vec![
        "s on_new_request a".to_owned(),
        "s get_num_new_matched_tokens a 0".to_owned(),
        "s update_state_after_alloc a 3 20".to_owned(),
        "s build_connector_meta".to_owned(),
    ];
    for call in ["handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_save"]
    {
        step.extend(both(call));
    }
    let report = |rank: usize, finished: usize| {
        [
            format!("{rank} get_transfer_results {finished}"),
            format!("{rank} get_block_ids_with_load_errors"),
            format!("{rank} build_connector_worker_meta"),
            format!("{rank} clear_connector_metadata"),
        ]
    };
    step.extend([report(0, 0), report(1, 0)].concat());
    step.push("s take_events".to_owned());
    assert_eq!(script.take_log(), step);

    // Both ranks have loaded it. It continues with nothing to load, so the layers come before loads.
    script.received(0, "a");
    script.received(1, "a");
    engine.step().unwrap();
    assert!(
        script.take_log().ends_with(&["s update_connector_output".into(), "s take_events".into()])
    );
    engine.step().unwrap();
    let mut step =
        vec!["s update_state_after_alloc a 3 0".to_owned(), "s build_connector_meta".to_owned()];
    for call in ["handle_preemptions", "bind_connector_metadata"] {
        step.extend(both(call));
    }
    // One layer on the first rank, two on the second.
    for (rank, layer) in [(0, 0), (1, 1), (1, 2)] {
        step.push(format!("{rank} wait_for_layer_load {layer}"));
        step.push(format!("{rank} save_kv_layer {layer}"));
    }
    step.extend(both("start_load_kv"));
    step.extend(both("wait_for_save"));
    step.extend([report(0, 0), report(1, 0)].concat());
    step.push("s take_events".to_owned());
    assert_eq!(script.take_log(), step);

    // Its last token: the request ends, and workers get that in a step of its own.
    script.matches(0, false);
    engine.step().unwrap();
    assert!(script.take_log().contains(&"s request_finished a 3".to_owned()));
    assert!(engine.has_work());
    engine.step().unwrap();
    let log = script.take_log();
    assert!(log.contains(&"0 get_transfer_results 1".to_owned()) && !engine.has_work());

    // A synchronous load comes before the layers.
    script.matches(8, false);
    engine.submit(Request::new("b", prompt(2, 20), 2)).unwrap();
    engine.step().unwrap();
    let log = script.take_log();
    let at = |call: &str| log.iter().position(|it| it == call).unwrap();
    assert!(at("0 start_load_kv") < at("0 wait_for_layer_load 0"));
    assert!(script.state().plans.last().unwrap().has_sync_kv_loads);
    drop(engine);
    assert!(script.take_log().ends_with(&[
        "0 shutdown".into(),
        "1 shutdown".into(),
        "s shutdown".into()
    ]));
}

#[test]
fn metadata_has_what_is_new_of_each_request() {
    let mut config = config(&dense(), 8, 9);
    config.chunk_tokens = 16;
    let (mut engine, script) = scripted(&config);
    submit(&mut engine, "a", 40);
    engine.submit(Request::new("b", prompt(2, 20), 40)).unwrap();
    engine.step().unwrap();
    engine.step().unwrap();
    let plans = std::mem::take(&mut script.state().plans);
    let [first, second] = &plans[..] else { panic!("two steps") };
    assert_eq!(first.scheduled_new_reqs.len(), 2);
    assert_eq!(first.scheduled_new_reqs[0].block_ids, [[BlockId(1), BlockId(2)]]);
    assert_eq!(first.num_scheduled_tokens[&"a".into()], 16);
    assert_eq!(second.scheduled_cached_reqs[0].num_computed_tokens, 16);
    assert_eq!(second.scheduled_cached_reqs[0].block_ids[0].len(), 1);
    // One of them loses its blocks and gets new ones.
    let outputs = run(&mut engine);
    assert!(engine.preemptions() > 0);
    let plans = std::mem::take(&mut script.state().plans);
    let lost = plans.iter().position(|plan| plan.preempted_req_ids == ["b".into()]).unwrap();
    let resumed = plans[lost..].iter().flat_map(|plan| &plan.scheduled_cached_reqs);
    let resumed = resumed.into_iter().find(|it| it.resumed).unwrap();
    assert_eq!(resumed.id, "b".into());
    assert!(resumed.block_ids[0].len() > 1 && resumed.num_output_tokens > 0);
    // The match is asked for again after the preemption.
    let asked = script.take_log().into_iter().filter(|it| it.contains("matched_tokens b")).count();
    assert!(asked >= 2, "{asked}");
    for (id, n) in [("a", 1), ("b", 2)] {
        assert_eq!(outputs.of(id), continuation(&config.model, &prompt(n, 20), 40));
    }
}

#[test]
fn a_connector_without_an_answer_is_asked_again_and_delays_no_other_request() {
    let (mut engine, script) = scripted(&tp(1));
    script.state().answer = Some(Match::Unknown);
    submit(&mut engine, "a", 2);
    for _ in 0..3 {
        assert_eq!(engine.step().unwrap().tokens, 0);
        assert_eq!(engine.status(&"a".into()), Some(RequestStatus::Waiting));
    }
    let asked = script.take_log().into_iter().filter(|it| it.contains("matched_tokens")).count();
    assert_eq!(asked, 3);
    script.matches(0, false);
    assert_eq!(run(&mut engine).of("a"), continuation(&dense(), &prompt(1, 20), 2));
    engine.check_empty().unwrap();
}

#[test]
fn request_finished_is_called_once_per_request_however_it_ends() {
    let mut config = config(&dense(), 8, 9);
    config.load_failure = LoadFailurePolicy::Fail;
    let (mut engine, script) = scripted(&config);
    submit(&mut engine, "ends", 2);
    submit(&mut engine, "aborted-running", 9);
    engine.step().unwrap();
    engine.abort(&"aborted-running".into());
    submit(&mut engine, "aborted-waiting", 9);
    engine.abort(&"aborted-waiting".into());
    engine.reject(Request::new("rejected", prompt(1, 5000), 9)).unwrap();
    script.matches(19, true);
    engine.submit(Request::new("fails", prompt(2, 20), 2)).unwrap();
    engine.step().unwrap();
    script.received(0, "fails");
    script.failed(0, "fails");
    run(&mut engine);
    let finished: Vec<_> = script
        .take_log()
        .into_iter()
        .filter_map(|it| it.strip_prefix("s request_finished ").map(str::to_owned))
        .collect();
    assert_eq!(
        finished,
        ["aborted-running 3", "aborted-waiting 0", "rejected 0", "ends 3", "fails 3"]
    );
    let reasons = [
        FinishReason::Abort,
        FinishReason::Abort,
        FinishReason::Abort,
        FinishReason::Length,
        FinishReason::Error,
    ];
    assert_eq!(script.state().statuses, reasons.map(RequestStatus::Finished));
    engine.check_empty().unwrap();
}

#[test]
fn blocks_are_kept_while_the_connector_holds_them_and_params_are_returned() {
    let (mut engine, script) = scripted(&tp(2));
    let params = serde_json::json!({"transfer": 7}).as_object().unwrap().clone();
    script.state().holds = true;
    script.state().params = Some(params.clone());
    submit(&mut engine, "a", 1);
    engine.step().unwrap();
    let outputs = engine.take_outputs();
    assert_eq!(outputs[0].finished.as_ref().unwrap().params, Some(params));
    script.state().pending = true;
    for reporter in 0..2 {
        for _ in 0..3 {
            assert!(engine.has_work());
            assert_eq!(engine.step().unwrap().held, 1);
        }
        let leak = engine.check_empty().unwrap_err();
        assert_eq!((leak.requests, leak.blocks.len()), (vec![RequestId::from("a")], 3));
        script.sent(reporter, "a");
        engine.step().unwrap();
    }
    engine.check_empty().unwrap();
    script.state().pending = false;
    assert!(!engine.has_work());
}

#[test]
fn an_engine_stops_stepping_if_the_connector_reports_no_pending_work() {
    let (mut engine, script) = scripted(&tp(1));
    script.state().holds = true;
    submit(&mut engine, "a", 1);
    run(&mut engine);
    assert_eq!(engine.check_empty().unwrap_err().requests, ["a".into()]);
}

#[test]
fn a_request_counts_when_the_connector_s_number_of_ranks_has_reported_it() {
    for (count, reports) in [(None, 4), (Some(1), 1), (Some(3), 3)] {
        let (mut engine, script) = scripted(&tp(4));
        script.state().finished_count = count;
        script.matches(20, true);
        submit(&mut engine, "a", 1);
        engine.step().unwrap();
        for reporter in 0..reports {
            let status = engine.status(&"a".into());
            assert_eq!(status, Some(RequestStatus::WaitingForRemoteKvs));
            assert!(script.state().outputs.is_empty());
            script.received(reporter, "a");
            engine.step().unwrap();
        }
        assert_eq!(script.state().outputs[0].finished_recving, ["a".into()]);
    }
}

#[test]
fn a_rank_s_failure_counts_when_all_ranks_have_reported() {
    let mut config = tp(2);
    config.load_failure = LoadFailurePolicy::Fail;
    let (mut engine, script) = scripted(&config);
    script.matches(20, true);
    submit(&mut engine, "a", 1);
    engine.step().unwrap();
    script.received(1, "a");
    script.failed(1, "a");
    engine.step().unwrap();
    assert_eq!(engine.status(&"a".into()), Some(RequestStatus::WaitingForRemoteKvs));
    script.received(0, "a");
    engine.step().unwrap();
    assert_eq!(script.state().outputs[0].failed_recving, ["a".into()]);
    assert_eq!(engine.status(&"a".into()), None);
    engine.check_empty().unwrap();
}

#[test]
fn an_unknown_id_is_a_violation() {
    let (mut engine, script) = scripted(&tp(2));
    script.sent(0, "ghost");
    script.received(1, "ghost");
    let unknown =
        |tp, channel| Violation::UnknownId { rank: rank(tp), channel, id: "ghost".into() };
    assert_eq!(broken(&mut engine), [unknown(0, Channel::Sending), unknown(1, Channel::Recving)]);
    let text = engine.violations()[0].to_string();
    assert_eq!(
        text,
        "rank pp0tp0 reports as finished sending ghost, which this engine does not know"
    );
    // The engine continues.
    submit(&mut engine, "a", 2);
    assert_eq!(run(&mut engine).of("a"), continuation(&dense(), &prompt(1, 20), 2));
}

#[test]
fn a_second_report_of_a_rank_does_not_count_for_another() {
    let (mut engine, script) = scripted(&tp(2));
    script.matches(20, true);
    submit(&mut engine, "a", 1);
    engine.step().unwrap();
    script.received(0, "a");
    script.received(0, "a");
    let twice = |channel| Violation::ReportedTwice { rank: rank(0), channel, id: "a".into() };
    assert_eq!(broken(&mut engine), [twice(Channel::Recving)]);
    script.received(0, "a");
    assert_eq!(broken(&mut engine), [twice(Channel::Recving)]);
    assert_eq!(engine.status(&"a".into()), Some(RequestStatus::WaitingForRemoteKvs));
    script.received(1, "a");
    engine.step().unwrap();

    script.state().holds = true;
    run(&mut engine);
    script.sent(1, "a");
    engine.step().unwrap();
    script.sent(1, "a");
    let (channel, id) = (Channel::Sending, RequestId::from("a"));
    let twice = Violation::ReportedTwice { rank: rank(1), channel, id: id.clone() };
    assert_eq!(broken(&mut engine), [twice]);
    script.sent(0, "a");
    engine.step().unwrap();
    engine.check_empty().unwrap();
    script.sent(0, "a");
    assert_eq!(broken(&mut engine), [Violation::AlreadyEnded { rank: rank(0), channel, id }]);
}

#[test]
fn reports_of_requests_that_are_not_held_or_still_run_are_violations() {
    let (mut engine, script) = scripted(&tp(1));
    submit(&mut engine, "a", 3);
    engine.step().unwrap();
    script.sent(0, "a");
    let (rank, channel, id) = (rank(0), Channel::Sending, RequestId::from("a"));
    assert_eq!(broken(&mut engine), [Violation::NotFinished { rank, channel, id: id.clone() }]);
    run(&mut engine);
    script.sent(0, "a");
    assert_eq!(broken(&mut engine), [Violation::NotHeld { rank, channel, id }]);
    engine.check_empty().unwrap();
}

#[test]
fn reports_of_requests_that_do_not_load_are_violations() {
    let (mut engine, script) = scripted(&tp(1));
    submit(&mut engine, "a", 3);
    let not_loading =
        Violation::NotLoading { rank: rank(0), channel: Channel::Recving, id: "a".into() };
    script.received(0, "a");
    assert_eq!(broken(&mut engine), [not_loading]);
    script.matches(10, true);
    engine.submit(Request::new("b", prompt(2, 20), 9)).unwrap();
    engine.step().unwrap();
    script.received(0, "b");
    engine.step().unwrap();
    script.received(0, "b");
    assert!(matches!(&broken(&mut engine)[..], [Violation::NotLoading { .. }]));
    run(&mut engine);
    script.received(0, "a");
    assert!(matches!(&broken(&mut engine)[..], [Violation::AlreadyEnded { .. }]));
    engine.check_empty().unwrap();
}

#[test]
fn a_failure_without_an_end_is_a_violation() {
    let (mut engine, script) = scripted(&tp(1));
    script.matches(20, true);
    submit(&mut engine, "a", 1);
    engine.step().unwrap();
    script.failed(0, "a");
    assert_eq!(
        broken(&mut engine),
        [Violation::FailedWithoutFinished { rank: rank(0), id: "a".into() }]
    );
    assert_eq!(engine.status(&"a".into()), Some(RequestStatus::WaitingForRemoteKvs));
}

#[test]
fn block_errors_need_a_single_group_and_an_existing_block() {
    let (mut engine, script) = scripted(&config(&windowed(), 8, 32));
    script.state().invalid.insert(0, vec![BlockId(3)]);
    assert_eq!(broken(&mut engine), [Violation::BlockErrorsOfGroups { rank: rank(0), groups: 2 }]);
    let (mut engine, script) = scripted(&tp(1));
    script.state().invalid.insert(0, vec![BlockId::NULL, BlockId(32)]);
    let unknown = |block| Violation::UnknownBlock { rank: rank(0), block, blocks: 32 };
    assert_eq!(broken(&mut engine), [unknown(BlockId::NULL), unknown(BlockId(32))]);
}

#[test]
fn an_impossible_match_counts_as_no_match() {
    let too_many =
        |tokens, available| Violation::TooManyTokens { id: "a".into(), tokens, available };
    for (model, tokens, load_async, violation) in [
        (dense(), 0, true, Violation::AsyncWithoutTokens { id: "a".into() }),
        (dense(), 21, true, too_many(21, 20)),
        (dense(), 20, false, too_many(20, 19)),
        (hybrid(), 20, true, too_many(20, 19)),
        (windowed(), usize::MAX, false, too_many(usize::MAX, 19)),
    ] {
        let (mut engine, script) = scripted(&config(&model, 8, 32));
        script.matches(tokens, load_async);
        submit(&mut engine, "a", 3);
        assert_eq!(broken(&mut engine), [violation]);
        // The step with the violation has computed its first token.
        let right = continuation(&model, &prompt(1, 20), 3);
        assert_eq!(engine.take_outputs()[0].tokens, right[..1]);
        assert_eq!(run(&mut engine).of("a"), &right[1..]);
    }
}

#[test]
fn a_prompt_can_be_cut_to_one_token_at_least() {
    let (mut engine, script) = scripted(&tp(1));
    for (cut, right) in [(19, true), (0, false), (21, false)] {
        script.state().prompt_cut = Some(cut);
        submit(&mut engine, "a", 2);
        let mut outputs = crate::refengine::kit::Outputs::default();
        let mut broken = vec![];
        while engine.has_work() {
            broken.extend(engine.step().err());
            outputs.add(engine.take_outputs());
        }
        let len = if right { cut } else { 20 };
        assert_eq!(outputs.of("a"), continuation(&dense(), &prompt(1, len)[..len], 2));
        let violation = Violation::PromptCut { id: "a".into(), tokens: cut, prompt: 20 };
        assert_eq!(broken, if right { vec![] } else { vec![violation] });
    }
}

#[test]
fn a_connector_needs_a_worker_half_for_each_rank() {
    for workers in [1, 3] {
        let connector = Connector::Vllm(Script::new().connector(workers));
        let refused = Engine::new(tp(2), connector).unwrap_err();
        assert_eq!(refused, ConfigError::Workers { workers, ranks: 2 });
    }
}

#[test]
fn metadata_of_workers_reach_the_scheduler_half() {
    let (mut engine, script) = scripted(&tp(2));
    script.state().worker_meta = Some(vec![42]);
    engine.step().unwrap();
    let meta = script.state().outputs[0].worker_meta.clone();
    assert_eq!(meta, [(rank(0), vec![42]), (rank(1), vec![42])]);
}

#[test]
fn a_pinned_block_outlives_its_request() {
    let (mut engine, script) = scripted(&tp(1));
    submit(&mut engine, "a", 4);
    engine.step().unwrap();
    let block = engine.blocks(&"a".into()).unwrap()[0][1];
    let pins = script.state().pins.clone().unwrap();
    assert!(!pins.pin(0, BlockId(9)) && !pins.pin(0, BlockId(99)), "only blocks with users");
    assert!(pins.pin(0, block));
    run(&mut engine);
    assert_eq!(engine.check_empty().unwrap_err().blocks, [(0, block)]);
    pins.unpin(0, block);
    engine.check_empty().unwrap();
}

#[test]
fn a_block_with_a_load_error_is_removed_from_the_cache() {
    for policy in [LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute] {
        let mut config = tp(1);
        config.load_failure = policy;
        let (mut engine, script) = scripted(&config);
        submit(&mut engine, "a", 2);
        run(&mut engine);
        // The cache has two blocks; the second gets a load error.
        submit(&mut engine, "b", 2);
        script.state().invalid.insert(0, vec![BlockId(2)]);
        assert_eq!(engine.step().unwrap().tokens, 4);
        let ended = engine.take_outputs();
        let heir = match policy {
            LoadFailurePolicy::Fail => {
                assert_eq!(ended[0].finished.as_ref().unwrap().reason, FinishReason::Error);
                submit(&mut engine, "c", 2);
                "c"
            }
            LoadFailurePolicy::Recompute => "b",
        };
        assert_eq!(engine.step().unwrap().tokens, 12, "from the bad block on");
        assert_eq!(run(&mut engine).of(heir), continuation(&dense(), &prompt(1, 20), 2));
        engine.check_empty().unwrap();
    }
}

#[test]
fn a_request_that_waits_after_its_load_gives_its_blocks_to_a_running_one() {
    let mut config = config(&dense(), 8, 10);
    (config.max_running, config.prefix_caching) = (1, false);
    let (mut engine, script) = scripted(&config);
    script.matches(24, true);
    engine.submit(Request::new("waits", prompt(2, 40), 4)).unwrap();
    engine.step().unwrap();
    script.matches(0, false);
    // It comes to need eight of nine blocks; three of them are taken.
    submit(&mut engine, "runs", 40);
    engine.step().unwrap();
    script.received(0, "waits");
    let outputs = run(&mut engine);
    assert_eq!(outputs.of("runs"), continuation(&dense(), &prompt(1, 20), 40));
    assert_eq!(outputs.of("waits"), continuation(&dense(), &prompt(2, 40), 4));
    assert_eq!(engine.preemptions(), 1);
    engine.check_empty().unwrap();
}

#[test]
fn loaded_requests_without_room_to_continue_start_over() {
    // Each has two of four blocks and needs a third.
    let mut config = config(&dense(), 8, 5);
    config.prefix_caching = false;
    let (mut engine, script) = scripted(&config);
    script.matches(16, true);
    for id in ["a", "b"] {
        submit(&mut engine, id, 4);
    }
    engine.step().unwrap();
    script.matches(0, false);
    for id in ["a", "b"] {
        assert_eq!(engine.status(&id.into()), Some(RequestStatus::WaitingForRemoteKvs));
        script.received(0, id);
    }
    // The load never happened: only requests that start over produce right tokens.
    let outputs = run(&mut engine);
    let right = continuation(&dense(), &prompt(1, 20), 4);
    assert!(outputs.of("a") != right && outputs.of("b") == right);
    assert_eq!(engine.preemptions(), 1);
    engine.check_empty().unwrap();
}
