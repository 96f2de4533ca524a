//! The regions of an agent.

use crate::error::{Error, ErrorKind, Result};
use crate::memory::gate::Stuck;
use crate::memory::region::{Access, Backing, Quarantine, Region, RegionInner};
use crate::memory::user::{Copier, Keys, MemoryUser};
use crate::reactor::now;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, thread};
use kvferry_proto::{Incarnation, RegionId, Timestamp, WireCode};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::OnceLock;
use std::time::Duration;

/// The interval at which a thread that waits for a region's copiers checks them.
const LOOK_EVERY: Duration = Duration::from_micros(50);

/// Bytes of a region's name, at most.
const NAME_MAX: usize = 256;

/// The regions of an agent, by id and by address.
#[derive(Debug, Default)]
pub(crate) struct RegionTable(RwLock<Tables>);

#[derive(Debug, Default)]
pub(crate) struct Tables {
    by_id: FxHashMap<u32, Arc<RegionInner>>,
    /// Regions that peers may read or write, in the order of their ids.
    reachable: BTreeMap<RegionId, Arc<RegionInner>>,
    by_name: FxHashMap<String, RegionId>,
    /// Regions with addresses of this process: host memory, and a device's that shares the address space.
    by_addr: BTreeMap<usize, Arc<RegionInner>>,
    /// The number of regions in `by_addr` that are a device's.
    devices: usize,
    next_id: u32,
    /// The users of the memory, which transports add.
    users: Vec<Arc<dyn MemoryUser>>,
    /// Unregistered regions that a copier may still write to.
    quarantined: Vec<Arc<RegionInner>>,
    /// Unregistered regions whose copiers the unregistering thread still waits for.
    leaving: FxHashSet<RegionId>,
}

impl Tables {
    /// Resolves a wire descriptor for an access by a peer; the error is the code to refuse with.
    pub(crate) fn resolve(
        &self,
        id: RegionId,
        offset: u64,
        len: u32,
        need: Access,
    ) -> Result<(&Arc<RegionInner>, u64), WireCode> {
        let len = u64::from(len);
        let (region, offset) = if id == RegionId::ABSOLUTE {
            let end = offset.checked_add(len).ok_or(WireCode::Overflow)?;
            let at = usize::try_from(offset).map_err(|_| WireCode::Overflow)?;
            let (base, region) =
                self.by_addr.range(..=at).next_back().ok_or(WireCode::UnknownRegion)?;
            let region_end = *base as u64 + region.len as u64;
            if offset >= region_end {
                return Err(WireCode::UnknownRegion);
            }
            if end > region_end {
                return Err(WireCode::Straddles);
            }
            (region, offset - *base as u64)
        } else {
            let region = self.by_id.get(&id.0).ok_or(WireCode::UnknownRegion)?;
            let end = offset.checked_add(len).ok_or(WireCode::Overflow)?;
            if end > region.len as u64 {
                return Err(WireCode::OutOfBounds);
            }
            (region, offset)
        };
        if !region.access.allows(need) {
            return Err(WireCode::AccessDenied);
        }
        Ok((region, offset))
    }

    /// True if device memory is named by address.
    pub(crate) fn has_device_addresses(&self) -> bool {
        self.devices > 0
    }

    /// The region with the byte at an address.
    pub(crate) fn at(&self, addr: u64) -> Option<&Arc<RegionInner>> {
        let addr = usize::try_from(addr).ok()?;
        let (base, region) = self.by_addr.range(..=addr).next_back()?;
        (addr - base < region.len).then_some(region)
    }

    fn overlapping(&self, base: usize, end: usize) -> Option<&Arc<RegionInner>> {
        self.by_addr
            .range(..end)
            .next_back()
            .map(|(_, region)| region)
            .filter(|region| region.base + region.len > base)
    }

    /// Ends the quarantine of regions whose copiers have left.
    fn lift(&mut self) {
        self.quarantined.retain(|region| region.is_quarantined());
    }

