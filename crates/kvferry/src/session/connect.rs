//! Meeting a peer: one attempt at a time per peer, whoever asks; and opening lanes to it.

use crate::agent::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::session::control::Control;
use crate::session::link::{Lane, Link, Native, OpenLane};
use crate::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use crate::transfer::drive::{Interrupt, Slot};
use crate::transport::tcp::Tcp;
use crate::transport::{Approach, mooncake};
use kvferry_proto::message::Decoder;
use kvferry_proto::{Message, PREAUTH_MAX, StreamId, Timestamp};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};

/// Called with a link, or with why there is none; exactly once.
pub(crate) type LinkGiven = Box<dyn FnOnce(Result<Arc<Link>>) + Send>;

/// A peer's address and what leads there now.
pub(crate) struct PeerState {
    core: Weak<Core>,
    pub(crate) address: String,
    addrs: Vec<SocketAddr>,
    status: Mutex<Status>,
}

enum Status {
    Idle,
    Meeting(Vec<LinkGiven>),
    Live(Arc<Link>),
}

impl std::fmt::Debug for PeerState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PeerState[{}]", self.address)
    }
}

impl PeerState {
    pub(crate) fn new(core: &Arc<Core>, address: String, addrs: Vec<SocketAddr>) -> Arc<Self> {
        Arc::new(Self {
            core: Arc::downgrade(core),
            address,
            addrs,
            status: Mutex::new(Status::Idle),
        })
    }

    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The live link, if there is one.
    pub(crate) fn live(&self) -> Option<Arc<Link>> {
        match &*self.status() {
            Status::Live(link) if link.end().is_none() => Some(Arc::clone(link)),
            _ => None,
        }
    }

    /// Forgets the live link, and returns it.
    pub(crate) fn take_live(&self) -> Option<Arc<Link>> {
        let mut status = self.status();
        match std::mem::replace(&mut *status, Status::Idle) {
            Status::Live(link) => Some(link),
            other => {
                *status = other;
                None
            }
        }
    }

    /// Asks for a link; `give` may be called at once, on this thread.
    pub(crate) fn link(self: &Arc<Self>, give: LinkGiven) {
        let Some(core) = self.core.upgrade() else {
            return give(Err(Error::new(ErrorKind::Shutdown, "the agent was shut down")));
        };
        let mut status = self.status();
        match &mut *status {
            Status::Live(link) if link.end().is_none() => {
                let link = Arc::clone(link);
                drop(status);
                give(Ok(link));
            }
            Status::Meeting(waiting) => waiting.push(give),
            Status::Idle | Status::Live(_) => {
                *status = Status::Meeting(vec![give]);
                drop(status);
                self.meet(&core, 0);
            }
        }
    }

    /// Asks for a link and waits for it.
    pub(crate) fn wait_link(
        self: &Arc<Self>,
        deadline: Timestamp,
        interrupt: Interrupt<'_>,
    ) -> Result<Arc<Link>> {
        if let Some(link) = self.live() {
            return Ok(link);
        }
        let slot = Slot::new();
        let fill = Arc::clone(&slot);
        self.link(Box::new(move |link| fill.fill(link)));
        slot.wait(deadline, interrupt)
            .and_then(|link| link)
            .map_err(|e| e.with("peer", &self.address))
    }

    /// Tries the peer's addresses in turn, from number `at` on.
    fn meet(self: &Arc<Self>, core: &Arc<Core>, at: usize) {
        match core.approach {
            Approach::Native => self.meet_native(core, at),
            Approach::Mooncake | Approach::Either => mooncake::meet(core, self, at),
        }
    }

    /// By the native handshake.
    pub(crate) fn meet_native(self: &Arc<Self>, core: &Arc<Core>, at: usize) {
        let addr = self.addrs[at];
        let token = core.control.token();
        let begun = core.new_session_initiator(addr).and_then(|session| {
            let socket =
                Socket::connect(addr).map_err(|e| unreachable_peer(e).with("address", addr))?;
            Ok((session, socket))
        });
        let (session, socket) = match begun {
            Ok(both) => both,
            Err(e) => return self.met(core, at, Err(e)),
        };
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
            self.address.clone(),
            addr,
            Arc::new(Tcp),
            Some(native),
            None,
            Arc::new(NativeLanes),
        );
        let state = Arc::clone(self);
        let met = Box::new(move |link: &Arc<Link>, result: Result<(), Error>| {
            state.met(&link.core, at, result.map(|()| Arc::clone(link)));
        });
        core.control.add(token, Box::new(Control::initiator(link, socket, met)));
    }

    /// How an attempt went. An address that can't be connected to leads to the next one; a peer
    /// that answered and refused does not.
    pub(crate) fn met(self: &Arc<Self>, core: &Arc<Core>, at: usize, result: Result<Arc<Link>>) {
        if let Err(e) = &result
            && e.kind() == ErrorKind::Unreachable
            && at + 1 < self.addrs.len()
            && !core.is_closed()
        {
            return self.meet(core, at + 1);
        }
        if result.is_err() {
            core.forget_addresses(&self.address);
        }
        let waiting = {
            let mut status = self.status();
            let next = match &result {
                Ok(link) => Status::Live(Arc::clone(link)),
                Err(_) => Status::Idle,
            };
            match std::mem::replace(&mut *status, next) {
                Status::Meeting(waiting) => waiting,
                Status::Idle | Status::Live(_) => Vec::new(),
            }
        };
        for give in waiting {
            give(result.clone());
        }
    }

    pub(crate) fn addr(&self, at: usize) -> SocketAddr {
        self.addrs[at]
    }
}

