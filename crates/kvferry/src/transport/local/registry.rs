//! The table of an agent's regions, for writers in other processes of this host.
//!
//! The owner keeps the table in shared memory that writers map read-only. The first word of an
//! entry holds the region's id, which is never used again, and its flags; it is zero while the
//! entry is free. So one comparison of that word tells whether a region that was looked up before
//! is still registered. The writer makes that comparison inside its gate (see
//! [`writers`](super::writers)): the owner clears the word, then waits for the gates.
//!
//! Looking a region up may take longer: every writer keeps an index of the table, and a ring of
//! entry numbers beside the table tells it which entries have changed since.

use crate::memory::region::{Access, RegionInner};
use crate::sync::atomic::{Ordering, fence};
use crate::sync::{Arc, RwLock, RwLockReadGuard};
use crate::transfer::fallback::Fallback;
use kvferry_proto::{RegionId, WireCode};
use kvferry_sys::alive::{self, AliveMark};
use kvferry_sys::shared::Shared;
use rustc_hash::FxHashMap;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

/// "kvfregi" and the version of the table.
const MAGIC: u64 = u64::from_le_bytes(*b"kvfregi\x01");

// The head of the table, in bytes.
const AT_MAGIC: usize = 0;
/// Nonzero once the agent was shut down.
const AT_CLOSED: usize = 8;
/// Offset of the number of changes to entries.
const AT_CHANGES: usize = 16;
/// Offset of the number of entries that have ever been used.
const AT_HIGH: usize = 24;
/// Nonzero if there were more regions than entries, so that some regions are not in the table.
const AT_PARTIAL: usize = 32;
/// The alive mark of the owner's control thread.
const AT_ALIVE: usize = 64;
/// The numbers of the entries that changed last.
const AT_RING: usize = 2048;
const RING: u64 = 256;
const AT_ENTRIES: usize = 4096;

const ENTRY: usize = 32;
/// Regions of one agent that the table can hold; further ones are reached by other transports. The
/// table is sparse: only entries that were used occupy memory.
const ENTRIES: u32 = 1 << 20;
const LEN: usize = AT_ENTRIES + ENTRY * ENTRIES as usize;

const ALIVE: u64 = 1;
const READ: u64 = 2;
const WRITE: u64 = 4;
/// Device memory: other processes can't copy to its addresses.
const DEVICE: u64 = 8;
/// The memory can be shared by descriptor.
const SHARED: u64 = 16;

const fn at(slot: u32) -> usize {
    AT_ENTRIES + ENTRY * slot as usize
}

/// The owner's side. Changes are made under the lock of the agent's region table.
#[derive(Debug)]
pub(crate) struct Registry {
    shared: Arc<Shared>,
    slots: FxHashMap<u32, u32>,
    free: BinaryHeap<Reverse<u32>>,
    high: u32,
    changes: u64,
}

impl Registry {
    pub(crate) fn create() -> io::Result<Self> {
        let shared = Shared::create("kvferry-registry", LEN)?;
        shared.word(AT_MAGIC).store(MAGIC, Ordering::SeqCst);
        shared.seal_against_writes()?;
        Ok(Self {
            shared: Arc::new(shared),
            slots: FxHashMap::default(),
            free: BinaryHeap::new(),
            high: 0,
            changes: 0,
        })
    }

