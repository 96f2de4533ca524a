//! Worker halves over real agents, driven by metadata that the tests build.

use kvferry::{Access, Agent, Region, Transports};
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
const BUDGET_MS: u32 = 20_000;

fn bounded() -> Watchdog {
    Watchdog::new(Duration::from_secs(60))
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
}

impl Build {
    const fn new(id: u128, tp: u32) -> Self {
        let (packing, content, limits) = (Packing::Lbhnc, CONTENT, Limits::default);
        let (model, dtype, listen) = ("llama", "bfloat16", "127.0.0.1:0");
        Self { id, tp, packing, content, model, dtype, listen, limits }
    }
}

struct RankOf {
    agent: Agent,
    worker: Worker,
    memory: Region,
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
            rank.worker.apply(&metadata.encode()).expect("valid metadata");
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
            .silence(Duration::from_secs(3))
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
        let memory = agent.allocate(len as usize, Access::READ).expect("memory");
        let layout = layout(memory.id(), heads, &shape, build.packing);
        let (announce, limits) = (Announce::Layers { pieces: 4, least_bytes: 0 }, (build.limits)());
        let mut model = model(build.model);
        model.0.insert("dtype".to_owned(), build.dtype.to_owned());
        let config = WorkerConfig { rank: rank as usize, model, announce, limits, producers: None };
        let regions = std::slice::from_ref(&memory);
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
                self.memory.write_at(at, &bytes).expect("inside");
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
            self.memory.read_at(at, &mut there).expect("inside");
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

#[test]
fn computed_kv_is_fetched_in_either_order_over_either_transport_between_any_ranks() {
    let _bounded = bounded();
    for transports in ["tcp", "local"] {
        for (theirs, ours) in [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)] {
            let p = Engine::new(Build::new(1, theirs), transports, b"");
            let build = Build { packing: Packing::Bhlnc, ..Build::new(2, ours) };
            let d = Engine::new(build, transports, b"");
            let (there, here) = (blocks(8, 1), blocks(8, 5));
            // The producer first.
            p.compute("a", 1, &there, 0..20);
            p.compute("a", 1, &there, 20..32);
            p.hold("a");
            d.fetch_request("a", &p.address, &here, 0..32);
            d.assert_fetched("a");
            d.assert_has(1, &here, 0..32);
            p.assert_sent("a");
            // The consumer first. It has some of the tokens.
            d.fetch_request("b", &p.address, &here, 8..32);
            std::thread::sleep(Duration::from_millis(20));
            p.compute("b", 2, &there, 0..12);
            p.compute("b", 2, &there, 12..32);
            d.assert_fetched("b");
            d.assert_has(2, &here, 8..32);
            d.assert_has(1, &here, 0..8);
            p.hold("b");
            p.assert_sent("b");
            p.assert_idle();
            d.assert_idle();
        }
    }
}

/// An event that the test makes happen.
#[derive(Clone, Default)]
struct Signal(Arc<OnceLock<()>>);

impl ComputeEvent for Signal {
    fn is_ready(&self) -> bool {
        self.0.get().is_some()
    }

    fn wait(&self) {
        self.0.wait();
    }
}

