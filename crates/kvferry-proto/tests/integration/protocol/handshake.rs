//! How a session comes about, and every way in which it does not.

use crate::protocol::pair::{A, B, INCARNATION, Pair, SESSION, config, ms, with_secret};
use kvferry_proto::{
    ChecksumPolicy, Incarnation, PREAUTH_MAX, SessionConfig, SessionEvent, WireCode,
};
use std::time::Duration;

#[test]
fn both_sides_learn_who_the_other_is() {
    let mut pair = Pair::new(
        SessionConfig {
            capabilities: 0b0110,
            versions: (1, 3),
            advertised: "10.0.0.1:7000".into(),
            ..config(A)
        },
        SessionConfig {
            capabilities: 0b0011,
            versions: (2, 5),
            advertised: "10.0.0.2:7000".into(),
            ..config(B)
        },
    );
    pair.run_for(ms(10));
    let (at_a, at_b) = (pair.established_peer(A).unwrap(), pair.established_peer(B).unwrap());
    assert_eq!((at_a.name.as_str(), at_a.incarnation), ("bob", INCARNATION[B]));
    assert_eq!((at_b.name.as_str(), at_b.incarnation), ("alice", INCARNATION[A]));
    for (peer, advertised) in [(at_a, "10.0.0.2:7000"), (at_b, "10.0.0.1:7000")] {
        assert_eq!(peer.version, 3, "the highest both speak");
        assert_eq!(peer.capabilities, 0b0010, "what both can");
        assert_eq!(peer.session, SESSION);
        assert_eq!(peer.advertised, advertised);
        assert!(!peer.authenticated && !peer.checksum);
    }
    let peer = at_a.clone();
    assert_eq!(pair.session(A).peer(), Some(&peer));
}

#[test]
fn a_handshake_takes_two_round_trips() {
    let mut pair = Pair::new(config(A), config(B));
    pair.latency(A, ms(10));
    pair.latency(B, ms(10));
    pair.run_for(ms(30));
    assert!(pair.session(B).is_established() && !pair.session(A).is_established());
    pair.run_for(ms(10));
    assert!(pair.session(A).is_established());
}

#[test]
fn bytes_may_come_one_at_a_time() {
    for chunk in [1, 2, 3, 7, 64] {
        let mut pair = Pair::new(with_secret(A, "s"), with_secret(B, "s"));
        pair.chunk = chunk;
        pair.establish();
        pair.ends[A].session.close(WireCode::Ok, "", pair.now);
        pair.run_for(ms(10));
        assert_eq!(pair.ended(B), (WireCode::Ok, true));
    }
}

#[test]
fn an_agent_can_call_itself() {
    let mut pair = Pair::new(with_secret(A, "s"), with_secret(A, "s"));
    pair.establish();
    let peers = [A, B].map(|side| pair.session(side).peer().unwrap().clone());
    assert_eq!(peers[A].incarnation, peers[B].incarnation);
}

#[test]
fn one_side_wanting_checksums_is_enough() {
    for (a, b, checksum) in [
        (ChecksumPolicy::Off, ChecksumPolicy::Off, false),
        (ChecksumPolicy::On, ChecksumPolicy::Off, true),
        (ChecksumPolicy::Off, ChecksumPolicy::On, true),
        (ChecksumPolicy::On, ChecksumPolicy::On, true),
    ] {
        let mut pair = Pair::new(
            SessionConfig { checksum: a, ..config(A) },
            SessionConfig { checksum: b, ..config(B) },
        );
        pair.establish();
        for side in [A, B] {
            assert_eq!(pair.session(side).peer().unwrap().checksum, checksum);
        }
    }
}

