//! Virtual memory management.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::IntoRawFd;

use super::{In, Out, enter, enter_current};
use crate::abi::{
    ACCESS_READ, ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, DevicePtr,
    Error, HANDLE_FABRIC, HANDLE_POSIX_FD, LOCATION_DEVICE, Location, Result,
};
use crate::faults::Fault;
use crate::memory::Kind;
use crate::segments::Reserved;
use crate::state::Session;
use crate::vmm::GRANULARITY;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAddressReserve(
    pointer: Out<DevicePtr>,
    len: usize,
    alignment: usize,
    _wish: DevicePtr,
    flags: c_ulonglong,
) -> c_int {
    enter("cuMemAddressReserve", |session| {
        pointer.require()?;
        let (len, alignment) = (len as u64, alignment as u64);
        let aligned = alignment == 0 || alignment.is_power_of_two();
        if len == 0 || !len.is_multiple_of(GRANULARITY) || !aligned || flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        let reserved = Reserved::new(len, alignment.max(GRANULARITY))?;
        let base = reserved.base();
        session.memory.reservations.insert(base, reserved);
        pointer.set(base)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAddressFree(pointer: DevicePtr, len: usize) -> c_int {
    enter("cuMemAddressFree", |session| {
        let reserved = session.memory.reservations.get(&pointer).ok_or(Error::INVALID_VALUE)?;
        let end = pointer + reserved.len();
        if reserved.len() != len as u64
            || session.memory.mappings.range(pointer..end).next().is_some()
        {
            return Err(Error::INVALID_VALUE);
        }
        session.memory.reservations.remove(&pointer);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: Out<usize>,
    prop: In<AllocationProp>,
    option: c_int,
) -> c_int {
    enter("cuMemGetAllocationGranularity", |session| {
        let prop = prop.get()?;
        located(session, &prop.location)?;
        if !(0..=1).contains(&option) {
            return Err(Error::INVALID_VALUE);
        }
        granularity.set(GRANULARITY as usize)
    })
}

/// The ordinal of a location on a device.
fn located(session: &Session, location: &Location) -> Result<usize> {
    if location.kind != LOCATION_DEVICE {
        return Err(Error::INVALID_VALUE);
    }
    session.device(location.id)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemCreate(
    handle: Out<u64>,
    len: usize,
    prop: In<AllocationProp>,
    flags: c_ulonglong,
) -> c_int {
    enter("cuMemCreate", |session| {
        handle.require()?;
        let prop = prop.get()?;
        let device = located(session, &prop.location)?;
        if prop.kind != ALLOCATION_PINNED || flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if prop.handle_types & HANDLE_FABRIC != 0 {
            return Err(Error::NOT_SUPPORTED);
        }
        if prop.handle_types & !HANDLE_POSIX_FD != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if session.faults.hit(Fault::AllocOom) {
            return Err(Error::OUT_OF_MEMORY);
        }
        let rdma = prop.rdma_capable;
        handle.set(session.create_vmm(device, len as u64, prop.handle_types, rdma)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemRelease(handle: u64) -> c_int {
    enter("cuMemRelease", |session| session.release_vmm(handle))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemMap(
    pointer: DevicePtr,
    len: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
) -> c_int {
    enter("cuMemMap", |session| {
        if offset != 0 || flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        session.map_vmm(pointer, len as u64, handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemUnmap(pointer: DevicePtr, len: usize) -> c_int {
    enter("cuMemUnmap", |session| session.unmap_vmm(pointer, len as u64))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemSetAccess(
    pointer: DevicePtr,
    len: usize,
    access: In<AccessDesc>,
    count: usize,
) -> c_int {
    enter("cuMemSetAccess", |session| {
        let bases = session.vmm_mappings(pointer, len as u64)?;
        for desc in access.slice(count)? {
            let device = located(session, &desc.location)?;
            for &base in &bases {
                let owner = session.memory.mappings[&base].device;
                if !session.peer(device, owner) {
                    return Err(Error::PEER_ACCESS_UNSUPPORTED);
                }
                let (read, write) = match desc.flags {
                    0 => (false, false),
                    ACCESS_READ => (true, false),
                    ACCESS_READ_WRITE => (true, true),
                    _ => return Err(Error::INVALID_VALUE),
                };
                let mapping = session.memory.mappings.get_mut(&base).ok_or(Error::UNKNOWN)?;
                let bit = 1 << device;
                mapping.readable = mapping.readable & !bit | if read { bit } else { 0 };
                mapping.writable = mapping.writable & !bit | if write { bit } else { 0 };
            }
        }
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemRetainAllocationHandle(
    handle: Out<u64>,
    address: u64,
) -> c_int {
    enter("cuMemRetainAllocationHandle", |session| {
        handle.require()?;
        let mapping = session.memory.mapping(address).ok_or(Error::INVALID_VALUE)?;
        let Kind::Vmm(known) = mapping.kind else { return Err(Error::INVALID_VALUE) };
        session.vmm.get_mut(&known).ok_or(Error::INVALID_VALUE)?.references += 1;
        handle.set(known)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    prop: Out<AllocationProp>,
    handle: u64,
) -> c_int {
    enter("cuMemGetAllocationPropertiesFromHandle", |session| {
        let known = session.vmm(handle)?;
        prop.set(AllocationProp {
            kind: ALLOCATION_PINNED,
            handle_types: known.handle_types,
            location: Location { kind: LOCATION_DEVICE, id: known.device as c_int },
            win32: std::ptr::null_mut(),
            compression: 0,
            rdma_capable: known.rdma_capable,
            usage: 0,
            reserved: [0; 4],
        })
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemExportToShareableHandle(
    shareable: Out<c_int>,
    handle: u64,
    kind: c_int,
    flags: c_ulonglong,
) -> c_int {
    enter("cuMemExportToShareableHandle", |session| {
        shareable.require()?;
        let refused = session.faults.hit(Fault::VmmNotExportable);
        let known = session.vmm(handle)?;
        if flags != 0 || kind != HANDLE_POSIX_FD || known.handle_types & kind == 0 {
            return Err(Error::INVALID_VALUE);
        }
        if refused {
            return Err(Error::NOT_SUPPORTED);
        }
        let fd = known.segment.fd().try_clone().map_err(|_| Error::OPERATING_SYSTEM)?;
        shareable.set(fd.into_raw_fd())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: Out<u64>,
    shareable: *mut c_void,
    kind: c_int,
) -> c_int {
    enter_current("cuMemImportFromShareableHandle", |session, _| {
        handle.require()?;
        if kind == HANDLE_FABRIC {
            return Err(Error::NOT_SUPPORTED);
        }
        if kind != HANDLE_POSIX_FD {
            return Err(Error::INVALID_VALUE);
        }
        // The descriptor stands in the place of a pointer.
        let descriptor = i32::try_from(shareable as isize).map_err(|_| Error::INVALID_VALUE)?;
        handle.set(session.import_vmm(descriptor, kind)?)
    })
}
