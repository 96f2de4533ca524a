//! kvferry's system layer: every foreign call in one place, behind safe functions.
//!
//! Nothing here knows what KV cache is. The crate is published only because `kvferry` needs it;
//! its interface changes without notice.
//!
//! | module | what it wraps |
//! |---|---|
//! | [`span`] | a piece of host memory that is promised to stay mapped while it is lent |
//! | [`fd`] | descriptors that a forked child gives up |
//! | [`socket`] | TCP sockets, gather and scatter over spans |
//! | [`vectors`] | gather and scatter of bytes and spans, alternating |
//! | [`poll`] | epoll, event descriptors, waiting for one descriptor |
//! | [`clock`] | `CLOCK_BOOTTIME`; other processes' processor time |
//! | [`map`] | anonymous memory |
//! | [`shared`] | memory shared between processes by descriptor |
//! | [`unix`] | packets and descriptors between processes of one host |
//! | [`process_vm`] | copying between this process's memory and another's |
//! | [`thread`] | native threads that take no signals |
//! | [`net`] | addresses of this host |
//! | [`probe`] | what the kernel lets this process do, found out by doing it |
//! | [`vendor`] | libibverbs, libcuda and libcufile, loaded at run time |

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

/// Calls `f` again for as long as a signal interrupts it.
pub(crate) fn retry_on_intr<T>(mut f: impl FnMut() -> std::io::Result<T>) -> std::io::Result<T> {
    loop {
        match f() {
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

/// Turns the `-1` of a C call into the error it left behind.
pub(crate) fn check(n: libc::ssize_t) -> std::io::Result<usize> {
    usize::try_from(n).map_err(|_| std::io::Error::last_os_error())
}
