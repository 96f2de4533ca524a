//! Subjects that are measured in turn: kvferry in several ways, the machine's limits, other engines.
//!
//! A driver calls [`Subject::verify`], [`Subject::tune`], then `prepare`, `calls` and `pause` once a turn,
//! and `verify` again. [`turn`] does the middle part.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::machine::random;
use crate::options::{Op, Size, Streams};
use crate::stats::median;

use super::Bench;
use super::messages::Program;
use super::tables::{Load, Table};
use super::usage::Usage;
use super::verify::{self, Memory};

/// Work of one figure: direction, blocks, streams.
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

/// A program or engine that is measured in turn with others.
pub(super) trait Subject {
    /// The title of its column.
    fn who(&self) -> &'static str;

    /// Does what a user can do before the first byte moves. Not timed. Comes before `calls`.
    fn prepare(&mut self, _: &mut Bench<'_>, _: &Cell) -> Result<(), Failure> {
        Ok(())
    }

    /// Finds settings by trial and warms caches. Not timed.
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        turn(self, bench, cell, bench.settings.turn_bytes / 2).map(drop)
    }

    /// Makes calls until there are `calls` or `limit` is over, two at least, and returns the seconds of
    /// each. A call moves all batches of the cell.
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

    /// Moves new contents to a poisoned destination. Its owner compares every byte, and returns what is
    /// wrong, if anything.
    fn verify(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<Option<String>, Failure>;

    /// Resources that the calling process and the target's have used so far.
    fn usage(&mut self, bench: &mut Bench<'_>) -> Result<[Usage; 2], Failure> {
        Ok([Usage::here()?, bench.link.usage()?])
    }

    /// Ends its turn.
    fn pause(&mut self) {}

    /// Whether it is another engine. If one fails, its processes are discarded and the bench goes on.
    fn is_external(&self) -> bool {
        false
    }

    /// Ends processes of an engine that failed; its next turn starts new ones.
    fn discard(&mut self) {}

    /// Moves all batches of the cell `calls` times by this many concurrent callers. Returns the seconds
    /// and the number of failed calls; `None` if the subject has no concurrent calls.
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

/// A subject of this process, which moves between memory here and memory of the bench's target.
pub(super) trait InProcess {
    /// See [`Subject::who`].
    fn who(&self) -> &'static str;

    /// See [`Subject::prepare`].
    fn prepare(&mut self, _: &mut Bench<'_>, _: &Cell) -> Result<(), Failure> {
        Ok(())
    }

    /// See [`Subject::tune`].
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure>
    where
        Self: Sized,
    {
        turn(self, bench, cell, bench.settings.turn_bytes / 2).map(drop)
    }

    /// Moves one batch of the cell, and returns when it has ended.
    fn one(&mut self, bench: &mut Bench<'_>, cell: &Cell, batch: usize) -> Result<(), Failure>;

    /// Memory of the subject on this side.
    fn memory<'a>(&'a mut self, bench: &'a mut Bench<'_>) -> &'a mut dyn Memory;

    /// Memory of the subject at the target.
    fn program(&self) -> Program;
}

impl<S: InProcess> Subject for S {
    fn who(&self) -> &'static str {
        InProcess::who(self)
    }

    fn prepare(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        InProcess::prepare(self, bench, cell)
    }

    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        InProcess::tune(self, bench, cell)
    }

    fn calls(
        &mut self,
        bench: &mut Bench<'_>,
        cell: &Cell,
        calls: usize,
        limit: Duration,
    ) -> Result<Vec<f64>, Failure> {
        let (began, mut took) = (Instant::now(), Vec::with_capacity(calls));
        while took.len() < calls && (took.len() < 2 || began.elapsed() < limit) {
            let started = Instant::now();
            for batch in 0..cell.load.batches.len() {
                self.one(bench, cell, batch)?;
            }
            took.push(started.elapsed().as_secs_f64());
        }
        Ok(took)
    }

    fn verify(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<Option<String>, Failure> {
        InProcess::prepare(self, bench, cell)?;
        for (batch, table) in cell.load.batches.iter().enumerate() {
            let prepared = prepare_memory(self, bench, cell.op, table.span())?;
            self.one(bench, cell, batch)?;
            let tables = std::slice::from_ref(table);
            if let Some(wrong) = check_destination(self, bench, cell.op, prepared, tables)? {
                return Ok(Some(wrong));
            }
        }
        Ok(None)
    }
}

