//! When the thread asks the driver again.

use std::time::{Duration, Instant};

/// Time without a pause after something has happened: a small copy takes less.
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
        let longest = if has_copies { LONGEST_FOR_COPIES } else { LONGEST_FOR_EDGES };
        match elapsed < SPIN {
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
        assert_eq!(pause(&pace, 49, true), Duration::ZERO);
        assert_eq!(pause(&pace, 50, true), SHORTEST);
        assert_eq!(pause(&pace, 800, true), Duration::from_micros(100));
        assert_eq!(pause(&pace, 1_000_000, true), LONGEST_FOR_COPIES);
        assert_eq!(pause(&pace, 8_000, false), Duration::from_millis(1));
        assert_eq!(pause(&pace, 1_000_000, false), LONGEST_FOR_EDGES);
        pace.begin_anew(began + Duration::from_secs(1));
        assert_eq!(pause(&pace, 1_000_010, true), Duration::ZERO);
    }
}
