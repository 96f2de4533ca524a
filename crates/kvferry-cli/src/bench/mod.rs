//! `kvferry bench`: what the agent reaches, beside what plain programs and other engines reach in the
//! same rounds.
//!
//! The measuring side is here; the target (`target.rs`) is a second process of this host or a
//! `bench --serve` on another. Each part is one file and yields rows of the report: `rounds.rs`
//! (throughput and its cost), `callers.rs`, `churn.rs`, `latency.rs`, `setup.rs`, `idle.rs`,
//! `faults.rs`. Who takes turns is a [`contender`]: kvferry (`ours.rs`, `python.rs`), the machine's
//! limits (`plain.rs`, with the programs `floor.rs`, `raw.rs`, `limits.rs`), other engines
//! (`peers.rs`). What is moved is a table (`tables.rs`); `verify.rs` proves the bytes outside the
//! timed parts. `plot/` draws.

mod callers;
mod churn;
mod contender;
mod faults;
mod floor;
mod idle;
mod latency;
mod limits;
mod link;
mod messages;
mod ours;
pub(crate) mod pages;
mod peers;
mod placement;
mod plain;
pub(crate) mod plot;
mod python;
pub(crate) mod raw;
pub(crate) mod reach;
pub(crate) mod report;
mod rounds;
mod setup;
mod syscalls;
pub(crate) mod tables;
pub(crate) mod target;
mod transport;
pub(crate) mod usage;
pub(crate) mod verify;
pub(crate) mod yardstick;

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use indicatif::ProgressBar;
use kvferry::{Access, Agent, AgentBuilder, Batch, Options, Peer, Region, RemoteRegion};

use crate::cli::{BenchArgs, Checksums, Op, Part, Placement, Size};
use crate::failure::Failure;
use crate::{files, machine, output, units};

use contender::Contender;
use floor::{BUFFERS, Floor};
use link::Link;
use messages::Sizes;
use ours::Ours;
use pages::Pages;
use plain::{FloorProgram, Memcpy, ProcessVm, Raw};
use python::Python;
use report::{Report, Row, Session};
use tables::{Load, Table};
use transport::Transport;

/// Enough for parts that move one small block.
const SMALL: Sizes = Sizes { arena: 1 << 20, shared: 0, floor: 1 << 20 };

/// Block tables that look random are the same in every run.
const SEED: u64 = 20_240_817;

pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if args.serve {
        return target::run_server(args.listen);
    }
    let report = match &args.from {
        Some(file) => Report::read(file)?,
        None => {
            let settings = Settings::new(args)?;
            args.output.as_deref().map_or(Ok(()), files::check)?;
            args.plot.as_deref().map_or(Ok(()), plot::check)?;
            let bar = output::step_bar(args.quiet, 0);
            let measured = measure(&settings, &bar);
            bar.finish_and_clear();
            Report::new(&settings, measured?)
        }
    };
    // Where one of them can't be written, the others are.
    let printed =
        if args.json { output::print_json(&report) } else { output::print(&report.to_table()) };
    let kept = match &args.output {
        Some(file) => files::write(file, output::json(&report)?),
        None => Ok(()),
    };
    let drawn = args.plot.as_deref().map_or(Ok(()), |folder| plot::write(folder, &report));
    printed.map_err(Failure::from).and(kept).and(drawn)?;
    match report.shortfall() {
        Some(shortfall) if args.check => Err(Failure::Check(shortfall)),
        _ => Ok(()),
    }
}

/// What came out.
#[derive(Debug, Default)]
pub(super) struct Measured {
    sessions: Vec<Session>,
    rows: Vec<Row>,
    /// What could not be measured here, and why.
    skipped: Vec<String>,
}

