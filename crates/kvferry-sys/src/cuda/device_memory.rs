//! Device memory of our own, for tests, demonstrations and staging, and how much a device has.

use super::abi::*;
use super::context::Context;
use super::error::{Error, Result};
use super::load::call;

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process has allocated.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

impl Context {
    /// How much memory the context's device has. Contexts of all processes count as allocated.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn memory_info(&self) -> Result<MemoryInfo> {
        let _entered = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two integers.
        unsafe { call!(self.driver(), mem_get_info(&raw mut free, &raw mut total)) }?;
        Ok(MemoryInfo { free: free as u64, total: total as u64 })
    }
}

/// Memory of a device, freed on drop.
#[derive(Debug)]
pub struct DeviceAllocation {
    context: Context,
    address: CUdeviceptr,
    len: usize,
}

impl DeviceAllocation {
    /// Allocates `len` bytes with undefined content.
    ///
    /// # Errors
    /// For zero bytes, if the driver refuses, or in a forked child.
    pub fn new(context: &Context, len: usize) -> Result<Self> {
        if len == 0 {
            return Err(Error::BadRange { address: 0, len: 0 });
        }
        let _entered = context.enter()?;
        let mut address = 0;
        // SAFETY: the driver writes an address.
        unsafe { call!(context.driver(), mem_alloc(&raw mut address, len)) }?;
        Ok(Self { context: context.clone(), address, len })
    }

    /// The memory's context.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The memory's address.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes of the memory.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no memory, which is never so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for DeviceAllocation {
    /// Frees the memory. The driver first waits for all work of the device.
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: allocated by this value, and freed once. The driver waits for work that uses it.
            let _ = unsafe { call!(self.context.driver(), mem_free(self.address)) };
        }
    }
}
