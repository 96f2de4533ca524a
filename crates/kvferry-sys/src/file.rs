//! Files that are read and written at offsets.

use crate::fd::Tracked;
use crate::lock::try_flock;
use crate::map::Mapping;
use crate::pins::Pins;
use crate::retry_on_intr;
use crate::span::HostSpan;
use rustix::fs::{AtFlags, FallocateFlags, FileType, FlockOperation, Mode, OFlags, StatxFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;

/// Bytes of a page: the least that the kernel's page cache reads and writes at once. 4 KiB at least.
pub fn page() -> u64 {
    (rustix::param::page_size() as u64).max(4096)
}

/// Opens a regular file for reading. `None` if there is none: also if the name is a link, a pipe, a socket or
/// a folder. Never waits for another process, as opening a pipe does.
///
/// # Errors
/// The kernel's error.
pub fn open_regular(path: &Path) -> io::Result<Option<std::fs::File>> {
    use rustix::io::Errno;
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match retry_on_intr(|| Ok(rustix::fs::open(path, flags, Mode::empty())?)) {
        Ok(fd) => std::fs::File::from(fd),
        Err(e) => {
            // `ELOOP` is a link, `ENXIO` a socket.
            let absent = [Errno::NOENT, Errno::NOTDIR, Errno::LOOP, Errno::NXIO];
            let is_absent = Errno::from_io_error(&e).is_some_and(|it| absent.contains(&it));
            return if is_absent { Ok(None) } else { Err(e) };
        }
    };
    Ok(file.metadata()?.is_file().then_some(file))
}

/// Options for opening a file.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenFlags {
    /// Opened for reading.
    pub read: bool,
    /// Opened for writing.
    pub write: bool,
    /// Created if it does not exist, with mode 0600.
    pub create: bool,
    /// Opened to bypass the page cache (`O_DIRECT`).
    pub direct: bool,
}

/// Alignment that access past the page cache needs; each a power of two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Alignment {
    /// Addresses in memory.
    pub memory: u64,
    /// Offsets in the file, and lengths.
    pub offset: u64,
}

/// Reads the beginning of a regular file from its device, past the page cache where the file system can. Of anything else,
/// nothing is read.
///
/// # Errors
/// The kernel's error.
pub fn read_device(path: &Path) -> io::Result<()> {
    if open_regular(path)?.is_none() {
        // To open a pipe in its place would wait for the other end.
        return Ok(());
    }
    let how = OpenFlags { read: true, direct: true, ..OpenFlags::default() };
    let file = File::open(path, how).or_else(|_| {
        let file = File::open(path, OpenFlags { direct: false, ..how })?;
        file.forget_cached();
        Ok::<_, io::Error>(file)
    })?;
    let len = usize::try_from(page()).expect("short");
    let memory = Mapping::anonymous(len)?;
    retry_on_intr(|| file.read_at(&[memory.span(0, len)], 0)).map(drop)
}

/// Does what [`File::forget_cached`] does, for any file.
pub fn forget_cached(file: &impl AsFd) {
    let _ = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
}

/// An open file. Closed in a forked child.
#[derive(Debug)]
pub struct File {
    /// The file's registrations, dropped before the descriptor: rings let go of the file before it is closed.
    pins: Pins,
    fd: Tracked<OwnedFd>,
    device: u64,
    inode: u64,
}

impl File {
    /// Opens a file.
    ///
    /// # Errors
    /// The kernel's error; `EINVAL` if the file system has no access past the page cache.
    pub fn open(path: &Path, how: OpenFlags) -> io::Result<Self> {
        let mut flags = match (how.read, how.write) {
            (_, false) => OFlags::RDONLY,
            (false, true) => OFlags::WRONLY,
            (true, true) => OFlags::RDWR,
        };
        flags |= OFlags::CLOEXEC;
        flags.set(OFlags::CREATE, how.create);
        flags.set(OFlags::DIRECT, how.direct);
        let fd = retry_on_intr(|| Ok(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?))?;
        Ok(Self::from_fd(fd))
    }

    /// Takes an open file.
    pub fn from_fd(fd: OwnedFd) -> Self {
        let (device, inode) = rustix::fs::fstat(&fd).map_or((0, 0), |it| {
            let is_device = FileType::from_raw_mode(it.st_mode) == FileType::BlockDevice;
            (if is_device { it.st_rdev } else { it.st_dev }, it.st_ino)
        });
        Self { pins: Pins::new(), fd: Tracked::new(fd), device, inode }
    }

    /// The number of the file system that the file is on, or of the block device that it is; 0 if the kernel does not
    /// say.
    pub fn device(&self) -> u64 {
        self.device
    }

    /// The number of the file in its file system; 0 if the kernel does not say.
    pub fn inode(&self) -> u64 {
        self.inode
    }

