//! The peer's memory that is mapped in this process.

use crate::sync::{Arc, RwLock};
use kvferry_proto::RegionId;
use kvferry_sys::shared::Shared;
use rustc_hash::FxHashMap;
use std::collections::hash_map::Entry;

/// The requested memory, by region: `None` until the peer has sent it, which it may never do.
///
/// Holds no more entries than the peer has regions: each request drops the entries of regions that
/// are gone, even if the peer's message about that has not arrived.
#[derive(Debug, Default)]
pub(super) struct Maps(RwLock<FxHashMap<u32, Option<Arc<Shared>>>>);

impl Maps {
    /// The memory of a region, if it is mapped; otherwise requests it, once.
    ///
    /// `ask` returns whether the request was sent, `is_live` whether a region is still registered.
    pub(super) fn find(
        &self,
        region: RegionId,
        is_live: impl Fn(RegionId) -> bool,
        ask: impl FnOnce() -> bool,
    ) -> Option<Arc<Shared>> {
        let maps = self.0.read();
        if let Some(map) = maps.get(&region.0) {
            return map.clone();
        }
        drop(maps);
        // Dropped after the lock: unmapping takes time.
        let _gone: Vec<_>;
        let mut maps = self.0.write();
        _gone = maps.extract_if(|&id, _| !is_live(RegionId(id))).collect();
        match maps.entry(region.0) {
            // Another thread has requested it meanwhile.
            Entry::Occupied(entry) => entry.get().clone(),
            Entry::Vacant(entry) => {
                // If the socket is full, the next transfer requests it again.
                if ask() {
                    entry.insert(None);
                }
                None
            }
        }
    }

    /// Stores the memory that the peer sent for a region, if it was requested.
    pub(super) fn fill(&self, region: RegionId, map: Shared) {
        let mut map = Some(Arc::new(map));
        // After this, `map` is what the entry held, or a mapping without an entry; it is dropped
        // without the lock.
        if let Some(asked) = self.0.write().get_mut(&region.0) {
            std::mem::swap(asked, &mut map);
        }
    }

    /// The peer has unregistered a region.
    pub(super) fn forget(&self, region: RegionId) {
        let gone = self.0.write().remove(&region.0);
        drop(gone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> Shared {
        Shared::create("kvferry-test", 4096).expect("memory")
    }

    fn entries(maps: &Maps) -> usize {
        maps.0.read().len()
    }

    #[test]
    fn a_region_is_requested_once_and_found_once_it_was_received() {
        let (maps, region) = (Maps::default(), RegionId(7));
        assert!(maps.find(region, |_| true, || false).is_none(), "the request was not sent");
        assert!(maps.find(region, |_| true, || true).is_none(), "requested again");
        let again = || panic!("requested twice");
        assert!(maps.find(region, |_| true, again).is_none());
        maps.fill(region, memory());
        assert!(maps.find(region, |_| true, || panic!("requested twice")).is_some());
        maps.forget(region);
        assert_eq!(entries(&maps), 0);
        maps.fill(region, memory());
        assert_eq!(entries(&maps), 0, "memory that was not requested is not kept");
    }

    #[test]
    fn entries_of_gone_regions_are_dropped_without_a_message_from_the_peer() {
        let maps = Maps::default();
        for id in 1..=1000 {
            assert!(maps.find(RegionId(id), |live| live.0 + 1 >= id, || true).is_none());
            maps.fill(RegionId(id), memory());
            assert!(entries(&maps) <= 2, "{} entries of two regions", entries(&maps));
        }
    }
}
