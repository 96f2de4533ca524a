//! Memory that processes of one host share by descriptor.
//!
//! It is backed by a memfd whose size is sealed, so that no process can shrink it and make a later
//! access fault. Shared memory is accessed through atomics and spans only, never by reference.

use crate::fd::Fd;
use crate::retry_on_intr;
use crate::span::HostSpan;
use crate::unmap;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{MapFlags, ProtFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

/// Size in bytes of the huge pages that [`Shared::allocate`] requests.
pub const HUGE_PAGE: usize = 2 << 20;

/// Bytes populated by one system call: a signal undoes the work of the call, which is then
/// repeated.
pub(crate) const TAKE_STEP: u64 = 64 << 20;
const _: () = assert!(TAKE_STEP.is_multiple_of(HUGE_PAGE as u64));

/// Allocation of the memory's pages: on first use, at creation, or at creation as huge pages.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Pages {
    Lazy,
    Taken,
    Huge,
}

/// A mapping of shared memory.
#[derive(Debug)]
pub struct Shared {
    // Closed before the mapping is dropped. The last of the two frees the pages, which takes a
    // quarter of a second per GiB, and every other close of a descriptor waits for the lock under
    // which this one is closed. A large mapping is freed by a thread of its own (`crate::unmap`).
    fd: Fd,
    mapping: Range,
    len: usize,
    writable: bool,
    huge: bool,
}

/// An address range of this process. Dropped, it is unmapped: by another thread if it is large.
#[derive(Debug)]
struct Range {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is an address range of the process that this value owns; any thread may use and
// unmap it.
unsafe impl Send for Shared {}
// SAFETY: shared access only yields atomics, spans and raw copies.
unsafe impl Sync for Shared {}

#[inline]
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which has no effect on memory.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(at.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a hint, which has no effect on memory.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{at}]", at = in(reg) at, options(nostack, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = at;
}

fn map(fd: &Fd, len: usize, writable: bool) -> io::Result<Range> {
    let mut protection = ProtFlags::READ;
    protection.set(ProtFlags::WRITE, writable);
    let wanted = aligned_address(len);
    // SAFETY: the wanted address is a hint: a new mapping overlaps nothing.
    let p = unsafe { rustix::mm::mmap(wanted, len, protection, MapFlags::SHARED, fd, 0) }?;
    let base = NonNull::new(p.cast()).expect("the kernel maps page zero only on request");
    Ok(Range { base, len })
}

/// A free address that is a multiple of [`HUGE_PAGE`], for a mapping that has room for one. Otherwise, or if
/// another thread maps something there first, the kernel chooses the address, and [`Shared::collapse`] fails.
fn aligned_address(len: usize) -> *mut std::ffi::c_void {
    let null = std::ptr::null_mut();
    if len < HUGE_PAGE {
        return null;
    }
    let Some(room) = len.checked_add(HUGE_PAGE) else { return null };
    // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
    let found = unsafe {
        rustix::mm::mmap_anonymous(
            null,
            room,
            ProtFlags::empty(),
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    };
    let Ok(found) = found else { return null };
    // SAFETY: exactly the range that was mapped; nothing refers to it.
    let _ = unsafe { rustix::mm::munmap(found, room) };
    found.map_addr(|at| at.next_multiple_of(HUGE_PAGE))
}

/// Takes all pages of a file from the system. Without this, a first touch that finds no free huge
/// page ends the process with `SIGBUS`.
fn take_pages(fd: &Fd, len: u64) -> io::Result<()> {
    let mut at = 0;
    while at < len {
        let step = TAKE_STEP.min(len - at);
        let flags = rustix::fs::FallocateFlags::empty();
        retry_on_intr(|| Ok(rustix::fs::fallocate(fd, flags, at, step)?))?;
        at += step;
    }
    Ok(())
}

/// Refuses what the system can't provide: the kernel would kill a process, perhaps another one, rather
/// than refuse. Less than [`TAKE_STEP`] is not checked: the answer of the system takes 20 µs, as
/// long as ten allocations of a page.
pub(crate) fn check_available(len: usize) -> io::Result<()> {
    let len = len as u64;
    if len >= TAKE_STEP && available().is_some_and(|available| len > available) {
        return Err(io::ErrorKind::OutOfMemory.into());
    }
    Ok(())
}

/// Bytes of memory that the system can provide without its out-of-memory killer, by its own
/// estimate. Huge pages are not included.
pub(crate) fn available() -> Option<u64> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let kib = |name| {
        let value = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        value.trim().strip_suffix(" kB")?.parse::<u64>().ok()
    };
    Some((kib("MemAvailable:")? + kib("SwapFree:")?) * 1024)
}

