//! Tests that take a minute or more and the whole machine: a full mesh of processes that are killed,
//! and a soak with every fault. `.config/nextest.toml` runs them alone, one after another.

mod mesh;
mod soak;

use kvferry_sys::sync::{Mutex, MutexGuard};
use kvferry_testkit::Watchdog;
use std::io::Write;
use std::time::Duration;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Makes each function a test per transport that moves the bytes.
macro_rules! over {
    ($transport:ident: $($test:ident),+ $(,)?) => {
        mod $transport {
            $(
                #[test]
                #[ignore = "slow: make test-slow"]
                fn $test() {
                    super::$test(stringify!($transport));
                }
            )+
        }
    };
}
pub(crate) use over;

/// Runs one test at a time, also if all tests of this file share a process.
fn alone(limit: Duration) -> (MutexGuard<'static, ()>, Watchdog) {
    static ONE: Mutex<()> = Mutex::new(());
    let turn = ONE.lock();
    (turn, Watchdog::new(limit))
}

/// Prints to stderr directly: the harness would capture `println!`.
fn say(line: &str) {
    drop(writeln!(std::io::stderr(), "{line}"));
}
