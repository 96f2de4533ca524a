//! The table of addresses: device allocations, VMM and IPC mappings, and host memory that the
//! driver knows.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::abi::{Error, Result};
use crate::host;
use crate::segments::{PAGE, Reserved, Segment};

/// The byte that fills memory which nothing has written.
pub const UNWRITTEN: u8 = 0xA5;
/// The byte that fills memory which was freed.
pub const FREED: u8 = 0xDF;
/// The byte that fills a destination from the start of its copy until each part arrives.
pub const IN_FLIGHT: u8 = 0xE7;

/// Freed addresses that are kept from other mappings.
const QUARANTINE: usize = 512;

/// Origin of a device mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Allocation,
    Managed,
    /// The handle of a VMM allocation.
    Vmm(u64),
    Ipc,
}

/// A range of device addresses with bytes behind it.
#[derive(Debug)]
pub(crate) struct Mapping {
    pub(crate) base: u64,
    pub(crate) len: u64,
    pub(crate) segment: Arc<Segment>,
    /// The segment's offset of the first byte.
    pub(crate) offset: u64,
    pub(crate) kind: Kind,
    /// The ordinal of the device that has the bytes.
    pub(crate) device: usize,
    /// Bit d: device d may read; VMM mappings have none at first.
    pub(crate) readable: u8,
    pub(crate) writable: u8,
    pub(crate) buffer_id: u64,
    /// The addresses, except of VMM mappings, which lie in a reservation.
    pub(crate) reserved: Option<Reserved>,
    /// The times that an IPC handle was opened.
    pub(crate) opened: u64,
}

/// Host memory that the driver pinned or allocated.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HostRange {
    pub(crate) base: u64,
    pub(crate) len: u64,
    /// True for memory of `cuMemAllocHost`, false for memory of `cuMemHostRegister`.
    pub(crate) allocated: bool,
    pub(crate) device: usize,
}

/// Physical memory with a handle.
#[derive(Debug)]
pub(crate) struct VmmHandle {
    pub(crate) segment: Arc<Segment>,
    pub(crate) device: usize,
    pub(crate) handle_types: i32,
    pub(crate) rdma_capable: u8,
    /// `cuMemCreate`, imports and `cuMemRetainAllocationHandle` each count one. Mappings keep
    /// the memory when it is 0.
    pub(crate) references: u64,
    /// True if this process created the memory; the device's memory counts it then.
    pub(crate) charged: bool,
}

/// Memory at a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    /// Bytes of the device with this ordinal.
    Device(usize),
    Managed,
    Pinned,
    Pageable,
}

#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) mappings: BTreeMap<u64, Mapping>,
    pub(crate) hosts: BTreeMap<u64, HostRange>,
    pub(crate) reservations: BTreeMap<u64, Reserved>,
    quarantine: Vec<Reserved>,
    next_id: u64,
}

impl Memory {
    /// An identifier that no other buffer of the process has had.
    pub(crate) fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Allocates `len` bytes. `reuse`: the address of a freed range of the same size, if any.
    pub(crate) fn allocate(
        &mut self,
        len: u64,
        device: usize,
        managed: bool,
        reuse: bool,
        name: String,
    ) -> Result<u64> {
        let span = len.checked_next_multiple_of(PAGE).ok_or(Error::INVALID_VALUE)?;
        let found = self.quarantine.iter().position(|r| reuse && r.len() == span);
        let (reserved, poison) = match found {
            Some(index) => (self.quarantine.swap_remove(index), FREED),
            None => (Reserved::new(span, 2 << 20)?, UNWRITTEN),
        };
        let segment = Segment::create(span, name, poison)?;
        let kind = if managed { Kind::Managed } else { Kind::Allocation };
        if managed {
            reserved.expose(&segment)?;
        }
        self.map_whole(Arc::new(segment), len, kind, device, reserved)
    }

    /// Maps memory of another process at new addresses.
    pub(crate) fn map_ipc(&mut self, segment: Segment, len: u64, device: usize) -> Result<u64> {
        let reserved = Reserved::new(segment.len(), 2 << 20)?;
        self.map_whole(Arc::new(segment), len, Kind::Ipc, device, reserved)
    }

    fn map_whole(
        &mut self,
        segment: Arc<Segment>,
        len: u64,
        kind: Kind,
        device: usize,
        reserved: Reserved,
    ) -> Result<u64> {
        let (base, buffer_id) = (reserved.base(), self.fresh_id());
        let mapping = Mapping {
            base,
            len,
            segment,
            offset: 0,
            kind,
            device,
            readable: u8::MAX,
            writable: u8::MAX,
            buffer_id,
            reserved: Some(reserved),
            opened: 1,
        };
        self.mappings.insert(base, mapping);
        Ok(base)
    }

    /// Removes the mapping that begins at `base`. Bytes that this process owns are overwritten
    /// by [`FREED`], which importers see.
    pub(crate) fn free(&mut self, base: u64) -> Result<Mapping> {
        let mut mapping = self.mappings.remove(&base).ok_or(Error::INVALID_VALUE)?;
        if matches!(mapping.kind, Kind::Allocation | Kind::Managed) {
            mapping.segment.fill(0, mapping.segment.len(), FREED);
        }
        if let Some(reserved) = mapping.reserved.take() {
            if mapping.kind == Kind::Managed {
                reserved.conceal();
            }
            self.quarantine.push(reserved);
            if self.quarantine.len() > QUARANTINE {
                self.quarantine.remove(0);
            }
        }
        Ok(mapping)
    }

