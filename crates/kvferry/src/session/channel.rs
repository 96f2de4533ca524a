//! [`Channel`]: short messages between agents, for the layers above transfers.

use crate::error::{Error, ErrorKind, Result};
use crate::sync::Arc;
use crate::transfer::link::Link;
use crate::transfer::messages::{self, Full, Importance};
use crate::transfer::requests::MESSAGE;
use kvferry_proto::message::BODY_MAX;
use kvferry_proto::{Incarnation, WireCode};
use std::hash::{Hash, Hasher};
use std::net::IpAddr;
use std::ops::Deref;
use std::time::Duration;

/// A session with one incarnation of a peer, for exchanging messages. Clones are the same session.
/// All methods may be called from any thread.
///
/// Messages go over the control connection, in both directions, never behind payload. They arrive
/// in the order in which they were sent, each once. If a message can't be delivered, the session
/// ends: no message is lost unless [`MessageHandler::ended`] is called.
#[derive(Clone, Debug)]
pub struct Channel(Arc<Link>);

/// Receives the messages that peers send over their [`Channel`]s. An agent has one, set with
/// [`crate::Agent::set_message_handler`].
///
/// The agent's control thread calls all methods, one at a time. They must not block and must not
/// wait for a transfer or a peer; they may send messages. A panic in a method ends the session.
pub trait MessageHandler: Send + Sync {
    /// A session with a peer is established; either side may have opened it.
    fn began(&self, channel: &Channel);

    /// A message arrived. Called only between `began` and `ended` of its channel.
    fn received(&self, channel: &Channel, message: Message<'_>);

    /// The session ended, and no message of it follows: the peer is gone, silent or shut down, or
    /// this agent disconnected. Not called for sessions that end because this agent is shut down.
    fn ended(&self, channel: &Channel, error: &Error);
}

/// A message that arrived; its bytes are what it dereferences to. It is acknowledged when
/// [`MessageHandler::received`] returns, unless it is taken later.
#[derive(Debug)]
pub struct Message<'a> {
    body: Vec<u8>,
    id: u64,
    link: &'a Arc<Link>,
    /// Its receipt acknowledges it.
    is_later: &'a mut bool,
}

impl<'a> Message<'a> {
    pub(crate) const fn new(
        link: &'a Arc<Link>,
        id: u64,
        body: Vec<u8>,
        is_later: &'a mut bool,
    ) -> Self {
        Self { body, id, link, is_later }
    }

    /// Takes the message later: the peer is told when the [`Receipt`] is dropped.
    pub fn take_later(self) -> (Vec<u8>, Receipt) {
        let len = self.body.len();
        self.link.messages.arrived(len);
        *self.is_later = true;
        (self.body, Receipt { link: Arc::clone(self.link), id: self.id, len })
    }
}

impl Deref for Message<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.body
    }
}

/// A message that was not taken yet. Dropping the receipt, on any thread, tells the peer that it was.
///
/// The peer sends no more than [`Channel::WINDOW_MESSAGES`] messages and [`Channel::WINDOW_BYTES`] bytes that
/// were not taken, so that one that sends faster than its messages are taken waits. If it sends more, its
/// session ends as `Busy`.
#[derive(Debug)]
#[must_use = "dropping it tells the peer that the message was taken"]
pub struct Receipt {
    link: Arc<Link>,
    id: u64,
    len: usize,
}

impl Drop for Receipt {
    fn drop(&mut self) {
        self.link.messages.taken(self.len);
        self.link.backend().acknowledge(&self.link, self.id);
    }
}

impl Channel {
    /// The longest length of a message, in bytes.
    pub const MESSAGE_MAX: usize = BODY_MAX;
    /// Messages and bytes that wait to be sent, at most; beyond that [`Channel::send`] is `Busy`. It may be earlier.
    pub const QUEUE_MAX: usize = messages::WAITING_MAX;
    /// See [`Channel::QUEUE_MAX`].
    pub const QUEUE_BYTES_MAX: usize = messages::WAITING_BYTES_MAX;
    /// Messages that [`Channel::queue_if_room`] leaves room for.
    pub const SPARE_MESSAGES: usize = messages::SPARE_MESSAGES;
    /// Bytes that [`Channel::queue_if_room`] leaves, of the queue and of the memory that peers may hold.
    pub const SPARE_BYTES: usize = messages::SPARE_BYTES;
    /// Messages that a peer sends before the first of them was taken, at most.
    pub const WINDOW_MESSAGES: usize = messages::SENT_MAX;
    /// Their bytes, at most: a last message may begin below the limit of a sender.
    pub const WINDOW_BYTES: usize = messages::SENT_BYTES_MAX + BODY_MAX;

    pub(crate) fn new(link: &Arc<Link>) -> Self {
        Self(Arc::clone(link))
    }

    /// The channel of a link, if its session is a native one.
    pub(crate) fn of(link: &Arc<Link>) -> Result<Self> {
        if link.info().is_some() {
            return Ok(Self::new(link));
        }
        let what = "the peer is not a kvferry agent: its protocol carries no messages";
        Err(Error::new(ErrorKind::Unsupported, what).with("peer", &link.address))
    }

