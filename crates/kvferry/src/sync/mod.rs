//! Concurrency primitives, through one module, so that models can replace them: with `--cfg loom`,
//! the unit tests of this crate run on loom's, which try every interleaving of a few threads.
//! Everywhere else these are the ones of `std` and `kvferry-sys`.

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
    pub(crate) use std::thread::{JoinHandle, current, sleep, yield_now};
}

#[cfg(not(all(loom, test)))]
pub(crate) mod poll {
    pub(crate) use kvferry_sys::poll::{Epoll, EventFd};
}
