//! Many live sessions on one agent: memory of each, processor time while nothing happens, and latency
//! beside an agent with one session. The peers are light agents in a few helper processes.

use std::fs;
use std::io;
use std::time::Instant;

use kvferry::{Access, Agent, Batch, Options, Peer, Region, Transports};

use crate::child::{Child, die_with_parent, hold};
use crate::failure::Failure;
use crate::lines::Described;
use crate::options::Op;
use crate::stats::{Spread, quantile_of};
use crate::{helper, machine, units};

use super::messages::Reach;
use super::{Bench, start_agent, transfer};
use crate::report::{Bound, Row};

const SESSIONS: usize = 1000;
const SESSIONS_QUICK: usize = 100;
/// Sessions that are open before memory is measured: tables and threads have been allocated.
const FIRST: usize = 20;
/// Agents of a helper process.
const AGENTS: usize = 250;
const BLOCK_BYTES: usize = 4096;

/// Sessions of an agent that has nothing to do.
const IDLE_SESSIONS: usize = 8;

const MEMORY_KIB_MAX: f64 = 64.0;
const IDLE_PERCENT_MAX: f64 = 1.0;
const OF_ONE_SESSION: Bound = Bound::AtMost(1.2);

/// Turns of each agent within a round.
const TURNS: usize = 10;

/// The helper `agents`: this many agents with a block of memory each, until the parent closes the pipe.
pub(crate) fn run_agents(count: usize) -> Result<(), Failure> {
    die_with_parent()?;
    machine::raise_open_files();
    let agents = (0..count).map(|_| {
        let builder = Agent::builder().name("bench-peer").listen(([127, 0, 0, 1], 0));
        let agent = builder.io_threads(1).streams_per_peer(1).start()?;
        let region = agent.allocate_private(BLOCK_BYTES, Access::READ_WRITE)?;
        Ok((agent, region))
    });
    let agents: Vec<(Agent, Region)> = agents.collect::<Result<_, Failure>>()?;
    let reach = |(agent, region): &(Agent, Region)| Reach {
        agent: agent.advertised().to_string(),
        region: Described(region.remote()),
    };
    hold(agents.iter().map(reach).collect::<Vec<_>>())
}

/// The helper `idle agent` of `kvferry bench idle`: an agent that has written a block over each of its sessions.
pub(crate) fn run_idle(transport: &str) -> Result<(), Failure> {
    let transports = Transports::parse(transport)?;
    let agent = Agent::builder().name("bench-idle").transports(transports).start()?;
    let mut peers: Child = helper::spawn(&["agents", &IDLE_SESSIONS.to_string()])?;
    let _sessions = Sessions::open(&agent, &peers.hello::<Vec<Reach>>()?)?;
    crate::idle::serve()
}

