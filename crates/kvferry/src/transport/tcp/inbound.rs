//! The target's side of a stream: serves the requests that a peer sends on it.
//!
//! [`Target`] decides which bytes come next in either direction; this module moves them between the
//! socket and the memory that the request's descriptors name.

use super::{digest_spans, forged, transmit_once};
use crate::core::Core;
use crate::memory::cursor::{Cursor, Lent};
use crate::memory::device::Direction;
use crate::memory::gate::Gate;
use crate::memory::pieces::{Fault, MemoryFault, Piece, Pieces, Position};
use crate::memory::region::Access;
use crate::memory::stages::Wake;
use crate::notify::Notification;
use crate::peer_memory::{Account, Memory};
use crate::quota::Permit;
use crate::reactor::{Cause, Cx, Handler, Next, now};
use crate::transfer::drive::{RECEIVE_CHUNK, STEP_BYTES};
use crate::transfer::link::Link;
use crate::transfer::requests::{STREAM_FAULT, StreamFaultNote, encode};
use crate::transport::service::AcceptedStream;
use kvferry_proto::lane::{self, Malformed, Placed, Target};
use kvferry_proto::{
    Limits, Op, PieceDigest, RequestHeader, StreamId, Timestamp, WireCode, WireDescriptor, frame,
};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use std::io;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub(super) struct InboundStream {
    link: Arc<Link>,
    id: StreamId,
    socket: Arc<Socket>,
    gate: Arc<Gate>,
    lane: Target,
    /// The memory of the current write, unless it failed.
    sink: Option<Cursor>,
    /// The memory of the current read.
    source: Option<Cursor>,
    /// The allocation for the next request's pieces; empty between requests.
    pieces: Arc<Pieces>,
    wake: Option<Wake>,
    /// Set while the link counts a request in progress.
    busy: bool,
    /// Time at which the reactor calls again to see whether the peer left its request unfinished.
    /// It is left as it is while requests move on, and so set once per silence limit at most.
    stall_check: Option<Timestamp>,
    /// Memory of heads and pieces.
    account: Account,
    _permit: Permit,
}

/// Bytes of `pieces` that a stream keeps allocated for its next request: with the kept buffer of heads
/// no more than what is free for a connection.
const PIECES_KEPT: usize = 40 * 1024;

/// The bytes that a step counts for in addition to those it moves, so that many small requests do
/// not delay other streams for longer than a large one.
const STEP_COST: usize = 1024;

#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Continue at once.
    On,
    /// Wait until the socket is readable.
    Read,
    /// Wait until the socket is writable.
    Write,
    /// Wait for the memory, or for the peer's answer to a request.
    Memory,
    Over,
}

impl InboundStream {
    pub(super) fn new(stream: AcceptedStream) -> Self {
        let AcceptedStream { link, id, socket, gate, guard, early, permit } = stream;
        link.core.counters.streams.one();
        let account = link.core.peer_memory.account(link.peer_addr.ip(), Memory::Received);
        let lane = Target::new(Limits::default(), link.checksum(), guard, early);
        Self {
            link,
            id,
            socket,
            gate,
            lane,
            sink: None,
            source: None,
            pieces: Arc::default(),
            wake: None,
            busy: false,
            stall_check: None,
            account,
            _permit: permit,
        }
    }

    fn core(&self) -> &Core {
        &self.link.core
    }

