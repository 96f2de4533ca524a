//! Finds out what the kernel permits this process, by attempting it.

use crate::check;
use std::ffi::CStr;
use std::io;
use std::os::fd::{FromRawFd, OwnedFd, RawFd};

/// Sets up an io_uring and closes it again.
///
/// # Errors
/// The kernel's error: `ENOSYS` if it has no io_uring, `EPERM` if a sysctl or a seccomp filter
/// forbids it.
pub fn io_uring() -> io::Result<()> {
    // `struct io_uring_params`: 120 bytes, all zero for no flags.
    let mut params = [0u32; 30];
    // SAFETY: the kernel reads and writes one `io_uring_params`, and `params` has its size.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, params.as_mut_ptr()) };
    let fd = check(fd as libc::ssize_t)?;
    // SAFETY: the call succeeded, so this is a new descriptor without another owner.
    drop(unsafe { OwnedFd::from_raw_fd(fd as RawFd) });
    Ok(())
}

/// The C library of this process, such as `glibc 2.36`.
pub fn c_library() -> String {
    #[cfg(target_env = "gnu")]
    {
        // SAFETY: takes no argument, and returns a string that lives as long as the library.
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
    fn a_ring_is_set_up_or_the_kernel_gives_a_reason() {
        if let Err(e) = io_uring() {
            assert!(e.raw_os_error().is_some(), "{e}");
        }
        assert!(!c_library().is_empty());
    }
}
