//! Engines in their own processes: this program, set up by the environment, driven line by line.

use crate::basics::config;
use kvferry::{Agent, Checksum, Transports};
use kvferry_connector::{Announce, Limits};
use kvferry_refengine::kvferry_adapter::{KvferryAdapter, KvferryAdapterConfig};
use kvferry_refengine::{
    Connector, Engine, EngineConfig, FinishReason, GroupSpec, LoadFailurePolicy, ModelSpec, Params,
    Request, RequestId,
};
use kvferry_testkit::PATIENCE;
use serde::{Deserialize, Serialize};
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

const SETUP: &str = "KVFERRY_TEST_ENGINE";
const EVENT: &str = "EVENT ";

/// Settings of an engine process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Setup {
    pub(crate) tp: usize,
    pub(crate) blocks: usize,
    pub(crate) transports: String,
    pub(crate) timeout_ms: u64,
    pub(crate) silence_ms: u64,
    /// Longest time, in milliseconds, that a lost connection may take to come back.
    pub(crate) reconnect_ms: u64,
    /// How long an offer waits for a consumer that may have died before it asked.
    pub(crate) offer_ttl_ms: u64,
    pub(crate) checksum: bool,
    pub(crate) recompute: bool,
    /// Where the agent of each rank listens, and the address that it advertises.
    pub(crate) listen: Vec<String>,
    pub(crate) advertise: Vec<String>,
    /// Steps only on command.
    pub(crate) manual: bool,
}

/// A limit that does not expire during a test.
pub(crate) const PATIENT_MS: u64 = PATIENCE.as_millis() as u64;

impl Setup {
    pub(crate) fn new(tp: usize) -> Self {
        Self {
            tp,
            blocks: 256,
            transports: "tcp".to_owned(),
            timeout_ms: 20_000,
            silence_ms: PATIENT_MS,
            reconnect_ms: Limits::default().reconnect.as_millis() as u64,
            offer_ttl_ms: 120_000,
            checksum: false,
            recompute: false,
            listen: vec!["127.0.0.1:0".to_owned(); tp],
            advertise: vec![],
            manual: false,
        }
    }

    pub(crate) fn model() -> ModelSpec {
        ModelSpec::new(vec![GroupSpec::full(4, 16), GroupSpec::window(2, 16, 40)], 4)
    }

    fn engine(&self) -> EngineConfig {
        let mut engine = config(&Self::model(), 16, self.blocks);
        engine.tp = self.tp;
        (engine.chunk_tokens, engine.step_tokens) = (64, 4 * 64);
        engine.max_tokens = 2048;
        if self.recompute {
            engine.load_failure = LoadFailurePolicy::Recompute;
        }
        engine
    }

    fn agent(&self, rank: usize) -> Agent {
        let builder = Agent::builder()
            .transports(Transports::parse(&self.transports).expect("transports"))
            .io_threads(1)
            .silence(Duration::from_millis(self.silence_ms))
            .checksum(if self.checksum { Checksum::On } else { Checksum::Off })
            .listen(self.listen[rank].parse::<SocketAddr>().expect("an address"));
        let builder = match self.advertise.get(rank) {
            Some(address) => builder.advertise(address.as_str()),
            None => builder,
        };
        builder.start().expect("it starts")
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Order {
    Submit { id: String, prompt: Vec<u32>, max_tokens: usize, params: Option<Params> },
    Abort { id: String },
    Steps { count: usize },
    State,
}

/// A message of an engine process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Event {
    Ready { addresses: Vec<String>, listening: Vec<String> },
    Output { id: String, tokens: Vec<u32>, reason: Option<String> },
    Stepped,
    State(Status),
}

/// What an engine process holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Status {
    /// What is still held: empty if nothing is under way.
    pub(crate) leak: String,
    pub(crate) left: Vec<(String, usize)>,
    pub(crate) violations: Vec<String>,
    /// Counts of how fetches ended, by code.
    pub(crate) outcomes: Vec<(String, u64)>,
}

