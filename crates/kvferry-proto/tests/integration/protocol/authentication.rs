//! What an attacker without the secret can make of what he sees and sends.

use crate::protocol::pair::{A, B, INCARNATION, Pair, SESSION, config, ms, with_secret};
use kvferry_proto::message::{Challenge, Decoder, Hello, Message, Proof, Ready, encode};
use kvferry_proto::{
    Incarnation, PREAUTH_MAX, Secret, Session, SessionEvent, SessionKey, Timestamp, WireCode,
};

const NOW: Timestamp = Timestamp::from_nanos(1_000_000_000_000);

fn initiator() -> Session {
    Session::initiator(with_secret(A, "hush"), None, [1; 32], NOW)
}

fn acceptor(nonce: u8) -> Session {
    Session::acceptor(with_secret(B, "hush"), SESSION, [nonce; 32], NOW)
}

/// The next frame of a session, without the magic.
pub(crate) fn frame(session: &mut Session) -> Vec<u8> {
    let bytes = session.poll_transmit().expect("has something to say");
    if bytes.starts_with(&kvferry_proto::MAGIC) { bytes[8..].to_vec() } else { bytes }
}

fn parse(frame: &[u8]) -> Message {
    Decoder::new(PREAUTH_MAX).read(&mut &frame[..]).unwrap().unwrap()
}

#[track_caller]
fn fails_with(session: &mut Session, code: WireCode) {
    match session.poll_event() {
        Some(SessionEvent::Closed(reason)) => {
            assert_eq!((reason.code, reason.established), (code, false));
        }
        other => panic!("expected the end, got {other:?}"),
    }
    assert_eq!(session.poll_event(), None);
}

#[test]
fn equal_secrets_authenticate_both_sides() {
    let mut pair = Pair::new(with_secret(A, "hush"), with_secret(B, "hush"));
    pair.run_for(ms(10));
    for side in [A, B] {
        assert!(pair.established_peer(side).unwrap().authenticated);
    }
}

#[test]
fn who_merely_connects_never_gets_a_mac_to_try_guesses_against() {
    let mut acceptor = acceptor(2);
    acceptor.receive(&frame(&mut initiator()), NOW);
    assert!(matches!(parse(&frame(&mut acceptor)), Message::Challenge(_)));
    acceptor.receive(&encode(&Message::Proof(Proof { mac: [0; 32] })), NOW);
    assert!(matches!(parse(&frame(&mut acceptor)), Message::Refused(_)));
    assert_eq!(acceptor.poll_transmit(), None);
    fails_with(&mut acceptor, WireCode::AuthFailed);
}

#[test]
fn a_proof_replayed_into_another_handshake_fails() {
    let (mut alice, mut bob) = (initiator(), acceptor(2));
    let hello = frame(&mut alice);
    bob.receive(&hello, NOW);
    alice.receive(&frame(&mut bob), NOW);
    let proof = frame(&mut alice);
    bob.receive(&proof, NOW);
    assert!(bob.is_established());
    // The whole conversation again, to an acceptor with a fresh nonce.
    let mut fresh = acceptor(3);
    fresh.receive(&hello, NOW);
    fresh.receive(&proof, NOW);
    fails_with(&mut fresh, WireCode::AuthFailed);
}

#[test]
fn a_proof_reflected_to_its_maker_fails() {
    let (mut alice, mut bob) = (initiator(), acceptor(2));
    bob.receive(&frame(&mut alice), NOW);
    alice.receive(&frame(&mut bob), NOW);
    let Message::Proof(Proof { mac }) = parse(&frame(&mut alice)) else { panic!("a proof") };
    for checksum in [false, true] {
        let (mut alice, mut bob) = (initiator(), acceptor(2));
        bob.receive(&frame(&mut alice), NOW);
        alice.receive(&frame(&mut bob), NOW);
        let ready = Ready { session: SESSION, mac, checksum, advertised: String::new() };
        alice.receive(&encode(&Message::Ready(ready)), NOW);
        fails_with(&mut alice, WireCode::AuthFailed);
    }
}

