//! The target's side of a stream: serves the requests that a peer sends on it.
//!
//! Requests are served in order, one at a time; the next header is read when the answer of the
//! last one is out. A refused request is read to its end and thrown away, so that the stream
//! stays in step and others on it go on.

use super::outbound::digest_spans;
use crate::agent::Core;
use crate::memory::cursor::{Fault, Gather, Lent, Piece, Pieces, Position, Scatter, Sink, Source};
use crate::memory::device::Wake;
use crate::memory::gate::Gate;
use crate::memory::region::Access;
use crate::notify::Notification;
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::session::link::Link;
use crate::session::service::{self, StreamFaultNote};
use crate::transport::{RECEIVE_CHUNK, SEND_CHUNK, TURN};
use kvferry_proto::{
    Flags, Limits, Op, PieceDigest, RequestHeader, ResponseHeader, StreamId, TransferId, WireCode,
    WireDescriptor, frame,
};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub(crate) struct InboundStream {
    link: Arc<Link>,
    id: StreamId,
    socket: Arc<Socket>,
    gate: Arc<Gate>,
    limits: Limits,
    state: State,
    /// Where the table of the next request goes.
    room: Vec<u8>,
    /// Where the local memory of the next request is listed; empty between requests.
    pieces: Arc<Pieces>,
    /// Bytes that came with the stream's opening.
    early: Vec<u8>,
    wake: Option<Wake>,
    /// Counted as something under way in the link.
    busy: bool,
}

/// Bytes of room that a stream keeps for the lists of its next request.
const ROOM_KEPT: usize = 256 * 1024;

/// A header, and the one descriptor that most small requests have: read in one call.
const OPENING: usize = RequestHeader::LEN + WireDescriptor::LEN;

enum State {
    Head {
        bytes: [u8; OPENING],
        at: usize,
    },
    /// Table and notification.
    Rest {
        header: RequestHeader,
        head: [u8; RequestHeader::LEN],
        bytes: Vec<u8>,
        at: usize,
    },
    Payload {
        request: Request,
        sink: Scatter,
        digest: Option<PieceDigest>,
    },
    Trailer {
        request: Request,
        sink: Scatter,
        digest: PieceDigest,
        bytes: Vec<u8>,
        at: usize,
    },
    Flush {
        request: Request,
        sink: Scatter,
    },
    Discard {
        left: u64,
        answer: ResponseHeader,
    },
    Answer {
        reply: Reply,
        at: usize,
    },
    /// The answer to a read: its head goes out with the first of the payload.
    Serve {
        head: [u8; ResponseHeader::LEN],
        head_at: usize,
        source: Gather,
        digest: Option<PieceDigest>,
    },
    /// An answer broke off; the stream ends when the peer knows why.
    Abandoned,
    /// Nothing more is wanted of this stream.
    Dead,
}

/// What an answer ends with.
enum Reply {
    Head([u8; ResponseHeader::LEN]),
    Trailer(Vec<u8>),
}

impl Reply {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Head(bytes) => bytes,
            Self::Trailer(bytes) => bytes,
        }
    }
}

impl State {
    const fn start() -> Self {
        Self::Head { bytes: [0; OPENING], at: 0 }
    }
}

/// What is kept of a request while its payload arrives.
struct Request {
    transfer: TransferId,
    notification: Option<Notification>,
    bytes: u64,
}

enum Step {
    On,
    Read,
    Write,
    Memory,
    /// The stream is over.
    Over,
}

fn answer(transfer: TransferId, code: WireCode, index: u32) -> ResponseHeader {
    ResponseHeader { code, flags: Flags::NONE, transfer, index, aux: 0, payload_len: 0 }
}

impl InboundStream {
    pub(crate) fn new(
        link: Arc<Link>,
        id: StreamId,
        socket: Arc<Socket>,
        gate: Arc<Gate>,
        early: Vec<u8>,
    ) -> Self {
        link.core.counters.streams.one();
        Self {
            link,
            id,
            socket,
            gate,
            limits: Limits::default(),
            state: State::start(),
            room: Vec::new(),
            pieces: Arc::default(),
            early,
            wake: None,
            busy: false,
        }
    }

    fn core(&self) -> &Core {
        &self.link.core
    }

    /// Whether memory may be touched: neither the session nor this process has been away.
    fn is_fresh(&self) -> bool {
        self.core().pulse.is_fresh(now())
    }

