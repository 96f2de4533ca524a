//! Raw peers: the tests write the protocol's bytes themselves, malformed ones included.

mod frames;

use super::*;
use frames::{header, write_frame};
use kvferry_proto::admission::SPOKEN_GRACE;
use kvferry_proto::local::{PROBE_LEN, PROOF};
use kvferry_proto::message::{Ping, Refused, encode};
use kvferry_proto::{
    CAPABILITY_LOCAL, CloseReason, Flags, Incarnation, Limits, LocalPacket, MAGIC, Message,
    Notification, Op, Opener, Opening, RegionId, RequestHeader, Secret, Session, SessionConfig,
    SessionEvent, SessionId, Timestamp, TransferId, WireCode, WireDescriptor,
};
use kvferry_sys::shared::Shared;
use kvferry_sys::unix::Channel;
use kvferry_testkit::user::as_another_user;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn clock() -> Timestamp {
    use std::sync::OnceLock;
    static START: OnceLock<Instant> = OnceLock::new();
    let since = START.get_or_init(Instant::now).elapsed();
    Timestamp::from_nanos(1 + since.as_nanos() as u64)
}

fn nonce() -> [u8; 32] {
    Pattern::fresh().bytes(32).try_into().expect("32 bytes")
}

/// Sends a session's messages and reads answers until the session has an event.
fn drive(session: &mut Session, socket: &mut TcpStream) -> SessionEvent {
    let give_up = Instant::now() + PATIENCE / 2;
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
        assert!(Instant::now() < give_up, "the agent sends nothing");
        match socket.read(&mut buffer) {
            Ok(0) => session.transport_closed(clock()),
            Ok(n) => session.receive(&buffer[..n], clock()),
            Err(_) => session.handle_timeout(clock()),
        }
    }
}

fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    (listener, address)
}

/// Accepts the control connection of an agent, and reads up to its first message.
fn accept(listener: &TcpListener) -> TcpStream {
    let (mut socket, _) = listener.accept().expect("the agent calls");
    let mut magic = [0; MAGIC.len()];
    socket.read_exact(&mut magic).expect("the magic");
    assert_eq!(magic, MAGIC);
    socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
    socket
}

/// A session that the test drives.
pub(super) struct RawPeer {
    session: Session,
    control: TcpStream,
    address: String,
}

impl RawPeer {
    pub(super) fn call(address: &str, mut config: SessionConfig) -> Result<Self, CloseReason> {
        config.handshake_timeout = PATIENCE;
        let mut control = TcpStream::connect(address).expect("the agent listens");
        control.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
        let mut session = Session::initiator(config, None, nonce(), clock());
        match drive(&mut session, &mut control) {
            SessionEvent::Established(_) => {
                Ok(Self { session, control, address: address.to_owned() })
            }
            SessionEvent::Closed(reason) => Err(reason),
            other => panic!("not part of a handshake: {other:?}"),
        }
    }

    /// Sends a heartbeat that says that this side waits for something. Returns when it was answered.
    pub(super) fn waits_for_something(&mut self) {
        self.session.set_active(true, clock());
        let ping_at = self.session.next_timeout().expect("a heartbeat runs");
        self.session.handle_timeout(ping_at);
        while let Some(bytes) = self.session.poll_transmit() {
            self.control.write_all(&bytes).expect("a session");
        }
        assert!(!answered(&mut self.control).is_empty(), "no answer to a heartbeat");
    }

    /// Why the agent has ended the session.
    pub(super) fn ended(&mut self) -> CloseReason {
        match drive(&mut self.session, &mut self.control) {
            SessionEvent::Closed(reason) => reason,
            other => panic!("not the end of a session: {other:?}"),
        }
    }

    /// The first bytes of the next data stream.
    fn stream_hello(&mut self) -> Vec<u8> {
        self.session.stream_hello().expect("established").1
    }

    /// A data stream that the agent has accepted.
    fn stream(&mut self) -> TcpStream {
        let hello = self.stream_hello();
        let mut stream = call(&self.address, &hello);
        assert!(!answered(&mut stream).is_empty(), "a proper stream was not accepted");
        stream
    }
}

