//! Times for which calls hold the scheduler's thread, and how often it waits in one.

use std::time::Instant;

use crate::machine::thread_time;
use crate::report::Row;
use crate::stats::{Spread, quantile_of};

/// Bound of one call's CPU time.
const HELD_MAX_US: f64 = 100.0;

/// Times of calls, by kind.
#[derive(Debug, Default)]
pub(super) struct Calls {
    kinds: Vec<(&'static str, Kind)>,
    round: usize,
}

/// Times of one kind of call, indexed by round.
#[derive(Debug, Default)]
struct Kind(Vec<Times>);

/// Times of one round, in microseconds.
#[derive(Debug, Default, Clone)]
struct Times {
    cpu: Vec<f64>,
    wall: Vec<f64>,
    /// Number of times that the thread left its processor to wait for something.
    waits: u64,
}

impl Calls {
    /// Begins a round, to which later calls belong. The first one is 0.
    pub(super) fn begin(&mut self, round: usize) {
        self.round = round;
    }

    /// Makes a call and notes what it took.
    pub(super) fn time<T>(&mut self, kind: &'static str, call: impl FnOnce() -> T) -> T {
        let waited = thread_waits();
        let (began, used) = (Instant::now(), thread_cpu_us());
        let done = call();
        let cpu = thread_cpu_us() - used;
        let wall = began.elapsed().as_nanos() as f64 / 1e3;
        let waits = thread_waits() - waited;
        let at = self.kinds.iter().position(|(known, _)| *known == kind);
        let at = at.unwrap_or_else(|| {
            self.kinds.push((kind, Kind::default()));
            self.kinds.len() - 1
        });
        let rounds = &mut self.kinds[at].1.0;
        rounds.resize(rounds.len().max(self.round + 1), Times::default());
        let times = &mut rounds[self.round];
        times.cpu.push(cpu);
        times.wall.push(wall);
        times.waits += waits;
        done
    }

    /// A round's longest processor time has a bound, and that it never waits.
    pub(super) fn rows(self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (kind, Kind(mut rounds)) in self.kinds {
            rounds.retain(|times| !times.cpu.is_empty());
            let mut row = |what: &str, unit, of: &mut dyn FnMut(&mut Times) -> f64| {
                let value = Spread::of(rounds.iter_mut().map(of).collect());
                Row::new("scheduler", format!("{kind}, {what}"), unit, value)
            };
            for (part, at) in [("p50", 0.5), ("p99", 0.99)] {
                let cpu = &mut |times: &mut Times| quantile_of(&mut times.cpu, at);
                rows.push(row(&format!("CPU {part}"), "µs", cpu));
            }
            let longest = &mut |times: &mut Times| quantile_of(&mut times.cpu, 1.0);
            rows.push(row("CPU max", "µs", longest).at_most(HELD_MAX_US));
            rows.push(row("waits", "", &mut |times| times.waits as f64).at_most(0.0));
            for (part, at) in [("p99", 0.99), ("max", 1.0)] {
                let wall = &mut |times: &mut Times| quantile_of(&mut times.wall, at);
                rows.push(row(&format!("wall {part}"), "µs", wall));
            }
        }
        rows
    }
}

/// Number of times that the calling thread has left its processor to wait, since it began.
fn thread_waits() -> u64 {
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
    line.and_then(|count| count.trim().parse().ok()).expect("the kernel counts them")
}

/// CPU time of the calling thread.
pub(super) fn thread_cpu_us() -> f64 {
    thread_time().as_secs_f64() * 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_computes_for_too_long_is_short_and_so_is_one_that_waits() {
        let shortfall = || {
            let mut calls = Calls::default();
            calls.time("does little", || ());
            calls.time("sleeps", || std::thread::sleep(std::time::Duration::from_millis(2)));
            calls.time("computes", || {
                let until = thread_cpu_us() + 2.0 * HELD_MAX_US;
                while thread_cpu_us() < until {}
            });
            let report = crate::report::Report::new("test/1", false, vec![], calls.rows());
            report.shortfall().expect("two")
        };
        let expected = "2 of 6 figures miss their bounds: sleeps, waits; computes, CPU max";
        // On a busy machine, a call that does little may wait for a processor.
        let found: Vec<_> = (0..50).map(|_| shortfall()).take_while(|it| it != expected).collect();
        assert!(found.len() < 50, "{found:?}");
    }
}
