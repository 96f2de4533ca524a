//! The virtual memory functions: physical memory, its export, and mappings of it.

use super::abi::*;
use super::context::Context;
use super::device::Device;
use super::error::{Error, Result};
use super::load::{Driver, call};
use rustix::io::{FdFlags, fcntl_setfd};
use std::ffi::c_void;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// What physical memory was made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VmmProperties {
    /// Number of the device that has the memory; `None` for memory of the host.
    pub device: Option<i32>,
    /// The memory can be exported as a file descriptor.
    pub export_fd: bool,
    /// The memory can be exported as a fabric handle.
    pub export_fabric: bool,
    /// Network devices can read and write the memory.
    pub gpu_direct_rdma: bool,
}

/// A piece of device memory in a range that was mapped piece by piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Start of the mapping.
    pub address: u64,
    /// Bytes of the mapping.
    pub len: u64,
    /// Number that the driver gives to no other physical memory of this process.
    pub block_id: u64,
    /// What the memory was made for.
    pub properties: VmmProperties,
}

/// A fabric handle: names physical memory to the processes of a fabric.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FabricHandle(pub [u8; 64]);

/// Physical memory. It exists until the last owner, here or in another process, releases it and nothing maps
/// it.
#[derive(Debug)]
pub struct VmmAllocation {
    driver: &'static Driver,
    handle: CUmemGenericAllocationHandle,
}

impl VmmAllocation {
    /// New memory of the context's device; `len` is a multiple of [`granularity`].
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn new(context: &Context, len: usize, export_fd: bool) -> Result<Self> {
        let properties = properties_of_new(context.device(), export_fd);
        let _entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: the driver reads the properties and writes a handle.
        unsafe {
            call!(context.driver(), mem_create(&raw mut handle, len, &raw const properties, 0))
        }?;
        Ok(Self { driver: context.driver(), handle })
    }

    /// The memory that is mapped at an address.
    ///
    /// # Errors
    /// If none is that was made by these functions, or in a forked child.
    pub fn retain(driver: &'static Driver, address: u64) -> Result<Self> {
        let mut handle = 0;
        let at = std::ptr::without_provenance_mut::<c_void>(address as usize);
        // SAFETY: the driver looks the address up and writes a handle.
        unsafe { call!(driver, retain_allocation(&raw mut handle, at)) }?;
        Ok(Self { driver, handle })
    }

    /// Whether memory of these functions is mapped at an address.
    pub(super) fn is_at(driver: &'static Driver, address: u64) -> Result<bool> {
        match Self::retain(driver, address) {
            Ok(_) => Ok(true),
            Err(Error::NotSupported(_)) => Ok(false),
            Err(error @ Error::Driver(_)) if !error.is_fatal() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What the memory was made for.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn properties(&self) -> Result<VmmProperties> {
        let mut found = no_properties();
        // SAFETY: the driver writes the properties; the handle is ours.
        unsafe { call!(self.driver, allocation_properties(&raw mut found, self.handle)) }?;
        let types = found.requested_handle_types;
        let of_device = found.location.kind == CU_MEM_LOCATION_TYPE_DEVICE;
        Ok(VmmProperties {
            device: of_device.then_some(found.location.id),
            export_fd: types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR != 0,
            export_fabric: types & CU_MEM_HANDLE_TYPE_FABRIC != 0,
            gpu_direct_rdma: found.alloc_flags.gpu_direct_rdma_capable != 0,
        })
    }

    /// A descriptor that gives the memory to another process; closed on `exec`.
    ///
    /// # Errors
    /// If the memory was not made for it, if the driver refuses, or in a forked child.
    pub fn export_fd(&self) -> Result<OwnedFd> {
        let mut fd = -1;
        let kind = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        // SAFETY: for this type the driver writes a descriptor.
        unsafe { call!(self.driver, mem_export((&raw mut fd).cast(), self.handle, kind, 0)) }?;
        // SAFETY: the driver has made the descriptor for this call.
        Ok(unsafe { owned(fd) })
    }

    /// The memory that another process has exported as a descriptor, which the driver does not keep.
    ///
    /// # Errors
    /// If the descriptor is of something else, if the driver refuses, or in a forked child.
    pub fn import_fd(context: &Context, fd: BorrowedFd<'_>) -> Result<Self> {
        let number = usize::try_from(fd.as_raw_fd()).unwrap_or_default();
        let fd = std::ptr::without_provenance_mut(number);
        // SAFETY: for this type the driver reads a descriptor's number from the pointer itself.
        unsafe { Self::import(context, fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) }
    }

    /// A handle that gives the memory to another process of the fabric.
    ///
    /// # Errors
    /// If the memory was not made for it, if the driver refuses, or in a forked child.
    pub fn export_fabric(&self) -> Result<FabricHandle> {
        let mut bytes = [0; 64];
        let kind = CU_MEM_HANDLE_TYPE_FABRIC;
        // SAFETY: for this type the driver writes 64 bytes.
        unsafe { call!(self.driver, mem_export((&raw mut bytes).cast(), self.handle, kind, 0)) }?;
        Ok(FabricHandle(bytes))
    }

    /// The memory that another process of the fabric has exported.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn import_fabric(context: &Context, mut handle: FabricHandle) -> Result<Self> {
        // SAFETY: for this type the driver reads 64 bytes.
        unsafe { Self::import(context, (&raw mut handle.0).cast(), CU_MEM_HANDLE_TYPE_FABRIC) }
    }

    /// # Safety
    /// `from` is what the type requires.
    unsafe fn import(
        context: &Context,
        from: *mut c_void,
        kind: CUmemAllocationHandleType,
    ) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = 0;
        // SAFETY: the driver writes a handle; the caller keeps the promise of this function.
        unsafe { call!(context.driver(), mem_import(&raw mut handle, from, kind)) }?;
        Ok(Self { driver: context.driver(), handle })
    }
}

