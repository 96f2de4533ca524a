//! Control messages and the first bytes of a connection.

use crate::pair::{A, B, Pair};
use kvferry_proto::fuzzing::Script;
use kvferry_proto::message::{
    ADVERTISED_MAX, BODY_MAX, Challenge, Close, DETAIL_MAX, FINGERPRINT_MAX, Hello, NAME_MAX, Ping,
    Pong, Proof, REVOKE_STREAMS_MAX, Ready, Refused, Request, Response, Revoke, Revoked,
    StreamHello, StreamReady, encode,
};
use kvferry_proto::{
    CONTROL_MAX, Decoder, Incarnation, MAGIC, Message, MessageError, Opener, Opening, PREAUTH_MAX,
    SessionId, Sniff, Sniffer, StreamId, WireCode,
};

/// The messages that a decoder returned, and the error that ended them.
type Read = (Vec<Message>, Option<MessageError>);

/// A stream of control messages behind one byte that says how it is chopped.
pub fn message(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let chunk = usize::from(script.byte());
    let bytes = script.rest();
    for limit in [PREAUTH_MAX, CONTROL_MAX] {
        let whole = read(bytes, usize::MAX, limit);
        assert_eq!(read(bytes, chunk.max(1), limit), whole, "chopping makes no difference");
        whole.0.iter().for_each(check);
        if let Some(error) = whole.1 {
            assert!(!error.code().is_ok() && !error.to_string().is_empty());
        }
    }
}

fn read(bytes: &[u8], chunk: usize, limit: usize) -> Read {
    let mut decoder = Decoder::new(limit);
    let mut messages = Vec::new();
    for mut piece in bytes.chunks(chunk) {
        loop {
            let before = piece.len();
            let held = decoder.buffered();
            match decoder.read_frame(&mut piece) {
                Ok(Some((message, frame))) => {
                    assert_eq!(frame.len(), held + before - piece.len(), "no byte lost or made");
                    assert!(frame.len() <= 4 + limit && decoder.buffered() == 0);
                    messages.push(message);
                }
                Ok(None) => {
                    assert_eq!((piece.len(), decoder.buffered()), (0, held + before));
                    assert!(decoder.buffered() < 4 + limit);
                    break;
                }
                Err(error) => return (messages, Some(error)),
            }
        }
    }
    (messages, None)
}

/// Limits, and that a message survives being sent on.
fn check(message: &Message) {
    match message {
        Message::Hello(m) => {
            assert!(m.name.len() <= NAME_MAX && m.advertised.len() <= ADVERTISED_MAX);
            assert!(m.fingerprint.as_ref().is_none_or(|f| f.len() <= FINGERPRINT_MAX));
            assert!(m.versions.0 <= m.versions.1);
        }
        Message::Challenge(m) => assert!(m.name.len() <= NAME_MAX),
        Message::Ready(m) => assert!(m.advertised.len() <= ADVERTISED_MAX),
        Message::Refused(m) => assert!(m.detail.len() <= DETAIL_MAX),
        Message::Close(m) => assert!(m.detail.len() <= DETAIL_MAX),
        Message::Revoke(m) => assert!(m.streams.len() <= REVOKE_STREAMS_MAX),
        Message::Request(m) => assert!(m.body.len() <= BODY_MAX),
        Message::Response(m) => assert!(m.body.len() <= BODY_MAX),
        Message::Unknown { kind } => assert!(kind.len() <= 32),
        Message::Proof(_)
        | Message::Ping(_)
        | Message::Pong(_)
        | Message::Revoked(_)
        | Message::StreamHello(_)
        | Message::StreamReady(_) => {}
    }
    let frame = encode(message);
    let limit = match message {
        Message::Request(_) | Message::Response(_) | Message::Revoke(_) => CONTROL_MAX,
        _ => PREAUTH_MAX,
    };
    let again = Decoder::new(limit).read(&mut &frame[..]);
    assert_eq!(again.as_ref(), Ok(&Some(message.clone())), "decoded and encoded is what it was");
}

