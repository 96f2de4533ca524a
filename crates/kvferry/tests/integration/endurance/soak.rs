//! All faults between one agent and a peer in another process, for `SOAK_SECONDS` (60). After each
//! fault the next call must succeed.

use super::*;
use fastrand::Rng;
use kvferry::{
    Access, Agent, Batch, Error, ErrorKind as Kind, Options, Peer, Region, RemoteRegion, Transfer,
    Transports,
};
use kvferry_testkit::Way;
use kvferry_testkit::pattern::Pattern;
use kvferry_testkit::process::{Child, ChildRegion, Resources};
use kvferry_testkit::region::{content, filled, moved, refill};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::thread;
use std::time::Instant;

over!(tcp: repeated_faults_leak_nothing);
over!(local: repeated_faults_leak_nothing);

const SILENCE: Duration = Duration::from_millis(600);
const LEN: usize = 8 * MIB;
/// Cycles after which memory must not grow by more than [`GROWTH`] bytes.
const WARM: usize = 100;
const GROWTH: u64 = MIB as u64;
/// The longest time of any call.
const PATIENCE: Duration = Duration::from_secs(20);

/// The duration of all soaks together: one for each of two transports.
fn seconds() -> u64 {
    let text = std::env::var("SOAK_SECONDS").ok().filter(|text| !text.is_empty());
    text.map_or(60, |text| text.parse().expect("SOAK_SECONDS is a number"))
}

/// The fault of a cycle, and its share in percent.
const FAULTS: [(&str, usize); 13] = [
    ("nothing", 22),
    ("a cancel", 16),
    ("a deadline", 8),
    ("a bad range", 10),
    ("a revoke by the target", 10),
    ("a revoke by the source", 8),
    ("a disconnect", 6),
    ("a write by the peer", 6),
    ("a cancel by the peer", 4),
    ("a restart of the peer", 4),
    ("a kill", 3),
    ("a kill of a writing peer", 2),
    ("a stop", 1),
];

/// The errors of transfers with a peer that is gone.
const GONE: [Kind; 4] =
    [Kind::PeerReset, Kind::PeerClosed, Kind::Unreachable, Kind::StaleIncarnation];

struct Soak {
    rng: Rng,
    transport: &'static str,
    agent: Agent,
    from: Region,
    /// The peer writes to it.
    inbound: Region,
    child: Child,
    address: String,
    to: ChildRegion,
    peer: Peer,
    /// How often each fault was made, and how often it hit a transfer.
    made: BTreeMap<&'static str, (usize, usize)>,
}

fn config(transport: &str, listen: &str) -> Value {
    json!({
        "name": "peer", "listen": listen, "transports": transport,
        "silence_ms": SILENCE.as_millis() as u64,
    })
}

fn started(transport: &str, listen: &str) -> (Child, String, ChildRegion) {
    let mut child = Child::spawn();
    let address = child.start(config(transport, listen));
    let to = child.allocate(LEN, "rw", 2);
    (child, address, to)
}

fn batch(local: &Region, remote: &RemoteRegion, block: usize) -> Batch {
    let count = LEN / block;
    let mut batch = Batch::with_capacity(count);
    for k in 0..count {
        let (here, there) = ((k * block) as u64, ((count - 1 - k) * block) as u64);
        batch.push(local, here, remote, there, block as u64).expect("inside both");
    }
    batch
}

/// A batch of one range: the peer can check only patterns in order.
fn plain(local: &Region, remote: &RemoteRegion) -> Batch {
    let mut batch = Batch::new();
    batch.push(local, 0, remote, 0, LEN as u64).expect("inside both");
    batch
}

fn ended(transfer: &Transfer) -> Result<(), Error> {
    transfer.wait(PATIENCE).expect("every transfer ends").map(drop)
}

/// Whether a transfer failed: with one of `kinds`, then.
#[track_caller]
fn failed(outcome: Result<(), Error>, kinds: &[Kind]) -> bool {
    let Err(e) = outcome else { return false };
    assert!(kinds.contains(&e.kind()), "{e:?}, not one of {kinds:?}");
    true
}

