//! A client that makes up `kv_transfer_params`.

use crate::kit::{Flow, Node, Pair, config, dense, kvferry_adapter, prompt};
use kvferry::{Agent, Transports};
use kvferry_connector::{ConsumerParams, IdleLimit, Limits, Params, producer_params};
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
use kvferry_refengine::{EngineConfig, FinishReason, Request, RequestId, continuation};
use kvferry_testkit::ports::ClosedPort;
use kvferry_testkit::{PATIENCE, Watchdog};
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// Kinds of requests that the client sends, in turns.
const KINDS: usize = 7;
/// How many of them arrive per step of the engines.
const PER_TICK: usize = 8;
/// A real handoff begins after so many of them.
const REAL_EVERY: usize = 200;
const BLOCKS: u32 = 512;
const IDLE: u32 = 64;
const BLOCK_TOKENS: usize = 8;
const PROMPT: usize = 24;
/// Blocks of a made-up request: of its prompt, and one for the token that it generates.
const BLOCKS_EACH: usize = PROMPT / BLOCK_TOKENS + 1;
/// Tokens of a real handoff's prompt.
const REAL_PROMPT: usize = 40;
/// How long an unanswered load and an unclaimed offer last, at 30 s by default.
const WAIT: Duration = Duration::from_millis(300);

/// Addresses at which no engine hands anything over.
struct Nobody {
    /// Accepts connections, and never answers.
    silent: TcpListener,
    closed: ClosedPort,
    /// An agent without an engine.
    other: Agent,
}

impl Nobody {
    fn new() -> Self {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let closed = ClosedPort::new();
        let other = Agent::builder().transports(Transports::parse("tcp").unwrap());
        Self { silent, closed, other: other.io_threads(1).start().unwrap() }
    }

    /// The parameters of the `n`th request, and whether it is for the prefill engine.
    fn params(&self, n: usize, real: &str) -> (Params, bool) {
        let transfer = |n| crate::kit::transfer(&format!("invented-{n}"));
        let mut named = transfer(n);
        let address = match n % KINDS {
            0 => return (producer_params(Some(&named)), true),
            // Reserved: no name service knows it.
            1 => format!("host-{}.invalid:{}", n % 600, 1 + n % 60_000),
            2 => self.closed.address().to_owned(),
            3 => format!("127.0.0.1:{}", self.silent.local_addr().unwrap().port()),
            4 => self.other.advertised().to_owned(),
            5 => real.to_owned(),
            // Another request's handoff: it lies there, of another prompt.
            _ => {
                named = transfer(n - n % KINDS);
                real.to_owned()
            }
        };
        let address = address.parse().unwrap();
        (ConsumerParams { transfer: named, address, engine: None, tokens: None }.to_params(), false)
    }
}

