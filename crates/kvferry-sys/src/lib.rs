//! kvferry's system layer: all foreign calls, behind safe functions, and the locks of all crates.
//!
//! Nothing here depends on what the bytes mean. The crate is published only because `kvferry` needs
//! it; its interface changes without notice.
//!
//! Functions return the kernel's error unless their documentation names another.

pub mod alive;
pub mod clock;
mod crc64;
pub mod cuda;
pub mod fd;
pub mod file;
pub mod host;
pub mod lock;
pub mod map;
pub mod memory;
pub mod net;
pub mod owner;
pub mod pins;
pub mod poll;
pub mod private;
pub mod probe;
pub mod process;
pub mod process_vm;
pub mod random;
pub mod shared;
pub mod socket;
pub mod span;
pub mod stderr;
pub mod sync;
pub mod thread;
pub mod unix;
#[doc(hidden)]
pub mod unmap;
pub mod uring;
pub mod vectors;
pub mod vendor;

pub use fd::forked_since;
pub use span::HostSpan;

/// Repeats `f` while it fails with `EINTR`.
pub(crate) fn retry_on_intr<T>(mut f: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match f() {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Turns the `-1` of a C call into `errno`'s error.
pub(crate) fn check(n: libc::ssize_t) -> std::io::Result<usize> {
    usize::try_from(n).map_err(|_| std::io::Error::last_os_error())
}
