//! Reads and writes through an agent, beside what plain programs and other engines reach in the same
//! rounds: `kvferry bench transfers`.
//!
//! The measuring side is here; the target (`target.rs`) is a second process of this host or
//! [`serve`] on another. Each part is one file and yields rows of the report: `rounds.rs`
//! (throughput and its cost), `callers.rs`, `churn.rs`, `latency.rs` with `keyed.rs`, `setup.rs`, `idle.rs`,
//! `sessions.rs`, `faults.rs`. What is measured in turn is a `subject`: kvferry (`ours.rs`, `python.rs`), the
//! machine's limits (`limits.rs`, with the programs `floor.rs`, `raw.rs`, `copies.rs`), other engines
//! (`peers.rs`). What is moved is a table (`tables.rs`); `verify.rs` compares every byte outside the
//! timed parts. `pictures.rs` draws a report.

pub mod baseline;
mod callers;
mod churn;
mod copies;
mod faults;
mod floor;
mod idle;
mod keyed;
mod latency;
mod limits;
mod link;
mod messages;
mod ours;
mod pages;
mod peers;
mod pictures;
mod placement;
mod python;
mod raw;
pub mod reach;
mod rounds;
pub(crate) mod sessions;
mod setup;
mod subject;
pub(crate) mod tables;
pub(crate) mod target;
mod transport;
pub(crate) mod usage;
pub(crate) mod verify;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use indicatif::ProgressBar;
use kvferry::{Access, Agent, AgentBuilder, Batch, Options, Peer, Region, RemoteRegion};

use crate::failure::Failure;
use crate::options::{Checksums, Op, Part, Placement, Size, TransferBench};
use crate::report::{Report, Row, Session};
use crate::{machine, units};

use floor::{BUFFERS, Floor, STREAMS_MAX};
use limits::{FloorProgram, Memcpy, ProcessVm, Raw};
use link::Link;
use messages::Sizes;
use ours::Ours;
use pages::Pages;
use python::Python;
use subject::Subject;
use tables::{Load, Table};
use transport::Transport;

pub use pictures::drawings;
pub use target::serve;

/// The form of the report's JSON.
pub const SCHEMA: &str = "kvferry.bench/2";

/// Enough for parts that move one small block.
const SMALL: Sizes = Sizes { arena: 1 << 20, shared: 0, floor: 1 << 20, floor_streams: 1 };

/// Seed of the block tables: they are the same in every run.
const SEED: u64 = 20_240_817;

/// Measures what `options` ask for; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Usage`] for options that this host or the target can't fulfil, before anything is
/// measured; [`Failure::Check`] for a wrong byte; otherwise what a transfer or a process failed with.
pub fn measure(options: &TransferBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let settings = Settings::new(options)?;
    let measured = measure_all(&settings, bar)?;
    let Measured { sessions, rows, skipped } = measured;
    let mut report = Report::new(SCHEMA, options.quick, Vec::new(), rows);
    report.hosts = Some(if options.target.is_some() { 2 } else { 1 });
    report.rounds = Some(settings.rounds);
    (report.sessions, report.skipped) = (sessions, skipped);
    Ok(report)
}

/// Results of the measurements so far.
#[derive(Debug, Default)]
pub(super) struct Measured {
    sessions: Vec<Session>,
    rows: Vec<Row>,
    /// Measurements that are not possible here, with the reason.
    skipped: Vec<String>,
}

fn measure_all(settings: &Settings, bar: &ProgressBar) -> Result<Measured, Failure> {
    let mut measured = Measured::default();
    if let Some(python) = &settings.options.peers {
        peers::check(python)?;
    }
    for &transport in &settings.transports {
        bar.set_message(format!("starting the target for {}", transport.name()));
        if let Some(why) = over(settings, transport, bar, &mut measured)? {
            // By default, what can't be measured is skipped.
            if !settings.options.transports.is_empty() {
                return Err(Failure::Usage(format!("--transport {}: {why}", transport.name())));
            }
            measured.skipped.push(format!("{}: {why}", transport.name()));
        }
    }
    if measured.rows.is_empty() {
        return Err(Failure::Usage(format!(
            "nothing was measured: {}",
            measured.skipped.join("; ")
        )));
    }
    Ok(measured)
}

