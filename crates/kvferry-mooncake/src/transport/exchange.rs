//! The initiator's side of the handshake: connects, sends one frame, reads one.

use super::wire::{ANSWER_MAX, Kind, LENGTH, split};
use kvferry::transport::{Cause, Core, Cx, Handler, Next, now, unreachable_peer};
use kvferry::{Error, ErrorKind};
use kvferry_proto::Timestamp;
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Bytes read at a time.
const READ: usize = 64 * 1024;

/// Why there is no answer.
#[derive(Debug)]
pub(super) enum Failure {
    /// The peer accepted the connection and ended it without a byte of answer: it may speak another
    /// protocol.
    TurnedAway(Error),
    Failed(Error),
}

impl Failure {
    pub(super) fn into_error(self) -> Error {
        match self {
            Self::TurnedAway(e) | Self::Failed(e) => e,
        }
    }
}

/// Called exactly once with the JSON of the answer, on the control thread or before `start`
/// returns.
pub(super) type Answered = Box<dyn FnOnce(&Arc<Core>, Result<Vec<u8>, Failure>) + Send>;

/// Sends `request`, a frame of type `kind`, to `addr` and waits for the answer of that type.
pub(super) fn ask(
    core: &Arc<Core>,
    addr: SocketAddr,
    kind: Kind,
    request: Vec<u8>,
    timeout: Duration,
    answered: Answered,
) {
    match Socket::connect(addr) {
        Ok(socket) => {
            let exchange = Exchange {
                core: Arc::clone(core),
                addr,
                socket,
                kind,
                deadline: now() + timeout,
                connected: false,
                request,
                sent: 0,
                answer: Vec::new(),
                answered: Some(answered),
            };
            core.threads.control.add(core.threads.control.token(), Box::new(exchange));
        }
        Err(e) => {
            answered(core, Err(Failure::Failed(unreachable_peer(e).with("address", addr))));
        }
    }
}

struct Exchange {
    core: Arc<Core>,
    addr: SocketAddr,
    socket: Socket,
    kind: Kind,
    deadline: Timestamp,
    connected: bool,
    request: Vec<u8>,
    sent: usize,
    /// The request, with its length in front.
    answer: Vec<u8>,
    answered: Option<Answered>,
}

impl Exchange {
    fn finish(&mut self, result: Result<Vec<u8>, Failure>) -> Next {
        if let Some(answered) = self.answered.take() {
            answered(&self.core, result);
        }
        Next::Close
    }

    fn fail(&mut self, error: Error) -> Next {
        let error = error.with("address", self.addr);
        self.finish(Err(Failure::Failed(error)))
    }

    fn protocol(&mut self, what: &str) -> Next {
        self.fail(Error::new(ErrorKind::Protocol, what))
    }

    /// The connection ended or broke.
    fn lost(&mut self, e: io::Error) -> Next {
        let error = Error::new(ErrorKind::PeerReset, "the peer ended a Mooncake handshake early")
            .with("address", self.addr)
            .caused_by(e);
        if self.answer.is_empty() {
            return self.finish(Err(Failure::TurnedAway(error)));
        }
        self.finish(Err(Failure::Failed(error)))
    }

    fn late(&mut self) -> Next {
        let error = if self.connected {
            Error::new(
                ErrorKind::PeerSilent,
                "the peer did not answer a Mooncake handshake in time",
            )
        } else {
            unreachable_peer(io::ErrorKind::TimedOut.into())
        };
        self.fail(error)
    }

    /// Whether the socket is connected; an error if it will never be, or not to a process that may be
    /// talked to.
    fn connect(&mut self, cause: Cause) -> Result<bool, Error> {
        if !self.connected && cause.ready.any() {
            self.socket.error().map_err(unreachable_peer)?;
            self.connected = cause.ready.write;
            if self.connected {
                self.core.check_target(&self.socket)?;
            }
            let _ = self.socket.set_nodelay();
        }
        Ok(self.connected)
    }

    /// Reads the received bytes; `Some` once the answer is complete or has failed.
    fn read(&mut self) -> Option<Next> {
        loop {
            let want = match announced(&self.answer) {
                None => LENGTH - self.answer.len(),
                Some(len) if !(1..=ANSWER_MAX).contains(&len) => {
                    return Some(self.protocol("the answer to a Mooncake handshake has no length"));
                }
                Some(len) => {
                    let whole = LENGTH + usize::try_from(len).expect("at most ANSWER_MAX");
                    if self.answer.len() == whole {
                        return Some(self.complete());
                    }
                    whole - self.answer.len()
                }
            };
            let mut buffer = [0; READ];
            match self.socket.recv(&mut buffer[..want.min(READ)]) {
                Ok(0) => return Some(self.lost(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => self.answer.extend_from_slice(&buffer[..n]),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return None,
                Err(e) => return Some(self.lost(e)),
            }
        }
    }

    fn complete(&mut self) -> Next {
        match split(&self.answer[LENGTH..]) {
            Some((kind, json)) if kind == self.kind => {
                let json = json.to_vec();
                self.finish(Ok(json))
            }
            _ => self.protocol("the peer answered a Mooncake handshake with another type"),
        }
    }
}

/// The length at the start of the answer, once it has arrived.
fn announced(answer: &[u8]) -> Option<u64> {
    answer.first_chunk::<LENGTH>().map(|bytes| u64::from_le_bytes(*bytes))
}

impl Handler for Exchange {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        match self.connect(cause) {
            Err(e) => return self.fail(e),
            Ok(_) if cx.now >= self.deadline => return self.late(),
            Ok(true) => {}
            Ok(false) => {
                return Next::Wait { interest: Interest::Write, deadline: Some(self.deadline) };
            }
        }
        let mut interest = Interest::Read;
        while self.sent < self.request.len() {
            match self.socket.send(&self.request[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    interest = Interest::Both;
                    break;
                }
                Err(e) => return self.lost(e),
            }
        }
        match self.read() {
            Some(next) => next,
            None => Next::Wait { interest, deadline: Some(self.deadline) },
        }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        self.fail(Error::shutdown());
    }
}
