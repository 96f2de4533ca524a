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

mod handshake;
mod heartbeat;
mod idle;
#[cfg(feature = "fuzzing")]
pub(crate) mod models;
mod queues;
mod streams;

use crate::auth::{
    MAC_LEN, ProofLabel, Secret, SessionKey, macs_equal, stream_answer_mac, stream_mac,
    stream_seals,
};
use crate::code::WireCode;
use crate::frame::MAGIC;
use crate::id::{Incarnation, SessionId, StreamId};
use crate::keyed::Guard;
use crate::message::{
    BODY_MAX, Close, DETAIL_MAX, Decoder, Message, PREAUTH_MAX, Ping, Pong, REVOKE_STREAMS_MAX,
    Refused, Request, Response, Revoke, Revoked, StreamHello, encode,
};
use crate::text::{sanitized, truncated};
use crate::time::Timestamp;
use handshake::Awaiting;
use heartbeat::Heartbeat;
pub use idle::IDLE_FRAMES_PER_SECOND;
use idle::IdleFrames;
pub use queues::{EVENT_BYTES_MAX, EVENTS_MAX, OUTBOX_BYTES_MAX, OUTBOX_MAX, WAITING_MAX};
use queues::{Full, Inbox, Outbox};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use streams::StreamWindow;

/// The protocol versions this build speaks.
pub const VERSIONS: (u16, u16) = (1, KEYED_VERSION);

/// The version from which on the frames of sessions with a secret have keyed tags. A side with a
/// secret speaks no lower one.
pub const KEYED_VERSION: u16 = 2;

/// Capability bit: takes part in transfers within one host.
pub const CAPABILITY_LOCAL: u64 = 1;

/// Requests outstanding in one direction of a session.
pub const REQUESTS_MAX: usize = 1024;
/// Longest time that an answer waits for another frame. See [`Session::acknowledge`].
pub const ANSWER_DELAY: Duration = Duration::from_millis(10);

/// Revokes outstanding in one direction of a session.
pub const REVOKES_MAX: usize = 1024;

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

/// Settings of one side of a session.
#[derive(Clone, Debug)]
pub struct SessionConfig {
    /// Incarnation of this agent.
    pub incarnation: Incarnation,
    /// Name of this agent, for logs and errors. Cut to 256 bytes.
    pub name: String,
    /// The secret shared with the peers. Without one, peers are not authenticated.
    pub secret: Option<Secret>,
    /// Lowest and highest protocol version of this build.
    pub versions: (u16, u16),
    /// Capability bits. A session has those that both sides have.
    pub capabilities: u64,
    /// Payload carries checksums if either side asks for them.
    pub checksum: ChecksumPolicy,
    /// Identifies the layout of the KV blocks. Sessions between different fingerprints are
    /// refused; a side without one fits every peer.
    pub fingerprint: Option<Vec<u8>>,
    /// Address where this agent listens, `host:port`, or empty. Left out if longer than 1024 bytes.
    pub advertised: String,
    /// The handshake fails if it takes longer.
    pub handshake_timeout: Duration,
    /// Longest time without a byte from the peer while something is in flight. The session ends after it.
    pub silence: Duration,
    /// Time between pings while something is in flight. Clamped between 1 ms and a third of
    /// `silence`; a sixth of it is a good value.
    pub ping_interval: Duration,
}

impl SessionConfig {
    /// No secret, no checksums, silence after 3 s, a handshake of at most 5 s.
    pub fn new(incarnation: Incarnation, name: impl Into<String>) -> Self {
        Self {
            incarnation,
            name: name.into(),
            secret: None,
            versions: VERSIONS,
            capabilities: 0,
            checksum: ChecksumPolicy::Off,
            fingerprint: None,
            advertised: String::new(),
            handshake_timeout: Duration::from_secs(5),
            silence: Duration::from_secs(3),
            ping_interval: Duration::from_millis(500),
        }
    }
}

/// Whether a side asks for payload checksums. They are on if either side asks. Exhaustive on
/// purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum ChecksumPolicy {
    /// Does not ask for checksums.
    #[default]
    Off,
    /// Asks for checksums.
    On,
}

/// An end of the connection. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// The end that opened the control connection. It also opens the data streams.
    Initiator,
    /// The end that accepted it.
    Acceptor,
}

