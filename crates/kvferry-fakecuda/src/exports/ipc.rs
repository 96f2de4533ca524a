//! Memory handles between processes, dma-buf, and the flush of remote writes.

use std::ffi::{c_int, c_uint, c_ulonglong};
use std::os::fd::IntoRawFd;

use super::{Out, enter_current};
use crate::abi::{DevicePtr, Error, IpcHandle};
use crate::faults::Fault;
use crate::ipc::{Description, Use};
use crate::memory::Kind;
use crate::segments::{PAGE, Segment};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`.
const LAZY_PEER_ACCESS: c_uint = 1;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`, and the flag that asks for a mapping over PCIe.
const RANGE_DMABUF: c_int = 1;
const RANGE_FLAG_PCIE: c_ulonglong = 1;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetMemHandle(
    handle: Out<IpcHandle>,
    pointer: DevicePtr,
) -> c_int {
    enter_current("cuIpcGetMemHandle", |session, _| {
        handle.require()?;
        if session.faults.hit(Fault::IpcRefused) {
            return Err(Error::NOT_SUPPORTED);
        }
        let refused = session.faults.hit(Fault::IpcNotCapable);
        // A pointer into an allocation stands for the whole of it.
        let mapping = session.memory.mapping(pointer).ok_or(Error::INVALID_VALUE)?;
        if mapping.kind != Kind::Allocation || refused {
            return Err(Error::INVALID_VALUE);
        }
        let physical = session.devices[mapping.device].physical;
        handle.set(Description::of(mapping, physical).encode())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    pointer: Out<DevicePtr>,
    handle: IpcHandle,
    flags: c_uint,
) -> c_int {
    enter_current("cuIpcOpenMemHandle_v2", |session, device| {
        pointer.require()?;
        if flags != LAZY_PEER_ACCESS {
            return Err(Error::INVALID_VALUE);
        }
        for (fault, error) in [
            (Fault::IpcRefused, Error::NOT_SUPPORTED),
            (Fault::IpcExporterDead, Error::INVALID_HANDLE),
            (Fault::IpcFreed, Error::MAP_FAILED),
            (Fault::IpcFull, Error::OUT_OF_MEMORY),
        ] {
            if session.faults.hit(fault) {
                return Err(error);
            }
        }
        let description = Description::decode(&handle)?;
        if description.process == std::process::id() {
            return Err(Error::INVALID_CONTEXT);
        }
        let owner = description.device(session)?;
        if !session.peer(device, owner) {
            return Err(Error::PEER_ACCESS_UNSUPPORTED);
        }
        let mut open = session.memory.mappings.values_mut();
        let again = open.find(|m| m.kind == Kind::Ipc && description.names(&m.segment));
        if let Some(mapping) = again {
            mapping.opened += 1;
            return pointer.set(mapping.base);
        }
        let open = session.memory.mappings.values().filter(|m| m.kind == Kind::Ipc).count();
        if open as u64 >= session.config.ipc_limit {
            return Err(Error::OUT_OF_MEMORY);
        }
        let segment = description.open()?;
        let base = session.memory.map_ipc(segment, description.len(), owner)?;
        pointer.set(base)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcCloseMemHandle(pointer: DevicePtr) -> c_int {
    enter_current("cuIpcCloseMemHandle", |session, _| {
        let mapping = session.memory.mappings.get_mut(&pointer).ok_or(Error::INVALID_VALUE)?;
        if mapping.kind != Kind::Ipc {
            return Err(Error::INVALID_VALUE);
        }
        mapping.opened -= 1;
        if mapping.opened == 0 {
            let mapping = session.memory.free(pointer)?;
            session.checker.forget_range(mapping.base, mapping.len);
        }
        Ok(())
    })
}

/// The descriptor has the range's length and a name, and no bytes of the device.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: Out<c_int>,
    pointer: DevicePtr,
    len: usize,
    kind: c_int,
    flags: c_ulonglong,
) -> c_int {
    enter_current("cuMemGetHandleForAddressRange", |session, _| {
        handle.require()?;
        let len = len as u64;
        if kind != RANGE_DMABUF || flags > RANGE_FLAG_PCIE || len == 0 {
            return Err(Error::INVALID_VALUE);
        }
        if !pointer.is_multiple_of(PAGE) || !len.is_multiple_of(PAGE) {
            return Err(Error::INVALID_VALUE);
        }
        let flag_refused = flags != 0 && session.faults.hit(Fault::DmabufFlagRefused);
        if flag_refused || session.faults.hit(Fault::DmabufUnsupported) {
            return Err(Error::NOT_SUPPORTED);
        }
        if session.faults.hit(Fault::DmabufNotSupp) {
            return Err(Error::OPERATING_SYSTEM);
        }
        let (mut at, mut chunks, mut device) = (pointer, 0, 0);
        while at < pointer + len {
            let mapping = session.memory.mapping(at).ok_or(Error::INVALID_VALUE)?;
            if mapping.kind == Kind::Managed {
                return Err(Error::INVALID_VALUE);
            }
            (at, chunks, device) = (mapping.base + mapping.len, chunks + 1, mapping.device);
            at = at.next_multiple_of(PAGE);
        }
        if chunks > session.config.dmabuf_chunks {
            return Err(Error::INVALID_VALUE);
        }
        let name = session.segment_name(Use::Dmabuf, device);
        let fd = Segment::create(len, name, 0)?.fd().try_clone();
        handle.set(fd.map_err(|_| Error::OPERATING_SYSTEM)?.into_raw_fd())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuFlushGPUDirectRDMAWrites(target: c_int, scope: c_int) -> c_int {
    enter_current("cuFlushGPUDirectRDMAWrites", |_, _| {
        if target == 0 && (scope == 100 || scope == 200) {
            Ok(())
        } else {
            Err(Error::INVALID_VALUE)
        }
    })
}
