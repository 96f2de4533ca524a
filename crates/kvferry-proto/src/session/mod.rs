//! The state machine of one control connection.
//!
//! ```text
//! Handshake ------> Established ------> Closing ------> Closed
//!     \________________ \_________________________________^
//! ```
//!
//! # How a driver runs it
//!
//! The driver owns the socket and the clock. The methods fall into four classes.
//!
//! * **What happened** goes in: bytes from the socket ([`Session::receive`]), its end
//!   ([`Session::transport_closed`]), and what the layers above want ([`Session::request`],
//!   [`Session::respond`], [`Session::revoke`], [`Session::confirm_revoked`],
//!   [`Session::set_active`], [`Session::close`]).
//! * **What to do** comes out: bytes for the socket ([`Session::poll_transmit`]) and events for the
//!   layers above ([`Session::poll_event`]).
//! * **Time**: [`Session::handle_timeout`] is due at [`Session::next_timeout`].
//! * **Queries** change nothing, such as [`Session::is_established`], [`Session::close_reason`] and
//!   [`Session::wants_read`].
//!
//! After each call of a method of the first or third class the driver polls both methods of the
//! second until they are empty, then arms its timer for `next_timeout`. Events end with exactly one
//! [`SessionEvent::Closed`]. Bytes that `poll_transmit` returns after that should be written if the
//! socket takes them without waiting; then the socket is closed.
//!
//! # Deadlines
//!
//! The handshake has a deadline, a request has its budget, and a close waits for its answer for at
//! most a second. A revoke has no deadline: memory whose copier has not stopped cannot be given to
//! another owner after *any* time. A revoke ends with the peer's answer or with the session, and
//! the heartbeat runs until then.
//!
//! A frame that has begun to arrive must arrive completely, within the silence window and the time that
//! a link of [`FRAME_RATE_MIN`] takes for it: it takes memory, and nothing that follows it is heard.
//!
//! # Silence and sleep
//!
//! While something is in flight, a silence window without a byte from the peer ends the session as
//! `Silent`. Where frames have keyed tags, bytes count once their frame is verified. Until then those of a frame that can still be
//! arriving count, for one silence window: a relay that makes up the length of a frame speaks for a peer that is gone for that
//! long, once. A timer that fires late by more than half a window means that this machine was
//! suspended. The session then ends as `Slept`, before anything that arrived meanwhile is
//! processed, because the peer has ended the session by then.

mod config;
mod event;
mod handshake;
mod heartbeat;
mod idle;
#[cfg(feature = "fuzzing")]
pub(crate) mod models;
mod queues;
mod requests;
mod streams;

use crate::auth::SessionKey;
use crate::code::WireCode;
use crate::id::{Incarnation, SessionId};
use crate::message::{
    Close, DETAIL_MAX, Decoder, Message, PREAUTH_MAX, Ping, Pong, Refused, encode,
};
use crate::side::Side;
use crate::text::{sanitized, truncated};
use crate::time::Timestamp;
pub use config::{ChecksumPolicy, KEYED_VERSION, SessionConfig, VERSIONS};
pub use event::{CloseReason, PeerInfo, SessionEvent};
use handshake::Awaiting;
use heartbeat::Heartbeat;
pub use idle::IDLE_FRAMES_PER_SECOND;
use idle::IdleFrames;
pub use queues::{EVENT_BYTES_MAX, EVENTS_MAX, OUTBOX_BYTES_MAX, OUTBOX_MAX, WAITING_MAX};
use queues::{Full, Inbox, Outbox};
pub use requests::{ANSWER_DELAY, REQUESTS_MAX, REVOKES_MAX};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use streams::StreamWindow;

/// Longest time that a close waits for the peer's answer.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Rate of the slowest link on which a frame is waited for, in bytes a second. While this side waits for the peer, a
/// frame must be complete within two silence windows, too: for the first of them, the bytes of an incomplete frame
/// count as a sign of life.
pub const FRAME_RATE_MIN: usize = 64 * 1024;

