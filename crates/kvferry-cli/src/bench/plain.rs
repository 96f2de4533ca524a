//! The machine's limits as contenders: the floor, raw streams, process_vm, memcpy.

use std::collections::HashMap;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::cli::{Op, Size};
use crate::failure::Failure;
use crate::stats::median;

use super::contender::{Cell, Contender, InPlace, calls_here, verify_here};
use super::floor::{BUFFERS, CHUNKS};
use super::limits::{self, RANGES, Reached};
use super::messages::{Ask, Program};
use super::pages::Pages;
use super::report::Choice;
use super::verify::Memory;
use super::{Bench, raw};

/// How often each setting is tried.
const TRIALS: usize = 3;

/// The floor program, tuned for each cell.
#[derive(Default)]
pub(super) struct FloorProgram {
    choices: HashMap<String, Choice>,
    now: usize,
}

impl FloorProgram {
    pub(super) fn choice(&self, cell: &Cell) -> Option<Choice> {
        self.choices.get(&cell.name()).copied()
    }

    fn apply(&mut self, bench: &mut Bench<'_>, choice: Choice) -> Result<(), Failure> {
        let which = BUFFERS.iter().position(|&buffer| buffer == choice.buffer);
        self.now = which.expect("a choice is one of those tried");
        // Both halves use the same call size.
        bench.floors.iter_mut().for_each(|floor| floor.chunk = choice.chunk);
        bench.link.ask(&Ask::Chunk(choice.chunk))
    }
}

impl Contender for FloorProgram {
    fn who(&self) -> &'static str {
        "floor"
    }

    fn prepare(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        let default = Choice { chunk: CHUNKS[0], buffer: BUFFERS[0] };
        let choice = self.choice(cell).unwrap_or(default);
        self.apply(bench, choice)
    }

    /// The call size and socket buffer with which it is fastest here.
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        let choices =
            CHUNKS.iter().flat_map(|&chunk| BUFFERS.map(|buffer| Choice { chunk, buffer }));
        let mut tried: Vec<(Choice, Vec<f64>)> = choices.map(|choice| (choice, vec![])).collect();
        let calls = (bench.settings.turn_bytes / 8 / cell.load.bytes()).clamp(2, 50);
        for _ in 0..TRIALS {
            for (choice, took) in &mut tried {
                self.apply(bench, *choice)?;
                took.push(median(&self.calls(bench, cell, calls, Duration::MAX)?));
            }
        }
        let best = tried.iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
        self.choices.insert(cell.name(), best.expect("something was tried").0);
        Ok(())
    }

    fn calls(
        &mut self,
        bench: &mut Bench<'_>,
        cell: &Cell,
        calls: usize,
        limit: Duration,
    ) -> Result<Vec<f64>, Failure> {
        calls_here(self, bench, cell, calls, limit)
    }

    fn verify(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<Option<String>, Failure> {
        verify_here(self, bench, cell)
    }
}

impl InPlace for FloorProgram {
    fn one(&mut self, bench: &mut Bench<'_>, cell: &Cell, batch: usize) -> Result<(), Failure> {
        let (floor, table) = (&mut bench.floors[self.now], &cell.load.batches[batch]);
        let done = match cell.op {
            Op::Write => floor.write(&bench.floor_memory, table),
            Op::Read => floor.read(&mut bench.floor_memory, table),
        };
        Ok(done?)
    }

    fn memory<'a>(&'a mut self, bench: &'a mut Bench<'_>) -> &'a mut dyn Memory {
        &mut bench.floor_memory
    }

    fn program(&self) -> Program {
        Program::Floor
    }
}

/// Streams that send what they are told, to memory side by side.
pub(super) struct Raw {
    who: &'static str,
    streams: Vec<TcpStream>,
}

impl Raw {
    pub(super) fn one(bench: &Bench<'_>) -> Result<Raw, Failure> {
        Ok(Raw { who: "raw", streams: vec![bench.link.raw(None)?] })
    }

    /// As many as an agent opens to a peer on a small machine.
    pub(super) fn four(bench: &Bench<'_>) -> Result<Raw, Failure> {
        let own = bench.settings.raw_bytes.div_ceil(4);
        let streams = (0..4).map(|_| bench.link.raw(Some(own))).collect::<Result<_, _>>()?;
        Ok(Raw { who: "raw × 4", streams })
    }
}

