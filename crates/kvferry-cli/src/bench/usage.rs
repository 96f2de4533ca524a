//! What a process has used: processor time, and how often its threads slept or were put aside.

use std::fs;
use std::io;
use std::ops::Sub;
use std::time::Duration;

use kvferry_sys::clock::process_cpu_time;
use serde::{Deserialize, Serialize};

/// So far, or between two moments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Usage {
    pub(crate) cpu: Duration,
    /// Times a thread gave up its core to wait: each is followed by a wake-up.
    pub(crate) waits: u64,
    /// Times a thread was put aside for another.
    pub(crate) preemptions: u64,
}

impl Usage {
    /// Threads that have ended are not counted as waiters.
    pub(crate) fn of(pid: u32) -> io::Result<Usage> {
        let mut usage = Usage { cpu: process_cpu_time(pid)?, ..Usage::default() };
        for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
            // It may have ended since.
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
    fn sleeping_is_a_wait_and_working_is_time() {
        let before = Usage::here().expect("it is us");
        for _ in 0..10 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut state = 1u64;
        while Usage::here().expect("it is us").cpu < before.cpu + Duration::from_millis(5) {
            state = std::hint::black_box(crate::blocks::mix(state));
        }
        let used = Usage::here().expect("it is us") - before;
        assert!(used.waits >= 10 && used.cpu >= Duration::from_millis(5), "{used:?}");
    }
}
