//! The arguments, and the help that teaches them.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvferry_bench::model::{Dtype, Model};
use kvferry_bench::options::{
    Checksums, FileBench, HandoffOptions, Measure, OffloadBench, Op, Part, Placement, Shape, Size,
    StoreSpeed, Streams, TransferOptions,
};
use kvferry_bench::units::parse_bytes;
use serde::{Deserialize, Serialize};

use crate::doctor::helper::Probe;

const EXAMPLES_AND_EXIT_CODES: &str = "\
Start with:
  kvferry demo                  prefill engines hand KV cache to decode engines, half a minute
  kvferry demo store            KV cache on disk outlives its engine, some seconds
  kvferry doctor                what works on this host, and how to get what does not
  kvferry bench --quick         how fast it is, beside plain TCP
  kvferry bench --help          every subcommand has examples

Exit codes:
  0  success
  1  a byte or token was wrong, a request of a demo failed, a figure missed its bound under
     --check, the doctor found something bad, or a block of a store is bad
  2  the command line is wrong
  3  the peer does not answer, or refuses this agent
  4  a transfer or a helper process failed

Agents also read their settings from the environment: KVFERRY_SECRET_FILE, KVFERRY_TRANSPORTS,
KVFERRY_IO_THREADS, KVFERRY_STREAMS, KVFERRY_SILENCE_MS,
KVFERRY_PEER_MEMORY.";

/// kvferry moves KV cache for LLM serving. This command shows it, measures it and checks hosts.
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
    /// Measure what handoffs cost beyond moving their bytes; exit code 1 if a bound is missed
    BenchHandoff(BenchHandoffArgs),
    /// Check this host, or the way to an agent elsewhere
    Doctor(DoctorArgs),
    /// Look at a store of blocks on disk, verify it, clean it, export and import blocks
    Store(StoreArgs),
    /// Print the version
    Version {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// An engine of a demo
    #[command(hide = true)]
    DemoEngine,
    /// An engine of `demo store`
    #[command(hide = true)]
    DemoStoreEngine,
    /// A helper process of a bench
    #[command(hide = true, name = kvferry_bench::helper::COMMAND)]
    BenchHelper { arguments: Vec<String> },
    /// A helper of the doctor
    #[command(hide = true)]
    DoctorProbe {
        /// What it tries
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
variables. Each line has a mark:
  ok       works
  note     works, but could be better, or is worth knowing
  missing  something optional is not installed
  bad      something that kvferry is configured to use does not work
The line after an arrow says what to do.

An agent elsewhere sends what it sends every peer. Its memory is never written. Reads are measured
on memory that its peers may read, 64 MiB at a time for a second (not with --no-bandwidth). Writes
are measured at a `kvferry bench --serve`, which has memory for them.

Secrets and configurations are never shown. --json prints one object, schema kvferry.doctor/1:
version, target, worst, counts, and groups of findings: id, subject, mark, finding, fix, facts.

Exit codes:
  0  nothing is bad
  1  something is bad, or the agent does not answer or refuses this one
  2  the command line is wrong";

/// Check this host: what works, and what to do about the rest. With HOST:PORT, check an agent there:
/// whether it can be reached from here, over which transports, and how fast.
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

const STORE_EXAMPLES: &str = "\
Examples:
  kvferry store stat /mnt/nvme/kv
  kvferry store ls /mnt/nvme/kv --blocks --namespace 8f3c21d07a5be946
  kvferry store verify /mnt/nvme/kv --json | jq '.bad'
  kvferry store gc /mnt/nvme/kv --capacity 100GiB --dry-run
  kvferry store adopt /mnt/nvme0/kv /mnt/nvme1/kv --dry-run
  kvferry store export kv.blocks /mnt/nvme/kv
  kvferry store import kv.blocks /mnt/nvme/kv --capacity 500GiB
  kvferry store export - /mnt/nvme/kv | ssh other kvferry store import - /mnt/kv --capacity 500GiB

A store in several directories is given whole: all of them, in any order.

stat, ls, verify and export change nothing, and work while processes have the store open. They show
what is in the files. The files do not say which blocks were evicted: such a block is shown until its segment
is used again. A block that was copied to another segment is shown in both until then.

Exit codes:
  0  success
  1  verify or export found a bad block, or a segment that can't be read; import found that the file is
     damaged or cut, and imported the rest
  2  the command line is wrong, or there is no store that can be read
  4  gc, adopt: a process has the store open, or a file can't be changed; export: the file can't be written;
     import: blocks could not be stored";

/// Look at a store of blocks on disk, verify it, clean it, replace directories, export and import blocks.
#[derive(Debug, Clone, Args)]
#[command(after_help = STORE_EXAMPLES)]
pub(crate) struct StoreArgs {
    #[command(subcommand)]
    pub(crate) action: StoreAction,
}

#[derive(Debug, Clone, Subcommand)]
pub(crate) enum StoreAction {
    /// Show what a store is, and how much is in it
    Stat(StoreStatArgs),
    /// List segments, or blocks
    Ls(StoreLsArgs),
    /// Read all blocks and compare them with their checksums
    Verify(StoreVerifyArgs),
    /// Remove files that no process needs, while no process has the store open
    Gc(StoreGcArgs),
    /// Take empty directories in the place of lost ones, while no process has the store open
    Adopt(StoreAdoptArgs),
    /// Write blocks to a file, to be imported into another store
    Export(StoreExportArgs),
    /// Put the blocks of an exported file into a store
    Import(StoreImportArgs),
}

#[derive(Debug, Clone, Args)]
pub(crate) struct StoreStatArgs {
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
    /// Print the result as JSON, schema kvferry.store-stat/1
    #[arg(long)]
    pub(crate) json: bool,
}

const STORE_LS_EXAMPLES: &str = "\
Segments are sealed (full, and complete), open (being written, or its process was killed), free (no
valid header), foreign (another store's), unreadable, or of a wrong length. Only the first two have
blocks. A later incarnation is a later use of a segment.

A namespace is a number that stands for model, layout, tenant, adapter, group and shard. Its name is
not in the files.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = STORE_LS_EXAMPLES)]
pub(crate) struct StoreLsArgs {
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
    /// List blocks instead of segments
    #[arg(long)]
    pub(crate) blocks: bool,
    /// Only blocks of this namespace, and segments that have some
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    pub(crate) namespace: Option<u64>,
    /// Print the result as JSON, schema kvferry.store-ls/1
    #[arg(long)]
    pub(crate) json: bool,
}

