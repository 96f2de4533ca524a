//! Ranges of host memory that hold the bytes of blocks.

use crate::error::{Error, Result};
use crc_fast::{CrcAlgorithm, Digest};
use kvferry::{Batch, Region, RemoteRegion};
use smallvec::SmallVec;
use std::sync::Arc;

/// Bytes of a block, at most.
pub const BLOCK_LEN_MAX: u64 = 64 << 20;

/// Place of a block's bytes in host memory: one range of a region, or several in order, such as one per layer.
#[derive(Clone, Debug, Default)]
pub struct BlockMemory {
    pieces: SmallVec<[Piece; 1]>,
    len: u64,
    /// Whether a piece is memory of a device, which neither tier copies from or to.
    has_device: bool,
    /// What has these bytes, in the tier in host memory. Others are a caller's.
    owner: Option<Arc<dyn Owner>>,
}

/// An owner of memory, which is not reused as long as the value lives.
pub(crate) trait Owner: std::fmt::Debug + Send + Sync {}

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
            self.has_device |= region.is_device();
        }
        self
    }

    /// Keeps `owner`, and with it the memory, from being reused as long as this value lives.
    #[must_use]
    pub(crate) fn kept_by(self, owner: Arc<dyn Owner>) -> Self {
        Self { owner: Some(owner), ..self }
    }

    /// Whether [`BlockMemory::kept_by`] holds.
    pub(crate) fn is_kept(&self) -> bool {
        self.owner.is_some()
    }

    /// Bytes of all pieces.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The length, if a block in this memory may have it.
    pub(crate) fn checked_len(&self) -> Result<u32> {
        if self.has_device {
            // A file would copy to or from the memory, in no order with the device's work.
            let what =
                "the memory of a block is a device's; the store reads and writes host memory only";
            return Err(Error::InvalidArgument(what.to_owned()));
        }
        let of_length = |len: u64| (1..=BLOCK_LEN_MAX).contains(&len).then_some(len);
        of_length(self.len).and_then(|len| u32::try_from(len).ok()).ok_or_else(|| {
            Error::InvalidArgument(format!(
                "a block has 1 to {BLOCK_LEN_MAX} bytes, got {}",
                self.len
            ))
        })
    }

    /// A part of the bytes: `len` from `at` on, which it has.
    pub(crate) fn part(&self, at: u64, len: u64) -> Self {
        let (mut before, mut rest) = (at, len);
        let mut part = Self { owner: self.owner.clone(), ..Self::default() };
        for piece in &self.pieces {
            let skipped = before.min(piece.len);
            let taken = rest.min(piece.len - skipped);
            part = part.and(&piece.region, piece.offset + skipped, taken);
            before -= skipped;
            rest -= taken;
        }
        debug_assert_eq!(part.len, len, "a part that the memory has not");
        part
    }

    /// The sum of the bytes, followed by zeros up to a whole page.
    pub(crate) fn sum(&self) -> Result<u64> {
        Ok(padded(self.crc(0)?, self.len))
    }

    /// The CRC of bytes whose CRC is `before`, and then these.
    pub(crate) fn crc(&self, before: u64) -> Result<u64> {
        let mut crc = before;
        for piece in &self.pieces {
            crc = piece.region.crc64(piece.offset, piece.len, crc)?;
        }
        Ok(crc)
    }

    /// Copies the bytes to `offset` of a region; returns the sum of what was copied.
    pub(crate) fn copy_and_sum(&self, into: &Region, offset: u64) -> Result<u64> {
        let (mut crc, mut at) = (0, offset);
        for piece in &self.pieces {
            crc = into.copy_from_with_crc64(at, &piece.region, piece.offset, piece.len, crc)?;
            at += piece.len;
        }
        Ok(padded(crc, self.len))
    }

    /// The bytes, where the agent allocated the memory.
    pub(crate) fn to_vec(&self) -> Result<Vec<u8>> {
        let bytes_of = |len: u64| usize::try_from(len).expect("inside a region");
        let mut bytes = vec![0; bytes_of(self.len)];
        let mut rest = &mut bytes[..];
        for piece in &self.pieces {
            let (now, behind) = rest.split_at_mut(bytes_of(piece.len));
            piece.region.read_at(bytes_of(piece.offset), now)?;
            rest = behind;
        }
        Ok(bytes)
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

/// The sum of a block of `len` bytes that have this CRC.
pub(crate) fn padded(crc: u64, len: u64) -> u64 {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc64Nvme, !crc);
    digest.update(&PAGE_OF_ZEROS[..padding(len)]);
    digest.finalize()
}

/// Bytes from the end of `len` bytes to the end of their last page.
pub(crate) fn padding(len: u64) -> usize {
    let page = PAGE as u64;
    usize::try_from(len.next_multiple_of(page) - len).expect("less than a page")
}
