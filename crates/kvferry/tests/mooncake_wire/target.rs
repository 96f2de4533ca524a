//! kvferry as target: another implementation writes and reads its memory.

use crate::{LONG, PAGE, agent, builder, bytes_of, filled, mooncake_only, pattern, scattered};
use crate::{handshake, signal, stop, turned};
use kvferry::{Access, Agent, ErrorKind, Options, TransportKind};
use kvferry_testkit::stretched;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const OK: u64 = 0x4d43_5456_0000_0000;
const REJECTED: u64 = OK | 1;
const READ: u8 = 0;
const WRITE: u8 = 1;
const V2: u8 = 0x80;

fn data_port(agent: &Agent) -> u16 {
    let json = handshake::descriptor_of(agent);
    u16::try_from(json["tcp_data_port"].as_u64().expect("a number")).expect("a port")
}

fn connect(agent: &Agent) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", data_port(agent))).expect("listening");
    stream.set_read_timeout(Some(LONG)).expect("a timeout");
    stream
}

fn request(opcode: u8, addr: usize, size: u64) -> Vec<u8> {
    let mut bytes = size.to_le_bytes().to_vec();
    bytes.extend_from_slice(&(addr as u64).to_le_bytes());
    bytes.push(opcode);
    bytes.resize(24, 0xaa);
    bytes
}

fn write_request(opcode: u8, addr: usize, payload: &[u8]) -> Vec<u8> {
    let mut bytes = request(opcode, addr, payload.len() as u64);
    bytes.extend_from_slice(payload);
    bytes
}

fn status(stream: &mut TcpStream) -> u64 {
    let mut bytes = [0; 8];
    stream.read_exact(&mut bytes).expect("a status");
    u64::from_le_bytes(bytes)
}

fn ends(stream: &mut TcpStream) -> bool {
    matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_))
}

fn settles(what: &str, f: impl Fn() -> bool) {
    settles_mut(what, f);
}

fn settles_mut(what: &str, mut f: impl FnMut() -> bool) {
    let until = Instant::now() + LONG;
    while !f() {
        assert!(Instant::now() < until, "{what}");
        thread::sleep(Duration::from_millis(2));
    }
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
fn nothing_lands_after_an_unregister_returned() {
    let agent = agent();
    for _ in 0..4 {
        let region = agent.allocate(1 << 20, Access::READ_WRITE).expect("memory");
        let addr = region.addr();
        let mut stream = connect(&agent);
        let writer = thread::spawn(move || {
            let bytes = write_request(WRITE | V2, addr, &vec![1; 1 << 20]);
            // Until the agent closes the connection.
            while stream.write_all(&bytes).is_ok() {}
        });
        let before = agent.stats().bytes_received;
        settles("nothing arrives", || agent.stats().bytes_received > before);
        agent.unregister(&region).expect("registered");
        region.write_at(0, &vec![9; 1 << 20]).expect("in bounds");
        thread::sleep(Duration::from_millis(2));
        assert!(bytes_of(&region).iter().all(|b| *b == 9), "a byte landed late");
        writer.join().expect("no panic");
    }
}

#[test]
fn garbage_and_idle_connections_on_the_data_port_delay_no_peer() {
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let port = data_port(&agent);
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
        let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("listening");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        stream.write_all(opening).expect("written");
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(answer.len() <= 8, "at most a refusal");
    }
    let start = Instant::now();
    let mut stream = connect(&agent);
    stream
        .write_all(&write_request(WRITE | V2, region.addr(), &pattern(3, PAGE)))
        .expect("written");
    assert_eq!(status(&mut stream), OK);
    assert!(start.elapsed() < stretched(Duration::from_millis(500)));
    idle.clear();
    drop(stream);
    settles("connections are left over", || agent.stats().streams == 0);
    let stats = agent.stats();
    assert_eq!((stats.gates, stats.requests_in_flight), (0, 0));
}