/// Runs a handshake that must fail with `code`; gives the explanations of both sides.
#[track_caller]
fn refused(mut pair: Pair, code: WireCode, by: usize) -> [String; 2] {
    pair.run_until_idle();
    assert_eq!(pair.ended(by), (code, false), "who refuses");
    assert_eq!(pair.ended(1 - by), (code, true), "who is refused");
    [A, B].map(|side| {
        assert_eq!(pair.ends[side].events.len(), 1, "nothing but the end");
        let reason = pair.closed(side).unwrap();
        assert!(!reason.established);
        reason.detail.clone()
    })
}

#[test]
fn without_a_common_version_both_sides_hear_both_ranges() {
    for (ours, theirs) in [((1, 2), (3, 9)), ((3, 9), (1, 2)), ((0, 0), (65535, 65535))] {
        let pair = Pair::new(
            SessionConfig { versions: ours, ..config(A) },
            SessionConfig { versions: theirs, ..config(B) },
        );
        for detail in refused(pair, WireCode::VersionMismatch, B) {
            for range in [ours, theirs] {
                let range = format!("{} to {}", range.0, range.1);
                assert!(detail.contains(&range), "{detail:?} does not name {range}");
            }
        }
    }
}

#[test]
fn secrets_that_differ_or_that_one_side_lacks_are_refused_and_not_shown() {
    for (a, b, code) in [
        (config(A), with_secret(B, "hush"), WireCode::AuthRequired),
        (with_secret(A, "hush"), config(B), WireCode::AuthUnsupported),
        (with_secret(A, "hush"), with_secret(B, "tush"), WireCode::AuthFailed),
    ] {
        for detail in refused(Pair::new(a, b), code, B) {
            assert!(!detail.contains("ush"), "{detail}");
        }
    }
}

#[test]
fn a_restarted_peer_is_not_the_one_that_was_meant() {
    let mut restarted = config(B);
    restarted.incarnation = Incarnation(0xb2);
    let pair = Pair::expecting(Some(INCARNATION[B]), config(A), restarted);
    refused(pair, WireCode::StaleIncarnation, A);

    let mut pair = Pair::expecting(Some(INCARNATION[B]), config(A), config(B));
    pair.establish();
}

#[test]
fn nothing_is_proved_to_a_peer_that_was_not_meant() {
    let mut pair =
        Pair::expecting(Some(Incarnation(5)), with_secret(A, "hush"), with_secret(B, "hush"));
    pair.run_until_idle();
    assert!(pair.sent(A).iter().all(|(_, message)| message.kind() != "proof"));
}

#[test]
fn layouts_that_differ_are_refused_after_authentication_and_only_if_both_have_one() {
    let with = |side, fingerprint: Option<&[u8]>| SessionConfig {
        fingerprint: fingerprint.map(<[u8]>::to_vec),
        ..with_secret(side, "s")
    };
    refused(Pair::new(with(A, Some(b"bf16")), with(B, Some(b"fp8"))), WireCode::LayoutMismatch, B);
    for (a, b) in [
        (None, None),
        (Some(&b"bf16"[..]), None),
        (None, Some(&b"bf16"[..])),
        (Some(&b"bf16"[..]), Some(&b"bf16"[..])),
        (Some(&[7; 100_000][..]), Some(&[7; 100_000][..])),
    ] {
        Pair::new(with(A, a), with(B, b)).establish();
    }
    let stranger = SessionConfig { fingerprint: Some(b"bf16".into()), ..with_secret(A, "other") };
    refused(Pair::new(stranger, with(B, Some(b"fp8"))), WireCode::AuthFailed, B);
}

/// A handshake in which so many messages have arrived, of four, and the next is under way.
fn after(messages: u64) -> Pair {
    let mut pair = Pair::new(config(A), config(B));
    pair.latency(A, ms(10));
    pair.latency(B, ms(10));
    pair.run_for(ms(10 * messages + 5));
    pair
}