    fn step(&mut self, budget: &mut usize) -> Step {
        let next = match self.lane.poll() {
            Ok(next) => next,
            Err(malformed) => return self.malformed(&malformed),
        };
        match next {
            lane::Next::Receive(into) => match self.socket.recv(into) {
                Ok(0) => Step::Over,
                Ok(n) => {
                    self.lane.received(n);
                    Step::On
                }
                Err(e) => blocked(&e, Step::Read),
            },
            lane::Next::Grow { have, whole } => self.grow(have, whole),
            lane::Next::Decide(request) => {
                let header = request.header;
                let is_fresh = header.op != Op::Notify || is_fresh(&self.link.core);
                if self.gate.is_shut() || !is_fresh {
                    return Step::Over;
                }
                let pieces = header.descriptors as usize * size_of::<Piece>();
                // The notification is kept until the payload is complete.
                let kept = request.table.len() + pieces + header.notify_len as usize;
                if !self.account.hold(RequestHeader::LEN + kept) {
                    self.lane.refuse(WireCode::Busy, 0);
                    self.is_short_of_memory();
                    return Step::On;
                }
                match look_up(&self.link.core, &request, &mut self.pieces) {
                    Ok(()) => self.accept(&header),
                    Err((code, index)) => {
                        self.lane.refuse(code, index);
                        self.refused(code, index);
                    }
                }
                Step::On
            }
            lane::Next::Payload { early, digest, .. } => {
                if !is_fresh(&self.link.core) {
                    return Step::Over;
                }
                let sink = self.sink.as_mut().expect("made when the request was accepted");
                let (received, result) = receive(&self.socket, sink, early, digest);
                self.lane.received(received);
                match result {
                    Ok(Lent::Moved(n)) => {
                        *budget = budget.saturating_sub(n);
                        Step::On
                    }
                    Ok(Lent::WouldBlock) => Step::Read,
                    Ok(Lent::NotReady) => Step::Memory,
                    Err(fault) => self.sink_fault(&fault),
                }
            }
            lane::Next::Discard(left) => self.discard(left, budget),
            lane::Next::Flush => self.flush(),
            lane::Next::Transmit(transmit) => {
                if transmit.payload > 0 && !is_fresh(&self.link.core) {
                    return Step::Over;
                }
                let (sent, result) = transmit_once(&self.socket, self.source.as_mut(), transmit);
                self.lane.sent(sent);
                match result {
                    Ok(Lent::Moved(_)) if self.lane.is_between() => {
                        self.source = None;
                        // The peer had no time to send more, so wait instead of trying to receive.
                        Step::Read
                    }
                    Ok(Lent::Moved(n)) => {
                        *budget = budget.saturating_sub(n);
                        Step::On
                    }
                    Ok(Lent::WouldBlock) => Step::Write,
                    Ok(Lent::NotReady) => Step::Memory,
                    Err(Fault::Memory(fault)) => self.abandon(fault.code, fault.index),
                    Err(Fault::Shut | Fault::Io(_)) => Step::Over,
                }
            }
            lane::Next::Nothing => Step::Memory,
        }
    }

    /// Makes room for more of the head, of which `have` of `whole` bytes have arrived.
    fn grow(&mut self, have: usize, whole: usize) -> Step {
        // Doubling, or all that the kernel has: a large table takes few calls.
        let arrived = self.socket.readable().unwrap_or(0);
        let bytes = have.saturating_add(arrived.max(have)).min(whole);
        if self.account.hold(bytes) {
            self.lane.grow(bytes);
            return Step::On;
        }
        self.is_short_of_memory();
        let _ = self.socket.send(self.lane.exhausted().as_ref());
        Step::Over
    }

    /// Throws payload of a refused request away, of which `left` bytes are to come.
    fn discard(&mut self, left: u64, budget: &mut usize) -> Step {
        let want = usize::try_from(left).unwrap_or(usize::MAX).min(RECEIVE_CHUNK);
        match self.socket.discard(want) {
            Ok(0) => Step::Over,
            Ok(n) => {
                *budget = budget.saturating_sub(n);
                self.lane.received(n);
                Step::On
            }
            Err(e) => blocked(&e, Step::Read),
        }
    }

    /// The head is malformed: answers with the error, then ends the stream.
    fn malformed(&self, malformed: &Malformed) -> Step {
        warn_limited!(peer = %self.link.address, error = %malformed.error, "malformed request");
        self.core().counters.requests_refused.one();
        let _ = self.socket.send(malformed.answer.as_ref());
        if self.link.is_keyed() {
            self.link.close(WireCode::Forged, forged(&self.link));
        }
        Step::Over
    }

    /// Serves a request whose descriptors are in `pieces`.
    fn accept(&mut self, header: &RequestHeader) {
        let pieces = Arc::clone(&self.pieces);
        let gate = Arc::clone(&self.gate);
        let wake = self.wake.clone().expect("set by the first call of handle");
        let (at, len) = (Position::default(), header.payload_len);
        let cursor = |direction| Cursor::new(direction, pieces, at, len, gate, wake);
        match header.op {
            Op::Write => self.sink = Some(cursor(Direction::In)),
            Op::Read => {
                self.source = Some(cursor(Direction::Out));
                let counters = &self.core().counters;
                counters.bytes_served.add(len);
                counters.requests_served.one();
            }
            Op::Notify => {}
        }
        self.lane.accept();
    }

    /// Waits until all received bytes are in place; then the request is answered.
    fn flush(&mut self) -> Step {
        match self.sink.as_mut().map(Cursor::flush) {
            Some(Ok(Lent::NotReady)) => return Step::Memory,
            Some(Err(fault)) => return self.sink_fault(&fault),
            // The answer to a failed request also confirms that none of its bytes arrive any more.
            None if self.gate.has_copies() => return Step::Memory,
            Some(Ok(_)) | None => {}
        }
        self.sink = None;
        match self.lane.placed() {
            Placed::Written { notification, bytes } => self.written(notification, bytes),
            Placed::Damaged { .. } => {
                self.core().counters.checksum_errors.one();
                self.refused(WireCode::Checksum, 0);
            }
            Placed::Refused => {}
        }
        Step::On
    }

