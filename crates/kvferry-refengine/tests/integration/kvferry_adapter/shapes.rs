//! Engines of different ranks, layouts, blocks and groups.

use crate::kvferry_adapter::kit::{
    Asserts, Flow, Random, bounded, config, hybrid, pair, prompt, windowed,
};
use kvferry_refengine::{
    Attention, EngineConfig, GroupCache, GroupSpec, LoadFailurePolicy, ModelSpec, Packing, Request,
    Storage,
};

fn ranks(model: &ModelSpec, (tp, pp): (usize, usize)) -> EngineConfig {
    let mut config = config(model, 8, 64);
    (config.tp, config.pp, config.chunk_tokens) = (tp, pp, 16);
    config
}

fn assert_hand_off(flow: Flow, prefill: &EngineConfig, decode: &EngineConfig) {
    let mut pair = pair(flow, prefill, decode);
    pair.hand_off("a", prompt(1, 45), 6);
    pair.hand_off("b", prompt(2, 20), 6);
    pair.finish(&["a", "b"]);
    assert_eq!(pair.fetched(), (2, 0));
    assert_eq!(pair.decode.computed, 12, "something was not fetched");
}

/// TP and PP ranks of a producer and of a consumer.
const RANKS: [((usize, usize), (usize, usize)); 5] =
    [((1, 1), (4, 1)), ((4, 1), (1, 1)), ((2, 2), (2, 1)), ((2, 2), (1, 3)), ((1, 3), (4, 2))];

#[test]
fn every_kind_of_group_is_handed_over_between_engines_of_different_ranks() {
    let _watched = bounded();
    for group in [
        GroupSpec::full(4, 8),
        GroupSpec::full(1, 8),
        GroupSpec::full(2, 8).with_scales(3),
        GroupSpec::apart(4, 6),
        GroupSpec::apart(2, 6).with_scales(4),
        GroupSpec::mla(40),
        GroupSpec::window(2, 8, 19),
        GroupSpec::window(4, 8, 3),
        GroupSpec::state(4, 9, 40),
        GroupSpec::state(1, 9, 40),
    ] {
        for (n, (from, to)) in RANKS.into_iter().enumerate() {
            let model = ModelSpec::new(vec![group.clone()], 3);
            assert_hand_off(Flow::ALL[n % 3], &ranks(&model, from), &ranks(&model, to));
        }
    }
}

#[test]
fn engines_with_different_orders_of_axes_hand_off() {
    let _watched = bounded();
    for from in Packing::ALL {
        for to in Packing::ALL {
            let (mut prefill, mut decode) = (ranks(&hybrid(), (2, 1)), ranks(&hybrid(), (1, 1)));
            (prefill.layout, decode.layout) = (from, to);
            assert_hand_off(Flow::ConsumerFirst, &prefill, &decode);
        }
    }
}

#[test]
fn engines_of_different_blocks_and_storages_hand_off() {
    let _watched = bounded();
    let mut random = Random::new(5);
    for n in 0..40 {
        let model = random.pick(&[hybrid(), windowed()]);
        let shape = |random: &mut Random| {
            let mut config = ranks(&model, (random.pick(&[1, 2]), 1));
            config.storage = random.pick(&[Storage::Separate, Storage::Shared]);
            config.layout = random.pick(&[Packing::Lbhnc, Packing::Bhlnc, Packing::Blnhc]);
            for (group, cache) in model.groups.iter().zip(&mut config.groups) {
                *cache = GroupCache::new(random.pick(&[4, 8, 16]), 120);
                if group.attention == Attention::State {
                    cache.scratch = random.pick(&[0, 2]);
                }
            }
            if config.storage == Storage::Separate && model.groups.len() == 2 {
                config.groups[0].kernel_split = 2;
            }
            config
        };
        let (mut prefill, decode) = (shape(&mut random), shape(&mut random));
        // A consumer's block is not fetched if the producer has only half of it.
        let tokens = |config: &EngineConfig| config.groups[1].block_tokens;
        prefill.groups[1].block_tokens = tokens(&prefill).max(tokens(&decode));
        let flow = Flow::ALL[n % 3];
        let mut pair = pair(flow, &prefill, &decode);
        for n in 0..3 {
            // It shares a prefix with the one before.
            let mut tokens = prompt(7, 24);
            tokens.extend(prompt(n, 10 + random.below(40)));
            pair.hand_off(&format!("r{n}"), tokens, 6);
        }
        pair.finish(&["r0", "r1", "r2"]);
        assert_eq!(pair.fetched().1, 0);
    }
}

#[test]
fn a_window_whose_first_block_is_half_overwritten_is_not_accepted() {
    let _watched = bounded();
    let model = windowed();
    for len in 30..46 {
        let (mut prefill, mut decode) = (ranks(&model, (1, 1)), ranks(&model, (1, 1)));
        prefill.groups[1].block_tokens = 4;
        decode.groups[1].block_tokens = 16;
        decode.load_failure = LoadFailurePolicy::Recompute;
        let mut pair = pair(Flow::Sequential, &prefill, &decode);
        pair.hand_off("a", prompt(1, len), 6);
        pair.run();
        // A prefix of it needs more of the first block of the window.
        pair.hand_off("b", prompt(1, len - 3), 6);
        pair.finish(&["a", "b"]);
    }
}

#[test]
fn scratch_blocks_of_speculative_decoding_are_never_taken_for_the_state() {
    let _watched = bounded();
    let with = |scratch, chunk| {
        let mut config = ranks(&hybrid(), (1, 1));
        config.chunk_tokens = chunk;
        for (group, cache) in config.model.groups.iter().zip(&mut config.groups) {
            cache.scratch = if group.attention == Attention::State { scratch } else { 0 };
        }
        config
    };
    for (flow, chunk) in Flow::ALL.into_iter().flat_map(|flow| [(flow, 5), (flow, 20), (flow, 64)])
    {
        for (from, to) in [(2, 0), (0, 3), (1, 2)] {
            assert_hand_off(flow, &with(from, chunk), &with(to, chunk));
        }
    }
}

#[test]
fn a_block_that_leaves_the_window_when_the_prompt_ends_is_neither_offered_nor_needed() {
    let _watched = bounded();
    // For every offset of the window in its first block.
    for len in 30..46 {
        let mut config = ranks(&windowed(), (1, 1));
        config.prefix_caching = false;
        let mut pair = pair(Flow::Sequential, &config, &config);
        pair.hold_decodes = true;
        pair.hand_off("a", prompt(1, len), 6);
        pair.tick_until(|pair| !pair.later.is_empty());
        // The blocks that are free again are overwritten.
        pair.prefill.engine.submit(Request::new("other", prompt(2, 20), 2)).unwrap();
        pair.ticks(4);
        pair.hold_decodes = false;
        pair.finish(&["a"]);
        assert_eq!((pair.fetched(), pair.decode.computed), ((1, 0), 6), "{len}");
    }
}
