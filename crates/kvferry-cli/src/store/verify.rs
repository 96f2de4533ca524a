//! `kvferry store verify`.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use indicatif::ProgressBar;
use kvferry_bench::failure::Failure;
use kvferry_bench::units;
use kvferry_store::inspect::{Files, Segment, State};
use kvferry_store::log::format::{bytes_of, pages_of};
use kvferry_store::log::recover::{Fault, Scanned};
use kvferry_store::log::{Record, SegmentHeader};
use serde::Serialize;

use super::{counted, failure, key, namespace_id, records, store_id, with_causes};
use crate::output;

const EXAMPLES: &str = "\
A bad block is never returned to an engine: it is missed. In a segment that is not sealed, it may be
one that a process is writing, or was writing when it was killed; such blocks are read again after a
second. Bad blocks leave with their segment, when the store needs space.

Blocks in segments that a process has begun to use again are not verified, and counted as replaced.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct VerifyArgs {
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Print the result as JSON, schema kvferry.store-verify/1
    #[arg(long)]
    json: bool,
    /// No progress bar
    #[arg(long, short)]
    quiet: bool,
}

/// Blocks that are read between two looks at the clock.
const BLOCKS_AT_ONCE: usize = 32;
/// Time after which the blocks that a process was writing are written.
const SETTLE: Duration = Duration::from_secs(1);

/// `kvferry store verify --json`.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    store: String,
    segments: u64,
    blocks: u64,
    /// Bytes that were read: of blocks, with their padding.
    read_bytes: u64,
    seconds: f64,
    gb_per_s: f64,
    bad: Vec<Bad>,
    unreadable: Vec<Unreadable>,
    /// Blocks of segments that a process has begun to use again.
    replaced: u64,
}

#[derive(Debug, Serialize)]
struct Bad {
    key: String,
    namespace: String,
    file: PathBuf,
    segment: u32,
    page: u32,
    bytes: u32,
    why: String,
}

/// A segment of which nothing can be read.
#[derive(Debug, Serialize)]
struct Unreadable {
    segment: u32,
    file: PathBuf,
    why: String,
}

pub(super) fn run(args: &VerifyArgs) -> Result<(), Failure> {
    let files = Files::open(&args.directories).map_err(failure)?;
    let segments = files.segments().map_err(failure)?;
    let all = segments.iter().flat_map(records);
    let bar = output::byte_bar(args.quiet, all.map(padded).sum());
    let report = verify(&files, &segments, &bar);
    bar.finish_and_clear();
    output::show(&report, args.json)?;
    match (report.bad.len() as u64, report.unreadable.len() as u64) {
        (0, 0) => Ok(()),
        (bad, 0) => Err(Failure::Check(format!("bad: {}", counted(bad, "block")))),
        (bad, segments) => Err(Failure::Check(format!(
            "bad: {}, and {} can't be read",
            counted(bad, "block"),
            counted(segments, "segment")
        ))),
    }
}

fn verify(files: &Files, segments: &[Segment], bar: &ProgressBar) -> Report {
    let mut report = Report {
        schema: "kvferry.store-verify/1",
        store: store_id(files),
        segments: segments.len() as u64,
        blocks: 0,
        read_bytes: 0,
        seconds: 0.0,
        gb_per_s: 0.0,
        bad: Vec::new(),
        unreadable: Vec::new(),
        replaced: 0,
    };
    let mut unsettled = Vec::new();
    let began = Instant::now();
    for segment in segments {
        let (segment_number, file) = (segment.number, segment.path.clone());
        let unreadable = |why| Unreadable { segment: segment_number, file, why };
        match &segment.state {
            State::Used(scanned) => {
                let bad = report.read(files, scanned, bar, began);
                if scanned.is_sealed {
                    report.bad.extend(bad.iter().map(|it| Bad::new(segment, true, it)));
                } else if !bad.is_empty() {
                    unsettled.push((segment, scanned.header, bad));
                }
            }
            State::Unreadable(error) => report.unreadable.push(unreadable(with_causes(error))),
            State::WrongLength(bytes) => {
                report.unreadable.push(unreadable(format!("it has {bytes} bytes")));
            }
            State::Free | State::OfAnotherStore => {}
        }
    }
    report.seconds = began.elapsed().as_secs_f64();
    report.gb_per_s = report.read_bytes as f64 / 1e9 / report.seconds.max(1e-9);
    if !unsettled.is_empty() {
        std::thread::sleep(SETTLE);
    }
    for (segment, header, bad) in unsettled {
        report.again(files, segment, header, &bad);
    }
    report
}

