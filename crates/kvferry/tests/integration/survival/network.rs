//! Two hosts with a network between them: one that delays, reorders and loses frames, a link that is
//! cut and healed, and a host that gets another address.

use super::*;
use kvferry_testkit::network::Network;

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
    fn new(network: Network, silence: Duration, len: usize) -> Self {
        let config = |listen: &str| {
            let mut config = peer_config();
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
        Self { network, writer, target, port, from, to }
    }

    fn command(&self, op: &str, host: &str, block: usize) -> Value {
        command(op, &format!("{host}:{}", self.port), &self.from, &self.to.remote, block)
    }

    /// Writes or reads, again if that fails: a process that does not run for a part of the silence limit ends its sessions.
    fn repeat(&mut self, op: &str, host: &str, block: usize) {
        let command = self.command(op, host, block);
        eventually(&format!("a {op} in blocks of {block}"), || {
            self.writer.try_call(command.clone()).is_ok()
        });
    }

    /// Writes a new pattern and reads it back; checks both.
    fn round(&mut self, seed: u64, block: usize) {
        self.writer.fill(&self.from, seed);
        self.repeat("write", Network::FAR, block);
        assert!(self.target.matches(&self.to, seed), "wrong bytes were written");
        self.writer.fill(&self.from, seed + 1000);
        self.repeat("read", Network::FAR, block);
        assert!(self.writer.matches(&self.from, seed), "wrong bytes were read");
    }

    /// Moves blocks of several sizes. True if no transfer fails and the session that is open does it all.
    fn rounds_of_one_session(&mut self) -> bool {
        let before = self.failures();
        for (round, block) in [4 * KIB, MIB, 64 * KIB, 512].into_iter().enumerate() {
            self.round(round as u64, block);
        }
        let now = self.failures();
        println!("failures before: {before:?}, now: {now:?}");
        now == before
    }

    /// Sessions that were opened, transfers that failed, sessions that were accepted, errors of checksums.
    fn failures(&mut self) -> [u64; 4] {
        let (near, far) = (self.writer.stats(), self.target.stats());
        let counts = [
            &near["sessions_opened"],
            &near["transfers_failed"],
            &far["sessions_accepted"],
            &far["checksum_errors"],
        ];
        counts.map(|it| it.as_u64().expect("a number"))
    }

    /// Cuts the target off while it is written. Asserts that calls end in time. Returns the errors of
    /// the writes, and a digest of the target's memory, which must not change from here on.
    fn cut_off(&mut self, block: usize, cut: impl FnOnce(&Network)) -> (Vec<String>, Value) {
        let writing = self.command("keep_writing", Network::FAR, block);
        let writer = self.writer.call(writing)["writer"].clone();
        thread::sleep(Duration::from_millis(100));
        cut(&self.network);
        thread::sleep(Duration::from_millis(50));
        let errors = self.writer.stop_writing(&writer);
        println!("{block} bytes a block: {} errors, {:?}", errors.len(), errors.first());
        eventually("requests in flight end at the target", || {
            self.target.stats()["requests_in_flight"] == 0
        });
        let digest = self.target.digest(&self.to);
        // A call meanwhile ends at its deadline.
        let mut late = self.command("write", Network::FAR, block);
        late["timeout_ms"] = json!(700);
        let refusal = self.writer.try_call(late).expect_err("the host is cut off");
        let kinds = ["deadline", "unreachable", "peer_silent"];
        assert!(kinds.contains(&refusal.kind.as_str()), "{refusal:?}");
        (errors, digest)
    }

    /// Cuts the link and heals it. The error is that of the first call after that.
    fn cut_and_heal(&mut self, block: usize, seed: u64) -> Result<(), String> {
        let (errors, digest) = self.cut_off(block, Network::cut);
        // The writer makes its next call after each error, until `stop_writing`.
        let is_told = |(at, e): (usize, &String)| {
            e.starts_with("peer_silent") || at > 0 && e.starts_with("unreachable")
        };
        assert!(errors.iter().enumerate().all(is_told), "{errors:?}");
        self.network.heal();
        let changed = self.target.changes(&self.to, &digest, Duration::from_millis(700));
        assert!(!changed, "late bytes landed after the network healed");
        let write = self.command("write", Network::FAR, block);
        let first = self.writer.try_call(write);
        self.round(seed, block);
        first.map(drop).map_err(|e| format!("{e:?}"))
    }

    /// Cuts the link and heals it until the first call after that succeeds: it fails once, if a process does not run for a
    /// part of the silence limit.
    fn cut_and_heal_once(&mut self, block: usize, seed: u64) {
        in_one_try(|| self.cut_and_heal(block, seed));
    }
}

