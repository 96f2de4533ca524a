//! What a listener does before it knows who is calling.

use crate::protocol::pair::{A, B, Pair, config, ms};
use kvferry_proto::message::{Message, Ping, encode};
use kvferry_proto::{
    Handshakes, MAGIC, Opener, Opening, Session, SessionId, Sniff, Sniffer, Timestamp, WaitingRoom,
    WireCode,
};
use std::net::IpAddr;
use std::time::Duration;

const NOW: Timestamp = Timestamp::from_nanos(5_000_000_000);

#[test]
fn eight_bytes_tell_the_native_protocol_from_others() {
    for (bytes, sniff) in [
        (MAGIC, Sniff::Native),
        (1u64.to_le_bytes(), Sniff::Foreign),
        (0u64.to_le_bytes(), Sniff::Foreign),
        (*b"GET / HT", Sniff::Foreign),
        (*b"KVFERRY\x02", Sniff::Foreign),
        (*b"\x16\x03\x01\x02\x00\x01\x00\x01", Sniff::Foreign),
    ] {
        let mut whole = Sniffer::new();
        assert_eq!(whole.feed(&bytes), sniff, "{bytes:?}");
        assert_eq!(whole.first(), u64::from_le_bytes(bytes));
        let mut chopped = Sniffer::new();
        for (n, byte) in bytes[..7].iter().enumerate() {
            assert_eq!(chopped.wanted(), 8 - n);
            assert_eq!(chopped.feed(&[*byte]), Sniff::NeedMore);
        }
        assert_eq!(chopped.feed(&[]), Sniff::NeedMore);
        // What is beyond the eighth byte is not the sniffer's.
        assert_eq!(chopped.feed(&[bytes[7], 1, 2, 3]), sniff);
        assert_eq!(chopped.wanted(), 0);
    }
}

#[test]
fn an_opener_hands_a_session_everything_and_a_stream_the_rest() {
    let mut initiator = Session::initiator(config(A), None, [1; 32], NOW);
    let hello = initiator.poll_transmit().unwrap()[8..].to_vec();
    let mut opener = Opener::new();
    assert_eq!(opener.feed(&hello[..10]), Ok(None));
    let Ok(Some(Opening::Session { bytes })) = opener.feed(&hello[10..]) else { panic!("session") };
    let mut acceptor = Session::acceptor(config(B), SessionId(1), [2; 32], NOW);
    acceptor.receive(&bytes, NOW);
    initiator.receive(&acceptor.poll_transmit().unwrap(), NOW);
    acceptor.receive(&initiator.poll_transmit().unwrap(), NOW);
    assert!(acceptor.is_established());

    let mut pair = Pair::established();
    let (id, bytes) = pair.session(A).stream_hello().unwrap();
    let mut frames = bytes[8..].to_vec();
    frames.extend_from_slice(b"first frame");
    let Ok(Some(Opening::Stream { hello, rest })) = Opener::new().feed(&frames) else {
        panic!("stream")
    };
    assert_eq!((hello.stream, rest.as_slice()), (id, &b"first frame"[..]));
    assert_eq!(pair.session(B).verify_stream(&hello), Ok(()));
}

#[test]
fn an_opener_takes_nothing_but_a_hello() {
    let ping = encode(&Message::Ping(Ping { seq: 1, active: false }));
    assert_eq!(Opener::new().feed(&ping), Err(WireCode::Malformed));
    let unknown = encode(&Message::Unknown { kind: "future".into() });
    assert_eq!(Opener::new().feed(&unknown), Err(WireCode::Malformed));
    assert_eq!(Opener::new().feed(&[0xff; 4]), Err(WireCode::TooLarge));
    assert_eq!(Opener::new().feed(&[1, 0, 0, 0, 0xc1]), Err(WireCode::Malformed));
    assert_eq!(Opener::new().feed(&4097u32.to_le_bytes()), Err(WireCode::TooLarge));
}

#[test]
fn a_full_listener_drops_the_connection_that_was_silent_longest() {
    let mut pending = Handshakes::new(3, ms(5000));
    for key in 1..=3 {
        assert_eq!(pending.admit(key, NOW), None);
    }
    assert_eq!(pending.admit(4, NOW), Some(1));
    assert!(pending.done(&3));
    assert!(!pending.done(&3) && !pending.done(&1));
    assert_eq!(pending.admit(5, NOW), None);
    assert_eq!(pending.admit(6, NOW), Some(2));
    assert_eq!(pending.len(), 3);
}

#[test]
fn a_full_listener_waits_while_handshakes_are_under_way_and_drops_silent_connections_first() {
    let mut pending = Handshakes::new(3, ms(5000));
    for key in 1..=3 {
        assert_eq!(pending.room_at(), None);
        pending.admit(key, NOW + ms(key));
    }
    // A listener that is slow to look at its connections drops none of them for that.
    assert_eq!(pending.room_at(), Some(NOW + ms(1 + 500)));
    (1..=3).for_each(|key| pending.waits(&key));
    assert_eq!(pending.room_at(), Some(NOW + ms(1 + 50)));
    // The first has said hello: its deadline stays, the next one makes room.
    assert_eq!(pending.spoke(&1), Some(NOW + ms(1 + 5000)));
    assert_eq!(pending.room_at(), Some(NOW + ms(2 + 50)));
    assert_eq!(pending.admit(4, NOW + ms(60)), Some(2));
    for key in 3..=4 {
        pending.spoke(&key);
    }
    assert_eq!(pending.room_at(), Some(NOW + ms(1 + 500)));
    assert_eq!(pending.admit(5, NOW + ms(600)), Some(1));
    pending.waits(&5);
    // One that has been there for long makes room before a silent one that came just now.
    assert_eq!(pending.room_at(), Some(NOW + ms(3 + 500)));
    assert_eq!(pending.admit(6, NOW + ms(600)), Some(3));
    assert!(pending.done(&5));
    assert_eq!((pending.room_at(), pending.spoke(&5)), (None, None));
}

