//! Handoffs beside a client that makes up the parameters of its requests, and beside the same requests without
//! parameters. Both engines are in this process.
//!
//! Requests arrive at a part of the rate at which the engines end plain ones, which the run measures first. So a latency
//! is that of a handoff, not the wait for a turn. Turns with and without parameters alternate, each with new engines;
//! quantiles are those of the handoffs of all rounds.

use std::time::Duration;

use kvferry_refengine::pair::Pair;
use kvferry_refengine::pair::invented::{self, Arrivals, Clients, DeadAddresses, Times};

use super::Settings;
use super::rank::{PATIENCE, failed};
use crate::failure::Failure;
use crate::report::{Bound, Row};
use crate::stats::{Spread, median, quantile_of};
use crate::units;

/// Made-up requests of a turn.
const REQUESTS: usize = 10_000;
const REQUESTS_QUICK: usize = 1_000;
/// Made-up requests for each handoff.
const PER_HANDOFF: usize = 20;
/// Requests that arrive, of those that the engines end in the same time.
const LOAD: f64 = 0.25;
/// Runs that measure how many requests the engines end, and requests that arrive with each of their steps: more than the
/// engines compute in it.
const CALIBRATIONS: usize = 3;
const FLOOD: usize = 8;
/// Time of a step beside what the processor does. A small model's step on a GPU takes longer.
const STEP: Duration = Duration::from_millis(2);
/// Latency of a handoff, and time to its first token, of that beside requests without parameters.
const OF_PLAIN: Bound = Bound::AtMost(1.2);
const PLAIN: &str = "plain requests";

pub(super) fn run(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let requests = if settings.options.effort.quick { REQUESTS_QUICK } else { REQUESTS };
    let dead = DeadAddresses::new()?;
    settings.bar.set_message("plain requests, as many as the engines end");
    let flood = Clients {
        requests: requests / 4,
        arrivals: Arrivals::PerTick(FLOOD),
        per_handoff: PER_HANDOFF,
        step: STEP,
        dead: None,
    };
    let ended_in = |_| Ok(turn(&flood)?.0.all.as_secs_f64());
    let times = (0..CALIBRATIONS).map(ended_in).collect::<Result<Vec<_>, Failure>>()?;
    let capacity = flood.requests as f64 / median(&times);
    let rate = capacity * LOAD;

    // Beside made-up requests, and beside plain ones: the times of each round, and the part that was fetched.
    let mut latencies = [Vec::new(), Vec::new()];
    let mut first_tokens = [Vec::new(), Vec::new()];
    let mut fetched = [Vec::new(), Vec::new()];
    for round in 0..settings.rounds {
        settings.bar.set_message(format!("made-up requests, round {}", round + 1));
        for turn_of_two in 0..2 {
            let at = (round + turn_of_two) % 2;
            let arrivals = Arrivals::PerSecond(rate);
            let dead = (at == 0).then_some(&dead);
            let clients =
                Clients { requests, arrivals, per_handoff: PER_HANDOFF, step: STEP, dead };
            let (times, ok) = turn(&clients)?;
            latencies[at].push(millis(&times.handoffs));
            first_tokens[at].push(millis(&times.first_tokens));
            fetched[at].push(100.0 * ok as f64 / times.handoffs.len() as f64);
        }
    }
    let beside = format!("a handoff beside {} made-up requests", units::count(requests as u64));
    let of_all = |rounds: &[Vec<f64>], part| quantile_of(&mut rounds.concat(), part);
    let row = |what, [made_up, plain]: &[Vec<Vec<f64>>; 2], part| {
        let of_rounds = |rounds: &[Vec<f64>]| {
            Spread::of(rounds.iter().map(|round| quantile_of(&mut round.clone(), part)).collect())
        };
        Row::new("invented", format!("{beside}: {what}"), "ms", of_rounds(made_up))
            .beside(PLAIN, of_rounds(plain))
    };
    let judged = |what, times: &[Vec<Vec<f64>>; 2], part| {
        let [made_up, plain] = times;
        let ratio = Spread::of(vec![of_all(made_up, part) / of_all(plain, part)]);
        row(what, times, part).judged(PLAIN, ratio, OF_PLAIN)
    };
    let arrive = Row::new("invented", "requests that arrive", "per s", Spread::of(vec![rate]))
        .beside("requests that the engines end", Spread::of(vec![capacity]));
    let [of_made_up, of_plain] = fetched.map(Spread::of);
    let moved = Row::new("invented", "handoffs whose KV was fetched", "%", of_made_up);
    let moved = moved.beside(PLAIN, of_plain);
    let first = judged("to its first token, p50", &first_tokens, 0.5);
    Ok(vec![arrive, moved, first, judged("p50", &latencies, 0.5), judged("p99", &latencies, 0.99)])
}

fn millis(times: &[Duration]) -> Vec<f64> {
    times.iter().map(|time| time.as_secs_f64() * 1e3).collect()
}

/// Runs the clients on new engines, and checks the handoffs. Returns how many of them were fetched.
fn turn(clients: &Clients<'_>) -> Result<(Times, u64), Failure> {
    let mut pair = invented::pair(PATIENCE)?;
    // The session between the two is open afterwards.
    const FIRST: &str = "first";
    pair.hand_off(FIRST, kvferry_refengine::pair::prompt(u64::MAX - 1, 40), 1);
    pair.run();
    let (before, _) = pair.fetched();
    let times = clients.run(&mut pair, |_: &Pair| {});
    let fetched = pair.fetched().0 - before;
    pair.check_empty(PATIENCE).map_err(failed)?;
    for id in clients.handoffs().chain([FIRST.to_owned()]) {
        pair.check_right(&id).map_err(Failure::Check)?;
    }
    Ok((times, fetched))
}
