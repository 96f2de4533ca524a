//! Random requests, preemptions, aborts and failures.

use crate::kit::{Pair, Random, config, models, prompt};
use kvferry_refengine::in_process::{FailureKey, Faults, LoadMode};
use kvferry_refengine::{
    EngineConfig, FinishReason, Launch, LoadFailurePolicy, Packing, RequestId,
};

fn random_config(random: &mut Random, base: &EngineConfig) -> EngineConfig {
    let mut config = base.clone();
    config.layout = random.pick(&Packing::ALL);
    config.chunk_tokens = 1 + random.below(40);
    config.step_tokens = 8 + random.below(60);
    config.max_running = 1 + random.below(8);
    config.prefix_caching = random.percent(70);
    config.launch = random.pick(&[Launch::Eager, Launch::Deferred]);
    config
}

/// Hundreds of requests of one seed. Half of them share a prefix, some are aborted, some loads fail,
/// and blocks are scarce.
fn scenario(seed: u64, requests: usize) -> (u64, u64, usize) {
    let mut random = Random::new(seed);
    let model = random.pick(&models());
    let mut base = config(&model, random.pick(&[4, 8]), 40);
    base.tp = random.pick(&[1, 2]);
    base.load_failure = random.pick(&[LoadFailurePolicy::Fail, LoadFailurePolicy::Recompute]);
    let (prefill, decode) = (random_config(&mut random, &base), random_config(&mut random, &base));
    let key = if model.groups.len() == 1 {
        random.pick(&[FailureKey::Request, FailureKey::Block])
    } else {
        FailureKey::Request
    };
    let steps = 1 + random.below(6) as u64;
    let mode = match model.groups.len() {
        1 => random.pick(&[LoadMode::Sync, LoadMode::Async { steps }]),
        _ => LoadMode::Async { steps },
    };
    let percent = if mode == LoadMode::Sync && key == FailureKey::Request { 0 } else { 15 };
    let mut pair = Pair::new(mode, Faults { seed, percent, key }, &prefill, &decode);

    let (mut submitted, mut aborted) = (0, vec![]);
    while submitted < requests {
        for _ in 0..random.below(4) {
            let mut tokens = if random.percent(50) { prompt(seed, 24) } else { vec![] };
            tokens.extend(prompt(seed << 32 | submitted as u64, 1 + random.below(40)));
            pair.hand_off(&format!("r{submitted}"), tokens, 1 + random.below(20));
            submitted += 1;
        }
        if submitted > 0 && random.percent(20) {
            let victim = format!("r{}", submitted - 1 - random.below(submitted.min(12)));
            if pair.prefill.abort(&RequestId::from(format!("{victim}-prefill"))) {
                aborted.push(victim.clone());
            }
            if pair.decode.abort(&RequestId::from(victim.as_str())) {
                aborted.push(victim);
            }
        }
        pair.tick();
    }
    pair.run();
    let mut errors = 0;
    for n in 0..submitted {
        let id = format!("r{n}");
        match pair.decoded_of(&id) {
            Some(FinishReason::Length) => pair.assert_right(&id),
            Some(FinishReason::Error) => errors += 1,
            Some(FinishReason::Abort) | None => assert!(aborted.contains(&id), "{id} is lost"),
            Some(FinishReason::Stop) => panic!("no model outputs a stop token"),
        }
    }
    pair.assert_empty();
    assert!(pair.prefill.violations().is_empty() && pair.decode.violations().is_empty());
    let (_, failures) = pair.in_process.loads();
    if base.load_failure == LoadFailurePolicy::Recompute {
        assert_eq!(errors, 0);
    }
    (pair.prefill.preemptions() + pair.decode.preemptions(), failures, aborted.len())
}

#[test]
fn random_scenarios_produce_right_tokens_and_leave_nothing() {
    let (mut preemptions, mut failures, mut aborted) = (0, 0, 0);
    for seed in 0..40 {
        let of = scenario(seed, 100);
        preemptions += of.0;
        failures += of.1;
        aborted += of.2;
    }
    println!("{preemptions} preemptions, {failures} failed loads, {aborted} aborts");
    assert!(preemptions > 100 && failures > 100 && aborted > 100);
}
