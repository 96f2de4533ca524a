//! Heartbeat, silence, cuts and sleep. Names I6, I10 and I12 of the design.

use crate::protocol::pair::{A, B, INCARNATION, Pair, config, ms, with_secret};
use kvferry_proto::message::{Decoder, Message};
use kvferry_proto::session::FRAME_RATE_MIN;
use kvferry_proto::{CONTROL_MAX, Incarnation, SessionConfig, SessionEvent, StreamId, WireCode};
use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3600);

fn active(sides: &[usize]) -> Pair {
    let mut pair = Pair::established();
    for &side in sides {
        pair.ends[side].session.set_active(true, pair.now);
    }
    pair
}

#[test]
fn i10_an_idle_session_sends_nothing_and_wants_no_timer() {
    let mut pair = Pair::established();
    let sent = pair.sent(A).len() + pair.sent(B).len();
    pair.run_for(HOUR);
    for side in [A, B] {
        assert_eq!(pair.session(side).next_timeout(), None);
        assert!(pair.session(side).is_established());
    }
    assert_eq!(pair.sent(A).len() + pair.sent(B).len(), sent);
}

#[test]
fn an_active_side_pings_at_its_interval_and_the_other_just_answers() {
    let mut pair = active(&[A]);
    let start = pair.now;
    let said = [A, B].map(|side| pair.session(side).said_bytes());
    assert!(said.iter().all(|bytes| *bytes > 0), "the handshake");
    pair.run_for(Duration::from_secs(60));
    let pings = pair.pings_sent(A);
    assert_eq!(pings.len(), 120);
    let now_said = [A, B].map(|side| pair.session(side).said_bytes());
    assert_eq!(now_said, said, "heartbeats are not counted");
    for (n, at) in (1..).zip(&pings) {
        assert_eq!(*at, start + ms(500) * n);
    }
    assert!(pair.pings_sent(B).is_empty());
    let pongs = pair.sent(B).iter().filter(|(_, m)| matches!(m, Message::Pong(_))).count();
    assert_eq!(pongs, 119, "the last one is still to come");
    assert_eq!(pair.session(B).next_timeout(), None, "the pinged side watches nothing");

    pair.ends[A].session.set_active(false, pair.now);
    pair.run_for(HOUR);
    assert_eq!(
        pair.pings_sent(A).len(),
        121,
        "and stops with the activity, which the last one says"
    );
    assert!(pair.session(A).is_established() && pair.session(B).is_established());
}

#[test]
fn a_session_is_idle_while_neither_side_waits_for_anything() {
    let mut pair = Pair::established();
    let established = pair.now;
    pair.run_for(HOUR);
    let now = pair.now;
    let last = pair.session(B).idle_since(now).expect("nothing is in progress");
    assert!(last <= established + ms(5), "nothing has arrived since");

    pair.ends[A].session.set_active(true, pair.now);
    pair.run_for(ms(600));
    let now = pair.now;
    assert_eq!(pair.session(A).idle_since(now), None);
    assert_eq!(pair.session(B).idle_since(now), None, "the peer's heartbeat says that it waits");
    pair.ends[A].session.set_active(false, pair.now);
    pair.run_for(ms(5));
    let now = pair.now;
    assert!(pair.session(B).idle_since(now).is_some_and(|since| since > last));

    let id = pair.ends[A].session.request(7, b"who".to_vec(), HOUR, now);
    pair.run_for(ms(100));
    let now = pair.now;
    assert_eq!([A, B].map(|side| pair.session(side).idle_since(now)), [None, None]);
    drop(pair.take_events(B));
    assert_eq!(pair.session(B).idle_since(now), None, "the answer is owed");
    pair.session(B).respond(id, WireCode::Ok, Vec::new());
    pair.run_for(ms(100));
    drop(pair.take_events(A));
    let now = pair.now;
    assert!([A, B].iter().all(|side| pair.session(*side).idle_since(now).is_some()));
    pair.session(A).close(WireCode::Closed, "", now);
    assert_eq!(pair.session(A).idle_since(now), None, "it ends");
}

#[test]
fn i6_silence_is_noticed_after_exactly_three_seconds() {
    let mut pair = active(&[A]);
    // The peer answers for a while, then no more.
    pair.run_for(ms(2600));
    let last_heard = *pair.pings_sent(A).last().unwrap() + ms(2);
    pair.partition(true);
    let silent_at = last_heard + Duration::from_secs(3);
    pair.run_until(silent_at - Duration::from_nanos(1));
    assert!(pair.closed(A).is_none(), "not a nanosecond early");
    pair.run_for(Duration::from_nanos(1));
    assert_eq!(pair.ended(A), (WireCode::Silent, false));
    assert!(pair.closed(B).is_none(), "the idle side does not watch");
}

