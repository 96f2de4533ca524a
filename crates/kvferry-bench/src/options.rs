//! Options of the measurements: the flags of the command, with their help.

use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum, value_parser};
use serde::{Deserialize, Serialize};

use crate::model::{Dtype, Model};
use crate::units::parse_bytes;

/// Options of [`crate::transfers`]: the flags of `kvferry bench transfers`. An empty list, or `None`, is the default.
#[derive(Debug, Clone, Args)]
pub struct TransferBench {
    /// A `kvferry bench transfers --serve` on another host, instead of a second process here
    #[arg(long, value_name = "HOST:PORT")]
    pub target: Option<String>,
    /// Transports, each measured by itself; `auto` is the choice of the two agents
    /// [default: tcp,local; with --target: auto]
    #[arg(long = "transport", value_delimiter = ',', value_name = "NAME")]
    pub transports: Vec<String>,
    /// What to move
    #[arg(long = "op", value_enum, value_delimiter = ',', default_value = "write,read")]
    pub ops: Vec<Op>,
    /// Block size and blocks per batch [default: 4KiB:1024,32KiB:1024,256KiB:256,1MiB:256,16MiB:16,
    /// unless --model or --trace is given]
    #[arg(long, value_delimiter = ',', value_name = "BLOCK:COUNT")]
    pub sizes: Vec<Size>,
    /// Move requests of this model: one batch has every block of every layer of a request
    #[arg(long, value_parser = Model::find)]
    pub model: Option<Model>,
    /// Length of each request of --model
    #[arg(long, default_value_t = 2048, requires = "model", value_parser = value_parser!(u32).range(1..))]
    pub tokens: u32,
    /// Requests of --model
    #[arg(long, default_value_t = 1, requires = "model", value_parser = value_parser!(u32).range(1..=10_000))]
    pub requests: u32,
    /// Tokens in a block of --model
    #[arg(long, default_value_t = 16, requires = "model", value_parser = value_parser!(u32).range(1..=4096))]
    pub block_tokens: u32,
    /// What the cache of --model is stored as
    #[arg(long, value_enum, default_value = "bf16", requires = "model")]
    pub dtype: Dtype,
    /// Move the batches of this file, one per line (see below)
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Streams that a batch is striped over; with `auto` the agent chooses
    #[arg(long, value_delimiter = ',', default_value = "auto")]
    pub streams: Vec<Streams>,
    /// Checksums of the payload over TCP
    #[arg(long, value_enum, default_value = "both")]
    pub checksums: Checksums,
    /// Numbers of concurrent callers; each total is compared with one caller
    #[arg(long, value_delimiter = ',', default_value = "1,10", value_parser = between(1, 64))]
    pub callers: Vec<usize>,
    /// Cores for the two processes of a latency measurement on one host [default: apart,together]
    #[arg(long = "placement", value_enum, value_delimiter = ',')]
    pub placements: Vec<Placement>,
    /// Rounds; seven or more to judge by [default: 11, with --peers 7, with --quick 3]
    #[arg(long, value_parser = between(1, 1000))]
    pub rounds: Option<usize>,
    /// Parts to run [default: all but faults]
    #[arg(long = "only", value_enum, value_delimiter = ',')]
    pub parts: Vec<Part>,
    /// Measure faults, too: peers that are killed or stopped
    #[arg(long)]
    pub faults: bool,
    /// A Python interpreter with a stock Mooncake, for faulty peers of that kind
    #[arg(long, value_name = "PATH", requires = "faults")]
    pub stock: Option<PathBuf>,
    /// The Python interpreter whose calls are measured [default: the virtual environment's, else
    /// .venv/bin/python or python3, if it has kvferry]
    #[arg(long, value_name = "PATH")]
    pub python: Option<PathBuf>,
    /// A Python interpreter with Mooncake, NIXL and `kvferry_peers`, to measure them beside kvferry
    #[arg(long, value_name = "PATH", conflicts_with = "target")]
    pub peers: Option<PathBuf>,
    /// Small and short
    #[arg(long)]
    pub quick: bool,
}

impl TransferBench {
    /// The requests of a model to move.
    pub(crate) fn shape(&self) -> Option<Shape> {
        let TransferBench { tokens, requests, block_tokens, dtype, .. } = *self;
        self.model.map(|model| Shape { model, tokens, requests, block_tokens, dtype })
    }
}

/// How thoroughly a bench measures.
#[derive(Debug, Clone, Copy, Args)]
pub struct Effort {
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = between(1, 100))]
    pub rounds: Option<usize>,
    /// Small and short
    #[arg(long)]
    pub quick: bool,
}

impl Effort {
    pub(crate) fn rounds(self) -> usize {
        self.rounds.unwrap_or(if self.quick { 2 } else { ROUNDS })
    }
}

/// The least rounds to judge by.
pub(crate) const ROUNDS: usize = 7;

