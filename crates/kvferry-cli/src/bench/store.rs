//! `kvferry bench store`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvferry_bench::failure::Failure;
use kvferry_bench::options::{StoreBench, StoreSpeed};
use kvferry_bench::report::Report;
use kvferry_bench::units::parse_bytes;
use kvferry_bench::{files, store};

use super::Figures;

const EXAMPLES: &str = "\
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
#[command(after_long_help = EXAMPLES)]
pub(super) struct StoreArgs {
    /// A trace to replay
    #[arg(long, value_name = "FILE", conflicts_with_all = ["folder", "bytes", "sizes", "rounds", "quick", "rows"])]
    trace: Option<PathBuf>,
    /// Capacities, in blocks
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,30000", value_name = "COUNT",
          value_parser = clap::value_parser!(u32).range(1..), requires = "trace")]
    blocks: Vec<u32>,
    /// Where the store is made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Bytes of the blocks of a round [default: 1GiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    bytes: Option<u64>,
    /// Fill a store with COUNT blocks; with --quick, be killed then
    #[arg(long, hide = true, value_name = "COUNT", requires = "folder")]
    fill: Option<u64>,
    /// Block sizes
    #[arg(long, value_delimiter = ',', value_parser = parse_bytes, value_name = "SIZE",
          default_value = "128KiB,2MiB")]
    sizes: Vec<u64>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// What is measured
    #[arg(long, value_enum, default_value = "speed")]
    rows: StoreRows,
    /// With --rows full: seconds of puts into each full store [default: 60, with --quick 5]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=3600), conflicts_with = "trace")]
    seconds: Option<u32>,
    /// Small and short
    #[arg(long)]
    quick: bool,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

/// Rows that the bench of the store measures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum StoreRows {
    /// Puts and gets, the index, opening
    Speed,
    /// Puts into a full store, beside the same into one with space
    Full,
}

impl StoreArgs {
    /// Seconds of puts into each full store.
    fn seconds(&self) -> f64 {
        self.seconds.unwrap_or(if self.quick { 5 } else { 60 }).into()
    }

    fn speed(&self) -> StoreSpeed {
        StoreSpeed {
            folder: self.folder.clone(),
            bytes: self.bytes.unwrap_or(if self.quick { 128 << 20 } else { 1 << 30 }),
            sizes: self.sizes.clone(),
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
        }
    }
}

pub(super) fn run(args: &StoreArgs) -> Result<(), Failure> {
    if let (Some(count), Some(folder)) = (args.fill, &args.folder) {
        return store::speed::fill(folder, count, args.quick);
    }
    args.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    let schemas = [store::SCHEMA, store::full::SCHEMA, store::speed::SCHEMA];
    args.figures.of(&schemas, args.check, Report::drawings, |bar| match &args.trace {
        Some(trace) => {
            let blocks = args.blocks.iter().map(|&blocks| blocks as usize).collect();
            store::measure(&StoreBench { trace: trace.clone(), blocks }, bar)
        }
        None if args.rows == StoreRows::Full => {
            store::full::measure(&args.speed(), args.seconds(), bar)
        }
        None => store::speed::measure(&args.speed(), bar),
    })
}
