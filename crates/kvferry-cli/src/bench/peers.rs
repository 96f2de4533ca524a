//! Other engines as contenders: a target and an initiator process each, programs in Python that are
//! told what to do over a pipe (`bench/peers/kvferry_peers`).
//!
//! A process of whom it is not the turn is stopped: NIXL's progress threads use a core each for as
//! long as they run. One that crashes, fails or does not answer in time is killed; its figure says
//! why, and the next turn starts another.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::child::Child;
use crate::cli::Op;
use crate::content::random;
use crate::failure::Failure;

use super::Bench;
use super::contender::{Cell, Contender};
use super::tables::Table;
use super::usage::Usage;

/// An engine with settings of its own.
#[derive(Debug)]
pub(super) struct Setting {
    pub(super) who: &'static str,
    /// The transport of kvferry that it is measured beside.
    transport: &'static str,
    engine: &'static str,
    environment: &'static [(&'static str, &'static str)],
}

const QUIET: (&str, &str) = ("GLOG_minloglevel", "3");
const TCP_LANES: (&str, &str) = ("UCX_TLS", "tcp");
const HOST_LANES: (&str, &str) = ("UCX_TLS", "posix,sysv,cma,self,tcp");
const NO_THREAD: &str = "nixl-no-progress-thread";

/// NIXL's progress threads compete with the caller where cores are few: without one at the
/// initiator it is at its best.
const SETTINGS: [Setting; 6] = [
    Setting { who: "Mooncake", transport: "tcp", engine: "mooncake", environment: &[QUIET] },
    Setting {
        who: "Mooncake, queue 65535",
        transport: "tcp",
        engine: "mooncake",
        environment: &[QUIET, ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535")],
    },
    Setting { who: "NIXL", transport: "tcp", engine: "nixl", environment: &[TCP_LANES] },
    Setting { who: "NIXL, tuned", transport: "tcp", engine: NO_THREAD, environment: &[TCP_LANES] },
    Setting { who: "NIXL", transport: "local", engine: "nixl", environment: &[HOST_LANES] },
    Setting {
        who: "NIXL, tuned",
        transport: "local",
        engine: NO_THREAD,
        environment: &[HOST_LANES],
    },
];

/// Those that are measured beside this transport.
pub(super) fn beside(transport: &str, python: &Path, bytes: usize) -> Vec<Guest> {
    let settings = SETTINGS.iter().filter(|setting| setting.transport == transport);
    settings
        .map(|setting| Guest {
            setting,
            python: python.to_owned(),
            bytes,
            processes: None,
            failures: 0,
            planned: None,
        })
        .collect()
}

/// Whether the interpreter has what is needed.
pub(super) fn check(python: &Path) -> Result<(), Failure> {
    let mut probe = Command::new(python);
    probe.args(["-c", "import kvferry_peers"]).stdin(Stdio::null());
    match probe.stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => Ok(()),
        _ => Err(Failure::Usage(format!(
            "--peers {}: it does not `import kvferry_peers`; use `make bench-peers`",
            python.display()
        ))),
    }
}

const START_PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(60);
/// For threads that were stopped to find their places.
const SETTLE: Duration = Duration::from_millis(30);
/// An engine that fails so often is left alone.
const MOST_FAILURES: usize = 4;

pub(super) struct Guest {
    setting: &'static Setting,
    python: PathBuf,
    bytes: usize,
    processes: Option<Processes>,
    failures: usize,
    /// The cell whose table the initiator has.
    planned: Option<String>,
}

struct Processes {
    initiator: Child,
    target: Child,
    stopped: bool,
}

impl Guest {
    fn start(&self) -> Result<Processes, Failure> {
        let start = |role: &str| {
            let mut command = Command::new(&self.python);
            command.args(["-m", "kvferry_peers", self.setting.engine, role]);
            command.envs(self.setting.environment.iter().copied());
            // They write logs there, whatever one sets.
            let mut child = Child::start(command.stderr(Stdio::null()))?;
            child.hear_within::<Value>(START_PATIENCE)?;
            Ok::<_, Failure>(child)
        };
        let (mut target, mut initiator) = (start("target")?, start("initiator")?);
        let reach: Value = target.ask_within(&("open", [self.bytes]), START_PATIENCE)?;
        initiator.ask_within::<_, Value>(&("open", [self.bytes]), START_PATIENCE)?;
        initiator.ask_within::<_, Value>(&("connect", [reach]), START_PATIENCE)?;
        Ok(Processes { initiator, target, stopped: false })
    }

