//! The Mooncake handshake on the shared port.

use crate::wire::{LONG, NEVER, frame, settles};
use kvferry::{Access, Agent, Batch, ErrorKind, Options, TransportKind, Transports};
use kvferry_testkit::ports::ClosedPort;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;

fn agent(mooncake: bool) -> Agent {
    agent_within(NEVER, mooncake)
}

/// An agent that waits so long for a peer that says nothing.
fn agent_within(silence: Duration, mooncake: bool) -> Agent {
    crate::wire::builder()
        .silence(silence)
        .setting("mooncake", mooncake)
        .start()
        .expect("loopback has ports")
}

/// Sends a handshake frame and returns type and JSON of the answer; `None` if there is none.
pub(crate) fn handshake(address: &str, kind: u8, json: &str) -> Option<(u8, Value)> {
    let mut stream = TcpStream::connect(address).expect("listening");
    stream.set_read_timeout(Some(LONG)).expect("a timeout");
    stream.write_all(&frame(kind, json)).ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let (len, body) = answer.split_first_chunk::<8>()?;
    assert_eq!(u64::from_le_bytes(*len), body.len() as u64);
    let (kind, json) = body.split_first()?;
    Some((*kind, serde_json::from_slice(json).expect("JSON")))
}

/// What an agent tells a peer of version 1 about itself.
pub(crate) fn descriptor_of(address: &str) -> Value {
    descriptor_for(r#"{"name":"a:1","protocol":"tcp","tcp_data_port":1,"buffers":[]}"#, address)
}

/// What an agent tells a peer of version 2.
pub(crate) fn descriptor_for_version_2(address: &str) -> Value {
    let own =
        r#"{"name":"a:1","protocol":"tcp","tcp_data_port":1,"tcp_proto_version":2,"buffers":[]}"#;
    descriptor_for(own, address)
}

fn descriptor_for(own: &str, address: &str) -> Value {
    let (kind, json) = handshake(address, 1, own).expect("an answer");
    assert_eq!(kind, 1);
    json
}

fn move_one(from: &Agent, to: &Agent) -> Option<TransportKind> {
    let source = from.allocate(4096, Access::READ).expect("memory");
    let sink = to.allocate(4096, Access::READ_WRITE).expect("memory");
    source.write_at(0, &[7; 4096]).expect("in bounds");
    let mut batch = Batch::new();
    batch.push_to_address(&source, 0, sink.addr() as u64, 4096).expect("in bounds");
    let peer = from.peer(to.advertised()).expect("an address");
    let moved = peer.write(&batch, &Options::default()).expect("a transfer");
    let mut bytes = [0; 4096];
    sink.read_at(0, &mut bytes).expect("in bounds");
    assert_eq!(bytes, [7; 4096]);
    moved.transport
}

#[test]
fn agents_with_and_without_mooncake_speak_the_native_protocol_with_each_other() {
    for mooncake in [true, false] {
        assert_eq!(move_one(&agent(true), &agent(mooncake)), Some(TransportKind::LOCAL));
    }
}

#[test]
fn the_descriptor_names_the_data_port_and_the_reachable_buffers() {
    let agent = agent(true);
    let rw = agent.allocate(8192, Access::READ_WRITE).expect("memory");
    let _hidden = agent.allocate(4096, Access::NONE).expect("memory");
    let json = descriptor_of(agent.advertised());
    assert_eq!(json["protocol"], "tcp");
    assert_eq!(json["tcp_data_host"], "127.0.0.1");
    assert_eq!(json["tcp_proto_version"], 2);
    assert!(json["tcp_data_port"].as_u64().is_some_and(|p| p > 0));
    let buffers = json["buffers"].as_array().expect("a list");
    assert_eq!(buffers.len(), 1);
    assert_eq!(buffers[0]["addr"], rw.addr() as u64);
    assert_eq!(buffers[0]["length"], 8192);
    assert_eq!(json["kvferry"]["version"], 1);
}

#[test]
fn a_probe_is_answered_and_a_notification_delivered() {
    let agent = agent(true);
    let (_, alive) = handshake(agent.advertised(), 3, "{}").expect("an answer");
    assert_eq!(alive, json!({"status": "success"}));
    let said = r#"{"name":"layer","notify_msg":"done"}"#;
    let (_, answer) = handshake(agent.advertised(), 2, said).expect("an answer");
    assert_eq!(answer, json!({"name": "", "notify_msg": "success"}));
    let heard = agent.wait_notification(LONG).expect("open").expect("delivered");
    assert_eq!((heard.name.as_str(), heard.message.as_slice()), ("layer", &b"done"[..]));
    let (kind, answer) = handshake(agent.advertised(), 0, "{}").expect("a refusal");
    assert!(kind == 0 && !answer["reply_msg"].as_str().expect("text").is_empty());
}

#[test]
fn malformed_handshakes_get_no_answer() {
    // Some of these could be the beginning of more.
    let agent = agent_within(Duration::from_secs(3), true);
    for (kind, json) in [
        (1, "{\"name\":"),
        (1, "7"),
        (1, "{\"kvferry\":7}"),
        (2, "{\"name\":1}"),
        (b'{', "\"old\":1}"),
        (9, "{}"),
    ] {
        assert_eq!(handshake(agent.advertised(), kind, json), None, "{kind} {json}");
    }
    for opening in [
        &b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"[..],
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        &u64::MAX.to_le_bytes(),
        &(2u64 << 20).to_le_bytes(),
        &0u64.to_le_bytes(),
    ] {
        let mut stream = TcpStream::connect(agent.advertised()).expect("listening");
        stream.set_read_timeout(Some(LONG)).expect("a timeout");
        stream.write_all(opening).expect("written");
        let mut answer = Vec::new();
        // The agent closes or resets the connection.
        let ended = stream.read_to_end(&mut answer).map_err(|e| e.kind());
        assert_ne!(ended, Err(std::io::ErrorKind::WouldBlock), "the connection stays open");
        assert!(answer.is_empty());
    }
    assert!(agent.stats().handshakes_failed >= 6);
}

#[test]
fn silent_connections_delay_no_peer_and_are_closed() {
    let agent = agent_within(Duration::from_secs(8), true);
    let idle: Vec<_> = (0..100)
        .map(|i| {
            let mut stream = TcpStream::connect(agent.advertised()).expect("listening");
            // No bytes, a part of the length, or a length without the body.
            let said = 100u64.to_le_bytes();
            stream.write_all(&said[..[0, 3, 8][i % 3]]).expect("written");
            stream
        })
        .collect();
    descriptor_of(agent.advertised());
    for mut stream in idle {
        stream.set_read_timeout(Some(2 * LONG)).expect("a timeout");
        assert!(matches!(stream.read(&mut [0; 1]), Ok(0) | Err(_)));
    }
    settles("handshakes are left over", || agent.stats().handshakes_pending == 0);
}

#[test]
fn agents_with_a_secret_or_without_compatibility_refuse_mooncake_peers() {
    let secret = crate::wire::builder().secret(b"s").start().expect("loopback has ports");
    for agent in [agent(false), secret] {
        assert_eq!(handshake(agent.advertised(), 1, "{}"), None);
        assert_eq!(handshake(agent.advertised(), 3, "{}"), None);
    }
}

#[test]
fn a_closed_port_is_unreachable() {
    let closed = ClosedPort::new();
    let mooncake = Transports::only(kvferry_mooncake::link());
    let only = crate::wire::builder().transports(mooncake).start().expect("a port");
    for agent in [agent(true), only] {
        let peer = agent.peer(closed.address()).expect("an address");
        let e = peer.connect(LONG).expect_err("no process listens");
        assert_eq!(e.kind(), ErrorKind::Unreachable);
    }
}

#[test]
fn a_mute_peer_is_silent_and_a_malformed_answer_is_a_protocol_error() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let agent = agent(true);
    let peer = agent.peer(&address).expect("an address");
    for answer in [
        &b"\x05\0\0\0\0\0\0\0\x01{\"a\""[..],
        b"\x03\0\0\0\0\0\0\0\x01{}",
        b"\x03\0\0\0\0\0\0\0\x03{}",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\x05\0\0\0\0\0\0\0\x01{",
    ] {
        let error = std::thread::scope(|scope| {
            let caller = scope.spawn(|| peer.connect(LONG).expect_err("no descriptor"));
            let (mut stream, _) = listener.accept().expect("a caller");
            stream.write_all(answer).expect("written");
            // The caller may have closed the connection.
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
            caller.join().expect("no panic")
        });
        let kind = error.kind();
        assert!(matches!(kind, ErrorKind::Protocol | ErrorKind::PeerReset), "{error}");
    }
    let agent = agent_within(Duration::from_secs(1), true);
    let peer = agent.peer(&address).expect("an address");
    let e = peer.connect(2 * LONG).expect_err("the peer does not answer");
    assert_eq!(e.kind(), ErrorKind::PeerSilent);
}
