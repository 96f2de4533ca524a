//! Both ends of a lane: every split, a reset at every byte, refusals and faults, in virtual time.

use kvferry_models::lane_pair::{ANSWERS, Ended, LanePair, Order, REQUESTS};
use kvferry_proto::frame::head_crc;
use kvferry_proto::lane::{Begin, Initiator, LaneError, Outcome, PIPELINE, Receive};
use kvferry_proto::lane::{Next, Target};
use kvferry_proto::{
    Flags, Guard, Limits, Op, RegionId, RequestHeader, ResponseHeader, Timestamp, TransferId,
    WireCode, WireDescriptor,
};
use std::time::Duration;

const MEMORY: usize = 1024;

fn write(near: usize, far: &[(usize, usize)], note: Option<&[u8]>) -> Order {
    transfer(Op::Write, near, far, note)
}

fn read(near: usize, far: &[(usize, usize)]) -> Order {
    transfer(Op::Read, near, far, None)
}

fn transfer(op: Op, near: usize, far: &[(usize, usize)], note: Option<&[u8]>) -> Order {
    let far = far.iter().map(|(at, len)| *at..at + len).collect();
    Order { op, near, far, note: note.map(<[u8]>::to_vec) }
}

fn notify(note: &[u8]) -> Order {
    transfer(Op::Notify, 0, &[], Some(note))
}

/// Every kind of request, good and refused, more than a pipeline of them.
fn mixed() -> Vec<Order> {
    vec![
        write(0, &[(10, 30), (100, 3), (200, 40)], Some(b"first")),
        // Shorter than what is received of a head in one call.
        notify(b""),
        read(200, &[(300, 50), (90, 1)]),
        write(300, &[(400, 20), (MEMORY - 5, 6)], Some(b"refused")),
        write(400, &[(500, 60)], None),
        read(500, &[(MEMORY, 1)]),
        notify(&[7; 90]),
        read(600, &[(600, 33)]),
    ]
}

fn is_refused_write(order: &Order) -> bool {
    order.op == Op::Write && order.far.iter().any(|range| range.end > MEMORY)
}

fn run(checksum: bool, orders: &[Order], set: impl FnOnce(&mut LanePair)) -> LanePair {
    let mut pair = LanePair::new(MEMORY, checksum, orders.to_vec());
    set(&mut pair);
    pair.run();
    if pair.ended.len() < orders.len() {
        // What only a deadline would end.
        pair.reset();
    }
    pair.check();
    pair
}

fn outcomes(pair: &LanePair) -> Vec<Ended> {
    pair.ended.iter().map(|(_, ended)| *ended).collect()
}

fn expected() -> Vec<Ended> {
    let refused = |index| Ended::Refused(WireCode::OutOfBounds, index);
    use Ended::Done;
    vec![Done, Done, Done, refused(1), Done, refused(0), Done, Done]
}

/// Runs once with each checksum setting, with the bytes that cross in either direction.
fn for_each_setting(mut test: impl FnMut(bool, [u64; 2])) {
    for checksum in [false, true] {
        let pair = run(checksum, &mixed(), |_| {});
        assert_eq!(outcomes(&pair), expected());
        assert!(pair.is_between());
        test(checksum, [REQUESTS, ANSWERS].map(|direction| pair.wires[direction].sent));
    }
}

#[test]
fn a_refused_request_leaves_the_stream_in_step() {
    for_each_setting(|_, _| {});
}

#[test]
fn every_split_of_every_message_ends_in_the_same_way() {
    for_each_setting(|checksum, sent| {
        for direction in [REQUESTS, ANSWERS] {
            for at in 1..sent[direction] {
                let pair = run(checksum, &mixed(), |pair| {
                    pair.wires[direction].splits.insert(at);
                });
                assert_eq!(outcomes(&pair), expected(), "split at {at} of direction {direction}");
                assert!(pair.is_between());
            }
        }
        // Byte by byte, in both directions.
        let pair = run(checksum, &mixed(), |pair| {
            for direction in [REQUESTS, ANSWERS] {
                pair.wires[direction].splits.extend(1..sent[direction]);
            }
        });
        assert_eq!(outcomes(&pair), expected());
    });
}

#[test]
fn every_number_of_bytes_may_come_with_the_opening_of_the_stream() {
    for_each_setting(|checksum, sent| {
        for early in 0..=sent[REQUESTS] as usize {
            let pair = run(checksum, &mixed(), |pair| pair.open_with_early_bytes(early));
            assert_eq!(outcomes(&pair), expected(), "{early} early bytes");
        }
    });
}

