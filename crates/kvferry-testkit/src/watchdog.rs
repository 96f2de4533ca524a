//! A watchdog that aborts a test which hangs, and waiting for what another thread does.

use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time that a test waits for an expected event: no test needs this long on a machine that
/// is ten times slower than the slowest we know. Its expiry shows that something hangs, and nothing
/// about speed.
pub const PATIENCE: Duration = Duration::from_secs(300);

/// Waits until the condition holds. Fails with `what` after half of [`PATIENCE`], before a watchdog aborts the test.
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let give_up = Instant::now() + PATIENCE / 2;
    while !condition() {
        assert!(Instant::now() < give_up, "it never happens: {what}");
        thread::sleep(Duration::from_millis(1));
    }
}

/// Aborts the process, with a message, unless it is dropped in time.
#[derive(Debug)]
pub struct Watchdog {
    _alive: mpsc::Sender<()>,
}

impl Watchdog {
    /// Aborts the process if the test of this thread runs longer than `limit`.
    pub fn new(limit: Duration) -> Self {
        let test = thread::current().name().unwrap_or("an unnamed test").to_owned();
        let (alive, gone) = mpsc::channel::<()>();
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
