//! The two bounded queues of a session: what goes to the peer, what goes to the driver.

use super::SessionEvent;
use crate::message::{Message, Ping, Pong, encode};
use std::collections::VecDeque;

/// Frames that wait for the socket. What an honest session can have outstanding in all directions
/// together is half of it.
pub const OUTBOX_MAX: usize = 8192;
/// Bytes that wait for the socket.
pub const OUTBOX_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Events that wait for the driver.
pub const EVENTS_MAX: usize = 8192;
/// Bytes in events that wait for the driver.
pub const EVENT_BYTES_MAX: usize = 8 * 1024 * 1024;

/// The queue is full; nothing was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Frames on their way to the socket.
///
/// Ping and pong are not queued but due: however many are asked for, one of each is pending, and
/// they go before the queue so that a large body in front of them does not look like silence.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Frames of the handshake, which nothing may overtake.
    pinned: usize,
    ping: Option<Ping>,
    pong: Option<Pong>,
    /// Bytes of frames that were popped, but for heartbeats.
    said_bytes: u64,
}

impl Outbox {
    /// Queues a frame of the handshake, in front of which no heartbeat goes.
    pub(super) fn push_pinned(&mut self, frame: Vec<u8>) {
        self.push_unbounded(frame);
        self.pinned = self.frames.len();
    }

    pub(super) fn push(&mut self, frame: Vec<u8>) -> Result<(), Full> {
        if self.frames.len() >= OUTBOX_MAX || self.bytes + frame.len() > OUTBOX_BYTES_MAX {
            return Err(Full);
        }
        self.push_unbounded(frame);
        Ok(())
    }

    /// For the handful of frames that end a session.
    pub(super) fn push_unbounded(&mut self, frame: Vec<u8>) {
        self.bytes += frame.len();
        self.frames.push_back(frame);
    }

    pub(super) fn set_ping(&mut self, ping: Ping) {
        self.ping = Some(ping);
    }

    pub(super) fn set_pong(&mut self, pong: Pong) {
        self.pong = Some(pong);
    }

    /// Forgets pending heartbeats: nothing may follow a `Close`.
    pub(super) fn clear_heartbeat(&mut self) {
        self.ping = None;
        self.pong = None;
    }

    /// Forgets everything. Frames are handed out whole, so what follows is still in step.
    pub(super) fn clear(&mut self) {
        *self = Self { said_bytes: self.said_bytes, ..Self::default() };
    }

    pub(super) const fn said_bytes(&self) -> u64 {
        self.said_bytes
    }

    pub(super) fn pop(&mut self) -> Option<Vec<u8>> {
        if self.pinned == 0 {
            if let Some(pong) = self.pong.take() {
                return Some(encode(&Message::Pong(pong)));
            }
            if let Some(ping) = self.ping.take() {
                return Some(encode(&Message::Ping(ping)));
            }
        }
        let frame = self.frames.pop_front()?;
        self.bytes -= frame.len();
        self.said_bytes += frame.len() as u64;
        self.pinned = self.pinned.saturating_sub(1);
        Some(frame)
    }

    /// Whether `len` more bytes would leave room for what must be answered.
    pub(super) fn has_room_for(&self, len: usize) -> bool {
        self.frames.len() < OUTBOX_MAX / 2 && self.bytes + len <= OUTBOX_BYTES_MAX / 2
    }

    pub(super) fn is_long(&self) -> bool {
        self.frames.len() > OUTBOX_MAX / 2
    }
}

/// Events on their way to the driver.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    events: VecDeque<SessionEvent>,
    bytes: usize,
}

impl Inbox {
    pub(super) fn push(&mut self, event: SessionEvent) -> Result<(), Full> {
        if self.events.len() >= EVENTS_MAX || self.bytes + weight(&event) > EVENT_BYTES_MAX {
            return Err(Full);
        }
        self.push_unbounded(event);
        Ok(())
    }

    /// For events whose number is bounded elsewhere: by the requests outstanding, by the one end.
    pub(super) fn push_unbounded(&mut self, event: SessionEvent) {
        self.bytes += weight(&event);
        self.events.push_back(event);
    }

    pub(super) fn pop(&mut self) -> Option<SessionEvent> {
        let event = self.events.pop_front()?;
        self.bytes -= weight(&event);
        Some(event)
    }

    pub(super) fn is_full(&self) -> bool {
        self.events.len() >= EVENTS_MAX
    }

    pub(super) fn is_long(&self) -> bool {
        self.events.len() > EVENTS_MAX / 2 || self.bytes > EVENT_BYTES_MAX / 2
    }
}

/// Bytes of an event beyond its own size.
fn weight(event: &SessionEvent) -> usize {
    match event {
        SessionEvent::Request { body, .. } | SessionEvent::Response { body, .. } => body.len(),
        SessionEvent::RevokeRequested { streams, .. } => size_of_val(streams.as_slice()),
        SessionEvent::Established(_) | SessionEvent::Revoked { .. } | SessionEvent::Closed(_) => 0,
    }
}