/// Latencies of the real handoffs; what happened to the made-up ones is asserted. Without `nobody` the
/// requests are the same, but for their parameters.
fn run(invented: usize, nobody: Option<&Nobody>) -> Vec<Duration> {
    let limits = Limits { rendezvous: WAIT, offer_ttl: WAIT, ..Limits::default() };
    let idle = Some(IdleLimit { pool_blocks: BLOCKS, idle_blocks: IDLE });
    let adapter = KvferryAdapterConfig { limits, idle, ..kvferry_adapter() };
    let config: EngineConfig = config(&dense(), BLOCK_TOKENS, BLOCKS as usize);
    let node = || Node::impatient(&config, &adapter);
    let mut pair = Pair::of(Flow::Sequential, node(), node());
    // Its address is known, so it is no stranger.
    pair.works("first", 1);
    pair.decode.kvferry_adapter.take_stats();
    pair.prefill.kvferry_adapter.take_stats();

    let mut began: Vec<(String, Instant)> = Vec::new();
    let mut latencies = Vec::new();
    let mut sent = 0;
    let mut most = (0, 0);
    let mut worked = true;
    while worked || sent < invented {
        for n in sent..(sent + PER_TICK).min(invented) {
            let real = pair.prefill.kvferry_adapter.address(0).to_owned();
            let (params, is_prefill) = match nobody {
                Some(nobody) => nobody.params(n, &real),
                None => (Params::new(), n % KINDS == 0),
            };
            let request =
                Request::new(format!("invented-{n}").as_str(), prompt(n as u64, PROMPT), 1);
            let node = if is_prefill { &mut pair.prefill } else { &mut pair.decode };
            node.engine.submit(request.with_params(params)).unwrap();
            if n % REAL_EVERY == 0 {
                let id = format!("real-{n}");
                pair.hand_off(&id, prompt(n as u64, REAL_PROMPT), 6);
                began.push((id, Instant::now()));
            }
        }
        sent = (sent + PER_TICK).min(invented);
        worked = pair.tick();
        began.retain(|(id, at)| {
            let ended = pair.ended(id).is_some();
            if ended {
                latencies.push(at.elapsed());
            }
            !ended
        });
        // Without those that the worker half is giving up: when it has done so depends on its threads.
        let unclaimed = pair.prefill.gauge("unclaimed_blocks");
        assert!(
            unclaimed <= IDLE as usize,
            "{unclaimed} blocks are kept for which no consumer has asked"
        );
        most.0 = most.0.max(pair.prefill.gauge("held_blocks"));
        let waiting = pair.decode.gauge("waiting_loads") * (BLOCKS_EACH - 1);
        assert!(waiting <= IDLE as usize + 8, "{waiting} blocks wait");
        most.1 = most.1.max(waiting);
    }
    println!("at most {} blocks were held and {} waited", most.0, most.1);
    assert!(began.is_empty(), "real handoffs never ended: {began:?}");
    let real: Vec<_> = (0..invented).step_by(REAL_EVERY).map(|n| format!("real-{n}")).collect();
    real.iter().for_each(|id| pair.assert_right(id));
    pair.assert_empty();
    if nobody.is_some() {
        assert_counted(&pair, invented, real.len() as u64);
    }
    latencies
}

/// Every made-up request has ended, and is in the counters once.
fn assert_counted(pair: &Pair, invented: usize, real: u64) {
    let (prefill, decode) =
        (pair.prefill.kvferry_adapter.take_stats(), pair.decode.kvferry_adapter.take_stats());
    let sum = |counts: &std::collections::BTreeMap<String, u64>| counts.values().sum::<u64>();
    println!("prefill: {prefill:?}\ndecode: {decode:?}");
    let at_prefill = (0..invented).filter(|n| n % KINDS == 0).count() as u64;
    assert_eq!(prefill.offered, at_prefill + real);
    // A real one, too, may have to make room before its consumer's message arrives.
    let expired = prefill.withdrawn.get("expired").copied().unwrap_or(0);
    assert!((at_prefill..=at_prefill + real).contains(&expired), "{expired} of {at_prefill}");
    let loaded = decode.fetched.get("ok").copied().unwrap_or(0);
    let failed = sum(&decode.fetched) - loaded;
    let at_decode = invented as u64 - at_prefill;
    assert_eq!(failed + sum(&decode.refused), at_decode + (real - loaded));
    for n in (0..invented).filter(|n| n % KINDS != 0) {
        let id = RequestId::from(format!("invented-{n}").as_str());
        let reason = pair.outputs.finished[&id].reason;
        match reason {
            FinishReason::Error => {}
            FinishReason::Length => {
                let right =
                    continuation(&pair.decode.engine.config().model, &prompt(n as u64, PROMPT), 1);
                assert_eq!(pair.outputs.of(&format!("invented-{n}")), right, "{n}");
            }
            _ => panic!("{n}: {reason:?}"),
        }
    }
}

#[test]
fn made_up_handoffs_hold_no_block_beyond_its_bound_and_are_all_counted() {
    let _watched = Watchdog::new(PATIENCE);
    // Those at the prefill engine have twice the blocks that may be kept, and two real ones are among them.
    run(KINDS * 30, Some(&Nobody::new()));
}

/// The ratio of latencies is printed: a test can't tell a slow machine from a slow engine.
#[test]
#[ignore = "slow: make test-slow"]
fn ten_thousand_made_up_handoffs_hold_no_block_beyond_its_bound_and_are_all_counted() {
    let _watched = Watchdog::new(PATIENCE);
    let median = |mut of: Vec<Duration>| {
        of.sort();
        of[of.len() / 2]
    };
    let plain = median(run(10_000, None));
    let attacked = median(run(10_000, Some(&Nobody::new())));
    let ratio = attacked.as_secs_f64() / plain.as_secs_f64();
    println!(
        "median of real handoffs: {plain:?} beside plain requests, {attacked:?} beside made-up ones: {ratio:.2}"
    );
}
