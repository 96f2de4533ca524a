//! Handoffs between real agents, in one process and between processes.

use kvferry::{Access, Agent, Batch, Region, RemoteRegion, Transports};
use kvferry_connector::{
    BlockTable, Event, HandoffId, Limits, Outcome, Progress, Rank, RankError, ReadRequest, Refusal,
    Source,
};
use kvferry_proto::WireCode;
use kvferry_testkit::{Watchdog, stretched};
use std::collections::BTreeMap;
use std::io::{BufRead, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LAYERS: u32 = 4;
const BLOCKS: u32 = 512;
/// Bytes of one layer of one block. A block is one token here.
const BYTES: usize = 4096;
const BUDGET: Duration = Duration::from_secs(30);
const SILENCE: Duration = Duration::from_secs(1);

fn bounded() -> Watchdog {
    Watchdog::new(Duration::from_secs(60))
}

/// A rank with an agent and a pool of blocks.
struct Node {
    agent: Agent,
    pool: Region,
    rank: Rank,
    free: Vec<u32>,
}

fn id(n: usize) -> HandoffId {
    HandoffId::new(&format!("xfer-{n}")).expect("short")
}

/// The KV of a token.
fn kv(request: usize, token: u32, layer: u32) -> Vec<u8> {
    let seed = (request as u64) << 32 | u64::from(token) << 8 | u64::from(layer);
    let mut bytes = vec![0; BYTES];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

fn at(block: u32, layer: u32) -> u64 {
    u64::from(layer * BLOCKS + block) * BYTES as u64
}

impl Node {
    fn new(transports: &str) -> Self {
        Self::listening(transports, "127.0.0.1:0")
    }

    fn listening(transports: &str, address: &str) -> Self {
        let transports = Transports::parse(transports).expect("names");
        let builder = Agent::builder().transports(transports).silence(SILENCE);
        let agent = builder
            .listen(address.parse::<SocketAddr>().expect("an address"))
            .start()
            .expect("it starts");
        let len = (LAYERS * BLOCKS) as usize * BYTES;
        let pool = agent.allocate(len, Access::READ).expect("memory");
        let rank =
            Rank::start(&agent, &Limits::default()).expect("the agent has no message handler");
        // Scattered, as in an engine that has run for a while.
        let free = (0..BLOCKS).map(|block| block * 97 % BLOCKS).collect();
        Self { agent, pool, rank, free }
    }

    fn address(&self) -> String {
        self.agent.advertised().to_owned()
    }

    fn blocks(&mut self, tokens: u32) -> Vec<u32> {
        self.free.split_off(self.free.len() - tokens as usize)
    }

    fn compute(&self, request: usize, blocks: &[u32]) {
        for (token, &block) in (0..).zip(blocks) {
            for layer in 0..LAYERS {
                let place = at(block, layer) as usize;
                self.pool.write_at(place, &kv(request, token, layer)).expect("inside");
            }
        }
    }

    /// Computes a request, then offers it.
    fn offer(&mut self, request: usize, tokens: u32) -> Vec<u32> {
        let blocks = self.blocks(tokens);
        self.compute(request, &blocks);
        self.rank.offer(&id(request)).expect("a new name");
        let table = vec![BlockTable::new(0, blocks.clone())];
        let side = Some(vec![request as u8]);
        let progress = Progress::tokens(tokens);
        self.rank.complete(&id(request), table, progress, side).expect("offered");
        blocks
    }

    fn fetch(&mut self, request: usize, tokens: u32, from: &str, pool: &RemoteRegion) -> Vec<u32> {
        let blocks = self.blocks(tokens);
        let (mine, here, there) = (blocks.clone(), self.pool.clone(), pool.clone());
        let map = move |read: &ReadRequest<'_>| {
            let mut batch = Batch::new();
            for part in read.slice.from.until(&read.slice.to, LAYERS) {
                for token in part.tokens {
                    let block = read.tables[0].block(token).expect("it is ready");
                    for layer in part.layers.clone() {
                        let near = at(mine[token as usize], layer);
                        batch
                            .push(&here, near, &there, at(block, layer), BYTES as u64)
                            .expect("inside both");
                    }
                }
            }
            Ok(batch)
        };
        let source = Source { address: from.to_owned(), readers: 1 };
        self.rank.fetch(&id(request), &[source], BUDGET, Box::new(map)).expect("a new name");
        blocks
    }

    fn assert_holds(&self, request: usize, blocks: &[u32]) {
        let mut bytes = vec![0; BYTES];
        for (token, &block) in (0..).zip(blocks) {
            for layer in 0..LAYERS {
                self.pool.read_at(at(block, layer) as usize, &mut bytes).expect("inside");
                assert!(bytes == kv(request, token, layer), "{request} {token} {layer}");
            }
        }
    }

    fn produced(&self) -> Outcome {
        match self.rank.wait(BUDGET) {
            Some(Event::Produced { outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn consumed(&self) -> Outcome {
        match self.rank.wait(BUDGET) {
            Some(Event::Consumed { outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    /// Asserts that only tombstones and connections are left.
    fn assert_empty(&self) {
        let give_up = Instant::now() + stretched(Duration::from_secs(5));
        loop {
            let mut gauges = self.rank.gauges();
            gauges.retain(|(name, count)| *count > 0 && !["tombstones", "peers"].contains(name));
            if gauges.is_empty() {
                return;
            }
            assert!(Instant::now() < give_up, "{gauges:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn hand_over(transports: &str) {
    let _bound = bounded();
    let (mut p, mut d) = (Node::new(transports), Node::new(transports));
    let (address, pool) = (p.address(), p.pool.remote());
    for (request, tokens) in [(1, 1), (2, 7), (3, 100)] {
        let fetch_first = request == 2;
        let early = fetch_first.then(|| d.fetch(request, tokens, &address, &pool));
        p.offer(request, tokens);
        let blocks = early.unwrap_or_else(|| d.fetch(request, tokens, &address, &pool));
        let Some(Event::Consumed { outcome, side_data, .. }) = d.rank.wait(BUDGET) else {
            panic!("the fetch does not end");
        };
        assert_eq!(outcome, Outcome::DONE);
        assert_eq!(side_data, [(address.clone(), vec![request as u8])]);
        d.assert_holds(request, &blocks);
        assert_eq!(p.produced(), Outcome::DONE);
    }
    p.assert_empty();
    d.assert_empty();
}

#[test]
fn bytes_and_side_data_are_handed_over_by_tcp_in_either_order() {
    hand_over("tcp");
}

#[test]
fn bytes_and_side_data_are_handed_over_within_a_host_in_either_order() {
    hand_over("local");
}

#[test]
fn layers_and_chunks_are_read_while_later_ones_are_computed() {
    let _bound = bounded();
    let (mut p, mut d) = (Node::new("local"), Node::new("local"));
    let blocks = p.blocks(64);
    p.rank.offer(&id(1)).expect("a new name");
    let mine = d.fetch(1, 64, &p.address(), &p.pool.remote());
    for chunk in 0..4_u32 {
        let tokens = chunk * 16..(chunk + 1) * 16;
        let added = blocks[chunk as usize * 16..][..16].to_vec();
        p.rank
            .advance(
                &id(1),
                vec![BlockTable::new(tokens.start, added)],
                Progress::tokens(tokens.start),
            )
            .expect("under way");
        for layer in 0..LAYERS {
            for token in tokens.clone() {
                let place = at(blocks[token as usize], layer) as usize;
                p.pool.write_at(place, &kv(1, token, layer)).expect("inside");
            }
            let ready = match layer + 1 {
                LAYERS => Progress::tokens(tokens.end),
                layers => Progress::tokens(tokens.start).and(layers, tokens.end),
            };
            p.rank.advance(&id(1), Vec::new(), ready).expect("under way");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
    p.rank.complete(&id(1), Vec::new(), Progress::tokens(64), None).expect("under way");
    assert_eq!(d.consumed(), Outcome::DONE);
    d.assert_holds(1, &mine);
}

#[test]
fn after_a_restart_the_consumer_gets_the_new_blocks() {
    let _bound = bounded();
    let (mut p, mut d) = (Node::new("tcp"), Node::new("tcp"));
    p.rank.offer(&id(1)).expect("a new name");
    let mine = d.fetch(1, 8, &p.address(), &p.pool.remote());
    let blocks = p.blocks(8);
    p.compute(99, &blocks);
    let table = |blocks: &[u32]| vec![BlockTable::new(0, blocks.to_vec())];
    p.rank.advance(&id(1), table(&blocks), Progress::tokens(8)).expect("under way");
    p.rank.restart(&id(1)).expect("under way");
    let blocks = p.blocks(8);
    p.compute(1, &blocks);
    p.rank.complete(&id(1), table(&blocks), Progress::tokens(8), None).expect("under way");
    assert_eq!(d.consumed(), Outcome::DONE);
    d.assert_holds(1, &mine);
}

#[test]
fn either_side_can_end_a_handoff_and_the_other_gets_the_reason() {
    let _bound = bounded();
    let (p, mut d) = (Node::new("tcp"), Node::new("tcp"));
    let (address, pool) = (p.address(), p.pool.remote());
    p.rank.offer(&id(1)).expect("a new name");
    d.fetch(1, 8, &address, &pool);
    p.rank.withdraw(&id(1), WireCode::Cancelled, "the client left").expect("under way");
    assert_eq!(p.produced().code, WireCode::Cancelled);
    assert_eq!(d.consumed().detail, format!("the client left (peer {address})"));
    p.rank.offer(&id(2)).expect("a new name");
    d.fetch(2, 8, &address, &pool);
    d.rank.cancel(&id(2), WireCode::Cancelled, "no longer needed").expect("under way");
    assert_eq!(d.consumed().code, WireCode::Cancelled);
    let detail = p.produced().detail;
    assert_eq!(detail, format!("no longer needed (peer {})", d.address()));
    let source = Source { address: address.clone(), readers: 1 };
    p.rank.offer(&id(3)).expect("a new name");
    d.rank.free(&id(3), &[source], WireCode::NotNeeded, "").expect("a new name");
    assert_eq!(p.produced().code, WireCode::NotNeeded);
    let again = p.rank.offer(&id(3)).expect_err("it has ended");
    assert!(matches!(again, RankError::Refused(Refusal::Ended(WireCode::NotNeeded))));
    p.assert_empty();
    d.assert_empty();
}

#[test]
fn a_producer_without_a_connection_is_told_that_its_offer_is_not_needed() {
    let _bound = bounded();
    let (p, d) = (Node::new("tcp"), Node::new("tcp"));
    p.rank.offer(&id(1)).expect("a new name");
    let source = Source { address: p.address(), readers: 1 };
    d.rank.free(&id(1), &[source], WireCode::NotNeeded, "").expect("a new name");
    assert_eq!(p.produced().code, WireCode::NotNeeded);
    p.assert_empty();
    d.assert_empty();
}

#[test]
fn a_peer_may_have_two_addresses() {
    let _bound = bounded();
    let (mut p, mut d) = (Node::new("tcp"), Node::new("tcp"));
    let (address, pool) = (p.address(), p.pool.remote());
    let other = address.replace("127.0.0.1", "localhost");
    for request in [1, 2] {
        p.offer(request, 8);
    }
    let blocks = [d.fetch(1, 8, &address, &pool), d.fetch(2, 8, &other, &pool)];
    for _ in &blocks {
        assert_eq!(d.consumed(), Outcome::DONE);
        assert_eq!(p.produced(), Outcome::DONE);
    }
    d.assert_holds(1, &blocks[0]);
    d.assert_holds(2, &blocks[1]);
    p.assert_empty();
    d.assert_empty();
}

#[test]
fn a_fetch_from_an_address_without_an_agent_fails_within_a_second() {
    let _bound = bounded();
    let mut d = Node::new("tcp");
    let gone = Node::new("tcp");
    let (address, pool) = (gone.address(), gone.pool.remote());
    gone.agent.shutdown();
    drop(gone);
    let began = Instant::now();
    d.fetch(1, 8, &address, &pool);
    assert_eq!(d.consumed().code, WireCode::Closed);
    assert!(began.elapsed() < stretched(Duration::from_secs(1)));
    d.assert_empty();
}

#[test]
fn hundreds_of_handoffs_at_once_in_both_directions_succeed() {
    let _bound = bounded();
    let (mut a, mut b) = (Node::new("local,tcp"), Node::new("local,tcp"));
    let (to_a, to_b) = (a.address(), b.address());
    let (pool_a, pool_b) = (a.pool.remote(), b.pool.remote());
    let mut expected = [BTreeMap::new(), BTreeMap::new()];
    for request in 0..100 {
        // Both are producers and consumers of each other.
        a.offer(request, 2);
        expected[1].insert(id(request), (request, b.fetch(request, 2, &to_a, &pool_a)));
        let other = 1000 + request;
        expected[0].insert(id(other), (other, a.fetch(other, 2, &to_b, &pool_b)));
        b.offer(other, 2);
    }
    for (node, expected) in [&a, &b].into_iter().zip(&mut expected) {
        let mut produced = 0;
        while produced < 100 || !expected.is_empty() {
            match node.rank.wait(BUDGET).expect("all end") {
                Event::Produced { outcome, .. } => {
                    assert_eq!(outcome, Outcome::DONE);
                    produced += 1;
                }
                Event::Consumed { id, outcome, .. } => {
                    assert_eq!(outcome, Outcome::DONE);
                    let (request, blocks) = expected.remove(&id).expect("once");
                    node.assert_holds(request, &blocks);
                }
            }
        }
        node.assert_empty();
    }
}

// ---- processes ----

/// A producer in its own process: this program, started with `ROLE` in the environment.
struct Producer {
    process: Child,
    address: String,
    pool: RemoteRegion,
}

const ROLE: &str = "KVFERRY_TEST_PRODUCER";

#[test]
fn is_a_producer_if_the_environment_says_so() {
    let Ok(address) = std::env::var(ROLE) else { return };
    let mut node = Node::listening("local,tcp", &address);
    // Complete ones, and one that never completes.
    for request in 1..10 {
        node.offer(request, 8);
    }
    node.rank.offer(&id(50)).expect("a new name");
    let blocks = node.blocks(4);
    node.compute(50, &blocks);
    let table = vec![BlockTable::new(0, blocks)];
    node.rank.advance(&id(50), table, Progress::tokens(4)).expect("under way");
    let pool: Vec<String> =
        node.pool.remote().to_bytes().iter().map(|b| format!("{b:02x}")).collect();
    println!("\nready {} {}", node.address(), pool.concat());
    std::io::stdout().flush().expect("the parent reads");
    std::thread::sleep(Duration::from_secs(120));
}

impl Producer {
    fn start(address: &str) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut process = Command::new(program)
            .args(["is_a_producer_if_the_environment_says_so", "--exact", "--nocapture"])
            .env(ROLE, address)
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let out = std::io::BufReader::new(process.stdout.take().expect("piped"));
        let line =
            out.lines().map(|line| line.expect("text")).find(|line| line.starts_with("ready "));
        let line = line.expect("it gets ready");
        let mut words = line.split(' ').skip(1);
        let address = words.next().expect("an address").to_owned();
        let hex = words.next().expect("a region");
        let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let pool = RemoteRegion::from_bytes(&bytes).expect("a region");
        Self { process, address, pool }
    }

    fn signal(&self, signal: &str) {
        let pid = self.process.id().to_string();
        let done = Command::new("kill").args([signal, &pid]).status().expect("kill is there");
        assert!(done.success());
    }
}

impl Drop for Producer {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

#[test]
fn a_killed_producer_ends_the_handoff_and_its_next_life_serves() {
    let _bound = bounded();
    let mut d = Node::new("local,tcp");
    let mut p = Producer::start("127.0.0.1:0");
    let blocks = d.fetch(1, 8, &p.address, &p.pool);
    assert_eq!(d.consumed(), Outcome::DONE);
    d.assert_holds(1, &blocks);
    // This one waits for the rest.
    d.fetch(50, 8, &p.address, &p.pool);
    std::thread::sleep(Duration::from_millis(100));
    let began = Instant::now();
    p.signal("-KILL");
    let outcome = d.consumed();
    assert!(began.elapsed() < stretched(Duration::from_secs(1) * 3), "{:?}", began.elapsed());
    assert_eq!(outcome.code, WireCode::Closed, "{outcome}");
    let address = p.address.clone();
    drop(p);
    p = Producer::start(&address);
    let blocks = d.fetch(2, 8, &address, &p.pool);
    assert_eq!(d.consumed(), Outcome::DONE);
    d.assert_holds(2, &blocks);
    d.assert_empty();
}

#[test]
fn a_stopped_producer_ends_the_handoff_after_the_silence_limit() {
    let _bound = bounded();
    let mut d = Node::new("tcp");
    let p = Producer::start("127.0.0.1:0");
    d.fetch(50, 8, &p.address, &p.pool);
    std::thread::sleep(Duration::from_millis(100));
    p.signal("-STOP");
    let began = Instant::now();
    let outcome = d.consumed();
    assert!(began.elapsed() < stretched(3 * SILENCE), "{:?}", began.elapsed());
    assert_eq!(outcome.code, WireCode::Silent, "{outcome}");
    p.signal("-CONT");
    let blocks = d.fetch(3, 8, &p.address, &p.pool);
    assert_eq!(d.consumed(), Outcome::DONE);
    d.assert_holds(3, &blocks);
}

#[test]
fn a_producer_gets_its_blocks_back_when_its_consumer_shuts_down() {
    let _bound = bounded();
    let p = Node::new("tcp");
    let mut d = Node::new("tcp");
    p.rank.offer(&id(1)).expect("a new name");
    d.fetch(1, 8, &p.address(), &p.pool.remote());
    let give_up = Instant::now() + stretched(Duration::from_secs(5));
    while p.rank.gauges().iter().any(|(name, n)| *name == "watched" && *n == 0)
        && !p.rank.gauges().contains(&("watched", 1))
    {
        assert!(Instant::now() < give_up, "the consumer never asks");
        std::thread::sleep(Duration::from_millis(2));
    }
    d.agent.shutdown();
    let outcome = p.produced();
    assert_eq!(outcome.code, WireCode::Closed, "{outcome}");
    p.assert_empty();
}
