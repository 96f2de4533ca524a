//! Numbers of peers, and the room that addresses share.

use super::*;
use kvferry::Agent;
use kvferry_testkit::PATIENCE;

fn agent() -> Agent {
    Agent::builder().listen(([127, 0, 0, 1], 0)).start().expect("an agent")
}

fn host(address: &str) -> Option<Origin> {
    Some(Origin::from(address.parse::<IpAddr>().expect("an address")))
}

fn limit() -> usize {
    sessions_max(fd::limit())
}

/// So many ranks on one host, at its ports from the first one on.
fn ranks(agent: &Agent, first: usize, count: usize) -> Vec<Peer> {
    let address = |port: usize| format!("10.9.9.9:{}", 1 + port);
    (first..first + count).map(|port| agent.peer(&address(port)).expect("an address")).collect()
}

fn plain(peers: &[Peer]) -> impl Iterator<Item = (&Peer, Option<Incarnation>)> {
    peers.iter().map(|peer| (peer, None))
}

/// The places that an engine named by a host gets for so many ranks.
fn places(
    peers: &mut Peers,
    agent: &Agent,
    engine: &str,
    first: usize,
    count: usize,
) -> Vec<PeerId> {
    let places = peers.places(host(engine), plain(&ranks(agent, first, count)));
    places.into_iter().flatten().map(|(id, _)| id).collect()
}

/// As after the rank's thread has looked after peers, with what the handoffs of `ids` need.
fn need(peers: &mut Peers, ids: &[PeerId]) {
    ids.iter().for_each(|id| peers.watch(*id, true));
    peers.take_unmet(Timestamp::default());
    peers.forget_idle();
}

/// Gives each place the same session, which nothing needs, and which has told all.
fn idle(peers: &mut Peers, ids: &[PeerId], session: &Channel) {
    for id in ids {
        let (_, place) = peers.place_of(*id).expect("it is there");
        (place.session, place.opening, place.reserved) = (Some(session.clone()), false, false);
        (place.watched, place.unheard) = (false, false);
    }
}

fn session(agent: &Agent) -> (Agent, Channel) {
    let far = self::agent();
    let peer = agent.peer(far.advertised()).expect("an address");
    let channel = peer.channel(PATIENCE).expect("a session");
    (far, channel)
}

impl Peers {
    /// Has places needed until no host gets another one. Their sessions are being opened.
    pub(in crate::rank) fn take_all_places(&mut self, agent: &Agent) {
        for network in 0.. {
            let engine = format!("10.1.{network}.1");
            let free = limit() - self.count(Place::takes_room).all();
            if free == 0 {
                return;
            }
            let first = 1024 * network;
            let ids = places(self, agent, &engine, first, free.div_ceil(2));
            for id in ids {
                self.place_of(id).expect("it is there").1.opening = true;
            }
        }
    }
}

#[test]
fn addresses_that_claim_an_incarnation_from_another_host_leave_its_own_host_its_addresses() {
    let agent = agent();
    let mut peers = Peers::default();
    let incarnation = Incarnation(7);
    let origin = |host: u8| Origin::from(IpAddr::from([10, 0, 0, host]));
    let number = |peers: &mut Peers, peer: &Peer| {
        let place = peers.places(None, [(peer, None)]).pop().expect("one for each");
        place.expect("there is room").0
    };
    for n in 0..PLACES_OF_INCARNATION {
        let peer = agent.peer(&format!("10.0.0.9:{}", 1 + n)).expect("an address");
        let id = number(&mut peers, &peer);
        assert!(peers.has_room_for(incarnation, origin(9), id));
        let (_, place) = peers.place_of(id).expect("it is there");
        (place.incarnation, place.origin, place.watched) =
            (Some(incarnation), Some(origin(9)), true);
    }
    let peer = agent.peer("10.0.0.1:1").expect("an address");
    let id = number(&mut peers, &peer);
    assert!(peers.has_room_for(incarnation, origin(1), id), "its own host");
    assert!(!peers.has_room_for(incarnation, origin(9), id), "all of its addresses are needed");
}

#[test]
fn i8_engines_of_one_host_leave_half_of_the_places_and_those_of_one_network_a_quarter() {
    let agent = agent();
    let (_far, session) = session(&agent);
    let (mut peers, all) = (Peers::default(), limit());
    // All ranks are at one host, which is none of those that are asked for the engines. At first none is needed.
    for part in 0..4 {
        let ids = places(&mut peers, &agent, "10.0.0.1", part * all / 4, all / 4);
        idle(&mut peers, &ids, &session);
    }
    assert_eq!(peers.len(), all / 4 * 4);
    let needed = |peers: &mut Peers, engine, first| {
        let ids = places(peers, &agent, engine, first, all);
        need(peers, &ids);
        assert!(peers.len() <= all);
        ids.len()
    };
    assert_eq!(needed(&mut peers, "10.0.0.1", 0), all / 2);
    assert_eq!(needed(&mut peers, "10.0.0.1", all), 0);
    let of_network =
        needed(&mut peers, "10.0.0.2", 2 * all) + needed(&mut peers, "10.0.0.3", 3 * all);
    assert!((all / 4 - 2..=all / 4 + 1).contains(&of_network), "{of_network} of {all}");
    // There is room for others.
    assert!(needed(&mut peers, "10.0.1.1", 4 * all) >= all / 8 - 1);
    assert!(needed(&mut peers, "fd00::1", 5 * all) >= all / 16 - 1);
}

