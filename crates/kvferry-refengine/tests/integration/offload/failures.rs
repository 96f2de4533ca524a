//! Copies that fail, and requests that end in the middle of copies.

use crate::offload::faults::{Gate, failing, held_at, is_offload, is_onboard};
use crate::offload::kit::{
    BLOCK, Folder, LONG, MODES, Rig, config, dense, options, paths_below, prompt, to_files,
};
use kvferry_blocks::{RetentionConfig, TransferMode};
use kvferry_refengine::{FinishReason, RequestId};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

const LEN: usize = 5 * BLOCK + BLOCK / 2;

fn rig(options: kvferry_offload::Options) -> Rig {
    Rig::of(config(&dense(), BLOCK, 17), 64, options)
}

#[test]
fn a_failed_onboard_makes_the_request_compute_what_is_behind_it() {
    let folder = Folder::new("offload-failed");
    for mode in MODES {
        for failed_at in 0..5 {
            let retention = to_files(mode, folder.path());
            let seen = Arc::new(AtomicUsize::new(0));
            let which =
                move |transfer: &_| is_onboard(transfer) && seen.fetch_add(1, SeqCst) == failed_at;
            let mut rig = rig(failing(options(), which));
            rig.serve("a", prompt(1, LEN), &retention);
            rig.push_out(100, &retention);
            let computed = rig.serve("b", prompt(1, LEN), &retention);
            assert_eq!(computed, LEN + 2 - failed_at * BLOCK, "{mode:?}");
            assert_eq!(rig.run().failed, 1);
        }
    }
}

#[test]
fn a_failed_offload_costs_the_hits_of_its_blocks_only() {
    let folder = Folder::new("offload-not-written");
    for mode in MODES {
        let retention = to_files(mode, folder.path());
        let mut rig = rig(failing(options(), is_offload));
        rig.serve("a", prompt(1, LEN), &retention);
        rig.push_out(100, &retention);
        assert_eq!(rig.serve("b", prompt(1, LEN), &retention), LEN + 2, "{mode:?}");
        let stats = rig.run();
        assert!(stats.failed > 0 && stats.offloaded == 0, "{stats:?}");
    }
}

#[test]
fn a_request_that_is_aborted_while_its_blocks_are_copied_leaves_no_page_behind() {
    let folder = Folder::new("offload-aborted");
    for mode in MODES {
        for which in [is_offload, is_onboard] {
            let gate = Gate::default();
            let retention = to_files(mode, folder.path());
            let mut rig = rig(held_at(&gate, options(), which));
            rig.serve("a", prompt(1, LEN), &retention);
            rig.push_out(100, &retention);
            let _opens = gate.opens_at_end();
            gate.shut();
            rig.submit_with("b", prompt(1, LEN), 3, retention.clone());
            rig.submit_with("c", prompt(2, LEN), 3, retention.clone());
            rig.step();
            gate.wait_for_copy();
            for id in ["b", "c"] {
                assert!(rig.engine.abort(&id.into()));
            }
            rig.step();
            assert!(rig.engine.check_empty().is_err(), "copies hold pages");
            gate.open();
            assert!(rig.engine.finish_copies(LONG));
            rig.engine.check_empty().unwrap();
            assert_eq!(rig.outputs.finished[&RequestId::from("b")].reason, FinishReason::Abort);
            // The pages serve other requests, and the blocks are still right.
            rig.serve("d", prompt(1, LEN), &retention);
            rig.serve("e", prompt(7, 15 * BLOCK), &retention);
            rig.run();
        }
    }
}

#[test]
fn requests_that_are_preempted_while_blocks_are_copied_end_with_the_right_tokens() {
    let gate = Gate::default();
    let mut rig = rig(held_at(&gate, options(), is_offload));
    let retention = RetentionConfig::default();
    rig.push_out(100, &retention);
    let _opens = gate.opens_at_end();
    gate.shut();
    // Together they need twice the pages that there are, and get them block by block.
    for n in 0..4 {
        rig.submit(&format!("r{n}"), prompt(n, 3 * BLOCK + 5), 5 * BLOCK);
    }
    rig.step();
    gate.wait_for_copy();
    for _ in 0..3 {
        rig.step();
    }
    gate.open();
    for _ in 0..100_000 {
        if !rig.engine.has_work() {
            break;
        }
        // Shut for a step now and then, so that requests lose their blocks meanwhile.
        gate.shut();
        let report = rig.step();
        gate.open();
        if report.tokens == 0 && rig.engine.copies_under_way() > 0 {
            assert!(rig.engine.wait_for_copy(LONG));
        }
    }
    assert!(rig.engine.preemptions() > 0, "no request was preempted");
    let stats = rig.run();
    assert!(stats.offloaded > 0, "{stats:?}");
    assert!((0..4).all(|n| rig.is_right(&format!("r{n}"))));
}

#[test]
fn an_engine_that_is_dropped_in_the_middle_of_copies_ends() {
    let folder = Folder::new("offload-dropped");
    for mode in MODES {
        let gate = Gate::default();
        let retention = to_files(mode, folder.path());
        let mut rig = rig(held_at(&gate, options(), |_| true));
        rig.serve("a", prompt(1, LEN), &retention);
        gate.shut();
        rig.submit_with("b", prompt(2, 15 * BLOCK), 3, retention.clone());
        rig.step();
        gate.wait_for_copy();
        let opened = gate.clone();
        let opener = std::thread::spawn(move || opened.open());
        drop(rig);
        opener.join().unwrap();
        // On the same directory, from the beginning.
        let mut rig = self::rig(options());
        rig.serve("a", prompt(1, LEN), &retention);
        rig.run();
    }
}

#[test]
fn a_file_with_a_wrong_byte_is_not_used() {
    let folder = Folder::new("offload-flipped");
    let retention = to_files(TransferMode::PosixDebugFallback, folder.path());
    let mut rig = rig(options());
    rig.serve("a", prompt(1, LEN), &retention);
    rig.push_out(100, &retention);
    let mut flipped = 0;
    let blocks = paths_below(folder.path()).into_iter().filter(|it| it.extension().is_some());
    for (at, path) in blocks.enumerate() {
        let mut bytes = std::fs::read(&path).unwrap();
        // In the header, in the bytes, or cut short.
        match at % 3 {
            0 => bytes[20] ^= 1,
            1 => *bytes.last_mut().unwrap() ^= 0x80,
            _ => bytes.truncate(100),
        }
        std::fs::write(&path, bytes).unwrap();
        flipped += 1;
    }
    assert!(flipped >= 5, "{flipped} files");
    assert_eq!(rig.serve("b", prompt(1, LEN), &retention), LEN + 2);
    assert!(rig.run().failed > 0);
}