/// Verifies a subject `when`: before or after the rounds. A wrong byte ends the bench.
pub(super) fn verify(
    bench: &mut Bench<'_>,
    subject: &mut dyn Subject,
    cell: &Cell,
    when: &str,
) -> Result<(), Failure> {
    match subject.verify(bench, cell)? {
        None => Ok(()),
        Some(wrong) => {
            let (name, who) = (cell.name(), subject.who());
            Err(Failure::Check(format!("WRONG BYTES {when} the rounds: {name} by {who}: {wrong}")))
        }
    }
}

/// Number of trials of each setting in [`fastest`].
const TRIALS: usize = 3;

/// The setting with which a subject is fastest, by the median of some trials of each in turn.
pub(super) fn fastest<S: Subject, C: Copy>(
    subject: &mut S,
    bench: &mut Bench<'_>,
    cell: &Cell,
    settings: impl Iterator<Item = C>,
    apply: impl Fn(&mut S, &mut Bench<'_>, C) -> Result<(), Failure>,
) -> Result<C, Failure> {
    let mut tried: Vec<(C, Vec<f64>)> = settings.map(|setting| (setting, Vec::new())).collect();
    let calls = (bench.settings.turn_bytes / 8 / cell.load.bytes()).clamp(1, 50);
    for _ in 0..TRIALS {
        for (setting, took) in &mut tried {
            apply(subject, bench, *setting)?;
            took.push(median(&subject.calls(bench, cell, calls, Duration::MAX)?));
        }
    }
    let best = tried.iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
    Ok(best.expect("there is a setting").0)
}

/// Content of the two memories before a move.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prepared {
    seed: u64,
    /// Poison of a destination on this side; a target keeps its own secret.
    poison: u64,
    span: usize,
}

/// Poisons the destination and fills the source.
pub(super) fn prepare_memory<C: InProcess>(
    subject: &mut C,
    bench: &mut Bench<'_>,
    op: Op,
    span: usize,
) -> Result<Prepared, Failure> {
    let (seed, program) = (random(), subject.program());
    let mut prepared = Prepared { seed, poison: 0, span };
    match op {
        Op::Write => {
            bench.link.poison(program, span)?;
            verify::fill(subject.memory(bench), seed, span)?;
        }
        Op::Read => {
            prepared.poison = verify::poison(subject.memory(bench), span)?;
            bench.link.fill(program, seed, span)?;
        }
    }
    Ok(prepared)
}

/// Describes an error at the destination after these tables were moved, if there is one.
pub(super) fn check_destination<C: InProcess>(
    subject: &mut C,
    bench: &mut Bench<'_>,
    op: Op,
    prepared: Prepared,
    tables: &[Table],
) -> Result<Option<String>, Failure> {
    let Prepared { seed, poison, span } = prepared;
    let pairs: Vec<_> = tables.iter().flat_map(|table| table.pairs.iter().copied()).collect();
    match op {
        Op::Write => bench.link.check(subject.program(), seed, span, &pairs),
        Op::Read => verify::check(subject.memory(bench), seed, poison, span, &pairs),
    }
}

/// The figures of one turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    /// Bytes per second of the median call.
    pub(super) rate: f64,
    /// Seconds of processor time per gigabyte, of the caller's side and of the target's.
    pub(super) cpu: [f64; 2],
    /// Times a thread of either side slept, per batches of the cell.
    pub(super) waits: f64,
}

/// Longest turn: some engines need a second for a call.
const TURN_LIMIT: Duration = Duration::from_millis(400);

/// Makes calls that move `bytes` together, two at least.
pub(super) fn turn<C: Subject + ?Sized>(
    subject: &mut C,
    bench: &mut Bench<'_>,
    cell: &Cell,
    bytes: usize,
) -> Result<Turn, Failure> {
    subject.prepare(bench, cell)?;
    let call_bytes = subject.call_bytes(bench, cell);
    let calls = (bytes / call_bytes).clamp(2, 200);
    let before = subject.usage(bench)?;
    let took = subject.calls(bench, cell, calls, TURN_LIMIT)?;
    let after = subject.usage(bench)?;
    subject.pause();
    let moved = (call_bytes * took.len()) as f64;
    let used = [after[0] - before[0], after[1] - before[1]];
    Ok(Turn {
        rate: call_bytes as f64 / median(&took),
        cpu: used.map(|used| used.cpu.as_secs_f64() / (moved / 1e9)),
        waits: (used[0].waits + used[1].waits) as f64 / moved * cell.load.bytes() as f64,
    })
}
