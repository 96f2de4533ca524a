//! What a call through C costs beyond the same call in Rust: medians of interleaved rounds.
//!
//! `cargo run --profile dist -p kvferry-capi --example overhead [-- --check]`

use kvferry::{Access, Agent, Batch, Options, Peer, Region, RemoteRegion};
use kvferry_capi::batch::{
    kvferry_batch, kvferry_batch_clear, kvferry_batch_new, kvferry_batch_push, kvferry_range,
};
use kvferry_capi::peer::{kvferry_peer, kvferry_peer_open};
use kvferry_capi::region::{kvferry_region, kvferry_region_allocate, kvferry_remote};
use kvferry_capi::transfer::kvferry_write;
use kvferry_capi::{agent, region};
use std::ffi::CString;
use std::process::ExitCode;
use std::ptr::{null, null_mut};
use std::time::{Duration, Instant};

const ROUNDS: usize = 4_001;
const LEN: u64 = 64;

/// The same agents' memory as Rust and as C see it.
struct Rust {
    _agents: [Agent; 2],
    peer: Peer,
    local: Region,
    remote: RemoteRegion,
}

struct C {
    peer: *mut kvferry_peer,
    local: *mut kvferry_region,
    remote: kvferry_remote,
}

fn in_rust() -> kvferry::Result<Rust> {
    let (here, there) = (Agent::builder().start()?, Agent::builder().start()?);
    let local = here.allocate(1 << 20, Access::NONE)?;
    let remote = there.allocate(1 << 20, Access::WRITE)?.remote();
    let peer = here.peer(there.advertised())?;
    Ok(Rust { _agents: [here, there], peer, local, remote })
}

/// Agents through the C API, which stay until the process ends.
fn in_c(there: &str, remote: &RemoteRegion) -> C {
    let mut c = C { peer: null_mut(), local: null_mut(), remote: remote_of(remote) };
    let mut here = null_mut();
    let address = CString::new(there).expect("an address");
    // SAFETY: every place can be written, every text ends with a NUL.
    let codes = unsafe {
        [
            agent::kvferry_agent_start(null(), &raw mut here, null_mut()),
            kvferry_region_allocate(here, 1 << 20, 0, null(), &raw mut c.local, null_mut()),
            kvferry_peer_open(here, address.as_ptr(), &raw mut c.peer, null_mut()),
        ]
    };
    assert_eq!(codes, [0; 3]);
    c
}

fn remote_of(remote: &RemoteRegion) -> region::kvferry_remote {
    region::kvferry_remote {
        incarnation: remote.incarnation.0.to_le_bytes(),
        address: remote.addr,
        len: remote.len,
        id: remote.id.0,
        access: region::KVFERRY_ACCESS_WRITE,
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

fn timed(call: &mut dyn FnMut()) -> Duration {
    let began = Instant::now();
    call();
    began.elapsed()
}

/// Prints the medians of two calls, and returns what the second one takes longer, in microseconds.
fn compare(what: &str, rust: &mut dyn FnMut(), c: &mut dyn FnMut()) -> f64 {
    let (mut in_rust, mut in_c) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        in_rust.push(timed(rust));
        in_c.push(timed(c));
    }
    let micros = |times| median(times).as_nanos() as f64 / 1e3;
    let (in_rust, in_c) = (micros(in_rust), micros(in_c));
    println!("{what:<44} Rust {in_rust:8.2} µs   C {in_c:8.2} µs   more {:6.2} µs", in_c - in_rust);
    in_c - in_rust
}

fn main() -> ExitCode {
    let rust = in_rust().expect("agents start on loopback");
    let c = in_c(rust.peer.address(), &rust.remote);
    let mut is_within = true;
    for (count, limit) in [(1, 1.0), (1024, 10.0)] {
        let places = || (0..count).map(|i| (i * 2 * LEN % (1 << 19), i * LEN % (1 << 19), LEN));
        let ranges: Vec<_> = places()
            .map(|(local_offset, remote_offset, len)| kvferry_range {
                local_offset,
                remote_offset,
                len,
            })
            .collect();
        let mut batch = Batch::new();
        let mut handle: *mut kvferry_batch = null_mut();
        let push = |handle: *mut kvferry_batch| {
            let (at, count) = (ranges.as_ptr(), ranges.len());
            // SAFETY: the ranges are as many as said, the description is one.
            let code = unsafe {
                kvferry_batch_push(handle, c.local, &raw const c.remote, at, count, null_mut())
            };
            assert_eq!(code, 0);
        };
        // SAFETY: the place can be written.
        assert_eq!(unsafe { kvferry_batch_new(ranges.len(), &raw mut handle, null_mut()) }, 0);
        batch.extend(&rust.local, &rust.remote, ranges_of(&ranges)).expect("within bounds");
        push(handle);
        let mut write_in_rust = || {
            rust.peer.write(&batch, &Options::default()).expect("both agents run");
        };
        let mut write_in_c = || {
            // SAFETY: null is allowed.
            let code = unsafe { kvferry_write(c.peer, handle, null(), null_mut(), null_mut()) };
            assert_eq!(code, 0);
        };
        let what = format!("write of {count} × {LEN} bytes, batch ready");
        let more = compare(&what, &mut write_in_rust, &mut write_in_c);
        is_within &= more <= limit;
        let mut other = Batch::new();
        let mut fill_in_rust = || {
            other.clear();
            other.extend(&rust.local, &rust.remote, ranges_of(&ranges)).expect("within bounds");
            rust.peer.write(&other, &Options::default()).expect("both agents run");
        };
        let mut fill_in_c = || {
            // SAFETY: null is allowed.
            assert_eq!(unsafe { kvferry_batch_clear(handle, null_mut()) }, 0);
            push(handle);
            // SAFETY: null is allowed.
            let code = unsafe { kvferry_write(c.peer, handle, null(), null_mut(), null_mut()) };
            assert_eq!(code, 0);
        };
        let what = format!("batch of {count} filled and written");
        is_within &= compare(&what, &mut fill_in_rust, &mut fill_in_c) <= limit;
    }
    let checks = std::env::args().any(|argument| argument == "--check");
    if checks && !is_within {
        eprintln!("a call through C costs more than 1 µs, or 10 µs with 1 024 ranges");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

fn ranges_of(ranges: &[kvferry_range]) -> impl ExactSizeIterator<Item = (u64, u64, u64)> {
    ranges.iter().map(|range| (range.local_offset, range.remote_offset, range.len))
}
