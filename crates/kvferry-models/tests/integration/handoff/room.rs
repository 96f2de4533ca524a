//! Bounds of memory and of names.

use super::*;

#[test]
fn i8_announcements_take_no_more_memory_than_they_may_however_few_bytes_they_are_on_the_wire() {
    let blocks = 1000;
    let takes = 4 * blocks as usize;
    for (bytes, code) in [(takes, WireCode::Ok), (takes - 1, WireCode::Busy)] {
        let mut ranks = Ranks::with(1, Limits { announced_bytes: bytes, ..Limits::default() });
        ranks.want();
        ranks.offer();
        ranks.advance(0, blocks, Progress::tokens(blocks));
        assert!(ranks.bytes < 300, "{} bytes on the wire", ranks.bytes);
        if code.is_ok() {
            let held = ranks.consumers[0].gauges();
            assert!(held.contains(&("announced_bytes", takes)), "{held:?}");
            ranks.withdraw(WireCode::Cancelled, "enough");
        }
        let expected = if code.is_ok() { WireCode::Cancelled } else { code };
        assert_eq!(ranks.consumed_codes(), [expected]);
        ranks.assert_empty();
    }
}

/// The only producer of a handoff: a peer that the consumer is connected to, and needs all blocks of.
fn from(peer: u64) -> [ProducerRank; 1] {
    let (peer, need) = (PeerId(peer), Need::ALL);
    [ProducerRank { peer, incarnation: None, readers: 1, connected: true, need }]
}

/// A consumer's view of an offer of one table with so many blocks.
fn announcement(id: &HandoffId, blocks: u32) -> Offer {
    let announced = Announced {
        count: 1,
        tables: vec![BlockTable::new(0, (0..blocks).collect()).into()],
        progress: Progress::tokens(blocks),
        ..Announced::default()
    };
    Offer { id: id.clone(), generation: Generation(1), announced }
}

#[test]
fn i8_announcements_of_one_host_leave_room_for_those_of_another_whatever_incarnations_it_claims() {
    let now = Timestamp::from_nanos(1);
    let limits = Limits { announced_bytes: 64 * 1024, ..Limits::default() };
    let mut consumer = Consumer::new(limits);
    for n in 0..100 {
        let hostile = HandoffId::new(&format!("hostile-{n}")).expect("short");
        assert_eq!(consumer.claim(&hostile, &from(n), now), Ok(()));
        let announcement = announcement(&hostile, 4096);
        consumer.receive(PeerId(n), at("10.0.0.1"), announcement.into(), now);
    }
    let gauge = |consumer: &Consumer, name| {
        let mut gauges = consumer.gauges().into_iter();
        gauges.find(|(it, _)| *it == name).expect("a gauge").1
    };
    assert_eq!(gauge(&consumer, "announced_bytes"), 64 * 1024, "it gets all that no other wants");
    assert_eq!(consumer.want(&id(), &from(200), BUDGET, now), Ok(()));
    consumer.receive(PeerId(200), at("10.0.1.1"), announcement(&id(), 6144).into(), now);
    let is_read = |action| matches!(action, ConsumerAction::Read { from: PeerId(200), .. });
    assert!(std::iter::from_fn(|| consumer.poll()).any(is_read));
    let held = (gauge(&consumer, "announced_bytes"), gauge(&consumer, "claimed"));
    assert_eq!(held, (56 * 1024, 2), "two of the others have failed");
}

#[test]
fn i8_a_handoff_that_gives_its_memory_up_fails_as_busy_when_its_reads_have_stopped() {
    let now = Timestamp::from_nanos(1);
    let limits = Limits { announced_bytes: 16 * 1024, ..Limits::default() };
    let mut consumer = Consumer::new(limits);
    let first = HandoffId::new("first").expect("short");
    assert_eq!(consumer.want(&first, &from(1), BUDGET, now), Ok(()));
    consumer.receive(PeerId(1), at("10.0.0.1"), announcement(&first, 4096).into(), now);
    let actions: Vec<_> = std::iter::from_fn(|| consumer.poll()).collect();
    let read = actions.iter().find_map(|it| match it {
        ConsumerAction::Read { read, .. } => Some(*read),
        _ => None,
    });
    assert_eq!(consumer.want(&id(), &from(2), BUDGET, now), Ok(()));
    consumer.receive(PeerId(2), at("10.0.1.1"), announcement(&id(), 1024).into(), now);
    let actions: Vec<_> = std::iter::from_fn(|| consumer.poll()).collect();
    let read = read.expect("it is read");
    assert!(actions.contains(&ConsumerAction::CancelRead(read)), "{actions:?}");
    let is_end = |it: &ConsumerAction| matches!(it, ConsumerAction::Ended { .. });
    assert!(!actions.iter().any(is_end), "{actions:?}");
    consumer.read_ended(read, Ok(()), now);
    let ended = std::iter::from_fn(|| consumer.poll()).find_map(|it| match it {
        ConsumerAction::Ended { id, outcome, .. } => Some((id, outcome.code)),
        _ => None,
    });
    assert_eq!(ended, Some((first, WireCode::Busy)));
}

