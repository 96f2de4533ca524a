//! The agent in a forked process.

use super::command::Command;
use super::{Outcome, Server};
use kvferry::{Access, ErrorKind, Options};
use serde_json::json;
use std::thread;
use std::time::{Duration, Instant};

/// The longest that the forked process may take.
const FORKED_WITHIN: Duration = Duration::from_secs(10);

impl Server {
    /// Forks, makes three calls to the agent in the forked process, and counts those that failed
    /// with [`ErrorKind::Forked`].
    pub(super) fn fork(&self, command: Command<'_>) -> Outcome {
        let (peer, batch) = (self.peer(command)?, self.batch(command)?);
        // SAFETY: the forked process takes no lock that another thread of its parent may hold: it
        // only calls the agent, which promises to notice the fork, and leaves by `_exit`.
        let pid = unsafe { libc::fork() };
        if pid == 0 {
            let errors = [
                peer.write(&batch, &Options::default()).err(),
                self.agent().allocate(4096, Access::NONE).err(),
                peer.write_async(&batch, &Options::default())
                    .wait(Duration::from_secs(5))
                    .and_then(Result::err),
            ];
            let forked = errors.iter().flatten().filter(|e| e.kind() == ErrorKind::Forked).count();
            // SAFETY: ends the forked process at once, without running its parent's destructors.
            unsafe { libc::_exit(i32::try_from(forked).unwrap_or(-1)) }
        }
        let mut status = 0;
        let give_up = Instant::now() + FORKED_WITHIN;
        loop {
            // SAFETY: `status` outlives the call, and the pid is our child's.
            let waited = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
            if waited == pid {
                return Ok(json!({"forked": libc::WEXITSTATUS(status)}));
            }
            if Instant::now() > give_up {
                // SAFETY: touches no memory; the child was not waited for.
                unsafe { libc::kill(pid, libc::SIGKILL) };
                return Ok(json!({"forked": "hangs"}));
            }
            thread::sleep(Duration::from_millis(5));
        }
    }
}