    /// The registrations of the file with rings.
    pub(crate) fn pins(&self) -> &Pins {
        &self.pins
    }

    /// Opens the same file once more, past the page cache.
    ///
    /// # Errors
    /// As [`File::open`]; also if `/proc` is not mounted.
    pub fn reopen_direct(&self, read: bool, write: bool) -> io::Result<Self> {
        let path = format!("/proc/self/fd/{}", self.fd.as_raw_fd());
        Self::open(Path::new(&path), OpenFlags { read, write, create: false, direct: true })
    }

    /// Bytes of the file; `None` if it is neither a regular file nor a block device.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn len(&self) -> io::Result<Option<u64>> {
        let stat = rustix::fs::fstat(&self.fd)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Ok(u64::try_from(stat.st_size).ok()),
            FileType::BlockDevice => {
                // Other holders of the descriptor share the position.
                let before = rustix::fs::tell(&self.fd)?;
                let end = rustix::fs::seek(&self.fd, rustix::fs::SeekFrom::End(0))?;
                rustix::fs::seek(&self.fd, rustix::fs::SeekFrom::Start(before))?;
                Ok(Some(end))
            }
            _ => Ok(None),
        }
    }

    /// Whether reads and writes are allowed, by how the file was opened.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn access(&self) -> io::Result<(bool, bool)> {
        let mode = rustix::fs::fcntl_getfl(&self.fd)? & OFlags::RWMODE;
        Ok((mode != OFlags::WRONLY, mode == OFlags::WRONLY || mode == OFlags::RDWR))
    }

    /// True if the kernel appends what is written, wherever it should go (`O_APPEND`).
    ///
    /// # Errors
    /// The kernel's error.
    pub fn appends(&self) -> io::Result<bool> {
        Ok(rustix::fs::fcntl_getfl(&self.fd)?.contains(OFlags::APPEND))
    }

    /// Makes the file long enough for `len` bytes at `offset`, and has its file system reserve their
    /// blocks. A file system that can't reserve blocks only gets the length.
    ///
    /// # Errors
    /// The kernel's error, such as `ENOSPC`.
    pub fn reserve(&self, offset: u64, len: u64) -> io::Result<()> {
        let reserved = retry_on_intr(|| {
            Ok(rustix::fs::fallocate(&self.fd, FallocateFlags::empty(), offset, len)?)
        });
        match reserved {
            Err(e) if e.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                let end = offset.saturating_add(len);
                if self.len()?.is_some_and(|now| now < end) {
                    retry_on_intr(|| Ok(rustix::fs::ftruncate(&self.fd, end)?))?;
                }
                Ok(())
            }
            reserved => reserved,
        }
    }

    /// Waits until what was written is on the device, with what is needed to read it again.
    ///
    /// # Errors
    /// The kernel's error. What was written before may be lost then, and a second call may say otherwise.
    pub fn sync_data(&self) -> io::Result<()> {
        retry_on_intr(|| Ok(rustix::fs::fdatasync(&self.fd)?))
    }

    /// Takes a lock (`flock`) together with others, unless another open file has it alone: then it is false. The kernel
    /// gives the lock up when this open file has no descriptor any more and no operation uses it, also one of a process
    /// that was killed. Idempotent.
    ///
    /// # Errors
    /// The kernel's error, such as of a file system that has no locks.
    pub fn try_lock_shared(&self) -> io::Result<bool> {
        try_flock(&self.fd, FlockOperation::NonBlockingLockShared)
    }

    /// Gives the lock up that [`File::try_lock_shared`] has taken, even while the file is in use.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn unlock(&self) -> io::Result<()> {
        try_flock(&self.fd, FlockOperation::Unlock).map(drop)
    }

    /// Drops what the page cache has of the file and needs not write. A hint.
    pub fn forget_cached(&self) {
        forget_cached(&self.fd);
    }

    /// Reads the first `len` bytes of the file into the page cache.
    pub fn will_need(&self, len: u64) {
        // Not by advice, which returns before the bytes are there.
        let mut buffer = vec![0; 1 << 20];
        let mut at = 0;
        while at < len {
            match rustix::io::pread(&self.fd, &mut buffer, at) {
                Ok(0) | Err(_) => break,
                Ok(n) => at += n as u64,
            }
        }
    }

    /// Alignment that a file opened past the page cache needs; a page where the kernel does not report it (before Linux
    /// 6.1).
    pub fn alignment(&self) -> Alignment {
        let page = Alignment { memory: page(), offset: page() };
        let asked = rustix::fs::statx(&self.fd, c"", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN);
        let Ok(stat) = asked else { return page };
        let (memory, offset) = (stat.stx_dio_mem_align.into(), stat.stx_dio_offset_align.into());
        let has_answer = stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0;
        let is_sane = |n: u64| n.is_power_of_two() && n <= 1 << 20;
        if has_answer && is_sane(memory) && is_sane(offset) {
            Alignment { memory, offset }
        } else {
            page
        }
    }

    /// Reads the bytes at `offset` into the spans, one after the other, as many as there are. 0 at the end of the file.
    ///
    /// # Errors
    /// The kernel's error; `EINVAL` for more than [`SPANS_MAX`] spans. `EINTR` is the caller's to repeat: a file system
    /// of a process (FUSE) may fail every call with it.
    pub fn read_at(&self, spans: &[HostSpan], offset: u64) -> io::Result<usize> {
        let (at, count) = (position(offset)?, count(spans)?);
        let spans = HostSpan::as_iovecs(spans);
        // SAFETY: each span is valid for writes of its length, as its maker promised.
        crate::check(unsafe { libc::preadv(self.fd.as_raw_fd(), spans.as_ptr(), count, at) })
    }

    /// Writes the bytes of the spans at `offset`, one after the other, as many as the file takes.
    ///
    /// # Errors
    /// The errors of [`File::read_at`].
    pub fn write_at(&self, spans: &[HostSpan], offset: u64) -> io::Result<usize> {
        let (at, count) = (position(offset)?, count(spans)?);
        let spans = HostSpan::as_iovecs(spans);
        // SAFETY: each span is valid for reads of its length, as its maker promised.
        crate::check(unsafe { libc::pwritev(self.fd.as_raw_fd(), spans.as_ptr(), count, at) })
    }
}

