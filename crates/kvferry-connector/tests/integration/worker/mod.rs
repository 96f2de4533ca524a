//! Worker halves over real agents, driven by metadata that the tests build.

mod addresses;
mod course;
#[cfg(debug_assertions)]
mod gpu;
mod kv;
mod offers;
mod refused;

use kv::Kv;
use kvferry::{Access, Agent, Transports};
use kvferry_connector::{
    Announce, BlockTable, Cancel, Claim, Compute, ComputeEvent, ConnectorMetadata, Ending,
    EndingKind, EngineId, EngineMetadata, Expect, FetchRequest, Free, HandoffId, Limits,
    NULL_BLOCK, Notes, Offer, ReadPart, Worker, WorkerConfig, WorkerError, WorkerObserver,
};
use kvferry_models::engines::{layout, model};
use kvferry_proto::WireCode;
use kvferry_proto::layout::{Heads, Layout, Packing, Shape};
use kvferry_testkit::ports::KeptPort;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

const LAYERS: u32 = 4;
const BLOCKS: u32 = 64;
const BLOCK_TOKENS: u32 = 4;
const HEADS: u32 = 4;
const CONTENT: u32 = 32;
/// The time limit of fetches of which no test is the end.
const BUDGET_MS: u32 = 120_000;

fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

/// The shape of an engine.
#[derive(Clone, Copy)]
struct Build {
    id: u128,
    tp: u32,
    packing: Packing,
    content: u32,
    model: &'static str,
    dtype: &'static str,
    listen: &'static str,
    limits: fn() -> Limits,
    silence: Duration,
    /// The GPU that has the KV; `None` if the host has it.
    gpu: Option<i32>,
}

impl Build {
    const fn new(id: u128, tp: u32) -> Self {
        let (packing, content, limits) = (Packing::Lbhnc, CONTENT, Limits::default);
        let (model, dtype, listen) = ("llama", "bfloat16", "127.0.0.1:0");
        let (silence, gpu) = (PATIENCE, None);
        Self { id, tp, packing, content, model, dtype, listen, limits, silence, gpu }
    }
}

struct RankOf {
    agent: Agent,
    worker: Worker,
    memory: Kv,
    layout: Layout,
}

/// All ranks of an engine.
struct Engine {
    ranks: Vec<RankOf>,
    address: String,
}

impl Engine {
    fn new(build: Build, transports: &str, secret: &[u8]) -> Self {
        let ranks: Vec<_> =
            (0..build.tp).map(|rank| RankOf::new(build, rank, transports, secret)).collect();
        let cards: Vec<_> =
            ranks.iter().map(|it| it.worker.rank_metadata().to_vec().into()).collect();
        let engine = EngineMetadata { id: EngineId(build.id), ranks: cards };
        let metadata = ConnectorMetadata { engine: Some(engine), ..metadata() };
        let engine = Self { address: ranks[0].address(), ranks };
        engine.apply(&metadata);
        engine
    }

    fn apply(&self, metadata: &ConnectorMetadata) {
        for rank in &self.ranks {
            let after = || rank.memory.after();
            rank.worker.apply_after(&metadata.encode(), after).expect("valid metadata");
        }
    }

    fn fetch(&self) {
        self.ranks.iter().for_each(|rank| rank.worker.fetch());
    }

    fn compute(&self, request: &str, seed: u32, blocks: &[u32], tokens: Range<u32>) {
        let first = tokens.start == 0;
        let from = tokens.start.div_ceil(BLOCK_TOKENS);
        let to = tokens.end.div_ceil(BLOCK_TOKENS);
        let compute = Compute {
            offer: compute(request, blocks).offer.filter(|_| first),
            until: tokens.end,
            blocks: vec![BlockTable::new(from, blocks[from as usize..to as usize].to_vec())],
            ..compute(request, blocks)
        };
        self.apply(&ConnectorMetadata { computes: vec![compute], ..metadata() });
        for rank in &self.ranks {
            for layer in 0..LAYERS {
                rank.fill(seed, blocks, tokens.clone(), layer);
                rank.worker.layer_computed(layer as usize, None);
            }
            rank.worker.step_computed(None);
        }
    }

