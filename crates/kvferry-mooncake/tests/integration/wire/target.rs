//! kvferry as target: another implementation writes and reads its memory.

use crate::wire::{LONG, NEVER, PAGE, agent, bytes_of, filled, frame, handshake, pattern, settles};
use kvferry::{Access, Agent};
use kvferry_testkit::eventually;
use kvferry_testkit::pattern::MARKER;
use kvferry_testkit::process::Child;
use kvferry_testkit::user::{as_another_user, connect_by_loopback_device, kernel_tells_users};
use serde_json::{Value, json};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

pub(crate) const OK: u64 = 0x4d43_5456_0000_0000;
const REJECTED: u64 = OK | 1;
pub(crate) const READ: u8 = 0;
pub(crate) const WRITE: u8 = 1;
pub(crate) const V2: u8 = 0x80;

/// Shakes hands as a peer of version 1.
fn data_port(address: &str) -> u16 {
    data_port_in(&handshake::descriptor_of(address))
}

fn data_port_in(json: &Value) -> u16 {
    u16::try_from(json["tcp_data_port"].as_u64().expect("a number")).expect("a port")
}

fn connect_to(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("listening");
    stream.set_read_timeout(Some(LONG)).expect("a timeout");
    stream
}

/// A connection to the data port of a descriptor.
pub(crate) fn connect_at(descriptor: &Value) -> TcpStream {
    connect_to(data_port_in(descriptor))
}

fn connect(agent: &Agent) -> TcpStream {
    connect_to(data_port(agent.advertised()))
}

pub(crate) fn request(opcode: u8, addr: usize, size: u64) -> Vec<u8> {
    let mut bytes = size.to_le_bytes().to_vec();
    bytes.extend_from_slice(&(addr as u64).to_le_bytes());
    bytes.push(opcode);
    bytes.resize(24, 0xaa);
    bytes
}

pub(crate) fn write_request(opcode: u8, addr: usize, payload: &[u8]) -> Vec<u8> {
    let mut bytes = request(opcode, addr, payload.len() as u64);
    bytes.extend_from_slice(payload);
    bytes
}

pub(crate) fn status(stream: &mut TcpStream) -> u64 {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes).expect("a status");
    u64::from_le_bytes(bytes)
}

fn ends(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_))
}

#[test]
fn requests_of_both_versions_are_served_in_order_on_one_connection() {
    let agent = agent();
    let region = filled(&agent, 9, 4 * PAGE);
    let at = region.addr();
    let mut stream = connect(&agent);
    stream.write_all(&write_request(WRITE | V2, at, &pattern(1, PAGE))).expect("written");
    assert_eq!(status(&mut stream), OK);
    // A write of version 1 has no answer; the next read sees the bytes.
    stream.write_all(&write_request(WRITE, at + PAGE, &pattern(2, PAGE))).expect("written");
    stream.write_all(&request(READ, at + PAGE, PAGE as u64)).expect("written");
    let mut bytes = vec![0; PAGE];
    stream.read_exact(&mut bytes).expect("payload");
    assert!(bytes == pattern(2, PAGE));
    stream.write_all(&request(READ | V2, at, PAGE as u64)).expect("written");
    assert_eq!(status(&mut stream), OK);
    stream.read_exact(&mut bytes).expect("payload");
    assert!(bytes == pattern(1, PAGE));
    // An unknown opcode is a read.
    stream.write_all(&request(5 | V2, at, 8)).expect("written");
    assert_eq!(status(&mut stream), OK);
    stream.read_exact(&mut bytes[..8]).expect("payload");
    let stats = agent.stats();
    assert_eq!((stats.requests_served, stats.requests_refused), (5, 0));
    assert_eq!(stats.bytes_received, 2 * PAGE as u64);
    assert_eq!(stats.bytes_served, 2 * PAGE as u64 + 8);
    drop(stream);
    settles("the connection is left over", || agent.stats().streams == 0);
    assert_eq!(agent.stats().requests_in_flight, 0);
}