const STORE_VERIFY_EXAMPLES: &str = "\
A bad block is never returned to an engine: it is missed. In a segment that is not sealed, it may be
one that a process is writing, or was writing when it was killed; such blocks are read again after a
second. Bad blocks leave with their segment, when the store needs space.

Blocks in segments that a process has begun to use again are not verified, and counted as replaced.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = STORE_VERIFY_EXAMPLES)]
pub(crate) struct StoreVerifyArgs {
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
    /// Print the result as JSON, schema kvferry.store-verify/1
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

const STORE_GC_EXAMPLES: &str = "\
Always removed: segments without a valid header or without blocks, files of a wrong length, and
what an interrupted write left. Segments of killed processes are sealed: the next start reads them
at once.

--capacity removes the oldest segments until a process can open the store with this capacity and
lose no other block. It may give segments other numbers; a power cut in that moment loses one of
them. A process that opens the store with a smaller capacity removes segments by number, not by age.

What it can't do: remove single blocks, or those of a namespace from segments that have blocks of
others; remove evicted blocks, which the files do not tell apart; repair bad blocks. Segments that
can't be read, or are another store's, stay.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = STORE_GC_EXAMPLES)]
pub(crate) struct StoreGcArgs {
    /// The store's directories: all of them
    #[arg(required = true, value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
    /// Remove the oldest segments, down to this capacity
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) capacity: Option<u64>,
    /// Remove segments that have only blocks of this namespace
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    pub(crate) namespace: Option<u64>,
    /// Only show what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print the result as JSON, schema kvferry.store-gc/1
    #[arg(long)]
    pub(crate) json: bool,
}

