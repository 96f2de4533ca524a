//! Throughput: batches of scattered blocks. In every round each configuration has three turns one
//! after the other, raw stream, floor and kvferry, in an order that changes from round to round.

use std::time::{Duration, Instant};

use kvferry::{Batch, Options};

use crate::cli::{Op, Size, Streams};
use crate::content::random;
use crate::failure::Failure;
use crate::stats::{Spread, median};
use crate::units;

use super::floor::{BUFFERS, CHUNKS};
use super::messages::{Ask, Program};
use super::report::{Bound, Choice, Row};
use super::verify::{self, Blocks};
use super::{Bench, transfer};

/// What the issue asks of writes and reads alike.
const REQUIRED: Bound = Bound::AtLeast(0.95);

/// How often each setting of the floor is tried.
const TRIALS: usize = 3;

/// One configuration and what was measured of it, in bytes per second.
pub(super) struct Work {
    op: Op,
    size: Size,
    streams: Streams,
    batch: Batch,
    choice: Choice,
    raw: Vec<f64>,
    floor: Vec<f64>,
    kvferry: Vec<f64>,
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    let mut works = plan(bench)?;
    let steps = works.len() * (bench.settings.rounds + 2);
    bench.bar.inc_length(steps as u64);
    for work in &mut works {
        bench.step(&format!("{}: verifying, choosing the floor's call size", work.name()));
        work.verify(bench, "before")?;
        work.choose(bench)?;
    }
    for round in 0..bench.settings.rounds {
        for work in &mut works {
            bench.step(&format!("round {}/{}: {}", round + 1, bench.settings.rounds, work.name()));
            work.measure(bench, round)?;
        }
    }
    for work in &mut works {
        bench.step(&format!("{}: verifying", work.name()));
        work.verify(bench, "after")?;
    }
    Ok(works.into_iter().map(Work::into_row).collect())
}

fn plan(bench: &Bench<'_>) -> Result<Vec<Work>, Failure> {
    let settings = bench.settings;
    let mut works = Vec::new();
    for &op in &settings.args.op {
        for &size in &settings.sizes {
            for &streams in &settings.args.streams {
                works.push(Work::new(bench, op, size, streams)?);
            }
        }
    }
    Ok(works)
}

pub(super) fn blocks(size: Size) -> Blocks {
    Blocks { at: 0, block: size.block, count: size.count }
}

impl Work {
    pub(super) fn new(
        bench: &Bench<'_>,
        op: Op,
        size: Size,
        streams: Streams,
    ) -> Result<Work, Failure> {
        let batch = bench.batch(op, blocks(size))?;
        let choice = Choice { chunk: CHUNKS[0], buffer: BUFFERS[0] };
        let (raw, floor, kvferry) = Default::default();
        Ok(Work { op, size, streams, batch, choice, raw, floor, kvferry })
    }

    pub(super) fn name(&self) -> String {
        let streams = match self.streams {
            Streams(None) => String::new(),
            Streams(Some(1)) => ", 1 stream".to_string(),
            Streams(Some(streams)) => format!(", {streams} streams"),
        };
        let Size { block, count } = self.size;
        format!("{} {} × {count}{streams}", self.op.name(), units::bytes(block as u64))
    }

