//! A network that delays, reorders and loses frames, a link that is cut and healed, and a host that
//! gets another address.

use super::*;
use kvferry_testkit::network::Network;
use kvferry_testkit::process::Child;
use std::thread;

over!(
    tcp:
    delay_and_reordering_cause_no_error,
    five_percent_loss_causes_no_error,
    a_delayed_link_that_is_cut_and_healed_costs_one_call,
    a_host_is_reached_at_its_new_address_and_no_byte_lands_late,
);

/// Silence is noticed after one silence limit, times three.
const HEARD: Duration = Duration::from_secs(3);

/// The second address of the far host.
const MOVED: &str = "10.77.0.3";

/// A writer on the near host and a target on the far one.
struct Hosts {
    network: Network,
    writer: Child,
    target: Child,
    port: String,
    from: ChildRegion,
    to: ChildRegion,
}

impl Hosts {
    fn or_skip(what: &str, transport: &str, silence: Duration, len: usize) -> Option<Self> {
        let network = Network::with_netem_or_skip(what)?;
        let config = |listen: &str| {
            let mut config = peer_config_over(transport);
            config["listen"] = json!(format!("{listen}:0"));
            config["silence_ms"] = json!(silence.as_millis() as u64);
            config
        };
        let mut writer = Child::spawn_in(&network.near);
        writer.start(config(Network::NEAR));
        let mut target = Child::spawn_in(&network.far);
        // On every interface, so that it listens on after its address has changed.
        let address = target.start(config("0.0.0.0"));
        let port = address.rsplit(':').next().expect("host:port").to_owned();
        let (from, to) = (writer.allocate(len, "", 1), target.allocate(len, "rw", 2));
        Some(Self { network, writer, target, port, from, to })
    }

    fn at(&self, host: &str) -> String {
        format!("{host}:{}", self.port)
    }

    fn command(&self, op: &str, host: &str, block: usize) -> Value {
        command(op, &self.at(host), &self.from, &self.to.remote, block)
    }

    /// Writes a new pattern and reads it back; checks both.
    fn round(&mut self, seed: u64, block: usize) {
        let fill =
            |region: &ChildRegion, seed| json!({"op": "fill", "region": region.id, "seed": seed});
        self.writer.call(fill(&self.from, seed));
        let write = self.command("write", Network::FAR, block);
        self.writer.call(write);
        let matches =
            |region: &ChildRegion| json!({"op": "matches", "region": region.id, "seed": seed});
        assert!(self.target.call(matches(&self.to))["matches"] == true, "wrong bytes were written");
        self.writer.call(fill(&self.from, seed + 1000));
        let read = self.command("read", Network::FAR, block);
        self.writer.call(read);
        assert!(self.writer.call(matches(&self.from))["matches"] == true, "wrong bytes were read");
    }

    /// Asserts that the first session still lives and that no transfer failed.
    fn assert_one_session(&mut self) {
        let stats = self.writer.call(json!({"op": "stats"}));
        assert_eq!(stats["sessions_opened"], 1, "{stats}");
        assert_eq!(stats["transfers_failed"], 0, "{stats}");
        let stats = self.target.call(json!({"op": "stats"}));
        assert_eq!(
            (&stats["sessions_accepted"], &stats["checksum_errors"]),
            (&json!(1), &json!(0))
        );
    }
}

fn delay_and_reordering_cause_no_error(transport: &str) {
    let _bound = bounded();
    let what = "delay and reordering between two namespaces";
    let Some(mut hosts) = Hosts::or_skip(what, transport, SILENCE, MIB) else { return };
    hosts.network.impairments().delay(Duration::from_millis(10), Duration::from_millis(10));
    for (round, block) in [4 * KIB, MIB, 64 * KIB, 512].into_iter().enumerate() {
        hosts.round(round as u64, block);
    }
    let impairments = hosts.network.impairments();
    println!("{} frames, {} arrived late", impairments.passed(), impairments.reordered());
    assert!(impairments.reordered() > 100, "nothing was reordered: {}", impairments.reordered());
    hosts.assert_one_session();
}

fn five_percent_loss_causes_no_error(transport: &str) {
    let _bound = bounded();
    let what = "5 % loss between two namespaces";
    // The default silence limit: the kernel resends a lost ping only after a back-off.
    let silence = Duration::from_secs(3);
    let Some(mut hosts) = Hosts::or_skip(what, transport, silence, MIB) else { return };
    hosts.network.impairments().delay(Duration::from_millis(1), Duration::ZERO);
    hosts.network.impairments().lose(50);
    for (round, block) in [4 * KIB, MIB, 64 * KIB, 512].into_iter().enumerate() {
        hosts.round(round as u64, block);
    }
    let impairments = hosts.network.impairments();
    println!("{} frames, {} lost", impairments.passed(), impairments.lost());
    assert!(impairments.lost() > 10, "nothing was lost: {}", impairments.lost());
    hosts.assert_one_session();
}