const STORE_ADOPT_EXAMPLES: &str = "\
An empty directory of a store counts as lost: it may be the folder below a device that is not mounted.
If the device is gone for good, this command makes the directory the store's. The blocks of the lost
device are missed. Look with --dry-run first: it says where no device is mounted.

A device that comes back and is mounted over such a directory is used from the next start of all
processes on, with its blocks. What was written below it stays there, hidden, until it is removed.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = STORE_ADOPT_EXAMPLES)]
pub(crate) struct StoreAdoptArgs {
    /// The store's directories: all of them, also those that are empty
    #[arg(required = true, value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
    /// Only show what would be done
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Print the result as JSON, schema kvferry.store-adopt/1
    #[arg(long)]
    pub(crate) json: bool,
}

const STORE_EXPORT_EXAMPLES: &str = "\
Each block is compared with its checksum, and is in the file once. A block that is bad, or that can't
be read, is left out. In a segment that is not sealed, it may be one that a process is writing; such
blocks are read again after a second. Blocks that were evicted are exported until their segment is
used again.

The file describes and checks itself, record by record; crates/kvferry-store/src/archive/format.rs
documents every byte.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = STORE_EXPORT_EXAMPLES)]
pub(crate) struct StoreExportArgs {
    /// The file to write, which is replaced; - for standard output
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
    /// Only blocks of this namespace
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    pub(crate) namespace: Option<u64>,
    /// Print the result as JSON, schema kvferry.store-export/1; on standard error if FILE is -
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

const STORE_IMPORT_EXAMPLES: &str = "\
Processes may have the store open. If there is no store in DIR, it is made.

--capacity is the one that engines open the store with. It counts if no process has the store open; one
that is too small for what is there is refused.

Each block is compared with its checksum before it is stored. Blocks that are there are skipped. Where
the file is damaged or cut, all other blocks are imported, and the exit code is 1. Blocks keep their
namespace, priority, and the time at which their retention ends; a block that was to leave before now
is skipped. If the store is full, imported blocks replace others, as those that engines put.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = STORE_IMPORT_EXAMPLES)]
pub(crate) struct StoreImportArgs {
    /// The file to read; - for standard input
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// The store's directories: all of them
    #[arg(required = true, value_name = "DIR")]
    pub(crate) directories: Vec<PathBuf>,
    /// The capacity of the store
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    pub(crate) capacity: u64,
    /// Only blocks of this namespace
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    pub(crate) namespace: Option<u64>,
    /// Print the result as JSON, schema kvferry.store-import/1
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// A namespace's number, as `kvferry store` shows it.
fn parse_namespace(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let is_hex = (1..=16).contains(&digits.len()) && digits.chars().all(|c| c.is_ascii_hexdigit());
    let id = is_hex.then(|| u64::from_str_radix(digits, 16).ok()).flatten();
    id.ok_or_else(|| format!("`{text}` is not a namespace such as 8f3c21d07a5be946"))
}

const DEMO_EXAMPLES: &str = "\
Examples:
  kvferry demo                                     two prefill engines of TP 2, a decode engine of TP 4
  kvferry demo --prefill-tp 4 --decode 2 --decode-tp 1 --transport tcp
  kvferry demo --flow sequential --announce end    nothing is pushed while prefill computes
  kvferry demo --sizes 64,4096 --requests 20 --plot demo.html
  kvferry demo --json --quiet | jq .sizes          for a program
  kvferry demo store                               KV on disk that outlives its engine

Every engine is a process with a small model, a paged KV cache and a scheduler, driven as vLLM drives
its own, with an agent per rank. This process is the router. It gives each request to a prefill and a
decode engine: to both at once with one transfer_id (concurrent), or to the decode engine with what
prefill responded (sequential). The model computes integers from every byte of KV that a token may
see: a wrong byte is a wrong token. The tokens of every request are compared with those of the model
without engines, caches and handoffs. At the end no engine may hold a request, a block or a transfer.

Columns:
  latency          from the last layer that prefill computes until the last decode rank has received
                   everything
  waiting          median of the latency's part before the first read: the decode engine computes a
                   step of other requests, and a fetch begins with a step
  transfer         from the first read to the same end
  exposed          the rest of the latency as a part of the transfer
  GB/s             bytes of a request by the time in which any of them were being read
  machine's limit  plain code, nothing else running: blocks of the same size by process_vm_readv
                   (local) or over loopback (tcp), on a thread per reading rank, at most one per
                   core. Agents allocate the caches and copy them directly within a host, which
                   can be faster than process_vm_readv.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = DEMO_EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct DemoArgs {
    #[command(subcommand)]
    pub(crate) of: Option<DemoOf>,
    /// Requests, of all sizes in turn
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub(crate) requests: u32,
    /// Requests in flight at once [default: two per prefill engine]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub(crate) concurrency: Option<u32>,
    /// Prefill engines, a process each
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) prefill: u32,
    /// Decode engines, a process each
    #[arg(long, default_value_t = 1, value_name = "M", value_parser = clap::value_parser!(u32).range(1..=16))]
    pub(crate) decode: u32,
    /// TP ranks of a prefill engine: 1, 2, 4 or 8
    #[arg(long, default_value_t = 2, value_name = "RANKS", value_parser = ranks)]
    pub(crate) prefill_tp: u32,
    /// TP ranks of a decode engine: 1, 2, 4 or 8
    #[arg(long, default_value_t = 4, value_name = "RANKS", value_parser = ranks)]
    pub(crate) decode_tp: u32,
    /// How KV moves
    #[arg(long, value_enum, default_value = "local")]
    pub(crate) transport: DemoTransport,
    /// Prompt lengths in tokens, 32 KiB of KV each
    #[arg(long, default_value = "32,128,512,2048", value_delimiter = ',', value_name = "TOKENS",
          value_parser = clap::value_parser!(u32).range(1..=32_768))]
    pub(crate) sizes: Vec<u32>,
    /// When the router gives a request to the decode engine
    #[arg(long, value_enum, default_value = "concurrent")]
    pub(crate) flow: Flow,
    /// When a prefill engine announces blocks that are ready
    #[arg(long, value_enum, default_value = "layers")]
    pub(crate) announce: AnnounceWhen,
    /// Draw the figures into this HTML file
    #[arg(long, value_name = "FILE")]
    pub(crate) plot: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar and no remarks
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Flip one byte of a prefill engine's cache after it was computed: the demo must notice
    #[arg(long, hide = true)]
    pub(crate) inject_fault: bool,
}

