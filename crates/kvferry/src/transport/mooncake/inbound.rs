//! The target's side of the data port: serves the requests of stock peers.
//!
//! A connection carries one request after another, each answered in its turn; requests may be
//! sent ahead of answers. Payload is scattered straight into the registered memory it names, one
//! non-blocking call at a time, inside the connection's gate.
//!
//! A refused request ends its connection, as stock targets do: after the status, what still
//! comes is read away for a while, so that the status is not lost to a reset.
//!
//! While such connections are open this agent counts as having a session: its pulse beats, and
//! when it has slept, they end before anything of theirs is applied (invariant I2).

use super::wire::{Opcode, Request, Status};
use super::{KEEPALIVE, Mooncake};
use crate::agent::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::memory::cursor::{Fault, Gather, Lent, Pieces, Position, Scatter, Sink, Source};
use crate::memory::device::Wake;
use crate::memory::gate::Gate;
use crate::memory::region::Access;
use crate::reactor::{Cause, Cx, Handler, Next, Remote, now};
use crate::session::connect::NoLanes;
use crate::session::link::Link;
use crate::transport::{RECEIVE_CHUNK, SEND_CHUNK, TURN};
use kvferry_proto::{RegionId, Timestamp, WireCode};
use kvferry_sys::HostSpan;
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use kvferry_sys::vectors::RecvVector;
use std::collections::VecDeque;
use std::io;
use std::net::{Shutdown, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

/// Connections served at a time.
const CONNECTIONS_MAX: usize = 1024;
/// Connections accepted before others have their turn.
const ACCEPTS: usize = 64;
/// How long a peer may leave a request unfinished without moving a byte: twice what stock peers
/// wait themselves.
const STALL: Duration = Duration::from_secs(60);
/// How long a refused peer may take to close.
const PARTING: Duration = Duration::from_secs(1);
/// What a step costs of a connection's turn besides the bytes it moves: small requests must not
/// keep others waiting for longer than large ones.
const STEP_COST: usize = 1024;
/// Bytes of statuses that are sent together.
const STATUSES_HELD: usize = 512;
/// Bytes of statuses that may wait for the peer; beyond them no further request is read.
const STATUSES_MAX: usize = 8 * 1024;

/// Opens the data port.
pub(crate) fn listen(local: SocketAddr) -> Result<(Socket, u16)> {
    let socket = Socket::listen(SocketAddr::new(local.ip(), 0))
        .map_err(|e| Error::io("can't listen for Mooncake peers", e))?;
    let here = socket.local_addr().map_err(|e| Error::io("the port can't be found out", e))?;
    Ok((socket, here.port()))
}

/// Serves the data port.
pub(crate) fn serve(core: &Arc<Core>, socket: Socket) {
    let acceptor = Acceptor { core: Arc::downgrade(core), socket };
    core.control.add(core.control.token(), Box::new(acceptor));
}

/// The connections being served.
#[derive(Debug, Default)]
pub(super) struct Rooms(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    open: usize,
    last: u64,
    /// Connections that have not sent a request yet, oldest first.
    unproven: VecDeque<(u64, Weak<Link>, Remote, u64)>,
}

impl Rooms {
    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for a connection; when all are taken, the oldest that never sent a request makes
    /// room. `None` if there is none of those.
    fn admit(&self, link: &Arc<Link>, remote: &Remote, token: u64) -> Option<u64> {
        let (number, evicted) = {
            let mut taken = self.lock();
            let evicted =
                if taken.open < CONNECTIONS_MAX { None } else { Some(taken.unproven.pop_front()?) };
            taken.open += 1;
            taken.last += 1;
            let number = taken.last;
            taken.unproven.push_back((number, Arc::downgrade(link), remote.clone(), token));
            (number, evicted)
        };
        if let Some((_, link, remote, token)) = evicted {
            if let Some(link) = link.upgrade() {
                link.terminate(Error::new(ErrorKind::Busy, "its place was needed for another"));
            }
            remote.wake(token);
        }
        Some(number)
    }

    fn proven(&self, number: u64) {
        self.lock().unproven.retain(|(n, ..)| *n != number);
    }

    fn leave(&self, number: u64) {
        let mut taken = self.lock();
        taken.open -= 1;
        taken.unproven.retain(|(n, ..)| *n != number);
    }
}

struct Acceptor {
    core: Weak<Core>,
    socket: Socket,
}

impl Handler for Acceptor {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, _cause: Cause, cx: &Cx<'_>) -> Next {
        let Some(core) = self.core.upgrade() else { return Next::Close };
        for _ in 0..ACCEPTS {
            match self.socket.accept() {
                Ok((socket, Some(from))) => admit(&core, socket, from),
                Ok((_, None)) => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => {
                    // Out of descriptors, or a connection that is gone already.
                    tracing::warn!(error = %e, "a Mooncake connection can't be accepted");
                    let later = cx.now + Duration::from_millis(50);
                    return Next::Wait { interest: Interest::None, deadline: Some(later) };
                }
            }
        }
        Next::Wait { interest: Interest::Read, deadline: None }
    }
}

