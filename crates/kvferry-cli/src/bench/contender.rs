//! Who takes turns in a round: kvferry in several ways, the machine's limits, other engines.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cli::{Op, Size, Streams};
use crate::content::random;
use crate::failure::Failure;
use crate::stats::median;

use super::Bench;
use super::messages::Program;
use super::tables::{Load, Table};
use super::usage::Usage;
use super::verify::{self, Memory};

/// What is moved, and how.
#[derive(Debug, Clone)]
pub(super) struct Cell {
    pub(super) op: Op,
    pub(super) load: Arc<Load>,
    pub(super) streams: Streams,
}

impl Cell {
    pub(super) fn of_size(op: Op, size: Size) -> Cell {
        Cell { op, load: Arc::new(Load::of_size(size)), streams: Streams(None) }
    }

    pub(super) fn name(&self) -> String {
        let streams = match self.streams {
            Streams(None) => String::new(),
            Streams(Some(1)) => ", 1 stream".to_string(),
            Streams(Some(streams)) => format!(", {streams} streams"),
        };
        format!("{} {}{streams}", self.op.name(), self.load.name)
    }
}

/// One of those that take turns.
pub(super) trait Contender {
    /// Its column.
    fn who(&self) -> &'static str;

    /// Whatever can be done before the first byte moves; not timed. Afterwards it may be called.
    fn prepare(&mut self, _: &mut Bench<'_>, _: &Cell) -> Result<(), Failure> {
        Ok(())
    }

    /// Settings are found by trial, caches are warmed; not timed.
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        turn(self, bench, cell, bench.settings.turn_bytes / 2).map(drop)
    }

    /// Seconds of each call; a call moves all batches of the cell. Two calls at least, then until
    /// the limit is reached.
    fn calls(
        &mut self,
        bench: &mut Bench<'_>,
        cell: &Cell,
        calls: usize,
        limit: Duration,
    ) -> Result<Vec<f64>, Failure>;

    /// Bytes that a call moves.
    fn call_bytes(&self, _: &Bench<'_>, cell: &Cell) -> usize {
        cell.load.bytes()
    }

    /// Moves fresh contents to a poisoned destination, whose owner then says what is wrong.
    fn verify(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<Option<String>, Failure>;

    /// What the process that calls and the one that is called have used so far.
    fn usage(&mut self, bench: &mut Bench<'_>) -> Result<[Usage; 2], Failure> {
        Ok([Usage::here()?, bench.link.usage()?])
    }

    /// The processes of both sides, as far as they are on this host.
    fn pids(&self, bench: &Bench<'_>) -> Vec<u32> {
        std::iter::once(std::process::id()).chain(bench.link.pid()).collect()
    }

    /// It is not its turn any more.
    fn pause(&mut self) {}

    /// An engine that is not ours: if it fails, it is thrown away, and the bench goes on.
    fn is_guest(&self) -> bool {
        false
    }

    fn throw_away(&mut self) {}

    /// All batches of the cell, so many times, by so many callers at once: the seconds it took and
    /// how many failed. `None` if it has no such thing.
    fn together(
        &mut self,
        _: &mut Bench<'_>,
        _: &Cell,
        _callers: usize,
        _calls: usize,
    ) -> Result<Option<(f64, usize)>, Failure> {
        Ok(None)
    }
}

/// One that works in this process, between memory here and memory of the bench's target.
pub(super) trait InPlace: Contender {
    /// Moves one batch of the cell, to its end.
    fn one(&mut self, bench: &mut Bench<'_>, cell: &Cell, batch: usize) -> Result<(), Failure>;

    /// Its memory on this side.
    fn memory<'a>(&'a mut self, bench: &'a mut Bench<'_>) -> &'a mut dyn Memory;

    /// Its memory at the target.
    fn program(&self) -> Program;
}

