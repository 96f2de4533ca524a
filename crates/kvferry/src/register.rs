//! Registering memory with an agent.

use crate::agent::Agent;
use crate::core::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::Unquiet;
use crate::memory::device::DeviceMemory;
use crate::memory::pieces::Piece;
use crate::memory::region::{Access, Backing, Region};
use crate::memory::table::RegionTable;
use crate::reactor::now;
use crate::sync::Arc;
use crate::transfer::batch::{Batch, RemotePart, check_address};
use kvferry_proto::RegionId;
use kvferry_sys::host::{HostMemory, LoadedDriver, NotHost};
use kvferry_sys::map::Mapping;
use kvferry_sys::shared::Shared;
use std::time::Duration;

/// The smallest allocation that can be shared with other processes, in bytes. A smaller one is not
/// worth a descriptor.
const SHARED_MIN: usize = 1 << 20;

impl Agent {
    /// Registers `len` bytes of host memory at `addr`.
    ///
    /// Any alignment is fine, and any length except zero. A range that overlaps a registered one is
    /// refused, even an identical one.
    ///
    /// # Safety
    /// The range must stay mapped, readable and, if peers may write or this agent reads into it,
    /// writable, until [`Agent::unregister`] of it has returned, or the agent is shut down and
    /// [`Region::is_in_use`] is false. Peers write to it at any time, so no references to it may exist.
    ///
    /// Nor may its pages be replaced, by `madvise(MADV_DONTNEED)` or by mapping anything else over them:
    /// transfers with files may go on with the former pages.
    ///
    /// # Errors
    /// `InvalidArgument` for zero bytes, null, a range that wraps around, or one that this process
    /// can't read, or can't write to though peers may; `Unsupported` for memory of a device;
    /// `Overlap`.
    pub unsafe fn register(&self, addr: *mut u8, len: usize, access: Access) -> Result<Region> {
        let core = self.core();
        core.check()?;
        must_be_host(&[(addr, len)], access)?;
        core.memory.regions.insert(core.incarnation, addr as usize, len, access, Backing::Borrowed)
    }

    /// Registers several ranges, all or none.
    ///
    /// # Safety
    /// As [`Agent::register`], for each range.
    ///
    /// # Errors
    /// As [`Agent::register`], with the index of the range.
    pub unsafe fn register_batch(
        &self,
        ranges: &[(*mut u8, usize)],
        access: Access,
    ) -> Result<Vec<Region>> {
        let core = self.core();
        core.check()?;
        must_be_host(ranges, access)?;
        core.memory.regions.insert_all(core.incarnation, ranges, access)
    }

    /// Allocates `len` zeroed bytes, page-aligned, and registers them. The memory lives until the
    /// last handle of the region is dropped.
    ///
    /// From 1 MiB on, agents of the same user on this host may map the memory as far as `access`
    /// allows. Copying to and from mapped memory is as fast as within one process. It costs one
    /// descriptor. Memory is private if it is smaller, or if `local` is not among the agent's
    /// transports. From 2 MiB on shared memory uses huge pages if the system has free ones. The pages
    /// are taken now, from the caller's control group and by its NUMA policy, which takes about
    /// half a second per GiB. (Private memory takes them at the first touch before Linux 5.14. It is of
    /// huge pages if the system has free ones and does not forbid them.)
    ///
    /// # Errors
    /// `InvalidArgument` for zero bytes, `Io` if there is not enough memory.
    pub fn allocate(&self, len: usize, access: Access) -> Result<Region> {
        let core = self.core();
        core.check()?;
        if len == 0 {
            return Err(Error::invalid("the region has no bytes"));
        }
        if !core.memory.regions.maps_memory() || len < SHARED_MIN {
            return self.insert_private(Mapping::populated(len), len, access);
        }
        let shared = Shared::allocate("kvferry-region", len)
            .and_then(|shared| {
                if !access.write {
                    // After this, no other process can make the descriptor writable.
                    shared.seal_against_writes()?;
                }
                Ok(shared)
            })
            .map_err(|e| Error::io("memory can't be allocated", e).with("len", len))?;
        let base = shared.as_ptr() as usize;
        core.memory.regions.insert(
            core.incarnation,
            base,
            len,
            access,
            Backing::Shared(Arc::new(shared)),
        )
    }

    /// As [`Agent::allocate`], but in ordinary private memory whose pages are taken at the first touch,
    /// like a pool that an engine allocates itself. For measuring transfers from such a pool.
    ///
    /// # Errors
    /// As [`Agent::allocate`].
    #[doc(hidden)]
    pub fn allocate_private(&self, len: usize, access: Access) -> Result<Region> {
        self.core().check()?;
        self.insert_private(Mapping::anonymous(len), len, access)
    }

