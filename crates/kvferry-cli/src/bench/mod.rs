//! `kvferry bench`: the library measures, this prints, judges and writes. A file here is a bench: its arguments,
//! and how it runs.

mod file;
mod handoff;
mod offload;
mod store;
mod transfers;

use clap::{Args, Subcommand};
use kvferry_bench::failure::Failure;
use kvferry_bench::report;

use crate::output::{self, Report};

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
}

pub(crate) fn run(args: &BenchArgs) -> Result<(), Failure> {
    match &args.bench {
        Bench::Transfers(args) => transfers::run(args),
        Bench::Handoff(args) => handoff::run(args),
        Bench::File(args) => file::run(args),
        Bench::Store(args) => store::run(args),
        Bench::Offload(args) => offload::run(args),
    }
}

fn judged(report: &report::Report, json: bool, check: bool) -> Result<(), Failure> {
    output::show(report, json)?;
    match report.shortfall() {
        Some(shortfall) if check => Err(Failure::Check(shortfall)),
        _ => Ok(()),
    }
}

impl Report for kvferry_bench::transfers::Report {
    fn text(&self) -> String {
        self.to_table()
    }
}

impl Report for report::Report {
    fn text(&self) -> String {
        self.to_table()
    }
}
