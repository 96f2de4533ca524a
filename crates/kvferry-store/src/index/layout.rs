//! Lengths and offsets of the index's parts in the shared memory.

use super::bitmap::Bitmap;
use kvferry_sys::shared::Shared;
use std::io;
use std::sync::atomic::Ordering::{Relaxed, Release};

/// Slots of an index. A link needs one more value, and one bit for the ends of chains.
pub const MAX_SLOTS: u32 = (1 << 31) - 1;
/// Segments of an index.
pub const MAX_SEGMENTS: u32 = 1 << 20;

/// Parts begin at multiples of it.
pub(super) const PAGE: usize = 4096;

/// `kvfidx` and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"kvfidx\x00\x08");

// Words of the header. Those that writers change have a cache line of their own.
const AT_MAGIC: usize = 0;
const AT_SLOTS: usize = 8;
const AT_SEGMENTS: usize = 16;
const AT_SEGMENT_PAGES: usize = 24;
pub(super) const CLOCK: usize = 32;
pub(super) const LIVE: usize = 64;
pub(super) const HIGH_WATER: usize = 128;
pub(super) const NEXT_INCARNATION: usize = 192;
pub(super) const PINS_CHANGED: usize = 256;
/// Counts segments that became free; 32 bits.
pub(super) const FREED: usize = 320;
/// Word on which threads wait for freed segments; 32 bits. It is apart from the count, so that a thread can be
/// woken for another reason.
pub(super) const FREED_BELL: usize = 324;
/// Counts puts that found no free segment; 32 bits.
pub(super) const NO_SPACE: usize = 384;
/// Counts looks of the keeper that have freed no segment though too few are free; 32 bits.
pub(super) const VAIN_LOOKS: usize = 388;
/// Counts those that read the changes. Seldom written, and read by each writer.
pub(super) const SUBSCRIBERS: usize = 448;
/// Word that the subscribers wait on; 32 bits.
pub(super) const BELL: usize = 512;
/// The member that is the keeper; 0: none.
pub(super) const KEEPER: usize = 576;
/// Name at which the keeper listens: two words.
pub(super) const SECRET: [usize; 2] = [584, 592];

/// Members at one time.
pub const MAX_MEMBERS: usize = 64;
/// Bytes of a member: cache lines for the state and its subscriptions; the mark; the event ring's head and what did not
/// fit; its tail; how far the ring of changes is written.
pub(super) const MEMBER_LEN: usize = 320;
/// Locks. A bucket's is its number modulo this.
pub(super) const STRIPES: u32 = 4096;
/// Bytes of a lock: a cache line.
pub(super) const STRIPE_LEN: usize = 64;
/// Words of 32 bits of a member's event ring.
pub(super) const RING_WORDS: u64 = 1 << 18;
/// Bytes of the event ring of a member.
pub const RING_LEN: usize = RING_WORDS as usize * 4;
/// Keys of a member's ring of changes.
pub const RING_KEYS: u64 = 1 << 16;
pub(super) const KEY_LEN: usize = 16;
pub(super) const CHANGES_LEN: usize = RING_KEYS as usize * KEY_LEN;
/// Leases at one time.
pub const MAX_PINS: usize = 4096;
pub(super) const PINS_LEN: usize = MAX_PINS * size_of::<u64>();
pub(super) const SEGMENT_LEN: usize = 32;
/// Words of 32 bits of a slot.
pub(super) const SLOT_WORDS: usize = 13;
pub(super) const SLOT_LEN: usize = SLOT_WORDS * 4;

/// A member, distinct from all earlier ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MemberId {
    /// Below [`MAX_MEMBERS`].
    pub number: u8,
    /// Counts the members that had this number.
    pub generation: u32,
}

impl MemberId {
    /// Never 0.
    pub(super) fn to_word(self) -> u64 {
        u64::from(self.generation) << 8 | (u64::from(self.number) + 1)
    }

    pub(super) fn from_word(word: u64) -> Self {
        Self { number: (word as u8).wrapping_sub(1), generation: (word >> 8) as u32 }
    }
}