fn padded(record: &Record) -> u64 {
    bytes_of(pages_of(record.block.len))
}

impl Report {
    /// Verifies the blocks of a segment. Returns the bad ones.
    fn read(
        &mut self,
        files: &Files,
        scanned: &Scanned,
        bar: &ProgressBar,
        began: Instant,
    ) -> Vec<(Record, Fault)> {
        let mut bad = Vec::new();
        for some in scanned.records.chunks(BLOCKS_AT_ONCE) {
            let verified = files.verify(scanned.header, some);
            bad.extend(verified.bad);
            self.replaced += verified.replaced as u64;
            self.blocks += some.len() as u64;
            self.read_bytes += some.iter().map(padded).sum::<u64>();
            let rate = self.read_bytes as f64 / 1e9 / began.elapsed().as_secs_f64().max(1e-9);
            bar.set_position(self.read_bytes);
            bar.set_message(format!(
                "{}, {}, {} GB/s",
                counted(self.blocks, "block"),
                units::bytes(self.read_bytes),
                units::figure(rate)
            ));
        }
        bad
    }

    /// Verifies bad blocks of a segment that is not sealed once more.
    fn again(
        &mut self,
        files: &Files,
        segment: &Segment,
        header: SegmentHeader,
        bad: &[(Record, Fault)],
    ) {
        let records: Vec<_> = bad.iter().map(|(record, _)| *record).collect();
        let verified = files.verify(header, &records);
        self.replaced += verified.replaced as u64;
        self.bad.extend(verified.bad.iter().map(|it| Bad::new(segment, false, it)));
    }
}

impl Bad {
    fn new(segment: &Segment, is_sealed: bool, (record, fault): &(Record, Fault)) -> Self {
        let why = match fault {
            Fault::Unreadable(error) => format!("can't be read: {error}"),
            Fault::Sum if is_sealed => "its bytes are not what was put".into(),
            Fault::Sum => {
                "its bytes are not what was put; the segment is not sealed, so its process may have \
                 been killed while it wrote them"
                    .into()
            }
        };
        Self {
            key: key(record),
            namespace: namespace_id(record.block.namespace),
            file: segment.path.clone(),
            segment: segment.number,
            page: record.page,
            bytes: record.block.len,
            why,
        }
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        let mut text = String::new();
        for bad in &self.bad {
            let Bad { key, file, page, bytes, why, .. } = bad;
            let bytes = units::bytes((*bytes).into());
            text.push_str(&format!(
                "{}, page {page}: block {key} of {bytes}: {why}\n",
                file.display()
            ));
        }
        for segment in &self.unreadable {
            text.push_str(&format!("{}: {}\n", segment.file.display(), segment.why));
        }
        if self.replaced > 0 {
            let blocks = counted(self.replaced, "block");
            text.push_str(&format!("not verified: {blocks} of segments that were used again\n"));
        }
        text.push_str(&format!(
            "{} in {}, {} in {} ({} GB/s): {} bad\n",
            counted(self.blocks, "block"),
            counted(self.segments, "segment"),
            units::bytes(self.read_bytes),
            units::duration(Duration::from_secs_f64(self.seconds)),
            units::figure(self.gb_per_s),
            units::count(self.bad.len() as u64),
        ));
        text
    }
}
