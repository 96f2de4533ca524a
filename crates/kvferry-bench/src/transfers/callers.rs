//! Concurrent callers: each moves its own batch of 100 to 500 blocks of 32 KiB. Their total is compared
//! with one caller that makes the same calls one after another. Within a host also two callers with
//! large blocks, compared with two threads that call `process_vm_writev` with the same tables.

use std::sync::Barrier;
use std::time::Instant;

use kvferry::{Batch, Options};

use crate::failure::Failure;
use crate::options::{Op, Size, Streams};
use crate::stats::Spread;

use super::subject::{Cell, Subject, check_destination, prepare_memory};
use super::tables::{Load, Table};
use super::{Bench, Subjects, transfer};
use crate::report::{Bound, Figure, Row};

const BLOCK: usize = 32 << 10;
const BLOCKS_MIN: usize = 100;
const BLOCKS_MAX: usize = 500;

/// Turns are this much longer than others: starting ten threads takes a millisecond or two.
const CALLS_TURN: usize = 4;

const REQUIRED: Bound = Bound::AtLeast(0.95);

/// Batches that two callers within a host move, one half each.
const PAIRS: [Size; 2] = [Size { block: 1 << 20, count: 256 }, Size { block: 16 << 20, count: 16 }];
pub(super) const PAIR_BYTES: usize = 256 << 20;
const PAIR_PART_MIN: f64 = 0.9;

/// The blocks of each caller, side by side.
fn shares(callers: usize) -> Vec<Table> {
    let span = BLOCKS_MAX - BLOCKS_MIN;
    let mut at = 0;
    let share = |caller: usize| {
        let count = BLOCKS_MIN + span * caller / callers.saturating_sub(1).max(1);
        let share = Table::scatter(at, Size { block: BLOCK, count });
        at += count * BLOCK;
        share
    };
    (0..callers).map(share).collect()
}

/// Bytes of the arena that this many callers need.
pub(super) fn bytes(callers: usize) -> usize {
    shares(callers).iter().map(Table::bytes).sum()
}

pub(super) fn run(bench: &mut Bench<'_>, all: &mut Subjects) -> Result<Vec<Row>, Failure> {
    let settings = bench.settings;
    let many = settings.options.callers.iter().copied().filter(|&callers| callers > 1);
    let mut rows = Vec::new();
    for callers in many {
        for &op in &settings.options.ops {
            rows.push(measure(bench, all, op, callers)?);
        }
    }
    if all.process_vm.is_some() && settings.options.ops.contains(&Op::Write) {
        for size in PAIRS {
            rows.push(two_callers(bench, size)?);
        }
    }
    Ok(rows)
}

fn measure(
    bench: &mut Bench<'_>,
    all: &mut Subjects,
    op: Op,
    callers: usize,
) -> Result<Row, Failure> {
    let (rounds, shares) = (bench.settings.rounds, shares(callers));
    let name = format!("{callers} callers");
    let work = format!("{}, {name}", op.name());
    bench.bar.inc_length(rounds as u64);
    let batches: Vec<Batch> =
        shares.iter().map(|share| bench.batch(op, share)).collect::<Result<_, _>>()?;
    let calls = (CALLS_TURN * bench.settings.turn_bytes / bytes(callers)).max(1);
    let load = Load { name, batches: shares, size: None };
    let cell = Cell { op, load: load.into(), streams: Streams(None) };
    verify(bench, all, &cell, &batches, "before")?;
    let mut engines: Vec<Concurrent> = all.engines.iter().map(|_| Concurrent::default()).collect();
    let (mut one, mut many) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: {work}", round + 1));
        for turn in 0..2 {
            match (round + turn) % 2 {
                0 => one.push(rate(bench, op, &batches, calls, 1)?),
                _ => many.push(rate(bench, op, &batches, calls, callers)?),
            }
        }
        for (engine, outcome) in all.engines.iter_mut().zip(&mut engines) {
            outcome.take_turn(bench, engine, &cell, callers);
        }
    }
    verify(bench, all, &cell, &batches, "after")?;
    let gb = |rates: &[f64]| Spread::of(rates.iter().map(|rate| rate / 1e9).collect());
    let mut row = Row::new("callers", work, "GB/s", gb(&many)).beside("one caller", gb(&one));
    row.figures.extend(all.engines.iter().zip(engines).map(|(engine, outcome)| {
        let who = engine.who();
        match outcome.why {
            Some(why) => Figure::failed(who, why),
            None => Figure::of(who, gb(&outcome.rates)),
        }
    }));
    Ok(row.judged("one caller", Spread::ratio(&many, &one), REQUIRED))
}

/// Turns of another engine with as many callers.
#[derive(Debug, Default)]
struct Concurrent {
    rates: Vec<f64>,
    why: Option<String>,
}

impl Concurrent {
    fn take_turn(
        &mut self,
        bench: &mut Bench<'_>,
        engine: &mut dyn Subject,
        cell: &Cell,
        callers: usize,
    ) {
        if self.why.is_some() {
            return;
        }
        match engine.together(bench, cell, callers, 1) {
            Ok(Some((took, 0))) => self.rates.push(cell.load.bytes() as f64 / took),
            Ok(Some((_, failed))) => {
                self.why = Some(format!("{failed} of {callers} calls failed"));
                // Some engines never recover from such a failure.
                engine.discard();
            }
            Ok(None) => self.why = Some("it has no concurrent calls".into()),
            Err(failure) => {
                self.why = Some(failure.to_string());
                engine.discard();
            }
        }
        engine.pause();
    }
}

