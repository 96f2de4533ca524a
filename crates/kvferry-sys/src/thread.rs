//! Native threads with all signals blocked.

use std::io;
use std::thread::JoinHandle;

/// Starts a thread with every signal blocked, so that the host process's signal handlers never run
/// on it.
///
/// # Errors
/// If the thread can't be started.
pub fn spawn<T: Send + 'static>(
    name: String,
    body: impl FnOnce() -> T + Send + 'static,
) -> io::Result<JoinHandle<T>> {
    // A new thread inherits its creator's signal mask: block, start, restore.
    // SAFETY: the sets are initialised by the calls before they are read.
    unsafe {
        let mut all = std::mem::zeroed();
        let mut before = std::mem::zeroed();
        libc::sigfillset(&raw mut all);
        let rc = libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        if rc != 0 {
            return Err(io::Error::from_raw_os_error(rc));
        }
        let handle = std::thread::Builder::new().name(name).spawn(body);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut());
        handle
    }
}

/// Processors that this process may run on, at least one.
pub fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
