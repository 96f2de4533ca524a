//! One engine in a process of its own: reads commands, writes events.
//!
//! The engine steps while it has something to compute. While all its requests wait for transfers, it
//! sleeps until a worker half has something to report ([`WorkerObserver`]), or a command arrives.

use kvferry_sys::sync::Mutex;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender, TryRecvError};
use std::time::{Duration, Instant};

use kvferry::{Agent, Transports};
use kvferry_connector::{ReadPart, WireCode, WorkerObserver};
use kvferry_refengine::kvferry_adapter::{GpuMemory, KvferryAdapter, KvferryAdapterConfig};
use kvferry_refengine::{Connector, Engine, FinishReason, Output, Rank, Request, RequestId};

use kvferry_bench::child;
use kvferry_bench::failure::Failure;
use kvferry_bench::layer_times::LayerTimes;
use kvferry_bench::lines::{Answer, Lines};
use kvferry_bench::machine::shared_clock;

use super::messages::{Command, Ended, Event, Part, RequestOutput, Setup, Submit};

/// Steps that compute nothing before the engine sleeps: a step may act on reports of the one before.
const IDLE_STEPS: u32 = 2;

/// The longest sleep of an engine with live requests. It bounds the cost of a wake-up that is missing.
const NAP: Duration = Duration::from_millis(100);

/// Time limit of an engine at the end, to release everything.
pub(super) const LEAVING: Duration = Duration::from_secs(8);

/// `kvferry demo-engine`.
pub(crate) fn run() -> Result<(), Failure> {
    child::die_with_parent()?;
    let (wake, wakes) = mpsc::channel();
    let mut out = Lines::new(io::empty(), io::stdout());
    let commands = wake.clone();
    std::thread::spawn(move || hear(&commands));
    let outcome = serve(&wake, &wakes, &mut out);
    match outcome {
        Ok(()) => Ok(()),
        // The router prints the failure; an exit code could not carry it.
        Err(failure) => {
            out.send::<Answer<Event>>(&Err(failure))?;
            // The agents stay alive for their peers until the router ends this process.
            while !matches!(wakes.recv(), Ok(Wake::Closed) | Err(_)) {}
            Ok(())
        }
    }
}

/// Passes commands on until the router closes its end.
fn hear(wake: &Sender<Wake>) {
    let mut input = Lines::new(io::stdin(), io::sink());
    loop {
        let heard = match input.receive() {
            Ok(Some(command)) => Wake::Command(command),
            Ok(None) | Err(_) => Wake::Closed,
        };
        let is_over = matches!(heard, Wake::Closed);
        if wake.send(heard).is_err() || is_over {
            return;
        }
    }
}

/// Event that wakes an engine.
enum Wake {
    Command(Command),
    Closed,
    /// An event for the router; does not concern the engine.
    Event(Event),
    /// A worker half has something to report.
    Reported,
}

type Out = Lines<io::Empty, io::Stdout>;

fn serve(wake: &Sender<Wake>, wakes: &Receiver<Wake>, out: &mut Out) -> Result<(), Failure> {
    let setup = match wakes.recv() {
        Ok(Wake::Command(Command::Open(setup))) => setup,
        Ok(Wake::Closed) | Err(_) => return Ok(()),
        Ok(_) => return Err(Failure::Failed("the first command to an engine must be Open".into())),
    };
    let mut node = Node::open(&setup, wake)?;
    give_way();
    out.send::<Answer<Event>>(&Ok(Event::Ready {
        address: node.kvferry_adapter.address(0).to_string(),
    }))?;
    node.serve(wakes, out)
}

/// Lowers the priority of this thread, whose work a GPU would do, below that of the threads that move
/// bytes. They have been started before.
fn give_way() {
    const BY: i32 = 10;
    // If the kernel refuses, the demo is only slower.
    let _ = rustix::process::nice(BY);
}

struct Node {
    engine: Engine,
    kvferry_adapter: KvferryAdapter,
    times: Arc<LayerTimes>,
    /// Requests in whose KV a byte must be flipped.
    flips: HashSet<RequestId>,
    leaving: Option<Instant>,
}

