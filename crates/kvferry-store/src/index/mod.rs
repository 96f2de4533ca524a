//! The index of blocks, in memory that up to 64 processes share.
//!
//! It maps a [`Key`](crate::Key) to the place of a block on disk. An [`Index`] is a mapping of the memory and
//! reads it; a [`Member`] is a process that also changes it. One member, the keeper, drains the
//! events of all members, removes what the policy gives up, and repairs what dead members left.
//!
//! # Readers
//! [`Index::find`] takes no lock and never waits. A bucket's chain of slots ends with a marker that
//! names the bucket: a reader that followed a reused slot into another chain notices it at the end
//! and begins again. Each slot has a version, which changes before and after its words do. After 4096
//! slots a reader gives up and answers "not there", which costs a miss.
//!
//! # Writers
//! A writer locks the stripe that the bucket belongs to. Chains change by single stores that keep
//! them whole, so a lock is taken over from a dead member without repair. A lock whose owner is
//! stopped is given up after [`PATIENCE`]: [`Inserted::Contended`].
//!
//! # What a dead member leaves
//! A slot that it held: its state names the member, and [`Member::sweep`] frees it. Segments: see
//! [`Index::held_by`]. Counters that are off by what it was changing: see [`Member::recount`].
//!
//! # Memory
//! | part | bytes | holds |
//! |---|---|---|
//! | header | 4 KiB | geometry, counters, which member is the keeper |
//! | members | 64 × 320 | state, alive mark, ends of the rings |
//! | stripes | 4096 × 64 | the member that changes chains of the stripe, and the key that it changes |
//! | rings | 64 × 1 MiB | events for the keeper |
//! | changes | 64 × 1 MiB | keys of blocks that came and went, for every subscriber: [`Changes`] |
//! | pins | 4096 × 8 | leases: a slot, and until when |
//! | segments | 32 each | state and owner, incarnation, live pages and blocks |
//! | directories | 8 for a segment | which device each directory is on |
//! | bitmaps | ⅛ for a slot or segment | which slots and segments are taken |
//! | buckets | 13/16 × 4 for a slot | the first slot of a chain |
//! | slots | 52 each | a block: see [`Entry`] |
//!
//! Zeroes are an empty index, so pages are taken from the system as blocks come. The lowest free
//! slot is taken first. The keeper copies pages that blocks have filled into huge ones
//! ([`Index::collapse`]).

mod bitmap;
mod chain;
mod changes;
mod events;
mod huge;
mod layout;
mod member;
mod pins;
mod repair;
mod segment;
mod slot;
mod stripe;
#[cfg(test)]
mod tests;
mod write;

pub use changes::{Changes, Polled};
pub use events::{Drained, Event};
pub use layout::{
    Geometry, MAX_MEMBERS, MAX_PINS, MAX_SEGMENTS, MAX_SLOTS, MemberId, RING_KEYS, RING_LEN,
};
pub use member::Member;
pub use pins::PinId;
pub use segment::{Segment, SegmentState};
pub use slot::{Entry, New, SlotId};
pub use stripe::PATIENCE;
pub use write::Inserted;

use kvferry_sys::shared::Shared;
use layout::{Layout, PAGE};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed};

/// A mapping of the index. Reading needs no more than this; for changes, see [`Index::join`].
#[derive(Debug)]
pub struct Index {
    shared: Arc<Shared>,
    layout: Layout,
    /// Huge pages that [`Index::collapse`] is done with.
    collapsed: AtomicUsize,
}

impl Index {
    /// Makes an empty index.
    ///
    /// # Errors
    /// `InvalidInput` if the geometry is out of range, else the kernel's error.
    pub fn create(geometry: Geometry) -> io::Result<Self> {
        let layout = Layout::new(geometry)?;
        let shared = Arc::new(Shared::create("kvferry-index", layout.len)?);
        shared.advise_huge_pages();
        layout.initialise(&shared);
        Ok(Self { shared, layout, collapsed: AtomicUsize::new(0) })
    }

    /// Maps an index that another process made. `memory` is a descriptor of its [`Index::memory`].
    ///
    /// # Errors
    /// `InvalidData` if the memory is not an index of this version, else the kernel's error.
    pub fn open(memory: OwnedFd) -> io::Result<Self> {
        let header = Shared::open(memory, PAGE, true)?;
        let layout = Layout::read(&header)?;
        let memory = header.as_fd().try_clone_to_owned()?;
        let shared = Arc::new(Shared::open(memory, layout.len, true)?);
        shared.advise_huge_pages();
        Ok(Self { shared, layout, collapsed: AtomicUsize::new(0) })
    }

    /// The memory, whose descriptor other processes need for [`Index::open`].
    pub fn memory(&self) -> &Shared {
        &self.shared
    }

    /// The sizes that the index was made with.
    pub fn geometry(&self) -> Geometry {
        self.layout.geometry
    }

    /// Sets what all members have as their clock; opaque. For the process that made the index, before others open
    /// it.
    pub fn set_clock(&self, clock: u64) {
        self.shared.word(layout::CLOCK).store(clock, Relaxed);
    }

    /// Value that [`Index::set_clock`] has set; 0 by default.
    pub fn clock(&self) -> u64 {
        self.shared.word(layout::CLOCK).load(Relaxed)
    }

    /// The id of the directory with this number, as all members see it: the first one that any of them found; 0 while all
    /// have found 0, which is no id. `id` is what this process has found.
    pub fn agree_on_directory(&self, number: usize, id: u64) -> u64 {
        if number >= self.layout.geometry.segments as usize {
            return id;
        }
        let word = self.shared.word(self.layout.directories + number * size_of::<u64>());
        word.compare_exchange(0, id, AcqRel, Acquire).err().unwrap_or(id)
    }

    /// Blocks in the index. After the death of a member, right again after [`Member::recount`].
    pub fn live(&self) -> u64 {
        self.shared.word(layout::LIVE).load(Relaxed)
    }

    /// Slots from this one on were never used.
    fn high_water(&self) -> u32 {
        let high = self.shared.word(layout::HIGH_WATER).load(Relaxed);
        u32::try_from(high).unwrap_or(u32::MAX).min(self.layout.geometry.slots)
    }
}
