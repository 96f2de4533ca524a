//! Orders of arrival, ways of announcing, and cached tokens.

use crate::kvferry_adapter::kit::{
    Asserts, Flow, Pair, alike, bounded, config, dense, hybrid, kvferry_adapter, models, pair,
    prompt, there, transfer,
};
use kvferry_connector::{Announce, producer_params};
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
use kvferry_refengine::{FinishReason, Launch, Request, RequestStatus, continuation};
use std::time::Duration;

const ANNOUNCE: [Announce; 4] = [
    Announce::Layers { pieces: 1, least_bytes: 0 },
    Announce::Layers { pieces: 3, least_bytes: 0 },
    Announce::Chunks,
    Announce::End,
];

#[test]
fn a_second_engine_decodes_the_same_tokens_in_either_order_of_arrival() {
    let _watched = bounded();
    for model in models() {
        for flow in Flow::ALL {
            let config = config(&model, 8, 64);
            let mut pair = pair(flow, &config, &config);
            for n in 0..4 {
                pair.hand_off(&format!("r{n}"), prompt(n, 30 + 7 * n as usize), 8);
            }
            pair.finish(&["r0", "r1", "r2", "r3"]);
            // The last token of each prompt and the tokens after it.
            assert_eq!(pair.decode.computed, 4 * 8, "{flow:?}: something was not fetched");
        }
    }
}

#[test]
fn tokens_are_right_with_every_way_of_announcing() {
    let _watched = bounded();
    for announce in ANNOUNCE {
        for layer_events in [true, false] {
            for launch in [Launch::Eager, Launch::Deferred] {
                for flow in [Flow::ConsumerFirst, Flow::Sequential] {
                    let mut config = config(&hybrid(), 8, 64);
                    (config.launch, config.chunk_tokens) = (launch, 16);
                    let kvferry_adapter =
                        KvferryAdapterConfig { announce, layer_events, ..kvferry_adapter() };
                    let mut pair = alike(flow, &config, &kvferry_adapter);
                    pair.hand_off("a", prompt(1, 90), 6);
                    pair.hand_off("b", prompt(2, 33), 6);
                    pair.finish(&["a", "b"]);
                    assert_eq!(pair.decode.computed, 12, "{announce:?} {layer_events} {launch:?}");
                }
            }
        }
    }
}

#[test]
fn nothing_is_fetched_before_it_is_computed() {
    let _watched = bounded();
    for announce in ANNOUNCE {
        for layer_events in [true, false] {
            let mut config = config(&dense(), 16, 70);
            // A step of this many tokens takes far longer than their fetch.
            (config.step_tokens, config.chunk_tokens) = (1000, 1000);
            config.launch = Launch::Deferred;
            let kvferry_adapter =
                KvferryAdapterConfig { announce, layer_events, ..kvferry_adapter() };
            let mut pair = alike(Flow::ConsumerFirst, &config, &kvferry_adapter);
            pair.hand_off("warm", prompt(9, 20), 1);
            pair.run();
            pair.hand_off("a", prompt(1, 800), 2);
            pair.finish(&["a"]);
        }
    }
}