/// An event for the layers above. Exhaustive on purpose: the driver must act on each.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum SessionEvent {
    /// The handshake succeeded. At most once, and before every event but `Closed` and the answers
    /// to requests that were made too early.
    Established(PeerInfo),
    /// The peer demands that its memory is not touched any more. Stop these streams, then call
    /// [`Session::confirm_revoked`] with the id.
    RevokeRequested { id: u64, streams: Vec<StreamId> },
    /// The peer confirmed the revoke of this side that [`Session::revoke`] returned this id for:
    /// nothing at the peer touches memory through those streams any more.
    Revoked { id: u64 },
    /// A request of the peer, as in [`Session::request`], to be answered with [`Session::respond`].
    Request { id: u64, kind: u16, body: Vec<u8> },
    /// The answer to a request of this side; exactly one for each. The code is from the peer, or
    /// `Deadline`, `Busy`, `TooLarge` or `Closed` from this session, then with an empty body.
    Response { id: u64, code: WireCode, body: Vec<u8> },
    /// The session ended. Exactly once, after every other event.
    Closed(CloseReason),
}

/// The peer of an established session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerInfo {
    /// Incarnation of the peer.
    pub incarnation: Incarnation,
    /// The peer's name, without control characters.
    pub name: String,
    /// The protocol version of this session.
    pub version: u16,
    /// Capability bits that both sides have.
    pub capabilities: u64,
    /// Chosen by the acceptor.
    pub session: SessionId,
    /// Whether payload carries checksums.
    pub checksum: bool,
    /// Address where the peer listens, as the peer reports it; empty if nowhere.
    pub advertised: String,
    /// Whether both sides proved a shared secret.
    pub authenticated: bool,
}

