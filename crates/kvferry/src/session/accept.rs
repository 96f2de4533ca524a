//! The listener: accepts connections and detects their protocol.
//!
//! A connection that is not authenticated yet holds one of 256 places, for at most the handshake
//! timeout. While all places are held, new connections wait ([`WaitingRoom`]), until a handshake ends or a
//! connection has held its place long enough to lose it ([`Handshakes::room_at`]). Networks take turns, so
//! that a host that keeps connecting does not keep others out. Each connection has its own handler and never blocks, so a slow
//! connection does not delay others.

use crate::host::{keep_alive, keep_control_alive, prepare};
use crate::quota;
use crate::reactor::{ACCEPTS_PER_CALL, Cause, Cx, Handler, Next, now};
use crate::session::admission::{Admission, Places, refuse, refuse_full, refuse_with};
use crate::session::control::Control;
use crate::session::native::{Full, InboundLane, Native};
use crate::session::sessions::Sessions;
use crate::sync::{Arc, Weak};
use crate::transfer::link::{Backend, Link};
use crate::transport::service::AcceptedStream;
use kvferry_proto::message::{StreamReady, encode};
use kvferry_proto::{
    Handshakes, Message, Opener, Opening, Origin, PENDING_MAX, Session, Sniff, Sniffer,
    StreamHello, Timestamp, WAITING_ROOM_MAX, WaitingRoom, WireCode,
};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};

pub(crate) struct Listener {
    sessions: Weak<Sessions>,
    socket: Socket,
    places: Arc<Places>,
    waiting: WaitingRoom<(Socket, Option<SocketAddr>)>,
}

impl Listener {
    /// `token` is the listener's own on the control thread.
    pub(crate) fn new(sessions: &Arc<Sessions>, socket: Socket, token: u64) -> Self {
        let core = &sessions.core;
        let pending = Handshakes::new(PENDING_MAX, core.settings.handshake_timeout());
        let places = Places::new(core.threads.control.clone(), token, pending);
        let room = WAITING_ROOM_MAX.min(quota::quarter() / 2);
        Self {
            sessions: Arc::downgrade(sessions),
            socket,
            places: Arc::new(places),
            waiting: WaitingRoom::new(room, core.settings.handshake_timeout()),
        }
    }

    /// Gives a connection a place. There is one.
    fn admit(
        &self,
        sessions: &Sessions,
        (socket, from): (Socket, Option<SocketAddr>),
        now: Timestamp,
        cx: &Cx<'_>,
    ) {
        let token = cx.remote.token();
        let evicted = self.places.state().pending.admit(token, now);
        if let Some(evicted) = evicted {
            // Its handler closes it: it does not hold a place any more.
            cx.remote.wake(evicted);
        }
        sessions.core.counters.handshakes_pending.one();
        let connection = NewConnection {
            sessions: Weak::clone(&self.sessions),
            socket: Some(socket),
            from,
            places: Arc::clone(&self.places),
            token,
            state: State::Sniffing(Sniffer::new()),
            counted: true,
        };
        cx.remote.add(token, Box::new(connection));
    }

    /// Gives the connections that wait the places that are free. Returns when there is a place for the
    /// next one.
    fn admit_waiting(
        &mut self,
        sessions: &Sessions,
        now: Timestamp,
        cx: &Cx<'_>,
    ) -> Option<Timestamp> {
        while !self.waiting.is_empty() {
            if let Some(until) = self.places.wait_until(now) {
                return Some(until);
            }
            let connection = self.waiting.pop(now)?;
            self.admit(sessions, connection, now, cx);
        }
        None
    }
}

impl Handler for Listener {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(sessions) = self.sessions.upgrade() else { return Next::Close };
        let mut next_place = self.admit_waiting(&sessions, cx.now, cx);
        for _ in 0..ACCEPTS_PER_CALL {
            match self.socket.accept() {
                Ok((socket, from)) => {
                    let address = from.map_or(Ipv4Addr::UNSPECIFIED.into(), |from| from.ip());
                    let origin = Origin::from(address);
                    // The peer may have called after this turn began: its whole time counts from here.
                    let accepted = now();
                    if let Some((refused, _)) = self.waiting.push(origin, (socket, from), accepted)
                    {
                        refuse(&refused, WireCode::Busy, "");
                        sessions.core.counters.handshakes_failed.one();
                    }
                    next_place = self.admit_waiting(&sessions, accepted, cx);
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    // The process has no descriptor left, or the peer closed the connection.
                    warn_limited!(error = %e, "can't accept a connection; trying again in 50 ms");
                    let later = cx.now + std::time::Duration::from_millis(50);
                    let deadline = Some(next_place.map_or(later, |at| at.min(later)));
                    return Next::Wait { interest: Interest::None, deadline };
                }
            }
        }
        Next::Wait { interest: Interest::Read, deadline: next_place }
    }
}

