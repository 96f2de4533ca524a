//! `kvferry store`: looks at a store on disk, verifies it, removes what it does not need, has it take empty
//! directories, exports and imports blocks.
//!
//! `kvferry_store::inspect`, `clean`, `adopt` and `archive` do the work. A file here is a subcommand: what it counts,
//! and how it shows it.

mod adopt;
mod export;
mod gc;
mod import;
mod ls;
mod stat;
mod verify;

use std::time::{Duration, UNIX_EPOCH};

use clap::{Args, Subcommand};
use kvferry_bench::failure::Failure;
use kvferry_store::inspect::{Segment, State};
use kvferry_store::log::Record;
use kvferry_store::{Error, inspect};
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  kvferry store stat /mnt/nvme/kv
  kvferry store ls /mnt/nvme/kv --blocks --namespace 8f3c21d07a5be946
  kvferry store verify /mnt/nvme/kv --json | jq '.bad'
  kvferry store gc /mnt/nvme/kv --capacity 100GiB --dry-run
  kvferry store adopt /mnt/nvme0/kv /mnt/nvme1/kv --dry-run
  kvferry store export kv.blocks /mnt/nvme/kv
  kvferry store import kv.blocks /mnt/nvme/kv --capacity 500GiB
  kvferry store export - /mnt/nvme/kv | ssh other kvferry store import - /mnt/kv --capacity 500GiB

A store in several directories is given whole: all of them, in any order.

stat, ls, verify and export change nothing, and work while processes have the store open. They show
what is in the files. The files do not say which blocks were evicted: such a block is shown until its segment
is used again. A block that was copied to another segment is shown in both until then.

Exit codes:
  0  success
  1  verify or export found a bad block, or a segment that can't be read; import found that the file is
     damaged or cut, and imported the rest
  2  the command line is wrong, or there is no store that can be read
  4  gc, adopt: a process has the store open, or a file can't be changed; export: the file can't be written;
     import: blocks could not be stored";

/// Look at a store of blocks on disk, verify it, clean it, replace directories, export and import blocks.
#[derive(Debug, Clone, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct StoreArgs {
    #[command(subcommand)]
    action: StoreAction,
}

#[derive(Debug, Clone, Subcommand)]
enum StoreAction {
    /// Show what a store is, and how much is in it
    Stat(stat::StatArgs),
    /// List segments, or blocks
    Ls(ls::LsArgs),
    /// Read all blocks and compare them with their checksums
    Verify(verify::VerifyArgs),
    /// Remove files that no process needs, while no process has the store open
    Gc(gc::GcArgs),
    /// Take empty directories in the place of lost ones, while no process has the store open
    Adopt(adopt::AdoptArgs),
    /// Write blocks to a file, to be imported into another store
    Export(export::ExportArgs),
    /// Put the blocks of an exported file into a store
    Import(import::ImportArgs),
}

pub(crate) fn run(args: &StoreArgs) -> Result<(), Failure> {
    match &args.action {
        StoreAction::Stat(args) => stat::run(args),
        StoreAction::Ls(args) => ls::run(args),
        StoreAction::Verify(args) => verify::run(args),
        StoreAction::Gc(args) => gc::run(args),
        StoreAction::Adopt(args) => adopt::run(args),
        StoreAction::Export(args) => export::run(args),
        StoreAction::Import(args) => import::run(args),
    }
}

/// A namespace's number, as `kvferry store` shows it.
fn parse_namespace(text: &str) -> Result<u64, String> {
    let digits = text.strip_prefix("0x").unwrap_or(text);
    let is_hex = (1..=16).contains(&digits.len()) && digits.chars().all(|c| c.is_ascii_hexdigit());
    let id = is_hex.then(|| u64::from_str_radix(digits, 16).ok()).flatten();
    id.ok_or_else(|| format!("`{text}` is not a namespace such as 8f3c21d07a5be946"))
}

fn failure(error: Error) -> Failure {
    match error {
        Error::InUse { .. } => Failure::Failed(format!("{error}; close it first")),
        other => Failure::Usage(other.to_string()),
    }
}

/// Kind of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Kind {
    Sealed,
    Open,
    Free,
    WrongLength,
    Foreign,
    Unreadable,
}

impl Kind {
    fn of(segment: &Segment) -> Self {
        match &segment.state {
            State::Used(scanned) if scanned.is_sealed => Self::Sealed,
            State::Used(_) => Self::Open,
            State::Free => Self::Free,
            State::WrongLength(_) => Self::WrongLength,
            State::OfAnotherStore => Self::Foreign,
            State::Unreadable(_) => Self::Unreadable,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Sealed => "sealed",
            Self::Open => "open",
            Self::Free => "free",
            Self::WrongLength => "of a wrong length",
            Self::Foreign => "foreign",
            Self::Unreadable => "unreadable",
        }
    }
}

/// The blocks of a segment; none if it has no valid header.
fn records(segment: &Segment) -> &[Record] {
    match &segment.state {
        State::Used(scanned) => &scanned.records,
        _ => &[],
    }
}

fn store_id(files: &inspect::Files) -> String {
    files.superblock().store.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn namespace_id(id: u64) -> String {
    format!("{id:016x}")
}

fn key(record: &Record) -> String {
    let [high, low] = record.block.key;
    format!("{high:016x}{low:016x}")
}

/// Writes milliseconds of Unix time as `2026-11-23 12:24:36`, in UTC. Damaged files have any number; the last
/// second of the year 9999 stands for all later ones.
fn utc(unix_ms: u64) -> String {
    const LAST_SECOND: u64 = 253_402_300_799;
    let time = UNIX_EPOCH + Duration::from_secs((unix_ms / 1000).min(LAST_SECOND));
    humantime::format_rfc3339_seconds(time).to_string().replace('T', " ").replace('Z', "")
}

/// An error with its causes.
fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        text.push_str(&format!(": {next}"));
        cause = next.source();
    }
    text
}

/// `1 block`, `2 blocks`.
fn counted(count: u64, what: &str) -> String {
    let plural = if count == 1 { "" } else { "s" };
    format!("{} {what}{plural}", kvferry_bench::units::count(count))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_dates_in_utc_and_any_number_is_one() {
        assert_eq!(utc(951_782_400_999), "2000-02-29 00:00:00");
        assert_eq!(utc(1_735_689_599_999), "2024-12-31 23:59:59");
        assert_eq!(utc(u64::MAX), "9999-12-31 23:59:59");
    }
}
