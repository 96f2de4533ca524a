//! Usage of a process: processor time, and how often its threads slept or were preempted.

use std::fs;
use std::io;
use std::ops::Sub;
use std::time::Duration;

use kvferry_sys::clock::process_cpu_time;
use serde::{Deserialize, Serialize};

/// Usage since the start, or between two moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Usage {
    pub(crate) cpu: Duration,
    /// Times that a thread slept; a wake-up follows each.
    pub(crate) waits: u64,
    /// Times that a thread was preempted.
    pub(crate) preemptions: u64,
}

impl Usage {
    /// Waits and preemptions of threads that have ended are not counted.
    pub(crate) fn of(pid: u32) -> io::Result<Usage> {
        let mut usage = Usage { cpu: process_cpu_time(pid)?, ..Usage::default() };
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            // The thread may have ended.
            let Ok(status) = fs::read_to_string(thread?.path().join("status")) else { continue };
            let value = |name: &str| {
                let line = status.lines().find_map(|line| line.strip_prefix(name));
                line.and_then(|line| line.trim().parse::<u64>().ok()).unwrap_or(0)
            };
            usage.waits += value("voluntary_ctxt_switches:");
            usage.preemptions += value("nonvoluntary_ctxt_switches:");
        }
        Ok(usage)
    }

    pub(crate) fn here() -> io::Result<Usage> {
        Usage::of(std::process::id())
    }
}

impl Sub for Usage {
    type Output = Usage;

    fn sub(self, before: Usage) -> Usage {
        Usage {
            cpu: self.cpu.saturating_sub(before.cpu),
            waits: self.waits.saturating_sub(before.waits),
            preemptions: self.preemptions.saturating_sub(before.preemptions),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sleeping_is_a_wait_and_working_takes_time() {
        let before = Usage::here().expect("this process has tasks");
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut state = 1u64;
        while Usage::here().expect("this process has tasks").cpu
            < before.cpu + Duration::from_millis(5)
        {
            state = std::hint::black_box(state.wrapping_mul(3));
        }
        let used = Usage::here().expect("this process has tasks") - before;
        assert!(used.waits >= 10 && used.cpu >= Duration::from_millis(5), "{used:?}");
    }
}