/// A connection of a peer that begins a handshake, and does not go on.
pub(super) fn begun(address: &str, config: SessionConfig) -> TcpStream {
    let mut session = Session::initiator(config, None, nonce(), clock());
    let hello: Vec<_> = std::iter::from_fn(|| session.poll_transmit()).flatten().collect();
    let mut stream = call(address, &hello);
    assert!(!answered(&mut stream).is_empty(), "a hello was not answered");
    stream
}

pub(super) fn config() -> SessionConfig {
    let config = SessionConfig::new(Incarnation(0x57), "raw_peer");
    SessionConfig { handshake_timeout: PATIENCE, ..config }
}

/// Opens a connection with these bytes. Returns it and the answer.
fn offer(address: &str, bytes: &[u8]) -> (TcpStream, Vec<u8>) {
    let mut stream = call(address, bytes);
    let answer = answer(&mut stream);
    (stream, answer)
}

/// Opens a connection with these bytes.
fn call(address: &str, bytes: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(address).expect("the agent listens");
    stream.write_all(bytes).expect("a fresh connection");
    stream
}

/// The answer that has to come. It is empty if the stream ends.
pub(crate) fn answered(stream: &mut TcpStream) -> Vec<u8> {
    answer_within(PATIENCE / 2, stream)
}

/// The bytes that arrive within 300 ms, or until the end of the stream: for where no answer may come.
fn answer(stream: &mut TcpStream) -> Vec<u8> {
    answer_within(Duration::from_millis(300), stream)
}

fn answer_within(limit: Duration, stream: &mut TcpStream) -> Vec<u8> {
    let mut answer = Vec::new();
    stream.set_read_timeout(Some(limit)).expect("a socket");
    let mut buffer = [0; 4096];
    while let Ok(n) = stream.read(&mut buffer) {
        if n == 0 {
            break;
        }
        answer.extend_from_slice(&buffer[..n]);
        // The answer is one message.
        stream.set_read_timeout(Some(Duration::from_millis(30))).expect("a socket");
    }
    answer
}

#[test]
fn disjoint_version_ranges_are_a_clear_error_on_both_sides() {
    let _bound = bounded();
    let agent = agent();
    let mut future = config();
    future.versions = (9, 11);
    let reason =
        RawPeer::call(agent.advertised(), future.clone()).err().expect("no version in common");
    assert_eq!(reason.code, WireCode::VersionMismatch, "{reason:?}");
    assert_eq!(agent.stats().handshakes_failed, 1);
    // A wider range that contains our versions works.
    let mut wide = config();
    wide.versions = (1, 11);
    RawPeer::call(agent.advertised(), wide).map(drop).expect("version 1 in common");

    let (listener, address) = listen();
    let answering = thread::spawn(move || {
        let mut socket = accept(&listener);
        let mut session = Session::acceptor(future, SessionId(1), nonce(), clock());
        drive(&mut session, &mut socket)
    });
    let peer = agent.peer(&address).expect("an address");
    let error = peer.connect(PATIENCE).expect_err("no version in common");
    assert_eq!(error.kind(), ErrorKind::VersionMismatch, "{error:?}");
    drop(answering.join());
}

/// A peer that announces `local` but does not listen on its local name, like a peer on another host.
struct ElsewherePeer {
    address: String,
    ended: Arc<AtomicBool>,
    thread: thread::JoinHandle<Session>,
}