impl Node {
    fn open(setup: &Setup, wake: &Sender<Wake>) -> Result<Node, Failure> {
        let ranks = setup.config.ranks();
        let transports = Transports::parse(&setup.transports)?;
        let agent = |rank: &Rank| {
            let name = format!("{}-{rank}", setup.name);
            let builder = Agent::builder().name(name).listen(([127, 0, 0, 1], 0));
            builder.transports(transports).start()
        };
        let agents = ranks.iter().map(agent).collect::<Result<Vec<_>, _>>()?;
        if let Some(device) = setup.gpu {
            GpuMemory::new(&agents[0], device, 1)
                .map_err(|error| Failure::Usage(format!("--device cuda:{device}: {error}")))?;
        }
        let config = KvferryAdapterConfig {
            timeout: Duration::from_millis(setup.timeout_ms),
            announce: setup.announce.into(),
            gpu: setup.gpu,
            ..KvferryAdapterConfig::default()
        };
        let kvferry_adapter = KvferryAdapter::new(&setup.config, agents, config);
        let connector = Connector::Vllm(kvferry_adapter.vllm());
        let mut engine = Engine::new(setup.config.clone(), connector)
            .map_err(|error| Failure::Usage(format!("{}: {error}", setup.name)))?;
        let times = LayerTimes::of(&mut engine);
        for rank in 0..ranks.len() {
            kvferry_adapter.set_observer(rank, Arc::new(Bell(Mutex::new(wake.clone()))));
        }
        Ok(Node { engine, kvferry_adapter, times, flips: HashSet::new(), leaving: None })
    }

    fn serve(&mut self, wakes: &Receiver<Wake>, out: &mut Out) -> Result<(), Failure> {
        let mut idle_steps = 0;
        loop {
            while let Some(wake) = self.next(wakes, &mut idle_steps) {
                match wake {
                    Wake::Command(command) => {
                        idle_steps = 0;
                        self.apply(command)?;
                    }
                    Wake::Closed => return Ok(()),
                    Wake::Event(event) => out.send::<Answer<Event>>(&Ok(event))?,
                    Wake::Reported => idle_steps = 0,
                }
            }
            if self.engine.has_work() {
                let step = self.engine.step();
                let report = step.map_err(|error| Failure::Check(error.to_string()))?;
                idle_steps = if report.tokens > 0 { 0 } else { idle_steps + 1 };
                for output in self.engine.take_outputs() {
                    let said = self.said(output);
                    out.send::<Answer<Event>>(&Ok(Event::Output(said)))?;
                }
            }
            if let Some(held) = self.left() {
                out.send::<Answer<Event>>(&Ok(Event::Left { held }))?;
            }
        }
    }

    /// The next wake-up, or `None` if the engine has to step.
    fn next(&mut self, wakes: &Receiver<Wake>, idle_steps: &mut u32) -> Option<Wake> {
        if !self.engine.has_work() && self.leaving.is_none() {
            return Some(wakes.recv().unwrap_or(Wake::Closed));
        }
        if *idle_steps < IDLE_STEPS {
            return match wakes.try_recv() {
                Ok(wake) => Some(wake),
                Err(TryRecvError::Empty) => None,
                Err(TryRecvError::Disconnected) => Some(Wake::Closed),
            };
        }
        match wakes.recv_timeout(NAP) {
            Ok(wake) => Some(wake),
            Err(RecvTimeoutError::Timeout) => {
                *idle_steps = IDLE_STEPS - 1;
                None
            }
            Err(RecvTimeoutError::Disconnected) => Some(Wake::Closed),
        }
    }