#[test]
fn a_peer_is_not_silent_while_its_events_wait_here() {
    let mut pair = active(&[A]);
    let (begun, silence) = (pair.now, Duration::from_secs(3));
    let id = pair.ends[B].session.request(7, b"who".to_vec(), HOUR, begun);
    let request = pair.ends[B].session.poll_transmit().expect("the request");
    let a = &mut pair.ends[A].session;
    a.receive(&request, begun);
    // The driver comes by every second, and does not get to the request.
    for second in 1..=20 {
        a.handle_timeout(begun + Duration::from_secs(second));
        assert!(!a.is_closed(), "after {second} s");
        assert!(a.poll_transmit().is_some(), "its own heartbeat goes on");
    }
    let taken = begun + Duration::from_secs(20);
    assert!(matches!(a.poll_event(), Some(SessionEvent::Request { id: of, .. }) if of == id));
    for second in 1..=2 {
        a.handle_timeout(taken + Duration::from_secs(second));
    }
    a.handle_timeout(taken + silence - Duration::from_nanos(1));
    assert!(!a.is_closed(), "it has read since");
    a.handle_timeout(taken + silence);
    assert!(a.is_closed());
}

#[test]
fn a_frame_that_does_not_arrive_completely_ends_even_an_idle_session() {
    let mut pair = Pair::established();
    pair.inject(A, &(2 * FRAME_RATE_MIN as u32).to_le_bytes());
    // The silence window, and two seconds for its length, whatever drips in meanwhile.
    let until = pair.now + ms(1) + Duration::from_secs(5);
    for _ in 0..4 {
        pair.run_for(Duration::from_secs(1));
        pair.inject(A, b"x");
    }
    pair.run_until(until - Duration::from_nanos(1));
    assert!(pair.closed(B).is_none());
    pair.run_until(until);
    assert_eq!(pair.ended(B), (WireCode::Silent, false));
}

#[test]
fn a_relay_that_drips_bytes_speaks_for_a_peer_that_is_gone_for_one_silence_window_at_most() {
    // Half a second for the length of the frame that is announced; the longest frame takes 16.
    assert!(kept_alive(FRAME_RATE_MIN / 2) <= ms(3600));
    let longest = kept_alive(CONTROL_MAX);
    assert!(longest <= ms(6100), "{longest:?}");
}

/// How long a relay keeps a session alive that announces so many bytes and sends one now and then.
fn kept_alive(announced: usize) -> Duration {
    let mut pair =
        Pair::new(with_secret(A, "a secret of a test"), with_secret(B, "a secret of a test"));
    pair.establish();
    pair.ends[B].session.set_active(true, pair.now);
    let began = pair.now;
    pair.partition(true);
    let announced = (announced as u32).to_le_bytes();
    for bytes in std::iter::once(&announced[..]).chain(std::iter::repeat(&b"x"[..])) {
        let now = pair.now;
        pair.session(B).receive(bytes, now);
        pair.run_for(ms(100));
        if pair.closed(B).is_some() {
            break;
        }
        assert!(pair.now < began + Duration::from_secs(60), "it is kept alive");
    }
    assert_eq!(pair.ended(B), (WireCode::Silent, false));
    pair.now.saturating_since(began)
}

#[test]
fn becoming_active_gives_a_peer_a_whole_window_however_long_it_was_quiet() {
    let mut pair = Pair::established();
    pair.run_for(HOUR);
    pair.partition(true);
    pair.ends[B].session.set_active(true, pair.now);
    pair.run_for(Duration::from_secs(3) - Duration::from_nanos(1));
    assert!(pair.closed(B).is_none());
    pair.run_for(Duration::from_nanos(1));
    assert_eq!(pair.ended(B), (WireCode::Silent, false));
}

#[test]
fn any_byte_is_a_sign_of_life() {
    let mut pair = active(&[A]);
    pair.latency(A, ms(0));
    pair.stall(A, true);
    // Its pings do not get through, but the longest message of the peer trickles in.
    for bytes in [&(CONTROL_MAX as u32).to_le_bytes()[..], b"x", b"x", b"x", b"x"] {
        pair.run_for(ms(2900));
        pair.inject(B, bytes);
    }
    assert!(pair.closed(A).is_none());
    pair.run_for(Duration::from_secs(4));
    assert_eq!(pair.ended(A), (WireCode::Silent, false));
}

#[test]
fn two_active_sides_live_for_hours_with_any_latency_below_the_window() {
    for latency in [ms(1), ms(1400)] {
        let mut pair = active(&[A, B]);
        pair.latency(A, latency);
        pair.latency(B, latency);
        pair.run_for(HOUR);
        assert!(pair.session(A).is_established() && pair.session(B).is_established());
    }
}

#[test]
fn after_a_partition_heals_both_sides_agree_that_it_is_over() {
    let mut pair = active(&[A]);
    pair.partition(true);
    pair.run_for(Duration::from_secs(10));
    assert_eq!(pair.ended(A), (WireCode::Silent, false));
    pair.partition(false);
    pair.run_for(ms(10));
    assert_eq!(pair.ended(B), (WireCode::Silent, true), "told why");
}

#[test]
fn the_last_message_does_not_queue_behind_what_the_peer_never_read() {
    let mut pair = active(&[A]);
    let now = pair.now;
    let session = pair.session(A);
    session.request(1, vec![0; 1000], HOUR, now);
    while session.poll_event().is_none() {
        session.handle_timeout(session.next_timeout().unwrap());
    }
    let last = session.poll_transmit().unwrap();
    let close = Decoder::new(CONTROL_MAX).read(&mut &last[..]).unwrap().unwrap();
    assert!(matches!(close, Message::Close(close) if close.code == WireCode::Silent));
    assert_eq!(session.poll_transmit(), None);
}