fn admit(core: &Arc<Core>, socket: Socket, from: SocketAddr) {
    let link = Link::new(
        Arc::clone(core),
        from.to_string(),
        from,
        Arc::new(Mooncake),
        None,
        None,
        Arc::new(NoLanes),
    );
    let remote = core.io_thread();
    let token = remote.token();
    let Some(number) = core.mooncake.rooms.admit(&link, &remote, token) else {
        tracing::warn!(%from, "a Mooncake connection was refused: too many are open");
        return;
    };
    crate::session::prepare(&socket);
    let _ = socket.set_keepalive(KEEPALIVE);
    core.add_session(&link);
    core.counters.streams.one();
    let connection = Connection {
        gate: core.gates.gate(),
        link,
        number,
        socket,
        state: State::start(),
        statuses: Vec::new(),
        sent: 0,
        wake: None,
        proven: false,
        busy: false,
        moved_at: now(),
    };
    // The pulse starts to beat when there is a first session; the control thread does that before
    // it carries out what is asked of it later.
    let usher = Usher { to: remote, token, connection: Some(Box::new(connection)) };
    core.control.add(core.control.token(), Box::new(usher));
}

/// Hands a connection to its I/O thread, from the control thread.
struct Usher {
    to: Remote,
    token: u64,
    connection: Option<Box<Connection>>,
}

impl Handler for Usher {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

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
    /// Payload arrives; what came of the next head is kept.
    Write {
        request: Request,
        sink: Scatter,
        next: [u8; Request::LEN],
        at: usize,
    },
    /// All payload came; device copies are waited for.
    Flush {
        request: Request,
        sink: Scatter,
        next: [u8; Request::LEN],
        at: usize,
    },
    Read {
        source: Gather,
    },
    /// Refused: the status goes out, the rest is read away.
    Parting {
        until: Timestamp,
        half_closed: bool,
    },
    /// Nothing more is wanted of this connection.
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
    /// The connection is over.
    Over,
}

struct Connection {
    link: Arc<Link>,
    number: u64,
    socket: Socket,
    gate: Arc<Gate>,
    state: State,
    /// To be sent, in order; `sent` of them were.
    statuses: Vec<u8>,
    sent: usize,
    wake: Option<Wake>,
    /// It has sent a request.
    proven: bool,
    /// Counted as a request in flight.
    busy: bool,
    /// When a byte moved last.
    moved_at: Timestamp,
}

impl Connection {
    fn core(&self) -> &Core {
        &self.link.core
    }

    /// Whether memory may be touched: neither was the connection ended nor this process away.
    fn may_touch(&self) -> bool {
        self.link.end().is_none() && self.core().pulse.is_fresh(now())
    }

