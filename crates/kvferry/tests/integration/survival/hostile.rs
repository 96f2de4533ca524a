//! Connections to the listening port that are not from peers.

use super::unauthenticated::answered;
use super::*;
use kvferry_proto::MAGIC;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

over!(
    tcp: unauthenticated_connections_delay_no_peer_and_use_little_memory,
    unauthenticated_connections_are_closed_after_the_silence_limit,
    a_peer_connects_while_more_connections_than_places_are_pending,
);
over!(
    local: unauthenticated_connections_delay_no_peer_and_use_little_memory,
    unauthenticated_connections_are_closed_after_the_silence_limit,
    a_peer_connects_while_more_connections_than_places_are_pending,
);

/// The first bytes that an agent sends.
fn recorded_hello() -> Vec<u8> {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("bound").to_string();
    let agent = agent();
    let calling = thread::spawn(move || {
        let peer = agent.peer(&address).expect("an address");
        drop(peer.connect(PATIENCE));
    });
    let (mut socket, _) = listener.accept().expect("the agent calls");
    let hello = answered(&mut socket);
    // The closed socket ends the agent's call to connect.
    drop((socket, listener));
    drop(calling.join());
    assert!(hello.starts_with(&MAGIC), "{hello:x?}");
    hello
}

/// Bytes of other protocols, and malformed and forged openings.
fn openings(hello: &[u8]) -> Vec<Vec<u8>> {
    let mut tls = vec![0x16, 0x03, 0x01, 0x02, 0x00, 0x01, 0x00, 0x01, 0xFC, 0x03, 0x03];
    tls.extend(Pattern::new(1).bytes(507));
    let mut flipped = hello.to_vec();
    flipped[MAGIC.len() + 3] ^= 0xFF;
    vec![
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: probe\r\n\r\n".to_vec(),
        b"\x00".to_vec(),
        b"SSH-2.0-OpenSSH_9.2\r\n".to_vec(),
        tls,
        Pattern::new(2).bytes(7),
        Pattern::new(3).bytes(100_000),
        vec![0xFF; 4096],
        vec![0x00; 4096],
        // Mooncake lengths of 100 MiB and 2^63, each with a part of the frame.
        [&(100u64 << 20).to_le_bytes()[..], &vec![b'{'; 2 * MIB]].concat(),
        [&(1u64 << 63).to_le_bytes()[..], &vec![b'{'; 64 * KIB]].concat(),
        [&MAGIC[..], &[0xFF; 64]].concat(),
        [&MAGIC[..], &vec![0xFF; MIB]].concat(),
        [&MAGIC[..], &Pattern::new(4).bytes(100)].concat(),
        hello[..hello.len() / 2].to_vec(),
        hello[..hello.len() - 1].to_vec(),
        flipped,
        [hello, &vec![0xEE; MIB]].concat(),
        [hello, hello].concat(),
    ]
}

