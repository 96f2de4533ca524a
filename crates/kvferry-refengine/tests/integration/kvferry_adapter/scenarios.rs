//! Random requests, preemptions and aborts.

use crate::kvferry_adapter::kit::{
    Asserts, Flow, Pair, Random, bounded, config, kvferry_adapter, models, node_over, prompt, there,
};
use kvferry_connector::Announce;
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
use kvferry_refengine::{
    EngineConfig, FinishReason, GroupCache, Launch, LoadFailurePolicy, ModelSpec, Packing,
};
use std::time::Duration;

/// How long a fetch may take. Two engines may hold all their blocks for each other, one for computed
/// requests and one for fetches: they continue after this time.
const TIMEOUT: Duration = Duration::from_secs(2);

/// Counts of random events.
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

fn random_config(random: &mut Random, model: &ModelSpec) -> EngineConfig {
    let mut config = config(model, 8, 64);
    for cache in &mut config.groups {
        let block_tokens = random.pick(&[4, 8, 16]);
        *cache = GroupCache::new(block_tokens, 400 / block_tokens);
    }
    config.tp = random.pick(&[1, 1, 2]);
    config.pp = random.pick(&[1, 1, 2]);
    config.layout = random.pick(&Packing::ALL);
    config.chunk_tokens = 1 + random.below(40);
    config.step_tokens = 8 + random.below(60);
    config.max_running = 1 + random.below(8);
    config.prefix_caching = random.percent(70);
    config.launch = random.pick(&[Launch::Eager, Launch::Deferred]);
    config.threads = random.percent(20);
    config.load_failure = LoadFailurePolicy::Recompute;
    config
}

fn random_ferry(random: &mut Random) -> KvferryAdapterConfig {
    let pieces = 1 + random.below(4) as u32;
    let layers = Announce::Layers { pieces, least_bytes: 0 };
    KvferryAdapterConfig {
        eager: random.percent(70),
        announce: random.pick(&[layers, layers, Announce::Chunks, Announce::End]),
        layer_events: random.percent(70),
        timeout: TIMEOUT,
        ..kvferry_adapter()
    }
}

fn scenario(seed: u64, requests: usize, counts: &mut Counts) {
    let mut random = Random::new(seed);
    let model = random.pick(&models());
    let (prefill, mut decode) =
        (random_config(&mut random, &model), random_config(&mut random, &model));
    decode.load_failure = random.pick(&[LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute]);
    let transports = random.pick(&["tcp", "local", "tcp,local"]);
    let node = |config: &EngineConfig, kvferry_adapter: &KvferryAdapterConfig| {
        node_over(config, kvferry_adapter, transports, "of us all")
    };
    let prefill = node(&prefill, &random_ferry(&mut random));
    let decode = node(&decode, &random_ferry(&mut random));
    let mut pair = Pair::of(Flow::Sequential, prefill, decode);

    let (mut submitted, mut aborted) = (0, vec![]);
    while submitted < requests {
        for _ in 0..random.below(4) {
            let mut tokens = if random.percent(50) { prompt(seed, 24) } else { vec![] };
            tokens.extend(prompt(seed << 32 | submitted as u64, 1 + random.below(40)));
            pair.flow = random.pick(&Flow::ALL);
            pair.hand_off(&format!("r{submitted}"), tokens, 1 + random.below(20));
            submitted += 1;
        }
        if submitted > 0 && random.percent(20) {
            let victim = format!("r{}", submitted - 1 - random.below(submitted.min(12)));
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
            Some(FinishReason::Stop) => panic!("no model outputs a stop token"),
        }
    }
    pair.assert_empty();
    counts.requests += submitted;
    counts.aborted += aborted.len();
    counts.preemptions += pair.prefill.engine.preemptions() + pair.decode.engine.preemptions();
    let (fetched, failed) = pair.fetched();
    (counts.fetched, counts.failed) = (counts.fetched + fetched, counts.failed + failed);
}

/// Runs `KVFERRY_SEEDS` seeds.
#[test]
fn random_scenarios_produce_right_tokens_and_leave_nothing() {
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
