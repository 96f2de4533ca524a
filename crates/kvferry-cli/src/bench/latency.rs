//! One block of 4 KiB: how long a single call takes, kvferry's and the others' in short turns within
//! each round.

use std::time::Duration;

use crate::cli::{Op, Placement, Size};
use crate::failure::Failure;
use crate::stats::{Spread, quantile_of};

use super::contender::{Cell, Contender};
use super::ours::Ours;
use super::placement::Pinned;
use super::plain::FloorProgram;
use super::report::{Bound, Figure, Row};
use super::{Bench, Contenders};

const ONE: Size = Size { block: 4096, count: 1 };

/// Turns of each program within a round.
const TURNS: usize = 10;

/// Quantiles that are judged, with the ratio to the floor that is allowed.
const JUDGED: [(&str, f64, f64); 2] = [("p50", 0.5, 1.1), ("p99", 0.99, 1.3)];

/// Of a raw write within a host.
const LOCAL_WRITE_US: Bound = Bound::AtMost(2.0);

pub(super) fn run(bench: &mut Bench<'_>, all: &mut Contenders) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let local = bench.link.session.is_local();
    let pinned = bench.settings.placements.iter().filter(|&&placement| {
        // Nobody has to be woken there, and other engines are left where the kernel puts them.
        placement != Placement::Free && !local
    });
    for &placement in pinned {
        let Some(pinned) = Pinned::new(placement)? else { continue };
        let mut own = Bench::open_on(pinned.target, bench)?;
        let mut ours = Ours::registered(&own);
        let mut floor = FloorProgram::default();
        let mut both: [&mut dyn Contender; 2] = [&mut ours, &mut floor];
        for &op in &bench.settings.args.op {
            rows.extend(measure(&mut own, &mut both, op, placement)?);
        }
    }
    if local || !all.guests.is_empty() || bench.settings.placements.contains(&Placement::Free) {
        for &op in &bench.settings.args.op {
            let mut contenders: Vec<&mut dyn Contender> = vec![&mut all.kvferry];
            contenders.extend(all.floor.iter_mut().map(|floor| floor as &mut dyn Contender));
            contenders.extend(all.process_vm.iter_mut().map(|limit| limit as &mut dyn Contender));
            contenders.extend(all.guests.iter_mut().map(|guest| guest as &mut dyn Contender));
            rows.extend(measure(bench, &mut contenders, op, Placement::Free)?);
        }
    }
    Ok(rows)
}

/// Microseconds of every call, in each round, or why there are none.
type Calls = Result<Vec<Vec<f64>>, String>;

fn measure(
    bench: &mut Bench<'_>,
    contenders: &mut [&mut dyn Contender],
    op: Op,
    placement: Placement,
) -> Result<Vec<Row>, Failure> {
    let rounds = bench.settings.rounds;
    let work = match placement {
        Placement::Apart => format!("{} 4 KiB, a core each", op.name()),
        Placement::Together => format!("{} 4 KiB, one core", op.name()),
        Placement::Free => format!("{} 4 KiB", op.name()),
    };
    let cell = Cell::of_size(op, ONE);
    let turn = bench.settings.latency_calls / TURNS;
    bench.bar.inc_length(rounds as u64);
    let mut calls: Vec<Calls> = contenders.iter().map(|_| Ok(vec![vec![]; rounds])).collect();
    all(bench, contenders, &mut calls, |bench, contender, _| {
        verify(bench, contender, &cell, "before")?;
        // To warm up.
        one_turn(bench, contender, &cell, turn).map(drop)
    })?;
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: {work}", round + 1));
        for at in 0..TURNS {
            // Stopping and waking others' processes is long beside a short turn.
            let turn_of = |guest: bool| if guest && at > 0 { 0 } else { turn };
            contenders.rotate_left(1);
            calls.rotate_left(1);
            all(bench, contenders, &mut calls, |bench, contender, calls| {
                let turn = turn_of(contender.is_guest());
                if turn > 0 {
                    calls[round].extend(one_turn(bench, contender, &cell, turn)?);
                }
                Ok(())
            })?;
        }
    }
    // Back to the order they came in.
    let turned = (rounds * TURNS) % contenders.len();
    contenders.rotate_right(turned);
    calls.rotate_right(turned);
    all(bench, contenders, &mut calls, |bench, contender, _| {
        verify(bench, contender, &cell, "after")
    })?;
    let who: Vec<_> = contenders.iter().map(|contender| contender.who()).collect();
    // Within a host the kernel's choice of cores decides, unless it was asked for.
    let chosen = bench.settings.placements.contains(&placement);
    Ok(JUDGED.map(|limit| row(&work, op, limit, chosen, &who, &mut calls)).into())
}

/// Does something with every contender that has not failed; only our own may not.
fn all(
    bench: &mut Bench<'_>,
    contenders: &mut [&mut dyn Contender],
    calls: &mut [Calls],
    mut what: impl FnMut(&mut Bench<'_>, &mut dyn Contender, &mut Vec<Vec<f64>>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for (contender, calls) in contenders.iter_mut().zip(calls) {
        let Ok(so_far) = calls else { continue };
        match what(bench, &mut **contender, so_far) {
            Err(failure) if contender.is_guest() => {
                contender.throw_away();
                *calls = Err(failure.to_string());
            }
            other => other?,
        }
    }
    Ok(())
}

fn one_turn(
    bench: &mut Bench<'_>,
    contender: &mut dyn Contender,
    cell: &Cell,
    calls: usize,
) -> Result<Vec<f64>, Failure> {
    contender.prepare(bench, cell)?;
    let took = contender.calls(bench, cell, calls, Duration::from_secs(2))?;
    contender.pause();
    Ok(took.into_iter().map(|seconds| seconds * 1e6).collect())
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

fn row(
    work: &str,
    op: Op,
    (name, part, allowed): (&str, f64, f64),
    judged: bool,
    who: &[&'static str],
    calls: &mut [Calls],
) -> Row {
    let quantiles: Vec<Result<Vec<f64>, String>> = calls
        .iter_mut()
        .map(|calls| match calls {
            Ok(rounds) => Ok(rounds.iter_mut().map(|calls| quantile_of(calls, part)).collect()),
            Err(why) => Err(why.clone()),
        })
        .collect();
    let of = |name: &str| {
        let number = who.iter().position(|&who| who == name)?;
        quantiles[number].clone().ok()
    };
    let figures = who.iter().zip(&quantiles).map(|(who, rounds)| match rounds {
        Ok(rounds) => Figure::of(who, Spread::of(rounds.clone())),
        Err(why) => Figure::failed(who, why.clone()),
    });
    let work = format!("{work}, {name}");
    let mut row = Row::with("latency", work.clone(), "µs", figures.collect());
    row.op = Some(op);
    let ratio = of("kvferry").zip(of("floor")).map(|(ours, floor)| Spread::ratio(&ours, &floor));
    if judged {
        row.judge(work, "floor", ratio, Bound::AtMost(allowed));
    }
    match (of("process_vm").is_some(), op, name) {
        (true, Op::Write, "p50") => row.judged_itself(LOCAL_WRITE_US),
        _ => row,
    }
}
