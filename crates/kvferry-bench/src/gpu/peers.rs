//! Transfers from GPU to GPU between two processes.

use kvferry_cuda::Direction;
use kvferry_cuda::raw::{Buffers, Method, Piece, Table};

use super::bench::{Bench, failed};
use super::rounds::{self, TimedWork, rate};
use super::tables::{fill_host, is_pattern, scattered, spoil_host};
use super::target::{Link, Memory};
use crate::failure::Failure;
use crate::options::Op;
use crate::report::{Bound, Row};
use crate::stats::Spread;
use crate::units;

/// Required share of the rate with host memory, or of the rate of a plain copy out where that is less.
const SHARE: f64 = 0.9;

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    let quick = bench.options.quick;
    let bytes: usize = if quick { 2 << 20 } else { 256 << 20 };
    if !bench.has_time_for("peers") {
        return Ok(());
    }
    bench.step("starting a second process");
    let buffers = Buffers::new(&bench.context, bytes, bytes).map_err(failed)?;
    let whole = vec![Piece { device_at: 0, host_at: 0, len: bytes }];
    let (small, large) = if quick { (64, 8) } else { (16_384, 1024) };
    let shapes = [
        (units::bytes(bytes as u64), whole.clone()),
        (format!("64 KiB × {large}"), scattered(64 << 10, large, 1)),
        (format!("4 KiB × {small}"), scattered(4 << 10, small, 2)),
    ];
    let everything = Table::new(&buffers, Direction::Out, &whole).map_err(failed)?;
    for (name, transports) in [("local", "tcp,local"), ("tcp", "tcp")] {
        let link = Link::new(bench.options.device, transports, &buffers)?;
        if link.transport != name {
            let chosen = &link.transport;
            bench.left_out.push(format!("peers over {name}: the agents chose {chosen}"));
            continue;
        }
        for (work, pieces) in &shapes {
            for op in [Op::Write, Op::Read] {
                let work = format!("{} {work}", op.name());
                if !bench.has_time_for(&format!("peers, {name}: {work}")) {
                    continue;
                }
                bench.step(&format!("{name}: {work}"));
                if op == Op::Write {
                    verify(&link, &buffers, pieces)?;
                }
                let row = measure(bench, &link, &buffers, &everything, op, work, pieces)?;
                bench.rows.push(row.over(name));
            }
        }
    }
    Ok(())
}

/// Writes blocks of the pattern to the other process, and reads them back.
fn verify(link: &Link, buffers: &Buffers, pieces: &[Piece]) -> Result<(), Failure> {
    let table = |direction| Table::new(buffers, direction, pieces).map_err(failed);
    let (out, into) = (table(Direction::Out)?, table(Direction::In)?);
    let batch = link.batch(Memory::Device, pieces)?;
    fill_host(buffers, usize::try_from(into.bytes()).expect("it fits into the buffers"));
    buffers.copy(&into, Method::Single).map_err(failed)?;
    link.transfer(Op::Write, &batch)?;
    buffers.fill_device(0xee).map_err(failed)?;
    link.transfer(Op::Read, &batch)?;
    spoil_host(buffers, pieces);
    buffers.copy(&out, Method::Single).map_err(failed)?;
    match is_pattern(buffers, pieces) {
        true => Ok(()),
        false => Err(Failure::Check(format!("a wrong byte came back over {}", link.transport))),
    }
}

fn measure(
    bench: &Bench<'_>,
    link: &Link,
    buffers: &Buffers,
    everything: &Table,
    op: Op,
    work: String,
    pieces: &[Piece],
) -> Result<Row, Failure> {
    let [device, host] = [Memory::Device, Memory::Host].map(|memory| link.batch(memory, pieces));
    let (device, host) = (device?, host?);
    let mut ways: [TimedWork<'_>; 3] = [
        Box::new(|| rounds::time(|| link.transfer(op, &device))),
        Box::new(|| rounds::time(|| link.transfer(op, &host))),
        Box::new(|| buffers.copy(everything, Method::Single).map_err(failed)),
    ];
    let seconds = rounds::run(&mut ways, bench.rounds, &bench.budget, false)?;
    let ours = rate(&seconds[0], device.bytes());
    let host = rate(&seconds[1], device.bytes());
    let raw = rate(&seconds[2], everything.bytes());
    let least = host.rounds.iter().zip(&raw.rounds).map(|(host, raw)| host.min(*raw));
    let ratio = Spread::ratio(&ours.rounds, &least.collect::<Vec<_>>());
    let row = Row::new("gpu peers", work, "GB/s", ours);
    let row = row.beside("host memory", host).beside("cuMemcpyAsync out", raw);
    Ok(row.judged("the lesser", ratio, Bound::AtLeast(SHARE)))
}
