//! The driver's functions, each with the CUDA version that introduced its signature.
//!
//! The driver keeps old signatures under the same name for old programs: a function is requested with the
//! version whose signature is declared here. The exported name, which the dynamic linker resolves, stands
//! for one signature for ever.

use super::abi::*;
use libloading::os::unix::Library;
use std::ffi::{CString, c_char, c_int, c_uint, c_ulonglong, c_void};

/// A function of the driver, and its name without a version's suffix.
pub(super) struct Symbol<F> {
    pub(super) name: &'static str,
    pub(super) function: Option<F>,
}

/// `cuGetProcAddress` of 12.0 and later.
type FindV2 = unsafe extern "C" fn(
    *const c_char,
    *mut *mut c_void,
    c_int,
    u64,
    *mut CUdriverProcAddressQueryResult,
) -> CUresult;
/// `cuGetProcAddress` of 11.3 to 11.8, which later drivers still export.
type FindV1 = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> CUresult;

/// Finds functions in a loaded library.
pub(super) struct Resolver<'a> {
    library: &'a Library,
    /// The CUDA version of the driver, such as 12080; zero if unknown.
    version: c_int,
    find_v2: Option<FindV2>,
    find_v1: Option<FindV1>,
}

impl<'a> Resolver<'a> {
    pub(super) fn new(library: &'a Library) -> Self {
        // SAFETY: the types are those of `cuda.h` for these exported names.
        let (find_v2, find_v1, get_version) = unsafe {
            (
                exported::<FindV2>(library, "cuGetProcAddress_v2"),
                exported::<FindV1>(library, "cuGetProcAddress"),
                exported::<unsafe extern "C" fn(*mut c_int) -> CUresult>(
                    library,
                    "cuDriverGetVersion",
                ),
            )
        };
        let mut version = 0;
        if let Some(get_version) = get_version {
            // SAFETY: the call writes one integer. It works before `cuInit`.
            let code = unsafe { get_version(&raw mut version) };
            if code != CUDA_SUCCESS {
                version = 0;
            }
        }
        Self { library, version, find_v2, find_v1 }
    }

    pub(super) fn version(&self) -> c_int {
        self.version
    }

    /// The function `name` with the signature of the CUDA version `version`, whose exported name is
    /// `exported_as`. `None` if the driver is older. The driver's own search has the last word, as for other
    /// libraries; exported names serve where there is no search.
    ///
    /// # Safety
    /// `F` is a pointer to a function with that signature.
    unsafe fn function<F: Copy>(&self, name: &str, version: c_int, exported_as: &str) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // An older driver could only answer with an older signature.
        if self.version < version {
            return None;
        }
        if self.find_v2.is_none() && self.find_v1.is_none() {
            // SAFETY: the exported name stands for the signature that the caller promised.
            return unsafe { exported(self.library, exported_as) };
        }
        let at = self.find(name, version)?;
        // SAFETY: a function pointer has the size of the address, and the caller promised its type.
        Some(unsafe { std::mem::transmute_copy(&at) })
    }

    fn find(&self, name: &str, version: c_int) -> Option<*mut c_void> {
        let name = CString::new(name).ok()?;
        let mut at = std::ptr::null_mut();
        let flags = CU_GET_PROC_ADDRESS_LEGACY_STREAM;
        let code = match self.find_v2 {
            Some(find) => {
                let mut status = 0;
                // SAFETY: the name ends in a zero byte; the results are written to local variables.
                unsafe { find(name.as_ptr(), &raw mut at, version, flags, &raw mut status) }
            }
            // SAFETY: as above.
            None => unsafe { self.find_v1?(name.as_ptr(), &raw mut at, version, flags) },
        };
        (code == CUDA_SUCCESS && !at.is_null()).then_some(at)
    }
}

/// # Safety
/// `F` is a pointer to a function with the signature of that name.
unsafe fn exported<F: Copy>(library: &Library, name: &str) -> Option<F> {
    // SAFETY: the caller keeps the promise of this function.
    unsafe { library.get::<F>(name.as_bytes()) }.ok().map(|symbol| *symbol)
}

/// Declares [`Table`]: `required` or `optional`, the field, the driver's name, the version of the signature,
/// the exported name, the arguments. `cuda-layout/check` reads these lines.
macro_rules! table {
    ($($need:ident $field:ident: $name:literal $version:literal $exported:literal ($($arg:ty),*);)*) => {
        /// The driver's functions. Optional ones may be absent.
        pub(super) struct Table {
            $(pub(super) $field: Symbol<unsafe extern "C" fn($($arg),*) -> CUresult>,)*
        }

        impl Table {
            pub(super) fn resolve(resolver: &Resolver<'_>) -> Self {
                Self {$(
                    $field: Symbol {
                        name: $name,
                        // SAFETY: the declared type is that of `cuda.h` for this name and version.
                        function: unsafe { resolver.function($name, $version, $exported) },
                    },
                )*}
            }

            /// Exported names of required functions that the library does not have.
            pub(super) fn missing(&self) -> Vec<&'static str> {
                let all = [$((stringify!($need) == "required" && self.$field.function.is_none(), $exported)),*];
                all.into_iter().filter_map(|(missing, name)| missing.then_some(name)).collect()
            }
        }
    };
}

