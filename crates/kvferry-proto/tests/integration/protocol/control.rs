//! Requests, revokes and closing. Names I1 and I2 of the design.

use crate::protocol::pair::{A, B, Pair, ms};
use kvferry_proto::message::BODY_MAX;
use kvferry_proto::session::{ANSWER_DELAY, WAITING_MAX};
use kvferry_proto::{SessionEvent, StreamId, WireCode};
use std::time::Duration;

const MINUTE: Duration = Duration::from_secs(60);

fn response(id: u64, code: WireCode, body: &[u8]) -> SessionEvent {
    SessionEvent::Response { id, code, body: body.to_vec() }
}

/// Asks from `side`, lets it arrive, and gives the ids of both sides.
fn ask(pair: &mut Pair, side: usize, budget: Duration) -> u64 {
    let id = pair.ends[side].session.request(7, b"who".to_vec(), budget, pair.now);
    pair.run_for(ms(5));
    let asked = SessionEvent::Request { id, kind: 7, body: b"who".to_vec() };
    assert_eq!(pair.take_events(1 - side), [asked]);
    id
}

fn acknowledge(pair: &mut Pair, id: u64) {
    let now = pair.now;
    pair.session(B).acknowledge(id, now);
}

#[test]
fn a_request_is_answered_once_in_both_directions_even_if_the_answerer_repeats_itself() {
    for side in [A, B] {
        let mut pair = Pair::established();
        let id = ask(&mut pair, side, MINUTE);
        pair.session(1 - side).respond(id, WireCode::LayoutMismatch, b"me".to_vec());
        pair.session(1 - side).respond(id, WireCode::Internal, vec![]);
        pair.session(1 - side).respond(id + 100, WireCode::Internal, vec![]);
        pair.run_for(MINUTE * 2);
        assert_eq!(pair.take_events(side), [response(id, WireCode::LayoutMismatch, b"me")]);
    }
}

#[test]
fn answers_may_come_in_any_order() {
    let mut pair = Pair::established();
    let ids: Vec<_> = (0..3).map(|_| ask(&mut pair, A, MINUTE)).collect();
    for id in ids.iter().rev() {
        pair.session(B).respond(*id, WireCode::Ok, vec![*id as u8]);
    }
    pair.run_for(ms(5));
    let expected: Vec<_> =
        ids.iter().rev().map(|id| response(*id, WireCode::Ok, &[*id as u8])).collect();
    assert_eq!(pair.take_events(A), expected);
}

#[test]
fn an_acknowledgement_leaves_behind_the_next_frame_or_with_others_or_after_its_delay() {
    let mut pair = Pair::established();
    let id = ask(&mut pair, A, MINUTE);
    acknowledge(&mut pair, id);
    // An answer that leaves at once takes as long to arrive.
    pair.run_for(ms(5));
    assert_eq!(pair.take_events(A), [], "nothing else was said");
    let question = pair.ends[B].session.request(7, b"who".to_vec(), MINUTE, pair.now);
    pair.run_for(ms(5));
    let asked = SessionEvent::Request { id: question, kind: 7, body: b"who".to_vec() };
    assert_eq!(pair.take_events(A), [asked, response(id, WireCode::Ok, b"")]);

    let ids: Vec<_> = (0..WAITING_MAX).map(|_| ask(&mut pair, A, MINUTE)).collect();
    for id in &ids[1..] {
        acknowledge(&mut pair, *id);
        assert!(!pair.session(B).has_frames());
    }
    acknowledge(&mut pair, ids[0]);
    assert!(pair.session(B).has_frames());
    pair.run_for(ms(5));
    assert_eq!(pair.take_events(A).len(), WAITING_MAX);

    let id = ask(&mut pair, A, MINUTE);
    acknowledge(&mut pair, id);
    acknowledge(&mut pair, id);
    pair.run_for(ANSWER_DELAY + ms(5));
    assert_eq!(pair.take_events(A), [response(id, WireCode::Ok, b"")]);
    // One that would come too late leaves at once.
    let id = ask(&mut pair, A, ANSWER_DELAY);
    acknowledge(&mut pair, id);
    assert!(pair.session(B).has_frames());
}