#[test]
fn i1_a_reset_at_every_byte_ends_each_request_once() {
    for_each_setting(|checksum, sent| {
        for direction in [REQUESTS, ANSWERS] {
            for at in 0..sent[direction] {
                let pair = run(checksum, &mixed(), |pair| {
                    pair.wires[direction].reset_at = Some(at);
                });
                let ended = outcomes(&pair);
                let known = ended.iter().take_while(|ended| **ended != Ended::Lost).count();
                assert_eq!(ended[..known], expected()[..known], "reset at {at}");
                assert!(ended[known..].iter().all(|ended| *ended == Ended::Lost));
                assert!(known < mixed().len(), "the last answer did not arrive");
            }
        }
    });
}

#[test]
fn i7_every_damaged_byte_is_noticed() {
    // What is discarded may be damaged.
    let orders: Vec<_> = mixed().into_iter().filter(|order| !is_refused_write(order)).collect();
    for checksum in [false, true] {
        let undamaged = run(checksum, &orders, |_| {});
        for direction in [REQUESTS, ANSWERS] {
            for at in 0..undamaged.wires[direction].sent {
                let bits = 1 << (at % 8);
                let pair = run(checksum, &orders, |pair| {
                    pair.wires[direction].flip = Some((at, bits));
                });
                // Without checksums a damaged payload is not noticed; `check` looks at the rest.
                if checksum {
                    assert_ne!(pair.ended, undamaged.ended, "byte {at} of direction {direction}");
                }
            }
        }
    }
}

#[test]
fn a_damaged_payload_is_refused_and_the_stream_stays_in_step() {
    let orders = [write(0, &[(0, 100)], Some(b"note")), read(200, &[(200, 10)])];
    let head = RequestHeader::LEN as u64 + 16 + 12;
    let pair = run(true, &orders, |pair| pair.wires[REQUESTS].flip = Some((head + 50, 4)));
    assert_eq!(outcomes(&pair), [Ended::Refused(WireCode::Checksum, 0), Ended::Done]);
    assert!(pair.delivered.is_empty(), "its notification is not delivered");

    let head = 2 * ResponseHeader::LEN as u64;
    let pair = run(true, &orders, |pair| pair.wires[ANSWERS].flip = Some((head, 4)));
    assert_eq!(outcomes(&pair), [Ended::Done, Ended::Damaged]);
    assert!(pair.is_between());
}

#[test]
fn a_trailer_of_several_pieces_names_the_damaged_one() {
    const LEN: usize = 600 * 1024;
    let orders = [write(0, &[(0, LEN)], None), read(LEN, &[(LEN, LEN)])];
    for (direction, at) in [(REQUESTS, 300 * 1024), (ANSWERS, 580 * 1024)] {
        let mut pair = LanePair::new(2 * LEN, true, orders.to_vec());
        pair.chunk = 96 * 1024;
        pair.wires[direction].flip = Some((at, 1));
        pair.run();
        pair.check();
        let damaged = [Ended::Refused(WireCode::Checksum, 0), Ended::Damaged][direction];
        let mut expected = [Ended::Done; 2];
        expected[direction] = damaged;
        assert_eq!(outcomes(&pair), expected);
    }
}

#[test]
fn memory_that_fails_at_any_byte_of_a_write_refuses_it_and_the_stream_stays_in_step() {
    for checksum in [false, true] {
        for delay in [0, 3] {
            for at in 0..=73 {
                let pair = run(checksum, &mixed(), |pair| {
                    pair.fails = Some((0, at));
                    pair.memory_delay = Duration::from_millis(delay);
                });
                let mut expected = expected();
                expected[0] = Ended::Refused(WireCode::Revoked, 1);
                assert_eq!(outcomes(&pair), expected, "after {at} bytes");
                assert!(!pair.delivered.contains(&b"first".to_vec()));
            }
        }
    }
}

#[test]
fn memory_that_fails_in_the_middle_of_an_answer_ends_the_stream() {
    for checksum in [false, true] {
        for at in 0..51 {
            let pair = run(checksum, &mixed(), |pair| pair.fails = Some((2, at)));
            let ended = outcomes(&pair);
            assert_eq!(ended[..2], expected()[..2]);
            assert!(ended[2..].iter().all(|ended| *ended == Ended::Lost), "after {at} bytes");
        }
    }
}

#[test]
fn i8_as_many_requests_as_the_pipeline_has_share_one_round_trip() {
    let orders: Vec<_> = (0..3 * PIPELINE as u8).map(|note| notify(&[note])).collect();
    let mut pair = LanePair::new(MEMORY, false, orders.clone());
    let start = pair.now;
    pair.run();
    pair.check();
    assert_eq!(outcomes(&pair), vec![Ended::Done; orders.len()]);
    assert_eq!(pair.outstanding_max, PIPELINE);
    // A millisecond in each direction.
    assert_eq!(pair.now.saturating_since(start), Duration::from_millis(2 * 3));
}

