//! Processor time of an agent with live sessions and nothing to do.

use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::machine::agent_time;
use crate::stats::Spread;

use super::messages::{Ask, Reach};
use super::sessions::Sessions;
use super::{Bench, start_agent};
use crate::report::Row;

const SESSIONS: usize = 8;

/// Processor time right after a transfer is still the transfer's.
const SETTLE: Duration = Duration::from_millis(500);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    let rounds = bench.settings.rounds.min(3);
    bench.bar.inc_length(rounds as u64 + 1);
    bench.step("opening 8 sessions");
    let agent = start_agent(bench.settings, bench.transport)?;
    let reaches: Vec<Reach> = bench.link.ask(&Ask::Agents(SESSIONS))?;
    let sessions = Sessions::open(&agent, &reaches)?;
    let (mut ours, mut theirs, mut ready) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: idling", round + 1));
        let (there, started) = (bench.link.usage()?.cpu, Instant::now());
        ours.push(percent_of_a_core(bench.settings.idle_for)?);
        theirs.push(percent(bench.link.usage()?.cpu - there, started.elapsed()));
        // The slowest.
        ready.push(sessions.write(SESSIONS, |call| call)?.into_iter().fold(0.0, f64::max));
    }
    let row = |work, unit, rounds| Row::new("idle", work, unit, Spread::of(rounds));
    Ok(vec![
        row("agent with 8 live sessions", "% of a core", ours).at_most(0.5),
        row("8 agents with a live session each", "% of a core", theirs),
        row("4 KiB write on a session that idled", "µs", ready),
    ])
}

/// Processor time of this process's agents while it sleeps for `idle_for`.
pub(super) fn percent_of_a_core(idle_for: Duration) -> Result<f64, Failure> {
    std::thread::sleep(SETTLE);
    let (before, started) = (agent_time()?, Instant::now());
    std::thread::sleep(idle_for);
    Ok(percent(agent_time()? - before, started.elapsed()))
}

fn percent(used: Duration, of: Duration) -> f64 {
    used.as_secs_f64() / of.as_secs_f64() * 100.0
}
