//! A relay between two agents of one secret: whatever it does to their frames, no side believes
//! anything that the other did not say, in that order.
#![allow(clippy::single_range_in_vec_init, reason = "an order is a list of ranges")]

use crate::protocol::pair::{A, B, Pair, config, guards, ms, with_secret};
use kvferry_models::lane_pair::{ANSWERS, LanePair, Order, REQUESTS};
use kvferry_proto::frame::{CHECKSUM_PIECE, head_crc};
use kvferry_proto::lane::{Begin, Initiator, Next, Placed, Target};
use kvferry_proto::{
    FrameError, Guard, Limits, Notification, Op, RegionId, RequestHeader, SessionConfig,
    SessionEvent, StreamId, TransferId, WireCode, WireDescriptor,
};
use proptest::prelude::*;

const SECRET: &str = "a secret of a test";

fn keyed() -> Pair {
    let mut pair = Pair::new(with_secret(A, SECRET), with_secret(B, SECRET));
    pair.establish();
    pair
}

/// What a relay does to one of the frames that are on their way.
#[derive(Clone, Copy, Debug)]
enum Meddling {
    Flip(usize),
    Drop,
    Replay,
    Swap,
    Cut(usize),
    Insert(u8),
}

fn meddling() -> impl Strategy<Value = Meddling> {
    prop_oneof![
        any::<usize>().prop_map(Meddling::Flip),
        Just(Meddling::Drop),
        Just(Meddling::Replay),
        Just(Meddling::Swap),
        any::<usize>().prop_map(Meddling::Cut),
        any::<u8>().prop_map(Meddling::Insert),
    ]
}

/// Whether that changes what arrives.
fn meddle(frames: &mut Vec<Vec<u8>>, which: usize, how: Meddling) {
    let which = which % frames.len();
    let len = frames[which].len();
    match how {
        Meddling::Flip(bit) => frames[which][bit / 8 % len] ^= 1 << (bit % 8),
        Meddling::Drop => drop(frames.remove(which)),
        Meddling::Replay => frames.insert(which, frames[which].clone()),
        Meddling::Swap => {
            let next = (which + 1) % frames.len();
            frames.swap(which, next);
        }
        Meddling::Cut(at) => frames[which].truncate(at % len),
        Meddling::Insert(byte) => frames[which].insert(usize::from(byte) % len, byte),
    }
}

fn bodies(events: &[SessionEvent]) -> Vec<Vec<u8>> {
    let body = |event: &SessionEvent| match event {
        SessionEvent::Request { body, .. } => Some(body.clone()),
        _ => None,
    };
    events.iter().filter_map(body).collect()
}

proptest! {
    #[test]
    fn control_frames_that_a_relay_changed_are_a_prefix_of_what_was_sent_and_end_the_session(
        which in 0..8usize, how in meddling()
    ) {
        let mut pair = keyed();
        let sent: Vec<Vec<u8>> = (0..8u8).map(|n| vec![n; 5]).collect();
        for body in &sent {
            let now = pair.now;
            pair.session(A).request(1, body.clone(), ms(500), now);
        }
        pair.pump();
        pair.in_flight(A, |frames| meddle(frames, which, how));
        pair.run_for(ms(10));
        // The frame behind the last one shows that something is missing.
        let now = pair.now;
        pair.session(A).request(1, b"after".to_vec(), ms(500), now);
        // A length that became longer waits for bytes that never come.
        pair.run_for(std::time::Duration::from_secs(10));
        let got = bodies(&pair.ends[B].events);
        prop_assert!(sent.starts_with(&got), "{got:?}");
        prop_assert!(got.len() < 8 || pair.closed(B).is_some());
        if let Some(reason) = pair.closed(B)
            && !reason.by_peer
        {
            prop_assert!(
                matches!(reason.code, WireCode::Forged | WireCode::TooLarge | WireCode::Silent),
                "{reason:?}"
            );
        }
    }

    #[test]
    fn requests_of_a_stream_that_a_relay_changed_are_a_prefix_of_what_was_sent(
        which in 0..3usize, how in meddling()
    ) {
        let [near, far] = guards(true);
        let sent = notes(3);
        let mut frames = requests(near, &sent);
        meddle(&mut frames, which, how);
        let (got, error) = served(Target::new(Limits::default(), false, far, frames.concat()));
        prop_assert!(sent.starts_with(&got), "{got:?}");
        prop_assert!(got.len() < 3 || error.is_some() || matches!(how, Meddling::Replay));
    }
}

