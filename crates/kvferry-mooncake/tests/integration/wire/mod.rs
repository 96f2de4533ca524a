//! Mooncake's wire protocol: the handshake and the data port, as initiator and target, against another
//! implementation of the protocol (`fake`, written from its description) and against stock
//! Mooncake itself (`stock`).

mod fake;
mod gpu;
mod gpu_suite;
mod handshake;
mod initiator;
mod stock;
mod target;

use kvferry::{Access, After, Agent, AgentBuilder, Batch, Region};
use kvferry_testkit::region::content as bytes_of;
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

/// The time limit of calls that succeed.
const LONG: Duration = Duration::from_secs(60);
/// The longest silence that may be set, the limit of all agents whose test names no other.
const NEVER: Duration = Duration::from_secs(600);
/// The block size of these tests, in bytes.
const PAGE: usize = 4096;

/// An agent that serves and calls Mooncake peers.
fn agent() -> Agent {
    builder().start().expect("loopback has ports")
}

fn builder() -> AgentBuilder {
    kvferry_mooncake::link();
    Agent::builder().name("test").silence(NEVER).setting("mooncake", true)
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
    batch.set_after(After::host());
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

/// Waits until a condition holds.
fn settles(what: &str, condition: impl Fn() -> bool) {
    let until = Instant::now() + LONG;
    while !condition() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A frame of the handshake.
fn frame(kind: u8, json: &str) -> Vec<u8> {
    let mut frame = (json.len() as u64 + 1).to_le_bytes().to_vec();
    frame.push(kind);
    frame.extend_from_slice(json.as_bytes());
    frame
}

/// Answers the handshake that comes on a connection, if one comes.
fn answer(mut stream: TcpStream, answer: impl FnOnce(u8, &str) -> Option<Value>) {
    let mut len = [0; 8];
    if stream.read_exact(&mut len).is_err() {
        return;
    }
    let mut body = vec![0; usize::try_from(u64::from_le_bytes(len)).expect("a length")];
    stream.read_exact(&mut body).expect("a whole frame");
    let json = std::str::from_utf8(&body[1..]).expect("text");
    let Some(json) = answer(body[0], json) else { return };
    let json = json.to_string();
    stream.write_all(&frame(body[0], &json)).expect("room");
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.read(&mut [0; 1]);
}
