//! Throughput and what it costs: batches of scattered blocks. In every round each cell is moved by
//! all contenders, one after the other, in an order drawn anew each time.

use std::sync::Arc;
use std::time::Duration;

use crate::blocks::{Numbers, shuffled};
use crate::cli::{Op, Part, Size};
use crate::failure::Failure;
use crate::stats::Spread;

use super::contender::{Cell, Contender, Turn, turn};
use super::report::{Bound, Figure, Row};
use super::syscalls::Counter;
use super::tables::Load;
use super::{Bench, Contenders, SEED};

/// What the issue asks of writes and reads alike, by transport and caller.
const OF_FLOOR: Bound = Bound::AtLeast(0.95);
const OF_FLOOR_FROM_PYTHON: Bound = Bound::AtLeast(0.95);
/// Blocks below this have the cost of a call to carry.
const SMALL_BLOCK: usize = 32 << 10;
const OF_FLOOR_FROM_PYTHON_SMALL: Bound = Bound::AtLeast(0.85);
const OF_PROCESS_VM: Bound = Bound::AtLeast(0.9);
const OF_PEERS: Bound = Bound::AtLeast(1.0);
const CPU_OF_PEERS: Bound = Bound::AtMost(1.0);

/// Bytes moved while system calls are counted.
const COUNTED_BYTES: usize = 64 << 20;

/// What was measured of a contender in a cell.
#[derive(Debug, Default)]
struct Series {
    turns: Vec<Turn>,
    /// Why there are no more.
    failed: Option<String>,
    syscalls: Option<f64>,
}

impl Series {
    /// Of a contender that took all its turns.
    fn rounds(&self, figure: impl Fn(&Turn) -> f64) -> Result<Vec<f64>, String> {
        match &self.failed {
            Some(why) => Err(why.clone()),
            None => Ok(self.turns.iter().map(figure).collect()),
        }
    }
}