    /// A read-only descriptor of the table, for writers.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        std::os::fd::AsFd::as_fd(&self.shared)
    }

    /// Lets writers detect the end of this thread, by [`RegistryView::has_ended`]. Made once, and
    /// dropped by the same thread.
    pub(crate) fn mark_alive(&self) -> io::Result<AliveMark> {
        AliveMark::new(Arc::clone(&self.shared), AT_ALIVE)
    }

    pub(crate) fn publish(&mut self, region: &RegionInner) {
        let slot = match self.free.pop() {
            Some(Reverse(slot)) => slot,
            None if self.high < ENTRIES => {
                self.high += 1;
                self.shared.word(AT_HIGH).store(self.high.into(), Ordering::SeqCst);
                self.high - 1
            }
            None => {
                self.shared.word(AT_PARTIAL).store(1, Ordering::SeqCst);
                return;
            }
        };
        let mut word = u64::from(region.id.0) << 32 | ALIVE;
        for (flag, is_set) in [
            (READ, region.access.read),
            (WRITE, region.access.write),
            (DEVICE, region.is_device()),
            (SHARED, region.shared().is_some()),
        ] {
            word |= if is_set { flag } else { 0 };
        }
        let at = at(slot);
        // Stored after the word was cleared and before it is set again: a reader that loads one of
        // these values but not the word they belong to sees the word change.
        fence(Ordering::SeqCst);
        self.shared.word(at + 8).store(region.base as u64, Ordering::Relaxed);
        self.shared.word(at + 16).store(region.len as u64, Ordering::Relaxed);
        self.shared.word(at).store(word, Ordering::SeqCst);
        self.slots.insert(region.id.0, slot);
        self.changed(slot);
    }

    /// Removes a region. Writers may still be inside their gates.
    pub(crate) fn retract(&mut self, id: RegionId) {
        let Some(slot) = self.slots.remove(&id.0) else { return };
        self.shared.word(at(slot)).store(0, Ordering::SeqCst);
        self.changed(slot);
        self.free.push(Reverse(slot));
    }

    fn changed(&mut self, slot: u32) {
        let place = usize::try_from(self.changes % RING).expect("less than RING");
        self.shared.word(AT_RING + 8 * place).store(slot.into(), Ordering::SeqCst);
        self.changes += 1;
        self.shared.word(AT_CHANGES).store(self.changes, Ordering::SeqCst);
    }

    pub(crate) fn close(&self) {
        self.shared.word(AT_CLOSED).store(1, Ordering::SeqCst);
    }
}

/// A region of another process, as a lookup found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seen {
    slot: u32,
    word: u64,
    pub(crate) base: u64,
    pub(crate) len: u64,
}

impl Seen {
    pub(crate) fn id(&self) -> RegionId {
        RegionId(u32::try_from(self.word >> 32).expect("the upper half of the word"))
    }

    fn has(&self, flag: u64) -> bool {
        self.word & flag != 0
    }

    /// Whether peers may write to the region, and map its memory writable.
    pub(crate) fn is_writable(&self) -> bool {
        self.has(WRITE)
    }

    /// Whether the region's memory can be mapped by this process.
    pub(crate) fn is_shared(&self) -> bool {
        self.has(SHARED)
    }
}

/// The reason why a range can't be copied to or from directly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missed {
    /// The owner would refuse the range with this code.
    Refused(WireCode),
    /// Another transport may reach it.
    Elsewhere(Fallback),
}

impl From<WireCode> for Missed {
    fn from(code: WireCode) -> Self {
        Self::Refused(code)
    }
}

/// The writer's side: the table of another process, and an index of it.
#[derive(Debug)]
pub(crate) struct RegistryView {
    shared: Shared,
    index: RwLock<Index>,
}

#[derive(Debug, Default)]
pub(crate) struct Index {
    changes: u64,
    /// The region found in each entry.
    slots: Vec<Option<Seen>>,
    by_id: FxHashMap<u32, Seen>,
    /// Start addresses of regions that have addresses of the owner's process.
    by_addr: BTreeMap<u64, Seen>,
}

impl RegistryView {
    /// Maps the table of another process.
    pub(crate) fn open(fd: OwnedFd) -> io::Result<Self> {
        let shared = Shared::open(fd, LEN, false)?;
        if shared.load(AT_MAGIC) != MAGIC {
            let what = "not a table of regions, or a table of another version";
            return Err(io::Error::new(io::ErrorKind::InvalidData, what));
        }
        Ok(Self { shared, index: RwLock::default() })
    }

    /// Whether the owner's agent was shut down.
    pub(crate) fn is_closed(&self) -> bool {
        self.shared.load(AT_CLOSED) != 0
    }