#[test]
fn i8_a_handoff_that_has_been_read_loses_side_data_for_room_and_is_done() {
    let now = Timestamp::from_nanos(1);
    let take = |consumer: &mut Consumer| std::iter::from_fn(|| consumer.poll()).collect::<Vec<_>>();
    let gauge = |consumer: &Consumer| {
        let mut gauges = consumer.gauges().into_iter();
        gauges.find(|(name, _)| *name == "announced_bytes").expect("a gauge").1
    };
    // The connection may be lost before the confirmation is asked for.
    for is_lost in [false, true] {
        let limits = Limits { announced_bytes: 32 * 1024, ..Limits::default() };
        let mut consumer = Consumer::new(limits);
        let first = HandoffId::new("first").expect("short");
        assert_eq!(consumer.want(&first, &from(1), BUDGET, now), Ok(()));
        let mut offer = announcement(&first, 4096);
        (offer.announced.last, offer.announced.side_data) = (true, Some(vec![7; 16 * 1024]));
        consumer.receive(PeerId(1), at("10.0.0.1"), offer.clone().into(), now);
        let read = take(&mut consumer).into_iter().find_map(|it| match it {
            ConsumerAction::Read { read, .. } => Some(read),
            _ => None,
        });
        if is_lost {
            consumer.lost(PeerId(1), WireCode::Closed, false, now);
        }
        consumer.read_ended(read.expect("it is read"), Ok(()), now);
        assert_eq!(gauge(&consumer), 16 * 1024, "the tables are not needed");
        let (second, third) = (id(), HandoffId::new("third").expect("short"));
        for (id, peer, blocks) in [(&second, 2, 2048), (&third, 3, 3072)] {
            assert_eq!(consumer.want(id, &from(peer), BUDGET, now), Ok(()));
            let origin = at(&format!("10.0.{peer}.1"));
            consumer.receive(PeerId(peer), origin, announcement(id, blocks).into(), now);
        }
        assert_eq!(gauge(&consumer), 4 * (2048 + 3072), "the side data is dropped");
        if is_lost {
            consumer.met(PeerId(1), Incarnation(1), now);
            consumer.receive(PeerId(1), at("10.0.0.1"), offer.into(), now);
        }
        let confirmed = Confirmed { id: first.clone(), generation: Generation(1) };
        consumer.receive(PeerId(1), at("10.0.0.1"), confirmed.into(), now);
        let ends = take(&mut consumer).into_iter().filter_map(|it| match it {
            ConsumerAction::Ended { id, outcome, side_data } => Some((id, outcome, side_data)),
            _ => None,
        });
        assert_eq!(ends.collect::<Vec<_>>(), [(first, Outcome::DONE, vec![])]);
    }
}

#[test]
fn i8_blocks_that_a_consumer_has_no_use_for_are_not_kept() {
    let now = Timestamp::from_nanos(1);
    let mut consumer = Consumer::new(Limits::default());
    let need = Need { groups: 1, blocks: 10 };
    let from =
        [ProducerRank { peer: PRODUCER, incarnation: None, readers: 1, connected: true, need }];
    assert_eq!(consumer.want(&id(), &from, BUDGET, now), Ok(()));
    let held = |consumer: &Consumer| {
        let bytes = consumer.gauges().into_iter().find(|(name, _)| *name == "announced_bytes");
        let tables = consumer.table(&id(), PRODUCER).expect("under way");
        (bytes.expect("a gauge").1, tables.map(|it| it.blocks.clone()).collect::<Vec<_>>())
    };
    consumer.receive(PRODUCER, here(), announcement(&id(), 1 << 19).into(), now);
    assert_eq!(held(&consumer), (40, vec![(0..10).collect()]));
    // What follows them is no gap.
    let mut more = announcement(&id(), 5).announced;
    more.tables = vec![BlockTable::new(1 << 19, (7..12).collect()).into()];
    (more.count, more.progress) = (2, Progress::tokens((1 << 19) + 5));
    let ready = Ready { id: id(), generation: Generation(1), announced: more };
    consumer.receive(PRODUCER, here(), ready.into(), now);
    assert_eq!(held(&consumer), (40, vec![(0..10).collect()]));
    assert_eq!(consumer.state(&id(), PRODUCER), Some("reading"));
    // The producer has one group.
    let mut wrong = announcement(&id(), 1);
    wrong.generation = Generation(2);
    wrong.announced.tables = vec![BlockTable::new(0, vec![1]).into(); 2];
    consumer.receive(PRODUCER, here(), wrong.into(), now);
    assert_eq!(consumer.state(&id(), PRODUCER), Some("ending"));
}

