//! Whether a process that another process has named still runs.

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io;
use std::os::unix::fs::MetadataExt;

/// A process, as other processes of its pid namespace can find it: its number is given to no other one that started
/// at the same time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    pid: u32,
    /// Time at which the process started, in ticks since the system started.
    started: u64,
    /// The pid namespace's inode.
    namespace: u64,
}

impl Process {
    /// Describes this process.
    ///
    /// # Errors
    /// The kernel's error where `/proc` can't be read.
    pub fn this() -> io::Result<Self> {
        Ok(Self { pid: std::process::id(), started: started("self")?, namespace: namespace()? })
    }

    /// Encodes the process for memory that processes share.
    pub fn to_words(self) -> [u64; 3] {
        [self.pid.into(), self.started, self.namespace]
    }

    /// Decodes the words of [`Process::to_words`]; `None` if they hold no pid.
    pub fn from_words([pid, started, namespace]: [u64; 3]) -> Option<Self> {
        let pid = u32::try_from(pid).ok().filter(|it| *it > 0)?;
        Some(Self { pid, started, namespace })
    }

    /// Whether a thread of it still runs, or has not left the kernel yet. `None` if that can't be seen from here.
    pub fn runs(&self) -> Option<bool> {
        if namespace().ok()? != self.namespace {
            return None;
        }
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw)?;
        // First: from then on the number can't be another process's without the descriptor saying that this one ended.
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Err(Errno::SRCH) => return Some(false),
            opened => opened.ok()?,
        };
        if started(&self.pid.to_string()).ok()? != self.started {
            return Some(false);
        }
        let mut fds = [PollFd::new(&pidfd, PollFlags::IN)];
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut fds, Some(&at_once)).ok().map(|ready| ready == 0)
    }
}

fn namespace() -> io::Result<u64> {
    Ok(std::fs::metadata("/proc/self/ns/pid")?.ino())
}

/// The 22nd field of the process's `stat`.
fn started(pid: &str) -> io::Result<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"))?;
    // The second field is the program's name in brackets, which may have blanks and brackets in it.
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    let field = behind_name.split_whitespace().nth(19).and_then(|it| it.parse().ok());
    field.ok_or_else(|| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_runs_until_its_last_thread_has_ended() {
        let this = Process::this().expect("/proc");
        assert_eq!(this.runs(), Some(true));
        assert_eq!(Process::from_words(this.to_words()), Some(this));
        assert_eq!(Process::from_words([0; 3]), None);
        let earlier = Process { started: this.started - 1, ..this };
        assert_eq!(earlier.runs(), Some(false), "the number is another one's now");
        let elsewhere = Process { namespace: this.namespace + 1, ..this };
        assert_eq!(elsewhere.runs(), None);
        let mut child = Command::new("sleep").arg("1000").spawn().expect("a process");
        let pid = child.id();
        let other = Process { pid, started: started(&pid.to_string()).expect("it runs"), ..this };
        assert_eq!(other.runs(), Some(true));
        child.kill().expect("it runs");
        // It is not reaped.
        while other.runs() == Some(true) {
            std::thread::yield_now();
        }
        child.wait().expect("it was killed");
        assert_eq!(other.runs(), Some(false));
    }
}
