//! Descriptors that a forked child gives up.
//!
//! An agent's sockets must not live on in a child that its host process forks: the peer would
//! never see them close. So every descriptor of an agent is tracked, and a child handler puts a
//! harmless one in its place. The number stays taken, so that a later drop in the child closes
//! the placeholder and not somebody else's file.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, Once, PoisonError};

static OPEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());
static FORKS: AtomicU32 = AtomicU32::new(0);
static PLACEHOLDER: AtomicI32 = AtomicI32::new(-1);
static INSTALL: Once = Once::new();

thread_local! {
    // The guard taken before a fork, given back after it by the same thread on both sides.
    static DURING_FORK: std::cell::Cell<Option<MutexGuard<'static, BTreeSet<RawFd>>>> =
        const { std::cell::Cell::new(None) };
}

fn open() -> MutexGuard<'static, BTreeSet<RawFd>> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

extern "C" fn before_fork() {
    let guard = open();
    DURING_FORK.set(Some(guard));
}

extern "C" fn after_fork_in_parent() {
    drop(DURING_FORK.take());
}

extern "C" fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    if let Some(guard) = DURING_FORK.take() {
        let placeholder = PLACEHOLDER.load(Ordering::SeqCst);
        for &fd in guard.iter() {
            // SAFETY: `dup3` on descriptors of this process; it is async-signal-safe, as a child
            // handler must be. A failure leaves the descriptor as it was.
            unsafe { libc::dup3(placeholder, fd, libc::O_CLOEXEC) };
        }
    }
}

/// How often the process that this code runs in was forked, counted in the children.
pub fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Whether this process is a child forked after `forks` was read.
pub fn forked_since(forks: u32) -> bool {
    self::forks() != forks
}

/// Installs the fork handlers. Idempotent.
///
/// # Errors
/// If no placeholder descriptor can be made.
pub fn install_fork_handlers() -> io::Result<()> {
    let mut result = Ok(());
    INSTALL.call_once(|| {
        match rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC) {
            Ok(fd) => {
                PLACEHOLDER.store(fd.as_raw_fd(), Ordering::SeqCst);
                std::mem::forget(fd);
            }
            Err(e) => result = Err(e.into()),
        }
        // SAFETY: the three handlers only lock, walk a set and call async-signal-safe functions.
        unsafe {
            libc::pthread_atfork(
                Some(before_fork),
                Some(after_fork_in_parent),
                Some(after_fork_in_child),
            );
        }
    });
    result
}

/// A descriptor of an agent: closed on drop, given up by a forked child.
#[derive(Debug)]
pub struct Fd(Option<OwnedFd>);

impl Fd {
    /// Takes over `fd`.
    pub fn new(fd: OwnedFd) -> Self {
        open().insert(fd.as_raw_fd());
        Self(Some(fd))
    }

    /// How many descriptors are open in this process. For leak tests.
    pub fn count() -> usize {
        open().len()
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("the descriptor is there until drop").as_fd()
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let mut open = open();
        if let Some(fd) = self.0.take() {
            open.remove(&fd.as_raw_fd());
            // Closed under the lock: a fork in between must not see a number that is free again.
            drop(fd);
        }
    }
}
