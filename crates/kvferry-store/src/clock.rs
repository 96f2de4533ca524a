//! The time of a store: milliseconds since it was made.
//!
//! The system's clock is read once, when the first process opens the store. From then on, all processes add what
//! `CLOCK_BOOTTIME` counts, which no one sets and which goes on while the host sleeps. So a jump of the system's
//! clock does not reach a store that is open, and all processes have the same time.
//!
//! Between two opens, only the system's clock says how long the store was closed. The time never goes back behind
//! what is in the store: a clock that was set back counts as one that stood still. So a jump makes a duration wrong
//! by at most the jump, once, and durations that begin later are right while the store is open.

use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Clock {
    /// The store's time when the host was started; negative if the store was made later.
    at_boot_ms: i64,
}

impl Clock {
    /// Starts the clock in the first process that opens a store. `created_ms` is when the store was made, Unix
    /// time; `newest_ms` is the latest time in the store.
    pub(crate) fn begin(created_ms: u64, newest_ms: u64) -> Self {
        Self::new(created_ms, newest_ms, Self::unix_ms(), boot_ms())
    }

    fn new(created_ms: u64, newest_ms: u64, unix_ms: u64, boot_ms: u64) -> Self {
        let now_ms = unix_ms.saturating_sub(created_ms).max(newest_ms);
        let signed = |ms: u64| i64::try_from(ms).unwrap_or(i64::MAX);
        Self { at_boot_ms: signed(now_ms).saturating_sub(signed(boot_ms)) }
    }

    /// Restores the clock that the first process stored with [`Clock::to_word`].
    pub(crate) fn from_word(word: u64) -> Self {
        Self { at_boot_ms: word.cast_signed() }
    }

    pub(crate) fn to_word(self) -> u64 {
        self.at_boot_ms.cast_unsigned()
    }

    pub(crate) fn now_ms(&self) -> u64 {
        self.at(boot_ms())
    }

    fn at(&self, boot_ms: u64) -> u64 {
        u64::try_from(self.at_boot_ms.saturating_add_unsigned(boot_ms)).unwrap_or(0)
    }

    /// The store's time in seconds, the unit of the index.
    pub(crate) fn now_s(&self) -> u32 {
        u32::try_from(self.now_ms() / 1000).unwrap_or(u32::MAX)
    }

    /// Milliseconds since 1970 now.
    pub(crate) fn unix_ms() -> u64 {
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        u64::try_from(unix.as_millis()).unwrap_or(u64::MAX)
    }
}

/// Milliseconds since the host was started.
fn boot_ms() -> u64 {
    kvferry_sys::clock::boottime_ns() / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::{OnExpiry, Policy, Retention};
    use fastrand::Rng;

    const HOUR: u64 = 3_600_000;
    const DAY: u64 = 24 * HOUR;
    const CREATED: u64 = 1_763_900_000_000;

    /// A host whose system clock jumps, and a store on it.
    struct Host {
        /// True time since the store was made.
        real_ms: u64,
        /// The time at which the host was started.
        started_ms: u64,
        /// Error of the system's clock: positive if it is ahead of the true time.
        ahead_ms: i64,
        /// The latest time in the store.
        newest_ms: u64,
        clock: Clock,
    }

    impl Host {
        fn new() -> Self {
            let clock = Clock::new(CREATED, 0, CREATED, 0);
            Self { real_ms: 0, started_ms: 0, ahead_ms: 0, newest_ms: 0, clock }
        }

        fn boot_ms(&self) -> u64 {
            self.real_ms - self.started_ms
        }

        fn reopen(&mut self) {
            let unix_ms = (CREATED + self.real_ms).saturating_add_signed(self.ahead_ms);
            self.clock = Clock::new(CREATED, self.newest_ms, unix_ms, self.boot_ms());
        }

        fn now_ms(&self) -> u64 {
            self.clock.at(self.boot_ms())
        }
    }

    #[test]
    fn a_jump_of_the_clock_while_the_store_is_open_reaches_no_process() {
        let mut host = Host::new();
        for ahead_ms in [0, DAY.cast_signed(), -DAY.cast_signed()] {
            (host.ahead_ms, host.real_ms) = (ahead_ms, host.real_ms + HOUR);
            assert_eq!(host.now_ms(), host.real_ms);
            // A process that comes later has the first one's clock.
            assert_eq!(Clock::from_word(host.clock.to_word()), host.clock);
        }
    }

    #[test]
    fn a_clock_that_jumps_by_a_day_makes_durations_wrong_by_at_most_a_day() {
        for seed in 0..400 {
            let mut rng = Rng::with_seed(seed);
            // All jumps of a host are in one direction, and back.
            let jump = [DAY.cast_signed(), -DAY.cast_signed()][rng.usize(..2)];
            let mut host = Host::new();
            let mut blocks: Vec<(u64, u64, u64)> = Vec::new();
            for _ in 0..60 {
                let before = (host.real_ms, host.now_ms());
                host.real_ms += rng.u64(..6 * HOUR);
                assert_eq!(host.now_ms() - before.1, host.real_ms - before.0, "while it is open");
                host.newest_ms = host.newest_ms.max(host.now_ms() / 1000 * 1000);
                blocks.push((host.real_ms, host.now_ms(), host.newest_ms));
                if rng.bool() {
                    host.ahead_ms = if host.ahead_ms == 0 { jump } else { 0 };
                }
                if rng.bool() {
                    // Closed for a while, and perhaps the host is started again.
                    host.real_ms += rng.u64(..3 * DAY);
                    host.started_ms = if rng.bool() { host.real_ms } else { host.started_ms };
                    host.reopen();
                }
                assert!(host.now_ms() >= host.newest_ms, "never before what is in the store");
                for (real_ms, now_ms, _) in &blocks {
                    let (real, told) = (host.real_ms - real_ms, host.now_ms().abs_diff(*now_ms));
                    // Times in the store are in seconds.
                    assert!(real.abs_diff(told) <= DAY + 1000, "{real} counts as {told}");
                }
            }
        }
    }

    #[test]
    fn retention_ends_a_jump_too_early_or_too_late_at_most() {
        for jump in [0, DAY.cast_signed(), -DAY.cast_signed()] {
            let mut host = Host::new();
            host.real_ms = 10 * DAY;
            let until_s = u32::try_from((host.now_ms() + 2 * DAY) / 1000).expect("short");
            let retention =
                Retention { until_s: Some(until_s), then: OnExpiry::Leave, priority: 50 };
            let mut policy = Policy::new(8);
            policy.added(host.now_ms(), None, &[(1, 7)], retention);
            host.newest_ms = host.now_ms();
            host.ahead_ms = jump;
            let mut left_at = None;
            for _ in 0..5 * 24 {
                host.real_ms += HOUR;
                host.reopen();
                if policy.evict_due(host.now_ms(), |_| 7).is_some() {
                    left_at.get_or_insert(host.real_ms - 10 * DAY);
                }
            }
            let expected = (2 * DAY).saturating_add_signed(-jump);
            let left_at = left_at.expect("it leaves");
            assert!(left_at.abs_diff(expected) <= HOUR, "{left_at} with a jump of {jump}");
        }
    }

    #[test]
    fn a_store_that_was_made_in_the_future_begins_at_zero() {
        let clock = Clock::new(CREATED + DAY, 0, CREATED, 5000);
        assert_eq!((clock.at(5000), clock.at(6000)), (0, 1000));
        assert_eq!(Clock::new(CREATED, u64::MAX, CREATED, 0).at(u64::MAX), i64::MAX as u64);
    }
}
