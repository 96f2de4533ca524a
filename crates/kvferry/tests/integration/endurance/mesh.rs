//! A full mesh on one machine: each agent in a separate process, all pairs at the same time.

use super::*;
use fastrand::Rng;
use kvferry_testkit::process::mesh::{Member, Plan, Report};
use kvferry_testkit::process::{Child, ChildRegion};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::time::Instant;

over!(tcp: sixty_four_agents_in_a_full_mesh_have_equal_shares_and_survive_kills);
over!(local: sixty_four_agents_in_a_full_mesh_have_equal_shares_and_survive_kills);

const AGENTS: usize = 64;
const SLOT: usize = 32 * KIB;
const BLOCK: usize = 4 * KIB;
/// The memory that one process may use, in bytes.
const PROCESS_BYTES: u64 = 48 * MIB as u64;
/// No transfer of a live pair may take longer, on a machine with 32 agents to a core.
const TRANSFER: Duration = Duration::from_secs(30);
const MEASURED: Duration = Duration::from_secs(10);
const KILLS: usize = 60;
const FAIR: f64 = 0.9;
/// Other load may take a core away for a second or two, with half of the agents: the fairness is
/// measured this often at most, until one measurement is fair.
const MEASUREMENTS: usize = 3;

/// A process of the mesh.
struct Node {
    child: Child,
    region: ChildRegion,
    address: String,
}

struct Mesh {
    transport: &'static str,
    silence: Duration,
    nodes: Vec<Node>,
    /// Killed incarnations and the boot time of each kill, in nanoseconds.
    killed: HashMap<String, u64>,
    /// Transfers that failed because their peer had been killed.
    excused: usize,
    /// Failures that the kills do not explain.
    wrongs: Vec<String>,
}

/// Jain's index: 1 if all shares are equal, 1/n if one has everything.
fn fairness(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
    if squares == 0.0 { 0.0 } else { sum * sum / (shares.len() as f64 * squares) }
}

fn config(transport: &str, listen: &str, silence: Duration) -> Value {
    json!({
        "name": "node", "listen": listen, "transports": transport, "io_threads": 1, "streams_per_peer": 1,
        "silence_ms": silence.as_millis() as u64,
    })
}

impl Node {
    fn new(transport: &str, listen: &str, silence: Duration) -> Self {
        let mut child = Child::spawn();
        let address = child.start(config(transport, listen, silence));
        let region = child.allocate(AGENTS * SLOT, "rw", 1);
        Self { child, region, address }
    }

    fn member(&self, index: usize) -> Member {
        Member { index, address: self.address.clone(), remote: self.region.remote.to_bytes() }
    }

    fn incarnation(&self) -> String {
        self.region.remote.incarnation.to_string()
    }
}

impl Mesh {
    /// Each agent has its own IP address, so that its port is free when it restarts.
    fn new(transport: &'static str, silence: Duration) -> Self {
        let nodes = (0..AGENTS)
            .map(|index| Node::new(transport, &format!("127.0.64.{}:0", index + 1), silence))
            .collect();
        let mut mesh = Self {
            transport,
            silence,
            nodes,
            killed: HashMap::new(),
            excused: 0,
            wrongs: Vec::new(),
        };
        for index in 0..AGENTS {
            mesh.begin(index);
        }
        mesh
    }

    fn begin(&mut self, index: usize) {
        let plan = Plan {
            me: index,
            members: (0..AGENTS).map(|other| self.nodes[other].member(other)).collect(),
            slot: SLOT,
            block: BLOCK,
            timeout_ms: TRANSFER.as_millis() as u64,
            writes_per_read: 8,
        };
        self.nodes[index].child.call(json!({"op": "mesh_start", "plan": plan}));
    }

