//! A handoff of one block between two engines: the reference engine on the connector, prefill in a
//! second process and decode in this one, with both requests at the same time.
//!
//! The time is from the moment at which prefill has computed the prompt's last layer to the moment at which
//! the decode engine's first step on it begins. That step computes the prompt's last token; the token that
//! follows is compared with the model's own.
//!
//! Engines step as long as they have work, as vLLM's do. vLLM's loop pauses for a millisecond after a
//! step that computed nothing, which would be most of the time measured here. The decode engine yields its
//! core instead, and prefill pauses only once the prompt has been computed.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::{Agent, Transports};
use kvferry_connector::{Announce, ConsumerParams, HandoffId, producer_params};
use kvferry_refengine::kvferry_adapter::{KvferryAdapter, KvferryAdapterConfig};
use kvferry_refengine::{
    Connector, Engine, EngineConfig, GroupCache, GroupSpec, ModelSpec, Output, Params, Request,
    continuation,
};
use serde::{Deserialize, Serialize};

use fastrand::Rng;

use crate::child;
use crate::child::{Child, answer_parent};
use crate::failure::Failure;
use crate::helper;
use crate::layer_times::LayerTimes;
use crate::stats::{Spread, quantile_of};

use super::Settings;
use super::rank::{PATIENCE, failed};
use crate::report::Row;

const BLOCK_TOKENS: usize = 128;
/// The last token is computed by decode, not handed over.
const PROMPT_TOKENS: usize = BLOCK_TOKENS + 1;
const LAYERS: usize = 8;
const HEADS: usize = 8;
/// Bytes of a key, and of a value.
const HEAD_BYTES: usize = 32;
/// Concurrent handoffs, where many are measured.
const IN_FLIGHT: usize = 64;
const MS_MAX: f64 = 1.0;
/// Requests per second with handoffs, of those without.
const OF_ALONE_MIN: f64 = 0.85;
/// Pause of an engine after a step that computed nothing, where the pause is not measured.
const PAUSE: Duration = Duration::from_micros(200);

pub(super) fn run(settings: &Settings) -> Result<Vec<Row>, Failure> {
    let mut rows = Vec::new();
    for transport in &settings.options.transports {
        rows.extend(over(settings, transport)?);
    }
    Ok(rows)
}

fn over(settings: &Settings, transport: &str) -> Result<Vec<Row>, Failure> {
    settings.bar.set_message(format!("one block, {transport}"));
    let (each, many) = if settings.options.effort.quick { (10, 64) } else { (50, 512) };
    let mut first = Vec::new();
    let (mut p50, mut p99, mut rate) = (Vec::new(), Vec::new(), Vec::new());
    let mut alone = Vec::new();
    for _ in 0..settings.rounds {
        // Each round has new engines.
        let mut pair = Pair::start(transport)?;
        first.push(pair.one()?);
        let mut times = (0..each).map(|_| pair.one()).collect::<Result<Vec<_>, _>>()?;
        p50.push(quantile_of(&mut times, 0.5));
        p99.push(quantile_of(&mut times, 0.99));
        // The machine's speed changes: the baseline is taken before and after.
        let before = without_handoffs(many / 2)?;
        rate.push(many as f64 / pair.many(many)?.as_secs_f64());
        alone.push(many as f64 / (before + without_handoffs(many / 2)?).as_secs_f64());
    }
    let of_alone = rate.iter().zip(&alone).map(|(rate, alone)| rate / alone).collect();
    let bytes = crate::units::bytes((BLOCK_TOKENS * LAYERS * HEADS * 2 * HEAD_BYTES) as u64);
    let row = |what: String, unit, values| {
        Row::new("one block", what, unit, Spread::of(values)).over(transport)
    };
    let of = format!("{each} handoffs of {BLOCK_TOKENS} tokens, {bytes}");
    Ok(vec![
        row(format!("{of}: p50"), "ms", p50).at_most(MS_MAX),
        row(format!("{of}: p99"), "ms", p99),
        row("the first between two engines".to_owned(), "ms", first),
        row(
            format!("{many} handoffs, {IN_FLIGHT} in flight, of the rate without handoffs"),
            "of it",
            of_alone,
        )
        .at_least(OF_ALONE_MIN),
        row(format!("{many} handoffs, {IN_FLIGHT} in flight"), "per s", rate),
        row(format!("{many} prompts of one engine, no handoffs"), "per s", alone),
    ])
}

