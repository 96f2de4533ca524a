//! What is reused, and from where.

use crate::offload::kit::{
    BLOCK, Folder, MODES, Rig, config, dense, options, prompt, to_files, windowed,
};
use kvferry_blocks::{RetentionConfig, TransferMode};
use kvferry_refengine::Packing;

/// Five blocks and a half.
const LEN: usize = 5 * BLOCK + BLOCK / 2;

#[test]
fn blocks_that_have_left_the_engines_pages_come_back_with_the_values_of_the_model() {
    let folder = Folder::new("offload-back");
    for (at, mode) in MODES.into_iter().enumerate() {
        for (packing, tp) in [(Packing::Lbhnc, 1), (Packing::Lhbnc, 2), (Packing::Blnhc, 2)] {
            let mut config = config(&dense(), BLOCK, 17);
            (config.layout, config.tp) = (packing, tp);
            let path = folder.path().join(format!("{at}-{packing}-{tp}"));
            let retention = to_files(mode, &path);
            let mut rig = Rig::of(config, 64, options());
            let first = rig.serve("a", prompt(1, LEN), &retention);
            assert_eq!(first, LEN + 2);
            rig.push_out(100, &retention);
            let before = rig.engine.offload_stats();
            assert!(before.offloaded >= 5, "{mode:?}: {before:?}");
            let again = rig.serve("b", prompt(1, LEN), &retention);
            // The block that was not full is not offloaded.
            assert_eq!(again, LEN + 2 - 5 * BLOCK, "{mode:?} {packing} {tp}");
            let stats = rig.run();
            assert_eq!(stats.onboarded - before.onboarded, 5, "{mode:?}: {stats:?}");
            assert_eq!(stats.failed, 0, "{mode:?}: {stats:?}");
        }
    }
}

#[test]
fn blocks_that_are_in_the_engines_pages_are_reused_without_a_copy() {
    let mut rig = Rig::new(32, 32);
    let retention = RetentionConfig::default();
    assert_eq!(rig.serve("a", prompt(1, LEN), &retention), LEN + 2);
    assert_eq!(rig.serve("b", prompt(1, LEN), &retention), LEN + 2 - 5 * BLOCK);
    let stats = rig.run();
    assert_eq!((stats.offloaded, stats.onboarded), (0, 0), "{stats:?}");
}

#[test]
fn every_group_of_a_model_is_offloaded_and_comes_back() {
    let mut rig = Rig::of(config(&windowed(), BLOCK, 17), 64, options());
    let retention = RetentionConfig::default();
    rig.submit_with("a", prompt(1, LEN), 3, retention.clone());
    rig.run();
    rig.push_out(100, &retention);
    let before = rig.engine.offload_stats();
    let again = rig.serve("b", prompt(1, LEN), &retention);
    assert_eq!(again, LEN + 2 - 5 * BLOCK);
    let stats = rig.run();
    assert_eq!(stats.onboarded - before.onboarded, 2 * 5, "five of each group: {stats:?}");
    assert!(rig.is_right("b"));
}

#[test]
fn the_first_tokens_of_a_block_are_reused_wherever_the_block_is() {
    let folder = Folder::new("offload-part");
    for mode in MODES {
        let retention = to_files(mode, folder.path());
        let mut rig = Rig::new(16, 64);
        // A request of the same first three blocks and five tokens, then of other tokens.
        let first = prompt(1, 6 * BLOCK);
        let mut second = first.clone();
        for token in &mut second[3 * BLOCK + 5..] {
            *token = (*token + 1) % 50_000;
        }
        rig.serve("a", first.clone(), &retention);
        // From primary, where other blocks are behind the one of which a part is used.
        let computed = rig.serve("b", second.clone(), &retention);
        assert_eq!(computed, second.len() + 2 - (3 * BLOCK + 5), "{mode:?}");
        rig.push_out(100, &retention);
        let mut third = first.clone();
        for token in &mut third[2 * BLOCK + 3..] {
            *token = (*token + 2) % 50_000;
        }
        let computed = rig.serve("c", third.clone(), &retention);
        assert_eq!(computed, third.len() + 2 - (2 * BLOCK + 3), "{mode:?}, from secondary");
        let stats = rig.run();
        assert_eq!(stats.failed, 0, "{stats:?}");
        assert!(stats.copied > 0, "{stats:?}");
    }
}

#[test]
fn a_request_of_a_low_priority_is_not_offloaded() {
    let low = kvferry_blocks::Retention { priority: 10, duration_ms: None };
    let range = kvferry_blocks::TokenRange { start: 0, end: None, retention: low };
    let retention = RetentionConfig::new([range]).unwrap().decode(low).unwrap();
    let mut rig = Rig::new(16, 64);
    rig.serve("a", prompt(1, LEN), &retention);
    rig.push_out(100, &retention);
    assert_eq!(rig.serve("b", prompt(1, LEN), &retention), LEN + 2);
    assert_eq!(rig.run().offloaded, 0);
}

#[test]
fn what_is_reset_is_computed_again() {
    let mut rig = Rig::new(16, 64);
    let retention = RetentionConfig::default();
    rig.serve("a", prompt(1, LEN), &retention);
    rig.push_out(100, &retention);
    assert!(rig.engine.reset_prefix_cache());
    assert_eq!(rig.serve("b", prompt(1, LEN), &retention), LEN + 2);
    rig.run();
}

#[test]
fn one_engine_offloads_to_several_directories_and_to_host_memory_at_once() {
    let folder = Folder::new("offload-several");
    let mut rig = Rig::new(16, 64);
    let wishes: Vec<RetentionConfig> = (0..6)
        .map(|n| match MODES[n % 3] {
            TransferMode::Dram => RetentionConfig::default(),
            mode => to_files(mode, &folder.path().join(format!("{n}"))),
        })
        .collect();
    for (n, retention) in (0u64..).zip(&wishes) {
        rig.serve(&format!("a{n}"), prompt(n, LEN), retention);
    }
    rig.push_out(100, &RetentionConfig::default());
    for (n, retention) in (0u64..).zip(&wishes) {
        let computed = rig.serve(&format!("b{n}"), prompt(n, LEN), retention);
        assert_eq!(computed, LEN + 2 - 5 * BLOCK, "{n}");
    }
    assert_eq!(rig.run().failed, 0);
}