#[test]
fn pipelined_and_fragmented_requests_are_served_alike() {
    const N: usize = 300;
    let agent = agent();
    let region = agent.allocate(N * PAGE, Access::READ_WRITE).expect("memory");
    let mut all = Vec::new();
    for i in 0..N {
        let seed = u8::try_from(i % 200).expect("small");
        all.extend(write_request(WRITE | V2, region.addr() + i * PAGE, &pattern(seed, PAGE)));
    }
    for chunk in [all.len(), 10_007, 777] {
        region.write_at(0, &vec![0; N * PAGE]).expect("in bounds");
        let mut stream = connect(&agent);
        let mut reader = stream.try_clone().expect("descriptors are there");
        let answers = thread::spawn(move || (0..N).all(|_| status(&mut reader) == OK));
        for part in all.chunks(chunk) {
            stream.write_all(part).expect("written");
        }
        assert!(answers.join().expect("no panic"), "in parts of {chunk}");
        for (i, page) in bytes_of(&region).chunks(PAGE).enumerate() {
            assert!(page == pattern(u8::try_from(i % 200).expect("small"), PAGE), "page {i}");
        }
    }
}

#[test]
fn requests_out_of_range_are_refused_and_end_the_connection() {
    let agent = agent();
    let region = filled(&agent, 1, 2 * PAGE);
    let neighbours = [filled(&agent, 1, PAGE), filled(&agent, 1, PAGE)];
    let readable = agent.allocate(PAGE, Access::READ).expect("memory");
    let writable = agent.allocate(PAGE, Access::WRITE).expect("memory");
    let hidden = agent.allocate(PAGE, Access::NONE).expect("memory");
    let (at, len) = (region.addr(), PAGE as u64);
    let mut refused = 0;
    for (opcode, addr, size) in [
        (WRITE, at + PAGE + 1, len),
        (WRITE, at, 2 * len + 1),
        (READ, at + 2 * PAGE - 1, 2),
        (WRITE, 8, len),
        (READ, 0, 1),
        (WRITE, at, u64::MAX),
        (WRITE, at, 1 << 33),
        (READ, usize::MAX, 1),
        (WRITE, usize::MAX - 3, 8),
        (WRITE, readable.addr(), len),
        (READ, writable.addr(), len),
        (READ, hidden.addr(), len),
        (WRITE, neighbours[0].addr(), 2 * len + 1),
    ] {
        let mut stream = connect(&agent);
        stream.write_all(&request(opcode | V2, addr, size)).expect("written");
        // The payload follows: an initiator does not wait for permission.
        let _ = stream.write_all(&[7; 3 * PAGE]);
        assert_eq!(status(&mut stream), REJECTED, "{opcode} {addr:#x} {size}");
        assert!(ends(&mut stream));
        refused += 1;
        let mut stream = connect(&agent);
        stream.write_all(&request(opcode, addr, size)).expect("written");
        assert!(ends(&mut stream), "a refusal without a status closes the connection");
        refused += 1;
    }
    assert_eq!(agent.stats().requests_refused, refused);
    assert!(bytes_of(&region) == pattern(1, 2 * PAGE), "nothing was written");
    let mut stream = connect(&agent);
    stream.write_all(&write_request(WRITE | V2, at, &pattern(3, PAGE))).expect("written");
    assert_eq!(status(&mut stream), OK, "others are served");
}

#[test]
fn garbage_and_idle_connections_on_the_data_port_delay_no_peer() {
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let port = data_port(agent.advertised());
    let mut idle: Vec<_> = (0..200)
        .map(|i| {
            let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("listening");
            let said = write_request(WRITE | V2, region.addr(), &[1; 100]);
            stream.write_all(&said[..[0, 3, 24, 60][i % 4]]).expect("written");
            stream
        })
        .collect();
    for opening in [
        &b"GET / HTTP/1.1\r\nHost: kvferry\r\n\r\n"[..],
        &[0xff; 100],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a TLS hello of a kind",
    ] {
        let mut stream = connect_to(port);
        stream.write_all(opening).expect("written");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() <= 8, "at most a refusal");
    }
    let mut stream = connect(&agent);
    let request = write_request(WRITE | V2, region.addr(), &pattern(3, PAGE));
    stream.write_all(&request).expect("written");
    assert_eq!(status(&mut stream), OK);
    idle.clear();
    drop(stream);
    // A connection gives its gauges back one after the other.
    settles("connections are left over", || {
        let stats = agent.stats();
        (stats.streams, stats.gates, stats.requests_in_flight) == (0, 0, 0)
    });
}

