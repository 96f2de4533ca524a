//! A slot: what the index knows of one block.
//!
//! | words of 32 bits | use |
//! |---|---|
//! | version | state, the member that holds it, and a count that every change raises |
//! | next | the next slot of the chain, or the chain's end |
//! | key (4) | what is looked up |
//! | sum (2) | checksum of the data, which also covers the block's identity |
//! | page | where the data begins |
//! | len | bytes of the data |
//! | parent | 1 + the slot of the block before it in its prompt, or 0 |
//! | used at | when it was last used, in the caller's unit; readers store it |
//! | retention | the caller's |
//!
//! A slot is *free*; *held* by a member that fills or removes it; or *live*. Readers pass over a held
//! slot in a chain. All words but `next`, `page`, `parent` and `used at` change only while the slot is held.

use super::Index;
use super::layout::{MemberId, SLOT_LEN, SLOT_WORDS};
use crate::Key;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::fence;

/// The number of a slot, below the number of slots.
pub type SlotId = u32;

// What a reader of the chain needs comes first.
const VERSION: usize = 0;
const NEXT: usize = 1;
const KEY: usize = 2;
const SUM: usize = 6;
const PLACE: usize = 8;
const LEN: usize = 9;
const PARENT: usize = 10;
const USED_AT: usize = 11;
const RETENTION: usize = 12;

/// A block of the index, as it was when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Number of the block while it is in the index.
    pub slot: SlotId,
    /// Key of the block.
    pub key: Key,
    /// Checksum of its data, combined with its identity.
    pub sum: u64,
    /// The slot that the block before it in its prompt had when this one was inserted, or when a put last found it.
    pub parent: Option<SlotId>,
    /// The page where its data begins.
    pub page: u32,
    /// Bytes of its data.
    pub len: u32,
    /// Time of the last use, in the caller's unit.
    pub used_at: u32,
    /// Opaque; set by the caller.
    pub retention: u32,
    pub(super) version: Version,
}

/// Metadata of a block to insert, besides its key: see [`Entry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "documented at Entry")]
pub struct New {
    pub sum: u64,
    pub parent: Option<SlotId>,
    pub page: u32,
    pub len: u32,
    pub retention: u32,
    pub now: u32,
}

/// Two bits of state, six of the member that holds the slot, and a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Version(u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    /// Held by the member of this number.
    Held(u8),
    Live,
}

const STATE: u32 = 0b11;
const FREE: u32 = 0;
const HELD: u32 = 1;
const LIVE: u32 = 2;
const COUNT_ONE: u32 = 1 << 8;

impl Version {
    #[inline]
    pub(super) fn state(self) -> State {
        match self.0 & STATE {
            FREE => State::Free,
            HELD => State::Held((self.0 >> 2) as u8 & 63),
            _ => State::Live,
        }
    }

    fn held(self, member: MemberId) -> Self {
        Self(self.count() | u32::from(member.number) << 2 | HELD)
    }

    #[inline]
    fn next(self, state: u32) -> Self {
        Self(self.count().wrapping_add(COUNT_ONE) | state)
    }

    fn count(self) -> u32 {
        self.0 & !(COUNT_ONE - 1)
    }
}

/// Next element of a chain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Slot(SlotId),
    /// The end of the chain of this bucket.
    End(u32),
}

const END: u32 = 1 << 31;

impl Link {
    /// A `next`. Zero is in no slot that ever was in a chain.
    #[inline]
    pub(super) fn from_next(raw: u32) -> Option<Self> {
        match raw {
            0 => None,
            END.. => Some(Self::End(raw & !END)),
            slot => Some(Self::Slot(slot - 1)),
        }
    }

    /// The content of a bucket, where zero is an empty chain.
    #[inline]
    pub(super) fn from_bucket(raw: u32, bucket: u32) -> Self {
        Self::from_next(raw).unwrap_or(Self::End(bucket))
    }

    pub(super) fn to_raw(self) -> u32 {
        match self {
            Self::Slot(slot) => slot + 1,
            Self::End(bucket) => END | bucket,
        }
    }
}

/// A slot in the memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot<'a> {
    pub(super) id: SlotId,
    words: &'a [AtomicU32; SLOT_WORDS],
}

impl Index {
    /// The block in `slot`, if there is one.
    pub fn entry(&self, slot: SlotId) -> Option<Entry> {
        (slot < self.layout.geometry.slots).then(|| self.slot(slot).entry()).flatten()
    }

    /// Iterates over all blocks, by slot. Blocks that come or go meanwhile may be left out.
    pub fn iter(&self) -> impl Iterator<Item = Entry> + '_ {
        (0..self.high_water()).filter_map(|slot| self.entry(slot))
    }

    /// Sets when a block was last used, if it still is `entry`'s.
    pub fn touch(&self, entry: &Entry, now: u32) {
        self.slot(entry.slot).touch(entry, now);
    }

    #[inline]
    pub(super) fn slot(&self, id: SlotId) -> Slot<'_> {
        Slot { id, words: self.shared.words32(self.slot_offset(id)) }
    }

    #[inline]
    pub(super) fn prefetch_slot(&self, id: SlotId) {
        let at = self.slot_offset(id);
        self.shared.prefetch(at);
        self.shared.prefetch(at + SLOT_LEN - 1);
    }

    pub(super) fn slot_offset(&self, id: SlotId) -> usize {
        self.layout.slots + id as usize * SLOT_LEN
    }
}

