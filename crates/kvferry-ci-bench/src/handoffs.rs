//! Wake-ups of threads for a handoff of one block, step by step: how often each thread of the agent and
//! of the connector went to sleep, which the kernel counts. Engines' own threads are not counted: they
//! look for reports once per step.
//!
//! What a handoff of one block over TCP needs, if the consumer asks before the block is computed:
//!
//! | step | on the thread | woken by |
//! |---|---|---|
//! | the consumer asks | consumer's engine | |
//! | the producer learns of it, and says that it has | producer's control | the peer |
//! | the consumer takes note | consumer's control | the peer |
//! | the block is computed: the producer announces it | producer's engine | |
//! | the consumer begins to read | consumer's control | the peer |
//! | the read is added to a thread that waits for its bytes, and asks for them | consumer's I/O | consumer's control |
//! | the producer sends the bytes | producer's I/O | the peer |
//! | the bytes arrive; the consumer asks for confirmation | consumer's I/O | the peer, unless it still polls |
//! | the producer confirms and is done | producer's control | the peer |
//! | the consumer is done | consumer's control | the peer |
//!
//! So within a process one thread wakes another once, and otherwise each message wakes the thread that
//! does what follows from it: 8 wake-ups. Each message is answered, too; an answer leaves behind the next
//! message, or after a while with those that have waited with it, which is another wake-up on each side.
//! The rank's thread only keeps the time.

use crate::Failure;
use crate::kept::Figures;
use crate::target::agent;
use kvferry::{Access, Agent, Region};
use kvferry_connector::{
    Announce, BlockTable, Compute, ConnectorMetadata, Ending, EndingKind, EngineId, EngineMetadata,
    FetchRequest, HandoffId, Limits, Model, Offer, Worker, WorkerConfig,
};
use kvferry_models::engines::layout;
use kvferry_proto::layout::{Heads, Packing, Shape};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Stdio};
use std::time::Duration;

const TRANSPORTS: &[&str] = &["tcp", "local"];
const TOKENS: u32 = 128;
const LAYERS: u32 = 8;
const BLOCKS: u32 = 4;
/// Threads by the beginnings of their names.
const THREADS: [(&str, &str); 3] =
    [("control", "kvferry-control"), ("I/O", "kvferry-io"), ("rank", "kvferry-handoff")];
const WARM_UP: usize = 10;
const ROUNDS: usize = 51;
/// Longer than what follows from a call takes.
const SETTLED: Duration = Duration::from_millis(5);
const PATIENCE: Duration = Duration::from_secs(30);

/// An engine of one rank that computes nothing.
struct Half {
    _agent: Agent,
    _memory: Region,
    worker: Worker,
    address: String,
}

impl Half {
    fn start(name: &str, transport: &str) -> Result<Self, Failure> {
        let agent = agent(name, transport)?;
        let shape = Shape {
            layers: LAYERS,
            blocks: BLOCKS,
            heads: 8,
            rows: TOKENS,
            content: 64,
            kernel_blocks: 1,
        };
        let bytes = shape.bytes().ok_or("the shape is too large")?;
        let memory = agent.allocate_private(usize::try_from(bytes)?, Access::READ)?;
        let layout = layout(memory.id(), Heads::all(shape.heads), &shape, Packing::Lbhnc);
        let (model, limits) = (Model::default(), Limits::default());
        let config =
            WorkerConfig { rank: 0, model, announce: Announce::Chunks, limits, producers: None };
        let worker = Worker::start(&agent, layout, std::slice::from_ref(&memory), config)?;
        let address = agent.advertised().to_owned();
        let half = Self { _agent: agent, _memory: memory, worker, address };
        let ranks = vec![half.worker.rank_metadata().to_vec().into()];
        let id = EngineId(u128::from(std::process::id()));
        half.apply(ConnectorMetadata {
            engine: Some(EngineMetadata { id, ranks }),
            ..ConnectorMetadata::default()
        })?;
        Ok(half)
    }

    fn apply(&self, metadata: ConnectorMetadata) -> Result<(), Failure> {
        Ok(self.worker.apply(&metadata.encode())?)
    }

    fn offer(&self, request: &str) -> Result<(), Failure> {
        let offer = Offer { transfer: HandoffId::new(request)?, tokens: TOKENS, eager: true };
        let blocks = vec![BlockTable::new(0, vec![1])];
        let (request, offer) = (request.to_owned(), Some(offer));
        let computes = vec![Compute { request, offer, until: TOKENS, blocks }];
        self.apply(ConnectorMetadata { computes, ..ConnectorMetadata::default() })
    }

    /// The step computes what was offered, and the request ends.
    fn compute(&self, request: &str) -> Result<(), Failure> {
        self.worker.step_computed(None);
        let (transfer, how) = (HandoffId::new(request)?, EndingKind::Held { side_data: None });
        let endings = vec![Ending { request: request.to_owned(), transfer, how }];
        self.apply(ConnectorMetadata { endings, ..ConnectorMetadata::default() })
    }

