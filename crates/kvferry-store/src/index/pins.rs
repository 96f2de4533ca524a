//! Blocks that are to stay: leases, in memory that all members share.
//!
//! A word for each lease: the slot, and when it ends. So a new keeper finds them, and what a dead process had
//! pinned is free when its lease ends.

use super::layout::MAX_PINS;
use super::slot::SlotId;
use super::{Index, layout};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// A lease. It must be given back with [`Index::unpin`], or ends by itself.
#[derive(Debug)]
pub struct PinId {
    place: usize,
    word: u64,
}

impl Index {
    /// Has the keeper keep the block of a slot, and all before it, until `until_s`. `None` if there are
    /// [`MAX_PINS`] leases.
    pub fn pin(&self, slot: SlotId, now_s: u32, until_s: u32) -> Option<PinId> {
        let word = u64::from(until_s) << 32 | (u64::from(slot) + 1);
        // Each begins to look somewhere else.
        let first = slot as usize % MAX_PINS;
        let place = (first..MAX_PINS).chain(0..first).find(|place| {
            let lease = self.pin_word(*place);
            let before = lease.load(Relaxed);
            let is_free = parse(before).is_none_or(|(_, until_s)| until_s <= now_s);
            is_free && lease.compare_exchange(before, word, AcqRel, Relaxed).is_ok()
        })?;
        self.pins_changed_word().fetch_add(1, AcqRel);
        Some(PinId { place, word })
    }

    /// Ends a lease.
    pub fn unpin(&self, pin: &PinId) {
        // If it fails, the lease had ended, and the place is another one's.
        if self.pin_word(pin.place).compare_exchange(pin.word, 0, AcqRel, Relaxed).is_ok() {
            self.pins_changed_word().fetch_add(1, AcqRel);
        }
    }

    /// The slots of leases that have not ended, and when they do.
    pub fn pins(&self, now_s: u32) -> impl Iterator<Item = (SlotId, u32)> + '_ {
        let lease = |place| parse(self.pin_word(place).load(Acquire));
        (0..MAX_PINS).filter_map(lease).filter(move |(_, until_s)| *until_s > now_s)
    }

    /// Counts the changes of the leases, but for those that end by themselves.
    pub fn pins_changed(&self) -> u64 {
        self.pins_changed_word().load(Acquire)
    }

    fn pins_changed_word(&self) -> &AtomicU64 {
        self.shared.word(layout::PINS_CHANGED)
    }

    fn pin_word(&self, place: usize) -> &AtomicU64 {
        self.shared.word(self.layout.pins + place * size_of::<u64>())
    }
}

fn parse(word: u64) -> Option<(SlotId, u32)> {
    let slot = (word as u32).checked_sub(1)?;
    Some((slot, (word >> 32) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::Geometry;
    use std::os::fd::AsFd;

    #[test]
    fn leases_end_when_they_are_given_back_or_at_their_time() {
        let geometry = Geometry { slots: 100, segments: 1, pages_per_segment: 100 };
        let index = Index::create(geometry).expect("memory");
        let memory = index.memory().as_fd().try_clone_to_owned().expect("a descriptor");
        let other = Index::open(memory).expect("an index");
        let slots = |now_s| {
            let mut slots: Vec<_> = other.pins(now_s).collect();
            slots.sort_unstable();
            slots
        };
        let first = index.pin(7, 10, 20).expect("room");
        let _second = index.pin(0, 10, 15).expect("room");
        assert_eq!(slots(10), [(0, 15), (7, 20)]);
        assert_eq!(slots(15), [(7, 20)]);
        let changed = other.pins_changed();
        index.unpin(&first);
        assert!(other.pins_changed() > changed);
        assert_eq!(slots(15), []);
        // Twice is once.
        index.unpin(&first);
        let all: Vec<_> = (0..MAX_PINS).filter_map(|_| index.pin(3, 20, 30)).collect();
        assert_eq!(all.len(), MAX_PINS);
        assert!(index.pin(3, 29, 40).is_none(), "no room before they end");
        assert!(index.pin(3, 30, 40).is_some());
    }
}
