//! The connector's part of a scheduler step, on the engine's thread: both halves, 256 live requests.
//!
//! | requests | state |
//! |---|---|
//! | 64 | produced, and held until they are fetched |
//! | 64 | prefilled and fetched at the same time: each step computes a chunk in new blocks |
//! | 128 | fetched |
//!
//! In each step that moves, two more requests are admitted, fetched, and reported soon after. The peer is a
//! second process. Steps take as long as on a device; only the calls are timed.

use std::time::{Duration, Instant};

use kvferry_connector::{
    ConnectorMetadata, ConsumerParams, EngineId, FinishReason, GroupRule, Params, Request,
    Scheduled, Scheduler, SchedulerConfig, producer_params,
};
use kvferry_proto::layout::Kind;

use crate::failure::Failure;
use crate::machine;
use crate::stats::{Spread, median};

use super::Settings;
use super::exposed::{BLOCK_TOKENS, LAYERS};
use super::producer::{Producer, Step};
use super::rank::{Build, Geometry, PATIENCE, Rank, Ready, failed, fetch_request, id};
use crate::report::Row;

const HELD: u32 = 64;
const PREFILLED: u32 = 64;
const FETCHED: u32 = 128;
/// Requests that each step admits and fetches at once.
const ADMITTED: u32 = 2;
/// Tokens of each prefill that a step computes: 2048 of all.
const CHUNK_TOKENS: u32 = 32;
/// Tokens of a request that is held, or fetched at once.
const SHORT_TOKENS: u32 = 128;
const POOL: u32 = 4096;
/// Time of a step on the device.
const STEP_TAKES: Duration = Duration::from_millis(20);
const US_MAX: f64 = 200.0;

/// The calls of a step, in their order.
const CALLS: [&str; 7] = [
    "scheduler half, requests that come and go",
    "scheduler half, metadata",
    "worker half, metadata",
    "worker half, layers",
    "worker half, fetches",
    "worker half, reports",
    "scheduler half, reports",
];

pub(super) fn run(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let live = HELD + PREFILLED + FETCHED;
    let mut rows = Vec::new();
    let name = |what: &str| format!("{live} live requests: {what}");
    for (what, kind) in [("all moving", Moving::Device), ("all moving, no device", Moving::Host)] {
        let (all, calls) = measure(settings, Some(kind))?;
        let row = Row::new("step", name(what), "µs", all);
        rows.push(if kind == Moving::Device { row.at_most(US_MAX) } else { row });
        let part = |(of, spread)| Row::new("step", name(&format!("{what}, {of}")), "µs", spread);
        rows.extend(CALLS.into_iter().zip(calls).map(part));
    }
    let (all, _) = measure(settings, None)?;
    rows.push(Row::new("step", name("nothing new"), "µs", all));
    Ok(rows)
}

/// Signal by which a step learns that its layers have been computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Moving {
    /// Events, long after the layers were launched.
    Device,
    /// Calls on the engine's thread, at once.
    Host,
}

struct Engine {
    rank: Rank,
    scheduler: Scheduler,
    peer: Producer,
    /// Tokens of each prefill that have been computed.
    until: u32,
    prefill_tokens: u32,
    admitted: u32,
    /// Requests that were received since the last step.
    received: Vec<String>,
}

/// The median step of each round, in microseconds: all calls, and each kind by itself.
fn measure(settings: &Settings, moving: Option<Moving>) -> Result<(Spread, Vec<Spread>), Failure> {
    let steps = if settings.options.effort.quick { 10 } else { 50 };
    let mut engine = Engine::start(settings.rounds as u32 * steps + 1)?;
    let (mut all, mut calls) = (Vec::new(), vec![Vec::new(); CALLS.len()]);
    // A step that does not count: it begins what the others continue.
    engine.step(moving)?;
    for _ in 0..settings.rounds {
        settings.bar.set_message(match moving {
            Some(Moving::Device) => "step",
            Some(Moving::Host) => "step, no device",
            None => "step, nothing new",
        });
        let times = (0..steps).map(|_| engine.step(moving)).collect::<Result<Vec<_>, _>>()?;
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let sums: Vec<_> = times.iter().map(|times| micros(times.iter().sum())).collect();
        all.push(median(&sums));
        for (at, calls) in calls.iter_mut().enumerate() {
            let of: Vec<_> = times.iter().map(|times| micros(times[at])).collect();
            calls.push(median(&of));
        }
    }
    engine.check()?;
    Ok((Spread::of(all), calls.into_iter().map(Spread::of).collect()))
}

