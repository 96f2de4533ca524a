//! Which blocks came and went, for every process that asks: a ring of keys for each member.
//!
//! The other rings ([`super::events`]) tell the keeper about slots, and only the keeper drains them. These tell any
//! number of subscribers about keys, and no subscriber is waited for. A key in a ring means: *the block of this key may
//! have come or gone; look it up*. What a subscriber says of a block is therefore what the index says at that moment,
//! so an entry that is read twice, late, or in another order than that of the changes does no harm. Only an entry that
//! is never read does, and each way to that is closed:
//!
//! - **A change without an entry.** [`Member::insert`] and [`Member::remove`] are the only ways in and out of the
//!   index. Both publish under the stripe's lock, after their change is visible. A block that moves keeps its key.
//! - **A process is killed between its change and the entry.** It has written the key into the stripe, beside the lock,
//!   before the change. Whichever member takes the lock over publishes that key first, and [`Member::sweep`] takes over
//!   all locks of a dead member. So the key is published at most as late as the keeper learns of the death.
//! - **A process is stopped there.** It holds the lock, so the block can't change, and it publishes when it goes on.
//! - **A ring is overwritten before a subscriber reads it.** A writer announces the entry that it is about to write
//!   (`begun`) before it overwrites the one from a whole ring ago. A subscriber that finds `begun` more than a ring
//!   ahead has lost entries: it begins with a snapshot of the index again ([`Index::snapshot`]).
//! - **A change before the subscription.** Without subscribers, nothing is published. [`Member::subscribe`] counts itself
//!   first, and then locks each stripe once: a writer that saw no subscriber has released its stripe by then, and what
//!   it changed is in the snapshot. A stripe whose owner is stopped is remembered, and once it is released the
//!   subscriber takes another snapshot.
//!
//! # Wake-up
//! A subscriber that waits sets the low bit of a word, looks at all rings once more, and sleeps on the word. The first
//! writer afterwards adds one, which clears the bit and makes the value a new one, and wakes all that sleep. A fence on
//! either side has one of them see the other. So idle subscribers cost nothing, and writers make one call of the
//! system for each time that a subscriber has waited.

use super::layout::{CHANGES_LEN, KEY_LEN, MAX_MEMBERS, MemberId, RING_KEYS, STRIPES};
use super::member::{BEGUN, Member, PUBLISHED, SUBSCRIBERS};
use super::{Index, layout};
use crate::Key;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::time::{Duration, Instant};

/// A subscriber waits.
const ARMED: u32 = 1;
/// The longest sleep of a subscriber: the process that was to wake it may have been killed.
const SLEEP_MAX: Duration = Duration::from_secs(1);

/// Position of a subscriber in all rings. It belongs to the member that made it: see [`Member::unsubscribe`].
#[derive(Debug)]
pub struct Changes {
    /// Position read in each ring, indexed by the member's number.
    read: [u64; MAX_MEMBERS],
    /// The ring that the next call begins with, so that none is left out.
    first: usize,
    /// Stripes that were locked when the subscription began, and by which member.
    locked: Vec<(u32, u64)>,
    /// Entries were lost: the subscriber needs a snapshot.
    is_lost: bool,
}

/// Result of [`Index::poll`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Polled {
    /// Every entry was read.
    All,
    /// There may be more.
    More,
    /// Entries were lost, or the subscription has just begun: what the subscriber knows is to be replaced by a
    /// [`Index::snapshot`] that begins after this call.
    Lost,
}

impl Member {
    /// Begins to read the changes. The first [`Index::poll`] asks for a snapshot.
    pub fn subscribe(&self) -> Changes {
        // In this order, and the other way round at the end: a process that is killed in between counts for too many, and
        // never for too few.
        self.subscribers().fetch_add(1, SeqCst);
        self.member_word(self.id().number, SUBSCRIBERS).fetch_add(1, AcqRel);
        let mut locked = Vec::new();
        for stripe in 0..STRIPES {
            // The lock of a bucket of this number is the stripe's.
            if self.lock(stripe).is_none() {
                locked.push((stripe, self.stripe_owner(stripe)));
            }
        }
        let read = std::array::from_fn(|number| self.published(number).load(Acquire));
        Changes { read, first: 0, locked, is_lost: true }
    }

    /// Ends a subscription of this member.
    pub fn unsubscribe(&self, _ended: &Changes) {
        let own = self.member_word(self.id().number, SUBSCRIBERS);
        if own.fetch_update(AcqRel, Relaxed, |count| count.checked_sub(1)).is_ok() {
            self.subscribers_left(1);
        }
    }

    /// Says that the block of a key has come or gone. Under the lock of its stripe, after the change.
    pub(super) fn publish(&self, key: Key) {
        if self.subscribers().load(SeqCst) == 0 {
            return;
        }
        let number = usize::from(self.id().number);
        {
            let _one_writer = self.changes.lock();
            let at = self.published(number).load(Relaxed);
            self.begun(number).store(at + 1, Relaxed);
            // A reader that sees a word of the new entry sees that it was begun.
            fence(Release);
            reached("publish: begun");
            for (word, value) in self.entry_words(number, at).into_iter().zip(key.0) {
                word.store(value, Relaxed);
            }
            reached("publish: written");
            self.published(number).store(at + 1, Release);
        }
        reached("publish: published");
        self.wake_subscribers();
    }

