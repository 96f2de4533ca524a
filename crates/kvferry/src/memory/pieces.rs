//! The local memory of a batch: pieces of regions, positions in them, and why a piece can't be used.

use crate::callback::contain;
use crate::error::{Error, Result};
use crate::memory::device::{After, DeviceMemory, Wait};
use crate::memory::gate::Touches;
use crate::memory::region::{Backing, RegionInner};
use crate::memory::stages::Wake;
use kvferry_proto::WireCode;
use std::io;
use std::sync::Arc;

/// Number of a batch's last regions that are compared with a new piece's: about as many as a model
/// has layers.
const LOOK_BACK: usize = 128;

/// A contiguous piece of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Index into [`Pieces::regions`], or [`Piece::RAW`].
    pub(crate) region: u32,
    /// Offset in the region; for unregistered memory an address of this process.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Piece {
    /// Memory that the caller promised but did not register.
    pub(crate) const RAW: u32 = u32::MAX;
}

/// The local memory of a batch, in order.
#[derive(Clone, Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) regions: Vec<Arc<RegionInner>>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: u64,
    /// What has to happen before a device reads or writes the memory.
    pub(crate) after: After,
}

/// The lengths of [`Pieces`] at an earlier time.
#[derive(Debug)]
pub(crate) struct Mark {
    pieces: usize,
    regions: usize,
    bytes: u64,
}

impl Pieces {
    /// Appends a piece of a region.
    pub(crate) fn push(&mut self, region: &Arc<RegionInner>, offset: u64, len: u64) {
        let region = self.index_of(region);
        self.push_piece(Piece { region, offset, len });
    }

    /// Turns a piece of unregistered memory into a piece of a region.
    pub(crate) fn assign(&mut self, piece: usize, region: &Arc<RegionInner>, offset: u64) {
        let len = self.pieces[piece].len;
        let region = self.index_of(region);
        self.pieces[piece] = Piece { region, offset, len };
    }

    /// Returns the index of a region, and adds the region unless it is known.
    fn index_of(&mut self, region: &Arc<RegionInner>) -> u32 {
        // Searching further back would cost more than a second entry does.
        let known = self.regions.iter().enumerate().rev().take(LOOK_BACK);
        let known = known.into_iter().find(|(_, r)| Arc::ptr_eq(r, region)).map(|(i, _)| i);
        let index = known.unwrap_or_else(|| {
            self.regions.push(Arc::clone(region));
            self.regions.len() - 1
        });
        u32::try_from(index).expect("fewer regions than descriptors")
    }

    /// Appends unregistered memory.
    ///
    /// # Safety
    /// The range stays valid for as long as a cursor over these pieces is used: until their
    /// transfer has its outcome.
    pub(crate) unsafe fn push_raw(&mut self, addr: *mut u8, len: u64) {
        self.push_piece(Piece { region: Piece::RAW, offset: addr as u64, len });
    }

    fn push_piece(&mut self, piece: Piece) {
        self.bytes += piece.len;
        self.pieces.push(piece);
    }

    /// The state that [`Pieces::go_back`] restores.
    pub(crate) fn mark(&self) -> Mark {
        Mark { pieces: self.pieces.len(), regions: self.regions.len(), bytes: self.bytes }
    }

    /// Removes the pieces that were appended since the mark, and their regions.
    pub(crate) fn go_back(&mut self, mark: &Mark) {
        self.pieces.truncate(mark.pieces);
        self.regions.truncate(mark.regions);
        self.bytes = mark.bytes;
    }

