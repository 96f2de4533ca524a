//! Blocking calls: waiting for a value from another thread, with a deadline and an interrupt check.

use crate::callback::contain;
use crate::error::{Error, ErrorKind, Result};
use crate::reactor::now;
use crate::sync::{Arc, Condvar, Mutex};
use kvferry_proto::Timestamp;
use std::time::Duration;

/// Interval at which a blocked call runs its interrupt check.
pub(crate) const INTERRUPT_EVERY: Duration = Duration::from_millis(100);

/// The interrupt check of a call: true asks the call to stop.
pub(crate) type Interrupt<'a> = Option<&'a (dyn Fn() -> bool + Sync)>;

/// Runs the check. A panic in it counts as true: the transfer must end before its caller's frame
/// does.
pub(crate) fn says_stop(asked: &(dyn Fn() -> bool + Sync)) -> bool {
    contain("the interrupt check of a call", asked).unwrap_or(true)
}

pub(crate) fn interrupted() -> Error {
    Error::new(ErrorKind::Interrupted, "the caller was interrupted")
}

pub(crate) fn deadline_passed() -> Error {
    Error::new(ErrorKind::Deadline, "the transfer did not end in time")
}

/// The conditions that end a call early: its deadline, and its interrupt check.
pub(crate) struct Watch<'a> {
    deadline: Timestamp,
    interrupt: Interrupt<'a>,
    asked: Timestamp,
}

impl<'a> Watch<'a> {
    pub(crate) fn new(deadline: Timestamp, interrupt: Interrupt<'a>, now: Timestamp) -> Self {
        Self { deadline, interrupt, asked: now }
    }

    pub(crate) fn check(&mut self, now: Timestamp) -> Result<()> {
        if now >= self.deadline {
            return Err(deadline_passed());
        }
        if let Some(asked) = self.interrupt
            && now.saturating_since(self.asked) >= INTERRUPT_EVERY
        {
            self.asked = now;
            if says_stop(asked) {
                return Err(interrupted());
            }
        }
        Ok(())
    }
}

/// A value that another thread sets.
pub(crate) struct Slot<T> {
    value: Mutex<Option<T>>,
    filled: Condvar,
}

impl<T> Slot<T> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { value: Mutex::new(None), filled: Condvar::new() })
    }

    pub(crate) fn fill(&self, value: T) {
        *self.value.lock() = Some(value);
        self.filled.notify_one();
    }

    /// Waits for the value; an error if the time has passed or the call was interrupted.
    pub(crate) fn wait(&self, deadline: Timestamp, interrupt: Interrupt<'_>) -> Result<T> {
        let mut value = self.value.lock();
        loop {
            if let Some(value) = value.take() {
                return Ok(value);
            }
            let left = deadline.saturating_since(now());
            if left.is_zero() {
                return Err(deadline_passed());
            }
            let step = if interrupt.is_some() { left.min(INTERRUPT_EVERY) } else { left };
            value = self.filled.wait(value, step);
            if value.is_none() && interrupt.is_some_and(says_stop) {
                return Err(interrupted());
            }
        }
    }
}
