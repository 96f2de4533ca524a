//! Concurrency primitives that models can replace: with `--cfg loom`, the unit tests of this crate
//! use loom's, which try every interleaving of a few threads. Otherwise these are the primitives of
//! `std` and `kvferry-sys`.

#[cfg(all(loom, test))]
mod loomed;

#[cfg(not(all(loom, test)))]
pub(crate) use kvferry_sys::sync::{
    Condvar, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
#[cfg(all(loom, test))]
pub(crate) use loomed::{
    Condvar, Mutant, Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard, atomic, hint,
    poll, thread,
};
pub(crate) use std::sync::{Arc, OnceLock, Weak};
#[cfg(not(all(loom, test)))]
pub(crate) use std::{hint, sync::atomic};

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
