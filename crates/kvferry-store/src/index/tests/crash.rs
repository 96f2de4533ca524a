//! Ends a child process at a chosen point of a change.

use rustix::process::{Signal, getpid, kill_process};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};

/// Crash points, in the order in which changes reach them.
pub(super) const POINTS: [&str; 11] = [
    "insert: held",
    "insert: filled",
    "insert: linked",
    "insert: live",
    "relocate: moved",
    "remove: held",
    "remove: unlinked",
    "remove: free",
    "publish: begun",
    "publish: written",
    "publish: published",
];
/// The point where this process ends when it reaches it for the 50th time.
pub(super) const DIE_AT: &str = "KVFERRY_INDEX_DIE_AT";

pub(in super::super) fn reached(point: &str) {
    static CHOSEN: OnceLock<Option<String>> = OnceLock::new();
    static TIMES: AtomicU32 = AtomicU32::new(0);
    let chosen = CHOSEN.get_or_init(|| std::env::var(DIE_AT).ok());
    if chosen.as_deref() == Some(point) && TIMES.fetch_add(1, SeqCst) == 49 {
        kill_process(getpid(), Signal::KILL).expect("this process");
        loop {
            std::thread::park();
        }
    }
}