pub(super) fn run(bench: &mut Bench<'_>, all: &mut Contenders) -> Result<Vec<Row>, Failure> {
    let cells = plan(bench);
    let who: Vec<&'static str> = all.all().iter().map(|contender| contender.who()).collect();
    let mut series: Vec<Vec<Series>> = Vec::new();
    series.resize_with(cells.len(), || who.iter().map(|_| Series::default()).collect());
    let rounds = bench.settings.rounds;
    bench.bar.inc_length((cells.len() * (rounds + 3)) as u64);
    for (cell, series) in cells.iter().zip(&mut series) {
        bench.step(&format!("{}: verifying, tuning", cell.name()));
        each(bench, all, series, |bench, contender, _| {
            // Ours is looked at before and after. So much time is not spent on others.
            if !contender.is_guest() {
                verify(bench, contender, cell, "before")?;
            }
            contender.tune(bench, cell)
        })?;
    }
    // Not only turned round: nobody is to have the same one before him each time.
    let mut numbers = Numbers::from_seed(SEED);
    for round in 0..rounds {
        for (cell, series) in cells.iter().zip(&mut series) {
            bench.step(&format!("round {}/{rounds}: {}", round + 1, cell.name()));
            let bytes = bench.settings.turn_bytes;
            let order = shuffled(who.len() as u32, &mut numbers);
            in_order(bench, all, series, &order, |bench, contender, series| {
                series.turns.push(turn(contender, bench, cell, bytes)?);
                Ok(())
            })?;
        }
    }
    for (cell, series) in cells.iter().zip(&mut series) {
        bench.step(&format!("{}: verifying", cell.name()));
        each(bench, all, series, |bench, contender, _| verify(bench, contender, cell, "after"))?;
    }
    let counter = Counter::find();
    if let Err(why) = &counter {
        bench.skipped.push(format!("system calls: {why}"));
    }
    for (cell, series) in cells.iter().zip(&mut series) {
        bench.step(&format!("{}: counting system calls", cell.name()));
        if let Ok(counter) = counter {
            each(bench, all, series, |bench, contender, series| {
                series.syscalls = Some(count(bench, contender, cell, counter)?);
                Ok(())
            })?;
        }
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
    if counter.is_ok() {
        rows.extend(cells.iter().zip(&series).map(|(cell, series)| syscalls(cell, &who, series)));
    }
    Ok(rows)
}

fn plan(bench: &Bench<'_>) -> Vec<Cell> {
    let settings = bench.settings;
    let streams = &settings.args.streams;
    let cell = |(op, load): &(Op, Arc<Load>)| {
        let (op, load) = (*op, load.clone());
        streams.iter().map(move |&streams| Cell { op, load: load.clone(), streams })
    };
    settings.loads.iter().flat_map(cell).collect()
}

/// Does something with every contender. One of ours that fails ends the bench; another engine that
/// fails has no figure here, and the reason instead.
fn each(
    bench: &mut Bench<'_>,
    all: &mut Contenders,
    series: &mut [Series],
    what: impl FnMut(&mut Bench<'_>, &mut dyn Contender, &mut Series) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let order: Vec<u32> = (0..series.len() as u32).collect();
    in_order(bench, all, series, &order, what)
}

fn in_order(
    bench: &mut Bench<'_>,
    all: &mut Contenders,
    series: &mut [Series],
    order: &[u32],
    mut what: impl FnMut(&mut Bench<'_>, &mut dyn Contender, &mut Series) -> Result<(), Failure>,
) -> Result<(), Failure> {
    let mut contenders = all.all();
    for &number in order {
        let number = number as usize;
        let (contender, series) = (&mut *contenders[number], &mut series[number]);
        if series.failed.is_some() {
            continue;
        }
        let done = what(bench, contender, series);
        if let Err(failure) = done {
            if !contender.is_guest() {
                return Err(failure.while_doing(contender.who()));
            }
            contender.throw_away();
            series.failed = Some(failure.to_string());
        }
    }
    Ok(())
}

fn verify(
    bench: &mut Bench<'_>,
    contender: &mut dyn Contender,
    cell: &Cell,
    when: &str,
) -> Result<(), Failure> {
    match contender.verify(bench, cell)? {
        None => Ok(()),
        Some(wrong) => {
            let (name, who) = (cell.name(), contender.who());
            Err(Failure::Check(format!("WRONG BYTES {when} the rounds: {name} by {who}: {wrong}")))
        }
    }
}

/// System calls of both sides, per batches of the cell.
fn count(
    bench: &mut Bench<'_>,
    contender: &mut dyn Contender,
    cell: &Cell,
    counter: Counter,
) -> Result<f64, Failure> {
    contender.prepare(bench, cell)?;
    let bytes = contender.call_bytes(bench, cell);
    let calls = (COUNTED_BYTES / bytes).clamp(2, 50);
    let mut made = 0;
    let pids = contender.pids(bench);
    let limit = Duration::from_millis(300);
    let counted = counter.count(&pids, || {
        made = contender.calls(bench, cell, calls, limit)?.len();
        Ok(())
    })?;
    contender.pause();
    Ok(counted as f64 / (made * bytes) as f64 * cell.load.bytes() as f64)
}

/// Figures of every contender that has one.
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
    let guests: Vec<_> = GUESTS.iter().filter_map(|guest| rounds(guest)).collect();
    let of_best = rounds("kvferry").zip(best(&guests, f64::max));
    let of_best = of_best.map(|(ours, best)| Spread::ratio(&ours, &best));
    row.judge(name, "the best other engine", of_best, OF_PEERS);
    row
}

/// Engines of others, by their columns.
const GUESTS: [&str; 4] = ["Mooncake", "Mooncake, queue 65535", "NIXL", "NIXL, tuned"];

/// Round by round, the best of several.
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
    let guests: Vec<_> = GUESTS.iter().filter_map(|guest| rounds(guest)).collect();
    let of_best = rounds("kvferry").zip(best(&guests, f64::min));
    let of_best = of_best.map(|(ours, best)| Spread::ratio(&ours, &best));
    let name = format!("CPU per GB, {}", cell.name());
    row.judge(name, "the thriftiest other engine", of_best, CPU_OF_PEERS);
    row
}

fn waits(cell: &Cell, who: &[&'static str], series: &[Series]) -> Row {
    let figures = figures(who, series, |turn| turn.waits);
    Row::with("waits", cell.name(), "per batch", figures)
}

fn syscalls(cell: &Cell, who: &[&'static str], series: &[Series]) -> Row {
    let both = who.iter().zip(series);
    let figures = both.map(|(who, series)| match (series.syscalls, &series.failed) {
        (Some(counted), _) => Figure::of(who, Spread::of(vec![counted])),
        (None, Some(why)) => Figure::failed(who, why.clone()),
        (None, None) => Figure::failed(who, "not counted".into()),
    });
    Row::with("syscalls", cell.name(), "per batch", figures.collect())
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
