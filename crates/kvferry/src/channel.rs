//! [`Channel`]: short messages between agents, for the layers above transfers.

use crate::callback::contain;
use crate::error::{Error, ErrorKind, Result};
use crate::peer::Peer;
use crate::sync::Arc;
use crate::transfer::link::Link;
use crate::transfer::requests::MESSAGE;
use kvferry_proto::message::BODY_MAX;
use kvferry_proto::{Incarnation, WireCode};
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
    fn received(&self, channel: &Channel, message: &[u8]);

    /// The session ended, and no message of it follows: the peer is gone, silent or shut down, or
    /// this agent disconnected. Not called for sessions that end because this agent is shut down.
    fn ended(&self, channel: &Channel, error: &Error);
}

impl Channel {
    /// The longest length of a message, in bytes.
    pub const MESSAGE_MAX: usize = BODY_MAX;

    pub(crate) fn new(link: &Arc<Link>) -> Self {
        Self(Arc::clone(link))
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

    /// Why the session ended; `None` while it is live.
    pub fn end(&self) -> Option<&Error> {
        self.0.end()
    }

    /// Sends a message. Does not block: what the socket does not take now follows later.
    ///
    /// # Errors
    /// `TooLarge` for more than [`Channel::MESSAGE_MAX`] bytes; `Busy` if 16 MiB or 65 536 messages
    /// are queued because the peer does not take them; [`Channel::end`] if the session has ended.
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
        if message.len() > Self::MESSAGE_MAX {
            return Err(Error::new(ErrorKind::TooLarge, "the message is too long")
                .with("len", message.len())
                .with("max", Self::MESSAGE_MAX));
        }
        if let Some(end) = self.0.end() {
            return Err(end.clone());
        }
        if !self.0.messages.push(message) {
            return Err(Error::new(
                ErrorKind::Busy,
                "the queue of messages is full: the peer does not take them",
            )
            .with("peer", &self.0.address));
        }
        send_queued(&self.0);
        Ok(())
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
        self.0.begin();
        Watch(Arc::clone(&self.0))
    }
}

/// Passes queued messages to the session, as far as it has room for requests.
fn send_queued(link: &Arc<Link>) {
    let mut was_busy = false;
    while let Some(message) = link.messages.next(was_busy) {
        was_busy = true;
        let (len, budget, of) = (message.len(), link.core.settings.timeout, Arc::clone(link));
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
        link.queue_request(MESSAGE, message, budget, Box::new(answered));
    }
}

impl PartialEq for Channel {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Channel {}

/// The heartbeat to a peer runs while this value lives. See [`Channel::watch`].
#[derive(Debug)]
pub struct Watch(Arc<Link>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.finish();
    }
}

impl Peer {
    /// The channel to this peer. Connects if there is no live session; blocks for `timeout` at most.
    ///
    /// # Errors
    /// As [`Peer::connect`]; `Unsupported` for a stock Mooncake peer.
    pub fn channel(&self, timeout: impl Into<Option<Duration>>) -> Result<Channel> {
        channel_of(&self.link(timeout)?)
    }

    /// Like [`Peer::channel`], but returns at once. Calls `opened` once, with the channel or the
    /// error, on any thread; on the calling thread, before this returns, if the outcome is known.
    /// `opened` must not block.
    pub fn open_channel(&self, opened: Box<dyn FnOnce(Result<Channel>) + Send>) {
        if let Err(error) = self.core.check() {
            return opened(Err(error));
        }
        let linked = move |link: Result<Arc<Link>>| {
            let channel = link.and_then(|link| channel_of(&link));
            contain("the callback of `Peer::open_channel`", || opened(channel));
        };
        self.state.link(Box::new(linked));
    }
}

fn channel_of(link: &Arc<Link>) -> Result<Channel> {
    if link.info().is_some() {
        return Ok(Channel::new(link));
    }
    let what = "a stock Mooncake peer has no channel: its protocol carries no messages";
    Err(Error::new(ErrorKind::Unsupported, what).with("peer", &link.address))
}