    fn next_id(&mut self) -> Result<RegionId> {
        let id = self.next_id.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::TooLarge, "this agent has registered 2^32 regions; start another")
        })?;
        self.next_id = id;
        Ok(RegionId(id))
    }

    fn insert(
        &mut self,
        incarnation: Incarnation,
        base: usize,
        len: usize,
        access: Access,
        backing: Backing,
    ) -> Result<Region> {
        if len == 0 {
            return Err(Error::invalid("the region has no bytes"));
        }
        let has_addresses = base != 0 || !matches!(backing, Backing::Device(_));
        if has_addresses {
            if base == 0 {
                return Err(Error::invalid("the region starts at null"));
            }
            let refused = |kind, what: &str| {
                Error::new(kind, what).with("addr", format_args!("{base:#x}")).with("len", len)
            };
            let end = base.checked_add(len).ok_or_else(|| {
                let what = "the region wraps around the end of the address space";
                refused(ErrorKind::InvalidArgument, what)
            })?;
            self.lift();
            let mut in_quarantine = self.quarantined.iter().filter(|region| region.has_addresses());
            let touches = |r: &&Arc<RegionInner>| r.base < end && base < r.base + r.len;
            if let Some(other) = in_quarantine.find(touches) {
                let what = "an unresponsive process or device may still write to the range";
                return Err(refused(ErrorKind::Quarantined, what).with("region", other.id));
            }
            if let Some(other) = self.overlapping(base, end) {
                let what = "the range overlaps a registered region; unregister that one first";
                return Err(refused(ErrorKind::Overlap, what)
                    .with("region", other.id)
                    .with("region_addr", format_args!("{:#x}", other.base))
                    .with("region_len", other.len));
            }
        }
        let id = self.next_id()?;
        let region = Arc::new(RegionInner {
            id,
            incarnation,
            base,
            len,
            access,
            keys: Keys::default(),
            backing,
            name: OnceLock::new(),
            alive: AtomicBool::new(true),
            copies: AtomicUsize::new(0),
            quarantine: Mutex::default(),
        });
        self.by_id.insert(id.0, Arc::clone(&region));
        if access.read || access.write {
            self.reachable.insert(id, Arc::clone(&region));
        }
        if has_addresses {
            self.devices += usize::from(region.is_device());
            self.by_addr.insert(base, Arc::clone(&region));
        }
        Ok(Region(region))
    }

    /// Tells the memory users of an inserted region. Copiers may find it from now on.
    fn publish(&self, region: &Region) {
        self.users.iter().for_each(|user| user.registered(&region.0));
    }

    fn forget(&mut self, region: &RegionInner) {
        self.by_id.remove(&region.id.0);
        self.reachable.remove(&region.id);
        if region.has_addresses() {
            self.devices -= usize::from(region.is_device());
            self.by_addr.remove(&region.base);
        }
    }

    /// Removes the region and marks it dead. Copiers may still be inside their gates.
    fn remove(&mut self, region: &RegionInner) -> Result<()> {
        let ours =
            self.by_id.get(&region.id.0).is_some_and(|r| std::ptr::eq(&raw const **r, region));
        if !ours {
            return Err(Error::new(ErrorKind::NotRegistered, "the region is not registered")
                .with("region", region.id)
                .with("addr", format_args!("{:#x}", region.base)));
        }
        *region.quarantine() = Quarantine::Leaving;
        region.alive.store(false, Ordering::SeqCst);
        self.users.iter().for_each(|user| user.unregistered(region));
        self.forget(region);
        if let Some(name) = region.name.get() {
            self.by_name.remove(name);
        }
        self.leaving.insert(region.id);
        Ok(())
    }
}