table! {
    required driver_get_version: "cuDriverGetVersion" 2020 "cuDriverGetVersion" (*mut c_int);
    required init: "cuInit" 2000 "cuInit" (c_uint);
    required device_get_count: "cuDeviceGetCount" 2000 "cuDeviceGetCount" (*mut c_int);
    required device_get: "cuDeviceGet" 2000 "cuDeviceGet" (*mut CUdevice, c_int);
    required device_get_name: "cuDeviceGetName" 2000 "cuDeviceGetName" (*mut c_char, c_int, CUdevice);
    required device_get_uuid: "cuDeviceGetUuid" 11040 "cuDeviceGetUuid_v2" (*mut CUuuid, CUdevice);
    required device_get_pci_bus_id: "cuDeviceGetPCIBusId" 4010 "cuDeviceGetPCIBusId" (*mut c_char, c_int, CUdevice);
    required device_get_attribute: "cuDeviceGetAttribute" 2000 "cuDeviceGetAttribute" (*mut c_int, CUdevice_attribute, CUdevice);
    required primary_retain: "cuDevicePrimaryCtxRetain" 7000 "cuDevicePrimaryCtxRetain" (*mut CUcontext, CUdevice);
    required primary_release: "cuDevicePrimaryCtxRelease" 11000 "cuDevicePrimaryCtxRelease_v2" (CUdevice);
    required primary_get_state: "cuDevicePrimaryCtxGetState" 7000 "cuDevicePrimaryCtxGetState" (CUdevice, *mut c_uint, *mut c_int);
    required ctx_push: "cuCtxPushCurrent" 4000 "cuCtxPushCurrent_v2" (CUcontext);
    required ctx_pop: "cuCtxPopCurrent" 4000 "cuCtxPopCurrent_v2" (*mut CUcontext);
    required ctx_get_current: "cuCtxGetCurrent" 4000 "cuCtxGetCurrent" (*mut CUcontext);
    required ctx_get_device: "cuCtxGetDevice" 2000 "cuCtxGetDevice" (*mut CUdevice);
    required ctx_synchronize: "cuCtxSynchronize" 2000 "cuCtxSynchronize" ();
    required pointer_get_attributes: "cuPointerGetAttributes" 7000 "cuPointerGetAttributes" (c_uint, *mut CUpointer_attribute, *mut *mut c_void, CUdeviceptr);
    required memcpy: "cuMemcpyAsync" 4000 "cuMemcpyAsync" (CUdeviceptr, CUdeviceptr, usize, CUstream);
    required stream_create: "cuStreamCreate" 2000 "cuStreamCreate" (*mut CUstream, c_uint);
    required stream_destroy: "cuStreamDestroy" 4000 "cuStreamDestroy_v2" (CUstream);
    required stream_query: "cuStreamQuery" 2000 "cuStreamQuery" (CUstream);
    required stream_synchronize: "cuStreamSynchronize" 2000 "cuStreamSynchronize" (CUstream);
    required stream_wait_event: "cuStreamWaitEvent" 3020 "cuStreamWaitEvent" (CUstream, CUevent, c_uint);
    required stream_is_capturing: "cuStreamIsCapturing" 10000 "cuStreamIsCapturing" (CUstream, *mut CUstreamCaptureStatus);
    required exchange_capture_mode: "cuThreadExchangeStreamCaptureMode" 10010 "cuThreadExchangeStreamCaptureMode" (*mut CUstreamCaptureMode);
    required event_create: "cuEventCreate" 2000 "cuEventCreate" (*mut CUevent, c_uint);
    required event_destroy: "cuEventDestroy" 4000 "cuEventDestroy_v2" (CUevent);
    required event_record: "cuEventRecord" 2000 "cuEventRecord" (CUevent, CUstream);
    required event_query: "cuEventQuery" 2000 "cuEventQuery" (CUevent);
    required event_synchronize: "cuEventSynchronize" 2000 "cuEventSynchronize" (CUevent);
    optional get_error_name: "cuGetErrorName" 6000 "cuGetErrorName" (CUresult, *mut *const c_char);
    optional get_error_string: "cuGetErrorString" 6000 "cuGetErrorString" (CUresult, *mut *const c_char);
    optional get_address_range: "cuMemGetAddressRange" 3020 "cuMemGetAddressRange_v2" (*mut CUdeviceptr, *mut usize, CUdeviceptr);
    optional mem_get_info: "cuMemGetInfo" 3020 "cuMemGetInfo_v2" (*mut usize, *mut usize);
    optional mem_alloc: "cuMemAlloc" 3020 "cuMemAlloc_v2" (*mut CUdeviceptr, usize);
    optional mem_free: "cuMemFree" 3020 "cuMemFree_v2" (CUdeviceptr);
    optional host_register: "cuMemHostRegister" 6050 "cuMemHostRegister_v2" (*mut c_void, usize, c_uint);
    optional host_unregister: "cuMemHostUnregister" 4000 "cuMemHostUnregister" (*mut c_void);
    optional host_get_device_pointer: "cuMemHostGetDevicePointer" 3020 "cuMemHostGetDevicePointer_v2" (*mut CUdeviceptr, *mut c_void, c_uint);
    optional memcpy_batch_v1: "cuMemcpyBatchAsync" 12080 "cuMemcpyBatchAsync" (*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CUmemcpyAttributes, *mut usize, usize, *mut usize, CUstream);
    optional memcpy_batch_v2: "cuMemcpyBatchAsync" 13000 "cuMemcpyBatchAsync_v2" (*mut CUdeviceptr, *mut CUdeviceptr, *mut usize, usize, *mut CUmemcpyAttributes, *mut usize, usize, CUstream);
    optional memset: "cuMemsetD8Async" 3020 "cuMemsetD8Async" (CUdeviceptr, u8, usize, CUstream);
    optional stream_get_ctx: "cuStreamGetCtx" 9020 "cuStreamGetCtx" (CUstream, *mut CUcontext);
    optional launch_host_func: "cuLaunchHostFunc" 10000 "cuLaunchHostFunc" (CUstream, CUhostFn, *mut c_void);
    optional module_load: "cuModuleLoadDataEx" 2010 "cuModuleLoadDataEx" (*mut CUmodule, *const c_void, c_uint, *mut CUjit_option, *mut *mut c_void);
    optional module_unload: "cuModuleUnload" 2000 "cuModuleUnload" (CUmodule);
    optional module_get_function: "cuModuleGetFunction" 2000 "cuModuleGetFunction" (*mut CUfunction, CUmodule, *const c_char);
    optional launch_kernel: "cuLaunchKernel" 4000 "cuLaunchKernel" (CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream, *mut *mut c_void, *mut *mut c_void);
    optional retain_allocation: "cuMemRetainAllocationHandle" 11000 "cuMemRetainAllocationHandle" (*mut CUmemGenericAllocationHandle, *mut c_void);
    optional mem_release: "cuMemRelease" 10020 "cuMemRelease" (CUmemGenericAllocationHandle);
    optional allocation_properties: "cuMemGetAllocationPropertiesFromHandle" 10020 "cuMemGetAllocationPropertiesFromHandle" (*mut CUmemAllocationProp, CUmemGenericAllocationHandle);
    optional allocation_granularity: "cuMemGetAllocationGranularity" 10020 "cuMemGetAllocationGranularity" (*mut usize, *const CUmemAllocationProp, CUmemAllocationGranularity_flags);
    optional address_reserve: "cuMemAddressReserve" 10020 "cuMemAddressReserve" (*mut CUdeviceptr, usize, usize, CUdeviceptr, c_ulonglong);
    optional address_free: "cuMemAddressFree" 10020 "cuMemAddressFree" (CUdeviceptr, usize);
    optional mem_create: "cuMemCreate" 10020 "cuMemCreate" (*mut CUmemGenericAllocationHandle, usize, *const CUmemAllocationProp, c_ulonglong);
    optional mem_map: "cuMemMap" 10020 "cuMemMap" (CUdeviceptr, usize, usize, CUmemGenericAllocationHandle, c_ulonglong);
    optional mem_unmap: "cuMemUnmap" 10020 "cuMemUnmap" (CUdeviceptr, usize);
    optional mem_set_access: "cuMemSetAccess" 10020 "cuMemSetAccess" (CUdeviceptr, usize, *const CUmemAccessDesc, usize);
    optional mem_export: "cuMemExportToShareableHandle" 10020 "cuMemExportToShareableHandle" (*mut c_void, CUmemGenericAllocationHandle, CUmemAllocationHandleType, c_ulonglong);
    optional mem_import: "cuMemImportFromShareableHandle" 10020 "cuMemImportFromShareableHandle" (*mut CUmemGenericAllocationHandle, *mut c_void, CUmemAllocationHandleType);
    optional ipc_get: "cuIpcGetMemHandle" 4010 "cuIpcGetMemHandle" (*mut CUipcMemHandle, CUdeviceptr);
    optional ipc_open: "cuIpcOpenMemHandle" 11000 "cuIpcOpenMemHandle_v2" (*mut CUdeviceptr, CUipcMemHandle, c_uint);
    optional ipc_close: "cuIpcCloseMemHandle" 4010 "cuIpcCloseMemHandle" (CUdeviceptr);
    optional handle_for_range: "cuMemGetHandleForAddressRange" 11070 "cuMemGetHandleForAddressRange" (*mut c_void, CUdeviceptr, usize, CUmemRangeHandleType, c_ulonglong);
    optional flush_rdma_writes: "cuFlushGPUDirectRDMAWrites" 11030 "cuFlushGPUDirectRDMAWrites" (CUflushGPUDirectRDMAWritesTarget, CUflushGPUDirectRDMAWritesScope);
}
