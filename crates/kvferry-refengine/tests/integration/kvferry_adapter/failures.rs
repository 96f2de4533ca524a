//! Fetches that fail.

use crate::kvferry_adapter::kit::{
    Asserts, Flow, Pair, bounded, config, dense, hybrid, kvferry_adapter, models, node, pair,
    prompt, there,
};
use kvferry_connector::{ConsumerParams, HandoffId};
use kvferry_proto::WireCode;
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
use kvferry_refengine::{
    EngineConfig, FinishReason, GroupSpec, LoadFailurePolicy, ModelSpec, Request, RequestStatus,
};
use kvferry_testkit::Journal;
use std::time::{Duration, Instant};
use tracing::Level;

fn recomputing(model: &ModelSpec) -> EngineConfig {
    let mut config = config(model, 8, 64);
    config.load_failure = LoadFailurePolicy::Recompute;
    config
}

/// Parameters of a decode request for a handoff at `pair`'s prefill engine.
fn asks(pair: &Pair, transfer: &str, id: &str, n: u64) -> Request {
    let address = pair.prefill.kvferry_adapter.address(0).parse().unwrap();
    let transfer = HandoffId::new(transfer).unwrap();
    let offered = ConsumerParams { transfer, address, engine: None, tokens: None };
    Request::new(id, prompt(n, 40), 6).with_params(offered.to_params())
}

#[test]
fn a_fetch_without_an_offer_ends_at_its_deadline_and_is_computed() {
    let _watched = bounded();
    for model in models() {
        for policy in [LoadFailurePolicy::Recompute, LoadFailurePolicy::Fail] {
            let mut config = config(&model, 8, 64);
            (config.tp, config.load_failure) = (2, policy);
            let timeout = Duration::from_millis(400);
            let decode = node(&config, &KvferryAdapterConfig { timeout, ..kvferry_adapter() });
            let mut pair = Pair::of(Flow::Sequential, node(&config, &kvferry_adapter()), decode);
            let began = Instant::now();
            let request = asks(&pair, "unheard of", "a", 1);
            pair.wanted.insert("a".into(), (request.prompt.clone(), 6));
            pair.decode.engine.submit(request).unwrap();
            pair.assert_empty();
            assert!(began.elapsed() >= timeout);
            assert_eq!(pair.decode.kvferry_adapter.outcomes(), [(WireCode::Deadline, 1)]);
            match policy {
                LoadFailurePolicy::Recompute => pair.assert_right("a"),
                LoadFailurePolicy::Fail => assert_eq!(pair.ended("a"), Some(FinishReason::Error)),
            }
            // The prefill engine goes on. This decode engine has the time that a handoff takes on a busy machine.
            let patient = node(&config, &kvferry_adapter());
            let mut pair = Pair::of(Flow::Sequential, pair.prefill, patient);
            pair.works("b", 2);
            assert_eq!(pair.fetched(), (1, 0));
        }
    }
}

#[test]
fn a_failed_producer_request_ends_its_consumer_or_is_computed_by_policy() {
    let _watched = bounded();
    for policy in [LoadFailurePolicy::Recompute, LoadFailurePolicy::Fail] {
        let mut config = config(&hybrid(), 8, 64);
        (config.tp, config.load_failure, config.chunk_tokens) = (2, policy, 8);
        let mut pair = pair(Flow::ConsumerFirst, &config, &config);
        pair.hand_off("a", prompt(1, 60), 6);
        pair.tick_until(|pair| pair.status(true, "a") == Some(RequestStatus::Running));
        pair.tick();
        assert!(pair.prefill.engine.abort(&there("a")));
        pair.assert_empty();
        assert_eq!(pair.fetched(), (0, 1));
        match policy {
            LoadFailurePolicy::Recompute => pair.assert_right("a"),
            LoadFailurePolicy::Fail => assert_eq!(pair.ended("a"), Some(FinishReason::Error)),
        }
    }
}