pub(super) fn run(bench: &mut Bench<'_>) -> Result<Vec<Row>, Failure> {
    if bench.settings.options.target.is_some() {
        bench.skipped.push("live sessions: their peers are processes of this host".into());
        return Ok(Vec::new());
    }
    let settings = bench.settings;
    let count = if settings.options.quick { SESSIONS_QUICK } else { SESSIONS };
    let rounds = settings.rounds;
    let idle_rounds = rounds.min(3);
    bench.bar.inc_length((1 + idle_rounds + rounds) as u64);
    bench.step(&format!("opening {count} sessions"));
    machine::raise_open_files();
    let (mut processes, mut reaches) = (Vec::new(), Vec::new());
    while reaches.len() < count {
        let agents = AGENTS.min(count - reaches.len());
        let mut process: Child = helper::spawn(&["agents", &agents.to_string()])?;
        reaches.extend(process.hello::<Vec<Reach>>()?);
        processes.push(process);
    }
    let (few, many) =
        (start_agent(settings, bench.transport)?, start_agent(settings, bench.transport)?);
    let one = Sessions::open(&few, &reaches[..1])?;
    let mut all = Sessions::open(&many, &reaches[..FIRST])?;
    let (memory, files, began) = (resident_bytes()?, open_files()?, Instant::now());
    all.extend(&reaches[FIRST..])?;
    let opened = (count - FIRST) as f64;
    let seconds = began.elapsed().as_secs_f64();
    let memory = (resident_bytes()? as f64 - memory as f64) / opened / 1024.0;
    let files = (open_files()? as f64 - files as f64) / opened;

    let mut idle = Vec::new();
    for round in 0..idle_rounds {
        bench.step(&format!("round {}/{idle_rounds}: {count} idle sessions", round + 1));
        idle.push(super::idle::percent_of_a_core(settings.idle_for)?);
    }
    let calls = settings.latency_calls / TURNS;
    let (mut alone, mut among, mut in_turn) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        bench.step(&format!("round {}/{rounds}: a block over one of {count}", round + 1));
        let mut micros = [const { Vec::new() }; 3];
        for turn in 0..TURNS {
            for at in 0..3 {
                micros[(turn + at) % 3].extend(match (turn + at) % 3 {
                    0 => one.write(calls, |_| 0)?,
                    1 => all.write(calls, |_| 0)?,
                    _ => all.write(count, |call| call)?,
                });
            }
        }
        let [a, b, c] = micros.map(|mut micros| quantile_of(&mut micros, 0.5));
        alone.push(a);
        among.push(b);
        in_turn.push(c);
    }
    let count = units::count(count as u64);
    let row = |work: String, unit, rounds| Row::new("sessions", work, unit, Spread::of(rounds));
    let ratio = Spread::ratio(&among, &alone);
    Ok(vec![
        row(format!("{count} sessions: memory of each"), "KiB", vec![memory])
            .at_most(MEMORY_KIB_MAX),
        row(format!("{count} sessions: open files of each"), "files", vec![files]),
        row(
            format!("{count} sessions: opening one, and its first block"),
            "ms",
            vec![seconds / opened * 1e3],
        ),
        row(format!("{count} sessions: processor time while idle"), "% of a core", idle)
            .at_most(IDLE_PERCENT_MAX),
        row(format!("{count} sessions: write 4 KiB over one of them, p50"), "µs", among)
            .beside("one session", Spread::of(alone))
            .judged("one session", ratio, OF_ONE_SESSION),
        row(format!("{count} sessions: write 4 KiB over each in turn, p50"), "µs", in_turn),
    ])
}

/// Sessions of one agent, each with a block to write.
pub(super) struct Sessions<'a> {
    agent: &'a Agent,
    block: Region,
    peers: Vec<(Peer, Batch)>,
}

impl<'a> Sessions<'a> {
    pub(super) fn open(agent: &'a Agent, reaches: &[Reach]) -> Result<Sessions<'a>, Failure> {
        let block = agent.allocate_private(BLOCK_BYTES, Access::NONE)?;
        let mut sessions = Sessions { agent, block, peers: Vec::new() };
        sessions.extend(reaches)?;
        Ok(sessions)
    }

    fn extend(&mut self, reaches: &[Reach]) -> Result<(), Failure> {
        for reach in reaches {
            let peer = self.agent.peer(&reach.agent)?;
            let mut batch = Batch::with_capacity(1);
            batch.push(&self.block, 0, &reach.region.0, 0, BLOCK_BYTES as u64)?;
            transfer(&peer, Op::Write, &batch, &Options::default())?;
            self.peers.push((peer, batch));
        }
        Ok(())
    }

    /// Microseconds of each of so many calls, over the session that `choose` returns for it.
    pub(super) fn write(
        &self,
        calls: usize,
        choose: fn(usize) -> usize,
    ) -> Result<Vec<f64>, Failure> {
        let call = |call| {
            let (peer, batch) = &self.peers[choose(call)];
            let started = Instant::now();
            transfer(peer, Op::Write, batch, &Options::default())?;
            Ok(started.elapsed().as_secs_f64() * 1e6)
        };
        (0..calls).map(call).collect()
    }
}

pub(super) fn resident_bytes() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/self/statm")?;
    let pages = text.split(' ').nth(1).and_then(|pages| pages.parse::<u64>().ok());
    Ok(pages.ok_or(io::ErrorKind::InvalidData)? * rustix::param::page_size() as u64)
}

fn open_files() -> io::Result<usize> {
    Ok(fs::read_dir("/proc/self/fd")?.count())
}
