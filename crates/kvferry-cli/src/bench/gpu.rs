//! `kvferry bench gpu`.

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::options::GpuBench;
use kvferry_bench::report::Report;
use kvferry_bench::{files, gpu};
use serde_json::json;

use super::Figures;
use crate::files as written;

const EXAMPLES: &str = "\
Examples:
  kvferry bench gpu --quick                         half a minute, too short to judge by
  kvferry bench gpu --check --out gpu.json          nine rounds, with bounds
  kvferry bench gpu --rows scattered --limit 60     one part, for a minute
  kvferry bench gpu --kernel copy.ptx               beside further kernels, from bench/gpu/copy.cu:
                                                    nvcc -ptx -arch=sm_90 -o copy.ptx copy.cu

kvferry's copies stand beside the driver's calls of the same rounds: single copies, batches of 128,
of 512 and of all blocks, kernels on mapped host memory (named with the blocks of their launch),
and kernels that gather inside the GPU before one copy. Without a driver or a GPU, the command says
NOT MEASURED, with the reason, and its exit code is 0.";

/// Measure copies of a GPU's memory, beside the driver's own calls in the same rounds.
#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct GpuArgs {
    #[command(flatten)]
    options: GpuBench,
    /// Exit with 1 if a figure misses its bound
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    figures: Figures,
}

pub(super) fn run(args: &GpuArgs) -> Result<(), Failure> {
    args.options.folder.as_deref().map_or(Ok(()), files::check_folder)?;
    if args.figures.from.is_none()
        && let Some(why) = gpu::unavailable(&args.options)
    {
        return not_measured(&args.figures, &why);
    }
    args.figures.of(&[gpu::SCHEMA], args.check, Report::drawings, |bar| {
        gpu::measure(&args.options, bar, |so_far| {
            // An error here is ignored: the report is written again at the end, and that error counts.
            if let (Some(file), Ok(text)) = (&args.figures.output, crate::output::json(so_far)) {
                let _ = written::write(file, text);
            }
        })
    })
}

/// Reports why there are no figures, in the output forms that figures would have had.
fn not_measured(figures: &Figures, why: &str) -> Result<(), Failure> {
    let value = json!({ "schema": gpu::SCHEMA, "not_measured": why });
    let text = format!("{value:#}\n");
    if figures.json {
        crate::output::print(&text)?;
    } else {
        crate::output::print(&format!("NOT MEASURED: {why}\n"))?;
    }
    figures.output.as_ref().map_or(Ok(()), |file| written::write(file, text))
}
