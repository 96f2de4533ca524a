//! Tests against stock Mooncake: the Python wheel, in a separate process.
//!
//! The wheel is installed into a virtual environment in the cache folder, on first use. If that
//! fails, each test prints why it is skipped, and passes.

use crate::wire::{
    LONG, PAGE, agent, builder, bytes_of, filled, handshake, pattern, scattered, settles, turned,
};
use kvferry::{
    Access, Agent, Batch, ErrorKind, Incarnation, Notification, Options, Peer, RegionId,
    RemoteRegion,
};
use kvferry_testkit::network::Network;
use kvferry_testkit::process::memory_of;
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

const VERSION: &str = "0.3.13.post1";

/// The limits of stock engines that no test is about, so high that no test reaches them: the queue of a peer, and the times
/// to enter it, to connect, without progress, without an answer, and of a whole transfer.
const LIMITS: [(&str, &str); 6] = [
    ("MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER", "65535"),
    ("MC_TCP_ADMISSION_TIMEOUT_MS", "600000"),
    ("MC_HANDSHAKE_CONNECT_TIMEOUT", "60"),
    ("MC_TCP_PROGRESS_TIMEOUT_SEC", "600"),
    ("MC_TCP_STATUS_TIMEOUT_SEC", "600"),
    ("MC_TRANSFER_TIMEOUT", "600"),
];

fn options() -> Options<'static> {
    Options { timeout: Some(3 * LONG), ..Options::default() }
}

// ---- the environment ----

fn cache() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    set("KVFERRY_CACHE").or_else(|| Some(set("HOME")?.join(".cache/kvferry")))
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|e| format!("{command:?}: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("{command:?}: {}", text.lines().last().unwrap_or("failed")))
}

fn imports(python: &Path) -> Result<(), String> {
    run(Command::new(python).args(["-c", "import mooncake.engine"]))
}

/// Makes the environment in a temporary folder and renames it, so that it is complete or absent.
fn make(at: &Path) -> Result<(), String> {
    let folder = at.parent().expect("it has a name in a folder");
    std::fs::create_dir_all(folder).map_err(|e| e.to_string())?;
    let draft = folder.join(format!("mooncake-draft-{}", std::process::id()));
    run(Command::new("python3").args(["-m", "venv"]).arg(&draft))?;
    let wheel = format!("mooncake-transfer-engine-non-cuda=={VERSION}");
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    let made = run(Command::new(draft.join("bin/python")).args(pip).arg(wheel)).and_then(|()| {
        std::fs::rename(&draft, at)
            .or_else(|e| if at.exists() { Ok(()) } else { Err(e.to_string()) })
    });
    let _ = std::fs::remove_dir_all(&draft);
    made
}

/// The interpreter that has the stock wheel.
fn python() -> Option<&'static Path> {
    static PYTHON: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = PYTHON.get_or_init(|| {
        let found = prepare();
        if let Err(why) = &found {
            // Directly to stderr: the harness shows the output of failed tests only.
            let _ = writeln!(std::io::stderr(), "SKIPPED: tests against stock Mooncake: {why}");
        }
        found.ok()
    });
    found.as_deref()
}

fn prepare() -> Result<PathBuf, String> {
    let at = cache().ok_or("no folder for it")?.join(format!("mooncake-{VERSION}"));
    let python = at.join("bin/python");
    if !python.exists() {
        make(&at)?;
    }
    if imports(&python).is_err() {
        // The wheel needs system libraries, and only root can install them: one test at a time, each a process. On a
        // fresh machine apt-get knows no packages before its first update.
        let lock = std::fs::File::create(at.with_extension("lock")).map_err(|e| e.to_string())?;
        lock.lock().map_err(|e| e.to_string())?;
        if imports(&python).is_err() {
            let libraries = ["libibverbs1", "libnuma1", "libcurl4"];
            let _ = run(Command::new("apt-get").args(["update", "-qq"]));
            let _ = run(Command::new("apt-get").args(["install", "-qq", "-y"]).args(libraries));
        }
    }
    imports(&python)?;
    Ok(python)
}

// ---- a stock peer ----

pub(crate) struct Stock {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pub(crate) session: String,
}