#[test]
fn i6_a_cut_is_noticed_at_once() {
    let mut pair = active(&[A]);
    pair.cut();
    pair.run_for(ms(0));
    for side in [A, B] {
        assert_eq!(pair.ended(side), (WireCode::Closed, true));
        assert!(pair.closed(side).unwrap().established);
    }
}

#[test]
fn i12_a_killed_peer_is_noticed_at_once_and_its_successor_is_met_afresh() {
    let mut pair = active(&[A]);
    pair.kill(B);
    pair.run_for(ms(1));
    assert_eq!(pair.ended(A), (WireCode::Closed, true));

    let reborn = SessionConfig { incarnation: Incarnation(0xb2), ..config(B) };
    let mut stale = Pair::expecting(Some(INCARNATION[B]), config(A), reborn.clone());
    stale.run_until_idle();
    assert_eq!(stale.ended(A), (WireCode::StaleIncarnation, false));
    let mut afresh = Pair::new(config(A), reborn);
    afresh.establish();
    assert_eq!(afresh.session(A).peer().unwrap().incarnation, Incarnation(0xb2));
}

#[test]
fn i6_a_side_that_slept_voids_itself_before_it_looks_at_what_came_in() {
    let mut pair = active(&[A, B]);
    pair.run_for(ms(600));
    pair.sleep(B, Duration::from_secs(60));
    // What arrives meanwhile waits in its socket, and must not be acted on.
    pair.ends[A].session.revoke(vec![StreamId(1)], pair.now);
    pair.ends[A].session.request(1, vec![1], HOUR, pair.now);
    pair.run_until_idle();
    assert_eq!(pair.ended(A).0, WireCode::Silent, "awake, it saw silence");
    assert_eq!(pair.ended(B), (WireCode::Slept, false));
    assert_eq!(pair.ends[B].events.len(), 1, "neither revoke nor request was passed on");
}

#[test]
fn a_sleep_shorter_than_half_the_window_ends_no_session() {
    let mut pair = active(&[A, B]);
    for _ in 0..20 {
        pair.run_for(ms(1700));
        pair.sleep(B, ms(1400));
    }
    pair.run_for(ms(5000));
    assert!(pair.session(A).is_established() && pair.session(B).is_established());
}

#[test]
fn a_late_timer_is_sleep_beyond_half_the_window_and_not_before() {
    for (late, slept) in [(ms(1500), false), (ms(1500) + Duration::from_nanos(1), true)] {
        for by_receiving in [false, true] {
            let mut pair = active(&[A]);
            let due = pair.session(A).next_timeout().unwrap();
            if by_receiving {
                pair.session(A).receive(&[0], due + late);
            } else {
                pair.session(A).handle_timeout(due + late);
            }
            assert_eq!(pair.session(A).is_closed(), slept);
            if slept {
                pair.pump();
                assert_eq!(pair.ended(A), (WireCode::Slept, false));
            }
        }
    }
}

#[test]
fn an_idle_session_survives_a_suspended_machine() {
    let mut pair = Pair::established();
    for side in [A, B] {
        pair.sleep(side, HOUR);
    }
    pair.run_for(HOUR * 2);
    assert!(pair.session(A).is_established() && pair.session(B).is_established());
    pair.ends[A].session.request(1, vec![], ms(100), pair.now);
    pair.run_for(ms(10));
    assert!(matches!(pair.ends[B].events.as_slice(), [SessionEvent::Request { .. }]));
}

#[test]
fn a_session_that_slept_ends_with_that_code_on_both_sides() {
    let mut pair = active(&[B]);
    pair.sleep(B, Duration::from_secs(10));
    pair.run_until_idle();
    assert_eq!(pair.ended(B), (WireCode::Slept, false));
    assert_eq!(pair.ended(A), (WireCode::Slept, true));
}

#[test]
fn a_clock_that_goes_back_does_no_harm() {
    let mut pair = active(&[A]);
    pair.run_for(ms(1000));
    let earlier = pair.now - Duration::from_secs(100);
    pair.session(A).handle_timeout(earlier);
    pair.session(A).receive(&[], earlier);
    pair.run_for(Duration::from_secs(10));
    assert!(pair.session(A).is_established());
}

#[test]
fn heartbeat_intervals_out_of_range_are_clamped() {
    for (interval, silence) in [(ms(0), ms(0)), (HOUR, ms(3000)), (ms(0), ms(3000))] {
        let strange = |side| SessionConfig { ping_interval: interval, silence, ..config(side) };
        let mut pair = Pair::new(strange(A), strange(B));
        pair.latency(A, ms(0));
        pair.latency(B, ms(0));
        pair.establish();
        pair.ends[A].session.set_active(true, pair.now);
        pair.run_for(ms(9000));
        assert!(pair.session(A).is_established());
    }
}
