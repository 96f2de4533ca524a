//! Peers in processes of their own, which a test can kill, stop and inspect. What a child can't do
//! panics here, and so does a reply that does not come within 150 s.
//!
//! A child is the test binary itself, started again. A test file that needs children has one line
//!
//! ```ignore
//! kvferry_testkit::child_processes!();
//! ```
//!
//! which makes a test that returns at once, except in a child: there it serves the commands of its
//! parent until the parent ends. Commands and replies are lines of JSON on stdin and stdout;
//! replies start with `REPLY`, because the test harness writes to stdout, too.

pub mod mesh;
mod serve;

pub use serve::serve_if_child;

use kvferry_sys::sync::Mutex;
use serde_json::{Value, json};
use std::fmt;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::process::{ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver};
use std::thread;
use std::time::{Duration, Instant};

/// The start of a line with a reply.
const REPLY: &str = "@kvferry ";

/// Set in children only.
const CHILD: &str = "KVFERRY_TESTKIT_CHILD";

/// The longest that a child may take to reply.
const REPLY_WITHIN: Duration = Duration::from_secs(150);

/// Makes the hidden test through which the test binary becomes a child process. A child first evaluates the
/// expression, if there is one: what its agents need, such as a transport to be linked.
#[macro_export]
macro_rules! child_processes {
    ($($prepare:expr)?) => {
        /// Returns at once, except in processes that other tests of this file started.
        #[test]
        fn becomes_a_child_process() {
            $(let _ = $prepare;)?
            $crate::process::serve_if_child();
        }
    };
}

/// A process that serves commands with an agent of its own. Killed on drop.
pub struct Child {
    process: std::process::Child,
    input: ChildStdin,
    replies: Receiver<Value>,
    stderr: Arc<Mutex<String>>,
}

impl fmt::Debug for Child {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Child({})", self.pid())
    }
}

/// An error that a command ended with.
#[derive(Clone, Debug, PartialEq)]
pub struct Refusal {
    /// The kind in snake case.
    pub kind: String,
    /// The error as it is displayed.
    pub text: String,
    /// Value of `kvferry::Error::quiesced`.
    pub quiesced: Option<bool>,
}

/// Resources that a process uses.
#[derive(Clone, Copy, Debug, Default)]
pub struct Resources {
    /// Resident memory in bytes.
    pub memory_bytes: u64,
    /// Threads that the kernel has not reaped.
    pub threads: usize,
    /// Open descriptors.
    pub descriptors: usize,
    /// CPU time since the process started, of the threads that still run.
    pub cpu: Duration,
}

/// The memory of a child at an address.
pub fn memory_of(pid: u32, addr: u64, len: usize) -> Vec<u8> {
    let file = fs::File::open(format!("/proc/{pid}/mem")).expect("the process runs");
    let mut bytes = vec![0; len];
    file.read_exact_at(&mut bytes, addr).expect("the range is mapped");
    bytes
}

impl Resources {
    /// Measures the resources that a process uses.
    pub fn of(pid: u32) -> Self {
        let read = |file: &str| fs::read_to_string(format!("/proc/{pid}/{file}"));
        let status = read("status").expect("the process exists");
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name));
            line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0)
        };
        let count =
            |dir: &str| fs::read_dir(format!("/proc/{pid}/{dir}")).map_or(0, Iterator::count);
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let nanos = tasks
            .filter_map(|task| fs::read_to_string(task.path().join("schedstat")).ok())
            .filter_map(|stat| stat.split_whitespace().next()?.parse::<u64>().ok())
            .sum();
        Self {
            memory_bytes: field("VmRSS:") * 1024,
            threads: count("task"),
            descriptors: count("fd"),
            cpu: Duration::from_nanos(nanos),
        }
    }
}

impl Child {
    /// Starts a child without an agent.
    pub fn spawn() -> Self {
        Self::spawn_by(Command::new(
            std::env::current_exe().expect("Linux tells a process its executable"),
        ))
    }

    /// Starts a child in a network namespace.
    pub fn spawn_in(namespace: &str) -> Self {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", namespace]);
        command.arg(std::env::current_exe().expect("Linux tells a process its executable"));
        Self::spawn_by(command)
    }

