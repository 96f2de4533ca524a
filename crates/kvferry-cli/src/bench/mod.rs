//! `kvferry bench`: what the agent reaches, beside what plain TCP reaches in the same rounds.
//!
//! The measuring side is here; the target (`target.rs`) is a second process of this host or a
//! `bench --serve` on another. Each part is one file and yields rows of the report: `rounds.rs`
//! (throughput), `callers.rs`, `latency.rs`, `setup.rs`, `idle.rs`, `faults.rs`. `floor.rs` and
//! `raw.rs` are the programs kvferry is compared with, `verify.rs` proves the bytes outside the
//! timed parts.

mod callers;
mod faults;
mod floor;
mod idle;
mod latency;
mod link;
mod messages;
pub(crate) mod pages;
mod placement;
mod python;
pub(crate) mod raw;
pub(crate) mod reach;
mod report;
mod rounds;
mod setup;
pub(crate) mod target;
mod verify;

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

use indicatif::ProgressBar;
use kvferry::{Access, Agent, AgentBuilder, Batch, Options, Peer, Region};

use crate::cli::{BenchArgs, Op, Part, Placement, Size};
use crate::failure::Failure;
use crate::{machine, output, units};

use floor::{BUFFERS, Floor};
use link::Link;
use pages::Pages;
use report::{Report, Row, Session};
use verify::Blocks;

/// Enough for parts that move one small block.
const SMALL: usize = 1 << 20;

pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    if args.serve {
        return target::run_server(args.listen);
    }
    let settings = Settings::new(args)?;
    let bar = output::step_bar(args.quiet, 0);
    let measured = measure(&settings, &bar);
    bar.finish_and_clear();
    let (session, rows, skipped) = measured?;
    let report = Report::new(&settings, session, rows, skipped);
    if args.json {
        output::print_json(&report)?;
    } else {
        output::print(&report.to_table())?;
    }
    match report.shortfall() {
        Some(shortfall) if args.check => Err(Failure::Check(shortfall)),
        _ => Ok(()),
    }
}

/// The rows, and what could not be measured here.
type Measured = (Session, Vec<Row>, Vec<String>);

fn measure(settings: &Settings, bar: &ProgressBar) -> Result<Measured, Failure> {
    bar.set_message("starting the target");
    let mut bench = Bench::open(settings, bar.clone())?;
    let (mut rows, mut skipped) = (Vec::new(), Vec::new());
    for &part in &settings.parts {
        rows.extend(match part {
            Part::Throughput => rounds::run(&mut bench)?,
            Part::Callers => callers::run(&mut bench)?,
            Part::Latency => latency::run(&mut bench)?,
            Part::Setup => setup::run(&mut bench)?,
            Part::Idle => idle::run(&mut bench)?,
            Part::Faults => faults::run(&mut bench)?,
            Part::Python => match python::find(settings.args.python.as_deref()) {
                Ok(python) => python::run(&mut bench, &python)?,
                Err(why) if settings.args.python.is_some() => return Err(Failure::Usage(why)),
                Err(why) => {
                    skipped.push(format!("calls from Python: {why}"));
                    Vec::new()
                }
            },
        });
    }
    Ok((bench.link.session.clone(), rows, skipped))
}

/// The command line with its defaults filled in.
#[derive(Debug, Clone)]
pub(super) struct Settings {
    pub(super) args: BenchArgs,
    pub(super) sizes: Vec<Size>,
    pub(super) parts: Vec<Part>,
    pub(super) placements: Vec<Placement>,
    pub(super) rounds: usize,
    /// What a program moves in one turn of a round, as near as whole batches come to it.
    pub(super) turn_bytes: usize,
    /// What the raw stream sends in its turn.
    pub(super) raw_bytes: usize,
    /// Calls in a latency round.
    pub(super) latency_calls: usize,
    pub(super) idle_for: Duration,
}

impl Settings {
    fn new(args: &BenchArgs) -> Result<Settings, Failure> {
        let quick = args.quick;
        let sizes = match (args.sizes.is_empty(), quick) {
            (false, _) => args.sizes.clone(),
            (true, true) => sizes(&[(4, 1024), (256, 64)]),
            (true, false) => sizes(&[(4, 1024), (32, 1024), (256, 256), (1024, 256), (16384, 16)]),
        };
        let settings = Settings {
            sizes,
            parts: parts(args),
            placements: placements(args, placement::usable_cores())?,
            rounds: args.rounds.map_or(if quick { 3 } else { 11 }, |rounds| rounds as usize),
            turn_bytes: if quick { 32 << 20 } else { 256 << 20 },
            raw_bytes: if quick { 64 << 20 } else { raw::STREAM_BYTES },
            latency_calls: if quick { 2_000 } else { 20_000 },
            idle_for: Duration::from_secs(if quick { 1 } else { 5 }),
            args: args.clone(),
        };
        settings.must_fit(machine::available_memory())?;
        Ok(settings)
    }

    /// Both programs have memory on both sides, and both sides may be this host.
    fn must_fit(&self, available: u64) -> Result<(), Failure> {
        let sides = if self.args.target.is_none() { 2 } else { 1 };
        let needed = sides * (self.arena_bytes() + self.floor_bytes()) as u64;
        if needed > available / 10 * 8 {
            let (needed, available) = (units::bytes(needed), units::bytes(available));
            return Err(Failure::Usage(format!(
                "these sizes take {needed} of memory and {available} are free"
            )));
        }
        Ok(())
    }

