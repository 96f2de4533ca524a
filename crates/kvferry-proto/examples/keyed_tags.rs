//! What keyed tags cost a request, in time: a write of one descriptor and its answer, both ends of a lane
//! in one thread, with CRCs and with tags in turn.
//!
//! `cargo run --release -p kvferry-proto --example keyed_tags`, on a machine that does nothing else.
#![allow(clippy::print_stdout, reason = "a program that measures")]

use kvferry_models::lane_ends::LaneEnds;
use std::time::Instant;

const REQUESTS: u32 = 100_000;
const ROUNDS: usize = 11;

/// Nanoseconds of a request.
fn measure(lane: &mut LaneEnds) -> f64 {
    let began = Instant::now();
    (0..REQUESTS).for_each(|_| lane.request());
    began.elapsed().as_secs_f64() * 1e9 / f64::from(REQUESTS)
}

fn main() {
    let [mut plain, mut keyed] = [false, true].map(LaneEnds::new);
    let mut rounds: Vec<_> =
        (0..ROUNDS).map(|_| (measure(&mut plain), measure(&mut keyed))).collect();
    rounds.sort_by(|a, b| (a.1 - a.0).total_cmp(&(b.1 - b.0)));
    let (with_crc, with_tags) = rounds[ROUNDS / 2];
    println!(
        "a request and its answer: {with_crc:.0} ns with CRCs, {with_tags:.0} ns with keyed tags, {:.0} ns more \
         (the median of {ROUNDS} differences, {:.0} to {:.0})",
        with_tags - with_crc,
        rounds[0].1 - rounds[0].0,
        rounds[ROUNDS - 1].1 - rounds[ROUNDS - 1].0,
    );
}
