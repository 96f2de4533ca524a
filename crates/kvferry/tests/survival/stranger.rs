//! Peers that speak the protocol themselves, byte by byte, and not always well.

use super::*;
use kvferry::ErrorKind;
use kvferry_proto::{
    CloseReason, Flags, Incarnation, MAGIC, Op, RegionId, RequestHeader, Secret, Session,
    SessionConfig, SessionEvent, SessionId, Timestamp, TransferId, WireCode, WireDescriptor,
};
use kvferry_testkit::process::Child;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};

fn clock() -> Timestamp {
    use std::sync::OnceLock;
    static START: OnceLock<Instant> = OnceLock::new();
    let since = START.get_or_init(Instant::now).elapsed();
    Timestamp::from_nanos(1 + since.as_nanos() as u64)
}

fn nonce() -> [u8; 32] {
    Pattern::fresh().bytes(32).try_into().expect("32 bytes")
}

/// Says what a session has to say until something happens to it.
fn drive(session: &mut Session, socket: &mut TcpStream) -> SessionEvent {
    let give_up = Instant::now() + Duration::from_secs(10);
    let mut buffer = [0; 4096];
    loop {
        while let Some(bytes) = session.poll_transmit() {
            if socket.write_all(&bytes).is_err() {
                session.transport_closed(clock());
            }
        }
        if let Some(event) = session.poll_event() {
            return event;
        }
        assert!(Instant::now() < give_up, "the agent says nothing");
        match socket.read(&mut buffer) {
            Ok(0) => session.transport_closed(clock()),
            Ok(n) => session.receive(&buffer[..n], clock()),
            Err(_) => session.handle_timeout(clock()),
        }
    }
}

/// A session that we drive ourselves.
pub(super) struct Stranger {
    session: Session,
    _control: TcpStream,
    address: String,
}

impl Stranger {
    pub(super) fn call(address: &str, config: SessionConfig) -> Result<Self, CloseReason> {
        let mut control = TcpStream::connect(address).expect("the agent listens");
        control.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
        let mut session = Session::initiator(config, None, nonce(), clock());
        match drive(&mut session, &mut control) {
            SessionEvent::Established(_) => {
                Ok(Self { session, _control: control, address: address.to_owned() })
            }
            SessionEvent::Closed(reason) => Err(reason),
            other => panic!("not part of a handshake: {other:?}"),
        }
    }

    /// The first bytes of the next data stream.
    fn stream_hello(&mut self) -> Vec<u8> {
        self.session.stream_hello().expect("established").1
    }

    /// A data stream that the agent has accepted.
    fn stream(&mut self) -> TcpStream {
        let hello = self.stream_hello();
        let (stream, answer) = offer(&self.address, &hello);
        assert!(!answer.is_empty(), "a proper stream was not accepted");
        stream
    }
}

fn config() -> SessionConfig {
    SessionConfig::new(Incarnation(0x57), "stranger")
}

/// Opens a connection with these bytes, and gives what comes back.
fn offer(address: &str, bytes: &[u8]) -> (TcpStream, Vec<u8>) {
    let mut stream = TcpStream::connect(address).expect("the agent listens");
    stream.write_all(bytes).expect("a fresh connection");
    let answer = answer(&mut stream);
    (stream, answer)
}

/// What comes back soon, up to the end of the stream.
fn answer(stream: &mut TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    stream.set_read_timeout(Some(Duration::from_millis(300))).expect("a socket");
    let mut buffer = [0; 4096];
    while let Ok(n) = stream.read(&mut buffer) {
        if n == 0 {
            break;
        }
        answer.extend_from_slice(&buffer[..n]);
        // One message is all that is ever answered.
        stream.set_read_timeout(Some(Duration::from_millis(30))).expect("a socket");
    }
    answer
}