    /// The id that the peer drew when it started.
    pub fn incarnation(&self) -> Incarnation {
        self.0.incarnation().expect("only native sessions have channels")
    }

    /// The name that the peer gave itself.
    pub fn peer_name(&self) -> &str {
        &self.0.info().expect("established").name
    }

    /// The `host:port` that the peer advertises; empty if it accepts no connections.
    pub fn peer_address(&self) -> &str {
        &self.0.info().expect("established").advertised
    }

    /// The address that the peer's end of the session has. Unlike what the peer says of itself, it can't be made up.
    pub fn peer_ip(&self) -> IpAddr {
        self.0.peer_addr.ip()
    }

    /// Why the session ended; `None` while it is live.
    pub fn end(&self) -> Option<&Error> {
        self.0.end()
    }

    /// Sends a message. Does not block: what the socket does not take now follows later.
    ///
    /// # Errors
    /// `TooLarge` for more than [`Channel::MESSAGE_MAX`] bytes; `Busy` if [`Channel::QUEUE_BYTES_MAX`] or
    /// [`Channel::QUEUE_MAX`] are queued because the peer does not take them, or if more than 64 KiB are and peers hold as much
    /// memory as they may ([`Config::peer_memory`](crate::Config::peer_memory)); [`Channel::end`] if the session has ended.
    pub fn send(&self, message: Vec<u8>) -> Result<()> {
        self.queue(message)?;
        self.flush();
        Ok(())
    }

    /// Queues a message, which leaves with [`Channel::flush`] at the latest: several messages then
    /// leave in one system call. Does not block.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn queue(&self, message: Vec<u8>) -> Result<()> {
        self.queue_needed(Importance::Must, message)
    }

    /// As [`Channel::queue`], for a message that may be refused. It leaves room to those without which the session can't go
    /// on: [`Channel::SPARE_MESSAGES`] and [`Channel::SPARE_BYTES`], which no other session gets.
    ///
    /// # Errors
    /// As [`Channel::send`].
    pub fn queue_if_room(&self, message: Vec<u8>) -> Result<()> {
        self.queue_needed(Importance::May, message)
    }

    fn queue_needed(&self, need: Importance, message: Vec<u8>) -> Result<()> {
        if message.len() > Self::MESSAGE_MAX {
            return Err(Error::new(ErrorKind::TooLarge, "the message is too long")
                .with("len", message.len())
                .with("max", Self::MESSAGE_MAX));
        }
        if let Some(end) = self.0.end() {
            return Err(end.clone());
        }
        if let Err(full) = self.0.messages.push(message, need) {
            let what = match full {
                Full::Queue => "the queue of messages is full: the peer does not take them",
                Full::Memory => {
                    self.0.core.counters.peer_memory_refused.one();
                    "peers hold as much memory as they may, and this one takes its messages slowly"
                }
            };
            return Err(Error::new(ErrorKind::Busy, what).with("peer", &self.0.address));
        }
        send_queued(&self.0);
        Ok(())
    }

    /// How many messages wait to be sent, and their bytes.
    pub fn queued(&self) -> (usize, usize) {
        self.0.messages.waiting()
    }

    /// Sends what was queued. Does not block.
    pub fn flush(&self) {
        self.0.flush();
    }

    /// Ends the session and fails its transfers, with `error`.
    pub fn close(&self, error: Error) {
        self.0.close(WireCode::Closed, error);
    }

    /// Runs the heartbeat to the peer until the [`Watch`] is dropped, as during a transfer. Needed
    /// while this side waits for a message from the peer: without it, silence is not noticed.
    pub fn watch(&self) -> Watch {
        self.0.begin_watch();
        Watch(Arc::clone(&self.0))
    }
}

/// How long a message may wait until it is taken: as long as a request can say. The heartbeat tells
/// whether the peer lives.
const TAKEN_WITHIN: Duration = Duration::from_millis(u32::MAX as u64);

/// Passes queued messages to the session, as far as it has room for requests.
fn send_queued(link: &Arc<Link>) {
    let mut was_busy = false;
    while let Some(message) = link.messages.next(was_busy) {
        was_busy = true;
        let (len, of) = (message.len(), Arc::clone(link));
        let answered = move |code: WireCode, _| {
            of.messages.answered(len);
            if of.session_end().is_some() {
                // The session has ended; its own error is reported instead.
            } else if code.is_ok() {
                send_queued(&of);
                of.flush();
            } else {
                let what = format!("the peer refused a message: {code}");
                let error = Error::new(ErrorKind::from_wire(code), what);
                of.close(WireCode::Closed, error.with("peer", &of.address));
            }
        };
        link.queue_request(MESSAGE, message, TAKEN_WITHIN, Box::new(answered));
    }
}

impl PartialEq for Channel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Channel {}

impl Hash for Channel {
    fn hash<H: Hasher>(&self, state: &mut H) {
        Arc::as_ptr(&self.0).hash(state);
    }
}

/// The heartbeat to a peer runs while this value lives. See [`Channel::watch`].
#[derive(Debug)]
pub struct Watch(Arc<Link>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.end_watch();
    }
}