/// Bytes per second when `threads` move every batch `calls` times.
fn rate(
    bench: &Bench<'_>,
    op: Op,
    batches: &[Batch],
    calls: usize,
    threads: usize,
) -> Result<f64, Failure> {
    let bytes: u64 = batches.iter().map(Batch::bytes).sum();
    let seconds = together(threads, |thread| {
        for _ in 0..calls {
            for batch in batches.iter().skip(thread).step_by(threads) {
                transfer(&bench.peer, op, batch, &Options::default())?;
            }
        }
        Ok(())
    })?;
    Ok((bytes * calls as u64) as f64 / seconds)
}

/// Runs `work` on this many threads at once. Returns the seconds from the first begin to the last end.
pub(super) fn together(
    threads: usize,
    work: impl Fn(usize) -> Result<(), Failure> + Sync,
) -> Result<f64, Failure> {
    let ready = Barrier::new(threads);
    // Threads take the times themselves: the one that started them may be asleep.
    let caller = |thread: usize| {
        ready.wait();
        let started = Instant::now();
        work(thread)?;
        Ok::<_, Failure>((started, Instant::now()))
    };
    let caller = &caller;
    let times = std::thread::scope(|scope| {
        let callers: Vec<_> =
            (0..threads).map(|thread| scope.spawn(move || caller(thread))).collect();
        let joined = callers.into_iter().map(|caller| caller.join().expect("no caller panics"));
        joined.collect::<Result<Vec<_>, _>>()
    })?;
    let first = times.iter().map(|(started, _)| *started).min().expect("there is a caller");
    let last = times.iter().map(|(_, ended)| *ended).max().expect("there is a caller");
    Ok((last - first).as_secs_f64())
}

/// All callers at once, to a poisoned destination; then every byte is compared.
fn verify(
    bench: &mut Bench<'_>,
    all: &mut Subjects,
    cell: &Cell,
    batches: &[Batch],
    when: &str,
) -> Result<(), Failure> {
    let tables = &cell.load.batches;
    let prepared = prepare_memory(&mut all.kvferry, bench, cell.op, cell.load.span())?;
    rate(bench, cell.op, batches, 1, batches.len())?;
    match check_destination(&mut all.kvferry, bench, cell.op, prepared, tables)? {
        None => Ok(()),
        Some(wrong) => {
            let name = cell.name();
            Err(Failure::Check(format!("WRONG BYTES {when} the rounds: {name}: {wrong}")))
        }
    }
}

/// Two callers with one half each, beside two threads that only copy.
fn two_callers(bench: &mut Bench<'_>, size: Size) -> Result<Row, Failure> {
    let rounds = bench.settings.rounds;
    let half = Size { block: size.block, count: size.count / 2 };
    let halves = [0, half.bytes()].map(|at| Table::scatter(at, half));
    let name = Load::of_size(half).name;
    bench.bar.inc_length(rounds as u64);
    let batches = [bench.batch(Op::Write, &halves[0])?, bench.batch(Op::Write, &halves[1])?];
    let reached = bench.link.reached().expect("process_vm is there, so the target is here");
    let calls = (bench.settings.turn_bytes / size.bytes()).max(2);
    let (mut ours, mut raw) = (Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: two callers, {name}", round + 1));
        for turn in 0..2 {
            match (round + turn) % 2 {
                0 => ours.push(rate(bench, Op::Write, &batches, calls, 2)? / 1e9),
                _ => {
                    let memory = &bench.floor_memory;
                    let seconds = together(2, |thread| {
                        for _ in 0..calls {
                            reached.write(memory, &halves[thread], RANGES_OF_LARGE)?;
                        }
                        Ok(())
                    })?;
                    raw.push((size.bytes() * calls) as f64 / seconds / 1e9);
                }
            }
        }
    }
    let work = format!("write, two callers, {name} each");
    Ok(Row::new("pair", work, "GB/s", Spread::of(ours)).at_least_of(
        PAIR_PART_MIN,
        "two process_vm threads",
        Spread::of(raw),
    ))
}

/// Ranges in one call of the plain threads; with large blocks the number makes no difference.
const RANGES_OF_LARGE: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ten_callers_have_100_to_500_blocks_of_their_own() {
        let shares = shares(10);
        assert_eq!((shares[0].pairs.len(), shares[9].pairs.len()), (100, 500));
        for pair in shares.windows(2) {
            let first = |table: &Table| table.pairs.iter().map(|pair| pair.destination).min();
            assert_eq!(Some(pair[0].span()), first(&pair[1]));
        }
        assert_eq!(bytes(10), shares[9].span());
        assert_eq!(bytes(1), 100 * BLOCK);
    }

    #[test]
    fn the_pairs_fit_into_the_reserved_memory() {
        assert!(PAIRS.iter().all(|size| size.bytes() <= PAIR_BYTES));
    }
}