    /// The agent's memory on either side: the largest batch, or all callers' together.
    fn arena_bytes(&self) -> usize {
        let largest = self.sizes.iter().map(|size| size.bytes()).max().unwrap_or(0);
        let callers = self.args.callers.iter().map(|callers| callers::bytes(callers.0)).max();
        largest.max(callers.unwrap_or(0)).max(1 << 20).next_multiple_of(1 << 20)
    }

    fn floor_bytes(&self) -> usize {
        self.arena_bytes().max(self.raw_bytes)
    }
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

/// Both programs, connected to their other halves.
pub(super) struct Bench<'a> {
    settings: &'a Settings,
    bar: ProgressBar,
    arena: Region,
    peer: Peer,
    floor_memory: Pages,
    /// One per entry of [`BUFFERS`].
    floors: Vec<Floor>,
    raw: TcpStream,
    link: Link,
    _agent: Agent,
}

impl<'a> Bench<'a> {
    /// With memory for every part.
    fn open(settings: &'a Settings, bar: ProgressBar) -> Result<Bench<'a>, Failure> {
        let (arena, floor) = (settings.arena_bytes(), settings.floor_bytes());
        let agent = start_agent(settings)?;
        let link = match &settings.args.target {
            Some(target) => Link::connect(&agent, target, arena, floor)?,
            None => Link::spawn(&agent, arena, floor)?,
        };
        Bench::over(link, agent, settings, bar)
    }

    /// With little memory, and the target's process on one core.
    fn open_on(
        core: usize,
        settings: &'a Settings,
        bar: ProgressBar,
    ) -> Result<Bench<'a>, Failure> {
        let agent = start_agent(settings)?;
        let link = Link::spawn_on(core, &agent, SMALL, SMALL)?;
        Bench::over(link, agent, settings, bar)
    }

    fn over(
        link: Link,
        agent: Agent,
        settings: &'a Settings,
        bar: ProgressBar,
    ) -> Result<Bench<'a>, Failure> {
        let bytes = link.region().len as usize;
        let mut arena = agent.allocate(bytes, Access::NONE)?;
        verify::poison(&mut arena, Blocks::all_of(bytes))?;
        Ok(Bench {
            settings,
            bar,
            arena,
            peer: link.peer.clone(),
            floor_memory: Pages::filled(1, bytes.max(settings.raw_bytes)),
            floors: BUFFERS.iter().map(|&buffer| link.floor(buffer)).collect::<Result<_, _>>()?,
            raw: link.raw()?,
            link,
            _agent: agent,
        })
    }

    /// Bytes per second of one raw stream.
    fn raw_rate(&mut self) -> Result<f64, Failure> {
        let bytes = self.settings.raw_bytes;
        let took = raw::send(&mut self.raw, &self.floor_memory[..bytes])?;
        Ok(bytes as f64 / took.as_secs_f64())
    }

    /// Between this arena and the target's: contiguous at the source, scattered at the destination.
    fn batch(&self, op: Op, blocks: Blocks) -> Result<Batch, Failure> {
        let mut batch = Batch::with_capacity(blocks.count);
        let Blocks { at, block, count } = blocks;
        let remote = self.link.region();
        for index in 0..count {
            let source = (at + index * block) as u64;
            let destination = (at + crate::blocks::scattered(index, count) * block) as u64;
            let (ours, theirs) = match op {
                Op::Write => (source, destination),
                Op::Read => (destination, source),
            };
            batch.push(&self.arena, ours, remote, theirs, block as u64)?;
        }
        Ok(batch)
    }

    /// Says what happens now, one step further.
    fn step(&self, what: &str) {
        self.bar.set_message(what.to_string());
        self.bar.inc(1);
    }
}

/// The agent that measures. On one host it stays on the loopback interface.
fn start_agent(settings: &Settings) -> Result<Agent, Failure> {
    Ok(agent_builder(settings).start()?)
}

fn agent_builder(settings: &Settings) -> AgentBuilder {
    let builder = Agent::builder().name("bench");
    match settings.args.target {
        None => builder.listen(SocketAddr::from((Ipv4Addr::LOCALHOST, 0))),
        Some(_) => builder,
    }
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
        let total: Vec<usize> = settings.sizes.iter().map(|size| size.bytes() >> 20).collect();
        assert_eq!(total, [4, 32, 64, 256, 256]);
        assert!(settings.rounds >= 7);
        assert!(!settings.parts.contains(&Part::Faults));
        assert_eq!(settings.arena_bytes(), 256 << 20);
    }

    #[test]
    fn the_arena_holds_all_callers_and_a_raw_stream_fits_into_the_floors() {
        let settings = settings(&["--sizes", "4KiB:1", "--callers", "10"]).expect("fits");
        assert!(settings.arena_bytes() >= callers::bytes(10));
        assert_eq!(settings.floor_bytes(), raw::STREAM_BYTES);
    }

    #[test]
    fn sizes_beyond_the_memory_are_refused_before_anything_starts() {
        assert!(matches!(settings(&["--sizes", "1GiB:64"]), Err(Failure::Usage(_))));
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