#[test]
fn i8_generation_zero_is_refused_and_a_restart_of_its_producer_leaves_no_memory_counted() {
    let now = Timestamp::from_nanos(1);
    let limits = Limits { announced_bytes: 32 * 1024, ..Limits::default() };
    let mut consumer = Consumer::new(limits);
    // As often as fits, and once more.
    for peer in 0..4 {
        let hostile = HandoffId::new(&format!("hostile-{peer}")).expect("short");
        assert_eq!(consumer.want(&hostile, &from(peer), BUDGET, now), Ok(()));
        let offer = Offer { generation: Generation(0), ..announcement(&hostile, 4096) };
        consumer.receive(PeerId(peer), at("10.0.0.1"), offer.into(), now);
        consumer.lost(PeerId(peer), WireCode::StaleIncarnation, true, now);
        let ended = std::iter::from_fn(|| consumer.poll()).find_map(|it| match it {
            ConsumerAction::Ended { outcome, .. } => Some(outcome.code),
            _ => None,
        });
        assert_eq!(ended, Some(WireCode::Malformed));
    }
    let held = consumer.gauges();
    assert!(held.contains(&("announced_bytes", 0)), "{held:?}");
    assert_eq!(consumer.want(&id(), &from(200), BUDGET, now), Ok(()));
    consumer.receive(PeerId(200), at("10.0.1.1"), announcement(&id(), 4096).into(), now);
    let is_read = |action| matches!(action, ConsumerAction::Read { from: PeerId(200), .. });
    assert!(std::iter::from_fn(|| consumer.poll()).any(is_read));
}

#[test]
fn i8_full_is_an_answer() {
    let mut ranks = Ranks::with(1, Limits { handoffs: 1, ..Limits::default() });
    let names = ["a", "b", "c"].map(|name| HandoffId::new(name).expect("short"));
    ranks.producer.receive(CONSUMER, here(), ask(&names[0]), ranks.now);
    // Whatever others ask for, what is here can be offered.
    assert_eq!(ranks.producer.offer(&names[1], ranks.now), Ok(()));
    let full = Err(Refusal::Full { limit: 1 });
    assert_eq!(ranks.producer.offer(&names[2], ranks.now), full);
    assert_eq!(ranks.producer.expect(&names[2], ranks.now), full);
    assert_eq!(ranks.producer.expect(&names[1], ranks.now), Err(Refusal::InUse));
    ranks.producer.receive(PeerId(5), here(), ask(&names[2]), ranks.now);
    let stop = Stop {
        id: names[2].clone(),
        by_consumer: false,
        code: WireCode::Busy,
        detail: "1 handoffs are awaited, which is the limit".to_owned(),
    };
    let busy = ProducerAction::Send { to: PeerId(5), message: stop.into() };
    assert!(std::iter::from_fn(|| ranks.producer.poll()).any(|action| action == busy));
    assert_eq!(ranks.producer.offer(&names[0], ranks.now), Ok(()), "it has its place already");
    ranks.producer.receive(PeerId(5), here(), ask(&names[2]), ranks.now);
    let busy = |action| matches!(action, ProducerAction::Send { to: PeerId(5), .. });
    assert!(!std::iter::from_fn(|| ranks.producer.poll()).any(busy));
}

fn name(number: usize) -> HandoffId {
    HandoffId::new(&format!("invented-{number}")).expect("short")
}

fn decline(id: &HandoffId) -> HandoffMessage {
    let (code, detail) = (WireCode::NotNeeded, String::new());
    Stop { id: id.clone(), by_consumer: true, code, detail }.into()
}

