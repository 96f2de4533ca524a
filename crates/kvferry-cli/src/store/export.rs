//! `kvferry store export`.

use std::fs::{File, Permissions};
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::units;
use kvferry_store::archive::{Exported, export};
use kvferry_store::inspect::Files;
use serde::Serialize;

use super::{counted, failure, parse_namespace, records, store_id};
use crate::output;

const EXAMPLES: &str = "\
Each block is compared with its checksum, and is in the file once. A block that is bad, or that can't
be read, is left out. In a segment that is not sealed, it may be one that a process is writing; such
blocks are read again after a second. Blocks that were evicted are exported until their segment is
used again.

The file describes and checks itself, record by record; crates/kvferry-store/src/archive/format.rs
documents every byte.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct ExportArgs {
    /// The file to write, which is replaced; - for standard output
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Only blocks of this namespace
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    namespace: Option<u64>,
    /// Print the result as JSON, schema kvferry.store-export/1; on standard error if FILE is -
    #[arg(long)]
    json: bool,
    /// No progress bar
    #[arg(long, short)]
    quiet: bool,
}

const BUFFER_BYTES: usize = 1 << 20;

/// `kvferry store export --json`.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    store: String,
    file: PathBuf,
    blocks: u64,
    /// Data of all blocks, without padding.
    bytes: u64,
    /// Blocks that were left out: bad ones, and those of segments that were used again meanwhile.
    damaged: u64,
    replaced: u64,
    unreadable_segments: u64,
    seconds: f64,
}

pub(super) fn is_standard(file: &Path) -> bool {
    file == Path::new("-")
}

pub(super) fn run(args: &ExportArgs) -> Result<(), Failure> {
    let files = Files::open(&args.directories).map_err(failure)?;
    if is_standard(&args.file) {
        if io::stdout().is_terminal() {
            return Err(Failure::Usage("blocks are not written to a terminal: name a file".into()));
        }
        let report = write(args, &files, &mut io::stdout().lock())?;
        // Standard output has the blocks.
        output::note(if args.json { output::json(&report)? } else { report.line() }.trim_end());
        return report.outcome();
    }
    let failed = |error: io::Error| Failure::Failed(format!("{}: {error}", args.file.display()));
    let mut file = create(&args.file).map_err(failed)?;
    let report = write(args, &files, &mut file)?;
    file.sync_all().map_err(failed)?;
    output::show(&report, args.json)?;
    report.outcome()
}

/// A file that its user alone may read: what users have asked is in it.
fn create(path: &Path) -> io::Result<File> {
    let open = File::options().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    if open.metadata()?.is_file() {
        open.set_permissions(Permissions::from_mode(0o600))?;
    }
    Ok(open)
}

fn write(args: &ExportArgs, files: &Files, to: &mut impl Write) -> Result<Report, Failure> {
    let segments = files.segments().map_err(failure)?;
    let is_wanted = |id| args.namespace.is_none_or(|wanted| wanted == id);
    let wanted = segments.iter().flat_map(records).filter(|it| is_wanted(it.block.namespace));
    let bar = output::byte_bar(args.quiet, wanted.map(|it| u64::from(it.block.len)).sum());
    let began = Instant::now();
    let mut to = BufWriter::with_capacity(BUFFER_BYTES, to);
    let exported = export(files, args.namespace, &mut to, |so_far| {
        bar.set_position(so_far.bytes);
        let (blocks, bytes) = (counted(so_far.blocks, "block"), units::bytes(so_far.bytes));
        bar.set_message(format!("{blocks}, {bytes}"));
    });
    bar.finish_and_clear();
    let exported = exported.map_err(|error| Failure::Failed(error.to_string()))?;
    let Exported { blocks, bytes, damaged, replaced, unreadable_segments, .. } = exported;
    Ok(Report {
        schema: "kvferry.store-export/1",
        store: store_id(files),
        file: args.file.clone(),
        blocks,
        bytes,
        damaged,
        replaced,
        unreadable_segments,
        seconds: began.elapsed().as_secs_f64(),
    })
}

impl Report {
    fn outcome(&self) -> Result<(), Failure> {
        match (self.damaged, self.unreadable_segments) {
            (0, 0) => Ok(()),
            (damaged, segments) => Err(Failure::Check(format!(
                "left out: {} that are not what was put, and {} that can't be read",
                counted(damaged, "block"),
                counted(segments, "segment")
            ))),
        }
    }

    fn line(&self) -> String {
        let mut text = format!(
            "{}, {} in {}",
            counted(self.blocks, "block"),
            units::bytes(self.bytes),
            units::duration(Duration::from_secs_f64(self.seconds)),
        );
        if self.replaced > 0 {
            let blocks = counted(self.replaced, "block");
            text.push_str(&format!("; not exported: {blocks} of segments that were used again"));
        }
        text.push('\n');
        text
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        self.line()
    }
}