#[test]
fn computed_chunks_are_fetched_during_the_prefill_unless_announced_at_its_end() {
    let _watched = bounded();
    // Keys and values of four heads, in three layers.
    let token_bytes = 4 * 2 * 12 * 3;
    for announce in ANNOUNCE {
        for layer_events in [true, false] {
            let mut config = config(&dense(), 8, 64);
            config.chunk_tokens = 16;
            let kvferry_adapter =
                KvferryAdapterConfig { announce, layer_events, ..kvferry_adapter() };
            let mut pair = alike(Flow::ConsumerFirst, &config, &kvferry_adapter);
            pair.hand_off("a", prompt(1, 96), 4);
            pair.tick_until(|pair| pair.later.is_empty());
            while pair.prefill.computed < 80 {
                pair.prefill.step();
            }
            if announce == Announce::End {
                std::thread::sleep(Duration::from_millis(50));
                assert_eq!(pair.decode.bytes_read(), 0);
            } else {
                while pair.decode.bytes_read() < 80 * token_bytes {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            assert!(pair.prefilled.finished.is_empty(), "its last chunk is not computed");
            pair.finish(&["a"]);
            assert_eq!(pair.decode.bytes_read(), 96 * token_bytes, "each byte once");
        }
    }
}

#[test]
fn cached_tokens_of_the_consumer_are_not_fetched() {
    let _watched = bounded();
    for model in models() {
        for flow in Flow::ALL {
            let config = config(&model, 8, 64);
            let mut pair = pair(flow, &config, &config);
            // 41 tokens: with a state, 40 of them are handed over, a whole number of blocks.
            for (n, len) in [41, 41, 57].into_iter().enumerate() {
                pair.hand_off(&format!("r{n}"), prompt(1, len), 4);
                pair.run();
                pair.assert_right(&format!("r{n}"));
                assert_eq!(pair.decode.computed, 4 * (n + 1));
            }
            pair.assert_empty();
        }
    }
}

#[test]
fn a_consumer_with_all_tokens_cached_frees_the_producer() {
    let _watched = bounded();
    for flow in Flow::ALL {
        let config = config(&hybrid(), 8, 64);
        let mut pair = pair(flow, &config, &config);
        pair.hand_off("first", prompt(1, 41), 4);
        pair.run();
        // 40 tokens are handed over, a whole number of blocks.
        pair.hand_off("second", prompt(1, 41), 4);
        while pair.ended("second").is_none() {
            pair.tick();
            let status = pair.status(false, "second");
            assert_ne!(status, Some(RequestStatus::WaitingForRemoteKvs), "{flow:?}: fetched");
        }
        pair.finish(&["first", "second"]);
        let freed = pair.decode.kvferry_adapter.take_stats().freed;
        assert_eq!((freed, pair.fetched()), (1, (1, 0)), "{flow:?}");
        // The consumer may say so before the prefill has ended. No offer has expired.
        let withdrawn = pair.prefill.kvferry_adapter.take_stats().withdrawn;
        assert!(withdrawn.keys().all(|code| code == "not_needed"), "{flow:?}: {withdrawn:?}");
    }
}

#[test]
fn side_data_is_carried_if_a_request_completes_with_its_end() {
    let _watched = bounded();
    let mut config = config(&dense(), 8, 64);
    config.tp = 2;
    for flow in Flow::ALL {
        let kvferry_adapter = KvferryAdapterConfig { eager: false, ..kvferry_adapter() };
        let mut pair = alike(flow, &config, &kvferry_adapter);
        pair.hand_off("a", prompt(1, 50), 4);
        let mut came = vec![];
        while came.is_empty() && pair.tick() {
            came = pair.decode.kvferry_adapter.take_side_data("a");
        }
        pair.finish(&["a"]);
        assert!(!came.is_empty(), "{flow:?}: nothing came");
        let first = pair.outputs.of("a")[0].to_le_bytes();
        assert!(came.iter().all(|data| *data == first), "{flow:?}: {came:?}");
    }
}

#[test]
fn a_request_whose_first_token_ends_it_is_handed_over() {
    let _watched = bounded();
    let config = config(&dense(), 8, 64);
    let stop = continuation(&dense(), &prompt(1, 30), 1)[0];
    for (flow, eager) in Flow::ALL.into_iter().flat_map(|flow| [(flow, true), (flow, false)]) {
        let kvferry_adapter = KvferryAdapterConfig { eager, ..kvferry_adapter() };
        let mut pair = alike(flow, &config, &kvferry_adapter);
        pair.prefill_stop = Some(stop);
        pair.hand_off("a", prompt(1, 30), 4);
        pair.finish(&["a"]);
        let ended = &pair.prefilled.finished[&there("a")];
        assert_eq!((ended.reason, pair.fetched()), (FinishReason::Stop, (1, 0)), "{flow:?}");
    }
}

/// Hands requests over that all have the transfer id `batch`: their prompts by number.
fn batch(pair: &mut Pair, prompts: &[u64]) {
    for (at, n) in prompts.iter().enumerate() {
        let (id, prompt) = (format!("a{at}"), prompt(*n, 40));
        pair.wanted.insert(id.as_str().into(), (prompt.clone(), 6));
        let produces = producer_params(Some(&transfer("batch")));
        let first = Request::new(there(&id), prompt.clone(), 1).with_params(produces);
        let second = Request::new(id.as_str(), prompt, 6).with_params(pair.offered("batch"));
        let ahead = if pair.flow == Flow::ProducerFirst { (0, 3) } else { (3, 0) };
        pair.later.extend([(ahead.0, true, first), (ahead.1, false, second)]);
    }
}

#[test]
fn requests_with_one_transfer_id_get_the_kv_of_their_own_prompts() {
    let _watched = bounded();
    let config = config(&dense(), 8, 64);
    for flow in [Flow::ConsumerFirst, Flow::ProducerFirst] {
        let mut pair = pair(flow, &config, &config);
        batch(&mut pair, &[1, 2, 3]);
        pair.finish(&["a0", "a1", "a2"]);
        assert_eq!(pair.fetched(), (3, 0), "{flow:?}");
    }
}

#[test]
fn of_several_requests_for_one_prompt_one_is_fetched_and_the_others_wait_for_it() {
    let _watched = bounded();
    for (flow, prefix_caching) in [Flow::ConsumerFirst, Flow::ProducerFirst]
        .into_iter()
        .flat_map(|it| [(it, true), (it, false)])
    {
        let mut config = config(&dense(), 8, 64);
        config.prefix_caching = prefix_caching;
        let mut pair = pair(flow, &config, &config);
        batch(&mut pair, &[1, 1, 1]);
        pair.finish(&["a0", "a1", "a2"]);
        assert_eq!(pair.fetched(), (1, 0), "{flow:?}");
        // The prefill computes the prompt once or three times; decode computes what no load gave it.
        let computed = pair.decode.computed;
        let most = if prefix_caching { 3 * (6 + 8) } else { 2 * 40 + 3 * 6 };
        assert!(computed <= most, "{flow:?} {prefix_caching}: {computed}");
    }
}
