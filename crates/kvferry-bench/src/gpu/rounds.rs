//! Rounds of several ways to do one piece of work, in turns.

use std::time::{Duration, Instant};

use super::bench::gigabytes_per_second;
use super::budget::Budget;
use crate::failure::Failure;
use crate::stats::{self, Spread};

/// The least time of one sample: shorter work is repeated.
const SAMPLE: Duration = Duration::from_millis(4);
const REPEATS_MAX: u32 = 64;

/// Rounds that are made even if the time is up.
pub(super) const ROUNDS_MIN: usize = 3;

/// After this many rounds, ways are left out whose rate is less than [`SLOW`] of the fastest way's.
const TRIAL: usize = 2;
const SLOW: f64 = 0.6;

/// A way to do the work. Returns the time that it took.
pub(super) type TimedWork<'a> = Box<dyn FnMut() -> Result<Duration, Failure> + 'a>;

/// Seconds of each way, round by round. The first way has all rounds; slow ones have the first few. Once the budget is
/// used up, there are fewer rounds.
pub(super) fn run(
    ways: &mut [TimedWork<'_>],
    rounds: usize,
    budget: &Budget,
    drops_slow: bool,
) -> Result<Vec<Vec<f64>>, Failure> {
    let mut repeats = Vec::with_capacity(ways.len());
    for way in ways.iter_mut() {
        // The first call is a cold start, and does not count.
        way()?;
        let took = way()?.as_secs_f64().max(1e-7);
        repeats.push(((SAMPLE.as_secs_f64() / took) as u32).clamp(1, REPEATS_MAX));
    }
    let mut seconds = vec![Vec::with_capacity(rounds); ways.len()];
    let mut is_slow = vec![false; ways.len()];
    for round in 0..rounds {
        if round >= ROUNDS_MIN && !budget.has_time(Instant::now()) {
            break;
        }
        for turn in 0..ways.len() {
            let at = (turn + round) % ways.len();
            if is_slow[at] {
                continue;
            }
            let mut sum = Duration::ZERO;
            for _ in 0..repeats[at] {
                sum += ways[at]()?;
            }
            seconds[at].push(sum.as_secs_f64() / f64::from(repeats[at]));
        }
        if drops_slow && round + 1 == TRIAL {
            let medians: Vec<f64> = seconds.iter().map(|way| stats::median(way)).collect();
            let best = medians.iter().skip(1).copied().fold(f64::INFINITY, f64::min);
            for (at, median) in medians.iter().enumerate().skip(1) {
                is_slow[at] = best / median < SLOW;
            }
        }
    }
    Ok(seconds)
}

/// Rates of the first two ways.
pub(super) fn rates(seconds: &[Vec<f64>], bytes: u64) -> [Spread; 2] {
    [0, 1].map(|at| rate(&seconds[at], bytes))
}

/// GB/s of a way, round by round.
pub(super) fn rate(seconds: &[f64], bytes: u64) -> Spread {
    let rate = |&seconds: &f64| gigabytes_per_second(bytes, Duration::from_secs_f64(seconds));
    Spread::of(seconds.iter().map(rate).collect())
}

/// The time of a call.
pub(super) fn time(call: impl FnOnce() -> Result<(), Failure>) -> Result<Duration, Failure> {
    let began = Instant::now();
    call()?;
    Ok(began.elapsed())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_ways_are_left_out_after_the_trial_and_rounds_once_the_time_is_up() {
        let way = |ms| -> TimedWork<'static> { Box::new(move || Ok(Duration::from_millis(ms))) };
        let mut ways = [way(50), way(3), way(4), way(40)];
        let now = Instant::now();
        let mut budget = Budget::new(now, Duration::from_secs(60), &[1.0]);
        budget.begin(0, now);
        let seconds = run(&mut ways, 5, &budget, true).expect("none fails");
        assert_eq!(seconds.iter().map(Vec::len).collect::<Vec<_>>(), [5, 5, 5, TRIAL]);
        assert_eq!(seconds[1][4], 0.003);
        let used_up = Budget::new(now, Duration::ZERO, &[1.0]);
        let seconds = run(&mut ways, 5, &used_up, false).expect("none fails");
        assert!(seconds.iter().all(|way| way.len() == ROUNDS_MIN));
    }
}
