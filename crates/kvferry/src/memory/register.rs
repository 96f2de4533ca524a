//! Registering memory with an agent.

use crate::agent::{Agent, Core};
use crate::error::{Error, ErrorKind, Result};
use crate::memory::device::DeviceMemory;
use crate::memory::region::{Access, Backing, Region, RegionTable};
use crate::reactor::now;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::transfer::batch::{Batch, check_address};
use kvferry_sys::map::Mapping;
use kvferry_sys::shared::Shared;
use smallvec::SmallVec;
use std::time::Duration;

/// Memory of so many bytes is made to be shared: for less, a descriptor is too much.
const SHARED_MIN: usize = 1 << 20;

impl Agent {
    /// Registers `len` bytes of host memory at `addr`.
    ///
    /// Any alignment and any length but zero will do. A range that overlaps a registered one is
    /// refused, even the very same.
    ///
    /// # Safety
    /// The range must stay mapped, readable and, if peers may write or this agent reads into it,
    /// writable, until [`Agent::unregister`] of it returned or the agent is shut down. Peers write
    /// to it at any time, so nobody may hold references to it.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, null, or a range that wraps around; `Overlap`.
    pub unsafe fn register(&self, addr: *mut u8, len: usize, access: Access) -> Result<Region> {
        let core = self.core();
        core.check()?;
        core.regions.insert(core.incarnation, addr as usize, len, access, Backing::Borrowed)
    }

    /// Registers several ranges, all or none.
    ///
    /// # Safety
    /// As [`Agent::register`], for each range.
    ///
    /// # Errors
    /// As [`Agent::register`], with the number of the range.
    pub unsafe fn register_batch(
        &self,
        ranges: &[(*mut u8, usize)],
        access: Access,
    ) -> Result<Vec<Region>> {
        let core = self.core();
        core.check()?;
        core.regions.insert_all(core.incarnation, ranges, access)
    }

    /// Allocates `len` zeroed bytes, page-aligned, and registers them. The memory lives as long
    /// as a handle of the region.
    ///
    /// From 1 MiB on, agents of the same user on this host may map it, which makes copying to and
    /// from it as fast as within one process, and costs a descriptor; from 2 MiB on it is made of
    /// huge pages if the system has free ones. Less is private, and all is if `local` is not among
    /// the agent's transports.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, `Io` if there is no memory.
    pub fn allocate(&self, len: usize, access: Access) -> Result<Region> {
        let core = self.core();
        core.check()?;
        if len == 0 {
            return Err(Error::new(ErrorKind::InvalidArgument, "a region needs bytes"));
        }
        if !core.is_local() || len < SHARED_MIN {
            return self.allocate_private(len, access);
        }
        let shared = Shared::create("kvferry-region", len, true)
            .map_err(|e| Error::io("memory can't be allocated", e).with("len", len))?;
        let base = shared.as_ptr() as usize;
        core.regions.insert(core.incarnation, base, len, access, Backing::Shared(Arc::new(shared)))
    }

    /// As [`Agent::allocate`], but in ordinary private memory, as the pool of an engine is that
    /// allocates for itself: for measuring what such a pool gets.
    ///
    /// # Errors
    /// As [`Agent::allocate`].
    #[doc(hidden)]
    pub fn allocate_private(&self, len: usize, access: Access) -> Result<Region> {
        let core = self.core();
        core.check()?;
        let map = Mapping::anonymous(len)
            .map_err(|e| Error::io("memory can't be allocated", e).with("len", len))?;
        let base = map.as_ptr() as usize;
        core.regions.insert(core.incarnation, base, len, access, Backing::Owned(map))
    }

    /// Registers memory that is reached by asynchronous copies.
    ///
    /// # Errors
    /// `InvalidArgument` if it has no bytes.
    pub fn register_device(&self, memory: Arc<dyn DeviceMemory>, access: Access) -> Result<Region> {
        let core = self.core();
        core.check()?;
        let len = usize::try_from(memory.len()).map_err(|_| {
            Error::new(ErrorKind::TooLarge, "the memory has more bytes than this process addresses")
        })?;
        core.regions.insert(core.incarnation, 0, len, access, Backing::Device(memory))
    }

    /// The registered region that starts at `addr`, if there is one.
    pub fn region_at(&self, addr: usize) -> Option<Region> {
        self.core().regions.starting_at(addr)
    }