    /// Whether the owner's process has exited or runs another program. One load.
    pub(crate) fn has_ended(&self) -> bool {
        alive::has_ended(&self.shared, AT_ALIVE)
    }

    /// Whether a region that was looked up is still registered. Called inside the writer's gate.
    pub(crate) fn is_current(&self, seen: &Seen) -> bool {
        self.shared.load(at(seen.slot)) == seen.word
    }

    /// Locks the index, for several lookups.
    pub(crate) fn index(&self) -> RwLockReadGuard<'_, Index> {
        self.index.read()
    }

    /// Brings the index up to date.
    pub(crate) fn catch_up(&self) {
        let mut index = self.index.write();
        let now = self.shared.load(AT_CHANGES);
        if now == index.changes {
            return;
        }
        if now.wrapping_sub(index.changes) < RING {
            for change in index.changes..now {
                let place = usize::try_from(change % RING).expect("less than RING");
                let slot = self.shared.load(AT_RING + 8 * place);
                if let Ok(slot) = u32::try_from(slot)
                    && slot < ENTRIES
                {
                    self.look(&mut index, slot);
                }
            }
        }
        // Otherwise, or if the ring wrapped around while it was read, all entries are read. The
        // owner writes a change into the ring before it counts it: with `RING` changes unseen, the
        // oldest of them may be overwritten.
        if self.shared.load(AT_CHANGES).wrapping_sub(index.changes) >= RING {
            let high = self.shared.load(AT_HIGH).min(ENTRIES.into());
            for slot in 0..u32::try_from(high).expect("at most the entries") {
                self.look(&mut index, slot);
            }
        }
        index.changes = now;
    }

    fn look(&self, index: &mut Index, slot: u32) {
        let at = at(slot);
        let word = self.shared.load(at);
        let (base, len) = (self.shared.load(at + 8), self.shared.load(at + 16));
        // If an entry changes while it is read, its change is not counted yet, and the next refresh
        // reads the entry again.
        let is_alive = word & ALIVE != 0 && self.shared.load(at) == word;
        let seen = is_alive.then_some(Seen { slot, word, base, len });
        index.put(slot, seen);
    }

    /// Whether the owner has more regions than entries, so that a region which was not found may
    /// exist.
    fn is_partial(&self) -> bool {
        self.shared.load(AT_PARTIAL) != 0
    }
}

impl Index {
    fn put(&mut self, slot: u32, seen: Option<Seen>) {
        let place = slot as usize;
        if self.slots.len() <= place {
            self.slots.resize(place + 1, None);
        }
        if let Some(old) = std::mem::replace(&mut self.slots[place], seen) {
            self.by_id.remove(&old.id().0);
            // By now, another region may have this address.
            if self.by_addr.get(&old.base) == Some(&old) {
                self.by_addr.remove(&old.base);
            }
        }
        if let Some(seen) = seen {
            self.by_id.insert(seen.id().0, seen);
            if seen.base != 0 {
                self.by_addr.insert(seen.base, seen);
            }
        }
    }

    pub(crate) fn known(&self, id: RegionId) -> Option<&Seen> {
        self.by_id.get(&id.0)
    }

