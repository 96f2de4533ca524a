//! The devices that the process sees, and what they can do.

use super::abi::*;
use super::error::{Error, Result};
use super::load::{Driver, call};
use super::name::DeviceName;
use std::ffi::{CStr, c_char, c_int};
use std::fmt;

/// A device of this process. Its number means nothing to another process.
#[derive(Clone, Copy)]
pub struct Device {
    driver: &'static Driver,
    handle: CUdevice,
}

/// A device's identity, the same in all processes and on all hosts.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceUuid(pub [u8; 16]);

impl fmt::Display for DeviceUuid {
    /// Writes the form of `nvidia-smi -L`: `GPU-` and five groups of hexadecimal digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU")?;
        for group in [0..4, 4..6, 6..8, 8..10, 10..16] {
            write!(f, "-")?;
            self.0[group].iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
        }
        Ok(())
    }
}

impl fmt::Debug for DeviceUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The devices that see the writes of network devices without a flush.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WritesOrdering {
    /// No reader sees them before `cuFlushGPUDirectRDMAWrites`.
    None,
    /// The device that owns the memory sees them.
    Owner,
    /// Every CUDA device sees them.
    AllDevices,
}

/// What the driver reports of a device. Attributes that the driver does not know are false or zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// The device's number in this process.
    pub ordinal: i32,
    /// The device's UUID, or that of its instance where the device is partitioned.
    pub uuid: DeviceUuid,
    /// The device's address on the PCI bus, such as `0000:1b:00.0`.
    pub pci_bus_id: String,
    /// The device's name, given by the vendor.
    pub name: String,
    /// The host's NUMA node next to the device, where the kernel knows it.
    pub numa_node: Option<u32>,
    /// Major and minor compute capability.
    pub compute_capability: (u32, u32),
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Copies that can run at the same time, beside kernels.
    pub copy_engines: u32,
    /// Host and device share an address space.
    pub unified_addressing: bool,
    /// Host memory can be registered.
    pub host_register: bool,
    /// Registered host memory has the same address on the device.
    pub host_pointer_on_device: bool,
    /// Device memory can be exported as a dma-buf.
    pub dma_buf: bool,
    /// Network devices can read and write device memory.
    pub gpu_direct_rdma: bool,
    /// Network devices can also do so with memory of the virtual memory functions.
    pub gpu_direct_rdma_with_vmm: bool,
    /// The devices that see those writes without a flush.
    pub rdma_writes_ordering: WritesOrdering,
    /// `cuFlushGPUDirectRDMAWrites` works.
    pub rdma_flush: bool,
    /// The virtual memory functions work.
    pub vmm: bool,
    /// Memory of the virtual memory functions can be exported as a file descriptor.
    pub vmm_export_fd: bool,
    /// Memory of the virtual memory functions can be exported as a fabric handle.
    pub vmm_export_fabric: bool,
}

impl Driver {
    /// Number of devices that this process sees.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn device_count(&'static self) -> Result<i32> {
        let mut count = 0;
        // SAFETY: the driver writes one integer.
        unsafe { call!(self, device_get_count(&raw mut count)) }?;
        Ok(count)
    }

    /// The device of that number.
    ///
    /// # Errors
    /// If there is none, or in a forked child.
    pub fn device(&'static self, ordinal: i32) -> Result<Device> {
        if !(0..self.device_count()?).contains(&ordinal) {
            return Err(self.no_such_device(&DeviceName::Ordinal(ordinal)));
        }
        let mut handle = 0;
        // SAFETY: the driver writes one integer.
        unsafe { call!(self, device_get(&raw mut handle, ordinal)) }?;
        Ok(Device { driver: self, handle })
    }

    /// All devices that this process sees.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn devices(&'static self) -> Result<Vec<Device>> {
        (0..self.device_count()?).map(|ordinal| self.device(ordinal)).collect()
    }
}

