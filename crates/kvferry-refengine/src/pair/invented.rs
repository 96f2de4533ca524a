//! A client that makes up `kv_transfer_params`, beside one whose requests are handed over.

use super::{Flow, Node, PAUSE, Pair, prompt, submit, transfer};
use crate::config::{EngineConfig, GroupCache, LoadFailurePolicy};
use crate::kvferry_adapter::KvferryAdapterConfig;
use crate::model::{GroupSpec, ModelSpec};
use crate::request::{Params, Request, RequestId};
use kvferry::{Agent, Transports};
use kvferry_connector::{ConsumerParams, IdleLimit, Limits, producer_params};
use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

/// Kinds of requests that the client sends, in turns. The first one is for the prefill engine.
pub const KINDS: usize = 7;
/// Tokens of the prompt of a made-up request. It generates one.
pub const PROMPT: usize = 24;
/// Blocks that either engine may keep for consumers and producers from which nothing was heard.
pub const IDLE: u32 = 64;
/// Blocks that a made-up request waits for: those of its prompt.
pub const BLOCKS_EACH: usize = PROMPT / BLOCK_TOKENS;
const BLOCK_TOKENS: usize = 8;
/// Blocks of each engine.
const BLOCKS: u32 = 512;
/// Tokens of a handoff's prompt, and those that it generates: fewer than most answers have.
const HANDOFF: (usize, usize) = (40, 32);
/// Time that an unanswered load and an unclaimed offer last; 30 s by default.
const WAIT: Duration = Duration::from_millis(300);
/// Silence after which an agent gives up an address at which nothing answers.
const SILENCE: Duration = Duration::from_secs(2);

/// Addresses at which no engine hands anything over.
#[derive(Debug)]
pub struct DeadAddresses {
    /// Accepts connections, and never answers.
    silent: SocketAddr,
    /// Refuses connections: an open connection uses it.
    closed: SocketAddr,
    /// An agent without an engine.
    other: Agent,
    /// The sockets of both addresses.
    _taken: (TcpListener, TcpStream),
}

impl DeadAddresses {
    /// Takes the addresses, all of this host.
    ///
    /// # Errors
    /// If a socket or an agent can't be had.
    pub fn new() -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let taken = TcpStream::connect(listener.local_addr()?)?;
        let (silent, closed) = (listener.local_addr()?, taken.local_addr()?);
        let transports = Transports::parse("tcp").map_err(io::Error::other)?;
        let other = Agent::builder().transports(transports).io_threads(1).start();
        let other = other.map_err(io::Error::other)?;
        Ok(Self { silent, closed, other, _taken: (listener, taken) })
    }

    /// The parameters of the `n`th request, and whether it is for the prefill engine, whose address is `real`.
    fn params(&self, n: usize, real: &str) -> (Params, bool) {
        let transfer = |n| transfer(&name(n));
        let mut named = transfer(n);
        let address = match n % KINDS {
            0 => return (producer_params(Some(&named)), true),
            // Reserved: no name service knows it.
            1 => format!("host-{}.invalid:{}", n % 600, 1 + n % 60_000),
            2 => self.closed.to_string(),
            3 => self.silent.to_string(),
            4 => self.other.advertised().to_owned(),
            5 => real.to_owned(),
            // Another request's handoff: it lies there, of another prompt.
            _ => {
                named = transfer(n - n % KINDS);
                real.to_owned()
            }
        };
        let address = address.parse().expect("host and port");
        (ConsumerParams { transfer: named, address, engine: None, tokens: None }.to_params(), false)
    }
}

/// The id of the `n`th made-up request.
pub fn name(n: usize) -> String {
    format!("invented-{n}")
}

/// Two engines that bound what they keep for requests that nothing is heard of. `timeout` is the connector's.
///
/// # Errors
/// If an agent can't be had.
pub fn pair(timeout: Duration) -> kvferry::Result<Pair> {
    let limits = Limits { rendezvous: WAIT, offer_ttl: WAIT, ..Limits::default() };
    let idle = Some(IdleLimit { pool_blocks: BLOCKS, idle_blocks: IDLE });
    let adapter = KvferryAdapterConfig { timeout, limits, idle, ..KvferryAdapterConfig::default() };
    let mut config = EngineConfig::new(ModelSpec::new(vec![GroupSpec::full(4, 12)], 3));
    config.groups = vec![GroupCache::new(BLOCK_TOKENS, BLOCKS as usize)];
    // A handoff's offer may expire, if a thread stops before its consumer's message arrives.
    config.load_failure = LoadFailurePolicy::Recompute;
    let node = || {
        let agent = Agent::builder().transports(Transports::parse("tcp")?).io_threads(1);
        Ok(Node::vllm(&config, &adapter, vec![agent.silence(SILENCE).start()?]))
    };
    Ok(Pair::of(Flow::Sequential, node()?, node()?))
}