impl ElsewherePeer {
    fn start(incarnation: Incarnation) -> Self {
        let (listener, address) = listen();
        let ended = Arc::new(AtomicBool::new(false));
        let until = Arc::clone(&ended);
        let thread = thread::spawn(move || {
            let mut socket = accept(&listener);
            let mut config = SessionConfig::new(incarnation, "elsewhere");
            config.capabilities = CAPABILITY_LOCAL;
            config.handshake_timeout = PATIENCE;
            let mut session = Session::acceptor(config, SessionId(1), nonce(), clock());
            let mut buffer = [0; 4096];
            while !until.load(Ordering::Relaxed) {
                while let Some(event) = session.poll_event() {
                    if let SessionEvent::Request { id, .. } = event {
                        session.respond(id, WireCode::Ok, Vec::new());
                    }
                }
                while let Some(bytes) = session.poll_transmit() {
                    socket.write_all(&bytes).expect("the agent reads");
                }
                match socket.read(&mut buffer) {
                    Ok(0) => break,
                    Ok(n) => session.receive(&buffer[..n], clock()),
                    Err(_) => session.handle_timeout(clock()),
                }
            }
            session
        });
        Self { address, ended, thread }
    }

    /// Closes the connection and returns the session.
    fn end(self) -> Session {
        self.ended.store(true, Ordering::Relaxed);
        self.thread.join().expect("no panic")
    }
}

/// Listens on the abstract name of the agent with this incarnation.
fn bind_local_name(incarnation: Incarnation) -> Channel {
    Channel::listen(format!("kvferry/{incarnation}").as_bytes()).expect("a free name")
}

fn any_incarnation() -> Incarnation {
    Incarnation(u128::from_le_bytes(nonce()[..16].try_into().expect("16 of 32 bytes")))
}

/// Connects an agent to a peer whose local name `impostor` holds. Asserts that the agent goes over
/// tcp at once and says why. Returns the agent, the peer, and the agent's connection to the impostor.
fn connect_beside(
    impostor: &Channel,
    incarnation: Incarnation,
    reason: &str,
) -> (Agent, ElsewherePeer, Channel) {
    let elsewhere = ElsewherePeer::start(incarnation);
    let agent = agent_over("local,tcp");
    let peer = agent.peer(&elsewhere.address).expect("an address");
    let summary = peer.connect(PATIENCE).expect("over tcp");
    let fallback = summary.fallback.expect("a reason");
    assert!(fallback.contains(reason), "{fallback}");
    (agent, elsewhere, impostor.accept().expect("the agent called"))
}

#[test]
fn a_process_that_listens_on_a_peers_local_name_gets_no_proof_for_tcp_and_causes_no_wait() {
    let _bound = bounded();
    let incarnation = any_incarnation();
    let impostor = bind_local_name(incarnation);
    let (_agent, elsewhere, connection) = connect_beside(&impostor, incarnation, "is not the peer");
    let mut buffer = [0; 4096];
    let len = connection.recv(&mut buffer).expect("a hello").len;
    let Ok(Some(Opening::Stream { hello, .. })) = Opener::new().feed(&buffer[MAGIC.len()..len])
    else {
        panic!("not a hello: {:x?}", &buffer[..len]);
    };
    let mut session = elsewhere.end();
    assert_eq!(session.verify_stream(&hello), Err(WireCode::AuthFailed), "it opens a stream");
    assert_eq!(session.verify_proof(PROOF, &hello), Ok(()));
}

#[test]
fn a_process_of_another_user_that_listens_on_a_peers_local_name_is_sent_nothing() {
    let _bound = bounded();
    if kvferry_sys::unix::user() != 0 {
        println!("SKIPPED: a listener of another user: only root can be one");
        return;
    }
    let incarnation = any_incarnation();
    let listening = thread::spawn(move || {
        let keep = -1;
        // SAFETY: changes the user of this thread alone, which ends after it made a socket.
        let rc = unsafe { libc::syscall(libc::SYS_setresuid, keep, 65_534, keep) };
        assert_eq!(rc, 0, "root becomes another user");
        bind_local_name(incarnation)
    });
    let impostor = listening.join().expect("a free name");
    let (_agent, elsewhere, connection) = connect_beside(&impostor, incarnation, "another user");
    let packet = connection.recv(&mut [0; 4096]);
    assert!(
        packet
            .as_ref()
            .map_or_else(|e| e.kind() == std::io::ErrorKind::ConnectionReset, |p| p.len == 0),
        "{packet:?}"
    );
    drop(elsewhere.end());
}

