//! Batches: pairs of local and remote ranges, and how they are cut into frames.

use crate::error::{Error, ErrorKind, Result};
use crate::memory::device::{After, DeviceMemory};
use crate::memory::pieces::{Piece, Pieces, Position};
use crate::memory::region::{Region, RemoteRegion};
use kvferry_proto::{Incarnation, RegionId, WireDescriptor};
use std::sync::Arc;

/// Bytes of one wire descriptor at most; longer ranges are split.
const DESCRIPTOR_BYTES_MAX: u64 = 1 << 30;

#[derive(Clone, Copy, Debug)]
pub(crate) struct RemotePart {
    pub(crate) region: RegionId,
    pub(crate) offset: u64,
}

/// Pairs of a local and a remote range of equal length, moved in one transfer.
///
/// The ranges of one batch are moved in any order. Where destinations overlap, either may win, in
/// memory of a device as in host memory. The number of pairs is not limited.
///
/// ```
/// # use kvferry::{Access, Agent, Batch};
/// # let agent = Agent::builder().name("doc").start()?;
/// let pool = agent.allocate(1 << 20, Access::READ_WRITE)?;
/// let theirs = pool.remote(); // as received from the peer
/// let mut batch = Batch::with_capacity(2);
/// batch.push(&pool, 0, &theirs, 65_536, 4_096)?;
/// batch.push(&pool, 8_192, &theirs, 4_096, 4_096)?;
/// assert_eq!((batch.len(), batch.bytes()), (2, 8_192));
/// # Ok::<(), kvferry::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Batch {
    pub(crate) local: Arc<Pieces>,
    pub(crate) remote: Arc<Vec<RemotePart>>,
    /// The incarnation of the peer that the remote regions belong to, once a region has named one.
    pub(crate) incarnation: Option<Incarnation>,
}

impl Batch {
    /// An empty batch.
    pub fn new() -> Self {
        Self::default()
    }

    /// An empty batch with capacity for `n` pairs.
    pub fn with_capacity(n: usize) -> Self {
        let pieces = Pieces { pieces: Vec::with_capacity(n), ..Pieces::default() };
        Self { local: Arc::new(pieces), remote: Arc::new(Vec::with_capacity(n)), incarnation: None }
    }

    /// Pairs in the batch.
    pub fn len(&self) -> usize {
        self.remote.len()
    }

    /// Whether the batch has no pairs.
    pub fn is_empty(&self) -> bool {
        self.remote.is_empty()
    }

    /// Sum of the lengths, in bytes.
    pub fn bytes(&self) -> u64 {
        self.local.bytes
    }

    /// Makes transfers of this batch begin only after these edges, if it has local memory of a device: a write
    /// reads the memory after the work that computes the bytes, a read writes it after the work that used the memory
    /// last, or that initialises it. [`After::host`] means that the caller has waited for that work. A batch with local
    /// memory of a device has no order of its own: transfers of it are refused with `InvalidArgument` until this method
    /// names one. Memory of the peer's device is the peer's matter. Until the edges have happened, a transfer uses nothing
    /// that others could wait for; cancelling it and its deadline end it at once. Then it goes on as a transfer without
    /// edges does. If it has to connect first, a blocking call ends at its deadline; an
    /// asynchronous transfer ends with the attempt to connect.
    pub fn set_after(&mut self, after: After) {
        Arc::make_mut(&mut self.local).after = after;
    }

    /// The edges that transfers of the batch come after: see [`Batch::set_after`].
    pub fn after(&self) -> &After {
        &self.local.after
    }

    /// The devices whose memory the batch has on this side: the memory of one region of each.
    pub fn devices(&self) -> Vec<&DeviceMemory> {
        self.local.one_of_each_device()
    }

    /// Removes all pairs and edges; keeps the memory unless a transfer still uses it.
    pub fn clear(&mut self) {
        Arc::make_mut(&mut self.local).clear();
        Arc::make_mut(&mut self.remote).clear();
        self.incarnation = None;
    }