/// Blocks of a request, anywhere in the pool; their contents are not compared.
fn blocks(first: u32, count: u32) -> Vec<u32> {
    (first..first + count).map(|block| block.wrapping_mul(2_654_435_761) % POOL).collect()
}

fn whole(tokens: u32) -> Vec<u32> {
    blocks(0, tokens / BLOCK_TOKENS)
}

/// A peer in another process, and both halves of an engine of one rank.
pub(super) fn with_peer(
    geometry: Geometry,
    transport: &str,
) -> Result<(Producer, Rank, Scheduler), Failure> {
    let build = |engine| Build {
        engine,
        transport: transport.to_owned(),
        ready: Ready::Layers { least_bytes: 0 },
        geometry,
    };
    let (peer, rank) = (Producer::start(&build(1))?, Rank::without_engine(&build(2))?);
    let config = SchedulerConfig {
        groups: vec![GroupRule { kind: Kind::Full, block_tokens: geometry.block_tokens }],
        ranks: 1,
        timeout: PATIENCE,
        eager: true,
        recomputed_tokens: 0,
        null_block: None,
        idle: None,
    };
    let mut scheduler = Scheduler::new(config, EngineId(2));
    scheduler.set_ranks(vec![rank.worker.rank_metadata().to_vec()]).map_err(failed)?;
    Ok((peer, rank, scheduler))
}

impl Engine {
    /// Starts an engine with all requests live, and pools for this many steps.
    fn start(steps: u32) -> Result<Engine, Failure> {
        let geometry = Geometry {
            layers: LAYERS,
            blocks: POOL,
            block_tokens: BLOCK_TOKENS,
            heads: 1,
            content: 1,
        };
        let (mut peer, rank, scheduler) = with_peer(geometry, "local")?;
        let prefill_tokens = steps * CHUNK_TOKENS;
        let address = rank.agent.advertised().to_owned();
        // The peer has produced the requests that will be admitted.
        for admitted in 0..steps * ADMITTED {
            let name = format!("admitted-{admitted}");
            peer.produce(&name, SHORT_TOKENS, whole(SHORT_TOKENS))?;
        }
        let fetch = |n| {
            let name = format!("prefilled-{n}");
            fetch_request(&name, &address, &whole(prefill_tokens), prefill_tokens)
        };
        let fetches = (0..PREFILLED).map(fetch).collect();
        peer.apply(&ConnectorMetadata { fetches, ..ConnectorMetadata::default() })?;
        let received = Vec::new();
        let mut engine =
            Engine { rank, scheduler, peer, until: 0, prefill_tokens, admitted: 0, received };
        engine.populate()?;
        Ok(engine)
    }

    /// Requests that are held, and requests that are fetched and never arrive.
    fn populate(&mut self) -> Result<(), Failure> {
        let names: Vec<_> = (0..HELD).map(|n| format!("held-{n}")).collect();
        let params: Vec<_> = names.iter().map(|name| producer_params(Some(&id(name)))).collect();
        let named = names.iter().zip(&params);
        let requests: Vec<_> =
            named.map(|(name, params)| request(name, SHORT_TOKENS, params)).collect();
        for request in &requests {
            self.scheduler.arrived(request);
        }
        let scheduled = names.iter().map(|name| Scheduled {
            request: name,
            computed: 0,
            tokens: SHORT_TOKENS.into(),
            all: true,
            blocks: vec![whole(SHORT_TOKENS)],
        });
        let metadata = self.scheduler.step(scheduled, []).encode();
        self.rank.worker.apply(&metadata).map_err(failed)?;
        self.rank.worker.step_computed(None);
        for name in &names {
            let finished = self.scheduler.finished(name, FinishReason::Length, None, None);
            assert!(finished.is_some_and(|it| it.held), "all of it was computed");
        }
        for n in 0..FETCHED {
            let params = self.offered(&format!("fetched-{n}"));
            self.fetch(&format!("fetched-{n}"), &params);
        }
        for n in 0..PREFILLED {
            let name = format!("prefilled-{n}");
            let params = producer_params(Some(&id(&name)));
            self.scheduler.arrived(&request(&name, self.prefill_tokens, &params));
        }
        Ok(())
    }