/// Measures all parts over one transport, or says why it is not available.
fn over(
    settings: &Settings,
    transport: Transport,
    bar: &ProgressBar,
    measured: &mut Measured,
) -> Result<Option<String>, Failure> {
    if !transport.is_known() {
        return Ok(Some("this build of kvferry has no such transport".into()));
    }
    let mut bench = Bench::open(settings, transport, bar.clone())?;
    if !transport.is(&bench.link.session.transport) {
        let chosen = &bench.link.session.transport;
        return Ok(Some(format!("the two agents chose {chosen}; `kvferry doctor` says why")));
    }
    let mut subjects = Subjects::of(&mut bench)?;
    let mut rows = Vec::new();
    for &part in &settings.parts {
        rows.extend(match part {
            Part::Throughput => rounds::run(&mut bench, &mut subjects)?,
            // It is measured in the rounds of throughput.
            Part::Python if settings.parts.contains(&Part::Throughput) => Vec::new(),
            Part::Python => rounds::run(&mut bench, &mut subjects)?,
            Part::Callers => callers::run(&mut bench, &mut subjects)?,
            Part::Churn => churn::run(&mut bench)?,
            Part::Latency => latency::run(&mut bench, &mut subjects)?,
            Part::Setup => setup::run(&mut bench)?,
            Part::Idle => idle::run(&mut bench)?,
            Part::Sessions => sessions::run(&mut bench)?,
            Part::Faults => faults::run(&mut bench)?,
        });
    }
    if let Some(python) = &mut subjects.python {
        rows.push(python::overhead(&mut bench, python)?);
    }
    rows.iter_mut().for_each(|row| row.transport = Some(bench.link.session.transport.clone()));
    measured.rows.extend(rows);
    measured.sessions.push(bench.link.session.clone());
    let named = |why| format!("{}: {why}", transport.name());
    measured.skipped.extend(bench.skipped.into_iter().map(named));
    Ok(None)
}

/// Subjects that are measured in turn over a transport.
pub(super) struct Subjects {
    kvferry: Ours,
    /// Other ways to use kvferry.
    others: Vec<Ours>,
    python: Option<Python>,
    floor: Option<FloorProgram>,
    process_vm: Option<ProcessVm>,
    /// Limits that are shown and decide nothing.
    limits: Vec<Box<dyn Subject>>,
    engines: Vec<peers::PeerEngine>,
}

impl Subjects {
    fn of(bench: &mut Bench<'_>) -> Result<Subjects, Failure> {
        let settings = bench.settings;
        let local = bench.link.session.is_local();
        let needs = |parts: &[Part]| settings.parts.iter().any(|part| parts.contains(part));
        let mut subjects = Subjects {
            kvferry: Ours::registered(bench),
            others: Vec::new(),
            python: None,
            floor: (!local).then(FloorProgram::default),
            process_vm: None,
            limits: Vec::new(),
            engines: Vec::new(),
        };
        if local {
            match ProcessVm::new(bench) {
                Ok(process_vm) => subjects.process_vm = Some(process_vm),
                Err(why) => bench.skipped.push(format!("process_vm by itself: {why}")),
            }
        }
        if needs(&[Part::Throughput]) {
            if local {
                subjects.others.extend(Ours::shared(bench)?);
                subjects.limits.push(Box::new(Memcpy::new(bench)));
            } else {
                if settings.options.checksums == Checksums::Both {
                    subjects.others.push(Ours::checked(bench)?);
                }
                subjects.limits.push(Box::new(Raw::one(bench)?));
                subjects.limits.push(Box::new(Raw::four(bench)?));
            }
        }
        if needs(&[Part::Python]) {
            let asked = settings.options.python.as_deref();
            match python::find(asked) {
                Ok(python) => subjects.python = Some(Python::start(bench, &python)?),
                Err(why) if asked.is_some() => return Err(Failure::Usage(why)),
                Err(why) => bench.skipped.push(format!("calls from Python: {why}")),
            }
        }
        if let Some(python) = &settings.options.peers {
            let transport = &bench.link.session.transport;
            subjects.engines = peers::beside(transport, python, bench.arena.len());
        }
        Ok(subjects)
    }

