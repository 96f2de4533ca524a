//! Copies between this process's memory and another's, without the other process taking part.

use crate::span::HostSpan;
use crate::{check, retry_on_intr};
use std::io::{self, IoSlice, IoSliceMut};

/// Ranges of one call on either side, at most.
pub const RANGES_MAX: usize = 1024;

/// `len` bytes at an address of another process.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct RemoteSpan(libc::iovec);

// SAFETY: an address of another process and a length; this process never dereferences it.
unsafe impl Send for RemoteSpan {}

impl RemoteSpan {
    /// `len` bytes at `addr` of the other process.
    pub fn new(addr: usize, len: usize) -> Self {
        Self(libc::iovec { iov_base: std::ptr::without_provenance_mut(addr), iov_len: len })
    }

    fn as_iovecs(spans: &[Self]) -> &[libc::iovec] {
        // SAFETY: `RemoteSpan` is a transparent wrapper of `iovec`.
        unsafe { std::slice::from_raw_parts(spans.as_ptr().cast(), spans.len()) }
    }
}

impl std::fmt::Debug for RemoteSpan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:p}+{:#x}", self.0.iov_base, self.0.iov_len)
    }
}

/// Copies `from` to the memory of process `pid` at `to`; returns how many bytes were copied: fewer
/// than requested if a range ends in memory that is not mapped.
///
/// The caller decides whether to trust `pid`, and ensures that the number has not passed to another
/// process.
///
/// # Safety
/// If `pid` is this process, no reference to the memory at `to` may exist.
///
/// # Errors
/// `PermissionDenied` if the kernel refuses, `NotFound` if there is no such process, `InvalidInput`
/// beyond [`RANGES_MAX`]; `EFAULT` if nothing could be copied.
pub unsafe fn write(pid: i32, from: &[HostSpan], to: &[RemoteSpan]) -> io::Result<usize> {
    // SAFETY: the spans are valid for this call and only read; the caller promises the rest.
    unsafe { copy_out(pid, HostSpan::as_iovecs(from), to) }
}

