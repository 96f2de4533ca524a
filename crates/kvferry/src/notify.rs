//! The inbox of notifications from peers.

use crate::error::{Error, Result};
use crate::sync::{Condvar, Mutex, OnceLock};
use kvferry_proto::{Limits, WireCode};
use kvferry_sys::poll::EventFd;
use std::collections::VecDeque;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Notifications in the inbox, at most; then senders get `Busy`.
const QUEUED_MAX: usize = 65_536;
/// Bytes in the inbox, at most, the senders' names and [`size_of::<Notification>`] included.
const QUEUED_BYTES_MAX: usize = 64 * 1024 * 1024;

/// A message between peers, delivered after the data that it follows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Notification {
    /// The sender's name. Ignored when sending.
    pub from: String,
    /// The address that the sender's connection comes from. Unlike the name, which the sender chooses, it can't be made
    /// up. `None` before it is sent, and ignored when sending.
    pub from_ip: Option<IpAddr>,
    /// Selects the message at the receiver.
    pub name: String,
    /// The message; not interpreted.
    pub message: Vec<u8>,
}

impl Notification {
    /// A notification to be sent.
    pub fn new(name: impl Into<String>, message: impl Into<Vec<u8>>) -> Self {
        Self { name: name.into(), message: message.into(), ..Self::default() }
    }

    /// Bytes on the wire: both strings, and the length of the name.
    pub(crate) fn wire_len(&self) -> usize {
        4 + self.name.len() + self.message.len()
    }

    /// Bytes that count against [`QUEUED_BYTES_MAX`].
    fn queued_bytes(&self) -> usize {
        size_of::<Self>() + self.from.len() + self.name.len() + self.message.len()
    }
}

#[derive(Debug, Default)]
pub(crate) struct Inbox {
    queue: Mutex<Queue>,
    arrived: Condvar,
    /// The agent was shut down: no further notification arrives.
    closed: AtomicBool,
    event: OnceLock<EventFd>,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Notification>,
    /// Sum of [`Notification::queued_bytes`].
    bytes: usize,
}

impl Inbox {
    /// Queues a notification; `Busy` if the queue is full, `TooLarge` if it exceeds the limit of a
    /// notification.
    pub(crate) fn push(&self, notification: Notification) -> WireCode {
        if notification.wire_len() > Limits::default().notify_max as usize {
            return WireCode::TooLarge;
        }
        let mut queue = self.queue.lock();
        let bytes = queue.bytes + notification.queued_bytes();
        if queue.waiting.len() >= QUEUED_MAX || bytes > QUEUED_BYTES_MAX {
            return WireCode::Busy;
        }
        queue.bytes = bytes;
        queue.waiting.push_back(notification);
        if let Some(event) = self.event.get() {
            event.signal();
        }
        drop(queue);
        self.arrived.notify_one();
        WireCode::Ok
    }

    fn emptied(&self) {
        if let Some(event) = self.event.get() {
            event.clear();
        }
    }

    pub(crate) fn drain(&self) -> Vec<Notification> {
        let mut queue = self.queue.lock();
        self.emptied();
        std::mem::take(&mut *queue).waiting.into()
    }

    /// Takes the next notification; `None` if none came in time, `Shutdown` if none is left and no
    /// further one can come.
    pub(crate) fn wait(&self, timeout: Duration) -> Result<Option<Notification>> {
        // A timeout beyond the clock's range is infinite.
        let until = Instant::now().checked_add(timeout);
        let mut queue = self.queue.lock();
        loop {
            if let Some(first) = queue.waiting.pop_front() {
                queue.bytes -= first.queued_bytes();
                if queue.waiting.is_empty() {
                    self.emptied();
                }
                return Ok(Some(first));
            }
            if self.closed.load(Ordering::Acquire) {
                return Err(Error::shutdown());
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Ok(None);
            }
            queue = self.arrived.wait(queue, left);
        }
    }

    /// Ends every wait.
    pub(crate) fn close(&self) {
        // Under the lock: a waiter has either not checked `closed` yet, or is waiting already.
        let queue = self.queue.lock();
        self.closed.store(true, Ordering::Release);
        drop(queue);
        self.arrived.notify_all();
    }

    pub(crate) fn event_fd(&self) -> Result<BorrowedFd<'_>> {
        if self.event.get().is_none() {
            let event = EventFd::new()
                .map_err(|e| Error::io("the event descriptor of notifications can't be made", e))?;
            // Another thread may have set its own first, which serves as well.
            let _ = self.event.set(event);
        }
        let queue = self.queue.lock();
        let event = self.event.get().expect("set above");
        if !queue.waiting.is_empty() {
            event.signal();
        }
        Ok(event.as_fd())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_queue_is_bounded_in_notifications_and_in_bytes() {
        let longest = Limits::default().notify_max as usize - 4;
        for (len, max) in [(0, QUEUED_MAX), (longest, QUEUED_BYTES_MAX / longest)] {
            let inbox = Inbox::default();
            let push = || inbox.push(Notification::new("", vec![0; len]));
            let taken = (0..=max).take_while(|_| push() == WireCode::Ok).count();
            assert!(taken <= max && taken > max * 9 / 10, "{taken} of {len} bytes");
            assert_eq!(push(), WireCode::Busy);
            inbox.wait(Duration::ZERO).expect("open").expect("many are queued");
            assert_eq!((push(), push()), (WireCode::Ok, WireCode::Busy), "one place is free");
            assert_eq!(inbox.drain().len(), taken);
            let bytes = inbox.queue.lock().bytes;
            assert_eq!((bytes, push()), (0, WireCode::Ok));
        }
    }

    #[test]
    fn a_notification_that_is_too_long_is_refused_on_every_path() {
        let max = Limits::default().notify_max as usize;
        let inbox = Inbox::default();
        let push = |name: usize, message: usize| {
            inbox.push(Notification::new("n".repeat(name), vec![0; message]))
        };
        assert_eq!(push(max - 4, 0), WireCode::Ok);
        assert_eq!(push(max - 5, 1), WireCode::Ok);
        assert_eq!(push(max - 4, 1), WireCode::TooLarge);
        assert_eq!(push(1, max), WireCode::TooLarge);
    }
}
