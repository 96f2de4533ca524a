//! A peer that floods, lies or babbles, in every state of the session.

use crate::protocol::authentication::frame;
use crate::protocol::pair::{A, B, Pair, SESSION, config, with_secret};
use kvferry_models::decoders::messages::every_message;
use kvferry_proto::message::{Message, Ping, Pong, Request, Response, Revoke, Revoked, encode};
use kvferry_proto::session::{
    EVENT_BYTES_MAX, EVENTS_MAX, IDLE_FRAMES_PER_SECOND, OUTBOX_BYTES_MAX, OUTBOX_MAX,
};
use kvferry_proto::{
    CONTROL_MAX, CloseReason, PREAUTH_MAX, Session, SessionEvent, StreamId, Timestamp, WireCode,
};
use std::time::Duration;

const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000_000);

/// A session in one state, and what its peer would properly send next.
struct Situation {
    name: &'static str,
    session: Session,
    next: Vec<u8>,
    established: bool,
    /// The reason it ends for if it was ending anyway.
    ending: Option<WireCode>,
}

/// One session in every state there is, on both sides.
fn every_state() -> Vec<Situation> {
    let initiator = || Session::initiator(with_secret(A, "hush"), None, [1; 32], NOW);
    let acceptor = || Session::acceptor(with_secret(B, "hush"), SESSION, [2; 32], NOW);
    let mut states = Vec::new();
    let mut add = |name, session, next, established, ending| {
        states.push(Situation { name, session, next, established, ending });
    };

    let (mut a, b) = (initiator(), acceptor());
    add("acceptor awaits hello", b, frame(&mut a), false, None);

    let (mut a, mut b) = (initiator(), acceptor());
    b.receive(&frame(&mut a), NOW);
    let challenge = frame(&mut b);
    add("initiator awaits challenge", a, challenge.clone(), false, None);

    let mut a = initiator();
    a.poll_transmit();
    a.receive(&challenge, NOW);
    let proof = frame(&mut a);
    add("acceptor awaits proof", b, proof.clone(), false, None);

    let mut b = acceptor();
    b.receive(&frame(&mut initiator()), NOW);
    b.poll_transmit();
    b.receive(&proof, NOW);
    let ready = frame(&mut b);
    add("initiator awaits ready", a, ready, false, None);

    let ping = || encode(&Message::Ping(Ping { seq: 1, active: true }));
    for side in [A, B] {
        let mut pair = Pair::established();
        let other = std::mem::replace(pair.session(side), initiator());
        add("established", other, ping(), true, None);

        let mut pair = Pair::established();
        pair.ends[side].session.close(WireCode::Shutdown, "", pair.now);
        let closing = std::mem::replace(pair.session(side), initiator());
        add("closing", closing, ping(), true, Some(WireCode::Shutdown));
    }
    states
}

/// Time at which none of the situations has a timer due.
fn now_of(situation: &Situation) -> Timestamp {
    situation.session.next_timeout().map_or(NOW, |at| at - Duration::from_nanos(1))
}

#[track_caller]
fn the_end(situation: &mut Situation) -> CloseReason {
    let mut events: Vec<_> = std::iter::from_fn(|| situation.session.poll_event()).collect();
    let Some(SessionEvent::Closed(reason)) = events.pop() else {
        panic!("{}: has not ended", situation.name);
    };
    assert!(!events.iter().any(|event| matches!(event, SessionEvent::Closed(_))));
    assert_eq!(reason.established, situation.established, "{}", situation.name);
    reason
}

#[test]
fn a_message_cut_short_anywhere_ends_in_one_closed_in_every_state() {
    let lengths: Vec<usize> = every_state().iter().map(|s| s.next.len()).collect();
    for (index, len) in lengths.into_iter().enumerate() {
        for cut in 0..len {
            let mut situation = every_state().swap_remove(index);
            let now = now_of(&situation);
            let bytes = situation.next[..cut].to_vec();
            situation.session.receive(&bytes, now);
            assert!(!situation.session.is_closed(), "{}: nothing wrong yet", situation.name);
            situation.session.transport_closed(now);
            let expected = situation.ending.unwrap_or(WireCode::Closed);
            assert_eq!(the_end(&mut situation).code, expected);
        }
    }
}

#[test]
fn bytes_that_are_no_message_end_the_session_in_every_state_and_the_peer_is_told() {
    for (garbage, code) in [(true, WireCode::Malformed), (false, WireCode::TooLarge)] {
        for mut situation in every_state() {
            let now = now_of(&situation);
            while situation.session.poll_transmit().is_some() {}
            let limit = if situation.established { CONTROL_MAX } else { PREAUTH_MAX };
            // A length that is too large is refused before anything else arrives.
            let too_long = (limit as u32 + 1).to_le_bytes();
            let bytes = if garbage { &b"\x04\0\0\0\xc1\xc1\xc1\xc1"[..] } else { &too_long };
            situation.session.receive(bytes, now);
            let reason = the_end(&mut situation);
            assert_eq!(reason.code, situation.ending.unwrap_or(code));
            assert!(!reason.by_peer);
            let told = situation.session.poll_transmit();
            assert_eq!(told.is_some(), situation.ending.is_none(), "{}", situation.name);
        }
    }
}