#[test]
fn bytes_of_no_known_protocol_are_no_failed_handshake_whoever_sends_them() {
    let _bound = bounded();
    let agent = Agent::builder().silence(NEVER).start().expect("an agent starts");
    let request = b"GET / HTTP/1.1\r\n\r\n";
    let connect = || call(agent.advertised(), request);
    let stranger = as_another_user("a probe of another user", connect);
    for mut stream in [Some(connect()), stranger].into_iter().flatten() {
        assert!(answered(&mut stream).is_empty());
        assert_eq!(agent.stats().handshakes_failed, 0);
    }
    eventually("the connections hold no place", || agent.stats().handshakes_pending == 0);
}

#[test]
fn i11_a_data_stream_sends_nothing_to_another_user_who_has_taken_the_peers_port() {
    let _bound = bounded();
    let (listener, address) = listen();
    let config = SessionConfig {
        handshake_timeout: PATIENCE,
        ..SessionConfig::new(Incarnation(0x59), "leaves its port")
    };
    let (closed, is_closed) = std::sync::mpsc::channel();
    let (end, is_over) = std::sync::mpsc::channel::<()>();
    let serving = thread::spawn(move || {
        let mut socket = accept(&listener);
        let mut session = Session::acceptor(config, SessionId(1), nonce(), clock());
        let event = drive(&mut session, &mut socket);
        assert!(matches!(event, SessionEvent::Established(_)), "{event:?}");
        drop(listener);
        closed.send(()).expect("the test waits");
        let mut buffer = [0; 4096];
        while is_over.try_recv().is_err() {
            while let Some(bytes) = session.poll_transmit() {
                drop(socket.write_all(&bytes));
            }
            if let Ok(n @ 1..) = socket.read(&mut buffer) {
                session.receive(&buffer[..n], clock());
            }
        }
    });
    let agent = agent();
    let peer = agent.peer(&address).expect("an address");
    peer.connect(PATIENCE / 2).expect("an honest peer");
    is_closed.recv().expect("the peer has closed its port");
    let take = || TcpListener::bind(&address).expect("the port is free");
    if let Some(taken) = as_another_user("another user that takes a port", take) {
        let (from, len) = (source(&agent, 4096, 1), 4096);
        let (incarnation, id) = (Incarnation(0x59), RegionId(1));
        let remote = RemoteRegion { incarnation, id, addr: 4096, len, access: Access::WRITE };
        let write = batch(&from, &remote, 4096);
        // A stream that began to open while the peer closed its port was reset, or refused if it was closed already.
        let early = [ErrorKind::PeerReset, ErrorKind::Unreachable];
        let refused = loop {
            let write = peer.write(&write, &within(PATIENCE / 4));
            let refused = write.expect_err("it is another user's");
            if !early.contains(&refused.kind()) {
                break refused;
            }
        };
        assert_eq!(refused.kind(), ErrorKind::AccessDenied, "{refused}");
        // All connections that the writes have made.
        taken.set_nonblocking(true).expect("a socket");
        let accepted: Vec<_> = std::iter::from_fn(|| taken.accept().ok()).collect();
        assert!(!accepted.is_empty(), "it was called");
        for (mut socket, _) in accepted {
            socket.set_read_timeout(Some(PATIENCE / 2)).expect("a socket");
            let mut sent = Vec::new();
            // The end of the connection, or its reset.
            let _ = socket.read_to_end(&mut sent);
            assert!(sent.is_empty(), "{sent:x?}");
        }
    }
    end.send(()).expect("it serves");
    serving.join().expect("it served");
}

