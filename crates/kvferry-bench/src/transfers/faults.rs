//! Peers that are killed or stopped in the middle of a batch: the time until the caller's error, and
//! until the next batch succeeds. Each round has a target of its own.

use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Batch, Options, Peer, Region};
use rustix::process::Signal;
use serde::Deserialize;

use crate::blocks::scattered;
use crate::child::Child;
use crate::failure::Failure;
use crate::options::Op;
use crate::stats::Spread;

use super::link::Link;
use super::messages::Sizes;
use super::transport::Transport;
use super::{Bench, agent_builder, start_agent, transfer};
use crate::report::Row;

const BLOCK: usize = 32 << 10;
const COUNT: usize = 2048;
const ARENA: usize = BLOCK * COUNT;

/// Rounds with a stopped peer, which take seconds each and differ little.
const STOPS: usize = 3;

/// Far beyond every bound: a call that has not failed by then is a failure of the bench.
const GIVE_UP: Duration = Duration::from_secs(20);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    let kills = bench.settings.rounds.max(7);
    let stops = bench.settings.rounds.min(STOPS);
    let agent = start_agent(bench.settings, bench.transport)?;
    let mut rows = measure(bench, &agent, Kind::Kvferry, kills, stops)?;
    // A stock peer does not depend on this agent's transport.
    let stock = bench.settings.options.stock.as_ref().filter(|_| !bench.link.session.is_local());
    if let Some(python) = stock {
        kvferry_mooncake::link();
        let agent =
            agent_builder(bench.settings, Transport::Auto)?.setting("mooncake", true).start()?;
        rows.extend(measure(bench, &agent, Kind::Stock(python), kills, stops)?);
    }
    Ok(rows)
}

/// The kind of the peer.
#[derive(Debug, Clone, Copy)]
enum Kind<'a> {
    Kvferry,
    /// A stock Mooncake engine, in this interpreter.
    Stock(&'a Path),
}

fn measure(
    bench: &Bench<'_>,
    agent: &Agent,
    kind: Kind<'_>,
    kills: usize,
    stops: usize,
) -> Result<Vec<Row>, Failure> {
    bench.bar.inc_length((kills + stops) as u64);
    let ours = agent.allocate(ARENA, Access::NONE)?;
    let (mut killed, mut met_again) = (Vec::new(), Vec::new());
    for round in 0..kills {
        bench.step(&format!("round {}/{kills}: killing a peer", round + 1));
        let mut fault = Fault::begin(agent, &ours, kind)?;
        killed.push(fault.time_to_error(Signal::KILL)?.as_secs_f64() * 1e3);
        fault = Fault::start(agent, &ours, kind)?;
        met_again.push(fault.time_to_success()?.as_secs_f64() * 1e3);
    }
    let (mut stopped, mut resumed) = (Vec::new(), Vec::new());
    for round in 0..stops {
        bench.step(&format!("round {}/{stops}: stopping a peer", round + 1));
        let fault = Fault::begin(agent, &ours, kind)?;
        stopped.push(fault.time_to_error(Signal::STOP)?.as_secs_f64() * 1e3);
        fault.target.signal(Signal::CONT)?;
        resumed.push(fault.time_to_success()?.as_secs_f64() * 1e3);
    }
    let peer = match kind {
        Kind::Kvferry => "peer",
        Kind::Stock(_) => "stock Mooncake peer",
    };
    let row = |work, rounds| Row::new("faults", work, "ms", Spread::of(rounds));
    Ok(vec![
        row(format!("{peer} killed in a batch: time to the error"), killed).at_most(100.0),
        row("  its successor: time to the first batch there".into(), met_again),
        row(format!("{peer} stopped in a batch: time to the error"), stopped).at_most(3000.0),
        row("  it resumes: time to the first batch there".into(), resumed),
    ])
}

/// The peer's process.
enum Target {
    Kvferry(Box<Link>),
    Stock(Child),
}

impl Target {
    fn signal(&self, signal: Signal) -> Result<(), Failure> {
        match self {
            Target::Kvferry(link) => link.signal(signal),
            Target::Stock(child) => child.signal(signal),
        }
    }
}