/// Reason for the end of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CloseReason {
    /// Code of the reason.
    pub code: WireCode,
    /// Whether the peer or the loss of the connection ended the session, and not this side.
    pub by_peer: bool,
    /// Explanation, without control characters.
    pub detail: String,
    /// Whether the session had been established.
    pub established: bool,
}

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

    /// Demands that the peer stops touching memory through these streams. Returns the demand's id.
    ///
    /// The answer is [`SessionEvent::Revoked`], or the end of the session. Returns 0, which is
    /// never an id, if nothing was sent: the session is not established, 1024 revokes are
    /// outstanding, or more than 4096 streams are named. The memory then stays in quarantine.
    pub fn revoke(&mut self, streams: Vec<StreamId>, now: Timestamp) -> u64 {
        if !self.wake(now)
            || !self.is_established()
            || self.revokes.len() >= REVOKES_MAX
            || streams.len() > REVOKE_STREAMS_MAX
        {
            return 0;
        }
        let id = self.fresh_id();
        self.revokes.insert(id);
        self.send(&Message::Revoke(Revoke { id, streams }));
        self.rewatch();
        id
    }

    /// Confirms a revoke of the peer: nothing on this side touches memory through its streams.
    pub fn confirm_revoked(&mut self, id: u64) {
        if self.owed_revokes.remove(&id) {
            self.send(&Message::Revoked(Revoked { id }));
        }
    }

    /// Sends a request to the layers above at the peer. Returns the request's id.
    ///
    /// Each request has exactly one [`SessionEvent::Response`]: from the peer, or from this session
    /// with `Deadline` after `budget`, `Closed` if the session is not established or ends,
    /// `TooLarge` for a body over 1 MiB less 1 KiB, `Busy` if 1024 requests are outstanding or the
    /// peer does not read. Returns 0, which is never an id and has no answer, if the session is
    /// closed or thousands of events were not polled.
    pub fn request(&mut self, kind: u16, body: Vec<u8>, budget: Duration, now: Timestamp) -> u64 {
        if !self.wake(now) || self.inbox.is_full() {
            return 0;
        }
        let id = self.fresh_id();
        let refusal = if !self.is_established() {
            Some(WireCode::Closed)
        } else if body.len() > BODY_MAX {
            Some(WireCode::TooLarge)
        } else if self.requests.len() >= REQUESTS_MAX || !self.outbox.has_room_for(body.len()) {
            Some(WireCode::Busy)
        } else {
            None
        };
        if let Some(code) = refusal {
            self.answer_ourselves(id, code);
            return id;
        }
        self.requests.insert(id, self.now + budget);
        let budget_ms = u32::try_from(budget.as_millis()).unwrap_or(u32::MAX).max(1);
        let request = Message::Request(Request { id, kind, budget_ms, body });
        let queued = self.outbox.push_asked(encode(&request));
        self.check_sent(queued);
        self.rewatch();
        id
    }

    /// Answers a request of the peer. No effect if it was answered or the session ended.
    ///
    /// If the body is too long or the queue is full, the peer gets `TooLarge` or `Busy` instead.
    pub fn respond(&mut self, id: u64, code: WireCode, body: Vec<u8>) {
        if self.owed_responses.remove(&id).is_none() {
            return;
        }
        let (code, body) = if body.len() > BODY_MAX {
            (WireCode::TooLarge, Vec::new())
        } else if !body.is_empty() && !self.outbox.has_room_for(body.len()) {
            (WireCode::Busy, Vec::new())
        } else {
            (code, body)
        };
        self.send(&Message::Response(Response { id, code, body }));
    }

    /// Answers a request of the peer with `Ok` and no body, when it costs least: behind the next frame,
    /// with [`WAITING_MAX`] such answers, or after [`ANSWER_DELAY`]. No effect if it was answered or the
    /// session ended.
    pub fn acknowledge(&mut self, id: u64, now: Timestamp) {
        if !self.wake(now) {
            return;
        }
        let until = self.now + ANSWER_DELAY;
        match self.owed_responses.get(&id) {
            // The peer waits no longer than that.
            Some(deadline) if *deadline <= until => {
                return self.respond(id, WireCode::Ok, Vec::new());
            }
            Some(_) => drop(self.owed_responses.remove(&id)),
            None => return,
        }
        if !self.outbox.has_waiting() {
            self.waits_until = Some(until);
        }
        let response = Response { id, code: WireCode::Ok, body: Vec::new() };
        let queued = self.outbox.push_waiting(encode(&Message::Response(response)));
        self.check_sent(queued);
    }

    /// Acceptor: whether a connection may become a stream of this session. Uses up the stream id.
    ///
    /// # Errors
    /// The code to refuse the connection with: `UnknownSession` (also while not established),
    /// `StaleIncarnation`, `AuthFailed`, or `StreamReplayed`.
    pub fn verify_stream(&mut self, hello: &StreamHello) -> Result<(), WireCode> {
        self.verify_hello(hello, stream_mac)
    }

    /// Acceptor: whether a connection of the transport with this label belongs to this session.
    /// Uses up the stream id.
    ///
    /// # Errors
    /// As [`Session::verify_stream`].
    pub fn verify_proof(&mut self, label: ProofLabel, hello: &StreamHello) -> Result<(), WireCode> {
        self.verify_hello(hello, |key, session, stream| label.hello_mac(key, session, stream))
    }

    fn verify_hello(
        &mut self,
        hello: &StreamHello,
        mac: impl FnOnce(&SessionKey, SessionId, StreamId) -> [u8; MAC_LEN],
    ) -> Result<(), WireCode> {
        if hello.incarnation != self.cfg.incarnation {
            return Err(WireCode::StaleIncarnation);
        }
        let (State::Established, Side::Acceptor, Some(key), Some(peer)) =
            (&self.state, self.side, &self.key, &self.peer)
        else {
            return Err(WireCode::UnknownSession);
        };
        if hello.session != peer.session {
            return Err(WireCode::UnknownSession);
        }
        // Before the id: without the key a caller can neither use up ids nor learn used ones.
        if !macs_equal(&mac(key, hello.session, hello.stream), &hello.mac) {
            return Err(WireCode::AuthFailed);
        }
        if self.streams.use_up(hello.stream) { Ok(()) } else { Err(WireCode::StreamReplayed) }
    }

    /// Initiator: the first bytes of a new connection that is to become a stream of this session,
    /// magic included. `None` unless established.
    pub fn stream_hello(&mut self) -> Option<(StreamId, Vec<u8>)> {
        self.hello(stream_mac)
    }

    /// Initiator: the first bytes of a connection of the transport with this label. They open no data
    /// stream. `None` unless established.
    pub fn prove(&mut self, label: ProofLabel) -> Option<(StreamId, Vec<u8>)> {
        self.hello(|key, session, stream| label.hello_mac(key, session, stream))
    }

    fn hello(
        &mut self,
        mac: impl FnOnce(&SessionKey, SessionId, StreamId) -> [u8; MAC_LEN],
    ) -> Option<(StreamId, Vec<u8>)> {
        let (State::Established, Side::Initiator, Some(key), Some(peer)) =
            (&self.state, self.side, &self.key, &self.peer)
        else {
            return None;
        };
        self.last_stream = self.last_stream.checked_add(1)?;
        let stream = StreamId(self.last_stream);
        let hello = encode(&Message::StreamHello(StreamHello {
            session: peer.session,
            stream,
            incarnation: peer.incarnation,
            mac: mac(key, peer.session, stream),
        }));
        Some((stream, [&MAGIC[..], &hello].concat()))
    }

    /// Returns the protection of the heads of a stream of this session, for the lane at this end. To be called once for
    /// each stream: a second guard would count the frames from the start again. `None` unless established.
    pub fn stream_guard(&self, stream: StreamId) -> Option<Guard> {
        let (State::Established, Some(key), Some(peer)) = (&self.state, &self.key, &self.peer)
        else {
            return None;
        };
        Some(if peer.authenticated {
            Guard::Keyed(Box::new(stream_seals(key, peer.session, stream, self.side)))
        } else {
            Guard::Crc
        })
    }

    /// Acceptor: the proof in the answer to the opening of a stream, of a session with a secret. `code` is
    /// [`WireCode::Ok`] if the stream is accepted.
    pub fn stream_answer(&self, stream: StreamId, code: WireCode) -> Option<Vec<u8>> {
        self.answer_mac(stream, code).map(Vec::from)
    }

    /// Initiator: whether the answer to the opening of a stream is the acceptor's. Always, where the
    /// session has no secret.
    pub fn is_stream_answer(&self, stream: StreamId, code: WireCode, mac: Option<&[u8]>) -> bool {
        match self.answer_mac(stream, code) {
            Some(ours) => {
                mac.and_then(|it| it.try_into().ok()).is_some_and(|it| macs_equal(&ours, it))
            }
            None => self.peer.as_ref().is_none_or(|peer| !peer.authenticated),
        }
    }

    fn answer_mac(&self, stream: StreamId, code: WireCode) -> Option<[u8; MAC_LEN]> {
        let (key, peer) = (self.key.as_ref()?, self.peer.as_ref()?);
        peer.authenticated.then(|| stream_answer_mac(key, peer.session, stream, code))
    }

    /// The proof in the acceptor's answer to the hello of [`Session::prove`], for both sides. `None`
    /// unless established.
    pub fn answer_proof(&self, label: ProofLabel, stream: StreamId) -> Option<[u8; MAC_LEN]> {
        let (key, peer) = (self.key.as_ref()?, self.peer.as_ref()?);
        Some(label.answer_mac(key, peer.session, stream))
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

    fn on_revoke(&mut self, revoke: Revoke) {
        let Revoke { id, streams } = revoke;
        if self.owed_revokes.len() >= REVOKES_MAX {
            return self.abort(WireCode::Busy, "too many revokes outstanding");
        }
        if !self.owed_revokes.insert(id) {
            return self.abort(WireCode::Malformed, "a revoke's id is in use");
        }
        self.tell(SessionEvent::RevokeRequested { id, streams });
    }

    /// Whether this side waits for the confirmation.
    fn on_revoked(&mut self, revoked: &Revoked) -> bool {
        let is_awaited = self.revokes.remove(&revoked.id);
        if is_awaited {
            self.tell(SessionEvent::Revoked { id: revoked.id });
        }
        is_awaited
    }

    fn on_request(&mut self, request: Request) {
        let Request { id, kind, budget_ms, body } = request;
        if self.owed_responses.len() >= REQUESTS_MAX {
            // The peer does not wait for an answer to these any more.
            self.owed_responses.retain(|_, until| *until > self.now);
        }
        if self.owed_responses.contains_key(&id) {
            return self.abort(WireCode::Malformed, "a request's id is in use");
        }
        if self.owed_responses.len() >= REQUESTS_MAX {
            let busy = Response { id, code: WireCode::Busy, body: Vec::new() };
            return self.send(&Message::Response(busy));
        }
        let budget = match budget_ms {
            0 => Duration::MAX,
            ms => Duration::from_millis(ms.into()),
        };
        self.owed_responses.insert(id, self.now + budget);
        self.tell(SessionEvent::Request { id, kind, body });
    }

    /// Whether it answers a request of this side. An answer after `Deadline` is late, and no breach of
    /// the protocol.
    fn on_response(&mut self, response: Response) -> bool {
        let Response { id, code, body } = response;
        if self.requests.remove(&id).is_some() {
            self.tell(SessionEvent::Response { id, code, body });
            return true;
        }
        let is_late = self.late_answers > 0;
        self.late_answers = self.late_answers.saturating_sub(1);
        is_late
    }

    fn fresh_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
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
