//! The control connection: drives one `kvferry_proto::Session` on the control thread.

use crate::channel::Channel;
use crate::error::{Error, ErrorKind};
use crate::memory::gate::Gate;
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::session::greet::Admission;
use crate::session::link::{Answered, Link, Native};
use crate::session::service;
use crate::sync::{Arc, MutexGuard, PoisonError};
use crate::transport::local;
use kvferry_proto::{CloseReason, PeerInfo, SessionEvent, Side, Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

/// Bytes read from a control connection at a time.
const READ: usize = 16 * 1024;
/// How often an unquiet stream of a revoke is looked at again.
const QUIET_EVERY: Duration = Duration::from_millis(1);

/// Told how meeting a peer went.
pub(crate) type Met = Box<dyn FnOnce(&Arc<Link>, Result<(), Error>) + Send>;

pub(crate) struct Control {
    link: Arc<Link>,
    socket: Socket,
    connecting: bool,
    out: Vec<u8>,
    out_at: usize,
    met: Option<Met>,
    /// Revokes of the peer whose streams are not quiet yet.
    unquiet: Vec<(u64, Vec<Arc<Gate>>)>,
    /// Answers that came with the session's end.
    unanswered: Vec<(Answered, WireCode, Vec<u8>)>,
    /// Whether the heartbeat was on at the last look.
    active: bool,
    look_again: Option<Timestamp>,
    counted: bool,
    /// Its place among those who have not proved themselves.
    admission: Option<Admission>,
}

impl Control {
    /// A connection that we opened; it may not be connected yet.
    pub(crate) fn initiator(link: Arc<Link>, socket: Socket, met: Met) -> Self {
        Self::new(link, socket, true, Some(met))
    }

    /// A connection that a peer opened.
    pub(crate) fn acceptor(link: Arc<Link>, socket: Socket, admission: Admission) -> Self {
        let mut control = Self::new(link, socket, false, None);
        control.admission = Some(admission);
        control
    }

    fn new(link: Arc<Link>, socket: Socket, connecting: bool, met: Option<Met>) -> Self {
        Self {
            link,
            socket,
            connecting,
            out: Vec::new(),
            out_at: 0,
            met,
            unquiet: Vec::new(),
            unanswered: Vec::new(),
            active: false,
            look_again: None,
            counted: false,
            admission: None,
        }
    }

    fn native(&self) -> &Native {
        self.link.native.as_ref().expect("control connections are of native links")
    }

    fn session(&self) -> MutexGuard<'_, kvferry_proto::Session> {
        self.native().session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn receive(&mut self, now: Timestamp) {
        let mut buffer = [0u8; READ];
        loop {
            if !self.session().wants_read() {
                return;
            }
            match self.socket.recv(&mut buffer) {
                Ok(0) => return self.session().transport_closed(now),
                Ok(n) => {
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

    /// Writes what the session has to say; whether the socket is full.
    fn transmit(&mut self, now: Timestamp) -> bool {
        loop {
            if self.out_at == self.out.len() {
                self.out.clear();
                self.out_at = 0;
                let (next, said_bytes) = {
                    let mut session = self.session();
                    let before = session.said_bytes();
                    (session.poll_transmit(), session.said_bytes() - before)
                };
                self.link.core.counters.control_bytes_sent.add(said_bytes);
                match next {
                    Some(bytes) => self.out = bytes,
                    None => return false,
                }
            }
            match self.socket.send(&self.out[self.out_at..]) {
                Ok(n) => self.out_at += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return true,
                Err(_) => {
                    self.out.clear();
                    self.out_at = 0;
                    self.session().transport_closed(now);
                    return false;
                }
            }
        }
    }

    /// Acts on the session's events; true after the last one.
    fn events(&mut self) -> bool {
        loop {
            let event = self.session().poll_event();
            match event {
                None => return false,
                Some(SessionEvent::Established(info)) => self.established(info),
                Some(SessionEvent::RevokeRequested { id, streams }) => {
                    let mut gates = Vec::new();
                    for stream in streams {
                        let lane = {
                            let mut inbound = self
                                .native()
                                .inbound
                                .lock()
                                .unwrap_or_else(PoisonError::into_inner);
                            inbound.remove(&stream)
                        };
                        if let Some(lane) = lane {
                            lane.gate.shut();
                            if let Some(socket) = lane.socket {
                                socket.shutdown(std::net::Shutdown::Both);
                            }
                            gates.push(lane.gate);
                        }
                    }
                    self.unquiet.push((id, gates));
                }
                Some(SessionEvent::Revoked { id }) => {
                    let done = {
                        let mut revokes =
                            self.native().revokes.lock().unwrap_or_else(PoisonError::into_inner);
                        revokes.remove(&id)
                    };
                    if let Some((_, done)) = done {
                        done(true);
                    }
                }
                Some(SessionEvent::Request { id, kind, body }) => {
                    let (code, body) = service::answer(&self.link, kind, &body);
                    self.session().respond(id, code, body);
                }
                Some(SessionEvent::Response { id, code, body }) => {
                    let answered = {
                        let mut requests =
                            self.native().requests.lock().unwrap_or_else(PoisonError::into_inner);
                        requests.remove(&id)
                    };
                    match answered {
                        // The session's end, which comes next, is to be known by then.
                        Some(answered) if self.session().is_closed() => {
                            self.unanswered.push((answered, code, body));
                        }
                        Some(answered) => answered(code, body),
                        None => {}
                    }
                }
                Some(SessionEvent::Closed(reason)) => {
                    self.closed(&reason);
                    return true;
                }
            }
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
        let id = info.session;
        let _ = self.native().info.set(info);
        core.counters.sessions.one();
        self.counted = true;
        if let Some(correspondent) = core.correspondent() {
            correspondent.began(&Channel::new(&self.link));
        }
        match side {
            Side::Initiator => {
                core.counters.sessions_opened.one();
                core.add_session(&self.link);
                self.link.open_ahead();
                if let Some(met) = self.met.take() {
                    local::attach(&self.link, met);
                }
            }
            Side::Acceptor => {
                core.counters.sessions_accepted.one();
                self.admission = None;
                core.add_session(&self.link);
                core.add_accepted(id, &self.link);
            }
        }
    }

    fn closed(&mut self, reason: &CloseReason) {
        let error = close_error(reason, &self.link.address);
        let core = &self.link.core;
        if reason.established {
            tracing::info!(peer = %self.link.address, reason = %error, "session ended");
        } else {
            core.counters.handshakes_failed.one();
            tracing::warn!(peer = %self.link.address, reason = %error, "handshake failed");
        }
        self.end(error);
    }

    fn end(&mut self, error: Error) {
        self.link.core.remove_session(&self.link);
        self.link.terminate(error.clone());
        if self.counted {
            self.counted = false;
            self.link.core.counters.sessions.less_one();
            if let Some(correspondent) = self.link.core.correspondent() {
                let error = self.link.end().unwrap_or(&error);
                correspondent.ended(&Channel::new(&self.link), error);
            }
        }
        for (answered, code, body) in self.unanswered.drain(..) {
            answered(code, body);
        }
        if let Some(met) = self.met.take() {
            met(&self.link, Err(error));
        }
    }

    /// Confirms the revokes whose streams are quiet.
    fn confirm(&mut self) {
        let unquiet = std::mem::take(&mut self.unquiet);
        for (id, gates) in unquiet {
            if gates.iter().all(|gate| gate.is_quiet()) {
                self.session().confirm_revoked(id);
            } else {
                self.unquiet.push((id, gates));
            }
        }
    }

    /// Keeps the session informed of whether anything is in flight.
    fn watch(&mut self, now: Timestamp) {
        if !self.session().is_established() {
            // One that is ending has nothing to be watched for.
            self.look_again = None;
            return;
        }
        let due = self.look_again.is_none_or(|at| at <= now);
        if self.active && !due {
            return;
        }
        let active = self.link.is_active();
        if active != self.active {
            self.active = active;
            self.session().set_active(active, now);
        }
        self.look_again = active.then(|| now + self.link.core.ping_interval());
    }
}

/// What an ended session means for those who used it.
pub(crate) fn close_error(reason: &CloseReason, address: &str) -> Error {
    let (kind, what) = match reason.code {
        WireCode::Closed if reason.by_peer && reason.established => {
            (ErrorKind::PeerReset, "the connection to the peer was lost".to_owned())
        }
        WireCode::Closed if reason.by_peer => (
            ErrorKind::PeerReset,
            "the peer closed the connection during the handshake; is it a kvferry agent?"
                .to_owned(),
        ),
        WireCode::Silent => {
            (ErrorKind::PeerSilent, "nothing was heard of the peer for too long".to_owned())
        }
        WireCode::Slept => (
            ErrorKind::PeerSilent,
            "this process was away for longer than peers wait; the session is void".to_owned(),
        ),
        WireCode::Shutdown if !reason.by_peer => {
            (ErrorKind::Shutdown, "the agent was shut down".to_owned())
        }
        code => (ErrorKind::from_wire(code), format!("{code}")),
    };
    let error = Error::new(kind, what).with("peer", address);
    if reason.detail.is_empty() { error } else { error.with("detail", &reason.detail) }
}

impl Handler for Control {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        if self.connecting {
            if cause.ready.any()
                && let Err(e) = self.socket.error()
            {
                self.link.core.counters.handshakes_failed.one();
                let error = Error::new(ErrorKind::Unreachable, "the peer can't be connected to")
                    .with("peer", &self.link.address)
                    .caused_by(e);
                self.end(error);
                return Next::Close;
            }
            if cause.ready.write {
                self.connecting = false;
                let _ = self.socket.set_nodelay();
            } else {
                // The handshake's deadline includes connecting.
                self.session().handle_timeout(cx.now);
                if self.events() {
                    return Next::Close;
                }
                let deadline = self.session().next_timeout();
                return Next::Wait { interest: Interest::Write, deadline };
            }
        }
        if self.admission.as_ref().is_some_and(|place| !place.is_held()) {
            // Its place was needed for somebody else.
            self.link.core.counters.handshakes_failed.one();
            return Next::Close;
        }
        self.session().handle_timeout(cx.now);
        if cause.ready.read || cause.ready.closed || cause.ready.peer_closed {
            self.receive(cx.now);
        }
        self.link.expire(cx.now);
        // Acting on an event may produce bytes and further events.
        let mut full;
        loop {
            if self.events() {
                // What is left to say is said if that needs no waiting.
                self.transmit(cx.now);
                return Next::Close;
            }
            self.confirm();
            self.watch(cx.now);
            full = self.transmit(cx.now);
            if !self.session().is_closed() {
                break;
            }
        }
        let (wants_read, session_timeout) = {
            let session = self.session();
            (session.wants_read(), session.next_timeout())
        };
        let quiet = (!self.unquiet.is_empty()).then(|| cx.now + QUIET_EVERY);
        let deadline = [session_timeout, self.link.next_deadline(), self.look_again, quiet]
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

impl Drop for Control {
    fn drop(&mut self) {
        // What the session's end did before is not done twice.
        self.end(Error::new(ErrorKind::Shutdown, "the agent was shut down"));
    }
}
