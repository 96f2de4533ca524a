//! What can be typed, and the help that teaches it.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::{Deserialize, Serialize};

use crate::doctor::helper::Probe;
use crate::model::{Dtype, Model};
use crate::units::parse_bytes;

const EXAMPLES_AND_EXIT_CODES: &str = "\
Start with:
  kvferry demo                  see it hand KV cache from engines to engines, in half a minute
  kvferry doctor                what this host can do, and what it lacks
  kvferry bench --quick         how fast, beside plain TCP
  kvferry bench --help          every subcommand has examples

Exit codes:
  0  all is well
  1  a byte or token was wrong, a request of a demo failed, a figure fell short under --check,
     or the doctor found something bad
  2  the command line cannot be understood
  3  the peer cannot be reached, or refuses us
  4  a transfer or a helper process failed

Agents take their settings from the environment too: KVFERRY_SECRET, KVFERRY_TRANSPORTS,
KVFERRY_IO_THREADS, KVFERRY_STREAMS, KVFERRY_SILENCE_MS.";

/// kvferry moves KV cache for LLM serving. This is its workbench: see it move, measure how fast.
#[derive(Debug, Parser)]
#[command(name = "kvferry", version, after_help = EXAMPLES_AND_EXIT_CODES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Hand KV cache from prefill to decode engines and check every token
    Demo(Box<DemoArgs>),
    /// Measure transfers beside what plain TCP reaches in the same rounds
    Bench(Box<BenchArgs>),
    /// Measure what handoffs cost beyond moving their bytes; exit code 1 if it is too much
    BenchHandoff(BenchHandoffArgs),
    /// Say what this host can do and why not; or what an agent elsewhere is like from here
    Doctor(DoctorArgs),
    /// Print the version
    Version {
        /// For programs
        #[arg(long)]
        json: bool,
    },
    /// The decode process of a demo without engines, commanded over its standard input
    #[command(hide = true)]
    DemoDecode,
    /// An engine of a demo, commanded over its standard input
    #[command(hide = true)]
    DemoEngine,
    /// The target process of a bench on one host
    #[command(hide = true)]
    BenchTarget {
        /// The only core to run on
        #[arg(long)]
        core: Option<usize>,
    },
    /// The producing process of a handoff that is measured
    #[command(hide = true)]
    BenchHandoffProducer,
    /// The prefill engine of a handoff that is measured
    #[command(hide = true)]
    BenchHandoffPrefill,
    /// Memory of another process, for the machine's limit to be measured with
    #[command(hide = true)]
    BenchMemory {
        /// How much
        #[arg(long)]
        bytes: usize,
    },
    /// A helper of the doctor
    #[command(hide = true)]
    DoctorProbe {
        /// What to try
        #[arg(value_enum)]
        probe: Probe,
    },
}

const DOCTOR_EXAMPLES: &str = "\
Examples:
  kvferry doctor                       this host: kernel, memory, network, RDMA, CUDA
  kvferry doctor 10.0.0.7:18515        an agent there: reachable, secret, transports, how fast
  kvferry doctor --json | jq '.groups[].findings[] | select(.mark != \"ok\")'

Run it where the engine runs: in the same container, as the same user, with the same KVFERRY_
variables. Each line has a mark: ok; note, it works but could be better or is worth knowing;
missing, something optional is not there; bad, something that kvferry was told to use does not
work. What can be done about a line is on the next one, after an arrow.

An agent elsewhere is asked for what it tells every peer. Its memory is never written; reads are
measured on memory that it lets its peers read, 64 MiB at a time for a second (--no-bandwidth
leaves that out). Writes are measured at a `kvferry bench --serve`, which has memory for that.

Secrets and configurations are never shown. --json prints one object, schema kvferry.doctor/1:
version, target, worst, counts, and groups of findings: id, subject, mark, finding, fix, facts.

Exit codes:
  0  nothing is bad
  1  something is bad, or the agent cannot be reached or refuses us
  2  the command line cannot be understood";

