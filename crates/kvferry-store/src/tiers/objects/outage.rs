//! Whether the object store answers, and what it allows.
//!
//! After some failures in a row it is *away*: no request is made for a time that grows. Then one request, the
//! probe, finds out whether it is back. Refusals count for their direction only: a host whose credentials do not
//! allow uploads goes on fetching. All of it is a value: its caller gives it the time.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Patience {
    /// Failures in a row after which the object store is away.
    pub(crate) failures_max: u32,
    /// Time for which the object store is away, first and at most. The time doubles with each probe that fails.
    pub(crate) away_min: Duration,
    pub(crate) away_max: Duration,
}

/// Direction of requests: uploads or fetches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Direction {
    Up,
    Down,
}

/// End of a request, as evidence about the object store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestEnd {
    Answered,
    /// The object store answered that it does not allow the request.
    Refused,
    Failed,
}

/// Permission to make one request. The caller must report its end with `ended`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Permit {
    probes_answers: bool,
    probes_refusals: bool,
}

impl Permit {
    /// Whether it is to find out whether the object store is back.
    pub(crate) fn is_probe(self) -> bool {
        self.probes_answers || self.probes_refusals
    }
}

/// Change of availability that the end of a request brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutageChange {
    None,
    /// No requests for a while, which was not so before: of any kind, or of the request's direction.
    Away,
    AwayInDirection,
    Back,
}

/// Decides for both directions.
#[derive(Debug)]
pub(crate) struct Gate {
    answers: Outage,
    refusals: [Outage; 2],
}

impl Gate {
    pub(crate) fn new(patience: Patience) -> Self {
        let outage = || Outage::new(patience);
        Self { answers: outage(), refusals: [outage(), outage()] }
    }

    pub(crate) fn is_away(&self) -> bool {
        self.answers.is_away() || self.refusals.iter().any(Outage::is_away)
    }

    /// Whether no request of a direction is made for a while.
    pub(crate) fn is_away_in(&self, direction: Direction) -> bool {
        self.answers.is_away() || self.refusals[direction as usize].is_away()
    }

    /// Time before which no request may be made. `None`: a request may be made at once.
    pub(crate) fn look(&self, direction: Direction, now_ms: u64) -> Option<u64> {
        let not_before = |outage: &Outage| match outage.look(now_ms) {
            Admission::NotBefore { ms } => Some(ms),
            Admission::Yes | Admission::Probe => None,
        };
        not_before(&self.answers).max(not_before(&self.refusals[direction as usize]))
    }

    /// Asks for one request.
    pub(crate) fn admit(&mut self, direction: Direction, now_ms: u64) -> Option<Permit> {
        if self.look(direction, now_ms).is_some() {
            return None;
        }
        let refusals = &mut self.refusals[direction as usize];
        Some(Permit {
            probes_answers: self.answers.admit(now_ms) == Admission::Probe,
            probes_refusals: refusals.admit(now_ms) == Admission::Probe,
        })
    }

    /// A request has ended.
    pub(crate) fn ended(
        &mut self,
        direction: Direction,
        permit: Permit,
        end: RequestEnd,
        now_ms: u64,
    ) -> OutageChange {
        let refusals = &mut self.refusals[direction as usize];
        match end {
            RequestEnd::Answered => {
                let was_away = self.answers.succeeded() | refusals.succeeded();
                if was_away { OutageChange::Back } else { OutageChange::None }
            }
            RequestEnd::Refused => {
                let was_away = self.answers.succeeded();
                match refusals.failed(now_ms, permit.probes_refusals) {
                    true => OutageChange::AwayInDirection,
                    false if was_away => OutageChange::Back,
                    false => OutageChange::None,
                }
            }
            RequestEnd::Failed => {
                if permit.probes_refusals {
                    refusals.failed(now_ms, true);
                }
                match self.answers.failed(now_ms, permit.probes_answers) {
                    true => OutageChange::Away,
                    false => OutageChange::None,
                }
            }
        }
    }
}

#[derive(Debug)]
struct Outage {
    patience: Patience,
    failures: u32,
    away: Option<AwaySince>,
}

#[derive(Clone, Copy, Debug)]
struct AwaySince {
    until_ms: u64,
    wait_ms: u64,
    is_probed: bool,
}

/// Whether a request may be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Admission {
    Yes,
    /// Yes, to find out whether the object store is back. The caller must report the request's end.
    Probe,
    /// Not before this time; a probe that succeeds changes it.
    NotBefore {
        ms: u64,
    },
}