    /// Both processes, running.
    fn running(&mut self) -> Result<&mut Processes, Failure> {
        if self.failures >= MOST_FAILURES {
            return Err(Failure::Failed(format!("it failed {MOST_FAILURES} times before")));
        }
        if self.processes.is_none() {
            self.planned = None;
            self.processes = Some(self.start()?);
        }
        let processes = self.processes.as_mut().expect("started just now, if not before");
        if processes.stopped {
            processes.target.signal(Signal::CONT)?;
            processes.initiator.signal(Signal::CONT)?;
            processes.stopped = false;
            std::thread::sleep(SETTLE);
        }
        Ok(processes)
    }

    fn initiator<A: DeserializeOwned>(&mut self, what: &str, with: Value) -> Result<A, Failure> {
        self.running()?.initiator.ask_within(&(what, with), PATIENCE)
    }

    fn plan(&mut self, op: Op, name: String, tables: &[Table]) -> Result<(), Failure> {
        self.running()?;
        if self.planned.as_ref() != Some(&name) {
            let tables: Vec<_> = tables.iter().map(|table| table.columns(op)).collect();
            self.initiator::<Value>("plan", json!([op.name(), tables]))?;
            self.planned = Some(name);
        }
        Ok(())
    }
}

impl Contender for Guest {
    fn who(&self) -> &'static str {
        self.setting.who
    }

    fn prepare(&mut self, _: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        self.plan(cell.op, cell.name(), &cell.load.batches)?;
        // Whatever was paged out or put to sleep while they were stopped.
        self.initiator::<Value>("call", json!([1, 1, 0]))?;
        Ok(())
    }

    /// Its settings are given.
    fn tune(&mut self, bench: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        self.prepare(bench, cell)?;
        self.pause();
        Ok(())
    }

    fn calls(
        &mut self,
        _: &mut Bench<'_>,
        cell: &Cell,
        calls: usize,
        limit: Duration,
    ) -> Result<Vec<f64>, Failure> {
        let batches = cell.load.batches.len();
        self.initiator("call", json!([batches, calls, limit.as_secs_f64()]))
    }

    /// Its own processes fill and look; only the destination's knows the poison.
    fn verify(&mut self, _: &mut Bench<'_>, cell: &Cell) -> Result<Option<String>, Failure> {
        for (number, table) in cell.load.batches.iter().enumerate() {
            let name = format!("{}, batch {number}", cell.name());
            self.plan(cell.op, name, std::slice::from_ref(table))?;
            let (seed, span) = (random() >> 1, table.span());
            let processes = self.running()?;
            let (source, destination) = match cell.op {
                Op::Write => (&mut processes.initiator, &mut processes.target),
                Op::Read => (&mut processes.target, &mut processes.initiator),
            };
            source.ask_within::<_, Value>(&("fill", json!([seed, span])), PATIENCE)?;
            destination.ask_within::<_, Value>(&("poison", [span]), PATIENCE)?;
            self.initiator::<Value>("call", json!([1, 1, 0]))?;
            let check = ("check", json!([seed, span, table.pairs]));
            let processes = self.running()?;
            let destination = match cell.op {
                Op::Write => &mut processes.target,
                Op::Read => &mut processes.initiator,
            };
            let wrong: Option<String> = destination.ask_within(&check, PATIENCE)?;
            if wrong.is_some() {
                return Ok(wrong);
            }
        }
        self.pause();
        Ok(None)
    }

    fn usage(&mut self, _: &mut Bench<'_>) -> Result<[Usage; 2], Failure> {
        let processes = self.running()?;
        Ok([Usage::of(processes.initiator.id())?, Usage::of(processes.target.id())?])
    }

    fn pids(&self, _: &Bench<'_>) -> Vec<u32> {
        let both = self.processes.iter().flat_map(|both| [&both.initiator, &both.target]);
        both.map(Child::id).collect()
    }

    fn pause(&mut self) {
        if let Some(processes) = &mut self.processes {
            // One that is gone will be noticed when it is asked for something.
            let _ = processes.initiator.signal(Signal::STOP);
            let _ = processes.target.signal(Signal::STOP);
            processes.stopped = true;
        }
    }

    fn is_guest(&self) -> bool {
        true
    }

    fn throw_away(&mut self) {
        self.failures += 1;
        self.processes = None;
    }

    fn together(
        &mut self,
        _: &mut Bench<'_>,
        cell: &Cell,
        callers: usize,
        calls: usize,
    ) -> Result<Option<(f64, usize)>, Failure> {
        self.plan(cell.op, cell.name(), &cell.load.batches)?;
        self.initiator("together", json!([callers, calls])).map(Some)
    }
}
