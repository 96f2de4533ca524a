//! The files of a batch, and the order in which its pairs are moved.

use super::region::{FileInner, Table};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::stages::LINE;
use crate::sync::Arc;
use crate::transfer::batch::Batch;
use crate::transfer::job::Op;
use kvferry_proto::RegionId;

/// Pairs that are sorted together by their place in the file, so that a device sees neighbours one after the
/// other. Few enough that sorting delays nothing. Reads through the page cache are not sorted: the kernel
/// would take them for a sequential reader, and read ahead instead of reading several blocks at once.
pub(super) const SORTED_PAIRS: usize = 4096;

/// The operations that a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    /// Writes of which some go through the page cache.
    CachedWrites,
    /// Reads, and writes past the page cache.
    Others,
}

/// The file regions of a batch.
pub(super) struct Targets {
    files: Vec<Arc<FileInner>>,
    /// Index into `files` for each pair; empty if there is only one file.
    of_pair: Vec<u32>,
    /// All bits that are set in a place in a file or a length.
    offsets: u64,
    /// All bits that are set in an address of host memory.
    addresses: u64,
}

impl Targets {
    /// Looks up all file regions that a batch names.
    pub(super) fn of(batch: &Batch, op: Op, table: &Table) -> Result<Self> {
        let mut targets = Self { files: Vec::new(), of_pair: Vec::new(), offsets: 0, addresses: 0 };
        let mut known: Vec<RegionId> = Vec::new();
        for (pair, (part, piece)) in batch.remote.iter().zip(&batch.local.pieces).enumerate() {
            let index = match known.iter().rposition(|id| *id == part.region) {
                Some(index) => index,
                None => {
                    let file = table.get(part.region).ok_or_else(|| {
                        let what = "the batch names a file region that is not open";
                        let error = Error::new(ErrorKind::NotRegistered, what);
                        error.with("region", part.region).with("pair", pair)
                    })?;
                    if known.len() == 1 {
                        targets.of_pair = vec![0; pair];
                    }
                    known.push(part.region);
                    targets.files.push(file);
                    known.len() - 1
                }
            };
            let file = &targets.files[index];
            let checked = file.check(part.offset, piece.len, op == Op::Write);
            checked.map_err(|e| e.with("pair", pair))?;
            targets.offsets |= file.offset_in_file(part.offset) | piece.len;
            match batch.local.device(pair) {
                None => targets.addresses |= batch.local.address(piece),
                // A stage's first byte has the place in a line that the device's has.
                Some(memory) => targets.offsets |= memory.at(piece.offset) % LINE,
            }
            if known.len() > 1 {
                let index = u32::try_from(index).expect("fewer files than pairs");
                targets.of_pair.push(index);
            }
        }
        Ok(targets)
    }

    pub(super) fn index(&self, pair: usize) -> u32 {
        self.of_pair.get(pair).copied().unwrap_or_default()
    }

    /// Whether all files are read and written past the page cache, as far as alignment allows.
    fn are_direct(&self) -> bool {
        self.files.iter().all(|file| file.is_direct())
    }

    /// The kind of queue for the transfer's operations.
    pub(super) fn queue_use(&self, op: Op) -> Use {
        let is_direct = |file: &Arc<FileInner>| {
            file.direct_alignment().is_some_and(|alignment| {
                self.offsets.is_multiple_of(alignment.offset)
                    && self.addresses.is_multiple_of(alignment.memory)
            })
        };
        match op {
            Op::Write if !self.files.iter().all(is_direct) => Use::CachedWrites,
            _ => Use::Others,
        }
    }

    pub(super) fn get(&self, pair: usize) -> &FileInner {
        &self.files[self.index(pair) as usize]
    }
}

/// The pairs of a batch whose local memory is of one kind: host memory and device memory move by different means.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    /// All pairs: the batch has host memory only.
    All,
    Host,
    Device,
}

/// The order in which the pairs of a batch, or those of one side, are moved.
pub(super) struct Order {
    side: Side,
    /// Pairs that were sorted so far.
    sorted: usize,
    /// Sorted pairs that were not returned, the next one last.
    left: Vec<(u32, u64, usize)>,
}

impl Order {
    pub(super) fn new(side: Side) -> Self {
        Self { side, sorted: 0, left: Vec::new() }
    }

    /// The next pair; `None` after the last one.
    pub(super) fn next(&mut self, batch: &Batch, op: Op, targets: &Targets) -> Option<usize> {
        while self.left.is_empty() && self.sorted < batch.remote.len() {
            let end = batch.remote.len().min(self.sorted + SORTED_PAIRS);
            let pairs = std::mem::replace(&mut self.sorted, end)..end;
            let place = |pair: usize| (targets.index(pair), batch.remote[pair].offset, pair);
            match self.side {
                Side::All => self.left.extend(pairs.rev().map(place)),
                side => {
                    let (local, is_host) = (&batch.local, side == Side::Host);
                    let is_of_side = |pair: &usize| local.is_host(&local.pieces[*pair]) == is_host;
                    self.left.extend(pairs.rev().filter(is_of_side).map(place));
                }
            }
            if op == Op::Write || targets.are_direct() {
                self.left.sort_unstable_by(|a, b| b.cmp(a));
            }
        }
        self.left.pop().map(|(_, _, pair)| pair)
    }
}
