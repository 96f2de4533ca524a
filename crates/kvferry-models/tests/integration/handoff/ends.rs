//! Claims, confirmations, restarts, and what an ended handoff refuses.

use super::*;

#[test]
fn a_claim_that_fails_is_not_reported_and_a_later_fetch_starts_afresh() {
    let mut ranks = Ranks::new(1);
    ranks.claim();
    ranks.pass(ranks.limits.rendezvous);
    assert_eq!(ranks.consumed, []);
    ranks.assert_empty();
    ranks.produce();
    ranks.want();
    ranks.assert_ended(WireCode::Ok);
    // The producer was restarted between the claim and the fetch.
    let mut ranks = Ranks::new(1);
    ranks.claim();
    let from = [ProducerRank {
        peer: PeerId(2),
        incarnation: None,
        readers: 1,
        connected: true,
        need: Need::ALL,
    }];
    assert_eq!(ranks.consumers[0].want(&id(), &from, BUDGET, ranks.now), Ok(()));
    let asks = std::iter::from_fn(|| ranks.consumers[0].poll()).any(|action| {
        matches!(action, ConsumerAction::Send { to: PeerId(2), message: HandoffMessage::Ask(_) })
    });
    assert!(asks);
}

#[test]
fn an_answer_is_said_once_for_a_claim_and_once_for_the_fetch_that_continues_it() {
    let mut ranks = Ranks::new(1);
    ranks.claim();
    assert_eq!(ranks.answered, [0; 0]);
    ranks.expect();
    assert_eq!(ranks.answered, [0]);
    ranks.produce();
    assert_eq!(ranks.answered, [0]);
    ranks.want();
    ranks.assert_ended(WireCode::Ok);
    assert_eq!(ranks.answered, [0, 0]);
    // An offer is an answer, too.
    let mut ranks = Ranks::new(1);
    ranks.produce();
    ranks.want();
    ranks.assert_ended(WireCode::Ok);
    assert_eq!(ranks.answered, [0]);
    // The claim is not answered.
    let mut ranks = Ranks::new(1);
    ranks.claim();
    ranks.want();
    assert_eq!(ranks.answered, [0; 0]);
    ranks.offer();
    assert_eq!(ranks.answered, [0]);
    ranks.withdraw(WireCode::Shutdown, "");
    assert_eq!(ranks.answered, [0]);
}

#[test]
fn a_claim_that_is_freed_cancelled_or_closed_frees_the_producer() {
    for way in ["free", "cancel", "close"] {
        for is_offered in [true, false] {
            let mut ranks = Ranks::new(1);
            ranks.expect();
            if is_offered {
                ranks.produce();
            }
            ranks.claim();
            let (consumer, now) = (&mut ranks.consumers[0], ranks.now);
            let code = WireCode::Shutdown;
            let ended = match way {
                "free" => consumer.free(&id(), &[(PRODUCER, None)], code, "", now),
                "cancel" => consumer.cancel(&id(), code, "", now),
                _ => {
                    consumer.close(now);
                    Ok(())
                }
            };
            assert_eq!(ended, Ok(()), "{way}");
            ranks.work();
            assert_eq!(ranks.produced_codes(), [code][..usize::from(is_offered)]);
            assert_eq!(ranks.offer_again(), Err(Refusal::Ended(code)), "{way}");
            assert_eq!(ranks.consumed, [], "{way}");
            ranks.assert_empty();
        }
    }
}

#[test]
fn an_expectation_ends_with_its_request_or_at_the_cap_and_its_consumer_gets_the_reason() {
    for is_withdrawn in [true, false] {
        let mut ranks = Ranks::new(1);
        ranks.expect();
        ranks.pass(Duration::from_secs(1));
        ranks.want();
        let code = if is_withdrawn { WireCode::Cancelled } else { WireCode::Deadline };
        if is_withdrawn {
            ranks.withdraw(code, "the client left");
        } else {
            ranks.pass(ranks.limits.cap);
        }
        assert_eq!(ranks.consumed[0].1.code, code);
        assert_eq!(ranks.offer_again(), Err(Refusal::Ended(code)));
        assert_eq!(ranks.produced, [], "it was never offered");
        ranks.assert_empty();
    }
}

#[test]
fn i6_a_consumer_that_never_confirms_is_given_up_after_its_budget() {
    let mut ranks = Ranks::new(1);
    ranks.produce();
    // It sends nothing more.
    ranks.up = false;
    ranks.producer.receive(CONSUMER, here(), ask(&id()), ranks.now);
    ranks.pass(Duration::from_secs(5) + ranks.limits.grace);
    assert_eq!(ranks.produced_codes(), [WireCode::Deadline]);
}

