//! Types and constants of the driver's C interface, named as in the vendor's `cuda.h`.
//!
//! `cuda-layout/check` compares this file with the headers of several CUDA versions.
#![allow(
    non_camel_case_types,
    clippy::upper_case_acronyms,
    reason = "names of the vendor's header, which readers search for"
)]

use std::ffi::{c_int, c_uint, c_ulonglong, c_void};

/// `CUresult`: zero is success.
pub(super) type CUresult = c_int;
/// The number of a device among those that the process sees.
pub(super) type CUdevice = c_int;
/// An address in the space that devices and host share.
pub(super) type CUdeviceptr = u64;
pub(super) type CUmemGenericAllocationHandle = c_ulonglong;
pub(super) type CUdevice_attribute = c_uint;
pub(super) type CUpointer_attribute = c_uint;
pub(super) type CUjit_option = c_uint;
pub(super) type CUstreamCaptureMode = c_uint;
pub(super) type CUstreamCaptureStatus = c_uint;
pub(super) type CUmemAllocationHandleType = c_uint;
pub(super) type CUmemAllocationGranularity_flags = c_uint;
pub(super) type CUmemRangeHandleType = c_uint;
pub(super) type CUflushGPUDirectRDMAWritesTarget = c_uint;
pub(super) type CUflushGPUDirectRDMAWritesScope = c_uint;
pub(super) type CUdriverProcAddressQueryResult = c_uint;
pub(super) type CUhostFn = unsafe extern "C" fn(*mut c_void);

/// A handle of the driver: a pointer that only the driver dereferences.
macro_rules! handles {
    ($($name:ident)*) => {$(
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[repr(transparent)]
        pub(super) struct $name(pub(super) usize);
    )*};
}