/// Spans of one [`File::read_at`] or [`File::write_at`], at most.
pub const SPANS_MAX: usize = 1024;

fn count(spans: &[HostSpan]) -> io::Result<libc::c_int> {
    match libc::c_int::try_from(spans.len()) {
        Ok(count) if spans.len() <= SPANS_MAX => Ok(count),
        _ => Err(io::ErrorKind::InvalidInput.into()),
    }
}

impl AsFd for File {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for File {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        self.fd.as_raw_fd()
    }
}

fn position(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| {
        io::Error::new(io::ErrorKind::InvalidInput, "an offset in a file is at most 2^63 - 1")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn how() -> OpenFlags {
        OpenFlags { read: true, write: true, create: true, direct: false }
    }

    fn temporary(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("kvferry-sys-{}-{name}", std::process::id()))
    }

    #[test]
    fn bytes_that_were_written_at_an_offset_are_read_there() {
        let path = temporary("offset");
        let file = File::open(&path, how()).expect("a file");
        let memory = Mapping::anonymous(8192).expect("memory");
        memory.span(0, 5).copy_from(b"block");
        let spans = [memory.span(0, 2), memory.span(2, 3)];
        assert_eq!(file.write_at(&spans, 10_000).expect("space"), 5);
        assert_eq!(file.len().expect("a file"), Some(10_005));
        let spans = [memory.span(4096, 4), memory.span(4100, 60)];
        assert_eq!(file.read_at(&spans, 10_000).expect("a file"), 5, "to its end");
        let mut back = [0; 5];
        memory.span(4096, 5).copy_to(&mut back);
        assert_eq!(&back, b"block");
        assert_eq!(file.read_at(&spans, 20_000).expect("a file"), 0, "behind its end");
        let many = vec![memory.span(0, 1); SPANS_MAX + 1];
        assert_eq!(file.write_at(&many[1..], 0).expect("space"), SPANS_MAX);
        let e = file.write_at(&many, 0).expect_err("too many");
        assert_eq!(e.kind(), io::ErrorKind::InvalidInput);
        file.sync_data().expect("a file system");
        std::fs::remove_file(&path).expect("made above");
    }

    #[test]
    fn a_reserved_file_has_its_length_and_is_not_shortened() {
        let path = temporary("reserved");
        let file = File::open(&path, how()).expect("a file");
        file.reserve(0, 100_000).expect("space");
        file.reserve(50, 10).expect("space");
        assert_eq!(file.len().expect("a file"), Some(100_000));
        assert_eq!(file.access().expect("open"), (true, true));
        std::fs::remove_file(&path).expect("made above");
    }

    #[test]
    fn alignment_is_a_power_of_two() {
        let path = temporary("alignment");
        let file = File::open(&path, how()).expect("a file");
        let alignment = file.alignment();
        assert!(alignment.memory.is_power_of_two() && alignment.offset.is_power_of_two());
        std::fs::remove_file(&path).expect("made above");
    }

    #[test]
    fn an_offset_beyond_the_kernels_is_refused() {
        let path = temporary("beyond");
        let file = File::open(&path, how()).expect("a file");
        let memory = Mapping::anonymous(1).expect("memory");
        let e = file.read_at(&[memory.span(0, 1)], u64::MAX).expect_err("no such offset");
        assert_eq!(e.kind(), io::ErrorKind::InvalidInput);
        std::fs::remove_file(&path).expect("made above");
    }
}