    /// The region of a range and the offset in it, by the owner's rules for resolving.
    pub(crate) fn resolve(
        &self,
        view: &RegistryView,
        id: RegionId,
        offset: u64,
        len: u64,
        need: Access,
    ) -> Result<(Seen, u64), Missed> {
        let unknown = || match view.is_partial() {
            true => Missed::Elsewhere(Fallback::Unlisted),
            false => WireCode::UnknownRegion.into(),
        };
        if len == 0 {
            return Err(WireCode::ZeroLength.into());
        }
        let end = offset.checked_add(len).ok_or(WireCode::Overflow)?;
        let (seen, offset) = if id == RegionId::ABSOLUTE {
            let (_, seen) = self.by_addr.range(..=offset).next_back().ok_or_else(unknown)?;
            let region_end = seen.base.saturating_add(seen.len);
            if offset >= region_end || !view.is_current(seen) {
                return Err(unknown());
            }
            if end > region_end {
                return Err(WireCode::Straddles.into());
            }
            (*seen, offset - seen.base)
        } else {
            let seen = self.known(id).filter(|seen| view.is_current(seen));
            let seen = seen.ok_or_else(unknown)?;
            if end > seen.len {
                return Err(WireCode::OutOfBounds.into());
            }
            (*seen, offset)
        };
        if (need.read && !seen.has(READ)) || (need.write && !seen.has(WRITE)) {
            return Err(WireCode::AccessDenied.into());
        }
        match seen.has(DEVICE) {
            true => Err(Missed::Elsewhere(Fallback::PeerDevice)),
            false => Ok((seen, offset)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::own::OwnMemory;
    use super::*;
    use crate::memory::device::{Device, DeviceCopy, DeviceMemory};
    use crate::memory::region::{Backing, Region};
    use crate::memory::stages::StagePool;
    use crate::memory::table::RegionTable;
    use kvferry_proto::Incarnation;
    use proptest::prelude::*;
    use std::os::fd::AsFd;

    /// A device that is never asked to copy.
    struct NoDevice;

    impl Device for NoDevice {
        fn stages(&self) -> Arc<StagePool> {
            StagePool::new(4096, 1).expect("memory")
        }

        fn pieces_max(&self) -> usize {
            1
        }

        fn copy_out(&self, _: DeviceCopy) {}

        fn copy_in(&self, _: DeviceCopy) {}
    }

    fn table() -> (RegionTable, RegistryView) {
        let registry = Registry::create().expect("memory");
        let fd = registry.fd().try_clone_to_owned().expect("a descriptor");
        let table = RegionTable::default();
        table.add_user(OwnMemory::new(registry));
        (table, RegistryView::open(fd).expect("ours"))
    }

    fn add(table: &RegionTable, base: usize, len: usize) -> Region {
        table
            .insert(Incarnation(1), base, len, Access::READ_WRITE, Backing::Borrowed)
            .expect("no overlap")
    }

    fn resolve(
        view: &RegistryView,
        id: RegionId,
        offset: u64,
        len: u64,
    ) -> Result<(RegionId, u64), Missed> {
        view.catch_up();
        let found = view.index().resolve(view, id, offset, len, Access::WRITE);
        found.map(|(seen, offset)| (seen.id(), offset))
    }

    #[test]
    fn another_process_can_read_the_table_but_not_write_it() {
        let registry = Registry::create().expect("memory");
        let fd = registry.fd().as_fd().try_clone_to_owned().expect("a descriptor");
        assert!(Shared::open(fd, LEN, true).is_err());
    }

    #[test]
    fn a_lookup_refuses_the_ranges_that_the_owner_would_refuse() {
        let (table, view) = table();
        let a = add(&table, 0x1000, 0x1000);
        add(&table, 0x2000, 0x1000);
        let misfit = |code| Err(Missed::Refused(code));
        let absolute = RegionId::ABSOLUTE;
        assert_eq!(resolve(&view, absolute, 0x1004, 8), Ok((a.id(), 4)));
        assert_eq!(resolve(&view, a.id(), 4, 8), Ok((a.id(), 4)));
        assert_eq!(resolve(&view, absolute, 0x1ffc, 8), misfit(WireCode::Straddles));
        assert_eq!(resolve(&view, absolute, 0x0ffc, 8), misfit(WireCode::UnknownRegion));
        assert_eq!(resolve(&view, absolute, u64::MAX - 3, 8), misfit(WireCode::Overflow));
        assert_eq!(resolve(&view, a.id(), 0xffc, 8), misfit(WireCode::OutOfBounds));
        assert_eq!(resolve(&view, a.id(), 0, 0), misfit(WireCode::ZeroLength));
        table.remove(&a).expect("registered");
        assert_eq!(resolve(&view, a.id(), 4, 8), misfit(WireCode::UnknownRegion));
        assert_eq!(resolve(&view, absolute, 0x1004, 8), misfit(WireCode::UnknownRegion));
    }

    #[test]
    fn a_lookup_says_why_another_transport_may_reach_what_this_one_does_not() {
        let (table, view) = table();
        let device = DeviceMemory::new(Arc::new(NoDevice), 0x1000, 0x1000);
        let backing = Backing::Device(device);
        let region = table.insert(Incarnation(1), 0, 0x1000, Access::READ_WRITE, backing);
        let region = region.expect("no overlap");
        let elsewhere = |why| Err(Missed::Elsewhere(why));
        assert_eq!(resolve(&view, region.id(), 4, 8), elsewhere(Fallback::PeerDevice));
        let refused = Err(Missed::Refused(WireCode::OutOfBounds));
        assert_eq!(resolve(&view, region.id(), 0xffc, 8), refused);
        table.remove(&region).expect("registered");

        let mut registry = Registry::create().expect("memory");
        let fd = registry.fd().try_clone_to_owned().expect("a descriptor");
        let view = RegistryView::open(fd).expect("ours");
        registry.high = ENTRIES;
        registry.publish(&add(&table, 0x1000, 0x1000).0);
        assert_eq!(resolve(&view, RegionId(7), 4, 8), elsewhere(Fallback::Unlisted));
    }

    #[test]
    fn an_unregistered_region_is_detected_without_the_index() {
        let (table, view) = table();
        let a = add(&table, 0x1000, 0x1000);
        view.catch_up();
        let index = view.index();
        let (seen, _) =
            index.resolve(&view, a.id(), 0, 8, Access::READ).expect("registered and readable");
        assert!(view.is_current(&seen));
        table.remove(&a).expect("registered");
        let b = add(&table, 0x1000, 0x1000);
        assert!(!view.is_current(&seen), "the entry is used again, by {}", b.id());
    }

    #[test]
    fn a_change_in_the_ring_that_is_not_yet_counted_hides_no_other_change() {
        let table = RegionTable::default();
        let (first, other) = (add(&table, 0x1000, 0x1000), add(&table, 0x2000, 0x1000));
        let mut registry = Registry::create().expect("memory");
        let fd = registry.fd().try_clone_to_owned().expect("a descriptor");
        let view = RegistryView::open(fd).expect("ours");
        registry.publish(&first.0);
        for _ in 0..(RING - 2) / 2 {
            registry.publish(&other.0);
            registry.retract(other.id());
        }
        registry.publish(&other.0);
        assert_eq!(registry.changes, RING);
        // The owner is stopped in the middle of the next change.
        let slot = registry.slots[&other.id().0];
        registry.shared.word(AT_RING).store(slot.into(), Ordering::SeqCst);
        assert_eq!(resolve(&view, first.id(), 0, 8), Ok((first.id(), 0)));
    }

    proptest! {
        #[test]
        fn the_index_is_what_the_table_is_after_any_number_of_changes(
            rounds in prop::collection::vec(prop::collection::vec((0usize..40, any::<bool>()), 0..400), 1..5),
        ) {
            let (table, view) = table();
            let mut live: FxHashMap<usize, Region> = FxHashMap::default();
            for round in rounds {
                for (place, on) in round {
                    match (on, live.contains_key(&place)) {
                        (true, false) => {
                            live.insert(place, add(&table, (place + 1) * 0x1000, 0x800));
                        }
                        (false, true) => {
                            table.remove(&live[&place]).expect("registered");
                            live.remove(&place);
                        }
                        _ => {}
                    }
                }
                for place in 0..40 {
                    let base = (place as u64 + 1) * 0x1000;
                    let found = resolve(&view, RegionId::ABSOLUTE, base + 8, 8);
                    match live.get(&place) {
                        Some(region) => {
                            prop_assert_eq!(found, Ok((region.id(), 8)));
                            prop_assert_eq!(resolve(&view, region.id(), 8, 8), Ok((region.id(), 8)));
                        }
                        None => prop_assert_eq!(
                            found,
                            Err(Missed::Refused(WireCode::UnknownRegion))
                        ),
                    }
                }
            }
        }
    }
}