#[test]
fn a_layer_is_fetched_after_its_event_not_after_its_call() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.fetch_request("a", &p.address, &here, 0..32);
    p.apply(&ConnectorMetadata { computes: vec![compute("a", &there)], ..metadata() });
    let events: Vec<Signal> = (0..LAYERS).map(|_| Signal::default()).collect();
    let rank = &p.ranks[0];
    for (layer, event) in events.iter().enumerate() {
        rank.worker.layer_computed(layer, Some(Box::new(event.clone())));
    }
    rank.worker.step_computed(Some(Box::new(events[3].clone())));
    // The engine ends the step long before the device does.
    p.hold("a");
    let is_there = |layer: u32| d.ranks[0].has(1, &here, 0, layer);
    for layer in 0..LAYERS {
        rank.fill(1, &there, 0..32, layer);
        std::thread::sleep(Duration::from_millis(30));
        assert!(!is_there(layer), "layer {layer} was fetched before it was computed");
        events[layer as usize].0.get_or_init(|| ());
        let until = Instant::now() + PATIENCE / 2;
        while !is_there(layer) {
            assert!(Instant::now() < until, "layer {layer} is never fetched");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    d.assert_fetched("a");
    d.assert_has(1, &here, 0..32);
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_step_that_failed_announces_nothing_and_fails_what_was_announced_of_it() {
    let _bounded = bounded();
    for layers in [0, 2, LAYERS] {
        let (p, d) = two_engines();
        let (there, here) = (blocks(8, 1), blocks(8, 5));
        d.fetch_request("a", &p.address, &here, 0..32);
        let (b_there, b_here) = (blocks(8, 2), blocks(8, 6));
        d.fetch_request("b", &p.address, &b_here, 0..32);
        p.compute("b", 2, &b_there, 0..12);
        p.apply(&ConnectorMetadata { computes: vec![compute("a", &there)], ..metadata() });
        let rank = &p.ranks[0];
        for layer in 0..layers {
            rank.fill(1, &there, 0..32, layer);
            rank.worker.layer_computed(layer as usize, None);
        }
        rank.worker.step_failed("the kernel failed");
        // A second report of the step changes nothing.
        rank.worker.step_computed(None);
        let (code, detail) = d.fetched("a").remove(0);
        assert_eq!(code, WireCode::Internal);
        assert!(detail.contains("the kernel failed"), "{detail}");
        p.hold("a");
        p.assert_sent("a");
        // A request that the step did not compute goes on.
        p.compute("b", 2, &b_there, 12..32);
        d.assert_fetched("b");
        d.assert_has(2, &b_here, 0..32);
        p.hold("b");
        p.assert_sent("b");
        p.assert_idle();
        d.assert_idle();
    }
}

#[test]
fn a_later_step_of_a_request_whose_step_failed_is_not_handed_over() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.fetch_request("a", &p.address, &here, 0..32);
    p.apply(&ConnectorMetadata {
        computes: vec![Compute { until: 12, ..compute("a", &there) }],
        ..metadata()
    });
    p.ranks[0].worker.step_failed("the kernel failed");
    p.compute("a", 1, &there, 12..32);
    assert_eq!(d.fetched("a").remove(0).0, WireCode::Internal);
    p.hold("a");
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_request_that_loses_its_blocks_is_fetched_from_its_new_ones() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (before, there, here) = (blocks(8, 1), blocks(8, 9), blocks(8, 5));
    d.fetch_request("a", &p.address, &here, 0..32);
    p.compute("a", 7, &before, 0..20);
    p.apply(&ConnectorMetadata { restarts: vec!["a".to_owned()], ..metadata() });
    // Another request's bytes.
    (0..LAYERS).for_each(|layer| p.ranks[0].fill(99, &before, 0..32, layer));
    p.compute("a", 8, &there, 0..32);
    d.assert_fetched("a");
    d.assert_has(8, &here, 0..32);
    p.hold("a");
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn engines_with_different_layouts_refuse_each_other_with_both_numbers() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 2), "tcp", b"");
    let d = Engine::new(Build { content: CONTENT * 2, ..Build::new(2, 1) }, "tcp", b"");
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("a");
    assert_eq!(failed[0].0, WireCode::LayoutMismatch);
    assert!(failed[0].1.contains("32") && failed[0].1.contains("64"), "{}", failed[0].1);
    // All ranks of the producer free the blocks at once, not by a timer.
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

/// Whoever's request has not arrived within half a second is not waited for.
fn short_limits() -> Limits {
    let short = Duration::from_millis(500);
    Limits { offer_ttl: short, rendezvous: short, ..Limits::default() }
}

/// Only offers expire soon: a claim may come long before the blocks, and the consumer's fetch long after.
fn short_offers() -> Limits {
    Limits { offer_ttl: short_limits().offer_ttl, ..Limits::default() }
}

const BEYOND_SHORT: Duration = Duration::from_secs(1);

#[test]
fn a_claimed_offer_waits_for_its_consumer_and_others_expire() {
    let _bounded = bounded();
    for tp in [1, 2] {
        let p = Engine::new(Build { limits: short_offers, ..Build::new(1, 2) }, "tcp", b"");
        let d = Engine::new(Build::new(2, tp), "tcp", b"");
        let (there, here) = (blocks(8, 1), blocks(8, 5));
        d.claim("a", &p.address);
        d.await_gauge("claimed");
        p.compute("a", 1, &there, 0..32);
        p.hold("a");
        p.compute("b", 1, &there, 0..32);
        p.hold("b");
        p.assert_sent("b");
        std::thread::sleep(BEYOND_SHORT);
        assert!(!d.ranks[0].has(1, &here, 0, 0), "nothing is read before there are blocks");
        d.fetch_request("a", &p.address, &here, 0..32);
        d.assert_fetched("a");
        d.assert_has(1, &here, 0..32);
        p.assert_sent("a");
        d.fetch_request("b", &p.address, &here, 0..32);
        assert!(d.fetched("b").iter().all(|(code, _)| *code == WireCode::Expired));
        p.assert_idle();
        d.assert_idle();
    }
}