#[test]
fn an_acknowledgement_that_leaves_late_ends_no_session() {
    let mut pair = Pair::established();
    let id = ask(&mut pair, A, MINUTE);
    // The session has not heard the time for a while.
    pair.now = pair.now + MINUTE / 2;
    acknowledge(&mut pair, id);
    let late = pair.now + MINUTE;
    pair.session(B).handle_timeout(late);
    assert!(!pair.session(B).is_closed());
    assert!(pair.session(B).has_frames());
}

#[test]
fn nothing_is_acknowledged_behind_a_close() {
    let mut pair = Pair::established();
    let id = ask(&mut pair, A, MINUTE);
    acknowledge(&mut pair, id);
    let now = pair.now;
    pair.session(B).close(WireCode::Shutdown, "", now);
    assert!(pair.session(B).poll_transmit().is_some());
    assert_eq!(pair.session(B).poll_transmit(), None);
}

#[test]
fn a_request_without_an_answer_ends_exactly_when_its_budget_does() {
    let mut pair = Pair::established();
    let id = ask(&mut pair, A, ms(750));
    pair.run_for(ms(750) - ms(5) - Duration::from_nanos(1));
    assert_eq!(pair.take_events(A), []);
    pair.run_for(Duration::from_nanos(1));
    assert_eq!(pair.take_events(A), [response(id, WireCode::Deadline, b"")]);
    // The answer that comes too late is dropped, and does no harm.
    pair.session(B).respond(id, WireCode::Ok, vec![1]);
    pair.run_for(ms(5));
    assert_eq!(pair.take_events(A), []);
    assert!(pair.session(A).is_established());
    assert_eq!(pair.session(A).next_timeout(), None, "and nothing is watched any more");
}

#[test]
fn i1_i2_requests_end_before_their_session_and_revokes_without_a_confirmation() {
    type Fault = fn(&mut Pair);
    let faults: [(Fault, WireCode); 3] = [
        (Pair::cut, WireCode::Closed),
        (|pair| pair.kill(B), WireCode::Closed),
        // Silence ends it, long before the budget of the requests.
        (|pair| pair.partition(true), WireCode::Silent),
    ];
    for (fault, code) in faults {
        let mut pair = Pair::established();
        let ids = [ask(&mut pair, A, MINUTE), ask(&mut pair, A, MINUTE)];
        assert_ne!(pair.ends[A].session.revoke(vec![StreamId(3)], pair.now), 0);
        fault(&mut pair);
        pair.run_for(ms(3000));
        let events = &pair.ends[A].events;
        assert_eq!(events[..2], ids.map(|id| response(id, WireCode::Closed, b"")));
        assert!(matches!(&events[2..], [SessionEvent::Closed(reason)] if reason.code == code));
    }
}

#[test]
fn requests_beyond_the_limits_are_answered_by_ourselves() {
    let mut pair = Pair::established();
    let now = pair.now;
    let large = pair.session(A).request(1, vec![0; BODY_MAX + 1], MINUTE, now);
    pair.pump();
    assert_eq!(pair.take_events(A), [response(large, WireCode::TooLarge, b"")]);
    let fits = pair.session(A).request(1, vec![0; BODY_MAX], MINUTE, now);
    pair.run_for(ms(5));
    pair.session(B).respond(fits, WireCode::Ok, vec![1; BODY_MAX]);
    let [SessionEvent::Request { body, .. }] = &pair.take_events(B)[..] else { panic!("one") };
    assert_eq!(body.len(), BODY_MAX);
    pair.run_for(ms(5));
    assert_eq!(pair.take_events(A), [response(fits, WireCode::Ok, &vec![1; BODY_MAX])]);

    let huge = ask(&mut pair, A, MINUTE);
    pair.session(B).respond(huge, WireCode::Ok, vec![1; BODY_MAX + 1]);
    pair.run_for(ms(5));
    assert_eq!(pair.take_events(A), [response(huge, WireCode::TooLarge, b"")]);

    let ids: Vec<_> =
        (0..1030).map(|_| pair.ends[A].session.request(1, vec![], MINUTE, pair.now)).collect();
    pair.run_for(ms(5));
    let refused: Vec<_> = pair.take_events(A);
    let expected: Vec<_> =
        ids[1024..].iter().map(|id| response(*id, WireCode::Busy, b"")).collect();
    assert_eq!(refused, expected);
    assert_eq!(pair.take_events(B).len(), 1024);
}

