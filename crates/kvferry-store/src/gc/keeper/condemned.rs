//! Blocks that are to leave with their segment.
//!
//! Removing a block frees no space: its segment does, once it is collected. So a block that the policy has given up
//! stays in the index, where it is found as before, until the keeper frees its segment. Only the keeper knows which
//! blocks these are: a bit for each slot, and their pages for each segment.

use crate::index::{Entry, Geometry, SlotId};
use crate::log::format::pages_of;

#[derive(Debug)]
pub(super) struct Condemned {
    /// Bit set of condemned slots.
    bits: Vec<u64>,
    /// Pages of condemned blocks, indexed by segment. Too many where another process removed a block, until the
    /// segment is freed.
    pages: Vec<u32>,
    pages_per_segment: u32,
    len: u64,
    /// The word where [`Condemned::any`] goes on.
    at: usize,
}

impl Condemned {
    pub(super) fn new(geometry: Geometry) -> Self {
        Self {
            bits: vec![0; (geometry.slots as usize).div_ceil(64)],
            pages: vec![0; geometry.segments as usize],
            pages_per_segment: geometry.pages_per_segment,
            len: 0,
            at: 0,
        }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn contains(&self, slot: SlotId) -> bool {
        let word = self.bits.get(slot as usize / 64).copied().unwrap_or(0);
        word >> (slot % 64) & 1 == 1
    }

    /// Pages of the condemned blocks of a segment.
    pub(super) fn pages(&self, segment: u32) -> u32 {
        self.pages.get(segment as usize).copied().unwrap_or(0)
    }

    pub(super) fn add(&mut self, entry: &Entry) {
        let Some(word) = self.bits.get_mut(entry.slot as usize / 64) else { return };
        let bit = 1 << (entry.slot % 64);
        if *word & bit == 0 {
            *word |= bit;
            self.len += 1;
            if let Some(pages) = self.pages.get_mut((entry.page / self.pages_per_segment) as usize)
            {
                *pages = pages.saturating_add(pages_of(entry.len));
            }
        }
    }

    /// The block has left, or is wanted again. False if it was not condemned.
    pub(super) fn remove(&mut self, entry: &Entry) -> bool {
        let was = self.forget(entry.slot);
        if was
            && let Some(pages) = self.pages.get_mut((entry.page / self.pages_per_segment) as usize)
        {
            *pages = pages.saturating_sub(pages_of(entry.len));
        }
        was
    }

    /// The slot has another block, or none: where the condemned one was is not known. False if it was not condemned.
    pub(super) fn forget(&mut self, slot: SlotId) -> bool {
        let Some(word) = self.bits.get_mut(slot as usize / 64) else { return false };
        let bit = 1 << (slot % 64);
        let was = *word & bit != 0;
        *word &= !bit;
        self.len -= u64::from(was);
        was
    }

    /// No block lives in the segment any more.
    pub(super) fn freed(&mut self, segment: u32) {
        if let Some(pages) = self.pages.get_mut(segment as usize) {
            *pages = 0;
        }
    }

    /// Returns a condemned block; the next call looks for the next one.
    pub(super) fn any(&mut self) -> Option<SlotId> {
        if self.len == 0 {
            return None;
        }
        let words = self.bits.len();
        let at = (0..words).map(|it| (self.at + it) % words).find(|at| self.bits[*at] != 0)?;
        self.at = at;
        SlotId::try_from(at * 64 + self.bits[at].trailing_zeros() as usize).ok()
    }
}