    fn fetch(&self, request: &str, from: &str) -> Result<(), Failure> {
        let fetches = vec![FetchRequest {
            request: request.to_owned(),
            transfer: HandoffId::new(request)?,
            address: from.parse().expect("the address of an agent"),
            engine: None,
            tokens: (0, TOKENS),
            blocks: vec![BlockTable::new(0, vec![2])],
            budget_ms: PATIENCE.as_millis() as u32,
        }];
        self.apply(ConnectorMetadata { fetches, ..ConnectorMetadata::default() })?;
        self.worker.fetch();
        Ok(())
    }

    fn ended(&self) -> Result<(), Failure> {
        let reports = if self.worker.wait(PATIENCE) {
            self.worker.reports()
        } else {
            return Err("a handoff does not end".into());
        };
        if reports.failed.is_empty() { Ok(()) } else { Err("a handoff failed".into()) }
    }
}

/// Number of times that each thread of this process has gone to sleep.
type Sleeps = BTreeMap<String, u64>;

fn sleeps() -> Result<Sleeps, Failure> {
    let mut sleeps = Sleeps::new();
    for task in std::fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        let name = std::fs::read_to_string(task.join("comm"))?;
        let status = std::fs::read_to_string(task.join("status"))?;
        let count = status.lines().find_map(|it| it.strip_prefix("voluntary_ctxt_switches:"));
        let count: u64 = count.ok_or("the kernel does not count switches")?.trim().parse()?;
        let thread = THREADS.iter().find(|(_, begin)| name.starts_with(begin));
        if let Some((what, _)) = thread {
            *sleeps.entry((*what).to_owned()).or_default() += count;
        }
    }
    Ok(sleeps)
}

/// The producer: offers and computes what each line names, then answers how often its threads slept.
pub(crate) fn produce(transport: &str) -> Result<(), Failure> {
    let half = Half::start("producer", transport)?;
    println!("{}", half.address);
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = match line.split_once(' ').ok_or("a line has two words")? {
            ("offer", request) => half.offer(request).map(|()| Sleeps::new()),
            ("compute", request) => {
                half.compute(request).and_then(|()| half.ended()).map(|()| Sleeps::new())
            }
            _ => sleeps(),
        };
        println!("{}", serde_json::to_string(&answer?)?);
    }
    Ok(())
}

/// Counts a handoff over each transport.
pub(crate) fn count() -> Result<Figures, Failure> {
    let mut figures = Figures::default();
    for transport in TRANSPORTS {
        let [consumer, producer] = over(transport)?;
        for (side, rounds) in [("consumer", consumer), ("producer", producer)] {
            let mut said = Vec::new();
            for (thread, _) in THREADS {
                let mut counts: Vec<u64> =
                    rounds.iter().map(|it| it.get(thread).copied().unwrap_or_default()).collect();
                counts.sort_unstable();
                let median = counts[counts.len() / 2];
                said.push(format!("{thread} {median}"));
                figures.set(
                    &format!(
                        "{transport} handoff of one block, {side}, {thread} threads: wake-ups"
                    ),
                    median,
                );
            }
            println!("{transport} handoff of one block, {side}: wake-ups: {}", said.join(", "));
        }
    }
    Ok(figures)
}

/// Wake-ups of each round, of the consumer and of the producer.
fn over(transport: &str) -> Result<[Vec<Sleeps>; 2], Failure> {
    let mut child = Command::new(std::env::current_exe()?)
        .args(["producer", transport])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut ask = child.stdin.take().ok_or("no pipe")?;
    let mut answers = BufReader::new(child.stdout.take().ok_or("no pipe")?);
    let mut address = String::new();
    answers.read_line(&mut address)?;
    let half = Half::start("consumer", transport)?;
    let mut tell = |line: String| -> Result<Sleeps, Failure> {
        writeln!(ask, "{line}")?;
        let mut answer = String::new();
        answers.read_line(&mut answer)?;
        Ok(serde_json::from_str(&answer)?)
    };
    let mut rounds = [Vec::new(), Vec::new()];
    for round in 0..WARM_UP + ROUNDS {
        let request = format!("request-{round}");
        let before = [sleeps()?, tell("count all".to_owned())?];
        half.fetch(&request, address.trim())?;
        std::thread::sleep(SETTLED);
        tell(format!("offer {request}"))?;
        std::thread::sleep(SETTLED);
        tell(format!("compute {request}"))?;
        half.ended()?;
        std::thread::sleep(SETTLED);
        let after = [sleeps()?, tell("count all".to_owned())?];
        if round < WARM_UP {
            continue;
        }
        for (rounds, (before, after)) in rounds.iter_mut().zip(before.into_iter().zip(after)) {
            let since = |(thread, count): (String, u64)| {
                let before = before.get(&thread).copied().unwrap_or_default();
                (thread, count - before)
            };
            rounds.push(after.into_iter().map(since).collect());
        }
    }
    drop((half, ask));
    child.wait()?;
    Ok(rounds)
}
