//! Bytes of this process, read and written as a device does: beside the program, and with an
//! error instead of a signal where nothing is mapped.
//!
//! The kernel copies (`process_vm_readv` on this very process), so that bytes which the program
//! changes at the same time are torn and not undefined behaviour.

use crate::abi::{Error, Result};

/// Copies the bytes at `address` into `into`. `ILLEGAL_ADDRESS` where memory is not readable.
pub(crate) fn read(address: u64, into: &mut [u8]) -> Result {
    let local = libc::iovec { iov_base: into.as_mut_ptr().cast(), iov_len: into.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: into.len() };
    // SAFETY: `local` spans `into`, which is borrowed for the call. The kernel checks `remote`.
    let n = unsafe { libc::process_vm_readv(libc::getpid(), &local, 1, &remote, 1, 0) };
    whole(n, into.len())
}

/// Copies `from` to `address`. `ILLEGAL_ADDRESS` where memory is not writable.
pub(crate) fn write(address: u64, from: &[u8]) -> Result {
    let local = libc::iovec { iov_base: from.as_ptr().cast_mut().cast(), iov_len: from.len() };
    let remote = libc::iovec { iov_base: address as *mut libc::c_void, iov_len: from.len() };
    // SAFETY: the kernel only reads `local`, which spans `from`, and checks `remote`. A caller of
    // the driver names as a destination only memory that it lends to the device.
    let n = unsafe { libc::process_vm_writev(libc::getpid(), &local, 1, &remote, 1, 0) };
    whole(n, from.len())
}

fn whole(n: isize, len: usize) -> Result {
    if n == len as isize { Ok(()) } else { Err(Error::ILLEGAL_ADDRESS) }
}

/// Whether the process can read `len` bytes from `address`, by their first and last byte.
pub(crate) fn readable(address: u64, len: u64) -> bool {
    let mut byte = [0];
    len == 0 || read(address, &mut byte).is_ok() && read(address + len - 1, &mut byte).is_ok()
}
