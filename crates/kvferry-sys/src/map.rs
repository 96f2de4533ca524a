//! Anonymous memory.

use crate::span::HostSpan;
use std::io;
use std::ptr::NonNull;

/// Private anonymous memory, zeroed, unmapped on drop.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range of the process that this value owns; any thread may use and
// unmap it.
unsafe impl Send for Mapping {}
// SAFETY: shared access only yields spans and raw copies; races on the bytes are the caller's.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, rounded up to whole pages by the kernel.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes, else the kernel's error (no memory, a limit).
    pub fn anonymous(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping can't be empty"));
        }
        // SAFETY: a new anonymous mapping at an address that the kernel chooses overlaps nothing.
        let p = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        }?;
        let base = NonNull::new(p.cast()).expect("the kernel maps page zero only on request");
        Ok(Self { base, len })
    }

    /// Where the mapping starts.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// The requested length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: an empty mapping can't be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes `offset..offset + len` as a span.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    pub fn span(&self, offset: usize, len: usize) -> HostSpan {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "the range is outside the mapping"
        );
        // SAFETY: the range is inside the mapping, which is readable and writable until drop; no
        // reference to it is ever made. The owners of span and mapping (`kvferry::memory`) ensure
        // that no span outlives the mapping.
        unsafe { HostSpan::new(self.base.as_ptr().add(offset), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; the value is gone afterwards. `munmap` can
        // only fail if the range is not mapped, and then there is nothing to undo.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
