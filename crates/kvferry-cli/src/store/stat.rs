//! `kvferry store stat`.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;

use clap::Args;
use kvferry_bench::failure::Failure;
use kvferry_bench::{table, units};
use kvferry_store::inspect::{Files, Segment};
use serde::Serialize;

use super::{Kind, counted, failure, namespace_id, records, store_id, utc};
use crate::output;

#[derive(Debug, Clone, Args)]
pub(super) struct StatArgs {
    /// The store's directories
    #[arg(required = true, value_name = "DIR")]
    directories: Vec<PathBuf>,
    /// Print the result as JSON, schema kvferry.store-stat/1
    #[arg(long)]
    json: bool,
}

/// `kvferry store stat --json`. Times are milliseconds of Unix time.
#[derive(Debug, Serialize)]
struct Report {
    schema: &'static str,
    directories: Vec<PathBuf>,
    store: String,
    format: u32,
    created_unix_ms: u64,
    segment_bytes: u64,
    segments: Segments,
    blocks: u64,
    /// Blocks that are in an earlier segment, too.
    copies: u64,
    /// Data of all blocks, without padding.
    bytes: u64,
    disk_bytes: u64,
    namespaces: Vec<Namespace>,
    oldest_unix_ms: Option<u64>,
    newest_unix_ms: Option<u64>,
}

#[derive(Debug, Default, Serialize)]
struct Segments {
    all: u64,
    sealed: u64,
    open: u64,
    free: u64,
    wrong_length: u64,
    foreign: u64,
    unreadable: u64,
}

#[derive(Debug, Serialize)]
struct Namespace {
    namespace: String,
    blocks: u64,
    bytes: u64,
}

pub(super) fn run(args: &StatArgs) -> Result<(), Failure> {
    let files = Files::open(&args.directories).map_err(failure)?;
    let segments = files.segments().map_err(failure)?;
    Ok(output::show(&Report::new(&files, &segments), args.json)?)
}

impl Report {
    fn new(files: &Files, segments: &[Segment]) -> Self {
        let superblock = files.superblock();
        let mut namespaces = BTreeMap::<u64, (u64, u64)>::new();
        let mut keys = HashSet::new();
        let (mut blocks, mut bytes) = (0, 0);
        let (mut oldest, mut newest) = (None, None);
        for record in segments.iter().flat_map(records) {
            let block = &record.block;
            blocks += 1;
            bytes += u64::from(block.len);
            keys.insert(block.key);
            let namespace = namespaces.entry(block.namespace).or_default();
            namespace.0 += 1;
            namespace.1 += u64::from(block.len);
            let put_at = files.put_at_ms(record);
            oldest = Some(oldest.map_or(put_at, |it: u64| it.min(put_at)));
            newest = newest.max(Some(put_at));
        }
        let mut namespaces: Vec<_> = namespaces
            .into_iter()
            .map(|(id, (blocks, bytes))| Namespace { namespace: namespace_id(id), blocks, bytes })
            .collect();
        namespaces.sort_by_key(|it| std::cmp::Reverse(it.bytes));
        Self {
            schema: "kvferry.store-stat/1",
            directories: files.directories().to_vec(),
            store: store_id(files),
            format: files.format(),
            created_unix_ms: superblock.created_ms,
            segment_bytes: superblock.geometry.segment_bytes(),
            segments: Segments::of(segments),
            blocks,
            copies: blocks - keys.len() as u64,
            bytes,
            disk_bytes: segments.iter().map(|it| it.disk_bytes).sum(),
            namespaces,
            oldest_unix_ms: oldest,
            newest_unix_ms: newest,
        }
    }
}

impl Segments {
    fn of(segments: &[Segment]) -> Self {
        let mut counts = Self::default();
        for segment in segments {
            counts.all += 1;
            *match Kind::of(segment) {
                Kind::Sealed => &mut counts.sealed,
                Kind::Open => &mut counts.open,
                Kind::Free => &mut counts.free,
                Kind::WrongLength => &mut counts.wrong_length,
                Kind::Foreign => &mut counts.foreign,
                Kind::Unreadable => &mut counts.unreadable,
            } += 1;
        }
        counts
    }

    fn text(&self) -> String {
        let kinds = [
            (self.sealed, Kind::Sealed),
            (self.open, Kind::Open),
            (self.free, Kind::Free),
            (self.wrong_length, Kind::WrongLength),
            (self.foreign, Kind::Foreign),
            (self.unreadable, Kind::Unreadable),
        ];
        let there = kinds.iter().filter(|(count, _)| *count > 0);
        let parts: Vec<_> = there
            .map(|(count, kind)| format!("{} {}", units::count(*count), kind.name()))
            .collect();
        parts.join(", ")
    }
}

impl output::Report for Report {
    fn text(&self) -> String {
        let mut lines = vec![
            ("store", format!("{}, format {}", self.store, self.format)),
            ("created", format!("{} UTC", utc(self.created_unix_ms))),
        ];
        let each = units::bytes(self.segment_bytes);
        let segments = match self.segments.all {
            0 => format!("none, of {each} each"),
            all => format!("{} of {each}: {}", units::count(all), self.segments.text()),
        };
        lines.push(("segments", segments));
        let mut blocks =
            format!("{}, {} of data", units::count(self.blocks), units::bytes(self.bytes));
        if self.copies > 0 {
            blocks.push_str(&format!("; {} are copies of others", units::count(self.copies)));
        }
        lines.push(("blocks", blocks));
        lines.push(("on disk", units::bytes(self.disk_bytes)));
        if let (Some(oldest), Some(newest)) = (self.oldest_unix_ms, self.newest_unix_ms) {
            lines.push(("put", format!("{} to {} UTC", utc(oldest), utc(newest))));
        }
        let mut text: String =
            lines.iter().map(|(name, value)| format!("{name:<10}{value}\n")).collect();
        if !self.namespaces.is_empty() {
            let row = |it: &Namespace| {
                vec![it.namespace.clone(), units::count(it.blocks), units::bytes(it.bytes)]
            };
            let rows: Vec<_> = self.namespaces.iter().map(row).collect();
            let count = counted(self.namespaces.len() as u64, "namespace");
            text.push_str(&format!("\n{count}\n"));
            text.push_str(&table::aligned(&["id", "blocks", "data"], &rows));
        }
        text
    }
}
