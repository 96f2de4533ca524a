//! Wakes a thread that keeps the time.

use kvferry_sys::sync::{Condvar, Mutex};
use std::time::Duration;

/// A wake-up before the wait counts: the wait returns at once.
#[derive(Default)]
pub(crate) struct Wakeup {
    pending: Mutex<bool>,
    changed: Condvar,
}

impl Wakeup {
    pub(crate) fn wake(&self) {
        if !std::mem::replace(&mut *self.pending.lock(), true) {
            self.changed.notify_one();
        }
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        *self.changed.wait_while(self.pending.lock(), timeout, |pending| !*pending) = false;
    }
}