impl Shared {
    /// Makes and maps `len` zeroed bytes. Pages are taken on first touch.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes, else the kernel's error.
    pub fn create(name: &str, len: usize) -> io::Result<Self> {
        Self::create_of(name, len, Pages::Lazy)
    }

    /// Makes and maps `len` zeroed bytes, and takes their pages now. The pages are charged to the
    /// control group of this process and follow its NUMA policy, whichever process touches them
    /// first. If the length is at least one huge page and the system has enough free ones, huge
    /// pages are used.
    ///
    /// # Errors
    /// `InvalidInput` for zero bytes, `OutOfMemory` if the system has less memory, else the
    /// kernel's error.
    pub fn allocate(name: &str, len: usize) -> io::Result<Self> {
        if len >= HUGE_PAGE
            && let Ok(shared) = Self::create_of(name, len, Pages::Huge)
        {
            return Ok(shared);
        }
        Self::create_of(name, len, Pages::Taken)
    }

    fn create_of(name: &str, len: usize, pages: Pages) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "a mapping can't be empty"));
        }
        if pages != Pages::Lazy && len >= unmap::LATER_MIN {
            unmap::settle();
        }
        let huge = pages == Pages::Huge;
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let mut mapped = len;
        if huge {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
            mapped = len.checked_next_multiple_of(HUGE_PAGE).ok_or(io::ErrorKind::InvalidInput)?;
        }
        let fd = Fd::new(rustix::fs::memfd_create(name, flags)?);
        rustix::fs::ftruncate(&fd, mapped as u64)?;
        // A length that can't be mapped is refused before a page is taken.
        let mapping = map(&fd, mapped, true)?;
        let shared = Self { fd, mapping, len, writable: true, huge };
        match pages {
            Pages::Lazy => {}
            Pages::Taken => {
                check_available(len)?;
                take_pages(&shared.fd, mapped as u64)?;
            }
            Pages::Huge => take_pages(&shared.fd, mapped as u64)?,
        }
        rustix::fs::fcntl_add_seals(&shared.fd, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(shared)
    }

    /// Makes the descriptor read-only for every process that receives it from now on. This mapping
    /// stays writable.
    ///
    /// # Errors
    /// The kernel's error; sealing needs Linux 5.1.
    pub fn seal_against_writes(&self) -> io::Result<()> {
        Ok(rustix::fs::fcntl_add_seals(&self.fd, SealFlags::FUTURE_WRITE | SealFlags::SEAL)?)
    }

    /// Maps `len` bytes of memory that another process made.
    ///
    /// # Errors
    /// `InvalidData` if the file is shorter, or its size is not sealed; else the kernel's error.
    pub fn open(fd: OwnedFd, len: usize, writable: bool) -> io::Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(&fd)?;
        let size = rustix::fs::fstat(&fd)?.st_size;
        let invalid = |what| Err(io::Error::new(io::ErrorKind::InvalidData, what));
        if len == 0 || u64::try_from(size).is_ok_and(|size| size < len as u64) || size < 0 {
            return invalid("the shared memory is shorter than its sender announced");
        }
        if !seals.contains(SealFlags::SHRINK) {
            return invalid("the size of the shared memory is not sealed");
        }
        let fd = Fd::new(fd);
        // Huge pages can only be mapped whole.
        let size = usize::try_from(size).map_err(|_| io::ErrorKind::InvalidData)?;
        let mapped =
            if size % HUGE_PAGE == 0 { len.next_multiple_of(HUGE_PAGE).min(size) } else { len };
        let mapping = map(&fd, mapped, writable)?;
        Ok(Self { fd, mapping, len, writable, huge: false })
    }

    /// Start address of the mapping.
    pub fn as_ptr(&self) -> *mut u8 {
        self.mapping.base.as_ptr()
    }

    /// The requested length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Always false: an empty mapping can't be made.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether this mapping is writable.
    pub fn is_writable(&self) -> bool {
        self.writable
    }

    /// Whether the memory consists of huge pages.
    pub fn is_huge(&self) -> bool {
        self.huge
    }

    #[inline]
    fn raw_word(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset.is_multiple_of(8) && offset.checked_add(8).is_some_and(|end| end <= self.len),
            "words are aligned and inside the mapping"
        );
        // SAFETY: inside a mapping that lives as long as `self`, and aligned (mappings start at a
        // page). Every access to words is atomic. Nothing is stored through a read-only mapping:
        // `load` only loads, `word` checks.
        unsafe { AtomicU64::from_ptr(self.mapping.base.as_ptr().add(offset).cast()) }
    }

    /// The value of the 64-bit word at byte `offset`, sequentially consistent.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8 inside the mapping.
    #[inline]
    pub fn load(&self, offset: usize) -> u64 {
        self.raw_word(offset).load(std::sync::atomic::Ordering::SeqCst)
    }

    /// The 64-bit word at byte `offset`.
    ///
    /// # Panics
    /// If the offset is not a multiple of 8 inside the mapping, or the mapping is read-only.
    #[inline]
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(self.writable, "the mapping is read-only");
        self.raw_word(offset)
    }

    /// Waits until the 32-bit word at byte `offset` is not `value`, and a process has called
    /// [`Shared::wake_all`]; for at most `timeout`. It may return earlier.
    ///
    /// # Panics
    /// As [`Shared::words32`].
    pub fn wait_while(&self, offset: usize, value: u32, timeout: std::time::Duration) {
        use rustix::thread::futex;
        let [word] = self.words32::<1>(offset);
        let timeout = futex::Timespec {
            tv_sec: i64::try_from(timeout.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: timeout.subsec_nanos().into(),
        };
        // Not private: the waker may be another process. An error means that the word has changed, the time has
        // passed, or a signal came.
        let _ = futex::wait(word, futex::Flags::empty(), value, Some(&timeout));
    }

    /// Wakes the threads of all processes that wait for the word at byte `offset`.
    ///
    /// # Panics
    /// As [`Shared::words32`].
    pub fn wake_all(&self, offset: usize) {
        let [word] = self.words32::<1>(offset);
        // It fails only for an address that is no memory.
        let _ = rustix::thread::futex::wake(
            word,
            rustix::thread::futex::Flags::empty(),
            i32::MAX.unsigned_abs(),
        );
    }

    /// The `N` 32-bit words from byte `offset` on. Words that are accessed as 32 bits are never
    /// accessed as 64 bits.
    ///
    /// # Panics
    /// If the words are not inside the mapping, `offset` is not a multiple of 4, or the mapping is
    /// read-only.
    #[inline]
    pub fn words32<const N: usize>(&self, offset: usize) -> &[AtomicU32; N] {
        let end = offset.checked_add(size_of::<[AtomicU32; N]>());
        assert!(
            self.writable && offset.is_multiple_of(4) && end.is_some_and(|end| end <= self.len),
            "words are aligned and inside a writable mapping"
        );
        // SAFETY: inside a writable mapping that lives as long as `self`, and aligned. Zeroed memory
        // is a value of atomics, which may be shared.
        unsafe { &*self.mapping.base.as_ptr().add(offset).cast() }
    }

    /// Asks the processor for the cache line of byte `offset`, if that is inside the mapping.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.len {
            // SAFETY: inside the mapping.
            prefetch(unsafe { self.mapping.base.as_ptr().add(offset) });
        }
    }

    /// Asks for transparent huge pages, which the system may refuse.
    pub fn advise_huge_pages(&self) {
        let Range { base, len } = &self.mapping;
        // SAFETY: exactly this mapping; the advice changes no content.
        let _ = unsafe {
            rustix::mm::madvise(base.as_ptr().cast(), *len, rustix::mm::Advice::LinuxHugepage)
        };
    }

    /// Copies the pages of `at..at + len` into huge pages, which all processes then map. Blocks for a millisecond
    /// per huge page. Needs no reserved huge pages, and works where the system's settings make none of shared
    /// memory by themselves. Pages that were never touched are taken, too.
    ///
    /// # Errors
    /// `InvalidInput` unless both are multiples of [`HUGE_PAGE`] inside the mapping, or if the system can't do it
    /// (before Linux 6.1); else the kernel's error: the system has no free huge page, or a page is in use.
    pub fn collapse(&self, at: usize, len: usize) -> io::Result<()> {
        let Range { base, len: mapped } = &self.mapping;
        let is_inside = at.checked_add(len).is_some_and(|end| end <= *mapped);
        if !is_inside || !(base.as_ptr().addr() | at | len).is_multiple_of(HUGE_PAGE) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        // SAFETY: inside the mapping; the advice changes no content.
        let done = unsafe { libc::madvise(base.as_ptr().add(at).cast(), len, libc::MADV_COLLAPSE) };
        if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The bytes `offset..offset + len` as a span.
    ///
    /// # Panics
    /// If the range is not inside the mapping, or the mapping is read-only.
    pub fn span(&self, offset: usize, len: usize) -> HostSpan {
        assert!(
            self.writable && offset.checked_add(len).is_some_and(|end| end <= self.len),
            "the range is outside the mapping"
        );
        // SAFETY: the range is inside the mapping, which is readable and writable until drop, and
        // whose file can't shrink; no reference to it is ever made. The owners of span and mapping
        // (`kvferry::memory`) ensure that no span outlives the mapping.
        unsafe { HostSpan::new(self.mapping.base.as_ptr().add(offset), len) }
    }
}

