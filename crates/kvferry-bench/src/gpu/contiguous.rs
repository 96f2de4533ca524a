//! 64 MiB in one piece: out, in, and both at the same time.

use std::sync::Barrier;
use std::thread;
use std::time::Instant;

use kvferry_cuda::Direction;
use kvferry_cuda::raw::{Buffers, Method, Piece};

use super::bench::{Bench, failed};
use super::ours::{self, Subject};
use super::rounds::{self, TimedWork, rates};
use super::tables::Case;
use crate::failure::Failure;
use crate::report::Row;
use crate::units;

/// Required shares of the rate of plain copies.
const SHARE: f64 = 0.97;
const SHARE_BOTH: f64 = 0.95;

/// Copies that follow each other in one sample of both directions.
const COPIES: u32 = 4;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    let bytes: usize = if bench.options.quick { 1 << 20 } else { 64 << 20 };
    if !bench.has_time_for("one piece") {
        return Ok(());
    }
    let buffers = Buffers::new(&bench.context, 2 * bytes, 2 * bytes).map_err(failed)?;
    let subject = Subject::new(&buffers)?;
    let whole = vec![Piece { device_at: 0, host_at: 0, len: bytes }];
    let case = Case::new(&buffers, &subject, whole)?;
    for (direction, name) in [(Direction::Out, "out"), (Direction::In, "in")] {
        bench.step(&format!("one piece, {name}"));
        case.verify(direction, Method::Single)?;
        case.verify_ours(direction)?;
        let mut ways: [TimedWork<'_>; 2] = [
            Box::new(|| ours::copy(direction, &case.batch)),
            Box::new(|| buffers.copy(case.table(direction), Method::Single).map_err(failed)),
        ];
        let seconds = rounds::run(&mut ways, bench.rounds, &bench.budget, false)?;
        let [ours, raw] = rates(&seconds, bytes as u64);
        if direction == Direction::Out {
            bench.pinned_out = Some(raw.clone());
        }
        let work = format!("{name}, {}", units::bytes(bytes as u64));
        let row = Row::new("gpu contiguous", work, "GB/s", ours);
        bench.rows.push(row.at_least_of(SHARE, "cuMemcpyAsync", raw));
    }
    both(bench, &buffers, &subject, bytes)
}

fn both(
    bench: &mut Bench<'_>,
    buffers: &Buffers,
    subject: &Subject,
    bytes: usize,
) -> Result<(), Failure> {
    bench.step("one piece, both ways");
    let piece = |device_at| [Piece { device_at, host_at: 0, len: bytes }];
    let (out, into) = (subject.batch(&piece(0))?, subject.batch(&piece(bytes))?);
    let ours = || {
        let start = Barrier::new(2);
        let copies = |direction, batch| {
            start.wait();
            let began = Instant::now();
            for _ in 0..COPIES {
                ours::copy(direction, batch)?;
            }
            Ok::<_, Failure>((began, Instant::now()))
        };
        thread::scope(|scope| {
            let into = scope.spawn(|| copies(Direction::In, &into));
            let (began, ended) = copies(Direction::Out, &out)?;
            let (began_too, ended_too) = into.join().expect("threads of a bench don't panic")?;
            Ok::<_, Failure>(ended.max(ended_too) - began.min(began_too))
        })
    };
    let raw = || {
        rounds::time(|| {
            for _ in 0..COPIES {
                buffers.copy_both_ways(bytes).map_err(failed)?;
            }
            Ok(())
        })
    };
    let mut ways: [TimedWork<'_>; 2] = [Box::new(ours), Box::new(raw)];
    let seconds = rounds::run(&mut ways, bench.rounds, &bench.budget, false)?;
    let [ours, raw] = rates(&seconds, u64::from(COPIES) * 2 * bytes as u64);
    let work = format!("both, {} each", units::bytes(bytes as u64));
    let row = Row::new("gpu contiguous", work, "GB/s", ours);
    bench.rows.push(row.at_least_of(SHARE_BOTH, "cuMemcpyAsync", raw));
    Ok(())
}