/// What this host can do and why not. With HOST:PORT: whether an agent there can be reached from
/// here, over which transports, and how fast.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = DOCTOR_EXAMPLES)]
pub(crate) struct DoctorArgs {
    /// An agent, or a `kvferry bench --serve`
    #[arg(value_name = "HOST:PORT")]
    pub(crate) target: Option<String>,
    /// Seconds that each step with HOST:PORT may take
    #[arg(long, default_value_t = 5, value_name = "SECONDS", requires = "target",
          value_parser = clap::value_parser!(u16).range(1..=600))]
    pub(crate) timeout: u16,
    /// Do not measure bandwidth
    #[arg(long, requires = "target")]
    pub(crate) no_bandwidth: bool,
    /// Print the findings as JSON
    #[arg(long)]
    pub(crate) json: bool,
}

const DEMO_EXAMPLES: &str = "\
Examples:
  kvferry demo                                     two prefill engines of TP 2, a decode engine of TP 4
  kvferry demo --prefill-tp 4 --decode 2 --decode-tp 1 --transport tcp
  kvferry demo --flow sequential --announce end    nothing is pushed while prefill computes
  kvferry demo --sizes 64,4096 --requests 20 --plot demo.html
  kvferry demo --json --quiet | jq .sizes          for a program
  kvferry demo --without-engines --model deepseek-v3 --dtype fp8
  kvferry demo --list-models                       what can be named there

Every engine is a process with a small model, a paged KV cache and a scheduler, driven as vLLM drives
its own, with an agent per rank. This process is the router: it gives each request to a prefill and to
a decode engine, at once with one transfer_id (concurrent), or to decode what prefill responded
(sequential). The model is of integers, and every byte of KV that a token may see goes into it: a wrong
byte is a wrong token. The tokens of every request are compared with what the model says without any
engine, cache or handoff. At the end no engine may hold a request, a block or a transfer.

Columns: latency is from the moment at which prefill has computed the last layer to the moment at which
the last decode rank knows that it has everything. Exposed is that as a part of the whole transfer,
which begins with the first read. Throughput is the request's bytes by the time in which any of them
were being read; beside it what this machine reaches by itself, with nothing else running: bytes of the
same block size, by process_vm_readv (local) or over loopback (tcp), on as many threads as ranks read,
and at most one per core. Caches are in memory that agents allocated: within a host that is copied from
directly, which can be faster than process_vm_readv.

Without engines: a decode process is started beside this one, which plays prefill. Each has a paged KV
pool of the model's shape: one region per layer, requests scattered over its blocks in random order.
Before a round the decode process poisons its whole pool; prefill then writes all requests; decode
digests what it holds, and checks that the blocks of no request still hold the poison.";

const ENGINES: &str = "With engines";
const WITHOUT: &str = "Without engines";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = DEMO_EXAMPLES)]
pub(crate) struct DemoArgs {
    /// How many requests, of all sizes in turn; without engines, in a round [default: 96, or 8]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) requests: Option<u32>,
    /// Requests in flight at once [default: two per prefill engine, or 8]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) concurrency: Option<u32>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar and no remarks
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Flip one byte of a prefill's cache after it was computed: the demo must notice
    #[arg(long, hide = true)]
    pub(crate) inject_fault: bool,
    #[command(flatten)]
    pub(crate) engines: EngineArgs,
    /// Move the caches of a named model between two processes without engines
    #[arg(long, help_heading = WITHOUT)]
    pub(crate) without_engines: bool,
    /// Whose KV cache
    #[arg(long, default_value = "llama-3.1-8b", value_parser = Model::find,
          requires = "without_engines", help_heading = WITHOUT)]
    pub(crate) model: Model,
    /// Length of each prompt
    #[arg(long, default_value_t = 2048, value_parser = clap::value_parser!(u32).range(1..),
          requires = "without_engines", help_heading = WITHOUT)]
    pub(crate) tokens: u32,
    /// How often, each time with new contents and block tables
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=10_000),
          requires = "without_engines", help_heading = WITHOUT)]
    pub(crate) rounds: u32,
    /// Tokens in a block of the paged pool
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=4096),
          help_heading = WITHOUT)]
    pub(crate) block_tokens: u32,
    /// What the cache is stored as
    #[arg(long, value_enum, default_value = "bf16", help_heading = WITHOUT)]
    pub(crate) dtype: Dtype,
    /// Most memory both pools may take; never more than 60 % of what the machine has free
    #[arg(long, default_value = "4GiB", value_parser = parse_bytes, value_name = "SIZE",
          requires = "without_engines", help_heading = WITHOUT)]
    pub(crate) memory: u64,
    /// List the models that can be named, and leave
    #[arg(long, help_heading = WITHOUT)]
    pub(crate) list_models: bool,
}

