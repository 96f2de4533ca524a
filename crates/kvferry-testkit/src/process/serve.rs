//! What a child does for its parent.

use super::mesh::Mesh;
use super::{CHILD, REPLY, Resources};
use crate::pattern::Pattern;
use kvferry::{
    Access, Agent, Batch, Channel, Checksum, Correspondent, Moved, Notification, Options, Peer,
    Region, RemoteRegion, Transfer, Transports,
};
use kvferry_sys::map::Mapping;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// In a child: serves commands until the parent is gone. Elsewhere: nothing.
pub fn serve_if_child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    // SAFETY: `prctl` with these arguments touches no memory. A child never outlives its parent,
    // not even a stopped one.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
    }
    let mut server = Server::default();
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let command: Value = serde_json::from_str(&line).expect("commands are JSON");
        let began = Instant::now();
        let mut reply = match server.serve(&command) {
            Ok(reply) => reply,
            Err(error) => json!({"error": {
                "kind": error.kind().as_str(),
                "text": error.to_string(),
                "quiesced": error.quiesced(),
            }}),
        };
        reply["took_us"] = json!(began.elapsed().as_micros() as u64);
        // The harness may have left its own line unfinished.
        let mut out = std::io::stdout().lock();
        drop(write!(out, "\n{REPLY}{reply}\n"));
        drop(out.flush());
    }
    std::process::exit(0);
}

extern "C" fn nothing(_: libc::c_int) {}

/// Has a signal interrupt the system calls of whoever takes it.
fn catch_signals() {
    // SAFETY: a zeroed action is a valid one; the handler does nothing, so it is safe at any
    // point of any thread. Without `SA_RESTART`, system calls are interrupted.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = nothing as *const () as libc::sighandler_t;
        libc::sigaction(libc::SIGUSR1, &raw const action, std::ptr::null_mut());
    }
}

/// Has the kernel refuse this process to copy to and from the memory of others.
fn deny_process_vm() {
    // A classic filter: the number of the call, then two comparisons.
    let load = libc::BPF_LD | libc::BPF_W | libc::BPF_ABS;
    let (equal, end) = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, libc::BPF_RET | libc::BPF_K);
    let step = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    let mut steps = [
        step(load, 0, 0, 0),
        step(equal, 2, 0, libc::SYS_process_vm_readv as u32),
        step(equal, 1, 0, libc::SYS_process_vm_writev as u32),
        step(end, 0, 0, libc::SECCOMP_RET_ALLOW),
        step(end, 0, 0, refuse),
    ];
    let program = libc::sock_fprog { len: steps.len() as u16, filter: steps.as_mut_ptr() };
    // SAFETY: the program and its steps live until the calls return; the kernel copies them.
    let installed = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            libc::SECCOMP_FILTER_FLAG_TSYNC,
            &raw const program,
        )
    };
    assert_eq!(installed, 0, "{}", std::io::Error::last_os_error());
}

/// Gives up being root. False if the process is not.
fn become_user(uid: u32) -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::setuid(uid) == 0 }
}

type Outcome = Result<Value, kvferry::Error>;

#[derive(Default)]
struct Server {
    agent: Option<Agent>,
    regions: HashMap<u64, Region>,
    /// The memory of those that are registered rather than allocated by the agent.
    private: HashMap<u64, Mapping>,
    transfers: HashMap<u64, Transfer>,
    writers: HashMap<u64, Writer>,
    idle: Vec<Agent>,
    peers: Vec<Peer>,
    mesh: Option<Mesh>,
    next: u64,
}

/// Writes again and again, in the background.
struct Writer {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Value>,
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or_else(|| panic!("{name} in {value}"))
}

fn text<'a>(value: &'a Value, name: &str) -> &'a str {
    value[name].as_str().unwrap_or_else(|| panic!("{name} in {value}"))
}

fn millis(value: &Value, name: &str) -> Duration {
    Duration::from_millis(number(value, name))
}

fn moved(moved: &Moved) -> Value {
    json!({"bytes": moved.bytes, "descriptors": moved.descriptors, "streams": moved.streams})
}