fn measure(settings: &Settings, bar: &ProgressBar) -> Result<Measured, Failure> {
    let mut measured = Measured::default();
    if let Some(python) = &settings.args.peers {
        peers::check(python)?;
    }
    for &transport in &settings.transports {
        bar.set_message(format!("starting the target for {}", transport.name()));
        if let Some(why) = over(settings, transport, bar, &mut measured)? {
            // Whoever asked for nothing in particular gets what there is.
            if !settings.args.transport.is_empty() {
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

/// All parts over one transport, or why it can't be had.
fn over(
    settings: &Settings,
    transport: Transport,
    bar: &ProgressBar,
    measured: &mut Measured,
) -> Result<Option<String>, Failure> {
    if !transport.is_known() {
        return Ok(Some("this version of kvferry has no such transport".into()));
    }
    let mut bench = Bench::open(settings, transport, bar.clone())?;
    if !transport.is(&bench.link.session.transport) {
        let chosen = &bench.link.session.transport;
        return Ok(Some(format!("the two agents chose {chosen}; `kvferry doctor` says why")));
    }
    let mut contenders = Contenders::of(&mut bench)?;
    let mut rows = Vec::new();
    for &part in &settings.parts {
        rows.extend(match part {
            Part::Throughput => rounds::run(&mut bench, &mut contenders)?,
            // Its figures are taken in the rounds of throughput.
            Part::Python if settings.parts.contains(&Part::Throughput) => Vec::new(),
            Part::Python => rounds::run(&mut bench, &mut contenders)?,
            Part::Callers => callers::run(&mut bench, &mut contenders)?,
            Part::Churn => churn::run(&mut bench)?,
            Part::Latency => latency::run(&mut bench, &mut contenders)?,
            Part::Setup => setup::run(&mut bench)?,
            Part::Idle => idle::run(&mut bench)?,
            Part::Faults => faults::run(&mut bench)?,
        });
    }
    if let Some(python) = &mut contenders.python {
        rows.push(python::overhead(&mut bench, python)?);
    }
    rows.iter_mut().for_each(|row| row.transport = bench.link.session.transport.clone());
    measured.rows.extend(rows);
    measured.sessions.push(bench.link.session.clone());
    let named = |why| format!("{}: {why}", transport.name());
    measured.skipped.extend(bench.skipped.into_iter().map(named));
    Ok(None)
}

/// Who takes turns over a transport.
pub(super) struct Contenders {
    kvferry: Ours,
    /// The other ways to use it.
    others: Vec<Ours>,
    python: Option<Python>,
    floor: Option<FloorProgram>,
    process_vm: Option<ProcessVm>,
    /// Limits that are shown and not judged by.
    limits: Vec<Box<dyn Contender>>,
    guests: Vec<peers::Guest>,
}

impl Contenders {
    fn of(bench: &mut Bench<'_>) -> Result<Contenders, Failure> {
        let settings = bench.settings;
        let local = bench.link.session.is_local();
        let needs = |parts: &[Part]| settings.parts.iter().any(|part| parts.contains(part));
        let mut contenders = Contenders {
            kvferry: Ours::registered(bench),
            others: Vec::new(),
            python: None,
            floor: (!local).then(FloorProgram::default),
            process_vm: None,
            limits: Vec::new(),
            guests: Vec::new(),
        };
        if local {
            match ProcessVm::new(bench) {
                Ok(process_vm) => contenders.process_vm = Some(process_vm),
                Err(why) => bench.skipped.push(format!("process_vm by itself: {why}")),
            }
        }
        if needs(&[Part::Throughput]) {
            if local {
                contenders.others.extend(Ours::shared(bench)?);
                contenders.limits.push(Box::new(Memcpy::new(bench)));
            } else {
                if settings.args.checksums == Checksums::Both {
                    contenders.others.push(Ours::checked(bench)?);
                }
                contenders.limits.push(Box::new(Raw::one(bench)?));
                contenders.limits.push(Box::new(Raw::four(bench)?));
            }
        }
        if needs(&[Part::Python]) {
            let asked = settings.args.python.as_deref();
            match python::find(asked) {
                Ok(python) => contenders.python = Some(Python::start(bench, &python)?),
                Err(why) if asked.is_some() => return Err(Failure::Usage(why)),
                Err(why) => bench.skipped.push(format!("calls from Python: {why}")),
            }
        }
        if let Some(python) = &settings.args.peers {
            let transport = &bench.link.session.transport;
            contenders.guests = peers::beside(transport, python, bench.arena.len());
        }
        Ok(contenders)
    }

    /// All of them; those that a verdict compares are neighbours.
    fn all(&mut self) -> Vec<&mut dyn Contender> {
        let mut all: Vec<&mut dyn Contender> = vec![&mut self.kvferry];
        all.extend(self.floor.iter_mut().map(|floor| floor as &mut dyn Contender));
        all.extend(self.process_vm.iter_mut().map(|limit| limit as &mut dyn Contender));
        all.extend(self.python.iter_mut().map(|python| python as &mut dyn Contender));
        all.extend(self.others.iter_mut().map(|ours| ours as &mut dyn Contender));
        all.extend(self.guests.iter_mut().map(|guest| guest as &mut dyn Contender));
        for limit in &mut self.limits {
            all.push(limit.as_mut());
        }
        all
    }
}

/// The command line with its defaults filled in.
#[derive(Debug, Clone)]
struct Settings {
    args: BenchArgs,
    transports: Vec<Transport>,
    /// What throughput moves.
    loads: Vec<(Op, Arc<Load>)>,
    parts: Vec<Part>,
    placements: Vec<Placement>,
    rounds: usize,
    /// What a program moves in one turn of a round, as near as whole calls come to it.
    turn_bytes: usize,
    /// What the raw stream sends in its turn.
    raw_bytes: usize,
    /// Calls in a latency round.
    latency_calls: usize,
    idle_for: Duration,
}

impl Settings {
    fn new(args: &BenchArgs) -> Result<Settings, Failure> {
        let quick = args.quick;
        let rounds = match (args.rounds, quick, args.peers.is_some()) {
            (Some(rounds), _, _) => rounds as usize,
            (None, true, _) => 3,
            (None, false, true) => 7,
            (None, false, false) => 11,
        };
        let settings = Settings {
            transports: transports(args)?,
            loads: loads(args)?,
            parts: parts(args),
            placements: placements(args, placement::usable_cores())?,
            rounds,
            turn_bytes: if quick { 32 << 20 } else { 256 << 20 },
            raw_bytes: if quick { 64 << 20 } else { raw::STREAM_BYTES },
            latency_calls: if quick { 2_000 } else { 20_000 },
            idle_for: Duration::from_secs(if quick { 1 } else { 5 }),
            args: args.clone(),
        };
        settings.must_fit(machine::available_memory())?;
        Ok(settings)
    }

    /// All programs have memory on both sides, and both sides may be this host.
    fn must_fit(&self, available: u64) -> Result<(), Failure> {
        let sides = if self.args.target.is_none() { 2 } else { 1 };
        // Python's, and each other engine's.
        let guests = if self.args.peers.is_some() { 5 } else { 1 };
        let guests = guests * self.sizes().arena;
        let needed = sides * (self.sizes().total() + guests) as u64;
        if needed > available / 10 * 8 {
            let (needed, available) = (units::bytes(needed), units::bytes(available));
            return Err(Failure::Usage(format!(
                "these sizes take {needed} of memory and {available} are free"
            )));
        }
        Ok(())
    }

    /// The agent's memory on either side is the largest batch, or all callers' together.
    fn sizes(&self) -> Sizes {
        let largest = self.loads.iter().map(|(_, load)| load.span()).max().unwrap_or(0);
        let callers = self.args.callers.iter().map(|callers| callers::bytes(callers.0)).max();
        let arena = largest.max(callers.unwrap_or(0)).max(callers::PAIR_BYTES);
        let arena = arena.next_multiple_of(1 << 20);
        let one_host = self.args.target.is_none();
        let shared = if one_host { arena } else { 0 };
        Sizes { arena, shared, floor: arena.max(self.raw_bytes) }
    }
}

fn transports(args: &BenchArgs) -> Result<Vec<Transport>, Failure> {
    match (args.transport.is_empty(), args.target.is_some()) {
        (false, _) => args.transport.iter().map(|name| Transport::parse(name)).collect(),
        (true, true) => Ok(vec![Transport::Auto]),
        (true, false) => Ok(vec![Transport::Tcp, Transport::Local]),
    }
}

/// One after the other, each in both directions if both are asked for.
fn loads(args: &BenchArgs) -> Result<Vec<(Op, Arc<Load>)>, Failure> {
    let given = args.model.is_some() || args.trace.is_some();
    let sizes = match (args.sizes.is_empty(), given, args.quick) {
        (false, _, _) => args.sizes.clone(),
        (true, true, _) => Vec::new(),
        (true, false, true) => sizes(&[(4, 1024), (256, 64)]),
        (true, false, false) => {
            sizes(&[(4, 1024), (32, 1024), (256, 256), (1024, 256), (16384, 16)])
        }
    };
    let mut loads = Vec::new();
    for &op in &args.op {
        loads.extend(sizes.iter().map(|&size| (op, Arc::new(Load::of_size(size)))));
        let model = args.shape().map(|shape| Load::of_model(&shape, SEED));
        loads.extend(model.map(|load| (op, Arc::new(load))));
        if let Some(trace) = &args.trace {
            loads.push((op, Arc::new(Load::of_trace(trace, op)?)));
        }
    }
    Ok(loads)
}

fn sizes(kib: &[(usize, usize)]) -> Vec<Size> {
    kib.iter().map(|&(kib, count)| Size { block: kib << 10, count }).collect()
}

fn parts(args: &BenchArgs) -> Vec<Part> {
    let mut parts = args.only.clone();
    if parts.is_empty() {
        parts = vec![
            Part::Throughput,
            Part::Python,
            Part::Callers,
            Part::Churn,
            Part::Latency,
            Part::Setup,
            Part::Idle,
        ];
    }
    if args.faults && !parts.contains(&Part::Faults) {
        parts.push(Part::Faults);
    }
    parts
}

/// Another host's cores are its own business, and one core cannot be two.
fn placements(args: &BenchArgs, cores: usize) -> Result<Vec<Placement>, Failure> {
    let free_only = args.placement.iter().all(|&placement| placement == Placement::Free);
    match (args.placement.is_empty(), args.target.is_some()) {
        (true, true) => Ok(vec![Placement::Free]),
        (true, false) if cores == 1 => Ok(vec![Placement::Together]),
        (true, false) => Ok(vec![Placement::Apart, Placement::Together]),
        (false, true) if !free_only => {
            Err(Failure::Usage("--placement is about two processes of one host".into()))
        }
        (false, _) => Ok(args.placement.clone()),
    }
}

/// An agent and plain programs, connected to their other halves.
pub(super) struct Bench<'a> {
    settings: &'a Settings,
    transport: Transport,
    bar: ProgressBar,
    arena: Region,
    peer: Peer,
    floor_memory: Pages,
    /// One per entry of [`BUFFERS`].
    floors: Vec<Floor>,
    link: Link,
    agent: Agent,
    /// What could not be measured, and why.
    skipped: Vec<String>,
}

impl<'a> Bench<'a> {
    /// With memory for every part.
    fn open(
        settings: &'a Settings,
        transport: Transport,
        bar: ProgressBar,
    ) -> Result<Bench<'a>, Failure> {
        let mut sizes = settings.sizes();
        if transport != Transport::Local {
            sizes.shared = 0;
        }
        let agent = start_agent(settings, transport)?;
        let link = match &settings.args.target {
            Some(target) => Link::connect(&agent, target, sizes)?,
            None => Link::spawn(&agent, sizes)?,
        };
        Bench::with(link, agent, settings, transport, bar)
    }

    /// With little memory, and the target's process on one core.
    fn open_on(core: usize, other: &Bench<'a>) -> Result<Bench<'a>, Failure> {
        let (settings, transport) = (other.settings, other.transport);
        let agent = start_agent(settings, transport)?;
        let link = Link::spawn_on(core, &agent, SMALL)?;
        Bench::with(link, agent, settings, transport, other.bar.clone())
    }

    fn with(
        link: Link,
        agent: Agent,
        settings: &'a Settings,
        transport: Transport,
        bar: ProgressBar,
    ) -> Result<Bench<'a>, Failure> {
        let bytes = link.region().len as usize;
        let mut arena = agent.allocate_private(bytes, Access::NONE)?;
        verify::poison(&mut arena, bytes)?;
        Ok(Bench {
            settings,
            transport,
            bar,
            arena,
            peer: link.peer.clone(),
            floor_memory: Pages::filled(1, bytes.max(settings.raw_bytes)),
            floors: BUFFERS.iter().map(|&buffer| link.floor(buffer)).collect::<Result<_, _>>()?,
            link,
            agent,
            skipped: Vec::new(),
        })
    }

    /// Between this arena and the target's.
    fn batch(&self, op: Op, table: &Table) -> Result<Batch, Failure> {
        batch_between(&self.arena, self.link.region(), op, table)
    }

    /// Says what happens now, one step further.
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

/// The agent that measures. On one host it stays on the loopback interface.
fn start_agent(settings: &Settings, transport: Transport) -> Result<Agent, Failure> {
    Ok(agent_builder(settings, transport)?.start()?)
}

fn agent_builder(settings: &Settings, transport: Transport) -> Result<AgentBuilder, Failure> {
    let builder = transport.allow(Agent::builder().name("bench"))?;
    let builder = match settings.args.checksums {
        Checksums::On => builder.checksum(kvferry::Checksum::On),
        Checksums::Off | Checksums::Both => builder.checksum(kvferry::Checksum::Off),
    };
    Ok(match settings.args.target {
        None => builder.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
        Some(_) => builder,
    })
}

/// Moves a batch and insists that all of it moved.
fn transfer(peer: &Peer, op: Op, batch: &Batch, options: &Options<'_>) -> Result<(), Failure> {
    let moved = match op {
        Op::Write => peer.write(batch, options)?,
        Op::Read => peer.read(batch, options)?,
    };
    if moved.bytes != batch.bytes() {
        let (moved, meant) = (moved.bytes, batch.bytes());
        return Err(Failure::Check(format!("{moved} bytes were moved instead of {meant}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn settings(line: &[&str]) -> Result<Settings, Failure> {
        let cli =
            Cli::try_parse_from(["kvferry", "bench"].iter().chain(line)).expect("well formed");
        let Command::Bench(args) = cli.command else { panic!("bench was asked for") };
        Settings::new(&args)
    }

    #[test]
    fn the_default_sizes_are_those_of_the_table_to_reach() {
        let settings = settings(&[]).expect("fits");
        let total: Vec<usize> = settings.loads.iter().map(|(_, load)| load.bytes() >> 20).collect();
        assert_eq!(total, [4, 32, 64, 256, 256, 4, 32, 64, 256, 256], "writes, then reads");
        assert!(settings.rounds >= 7);
        assert!(!settings.parts.contains(&Part::Faults));
        assert_eq!(settings.sizes().arena, 256 << 20);
        assert_eq!(settings.transports, [Transport::Tcp, Transport::Local]);
    }

    #[test]
    fn the_arena_holds_all_callers_and_a_raw_stream_fits_into_the_floors() {
        let settings = settings(&["--sizes", "4KiB:1", "--callers", "10"]).expect("fits");
        assert!(settings.sizes().arena >= callers::bytes(10));
        assert_eq!(settings.sizes().floor, raw::STREAM_BYTES.max(settings.sizes().arena));
    }

    #[test]
    fn sizes_beyond_the_memory_are_refused_before_anything_starts() {
        assert!(matches!(settings(&["--sizes", "1GiB:64"]), Err(Failure::Usage(_))));
    }

    #[test]
    fn a_model_takes_the_place_of_the_sizes_and_a_missing_trace_is_named() {
        let line = ["--model", "opt-125m", "--tokens", "160", "--requests", "2", "--op", "read"];
        let settings = self::settings(&line).expect("fits");
        let [(Op::Read, load)] = settings.loads.as_slice() else { panic!("one load") };
        assert_eq!(load.batches.len(), 2);
        assert_eq!(load.name, "2 × 160 tokens of opt-125m (48 KiB × 120)");
        let refused = self::settings(&["--trace", "/nowhere/blocks.jsonl"]).expect_err("no file");
        assert!(refused.to_string().contains("/nowhere/blocks.jsonl"), "{refused}");
    }

    #[test]
    fn placements_are_chosen_by_what_there_is() {
        let choose = |line: &[&str], cores| placements(&settings(line).expect("fits").args, cores);
        assert_eq!(choose(&[], 2).expect("fits"), [Placement::Apart, Placement::Together]);
        assert_eq!(choose(&[], 1).expect("fits"), [Placement::Together]);
        assert_eq!(choose(&["--target", "a:1"], 2).expect("fits"), [Placement::Free]);
        assert!(settings(&["--target", "a:1", "--placement", "apart"]).is_err());
    }

    #[test]
    fn faults_are_added_once() {
        let settings = settings(&["--faults", "--only", "faults,idle"]).expect("fits");
        assert_eq!(settings.parts, [Part::Faults, Part::Idle]);
    }
}
