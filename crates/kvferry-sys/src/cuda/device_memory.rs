//! Device memory of our own, for tests, demonstrations and staging, and how much a device has.

use super::abi::*;
use super::context::Context;
use super::copy::copy_async;
use super::error::{Error, Result};
use super::load::call;
use super::stream::Stream;
use std::mem::ManuallyDrop;

/// Bytes of a device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryInfo {
    /// Bytes that no process has allocated.
    pub free: u64,
    /// All bytes.
    pub total: u64,
}

impl Context {
    /// Reports the memory of the context's device. The contexts of all processes count as allocated.
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

/// Copies that the caller waits for. The copies go through host memory of their own, which is leaked if the driver does
/// not report that a copy has ended.
impl DeviceAllocation {
    /// Copies the bytes from `at` on to all of `into`, after the stream's earlier work.
    ///
    /// # Errors
    /// [`Error::OutOfRange`] if the allocation has fewer; if the driver refuses, or in a forked child.
    pub fn read(&self, stream: &Stream, at: usize, into: &mut [u8]) -> Result<()> {
        let mut bounce = ManuallyDrop::new(vec![0; into.len()]);
        let to = bounce.as_mut_ptr() as u64;
        self.copy(stream, at, into.len(), |address| (to, address))?;
        into.copy_from_slice(&ManuallyDrop::into_inner(bounce));
        Ok(())
    }

    /// Copies all of `bytes` to the memory from `at` on, after the stream's earlier work.
    ///
    /// # Errors
    /// The same as for [`DeviceAllocation::read`].
    pub fn write(&self, stream: &Stream, at: usize, bytes: &[u8]) -> Result<()> {
        let bounce = ManuallyDrop::new(bytes.to_vec());
        let from = bounce.as_ptr() as u64;
        self.copy(stream, at, bytes.len(), |address| (address, from))?;
        drop(ManuallyDrop::into_inner(bounce));
        Ok(())
    }

    fn copy(
        &self,
        stream: &Stream,
        at: usize,
        len: usize,
        ends: impl FnOnce(u64) -> (u64, u64),
    ) -> Result<()> {
        if at.checked_add(len).is_none_or(|end| end > self.len) {
            let (address, base) = (self.address.saturating_add(at as u64), self.address);
            let allocation_len = self.len as u64;
            return Err(Error::OutOfRange { address, len: len as u64, base, allocation_len });
        }
        if len == 0 {
            return Ok(());
        }
        let (to, from) = ends(self.address + at as u64);
        // SAFETY: the range is inside the allocation. The caller's host memory is as long, is not touched by others,
        // and stays mapped if this fails. The stream is synchronised before a success is reported. Other users of
        // the device's range order their work with the stream.
        unsafe { copy_async(stream, to, from, len) }?;
        stream.synchronize()
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
