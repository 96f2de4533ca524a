//! A network that loses every packet, without a reset.

use super::*;
use kvferry_testkit::network::Network;
use kvferry_testkit::process::Child;
use std::thread;

/// Silence is noticed after one silence limit, times three.
const HEARD: Duration = Duration::from_secs(3);

#[test]
fn a_partition_is_reported_as_silence_and_delays_no_call_after_it_heals() {
    let _bound = bounded();
    let Some(network) = Network::or_skip("partition between two namespaces") else { return };
    let mut writer = Child::spawn_in(&network.near);
    let mut config = peer_config();
    config["listen"] = json!(format!("{}:0", Network::NEAR));
    writer.start(config.clone());
    let mut target = Child::spawn_in(&network.far);
    config["listen"] = json!(format!("{}:0", Network::FAR));
    let address = target.start(config);
    assert!(address.starts_with(Network::FAR), "{address}");
    let (from, to) = (writer.allocate(16 * MIB, "", 1), target.allocate(16 * MIB, "w", 2));
    let writing = |op, block| command(op, &address, &from, &to.remote, block);
    writer.call(writing("write", 64 * KIB));
    let checked = writer.call(json!({"op": "connect", "peer": address, "timeout_ms": 1000}));
    assert_eq!(checked["name"], "peer");

    for block in [16 * MIB, 16 * KIB] {
        let running = writer.call(writing("keep_writing", block))["writer"].clone();
        thread::sleep(Duration::from_millis(100));
        network.cut();
        let cut = Instant::now();
        // First the writer notices, then the target.
        let stopping = json!({"op": "stop_writing", "writer": running});
        let report = writer.call(stopping);
        println!("{block} bytes a block: error {:.0?} after the cut", cut.elapsed());
        assert_within(cut, HEARD, "a call into a network that loses everything");
        let errors = report["errors"].as_array().expect("a list").clone();
        assert!(
            errors.iter().all(|e| e.as_str().is_some_and(|e| e.starts_with("peer_silent"))),
            "{report}"
        );
        if errors.is_empty() {
            println!("the write was done before the cut was noticed");
        }
        eventually(HEARD, "requests in flight end at the target", || {
            target.call(json!({"op": "stats"}))["requests_in_flight"] == 0
        });
        let digest = target.call(json!({"op": "digest", "region": to.id}))["digest"].clone();
        // A call during the cut ends at its deadline.
        let mut meanwhile = writing("write", block);
        meanwhile["timeout_ms"] = json!(700);
        let began = Instant::now();
        let refusal = writer.try_call(meanwhile).expect_err("the network is cut");
        assert_within(began, Duration::from_millis(3 * 700), "a call with a deadline");
        assert!(
            ["deadline", "unreachable", "peer_silent"].contains(&refusal.kind.as_str()),
            "{refusal:?}"
        );
        network.heal();
        let watched =
            target.call(json!({"op": "watch", "region": to.id, "for_ms": 700, "digest": digest}));
        assert!(watched["changed"] == false, "late bytes landed after the network healed");
        let began = Instant::now();
        writer.call(writing("write", block));
        assert_within(began, 2 * UNDELAYED, "the first call after the network healed");
        let matches = target.call(json!({"op": "matches", "region": to.id, "seed": 1}));
        assert!(matches["matches"] == true);
        target.call(json!({"op": "fill", "region": to.id, "seed": 2}));
    }
}

#[test]
fn connections_to_a_host_that_vanished_while_idle_are_closed() {
    let _bound = bounded();
    let what = "a host that vanishes while idle, between two namespaces";
    let Some(network) = Network::or_skip(what) else { return };
    let mut writer = Child::spawn_in(&network.near);
    let mut config = peer_config();
    // The kernel probes after 20 silence limits, and closes after 20 more.
    let silence = Duration::from_millis(150);
    config["silence_ms"] = json!(silence.as_millis() as u64);
    config["listen"] = json!(format!("{}:0", Network::NEAR));
    writer.start(config.clone());
    let mut target = Child::spawn_in(&network.far);
    config["listen"] = json!(format!("{}:0", Network::FAR));
    let address = target.start(config);
    let (from, to) = (writer.allocate(MIB, "", 1), target.allocate(MIB, "w", 2));
    writer.call(command("write", &address, &from, &to.remote, 64 * KIB));
    let open = |child: &mut Child| {
        let stats = child.call(json!({"op": "stats"}));
        (stats["sessions"].as_u64(), stats["streams"].as_u64())
    };
    for child in [&mut writer, &mut target] {
        let (sessions, streams) = open(child);
        assert!(sessions == Some(1) && streams >= Some(1), "{sessions:?} {streams:?}");
    }
    network.cut();
    let gone = Duration::from_secs(3) + 2 * 20 * silence;
    for (child, side) in [(&mut writer, "initiator"), (&mut target, "acceptor")] {
        eventually(3 * gone, &format!("the {side} closes its connections"), || {
            open(child) == (Some(0), Some(0))
        });
    }
}