/// Demos of other things than handoffs.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum DemoOf {
    /// Keep the KV cache of an engine on disk over restarts and a kill
    Store(DemoStoreArgs),
}

const DEMO_STORE_EXAMPLES: &str = "\
Examples:
  kvferry demo store                                some seconds, in the folder of temporary files
  kvferry demo store --prefix-tokens 32768          a longer prefix: computing it takes longer
  kvferry demo store --directory /mnt/nvme/kv       keep the store; look at it with kvferry store stat
  kvferry demo store --json --quiet | jq .killed    for a program
  kvferry demo store --seam tensorrt-llm            TensorRT-LLM's connector, and a flipped byte

Each engine is a process. All but the first put the blocks of their KV into a store of kvferry on disk:
  without a store  serves the prompts of the second start: the right tokens
  first start      computes prompts that share a long prefix, and puts their blocks
  second start     opens the same directory, serves the same prompts and a longer one
  (killed)         computes another prompt, and kills itself with SIGKILL while it puts the blocks
  after the kill   opens the directory, serves all of these prompts
The model computes integers from every byte of KV that a token may see: a wrong byte is a wrong token.
The tokens of every request are compared with those of an engine without a store. The engine's times
are measured. Nothing is added to them: it really computes what it does not read.

Exit code 1: a token is wrong, a block that was put before is computed again, the first start finds
blocks, or none of five kills comes while blocks are written. Times are shown, not judged.

