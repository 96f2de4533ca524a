//! Opens a data stream of a native session: connects, proves the session's key, gives the lane to the
//! link.

use crate::error::{Error, ErrorKind};
use crate::host::{keep_alive, prepare};
use crate::reactor::{Cause, Cx, Handler, Next};
use crate::session::native::Native;
use crate::session::search::{LOST_MAX, backoff};
use crate::sync::Arc;
use crate::transfer::lanes::Lane;
use crate::transfer::link::{Link, unreachable_peer};
use kvferry_proto::message::Decoder;
use kvferry_proto::{Message, PREAUTH_MAX, StreamId, Timestamp, WireCode};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};

/// Number of further attempts to open a lane if the peer has no place for another connection.
const BUSY_RETRIES: u32 = 8;

/// Opens one lane. The link gets the lane or the error.
pub(super) fn open(native: &Arc<Native>, link: &Arc<Link>) {
    dial(native, link, 0);
}

fn dial(native: &Arc<Native>, link: &Arc<Link>, tries: u32) {
    let Some((id, hello)) = native.session().stream_hello() else {
        let ended = link.session_end().unwrap_or_else(|| {
            Error::new(ErrorKind::Internal, "the session has no stream number left")
        });
        return link.lanes.failed(&ended);
    };
    match Socket::connect(link.peer_addr) {
        Ok(socket) => {
            let control = &link.core.threads.control;
            let dial = Dial {
                native: Arc::clone(native),
                link: Arc::clone(link),
                id,
                socket: Some(socket),
                hello,
                sent: 0,
                connected: false,
                decoder: Decoder::new(PREAUTH_MAX),
                deadline: None,
                tries,
                done: false,
            };
            control.add(control.token(), Box::new(dial));
        }
        Err(e) => link.lanes.failed(&unreachable_peer(e).with("peer", &link.address)),
    }
}

/// A data stream being opened.
struct Dial {
    native: Arc<Native>,
    link: Arc<Link>,
    id: StreamId,
    socket: Option<Socket>,
    hello: Vec<u8>,
    sent: usize,
    connected: bool,
    decoder: Decoder,
    deadline: Option<Timestamp>,
    /// Failed attempts before this one.
    tries: u32,
    done: bool,
}

impl Dial {
    /// Dials again after a back-off, at most `retries` times; then fails with `error`.
    fn retry(&mut self, error: Error, retries: u32, now: Timestamp) -> Next {
        if self.tries >= retries || self.link.end().is_some() {
            return self.fail(error);
        }
        self.done = true;
        let tries = self.tries + 1;
        let at = now + backoff(tries, now.as_nanos() ^ u64::from(self.id.0));
        let (native, link) = (Arc::clone(&self.native), Arc::clone(&self.link));
        let redial = Redial { native, link, tries, at, done: false };
        let control = &self.link.core.threads.control;
        control.add(control.token(), Box::new(redial));
        Next::Close
    }

    fn fail(&mut self, error: Error) -> Next {
        self.done = true;
        self.link.lanes.failed(&error.with("peer", &self.link.address));
        Next::Close
    }

    fn lost(&mut self, e: io::Error) -> Next {
        let error = self.lost_error(e);
        self.fail(error)
    }

    /// Tries again after the peer accepted the connection and closed it without an answer.
    fn closed_unanswered(&mut self, e: io::Error, now: Timestamp) -> Next {
        let error = self.lost_error(e);
        self.retry(error, LOST_MAX, now)
    }

    /// Whether an answer is the peer's, as far as the session can tell.
    fn is_peers(&self, code: WireCode, mac: Option<&[u8]>) -> bool {
        self.native.session().is_stream_answer(self.id, code, mac)
    }

    fn lost_error(&self, e: io::Error) -> Error {
        self.link.end().cloned().unwrap_or_else(|| {
            Error::new(ErrorKind::PeerReset, "the peer closed a stream while it was opened")
                .caused_by(e)
        })
    }
}

