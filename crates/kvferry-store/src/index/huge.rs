//! Huge pages: a look-up touches three or four places that are far apart, and with small pages each of them
//! costs the processor a walk through page tables that don't fit into its caches.

use super::Index;
use kvferry_sys::shared::HUGE_PAGE;
use std::io::ErrorKind;
use std::sync::atomic::Ordering::Relaxed;

/// The buckets are made of huge pages once one of so many slots was used: then most of their pages were touched.
const BUCKETS_SHARE: u32 = 64;

impl Index {
    /// Copies what was filled since the last call into huge pages, at most so many. Each takes a millisecond, in
    /// which a process that reads it waits. Returns whether there may be more to do.
    ///
    /// Only pages that are full are copied, so this takes no memory. Where the system has no huge pages, all stays
    /// as it is.
    pub fn collapse(&self, pages_max: usize) -> bool {
        let (layout, used) = (&self.layout, self.high_water());
        // Nothing lies behind the slots. Huge pages that hold something before the buckets stay as they are.
        let first = layout.buckets.div_ceil(HUGE_PAGE);
        let filled = match used >= layout.geometry.slots / BUCKETS_SHARE {
            true => self.slot_offset(used) / HUGE_PAGE,
            false => first,
        };
        let begin = self.collapsed.load(Relaxed).max(first);
        let end = filled.min(begin.saturating_add(pages_max));
        for page in begin..end {
            let collapsed = self.shared.collapse(page * HUGE_PAGE, HUGE_PAGE);
            if collapsed.is_err_and(|e| e.kind() == ErrorKind::InvalidInput) {
                // The system can't do it.
                self.collapsed.store(usize::MAX, Relaxed);
                return false;
            }
        }
        self.collapsed.store(end.max(begin), Relaxed);
        end < filled
    }
}