impl Drop for VmmAllocation {
    fn drop(&mut self) {
        // SAFETY: this value owns one reference, and releases it once.
        let _ = unsafe { call!(self.driver, mem_release(self.handle)) };
    }
}

/// Pieces of physical memory, mapped one after another; unmapped on drop.
#[derive(Debug)]
pub struct VmmMapping {
    context: Context,
    address: CUdeviceptr,
    reserved: usize,
    /// Bytes of each piece that is mapped.
    mapped: Vec<usize>,
}

impl VmmMapping {
    /// Maps the pieces, each with its bytes, for reads and writes by the context's device.
    ///
    /// # Errors
    /// For no bytes, if the driver refuses, or in a forked child.
    pub fn new(context: &Context, pieces: &[(&VmmAllocation, usize)]) -> Result<Self> {
        let bytes = pieces.iter().try_fold(0usize, |sum, (_, len)| sum.checked_add(*len));
        let reserved = bytes.filter(|bytes| *bytes > 0);
        let reserved = reserved.ok_or(Error::BadRange { address: 0, len: 0 })?;
        let driver = context.driver();
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes the address of a range that nothing uses.
        unsafe { call!(driver, address_reserve(&raw mut address, reserved, 0, 0, 0)) }?;
        let mut mapping = Self { context: context.clone(), address, reserved, mapped: Vec::new() };
        let mut at = address;
        for (allocation, len) in pieces {
            // SAFETY: a part of the range that was reserved above, in which nothing is mapped yet.
            unsafe { call!(driver, mem_map(at, *len, 0, allocation.handle, 0)) }?;
            mapping.mapped.push(*len);
            at += *len as u64;
        }
        let access = CUmemAccessDesc {
            location: location(context.device()),
            flags: CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
        };
        // SAFETY: the range is mapped, and the driver reads one description.
        unsafe { call!(driver, mem_set_access(address, reserved, &raw const access, 1)) }?;
        Ok(mapping)
    }

    /// Start of the range.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the range.
    pub fn len(&self) -> usize {
        self.reserved
    }

    /// Whether there is no memory, which is never so.
    pub fn is_empty(&self) -> bool {
        self.reserved == 0
    }
}

impl Drop for VmmMapping {
    /// Unmaps the memory. Copies that use it have run before.
    fn drop(&mut self) {
        let Ok(_entered) = self.context.enter() else { return };
        let driver = self.context.driver();
        let mut at = self.address;
        for len in &self.mapped {
            // SAFETY: mapped by this value, and unmapped once.
            let _ = unsafe { call!(driver, mem_unmap(at, *len)) };
            at += *len as u64;
        }
        // SAFETY: reserved by this value, and freed once.
        let _ = unsafe { call!(driver, address_free(self.address, self.reserved)) };
    }
}

/// The bytes of which [`VmmAllocation::new`] takes a multiple.
///
/// # Errors
/// If the driver refuses, or in a forked child.
pub fn granularity(device: Device, export_fd: bool) -> Result<usize> {
    let properties = properties_of_new(device, export_fd);
    let mut bytes = 0;
    let kind = CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: the driver reads the properties and writes a number.
    unsafe {
        call!(device.driver(), allocation_granularity(&raw mut bytes, &raw const properties, kind))
    }?;
    Ok(bytes)
}

/// A descriptor of device memory for network devices: a dma-buf, closed on `exec`. The range is aligned to
/// the host's pages and lies in one allocation. `over_pcie` asks for a mapping through the PCI bus where the
/// system has a faster way.
///
/// # Errors
/// [`Error::BadRange`] if the range is not aligned; if the driver refuses, or in a forked child.
pub fn dma_buf(context: &Context, address: u64, len: usize, over_pcie: bool) -> Result<OwnedFd> {
    let page = rustix::param::page_size();
    let aligned = address.is_multiple_of(page as u64) && len.is_multiple_of(page);
    if len == 0 || !aligned {
        return Err(Error::BadRange { address, len: len as u64 });
    }
    let flags = if over_pcie { CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE } else { 0 };
    let kind = CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD;
    let _entered = context.enter()?;
    let mut fd = -1;
    // SAFETY: for this type the driver writes a descriptor.
    unsafe {
        call!(context.driver(), handle_for_range((&raw mut fd).cast(), address, len, kind, flags))
    }?;
    // SAFETY: the driver has made the descriptor for this call.
    Ok(unsafe { owned(fd) })
}

/// Takes a descriptor that the driver has made.
///
/// # Safety
/// Nothing else owns the descriptor.
unsafe fn owned(fd: i32) -> OwnedFd {
    // SAFETY: the caller keeps the promise of this function.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // A descriptor that stays open on `exec` still works.
    let _ = fcntl_setfd(&fd, FdFlags::CLOEXEC);
    fd
}

fn location(device: Device) -> CUmemLocation {
    CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device.ordinal() }
}

fn properties_of_new(device: Device, export_fd: bool) -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: if export_fd {
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        } else {
            0
        },
        location: location(device),
        ..no_properties()
    }
}

fn no_properties() -> CUmemAllocationProp {
    CUmemAllocationProp {
        kind: 0,
        requested_handle_types: 0,
        location: CUmemLocation::default(),
        win32_handle_meta_data: std::ptr::null_mut(),
        alloc_flags: CUmemAllocationFlags::default(),
    }
}