#[test]
fn versions_that_do_not_meet_are_a_clear_error_on_both_sides() {
    let _bound = bounded();
    let agent = agent();
    let mut future = config();
    future.versions = (9, 11);
    let reason =
        Stranger::call(agent.advertised(), future.clone()).err().expect("no version in common");
    assert_eq!(reason.code, WireCode::VersionMismatch, "{reason:?}");
    assert_eq!(agent.stats().handshakes_failed, 1);
    // A wide range that has ours in it is fine.
    let mut wide = config();
    wide.versions = (1, 11);
    Stranger::call(agent.advertised(), wide).map(drop).expect("version 1 in common");

    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let answering = std::thread::spawn(move || {
        let (mut socket, _) = listener.accept().expect("the agent calls");
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
        let mut magic = [0; MAGIC.len()];
        std::thread::sleep(Duration::from_millis(20));
        socket.read_exact(&mut magic).expect("the magic");
        assert_eq!(magic, MAGIC);
        let mut session = Session::acceptor(future, SessionId(1), nonce(), clock());
        drive(&mut session, &mut socket)
    });
    let peer = agent.peer(&address).expect("an address");
    let error = peer.connect(Duration::from_secs(5)).expect_err("no version in common");
    assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error:?}");
    drop(answering.join());
}

#[test]
fn every_stream_proves_the_key_of_its_session() {
    let _bound = bounded();
    let agent = Agent::builder().secret(b"secret").start().expect("an agent");
    let to = agent.allocate(4096, Access::WRITE).expect("memory");
    let mut knows = config();
    knows.secret = Secret::new(b"secret".to_vec());
    let mut stranger = Stranger::call(agent.advertised(), knows).expect("the right secret");
    let streams = agent.stats().streams;
    let proper = stranger.stream_hello();
    for (what, at) in [("mac", proper.len() - 1), ("mac", proper.len() - 20)] {
        let mut forged = proper.clone();
        forged[at] ^= 1;
        let (mut stream, _) = offer(agent.advertised(), &forged);
        drop(stream.write_all(&write_frame(&to.remote(), 0, &[0xAB; 64])));
        assert_eq!(agent.stats().streams, streams, "a stream with a forged {what} was accepted");
    }
    let (_kept, _) = offer(agent.advertised(), &proper);
    eventually(Duration::from_secs(2), "a proper stream is accepted", || {
        agent.stats().streams == streams + 1
    });
    let (mut replayed, _) = offer(agent.advertised(), &proper);
    drop(replayed.write_all(&write_frame(&to.remote(), 0, &[0xAB; 64])));
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(agent.stats().streams, streams + 1, "a replayed stream was accepted");
    assert!(content(&to).iter().all(|byte| *byte == 0), "a forged stream wrote");
}

fn header(descriptors: u32, payload_len: u64) -> RequestHeader {
    RequestHeader {
        op: Op::Write,
        flags: Flags::NONE,
        descriptors,
        notify_len: 0,
        payload_len,
        transfer: TransferId(7),
        budget_ms: 5000,
        head_crc: 0,
    }
}

/// A write as it should be.
fn write_frame(to: &RemoteRegion, offset: u64, payload: &[u8]) -> Vec<u8> {
    let mut table = Vec::new();
    WireDescriptor { offset, len: payload.len() as u32, region: to.id }.write_to(&mut table);
    let head = header(1, payload.len() as u64).seal(&table, &[]);
    [&head[..], &table, payload].concat()
}

