//! One block of 4 KiB: how long a single call takes, kvferry's and the floor's in short turns within
//! each round.

use std::time::Instant;

use kvferry::Options;

use crate::cli::{Op, Placement, Size};
use crate::failure::Failure;
use crate::stats::{Spread, quantile_of};

use super::messages::Program;
use super::placement::Pinned;
use super::report::{Bound, Row};
use super::rounds::verify_move;
use super::verify::Blocks;
use super::{Bench, transfer};

const ONE: Size = Size { block: 4096, count: 1 };
const BLOCKS: Blocks = Blocks { at: 0, block: 4096, count: 1 };

/// Turns of each program within a round.
const TURNS: usize = 10;

/// Quantiles that are judged, with the ratio to the floor that is allowed.
const JUDGED: [(&str, f64, f64); 2] = [("p50", 0.5, 1.1), ("p99", 0.99, 1.3)];

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for &placement in &bench.settings.placements {
        let pinned = Pinned::new(placement)?;
        let mut own = match &pinned {
            Some(pinned) => Some(Bench::open_on(pinned.target, bench.settings, bench.bar.clone())?),
            None => None,
        };
        for &op in &bench.settings.args.op {
            rows.extend(measure(own.as_mut().unwrap_or(bench), op, placement)?);
        }
    }
    Ok(rows)
}

fn measure(bench: &mut Bench<'_>, op: Op, placement: Placement) -> Result<Vec<Row>, Failure> {
    let rounds = bench.settings.rounds;
    let work = match placement {
        Placement::Apart => format!("{} 4 KiB, a core each", op.name()),
        Placement::Together => format!("{} 4 KiB, one core", op.name()),
        Placement::Free => format!("{} 4 KiB", op.name()),
    };
    let turn = bench.settings.latency_calls / TURNS;
    bench.bar.inc_length(rounds as u64);
    verify(bench, op, "before")?;
    // A turn of each to warm up.
    kvferry_turn(bench, op, turn)?;
    floor_turn(bench, op, turn)?;
    // In each round, microseconds of every call.
    let (mut kvferry, mut floor) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: {work}", round + 1));
        let (mut kvferry_us, mut floor_us) = (Vec::new(), Vec::new());
        for pair in 0..2 * TURNS {
            match (round + pair) % 2 {
                0 => kvferry_us.extend(kvferry_turn(bench, op, turn)?),
                _ => floor_us.extend(floor_turn(bench, op, turn)?),
            }
        }
        kvferry.push(kvferry_us);
        floor.push(floor_us);
    }
    verify(bench, op, "after")?;
    Ok(JUDGED.map(|judged| row(&work, judged, &mut kvferry, &mut floor)).into())
}

fn row(
    work: &str,
    (name, part, allowed): (&str, f64, f64),
    kvferry: &mut [Vec<f64>],
    floor: &mut [Vec<f64>],
) -> Row {
    let quantiles = |rounds: &mut [Vec<f64>]| -> Vec<f64> {
        rounds.iter_mut().map(|calls| quantile_of(calls, part)).collect()
    };
    let (kvferry, floor) = (quantiles(kvferry), quantiles(floor));
    let ratio = Spread::ratio(&kvferry, &floor);
    Row::new("latency", format!("{work}, {name}"), "µs", Spread::of(kvferry))
        .beside("floor", Spread::of(floor))
        .judged("floor", ratio, Bound::AtMost(allowed))
}

fn kvferry_turn(bench: &Bench<'_>, op: Op, calls: usize) -> Result<Vec<f64>, Failure> {
    let batch = bench.batch(op, BLOCKS)?;
    let options = Options::default();
    let call = || {
        let started = Instant::now();
        transfer(&bench.peer, op, &batch, &options)?;
        Ok(started.elapsed().as_secs_f64() * 1e6)
    };
    (0..calls).map(|_| call()).collect()
}

fn floor_turn(bench: &mut Bench<'_>, op: Op, calls: usize) -> Result<Vec<f64>, Failure> {
    let (floor, memory) = (&mut bench.floors[0], &mut bench.floor_memory);
    let mut call = || {
        let started = Instant::now();
        match op {
            Op::Write => floor.write(memory, ONE)?,
            Op::Read => floor.read(memory, ONE)?,
        }
        Ok(started.elapsed().as_secs_f64() * 1e6)
    };
    (0..calls).map(|_| call()).collect()
}

fn verify(bench: &mut Bench<'_>, op: Op, when: &str) -> Result<(), Failure> {
    let wrong = verify_move(bench, Program::Kvferry, op, BLOCKS, |bench| {
        kvferry_turn(bench, op, 1).map(drop)
    })?;
    match wrong {
        None => Ok(()),
        Some(wrong) => {
            let op = op.name();
            Err(Failure::Check(format!("WRONG BYTES {when} the rounds: {op} 4 KiB: {wrong}")))
        }
    }
}