#[test]
fn a_reused_transfer_id_fails_at_once_and_is_computed() {
    let _watched = bounded();
    let mut config = recomputing(&dense());
    config.prefix_caching = false;
    let mut pair = pair(Flow::ProducerFirst, &config, &config);
    pair.works("a", 1);
    let request = asks(&pair, crate::kvferry_adapter::kit::transfer("a").as_str(), "late", 1);
    pair.wanted.insert("late".into(), (request.prompt.clone(), 6));
    pair.decode.engine.submit(request).unwrap();
    pair.finish(&["late"]);
}

#[test]
fn engines_of_different_models_refuse_each_other_with_both_numbers() {
    let _watched = bounded();
    let journal = Journal::new("", Level::TRACE);
    tracing::subscriber::set_global_default(journal.clone()).expect("no other test sets one");
    let model = |bytes| ModelSpec::new(vec![GroupSpec::full(2, bytes)], 2);
    for flow in Flow::ALL {
        journal.take();
        let (mut prefill, decode) = (recomputing(&model(8)), recomputing(&model(13)));
        prefill.tp = 2;
        let mut pair = pair(flow, &prefill, &decode);
        pair.works("a", 1);
        assert_eq!(pair.decode.kvferry_adapter.outcomes(), [(WireCode::LayoutMismatch, 1)]);
        // 16 and 26: keys and values are packed.
        let journal = journal.take();
        let names = |line: &&String| line.contains("16") && line.contains("26");
        let outputs: Vec<_> = journal.iter().filter(names).collect();
        let consumer = outputs.iter().any(|line| line.contains("KV can't be fetched"));
        assert!(consumer, "{flow:?}: the consumer does not log it: {journal:#?}");
        let producer = outputs.iter().any(|line| !line.contains("KV can't be fetched"));
        assert!(producer, "{flow:?}: the producer does not log it: {journal:#?}");
    }
}

#[test]
fn a_consumer_computes_the_requests_of_a_producer_that_is_gone() {
    let _watched = bounded();
    for (flow, ticks) in [(Flow::Sequential, 0), (Flow::ConsumerFirst, 0), (Flow::ConsumerFirst, 6)]
    {
        let mut config = recomputing(&dense());
        (config.tp, config.chunk_tokens) = (2, 8);
        let mut pair = pair(flow, &config, &config);
        pair.hold_decodes = flow == Flow::Sequential;
        pair.hand_off("a", prompt(1, 90), 6);
        match flow {
            Flow::Sequential => pair.tick_until(|pair| !pair.later.is_empty()),
            _ => pair.ticks(3 + ticks),
        }
        // A new engine at the same address, without any requests.
        pair.prefill = node(&config, &kvferry_adapter());
        pair.hold_decodes = false;
        pair.later.retain(|(_, prefill, _)| !prefill);
        pair.finish(&["a"]);
        // The new engine hands over.
        pair.works("b", 2);
        assert_eq!(pair.fetched(), (1, 1));
    }
}

#[test]
fn after_a_reset_of_the_producers_cache_its_offers_are_never_loaded() {
    let _watched = bounded();
    let config = recomputing(&dense());
    let mut pair = pair(Flow::Sequential, &config, &config);
    pair.hold_decodes = true;
    pair.hand_off("a", prompt(1, 40), 6);
    pair.tick_until(|pair| !pair.later.is_empty());
    assert!(!pair.prefill.engine.reset_prefix_cache(), "its blocks are held");
    // The ranks withdraw it, and the blocks come back.
    while pair.prefill.engine.has_work() {
        pair.tick();
    }
    pair.prefill.engine.check_empty().unwrap();
    assert!(pair.prefill.engine.reset_prefix_cache());
    pair.hold_decodes = false;
    pair.finish(&["a"]);
    assert_eq!(pair.fetched(), (0, 1));
    pair.works("b", 2);
}
