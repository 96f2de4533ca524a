//! Registered memory.

use crate::error::{Error, ErrorKind, Result};
use crate::memory::device::DeviceMemory;
use crate::memory::registry::Registry;
use crate::memory::writers::Occupied;
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use kvferry_proto::pack;
use kvferry_proto::{Incarnation, RegionId, WireCode};
use kvferry_sys::map::Mapping;
use kvferry_sys::shared::Shared;
use kvferry_sys::span::HostSpan;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::os::fd::OwnedFd;

/// What peers may do with a region. The agent's own transfers need no permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Access {
    /// Peers may read.
    pub read: bool,
    /// Peers may write.
    pub write: bool,
}

impl Access {
    /// Only the agent itself.
    pub const NONE: Self = Self { read: false, write: false };
    /// Peers may read.
    pub const READ: Self = Self { read: true, write: false };
    /// Peers may write.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Peers may read and write.
    pub const READ_WRITE: Self = Self { read: true, write: true };

    fn allows(self, need: Self) -> bool {
        (self.read || !need.read) && (self.write || !need.write)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.read, self.write) {
            (false, false) => "none",
            (true, false) => "r",
            (false, true) => "w",
            (true, true) => "rw",
        })
    }
}

pub(crate) enum Backing {
    /// Host memory of somebody else, promised by `Agent::register`.
    Borrowed,
    /// Host memory of ours.
    Owned(Mapping),
    /// Host memory of ours that other processes of this host may map.
    Shared(Arc<Shared>),
    /// Memory that is copied through staging buffers.
    Device(Arc<dyn DeviceMemory>),
}

pub(crate) struct RegionInner {
    pub(crate) id: RegionId,
    pub(crate) incarnation: Incarnation,
    pub(crate) base: usize,
    pub(crate) len: usize,
    pub(crate) access: Access,
    pub(crate) backing: Backing,
    alive: AtomicBool,
    /// Device copies under way.
    pub(crate) copies: AtomicUsize,
    quarantine: Mutex<Quarantine>,
}

/// Whether a process that does not answer may still be writing.
#[derive(Debug, Default)]
enum Quarantine {
    #[default]
    Never,
    /// It was seen inside of these, and has not left them.
    Inside(Vec<Occupied>),
    Lifted,
}

impl RegionInner {
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.backing, Backing::Device(_))
    }

    fn quarantine(&self) -> MutexGuard<'_, Quarantine> {
        let mut quarantine = self.quarantine.lock().unwrap_or_else(PoisonError::into_inner);
        if let Quarantine::Inside(gates) = &mut *quarantine {
            gates.retain(|gate| !gate.is_left());
            if gates.is_empty() {
                *quarantine = Quarantine::Lifted;
            }
        }
        quarantine
    }

    fn is_quarantined(&self) -> bool {
        matches!(*self.quarantine(), Quarantine::Inside(_))
    }

    pub(crate) fn shared(&self) -> Option<&Arc<Shared>> {
        match &self.backing {
            Backing::Shared(shared) => Some(shared),
            _ => None,
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }

    /// A span of host memory.
    ///
    /// Callers hold a gate, have seen the region alive inside it, and have checked the range.
    pub(crate) fn span(&self, offset: u64, len: usize) -> HostSpan {
        let offset = usize::try_from(offset).expect("checked against a length of this process");
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "ranges are checked before they become spans"
        );
        debug_assert!(!matches!(self.backing, Backing::Device(_)), "host memory only");
        // SAFETY: the range is inside the region. A borrowed region is mapped until it is
        // unregistered (`Agent::register`'s contract), an owned one until its last handle is
        // gone; and `unregister` returns only after the gate our caller holds was left.
        unsafe { HostSpan::new((self.base as *mut u8).add(offset), len) }
    }
}

impl fmt::Debug for RegionInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.backing {
            Backing::Borrowed => "borrowed",
            Backing::Owned(_) => "owned",
            Backing::Shared(_) => "shared",
            Backing::Device(_) => "device",
        };
        write!(
            f,
            "Region[{} {kind} {:#x}+{:#x} {}{}]",
            self.id,
            self.base,
            self.len,
            self.access,
            if self.is_alive() { "" } else { " unregistered" }
        )
    }
}