#[test]
fn when_all_places_are_taken_the_oldest_silent_connection_is_closed() {
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let port = data_port(agent.advertised());
    let mut first = connect_to(port);
    let idle: Vec<_> =
        (0..1023).map_while(|_| TcpStream::connect(("127.0.0.1", port)).ok()).collect();
    if idle.len() < 1023 {
        return; // This machine lends a process fewer descriptors than there are places.
    }
    settles("they are not all accepted", || agent.stats().streams == 1024);
    let mut stream = connect(&agent);
    stream
        .write_all(&write_request(WRITE | V2, region.addr(), &pattern(3, PAGE)))
        .expect("written");
    assert_eq!(status(&mut stream), OK);
    assert!(ends(&mut first), "the oldest");
    settles("the oldest alone has left", || agent.stats().streams == 1024);
}

#[test]
fn when_all_places_are_taken_the_connection_that_has_been_idle_for_longest_is_closed() {
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let port = data_port(agent.advertised());
    let request = write_request(WRITE | V2, region.addr(), &[3; 8]);
    let mut idle = Vec::new();
    for n in 0..1024 {
        let Ok(mut stream) = TcpStream::connect(("127.0.0.1", port)) else {
            return; // This machine lends a process fewer descriptors than there are places.
        };
        stream.write_all(&request).expect("written");
        assert_eq!(status(&mut stream), OK, "request {n}");
        idle.push(stream);
    }
    // The first one is used again, so that the second has been idle for longest.
    idle[0].write_all(&request).expect("written");
    assert_eq!(status(&mut idle[0]), OK);
    settles("the first is idle again", || agent.stats().requests_in_flight == 0);
    let mut stream = connect(&agent);
    stream.write_all(&request).expect("written");
    assert_eq!(status(&mut stream), OK, "a place for a newcomer");
    assert!(ends(&mut idle[1]), "the second");
    idle[0].write_all(&request).expect("written");
    assert_eq!(status(&mut idle[0]), OK, "the first stays");
}

#[test]
fn an_agent_shuts_down_under_connections() {
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let mut idle = connect(&agent);
    let mut busy = connect(&agent);
    busy.write_all(&write_request(WRITE | V2, region.addr(), &[1; PAGE])[..100]).expect("written");
    settles("they are not served", || agent.stats().requests_in_flight == 1);
    agent.shutdown();
    assert!(ends(&mut idle) && ends(&mut busy));
    let stats = agent.stats();
    assert_eq!((stats.streams, stats.requests_in_flight, stats.gates), (0, 0, 0));
}

#[test]
fn a_stopped_agent_discards_the_bytes_that_its_kernel_held() {
    // A target that a loaded machine stops for some seconds is not one that was suspended.
    let config = json!({"name": "target", "mooncake": true, "silence_ms": 6000});
    let (mut child, address) = Child::with_agent(config);
    let region = child.allocate(2 * PAGE, "rw", 1);
    let port = data_port(&address);
    let addr = usize::try_from(region.addr).expect("an address");
    let request = write_request(WRITE | V2, addr, &[MARKER; 2 * PAGE]);
    let (first, second) = request.split_at(24 + PAGE);
    let mut stream = connect_to(port);
    stream.write_all(first).expect("written");
    let written = |child: &Child| child.memory(&region).iter().filter(|b| **b == MARKER).count();
    settles("the first half is not applied", || written(&child) == PAGE);
    child.stop();
    stream.write_all(second).expect("its kernel takes it");
    thread::sleep(Duration::from_secs(8));
    child.resume();
    assert!(ends(&mut stream), "no status");
    eventually("the request has ended", || child.stats()["requests_in_flight"] == 0);
    assert_eq!(written(&child), PAGE, "the second half came too late");
    // A new connection is served.
    let mut stream = connect_to(port);
    stream.write_all(&request).expect("written");
    assert_eq!(status(&mut stream), OK);
}

