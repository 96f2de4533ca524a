//! Device memory as such: a memfd with the engines' mapping of it, and address ranges that the
//! process cannot touch.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::abi::{Error, Result};

pub(crate) const PAGE: u64 = 4096;

/// A memfd that holds device bytes. The mapping is the engines' own; the program has no pointer
/// into it.
#[derive(Debug)]
pub(crate) struct Segment {
    fd: OwnedFd,
    base: *mut u8,
    len: u64,
    name: String,
}

// SAFETY: `base` is a mapping that this value owns; the methods copy bytes and lend no reference.
unsafe impl Send for Segment {}
// SAFETY: as above. All callers in this process hold the driver's lock; other processes that
// share the memfd may change bytes meanwhile, and only raw copies touch them.
unsafe impl Sync for Segment {}

impl Segment {
    /// New memory of `len` bytes, a multiple of the page, filled with `poison`. The kernel shows
    /// `name` beside the descriptor, by which an importer knows what it holds.
    pub(crate) fn create(len: u64, name: String, poison: u8) -> Result<Self> {
        let c_name = std::ffi::CString::new(name.as_str()).map_err(|_| Error::INVALID_VALUE)?;
        // SAFETY: `c_name` is a C string; the call makes a descriptor that nothing else owns.
        let fd = unsafe {
            let fd = libc::memfd_create(c_name.as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 {
                return Err(Error::OPERATING_SYSTEM);
            }
            OwnedFd::from_raw_fd(fd)
        };
        // SAFETY: the descriptor is open.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), len as libc::off_t) } != 0 {
            return Err(Error::OUT_OF_MEMORY);
        }
        let segment = Self::map(fd, len, name)?;
        segment.fill(0, len, poison);
        Ok(segment)
    }

    /// The memory behind `fd`, which another process or handle shares.
    pub(crate) fn import(fd: OwnedFd, name: String) -> Result<Self> {
        // SAFETY: zeroes are a valid `stat`, and the descriptor is open.
        let stat = unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &mut stat) != 0 {
                return Err(Error::OPERATING_SYSTEM);
            }
            stat
        };
        Self::map(fd, stat.st_size as u64, name)
    }

    fn map(fd: OwnedFd, len: u64, name: String) -> Result<Self> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice, which replaces none.
        let base = unsafe {
            let null = std::ptr::null_mut();
            libc::mmap(null, len as usize, protection, libc::MAP_SHARED, fd.as_raw_fd(), 0)
        };
        if base == libc::MAP_FAILED {
            return Err(Error::OUT_OF_MEMORY);
        }
        Ok(Self { fd, base: base.cast(), len, name })
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    /// Copies bytes out. The caller has checked that the range lies inside.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) {
        assert!(offset + into.len() as u64 <= self.len, "a read past the end of a segment");
        // SAFETY: the range lies in the mapping, and no `&mut` to it exists.
        unsafe {
            let from = self.base.add(offset as usize);
            std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len());
        }
    }

    /// Copies bytes in. The caller has checked that the range lies inside.
    pub(crate) fn write(&self, offset: u64, from: &[u8]) {
        assert!(offset + from.len() as u64 <= self.len, "a write past the end of a segment");
        // SAFETY: the range lies in the mapping, and no reference to it exists.
        unsafe {
            let into = self.base.add(offset as usize);
            std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len());
        }
    }

    pub(crate) fn fill(&self, offset: u64, len: u64, byte: u8) {
        assert!(offset + len <= self.len, "a fill past the end of a segment");
        // SAFETY: the range lies in the mapping, and no reference to it exists.
        unsafe { std::ptr::write_bytes(self.base.add(offset as usize), byte, len as usize) };
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and nothing uses it any more.
        unsafe { libc::munmap(self.base.cast(), self.len as usize) };
    }
}

/// A range of addresses that faults when the process touches it. A page on either side belongs
/// to it, so that neighbours never touch.
#[derive(Debug)]
pub(crate) struct Reserved {
    start: u64,
    whole: u64,
    align: u64,
    len: u64,
}

impl Reserved {
    /// A range of `len` bytes whose start is a multiple of `align`, a power of two.
    pub(crate) fn new(len: u64, align: u64) -> Result<Self> {
        let align = align.max(PAGE);
        let whole = len.checked_add(align + 2 * PAGE).ok_or(Error::INVALID_VALUE)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice, which replaces none.
        let start = unsafe {
            let null = std::ptr::null_mut();
            libc::mmap(null, whole as usize, libc::PROT_NONE, flags, -1, 0)
        };
        if start == libc::MAP_FAILED {
            return Err(Error::OUT_OF_MEMORY);
        }
        Ok(Self { start: start as u64, whole, align, len })
    }

    pub(crate) fn base(&self) -> u64 {
        (self.start + PAGE).next_multiple_of(self.align)
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn holds(&self, address: u64) -> bool {
        (self.start..self.start + self.whole).contains(&address)
    }

    /// Maps `segment` into the range for the process too: managed memory.
    pub(crate) fn expose(&self, segment: &Segment) -> Result {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        let (base, len) = (self.base() as *mut libc::c_void, self.len.min(segment.len()) as usize);
        // SAFETY: the fixed range lies inside the reservation, which this value owns.
        let at = unsafe { libc::mmap(base, len, protection, flags, segment.fd.as_raw_fd(), 0) };
        if at == libc::MAP_FAILED { Err(Error::OUT_OF_MEMORY) } else { Ok(()) }
    }

    /// Takes the range from the process again.
    pub(crate) fn conceal(&self) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        let (base, len) = (self.base() as *mut libc::c_void, self.len as usize);
        // SAFETY: the fixed range lies inside the reservation, which this value owns.
        unsafe { libc::mmap(base, len, libc::PROT_NONE, flags, -1, 0) };
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no address in it is valid any more.
        unsafe { libc::munmap(self.start as *mut libc::c_void, self.whole as usize) };
    }
}