    /// All registered regions, in the order of their registration.
    pub fn regions(&self) -> Vec<Region> {
        self.core().regions.all()
    }

    /// Unregisters a region. When it returns, nobody touches the memory any more: no copier of
    /// this agent, neither for peers nor for its own transfers, which end with `Revoked`, and no
    /// process of this host that copies by itself.
    ///
    /// # Errors
    /// `NotRegistered` if it is not, or not of this agent. `Quarantined` if a process of this host
    /// that may be writing to it did not answer for the agent's silence limit: the region is not
    /// registered any more, but its memory must not be used for anything else before
    /// [`Region::is_quarantined`] is false or another call returns `Ok`.
    pub fn unregister(&self, region: &Region) -> Result<()> {
        self.core().check()?;
        unregister(self.core(), std::slice::from_ref(region))
    }

    /// Unregisters several regions with one quiesce. Goes through all; the first error is
    /// returned.
    ///
    /// # Errors
    /// As [`Agent::unregister`].
    pub fn unregister_batch(&self, regions: &[Region]) -> Result<()> {
        self.core().check()?;
        unregister(self.core(), regions)
    }
}

fn unregister(core: &Core, regions: &[Region]) -> Result<()> {
    let mut first = Ok(());
    let mut removed = Vec::with_capacity(regions.len());
    for region in regions {
        match core.regions.remove(region) {
            Ok(()) => removed.push(region),
            Err(_) if region.is_quarantined() => {
                first = first.and(wait_for_quarantine(core, region));
            }
            Err(_) if RegionTable::was_lifted(region) => {}
            Err(e) => first = first.and(Err(e)),
        }
    }
    if removed.is_empty() {
        return first;
    }
    let ids: SmallVec<[_; 16]> = removed.iter().map(|region| region.id()).collect();
    core.gates.quiesce_regions(&ids);
    for region in &removed {
        // Device copies that were started before end on their own time.
        while region.0.copies.load(Ordering::SeqCst) > 0 {
            crate::sync::thread::sleep(Duration::from_micros(50));
        }
    }
    let occupied = core.writers.quiesce(Some(&ids), now() + core.config.silence());
    for region in &removed {
        crate::transport::local::unmap(core, &region.0);
    }
    if let Some(gate) = occupied.first() {
        core.regions.quarantine(removed.iter().copied(), &occupied);
        let error = quarantined(&gate.writer.name).with("region", removed[0].id());
        return first.and(Err(error));
    }
    first
}

fn quarantined(writer: &str) -> Error {
    Error::new(
        ErrorKind::Quarantined,
        "a process of this host that may be writing to the memory does not answer; do not reuse \
         the memory, and unregister it again later",
    )
    .with("peer", writer)
}

fn wait_for_quarantine(core: &Core, region: &Region) -> Result<()> {
    let until = now() + core.config.silence();
    while !RegionTable::was_lifted(region) {
        if now() >= until {
            return Err(quarantined("").with("region", region.id()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

impl RegionTable {
    /// Unregisters everything; the caller quiesces. Returns what was.
    pub(crate) fn clear(&self) -> Vec<Region> {
        let mut regions = self.all();
        // Somebody else may be unregistering the same.
        regions.retain(|region| self.remove(region).is_ok());
        regions
    }
}

impl Batch {
    /// Adds `len` bytes at `local`, which need not be registered, and at the virtual address
    /// `remote` in the peer's process.
    ///
    /// # Safety
    /// The local range must be valid (for a read: writable, and not referenced) until the outcome
    /// of every transfer that the batch is given to.
    ///
    /// # Errors
    /// `InvalidArgument` for no bytes, null, or an address that wraps around. The batch is
    /// unchanged.
    pub unsafe fn push_raw(&mut self, local: *mut u8, remote: u64, len: u64) -> Result<()> {
        if local.is_null() {
            return Err(Error::new(ErrorKind::InvalidArgument, "local memory can't be at null"));
        }
        check_address(local as u64, len)?;
        check_address(remote, len)?;
        self.push_raw_parts(remote, |pieces| {
            // SAFETY: the caller promises the range until the transfer's outcome.
            unsafe { pieces.push_raw(local, len) }
        });
        Ok(())
    }
}