handles!(CUcontext CUstream CUevent CUmodule CUfunction);

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct CUuuid {
    pub(super) bytes: [u8; 16],
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct CUmemLocation {
    pub(super) kind: c_uint,
    pub(super) id: c_int,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct CUmemAllocationFlags {
    pub(super) compression_type: u8,
    pub(super) gpu_direct_rdma_capable: u8,
    pub(super) usage: u16,
    pub(super) reserved: [u8; 4],
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CUmemAllocationProp {
    pub(super) kind: c_uint,
    pub(super) requested_handle_types: CUmemAllocationHandleType,
    pub(super) location: CUmemLocation,
    pub(super) win32_handle_meta_data: *mut c_void,
    pub(super) alloc_flags: CUmemAllocationFlags,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CUmemAccessDesc {
    pub(super) location: CUmemLocation,
    pub(super) flags: c_uint,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct CUmemcpyAttributes {
    pub(super) src_access_order: c_uint,
    pub(super) src_loc_hint: CUmemLocation,
    pub(super) dst_loc_hint: CUmemLocation,
    pub(super) flags: c_uint,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct CUipcMemHandle {
    pub(super) reserved: [u8; 64],
}

pub(super) const CUDA_SUCCESS: CUresult = 0;
pub(super) const CUDA_ERROR_INVALID_VALUE: CUresult = 1;
pub(super) const CUDA_ERROR_NOT_INITIALIZED: CUresult = 3;
pub(super) const CUDA_ERROR_DEINITIALIZED: CUresult = 4;
pub(super) const CUDA_ERROR_STUB_LIBRARY: CUresult = 34;
pub(super) const CUDA_ERROR_DEVICE_UNAVAILABLE: CUresult = 46;
pub(super) const CUDA_ERROR_NO_DEVICE: CUresult = 100;
pub(super) const CUDA_ERROR_INVALID_DEVICE: CUresult = 101;
pub(super) const CUDA_ERROR_INVALID_CONTEXT: CUresult = 201;
pub(super) const CUDA_ERROR_ECC_UNCORRECTABLE: CUresult = 214;
pub(super) const CUDA_ERROR_NVLINK_UNCORRECTABLE: CUresult = 220;
pub(super) const CUDA_ERROR_CONTAINED: CUresult = 226;
pub(super) const CUDA_ERROR_INVALID_HANDLE: CUresult = 400;
pub(super) const CUDA_ERROR_NOT_READY: CUresult = 600;
pub(super) const CUDA_ERROR_ILLEGAL_ADDRESS: CUresult = 700;
pub(super) const CUDA_ERROR_LAUNCH_TIMEOUT: CUresult = 702;
pub(super) const CUDA_ERROR_CONTEXT_IS_DESTROYED: CUresult = 709;
pub(super) const CUDA_ERROR_ASSERT: CUresult = 710;
pub(super) const CUDA_ERROR_HARDWARE_STACK_ERROR: CUresult = 714;
pub(super) const CUDA_ERROR_LAUNCH_FAILED: CUresult = 719;
pub(super) const CUDA_ERROR_TENSOR_MEMORY_LEAK: CUresult = 721;
pub(super) const CUDA_ERROR_SYSTEM_NOT_READY: CUresult = 802;
pub(super) const CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: CUresult = 803;
pub(super) const CUDA_ERROR_MPS_CLIENT_TERMINATED: CUresult = 810;
pub(super) const CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: CUresult = 900;
pub(super) const CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD: CUresult = 908;
pub(super) const CUDA_ERROR_EXTERNAL_DEVICE: CUresult = 911;
pub(super) const CUDA_ERROR_UNKNOWN: CUresult = 999;

pub(super) const CU_GET_PROC_ADDRESS_LEGACY_STREAM: u64 = 1;

pub(super) const CU_STREAM_NON_BLOCKING: c_uint = 1;
pub(super) const CU_STREAM_CAPTURE_STATUS_NONE: CUstreamCaptureStatus = 0;
pub(super) const CU_STREAM_CAPTURE_MODE_RELAXED: CUstreamCaptureMode = 2;
pub(super) const CU_EVENT_BLOCKING_SYNC: c_uint = 1;
pub(super) const CU_EVENT_DISABLE_TIMING: c_uint = 2;

pub(super) const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;
pub(super) const CU_MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;

pub(super) const CU_MEMORYTYPE_HOST: c_uint = 1;
pub(super) const CU_MEMORYTYPE_DEVICE: c_uint = 2;

pub(super) const CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: c_uint = 1;
pub(super) const CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL: c_uint = 2;
pub(super) const CU_MEMCPY_SRC_ACCESS_ORDER_ANY: c_uint = 3;

pub(super) const CU_POINTER_ATTRIBUTE_CONTEXT: CUpointer_attribute = 1;
pub(super) const CU_POINTER_ATTRIBUTE_MEMORY_TYPE: CUpointer_attribute = 2;
pub(super) const CU_POINTER_ATTRIBUTE_BUFFER_ID: CUpointer_attribute = 7;
pub(super) const CU_POINTER_ATTRIBUTE_IS_MANAGED: CUpointer_attribute = 8;
pub(super) const CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: CUpointer_attribute = 9;
pub(super) const CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: CUpointer_attribute = 10;
pub(super) const CU_POINTER_ATTRIBUTE_RANGE_START_ADDR: CUpointer_attribute = 11;
pub(super) const CU_POINTER_ATTRIBUTE_RANGE_SIZE: CUpointer_attribute = 12;
pub(super) const CU_POINTER_ATTRIBUTE_MAPPED: CUpointer_attribute = 13;
pub(super) const CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: CUpointer_attribute = 15;
pub(super) const CU_POINTER_ATTRIBUTE_MAPPING_SIZE: CUpointer_attribute = 18;
pub(super) const CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR: CUpointer_attribute = 19;
pub(super) const CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID: CUpointer_attribute = 20;

pub(super) const CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: CUdevice_attribute = 16;
pub(super) const CU_DEVICE_ATTRIBUTE_COMPUTE_MODE: CUdevice_attribute = 20;
pub(super) const CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: CUdevice_attribute = 40;
pub(super) const CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: CUdevice_attribute = 41;
pub(super) const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: CUdevice_attribute = 75;
pub(super) const CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: CUdevice_attribute = 76;
pub(super) const CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: CUdevice_attribute =
    91;
pub(super) const CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED: CUdevice_attribute = 99;
pub(super) const CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: CUdevice_attribute = 102;
pub(super) const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED:
    CUdevice_attribute = 103;
pub(super) const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: CUdevice_attribute =
    110;
pub(super) const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED: CUdevice_attribute = 116;
pub(super) const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS: CUdevice_attribute = 117;
pub(super) const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: CUdevice_attribute = 118;
pub(super) const CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: CUdevice_attribute = 124;
pub(super) const CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: CUdevice_attribute = 128;

/// A value of the attribute `CU_DEVICE_ATTRIBUTE_COMPUTE_MODE`.
pub(super) const CU_COMPUTEMODE_EXCLUSIVE_PROCESS: c_int = 3;

pub(super) const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST: c_uint = 1;
pub(super) const CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: c_uint = 100;
pub(super) const CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES: c_uint = 200;
pub(super) const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX:
    CUflushGPUDirectRDMAWritesTarget = 0;
pub(super) const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER: CUflushGPUDirectRDMAWritesScope = 100;
pub(super) const CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_ALL_DEVICES: CUflushGPUDirectRDMAWritesScope =
    200;

pub(super) const CU_MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;
pub(super) const CU_MEM_LOCATION_TYPE_DEVICE: c_uint = 1;
pub(super) const CU_MEM_ACCESS_FLAGS_PROT_READWRITE: c_uint = 3;
pub(super) const CU_MEM_ALLOC_GRANULARITY_MINIMUM: CUmemAllocationGranularity_flags = 0;
pub(super) const CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR: CUmemAllocationHandleType = 1;
pub(super) const CU_MEM_HANDLE_TYPE_FABRIC: CUmemAllocationHandleType = 8;
pub(super) const CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: CUmemRangeHandleType = 1;
pub(super) const CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE: c_ulonglong = 1;

pub(super) const CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;

pub(super) const CU_JIT_ERROR_LOG_BUFFER: CUjit_option = 5;
pub(super) const CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: CUjit_option = 6;

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::{align_of, offset_of, size_of};

    /// Asserts a struct's size, alignment and offsets. The names in quotes are the header's fields, which
    /// `cuda-layout/check` compares with it.
    macro_rules! layout {
        ($name:ident size $size:literal align $align:literal $($($field:ident).+ $c_field:literal $offset:literal),* $(,)?) => {
            assert_eq!(size_of::<$name>(), $size, "size of {}", stringify!($name));
            assert_eq!(align_of::<$name>(), $align, "alignment of {}", stringify!($name));
            $(assert_eq!(offset_of!($name, $($field).+), $offset, "{}.{}", stringify!($name), $c_field);)*
        };
    }

    #[test]
    fn structs_have_the_layout_of_the_vendors_headers() {
        layout!(CUuuid size 16 align 1 bytes "bytes" 0);
        layout!(CUmemLocation size 8 align 4 kind "type" 0, id "id" 4);
        layout!(CUmemAllocationProp size 32 align 8 kind "type" 0, requested_handle_types "requestedHandleTypes" 4,
            location "location" 8, win32_handle_meta_data "win32HandleMetaData" 16, alloc_flags "allocFlags" 24,
            alloc_flags.compression_type "allocFlags.compressionType" 24,
            alloc_flags.gpu_direct_rdma_capable "allocFlags.gpuDirectRDMACapable" 25,
            alloc_flags.usage "allocFlags.usage" 26, alloc_flags.reserved "allocFlags.reserved" 28);
        layout!(CUmemAccessDesc size 12 align 4 location "location" 0, flags "flags" 8);
        layout!(CUmemcpyAttributes size 24 align 4 src_access_order "srcAccessOrder" 0,
            src_loc_hint "srcLocHint" 4, dst_loc_hint "dstLocHint" 12, flags "flags" 20);
        layout!(CUipcMemHandle size 64 align 1 reserved "reserved" 0);
    }

    #[test]
    fn handles_and_addresses_have_the_size_of_a_pointer() {
        assert_eq!(size_of::<CUcontext>(), 8);
        assert_eq!(size_of::<CUdeviceptr>(), size_of::<*mut c_void>());
        assert_eq!(size_of::<Option<CUhostFn>>(), size_of::<*mut c_void>());
    }
}
