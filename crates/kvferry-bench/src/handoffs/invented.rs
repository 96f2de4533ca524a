//! Handoffs beside a client that makes up the parameters of its requests, and beside the same requests without
//! parameters. Both engines are in this process.

use std::time::Duration;

use kvferry_refengine::pair::invented::{self, DeadAddresses};

use super::Settings;
use super::rank::{PATIENCE, failed};
use crate::failure::Failure;
use crate::report::{Bound, Row};
use crate::stats::{Spread, quantile_of};
use crate::units;

/// Made-up requests of a round.
const REQUESTS: usize = 10_000;
const REQUESTS_QUICK: usize = 1_000;
/// Latency of a handoff, of that beside requests without parameters.
const OF_PLAIN: Bound = Bound::AtMost(1.2);
const PLAIN: &str = "plain requests";

pub(super) fn run(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let count = if settings.options.effort.quick { REQUESTS_QUICK } else { REQUESTS };
    let dead = DeadAddresses::new()?;
    // Beside made-up requests, and beside plain ones.
    let (mut p50, mut p99) = ([Vec::new(), Vec::new()], [Vec::new(), Vec::new()]);
    for round in 0..settings.rounds {
        settings.bar.set_message(format!("made-up requests, round {}", round + 1));
        for turn in 0..2 {
            let at = (round + turn) % 2;
            let mut latencies = latencies(count, (at == 0).then_some(&dead))?;
            p50[at].push(quantile_of(&mut latencies, 0.5));
            p99[at].push(quantile_of(&mut latencies, 0.99));
        }
    }
    let beside = format!("a handoff beside {} made-up requests", units::count(count as u64));
    let row = |what, [made_up, plain]: [Vec<f64>; 2]| {
        let ratio = Spread::ratio(&made_up, &plain);
        let row = Row::new("invented", format!("{beside}: {what}"), "ms", Spread::of(made_up));
        (row.beside(PLAIN, Spread::of(plain)), ratio)
    };
    let (median, ratio) = row("p50", p50);
    Ok(vec![median.judged(PLAIN, ratio, OF_PLAIN), row("p99", p99).0])
}

/// The latencies of handoffs, in milliseconds, beside `count` requests of new engines.
fn latencies(count: usize, dead: Option<&DeadAddresses>) -> Result<Vec<f64>, Failure> {
    let mut pair = invented::pair(PATIENCE)?;
    // The session between the two is open afterwards.
    const FIRST: &str = "first";
    pair.hand_off(FIRST, kvferry_refengine::pair::prompt(u64::MAX - 1, 40), 1);
    pair.run();
    let latencies = invented::run(&mut pair, count, dead, |_| {});
    pair.check_empty(PATIENCE).map_err(failed)?;
    for id in invented::handoffs(count).chain([FIRST.to_owned()]) {
        pair.check_right(&id).map_err(Failure::Check)?;
    }
    Ok(latencies.iter().map(Duration::as_secs_f64).map(|seconds| seconds * 1e3).collect())
}
