//! The listener, and finding out who calls.
//!
//! A connection that has not said who it is costs one of a fixed number of places, for seconds;
//! when all are taken, the oldest makes room. None of them can delay another: each is a handler of
//! its own, and reads only what is there.

use crate::agent::Core;
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::session::connect::NoLanes;
use crate::session::control::Control;
use crate::session::link::{InboundLane, Link, Native};
use crate::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use crate::transport::mooncake;
use crate::transport::tcp::{InboundStream, Tcp};
use kvferry_proto::message::{Refused, StreamReady, encode};
use kvferry_proto::{Handshakes, Message, Opener, Opening, Sniff, Sniffer, StreamHello, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

/// Connections accepted before others have their turn.
const ACCEPTS: usize = 64;

pub(crate) struct Listener {
    core: Weak<Core>,
    socket: Socket,
    pending: Arc<Mutex<Handshakes<u64>>>,
}

impl Listener {
    pub(crate) fn new(core: Weak<Core>, socket: Socket) -> Self {
        Self { core, socket, pending: Arc::new(Mutex::new(Handshakes::default())) }
    }
}

impl Handler for Listener {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(core) = self.core.upgrade() else { return Next::Close };
        for _ in 0..ACCEPTS {
            match self.socket.accept() {
                Ok((socket, from)) => {
                    let token = cx.remote.token();
                    let evicted = {
                        let mut pending =
                            self.pending.lock().unwrap_or_else(PoisonError::into_inner);
                        pending.admit(token, cx.now)
                    };
                    if let Some(evicted) = evicted {
                        // Its handler finds that it is not pending any more.
                        cx.remote.wake(evicted);
                    }
                    core.counters.handshakes_pending.one();
                    let greeter = Greeter {
                        core: Weak::clone(&self.core),
                        socket: Some(socket),
                        from,
                        pending: Arc::clone(&self.pending),
                        token,
                        state: Greeting::Sniffing(Sniffer::new()),
                        counted: true,
                    };
                    cx.remote.add(token, Box::new(greeter));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    // Out of descriptors, or a connection that is gone already.
                    tracing::warn!(error = %e, "a connection can't be accepted");
                    let later = cx.now + std::time::Duration::from_millis(50);
                    return Next::Wait { interest: Interest::None, deadline: Some(later) };
                }
            }
        }
        Next::Wait { interest: Interest::Read, deadline: None }
    }
}

enum Greeting {
    Sniffing(Sniffer),
    Opening(Opener),
    /// Who it is, and what else it said; acted on when the descriptor is not watched any more.
    Known(Known),
    Gone,
}

enum Known {
    Native(Opening),
    Mooncake(u64),
}

struct Greeter {
    core: Weak<Core>,
    socket: Option<Socket>,
    from: Option<SocketAddr>,
    pending: Arc<Mutex<Handshakes<u64>>>,
    token: u64,
    state: Greeting,
    counted: bool,
}

impl Greeter {
    fn name(&self) -> String {
        self.from.map_or_else(|| "unknown".to_owned(), |a| a.to_string())
    }

    fn step(&mut self) -> Option<Next> {
        let socket = self.socket.as_ref().expect("there until detached");
        let mut buffer = [0u8; 4096];
        let want = match &self.state {
            Greeting::Sniffing(sniffer) => sniffer.wanted(),
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
            Greeting::Sniffing(sniffer) => match sniffer.feed(&buffer[..n]) {
                Sniff::NeedMore => None,
                Sniff::Native => {
                    self.state = Greeting::Opening(Opener::new());
                    None
                }
                Sniff::Mooncake => {
                    self.state = Greeting::Known(Known::Mooncake(sniffer.mooncake_len()));
                    Some(Next::Detach)
                }
                Sniff::Unknown => {
                    tracing::debug!(peer = %self.name(), "a connection speaks no known protocol");
                    Some(Next::Close)
                }
            },
            Greeting::Opening(opener) => match opener.feed(&buffer[..n]) {
                Ok(None) => None,
                Ok(Some(opening)) => {
                    self.state = Greeting::Known(Known::Native(opening));
                    Some(Next::Detach)
                }
                Err(code) => {
                    refuse(socket, code, "");
                    Some(Next::Close)
                }
            },
            Greeting::Known(_) | Greeting::Gone => Some(Next::Close),
        }
    }

    /// No longer unknown. False if it was evicted meanwhile.
    fn leave(&mut self) -> bool {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).done(&self.token)
    }
}

fn refuse(socket: &Socket, code: WireCode, detail: &str) {
    let refused = Refused { code, detail: detail.to_owned(), aux: 0 };
    // The first bytes on this connection from us: they fit the socket's buffer.
    let _ = socket.send(&encode(&Message::Refused(refused)));
}

