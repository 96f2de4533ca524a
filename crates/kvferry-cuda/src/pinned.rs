//! Host memory of this crate's own that the driver has pinned, and mapped for kernels.

#![allow(unsafe_code, reason = "the driver pins the memory")]

use kvferry_sys::cuda::{self, Context, HostRegistration};
use kvferry_sys::map::Mapping;

/// A mapping that is pinned until it is dropped. The fields are dropped in their order: the memory is unpinned before it
/// is unmapped.
#[derive(Debug)]
pub(crate) struct Pinned {
    registration: HostRegistration,
    memory: Mapping,
}

impl Pinned {
    /// Pins all of the mapping, which has whole pages.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    ///
    /// # Safety
    /// When the value is dropped, no copy and no kernel uses the memory.
    pub(crate) unsafe fn new(context: &Context, memory: Mapping) -> Result<Self, cuda::Error> {
        // SAFETY: the pages stay mapped until the registration is dropped, and the caller promises the rest.
        let registration = unsafe { HostRegistration::new(context, memory.span(0, memory.len())) }?;
        Ok(Self { registration, memory })
    }

    pub(crate) fn memory(&self) -> &Mapping {
        &self.memory
    }

    /// The address for copies by the driver.
    pub(crate) fn address(&self) -> u64 {
        self.memory.as_ptr() as u64
    }

    /// The address for kernels.
    ///
    /// # Errors
    /// If the driver refuses, or in a forked child.
    pub(crate) fn device_address(&self) -> Result<u64, cuda::Error> {
        self.registration.device_address()
    }
}
