//! Codes and control messages: their bytes and their limits. The target `message` of `kvferry-models`
//! proves that messages survive the wire however it chops them, and that any bytes are read or refused.

use kvferry_proto::message::{
    Close, Decoder, Hello, Message, MessageError, Ping, Pong, Refused, Request, Response, Revoke,
    StreamHello, encode,
};
use kvferry_proto::{CONTROL_MAX, Incarnation, PREAUTH_MAX, SessionId, StreamId, WireCode};
use std::collections::BTreeSet;

#[test]
fn every_number_is_a_code_and_every_code_is_its_number() {
    let mut shown = BTreeSet::new();
    for number in 0..=u16::MAX {
        let code = WireCode::from_u16(number);
        assert_eq!(code.to_u16(), number);
        assert_eq!((u16::from(code), WireCode::from(number)), (number, code));
        assert!(shown.insert(code.to_string()), "{code} says what another code says");
        assert_eq!(code.is_ok(), number == 0);
    }
    for (number, code) in WireCode::KNOWN.iter().enumerate() {
        assert_eq!(usize::from(code.to_u16()), number, "numbers never change: {code:?}");
        assert!(!matches!(code, WireCode::Other(_)));
    }
    assert_eq!(WireCode::KNOWN.len(), 35);
    assert_eq!(WireCode::from_u16(35), WireCode::Other(35));
}

fn framed(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_le_bytes()[..], body].concat()
}

fn drain(mut bytes: &[u8]) -> Result<Vec<Message>, MessageError> {
    let mut decoder = Decoder::new(PREAUTH_MAX);
    let mut messages = Vec::new();
    while let Some(message) = decoder.read(&mut bytes)? {
        messages.push(message);
    }
    assert!(decoder.buffered() <= PREAUTH_MAX + 4);
    Ok(messages)
}

/// MessagePack by hand: a map of these raw keys and values.
fn map(fields: &[(&str, &[u8])]) -> Vec<u8> {
    let mut out = vec![0x80 | u8::try_from(fields.len()).unwrap()];
    for (key, value) in fields {
        out.push(0xa0 | u8::try_from(key.len()).unwrap());
        out.extend_from_slice(key.as_bytes());
        out.extend_from_slice(value);
    }
    framed(&out)
}

#[test]
fn control_messages_are_named_maps_and_stay_what_they_are() {
    let ping = Message::Ping(Ping { seq: 5, active: true });
    assert_eq!(encode(&ping), b"\x15\0\0\0\x83\xa1t\xa4ping\xa3seq\x05\xa6active\xc3");
    let stream = Message::StreamHello(StreamHello {
        session: SessionId(1),
        stream: StreamId(2),
        incarnation: Incarnation(3),
        mac: [9; 32],
    });
    let mut expected = b"\x65\0\0\0\x85\xa1t\xacstream_hello\xa7session\x01\xa6stream\x02".to_vec();
    expected.extend_from_slice(b"\xabincarnation\xc4\x10\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x03");
    expected.extend_from_slice(b"\xa3mac\xc4\x20");
    expected.extend_from_slice(&[9; 32]);
    assert_eq!(encode(&stream), expected);
    let close = Message::Close(Close { code: WireCode::Other(700), detail: "x".into() });
    assert_eq!(
        encode(&close),
        b"\x1a\0\0\0\x83\xa1t\xa5close\xa4code\xcd\x02\xbc\xa6detail\xa1x".as_slice()
    );
    let request = Message::Request(Request { id: 1, kind: 2, budget_ms: 3, body: vec![4, 5] });
    assert_eq!(
        encode(&request),
        b"\x29\0\0\0\x85\xa1t\xa7request\xa2id\x01\xa4kind\x02\xa9budget_ms\x03\xa4body\xc4\x02\x04\x05"
            .as_slice()
    );
}

#[test]
fn unknown_fields_are_ignored_and_missing_ones_of_later_versions_have_defaults() {
    let frame = map(&[
        ("t", b"\xa4ping"),
        ("colour", b"\xa4blue"),
        ("nested", b"\x92\x01\x81\xa1x\x90"),
        ("seq", b"\x07"),
    ]);
    assert_eq!(drain(&frame).unwrap(), [Message::Ping(Ping { seq: 7, active: false })]);
    // The kind need not come first.
    let frame = map(&[("seq", b"\x07"), ("t", b"\xa4pong")]);
    assert_eq!(drain(&frame).unwrap(), [Message::Pong(Pong { seq: 7 })]);
}