/// The next packet of an agent's local socket.
fn packet(channel: &Channel) -> (LocalPacket, Vec<OwnedFd>) {
    let give_up = Instant::now() + PATIENCE / 2;
    let mut buffer = [0; 256];
    loop {
        match channel.recv(&mut buffer) {
            Ok(packet) => {
                let bytes = &buffer[..packet.len];
                return (LocalPacket::decode(bytes).expect("a packet"), packet.fds);
            }
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock, "{e}"),
        }
        assert!(Instant::now() < give_up, "the agent sends nothing");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Attaches to an agent of this host as a process that can't use `process_vm_readv`.
fn attach(raw_peer: &mut RawPeer, agent: &Agent) -> Channel {
    let name = format!("kvferry/{}", agent.incarnation());
    let channel = Channel::connect(name.as_bytes()).expect("the agent listens");
    let page = Shared::create("page", 64 * 256).expect("memory");
    page.word(0).store(u64::from_le_bytes(*b"kvfgate\x01"), Ordering::SeqCst);
    let (_, hello) = raw_peer.session.prove(PROOF).expect("established");
    channel.send(&hello, &[page.as_fd()]).expect("room");
    let (offer, _) = packet(&channel);
    assert!(matches!(offer, LocalPacket::Offer { code: WireCode::Ok, .. }), "{offer:?}");
    let probe = LocalPacket::Probe { code: WireCode::Unsupported, bytes: [0; PROBE_LEN] };
    channel.send(&probe.encode(), &[]).expect("room");
    let (attached, _) = packet(&channel);
    assert_eq!(attached, LocalPacket::Attached { code: WireCode::Ok });
    channel
}

#[test]
fn i11_a_process_of_this_host_maps_memory_as_its_access_says() {
    let _bound = bounded();
    let agent = agent_over("local,tcp");
    let mut raw_peer = RawPeer::call(agent.advertised(), config()).expect("no secret is set");
    let channel = attach(&mut raw_peer, &agent);
    for access in [Access::NONE, Access::READ, Access::WRITE, Access::READ_WRITE] {
        let region = agent.allocate(MIB, access).expect("memory");
        refill(&region, 1);
        channel.send(&LocalPacket::Map { region: region.id() }.encode(), &[]).expect("room");
        let (LocalPacket::Mapped { code, .. }, mut fds) = packet(&channel) else {
            panic!("not an answer");
        };
        if access == Access::NONE {
            assert_eq!((code, fds.len()), (WireCode::UnknownRegion, 0), "{access}");
            continue;
        }
        assert_eq!(code, WireCode::Ok, "{access}");
        let fd = fds.pop().expect("its memory");
        assert_eq!(
            Shared::open(fd.try_clone().expect("one more"), MIB, true).is_ok(),
            access.write
        );
        // Through another descriptor of the same memory.
        let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
        if let Ok(mut file) = std::fs::OpenOptions::new().read(true).write(true).open(path) {
            assert_eq!(file.write_all(b"x").is_ok(), access.write, "{access}");
            assert_eq!(Shared::open(file.into(), MIB, true).is_ok(), access.write, "{access}");
        }
        Shared::open(fd, MIB, false).expect("readable");
        let expected = Pattern::new(1).bytes(MIB);
        assert_eq!(content(&region)[1..], expected[1..], "{access}");
        agent.unregister(&region).expect("registered");
        assert_eq!(packet(&channel).0, LocalPacket::Unmapped { region: region.id() });
    }
}

#[test]
fn six_hundred_handshakes_do_not_push_each_other_out() {
    let _bound = bounded();
    let tcp = Transports::parse("tcp").expect("a name");
    // A long limit, so that a slow machine can serve all of them. There are 256 places.
    let builder = Agent::builder().silence(NEVER).transports(tcp);
    let agent = builder.start().expect("an agent");
    let call = |number: u128| {
        let mut socket = TcpStream::connect(agent.advertised()).expect("the agent listens");
        socket.set_read_timeout(Some(Duration::from_millis(50))).expect("a socket");
        let mut config = SessionConfig::new(Incarnation(1 + number), "one of many");
        config.handshake_timeout = PATIENCE;
        let mut session = Session::initiator(config, None, nonce(), clock());
        while let Some(bytes) = session.poll_transmit() {
            socket.write_all(&bytes).expect("a fresh connection");
        }
        (session, socket)
    };
    let start = Instant::now();
    let mut peers: Vec<_> = (0..600).map(call).collect();
    let mut pushed_out = 0;
    for (number, (session, socket)) in (0..).zip(&mut peers) {
        loop {
            match drive(session, socket) {
                SessionEvent::Established(_) => break,
                // This thread or the agent's was too slow. What the agent has not read yet, it closes without a word.
                SessionEvent::Closed(reason)
                    if [WireCode::Busy, WireCode::Closed].contains(&reason.code)
                        && start.elapsed() >= SPOKEN_GRACE =>
                {
                    pushed_out += 1;
                    (*session, *socket) = call(number);
                }
                event => panic!("handshake {number}: {event:?}"),
            }
        }
    }
    // Not all that are pushed out have begun a handshake.
    assert!(agent.stats().handshakes_failed <= pushed_out, "{pushed_out} were pushed out");
}

#[test]
fn connections_that_a_peer_refuses_as_busy_or_closes_are_retried() {
    let _bound = bounded();
    let agent = agent();
    let (listener, address) = listen();
    let serving = thread::spawn(move || {
        for _ in 0..5 {
            let refused =
                Refused { code: WireCode::Busy, detail: String::new(), aux: 0, mac: None };
            accept(&listener).write_all(&encode(&Message::Refused(refused))).expect("connected");
        }
        drop(accept(&listener));
        let mut socket = accept(&listener);
        let mut session = Session::acceptor(config(), SessionId(1), nonce(), clock());
        let event = drive(&mut session, &mut socket);
        assert!(matches!(event, SessionEvent::Established(_)), "{event:?}");
        // The last messages of the acceptor.
        while let Some(bytes) = session.poll_transmit() {
            socket.write_all(&bytes).expect("connected");
        }
        socket
    });
    let peer = agent.peer(&address).expect("an address");
    peer.connect(PATIENCE).expect("the seventh call is served");
    drop(serving.join().expect("served"));
}

#[test]
fn every_stream_proves_the_key_of_its_session() {
    let _bound = bounded();
    let agent = Agent::builder().silence(NEVER).secret(b"secret").start().expect("an agent");
    let to = agent.allocate(4096, Access::WRITE).expect("memory");
    let mut knows = config();
    knows.secret = Secret::new(b"secret".to_vec());
    let mut raw_peer = RawPeer::call(agent.advertised(), knows).expect("the right secret");
    let streams = agent.stats().streams;
    let proper = raw_peer.stream_hello();
    for (what, at) in [("mac", proper.len() - 1), ("mac", proper.len() - 20)] {
        let mut forged = proper.clone();
        forged[at] ^= 1;
        let (mut stream, _) = offer(agent.advertised(), &forged);
        drop(stream.write_all(&write_frame(&to.remote(), 0, &[0xAB; 64])));
        assert_eq!(agent.stats().streams, streams, "a stream with a forged {what} was accepted");
    }
    let (_kept, _) = offer(agent.advertised(), &proper);
    eventually("a proper stream is accepted", || agent.stats().streams == streams + 1);
    let (mut replayed, _) = offer(agent.advertised(), &proper);
    drop(replayed.write_all(&write_frame(&to.remote(), 0, &[0xAB; 64])));
    thread::sleep(Duration::from_millis(50));
    assert_eq!(agent.stats().streams, streams + 1, "a replayed stream was accepted");
    assert!(content(&to).iter().all(|byte| *byte == 0), "a forged stream wrote");
}

#[test]
fn peers_that_ping_at_line_rate_are_closed_and_keep_no_session_out() {
    let _bound = bounded();
    let (mut child, address) = Child::with_agent(peer_config());
    let region = child.allocate(64 * KIB, "w", 2);
    let ping = encode(&Message::Ping(Ping { seq: 1, active: true }));
    let pings = ping.repeat(64 * KIB / ping.len());
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        let flooding: Vec<_> = (0..6)
            .map(|n| {
                let own = SessionConfig::new(Incarnation(0x60 + n), "flood");
                let peer = RawPeer::call(&address, own).unwrap_or_else(|e| panic!("{e:?}"));
                let (pings, ended) = (&pings, &ended);
                scope.spawn(move || {
                    let mut control = &peer.control;
                    while !ended.load(Ordering::SeqCst) {
                        if control.write_all(pings).is_err() {
                            return true;
                        }
                    }
                    false
                })
            })
            .collect();
        let agent = agent();
        let from = source(&agent, 64 * KIB, 1);
        let peer = agent.peer(&address).expect("an address");
        peer.write(&batch(&from, &region.remote, 4096), &Options::default())
            .expect("the first write of a peer beside those that flood");
        eventually("the sessions of those that flood are closed", || {
            child.stats()["sessions"] == 1
        });
        // Not more than a socket's buffer is written after the end.
        for flood in flooding {
            assert!(flood.join().expect("no panic"), "its connection is closed");
        }
        ended.store(true, Ordering::SeqCst);
    });
}