#[test]
fn delay_and_reordering_cause_no_error() {
    let _bound = bounded();
    let what = "delay and reordering between two namespaces";
    let Some(network) = Network::with_netem_or_skip(what) else { return };
    let mut hosts = Hosts::new(network, 10 * SILENCE, MIB);
    hosts.network.impairments().delay(Duration::from_millis(10), Duration::from_millis(10));
    hosts.round(9, 4 * KIB);
    assert!(hosts.rounds_of_one_session());
    let impairments = hosts.network.impairments();
    println!("{} frames, {} arrived late", impairments.passed(), impairments.reordered());
    assert!(impairments.reordered() > 100, "nothing was reordered: {}", impairments.reordered());
}

#[test]
fn five_percent_loss_causes_no_error() {
    let _bound = bounded();
    let what = "5 % loss between two namespaces";
    let Some(network) = Network::with_netem_or_skip(what) else { return };
    // The default silence limit: the kernel resends a lost ping only after a back-off.
    let mut hosts = Hosts::new(network, Duration::from_secs(3), MIB);
    hosts.network.impairments().delay(Duration::from_millis(1), Duration::ZERO);
    let mut is_kept = || {
        // The session begins before frames are lost: a SYN that is lost twice is resent after 3 s, the limit of a handshake.
        hosts.network.impairments().lose(0);
        hosts.round(9, 4 * KIB);
        hosts.network.impairments().lose(50);
        match hosts.rounds_of_one_session() {
            true => Ok(()),
            false => Err("a transfer failed, or the session was not kept".to_owned()),
        }
    };
    // A process that does not run for a part of the limit ends its sessions, once.
    in_one_try(&mut is_kept);
    let impairments = hosts.network.impairments();
    println!("{} frames, {} lost", impairments.passed(), impairments.lost());
    assert!(impairments.lost() > 10, "nothing was lost: {}", impairments.lost());
}

#[test]
fn a_partition_is_reported_as_silence_and_delays_no_call_after_it_heals() {
    let _bound = bounded();
    let Some(network) = Network::or_skip("partition between two namespaces") else { return };
    let mut hosts = Hosts::new(network, SILENCE, 16 * MIB);
    hosts.round(1, 64 * KIB);
    for (seed, block) in [(2, 16 * MIB), (3, 16 * KIB)] {
        hosts.cut_and_heal_once(block, seed);
    }
}

#[test]
fn a_delayed_link_that_is_cut_and_healed_costs_one_call() {
    let _bound = bounded();
    let what = "a cut link between two namespaces";
    let Some(network) = Network::with_netem_or_skip(what) else { return };
    let mut hosts = Hosts::new(network, SILENCE, 4 * MIB);
    hosts.network.impairments().delay(Duration::from_millis(5), Duration::from_millis(2));
    hosts.round(1, 64 * KIB);
    for seed in [2, 3] {
        hosts.cut_and_heal_once(16 * KIB, seed);
    }
}

#[test]
fn a_host_is_reached_at_its_new_address_and_no_byte_lands_late() {
    let _bound = bounded();
    let what = "an address that changes between two namespaces";
    let Some(network) = Network::with_netem_or_skip(what) else { return };
    let mut hosts = Hosts::new(network, SILENCE, 4 * MIB);
    hosts.round(1, 64 * KIB);
    // A call to the old address ends at its deadline; a call to the new one connects at once.
    let (_, digest) = hosts.cut_off(16 * KIB, |network| network.readdress(Network::FAR, MOVED));
    let changed = hosts.target.changes(&hosts.to, &digest, Duration::from_millis(300));
    assert!(!changed, "bytes landed from the old address");
    hosts.writer.fill(&hosts.from, 7);
    hosts.repeat("write", MOVED, 64 * KIB);
    assert!(hosts.target.matches(&hosts.to, 7));
    hosts.network.readdress(MOVED, Network::FAR);
    // Once a probe reaches the address that came back.
    hosts.round(8, 64 * KIB);
}

#[test]
fn connections_to_a_host_that_vanished_while_idle_are_closed() {
    let _bound = bounded();
    let what = "a host that vanishes while idle, between two namespaces";
    let Some(network) = Network::or_skip(what) else { return };
    // The kernel probes after 20 silence limits, and closes after 20 more.
    let silence = Duration::from_millis(150);
    let mut hosts = Hosts::new(network, silence, MIB);
    let write = hosts.command("write", Network::FAR, 64 * KIB);
    let open = |child: &mut Child| {
        let stats = child.stats();
        (stats["sessions"].as_u64(), stats["streams"].as_u64())
    };
    // A process that does not run for a part of so short a limit ends its session.
    eventually("a session with its streams is open on both hosts", || {
        let is_open = |(sessions, streams)| sessions == Some(1) && streams >= Some(1);
        hosts.writer.try_call(write.clone()).is_ok()
            && [&mut hosts.writer, &mut hosts.target].into_iter().all(|child| is_open(open(child)))
    });
    hosts.network.cut();
    for (child, side) in [(&mut hosts.writer, "initiator"), (&mut hosts.target, "acceptor")] {
        eventually(&format!("the {side} closes its connections"), || {
            open(child) == (Some(0), Some(0))
        });
    }
}