    fn insert_private(
        &self,
        map: std::io::Result<Mapping>,
        len: usize,
        access: Access,
    ) -> Result<Region> {
        let core = self.core();
        let map = map.map_err(|e| Error::io("memory can't be allocated", e).with("len", len))?;
        let base = map.as_ptr() as usize;
        core.memory.regions.insert(core.incarnation, base, len, access, Backing::Owned(map))
    }

    /// Registers device memory, which is accessed by asynchronous copies.
    ///
    /// # Errors
    /// `InvalidArgument` if the memory has no bytes, or wraps around the end of the device's addresses. For memory with
    /// addresses of this process also `Overlap` and `Quarantined`, as [`Agent::register`].
    pub fn register_device(&self, memory: DeviceMemory, access: Access) -> Result<Region> {
        let core = self.core();
        core.check()?;
        let len = usize::try_from(memory.len()).map_err(|_| {
            Error::new(
                ErrorKind::TooLarge,
                "the memory has more bytes than this process can address",
            )
        })?;
        if memory.is_wrapped() {
            let what = "the memory wraps around the end of the device's addresses";
            return Err(Error::invalid(what).with("len", len));
        }
        let base = usize::try_from(memory.process_address()).expect("an address of this process");
        core.memory.regions.insert(core.incarnation, base, len, access, Backing::Device(memory))
    }

    /// Gives a registered region a name by which peers find it
    /// ([`Peer::region`](crate::Peer::region)) until it is unregistered.
    ///
    /// # Errors
    /// `InvalidArgument` if the name does not have 1 to 256 bytes, or the region has a name
    /// already; `Overlap` if another registered region has the name; `NotRegistered`.
    pub fn name_region(&self, region: &Region, name: &str) -> Result<()> {
        let core = self.core();
        core.check()?;
        core.memory.regions.set_name(region, name)
    }

    /// The registered region of that name, if there is one.
    pub fn region(&self, name: &str) -> Option<Region> {
        self.core().memory.regions.by_name(name)
    }

    /// The registered region that starts at `addr`, if there is one.
    pub fn region_at(&self, addr: usize) -> Option<Region> {
        self.core().memory.regions.starting_at(addr)
    }

    /// The registered region that holds these bytes of this process's addresses, if one does.
    pub fn region_holding(&self, addr: usize, len: u64) -> Option<Region> {
        self.core().memory.regions.holding(addr, len)
    }

    /// Returns the registered regions in the order of their registration.
    pub fn regions(&self) -> Vec<Region> {
        self.core().memory.regions.all()
    }

    /// Unregisters a region. When this returns, no copier touches the memory any more: neither this
    /// agent, for peers or for its own transfers (which end with `Revoked`), nor a process of this
    /// host that copies directly.
    ///
    /// # Errors
    /// `NotRegistered` if the region is not registered with this agent; if another thread is
    /// unregistering it, this error comes only when that thread is done. `Quarantined` if, within the
    /// agent's silence limit, a process of this host that may be writing to the region did not respond,
    /// or a copy of a device or a file did not end: the region is not registered any more, but its
    /// memory must not be used for anything else before [`Region::is_quarantined`] is false or another
    /// call returns `Ok`.
    pub fn unregister(&self, region: &Region) -> Result<()> {
        self.core().check()?;
        unregister(self.core(), std::slice::from_ref(region))
    }

    /// Unregisters several regions with one quiesce. Continues after an error and returns the first
    /// one.
    ///
    /// # Errors
    /// As [`Agent::unregister`].
    pub fn unregister_batch(&self, regions: &[Region]) -> Result<()> {
        self.core().check()?;
        unregister(self.core(), regions)
    }
}

/// Refuses what is not host memory of this process. Every way to register memory that a caller names by
/// its address comes here.
fn must_be_host(ranges: &[(*mut u8, usize)], access: Access) -> Result<()> {
    let mut host = None;
    for (i, &(addr, len)) in ranges.iter().enumerate() {
        // Refused below, with reasons of their own.
        if addr.is_null() || len == 0 || (addr as usize).checked_add(len).is_none() {
            continue;
        }
        let checked = match &mut host {
            Some(host) => Ok(host),
            none => HostMemory::of_this_process().map(|new| none.insert(new)),
        };
        let checked = checked.and_then(|host| host.check(addr as usize, len, access.write));
        if let Err(why) = checked {
            let kind = match &why {
                // Where nothing tells, the caller's promise has to do.
                NotHost::Unknown(_) => return Ok(()),
                NotHost::Device { .. } => ErrorKind::Unsupported,
                _ => ErrorKind::InvalidArgument,
            };
            let advice = match kind {
                ErrorKind::Unsupported => "; register it as memory of its GPU",
                _ => "",
            };
            let error = Error::new(kind, format!("the range is not host memory: {why}{advice}"))
                .with("addr", format_args!("{:#x}", addr as usize))
                .with("len", len);
            return Err(if ranges.len() > 1 { error.with("range", i) } else { error });
        }
    }
    Ok(())
}