impl Handler for Greeter {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        // The whole list is looked at by whoever is called: at most a few hundred entries.
        {
            let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
            while let Some(late) = pending.pop_expired(cx.now) {
                if late == self.token {
                    return Next::Close;
                }
                cx.remote.wake(late);
            }
            if !pending.contains(&self.token) {
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
                    let pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
                    return Next::Wait { interest, deadline: pending.next_timeout() };
                }
                Some(other) => return other,
            }
        }
    }

    fn detached(mut self: Box<Self>, cx: &Cx<'_>) {
        let Some(core) = self.core.upgrade() else { return };
        if !self.leave() {
            return;
        }
        let socket = self.socket.take().expect("taken only here");
        crate::session::prepare(&socket);
        match std::mem::replace(&mut self.state, Greeting::Gone) {
            Greeting::Known(Known::Native(Opening::Session { bytes })) => {
                // Stays pending, under the same token, until the handshake has ended.
                let now_pending = {
                    let mut pending = self.pending.lock().unwrap_or_else(PoisonError::into_inner);
                    pending.admit(self.token, cx.now)
                };
                if let Some(evicted) = now_pending {
                    cx.remote.wake(evicted);
                }
                self.counted = false;
                let admission = Admission {
                    core: Weak::clone(&self.core),
                    pending: Arc::clone(&self.pending),
                    token: self.token,
                };
                accept_session(&core, socket, self.from, admission, &bytes);
            }
            Greeting::Known(Known::Native(Opening::Stream { hello, rest })) => {
                accept_stream(&core, socket, &hello, rest);
            }
            Greeting::Known(Known::Mooncake(len)) => {
                mooncake::greet(&core, socket, len, cx);
            }
            Greeting::Sniffing(_) | Greeting::Opening(_) | Greeting::Gone => {}
        }
    }
}

impl Drop for Greeter {
    fn drop(&mut self) {
        if !self.counted {
            // The place went over to the session's `Admission`, under the same token.
            return;
        }
        self.leave();
        if let Some(core) = self.core.upgrade() {
            core.counters.handshakes_pending.less_one();
        }
    }
}

/// One of the places that connections have until they proved who they are; given up on drop.
pub(crate) struct Admission {
    core: Weak<Core>,
    pending: Arc<Mutex<Handshakes<u64>>>,
    token: u64,
}

impl Admission {
    /// Whether the place was not given to somebody else.
    pub(crate) fn is_held(&self) -> bool {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).contains(&self.token)
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        self.pending.lock().unwrap_or_else(PoisonError::into_inner).done(&self.token);
        if let Some(core) = self.core.upgrade() {
            core.counters.handshakes_pending.less_one();
        }
    }
}

fn accept_session(
    core: &Arc<Core>,
    socket: Socket,
    from: Option<SocketAddr>,
    admission: Admission,
    bytes: &[u8],
) {
    let Some(from) = from else { return };
    let here = socket.local_addr().ok();
    let session = match core.new_session_acceptor(from, here) {
        Ok(session) => session,
        Err(e) => {
            tracing::error!(error = %e, "a session can't be accepted");
            return;
        }
    };
    let token = admission.token;
    let native = Native {
        session: Mutex::new(session),
        token,
        info: OnceLock::new(),
        inbound: Mutex::default(),
        revokes: Mutex::default(),
        requests: Mutex::default(),
    };
    let link = Link::new(
        Arc::clone(core),
        from.to_string(),
        from,
        Arc::new(Tcp),
        Some(native),
        None,
        Arc::new(NoLanes),
    );
    {
        let native = link.native.as_ref().expect("made above");
        native.session.lock().unwrap_or_else(PoisonError::into_inner).receive(bytes, now());
    }
    core.control.add(token, Box::new(Control::acceptor(link, socket, admission)));
}

/// The session that a new connection proves to belong to.
pub(crate) fn verify_stream(core: &Core, hello: &StreamHello) -> Result<Arc<Link>, WireCode> {
    let verdict = core.accepted(hello.session).ok_or(WireCode::UnknownSession).and_then(|link| {
        let native = link.native.as_ref().expect("accepted sessions are native");
        let mut session = native.session.lock().unwrap_or_else(PoisonError::into_inner);
        let verdict = session.verify_stream(hello);
        drop(session);
        verdict.map(|()| link)
    });
    verdict.inspect_err(|code| {
        core.counters.handshakes_failed.one();
        tracing::warn!(session = %hello.session, %code, "a stream was refused");
    })
}

fn accept_stream(core: &Arc<Core>, socket: Socket, hello: &StreamHello, rest: Vec<u8>) {
    let link = match verify_stream(core, hello) {
        Ok(link) => link,
        Err(code) => return refuse(&socket, code, ""),
    };
    let native = link.native.as_ref().expect("accepted sessions are native");
    let gate = core.gates.gate();
    let socket = Arc::new(socket);
    {
        let mut inbound = native.inbound.lock().unwrap_or_else(PoisonError::into_inner);
        if link.end().is_some() {
            return;
        }
        let lane = InboundLane { socket: Some(Arc::clone(&socket)), gate: Arc::clone(&gate) };
        inbound.insert(hello.stream, lane);
    }
    if socket.send(&encode(&Message::StreamReady(StreamReady {}))).is_err() {
        gate.shut();
        link.forget_inbound(hello.stream);
        return;
    }
    let stream = InboundStream::new(link, hello.stream, socket, gate, rest);
    let remote = core.io_thread();
    remote.add(remote.token(), Box::new(stream));
}
