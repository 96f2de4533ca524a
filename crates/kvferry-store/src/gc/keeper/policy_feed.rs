//! Input of the policy from the index: blocks that came, that are wanted again, and that are leased.

use super::condemned::Condemned;
use crate::core::Core;
use crate::index::{Entry, SlotId};
use crate::policy::{Kept, Policy, Retention};
use rustc_hash::FxHashSet;

/// The leases that the policy knows of.
#[derive(Debug, Default)]
pub(super) struct Pins {
    slots: FxHashSet<SlotId>,
    /// [`crate::index::Index::pins_changed`] when they were read.
    pub(super) changed: u64,
    /// End of the lease that ends first, in seconds of the store's time. 0 while the policy does not know a leased
    /// block.
    ends_s: u32,
}

impl Pins {
    /// Pins what is leased, and unpins what is not any more. Returns the blocks that a lease has kept which has ended.
    pub(super) fn follow(
        &mut self,
        core: &Core,
        policy: &mut Policy,
        condemned: &mut Condemned,
    ) -> FxHashSet<SlotId> {
        let (now, changed) = (core.clock.now_s(), core.member.pins_changed());
        if changed == self.changed && now < self.ends_s {
            return FxHashSet::default();
        }
        let leased: Vec<_> = core.member.pins(now).collect();
        let slots: FxHashSet<_> = leased.iter().map(|(slot, _)| *slot).collect();
        let mut ended = Vec::new();
        self.slots.retain(|slot| {
            let is_leased = slots.contains(slot);
            if !is_leased {
                policy.unpin(*slot);
                ended.push(*slot);
            }
            is_leased
        });
        let mut all_known = true;
        for slot in slots {
            if !self.slots.contains(&slot) {
                recall_with_those_before(core, policy, condemned, slot);
                match policy.pin(slot) {
                    true => _ = self.slots.insert(slot),
                    // Its event is still to come, or it has left.
                    false => all_known = false,
                }
            }
        }
        self.changed = changed;
        let ends = leased.iter().map(|(_, until_s)| *until_s).min().unwrap_or(u32::MAX);
        self.ends_s = if all_known { ends } else { 0 };
        policy.with_those_before(ended.into_iter())
    }
}

/// Like [`recall`], for a block and those before it in its prompt.
pub(super) fn recall_with_those_before(
    core: &Core,
    policy: &mut Policy,
    condemned: &mut Condemned,
    slot: SlotId,
) {
    let (mut chain, mut at) = (Vec::new(), Some(slot));
    while let Some(entry) = at.and_then(|slot| core.member.entry(slot))
        && condemned.remove(&entry)
    {
        chain.push(entry.slot);
        at = entry.parent;
    }
    chain.reverse();
    let parent = at.filter(|slot| policy.contains(*slot));
    let now_ms = core.clock.now_ms();
    add(core, policy, now_ms, parent, &chain);
}

/// Tells the policy of blocks that came, in the order of their prompt.
pub(super) fn add(
    core: &Core,
    policy: &mut Policy,
    now_ms: u64,
    parent: Option<SlotId>,
    slots: &[SlotId],
) {
    let entries: Vec<_> = slots.iter().filter_map(|slot| core.member.entry(*slot)).collect();
    let mut parent = parent;
    for alike in entries.chunk_by(|one, next| one.retention == next.retention) {
        let blocks: Vec<_> = alike.iter().map(|it| (it.slot, it.key.0[0])).collect();
        let retention = Retention::from_bits(alike[0].retention);
        policy.added(now_ms, parent, &blocks, retention);
        parent = alike.last().map(|it| it.slot);
    }
}

/// Tells the policy of blocks that it had given up, and that are wanted again.
pub(super) fn recall(
    core: &Core,
    policy: &mut Policy,
    condemned: &mut Condemned,
    now_ms: u64,
    parent: Option<SlotId>,
    slots: &[SlotId],
) {
    if slots.is_empty() {
        return;
    }
    for entry in slots.iter().filter_map(|slot| core.member.entry(*slot)) {
        condemned.remove(&entry);
    }
    add(core, policy, now_ms, parent, slots);
}

/// Tells the policy of blocks that a put has found, in the order of its prompt. Those that it had given up come back.
pub(super) fn found(
    core: &Core,
    policy: &mut Policy,
    condemned: &mut Condemned,
    now_ms: u64,
    parent: Option<SlotId>,
    slots: &[SlotId],
) {
    let (mut before, mut rest) = (parent, slots);
    while let Some(first) = rest.first() {
        let is_known = policy.contains(*first);
        let count = rest.iter().take_while(|slot| policy.contains(**slot) == is_known).count();
        let (alike, behind) = rest.split_at(count);
        match is_known {
            true => policy.found(now_ms, before, alike),
            false => recall(core, policy, condemned, now_ms, before, alike),
        }
        (before, rest) = (alike.last().copied(), behind);
    }
}

/// A policy of the blocks that the index has.
pub(super) fn rebuild(core: &Core) -> Policy {
    let kept = |entry: Entry| Kept {
        slot: entry.slot,
        parent: entry.parent,
        used_at_ms: u64::from(entry.used_at) * 1000,
        retention: Retention::from_bits(entry.retention),
    };
    let slots = core.member.geometry().slots as usize;
    Policy::rebuild(slots, core.member.iter().map(kept))
}