impl RegionTable {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.0.write()
    }

    /// The id of a new region that is kept elsewhere.
    pub(crate) fn next_id(&self) -> Result<RegionId> {
        self.write().next_id()
    }

    pub(crate) fn insert(
        &self,
        incarnation: Incarnation,
        base: usize,
        len: usize,
        access: Access,
        backing: Backing,
    ) -> Result<Region> {
        let mut tables = self.write();
        let region = tables.insert(incarnation, base, len, access, backing)?;
        tables.publish(&region);
        Ok(region)
    }

    /// Registers all ranges or none.
    pub(crate) fn insert_all(
        &self,
        incarnation: Incarnation,
        ranges: &[(*mut u8, usize)],
        access: Access,
    ) -> Result<Vec<Region>> {
        let mut tables = self.write();
        let mut done: Vec<Region> = Vec::with_capacity(ranges.len());
        for (i, &(addr, len)) in ranges.iter().enumerate() {
            match tables.insert(incarnation, addr as usize, len, access, Backing::Borrowed) {
                Ok(region) => done.push(region),
                Err(e) => {
                    // Nothing has found the regions: they are not published, and the table is locked.
                    done.iter().for_each(|region| tables.forget(&region.0));
                    return Err(e.with("range", i));
                }
            }
        }
        done.iter().for_each(|region| tables.publish(region));
        Ok(done)
    }

    pub(crate) fn remove(&self, region: &Region) -> Result<()> {
        self.write().remove(&region.0)
    }

    // ---- unregistering ----

    /// The copiers of these removed regions have stopped, or are in quarantine.
    pub(crate) fn left<'a>(&self, regions: impl IntoIterator<Item = &'a Region>) {
        let mut tables = self.write();
        for region in regions {
            tables.leaving.remove(&region.id());
            let mut quarantine = region.0.quarantine();
            if matches!(*quarantine, Quarantine::Leaving) {
                *quarantine = Quarantine::Never;
            }
        }
    }

    /// Waits until no other thread is unregistering the region.
    pub(crate) fn wait_until_left(&self, region: &Region) {
        while self.read().leaving.contains(&region.id()) {
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until no thread unregisters any region besides `ours`. Returns one such region if
    /// `until` passes first.
    pub(crate) fn wait_for_others(&self, ours: &[Region], until: Timestamp) -> Option<RegionId> {
        let ours: FxHashSet<_> = ours.iter().map(Region::id).collect();
        loop {
            let left = self.read().leaving.difference(&ours).next().copied();
            if left.is_none() || now() >= until {
                return left;
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    /// Waits until no device copies to or from these unregistered regions, and transports have released what
    /// they keep for them. Returns the first one that is still used when `until` passes; it has no effect on the
    /// others.
    pub(crate) fn wait_for_release<'a>(
        regions: impl IntoIterator<Item = &'a Region>,
        until: Timestamp,
    ) -> Option<RegionId> {
        let mut used = None;
        for region in regions {
            loop {
                // The time before the look: each region is looked at once after it has passed.
                let is_late = now() >= until;
                if region.0.is_released() {
                    break;
                }
                if is_late {
                    used = used.or(Some(region.id()));
                    break;
                }
                thread::sleep(LOOK_EVERY);
            }
        }
        used
    }

    pub(crate) fn starting_at(&self, addr: usize) -> Option<Region> {
        self.read().by_addr.get(&addr).map(|r| Region(Arc::clone(r)))
    }

    pub(crate) fn holding(&self, addr: usize, len: u64) -> Option<Region> {
        let tables = self.read();
        let (start, found) = tables.by_addr.range(..=addr).next_back()?;
        let region = Region(Arc::clone(found));
        let left = (region.len() as u64).checked_sub((addr - start) as u64)?;
        (len <= left).then_some(region)
    }

    pub(crate) fn all(&self) -> Vec<Region> {
        let mut all: Vec<_> = self.read().by_id.values().map(|r| Region(Arc::clone(r))).collect();
        all.sort_by_key(Region::id);
        all
    }

    /// The first `count` regions that peers may read or write and whose ids are greater than `after`, by their ids.
    pub(crate) fn reachable_after(&self, after: RegionId, count: usize) -> Vec<Region> {
        let tables = self.read();
        let later = tables.reachable.range((Bound::Excluded(after), Bound::Unbounded));
        later.take(count).map(|(_, region)| Region(Arc::clone(region))).collect()
    }

    pub(crate) fn count(&self) -> usize {
        self.read().by_id.len()
    }

    pub(crate) fn set_name(&self, region: &Region, name: &str) -> Result<()> {
        if name.is_empty() || name.len() > NAME_MAX {
            let what = format!("a region's name must have 1 to {NAME_MAX} bytes");
            return Err(Error::invalid(what).with("len", name.len()));
        }
        let mut tables = self.write();
        let ours = tables.by_id.get(&region.id().0).is_some_and(|r| Arc::ptr_eq(r, &region.0));
        if !ours {
            return Err(Error::new(ErrorKind::NotRegistered, "the region is not registered")
                .with("region", region.id()));
        }
        if let Some(other) = tables.by_name.get(name) {
            return Err(Error::new(ErrorKind::Overlap, "another region has this name")
                .with("name", name)
                .with("region", other));
        }
        if region.0.name.set(name.to_owned()).is_err() {
            return Err(Error::invalid("the region has a name already")
                .with("region", region.id())
                .with("name", name));
        }
        tables.by_name.insert(name.to_owned(), region.id());
        Ok(())
    }

    pub(crate) fn by_name(&self, name: &str) -> Option<Region> {
        let tables = self.read();
        let id = tables.by_name.get(name)?;
        tables.by_id.get(&id.0).map(|r| Region(Arc::clone(r)))
    }

    pub(crate) fn by_id(&self, id: RegionId) -> Option<Region> {
        self.read().by_id.get(&id.0).map(|r| Region(Arc::clone(r)))
    }

    // ---- users of the memory; see `user` ----

    /// Adds a user of the memory. Called before there are any regions.
    pub(crate) fn add_user(&self, user: Arc<dyn MemoryUser>) {
        self.write().users.push(user);
    }

    /// The copiers of memory users that may touch one of these regions now (`None`: any region). Every later
    /// one finds removed regions unregistered.
    pub(crate) fn copiers(&self, regions: Option<&[RegionId]>) -> Vec<Arc<dyn Copier>> {
        self.read().users.iter().flat_map(|user| user.copiers(regions)).collect()
    }

    /// Whether memory that the agent allocates is to be of a kind that other processes can map.
    pub(crate) fn maps_memory(&self) -> bool {
        self.read().users.iter().any(|user| user.maps_memory())
    }

    /// Tells the memory users that the agent was shut down.
    pub(crate) fn close(&self) {
        self.read().users.iter().for_each(|user| user.closed());
    }

    /// Quarantines the ranges of unregistered regions until the copiers have left.
    pub(crate) fn quarantine<'a>(
        &self,
        regions: impl IntoIterator<Item = &'a Region>,
        occupied: &[Arc<dyn Copier>],
        stuck: &[Stuck],
    ) {
        let mut tables = self.write();
        for region in regions {
            *region.0.quarantine() = Quarantine::Inside(occupied.to_vec(), stuck.to_vec());
            tables.quarantined.push(Arc::clone(&region.0));
        }
    }

    /// True if the quarantine of an unregistered region has ended.
    pub(crate) fn was_lifted(region: &Region) -> bool {
        matches!(*region.0.quarantine(), Quarantine::Lifted)
    }

    /// Number of regions in quarantine.
    pub(crate) fn quarantined(&self) -> usize {
        if self.read().quarantined.is_empty() {
            return 0;
        }
        let mut tables = self.write();
        tables.lift();
        tables.quarantined.len()
    }
}
#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::user::tests::Clinging;
    use kvferry_sys::pins::Pins;

    const INCARNATION: Incarnation = Incarnation(7);

    fn host(table: &RegionTable, base: usize, len: usize) -> Result<Region> {
        table.insert(INCARNATION, base, len, Access::READ_WRITE, Backing::Borrowed)
    }

    #[test]
    fn overlapping_empty_null_and_wrapping_ranges_are_refused() {
        let table = RegionTable::default();
        host(&table, 0x1000, 0x1000).expect("free");
        for (base, len, kind) in [
            (0x1000, 0x1000, ErrorKind::Overlap),
            (0x1400, 8, ErrorKind::Overlap),
            (1, 0x8000, ErrorKind::Overlap),
            (0x3000, 0, ErrorKind::InvalidArgument),
            (0, 8, ErrorKind::InvalidArgument),
            (usize::MAX, 2, ErrorKind::InvalidArgument),
        ] {
            let e = host(&table, base, len).expect_err("refused");
            assert_eq!(e.kind(), kind, "{base:#x}+{len:#x}");
        }
    }

    #[test]
    fn a_page_of_regions_has_those_that_peers_may_access_in_the_order_of_their_ids() {
        let table = RegionTable::default();
        let kinds = [Access::READ, Access::NONE, Access::WRITE, Access::READ_WRITE, Access::READ];
        let insert = |(i, access): (usize, &Access)| {
            table.insert(INCARNATION, 0x1000 * (9 - i), 16, *access, Backing::Borrowed)
        };
        let regions: Vec<_> =
            kinds.iter().enumerate().map(insert).collect::<Result<_>>().expect("free");
        let page = |after: u32, count| -> Vec<u32> {
            let page = table.reachable_after(RegionId(after), count);
            page.iter().map(|region| region.id().0).collect()
        };
        assert_eq!(page(0, 9), [1, 3, 4, 5]);
        assert_eq!((page(1, 2), page(5, 9)), (vec![3, 4], vec![]));
        table.remove(&regions[2]).expect("registered");
        let ranges = [(0x9_0000 as *mut u8, 16), (0x9000 as *mut u8, 16)];
        table.insert_all(INCARNATION, &ranges, Access::READ).expect_err("the second overlaps");
        assert_eq!((page(0, 9), page(u32::MAX, 9)), (vec![1, 4, 5], vec![]));
    }

    #[test]
    fn the_wait_for_release_looks_at_each_region_though_one_is_still_copied() {
        let table = RegionTable::default();
        let [copied, quiet] = [0x1000, 0x2000].map(|base| host(&table, base, 16).expect("free"));
        let pins = |region: &Region| region.0.keys.get(Pins::new).is_closed();
        assert!(!pins(&copied) && !pins(&quiet));
        copied.0.copies.fetch_add(1, Ordering::SeqCst);
        let still = RegionTable::wait_for_release([&copied, &quiet], now());
        assert_eq!(still, Some(copied.id()));
        assert!(!pins(&copied) && pins(&quiet));
        copied.0.copies.fetch_sub(1, Ordering::SeqCst);
        assert_eq!(RegionTable::wait_for_release([&copied, &quiet], now()), None);
        assert!(pins(&copied));
    }

    #[test]
    fn i2_a_region_is_in_quarantine_until_every_transport_has_released_it() {
        let memory = crate::memory::Memory::default();
        let region = host(&memory.regions, 0x1000, 16).expect("free");
        let key = region.0.keys.get(Clinging::default);
        memory.regions.remove(&region).expect("registered");
        let unquiet = memory.quiesce([&region], false, now());
        assert_eq!(unquiet.copied, Some(region.id()));
        assert_eq!(key.revoked.load(Ordering::SeqCst), 1);
        memory.regions.quarantine([&region], &unquiet.occupied, &unquiet.stuck);
        assert!(region.is_quarantined() && !RegionTable::was_lifted(&region));
        let e = host(&memory.regions, 0x1008, 16).expect_err("its range is not used again");
        assert_eq!(e.kind(), ErrorKind::Quarantined);
        key.let_go.store(true, Ordering::SeqCst);
        assert!(RegionTable::was_lifted(&region) && !region.is_quarantined());
        host(&memory.regions, 0x1008, 16).expect("free");
    }

    #[test]
    fn i2_a_region_is_in_quarantine_while_another_thread_unregisters_it() {
        let memory = crate::memory::Memory::default();
        let region = host(&memory.regions, 0x1000, 16).expect("free");
        memory.regions.remove(&region).expect("registered");
        assert!(region.is_quarantined(), "copiers may still be inside");
        assert_eq!(memory.regions.quarantined(), 0, "the other thread waits for them");
        memory.regions.left([&region]);
        assert!(!region.is_quarantined() && !RegionTable::was_lifted(&region));
    }

    #[test]
    fn i2_a_key_that_is_attached_while_its_region_is_unregistered_is_revoked() {
        let table = RegionTable::default();
        let region = host(&table, 0x1000, 16).expect("free");
        // A copier holds the region.
        region.0.copies.fetch_add(1, Ordering::SeqCst);
        table.remove(&region).expect("registered");
        region.0.keys.revoke();
        let key = region.0.keys.get(Clinging::default);
        let revoked = || key.revoked.load(Ordering::SeqCst);
        let wait = || RegionTable::wait_for_release([&region], now());
        assert_eq!((wait(), revoked()), (Some(region.id()), 0), "the copier may use it");
        region.0.copies.fetch_sub(1, Ordering::SeqCst);
        assert_eq!((wait(), revoked()), (Some(region.id()), 1));
        key.let_go.store(true, Ordering::SeqCst);
        assert_eq!((wait(), revoked()), (None, 1));
    }

    #[test]
    fn i2_users_of_memory_are_told_of_no_region_of_a_batch_that_is_refused() {
        let table = RegionTable::default();
        let user = Arc::new(Counting::default());
        table.add_user(Arc::clone(&user) as _);
        host(&table, 0x9000, 0x10).expect("free");
        let ranges = [(0x1000 as *mut u8, 16), (0x9008 as *mut u8, 16)];
        table.insert_all(INCARNATION, &ranges, Access::READ).expect_err("the second overlaps");
        assert_eq!(user.0.load(Ordering::SeqCst), 1, "the region before");
        table.insert_all(INCARNATION, &ranges[..1], Access::READ).expect("free");
        assert_eq!(user.0.load(Ordering::SeqCst), 2);
    }

    /// Counts calls of `registered`.
    #[derive(Debug, Default)]
    struct Counting(AtomicUsize);

    impl MemoryUser for Counting {
        fn registered(&self, _region: &RegionInner) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }

        fn unregistered(&self, _region: &RegionInner) {}

        fn copiers(&self, _regions: Option<&[RegionId]>) -> Vec<Arc<dyn Copier>> {
            Vec::new()
        }

        fn maps_memory(&self) -> bool {
            false
        }

        fn closed(&self) {}
    }

    #[test]
    fn a_batch_registers_all_or_nothing() {
        let table = RegionTable::default();
        host(&table, 0x9000, 0x10).expect("free");
        let ranges = [(0x1000 as *mut u8, 16), (0x2000 as *mut u8, 16), (0x9008 as *mut u8, 16)];
        let e =
            table.insert_all(INCARNATION, &ranges, Access::READ).expect_err("the third overlaps");
        assert_eq!((e.kind(), e.context("range")), (ErrorKind::Overlap, Some("2")));
        assert_eq!(table.count(), 1);
        table
            .insert_all(INCARNATION, &ranges[..2], Access::READ)
            .expect("the failed call left nothing registered");
    }
}
