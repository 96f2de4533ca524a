//! Faults: peers in separate processes that are killed, stopped or cut off, unauthenticated
//! connections, forged messages.
//!
//! These tests show *that* a call ends, and by what: the kind of the error tells a reset from silence
//! and from a deadline. *When* it ends is asserted by the tests of `kvferry-proto`, in virtual time.

mod channels;
mod death;
mod hostile;
mod limits;
mod local;
mod network;
mod relay;
mod resources;
mod secrets;
mod silence;
mod unauthenticated;

use kvferry::{Access, Agent, Batch, ErrorKind, Options, Peer, Region, RemoteRegion, Transports};
use kvferry_testkit::pattern::{MARKER, Pattern};
use kvferry_testkit::ports::KeptPort;
use kvferry_testkit::process::{Child, ChildRegion};
use kvferry_testkit::region::{batch, content, filled, moved, refill};
use kvferry_testkit::{PATIENCE, Watchdog, Way, eventually};
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

/// Makes each function a test per transport that moves the bytes.
macro_rules! over {
    ($transport:ident: $($test:ident),+ $(,)?) => {
        mod $transport {
            $(
                #[test]
                fn $test() {
                    super::$test(stringify!($transport));
                }
            )+
        }
    };
}
pub(crate) use over;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// The silence limit of the tests about silence: the default of 3 s would make them slow. A machine that runs nothing of
/// a process for three quarters of it ends that process's sessions.
const SILENCE: Duration = Duration::from_secs(2);

/// The longest silence that may be set, longer than any test runs: what ends before is not ended by it. The limit of
/// all agents whose test names no other.
const NEVER: Duration = Duration::from_secs(600);

/// Attempts at what a process can spoil that does not run for a part of the silence limit: its sessions end. A real fault
/// fails each attempt.
const TRIES: usize = 6;

/// The result of the first attempt of [`TRIES`] that succeeds.
fn in_one_try<T>(mut attempt: impl FnMut() -> Result<T, String>) -> T {
    let mut failures = Vec::new();
    while failures.len() < TRIES {
        match attempt() {
            Ok(done) => return done,
            Err(failure) => failures.push(failure),
        }
    }
    panic!("each attempt has failed: {failures:#?}");
}

/// Aborts a test that hangs.
fn bounded() -> Watchdog {
    Watchdog::new(PATIENCE)
}

/// Looks until three looks in a row, 50 ms apart, have seen the same. A thread that does not run meanwhile may change it
/// later.
fn comes_to_rest<T: PartialEq>(mut look: impl FnMut() -> T) -> T {
    let (mut seen, mut times) = (look(), 1);
    eventually("it comes to rest", || {
        thread::sleep(Duration::from_millis(50));
        let now = look();
        times = if now == seen { times + 1 } else { 1 };
        seen = now;
        times == 3
    });
    seen
}

/// An agent that uses tcp only: `local` has no connection to cut.
fn agent() -> Agent {
    agent_over("tcp")
}

fn agent_over(transports: &str) -> Agent {
    agent_with(transports, NEVER)
}

fn agent_with(transports: &str, silence: Duration) -> Agent {
    let transports = Transports::parse(transports).expect("names");
    let builder = Agent::builder().name("survivor").silence(silence).transports(transports);
    builder.start().expect("an agent starts")
}

/// The settings of a peer in a separate process.
fn peer_config() -> Value {
    peer_config_over("tcp")
}

fn peer_config_over(transports: &str) -> Value {
    peer_config_with(transports, NEVER)
}

fn peer_config_with(transports: &str, silence: Duration) -> Value {
    let silence = silence.as_millis() as u64;
    json!({"name": "peer", "silence_ms": silence, "transports": transports})
}

/// Memory of this process, filled with the pattern of this seed.
fn source(agent: &Agent, len: usize, seed: u64) -> Region {
    filled(agent, len, Access::NONE, seed)
}

/// An agent here, a peer in another process, and memory on both sides.
struct Pair {
    agent: Agent,
    /// Holds the pattern of seed 1.
    from: Region,
    child: Child,
    address: String,
    /// Holds the pattern of seed 2. Peers may read and write it.
    region: ChildRegion,
    peer: Peer,
}

/// A pair over tcp, `len` bytes on each side.
fn pair(len: usize) -> Pair {
    pair_within(len, NEVER)
}

/// The same, with this silence limit on both sides.
fn pair_within(len: usize, silence: Duration) -> Pair {
    let (mut child, address) = Child::with_agent(peer_config_with("tcp", silence));
    let region = child.allocate(len, "rw", 2);
    pair_with(agent_with("tcp", silence), child, address, region)
}

fn pair_with(agent: Agent, child: Child, address: String, region: ChildRegion) -> Pair {
    let from = source(&agent, region.len, 1);
    let peer = agent.peer(&address).expect("an address");
    Pair { agent, from, child, address, region, peer }
}

fn within(timeout: Duration) -> Options<'static> {
    Options { timeout: Some(timeout), ..Options::default() }
}

/// A command for a child: blocks of one size between its region and a remote one.
fn command(
    op: &str,
    peer: &str,
    local: &ChildRegion,
    remote: &RemoteRegion,
    block: usize,
) -> Value {
    let count = local.len.min(remote.len as usize) / block;
    json!({
        "op": op, "peer": peer, "region": local.id, "remote": remote.to_bytes(),
        "block": block, "count": count,
    })
}