#[test]
fn a_notification_that_waits_for_its_payload_counts_as_memory_of_the_peer() {
    let _bound = bounded();
    let agent = agent();
    let to = agent.allocate(MIB, Access::WRITE).expect("memory").remote();
    let mut raw_peer = RawPeer::call(agent.advertised(), config()).expect("no secret");
    let mut stream = raw_peer.stream();
    let mut table = Vec::new();
    for part in 0..1_500 {
        WireDescriptor { offset: part * 4, len: 4, region: to.id }.write_to(&mut table);
    }
    let mut notify = Vec::new();
    let said = Notification { name: "layer".into(), message: vec![7; 64 * KIB - 9] };
    said.write_to(&mut notify, &Limits::default()).expect("the longest");
    let header = RequestHeader { notify_len: notify.len() as u32, ..header(1_500, 6_000) };
    let head = header.seal(&table, &notify);
    stream.write_all(&[&head[..], &table, &notify, &[1; 100]].concat()).expect("a stream");
    // 64 KiB of the connection are free: less than table and pieces take, and more than table and notification.
    eventually("pieces, table and notification are counted", || {
        agent.stats().peer_memory_bytes as usize >= 2 * table.len()
    });
    drop(stream);
    eventually("the memory is released", || agent.stats().peer_memory_bytes == 0);
}

