//! `kvferry bench`: the library measures, this prints, judges and writes. A file here is a bench: its arguments,
//! and how it runs.

mod file;
mod gpu;
mod handoff;
mod idle;
mod offload;
mod store;
mod transfers;

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use kvferry_bench::failure::Failure;
use kvferry_bench::report::{PAGE_NAME, Report};

use crate::{files, output};

const EXAMPLES: &str = "\
Start with:
  kvferry bench transfers --quick      reads and writes, a minute
  kvferry bench transfers --help       every bench has examples

Without --quick a bench takes minutes, and its figures are fit to judge by: each stands beside what
another program reaches in the same rounds, or beside a bound.";

/// Measure kvferry beside what plain programs and other engines reach in the same rounds.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    bench: Bench,
}

#[derive(Debug, Clone, Subcommand)]
enum Bench {
    /// Measure transfers between agents, beside plain TCP, process_vm and memcpy
    Transfers(Box<transfers::TransfersArgs>),
    /// Measure what handoffs cost beyond moving their bytes; exit code 1 if a bound is missed
    Handoff(handoff::HandoffArgs),
    /// Measure memory to files and back, beside fio
    File(file::FileArgs),
    /// Measure the store of blocks; with --trace, its hits beside LRU and the optimum
    Store(store::StoreArgs),
    /// Measure offloading by the block manager, beside the block store
    Offload(offload::OffloadArgs),
    /// Measure processor time and wake-ups of processes with nothing to do
    Idle(idle::IdleArgs),
    /// Measure copies of a GPU's memory, beside the driver's own calls
    Gpu(gpu::GpuArgs),
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    match &args.bench {
        Bench::Transfers(args) => transfers::run(args),
        Bench::Handoff(args) => handoff::run(args),
        Bench::File(args) => file::run(args),
        Bench::Store(args) => store::run(args),
        Bench::Offload(args) => offload::run(args),
        Bench::Idle(args) => idle::run(args),
        Bench::Gpu(args) => gpu::run(args),
    }
}

/// What is done with the figures of a bench.
#[derive(Debug, Clone, Args)]
struct Figures {
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// Also write the result as JSON to this file
    #[arg(long, value_name = "FILE", visible_alias = "out")]
    output: Option<PathBuf>,
    /// Show, judge and draw what --output wrote, instead of measuring
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Write `report.html`, and one SVG per picture of it, to this folder
    #[arg(long, value_name = "DIR")]
    plot: Option<PathBuf>,
    /// No progress bar and no remarks
    #[arg(long, short)]
    quiet: bool,
}

/// Names and contents of the files that show a report.
type Draw = fn(&Report) -> Vec<(String, String)>;

impl Figures {
    /// Measures, unless a report of one of `schemas` is read from a file. Shows and writes the result, and judges it if
    /// `is_judged`.
    fn of(
        &self,
        schemas: &[&str],
        is_judged: bool,
        draw: Draw,
        measure: impl FnOnce(&ProgressBar) -> Result<Report, Failure>,
    ) -> Result<(), Failure> {
        let report = match &self.from {
            Some(file) => read(file, schemas)?,
            None => {
                self.output.as_deref().map_or(Ok(()), files::check)?;
                self.plot.as_deref().map_or(Ok(()), check_folder)?;
                let bar = output::step_bar(self.quiet);
                let measured = measure(&bar);
                bar.finish_and_clear();
                measured?
            }
        };
        // Each is tried, even if another can't be written.
        let shown = output::show(&report, self.json);
        let kept = match &self.output {
            Some(file) => files::write(file, output::json(&report)?),
            None => Ok(()),
        };
        let drawn = match &self.plot {
            Some(folder) => write_all(folder, draw(&report)),
            None => Ok(()),
        };
        shown.map_err(Failure::from).and(kept).and(drawn)?;
        match report.shortfall() {
            Some(shortfall) if is_judged => Err(Failure::Check(shortfall)),
            _ => Ok(()),
        }
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        self.to_table()
    }
}

fn read(file: &Path, schemas: &[&str]) -> Result<Report, Failure> {
    let text = fs::read_to_string(file).map_err(|error| error.to_string());
    let report = text.and_then(|text| Report::from_json(&text, schemas));
    report.map_err(|why| Failure::Usage(format!("--from {}: {why}", file.display())))
}

/// Makes `folder`, and fails if no pictures can be written to it.
fn check_folder(folder: &Path) -> Result<(), Failure> {
    files::folder(folder)
        .and_then(|()| files::check(&folder.join(PAGE_NAME)))
        .map_err(|why| why.while_doing("--plot"))
}

fn write_all(folder: &Path, drawings: Vec<(String, String)>) -> Result<(), Failure> {
    let write = |(name, content)| files::write(&folder.join(name), content);
    files::folder(folder)
        .and_then(|()| drawings.into_iter().try_for_each(write))
        .map_err(|why| why.while_doing("--plot"))
}