fn notes(n: u8) -> Vec<Vec<u8>> {
    (0..n).map(|n| vec![n; 3]).collect()
}

/// The frames of notifications that an initiator sends.
fn requests(guard: Guard, notes: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let limits = Limits::default();
    let mut initiator = Initiator::new(TransferId(4), false, limits, guard);
    let begin = Begin { op: Op::Notify, descriptors: 0, payload_len: 0, budget_ms: 9 };
    let frame = |note: &Vec<u8>| {
        let mut head = vec![0; RequestHeader::LEN];
        let note = Notification { name: "n".into(), message: note.clone() };
        note.write_to(&mut head, &limits).unwrap();
        initiator.begin(begin, head, ());
        let bytes = initiator.transmit().unwrap().bytes.to_vec();
        initiator.sent(bytes.len());
        bytes
    };
    notes.iter().map(frame).collect()
}

/// The notifications that a target delivers of what it got, and why it stopped.
fn served(mut target: Target) -> (Vec<Vec<u8>>, Option<FrameError>) {
    let mut got = Vec::new();
    loop {
        match target.poll() {
            Err(malformed) => return (got, Some(malformed.error)),
            Ok(Next::Decide(request)) => {
                // Nothing but notifications was sent.
                assert_eq!(request.header.op, Op::Notify);
                target.accept();
            }
            Ok(Next::Flush) => {
                let Placed::Written { notification, .. } = target.placed() else { panic!() };
                got.push(notification.unwrap().message);
                target.answer(WireCode::Ok);
            }
            Ok(Next::Transmit(transmit)) => {
                let n = transmit.bytes.len();
                target.sent(n);
            }
            Ok(_) => return (got, None),
        }
    }
}

#[test]
fn a_frame_of_another_stream_direction_or_session_does_not_fit() {
    let pair = keyed();
    let guard =
        |side: usize, stream| pair.ends[side].session.stream_guard(StreamId(stream)).unwrap();
    let mut other = Pair::new(
        SessionConfig { name: "another".into(), ..with_secret(A, SECRET) },
        with_secret(B, SECRET),
    );
    other.establish();
    let foreign = other.ends[A].session.stream_guard(StreamId(1)).unwrap();
    let crc = pair_without_secret();
    let frames = |guard| requests(guard, &notes(1)).concat();
    let limits = Limits::default();
    let verdict = |bytes| served(Target::new(limits, false, guard(B, 1), bytes));
    assert_eq!(verdict(frames(guard(A, 1))), (notes(1), None));
    for (what, bytes) in [
        ("another stream", frames(guard(A, 2))),
        ("the other direction", frames(guard(B, 1))),
        ("another session", frames(foreign)),
    ] {
        assert_eq!(verdict(bytes), (vec![], Some(FrameError::Forged)), "{what}");
    }
    assert_eq!(verdict(frames(crc)), (vec![], Some(FrameError::Version(1))), "no tag");
}

fn pair_without_secret() -> Guard {
    let [near, _] = guards(false);
    near
}

#[test]
fn a_descriptor_that_a_relay_rewrote_is_never_looked_up() {
    for keyed in [false, true] {
        let [near, far] = guards(keyed);
        let mut head = vec![0; RequestHeader::LEN];
        WireDescriptor { offset: 0, len: 8, region: RegionId(1) }.write_to(&mut head);
        let mut initiator = Initiator::new(TransferId(4), false, Limits::default(), near);
        let begin = Begin { op: Op::Write, descriptors: 1, payload_len: 8, budget_ms: 9 };
        initiator.begin(begin, head, ());
        let mut bytes = initiator.transmit().unwrap().bytes.to_vec();
        bytes[RequestHeader::LEN] = 77;
        if !keyed {
            // As a relay does.
            let (header, table) = bytes.split_first_chunk_mut().unwrap();
            RequestHeader::set_head_crc(header, head_crc(header, table, &[]));
        }
        let mut target = Target::new(Limits::default(), false, far, bytes);
        match target.poll() {
            Ok(Next::Decide(_)) => assert!(!keyed),
            Err(malformed) => assert!(keyed && malformed.error == FrameError::Forged),
            Ok(next) => panic!("{next:?}"),
        }
    }
}