    /// The mapping that holds `address`.
    pub(crate) fn mapping(&self, address: u64) -> Option<&Mapping> {
        let (_, mapping) = self.mappings.range(..=address).next_back()?;
        (address < mapping.base + mapping.len).then_some(mapping)
    }

    /// The known host range that holds `address`.
    pub(crate) fn host(&self, address: u64) -> Option<&HostRange> {
        let (_, range) = self.hosts.range(..=address).next_back()?;
        (address < range.base + range.len).then_some(range)
    }

    /// Whether a known host range overlaps `base..base + len`.
    pub(crate) fn host_overlaps(&self, base: u64, len: u64) -> bool {
        let before = self.hosts.range(..base + len).next_back();
        before.is_some_and(|(_, range)| range.base + range.len > base)
    }

    /// Whether `address` belongs to the device, mapped or not.
    pub(crate) fn is_device_address(&self, address: u64) -> bool {
        self.mapping(address).is_some()
            || self.quarantine.iter().any(|r| r.holds(address))
            || self.reservations.values().any(|r| r.holds(address))
            || self.mappings.values().any(|m| m.reserved.as_ref().is_some_and(|r| r.holds(address)))
    }

    /// Memory of the range. `INVALID_VALUE`: it leaves what it begins in, its device memory is
    /// free, or no device may access it.
    pub(crate) fn place(&self, address: u64, len: u64) -> Result<Place> {
        let end = address.checked_add(len).ok_or(Error::INVALID_VALUE)?;
        if let Some(first) = self.mapping(address) {
            let (kind, device) = (first.kind, first.device);
            let mut at = address;
            while at < end {
                let mapping = self.mapping(at).filter(|mapping| mapping.readable != 0);
                let mapping = mapping.ok_or(Error::INVALID_VALUE)?;
                at = mapping.base + mapping.len;
            }
            return Ok(if kind == Kind::Managed { Place::Managed } else { Place::Device(device) });
        }
        if let Some(range) = self.host(address) {
            let inside = end <= range.base + range.len;
            return if inside { Ok(Place::Pinned) } else { Err(Error::INVALID_VALUE) };
        }
        if self.is_device_address(address) || self.host_overlaps(address, len.max(1)) {
            return Err(Error::INVALID_VALUE);
        }
        if host::readable(address, len) { Ok(Place::Pageable) } else { Err(Error::INVALID_VALUE) }
    }

    /// Reads bytes for an engine. `ILLEGAL_ADDRESS` where nothing is mapped.
    pub(crate) fn read(&self, address: u64, into: &mut [u8]) -> Result {
        let mut at = address;
        let mut rest = into;
        while !rest.is_empty() {
            let Some(mapping) = self.mapping(at) else {
                if self.host(at).is_none() && self.is_device_address(at) {
                    return Err(Error::ILLEGAL_ADDRESS);
                }
                return host::read(at, rest);
            };
            let n = rest.len().min((mapping.base + mapping.len - at) as usize);
            let (part, after) = rest.split_at_mut(n);
            mapping.segment.read(mapping.offset + (at - mapping.base), part);
            (at, rest) = (at + n as u64, after);
        }
        Ok(())
    }

    /// Writes bytes for an engine. `ILLEGAL_ADDRESS` where nothing is mapped.
    pub(crate) fn write(&self, address: u64, from: &[u8]) -> Result {
        let mut at = address;
        let mut rest = from;
        while !rest.is_empty() {
            let Some(mapping) = self.mapping(at) else {
                if self.host(at).is_none() && self.is_device_address(at) {
                    return Err(Error::ILLEGAL_ADDRESS);
                }
                return host::write(at, rest);
            };
            let n = rest.len().min((mapping.base + mapping.len - at) as usize);
            let (part, after) = rest.split_at(n);
            mapping.segment.write(mapping.offset + (at - mapping.base), part);
            (at, rest) = (at + n as u64, after);
        }
        Ok(())
    }

    pub(crate) fn fill(&self, address: u64, len: u64, byte: u8) -> Result {
        let chunk = vec![byte; len.min(64 << 10) as usize];
        let mut done = 0;
        while done < len {
            let n = (len - done).min(chunk.len() as u64);
            self.write(address + done, &chunk[..n as usize])?;
            done += n;
        }
        Ok(())
    }
}

/// Memory that the host allocated for `cuMemAllocHost`.
pub(crate) fn allocate_host(len: u64) -> Result<u64> {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: a new mapping at an address of the kernel's choice, which replaces none.
    let at = unsafe { libc::mmap(std::ptr::null_mut(), len as usize, protection, flags, -1, 0) };
    if at == libc::MAP_FAILED { Err(Error::OUT_OF_MEMORY) } else { Ok(at as u64) }
}

/// Ends memory of [`allocate_host`].
pub(crate) fn free_host(range: HostRange) {
    // SAFETY: `allocate_host` made exactly this mapping, and the program has given it back.
    unsafe { libc::munmap(range.base as *mut libc::c_void, range.len as usize) };
}