/// What a demo with engines can be told.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = ENGINES)]
pub(crate) struct EngineArgs {
    /// Prefill engines, a process each
    #[arg(long, default_value_t = 2, value_name = "N", conflicts_with = "without_engines",
          value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) prefill: u32,
    /// Decode engines, a process each
    #[arg(long, default_value_t = 1, value_name = "M", conflicts_with = "without_engines",
          value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) decode: u32,
    /// TP ranks of a prefill engine: 1, 2, 4 or 8
    #[arg(long, default_value_t = 2, value_name = "RANKS", conflicts_with = "without_engines",
          value_parser = ranks)]
    pub(crate) prefill_tp: u32,
    /// TP ranks of a decode engine: 1, 2, 4 or 8
    #[arg(long, default_value_t = 4, value_name = "RANKS", conflicts_with = "without_engines",
          value_parser = ranks)]
    pub(crate) decode_tp: u32,
    /// How KV moves
    #[arg(long, value_enum, default_value = "local", conflicts_with = "without_engines")]
    pub(crate) transport: DemoTransport,
    /// Prompt lengths in tokens, 32 KiB of KV each
    #[arg(long, default_value = "32,128,512,2048", value_delimiter = ',', value_name = "TOKENS",
          conflicts_with = "without_engines",
          value_parser = clap::value_parser!(u32).range(1..=32_768))]
    pub(crate) sizes: Vec<u32>,
    /// Who is given a request when
    #[arg(long, value_enum, default_value = "concurrent", conflicts_with = "without_engines")]
    pub(crate) flow: Flow,
    /// When prefill says that something is ready: while a chunk is computed, after it, at the end
    #[arg(long, value_enum, default_value = "layers", conflicts_with = "without_engines")]
    pub(crate) announce: AnnounceWhen,
    /// Write the figures, drawn, into this HTML file
    #[arg(long, value_name = "FILE", conflicts_with = "without_engines")]
    pub(crate) plot: Option<PathBuf>,
}

/// Which transport the engines of a demo use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DemoTransport {
    /// Copies between the memories of processes of one host
    Local,
    /// TCP, over loopback
    Tcp,
}

impl DemoTransport {
    pub(crate) fn name(self) -> &'static str {
        match self {
            DemoTransport::Local => "local",
            DemoTransport::Tcp => "tcp",
        }
    }
}

/// In which order a router gives a request to the two engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Flow {
    /// To both at once
    Concurrent,
    /// To decode what prefill responded
    Sequential,
}

impl Flow {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Flow::Concurrent => "concurrent",
            Flow::Sequential => "sequential",
        }
    }
}

/// How much of a prefill is said to be ready when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AnnounceWhen {
    /// Half of the layers of each chunk at a time
    Layers,
    /// Each chunk
    Chunks,
    /// Everything at once
    End,
}

impl AnnounceWhen {
    pub(crate) fn name(self) -> &'static str {
        match self {
            AnnounceWhen::Layers => "layers",
            AnnounceWhen::Chunks => "chunks",
            AnnounceWhen::End => "end",
        }
    }
}

/// As many ranks as the heads of the demo's model can be shared among.
fn ranks(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(ranks @ (1 | 2 | 4 | 8)) => Ok(ranks),
        _ => Err("the heads of the model can be shared among 1, 2, 4 or 8 ranks".to_string()),
    }
}

