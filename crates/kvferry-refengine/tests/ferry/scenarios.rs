//! Requests, preemptions and aborts as chance has it.

use crate::kit::{Dice, Flow, Node, Pair, bounded, config, ferry, models, prompt, there};
use kvferry_connector::Announce;
use kvferry_refengine::ferry::FerryConfig;
use kvferry_refengine::{
    EngineConfig, FinishReason, GroupCache, Launch, LoadFailurePolicy, ModelSpec, Packing,
};
use std::time::Duration;

/// How long a fetch may take. Engines that hold blocks for each other until they have none left, one
/// for what it has computed, one for what it waits for, go on when it is over.
const TIMEOUT: Duration = Duration::from_secs(2);

/// What chance did.
#[derive(Debug, Default)]
struct Counts {
    requests: usize,
    right: usize,
    errors: usize,
    aborted: usize,
    preemptions: u64,
    fetched: u64,
    failed: u64,
}

fn random_config(dice: &mut Dice, model: &ModelSpec) -> EngineConfig {
    let mut config = config(model, 8, 64);
    for cache in &mut config.groups {
        let block_tokens = dice.pick(&[4, 8, 16]);
        *cache = GroupCache::new(block_tokens, 400 / block_tokens);
    }
    config.tp = dice.pick(&[1, 1, 2]);
    config.pp = dice.pick(&[1, 1, 2]);
    config.layout = dice.pick(&Packing::ALL);
    config.chunk_tokens = 1 + dice.roll(40);
    config.step_tokens = 8 + dice.roll(60);
    config.max_running = 1 + dice.roll(8);
    config.prefix_caching = dice.percent(70);
    config.launch = dice.pick(&[Launch::Eager, Launch::Deferred]);
    config.threads = dice.percent(20);
    config.load_failure = LoadFailurePolicy::Recompute;
    config
}

fn random_ferry(dice: &mut Dice) -> FerryConfig {
    let pieces = 1 + dice.roll(4) as u32;
    let layers = Announce::Layers { pieces };
    FerryConfig {
        eager: dice.percent(70),
        announce: dice.pick(&[layers, layers, Announce::Chunks, Announce::End]),
        layer_events: dice.percent(70),
        timeout: TIMEOUT,
        ..ferry()
    }
}

fn scenario(seed: u64, requests: usize, counts: &mut Counts) {
    let mut dice = Dice::new(seed);
    let model = dice.pick(&models());
    let (prefill, mut decode) =
        (random_config(&mut dice, &model), random_config(&mut dice, &model));
    decode.load_failure = dice.pick(&[LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute]);
    let transports = dice.pick(&["tcp", "local", "tcp,local"]);
    let node = |config: &EngineConfig, ferry: &FerryConfig| {
        Node::with(config, ferry, transports, "of us all")
    };
    let prefill = node(&prefill, &random_ferry(&mut dice));
    let decode = node(&decode, &random_ferry(&mut dice));
    let mut pair = Pair::of(Flow::Sequential, prefill, decode);

    let (mut submitted, mut aborted) = (0, vec![]);
    while submitted < requests {
        for _ in 0..dice.roll(4) {
            let mut tokens = if dice.percent(50) { prompt(seed, 24) } else { vec![] };
            tokens.extend(prompt(seed << 32 | submitted as u64, 1 + dice.roll(40)));
            pair.flow = dice.pick(&Flow::ALL);
            pair.hand_off(&format!("r{submitted}"), tokens, 1 + dice.roll(20));
            submitted += 1;
        }
        if submitted > 0 && dice.percent(20) {
            let victim = format!("r{}", submitted - 1 - dice.roll(submitted.min(12)));
            let both = [
                pair.prefill.engine.abort(&there(&victim)),
                pair.decode.engine.abort(&victim.as_str().into()),
            ];
            aborted.extend(both.into_iter().filter(|did| *did).map(|_| victim.clone()));
        }
        pair.tick();
    }
    pair.run();
    for n in 0..submitted {
        let id = format!("r{n}");
        match pair.ended(&id) {
            Some(FinishReason::Length) => {
                pair.assert_right(&id);
                counts.right += 1;
            }
            Some(FinishReason::Error) => counts.errors += 1,
            Some(FinishReason::Abort) | None => {
                assert!(aborted.contains(&id), "seed {seed}: {id} is lost");
            }
            Some(FinishReason::Stop) => panic!("nobody said where to stop"),
        }
    }
    pair.assert_empty();
    counts.requests += submitted;
    counts.aborted += aborted.len();
    counts.preemptions += pair.prefill.engine.preemptions() + pair.decode.engine.preemptions();
    let (fetched, failed) = pair.fetched();
    (counts.fetched, counts.failed) = (counts.fetched + fetched, counts.failed + failed);
}

/// Of as many seeds as `KVFERRY_SEEDS` says.
#[test]
fn whatever_chance_does_tokens_are_right_and_nothing_is_left() {
    let mut counts = Counts::default();
    let seeds = std::env::var("KVFERRY_SEEDS").ok().and_then(|seeds| seeds.parse().ok());
    for seed in 0..seeds.unwrap_or(40) {
        let _watched = bounded();
        scenario(seed, 40, &mut counts);
    }
    println!("{counts:?}");
    assert!(counts.fetched > counts.requests as u64 / 2, "{counts:?}");
    assert!(counts.preemptions > 50 && counts.failed > 20 && counts.aborted > 50, "{counts:?}");
}
