//! The time that each part of a bench may take.

use std::time::{Duration, Instant};

/// A limit, divided among parts. A part that needs less leaves the rest to those after it.
#[derive(Debug)]
pub(super) struct Budget {
    began: Instant,
    /// Ends of the parts, from the beginning of the first one.
    ends: Vec<Duration>,
    /// End of the part that is being measured.
    until: Instant,
}

impl Budget {
    pub(super) fn new(began: Instant, limit: Duration, shares: &[f64]) -> Budget {
        let all: f64 = shares.iter().sum();
        let mut sum = 0.0;
        let end = |share: &f64| {
            sum += share;
            limit.mul_f64((sum / all).min(1.0))
        };
        Budget { began, ends: shares.iter().map(end).collect(), until: began }
    }

    /// Begins the part `index`. The part has its share, even if earlier parts took longer, but never beyond the limit.
    pub(super) fn begin(&mut self, index: usize, now: Instant) {
        let before = index.checked_sub(1).map_or(Duration::ZERO, |before| self.ends[before]);
        let share = self.ends[index].saturating_sub(before);
        let limit = self.began + self.ends.last().copied().unwrap_or_default();
        self.until = (self.began + self.ends[index]).max(now + share).min(limit);
    }

    pub(super) fn has_time(&self, now: Instant) -> bool {
        now < self.until
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_gets_its_share_and_what_others_have_left_but_nothing_beyond_the_limit() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut budget = Budget::new(began, Duration::from_secs(100), &[1.0, 3.0, 1.0]);
        budget.begin(0, at(0));
        assert!(budget.has_time(at(19)) && !budget.has_time(at(20)));
        budget.begin(1, at(5));
        assert!(budget.has_time(at(79)) && !budget.has_time(at(80)), "15 s were left");
        budget.begin(1, at(30));
        assert!(budget.has_time(at(89)) && !budget.has_time(at(90)), "the first part took longer");
        budget.begin(2, at(95));
        assert!(budget.has_time(at(99)) && !budget.has_time(at(100)));
    }
}