#[test]
fn a_handshake_that_stalls_anywhere_ends_at_its_deadline() {
    let start = Pair::new(config(A), config(B)).now;
    for messages in 0..4 {
        let mut pair = after(messages);
        pair.partition(true);
        pair.run_for(Duration::from_secs(4));
        assert!(pair.closed(A).is_none() && pair.closed(B).is_none());
        pair.run_until(start + Duration::from_secs(5));
        assert_eq!(pair.ended(A), (WireCode::Deadline, false));
        if messages < 3 {
            assert_eq!(pair.ended(B), (WireCode::Deadline, false));
        } else {
            assert!(pair.session(B).is_established(), "the last message is the acceptor's");
            pair.partition(false);
            pair.run_until_idle();
            assert_eq!(pair.ended(B), (WireCode::Deadline, true), "and is taken back");
        }
    }
}

#[test]
fn a_handshake_that_is_cut_anywhere_ends_at_once() {
    for messages in 0..4 {
        let mut pair = after(messages);
        pair.cut();
        pair.run_for(ms(0));
        for side in [A, B] {
            assert_eq!(pair.ended(side), (WireCode::Closed, true));
            assert_eq!(pair.closed(side).unwrap().established, side == B && messages == 3);
        }
    }
}

#[test]
fn a_handshake_can_be_given_up_by_either_side_at_any_point() {
    for messages in 0..4 {
        for side in [A, B] {
            let mut pair = after(messages);
            pair.ends[side].session.close(WireCode::Shutdown, "going home", pair.now);
            pair.run_until_idle();
            assert_eq!(pair.ended(side), (WireCode::Shutdown, false));
            assert_eq!(pair.ended(1 - side), (WireCode::Shutdown, true));
            assert_eq!(pair.closed(1 - side).unwrap().detail, "going home");
        }
    }
}

#[test]
fn oversized_configuration_is_cut_to_what_fits_and_still_gets_through() {
    let mut pair = Pair::new(
        SessionConfig {
            name: "ä".repeat(10_000),
            advertised: "x".repeat(10_000),
            fingerprint: Some(vec![1; 10_000]),
            ..with_secret(A, &"s".repeat(10_000))
        },
        SessionConfig { advertised: "y".repeat(1024), ..with_secret(B, &"s".repeat(10_000)) },
    );
    assert!(pair.session(A).poll_transmit().unwrap().len() <= PREAUTH_MAX + 12);
    let mut pair = Pair::new(
        SessionConfig { name: "ä".repeat(10_000), advertised: "x".repeat(1025), ..config(A) },
        SessionConfig { advertised: "y".repeat(1024), ..config(B) },
    );
    pair.run_for(ms(10));
    assert_eq!(pair.established_peer(B).unwrap().name, "ä".repeat(128));
    assert_eq!(pair.established_peer(B).unwrap().advertised, "", "half an address is none");
    assert_eq!(pair.established_peer(A).unwrap().advertised.len(), 1024);
}

#[test]
fn names_and_explanations_of_a_peer_are_fit_to_be_shown() {
    let mut pair = Pair::new(SessionConfig { name: "a\x1b[31m\nb".into(), ..config(A) }, config(B));
    pair.run_for(ms(10));
    assert_eq!(pair.established_peer(B).unwrap().name, "a\u{fffd}[31m\u{fffd}b");
    pair.ends[A].session.close(WireCode::Ok, &"\x07\r".repeat(1000), pair.now);
    pair.run_for(ms(10));
    let detail = &pair.closed(B).unwrap().detail;
    assert!(detail.len() <= 512 && !detail.chars().any(char::is_control));
}

#[test]
fn requests_made_before_the_session_is_established_are_answered_at_once() {
    let mut pair = Pair::new(config(A), config(B));
    let id = pair.ends[A].session.request(1, vec![], ms(10), pair.now);
    assert_eq!(pair.ends[A].session.revoke(vec![], pair.now), 0, "there is nothing to revoke yet");
    assert!(pair.session(A).stream_hello().is_none());
    pair.run_for(ms(10));
    let answer = SessionEvent::Response { id, code: WireCode::Closed, body: vec![] };
    assert_eq!(pair.ends[A].events[0], answer);
    assert!(pair.session(A).is_established());
}