/// The sizes that an index is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Blocks at most, from 1 to [`MAX_SLOTS`].
    pub slots: u32,
    /// Number of segments, from 1 to [`MAX_SEGMENTS`].
    pub segments: u32,
    /// The segment of a page is its number divided by this. All pages have numbers of 32 bits.
    pub pages_per_segment: u32,
}

/// Offsets in bytes.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) geometry: Geometry,
    pub(super) bucket_count: u32,
    pub(super) members: usize,
    pub(super) stripes: usize,
    pub(super) rings: usize,
    pub(super) changes: usize,
    pub(super) pins: usize,
    pub(super) segments: usize,
    pub(super) directories: usize,
    pub(super) taken_segments: Bitmap,
    pub(super) taken_slots: Bitmap,
    pub(super) buckets: usize,
    pub(super) slots: usize,
    pub(super) len: usize,
}

impl Layout {
    pub(super) fn new(geometry: Geometry) -> io::Result<Self> {
        let Geometry { slots, segments, pages_per_segment } = geometry;
        let pages = u64::from(segments) * u64::from(pages_per_segment);
        if !(1..=MAX_SLOTS).contains(&slots)
            || !(1..=MAX_SEGMENTS).contains(&segments)
            || !(1..=1 << 32).contains(&pages)
        {
            let why = format!("an index can't have this geometry: {geometry:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        }
        // Fewer than slots: with the bitmap, and what the policy has of it, a block takes less than 64 bytes.
        let bucket_count = slots - slots / 16 * 3;
        let mut end = PAGE;
        let mut reserve = |len: usize| {
            let at = end;
            end = (at + len).next_multiple_of(PAGE);
            at
        };
        let members = reserve(MAX_MEMBERS * MEMBER_LEN);
        let stripes = reserve(STRIPES as usize * STRIPE_LEN);
        let rings = reserve(MAX_MEMBERS * RING_LEN);
        let changes = reserve(MAX_MEMBERS * CHANGES_LEN);
        let pins = reserve(PINS_LEN);
        let segment_table = reserve(segments as usize * SEGMENT_LEN);
        // A directory beyond them has no segment.
        let directories = reserve(segments as usize * size_of::<u64>());
        let taken_segments = Bitmap::new(segments, &mut reserve);
        let taken_slots = Bitmap::new(slots, &mut reserve);
        let buckets = reserve(bucket_count as usize * size_of::<u32>());
        let slot_table = reserve(slots as usize * SLOT_LEN);
        Ok(Self {
            geometry,
            bucket_count,
            members,
            stripes,
            rings,
            changes,
            pins,
            segments: segment_table,
            directories,
            taken_segments,
            taken_slots,
            buckets,
            slots: slot_table,
            len: end,
        })
    }

    /// Writes the header, the magic number last.
    pub(super) fn initialise(&self, shared: &Shared) {
        let Geometry { slots, segments, pages_per_segment } = self.geometry;
        self.taken_segments.initialise(shared);
        self.taken_slots.initialise(shared);
        shared.word(AT_SLOTS).store(slots.into(), Relaxed);
        shared.word(AT_SEGMENTS).store(segments.into(), Relaxed);
        shared.word(AT_SEGMENT_PAGES).store(pages_per_segment.into(), Relaxed);
        shared.word(NEXT_INCARNATION).store(1, Relaxed);
        shared.word(AT_MAGIC).store(MAGIC, Release);
    }

    /// The layout of an index whose first page is `header`.
    pub(super) fn read(header: &Shared) -> io::Result<Self> {
        let invalid = || io::Error::new(io::ErrorKind::InvalidData, "not an index of this version");
        let number = |at| u32::try_from(header.load(at)).map_err(|_| invalid());
        if header.load(AT_MAGIC) != MAGIC {
            return Err(invalid());
        }
        let slots = number(AT_SLOTS)?;
        let segments = number(AT_SEGMENTS)?;
        let pages_per_segment = number(AT_SEGMENT_PAGES)?;
        Self::new(Geometry { slots, segments, pages_per_segment }).map_err(|_| invalid())
    }
}