/// Options of [`crate::handoffs`]: the flags of `kvferry bench handoff`.
#[derive(Debug, Clone, Args)]
pub struct HandoffBench {
    /// What to measure [default: everything]
    #[arg(long = "only", value_enum, value_delimiter = ',')]
    pub measures: Vec<Measure>,
    /// Transports, each measured by itself
    #[arg(
        long = "transport",
        value_delimiter = ',',
        default_value = "local,tcp",
        value_name = "NAME"
    )]
    pub transports: Vec<String>,
    /// Bytes of the handoff of which the exposed time is measured; less if memory is short
    /// [default: 1GiB, with --quick 64MiB]
    #[arg(long = "size", value_parser = parse_bytes, value_name = "SIZE")]
    pub size_bytes: Option<u64>,
    #[allow(missing_docs, reason = "a group of flags has no help of its own")]
    #[command(flatten)]
    pub effort: Effort,
}

/// Options of [`crate::files`]: the flags of `kvferry bench file`.
#[derive(Debug, Clone, Args)]
pub struct FileBench {
    /// Where the file is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Bytes of the file [default: 512MiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub bytes: Option<u64>,
    /// Block sizes, up to 64 MiB
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes, value_name = "SIZE",
          default_value = "4KiB,32KiB,256KiB,1MiB,16MiB")]
    pub sizes: Vec<u64>,
    /// How files are read and written
    #[arg(long, value_enum, default_value = "auto")]
    pub engine: Engine,
    /// A Python interpreter with NIXL and `kvferry_peers`, to measure NIXL's POSIX plug-in, too
    #[arg(long, value_name = "PYTHON")]
    pub peers: Option<PathBuf>,
    #[allow(missing_docs, reason = "a group of flags has no help of its own")]
    #[command(flatten)]
    pub effort: Effort,
}

/// Engine for reads and writes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Engine {
    /// io_uring if the system permits it, else threads
    Auto,
    /// io_uring
    Uring,
    /// Threads that call pread and pwrite
    Posix,
}

impl Engine {
    /// The value of the setting `file_engine`.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Uring => "uring",
            Self::Posix => "posix",
        }
    }
}

/// Options of [`crate::store`]: the flags of `kvferry bench store`.
#[derive(Debug, Clone, Args)]
pub struct StoreBench {
    /// A trace to replay
    #[arg(long, value_name = "FILE", group = "replay",
          conflicts_with_all = ["folder", "bytes", "sizes", "rounds", "quick", "rows"])]
    pub trace: Option<PathBuf>,
    /// Replay requests that are made like those of tools and agents
    #[arg(long, group = "replay",
          conflicts_with_all = ["folder", "bytes", "sizes", "rounds", "quick", "rows"])]
    pub tool_calls: bool,
    /// Capacities, in blocks; 1/N: of the different blocks of the requests
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,30000", value_name = "COUNT",
          value_parser = parse_capacity, requires = "replay")]
    pub blocks: Vec<Capacity>,
    /// Replay through policies alone, not through a store of segments
    #[arg(long, requires = "replay")]
    pub policies_only: bool,
    /// Where the store is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Bytes of the blocks of a round [default: 1GiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub bytes: Option<u64>,
    /// Fill a store with COUNT blocks; with --quick, be killed then
    #[arg(long, hide = true, value_name = "COUNT", requires = "folder")]
    pub fill: Option<u64>,
    /// Block sizes
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes, value_name = "SIZE",
          default_value = "128KiB,2MiB")]
    pub sizes: Vec<u64>,
    /// What is measured
    #[arg(long, value_enum, default_value = "speed")]
    pub rows: StoreRows,
    /// With --rows full: seconds of puts into each full store [default: 60, with --quick 5]
    #[arg(long, value_parser = value_parser!(u32).range(1..=3600), conflicts_with = "replay")]
    pub seconds: Option<u32>,
    #[allow(missing_docs, reason = "a group of flags has no help of its own")]
    #[command(flatten)]
    pub effort: Effort,
}

/// Capacity of the caches of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capacity {
    /// Number of blocks; at least 1.
    Blocks(usize),
    /// One part of so many, at least 1, of the different blocks of all requests.
    OneOf(usize),
}

fn parse_capacity(text: &str) -> Result<Capacity, String> {
    let (number, capacity): (_, fn(usize) -> Capacity) = match text.strip_prefix("1/") {
        Some(parts) => (parts, Capacity::OneOf),
        None => (text, Capacity::Blocks),
    };
    let number: u32 = number.parse().ok().filter(|number| *number > 0).ok_or_else(|| {
        format!("give a number of blocks from 1 to {}, or a part of them such as 1/8", u32::MAX)
    })?;
    Ok(capacity(number as usize))
}

/// Rows that the bench of the store measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum StoreRows {
    /// Puts and gets, the index, opening
    Speed,
    /// Puts into a full store, beside the same into one with space
    Full,
    /// Blocks that another process puts or evicts, until this one reports them
    Events,
}