/// Copies slices to the memory of another process at `to`; otherwise like [`write()`].
///
/// # Errors
/// As [`write()`]; `InvalidInput` for this process, because references to its memory exist.
pub fn write_slices(pid: i32, from: &[IoSlice<'_>], to: &[RemoteSpan]) -> io::Result<usize> {
    other(pid)?;
    // SAFETY: an `IoSlice` has the layout of an `iovec`, and its bytes are borrowed for the call.
    let from = unsafe { std::slice::from_raw_parts(from.as_ptr().cast(), from.len()) };
    // SAFETY: the slices are only read, and the remote ranges belong to another process.
    unsafe { copy_out(pid, from, to) }
}

/// Copies from the memory of another process at `from` to slices; otherwise like [`write_slices`].
///
/// # Errors
/// As [`write_slices`].
pub fn read_slices(pid: i32, to: &mut [IoSliceMut<'_>], from: &[RemoteSpan]) -> io::Result<usize> {
    other(pid)?;
    // SAFETY: an `IoSliceMut` has the layout of an `iovec`; the entries themselves are only read.
    let to = unsafe { std::slice::from_raw_parts(to.as_ptr().cast(), to.len()) };
    // SAFETY: the slices are borrowed mutably for the call.
    unsafe { copy_in(pid, to, from) }
}

/// Copies from the memory of process `pid` at `from` to `to`; otherwise like [`write()`].
///
/// # Errors
/// As [`write()`].
pub fn read(pid: i32, to: &[HostSpan], from: &[RemoteSpan]) -> io::Result<usize> {
    // SAFETY: the spans are valid for this call, and writable as their maker promised.
    unsafe { copy_in(pid, HostSpan::as_iovecs(to), from) }
}

/// Checks that `pid` is not this process. The kernel takes the number of any thread for its process.
fn other(pid: i32) -> io::Result<()> {
    let own = rustix::process::getpid().as_raw_nonzero().get();
    // SAFETY: no memory is passed, and signal 0 only asks whether this process has such a thread.
    let is_own_thread = || unsafe { libc::syscall(libc::SYS_tgkill, own, pid, 0) } == 0;
    if pid > 0 && !is_own_thread() {
        return Ok(());
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, "the pid is not another process's"))
}

/// # Safety
/// The local ranges are readable. If the process is this one, no references to the remote ranges
/// exist. The kernel checks whether the remote ranges are mapped.
unsafe fn copy_out(pid: i32, local: &[libc::iovec], remote: &[RemoteSpan]) -> io::Result<usize> {
    let remote = RemoteSpan::as_iovecs(remote);
    let (locals, remotes) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
    retry_on_intr(|| {
        // SAFETY: as the caller promises.
        check(unsafe {
            libc::process_vm_writev(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0)
        })
    })
}

/// # Safety
/// The local ranges are writable, and no other references to them exist. The remote ranges are only
/// read; the kernel checks whether they are mapped.
unsafe fn copy_in(pid: i32, local: &[libc::iovec], remote: &[RemoteSpan]) -> io::Result<usize> {
    let remote = RemoteSpan::as_iovecs(remote);
    let (locals, remotes) = (local.len() as libc::c_ulong, remote.len() as libc::c_ulong);
    retry_on_intr(|| {
        // SAFETY: as the caller promises.
        check(unsafe {
            libc::process_vm_readv(pid, local.as_ptr(), locals, remote.as_ptr(), remotes, 0)
        })
    })
}

/// Reads `bytes.len()` bytes at `addr` of process `pid`.
///
/// # Errors
/// As [`write()`]; `UnexpectedEof` if only a part could be read.
pub fn read_bytes(pid: i32, addr: usize, bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: a slice borrowed mutably for this call.
    let to = unsafe { HostSpan::new(bytes.as_mut_ptr(), bytes.len()) };
    let n = read(pid, &[to], &[RemoteSpan::new(addr, bytes.len())])?;
    if n == bytes.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Mapping;

    fn own_pid() -> i32 {
        i32::try_from(std::process::id()).expect("a pid is positive")
    }

    #[test]
    fn bytes_are_gathered_and_scattered() {
        let map = Mapping::anonymous(8192).expect("memory");
        map.span(0, 6).copy_from(b"abcdef");
        let at = map.as_ptr() as usize;
        let from = [map.span(0, 2), map.span(2, 4)];
        let to = [RemoteSpan::new(at + 100, 3), RemoteSpan::new(at + 200, 3)];
        // SAFETY: no references to the mapping exist.
        assert_eq!(unsafe { write(own_pid(), &from, &to) }.expect("our own memory"), 6);
        let mut back = [0; 6];
        read_bytes(own_pid(), at + 100, &mut back[..3]).expect("our own memory");
        read_bytes(own_pid(), at + 200, &mut back[3..]).expect("our own memory");
        assert_eq!(&back, b"abcdef");
    }

    #[test]
    fn memory_that_is_not_mapped_is_an_error() {
        let map = Mapping::anonymous(4096).expect("memory");
        // SAFETY: nothing is mapped there.
        let done = unsafe { write(own_pid(), &[map.span(0, 8)], &[RemoteSpan::new(8, 8)]) };
        let e = done.expect_err("null");
        assert_eq!(e.raw_os_error(), Some(libc::EFAULT));
    }

    #[test]
    fn slices_are_not_copied_to_or_from_this_process() {
        let (mut held, remote) = ([0; 8], [RemoteSpan::new(4096, 8)]);
        let (tell, told) = std::sync::mpsc::channel();
        let (end, ended) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            tell.send(tid).expect("the test waits");
            let _ = ended.recv();
        });
        let tid = told.recv().expect("the thread runs");
        for pid in [own_pid(), tid, 0, -1] {
            assert!(write_slices(pid, &[IoSlice::new(&[1; 8])], &remote).is_err());
            let e = read_slices(pid, &mut [IoSliceMut::new(&mut held)], &remote);
            assert_eq!(e.expect_err("ours").kind(), io::ErrorKind::InvalidInput);
        }
        drop(end);
        thread.join().expect("no panic");
    }

    #[test]
    fn a_process_that_is_gone_is_not_found() {
        let mut child = std::process::Command::new("true").spawn().expect("a child");
        let pid = i32::try_from(child.id()).expect("a pid is positive");
        child.wait().expect("it ends");
        let e = read_bytes(pid, 4096, &mut [0; 8]).expect_err("gone");
        assert_eq!(e.raw_os_error(), Some(libc::ESRCH));
    }
}
