//! `kvferry bench idle`.

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::options::IdleBench;
use kvferry_bench::report::Report;
use kvferry_bench::{files, idle};

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench idle --check          a minute; exit code 1 above 0.02 % of a core
  kvferry bench idle --seconds 10     too short to judge by

Agents, a block store and the connector's halves are a process each. Each works once, then all have
nothing to do at the same time. `bench/idle/run` measures the Python side.";

/// Measure processor time and wake-ups of processes with nothing to do.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct IdleArgs {
    #[command(flatten)]
    options: IdleBench,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &IdleArgs) -> Result<(), Failure> {
    args.options.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    args.figures
        .of(&[idle::SCHEMA], args.check, Report::drawings, |bar| idle::measure(&args.options, bar))
}
