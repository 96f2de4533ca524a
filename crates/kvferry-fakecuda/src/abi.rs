//! Constants and structures of the driver's C interface.
//!
//! Values, layouts and signatures were compared with `cuda.h` of the Python packages
//! `nvidia-cuda-runtime-cu12` 12.9.79 and `nvidia-cuda-runtime` 13.5.37, and the version in which
//! a signature appeared with their `cudaTypedefs.h`. The two headers agree on everything that
//! stands here.

use std::ffi::{c_int, c_uint, c_void};

/// A device address, or a host address in the unified address space.
pub(crate) type DevicePtr = u64;

/// The form of a function that `cuLaunchHostFunc` accepts.
pub(crate) type HostFn = unsafe extern "C" fn(*mut c_void);

/// A `CUresult` other than success.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Error(pub(crate) c_int);

pub(crate) type Result<T = ()> = std::result::Result<T, Error>;

impl Error {
    pub(crate) const INVALID_VALUE: Self = Self(1);
    pub(crate) const OUT_OF_MEMORY: Self = Self(2);
    pub(crate) const NOT_INITIALIZED: Self = Self(3);
    pub(crate) const NO_DEVICE: Self = Self(100);
    pub(crate) const INVALID_DEVICE: Self = Self(101);
    pub(crate) const INVALID_IMAGE: Self = Self(200);
    pub(crate) const INVALID_CONTEXT: Self = Self(201);
    pub(crate) const MAP_FAILED: Self = Self(205);
    pub(crate) const NO_BINARY_FOR_GPU: Self = Self(209);
    pub(crate) const PEER_ACCESS_UNSUPPORTED: Self = Self(217);
    pub(crate) const INVALID_PTX: Self = Self(218);
    pub(crate) const UNSUPPORTED_PTX_VERSION: Self = Self(222);
    pub(crate) const OPERATING_SYSTEM: Self = Self(304);
    pub(crate) const INVALID_HANDLE: Self = Self(400);
    pub(crate) const ILLEGAL_STATE: Self = Self(401);
    pub(crate) const NOT_FOUND: Self = Self(500);
    pub(crate) const NOT_READY: Self = Self(600);
    pub(crate) const ILLEGAL_ADDRESS: Self = Self(700);
    pub(crate) const LAUNCH_OUT_OF_RESOURCES: Self = Self(701);
    pub(crate) const LAUNCH_TIMEOUT: Self = Self(702);
    pub(crate) const PEER_ACCESS_ALREADY_ENABLED: Self = Self(704);
    pub(crate) const CONTEXT_IS_DESTROYED: Self = Self(709);
    pub(crate) const HOST_MEMORY_ALREADY_REGISTERED: Self = Self(712);
    pub(crate) const HOST_MEMORY_NOT_REGISTERED: Self = Self(713);
    pub(crate) const MISALIGNED_ADDRESS: Self = Self(716);
    pub(crate) const LAUNCH_FAILED: Self = Self(719);
    pub(crate) const NOT_PERMITTED: Self = Self(800);
    pub(crate) const NOT_SUPPORTED: Self = Self(801);
    pub(crate) const SYSTEM_DRIVER_MISMATCH: Self = Self(803);
    pub(crate) const STREAM_CAPTURE_UNSUPPORTED: Self = Self(900);
    pub(crate) const STREAM_CAPTURE_INVALIDATED: Self = Self(901);
    pub(crate) const STREAM_CAPTURE_UNMATCHED: Self = Self(903);
    pub(crate) const STREAM_CAPTURE_UNJOINED: Self = Self(904);
    pub(crate) const STREAM_CAPTURE_IMPLICIT: Self = Self(906);
    pub(crate) const CAPTURED_EVENT: Self = Self(907);
    pub(crate) const STREAM_CAPTURE_WRONG_THREAD: Self = Self(908);
    pub(crate) const UNKNOWN: Self = Self(999);

    /// The C name and the sentence of a result code, zero included.
    pub(crate) fn texts(code: c_int) -> Option<(&'static std::ffi::CStr, &'static std::ffi::CStr)> {
        let index = TEXTS.iter().position(|(c, _, _)| *c == code)?;
        let (_, name, text) = TEXTS[index];
        Some((name, text))
    }
}

