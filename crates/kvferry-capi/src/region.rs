//! Registered memory, and descriptions of what peers registered.

use crate::agent::kvferry_agent;
use crate::error::kvferry_error;
use crate::failure::{self, Failure};
use crate::guard::{self, Outcome};
use crate::handles::{self, OwnedRegion};
use crate::structs::{self, Versioned};
use kvferry::{
    Access, Agent, DeviceMemory, ErrorKind, Incarnation, Region, RegionId, RemoteRegion,
};
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

/// Registered memory. A handle, not an address.
#[derive(Debug)]
pub struct kvferry_region(());

/// Peers may do nothing: the memory is the local side of transfers only.
pub const KVFERRY_ACCESS_NONE: u32 = 0;
/// Peers may read.
pub const KVFERRY_ACCESS_READ: u32 = 1;
/// Peers may write.
pub const KVFERRY_ACCESS_WRITE: u32 = 2;

/// Facts of a region. Set `size` to `sizeof(kvferry_region_info)`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_region_info {
    pub size: usize,
    /// The address in this process, or the GPU's address of its memory.
    pub address: *mut c_void,
    pub len: usize,
    /// `KVFERRY_ACCESS_` bits.
    pub access: u32,
    /// 1 until it is unregistered.
    pub registered: u32,
    /// 1 while a process that does not answer may still touch the memory of an unregistered region.
    pub quarantined: u32,
    pub reserved: u32,
}

// SAFETY: `repr(C)`, begins with its size, and holds numbers and addresses only.
unsafe impl Versioned for kvferry_region_info {}

/// A region as peers name it. A value: copy it, send it to the peer by any means. Programs of different releases exchange it,
/// so it never changes: what else there is to know of a region, its owner tells the peer's agent by `id`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct kvferry_remote {
    /// The incarnation of the agent that owns the region; later ones refuse the description.
    pub incarnation: [u8; 16],
    /// The address in the owner's process; 0 for a file, and for memory of a GPU that is not registered by its address.
    pub address: u64,
    pub len: u64,
    pub id: u32,
    /// `KVFERRY_ACCESS_` bits.
    pub access: u32,
}

impl kvferry_remote {
    pub(crate) fn of(remote: &RemoteRegion) -> Self {
        Self {
            incarnation: remote.incarnation.0.to_le_bytes(),
            id: remote.id.0,
            address: remote.addr,
            len: remote.len,
            access: bits(remote.access),
        }
    }

    pub(crate) fn to_remote(self) -> RemoteRegion {
        RemoteRegion {
            incarnation: Incarnation(u128::from_le_bytes(self.incarnation)),
            id: RegionId(self.id),
            addr: self.address,
            len: self.len,
            access: Access {
                read: self.access & KVFERRY_ACCESS_READ != 0,
                write: self.access & KVFERRY_ACCESS_WRITE != 0,
            },
        }
    }
}

fn bits(access: Access) -> u32 {
    u32::from(access.read) * KVFERRY_ACCESS_READ + u32::from(access.write) * KVFERRY_ACCESS_WRITE
}

fn access_of(bits: u32) -> Result<Access, Failure> {
    if bits & !(KVFERRY_ACCESS_READ | KVFERRY_ACCESS_WRITE) != 0 {
        return Err(Failure::invalid(format!("{bits:#x} is no set of KVFERRY_ACCESS_")));
    }
    Ok(Access { read: bits & KVFERRY_ACCESS_READ != 0, write: bits & KVFERRY_ACCESS_WRITE != 0 })
}

/// Registers memory of a GPU, as `memory` finds it.
///
/// # Safety
/// `name` is null or text; `region` is null or can be written.
unsafe fn register_cuda(
    agent: *const kvferry_agent,
    memory: impl FnOnce() -> Result<DeviceMemory, kvferry_cuda::Error>,
    access: Access,
    name: *const c_char,
    region: *mut *mut kvferry_region,
) -> Outcome {
    let register = |agent: &Agent| {
        let memory = memory().map_err(|error| Failure::invalid(error.to_string()))?;
        Ok(agent.register_device(memory.with_process_addresses(), access)?)
    };
    // SAFETY: the caller's promise.
    unsafe { make(agent, name, region, register) }
}