impl Slot<'_> {
    #[inline]
    pub(super) fn version(&self) -> Version {
        Version(self.words[VERSION].load(Acquire))
    }

    /// The words, if the slot has this version before and after they are read.
    #[inline]
    pub(super) fn read(&self, version: Version) -> Option<Entry> {
        let word = |at: usize| self.words[at].load(Relaxed);
        let entry = Entry {
            slot: self.id,
            key: self.key(),
            sum: self.double(SUM),
            parent: word(PARENT).checked_sub(1),
            page: word(PLACE),
            len: word(LEN),
            used_at: word(USED_AT),
            retention: word(RETENTION),
            version,
        };
        fence(Acquire);
        (word(VERSION) == version.0).then_some(entry)
    }

    /// The block, if the slot is live.
    #[inline]
    pub(super) fn entry(&self) -> Option<Entry> {
        let version = self.version();
        // A slot whose version changes meanwhile is being removed, reused, or relocated: only then
        // it is worth a second look.
        let read = |version: Version| {
            (version.state() == State::Live).then(|| self.read(version)).flatten()
        };
        read(version).or_else(|| read(self.version()))
    }

    /// Like [`Slot::entry`], but tries again as often as the block is moved while it is read.
    pub(super) fn settled(&self) -> Option<Entry> {
        loop {
            let version = self.version();
            if version.state() != State::Live {
                return None;
            }
            if let Some(entry) = self.read(version) {
                return Some(entry);
            }
        }
    }

    /// Consistent only if the version did not change.
    #[inline]
    pub(super) fn key(&self) -> Key {
        Key([self.double(KEY), self.double(KEY + 2)])
    }

    #[inline]
    pub(super) fn next(&self) -> u32 {
        self.words[NEXT].load(Acquire)
    }

    pub(super) fn is(&self, entry: &Entry) -> bool {
        self.version() == entry.version && self.words[PLACE].load(Relaxed) == entry.page
    }

    pub(super) fn touch(&self, entry: &Entry, now: u32) {
        if self.version() == entry.version {
            self.words[USED_AT].store(now, Relaxed);
        }
    }

    #[inline]
    fn double(&self, at: usize) -> u64 {
        let [low, high] = [at, at + 1].map(|at| u64::from(self.words[at].load(Relaxed)));
        high << 32 | low
    }
}

/// Operations of writers. All but [`Slot::try_hold`] need the lock of the chain's stripe.
impl Slot<'_> {
    /// Holds the slot if it is free.
    pub(super) fn try_hold(&self, member: MemberId) -> bool {
        let version = self.version();
        let swap = || {
            let (from, to) = (version.0, version.held(member).0);
            self.words[VERSION].compare_exchange(from, to, AcqRel, Relaxed).is_ok()
        };
        version.state() == State::Free && swap()
    }

    /// Holds a live slot.
    pub(super) fn hold(&self, member: MemberId) {
        self.words[VERSION].store(self.version().held(member).0, Release);
    }

    /// Fills a held slot.
    pub(super) fn fill(&self, key: Key, new: &New, next: Link) {
        // A reader that sees one of the new words sees that the slot is held.
        fence(Release);
        let store = |at: usize, value: u32| self.words[at].store(value, Relaxed);
        for (at, value) in [(KEY, key.0[0]), (KEY + 2, key.0[1]), (SUM, new.sum)] {
            store(at, value as u32);
            store(at + 1, (value >> 32) as u32);
        }
        store(PLACE, new.page);
        store(LEN, new.len);
        self.set_parent(new.parent);
        store(USED_AT, new.now);
        store(RETENTION, new.retention);
        self.set_next(next);
    }

    pub(super) fn set_next(&self, link: Link) {
        self.words[NEXT].store(link.to_raw(), Release);
    }

    /// Readers find a place that holds the block, before and after the version changes.
    pub(super) fn relocate(&self, page: u32) {
        self.words[PLACE].store(page, Release);
        self.advance(LIVE);
    }

    /// Sets the block before this one. Readers find the earlier or the new one.
    pub(super) fn set_parent(&self, parent: Option<SlotId>) {
        self.words[PARENT].store(parent.map_or(0, |parent| parent + 1), Relaxed);
    }

    /// Ends holding.
    pub(super) fn make_live(&self) {
        self.advance(LIVE);
    }

    /// Ends holding. The slot is in no chain.
    pub(super) fn make_free(&self) {
        self.advance(FREE);
    }

    fn advance(&self, state: u32) {
        self.words[VERSION].store(self.version().next(state).0, Release);
    }
}