    /// Returns all subjects. Those that a verdict compares are neighbours.
    fn all(&mut self) -> Vec<&mut dyn Subject> {
        let mut all: Vec<&mut dyn Subject> = vec![&mut self.kvferry];
        all.extend(self.floor.iter_mut().map(|floor| floor as &mut dyn Subject));
        all.extend(self.process_vm.iter_mut().map(|limit| limit as &mut dyn Subject));
        all.extend(self.python.iter_mut().map(|python| python as &mut dyn Subject));
        all.extend(self.others.iter_mut().map(|ours| ours as &mut dyn Subject));
        all.extend(self.engines.iter_mut().map(|engine| engine as &mut dyn Subject));
        for limit in &mut self.limits {
            all.push(limit.as_mut());
        }
        all
    }
}

/// The options with their defaults filled in.
#[derive(Debug, Clone)]
struct Settings {
    options: TransferBench,
    transports: Vec<Transport>,
    /// The work of throughput.
    loads: Vec<(Op, Arc<Load>)>,
    parts: Vec<Part>,
    placements: Vec<Placement>,
    rounds: usize,
    /// Bytes that a subject moves in one turn of a round, rounded to whole calls.
    turn_bytes: usize,
    /// Bytes that the raw stream sends in its turn.
    raw_bytes: usize,
    /// Calls in a latency round.
    latency_calls: usize,
    idle_for: Duration,
}

impl Settings {
    fn new(options: &TransferBench) -> Result<Settings, Failure> {
        let quick = options.quick;
        let rounds = match (options.rounds, quick, options.peers.is_some()) {
            (Some(rounds), _, _) => rounds,
            (None, true, _) => 3,
            (None, false, true) => 7,
            (None, false, false) => 11,
        };
        let settings = Settings {
            transports: transports(options)?,
            loads: loads(options)?,
            parts: parts(options),
            placements: placements(options, placement::usable_cores())?,
            rounds,
            turn_bytes: if quick { 32 << 20 } else { 256 << 20 },
            raw_bytes: if quick { 64 << 20 } else { raw::STREAM_BYTES },
            latency_calls: if quick { 2_000 } else { 20_000 },
            idle_for: Duration::from_secs(if quick { 1 } else { 5 }),
            options: options.clone(),
        };
        settings.must_fit(machine::available_memory())?;
        Ok(settings)
    }

    /// Refuses sizes that don't fit: every program has memory on both sides, and both may be this host.
    fn must_fit(&self, available: u64) -> Result<(), Failure> {
        let sides = if self.options.target.is_none() { 2 } else { 1 };
        // Memory of Python, and of each other engine.
        let engines = if self.options.peers.is_some() { 5 } else { 1 };
        let engines = engines * self.sizes().arena;
        let needed = sides * (self.sizes().total() + engines) as u64;
        if needed > available / 10 * 8 {
            let (needed, available) = (units::bytes(needed), units::bytes(available));
            return Err(Failure::Usage(format!(
                "these sizes need {needed} of memory and {available} are free: choose smaller --sizes"
            )));
        }
        Ok(())
    }

    /// An agent's memory on either side holds the largest batch, and all callers' batches together.
    fn sizes(&self) -> Sizes {
        let largest = self.loads.iter().map(|(_, load)| load.span()).max().unwrap_or(0);
        let callers = self.options.callers.iter().map(|&callers| callers::bytes(callers)).max();
        let arena = largest.max(callers.unwrap_or(0)).max(callers::PAIR_BYTES);
        let arena = arena.next_multiple_of(1 << 20);
        let one_host = self.options.target.is_none();
        let shared = if one_host { arena } else { 0 };
        Sizes { arena, shared, floor: arena.max(self.raw_bytes), floor_streams: STREAMS_MAX }
    }
}

