//! `kvferry store ls`.

use std::path::PathBuf;

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::{table, units};
use kvferry_store::inspect::{Files, Segment as Found, State};
use kvferry_store::log::Record;
use kvferry_store::policy::Retention;
use serde::Serialize;

use super::{
    Kind, failure, key, namespace_id, parse_namespace, records, store_id, utc, with_causes,
};
use crate::output;

const EXAMPLES: &str = "\
Segments are sealed (full, and complete), open (being written, or its process was killed), free (no
valid header), foreign (another store's), unreadable, or of a wrong length. Only the first two have
blocks. A later incarnation is a later use of a segment.

A namespace is a number that stands for model, layout, tenant, adapter, group and shard. Its name is
not in the files.";

#[derive(Debug, Clone, Args)]
#[command(after_long_help = EXAMPLES)]
pub(super) struct LsArgs {
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// List blocks instead of segments
    #[arg(long)]
    blocks: bool,
    /// Only blocks of this namespace, and segments that have some
    #[arg(long, value_name = "ID", value_parser = parse_namespace)]
    namespace: Option<u64>,
    /// Print the result as JSON, schema kvferry.store-ls/1
    #[arg(long)]
    json: bool,
}

/// `kvferry store ls --json`: segments, or with `--blocks` blocks. Times are milliseconds of Unix time.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    store: String,
    #[serde(flatten)]
    listed: Listed,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum Listed {
    Segments(Vec<Segment>),
    Blocks(Vec<Block>),
}

#[derive(Debug, Serialize)]
struct Segment {
    segment: u32,
    file: PathBuf,
    state: Kind,
    incarnation: Option<u64>,
    created_unix_ms: Option<u64>,
    blocks: u64,
    bytes: u64,
    disk_bytes: u64,
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct Block {
    key: String,
    namespace: String,
    bytes: u32,
    put_unix_ms: u64,
    priority: u8,
    segment: u32,
    page: u32,
}

pub(super) fn run(args: &LsArgs) -> Result<(), Failure> {
    let files = Files::open(&args.directories).map_err(failure)?;
    let segments = files.segments().map_err(failure)?;
    let is_wanted =
        |record: &&Record| args.namespace.is_none_or(|wanted| record.block.namespace == wanted);
    let listed = if args.blocks {
        let of_segment = |segment: &Found| {
            let number = segment.number;
            let wanted = records(segment).iter().filter(is_wanted);
            wanted.map(|record| Block::new(&files, number, record)).collect::<Vec<_>>()
        };
        Listed::Blocks(segments.iter().flat_map(of_segment).collect())
    } else {
        let mut listed = Vec::new();
        for segment in &segments {
            let blocks: Vec<_> = records(segment).iter().filter(is_wanted).collect();
            if args.namespace.is_none() || !blocks.is_empty() {
                listed.push(Segment::new(segment, &blocks));
            }
        }
        Listed::Segments(listed)
    };
    let report = Report { schema: "kvferry.store-ls/1", store: store_id(&files), listed };
    Ok(output::show(&report, args.json)?)
}

impl Segment {
    fn new(segment: &Found, blocks: &[&Record]) -> Self {
        let header = match &segment.state {
            State::Used(scanned) => Some(scanned.header),
            _ => None,
        };
        let error = match &segment.state {
            State::Unreadable(error) => Some(with_causes(error)),
            State::WrongLength(bytes) => Some(format!("it has {bytes} bytes")),
            _ => None,
        };
        Self {
            segment: segment.number,
            file: segment.path.clone(),
            state: Kind::of(segment),
            incarnation: header.map(|it| it.incarnation),
            created_unix_ms: header.map(|it| it.created_ms),
            blocks: blocks.len() as u64,
            bytes: blocks.iter().map(|it| u64::from(it.block.len)).sum(),
            disk_bytes: segment.disk_bytes,
            error,
        }
    }

    fn row(&self) -> Vec<String> {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        vec![
            self.segment.to_string(),
            self.state.name().into(),
            or_none(self.incarnation.map(|it| it.to_string())),
            units::count(self.blocks),
            units::bytes(self.bytes),
            or_none(self.created_unix_ms.map(utc)),
        ]
    }
}

impl Block {
    fn new(files: &Files, segment: u32, record: &Record) -> Self {
        Self {
            key: key(record),
            namespace: namespace_id(record.block.namespace),
            bytes: record.block.len,
            put_unix_ms: files.put_at_ms(record),
            priority: Retention::from_bits(record.block.retention).priority,
            segment,
            page: record.page,
        }
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        match &self.listed {
            Listed::Segments(segments) => {
                let rows: Vec<_> = segments.iter().map(Segment::row).collect();
                let header = ["segment", "state", "incarnation", "blocks", "data", "begun (UTC)"];
                let mut text = table::aligned(&header, &rows);
                for segment in segments {
                    if let Some(error) = &segment.error {
                        text.push_str(&format!("{}: {error}\n", segment.file.display()));
                    }
                }
                text
            }
            // A store has up to millions of blocks: lines of fixed width, which need no second pass.
            Listed::Blocks(blocks) => {
                let header = ["key", "namespace", "data", "put (UTC)", "priority", "segment:page"];
                let line = |[key, namespace, data, put, priority, place]: [&str; 6]| {
                    format!(
                        "{key:<32}  {namespace:<16}  {data:>9}  {put:<19}  {priority:>8}  {place}\n"
                    )
                };
                let mut text = line(header);
                for block in blocks {
                    text.push_str(&line([
                        &block.key,
                        &block.namespace,
                        &units::bytes(block.bytes.into()),
                        &utc(block.put_unix_ms),
                        &block.priority.to_string(),
                        &format!("{}:{}", block.segment, block.page),
                    ]));
                }
                text
            }
        }
    }
}
