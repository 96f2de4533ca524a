//! Cost for eight callers when memory is registered and unregistered a thousand times a second.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry::{Access, Batch, Options};

use crate::failure::Failure;
use crate::options::{Op, Size};
use crate::stats::Spread;

use super::callers::together;
use super::tables::Table;
use super::{Bench, transfer};
use crate::report::Row;

const CALLERS: usize = 8;
/// The batch that each caller moves repeatedly.
const SHARE: Size = Size { block: 32 << 10, count: 128 };
const EVERY: Duration = Duration::from_millis(1);
const REGISTERED_BYTES: usize = 1 << 20;
const PART_MIN: f64 = 0.9;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    let rounds = bench.settings.rounds.max(7);
    bench.bar.inc_length(rounds as u64);
    let share = |caller| Table::scatter(caller * SHARE.bytes(), SHARE);
    let batches: Vec<Batch> = (0..CALLERS)
        .map(|caller| bench.batch(Op::Write, &share(caller)))
        .collect::<Result<_, _>>()?;
    let last = if bench.settings.options.quick { 100 } else { 400 };
    let last = Duration::from_millis(last);
    let (mut alone, mut beside, mut times) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: registering beside callers", round + 1));
        for turn in 0..2 {
            match (round + turn) % 2 {
                0 => alone.push(rate(bench, &batches, last)?),
                _ => {
                    let (rate, a_second) = churned(bench, &batches, last)?;
                    beside.push(rate);
                    times.push(a_second);
                }
            }
        }
    }
    let gb = |rates: &[f64]| Spread::of(rates.iter().map(|rate| rate / 1e9).collect());
    let work = format!("{CALLERS} callers, registering beside them");
    Ok(vec![
        Row::new("churn", work, "GB/s", gb(&beside))
            .at_least_of(PART_MIN, "without", gb(&alone))
            .beside("times a second", Spread::of(times)),
    ])
}

/// Bytes per second of all callers together.
fn rate(bench: &Bench<'_>, batches: &[Batch], last: Duration) -> Result<f64, Failure> {
    let moved = AtomicU64::new(0);
    let seconds = together(batches.len(), |caller| {
        let started = Instant::now();
        while started.elapsed() < last {
            transfer(&bench.peer, Op::Write, &batches[caller], &Options::default())?;
            moved.fetch_add(batches[caller].bytes(), Ordering::Relaxed);
        }
        Ok(())
    })?;
    Ok(moved.into_inner() as f64 / seconds)
}

/// The same beside a thread that registers and unregisters; and how often a second it did.
fn churned(bench: &Bench<'_>, batches: &[Batch], last: Duration) -> Result<(f64, f64), Failure> {
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let registering = scope.spawn(|| {
            let (started, mut times) = (Instant::now(), 0u32);
            while !ended.load(Ordering::Relaxed) {
                let region = bench.agent.allocate_private(REGISTERED_BYTES, Access::READ_WRITE)?;
                bench.agent.unregister(&region)?;
                times += 1;
                std::thread::sleep((EVERY * times).saturating_sub(started.elapsed()));
            }
            Ok::<_, Failure>(f64::from(times) / started.elapsed().as_secs_f64())
        });
        let rate = rate(bench, batches, last);
        ended.store(true, Ordering::Relaxed);
        let times = registering.join().expect("registering does not panic")?;
        Ok((rate?, times))
    })
}
