//! Other engines as subjects: a target and an initiator process each, in Python, commanded over pipes
//! (`bench/peers/kvferry_peers`).
//!
//! Their processes are stopped outside their turns: NIXL's progress threads use a core each as long as
//! they run. A process that crashes, fails or does not answer in time is killed. Its figure says why, and
//! the next turn starts another.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::child::Child;
use crate::failure::Failure;
use crate::helper;
use crate::machine::random;
use crate::options::Op;

use super::Bench;
use super::subject::{Cell, Subject};
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

/// Settings of the engines. Where cores are few, NIXL is fastest without a progress thread at the initiator.
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

/// The engines that are measured beside this transport.
pub(super) fn beside(transport: &str, python: &Path, bytes: usize) -> Vec<PeerEngine> {
    let settings = SETTINGS.iter().filter(|setting| setting.transport == transport);
    settings
        .map(|setting| PeerEngine {
            setting,
            python: python.to_owned(),
            bytes,
            processes: None,
            failures: 0,
            planned: None,
        })
        .collect()
}

/// Fails unless the interpreter has `kvferry_peers`.
pub(super) fn check(python: &Path) -> Result<(), Failure> {
    if helper::imports(python, "kvferry_peers") {
        return Ok(());
    }
    Err(Failure::Usage(format!(
        "--peers {}: it can't `import kvferry_peers`; `make bench-peers` installs what is needed",
        python.display()
    )))
}

const START_PATIENCE: Duration = Duration::from_secs(60);
const PATIENCE: Duration = Duration::from_secs(60);
/// Time for threads that were stopped to be scheduled again.
const SETTLE: Duration = Duration::from_millis(30);
/// Number of failures after which an engine is not started again.
const FAILURES_MAX: usize = 4;

pub(super) struct PeerEngine {
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

impl PeerEngine {
    fn start(&self) -> Result<Processes, Failure> {
        let start = |role: &str| {
            let mut command = Command::new(&self.python);
            command.args(["-m", "kvferry_peers", self.setting.engine, role]);
            command.envs(self.setting.environment.iter().copied());
            // They log to standard error under all settings.
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

    /// Returns both processes, started and running.
    fn running(&mut self) -> Result<&mut Processes, Failure> {
        if self.failures >= FAILURES_MAX {
            return Err(Failure::Failed(format!(
                "it failed {FAILURES_MAX} times before, and is not started again"
            )));
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

impl Subject for PeerEngine {
    fn who(&self) -> &'static str {
        self.setting.who
    }

    fn prepare(&mut self, _: &mut Bench<'_>, cell: &Cell) -> Result<(), Failure> {
        self.plan(cell.op, cell.name(), &cell.load.batches)?;
        // A call that does not count: the processes were stopped.
        self.initiator::<Value>("call", json!([1, 1, 0]))?;
        Ok(())
    }

    /// Prepares the cell only: the engine's settings are fixed.
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

    /// Lets the engine's own processes fill and compare; only the destination's knows the poison.
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

    fn pause(&mut self) {
        if let Some(processes) = &mut self.processes {
            // If one has ended, the next command to it fails.
            let _ = processes.initiator.signal(Signal::STOP);
            let _ = processes.target.signal(Signal::STOP);
            processes.stopped = true;
        }
    }

    fn is_external(&self) -> bool {
        true
    }

    fn discard(&mut self) {
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
