//! The segments of the disk: their states, the members that own them, and their live blocks.

use super::layout::{MemberId, SEGMENT_LEN};
use super::member::Member;
use super::{Index, layout};
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

// A segment's words, of 64 bits.
const STATE: usize = 0;
const INCARNATION: usize = 8;
/// Pages in the low half, blocks in the high half.
const LIVE: usize = 16;
/// Flags of the segment's way to the disk: [`LOST`], [`OPEN`], [`UNVERIFIED`] and [`COPIES`].
const DURABLE: usize = 24;

/// Bytes of a page of the disk.
const PAGE: u32 = 4096;

/// A sync of the segment failed.
const LOST: u64 = 1;
/// The process that wrote the segment has ended and has not sealed it.
const OPEN: u64 = 2;
/// So it was when the store was opened: blocks that the index has there may be torn.
const UNVERIFIED: u64 = 4;
/// Blocks were copied to the segment, and may not be on the disk in it. They may be on the disk in older segments alone.
const COPIES: u64 = 8;

/// State of a segment, which says how it may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SegmentState {
    /// No block lives in the segment.
    Free,
    /// The member appends blocks to it.
    Active(MemberId),
    /// The segment takes no more blocks.
    Sealed,
    /// The segment can't be used: its device has no space for it, or fails. No block lives in it.
    Withheld,
    /// The member moves the segment's live blocks elsewhere.
    Collecting(MemberId),
}

/// A segment, as it was when it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// State, which says which member may change the segment.
    pub state: SegmentState,
    /// Distinguishes what was written since it was last claimed from what was written before.
    pub incarnation: u64,
    /// Pages of data of the blocks in it, without what the log adds.
    pub live_pages: u32,
    /// Blocks in it.
    pub live_blocks: u32,
}

const KIND: u64 = 0b11;
/// `Sealed` with this is `Withheld`.
const WITHHELD: u64 = 1 << 2;

impl SegmentState {
    fn to_word(self) -> u64 {
        match self {
            Self::Free => 0,
            Self::Active(member) => 1 | member.to_word() << 2,
            Self::Sealed => 2,
            Self::Withheld => 2 | WITHHELD,
            Self::Collecting(member) => 3 | member.to_word() << 2,
        }
    }

    fn from_word(word: u64) -> Self {
        let member = MemberId::from_word(word >> 2);
        match word & KIND {
            0 => Self::Free,
            1 => Self::Active(member),
            2 if word & WITHHELD != 0 => Self::Withheld,
            2 => Self::Sealed,
            _ => Self::Collecting(member),
        }
    }

    /// The member that alone may change the segment.
    pub fn owner(self) -> Option<MemberId> {
        match self {
            Self::Active(member) | Self::Collecting(member) => Some(member),
            Self::Free | Self::Sealed | Self::Withheld => None,
        }
    }
}

impl Member {
    /// Takes the lowest free segment, with a new incarnation. `None`: none is free.
    pub fn claim(&self) -> Option<u32> {
        loop {
            let segment = self.layout.taken_segments.take(&self.shared)?;
            // It fails if a repair found the segment free between this and another member's taking.
            if self.set_segment(segment, SegmentState::Free, SegmentState::Active(self.id())) {
                let incarnation = self.shared.word(layout::NEXT_INCARNATION).fetch_add(1, Relaxed);
                self.segment_word(segment, LIVE).store(0, Relaxed);
                self.segment_word(segment, DURABLE).store(0, Relaxed);
                self.segment_word(segment, INCARNATION).store(incarnation, Release);
                return Some(segment);
            }
        }
    }
}

impl Index {
    /// The segment of this number.
    ///
    /// # Panics
    /// If the index has no such segment. This holds for all methods that take one.
    pub fn segment(&self, segment: u32) -> Segment {
        let word = |at| self.segment_word(segment, at).load(Acquire);
        let live = word(LIVE);
        Segment {
            state: SegmentState::from_word(word(STATE)),
            incarnation: word(INCARNATION),
            live_pages: live as u32,
            live_blocks: (live >> 32) as u32,
        }
    }

    /// Changes a segment's state from `from` to `to`, if it is `from`. Of several members that try,
    /// one succeeds.
    pub fn set_segment(&self, segment: u32, from: SegmentState, to: SegmentState) -> bool {
        let state = self.segment_word(segment, STATE);
        let done = state.compare_exchange(from.to_word(), to.to_word(), AcqRel, Relaxed).is_ok();
        if done && to == SegmentState::Free {
            self.layout.taken_segments.give(&self.shared, segment);
            // After it is free: a thread that read the count before, and found no segment, does not sleep.
            self.shared.words32::<1>(layout::FREED)[0].fetch_add(1, Release);
            self.wake_waiting();
        }
        done
    }