/// [`Contender::calls`] of those.
pub(super) fn calls_here<C: InPlace>(
    contender: &mut C,
    bench: &mut Bench<'_>,
    cell: &Cell,
    calls: usize,
    limit: Duration,
) -> Result<Vec<f64>, Failure> {
    let (began, mut took) = (Instant::now(), Vec::with_capacity(calls));
    while took.len() < calls && (took.len() < 2 || began.elapsed() < limit) {
        let started = Instant::now();
        for batch in 0..cell.load.batches.len() {
            contender.one(bench, cell, batch)?;
        }
        took.push(started.elapsed().as_secs_f64());
    }
    Ok(took)
}

/// [`Contender::verify`] of those.
pub(super) fn verify_here<C: InPlace>(
    contender: &mut C,
    bench: &mut Bench<'_>,
    cell: &Cell,
) -> Result<Option<String>, Failure> {
    contender.prepare(bench, cell)?;
    for (batch, table) in cell.load.batches.iter().enumerate() {
        let prepared = prepare_memory(contender, bench, cell.op, table.span())?;
        contender.one(bench, cell, batch)?;
        let tables = std::slice::from_ref(table);
        if let Some(wrong) = look(contender, bench, cell.op, prepared, tables)? {
            return Ok(Some(wrong));
        }
    }
    Ok(None)
}

/// What the two memories hold before a move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prepared {
    seed: u64,
    /// Of a destination on this side; the target keeps its own to itself.
    poison: u64,
    span: usize,
}

/// Poisons the destination and fills the source.
pub(super) fn prepare_memory<C: InPlace>(
    contender: &mut C,
    bench: &mut Bench<'_>,
    op: Op,
    span: usize,
) -> Result<Prepared, Failure> {
    let (seed, program) = (random(), contender.program());
    let mut prepared = Prepared { seed, poison: 0, span };
    match op {
        Op::Write => {
            bench.link.poison(program, span)?;
            verify::fill(contender.memory(bench), seed, span)?;
        }
        Op::Read => {
            prepared.poison = verify::poison(contender.memory(bench), span)?;
            bench.link.fill(program, seed, span)?;
        }
    }
    Ok(prepared)
}

/// What is wrong at the destination after these tables were moved, if anything.
pub(super) fn look<C: InPlace>(
    contender: &mut C,
    bench: &mut Bench<'_>,
    op: Op,
    prepared: Prepared,
    tables: &[Table],
) -> Result<Option<String>, Failure> {
    let Prepared { seed, poison, span } = prepared;
    let pairs: Vec<_> = tables.iter().flat_map(|table| table.pairs.iter().copied()).collect();
    match op {
        Op::Write => bench.link.check(contender.program(), seed, span, &pairs),
        Op::Read => verify::check(contender.memory(bench), seed, poison, span, &pairs),
    }
}

/// What one turn came to.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    /// Bytes per second of the middle call.
    pub(super) rate: f64,
    /// Seconds of processor time per gigabyte, of the caller's side and of the target's.
    pub(super) cpu: [f64; 2],
    /// Times a thread of either side slept, per batches of the cell.
    pub(super) waits: f64,
}

/// Longer is no turn: some engines need a second for a call.
const TURN_LIMIT: Duration = Duration::from_millis(400);

/// As many calls as move `bytes`, two at least.
pub(super) fn turn<C: Contender + ?Sized>(
    contender: &mut C,
    bench: &mut Bench<'_>,
    cell: &Cell,
    bytes: usize,
) -> Result<Turn, Failure> {
    contender.prepare(bench, cell)?;
    let call_bytes = contender.call_bytes(bench, cell);
    let calls = (bytes / call_bytes).clamp(2, 200);
    let before = contender.usage(bench)?;
    let took = contender.calls(bench, cell, calls, TURN_LIMIT)?;
    let after = contender.usage(bench)?;
    contender.pause();
    let moved = (call_bytes * took.len()) as f64;
    let used = [after[0] - before[0], after[1] - before[1]];
    Ok(Turn {
        rate: call_bytes as f64 / median(&took),
        cpu: used.map(|used| used.cpu.as_secs_f64() / (moved / 1e9)),
        waits: (used[0].waits + used[1].waits) as f64 / moved * cell.load.bytes() as f64,
    })
}
