//! `kvferry store gc`.

use std::path::{Path, PathBuf};

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::units::{self, parse_bytes};
use kvferry_store::clean::{CleanOptions, Cleaner, Plan, RemovalReason, Step};
use serde::{Serialize, Serializer};

use super::{counted, failure, parse_namespace};
use crate::output;

const EXAMPLES: &str = "\
Always removed: segments without a valid header or without blocks, files of a wrong length, and
what an interrupted write left. Segments of killed processes are sealed: the next start reads them
at once.

--capacity removes the oldest segments until a process can open the store with this capacity and
lose no other block. It may give segments other numbers; a power cut in that moment loses one of
them. A process that opens the store with a smaller capacity removes segments by number, not by age.

What it can't do: remove single blocks, or those of a namespace from segments that have blocks of
others; remove evicted blocks, which the files do not tell apart; repair bad blocks. Segments that
can't be read, or are another store's, stay.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct GcArgs {
    /// The store's directories: all of them
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Remove the oldest segments, down to this capacity
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    capacity: Option<u64>,
    /// Remove segments that have only blocks of this namespace
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    namespace: Option<u64>,
    /// Only show what would be done
    #[arg(long)]
    dry_run: bool,
    /// Print the result as JSON, schema kvferry.store-gc/1
    #[arg(long)]
    json: bool,
}

/// `kvferry store gc --json`. Sums are of what was done, with `--dry-run` of what would be done.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    dry_run: bool,
    steps: Vec<Done>,
    removed_files: u64,
    removed_blocks: u64,
    removed_bytes: u64,
    sealed: u64,
    renumbered: u64,
    failed: u64,
    /// Blocks of `--namespace` in segments that have others, too.
    namespace_blocks_left: u64,
    /// Segments that can't be read, or are another store's.
    segments_left: u64,
}

#[derive(Debug, Serialize)]
struct Done {
    #[serde(flatten)]
    kind: StepKind,
    file: PathBuf,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(tag = "step", rename_all = "snake_case")]
enum StepKind {
    Remove {
        disk_bytes: u64,
        blocks: u64,
        #[serde(serialize_with = "in_a_word")]
        why: RemovalReason,
    },
    Seal,
    Renumber {
        to: u32,
    },
}

pub(super) fn run(args: &GcArgs) -> Result<(), Failure> {
    let cleaner = Cleaner::open(&args.directories).map_err(failure)?;
    let wishes = CleanOptions { capacity: args.capacity, namespace: args.namespace };
    let plan = cleaner.plan(wishes).map_err(failure)?;
    let mut report = Report::new(&plan, args.dry_run);
    let mut finished = Ok(());
    if args.dry_run {
        plan.steps.iter().for_each(|step| report.add(step, None));
    } else {
        finished = cleaner.carry_out(&plan, |step, outcome| {
            report.add(step, outcome.err().map(|error| error.to_string()));
        });
    }
    output::show(&report, args.json)?;
    finished.map_err(|error| Failure::Failed(error.to_string()))?;
    match report.failed {
        0 => Ok(()),
        failed => Err(Failure::Failed(format!("{} failed", counted(failed, "step")))),
    }
}

impl Report {
    fn new(plan: &Plan, dry_run: bool) -> Self {
        Self {
            schema: "kvferry.store-gc/1",
            dry_run,
            steps: Vec::new(),
            removed_files: 0,
            removed_blocks: 0,
            removed_bytes: 0,
            sealed: 0,
            renumbered: 0,
            failed: 0,
            namespace_blocks_left: plan.namespace_blocks_left,
            segments_left: plan.segments_left,
        }
    }

    fn add(&mut self, step: &Step, error: Option<String>) {
        let (file, kind) = match step {
            Step::Remove { path, disk_bytes, blocks, why } => {
                let (disk_bytes, blocks, why) = (*disk_bytes, *blocks, *why);
                (path, StepKind::Remove { disk_bytes, blocks, why })
            }
            Step::Seal { path, .. } => (path, StepKind::Seal),
            Step::Renumber { path, to, .. } => (path, StepKind::Renumber { to: *to }),
        };
        match &kind {
            _ if error.is_some() => self.failed += 1,
            StepKind::Remove { disk_bytes, blocks, .. } => {
                self.removed_files += 1;
                self.removed_blocks += blocks;
                self.removed_bytes += disk_bytes;
            }
            StepKind::Seal => self.sealed += 1,
            StepKind::Renumber { .. } => self.renumbered += 1,
        }
        self.steps.push(Done { kind, file: file.clone(), error });
    }
}

fn in_a_word<S: Serializer>(why: &RemovalReason, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(match why {
        RemovalReason::Temporary => "temporary",
        RemovalReason::Header => "header",
        RemovalReason::Length => "length",
        RemovalReason::Empty => "empty",
        RemovalReason::Namespace => "namespace",
        RemovalReason::Capacity => "capacity",
    })
}

impl Done {
    fn text(&self, dry_run: bool) -> String {
        let file = file_name(&self.file);
        let mut text = match &self.kind {
            StepKind::Remove { disk_bytes, blocks, why } => {
                let why = match why {
                    RemovalReason::Temporary => "an interrupted write left it",
                    RemovalReason::Header => "no valid header",
                    RemovalReason::Length => "not the length of a segment",
                    RemovalReason::Empty => "no blocks",
                    RemovalReason::Namespace => "only blocks of the namespace",
                    RemovalReason::Capacity => "among the oldest",
                };
                let has = match blocks {
                    0 => units::bytes(*disk_bytes),
                    blocks => {
                        format!("{}, {}", counted(*blocks, "block"), units::bytes(*disk_bytes))
                    }
                };
                format!("{} {file} ({has}): {why}", if dry_run { "remove" } else { "removed" })
            }
            StepKind::Seal => format!("{} {file}", if dry_run { "seal" } else { "sealed" }),
            StepKind::Renumber { to } => {
                let file = format!("{file} to {to}");
                format!("{} {file}", if dry_run { "renumber" } else { "renumbered" })
            }
        };
        if let Some(error) = &self.error {
            text = format!("FAILED: {text}: {error}");
        }
        text.push('\n');
        text
    }
}

fn file_name(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

impl output::Report for Report {
    fn text(&self) -> String {
        let mut text: String = self.steps.iter().map(|it| it.text(self.dry_run)).collect();
        if self.namespace_blocks_left > 0 {
            let blocks = counted(self.namespace_blocks_left, "block");
            text.push_str(&format!(
                "{blocks} of the namespace stay: their segments have blocks of others\n"
            ));
        }
        if self.segments_left > 0 {
            let segments = counted(self.segments_left, "segment");
            text.push_str(&format!("{segments} stay: unreadable, or another store's\n"));
        }
        let would = if self.dry_run { "would be " } else { "" };
        text.push_str(&format!(
            "{}, {} and {} {would}removed; {} {would}sealed\n",
            counted(self.removed_files, "file"),
            units::bytes(self.removed_bytes),
            counted(self.removed_blocks, "block"),
            counted(self.sealed, "segment"),
        ));
        text
    }
}
