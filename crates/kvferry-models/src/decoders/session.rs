//! A session with a peer that sends arbitrary bytes.

use crate::decoders::messages::message_seeds;
use crate::pair::{A, B, Pair, SESSION, config, ms, with_secret};
use kvferry_proto::fuzzing::Script;
use kvferry_proto::keyed::TAG_LEN;
use kvferry_proto::{
    CONTROL_MAX, Decoder, MAGIC, Message, Session, SessionEvent, StreamId, Timestamp, WireCode,
};
use std::time::Duration;

const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000_000);

/// Bytes sent and events emitted by a session, and its deadline.
#[derive(Debug, Default, PartialEq)]
struct SessionTrace {
    sent: Vec<Vec<u8>>,
    events: Vec<SessionEvent>,
    deadline: Option<Timestamp>,
}

/// Bytes to a session, behind three that choose the session and how the bytes are split.
///
/// With a secret, a peer without it is always refused. Frames and events do not depend on how the
/// bytes are split. The session ends once, and sends nothing after its last message.
pub fn bytes(bytes: &[u8]) {
    let mut script = Script::new(bytes);
    let kind = script.byte();
    let chunk = usize::from(script.byte()).max(1);
    let busy = script.flip();
    let bytes = script.rest();
    let whole = trace(kind, busy, bytes, usize::MAX);
    assert_eq!(trace(kind, busy, bytes, chunk), whole, "chopping makes no difference");
    check(&whole, kind);
}

fn is_established(kind: u8) -> bool {
    kind & 2 != 0
}

fn has_secret(kind: u8) -> bool {
    kind & 4 != 0
}

fn session_of(kind: u8) -> (Session, Timestamp) {
    let side = if kind & 1 == 0 { A } else { B };
    let config = |side| if has_secret(kind) { with_secret(side, "hush") } else { config(side) };
    if is_established(kind) {
        let mut pair = Pair::new(config(A), config(B));
        pair.establish();
        let now = pair.now;
        let other = Session::acceptor(config(B), SESSION, [9; 32], now);
        (std::mem::replace(pair.session(side), other), now)
    } else if side == A {
        let mut session = Session::initiator(config(A), None, [1; 32], NOW);
        session.poll_transmit();
        (session, NOW)
    } else {
        (Session::acceptor(config(B), SESSION, [2; 32], NOW), NOW)
    }
}

fn trace(kind: u8, busy: bool, bytes: &[u8], chunk: usize) -> SessionTrace {
    let (mut session, mut now) = session_of(kind);
    if busy && session.is_established() {
        // Something is out, for the peer's bytes to be answers to.
        session.set_active(true, now);
        session.request(1, b"question".to_vec(), ms(2000), now);
        session.revoke(vec![StreamId(1)], now);
    }
    let mut trace = SessionTrace::default();
    for piece in bytes.chunks(chunk) {
        session.receive(piece, now);
    }
    drain(&mut session, &mut trace);
    trace.deadline = session.next_timeout();
    // Answers all requests and revokes, while the session lasts.
    for event in trace.events.clone() {
        match event {
            SessionEvent::Request { id, .. } if id % 2 == 0 => session.acknowledge(id, now),
            SessionEvent::Request { id, .. } => session.respond(id, WireCode::Ok, vec![1]),
            SessionEvent::RevokeRequested { id, .. } => session.confirm_revoked(id),
            _ => {}
        }
    }
    drain(&mut session, &mut trace);
    for _ in 0..3 {
        now = session.next_timeout().unwrap_or(now);
        session.handle_timeout(now);
        drain(&mut session, &mut trace);
    }
    session.transport_closed(now + Duration::from_millis(1));
    drain(&mut session, &mut trace);
    assert!(session.is_closed() && session.next_timeout().is_none());
    trace
}

fn drain(session: &mut Session, trace: &mut SessionTrace) {
    while let Some(bytes) = session.poll_transmit() {
        trace.sent.push(bytes);
    }
    while let Some(event) = session.poll_event() {
        trace.events.push(event);
    }
}

fn check(trace: &SessionTrace, kind: u8) {
    let established = trace.events.iter().any(|e| matches!(e, SessionEvent::Established(_)));
    assert!(!established || (!is_established(kind) && !has_secret(kind)), "without the secret");
    let ends = trace.events.iter().filter(|e| matches!(e, SessionEvent::Closed(_))).count();
    let Some(SessionEvent::Closed(reason)) = trace.events.last() else {
        panic!("the end is reported last");
    };
    assert_eq!(ends, 1);
    assert_eq!(reason.established, established || is_established(kind));
    let mut answers: Vec<u64> = trace
        .events
        .iter()
        .filter_map(|e| if let SessionEvent::Response { id, .. } = e { Some(*id) } else { None })
        .collect();
    answers.sort_unstable();
    assert!(answers.windows(2).all(|w| w[0] != w[1]), "answered twice");

    let (mut last_word, mut ready) = (false, false);
    let tag = if is_established(kind) && has_secret(kind) { TAG_LEN } else { 0 };
    for frame in &trace.sent {
        let mut frame = frame.strip_prefix(&MAGIC).unwrap_or(frame);
        let message = Decoder::new(CONTROL_MAX).read(&mut frame);
        let message = message.expect("sessions speak properly").expect("whole frames");
        assert_eq!(frame.len(), tag, "one frame at a time, and its tag");
        assert!(!last_word, "{message:?} after the last word");
        ready |= matches!(message, Message::Ready(_));
        last_word = matches!(message, Message::Close(_) | Message::Refused(_));
        assert!(!(ready && matches!(message, Message::Refused(_))), "established and refused");
    }
}

/// Every message, to every kind of session.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = Vec::new();
    for kind in 0..8 {
        for seed in message_seeds() {
            seeds.push([&[kind, 11, 1][..], &seed[1..]].concat());
        }
    }
    seeds
}
