//! Memory that processes of one host share by descriptor.
//!
//! Backed by a memfd whose size is sealed, so that nobody can make an access fault later by
//! shrinking it. What is shared is accessed through atomics and spans only, never by reference.

use crate::fd::Fd;
use crate::span::HostSpan;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Bytes of the huge pages that [`Shared::create`] asks for.
pub const HUGE_PAGE: usize = 2 << 20;

/// A mapping of shared memory.
#[derive(Debug)]
pub struct Shared {
    base: NonNull<u8>,
    len: usize,
    mapped: usize,
    fd: Fd,
    writable: bool,
    huge: bool,
}

// SAFETY: a mapping is an address range of the process, owned by this value; it may be used and
// unmapped from any thread.
unsafe impl Send for Shared {}
// SAFETY: shared access only yields atomics, spans and raw copies.
unsafe impl Sync for Shared {}

fn map(fd: &Fd, len: usize, writable: bool) -> io::Result<NonNull<u8>> {
    let mut protection = ProtFlags::READ;
    protection.set(ProtFlags::WRITE, writable);
    // SAFETY: a new mapping at an address of the kernel's choice overlaps nothing.
    let p = unsafe {
        rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, fd, 0)
    }?;
    Ok(NonNull::new(p.cast()).expect("the kernel never maps page zero unasked"))
}

