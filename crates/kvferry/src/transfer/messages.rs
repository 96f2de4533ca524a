//! The queue of messages for the control connection.
//!
//! Some messages may be refused, and without others a session can't go on. A queue that has accepted one of the former keeps
//! [`SPARE_BYTES`] of memory for the latter beyond what its messages take, so that no other session of the host gets
//! them. A message that must go takes its memory from there, and each message that the peer has taken fills it up again.

use crate::peer_memory::{Account, FREE_PER_CONNECTION};
use crate::sync::Mutex;
use std::collections::VecDeque;

#[derive(Debug)]
pub(crate) struct MessageQueue(Mutex<Queue>);

#[derive(Debug)]
struct Queue {
    /// Memory of messages that the peer has not taken, and the spare.
    account: Account,
    /// Bytes that are kept for messages that must go, at most [`SPARE_BYTES`].
    spare: usize,
    /// The queue holds a message that could have been refused, or has held one since it was empty last.
    keeps_spare: bool,
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
/// Waiting messages and bytes that messages which may be refused leave to those that may not.
pub(crate) const SPARE_MESSAGES: usize = 1024;
pub(crate) const SPARE_BYTES: usize = FREE_PER_CONNECTION / 2;
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

/// Importance of a message: which ones leave room to which others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Importance {
    /// Without it, the session can't go on.
    Must,
    /// The message may be refused, and leaves room for [`SPARE_MESSAGES`] and [`SPARE_BYTES`].
    May,
}

impl Queue {
    /// Bytes of messages that the peer has not taken.
    fn held(&self) -> usize {
        self.waiting_bytes + self.sent_bytes
    }

    /// Counts `more` bytes of a message and the spare that is left then. False, and nothing changes, if that is more than it
    /// may be.
    fn hold(&mut self, more: usize, need: Importance) -> bool {
        let spare = match need {
            Importance::May => SPARE_BYTES,
            Importance::Must => self.spare.saturating_sub(more),
        };
        if !self.account.hold(self.held() + more + spare) {
            return false;
        }
        self.spare = spare;
        self.keeps_spare |= need == Importance::May;
        true
    }

    /// The messages are `fewer` bytes less than the account holds. Never refused: what is held does not grow.
    fn release(&mut self, fewer: usize) {
        self.keeps_spare &= self.held() > 0;
        self.spare = if self.keeps_spare { (self.spare + fewer).min(SPARE_BYTES) } else { 0 };
        let is_granted = self.account.hold(self.held() + self.spare);
        debug_assert!(is_granted, "less than before is granted");
    }
}

impl MessageQueue {
    /// `account` is for the messages that wait until the peer takes them.
    pub(crate) fn new(account: Account) -> Self {
        Self(Mutex::new(Queue {
            account,
            spare: 0,
            keeps_spare: false,
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            sent: 0,
            sent_bytes: 0,
            busy: false,
            untaken: 0,
            untaken_bytes: 0,
        }))
    }

    pub(crate) fn push(&self, message: Vec<u8>, need: Importance) -> Result<(), Full> {
        let (messages, bytes) = match need {
            Importance::Must => (0, 0),
            Importance::May => (SPARE_MESSAGES, SPARE_BYTES),
        };
        let mut queue = self.0.lock();
        if queue.waiting.len() + messages >= WAITING_MAX
            || queue.waiting_bytes + message.len() + bytes > WAITING_BYTES_MAX
        {
            return Err(Full::Queue);
        }
        if !queue.hold(message.len(), need) {
            return Err(Full::Memory);
        }
        queue.waiting_bytes += message.len();
        queue.waiting.push_back(message);
        Ok(())
    }

    /// The next message to send. `None` if the queue is empty, too many messages are in progress,
    /// or another thread is sending (unless `was_busy`: the caller is that thread).
    pub(crate) fn next(&self, was_busy: bool) -> Option<Vec<u8>> {
        let mut queue = self.0.lock();
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
        let mut queue = self.0.lock();
        let dropped = queue.waiting_bytes;
        (queue.waiting, queue.waiting_bytes) = (VecDeque::new(), 0);
        // No message follows that could use the spare.
        queue.keeps_spare = false;
        queue.release(dropped);
    }

    /// Messages that wait to be sent, and their bytes.
    pub(crate) fn waiting(&self) -> (usize, usize) {
        let queue = self.0.lock();
        (queue.waiting.len(), queue.waiting_bytes)
    }

    /// A message of the peer arrived and will be taken later.
    pub(crate) fn arrived(&self, len: usize) {
        let mut queue = self.0.lock();
        queue.untaken += 1;
        queue.untaken_bytes += len;
    }

    pub(crate) fn taken(&self, len: usize) {
        let mut queue = self.0.lock();
        queue.untaken -= 1;
        queue.untaken_bytes -= len;
    }

    /// The peer's messages that were not taken yet, and their bytes.
    pub(crate) fn untaken(&self) -> (usize, usize) {
        let queue = self.0.lock();
        (queue.untaken, queue.untaken_bytes)
    }