fn transports(options: &TransferBench) -> Result<Vec<Transport>, Failure> {
    match (options.transports.is_empty(), options.target.is_some()) {
        (false, _) => options.transports.iter().map(|name| Transport::parse(name)).collect(),
        (true, true) => Ok(vec![Transport::Auto]),
        (true, false) => Ok(vec![Transport::Tcp, Transport::Local]),
    }
}

/// The work of each direction, in the order in which it is measured.
fn loads(options: &TransferBench) -> Result<Vec<(Op, Arc<Load>)>, Failure> {
    let given = options.model.is_some() || options.trace.is_some();
    let sizes = match (options.sizes.is_empty(), given, options.quick) {
        (false, _, _) => options.sizes.clone(),
        (true, true, _) => Vec::new(),
        (true, false, true) => sizes(&[(4, 1024), (256, 64)]),
        (true, false, false) => {
            sizes(&[(4, 1024), (32, 1024), (256, 256), (1024, 256), (16384, 16)])
        }
    };
    let mut loads = Vec::new();
    for &op in &options.ops {
        loads.extend(sizes.iter().map(|&size| (op, Arc::new(Load::of_size(size)))));
        let model = options.shape().map(|shape| Load::of_model(&shape, SEED));
        loads.extend(model.map(|load| (op, Arc::new(load))));
        if let Some(trace) = &options.trace {
            loads.push((op, Arc::new(Load::of_trace(trace, op)?)));
        }
    }
    Ok(loads)
}

fn sizes(kib: &[(usize, usize)]) -> Vec<Size> {
    kib.iter().map(|&(kib, count)| Size { block: kib << 10, count }).collect()
}

fn parts(options: &TransferBench) -> Vec<Part> {
    let mut parts = options.parts.clone();
    if parts.is_empty() {
        parts = vec![
            Part::Throughput,
            Part::Python,
            Part::Callers,
            Part::Churn,
            Part::Latency,
            Part::Setup,
            Part::Idle,
            Part::Sessions,
        ];
    }
    if options.faults && !parts.contains(&Part::Faults) {
        parts.push(Part::Faults);
    }
    parts
}

/// Cores can be chosen within one host only, and two processes apart need two cores.
fn placements(options: &TransferBench, cores: usize) -> Result<Vec<Placement>, Failure> {
    let free_only = options.placements.iter().all(|&placement| placement == Placement::Free);
    match (options.placements.is_empty(), options.target.is_some()) {
        (true, true) => Ok(vec![Placement::Free]),
        (true, false) if cores == 1 => Ok(vec![Placement::Together]),
        (true, false) => Ok(vec![Placement::Apart, Placement::Together]),
        (false, true) if !free_only => Err(Failure::Usage(
            "--placement needs two processes of one host; leave out --target".into(),
        )),
        (false, _) => Ok(options.placements.clone()),
    }
}

/// An agent and plain programs, connected to their target.
pub(super) struct Bench<'a> {
    settings: &'a Settings,
    transport: Transport,
    bar: ProgressBar,
    arena: Region,
    peer: Peer,
    floor_memory: Pages,
    /// Floor connections, one per entry of [`BUFFERS`].
    floors: Vec<Floor>,
    link: Link,
    agent: Agent,
    /// Measurements that were not possible, with the reason.
    skipped: Vec<String>,
}

