//! Finding out what the kernel lets this process do, by doing it.

use crate::check;
use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Sets up an io_uring and closes it again.
///
/// # Errors
/// What the kernel says: `ENOSYS` where it has none, `EPERM` where a sysctl or a seccomp filter
/// keeps it from this process.
pub fn io_uring() -> io::Result<()> {
    // `struct io_uring_params`: 120 bytes, all zero for no flags.
    let mut params = [0u32; 30];
    // SAFETY: the kernel reads and writes one `io_uring_params`, which `params` has the size of.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    let fd = check(fd as libc::ssize_t)?;
    // SAFETY: the call succeeded, so this is a new descriptor that nobody else knows.
    drop(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
    Ok(())
}

/// Copies bytes out of another process, or this one.
///
/// # Errors
/// What the kernel says: `EPERM` where this process may not trace the other (another user, Yama,
/// not dumpable), `ENOSYS` without `CONFIG_CROSS_MEMORY_ATTACH` or under a seccomp filter that
/// says so, `EFAULT` where nothing is mapped, `ESRCH` without that process.
pub fn read_process(pid: u32, address: u64, to: &mut [u8]) -> io::Result<usize> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let pid = libc::pid_t::try_from(pid).map_err(invalid)?;
    let address = usize::try_from(address).map_err(invalid)?;
    let local = libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: to.len() };
    // SAFETY: the kernel writes at most `to.len()` bytes to `to`, which is borrowed mutably. The
    // other address is only looked up by the kernel, in the other process; if nothing is mapped
    // there, the call fails.
    check(unsafe { libc::process_vm_readv(pid, &raw const local, 1, &raw const remote, 1, 0) })
}

/// The C library that this process runs on, such as `glibc 2.36`.
pub fn c_library() -> String {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: takes nothing, and returns a string that lives as long as the library.
        let version = unsafe { CStr::from_ptr(libc::gnu_get_libc_version()) };
        format!("glibc {}", version.to_string_lossy())
    }
    #[cfg(not(target_env = "gnu"))]
    {
        let _: Option<&CStr> = None;
        "not glibc".to_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_can_read_itself() {
        let known = *b"known by";
        let mut read = [0; 8];
        match read_process(std::process::id(), known.as_ptr() as u64, &mut read) {
            Ok(n) => assert_eq!((n, read), (8, known)),
            // A sandbox without the call.
            Err(e) => assert!(e.raw_os_error().is_some(), "{e}"),
        }
    }

    #[test]
    fn nothing_is_read_where_nothing_is_mapped() {
        let mut read = [0; 8];
        assert!(read_process(std::process::id(), 0, &mut read).is_err());
        assert_eq!(read, [0; 8]);
    }

    #[test]
    fn a_ring_is_given_or_the_kernel_says_why_not() {
        if let Err(e) = io_uring() {
            assert!(e.raw_os_error().is_some(), "{e}");
        }
        assert!(!c_library().is_empty());
    }
}