#[test]
fn unfinished_requests_take_no_more_than_the_budget_permits_and_small_requests_go_on() {
    let _bound = bounded();
    let budget = 16 * MIB;
    let builder = Agent::builder().transports(Transports::parse("tcp").expect("a name"));
    // A process that does not run for three quarters of it ends its sessions.
    let builder = builder.silence(5 * SILENCE).peer_memory(budget as u64);
    let agent = builder.start().expect("an agent starts");
    let to = agent.allocate(MIB, Access::WRITE).expect("memory");
    let mut raw_peer = RawPeer::call(agent.advertised(), config()).expect("no secret");
    // The table of the largest request but for its end, on each of many streams.
    let table = vec![0; 900 * KIB];
    let streams: Vec<_> = (0..16)
        .map(|_| {
            let mut stream = raw_peer.stream();
            stream.set_write_timeout(Some(Duration::from_secs(1))).expect("a socket");
            let head = header(60_000, 60_000);
            drop(stream.write_all(&head.encode()).and_then(|()| stream.write_all(&table)));
            let held = agent.stats().peer_memory_bytes;
            assert!(held <= budget as u64 / 5, "one host holds {held} of {budget} bytes");
            stream
        })
        .collect();
    eventually("requests beyond the budget are refused", || agent.stats().peer_memory_refused > 0);
    let honest = self::agent();
    let from = source(&honest, MIB, 1);
    let peer = honest.peer(agent.advertised()).expect("an address");
    peer.write(&batch(&from, &to.remote(), 4096), &within(NEVER))
        .expect("a request of 256 descriptors of the same host");
    // The rest ends, because it has not moved for the silence limit.
    eventually("the memory is released", || agent.stats().peer_memory_bytes == 0);
    drop(streams);
}
