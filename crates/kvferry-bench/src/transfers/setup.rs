//! Set-up before the first byte: registering memory, connecting to a peer, building a batch.

use std::thread;
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Batch, Options, Region};
use kvferry_sys::map::Mapping;

use crate::failure::Failure;
use crate::options::{Op, Size};
use crate::stats::Spread;

use super::sessions::resident_bytes;
use super::tables::Table;
use super::{Bench, start_agent, transfer};
use crate::report::Row;

const REGIONS: usize = 10_000;
const REGION_BYTES: usize = 4096;
/// Memory that is still there then is measured as taking so long.
const FREED_WITHIN: Duration = Duration::from_secs(1);

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    let rounds = bench.settings.rounds.max(7);
    bench.bar.inc_length(rounds as u64);
    let mut times = vec![Times::default(); rounds];
    for (round, times) in times.iter_mut().enumerate() {
        bench.step(&format!("round {}/{rounds}: registering, connecting", round + 1));
        registering(bench, times)?;
        connecting(bench, times)?;
        building(bench, times)?;
    }
    let row = |work: &str, unit, scale: f64, time: fn(&Times) -> f64| {
        Row::new("setup", work, unit, Spread::of(times.iter().map(|t| time(t) * scale).collect()))
    };
    Ok(vec![
        row("register 10 000 regions", "ms", 1e3, |t| t.allocate - t.map).at_most(20.0),
        row("map the memory of 10 000 regions", "ms", 1e3, |t| t.map),
        row("unregister and free 10 000 regions", "ms", 1e3, |t| t.unregister),
        row("first transfer to a new peer", "ms", 1e3, |t| t.first).at_most(5.0),
        row("start an agent", "ms", 1e3, |t| t.start),
        row("build a batch of 1 024 descriptors", "µs", 1e6, |t| t.build),
    ])
}

/// Seconds.
#[derive(Debug, Clone, Default)]
struct Times {
    /// Mapping memory like that of `allocate`.
    map: f64,
    /// Memory from the system, and registering it.
    allocate: f64,
    unregister: f64,
    start: f64,
    first: f64,
    build: f64,
}

fn registering(bench: &Bench<'_>, times: &mut Times) -> Result<(), Failure> {
    let agent = start_agent(bench.settings, bench.transport)?;
    let started = Instant::now();
    let mappings: Vec<Mapping> =
        (0..REGIONS).map(|_| Mapping::populated(REGION_BYTES)).collect::<Result<_, _>>()?;
    times.map = started.elapsed().as_secs_f64();
    drop(mappings);
    let started = Instant::now();
    let regions: Vec<Region> = (0..REGIONS)
        .map(|_| agent.allocate(REGION_BYTES, Access::READ_WRITE))
        .collect::<Result<_, _>>()?;
    times.allocate = started.elapsed().as_secs_f64();
    let most = resident_bytes()?;
    let started = Instant::now();
    agent.unregister_batch(&regions)?;
    drop(regions);
    // A thread of its own unmaps much memory. What is measured next is not measured beside it.
    let goes = (REGIONS * REGION_BYTES) as u64 * 3 / 4;
    while resident_bytes()? + goes > most && started.elapsed() < FREED_WITHIN {
        thread::sleep(Duration::from_micros(200));
    }
    times.unregister = started.elapsed().as_secs_f64();
    Ok(())
}

/// Connects with a new agent: neither side knows the other.
fn connecting(bench: &Bench<'_>, times: &mut Times) -> Result<(), Failure> {
    let started = Instant::now();
    let agent: Agent = start_agent(bench.settings, bench.transport)?;
    times.start = started.elapsed().as_secs_f64();
    let ours = agent.allocate(REGION_BYTES, Access::NONE)?;
    let started = Instant::now();
    let peer = agent.peer(&bench.link.agent_address)?;
    let mut batch = Batch::with_capacity(1);
    batch.push(&ours, 0, bench.link.region(), 0, REGION_BYTES as u64)?;
    transfer(&peer, Op::Write, &batch, &Options::default())?;
    times.first = started.elapsed().as_secs_f64();
    Ok(())
}

/// Not part of another figure: engines keep batches that they move repeatedly, and build new ones for new
/// block tables.
fn building(bench: &Bench<'_>, times: &mut Times) -> Result<(), Failure> {
    let table = Table::scatter(0, Size { block: 512, count: 1024 });
    let started = Instant::now();
    bench.batch(Op::Write, &table)?;
    times.build = started.elapsed().as_secs_f64();
    Ok(())
}