/// Registered memory of this agent. A handle: clones are the same region, and dropping them does
/// not unregister it.
#[derive(Clone, Debug)]
pub struct Region(pub(crate) Arc<RegionInner>);

impl Region {
    /// The region's id, unique within this agent's life.
    pub fn id(&self) -> RegionId {
        self.0.id
    }

    /// Where the region starts in this process. Device memory has addresses of its own, which
    /// start at zero.
    pub fn addr(&self) -> usize {
        self.0.base
    }

    /// Bytes in the region.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Never: an empty region can't be registered.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// What peers may do with it.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// Whether it is still registered.
    pub fn is_registered(&self) -> bool {
        self.0.is_alive()
    }

    /// Whether it was unregistered while a process of this host that may still write to it did
    /// not answer. Its memory must not be used for anything else until this is false.
    pub fn is_quarantined(&self) -> bool {
        self.0.is_quarantined()
    }

    /// What a peer needs to name this region in its transfers.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            incarnation: self.0.incarnation,
            id: self.0.id,
            addr: self.0.base as u64,
            len: self.0.len as u64,
            access: self.0.access,
        }
    }

    fn owned(&self, offset: usize, len: usize) -> Result<HostSpan> {
        if offset.checked_add(len).is_none_or(|end| end > self.0.len) {
            return Err(self.out_of_bounds(offset as u64, len as u64));
        }
        match &self.0.backing {
            Backing::Owned(map) => Ok(map.span(offset, len)),
            Backing::Shared(shared) => Ok(shared.span(offset, len)),
            Backing::Borrowed | Backing::Device(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "only memory that kvferry allocated is accessed through its region",
            )),
        }
    }

    /// Copies `bytes` into memory that [`Agent::allocate`](crate::Agent::allocate) made.
    ///
    /// # Errors
    /// `OutOfBounds`; `Unsupported` if the memory is not kvferry's.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.owned(offset, bytes.len()).map(|span| span.copy_from(bytes))
    }

    /// Copies memory that [`Agent::allocate`](crate::Agent::allocate) made into `bytes`.
    ///
    /// A transfer may be writing it at the same time; the bytes are what was there when each was
    /// copied.
    ///
    /// # Errors
    /// `OutOfBounds`; `Unsupported` if the memory is not kvferry's.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.owned(offset, bytes.len()).map(|span| span.copy_to(bytes))
    }

    pub(crate) fn out_of_bounds(&self, offset: u64, len: u64) -> Error {
        Error::new(ErrorKind::OutOfBounds, "a range reaches beyond its region")
            .with("region", self.0.id)
            .with("offset", offset)
            .with("len", len)
            .with("region_len", self.0.len)
    }
}

/// A peer's region, as its owner described it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// The life of the peer that the region belongs to; later lives refuse it.
    pub incarnation: Incarnation,
    /// The region's id there.
    pub id: RegionId,
    /// Where it starts in the peer's process.
    pub addr: u64,
    /// Bytes in the region.
    pub len: u64,
    /// What we may do with it.
    pub access: Access,
}

impl RemoteRegion {
    /// The region as bytes, to be carried to a peer by any means.
    pub fn to_bytes(&self) -> Vec<u8> {
        pack::encode(self)
    }

    /// Reads what [`RemoteRegion::to_bytes`] wrote.
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are something else.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        pack::decode(bytes).map_err(|e| {
            Error::new(ErrorKind::InvalidArgument, "not a region's description").caused_by(e)
        })
    }
}

/// Why a peer's request does not fit our regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Misfit(pub(crate) WireCode);

/// The regions of an agent, by id and by address.
#[derive(Debug, Default)]
pub(crate) struct RegionTable(RwLock<Tables>);

#[derive(Debug, Default)]
pub(crate) struct Tables {
    by_id: FxHashMap<u32, Arc<RegionInner>>,
    /// Host regions only: device memory has no address in this process.
    by_addr: BTreeMap<usize, Arc<RegionInner>>,
    next_id: u32,
    /// What writers in other processes see of this.
    registry: Option<Registry>,
    /// Unregistered, and perhaps still written to.
    quarantined: Vec<Arc<RegionInner>>,
}

