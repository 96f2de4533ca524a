//! When the thread asks the driver again.

use std::time::{Duration, Instant};

/// Time without a pause after something has happened, while there are copies. The copies of a stage take less, and a pause
/// often lasts some 100 µs longer than it should.
const SPIN_FOR_COPIES: Duration = Duration::from_micros(300);
/// The same time for edges, and without work: the next batch of a transfer follows soon, and waking the thread takes as
/// long.
const SPIN: Duration = Duration::from_micros(50);
/// The part of the time since then that a pause lasts, and its bounds. Work of the engine may take long.
const PART: u32 = 8;
const SHORTEST: Duration = Duration::from_micros(20);
const LONGEST_FOR_COPIES: Duration = Duration::from_micros(250);
const LONGEST_FOR_EDGES: Duration = Duration::from_millis(2);

/// Pauses between two questions to the driver, while it has work.
#[derive(Debug)]
pub(super) struct Pace {
    since: Instant,
}

impl Pace {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now }
    }

    /// Work was given to the driver, or has ended.
    pub(super) fn begin_anew(&mut self, now: Instant) {
        self.since = now;
    }

    /// The next pause. Zero: ask at once.
    pub(super) fn pause(&self, now: Instant, has_copies: bool) -> Duration {
        let elapsed = now.saturating_duration_since(self.since);
        let (spin, longest) = match has_copies {
            true => (SPIN_FOR_COPIES, LONGEST_FOR_COPIES),
            false => (SPIN, LONGEST_FOR_EDGES),
        };
        match elapsed < spin {
            true => Duration::ZERO,
            false => (elapsed / PART).clamp(SHORTEST, longest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_with_the_time_that_nothing_has_happened() {
        let began = Instant::now();
        let mut pace = Pace::new(began);
        let pause = |pace: &Pace, us, copies| pace.pause(began + Duration::from_micros(us), copies);
        assert_eq!(pause(&pace, 299, true), Duration::ZERO);
        assert_eq!(pause(&pace, 300, true), Duration::from_nanos(37_500));
        assert_eq!(pause(&pace, 800, true), Duration::from_micros(100));
        assert_eq!(pause(&pace, 49, false), Duration::ZERO);
        assert_eq!(pause(&pace, 50, false), SHORTEST);
        assert_eq!(pause(&pace, 1_000_000, true), LONGEST_FOR_COPIES);
        assert_eq!(pause(&pace, 8_000, false), Duration::from_millis(1));
        assert_eq!(pause(&pace, 1_000_000, false), LONGEST_FOR_EDGES);
        pace.begin_anew(began + Duration::from_secs(1));
        assert_eq!(pause(&pace, 1_000_010, true), Duration::ZERO);
    }
}