/// The time of an engine for as many prompts without handoffs: most of the time of handoffs, too.
fn without_handoffs(count: usize) -> Result<Duration, Failure> {
    let mut engine = Engine::new(config(), Connector::None).map_err(failed)?;
    let began = Instant::now();
    for request in 0..count as u64 {
        let request = Request::new(name(request), prompt(request), 1);
        engine.submit(request).map_err(failed)?;
    }
    while engine.has_work() {
        engine.step().map_err(failed)?;
        drop(engine.take_outputs());
    }
    Ok(began.elapsed())
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// The first ask. Answers the address of its agent.
    Start { transport: String },
    /// Prefills a request. Answers, once its blocks have been read, the moment at which its last layer had
    /// been computed: nanoseconds of the shared clock.
    Prefill(u64),
    /// Prefills the requests from one number up to another, [`IN_FLIGHT`] at a time.
    Many(u64, u64),
}

fn model() -> ModelSpec {
    ModelSpec::new(vec![GroupSpec::full(HEADS, HEAD_BYTES)], LAYERS)
}

fn config() -> EngineConfig {
    let mut config = EngineConfig::new(model());
    // One of them is the null block.
    config.groups = vec![GroupCache::new(BLOCK_TOKENS, 2 * IN_FLIGHT + 1)];
    config.prefix_caching = false;
    (config.step_tokens, config.chunk_tokens) = (2 * PROMPT_TOKENS, 2 * PROMPT_TOKENS);
    config.max_running = IN_FLIGHT;
    config
}

fn prompt(request: u64) -> Vec<u32> {
    let mut rng = Rng::with_seed(request);
    (0..PROMPT_TOKENS).map(|_| rng.u32(..model().vocab)).collect()
}

fn name(request: u64) -> String {
    format!("request-{request}")
}

fn transfer(request: u64) -> HandoffId {
    HandoffId::new(&name(request)).expect("it is short")
}

/// An engine whose layers are timed.
struct Node {
    engine: Engine,
    address: String,
    times: Arc<LayerTimes>,
}

impl Node {
    fn start(transport: &str) -> Result<Node, Failure> {
        let agent = Agent::builder().transports(Transports::parse(transport)?).start()?;
        let config = config();
        let settings =
            KvferryAdapterConfig { announce: Announce::LAYERS, ..KvferryAdapterConfig::default() };
        let kvferry_adapter = KvferryAdapter::new(&config, vec![agent], settings);
        let address = kvferry_adapter.address(0).to_owned();
        let connector = Connector::Vllm(kvferry_adapter.vllm());
        let mut engine = Engine::new(config, connector).map_err(failed)?;
        let times = LayerTimes::of(&mut engine);
        Ok(Node { engine, address, times })
    }

    fn submit(&mut self, request: u64, params: Params) -> Result<(), Failure> {
        let request = Request::new(name(request), prompt(request), 1).with_params(params);
        self.engine.submit(request).map_err(failed)
    }

    /// A step, and then a pause if it computed nothing. Returns the requests that have ended.
    fn step(&mut self, pause: impl FnOnce()) -> Result<Vec<Output>, Failure> {
        let step = self.engine.step().map_err(failed)?;
        if step.tokens == 0 {
            pause();
        }
        Ok(self.engine.take_outputs())
    }
}

/// Compares tokens with the model's own, which takes as long as computing the prompt: never within a time
/// that is measured.
fn check(outputs: &[Output]) -> Result<(), Failure> {
    for output in outputs {
        let number = output.id.as_str().trim_start_matches("request-").parse();
        let number =
            number.map_err(|_| Failure::Check(format!("{} was never submitted", output.id)))?;
        if output.tokens != continuation(&model(), &prompt(number), 1) {
            return Err(Failure::Check(format!("{}: a wrong token", output.id)));
        }
    }
    Ok(())
}

