//! A network that loses everything, without a reset.

use super::*;
use kvferry_testkit::network::Network;
use kvferry_testkit::process::Child;
use std::thread;

/// Silence is noticed after one window; with the factor of three.
const HEARD: Duration = Duration::from_secs(3);

#[test]
fn a_network_that_loses_everything_is_silence_and_heals_without_penalty() {
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
        // The writer's own end, then the target's.
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
        eventually(HEARD, "the target lets go of what was in flight", || {
            target.call(json!({"op": "stats"}))["requests_in_flight"] == 0
        });
        let digest = target.call(json!({"op": "digest", "region": to.id}))["digest"].clone();
        // A call meanwhile ends in its own time.
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