impl<'a> Bench<'a> {
    /// Opens a bench with memory for every part.
    fn open(
        settings: &'a Settings,
        transport: Transport,
        bar: ProgressBar,
    ) -> Result<Bench<'a>, Failure> {
        let mut sizes = settings.sizes();
        match transport {
            Transport::Local => sizes.floor_streams = 1,
            _ => sizes.shared = 0,
        }
        let agent = start_agent(settings, transport)?;
        let link = match &settings.options.target {
            Some(target) => Link::connect(&agent, target, sizes)?,
            None => Link::spawn(&agent, sizes)?,
        };
        Bench::with(link, agent, settings, transport, bar, sizes.floor_streams)
    }

    /// Opens a bench with little memory, and with the target's process on one core.
    fn open_on(core: usize, other: &Bench<'a>) -> Result<Bench<'a>, Failure> {
        let (settings, transport) = (other.settings, other.transport);
        let agent = start_agent(settings, transport)?;
        let link = Link::spawn_on(core, &agent, SMALL)?;
        Bench::with(link, agent, settings, transport, other.bar.clone(), SMALL.floor_streams)
    }

    fn with(
        link: Link,
        agent: Agent,
        settings: &'a Settings,
        transport: Transport,
        bar: ProgressBar,
        floor_streams: usize,
    ) -> Result<Bench<'a>, Failure> {
        let bytes = link.region().len as usize;
        let arena = verify::touched(agent.allocate_private(bytes, Access::NONE)?)?;
        Ok(Bench {
            settings,
            transport,
            bar,
            arena,
            peer: link.peer.clone(),
            floor_memory: Pages::filled(1, bytes.max(settings.raw_bytes)),
            floors: BUFFERS
                .iter()
                .map(|&buffer| link.floor(buffer, floor_streams))
                .collect::<Result<_, _>>()?,
            link,
            agent,
            skipped: Vec::new(),
        })
    }

    /// Builds a batch between this arena and the target's.
    fn batch(&self, op: Op, table: &Table) -> Result<Batch, Failure> {
        batch_between(&self.arena, self.link.region(), op, table)
    }

    /// Shows the next step.
    fn step(&self, what: &str) {
        self.bar.set_message(format!("{}: {what}", self.link.session.transport));
        self.bar.inc(1);
    }
}

fn batch_between(
    ours: &Region,
    theirs: &RemoteRegion,
    op: Op,
    table: &Table,
) -> Result<Batch, Failure> {
    let mut batch = Batch::with_capacity(table.pairs.len());
    for pair in &table.pairs {
        let (source, destination) = (pair.source as u64, pair.destination as u64);
        let (here, there) = match op {
            Op::Write => (source, destination),
            Op::Read => (destination, source),
        };
        batch.push(ours, here, theirs, there, pair.len as u64)?;
    }
    Ok(batch)
}

/// The agent that measures. On one host it listens on the loopback interface.
fn start_agent(settings: &Settings, transport: Transport) -> Result<Agent, Failure> {
    Ok(agent_builder(settings, transport)?.start()?)
}

fn agent_builder(settings: &Settings, transport: Transport) -> Result<AgentBuilder, Failure> {
    let builder = transport.allow(Agent::builder().name("bench"))?;
    let builder = match settings.options.checksums {
        Checksums::On => builder.checksum(kvferry::Checksum::On),
        Checksums::Off | Checksums::Both => builder.checksum(kvferry::Checksum::Off),
    };
    Ok(match settings.options.target {
        None => builder.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
        Some(_) => builder,
    })
}