/// Times at which requests arrive. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    /// This many with each step of the engines.
    PerTick(usize),
    /// This many each second, evenly spaced, whether or not the engines keep up. A latency counts from the time at which
    /// the request was due.
    PerSecond(f64),
}

/// A client that makes up the parameters of its requests, and one whose requests are handed over.
#[derive(Clone, Copy, Debug)]
pub struct Clients<'a> {
    /// Requests of the first client.
    pub requests: usize,
    /// Their arrivals.
    pub arrivals: Arrivals,
    /// Requests of the first client for each handoff of the second one, which begins with the first of them.
    pub per_handoff: usize,
    /// Time that a step of both engines takes, besides what their processor does: that of the GPU's work.
    pub step: Duration,
    /// Addresses that the parameters name. Without them the requests are the same, but have no parameters.
    pub dead: Option<&'a DeadAddresses>,
}

/// The times of a run.
#[derive(Clone, Debug, Default)]
pub struct Times {
    /// Latencies of the handoffs.
    pub handoffs: Vec<Duration>,
    /// Times to their first tokens from the decode engine.
    pub first_tokens: Vec<Duration>,
    /// Time from the first arrival until no engine had work.
    pub all: Duration,
}

impl Clients<'_> {
    /// The ids of the handoffs.
    pub fn handoffs(&self) -> impl Iterator<Item = String> {
        (0..self.requests).step_by(self.per_handoff).map(handoff)
    }

    /// Sends all requests, and runs to the end. `ticked` is called after each step.
    ///
    /// # Panics
    /// The cases of [`Pair::tick`].
    pub fn run(&self, pair: &mut Pair, mut ticked: impl FnMut(&Pair)) -> Times {
        let real = pair.prefill.kvferry_adapter.address(0).to_owned();
        // With whether the first token was seen.
        let mut began: Vec<(String, Instant, bool)> = Vec::new();
        let first = Instant::now();
        let mut times = Times::default();
        let (mut sent, mut ticks) = (0, 0);
        loop {
            while sent < self.requests
                && let Some(due) = self.due(sent, ticks, first)
            {
                if self.submit(pair, sent, &real) {
                    began.push((handoff(sent), due, false));
                }
                sent += 1;
            }
            ticks += 1;
            let worked = pair.tick();
            if worked {
                std::thread::sleep(self.step);
            }
            began.retain_mut(|(id, at, has_first)| {
                let ended = pair.ended(id).is_some();
                if !*has_first
                    && (ended || pair.outputs.tokens.contains_key(&RequestId::from(id.as_str())))
                {
                    *has_first = true;
                    times.first_tokens.push(at.elapsed());
                }
                if ended {
                    times.handoffs.push(at.elapsed());
                }
                !ended
            });
            ticked(pair);
            match (worked, sent < self.requests) {
                (false, false) => break,
                (false, true) if self.due(sent, ticks, first).is_none() => {
                    std::thread::sleep(PAUSE)
                }
                _ => {}
            }
        }
        times.all = first.elapsed();
        times
    }

    /// The time at which the `n`th request was due after `ticks` steps; `None` if it is not yet due.
    fn due(&self, n: usize, ticks: usize, first: Instant) -> Option<Instant> {
        let now = Instant::now();
        match self.arrivals {
            Arrivals::PerTick(each) => (n < (ticks + 1) * each).then_some(now),
            Arrivals::PerSecond(rate) => {
                let due = first + Duration::from_secs_f64(n as f64 / rate);
                (due <= now).then_some(due)
            }
        }
    }

    /// Submits the `n`th request, and the handoff that begins with it. True if one does.
    fn submit(&self, pair: &mut Pair, n: usize, real: &str) -> bool {
        let (params, is_prefill) = match self.dead {
            Some(dead) => dead.params(n, real),
            None => (Params::new(), n.is_multiple_of(KINDS)),
        };
        let request = Request::new(name(n).as_str(), prompt(n as u64, PROMPT), 1);
        let node = if is_prefill { &mut pair.prefill } else { &mut pair.decode };
        submit(node, request.with_params(params));
        let begins = n.is_multiple_of(self.per_handoff);
        if begins {
            let (tokens, max_tokens) = HANDOFF;
            pair.hand_off(&handoff(n), prompt(n as u64, tokens), max_tokens);
        }
        begins
    }
}

fn handoff(n: usize) -> String {
    format!("real-{n}")
}