/// # Safety
/// `name` is null or text; `region` is null or can be written.
unsafe fn make(
    agent: *const kvferry_agent,
    name: *const c_char,
    region: *mut *mut kvferry_region,
    make: impl FnOnce(&Agent) -> Result<Region, Failure>,
) -> Outcome {
    const PLACE: &str = "the place for the region";
    // SAFETY: the caller's promise; the place is tried before anything is registered.
    let name = unsafe {
        guard::store(region, std::ptr::null_mut(), PLACE)?;
        guard::optional_text(name, "the region's name")?
    };
    let agent = handles::look_up::<Agent, _>(agent)?;
    let made = make(&agent)?;
    if let Some(name) = name
        && let Err(refused) = agent.name_region(&made, name)
    {
        let _ = agent.unregister(&made);
        return Err(refused.into());
    }
    let handle = handles::add(Arc::new((agent, made)));
    // SAFETY: the caller's promise.
    unsafe { guard::store(region, handles::pointer(handle), PLACE) }?;
    Ok(0)
}

/// Registers `len` bytes at `address`. `access` is what peers may do with them. Peers find the region by
/// its `name`, if that is not NULL.
///
/// The memory must stay mapped, and its pages must not be replaced, until `kvferry_region_unregister`
/// has returned `KVFERRY_OK`. Peers write to it at any time.
///
/// `KVFERRY_UNSUPPORTED`: it is memory of a device. `KVFERRY_INVALID_ARGUMENT`: this process can't read
/// it, or can't write to it though `access` has `KVFERRY_ACCESS_WRITE`.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// The memory is as above; `name` is null or text; `error` is null or a structure whose field `size` is
/// right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_region_register(
    agent: *const kvferry_agent,
    address: *mut c_void,
    len: usize,
    access: u32,
    name: *const c_char,
    region: *mut *mut kvferry_region,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let access = access_of(access)?;
        // SAFETY: the caller promises the memory.
        let register = |agent: &Agent| Ok(unsafe { agent.register(address.cast(), len, access) }?);
        // SAFETY: the caller's promise.
        unsafe { make(agent, name, region, register) }
    })
}

/// Registers `len` bytes of a GPU at `address`, as `cudaMalloc` or the driver's virtual memory functions gave them.
/// `device` is the number of the GPU in this process that owns them, or -1 for whichever does. Else as
/// `kvferry_region_register`. Transfers name in `after` of their options what they come after.
///
/// The first region of a GPU loads the CUDA driver, `libcuda.so.1`. The memory stays allocated until
/// `kvferry_region_unregister` has returned `KVFERRY_OK`.
///
/// `KVFERRY_INVALID_ARGUMENT`: there is no driver, or the range is not in an allocation of the GPU.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `name` is null or text; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_region_register_cuda(
    agent: *const kvferry_agent,
    address: u64,
    len: usize,
    device: i32,
    access: u32,
    name: *const c_char,
    region: *mut *mut kvferry_region,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let access = access_of(access)?;
        let device = (device != -1).then_some(device);
        let memory = || kvferry_cuda::memory(address, len as u64, device);
        // SAFETY: the caller's promise.
        unsafe { register_cuda(agent, memory, access, name, region) }
    })
}