fn unregister(core: &Core, regions: &[Region]) -> Result<()> {
    let mut first = Ok(());
    let mut removed = Vec::with_capacity(regions.len());
    let mut not_ours = Vec::new();
    for region in regions {
        match core.memory.regions.remove(region) {
            Ok(()) => removed.push(region),
            Err(_) if region.0.is_quarantined() => {
                first = first.and(wait_for_quarantine(core, region));
            }
            Err(_) if RegionTable::was_lifted(region) => {}
            Err(e) => {
                not_ours.push(region);
                first = first.and(Err(e));
            }
        }
    }
    if !removed.is_empty() {
        first = first.and(quiesce(core, &removed));
        core.memory.regions.left(removed);
    }
    // Only now, because the other thread may wait for one of our regions.
    for region in not_ours {
        if region.0.incarnation == core.incarnation {
            core.memory.regions.wait_until_left(region);
        }
    }
    first
}

/// Waits until no copier touches regions that were removed; an error if one may still do so.
fn quiesce(core: &Core, removed: &[&Region]) -> Result<()> {
    let until = now() + core.settings.silence;
    let Unquiet { stuck, copied, occupied } =
        core.memory.quiesce(removed.iter().copied(), false, until);
    if let Some(copier) = occupied.first() {
        return Err(quarantined(copier.name()).with("region", removed[0].id()));
    }
    if !stuck.is_empty() {
        let what = "a thread that copies to or from the memory hangs; do not reuse the memory, and \
                    unregister it again later";
        return Err(Error::new(ErrorKind::Quarantined, what).with("region", removed[0].id()));
    }
    if let Some(region) = copied {
        let what = "a copy of a device or a file that uses the memory does not end, or a transport still \
                    holds the memory; do not reuse the memory, and unregister it again later";
        return Err(Error::new(ErrorKind::Quarantined, what).with("region", region));
    }
    Ok(())
}

fn quarantined(writer: &str) -> Error {
    Error::new(
        ErrorKind::Quarantined,
        "a process or a device that may be using the memory does not answer; do not reuse the \
         memory, and unregister it again later",
    )
    .with("peer", writer)
}

