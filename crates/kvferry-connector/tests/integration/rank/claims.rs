//! Peers that claim the incarnation of another one.

use super::*;
use claimant::Claimant;
use kvferry::Incarnation;
use kvferry_proto::handoff::{
    Announced, Ask, Confirm, Confirmed, Generation, HandoffMessage, Offer, Stop,
};
use kvferry_proto::rank_message::{Reader, ReaderKey, ReaderMessage};
use kvferry_testkit::eventually;

fn message(message: impl Into<HandoffMessage>) -> Vec<u8> {
    message.into().encode()
}

/// A complete offer of these blocks.
fn offer_of(request: usize, blocks: &[u32]) -> Vec<u8> {
    let announced = Announced {
        count: 1,
        tables: vec![BlockTable::new(0, blocks.to_vec()).into()],
        progress: Progress::tokens(blocks.len() as u32),
        last: true,
        side_data: None,
    };
    message(Offer { id: id(request), generation: Generation(1), announced })
}

#[test]
fn a_peer_that_claims_to_be_a_producer_gets_none_of_its_handoffs() {
    let _bound = bounded();
    let (mut p, mut d) = (Node::new("tcp"), Node::new("tcp"));
    let (address, pool) = (p.address(), p.pool.remote());
    let others = p.blocks(8);
    p.compute(9, &others);
    let first = d.fetch(1, 8, &address, &pool);
    eventually("the producer is asked", || p.rank.gauges().contains(&("watched", 1)));
    let claimant = Claimant::call(&d.address(), p.agent.incarnation());
    claimant.say(offer_of(1, &others));
    claimant.say(message(Confirmed { id: id(1), generation: Generation(1) }));
    let second = d.fetch(2, 8, &address, &pool);
    p.offer(1, 8);
    p.offer(2, 8);
    for _ in 0..2 {
        assert_eq!(d.consumed(), Outcome::DONE);
        assert_eq!(p.produced(), Outcome::DONE);
    }
    d.assert_holds(1, &first);
    d.assert_holds(2, &second);
    assert_eq!(claimant.heard(), []);
}

#[test]
fn a_peer_that_claims_to_be_a_consumer_gets_and_ends_none_of_its_handoffs() {
    let _bound = bounded();
    let (mut p, mut d) = (Node::new("tcp"), Node::new("tcp"));
    let (address, pool) = (p.address(), p.pool.remote());
    let blocks = d.fetch(1, 8, &address, &pool);
    eventually("the producer is asked", || p.rank.gauges().contains(&("watched", 1)));
    let claimant = Claimant::call(&address, d.agent.incarnation());
    let (code, detail) = (WireCode::Cancelled, String::new());
    claimant.say(message(Stop { id: id(1), by_consumer: true, code, detail }));
    p.offer(1, 8);
    claimant.say(message(Confirm { id: id(1), generation: Generation(1) }));
    assert_eq!(d.consumed(), Outcome::DONE);
    assert_eq!(p.produced(), Outcome::DONE);
    d.assert_holds(1, &blocks);
    assert!(!claimant.was_told(), "{:?}", claimant.heard());
}

#[test]
fn an_address_where_a_peer_claims_to_be_a_producer_takes_nothing_from_the_producers_address() {
    let _bound = bounded();
    let (mut p, mut d) = (Node::new("tcp"), Node::new("tcp"));
    let (address, pool) = (p.address(), p.pool.remote());
    let claimant = Claimant::listen(p.agent.incarnation());
    d.fetch(7, 8, &claimant.address, &pool);
    eventually("the claimant is asked", || !claimant.heard().is_empty());
    let blocks = d.fetch(1, 8, &address, &pool);
    p.offer(1, 8);
    assert_eq!(d.consumed(), Outcome::DONE);
    assert_eq!(p.produced(), Outcome::DONE);
    d.assert_holds(1, &blocks);
    let heard = claimant.heard();
    assert!(heard.iter().all(|message| message.id() == Some(&id(7))), "{heard:?}");
}

#[test]
fn a_reader_in_a_second_session_is_known_by_its_key_and_not_by_its_incarnation() {
    let _bound = bounded();
    let mut p = Node::new("tcp");
    let (address, claimed) = (p.address(), Incarnation(7));
    let key = |byte| ReaderMessage::from(Reader { key: ReaderKey([byte; 16]) }).encode();
    let ask = || message(Ask { id: id(1), readers: 1, budget_ms: 60_000 });
    let first = Claimant::call(&address, claimed);
    first.say(key(1));
    first.say(ask());
    for other in [Some(key(2)), None] {
        let claimant = Claimant::call(&address, claimed);
        other.into_iter().for_each(|key| claimant.say(key));
        claimant.say(ask());
        eventually("all readers of the handoff have asked", || {
            let is_it = |it: &HandoffMessage| matches!(it, HandoffMessage::Stop(stop) if stop.code == WireCode::Duplicate);
            claimant.heard().iter().any(is_it)
        });
    }
    let again = Claimant::call(&address, claimed);
    again.say(key(1));
    again.say(ask());
    p.offer(1, 8);
    eventually("the reader is told in its last session", || again.was_told());
    assert!(!first.was_told());
    again.say(message(Confirm { id: id(1), generation: Generation(1) }));
    assert_eq!(p.produced(), Outcome::DONE);
}

/// A full agent ends a session in which nothing is moved. Its peer connects again.
#[test]
fn a_fetch_goes_on_after_its_session_gave_its_place_to_another_one() {
    let _bound = bounded();
    // However long the next session takes.
    let limits = Limits { reconnect: PATIENCE, ..Limits::default() };
    let mut d = Node::patient("tcp", &limits);
    let claimant = Claimant::listen(Incarnation(7));
    let pool = d.pool.remote();
    d.fetch(1, 8, &claimant.address, &pool);
    let asked = |times: usize| {
        let asks = claimant.heard().into_iter().filter(|it| matches!(it, HandoffMessage::Ask(_)));
        asks.count() >= times
    };
    eventually("the producer is asked", || asked(1));
    claimant.displace();
    eventually("the producer is asked in another session", || asked(2));
    assert_eq!(d.rank.events(), []);
}

/// As one that is short of memory: it is not asked again and again at the speed of the network.
#[test]
fn a_fetch_from_a_peer_that_gives_up_several_sessions_in_a_row_fails() {
    let _bound = bounded();
    let limits = Limits { reconnect: PATIENCE, rendezvous: PATIENCE, ..Limits::default() };
    let mut d = Node::patient("tcp", &limits);
    let claimant = Claimant::listen(Incarnation(7));
    let pool = d.pool.remote();
    d.fetch(1, 8, &claimant.address, &pool);
    let mut given_up = 0;
    let mut events = Vec::new();
    // On a busy machine sessions may last long enough not to count.
    eventually("the fetch fails", || {
        let heard = claimant.heard();
        if heard.iter().filter(|it| matches!(it, HandoffMessage::Ask(_))).count() > given_up {
            claimant.displace();
            given_up += 1;
        }
        events.extend(d.rank.events());
        !events.is_empty()
    });
    assert!(given_up > 3, "{given_up}");
    let [Event::Consumed { outcome, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(outcome.code, WireCode::Busy);
}