    /// Counts segments that became free. A thread reads it before it looks for a free segment, for
    /// [`Index::wait_freed`].
    pub fn freed(&self) -> u32 {
        self.shared.words32::<1>(layout::FREED)[0].load(Acquire)
    }

    /// Waits until a segment has become free since [`Index::freed`] was `since`. False if `timeout` passed first, or if
    /// `is_over` says so: it is asked after each [`Index::wake_waiting`].
    pub fn wait_freed(&self, since: u32, timeout: Duration, is_over: impl Fn() -> bool) -> bool {
        let until = Instant::now().checked_add(timeout);
        loop {
            // First: what is rung for after this ends the wait.
            let rung = self.freed_bell().load(Acquire);
            if self.freed() != since {
                return true;
            }
            let left = until.map_or(timeout, |it| it.saturating_duration_since(Instant::now()));
            if left.is_zero() || is_over() {
                return false;
            }
            self.shared.wait_while(layout::FREED_BELL, rung, left);
        }
    }

    /// Wakes all threads that wait for a free segment. They look again, and wait again if there is none.
    pub fn wake_waiting(&self) {
        self.freed_bell().fetch_add(1, Release);
        self.shared.wake_all(layout::FREED_BELL);
    }

    fn freed_bell(&self) -> &AtomicU32 {
        &self.shared.words32::<1>(layout::FREED_BELL)[0]
    }

    /// Notes that a put found no free segment.
    pub fn note_no_space(&self) {
        self.shared.words32::<1>(layout::NO_SPACE)[0].fetch_add(1, Relaxed);
    }

    /// Counts the calls of [`Index::note_no_space`] of all members.
    pub fn no_space(&self) -> u32 {
        self.shared.words32::<1>(layout::NO_SPACE)[0].load(Relaxed)
    }

    /// Notes that the keeper could free no segment though too few are free.
    pub fn note_vain_look(&self) {
        self.shared.words32::<1>(layout::VAIN_LOOKS)[0].fetch_add(1, Release);
    }

    /// Counts the calls of [`Index::note_vain_look`].
    pub fn vain_looks(&self) -> u32 {
        self.shared.words32::<1>(layout::VAIN_LOOKS)[0].load(Acquire)
    }

    /// The incarnation that the next segment gets which is claimed.
    pub fn next_incarnation(&self) -> u64 {
        self.shared.word(layout::NEXT_INCARNATION).load(Relaxed)
    }

    /// Notes what a segment contains already, when the index is filled from the disk: a free segment
    /// becomes sealed. Later incarnations are higher. For the process that made the index, before
    /// others open it.
    pub fn restore_segment(&self, segment: u32, incarnation: u64) -> bool {
        let restored = self.set_segment(segment, SegmentState::Free, SegmentState::Sealed);
        if restored {
            let next = incarnation.saturating_add(1);
            self.shared.word(layout::NEXT_INCARNATION).fetch_max(next, Relaxed);
            self.segment_word(segment, INCARNATION).store(incarnation, Release);
            self.layout.taken_segments.put(&self.shared, segment);
        }
        restored
    }

    /// Withholds a free segment, when the index is filled from the disk: as [`Index::restore_segment`].
    pub fn withhold_segment(&self, segment: u32) {
        if self.set_segment(segment, SegmentState::Free, SegmentState::Withheld) {
            self.layout.taken_segments.put(&self.shared, segment);
        }
    }

    /// Notes that a sync of a segment failed: a later one may succeed although blocks are lost.
    pub fn note_unsynced(&self, segment: u32) {
        self.segment_word(segment, DURABLE).fetch_or(LOST, AcqRel);
    }

    /// Notes whether the process that wrote a segment has ended without sealing it. Such a segment is `Sealed`, as it
    /// takes no more blocks, but its blocks may not be on the disk.
    pub fn note_open(&self, segment: u32, is_open: bool) {
        let word = self.segment_word(segment, DURABLE);
        match is_open {
            true => word.fetch_or(OPEN, AcqRel),
            false => word.fetch_and(!(OPEN | UNVERIFIED | COPIES), AcqRel),
        };
    }

    /// Notes that a segment was not sealed when the index was filled from the disk: no process may be left that knows
    /// which of its blocks were written whole, and which were copied to it. As [`Index::note_open`], which ends it.
    pub fn note_unverified(&self, segment: u32) {
        self.segment_word(segment, DURABLE).fetch_or(OPEN | UNVERIFIED | COPIES, AcqRel);
    }

