//! What cannot be fetched, and what becomes of it.

use crate::journal::Journal;
use crate::kit::{Flow, Node, Pair, bounded, config, dense, ferry, hybrid, models, prompt, there};
use kvferry_connector::{HandoffId, Limits, Offered, produce};
use kvferry_proto::WireCode;
use kvferry_refengine::ferry::FerryConfig;
use kvferry_refengine::{
    EngineConfig, FinishReason, GroupSpec, LoadFailurePolicy, ModelSpec, Request, RequestId,
    RequestStatus, continuation,
};
use std::time::{Duration, Instant};

fn recomputing(model: &ModelSpec) -> EngineConfig {
    let mut config = config(model, 8, 64);
    config.load_failure = LoadFailurePolicy::Recompute;
    config
}

/// What a decode engine's request for a handoff at `pair`'s prefill engine carries.
fn asks(pair: &Pair, transfer: &str, id: &str, n: u64) -> Request {
    let address = pair.prefill.ferry.address(0).to_owned();
    let transfer = HandoffId::new(transfer).unwrap();
    let offered = Offered { transfer, address, engine: None, tokens: None };
    Request::new(id, prompt(n, 40), 6).with_params(offered.to_params())
}

#[test]
fn a_handoff_that_nobody_offers_ends_with_its_time_and_is_computed() {
    let _watched = bounded();
    for model in models() {
        for policy in [LoadFailurePolicy::Recompute, LoadFailurePolicy::Fail] {
            let mut config = config(&model, 8, 64);
            (config.tp, config.load_failure) = (2, policy);
            let timeout = Duration::from_millis(400);
            let decode = Node::new(&config, &FerryConfig { timeout, ..ferry() });
            let mut pair = Pair::of(Flow::Sequential, Node::new(&config, &ferry()), decode);
            let began = Instant::now();
            let request = asks(&pair, "unheard of", "a", 1);
            pair.wanted.insert("a".into(), (request.prompt.clone(), 6));
            pair.decode.engine.submit(request).unwrap();
            pair.assert_empty();
            assert!(began.elapsed() >= timeout && began.elapsed() < timeout * 20);
            assert_eq!(pair.fetched(), (0, 1));
            match policy {
                LoadFailurePolicy::Recompute => pair.assert_right("a"),
                LoadFailurePolicy::Fail => assert_eq!(pair.ended("a"), Some(FinishReason::Error)),
            }
            // The two go on with each other.
            pair.hand_off("b", prompt(2, 40), 6);
            pair.finish(&["b"]);
            assert_eq!(pair.fetched(), (1, 1));
        }
    }
}

