//! Limits of time for tests: a watchdog that aborts a test which hangs, and limits that account for load.

use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// A limit of time, extended on a loaded machine.
///
/// Limits assume that every runnable task has a core. Where more tasks are runnable than there are
/// cores, the limit grows by that ratio, up to 20 times, so that a test fails for what the code
/// does and not for the load.
pub fn stretched(limit: Duration) -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut fields = load.split([' ', '/']);
    let average: f64 = fields.next().and_then(|field| field.parse().ok()).unwrap_or(0.0);
    // "0.61 0.50 0.44 3/512 4711": the fourth field counts tasks that are runnable now.
    let running: f64 = fields.nth(2).and_then(|field| field.parse().ok()).unwrap_or(0.0);
    let cores = thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    limit.mul_f64((average.max(running) / cores).clamp(1.0, 20.0))
}

/// Makes a call. Asserts that it takes at most `limit`, as [`stretched`] extends it.
///
/// # Panics
/// If it takes longer.
pub fn timed<T>(limit: Duration, what: &str, call: impl FnOnce() -> T) -> T {
    let began = Instant::now();
    let result = call();
    let (took, limit) = (began.elapsed(), stretched(limit));
    assert!(took <= limit, "{what} took {took:?}, at most {limit:?} is allowed");
    result
}

/// Aborts the process, with a message, unless it is dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    _alive: mpsc::Sender<()>,
}

impl Watchdog {
    /// Aborts the process if the test of this thread runs longer than `limit`, as [`stretched`]
    /// extends it.
    pub fn new(limit: Duration) -> Self {
        let test = thread::current().name().unwrap_or("an unnamed test").to_owned();
        let (alive, gone) = mpsc::channel::<()>();
        let limit = stretched(limit);
        let watch = move || {
            if gone.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                // Not through `eprintln!`, which the test harness captures.
                let line = format!("{test} did not end within {limit:?}: aborting the process\n");
                drop(std::io::stderr().write_all(line.as_bytes()));
                std::process::abort();
            }
        };
        thread::Builder::new()
            .name("watchdog".into())
            .spawn(watch)
            .expect("the machine has room for one more thread");
        Self { _alive: alive }
    }
}
