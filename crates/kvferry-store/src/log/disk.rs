//! The interface of a device that the log needs.

use std::io;

/// Segments of one size on a device.
///
/// Offsets and lengths are multiples of [`PAGE_BYTES`](super::PAGE_BYTES). Methods are called by
/// several threads at the same time, also for one segment, but never for overlapping bytes unless both
/// calls read. A method that fails may have written any part of its bytes, at the granularity of the
/// device's sectors.
pub trait Disk: Send + Sync {
    /// Memory of whole pages that a block is written from or read into.
    type Memory;

    /// The segments that exist, in any order.
    fn segments(&self) -> io::Result<Vec<u32>>;

    /// Creates a segment and reserves its bytes, so that later writes do not fail for lack of space.
    /// The segment reads as zeros.
    fn create(&self, segment: u32) -> io::Result<()>;

    /// Removes a segment and gives its bytes back.
    fn remove(&self, segment: u32) -> io::Result<()>;

    /// Reads exactly `bytes.len()` bytes.
    fn read_at(&self, segment: u32, offset: u64, bytes: &mut [u8]) -> io::Result<()>;

    /// Writes all of `bytes`. They may be volatile until [`Disk::sync`] of the segment.
    fn write_at(&self, segment: u32, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Writes an extent: its header page and its blocks, each `(offset, bytes)`. The order does not
    /// matter; a failure of one write fails the extent.
    fn write_blocks(
        &self,
        segment: u32,
        header: (u64, &[u8]),
        blocks: &[(u64, Self::Memory)],
    ) -> io::Result<()>;

    /// Fills memory with blocks, each `(segment, offset, memory)`.
    fn read_blocks(&self, blocks: &[(u32, u64, Self::Memory)]) -> io::Result<()>;

    /// Returns when all writes to the segment that completed before the call survive a power cut.
    fn sync(&self, segment: u32) -> io::Result<()>;
}