fn a_delayed_link_that_is_cut_and_healed_costs_one_call(transport: &str) {
    let _bound = bounded();
    let what = "a cut link between two namespaces";
    let Some(mut hosts) = Hosts::or_skip(what, transport, SILENCE, 4 * MIB) else { return };
    hosts.network.impairments().delay(Duration::from_millis(5), Duration::from_millis(2));
    hosts.round(1, 64 * KIB);
    for round in 0..2 {
        let writing = hosts.command("keep_writing", Network::FAR, 16 * KIB);
        let running = hosts.writer.call(writing)["writer"].clone();
        thread::sleep(Duration::from_millis(150));
        hosts.network.impairments().lose(1000);
        let cut = Instant::now();
        thread::sleep(Duration::from_millis(50));
        let report = hosts.writer.call(json!({"op": "stop_writing", "writer": running}));
        assert_within(cut, HEARD + UNDELAYED, "a call over a cut link");
        let errors = report["errors"].as_array().expect("a list").clone();
        assert!(
            errors.iter().all(|e| e.as_str().is_some_and(|e| e.starts_with("peer_silent"))),
            "{report}"
        );
        eventually(HEARD, "requests in flight end at the target", || {
            hosts.target.call(json!({"op": "stats"}))["requests_in_flight"] == 0
        });
        let look = json!({"op": "digest", "region": hosts.to.id});
        let digest = hosts.target.call(look)["digest"].clone();
        hosts.network.impairments().lose(0);
        let watch = json!({"op": "watch", "region": hosts.to.id, "for_ms": 500, "digest": digest});
        assert!(hosts.target.call(watch)["changed"] == false, "late bytes landed after the heal");
        let write = hosts.command("write", Network::FAR, 64 * KIB);
        let began = Instant::now();
        hosts.writer.call(write);
        assert_within(began, 5 * UNDELAYED, "the first call over a healed link");
        hosts.round(10 + round, 64 * KIB);
    }
}

fn a_host_is_reached_at_its_new_address_and_no_byte_lands_late(transport: &str) {
    let _bound = bounded();
    let what = "an address that changes between two namespaces";
    let Some(mut hosts) = Hosts::or_skip(what, transport, SILENCE, 4 * MIB) else { return };
    hosts.round(1, 64 * KIB);
    let writing = hosts.command("keep_writing", Network::FAR, 16 * KIB);
    let running = hosts.writer.call(writing)["writer"].clone();
    thread::sleep(Duration::from_millis(100));
    hosts.network.readdress(Network::FAR, MOVED);
    let moved = Instant::now();
    thread::sleep(Duration::from_millis(50));
    let report = hosts.writer.call(json!({"op": "stop_writing", "writer": running}));
    assert_within(moved, HEARD + UNDELAYED, "a call to the old address");
    println!("{} errors: {}", report["errors"].as_array().map_or(0, Vec::len), report["errors"][0]);
    eventually(HEARD, "requests in flight end at the target", || {
        hosts.target.call(json!({"op": "stats"}))["requests_in_flight"] == 0
    });
    let look = json!({"op": "digest", "region": hosts.to.id});
    let digest = hosts.target.call(look)["digest"].clone();
    // A call to the old address ends at its deadline; a call to the new one connects at once.
    let mut gone = hosts.command("write", Network::FAR, 64 * KIB);
    gone["timeout_ms"] = json!(700);
    let began = Instant::now();
    let refusal = hosts.writer.try_call(gone).expect_err("no host has that address");
    assert_within(began, Duration::from_millis(3 * 700), "a call to the old address");
    let kinds = ["deadline", "unreachable", "peer_silent"];
    assert!(kinds.contains(&refusal.kind.as_str()), "{refusal:?}");
    let watch = json!({"op": "watch", "region": hosts.to.id, "for_ms": 300, "digest": digest});
    assert!(hosts.target.call(watch)["changed"] == false, "bytes landed from the old address");
    hosts.writer.call(json!({"op": "fill", "region": hosts.from.id, "seed": 7}));
    let write = hosts.command("write", MOVED, 64 * KIB);
    let began = Instant::now();
    hosts.writer.call(write);
    assert_within(began, 2 * UNDELAYED, "the first call to the new address");
    let matches = json!({"op": "matches", "region": hosts.to.id, "seed": 7});
    assert!(hosts.target.call(matches)["matches"] == true);
    hosts.network.readdress(MOVED, Network::FAR);
    let write = hosts.command("write", Network::FAR, 64 * KIB);
    eventually(Duration::from_secs(1), "a probe reaches the address that came back", || {
        hosts.writer.try_call(write.clone()).is_ok()
    });
    let began = Instant::now();
    hosts.round(8, 64 * KIB);
    assert_within(began, 5 * UNDELAYED, "calls to the address that came back");
}