/// Frames that are wrong, each in its own way.
fn malformed(to: &RemoteRegion) -> Vec<(&'static str, Vec<u8>)> {
    let good = write_frame(to, 0, &[0xAB; 256]);
    let changed = |at: usize, bytes: &[u8]| {
        let mut frame = good.clone();
        frame[at..at + bytes.len()].copy_from_slice(bytes);
        frame
    };
    let table = |descriptors: &[(u64, u32, u32)]| {
        let mut table = Vec::new();
        for (offset, len, region) in descriptors {
            WireDescriptor { offset: *offset, len: *len, region: RegionId(*region) }
                .write_to(&mut table);
        }
        table
    };
    let frame = |header: RequestHeader, table: &[u8], payload: &[u8]| {
        [&header.seal(table, &[])[..], table, payload].concat()
    };
    let id = to.id.0;
    let mut cases = vec![
        ("nonsense", Pattern::new(5).bytes(4096)),
        ("bad magic", changed(0, b"XXXX")),
        ("bad version", changed(4, &[77])),
        ("unknown operation", changed(5, &[99])),
        ("unknown flags", changed(6, &[0xF0])),
        ("reserved bytes", changed(40, &[1])),
        ("wrong checksum of the head", changed(60, &[1, 2, 3, 4])),
        ("a flipped offset", changed(64, &[0xFF])),
        ("descriptors without end", changed(8, &[0xFF; 4])),
        ("a notification without end", changed(12, &[0xFF; 4])),
        ("payload without end", changed(16, &[0xFF; 8])),
        ("the answer to nothing", [b"KVFr".as_slice(), &good[4..]].concat()),
    ];
    let wrong = [
        ("sums that differ", header(1, 1 << 30), table(&[(0, 64, id)])),
        (
            "payload that is too short for its table",
            header(2, 64),
            table(&[(0, 64, id), (64, 64, id)]),
        ),
        ("sizes that overflow", header(2, 2), table(&[(0, u32::MAX, id), (0, 3, id)])),
        ("a write of nothing", header(0, 0), Vec::new()),
        ("a descriptor of nothing", header(1, 0), table(&[(0, 0, id)])),
    ];
    for (what, header, table) in wrong {
        cases.push((what, frame(header, &table, &[0xAB; 64])));
    }
    let far = table(&[(to.len, 64, id)]);
    cases.push(("a write beyond the region", frame(header(1, 64), &far, &[0xAB; 64])));
    let unknown = table(&[(0, 64, 0xFFFF_FFFE)]);
    cases.push(("a write to no region", frame(header(1, 64), &unknown, &[0xAB; 64])));
    for (what, len) in [("a cut header", 30), ("a cut table", 70), ("half a frame", 200)] {
        cases.push((what, good[..len].to_vec()));
    }
    cases
}

#[test]
fn malformed_frames_cost_their_sender_and_nobody_else() {
    let _bound = bounded();
    let (mut child, address) = Child::with_agent(peer_config());
    let region = child.allocate(64 * KIB, "rw", 2);
    let protected = child.allocate(64 * KIB, "r", 3);
    let agent = agent();
    let from = source(&agent, 64 * KIB, 1);
    let peer = agent.peer(&address).expect("an address");
    peer.write(&batch(&from, &region.remote, 4096), &Options::default()).expect("a healthy write");
    let wanted = child.memory(&region);
    let before = child.resources();
    let mut stranger = Stranger::call(&address, config()).expect("no secret is set");
    {
        let mut stream = stranger.stream();
        stream.write_all(&write_frame(&region.remote, 0, &wanted[..256])).expect("connected");
        assert!(!answer(&mut stream).is_empty(), "a proper frame of the stranger is answered");
    }
    for (what, frame) in malformed(&region.remote) {
        let mut stream = stranger.stream();
        drop(stream.write_all(&frame));
        drop(stream.shutdown(std::net::Shutdown::Write));
        drop(answer(&mut stream));
        let began = Instant::now();
        peer.read(&batch(&from, &region.remote, 4096), &Options::default())
            .unwrap_or_else(|e| panic!("a healthy read after {what}: {e:?}"));
        assert_within(began, UNDELAYED, &format!("a healthy read after {what}"));
        let mut now = child.memory(&region);
        // What a cut frame had paid for may have landed; it is the first 256 bytes only.
        now[..256].copy_from_slice(&wanted[..256]);
        assert!(now == wanted, "{what}: something was written");
    }
    assert!(child.memory(&protected) == Pattern::new(3).bytes(64 * KIB));
    drop(stranger);
    eventually(Duration::from_secs(3), "nothing of the stranger is left", || {
        let stats = child.call(json!({"op": "stats"}));
        stats["requests_in_flight"] == 0 && stats["sessions"] == 1
    });
    let grown = child.resources().memory_bytes.saturating_sub(before.memory_bytes);
    assert!(grown < 32 * MIB as u64, "malformed frames cost {grown} bytes of memory");
}
