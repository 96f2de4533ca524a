//! Host memory that the kernel or another thread touches beyond one call: of a read or write of a
//! file that is under way.

use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Gate;
use crate::memory::pieces::{Piece, Pieces, Position};
use crate::memory::region::{Region, RegionUse};
use kvferry_sys::span::HostSpan;

/// The reason why memory can't be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotHeld {
    /// The region was unregistered.
    Unregistered,
    /// The memory is a device's, or was never registered.
    Unsupported,
}

impl RegionUse {
    /// The memory of `pieces` at `at`, which belongs to one piece. The span is valid until the value
    /// is dropped. A gate has one copier at a time: the caller.
    pub(crate) fn new(
        pieces: &Pieces,
        gate: &Gate,
        at: Position,
        len: usize,
    ) -> std::result::Result<(Self, HostSpan), NotHeld> {
        let piece: &Piece = &pieces.pieces[at.piece];
        let region = match pieces.regions.get(piece.region as usize) {
            Some(region) if !region.is_device() => region,
            _ => return Err(NotHeld::Unsupported),
        };
        let _inside = gate.enter().map_err(|_| NotHeld::Unregistered)?;
        let held = Self::begin(region).ok_or(NotHeld::Unregistered)?;
        Ok((held, region.span(piece.offset + at.within, len)))
    }
}

impl Region {
    /// The CRC-64/NVME of bytes that have the CRC `before` (0 for none), followed by those of a range of host memory.
    /// A transfer may write the memory at the same time; each byte has one of its values. Unregistering the region
    /// waits until this returns.
    ///
    /// # Errors
    /// `OutOfBounds`, `NotRegistered`; `Unsupported` for device memory.
    pub fn crc64(&self, offset: u64, len: u64, before: u64) -> Result<u64> {
        let (held, len) = self.hold(offset, len)?;
        Ok(held.region().span(offset, len).crc64(before))
    }

    /// Copies as [`Region::copy_from`] does; returns the CRC, as [`Region::crc64`], of the bytes that were copied. If
    /// the ranges overlap, the copy has unspecified bytes.
    ///
    /// # Errors
    /// As [`Region::copy_from`].
    pub fn copy_from_with_crc64(
        &self,
        offset: u64,
        from: &Self,
        from_offset: u64,
        len: u64,
        before: u64,
    ) -> Result<u64> {
        let (source, _) = from.hold(from_offset, len)?;
        let (into, len) = self.hold(offset, len)?;
        let source = source.region().span(from_offset, len);
        Ok(into.region().span(offset, len).copy_from_span_with_crc64(&source, before))
    }

    /// Copies a range of another region to this one; both are host memory, of any agents of this process. A
    /// transfer may write the memory at the same time; each byte has its value at the time of its copy.
    /// Unregistering the regions waits until this returns.
    ///
    /// # Errors
    /// `OutOfBounds`, `NotRegistered`; `Unsupported` for device memory. Nothing was copied.
    pub fn copy_from(&self, offset: u64, from: &Self, from_offset: u64, len: u64) -> Result<()> {
        let (source, _) = from.hold(from_offset, len)?;
        let (into, len) = self.hold(offset, len)?;
        into.region().span(offset, len).copy_from_span(&source.region().span(from_offset, len));
        Ok(())
    }

    /// A use of a range of host memory.
    fn hold(&self, offset: u64, len: u64) -> Result<(RegionUse, usize)> {
        if offset.checked_add(len).is_none_or(|end| end > self.0.len as u64) {
            return Err(self.out_of_bounds(offset, len));
        }
        if self.0.is_device() {
            let what = "the processor can't access device memory";
            return Err(Error::new(ErrorKind::Unsupported, what).with("region", self.0.id));
        }
        let Some(held) = RegionUse::begin(&self.0) else {
            return Err(Error::new(ErrorKind::NotRegistered, "the region was unregistered")
                .with("region", self.0.id));
        };
        Ok((held, usize::try_from(len).expect("at most the region's length")))
    }
}