impl Shared {
    /// Makes and maps `len` zeroed bytes. Where the system has free huge pages and the memory
    /// fills some, it is made of those; they are taken at once. Others are taken when first
    /// touched.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes, else what the kernel says.
    pub fn create(name: &str, len: usize, huge: bool) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping needs bytes"));
        }
        if huge
            && len >= HUGE_PAGE
            && let Ok(shared) = Self::create_of(name, len, true)
        {
            return Ok(shared);
        }
        Self::create_of(name, len, false)
    }

    fn create_of(name: &str, len: usize, huge: bool) -> io::Result<Self> {
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut mapped = len;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            mapped = len.checked_next_multiple_of(HUGE_PAGE).ok_or(io::ErrorKind::InvalidInput)?;
        }
        let fd = Fd::new(rustix::fs::memfd_create(name, flags)?);
        rustix::fs::ftruncate(&fd, mapped as u64)?;
        if huge {
            // Reserves the pages: a touch that finds none would end the process.
            rustix::fs::fallocate(&fd, rustix::fs::FallocateFlags::empty(), 0, mapped as u64)?;
        }
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        let base = map(&fd, mapped, true)?;
        Ok(Self { base, len, mapped, fd, writable: true, huge })
    }

    /// Keeps everybody who is given the descriptor from now on from writing. This mapping stays
    /// writable.
    ///
    /// # Errors
    /// What the kernel says; it can since Linux 5.1.
    pub fn seal_against_writes(&self) -> io::Result<()> {
        Ok(rustix::fs::fcntl_add_seals(&self.fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
    }

    /// Maps `len` bytes of what another process made.
    ///
    /// # Errors
    /// `InvalidData` if it is shorter than that, or could be made so; else what the kernel says.
    pub fn open(fd: OwnedFd, len: usize, writable: bool) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        let size = rustix::fs::fstat(&fd)?.st_size;
        let invalid = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if len == 0 || u64::try_from(size).is_ok_and(|size| size < len as u64) || size < 0 {
            return invalid("shared memory is shorter than was said");
        }
        if !seals.contains(SealFlags::SHRINK) {
            return invalid("shared memory that could be made shorter is not mapped");
        }
        let fd = Fd::new(fd);
        // Huge pages are mapped whole.
        let size = usize::try_from(size).map_err(|_| io::ErrorKind::InvalidData)?;
        let mapped =
            if size % HUGE_PAGE == 0 { len.next_multiple_of(HUGE_PAGE).min(size) } else { len };
        let base = map(&fd, mapped, writable)?;
        Ok(Self { base, len, mapped, fd, writable, huge: false })
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

    /// Whether it was made of huge pages.
    pub fn is_huge(&self) -> bool {
        self.huge
    }

    fn raw_word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset.checked_add(8).is_some_and(|end| end <= self.len),
            "words are aligned and inside the mapping"
        );
        // SAFETY: inside a mapping that lives as long as `self`, aligned (mappings start at a
        // page). Every access to words is atomic, and nothing is stored through a mapping that
        // can't be written: `load` only loads, `word` checks.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The value of the 64-bit word at byte `offset`, sequentially consistent.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8 inside the mapping.
    pub fn load(&self, offset: usize) -> u64 {
        self.raw_word(offset).load(std::sync::atomic::Ordering::SeqCst)
    }

    /// The 64-bit word at byte `offset`.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8 inside the mapping, or the mapping can't be written.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(self.writable, "words of a mapping that is only read are loaded");
        self.raw_word(offset)
    }

    /// The bytes `offset..offset + len` as a span.
    ///
    /// # Panics
    /// If the range is not inside the mapping, or the mapping can't be written.
    pub fn span(&self, offset: usize, len: usize) -> HostSpan {
        assert!(
            self.writable && offset.checked_add(len).is_some_and(|end| end <= self.len),
            "the range is outside the mapping"
        );
        // SAFETY: inside the mapping, which is readable and writable until drop, and whose file
        // can't shrink; no reference to it is ever made. A span that outlives the mapping is
        // excluded by the owners of both (`kvferry::memory`).
        unsafe { HostSpan::new(self.base.as_ptr().add(offset), len) }
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; the value is gone afterwards.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn what_one_mapping_writes_the_other_reads() {
        let ours = Shared::create("kvferry-test", 4096, false).expect("memory");
        let fd = ours.as_fd().try_clone_to_owned().expect("a descriptor");
        let theirs = Shared::open(fd, 4096, true).expect("sealed and long enough");
        ours.word(64).store(7, Ordering::SeqCst);
        assert_eq!(theirs.load(64), 7);
        theirs.span(100, 3).copy_from(b"abc");
        let mut back = [0; 3];
        ours.span(100, 3).copy_to(&mut back);
        assert_eq!(&back, b"abc");
    }

    #[test]
    fn huge_pages_are_used_where_there_are_some_and_others_where_not() {
        let free =
            std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
        let free: usize = free.ok().and_then(|n| n.trim().parse().ok()).unwrap_or(0);
        let len = HUGE_PAGE + 4096;
        let ours = Shared::create("kvferry-test", len, true).expect("memory");
        if free >= 2 {
            assert!(ours.is_huge());
        } else {
            assert!(!ours.is_huge());
            println!("SKIPPED: huge pages: {free} of 2 MiB are free; sysctl -w vm.nr_hugepages=16");
        }
        ours.span(len - 3, 3).copy_from(b"end");
        let fd = ours.as_fd().try_clone_to_owned().expect("a descriptor");
        let theirs = Shared::open(fd, len, true).expect("sealed and long enough");
        let mut back = [0; 3];
        theirs.span(len - 3, 3).copy_to(&mut back);
        assert_eq!(&back, b"end");
        drop((ours, theirs));
        let huge = Shared::create("kvferry-test", usize::MAX / 4, true);
        assert!(huge.is_err(), "more than there is of anything");
    }

    #[test]
    fn whoever_is_given_sealed_memory_only_reads_it() {
        let ours = Shared::create("kvferry-test", 4096, false).expect("memory");
        ours.seal_against_writes().expect("a kernel since 5.1");
        ours.word(0).store(1, Ordering::SeqCst);
        let fd = || ours.as_fd().try_clone_to_owned().expect("a descriptor");
        assert!(Shared::open(fd(), 4096, true).is_err());
        let theirs = Shared::open(fd(), 4096, false).expect("to be read");
        assert_eq!(theirs.load(0), 1);
    }

    #[test]
    fn memory_that_could_shrink_or_is_too_short_is_refused() {
        let plain = rustix::fs::memfd_create("kvferry-test", MemfdFlags::CLOEXEC).expect("a file");
        rustix::fs::ftruncate(&plain, 8192).expect("room");
        let e = Shared::open(plain, 4096, false).expect_err("not sealed");
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
        let ours = Shared::create("kvferry-test", 4096, false).expect("memory");
        let fd = ours.as_fd().try_clone_to_owned().expect("a descriptor");
        let e = Shared::open(fd, 4097, false).expect_err("too short");
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
    }
}