    fn spawn_by(mut command: Command) -> Self {
        let mut process = command
            .args(["becomes_a_child_process", "--exact", "--nocapture", "--test-threads=1"])
            .env(CHILD, "1")
            .env("RUST_BACKTRACE", "0")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the test binary can be started again");
        let input = process.stdin.take().expect("piped");
        let output = process.stdout.take().expect("piped");
        let (tell, replies) = mpsc::channel();
        thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if let Some(reply) = line.strip_prefix(REPLY) {
                    let reply = serde_json::from_str(reply).expect("replies are JSON");
                    if tell.send(reply).is_err() {
                        break;
                    }
                }
            }
        });
        let stderr = Arc::new(Mutex::new(String::new()));
        let (errors, kept) = (process.stderr.take().expect("piped"), Arc::clone(&stderr));
        thread::spawn(move || {
            for line in BufReader::new(errors).lines().map_while(Result::ok) {
                drop(writeln!(std::io::stderr(), "{line}"));
                *kept.lock() += &(line + "\n");
            }
        });
        let mut child = Self { process, input, replies, stderr };
        child.call(json!({"op": "hello"}));
        child
    }

    /// Starts a child with an agent, and returns the agent's address. `config` has fields of
    /// [`kvferry::Config`], and `secret`.
    pub fn with_agent(config: Value) -> (Self, String) {
        let mut child = Self::spawn();
        let address = child.start(config);
        (child, address)
    }

    /// Starts the child's agent with settings as in [`Child::with_agent`], and returns its address.
    pub fn start(&mut self, config: Value) -> String {
        let reply = self.call(json!({"op": "start", "config": config}));
        reply["address"].as_str().expect("an address").to_owned()
    }

    /// The child's process id.
    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    /// Sends a command without waiting for its reply.
    pub fn send(&mut self, command: Value) {
        // A child that was killed does not reply; that is where the caller notices.
        drop(writeln!(self.input, "{command}"));
    }

    /// The next reply, or `None` after `time`.
    pub fn reply_within(&mut self, time: Duration) -> Option<Result<Value, Refusal>> {
        let reply = self.replies.recv_timeout(time).ok()?;
        let Some(error) = reply.get("error") else { return Some(Ok(reply)) };
        Some(Err(Refusal {
            kind: error["kind"].as_str().unwrap_or_default().to_owned(),
            text: error["text"].as_str().unwrap_or_default().to_owned(),
            quiesced: error["quiesced"].as_bool(),
        }))
    }

    /// Sends a command and waits for its reply.
    ///
    /// # Errors
    /// The error that the command ended with.
    pub fn try_call(&mut self, command: Value) -> Result<Value, Refusal> {
        let what = command.to_string();
        self.send(command);
        self.reply_within(REPLY_WITHIN)
            .unwrap_or_else(|| panic!("child {} did not reply to {what}", self.pid()))
    }

    /// Sends a command and waits for its reply.
    pub fn call(&mut self, command: Value) -> Value {
        let what = command.to_string();
        match self.try_call(command) {
            Ok(reply) => reply,
            Err(refusal) => panic!("child {}: {what}: {refusal:?}", self.pid()),
        }
    }

    /// Allocates a region in the child, filled with the pattern of `seed`. Peers may read it if
    /// `access` is "r", write it if "w", both if "rw".
    pub fn allocate(&mut self, len: usize, access: &str, seed: u64) -> ChildRegion {
        self.allocate_as(json!({"len": len, "access": access, "seed": seed}))
    }

    /// Like [`Child::allocate`], but the memory is only registered with the child's agent, not
    /// allocated by it: other processes can't map it.
    pub fn allocate_private(&mut self, len: usize, access: &str, seed: u64) -> ChildRegion {
        self.allocate_as(json!({"len": len, "access": access, "seed": seed, "private": true}))
    }

    fn allocate_as(&mut self, mut command: Value) -> ChildRegion {
        command["op"] = json!("allocate");
        let len = command["len"].as_u64().expect("a number") as usize;
        let reply = self.call(command);
        let bytes: Vec<u8> = serde_json::from_value(reply["remote"].clone()).expect("bytes");
        ChildRegion {
            id: reply["id"].as_u64().expect("an id"),
            addr: reply["addr"].as_u64().expect("an address"),
            len,
            remote: kvferry::RemoteRegion::from_bytes(&bytes).expect("a region"),
        }
    }

    /// Fills a region with the pattern of `seed`.
    pub fn fill(&mut self, region: &ChildRegion, seed: u64) {
        self.call(json!({"op": "fill", "region": region.id, "seed": seed}));
    }

    /// Whether a region holds the pattern of `seed`.
    pub fn matches(&mut self, region: &ChildRegion, seed: u64) -> bool {
        self.call(json!({"op": "matches", "region": region.id, "seed": seed}))["matches"] == true
    }

    /// A digest of a region's content, for [`Child::changes`].
    pub fn digest(&mut self, region: &ChildRegion) -> Value {
        self.call(json!({"op": "digest", "region": region.id}))["digest"].clone()
    }

    /// Whether a region's content differs from a digest at any time within `time`.
    pub fn changes(&mut self, region: &ChildRegion, digest: &Value, time: Duration) -> bool {
        let ms = time.as_millis() as u64;
        let watch = json!({"op": "watch", "region": region.id, "for_ms": ms, "digest": digest});
        self.call(watch)["changed"] == true
    }

    /// The statistics of the child's agent.
    pub fn stats(&mut self) -> Value {
        self.call(json!({"op": "stats"}))
    }

    /// Stops a writer that the command `keep_writing` started. Returns its errors.
    pub fn stop_writing(&mut self, writer: &Value) -> Vec<String> {
        let report = self.call(json!({"op": "stop_writing", "writer": writer}));
        serde_json::from_value(report["errors"].clone()).expect("texts")
    }

    /// Reads the child's memory. Works while the child is stopped.
    pub fn memory(&self, region: &ChildRegion) -> Vec<u8> {
        memory_of(self.pid(), region.addr, region.len)
    }

    /// Measures the resources that the child uses.
    pub fn resources(&self) -> Resources {
        Resources::of(self.pid())
    }

    /// Returns the child's output to stderr so far.
    pub fn stderr(&self) -> String {
        self.stderr.lock().clone()
    }

    /// Interrupts a system call of the child by a signal. Needs the command `catch_signals` before.
    pub fn interrupt(&self) {
        self.signal(libc::SIGUSR1);
    }

    fn signal(&self, signal: libc::c_int) {
        let pid = libc::pid_t::try_from(self.pid()).expect("pids are small");
        // SAFETY: `kill` touches no memory; the child was not waited for, so the pid is its own.
        let result = unsafe { libc::kill(pid, signal) };
        assert_eq!(result, 0, "the child can be signalled");
    }

    /// Waits until each thread is in one of these states.
    fn wait_for_state(&self, wanted: &[char]) {
        let give_up = Instant::now() + Duration::from_secs(60);
        loop {
            let tasks = fs::read_dir(format!("/proc/{}/task", self.pid()));
            let states: Vec<_> = tasks
                .into_iter()
                .flatten()
                .flatten()
                .filter_map(|task| fs::read_to_string(task.path().join("stat")).ok())
                .filter_map(|stat| stat.rsplit(')').next()?.trim().chars().next())
                .collect();
            if states.iter().all(|state| wanted.contains(state)) {
                return;
            }
            assert!(Instant::now() < give_up, "the threads of child {} are {states:?}", self.pid());
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Stops the child, and returns once it is stopped.
    pub fn stop(&self) {
        self.signal(libc::SIGSTOP);
        self.wait_for_state(&['T']);
    }

    /// Lets a stopped child continue.
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
        self.wait_for_state(&['R', 'S', 'D']);
    }

    /// Kills the child, and returns once its descriptors are closed.
    pub fn kill(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A region of a child.
#[derive(Clone, Debug)]
pub struct ChildRegion {
    /// Names the region in commands.
    pub id: u64,
    /// Address of the region in the child.
    pub addr: u64,
    /// Bytes.
    pub len: usize,
    /// The description that peers need for a transfer.
    pub remote: kvferry::RemoteRegion,
}