    /// The three turns of a round.
    fn measure(&mut self, bench: &mut Bench<'_>, round: usize) -> Result<(), Failure> {
        self.apply(bench, self.choice)?;
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => self.raw.push(bench.raw_rate()?),
                1 => self
                    .floor
                    .push(self.turn(bench.settings.turn_bytes, || self.floor_call(bench))?),
                _ => self.kvferry.push(self.turn(bench.settings.turn_bytes, || self.call(bench))?),
            }
        }
        Ok(())
    }

    /// Bytes per second of the middle one of as many calls as move `bytes`, two at least.
    pub(super) fn turn(
        &self,
        bytes: usize,
        mut call: impl FnMut() -> Result<Duration, Failure>,
    ) -> Result<f64, Failure> {
        let calls = (bytes / self.size.bytes()).clamp(2, 200);
        let took: Result<Vec<f64>, Failure> =
            (0..calls).map(|_| Ok(call()?.as_secs_f64())).collect();
        Ok(self.size.bytes() as f64 / median(&took?))
    }

    pub(super) fn call(&self, bench: &Bench<'_>) -> Result<Duration, Failure> {
        let options = Options { streams: self.streams.0, ..Options::default() };
        let started = Instant::now();
        transfer(&bench.peer, self.op, &self.batch, &options)?;
        Ok(started.elapsed())
    }

    pub(super) fn floor_call(&self, bench: &mut Bench<'_>) -> Result<Duration, Failure> {
        let which = BUFFERS.iter().position(|&buffer| buffer == self.choice.buffer);
        let floor = &mut bench.floors[which.expect("a choice is one of those tried")];
        let started = Instant::now();
        match self.op {
            Op::Write => floor.write(&bench.floor_memory, self.size)?,
            Op::Read => floor.read(&mut bench.floor_memory, self.size)?,
        }
        Ok(started.elapsed())
    }

    /// The call size and socket buffer with which the floor is fastest here.
    pub(super) fn choose(&mut self, bench: &mut Bench<'_>) -> Result<(), Failure> {
        let choices =
            CHUNKS.iter().flat_map(|&chunk| BUFFERS.map(|buffer| Choice { chunk, buffer }));
        let mut tried: Vec<(Choice, Vec<f64>)> =
            choices.map(|choice| (choice, Vec::new())).collect();
        for _ in 0..TRIALS {
            for (choice, rates) in &mut tried {
                self.apply(bench, *choice)?;
                self.choice = *choice;
                rates.push(self.turn(bench.settings.turn_bytes / 8, || self.floor_call(bench))?);
            }
        }
        let best = tried.iter().max_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
        self.choice = best.expect("something was tried").0;
        // The agent is warmed up alike.
        self.turn(bench.settings.turn_bytes / 2, || self.call(bench))?;
        Ok(())
    }

    /// Both halves of the floor use the same call size.
    fn apply(&self, bench: &mut Bench<'_>, choice: Choice) -> Result<(), Failure> {
        bench.floors.iter_mut().for_each(|floor| floor.chunk = choice.chunk);
        bench.link.ask(&Ask::Chunk(choice.chunk))
    }

    /// Both programs move fresh contents to a poisoned destination, whose owner then looks.
    fn verify(&self, bench: &mut Bench<'_>, when: &str) -> Result<(), Failure> {
        let blocks = blocks(self.size);
        for program in [Program::Kvferry, Program::Floor] {
            let wrong = verify_move(bench, program, self.op, blocks, |bench| match program {
                Program::Kvferry => self.call(bench).map(drop),
                Program::Floor => self.floor_call(bench).map(drop),
            })?;
            if let Some(wrong) = wrong {
                let name = self.name();
                return Err(Failure::Check(format!(
                    "WRONG BYTES {when} the rounds: {name} by {program:?}: {wrong}"
                )));
            }
        }
        Ok(())
    }

    fn into_row(self) -> Row {
        let rate = |rates: &[f64]| Spread::of(rates.iter().map(|rate| rate / 1e9).collect());
        Row::new("throughput", self.name(), "GB/s", rate(&self.kvferry))
            .beside("floor", rate(&self.floor))
            .beside("raw", rate(&self.raw))
            .floor_settings(self.choice)
            .of("raw", Spread::ratio(&self.kvferry, &self.raw))
            .judged("floor", Spread::ratio(&self.kvferry, &self.floor), REQUIRED)
    }
}

/// Fills the source, poisons the destination, moves, and lets the receiving side look.
pub(super) fn verify_move(
    bench: &mut Bench<'_>,
    program: Program,
    op: Op,
    blocks: Blocks,
    mut call: impl FnMut(&mut Bench<'_>) -> Result<(), Failure>,
) -> Result<Option<String>, Failure> {
    let seed = prepare(bench, program, op, blocks)?;
    call(bench)?;
    look(bench, program, op, blocks, seed)
}

/// Poisons the destination and fills the source; the seed of what it now holds.
pub(super) fn prepare(
    bench: &mut Bench<'_>,
    program: Program,
    op: Op,
    blocks: Blocks,
) -> Result<u64, Failure> {
    let seed = random();
    match (op, program) {
        (Op::Write, _) => bench.link.poison(program, blocks)?,
        (Op::Read, Program::Kvferry) => verify::poison(&mut bench.arena, blocks)?,
        (Op::Read, Program::Floor) => verify::poison(&mut bench.floor_memory, blocks)?,
    }
    match (op, program) {
        (Op::Read, _) => bench.link.fill(program, seed, blocks)?,
        (Op::Write, Program::Kvferry) => verify::fill(&mut bench.arena, seed, blocks)?,
        (Op::Write, Program::Floor) => verify::fill(&mut bench.floor_memory, seed, blocks)?,
    }
    Ok(seed)
}

/// What is wrong at the destination, if anything.
pub(super) fn look(
    bench: &mut Bench<'_>,
    program: Program,
    op: Op,
    blocks: Blocks,
    seed: u64,
) -> Result<Option<String>, Failure> {
    match (op, program) {
        (Op::Write, _) => bench.link.check(program, seed, blocks),
        (Op::Read, Program::Kvferry) => verify::check(&bench.arena, seed, blocks),
        (Op::Read, Program::Floor) => verify::check(&bench.floor_memory, seed, blocks),
    }
}