#[test]
fn i8_sessions_of_many_ranks_end_before_the_idle_ones_of_another_host() {
    let agent = agent();
    let (_far, session) = session(&agent);
    let (mut peers, all) = (Peers::default(), limit());
    let honest = places(&mut peers, &agent, "10.0.1.1", 0, 8);
    idle(&mut peers, &honest, &session);
    // Engines of another host, one after the other, none of which is needed for long.
    for engine in 1..10 {
        let ids = places(&mut peers, &agent, "10.0.0.1", engine * all, all / 4);
        assert_eq!(ids.len(), all / 4);
        idle(&mut peers, &ids, &session);
    }
    assert_eq!((honest.len(), peers.len()), (8, all));
    assert!(honest.iter().all(|id| peers.place_of(*id).is_some()));
}

#[test]
fn i8_places_that_a_call_has_got_are_kept_until_the_machines_have_said_what_they_need() {
    let agent = agent();
    let (mut peers, all) = (Peers::default(), limit());
    // Two handoffs of one step, which the rank's thread has not seen yet.
    let first = places(&mut peers, &agent, "10.0.0.1", 0, all / 2);
    let second = places(&mut peers, &agent, "10.0.0.1", all, all / 2);
    assert_eq!((first.len(), second.len()), (all / 2, 0));
    need(&mut peers, &first[1..]);
    assert!(peers.place_of(first[0]).is_none(), "its handoff was refused for another reason");
    assert!(first[1..].iter().all(|id| peers.place_of(*id).is_some()));
    assert_eq!(places(&mut peers, &agent, "10.0.0.1", all, all / 2).len(), 1);
}

#[test]
fn a_place_that_no_machine_needs_is_reserved_no_longer_than_until_they_have_said_so() {
    let agent = agent();
    let mut peers = Peers::default();
    let half = limit() / 2;
    for engine in 0..4 {
        let ids = places(&mut peers, &agent, &format!("10.0.{engine}.1"), engine * half, half);
        assert_eq!(ids.len(), half, "engine {engine}");
        // One is needed.
        peers.watch(ids[0], true);
        peers.settle();
        assert_eq!(peers.count(Place::is_needed).all(), 1);
        peers.watch(ids[0], false);
    }
}

#[test]
fn sessions_that_open_and_may_lead_nowhere_take_no_room_from_a_session_that_there_is() {
    let agent = agent();
    let (_far, session) = session(&agent);
    let (mut peers, half) = (Peers::default(), limit() / 2);
    let up = places(&mut peers, &agent, "10.0.0.1", 0, 2);
    idle(&mut peers, &up, &session);
    peers.settle();
    let opening = places(&mut peers, &agent, "10.0.0.1", 100, half);
    assert_eq!(opening.len(), half);
    need(&mut peers, &opening);
    assert_eq!(places(&mut peers, &agent, "10.0.0.1", 10_000, 1), []);
    assert_eq!(places(&mut peers, &agent, "10.0.0.1", 0, 2), up);
}

#[test]
fn i8_a_host_with_idle_sessions_and_others_that_open_leaves_other_hosts_a_quarter() {
    let agent = agent();
    let (_far, session) = session(&agent);
    let (mut peers, all) = (Peers::default(), limit());
    let up = places(&mut peers, &agent, "10.0.0.1", 0, all / 2);
    idle(&mut peers, &up, &session);
    peers.settle();
    let opening = places(&mut peers, &agent, "10.0.0.1", 10_000, all / 2);
    need(&mut peers, &opening);
    let again = places(&mut peers, &agent, "10.0.0.1", 0, all / 2);
    need(&mut peers, &again);
    assert_eq!((opening.len(), again.len()), (all / 2, all / 4));
    assert_eq!(places(&mut peers, &agent, "10.0.1.1", 20_000, all).len(), all / 8);
}

