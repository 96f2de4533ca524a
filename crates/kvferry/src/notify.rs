//! Notifications that peers sent.

use crate::error::Error;
use crate::error::Result;
use kvferry_sys::poll::EventFd;
use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// Notifications kept for the user; beyond that senders are told `Busy`.
pub(crate) const QUEUED_MAX: usize = 65_536;

/// A word from a peer, delivered after the data it followed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Notification {
    /// The sender's name. Ignored when sending.
    pub from: String,
    /// What the receiver selects by.
    pub name: String,
    /// What is said; not interpreted.
    pub message: Vec<u8>,
}

impl Notification {
    /// A notification to be sent.
    pub fn new(name: impl Into<String>, message: impl Into<Vec<u8>>) -> Self {
        Self { from: String::new(), name: name.into(), message: message.into() }
    }
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    queue: Mutex<VecDeque<Notification>>,
    arrived: Condvar,
    /// The agent was shut down: nothing arrives any more.
    closed: AtomicBool,
    event: OnceLock<EventFd>,
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, VecDeque<Notification>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues a notification; false if the queue is full.
    pub(crate) fn push(&self, notification: Notification) -> bool {
        let mut queue = self.lock();
        if queue.len() >= QUEUED_MAX {
            return false;
        }
        queue.push_back(notification);
        if let Some(event) = self.event.get() {
            event.signal();
        }
        drop(queue);
        self.arrived.notify_one();
        true
    }

    fn emptied(&self, queue: &VecDeque<Notification>) {
        if queue.is_empty()
            && let Some(event) = self.event.get()
        {
            event.clear();
        }
    }

    pub(crate) fn drain(&self) -> Vec<Notification> {
        let mut queue = self.lock();
        let all = queue.drain(..).collect();
        self.emptied(&queue);
        all
    }

    pub(crate) fn wait(&self, timeout: Duration) -> Option<Notification> {
        let until = Instant::now() + timeout;
        let mut queue = self.lock();
        loop {
            if let Some(first) = queue.pop_front() {
                self.emptied(&queue);
                return Some(first);
            }
            if self.closed.load(Ordering::Acquire) {
                return None;
            }
            let left = until.checked_duration_since(Instant::now())?;
            queue =
                self.arrived.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ends every wait.
    pub(crate) fn close(&self) {
        // Under the lock: a waiter has either not looked yet, or is waiting already.
        let queue = self.lock();
        self.closed.store(true, Ordering::Release);
        drop(queue);
        self.arrived.notify_all();
    }

    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        if self.event.get().is_none() {
            let event = EventFd::new()
                .map_err(|e| Error::io("no descriptor for notifications can be made", e))?;
            // Somebody else may have been first; theirs is as good.
            let _ = self.event.set(event);
        }
        let queue = self.lock();
        let event = self.event.get().expect("set above");
        if !queue.is_empty() {
            event.signal();
        }
        Ok(event.as_fd())
    }
}