    pub(crate) fn answered(&self, len: usize) {
        let mut queue = self.0.lock();
        queue.sent -= 1;
        queue.sent_bytes -= len;
        queue.release(len);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::peer_memory::{Memory, PEER_MEMORY_MIN, PeerMemory};
    use crate::sync::Arc;

    fn queue(memory: &Arc<PeerMemory>) -> MessageQueue {
        MessageQueue::new(memory.account([10, 0, 0, 1].into(), Memory::Queued))
    }

    /// Queues messages of `len` bytes until one is refused. Returns how many were queued, and why the last was not.
    fn fill(queue: &MessageQueue, len: usize, need: Importance) -> (usize, Full) {
        let refused = (0..).find_map(|n| Some((n, queue.push(vec![7; len], need).err()?)));
        refused.expect("it is bounded")
    }

    #[test]
    fn without_memory_a_message_beyond_what_is_free_is_refused_until_others_were_taken() {
        let queue = queue(&PeerMemory::new(0));
        let message = vec![7; FREE_PER_CONNECTION / 2];
        assert_eq!(queue.push(message.clone(), Importance::Must), Ok(()));
        assert_eq!(queue.push(message.clone(), Importance::Must), Ok(()));
        assert_eq!(queue.push(vec![7], Importance::Must), Err(Full::Memory));
        let sent = queue.next(false).expect("the first one");
        assert_eq!(queue.push(vec![7], Importance::Must), Err(Full::Memory), "it was not taken");
        queue.answered(sent.len());
        assert_eq!(queue.push(message, Importance::Must), Ok(()));
    }

    #[test]
    fn what_may_be_refused_leaves_memory_to_what_may_not() {
        let queue = queue(&PeerMemory::new(0));
        assert_eq!(queue.push(vec![7; SPARE_BYTES], Importance::May), Ok(()));
        assert_eq!(queue.push(vec![7], Importance::May), Err(Full::Memory));
        assert_eq!(queue.push(vec![7; SPARE_BYTES], Importance::Must), Ok(()));
    }

    #[test]
    fn each_session_of_a_host_keeps_the_memory_that_its_messages_have_left() {
        const LEN: usize = 1024;
        const SPARE: usize = SPARE_BYTES / LEN;
        let memory = PeerMemory::new(PEER_MEMORY_MIN);
        let all: [MessageQueue; 3] = std::array::from_fn(|_| queue(&memory));
        // The first takes what it gets beyond what is free for it, and leaves the others none.
        let queued = all.each_ref().map(|queue| fill(queue, LEN, Importance::May));
        let free = (FREE_PER_CONNECTION - SPARE_BYTES) / LEN;
        assert!(queued[0].0 > 2 * free, "{queued:?}");
        assert_eq!(queued[1..], [(free, Full::Memory); 2]);
        let held = memory.held();
        for queue in all.iter().rev() {
            assert_eq!(fill(queue, LEN, Importance::Must), (SPARE, Full::Memory));
        }
        assert_eq!(memory.held(), held, "it was kept");
        // What the peer takes comes back to the same session.
        let sent = all[0].next(false).expect("the first one");
        all[0].answered(sent.len());
        assert_eq!(fill(&all[1], LEN, Importance::May).0, 0);
        assert_eq!(fill(&all[0], LEN, Importance::May).0, 0);
        assert_eq!(fill(&all[0], LEN, Importance::Must), (1, Full::Memory));
        for queue in &all {
            queue.drop_waiting();
        }
        assert_eq!(memory.held(), 0);
    }

    #[test]
    fn a_queue_that_is_empty_again_keeps_nothing() {
        let memory = PeerMemory::new(PEER_MEMORY_MIN);
        let queue = queue(&memory);
        assert_eq!(queue.push(vec![7; FREE_PER_CONNECTION], Importance::May), Ok(()));
        assert_eq!(memory.held(), SPARE_BYTES);
        let sent = queue.next(false).expect("a message");
        queue.answered(sent.len());
        assert_eq!(memory.held(), 0);
        assert_eq!(queue.push(vec![7; FREE_PER_CONNECTION + 1], Importance::Must), Ok(()));
        assert_eq!(memory.held(), 1);
    }

    #[test]
    fn what_may_be_refused_leaves_places_and_bytes_of_its_queue() {
        let memory = PeerMemory::new(64 * WAITING_BYTES_MAX);
        let few = queue(&memory);
        assert_eq!(fill(&few, 1, Importance::May), (WAITING_MAX - SPARE_MESSAGES, Full::Queue));
        assert_eq!(fill(&few, 1, Importance::Must), (SPARE_MESSAGES, Full::Queue));
        let many = queue(&memory);
        let len = SPARE_BYTES;
        assert_eq!(fill(&many, len, Importance::May), (WAITING_BYTES_MAX / len - 1, Full::Queue));
        assert_eq!(fill(&many, len, Importance::Must), (1, Full::Queue));
    }
}