impl Contender for Raw {
    fn who(&self) -> &'static str {
        self.who
    }

    /// A call is one stream's worth, and whatever the cell: the rate does not depend on it.
    fn calls(
        &mut self,
        bench: &mut Bench<'_>,
        _: &Cell,
        _: usize,
        _: Duration,
    ) -> Result<Vec<f64>, Failure> {
        let payload = &bench.floor_memory[..bench.settings.raw_bytes];
        let took = match self.streams.as_mut_slice() {
            [one] => raw::send(one, payload)?,
            several => raw::send_over(several, payload)?,
        };
        Ok(vec![took.as_secs_f64()])
    }

    fn call_bytes(&self, bench: &Bench<'_>, _: &Cell) -> usize {
        bench.settings.raw_bytes
    }

    /// It scatters nothing.
    fn verify(&mut self, _: &mut Bench<'_>, _: &Cell) -> Result<Option<String>, Failure> {
        Ok(None)
    }
}

/// `process_vm_writev` and `process_vm_readv`, called from this process, tuned for each cell.
pub(super) struct ProcessVm {
    target: Reached,
    ranges: HashMap<String, usize>,
    now: usize,
}

impl ProcessVm {
    /// Or why it can't be done here.
    pub(super) fn new(bench: &mut Bench<'_>) -> Result<ProcessVm, String> {
        let target = bench.link.reached().ok_or("the target is on another host")?;
        let table = super::tables::Table::scatter(0, Size { block: 4096, count: 1 });
        target.write(&bench.floor_memory, &table, 1).map_err(|why| why.to_string())?;
        Ok(ProcessVm { target, ranges: HashMap::new(), now: RANGES[0] })
    }
}

impl Contender for ProcessVm {
    fn who(&self) -> &'static str {
        "process_vm"
    }

    fn prepare(&mut self, _: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        self.now = self.ranges.get(&cell.name()).copied().unwrap_or(RANGES[0]);
        Ok(())
    }

    /// How many ranges in a call are fastest.
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        let mut tried = RANGES.map(|ranges| (ranges, Vec::new()));
        let calls = (bench.settings.turn_bytes / 8 / cell.load.bytes()).clamp(2, 50);
        for _ in 0..TRIALS {
            for (ranges, took) in &mut tried {
                self.now = *ranges;
                took.push(median(&self.calls(bench, cell, calls, Duration::MAX)?));
            }
        }
        let best = tried.iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
        self.ranges.insert(cell.name(), best.expect("something was tried").0);
        Ok(())
    }

    fn calls(
        &mut self,
        bench: &mut Bench<'_>,
        cell: &Cell,
        calls: usize,
        limit: Duration,
    ) -> Result<Vec<f64>, Failure> {
        calls_here(self, bench, cell, calls, limit)
    }

    fn verify(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<Option<String>, Failure> {
        verify_here(self, bench, cell)
    }
}

impl InPlace for ProcessVm {
    fn one(&mut self, bench: &mut Bench<'_>, cell: &Cell, batch: usize) -> Result<(), Failure> {
        let table = &cell.load.batches[batch];
        Ok(self.target.copy(cell.op, &mut bench.floor_memory, table, self.now)?)
    }

    fn memory<'a>(&'a mut self, bench: &'a mut Bench<'_>) -> &'a mut dyn Memory {
        &mut bench.floor_memory
    }

    fn program(&self) -> Program {
        Program::Floor
    }
}

/// The same table within this process.
pub(super) struct Memcpy {
    to: Pages,
}

impl Memcpy {
    pub(super) fn new(bench: &Bench<'_>) -> Memcpy {
        Memcpy { to: Pages::filled(3, bench.arena.len()) }
    }
}

impl Contender for Memcpy {
    fn who(&self) -> &'static str {
        "memcpy"
    }

    fn calls(
        &mut self,
        bench: &mut Bench<'_>,
        cell: &Cell,
        calls: usize,
        _: Duration,
    ) -> Result<Vec<f64>, Failure> {
        let call = |_| {
            let started = Instant::now();
            for table in &cell.load.batches {
                limits::copy_here(&bench.floor_memory, &mut self.to, table);
            }
            started.elapsed().as_secs_f64()
        };
        Ok((0..calls).map(call).collect())
    }

    /// There is no other side to look.
    fn verify(&mut self, _: &mut Bench<'_>, _: &Cell) -> Result<Option<String>, Failure> {
        Ok(None)
    }
}
