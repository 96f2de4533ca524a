//! `kvferry store adopt`.

use std::path::PathBuf;

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_store::adopt::{Adoption, Empty};
use serde::Serialize;

use super::failure;
use crate::output;

const EXAMPLES: &str = "\
An empty directory of a store counts as lost: it may be the folder below a device that is not mounted.
If the device is gone for good, this command makes the directory the store's. The blocks of the lost
device are missed. Look with --dry-run first: it says where no device is mounted.

A device that comes back and is mounted over such a directory is used from the next start of all
processes on, with its blocks. What was written below it stays there, hidden, until it is removed.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct AdoptArgs {
    /// The store's directories: all of them, also those that are empty
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Only show what would be done
    #[arg(long)]
    dry_run: bool,
    /// Print the result as JSON, schema kvferry.store-adopt/1
    #[arg(long)]
    json: bool,
}

/// `kvferry store adopt --json`.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    store: String,
    dry_run: bool,
    /// Directories of the store.
    directories: u32,
    adopted: Vec<Adopted>,
}

#[derive(Debug, Serialize)]
struct Adopted {
    directory: PathBuf,
    number: u32,
    /// False if its segments are on the file system of the folder above.
    is_mounted: bool,
}

pub(super) fn run(args: &AdoptArgs) -> Result<(), Failure> {
    let adoption = Adoption::open(&args.directories).map_err(failure)?;
    let adopted = |it: &Empty| {
        let Empty { path, number, is_mounted } = it.clone();
        Adopted { directory: path, number, is_mounted }
    };
    let report = Report {
        schema: "kvferry.store-adopt/1",
        store: adoption.store().iter().map(|byte| format!("{byte:02x}")).collect(),
        dry_run: args.dry_run,
        directories: adoption.directories(),
        adopted: adoption.empty().iter().map(adopted).collect(),
    };
    if !args.dry_run {
        adoption.carry_out().map_err(|error| Failure::Failed(error.to_string()))?;
    }
    output::show(&report, args.json)?;
    Ok(())
}

impl output::Report for Report {
    fn text(&self) -> String {
        let would = if self.dry_run { "would become" } else { "is now" };
        let line = |it: &Adopted| {
            let (directory, number) = (it.directory.display(), it.number);
            let mount = if it.is_mounted {
                ""
            } else {
                "; no device is mounted there: its segments are on the file system of the folder \
                 above"
            };
            let (count, store) = (self.directories, &self.store);
            format!("{directory} {would} directory {number} of {count} of store {store}{mount}\n")
        };
        match self.adopted.as_slice() {
            [] => "no directory is empty: nothing to adopt\n".into(),
            adopted => adopted.iter().map(line).collect(),
        }
    }
}