impl Tables {
    /// Resolves a wire descriptor for an access by a peer.
    pub(crate) fn resolve(
        &self,
        id: RegionId,
        offset: u64,
        len: u32,
        need: Access,
    ) -> Result<(&Arc<RegionInner>, u64), Misfit> {
        let len = u64::from(len);
        let (region, offset) = if id == RegionId::ABSOLUTE {
            let end = offset.checked_add(len).ok_or(Misfit(WireCode::Overflow))?;
            let at = usize::try_from(offset).map_err(|_| Misfit(WireCode::Overflow))?;
            let (base, region) =
                self.by_addr.range(..=at).next_back().ok_or(Misfit(WireCode::UnknownRegion))?;
            let region_end = *base as u64 + region.len as u64;
            if offset >= region_end {
                return Err(Misfit(WireCode::UnknownRegion));
            }
            if end > region_end {
                return Err(Misfit(WireCode::Straddles));
            }
            (region, offset - *base as u64)
        } else {
            let region = self.by_id.get(&id.0).ok_or(Misfit(WireCode::UnknownRegion))?;
            let end = offset.checked_add(len).ok_or(Misfit(WireCode::Overflow))?;
            if end > region.len as u64 {
                return Err(Misfit(WireCode::OutOfBounds));
            }
            (region, offset)
        };
        if !region.access.allows(need) {
            return Err(Misfit(WireCode::AccessDenied));
        }
        Ok((region, offset))
    }

    fn overlapping(&self, base: usize, end: usize) -> Option<&Arc<RegionInner>> {
        self.by_addr
            .range(..end)
            .next_back()
            .map(|(_, region)| region)
            .filter(|region| region.base + region.len > base)
    }

    /// Ends the quarantine of regions whose writers have been seen outside.
    fn lift(&mut self) {
        self.quarantined.retain(|region| region.is_quarantined());
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
            return Err(Error::new(ErrorKind::InvalidArgument, "a region needs bytes"));
        }
        let device = matches!(backing, Backing::Device(_));
        if !device {
            if base == 0 {
                return Err(Error::new(ErrorKind::InvalidArgument, "a region can't start at null"));
            }
            let end = base.checked_add(len).ok_or_else(|| {
                Error::new(ErrorKind::InvalidArgument, "a region can't wrap around memory")
                    .with("addr", format_args!("{base:#x}"))
                    .with("len", len)
            })?;
            self.lift();
            let touches = |r: &&Arc<RegionInner>| r.base < end && base < r.base + r.len;
            if let Some(other) = self.quarantined.iter().find(touches) {
                return Err(Error::new(
                    ErrorKind::Quarantined,
                    "a process that does not answer may still write to the range",
                )
                .with("addr", format_args!("{base:#x}"))
                .with("len", len)
                .with("region", other.id));
            }
            if let Some(other) = self.overlapping(base, end) {
                return Err(Error::new(
                    ErrorKind::Overlap,
                    "the range overlaps a registered region; unregister that one first",
                )
                .with("addr", format_args!("{base:#x}"))
                .with("len", len)
                .with("region", other.id)
                .with("region_addr", format_args!("{:#x}", other.base))
                .with("region_len", other.len));
            }
        }
        let id = self.next_id.checked_add(1).ok_or_else(|| {
            Error::new(ErrorKind::TooLarge, "this agent has registered 2^32 regions; start another")
        })?;
        self.next_id = id;
        let region = Arc::new(RegionInner {
            id: RegionId(id),
            incarnation,
            base,
            len,
            access,
            backing,
            alive: AtomicBool::new(true),
            copies: AtomicUsize::new(0),
            quarantine: Mutex::default(),
        });
        self.by_id.insert(id, Arc::clone(&region));
        if !device {
            self.by_addr.insert(base, Arc::clone(&region));
        }
        if let Some(registry) = &mut self.registry {
            registry.publish(&region);
        }
        Ok(Region(region))
    }

    /// Takes the region out and marks it dead. Copiers may still be inside.
    fn remove(&mut self, region: &RegionInner) -> Result<()> {
        let ours =
            self.by_id.get(&region.id.0).is_some_and(|r| std::ptr::eq(&raw const **r, region));
        if !ours {
            return Err(Error::new(ErrorKind::NotRegistered, "the region is not registered")
                .with("region", region.id)
                .with("addr", format_args!("{:#x}", region.base)));
        }
        region.alive.store(false, Ordering::SeqCst);
        if let Some(registry) = &mut self.registry {
            registry.retract(region.id);
        }
        self.by_id.remove(&region.id.0);
        if !region.is_device() {
            self.by_addr.remove(&region.base);
        }
        Ok(())
    }
}