enum State {
    /// Reading the first eight bytes.
    Sniffing(Sniffer),
    /// The native protocol: reading the opening message.
    Opening(Opener),
    // The protocol is known. The connection is handed over when the reactor has detached its
    // descriptor.
    Native(Opening),
    /// A transport's protocol. The first eight bytes, as a little-endian integer.
    Foreign(u64),
    HandedOver,
}

/// A connection that was accepted and whose purpose is not known yet.
struct NewConnection {
    sessions: Weak<Sessions>,
    socket: Option<Socket>,
    from: Option<SocketAddr>,
    places: Arc<Places>,
    token: u64,
    state: State,
    /// Counted in `handshakes_pending` by this value, not by its [`Admission`].
    counted: bool,
}

impl NewConnection {
    fn name(&self) -> String {
        self.from.map_or_else(|| "unknown".to_owned(), |a| a.to_string())
    }

    fn step(&mut self) -> Option<Next> {
        let socket = self.socket.as_ref().expect("there until detached");
        let mut buffer = [0u8; 4096];
        let want = match &self.state {
            State::Sniffing(sniffer) => sniffer.wanted(),
            _ => buffer.len(),
        };
        let n = match socket.recv(&mut buffer[..want]) {
            Ok(0) => return Some(Next::Close),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                return Some(Next::Wait { interest: Interest::Read, deadline: None });
            }
            Err(_) => return Some(Next::Close),
        };
        match &mut self.state {
            State::Sniffing(sniffer) => match sniffer.feed(&buffer[..n]) {
                Sniff::NeedMore => None,
                Sniff::Native => {
                    self.state = State::Opening(Opener::new());
                    None
                }
                Sniff::Foreign => {
                    let first = sniffer.first();
                    let sessions = self.sessions.upgrade()?;
                    if sessions.services().speaking(first).is_none() {
                        tracing::debug!(
                            peer = %self.name(),
                            "closed a connection: no transport serves its protocol"
                        );
                        return Some(Next::Close);
                    }
                    self.state = State::Foreign(first);
                    Some(Next::Detach)
                }
            },
            State::Opening(opener) => match opener.feed(&buffer[..n]) {
                Ok(None) => None,
                Ok(Some(opening)) => {
                    self.state = State::Native(opening);
                    Some(Next::Detach)
                }
                Err(code) => {
                    refuse(socket, code, "");
                    Some(Next::Close)
                }
            },
            State::Native(_) | State::Foreign(_) | State::HandedOver => Some(Next::Close),
        }
    }
}

impl Handler for NewConnection {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        // Each connection checks all of them for expiry: at most 256.
        {
            let pending = &mut self.places.state().pending;
            while let Some(late) = pending.pop_expired(cx.now) {
                if late == self.token {
                    return Next::Close;
                }
                cx.remote.wake(late);
            }
            if !pending.contains(&self.token) {
                if matches!(self.state, State::Opening(_)) {
                    refuse(self.socket.as_ref().expect("there until detached"), WireCode::Busy, "");
                }
                return Next::Close;
            }
        }
        if cause.ready.closed {
            return Next::Close;
        }
        loop {
            match self.step() {
                None => {}
                Some(Next::Wait { interest, .. }) => {
                    let pending = &mut self.places.state().pending;
                    pending.waits(&self.token);
                    return Next::Wait { interest, deadline: pending.next_timeout() };
                }
                Some(other) => return other,
            }
        }
    }

    fn detached(mut self: Box<Self>, cx: &Cx<'_>) {
        let Some(sessions) = self.sessions.upgrade() else { return };
        let socket = self.socket.take().expect("taken only here");
        prepare(&socket);
        let state = std::mem::replace(&mut self.state, State::HandedOver);
        let is_stream = matches!(state, State::Native(Opening::Stream { .. }));
        if !is_stream && !sessions.core.users.admits(&socket) {
            warn_limited!(peer = %self.name(), "refused a connection of another user of this host; set a secret");
            sessions.core.counters.handshakes_failed.one();
            if matches!(state, State::Native(_)) {
                refuse(
                    &socket,
                    WireCode::AccessDenied,
                    "the agent has no secret, and belongs to another user",
                );
            }
            return;
        }
        if let State::Native(Opening::Session { bytes }) = state {
            // The session keeps the place, under the same token, until its handshake ends.
            let Some(until) = self.places.state().pending.spoke(&self.token) else {
                return refuse(&socket, WireCode::Busy, "");
            };
            self.counted = false;
            let admission = Admission::new(&sessions.core, &self.places, self.token, until);
            return accept_session(&sessions, socket, self.from, admission, &bytes);
        }
        let has_place = self.places.leave(self.token);
        match state {
            State::Native(Opening::Stream { .. }) if !has_place => {
                refuse(&socket, WireCode::Busy, "");
            }
            _ if !has_place => {}
            State::Native(Opening::Stream { hello, rest }) => {
                accept_stream(&sessions, socket, &hello, rest);
            }
            State::Foreign(first) => {
                if let Some(service) = sessions.services().speaking(first) {
                    service.accept(socket, first, cx);
                }
            }
            _ => {}
        }
    }
}