#[test]
fn when_all_places_are_taken_the_oldest_silent_connection_is_closed() {
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let port = data_port(&agent);
    let mut first = TcpStream::connect(("127.0.0.1", port)).expect("listening");
    first.set_read_timeout(Some(LONG)).expect("a timeout");
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
    assert_eq!(agent.stats().streams, 1024);
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
fn two_agents_that_may_speak_nothing_else_speak_mooncake() {
    const BLOCKS: usize = 70_000;
    let (one, other) =
        (mooncake_only().start().expect("a port"), mooncake_only().start().expect("a port"));
    let source = filled(&one, 1, BLOCKS * 512);
    let sink = other.allocate(BLOCKS * 512, Access::READ_WRITE).expect("memory");
    let peer = one.peer(other.advertised()).expect("an address");
    let batch = scattered(&source, sink.addr() as u64, 512, BLOCKS);
    let options = Options { timeout: Some(LONG), ..Options::default() };
    let moved = peer.write(&batch, &options).expect("written");
    assert_eq!((moved.transport, moved.descriptors), (Some(TransportKind::MOONCAKE), BLOCKS));
    assert!(bytes_of(&sink) == turned(&bytes_of(&source), 512));
    source.write_at(0, &vec![0; BLOCKS * 512]).expect("in bounds");
    peer.read(&batch, &options).expect("read");
    assert!(bytes_of(&source) == pattern(1, BLOCKS * 512));

    other.unregister(&sink).expect("registered");
    let e = peer.write(&batch, &options).expect_err("unregistered");
    assert!(matches!(e.kind(), ErrorKind::NotRegistered | ErrorKind::OutOfBounds), "{e}");
    assert!(e.context("descriptor").is_some());
}

#[test]
fn a_target_without_compatibility_has_no_data_port() {
    let agent = builder().mooncake(false).start().expect("a port");
    assert_eq!(handshake::handshake(agent.advertised(), 1, "{}"), None);
}

/// The other process of the test below; not a test itself.
#[test]
fn an_agent_for_another_process() {
    if std::env::var_os("KVFERRY_TEST_TARGET").is_none() {
        return;
    }
    let agent = builder().silence(Duration::from_millis(400)).start().expect("a port");
    let region = agent.allocate(2 * PAGE, Access::READ_WRITE).expect("memory");
    println!("target: {} {}", data_port(&agent), region.addr());
    for line in std::io::stdin().lines() {
        line.expect("a question");
        let written = bytes_of(&region).iter().filter(|b| **b != 0).count();
        println!("target: {written} {}", agent.stats().requests_in_flight);
    }
}

#[test]
fn a_stopped_agent_discards_the_bytes_that_its_kernel_held() {
    let mut child = Command::new(std::env::current_exe().expect("it runs"))
        .args(["--exact", "target::an_agent_for_another_process", "--nocapture"])
        .env("KVFERRY_TEST_TARGET", "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("it runs");
    let mut stdin = child.stdin.take().expect("piped");
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let mut answer = || loop {
        let line = lines.next().expect("the process runs").expect("text");
        if let Some((_, words)) = line.split_once("target: ") {
            let numbers: Vec<usize> = words.split(' ').map(|w| w.parse().expect("one")).collect();
            return (numbers[0], numbers[1]);
        }
    };
    let (port, addr) = answer();
    let mut stream =
        TcpStream::connect(("127.0.0.1", u16::try_from(port).expect("a port"))).expect("listening");
    stream.set_read_timeout(Some(LONG)).expect("a timeout");
    let request = write_request(WRITE | V2, addr, &[1; 2 * PAGE]);
    let (first, second) = request.split_at(24 + PAGE);
    stream.write_all(first).expect("written");
    let mut written = 0;
    settles_mut("the first half is not applied", || {
        writeln!(stdin, "?").expect("the process runs");
        (written, _) = answer();
        written == PAGE
    });
    stop(&child);
    stream.write_all(second).expect("its kernel takes it");
    thread::sleep(Duration::from_secs(1));
    signal(&child, "-CONT");
    assert!(ends(&mut stream), "no status");
    writeln!(stdin, "?").expect("the process runs");
    assert_eq!(answer(), (PAGE, 0), "the second half came too late");
    // A new connection is served.
    let mut stream =
        TcpStream::connect(("127.0.0.1", u16::try_from(port).expect("a port"))).expect("listening");
    stream.write_all(&request).expect("written");
    assert_eq!(status(&mut stream), OK);
    drop(stdin);
    child.wait().expect("it ends");
}