Columns:
  blocks read     blocks that came from the store
  not computed    their tokens. Later prompts of a start find the prefix in the engine's own cache
  store open      until the store in the directory was open
  first token     of the first prompt, from its submission to its first token
  all prompts     the same for all tokens of all prompts, one after another
  output          whether all tokens are those of an engine without a store

The store takes 8 KiB of disk for each token of the prefix, more if several engines must be killed.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = DEMO_STORE_EXAMPLES)]
pub(crate) struct DemoStoreArgs {
    /// Whose calls the engine makes
    #[arg(long, value_enum, default_value_t = Seam::Reference)]
    pub(crate) seam: Seam,
    /// Tokens that all prompts begin with, 4 KiB of KV each [default: 8192]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(256..=32_768))]
    pub(crate) prefix_tokens: Option<u32>,
    /// Prompts with this prefix [default: 3]; with tensorrt-llm, prompts of many lengths [default: 20]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) requests: Option<u32>,
    /// Where the store is made; it stays there. Must be empty, or not exist
    /// [default: a folder of temporary files, removed in the end]
    #[arg(long, value_name = "DIRECTORY")]
    pub(crate) directory: Option<PathBuf>,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar and no remarks
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Flip one byte of a block after the second start has read it: the demo must notice
    #[arg(long, hide = true)]
    pub(crate) inject_fault: bool,
}

/// Interface through which an engine of the store demo uses kvferry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Seam {
    /// The reference engine's own
    Reference,
    /// TensorRT-LLM's connector, restated: what `python3 -m kvferry.trtllm.demo` runs. Needs a Python
    /// that has kvferry's wheel: python3, or what KVFERRY_PYTHON names
    TensorrtLlm,
}

/// Transport that the engines of a demo use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum DemoTransport {
    /// Copies between the memories of processes of one host
    Local,
    /// TCP, over loopback
    Tcp,
}

/// Time at which a router gives a request to the decode engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Flow {
    /// At once with the prefill engine
    Concurrent,
    /// After the prefill engine's response
    Sequential,
}

/// Time at which a prefill engine announces blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AnnounceWhen {
    /// After each half of the layers of a chunk
    Layers,
    /// After each chunk
    Chunks,
    /// Once, at the end
    End,
}

/// A value as it is written on the command line.
pub(crate) fn name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value().expect("every value can be asked for");
    value.get_name().to_owned()
}

/// Numbers of ranks among which the model's heads can be shared.
fn ranks(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(ranks @ (1 | 2 | 4 | 8)) => Ok(ranks),
        _ => Err("the heads of the model can be shared among 1, 2, 4 or 8 ranks".to_string()),
    }
}

const BENCH_EXAMPLES: &str = "\
Examples:
  kvferry bench                                two processes on this host, some minutes
  kvferry bench --quick                        a minute, too short to judge by
  kvferry bench --transport tcp --op write --sizes 32KiB:1024 --streams auto,1,4
  kvferry bench --only throughput --model llama-3.1-8b --tokens 4096 --requests 2
  kvferry bench --only throughput --trace blocks.jsonl --plot report
  kvferry bench --only latency --rounds 15
  kvferry bench --faults --check               kill peers, too; exit code 1 if a bound is missed
  kvferry bench --serve --listen 10.0.0.5:7400         on one host, and on the other
  kvferry bench --target 10.0.0.5:7400 --json

Every figure stands beside those of plain programs, measured in turn in the same rounds:
  floor       over TCP: one message per batch with vectored I/O, over sockets with the options of
              kvferry's; call size, socket buffers and number of streams are the fastest of a trial
  raw         over TCP: one stream, 256 MiB in calls of 1 MiB
  raw x 4     the same over four streams at once
  process_vm  within a host: process_vm_writev or readv of the same table
  memcpy      the same table within one process
Ratios are taken round by round; their medians and quartiles are shown. Each configuration is
verified before and after its rounds, against a poisoned destination, never while the clock runs.

