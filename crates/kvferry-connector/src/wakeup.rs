//! Wakes a thread that keeps the time.

use crate::sync::{lock, wait_while};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// A wake-up before the wait counts: the wait returns at once.
#[derive(Default)]
pub(crate) struct Wakeup {
    pending: Mutex<bool>,
    changed: Condvar,
}

impl Wakeup {
    pub(crate) fn wake(&self) {
        if !std::mem::replace(&mut *lock(&self.pending), true) {
            self.changed.notify_one();
        }
    }

    pub(crate) fn wait(&self, timeout: Option<Duration>) {
        let pending = lock(&self.pending);
        *wait_while(&self.changed, pending, timeout, |pending| !*pending) = false;
    }
}
