//! Copying between this process's memory and another's, without the other taking part.

use crate::span::HostSpan;
use crate::{check, retry_on_intr};
use std::io;

/// Ranges that one call takes on either side.
pub const RANGES_MAX: usize = 1024;

/// `len` bytes at an address of another process.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct RemoteSpan(libc::iovec);

// SAFETY: an address of another process and a length; nothing here is dereferenced.
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

/// Copies `from` to the memory of process `pid` at `to`; returns how many bytes were copied,
/// which are fewer where a range ends in memory that is not mapped.
///
/// Who is to be trusted with `pid`, and that it is not another process by now, is the caller's.
///
/// # Errors
/// `PermissionDenied` where the kernel refuses, `NotFound` if there is no such process,
/// `InvalidInput` beyond [`RANGES_MAX`]; `EFAULT` if nothing could be copied.
pub fn write(pid: i32, from: &[HostSpan], to: &[RemoteSpan]) -> io::Result<usize> {
    let (local, remote) = (HostSpan::as_iovecs(from), RemoteSpan::as_iovecs(to));
    retry_on_intr(|| {
        // SAFETY: the local ranges are spans that are lent for this call and only read; the
        // remote ones are another address space's, which the kernel checks.
        check(unsafe {
            libc::process_vm_writev(
                pid,
                local.as_ptr(),
                local.len() as _,
                remote.as_ptr(),
                remote.len() as _,
                0,
            )
        })
    })
}

/// Copies from the memory of process `pid` at `from` to `to`; else as [`write`].
///
/// # Errors
/// As [`write`].
pub fn read(pid: i32, to: &[HostSpan], from: &[RemoteSpan]) -> io::Result<usize> {
    let (local, remote) = (HostSpan::as_iovecs(to), RemoteSpan::as_iovecs(from));
    retry_on_intr(|| {
        // SAFETY: the local ranges are spans that are lent for this call, writable by their
        // maker's promise; the remote ones are another address space's, which the kernel checks.
        check(unsafe {
            libc::process_vm_readv(
                pid,
                local.as_ptr(),
                local.len() as _,
                remote.as_ptr(),
                remote.len() as _,
                0,
            )
        })
    })
}

/// Reads `bytes.len()` bytes at `addr` of process `pid`.
///
/// # Errors
/// As [`write`]; `UnexpectedEof` if it could be read in part only.
pub fn read_bytes(pid: i32, addr: usize, bytes: &mut [u8]) -> io::Result<()> {
    // SAFETY: a slice that is borrowed mutably for this call.
    let to = unsafe { HostSpan::new(bytes.as_mut_ptr(), bytes.len()) };
    let n = read(pid, &[to], &[RemoteSpan::new(addr, bytes.len())])?;
    if n == bytes.len() { Ok(()) } else { Err(io::ErrorKind::UnexpectedEof.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Mapping;

    fn own_pid() -> i32 {
        i32::try_from(std::process::id()).expect("a process number")
    }

    #[test]
    fn bytes_are_gathered_and_scattered() {
        let map = Mapping::anonymous(8192).expect("memory");
        map.span(0, 6).copy_from(b"abcdef");
        let at = map.as_ptr() as usize;
        let from = [map.span(0, 2), map.span(2, 4)];
        let to = [RemoteSpan::new(at + 100, 3), RemoteSpan::new(at + 200, 3)];
        assert_eq!(write(own_pid(), &from, &to).expect("our own memory"), 6);
        let mut back = [0; 6];
        read_bytes(own_pid(), at + 100, &mut back[..3]).expect("our own memory");
        read_bytes(own_pid(), at + 200, &mut back[3..]).expect("our own memory");
        assert_eq!(&back, b"abcdef");
    }

    #[test]
    fn memory_that_is_not_mapped_is_an_error() {
        let map = Mapping::anonymous(4096).expect("memory");
        let e = write(own_pid(), &[map.span(0, 8)], &[RemoteSpan::new(8, 8)]).expect_err("null");
        assert_eq!(e.raw_os_error(), Some(libc::EFAULT));
    }

    #[test]
    fn a_process_that_is_gone_is_not_found() {
        let mut child = std::process::Command::new("true").spawn().expect("a child");
        let pid = i32::try_from(child.id()).expect("a process number");
        child.wait().expect("it ends");
        let e = read_bytes(pid, 4096, &mut [0; 8]).expect_err("gone");
        assert_eq!(e.raw_os_error(), Some(libc::ESRCH));
    }
}