#[test]
fn held_blocks_that_the_engine_needs_are_given_up_unless_a_consumer_has_asked_for_them() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.claim("a", &p.address);
    d.await_gauge("claimed");
    for request in ["a", "b"] {
        p.compute(request, 1, &there, 0..32);
        p.hold(request);
    }
    p.await_gauge("watched");
    let reclaims = ["a", "b", "unknown"].map(str::to_owned).to_vec();
    p.apply(&ConnectorMetadata { reclaims, ..metadata() });
    let rank = &p.ranks[0].worker;
    assert!(rank.wait(PATIENCE / 2), "it is never sent");
    let reports = rank.reports();
    assert_eq!(reports.sent, ["b"]);
    let lost = Notes::decode(&reports.notes.expect("it was lost")).expect("just encoded").lost;
    assert_eq!((&lost[0].request[..], lost[0].code), ("b", WireCode::Expired));
    d.fetch_request("a", &p.address, &here, 0..32);
    d.assert_fetched("a");
    p.assert_sent("a");
    d.fetch_request("b", &p.address, &here, 0..32);
    assert!(d.fetched("b").iter().all(|(code, _)| *code == WireCode::Expired));
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_fetch_is_reported_as_answered_once_when_its_producer_has_it_or_its_request() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let here = blocks(8, 5);
    let expect = Expect { request: "a".to_owned(), transfer: id("a") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("a", &p.address, &here, 0..32);
    d.fetch_request("invented", &p.address, &here, 0..32);
    let mut answered = Vec::new();
    while answered.is_empty() {
        let notes = d.ranks[0].worker.reports().notes;
        answered.extend(notes.map(|notes| Notes::decode(&notes).expect("just encoded").answered));
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(answered, [["a"]]);
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    d.assert_fetched("a");
}

#[test]
fn an_expected_request_is_waited_for_and_one_that_never_arrives_fails_its_consumer() {
    let _bounded = bounded();
    let p = Engine::new(Build { limits: short_limits, ..Build::new(1, 1) }, "tcp", b"");
    let d = Engine::new(Build::new(2, 2), "tcp", b"");
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    d.fetch_request("b", &p.address, &here, 0..32);
    for (code, detail) in d.fetched("b") {
        assert_eq!(code, WireCode::UnknownHandoff);
        assert!(detail.contains("no such request arrived at the producer"), "{detail}");
    }
    let expect = Expect { request: "a".to_owned(), transfer: id("a") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("a", &p.address, &here, 0..32);
    std::thread::sleep(BEYOND_SHORT);
    p.compute("a", 1, &there, 0..32);
    d.assert_fetched("a");
    d.assert_has(1, &here, 0..32);
    p.hold("a");
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn the_end_of_an_expected_or_claimed_request_ends_its_handoff_on_the_other_side() {
    let _bounded = bounded();
    let (p, mut d) = two_engines();
    // A producer's, never computed.
    let expect = Expect { request: "a".to_owned(), transfer: id("a") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    p.await_gauge("watched");
    let (code, detail) = (WireCode::Cancelled, "the client left".to_owned());
    let how = EndingKind::Withdrawn { code, detail, held: false };
    let ending = Ending { request: "a".to_owned(), transfer: id("a"), how };
    p.apply(&ConnectorMetadata { endings: vec![ending], ..metadata() });
    assert_eq!(d.fetched("a")[0].0, WireCode::Cancelled);
    // One that ends held, although nothing of it was computed here.
    let expect = Expect { request: "h".to_owned(), transfer: id("h") };
    p.apply(&ConnectorMetadata { expects: vec![expect], ..metadata() });
    d.fetch_request("h", &p.address, &blocks(8, 5), 0..32);
    p.await_gauge("watched");
    p.hold("h");
    p.assert_sent("h");
    assert_eq!(d.fetched("h")[0].0, WireCode::Busy);
    // A consumer's, never fetched.
    d.claim("b", &p.address);
    d.await_gauge("claimed");
    p.compute("b", 1, &blocks(8, 1), 0..32);
    p.hold("b");
    let (transfer, address) = (id("b"), p.address.clone());
    let (code, budget_ms) = (WireCode::Cancelled, BUDGET_MS);
    let free = Free {
        transfer,
        address: address.parse().expect("an address"),
        engine: None,
        code,
        budget_ms,
    };
    d.apply(&ConnectorMetadata { frees: vec![free], ..metadata() });
    d.fetch();
    p.assert_sent("b");
    d.assert_idle();
    // A consumer that dies.
    d.claim("c", &p.address);
    d.await_gauge("claimed");
    p.compute("c", 1, &blocks(8, 1), 0..32);
    p.hold("c");
    drop(d.ranks.pop().expect("a rank"));
    p.assert_sent("c");
    p.assert_idle();
}

#[test]
fn engines_with_different_models_refuse_each_other_and_the_producer_frees_its_blocks() {
    let _bounded = bounded();
    let other = Build::new(2, 1);
    // Values of 2 bytes each, so that the layouts do not differ.
    let others = [
        (Build { model: "mistral", ..other }, "llama", "mistral"),
        (Build { dtype: "float16", ..other }, "bfloat16", "float16"),
    ];
    for (other, own, theirs) in others {
        let p = Engine::new(Build::new(1, 2), "tcp", b"");
        let d = Engine::new(other, "tcp", b"");
        p.compute("a", 1, &blocks(8, 1), 0..32);
        p.hold("a");
        d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
        let failed = d.fetched("a");
        assert_eq!(failed[0].0, WireCode::ModelMismatch);
        assert!(failed[0].1.contains(own) && failed[0].1.contains(theirs), "{failed:?}");
        p.assert_sent("a");
        p.assert_idle();
        d.assert_idle();
    }
}

#[test]
fn a_bad_engine_card_is_reported_after_restarts_and_endings_were_carried_out() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 1), "tcp", b"");
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    let card = p.ranks[0].worker.rank_metadata().to_vec();
    let bad = [vec![b"nonsense".to_vec().into()], vec![card.clone().into(), card.into()]];
    for (request, ranks) in ["a", "b"].into_iter().zip(bad) {
        d.fetch_request(request, &p.address, &blocks(8, 5), 0..32);
        p.compute(request, 1, &blocks(8, 1), 0..12);
        let (code, detail) = (WireCode::Cancelled, "the client left".to_owned());
        let how = EndingKind::Withdrawn { code, detail, held: false };
        let ending = Ending { request: request.to_owned(), transfer: id(request), how };
        let engine = Some(EngineMetadata { id: EngineId(1), ranks });
        let metadata = ConnectorMetadata { engine, endings: vec![ending], ..metadata() };
        let error = p.ranks[0].worker.apply(&metadata.encode()).expect_err("a bad card");
        assert!(matches!(error, WorkerError::Engine(_)), "{error}");
        assert_eq!(d.fetched(request)[0].0, WireCode::Cancelled);
    }
    p.assert_idle();
}

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

#[test]
fn a_producer_that_is_named_in_many_spellings_has_one_session_and_one_engine() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let port = p.address.rsplit_once(':').expect("host:port").1;
    for n in 0..32 {
        let spellings = [
            format!("127.0.0.1:{}{port}", "0".repeat(n)),
            format!("[::ffff:127.0.0.1%{n}]:{port}"),
        ];
        for (way, address) in spellings.iter().enumerate() {
            let request = format!("{n}-{way}");
            p.compute(&request, 1, &blocks(8, 1), 0..32);
            d.fetch_request(&request, address, &blocks(8, 5), 0..32);
            d.assert_fetched(&request);
            p.hold(&request);
            p.assert_sent(&request);
        }
    }
    assert_eq!(p.ranks[0].agent.stats().sessions_accepted, 1);
    assert_eq!((gauge(&d, "peers"), gauge(&d, "engines")), (1, 1));
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn addresses_that_lead_to_one_producer_are_bounded_and_have_a_session_each() {
    let _bounded = bounded();
    let p = Engine::new(Build { listen: "0.0.0.0:0", ..Build::new(1, 1) }, "tcp", b"");
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    let port = p.address.rsplit_once(':').expect("host:port").1;
    for n in 1..=40 {
        let request = format!("r{n}");
        p.compute(&request, n, &blocks(8, 1), 0..32);
        d.fetch_request(&request, &format!("127.0.0.{n}:{port}"), &blocks(8, 5), 0..32);
        d.assert_fetched(&request);
        d.assert_has(n, &blocks(8, 5), 0..32);
        p.hold(&request);
        p.assert_sent(&request);
    }
    let sessions = || p.ranks[0].agent.stats().sessions;
    eventually("the sessions of forgotten addresses have ended", || sessions() <= 8);
    // At most eight addresses of the incarnation.
    assert!(gauge(&d, "peers") <= 8, "{:?}", d.ranks[0].worker.gauges());
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_bootstrap_address_leads_to_the_engine_whose_id_the_request_names() {
    let _bounded = bounded();
    let (p, q) =
        (Engine::new(Build::new(1, 1), "tcp", b""), Engine::new(Build::new(3, 1), "tcp", b""));
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    // A name is looked up in a second step.
    let by_name = q.address.replace("127.0.0.1", "localhost");
    let both = http_server(vec![json_answer(&[(1, &p.address), (3, &by_name)])]);
    let one = http_server(vec![json_answer(&[(1, &p.address)])]);
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let cases =
        [("a", &both, Some(1)), ("b", &both, Some(3)), ("c", &both, Some(3)), ("d", &one, None)];
    for (seed, (request, url, engine)) in (1..).zip(cases) {
        let producer = if engine == Some(3) { &q } else { &p };
        producer.compute(request, seed, &there, 0..32);
        let fetch = fetch(request, url, &here, 0..32);
        let fetches = vec![FetchRequest { engine: engine.map(EngineId), ..fetch }];
        d.apply(&ConnectorMetadata { fetches, ..metadata() });
        d.fetch();
        d.assert_fetched(request);
        d.assert_has(seed, &here, 0..32);
        producer.hold(request);
        producer.assert_sent(request);
    }
    d.assert_idle();
}

#[test]
fn routers_may_send_the_id_of_an_engines_earlier_incarnation_to_decode() {
    let _bounded = bounded();
    let (old, new) =
        (Engine::new(Build::new(1, 1), "tcp", b""), Engine::new(Build::new(3, 1), "tcp", b""));
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    let answers = [&old.address, &new.address].into_iter().zip([1, 3]);
    let url = http_server(answers.map(|(address, id)| json_answer(&[(id, address)])).collect());
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let hand_over = |producer: &Engine, request: &str, seed| {
        producer.compute(request, seed, &there, 0..32);
        let fetch = fetch(request, &url, &here, 0..32);
        let fetch = FetchRequest { engine: Some(EngineId(1)), ..fetch };
        let FetchRequest { request: id, transfer, address, engine, .. } = fetch.clone();
        let claims = vec![Claim { request: id, transfer, address, engine, tokens: 32 }];
        d.apply(&ConnectorMetadata { claims, ..metadata() });
        d.apply(&ConnectorMetadata { fetches: vec![fetch], ..metadata() });
        d.fetch();
        d.assert_fetched(request);
        d.assert_has(seed, &here, 0..32);
        producer.hold(request);
        producer.assert_sent(request);
    };
    hand_over(&old, "a", 1);
    drop(old);
    let engines = || d.ranks[0].worker.gauges().iter().find(|it| it.0 == "engines").map(|it| it.1);
    let until = Instant::now() + PATIENCE / 2;
    while engines() != Some(0) {
        assert!(Instant::now() < until, "the loss of the old engine is not noticed");
        std::thread::sleep(Duration::from_millis(1));
    }
    hand_over(&new, "b", 2);
    hand_over(&new, "c", 3);
}

#[test]
fn a_bootstrap_server_that_names_itself_is_asked_at_most_once_for_each_action() {
    let _bounded = bounded();
    let (_p, d) = two_engines();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let (answer, asked) = (json_answer(&[(7, &url)]), Arc::new(AtomicUsize::new(0)));
    let count = Arc::clone(&asked);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a caller");
            let len = stream.read(&mut [0; 1024]).expect("a question");
            assert!(len > 0);
            count.fetch_add(1, Ordering::Relaxed);
            drop(stream.write_all(answer.as_bytes()));
        }
    });
    let asked = || asked.load(Ordering::Relaxed);

    let of = |request: &str| fetch(request, &url, &blocks(8, 5), 0..32);
    let begin = |fetches, cancels| {
        d.apply(&ConnectorMetadata { fetches, cancels, ..metadata() });
        d.fetch();
    };
    begin(vec![of("fetched")], Vec::new());
    let (code, why) = d.fetched("fetched").remove(0);
    assert!(code == WireCode::Malformed && why.contains("is not host:port"), "{code}: {why}");
    d.assert_idle();
    assert_eq!(asked(), 1);

    let (request, detail) = ("cancelled".to_owned(), String::new());
    let cancel = Cancel { request, code: WireCode::Cancelled, detail };
    begin(vec![of("cancelled")], vec![cancel]);
    assert_eq!(d.fetched("cancelled")[0].0, WireCode::Cancelled);
    d.assert_idle();
    // An answer serves what comes a moment later, too.
    assert!(asked() <= 2);

    d.claim("claimed", &url);
    d.assert_idle();
    let before = asked();
    assert!(before <= 3);

    begin(vec![FetchRequest { budget_ms: 0, ..of("late") }], Vec::new());
    let (code, why) = d.fetched("late").remove(0);
    assert!(matches!(code, WireCode::Deadline | WireCode::Malformed), "{code}: {why}");
    d.assert_idle();
    assert_eq!(asked(), before);
}