#[test]
fn every_byte_of_a_keyed_stream_but_payload_ends_it_when_a_relay_changes_it() {
    let orders = [
        Order { op: Op::Write, near: 0, far: vec![10..40, 50..60], note: Some(vec![1, 2]) },
        Order { op: Op::Read, near: 100, far: vec![100..130], note: None },
        Order { op: Op::Notify, near: 0, far: vec![], note: Some(vec![3]) },
    ];
    for checksum in [false, true] {
        let run = |flip: Option<(usize, u64)>| {
            let mut pair = LanePair::with_guard(1024, checksum, true, orders.to_vec());
            if let Some((direction, at)) = flip {
                pair.wires[direction].flip = Some((at, 1 << (at % 8)));
            }
            pair.run();
            if pair.ended.len() < orders.len() {
                pair.reset();
            }
            pair.check();
            pair
        };
        let plain = run(None);
        assert!(plain.is_between());
        let mut unnoticed = [0; 2];
        for direction in [REQUESTS, ANSWERS] {
            for at in 0..plain.wires[direction].sent {
                let pair = run(Some((direction, at)));
                unnoticed[direction] += usize::from(pair.ended == plain.ended);
            }
        }
        // Without checksums, the payload.
        assert_eq!(unnoticed, if checksum { [0, 0] } else { [40, 30] });
    }
}

#[test]
fn a_refused_request_with_a_trailer_leaves_a_keyed_stream_in_step() {
    let write = |at: usize| Order { op: Op::Write, near: 0, far: vec![at..at + 8], note: None };
    let orders = vec![write(5000), write(0), write(6000), write(16)];
    let mut pair = LanePair::with_guard(1024, true, true, orders);
    pair.fails = Some((1, 4));
    pair.run();
    pair.check();
    assert!(pair.is_between());
    assert_eq!(pair.ended.len(), 4);
}

#[test]
fn a_request_that_was_not_sent_leaves_the_stream_to_the_next_transfer_in_step() {
    let [near, far] = guards(true);
    let limits = Limits::default();
    let mut initiator = Initiator::new(TransferId(1), false, limits, near);
    let begin = Begin { op: Op::Notify, descriptors: 0, payload_len: 0, budget_ms: 9 };
    initiator.begin(begin, [&[0; RequestHeader::LEN][..], &[0; 4]].concat(), ());
    let next = initiator.release();
    let frames = requests(next, &notes(2)).concat();
    assert_eq!(served(Target::new(limits, false, far, frames)), (notes(2), None));
}

#[test]
fn payload_without_the_checksums_that_the_session_agreed_on_is_refused() {
    for op in [Op::Write, Op::Read] {
        let [near, far] = guards(false);
        let mut head = vec![0; RequestHeader::LEN];
        WireDescriptor { offset: 0, len: 8, region: RegionId(1) }.write_to(&mut head);
        let mut initiator = Initiator::new(TransferId(4), false, Limits::default(), near);
        initiator.begin(Begin { op, descriptors: 1, payload_len: 8, budget_ms: 9 }, head, ());
        let bytes = initiator.transmit().unwrap().bytes.to_vec();
        let mut target = Target::new(Limits::default(), true, far, bytes);
        let error = target.poll().expect_err("refused").error;
        assert!(matches!(error, FrameError::Inconsistent(_)), "{error:?}");
    }
}

#[test]
fn a_peer_that_speaks_only_version_1_is_refused_where_there_is_a_secret() {
    for old in [A, B] {
        let mut configs = [with_secret(A, SECRET), with_secret(B, SECRET)];
        configs[old].versions = (1, 1);
        let [a, b] = configs;
        let mut pair = Pair::new(a, b);
        pair.run_for(ms(100));
        assert_eq!(pair.ended(A).0, WireCode::VersionMismatch);
    }
    let mut plain = Pair::new(SessionConfig { versions: (1, 1), ..config(A) }, config(B));
    plain.run_for(ms(100));
    assert!(plain.established_peer(B).is_some_and(|peer| peer.version == 1));
}

#[test]
fn a_large_trailer_has_one_tag() {
    let len = 2 * CHECKSUM_PIECE + 5;
    let order = Order { op: Op::Write, near: 0, far: vec![0..len], note: None };
    let mut pair = LanePair::with_guard(len, true, true, vec![order]);
    pair.run();
    pair.check();
    assert_eq!(pair.wires[REQUESTS].sent as usize, 64 + 16 + len + 3 * 4 + 16);
    assert_eq!(pair.wires[ANSWERS].sent, 56);
}