impl Shared {
    /// Copies the bytes from `offset` on into all of `to`. Works on a read-only mapping.
    ///
    /// # Panics
    /// If the range is not inside the mapping.
    pub fn copy_to_span(&self, offset: usize, to: &HostSpan) {
        assert!(
            offset.checked_add(to.len()).is_some_and(|end| end <= self.len),
            "the range is outside the mapping"
        );
        // SAFETY: inside the mapping, which is readable until drop; the span is only read, and gone
        // before this returns.
        let from = unsafe { HostSpan::new(self.mapping.base.as_ptr().add(offset), to.len()) };
        to.copy_from_span(&from);
    }
}

impl AsFd for Shared {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for Range {
    fn drop(&mut self) {
        // SAFETY: exactly the range that was mapped; the value is gone afterwards.
        unsafe { unmap::later(self.base.as_ptr(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn huge_pages_are_used_if_the_system_has_free_ones_and_small_pages_otherwise() {
        let free =
            std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
        let free: usize = free.ok().and_then(|n| n.trim().parse().ok()).unwrap_or(0);
        let len = HUGE_PAGE + 4096;
        let ours = Shared::allocate("kvferry-test", len).expect("memory");
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
        let huge = Shared::allocate("kvferry-test", usize::MAX / 4);
        assert!(huge.is_err(), "no system has that much memory");
    }

    #[test]
    fn collapsed_memory_keeps_its_bytes_for_all_that_map_it() {
        let ours = Shared::create("kvferry-test", 2 * HUGE_PAGE + 4096).expect("memory");
        let fd = ours.as_fd().try_clone_to_owned().expect("a descriptor");
        let theirs = Shared::open(fd, ours.len(), true).expect("sealed and long enough");
        ours.span(HUGE_PAGE - 3, 6).copy_from(b"before");
        for (at, len) in [(4096, HUGE_PAGE), (0, 4096), (2 * HUGE_PAGE, HUGE_PAGE)] {
            let e = ours.collapse(at, len).expect_err("not whole huge pages of the mapping");
            assert_eq!(e.kind(), io::ErrorKind::InvalidInput, "{at} {len}");
        }
        if let Err(e) = ours.collapse(0, 2 * HUGE_PAGE) {
            println!("SKIPPED: huge pages: {e}");
        }
        let mut back = [0; 6];
        theirs.span(HUGE_PAGE - 3, 6).copy_to(&mut back);
        assert_eq!(&back, b"before");
        theirs.span(HUGE_PAGE - 3, 6).copy_from(b"behind");
        ours.span(HUGE_PAGE - 3, 6).copy_to(&mut back);
        assert_eq!(&back, b"behind");
    }

    #[test]
    fn allocated_memory_has_its_pages_before_the_first_touch() {
        let taken = |shared: &Shared| {
            let stat = rustix::fs::fstat(shared.as_fd()).expect("an open file");
            u64::try_from(stat.st_blocks).expect("a count") * 512
        };
        // Neither a multiple of the bytes that one system call populates, nor of a huge page.
        let len = usize::try_from(TAKE_STEP).expect("small") + HUGE_PAGE + 4096;
        let allocated = Shared::allocate("kvferry-test", len).expect("memory");
        assert!(taken(&allocated) >= len as u64, "{} of {len}", taken(&allocated));
        let lazy = Shared::create("kvferry-test", len).expect("memory");
        assert_eq!(taken(&lazy), 0);
    }

    #[test]
    fn more_memory_than_the_system_has_is_refused() {
        let available = usize::try_from(available().expect("this is Linux")).expect("64 bits");
        let e = Shared::allocate("kvferry-test", 2 * available).expect_err("twice what there is");
        assert_eq!(e.kind(), io::ErrorKind::OutOfMemory, "{e}");
    }

    #[test]
    fn a_process_that_receives_sealed_memory_can_only_read_it() {
        let ours = Shared::create("kvferry-test", 4096).expect("memory");
        ours.seal_against_writes().expect("a kernel since 5.1");
        ours.word(0).store(1, Ordering::SeqCst);
        let fd = || ours.as_fd().try_clone_to_owned().expect("a descriptor");
        assert!(Shared::open(fd(), 4096, true).is_err());
        let theirs = Shared::open(fd(), 4096, false).expect("a read-only mapping");
        assert_eq!(theirs.load(0), 1);
        ours.span(100, 3).copy_from(b"abc");
        let here = Shared::create("kvferry-test", 4096).expect("memory");
        theirs.copy_to_span(100, &here.span(0, 3));
        let mut back = [0; 3];
        here.span(0, 3).copy_to(&mut back);
        assert_eq!(&back, b"abc");
    }

    #[test]
    fn words_of_32_bits_are_inside_the_mapping() {
        let shared = Shared::create("kvferry-test", 4096).expect("memory");
        shared.words32::<2>(4088)[1].store(7, Ordering::SeqCst);
        assert_eq!(shared.load(4088), u64::from_ne_bytes([0, 0, 0, 0, 7, 0, 0, 0]));
        shared.advise_huge_pages();
        shared.prefetch(4095);
        shared.prefetch(usize::MAX);
        for offset in [4092, 2, usize::MAX - 3] {
            let words = || shared.words32::<2>(offset)[0].load(Ordering::SeqCst);
            assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(words)).is_err());
        }
    }

    #[test]
    fn the_pages_are_freed_after_the_descriptor_was_closed() {
        let shared = Shared::create("kvferry-closed-first", 4096).expect("memory");
        let is_mapped = || {
            let maps =
                std::fs::read_to_string("/proc/self/maps").expect("the maps of this process");
            maps.contains("memfd:kvferry-closed-first")
        };
        let closing = crate::fd::hold_closing();
        let dropping = std::thread::spawn(move || drop(shared));
        // Long enough for the thread to reach the lock.
        std::thread::sleep(std::time::Duration::from_millis(100));
        assert!(is_mapped(), "the pages were freed before the descriptor was closed");
        drop(closing);
        dropping.join().expect("no panic");
        assert!(!is_mapped());
    }

    #[test]
    fn memory_that_could_shrink_or_is_too_short_is_refused() {
        let plain = rustix::fs::memfd_create("kvferry-test", MemfdFlags::CLOEXEC).expect("a file");
        rustix::fs::ftruncate(&plain, 8192).expect("space for the file");
        let e = Shared::open(plain, 4096, false).expect_err("not sealed");
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
        let ours = Shared::create("kvferry-test", 4096).expect("memory");
        let fd = ours.as_fd().try_clone_to_owned().expect("a descriptor");
        let e = Shared::open(fd, 4097, false).expect_err("too short");
        assert_eq!(e.kind(), io::ErrorKind::InvalidData);
    }
}
