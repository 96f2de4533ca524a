//! kvferry's system layer: all foreign calls, behind safe functions.
//!
//! Nothing here depends on what the bytes mean. The crate is published only because `kvferry` needs
//! it; its interface changes without notice.
//!
//! | module | what it wraps |
//! |---|---|
//! | [`span`] | a range of host memory that stays mapped while it is in use |
//! | [`fd`] | descriptors that a forked child closes |
//! | [`socket`] | TCP sockets, gather and scatter over spans |
//! | [`vectors`] | gather and scatter of buffers and spans mixed |
//! | [`poll`] | epoll, event descriptors, waiting for one descriptor |
//! | [`clock`] | `CLOCK_BOOTTIME`; other processes' processor time |
//! | [`map`] | anonymous memory |
//! | [`shared`] | memory shared between processes by descriptor |
//! | [`alive`] | a mark in shared memory that the kernel sets when a thread ends |
//! | [`unix`] | packets and descriptors between processes of one host, over unix sockets |
//! | [`process_vm`] | copying between this process's memory and another's |
//! | [`thread`] | native threads with all signals blocked |
//! | [`net`] | addresses of this host |
//! | [`probe`] | attempts that show what the kernel permits this process |
//! | [`vendor`] | libibverbs, libcuda and libcufile, loaded at run time |

pub mod alive;
pub mod clock;
pub mod fd;
pub mod map;
pub mod net;
pub mod poll;
pub mod probe;
pub mod process_vm;
pub mod random;
pub mod shared;
pub mod socket;
pub mod span;
pub mod thread;
pub mod unix;
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