#[test]
fn a_peer_that_does_not_read_makes_us_busy_before_it_makes_us_large() {
    let mut pair = Pair::established();
    let now = pair.now;
    // The driver takes nothing of what the session wants to send.
    let session = pair.session(A);
    let ids: Vec<_> =
        (0..64).map(|_| session.request(1, vec![0; 256 << 10], MINUTE, now)).collect();
    let busy = std::iter::from_fn(|| session.poll_event()).count();
    assert!((40..64).contains(&busy), "{busy} of {} refused", ids.len());
    assert!(session.is_established());
    let held: usize = std::iter::from_fn(|| session.poll_transmit()).map(|b| b.len()).sum();
    assert!(held <= 8 << 20);
}

#[test]
fn bounds_are_on_what_waits_and_not_on_what_has_ever_passed() {
    let mut pair = Pair::established();
    for n in 0..60 {
        let now = pair.now;
        let id = pair.session(A).request(1, vec![n; 300_000], MINUTE, now);
        pair.run_for(ms(2));
        assert_eq!(pair.take_events(B).len(), 1);
        assert!(pair.session(B).wants_read());
        pair.session(B).respond(id, WireCode::Ok, vec![n; 300_000]);
        pair.run_for(ms(2));
        assert_eq!(pair.take_events(A), [response(id, WireCode::Ok, &[n; 300_000])]);
    }
}

#[test]
fn i2_a_revoke_ends_only_with_the_peers_confirmation() {
    for side in [A, B] {
        let mut pair = Pair::established();
        let streams = vec![StreamId(3), StreamId(4)];
        let id = pair.ends[side].session.revoke(streams.clone(), pair.now);
        pair.run_for(MINUTE);
        assert_eq!(pair.take_events(side), [], "however long it takes");
        assert_eq!(pair.take_events(1 - side), [SessionEvent::RevokeRequested { id, streams }]);
        pair.session(1 - side).confirm_revoked(id);
        pair.session(1 - side).confirm_revoked(id);
        pair.session(1 - side).confirm_revoked(id + 9);
        pair.run_for(ms(5));
        assert_eq!(pair.take_events(side), [SessionEvent::Revoked { id }]);
        assert_eq!(pair.session(side).next_timeout(), None);
    }
}

#[test]
fn a_confirmation_lost_with_the_peer_is_not_made_up() {
    let mut pair = Pair::established();
    let id = pair.ends[A].session.revoke(vec![StreamId(3)], pair.now);
    pair.run_for(ms(5));
    pair.session(B).confirm_revoked(id);
    pair.kill(B);
    pair.run_for(ms(5));
    assert!(matches!(pair.ends[A].events[..], [SessionEvent::Closed(_)]));
}

#[test]
fn revokes_have_limits() {
    let mut pair = Pair::established();
    let now = pair.now;
    assert_eq!(pair.session(A).revoke(vec![StreamId(0); 4097], now), 0);
    for _ in 0..1024 {
        assert_ne!(pair.session(A).revoke(vec![StreamId(1)], now), 0);
    }
    assert_eq!(pair.session(A).revoke(vec![StreamId(1)], now), 0);
    pair.run_for(ms(5));
    assert_eq!(pair.take_events(B).len(), 1024);
    assert!(pair.session(A).is_established());
}

