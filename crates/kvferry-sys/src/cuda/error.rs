//! What can go wrong with the driver.

use super::abi::*;
use std::fmt;

/// The reason why this process can't use the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unavailable {
    /// There is no library of that name.
    NoLibrary(String),
    /// The library exists, but the dynamic linker refuses it for this reason.
    BrokenLibrary(String),
    /// The driver's CUDA version, such as 11020, is below [`OLDEST_VERSION`].
    TooOld(i32),
    /// The library lacks these functions.
    MissingSymbols(Vec<&'static str>),
    /// The driver works and sees no device.
    NoDevice,
    /// The library and the kernel's module are of different versions.
    Mismatch,
    /// `cuInit` failed with another code.
    Init(DriverError),
    /// The process is a child that was forked after its parent had begun to use the driver.
    Forked,
}

impl Unavailable {
    /// True if the library was not asked to initialise the driver.
    pub(super) fn is_before_init(&self) -> bool {
        matches!(
            self,
            Self::NoLibrary(_) | Self::BrokenLibrary(_) | Self::TooOld(_) | Self::MissingSymbols(_)
        )
    }
}

/// The oldest CUDA version of a driver that is used: 11.4.
pub const OLDEST_VERSION: i32 = 11_040;

/// Missing functions that a message names.
const SYMBOLS_SHOWN_MAX: usize = 3;

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary(file) => write!(
                f,
                "no CUDA driver: {file} was not found; install the NVIDIA driver, or start the container \
                 with its GPUs"
            ),
            Self::BrokenLibrary(why) => {
                write!(f, "the CUDA driver's library can't be loaded ({why}); reinstall the driver")
            }
            Self::TooOld(version) => write!(
                f,
                "the driver supports CUDA {}.{} only; install a driver for CUDA 11.4 or later",
                version / 1000,
                version % 1000 / 10
            ),
            Self::MissingSymbols(names) => {
                write!(f, "the CUDA driver's library has no ")?;
                let shown = names.len().min(SYMBOLS_SHOWN_MAX);
                write!(f, "{}", names[..shown].join(", "))?;
                if names.len() > shown {
                    write!(f, " and {} more functions", names.len() - shown)?;
                }
                write!(f, "; is another library in its place?")
            }
            Self::NoDevice => write!(
                f,
                "the CUDA driver sees no device; check CUDA_VISIBLE_DEVICES and the container's devices"
            ),
            Self::Mismatch => write!(
                f,
                "the CUDA driver's library does not fit the loaded kernel module (803); restart the \
                 machine after a driver update, or use the host's library in the container"
            ),
            Self::Init(error) => {
                write!(f, "{error}")?;
                match error.code {
                    CUDA_ERROR_NOT_INITIALIZED => write!(
                        f,
                        "; CUDA does not work in a child that was forked from a process that used it: \
                         start the process with `spawn`"
                    ),
                    CUDA_ERROR_STUB_LIBRARY => write!(
                        f,
                        "; the library is the toolkit's stub: remove its folder from LD_LIBRARY_PATH"
                    ),
                    CUDA_ERROR_SYSTEM_NOT_READY => {
                        write!(
                            f,
                            "; start the services of the system, such as nvidia-fabricmanager"
                        )
                    }
                    _ => write!(f, "; check `nvidia-smi` and the kernel's log"),
                }
            }
            Self::Forked => write!(
                f,
                "this process was forked after its parent had begun to use CUDA; start it with `spawn`"
            ),
        }
    }
}

impl std::error::Error for Unavailable {}

/// A call that the driver refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DriverError {
    /// The driver's function.
    pub call: &'static str,
    /// The driver's `CUresult`.
    pub code: i32,
    /// The code's name, given by the driver, such as `CUDA_ERROR_INVALID_VALUE`.
    pub name: &'static str,
    /// The driver's words for the code.
    pub message: &'static str,
}

impl DriverError {
    /// Whether the error leaves the device unusable for this process: every later call fails with it.
    pub fn is_sticky(&self) -> bool {
        matches!(
            self.code,
            CUDA_ERROR_DEINITIALIZED
                | CUDA_ERROR_ECC_UNCORRECTABLE
                | CUDA_ERROR_NVLINK_UNCORRECTABLE
                | CUDA_ERROR_CONTAINED
                | CUDA_ERROR_ILLEGAL_ADDRESS
                | CUDA_ERROR_LAUNCH_TIMEOUT
                | CUDA_ERROR_CONTEXT_IS_DESTROYED
                | CUDA_ERROR_ASSERT
                | CUDA_ERROR_HARDWARE_STACK_ERROR
                ..=CUDA_ERROR_LAUNCH_FAILED
                    | CUDA_ERROR_TENSOR_MEMORY_LEAK
                    | CUDA_ERROR_MPS_CLIENT_TERMINATED
                    | CUDA_ERROR_EXTERNAL_DEVICE
                    | CUDA_ERROR_UNKNOWN
        )
    }

    /// True if the error, of a call on a context that exists, means that the device is gone. CUDA documents these errors for
    /// calls that name a device: there they say that it can't be used now, or is not there, and nothing of a context.
    pub fn is_device_gone(&self) -> bool {
        matches!(
            self.code,
            CUDA_ERROR_DEVICE_UNAVAILABLE | CUDA_ERROR_NO_DEVICE | CUDA_ERROR_INVALID_DEVICE
        )
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {} ({}): {}", self.call, self.name, self.code, self.message)
    }
}

