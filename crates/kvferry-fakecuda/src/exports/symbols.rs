//! `cuGetProcAddress`: which function a name means for which version.

use std::ffi::{c_int, c_void};

use super::*;
use crate::abi::Error;
use crate::faults::Fault;

/// A base name, the version in which this form of the function appeared, and the function.
struct Symbol(&'static str, c_int, *const c_void);

const FOUND: c_int = 0;
const NAME_UNKNOWN: c_int = 1;
const VERSION_TOO_OLD: c_int = 2;

/// All symbols, the forms of one name in the order of their versions.
const SYMBOLS: [Symbol; 81] = [
    Symbol("cuInit", 2000, devices::cuInit as *const c_void),
    Symbol("cuDriverGetVersion", 2020, devices::cuDriverGetVersion as *const c_void),
    Symbol("cuGetProcAddress", 11030, cuGetProcAddress as *const c_void),
    Symbol("cuGetProcAddress", 12000, cuGetProcAddress_v2 as *const c_void),
    Symbol("cuGetErrorName", 6000, devices::cuGetErrorName as *const c_void),
    Symbol("cuGetErrorString", 6000, devices::cuGetErrorString as *const c_void),
    Symbol("cuDeviceGetCount", 2000, devices::cuDeviceGetCount as *const c_void),
    Symbol("cuDeviceGet", 2000, devices::cuDeviceGet as *const c_void),
    Symbol("cuDeviceGetName", 2000, devices::cuDeviceGetName as *const c_void),
    Symbol("cuDeviceGetUuid", 9020, devices::cuDeviceGetUuid as *const c_void),
    Symbol("cuDeviceGetUuid", 11040, devices::cuDeviceGetUuid_v2 as *const c_void),
    Symbol("cuDeviceGetPCIBusId", 4010, devices::cuDeviceGetPCIBusId as *const c_void),
    Symbol("cuDeviceGetAttribute", 2000, devices::cuDeviceGetAttribute as *const c_void),
    Symbol("cuDeviceTotalMem", 3020, devices::cuDeviceTotalMem_v2 as *const c_void),
    Symbol("cuDeviceCanAccessPeer", 4000, devices::cuDeviceCanAccessPeer as *const c_void),
    Symbol("cuDevicePrimaryCtxRetain", 7000, contexts::cuDevicePrimaryCtxRetain as *const c_void),
    Symbol(
        "cuDevicePrimaryCtxRelease",
        11000,
        contexts::cuDevicePrimaryCtxRelease_v2 as *const c_void,
    ),
    Symbol(
        "cuDevicePrimaryCtxGetState",
        7000,
        contexts::cuDevicePrimaryCtxGetState as *const c_void,
    ),
    Symbol("cuCtxPushCurrent", 4000, contexts::cuCtxPushCurrent_v2 as *const c_void),
    Symbol("cuCtxPopCurrent", 4000, contexts::cuCtxPopCurrent_v2 as *const c_void),
    Symbol("cuCtxGetCurrent", 4000, contexts::cuCtxGetCurrent as *const c_void),
    Symbol("cuCtxSetCurrent", 4000, contexts::cuCtxSetCurrent as *const c_void),
    Symbol("cuCtxGetDevice", 2000, contexts::cuCtxGetDevice as *const c_void),
    Symbol("cuCtxSynchronize", 2000, contexts::cuCtxSynchronize as *const c_void),
    Symbol("cuCtxEnablePeerAccess", 4000, contexts::cuCtxEnablePeerAccess as *const c_void),
    Symbol("cuPointerGetAttribute", 4000, pointers::cuPointerGetAttribute as *const c_void),
    Symbol("cuPointerGetAttributes", 7000, pointers::cuPointerGetAttributes as *const c_void),
    Symbol("cuMemGetAddressRange", 3020, memory::cuMemGetAddressRange_v2 as *const c_void),
    Symbol("cuMemGetInfo", 3020, memory::cuMemGetInfo_v2 as *const c_void),
    Symbol("cuMemAlloc", 3020, memory::cuMemAlloc_v2 as *const c_void),
    Symbol("cuMemFree", 3020, memory::cuMemFree_v2 as *const c_void),
    Symbol("cuMemAllocHost", 3020, memory::cuMemAllocHost_v2 as *const c_void),
    Symbol("cuMemFreeHost", 2000, memory::cuMemFreeHost as *const c_void),
    Symbol("cuMemAllocManaged", 6000, memory::cuMemAllocManaged as *const c_void),
    Symbol("cuMemHostRegister", 6050, memory::cuMemHostRegister_v2 as *const c_void),
    Symbol("cuMemHostUnregister", 4000, memory::cuMemHostUnregister as *const c_void),
    Symbol(
        "cuMemHostGetDevicePointer",
        3020,
        memory::cuMemHostGetDevicePointer_v2 as *const c_void,
    ),
    Symbol("cuMemcpyAsync", 4000, copies::cuMemcpyAsync as *const c_void),
    Symbol("cuMemcpyBatchAsync", 12080, copies::cuMemcpyBatchAsync as *const c_void),
    Symbol("cuMemcpyBatchAsync", 13000, copies::cuMemcpyBatchAsync_v2 as *const c_void),
    Symbol("cuMemsetD8Async", 3020, copies::cuMemsetD8Async as *const c_void),
    Symbol("cuStreamCreate", 2000, streams::cuStreamCreate as *const c_void),
    Symbol("cuStreamDestroy", 4000, streams::cuStreamDestroy_v2 as *const c_void),
    Symbol("cuStreamQuery", 2000, streams::cuStreamQuery as *const c_void),
    Symbol("cuStreamSynchronize", 2000, streams::cuStreamSynchronize as *const c_void),
    Symbol("cuStreamWaitEvent", 3020, streams::cuStreamWaitEvent as *const c_void),
    Symbol("cuStreamIsCapturing", 10000, streams::cuStreamIsCapturing as *const c_void),
    Symbol("cuStreamBeginCapture", 10010, streams::cuStreamBeginCapture_v2 as *const c_void),
    Symbol("cuStreamEndCapture", 10000, streams::cuStreamEndCapture as *const c_void),
    Symbol("cuStreamGetCtx", 9020, streams::cuStreamGetCtx as *const c_void),
    Symbol("cuGraphDestroy", 10000, streams::cuGraphDestroy as *const c_void),
    Symbol(
        "cuThreadExchangeStreamCaptureMode",
        10010,
        streams::cuThreadExchangeStreamCaptureMode as *const c_void,
    ),
    Symbol("cuEventCreate", 2000, events::cuEventCreate as *const c_void),
    Symbol("cuEventDestroy", 4000, events::cuEventDestroy_v2 as *const c_void),
    Symbol("cuEventRecord", 2000, events::cuEventRecord as *const c_void),
    Symbol("cuEventQuery", 2000, events::cuEventQuery as *const c_void),
    Symbol("cuEventSynchronize", 2000, events::cuEventSynchronize as *const c_void),
    Symbol("cuEventElapsedTime", 2000, events::cuEventElapsedTime as *const c_void),
    Symbol("cuLaunchHostFunc", 10000, streams::cuLaunchHostFunc as *const c_void),
    Symbol("cuModuleLoadDataEx", 2010, modules::cuModuleLoadDataEx as *const c_void),
    Symbol("cuModuleLoadData", 2000, modules::cuModuleLoadData as *const c_void),
    Symbol("cuModuleUnload", 2000, modules::cuModuleUnload as *const c_void),
    Symbol("cuModuleGetFunction", 2000, modules::cuModuleGetFunction as *const c_void),
    Symbol("cuLaunchKernel", 4000, modules::cuLaunchKernel as *const c_void),
    Symbol("cuMemAddressReserve", 10020, vmm::cuMemAddressReserve as *const c_void),
    Symbol("cuMemAddressFree", 10020, vmm::cuMemAddressFree as *const c_void),
    Symbol("cuMemCreate", 10020, vmm::cuMemCreate as *const c_void),
    Symbol("cuMemRelease", 10020, vmm::cuMemRelease as *const c_void),
    Symbol("cuMemMap", 10020, vmm::cuMemMap as *const c_void),
    Symbol("cuMemUnmap", 10020, vmm::cuMemUnmap as *const c_void),
    Symbol("cuMemSetAccess", 10020, vmm::cuMemSetAccess as *const c_void),
    Symbol(
        "cuMemGetAllocationGranularity",
        10020,
        vmm::cuMemGetAllocationGranularity as *const c_void,
    ),
    Symbol("cuMemRetainAllocationHandle", 11000, vmm::cuMemRetainAllocationHandle as *const c_void),
    Symbol(
        "cuMemGetAllocationPropertiesFromHandle",
        10020,
        vmm::cuMemGetAllocationPropertiesFromHandle as *const c_void,
    ),
    Symbol(
        "cuMemExportToShareableHandle",
        10020,
        vmm::cuMemExportToShareableHandle as *const c_void,
    ),
    Symbol(
        "cuMemImportFromShareableHandle",
        10020,
        vmm::cuMemImportFromShareableHandle as *const c_void,
    ),
    Symbol(
        "cuMemGetHandleForAddressRange",
        11070,
        ipc::cuMemGetHandleForAddressRange as *const c_void,
    ),
    Symbol("cuIpcGetMemHandle", 4010, ipc::cuIpcGetMemHandle as *const c_void),
    Symbol("cuIpcOpenMemHandle", 11000, ipc::cuIpcOpenMemHandle_v2 as *const c_void),
    Symbol("cuIpcCloseMemHandle", 4010, ipc::cuIpcCloseMemHandle as *const c_void),
    Symbol("cuFlushGPUDirectRDMAWrites", 11030, ipc::cuFlushGPUDirectRDMAWrites as *const c_void),
];

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress(
    name: Text,
    function: Out<*const c_void>,
    version: c_int,
    flags: u64,
) -> c_int {
    enter_early("cuGetProcAddress", |session| {
        find(session, &name, &function, version, flags, &Out(std::ptr::null_mut()))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetProcAddress_v2(
    name: Text,
    function: Out<*const c_void>,
    version: c_int,
    flags: u64,
    status: Out<c_int>,
) -> c_int {
    enter_early("cuGetProcAddress_v2", |session| {
        find(session, &name, &function, version, flags, &status)
    })
}

fn find(
    session: &mut Session,
    name: &Text,
    function: &Out<*const c_void>,
    version: c_int,
    flags: u64,
    status: &Out<c_int>,
) -> Result {
    let name = name.read()?;
    function.set(std::ptr::null())?;
    if flags > 2 || version > session.config.version {
        return Err(Error::INVALID_VALUE);
    }
    let denied = session.faults.hit(Fault::MissingSymbol) || session.config.hidden.contains(&name);
    let driver = session.config.version;
    let forms = SYMBOLS.into_iter().filter(|s| !denied && s.0 == name && s.1 <= driver);
    let mut verdict = NAME_UNKNOWN;
    for Symbol(_, since, address) in forms {
        if since <= version {
            function.set(address)?;
            verdict = FOUND;
        } else if verdict == NAME_UNKNOWN {
            verdict = VERSION_TOO_OLD;
        }
    }
    status.set_if_wanted(verdict);
    if verdict == FOUND || session.config.missing_succeeds { Ok(()) } else { Err(Error::NOT_FOUND) }
}
