//! Device memory, pinned host memory and host registrations.

use std::ffi::{c_int, c_uint};

use super::contexts::wait_device;
use super::{Out, enter_current};
use crate::abi::{DevicePtr, Error, Result};
use crate::faults::Fault;
use crate::ipc::Use;
use crate::memory::{HostRange, Kind, allocate_host, free_host};
use crate::segments::PAGE;
use crate::state::Session;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(pointer: Out<DevicePtr>, len: usize) -> c_int {
    enter_current("cuMemAlloc_v2", |session, device| {
        allocate(session, device, &pointer, len as u64, false)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocManaged(
    pointer: Out<DevicePtr>,
    len: usize,
    flags: c_uint,
) -> c_int {
    enter_current("cuMemAllocManaged", |session, device| {
        if !(1..=2).contains(&flags) {
            return Err(Error::INVALID_VALUE);
        }
        allocate(session, device, &pointer, len as u64, true)
    })
}

fn allocate(
    session: &mut Session,
    device: usize,
    pointer: &Out<DevicePtr>,
    len: u64,
    managed: bool,
) -> Result {
    pointer.require()?;
    session.unsafe_in_capture()?;
    if len == 0 {
        return Err(Error::INVALID_VALUE);
    }
    if session.faults.hit(Fault::AllocOom) {
        return Err(Error::OUT_OF_MEMORY);
    }
    session.charge(device, len.checked_next_multiple_of(PAGE).ok_or(Error::OUT_OF_MEMORY)?)?;
    let reuse = session.call_rng.u8(..100) < session.config.reuse;
    let name = session.segment_name(Use::Allocation, device);
    let state = &mut **session;
    let base = state.memory.allocate(len, device, managed, reuse, name)?;
    pointer.set(base)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree_v2(pointer: DevicePtr) -> c_int {
    enter_current("cuMemFree_v2", |session, _| {
        if pointer == 0 {
            return Ok(());
        }
        session.unsafe_in_capture()?;
        let mapping = session.memory.mappings.get(&pointer).ok_or(Error::INVALID_VALUE)?;
        if !matches!(mapping.kind, Kind::Allocation | Kind::Managed) {
            return Err(Error::INVALID_VALUE);
        }
        let owner = mapping.device;
        wait_device(session, owner)?;
        let mapping = session.memory.free(pointer)?;
        session.checker.forget_range(mapping.base, mapping.len);
        session.devices[owner].used -= mapping.segment.len();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    enter_current("cuMemGetInfo_v2", |session, device| {
        let all = session.config.memory + session.config.context_charge;
        free.set(all.saturating_sub(session.devices[device].used) as usize)?;
        total.set(all as usize)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: Out<DevicePtr>,
    len: Out<usize>,
    pointer: DevicePtr,
) -> c_int {
    enter_current("cuMemGetAddressRange_v2", |session, _| {
        let (start, size) = match (session.memory.mapping(pointer), session.memory.host(pointer)) {
            (Some(mapping), _) => (mapping.base, mapping.len),
            (None, Some(range)) => (range.base, range.len),
            (None, None) => return Err(Error::NOT_FOUND),
        };
        base.set_if_wanted(start);
        len.set_if_wanted(size as usize);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocHost_v2(pointer: Out<u64>, len: usize) -> c_int {
    enter_current("cuMemAllocHost_v2", |session, device| {
        pointer.require()?;
        session.unsafe_in_capture()?;
        let len = (len as u64).checked_next_multiple_of(PAGE).filter(|&len| len > 0);
        let len = len.ok_or(Error::INVALID_VALUE)?;
        pin(session, len)?;
        let base = allocate_host(len)?;
        session.memory.hosts.insert(base, HostRange { base, len, allocated: true, device });
        pointer.set(base)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeHost(pointer: u64) -> c_int {
    enter_current("cuMemFreeHost", |session, device| {
        if pointer == 0 {
            return Ok(());
        }
        session.unsafe_in_capture()?;
        let range = session.memory.hosts.get(&pointer).copied();
        let range = range.filter(|range| range.allocated).ok_or(Error::INVALID_VALUE)?;
        wait_device(session, device)?;
        session.memory.hosts.remove(&pointer);
        session.checker.forget_range(range.base, range.len);
        free_host(range);
        Ok(())
    })
}

/// The limits of pinned memory, and their faults.
fn pin(session: &mut Session, len: u64) -> Result {
    if session.faults.hit(Fault::PinOom) {
        return Err(Error::OUT_OF_MEMORY);
    }
    if len >= session.config.pin_limit || session.faults.hit(Fault::PinTooLong) {
        return Err(Error::INVALID_VALUE);
    }
    let pinned: u64 = session.memory.hosts.values().map(|range| range.len).sum();
    if pinned.saturating_add(len) > session.config.pin_total {
        return Err(Error::OUT_OF_MEMORY);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostRegister_v2(
    pointer: u64,
    len: usize,
    flags: c_uint,
) -> c_int {
    enter_current("cuMemHostRegister_v2", |session, device| {
        session.unsafe_in_capture()?;
        let len = len as u64;
        if pointer == 0 || len == 0 || flags > 0xf || pointer.checked_add(len).is_none() {
            return Err(Error::INVALID_VALUE);
        }
        if session.memory.is_device_address(pointer) {
            return Err(Error::INVALID_VALUE);
        }
        let overlaps = session.memory.host_overlaps(pointer, len);
        if session.faults.hit(Fault::PinTwice) || overlaps {
            return Err(Error::HOST_MEMORY_ALREADY_REGISTERED);
        }
        pin(session, len)?;
        if !crate::host::readable(pointer, len) {
            return Err(Error::INVALID_VALUE);
        }
        let range = HostRange { base: pointer, len, allocated: false, device };
        session.memory.hosts.insert(pointer, range);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostUnregister(pointer: u64) -> c_int {
    enter_current("cuMemHostUnregister", |session, _| {
        session.unsafe_in_capture()?;
        let range = session.memory.hosts.get(&pointer).copied();
        let range = range.filter(|range| !range.allocated);
        let range = range.ok_or(Error::HOST_MEMORY_NOT_REGISTERED)?;
        session.check_unpinned(range);
        session.memory.hosts.remove(&pointer);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    device_pointer: Out<DevicePtr>,
    pointer: u64,
    flags: c_uint,
) -> c_int {
    enter_current("cuMemHostGetDevicePointer_v2", |session, _| {
        if flags != 0 || session.memory.host(pointer).is_none() {
            return Err(Error::INVALID_VALUE);
        }
        device_pointer.set(pointer)
    })
}
