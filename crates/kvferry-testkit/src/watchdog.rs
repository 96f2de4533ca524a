//! Tests that end: one that does not is named, and takes its process with it.

use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// A bound of time, for a machine that has other things to do.
///
/// Bounds are meant for a machine whose cores are not overbooked. Where more tasks want to run
/// than there are cores, they are stretched by that ratio, so that they go on to say something
/// about the code and not about its neighbours.
pub fn stretched(limit: Duration) -> Duration {
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let mut fields = load.split([' ', '/']);
    let average: f64 = fields.next().and_then(|field| field.parse().ok()).unwrap_or(0.0);
    // "0.61 0.50 0.44 3/512 4711": the fourth field counts who runs or wants to, now.
    let running: f64 = fields.nth(2).and_then(|field| field.parse().ok()).unwrap_or(0.0);
    let cores = thread::available_parallelism().map_or(1.0, |n| n.get() as f64);
    limit.mul_f64((average.max(running) / cores).clamp(1.0, 20.0))
}

/// Ends the process, with a message, unless it is dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    _alive: mpsc::Sender<()>,
}

impl Watchdog {
    /// Watches over the test that runs in this thread.
    pub fn new(limit: Duration) -> Self {
        let test = thread::current().name().unwrap_or("a test without a name").to_owned();
        let (alive, gone) = mpsc::channel::<()>();
        let limit = stretched(limit);
        let watch = move || {
            if gone.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                // Not through `eprintln!`: the harness would keep it to itself.
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