/// The decode engine, and the process of the prefill engine.
struct Pair {
    prefill: Child,
    address: String,
    decode: Node,
    requests: u64,
}

impl Pair {
    fn start(transport: &str) -> Result<Pair, Failure> {
        let mut prefill = helper::spawn(&["prefill"])?;
        let address = prefill.ask(&Ask::Start { transport: transport.to_owned() })?;
        Ok(Pair { prefill, address, decode: Node::start(transport)?, requests: 0 })
    }

    fn submit(&mut self, request: u64) -> Result<(), Failure> {
        let transfer = transfer(request);
        let address = self.address.parse().expect("the address of an agent");
        let offered = ConsumerParams { transfer, address, engine: None, tokens: None };
        self.decode.submit(request, offered.to_params())
    }

    /// Runs one handoff. Returns its time in milliseconds.
    fn one(&mut self) -> Result<f64, Failure> {
        let request = self.requests;
        self.requests += 1;
        self.submit(request)?;
        self.prefill.tell(&Ask::Prefill(request))?;
        let output = self.run_until_ended()?;
        check(&output)?;
        let began = self.decode.times.began();
        let computed: u64 = self.prefill.hear_within(PATIENCE)?;
        Ok(began.saturating_sub(computed) as f64 / 1e6)
    }

    fn run_until_ended(&mut self) -> Result<Vec<Output>, Failure> {
        let until = Instant::now() + PATIENCE;
        loop {
            let outputs = self.decode.step(std::thread::yield_now)?;
            if !outputs.is_empty() {
                return Ok(outputs);
            }
            if Instant::now() > until {
                return Err(Failure::Failed("a handoff between two engines does not end".into()));
            }
        }
    }

    /// Many handoffs.
    fn many(&mut self, count: usize) -> Result<Duration, Failure> {
        let (first, end) = (self.requests, self.requests + count as u64);
        self.requests = end;
        let began = Instant::now();
        self.prefill.tell(&Ask::Many(first, end))?;
        let (mut next, mut outputs) = (first, Vec::with_capacity(count));
        while outputs.len() < count {
            while next < end && (next - first) as usize - outputs.len() < IN_FLIGHT {
                self.submit(next)?;
                next += 1;
            }
            outputs.extend(self.decode.step(|| std::thread::sleep(PAUSE))?);
            if began.elapsed() > PATIENCE {
                return Err(Failure::Failed("handoffs between two engines do not end".into()));
            }
        }
        let took = began.elapsed();
        self.prefill.hear_within::<()>(PATIENCE)?;
        check(&outputs)?;
        Ok(took)
    }
}

/// The helper `prefill`.
pub(crate) fn run_prefill() -> Result<(), Failure> {
    let mut node = None;
    answer_parent(|ask| {
        if let Ask::Start { transport } = ask {
            let started = Node::start(&transport)?;
            let address = started.address.clone();
            node = Some(started);
            return child::value(&address);
        }
        let node: &mut Node =
            node.as_mut().ok_or_else(|| Failure::Usage("the engine has not started".into()))?;
        match ask {
            Ask::Start { .. } => Err(Failure::Usage("the engine has started already".into())),
            Ask::Prefill(request) => {
                node.prefill(request..request + 1)?;
                child::value(&node.times.ended())
            }
            Ask::Many(first, end) => child::value(&node.prefill(first..end)?),
        }
    })
}

impl Node {
    fn prefill(&mut self, requests: std::ops::Range<u64>) -> Result<(), Failure> {
        let (mut next, mut held) = (requests.start, 0);
        while next < requests.end || self.engine.has_work() {
            // Requests that are held have blocks, too.
            while next < requests.end && held < IN_FLIGHT {
                self.submit(next, producer_params(Some(&transfer(next))))?;
                (next, held) = (next + 1, held + 1);
            }
            let step = self.engine.step().map_err(failed)?;
            held = step.held + step.unfinished;
            drop(self.engine.take_outputs());
            if step.tokens == 0 {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }
}