impl Soak {
    fn new(transport: &'static str) -> Self {
        let agent = Agent::builder()
            .name("soaked")
            .silence(SILENCE)
            .transports(Transports::parse(transport).expect("a transport"))
            .start()
            .expect("an agent");
        let (child, address, to) = started(transport, "127.0.65.1:0");
        let peer = agent.peer(&address).expect("an address");
        Self {
            rng: Rng::with_seed(1),
            transport,
            from: filled(&agent, LEN, Access::NONE, 1),
            inbound: filled(&agent, LEN, Access::WRITE, 1),
            agent,
            child,
            address,
            to,
            peer,
            made: FAULTS.iter().map(|(what, _)| (*what, (0, 0))).collect(),
        }
    }

    fn block(&mut self) -> usize {
        [512, 4 * KIB, 64 * KIB, MIB, LEN][self.rng.usize(..5)]
    }

    fn begin(&mut self) -> Transfer {
        let block = self.block();
        let batch = batch(&self.from, &self.to.remote, block);
        let transfer = self.peer.write_async(&batch, &Options::default());
        let wait = self.rng.u64(..4000);
        thread::sleep(Duration::from_micros(wait));
        transfer
    }

    /// Starts another peer at the same address.
    fn replace(&mut self) {
        let (child, address, to) = started(self.transport, &self.address);
        assert_eq!(address, self.address);
        (self.child, self.to) = (child, to);
    }

    /// Writes, lets the peer check the bytes, and reads them back.
    fn healthy(&mut self, after: &str) {
        let seed = self.rng.u64(..);
        refill(&self.from, seed);
        let began = Instant::now();
        let plain = plain(&self.from, &self.to.remote);
        let healthy = |way| {
            moved(way, &self.peer, &plain, &Options::default())
                .unwrap_or_else(|e| panic!("a healthy {way} after {after}: {e:?}"));
        };
        healthy(Way::Write);
        assert!(self.child.matches(&self.to, seed), "wrong bytes after {after}");
        self.from.write_at(0, &vec![0; LEN]).expect("owned memory");
        healthy(Way::Read);
        let wrong = content(&self.from) != Pattern::new(seed).bytes(LEN);
        assert!(!wrong, "wrong bytes came back after {after}");
        assert!(began.elapsed() < PATIENCE, "{:?} after {after}", began.elapsed());
    }

    fn command(&self, op: &str, block: usize) -> Value {
        json!({
            "op": op, "peer": self.agent.advertised(), "region": self.to.id,
            "remote": self.inbound.remote().to_bytes(), "block": block, "count": LEN / block,
        })
    }

    /// Causes a fault. Returns whether it hit a transfer.
    fn make(&mut self, what: &str) -> bool {
        match what {
            "nothing" => true,
            "a cancel" => self.cancel(),
            "a deadline" => self.deadline(),
            "a bad range" => self.bad_range(),
            "a revoke by the target" => self.revoke_at_target(),
            "a revoke by the source" => self.revoke_at_source(),
            "a disconnect" => {
                let transfer = self.begin();
                self.peer.disconnect();
                failed(ended(&transfer), &GONE)
            }
            "a write by the peer" => self.write_by_peer(),
            "a cancel by the peer" => self.cancel_by_peer(),
            "a restart of the peer" => self.restart(),
            "a kill" => {
                let transfer = self.begin();
                self.child.kill();
                let hit = failed(ended(&transfer), &GONE);
                self.replace();
                hit
            }
            "a kill of a writing peer" => self.kill_while_it_writes(),
            "a stop" => {
                let transfer = self.begin();
                self.child.stop();
                let hit = failed(ended(&transfer), &[Kind::PeerSilent, Kind::PeerReset]);
                self.child.resume();
                hit
            }
            other => unreachable!("{other} is not in the list of faults"),
        }
    }

