//! The control connection: drives one `kvferry_proto::Session` on the control thread.

use crate::callback::contain;
use crate::error::{Error, ErrorKind};
use crate::host::keep_control_alive;
use crate::memory::gate::Gate;
use crate::peer_memory::{Account, Memory};
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::session::admission::{Admission, is_full, refuse};
use crate::session::channel::{Channel, Message};
use crate::session::connect::Attempt;
use crate::session::native::{Native, WriteOutcome, close_error};
use crate::session::service;
use crate::session::sessions::Sessions;
use crate::sync::{Arc, MutexGuard, Weak};
use crate::transfer::link::{Answered, Link};
use crate::transfer::requests::MESSAGE;
use crate::transport::service::Directory;
use kvferry_proto::{CloseReason, PeerInfo, SessionEvent, SessionId, Side, Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Bytes read from a control connection at a time.
const READ: usize = 16 * 1024;
/// Bytes read from a control connection in one call; the rest waits until other handlers had their
/// turn. Thousands of heartbeats fit in them, which take a millisecond.
const READ_PER_CALL: usize = 4 * READ;
/// Events handled in one call. Some call the user's code.
const EVENTS_PER_CALL: usize = 64;
/// Longest time for which one call handles events. The event that is being handled when the time ends is the last one.
/// Some events cost a millisecond, such as long announcements. While 100 sessions have such events, the heartbeats of
/// the others are 0.2 s late, less than the half second between two of them by default.
const EVENTS_TIME: Duration = Duration::from_millis(2);
/// Interval at which a revoke whose streams are not quiet yet is checked: a part of the time since it came. A device
/// that has lost a copy keeps one for the rest of the session.
const REVOKE_CHECKS: u32 = 16;
const REVOKE_CHECK_MIN: Duration = Duration::from_millis(1);
const REVOKE_CHECK_MAX: Duration = Duration::from_secs(1);

/// Called exactly once, when the handshake has ended.
pub(crate) type Established = Box<dyn FnOnce(&Arc<Link>, Result<(), Error>) + Send>;

/// Events that a call may still handle, and the time at which it must stop.
struct Budget {
    events: usize,
    ends: Timestamp,
}

impl Budget {
    /// Begins at `now`, which is the present and not the time at which the reactor woke up: other
    /// handlers may have run since.
    fn begin(now: Timestamp) -> Self {
        Self { events: EVENTS_PER_CALL, ends: now + EVENTS_TIME }
    }

    /// Takes one event. The first one is always granted, so that each call makes progress.
    fn take(&mut self) -> bool {
        let is_first = self.events == EVENTS_PER_CALL;
        if self.events == 0 || !(is_first || now() < self.ends) {
            return false;
        }
        self.events -= 1;
        true
    }
}

/// A revoke from the peer that is not confirmed yet: a copier is still inside one of these gates.
struct Unconfirmed {
    id: u64,
    gates: Vec<Arc<Gate>>,
    came_at: Timestamp,
    check_at: Timestamp,
}

impl Unconfirmed {
    fn new(id: u64, gates: Vec<Arc<Gate>>, at: Timestamp) -> Self {
        Self { id, gates, came_at: at, check_at: at }
    }

    /// Whether it can be confirmed. If not, sets the time of the next check.
    fn is_quiet(&mut self, at: Timestamp) -> bool {
        let after = (at.saturating_since(self.came_at) / REVOKE_CHECKS)
            .clamp(REVOKE_CHECK_MIN, REVOKE_CHECK_MAX);
        self.check_at = at + after;
        self.gates.iter().all(|gate| gate.is_quiet())
    }
}

/// Outcome of [`Control::events`].
#[derive(Clone, Copy, PartialEq, Eq)]
enum Events {
    None,
    /// More events are left than one call handles.
    Left,
    /// The session has ended, and no event is left.
    Over,
}

pub(crate) struct Control {
    sessions: Weak<Sessions>,
    link: Arc<Link>,
    native: Arc<Native>,
    socket: Arc<Socket>,
    connecting: bool,
    on_established: Option<Established>,
    /// The attempt to connect that opened the connection; `None` if the peer opened it.
    attempt: Option<Attempt>,
    /// The peer has sent something.
    answered: bool,
    unconfirmed: Vec<Unconfirmed>,
    /// Answers that arrived together with the session's end, delivered after it.
    late_answers: Vec<(Answered, WireCode, Vec<u8>)>,
    /// Whether the heartbeat runs.
    active: bool,
    /// Time of the next check whether the heartbeat must still run.
    check_active_at: Option<Timestamp>,
    /// Set while the session counts in the gauge `sessions`.
    counted: bool,
    /// The number of an accepted session, while the peer may add streams to it.
    accepted: Option<SessionId>,
    /// The place of an accepted connection, until the peer is authenticated.
    admission: Option<Admission>,
    /// Memory of messages in either direction.
    account: Account,
}

impl Control {
    /// A connection that this agent opened; it may not be connected yet.
    pub(crate) fn initiator(
        sessions: &Arc<Sessions>,
        link: Arc<Link>,
        native: Arc<Native>,
        socket: Arc<Socket>,
        attempt: Attempt,
        on_established: Established,
    ) -> Self {
        let mut control = Self::new(sessions, link, native, socket);
        (control.connecting, control.on_established) = (true, Some(on_established));
        control.attempt = Some(attempt);
        control
    }

    /// A connection that a peer opened.
    pub(crate) fn acceptor(
        sessions: &Arc<Sessions>,
        link: Arc<Link>,
        native: Arc<Native>,
        socket: Arc<Socket>,
        admission: Admission,
    ) -> Self {
        let mut control = Self::new(sessions, link, native, socket);
        control.admission = Some(admission);
        control
    }

    fn new(
        sessions: &Arc<Sessions>,
        link: Arc<Link>,
        native: Arc<Native>,
        socket: Arc<Socket>,
    ) -> Self {
        let account = link.core.peer_memory.account(link.peer_addr.ip(), Memory::Received);
        Self {
            account,
            sessions: Arc::downgrade(sessions),
            link,
            native,
            socket,
            connecting: false,
            on_established: None,
            attempt: None,
            answered: false,
            unconfirmed: Vec::new(),
            late_answers: Vec::new(),
            active: false,
            check_active_at: None,
            counted: false,
            accepted: None,
            admission: None,
        }
    }

    fn session(&self) -> MutexGuard<'_, kvferry_proto::Session> {
        self.native.session()
    }

    /// Reads a bounded number of bytes. What is left keeps the descriptor ready.
    fn receive(&mut self, now: Timestamp) {
        let mut buffer = [0u8; READ];
        for _ in 0..READ_PER_CALL / READ {
            if !self.session().wants_read() {
                return;
            }
            match self.socket.recv(&mut buffer) {
                Ok(0) => return self.session().transport_closed(now),
                Ok(n) => {
                    if !self.answered {
                        self.answered = true;
                        let goes_on = self.attempt.as_ref().map(|a| a.answered(&self.link.core));
                        if goes_on == Some(false) {
                            return self.session().transport_closed(now);
                        }
                    }
                    self.session().receive(&buffer[..n], now);
                    if n < buffer.len() {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.session().transport_closed(now),
            }
        }
    }

    /// Counts the memory that the peer makes this side hold; ends the session if that is too much. Requests of this side
    /// are not counted here: their queue refuses them.
    fn check_memory(&mut self, now: Timestamp) {
        let held_bytes = self.native.held_bytes() + self.link.messages.untaken().1;
        if self.account.hold(held_bytes) || !self.session().is_established() {
            return;
        }
        self.link.core.counters.peer_memory_refused.one();
        warn_limited!(peer = %self.link.address, "ended a session: peers hold as much memory as they may");
        self.session().close(WireCode::Busy, "peers hold as much memory as they may", now);
    }

    /// Handles the session's events, as many as `budget` permits.
    fn events(&mut self, budget: &mut Budget) -> Events {
        loop {
            if !budget.take() && self.session().has_events() {
                return Events::Left;
            }
            let event = self.session().poll_event();
            match event {
                None => return Events::None,
                Some(SessionEvent::Established(info)) => self.established(info),
                Some(SessionEvent::RevokeRequested { id, streams }) => {
                    let gates = self.native.shut_inbound(&streams);
                    self.unconfirmed.push(Unconfirmed::new(id, gates, now()));
                }
                Some(SessionEvent::Revoked { id }) => {
                    if let Some(done) = self.native.take_revoke(id) {
                        done(true);
                    }
                }
                Some(SessionEvent::Request { id, kind: MESSAGE, body }) => self.message(id, body),
                Some(SessionEvent::Request { id, kind, body }) => {
                    let (code, body) = match self.sessions.upgrade() {
                        Some(all) => service::answer(all.services(), &self.link, kind, &body),
                        None => (WireCode::Shutdown, Vec::new()),
                    };
                    self.session().respond(id, code, body);
                }
                Some(SessionEvent::Response { id, code, body }) => {
                    match self.native.take_request(id) {
                        // The session's end is the next event: report it first.
                        Some(answered) if self.session().is_closed() => {
                            self.late_answers.push((answered, code, body));
                        }
                        Some(answered) => answered(code, body),
                        None => {}
                    }
                }
                Some(SessionEvent::Closed(reason)) => {
                    self.closed(&reason);
                    return Events::Over;
                }
            }
        }
    }

    fn message(&self, id: u64, body: Vec<u8>) {
        let Some(sessions) = self.sessions.upgrade() else {
            return self.session().respond(id, WireCode::Shutdown, Vec::new());
        };
        let Some(handler) = sessions.message_handler() else {
            return self.session().respond(id, WireCode::Unsupported, Vec::new());
        };
        let (channel, mut is_later) = (Channel::new(&self.link), false);
        let message = Message::new(&self.link, id, body, &mut is_later);
        if contain("a message handler", || handler.received(&channel, message)).is_none() {
            return channel.close(service::panicked());
        }
        if !is_later {
            // The sender goes on without the answer.
            return self.session().acknowledge(id, now());
        }
        let (messages, bytes) = self.link.messages.untaken();
        if messages > Channel::WINDOW_MESSAGES || bytes > Channel::WINDOW_BYTES {
            let what = "the peer sends more messages than are taken";
            let error = Error::new(ErrorKind::Busy, what).with("peer", &self.link.address);
            self.session().close(WireCode::Busy, what, now());
            self.link.terminate(error);
        }
    }

    fn established(&mut self, info: PeerInfo) {
        let core = &self.link.core;
        let side = self.session().side();
        tracing::info!(
            peer = %self.link.address, name = %info.name, incarnation = %info.incarnation,
            version = info.version, authenticated = info.authenticated, checksum = info.checksum,
            side = ?side, "session established"
        );
        let dialled = &self.link.address;
        if side == Side::Initiator && !info.advertised.is_empty() && info.advertised != *dialled {
            // A name, a NAT or a relay. With a secret a relay can read, and not write.
            tracing::info!(%dialled, advertised = %info.advertised, "the peer names another address");
        }
        let Some(sessions) = self.sessions.upgrade() else { return };
        let id = info.session;
        if side == Side::Acceptor {
            match core.quota.session().or_else(|| sessions.displace_for(self.link.peer_addr.ip())) {
                Some(permit) => self.native.keep_permit(permit),
                None => {
                    let why = is_full(core, self.link.peer_addr, "sessions");
                    return self.session().close(WireCode::Busy, &why, now());
                }
            }
        }
        self.native.set_info(info);
        core.counters.sessions.one();
        self.counted = true;
        if let Some(handler) = sessions.message_handler() {
            let channel = Channel::new(&self.link);
            if contain("a message handler", || handler.began(&channel)).is_none() {
                return channel.close(service::panicked());
            }
        }
        sessions.add(&self.link);
        match side {
            Side::Initiator => {
                core.counters.sessions_opened.one();
                if let Some(on_established) = self.on_established.take() {
                    on_established(&self.link, Ok(()));
                }
            }
            Side::Acceptor => {
                core.counters.sessions_accepted.one();
                self.admission = None;
                sessions.add_accepted(id, &self.link, &self.native);
                self.accepted = Some(id);
            }
        }
    }

    fn closed(&mut self, reason: &CloseReason) {
        let error = close_error(reason, &self.link.address);
        let core = &self.link.core;
        if reason.established {
            tracing::info!(peer = %self.link.address, reason = %error, "session ended");
            if reason.code == WireCode::Silent
                && let Some(attempt) = &self.attempt
            {
                // Before callers get the error, so that their next call finds the peer silent.
                attempt.fell_silent(&self.link);
            }
        } else {
            core.counters.handshakes_failed.one();
            warn_limited!(peer = %self.link.address, reason = %error, "handshake failed");
        }
        self.end(error);
    }

    /// Looks whether the socket is connected: `None` if it is.
    fn connect(&mut self, cause: Cause, budget: &mut Budget, now: Timestamp) -> Option<Next> {
        if cause.ready.any()
            && let Err(e) = self.socket.error()
        {
            let error = Error::new(ErrorKind::Unreachable, "can't connect to the peer")
                .with("peer", &self.link.address)
                .caused_by(e);
            return Some(self.never_began(error));
        }
        if cause.ready.write {
            self.connecting = false;
            if let Err(e) = self.link.core.users.check_target(&self.socket) {
                return Some(self.never_began(e.with("peer", &self.link.address)));
            }
            let _ = self.socket.set_nodelay();
            keep_control_alive(&self.socket, self.link.core.settings.silence);
            return None;
        }
        // The handshake timeout includes the time to connect.
        self.session().handle_timeout(now);
        Some(match self.events(budget) {
            Events::Over => Next::Close,
            Events::Left => Next::Again,
            Events::None => {
                let deadline = self.session().next_timeout();
                Next::Wait { interest: Interest::Write, deadline }
            }
        })
    }

    /// Ends a connection that fails before anything is sent on it.
    fn never_began(&mut self, error: Error) -> Next {
        self.link.core.counters.handshakes_failed.one();
        self.end(error);
        Next::Close
    }

    fn end(&mut self, error: Error) {
        let sessions = self.sessions.upgrade();
        if let (Some(id), Some(sessions)) = (self.accepted.take(), &sessions) {
            sessions.remove_accepted(id);
        }
        self.link.terminate(error.clone());
        if self.counted {
            self.counted = false;
            self.link.core.counters.sessions.less_one();
            if let Some(handler) = sessions.as_ref().and_then(|all| all.message_handler()) {
                let error = self.link.end().unwrap_or(&error);
                let channel = Channel::new(&self.link);
                contain("a message handler", || handler.ended(&channel, error));
            }
        }
        for (answered, code, body) in self.late_answers.drain(..) {
            answered(code, body);
        }
        if let Some(on_established) = self.on_established.take() {
            on_established(&self.link, Err(error));
        }
    }

    /// Confirms the revokes that no copier delays any more.
    fn confirm_revokes(&mut self, at: Timestamp) {
        for mut revoke in std::mem::take(&mut self.unconfirmed) {
            if revoke.is_quiet(at) {
                self.session().confirm_revoked(revoke.id);
            } else {
                self.unconfirmed.push(revoke);
            }
        }
    }

    /// Starts or stops the heartbeat: it runs while anything is in flight on the link.
    fn update_heartbeat(&mut self, now: Timestamp) {
        if !self.session().is_established() {
            // A session that ends needs no heartbeat.
            self.check_active_at = None;
            return;
        }
        let due = self.check_active_at.is_none_or(|at| at <= now);
        if self.active && !due {
            return;
        }
        let active = self.link.is_active();
        if active != self.active {
            self.active = active;
            self.session().set_active(active, now);
        }
        self.check_active_at = active.then(|| now + self.link.core.settings.ping_interval());
    }

    /// What the reactor waits for; `full` if the socket takes no more.
    fn wait(&self, full: bool) -> Next {
        let (wants_read, session_timeout) = {
            let session = self.session();
            (session.wants_read(), session.next_timeout())
        };
        let revokes = self.unconfirmed.iter().map(|revoke| revoke.check_at).min();
        let deadline = [session_timeout, self.link.next_deadline(), self.check_active_at, revokes]
            .into_iter()
            .flatten()
            .min();
        let interest = match (wants_read, full) {
            (true, true) => Interest::Both,
            (true, false) => Interest::Read,
            (false, true) => Interest::Write,
            (false, false) => Interest::None,
        };
        Next::Wait { interest, deadline }
    }
}

impl Handler for Control {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        if !self.answered && self.attempt.as_ref().is_some_and(|attempt| !attempt.is_running()) {
            self.end(Error::new(
                ErrorKind::Cancelled,
                "another address of the peer answered first",
            ));
            return Next::Close;
        }
        let mut budget = Budget::begin(now());
        if self.connecting
            && let Some(next) = self.connect(cause, &mut budget, cx.now)
        {
            return next;
        }
        if self.admission.as_ref().is_some_and(|place| !place.is_held()) {
            // Another connection got its place; the initiator may try again.
            refuse(&self.socket, WireCode::Busy, "");
            self.link.core.counters.handshakes_failed.one();
            return Next::Close;
        }
        // What this call queues leaves at its end, together.
        let mut writes = self.native.begin_writing();
        let is_ready = cause.ready.read || cause.ready.closed || cause.ready.peer_closed;
        let (has_events, next_timeout) = {
            let session = self.session();
            (session.has_events(), session.next_timeout())
        };
        // Events of an earlier call come first, so that their queue stays short. Before a timer, the socket is read even
        // if this call does not say that it is ready: what has arrived is no silence.
        if !has_events && (is_ready || next_timeout.is_some_and(|at| at <= cx.now)) {
            self.receive(cx.now);
        }
        // Before the timers: the heartbeat of a transfer that has ended meanwhile says nothing.
        self.update_heartbeat(cx.now);
        self.session().handle_timeout(cx.now);
        self.link.expire(cx.now);
        // Handling an event may produce bytes and further events.
        let mut full;
        loop {
            let events = self.events(&mut budget);
            let is_over = events == Events::Over;
            if !is_over {
                self.confirm_revokes(cx.now);
                self.update_heartbeat(cx.now);
                self.check_memory(cx.now);
            }
            // Of a session that is over, the last messages if the socket takes them without waiting.
            writes = writes || self.native.begin_writing();
            full = writes && self.native.write(&self.link.core, cx.now) == WriteOutcome::Full;
            writes = false;
            match events {
                Events::Over => return Next::Close,
                Events::Left => return Next::Again,
                Events::None => {}
            }
            if self.native.is_displaced() {
                // The newer session has its descriptor: the peer's answer is not waited for.
                self.session().transport_closed(cx.now);
            }
            if !self.session().is_closed() {
                break;
            }
        }
        self.wait(full)
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.native.hang_up();
        // Does nothing if the session has ended before.
        self.end(Error::shutdown());
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn i10_a_revoke_of_a_stream_that_is_never_quiet_is_checked_less_and_less() {
        let gate = Gate::new();
        gate.copy_started();
        let hour = Duration::from_secs(3600);
        let mut revoke = Unconfirmed::new(1, vec![Arc::clone(&gate)], now());
        let mut checks = 0;
        while revoke.check_at < revoke.came_at + hour {
            assert!(!revoke.is_quiet(revoke.check_at));
            checks += 1;
        }
        assert!(checks < 4000, "{checks}");
        gate.copy_ended();
        assert!(revoke.is_quiet(revoke.check_at));
    }
}