    fn apply(&mut self, command: Command) -> Result<(), Failure> {
        match command {
            Command::Open(_) => return Err(Failure::Failed("an engine gets Open once".into())),
            Command::Submit(Submit { id, prompt, max_tokens, params, flip }) => {
                let request = Request::new(id, prompt, max_tokens).with_params(params);
                if flip {
                    self.flips.insert(request.id.clone());
                }
                let id = request.id.clone();
                let submitted = self.engine.submit(request);
                submitted.map_err(|error| Failure::Failed(format!("{id}: {error}")))?;
            }
            Command::Abort { id } => {
                // The request may have ended.
                self.engine.abort(&RequestId::from(id));
            }
            Command::Finish => self.leaving = Some(Instant::now() + LEAVING),
        }
        Ok(())
    }

    fn said(&mut self, output: Output) -> RequestOutput {
        if self.flips.remove(&output.id) {
            self.flip(&output.id);
        }
        let ended = output.finished.map(|finished| {
            let failure = match finished.reason {
                FinishReason::Length | FinishReason::Stop => None,
                FinishReason::Abort => Some("it was aborted".to_string()),
                FinishReason::Error => Some("its KV could not be loaded".to_string()),
            };
            Ended { failure, params: finished.params }
        });
        let (id, tokens) = (output.id.into(), output.tokens);
        RequestOutput { id, tokens, ended, computed_ns: self.times.ended() }
    }

    /// Damages one byte in the middle of a request that has been computed and is held.
    fn flip(&self, id: &RequestId) {
        let Some(tables) = self.engine.blocks(id) else { return };
        let caches = self.engine.caches(Rank { pp: 0, tp: 0 });
        let layer = &caches.layout.layers[caches.layout.layers.len() / 2];
        let block = tables[layer.group][tables[layer.group].len() / 2];
        let mut row = caches.row(layer, 0, block, 0, 0);
        let middle = row.len() / 2;
        row[middle] ^= 0x40;
        caches.set_row(layer, 0, block, 0, 0, &row);
    }

    /// Returns what is still held, once all requests have ended or [`LEAVING`] is over.
    fn left(&mut self) -> Option<Vec<String>> {
        let until = self.leaving?;
        let held = self.held();
        let is_over = held.is_empty() && !self.engine.has_work();
        if !is_over && Instant::now() < until {
            // The ranks' last messages cause no event.
            std::thread::sleep(Duration::from_millis(2));
            return None;
        }
        self.leaving = None;
        Some(held)
    }

    fn held(&self) -> Vec<String> {
        /// Gauges that stay above zero: records of peers and of past handoffs.
        const STAYS: [&str; 4] = ["tombstones", "peers", "engines", "farewells"];
        let mut held: Vec<String> =
            self.engine.check_empty().err().into_iter().map(|leak| leak.to_string()).collect();
        let gauges = self.kvferry_adapter.gauges().into_iter();
        let counted =
            gauges.filter(|(name, n)| *n > 0 && !STAYS.iter().any(|it| name.ends_with(it)));
        held.extend(counted.map(|(name, n)| format!("{name}: {n}")));
        held
    }
}

/// Wakes the engine, and records the times of events.
struct Bell(Mutex<Sender<Wake>>);

impl Bell {
    fn ring(&self, wake: Wake) {
        // The receiver is gone when the engine ends.
        let _ = self.0.lock().send(wake);
    }
}

impl WorkerObserver for Bell {
    fn received(&self, request: &str, code: WireCode, detail: &str) {
        let failure = (!code.is_ok()).then(|| format!("{code}: {detail}"));
        let (id, at_ns) = (request.to_string(), nanoseconds(shared_clock()));
        self.ring(Wake::Event(Event::Received { id, at_ns, failure }));
        self.ring(Wake::Reported);
    }

    fn sent(&self, _request: &str) {
        self.ring(Wake::Reported);
    }

    fn read(&self, request: &str, part: ReadPart) {
        let now = shared_clock();
        let on_clock = |at: Instant| nanoseconds(now.saturating_sub(at.elapsed()));
        let (began_ns, ended_ns) = (on_clock(part.began), on_clock(part.ended));
        let part = Part { bytes: part.bytes, began_ns, ended_ns };
        self.ring(Wake::Event(Event::Read { id: request.to_string(), part }));
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