/// Options of [`crate::offload`]: the flags of `kvferry bench offload`.
#[derive(Debug, Clone, Args)]
pub struct OffloadBench {
    /// Where the stores are made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Bytes of the blocks of a round [default: 512MiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub bytes: Option<u64>,
    #[allow(missing_docs, reason = "a group of flags has no help of its own")]
    #[command(flatten)]
    pub effort: Effort,
}

/// Options of [`crate::gpu`]: the flags of `kvferry bench gpu`.
#[derive(Debug, Clone, Args)]
pub struct GpuBench {
    /// Parts to measure, in this order [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    pub rows: Vec<GpuRows>,
    /// The GPU, by its number in this process
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub device: i32,
    /// Time after which nothing more is begun; what is left out is named
    #[arg(long, value_name = "SECONDS", default_value_t = 150)]
    pub limit: u32,
    /// Host memory that is pinned for plain copies; larger tables are left out [default: 2GiB, with --quick 4MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    pub host_memory: Option<u64>,
    /// PTX of further kernels to compare with, such as `nvcc -ptx bench/gpu/copy.cu` makes
    #[arg(long, value_name = "FILE")]
    pub kernel: Option<PathBuf>,
    /// Where a file is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
    /// Rounds; nine or more to judge by [default: 9, with --quick 2]
    #[arg(long, value_parser = between(1, 100))]
    pub rounds: Option<usize>,
    /// Small and short
    #[arg(long)]
    pub quick: bool,
}

/// Options of [`crate::idle`]: the flags of `kvferry bench idle`.
#[derive(Debug, Clone, Args)]
pub struct IdleBench {
    /// Seconds for which all of them have nothing to do
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    /// Where the store is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    pub folder: Option<PathBuf>,
}

/// Rows of the bench of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum GpuRows {
    /// 64 MiB in one piece
    Contiguous,
    /// Tables of scattered blocks
    Scattered,
    /// Between GPUs of two processes
    Peers,
    /// A handoff beside a computation
    Exposed,
    /// A computation beside copies that never pause
    Beside,
    /// Processor time
    Cpu,
    /// The first copies of a process, measurements of copies, and pinned memory
    First,
    /// Copies to files and back
    File,
}

/// Numbers of a flag.
fn between(least: u64, most: u64) -> RangedU64ValueParser<usize> {
    RangedU64ValueParser::new().range(least..=most)
}

/// A measure of handoffs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Measure {
    /// What is left of a transfer when prefill has been computed
    Exposed,
    /// A second handoff over local, beside the same over TCP
    Second,
    /// What the connector costs a scheduler step
    Step,
    /// Planning between engines of unequal tensor parallelism
    Plan,
    /// Bytes of control messages
    Control,
    /// A handoff of one block between two engines
    OneBlock,
    /// Handoffs beside a client that makes up the parameters of its requests
    Invented,
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

/// Checksums of the payload over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Checksums {
    /// Every byte is checked
    On,
    /// No byte is checked
    Off,
    /// Off, and on beside it
    Both,
}

/// The direction of a transfer, seen from the caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Op {
    /// Blocks of this side go to the target
    Write,
    /// Blocks of the target come to this side
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

/// Placement of two processes on cores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Placement {
    /// One core each
    Apart,
    /// One core for both
    Together,
    /// The kernel chooses, as it does for two hosts
    Free,
}

/// Parts of a measurement of transfers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Part {
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
    /// An agent with live sessions and nothing to do
    Idle,
    /// Many live sessions on one agent
    Sessions,
    /// Peers that are killed or stopped
    Faults,
}

/// Blocks of a batch: `32KiB:1024`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Size {
    /// Bytes of a block, below 4 GiB.
    pub block: usize,
    /// Blocks of a batch.
    pub count: usize,
}

impl Size {
    pub(crate) fn bytes(self) -> usize {
        self.block * self.count
    }
}

impl FromStr for Size {
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

/// Streams that a batch may use, 1 to 64; `None` leaves the number to the agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streams(pub Option<usize>);

impl FromStr for Streams {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_capacity_is_a_number_of_blocks_or_a_part_of_them() {
        assert_eq!(parse_capacity("5000"), Ok(Capacity::Blocks(5000)));
        assert_eq!(parse_capacity("1/16"), Ok(Capacity::OneOf(16)));
        for text in ["0", "1/0", "2/3", "1/", "-1", "many", "4294967296"] {
            assert!(parse_capacity(text).is_err(), "{text}");
        }
    }

    #[test]
    fn impossible_sizes_and_streams_are_refused() {
        assert_eq!("1MiB:256".parse(), Ok(Size { block: 1 << 20, count: 256 }));
        for size in ["4KiB", "4KiB:0", "x:1", "4KiB:y", "4GiB:1", "1GiB:65"] {
            assert!(size.parse::<Size>().is_err(), "{size}");
        }
        assert_eq!(("auto".parse(), "4".parse()), (Ok(Streams(None)), Ok(Streams(Some(4)))));
        assert!("0".parse::<Streams>().is_err() && "many".parse::<Streams>().is_err());
    }
}
