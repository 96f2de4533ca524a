//! Many threads calling at once: each with its own batch of 100 to 500 blocks of 32 KiB, together
//! against one caller who makes the same calls one after another.

use std::sync::Barrier;
use std::time::Instant;

use kvferry::{Batch, Options};

use crate::cli::Op;
use crate::failure::Failure;
use crate::stats::Spread;

use super::messages::Program;
use super::report::{Bound, Row};
use super::verify::Blocks;
use super::{Bench, rounds, transfer};

const BLOCK: usize = 32 << 10;
const FEWEST_BLOCKS: usize = 100;
const MOST_BLOCKS: usize = 500;

/// So much longer than other turns: starting ten threads on two cores takes a millisecond or two.
const CALLS_TURN: usize = 4;

const REQUIRED: Bound = Bound::AtLeast(0.95);

/// The blocks of each caller, side by side.
fn shares(callers: usize) -> Vec<Blocks> {
    let span = MOST_BLOCKS - FEWEST_BLOCKS;
    let mut at = 0;
    let share = |caller: usize| {
        let count = FEWEST_BLOCKS + span * caller / callers.saturating_sub(1).max(1);
        let share = Blocks { at, block: BLOCK, count };
        at += count * BLOCK;
        share
    };
    (0..callers).map(share).collect()
}

/// What so many callers need of the arena.
pub(super) fn bytes(callers: usize) -> usize {
    shares(callers).iter().map(|share| share.count * share.block).sum()
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    let settings = bench.settings;
    let many = settings.args.callers.iter().map(|callers| callers.0).filter(|&callers| callers > 1);
    let mut rows = Vec::new();
    for callers in many {
        for &op in &settings.args.op {
            rows.push(measure(bench, op, callers)?);
        }
    }
    Ok(rows)
}

fn measure(bench: &mut Bench<'_>, op: Op, callers: usize) -> Result<Row, Failure> {
    let (rounds, shares) = (bench.settings.rounds, shares(callers));
    let work = format!("{}, {callers} callers", op.name());
    bench.bar.inc_length(rounds as u64);
    let batches: Vec<Batch> =
        shares.iter().map(|&share| bench.batch(op, share)).collect::<Result<_, _>>()?;
    let calls = (CALLS_TURN * bench.settings.turn_bytes / bytes(callers)).max(1);
    verify(bench, op, &shares, &batches, "before")?;
    let (mut one, mut all) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: {work}", round + 1));
        for turn in 0..2 {
            match (round + turn) % 2 {
                0 => one.push(rate(bench, op, &batches, calls, 1)?),
                _ => all.push(rate(bench, op, &batches, calls, callers)?),
            }
        }
    }
    verify(bench, op, &shares, &batches, "after")?;
    let gb = |rates: &[f64]| Spread::of(rates.iter().map(|rate| rate / 1e9).collect());
    Ok(Row::new("callers", work, "GB/s", gb(&all)).beside("one caller", gb(&one)).judged(
        "one caller",
        Spread::ratio(&all, &one),
        REQUIRED,
    ))
}

/// Bytes per second of every batch `calls` times, by so many threads.
fn rate(
    bench: &Bench<'_>,
    op: Op,
    batches: &[Batch],
    calls: usize,
    threads: usize,
) -> Result<f64, Failure> {
    let ready = Barrier::new(threads);
    // Each thread says itself when it began and ended: the one that started them may be asleep.
    let caller = |batches: Vec<&Batch>| {
        ready.wait();
        let started = Instant::now();
        for _ in 0..calls {
            for batch in &batches {
                transfer(&bench.peer, op, batch, &Options::default())?;
            }
        }
        Ok::<_, Failure>((started, Instant::now()))
    };
    let caller = &caller;
    let times = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..threads)
            .map(|thread| batches.iter().skip(thread).step_by(threads).collect())
            .map(|batches: Vec<&Batch>| scope.spawn(move || caller(batches)))
            .collect();
        let joined = callers.into_iter().map(|caller| caller.join().expect("no caller panics"));
        joined.collect::<Result<Vec<_>, _>>()
    })?;
    let first = times.iter().map(|(started, _)| *started).min().expect("there is a caller");
    let last = times.iter().map(|(_, ended)| *ended).max().expect("there is a caller");
    let bytes: u64 = batches.iter().map(Batch::bytes).sum();
    Ok((bytes * calls as u64) as f64 / (last - first).as_secs_f64())
}

/// All callers at once, each to a poisoned destination; then every one is looked at.
fn verify(
    bench: &mut Bench<'_>,
    op: Op,
    shares: &[Blocks],
    batches: &[Batch],
    when: &str,
) -> Result<(), Failure> {
    let mut seeds = Vec::new();
    for &share in shares {
        seeds.push(rounds::prepare(bench, Program::Kvferry, op, share)?);
    }
    rate(bench, op, batches, 1, batches.len())?;
    for (caller, (&share, seed)) in shares.iter().zip(seeds).enumerate() {
        if let Some(wrong) = rounds::look(bench, Program::Kvferry, op, share, seed)? {
            return Err(Failure::Check(format!(
                "WRONG BYTES {when} the rounds: {} of caller {caller}: {wrong}",
                op.name()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_callers_have_between_100_and_500_blocks_and_none_is_shared() {
        let shares = shares(10);
        assert_eq!((shares[0].count, shares[9].count), (100, 500));
        for pair in shares.windows(2) {
            assert_eq!(pair[0].at + pair[0].count * BLOCK, pair[1].at);
        }
        assert_eq!(bytes(10), shares[9].at + 500 * BLOCK);
        assert_eq!(bytes(1), 100 * BLOCK);
    }
}
