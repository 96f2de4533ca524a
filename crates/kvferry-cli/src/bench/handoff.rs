//! `kvferry bench handoff`.

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::handoffs;
use kvferry_bench::options::{HandoffOptions, Measure};
use kvferry_bench::report::Report;
use kvferry_bench::units::parse_bytes;

use super::Figures;

const EXAMPLES: &str = "\
Examples:
  kvferry bench handoff                         everything, some minutes
  kvferry bench handoff --only exposed --transport tcp
  kvferry bench handoff --quick --json          too short to judge by

Producer and consumer are two processes of this host. A figure with a bound is judged by its median;
the others are only shown. The device of a prefill is a timer: computing takes time but no processor,
as with a GPU.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(crate) struct HandoffArgs {
    /// What to measure [default: everything]
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Measure>,
    /// Transports, each measured by itself
    #[arg(long, value_delimiter = ',', default_value = "local,tcp", value_name = "NAME")]
    transport: Vec<String>,
    /// Bytes of the handoff of which the exposed time is measured; less if memory is short
    /// [default: 1GiB, with --quick 64MiB]
    #[arg(long, value_parser = parse_bytes, value_name = "SIZE")]
    size: Option<u64>,
    /// Rounds; seven or more to judge by [default: 7, with --quick 2]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=100))]
    rounds: Option<u32>,
    /// Small and short
    #[arg(long)]
    quick: bool,
    #[command(flatten)]
    figures: Figures,
}

impl HandoffArgs {
    fn options(&self) -> HandoffOptions {
        HandoffOptions {
            measures: self.only.clone(),
            transports: self.transport.clone(),
            size_bytes: self.size,
            rounds: self.rounds.map(|rounds| rounds as usize),
            quick: self.quick,
        }
    }
}

pub(super) fn run(args: &HandoffArgs) -> Result<(), Failure> {
    args.figures.of(&[handoffs::SCHEMA], true, Report::drawings, |bar| {
        handoffs::measure(&args.options(), bar)
    })
}