    fn recv(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if !self.early.is_empty() {
            let n = into.len().min(self.early.len());
            into[..n].copy_from_slice(&self.early[..n]);
            self.early.drain(..n);
            return Ok(n);
        }
        match self.socket.recv(into) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            other => other,
        }
    }

    fn fill(&mut self, into: &mut [u8], at: &mut usize) -> Option<Step> {
        match self.recv(&mut into[*at..]) {
            Ok(n) => {
                *at += n;
                (*at < into.len()).then_some(Step::On)
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => Some(Step::Read),
            Err(_) => Some(Step::Over),
        }
    }

    fn step(&mut self, turn: &mut usize) -> Step {
        match std::mem::replace(&mut self.state, State::Dead) {
            State::Head { mut bytes, mut at } => {
                let step = self.fill(&mut bytes, &mut at);
                if at < RequestHeader::LEN {
                    self.state = State::Head { bytes, at };
                    return step.expect("less than a header is less than was asked for");
                }
                if matches!(step, Some(Step::Over)) {
                    return Step::Over;
                }
                self.head(&bytes[..at])
            }
            State::Rest { header, head, mut bytes, mut at } => {
                if at < bytes.len()
                    && let Some(step) = self.fill(&mut bytes, &mut at)
                {
                    self.state = State::Rest { header, head, bytes, at };
                    return step;
                }
                let step = self.begin(&header, &head, &bytes);
                if bytes.capacity() <= ROOM_KEPT {
                    self.room = bytes;
                }
                step
            }
            State::Payload { request, sink, digest } => self.payload(request, sink, digest, turn),
            State::Trailer { request, sink, digest, mut bytes, mut at } => {
                if let Some(step) = self.fill(&mut bytes, &mut at) {
                    self.state = State::Trailer { request, sink, digest, bytes, at };
                    return step;
                }
                match digest.verify(&bytes) {
                    Ok(()) => self.state = State::Flush { request, sink },
                    Err(piece) => {
                        self.core().counters.checksum_errors.one();
                        let piece = u64::try_from(piece).unwrap_or(u64::MAX);
                        let mut damaged = answer(request.transfer, WireCode::Checksum, 0);
                        damaged.aux = piece;
                        self.refuse(damaged, 0);
                    }
                }
                Step::On
            }
            State::Flush { request, mut sink } => match sink.flush() {
                Ok(Lent::NotReady) => {
                    self.state = State::Flush { request, sink };
                    Step::Memory
                }
                Ok(_) => {
                    self.written(request);
                    Step::On
                }
                Err(fault) => self.fault(fault, request.transfer, 0),
            },
            State::Discard { left, answer } => self.discard(left, answer, turn),
            State::Answer { reply, mut at } => match self.socket.send(&reply.bytes()[at..]) {
                Ok(n) => {
                    at += n;
                    if at < reply.bytes().len() {
                        self.state = State::Answer { reply, at };
                        return Step::On;
                    }
                    self.answered()
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.state = State::Answer { reply, at };
                    Step::Write
                }
                Err(_) => Step::Over,
            },
            State::Serve { head, head_at, source, digest } => {
                self.serve(head, head_at, source, digest, turn)
            }
            State::Abandoned => {
                self.state = State::Abandoned;
                Step::Memory
            }
            State::Dead => Step::Over,
        }
    }

    /// A header has arrived, and perhaps something after it.
    fn head(&mut self, bytes: &[u8]) -> Step {
        let (head, after) =
            bytes.split_first_chunk::<{ RequestHeader::LEN }>().expect("checked by the caller");
        match RequestHeader::decode(head, &self.limits) {
            Ok(header) => {
                let len = header.table_len() + header.notify_len as usize;
                let mut rest = std::mem::take(&mut self.room);
                rest.resize(len, 0);
                let at = after.len().min(len);
                rest[..at].copy_from_slice(&after[..at]);
                // A short notification was followed by the next request already.
                self.early.splice(0..0, after[at..].iter().copied());
                self.state = State::Rest { header, head: *head, bytes: rest, at };
                Step::On
            }
            Err(e) => self.malformed(TransferId(0), &e),
        }
    }

    /// The head is no head: nothing after it can be believed. Says so, then ends the stream.
    fn malformed(&mut self, transfer: TransferId, e: &frame::FrameError) -> Step {
        tracing::warn!(peer = %self.link.address, error = %e, "a request is malformed");
        self.core().counters.requests_refused.one();
        let bytes = answer(transfer, e.code(), 0).encode();
        let _ = self.socket.send(&bytes);
        Step::Over
    }

    /// Everything before the payload is there.
    fn begin(
        &mut self,
        header: &RequestHeader,
        head: &[u8; RequestHeader::LEN],
        rest: &[u8],
    ) -> Step {
        let (table, notify) = rest.split_at(header.table_len());
        if let Err(e) = frame::verify_head(head, table, notify) {
            return self.malformed(header.transfer, &e);
        }
        let notification = if notify.is_empty() {
            None
        } else {
            match frame::Notification::decode(notify) {
                Ok(n) => Some(Notification {
                    from: self.link.info().map_or_else(String::new, |i| i.name.clone()),
                    name: n.name,
                    message: n.message,
                }),
                Err(e) => return self.malformed(header.transfer, &e),
            }
        };
        if self.gate.is_shut() || (header.op == Op::Notify && !self.is_fresh()) {
            return Step::Over;
        }
        let follows = header.payload_follows() + header.trailer_follows();
        let need = match header.op {
            Op::Write => Access::WRITE,
            Op::Read => Access::READ,
            Op::Notify => Access::NONE,
        };
        // Made anew only while a device's copies hold on to the last one.
        if Arc::get_mut(&mut self.pieces).is_none() {
            self.pieces = Arc::default();
        }
        let room = Arc::get_mut(&mut self.pieces).expect("nobody else has it");
        if let Err((code, index)) = resolve(&self.link.core, table, header.payload_len, need, room)
        {
            room.clear();
            self.refuse(answer(header.transfer, code, index), follows);
            return Step::On;
        }
        let pieces = Arc::clone(&self.pieces);
        let request =
            Request { transfer: header.transfer, notification, bytes: header.payload_len };
        let checksum = header.flags.contains(Flags::CHECKSUM);
        let wake = self.wake.clone().expect("set at the first call");
        let gate = Arc::clone(&self.gate);
        match header.op {
            Op::Write => {
                let sink =
                    Scatter::new(pieces, Position::default(), header.payload_len, gate, wake);
                self.state =
                    State::Payload { request, sink, digest: checksum.then(PieceDigest::new) };
            }
            Op::Read => {
                let source =
                    Gather::new(pieces, Position::default(), header.payload_len, gate, wake);
                let mut ok = answer(header.transfer, WireCode::Ok, 0);
                ok.payload_len = header.payload_len;
                ok.flags = Flags::with_checksum(checksum);
                self.state = State::Serve {
                    head: ok.encode(),
                    head_at: 0,
                    source,
                    digest: checksum.then(PieceDigest::new),
                };
                self.core().counters.bytes_served.add(request.bytes);
                self.core().counters.requests_served.one();
            }
            Op::Notify => self.written(request),
        }
        Step::On
    }

    fn payload(
        &mut self,
        request: Request,
        mut sink: Scatter,
        mut digest: Option<PieceDigest>,
        turn: &mut usize,
    ) -> Step {
        if sink.remaining() == 0 {
            self.payload_complete(request, sink, digest);
            return Step::On;
        }
        if !self.is_fresh() {
            return Step::Over;
        }
        let (socket, early) = (&self.socket, &mut self.early);
        let result = sink.lend(RECEIVE_CHUNK, &mut |spans| {
            let n =
                if early.is_empty() { socket.recv_spans(spans)? } else { take_early(early, spans) };
            if n == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            if let Some(digest) = &mut digest {
                digest_spans(digest, spans, n);
            }
            Ok(n)
        });
        match result {
            Ok(Lent::Moved(n)) => {
                *turn = turn.saturating_sub(n);
                if sink.remaining() == 0 {
                    self.payload_complete(request, sink, digest);
                } else {
                    self.state = State::Payload { request, sink, digest };
                }
                Step::On
            }
            Ok(Lent::WouldBlock) => {
                self.state = State::Payload { request, sink, digest };
                Step::Read
            }
            Ok(Lent::NotReady) => {
                self.state = State::Payload { request, sink, digest };
                Step::Memory
            }
            Err(fault) => {
                let trailer = digest.map_or(0, |_| frame::trailer_len(request.bytes));
                self.fault(fault, request.transfer, sink.remaining() + trailer)
            }
        }
    }

    fn payload_complete(&mut self, request: Request, sink: Scatter, digest: Option<PieceDigest>) {
        self.state = match digest {
            Some(digest) => {
                let len = usize::try_from(frame::trailer_len(digest.len())).expect("small");
                State::Trailer { request, sink, digest, bytes: vec![0; len], at: 0 }
            }
            None => State::Flush { request, sink },
        };
    }

    /// All bytes are in place: deliver the notification and say so.
    fn written(&mut self, request: Request) {
        let counters = &self.core().counters;
        let mut code = WireCode::Ok;
        if let Some(notification) = request.notification {
            if self.core().inbox.push(notification) {
                counters.notifications_received.one();
            } else {
                code = WireCode::Busy;
            }
        }
        counters.bytes_received.add(request.bytes);
        if code == WireCode::Ok {
            counters.requests_served.one();
        } else {
            counters.requests_refused.one();
        }
        let reply = Reply::Head(answer(request.transfer, code, 0).encode());
        self.state = State::Answer { reply, at: 0 };
    }

    /// Reads away what follows of a request, then answers it.
    fn refuse(&mut self, answer: ResponseHeader, follows: u64) {
        tracing::debug!(
            peer = %self.link.address, transfer = %answer.transfer, code = %answer.code,
            descriptor = answer.index, "refused a request"
        );
        self.core().counters.requests_refused.one();
        self.state = State::Discard { left: follows, answer };
    }

    fn discard(&mut self, left: u64, answer: ResponseHeader, turn: &mut usize) -> Step {
        if left == 0 {
            self.state = State::Answer { reply: Reply::Head(answer.encode()), at: 0 };
            return Step::On;
        }
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(RECEIVE_CHUNK);
        let result = if self.early.is_empty() {
            self.socket.discard(want)
        } else {
            let n = want.min(self.early.len());
            self.early.drain(..n);
            Ok(n)
        };
        match result {
            Ok(0) => Step::Over,
            Ok(n) => {
                *turn = turn.saturating_sub(n);
                self.state = State::Discard { left: left - n as u64, answer };
                Step::On
            }
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                self.state = State::Discard { left, answer };
                Step::Read
            }
            Err(_) => Step::Over,
        }
    }

    /// A request is done with. The peer has had no time to send more: wait rather than look.
    fn answered(&mut self) -> Step {
        self.state = State::start();
        if self.early.is_empty() { Step::Read } else { Step::On }
    }

    fn serve(
        &mut self,
        head: [u8; ResponseHeader::LEN],
        mut head_at: usize,
        mut source: Gather,
        mut digest: Option<PieceDigest>,
        turn: &mut usize,
    ) -> Step {
        if source.remaining() == 0 {
            let Some(digest) = digest else { return self.answered() };
            self.state = State::Answer { reply: Reply::Trailer(digest.finish_trailer()), at: 0 };
            return Step::On;
        }
        if !self.is_fresh() {
            return Step::Over;
        }
        let socket = &self.socket;
        let result = source.lend(SEND_CHUNK, &mut |spans| {
            let rest = &head[head_at..];
            let sent = socket.send_spans(rest, spans)?;
            let of_head = sent.min(rest.len());
            head_at += of_head;
            let payload = sent - of_head;
            if let Some(digest) = &mut digest {
                digest_spans(digest, spans, payload);
            }
            Ok(payload)
        });
        match result {
            Ok(Lent::Moved(n)) => {
                *turn = turn.saturating_sub(n);
                self.state = State::Serve { head, head_at, source, digest };
                Step::On
            }
            Ok(Lent::WouldBlock) => {
                self.state = State::Serve { head, head_at, source, digest };
                Step::Write
            }
            Ok(Lent::NotReady) => {
                self.state = State::Serve { head, head_at, source, digest };
                Step::Memory
            }
            Err(Fault::Memory { code, index }) => self.abandon(code, index),
            Err(Fault::Shut | Fault::Io(_)) => Step::Over,
        }
    }

    /// Memory went away while it was read. The header promised bytes that can't be sent any more,
    /// so only the end of the stream can say so; the reason is said first, on the control
    /// connection.
    fn abandon(&mut self, code: WireCode, index: u32) -> Step {
        tracing::debug!(peer = %self.link.address, %code, "memory went away while it was read");
        self.core().counters.requests_refused.one();
        let note = StreamFaultNote { stream: self.id.0, code: code.to_u16(), index };
        let socket = Arc::clone(&self.socket);
        self.link.request(
            service::STREAM_FAULT,
            service::encode(&note),
            self.core().config.silence(),
            Box::new(move |_, _| socket.shutdown(Shutdown::Both)),
        );
        self.state = State::Abandoned;
        Step::Memory
    }

    fn fault(&mut self, fault: Fault, transfer: TransferId, follows: u64) -> Step {
        match fault {
            Fault::Memory { code, index } => {
                self.refuse(answer(transfer, code, index), follows);
                Step::On
            }
            Fault::Shut | Fault::Io(_) => Step::Over,
        }
    }

    /// Between requests there is nothing under way.
    fn is_between(&self) -> bool {
        matches!(self.state, State::Head { at: 0, .. } | State::Dead)
    }

    fn set_busy(&mut self, busy: bool) {
        if busy == self.busy {
            return;
        }
        self.busy = busy;
        if busy {
            self.core().counters.requests_in_flight.one();
            self.link.begin();
        } else {
            self.core().counters.requests_in_flight.less_one();
            self.link.finish();
        }
    }
}

