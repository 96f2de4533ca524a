//! Locking that goes on after a panic of another thread.

use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