    fn offered(&self, name: &str) -> Params {
        let address = self.peer.address.parse().expect("the address of an agent");
        ConsumerParams { transfer: id(name), address, engine: None, tokens: None }.to_params()
    }

    /// The scheduler's calls for a request that it admits.
    fn fetch(&mut self, name: &str, params: &Params) {
        // Decode computes the last token.
        self.scheduler.arrived(&request(name, SHORT_TOKENS + 1, params));
        std::hint::black_box(self.scheduler.matched(name, 0));
        self.scheduler.allocated(name, SHORT_TOKENS.into(), &[whole(SHORT_TOKENS)]);
    }

    /// A step; the time of each of [`CALLS`].
    fn step(&mut self, moving: Option<Moving>) -> Result<[Duration; CALLS.len()], Failure> {
        let names: Vec<_> = (0..PREFILLED).map(|n| format!("prefilled-{n}")).collect();
        let (computed, new) = (self.until, CHUNK_TOKENS / BLOCK_TOKENS);
        let mut scheduled = Vec::new();
        let mut admitted = Vec::new();
        if moving.is_some() {
            self.until += CHUNK_TOKENS;
            scheduled.extend(names.iter().map(|name| Scheduled {
                request: name,
                computed: computed.into(),
                tokens: CHUNK_TOKENS.into(),
                all: computed == 0,
                blocks: vec![blocks(computed / BLOCK_TOKENS, new)],
            }));
            for _ in 0..ADMITTED {
                let name = format!("admitted-{}", self.admitted);
                self.admitted += 1;
                let params = self.offered(&name);
                admitted.push((name, params));
            }
        }
        let ended = std::mem::take(&mut self.received);

        let mut times = [Duration::ZERO; CALLS.len()];
        let [requests, made, applied, layers, fetches, reports_made, reported] = &mut times;
        timed(requests, || {
            for name in &ended {
                drop(self.scheduler.finished(name, FinishReason::Length, None, None));
            }
            for (name, params) in &admitted {
                self.fetch(name, params);
            }
        });
        let metadata = timed(made, || self.scheduler.step(scheduled, []).encode());
        let worker = &self.rank.worker;
        timed(applied, || worker.apply(&metadata).map_err(failed))?;
        timed(layers, || {
            let layers = self.rank.layers();
            let step = Step { began: machine::shared_clock(), layers, takes: STEP_TAKES };
            let event = |layer| match moving {
                Some(Moving::Device) => Some(Box::new(step.event(layer)) as _),
                _ => None,
            };
            for layer in 0..layers {
                worker.layer_computed(layer, event(layer));
            }
            worker.step_computed(event(layers - 1));
        });
        timed(fetches, || worker.fetch());
        std::thread::sleep(STEP_TAKES);
        let reports = timed(reports_made, || worker.reports());
        if !reports.failed.is_empty() {
            return Err(Failure::Failed(format!("{:?} could not be fetched", reports.failed)));
        }
        timed(reported, || {
            if let Some(notes) = &reports.notes {
                self.scheduler.reported(0, notes);
            }
            self.scheduler.sent(reports.sent.iter().map(String::as_str));
            self.scheduler.received(reports.received.iter().map(String::as_str));
        });
        self.received = reports.received;
        Ok(times)
    }

    /// Fails unless all requests are still live.
    fn check(&mut self) -> Result<(), Failure> {
        std::thread::sleep(STEP_TAKES);
        self.step(None)?;
        self.step(None)?;
        let gauges = self.scheduler.gauges();
        let gauge = |name| gauges.iter().find(|(of, _)| *of == name).map_or(0, |(_, value)| *value);
        let (held, fetching) = (gauge("held") as u32, gauge("fetching") as u32);
        if (held, fetching) == (HELD, FETCHED) {
            Ok(())
        } else {
            Err(Failure::Check(format!(
                "{held} of {HELD} requests are held and {fetching} of {FETCHED} fetched at the end"
            )))
        }
    }
}

fn request<'a>(id: &'a str, tokens: u32, params: &'a Params) -> Request<'a> {
    Request { id, prompt_tokens: tokens.into(), max_tokens: 1, params: Some(params), prompt: None }
}

fn timed<T>(took: &mut Duration, work: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let done = work();
    *took = began.elapsed();
    done
}
