//! More connections than the process has file descriptors for.

use super::unauthenticated::{RawPeer, begun, config};
use super::*;
use kvferry_proto::{Secret, SessionConfig, WireCode};

/// A target with a limit of `descriptors` file descriptors. One heartbeat that says that its sender waits is good for
/// the whole test.
fn target(transports: &str, descriptors: usize) -> (Child, String, ChildRegion) {
    let (mut child, address) = Child::with_agent(peer_config_over(transports));
    let region = child.allocate(64 * MIB, "w", 2);
    child.call(json!({"op": "limit_descriptors", "limit": descriptors}));
    (child, address, region)
}

/// A peer that has a session, and nothing else.
fn raw_peer(address: &str) -> RawPeer {
    RawPeer::call(address, config()).expect("a session")
}

/// An agent that sends no heartbeat during the test. One that is sent a moment after a transfer says that the
/// agent waits for something, and `target` believes it for the whole test.
fn small_agent() -> Agent {
    let builder = Agent::builder().io_threads(1).transports(tcp()).silence(NEVER);
    builder.start().expect("an agent")
}

/// Writes once, over a new session if necessary. So little that it arrives in one piece: `target` believes for the
/// whole test that a session is busy which it has once seen wait for more.
fn write_once(agent: &Agent, address: &str, region: &ChildRegion) {
    let from = source(agent, 1024, 1);
    let peer = agent.peer(address).expect("an address");
    peer.write(&batch(&from, &region.remote, 1024), &within(PATIENCE)).expect("a session");
}

#[test]
fn sessions_in_use_beyond_a_quarter_of_the_descriptors_are_refused_as_busy_until_one_ends() {
    let _bound = bounded();
    let (mut child, address, region) = target("tcp", 160);
    let mut inside: Vec<_> = (0..40).map(|_| raw_peer(&address)).collect();
    inside.iter_mut().for_each(RawPeer::waits_for_something);
    let outside = small_agent();
    let waiting = outside.peer(&address).expect("an address");
    for _ in 0..3 {
        let error = waiting.connect(PATIENCE).expect_err("there is no place");
        assert_eq!(error.kind(), ErrorKind::Busy, "{error:?}");
        assert!(error.to_string().contains("descriptor limit"), "{error}");
    }
    assert_eq!(outside.stats().sessions_opened, 0);
    let stats = child.stats();
    assert_eq!((&stats["sessions"], &stats["connections_refused"]), (&json!(40), &json!(3)));
    assert_eq!(stats["sessions_displaced"], json!(0));
    drop(inside.pop());
    eventually("a released place is used again", || waiting.connect(PATIENCE).is_ok());
    write_once(&outside, &address, &region);
}

#[test]
fn idle_sessions_give_their_places_to_new_ones_and_their_peers_connect_again() {
    let _bound = bounded();
    let (mut child, address, region) = target("tcp", 160);
    let honest = small_agent();
    write_once(&honest, &address, &region);
    let mut in_use = raw_peer(&address);
    in_use.waits_for_something();
    // One more than fit beside these two: the first session has been idle for longest.
    let mut idle: Vec<_> = (0..39).map(|_| raw_peer(&address)).collect();
    let newcomer = small_agent();
    write_once(&newcomer, &address, &region);
    eventually("the displaced agent knows", || honest.stats().sessions == 0);
    write_once(&honest, &address, &region);
    let first = idle[0].ended();
    assert_eq!((first.code, first.by_peer), (WireCode::Busy, true));
    assert!(first.detail.contains("idle"), "{first:?}");
    in_use.waits_for_something();
    let stats = child.stats();
    assert_eq!(stats["connections_refused"], json!(0), "{stats}");
    assert_eq!(stats["sessions_displaced"], json!(3), "{stats}");
}