/// A message of each kind, with all optional fields.
pub fn every_message() -> Vec<Message> {
    let (mac, nonce) = ([3; 32], [4; 32]);
    let incarnation = Incarnation(0xa1b2);
    vec![
        Hello {
            versions: (1, 2),
            capabilities: 5,
            incarnation,
            name: "alice".into(),
            nonce,
            authenticate: true,
            checksum: true,
            advertised: "10.0.0.1:7".into(),
            fingerprint: Some(b"layout".to_vec()),
        }
        .into(),
        Challenge {
            version: 1,
            capabilities: 5,
            incarnation,
            name: "bob".into(),
            nonce,
            authenticate: false,
        }
        .into(),
        Proof { mac }.into(),
        Ready { session: SessionId(9), mac, checksum: false, advertised: "b:1".into() }.into(),
        Refused { code: WireCode::AuthFailed, detail: "no".into(), aux: 1, mac: None }.into(),
        Ping { seq: 1, active: true }.into(),
        Pong { seq: 1 }.into(),
        Revoke { id: 3, streams: vec![StreamId(1), StreamId(70_000)] }.into(),
        Revoked { id: 3 }.into(),
        Request { id: 4, kind: 1, budget_ms: 10, body: b"?".to_vec() }.into(),
        Response { id: 4, code: WireCode::Other(77), body: b"!".to_vec() }.into(),
        Close { code: WireCode::Shutdown, detail: "bye".into() }.into(),
        StreamHello { session: SessionId(9), stream: StreamId(1), incarnation, mac }.into(),
        StreamReady { mac: Some(vec![7; 32]) }.into(),
        Message::Unknown { kind: "later".into() },
    ]
}

/// The messages one by one, and all of them in one stream.
pub fn message_seeds() -> Vec<Vec<u8>> {
    let frames: Vec<_> = every_message().iter().map(encode).collect();
    let mut seeds: Vec<_> = frames.iter().map(|frame| [&[3][..], frame].concat()).collect();
    seeds.push([&[7][..], &frames.concat()].concat());
    seeds
}

/// The first bytes of a connection, behind one byte that says how they are chopped.
pub fn opening(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let chunk = usize::from(script.byte()).max(1);
    let bytes = script.rest();
    let whole = open(bytes, usize::MAX);
    match (&whole, open(bytes, chunk)) {
        // A session gets everything, a stream what its listener had read by then.
        (Ok(Opened::Stream { hello, rest }), Ok(Opened::Stream { hello: same, rest: part })) => {
            assert_eq!(*hello, same);
            assert!(rest.starts_with(&part) && bytes.ends_with(rest));
            stranger_is_refused(hello);
        }
        (Ok(Opened::Session(all)), Ok(Opened::Session(part))) => {
            assert!(all.starts_with(&part) && bytes.ends_with(all));
        }
        (whole, chopped) => assert_eq!(*whole, chopped, "chopping makes no difference"),
    }
}

#[derive(Debug, PartialEq)]
enum Opened {
    Undecided,
    Foreign(u64),
    Session(Vec<u8>),
    Stream { hello: StreamHello, rest: Vec<u8> },
}

fn open(bytes: &[u8], chunk: usize) -> Result<Opened, WireCode> {
    let (mut sniffer, mut opener) = (Sniffer::new(), Opener::new());
    for mut piece in bytes.chunks(chunk) {
        if sniffer.wanted() > 0 {
            let (first, rest) = piece.split_at(piece.len().min(sniffer.wanted()));
            piece = rest;
            match sniffer.feed(first) {
                Sniff::NeedMore => continue,
                Sniff::Native => {}
                Sniff::Foreign => return Ok(Opened::Foreign(sniffer.first())),
            }
        }
        match opener.feed(piece)? {
            None => {}
            Some(Opening::Session { bytes }) => return Ok(Opened::Session(bytes)),
            Some(Opening::Stream { hello, rest }) => return Ok(Opened::Stream { hello, rest }),
        }
    }
    Ok(Opened::Undecided)
}

/// A peer without the session's key gets no stream, and no stream is opened twice.
fn stranger_is_refused(hello: &StreamHello) {
    let mut pair = Pair::established();
    let (_, honest) = pair.session(A).stream_hello().expect("established");
    let Ok(Some(Message::StreamHello(honest))) =
        Decoder::new(PREAUTH_MAX).read(&mut &honest[MAGIC.len()..])
    else {
        panic!("a session opens streams properly");
    };
    let acceptor = pair.session(B);
    if *hello != honest {
        assert!(acceptor.verify_stream(hello).is_err(), "a forged stream");
    }
    assert_eq!(acceptor.verify_stream(&honest), Ok(()), "a stranger used up nothing");
    assert_eq!(acceptor.verify_stream(&honest), Err(WireCode::StreamReplayed));
}

/// Openings of native and Mooncake peers, browsers and TLS clients.
pub fn opening_seeds() -> Vec<Vec<u8>> {
    let mut pair = Pair::established();
    let (_, stream) = pair.session(A).stream_hello().expect("established");
    let hello = [&MAGIC[..], &encode(&every_message()[0])].concat();
    let ping = [&MAGIC[..], &encode(&Message::Ping(Ping { seq: 1, active: false }))].concat();
    let mooncake = [&9u64.to_le_bytes()[..], b"\x01{}"].concat();
    [
        &stream[..],
        &[&stream[..], b"first frame"].concat(),
        &hello,
        &ping,
        &mooncake,
        b"GET / HTTP/1.1",
    ]
    .map(|bytes| [&[5][..], bytes].concat())
    .into()
}
