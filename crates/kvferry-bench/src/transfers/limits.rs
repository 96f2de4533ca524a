//! The machine's limits as subjects: the floor, raw streams, process_vm, memcpy.

use std::collections::HashMap;
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::failure::Failure;
use crate::options::{Op, Size};

use super::copies::{self, RANGES, Reached};
use super::floor::{BUFFERS, CHUNKS, STREAMS};
use super::messages::{Ask, Program};
use super::pages::Pages;
use super::subject::{Cell, InProcess, Subject, fastest};
use super::verify::Memory;
use super::{Bench, raw};
use crate::report::Choice;

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
        let Choice { chunk, streams, .. } = choice;
        let floor = &mut bench.floors[self.now];
        (floor.chunk, floor.streams) = (chunk, streams);
        bench.link.ask(&Ask::Floor { chunk, streams })
    }
}

impl InProcess for FloorProgram {
    fn who(&self) -> &'static str {
        "floor"
    }

    fn prepare(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        let default = Choice { chunk: CHUNKS[0], buffer: BUFFERS[0], streams: 1 };
        let choice = self.choice(cell).unwrap_or(default);
        self.apply(bench, choice)
    }

    /// The call size, socket buffer and number of streams with which it is fastest here.
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        let sockets = CHUNKS.iter().flat_map(|&chunk| BUFFERS.map(|buffer| (chunk, buffer)));
        let choices = sockets
            .flat_map(|(chunk, buffer)| STREAMS.map(|streams| Choice { chunk, buffer, streams }));
        let best = fastest(self, bench, cell, choices, FloorProgram::apply)?;
        self.choices.insert(cell.name(), best);
        Ok(())
    }

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

/// Raw streams, each to memory of its own.
pub(super) struct Raw {
    who: &'static str,
    streams: Vec<TcpStream>,
}

impl Raw {
    pub(super) fn one(bench: &Bench<'_>) -> Result<Raw, Failure> {
        Ok(Raw { who: "raw", streams: vec![bench.link.raw(None)?] })
    }

    /// Opens four streams: as many as an agent opens to a peer on a small machine.
    pub(super) fn four(bench: &Bench<'_>) -> Result<Raw, Failure> {
        let own = bench.settings.raw_bytes.div_ceil(4);
        let streams = (0..4).map(|_| bench.link.raw(Some(own))).collect::<Result<_, _>>()?;
        Ok(Raw { who: "raw × 4", streams })
    }
}

impl Subject for Raw {
    fn who(&self) -> &'static str {
        self.who
    }

    /// A call sends the same bytes for every cell.
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

    /// There is no table to verify.
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
    /// Fails with the reason why this host does not allow it.
    pub(super) fn new(bench: &mut Bench<'_>) -> Result<ProcessVm, String> {
        let target = bench.link.reached().ok_or("the target is on another host")?;
        let table = super::tables::Table::scatter(0, Size { block: 4096, count: 1 });
        target.write(&bench.floor_memory, &table, 1).map_err(|why| why.to_string())?;
        Ok(ProcessVm { target, ranges: HashMap::new(), now: RANGES[0] })
    }
}

impl InProcess for ProcessVm {
    fn who(&self) -> &'static str {
        "process_vm"
    }

    fn prepare(&mut self, _: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        self.now = self.ranges.get(&cell.name()).copied().unwrap_or(RANGES[0]);
        Ok(())
    }

    /// The fastest number of ranges in a call.
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        let best = fastest(self, bench, cell, RANGES.into_iter(), |it, _, ranges| {
            it.now = ranges;
            Ok(())
        })?;
        self.ranges.insert(cell.name(), best);
        Ok(())
    }

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

impl Subject for Memcpy {
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
                copies::copy_here(&bench.floor_memory, &mut self.to, table);
            }
            started.elapsed().as_secs_f64()
        };
        Ok((0..calls).map(call).collect())
    }

    /// There is no other side that could compare.
    fn verify(&mut self, _: &mut Bench<'_>, _: &Cell) -> Result<Option<String>, Failure> {
        Ok(None)
    }
}
