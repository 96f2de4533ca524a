//! An engine produces its model's tokens with any settings.

use crate::refengine::kit::{
    assert_right, config, engine, hybrid, models, prompt, requests, run, windowed,
};
use kvferry_refengine::{
    Attention, ConfigError, Connector, Engine, FinishReason, GroupCache, Packing, Request,
    RequestId, Storage, SubmitError, continuation,
};
use proptest::prelude::*;

#[test]
fn tokens_are_the_same_in_every_layout_and_storage() {
    for model in models() {
        for layout in Packing::ALL {
            for storage in [Storage::Separate, Storage::Shared] {
                if (layout, storage) == (Packing::Lhbnc, Storage::Shared) {
                    continue;
                }
                let mut config = config(&model, 8, 200);
                (config.layout, config.storage, config.tp) = (layout, storage, 2);
                assert_right(engine(config), &requests(3, 30, 9));
            }
        }
    }
}

#[test]
fn tokens_are_the_same_with_block_sizes_per_group_and_kernel_blocks() {
    let mut config = config(&hybrid(), 8, 64);
    config.groups[0] = GroupCache { kernel_split: 3, ..GroupCache::new(12, 40) };
    config.groups[1] = GroupCache { kernel_split: 2, ..GroupCache::new(4, 60) };
    config.groups[2].block_tokens = 6;
    for layout in Packing::ALL {
        config.layout = layout;
        let again = [requests(3, 60, 7), requests(3, 60, 12)];
        let engine = assert_right(engine(config.clone()), &again[0]);
        assert_right(engine, &again[1]);
    }
}

#[test]
fn a_cached_prefix_is_not_computed_again() {
    for model in models() {
        let mut engine = engine(config(&model, 8, 64));
        let long = prompt(1, 61);
        for (n, len) in [61, 61, 50, 40].into_iter().enumerate() {
            engine.submit(Request::new(format!("r{n}"), long[..len].to_vec(), 4)).unwrap();
            let first = engine.step().unwrap().tokens;
            let cached = if n == 0 { 0 } else { (len - 1) / 8 * 8 };
            // A window or state is cached only if its last blocks are.
            let hybrid = model.groups.len() > 1;
            assert!(first == len - cached || hybrid && first <= len, "{first} of {len} tokens");
            assert!(n != 1 || first < len, "the second time, some tokens are cached");
            let outputs = run(&mut engine);
            assert_eq!(outputs.of(&format!("r{n}")), continuation(&model, &long[..len], 4));
        }
        engine.check_empty().unwrap();
        assert!(engine.reset_prefix_cache());
        engine.submit(Request::new("last", long.clone(), 4)).unwrap();
        assert_eq!(engine.step().unwrap().tokens, 61);
    }
}

#[test]
fn preempted_requests_produce_the_same_tokens() {
    for model in models() {
        for prefix_caching in [true, false] {
            let mut config = config(&model, 4, 26);
            (config.prefix_caching, config.step_tokens) = (prefix_caching, 30);
            let engine = assert_right(engine(config), &requests(6, 20, 40));
            assert!(engine.preemptions() > 0);
        }
    }
}

#[test]
fn a_request_that_only_just_fits_is_served() {
    for model in models() {
        for chunk_tokens in [5, 64] {
            let mut config = config(&model, 4, 26);
            config.chunk_tokens = chunk_tokens;
            config.groups.iter_mut().for_each(|group| group.blocks = 13);
            let engine = engine(config);
            assert_right(
                engine,
                &[
                    Request::new("a", prompt(1, 36), 12),
                    Request::new("b", prompt(1, 36), 12),
                    Request::new("c", prompt(2, 20), 28),
                ],
            );
        }
    }
}

#[test]
fn a_request_that_could_never_be_served_is_refused() {
    let mut config = config(&windowed(), 4, 13);
    config.max_tokens = 60;
    let mut engine = engine(config);
    let mut submit = |prompt: Vec<u32>, max_tokens| {
        engine.submit(Request::new("a", prompt, max_tokens)).unwrap_err()
    };
    assert_eq!(submit(vec![], 1), SubmitError::EmptyPrompt);
    assert_eq!(submit(vec![1], 0), SubmitError::NoTokens);
    assert_eq!(submit(prompt(1, 50), 11), SubmitError::TooLong { tokens: 61, most: 60 });
    assert_eq!(submit(prompt(1, 40), 9), SubmitError::TooLarge { blocks: 13, capacity: 12 });
    assert_eq!(submit(vec![50_021], 1), SubmitError::Vocabulary { token: 50_021, vocab: 50_021 });
    engine.submit(Request::new("a", vec![1], 1)).unwrap();
    let again = engine.submit(Request::new("a", vec![1], 1)).unwrap_err();
    assert_eq!(again, SubmitError::Duplicate { id: "a".into() });
}