#[test]
fn an_impostor_that_skips_the_challenge_gets_nowhere() {
    let mut alice = initiator();
    let ready =
        Ready { session: SESSION, mac: [0; 32], checksum: false, advertised: String::new() };
    alice.receive(&encode(&Message::Ready(ready)), NOW);
    fails_with(&mut alice, WireCode::Malformed);

    let mut bob = acceptor(2);
    bob.receive(&encode(&Message::Proof(Proof { mac: [0; 32] })), NOW);
    fails_with(&mut bob, WireCode::Malformed);
}

#[test]
fn a_challenge_that_does_not_fit_the_hello_ends_the_handshake() {
    let plain = || Session::initiator(config(A), None, [1; 32], NOW);
    for (mut initiator, version, authenticate, code) in [
        (initiator(), 2, false, WireCode::AuthUnsupported),
        (plain(), 1, true, WireCode::AuthRequired),
        (initiator(), 9, true, WireCode::VersionMismatch),
    ] {
        let challenge = Challenge {
            version,
            capabilities: 0,
            incarnation: INCARNATION[B],
            name: "mallory".into(),
            nonce: [9; 32],
            authenticate,
        };
        initiator.receive(&encode(&Message::Challenge(challenge)), NOW);
        fails_with(&mut initiator, code);
    }
}

/// Runs the handshake; `tamper` changes one message on the way.
fn tampered(which: usize, tamper: impl Fn(&mut Message)) -> (Session, Session) {
    let (mut alice, mut bob) = (initiator(), acceptor(2));
    for index in 0..4 {
        let (from, to) =
            if index % 2 == 0 { (&mut alice, &mut bob) } else { (&mut bob, &mut alice) };
        if from.is_closed() {
            break;
        }
        let mut message = parse(&frame(from));
        if index == which {
            tamper(&mut message);
        }
        to.receive(&encode(&message), NOW);
    }
    (alice, bob)
}

#[test]
fn any_change_of_the_handshake_on_the_way_is_noticed() {
    let hello = |change: fn(&mut Hello)| {
        tampered(0, move |message| {
            if let Message::Hello(it) = message {
                change(it)
            }
        })
    };
    let challenge = |change: fn(&mut Challenge)| {
        tampered(1, move |message| {
            if let Message::Challenge(it) = message {
                change(it)
            }
        })
    };
    let ready = |change: fn(&mut Ready)| {
        tampered(3, move |message| {
            if let Message::Ready(it) = message {
                change(it)
            }
        })
    };
    // Untouched, re-encoding changes nothing.
    let (alice, bob) = tampered(9, |_| ());
    assert!(alice.is_established() && bob.is_established());

    for (mut alice, mut bob) in [
        hello(|m| m.capabilities ^= 1),
        hello(|m| m.versions = (2, 3)),
        hello(|m| m.name = "mallory".into()),
        hello(|m| m.incarnation = Incarnation(6)),
        hello(|m| m.checksum = true),
        hello(|m| m.nonce[31] ^= 1),
        hello(|m| m.advertised = "evil:1".into()),
        challenge(|m| m.capabilities ^= 1),
        challenge(|m| m.name = "mallory".into()),
        challenge(|m| m.incarnation = Incarnation(6)),
        challenge(|m| m.nonce[0] ^= 1),
    ] {
        assert!(!alice.is_established());
        alice.transport_closed(NOW);
        fails_with(&mut bob, WireCode::AuthFailed);
    }
    for (mut alice, _) in [
        ready(|m| m.checksum = true),
        ready(|m| m.advertised = "evil:1".into()),
        ready(|m| m.session.0 += 1),
        ready(|m| m.mac[16] ^= 0x80),
    ] {
        fails_with(&mut alice, WireCode::AuthFailed);
    }
}

#[test]
fn secrets_and_keys_are_never_displayed() {
    assert!(Secret::new(b"".to_vec()).is_none(), "an empty secret is no secret");
    let secret = Secret::new("hush-hush").unwrap();
    assert_eq!(format!("{secret:?}"), "Secret(..)");
    assert_eq!(format!("{:?}", SessionKey::from_bytes([7; 32])), "SessionKey(..)");
    let mut pair = Pair::new(with_secret(A, "hush-hush"), with_secret(B, "hush-hush"));
    pair.run_for(ms(2));
    let shown = format!("{pair:?}");
    let bytes = format!("{:?}", b"hush-hush");
    assert!(!shown.contains("hush-hush") && !shown.contains(&bytes[1..bytes.len() - 1]));
}
