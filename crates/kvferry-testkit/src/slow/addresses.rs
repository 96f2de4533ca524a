//! Addresses of this process for slow memory, as a GPU's memory has them.

use super::SlowMemory;
use kvferry_sys::map::Mapping;
use std::sync::Arc;

/// Bytes before and after the memory whose addresses no other memory has.
const MARGIN: usize = 64 * 1024;

/// Addresses that no other memory of this process has. An access by the CPU ends the process.
pub(super) struct Addresses(Mapping);

impl Addresses {
    fn new(len: usize) -> Self {
        let reserved = Mapping::anonymous(len + 2 * MARGIN).expect("the process has addresses");
        // SAFETY: the range is the mapping, and no byte of it is in use.
        let rc =
            unsafe { libc::mprotect(reserved.as_ptr().cast(), reserved.len(), libc::PROT_NONE) };
        assert_eq!(rc, 0, "the kernel protects pages");
        Self(reserved)
    }

    /// The address of the memory's first byte.
    pub(super) fn start(&self) -> u64 {
        self.0.as_ptr().addr() as u64 + MARGIN as u64
    }
}

impl SlowMemory {
    /// The same memory, whose parts have addresses of this process.
    #[must_use]
    pub fn with_addresses(self) -> Self {
        let addresses = Some(Arc::new(Addresses::new(self.len())));
        Self { addresses, ..self }
    }

    /// The address of the first byte, if the memory has addresses of this process.
    pub fn address(&self) -> Option<u64> {
        self.addresses.as_ref().map(|addresses| addresses.start())
    }
}