impl Drop for NewConnection {
    fn drop(&mut self) {
        if !self.counted {
            // The session's `Admission` owns the place.
            return;
        }
        self.places.leave(self.token);
        if let Some(sessions) = self.sessions.upgrade() {
            sessions.core.counters.handshakes_pending.less_one();
        }
    }
}

fn accept_session(
    sessions: &Arc<Sessions>,
    socket: Socket,
    from: Option<SocketAddr>,
    admission: Admission,
    bytes: &[u8],
) {
    let Some(from) = from else { return };
    keep_control_alive(&socket, sessions.core.settings.silence);
    // Only a peer that has proved the secret gets a place: when its handshake is complete.
    if !sessions.core.quota.has_session() && !sessions.has_place_for(from.ip()) {
        return refuse_full(&sessions.core, &socket, from, "sessions", None);
    }
    let here = socket.local_addr().ok();
    let left = admission.until().saturating_since(now());
    let session = match sessions.new_session_acceptor(from, here, left) {
        Ok(session) => session,
        Err(e) => {
            tracing::error!(error = %e, "can't accept a session");
            return;
        }
    };
    let token = admission.token();
    let socket = Arc::new(socket);
    let native = Native::new(session, &socket, token);
    native.session().receive(bytes, now());
    let (core, backend) = (&sessions.core, Arc::clone(&native) as _);
    let permits_max = core.sizing.permits_max(from);
    let link = Link::new(Arc::clone(core), from.to_string(), from, backend, permits_max);
    let control = Control::acceptor(sessions, link, native, socket, admission);
    core.threads.control.add(token, Box::new(control));
}

fn accept_stream(sessions: &Sessions, socket: Socket, hello: &StreamHello, early: Vec<u8>) {
    let (link, native) = match sessions.session_of(hello, Session::verify_stream) {
        Ok(session) => session,
        Err(code) => return refuse(&socket, code, ""),
    };
    let answer = |code| native.session().stream_answer(hello.stream, code);
    let Some(streams) = sessions.services().streams() else {
        let code = WireCode::Unsupported;
        return refuse_with(&socket, code, "", answer(code));
    };
    let core = &sessions.core;
    let Some(guard) = native.session().stream_guard(hello.stream) else {
        return refuse(&socket, WireCode::UnknownSession, "");
    };
    keep_alive(&socket, core.settings.silence);
    let gate = core.memory.gates.gate();
    let socket = Arc::new(socket);
    let lane = InboundLane { socket: Some(Arc::clone(&socket)), gate: Arc::clone(&gate) };
    let permit = match native.add_inbound(hello.stream, lane, &sessions.core.quota) {
        Some(Ok(permit)) => permit,
        Some(Err(Full)) => {
            let mac = answer(WireCode::Busy);
            return refuse_full(core, &socket, link.peer_addr, "streams", mac);
        }
        None => return,
    };
    let ready = StreamReady { mac: answer(WireCode::Ok) };
    if socket.send(&encode(&Message::StreamReady(ready))).is_err() {
        gate.shut();
        native.inbound_ended(hello.stream);
        return;
    }
    streams.accept(AcceptedStream { link, id: hello.stream, socket, gate, guard, early, permit });
}