    /// Sends a command to all nodes, then collects the answers.
    fn ask(&mut self, command: &Value) -> Vec<Value> {
        for node in &mut self.nodes {
            node.child.send(command.clone());
        }
        let answer = |node: &mut Node| {
            let reply = node.child.reply_within(Duration::from_secs(60));
            reply.unwrap_or_else(|| panic!("{:?} hangs", node.child)).expect("nothing to refuse")
        };
        self.nodes.iter_mut().map(answer).collect()
    }

    /// The reports of all nodes, checked for failures.
    fn reports(&mut self, command: &str) -> Vec<Report> {
        let replies = self.ask(&json!({"op": command}));
        let reports: Vec<Report> = replies
            .into_iter()
            .map(|reply| serde_json::from_value(reply).expect("a report"))
            .collect();
        for (index, report) in reports.iter().enumerate() {
            self.judge(index, report);
        }
        reports
    }

    fn judge(&mut self, index: usize, report: &Report) {
        if report.wrong > 0 {
            self.wrongs.push(format!("{index} read {} wrong blocks back", report.wrong));
        }
        for fault in &report.faults {
            // The incarnation that the call named, or the one of the session that it used.
            let was_dead = |incarnation: &String| {
                self.killed.get(incarnation).is_some_and(|at| *at <= fault.at_ns)
            };
            let dead = was_dead(&fault.incarnation) || fault.session.as_ref().is_some_and(was_dead);
            self.excused += usize::from(dead);
            if !dead {
                self.wrongs.push(format!(
                    "{index} failed with the live peer {}: {}",
                    fault.member, fault.error
                ));
            }
        }
    }

    fn kill_and_restart(&mut self, index: usize) {
        let node = &mut self.nodes[index];
        // Its report is lost after the kill.
        let report = node.child.call(json!({"op": "mesh_report"}));
        let (incarnation, address) = (node.incarnation(), node.address.clone());
        self.killed.insert(incarnation, kvferry_sys::clock::boottime_ns());
        node.child.kill();
        self.judge(index, &serde_json::from_value(report).expect("a report"));
        self.nodes[index] = Node::new(self.transport, &address, self.silence);
        self.begin(index);
        let joined = json!({"op": "mesh_join", "member": self.nodes[index].member(index)});
        self.ask(&joined);
    }