    /// Adds `len` bytes at `local_offset` of `local` and at `remote_offset` of `remote`.
    ///
    /// # Errors
    /// `InvalidArgument` for zero bytes; `OutOfBounds`; `NotRegistered`; `StaleIncarnation` if the
    /// batch has a region of another incarnation of the peer. The batch is unchanged.
    pub fn push(
        &mut self,
        local: &Region,
        local_offset: u64,
        remote: &RemoteRegion,
        remote_offset: u64,
        len: u64,
    ) -> Result<()> {
        check_local(local, local_offset, len)?;
        if remote_offset.checked_add(len).is_none_or(|end| end > remote.len) {
            return Err(Error::new(
                ErrorKind::OutOfBounds,
                "the range reaches beyond the peer's region",
            )
            .with("region", remote.id)
            .with("offset", remote_offset)
            .with("len", len)
            .with("region_len", remote.len));
        }
        if remote.id == RegionId::ABSOLUTE {
            // A region of a peer of another protocol: it has an address, but no incarnation.
            check_address(remote.addr.saturating_add(remote_offset), len)?;
            let address = remote.addr + remote_offset;
            self.push_parts(local, local_offset, len, RegionId::ABSOLUTE, address);
            return Ok(());
        }
        if self.incarnation.is_some_and(|known| known != remote.incarnation) {
            return Err(Error::new(
                ErrorKind::StaleIncarnation,
                "a batch can't name regions of two incarnations of a peer",
            )
            .with("region", remote.id));
        }
        self.incarnation = Some(remote.incarnation);
        self.push_parts(local, local_offset, len, remote.id, remote_offset);
        Ok(())
    }

    /// Adds many pairs like [`Batch::push`]: offset in `local`, offset in `remote`, length in bytes.
    ///
    /// # Errors
    /// The first error of [`Batch::push`]. The batch is unchanged.
    pub fn extend(
        &mut self,
        local: &Region,
        remote: &RemoteRegion,
        ranges: impl ExactSizeIterator<Item = (u64, u64, u64)>,
    ) -> Result<()> {
        let (len, before, incarnation) = (self.len(), self.local.mark(), self.incarnation);
        Arc::make_mut(&mut self.local).pieces.reserve(ranges.len());
        Arc::make_mut(&mut self.remote).reserve(ranges.len());
        for (local_offset, remote_offset, range_len) in ranges {
            if let Err(e) = self.push(local, local_offset, remote, remote_offset, range_len) {
                Arc::make_mut(&mut self.local).go_back(&before);
                Arc::make_mut(&mut self.remote).truncate(len);
                self.incarnation = incarnation;
                return Err(e);
            }
        }
        Ok(())
    }

    /// Adds `len` bytes at `local_offset` of `local` and at the virtual address `remote` in the
    /// peer's process, which must lie in one region there.
    ///
    /// `InvalidArgument` for zero bytes or an address that wraps around; `OutOfBounds`;
    /// `NotRegistered`. The batch is unchanged.
    pub fn push_to_address(
        &mut self,
        local: &Region,
        local_offset: u64,
        remote: u64,
        len: u64,
    ) -> Result<()> {
        check_local(local, local_offset, len)?;
        check_address(remote, len)?;
        self.push_parts(local, local_offset, len, RegionId::ABSOLUTE, remote);
        Ok(())
    }

    fn push_parts(
        &mut self,
        local: &Region,
        local_offset: u64,
        len: u64,
        region: RegionId,
        offset: u64,
    ) {
        Arc::make_mut(&mut self.local).push(&local.0, local_offset, len);
        Arc::make_mut(&mut self.remote).push(RemotePart { region, offset });
    }

    /// The whole range of a pair.
    ///
    /// # Panics
    /// If the batch has no such pair.
    pub(crate) fn part(&self, pair: usize) -> Part {
        let (piece, remote) = (&self.local.pieces[pair], &self.remote[pair]);
        Part { pair, region: remote.region, offset: remote.offset, len: piece.len }
    }

    /// Lets `fill` append pairs; removes them again if it fails.
    pub(crate) fn push_raw_parts<E>(
        &mut self,
        fill: impl FnOnce(&mut Pieces, &mut Vec<RemotePart>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (local, remote) = (Arc::make_mut(&mut self.local), Arc::make_mut(&mut self.remote));
        let (len, before) = (remote.len(), local.mark());
        fill(local, remote).inspect_err(|_| {
            local.go_back(&before);
            remote.truncate(len);
        })
    }
}

fn check_local(local: &Region, offset: u64, len: u64) -> Result<()> {
    if len == 0 {
        return Err(Error::invalid("the range has no bytes"));
    }
    if offset.checked_add(len).is_none_or(|end| end > local.len() as u64) {
        return Err(local.out_of_bounds(offset, len));
    }
    if !local.is_registered() {
        return Err(Error::new(ErrorKind::NotRegistered, "the local region was unregistered")
            .with("region", local.id()));
    }
    Ok(())
}

pub(crate) fn check_address(remote: u64, len: u64) -> Result<()> {
    if len == 0 {
        return Err(Error::invalid("the range has no bytes"));
    }
    if remote.checked_add(len).is_none() {
        return Err(Error::invalid("the range wraps around the end of the address space")
            .with("address", format_args!("{remote:#x}"))
            .with("len", len));
    }
    Ok(())
}

/// A range of one pair of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The index of the pair in the batch.
    pub pair: usize,
    /// The peer's region.
    pub region: RegionId,
    /// The offset in the peer's region; an address if the region is [`RegionId::ABSOLUTE`].
    pub offset: u64,
    /// The length in bytes.
    pub len: u64,
}

