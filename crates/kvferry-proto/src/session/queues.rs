//! The two bounded queues of a session: frames for the peer and events for the driver.

use super::SessionEvent;
use crate::keyed::Seal;
use crate::message::{Message, Ping, Pong, encode};
use std::collections::VecDeque;

/// The most frames that wait for the socket: twice what an honest session can have outstanding.
pub const OUTBOX_MAX: usize = 8192;
/// The most bytes that wait for the socket.
pub const OUTBOX_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The most events that wait for the driver.
pub const EVENTS_MAX: usize = 8192;
/// The most bytes in events that wait for the driver.
pub const EVENT_BYTES_MAX: usize = 8 * 1024 * 1024;
/// The most frames that wait for company.
pub const WAITING_MAX: usize = 16;

/// The queue is full; nothing was added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Full;

/// Frames on their way to the socket.
///
/// At most one ping and one pong are pending. They leave before the queue, so that a large body in
/// front of them does not look like silence.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    /// Frames in order; the flag is true for a request of this side.
    frames: VecDeque<(Vec<u8>, bool)>,
    bytes: usize,
    /// Bytes of this side's requests among `frames`.
    asked_bytes: usize,
    /// Frames of the handshake at the front, which no heartbeat overtakes.
    pinned: usize,
    ping: Option<Ping>,
    pong: Option<Pong>,
    /// Frames that leave behind the next other frame. Without one they stay until they are released.
    waiting: Vec<Vec<u8>>,
    /// Bytes of popped frames, without heartbeats.
    said_bytes: u64,
    /// Tags what leaves after the handshake, in the order in which it leaves.
    seal: Option<Seal>,
}

impl Outbox {
    /// Gives all frames but those of the handshake keyed tags.
    pub(super) fn seal(&mut self, seal: Seal) {
        self.seal = Some(seal);
    }

    /// Queues a frame of the handshake, which no heartbeat overtakes.
    pub(super) fn push_pinned(&mut self, frame: Vec<u8>) {
        self.push_unbounded(frame);
        self.pinned = self.frames.len();
    }

    pub(super) fn push(&mut self, frame: Vec<u8>) -> Result<(), Full> {
        self.check_room(&frame)?;
        self.push_unbounded(frame);
        Ok(())
    }

    /// Queues a request of this side.
    pub(super) fn push_asked(&mut self, frame: Vec<u8>) -> Result<(), Full> {
        self.check_room(&frame)?;
        self.asked_bytes += frame.len();
        self.bytes += frame.len();
        self.frames.push_back((frame, true));
        Ok(())
    }

    fn check_room(&self, frame: &[u8]) -> Result<(), Full> {
        let frames = self.frames.len() + self.waiting.len();
        if frames >= OUTBOX_MAX || self.bytes + frame.len() > OUTBOX_BYTES_MAX {
            return Err(Full);
        }
        Ok(())
    }

    /// Enqueues a frame that ends a session. There are only a few of these, so there is no check
    /// for room.
    pub(super) fn push_unbounded(&mut self, frame: Vec<u8>) {
        self.bytes += frame.len();
        self.frames.push_back((frame, false));
    }

    pub(super) fn set_ping(&mut self, ping: Ping) {
        self.ping = Some(ping);
    }

    pub(super) fn set_pong(&mut self, pong: Pong) {
        self.pong = Some(pong);
    }

    /// Queues a frame that may wait for others.
    pub(super) fn push_waiting(&mut self, frame: Vec<u8>) -> Result<(), Full> {
        self.check_room(&frame)?;
        self.bytes += frame.len();
        self.waiting.push(frame);
        if self.waiting.len() == WAITING_MAX {
            self.release();
        }
        Ok(())
    }

    pub(super) fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// No frame waits any more.
    pub(super) fn release(&mut self) {
        self.frames.extend(self.waiting.drain(..).map(|frame| (frame, false)));
    }

    /// Drops pending heartbeats and frames that wait: nothing may follow a `Close`.
    pub(super) fn clear_optional(&mut self) {
        self.ping = None;
        self.pong = None;
        self.bytes -= self.waiting.drain(..).map(|frame| frame.len()).sum::<usize>();
    }

    /// Drops everything. Popped frames are whole, so later frames stay in step.
    pub(super) fn clear(&mut self) {
        let seal = self.seal.take();
        *self = Self { said_bytes: self.said_bytes, seal, ..Self::default() };
    }

    /// Bytes of frames that wait.
    pub(super) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Bytes of requests of this side among them.
    pub(super) const fn asked_bytes(&self) -> usize {
        self.asked_bytes
    }

    pub(super) const fn said_bytes(&self) -> u64 {
        self.said_bytes
    }

    pub(super) fn pop(&mut self) -> Option<Vec<u8>> {
        let is_pinned = self.pinned > 0;
        let mut frame = self.pop_next()?;
        self.release();
        if let Some(seal) = self.seal.as_mut().filter(|_| !is_pinned) {
            seal.seal_end(&mut frame);
        }
        Some(frame)
    }

    fn pop_next(&mut self) -> Option<Vec<u8>> {
        if self.pinned == 0 {
            if let Some(pong) = self.pong.take() {
                return Some(encode(&Message::Pong(pong)));
            }
            if let Some(ping) = self.ping.take() {
                return Some(encode(&Message::Ping(ping)));
            }
        }
        let (frame, is_asked) = self.frames.pop_front()?;
        self.bytes -= frame.len();
        self.asked_bytes -= if is_asked { frame.len() } else { 0 };
        self.said_bytes += frame.len() as u64;
        self.pinned = self.pinned.saturating_sub(1);
        Some(frame)
    }

    pub(super) fn is_empty(&self) -> bool {
        let heartbeat = self.pong.is_some() || self.ping.is_some();
        self.frames.is_empty() && !heartbeat
    }

    /// Whether `len` more bytes leave room for answers that must be sent.
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

    /// Enqueues an event whose number is bounded otherwise: an answer to an outstanding request, or
    /// the end.
    pub(super) fn push_unbounded(&mut self, event: SessionEvent) {
        self.bytes += weight(&event);
        self.events.push_back(event);
    }

    pub(super) fn pop(&mut self) -> Option<SessionEvent> {
        let event = self.events.pop_front()?;
        self.bytes -= weight(&event);
        Some(event)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    pub(super) const fn bytes(&self) -> usize {
        self.bytes
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