#[test]
fn every_known_message_in_every_state_is_taken_or_ends_the_session_but_never_worse() {
    for message in &every_message() {
        for mut situation in every_state() {
            let now = now_of(&situation);
            let established_before = situation.session.is_established();
            situation.session.receive(&encode(message), now);
            let is_close = matches!(message, Message::Close(_));
            let harmless = matches!(
                message,
                Message::Ping(_)
                    | Message::Pong(_)
                    | Message::Revoke(_)
                    | Message::Revoked(_)
                    | Message::Request(_)
                    | Message::Response(_)
                    | Message::Unknown { .. }
            );
            let name = format!("{} in state {:?}", message.kind(), situation.name);
            if is_close || (!harmless && situation.ending.is_none()) {
                // The challenge denies having the initiator's secret.
                let proper = matches!(message, Message::Hello(_))
                    && situation.name == "acceptor awaits hello";
                assert_eq!(situation.session.is_closed(), !proper, "{name}");
            } else if !situation.established {
                assert_eq!(the_end(&mut situation).code, WireCode::Malformed, "{name}");
            } else {
                assert!(!situation.session.is_closed(), "{name}");
                assert_eq!(situation.session.is_established(), established_before, "{name}");
            }
        }
    }
}

/// Feeds `flood` again and again to an established session that is not polled.
fn flood(mut flood: impl FnMut(u64) -> Message, times: u64) -> Session {
    let mut pair = Pair::established();
    let mut session =
        std::mem::replace(pair.session(B), Session::acceptor(config(B), SESSION, [0; 32], NOW));
    for n in 0..times {
        session.receive(&encode(&flood(n)), pair.now);
    }
    session
}

/// Everything the session holds for others: frames, their bytes, events, their bytes.
fn drain(session: &mut Session) -> (usize, usize, Vec<SessionEvent>) {
    let frames: Vec<_> = std::iter::from_fn(|| session.poll_transmit()).collect();
    let events: Vec<_> = std::iter::from_fn(|| session.poll_event()).collect();
    let bytes = frames.iter().map(Vec::len).sum();
    assert!(frames.len() <= OUTBOX_MAX + 2 && bytes <= OUTBOX_BYTES_MAX + 1024);
    assert!(events.len() <= EVENTS_MAX + 1024 + 1);
    let event_bytes: usize = events
        .iter()
        .map(|event| match event {
            SessionEvent::Request { body, .. } | SessionEvent::Response { body, .. } => body.len(),
            SessionEvent::RevokeRequested { streams, .. } => streams.len() * 4,
            _ => 0,
        })
        .sum();
    assert!(event_bytes <= EVENT_BYTES_MAX);
    (frames.len(), bytes, events)
}

#[test]
fn a_flood_of_pings_is_answered_by_one_pong() {
    let pings = IDLE_FRAMES_PER_SECOND;
    let mut session = flood(|seq| Message::Ping(Ping { seq, active: true }), pings);
    assert!(session.wants_read());
    let pong = session.poll_transmit().unwrap();
    assert_eq!(pong, encode(&Message::Pong(Pong { seq: pings - 1 })), "the latest");
    assert_eq!(session.poll_transmit(), None);
    assert_eq!(session.poll_event(), None);
}

#[test]
fn floods_without_a_meaning_leave_no_trace() {
    for message in [
        Message::Pong(Pong { seq: 1 }),
        Message::Revoked(Revoked { id: 3 }),
        Message::Response(Response { id: 3, code: WireCode::Ok, body: vec![0; 1000] }),
        Message::Unknown { kind: "future".into() },
    ] {
        // A long frame counts like several.
        let times = IDLE_FRAMES_PER_SECOND / encode(&message).len().div_ceil(256) as u64;
        let mut session = flood(|_| message.clone(), times);
        assert!(session.is_established());
        assert_eq!((session.poll_transmit(), session.poll_event()), (None, None));
        let mut session = flood(|_| message.clone(), times + 1);
        let (.., events) = drain(&mut session);
        assert!(
            matches!(&events[..], [SessionEvent::Closed(r)] if r.code == WireCode::Busy && !r.by_peer),
            "{message:?}: {events:?}"
        );
    }
}