#[test]
fn becomes_an_engine() {
    let Ok(setup) = std::env::var(SETUP) else { return };
    let setup: Setup = serde_json::from_str(&setup).expect("a set-up");
    let agents: Vec<_> = (0..setup.tp).map(|rank| setup.agent(rank)).collect();
    let listening = agents.iter().map(|agent| agent.local_addr().to_string()).collect();
    let kvferry_adapter = KvferryAdapterConfig {
        timeout: Duration::from_millis(setup.timeout_ms),
        announce: Announce::Layers { pieces: 2, least_bytes: 0 },
        limits: Limits {
            offer_ttl: Duration::from_millis(setup.offer_ttl_ms),
            reconnect: Duration::from_millis(setup.reconnect_ms),
            ..Limits::default()
        },
        ..KvferryAdapterConfig::default()
    };
    let config = setup.engine();
    let kvferry_adapter = KvferryAdapter::new(&config, agents, kvferry_adapter);
    let engine =
        Engine::new(config, Connector::Vllm(kvferry_adapter.vllm())).expect("valid settings");
    let addresses = (0..setup.tp).map(|rank| kvferry_adapter.address(rank).to_owned()).collect();
    say(&Event::Ready { addresses, listening });
    let (tell, metadata) = mpsc::channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lines().map_while(Result::ok) {
            let order: Order = serde_json::from_str(&line).expect("an order");
            if tell.send(order).is_err() {
                return;
            }
        }
    });
    Process { engine, kvferry_adapter, manual: setup.manual }.serve(&metadata);
}

fn say(event: &Event) {
    let line = serde_json::to_string(event).expect("plain data");
    let mut out = std::io::stdout().lock();
    // The process may be gone.
    drop(writeln!(out, "\n{EVENT}{line}"));
    drop(out.flush());
}

struct Process {
    engine: Engine,
    kvferry_adapter: KvferryAdapter,
    manual: bool,
}

impl Process {
    fn serve(mut self, metadata: &Receiver<Order>) {
        loop {
            let works = !self.manual && self.engine.has_work();
            let order = if works {
                metadata.try_recv().map_err(|e| e == TryRecvError::Disconnected)
            } else {
                let order = metadata.recv_timeout(Duration::from_millis(20));
                order.map_err(|e| e == RecvTimeoutError::Disconnected)
            };
            match order {
                Ok(order) => self.apply(order),
                Err(true) => return,
                Err(false) => {}
            }
            if works && self.step() == 0 {
                // All requests wait for another process: leave it the processor.
                std::thread::sleep(Duration::from_micros(200));
            }
        }
    }

    fn step(&mut self) -> usize {
        let report = self.engine.step();
        for output in self.engine.take_outputs() {
            let reason = output.finished.map(|finished| name(finished.reason).to_owned());
            let (id, tokens) = (output.id.as_str().to_owned(), output.tokens);
            say(&Event::Output { id, tokens, reason });
        }
        report.map_or(0, |report| report.tokens)
    }

    fn apply(&mut self, order: Order) {
        match order {
            Order::Submit { id, prompt, max_tokens, params } => {
                let mut request = Request::new(id.as_str(), prompt, max_tokens);
                request.params = params;
                self.engine.submit(request).expect("it fits");
            }
            Order::Abort { id } => {
                self.engine.abort(&RequestId::from(id));
                self.step();
            }
            Order::Steps { count } => {
                for _ in 0..count {
                    self.step();
                }
                say(&Event::Stepped);
            }
            Order::State => {
                let stays = ["tombstones", "peers", "engines", "farewells"];
                let gauges = self.kvferry_adapter.gauges().into_iter();
                let left =
                    gauges.filter(|(name, n)| *n > 0 && !stays.iter().any(|it| name.ends_with(it)));
                say(&Event::State(Status {
                    leak: self.engine.check_empty().err().map_or(String::new(), |e| e.to_string()),
                    left: left.collect(),
                    violations: self.engine.violations().iter().map(ToString::to_string).collect(),
                    outcomes: self
                        .kvferry_adapter
                        .outcomes()
                        .into_iter()
                        .map(|(code, n)| (code.to_string(), n))
                        .collect(),
                }));
            }
        }
    }
}

const fn name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Length => "length",
        FinishReason::Stop => "stop",
        FinishReason::Abort => "abort",
        FinishReason::Error => "error",
    }
}

/// An engine process, seen from its parent.
pub(crate) struct EngineProcess {
    pub(crate) setup: Setup,
    process: Child,
    /// Written by a thread: a stopped process does not read.
    input: Sender<String>,
    events: Receiver<Event>,
    /// The advertised addresses of its ranks, and those they listen on.
    pub(crate) addresses: Vec<String>,
    pub(crate) listening: Vec<String>,
    /// Outputs that came while another event was awaited: the request, its tokens, how it ended.
    early: Vec<(String, Vec<u32>, Option<String>)>,
}

/// How a request ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) tokens: Vec<u32>,
    pub(crate) reason: String,
}