#[test]
fn a_bootstrap_server_that_is_of_no_use_is_named_with_what_was_wrong() {
    let _bounded = bounded();
    let (_p, d) = two_engines();
    let endless = format!("HTTP/1.0 200 OK\r\n\r\n{}", " ".repeat(2 << 20));
    let answers = [
        (json_answer(&[(7, "a:1"), (8, "b:1")]), None, "2 engines", WireCode::Malformed),
        (
            json_answer(&[(7, "a:1"), (8, "b:1")]),
            Some(1),
            "none of its 2 engines has the id 000",
            WireCode::StaleIncarnation,
        ),
        ("HTTP/1.0 404 Not Found\r\n\r\n".to_owned(), None, "404", WireCode::Malformed),
        (
            "HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:1/\r\n\r\n".to_owned(),
            None,
            "302",
            WireCode::Malformed,
        ),
        ("HTTP/1.0 200 OK\r\n\r\n[1]".to_owned(), None, "expected a map", WireCode::Malformed),
        ("SSH-2.0".to_owned(), None, "is not HTTP", WireCode::Malformed),
        (endless, None, "more than 1048576 bytes", WireCode::Closed),
        (json_answer(&[(7, "a b:1")]), None, "is not host:port", WireCode::Malformed),
        (json_answer(&[(7, &"a".repeat(300))]), None, "is not host:port", WireCode::Malformed),
    ];
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port");
    let silent = (format!("http://{}", silent.local_addr().expect("bound")), silent);
    let servers = answers
        .into_iter()
        .map(|(answer, engine, what, code)| (http_server(vec![answer]), engine, what, code));
    let others = [
        ("http://127.0.0.1:1".to_owned(), None, "refused", WireCode::Closed),
        (silent.0.clone(), None, "too long", WireCode::Closed),
    ];
    for (url, engine, what, code) in servers.chain(others) {
        let fetch = fetch("a", &url, &blocks(8, 5), 0..32);
        let fetches = vec![FetchRequest { engine: engine.map(EngineId), ..fetch }];
        d.apply(&ConnectorMetadata { fetches, ..metadata() });
        d.fetch();
        let (is, why) = d.fetched("a").remove(0);
        assert!(is == code && why.contains(&url) && why.contains(what), "{is}: {why}");
    }
    d.assert_idle();
}

