//! Copies between this process's memory and another's, by address. What the other process holds
//! there is its own business: nothing here knows whether it is still what it was.

use std::io::{self, IoSlice, IoSliceMut};

use crate::check;

/// The most ranges of either side that one call takes.
pub const RANGES_MAX: usize = 1024;

/// A range of another process's memory.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct RemoteSlice(libc::iovec);

impl RemoteSlice {
    /// `len` bytes at `addr` there.
    pub fn new(addr: u64, len: usize) -> Self {
        Self(libc::iovec { iov_base: addr as usize as *mut _, iov_len: len })
    }
}

/// Copies `local` to `remote` in the process `pid`; both are taken as one run of bytes. Bytes
/// copied: fewer than asked for if a range there is not mapped.
///
/// # Errors
/// `InvalidInput` for this process itself, whose memory has references; else what the kernel says.
pub fn write(pid: u32, local: &[IoSlice<'_>], remote: &[RemoteSlice]) -> io::Result<usize> {
    let pid = other(pid)?;
    // SAFETY: an `IoSlice` has the layout of an `iovec` and its bytes are borrowed for the call,
    // which only reads them. A `RemoteSlice` is an `iovec`; what it names is not in this process.
    check(unsafe {
        libc::process_vm_writev(
            pid,
            local.as_ptr().cast(),
            local.len() as libc::c_ulong,
            remote.as_ptr().cast(),
            remote.len() as libc::c_ulong,
            0,
        )
    })
}

/// Copies `remote` in the process `pid` to `local`; see [`write`].
///
/// # Errors
/// As [`write`].
pub fn read(pid: u32, local: &mut [IoSliceMut<'_>], remote: &[RemoteSlice]) -> io::Result<usize> {
    let pid = other(pid)?;
    // SAFETY: an `IoSliceMut` has the layout of an `iovec` and its bytes are borrowed mutably for
    // the call, which writes them and nothing else. A `RemoteSlice` is an `iovec`.
    check(unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr().cast(),
            local.len() as libc::c_ulong,
            remote.as_ptr().cast(),
            remote.len() as libc::c_ulong,
            0,
        )
    })
}

fn other(pid: u32) -> io::Result<libc::pid_t> {
    match libc::pid_t::try_from(pid) {
        Ok(pid) if pid > 0 && pid as u32 != std::process::id() => Ok(pid),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "not the pid of another process")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_memory_is_refused() {
        let (mut held, remote) = ([0u8; 8], [RemoteSlice::new(4096, 8)]);
        let this = std::process::id();
        for pid in [this, 0, u32::MAX] {
            assert!(write(pid, &[IoSlice::new(&[1; 8])], &remote).is_err());
            assert!(read(pid, &mut [IoSliceMut::new(&mut held)], &remote).is_err());
        }
    }

    #[test]
    fn what_a_child_holds_is_read_and_nothing_is_read_where_nothing_is() {
        use std::process::{Command, Stdio};
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat is there");
        let maps = std::fs::read_to_string(format!("/proc/{}/maps", child.id())).expect("it runs");
        let start = maps.split_once('-').expect("a range").0;
        let start = u64::from_str_radix(start, 16).expect("an address");
        let mut held = [0u8; 4];
        let mut into = [IoSliceMut::new(&mut held)];
        match read(child.id(), &mut into, &[RemoteSlice::new(start, 4)]) {
            Ok(4) => assert_eq!(&held, b"\x7fELF"),
            Ok(n) => panic!("{n} bytes"),
            Err(why) => {
                let line = format!("SKIPPED: reading a child's memory: {why}\n");
                let _ = io::Write::write_all(&mut io::stderr(), line.as_bytes());
            }
        }
        let nowhere = [RemoteSlice::new(4096, 4)];
        assert!(read(child.id(), &mut [IoSliceMut::new(&mut held)], &nowhere).is_err());
        drop(child.stdin.take());
        child.wait().expect("it leaves at the end of its input");
    }
}
