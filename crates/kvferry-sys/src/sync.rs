//! `std`'s locks without poison: a panic of one thread does not take a lock from the others.
//!
//! This is right because every holder keeps the data consistent between any two statements, so a
//! thread that panics while it holds a lock leaves nothing half done. The process belongs to an
//! engine, and one failed call there must not make every later call panic.
//!
//! A lock of `std` has all its state within itself. Locks that park threads in a table of the
//! process, as `parking_lot`'s do, may find that table locked for ever in the child of a `fork`.

use std::sync::{LockResult, PoisonError, TryLockError, TryLockResult};
pub use std::sync::{MutexGuard, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

fn ignore_poison<T>(result: LockResult<T>) -> T {
    result.unwrap_or_else(PoisonError::into_inner)
}

fn unless_held<T>(result: TryLockResult<T>) -> Option<T> {
    match result {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// A mutual exclusion lock.
#[derive(Debug, Default)]
pub struct Mutex<T: ?Sized>(std::sync::Mutex<T>);

impl<T> Mutex<T> {
    /// An unlocked mutex.
    pub const fn new(value: T) -> Self {
        Self(std::sync::Mutex::new(value))
    }

    /// The value.
    pub fn into_inner(self) -> T {
        ignore_poison(self.0.into_inner())
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits for the lock and takes it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        ignore_poison(self.0.lock())
    }

    /// Takes the lock if no thread holds it.
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        unless_held(self.0.try_lock())
    }

    /// The value, which no other thread can hold.
    pub fn get_mut(&mut self) -> &mut T {
        ignore_poison(self.0.get_mut())
    }
}

/// A lock that many threads share for reading, or one holds for writing.
#[derive(Debug, Default)]
pub struct RwLock<T: ?Sized>(std::sync::RwLock<T>);

impl<T> RwLock<T> {
    /// An unlocked lock.
    pub const fn new(value: T) -> Self {
        Self(std::sync::RwLock::new(value))
    }
}

impl<T: ?Sized> RwLock<T> {
    /// Waits for the lock and shares it.
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        ignore_poison(self.0.read())
    }

    /// Waits for the lock and takes it alone.
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        ignore_poison(self.0.write())
    }

    /// Takes the lock alone if no thread holds or shares it.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        unless_held(self.0.try_write())
    }
}

/// Lets the holders of a [`Mutex`] wait for a change of its value.
#[derive(Debug, Default)]
pub struct Condvar(std::sync::Condvar);

impl Condvar {
    /// A condition variable that no thread waits on.
    pub const fn new() -> Self {
        Self(std::sync::Condvar::new())
    }

    /// Waits for a notification, for at most `timeout`. May return earlier.
    pub fn wait<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: impl Into<Option<Duration>>,
    ) -> MutexGuard<'a, T> {
        match timeout.into() {
            None => ignore_poison(self.0.wait(guard)),
            Some(timeout) => ignore_poison(self.0.wait_timeout(guard, timeout)).0,
        }
    }

    /// Waits while `condition` holds, for at most `timeout`.
    pub fn wait_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: impl Into<Option<Duration>>,
        condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        match timeout.into() {
            None => ignore_poison(self.0.wait_while(guard, condition)),
            Some(timeout) => ignore_poison(self.0.wait_timeout_while(guard, timeout, condition)).0,
        }
    }

    /// Wakes one waiting thread.
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes every waiting thread.
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_holder_leaves_the_locks_to_the_other_threads() {
        let (mutex, lock, changed) = (Mutex::new(1), RwLock::new(2), Condvar::new());
        let holder = std::panic::AssertUnwindSafe(|| {
            let _held = (mutex.lock(), lock.write());
            std::panic::resume_unwind(Box::new(()));
        });
        std::panic::catch_unwind(holder).expect_err("it panics");
        assert_eq!(mutex.try_lock().as_deref(), Some(&1));
        assert_eq!(*mutex.lock() + *lock.read(), 3);
        *lock.write() += 1;
        drop(changed.wait(mutex.lock(), Duration::ZERO));
        drop(changed.wait_while(mutex.lock(), None, |value| *value != 1));
        assert_eq!(mutex.into_inner(), 1);
    }
}
