//! Ends of tasks, and what waits for them.

use kvferry_proto::tasks::Outcome;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Locks a mutex, also after a panic of another thread: every holder leaves its data valid at each step.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits while `condition` holds, for at most `timeout`.
pub(super) fn wait_while<'a, T>(
    changed: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Option<Duration>,
    condition: impl FnMut(&mut T) -> bool,
) -> MutexGuard<'a, T> {
    match timeout {
        None => changed.wait_while(guard, condition).unwrap_or_else(PoisonError::into_inner),
        Some(timeout) => {
            let waited = changed.wait_timeout_while(guard, timeout, condition);
            waited.unwrap_or_else(PoisonError::into_inner).0
        }
    }
}

/// Called once with a task's outcome, by the endpoint's thread.
pub(crate) type Done = Box<dyn FnOnce(&Outcome) + Send>;

/// Outcome of a task, once the task has ended.
#[derive(Debug, Default)]
pub(crate) struct End {
    outcome: Mutex<Option<Outcome>>,
    changed: Condvar,
}

impl End {
    pub(super) fn set(&self, outcome: Outcome) {
        *lock(&self.outcome) = Some(outcome);
        self.changed.notify_all();
    }

    /// Waits for the end; without a limit if `timeout` is `None`.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        let outcome = lock(&self.outcome);
        wait_while(&self.changed, outcome, timeout, |outcome| outcome.is_none()).clone()
    }
}

/// Where the outcome of a task goes.
pub(super) struct Ending {
    pub(super) end: Arc<End>,
    pub(super) done: Option<Done>,
}