impl Handler for Dial {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.socket.as_ref().map(AsFd::as_fd)
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        // A peer that says nothing at all ends the session before that, at the silence limit.
        let patience = 2 * self.link.core.settings.handshake_timeout();
        let deadline = *self.deadline.get_or_insert(cx.now + patience);
        let socket = self.socket.as_ref().expect("there until detached");
        if let Some(end) = self.link.end() {
            let end = end.clone();
            return self.fail(end);
        }
        if cx.now >= deadline {
            return self.fail(Error::new(
                ErrorKind::Deadline,
                "the peer did not answer the opening of a stream in time",
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
            if let Err(e) = self.link.core.users.check_target(socket) {
                // The session says the same of its own end. A connection that was lost may be opened again.
                let retries = if e.kind() == ErrorKind::PeerReset { LOST_MAX } else { 0 };
                return self.retry(e, retries, cx.now);
            }
            self.connected = true;
            prepare(socket);
            keep_alive(socket, self.link.core.settings.silence);
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
            // One byte at a time: bytes after the answer belong to the stream.
            match socket.recv(&mut buffer) {
                Ok(0) => {
                    return self.closed_unanswered(io::ErrorKind::UnexpectedEof.into(), cx.now);
                }
                Ok(_) => match self.decoder.read(&mut &buffer[..]) {
                    Ok(None) => {}
                    Ok(Some(Message::StreamReady(ready)))
                        if !self.is_peers(WireCode::Ok, ready.mac.as_deref()) =>
                    {
                        let what = "the answer to the opening of a stream is not the peer's";
                        return self.fail(Error::new(ErrorKind::from_wire(WireCode::Forged), what));
                    }
                    Ok(Some(Message::Refused(refused)))
                        if !self.is_peers(refused.code, refused.mac.as_deref()) =>
                    {
                        // Anybody can say that. It is worth no more than a reset.
                        let what = io::ErrorKind::ConnectionReset.into();
                        return self.closed_unanswered(what, cx.now);
                    }
                    Ok(Some(Message::StreamReady(_))) => {
                        self.done = true;
                        return Next::Detach;
                    }
                    Ok(Some(Message::Refused(refused))) => {
                        let kind = ErrorKind::from_wire(refused.code);
                        let what = match refused.code {
                            WireCode::Unsupported => match self.link.lane_kind() {
                                Some(kind) => format!("the peer does not allow {kind}"),
                                None => "the peer does not allow data streams".to_owned(),
                            },
                            code => format!("the peer refused a stream: {code}"),
                        };
                        let busy = refused.code == WireCode::Busy;
                        let retries = if busy { BUSY_RETRIES } else { 0 };
                        return self.retry(Error::new(kind, what), retries, cx.now);
                    }
                    Ok(Some(_)) | Err(_) => {
                        return self.fail(Error::new(
                            ErrorKind::Protocol,
                            "unexpected answer of the peer to the opening of a stream",
                        ));
                    }
                },
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return wait(Interest::Read),
                Err(e) => return self.closed_unanswered(e, cx.now),
            }
        }
    }

    fn detached(mut self: Box<Self>, _cx: &Cx<'_>) {
        let socket = self.socket.take().expect("taken only here");
        let gate = self.link.core.memory.gates.gate();
        let Some(guard) = self.native.session().stream_guard(self.id) else {
            let ended = self.link.session_end().unwrap_or_else(|| {
                Error::new(ErrorKind::PeerClosed, "the session ended while a stream was opened")
            });
            return self.link.lanes.failed(&ended);
        };
        self.link.lane_opened(Lane::new(self.id, socket, gate, guard));
    }
}

impl Drop for Dial {
    fn drop(&mut self) {
        if !self.done {
            self.link.lanes.failed(&Error::shutdown());
        }
    }
}

/// Dials a lane again at a later time.
struct Redial {
    native: Arc<Native>,
    link: Arc<Link>,
    tries: u32,
    at: Timestamp,
    done: bool,
}

impl Handler for Redial {
    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        if cx.now < self.at {
            return Next::Wait { interest: Interest::None, deadline: Some(self.at) };
        }
        self.done = true;
        dial(&self.native, &self.link, self.tries);
        Next::Close
    }
}

impl Drop for Redial {
    fn drop(&mut self) {
        if !self.done {
            self.link.lanes.failed(&Error::shutdown());
        }
    }
}
