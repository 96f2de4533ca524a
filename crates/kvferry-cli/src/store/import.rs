//! `kvferry store import`.

use std::fs::File;
use std::io::{self, Read};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use kvferry::Agent;
use kvferry_bench::failure::Failure;
use kvferry_bench::units::{self, parse_bytes};
use kvferry_store::archive::{Imported, import};
use kvferry_store::inspect::Files;
use kvferry_store::{Store, StoreOptions};
use serde::Serialize;

use super::export::is_standard;
use super::{counted, failure, parse_namespace};
use crate::output;

const EXAMPLES: &str = "\
Processes may have the store open. If there is no store in DIR, it is made.

--capacity is the one that engines open the store with. It counts if no process has the store open; one
that is too small for what is there is refused.

Each block is compared with its checksum before it is stored. Blocks that are there are skipped. Where
the file is damaged or cut, all other blocks are imported, and the exit code is 1. Blocks keep their
namespace, priority, and the time at which their retention ends; a block that was to leave before now
is skipped. If the store is full, imported blocks replace others, as those that engines put.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct ImportArgs {
    /// The file to read; - for standard input
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The store's directories: all of them
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// The capacity of the store
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    capacity: u64,
    /// Only blocks of this namespace
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    namespace: Option<u64>,
    /// Print the result as JSON, schema kvferry.store-import/1
    #[arg(long)]
    json: bool,
    /// No progress bar
    #[arg(long, short)]
    quiet: bool,
}

/// `kvferry store import --json`.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    stored: u64,
    present: u64,
    refused: u64,
    failed: u64,
    expired: u64,
    other_namespaces: u64,
    /// Places of the file that are damaged, and records that should be there and are not.
    damaged: u64,
    missing: u64,
    is_cut: bool,
    read_error: Option<String>,
    /// Data of all blocks of the file that are right.
    bytes: u64,
    read_bytes: u64,
    seconds: f64,
}

pub(super) fn run(args: &ImportArgs) -> Result<(), Failure> {
    let (from, total): (Box<dyn Read>, u64) = if is_standard(&args.file) {
        (Box::new(io::stdin().lock()), 0)
    } else {
        let usage = |error: io::Error| Failure::Usage(format!("{}: {error}", args.file.display()));
        let file = File::open(&args.file).map_err(usage)?;
        let total = file.metadata().map_err(usage)?.len();
        (Box::new(file), total)
    };
    refuse_a_smaller_capacity(args)?;
    let mut directories = args.directories.iter();
    let first =
        directories.next().ok_or_else(|| Failure::Usage("no directory was given".into()))?;
    let options = StoreOptions::new(first, args.capacity);
    let options = directories.fold(options, StoreOptions::and_directory);
    let agent = Agent::builder().name("kvferry-import").start();
    let agent = agent.map_err(|error| Failure::Failed(error.to_string()))?;
    let store = Store::open(&agent, &options).map_err(failure)?;
    let bar = output::byte_bar(args.quiet, total);
    let began = Instant::now();
    let imported = import(&agent, &store, args.namespace, from, |so_far| {
        bar.set_position(so_far.read_bytes);
        bar.set_message(format!(
            "{}, {}",
            counted(so_far.stored, "block"),
            units::bytes(so_far.read_bytes)
        ));
    });
    bar.finish_and_clear();
    let synced = store.sync();
    store.close();
    let report = Report::new(imported.map_err(failure)?, began.elapsed());
    output::show(&report, args.json)?;
    synced.map_err(|error| Failure::Failed(error.to_string()))?;
    report.outcome()
}

/// A process that opens a store with a smaller capacity removes segments.
fn refuse_a_smaller_capacity(args: &ImportArgs) -> Result<(), Failure> {
    // Where there is no store, or a wrong one, opening it says so.
    let Ok(files) = Files::open(&args.directories) else { return Ok(()) };
    match files.fit_into(args.capacity).map_err(failure)? {
        true => Ok(()),
        false => Err(Failure::Usage(format!(
            "the store has segments beyond a capacity of {}: give the one that engines open it with",
            units::bytes(args.capacity)
        ))),
    }
}

impl Report {
    fn new(imported: Imported, took: Duration) -> Self {
        Self {
            schema: "kvferry.store-import/1",
            stored: imported.stored,
            present: imported.present,
            refused: imported.refused,
            failed: imported.failed,
            expired: imported.expired,
            other_namespaces: imported.others,
            damaged: imported.damaged,
            missing: imported.missing,
            is_cut: imported.is_cut,
            read_error: imported.read_error,
            bytes: imported.bytes,
            read_bytes: imported.read_bytes,
            seconds: took.as_secs_f64(),
        }
    }

    fn outcome(&self) -> Result<(), Failure> {
        if let Some(error) = &self.read_error {
            return Err(Failure::Check(format!("the file can't be read further: {error}")));
        }
        if self.damaged > 0 || self.missing > 0 || self.is_cut {
            let mut what = format!("the file is damaged in {}", counted(self.damaged, "place"));
            if self.missing > 0 {
                what.push_str(&format!(", {} missing", counted(self.missing, "block")));
            }
            if self.is_cut {
                what.push_str(", and has no end: it was cut, or its export did not finish");
            }
            return Err(Failure::Check(what));
        }
        match self.refused + self.failed {
            0 => Ok(()),
            blocks => Err(Failure::Failed(format!("{} not stored", counted(blocks, "block")))),
        }
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        let counts = [
            (self.stored, "stored"),
            (self.present, "present"),
            (self.refused, "refused"),
            (self.failed, "failed"),
            (self.expired, "expired"),
            (self.other_namespaces, "of other namespaces"),
            (self.damaged, "damaged"),
            (self.missing, "missing"),
        ];
        // The first two always.
        let shown = counts.iter().enumerate().filter(|(at, (count, _))| *at < 2 || *count > 0);
        let shown: Vec<_> =
            shown.map(|(_, (count, what))| format!("{} {what}", units::count(*count))).collect();
        format!(
            "{}; {} in {}\n",
            shown.join(", "),
            units::bytes(self.bytes),
            units::duration(Duration::from_secs_f64(self.seconds)),
        )
    }
}
