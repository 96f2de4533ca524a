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

// SAFETY: a mapping is an address range of the process, owned by this value; it may be used and
// unmapped from any thread.
unsafe impl Send for Mapping {}
// SAFETY: shared access only yields spans and raw copies, for which races are the caller's data,
// never ours.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes, rounded up to whole pages by the kernel.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes, else what the kernel says (no memory, a limit).
    pub fn anonymous(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping needs bytes"));
        }
        // SAFETY: a fresh anonymous mapping at an address of the kernel's choice overlaps nothing.
        let p = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                rustix::mm::MapFlags::PRIVATE,
            )
        }?;
        let base = NonNull::new(p.cast()).expect("the kernel never maps page zero unasked");
        Ok(Self { base, len })
    }

    /// Where the mapping starts.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Bytes asked for.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: an empty mapping can't be made.
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
        // SAFETY: inside the mapping, which is readable and writable until drop; no reference to
        // it is ever made. A span that outlives the mapping is excluded by the owners of both
        // (`kvferry::memory`), as for every other memory.
        unsafe { HostSpan::new(self.base.as_ptr().add(offset), len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; the value is gone afterwards. A failure can
        // only mean that the range is not mapped, and then there is nothing to undo.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
