//! `kvferry bench store`.

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::options::StoreBench;
use kvferry_bench::report::Report;
use kvferry_bench::{files, store};

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench store --quick                     a minute, too short to judge by
  kvferry bench store --folder /mnt/nvme --check  seven rounds on that file system, with bounds
  kvferry bench store --rows full --folder /mnt/nvme --check  puts into a full store, a minute each
  kvferry bench store --rows events --check       how late routers learn of blocks, half a minute
  kvferry bench store --trace conversation_trace.jsonl
  kvferry bench store --trace conversation_trace.jsonl --blocks 50000 --json
  kvferry bench store --tool-calls --policies-only --blocks 1/32,1/16,1/8,1/4

A trace has one request per line, as the Mooncake project publishes them:
  {\"timestamp\": 27482, \"input_length\": 6955, \"output_length\": 52, \"hash_ids\": [46, 47, 48]}
timestamp is in milliseconds. hash_ids name the blocks of the prompt, the first one first; equal
ids mean an equal prompt up to and with that block. Other fields are ignored.

A hit is a block that is there together with all blocks before it. A replay is exact: it has the
same result each time.";

/// Measure the store of blocks: puts and gets beside the file transport, and the index by itself. With --trace
/// or --tool-calls, replay requests instead: hits of the store's policy beside LRU, S3-FIFO and the optimum.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct StoreArgs {
    #[command(flatten)]
    options: StoreBench,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &StoreArgs) -> Result<(), Failure> {
    let options = &args.options;
    if let (Some(count), Some(folder)) = (options.fill, &options.folder) {
        return store::fill(folder, count, options.effort.quick);
    }
    options.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    args.figures
        .of(&store::SCHEMAS, args.check, Report::drawings, |bar| store::measure(options, bar))
}
