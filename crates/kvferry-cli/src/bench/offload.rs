//! `kvferry bench offload`.

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::options::OffloadBench;
use kvferry_bench::report::Report;
use kvferry_bench::{files, offload};

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench offload --quick                     a minute, too short to judge by
  kvferry bench offload --folder /mnt/nvme --check  seven rounds on that file system, with bounds

Blocks in the pages of the reference engine are offloaded and onboarded by the block manager and
its driver, with a block store in a folder. The same pages are put to a block store and got from it
directly, in turns. The scheduler's thread is measured call by call: its processor time has the
bound, because the kernel may take a thread off its processor in the middle of a call; its wall
time is shown, too.";

/// Measure offloading by the block manager, its driver and a block store, beside the block store by itself; and
/// the block manager by itself.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct OffloadArgs {
    #[command(flatten)]
    options: OffloadBench,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &OffloadArgs) -> Result<(), Failure> {
    args.options.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    args.figures.of(&[offload::SCHEMA], args.check, Report::drawings, |bar| {
        offload::measure(&args.options, bar)
    })
}
