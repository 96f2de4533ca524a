//! Changes of the index: blocks come, move and go.

use super::chain::{MAX_HOPS, Step};
use super::member::Member;
use super::slot::{Entry, Link, New, Slot, SlotId, State};
use super::{Index, layout};
use crate::Key;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

#[cfg(test)]
use super::tests::crash::reached;

/// A point where tests end the process.
#[cfg(not(test))]
fn reached(_: &str) {}

/// Result of [`Member::insert`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The block is in this slot.
    New(SlotId),
    /// The key was there already.
    Exists(Entry),
    /// No slot is free.
    Full,
    /// A member that is stopped holds the lock.
    Contended,
}

/// Predecessor of a slot in its chain.
#[derive(Clone, Copy, Debug)]
enum Place {
    First,
    After(SlotId),
}

impl Member {
    /// Adds a block, unless the key is there.
    pub fn insert(&self, key: Key, new: New) -> Inserted {
        let bucket = self.bucket_of(&key);
        let Some(locked) = self.lock(bucket) else { return Inserted::Contended };
        let is_it = |slot: &Slot| slot.version().state() == State::Live && slot.key() == key;
        match self.search(bucket, is_it) {
            Err(Unavailable) => return Inserted::Contended,
            Ok(Some((_, slot))) => return self.exists(slot),
            Ok(None) => {}
        }
        let Some(slot) = self.hold_free() else { return Inserted::Full };
        reached("insert: held");
        locked.note(key);
        let head = self.bucket(bucket);
        slot.fill(key, &new, Link::from_bucket(head.load(Acquire), bucket));
        reached("insert: filled");
        head.store(Link::Slot(slot.id).to_raw(), Release);
        reached("insert: linked");
        slot.make_live();
        reached("insert: live");
        self.credit(new.page, new.len);
        self.shared.word(layout::LIVE).fetch_add(1, Relaxed);
        self.publish(key);
        Inserted::New(slot.id)
    }

    /// Sets a block's place, if it still is `entry`'s.
    pub fn relocate(&self, entry: &Entry, page: u32) -> bool {
        let bucket = self.bucket_of(&entry.key);
        let Some(_locked) = self.lock(bucket) else { return false };
        let slot = self.slot(entry.slot);
        if !slot.is(entry) {
            return false;
        }
        slot.relocate(page);
        reached("relocate: moved");
        self.debit(entry.page, entry.len);
        self.credit(page, entry.len);
        true
    }

    /// Sets the block before a block, if it still is `entry`'s.
    pub fn set_parent(&self, entry: &Entry, parent: Option<SlotId>) -> bool {
        let Some(_locked) = self.lock(self.bucket_of(&entry.key)) else { return false };
        let slot = self.slot(entry.slot);
        let is_there = slot.is(entry);
        if is_there {
            slot.set_parent(parent);
        }
        is_there
    }

    /// Removes a block, if it still is where `entry` says.
    pub fn remove(&self, entry: &Entry) -> bool {
        let bucket = self.bucket_of(&entry.key);
        let Some(locked) = self.lock(bucket) else { return false };
        let Ok(Some((place, slot))) = self.search(bucket, |slot| slot.id == entry.slot) else {
            return false;
        };
        if !slot.is(entry) {
            return false;
        }
        locked.note(entry.key);
        slot.hold(self.id());
        reached("remove: held");
        self.unlink(bucket, place, &slot);
        reached("remove: unlinked");
        self.free(&slot);
        self.debit(entry.page, entry.len);
        let _ = self.shared.word(layout::LIVE).fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1));
        self.publish(entry.key);
        true
    }

    /// Holds the lowest free slot.
    fn hold_free(&self) -> Option<Slot<'_>> {
        loop {
            let slot = self.slot(self.layout.taken_slots.take(&self.shared)?);
            // Before the slot is held: a sweep looks at the slots below.
            let high = self.shared.word(layout::HIGH_WATER);
            let above = u64::from(slot.id) + 1;
            if high.load(Acquire) < above {
                high.fetch_max(above, Release);
            }
            // It fails if a repair found the slot free between this and another member's taking.
            if slot.try_hold(self.id()) {
                return Some(slot);
            }
        }
    }

    /// Frees a slot that a dead member held, if it still does.
    pub(super) fn free_held_by(&self, number: u8, slot: &Slot<'_>) -> Result<(), Unavailable> {
        let bucket = self.bucket_of(&slot.key());
        let _locked = self.lock(bucket).ok_or(Unavailable)?;
        let place = self.search(bucket, |other| other.id == slot.id)?;
        if slot.version().state() != State::Held(number) {
            return Ok(());
        }
        if let Some((place, slot)) = place {
            self.unlink(bucket, place, &slot);
        }
        self.free(slot);
        Ok(())
    }

    fn free(&self, slot: &Slot<'_>) {
        slot.make_free();
        reached("remove: free");
        self.layout.taken_slots.give(&self.shared, slot.id);
    }

    fn exists(&self, slot: Slot<'_>) -> Inserted {
        // The lock keeps the slot live.
        slot.entry().map_or(Inserted::Contended, Inserted::Exists)
    }
}

/// The chain has no end, or its stripe could not be locked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unavailable;

/// Under the lock of the bucket's stripe.
impl Index {
    /// The first slot of the chain that `is_it` accepts, and what points to it.
    fn search(
        &self,
        bucket: u32,
        is_it: impl Fn(&Slot<'_>) -> bool,
    ) -> Result<Option<(Place, Slot<'_>)>, Unavailable> {
        let mut place = Place::First;
        let mut step = self.first(bucket);
        for _ in 0..MAX_HOPS {
            let slot = match step {
                Step::End => return Ok(None),
                Step::OtherChain => return Err(Unavailable),
                Step::Slot(slot) => self.slot(slot),
            };
            if is_it(&slot) {
                return Ok(Some((place, slot)));
            }
            place = Place::After(slot.id);
            step = self.follow(Link::from_next(slot.next()), bucket);
        }
        Err(Unavailable)
    }

    /// Takes a slot out of its chain by one store. Its own link stays, for readers that are at it.
    fn unlink(&self, bucket: u32, place: Place, slot: &Slot<'_>) {
        let next = Link::from_next(slot.next()).unwrap_or(Link::End(bucket));
        match place {
            Place::First => self.bucket(bucket).store(next.to_raw(), Release),
            Place::After(before) => self.slot(before).set_next(next),
        }
    }
}