fn wait_for_quarantine(core: &Core, region: &Region) -> Result<()> {
    let until = now() + core.settings.silence;
    while !RegionTable::was_lifted(region) {
        if now() >= until {
            return Err(quarantined("").with("region", region.id()));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}

impl RegionTable {
    /// Unregisters everything; the caller quiesces. Returns the regions.
    pub(crate) fn clear(&self) -> Vec<Region> {
        let mut regions = self.all();
        // Another thread may be unregistering the same region.
        regions.retain(|region| self.remove(region).is_ok());
        regions
    }
}

impl Batch {
    /// Adds `len` bytes at `local`, which need not be registered, and at the virtual address
    /// `remote` in the peer's process.
    ///
    /// # Safety
    /// The local range must be valid (for a read: writable, and without references to it) until the
    /// outcome of every transfer that the batch is used in.
    ///
    /// # Errors
    /// `InvalidArgument` for zero bytes, null, or an address that wraps around. The batch is
    /// unchanged.
    pub unsafe fn push_raw(&mut self, local: *mut u8, remote: u64, len: u64) -> Result<()> {
        let pair = std::iter::once(Ok((local, remote, len)));
        // SAFETY: the caller makes the same promise.
        unsafe { self.extend_raw(pair) }
    }

    /// Adds many pairs like [`Batch::push_raw`], faster than one by one: local address, address in
    /// the peer's process, length in bytes.
    ///
    /// # Safety
    /// As [`Batch::push_raw`].
    ///
    /// # Errors
    /// The first error of `pairs`, or of [`Batch::push_raw`]. The batch is unchanged.
    pub unsafe fn extend_raw<E: From<Error>>(
        &mut self,
        pairs: impl Iterator<Item = Result<(*mut u8, u64, u64), E>>,
    ) -> Result<(), E> {
        self.push_raw_parts(|locals, remotes| {
            let count = pairs.size_hint().0;
            locals.pieces.reserve(count);
            remotes.reserve(count);
            for pair in pairs {
                let (local, remote, len) = pair?;
                if local.is_null() {
                    let what = "local memory is at null";
                    return Err(Error::invalid(what).into());
                }
                check_address(local as u64, len)?;
                check_address(remote, len)?;
                if locals.bytes.checked_add(len).is_none() {
                    let what = "the lengths of the batch add up to more than 2^64 - 1 bytes";
                    return Err(Error::new(ErrorKind::TooLarge, what).into());
                }
                // SAFETY: the caller promises the range until the transfer's outcome.
                unsafe { locals.push_raw(local, len) };
                remotes.push(RemotePart { region: RegionId::ABSOLUTE, offset: remote });
            }
            Ok(())
        })
    }

    /// Finds local memory of a device among the ranges that were added by address ([`Batch::push_raw`]). Transfers then
    /// move it as memory of its region, which must be registered with `agent` by addresses of this process
    /// ([`DeviceMemory::with_process_addresses`]). Host memory stays as it was added.
    ///
    /// # Errors
    /// `OutOfBounds` if a range reaches beyond its region; `NotRegistered` for a range that is a device's, as a CUDA
    /// driver that this process uses says. The batch is unchanged then, and must not be used.
    pub fn find_device_memory(&mut self, agent: &Agent) -> Result<()> {
        self.find_device_memory_of(agent.core())
    }

    pub(crate) fn find_device_memory_of(&mut self, core: &Core) -> Result<()> {
        let is_raw = |piece: &Piece| piece.region == Piece::RAW;
        // A forked child takes no lock and calls no driver. Its transfers are refused.
        if core.was_forked() || !self.local.pieces.iter().any(is_raw) {
            return Ok(());
        }
        let driver = LoadedDriver::find();
        let tables = core.memory.regions.read();
        if !tables.has_device_addresses() && driver.is_none() {
            return Ok(());
        }
        let refused = |i: usize, piece: &Piece, kind, what: &str| {
            let addr = format_args!("{:#x}", piece.offset).to_string();
            Err(Error::new(kind, what).with("addr", addr).with("len", piece.len).with("pair", i))
        };
        let (mut found, mut unknown) = (Vec::new(), Vec::new());
        for (i, piece) in self.local.pieces.iter().enumerate() {
            if !is_raw(piece) {
                continue;
            }
            match tables.at(piece.offset) {
                Some(region) if region.is_device() => {
                    let offset = piece.offset - region.base as u64;
                    if piece.len > region.len as u64 - offset {
                        let what = "the local range reaches beyond its region of device memory";
                        return refused(i, piece, ErrorKind::OutOfBounds, what);
                    }
                    found.push((i, Arc::clone(region), offset));
                }
                Some(_) => {}
                None => unknown.push(i),
            }
        }
        // The driver is asked without the lock: it may answer only when a call of another thread has ended.
        drop(tables);
        for (i, driver) in unknown.into_iter().filter_map(|i| Some((i, driver?))) {
            let piece = &self.local.pieces[i];
            let at = usize::try_from(piece.offset).unwrap_or(usize::MAX);
            if driver.has_device_memory_at(at) {
                let what = "the local range is memory of a GPU that is not registered; register it";
                return refused(i, piece, ErrorKind::NotRegistered, what);
            }
        }
        if !found.is_empty() {
            let local = Arc::make_mut(&mut self.local);
            found.into_iter().for_each(|(i, region, offset)| local.assign(i, &region, offset));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::gate::Touches;

    #[test]
    fn i6_unregister_does_not_wait_for_ever_for_a_copier_that_hangs() {
        let builder = Agent::builder().silence(Duration::from_millis(100));
        let agent = builder.start().expect("an agent starts");
        let [hangs, other] =
            [(); 2].map(|()| agent.allocate(4096, Access::READ_WRITE).expect("memory"));
        let gate = agent.core().memory.gates.gate();
        let inside = gate.enter_to(Touches::Only(hangs.id())).expect("open");
        agent.unregister(&other).expect("a region that the copier does not touch");
        let error = agent.unregister(&hangs).expect_err("the copier may still touch it");
        assert_eq!(error.kind(), ErrorKind::Quarantined, "{error}");
        assert!(hangs.is_quarantined());
        assert_eq!(agent.stats().regions_quarantined, 1);
        drop(inside);
        agent.unregister(&hangs).expect("the copier has left");
        assert!(!hangs.is_quarantined());
        assert_eq!(agent.stats().regions_quarantined, 0);
    }

    #[test]
    fn i6_shutdown_does_not_wait_for_ever_for_a_copier_that_hangs() {
        let builder = Agent::builder().silence(Duration::from_millis(100));
        let agent = builder.start().expect("an agent starts");
        let region = agent.allocate(4096, Access::READ_WRITE).expect("memory");
        let gate = agent.core().memory.gates.gate();
        let inside = gate.enter().expect("open");
        agent.shutdown();
        assert!(region.is_quarantined());
        drop(inside);
        assert!(!region.is_quarantined());
    }
}
