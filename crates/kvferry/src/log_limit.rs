//! Bounds the log lines that peers can cause, also peers that have proved nothing.
//!
//! A line costs the thread that writes it a system call, and a log that is a full pipe may stop that thread. So
//! each kind of line has a budget of its own: a flood of one does not hide the others.

use kvferry_proto::Timestamp;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Lines of one kind that may follow each other at once.
const BURST: u64 = 10;
/// The time in which one more line is permitted.
const REFILL: Duration = Duration::from_secs(1);

/// The budget of one kind of line, for all agents of the process.
#[derive(Debug)]
pub struct LogLimit {
    /// Time at which the budget is whole again, in nanoseconds.
    whole_at: AtomicU64,
    /// Lines that were left out since the last one.
    left_out: AtomicU64,
}

impl LogLimit {
    /// Creates a whole budget.
    #[allow(clippy::new_without_default, reason = "for statics")]
    pub const fn new() -> Self {
        Self { whole_at: AtomicU64::new(0), left_out: AtomicU64::new(0) }
    }

    /// Takes a line from the budget. Returns how many lines were left out before it; `None` if this one
    /// is to be left out.
    pub fn take(&self, now: Timestamp) -> Option<u64> {
        let (now, each) = (now.as_nanos(), REFILL.as_nanos() as u64);
        let taken = self.whole_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |whole_at| {
            let after = whole_at.max(now).saturating_add(each);
            (after <= now.saturating_add(BURST * each)).then_some(after)
        });
        if taken.is_err() {
            self.left_out.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(self.left_out.swap(0, Ordering::Relaxed))
    }
}

/// The clock of budgets.
#[doc(hidden)]
pub fn now() -> Timestamp {
    crate::reactor::now()
}

/// As `tracing::warn!`, for a line that a peer can cause. What is beyond the budget is a line for
/// debugging, and the next warning has the number of lines left out as `more`.
///
/// For this crate and the layers above it, which have `tracing` as a dependency.
#[doc(hidden)]
#[macro_export]
macro_rules! warn_limited {
    ($($line:tt)+) => {{
        static LIMIT: $crate::log_limit::LogLimit = $crate::log_limit::LogLimit::new();
        match LIMIT.take($crate::log_limit::now()) {
            Some(0) => tracing::warn!($($line)+),
            Some(more) => tracing::warn!(more, $($line)+),
            None => tracing::debug!($($line)+),
        }
    }};
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_of_lines_is_ten_and_then_one_a_second_and_none_is_lost_uncounted() {
        let limit = LogLimit::new();
        let start = Timestamp::from_nanos(5_000_000_000_000);
        let mut told = 0;
        let mut lines = 0;
        for n in 0..300_000_u32 {
            let now = start + Duration::from_micros(200) * n;
            if let Some(more) = limit.take(now) {
                lines += 1;
                told += 1 + more;
            }
        }
        assert_eq!(lines, 10 + 59, "in a minute");
        // The pause fills the budget again.
        let later = start + Duration::from_secs(120);
        let more = limit.take(later).expect("there is a budget");
        assert_eq!(told + 1 + more, 300_000 + 1);
        assert_eq!((1..20).filter_map(|_| limit.take(later)).collect::<Vec<_>>(), [0; 9]);
    }
}