const BENCH_EXAMPLES: &str = "\
Examples:
  kvferry bench                                two processes on this host, some minutes
  kvferry bench --quick                        the same in less than one, too short to judge by
  kvferry bench --transport tcp --op write --sizes 32KiB:1024 --streams auto,1,4
  kvferry bench --only throughput --model llama-3.1-8b --tokens 4096 --requests 2
  kvferry bench --only throughput --trace blocks.jsonl --plot report
  kvferry bench --only latency --rounds 15
  kvferry bench --faults --check               with dying peers; exit code 1 if a figure falls short
  kvferry bench --serve --listen 10.0.0.5:7400         on one host, and on the other
  kvferry bench --target 10.0.0.5:7400 --json

Every figure stands beside others taken in the same rounds, in turn: what plain programs reach that
do the same work with nothing around it. Over TCP they are `raw`, one stream sending 256 MiB in calls
of 1 MiB, `raw x 4`, the same over four streams at once, and `floor`: one message per batch over one
socket with vectored I/O, its call size and socket buffers chosen by trial. Within a host they are
`process_vm`, which is process_vm_writev or readv with the same table, and `memcpy` within one process.
Ratios are taken round by round; their median and quartiles are shown. Nothing is verified while the
clock runs; each configuration is verified before and after, with a poisoned destination.

A trace has one batch per line, in either form; offsets are into the two processes' memory:
  [[LOCAL_OFFSET, REMOTE_OFFSET, LENGTH], ...]
  {\"block_bytes\": 65536, \"local\": [7, 3], \"remote\": [12, 40]}

--peers measures Mooncake and NIXL in the same rounds, from Python processes; `make bench-peers` makes
the environment they need. Processes of whom it is not the turn are stopped (SIGSTOP), for some spin
as long as they live.

With KVFERRY_SECRET set, --serve takes orders only from those who hold the secret; without it, from
whoever connects. What it listens on is where its agent listens too.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = BENCH_EXAMPLES)]
pub(crate) struct BenchArgs {
    /// Be the target of a bench on another host, until interrupted
    #[arg(long, conflicts_with = "target")]
    pub(crate) serve: bool,
    /// Where --serve listens
    #[arg(long, default_value = "127.0.0.1:7400", requires = "serve", value_name = "ADDRESS:PORT")]
    pub(crate) listen: SocketAddr,
    /// A `kvferry bench --serve` on another host, instead of a second process here
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) target: Option<String>,
    /// Transports, each measured by itself; `auto` is what the two agents choose
    /// [default: tcp,local; with --target: auto]
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    pub(crate) transport: Vec<String>,
    /// What to move
    #[arg(long, value_enum, value_delimiter = ',', default_value = "write,read")]
    pub(crate) op: Vec<Op>,
    /// Block size and blocks per batch [default: 4KiB:1024,32KiB:1024,256KiB:256,1MiB:256,16MiB:16,
    /// unless --model or --trace is given]
    #[arg(long, value_delimiter = ',', value_name = "BLOCK:COUNT")]
    pub(crate) sizes: Vec<Size>,
    /// Move requests of this model: one batch has every block of every layer of a request
    #[arg(long, value_parser = Model::find)]
    pub(crate) model: Option<Model>,
    /// Length of each request of --model
    #[arg(long, default_value_t = 2048, requires = "model", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) tokens: u32,
    /// Requests of --model
    #[arg(long, default_value_t = 1, requires = "model", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub(crate) requests: u32,
    /// Tokens in a block of --model
    #[arg(long, default_value_t = 16, requires = "model", value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(crate) block_tokens: u32,
    /// What the cache of --model is stored as
    #[arg(long, value_enum, default_value = "bf16", requires = "model")]
    pub(crate) dtype: Dtype,
    /// Move the batches of this file, one per line (see below)
    #[arg(long, value_name = "FILE")]
    pub(crate) trace: Option<PathBuf>,
    /// Streams a batch is striped over; `auto` leaves it to the agent
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    pub(crate) streams: Vec<Streams>,
    /// Checksums of the payload over TCP
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) checksums: Checksums,
    /// Concurrent callers; the total of each number is compared with one caller's
    #[arg(long, value_delimiter = ',', default_value = "1,10")]
    pub(crate) callers: Vec<Callers>,
    /// Cores for the two processes of a latency measurement on one host [default: apart,together]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) placement: Vec<Placement>,
    /// Rounds; seven or more to judge by [default: 11, with --peers 7, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: Option<u32>,
    /// Parts to run [default: all but faults]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) only: Vec<Part>,
    /// Add what happens when a peer is killed or stopped
    #[arg(long)]
    pub(crate) faults: bool,
    /// A Python interpreter with a stock Mooncake, to have faulty peers of that kind, too
    #[arg(long, value_name = "PATH", requires = "faults")]
    pub(crate) stock: Option<PathBuf>,
    /// The Python interpreter whose calls are measured [default: the virtual environment's, else
    /// .venv/bin/python or python3, if it has kvferry]
    #[arg(long, value_name = "PATH")]
    pub(crate) python: Option<PathBuf>,
    /// A Python interpreter with Mooncake, NIXL and `kvferry_peers`, to measure them beside kvferry
    #[arg(long, value_name = "PATH", conflicts_with = "target")]
    pub(crate) peers: Option<PathBuf>,
    /// Small and short
    #[arg(long)]
    pub(crate) quick: bool,
    /// Exit with 1 if a figure falls short of what it must reach
    #[arg(long)]
    pub(crate) check: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Write the result as JSON to this file, too
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Show, judge and draw what --output wrote, instead of measuring
    #[arg(long, value_name = "FILE")]
    pub(crate) from: Option<PathBuf>,
    /// Write one SVG per figure and `report.html`, which needs nothing else, to this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) plot: Option<PathBuf>,
    /// No progress bar and no remarks
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

