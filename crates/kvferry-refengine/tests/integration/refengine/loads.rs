//! Loads behind vLLM's seam, also those that kvferry's connector never makes: within a step, and with
//! failures by block. The tests copy the bytes themselves.

use crate::refengine::contract::scripted;
use crate::refengine::flips::{read, write};
use crate::refengine::kit::{dense, hybrid, models, prompt, run, windowed};
use crate::refengine::script::Script;
use kvferry_refengine::{
    Attention, BlockId, Engine, EngineConfig, FinishReason, GroupSpec, Launch, LoadFailurePolicy,
    ModelSpec, Request, RequestStatus, continuation,
};

/// Five blocks and a half.
const LEN: usize = 44;

fn config(model: &ModelSpec) -> EngineConfig {
    crate::refengine::kit::config(model, 8, 64)
}

fn submit(engine: &mut Engine, len: usize) {
    engine.submit(Request::new("a", prompt(1, len), 6)).unwrap();
}

/// Tokens that a load may bring. What the last one reads is not kept beyond it, but by full attention.
fn loadable(model: &ModelSpec, len: usize, load_async: bool) -> usize {
    let keeps_all = model.groups.iter().all(|group| group.attention == Attention::Full);
    len - usize::from(!load_async || !keeps_all)
}

/// An engine that has computed the prompt and holds its blocks.
fn prefilled(config: &EngineConfig, len: usize) -> Engine {
    let (mut engine, script) = scripted(config);
    script.state().holds = true;
    script.state().prompt_cut = Some(loadable(&config.model, len, true));
    engine.submit(Request::new("a", prompt(1, len), 1)).unwrap();
    engine.step().unwrap();
    engine
}

/// The blocks that a new engine gives the first request that loads so many tokens.
fn first_tables(config: &EngineConfig, len: usize, tokens: usize) -> Vec<Vec<BlockId>> {
    let (mut engine, script) = scripted(config);
    script.matches(tokens, true);
    submit(&mut engine, len);
    engine.step().unwrap();
    engine.blocks(&"a".into()).unwrap().to_vec()
}

/// Copies the request's blocks to those of another engine, all but one of them.
fn copy(from: &Engine, to: &Engine, tables: &[Vec<BlockId>], left_out: Option<BlockId>) {
    let source = from.blocks(&"a".into()).unwrap();
    for rank in to.config().ranks() {
        let (there, here) = (from.caches(rank), to.caches(rank));
        for (layer, view) in here.layout.layers.iter().enumerate() {
            for (theirs, ours) in source[view.group].iter().zip(&tables[view.group]) {
                if !ours.is_null() && Some(*ours) != left_out {
                    write(here, layer, *ours, &read(there, layer, *theirs));
                }
            }
        }
    }
}

/// What goes wrong with a load, on the last rank.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Failure {
    None,
    /// The last block is not loaded, and reported.
    Block,
    /// The request is reported.
    Request,
}

/// An engine in which the prompt is loaded, up to the step in which its load ends; and the tokens that
/// have been computed.
fn loaded(
    config: &EngineConfig,
    len: usize,
    load_async: bool,
    failure: Failure,
) -> (Engine, Script, usize) {
    let tokens = loadable(&config.model, len, load_async);
    let (source, tables) = (prefilled(config, len), first_tables(config, len, tokens));
    let (mut engine, script) = scripted(config);
    let ranks = config.ranks().len();
    script.matches(tokens, load_async);
    submit(&mut engine, len);
    if load_async {
        assert_eq!(engine.step().unwrap().tokens, 0);
        assert_eq!(engine.status(&"a".into()), Some(RequestStatus::WaitingForRemoteKvs));
        assert_eq!(engine.blocks(&"a".into()).unwrap(), tables);
        (0..ranks).for_each(|rank| script.received(rank, "a"));
    }
    let last = tables[0].last().copied().filter(|_| failure == Failure::Block);
    copy(&source, &engine, &tables, last);
    script.state().invalid.extend(last.map(|block| (ranks - 1, vec![block])));
    if failure == Failure::Request {
        script.failed(ranks - 1, "a");
    }
    let computed = engine.step().unwrap().tokens;
    script.matches(0, false);
    (engine, script, computed)
}