A trace has one batch per line, in either form; offsets are into the two processes' memory:
  [[LOCAL_OFFSET, REMOTE_OFFSET, LENGTH], ...]
  {\"block_bytes\": 65536, \"local\": [7, 3], \"remote\": [12, 40]}

--peers measures Mooncake and NIXL in the same rounds, from Python; `make bench-peers` installs
them. Their processes are stopped (SIGSTOP) outside their turns: some spin as long as they run.

With KVFERRY_SECRET_FILE set, --serve serves only hosts with the same secret; without it, every host
that can connect. Its agent listens on the same address.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = BENCH_EXAMPLES, args_conflicts_with_subcommands = true)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) of: Option<BenchOf>,
    /// Be the target of a bench on another host, until interrupted
    #[arg(long, conflicts_with = "target")]
    pub(crate) serve: bool,
    /// Where --serve listens
    #[arg(long, default_value = "127.0.0.1:7400", requires = "serve", value_name = "ADDRESS:PORT")]
    pub(crate) listen: SocketAddr,
    /// A `kvferry bench --serve` on another host, instead of a second process here
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) target: Option<String>,
    /// Transports, each measured by itself; `auto` is the choice of the two agents
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
    /// Streams that a batch is striped over; with `auto` the agent chooses
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    pub(crate) streams: Vec<Streams>,
    /// Checksums of the payload over TCP
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) checksums: Checksums,
    /// Numbers of concurrent callers; each total is compared with one caller
    #[arg(long, value_delimiter = ',', default_value = "1,10",
          value_parser = clap::value_parser!(u32).range(1..=64))]
    pub(crate) callers: Vec<u32>,
    /// Cores for the two processes of a latency measurement on one host [default: apart,together]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) placement: Vec<Placement>,
    /// Rounds; seven or more to judge by [default: 11, with --peers 7, with --quick 3]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) rounds: Option<u32>,
    /// Parts to run [default: all but faults]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(crate) only: Vec<Part>,
    /// Measure faults, too: peers that are killed or stopped
    #[arg(long)]
    pub(crate) faults: bool,
    /// A Python interpreter with a stock Mooncake, for faulty peers of that kind
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
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    pub(crate) check: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write the result as JSON to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) output: Option<PathBuf>,
    /// Show, judge and draw what --output wrote, instead of measuring
    #[arg(long, value_name = "FILE")]
    pub(crate) from: Option<PathBuf>,
    /// Write one SVG per figure, and `report.html` with all of them, to this folder
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
  kvferry bench-handoff --quick --json          too short to judge by

Producer and consumer are two processes of this host. A figure with a bound is judged by its median;
the others are only shown. The device of a prefill is a timer: computing takes time but no processor,
as with a GPU.";

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

/// Benches of other things than transfers between agents.
#[derive(Debug, Clone, Subcommand)]
pub(crate) enum BenchOf {
    /// Measure memory to files and back, beside fio in the same rounds
    File(BenchFileArgs),
    /// Measure the store of blocks; with --trace, its hits beside LRU and the optimum
    Store(BenchStoreArgs),
    /// Measure offloading by the block manager, beside the block store in the same rounds
    Offload(BenchOffloadArgs),
}

const BENCH_STORE_EXAMPLES: &str = "\
Examples:
  kvferry bench store --quick                      a minute, too short to judge by
  kvferry bench store --folder /mnt/nvme --check   seven rounds on that file system, with bounds
  kvferry bench store --rows full --folder /mnt/nvme --check   puts into a full store, a minute each
  kvferry bench store --trace conversation_trace.jsonl
  kvferry bench store --trace conversation_trace.jsonl --blocks 50000 --json

