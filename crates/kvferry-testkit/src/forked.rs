//! Code in a forked process.

use std::thread;
use std::time::{Duration, Instant};

/// The longest that the forked process may take: its end shows that it hangs.
const FORKED_WITHIN: Duration = Duration::from_secs(60);

/// Forks, and calls `body` in the forked process, which then ends with what it returns. `None` if it did not
/// return in time. `body` must not need a lock that another thread of this process may hold.
pub fn in_forked_process(body: impl FnOnce() -> u8) -> Option<u8> {
    // SAFETY: the forked process takes no lock that another thread of its parent may hold, as the caller
    // promises, and leaves by `_exit`. At worst it hangs, which is noticed below.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "no process can be forked");
    if pid == 0 {
        let code = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).unwrap_or(u8::MAX);
        // SAFETY: ends the forked process at once, without running its parent's destructors.
        unsafe { libc::_exit(code.into()) }
    }
    let mut status = 0;
    let give_up = Instant::now() + FORKED_WITHIN;
    loop {
        // SAFETY: `status` outlives the call, and the pid is our child's.
        let waited = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
        if waited == pid {
            return u8::try_from(libc::WEXITSTATUS(status)).ok();
        }
        if Instant::now() > give_up {
            // SAFETY: touches no memory; the child was not waited for.
            unsafe { libc::kill(pid, libc::SIGKILL) };
            return None;
        }
        thread::sleep(Duration::from_millis(5));
    }
}
