//! Retention of requests, by the engine's clock.

use crate::offload::kit::{BLOCK, Rig, agent, config, dense, options, prompt};
use kvferry_blocks::{
    Diff, EventKind, PRIORITY_DEFAULT, Retention, RetentionConfig, TokenRange, TransferMode,
    Warning,
};
use kvferry_refengine::offload::{Clock, Offload};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

const LEN: usize = 5 * BLOCK;

fn keeping(priority: u8, duration_ms: Option<u64>) -> RetentionConfig {
    let retention = Retention { priority, duration_ms };
    RetentionConfig::new([TokenRange { start: 0, end: None, retention }]).unwrap()
}

fn rig(now: &Arc<AtomicU64>) -> Rig {
    let agent = agent();
    let clock = Clock::manual(Arc::clone(now));
    let offload = Offload::new(&agent, 0).options(options()).clock(clock);
    Rig::with(config(&dense(), BLOCK, 17), offload)
}

/// Priorities that have changed to the default one.
fn expired(rig: &mut Rig) -> usize {
    let ends = |kind| {
        let to_default = |diff: Diff<u8>| diff.new == PRIORITY_DEFAULT;
        matches!(kind, EventKind::Updated { priority: Some(diff), .. } if to_default(diff))
    };
    rig.engine.take_block_events().into_iter().filter(|event| ends(event.kind)).count()
}

#[test]
fn a_duration_does_not_end_while_a_request_uses_the_block_and_ends_after_it() {
    let now = Arc::new(AtomicU64::new(0));
    let mut rig = rig(&now);
    rig.submit_with("a", prompt(1, LEN), 30, keeping(90, Some(1000)));
    for _ in 0..10 {
        rig.step();
        now.fetch_add(5000, SeqCst);
    }
    assert_eq!(expired(&mut rig), 0, "the request still uses its blocks");
    rig.run();
    now.fetch_add(999, SeqCst);
    rig.serve("b", prompt(2, 4), &RetentionConfig::default());
    assert_eq!(expired(&mut rig), 0, "1 ms too early");
    now.fetch_add(1, SeqCst);
    rig.serve("c", prompt(3, 4), &RetentionConfig::default());
    assert_eq!(expired(&mut rig), LEN / BLOCK);
}

#[test]
fn blocks_of_a_high_priority_outlive_others_until_their_duration_has_ended() {
    let now = Arc::new(AtomicU64::new(0));
    let mut rig = rig(&now);
    let others = RetentionConfig::default();
    rig.serve("a", prompt(1, LEN), &keeping(90, Some(1000)));
    for n in 0..6 {
        rig.serve(&format!("x{n}"), prompt(10 + n, 8 * BLOCK), &others);
    }
    let computed = rig.serve("again", prompt(1, LEN), &keeping(90, Some(1000)));
    // The last token is always computed: of the last block, the first tokens are reused.
    assert_eq!(computed, 1 + 2, "kept beside newer blocks");
    now.fetch_add(1000, SeqCst);
    for n in 0..6 {
        rig.serve(&format!("y{n}"), prompt(20 + n, 8 * BLOCK), &others);
    }
    assert_eq!(rig.serve("gone", prompt(1, LEN), &others), LEN + 2);
    rig.run();
}

#[test]
fn a_file_mode_without_a_directory_offloads_to_host_memory_and_warns_once() {
    let mut rig = Rig::new(16, 64);
    for mode in [TransferMode::Gds, TransferMode::PosixDebugFallback] {
        let id = format!("{mode:?}");
        let retention = RetentionConfig::default().transfer(mode, None).unwrap();
        let seed = mode as u64 * 1000;
        rig.serve(&id, prompt(seed, LEN), &retention);
        let warnings = rig.engine.take_warnings();
        let expected = (id.as_str().into(), Warning::DirectoryMissing { mode });
        assert_eq!(warnings, [expected]);
        rig.push_out(seed + 100, &RetentionConfig::default());
        let again =
            rig.serve(&format!("{id} again"), prompt(seed, LEN), &RetentionConfig::default());
        assert!(again < LEN, "{again} tokens were computed");
        assert_eq!(rig.engine.take_warnings(), []);
    }
    rig.run();
}
