//! The same batches called from Python: lists of addresses given to `kvferry.Agent` in a process of
//! its own, in turn with the floor and with the calls from Rust.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::blocks::scattered;
use crate::child::Child;
use crate::cli::{Op, Size, Streams};
use crate::content::random;
use crate::failure::Failure;
use crate::stats::{Spread, median};
use crate::units;

use super::messages::Program;
use super::pages::Pages;
use super::report::{Bound, Row};
use super::rounds::{Work, blocks};
use super::verify::{self, Blocks};
use super::{Bench, SMALL};

const SCRIPT: &str = include_str!("python.py");

/// Blocks below this have the cost of a call to carry.
const SMALL_BLOCK: usize = 32 << 10;

/// So little that the call is all there is to it.
const TINY: Size = Size { block: 16, count: 1024 };
const TINY_CALLS: usize = 50;
const OVERHEAD_US: Bound = Bound::AtMost(150.0);

/// An interpreter that has kvferry: the one asked for, else the first that will do.
pub(super) fn find(asked: Option<&Path>) -> Result<PathBuf, String> {
    let active = std::env::var_os("VIRTUAL_ENV").map(|dir| PathBuf::from(dir).join("bin/python"));
    let likely = [active, Some(".venv/bin/python".into()), Some("python3".into())];
    let tried: Vec<PathBuf> = match asked {
        Some(asked) => vec![asked.to_owned()],
        None => likely.into_iter().flatten().collect(),
    };
    let has_kvferry = |python: &&PathBuf| {
        let mut probe = Command::new(python);
        probe.args(["-c", "import kvferry"]).stdin(Stdio::null());
        probe.stdout(Stdio::null()).stderr(Stdio::null());
        probe.status().is_ok_and(|status| status.success())
    };
    tried.iter().find(has_kvferry).cloned().ok_or_else(|| {
        let tried: Vec<_> = tried.iter().map(|python| python.display().to_string()).collect();
        format!("no `import kvferry` in {}; `make build` makes .venv", tried.join(", "))
    })
}

/// A Python process with an agent of its own that moves what this one moves.
#[derive(Debug)]
struct Python {
    child: Child,
    /// What its memory is to hold, or held; passed through a file.
    memory: Pages,
    file: PathBuf,
}

impl Python {
    fn start(bench: &Bench<'_>, python: &Path, nbytes: usize) -> Result<Python, Failure> {
        let mut command = Command::new(python);
        command.args(["-c", SCRIPT]);
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
        let mut python = Python { child, memory: Pages::filled(0, nbytes), file };
        python.ask::<()>("open", json!([bench.link.agent_address, nbytes]))?;
        Ok(python)
    }

    fn ask<A: DeserializeOwned>(&mut self, what: &str, arguments: Value) -> Result<A, Failure> {
        self.child.ask(&(what, arguments))
    }

    /// The table of a batch like [`Bench::batch`]'s.
    fn plan(&mut self, bench: &Bench<'_>, op: Op, size: Size) -> Result<(), Failure> {
        let base = bench.link.region().addr;
        let places = (0..size.count).map(|index| scattered(index, size.count));
        let scattered: Vec<u64> = places.map(|place| (place * size.block) as u64).collect();
        let ordered: Vec<u64> = (0..size.count).map(|i| (i * size.block) as u64).collect();
        let (local, remote) = match op {
            Op::Write => (ordered, scattered),
            Op::Read => (scattered, ordered),
        };
        let remote: Vec<u64> = remote.into_iter().map(|offset| base + offset).collect();
        self.ask("plan", json!([local, remote, size.block]))
    }

    /// Seconds of each call.
    fn call(&mut self, op: Op, calls: usize) -> Result<Vec<f64>, Failure> {
        self.ask("call", json!([op.name(), calls]))
    }

    fn load(&mut self) -> Result<(), Failure> {
        fs::write(&self.file, &self.memory[..]).map_err(|error| self.not_passed(&error))?;
        self.ask("load", json!([self.file]))
    }

    fn store(&mut self) -> Result<(), Failure> {
        let nbytes = self.memory.len();
        self.ask::<()>("store", json!([self.file, nbytes]))?;
        let held = fs::read(&self.file).map_err(|error| self.not_passed(&error))?;
        self.memory.copy_from_slice(&held);
        Ok(())
    }

    fn not_passed(&self, error: &io::Error) -> Failure {
        let (file, nbytes) = (self.file.display(), self.memory.len() as u64);
        let nbytes = units::bytes(nbytes);
        Failure::Failed(format!("{file}: {error}; TMPDIR names a folder with {nbytes} free"))
    }

