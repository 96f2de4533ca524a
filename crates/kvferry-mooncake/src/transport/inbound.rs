//! The target's side of the data port: serves the requests of stock peers.
//!
//! A connection carries one request after another, answered in order; requests may be sent ahead of
//! answers. Payload is scattered directly into the registered memory that the request names, one
//! non-blocking call at a time, inside the connection's gate.
//!
//! A refused request ends its connection, as in stock targets: after the status, further received
//! bytes are dropped for a while, so that the status is not lost to a reset.
//!
//! While such connections are open, this agent counts as having a session: its suspend detector
//! runs, and after a suspension the connections end before any of their bytes are applied
//! (invariant I2).

use super::connections::Seat;
use super::wire::{Opcode, Request, Status};
use super::{KEEPALIVE, MooncakeServer};
use kvferry::transport::{
    ACCEPTS_PER_CALL, Backend, Cause, Core, Cursor, Cx, Direction, Fault, Gate, Handler, Lent,
    Link, MemoryFault, Next, Owner, RECEIVE_CHUNK, Remote, SEND_CHUNK, STEP_BYTES, Wake, now,
    prepare,
};
use kvferry::{Error, ErrorKind, RemoteRegion, Result};
use kvferry_proto::{Timestamp, WireCode};
use kvferry_sys::HostSpan;
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use kvferry_sys::vectors::RecvVector;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

/// How long a peer may leave a request unfinished without moving a byte: twice the time that stock
/// peers wait.
const STALL: Duration = Duration::from_secs(60);
/// How long a refused peer may take to close.
const DRAIN_TIME: Duration = Duration::from_secs(1);
/// The bytes that a step counts for in addition to those it moves, so that small requests do not
/// delay other connections for longer than large ones.
const STEP_COST: usize = 1024;
/// Bytes of statuses that are sent together.
const STATUSES_HELD: usize = 512;
/// Bytes of unsent statuses above which no further request is read.
const STATUSES_MAX: usize = 8 * 1024;

/// Opens the data port.
pub(super) fn listen(local: SocketAddr) -> Result<(Socket, u16)> {
    let socket = Socket::listen(SocketAddr::new(local.ip(), 0))
        .map_err(|e| Error::io("can't listen for Mooncake peers", e))?;
    let here = socket.local_addr().map_err(|e| Error::io("can't read the listening port", e))?;
    Ok((socket, here.port()))
}

/// Serves the data port.
pub(super) fn serve(server: &Arc<MooncakeServer>, socket: Socket) {
    let acceptor = Acceptor { server: Arc::downgrade(server), socket };
    let control = &server.core.threads.control;
    control.add(control.token(), Box::new(acceptor));
}

/// A stock peer that opened a connection to this agent. It takes no requests.
struct Caller;

impl Backend for Caller {
    fn open_lane(&self, link: &Arc<Link>) {
        link.lane_failed(&cannot_be_asked(link));
    }

    fn wake(&self, _core: &Core) {}

    fn regions(&self, link: &Arc<Link>, _timeout: Duration) -> Result<Vec<RemoteRegion>> {
        Err(cannot_be_asked(link))
    }

    fn probe(&self, link: &Arc<Link>, _timeout: Duration) -> Result<Duration> {
        Err(cannot_be_asked(link))
    }
}

fn cannot_be_asked(link: &Link) -> Error {
    let what = "a stock Mooncake peer takes no requests on the connection that it opened";
    Error::new(ErrorKind::Unsupported, what).with("peer", &link.address)
}

struct Acceptor {
    server: Weak<MooncakeServer>,
    socket: Socket,
}

impl Handler for Acceptor {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(server) = self.server.upgrade() else { return Next::Close };
        for _ in 0..ACCEPTS_PER_CALL {
            match self.socket.accept() {
                Ok((socket, Some(from))) => admit(&server, socket, from),
                Ok((_, None)) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    // The process has no free descriptor, or the connection is gone already.
                    kvferry::warn_limited!(error = %e, "a Mooncake connection can't be accepted");
                    let later = cx.now + Duration::from_millis(50);
                    return Next::Wait { interest: Interest::None, deadline: Some(later) };
                }
            }
        }
        Next::Wait { interest: Interest::Read, deadline: None }
    }
}

