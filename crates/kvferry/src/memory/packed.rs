//! Pieces of a batch that one stage takes, and the start of their copy.

use crate::memory::device::{Copy, DeviceMemory, DevicePiece, Direction, Regions};
use crate::memory::gate::Gate;
use crate::memory::pieces::{Fault, MemoryFault, Pieces, index_of};
use crate::memory::region::RegionUse;
use crate::memory::stages::{Stage, Wake};
use crate::sync::{Arc, Mutex};
use kvferry_proto::WireCode;
use smallvec::SmallVec;
use std::io;

/// Pieces of any regions of one device, in the order of their bytes in the stage.
pub(crate) struct Packed {
    /// Memory of the first piece.
    memory: DeviceMemory,
    /// Bytes that the stage takes.
    room: usize,
    pieces: Vec<DevicePiece>,
    /// The regions, by their indexes in the batch's pieces, each with the index of its first piece.
    regions: SmallVec<[(u32, usize); 2]>,
    last_region: Option<u32>,
    seen: Seen,
    len: usize,
}

impl Packed {
    /// An empty list, for pieces of the device that `memory` belongs to, of at most `room` bytes in all.
    pub(crate) fn new(memory: DeviceMemory, room: usize) -> Self {
        Self {
            memory,
            room,
            pieces: Vec::new(),
            regions: SmallVec::new(),
            last_region: None,
            seen: Seen::default(),
            len: 0,
        }
    }

    /// Bytes of all pieces.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The device's address of the first byte.
    pub(crate) fn address(&self) -> u64 {
        self.pieces[0].address
    }

    /// Adds the bytes of the batch's piece `index` that follow its first `within`, as many as the stage takes; returns
    /// their number. `None` if the stage or the list of pieces is full, or if the piece is no memory of the device.
    pub(crate) fn add(&mut self, pieces: &Pieces, index: usize, within: u64) -> Option<usize> {
        let memory = pieces.device(index).filter(|memory| memory.is_beside(&self.memory))?;
        let left = self.room - self.len;
        if left == 0 {
            return None;
        }
        let piece = &pieces.pieces[index];
        let len = usize::try_from(piece.len - within).unwrap_or(usize::MAX).min(left);
        if len == 0 {
            return Some(0);
        }
        let address = memory.at(piece.offset + within);
        let count = self.pieces.len();
        // Pieces of two regions are not joined: neighbours may be two allocations of the device.
        let is_of_last = self.last_region.replace(piece.region) == Some(piece.region);
        match self.pieces.last_mut() {
            Some(last) if is_of_last && last.address + last.len as u64 == address => {
                last.len += len;
            }
            _ if count == self.memory.pieces_max => return None,
            _ => self.pieces.push(DevicePiece { address, len }),
        }
        if !is_of_last && self.seen.insert(piece.region) {
            self.regions.push((piece.region, index));
        }
        self.len += len;
        Some(len)
    }

    /// Drops the bytes beyond the first `len`. The regions of dropped bytes stay: they are still checked and held.
    pub(crate) fn truncate(&mut self, len: usize) {
        let mut left = len;
        self.pieces.retain_mut(|piece| {
            piece.len = piece.len.min(left);
            left -= piece.len;
            piece.len > 0
        });
        self.len = len;
    }

    /// Starts the copy between the device and the stage, inside the gate.
    pub(crate) fn start(
        self,
        direction: Direction,
        pieces: &Pieces,
        gate: &Arc<Gate>,
        stage: Stage,
        wake: &Wake,
    ) -> Result<Arc<Copy>, Fault> {
        let _inside = gate.enter().map_err(|_| Fault::Shut)?;
        let held = self.regions.iter().map(|&(region, piece)| {
            let held = RegionUse::begin(&pieces.regions[region as usize]);
            held.ok_or_else(|| Fault::Memory(MemoryFault::revoked(piece)))
        });
        let held = held.collect::<Result<Regions, Fault>>()?;
        let copy = Arc::new(Copy {
            direction,
            memory: self.memory,
            pieces: self.pieces,
            len: self.len,
            gate: Arc::clone(gate),
            wake: Arc::clone(wake),
            outcome: Mutex::new(None),
        });
        copy.start(stage, held);
        Ok(copy)
    }
}

/// The fault of a device that failed to copy memory of the piece at this index and of those after it.
pub(crate) fn device_fault(piece: usize, error: io::Error) -> Fault {
    warn_limited!(piece, %error, "a copy between device and staging memory failed");
    let (code, index) = (WireCode::Internal, index_of(piece));
    Fault::Memory(MemoryFault { code, index, device: Some(error) })
}

/// A set of regions, by their indexes in a batch: a bit for each.
#[derive(Default)]
struct Seen(SmallVec<[u64; 4]>);

impl Seen {
    /// Adds a region. Returns whether it is new.
    fn insert(&mut self, region: u32) -> bool {
        let (word, bit) = (region as usize / 64, 1 << (region % 64));
        if self.0.len() <= word {
            self.0.resize(word + 1, 0);
        }
        let is_new = self.0[word] & bit == 0;
        self.0[word] |= bit;
        is_new
    }
}