#[test]
fn a_peer_that_pings_at_line_rate_is_closed_as_busy_and_one_at_the_shortest_interval_is_not() {
    for (every, ends) in [(Duration::from_millis(1), false), (Duration::from_micros(100), true)] {
        let mut pair = Pair::established();
        let (mut now, end) = (pair.now, pair.now + Duration::from_secs(60));
        let session = pair.session(B);
        while now < end && !session.is_closed() {
            now = now + every;
            for message in
                [Message::Ping(Ping { seq: 1, active: true }), Message::Pong(Pong { seq: 1 })]
            {
                session.receive(&encode(&message), now);
            }
        }
        assert_eq!(session.is_closed(), ends, "every {every:?}");
        if ends {
            assert_eq!(session.close_reason().unwrap().code, WireCode::Busy);
        }
    }
}

#[test]
fn answers_that_come_after_the_deadline_of_their_requests_are_not_counted_as_a_flood() {
    let mut pair = Pair::established();
    for _ in 0..2 * IDLE_FRAMES_PER_SECOND / 1024 {
        let ids: Vec<u64> = (0..1024)
            .map(|_| pair.ends[A].session.request(1, vec![], Duration::from_millis(1), pair.now))
            .collect();
        pair.now = pair.now + Duration::from_millis(1);
        let a = &mut pair.ends[A].session;
        a.handle_timeout(pair.now);
        while a.poll_event().is_some() {}
        while a.poll_transmit().is_some() {}
        for id in ids {
            let late = Response { id, code: WireCode::Ok, body: vec![] };
            a.receive(&encode(&Message::Response(late)), pair.now);
        }
        assert!(a.is_established());
    }
}

#[test]
fn a_flood_of_requests_is_refused_then_pushed_back_then_ended() {
    let request = |id| Message::Request(Request { id, kind: 1, budget_ms: 0, body: vec![1; 10] });
    let mut some = flood(request, 2000);
    assert!(some.is_established() && some.wants_read());
    let (frames, _, events) = drain(&mut some);
    assert_eq!((frames, events.len()), (2000 - 1024, 1024), "the rest was told that we are busy");

    assert!(!flood(request, 6000).wants_read());

    let mut many = flood(request, 100_000);
    let (.., events) = drain(&mut many);
    assert_eq!(events.len(), 1025);
    let Some(SessionEvent::Closed(reason)) = events.last() else { panic!("ended") };
    assert_eq!((reason.code, reason.by_peer), (WireCode::Busy, false));
}

#[test]
fn floods_of_revokes_and_of_large_requests_end_the_session() {
    let large =
        |id| Message::Request(Request { id, kind: 1, budget_ms: 0, body: vec![1; 500_000] });
    let few = flood(large, 10);
    assert!(few.is_established() && !few.wants_read());
    let revoke =
        |streams| move |id| Message::Revoke(Revoke { id, streams: vec![StreamId(1); streams] });
    for mut session in [flood(large, 100), flood(revoke(0), 3000), flood(revoke(4096), 3000)] {
        let (.., events) = drain(&mut session);
        assert!(matches!(events.last(), Some(SessionEvent::Closed(r)) if r.code == WireCode::Busy));
    }
}

#[test]
fn an_id_in_use_is_not_used_again() {
    let request = Message::Request(Request { id: 1, kind: 1, budget_ms: 0, body: vec![] });
    let revoke = Message::Revoke(Revoke { id: 1, streams: vec![] });
    for message in [request, revoke] {
        let mut session = flood(|_| message.clone(), 2);
        let (.., events) = drain(&mut session);
        assert!(
            matches!(&events[..], [_, SessionEvent::Closed(r)] if r.code == WireCode::Malformed)
        );
    }
}

#[test]
fn requests_whose_asker_gave_up_make_room_for_new_ones() {
    let mut pair = Pair::established();
    for round in 0..5 {
        for _ in 0..1024 {
            pair.ends[A].session.request(round, vec![], Duration::from_secs(1), pair.now);
        }
        // The peer never answers.
        pair.run_for(Duration::from_secs(2));
        assert_eq!(pair.take_events(B).len(), 1024, "round {round}");
        assert_eq!(pair.take_events(A).len(), 1024, "all ended at their deadline");
    }
}

#[test]
fn a_ready_is_not_overtaken_by_a_heartbeat() {
    let mut pair = Pair::new(config(A), config(B));
    let now = pair.now;
    pair.session(B).set_active(true, now);
    // The acceptor's socket is full just when the proof arrives.
    let first = pair.session(A).poll_transmit().unwrap();
    let b = pair.session(B);
    b.receive(&first[8..], now);
    let challenge = b.poll_transmit().unwrap();
    pair.session(A).receive(&challenge, now);
    let proof = pair.session(A).poll_transmit().unwrap();
    let b = pair.session(B);
    b.receive(&proof, now);
    let due = b.next_timeout().unwrap();
    b.handle_timeout(due);
    let frames: Vec<_> = std::iter::from_fn(|| b.poll_transmit()).collect();
    assert_eq!(frames.len(), 2, "ready and ping");
    for frame in frames {
        pair.session(A).receive(&frame, due);
    }
    assert!(pair.session(A).is_established());
}