A trace has one request per line, as the Mooncake project publishes them:
  {\"timestamp\": 27482, \"input_length\": 6955, \"output_length\": 52, \"hash_ids\": [46, 47, 48]}
timestamp is in milliseconds. hash_ids name the blocks of the prompt, the first one first; equal ids mean
an equal prompt up to and with that block. Other fields are ignored.

A hit is a block that is there together with all blocks before it. A replay is exact: it has the same
result each time.";

/// Measure the store of blocks: puts and gets beside the file transport, and the index by itself. With --trace,
/// replay requests instead: hits of the store's policy beside LRU and the optimum.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = BENCH_STORE_EXAMPLES)]
pub(crate) struct BenchStoreArgs {
    /// A trace to replay
    #[arg(long, value_name = "FILE", conflicts_with_all = ["folder", "bytes", "sizes", "rounds", "quick", "rows"])]
    pub(crate) trace: Option<PathBuf>,
    /// Capacities, in blocks
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,30000", value_name = "COUNT",
          value_parser = clap::value_parser!(u32).range(1..), requires = "trace")]
    pub(crate) blocks: Vec<u32>,
    /// Where the store is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
    /// Bytes of the blocks of a round [default: 1GiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) bytes: Option<u64>,
    /// Fill a store with COUNT blocks; with --quick, be killed then
    #[arg(long, hide = true, value_name = "COUNT", requires = "folder")]
    pub(crate) fill: Option<u64>,
    /// Block sizes
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes, value_name = "SIZE",
          default_value = "128KiB,2MiB")]
    pub(crate) sizes: Vec<u64>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,
    /// What is measured
    #[arg(long, value_enum, default_value = "speed")]
    pub(crate) rows: StoreRows,
    /// With --rows full: seconds of puts into each full store [default: 60, with --quick 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3600), conflicts_with = "trace")]
    pub(crate) seconds: Option<u32>,
    /// Small and short
    #[arg(long)]
    pub(crate) quick: bool,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    pub(crate) check: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// Rows that the bench of the store measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum StoreRows {
    /// Puts and gets, the index, opening
    Speed,
    /// Puts into a full store, beside the same into one with space
    Full,
}

impl BenchStoreArgs {
    /// Seconds of puts into each full store.
    pub(crate) fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 5 } else { 60 }).into()
    }

    pub(crate) fn speed(&self) -> StoreSpeed {
        StoreSpeed {
            folder: self.folder.clone(),
            bytes: self.bytes.unwrap_or(if self.quick { 128 << 20 } else { 1 << 30 }),
            sizes: self.sizes.clone(),
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
        }
    }
}

const BENCH_OFFLOAD_EXAMPLES: &str = "\
Examples:
  kvferry bench offload --quick                      a minute, too short to judge by
  kvferry bench offload --folder /mnt/nvme --check   seven rounds on that file system, with bounds

Blocks in the pages of the reference engine are offloaded and onboarded by the block manager and its driver,
with a block store in a folder. The same pages are put to a block store and got from it directly, in turns.
The scheduler's thread is measured call by call: its processor time has the bound, because the kernel may
take a thread off its processor in the middle of a call; its wall time is shown, too.";

