//! Throughput and what it costs: batches of scattered blocks. In every round all subjects move each
//! cell, one after the other, in a new random order.

use std::sync::Arc;

use fastrand::Rng;

use crate::blocks::shuffled;
use crate::failure::Failure;
use crate::options::{Op, Part, Size};
use crate::stats::Spread;

use super::subject::{Cell, Subject, Turn, turn, verify};
use super::tables::Load;
use super::{Bench, SEED, Subjects};
use crate::report::{Bound, Figure, Row};

/// Bounds of writes and of reads.
const OF_FLOOR: Bound = Bound::AtLeast(0.95);
const OF_FLOOR_FROM_PYTHON: Bound = Bound::AtLeast(0.95);
/// Block size below which the cost of a call from Python counts.
const SMALL_BLOCK: usize = 32 << 10;
const OF_FLOOR_FROM_PYTHON_SMALL: Bound = Bound::AtLeast(0.85);
const OF_PROCESS_VM: Bound = Bound::AtLeast(0.9);
const OF_PEERS: Bound = Bound::AtLeast(1.0);
const CPU_OF_PEERS: Bound = Bound::AtMost(1.0);

/// The turns of a subject in a cell.
#[derive(Debug, Default)]
struct Series {
    turns: Vec<Turn>,
    /// Reason why there are no more turns.
    failed: Option<String>,
}

impl Series {
    /// A figure of all turns, or why there are not all.
    fn rounds(&self, figure: impl Fn(&Turn) -> f64) -> Result<Vec<f64>, String> {
        match &self.failed {
            Some(why) => Err(why.clone()),
            None => Ok(self.turns.iter().map(figure).collect()),
        }
    }
}

pub(super) fn run(bench: &mut Bench<'_>, all: &mut Subjects) -> Result<Vec<Row>, Failure> {
    let cells = plan(bench);
    let who: Vec<&'static str> = all.all().iter().map(|subject| subject.who()).collect();
    let mut series: Vec<Vec<Series>> = Vec::new();
    series.resize_with(cells.len(), || who.iter().map(|_| Series::default()).collect());
    let rounds = bench.settings.rounds;
    bench.bar.inc_length((cells.len() * (rounds + 3)) as u64);
    for (cell, series) in cells.iter().zip(&mut series) {
        bench.step(&format!("{}: verifying, tuning", cell.name()));
        each(bench, all, series, |bench, subject, _| {
            // Other engines are verified once, afterwards.
            if !subject.is_external() {
                verify(bench, subject, cell, "before")?;
            }
            subject.tune(bench, cell)
        })?;
    }
    // A new order each time: no subject always follows the same other one.
    let mut rng = Rng::with_seed(SEED);
    for round in 0..rounds {
        for (cell, series) in cells.iter().zip(&mut series) {
            bench.step(&format!("round {}/{rounds}: {}", round + 1, cell.name()));
            let bytes = bench.settings.turn_bytes;
            let order = shuffled(who.len() as u32, &mut rng);
            in_order(bench, all, series, &order, |bench, subject, series| {
                series.turns.push(turn(subject, bench, cell, bytes)?);
                Ok(())
            })?;
        }
    }
    for (cell, series) in cells.iter().zip(&mut series) {
        bench.step(&format!("{}: verifying", cell.name()));
        each(bench, all, series, |bench, subject, _| verify(bench, subject, cell, "after"))?;
    }
    let choice = |cell: &Cell| all.floor.as_ref().and_then(|floor| floor.choice(cell));
    let mut rows = Vec::new();
    for (cell, series) in cells.iter().zip(&series) {
        let mut row = throughput(bench, cell, &who, series);
        row.floor_settings = choice(cell);
        rows.push(row);
    }
    rows.extend(cells.iter().zip(&series).map(|(cell, series)| cpu(cell, &who, series)));
    rows.extend(cells.iter().zip(&series).map(|(cell, series)| waits(cell, &who, series)));
    Ok(rows)
}

fn plan(bench: &Bench<'_>) -> Vec<Cell> {
    let settings = bench.settings;
    let streams = &settings.options.streams;
    let cell = |(op, load): &(Op, Arc<Load>)| {
        let (op, load) = (*op, load.clone());
        streams.iter().map(move |&streams| Cell { op, load: load.clone(), streams })
    };
    settings.loads.iter().flat_map(cell).collect()
}

