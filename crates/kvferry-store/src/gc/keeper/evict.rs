//! Evicts blocks: those that the policy gives up are condemned, or leave.

use super::Keeper;
use super::pressure::LIVE_SHARE;
use crate::core::Core;
use crate::index::{Entry, SlotId};
use crate::log::Record;
use crate::log::format::pages_of;
use crate::policy::{OnExpiry, Retention};
use crate::stats::Counters;
use rustc_hash::FxHashSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// The part of the index's slots that blocks may take.
const SLOT_SHARE: f64 = 0.98;

impl Keeper {
    pub(super) fn evict_due(&mut self) {
        let now = self.now_ms();
        let member = &self.core.member;
        let key_of = |slot| member.entry(slot).map_or(0, |entry| entry.key.0[0]);
        while let Some(slot) = self.policy.evict_due(now, key_of) {
            remove(&self.core, slot);
        }
    }

    /// Gives up one block, which leaves with its segment. Returns its pages; `None` if no block can leave.
    pub(super) fn condemn(&mut self) -> Option<u32> {
        let slot = self.give_up()?;
        let Some(entry) = self.core.member.entry(slot) else { return Some(0) };
        match Retention::from_bits(entry.retention).then {
            OnExpiry::Default => self.condemned.add(&entry),
            // Nothing would see to it that it is not found later.
            OnExpiry::Leave => remove(&self.core, slot),
        }
        Some(pages_of(entry.len))
    }

    /// The next block by the policy, which forgets it.
    pub(super) fn give_up(&mut self) -> Option<SlotId> {
        let now = self.now_ms();
        let member = &self.core.member;
        let key_of = |slot| member.entry(slot).map_or(0, |entry| entry.key.0[0]);
        self.policy.evict(now, key_of)
    }

    pub(super) fn keep_slots(&mut self) {
        let slots = f64::from(self.core.member.geometry().slots);
        while self.core.member.live() as f64 > slots * SLOT_SHARE {
            let Some(slot) = self.condemned.any().or_else(|| self.give_up()) else { return };
            match self.core.member.entry(slot) {
                Some(entry) => _ = self.condemned.remove(&entry),
                None => _ = self.condemned.forget(slot),
            }
            remove(&self.core, slot);
        }
    }

    /// Removes blocks of a segment that are worth least, until the others take no more than `share` of its pages. False,
    /// and nothing is removed, if so much may not leave that copying the rest is not worth it.
    pub(super) fn thin(&mut self, live: &mut Vec<(Entry, Record)>, share: f64) -> bool {
        let core = Arc::clone(&self.core);
        let room = f64::from(core.member.geometry().pages_per_segment) * share;
        let mut pages: u64 = live.iter().map(|(entry, _)| u64::from(pages_of(entry.len))).sum();
        let (now, mut held) = (self.now_ms(), self.policy.held());
        let is_held = |(entry, _): &&(Entry, Record)| held.contains(&entry.slot);
        let stays: u64 =
            live.iter().filter(is_held).map(|(entry, _)| u64::from(pages_of(entry.len))).sum();
        if stays as f64 > f64::from(core.member.geometry().pages_per_segment) * LIVE_SHARE {
            return false;
        }
        let mut order: Vec<_> = live
            .iter()
            .filter(|it| !is_held(it))
            .map(|(entry, _)| (self.policy.standing(now, entry.slot), *entry))
            .collect();
        order.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
        let mut removed = FxHashSet::default();
        for (_, entry) in order {
            if pages as f64 <= room {
                break;
            }
            if core.member.pins_changed() != self.pins.changed {
                self.drain_events();
                held = self.policy.held();
            }
            if held.contains(&entry.slot) {
                continue;
            }
            if evict(&core, &entry) {
                self.policy.removed(entry.slot);
                pages -= u64::from(pages_of(entry.len));
                removed.insert(entry.slot);
            }
        }
        live.retain(|(entry, _)| !removed.contains(&entry.slot));
        true
    }

    /// Whether blocks of a segment are pinned, or before one that is.
    pub(super) fn has_pinned(&mut self, segment: u32) -> bool {
        self.drain_events();
        let (geometry, member) = (self.core.superblock.geometry, &self.core.member);
        let is_here = |slot: &SlotId| {
            member.entry(*slot).is_some_and(|entry| geometry.locate(entry.page).0 == segment)
        };
        self.policy.pinned().iter().any(is_here)
    }

    /// Removes the blocks of a segment, and counts them. False if some could not be removed.
    pub(super) fn drop_blocks(
        &mut self,
        segment: u32,
        counter: fn(&Counters) -> &AtomicU64,
    ) -> bool {
        let core = Arc::clone(&self.core);
        let mut is_empty = true;
        for entry in core.member.iter() {
            if core.superblock.geometry.locate(entry.page).0 != segment {
                continue;
            }
            if core.member.remove(&entry) {
                self.policy.removed(entry.slot);
                self.condemned.remove(&entry);
                core.disk.note_evicted(entry.key.0);
                Counters::add(counter(&core.counters), 1);
            } else {
                is_empty &= !is_there(&core, &entry);
            }
        }
        is_empty
    }
}

/// Whether a block is where it was. It may have been used since.
pub(super) fn is_there(core: &Core, entry: &Entry) -> bool {
    let now = core.member.entry(entry.slot);
    now.is_some_and(|now| now.key == entry.key && now.page == entry.page)
}

/// Removes the block of a slot from the index.
pub(super) fn remove(core: &Core, slot: SlotId) {
    if let Some(entry) = core.member.entry(slot) {
        evict(core, &entry);
    }
}

/// Removes a block from the index. False if it is not where it was, or a stopped process holds its lock.
pub(super) fn evict(core: &Core, entry: &Entry) -> bool {
    core.disk.note_evicted(entry.key.0);
    let is_removed = core.member.remove(entry);
    Counters::add(&core.counters.evicted, usize::from(is_removed));
    is_removed
}
