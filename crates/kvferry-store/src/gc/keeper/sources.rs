//! Where blocks were copied from.

use crate::index::Index;
use rustc_hash::{FxHashMap, FxHashSet};

/// Segments that blocks were copied from, for each segment that this keeper has begun: until it is synced, the blocks
/// may be on the disk in the former alone. Any other segment may have copies from all.
#[derive(Debug, Default)]
pub(super) struct Sources(pub(super) FxHashMap<u32, FxHashSet<u32>>);

impl Sources {
    /// A segment to copy to is begun.
    pub(super) fn begin(&mut self, segment: u32) {
        self.0.insert(segment, FxHashSet::default());
    }

    /// Blocks are copied.
    pub(super) fn note_copied(&mut self, index: &Index, from: u32, to: u32) {
        let Some(known) = self.0.get_mut(&to) else { return };
        known.insert(from);
        if !index.has_copies(from) {
            return;
        }
        // They may still be on the disk in the place before the last one alone.
        match self.0.get(&from).cloned() {
            Some(before) => self.0.entry(to).or_default().extend(before),
            None => _ = self.0.remove(&to),
        }
    }

    /// Forgets the sources of a segment that was synced: its copies are on the disk.
    pub(super) fn synced(&mut self, segment: u32) {
        if let Some(known) = self.0.get_mut(&segment) {
            known.clear();
        }
    }

    /// Whether blocks may have been copied.
    pub(super) fn may_be(&self, from: u32, to: u32) -> bool {
        from != to && self.0.get(&to).is_none_or(|known| known.contains(&from))
    }
}
