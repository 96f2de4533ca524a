//! Ends of tasks, and what waits for them.

use kvferry_proto::tasks::Outcome;
use kvferry_sys::sync::{Condvar, Mutex};
use std::sync::Arc;
use std::time::Duration;

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
        *self.outcome.lock() = Some(outcome);
        self.changed.notify_all();
    }

    /// Waits for the end; without a limit if `timeout` is `None`.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<Outcome> {
        let is_open = |outcome: &mut Option<Outcome>| outcome.is_none();
        self.changed.wait_while(self.outcome.lock(), timeout, is_open).clone()
    }
}

/// Place to which the outcome of a task goes.
pub(super) struct Ending {
    pub(super) end: Arc<End>,
    pub(super) done: Option<Done>,
}
