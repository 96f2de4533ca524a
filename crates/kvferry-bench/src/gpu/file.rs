//! Memory of the GPU to a file and back.

use std::path::PathBuf;

use kvferry::{
    Access, After, Agent, Batch, DirectIo, ErrorKind, FileRegion, Options, Region, TransportKind,
    Transports,
};
use kvferry_cuda::Direction;
use kvferry_cuda::raw::{Buffers, Method, Piece, Table};

use super::bench::{Bench, failed};
use super::rounds::{self, TimedWork, rate};
use super::tables::{fill_host, is_pattern, scattered, spoil_host};
use crate::failure::Failure;
use crate::options::Op;
use crate::report::{Bound, Row};
use crate::stats::Spread;
use crate::units;

/// Required share of the rate with host memory, or of a plain copy's rate where that is less.
const SHARE: f64 = 0.9;
const BLOCK: usize = 1 << 20;

/// A file that is removed when the value is dropped.
struct Temporary(PathBuf);

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

/// An agent with a file, device memory and host memory of the same length.
struct Place<'a> {
    buffers: &'a Buffers,
    agent: Agent,
    cached: FileRegion,
    direct: FileRegion,
    device: Region,
    host: Region,
    pieces: Vec<Piece>,
    _file: Temporary,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        // An agent that can't unregister the region keeps it until the agent ends.
        let _ = self.agent.unregister(&self.device);
    }
}

impl<'a> Place<'a> {
    fn new(bench: &Bench<'_>, buffers: &'a Buffers) -> Result<Place<'a>, Failure> {
        let agent = Agent::builder()
            .name("bench-gpu")
            .transports(Transports::only(TransportKind::TCP))
            .start()?;
        let folder = bench.options.folder.clone().unwrap_or_else(std::env::temp_dir);
        let file = Temporary(folder.join(format!("kvferry-bench-gpu-{}", std::process::id())));
        let (path, len) = (&file.0, buffers.device_len());
        let how = kvferry::FileOptions::create(len as u64);
        let cached = agent.open_file(path, &how.clone().direct(DirectIo::Off))?;
        let direct = agent.open_file(path, &how.direct(DirectIo::Auto))?;
        let memory = kvferry_cuda::memory(buffers.device_address(), len as u64, None);
        let device = agent.register_device(memory.map_err(failed)?, Access::NONE)?;
        let host = agent.allocate(len, Access::NONE)?;
        let bytes = vec![1; BLOCK];
        for at in (0..len).step_by(BLOCK) {
            host.write_at(at, &bytes[..BLOCK.min(len - at)])?;
        }
        let pieces = scattered(BLOCK, len / BLOCK, 7);
        Ok(Place { buffers, agent, cached, direct, device, host, pieces, _file: file })
    }

    /// Makes a batch of blocks in random order in memory, and one after the other in the file.
    fn batch(&self, memory: &Region, file: &FileRegion) -> Result<Batch, Failure> {
        let (mut batch, file) = (Batch::with_capacity(self.pieces.len()), file.remote());
        batch.set_after(After::host());
        for piece in &self.pieces {
            let (near, far) = (piece.device_at as u64, piece.host_at as u64);
            batch.push(memory, near, &file, far, piece.len as u64)?;
        }
        Ok(batch)
    }

    fn transfer(&self, op: Op, batch: &Batch) -> Result<(), Failure> {
        let (files, options) = (self.agent.files(), Options::default());
        let moved = match op {
            Op::Write => files.write(batch, &options)?,
            Op::Read => files.read(batch, &options)?,
        };
        match moved.bytes == batch.bytes() {
            true => Ok(()),
            false => Err(failed(format!("{} bytes of {}", moved.bytes, batch.bytes()))),
        }
    }

    /// Writes the pattern and reads it back.
    fn verify(&self, batch: &Batch) -> Result<(), Failure> {
        let table = |direction| Table::new(self.buffers, direction, &self.pieces).map_err(failed);
        let (out, into) = (table(Direction::Out)?, table(Direction::In)?);
        fill_host(self.buffers, usize::try_from(into.bytes()).expect("it fits into the buffers"));
        self.buffers.copy(&into, Method::Single).map_err(failed)?;
        self.transfer(Op::Write, batch)?;
        self.buffers.fill_device(0xee).map_err(failed)?;
        self.transfer(Op::Read, batch)?;
        spoil_host(self.buffers, &self.pieces);
        self.buffers.copy(&out, Method::Single).map_err(failed)?;
        match is_pattern(self.buffers, &self.pieces) {
            true => Ok(()),
            false => Err(Failure::Check("a wrong byte came back from the file".into())),
        }
    }
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<(), Failure> {
    let bytes: usize = if bench.options.quick { 2 << 20 } else { 256 << 20 };
    if !bench.has_time_for("a file") {
        return Ok(());
    }
    bench.step("a file");
    let buffers = Buffers::new(&bench.context, bytes, bytes).map_err(failed)?;
    let place = Place::new(bench, &buffers)?;
    for (mode, file) in [("page cache", &place.cached), ("direct", &place.direct)] {
        if mode == "direct" && !file.is_direct() {
            bench.left_out.push("file, direct: the file system has no direct I/O".into());
            continue;
        }
        let device = place.batch(&place.device, file)?;
        let host = place.batch(&place.host, file)?;
        if let Err(refused) = place.agent.files().write(&device, &Options::default())
            && refused.kind() == ErrorKind::Unsupported
        {
            bench.left_out.push(format!("file, {mode}: {refused}"));
            continue;
        }
        place.verify(&device)?;
        for op in [Op::Write, Op::Read] {
            let work = format!("{mode}, {} {}", op.name(), units::bytes(bytes as u64));
            if bench.has_time_for(&format!("file, {work}")) {
                bench.step(&work);
                bench.rows.push(measure(bench, &place, op, work, [&device, &host])?);
            }
        }
    }
    Ok(())
}

fn measure(
    bench: &Bench<'_>,
    place: &Place<'_>,
    op: Op,
    work: String,
    [device, host]: [&Batch; 2],
) -> Result<Row, Failure> {
    let direction = if op == Op::Write { Direction::Out } else { Direction::In };
    let whole = [Piece { device_at: 0, host_at: 0, len: place.buffers.device_len() }];
    let whole = Table::new(place.buffers, direction, &whole).map_err(failed)?;
    let mut ways: [TimedWork<'_>; 3] = [
        Box::new(|| rounds::time(|| place.transfer(op, device))),
        Box::new(|| rounds::time(|| place.transfer(op, host))),
        Box::new(|| place.buffers.copy(&whole, Method::Single).map_err(failed)),
    ];
    let seconds = rounds::run(&mut ways, bench.rounds, &bench.budget, false)?;
    let [ours, host, raw] = [0, 1, 2].map(|at| rate(&seconds[at], device.bytes()));
    let least = host.rounds.iter().zip(&raw.rounds).map(|(host, raw)| host.min(*raw));
    let ratio = Spread::ratio(&ours.rounds, &least.collect::<Vec<_>>());
    let row = Row::new("gpu file", work, "GB/s", ours);
    let row = row.beside("host memory", host).beside("cuMemcpyAsync", raw);
    Ok(row.judged("the lesser", ratio, Bound::AtLeast(SHARE)))
}