    /// Notes whether blocks were copied to a segment since it was last synced. The index remembers it for the next
    /// keeper, which frees no segment that may be the only place of these blocks on the disk.
    pub fn note_copies(&self, segment: u32, has_copies: bool) {
        let word = self.segment_word(segment, DURABLE);
        match has_copies {
            true => word.fetch_or(COPIES, AcqRel),
            false => word.fetch_and(!COPIES, AcqRel),
        };
    }

    /// Whether a segment has blocks that were copied to it and may not be on the disk in it.
    pub fn has_copies(&self, segment: u32) -> bool {
        let known = self.segment_word(segment, DURABLE).load(Acquire);
        let is_written = matches!(self.segment(segment).state, SegmentState::Active(_));
        known & COPIES != 0 && (is_written || known & (LOST | OPEN) != 0)
    }

    /// Whether [`Index::note_unverified`] was called for a segment.
    pub fn is_unverified(&self, segment: u32) -> bool {
        self.segment_word(segment, DURABLE).load(Acquire) & UNVERIFIED != 0
    }

    /// Whether [`Index::note_open`] was called for a segment.
    pub fn is_open(&self, segment: u32) -> bool {
        self.segment_word(segment, DURABLE).load(Acquire) & OPEN != 0
    }

    /// Whether blocks of a segment may not be on the disk yet. In a sealed segment they are.
    pub fn needs_sync(&self, segment: u32) -> bool {
        let state = self.segment(segment).state;
        matches!(state, SegmentState::Active(_)) || self.is_open(segment)
    }

    /// Whether [`Index::note_unsynced`] was called for a segment, in this use of it.
    pub fn is_unsynced(&self, segment: u32) -> bool {
        self.segment_word(segment, DURABLE).load(Acquire) & LOST != 0
    }

    /// A segment for which [`Index::note_unsynced`] was called, and which still has blocks.
    pub fn unsynced(&self) -> Option<u32> {
        let is_unsynced = |(number, segment): &(u32, Segment)| {
            segment.live_blocks > 0 && self.is_unsynced(*number)
        };
        self.segments().find(is_unsynced).map(|(number, _)| number)
    }

    /// The segments that a member owns, alive or not.
    pub fn held_by(&self, member: MemberId) -> impl Iterator<Item = (u32, Segment)> + '_ {
        self.segments().filter(move |(_, segment)| segment.state.owner() == Some(member))
    }

    /// Leaves what a process leaves that dies after it has added the blocks of a segment, and before it counts them.
    #[cfg(test)]
    pub(crate) fn forget_live(&self, segment: u32) {
        self.live_in(segment).store(0, Release);
    }

    /// Iterates over all segments.
    pub fn segments(&self) -> impl Iterator<Item = (u32, Segment)> + '_ {
        (0..self.layout.geometry.segments).map(|number| (number, self.segment(number)))
    }

    /// Counts a block that comes into the segment of `page`.
    pub(super) fn credit(&self, page: u32, len: u32) {
        if let Some(live) = self.live_word(page) {
            live.fetch_add(weight(len), Relaxed);
        }
    }

    /// Counts a block that leaves the segment of `page`.
    pub(super) fn debit(&self, page: u32, len: u32) {
        let Some(live) = self.live_word(page) else { return };
        let weight = weight(len);
        // After a death, a counter may be lower than what is taken away.
        let _ = live.fetch_update(Relaxed, Relaxed, |live| {
            let pages = (live as u32).saturating_sub(weight as u32);
            let blocks = ((live >> 32) as u32).saturating_sub(1);
            Some(u64::from(blocks) << 32 | u64::from(pages))
        });
    }

    /// The number of the segment of `page`, if there is one.
    pub(super) fn segment_of(&self, page: u32) -> Option<u32> {
        let geometry = self.layout.geometry;
        let segment = page / geometry.pages_per_segment;
        (segment < geometry.segments).then_some(segment)
    }

    /// Pages in the low half, blocks in the high half.
    pub(super) fn live_in(&self, segment: u32) -> &AtomicU64 {
        self.segment_word(segment, LIVE)
    }

    fn live_word(&self, page: u32) -> Option<&AtomicU64> {
        self.segment_of(page).map(|segment| self.live_in(segment))
    }

    fn segment_word(&self, segment: u32, at: usize) -> &AtomicU64 {
        assert!(segment < self.layout.geometry.segments, "the index has no segment {segment}");
        self.shared.word(self.layout.segments + segment as usize * SEGMENT_LEN + at)
    }
}

/// Amount that a block of `len` bytes adds to a segment's counters: a block, and its pages.
pub(super) fn weight(len: u32) -> u64 {
    1 << 32 | u64::from(len.div_ceil(PAGE))
}
