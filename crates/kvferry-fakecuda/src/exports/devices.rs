//! The driver, and its devices.

use std::ffi::{CStr, c_char, c_int, c_uint};

use super::{Out, enter, enter_early};
use crate::abi::{Error, Uuid};
use crate::counters::own_process;
use crate::faults::Fault;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuInit(flags: c_uint) -> c_int {
    enter_early("cuInit", |session| {
        if flags != 0 {
            return Err(Error::INVALID_VALUE);
        }
        if let Some(text) = &session.broken_config {
            eprintln!("FAKECUDA is malformed: {text}");
            return Err(Error::INVALID_VALUE);
        }
        if session.faults.hit(Fault::DriverMismatch) {
            return Err(Error::SYSTEM_DRIVER_MISMATCH);
        }
        if session.devices.is_empty() || session.faults.hit(Fault::NoDevice) {
            return Err(Error::NO_DEVICE);
        }
        own_process();
        session.initialized = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    enter_early("cuDriverGetVersion", |session| version.set(session.config.version))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(error: c_int, text: Out<*const c_char>) -> c_int {
    error_text(error, &text, |(name, _)| name)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorString(error: c_int, text: Out<*const c_char>) -> c_int {
    error_text(error, &text, |(_, text)| text)
}

fn error_text(
    error: c_int,
    out: &Out<*const c_char>,
    pick: fn((&'static CStr, &'static CStr)) -> &'static CStr,
) -> c_int {
    let found = Error::texts(error).map(pick);
    let written = out.set(found.map_or(std::ptr::null(), CStr::as_ptr));
    if found.is_some() && written.is_ok() { 0 } else { Error::INVALID_VALUE.0 }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    enter("cuDeviceGetCount", |session| count.set(session.devices.len() as c_int))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> c_int {
    enter("cuDeviceGet", |session| {
        session.device(ordinal)?;
        device.set(ordinal)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetName(
    name: Out<c_char>,
    len: c_int,
    device: c_int,
) -> c_int {
    enter("cuDeviceGetName", |session| {
        session.device(device)?;
        set_text(&name, len, "kvferry fake GPU")
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetPCIBusId(
    id: Out<c_char>,
    len: c_int,
    device: c_int,
) -> c_int {
    enter("cuDeviceGetPCIBusId", |session| {
        let device = session.device(device)?;
        set_text(&id, len, &session.devices[device].pci())
    })
}

/// Writes as much of the text as fits, with its end.
fn set_text(out: &Out<c_char>, len: c_int, text: &str) -> crate::abi::Result {
    let room = usize::try_from(len).ok().filter(|&room| room > 0).ok_or(Error::INVALID_VALUE)?;
    let mut bytes: Vec<c_char> = text.bytes().take(room - 1).map(|b| b as c_char).collect();
    bytes.push(0);
    out.set_slice(&bytes, room)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid(uuid: Out<Uuid>, device: c_int) -> c_int {
    device_uuid("cuDeviceGetUuid", &uuid, device)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: Out<Uuid>, device: c_int) -> c_int {
    device_uuid("cuDeviceGetUuid_v2", &uuid, device)
}

fn device_uuid(name: &'static str, uuid: &Out<Uuid>, device: c_int) -> c_int {
    enter(name, |session| {
        let device = session.device(device)?;
        uuid.set(session.devices[device].uuid())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> c_int {
    enter("cuDeviceTotalMem_v2", |session| {
        session.device(device)?;
        bytes.set((session.config.memory + session.config.context_charge) as usize)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceCanAccessPeer(
    can: Out<c_int>,
    device: c_int,
    peer: c_int,
) -> c_int {
    enter("cuDeviceCanAccessPeer", |session| {
        let (device, peer) = (session.device(device)?, session.device(peer)?);
        can.set(c_int::from(device != peer && session.peer(device, peer)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    device: c_int,
) -> c_int {
    enter("cuDeviceGetAttribute", |session| {
        let device = session.device(device)?;
        let version = session.config.version;
        let dmabuf = version >= 11070 && !session.faults.hit(Fault::DmabufUnsupported);
        value.set(match attribute {
            // Threads of a block, and extents of a block and a grid.
            1..=3 => 1024,
            4 => 64,
            5 => c_int::MAX,
            6 | 7 => 65535,
            // Warp, copy engines, unified addresses, mapped host memory.
            10 => 32,
            16 => 132,
            20 => session.config.compute_mode,
            40 => 4,
            19 | 41 => 1,
            33 => session.devices[device].bus() as c_int,
            34 | 50 => 0,
            // Compute capability 9.0.
            75 => 9,
            76 => 0,
            // Managed memory, host registration, registered pointers used as they are.
            83 | 99 | 91 => 1,
            // Pageable memory is out of the device's reach.
            88 | 100 => 0,
            // VMM, file descriptors, GPUDirect RDMA with VMM and without, its flush.
            102 | 103 | 110 | 116 | 117 => 1,
            // No device sees another device's writes in order.
            118 => 0,
            124 => c_int::from(dmabuf),
            125 => 1,
            // Fabric handles.
            128 => 0,
            // NUMA node of the host.
            134 => 0,
            other if (8..=163).contains(&other) => 0,
            _ => return Err(Error::INVALID_VALUE),
        })
    })
}
