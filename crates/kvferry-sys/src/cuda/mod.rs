//! The CUDA driver, loaded at the first use or not at all.
//!
//! [`Driver::get`] loads `libcuda.so.1` and initialises it. A [`Device`] gives a [`Context`], a context
//! streams, events and memory. Each function makes the right context current by itself and puts the thread's
//! former one back; a guard of [`Context::enter`] around several saves them the work. Only the driver's own
//! interface is called: the errors that CUDA's runtime keeps for the engine's next call stay untouched.
//!
//! Objects of the driver are destroyed on drop. In a forked child every function fails with
//! [`Unavailable::Forked`], and drop does nothing.

mod abi;
mod callback;
mod context;
mod copy;
mod device;
mod device_memory;
mod error;
mod host_memory;
mod ipc;
mod kernel;
mod load;
mod name;
mod pointer;
mod stream;
mod table;
mod vmm;

pub use callback::host_function;
pub use context::{Context, Entered};
pub use copy::{BatchCall, BatchError, CopyBatch, SourceOrder, copy_async, copy_batch, fill_async};
pub use device::{Device, DeviceInfo, DeviceUuid, WritesOrdering};
pub use device_memory::{DeviceAllocation, MemoryInfo};
pub use error::{DriverError, Error, OLDEST_VERSION, Result, Unavailable};
pub use host_memory::HostRegistration;
pub use ipc::{IpcHandle, IpcMapping, allocation_at};
pub use kernel::{Function, Grid, LoadError, Module, launch};
pub use load::Driver;
pub use name::{DeviceName, PciAddress};
pub use pointer::{MemoryKind, PointerInfo, classify};
pub use stream::{Event, RawEvent, RawStream, Stream};
pub use vmm::{
    Chunk, FabricHandle, VmmAllocation, VmmMapping, VmmProperties, dma_buf, granularity,
};