    fn cancel(&mut self) -> bool {
        let transfer = self.begin();
        transfer.cancel();
        let outcome = ended(&transfer);
        if let Err(e) = &outcome {
            assert_ne!(e.quiesced(), Some(false), "the peer is there: {e:?}");
        }
        failed(outcome, &[Kind::Cancelled])
    }

    fn deadline(&mut self) -> bool {
        let block = self.block();
        let batch = batch(&self.from, &self.to.remote, block);
        let timeout = Some(Duration::from_micros(200 + self.rng.u64(..4000)));
        let options = Options { timeout, ..Options::default() };
        failed(self.peer.write(&batch, &options).map(drop), &[Kind::Deadline])
    }

    fn bad_range(&mut self) -> bool {
        let forged = RemoteRegion { len: u64::MAX, ..self.to.remote.clone() };
        let mut batch = Batch::new();
        let beyond = LEN as u64 - self.rng.u64(..4096);
        batch.push(&self.from, 0, &forged, beyond, 4097).expect("a forgery fits itself");
        let way = Way::ALL[self.rng.usize(..2)];
        let outcome = moved(way, &self.peer, &batch, &Options::default());
        assert!(failed(outcome.map(drop), &[Kind::OutOfBounds]), "a bad range was served");
        true
    }

    fn revoke_at_target(&mut self) -> bool {
        let transfer = self.begin();
        self.child.call(json!({"op": "unregister", "region": self.to.id}));
        let hit = failed(ended(&transfer), &[Kind::Revoked, Kind::NotRegistered]);
        self.child.call(json!({"op": "release", "region": self.to.id}));
        self.to = self.child.allocate(LEN, "rw", 2);
        hit
    }

    fn revoke_at_source(&mut self) -> bool {
        let transfer = self.begin();
        self.agent.unregister(&self.from).expect("registered");
        let hit = failed(ended(&transfer), &[Kind::Revoked, Kind::NotRegistered]);
        self.from = filled(&self.agent, LEN, Access::NONE, 1);
        hit
    }

    fn write_by_peer(&mut self) -> bool {
        let block = self.block();
        let seed = self.rng.u64(..);
        self.child.fill(&self.to, seed);
        self.child.call(self.command("write", block));
        let held = content(&self.inbound);
        assert!(held == Pattern::new(seed).bytes(LEN), "the peer wrote wrong bytes");
        true
    }

    fn cancel_by_peer(&mut self) -> bool {
        let block = self.block();
        let transfer = self.child.call(self.command("write_async", block));
        let transfer = transfer["transfer"].clone();
        self.child.call(json!({"op": "cancel", "transfer": transfer}));
        let wait = json!({"op": "wait", "transfer": transfer, "timeout_ms": 10_000});
        match self.child.try_call(wait) {
            Ok(outcome) => {
                assert!(outcome["running"].is_null(), "it hangs: {outcome}");
                false
            }
            Err(refusal) => {
                assert_eq!(refusal.kind, "cancelled", "{refusal:?}");
                true
            }
        }
    }

    fn restart(&mut self) -> bool {
        let transfer = self.begin();
        self.child.call(json!({"op": "shutdown"}));
        let hit = failed(ended(&transfer), &GONE);
        self.child.call(json!({"op": "release", "region": self.to.id}));
        let again = self.child.start(config(self.transport, &self.address));
        assert_eq!(again, self.address);
        self.to = self.child.allocate(LEN, "rw", 2);
        hit
    }

