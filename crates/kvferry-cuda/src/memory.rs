//! Ranges of a GPU's memory for an agent.

use crate::error::Error;
use crate::gpu::Gpu;
use kvferry::DeviceMemory;
use kvferry_sys::cuda::{DeviceName, Driver, MemoryKind, classify};

/// A range of a GPU's memory, to be registered with an agent: `len` bytes at `address`, as `cudaMalloc` or the virtual
/// memory functions gave them. The driver says whose memory it is; with a `device`, its number in this process must be
/// that. The memory stays allocated until the region is unregistered.
///
/// The first range of a GPU makes its stages: address space, of which a thread pins a few stages before they are used, and
/// the others when they are.
///
/// # Errors
/// If the driver can't be used, or the range is not in an allocation of a GPU; for managed and for host memory; if the GPU
/// is not `device`, or is lost.
pub fn memory(address: u64, len: u64, device: Option<i32>) -> Result<DeviceMemory, Error> {
    range(address, len, device.map(DeviceName::Ordinal))
}

/// A range of the memory of the GPU that has this name, as [`memory`] makes one of the GPU with a number. UUID and address
/// name the same GPU in all processes, whichever GPUs these see.
///
/// # Errors
/// As [`memory`]; [`NoSuchDevice`](kvferry_sys::cuda::Error::NoSuchDevice), with the GPUs that there are, for a name that
/// none of them has.
pub fn memory_on(address: u64, len: u64, device: DeviceName) -> Result<DeviceMemory, Error> {
    range(address, len, Some(device))
}

fn range(address: u64, len: u64, device: Option<DeviceName>) -> Result<DeviceMemory, Error> {
    let driver = Driver::get()?;
    let info = classify(driver, address, len)?;
    let host = |kind| Err(Error::HostMemory { address, kind });
    match info.kind {
        MemoryKind::Device | MemoryKind::Vmm(_) => {}
        MemoryKind::Managed => return Err(Error::Managed { address }),
        MemoryKind::PinnedHost => return host("pinned"),
        MemoryKind::Pageable => return host("pageable"),
    }
    let unknown = kvferry_sys::cuda::Error::UnknownPointer(address);
    let context = info.context()?.ok_or(unknown)?;
    let owner = context.device().ordinal();
    if let Some(name) = device.filter(|name| *name != DeviceName::Ordinal(owner)) {
        let named = driver.device_named(name)?.ordinal();
        if named != owner {
            return Err(Error::OtherDevice { address, owner, named });
        }
    }
    let gpu = Gpu::of(context)?;
    gpu.note_allocation(info.base, info.len);
    Ok(DeviceMemory::new(gpu, address, len))
}
