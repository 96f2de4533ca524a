//! TensorRT-LLM's seam: both requests get the transfer id.

use crate::kvferry_adapter::kit::{
    Asserts, Flow, Pair, bounded, config, dense, kvferry_adapter, node, prompt, trt_node, windowed,
};
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
use kvferry_refengine::{
    EngineError, FinishReason, GroupSpec, Launch, ModelSpec, Packing, RequestId, RequestStatus,
};
use std::collections::HashSet;
use std::time::Duration;

fn pair(flow: Flow, model: &ModelSpec, from: usize, to: usize) -> Pair {
    let mut prefill = config(model, 8, 64);
    (prefill.tp, prefill.chunk_tokens, prefill.launch) = (from, 16, Launch::Deferred);
    let mut decode = config(model, 8, 64);
    (decode.tp, decode.layout, decode.threads) = (to, Packing::Bhlnc, to == 2);
    Pair::of(flow, trt_node(&prefill, &kvferry_adapter()), trt_node(&decode, &kvferry_adapter()))
}

#[test]
fn engines_hand_off_over_tensorrt_llm_s_seam() {
    let _watched = bounded();
    let apart = ModelSpec::new(vec![GroupSpec::apart(4, 8).with_scales(3)], 3);
    for model in [dense(), windowed(), apart] {
        for flow in [Flow::ConsumerFirst, Flow::ProducerFirst] {
            for (from, to) in [(1, 1), (1, 2), (2, 1), (4, 2)] {
                let mut pair = pair(flow, &model, from, to);
                for n in 0..3 {
                    pair.hand_off(&format!("r{n}"), prompt(n, 30 + 7 * n as usize), 6);
                }
                pair.finish(&["r0", "r1", "r2"]);
                assert_eq!(pair.fetched(), (3, 0));
                assert_eq!(pair.decode.computed, 18, "something was not fetched");
            }
        }
    }
}

#[test]
fn engines_of_the_two_seams_hand_off_to_each_other() {
    let _watched = bounded();
    for flow in [Flow::ConsumerFirst, Flow::ProducerFirst] {
        for trt_produces in [true, false] {
            let config = config(&windowed(), 8, 64);
            let (trt, vllm) =
                (trt_node(&config, &kvferry_adapter()), node(&config, &kvferry_adapter()));
            let (from, to) = if trt_produces { (trt, vllm) } else { (vllm, trt) };
            let mut pair = Pair::of(flow, from, to);
            pair.hand_off("a", prompt(1, 50), 6);
            pair.finish(&["a"]);
            assert_eq!(pair.fetched(), (1, 0));
        }
    }
}

#[test]
fn a_failed_load_ends_the_engine_with_the_request_the_code_and_the_reason() {
    let _watched = bounded();
    let config = config(&dense(), 8, 64);
    let decode = KvferryAdapterConfig { timeout: Duration::from_millis(300), ..kvferry_adapter() };
    let decode = trt_node(&config, &decode);
    let mut pair = Pair::of(Flow::ConsumerFirst, trt_node(&config, &kvferry_adapter()), decode);
    pair.hand_off("a", prompt(1, 40), 6);
    pair.later.clear();
    let error = loop {
        match pair.decode.engine.step() {
            Ok(_) => std::thread::sleep(Duration::from_millis(1)),
            Err(error) => break error,
        }
    };
    let EngineError::Worker { fault, .. } = &error else { panic!("{error}") };
    assert!(fault.reason.contains("request 1 "), "{fault}");
    assert!(fault.reason.contains("deadline"), "{fault}");
}

#[test]
fn an_abort_during_a_load_takes_effect_after_it_and_gives_everything_back() {
    let _watched = bounded();
    let (id, mut seen) = (RequestId::from("a"), HashSet::new());
    for tick in 0..12 {
        let mut pair = pair(Flow::ConsumerFirst, &dense(), 2, 2);
        pair.hand_off("a", prompt(1, 40), 6);
        pair.hand_off("b", prompt(2, 40), 6);
        pair.ticks(tick);
        let status = pair.status(false, "a");
        seen.insert(status);
        assert_eq!(pair.decode.engine.abort(&id), status.is_some());
        let loading = status == Some(RequestStatus::WaitingForRemoteKvs);
        // It stays until the load has ended, which may be the case already.
        assert!(loading || pair.decode.engine.status(&id).is_none());
        pair.finish(&["b"]);
        if status.is_some() {
            assert_eq!(pair.ended("a"), Some(FinishReason::Abort));
        }
    }
    assert!(seen.contains(&Some(RequestStatus::WaitingForRemoteKvs)), "{seen:?}");
}
