//! Where the bytes of blocks are in memory.

use crate::error::{Error, Result};
use crc_fast::{CrcAlgorithm, Digest};
use kvferry::{Batch, Region, RemoteRegion};
use smallvec::SmallVec;

/// Bytes of a block, at most.
pub const BLOCK_LEN_MAX: u64 = 64 << 20;

/// Where the bytes of a block are in host memory: one range of a region, or several in order, such as one
/// per layer.
#[derive(Clone, Debug, Default)]
pub struct BlockMemory {
    pieces: SmallVec<[Piece; 1]>,
    len: u64,
}

#[derive(Clone, Debug)]
struct Piece {
    region: Region,
    offset: u64,
    len: u64,
}

impl BlockMemory {
    /// `len` bytes at `offset` of a region.
    pub fn new(region: &Region, offset: u64, len: u64) -> Self {
        Self::default().and(region, offset, len)
    }

    /// The bytes so far, and then `len` more.
    #[must_use]
    pub fn and(mut self, region: &Region, offset: u64, len: u64) -> Self {
        if len > 0 {
            self.pieces.push(Piece { region: region.clone(), offset, len });
            self.len = self.len.saturating_add(len);
        }
        self
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The length, if a block may have it.
    pub(crate) fn checked_len(&self) -> Result<u32> {
        let of_length = |len: u64| (1..=BLOCK_LEN_MAX).contains(&len).then_some(len);
        of_length(self.len).and_then(|len| u32::try_from(len).ok()).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "a block has 1 to {BLOCK_LEN_MAX} bytes, got {}",
                self.len
            ))
        })
    }

    /// The sum of the bytes, followed by zeros up to a whole page.
    pub(crate) fn sum(&self) -> Result<u64> {
        self.sum_of_each(|_| Ok(()))
    }

    /// As [`BlockMemory::sum`]; `f` gets the bytes, in order, a few KiB at a time.
    pub(crate) fn sum_of_each(&self, mut f: impl FnMut(&[u8]) -> Result<()>) -> Result<u64> {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        let mut outcome = Ok(());
        for piece in &self.pieces {
            piece.region.for_each_copy(piece.offset, piece.len, |bytes| {
                if outcome.is_ok() {
                    digest.update(bytes);
                    outcome = f(bytes);
                }
            })?;
        }
        outcome?;
        digest.update(&PAGE_OF_ZEROS[..padding(self.len)]);
        Ok(digest.finalize())
    }

    /// Copies a block of the same length to this memory.
    ///
    /// # Errors
    /// `InvalidArgument` for another length; `Agent` for memory that is not registered.
    pub(crate) fn copy_from(&self, from: &Self) -> Result<()> {
        if self.len != from.len {
            return Err(Error::InvalidArgument(format!(
                "memory of {} bytes for a block of {}",
                self.len, from.len
            )));
        }
        let (mut ours, mut theirs) = (self.pieces.iter(), from.pieces.iter());
        let (mut to, mut of) = (ours.next().cloned(), theirs.next().cloned());
        while let (Some(into), Some(source)) = (&mut to, &mut of) {
            let len = into.len.min(source.len);
            into.region.copy_from(into.offset, &source.region, source.offset, len)?;
            for piece in [&mut *into, source] {
                piece.offset += len;
                piece.len -= len;
            }
            if into.len == 0 {
                to = ours.next().cloned();
            }
            if of.as_ref().is_some_and(|piece| piece.len == 0) {
                of = theirs.next().cloned();
            }
        }
        Ok(())
    }

    /// Adds the pieces to a batch whose remote side is a file.
    pub(crate) fn push_to(&self, batch: &mut Batch, file: &RemoteRegion, at: u64) -> Result<()> {
        let mut at = at;
        for piece in &self.pieces {
            batch.push(&piece.region, piece.offset, file, at, piece.len)?;
            at += piece.len;
        }
        Ok(())
    }
}

/// Bytes of a page, to which data is aligned in segments.
pub(crate) const PAGE: usize = 4096;
pub(crate) static PAGE_OF_ZEROS: [u8; PAGE] = [0; PAGE];

/// Bytes from the end of `len` bytes to the end of their last page.
pub(crate) fn padding(len: u64) -> usize {
    let page = PAGE as u64;
    usize::try_from(len.next_multiple_of(page) - len).expect("less than a page")
}
