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

use kvferry::{Access, Agent, AgentBuilder, Batch, Region, TransportKind, Transports};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

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

/// An agent that speaks only Mooncake's protocol, also with kvferry agents.
fn mooncake_only() -> AgentBuilder {
    builder().transports(Transports::only(TransportKind::MOONCAKE))
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

fn bytes_of(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.len()];
    region.read_at(0, &mut bytes).expect("in bounds");
    bytes
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

fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().expect("it runs").success());
}

/// Stops a process and waits until each of its threads has stopped.
fn stop(child: &Child) {
    signal(child, "-STOP");
    let threads = format!("/proc/{}/task", child.id());
    let stopped = |thread: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(thread.path().join("stat")).expect("the process runs");
        stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T'))
    };
    let until = Instant::now() + LONG;
    while !std::fs::read_dir(&threads).expect("the process runs").flatten().all(stopped) {
        assert!(Instant::now() < until, "it does not stop");
    }
}