struct Fault {
    peer: Peer,
    batch: Batch,
    target: Target,
}

/// The first line of `stock.py`.
#[derive(Debug, Deserialize)]
struct Stock {
    session: String,
    address: u64,
}

impl Fault {
    fn start(agent: &Agent, ours: &Region, kind: Kind<'_>) -> Result<Fault, Failure> {
        match kind {
            Kind::Kvferry => Fault::start_kvferry(agent, ours),
            Kind::Stock(python) => Fault::start_stock(agent, ours, python),
        }
    }

    fn start_stock(agent: &Agent, ours: &Region, python: &Path) -> Result<Fault, Failure> {
        let mut command = Command::new(python);
        // It logs to standard error under all settings.
        command.args(["-c", include_str!("stock.py"), &ARENA.to_string()]).stderr(Stdio::null());
        let mut child = Child::start(&mut command)?;
        let stock: Stock = child.hello().map_err(|why| {
            why.while_doing(&format!("--stock {}: no stock Mooncake starts", python.display()))
        })?;
        let peer = agent.peer(&stock.session)?;
        let mut batch = Batch::with_capacity(COUNT);
        for index in 0..COUNT {
            let (from, to) = (index * BLOCK, scattered(index, COUNT) * BLOCK);
            batch.push_to_address(ours, from as u64, stock.address + to as u64, BLOCK as u64)?;
        }
        Ok(Fault { peer, batch, target: Target::Stock(child) })
    }

    fn start_kvferry(agent: &Agent, ours: &Region) -> Result<Fault, Failure> {
        let link =
            Link::spawn(agent, Sizes { arena: ARENA, shared: 0, floor: 1, floor_streams: 1 })?;
        let peer = link.peer.clone();
        let mut batch = Batch::with_capacity(COUNT);
        for index in 0..COUNT {
            let (from, to) = (index * BLOCK, scattered(index, COUNT) * BLOCK);
            batch.push(ours, from as u64, link.region(), to as u64, BLOCK as u64)?;
        }
        Ok(Fault { peer, batch, target: Target::Kvferry(Box::new(link)) })
    }

    /// Starts a target and has it serve one batch.
    fn begin(agent: &Agent, ours: &Region, kind: Kind<'_>) -> Result<Fault, Failure> {
        let fault = Fault::start(agent, ours, kind)?;
        transfer(&fault.peer, Op::Write, &fault.batch, &Options::default())?;
        Ok(fault)
    }

    /// Time from a signal that is sent while batches move to the error of the batch that it hits.
    fn time_to_error(&self, signal: Signal) -> Result<Duration, Failure> {
        const UNDER_WAY: Duration = Duration::from_millis(100);
        std::thread::scope(|scope| {
            let (failed, failure) = mpsc::channel();
            scope.spawn(move || {
                let options = Options { timeout: Some(GIVE_UP), ..Options::default() };
                let error = loop {
                    if let Err(error) = transfer(&self.peer, Op::Write, &self.batch, &options) {
                        break error;
                    }
                };
                // The receiver may have given up.
                let _ = failed.send((Instant::now(), error));
            });
            std::thread::sleep(UNDER_WAY);
            let signalled = Instant::now();
            self.target.signal(signal)?;
            let (at, error) = failure.recv_timeout(2 * GIVE_UP).map_err(|_| {
                Failure::Check(format!("no error within {:?} of {signal:?}", 2 * GIVE_UP))
            })?;
            at.checked_duration_since(signalled)
                .ok_or_else(|| error.while_doing("the batch failed before the signal was sent"))
        })
    }

    /// The time until a batch succeeds, retrying every millisecond.
    fn time_to_success(&self) -> Result<Duration, Failure> {
        let started = Instant::now();
        loop {
            match transfer(&self.peer, Op::Write, &self.batch, &Options::default()) {
                Ok(()) => return Ok(started.elapsed()),
                Err(error) if started.elapsed() > GIVE_UP => {
                    return Err(error.while_doing("the peer is back, but a batch fails"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }
}