#[test]
fn boundaries_at_layers_that_are_never_reported_are_announced_with_the_next_one() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let (producer, worker) = (&p.ranks[0], &p.ranks[0].worker);
    assert!((0..4).all(|layer| !worker.wants_layer(layer)), "nothing is handed over");
    d.fetch_request("a", &p.address, &here, 0..32);
    p.apply(&ConnectorMetadata { computes: vec![compute("a", &there)], ..metadata() });
    (0..LAYERS).for_each(|layer| producer.fill(1, &there, 0..32, layer));
    assert_eq!([0, 1, 2, 3].map(|layer| worker.wants_layer(layer)), [true, true, true, false]);
    // Layers 0 and 2 have no attention.
    worker.layer_computed(1, None);
    let until = Instant::now() + PATIENCE / 2;
    while !(0..2).all(|layer| d.ranks[0].has(1, &here, 0, layer)) {
        assert!(Instant::now() < until, "layers 0 and 1 are never fetched");
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!([0, 1, 2, 3].map(|layer| worker.wants_layer(layer)), [false, false, true, false]);
    worker.step_computed(None);
    d.assert_fetched("a");
    d.assert_has(1, &here, 0..32);
}

#[test]
fn a_closed_worker_half_has_ended_all_fetches_and_its_memory_is_read_by_no_peer() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    p.compute("a", 1, &blocks(8, 1), 0..12);
    std::thread::scope(|scope| {
        // Each call returns only when all is over.
        for _ in 0..2 {
            scope.spawn(|| {
                d.ranks[0].worker.close();
                assert!(!d.ranks[0].memory.is_registered());
            });
        }
    });
    assert_eq!(d.fetched("a")[0].0, WireCode::Shutdown);
    d.fetch_request("b", &p.address, &blocks(8, 5), 0..32);
    assert_eq!(d.fetched("b")[0].0, WireCode::Shutdown);
    p.ranks[0].worker.close();
    p.ranks[0].worker.close();
    assert!(!p.ranks[0].memory.is_registered());
}