#[test]
fn a_request_ends_at_its_stop_token() {
    let model = windowed();
    let outputs = continuation(&model, &prompt(1, 9), 8);
    let mut request = Request::new("a", prompt(1, 9), 8);
    request.stop_token = Some(outputs[4]);
    let mut engine = engine(config(&model, 4, 20));
    engine.submit(request).unwrap();
    let stopped = run(&mut engine);
    assert_eq!(stopped.of("a"), &outputs[..5]);
    assert_eq!(stopped.finished[&RequestId::from("a")].reason, FinishReason::Stop);
}

#[test]
fn contradictory_settings_are_refused() {
    let refused = |change: &dyn Fn(&mut kvferry_refengine::EngineConfig)| {
        let mut config = config(&hybrid(), 8, 64);
        change(&mut config);
        Engine::new(config, Connector::None).unwrap_err()
    };
    let indivisible =
        |what, small, whole, large| ConfigError::Indivisible { what, small, whole, large };
    assert_eq!(refused(&|it| it.tp = 3), indivisible("tp", 3, "query heads", 8));
    assert_eq!(
        refused(&|it| it.model.groups[0].heads = 3),
        indivisible("KV heads", 3, "query heads", 8)
    );
    assert_eq!(refused(&|it| it.pp = 11), ConfigError::Stages { pp: 11, layers: 10 });
    assert_eq!(refused(&|it| it.groups.truncate(2)), ConfigError::Groups { cached: 2, model: 5 });
    assert_eq!(
        refused(&|it| it.groups[0].kernel_split = 3),
        indivisible("kernel_split", 3, "block_tokens", 8)
    );
    assert_eq!(refused(&|it| it.groups[2].kernel_split = 2), ConfigError::NoSplit);
    assert_eq!(
        refused(&|it| it.model.layers[3] = 7),
        ConfigError::NoSuchGroup { layer: 3, group: 7 }
    );
    let too_small = |what, value, least| ConfigError::TooSmall { what, value, least };
    assert_eq!(refused(&|it| it.groups[1].blocks = 1), too_small("blocks", 1, 2));
    assert_eq!(
        refused(&|it| it.model.groups[1].planes.clear()),
        too_small("bytes of a plane", 0, 1)
    );
    let shared = refused(&|it| (it.storage, it.groups[1].blocks) = (Storage::Shared, 9));
    assert_eq!(shared, ConfigError::SharedBlocks { least: 9, most: 64 });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn whatever_the_setup_tokens_are_right(
        model in 0..3usize,
        (tp, pp) in (prop::sample::select(vec![1usize, 2, 4, 8]), 1..4usize),
        layout in prop::sample::select(Packing::ALL.to_vec()),
        (chunk, step) in (1..40usize, 1..60usize),
        blocks in prop::collection::vec(1..20usize, 5),
        (caching, threads, max_running) in (any::<bool>(), any::<bool>(), 1..6usize),
        lens in prop::collection::vec((1..60usize, 1..20usize, 0..3u64), 1..6),
    ) {
        let model = &models()[model];
        let mut config = config(model, 1, 1);
        (config.tp, config.pp, config.layout) = (tp, pp, layout);
        (config.chunk_tokens, config.step_tokens) = (chunk, step);
        (config.prefix_caching, config.threads, config.max_running) = (caching, threads, max_running);
        for (group, tokens) in config.groups.iter_mut().zip(blocks) {
            // Enough for one of the requests at any block size.
            *group = GroupCache::new(tokens, 120usize.div_ceil(tokens) + 6);
        }
        let requests: Vec<_> = lens
            .into_iter()
            .enumerate()
            .map(|(n, (len, max_tokens, seed))| Request::new(format!("r{n}"), prompt(seed, len), max_tokens))
            .collect();
        assert_right(engine(config), &requests);
    }
}

#[test]
fn tokens_are_right_with_scratch_blocks_behind_states_that_move() {
    for (scratch, chunk, blocks) in [(1, 64, 64), (2, 5, 64), (3, 17, 24), (2, 20, 24)] {
        let mut config = config(&hybrid(), 8, blocks);
        config.chunk_tokens = chunk;
        for (group, cache) in config.model.groups.iter().zip(&mut config.groups) {
            cache.scratch = if group.attention == Attention::State { scratch } else { 0 };
        }
        let engine = assert_right(engine(config), &requests(5, 40, 12));
        // Few blocks: requests lose theirs.
        assert_eq!(engine.preemptions() > 0, blocks == 24, "{scratch} {chunk}");
    }
}
