//! kvferry called from Python: lists of addresses, passed to `kvferry.Agent` in a process of its own.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::child::Child;
use crate::failure::Failure;
use crate::machine::random;
use crate::options::{Op, Size};
use crate::stats::{Spread, median};
use crate::{helper, units};

use super::Bench;
use super::messages::Program;
use super::ours::Ours;
use super::pages::Pages;
use super::subject::{Cell, Subject};
use super::tables::Table;
use super::usage::Usage;
use super::verify;
use crate::report::Row;

const SCRIPT: &str = include_str!("python.py");

/// Blocks so small that the call is nearly all of the time.
const TINY: Size = Size { block: 16, count: 1024 };
const TINY_CALLS: usize = 50;
const OVERHEAD_US_MAX: f64 = 150.0;

/// An interpreter that has kvferry: the one asked for, or the first of the usual ones.
pub(super) fn find(asked: Option<&Path>) -> Result<PathBuf, String> {
    let active = std::env::var_os("VIRTUAL_ENV").map(|dir| PathBuf::from(dir).join("bin/python"));
    let likely = [active, Some(".venv/bin/python".into()), Some("python3".into())];
    let tried: Vec<PathBuf> = match asked {
        Some(asked) => vec![asked.to_owned()],
        None => likely.into_iter().flatten().collect(),
    };
    let has_kvferry = |python: &&PathBuf| helper::imports(python, "kvferry");
    tried.iter().find(has_kvferry).cloned().ok_or_else(|| {
        let tried: Vec<_> = tried.iter().map(|python| python.display().to_string()).collect();
        format!("no `import kvferry` in {}; `make build` makes .venv", tried.join(", "))
    })
}

/// A Python process with an agent of its own, for the same work.
pub(super) struct Python {
    child: Child,
    /// A copy of its memory, passed through a file.
    memory: Pages,
    file: PathBuf,
    /// The cell whose tables it has.
    planned: Option<String>,
}

impl Python {
    pub(super) fn start(bench: &Bench<'_>, python: &Path) -> Result<Python, Failure> {
        let nbytes = bench.arena.len();
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]);
        if let Some(allowed) = bench.transport.allowed() {
            command.env("KVFERRY_TRANSPORTS", allowed);
        }
        let mut child = Child::start(&mut command)?;
        let version: String = child.hello()?;
        if version != env!("CARGO_PKG_VERSION") {
            return Err(Failure::Usage(format!(
                "{} has kvferry {version}; this is {}",
                python.display(),
                env!("CARGO_PKG_VERSION")
            )));
        }
        let file = std::env::temp_dir().join(format!("kvferry-bench-{:016x}", random()));
        let memory = Pages::filled(0, nbytes);
        let mut python = Python { child, memory, file, planned: None };
        let transport = bench.transport.name();
        python.ask::<()>("open", json!([bench.link.agent_address, nbytes, transport]))?;
        Ok(python)
    }

    fn ask<A: DeserializeOwned>(&mut self, what: &str, arguments: Value) -> Result<A, Failure> {
        self.child.ask(&(what, arguments))
    }

    fn plan(
        &mut self,
        bench: &Bench<'_>,
        op: Op,
        name: String,
        tables: &[Table],
    ) -> Result<(), Failure> {
        if self.planned.as_ref() != Some(&name) {
            let tables: Vec<_> = tables.iter().map(|table| table.columns(op)).collect();
            self.ask::<()>("plan", json!([bench.link.region().addr, tables]))?;
            self.planned = Some(name);
        }
        Ok(())
    }

    /// Seconds of each call.
    fn call(&mut self, op: Op, calls: usize, limit: Duration) -> Result<Vec<f64>, Failure> {
        self.ask("call", json!([op.name(), calls, limit.as_secs_f64()]))
    }

    fn load(&mut self, span: usize) -> Result<(), Failure> {
        fs::write(&self.file, &self.memory[..span]).map_err(|error| self.not_passed(&error))?;
        self.ask("load", json!([self.file]))
    }

    fn store(&mut self, span: usize) -> Result<(), Failure> {
        self.ask::<()>("store", json!([self.file, span]))?;
        let held = fs::read(&self.file).map_err(|error| self.not_passed(&error))?;
        self.memory[..span].copy_from_slice(&held);
        Ok(())
    }

    fn not_passed(&self, error: &io::Error) -> Failure {
        let (file, nbytes) = (self.file.display(), self.memory.len() as u64);
        let nbytes = units::bytes(nbytes);
        Failure::Failed(format!("{file}: {error}; set TMPDIR to a folder with {nbytes} free"))
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may not exist.
        let _ = fs::remove_file(&self.file);
    }
}