#[test]
fn a_stranger_without_the_secret_displaces_no_session() {
    let _bound = bounded();
    let mut settings = peer_config();
    settings["secret"] = json!("the secret of a test");
    let (mut child, address) = Child::with_agent(settings);
    child.call(json!({"op": "limit_descriptors", "limit": 160}));
    let knows = SessionConfig { secret: Secret::new(*b"the secret of a test"), ..config() };
    let inside = |_| RawPeer::call(&address, knows.clone()).expect("the right secret");
    let _inside: Vec<_> = (0..40).map(inside).collect();
    let guesses = SessionConfig { secret: Secret::new(*b"another secret here"), ..config() };
    for config in [config(), guesses] {
        RawPeer::call(&address, config).err().expect("a stranger");
    }
    // Of the last session, the agent may still get the last message.
    eventually("all are connected", || child.stats()["sessions"] == 40);
    let stats = child.stats();
    assert_eq!((&stats["sessions"], &stats["sessions_displaced"]), (&json!(40), &json!(0)));
}

#[test]
fn connections_that_prove_nothing_take_no_place_of_a_session() {
    let _bound = bounded();
    let mut settings = peer_config();
    settings["secret"] = json!("the secret of a test");
    let (mut child, address) = Child::with_agent(settings);
    child.call(json!({"op": "limit_descriptors", "limit": 160}));
    let guesses = SessionConfig { secret: Secret::new(*b"another secret here"), ..config() };
    let _strangers: Vec<_> = (0..45).map(|_| begun(&address, guesses.clone())).collect();
    let knows = SessionConfig { secret: Secret::new(*b"the secret of a test"), ..config() };
    let inside = |_| RawPeer::call(&address, knows.clone()).expect("there is a place");
    let _inside: Vec<_> = (0..40).map(inside).collect();
    eventually("all are connected", || child.stats()["sessions"] == 40);
    let stats = child.stats();
    assert_eq!((&stats["sessions"], &stats["connections_refused"]), (&json!(40), &json!(0)));
}

#[test]
fn further_streams_beyond_a_quarter_of_the_descriptors_are_refused_and_transfers_go_on() {
    let _bound = bounded();
    let (mut child, address, region) = target("tcp", 64);
    let agent = || {
        let builder = Agent::builder().transports(tcp()).silence(NEVER).streams_per_peer(64);
        builder.start().expect("an agent")
    };
    let (first, second) = (agent(), agent());
    for (number, agent) in [&first, &second].into_iter().enumerate() {
        let from = source(agent, region.len, number as u64);
        let peer = agent.peer(&address).expect("an address");
        let moves = batch(&from, &region.remote, 64 * KIB);
        for _ in 0..3 {
            let options = Options { streams: Some(64), ..within(PATIENCE) };
            peer.write(&moves, &options).expect("there is one stream at least");
        }
        assert!(child.matches(&region, number as u64));
    }
    let stats = child.stats();
    assert!((3..=18).contains(&stats["streams"].as_u64().expect("a number")), "{stats}");
    assert!(stats["connections_refused"].as_u64() > Some(0), "{stats}");
}

#[test]
fn processes_that_copy_by_themselves_beyond_their_share_of_the_descriptors_go_over_tcp() {
    let _bound = bounded();
    let (mut child, address, region) = target("local,tcp", 80);
    let agents: Vec<_> = (0..10).map(|_| agent_over("local,tcp")).collect();
    let moved = agents.iter().enumerate().map(|(number, agent)| {
        let peer = agent.peer(&address).expect("an address");
        peer.connect(PATIENCE).expect("there is room for its session");
        let from = source(agent, 64 * KIB, number as u64);
        let moves = batch(&from, &region.remote, 4096);
        peer.write(&moves, &within(PATIENCE)).expect("local or tcp").transport
    });
    let local = moved.filter(|kind| *kind == Some(kvferry::TransportKind::LOCAL)).count();
    // A quarter of 80 descriptors, three for each process.
    assert_eq!(local, 6);
    let stats = child.stats();
    assert_eq!((&stats["writers"], &stats["connections_refused"]), (&json!(6), &json!(4)));
}

fn tcp() -> Transports {
    Transports::parse("tcp").expect("a name")
}