/// Moves a batch, and fails unless all of it was moved.
fn transfer(peer: &Peer, op: Op, batch: &Batch, options: &Options<'_>) -> Result<(), Failure> {
    let moved = match op {
        Op::Write => peer.write(batch, options)?,
        Op::Read => peer.read(batch, options)?,
    };
    if moved.bytes != batch.bytes() {
        let (moved, meant) = (moved.bytes, batch.bytes());
        return Err(Failure::Check(format!("{moved} bytes were moved, expected {meant}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Model;
    use crate::options::Streams;

    #[derive(clap::Parser)]
    struct Line {
        #[command(flatten)]
        options: TransferBench,
    }

    fn asked(change: impl FnOnce(&mut TransferBench)) -> TransferBench {
        let Line { mut options } = clap::Parser::parse_from(["bench"]);
        change(&mut options);
        options
    }

    fn settings(change: impl FnOnce(&mut TransferBench)) -> Result<Settings, Failure> {
        Settings::new(&asked(change))
    }

    #[test]
    fn lists_are_separated_by_commas() {
        let line = "bench --sizes 4KiB:1024,1MiB:256 --streams auto,4 --callers 1,10 --op read";
        let Line { options } = clap::Parser::parse_from(line.split(' '));
        assert_eq!(options.sizes[1], Size { block: 1 << 20, count: 256 });
        assert_eq!(options.streams, [Streams(None), Streams(Some(4))]);
        assert_eq!((options.callers, options.ops), (vec![1, 10], vec![Op::Read]));
    }

    #[test]
    fn the_default_sizes_are_those_that_have_bounds() {
        let settings = settings(|_| {}).expect("fits");
        let total: Vec<usize> = settings.loads.iter().map(|(_, load)| load.bytes() >> 20).collect();
        assert_eq!(total, [4, 32, 64, 256, 256, 4, 32, 64, 256, 256], "writes, then reads");
        assert!(settings.rounds >= 7);
        assert!(!settings.parts.contains(&Part::Faults));
        assert_eq!(settings.sizes().arena, 256 << 20);
        assert_eq!(settings.transports, [Transport::Tcp, Transport::Local]);
    }

    #[test]
    fn the_arena_holds_all_callers_and_a_raw_stream_fits_into_the_floors() {
        let settings = settings(|options| {
            options.sizes = vec![Size { block: 4096, count: 1 }];
        })
        .expect("fits");
        assert!(settings.sizes().arena >= callers::bytes(10));
        assert_eq!(settings.sizes().floor, raw::STREAM_BYTES.max(settings.sizes().arena));
    }

    #[test]
    fn sizes_beyond_the_memory_are_refused_before_anything_starts() {
        assert!(matches!(
            settings(|options| options.sizes = vec![Size { block: 1 << 30, count: 64 }]),
            Err(Failure::Usage(_))
        ));
    }

    #[test]
    fn a_model_replaces_the_sizes_and_a_missing_trace_is_named() {
        let settings = self::settings(|options| {
            options.model = Some(Model::find("opt-125m").expect("listed"));
            (options.tokens, options.requests, options.ops) = (160, 2, vec![Op::Read]);
        });
        let settings = settings.expect("fits");
        let [(Op::Read, load)] = settings.loads.as_slice() else { panic!("one load") };
        assert_eq!(load.batches.len(), 2);
        assert_eq!(load.name, "2 × 160 tokens of opt-125m (48 KiB × 120)");
        let trace =
            |options: &mut TransferBench| options.trace = Some("/nowhere/blocks.jsonl".into());
        let refused = self::settings(trace).expect_err("no file");
        assert!(refused.to_string().contains("/nowhere/blocks.jsonl"), "{refused}");
    }

    #[test]
    fn default_placements_follow_the_number_of_cores() {
        let choose = |target: Option<&str>, cores| {
            placements(&asked(|options| options.target = target.map(str::to_owned)), cores)
        };
        assert_eq!(choose(None, 2).expect("fits"), [Placement::Apart, Placement::Together]);
        assert_eq!(choose(None, 1).expect("fits"), [Placement::Together]);
        assert_eq!(choose(Some("a:1"), 2).expect("fits"), [Placement::Free]);
        let both = asked(|options| {
            (options.target, options.placements) = (Some("a:1".into()), vec![Placement::Apart]);
        });
        assert!(placements(&both, 2).is_err());
    }

    #[test]
    fn faults_are_added_once() {
        let settings = settings(|options| {
            (options.faults, options.parts) = (true, vec![Part::Faults, Part::Idle]);
        });
        let settings = settings.expect("fits");
        assert_eq!(settings.parts, [Part::Faults, Part::Idle]);
    }
}
