//! How long the scheduler's thread is held by each call.

use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};

use crate::report::Row;
use crate::stats::{Spread, quantile_of};

/// Of one call.
const HELD_MAX_US: f64 = 100.0;

/// Microseconds of each call, by kind.
#[derive(Debug, Default)]
pub(super) struct Calls {
    kinds: Vec<(&'static str, Times)>,
}

#[derive(Debug, Default)]
struct Times {
    cpu: Vec<f64>,
    wall: Vec<f64>,
}

impl Calls {
    /// Makes a call and notes its times.
    pub(super) fn time<T>(&mut self, kind: &'static str, call: impl FnOnce() -> T) -> T {
        let (began, used) = (Instant::now(), thread_cpu_us());
        let done = call();
        let cpu = thread_cpu_us() - used;
        let wall = began.elapsed().as_nanos() as f64 / 1e3;
        let at = self.kinds.iter().position(|(known, _)| *known == kind);
        let at = at.unwrap_or_else(|| {
            self.kinds.push((kind, Times::default()));
            self.kinds.len() - 1
        });
        let times = &mut self.kinds[at].1;
        times.cpu.push(cpu);
        times.wall.push(wall);
        done
    }

    /// The longest processor time has the bound.
    pub(super) fn rows(self) -> Vec<Row> {
        let mut rows = Vec::new();
        for (kind, Times { mut cpu, mut wall }) in self.kinds {
            for (clock, times) in [("CPU", &mut cpu), ("wall", &mut wall)] {
                for (part, at) in [("p50", 0.5), ("p99", 0.99), ("max", 1.0)] {
                    let name = format!("{kind}, {clock} {part}");
                    let value = Spread::of(vec![quantile_of(times, at)]);
                    let row = Row::new("scheduler", name, "µs", value);
                    let is_judged = clock == "CPU" && part == "max";
                    rows.push(if is_judged { row.at_most(HELD_MAX_US) } else { row });
                }
            }
        }
        rows
    }
}

/// Of the calling thread.
pub(super) fn thread_cpu_us() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_that_computes_for_too_long_is_short_and_one_that_sleeps_is_not() {
        let mut calls = Calls::default();
        calls.time("sleeps", || std::thread::sleep(std::time::Duration::from_millis(2)));
        calls.time("computes", || {
            let until = thread_cpu_us() + 2.0 * HELD_MAX_US;
            while thread_cpu_us() < until {}
        });
        let report = crate::report::Report::new("test/1", false, vec![], calls.rows());
        let short = report.shortfall().expect("one");
        assert_eq!(short, "1 of 2 figures miss their bounds: scheduler: computes, CPU max");
    }
}
