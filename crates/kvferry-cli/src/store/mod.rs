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
mod time;
mod verify;

use kvferry_bench::failure::Failure;
use kvferry_store::inspect::{Segment, State};
use kvferry_store::log::Record;
use kvferry_store::{Error, inspect};
use serde::Serialize;

use crate::cli::{StoreAction, StoreArgs};

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