impl RegionTable {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Tables> {
        self.0.read().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Tables> {
        self.0.write().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn insert(
        &self,
        incarnation: Incarnation,
        base: usize,
        len: usize,
        access: Access,
        backing: Backing,
    ) -> Result<Region> {
        self.write().insert(incarnation, base, len, access, backing)
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
                    for region in &done {
                        tables.remove(&region.0).expect("registered a moment ago, under the lock");
                    }
                    return Err(e.with("range", i));
                }
            }
        }
        Ok(done)
    }

    pub(crate) fn remove(&self, region: &Region) -> Result<()> {
        self.write().remove(&region.0)
    }

    pub(crate) fn starting_at(&self, addr: usize) -> Option<Region> {
        self.read().by_addr.get(&addr).map(|r| Region(Arc::clone(r)))
    }

    pub(crate) fn all(&self) -> Vec<Region> {
        let mut all: Vec<_> = self.read().by_id.values().map(|r| Region(Arc::clone(r))).collect();
        all.sort_by_key(Region::id);
        all
    }

    pub(crate) fn count(&self) -> usize {
        self.read().by_id.len()
    }

    pub(crate) fn by_id(&self, id: RegionId) -> Option<Region> {
        self.read().by_id.get(&id.0).map(|r| Region(Arc::clone(r)))
    }

    // ---- writers in other processes ----

    /// From now on, writers in other processes can find the regions. Before there are any.
    pub(crate) fn publish_to(&self, registry: Registry) {
        self.write().registry = Some(registry);
    }

    /// The table that writers read, if there is one.
    pub(crate) fn registry_fd(&self) -> Option<OwnedFd> {
        self.read().registry.as_ref().and_then(|r| r.fd().try_clone_to_owned().ok())
    }

    /// Says to writers that there will be no regions any more.
    pub(crate) fn close(&self) {
        if let Some(registry) = &self.read().registry {
            registry.close();
        }
    }

    /// Keeps the ranges of unregistered regions out of use until the gates are left.
    pub(crate) fn quarantine<'a>(
        &self,
        regions: impl IntoIterator<Item = &'a Region>,
        occupied: &[Occupied],
    ) {
        let mut tables = self.write();
        for region in regions {
            *region.0.quarantine() = Quarantine::Inside(occupied.to_vec());
            tables.quarantined.push(Arc::clone(&region.0));
        }
    }

    /// Whether an unregistered region was in quarantine and is not any more.
    pub(crate) fn was_lifted(region: &Region) -> bool {
        matches!(*region.0.quarantine(), Quarantine::Lifted)
    }

    /// Regions in quarantine.
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

    const LIFE: Incarnation = Incarnation(7);

    fn host(table: &RegionTable, base: usize, len: usize) -> Result<Region> {
        table.insert(LIFE, base, len, Access::READ_WRITE, Backing::Borrowed)
    }

    #[test]
    fn regions_never_overlap() {
        let table = RegionTable::default();
        host(&table, 0x1000, 0x1000).expect("free");
        for (base, len) in
            [(0x1000, 0x1000), (0x0800, 0x0801), (0x1fff, 1), (0x1400, 8), (1, 0x8000)]
        {
            let e = host(&table, base, len).expect_err("taken");
            assert_eq!(e.kind(), ErrorKind::Overlap, "{base:#x}+{len:#x}");
        }
        host(&table, 0x2000, 1).expect("adjacent above");
        host(&table, 0x0fff, 1).expect("adjacent below");
    }

    #[test]
    fn empty_null_and_wrapping_ranges_are_refused() {
        let table = RegionTable::default();
        for (base, len) in [(0x1000, 0), (0, 8), (usize::MAX, 2)] {
            let e = host(&table, base, len).expect_err("nonsense");
            assert_eq!(e.kind(), ErrorKind::InvalidArgument);
        }
    }

    #[test]
    fn a_batch_registers_all_or_nothing() {
        let table = RegionTable::default();
        host(&table, 0x9000, 0x10).expect("free");
        let ranges = [(0x1000 as *mut u8, 16), (0x2000 as *mut u8, 16), (0x9008 as *mut u8, 16)];
        let e = table.insert_all(LIFE, &ranges, Access::READ).expect_err("the third overlaps");
        assert_eq!((e.kind(), e.context("range")), (ErrorKind::Overlap, Some("2")));
        assert_eq!(table.count(), 1);
        table.insert_all(LIFE, &ranges[..2], Access::READ).expect("nothing was left behind");
    }

    #[test]
    fn an_address_resolves_only_inside_one_region() {
        let table = RegionTable::default();
        let a = host(&table, 0x1000, 0x1000).expect("free");
        host(&table, 0x2000, 0x1000).expect("free");
        let resolve = |offset, len| {
            let tables = table.read();
            tables
                .resolve(RegionId::ABSOLUTE, offset, len, Access::WRITE)
                .map(|(r, o)| (r.id, o))
                .map_err(|m| m.0)
        };
        assert_eq!(resolve(0x1004, 8), Ok((a.id(), 4)));
        assert_eq!(resolve(0x1ffc, 8), Err(WireCode::Straddles));
        assert_eq!(resolve(0x0ffc, 8), Err(WireCode::UnknownRegion));
        assert_eq!(resolve(0x3000, 1), Err(WireCode::UnknownRegion));
        assert_eq!(resolve(u64::MAX - 3, 8), Err(WireCode::Overflow));
    }

    #[test]
    fn a_description_survives_bytes_and_json() {
        let table = RegionTable::default();
        let life = Incarnation(u128::MAX - 7);
        let region = table.insert(life, 0x1000, 16, Access::READ, Backing::Borrowed).expect("free");
        let described = region.remote();
        assert_eq!(RemoteRegion::from_bytes(&described.to_bytes()).expect("ours"), described);
        let longer = [described.to_bytes(), vec![0]].concat();
        assert!(RemoteRegion::from_bytes(&longer).is_err(), "bytes behind it");
        let json = serde_json::to_string(&described).expect("plain fields");
        assert!(json.contains("\"fffffffffffffffffffffffffffffff8\""), "{json}");
        let back: RemoteRegion = serde_json::from_str(&json).expect("ours");
        assert_eq!(back, described);
        let cut = json.replace("fffffff8", "");
        assert!(serde_json::from_str::<RemoteRegion>(&cut).is_err(), "{cut}");
    }

    #[test]
    fn an_id_is_never_used_again() {
        let table = RegionTable::default();
        let first = host(&table, 0x1000, 16).expect("free");
        table.remove(&first).expect("registered");
        let second = host(&table, 0x1000, 16).expect("free again");
        assert_ne!(first.id(), second.id());
        let e = table.remove(&first).expect_err("gone");
        assert_eq!(e.kind(), ErrorKind::NotRegistered);
        assert!(second.is_registered() && !first.is_registered());
    }

    #[test]
    fn access_is_what_the_owner_said() {
        let table = RegionTable::default();
        let r = table.insert(LIFE, 0x1000, 16, Access::READ, Backing::Borrowed).expect("free");
        let tables = table.read();
        assert!(tables.resolve(r.id(), 0, 16, Access::READ).is_ok());
        let denied = tables.resolve(r.id(), 0, 16, Access::WRITE).map(drop);
        assert_eq!(denied, Err(Misfit(WireCode::AccessDenied)));
    }
}
