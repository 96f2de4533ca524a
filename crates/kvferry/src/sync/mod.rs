//! Concurrency primitives that models can replace: with `--cfg loom`, the unit tests of this crate
//! use loom's, which try every interleaving of a few threads. Otherwise these are the primitives of
//! `std` and `kvferry-sys`.

use std::time::Duration;

#[cfg(all(loom, test))]
mod loomed;

#[cfg(all(loom, test))]
pub(crate) use loomed::{
    Condvar, Mutant, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic, hint,
    poll, thread,
};
pub(crate) use std::sync::{Arc, OnceLock, PoisonError, Weak};
#[cfg(not(all(loom, test)))]
pub(crate) use std::{
    hint,
    sync::{Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic},
};

#[cfg(not(all(loom, test)))]
pub(crate) mod thread {
    pub(crate) use kvferry_sys::thread::spawn;
    pub(crate) use std::thread::{JoinHandle, ThreadId, current, sleep, yield_now};

    pub(crate) fn is_finished<T>(thread: &JoinHandle<T>) -> bool {
        thread.is_finished()
    }
}

#[cfg(not(all(loom, test)))]
pub(crate) mod poll {
    pub(crate) use kvferry_sys::poll::{Epoll, EventFd};
}

/// Locks a mutex. Ignores poisoning: every holder keeps the data consistent between any two
/// statements, so a panic while the lock was held does no harm.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for reading; see [`lock`].
pub(crate) fn read<T>(lock: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    lock.read().unwrap_or_else(PoisonError::into_inner)
}

/// Locks for writing; see [`lock`].
pub(crate) fn write<T>(lock: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    lock.write().unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition variable; see [`lock`]. May return without a notification.
pub(crate) fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Waits on a condition variable for at most `timeout`; see [`wait`].
pub(crate) fn wait_timeout<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    timeout: Duration,
) -> MutexGuard<'a, T> {
    condvar.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner).0
}
