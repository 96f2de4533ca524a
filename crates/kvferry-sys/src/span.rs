//! A range of host memory that stays mapped while it is in use.

use std::fmt;

/// `len` bytes of host memory at `ptr`, in the layout of the kernel's vectored calls.
///
/// Other threads, other processes and devices may write the memory at any time. So it is never
/// turned into a slice; it is only passed to the kernel, copied by raw copies, or read by volatile loads.
///
/// # Lifetime
/// A span owns nothing and has no lifetime, as an `iovec` has none, and is `Copy`. So its type does not keep code from using it after
/// the memory is gone. The rule does: a span and its copies are used only while their owner is held (a mapping, a region with its
/// gate, a pin, a stage). [`HostSpan::new`] is unsafe for that; `span` of a mapping and the spans that a transport gets of a
/// batch are not, and their users keep the rule. A lifetime could not say it: spans outlive the call that makes them, in io_uring and
/// on I/O threads, beside an `Arc` of their owner. Code that is not a transport gets no span: a device gets a
/// `DeviceCopy`, which owns its stage and copies bytes.
///
/// # Races
/// The copies are `memcpy` and `memmove`, and other writers may race with them. The language has no rule for writers outside
/// of the process. Of threads it calls such a race undefined, and it has no copy at the speed of `memcpy` that may race. It does
/// no harm here:
///
/// * Every value of a byte is valid, and no pointer, length or lock is in memory that a span names.
/// * The compiler knows of the memory only that it is copied. Each copy goes to memory of its own before anything is decided by
///   its bytes, so the decision and the bytes agree ([`HostSpan::for_each_copy`]).
/// * A mixture of old and new bytes is what a transfer may leave behind that has not ended.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct HostSpan(libc::iovec);

// SAFETY: a span is an address and a length. Its maker promises that any thread may use it for as
// long as it is in use (see `HostSpan::new`).
unsafe impl Send for HostSpan {}
// SAFETY: as above; no method changes a span through a shared reference.
unsafe impl Sync for HostSpan {}

/// The buffer of [`HostSpan::for_each_copy`]: digests are slower over shorter pieces, and a longer one does
/// not fit into the first-level cache beside its source.
const COPY_BYTES: usize = 16 << 10;

impl HostSpan {
    /// A span over `len` bytes at `ptr`.
    ///
    /// # Safety
    /// For as long as the span or a copy of it is used, the range must be mapped, readable, and, if
    /// the span is received into, writable. No reference may exist that the writes would alias.
    pub unsafe fn new(ptr: *mut u8, len: usize) -> Self {
        Self(libc::iovec { iov_base: ptr.cast(), iov_len: len })
    }

    /// Start address of the span.
    pub fn as_ptr(&self) -> *mut u8 {
        self.0.iov_base.cast()
    }

    /// Bytes in the span.
    pub fn len(&self) -> usize {
        self.0.iov_len
    }

    /// Whether the span has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.iov_len == 0
    }

    /// The first `len` bytes of the span.
    ///
    /// # Panics
    /// If the span is shorter.
    pub fn truncated(&self, len: usize) -> Self {
        assert!(len <= self.len(), "a span can't be truncated to more than its length");
        Self(libc::iovec { iov_base: self.0.iov_base, iov_len: len })
    }

    /// The first `len` bytes of the span, and the rest.
    ///
    /// # Panics
    /// If the span is shorter.
    pub fn split_at(&self, len: usize) -> (Self, Self) {
        assert!(len <= self.len(), "a span can't be split beyond its end");
        // SAFETY: at most one past the end of the range that the span's maker promised.
        let rest = unsafe { self.as_ptr().add(len) };
        let rest = libc::iovec { iov_base: rest.cast(), iov_len: self.len() - len };
        (self.truncated(len), Self(rest))
    }

    /// Calls `f` with the bytes of the span, copied piece by piece to a bounded buffer on the
    /// stack. For digests: the memory may change at any time, so no reference to it may exist.
    pub fn for_each_copy(&self, mut f: impl FnMut(&[u8])) {
        let mut buffer = [0u8; COPY_BYTES];
        let mut at = 0;
        while at < self.len() {
            let n = buffer.len().min(self.len() - at);
            // SAFETY: `at + n <= len`, and the span's maker promised that the range is mapped; the
            // local buffer can't overlap it.
            unsafe {
                std::ptr::copy_nonoverlapping(self.as_ptr().add(at), buffer.as_mut_ptr(), n);
            }
            f(&buffer[..n]);
            at += n;
        }
    }

    /// Copies `from` to the start of the span.
    ///
    /// # Panics
    /// If the span is shorter.
    pub fn copy_from(&self, from: &[u8]) {
        assert!(from.len() <= self.len(), "the span is too short for the copy");
        // SAFETY: the span's maker promised that the range is mapped and writable; `copy` allows
        // overlap.
        unsafe { std::ptr::copy(from.as_ptr(), self.as_ptr(), from.len()) }
    }

    /// Copies the start of the span to `to`.
    ///
    /// # Panics
    /// If the span is shorter.
    pub fn copy_to(&self, to: &mut [u8]) {
        assert!(to.len() <= self.len(), "the span is too short for the copy");
        // SAFETY: the span's maker promised that the range is mapped; `copy` allows overlap.
        unsafe { std::ptr::copy(self.as_ptr(), to.as_mut_ptr(), to.len()) }
    }

    /// Copies `from` to the start of the span. Both may be the same memory mapped twice.
    ///
    /// # Panics
    /// If the span is shorter.
    pub fn copy_from_span(&self, from: &Self) {
        assert!(from.len() <= self.len(), "the span is too short for the copy");
        // SAFETY: the makers of both spans promised that they are mapped, and this one's that it is
        // writable; `copy` allows overlap.
        unsafe { std::ptr::copy(from.as_ptr(), self.as_ptr(), from.len()) }
    }

    pub(crate) fn as_iovecs(spans: &[Self]) -> &[libc::iovec] {
        // SAFETY: `HostSpan` is a transparent wrapper of `iovec`.
        unsafe { std::slice::from_raw_parts(spans.as_ptr().cast(), spans.len()) }
    }
}

impl fmt::Debug for HostSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:p}+{:#x}", self.as_ptr(), self.len())
    }
}