/// Looks the descriptors up, into `pieces`, which is empty; one read lock for all of them.
fn resolve(
    core: &Core,
    table: &[u8],
    payload_len: u64,
    need: Access,
    pieces: &mut Pieces,
) -> Result<(), (WireCode, u32)> {
    let (entries, rest) = table.as_chunks::<{ WireDescriptor::LEN }>();
    debug_assert!(rest.is_empty(), "the table has the length its header says");
    pieces.pieces.reserve(entries.len());
    let tables = core.regions.read();
    for (i, entry) in entries.iter().enumerate() {
        let index = u32::try_from(i).expect("bounded by the limits");
        let descriptor = WireDescriptor::read(entry);
        if descriptor.len == 0 {
            return Err((WireCode::ZeroLength, index));
        }
        let (region, offset) = tables
            .resolve(descriptor.region, descriptor.offset, descriptor.len, need)
            .map_err(|misfit| (misfit.0, index))?;
        pieces.push(region, offset, u64::from(descriptor.len));
    }
    drop(tables);
    if pieces.bytes != payload_len {
        return Err((WireCode::Malformed, 0));
    }
    Ok(())
}

/// Copies bytes that came with the opening of the stream: a few, once in its life.
fn take_early(early: &mut Vec<u8>, spans: &[kvferry_sys::HostSpan]) -> usize {
    let mut done = 0;
    for span in spans {
        let n = span.len().min(early.len() - done);
        span.truncated(n).copy_from(&early[done..done + n]);
        done += n;
    }
    early.drain(..done);
    done
}