impl Subject for Python {
    fn who(&self) -> &'static str {
        "kvferry, Python"
    }

    fn prepare(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        self.plan(bench, cell.op, cell.name(), &cell.load.batches)
    }

    fn calls(
        &mut self,
        _: &mut Bench<'_>,
        cell: &Cell,
        calls: usize,
        limit: Duration,
    ) -> Result<Vec<f64>, Failure> {
        self.call(cell.op, calls, limit)
    }

    fn verify(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<Option<String>, Failure> {
        for (number, table) in cell.load.batches.iter().enumerate() {
            let name = format!("{}, batch {number}", cell.name());
            self.plan(bench, cell.op, name, std::slice::from_ref(table))?;
            let (seed, span) = (random(), table.span());
            let mut poison = 0;
            match cell.op {
                Op::Write => {
                    bench.link.poison(Program::Kvferry, span)?;
                    verify::fill(&mut self.memory, seed, span)?;
                }
                Op::Read => {
                    poison = verify::poison(&mut self.memory, span)?;
                    bench.link.fill(Program::Kvferry, seed, span)?;
                }
            }
            self.load(span)?;
            self.call(cell.op, 1, Duration::ZERO)?;
            let wrong = match cell.op {
                Op::Write => bench.link.check(Program::Kvferry, seed, span, &table.pairs)?,
                Op::Read => {
                    self.store(span)?;
                    verify::check(&self.memory, seed, poison, span, &table.pairs)?
                }
            };
            if wrong.is_some() {
                return Ok(wrong);
            }
        }
        Ok(None)
    }

    fn usage(&mut self, bench: &mut Bench<'_>) -> Result<[Usage; 2], Failure> {
        Ok([Usage::of(self.child.id())?, bench.link.usage()?])
    }
}

/// Measures the extra time of a call with 1 024 descriptors from Python. In Rust, the batch exists before the call.
pub(super) fn overhead(bench: &mut Bench<'_>, python: &mut Python) -> Result<Row, Failure> {
    bench.bar.inc_length(1);
    bench.step("the cost of a call from Python");
    let cell = Cell::of_size(Op::Write, TINY);
    let mut rust = Ours::registered(bench);
    rust.prepare(bench, &cell)?;
    python.prepare(bench, &cell)?;
    let (mut over, mut from_rust, mut from_python) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.settings.rounds.max(7) {
        for turn in 0..2 {
            let (subject, times): (&mut dyn Subject, _) = match (round + turn) % 2 {
                0 => (&mut rust, &mut from_rust),
                _ => (python, &mut from_python),
            };
            let took = subject.calls(bench, &cell, TINY_CALLS, Duration::MAX)?;
            times.push(median(&took) * 1e6);
        }
        over.push(from_python[round] - from_rust[round]);
    }
    let work = "1 024 descriptors, over the call from Rust";
    Ok(Row::new("python-call", work, "µs", Spread::of(over))
        .beside("Python", Spread::of(from_python))
        .beside("Rust", Spread::of(from_rust))
        .at_most(OVERHEAD_US_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interpreter_without_kvferry_is_named() {
        let why = find(Some(Path::new("/nowhere/python"))).expect_err("there is none");
        assert!(why.contains("/nowhere/python") && why.contains("import kvferry"), "{why}");
    }
}