    /// Waits until every pair has moved bytes. Returns how long that took.
    fn settle(&mut self) -> Duration {
        let began = Instant::now();
        let before = self.reports("mesh_report");
        loop {
            self.assert_right();
            let now = self.reports("mesh_report");
            let stands = |index: usize| {
                let (before, now) = (&before[index].bytes, &now[index].bytes);
                (0..AGENTS).any(|other| other != index && now[other] == before[other])
            };
            if !(0..AGENTS).any(stands) {
                return began.elapsed();
            }
            assert!(began.elapsed() < Duration::from_secs(60), "some pair moves nothing");
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Bytes per second of every ordered pair.
    fn measure(&mut self) -> Vec<f64> {
        let before = self.reports("mesh_report");
        std::thread::sleep(MEASURED);
        let after = self.reports("mesh_report");
        let mut shares = Vec::with_capacity(AGENTS * (AGENTS - 1));
        for (index, (before, after)) in before.iter().zip(&after).enumerate() {
            let seconds = (after.at_ns - before.at_ns) as f64 / 1e9;
            for other in (0..AGENTS).filter(|other| *other != index) {
                shares.push((after.bytes[other] - before.bytes[other]) as f64 / seconds);
            }
        }
        shares
    }

    /// Asserts that every agent has a fair share, as caller and as target.
    ///
    /// The shares of single pairs are printed but not asserted: with more processes than cores, a pair
    /// is fast only while the kernel runs both of its processes at the same time.
    fn assert_fair(&mut self, when: &str) {
        let mut unfair = Vec::new();
        for _ in 0..MEASUREMENTS {
            match self.is_fair(when) {
                Ok(()) => return,
                Err(how) => unfair.push(how),
            }
        }
        self.wrongs.append(&mut unfair);
    }

    fn is_fair(&mut self, when: &str) -> Result<(), String> {
        let shares = self.measure();
        let mut calls = [0.0; AGENTS];
        let mut called = [0.0; AGENTS];
        for (at, share) in shares.iter().enumerate() {
            let (from, skipped) = (at / (AGENTS - 1), at % (AGENTS - 1));
            let to = skipped + usize::from(skipped >= from);
            calls[from] += share;
            called[to] += share;
        }
        let (calling, answering) = (fairness(&calls), fairness(&called));
        let least = shares.iter().copied().fold(f64::INFINITY, f64::min);
        let most = shares.iter().copied().fold(0.0, f64::max);
        say(&format!(
            "{when}: fairness {calling:.3} over callers, {answering:.3} over called, {:.3} over all \
             {} pairs; {:.2} GB/s in all, a pair has {:.0} to {:.0} kB/s",
            fairness(&shares),
            shares.len(),
            shares.iter().sum::<f64>() / 1e9,
            least / 1e3,
            most / 1e3
        ));
        if calling < FAIR || answering < FAIR || least == 0.0 {
            return Err(format!(
                "{when}: fairness {calling:.3} and {answering:.3}, slowest pair {least:.0} B/s"
            ));
        }
        Ok(())
    }

    fn assert_right(&self) {
        let shown = self.wrongs.iter().take(20).cloned().collect::<Vec<_>>().join("\n");
        assert!(self.wrongs.is_empty(), "{} things went wrong:\n{shown}", self.wrongs.len());
    }
}

fn available_memory() -> u64 {
    let info = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

fn sixty_four_agents_in_a_full_mesh_have_equal_shares_and_survive_kills(transport: &'static str) {
    let needed = AGENTS as u64 * PROCESS_BYTES;
    if available_memory() < needed {
        let needed = needed / MIB as u64;
        return say(&format!("SKIPPED: a mesh of {AGENTS} processes: it takes {needed} MiB"));
    }
    let _alone = alone(Duration::from_secs(500));
    let began = Instant::now();
    // The default of 3 s does on an idle machine. Here 64 processes start on few cores, beside other
    // load: with 30 s no agent that waits for a core is taken for silent.
    let silence = Duration::from_secs(30);
    let mut mesh = Mesh::new(transport, silence);
    say(&format!("{AGENTS} processes in {:.1?}, silence after {silence:.1?}", began.elapsed()));
    say(&format!("every pair has moved bytes after {:.1?}", mesh.settle()));
    mesh.assert_fair("before any kill");
    mesh.assert_right();

    let mut rng = Rng::with_seed(64);
    let (began, mut longest) = (Instant::now(), Duration::ZERO);
    for kill in 1..=KILLS {
        let at = Instant::now();
        mesh.kill_and_restart(rng.usize(..AGENTS));
        longest = longest.max(at.elapsed());
        let due = Duration::from_secs(kill as u64);
        std::thread::sleep(due.saturating_sub(began.elapsed()));
    }
    say(&format!(
        "{KILLS} kills in {:.1?}, the longest return {longest:.1?}; every pair moves after {:.1?}",
        began.elapsed(),
        mesh.settle()
    ));
    say(&format!("{} transfers failed, each with a peer that was killed", mesh.excused));
    assert_eq!(mesh.killed.len(), KILLS);
    assert!(mesh.excused >= KILLS, "some kills failed no transfer");
    mesh.assert_fair("after the kills");
    mesh.assert_right();

    let longest = mesh.reports("mesh_stop").iter().map(|report| report.longest_us).max();
    say(&format!("the longest transfer took {:.1?}", Duration::from_micros(longest.unwrap_or(0))));
    mesh.assert_right();
    for stats in mesh.ask(&json!({"op": "stats"})) {
        assert_eq!(stats["transfers_in_flight"], 0, "{stats}");
        assert_eq!(stats["checksum_errors"], 0, "{stats}");
    }
}