const BENCH_HANDOFF_EXAMPLES: &str = "\
Examples:
  kvferry bench-handoff                         everything, some minutes
  kvferry bench-handoff --only exposed --transport tcp
  kvferry bench-handoff --quick --json          short, too short to judge by

Producer and consumer are two processes of this host. Every figure that has a bound is judged by its
median; the others are shown beside them. The device of a prefill is a timer: computing takes time and
no processor, as beside a GPU.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = BENCH_HANDOFF_EXAMPLES)]
pub(crate) struct BenchHandoffArgs {
    /// What to measure [default: everything]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) only: Vec<Measure>,
    /// Transports, each measured by itself
    #[arg(long, value_delimiter = ',', default_value = "local,tcp", value_name = "NAME")]
    pub(crate) transport: Vec<String>,
    /// Bytes of the handoff of which the exposed time is measured; less if memory is short
    /// [default: 1GiB, with --quick 64MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) size: Option<u64>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,
    /// Small and short
    #[arg(long)]
    pub(crate) quick: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar and no remarks
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// What is measured of handoffs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Measure {
    /// What is left of a transfer when prefill has been computed
    Exposed,
    /// What the connector costs a scheduler step
    Step,
    /// Planning between engines of unequal tensor parallelism
    Plan,
    /// Bytes of control messages
    Control,
    /// A handoff of one block between two engines
    OneBlock,
}

impl Measure {
    pub(crate) const ALL: [Measure; 5] =
        [Self::Exposed, Self::Step, Self::Plan, Self::Control, Self::OneBlock];
}

impl BenchArgs {
    /// The requests of --model, if it is given.
    pub(crate) fn shape(&self) -> Option<Shape> {
        let BenchArgs { tokens, requests, block_tokens, dtype, .. } = *self;
        self.model.map(|model| Shape { model, tokens, requests, block_tokens, dtype })
    }
}

/// Requests of a model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) model: Model,
    pub(crate) tokens: u32,
    pub(crate) requests: u32,
    pub(crate) block_tokens: u32,
    pub(crate) dtype: Dtype,
}

/// Which ways of sending payload are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Checksums {
    On,
    Off,
    /// Off, and on beside it
    Both,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Op {
    Write,
    Read,
}

impl Op {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Op::Write => "write",
            Op::Read => "read",
        }
    }
}