/// FNV-1a over words: enough to tell whether memory changed.
fn digest(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |hash, word| {
        let mut padded = [0; 8];
        padded[..word.len()].copy_from_slice(word);
        (hash ^ u64::from_le_bytes(padded)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

fn start(config: &Value) -> Result<Agent, kvferry::Error> {
    let mut builder = Agent::builder();
    if let Some(name) = config["name"].as_str() {
        builder = builder.name(name);
    }
    if let Some(listen) = config["listen"].as_str() {
        builder = builder.listen(listen.parse::<std::net::SocketAddr>().expect("an address"));
    }
    if let Some(secret) = config["secret"].as_str() {
        builder = builder.secret(secret.as_bytes());
    }
    if let Some(ms) = config["silence_ms"].as_u64() {
        builder = builder.silence(Duration::from_millis(ms));
    }
    if let Some(ms) = config["timeout_ms"].as_u64() {
        builder = builder.timeout(Duration::from_millis(ms));
    }
    if let Some(on) = config["checksum"].as_bool() {
        builder = builder.checksum(if on { Checksum::On } else { Checksum::Off });
    }
    if let Some(n) = config["streams"].as_u64() {
        builder = builder.streams_per_peer(n as usize);
    }
    if let Some(n) = config["io_threads"].as_u64() {
        builder = builder.io_threads(n as usize);
    }
    if let Some(names) = config["transports"].as_str() {
        builder = builder.transports(Transports::parse(names)?);
    }
    if let Some(on) = config["ptracer_any"].as_bool() {
        builder = builder.ptracer_any(on);
    }
    if let Some(on) = config["mooncake"].as_bool() {
        builder = builder.mooncake(on);
    }
    builder.start()
}

/// What this process uses, once the kernel has reaped the threads that ended.
fn resources() -> Value {
    thread::sleep(Duration::from_millis(100));
    let now = Resources::of(std::process::id());
    json!({
        "threads": now.threads,
        "descriptors": now.descriptors,
        "memory_bytes": now.memory_bytes,
    })
}

impl Server {
    fn agent(&self) -> &Agent {
        self.agent.as_ref().expect("the parent started the agent")
    }

    fn region(&self, command: &Value) -> &Region {
        &self.regions[&number(command, "region")]
    }

    fn bytes(&self, command: &Value) -> Vec<u8> {
        let region = self.region(command);
        let mut bytes = vec![0; region.len()];
        match self.private.get(&number(command, "region")) {
            Some(map) => map.span(0, region.len()).copy_to(&mut bytes),
            None => region.read_at(0, &mut bytes).expect("the region is kvferry's own"),
        }
        bytes
    }

    fn name(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn batch(&self, command: &Value) -> Result<Batch, kvferry::Error> {
        let remote: Vec<u8> = serde_json::from_value(command["remote"].clone()).expect("bytes");
        let remote = RemoteRegion::from_bytes(&remote)?;
        let (block, count) = (number(command, "block"), number(command, "count"));
        let mut batch = Batch::with_capacity(count as usize);
        for i in 0..count {
            batch.push(self.region(command), i * block, &remote, i * block, block)?;
        }
        Ok(batch)
    }

    fn options(command: &Value) -> Options<'static> {
        Options {
            timeout: command["timeout_ms"].as_u64().map(Duration::from_millis),
            notify: command["notify"].as_str().map(|name| Notification::new(name, name)),
            ..Options::default()
        }
    }

    fn serve(&mut self, command: &Value) -> Outcome {
        match text(command, "op") {
            "hello" => Ok(json!({})),
            "start" => {
                let agent = self.agent.insert(start(&command["config"])?);
                let incarnation = agent.incarnation().to_string();
                Ok(json!({"address": agent.advertised(), "incarnation": incarnation}))
            }
            "start_and_stop" => self.start_and_stop(command),
            "meet_and_part" => self.meet_and_part(command),
            "mesh_start" => {
                let plan = serde_json::from_value(command["plan"].clone()).expect("a plan");
                self.mesh = Some(Mesh::start(self.agent(), plan)?);
                Ok(json!({}))
            }
            "mesh_met" => {
                let member = serde_json::from_value(command["member"].clone()).expect("a member");
                self.mesh.as_ref().expect("a mesh").met(member);
                Ok(json!({}))
            }
            "mesh_report" => {
                let report = self.mesh.as_ref().expect("a mesh").report();
                Ok(serde_json::to_value(report).expect("plain values"))
            }
            "mesh_stop" => {
                let report = self.mesh.take().expect("a mesh").stop();
                Ok(serde_json::to_value(report).expect("plain values"))
            }
            "shutdown" => {
                self.agent().shutdown();
                Ok(json!({}))
            }
            "sessions" => self.sessions(number(command, "count")),
            "stats" => Ok(serde_json::to_value(self.agent().stats()).expect("plain numbers")),
            "allocate" => self.allocate(command),
            "fill" => {
                let content = match command["byte"].as_u64() {
                    Some(byte) => vec![byte as u8; self.region(command).len()],
                    None => Pattern::new(number(command, "seed")).bytes(self.region(command).len()),
                };
                match self.private.get(&number(command, "region")) {
                    Some(map) => map.span(0, content.len()).copy_from(&content),
                    None => self.region(command).write_at(0, &content)?,
                }
                Ok(json!({}))
            }
            "digest" => Ok(json!({"digest": digest(&self.bytes(command))})),
            "watch" => self.watch(command),
            "holds" => {
                let byte = number(command, "byte") as u8;
                Ok(json!({"count": self.bytes(command).iter().filter(|b| **b == byte).count()}))
            }
            "matches" => {
                let bytes = self.bytes(command);
                Ok(
                    json!({"matches": bytes == Pattern::new(number(command, "seed")).bytes(bytes.len())}),
                )
            }
            "forget" => {
                self.regions.remove(&number(command, "region"));
                Ok(json!({}))
            }
            "unregister" => {
                self.agent().unregister(self.region(command))?;
                Ok(json!({"digest": digest(&self.bytes(command))}))
            }
            // Unregisters it if it still is registered, and gives its memory back.
            "release" => {
                if let Some(region) = self.regions.remove(&number(command, "region")) {
                    drop(self.agent().unregister(&region));
                }
                Ok(json!({}))
            }
            "connect" => {
                let peer = self.agent().peer(text(command, "peer"))?;
                let summary = peer.connect(millis(command, "timeout_ms"))?;
                Ok(serde_json::to_value(summary).expect("plain values"))
            }
            "write" => {
                let peer = self.agent().peer(text(command, "peer"))?;
                peer.write(&self.batch(command)?, &Self::options(command)).map(|m| moved(&m))
            }
            "read" => {
                let peer = self.agent().peer(text(command, "peer"))?;
                peer.read(&self.batch(command)?, &Self::options(command)).map(|m| moved(&m))
            }
            "write_async" => {
                let peer = self.agent().peer(text(command, "peer"))?;
                let transfer = peer.write_async(self.batch(command)?, Self::options(command));
                let name = self.name();
                self.transfers.insert(name, transfer);
                Ok(json!({"transfer": name}))
            }
            "cancel" => {
                self.transfers[&number(command, "transfer")].cancel();
                Ok(json!({}))
            }
            "wait" => {
                let transfer = &self.transfers[&number(command, "transfer")];
                match transfer.wait(millis(command, "timeout_ms")) {
                    Some(outcome) => outcome.map(|m| moved(&m)),
                    None => Ok(json!({"running": true})),
                }
            }
            "keep_writing" => self.keep_writing(command),
            "stop_writing" => {
                let writer = self.writers.remove(&number(command, "writer")).expect("a writer");
                writer.stop.store(true, Ordering::SeqCst);
                Ok(writer.thread.join().expect("writers don't panic"))
            }
            "echo" => {
                self.agent().correspond(Arc::new(Echo)).expect("nobody else does");
                Ok(json!({}))
            }
            "notifications" => {
                let names: Vec<_> =
                    self.agent().notifications().into_iter().map(|n| n.name).collect();
                Ok(json!({"names": names}))
            }
            "fork" => self.fork(command),
            "deny_process_vm" => {
                deny_process_vm();
                Ok(json!({}))
            }
            "become_user" => Ok(json!({"done": become_user(number(command, "uid") as u32)})),
            "catch_signals" => {
                catch_signals();
                Ok(json!({}))
            }
            other => panic!("unknown command {other}"),
        }
    }

    fn allocate(&mut self, command: &Value) -> Outcome {
        let access = match text(command, "access") {
            "r" => Access::READ,
            "w" => Access::WRITE,
            "rw" => Access::READ_WRITE,
            _ => Access::NONE,
        };
        let len = number(command, "len") as usize;
        let content = Pattern::new(number(command, "seed")).bytes(len);
        let name = self.name();
        let region = if command["private"] == true {
            let map = Mapping::anonymous(len).expect("memory");
            map.span(0, len).copy_from(&content);
            // SAFETY: the mapping is kept until the process ends, and only copied to and from.
            let region = unsafe { self.agent().register(map.as_ptr(), len, access)? };
            self.private.insert(name, map);
            region
        } else {
            let region = self.agent().allocate(len, access)?;
            region.write_at(0, &content)?;
            region
        };
        let reply = json!({
            "id": name,
            "addr": region.addr(),
            "remote": region.remote().to_bytes(),
        });
        self.regions.insert(name, region);
        Ok(reply)
    }

    /// Looks at memory again and again, and says whether it ever differed from a digest.
    fn watch(&self, command: &Value) -> Outcome {
        let end = Instant::now() + millis(command, "for_ms");
        let wanted = number(command, "digest");
        let mut looks = 0;
        loop {
            looks += 1;
            if digest(&self.bytes(command)) != wanted {
                return Ok(json!({"changed": true, "looks": looks}));
            }
            if Instant::now() >= end {
                return Ok(json!({"changed": false, "looks": looks}));
            }
        }
    }

    fn keep_writing(&mut self, command: &Value) -> Outcome {
        let peer = self.agent().peer(text(command, "peer"))?;
        let (batch, options) = (self.batch(command)?, Self::options(command));
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = thread::spawn(move || {
            let (mut done, mut longest, mut errors) = (0u64, Duration::ZERO, Vec::new());
            while !stopped.load(Ordering::SeqCst) {
                let began = Instant::now();
                match peer.write(&batch, &options) {
                    Ok(_) => done += 1,
                    Err(e) => errors.push(format!("{}: {e}", e.kind())),
                }
                longest = longest.max(began.elapsed());
            }
            json!({"done": done, "longest_us": longest.as_micros() as u64, "errors": errors})
        });
        let name = self.name();
        self.writers.insert(name, Writer { stop, thread });
        Ok(json!({"writer": name}))
    }

    /// Starts two agents, moves something between them, and stops them; again and again.
    fn start_and_stop(&self, command: &Value) -> Outcome {
        let config = &command["config"];
        for _ in 0..number(command, "times") {
            let (a, b) = (start(config)?, start(config)?);
            let (from, to) = (a.allocate(8192, Access::NONE)?, b.allocate(8192, Access::WRITE)?);
            let mut batch = Batch::new();
            batch.push(&from, 0, &to.remote(), 0, 8192)?;
            a.peer(b.advertised())?.write(&batch, &Options::default())?;
            // One of them says goodbye, the other one is just dropped.
            b.shutdown();
        }
        Ok(resources())
    }

    /// Meets a peer, writes a batch to it and parts from it; again and again.
    fn meet_and_part(&self, command: &Value) -> Outcome {
        let batch = self.batch(command)?;
        for _ in 0..number(command, "times") {
            let peer = self.agent().peer(text(command, "peer"))?;
            peer.write(&batch, &Self::options(command))?;
            peer.disconnect();
        }
        Ok(resources())
    }

    /// Connects so many other agents with this one, and keeps them.
    fn sessions(&mut self, count: u64) -> Outcome {
        for _ in 0..count {
            let other = Agent::builder().start()?;
            let peer = self.agent().peer(other.advertised())?;
            peer.connect(Duration::from_secs(5))?;
            self.idle.push(other);
            self.peers.push(peer);
        }
        Ok(json!({}))
    }

    /// Forks, asks the agent for things in the forked process, and tells what it answered.
    fn fork(&self, command: &Value) -> Outcome {
        let peer = self.agent().peer(text(command, "peer"))?;
        let batch = self.batch(command)?;
        // SAFETY: the forked process uses no lock that another thread of ours may hold: it only
        // calls the agent, which promises to notice, and leaves by `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let answers = [
                peer.write(&batch, &Options::default()).err(),
                self.agent().allocate(4096, Access::NONE).err(),
                peer.write_async(batch, Options::default())
                    .wait(Duration::from_secs(5))
                    .and_then(Result::err),
            ];
            let forked = answers
                .iter()
                .filter(|e| e.as_ref().is_some_and(|e| e.kind() == kvferry::ErrorKind::Forked))
                .count();
            // SAFETY: leaves the forked process at once, as it must.
            unsafe { libc::_exit(i32::try_from(forked).unwrap_or(-1)) }
        }
        let mut status = 0;
        let give_up = Instant::now() + Duration::from_secs(10);
        loop {
            // SAFETY: `status` outlives the call, and the pid is our child's.
            let waited = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
            if waited == pid {
                return Ok(json!({"forked": libc::WEXITSTATUS(status)}));
            }
            if Instant::now() > give_up {
                // SAFETY: touches no memory; the child was not waited for.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                return Ok(json!({"forked": "hangs"}));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Sends every message back.
struct Echo;

impl Correspondent for Echo {
    fn began(&self, _: &Channel) {}

    fn received(&self, channel: &Channel, message: &[u8]) {
        drop(channel.send(message.to_vec()));
    }

    fn ended(&self, _: &Channel, _: &kvferry::Error) {}
}