/// Measure offloading by the block manager, its driver and a block store, beside the block store by itself; and
/// the block manager by itself.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = BENCH_OFFLOAD_EXAMPLES)]
pub(crate) struct BenchOffloadArgs {
    /// Where the stores are made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
    /// Bytes of the blocks of a round [default: 512MiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) bytes: Option<u64>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,
    /// Small and short
    #[arg(long)]
    pub(crate) quick: bool,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    pub(crate) check: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

impl BenchOffloadArgs {
    pub(crate) fn options(&self) -> OffloadBench {
        OffloadBench {
            folder: self.folder.clone(),
            bytes: self.bytes.unwrap_or(if self.quick { 128 << 20 } else { 512 << 20 }),
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
        }
    }
}

const BENCH_FILE_EXAMPLES: &str = "\
Examples:
  kvferry bench file --quick                       a minute, in the folder of temporary files
  kvferry bench file --folder /mnt/nvme --check    seven rounds on that file system, with bounds
  kvferry bench file --sizes 2MiB --engine posix   one size, without io_uring

The file is written in blocks of random order and read: through the page cache (buffered, cached), with
an empty page cache (cold), and past it (direct). fio does the same with io_uring, registered buffers and
files, in as much memory. Without fio (apt-get install fio) its rows are missing. --peers measures NIXL,
too; `make bench-file-peers` installs it first.";

/// Measure memory to files and back, beside fio in the same rounds.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = BENCH_FILE_EXAMPLES)]
pub(crate) struct BenchFileArgs {
    /// Where the file is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub(crate) folder: Option<PathBuf>,
    /// Bytes of the file [default: 512MiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub(crate) bytes: Option<u64>,
    /// Block sizes, up to 64 MiB
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes, value_name = "SIZE",
          default_value = "4KiB,32KiB,256KiB,1MiB,16MiB")]
    pub(crate) sizes: Vec<u64>,
    /// How files are read and written
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) engine: Engine,
    /// A Python interpreter with NIXL and `kvferry_peers`, to measure NIXL's POSIX plug-in, too
    #[arg(long, value_name = "PYTHON")]
    pub(crate) peers: Option<PathBuf>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) rounds: Option<u32>,
    /// Small and short
    #[arg(long)]
    pub(crate) quick: bool,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    pub(crate) check: bool,
    /// Print the result as JSON
    #[arg(long)]
    pub(crate) json: bool,
    /// No progress bar
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// Engine for reads and writes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Engine {
    /// io_uring if the system permits it, else threads
    Auto,
    /// io_uring
    Uring,
    /// Threads that call pread and pwrite
    Posix,
}

impl BenchFileArgs {
    pub(crate) fn options(&self) -> FileBench {
        FileBench {
            folder: self.folder.clone(),
            bytes: self.bytes.unwrap_or(if self.quick { 128 << 20 } else { 512 << 20 }),
            sizes: self.sizes.clone(),
            engine: match self.engine {
                Engine::Auto => "auto",
                Engine::Uring => "uring",
                Engine::Posix => "posix",
            },
            peers: self.peers.clone(),
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
        }
    }
}

impl BenchArgs {
    pub(crate) fn options(&self) -> TransferOptions {
        let BenchArgs { tokens, requests, block_tokens, dtype, .. } = *self;
        let shape = |model| Shape { model, tokens, requests, block_tokens, dtype };
        TransferOptions {
            target: self.target.clone(),
            transports: self.transport.clone(),
            ops: self.op.clone(),
            sizes: self.sizes.clone(),
            shape: self.model.map(shape),
            trace: self.trace.clone(),
            streams: self.streams.clone(),
            checksums: self.checksums,
            callers: self.callers.iter().map(|&callers| callers as usize).collect(),
            placements: self.placement.clone(),
            rounds: self.rounds.map(|rounds| rounds as usize),
            parts: self.only.clone(),
            faults: self.faults,
            stock: self.stock.clone(),
            python: self.python.clone(),
            peers: self.peers.clone(),
            quick: self.quick,
        }
    }
}

impl BenchHandoffArgs {
    pub(crate) fn options(&self) -> HandoffOptions {
        HandoffOptions {
            measures: self.only.clone(),
            transports: self.transport.clone(),
            size_bytes: self.size,
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
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
    fn lists_are_separated_by_commas() {
        let line =
            "kvferry bench --sizes 4KiB:1024,1MiB:256 --streams auto,4 --callers 1,10 --op read";
        let cli = Cli::try_parse_from(line.split(' ')).expect("well formed");
        let Command::Bench(args) = cli.command else { panic!("bench was asked for") };
        let options = args.options();
        assert_eq!(options.sizes[1], Size { block: 1 << 20, count: 256 });
        assert_eq!(options.streams, [Streams(None), Streams(Some(4))]);
        assert_eq!((options.callers, options.ops), (vec![1, 10], vec![Op::Read]));
    }

    #[test]
    fn contradictions_and_numbers_out_of_range_are_refused() {
        for line in [
            "bench --serve --target a:1",
            "demo --requests 0",
            "bench --callers 0",
            "bench --op x",
            "demo store --prefix-tokens 9",
        ] {
            assert!(Cli::try_parse_from(["kvferry"].into_iter().chain(line.split(' '))).is_err());
        }
    }
}