#[test]
fn every_pending_connection_has_a_deadline() {
    let mut pending = Handshakes::default();
    assert_eq!(pending.next_timeout(), None);
    pending.admit('a', NOW);
    pending.admit('b', NOW + ms(10));
    assert_eq!(pending.next_timeout(), Some(NOW + Duration::from_secs(5)));
    assert_eq!(pending.pop_expired(NOW + ms(4999)), None);
    assert_eq!(pending.pop_expired(NOW + ms(5000)), Some('a'));
    assert_eq!(pending.pop_expired(NOW + ms(5000)), None);
    assert!(pending.done(&'b'));
    assert!(pending.is_empty());
    assert_eq!(pending.next_timeout(), None);
}

#[test]
fn a_flood_of_connections_costs_a_fixed_number_of_places() {
    let mut pending = Handshakes::default();
    let evicted = (0..10_000).filter_map(|key| pending.admit(key, NOW)).count();
    assert_eq!((pending.len(), evicted), (256, 10_000 - 256));
    // A capacity of 0 would admit no connection: it counts as 1.
    let mut one = Handshakes::new(0, ms(1));
    assert_eq!(one.admit(1, NOW), None);
    assert_eq!(one.admit(2, NOW), Some(1));
}

#[test]
fn the_first_connection_of_another_network_gets_the_next_place() {
    let [flood, honest]: [IpAddr; 2] = ["10.0.0.9", "10.0.1.9"].map(|it| it.parse().unwrap());
    let mut room = WaitingRoom::new(1024, ms(3000));
    // More than there is room for: the flood's own newest connections are refused.
    let refused = (0..5000).filter(|key| room.push(flood.into(), *key, NOW).is_some()).count();
    assert_eq!((room.len(), refused), (1024, 5000 - 1024));
    let dropped = room.push(honest.into(), 9000, NOW).expect("it is full");
    assert_eq!((dropped, room.len()), (1023, 1024), "the newest of the flood makes room");
    assert_eq!(room.pop(NOW), Some(0));
    assert_eq!(room.pop(NOW), Some(9000));
    assert_eq!(room.pop(NOW), Some(1));
}

#[test]
fn six_hundred_peers_of_one_network_get_their_places_in_the_order_in_which_they_came() {
    let mut room = WaitingRoom::new(1024, ms(3000));
    for key in 0..600u16 {
        let [high, low] = key.to_be_bytes();
        assert_eq!(high >> 2, 0);
        let from = IpAddr::from([10, 0, 0, low]);
        assert_eq!(room.push(from.into(), key, NOW), None);
    }
    assert!((0..600).all(|key| room.pop(NOW) == Some(key)) && room.is_empty());
}

#[test]
fn a_host_that_fills_the_room_keeps_its_neighbours_out_neither_of_the_room_nor_of_places() {
    let [flood, first, second]: [IpAddr; 3] =
        ["10.0.0.9", "10.0.0.8", "::ffff:10.0.0.7"].map(|it| it.parse().unwrap());
    let mut room = WaitingRoom::new(1024, ms(3000));
    assert_eq!((0..1024).filter_map(|key| room.push(flood.into(), key, NOW)).count(), 0);
    assert_eq!(
        room.push(first.into(), 9000, NOW),
        Some(1023),
        "the newest of the flood makes room"
    );
    assert_eq!(room.push(second.into(), 9001, NOW), Some(1022));
    assert_eq!(room.push(flood.into(), 1024, NOW), Some(1024), "its own newest");
    let order: Vec<_> = (0..5).filter_map(|_| room.pop(NOW)).collect();
    assert_eq!(order, [0, 9000, 9001, 1, 2]);
}

#[test]
fn whoever_waits_in_a_full_room_gives_way_only_to_one_that_then_has_no_more() {
    let at = |network: u8, host: u8| IpAddr::from([10, 0, network, host]);
    let mut room = WaitingRoom::new(4, ms(3000));
    // One each: newcomers are refused, and those that wait stay.
    for host in 0..4 {
        assert_eq!(room.push(at(host, 1).into(), host, NOW), None);
    }
    assert_eq!(room.push(at(9, 1).into(), 9, NOW), Some(9));
    assert_eq!(room.push(at(0, 2).into(), 9, NOW), Some(9));
    assert_eq!([0; 4].map(|_| room.pop(NOW)), [0, 1, 2, 3].map(Some));
    // Two networks end with a half each, and stay so.
    let mut room = WaitingRoom::new(4, ms(3000));
    (0..4).for_each(|key| assert_eq!(room.push(at(0, 1).into(), key, NOW), None));
    let refused: Vec<_> = (10..14).filter_map(|key| room.push(at(1, 1).into(), key, NOW)).collect();
    assert_eq!(refused, [3, 2, 12, 13]);
    assert_eq!(room.push(at(0, 1).into(), 4, NOW), Some(4));
}

#[test]
fn a_connection_that_has_waited_for_too_long_gets_no_place() {
    let [from, other]: [IpAddr; 2] = ["fd00::1", "fd00::2"].map(|it| it.parse().unwrap());
    let mut room = WaitingRoom::new(2, ms(3000));
    room.push(from.into(), 1, NOW);
    room.push(other.into(), 2, NOW + ms(1));
    assert_eq!(room.push(from.into(), 3, NOW + ms(2)), Some(3), "one network of IPv6");
    assert_eq!(room.pop(NOW + ms(3000)), Some(2));
    assert_eq!((room.pop(NOW + ms(3000)), room.len()), (None, 0));
}