#[test]
fn a_notification_without_room_at_the_target_is_answered_busy() {
    let pair = run(false, &mixed()[..2], |pair| pair.busy = true);
    assert_eq!(outcomes(&pair), [Ended::Refused(WireCode::Busy, 0); 2]);
}

// ---- peers that do not keep to the protocol ----

const TRANSFER: TransferId = TransferId(9);

/// An initiator whose read of 8 bytes has left, with or without checksums.
fn reading(checksum: bool) -> Initiator<()> {
    let mut initiator = Initiator::new(TRANSFER, checksum, Limits::default(), Guard::Crc);
    let begin = Begin { op: Op::Read, descriptors: 1, payload_len: 8, budget_ms: 0 };
    initiator.begin(begin, vec![0; RequestHeader::LEN + 16], ());
    assert_eq!(initiator.sent(RequestHeader::LEN + 16).map(|head| head.len()), Some(80));
    initiator
}

fn good() -> ResponseHeader {
    let (code, flags) = (WireCode::Ok, Flags::NONE);
    ResponseHeader { code, flags, transfer: TRANSFER, index: 0, aux: 0, payload_len: 8 }
}

/// What becomes of an answer with so many bytes behind its head.
fn answered(
    mut initiator: Initiator<()>,
    head: &[u8; ResponseHeader::LEN],
    ahead: usize,
) -> Result<Option<Outcome<()>>, LaneError> {
    let Receive::Bytes { into, payload } = initiator.receive() else { panic!("an answer is due") };
    assert!(ahead as u64 <= payload);
    into.copy_from_slice(head);
    initiator.received(head.len() + ahead)
}

#[test]
fn an_answer_to_another_request_than_the_oldest_breaks_the_lane() {
    let with = |change: fn(&mut ResponseHeader)| {
        let mut header = good();
        change(&mut header);
        answered(reading(false), &header.encode(), 0)
    };
    assert_eq!(with(|_| ()), Ok(None));
    let other = LaneError::Transfer { got: TransferId(8), expected: TRANSFER };
    assert_eq!(with(|header| header.transfer = TransferId(8)), Err(other));
    let length = LaneError::Length { got: 9, expected: 8 };
    assert_eq!(with(|header| header.payload_len = 9), Err(length));
    assert_eq!(with(|header| header.flags = Flags::CHECKSUM), Err(LaneError::Checksums));
    assert_eq!(answered(reading(true), &good().encode(), 0), Err(LaneError::Checksums));
    let malformed = answered(reading(false), &[0; ResponseHeader::LEN], 0);
    assert!(matches!(malformed, Err(LaneError::Malformed(_))), "{malformed:?}");
}

#[test]
fn payload_behind_a_refusal_breaks_the_lane() {
    let refused = ResponseHeader { code: WireCode::Revoked, payload_len: 0, ..good() };
    let outcome = Outcome::Refused { request: (), code: WireCode::Revoked, index: 0 };
    assert_eq!(answered(reading(false), &refused.encode(), 0), Ok(Some(outcome)));
    assert_eq!(answered(reading(false), &refused.encode(), 1), Err(LaneError::AfterRefusal));
}

#[test]
fn nothing_is_received_before_a_request_has_left() {
    let mut initiator = Initiator::new(TRANSFER, false, Limits::default(), Guard::Crc);
    assert!(matches!(initiator.receive(), Receive::Nothing));
    let begin = Begin { op: Op::Write, descriptors: 1, payload_len: 8, budget_ms: 0 };
    initiator.begin(begin, vec![0; RequestHeader::LEN + 16], ());
    assert!(initiator.is_between(), "no byte of it has left");
    assert_eq!(initiator.sent(87), None);
    assert!(matches!(initiator.receive(), Receive::Nothing));
    assert!(!initiator.is_between() && initiator.answering().is_none());
    assert_eq!(initiator.sent(1).map(|head| head.len()), Some(80));
    assert_eq!((initiator.outstanding(), initiator.answering()), (1, Some(())));
}

/// Passes bytes to a target, as much as it asks for at a time.
fn feed(target: &mut Target, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        let into = match target.poll() {
            Ok(Next::Receive(into)) => into,
            Ok(Next::Grow { have, .. }) => {
                target.grow(2 * have);
                continue;
            }
            other => panic!("a head is received, not {other:?}"),
        };
        let n = into.len().min(bytes.len());
        into[..n].copy_from_slice(&bytes[..n]);
        target.received(n);
        bytes = &bytes[n..];
    }
    assert!(target.poll().is_ok());
}