#[test]
fn closing_is_answered_and_both_sides_know_why() {
    for side in [A, B] {
        let mut pair = Pair::established();
        pair.ends[side].session.close(WireCode::Shutdown, "maintenance", pair.now);
        pair.ends[side].session.close(WireCode::Internal, "a second thought", pair.now);
        pair.run_for(ms(5));
        assert_eq!(pair.ended(side), (WireCode::Shutdown, false));
        assert_eq!(pair.ended(1 - side), (WireCode::Shutdown, true));
        assert_eq!(pair.closed(1 - side).unwrap().detail, "maintenance");
        for side in [A, B] {
            let reason = pair.closed(side).cloned();
            assert_eq!(pair.session(side).close_reason(), reason);
        }
        // The session does not need the transport to report the end.
        for side in [A, B] {
            assert_eq!(pair.sent(side).last().unwrap().1.kind(), "close");
        }
    }
}

#[test]
fn a_session_knows_why_it_has_ended_before_that_is_polled() {
    let mut pair = Pair::established();
    assert_eq!(pair.session(A).close_reason(), None);
    pair.ends[A].session.close(WireCode::Shutdown, "why", pair.now);
    let known = pair.session(A).close_reason();
    assert_eq!(known.as_ref().map(|it| (it.code, &*it.detail)), Some((WireCode::Shutdown, "why")));
    assert!(pair.session(A).stream_hello().is_none());
    pair.ends[A].session.transport_closed(pair.now);
    assert_eq!(pair.session(A).close_reason(), known);
    let told = std::iter::from_fn(|| pair.session(A).poll_event()).last();
    assert_eq!(told, known.map(SessionEvent::Closed));
    assert!(told.is_some());
}

#[test]
fn both_sides_may_close_at_once() {
    let mut pair = Pair::established();
    pair.ends[A].session.close(WireCode::Ok, "a", pair.now);
    pair.ends[B].session.close(WireCode::Shutdown, "b", pair.now);
    pair.run_for(ms(5));
    assert_eq!(pair.ended(A), (WireCode::Ok, false));
    assert_eq!(pair.ended(B), (WireCode::Shutdown, false));
}

#[test]
fn a_close_without_an_answer_ends_after_a_second() {
    let mut pair = Pair::established();
    pair.partition(true);
    pair.ends[A].session.close(WireCode::Ok, "", pair.now);
    pair.run_for(Duration::from_secs(1) - Duration::from_nanos(1));
    assert!(pair.closed(A).is_none());
    pair.run_for(Duration::from_nanos(1));
    assert_eq!(pair.ended(A), (WireCode::Ok, false), "with its own reason");
}

#[test]
fn answers_that_were_under_way_still_count_while_closing() {
    let mut pair = Pair::established();
    let id = ask(&mut pair, A, MINUTE);
    let revoke = pair.ends[A].session.revoke(vec![StreamId(1)], pair.now);
    pair.run_for(ms(5));
    pair.session(B).respond(id, WireCode::Ok, vec![]);
    pair.session(B).confirm_revoked(revoke);
    pair.ends[A].session.close(WireCode::Ok, "", pair.now);
    let late = pair.ends[A].session.request(1, vec![], MINUTE, pair.now);
    pair.run_for(ms(5));
    let events = &pair.ends[A].events;
    assert_eq!(events[0], response(late, WireCode::Closed, b""), "no new ones");
    assert_eq!(events[1], response(id, WireCode::Ok, b""));
    assert_eq!(events[2], SessionEvent::Revoked { id: revoke });
    assert_eq!(pair.ended(A), (WireCode::Ok, false));
}

#[test]
fn after_the_end_nothing_happens_any_more() {
    let mut pair = Pair::established();
    pair.ends[A].session.close(WireCode::Ok, "", pair.now);
    pair.run_until_idle();
    let now = pair.now;
    for side in [A, B] {
        let session = pair.session(side);
        assert_eq!(session.request(1, vec![], MINUTE, now), 0);
        assert_eq!(session.revoke(vec![], now), 0);
        session.set_active(true, now);
        session.respond(1, WireCode::Ok, vec![]);
        session.confirm_revoked(1);
        session.receive(b"anything", now);
        session.close(WireCode::Internal, "", now);
        session.transport_closed(now);
        session.handle_timeout(now + MINUTE);
        assert_eq!(session.poll_event(), None);
        assert_eq!(session.poll_transmit(), None);
        assert_eq!(session.next_timeout(), None);
        assert!(session.is_closed() && !session.is_established());
    }
}
