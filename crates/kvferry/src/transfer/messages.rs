//! The queue of messages for the control connection.

use crate::sync::{Mutex, lock};
use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(crate) struct MessageQueue(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// Sent and not answered yet.
    sent: usize,
    sent_bytes: usize,
    /// A thread is sending messages. Other threads only enqueue, which keeps the order.
    busy: bool,
    /// The peer's messages that arrived and will be taken later.
    untaken: usize,
    untaken_bytes: usize,
}

/// Waiting messages and bytes, at most.
pub(crate) const WAITING_MAX: usize = 65_536;
pub(crate) const WAITING_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Messages and bytes in progress, at most: well below the limit of a session. They bound what a peer holds
/// that takes messages late, so they are part of the protocol.
pub(crate) const SENT_MAX: usize = 256;
pub(crate) const SENT_BYTES_MAX: usize = 1024 * 1024;

impl MessageQueue {
    /// False if the queue is full.
    pub(crate) fn push(&self, message: Vec<u8>) -> bool {
        let mut queue = lock(&self.0);
        if queue.waiting.len() >= WAITING_MAX
            || queue.waiting_bytes + message.len() > WAITING_BYTES_MAX
        {
            return false;
        }
        queue.waiting_bytes += message.len();
        queue.waiting.push_back(message);
        true
    }

    /// The next message to send. `None` if the queue is empty, too many messages are in progress,
    /// or another thread is sending (unless `was_busy`: the caller is that thread).
    pub(crate) fn next(&self, was_busy: bool) -> Option<Vec<u8>> {
        let mut queue = lock(&self.0);
        if queue.busy && !was_busy {
            return None;
        }
        let may_send = queue.sent < SENT_MAX && queue.sent_bytes < SENT_BYTES_MAX;
        let message = if may_send { queue.waiting.pop_front() } else { None };
        queue.busy = message.is_some();
        let len = message.as_ref().map_or(0, Vec::len);
        queue.waiting_bytes -= len;
        queue.sent_bytes += len;
        queue.sent += usize::from(message.is_some());
        message
    }

    /// Drops the messages that wait: the session has ended.
    pub(crate) fn drop_waiting(&self) {
        let mut queue = lock(&self.0);
        (queue.waiting, queue.waiting_bytes) = (VecDeque::new(), 0);
    }

    /// Messages that wait to be sent, and their bytes.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        let queue = lock(&self.0);
        (queue.waiting.len(), queue.waiting_bytes)
    }

    /// A message of the peer arrived and will be taken later.
    pub(crate) fn arrived(&self, len: usize) {
        let mut queue = lock(&self.0);
        queue.untaken += 1;
        queue.untaken_bytes += len;
    }

    pub(crate) fn taken(&self, len: usize) {
        let mut queue = lock(&self.0);
        queue.untaken -= 1;
        queue.untaken_bytes -= len;
    }

    /// The peer's messages that were not taken yet, and their bytes.
    pub(crate) fn untaken(&self) -> (usize, usize) {
        let queue = lock(&self.0);
        (queue.untaken, queue.untaken_bytes)
    }

    pub(crate) fn answered(&self, len: usize) {
        let mut queue = lock(&self.0);
        queue.sent -= 1;
        queue.sent_bytes -= len;
    }
}
