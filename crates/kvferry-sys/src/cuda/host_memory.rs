//! Host memory whose pages the driver has pinned, for copies at full speed.

use super::abi::*;
use super::context::Context;
use super::error::{Error, Result};
use super::load::call;
use crate::span::HostSpan;
use std::ffi::c_void;

/// Whole pages of host memory that all devices can copy from and to; unregistered on drop.
#[derive(Debug)]
pub struct HostRegistration {
    context: Context,
    span: HostSpan,
}

impl HostRegistration {
    /// Registers whole pages. The driver takes about 0.1 s per GB, and blocks other calls of the process
    /// meanwhile: long ranges are better registered in parts. A copy must not cross two registrations.
    ///
    /// # Errors
    /// [`Error::BadRange`] if the range is empty or does not consist of whole pages; if the driver refuses,
    /// or in a forked child.
    ///
    /// # Safety
    /// The pages stay mapped until the value is dropped. No copy that uses them runs then.
    pub unsafe fn new(context: &Context, span: HostSpan) -> Result<Self> {
        let page = rustix::param::page_size();
        let address = span.as_ptr() as usize;
        if span.is_empty() || !address.is_multiple_of(page) || !span.len().is_multiple_of(page) {
            return Err(Error::BadRange { address: address as u64, len: span.len() as u64 });
        }
        let _entered = context.enter()?;
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP;
        let at: *mut c_void = span.as_ptr().cast();
        // SAFETY: the caller promised that the pages are mapped.
        unsafe { call!(context.driver(), host_register(at, span.len(), flags)) }?;
        Ok(Self { context: context.clone(), span })
    }

    /// Ends a registration of other memory, which was unmapped before, at the address of `span`.
    ///
    /// # Errors
    /// If the driver has no registration that begins there, or refuses; in a forked child.
    ///
    /// # Safety
    /// Nothing has registered the memory that is mapped there now, and no copy uses it.
    pub unsafe fn end_stale(context: &Context, span: HostSpan) -> Result<()> {
        let _entered = context.enter()?;
        // SAFETY: by the caller's promise, the registration is of memory that is not mapped any more.
        unsafe { call!(context.driver(), host_unregister(span.as_ptr().cast())) }
    }

    /// The registered memory.
    pub fn span(&self) -> HostSpan {
        self.span
    }

    /// The memory's address for kernels of the context's device.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub fn device_address(&self) -> Result<u64> {
        let _entered = self.context.enter()?;
        let mut address = 0;
        let at: *mut c_void = self.span.as_ptr().cast();
        // SAFETY: the driver looks the address up and writes one.
        unsafe { call!(self.context.driver(), host_get_device_pointer(&raw mut address, at, 0)) }?;
        Ok(address)
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        if let Ok(_entered) = self.context.enter() {
            // SAFETY: registered by this value, and unregistered once.
            let _ =
                unsafe { call!(self.context.driver(), host_unregister(self.span.as_ptr().cast())) };
        }
    }
}