fn large_header() -> [u8; RequestHeader::LEN] {
    header_fields().encode()
}

/// The header of the largest request, and of one that its initiator waits a minute for.
fn header_fields() -> RequestHeader {
    let limits = Limits::default();
    RequestHeader {
        op: Op::Write,
        flags: Flags::NONE,
        transfer: TransferId(1),
        descriptors: limits.descriptors_max,
        notify_len: limits.notify_max,
        payload_len: u64::from(limits.descriptors_max),
        budget_ms: 60_000,
        head_crc: 0,
    }
}

#[test]
fn an_announced_length_alone_allocates_little() {
    let mut target = Target::new(Limits::default(), false, Guard::Crc, Vec::new());
    feed(&mut target, &large_header());
    assert!(target.held_bytes() <= 16 * 1024, "{} bytes for a header", target.held_bytes());
    let mut sent = RequestHeader::LEN;
    for _ in 0..100 {
        feed(&mut target, &[0; 4096]);
        sent += 4096;
        let held = target.held_bytes();
        assert!(held <= (4 * sent).max(16 * 1024), "{held} bytes are held of {sent}");
    }
}

#[test]
fn a_request_ends_when_no_byte_moves_for_its_budget_and_for_the_silence_limit() {
    let silence = Duration::from_secs(3);
    let start = Timestamp::from_nanos(1_000_000_000);
    let mut target = Target::new(Limits::default(), false, Guard::Crc, Vec::new());
    assert!(target.poll().is_ok());
    assert_eq!(target.stalls_at(silence, start), None, "nothing is asked for");
    let header = large_header();
    feed(&mut target, &header[..10]);
    let now = start + Duration::from_secs(100);
    assert_eq!(target.stalls_at(silence, now), Some(now + silence), "its budget is not known");
    let later = now + Duration::from_secs(2);
    assert_eq!(target.stalls_at(silence, later), Some(now + silence), "no byte has moved");
    feed(&mut target, &header[10..]);
    assert_eq!(target.stalls_at(silence, later), Some(later + silence), "its head takes memory");
    feed(&mut target, &[0; 1]);
    let last = later + Duration::from_secs(59);
    assert_eq!(target.stalls_at(silence, last), Some(last + silence), "a byte has moved");
    // Behind the head, the initiator's budget counts.
    let mut target = Target::new(Limits::default(), false, Guard::Crc, Vec::new());
    let header = RequestHeader { descriptors: 1, notify_len: 0, payload_len: 1, ..header_fields() };
    let mut head = header.encode().to_vec();
    let mut table = Vec::new();
    WireDescriptor { offset: 0, len: 1, region: RegionId(1) }.write_to(&mut table);
    let crc = head_crc(head.first_chunk().expect("a header"), &table, &[]);
    head = RequestHeader { head_crc: crc, ..header }.encode().to_vec();
    head.extend(table);
    feed(&mut target, &head);
    target.accept();
    let minute = Duration::from_secs(60);
    assert_eq!(target.stalls_at(silence, start), Some(start + minute));
    // 49 days are no reason to keep a request for so long.
    let header = RequestHeader { budget_ms: u32::MAX, ..header };
    let crc = head_crc(
        header.encode().first_chunk().expect("a header"),
        &head[RequestHeader::LEN..],
        &[],
    );
    let mut target = Target::new(Limits::default(), false, Guard::Crc, Vec::new());
    feed(&mut target, &RequestHeader { head_crc: crc, ..header }.encode());
    feed(&mut target, &head[RequestHeader::LEN..]);
    target.accept();
    assert_eq!(target.stalls_at(silence, start), Some(start + 10 * minute));
}

#[test]
fn a_head_for_which_there_is_no_memory_is_answered_with_busy() {
    let mut target = Target::new(Limits::default(), false, Guard::Crc, Vec::new());
    feed(&mut target, &large_header());
    loop {
        match target.poll() {
            Ok(Next::Receive(into)) => {
                let n = into.len();
                target.received(n);
            }
            Ok(Next::Grow { have, whole }) => {
                assert!(have <= 16 * 1024 && whole > 1 << 20, "{have} of {whole}");
                break;
            }
            other => panic!("a head is received, not {other:?}"),
        }
    }
    let answer = target.exhausted();
    let answer = answer.as_ref().first_chunk().expect("a header");
    let answer = ResponseHeader::decode(answer, &Limits::default()).expect("well-formed");
    assert_eq!((answer.code, answer.transfer), (WireCode::Busy, TransferId(1)));
    assert!(matches!(target.poll(), Ok(Next::Nothing)));
}
