//! Random requests on a lane, random faults in the network and in both memories, and what must hold
//! all the same: each request ends at most once and in order, a request that is done has its bytes
//! where they belong, a refused one changed no memory but its own, a notification is delivered once
//! and after its bytes, and nothing that was damaged passes for whole where there are checksums.

use super::Model;
use crate::lane_pair::{ANSWERS, LanePair, Order, REQUESTS};
use kvferry_proto::Op;
use kvferry_proto::fuzzing::{Met, Script};
use std::time::Duration;

pub const MODEL: Model = Model {
    name: "lane_model",
    run,
    rows: &[SPLIT, WINDOW, SLOW, FLIP, RESET, MEMORY],
    columns: &["between", "head or trailer", "payload", "discard", "flush", "answer"],
    unreachable: &[],
    cases: (6000, 160),
};

const SPLIT: &str = "split";
const WINDOW: &str = "small window";
const SLOW: &str = "slow memory";
const FLIP: &str = "flipped bit";
const RESET: &str = "reset";
const MEMORY: &str = "memory fails";

const LEN: usize = 4096;

/// A few requests of each kind, without and with checksums and keyed tags, undisturbed.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = super::random_seeds();
    for checksum in 0..4 {
        for kind in 0..3 {
            seeds.push([[checksum, 0, 0, 1].as_slice(), &[kind, 1, 9, 7, 0, 0].repeat(3)].concat());
        }
    }
    seeds
}

/// Requests whose ranges are disjoint. One in eight reaches beyond the target's memory.
fn orders(script: &mut Script<'_>) -> Vec<Order> {
    let (mut near, mut far) = (0, 0);
    let mut orders = Vec::new();
    for number in 0..=script.below(9) as u8 {
        let op = script.pick(&[Op::Write, Op::Read, Op::Notify]);
        let ranges = if op == Op::Notify { 0 } else { 1 + script.below(3) };
        let start = near;
        let mut places: Vec<_> = (0..ranges)
            .map(|_| {
                let len = 1 + script.below(100);
                far += len;
                near += len;
                far - len..far
            })
            .collect();
        if script.below(8) == 0
            && let Some(last) = places.last_mut()
        {
            *last = LEN..LEN + last.len();
        }
        let noted = op == Op::Notify || (op == Op::Write && script.flip());
        let note = noted.then(|| vec![number; 1 + script.below(30)]);
        orders.push(Order { op, near: start, far: places, note });
    }
    orders
}

fn run(bytes: &[u8], met: Met<'_>) {
    let mut script = Script::new(bytes);
    let options = script.byte();
    let (checksum, keyed) = (options & 1 == 1, options & 2 == 2);
    let busy = script.below(16) == 15;
    let early = usize::from(script.byte());
    let orders = orders(&mut script);
    let many = orders.len();
    let mut pair = LanePair::with_guard(LEN, checksum, keyed, orders);
    pair.busy = busy;
    if early > 200 {
        pair.open_with_early_bytes(early - 200);
    }
    while !script.is_empty() {
        match script.below(10) {
            0..4 => {
                for _ in 0..=script.below(4) {
                    pair.step();
                }
            }
            fault => {
                let doing = pair.doing();
                if doing != "broken"
                    && let Some(fault) = disturb(&mut pair, fault, &mut script)
                {
                    met(fault, doing);
                }
            }
        }
    }
    for wire in &mut pair.wires {
        wire.window = usize::MAX;
    }
    pair.run();
    let disturbed = pair.wires.iter().any(|wire| wire.flip.is_some());
    if pair.ended.len() < many && disturbed {
        // What only a deadline would end.
        pair.reset();
    }
    assert!(pair.ended.len() == many || pair.is_broken(), "a request waits for ever");
    assert!(pair.is_broken() || disturbed || pair.is_between());
    pair.check();
}

/// Does something to the network or a memory; which, if it could.
fn disturb(pair: &mut LanePair, fault: usize, script: &mut Script<'_>) -> Option<&'static str> {
    let direction = script.pick(&[REQUESTS, ANSWERS]);
    let at = script.byte();
    match fault {
        4 => {
            let wire = &mut pair.wires[direction];
            wire.splits.insert(wire.sent + u64::from(at));
            Some(SPLIT)
        }
        5 => {
            pair.wires[direction].window = script.pick(&[1, 7, 64, usize::MAX]);
            Some(WINDOW)
        }
        6 => {
            pair.memory_delay = Duration::from_millis(u64::from(at % 4));
            pair.chunk = script.pick(&[1, 10, usize::MAX]);
            Some(SLOW)
        }
        7 => {
            let wire = &mut pair.wires[direction];
            if wire.flip.is_some() {
                return None;
            }
            wire.flip = Some((wire.sent + u64::from(at), 1 << script.below(8)));
            Some(FLIP)
        }
        8 => {
            if !at.is_multiple_of(4) {
                return None;
            }
            pair.reset();
            Some(RESET)
        }
        _ => {
            pair.fail_memory(usize::from(at) % 120);
            Some(MEMORY)
        }
    }
}