impl EngineProcess {
    pub(crate) fn start(setup: &Setup) -> Self {
        let program = std::env::current_exe().expect("this program");
        let mut process = Command::new(program)
            .args([
                "survival::process::becomes_an_engine",
                "--exact",
                "--nocapture",
                "--test-threads=1",
            ])
            .env(SETUP, serde_json::to_string(setup).expect("plain data"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let mut stdin = process.stdin.take().expect("piped");
        let (input, lines) = mpsc::channel::<String>();
        std::thread::spawn(move || {
            // A process that is gone is noticed where its output is awaited.
            lines.iter().map_while(|line| writeln!(stdin, "{line}").ok()).for_each(drop);
        });
        let output = process.stdout.take().expect("piped");
        let (tell, events) = mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let Some(event) = line.strip_prefix(EVENT) else { continue };
                let event = serde_json::from_str(event).expect("an event");
                if tell.send(event).is_err() {
                    return;
                }
            }
        });
        let mut engine = Self {
            setup: setup.clone(),
            process,
            input,
            events,
            addresses: vec![],
            listening: vec![],
            early: vec![],
        };
        match engine.next(PATIENCE / 2) {
            Some(Event::Ready { addresses, listening }) => {
                (engine.addresses, engine.listening) = (addresses, listening);
            }
            other => panic!("it is to get ready: {other:?}"),
        }
        engine
    }

    /// Starts another process with the same settings and addresses.
    pub(crate) fn restart(&mut self) {
        self.kill();
        let setup = Setup { listen: self.listening.clone(), ..self.setup.clone() };
        *self = Self::start(&setup);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    pub(crate) fn kill(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        let done = Command::new("kill").args([signal, &pid]).status().expect("kill is there");
        assert!(done.success());
    }

    fn tell(&mut self, order: &Order) {
        drop(self.input.send(serde_json::to_string(order).expect("plain data")));
    }

    pub(crate) fn submit(
        &mut self,
        id: &str,
        prompt: &[u32],
        max_tokens: usize,
        params: Option<Params>,
    ) {
        let (id, prompt) = (id.to_owned(), prompt.to_vec());
        self.tell(&Order::Submit { id, prompt, max_tokens, params });
    }

    pub(crate) fn abort(&mut self, id: &str) {
        self.tell(&Order::Abort { id: id.to_owned() });
    }

    fn next(&mut self, time: Duration) -> Option<Event> {
        self.events.recv_timeout(time).ok()
    }

    pub(crate) fn steps(&mut self, count: usize) {
        self.tell(&Order::Steps { count });
        loop {
            match self.next(PATIENCE / 2).expect("it steps") {
                Event::Stepped => return,
                event => self.keep(event),
            }
        }
    }

    fn keep(&mut self, event: Event) {
        if let Event::Output { id, tokens, reason } = event {
            self.early.push((id, tokens, reason));
        }
    }

    /// Waits for the end of a request; `None` after the timeout.
    pub(crate) fn ended(&mut self, id: &str, time: Duration) -> Option<Ended> {
        let until = Instant::now() + time;
        loop {
            let mut mine = self.early.iter().filter(|(of, ..)| of == id);
            if let Some(reason) = mine.find_map(|(.., reason)| reason.clone()) {
                let mine = self.early.extract_if(.., |(of, ..)| of == id);
                return Some(Ended { tokens: mine.flat_map(|it| it.1).collect(), reason });
            }
            let event = self.next(until.saturating_duration_since(Instant::now()))?;
            self.keep(event);
        }
    }

    /// Takes the requests that have ended since the last call.
    pub(crate) fn take_ended(&mut self) -> Vec<(String, Ended)> {
        while let Ok(event) = self.events.try_recv() {
            self.keep(event);
        }
        let over = self.early.iter().filter(|(.., reason)| reason.is_some());
        let over: Vec<_> = over.map(|(id, ..)| id.clone()).collect();
        let ended = |id: String| self.ended(&id, Duration::ZERO).map(|ended| (id, ended));
        over.into_iter().filter_map(ended).collect()
    }

    pub(crate) fn status(&mut self) -> Status {
        self.tell(&Order::State);
        loop {
            match self.next(PATIENCE / 2).expect("it answers") {
                Event::State(status) => return status,
                event => self.keep(event),
            }
        }
    }

    /// Waits for a request that must end.
    pub(crate) fn ends(&mut self, id: &str) -> Ended {
        let ended = self.ended(id, PATIENCE / 2);
        ended.unwrap_or_else(|| panic!("{id} never ends"))
    }

    pub(crate) fn assert_emptied(&mut self) {
        self.emptied(PATIENCE / 2).expect("all blocks are given back");
    }

    /// Waits until nothing is held. After the timeout, returns what still is.
    pub(crate) fn emptied(&mut self, time: Duration) -> Result<(), Status> {
        let until = Instant::now() + time;
        loop {
            if self.setup.manual {
                self.steps(1);
            }
            let status = self.status();
            assert_eq!(status.violations, Vec::<String>::new());
            if status.leak.is_empty() && status.left.is_empty() {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(status);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for EngineProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