#[test]
fn a_consumer_with_another_secret_fetches_nothing() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 1), "tcp", b"a secret");
    let d = Engine::new(Build::new(2, 1), "tcp", b"another");
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("a");
    assert_eq!(failed[0].0, WireCode::AuthFailed, "{}", failed[0].1);
    assert!(!format!("{failed:?}").contains("another"));
    d.assert_idle();
}

#[test]
fn a_fetch_from_a_wrong_address_or_another_incarnation_of_the_engine_fails_with_a_reason() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    for address in ["127.0.0.1:1", "no-such-host.invalid:99"] {
        d.fetch_request("a", address, &blocks(8, 5), 0..32);
        let failed = d.fetched("a");
        assert!(!failed[0].0.is_ok() && !failed[0].1.is_empty(), "{address}: {failed:?}");
    }
    let fetch = fetch("b", &p.address, &blocks(8, 5), 0..32);
    let fetches = vec![FetchRequest { engine: Some(EngineId(77)), ..fetch }];
    d.apply(&ConnectorMetadata { fetches, ..metadata() });
    d.fetch();
    assert_eq!(d.fetched("b")[0].0, WireCode::StaleIncarnation);
    d.assert_idle();
}

/// What the other ranks of its engine say of it stays wrong, however often it is learned.
#[test]
fn a_request_to_an_engine_one_rank_of_which_was_restarted_alone_fails() {
    let _bounded = bounded();
    let (port, both) = (KeptPort::new(), Build::new(1, 2));
    let at_port = Build { listen: String::leak(port.address().to_owned()), ..both };
    let (first, second) = (RankOf::new(both, 0, "tcp", b""), RankOf::new(at_port, 1, "tcp", b""));
    let cards = [&first, &second].map(|it| it.worker.rank_metadata().to_vec().into());
    let engine = EngineMetadata { id: EngineId(1), ranks: cards.to_vec() };
    let metadata = ConnectorMetadata { engine: Some(engine), ..metadata() };
    first.worker.apply(&metadata.encode()).expect("valid metadata");
    second.agent.shutdown();
    drop(second);
    let _second = RankOf::new(at_port, 1, "tcp", b"");
    let d = Engine::new(Build::new(2, 1), "tcp", b"");
    d.fetch_request("a", &first.address(), &blocks(8, 5), 0..32);
    let failed = d.fetched("a");
    assert_eq!(failed[0].0, WireCode::StaleIncarnation, "{failed:?}");
    d.assert_idle();
}

