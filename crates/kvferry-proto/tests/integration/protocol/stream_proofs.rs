//! Every stream proves that it belongs to the session, once.

use crate::protocol::pair::{A, B, INCARNATION, Pair, config, ms, with_secret};
use kvferry_proto::local::PROOF;
use kvferry_proto::{
    Incarnation, Opener, Opening, SessionConfig, SessionId, Sniff, Sniffer, StreamHello, StreamId,
    WireCode,
};

fn parse(bytes: &[u8]) -> StreamHello {
    let mut sniffer = Sniffer::new();
    assert_eq!(sniffer.feed(&bytes[..8]), Sniff::Native);
    match Opener::new().feed(&bytes[8..]) {
        Ok(Some(Opening::Stream { hello, rest })) => {
            assert!(rest.is_empty());
            hello
        }
        other => panic!("not a stream: {other:?}"),
    }
}

fn authenticated() -> Pair {
    let mut pair = Pair::new(with_secret(A, "hush"), with_secret(B, "hush"));
    pair.establish();
    pair
}

fn hello(pair: &mut Pair) -> StreamHello {
    parse(&pair.session(A).stream_hello().unwrap().1)
}

#[test]
fn streams_of_the_session_are_accepted_in_any_order() {
    for mut pair in [authenticated(), Pair::established()] {
        let hellos: Vec<_> = (0..5).map(|_| hello(&mut pair)).collect();
        for hello in hellos.iter().rev() {
            assert_eq!(pair.session(B).verify_stream(hello), Ok(()));
        }
    }
}

#[test]
fn a_stream_of_another_key_session_or_incarnation_is_refused_and_uses_up_no_id() {
    let mut other = Pair::new(
        SessionConfig { incarnation: Incarnation(0xa2), ..with_secret(A, "hush") },
        with_secret(B, "hush"),
    );
    other.establish();
    let foreign = hello(&mut other);
    let mut pair = authenticated();
    let good = hello(&mut pair);
    assert_eq!(good.incarnation, INCARNATION[B]);
    let moved = StreamId(good.stream.0 + 1);
    for (forged, code) in [
        (foreign, WireCode::AuthFailed),
        (StreamHello { mac: [0; 32], ..good.clone() }, WireCode::AuthFailed),
        (StreamHello { stream: moved, ..good.clone() }, WireCode::AuthFailed),
        (StreamHello { session: SessionId(1), ..good.clone() }, WireCode::UnknownSession),
        (StreamHello { incarnation: Incarnation(1), ..good.clone() }, WireCode::StaleIncarnation),
    ] {
        assert_eq!(pair.session(B).verify_stream(&forged), Err(code));
    }
    assert_eq!(pair.session(B).verify_stream(&good), Ok(()));
}

#[test]
fn the_proof_for_the_local_socket_opens_no_stream_and_the_other_way_round() {
    let mut pair = authenticated();
    let local = parse(&pair.session(A).prove(PROOF).unwrap().1);
    assert_eq!(pair.session(B).verify_stream(&local), Err(WireCode::AuthFailed));
    let stream = hello(&mut pair);
    assert_eq!(pair.session(B).verify_proof(PROOF, &stream), Err(WireCode::AuthFailed));
    assert_eq!(pair.session(B).verify_proof(PROOF, &local), Ok(()));
    assert_eq!(pair.session(B).verify_proof(PROOF, &local), Err(WireCode::StreamReplayed));
    assert_eq!(pair.session(B).verify_stream(&stream), Ok(()));
}

#[test]
fn streams_need_an_established_session_and_the_right_side_of_it() {
    let mut pair = authenticated();
    let hello = hello(&mut pair);
    assert!(pair.session(B).stream_hello().is_none(), "the acceptor opens none");
    let confused = StreamHello { incarnation: INCARNATION[A], ..hello.clone() };
    assert_eq!(
        pair.session(A).verify_stream(&confused),
        Err(WireCode::UnknownSession),
        "the initiator accepts none"
    );
    pair.ends[A].session.close(WireCode::Ok, "", pair.now);
    assert!(pair.session(A).stream_hello().is_none());
    pair.run_for(ms(10));
    assert_eq!(pair.session(B).verify_stream(&hello), Err(WireCode::UnknownSession));

    let mut early = Pair::new(config(A), config(B));
    assert_eq!(early.session(B).verify_stream(&hello), Err(WireCode::UnknownSession));
}

#[test]
fn a_stream_id_opens_one_stream_even_thousands_later() {
    let mut pair = authenticated();
    let first = hello(&mut pair);
    assert_eq!(pair.session(B).verify_stream(&first), Ok(()));
    assert_eq!(pair.session(B).verify_stream(&first), Err(WireCode::StreamReplayed));
    for _ in 0..5000 {
        let next = hello(&mut pair);
        assert_eq!(pair.session(B).verify_stream(&next), Ok(()));
    }
    assert_eq!(pair.session(B).verify_stream(&first), Err(WireCode::StreamReplayed));
}

#[test]
fn the_answer_to_a_stream_is_the_acceptors_and_for_this_stream_and_code() {
    let mut pair = authenticated();
    let [first, second] = [hello(&mut pair).stream, hello(&mut pair).stream];
    let ok = pair.session(B).stream_answer(first, WireCode::Ok).expect("there is a secret");
    let busy = pair.session(B).stream_answer(first, WireCode::Busy).expect("there is a secret");
    let initiator = pair.session(A);
    assert!(initiator.is_stream_answer(first, WireCode::Ok, Some(&ok)));
    assert!(initiator.is_stream_answer(first, WireCode::Busy, Some(&busy)));
    for (stream, code, mac) in [
        (first, WireCode::Ok, None),
        (first, WireCode::Ok, Some(&busy[..])),
        (first, WireCode::StaleIncarnation, Some(&busy[..])),
        (second, WireCode::Ok, Some(&ok[..])),
        (first, WireCode::Ok, Some(&ok[1..])),
    ] {
        assert!(!initiator.is_stream_answer(stream, code, mac), "{stream:?} {code}");
    }
    // Without a secret there is no proof.
    let mut pair = Pair::established();
    let stream = hello(&mut pair).stream;
    assert_eq!(pair.session(B).stream_answer(stream, WireCode::Ok), None);
    assert!(pair.session(A).is_stream_answer(stream, WireCode::Ok, None));
}
