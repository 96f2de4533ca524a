//! The queue of messages for the control connection.

use crate::peer_memory::Account;
use crate::sync::{Mutex, lock};
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct MessageQueue(Mutex<Queue>);

#[derive(Debug)]
struct Queue {
    /// Memory of messages that the peer has not taken.
    account: Account,
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

/// Why a message is not queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// The session's queue is full.
    Queue,
    /// All peers make this agent hold as much memory as they may.
    Memory,
}

impl Queue {
    /// Counts the messages that the peer has not taken, and `more` bytes. False if that is more than it may be; less than
    /// before is always granted.
    fn hold(&mut self, more: usize) -> bool {
        let bytes = self.waiting_bytes + self.sent_bytes + more;
        self.account.hold(bytes)
    }
}

impl MessageQueue {
    /// `account` is for the messages that wait until the peer takes them.
    pub(crate) fn new(account: Account) -> Self {
        Self(Mutex::new(Queue {
            account,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            sent: 0,
            sent_bytes: 0,
            busy: false,
            untaken: 0,
            untaken_bytes: 0,
        }))
    }

    /// `spare`: how many bytes of memory must be left.
    pub(crate) fn push(&self, message: Vec<u8>, spare: usize) -> Result<(), Full> {
        let mut queue = lock(&self.0);
        if queue.waiting.len() >= WAITING_MAX
            || queue.waiting_bytes + message.len() > WAITING_BYTES_MAX
        {
            return Err(Full::Queue);
        }
        if spare > 0 && !queue.hold(message.len() + spare) || !queue.hold(message.len()) {
            return Err(Full::Memory);
        }
        queue.waiting_bytes += message.len();
        queue.waiting.push_back(message);
        Ok(())
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
        let _ = queue.hold(0);
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
        let _ = queue.hold(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer_memory::{FREE_PER_CONNECTION, Memory, PeerMemory};

    #[test]
    fn without_memory_a_message_beyond_what_is_free_is_refused_until_others_were_taken() {
        let memory = PeerMemory::new(0);
        let queue = MessageQueue::new(memory.account([10, 0, 0, 1].into(), Memory::Queued));
        let message = vec![7; FREE_PER_CONNECTION / 2];
        assert_eq!(queue.push(message.clone(), 0), Ok(()));
        assert_eq!(queue.push(message.clone(), 0), Ok(()));
        assert_eq!(queue.push(vec![7], 0), Err(Full::Memory));
        let sent = queue.next(false).expect("the first one");
        assert_eq!(queue.push(vec![7], 0), Err(Full::Memory), "it was not taken");
        queue.answered(sent.len());
        assert_eq!(queue.push(message, 0), Ok(()));
    }

    #[test]
    fn what_may_be_refused_leaves_memory_to_what_may_not() {
        let memory = PeerMemory::new(0);
        let queue = MessageQueue::new(memory.account([10, 0, 0, 1].into(), Memory::Queued));
        let half = FREE_PER_CONNECTION / 2;
        assert_eq!(queue.push(vec![7; half], half), Ok(()));
        assert_eq!(queue.push(vec![7], half), Err(Full::Memory));
        assert_eq!(queue.push(vec![7; half], 0), Ok(()));
    }
}