pub(crate) fn unreachable_peer(e: io::Error) -> Error {
    Error::new(ErrorKind::Unreachable, "the peer can't be connected to").caused_by(e)
}

/// For links whose other side opens the lanes.
pub(crate) struct NoLanes;

impl OpenLane for NoLanes {
    fn open_lane(&self, link: &Arc<Link>) {
        link.lane_failed(&Error::new(ErrorKind::Unsupported, "the peer opens the streams here"));
    }
}

/// Opens data streams of a native session.
struct NativeLanes;

impl OpenLane for NativeLanes {
    fn open_lane(&self, link: &Arc<Link>) {
        let native = link.native.as_ref().expect("lanes of a native link");
        let hello = {
            let mut session = native.session.lock().unwrap_or_else(PoisonError::into_inner);
            session.stream_hello()
        };
        let Some((id, hello)) = hello else {
            let ended = link.session_end().unwrap_or_else(|| {
                Error::new(ErrorKind::Internal, "the session has no stream left to give")
            });
            return link.lane_failed(&ended);
        };
        match Socket::connect(link.peer_addr) {
            Ok(socket) => {
                let core = &link.core;
                let dial = Dial {
                    link: Arc::clone(link),
                    id,
                    socket: Some(socket),
                    hello,
                    sent: 0,
                    connected: false,
                    decoder: Decoder::new(PREAUTH_MAX),
                    deadline: None,
                    done: false,
                };
                core.control.add(core.control.token(), Box::new(dial));
            }
            Err(e) => link.lane_failed(&unreachable_peer(e).with("peer", &link.address)),
        }
    }
}

/// A data stream being opened.
struct Dial {
    link: Arc<Link>,
    id: StreamId,
    socket: Option<Socket>,
    hello: Vec<u8>,
    sent: usize,
    connected: bool,
    decoder: Decoder,
    deadline: Option<Timestamp>,
    done: bool,
}

impl Dial {
    fn fail(&mut self, error: Error) -> Next {
        self.done = true;
        self.link.lane_failed(&error.with("peer", &self.link.address));
        Next::Close
    }

    fn lost(&mut self, e: io::Error) -> Next {
        let error = match self.link.end() {
            Some(end) => end.clone(),
            None => Error::new(ErrorKind::PeerReset, "a stream to the peer can't be opened")
                .caused_by(e),
        };
        self.fail(error)
    }
}

impl Handler for Dial {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        let deadline = *self.deadline.get_or_insert(cx.now + self.link.core.handshake_timeout());
        let socket = self.socket.as_ref().expect("there until detached");
        if let Some(end) = self.link.end() {
            let end = end.clone();
            return self.fail(end);
        }
        if cx.now >= deadline {
            return self.fail(Error::new(
                ErrorKind::Deadline,
                "a stream to the peer did not open in time",
            ));
        }
        let wait = |interest| Next::Wait { interest, deadline: Some(deadline) };
        if !self.connected {
            if !cause.ready.any() {
                return wait(Interest::Write);
            }
            if let Err(e) = socket.error() {
                return self.lost(e);
            }
            self.connected = true;
            crate::session::prepare(socket);
        }
        while self.sent < self.hello.len() {
            match socket.send(&self.hello[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return wait(Interest::Write),
                Err(e) => return self.lost(e),
            }
        }
        let mut buffer = [0u8; 1];
        loop {
            // A byte at a time: what follows the answer is the stream's.
            match socket.recv(&mut buffer) {
                Ok(0) => return self.lost(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => match self.decoder.read(&mut &buffer[..]) {
                    Ok(None) => {}
                    Ok(Some(Message::StreamReady(_))) => {
                        self.done = true;
                        return Next::Detach;
                    }
                    Ok(Some(Message::Refused(refused))) => {
                        let kind = ErrorKind::from_wire(refused.code);
                        return self.fail(Error::new(
                            kind,
                            format!("the peer refused a stream: {}", refused.code),
                        ));
                    }
                    Ok(Some(_)) | Err(_) => {
                        return self.fail(Error::new(
                            ErrorKind::Protocol,
                            "the peer answered a stream's opening with something else",
                        ));
                    }
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return wait(Interest::Read),
                Err(e) => return self.lost(e),
            }
        }
    }

    fn detached(mut self: Box<Self>, _cx: &Cx<'_>) {
        let socket = self.socket.take().expect("taken only here");
        let gate = self.link.core.gates.gate();
        self.link.lane_opened(Lane::new(self.id, socket, gate));
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        if !self.done {
            let end = Error::new(ErrorKind::Shutdown, "the agent was shut down");
            self.link.lane_failed(&end);
        }
    }
}