#[test]
fn i11_another_user_of_the_host_reads_no_memory_by_the_data_port() {
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let port = data_port(agent.advertised());
    let read = request(READ | V2, region.addr(), 64);
    let bytes_within = |mut stream: TcpStream| {
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        // The agent may have reset the connection.
        let _ = stream.write_all(&read);
        let _ = stream.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    };
    let stranger = as_another_user("another user at the data port", || connect_to(port));
    let Some(stranger) = stranger else { return };
    let answer = bytes_within(stranger);
    assert!(answer.is_empty(), "{answer:x?}");
    // The kernel looks for a socket that is bound to a device on that device alone.
    let at = SocketAddr::from(([127, 0, 0, 1], port));
    let hidden = as_another_user("another user at a device", || connect_by_loopback_device(at));
    let hidden_is_refused = match hidden.expect("as before") {
        Ok((stranger, _listening)) => {
            let _ = (&stranger).write_all(&write_request(WRITE, region.addr(), &[9; 64]));
            let answer = bytes_within(stranger);
            assert!(answer.is_empty(), "{answer:x?}");
            1
        }
        Err(e) if e.kind() == ErrorKind::PermissionDenied => 0,
        Err(e) => panic!("{e}"),
    };
    assert!(bytes_of(&region) == pattern(1, PAGE), "written by another user");
    assert_eq!(agent.stats().bytes_served, 0);
    // A notification that is complete, of a process that has closed its socket.
    let address = agent.local_addr();
    let notify = frame(2, r#"{"name":"layer","notify_msg":"done"}"#);
    as_another_user("another user that closes", || {
        TcpStream::connect(address).and_then(|mut s| s.write_all(&notify)).expect("it listens");
    });
    settles("the connection is refused", || {
        agent.stats().handshakes_failed == 2 + hidden_is_refused
    });
    assert!(agent.notifications().is_empty());
    // The same by the agent's own user.
    let mut own = connect_to(port);
    own.write_all(&read).expect("a connection");
    assert_eq!(status(&mut own), OK);
}

/// A target that is never long enough stopped to discard what its kernel held.
fn patient_target() -> (Child, String) {
    let silence = u64::try_from(NEVER.as_millis()).expect("some minutes");
    Child::with_agent(json!({"name": "target", "mooncake": true, "silence_ms": silence}))
}

/// Sends requests on a connection each, and closes them before the agent can accept one.
fn accepted_late(child: &Child, port: u16, requests: &[Vec<u8>]) {
    child.stop();
    for request in requests {
        connect_to(port).write_all(request).expect("its kernel takes it");
    }
    child.resume();
}

#[test]
fn what_a_peer_of_version_1_has_written_counts_also_where_its_connection_is_accepted_late() {
    let (mut child, address) = patient_target();
    let region = child.allocate(4 * PAGE, "rw", 1);
    let before = child.memory(&region);
    let at = usize::try_from(region.addr).expect("an address");
    let port = data_port(&address);
    accepted_late(&child, port, &[write_request(WRITE, at, &pattern(3, PAGE))]);
    settles("the write is lost", || child.memory(&region)[..PAGE] == pattern(3, PAGE));
    if !kernel_tells_users() {
        println!("SKIPPED: closed connections of other users: this kernel does not tell users");
        return;
    }
    // Another user may have sent them, and perhaps lives: nothing but such a write is carried out.
    let others = [
        write_request(WRITE | V2, at + PAGE, &pattern(4, PAGE)),
        request(READ, at, PAGE as u64),
        request(READ | V2, at, PAGE as u64),
    ];
    accepted_late(&child, port, &others);
    eventually("they are refused", || child.stats()["requests_refused"] == others.len());
    let stats = child.stats();
    assert_eq!((&stats["requests_served"], &stats["bytes_served"]), (&json!(1), &json!(0)));
    assert!(child.memory(&region)[PAGE..] == before[PAGE..]);
}

#[test]
fn i11_a_closed_connection_is_refused_where_no_peer_of_version_1_has_shaken_hands() {
    if !kernel_tells_users() {
        println!("SKIPPED: closed connections: this kernel does not tell users");
        return;
    }
    let (mut child, address) = patient_target();
    let region = child.allocate(PAGE, "rw", 1);
    let before = child.memory(&region);
    let at = usize::try_from(region.addr).expect("an address");
    let port = data_port_in(&handshake::descriptor_for_version_2(&address));
    accepted_late(&child, port, &[write_request(WRITE, at, &pattern(3, PAGE))]);
    eventually("the connection is refused", || child.stats()["handshakes_failed"] == 1);
    assert!(child.memory(&region) == before);
}
