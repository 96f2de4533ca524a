//! A client that makes up `kv_transfer_params`.

use crate::kvferry_adapter::kit::{Asserts, LONG, Pair, prompt};
use kvferry_refengine::pair::invented::{
    self, Arrivals, BLOCKS_EACH, Clients, DeadAddresses, IDLE, KINDS, PROMPT,
};
use kvferry_refengine::{FinishReason, RequestId, continuation};
use kvferry_testkit::{PATIENCE, Watchdog};
use std::time::Duration;

/// Runs so many made-up requests, with handoffs beside them.
fn run(invented: usize) {
    let dead = DeadAddresses::new().unwrap();
    let mut pair = invented::pair(LONG).unwrap();
    // Its address is known, so it is no stranger.
    hands_over(&mut pair, "first");
    pair.decode.kvferry_adapter.take_stats();
    pair.prefill.kvferry_adapter.take_stats();

    let mut most = (0, 0);
    let clients = Clients {
        requests: invented,
        arrivals: Arrivals::PerTick(8),
        per_handoff: 200,
        step: Duration::ZERO,
        dead: Some(&dead),
    };
    let times = clients.run(&mut pair, |pair| {
        // Without those that the worker half is giving up: when it has done so depends on its threads.
        let unclaimed = pair.prefill.gauge("unclaimed_blocks");
        assert!(
            unclaimed <= IDLE as usize,
            "{unclaimed} blocks are kept for which no consumer has asked"
        );
        most.0 = most.0.max(pair.prefill.gauge("held_blocks"));
        let waiting = pair.decode.gauge("waiting_loads") * BLOCKS_EACH;
        assert!(waiting <= IDLE as usize + 8, "{waiting} blocks wait");
        most.1 = most.1.max(waiting);
    });
    println!("at most {} blocks were held and {} waited", most.0, most.1);
    let real: Vec<_> = clients.handoffs().collect();
    assert_eq!(times.handoffs.len(), real.len(), "handoffs never ended");
    real.iter().for_each(|id| pair.assert_right(id));
    pair.assert_empty();
    assert_counted(&pair, invented, real.len() as u64);
    hands_over(&mut pair, "last");
}

/// Begins handoffs until one is not computed.
fn hands_over(pair: &mut Pair, name: &str) {
    let (before, _) = pair.fetched();
    for n in 0.. {
        pair.works(&format!("{name}-{n}"), fastrand::u64(1 << 32..));
        if pair.fetched().0 > before {
            return;
        }
    }
}

/// Every made-up request has ended, and is in the counters once.
fn assert_counted(pair: &Pair, invented: usize, real: u64) {
    let (prefill, decode) =
        (pair.prefill.kvferry_adapter.take_stats(), pair.decode.kvferry_adapter.take_stats());
    let sum = |counts: &std::collections::BTreeMap<String, u64>| counts.values().sum::<u64>();
    println!("prefill: {prefill:?}\ndecode: {decode:?}");
    let at_prefill = (0..invented).filter(|n| n % KINDS == 0).count() as u64;
    assert_eq!(prefill.offered, at_prefill + real);
    // A real one, too, may have to make room before its consumer's message arrives.
    let expired = prefill.withdrawn.get("expired").copied().unwrap_or(0);
    assert!((at_prefill..=at_prefill + real).contains(&expired), "{expired} of {at_prefill}");
    let loaded = decode.fetched.get("ok").copied().unwrap_or(0);
    let failed = sum(&decode.fetched) - loaded;
    let at_decode = invented as u64 - at_prefill;
    assert_eq!(failed + sum(&decode.refused), at_decode + (real - loaded));
    for n in (0..invented).filter(|n| n % KINDS != 0) {
        let id = RequestId::from(invented::name(n).as_str());
        let reason = pair.outputs.finished[&id].reason;
        assert_eq!(reason, FinishReason::Length, "{n}");
        let right = continuation(&pair.decode.engine.config().model, &prompt(n as u64, PROMPT), 1);
        assert_eq!(pair.outputs.of(&invented::name(n)), right, "{n}");
    }
}

#[test]
fn made_up_handoffs_hold_no_block_beyond_its_bound_and_are_all_counted() {
    let _watched = Watchdog::new(PATIENCE);
    // Those at the prefill engine have twice the blocks that may be kept, and two real ones are among them.
    run(KINDS * 30);
}

/// `kvferry bench handoff --only invented` measures the latency of the handoffs.
#[test]
#[ignore = "slow: make test-slow"]
fn ten_thousand_made_up_handoffs_hold_no_block_beyond_its_bound_and_are_all_counted() {
    let _watched = Watchdog::new(PATIENCE);
    run(10_000);
}