impl std::error::Error for DriverError {}

/// A failed operation of this module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Error {
    /// The process can't use the driver at all.
    Unavailable(&'static Unavailable),
    /// The driver refused a call.
    Driver(DriverError),
    /// The driver is too old for this function.
    NotSupported(&'static str),
    /// The stream is in a graph capture, which recording an event would disturb.
    Capturing(u64),
    /// The event was recorded in a graph capture, which a stream that waits for it would join.
    CapturedEvent(u64),
    /// An event's handle is zero.
    NullEvent,
    /// The driver has no such stream.
    UnknownStream(u64),
    /// The driver has no such event.
    UnknownEvent(u64),
    /// The driver does not know the address, which is not host memory of this process either: freed, or of
    /// another process.
    UnknownPointer(u64),
    /// No memory is mapped at the address, which lies in a reserved range.
    NotMapped(u64),
    /// The range does not lie in one allocation.
    OutOfRange {
        /// Start of the range.
        address: u64,
        /// Bytes of the range.
        len: u64,
        /// Start of the allocation that has the first byte.
        base: u64,
        /// Bytes of that allocation.
        allocation_len: u64,
    },
    /// The range is empty, wraps around, or is not aligned to pages where it has to be.
    BadRange {
        /// Start of the range.
        address: u64,
        /// Bytes of the range.
        len: u64,
    },
    /// No device that this process sees has that name.
    NoSuchDevice {
        /// The number, UUID or address that was named.
        name: String,
        /// The devices that the process sees: number, UUID and address of each.
        seen: Vec<String>,
    },
    /// The text names no device: it is neither a number nor a UUID nor an address.
    BadDeviceName(String),
    /// The text is not what the driver takes: it has a zero byte.
    BadText,
}

impl Error {
    /// Whether the device is lost to this process.
    pub fn is_sticky(&self) -> bool {
        matches!(self, Self::Driver(error) if error.is_sticky())
    }

    /// True if the error, of a call on a context that exists, means that the device can't be used any more.
    pub fn is_fatal(&self) -> bool {
        matches!(self, Self::Driver(error) if error.is_sticky() || error.is_device_gone())
    }

    /// The driver's code, if the driver refused a call.
    pub fn code(&self) -> Option<i32> {
        match self {
            Self::Driver(error) => Some(error.code),
            Self::UnknownStream(_) | Self::UnknownEvent(_) => Some(CUDA_ERROR_INVALID_HANDLE),
            _ => None,
        }
    }

    /// Whether this process is a forked child, in which no call reaches the driver.
    pub fn is_forked(&self) -> bool {
        matches!(self, Self::Unavailable(Unavailable::Forked))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unavailable(why) => why.fmt(f),
            Self::Driver(error) => error.fmt(f),
            Self::NotSupported(call) => {
                write!(f, "the CUDA driver has no {call}; install a newer driver")
            }
            Self::Capturing(stream) => {
                write!(
                    f,
                    "stream {stream:#x} is in a graph capture; use a stream outside the capture"
                )
            }
            Self::CapturedEvent(event) => {
                write!(
                    f,
                    "event {event:#x} was recorded in a graph capture; record one outside of it"
                )
            }
            Self::NullEvent => {
                write!(f, "the event's handle is zero; record the event before it is named")
            }
            Self::UnknownStream(stream) => write!(
                f,
                "the CUDA driver has no stream {stream:#x}; name one that exists until the call has returned"
            ),
            Self::UnknownEvent(event) => write!(
                f,
                "the CUDA driver has no event {event:#x}; name one that exists until the call has returned"
            ),
            Self::UnknownPointer(address) => write!(
                f,
                "{address:#x} is memory neither of a CUDA device nor of this process; was it freed?"
            ),
            Self::NotMapped(address) => {
                write!(f, "{address:#x} lies in a reserved range without memory; map it first")
            }
            Self::OutOfRange { address, len, base, allocation_len } => write!(
                f,
                "{len} bytes at {address:#x} are not within the allocation of {allocation_len} bytes at \
                 {base:#x}; name bytes of one allocation"
            ),
            Self::BadRange { address, len } => write!(
                f,
                "{len} bytes at {address:#x} are not a range that can be used here; name bytes of one \
                 allocation"
            ),
            Self::NoSuchDevice { name, seen } => write!(
                f,
                "no CUDA device {name} in this process; check CUDA_VISIBLE_DEVICES; it sees {}",
                if seen.is_empty() { "none".to_owned() } else { seen.join(", ") }
            ),
            Self::BadDeviceName(text) => write!(
                f,
                "{text:?} names no CUDA device; name one by its number, its UUID (GPU-…) or its address on the \
                 PCI bus (0000:1b:00.0)"
            ),
            Self::BadText => write!(f, "the text has a zero byte"),
        }
    }
}

impl std::error::Error for Error {}

impl From<&'static Unavailable> for Error {
    fn from(why: &'static Unavailable) -> Self {
        Self::Unavailable(why)
    }
}

impl From<DriverError> for Error {
    fn from(error: DriverError) -> Self {
        Self::Driver(error)
    }
}

/// Result of this module's operations.
pub type Result<T> = std::result::Result<T, Error>;
