//! One block of 4 KiB: the time of a single call, of all subjects in short turns within each round. Over TCP,
//! the part of it that a secret takes, too.

use std::time::Duration;

use crate::failure::Failure;
use crate::options::{Op, Placement, Size};
use crate::stats::{Spread, quantile_of};

use super::keyed;
use super::limits::FloorProgram;
use super::ours::Ours;
use super::placement::Pinned;
use super::subject::{Cell, Subject, verify};
use super::{Bench, Subjects};
use crate::report::{Bound, Figure, Row};

const ONE: Size = Size { block: 4096, count: 1 };

/// Turns of each subject within a round.
const TURNS: usize = 10;

/// Quantiles that are judged, with the ratio to the floor that is allowed.
const JUDGED: [(&str, f64, f64); 2] = [("p50", 0.5, 1.1), ("p99", 0.99, 1.3)];

/// Bound of a raw write within a host.
const LOCAL_WRITE_US_MAX: f64 = 2.0;

pub(super) fn run(bench: &mut Bench<'_>, all: &mut Subjects) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    let local = bench.link.session.is_local();
    let pinned = bench.settings.placements.iter().filter(|&&placement| {
        // Within a host no thread is woken; other engines run where the kernel puts them.
        placement != Placement::Free && !local
    });
    for &placement in pinned {
        let Some(pinned) = Pinned::new(placement)? else { continue };
        let mut own = Bench::open_on(pinned.target, bench)?;
        let mut ours = Ours::registered(&own);
        let mut floor = FloorProgram::default();
        let mut both: [&mut dyn Subject; 2] = [&mut ours, &mut floor];
        for &op in &bench.settings.options.ops {
            rows.extend(measure(&mut own, &mut both, op, placement)?);
        }
    }
    if local || !all.engines.is_empty() || bench.settings.placements.contains(&Placement::Free) {
        for &op in &bench.settings.options.ops {
            let mut subjects: Vec<&mut dyn Subject> = vec![&mut all.kvferry];
            subjects.extend(all.floor.iter_mut().map(|floor| floor as &mut dyn Subject));
            subjects.extend(all.process_vm.iter_mut().map(|limit| limit as &mut dyn Subject));
            subjects.extend(all.engines.iter_mut().map(|engine| engine as &mut dyn Subject));
            rows.extend(measure(bench, &mut subjects, op, Placement::Free)?);
        }
    }
    if !local {
        bench.bar.inc_length(1);
        bench.step("requests with and without a secret");
        rows.push(keyed::row(bench.settings.rounds, bench.settings.latency_calls));
    }
    Ok(rows)
}

/// Microseconds of every call, in each round, or why there are none.
type Calls = Result<Vec<Vec<f64>>, String>;

fn measure(
    bench: &mut Bench<'_>,
    subjects: &mut [&mut dyn Subject],
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
    let mut calls: Vec<Calls> = subjects.iter().map(|_| Ok(vec![vec![]; rounds])).collect();
    all(bench, subjects, &mut calls, |bench, subject, _| {
        verify(bench, subject, &cell, "before")?;
        // To warm up.
        one_turn(bench, subject, &cell, turn).map(drop)
    })?;
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: {work}", round + 1));
        for at in 0..TURNS {
            // Stopping and waking another engine's processes takes long beside a short turn.
            let turn_of = |engine: bool| if engine && at > 0 { 0 } else { turn };
            subjects.rotate_left(1);
            calls.rotate_left(1);
            all(bench, subjects, &mut calls, |bench, subject, calls| {
                let turn = turn_of(subject.is_external());
                if turn > 0 {
                    calls[round].extend(one_turn(bench, subject, &cell, turn)?);
                }
                Ok(())
            })?;
        }
    }
    // Back to their first order.
    let turned = (rounds * TURNS) % subjects.len();
    subjects.rotate_right(turned);
    calls.rotate_right(turned);
    all(bench, subjects, &mut calls, |bench, subject, _| verify(bench, subject, &cell, "after"))?;
    let who: Vec<_> = subjects.iter().map(|subject| subject.who()).collect();
    // Where the kernel chooses the cores, it decides on the figure: it is judged only if asked for.
    let chosen = bench.settings.placements.contains(&placement);
    Ok(JUDGED.map(|limit| row(&work, op, limit, chosen, &who, &mut calls)).into())
}

/// Calls `what` for every subject that has not failed. Only another engine may fail.
fn all(
    bench: &mut Bench<'_>,
    subjects: &mut [&mut dyn Subject],
    calls: &mut [Calls],
    mut what: impl FnMut(&mut Bench<'_>, &mut dyn Subject, &mut Vec<Vec<f64>>) -> Result<(), Failure>,
) -> Result<(), Failure> {
    for (subject, calls) in subjects.iter_mut().zip(calls) {
        let Ok(so_far) = calls else { continue };
        match what(bench, &mut **subject, so_far) {
            Err(failure) if subject.is_external() => {
                subject.discard();
                *calls = Err(failure.to_string());
            }
            other => other?,
        }
    }
    Ok(())
}

fn one_turn(
    bench: &mut Bench<'_>,
    subject: &mut dyn Subject,
    cell: &Cell,
    calls: usize,
) -> Result<Vec<f64>, Failure> {
    subject.prepare(bench, cell)?;
    let took = subject.calls(bench, cell, calls, Duration::from_secs(2))?;
    subject.pause();
    Ok(took.into_iter().map(|seconds| seconds * 1e6).collect())
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
        (true, Op::Write, "p50") => row.at_most(LOCAL_WRITE_US_MAX),
        _ => row,
    }
}