    /// Ends a request whose bytes are all in place: delivers the notification and answers.
    fn written(&mut self, notification: Option<frame::Notification>, bytes: u64) {
        let counters = &self.link.core.counters;
        let mut code = WireCode::Ok;
        if let Some(frame::Notification { name, message }) = notification {
            let from = self.link.info().map_or_else(String::new, |info| info.name.clone());
            let from_ip = Some(self.link.peer_addr.ip());
            code = self.link.core.deliver(Notification { from, from_ip, name, message });
        }
        counters.bytes_received.add(bytes);
        if code.is_ok() {
            counters.requests_served.one();
        } else {
            counters.requests_refused.one();
        }
        self.lane.answer(code);
    }

    fn is_short_of_memory(&self) {
        let counters = &self.core().counters;
        counters.requests_refused.one();
        counters.peer_memory_refused.one();
        warn_limited!(peer = %self.link.address, "refused a request: peers hold as much memory as they may");
    }

    fn refused(&self, code: WireCode, index: u32) {
        let peer = &self.link.address;
        tracing::debug!(%peer, %code, descriptor = index, "refused a request");
        self.core().counters.requests_refused.one();
    }

    fn sink_fault(&mut self, fault: &Fault) -> Step {
        let Fault::Memory(MemoryFault { code, index, .. }) = *fault else { return Step::Over };
        self.sink = None;
        self.lane.fail(code, index);
        self.refused(code, index);
        Step::On
    }

