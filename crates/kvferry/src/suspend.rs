//! Detects that this process did not run for a while: it was stopped, suspended or starved.
//!
//! While there are sessions, the control thread stores the time several times per silence window. A
//! thread that is about to touch memory for a peer first loads that time. If it is too old, the
//! peer may have declared this process dead, and the memory may be in other use by now. The control
//! thread makes the same check before it stores a new time, and ends every session first (I6).
//!
//! The remaining gap is the time between the check and the system call that follows it, some
//! nanoseconds; a process stopped exactly there applies at most one chunk.

use kvferry_proto::Timestamp;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time of the last beat, and its maximal age.
#[derive(Debug)]
pub(crate) struct SuspendDetector {
    last: AtomicU64,
    /// The control thread's interval between beats.
    pub(crate) every: Duration,
    limit: Duration,
}

impl SuspendDetector {
    /// Creates a detector for a silence window: one beat per quarter; a beat is too old after a
    /// quarter and half a window.
    pub(crate) fn new(silence: Duration, now: Timestamp) -> Self {
        let every = silence / 4;
        Self { last: AtomicU64::new(now.as_nanos()), every, limit: every + silence / 2 }
    }

    /// Whether this process has been running without a stop.
    pub(crate) fn is_fresh(&self, now: Timestamp) -> bool {
        let last = Timestamp::from_nanos(self.last.load(Ordering::Acquire));
        now.saturating_since(last) <= self.limit
    }

    pub(crate) fn beat(&self, now: Timestamp) {
        self.last.store(now.as_nanos(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_of_a_whole_silence_window_is_always_detected() {
        let silence = Duration::from_secs(3);
        let start = Timestamp::from_nanos(1_000_000_000_000);
        let suspend = SuspendDetector::new(silence, start);
        // The latest possible beat is just before the stop.
        assert!(!suspend.is_fresh(start + silence));
        // A late beat is not a stop.
        assert!(suspend.is_fresh(start + suspend.every * 2));
    }
}
