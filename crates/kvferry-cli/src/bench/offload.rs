//! `kvferry bench offload`.

use std::path::PathBuf;

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::options::OffloadBench;
use kvferry_bench::report::Report;
use kvferry_bench::units::parse_bytes;
use kvferry_bench::{files, offload};

use super::Figures;

const EXAMPLES: &str = "\
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
#[command(after_long_help = EXAMPLES)]
pub(super) struct OffloadArgs {
    /// Where the stores are made, and removed in the end [default: the folder of temporary files]
    #[arg(long, value_name = "FOLDER")]
    folder: Option<PathBuf>,
    /// Bytes of the blocks of a round [default: 512MiB, with --quick 128MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    bytes: Option<u64>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Small and short
    #[arg(long)]
    quick: bool,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

impl OffloadArgs {
    fn options(&self) -> OffloadBench {
        OffloadBench {
            folder: self.folder.clone(),
            bytes: self.bytes.unwrap_or(if self.quick { 128 << 20 } else { 512 << 20 }),
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
        }
    }
}

pub(super) fn run(args: &OffloadArgs) -> Result<(), Failure> {
    args.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    args.figures.of(&[offload::SCHEMA], args.check, Report::drawings, |bar| {
        offload::measure(&args.options(), bar)
    })
}