#[test]
fn all_readers_must_confirm_and_each_gets_an_answer() {
    let mut ranks = Ranks::new(3);
    ranks.produce();
    ranks.want_at(0);
    ranks.want_at(2);
    assert_eq!(ranks.consumed, [(0, Outcome::DONE), (2, Outcome::DONE)]);
    assert_eq!(ranks.produced, []);
    ranks.want_at(1);
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn one_reader_that_fails_ends_it_for_those_that_are_still_reading() {
    let mut ranks = Ranks::new(2);
    ranks.reads_end = false;
    ranks.produce();
    ranks.want();
    ranks.cancel("left");
    ranks.end_reads();
    ranks.assert_ended(WireCode::Cancelled);
}

#[test]
fn a_second_consumer_of_the_same_name_is_refused_and_the_first_is_not_disturbed() {
    let mut ranks = Ranks::reading();
    ranks.producer.receive(PeerId(999), here(), ask(&id()), ranks.now);
    let refused = std::iter::from_fn(|| ranks.producer.poll()).any(|action| {
        matches!(action, ProducerAction::Send { to: PeerId(999), message: HandoffMessage::Stop(stop) }
            if stop.code == WireCode::Duplicate)
    });
    assert!(refused);
    // Nor can it end what is not its own.
    let (code, detail) = (WireCode::Cancelled, String::new());
    let stop = Stop { id: id(), by_consumer: true, code, detail };
    ranks.producer.receive(PeerId(999), here(), stop.into(), ranks.now);
    while ranks.producer.poll().is_some() {}
    assert_eq!(ranks.producer.state(&id()), Some("serving"));
    ranks.end_reads();
    ranks.assert_ended(WireCode::Ok);
}

#[test]
fn i1_a_name_is_good_for_one_handoff() {
    let mut ranks = Ranks::new(1);
    ranks.produce();
    ranks.want();
    let from = [ProducerRank {
        peer: PRODUCER,
        incarnation: None,
        readers: 1,
        connected: true,
        need: Need::ALL,
    }];
    let again = ranks.consumers[0].want(&id(), &from, BUDGET, ranks.now);
    assert_eq!(again, Err(Refusal::Ended(WireCode::Ok)));
    assert_eq!(ranks.offer_again(), Err(Refusal::Ended(WireCode::Ok)));
    // Until no message of the first can be under way any more.
    ranks.pass(ranks.limits.tomb_ttl);
    ranks.produce();
    ranks.want();
    assert_eq!(ranks.produced, [Outcome::DONE, Outcome::DONE]);
}

#[test]
fn i12_a_restarted_producer_refuses_earlier_handoffs_as_unknown() {
    let mut ranks = Ranks::new(1);
    ranks.produce();
    ranks.loses = Some("confirm");
    ranks.want();
    ranks.producer = Producer::new(Limits::default());
    ranks.watched.retain(|(by, _)| *by != PRODUCER);
    ranks.reconnect();
    assert_eq!(ranks.consumed[0].1.code, WireCode::UnknownHandoff);
    ranks.assert_empty();
}

#[test]
fn i12_the_first_connection_ends_handoffs_that_mean_another_incarnation_and_no_other_ones() {
    let (now, name) = (Timestamp::default(), |name| HandoffId::new(name).expect("short"));
    let mut consumer = Consumer::new(Limits::default());
    let rank = |peer, connected, incarnation| {
        let peer = PeerId(peer);
        ProducerRank { peer, incarnation, readers: 1, connected, need: Need::ALL }
    };
    let [there, made_up] = [7, 8].map(|n| Some(Incarnation(n)));
    for (id, meant) in [("made up", made_up), ("there", there), ("any", None)] {
        consumer.want(&name(id), &[rank(1, false, meant)], BUDGET, now).expect("a new name");
    }
    consumer.claim(&name("claimed"), &[rank(1, false, made_up)], now).expect("a new name");
    let both = [rank(1, false, made_up), rank(2, true, None)];
    consumer.want(&name("answered by another"), &both, BUDGET, now).expect("a new name");
    let expected = kvferry_proto::handoff::Expected { id: name("answered by another") };
    consumer.receive(PeerId(2), here(), expected.into(), now);
    while consumer.poll().is_some() {}

    consumer.met(PeerId(1), Incarnation(7), now);
    let (mut ended, mut asked) = (BTreeSet::new(), BTreeSet::new());
    while let Some(action) = consumer.poll() {
        match action {
            // The incarnation that is there may have handoffs of the same names with other consumers.
            ConsumerAction::Send { to, message: HandoffMessage::Stop(stop) } => {
                assert_eq!((to, stop.id), (PeerId(2), name("answered by another")));
            }
            ConsumerAction::Ended { id, outcome, .. } => {
                assert_eq!(outcome.code, WireCode::StaleIncarnation, "{id}");
                ended.insert(id);
            }
            ConsumerAction::Send { message: HandoffMessage::Ask(ask), .. } => {
                asked.insert(ask.id);
            }
            _ => {}
        }
    }
    assert_eq!(ended, ["answered by another", "made up"].map(name).into());
    let unheard: Vec<_> = consumer.unheard().collect();
    assert_eq!(unheard, [PeerId(2)]);
    assert_eq!(asked, ["any", "there"].map(name).into());
    let gauges = consumer.gauges();
    assert_eq!((gauges[0], gauges[1]), (("claimed", 0), ("wanted", 2)));
    // What has ended unanswered may be asked again.
    consumer.want(&name("made up"), &[rank(1, true, there)], BUDGET, now).expect("forgotten");
}

#[test]
fn i12_the_end_of_a_handoff_is_told_to_the_incarnation_that_it_means_and_to_no_other_one() {
    let (start, name) = (Timestamp::default(), HandoffId::new("x").expect("short"));
    let limits = Limits::default();
    let [one, other] = [7, 8].map(Incarnation);
    let rank = |peer, connected, incarnation| {
        let peer = PeerId(peer);
        ProducerRank { peer, incarnation, readers: 1, connected, need: Need::ALL }
    };
    let stops = |consumer: &mut Consumer, to| {
        let actions = std::iter::from_fn(|| consumer.poll());
        let is_stop = |it: &ConsumerAction| matches!(it, ConsumerAction::Send { to: peer, message: HandoffMessage::Stop(_) } if *peer == to);
        actions.filter(is_stop).count()
    };
    let expected = || kvferry_proto::handoff::Expected { id: name.clone() }.into();
    let cancel = |consumer: &mut Consumer| {
        let cancelled = consumer.cancel(&name, WireCode::Cancelled, "", start);
        cancelled.expect("under way");
    };
    for how in ["silent", "silent, met", "not met", "confirmed", "freed", "freed when unmet"] {
        for comes in [one, other] {
            let mut consumer = Consumer::new(limits.clone());
            let from = |connected, meant| [rank(1, connected, meant)];
            let want = |consumer: &mut Consumer, from: &[ProducerRank]| {
                consumer.want(&name, from, BUDGET, start).expect("a new name");
            };
            match how {
                "silent" | "silent, met" => {
                    let is_met = how == "silent, met";
                    want(&mut consumer, &from(!is_met, (!is_met).then_some(one)));
                    if is_met {
                        consumer.met(PeerId(1), one, start);
                    }
                    consumer.receive(PeerId(1), here(), expected(), start);
                    consumer.lost(PeerId(1), WireCode::Silent, true, start);
                    consumer.expire(start + limits.silence);
                }
                "not met" => {
                    want(&mut consumer, &from(false, Some(one)));
                    cancel(&mut consumer);
                }
                "confirmed" => {
                    want(&mut consumer, &[rank(1, true, Some(one)), rank(2, true, None)]);
                    let (generation, last) = (Generation(3), true);
                    let announced = Announced { count: 1, last, ..Announced::default() };
                    let offer = Offer { id: name.clone(), generation, announced };
                    consumer.receive(PeerId(1), here(), offer.into(), start);
                    let actions = std::iter::from_fn(|| consumer.poll());
                    let reads = actions.filter_map(|action| match action {
                        ConsumerAction::Read { read, .. } => Some(read),
                        _ => None,
                    });
                    for read in reads.collect::<Vec<_>>() {
                        consumer.read_ended(read, Ok(()), start);
                    }
                    let confirmed = Confirmed { id: name.clone(), generation };
                    consumer.receive(PeerId(1), here(), confirmed.into(), start);
                    assert_eq!(consumer.state(&name, PeerId(1)), Some("confirmed"));
                    consumer.lost(PeerId(1), WireCode::Silent, true, start);
                    consumer.met(PeerId(1), comes, start);
                    while consumer.poll().is_some() {}
                    cancel(&mut consumer);
                    let told = usize::from(comes == one);
                    assert_eq!(stops(&mut consumer, PeerId(1)), told, "{how}");
                    consumer.lost(PeerId(1), WireCode::Closed, false, start);
                }
                _ => {
                    let from = [(PeerId(1), Some(one).filter(|_| how == "freed"))];
                    let freed = consumer.free(&name, &from, WireCode::NotNeeded, "", start);
                    freed.expect("a new name");
                    if how == "freed when unmet" {
                        consumer.met(PeerId(1), one, start);
                        consumer.lost(PeerId(1), WireCode::Silent, true, start);
                    }
                }
            }
            while consumer.poll().is_some() {}
            consumer.met(PeerId(1), comes, start);
            let told = usize::from(comes == one);
            assert_eq!(stops(&mut consumer, PeerId(1)), told, "{how}, {comes}");
            assert_eq!(consumer.unheard().any(|peer| peer == PeerId(1)), told == 1, "{how}");
        }
    }
}

#[test]
fn i12_a_fetch_that_no_producer_has_answered_may_be_asked_again_of_the_restarted_one() {
    let restarted = PeerId(2);
    let from = [ProducerRank {
        peer: restarted,
        incarnation: None,
        readers: 1,
        connected: true,
        need: Need::ALL,
    }];
    for is_answered in [false, true] {
        let mut ranks = Ranks::new(1);
        ranks.want();
        if is_answered {
            ranks.expect();
        }
        let (code, now) = (WireCode::StaleIncarnation, ranks.now);
        ranks.consumers[0].lost(PRODUCER, code, true, now);
        ranks.up = false;
        ranks.work();
        assert_eq!(ranks.consumed_codes(), [code]);
        let gauges = ranks.consumers[0].gauges();
        let kept: Vec<_> = gauges.into_iter().filter(|(_, count)| *count > 0).collect();
        let again = ranks.consumers[0].want(&id(), &from, BUDGET, now);
        if is_answered {
            assert_eq!((kept, again), (vec![("tombstones", 1)], Err(Refusal::Ended(code))));
            continue;
        }
        assert_eq!((kept, again), (vec![], Ok(())));
        let asks = std::iter::from_fn(|| ranks.consumers[0].poll()).any(|action| {
            matches!(action, ConsumerAction::Send { to, message: HandoffMessage::Ask(_) } if to == restarted)
        });
        assert!(asks);
    }
}

#[test]
fn i1_what_goes_on_after_it_was_complete_is_a_failure_and_nothing_is_read_after_the_end() {
    let mut ranks = Ranks::new(1);
    ranks.want();
    let announced = |count, tokens, last| Announced {
        count,
        tables: vec![BlockTable::new(0, vec![1, 2, 3, 4]).into()],
        progress: Progress::tokens(tokens),
        last,
        side_data: None,
    };
    let generation = Generation(7);
    let offer = Offer { id: id(), generation, announced: announced(1, 8, true) };
    ranks.consumers[0].receive(PRODUCER, here(), offer.into(), ranks.now);
    let more = Ready { id: id(), generation, announced: announced(2, 16, false) };
    ranks.consumers[0].receive(PRODUCER, here(), more.into(), ranks.now);
    ranks.work();
    assert_eq!(ranks.consumed.len(), 1);
    assert_eq!(ranks.consumed[0].1.code, WireCode::Malformed);
}

#[test]
fn the_messages_of_8k_tokens_in_random_blocks_fit_into_4_kib() {
    let mut ranks = Ranks::new(1);
    ranks.want();
    ranks.offer();
    let mut state = 1_u64;
    let mut block = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as u32 % 60_000
    };
    for chunk in 0..4 {
        let table = BlockTable::new(chunk * 128, (0..128).map(|_| block()).collect());
        let progress = Progress::tokens((chunk + 1) * 2048);
        assert_eq!(ranks.producer.advance(&id(), vec![table], progress), Ok(()));
        ranks.work();
    }
    ranks.complete(8192);
    ranks.assert_ended(WireCode::Ok);
    assert!(ranks.bytes <= 4096, "{}", ranks.bytes);
}

#[test]
fn an_announcement_that_changes_a_block_is_refused() {
    let mut ranks = Ranks::new(1);
    ranks.want();
    ranks.offer();
    ranks.advance(0, 2, Progress::tokens(2));
    let offer = Offer {
        id: id(),
        generation: Generation(1),
        announced: Announced {
            count: 2,
            tables: vec![BlockTable::new(0, vec![1, 2]).into()],
            progress: Progress::tokens(2),
            ..Default::default()
        },
    };
    ranks.consumers[0].receive(PRODUCER, here(), offer.into(), ranks.now);
    ranks.work();
    ranks.assert_ended(WireCode::Malformed);
    let detail = &ranks.consumed[0].1.detail;
    assert_eq!(detail, "block 0 was announced as number 50, and now as 1");
}
