//! What the driver knows of an address: the kind of its memory, its owner and its allocation.

use super::abi::*;
use super::context::Context;
use super::device::Device;
use super::error::{Error, Result};
use super::load::{Driver, call};
use super::vmm::{Chunk, VmmAllocation};
use crate::host::HostMemory;

/// The kind of memory at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryKind {
    /// One allocation of device memory.
    Device,
    /// Device memory that was mapped piece by piece, such as PyTorch's expandable segments: the pieces that
    /// cover the range, in order.
    Vmm(Vec<Chunk>),
    /// Host memory that the driver allocated or that was registered with it.
    PinnedHost,
    /// Memory whose pages the driver moves between devices and host.
    Managed,
    /// Host memory of this process that the driver does not know.
    Pageable,
}

/// What the driver knows of a range.
#[derive(Clone, Debug)]
pub struct PointerInfo {
    /// The kind of the memory.
    pub kind: MemoryKind,
    /// The device that owns the memory, or for which host memory was registered.
    pub device: Option<Device>,
    /// Number that the driver gives to no other allocation of this process; zero for [`MemoryKind::Pageable`].
    pub buffer_id: u64,
    /// Start of the allocation, of the registration, or of the first piece. The range's own start for
    /// [`MemoryKind::Pageable`].
    pub base: u64,
    /// Bytes from `base` to the end of the allocation, the registration or the last piece.
    pub len: u64,
    /// [`super::IpcHandle`] works for the allocation.
    pub legacy_ipc: bool,
    /// Network devices can read and write the memory.
    pub gpu_direct_rdma: bool,
    context: CUcontext,
}

impl PointerInfo {
    /// The context that owns the memory, or the primary one of its device if no context does, as for memory
    /// of the virtual memory functions. `None` for memory without a device.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn context(&self) -> Result<Option<Context>> {
        let Some(device) = self.device else { return Ok(None) };
        if self.context == CUcontext::default() {
            Context::primary(device).map(Some)
        } else {
            Context::existing(device, self.context).map(Some)
        }
    }

    /// Whether the whole range lies between `base` and its end.
    pub fn contains(&self, address: u64, len: u64) -> bool {
        let end = u128::from(address) + u128::from(len);
        address >= self.base && end <= u128::from(self.base) + u128::from(self.len)
    }
}

/// What the driver knows of `len` bytes at `address`. The range lies in one allocation of device memory, in
/// consecutive pieces, or in host memory. Pinned host memory may be longer than its registration: see
/// [`PointerInfo::contains`].
///
/// # Errors
/// [`Error::BadRange`] if the range is empty or wraps around; [`Error::UnknownPointer`] if the memory was
/// freed or belongs to no one here; [`Error::NotMapped`]; [`Error::OutOfRange`]; if the driver refuses, or in
/// a forked child.
pub fn classify(driver: &'static Driver, address: u64, len: u64) -> Result<PointerInfo> {
    if len == 0 || address == 0 || address.checked_add(len).is_none() {
        return Err(Error::BadRange { address, len });
    }
    let found = Attributes::of(driver, address)?;
    let ordinal = found.device_ordinal();
    let mut info = PointerInfo {
        kind: MemoryKind::Device,
        device: (ordinal >= 0).then(|| Device::from_ordinal(driver, ordinal)),
        buffer_id: found.buffer_id,
        base: found.range_start,
        len: found.range_len,
        legacy_ipc: is_true(found.legacy_ipc),
        gpu_direct_rdma: is_true(found.gpu_direct_rdma),
        context: CUcontext(found.context as usize),
    };
    match found.memory_type as u32 {
        _ if is_true(found.is_managed) => info.kind = MemoryKind::Managed,
        CU_MEMORYTYPE_HOST => info.kind = MemoryKind::PinnedHost,
        CU_MEMORYTYPE_DEVICE if info.legacy_ipc => {}
        CU_MEMORYTYPE_DEVICE if !is_true(found.mapped) => return Err(Error::NotMapped(address)),
        CU_MEMORYTYPE_DEVICE => {
            if VmmAllocation::is_at(driver, address)? {
                let chunks = chunks(driver, address, len)?;
                info.base = chunks[0].address;
                info.len = chunks.iter().map(|chunk| chunk.len).sum();
                info.kind = MemoryKind::Vmm(chunks);
            }
        }
        _ if is_host_memory(address, len) => {
            (info.kind, info.base, info.len) = (MemoryKind::Pageable, address, len);
        }
        _ if found.range_len > 0 => return Err(Error::NotMapped(address)),
        _ => return Err(Error::UnknownPointer(address)),
    }
    if info.kind != MemoryKind::PinnedHost && !info.contains(address, len) {
        let (base, allocation_len) = (info.base, info.len);
        return Err(Error::OutOfRange { address, len, base, allocation_len });
    }
    Ok(info)
}