#[test]
fn unknown_kinds_are_kept_by_name_and_cut() {
    let frame = map(&[("t", b"\xa6future"), ("x", b"\xc0")]);
    assert_eq!(drain(&frame).unwrap(), [Message::Unknown { kind: "future".into() }]);
    let long = [&b"\xd9\x40"[..], &[b'x'; 64]].concat();
    assert_eq!(drain(&map(&[("t", &long)])).unwrap(), [Message::Unknown { kind: "x".repeat(32) }]);
}

#[test]
fn what_is_no_message_is_refused_with_its_reason() {
    for (frame, code) in [
        (framed(b""), WireCode::Malformed),
        (framed(b"\xc0"), WireCode::Malformed),
        (framed(b"\x80"), WireCode::Malformed),
        (map(&[("t", b"\x05")]), WireCode::Malformed),
        (map(&[("t", b"\xa4ping")]), WireCode::Malformed),
        (map(&[("t", b"\xa4ping"), ("seq", b"\xa1x")]), WireCode::Malformed),
        (map(&[("t", b"\xa4ping"), ("seq", b"\x01"), ("seq", b"\x02")]), WireCode::Malformed),
        (map(&[("t", b"\xa5proof"), ("mac", b"\xc4\x02\x01\x02")]), WireCode::Malformed),
        // A length of four billion elements in a message of a few bytes.
        (
            map(&[("t", b"\xa6revoke"), ("id", b"\x01"), ("streams", b"\xdd\xff\xff\xff\xff")]),
            WireCode::Malformed,
        ),
        (
            map(&[("t", b"\xa5close"), ("code", b"\x00"), ("detail", b"\xdb\xff\xff\xff\xff")]),
            WireCode::Malformed,
        ),
        (((PREAUTH_MAX + 1) as u32).to_le_bytes().to_vec(), WireCode::TooLarge),
        (vec![0xff; 4], WireCode::TooLarge),
    ] {
        let error = drain(&frame).expect_err("no message");
        assert_eq!(error.code(), code, "{error}");
    }
    let mut trailing = encode(&Message::Pong(Pong { seq: 1 }));
    trailing.push(0);
    trailing[0] += 1;
    assert_eq!(drain(&trailing).unwrap_err().code(), WireCode::Malformed);
}

#[test]
fn fields_have_limits_of_their_own() {
    let hello = Hello {
        versions: (1, 1),
        capabilities: 0,
        incarnation: Incarnation(1),
        name: String::new(),
        nonce: [0; 32],
        authenticate: false,
        checksum: false,
        advertised: String::new(),
        fingerprint: None,
    };
    let refuses = |message: Message, code| {
        let frame = encode(&message);
        let error = Decoder::new(CONTROL_MAX).read(&mut &frame[..]).expect_err("beyond a limit");
        assert_eq!(error.code(), code, "{error}");
    };
    let long = |len| "x".repeat(len);
    refuses(Hello { name: long(257), ..hello.clone() }.into(), WireCode::TooLarge);
    refuses(Hello { advertised: long(1025), ..hello.clone() }.into(), WireCode::TooLarge);
    refuses(Hello { fingerprint: Some(vec![0; 257]), ..hello.clone() }.into(), WireCode::TooLarge);
    refuses(Hello { versions: (2, 1), ..hello }.into(), WireCode::Malformed);
    refuses(Close { code: WireCode::Ok, detail: long(513) }.into(), WireCode::TooLarge);
    refuses(
        Refused { code: WireCode::Busy, detail: long(513), aux: 0, mac: None }.into(),
        WireCode::TooLarge,
    );
    refuses(Revoke { id: 1, streams: vec![StreamId(0); 4097] }.into(), WireCode::TooLarge);
    let body = vec![0; CONTROL_MAX - 1023];
    refuses(Response { id: 1, code: WireCode::Ok, body }.into(), WireCode::TooLarge);
}

#[test]
fn nesting_deeper_than_any_message_is_refused_before_it_costs_stack() {
    let nested = |depth| {
        let mut map = vec![0x83, 0xa1, b'x'];
        map.extend(std::iter::repeat_n(0x91, depth));
        map.push(0xc0);
        map.extend_from_slice(b"\xa1t\xa4pong\xa3seq\x01");
        Decoder::new(CONTROL_MAX).read(&mut &framed(&map)[..])
    };
    assert_eq!(nested(14), Ok(Some(Message::Pong(Pong { seq: 1 }))));
    for depth in [17, 1000, 500_000] {
        assert_eq!(nested(depth).expect_err("too deep").code(), WireCode::Malformed);
    }
}

#[test]
fn a_length_alone_allocates_nothing() {
    let mut decoder = Decoder::new(CONTROL_MAX);
    let mut input = &(CONTROL_MAX as u32).to_le_bytes()[..];
    assert_eq!(decoder.read(&mut input).unwrap(), None);
    assert_eq!(decoder.buffered(), 4);
}