    /// Ends the subscriptions of a dead member.
    pub(super) fn unsubscribe_dead(&self, dead: MemberId) {
        let left = self.member_word(dead.number, SUBSCRIBERS).swap(0, AcqRel);
        self.subscribers_left(left);
    }
}

#[cfg(test)]
use super::tests::crash::reached;

/// A point where tests end the process.
#[cfg(not(test))]
fn reached(_: &str) {}

impl Index {
    /// Appends to `out` keys of blocks that have come or gone since the last call, `max` at most.
    pub fn poll(&self, changes: &mut Changes, max: usize, out: &mut Vec<Key>) -> Polled {
        let before = changes.locked.len();
        changes.locked.retain(|(stripe, owner)| self.stripe_owner(*stripe) == *owner);
        // What the owner has changed may be in no ring.
        changes.is_lost |= changes.locked.len() < before;
        let mut room = max;
        let mut is_all = true;
        for number in (changes.first..MAX_MEMBERS).chain(0..changes.first) {
            match self.read_ring(number, changes.read[number], room, out) {
                Some((read, is_end)) => {
                    room -= usize::try_from(read - changes.read[number]).unwrap_or(room);
                    changes.read[number] = read;
                    is_all &= is_end;
                }
                None => {
                    changes.read[number] = self.published(number).load(Acquire);
                    changes.is_lost = true;
                }
            }
        }
        changes.first = (changes.first + 1) % MAX_MEMBERS;
        match (std::mem::take(&mut changes.is_lost), is_all) {
            (true, _) => Polled::Lost,
            (false, true) => Polled::All,
            (false, false) => Polled::More,
        }
    }

    /// Waits until [`Index::poll`] has something to say. False if `timeout` passed first, or if `is_over` says so: it is
    /// asked after each [`Index::wake_subscribers`].
    pub fn wait_changed(
        &self,
        changes: &Changes,
        timeout: Duration,
        is_over: impl Fn() -> bool,
    ) -> bool {
        let until = Instant::now().checked_add(timeout);
        loop {
            let armed = self.bell().fetch_or(ARMED, SeqCst) | ARMED;
            fence(SeqCst);
            if self.has_changed(changes) {
                return true;
            }
            let left = until.map_or(timeout, |it| it.saturating_duration_since(Instant::now()));
            if left.is_zero() || is_over() {
                return false;
            }
            // The process that cleared `ARMED` may have been stopped or killed before its call that wakes.
            self.shared.wait_while(layout::BELL, armed, left.min(SLEEP_MAX));
        }
    }

    /// Wakes all subscribers that wait. They look again, and wait again if nothing has changed.
    pub fn wake_subscribers(&self) {
        // Either this thread sees that a subscriber waits, or the subscriber sees what this thread did before.
        fence(SeqCst);
        let bell = self.bell();
        let rung = bell.load(Relaxed);
        if rung & ARMED != 0
            && bell.compare_exchange(rung, rung.wrapping_add(1), AcqRel, Relaxed).is_ok()
        {
            self.shared.wake_all(layout::BELL);
        }
    }

    /// The keys of all blocks. Each block that is there from the call until the end of the iteration is in it.
    pub fn snapshot(&self) -> impl Iterator<Item = Key> + '_ {
        (0..self.high_water()).filter_map(|slot| self.slot(slot).settled()).map(|it| it.key)
    }

    fn has_changed(&self, changes: &Changes) -> bool {
        changes.is_lost
            || changes.locked.iter().any(|(stripe, owner)| self.stripe_owner(*stripe) != *owner)
            || (0..MAX_MEMBERS)
                .any(|number| self.published(number).load(Acquire) != changes.read[number])
    }

    /// Reads a ring from an entry on. Returns up to which one, and whether that is all; `None` if entries were lost.
    fn read_ring(
        &self,
        number: usize,
        from: u64,
        max: usize,
        out: &mut Vec<Key>,
    ) -> Option<(u64, bool)> {
        let published = self.published(number).load(Acquire);
        if published == from {
            return Some((from, true));
        }
        let end = published.min(from.saturating_add(max as u64));
        let len = out.len();
        let read = |at| Key(self.entry_words(number, at).map(|word| word.load(Relaxed)));
        if published.wrapping_sub(from) <= RING_KEYS {
            out.extend((from..end).map(read));
        }
        fence(Acquire);
        if self.begun(number).load(Relaxed).wrapping_sub(from) > RING_KEYS {
            out.truncate(len);
            return None;
        }
        Some((end, end == published))
    }

    fn subscribers_left(&self, count: u64) {
        let left = |all: u64| Some(all.saturating_sub(count));
        let _ = self.subscribers().fetch_update(AcqRel, Relaxed, left);
    }

    fn subscribers(&self) -> &AtomicU64 {
        self.shared.word(layout::SUBSCRIBERS)
    }

    fn bell(&self) -> &AtomicU32 {
        &self.shared.words32::<1>(layout::BELL)[0]
    }

    fn begun(&self, number: usize) -> &AtomicU64 {
        self.member_word(number as u8, BEGUN)
    }

    fn published(&self, number: usize) -> &AtomicU64 {
        self.member_word(number as u8, PUBLISHED)
    }

    fn entry_words(&self, number: usize, at: u64) -> [&AtomicU64; 2] {
        let offset = number * CHANGES_LEN + (at % RING_KEYS) as usize * KEY_LEN;
        [0, 8].map(|word| self.shared.word(self.layout.changes + offset + word))
    }
}