#[test]
fn a_producer_s_request_that_fails_ends_its_consumer_s_or_has_it_computed() {
    let _watched = bounded();
    for policy in [LoadFailurePolicy::Recompute, LoadFailurePolicy::Fail] {
        let mut config = config(&hybrid(), 8, 64);
        (config.tp, config.load_failure, config.chunk_tokens) = (2, policy, 8);
        let mut pair = Pair::new(Flow::ConsumerFirst, &config, &config);
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
fn two_requests_for_one_handoff_are_both_right() {
    let _watched = bounded();
    let config = recomputing(&dense());
    let mut pair = Pair::new(Flow::ConsumerFirst, &config, &config);
    pair.hand_off("a", prompt(1, 40), 6);
    let again = pair.offered("a");
    let again = Request::new("again", prompt(1, 40), 6).with_params(again);
    pair.decode.engine.submit(again).unwrap();
    pair.wanted.insert("again".into(), (prompt(1, 40), 6));
    pair.finish(&["a", "again"]);
    assert_eq!(pair.fetched(), (1, 0));
}

#[test]
fn of_two_producer_s_requests_with_one_handoff_s_name_the_first_is_handed_over() {
    let _watched = bounded();
    let config = recomputing(&dense());
    let mut pair = Pair::new(Flow::ProducerFirst, &config, &config);
    let transfer = crate::kit::transfer("a");
    let twin = Request::new("twin", prompt(9, 40), 1).with_params(produce(Some(&transfer)));
    pair.hand_off("a", prompt(1, 40), 6);
    pair.prefill.engine.submit(twin).unwrap();
    pair.finish(&["a"]);
    assert_eq!(pair.fetched(), (1, 0));
    let ended = &pair.prefilled.finished[&RequestId::from("twin")];
    assert_eq!((ended.reason, &ended.params), (FinishReason::Length, &None));
}

#[test]
fn a_handoff_s_name_that_was_used_before_fails_at_once_and_is_computed() {
    let _watched = bounded();
    let config = recomputing(&dense());
    let mut pair = Pair::new(Flow::ProducerFirst, &config, &config);
    pair.hand_off("a", prompt(1, 40), 6);
    pair.finish(&["a"]);
    let began = Instant::now();
    let request = asks(&pair, crate::kit::transfer("a").as_str(), "late", 2);
    pair.wanted.insert("late".into(), (request.prompt.clone(), 6));
    pair.decode.engine.submit(request).unwrap();
    pair.finish(&["late"]);
    assert!(began.elapsed() < ferry().timeout / 2, "it was waited for");
}

#[test]
fn engines_of_different_models_refuse_each_other_with_both_numbers_on_both_sides() {
    let _watched = bounded();
    let journal = Journal::keep();
    let model = |bytes| ModelSpec::new(vec![GroupSpec::full(2, bytes)], 2);
    for flow in Flow::ALL {
        journal.take();
        let (mut prefill, decode) = (recomputing(&model(8)), recomputing(&model(13)));
        prefill.tp = 2;
        let mut pair = Pair::new(flow, &prefill, &decode);
        let began = Instant::now();
        pair.hand_off("a", prompt(1, 40), 6);
        pair.finish(&["a"]);
        assert!(began.elapsed() < ferry().timeout / 2, "{flow:?}: somebody waited");
        assert_eq!(pair.decode.ferry.outcomes(), [(WireCode::LayoutMismatch, 1)]);
        // 16 and 26: keys and values are packed.
        let journal = journal.take();
        let names = |line: &&String| line.contains("16") && line.contains("26");
        let said: Vec<_> = journal.iter().filter(names).collect();
        let consumer = said.iter().any(|line| line.contains("KV can't be fetched"));
        assert!(consumer, "{flow:?}: the consumer does not say it: {journal:#?}");
        let producer = said.iter().any(|line| !line.contains("KV can't be fetched"));
        assert!(producer, "{flow:?}: the producer does not say it: {journal:#?}");
    }
}

#[test]
fn engines_of_different_secrets_do_not_hand_off() {
    let _watched = bounded();
    let config = recomputing(&dense());
    for flow in Flow::ALL {
        // Nobody who could know it tells the producer that it is not needed.
        let limits = Limits { offer_ttl: Duration::from_millis(500), ..Limits::default() };
        let prefill = FerryConfig { limits, ..ferry() };
        let prefill = Node::with(&config, &prefill, "tcp", "ours");
        let decode = Node::with(&config, &ferry(), "tcp", "theirs");
        let mut pair = Pair::of(flow, prefill, decode);
        let began = Instant::now();
        pair.hand_off("a", prompt(1, 40), 6);
        pair.finish(&["a"]);
        assert!(began.elapsed() < ferry().timeout / 2, "{flow:?}: somebody waited");
        assert_eq!(pair.fetched(), (0, 1));
    }
}

#[test]
fn what_a_producer_that_went_away_had_is_computed() {
    let _watched = bounded();
    for (flow, ticks) in [(Flow::Sequential, 0), (Flow::ConsumerFirst, 0), (Flow::ConsumerFirst, 6)]
    {
        let mut config = recomputing(&dense());
        (config.tp, config.chunk_tokens) = (2, 8);
        let mut pair = Pair::new(flow, &config, &config);
        pair.hold_decodes = flow == Flow::Sequential;
        pair.hand_off("a", prompt(1, 90), 6);
        match flow {
            Flow::Sequential => pair.tick_until(|pair| !pair.later.is_empty()),
            _ => {
                for _ in 0..3 + ticks {
                    pair.tick();
                }
            }
        }
        // Another one takes its place, and knows nothing.
        pair.prefill = Node::new(&config, &ferry());
        pair.hold_decodes = false;
        pair.later.retain(|(_, prefill, _)| !prefill);
        let began = Instant::now();
        pair.finish(&["a"]);
        assert!(began.elapsed() < ferry().timeout / 2, "{flow:?}: it was waited for");
        // The new one hands over as the old one did.
        pair.hand_off("b", prompt(2, 40), 6);
        pair.finish(&["b"]);
        assert_eq!(pair.fetched(), (1, 1));
    }
}

#[test]
fn parameters_that_ask_for_what_cannot_be_are_computed_without_a_handoff() {
    let _watched = bounded();
    let config = recomputing(&dense());
    let mut pair = Pair::new(Flow::Sequential, &config, &config);
    let mut missing = asks(&pair, "x", "a", 1);
    missing.params.as_mut().unwrap().remove("remote_address");
    let mut nowhere = asks(&pair, "y", "b", 2);
    let params = nowhere.params.as_mut().unwrap();
    params.insert("remote_address".to_owned(), "127.0.0.1:1".into());
    for request in [missing, nowhere] {
        pair.wanted.insert(request.id.clone(), (request.prompt.clone(), 6));
        pair.decode.engine.submit(request).unwrap();
    }
    pair.finish(&["a", "b"]);
    assert_eq!(pair.fetched().0, 0);
    let right = continuation(&dense(), &prompt(1, 40), 6);
    assert_eq!(pair.said.of("a"), right);
}
