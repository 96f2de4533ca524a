//! Allocations of a GPU's memory: no copy may cross from one to the next.

use std::collections::BTreeMap;

/// Allocations that registered memory lies in: their ends, by their starts. They do not overlap.
#[derive(Debug, Default)]
pub(super) struct Allocations(BTreeMap<u64, u64>);

impl Allocations {
    /// Adds an allocation, in the place of those that were there before.
    pub(super) fn note(&mut self, base: u64, len: u64) {
        let end = base.saturating_add(len);
        self.0.retain(|&start, &mut its_end| its_end <= base || start >= end);
        self.0.insert(base, end);
    }

    /// True if one known allocation has both addresses.
    pub(super) fn is_one(&self, one: u64, other: u64) -> bool {
        let found = self.0.range(..=one.min(other)).next_back();
        found.is_some_and(|(_, &end)| one.max(other) < end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_joined_in_the_newest_allocation_only() {
        let mut known = Allocations::default();
        assert!(!known.is_one(5, 6));
        known.note(100, 50);
        known.note(150, 50);
        assert!(known.is_one(100, 149) && known.is_one(199, 150));
        assert!(!known.is_one(149, 150) && !known.is_one(199, 200) && !known.is_one(99, 100));
        // Its memory was freed, and two others lie there.
        known.note(100, 75);
        known.note(175, 25);
        assert!(known.is_one(100, 174) && !known.is_one(174, 175) && known.is_one(175, 199));
        known.note(u64::MAX - 1, 5);
        assert!(!known.is_one(u64::MAX - 1, u64::MAX));
    }
}