impl Outage {
    fn new(patience: Patience) -> Self {
        Self { patience, failures: 0, away: None }
    }

    fn is_away(&self) -> bool {
        self.away.is_some()
    }

    /// The answer that [`Outage::admit`] would give.
    fn look(&self, now_ms: u64) -> Admission {
        match self.away {
            None => Admission::Yes,
            Some(AwaySince { is_probed: true, .. }) => Admission::NotBefore { ms: u64::MAX },
            Some(AwaySince { until_ms, .. }) if now_ms < until_ms => {
                Admission::NotBefore { ms: until_ms }
            }
            Some(_) => Admission::Probe,
        }
    }

    /// Asks for one request.
    fn admit(&mut self, now_ms: u64) -> Admission {
        let admission = self.look(now_ms);
        if let (Admission::Probe, Some(away)) = (admission, &mut self.away) {
            away.is_probed = true;
        }
        admission
    }

    /// A request was answered. Returns whether the object store is back with it.
    fn succeeded(&mut self) -> bool {
        self.failures = 0;
        self.away.take().is_some()
    }

    /// A request failed. Returns whether the object store is away with it, and was not before.
    fn failed(&mut self, now_ms: u64, is_probe: bool) -> bool {
        let longest = ms(self.patience.away_max);
        match &mut self.away {
            Some(away) => {
                // Others were made before it went away, and say nothing new.
                if is_probe {
                    let wait_ms = away.wait_ms.saturating_mul(2).min(longest);
                    *away = AwaySince { until_ms: now_ms + wait_ms, wait_ms, is_probed: false };
                }
                false
            }
            None => {
                self.failures += 1;
                if self.failures < self.patience.failures_max {
                    return false;
                }
                let wait_ms = ms(self.patience.away_min).min(longest);
                self.away =
                    Some(AwaySince { until_ms: now_ms + wait_ms, wait_ms, is_probed: false });
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

    #[test]
    fn refused_uploads_do_not_keep_fetches_back() {
        use Direction::{Down, Up};
        let mut gate = Gate::new(PATIENCE);
        let changes: Vec<_> = (0..3)
            .map(|_| {
                let permit = gate.admit(Up, 0).expect("it is not away");
                gate.ended(Up, permit, RequestEnd::Refused, 0)
            })
            .collect();
        assert_eq!(
            changes,
            [OutageChange::None, OutageChange::None, OutageChange::AwayInDirection]
        );
        assert_eq!((gate.look(Up, 0), gate.look(Down, 0)), (Some(1000), None));
        assert!(gate.is_away() && gate.is_away_in(Up) && !gate.is_away_in(Down));
        let permit = gate.admit(Down, 0).expect("fetches are allowed");
        assert_eq!(gate.ended(Down, permit, RequestEnd::Answered, 0), OutageChange::None);
        let probe = gate.admit(Up, 1000).expect("its time has passed");
        assert!(probe.is_probe() && gate.admit(Up, 1000).is_none());
        assert_eq!(gate.ended(Up, probe, RequestEnd::Answered, 1000), OutageChange::Back);
        assert!(!gate.is_away());
    }

    #[test]
    fn failures_of_one_direction_keep_the_other_back() {
        use Direction::{Down, Up};
        let mut gate = Gate::new(PATIENCE);
        for _ in 0..3 {
            let permit = gate.admit(Up, 0).expect("it is not away");
            gate.ended(Up, permit, RequestEnd::Failed, 0);
        }
        assert_eq!(gate.admit(Down, 999), None);
        let probe = gate.admit(Down, 1000).expect("its time has passed");
        assert_eq!(gate.admit(Up, 1000), None);
        // It answers, if only to refuse.
        assert_eq!(gate.ended(Down, probe, RequestEnd::Refused, 1000), OutageChange::Back);
        assert!(gate.admit(Up, 1000).is_some());
    }

    #[test]
    fn a_probe_of_what_is_allowed_that_gets_no_answer_is_repeated() {
        use Direction::Up;
        let mut gate = Gate::new(PATIENCE);
        for _ in 0..3 {
            let permit = gate.admit(Up, 0).expect("it is not away");
            gate.ended(Up, permit, RequestEnd::Refused, 0);
        }
        let probe = gate.admit(Up, 1000).expect("its time has passed");
        assert_eq!(gate.ended(Up, probe, RequestEnd::Failed, 1000), OutageChange::None);
        assert_eq!(gate.look(Up, 1000), Some(3000));
        assert!(gate.admit(Up, 3000).expect("its time has passed").is_probe());
    }
}
