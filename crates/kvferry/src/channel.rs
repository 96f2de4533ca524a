//! Messages between agents, for the layers above transfers.

use crate::error::{Error, ErrorKind, Result};
use crate::peer::Peer;
use crate::session::link::Link;
use crate::session::service;
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError};
use kvferry_proto::message::BODY_MAX;
use kvferry_proto::{Incarnation, WireCode};
use std::collections::VecDeque;
use std::time::Duration;

/// A session with one life of a peer, as those who exchange messages see it. Clones are the same.
///
/// Messages go over the control connection, in both directions, never behind payload. They arrive
/// in the order they were sent, each once, or the session ends: there is no message that is lost
/// while [`Correspondent::ended`] was not called.
#[derive(Clone, Debug)]
pub struct Channel(Arc<Link>);

/// Who receives what peers send over their [`Channel`]s: one per agent, [`crate::Agent::correspond`].
///
/// All are called on the agent's control thread, one after the other. They must not block, and not
/// wait for a transfer or a peer; sending is fine.
pub trait Correspondent: Send + Sync {
    /// A session with a peer is up, whoever began it.
    fn began(&self, channel: &Channel);

    /// A message arrived. Between `began` and `ended` of its channel.
    fn received(&self, channel: &Channel, message: &[u8]);

    /// The session is over, and nothing more comes of it: the peer is gone or silent, was shut
    /// down, or was disconnected from. Not called for sessions that are up when the agent is shut
    /// down.
    fn ended(&self, channel: &Channel, error: &Error);
}

impl Channel {
    /// The longest message, in bytes.
    pub const MESSAGE_MAX: usize = BODY_MAX;

    pub(crate) fn new(link: &Arc<Link>) -> Self {
        Self(Arc::clone(link))
    }

    /// This life of the peer.
    pub fn incarnation(&self) -> Incarnation {
        self.0.incarnation().expect("only native sessions have channels")
    }

    /// The peer's name.
    pub fn peer_name(&self) -> &str {
        &self.0.info().expect("established").name
    }

    /// Where the peer can be called, as it says itself; empty if nowhere.
    pub fn peer_address(&self) -> &str {
        &self.0.info().expect("established").advertised
    }

    /// Why the session is over, if it is.
    pub fn end(&self) -> Option<&Error> {
        self.0.end()
    }

    /// Sends a message. Returns when it is queued; does not block.
    ///
    /// # Errors
    /// `TooLarge` for more than [`Channel::MESSAGE_MAX`] bytes; `Busy` if 16 MiB or 65 536 messages
    /// are queued already, because the peer takes none; the session's end, if it is over.
    pub fn send(&self, message: Vec<u8>) -> Result<()> {
        if message.len() > Self::MESSAGE_MAX {
            return Err(Error::new(ErrorKind::TooLarge, "the message is too long")
                .with("len", message.len())
                .with("max", Self::MESSAGE_MAX));
        }
        if let Some(end) = self.0.end() {
            return Err(end.clone());
        }
        if !self.0.mail.push(message) {
            return Err(Error::new(ErrorKind::Busy, "the peer does not take messages")
                .with("peer", &self.0.address));
        }
        hand_over(&self.0);
        Ok(())
    }

    /// Ends the session, for that reason; transfers under way fail.
    pub fn close(&self, error: Error) {
        self.0.close(error);
    }

    /// Has the peer watched by heartbeat for as long as the answer is kept, as if a transfer were
    /// under way: something is expected of it, or promised to it.
    pub fn watch(&self) -> Watch {
        self.0.begin();
        Watch(Arc::clone(&self.0))
    }
}

/// Messages that wait for their turn on the control connection.
#[derive(Debug, Default)]
pub(crate) struct Mail(Mutex<Queue>);

#[derive(Debug, Default)]
struct Queue {
    waiting: VecDeque<Vec<u8>>,
    waiting_bytes: usize,
    /// Handed over and not answered yet.
    sent: usize,
    sent_bytes: usize,
    /// Somebody hands one over now; whoever comes meanwhile leaves it to him, for the order's sake.
    busy: bool,
}

/// Messages and bytes that wait at most.
const WAITING_MAX: usize = 65_536;
const WAITING_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Messages and bytes under way at most: well below what a session can have outstanding.
const SENT_MAX: usize = 256;
const SENT_BYTES_MAX: usize = 1024 * 1024;

impl Mail {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// False if there is no room.
    fn push(&self, message: Vec<u8>) -> bool {
        let mut queue = self.lock();
        if queue.waiting.len() >= WAITING_MAX
            || queue.waiting_bytes + message.len() > WAITING_BYTES_MAX
        {
            return false;
        }
        queue.waiting_bytes += message.len();
        queue.waiting.push_back(message);
        true
    }

    /// The next to be handed over, if there is one, there is room, and nobody else is at it.
    fn next(&self, was_busy: bool) -> Option<Vec<u8>> {
        let mut queue = self.lock();
        if queue.busy && !was_busy {
            return None;
        }
        let is_room = queue.sent < SENT_MAX && queue.sent_bytes < SENT_BYTES_MAX;
        let message = if is_room { queue.waiting.pop_front() } else { None };
        queue.busy = message.is_some();
        let len = message.as_ref().map_or(0, Vec::len);
        queue.waiting_bytes -= len;
        queue.sent_bytes += len;
        queue.sent += usize::from(message.is_some());
        message
    }

    fn answered(&self, len: usize) {
        let mut queue = self.lock();
        queue.sent -= 1;
        queue.sent_bytes -= len;
    }
}

/// Hands over what waits, as far as there is room.
fn hand_over(link: &Arc<Link>) {
    let mut was_busy = false;
    while let Some(message) = link.mail.next(was_busy) {
        was_busy = true;
        let (len, budget, of) = (message.len(), link.core.config.timeout(), Arc::clone(link));
        let answered = move |code: WireCode, _| {
            of.mail.answered(len);
            if of.session_end().is_some() {
                // Nothing is sent any more; the reason is told, or is about to be.
            } else if code.is_ok() {
                hand_over(&of);
            } else {
                let what = format!("the peer did not take a message: {code}");
                let error = Error::new(ErrorKind::from_wire(code), what);
                of.close(error.with("peer", &of.address));
            }
        };
        link.request(service::MESSAGE, message, budget, Box::new(answered));
    }
}

impl PartialEq for Channel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Channel {}

/// Keeps a peer watched. See [`Channel::watch`].
#[derive(Debug)]
pub struct Watch(Arc<Link>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.finish();
    }
}

impl Peer {
    /// The channel to this peer, which is met if no session with it is live.
    ///
    /// # Errors
    /// As [`Peer::connect`]; `Unsupported` for a stock Mooncake peer.
    pub fn channel(&self, timeout: Duration) -> Result<Channel> {
        channel_of(&self.link(timeout)?)
    }

    /// Like [`Peer::channel`], but returns at once; `met` is called when the peer was met, or could
    /// not be: on any thread, also on the caller's before this returns. It must not block.
    pub fn open_channel(&self, met: Box<dyn FnOnce(Result<Channel>) + Send>) {
        if let Err(error) = self.core.check() {
            return met(Err(error));
        }
        let met = move |link: Result<Arc<Link>>| met(link.and_then(|link| channel_of(&link)));
        self.state.link(Box::new(met));
    }
}

fn channel_of(link: &Arc<Link>) -> Result<Channel> {
    if link.native.is_some() {
        return Ok(Channel::new(link));
    }
    let what = "stock Mooncake peers exchange no messages";
    Err(Error::new(ErrorKind::Unsupported, what).with("peer", &link.address))
}