/// Registers memory of a GPU as `kvferry_region_register_cuda` does. `device` names the GPU that owns it: by its UUID,
/// such as `GPU-8c1b1a5e-…` of `nvidia-smi -L`, by its address on the PCI bus, such as `0000:1b:00.0`, or by its number
/// in this process. UUID and address are the same in all processes, whatever `CUDA_VISIBLE_DEVICES` is.
///
/// `KVFERRY_INVALID_ARGUMENT`: also if no GPU that this process sees has the name; the error's text lists those that it
/// sees.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `device` is text; `name` is null or text; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_region_register_cuda_device(
    agent: *const kvferry_agent,
    address: u64,
    len: usize,
    device: *const c_char,
    access: u32,
    name: *const c_char,
    region: *mut *mut kvferry_region,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let access = access_of(access)?;
        // SAFETY: the caller's promise.
        let device = unsafe { guard::text(device, "the GPU's name") }?;
        let memory = || {
            let device = device.parse::<kvferry_cuda::DeviceName>();
            let device = device.map_err(kvferry_cuda::Error::Driver)?;
            kvferry_cuda::memory_on(address, len as u64, device)
        };
        // SAFETY: the caller's promise.
        unsafe { register_cuda(agent, memory, access, name, region) }
    })
}

/// Allocates `len` zeroed bytes and registers them; `kvferry_region_unregister` frees them. From 1 MiB
/// on, agents of the same user on this host map the memory, which is the fastest way to copy.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `name` is null or text; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_region_allocate(
    agent: *const kvferry_agent,
    len: usize,
    access: u32,
    name: *const c_char,
    region: *mut *mut kvferry_region,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let access = access_of(access)?;
        // SAFETY: the caller's promise.
        unsafe { make(agent, name, region, |agent| Ok(agent.allocate(len, access)?)) }
    })
}

/// Unregisters a region and frees its handle. When this returns `KVFERRY_OK`, no copier touches the
/// memory any more.
///
/// `KVFERRY_QUARANTINED`: a process of this host or a device that may use the memory does not answer, or a
/// shutdown of the agent has not ended, as one that a callback has called. The handle stays valid; do not
/// reuse the memory, and call again later.
///
/// Any thread; also after the agent was shut down or freed. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_region_unregister(
    region: *mut kvferry_region,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let owned = handles::look_up::<OwnedRegion, _>(region)?;
        let (agent, registered) = &*owned;
        match agent.unregister(registered) {
            Err(refused) if refused.kind() == ErrorKind::Quarantined => return Err(refused.into()),
            // The shutdown unregisters it, and may still have to.
            Err(refused) if refused.kind() == ErrorKind::Shutdown && registered.is_in_use() => {
                return Err(Failure::new(failure::KVFERRY_QUARANTINED, refused.to_string()));
            }
            _ => {}
        }
        // An error if another thread was faster.
        handles::take::<OwnedRegion, _>(region)?;
        Ok(0)
    })
}

/// Fills in facts of a region.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `info` and `error` are null or structures whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_region_facts(
    region: *const kvferry_region,
    info: *mut kvferry_region_info,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let owned = handles::look_up::<OwnedRegion, _>(region)?;
        let facts = kvferry_region_info {
            size: 0,
            address: std::ptr::with_exposed_provenance_mut(owned.1.addr()),
            len: owned.1.len(),
            access: bits(owned.1.access()),
            registered: owned.1.is_registered().into(),
            quarantined: owned.1.is_quarantined().into(),
            reserved: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { structs::write(info, &facts, "the region's facts") }?;
        Ok(0)
    })
}

/// The description that peers need to name the region.
///
/// Any thread. After a fork: `KVFERRY_FORKED`.
///
/// # Safety
/// `remote` can be written; `error` is null or a structure whose field `size` is right.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kvferry_region_remote(
    region: *const kvferry_region,
    remote: *mut kvferry_remote,
    error: *mut kvferry_error,
) -> c_int {
    guard::run(error, || {
        let owned = handles::look_up::<OwnedRegion, _>(region)?;
        let description = kvferry_remote::of(&owned.1.remote());
        // SAFETY: the caller's promise.
        unsafe { guard::store(remote, description, "the place for the description") }?;
        Ok(0)
    })
}