/// The shortest heartbeat interval; a configured zero would spin.
const INTERVAL_MIN: Duration = Duration::from_millis(1);

/// The shortest silence window: three of the shortest intervals.
const SILENCE_MIN: Duration = Duration::from_millis(3);

/// One end of a control connection. See [the module](self) for how it is driven.
#[derive(Debug)]
pub struct Session {
    cfg: SessionConfig,
    side: Side,
    state: State,
    nonce: [u8; 32],
    handshake_deadline: Timestamp,
    /// The latest time that was passed in. Earlier ones are ignored.
    now: Timestamp,
    decoder: Decoder,
    /// Time when the incomplete frame began to arrive.
    frame_since: Option<Timestamp>,
    outbox: Outbox,
    inbox: Inbox,
    heartbeat: Heartbeat,
    active: bool,
    /// The last ping said that something is in progress on this side.
    is_active_told: bool,
    /// Time when the peer last said that something is in progress on its side.
    peer_active_at: Option<Timestamp>,
    peer: Option<PeerInfo>,
    /// Set when the session has ended.
    ended: Option<CloseReason>,
    key: Option<SessionKey>,
    last_id: u64,
    /// Unanswered requests of this side, with their deadlines.
    requests: BTreeMap<u64, Timestamp>,
    /// Unconfirmed revokes of this side.
    revokes: BTreeSet<u64>,
    /// Unanswered requests of the peer, with their deadlines at the peer.
    owed_responses: BTreeMap<u64, Timestamp>,
    /// Time when the answers that wait in the outbox leave.
    waits_until: Option<Timestamp>,
    /// Unconfirmed revokes of the peer.
    owed_revokes: BTreeSet<u64>,
    last_stream: u32,
    streams: StreamWindow,
    idle: IdleFrames,
    /// Requests of this side that ended without the peer's answer, which may still come.
    late_answers: u64,
}

#[derive(Debug)]
enum State {
    Handshake(Awaiting),
    Established,
    Closing { code: WireCode, detail: String, until: Timestamp },
    Closed,
}

impl Session {
    /// The end that opened the connection. Queues the magic and the first message.
    ///
    /// With `expected`, an acceptor of another incarnation is refused. `nonce` must be fresh random
    /// bytes.
    pub fn initiator(
        cfg: SessionConfig,
        expected: Option<Incarnation>,
        nonce: [u8; 32],
        now: Timestamp,
    ) -> Self {
        let placeholder = Awaiting::Challenge { hello: Vec::new(), expected };
        let mut session = Self::new(cfg, Side::Initiator, placeholder, nonce, now);
        let hello = session.say_hello(nonce);
        session.state = State::Handshake(Awaiting::Challenge { hello, expected });
        session
    }

    /// The end that accepted the connection. The driver has consumed the magic.
    ///
    /// `session` must be unique within this incarnation, `nonce` must be fresh random bytes.
    pub fn acceptor(
        cfg: SessionConfig,
        session: SessionId,
        nonce: [u8; 32],
        now: Timestamp,
    ) -> Self {
        Self::new(cfg, Side::Acceptor, Awaiting::Hello { session }, nonce, now)
    }

    /// Takes bytes from the socket, in order. Where they are split makes no difference.
    pub fn receive(&mut self, mut bytes: &[u8], now: Timestamp) {
        if !self.wake(now) {
            return;
        }
        if !bytes.is_empty() && !self.decoder.is_keyed() {
            self.heartbeat.received(self.now);
        }
        while !bytes.is_empty() && !self.is_closed() {
            match self.decoder.read_frame(&mut bytes) {
                Ok(Some((message, frame))) => {
                    self.frame_since = None;
                    self.heartbeat.received(self.now);
                    self.on_message(message, &frame);
                }
                Ok(None) => self.frame_goes_on(),
                Err(error) => self.abort(error.code(), &error.to_string()),
            }
        }
        self.rewatch();
    }