/// The ranges of a frame that were not taken yet, in order.
#[derive(Debug)]
pub struct Parts {
    at: Position,
    left: u64,
}

impl Parts {
    /// Takes the next range, of at most `bytes_max` bytes; `None` at the end of the frame.
    pub(crate) fn next(&mut self, batch: &Batch, bytes_max: u64) -> Option<Part> {
        if self.is_empty() {
            return None;
        }
        let pair = self.at.piece;
        let (piece, remote) = (&batch.local.pieces[pair], &batch.remote[pair]);
        let offset = remote.offset + self.at.within;
        let len = (piece.len - self.at.within).min(bytes_max).min(self.left);
        self.left -= len;
        self.at.advance_within(piece, len);
        Some(Part { pair, region: remote.region, offset, len })
    }

    /// Whether every range was taken.
    pub fn is_empty(&self) -> bool {
        self.left == 0
    }
}

/// A part of a batch that crosses a lane in one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// The position of its first byte.
    pub(crate) at: Position,
    pub(crate) bytes: u64,
    /// Number of wire descriptors.
    pub(crate) descriptors: u32,
    pub(crate) whole: bool,
}

/// Cuts a batch into frames, in order.
#[derive(Debug)]
pub(crate) struct Cutter {
    at: Position,
    left: u64,
    total: u64,
}

impl Cutter {
    pub(crate) fn new(batch: &Batch) -> Self {
        Self { at: Position::default(), left: batch.bytes(), total: batch.bytes() }
    }

    pub(crate) fn is_done(&self) -> bool {
        self.left == 0
    }

    /// The next frame, of at most `bytes_max` bytes and `descriptors_max` descriptors.
    pub(crate) fn next(
        &mut self,
        batch: &Batch,
        bytes_max: u64,
        descriptors_max: u32,
    ) -> Option<Frame> {
        if self.left == 0 {
            return None;
        }
        let start = self.at;
        let (mut bytes, mut descriptors) = (0, 0);
        let mut at = start;
        while bytes < bytes_max.min(self.left) && descriptors < descriptors_max {
            let piece: &Piece = &batch.local.pieces[at.piece];
            let take = (piece.len - at.within)
                .min(DESCRIPTOR_BYTES_MAX)
                .min(bytes_max - bytes)
                .min(self.left - bytes);
            bytes += take;
            descriptors += 1;
            at.advance_within(piece, take);
        }
        self.at = at;
        self.left -= bytes;
        Some(Frame { at: start, bytes, descriptors, whole: bytes == self.total })
    }
}

impl Frame {
    /// Appends the frame's descriptor table.
    pub(crate) fn write_table(&self, batch: &Batch, out: &mut Vec<u8>) {
        out.reserve(self.descriptors as usize * WireDescriptor::LEN);
        self.for_each_part(batch, |_, region, offset, len| {
            WireDescriptor { offset, len, region }.write_to(out);
        });
    }

    /// Calls `f` with (pair, region, remote offset, length) for every wire descriptor.
    pub(crate) fn for_each_part(
        &self,
        batch: &Batch,
        mut f: impl FnMut(usize, RegionId, u64, u32),
    ) {
        let mut parts = self.parts();
        while let Some(part) = parts.next(batch, DESCRIPTOR_BYTES_MAX) {
            let len = u32::try_from(part.len).expect("at most DESCRIPTOR_BYTES_MAX");
            f(part.pair, part.region, part.offset, len);
        }
    }

    /// The ranges of the frame.
    pub fn parts(&self) -> Parts {
        Parts { at: self.at, left: self.bytes }
    }

    /// The pair that wire descriptor `index` of this frame belongs to.
    pub(crate) fn pair_of(&self, batch: &Batch, index: u32) -> usize {
        let mut n = 0;
        let mut found = self.at.piece;
        self.for_each_part(batch, |pair, _, _, _| {
            if n == index {
                found = pair;
            }
            n += 1;
        });
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_beyond_4_gib_is_split_into_descriptors_that_fit() {
        let mut batch = Batch::new();
        // SAFETY: the memory is never touched; only addresses are computed.
        unsafe { batch.push_raw(std::ptr::dangling_mut(), 0x1000, 9 << 30) }.expect("fits");
        let mut cutter = Cutter::new(&batch);
        let frame = cutter.next(&batch, u64::MAX, 1 << 16).expect("one frame");
        assert!(frame.whole);
        assert_eq!((frame.bytes, frame.descriptors), (9 << 30, 9));
    }
}
