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
/// Latency of a handoff, of that beside requests without parameters.
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
        dead: None,
    };
    let ended_in = |_| Ok(turn(&flood)?.all.as_secs_f64());
    let times = (0..CALIBRATIONS).map(ended_in).collect::<Result<Vec<_>, Failure>>()?;
    let capacity = flood.requests as f64 / median(&times);
    let rate = capacity * LOAD;

    // Beside made-up requests, and beside plain ones: the latencies of each round.
    let mut latencies = [Vec::new(), Vec::new()];
    for round in 0..settings.rounds {
        settings.bar.set_message(format!("made-up requests, round {}", round + 1));
        for turn_of_two in 0..2 {
            let at = (round + turn_of_two) % 2;
            let arrivals = Arrivals::PerSecond(rate);
            let dead = (at == 0).then_some(&dead);
            let clients = Clients { requests, arrivals, per_handoff: PER_HANDOFF, dead };
            let handoffs = turn(&clients)?.handoffs.into_iter();
            let millis = |latency: Duration| latency.as_secs_f64() * 1e3;
            latencies[at].push(handoffs.map(millis).collect::<Vec<_>>());
        }
    }
    let beside = format!("a handoff beside {} made-up requests", units::count(requests as u64));
    let row = |what, part| {
        let of_rounds = |rounds: &[Vec<f64>]| {
            Spread::of(rounds.iter().map(|round| quantile_of(&mut round.clone(), part)).collect())
        };
        let of_all = |rounds: &[Vec<f64>]| quantile_of(&mut rounds.concat(), part);
        let [made_up, plain] = &latencies;
        let ratio = Spread::of(vec![of_all(made_up) / of_all(plain)]);
        Row::new("invented", format!("{beside}: {what}"), "ms", of_rounds(made_up))
            .beside(PLAIN, of_rounds(plain))
            .judged(PLAIN, ratio, OF_PLAIN)
    };
    let arrive = Row::new("invented", "requests that arrive", "per s", Spread::of(vec![rate]))
        .beside("requests that the engines end", Spread::of(vec![capacity]));
    Ok(vec![arrive, row("p50", 0.5), row("p99", 0.99)])
}

/// Runs the clients on new engines, and checks the handoffs.
fn turn(clients: &Clients<'_>) -> Result<Times, Failure> {
    let mut pair = invented::pair(PATIENCE)?;
    // The session between the two is open afterwards.
    const FIRST: &str = "first";
    pair.hand_off(FIRST, kvferry_refengine::pair::prompt(u64::MAX - 1, 40), 1);
    pair.run();
    let times = clients.run(&mut pair, |_: &Pair| {});
    pair.check_empty(PATIENCE).map_err(failed)?;
    for id in clients.handoffs().chain([FIRST.to_owned()]) {
        pair.check_right(&id).map_err(Failure::Check)?;
    }
    Ok(times)
}