/// Which cores two processes run on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Placement {
    /// One core each
    Apart,
    /// One core for both
    Together,
    /// As the kernel likes, which is how two hosts are measured
    Free,
}

/// Parts of a bench.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// Batches of scattered blocks
    Throughput,
    /// Calls from Python
    Python,
    /// Several callers at once
    Callers,
    /// Memory registered and given back beside callers
    Churn,
    /// One block at a time
    Latency,
    /// What comes before the first byte
    Setup,
    /// Nothing to do
    Idle,
    /// Peers that are killed or stopped
    Faults,
}

/// `32KiB:1024`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Size {
    pub(crate) block: usize,
    pub(crate) count: usize,
}

impl Size {
    pub(crate) fn bytes(self) -> usize {
        self.block * self.count
    }
}

impl std::str::FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Size, String> {
        const LARGEST_BATCH: u64 = 64 << 30;
        let (block, count) = text
            .split_once(':')
            .ok_or_else(|| format!("`{text}` is not BLOCK:COUNT, such as 32KiB:1024"))?;
        let block = parse_bytes(block)?;
        let count: u64 = count.trim().parse().map_err(|_| format!("`{count}` is not a number"))?;
        match block.checked_mul(count) {
            Some(1..=LARGEST_BATCH) if block < 1 << 32 => {
                Ok(Size { block: block as usize, count: count as usize })
            }
            _ => Err(format!("`{text}` is not between one byte and 64 GiB in blocks below 4 GiB")),
        }
    }
}

/// How many streams a batch may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Streams(pub(crate) Option<usize>);

impl std::str::FromStr for Streams {
    type Err = String;

    fn from_str(text: &str) -> Result<Streams, String> {
        if text == "auto" {
            return Ok(Streams(None));
        }
        match text.parse() {
            Ok(streams @ 1..=64) => Ok(Streams(Some(streams))),
            _ => Err(format!("`{text}` is neither `auto` nor a number from 1 to 64")),
        }
    }
}

/// How many threads call at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub(crate) struct Callers(pub(crate) usize);

impl std::str::FromStr for Callers {
    type Err = String;

    fn from_str(text: &str) -> Result<Callers, String> {
        match text.parse() {
            Ok(callers @ 1..=64) => Ok(Callers(callers)),
            _ => Err(format!("`{text}` is not a number from 1 to 64")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn sizes_streams_and_callers_are_read() {
        let cli = Cli::try_parse_from([
            "kvferry",
            "bench",
            "--sizes",
            "4KiB:1024,1MiB:256",
            "--streams",
            "auto,4",
            "--callers",
            "1,10",
            "--op",
            "read",
        ])
        .expect("well formed");
        let Command::Bench(args) = cli.command else { panic!("bench was asked for") };
        assert_eq!(args.sizes[1], Size { block: 1 << 20, count: 256 });
        assert_eq!(args.streams, [Streams(None), Streams(Some(4))]);
        assert_eq!(args.callers, [Callers(1), Callers(10)]);
        assert_eq!(args.op, [Op::Read]);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for size in ["4KiB", "4KiB:0", "x:1", "4KiB:y", "4GiB:1", "1GiB:65"] {
            assert!(size.parse::<Size>().is_err(), "{size}");
        }
        assert!("0".parse::<Streams>().is_err() && "many".parse::<Streams>().is_err());
        assert!("0".parse::<Callers>().is_err());
        for line in [&["bench", "--serve", "--target", "a:1"][..], &["demo", "--tokens", "0"]] {
            let line = ["kvferry"].iter().chain(line);
            assert!(Cli::try_parse_from(line).is_err());
        }
    }

    #[test]
    fn the_defaults_are_the_ones_in_the_help() {
        let cli = Cli::try_parse_from(["kvferry", "demo"]).expect("all have defaults");
        let Command::Demo(args) = cli.command else { panic!("demo was asked for") };
        assert_eq!((args.model.name, args.tokens, args.memory), ("llama-3.1-8b", 2048, 4 << 30));
    }
}