#[test]
fn names_that_a_peer_invents_push_out_neither_ended_handoffs_nor_what_others_have_declined() {
    const STRANGER: PeerId = PeerId(999);
    let mut ranks = Ranks::with(1, Limits { tombstones: 64, ..Limits::default() });
    ranks.produce();
    ranks.want();
    let declined = HandoffId::new("declined").expect("short");
    ranks.producer.receive(CONSUMER, here(), decline(&declined), ranks.now);
    for number in 0..1000 {
        // Declined without a question, and after one.
        if number % 2 == 0 {
            ranks.producer.receive(STRANGER, here(), ask(&name(number)), ranks.now);
        }
        ranks.producer.receive(STRANGER, here(), decline(&name(number)), ranks.now);
    }
    while ranks.producer.poll().is_some() {}
    assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::Ok)));
    let not_needed = Err(Refusal::Ended(WireCode::NotNeeded));
    assert_eq!(ranks.producer.offer(&declined, ranks.now), not_needed);
    assert_eq!(ranks.producer.offer(&name(999), ranks.now), not_needed, "its last one");
    assert_eq!(ranks.producer.offer(&name(0), ranks.now), Ok(()), "its first one is forgotten");
    // Nor do many incarnations of one peer.
    for incarnation in 0..1000 {
        ranks.producer.receive(
            PeerId(1000 + incarnation),
            here(),
            decline(&name(2000 + incarnation as usize)),
            ranks.now,
        );
    }
    while ranks.producer.poll().is_some() {}
    assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::Ok)));
    let gauges = ranks.producer.gauges();
    let tombstones = gauges.iter().find(|(name, _)| *name == "tombstones").expect("a gauge").1;
    assert!(tombstones <= 2 * 64, "{tombstones}");
    ranks.pass(ranks.limits.tomb_ttl);
    assert_eq!(ranks.producer.offer(&declined, ranks.now), Ok(()));
}

#[test]
fn one_host_that_asks_for_handoffs_nobody_offers_leaves_room_for_the_questions_of_others() {
    let limits = Limits { handoffs: 8, ..Limits::default() };
    let (mut producer, now) = (Producer::new(limits), Timestamp::default());
    /// The peers that were told that there is no room.
    fn asks(producer: &mut Producer, from: u64, host: &str, number: usize) -> Vec<u64> {
        producer.receive(PeerId(from), at(host), ask(&name(number)), Timestamp::default());
        let refused = |action| match action {
            ProducerAction::Send { to, message: HandoffMessage::Stop(stop) }
                if stop.code == WireCode::Busy =>
            {
                Some(to.0)
            }
            _ => None,
        };
        std::iter::from_fn(|| producer.poll()).filter_map(refused).collect()
    }
    // Each question in a session of its own: the host gets all that no other asks for.
    for number in 0..100 {
        let refused = asks(&mut producer, number, "10.0.0.1", number as usize);
        assert_eq!(refused, if number < 8 { vec![] } else { vec![number] });
    }
    // A host of another network gets half of it.
    for number in 100..200 {
        let refused = asks(&mut producer, 500, "10.0.1.1", number as usize);
        assert_eq!(refused.contains(&500), number >= 104, "{number}");
        assert_eq!(refused.len(), 1);
    }
    // What is offered, or was given up, is not counted any more.
    for number in 100..104 {
        producer.offer(&name(number), now).expect("it is awaited");
    }
    let refused = (200..300).flat_map(|number| asks(&mut producer, 600, "10.0.0.1", number));
    assert_eq!(refused.count(), 96);
    producer.expire(now + Duration::from_secs(30));
    while producer.poll().is_some() {}
    let refused = (300..400).flat_map(|number| asks(&mut producer, 1, "10.0.0.1", number));
    assert_eq!(refused.count(), 92);
    let awaited = producer.gauges().into_iter().find(|(name, _)| *name == "awaited");
    assert_eq!(awaited, Some(("awaited", 8)));
}

#[test]
fn incarnations_of_one_host_that_decline_a_name_each_push_out_no_name_of_another_host() {
    let limits = Limits { tombstones: 64, ..Limits::default() };
    let (mut producer, now) = (Producer::new(limits), Timestamp::default());
    producer.receive(CONSUMER, at("10.0.1.1"), decline(&name(0)), now);
    for number in 1..1000 {
        let stranger = PeerId(1000 + number as u64);
        producer.receive(stranger, at("10.0.0.1"), decline(&name(number)), now);
    }
    while producer.poll().is_some() {}
    assert_eq!(producer.offer(&name(0), now), Err(Refusal::Ended(WireCode::NotNeeded)));
}
