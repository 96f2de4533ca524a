//! A client that makes up `kv_transfer_params`.

use crate::kit::{Flow, Node, Pair, config, dense, kvferry_adapter, prompt};
use kvferry::{Agent, Transports};
use kvferry_connector::{ConsumerParams, IdleLimit, Limits, Params, producer_params};
use kvferry_refengine::kvferry_adapter::KvferryAdapterConfig;
use kvferry_refengine::{EngineConfig, FinishReason, Request, RequestId};
use kvferry_testkit::Watchdog;
use kvferry_testkit::ports::ClosedPort;
use std::net::TcpListener;
use std::time::{Duration, Instant};

/// How many requests the client sends.
const INVENTED: usize = 10_000;
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
        let transfer = crate::kit::transfer(&format!("invented-{n}"));
        let address = match n % 6 {
            0 => return (producer_params(Some(&transfer)), true),
            // Reserved: no name service knows it.
            1 => format!("host-{}.invalid:{}", n % 600, 1 + n % 60_000),
            2 => self.closed.address().to_owned(),
            3 => format!("127.0.0.1:{}", self.silent.local_addr().unwrap().port()),
            4 => self.other.advertised().to_owned(),
            _ => real.to_owned(),
        };
        let address = address.parse().unwrap();
        (ConsumerParams { transfer, address, engine: None, tokens: None }.to_params(), false)
    }
}

/// Latencies of the real handoffs; what happened to the made-up ones is asserted. Without `nobody` the
/// requests are the same, but for their parameters.
fn run(nobody: Option<&Nobody>) -> Vec<Duration> {
    let limits = Limits { rendezvous: WAIT, offer_ttl: WAIT, ..Limits::default() };
    let idle = Some(IdleLimit { pool_blocks: BLOCKS, idle_blocks: IDLE });
    let adapter = KvferryAdapterConfig { limits, idle, ..kvferry_adapter() };
    let config: EngineConfig = config(&dense(), BLOCK_TOKENS, BLOCKS as usize);
    let node = || Node::new(&config, &adapter);
    let mut pair = Pair::of(Flow::Sequential, node(), node());
    // Its address is known, so it is no stranger.
    pair.works("first", 1);
    pair.decode.kvferry_adapter.take_stats();
    pair.prefill.kvferry_adapter.take_stats();

    let mut began: Vec<(String, Instant)> = Vec::new();
    let mut latencies = Vec::new();
    let mut sent = 0;
    let mut worked = true;
    while worked || sent < INVENTED {
        for n in sent..(sent + PER_TICK).min(INVENTED) {
            let real = pair.prefill.kvferry_adapter.address(0).to_owned();
            let (params, is_prefill) = match nobody {
                Some(nobody) => nobody.params(n, &real),
                None => (Params::new(), n % 6 == 0),
            };
            let request =
                Request::new(format!("invented-{n}").as_str(), prompt(n as u64, PROMPT), 1);
            let node = if is_prefill { &mut pair.prefill } else { &mut pair.decode };
            node.engine.submit(request.with_params(params)).unwrap();
            if n % REAL_EVERY == 0 {
                let id = format!("real-{n}");
                pair.hand_off(&id, prompt(n as u64, 40), 6);
                began.push((id, Instant::now()));
            }
        }
        sent = (sent + PER_TICK).min(INVENTED);
        worked = pair.tick();
        began.retain(|(id, at)| {
            let ended = pair.ended(id).is_some();
            if ended {
                latencies.push(at.elapsed());
            }
            !ended
        });
        let held = pair.prefill.gauge("held_blocks");
        // Besides `IDLE` those of the requests that the worker half is giving up.
        assert!(held <= BLOCKS as usize / 2, "{held} blocks are held");
        let waiting = pair.decode.gauge("waiting_loads") * (BLOCKS_EACH - 1);
        assert!(waiting <= IDLE as usize + 8, "{waiting} blocks wait");
    }
    assert!(began.is_empty(), "real handoffs never ended: {began:?}");
    let real: Vec<_> = (0..INVENTED).step_by(REAL_EVERY).map(|n| format!("real-{n}")).collect();
    real.iter().for_each(|id| pair.assert_right(id));
    pair.assert_empty();
    if nobody.is_some() {
        assert_counted(&pair, real.len() as u64);
    }
    latencies
}

/// Every made-up request has ended, and is in the counters once.
fn assert_counted(pair: &Pair, real: u64) {
    let (prefill, decode) =
        (pair.prefill.kvferry_adapter.take_stats(), pair.decode.kvferry_adapter.take_stats());
    let sum = |counts: &std::collections::BTreeMap<String, u64>| counts.values().sum::<u64>();
    println!("prefill: {prefill:?}\ndecode: {decode:?}");
    let at_prefill = (0..INVENTED).filter(|n| n % 6 == 0).count() as u64;
    assert_eq!(prefill.offered, at_prefill + real);
    assert_eq!(prefill.withdrawn.get("expired"), Some(&at_prefill));
    let loaded = decode.fetched.get("ok").copied().unwrap_or(0);
    let failed = sum(&decode.fetched) - loaded;
    let at_decode = INVENTED as u64 - at_prefill;
    assert_eq!(failed + sum(&decode.refused), at_decode + (real - loaded));
    for n in (0..INVENTED).filter(|n| n % 6 != 0) {
        let id = RequestId::from(format!("invented-{n}").as_str());
        let reason = pair.outputs.finished[&id].reason;
        assert!(matches!(reason, FinishReason::Error | FinishReason::Length), "{n}: {reason:?}");
    }
}

/// The ratio of latencies is printed: a test can't tell a slow machine from a slow engine.
#[test]
#[ignore = "20 000 requests, for a minute: run by name"]
fn ten_thousand_made_up_handoffs_hold_no_block_beyond_its_bound_and_are_all_counted() {
    let _watched = Watchdog::new(Duration::from_secs(300));
    let median = |mut of: Vec<Duration>| {
        of.sort();
        of[of.len() / 2]
    };
    let plain = median(run(None));
    let attacked = median(run(Some(&Nobody::new())));
    let ratio = attacked.as_secs_f64() / plain.as_secs_f64();
    println!(
        "median of real handoffs: {plain:?} beside plain requests, {attacked:?} beside made-up ones: {ratio:.2}"
    );
}