/// The requests that a connection may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllowedRequests {
    All,
    WriteWithoutStatus,
}

impl AllowedRequests {
    /// `None` for a connection that may not come in.
    fn of(caller: Owner, server: &MooncakeServer) -> Option<Self> {
        match caller {
            Owner::Trusted => Some(Self::All),
            // A peer of version 1 that has sent a write takes it for done and closes its connection: perhaps before this thread
            // gets a processor. What it sent counts, if such a peer has shaken hands. A process of another user could have
            // sent it, too: a write at an address that the process has guessed.
            Owner::Gone => {
                let has_met = server.has_met_version_1.load(Ordering::Relaxed);
                has_met.then_some(Self::WriteWithoutStatus)
            }
            Owner::Other => None,
        }
    }

    fn permits(self, request: &Request) -> bool {
        match self {
            Self::All => true,
            Self::WriteWithoutStatus => request.opcode == Opcode::Write && !request.status,
        }
    }
}

fn admit(server: &Arc<MooncakeServer>, socket: Socket, from: SocketAddr) {
    let core = &server.core;
    let Some(directory) = server.directory.upgrade() else { return };
    let Some(may) = AllowedRequests::of(core.owner_of(&socket), server) else {
        core.counters.handshakes_failed.one();
        kvferry::warn_limited!(%from, "refused a Mooncake connection of another user of this host, or of one that is not known any more");
        return;
    };
    let link = Link::new(Arc::clone(core), from.to_string(), from, Arc::new(Caller), 0);
    let remote = core.threads.io();
    let token = remote.token();
    // The connection of a process that is gone takes no other one's place.
    let may_displace = may == AllowedRequests::All;
    let Some((number, seat)) = server.connections.admit(&link, may_displace, &remote, token) else {
        kvferry::warn_limited!(%from, "a Mooncake connection was refused: too many are open");
        return;
    };
    prepare(&socket);
    let _ = socket.set_keepalive(KEEPALIVE);
    directory.add(&link);
    core.counters.streams.one();
    let connection = Connection {
        server: Arc::clone(server),
        gate: core.gate(),
        may,
        link,
        number,
        seat,
        socket,
        state: State::start(),
        statuses: Vec::new(),
        sent: 0,
        wake: None,
        proven: false,
        busy: false,
        moved_at: Some(now()),
    };
    // The suspend detector starts with the first session. The control thread starts it before it
    // handles a command that is queued later.
    let dispatcher = Dispatcher { to: remote, token, connection: Some(Box::new(connection)) };
    core.threads.control.add(core.threads.control.token(), Box::new(dispatcher));
}

/// Adds a connection to its I/O thread. Called on the control thread.
struct Dispatcher {
    to: Remote,
    token: u64,
    connection: Option<Box<Connection>>,
}

impl Handler for Dispatcher {
    fn handle(&mut self, _cause: Cause, _cx: &Cx<'_>) -> Next {
        if let Some(connection) = self.connection.take() {
            self.to.add(self.token, connection);
        }
        Next::Close
    }
}

enum State {
    Head {
        bytes: [u8; Request::LEN],
        at: usize,
    },
    /// Receiving payload, then waiting for device copies; the received part of the next head is
    /// kept.
    Write {
        request: Request,
        sink: Cursor,
        next: [u8; Request::LEN],
        at: usize,
    },
    Read {
        source: Cursor,
    },
    /// Refused: sends the status, drops what arrives.
    Draining {
        until: Timestamp,
        half_closed: bool,
    },
    /// The connection ends with the next step.
    Dead,
}

impl State {
    const fn start() -> Self {
        Self::Head { bytes: [0; Request::LEN], at: 0 }
    }
}

enum Step {
    On,
    Read,
    Write,
    Memory,
    Over,
}

struct Connection {
    server: Arc<MooncakeServer>,
    link: Arc<Link>,
    number: u64,
    seat: Arc<Seat>,
    socket: Socket,
    gate: Arc<Gate>,
    may: AllowedRequests,
    state: State,
    /// To be sent, in order; the first `sent` bytes are sent.
    statuses: Vec<u8>,
    sent: usize,
    wake: Option<Wake>,
    /// The peer has sent a request.
    proven: bool,
    /// The link counts a request in progress.
    busy: bool,
    /// When a byte last moved. `None` while the connection waits for memory of this side, however long that takes.
    moved_at: Option<Timestamp>,
}