#[test]
fn a_fetch_that_is_cancelled_before_its_producer_is_known_frees_the_producer() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    let fetches = vec![fetch("a", &p.address, &blocks(8, 5), 0..32)];
    let cancel = Cancel {
        request: "a".to_owned(),
        code: WireCode::Cancelled,
        detail: "the client is gone".to_owned(),
    };
    d.apply(&ConnectorMetadata { fetches, cancels: vec![cancel], ..metadata() });
    d.fetch();
    let ended = d.fetched("a");
    assert_eq!(ended[0], (WireCode::Cancelled, "the client is gone".to_owned()));
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_handoff_that_is_not_needed_is_freed_on_all_ranks() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 4), "tcp", b"");
    let d = Engine::new(Build::new(2, 2), "tcp", b"");
    p.compute("a", 1, &blocks(8, 1), 0..32);
    p.hold("a");
    let free = Free {
        transfer: id("a"),
        address: p.address.parse().expect("an address"),
        engine: Some(EngineId(1)),
        code: WireCode::NotNeeded,
        budget_ms: BUDGET_MS,
    };
    d.apply(&ConnectorMetadata { frees: vec![free], ..metadata() });
    d.fetch();
    p.assert_sent("a");
    p.assert_idle();
    d.assert_idle();
}

#[test]
fn a_fetch_fails_if_the_producer_has_too_few_tokens_or_a_null_block() {
    let _bounded = bounded();
    let (p, d) = two_engines();
    p.compute("short", 1, &blocks(4, 1), 0..16);
    d.fetch_request("short", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("short");
    assert_eq!(failed[0].0, WireCode::LayoutMismatch);
    assert!(failed[0].1.contains("16 of 32"), "{}", failed[0].1);
    let mut holes = blocks(8, 1);
    holes[3] = NULL_BLOCK;
    p.apply(&ConnectorMetadata { computes: vec![compute("holes", &holes)], ..metadata() });
    p.ranks[0].worker.step_computed(None);
    d.fetch_request("holes", &p.address, &blocks(8, 5), 0..32);
    let failed = d.fetched("holes");
    assert_eq!(failed[0].0, WireCode::LayoutMismatch);
    assert!(failed[0].1.contains("block 3"), "{}", failed[0].1);
    for request in ["short", "holes"] {
        p.hold(request);
        p.assert_sent(request);
    }
    p.assert_idle();
    d.assert_idle();
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

#[test]
fn an_observer_gets_every_byte_read_and_each_end_once() {
    let _bounded = bounded();
    let p = Engine::new(Build::new(1, 1), "local,tcp", b"");
    let d = Engine::new(Build::new(2, 1), "local,tcp", b"");
    let (ours, theirs) = (Arc::new(Calls::default()), Arc::new(Calls::default()));
    d.ranks[0].worker.set_observer(ours.clone());
    p.ranks[0].worker.set_observer(theirs.clone());
    let (there, here) = (blocks(8, 1), blocks(8, 5));
    let began = Instant::now();
    d.fetch_request("a", &p.address, &here, 0..32);
    p.compute("a", 1, &there, 0..20);
    p.compute("a", 1, &there, 20..32);
    d.assert_fetched("a");
    p.hold("a");
    p.assert_sent("a");
    assert_eq!(*ours.0.lock().expect("no panic"), [format!("a received, {}", WireCode::Ok)]);
    assert_eq!(*theirs.0.lock().expect("no panic"), ["a sent"]);
    let parts = ours.1.lock().expect("no panic");
    let bytes: u64 = parts.iter().map(|part| part.bytes).sum();
    assert_eq!(bytes, u64::from(32 * LAYERS * HEADS * CONTENT));
    for part in parts.iter() {
        assert!(began <= part.began && part.began <= part.ended && part.ended <= Instant::now());
    }
    // It gets failures, too.
    d.fetch_request("b", "127.0.0.1:1", &here, 0..32);
    let (code, _) = d.fetched("b").remove(0);
    let calls = ours.0.lock().expect("no panic");
    assert_eq!(calls[1..], [format!("b received, {code}")]);
}

#[test]
fn dropping_a_worker_half_ends_its_handoffs_on_the_other_side() {
    let _bounded = bounded();
    let (mut p, mut d) = two_engines();
    // A producer; its agent stays.
    d.fetch_request("a", &p.address, &blocks(8, 5), 0..32);
    p.compute("a", 1, &blocks(8, 1), 0..12);
    await_consumer(&p);
    let gone = p.ranks.pop().expect("a rank");
    let memory = gone.memory.clone();
    drop(gone);
    assert_eq!(d.fetched("a")[0].0, WireCode::Shutdown);
    d.assert_idle();
    drop(memory);
    // A consumer.
    let p = Engine::new(Build::new(3, 1), "tcp", b"");
    p.compute("b", 1, &blocks(8, 1), 0..16);
    d.fetch_request("b", &p.address, &blocks(8, 5), 0..32);
    await_consumer(&p);
    drop(d.ranks.pop().expect("a rank"));
    let producer = &p.ranks[0].worker;
    assert!(producer.wait(PATIENCE / 2), "the producer never notices");
    let notes = producer.reports().notes.expect("the loss is noted");
    let lost = Notes::decode(&notes).expect("it was just encoded").lost;
    assert_eq!((lost[0].request.as_str(), lost[0].code), ("b", WireCode::Shutdown));
    // Only the request's end is missing.
    p.hold("b");
    p.assert_sent("b");
    p.assert_idle();
}

#[test]
fn a_fetch_from_a_producer_that_is_not_accepted_sends_nothing_and_fails() {
    let _bound = bounded();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("a socket");
    let port = listener.local_addr().expect("an address").port();
    let producers = kvferry_connector::Producers::parse(&["10.0.0.0/8"]).expect("a network");
    let engine = Engine::new(Build::new(2, 1), "tcp", b"");
    let agent = Agent::builder().listen(SocketAddr::from(([127, 0, 0, 1], 0))).start().expect("it");
    let rank = &engine.ranks[0];
    let memory = agent.allocate(rank.memory.len(), Access::READ).expect("memory");
    let shape = Shape {
        layers: LAYERS,
        blocks: BLOCKS,
        heads: HEADS,
        rows: BLOCK_TOKENS,
        content: CONTENT,
        kernel_blocks: 1,
    };
    let heads = Heads::shard(HEADS, 0, 1).expect("divisible");
    let layout = layout(memory.id(), heads, &shape, Packing::Lbhnc);
    let config = WorkerConfig {
        rank: 0,
        model: model("llama"),
        announce: Announce::End,
        limits: Limits::default(),
        producers: Some(producers),
    };
    let worker = Worker::start(&agent, layout, &[memory], config).expect("it starts");
    for (at, address) in [
        format!("127.0.0.1:{port}"),
        format!("localhost:{port}"),
        format!("http://127.0.0.1:{port}"),
        format!("http://localhost:{port}"),
    ]
    .iter()
    .enumerate()
    {
        let request = format!("r{at}");
        let fetches = vec![fetch(&request, address, &[0], 0..4)];
        worker.apply(&ConnectorMetadata { fetches, ..metadata() }.encode()).expect("valid");
        worker.fetch();
        assert!(worker.wait(PATIENCE / 2), "{address} never ends");
        let notes = worker.reports().notes.expect("a fetch has ended");
        let ended = Notes::decode(&notes).expect("it was just encoded").fetched;
        assert_eq!(ended[0].code, WireCode::ForbiddenProducer, "{address}: {}", ended[0].detail);
    }
    assert!(listener.accept().is_err(), "the engine has connected");
}
