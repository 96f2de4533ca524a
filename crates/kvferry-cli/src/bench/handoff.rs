//! `kvferry bench handoff`.

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::handoffs;
use kvferry_bench::options::HandoffBench;
use kvferry_bench::report::Report;

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench handoff                       everything, some minutes
  kvferry bench handoff --only exposed --transport tcp
  kvferry bench handoff --only invented       beside 10 000 requests with made-up parameters
  kvferry bench handoff --quick --json        too short to judge by

Producer and consumer are two processes of this host, except with --only invented. A figure with a
bound is judged by its median; the others are only shown. The device of a prefill is a timer:
computing takes time but no processor, as with a GPU.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct HandoffArgs {
    #[command(flatten)]
    options: HandoffBench,
    #[command(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &HandoffArgs) -> Result<(), Failure> {
    args.figures.of(&[handoffs::SCHEMA], true, Report::drawings, |bar| {
        handoffs::measure(&args.options, bar)
    })
}
