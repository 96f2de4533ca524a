//! Options of the measurements.

use std::path::PathBuf;
use std::str::FromStr;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::model::{Dtype, Model};
use crate::units::parse_bytes;

/// Options of [`crate::transfers`]. An empty list, or `None`, is the default.
#[derive(Debug, Clone)]
pub struct TransferOptions {
    /// `HOST:PORT` of a target on another host; `None`: a second process of this host.
    pub target: Option<String>,
    /// Names of transports, each measured by itself. Empty: `tcp` and `local`; `auto` with `target`.
    pub transports: Vec<String>,
    /// Directions that are measured; one at least.
    pub ops: Vec<Op>,
    /// Empty: the sizes of the table to reach, unless there is a `shape` or a `trace`.
    pub sizes: Vec<Size>,
    /// Requests of a model to move.
    pub shape: Option<Shape>,
    /// A file with one batch per line.
    pub trace: Option<PathBuf>,
    /// Streams that a batch is striped over; one entry at least.
    pub streams: Vec<Streams>,
    /// Whether payload over TCP is checked.
    pub checksums: Checksums,
    /// Numbers of concurrent callers, each 1 to 64.
    pub callers: Vec<usize>,
    /// Cores of the two processes of a latency measurement. Empty: all that this host has.
    pub placements: Vec<Placement>,
    /// `None`: 11, or 7 beside other engines, or 3 if `quick`.
    pub rounds: Option<usize>,
    /// Empty: all but [`Part::Faults`].
    pub parts: Vec<Part>,
    /// Adds [`Part::Faults`].
    pub faults: bool,
    /// A Python interpreter with a stock Mooncake, for faulty peers of that kind.
    pub stock: Option<PathBuf>,
    /// The Python interpreter whose calls are measured. `None`: the first one with kvferry.
    pub python: Option<PathBuf>,
    /// A Python interpreter with other engines and `kvferry_peers`.
    pub peers: Option<PathBuf>,
    /// Small and short.
    pub quick: bool,
}

/// Options of [`crate::handoffs`].
#[derive(Debug, Clone)]
pub struct HandoffOptions {
    /// Empty: everything.
    pub measures: Vec<Measure>,
    /// Names of transports, each measured by itself.
    pub transports: Vec<String>,
    /// Bytes of the handoff whose exposed time is measured. `None`: 1 GiB, or 64 MiB if `quick`.
    pub size_bytes: Option<u64>,
    /// `None`: 7, or 2 if `quick`.
    pub rounds: Option<usize>,
    /// Small and short.
    pub quick: bool,
}

/// Options of [`crate::files`].
#[derive(Debug, Clone)]
pub struct FileBench {
    /// Folder of the file. `None`: the folder of temporary files.
    pub folder: Option<PathBuf>,
    /// Bytes of the file, rounded up to 64 MiB.
    pub bytes: u64,
    /// Block sizes, at most 64 MiB; one at least.
    pub sizes: Vec<u64>,
    /// Engine by which kvferry reads and writes.
    pub engine: &'static str,
    /// A Python interpreter with NIXL and `kvferry_peers`. `None`: NIXL is not measured.
    pub peers: Option<PathBuf>,
    /// `None`: 7, or 2 if `quick`.
    pub rounds: Option<usize>,
    /// Small and short.
    pub quick: bool,
}

/// Options of [`crate::store::speed`].
#[derive(Debug, Clone)]
pub struct StoreSpeed {
    /// Folder of the store. `None`: the folder of temporary files.
    pub folder: Option<PathBuf>,
    /// Bytes of the blocks of one round.
    pub bytes: u64,
    /// Block sizes; one at least.
    pub sizes: Vec<u64>,
    /// `None`: 7, or 2 if `quick`.
    pub rounds: Option<usize>,
    /// Small and short.
    pub quick: bool,
}

/// Options of [`crate::offload`].
#[derive(Debug, Clone)]
pub struct OffloadBench {
    /// Folder of the stores. `None`: the folder of temporary files.
    pub folder: Option<PathBuf>,
    /// Bytes of the blocks of one round.
    pub bytes: u64,
    /// `None`: 7, or 2 if `quick`.
    pub rounds: Option<usize>,
    /// Small and short.
    pub quick: bool,
}

/// Options of [`crate::store`].
#[derive(Debug, Clone)]
pub struct StoreBench {
    /// A request per line.
    pub trace: PathBuf,
    /// Capacities in blocks; one at least.
    pub blocks: Vec<usize>,
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
}

/// Requests of a model.
#[derive(Debug, Clone, Copy)]
#[allow(missing_docs, reason = "the fields are the options of the same names")]
pub struct Shape {
    pub model: Model,
    pub tokens: u32,
    pub requests: u32,
    pub block_tokens: u32,
    pub dtype: Dtype,
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
    fn impossible_sizes_and_streams_are_refused() {
        assert_eq!("1MiB:256".parse(), Ok(Size { block: 1 << 20, count: 256 }));
        for size in ["4KiB", "4KiB:0", "x:1", "4KiB:y", "4GiB:1", "1GiB:65"] {
            assert!(size.parse::<Size>().is_err(), "{size}");
        }
        assert_eq!(("auto".parse(), "4".parse()), (Ok(Streams(None)), Ok(Streams(Some(4)))));
        assert!("0".parse::<Streams>().is_err() && "many".parse::<Streams>().is_err());
    }
}
