//! Device memory of another process on this host, by handles of `cuMemAlloc`'s and `cudaMalloc`'s memory.

use super::abi::*;
use super::context::Context;
use super::error::Result;
use super::load::call;

/// Names a whole allocation of device memory to other processes of the host. The process that receives it
/// can open it only once at a time, and not the process that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IpcHandle(pub [u8; 64]);

impl IpcHandle {
    /// The handle of the allocation that starts at `base`.
    ///
    /// # Errors
    /// If the memory is of another kind, if the driver refuses, or in a forked child.
    pub fn of_allocation(context: &Context, base: u64) -> Result<Self> {
        let _entered = context.enter()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the driver looks the address up and writes 64 bytes.
        unsafe { call!(context.driver(), ipc_get(&raw mut handle, base)) }?;
        Ok(Self(handle.reserved))
    }
}

/// Start and bytes of the allocation that has an address.
///
/// # Errors
/// If the driver does not know the address, or in a forked child.
pub fn allocation_at(context: &Context, address: u64) -> Result<(u64, usize)> {
    let _entered = context.enter()?;
    let (mut base, mut len) = (0, 0);
    // SAFETY: the driver looks the address up and writes two numbers.
    unsafe { call!(context.driver(), get_address_range(&raw mut base, &raw mut len, address)) }?;
    Ok((base, len))
}

/// Another process's allocation, mapped into this one; closed on drop.
#[derive(Debug)]
pub struct IpcMapping {
    context: Context,
    address: CUdeviceptr,
}

impl IpcMapping {
    /// Maps the allocation. The driver enables access between the two devices where it can.
    ///
    /// # Errors
    /// If the exporter is gone, is this process or is in another pid namespace; if the driver refuses; in a
    /// forked child.
    pub fn open(context: &Context, handle: &IpcHandle) -> Result<Self> {
        let _entered = context.enter()?;
        let mut address = 0;
        let handle = CUipcMemHandle { reserved: handle.0 };
        let flags = CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the driver reads 64 bytes and writes an address.
        unsafe { call!(context.driver(), ipc_open(&raw mut address, handle, flags)) }?;
        Ok(Self { context: context.clone(), address })
    }

    /// Start of the allocation in this process.
    pub fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for IpcMapping {
    /// Unmaps the allocation. Copies that use it have run before.
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: opened by this value, and closed once.
            let _ = unsafe { call!(self.context.driver(), ipc_close(self.address)) };
        }
    }
}
