//! Mooncake's wire protocol: the handshake and the data port, as initiator and target, against another
//! implementation of the protocol (`fake`, written from its description) and against stock
//! Mooncake itself (`stock`).

#![allow(missing_docs, reason = "tests")]

mod fake;
mod handshake;
mod initiator;
mod stock;
mod target;

kvferry_testkit::child_processes!();

use kvferry::{Access, Agent, AgentBuilder, Batch, Region};
use kvferry_testkit::region::content as bytes_of;
use std::time::Duration;

/// The time limit of calls that succeed.
const LONG: Duration = Duration::from_secs(10);
/// The block size of these tests, in bytes.
const PAGE: usize = 4096;

/// An agent that serves and calls Mooncake peers.
fn agent() -> Agent {
    builder().start().expect("loopback has ports")
}

fn builder() -> AgentBuilder {
    Agent::builder().name("test").mooncake(true)
}

/// Bytes that depend on their position and a seed.
fn pattern(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| ((i + usize::from(seed)) % 251) as u8).collect()
}

/// Registered memory of `agent` that holds a pattern.
fn filled(agent: &Agent, seed: u8, len: usize) -> Region {
    let region = agent.allocate(len, Access::READ_WRITE).expect("memory");
    region.write_at(0, &pattern(seed, len)).expect("in bounds");
    region
}

/// Pairs blocks of a region with blocks at an address, the `i`-th with the one before the last
/// `i`-th, so that neither side is contiguous.
fn scattered(local: &Region, remote: u64, block: usize, blocks: usize) -> Batch {
    let mut batch = Batch::with_capacity(blocks);
    for i in 0..blocks {
        let to = remote + ((blocks - 1 - i) * block) as u64;
        batch.push_to_address(local, (i * block) as u64, to, block as u64).expect("in bounds");
    }
    batch
}

/// The bytes at the other side after a [`scattered`] batch.
fn turned(bytes: &[u8], block: usize) -> Vec<u8> {
    bytes.rchunks(block).flatten().copied().collect()
}