impl Stock {
    /// A stock engine in a separate process; `None` if stock Mooncake can't be installed.
    pub(crate) fn start_with(environment: &[(&str, &str)]) -> Option<Self> {
        Some(Self::start(Command::new(python()?), "127.0.0.1", environment))
    }

    /// A stock engine in a network namespace.
    fn start_in(namespace: &str, host: &str) -> Option<Self> {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]).arg(python()?);
        Some(Self::start(command, host, &[]))
    }

    fn start(mut python: Command, host: &str, environment: &[(&str, &str)]) -> Self {
        let mut child = python
            .args(["-c", include_str!("stock_peer.py")])
            .envs(LIMITS)
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("it was tried");
        let stdin = child.stdin.take().expect("piped");
        let stdout = BufReader::new(child.stdout.take().expect("piped"));
        let mut stock = Self { child, stdin, stdout, session: String::new() };
        let session = stock.call("start", json!({"host": host}));
        stock.session = session.as_str().expect("text").to_owned();
        stock
    }

    fn tell(&mut self, name: &str, arguments: Value) {
        writeln!(self.stdin, "{}", json!([name, arguments])).expect("the process runs");
    }

    fn receive(&mut self) -> Value {
        let mut line = String::new();
        self.stdout.read_line(&mut line).expect("the process runs");
        serde_json::from_str(&line).expect("an answer")
    }

    pub(crate) fn call(&mut self, name: &str, arguments: Value) -> Value {
        self.tell(name, arguments);
        self.receive()
    }

    pub(crate) fn allocate(&mut self, len: usize, seed: u8) -> u64 {
        self.call("allocate", json!({"length": len, "seed": seed})).as_u64().expect("an address")
    }

    fn holds(&mut self, address: u64, seed: u8, len: usize) -> bool {
        self.call("holds", json!({"address": address, "seed": seed, "length": len})) == true
    }

    fn holds_turned(&mut self, address: u64, seed: u8, block: usize, blocks: usize) -> bool {
        let arguments = json!({"address": address, "seed": seed, "block": block, "blocks": blocks});
        self.call("holds_turned", arguments) == true
    }

    fn kill(&mut self) {
        self.child.kill().expect("the process runs");
        self.child.wait().expect("it ends");
    }

    pub(crate) fn peer(&self, agent: &Agent) -> Peer {
        agent.peer(&self.session).expect("an address")
    }
}