#[test]
fn i8_a_producer_is_told_of_an_end_though_all_places_are_taken() {
    let agent = agent();
    let mut peers = Peers::default();
    peers.take_all_places(&agent);
    let others = ranks(&agent, 60_000, 200);
    assert!(peers.places(host("10.0.2.1"), plain(&others)).iter().all(Result::is_err));
    // A place that is needed, and some that have none.
    let taken = ranks(&agent, 0, 1);
    let told = peers.places_to_tell(host("10.0.2.1"), plain(&others).chain(plain(&taken)));
    assert!(told.iter().all(Result::is_ok));
    let mut waiting: FxHashSet<_> = told[..others.len()].iter().flatten().map(|it| it.0).collect();
    waiting.iter().for_each(|id| peers.connect_once(*id));
    let mut now = Timestamp::default();
    while !waiting.is_empty() {
        peers.retry(waiting.iter().copied(), now);
        let unmet = peers.take_unmet(now);
        peers.forget_idle();
        assert!(!unmet.is_empty() && unmet.len() <= OPENING_TO_TELL_MAX, "{}", unmet.len());
        // Half of them get through.
        for (at, (address, _)) in unmet.iter().enumerate() {
            let id = peers.not_met_at(address).expect("it waits to tell");
            if at % 2 == 0 {
                waiting.remove(&id);
            }
        }
        now = now + RETRY_LAST;
    }
    peers.retry(std::iter::empty(), now);
    peers.forget_idle();
    assert_eq!(peers.len(), limit());
}

#[test]
fn i8_a_host_whose_producers_do_not_answer_keeps_no_other_from_being_told() {
    let agent = agent();
    let mut peers = Peers::default();
    let silent = ranks(&agent, 0, TELLING_MAX + OPENING_TO_TELL_MAX);
    let (silent, more) = silent.split_at(TELLING_MAX);
    let other = ranks(&agent, 40_000, 4);
    let tell = |peers: &mut Peers, engine, ranks: &[Peer]| {
        let told = peers.places_to_tell(host(engine), plain(ranks));
        let told: Vec<_> = told.into_iter().flatten().map(|it| it.0).collect();
        told.iter().for_each(|id| peers.connect_once(*id));
        told
    };
    assert_eq!(tell(&mut peers, "10.0.0.1", silent).len(), TELLING_MAX);
    let opening = peers.take_unmet(Timestamp::default());
    assert_eq!(opening.len(), OPENING_TO_TELL_MAX);
    assert_eq!(tell(&mut peers, "10.0.0.1", more).len(), more.len());
    let told = tell(&mut peers, "10.0.1.1", &other);
    assert_eq!(told.len(), other.len());
    // The ones of the host with most went.
    assert!(told.iter().all(|id| peers.place_of(*id).is_some()));
    assert_eq!(peers.len(), TELLING_MAX + OPENING_TO_TELL_MAX);
    assert!(peers.take_unmet(Timestamp::default()).is_empty(), "all sessions are being opened");
    for (address, _) in &opening[..2] {
        peers.not_met_at(address);
    }
    let next = peers.take_unmet(Timestamp::default());
    let is_other = |address: &str| other.iter().any(|it| it.address() == address);
    assert!(next.len() == 2 && next.iter().all(|(address, _)| is_other(address)), "{next:?}");
}

#[test]
fn i8_a_session_that_has_not_told_all_gives_its_room_up_and_is_opened_again() {
    let agent = agent();
    let (_far, session) = session(&agent);
    let (mut peers, all) = (Peers::default(), limit());
    let [told, unheard] = [0, 1].map(|at| places(&mut peers, &agent, "10.0.0.1", at, 1)[0]);
    idle(&mut peers, &[told, unheard], &session);
    peers.retry([unheard].into_iter(), Timestamp::default());
    for engine in 0.. {
        let first = 1024 * (1 + engine);
        let ids = places(&mut peers, &agent, &format!("10.1.{engine}.1"), first, all);
        need(&mut peers, &ids);
        if peers.place_of(told).is_none() && peers.channel(unheard).is_none() {
            break;
        }
    }
    assert!(peers.place_of(unheard).is_some());
    peers.retry([unheard].into_iter(), Timestamp::default());
    let later = Timestamp::default() + RETRY_FIRST;
    peers.retry([unheard].into_iter(), later);
    let unmet = peers.take_unmet(later);
    assert_eq!(unmet.len(), 1);
    assert!(peers.place_of(unheard).expect("it is there").1.opening);
}

#[test]
fn an_engine_is_learned_for_an_end_though_all_places_are_taken() {
    let agent = agent();
    let mut peers = Peers::default();
    peers.take_all_places(&agent);
    let learn = |peers: &mut Peers, n: u8, to_tell| {
        let peer = agent.peer(&format!("10.7.{n}.1:1")).expect("an address");
        let place = peers.place_to_learn(&peer, to_tell);
        place.map(|(id, _)| peers.watch_handshake(id, true)).is_ok()
    };
    assert!(!learn(&mut peers, 1, false));
    assert_eq!((1..100).filter(|n| learn(&mut peers, *n, true)).count(), SPARE_MAX);
    // They take no room from others.
    let taken = &ranks(&agent, 0, 1)[0];
    let (id, _) = peers.places(None, [(taken, None)]).pop().expect("one").expect("it is needed");
    peers.place_of(id).expect("it is there").1.opening = false;
    need(&mut peers, &[]);
    assert!(learn(&mut peers, 200, false) && !learn(&mut peers, 201, false));
}