    fn hold(&self, request: &str) {
        let how = EndingKind::Held { side_data: None };
        let ending = Ending { request: request.to_owned(), transfer: id(request), how };
        self.apply(&ConnectorMetadata { endings: vec![ending], ..metadata() });
    }

    fn claim(&self, request: &str, from: &str) {
        let (transfer, address) = (id(request), from.parse().expect("an address"));
        let (request, tokens) = (request.to_owned(), 32);
        let claim = Claim { request, transfer, address, engine: None, tokens };
        self.apply(&ConnectorMetadata { claims: vec![claim], ..metadata() });
        self.fetch();
    }

    fn await_gauge(&self, name: &str) {
        let until = Instant::now() + PATIENCE / 2;
        for rank in &self.ranks {
            while !rank.worker.gauges().iter().any(|(is, count)| *is == name && *count > 0) {
                assert!(Instant::now() < until, "{name} stays zero: {:?}", rank.worker.gauges());
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Waits until all ranks have heard that the producer has `request`, or expects it.
    fn await_answer(&self, request: &str) {
        for rank in &self.ranks {
            eventually("the producer answers", || {
                let notes = rank.worker.reports().notes;
                let notes = notes.map(|notes| Notes::decode(&notes).expect("just encoded"));
                notes.is_some_and(|notes| notes.answered.iter().any(|it| it == request))
            });
        }
    }

    fn fetch_request(&self, request: &str, from: &str, blocks: &[u32], tokens: Range<u32>) {
        let fetches = vec![fetch(request, from, blocks, tokens)];
        self.apply(&ConnectorMetadata { fetches, ..metadata() });
        self.fetch();
    }

    /// Waits until all ranks have reported `request` as fetched. Returns the outcome on each.
    fn fetched(&self, request: &str) -> Vec<(WireCode, String)> {
        let of_rank = |rank: &RankOf| loop {
            assert!(rank.worker.wait(PATIENCE / 2), "{request} never ends");
            let reports = rank.worker.reports();
            let notes = Notes::decode(&reports.notes.expect("a fetch has ended"))
                .expect("it was just encoded");
            if let Some(it) = notes.fetched.into_iter().find(|it| it.request == request) {
                assert_eq!(reports.received, [request]);
                assert_eq!(reports.failed.is_empty(), it.code.is_ok());
                return (it.code, it.detail);
            }
        };
        self.ranks.iter().map(of_rank).collect()
    }

    fn assert_fetched(&self, request: &str) {
        for (code, detail) in self.fetched(request) {
            assert!(code.is_ok(), "{request}: {code}: {detail}");
        }
    }

    fn assert_sent(&self, request: &str) {
        for rank in &self.ranks {
            assert!(rank.worker.wait(PATIENCE / 2), "{request} is never sent");
            assert_eq!(rank.worker.reports().sent, [request]);
        }
    }

    fn assert_has(&self, seed: u32, blocks: &[u32], tokens: Range<u32>) {
        self.ranks.iter().for_each(|rank| rank.check(seed, blocks, tokens.clone()));
    }

    /// Asserts that nothing is under way.
    fn assert_idle(&self) {
        let idle = ["tombstones", "peers", "engines", "farewells"];
        for rank in &self.ranks {
            let busy = || {
                let gauges = rank.worker.gauges();
                gauges
                    .into_iter()
                    .filter(|(name, n)| *n > 0 && !idle.contains(name))
                    .collect::<Vec<_>>()
            };
            let until = Instant::now() + PATIENCE / 2;
            while !busy().is_empty() {
                assert!(Instant::now() < until, "still kept: {:?}", busy());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Waits until a producer's rank has heard of a consumer.
fn await_consumer(producer: &Engine) {
    let until = Instant::now() + PATIENCE / 2;
    let is_heard = |(name, n): (&str, usize)| name == "watched" && n > 0;
    while !producer.ranks[0].worker.gauges().into_iter().any(is_heard) {
        assert!(Instant::now() < until, "the producer hears of no consumer");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A producing and a consuming engine of one rank each.
fn two_engines() -> (Engine, Engine) {
    (Engine::new(Build::new(1, 1), "tcp", b""), Engine::new(Build::new(2, 1), "tcp", b""))
}

/// A step that computes nothing.
fn metadata() -> ConnectorMetadata {
    ConnectorMetadata::default()
}

fn fetch(request: &str, from: &str, blocks: &[u32], tokens: Range<u32>) -> FetchRequest {
    FetchRequest {
        request: request.to_owned(),
        transfer: id(request),
        address: from.parse().expect("an address"),
        engine: None,
        tokens: (tokens.start, tokens.end),
        blocks: vec![BlockTable::new(0, blocks.to_vec())],
        budget_ms: BUDGET_MS,
    }
}

/// The only step of a request.
fn compute(request: &str, blocks: &[u32]) -> Compute {
    let tokens = tokens_of(blocks);
    Compute {
        request: request.to_owned(),
        offer: Some(Offer { transfer: id(request), tokens, eager: true }),
        until: tokens,
        blocks: vec![BlockTable::new(0, blocks.to_vec())],
    }
}

impl RankOf {
    fn new(build: Build, rank: u32, transports: &str, secret: &[u8]) -> Self {
        let builder = Agent::builder().transports(Transports::parse(transports).expect("names"));
        let builder = if secret.is_empty() { builder } else { builder.secret(secret) };
        let agent = builder
            .silence(build.silence)
            .listen(build.listen.parse::<SocketAddr>().expect("an address"))
            .advertise("127.0.0.1")
            .start()
            .expect("it starts");
        let heads = Heads::shard(HEADS, rank, build.tp).expect("divisible");
        let shape = Shape {
            layers: LAYERS,
            blocks: BLOCKS,
            heads: heads.count,
            rows: BLOCK_TOKENS,
            content: build.content,
            kernel_blocks: 1,
        };
        let len = shape.bytes().expect("small");
        let memory = Kv::new(&agent, len as usize, build.gpu);
        let layout = layout(memory.region().id(), heads, &shape, build.packing);
        let (announce, limits) = (Announce::Layers { pieces: 4, least_bytes: 0 }, (build.limits)());
        let mut model = model(build.model);
        model.0.insert("dtype".to_owned(), build.dtype.to_owned());
        let config = WorkerConfig { rank: rank as usize, model, announce, limits, producers: None };
        let regions = std::slice::from_ref(memory.region());
        let worker = Worker::start(&agent, layout.clone(), regions, config).expect("it starts");
        Self { agent, worker, memory, layout }
    }

    fn address(&self) -> String {
        kvferry_connector::RankMetadata::decode(self.worker.rank_metadata())
            .expect("it was just encoded")
            .address
            .into()
    }

    /// The places of a token's heads in a layer, with their expected bytes.
    fn rows(
        &self,
        seed: u32,
        blocks: &[u32],
        token: u32,
        layer: u32,
    ) -> impl Iterator<Item = (usize, Vec<u8>)> {
        let plane = &self.layout.layers()[layer as usize].planes[0];
        let (view, heads, content) = (plane.view, plane.heads, plane.content);
        let block = blocks[(token / BLOCK_TOKENS) as usize];
        (0..heads.count).map(move |head| {
            let at = view.base
                + u64::from(block) * view.block_stride
                + u64::from(head) * view.head_stride
                + u64::from(token % BLOCK_TOKENS) * view.row_stride;
            let key = seed.wrapping_mul(31) ^ token << 12 ^ layer << 6 ^ (heads.start + head);
            let bytes = (0..content).map(|n| (key.wrapping_mul(2_654_435_761) >> (n % 24)) as u8);
            (at as usize, bytes.collect())
        })
    }

    fn fill(&self, seed: u32, blocks: &[u32], tokens: Range<u32>, layer: u32) {
        for token in tokens {
            for (at, bytes) in self.rows(seed, blocks, token, layer) {
                self.memory.write(at, &bytes);
            }
        }
    }

    fn check(&self, seed: u32, blocks: &[u32], tokens: Range<u32>) {
        for token in tokens {
            for layer in 0..LAYERS {
                assert!(self.has(seed, blocks, token, layer), "token {token}, layer {layer}");
            }
        }
    }

    fn has(&self, seed: u32, blocks: &[u32], token: u32, layer: u32) -> bool {
        self.rows(seed, blocks, token, layer).all(|(at, bytes)| {
            let mut there = vec![0; bytes.len()];
            self.memory.read(at, &mut there);
            there == bytes
        })
    }
}

fn id(request: &str) -> HandoffId {
    HandoffId::new(request).expect("short")
}

fn tokens_of(blocks: &[u32]) -> u32 {
    blocks.len() as u32 * BLOCK_TOKENS
}

/// Scattered blocks.
fn blocks(count: u32, salt: u32) -> Vec<u32> {
    (0..count).map(|n| (n * 37 + salt) % BLOCKS).collect()
}

/// An event that the test makes happen.
#[derive(Clone, Default)]
struct Signal(Arc<OnceLock<()>>);

impl ComputeEvent for Signal {
    fn is_ready(&self) -> bool {
        self.0.get().is_some()
    }

    fn wait(&self, _: &dyn Fn() -> bool) {
        self.0.wait();
    }
}

/// Limits with which an engine waits half a second for a request to arrive.
fn short_limits() -> Limits {
    let short = Duration::from_millis(500);
    Limits { offer_ttl: short, rendezvous: short, ..Limits::default() }
}

/// Only offers expire soon: a claim may come long before the blocks, and the consumer's fetch long after.
fn short_offers() -> Limits {
    Limits { offer_ttl: short_limits().offer_ttl, ..Limits::default() }
}

const BEYOND_SHORT: Duration = Duration::from_secs(1);

/// A server that gives each caller the next answer; the last one again and again.
fn http_server(answers: Vec<String>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    std::thread::spawn(move || {
        for (at, stream) in listener.incoming().enumerate() {
            let mut stream = stream.expect("a caller");
            let mut question = [0; 1024];
            let len = stream.read(&mut question).expect("a question");
            assert!(question[..len].starts_with(b"GET /query HTTP/1.1\r\n"));
            // The caller need not read all of it.
            drop(stream.write_all(answers[at.min(answers.len() - 1)].as_bytes()));
        }
    });
    url
}

fn json_answer(engines: &[(u128, &str)]) -> String {
    let entry = |(rank, (id, address)): (usize, &(u128, &str))| {
        let address = format!(r#"{{"0":{{"0":"{address}"}}}}"#);
        format!(r#""{rank}":{{"engine_id":"{}","worker_addr":{address}}}"#, EngineId(*id))
    };
    let entries: Vec<_> = engines.iter().enumerate().map(entry).collect();
    format!("HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{{{}}}", entries.join(","))
}

fn gauge(engine: &Engine, name: &str) -> usize {
    let gauges = engine.ranks[0].worker.gauges();
    gauges.into_iter().find(|(is, _)| *is == name).expect("a gauge").1
}

/// The calls of an observer, in order.
#[derive(Default)]
struct Calls(Mutex<Vec<String>>, Mutex<Vec<ReadPart>>);

impl WorkerObserver for Calls {
    fn received(&self, request: &str, code: WireCode, _detail: &str) {
        self.0.lock().expect("no panic").push(format!("{request} received, {code}"));
    }

    fn sent(&self, request: &str) {
        self.0.lock().expect("no panic").push(format!("{request} sent"));
    }

    fn read(&self, request: &str, part: ReadPart) {
        assert_eq!(request, "a");
        assert!(self.0.lock().expect("no panic").is_empty(), "read before it is received");
        self.1.lock().expect("no panic").push(part);
    }
}
