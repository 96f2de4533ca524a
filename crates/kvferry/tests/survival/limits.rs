//! More connections than the process has file descriptors for.

use super::*;

/// A target with a limit of `descriptors` file descriptors.
fn target(transports: &str, descriptors: usize) -> (Child, String, ChildRegion) {
    let (mut child, address) = Child::with_agent(peer_config_over(transports));
    let region = child.allocate(64 * MIB, "w", 2);
    child.call(json!({"op": "limit_descriptors", "limit": descriptors}));
    (child, address, region)
}

#[test]
fn sessions_beyond_a_quarter_of_the_descriptors_are_refused_as_busy_until_one_ends() {
    let _bound = bounded();
    let (mut child, address, region) = target("tcp", 160);
    let outcomes: Vec<_> = (0..60)
        .map(|_| {
            let agent = Agent::builder().io_threads(1).transports(tcp()).start().expect("an agent");
            let outcome = agent.peer(&address).expect("an address").connect(within_ten());
            (agent, outcome)
        })
        .collect();
    let (inside, outside): (Vec<_>, Vec<_>) =
        outcomes.into_iter().partition(|(_, outcome)| outcome.is_ok());
    assert_eq!(inside.len(), 40);
    for (agent, refused) in &outside {
        let error = refused.as_ref().expect_err("the error outcomes");
        assert_eq!(error.kind(), ErrorKind::Busy, "{error:?}");
        assert!(error.to_string().contains("descriptor limit"), "{error}");
        assert_eq!(agent.stats().sessions_opened, 0);
    }
    let stats = child.stats();
    assert_eq!((&stats["sessions"], &stats["connections_refused"]), (&json!(40), &json!(20)));
    // The accepted sessions work.
    for (number, (agent, _)) in inside.iter().enumerate().step_by(10) {
        let from = source(agent, 64 * KIB, number as u64);
        let peer = agent.peer(&address).expect("an address");
        peer.write(&batch(&from, &region.remote, 4096), &within(within_ten())).expect("a session");
    }
    inside[0].0.shutdown();
    let waiting = outside[0].0.peer(&address).expect("an address");
    eventually(Duration::from_secs(5), "a released place is used again", || {
        waiting.connect(within_ten()).is_ok()
    });
}

#[test]
fn further_streams_beyond_a_quarter_of_the_descriptors_are_refused_and_transfers_go_on() {
    let _bound = bounded();
    let (mut child, address, region) = target("tcp", 64);
    let agent = || {
        let builder = Agent::builder().transports(tcp()).streams_per_peer(64);
        builder.start().expect("an agent")
    };
    let (first, second) = (agent(), agent());
    for (number, agent) in [&first, &second].into_iter().enumerate() {
        let from = source(agent, region.len, number as u64);
        let peer = agent.peer(&address).expect("an address");
        let moves = batch(&from, &region.remote, 64 * KIB);
        for _ in 0..3 {
            let options = Options { streams: Some(64), ..within(within_ten()) };
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
        peer.connect(within_ten()).expect("there is room for its session");
        let from = source(agent, 64 * KIB, number as u64);
        let moves = batch(&from, &region.remote, 4096);
        peer.write(&moves, &within(within_ten())).expect("local or tcp").transport
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

fn within_ten() -> Duration {
    Duration::from_secs(10)
}