    fn step(&mut self, turn: &mut usize) -> Step {
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
            State::Write { request, sink, next, at } => self.write(request, sink, next, at, turn),
            State::Flush { request, mut sink, next, at } => match sink.flush() {
                Ok(Lent::NotReady) => {
                    self.state = State::Flush { request, sink, next, at };
                    Step::Memory
                }
                Ok(_) => {
                    self.written(&request);
                    self.state = State::Head { bytes: next, at };
                    self.send_if_due(at > 0)
                }
                Err(fault) => self.fault(&fault),
            },
            State::Read { source } => self.read(source, turn),
            State::Parting { until, half_closed } => self.part(until, half_closed),
            State::Dead => Step::Over,
        }
    }

    /// Receives; before it waits, it sends the statuses that are due.
    fn recv(&mut self, into: &mut [u8]) -> std::result::Result<usize, Step> {
        match self.socket.recv(into) {
            Ok(0) => Err(Step::Over),
            Ok(n) => Ok(n),
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                Err(self.send_statuses().unwrap_or(Step::Read))
            }
            Err(_) => Err(Step::Over),
        }
    }

    /// After a write: its status goes out at once, unless more requests are there already.
    fn send_if_due(&mut self, more: bool) -> Step {
        if more && self.statuses.len() - self.sent < STATUSES_HELD {
            return Step::On;
        }
        match self.send_statuses() {
            Some(Step::Write) if self.statuses.len() - self.sent < STATUSES_MAX => Step::On,
            Some(step) => step,
            None if more => Step::On,
            // The peer has had no time to send more: wait rather than look.
            None => Step::Read,
        }
    }

    /// Sends what is due; `None` when all of it was sent.
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

    /// A request's head is there.
    fn begin(&mut self, request: Request) -> Step {
        if self.gate.is_shut() || !self.may_touch() {
            return Step::Over;
        }
        if !self.proven {
            self.proven = true;
            self.core().mooncake.rooms.proven(self.number);
        }
        let pieces = match resolve(self.core(), &request) {
            Ok(pieces) => Arc::new(pieces),
            Err(code) => return self.refuse(&request, code),
        };
        let wake = self.wake.clone().expect("set at the first call");
        let (at, gate) = (Position::default(), Arc::clone(&self.gate));
        match request.opcode {
            Opcode::Write => {
                let sink = Scatter::new(pieces, at, request.size, gate, wake);
                self.state = State::Write { request, sink, next: [0; Request::LEN], at: 0 };
            }
            Opcode::Read => {
                let source = Gather::new(pieces, at, request.size, gate, wake);
                self.answer(&request, Status::Done);
                self.core().counters.bytes_served.add(request.size);
                self.core().counters.requests_served.one();
                self.state = State::Read { source };
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
        if !request.status && self.statuses.is_empty() {
            // Only the end of the connection can say so.
            return Step::Over;
        }
        self.answer(request, Status::Refused);
        self.state = State::Parting { until: now() + PARTING, half_closed: false };
        Step::On
    }

    fn write(
        &mut self,
        request: Request,
        mut sink: Scatter,
        mut next: [u8; Request::LEN],
        mut at: usize,
        turn: &mut usize,
    ) -> Step {
        if sink.remaining() == 0 {
            self.state = State::Flush { request, sink, next, at };
            return Step::On;
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
        match result {
            Ok(Lent::Moved(n)) => {
                *turn = turn.saturating_sub(n);
                self.state = State::Write { request, sink, next, at };
                Step::On
            }
            Ok(Lent::WouldBlock) => {
                self.state = State::Write { request, sink, next, at };
                self.send_statuses().unwrap_or(Step::Read)
            }
            Ok(Lent::NotReady) => {
                self.state = State::Write { request, sink, next, at };
                self.send_statuses().unwrap_or(Step::Memory)
            }
            Err(fault) => self.fault(&fault),
        }
    }

    /// All bytes are in place.
    fn written(&mut self, request: &Request) {
        self.core().counters.bytes_received.add(request.size);
        self.core().counters.requests_served.one();
        self.answer(request, Status::Done);
    }

    fn read(&mut self, mut source: Gather, turn: &mut usize) -> Step {
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
        match result {
            Ok(Lent::Moved(n)) => {
                *turn = turn.saturating_sub(n);
                self.state = State::Read { source };
                Step::On
            }
            Ok(Lent::WouldBlock) => {
                self.state = State::Read { source };
                Step::Write
            }
            Ok(Lent::NotReady) => {
                self.state = State::Read { source };
                self.send_statuses().unwrap_or(Step::Memory)
            }
            Err(fault) => self.fault(&fault),
        }
    }

    /// The memory went away under a request: only the end of the connection can say so.
    fn fault(&mut self, fault: &Fault) -> Step {
        if let Fault::Memory { code, .. } = fault {
            tracing::debug!(peer = %self.link.address, %code, "memory went away under a request");
            self.core().counters.requests_refused.one();
        }
        Step::Over
    }

    fn part(&mut self, until: Timestamp, half_closed: bool) -> Step {
        self.state = State::Parting { until, half_closed };
        if now() >= until {
            return Step::Over;
        }
        if let Some(step) = self.send_statuses() {
            return step;
        }
        if !half_closed {
            self.socket.shutdown(Shutdown::Write);
            self.state = State::Parting { until, half_closed: true };
        }
        match self.socket.discard(RECEIVE_CHUNK) {
            Ok(0) => Step::Over,
            Ok(_) => Step::On,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Step::Read,
            Err(_) => Step::Over,
        }
    }

    /// Between requests nothing is under way.
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

    /// Until when something has to happen.
    fn deadline(&self) -> Option<Timestamp> {
        match self.state {
            State::Parting { until, .. } => Some(until),
            _ if self.is_between() => None,
            _ => Some(self.moved_at + STALL),
        }
    }
}

/// Receives into the spans; if they are all that is left of the payload, also what there is of
/// the next head.
fn recv_ahead(
    socket: &Socket,
    spans: &[HostSpan],
    left: u64,
    next: &mut [u8; Request::LEN],
) -> io::Result<usize> {
    let room: usize = spans.iter().map(HostSpan::len).sum();
    let n = if (room as u64) < left {
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

/// The memory that a request names: one region has to hold all of it.
fn resolve(core: &Core, request: &Request) -> std::result::Result<Pieces, WireCode> {
    let need = match request.opcode {
        Opcode::Write => Access::WRITE,
        Opcode::Read => Access::READ,
    };
    let mut pieces = Pieces::default();
    let tables = core.regions.read();
    // The table takes lengths of native descriptors; longer ones are checked here.
    let head = u32::try_from(request.size).unwrap_or(u32::MAX);
    let (region, offset) =
        tables.resolve(RegionId::ABSOLUTE, request.addr, head, need).map_err(|misfit| misfit.0)?;
    match offset.checked_add(request.size) {
        None => Err(WireCode::Overflow),
        Some(end) if end > region.len as u64 => Err(WireCode::Straddles),
        Some(_) => {
            if request.size > 0 {
                pieces.push(region, offset, request.size);
            }
            Ok(pieces)
        }
    }
}

impl Handler for Connection {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        if self.wake.is_none() {
            let (remote, token) = (cx.remote.clone(), cx.token);
            self.wake = Some(Arc::new(move || remote.wake(token)));
        }
        if self.gate.is_shut() || self.link.end().is_some() || cause.ready.closed {
            // Reset, or ended: nothing that is still in the socket may be applied.
            return Next::Close;
        }
        if cause.ready.read || cause.ready.write {
            self.moved_at = cx.now;
        }
        if self.deadline().is_some_and(|at| at <= cx.now) {
            return Next::Close;
        }
        let mut turn = TURN;
        let interest = loop {
            match self.step(&mut turn) {
                Step::On if turn == 0 => {
                    self.moved_at = cx.now;
                    self.set_busy(!self.is_between());
                    return Next::Again;
                }
                Step::On => turn = turn.saturating_sub(STEP_COST),
                Step::Read => break Interest::Read,
                // Whoever closed its side while an answer waits is not going to read it.
                Step::Write if cause.ready.peer_closed => return Next::Close,
                Step::Write => break Interest::Write,
                Step::Memory => break Interest::None,
                Step::Over => return Next::Close,
            }
        };
        self.set_busy(!self.is_between());
        Next::Wait { interest, deadline: self.deadline() }
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.set_busy(false);
        self.gate.shut();
        let core = Arc::clone(&self.link.core);
        core.mooncake.rooms.leave(self.number);
        core.remove_session(&self.link);
        core.counters.streams.less_one();
    }
}