impl Connection {
    fn core(&self) -> &Core {
        &self.link.core
    }

    /// Whether memory may be touched: the connection has not ended, and this process was not
    /// suspended.
    fn may_touch(&self) -> bool {
        self.link.end().is_none() && self.core().is_awake(now())
    }

    fn step(&mut self, budget: &mut usize) -> Step {
        match std::mem::replace(&mut self.state, State::Dead) {
            State::Head { mut bytes, mut at } => {
                if at < Request::LEN {
                    match self.recv(&mut bytes[at..]) {
                        Ok(n) => at += n,
                        Err(step) => {
                            self.state = State::Head { bytes, at };
                            return step;
                        }
                    }
                }
                if at < Request::LEN {
                    self.state = State::Head { bytes, at };
                    return Step::On;
                }
                self.begin(Request::decode(&bytes))
            }
            State::Write { request, sink, next, at } => self.write(request, sink, next, at, budget),
            State::Read { source } => self.read(source, budget),
            State::Draining { until, half_closed } => self.drain(until, half_closed, budget),
            State::Dead => Step::Over,
        }
    }

    /// Receives; before it waits, sends the due statuses.
    fn recv(&mut self, into: &mut [u8]) -> Result<usize, Step> {
        match self.socket.recv(into) {
            Ok(0) => Err(Step::Over),
            Ok(n) => Ok(n),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err(self.send_statuses().unwrap_or(Step::Read))
            }
            Err(_) => Err(Step::Over),
        }
    }

    /// After a write: sends its status at once, unless more requests have arrived already.
    fn send_if_due(&mut self, more: bool) -> Step {
        if more && self.statuses.len() - self.sent < STATUSES_HELD {
            return Step::On;
        }
        match self.send_statuses() {
            Some(Step::Write) if self.statuses.len() - self.sent < STATUSES_MAX => Step::On,
            Some(step) => step,
            None if more => Step::On,
            // The peer had no time to send more, so wait instead of trying to receive.
            None => Step::Read,
        }
    }

    /// Sends the due bytes; `None` once all are sent.
    fn send_statuses(&mut self) -> Option<Step> {
        while self.sent < self.statuses.len() {
            match self.socket.send(&self.statuses[self.sent..]) {
                Ok(n) => self.statuses_sent(n),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Some(Step::Write),
                Err(_) => return Some(Step::Over),
            }
        }
        None
    }

    fn statuses_sent(&mut self, n: usize) {
        self.sent += n;
        if self.sent == self.statuses.len() {
            self.statuses.clear();
            self.sent = 0;
        }
    }

    fn answer(&mut self, request: &Request, status: Status) {
        if request.status {
            self.statuses.extend_from_slice(&status.encode());
        }
    }

    /// Handles a request's head.
    fn begin(&mut self, request: Request) -> Step {
        if self.gate.is_shut() || !self.may_touch() {
            return Step::Over;
        }
        if !self.may.permits(&request) {
            return self.refuse(&request, WireCode::AccessDenied);
        }
        if !self.proven {
            self.proven = true;
            self.seat.prove();
        }
        let direction = match request.opcode {
            Opcode::Write => Direction::In,
            Opcode::Read => Direction::Out,
        };
        let wake = self.wake.as_ref().expect("set at the first call");
        let (addr, size) = (request.addr, request.size);
        let memory = match self.core().cursor_at(direction, addr, size, &self.gate, wake) {
            Ok(memory) => memory,
            Err(code) => return self.refuse(&request, code),
        };
        match request.opcode {
            Opcode::Write => {
                let (sink, next) = (memory, [0; Request::LEN]);
                self.state = State::Write { request, sink, next, at: 0 };
            }
            Opcode::Read => {
                self.answer(&request, Status::Done);
                self.core().counters.bytes_served.add(request.size);
                self.core().counters.requests_served.one();
                self.state = State::Read { source: memory };
            }
        }
        Step::On
    }

    fn refuse(&mut self, request: &Request, code: WireCode) -> Step {
        tracing::debug!(
            peer = %self.link.address, addr = format_args!("{:#x}", request.addr),
            size = request.size, %code, "refused a request of a Mooncake peer"
        );
        self.core().counters.requests_refused.one();
        if self.may == AllowedRequests::WriteWithoutStatus {
            // Its end is that of a connection whose write was applied: all users of the host see the states of a socket.
            self.state = State::Draining { until: now() + DRAIN_TIME, half_closed: true };
            return Step::On;
        }
        if !request.status && self.statuses.is_empty() {
            // Only the end of the connection can report it.
            return Step::Over;
        }
        self.answer(request, Status::Refused);
        self.state = State::Draining { until: now() + DRAIN_TIME, half_closed: false };
        Step::On
    }

    fn write(
        &mut self,
        request: Request,
        mut sink: Cursor,
        mut next: [u8; Request::LEN],
        mut at: usize,
        budget: &mut usize,
    ) -> Step {
        if sink.remaining() == 0 {
            return match sink.flush() {
                Ok(Lent::NotReady) => {
                    self.state = State::Write { request, sink, next, at };
                    Step::Memory
                }
                Ok(_) => {
                    self.written(&request);
                    self.state = State::Head { bytes: next, at };
                    self.send_if_due(at > 0)
                }
                Err(fault) => self.fault(&fault),
            };
        }
        if !self.may_touch() {
            return Step::Over;
        }
        let (socket, left) = (&self.socket, sink.remaining());
        let result = sink.lend(RECEIVE_CHUNK, &mut |spans| {
            let n = recv_ahead(socket, spans, left, &mut next)?;
            let payload = n.min(usize::try_from(left).unwrap_or(usize::MAX));
            at += n - payload;
            Ok(payload)
        });
        self.state = State::Write { request, sink, next, at };
        match result {
            Ok(Lent::Moved(n)) => {
                *budget = budget.saturating_sub(n);
                Step::On
            }
            Ok(Lent::WouldBlock) => self.send_statuses().unwrap_or(Step::Read),
            Ok(Lent::NotReady) => self.send_statuses().unwrap_or(Step::Memory),
            Err(fault) => self.fault(&fault),
        }
    }

    /// All bytes are in place.
    fn written(&mut self, request: &Request) {
        self.core().counters.bytes_received.add(request.size);
        self.core().counters.requests_served.one();
        self.answer(request, Status::Done);
    }

    fn read(&mut self, mut source: Cursor, budget: &mut usize) -> Step {
        if source.remaining() == 0 {
            self.state = State::start();
            return Step::On;
        }
        if !self.may_touch() {
            return Step::Over;
        }
        let (socket, due) = (&self.socket, &self.statuses[self.sent..]);
        let mut of_due = 0;
        let result = source.lend(SEND_CHUNK, &mut |spans| {
            let n = socket.send_spans(due, spans)?;
            of_due = n.min(due.len());
            Ok(n - of_due)
        });
        self.statuses_sent(of_due);
        self.state = State::Read { source };
        match result {
            Ok(Lent::Moved(n)) => {
                *budget = budget.saturating_sub(n);
                Step::On
            }
            Ok(Lent::WouldBlock) => Step::Write,
            Ok(Lent::NotReady) => self.send_statuses().unwrap_or(Step::Memory),
            Err(fault) => self.fault(&fault),
        }
    }

    /// The memory of a request can't be used any more: only the end of the connection can report
    /// it.
    fn fault(&mut self, fault: &Fault) -> Step {
        if let Fault::Memory(MemoryFault { code, .. }) = fault {
            tracing::debug!(peer = %self.link.address, %code, "region unregistered during a request");
            self.core().counters.requests_refused.one();
        }
        Step::Over
    }

    fn drain(&mut self, until: Timestamp, half_closed: bool, budget: &mut usize) -> Step {
        self.state = State::Draining { until, half_closed };
        if now() >= until {
            return Step::Over;
        }
        if let Some(step) = self.send_statuses() {
            return step;
        }
        if !half_closed {
            self.socket.shutdown(Shutdown::Write);
            self.state = State::Draining { until, half_closed: true };
        }
        discard(&self.socket, budget)
    }

    /// Between requests, the link counts none in progress.
    fn is_between(&self) -> bool {
        matches!(self.state, State::Head { at: 0, .. } | State::Dead) && self.statuses.is_empty()
    }

    fn set_busy(&mut self, busy: bool) {
        if busy == self.busy {
            return;
        }
        self.busy = busy;
        if busy {
            self.core().counters.requests_in_flight.one();
        } else {
            self.core().counters.requests_in_flight.less_one();
        }
    }

    fn deadline(&self) -> Option<Timestamp> {
        match self.state {
            State::Draining { until, .. } => Some(until),
            _ if self.is_between() => None,
            _ => self.moved_at.map(|at| at + STALL),
        }
    }
}