/// Steps to the end. Asserts that the tokens are right and returns how many were computed.
fn finish(engine: &mut Engine, len: usize) -> usize {
    let mut computed = 0;
    let mut tokens = vec![];
    while engine.has_work() {
        computed += engine.step().unwrap().tokens;
        tokens.extend(engine.take_outputs().into_iter().flat_map(|output| output.tokens));
    }
    assert_eq!(tokens, continuation(&engine.config().model, &prompt(1, len), 6));
    engine.check_empty().unwrap();
    computed
}

#[test]
fn tokens_are_right_after_a_load_within_a_step_and_after_one_beside_other_steps() {
    for model in models() {
        for (tp, pp) in [(1, 1), (2, 1), (2, 2)] {
            for (launch, threads) in [(Launch::Eager, false), (Launch::Deferred, true)] {
                for load_async in [false, true] {
                    let mut config = config(&model);
                    (config.tp, config.pp) = (tp, pp);
                    (config.launch, config.threads) = (launch, threads);
                    let (mut engine, _, computed) = loaded(&config, LEN, load_async, Failure::None);
                    // The last token of the prompt, and five generated ones.
                    assert_eq!(computed + finish(&mut engine, LEN), 6);
                }
            }
        }
    }
}

#[test]
fn the_last_token_of_a_loaded_prompt_has_its_whole_window() {
    // For every offset of the window in its first block.
    for len in 30..50 {
        let (mut engine, ..) = loaded(&config(&windowed()), len, true, Failure::None);
        finish(&mut engine, len);
    }
}

#[test]
fn a_failed_load_ends_the_request_or_is_computed_by_policy() {
    for policy in [LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute] {
        for (model, load_async, failure) in [
            (dense(), false, Failure::Block),
            (dense(), true, Failure::Block),
            (dense(), true, Failure::Request),
            (windowed(), true, Failure::Request),
            (hybrid(), true, Failure::Request),
        ] {
            for tp in [1, 2] {
                let mut config = config(&model);
                (config.tp, config.load_failure) = (tp, policy);
                let (mut engine, _, mut computed) = loaded(&config, LEN, load_async, failure);
                if policy == LoadFailurePolicy::Fail {
                    let ended = engine.take_outputs().pop().unwrap().finished.unwrap();
                    assert_eq!(ended.reason, FinishReason::Error);
                    run(&mut engine);
                } else {
                    computed += finish(&mut engine, LEN);
                    // A block error costs the block's tokens, a failed request all of its tokens. What
                    // was computed in the step of the failure is discarded.
                    let again = if failure == Failure::Block { 4 } else { LEN };
                    assert_eq!(computed, again + 5 + usize::from(!load_async));
                }
                // Blocks of a failed load are not in the cache.
                submit(&mut engine, LEN);
                finish(&mut engine, LEN);
            }
        }
    }
}

#[test]
fn a_request_with_a_half_loaded_window_starts_over() {
    for load_async in [false, true] {
        let mut config = config(&ModelSpec::new(vec![GroupSpec::window(2, 8, 19)], 2));
        config.load_failure = LoadFailurePolicy::Recompute;
        let (mut engine, ..) = loaded(&config, LEN, load_async, Failure::Block);
        finish(&mut engine, LEN);
    }
}

#[test]
fn blocks_of_an_aborted_load_are_kept_until_every_rank_has_reported() {
    let mut config = config(&dense());
    config.tp = 4;
    let (mut engine, script) = scripted(&config);
    script.matches(LEN, true);
    submit(&mut engine, LEN);
    engine.step().unwrap();
    assert!(engine.abort(&"a".into()));
    for rank in [2, 0, 3, 1] {
        assert_eq!(engine.check_empty().unwrap_err().requests, ["a".into()]);
        script.received(rank, "a");
        engine.step().unwrap();
    }
    engine.check_empty().unwrap();
}

#[test]
fn a_lost_load_is_a_wrong_token_even_if_the_blocks_had_the_same_bytes_before() {
    let mut config = crate::refengine::kit::config(&dense(), 8, 7);
    config.prefix_caching = false;
    let (mut engine, script) = scripted(&config);
    // The same prompt twice in the same blocks; the second time the connector claims to load it.
    let [first, second] = [0, 30].map(|tokens| {
        script.matches(tokens, false);
        engine.submit(Request::new("a", prompt(1, 40), 4)).unwrap();
        run(&mut engine).of("a").to_vec()
    });
    let right = continuation(&config.model, &prompt(1, 40), 4);
    assert!(first == right && second != right);
}