fn unauthenticated_connections_delay_no_peer_and_use_little_memory(transport: &str) {
    let _bound = bounded();
    let hello = recorded_hello();
    let (mut child, address) = Child::with_agent(peer_config_over(transport));
    let region = child.allocate(MIB, "w", 2);
    let before = child.resources();
    let connect = || TcpStream::connect(&address).expect("the agent listens");

    // Connections that send nothing, or one byte from time to time.
    let idle: Vec<_> = (0..100).map(|_| connect()).collect();
    let mut dripping: Vec<_> = (0..40).map(|_| connect()).collect();
    let ended = AtomicBool::new(false);
    let connections = AtomicUsize::new(0);
    let mut took = Vec::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            for byte in hello.iter().cycle() {
                for socket in &mut dripping {
                    drop(socket.write_all(&[*byte]));
                }
                thread::sleep(Duration::from_millis(200));
                if ended.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        scope.spawn(|| {
            while !ended.load(Ordering::SeqCst) {
                for noise in openings(&hello) {
                    if let Ok(mut socket) = TcpStream::connect(&address) {
                        drop(socket.set_write_timeout(Some(Duration::from_millis(200))));
                        drop(socket.write_all(&noise));
                        connections.fetch_add(1, Ordering::SeqCst);
                    }
                }
                thread::sleep(Duration::from_millis(20));
            }
        });
        eventually("more than 30 noisy connections were made", || {
            connections.load(Ordering::SeqCst) > 30
        });
        for round in 0..8 {
            thread::sleep(Duration::from_millis(100));
            let agent = agent_over(transport);
            let from = source(&agent, MIB, round);
            let peer = agent.peer(&address).expect("an address");
            let began = Instant::now();
            peer.write(&batch(&from, &region.remote, 4096), &Options::default())
                .expect("the first write of a peer");
            took.push(began.elapsed());
            assert!(child.matches(&region, round));
        }
        ended.store(true, Ordering::SeqCst);
    });
    // The silence limit of no agent here ends what takes long. A busy machine does not delay all of them.
    assert!(took.iter().any(|it| *it < SILENCE), "each peer was delayed: {took:?}");
    let grown = child.resources().memory_bytes.saturating_sub(before.memory_bytes);
    assert!(grown < 48 * MIB as u64, "the connections used {grown} bytes of memory");
    drop((idle, dripping));
    eventually("pending handshakes are closed", || child.stats()["handshakes_pending"] == 0);
    eventually("their descriptors are closed", || {
        child.resources().descriptors <= before.descriptors + 8
    });
}

fn unauthenticated_connections_are_closed_after_the_silence_limit(transport: &str) {
    let _bound = bounded();
    let hello = recorded_hello();
    let (mut child, address) = Child::with_agent(peer_config_with(transport, SILENCE));
    let (mut patient, of_patient) = Child::with_agent(peer_config_with(transport, NEVER));
    let openings = [&[][..], &hello[..1], &hello[..hello.len() / 2]];
    let pending = |address: &str| -> Vec<_> {
        let call = |number: usize| {
            let began = Instant::now();
            let mut socket = TcpStream::connect(address).expect("the agent listens");
            socket.write_all(openings[number % openings.len()]).expect("a fresh connection");
            (began, socket)
        };
        (0..120).map(call).collect()
    };
    let kept = pending(&of_patient);
    eventually("all of them are pending", || patient.stats()["handshakes_pending"] == kept.len());
    for (began, mut socket) in pending(&address) {
        socket.set_read_timeout(Some(PATIENCE / 2)).expect("a socket");
        // The end of the connection, or its reset.
        let ended = socket.read_to_end(&mut Vec::new());
        let reset = |e: &std::io::Error| e.kind() == std::io::ErrorKind::ConnectionReset;
        assert!(ended.as_ref().map_or_else(reset, |_| true), "{ended:?}");
        assert!(began.elapsed() >= SILENCE, "before the limit: {:?}", began.elapsed());
    }
    eventually("no handshake is pending", || child.stats()["handshakes_pending"] == 0);
    // By no other limit: an agent with a longer one has kept connections that are older.
    eventually("the agent has accepted, and kept, its connections", || {
        patient.stats()["handshakes_pending"] == kept.len()
    });
}

fn a_peer_connects_while_more_connections_than_places_are_pending(transport: &str) {
    let _bound = bounded();
    let (mut child, address) = Child::with_agent(peer_config_over(transport));
    let region = child.allocate(64 * KIB, "w", 2);
    let mut crowd = Vec::new();
    for round in 0..4 {
        crowd.extend((0..200).map(|_| TcpStream::connect(&address).expect("the agent listens")));
        let agent = agent_over(transport);
        let from = source(&agent, 64 * KIB, round);
        let peer = agent.peer(&address).expect("an address");
        peer.write(&batch(&from, &region.remote, 4096), &Options::default())
            .unwrap_or_else(|e| panic!("a peer beside {} pending connections: {e:?}", crowd.len()));
    }
    let pending = child.stats()["handshakes_pending"].clone();
    assert!(pending.as_u64() <= Some(300), "{pending} connections are pending");
}