impl Device {
    /// The driver that has the device.
    pub fn driver(&self) -> &'static Driver {
        self.driver
    }

    /// The device's number in this process.
    pub fn ordinal(&self) -> i32 {
        self.handle
    }

    pub(super) fn from_ordinal(driver: &'static Driver, handle: CUdevice) -> Self {
        Self { driver, handle }
    }

    /// The device's UUID.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn uuid(&self) -> Result<DeviceUuid> {
        let mut uuid = CUuuid::default();
        // SAFETY: the driver writes sixteen bytes.
        unsafe { call!(self.driver, device_get_uuid(&raw mut uuid, self.handle)) }?;
        Ok(DeviceUuid(uuid.bytes))
    }

    /// The device's address on the PCI bus, such as `0000:1b:00.0`.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn pci_bus_id(&self) -> Result<String> {
        let mut text = [0; TEXT_MAX];
        let len = TEXT_MAX as c_int - 1;
        // SAFETY: the driver writes at most `len` bytes.
        unsafe { call!(self.driver, device_get_pci_bus_id(text.as_mut_ptr(), len, self.handle)) }?;
        Ok(to_string(&text).to_ascii_lowercase())
    }

    /// The device's name, given by the vendor.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn name(&self) -> Result<String> {
        let mut text = [0; TEXT_MAX];
        let len = TEXT_MAX as c_int - 1;
        // SAFETY: the driver writes at most `len` bytes.
        unsafe { call!(self.driver, device_get_name(text.as_mut_ptr(), len, self.handle)) }?;
        Ok(to_string(&text))
    }

    /// Whether some library of this process has made the device's primary context.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn has_primary_context(&self) -> Result<bool> {
        let (mut flags, mut active) = (0, 0);
        // SAFETY: the driver writes two integers.
        unsafe {
            call!(self.driver, primary_get_state(self.handle, &raw mut flags, &raw mut active))
        }?;
        Ok(active != 0)
    }

    /// True if the device lets only one process have a context at a time.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn is_exclusive(&self) -> Result<bool> {
        let mode = self.attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_MODE)?;
        Ok(mode == CU_COMPUTEMODE_EXCLUSIVE_PROCESS)
    }

    /// The host's NUMA node next to the device, where the kernel knows it.
    pub fn numa_node(&self) -> Option<u32> {
        numa_node_of(&self.pci_bus_id().ok()?)
    }

    /// What the driver reports of the device.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn info(&self) -> Result<DeviceInfo> {
        let number =
            |attribute| Ok::<_, Error>(u32::try_from(self.attribute(attribute)?).unwrap_or(0));
        let flag = |attribute| Ok::<_, Error>(self.attribute(attribute)? > 0);
        let pci_bus_id = self.pci_bus_id()?;
        let ordering = number(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING)?;
        let flush = number(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS)?;
        Ok(DeviceInfo {
            ordinal: self.handle,
            uuid: self.uuid()?,
            name: self.name()?,
            numa_node: numa_node_of(&pci_bus_id),
            pci_bus_id,
            compute_capability: (
                number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: number(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            copy_engines: number(CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?,
            unified_addressing: flag(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING)?,
            host_register: flag(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED)?,
            host_pointer_on_device: flag(
                CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM,
            )?,
            dma_buf: flag(CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
            gpu_direct_rdma: flag(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
            gpu_direct_rdma_with_vmm: flag(
                CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            )?,
            rdma_writes_ordering: match ordering {
                CU_GPU_DIRECT_RDMA_WRITES_ORDERING_ALL_DEVICES.. => WritesOrdering::AllDevices,
                CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER.. => WritesOrdering::Owner,
                _ => WritesOrdering::None,
            },
            rdma_flush: flush & CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST != 0,
            vmm: flag(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?,
            vmm_export_fd: flag(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?,
            vmm_export_fabric: flag(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?,
        })
    }

    /// An attribute's value; zero if the driver does not know the attribute.
    fn attribute(&self, attribute: CUdevice_attribute) -> Result<i32> {
        let mut value = 0;
        // SAFETY: the driver writes one integer.
        let asked = unsafe {
            call!(self.driver, device_get_attribute(&raw mut value, attribute, self.handle))
        };
        match asked {
            Ok(()) => Ok(value),
            Err(Error::Driver(error)) if error.code == CUDA_ERROR_INVALID_VALUE => Ok(0),
            Err(error) => Err(error),
        }
    }
}

impl PartialEq for Device {
    fn eq(&self, other: &Self) -> bool {
        self.handle == other.handle
    }
}

impl Eq for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.handle)
    }
}

/// Bytes for a text that the driver writes, with its zero byte.
const TEXT_MAX: usize = 256;

/// The text in `buffer`, whose last byte the driver did not write.
fn to_string(buffer: &[c_char; TEXT_MAX]) -> String {
    let bytes = buffer.map(|byte| byte as u8);
    CStr::from_bytes_until_nul(&bytes).unwrap_or_default().to_string_lossy().into_owned()
}

/// The NUMA node that the kernel reports for a PCI device.
fn numa_node_of(pci_bus_id: &str) -> Option<u32> {
    let file = format!("/sys/bus/pci/devices/{pci_bus_id}/numa_node");
    // -1 if the kernel does not know it.
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}
