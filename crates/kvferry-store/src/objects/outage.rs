//! Whether the object store answers.
//!
//! After some failures in a row it is *away*: no request is made for a time that grows. Then one request, the
//! probe, finds out whether it is back. The state is a value: its caller gives it the time.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patience {
    /// Failures in a row after which the object store is away.
    pub(crate) failures_max: u32,
    /// How long it is away, first and at most. The time doubles with each probe that fails.
    pub(crate) away_min: Duration,
    pub(crate) away_max: Duration,
}

#[derive(Debug)]
pub(crate) struct Outage {
    patience: Patience,
    failures: u32,
    away: Option<Away>,
}

#[derive(Clone, Copy, Debug)]
struct Away {
    until_ms: u64,
    wait_ms: u64,
    is_probed: bool,
}

/// Whether a request may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    Yes,
    /// Yes, to find out whether the object store is back. Its outcome must be told.
    Probe,
    /// Not before this time; a probe that succeeds changes it.
    NotBefore {
        ms: u64,
    },
}

impl Outage {
    pub(crate) fn new(patience: Patience) -> Self {
        Self { patience, failures: 0, away: None }
    }

    pub(crate) fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// What [`Outage::admit`] would say.
    pub(crate) fn look(&self, now_ms: u64) -> Admission {
        match self.away {
            None => Admission::Yes,
            Some(Away { is_probed: true, .. }) => Admission::NotBefore { ms: u64::MAX },
            Some(Away { until_ms, .. }) if now_ms < until_ms => {
                Admission::NotBefore { ms: until_ms }
            }
            Some(_) => Admission::Probe,
        }
    }

    /// Asks for one request.
    pub(crate) fn admit(&mut self, now_ms: u64) -> Admission {
        let admission = self.look(now_ms);
        if let (Admission::Probe, Some(away)) = (admission, &mut self.away) {
            away.is_probed = true;
        }
        admission
    }

    /// A request was answered. Returns whether the object store is back with it.
    pub(crate) fn succeeded(&mut self) -> bool {
        self.failures = 0;
        self.away.take().is_some()
    }

    /// A request failed. Returns whether the object store is away with it, and was not before.
    pub(crate) fn failed(&mut self, now_ms: u64, is_probe: bool) -> bool {
        let longest = ms(self.patience.away_max);
        match &mut self.away {
            Some(away) => {
                // Others were made before it went away, and say nothing new.
                if is_probe {
                    let wait_ms = away.wait_ms.saturating_mul(2).min(longest);
                    *away = Away { until_ms: now_ms + wait_ms, wait_ms, is_probed: false };
                }
                false
            }
            None => {
                self.failures += 1;
                if self.failures < self.patience.failures_max {
                    return false;
                }
                let wait_ms = ms(self.patience.away_min).min(longest);
                self.away = Some(Away { until_ms: now_ms + wait_ms, wait_ms, is_probed: false });
                true
            }
        }
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 2)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Patience = Patience {
        failures_max: 3,
        away_min: Duration::from_secs(1),
        away_max: Duration::from_secs(60),
    };

    fn away_at(now_ms: u64) -> Outage {
        let mut outage = Outage::new(PATIENCE);
        let went: Vec<_> = (0..3).map(|_| outage.failed(now_ms, false)).collect();
        assert_eq!(went, [false, false, true]);
        outage
    }

    #[test]
    fn failures_with_an_answer_between_them_are_no_outage() {
        let mut outage = Outage::new(PATIENCE);
        for _ in 0..10 {
            assert!(!outage.failed(0, false));
            assert!(!outage.failed(0, false));
            assert!(!outage.succeeded());
        }
        assert_eq!(outage.admit(0), Admission::Yes);
    }

    #[test]
    fn one_request_at_a_time_finds_out_whether_it_is_back() {
        let mut outage = away_at(0);
        assert_eq!(outage.admit(999), Admission::NotBefore { ms: 1000 });
        assert_eq!(outage.look(1000), Admission::Probe);
        assert_eq!(outage.admit(1000), Admission::Probe);
        assert_eq!(outage.admit(1000), Admission::NotBefore { ms: u64::MAX });
        assert!(outage.succeeded());
        assert_eq!(outage.admit(1000), Admission::Yes);
    }

    #[test]
    fn each_probe_that_fails_doubles_the_time_up_to_a_minute() {
        let (mut outage, mut now, mut waits) = (away_at(0), 1000, Vec::new());
        for _ in 0..8 {
            assert_eq!(outage.admit(now), Admission::Probe);
            assert!(!outage.failed(now, true));
            let Admission::NotBefore { ms } = outage.look(now) else { panic!("it is away") };
            waits.push((ms - now) / 1000);
            now = ms;
        }
        assert_eq!(waits, [2, 4, 8, 16, 32, 60, 60, 60]);
    }

    #[test]
    fn failures_of_requests_that_were_made_before_change_nothing() {
        let mut outage = away_at(0);
        assert!(!outage.failed(500, false));
        assert_eq!(outage.look(1000), Admission::Probe);
        assert_eq!(outage.admit(1000), Admission::Probe);
        assert!(!outage.failed(1000, false));
        assert_eq!(outage.look(1000), Admission::NotBefore { ms: u64::MAX });
    }
}
