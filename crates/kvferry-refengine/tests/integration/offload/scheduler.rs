//! The scheduler's thread and the copies.

use crate::offload::faults::{Gate, held_at, is_offload, is_onboard};
use crate::offload::kit::{BLOCK, Folder, LONG, Rig, config, dense, options, prompt, to_files};
use kvferry_blocks::{Retention, RetentionConfig, TokenRange, Transfer, TransferMode};
use kvferry_refengine::{RequestId, RequestStatus};

const LEN: usize = 5 * BLOCK + BLOCK / 2;

fn rig(gate: &Gate, which: impl Fn(&Transfer) -> bool + Send + Sync + 'static) -> Rig {
    Rig::of(config(&dense(), BLOCK, 17), 64, held_at(gate, options(), which))
}

/// Blocks that are removed instead of offloaded.
fn worthless() -> RetentionConfig {
    let retention = Retention { priority: 0, duration_ms: None };
    let range = TokenRange { start: 0, end: None, retention };
    RetentionConfig::new([range]).unwrap().decode(retention).unwrap()
}

#[test]
fn other_requests_are_computed_to_their_ends_while_a_copy_does_not_end() {
    let folder = Folder::new("offload-held");
    for mode in crate::offload::kit::MODES {
        let gate = Gate::default();
        let retention = to_files(mode, folder.path());
        let mut rig = rig(&gate, is_onboard);
        rig.serve("a", prompt(1, LEN), &retention);
        // What is in the pages then leaves them without a copy.
        rig.push_out(100, &worthless());
        let _opens = gate.opens_at_end();
        gate.shut();
        rig.submit_with("waits", prompt(1, LEN), 3, retention.clone());
        rig.step();
        gate.wait_for_copy();
        rig.submit_with("runs", prompt(9, LEN), 3, retention.clone());
        while rig.engine.status(&"runs".into()).is_some() {
            // If a step waited for the copy, this would never return.
            let report = rig.step();
            if report.tokens == 0 {
                assert!(rig.engine.wait_for_copy(LONG));
            }
        }
        assert!(rig.is_right("runs"));
        let waits = RequestId::from("waits");
        assert_eq!(rig.engine.status(&waits), Some(RequestStatus::WaitingForRemoteKvs));
        assert!(!rig.outputs.tokens.contains_key(&waits));
        gate.open();
        rig.run();
        assert!(rig.is_right("waits"));
    }
}

#[test]
fn a_directory_that_does_not_answer_delays_no_copy_of_another_place() {
    let folder = Folder::new("offload-stuck");
    let stuck = folder.path().join("stuck");
    let gate = Gate::default();
    let name = stuck.to_str().unwrap().to_owned();
    let mut rig = rig(&gate, move |transfer| transfer.directory.as_deref() == Some(&name));
    let to_stuck = to_files(TransferMode::PosixDebugFallback, &stuck);
    let to_other = to_files(TransferMode::PosixDebugFallback, &folder.path().join("other"));
    let to_memory = RetentionConfig::default();
    rig.serve("stuck", prompt(1, LEN), &to_stuck);
    rig.serve("other", prompt(2, LEN), &to_other);
    let _opens = gate.opens_at_end();
    gate.shut();
    // It gets the six free pages and those of `stuck`, the next one some of `other`.
    rig.submit_with("waits", prompt(50, 10 * BLOCK + 3), 3, to_memory.clone());
    rig.submit_with("runs", prompt(51, 2 * BLOCK + 3), 3, to_memory.clone());
    rig.step();
    gate.wait_for_copy();
    while rig.engine.status(&"runs".into()).is_some() {
        if rig.step().tokens == 0 {
            assert!(
                rig.engine.wait_for_copy(LONG),
                "copies of other places wait for the directory"
            );
        }
    }
    assert!(rig.is_right("runs"));
    assert!(!rig.outputs.tokens.contains_key(&RequestId::from("waits")));
    gate.open();
    rig.run();
}

#[test]
fn a_request_waits_for_the_page_that_it_was_given_until_its_old_block_is_offloaded() {
    let gate = Gate::default();
    let mut rig = rig(&gate, is_offload);
    let retention = RetentionConfig::default();
    rig.serve("a", prompt(1, 15 * BLOCK), &retention);
    let _opens = gate.opens_at_end();
    gate.shut();
    rig.submit("b", prompt(2, LEN), 3);
    for _ in 0..5 {
        assert_eq!(rig.step().tokens, 0, "it computes on a page that is still read");
    }
    gate.open();
    assert!(rig.run().offloaded > 0);
}