impl Handler for InboundStream {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        if self.wake.is_none() {
            let (remote, token) = (cx.remote.clone(), cx.token);
            self.wake = Some(Arc::new(move || remote.wake(token)));
        }
        if self.gate.is_shut() || cause.ready.closed {
            // Reset, or revoked: nothing that is still in the socket may be applied.
            return Next::Close;
        }
        let mut turn = TURN;
        let interest = loop {
            match self.step(&mut turn) {
                Step::On if turn == 0 => {
                    self.set_busy(!self.is_between());
                    return Next::Again;
                }
                Step::On => {}
                Step::Read => break Interest::Read,
                Step::Write => break Interest::Write,
                Step::Memory => break Interest::None,
                Step::Over => return Next::Close,
            }
        };
        let is_between = self.is_between();
        self.set_busy(!is_between);
        if is_between && let Some(pieces) = Arc::get_mut(&mut self.pieces) {
            // Regions are not held on to; room for a few descriptors is.
            pieces.clear();
            if pieces.pieces.capacity() * size_of::<Piece>() > ROOM_KEPT {
                *pieces = Pieces::default();
            }
        }
        Next::Wait { interest, deadline: None }
    }
}

impl Drop for InboundStream {
    fn drop(&mut self) {
        self.set_busy(false);
        self.gate.shut();
        self.socket.shutdown(Shutdown::Both);
        self.core().counters.streams.less_one();
        self.link.forget_inbound(self.id);
    }
}