/// The pieces of memory that cover a range, in order; never none.
fn chunks(driver: &'static Driver, address: u64, len: u64) -> Result<Vec<Chunk>> {
    let mut chunks = Vec::new();
    let mut at = address;
    while at < address + len {
        let piece = Mapped::of(driver, at)?.ok_or(Error::NotMapped(at))?;
        let allocation = VmmAllocation::retain(driver, at)?;
        let properties = allocation.properties()?;
        chunks.push(Chunk { address: piece.base, len: piece.len, block_id: piece.id, properties });
        at = piece.base + piece.len;
    }
    Ok(chunks)
}

/// The driver's booleans may fill one byte or four.
fn is_true(value: u64) -> bool {
    value & 0xff != 0
}

fn is_host_memory(address: u64, len: u64) -> bool {
    let (Ok(address), Ok(len)) = (usize::try_from(address), usize::try_from(len)) else {
        return false;
    };
    HostMemory::of_this_process().is_ok_and(|mut host| host.check(address, len, false).is_ok())
}

/// Attributes that every supported driver knows. All are zero for an address that the driver does not know.
#[derive(Default)]
struct Attributes {
    context: u64,
    memory_type: u64,
    buffer_id: u64,
    is_managed: u64,
    device_ordinal: u64,
    legacy_ipc: u64,
    range_start: u64,
    range_len: u64,
    mapped: u64,
    gpu_direct_rdma: u64,
}

impl Attributes {
    fn of(driver: &'static Driver, address: u64) -> Result<Self> {
        let mut found = Self::default();
        ask(
            driver,
            address,
            [
                (CU_POINTER_ATTRIBUTE_CONTEXT, &mut found.context),
                (CU_POINTER_ATTRIBUTE_MEMORY_TYPE, &mut found.memory_type),
                (CU_POINTER_ATTRIBUTE_BUFFER_ID, &mut found.buffer_id),
                (CU_POINTER_ATTRIBUTE_IS_MANAGED, &mut found.is_managed),
                (CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, &mut found.device_ordinal),
                (CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, &mut found.legacy_ipc),
                (CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, &mut found.range_start),
                (CU_POINTER_ATTRIBUTE_RANGE_SIZE, &mut found.range_len),
                (CU_POINTER_ATTRIBUTE_MAPPED, &mut found.mapped),
                (CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE, &mut found.gpu_direct_rdma),
            ],
        )?;
        Ok(found)
    }

    /// The device's number, negative if there is none.
    fn device_ordinal(&self) -> i32 {
        // The driver writes 32 bits.
        if self.memory_type == 0 { -1 } else { self.device_ordinal as u32 as i32 }
    }
}

/// The mapping of one piece of memory in a reserved range. Drivers before CUDA 11.8 do not tell it.
struct Mapped {
    base: u64,
    len: u64,
    id: u64,
}

impl Mapped {
    /// The mapping at an address; `None` if there is none.
    fn of(driver: &'static Driver, address: u64) -> Result<Option<Self>> {
        let mut found = Self { base: 0, len: 0, id: 0 };
        let asked = ask(
            driver,
            address,
            [
                (CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, &mut found.base),
                (CU_POINTER_ATTRIBUTE_MAPPING_SIZE, &mut found.len),
                (CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID, &mut found.id),
            ],
        );
        match asked {
            Err(Error::Driver(error)) if error.code == CUDA_ERROR_INVALID_VALUE => {
                return Err(Error::NotSupported("CU_POINTER_ATTRIBUTE_MAPPING_SIZE"));
            }
            asked => asked?,
        }
        let end = found.base.checked_add(found.len);
        let covers = found.base <= address && end.is_some_and(|end| address < end);
        Ok(covers.then_some(found))
    }
}

/// Asks for attributes of an address, each into a place that is zero.
fn ask<const N: usize>(
    driver: &'static Driver,
    address: u64,
    wanted: [(CUpointer_attribute, &mut u64); N],
) -> Result<()> {
    let mut names = [0; N];
    let mut places = [std::ptr::null_mut(); N];
    for (i, (name, place)) in wanted.into_iter().enumerate() {
        names[i] = name;
        places[i] = std::ptr::from_mut(place).cast();
    }
    // SAFETY: both lists have `N` entries. No attribute that is asked for is longer than the eight bytes of
    // its place. The driver only looks the address up.
    let asked = unsafe {
        call!(
            driver,
            pointer_get_attributes(N as u32, names.as_mut_ptr(), places.as_mut_ptr(), address)
        )
    };
    match asked {
        // An address that no context knows.
        Err(Error::Driver(error)) if error.code == CUDA_ERROR_INVALID_CONTEXT => Ok(()),
        asked => asked,
    }
}
