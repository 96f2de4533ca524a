//! Handoffs between real agents. What killed and stopped processes do to them is tested with whole
//! engines, in `kvferry-refengine`.

mod claimant;
mod claims;

use kvferry::{Access, Agent, Batch, Region, RemoteRegion, Transports};
use kvferry_connector::{
    BlockTable, Event, HandoffId, Limits, Outcome, Progress, Rank, RankError, ReadRequest, Refusal,
    Source,
};
use kvferry_proto::WireCode;
use kvferry_testkit::ports::ClosedPort;
use kvferry_testkit::{PATIENCE, Watchdog};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

const LAYERS: u32 = 4;
const BLOCKS: u32 = 512;
/// Bytes of one layer of one block. A block is one token here.
const BYTES: usize = 4096;
const BUDGET: Duration = Duration::from_secs(120);

fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

/// A rank with an agent and a pool of blocks.
struct Node {
    agent: Agent,
    pool: Region,
    rank: Rank,
    free: Vec<u32>,
    /// Time limit of the node's fetches.
    budget: Duration,
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
        Self::with(transports, &Limits::default())
    }

    fn with(transports: &str, limits: &Limits) -> Self {
        let address = SocketAddr::from(([127, 0, 0, 1], 0));
        let transports = Transports::parse(transports).expect("names");
        let builder = Agent::builder().transports(transports).silence(PATIENCE).listen(address);
        let agent = builder.start().expect("it starts");
        let len = (LAYERS * BLOCKS) as usize * BYTES;
        let pool = agent.allocate(len, Access::READ).expect("memory");
        let rank = Rank::start(&agent, limits).expect("no other message handler");
        // Scattered, as in an engine that has run for a while.
        let free = (0..BLOCKS).map(|block| block * 97 % BLOCKS).collect();
        Self { agent, pool, rank, free, budget: BUDGET }
    }

    /// Its fetches may take as long as a test.
    fn patient(transports: &str, limits: &Limits) -> Self {
        Self { budget: PATIENCE, ..Self::with(transports, limits) }
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
        let source = Source { address: from.parse().expect("an address"), readers: 1 };
        self.rank.fetch(&id(request), &[source], self.budget, Box::new(map)).expect("a new name");
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

    /// Waits until only tombstones and connections are left.
    fn assert_empty(&self) {
        let give_up = Instant::now() + PATIENCE / 2;
        let is_left = |(name, n): &(&str, usize)| *n > 0 && !["tombstones", "peers"].contains(name);
        while self.rank.gauges().iter().any(is_left) {
            assert!(Instant::now() < give_up, "{:?}", self.rank.gauges());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
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
    let source = Source { address: address.parse().expect("an address"), readers: 1 };
    p.rank.offer(&id(3)).expect("a new name");
    d.rank.free(&id(3), &[source], WireCode::NotNeeded, "").expect("a new name");
    assert_eq!(p.produced().code, WireCode::NotNeeded);
    let again = p.rank.offer(&id(3)).expect_err("it has ended");
    assert!(matches!(again, RankError::Refused(Refusal::Ended(WireCode::NotNeeded))));
    p.assert_empty();
    d.assert_empty();
}

#[test]
fn a_producer_gets_its_blocks_back_when_its_consumer_shuts_down() {
    let _bound = bounded();
    let (p, mut d) = (Node::new("tcp"), Node::new("tcp"));
    p.rank.offer(&id(1)).expect("a new name");
    d.fetch(1, 8, &p.address(), &p.pool.remote());
    let give_up = Instant::now() + PATIENCE / 2;
    while !p.rank.gauges().contains(&("watched", 1)) {
        assert!(Instant::now() < give_up, "the consumer never asks");
        std::thread::sleep(Duration::from_millis(2));
    }
    d.agent.shutdown();
    let outcome = p.produced();
    assert_eq!(outcome.code, WireCode::Closed, "{outcome}");
    p.assert_empty();
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
fn a_fetch_from_an_address_without_an_agent_fails() {
    let _bound = bounded();
    let mut d = Node::new("tcp");
    let closed = ClosedPort::new();
    let pool = Node::new("tcp").pool.remote();
    d.fetch(1, 8, closed.address(), &pool);
    assert_eq!(d.consumed().code, WireCode::Closed);
    d.assert_empty();
}

#[test]
fn bytes_and_side_data_of_hundreds_of_handoffs_at_once_are_handed_over_in_both_directions() {
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
    for ((node, from), expected) in [(&a, to_b), (&b, to_a)].into_iter().zip(&mut expected) {
        let mut produced = 0;
        while produced < 100 || !expected.is_empty() {
            match node.rank.wait(BUDGET).expect("all end") {
                Event::Produced { outcome, .. } => {
                    assert_eq!(outcome, Outcome::DONE);
                    produced += 1;
                }
                Event::Consumed { id, outcome, side_data } => {
                    assert_eq!(outcome, Outcome::DONE);
                    let (request, blocks) = expected.remove(&id).expect("once");
                    assert_eq!(side_data, [(from.clone(), vec![request as u8])]);
                    node.assert_holds(request, &blocks);
                }
            }
        }
        node.assert_empty();
    }
}