/// Result codes that this driver returns, with their C names and sentences of our own.
const TEXTS: &[(c_int, &std::ffi::CStr, &std::ffi::CStr)] = &[
    (0, c"CUDA_SUCCESS", c"success"),
    (1, c"CUDA_ERROR_INVALID_VALUE", c"an argument is out of range"),
    (2, c"CUDA_ERROR_OUT_OF_MEMORY", c"memory is exhausted"),
    (3, c"CUDA_ERROR_NOT_INITIALIZED", c"cuInit has not run in this process"),
    (4, c"CUDA_ERROR_DEINITIALIZED", c"the driver is shutting down"),
    (46, c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"the device cannot be used now"),
    (100, c"CUDA_ERROR_NO_DEVICE", c"no device is visible"),
    (101, c"CUDA_ERROR_INVALID_DEVICE", c"the device ordinal is out of range"),
    (200, c"CUDA_ERROR_INVALID_IMAGE", c"the module image is malformed"),
    (201, c"CUDA_ERROR_INVALID_CONTEXT", c"no usable context is current"),
    (205, c"CUDA_ERROR_MAP_FAILED", c"the memory could not be mapped"),
    (209, c"CUDA_ERROR_NO_BINARY_FOR_GPU", c"the module has no code for the device"),
    (214, c"CUDA_ERROR_ECC_UNCORRECTABLE", c"memory has an error that cannot be corrected"),
    (217, c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", c"the devices have no peer access"),
    (218, c"CUDA_ERROR_INVALID_PTX", c"the PTX text does not compile"),
    (222, c"CUDA_ERROR_UNSUPPORTED_PTX_VERSION", c"the PTX version is newer than the driver"),
    (304, c"CUDA_ERROR_OPERATING_SYSTEM", c"a system call failed"),
    (400, c"CUDA_ERROR_INVALID_HANDLE", c"the handle is unknown"),
    (401, c"CUDA_ERROR_ILLEGAL_STATE", c"the object is in the wrong state"),
    (500, c"CUDA_ERROR_NOT_FOUND", c"the name is unknown"),
    (600, c"CUDA_ERROR_NOT_READY", c"the work has not completed"),
    (700, c"CUDA_ERROR_ILLEGAL_ADDRESS", c"the device touched memory that is not mapped"),
    (701, c"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", c"the launch needs too many resources"),
    (702, c"CUDA_ERROR_LAUNCH_TIMEOUT", c"the kernel ran too long"),
    (704, c"CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", c"peer access is enabled already"),
    (709, c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"the current context was destroyed"),
    (712, c"CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", c"the host range is registered already"),
    (713, c"CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", c"the host range is not registered"),
    (716, c"CUDA_ERROR_MISALIGNED_ADDRESS", c"the device made a misaligned access"),
    (719, c"CUDA_ERROR_LAUNCH_FAILED", c"the kernel failed"),
    (800, c"CUDA_ERROR_NOT_PERMITTED", c"the call is not permitted here"),
    (801, c"CUDA_ERROR_NOT_SUPPORTED", c"the device does not support the call"),
    (803, c"CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", c"library and kernel driver differ"),
    (900, c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"the call is not possible during capture"),
    (901, c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"an earlier error ended the capture"),
    (903, c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"the capture did not begin in this stream"),
    (904, c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED", c"a forked stream was not joined"),
    (906, c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"the legacy stream would join a capture"),
    (907, c"CUDA_ERROR_CAPTURED_EVENT", c"the event was recorded in a capture"),
    (908, c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"another thread began the capture"),
    (999, c"CUDA_ERROR_UNKNOWN", c"unknown error"),
];

/// `CUuuid`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Uuid(pub(crate) [u8; 16]);

/// `CUmemLocation`. Header 13 turned `id` into a union whose first member is the same field.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

pub(crate) const LOCATION_DEVICE: c_int = 1;

/// `CUmemcpyAttributes`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyAttributes {
    pub(crate) source_order: c_int,
    pub(crate) source_hint: Location,
    pub(crate) destination_hint: Location,
    pub(crate) flags: c_uint,
}

pub(crate) const ORDER_STREAM: c_int = 1;
pub(crate) const ORDER_DURING_CALL: c_int = 2;
pub(crate) const ORDER_ANY: c_int = 3;

/// `CUmemAllocationProp` with its nested `allocFlags`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AllocationProp {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location: Location,
    pub(crate) win32: *mut c_void,
    pub(crate) compression: u8,
    pub(crate) rdma_capable: u8,
    pub(crate) usage: u16,
    pub(crate) reserved: [u8; 4],
}

pub(crate) const ALLOCATION_PINNED: c_int = 1;
pub(crate) const HANDLE_POSIX_FD: c_int = 1;
pub(crate) const HANDLE_FABRIC: c_int = 8;

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct AccessDesc {
    pub(crate) location: Location,
    pub(crate) flags: c_int,
}

pub(crate) const ACCESS_READ: c_int = 1;
pub(crate) const ACCESS_READ_WRITE: c_int = 3;

/// `CUipcMemHandle`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

const _: () = {
    assert!(size_of::<Location>() == 8);
    assert!(size_of::<CopyAttributes>() == 24);
    assert!(std::mem::offset_of!(CopyAttributes, flags) == 20);
    assert!(size_of::<AllocationProp>() == 32);
    assert!(std::mem::offset_of!(AllocationProp, win32) == 16);
    assert!(std::mem::offset_of!(AllocationProp, usage) == 26);
    assert!(size_of::<AccessDesc>() == 12);
    assert!(size_of::<IpcHandle>() == 64);
};

/// `CUmemorytype`.
pub(crate) const MEMORY_HOST: c_uint = 1;
pub(crate) const MEMORY_DEVICE: c_uint = 2;

/// `CUstreamCaptureMode`.
pub(crate) const CAPTURE_GLOBAL: c_int = 0;
pub(crate) const CAPTURE_THREAD_LOCAL: c_int = 1;
pub(crate) const CAPTURE_RELAXED: c_int = 2;

pub(crate) const STREAM_NON_BLOCKING: c_uint = 1;
pub(crate) const EVENT_INTERPROCESS: c_uint = 4;
pub(crate) const EVENT_DISABLE_TIMING: c_uint = 2;

/// `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD`.
pub(crate) const STREAM_LEGACY: usize = 1;
pub(crate) const STREAM_PER_THREAD: usize = 2;