    fn kill_while_it_writes(&mut self) -> bool {
        let block = self.block();
        self.child.call(self.command("keep_writing", block));
        thread::sleep(Duration::from_millis(self.rng.u64(..20)));
        self.child.kill();
        self.replace();
        let give_up = Instant::now() + PATIENCE;
        while self.agent.stats().requests_in_flight > 0 {
            assert!(Instant::now() < give_up, "requests of a dead writer stay");
            thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn cycle(&mut self, number: usize) {
        let all: usize = FAULTS.iter().map(|(_, often)| often).sum();
        let mut at = self.rng.usize(..all);
        let mut what = FAULTS[number % FAULTS.len()].0;
        // First each fault once, then at random.
        if number >= FAULTS.len() {
            for (fault, often) in FAULTS {
                what = fault;
                if at < often {
                    break;
                }
                at -= often;
            }
        }
        let hit = self.make(what);
        let made = self.made.get_mut(what).expect("every fault is counted");
        *made = (made.0 + 1, made.1 + usize::from(hit));
        self.healthy(what);
    }
}

fn memory() -> u64 {
    Resources::of(std::process::id()).memory_bytes
}

fn repeated_faults_leak_nothing(transport: &'static str) {
    let time = Duration::from_secs(seconds()) / 2;
    let _alone = alone(4 * time + Duration::from_secs(120));
    let before = Resources::of(std::process::id());
    let mut soak = Soak::new(transport);
    let began = Instant::now();
    let mut used = Vec::new();
    while began.elapsed() < time || used.len() < 2 * WARM {
        soak.cycle(used.len());
        used.push(memory());
    }
    // The least of some samples: the use between cycles, not a peak within one.
    let least =
        |used: &[u64], from: usize| used[from..from + 20].iter().copied().min().unwrap_or(0);
    let half = (used.len() - WARM) / 2;
    let (warm, middle) = (least(&used, WARM - 10), least(&used, WARM + half - 10));
    let mut end = least(&used, used.len() - 20);
    let mut grows = end.saturating_sub(warm) > GROWTH && end.saturating_sub(middle) > GROWTH / 2;
    // A leak grows without end; what an allocator keeps for new threads, by half a MiB up and down, does not.
    for _ in 0..3 {
        if !grows {
            break;
        }
        for _ in 0..half {
            soak.cycle(used.len());
            used.push(memory());
        }
        let before = std::mem::replace(&mut end, least(&used, used.len() - 20));
        grows = end.saturating_sub(before) > GROWTH / 2;
    }
    for (what, (made, hit)) in &soak.made {
        say(&format!("{made:6} × {what}, {hit} in the middle of something"));
        assert!(*made > 0, "{what} never happened");
    }
    say(&format!(
        "{} cycles in {:.0?}; {} KiB after {WARM} cycles, {} in the middle, {} at the end",
        used.len(),
        began.elapsed(),
        warm / 1024,
        middle / 1024,
        end / 1024
    ));
    assert!(
        !grows,
        "memory grew from {} to {} KiB over {} cycles",
        warm / 1024,
        end / 1024,
        used.len() - WARM
    );

    let Soak { agent, from, inbound, child, peer, .. } = soak;
    let stats = agent.stats();
    let outcomes = stats.transfers_done + stats.transfers_failed + stats.transfers_cancelled;
    assert_eq!(stats.transfers_started, outcomes, "every transfer has one outcome: {stats:?}");
    agent.unregister(&from).expect("registered");
    agent.unregister(&inbound).expect("registered");
    drop((child, peer, from, inbound));
    agent.shutdown();
    let stats = agent.stats();
    let gauges = [
        ("transfers in flight", stats.transfers_in_flight),
        ("requests in flight", stats.requests_in_flight),
        ("sessions", stats.sessions),
        ("streams", stats.streams),
        ("handshakes", stats.handshakes_pending),
        ("regions", stats.regions),
        ("gates", stats.gates),
    ];
    assert!(gauges.iter().all(|(_, count)| *count == 0), "{gauges:?}");
    assert_eq!(stats.checksum_errors, 0);
    drop(agent);
    let give_up = Instant::now() + PATIENCE;
    loop {
        let now = Resources::of(std::process::id());
        // One descriptor more: the placeholder for descriptors that a forked child closes.
        if now.descriptors <= before.descriptors + 1 && now.threads <= before.threads {
            break;
        }
        assert!(Instant::now() < give_up, "left behind: {now:?}, before: {before:?}");
        thread::sleep(Duration::from_millis(20));
    }
}
