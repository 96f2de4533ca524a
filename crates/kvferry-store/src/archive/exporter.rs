//! Writes the blocks of a store's files to a stream.

use super::format::{End, Header, Record};
use crate::error::{Error, Result};
use crate::inspect::{Files, Segment, State};
use crate::log::format::{bytes_of, pages_of, sum};
use crate::log::recover::Scanned;
use crate::log::{self, Disk};
use rustc_hash::FxHashSet;
use std::io::{self, Write};
use std::time::Duration;

/// Pause before damaged blocks of unsealed segments are read again: a process may have been writing them.
const SETTLE: Duration = Duration::from_secs(1);

/// Progress or result of an export.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Exported {
    /// Blocks, each of which is in the stream once.
    pub blocks: u64,
    /// Bytes of their data.
    pub bytes: u64,
    /// Blocks that were left out because they can't be read, or are not what was put.
    pub damaged: u64,
    /// Blocks that were left out because a process has begun to use their segment again.
    pub replaced: u64,
    /// Segments that can't be read.
    pub unreadable_segments: u64,
}

/// Writes the blocks of a store, or those of one namespace, to `to`, and tells `progress` so far after each. Processes
/// may use the store meanwhile.
///
/// The files do not say which blocks were evicted: such a block is exported until its segment is used again.
///
/// # Errors
/// `Directory` if the directories can't be listed, or `to` can't be written.
pub fn export(
    files: &Files,
    namespace: Option<u64>,
    to: &mut impl Write,
    mut progress: impl FnMut(&Exported),
) -> Result<Exported> {
    let segments = files.segments()?;
    let superblock = files.superblock();
    let created_ms = superblock.created_ms;
    let failed = |source| Error::Directory { path: "the exported stream".into(), source };
    let export = kvferry_sys::random::bytes().map_err(failed)?;
    let header = Header { export, created_ms, store: superblock.store };
    to.write_all(&header.encode()).map_err(failed)?;
    let mut run =
        Run { files, namespace, seen: FxHashSet::default(), export, done: Exported::default() };
    run.done.unreadable_segments = segments.iter().filter(|it| is_unreadable(it)).count() as u64;
    // A block is behind its parent, mostly.
    let mut in_use: Vec<_> = segments
        .iter()
        .filter_map(|it| match &it.state {
            State::Used(scanned) => Some(scanned),
            _ => None,
        })
        .collect();
    in_use.sort_by_key(|it| it.header.incarnation);
    let mut unsettled = Vec::new();
    for scanned in in_use {
        for record in &scanned.records {
            match run.one(scanned, record, to).map_err(failed)? {
                Outcome::Done => {}
                Outcome::Bad if !scanned.is_sealed => unsettled.push((scanned, record)),
                Outcome::Bad => run.done.damaged += 1,
            }
            progress(&run.done);
        }
    }
    if !unsettled.is_empty() {
        std::thread::sleep(SETTLE);
    }
    for (scanned, record) in unsettled {
        if let Outcome::Bad = run.one(scanned, record, to).map_err(failed)? {
            run.done.damaged += 1;
        }
    }
    let end = End { export, records: run.done.blocks, bytes: run.done.bytes };
    to.write_all(&end.encode()).and_then(|()| to.flush()).map_err(failed)?;
    Ok(run.done)
}

fn is_unreadable(segment: &Segment) -> bool {
    matches!(segment.state, State::Unreadable(_) | State::WrongLength(_))
}

struct Run<'a> {
    files: &'a Files,
    namespace: Option<u64>,
    /// Keys that are in the stream.
    seen: FxHashSet<[u64; 2]>,
    export: [u8; 16],
    done: Exported,
}

enum Outcome {
    /// Written, or not to be written.
    Done,
    Bad,
}

impl Run<'_> {
    fn one(
        &mut self,
        scanned: &Scanned,
        record: &log::Record,
        to: &mut impl Write,
    ) -> io::Result<Outcome> {
        let block = record.block;
        if self.namespace.is_some_and(|it| it != block.namespace) || self.seen.contains(&block.key)
        {
            return Ok(Outcome::Done);
        }
        let mut data = vec![0; bytes_of(pages_of(block.len)) as usize];
        let read =
            self.files.disk().read_at(scanned.header.segment, bytes_of(record.page), &mut data);
        // The sum is over whole pages.
        if read.is_err() || sum(&data, block.check) != block.sum {
            if self.files.is_replaced(&scanned.header) {
                self.done.replaced += 1;
                return Ok(Outcome::Done);
            }
            return Ok(Outcome::Bad);
        }
        let created_ms = self.files.superblock().created_ms;
        let header = Record { export: self.export, block, created_ms };
        to.write_all(&header.encode())?;
        to.write_all(&data[..block.len as usize])?;
        self.seen.insert(block.key);
        self.done.blocks += 1;
        self.done.bytes += u64::from(block.len);
        Ok(Outcome::Done)
    }
}
