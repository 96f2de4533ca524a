//! Descriptors that a forked child closes.
//!
//! An agent's sockets must not stay open in a child that its host process forks: the peer would
//! never see them close. So every descriptor of an agent is tracked, and an `atfork` handler in the
//! child replaces each by a placeholder. The number stays taken, so that a later drop in the child
//! closes the placeholder and not an unrelated file.

use crate::sync::{Mutex, MutexGuard};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

static OPEN: Mutex<BTreeSet<RawFd>> = Mutex::new(BTreeSet::new());
static FORKS: AtomicU32 = AtomicU32::new(0);
static PLACEHOLDER: AtomicI32 = AtomicI32::new(-1);
static INSTALL: Once = Once::new();

thread_local! {
    // The lock guard: taken before a fork, released after it by the same thread in parent and
    // child.
    static DURING_FORK: std::cell::Cell<Option<MutexGuard<'static, BTreeSet<RawFd>>>> =
        const { std::cell::Cell::new(None) };
}

/// Keeps every tracked descriptor from being closed until dropped.
#[cfg(test)]
pub(crate) fn hold_closing() -> MutexGuard<'static, BTreeSet<RawFd>> {
    OPEN.lock()
}

extern "C" fn before_fork() {
    let guard = OPEN.lock();
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
            // SAFETY: `dup3` on descriptors of this process; it is async-signal-safe, as a handler
            // in the child must be. If it fails, the descriptor stays as it was.
            unsafe { libc::dup3(placeholder, fd, libc::O_CLOEXEC) };
        }
    }
}

/// Number of forks between the first process and this one; counted in the children.
pub fn forks() -> u32 {
    FORKS.load(Ordering::Relaxed)
}

/// Whether this process is a child that was forked after the value `forks` was read.
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
        // SAFETY: the three handlers only lock, iterate over a set and call async-signal-safe
        // functions.
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

/// Number of descriptors that this process may have open: the current soft limit `RLIMIT_NOFILE`.
pub fn limit() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.map_or(usize::MAX, |limit| usize::try_from(limit).unwrap_or(usize::MAX))
}

/// A tracked descriptor: closed on drop, replaced in a forked child.
#[derive(Debug)]
pub struct Fd(Option<OwnedFd>);

impl Fd {
    /// Takes ownership of `fd`.
    pub fn new(fd: OwnedFd) -> Self {
        OPEN.lock().insert(fd.as_raw_fd());
        Self(Some(fd))
    }

    /// Number of tracked descriptors that are open in this process. For leak tests.
    pub fn count() -> usize {
        OPEN.lock().len()
    }
}

/// A tracked owner of a descriptor whose close may take long: of a file, or of a ring. It is closed
/// without the lock, so a child that is forked at that moment may keep it, until it ends or runs another
/// program.
#[derive(Debug)]
pub struct Tracked<T: AsRawFd> {
    owner: T,
    forks: u32,
}

impl<T: AsRawFd> Tracked<T> {
    /// Takes the owner of a descriptor, which stays the same.
    pub fn new(owner: T) -> Self {
        OPEN.lock().insert(owner.as_raw_fd());
        Self { owner, forks: forks() }
    }

    /// Whether this process was forked after the descriptor was made.
    pub(crate) fn was_forked(&self) -> bool {
        forked_since(self.forks)
    }
}

impl<T: AsRawFd> std::ops::Deref for Tracked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.owner
    }
}

impl<T: AsRawFd> std::ops::DerefMut for Tracked<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.owner
    }
}

impl<T: AsRawFd + AsFd> AsFd for Tracked<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.owner.as_fd()
    }
}

impl<T: AsRawFd> Drop for Tracked<T> {
    /// Stops tracking the descriptor. The owner is dropped after that, which closes it.
    fn drop(&mut self) {
        OPEN.lock().remove(&self.owner.as_raw_fd());
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("only drop takes the descriptor").as_fd()
    }
}

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Fd {
    fn drop(&mut self) {
        let mut open = OPEN.lock();
        if let Some(fd) = self.0.take() {
            open.remove(&fd.as_raw_fd());
            // Closed while the lock is held: a fork in between must not see a number that is free
            // again. If the last close of a file takes long, the caller must keep the file open by
            // another descriptor.
            drop(fd);
        }
    }
}