/// Calls `what` for every subject that has not failed. A failure ends the bench, except that of another
/// engine, which has the reason instead of a figure.
fn each(
    bench: &mut Bench<'_>,
    all: &mut Subjects,
    series: &mut [Series],
    what: impl FnMut(&mut Bench<'_>, &mut dyn Subject, &mut Series) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let order: Vec<u32> = (0..series.len() as u32).collect();
    in_order(bench, all, series, &order, what)
}

fn in_order(
    bench: &mut Bench<'_>,
    all: &mut Subjects,
    series: &mut [Series],
    order: &[u32],
    mut what: impl FnMut(&mut Bench<'_>, &mut dyn Subject, &mut Series) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut subjects = all.all();
    for &number in order {
        let number = number as usize;
        let (subject, series) = (&mut *subjects[number], &mut series[number]);
        if series.failed.is_some() {
            continue;
        }
        let done = what(bench, subject, series);
        if let Err(failure) = done {
            if !subject.is_external() {
                return Err(failure.while_doing(subject.who()));
            }
            subject.discard();
            series.failed = Some(failure.to_string());
        }
    }
    Ok(())
}

/// A figure of every subject.
fn figures(who: &[&'static str], series: &[Series], figure: impl Fn(&Turn) -> f64) -> Vec<Figure> {
    let both = who.iter().zip(series);
    both.map(|(who, series)| match series.rounds(&figure) {
        Ok(rounds) => Figure::of(who, Spread::of(rounds)),
        Err(why) => Figure::failed(who, why),
    })
    .collect()
}

fn rounds_of(
    who: &[&'static str],
    series: &[Series],
    name: &str,
    figure: impl Fn(&Turn) -> f64,
) -> Option<Vec<f64>> {
    let number = who.iter().position(|&who| who == name)?;
    series[number].rounds(figure).ok()
}

fn throughput(bench: &Bench<'_>, cell: &Cell, who: &[&'static str], series: &[Series]) -> Row {
    let rate = |turn: &Turn| turn.rate / 1e9;
    let mut row = Row::with("throughput", cell.name(), "GB/s", figures(who, series, rate));
    row.size = cell.load.size;
    row.op = Some(cell.op);
    let rounds = |name: &str| rounds_of(who, series, name, rate);
    let ratio = |above: &str, below: &str| Some(Spread::ratio(&rounds(above)?, &rounds(below)?));
    let small = cell.load.size.is_some_and(|Size { block, .. }| block < SMALL_BLOCK);
    let python = if small { OF_FLOOR_FROM_PYTHON_SMALL } else { OF_FLOOR_FROM_PYTHON };
    let name = cell.name();
    if bench.settings.parts.contains(&Part::Throughput) {
        row.judge(format!("{name}, from Rust"), "floor", ratio("kvferry", "floor"), OF_FLOOR);
        let of_limit = ratio("kvferry", "process_vm");
        row.judge(name.clone(), "process_vm", of_limit, OF_PROCESS_VM);
    }
    row.judge(format!("{name}, from Python"), "floor", ratio("kvferry, Python", "floor"), python);
    let engines: Vec<_> = ENGINES.iter().filter_map(|engine| rounds(engine)).collect();
    let of_best = rounds("kvferry").zip(best(&engines, f64::max));
    let of_best = of_best.map(|(ours, best)| Spread::ratio(&ours, &best));
    row.judge(name, "the best other engine", of_best, OF_PEERS);
    row
}

/// Columns of other engines.
const ENGINES: [&str; 4] = ["Mooncake", "Mooncake, queue 65535", "NIXL", "NIXL, tuned"];

/// The best of several, round by round.
fn best(all: &[Vec<f64>], better: fn(f64, f64) -> f64) -> Option<Vec<f64>> {
    let rounds = all.first()?.len();
    let of_round = |round| all.iter().map(|rounds| rounds[round]).reduce(better);
    (0..rounds).map(of_round).collect()
}

/// Seconds of processor time per gigabyte, of both sides together.
fn cpu(cell: &Cell, who: &[&'static str], series: &[Series]) -> Row {
    let both = |turn: &Turn| turn.cpu[0] + turn.cpu[1];
    let mut figures = figures(who, series, both);
    for (figure, series) in figures.iter_mut().zip(series) {
        let side =
            |side: usize| Spread::of(series.turns.iter().map(|turn| turn.cpu[side]).collect());
        if series.failed.is_none() {
            figure.sides = Some([side(0), side(1)]);
        }
    }
    let mut row = Row::with("cpu", cell.name(), "CPU s/GB", figures);
    row.size = cell.load.size;
    row.op = Some(cell.op);
    let rounds = |name: &str| rounds_of(who, series, name, both);
    let engines: Vec<_> = ENGINES.iter().filter_map(|engine| rounds(engine)).collect();
    let of_best = rounds("kvferry").zip(best(&engines, f64::min));
    let of_best = of_best.map(|(ours, best)| Spread::ratio(&ours, &best));
    let name = format!("CPU per GB, {}", cell.name());
    row.judge(name, "the best other engine", of_best, CPU_OF_PEERS);
    row
}

fn waits(cell: &Cell, who: &[&'static str], series: &[Series]) -> Row {
    let figures = figures(who, series, |turn| turn.waits);
    Row::with("waits", cell.name(), "per batch", figures)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_other_engine_is_chosen_round_by_round() {
        let all = [vec![1.0, 5.0], vec![3.0, 2.0]];
        assert_eq!(best(&all, f64::max), Some(vec![3.0, 5.0]));
        assert_eq!(best(&all, f64::min), Some(vec![1.0, 2.0]));
        assert_eq!(best(&[], f64::max), None);
    }
}