    /// Memory can't be read any more in the middle of an answer. Only the end of the stream can
    /// report that; the reason is sent first, over the control connection.
    fn abandon(&mut self, code: WireCode, index: u32) -> Step {
        tracing::debug!(peer = %self.link.address, %code, "region unregistered during a read");
        self.core().counters.requests_refused.one();
        let note = StreamFaultNote { stream: self.id.0, code: code.to_u16(), index };
        let socket = Arc::clone(&self.socket);
        self.link.request(
            STREAM_FAULT,
            encode(&note),
            self.core().settings.silence,
            Box::new(move |_, _| socket.shutdown(Shutdown::Both)),
        );
        self.source = None;
        self.lane.abandon();
        Step::Memory
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

/// Whether memory may be touched for the peer: this process was not suspended.
fn is_fresh(core: &Core) -> bool {
    core.suspend.is_fresh(now())
}

fn blocked(error: &io::Error, wait: Step) -> Step {
    if error.kind() == io::ErrorKind::WouldBlock { wait } else { Step::Over }
}

/// Receives payload in one call; returns how many bytes left the socket, and the result.
fn receive(
    socket: &Socket,
    sink: &mut Cursor,
    early: &[u8],
    mut digest: Option<&mut PieceDigest>,
) -> (usize, Result<Lent, Fault>) {
    let mut received = 0;
    let result = sink.lend(RECEIVE_CHUNK, &mut |spans| {
        let n = if early.is_empty() { socket.recv_spans(spans)? } else { copy_to(spans, early) };
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if let Some(digest) = &mut digest {
            digest_spans(digest, spans, n);
        }
        received = n;
        Ok(n)
    });
    (received, result)
}

/// Resolves the descriptors of a request into `pieces`.
fn look_up(
    core: &Core,
    request: &lane::Request<'_>,
    pieces: &mut Arc<Pieces>,
) -> Result<(), (WireCode, u32)> {
    let need = match request.header.op {
        Op::Write => Access::WRITE,
        Op::Read => Access::READ,
        Op::Notify => Access::NONE,
    };
    // Allocated again only while a cursor of an earlier request still has the last one.
    if Arc::get_mut(pieces).is_none() {
        *pieces = Arc::default();
    }
    let pieces = Arc::get_mut(pieces).expect("this is the only reference");
    let result = resolve(core, request.table, request.header.payload_len, need, pieces);
    if result.is_err() {
        pieces.clear();
    }
    result
}

/// Resolves the descriptors into `pieces`, which is empty, under one read lock.
fn resolve(
    core: &Core,
    table: &[u8],
    payload_len: u64,
    need: Access,
    pieces: &mut Pieces,
) -> Result<(), (WireCode, u32)> {
    let (entries, rest) = table.as_chunks::<{ WireDescriptor::LEN }>();
    debug_assert!(rest.is_empty(), "the table's length matches its header");
    pieces.pieces.reserve(entries.len());
    let tables = core.memory.regions.read();
    for (i, entry) in entries.iter().enumerate() {
        let index = u32::try_from(i).expect("bounded by the limits");
        let descriptor = WireDescriptor::read(entry);
        if descriptor.len == 0 {
            return Err((WireCode::ZeroLength, index));
        }
        let (region, offset) = tables
            .resolve(descriptor.region, descriptor.offset, descriptor.len, need)
            .map_err(|code| (code, index))?;
        pieces.push(region, offset, u64::from(descriptor.len));
    }
    drop(tables);
    if pieces.bytes != payload_len {
        return Err((WireCode::Malformed, 0));
    }
    Ok(())
}

/// Copies bytes that arrived with the stream's opening to the spans; returns how many.
fn copy_to(spans: &[kvferry_sys::HostSpan], early: &[u8]) -> usize {
    let mut done = 0;
    for span in spans {
        let n = span.len().min(early.len() - done);
        span.truncated(n).copy_from(&early[done..done + n]);
        done += n;
    }
    done
}

/// Takes steps until one has to wait or ends the stream, or until this stream has had its turn: `Step::On`.
/// A step takes the bytes that it moves from the budget.
fn take_turn(mut step: impl FnMut(&mut usize) -> Step) -> Step {
    let mut budget = STEP_BYTES;
    loop {
        match step(&mut budget) {
            Step::On if budget == 0 => return Step::On,
            Step::On => budget = budget.saturating_sub(STEP_COST),
            other => return other,
        }
    }
}

impl Handler for InboundStream {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn handle(&mut self, cause: Cause, cx: &Cx<'_>) -> Next {
        self.wake.get_or_insert_with(|| cx.remote.waker(cx.token));
        if self.gate.is_shut() || cause.ready.closed {
            // Reset, or revoked: no byte that is still in the socket may be applied.
            return Next::Close;
        }
        let interest = match take_turn(|budget| self.step(budget)) {
            Step::On => {
                self.set_busy(!self.lane.is_between());
                return Next::Again;
            }
            Step::Read => Interest::Read,
            // Initiators never half-close, so this one will not read the answer.
            Step::Write if cause.ready.peer_closed => return Next::Close,
            Step::Write => Interest::Write,
            Step::Memory => Interest::None,
            Step::Over => return Next::Close,
        };
        let is_between = self.lane.is_between();
        self.set_busy(!is_between);
        if is_between && let Some(pieces) = Arc::get_mut(&mut self.pieces) {
            // The regions are released; a small allocation is kept.
            pieces.clear();
            if pieces.pieces.capacity() * size_of::<Piece>() > PIECES_KEPT {
                *pieces = Pieces::default();
            }
            // Less than before.
            let _ = self.account.hold(self.lane.held_bytes());
        }
        if interest == Interest::None {
            // The memory of this side is awaited, however long that takes.
            return Next::Wait { interest, deadline: None };
        }
        let stalls_at = self.lane.stalls_at(self.core().settings.silence, cx.now);
        if stalls_at.is_some_and(|at| at <= cx.now) {
            warn_limited!(peer = %self.link.address, "closed a stream: the peer left a request unfinished");
            self.core().counters.requests_refused.one();
            return Next::Close;
        }
        if self.stall_check.is_none_or(|at| at <= cx.now) {
            self.stall_check = stalls_at;
        }
        Next::Wait { interest, deadline: self.stall_check }
    }
}

impl Drop for InboundStream {
    fn drop(&mut self) {
        self.set_busy(false);
        self.gate.shut();
        self.socket.shutdown(Shutdown::Both);
        self.core().counters.streams.less_one();
        self.link.backend().inbound_ended(self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of a stream whose every step moves so many bytes, until another stream has its turn.
    fn steps(bytes: usize) -> usize {
        let mut steps = 0;
        let end = take_turn(|budget| {
            steps += 1;
            *budget = budget.saturating_sub(bytes);
            Step::On
        });
        assert_eq!(end, Step::On);
        steps
    }

    #[test]
    fn a_stream_of_notifications_gives_way_to_others_after_a_few_thousand() {
        assert!(steps(40) <= STEP_BYTES / STEP_COST);
        assert!(steps(0) <= STEP_BYTES / STEP_COST + 1);
        assert_eq!(steps(STEP_BYTES), 1);
        let mut waits = [Step::On, Step::Read].into_iter();
        assert_eq!(take_turn(|_| waits.next().expect("no further step")), Step::Read);
    }
}