/// Drops what a refused peer has sent.
fn discard(socket: &Socket, budget: &mut usize) -> Step {
    match socket.discard(RECEIVE_CHUNK) {
        Ok(0) => Step::Over,
        Ok(n) => {
            *budget = budget.saturating_sub(n);
            Step::On
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Step::Read,
        Err(_) => Step::Over,
    }
}

/// Receives into the spans; if they cover the rest of the payload, also into the next head.
fn recv_ahead(
    socket: &Socket,
    spans: &[HostSpan],
    left: u64,
    next: &mut [u8; Request::LEN],
) -> io::Result<usize> {
    let capacity: usize = spans.iter().map(HostSpan::len).sum();
    let n = if (capacity as u64) < left {
        socket.recv_spans(spans)?
    } else {
        let mut vector = RecvVector::new();
        for span in spans {
            vector.push_span(*span);
        }
        vector.push_buffer(next);
        socket.recv_vector(&mut vector)?
    };
    if n == 0 {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(n)
}

impl Handler for Connection {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        self.wake.get_or_insert_with(|| cx.remote.waker(cx.token));
        if self.gate.is_shut() || self.link.end().is_some() || cause.ready.closed {
            // Reset, or ended: no byte that is still in the socket may be applied.
            return Next::Close;
        }
        self.moved_at.get_or_insert(cx.now);
        if cause.ready.read || cause.ready.write {
            self.moved_at = Some(cx.now);
            // Until it is known whether a request is in progress: a peer whose request was just answered has not
            // been idle.
            self.seat.set_idle(None);
        }
        if self.deadline().is_some_and(|at| at <= cx.now) {
            return Next::Close;
        }
        let mut budget = STEP_BYTES;
        let interest = loop {
            match self.step(&mut budget) {
                Step::On if budget == 0 => {
                    self.moved_at = Some(cx.now);
                    self.seat.set_moved(self.moved_at);
                    self.set_busy(!self.is_between());
                    return Next::Again;
                }
                Step::On => budget = budget.saturating_sub(STEP_COST),
                Step::Read => break Interest::Read,
                // A peer that has closed its side while an answer waits will not read it.
                Step::Write if cause.ready.peer_closed => return Next::Close,
                Step::Write => break Interest::Write,
                Step::Memory => {
                    self.moved_at = None;
                    break Interest::None;
                }
                Step::Over => return Next::Close,
            }
        };
        let is_between = self.is_between();
        self.seat.set_moved(self.moved_at);
        self.seat.set_idle(is_between.then_some(cx.now));
        self.set_busy(!is_between);
        Next::Wait { interest, deadline: self.deadline() }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.set_busy(false);
        self.gate.shut();
        let core = Arc::clone(&self.link.core);
        self.server.connections.leave(self.number);
        let what = "the connection of a stock Mooncake peer ended";
        self.link.terminate(Error::new(ErrorKind::PeerClosed, what));
        core.counters.streams.less_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;

    #[test]
    fn bytes_that_a_refused_peer_sends_are_taken_from_the_budget_of_the_turn() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = Socket::connect(listener.local_addr().expect("bound")).expect("listening");
        let (mut peer, _) = listener.accept().expect("a connection");
        peer.write_all(&[0; 1000]).expect("written");
        while socket.readable().expect("an open socket") < 1000 {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut budget = 1500;
        assert!(matches!(discard(&socket, &mut budget), Step::On));
        assert_eq!(budget, 500);
        assert!(matches!(discard(&socket, &mut budget), Step::Read));
        drop(peer);
    }
}
