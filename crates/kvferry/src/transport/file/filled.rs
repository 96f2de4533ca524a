//! A stage of a device between its copy and the operations on files.

use super::targets::Targets;
use crate::memory::packed::Packed;
use crate::memory::pieces::{Pieces, Position};
use crate::memory::stages::Stage;
use crate::sync::Arc;
use kvferry_sys::file::File;
use kvferry_sys::span::HostSpan;

/// The places of a stage's bytes in files: contiguous ranges, in the order of the stage's bytes.
#[derive(Default)]
pub(super) struct Ranges {
    ranges: Vec<Range>,
    /// For each pair, the place in the stage where its bytes begin, and its index.
    pairs: Vec<(usize, usize)>,
}

/// A contiguous range of a file. Neighbours in a file that are neighbours in the stage are one range.
struct Range {
    /// The first pair of the range. All pairs of the range have its file.
    pair: usize,
    /// Offset in the file region.
    offset: u64,
    /// Place in the stage.
    at: usize,
    len: usize,
}

impl Ranges {
    /// Adds `len` bytes of a pair, which are at `offset` of its file region and follow those in the stage.
    fn add(&mut self, targets: &Targets, pair: usize, offset: u64, len: usize) {
        let at = self.ranges.last().map_or(0, |last| last.at + last.len);
        self.pairs.push((at, pair));
        match self.ranges.last_mut() {
            Some(last)
                if targets.index(last.pair) == targets.index(pair)
                    && last.offset + last.len as u64 == offset =>
            {
                last.len += len;
            }
            _ => self.ranges.push(Range { pair, offset, at, len }),
        }
    }

    pub(super) fn first_pair(&self) -> usize {
        self.pairs[0].1
    }

    /// Packs the bytes of `at`, and of the pairs after it as `next` gives them, until the stage is full. Returns the
    /// first position that did not fit, if there was one.
    pub(super) fn pack(
        &mut self,
        packed: &mut Packed,
        pieces: &Pieces,
        mut at: Position,
        targets: &Targets,
        offset_of: impl Fn(usize) -> u64,
        mut next: impl FnMut() -> Option<usize>,
    ) -> Option<Position> {
        loop {
            let Some(len) = packed.add(pieces, at.piece, at.within) else { return Some(at) };
            if len > 0 {
                self.add(targets, at.piece, offset_of(at.piece) + at.within, len);
            }
            at.within += len as u64;
            if at.within == pieces.pieces[at.piece].len {
                at = Position { piece: next()?, within: 0 };
            }
        }
    }
}

/// A stage, and the ranges of files that its bytes go to or come from. Operations hold it until they have ended.
pub(super) struct Filled {
    pub(super) stage: Stage,
    pub(super) ranges: Ranges,
    /// For copies into the device: the pieces that get the bytes once all of them were read.
    pub(super) into: Option<Packed>,
}

impl Filled {
    /// The pair that a byte of the stage belongs to.
    pub(super) fn pair_of(&self, span: HostSpan) -> usize {
        let at = span.as_ptr() as usize - self.stage.span(0, 0).as_ptr() as usize;
        let after = self.ranges.pairs.partition_point(|(start, _)| *start <= at);
        self.ranges.pairs[after - 1].1
    }
}

/// The operations on files that a stage needs, one after the other.
pub(super) struct Cutter {
    filled: Arc<Filled>,
    /// The index of the current range, and the bytes of it that already have an operation.
    range: usize,
    within: usize,
}

/// The file range and the bytes of the stage that one operation reads or writes.
pub(super) struct Cut {
    pub(super) file: Arc<File>,
    /// Offset in the file.
    pub(super) offset: u64,
    pub(super) is_direct: bool,
    pub(super) span: HostSpan,
    pub(super) pair: usize,
    pub(super) filled: Arc<Filled>,
}

impl Cutter {
    pub(super) fn new(filled: Filled) -> Self {
        Self { filled: Arc::new(filled), range: 0, within: 0 }
    }

    /// The next operation, of at most `len_max` bytes, and whether it is the last one.
    pub(super) fn next(&mut self, targets: &Targets, len_max: u64) -> (Cut, bool) {
        let ranges = &self.filled.ranges.ranges;
        let range = &ranges[self.range];
        let at = range.at + self.within;
        let left = range.len - self.within;
        let span = self.filled.stage.span(at, left);
        let place = range.offset + self.within as u64;
        let memory = span.as_ptr() as u64;
        let file = targets.get(range.pair);
        let target = file.target(place, left as u64, memory, len_max);
        let len = usize::try_from(target.len).expect("at most the bytes that are left");
        let cut = Cut {
            file: target.file,
            offset: target.offset,
            is_direct: target.is_direct,
            span: span.truncated(len),
            pair: range.pair,
            filled: Arc::clone(&self.filled),
        };
        self.within += len;
        if self.within == range.len {
            (self.range, self.within) = (self.range + 1, 0);
        }
        (cut, self.range == ranges.len())
    }
}
