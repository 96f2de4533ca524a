//! Many requests at once, over small pools, with aborts and failures.

use crate::basics::Random;
use crate::offload::faults::failing;
use crate::offload::kit::{
    BLOCK, Folder, LONG, MODES, Rig, config, options, prompt, to_files, windowed,
};
use kvferry_blocks::RetentionConfig;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

/// Prompts that share prefixes: a tree of three levels.
fn shared(random: &mut Random) -> Vec<u32> {
    let mut all = prompt(1000 + random.below(2) as u64, 2 * BLOCK);
    all.extend(prompt(2000 + random.below(3) as u64, BLOCK + 3));
    let len = 1 + random.below(3 * BLOCK);
    all.extend(prompt(3000 + random.below(4) as u64, len));
    all
}

fn soak(seed: u64, requests: usize, fails_each: usize) -> kvferry_offload::Stats {
    let folder = Folder::new(&format!("offload-soak-{seed}-{fails_each}"));
    let mut random = Random::new(seed);
    let copies = AtomicUsize::new(0);
    let options = failing(options(), move |_| {
        fails_each > 0 && copies.fetch_add(1, SeqCst) % fails_each == fails_each - 1
    });
    let mut rig = Rig::of(config(&windowed(), BLOCK, 25), 20, options);
    let mut ids = vec![];
    for n in 0..requests {
        let id = format!("r{n}");
        let retention = match random.pick(&MODES) {
            kvferry_blocks::TransferMode::Dram => RetentionConfig::default(),
            mode => to_files(mode, &folder.path().join(format!("{}", random.below(2)))),
        };
        let max_tokens = 1 + random.below(12);
        rig.submit_with(&id, shared(&mut random), max_tokens, retention);
        ids.push(id);
        for _ in 0..random.below(3) {
            if rig.step().tokens == 0 && rig.engine.copies_under_way() > 0 {
                assert!(rig.engine.wait_for_copy(LONG));
            }
        }
        if random.percent(15) {
            rig.engine.abort(&random.pick(&ids).as_str().into());
        }
    }
    let stats = rig.run();
    for id in &ids {
        assert!(rig.outputs.finished.contains_key(&id.as_str().into()), "{id} has no end");
    }
    stats
}

#[test]
fn requests_over_small_pools_have_right_tokens_and_values_and_leave_nothing_behind() {
    for seed in 0..3 {
        let stats = soak(seed, 60, 0);
        assert!(stats.offloaded > 0 && stats.onboarded > 0, "{stats:?}");
        assert_eq!(stats.failed, 0, "{stats:?}");
    }
}

#[test]
fn copies_that_fail_at_any_moment_cost_hits_only() {
    for seed in 0..3 {
        for fails_each in [2, 5] {
            let stats = soak(seed, 40, fails_each);
            assert!(stats.failed > 0, "{stats:?}");
        }
    }
}

#[test]
fn a_thousand_requests_over_small_pools_have_right_tokens() {
    for fails_each in [0, 7] {
        let stats = soak(99, 1000, fails_each);
        assert!(stats.offloaded > 0 && stats.onboarded > 0, "{stats:?}");
    }
}