    /// Removes all pieces; keeps the allocation.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.regions.clear();
        self.bytes = 0;
        self.after = After::default();
    }

    /// Regions that a copier of these pieces touches.
    pub(crate) fn touches(&self) -> Touches {
        Touches::of(self.regions.iter().map(|region| region.id))
    }

    pub(crate) fn is_host(&self, piece: &Piece) -> bool {
        piece.region == Piece::RAW || !self.regions[piece.region as usize].is_device()
    }

    /// The address of a piece of host memory.
    pub(crate) fn address(&self, piece: &Piece) -> u64 {
        let base = self.regions.get(piece.region as usize).map_or(0, |region| region.base as u64);
        base.wrapping_add(piece.offset)
    }

    /// The device memory of a piece, by its index; `None` for host memory.
    pub(crate) fn device(&self, piece: usize) -> Option<&DeviceMemory> {
        match &self.regions.get(self.pieces[piece].region as usize)?.backing {
            Backing::Device(memory) => Some(memory),
            _ => None,
        }
    }

    /// Refuses memory of a device if no order was named for it.
    pub(crate) fn check_order(&self) -> Result<()> {
        if self.after.is_named() {
            return Ok(());
        }
        let Some(region) = self.regions.iter().find(|region| region.is_device()) else {
            return Ok(());
        };
        let what = "the batch has memory of a device: say what the transfer comes after, by Batch::set_after with \
                    the edges of that work, or with After::host() if the caller has waited";
        Err(Error::invalid(what).with("region", region.id))
    }

    /// Whether a device has to wait before the memory is touched.
    pub(crate) fn has_edges(&self) -> bool {
        !self.after.edges().is_empty() && !self.all_host()
    }

    /// Asks each device to wait for the edges, and to call `wake` once they have happened.
    pub(crate) fn wait_for_edges(&self, wake: &Wake) -> Vec<Arc<Wait>> {
        let start = |memory: &DeviceMemory| Wait::start(&*memory.device, &self.after, wake);
        self.one_of_each_device().into_iter().map(start).collect()
    }

    /// The name of an edge that a device has still to see happen, if the device can tell.
    pub(crate) fn awaited(&self) -> Option<String> {
        let name = |memory: &DeviceMemory| memory.device.awaited(&self.after);
        let mut devices = self.one_of_each_device().into_iter();
        devices.find_map(|memory| contain("a device's name of an edge", || name(memory)).flatten())
    }

    /// One region's memory for each device.
    pub(crate) fn one_of_each_device(&self) -> Vec<&DeviceMemory> {
        let mut found: Vec<&DeviceMemory> = Vec::new();
        for region in &self.regions {
            if let Backing::Device(memory) = &region.backing
                && !found.iter().any(|other| other.is_beside(memory))
            {
                found.push(memory);
            }
        }
        found
    }

    pub(crate) fn all_host(&self) -> bool {
        !self.regions.iter().any(|region| region.is_device())
    }
}

/// The position of a byte in the pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) piece: usize,
    pub(crate) within: u64,
}

impl Position {
    /// Moves on to the next piece with bytes if the current one has ended.
    pub(crate) fn leave_ended(&mut self, pieces: &Pieces) {
        while pieces.pieces[self.piece].len == self.within {
            *self = Self { piece: self.piece + 1, within: 0 };
        }
    }

    /// Moves on by `bytes`.
    pub(crate) fn advance(&mut self, pieces: &Pieces, mut bytes: u64) {
        while bytes > 0 {
            let piece = &pieces.pieces[self.piece];
            let part = bytes.min(piece.len - self.within);
            self.advance_within(piece, part);
            bytes -= part;
        }
    }

    /// Moves on by `bytes` of the current piece, which is `piece` and has as many left.
    pub(crate) fn advance_within(&mut self, piece: &Piece, bytes: u64) {
        self.within += bytes;
        if self.within == piece.len {
            *self = Self { piece: self.piece + 1, within: 0 };
        }
    }
}

/// The reason why memory can't be used any more.
#[derive(Debug)]
pub enum Fault {
    /// The memory of a descriptor can't be used any more.
    Memory(MemoryFault),
    /// The copier was stopped.
    Shut,
    /// The recipient of the spans failed.
    Io(io::Error),
}

/// The reason why memory of a descriptor can't be used any more.
#[derive(Debug)]
pub struct MemoryFault {
    /// `Revoked` or `Internal`.
    pub code: WireCode,
    /// The index of the descriptor in the batch.
    pub(crate) index: u32,
    /// The error of the device that failed to copy it.
    pub(crate) device: Option<io::Error>,
}

impl MemoryFault {
    /// The region of a piece was unregistered.
    pub(super) fn revoked(piece: usize) -> Self {
        Self { code: WireCode::Revoked, index: index_of(piece), device: None }
    }
}

pub(super) fn index_of(piece: usize) -> u32 {
    u32::try_from(piece).unwrap_or(u32::MAX)
}