    /// Moves fresh contents to a poisoned destination, whose owner then looks.
    fn verify(
        &mut self,
        bench: &mut Bench<'_>,
        op: Op,
        blocks: Blocks,
    ) -> Result<Option<String>, Failure> {
        let seed = random();
        match op {
            Op::Write => {
                bench.link.poison(Program::Kvferry, blocks)?;
                verify::fill(&mut self.memory, seed, blocks)?;
            }
            Op::Read => {
                verify::poison(&mut self.memory, blocks)?;
                bench.link.fill(Program::Kvferry, seed, blocks)?;
            }
        }
        self.load()?;
        self.call(op, 1)?;
        match op {
            Op::Write => bench.link.check(Program::Kvferry, seed, blocks),
            Op::Read => {
                self.store()?;
                verify::check(&self.memory, seed, blocks)
            }
        }
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // It may never have been written.
        let _ = fs::remove_file(&self.file);
    }
}

pub(super) fn run(bench: &mut Bench<'_>, python: &Path) -> Result<Vec<Row>, Failure> {
    let settings = bench.settings;
    bench.bar.inc_length((settings.args.op.len() * settings.sizes.len()) as u64 + 1);
    let mut rows = Vec::new();
    for &op in &settings.args.op {
        for &size in &settings.sizes {
            rows.push(throughput(bench, python, op, size)?);
        }
    }
    rows.push(overhead(bench, python)?);
    Ok(rows)
}

/// A process for each size: its memory goes with it.
fn throughput(bench: &mut Bench<'_>, python: &Path, op: Op, size: Size) -> Result<Row, Failure> {
    let mut work = Work::new(bench, op, size, Streams(None))?;
    let name = work.name();
    bench.step(&format!("{name} from Python"));
    let mut python = Python::start(bench, python, size.bytes())?;
    python.plan(bench, op, size)?;
    let verify = |bench: &mut Bench<'_>, python: &mut Python, when: &str| match python.verify(
        bench,
        op,
        blocks(size),
    )? {
        None => Ok(()),
        Some(wrong) => Err(Failure::Check(format!(
            "WRONG BYTES {when} the rounds: {name} from Python: {wrong}"
        ))),
    };
    verify(bench, &mut python, "before")?;
    work.choose(bench)?;
    let bytes = bench.settings.turn_bytes;
    let calls = (bytes / size.bytes()).clamp(2, 200);
    let (mut floor, mut rust, mut ours) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.settings.rounds {
        for turn in 0..3 {
            match (round + turn) % 3 {
                0 => floor.push(work.turn(bytes, || work.floor_call(bench))?),
                1 => rust.push(work.turn(bytes, || work.call(bench))?),
                _ => ours.push(size.bytes() as f64 / median(&python.call(op, calls)?)),
            }
        }
    }
    verify(bench, &mut python, "after")?;
    let rate = |rates: &[f64]| Spread::of(rates.iter().map(|rate| rate / 1e9).collect());
    let required = if size.block < SMALL_BLOCK { 0.85 } else { 0.95 };
    Ok(Row::new("python", name, "GB/s", rate(&ours))
        .beside("floor", rate(&floor))
        .beside("Rust", rate(&rust))
        .judged("floor", Spread::ratio(&ours, &floor), Bound::AtLeast(required)))
}

/// What a call with 1 024 descriptors takes longer than from Rust, where the batch was made before.
fn overhead(bench: &mut Bench<'_>, python: &Path) -> Result<Row, Failure> {
    bench.step("the cost of a call from Python");
    let work = Work::new(bench, Op::Write, TINY, Streams(None))?;
    let mut python = Python::start(bench, python, SMALL)?;
    python.plan(bench, Op::Write, TINY)?;
    let (mut over, mut rust, mut ours) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.settings.rounds.max(7) {
        for turn in 0..2 {
            match (round + turn) % 2 {
                0 => {
                    let calls: Result<Vec<f64>, Failure> = (0..TINY_CALLS)
                        .map(|_| Ok(work.call(bench)?.as_secs_f64() * 1e6))
                        .collect();
                    rust.push(median(&calls?));
                }
                _ => ours.push(median(&python.call(Op::Write, TINY_CALLS)?) * 1e6),
            }
        }
        over.push(ours[round] - rust[round]);
    }
    Ok(Row::new(
        "python-call",
        "1 024 descriptors, over the call from Rust",
        "µs",
        Spread::of(over),
    )
    .beside("Python", Spread::of(ours))
    .beside("Rust", Spread::of(rust))
    .judged_itself(OVERHEAD_US))
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
