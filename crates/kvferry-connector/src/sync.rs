//! Locks that a panic elsewhere does not take away: every holder leaves its data valid at each step.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits while `condition` holds, for at most `timeout`.
pub(crate) fn wait_while<'a, T>(
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