impl Drop for Stock {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

macro_rules! stock {
    ($($environment:tt)*) => {
        match Stock::start_with(&[$($environment)*]) {
            Some(stock) => stock,
            None => return,
        }
    };
}

fn signal(child: &Child, name: &str) {
    let id = child.id().to_string();
    assert!(Command::new("kill").args([name, &id]).status().expect("it runs").success());
}

/// Stops a process and waits until each of its threads has stopped.
fn stop(child: &Child) {
    signal(child, "-STOP");
    let threads = format!("/proc/{}/task", child.id());
    let stopped = |thread: std::fs::DirEntry| {
        // A thread that has just ended has no file.
        let Ok(stat) = std::fs::read_to_string(thread.path().join("stat")) else { return true };
        stat.rsplit(") ").next().is_some_and(|state| state.starts_with('T'))
    };
    let until = Instant::now() + LONG;
    while !std::fs::read_dir(&threads).expect("the process runs").flatten().all(stopped) {
        assert!(Instant::now() < until, "it does not stop");
    }
}

// ---- stock to us ----

#[test]
fn a_stock_initiator_writes_and_reads_and_is_refused() {
    for environment in [("MC_UNUSED", ""), ("MC_TCP_PROTO", "1")] {
        let mut stock = stock!(environment);
        let agent = agent();
        let region = filled(&agent, 1, 1 << 20);
        let local = stock.allocate(1 << 20, 2);
        let mut moves = |opcode: &str, remote: usize, length: usize| {
            let (target, remote) = (agent.advertised(), remote as u64);
            let arguments = json!({"target": target, "opcode": opcode, "local": local,
                "remote": remote, "length": length});
            stock.call("move", arguments)[0].as_i64().expect("a code")
        };
        let at = region.addr();
        for (len, offset) in [(1, 0), (PAGE, 77), (1 << 20, 0)] {
            assert_eq!(moves("write", at + offset, len), 0);
            // Version 1 has no answer: the bytes may still be in flight.
            let until = Instant::now() + LONG;
            while bytes_of(&region)[offset..offset + len] != pattern(2, len) {
                assert!(environment.1 == "1" && Instant::now() < until, "{environment:?} {len}");
            }
        }
        region.write_at(0, &pattern(9, 1 << 20)).expect("in bounds");
        assert_eq!(moves("read", at, 1 << 20), 0);
        for (opcode, remote, len) in
            [("read", at + 1, 1 << 20), ("read", 4096, 4096), ("read", at - 1, 2)]
        {
            assert_ne!(moves(opcode, remote, len), 0, "{environment:?}");
        }
        if environment.1.is_empty() {
            assert_ne!(moves("write", at + 1, 1 << 20), 0);
        }
        assert!(stock.holds(local, 9, 1 << 20));
        assert!(bytes_of(&region) == pattern(9, 1 << 20), "nothing refused was written");
    }
}

#[test]
fn a_stock_initiator_moves_batches_of_many_callers() {
    let mut stock = stock!();
    let agent = agent();
    for (block, blocks, threads) in [(PAGE, 1024, 1), (64, 60_000, 1), (32 << 10, 100, 10)] {
        let region = agent.allocate(block * blocks, Access::READ_WRITE).expect("memory");
        let local = stock.allocate(block * blocks, 5);
        for opcode in ["write", "read"] {
            let arguments = json!({"target": agent.advertised(), "opcode": opcode, "local": local,
                "remote": region.addr() as u64, "block": block, "blocks": blocks,
                "threads": threads});
            let codes = stock.call("batch", arguments)[0].clone();
            assert_eq!(codes, json!(vec![0; threads]), "{opcode} {block}x{blocks}");
        }
        assert!(bytes_of(&region) == turned(&pattern(5, block * blocks), block));
        assert!(stock.holds(local, 5, block * blocks));
        agent.unregister(&region).expect("registered");
    }
}

#[test]
fn a_stock_initiator_notifies_probes_and_asks_for_the_first_address() {
    let mut stock = stock!();
    let agent = agent();
    let region = filled(&agent, 1, PAGE);
    let target = agent.advertised();
    assert_eq!(stock.call("probe", json!({"target": target})), 0);
    let first = stock.call("first_address", json!({"target": target}));
    assert_eq!(first, region.addr() as u64);
    let local = stock.allocate(PAGE, 7);
    let arguments = json!({"target": target, "opcode": "write", "local": local,
        "remote": region.addr() as u64, "block": 1024, "blocks": 4, "notify": ["layer 3", "done"]});
    assert_eq!(stock.call("batch", arguments)[0], json!([0]));
    let heard = agent.wait_notification(LONG).expect("open").expect("delivered");
    assert_eq!((heard.name.as_str(), heard.message.as_slice()), ("layer 3", &b"done"[..]));
    assert!(bytes_of(&region) == turned(&pattern(7, PAGE), 1024), "after its data");
}

#[test]
fn memory_registered_after_the_handshake_is_reached_and_unregistered_memory_is_not() {
    let mut stock = stock!();
    let agent = agent();
    let _first = filled(&agent, 1, PAGE);
    let local = stock.allocate(PAGE, 7);
    let mut write = |remote: usize| {
        let arguments = json!({"target": agent.advertised(), "opcode": "write", "local": local,
            "remote": remote as u64, "length": PAGE});
        stock.call("move", arguments)[0].as_i64().expect("a code")
    };
    let late = filled(&agent, 1, PAGE);
    assert_eq!(write(late.addr()), 0);
    let later = filled(&agent, 1, PAGE);
    assert_eq!(write(later.addr()), 0);
    agent.unregister(&late).expect("registered");
    assert_ne!(write(late.addr()), 0);
}

// ---- us to stock ----

#[test]
fn a_stock_target_is_written_and_read_whatever_the_shape() {
    let mut stock = stock!();
    let agent = agent();
    let peer = stock.peer(&agent);
    for (block, blocks) in [(1, 1), (PAGE, 1024), (32 << 10, 1024), (512, 70_000), (16 << 20, 4)] {
        let source = filled(&agent, 4, block * blocks);
        let remote = stock.allocate(block * blocks, 0);
        let batch = scattered(&source, remote, block, blocks);
        let moved = peer.write(&batch, &options()).expect("written");
        assert_eq!(moved.transport, Some(kvferry_mooncake::KIND));
        assert!(stock.holds_turned(remote, 4, block, blocks), "{block}x{blocks}");
        let sink = filled(&agent, 0, block * blocks);
        peer.read(&scattered(&sink, remote, block, blocks), &options()).expect("read");
        assert!(bytes_of(&sink) == bytes_of(&source), "{block}x{blocks}");
        let transfer = peer.write_async(&batch, &options());
        transfer.wait(3 * LONG).expect("in time").expect("written");
    }
}

#[test]
fn ten_callers_write_to_one_stock_target() {
    const LEN: usize = 300 * (32 << 10);
    let mut stock = stock!();
    let agent = agent();
    let peer = stock.peer(&agent);
    let remote = stock.allocate(10 * LEN, 0);
    thread::scope(|scope| {
        for i in 0..10u8 {
            let (agent, peer) = (&agent, &peer);
            scope.spawn(move || {
                let source = filled(agent, i, LEN);
                let at = remote + u64::from(i) * LEN as u64;
                for _ in 0..5 {
                    peer.write(&scattered(&source, at, 32 << 10, 300), &options())
                        .expect("written");
                }
            });
        }
    });
    for i in 0..10u8 {
        let at = remote + u64::from(i) * LEN as u64;
        assert!(stock.holds_turned(at, i, 32 << 10, 300), "caller {i}");
    }
    assert_eq!(agent.stats().transfers_failed, 0);
}

#[test]
fn a_stock_target_refuses_and_goes_on_at_once() {
    let mut stock = stock!();
    let agent = agent();
    let peer = stock.peer(&agent);
    let source = filled(&agent, 3, 100 * PAGE);
    let remote = stock.allocate(100 * PAGE, 0);
    let hidden = stock.call("allocate", json!({"length": PAGE, "seed": 1, "register": false}));
    let hidden = hidden.as_u64().expect("an address");
    let good = scattered(&source, remote, PAGE, 100);
    let scratch = filled(&agent, 0, 100 * PAGE);
    peer.write(&good, &options()).expect("written");
    for round in 0..8 {
        let (addr, kind) = if round % 2 == 0 {
            (hidden, ErrorKind::NotRegistered)
        } else {
            (remote + 99 * PAGE as u64 + 1, ErrorKind::OutOfBounds)
        };
        let mut batch = scattered(&scratch, remote, PAGE, 60);
        batch.push_to_address(&scratch, 0, addr, PAGE as u64).expect("no wrapping");
        peer.regions(LONG).expect("listed");
        let result =
            if round < 4 { peer.write(&batch, &options()) } else { peer.read(&batch, &options()) };
        let e = result.expect_err("refused");
        assert_eq!((e.kind(), e.context("descriptor")), (kind, Some("60")), "{e}");
        peer.write(&good, &options()).expect("healthy");
    }
    assert!(stock.holds(hidden, 1, PAGE));
    assert!(stock.holds_turned(remote, 3, PAGE, 100));
}

#[test]
fn a_stock_target_is_notified_probed_and_asked_for_its_regions() {
    let mut stock = stock!();
    let agent = agent();
    let peer = stock.peer(&agent);
    let source = filled(&agent, 3, PAGE);
    let remote = stock.allocate(PAGE, 0);
    let with = Options { notify: Some(Notification::new("kv", "there")), ..options() };
    peer.write(&scattered(&source, remote, PAGE, 1), &with).expect("written");
    peer.notify(Notification::new("bare", "word"), &options()).expect("notified");
    assert_eq!(stock.call("notifies", json!({})), json!([["kv", "there"], ["bare", "word"]]));
    let began = Instant::now();
    let took = peer.probe(LONG).expect("alive");
    assert!(took > Duration::ZERO && took <= began.elapsed(), "{took:?}");
    let later = stock.allocate(2 * PAGE, 0);
    let regions = peer.regions(LONG).expect("listed");
    let found = regions.iter().find(|r| r.addr == later).expect("registered after the handshake");
    let mut batch = Batch::new();
    batch.push(&source, 0, found, PAGE as u64, PAGE as u64).expect("in bounds");
    peer.write(&batch, &options()).expect("written");
    assert!(stock.holds(later + PAGE as u64, 3, PAGE));
}

#[test]
fn a_stock_target_that_is_killed_is_noticed_at_once_and_its_successor_met() {
    let mut stock = stock!();
    let agent = agent();
    let len = 64 << 20;
    let source = filled(&agent, 3, len);
    let remote = stock.allocate(len, 0);
    let peer = stock.peer(&agent);
    let batch = scattered(&source, remote, 1 << 20, 64);
    peer.write(&batch, &options()).expect("written");
    let e = thread::scope(|scope| {
        let caller = scope.spawn(|| {
            loop {
                if let Err(e) = peer.write(&batch, &options()) {
                    return e;
                }
            }
        });
        thread::sleep(Duration::from_millis(100));
        stock.kill();
        caller.join().expect("no panic")
    });
    // Neither silence nor a deadline.
    assert!(matches!(e.kind(), ErrorKind::PeerReset | ErrorKind::Unreachable), "{e}");
    let e = peer.write(&batch, &options()).expect_err("no process listens");
    assert_eq!(e.kind(), ErrorKind::Unreachable, "{e}");
    let mut successor = stock!();
    let remote = successor.allocate(len, 0);
    let peer = successor.peer(&agent);
    peer.write(&scattered(&source, remote, 1 << 20, 64), &options()).expect("another port");
    assert!(successor.holds_turned(remote, 3, 1 << 20, 64));
}

#[test]
fn a_stock_target_that_restarts_at_its_address_is_reconnected() {
    let mut first = stock!();
    // A stock engine uses a random port; a relay gives it a fixed one.
    let relay = Relay::start("127.0.0.1:0", &first.session, |_| {});
    let agent = agent();
    let source = filled(&agent, 3, PAGE);
    let remote = first.allocate(PAGE, 0);
    let peer = agent.peer(&relay.address).expect("an address");
    peer.write(&scattered(&source, remote, PAGE, 1), &options()).expect("written");
    first.kill();
    let mut second = stock!();
    let remote = second.allocate(PAGE, 0);
    relay.leads_to(&second.session);
    settles("the death goes unnoticed", || peer.transport().is_none());
    peer.write(&scattered(&source, remote, PAGE, 1), &options()).expect("the first call");
    assert!(second.holds(remote, 3, PAGE));
    assert_eq!(agent.stats().transfers_failed, 0);
}

#[test]
fn a_stopped_stock_target_is_silent_and_delays_nothing_after_it_resumes() {
    let mut stock = stock!();
    // Healthy processes may stand still for some seconds on a loaded machine.
    let agent = builder().silence(Duration::from_secs(8)).start().expect("a port");
    let other = self::agent();
    let sink = other.allocate(PAGE, Access::READ_WRITE).expect("memory");
    let source = filled(&agent, 3, 32 << 20);
    let remote = stock.allocate(32 << 20, 0);
    let peer = stock.peer(&agent);
    let healthy = agent.peer(other.advertised()).expect("an address");
    let small = scattered(&source, sink.addr() as u64, PAGE, 1);
    for len in [PAGE, 32 << 20] {
        let batch = scattered(&source, remote, len, 1);
        peer.write(&batch, &options()).expect("written");
        stop(&stock.child);
        let e = peer.write(&batch, &options()).expect_err("the peer does not answer");
        assert_eq!((e.kind(), e.quiesced()), (ErrorKind::PeerSilent, Some(false)), "{e}");
        healthy.write(&small, &options()).expect("healthy");
        signal(&stock.child, "-CONT");
        peer.write(&batch, &options()).expect("the target is resumed");
        assert!(stock.holds(remote, 3, len));
    }
}

#[test]
fn a_stock_target_behind_a_network_that_loses_everything_is_silent_until_it_heals() {
    const LEN: usize = 32 << 20;
    let what = "partition between us and a stock Mooncake";
    let Some(network) = Network::or_skip(what) else { return };
    let Some(mut stock) = Stock::start_in(&network.far, Network::FAR) else { return };
    let mut writer = kvferry_testkit::process::Child::spawn_in(&network.near);
    writer.start(json!({
        "name": "writer", "mooncake": true, "silence_ms": 8000, "listen": format!("{}:0", Network::NEAR),
    }));
    let (from, address) = (writer.allocate(LEN, "", 1), stock.allocate(LEN, 0));
    let (id, access) = (RegionId::ABSOLUTE, Access::READ_WRITE);
    let whole =
        RemoteRegion { incarnation: Incarnation(0), id, addr: address, len: LEN as u64, access };
    let writing = |op, block: usize| {
        json!({
            "op": op, "peer": stock.session, "region": from.id, "remote": whole.to_bytes(),
            "block": block, "count": LEN / block,
        })
    };
    let commands =
        [LEN, PAGE].map(|block| (writing("write", block), writing("keep_writing", block)));
    for (write, keep_writing) in commands {
        writer.call(write.clone());
        let running = writer.call(keep_writing)["writer"].clone();
        thread::sleep(Duration::from_millis(100));
        network.cut();
        let start = Instant::now();
        thread::sleep(Duration::from_millis(100));
        let report = writer.call(json!({"op": "stop_writing", "writer": running}));
        println!("error {:.0?} after the cut", start.elapsed());
        let errors = report["errors"].as_array().expect("a list");
        let silent = |e: &Value| e.as_str().is_some_and(|e| e.starts_with("peer_silent"));
        assert!(!errors.is_empty() && errors.iter().all(silent), "{report}");
        network.heal();
        writer.call(write);
        let held = memory_of(stock.child.id(), address, LEN);
        assert!(held == writer.memory(&from), "not what was written");
    }
}

#[test]
fn a_write_to_a_version_1_target_is_done_when_the_bytes_are_in_place() {
    let mut stock = stock!();
    let session = stock.session.clone();
    // The real server, with a descriptor like that of version 1.
    let relay = Relay::start("127.0.0.1:0", &session, |json| {
        json.as_object_mut().expect("an object").remove("tcp_proto_version");
    });
    let agent = agent();
    let peer = agent.peer(&relay.address).expect("an address");
    for (block, blocks) in [(PAGE, 1), (PAGE, 3000), (1 << 20, 64)] {
        let remote = stock.allocate(block * blocks, 0);
        for round in 0..4u8 {
            let source = filled(&agent, 10 + round, block * blocks);
            peer.write(&scattered(&source, remote, block, blocks), &options()).expect("written");
            assert!(stock.holds_turned(remote, 10 + round, block, blocks), "{block}x{blocks}");
            agent.unregister(&source).expect("registered");
        }
        let sink = filled(&agent, 0, block * blocks);
        peer.read(&scattered(&sink, remote, block, blocks), &options()).expect("read");
        assert!(bytes_of(&sink) == pattern(13, block * blocks));
        let e = peer.write(&scattered(&sink, remote - 1, block, blocks), &options());
        assert_eq!(e.expect_err("refused").kind(), ErrorKind::NotRegistered);
    }
}

/// Relays handshakes to another peer and changes its answers.
struct Relay {
    address: String,
    target: Arc<Mutex<String>>,
}

impl Relay {
    fn start(at: &str, target: &str, change: fn(&mut Value)) -> Self {
        let listener = TcpListener::bind(at).expect("the port is free");
        let address = listener.local_addr().expect("bound").to_string();
        let target = Arc::new(Mutex::new(target.to_owned()));
        let shared = Arc::clone(&target);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let target = shared.lock().expect("no panic").clone();
                relay(stream.expect("a connection"), &target, change);
            }
        });
        Self { address, target }
    }

    fn leads_to(&self, target: &str) {
        target.clone_into(&mut self.target.lock().expect("no panic"));
    }
}

fn relay(stream: TcpStream, target: &str, change: fn(&mut Value)) {
    crate::wire::answer(stream, |kind, json| {
        let (_, mut answer) = handshake::handshake(target, kind, json).expect("an answer");
        change(&mut answer);
        Some(answer)
    });
}