    /// The connection was closed or reset.
    pub fn transport_closed(&mut self, now: Timestamp) {
        if !self.wake(now) {
            return;
        }
        self.outbox.clear();
        match std::mem::replace(&mut self.state, State::Closed) {
            State::Closing { code, detail, .. } => self.finish(code, false, &detail),
            _ => self.finish(WireCode::Closed, true, "the connection was lost"),
        }
    }

    /// Gives back what the session holds for a connection that is gone for good: what was not written, and the part of a
    /// frame that has arrived. Handles to an ended session may live on for long.
    pub fn hang_up(&mut self) {
        self.outbox.clear();
        self.decoder.clear();
    }

    /// Handles the timers that are due. A call before [`Session::next_timeout`] has no effect. While events wait,
    /// the peer is not taken for silent: a driver reads what the peer sends once it has handled them.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        if !self.wake(now) {
            return;
        }
        let now = self.now;
        if !self.inbox.is_empty() {
            self.heartbeat.fall_behind();
        }
        if self.heartbeat.is_silent(now) {
            self.outbox.clear();
            self.abort(WireCode::Silent, "nothing arrived from the peer");
            return;
        }
        if self.frame_until().is_some_and(|at| at <= now) {
            if self.wants_read() {
                self.outbox.clear();
                self.abort(WireCode::Silent, "a frame of the peer did not arrive completely");
                return;
            }
            // This side has not read meanwhile.
            self.frame_since = Some(now);
        }
        let expired: Vec<u64> =
            self.requests.iter().filter(|(_, at)| **at <= now).map(|(id, _)| *id).collect();
        for id in expired {
            self.requests.remove(&id);
            self.late_answers += 1;
            self.answer_ourselves(id, WireCode::Deadline);
        }
        if self.waits_until.is_some_and(|at| at <= now) {
            self.outbox.release();
        }
        if let Some(seq) = self.heartbeat.next_ping(now) {
            self.ping(seq);
        }
        self.rewatch();
    }

    /// Time when [`Session::handle_timeout`] is due; `None` for an idle session.
    pub fn next_timeout(&self) -> Option<Timestamp> {
        let waiting = self.waits_until.filter(|_| self.outbox.has_waiting() && !self.is_closed());
        self.next_deadline().into_iter().chain(waiting).min()
    }

    /// The next timer that fires late only if this machine was suspended.
    fn next_deadline(&self) -> Option<Timestamp> {
        let own = match &self.state {
            State::Handshake(_) => Some(self.handshake_deadline),
            State::Established => {
                [self.heartbeat.next_timeout(), self.frame_until()].into_iter().flatten().min()
            }
            State::Closing { until, .. } => Some(*until),
            State::Closed => return None,
        };
        // At most REQUESTS_MAX entries, on a connection that is not in the data path.
        own.into_iter().chain(self.requests.values().copied()).min()
    }

    /// The next frame for the socket. Frames are written in the order in which they are returned.
    pub fn poll_transmit(&mut self) -> Option<Vec<u8>> {
        self.outbox.pop()
    }

    /// Bytes of all frames that [`Session::poll_transmit`] has returned, without heartbeats.
    pub const fn said_bytes(&self) -> u64 {
        self.outbox.said_bytes()
    }

    /// Whether [`Session::poll_transmit`] has a frame.
    pub fn has_frames(&self) -> bool {
        !self.outbox.is_empty()
    }

    /// Whether [`Session::poll_event`] has an event.
    pub fn has_events(&self) -> bool {
        !self.inbox.is_empty()
    }

    /// The next event.
    pub fn poll_event(&mut self) -> Option<SessionEvent> {
        let event = self.inbox.pop();
        if self.inbox.is_empty() {
            self.heartbeat.catch_up(self.now);
        }
        event
    }

    /// Whether the driver should read the socket. `false` while many events or frames are queued:
    /// a driver that leaves bytes in the socket then slows the peer down; one that keeps passing
    /// them in makes the session end as `Busy`.
    pub fn wants_read(&self) -> bool {
        !self.inbox.is_long() && !self.outbox.is_long()
    }

    /// Sets whether anything is in flight or granted. The heartbeat runs only then. If a ping has announced it to the
    /// peer, a last ping withdraws that.
    pub fn set_active(&mut self, active: bool, now: Timestamp) {
        if self.wake(now) {
            self.active = active;
            if !active && self.is_active_told && self.is_established() {
                let seq = self.heartbeat.last_ping();
                self.ping(seq);
            }
            self.rewatch();
        }
    }

    fn ping(&mut self, seq: u64) {
        self.is_active_told = self.active;
        self.outbox.set_ping(Ping { seq, active: self.active });
    }

    /// Ends the session: sends a close, waits at most a second for the peer's, then `Closed` with
    /// this code. No effect on a session that is ending.
    pub fn close(&mut self, code: WireCode, detail: &str, now: Timestamp) {
        if !self.wake(now) || matches!(self.state, State::Closing { .. }) {
            return;
        }
        self.send_close(code, detail);
        let until = self.now + CLOSE_TIMEOUT.min(self.cfg.silence);
        self.state = State::Closing { code, detail: detail.to_owned(), until };
        self.rewatch();
    }

    /// Bytes of memory that the peer makes this value hold: what has arrived and was not handled, and answers
    /// that the peer has not read. Without [`Session::asked_bytes`].
    pub const fn held_bytes(&self) -> usize {
        self.decoder.buffered() + self.inbox.bytes() + self.outbox.bytes() - self.asked_bytes()
    }

    /// Bytes of requests of this side that wait for the socket.
    pub const fn asked_bytes(&self) -> usize {
        self.outbox.asked_bytes()
    }

    /// Time when the peer last sent something.
    pub const fn last_receive(&self) -> Timestamp {
        self.heartbeat.last_receive()
    }

    /// Time when the peer last sent something, if nothing is in progress at `now`: no request or revoke of either side
    /// is open, no frame or event waits, and no heartbeat of the last silence window said that the peer waits for
    /// something.
    pub fn idle_since(&self, now: Timestamp) -> Option<Timestamp> {
        let is_open = self.active
            || !self.requests.is_empty()
            || !self.revokes.is_empty()
            || !self.owed_responses.is_empty()
            || !self.owed_revokes.is_empty()
            || !self.inbox.is_empty()
            || !self.outbox.is_empty();
        let peer_waits = self.peer_active_at.is_some_and(|at| now < at + self.cfg.silence);
        let is_idle = self.is_established() && !is_open && !peer_waits;
        is_idle.then(|| self.heartbeat.last_receive())
    }

    /// The end of the connection that this session is.
    pub const fn side(&self) -> Side {
        self.side
    }

    /// Whether requests, revokes and streams are possible now.
    pub const fn is_established(&self) -> bool {
        matches!(self.state, State::Established)
    }

    /// Whether the session has ended. Its last events may not have been polled yet.
    pub const fn is_closed(&self) -> bool {
        matches!(self.state, State::Closed)
    }

    /// Reason for which the session is ending or has ended. Known before its last events are polled.
    pub fn close_reason(&self) -> Option<CloseReason> {
        match &self.state {
            State::Closing { code, detail, .. } => Some(self.reason(*code, false, detail)),
            State::Closed => self.ended.clone(),
            State::Handshake(_) | State::Established => None,
        }
    }

    /// The peer, once the session was established.
    pub const fn peer(&self) -> Option<&PeerInfo> {
        self.peer.as_ref()
    }

    fn new(
        cfg: SessionConfig,
        side: Side,
        handshake: Awaiting,
        nonce: [u8; 32],
        now: Timestamp,
    ) -> Self {
        let silence = cfg.silence.max(SILENCE_MIN);
        // Two pings must fit into the window even if one of them is late.
        let interval = cfg.ping_interval.clamp(INTERVAL_MIN, silence / 3);
        Self {
            handshake_deadline: now + cfg.handshake_timeout,
            heartbeat: Heartbeat::new(interval, silence, now),
            cfg: SessionConfig { silence, ..cfg },
            side,
            state: State::Handshake(handshake),
            nonce,
            now,
            decoder: Decoder::new(PREAUTH_MAX),
            frame_since: None,
            outbox: Outbox::default(),
            inbox: Inbox::default(),
            active: false,
            is_active_told: false,
            peer_active_at: None,
            peer: None,
            ended: None,
            key: None,
            last_id: 0,
            requests: BTreeMap::new(),
            revokes: BTreeSet::new(),
            owed_responses: BTreeMap::new(),
            waits_until: None,
            owed_revokes: BTreeSet::new(),
            last_stream: 0,
            streams: StreamWindow::new(),
            idle: IdleFrames::new(now),
            late_answers: 0,
        }
    }

    /// Advances the time and ends the session if a deadline has passed. Returns whether the
    /// session goes on.
    fn wake(&mut self, now: Timestamp) -> bool {
        let due = self.next_deadline();
        self.now = self.now.max(now);
        match &self.state {
            State::Closing { until, .. } => {
                if *until <= self.now {
                    self.abort(WireCode::Deadline, "the peer did not answer the close");
                }
            }
            _ if due.is_some_and(|due| self.now > due + self.cfg.silence / 2) => {
                self.outbox.clear();
                self.abort(WireCode::Slept, "this side was suspended");
            }
            State::Handshake(_) if self.handshake_deadline <= self.now => {
                self.abort(WireCode::Deadline, "the handshake took too long");
            }
            State::Handshake(_) | State::Established | State::Closed => {}
        }
        !self.is_closed()
    }

    /// Records that the input ended inside a frame. Until the frame is overdue, its bytes are a sign of life.
    fn frame_goes_on(&mut self) {
        let since = *self.frame_since.get_or_insert(self.now);
        if self.now < since + self.frame_time().min(self.cfg.silence) {
            self.heartbeat.received(self.now);
        }
    }

    /// Time that the current frame may take on the slowest link.
    fn frame_time(&self) -> Duration {
        Duration::from_secs_f64(self.decoder.announced() as f64 / FRAME_RATE_MIN as f64)
    }

    /// Time by which the current frame must be complete.
    fn frame_until(&self) -> Option<Timestamp> {
        let since = self.frame_since.filter(|_| self.is_established())?;
        Some(since + self.frame_time() + self.cfg.silence)
    }

    fn on_message(&mut self, message: Message, frame: &[u8]) {
        if let Message::Close(close) = message {
            return self.on_close(&close);
        }
        match &self.state {
            State::Established => self.on_control(message, frame.len()),
            State::Closing { .. } => self.on_message_closing(message),
            State::Handshake(_) | State::Closed => self.on_handshake(message, frame),
        }
    }

    fn on_handshake(&mut self, message: Message, frame: &[u8]) {
        // Each step consumes what was awaited; `shake` sets the next state or ends the session.
        if let State::Handshake(awaiting) = std::mem::replace(&mut self.state, State::Closed) {
            self.shake(awaiting, message, frame);
        }
    }

    fn on_control(&mut self, message: Message, frame_bytes: usize) {
        let asks_for_nothing = match message {
            Message::Ping(ping) => {
                self.peer_active_at = ping.active.then_some(self.now);
                self.outbox.set_pong(Pong { seq: ping.seq });
                true
            }
            Message::Pong(_) | Message::Unknown { .. } => true,
            Message::Revoke(revoke) => {
                self.on_revoke(revoke);
                false
            }
            Message::Revoked(revoked) => !self.on_revoked(&revoked),
            Message::Request(request) => {
                self.on_request(request);
                false
            }
            Message::Response(response) => !self.on_response(response),
            Message::Hello(_)
            | Message::Challenge(_)
            | Message::Proof(_)
            | Message::Ready(_)
            | Message::Refused(_)
            | Message::StreamHello(_)
            | Message::StreamReady(_)
            | Message::Close(_) => {
                let detail = format!("unexpected {} message", message.kind());
                return self.abort(WireCode::Malformed, &detail);
            }
        };
        if asks_for_nothing && !self.idle.count(frame_bytes, self.now) {
            self.abort(WireCode::Busy, "too many messages that ask for nothing");
        }
    }

    /// Handles a message after this side has sent its close: only answers to earlier requests and revokes still count.
    fn on_message_closing(&mut self, message: Message) {
        match message {
            Message::Response(response) => drop(self.on_response(response)),
            Message::Revoked(revoked) => drop(self.on_revoked(&revoked)),
            _ => {}
        }
    }

    fn on_close(&mut self, close: &Close) {
        match std::mem::replace(&mut self.state, State::Closed) {
            // The peer's answer, or a close of the peer that crossed this side's.
            State::Closing { code, detail, .. } => self.finish(code, false, &detail),
            _ => {
                self.send_close(close.code, "");
                self.finish(close.code, true, &close.detail);
            }
        }
    }

    fn rewatch(&mut self) {
        let waiting = self.active || !self.requests.is_empty() || !self.revokes.is_empty();
        self.heartbeat.watch(waiting && self.is_established(), self.now);
    }

    fn announce(&mut self, peer: PeerInfo) {
        self.peer = Some(peer.clone());
        self.inbox.push_unbounded(SessionEvent::Established(peer));
    }

    fn answer_ourselves(&mut self, id: u64, code: WireCode) {
        self.inbox.push_unbounded(SessionEvent::Response { id, code, body: Vec::new() });
    }

    fn tell(&mut self, event: SessionEvent) {
        if let Err(Full) = self.inbox.push(event) {
            self.abort(WireCode::Busy, "too many events wait to be handled");
        }
    }

    fn send(&mut self, message: &Message) {
        let queued = self.outbox.push(encode(message));
        self.check_sent(queued);
    }

    fn check_sent(&mut self, queued: Result<(), Full>) {
        if let Err(Full) = queued {
            self.outbox.clear();
            self.abort(WireCode::Busy, "the peer does not read");
        }
    }

    fn send_refused(&mut self, code: WireCode, detail: &str, aux: u64) {
        let detail = truncated(detail, DETAIL_MAX).to_owned();
        self.outbox.push_unbounded(encode(&Message::Refused(Refused {
            code,
            detail,
            aux,
            mac: None,
        })));
    }

    fn send_close(&mut self, code: WireCode, detail: &str) {
        self.outbox.clear_optional();
        let detail = truncated(detail, DETAIL_MAX).to_owned();
        self.outbox.push_unbounded(encode(&Message::Close(Close { code, detail })));
    }

    /// Ends the session at once, for a reason on this side. A session that was ending keeps its
    /// first reason.
    fn abort(&mut self, code: WireCode, detail: &str) {
        match (std::mem::replace(&mut self.state, State::Closed), self.side) {
            (State::Closing { code, detail, .. }, _) => return self.finish(code, false, &detail),
            (State::Handshake(_), Side::Acceptor) => self.send_refused(code, detail, 0),
            _ => self.send_close(code, detail),
        }
        self.finish(code, false, detail);
    }

    /// The only way into `Closed`: answers every outstanding request, then queues the end.
    fn finish(&mut self, code: WireCode, by_peer: bool, detail: &str) {
        self.state = State::Closed;
        self.outbox.clear_optional();
        for id in std::mem::take(&mut self.requests).into_keys() {
            self.answer_ourselves(id, WireCode::Closed);
        }
        self.revokes.clear();
        self.owed_responses.clear();
        self.owed_revokes.clear();
        self.key = None;
        let reason = self.reason(code, by_peer, detail);
        self.ended = Some(reason.clone());
        self.inbox.push_unbounded(SessionEvent::Closed(reason));
    }

    fn reason(&self, code: WireCode, by_peer: bool, detail: &str) -> CloseReason {
        let detail = sanitized(detail, DETAIL_MAX);
        CloseReason { code, by_peer, detail, established: self.peer.is_some() }
    }
}
