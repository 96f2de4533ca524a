//! The initiator's side of a data connection: one lane's share of a transfer.
//!
//! Requests are sent ahead of their answers, up to a window of requests and bytes; heads and
//! payloads of many requests go out in one system call, and the statuses and payloads of many
//! reads come in with one. Answers come in the order of the requests.
//!
//! **What "done" means.** A peer of version 2 answers a write when its bytes are in place. One of
//! version 1 answers nothing; but it serves a connection's requests in their order, so a read of
//! one byte behind the writes is answered when they are in place: that is the barrier used here,
//! behind every few MiB and at the end. (That the peer's kernel has everything, which
//! `Socket::unacknowledged` could tell, would not prove it: stock initiators of version 1 return
//! before that even, and their bytes are then still on the way.) A write that a version 1 peer
//! refused shows as the end of the connection.
//!
//! **Silence.** The peer has to acknowledge a byte, to its kernel or to us, within the silence
//! window while it owes something. A peer whose process is stopped takes what its kernel's
//! buffers hold, and then nothing.

use super::exchange::{Failure, ask};
use super::inquest::{Inquest, misfit, refusal};
use super::lanes::{drop_lane, replace_lane};
use super::layout::{self, Answer, Awaited, Layout, Outgoing, STATUSES};
use super::peer::{end, notified, notify_frame};
use super::vigil::Vigil;
use super::wire::{Kind, Opcode, Request, Status};
use crate::error::{Error, ErrorKind};
use crate::memory::cursor::{Fault, Gather, Lent, Position, Scatter, Sink, Source};
use crate::memory::device::Wake;
use crate::notify::Notification;
use crate::session::link::{Lane, Link};
use crate::transfer::batch::Frame;
use crate::transfer::job::{Job, Op};
use crate::transport::{Drive, Progress, RECEIVE_CHUNK, SEND_CHUNK, TURN};
use kvferry_proto::{Limits, Timestamp};
use kvferry_sys::HostSpan;
use kvferry_sys::poll::Interest;
use kvferry_sys::vectors::{RecvVector, SendVector};
use std::collections::VecDeque;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Requests sent ahead of their answers.
const WINDOW_REQUESTS: usize = 512;
/// Payload bytes of those, unless one request has more.
const WINDOW_BYTES: u64 = 16 << 20;
/// Payload of one request; longer ranges are divided, so that the peer's answers show progress.
const REQUEST_BYTES_MAX: u64 = 8 << 20;
/// Payload between two barriers, with peers of version 1.
const BARRIER_BYTES: u64 = 4 << 20;
/// Requests between two barriers.
const BARRIER_REQUESTS: u32 = 128;
/// Parts of a batch that are handed out together.
const FRAME_PARTS_MAX: u32 = 4096;
pub(super) struct Share {
    link: Arc<Link>,
    lane: Arc<Lane>,
    job: Arc<Job>,
    wake: Wake,
    limits: Limits,
    /// The peer answers every request with a status.
    statuses: bool,
    /// The frame whose requests are being made.
    making: Option<Making>,
    /// The pair that the last request was made for.
    last_made: usize,
    /// Requests made and not sent to their end, in order.
    out: VecDeque<Outgoing>,
    /// Payload of those.
    out_bytes: u64,
    /// Where it comes from: the frame being made.
    source: Option<Gather>,
    /// Requests made and not answered, in order.
    awaited: VecDeque<Awaited>,
    /// Payload of those, either way.
    awaited_bytes: u64,
    /// Where reads go: a sink for each frame that is not complete.
    sinks: VecDeque<Scatter>,
    /// The part that came of the answer at hand's status.
    status: [u8; Status::LEN],
    status_at: usize,
    /// Payload of the answer at hand that is to come.
    payload_left: u64,
    /// All of a frame's bytes came; device copies are waited for.
    flushing: Option<Frame>,
    /// Sending failed; what the peer said before is still read.
    unsendable: Option<io::Error>,
    vigil: Vigil,
    /// To be sent when everything before it was answered.
    notification: Option<Notification>,
    /// A frame was begun on this lane.
    began: bool,
    /// The lane goes to others once everything sent was answered.
    yields: bool,
    ended: bool,
}

/// A frame, and how far its requests were made.
struct Making {
    frame: Frame,
    at: Position,
    left: u64,
    /// Requests and bytes since the last barrier, and the pair they begin with.
    unfenced: (u32, u64, usize),
}

/// What a step came to.
enum Step {
    /// Something moved.
    On,
    /// There was nothing to do.
    Idle,
    /// The socket has to be waited for.
    Blocked,
    /// The memory has to be waited for.
    Memory,
    /// The share is over; the job was told.
    Over,
}

impl Share {
    pub(super) fn new(link: Arc<Link>, lane: Arc<Lane>, job: Arc<Job>, wake: Wake) -> Self {
        let peer = link.mooncake.as_ref().expect("shares of a Mooncake link");
        Self {
            statuses: peer.acknowledges,
            vigil: Vigil::new(link.core.config.silence()),
            limits: Limits { descriptors_max: FRAME_PARTS_MAX, ..Limits::default() },
            notification: job.bare_notification(),
            link,
            lane,
            job,
            wake,
            making: None,
            last_made: 0,
            out: VecDeque::new(),
            out_bytes: 0,
            source: None,
            awaited: VecDeque::new(),
            awaited_bytes: 0,
            sinks: VecDeque::new(),
            status: [0; Status::LEN],
            status_at: 0,
            payload_left: 0,
            flushing: None,
            unsendable: None,
            began: false,
            yields: false,
            ended: false,
        }
    }

    // ---- making requests ----

    /// Makes requests until the window is full.
    fn make(&mut self) {
        while self.awaited.len() < WINDOW_REQUESTS && self.awaited_bytes < WINDOW_BYTES {
            if self.making.is_none() && !self.next_frame() {
                return;
            }
            self.make_one();
        }
    }

    /// Begins the next frame, if there is one and the last one's payload was sent.
    fn next_frame(&mut self) -> bool {
        if self.out_bytes > 0 || self.yielding() {
            return false;
        }
        let Some(frame) = self.job.next_frame(&self.limits) else { return false };
        let (pieces, at, len) = (Arc::clone(&self.job.batch.local), frame.at, frame.bytes);
        let (gate, wake) = (Arc::clone(&self.lane.gate), Arc::clone(&self.wake));
        match self.job.op {
            Op::Write => self.source = Some(Gather::new(pieces, at, len, gate, wake)),
            Op::Read => self.sinks.push_back(Scatter::new(pieces, at, len, gate, wake)),
        }
        let (at, left) = (frame.at, frame.bytes);
        self.making = Some(Making { frame, at, left, unfenced: (0, 0, frame.at.piece) });
        true
    }

    /// Whether others should have the lane before this job goes on with its next frame.
    fn yielding(&mut self) -> bool {
        if self.began && !self.yields {
            self.yields = self.link.has_waiters() && !self.job.is_handed_out();
        }
        self.began = true;
        self.yields
    }

    fn make_one(&mut self) {
        let making = self.making.as_mut().expect("looked at by the caller");
        let batch = &self.job.batch;
        let pair = making.at.piece;
        self.last_made = pair;
        let piece = batch.local.pieces[pair];
        let size = (piece.len - making.at.within).min(REQUEST_BYTES_MAX).min(making.left);
        let addr = batch.remote[pair].offset + making.at.within;
        making.left -= size;
        making.at.within += size;
        if making.at.within == piece.len {
            making.at = Position { piece: pair + 1, within: 0 };
        }
        let last_of = (making.left == 0).then_some(making.frame);
        match self.job.op {
            Op::Read => {
                self.push(Opcode::Read, addr, size);
                self.awaits(Answer::Payload, pair, size, last_of);
            }
            Op::Write if self.statuses => {
                self.push(Opcode::Write, addr, size);
                self.awaits(Answer::Status, pair, size, last_of);
            }
            Op::Write => {
                let (requests, bytes, first) = making.unfenced;
                let (requests, bytes) = (requests + 1, bytes + size);
                let fence =
                    last_of.is_some() || bytes >= BARRIER_BYTES || requests >= BARRIER_REQUESTS;
                making.unfenced =
                    if fence { (0, 0, making.at.piece) } else { (requests, bytes, first) };
                self.push(Opcode::Write, addr, size);
                if fence {
                    self.push(Opcode::Read, addr, 1);
                    self.awaits(Answer::Barrier, first, bytes, last_of);
                }
            }
        }
        if last_of.is_some() {
            self.making = None;
        }
    }

    fn push(&mut self, opcode: Opcode, addr: u64, size: u64) {
        let head = Request { size, addr, opcode, status: self.statuses }.encode();
        let left = if opcode == Opcode::Write { size } else { 0 };
        self.out_bytes += left;
        self.out.push_back(Outgoing { head, head_at: 0, left });
    }

    fn awaits(&mut self, kind: Answer, pair: usize, bytes: u64, last_of: Option<Frame>) {
        if self.awaited.is_empty() && kind == Answer::Payload {
            self.payload_left = bytes;
        }
        self.awaited_bytes += bytes;
        self.awaited.push_back(Awaited { kind, pair, bytes, last_of });
    }

    // ---- sending ----

    /// Sends one chunk of the requests made.
    fn send(&mut self, turn: &mut usize) -> Step {
        if self.out.is_empty() || self.unsendable.is_some() {
            return Step::Idle;
        }
        let (socket, out) = (&self.lane.socket, &self.out);
        let mut sent = 0;
        let mut send = |spans: &[HostSpan]| {
            let mut vector = SendVector::new();
            layout::lay_out(out, spans, &mut vector);
            sent = socket.send_vector(&vector)?;
            Ok(layout::payload_of(out, sent))
        };
        let result = match &mut self.source {
            Some(source) if self.out_bytes > 0 => {
                let limit = usize::try_from(self.out_bytes).unwrap_or(usize::MAX).min(SEND_CHUNK);
                source.lend(limit, &mut send)
            }
            _ => match send(&[]) {
                Ok(n) => Ok(Lent::Moved(n)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Lent::WouldBlock),
                Err(e) => Err(Fault::Io(e)),
            },
        };
        self.sent(sent);
        match result {
            Ok(Lent::Moved(n)) => {
                *turn = turn.saturating_sub(n.max(Request::LEN));
                Step::On
            }
            Ok(Lent::WouldBlock) => Step::Blocked,
            Ok(Lent::NotReady) => Step::Memory,
            Err(Fault::Io(e)) => {
                // A refusal may have come before the connection went.
                self.unsendable = Some(e);
                Step::Idle
            }
            Err(fault) => self.fault(fault),
        }
    }

    /// Takes `sent` bytes off the requests on their way out.
    fn sent(&mut self, mut sent: usize) {
        self.vigil.sent += sent as u64;
        while sent > 0 {
            let front = self.out.front_mut().expect("nobody sends more than there is");
            let of_head = sent.min(Request::LEN - front.head_at);
            front.head_at += of_head;
            sent -= of_head;
            let payload = front.left.min(sent as u64);
            front.left -= payload;
            self.out_bytes -= payload;
            sent -= usize::try_from(payload).expect("at most what was sent");
            if front.left > 0 || front.head_at < Request::LEN {
                return;
            }
            self.out.pop_front();
        }
    }

    // ---- receiving ----

    /// Takes in some of the answers.
    fn receive(&mut self, turn: &mut usize) -> Step {
        if let Some(frame) = self.flushing {
            return self.flush(&frame);
        }
        match self.awaited.front() {
            None => match self.unsendable.take() {
                Some(e) => self.lost(e),
                None => Step::Idle,
            },
            Some(front) if front.kind == Answer::Payload => self.receive_payload(turn),
            Some(_) => self.receive_statuses(),
        }
    }

    /// Statuses and barriers: as many as are there.
    fn receive_statuses(&mut self) -> Step {
        let mut buffer = [0; 1024];
        let owed: usize = self.awaited.iter().map(|a| a.answer_len()).sum();
        let want = (owed - self.status_at).min(buffer.len());
        let n = match self.lane.socket.recv(&mut buffer[..want]) {
            Ok(0) => return self.lost(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => n,
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => return self.unanswered(),
            Err(e) => return self.lost(e),
        };
        self.vigil.received += n as u64;
        let mut rest = &buffer[..n];
        while !rest.is_empty() {
            let len = self.awaited.front().expect("no more was received").answer_len();
            let take = rest.len().min(len - self.status_at);
            self.status[self.status_at..self.status_at + take].copy_from_slice(&rest[..take]);
            self.status_at += take;
            rest = &rest[take..];
            if self.status_at < len {
                break;
            }
            self.status_at = 0;
            if len == Status::LEN
                && let Some(over) = self.check(0)
            {
                return over;
            }
            self.answered();
        }
        Step::On
    }

    /// A status and payload for each of several reads.
    fn receive_payload(&mut self, turn: &mut usize) -> Step {
        let frame_bytes = self.issued_of_frame();
        let sink = self.sinks.front_mut().expect("reads have a sink");
        let limit = usize::try_from(frame_bytes).unwrap_or(usize::MAX).min(RECEIVE_CHUNK);
        let mut slots = [[0; Status::LEN]; STATUSES];
        slots[0] = self.status;
        let places = Layout {
            awaited: &self.awaited,
            status_len: if self.statuses { Status::LEN } else { 0 },
            status_at: self.status_at,
            payload_left: self.payload_left,
        };
        let (socket, mut came) = (&self.lane.socket, 0);
        let result = sink.lend(limit, &mut |spans| {
            let mut vector = RecvVector::new();
            places.lay_out(&mut slots, spans, &mut vector);
            came = socket.recv_vector(&mut vector)?;
            if came == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            Ok(places.payload_of(came))
        });
        self.vigil.received += came as u64;
        match result {
            Ok(Lent::Moved(n)) => {
                *turn = turn.saturating_sub(n.max(Status::LEN));
                self.came(came, &slots)
            }
            Ok(Lent::WouldBlock) => self.unanswered(),
            Ok(Lent::NotReady) => Step::Memory,
            Err(Fault::Io(e)) => self.lost(e),
            Err(fault) => self.fault(fault),
        }
    }

    /// Payload that may come for the frame at the front.
    fn issued_of_frame(&self) -> u64 {
        let mut bytes = self.payload_left;
        let mut ends = self.awaited.front().is_some_and(|a| a.last_of.is_some());
        for awaited in self.awaited.iter().skip(1) {
            if ends {
                break;
            }
            bytes += awaited.bytes;
            ends = awaited.last_of.is_some();
        }
        bytes
    }

    /// Goes through `came` bytes of answers that are in their places.
    fn came(&mut self, mut came: usize, slots: &[[u8; Status::LEN]]) -> Step {
        let mut slot = 0;
        while came > 0 {
            if self.statuses && self.status_at < Status::LEN {
                let take = came.min(Status::LEN - self.status_at);
                let to = self.status_at + take;
                self.status[self.status_at..to].copy_from_slice(&slots[slot][self.status_at..to]);
                self.status_at = to;
                came -= take;
                if self.status_at < Status::LEN {
                    break;
                }
                if let Some(over) = self.check(came) {
                    return over;
                }
            }
            let payload = self.payload_left.min(came as u64);
            self.payload_left -= payload;
            came -= usize::try_from(payload).expect("at most what came");
            if self.payload_left > 0 {
                break;
            }
            slot += 1;
            self.status_at = 0;
            if let Some(frame) = self.read() {
                self.flushing = Some(frame);
            }
        }
        Step::On
    }

    /// The read at the front is complete. Returns its frame if that is complete, too.
    fn read(&mut self) -> Option<Frame> {
        let read = self.awaited.pop_front().expect("it was answered");
        self.awaited_bytes -= read.bytes;
        self.payload_left = self.awaited.front().map_or(0, |next| next.bytes);
        read.last_of
    }

    fn flush(&mut self, frame: &Frame) -> Step {
        let sink = self.sinks.front_mut().expect("kept until it is flushed");
        match sink.flush() {
            Ok(Lent::NotReady) => Step::Memory,
            Ok(_) => {
                self.sinks.pop_front();
                self.flushing = None;
                self.acknowledged(frame);
                Step::On
            }
            Err(fault) => self.fault(fault),
        }
    }

    /// The write or barrier at the front was answered.
    fn answered(&mut self) {
        let done = self.awaited.pop_front().expect("it was answered");
        self.awaited_bytes -= done.bytes;
        if let Some(frame) = done.last_of {
            self.acknowledged(&frame);
        }
    }

    fn acknowledged(&mut self, frame: &Frame) {
        let behind = self.job.acknowledged(frame);
        let carried = self.job.carries_notification(frame);
        // Nothing but the data goes on this connection: a notification always follows.
        let notification = if carried { self.job.notify.clone() } else { behind };
        self.notification = notification.or(self.notification.take());
    }

    /// There is nothing to receive; after a failure to send, there won't be.
    fn unanswered(&mut self) -> Step {
        match self.unsendable.take() {
            Some(e) => self.lost(e),
            None => Step::Blocked,
        }
    }

    // ---- what can go wrong ----

    /// Looks at a complete status; `Some` if the share is over. `more` bytes came behind it.
    fn check(&mut self, more: usize) -> Option<Step> {
        match Status::decode(self.status) {
            Ok(Status::Done) => None,
            Ok(status) if more == 0 => Some(self.refused(status)),
            Ok(_) => Some(self.protocol("bytes behind a refusal")),
            Err(e) => Some(self.protocol(e)),
        }
    }

    /// A refusal ends the connection, but nothing behind it is applied: the lane is replaced, the
    /// link goes on.
    fn refused(&mut self, status: Status) -> Step {
        let pair = self.awaited.front().expect("it was refused").pair;
        let peer = self.link.mooncake.as_ref().expect("shares of a Mooncake link");
        let batch = &self.job.batch;
        let (addr, len) = (batch.remote[pair].offset, batch.local.pieces[pair].len);
        let kind = match status {
            // If it would fit what was told of last, it is not registered any more.
            Status::Refused => {
                misfit(addr, len, &peer.buffers()).unwrap_or(ErrorKind::NotRegistered)
            }
            _ => ErrorKind::Protocol,
        };
        let error = refusal(&self.link, &self.job, pair, kind);
        self.job.fail(error);
        replace_lane(&self.link, &self.lane);
        self.over(false)
    }

    /// The connection broke.
    fn lost(&mut self, e: io::Error) -> Step {
        if let Some(ended) = self.link.end() {
            self.job.fail(ended.clone());
            drop_lane(&self.link, &self.lane);
            return self.over(true);
        }
        let error = Error::new(ErrorKind::PeerReset, "the connection to the peer broke")
            .with("peer", &self.link.address)
            .caused_by(e);
        drop_lane(&self.link, &self.lane);
        self.ended = true;
        let inquest = Inquest {
            link: Arc::clone(&self.link),
            job: Arc::clone(&self.job),
            lane: self.lane.id,
            pairs: self.under_way(),
            error,
        };
        inquest.hold();
        Step::Over
    }

    /// The pairs that were asked for and not answered.
    fn under_way(&self) -> RangeInclusive<usize> {
        let made = self.making.as_ref().filter(|m| m.unfenced.0 > 0).map(|m| m.unfenced.2);
        let first = self.awaited.front().map(|a| a.pair).or(made);
        match first {
            Some(first) => first..=self.last_made.max(first),
            None => RangeInclusive::new(1, 0),
        }
    }

    fn protocol(&mut self, what: impl std::fmt::Display) -> Step {
        self.job.fail(
            Error::new(ErrorKind::Protocol, format!("the peer sent {what}"))
                .with("peer", &self.link.address),
        );
        drop_lane(&self.link, &self.lane);
        self.over(true)
    }

    fn silent(&mut self) -> Step {
        let error = Error::new(ErrorKind::PeerSilent, "the peer acknowledged nothing for too long")
            .with("peer", &self.link.address)
            .with("silence_ms", self.vigil.silence.as_millis());
        self.job.fail(error.clone());
        drop_lane(&self.link, &self.lane);
        end(&self.link, error);
        self.over(true)
    }

    fn fault(&mut self, fault: Fault) -> Step {
        match fault {
            Fault::Io(e) => self.lost(e),
            Fault::Shut => self.lost(io::ErrorKind::ConnectionAborted.into()),
            Fault::Memory { code, index } => {
                self.job.fail(
                    Error::new(
                        ErrorKind::from_wire(code),
                        "local memory of the transfer can't be used any more",
                    )
                    .with("descriptor", index),
                );
                drop_lane(&self.link, &self.lane);
                self.over(true)
            }
        }
    }

    /// The lane is dead. `dirty` if requests on it may still be under way at the peer.
    fn over(&mut self, dirty: bool) -> Step {
        self.ended = true;
        self.job.share_ended(&self.link, dirty.then_some(self.lane.id));
        Step::Over
    }

    // ---- the end ----

    /// Whether the peer owes nothing and was promised nothing.
    fn is_clean(&self) -> bool {
        self.awaited.is_empty() && self.out.is_empty() && self.flushing.is_none()
    }

    /// Ends the share: with requests under way, the lane dies with it.
    fn end(&mut self) -> Progress {
        if !self.is_clean() || self.making.as_ref().is_some_and(|m| m.unfenced.0 > 0) {
            drop_lane(&self.link, &self.lane);
            self.over(true);
            return Progress::Done;
        }
        self.ended = true;
        self.link.put(Arc::clone(&self.lane));
        if self.job.is_stopped() {
            self.job.share_ended(&self.link, None);
            return Progress::Done;
        }
        if self.yields && self.notification.is_none() {
            return if self.job.share_yielded() { Progress::Yielded } else { Progress::Done };
        }
        match self.notification.take() {
            Some(notification) => self.notify(&notification),
            None => self.job.share_ended(&self.link, None),
        }
        Progress::Done
    }

    /// Sends the notification on a connection of its own; the share ends with its answer.
    fn notify(&self, notification: &Notification) {
        let request = match notify_frame(notification) {
            Ok(request) => request,
            Err(e) => {
                self.job.fail(e);
                return self.job.share_ended(&self.link, None);
            }
        };
        let (core, job, link) = (&self.link.core, Arc::clone(&self.job), Arc::clone(&self.link));
        let left = job.deadline.saturating_since(crate::reactor::now());
        ask(
            core,
            self.link.peer_addr,
            Kind::Notify,
            request,
            left.min(core.handshake_timeout()),
            Box::new(move |_, answer| {
                let answer = answer.map_err(Failure::into_error);
                if let Err(e) = answer.and_then(|answer| notified(&answer)) {
                    job.fail(e.with("peer", &link.address));
                }
                job.share_ended(&link, None);
            }),
        );
    }
}

impl Drive for Share {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.lane.socket.as_fd())
    }

    fn check_at(&self) -> Option<Timestamp> {
        if self.ended { None } else { self.vigil.next() }
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        if self.ended {
            return Progress::Done;
        }
        let mut turn = TURN;
        // Answers can't be there before their requests were sent.
        let mut answers_may_wait = self.awaited.is_empty();
        loop {
            if self.job.is_stopped() {
                return self.end();
            }
            self.make();
            let sent = self.send(&mut turn);
            if matches!(sent, Step::Over) {
                return Progress::Done;
            }
            if matches!(sent, Step::On) && answers_may_wait && turn > 0 {
                continue;
            }
            if answers_may_wait && self.out.is_empty() && !self.awaited.is_empty() {
                return self.waits(&sent, &Step::Blocked, now);
            }
            answers_may_wait = false;
            let received = self.receive(&mut turn);
            if matches!(received, Step::Over) {
                return Progress::Done;
            }
            if self.is_clean() && self.making.is_none() && !self.more() {
                return self.end();
            }
            if turn == 0 {
                return Progress::Again;
            }
            if !matches!(sent, Step::On) && !matches!(received, Step::On) {
                return self.waits(&sent, &received, now);
            }
        }
    }
}

impl Share {
    /// Whether there is more to be moved on this lane.
    fn more(&mut self) -> bool {
        self.make();
        !self.awaited.is_empty()
    }

    /// What to wait for.
    fn waits(&mut self, sent: &Step, received: &Step, now: Timestamp) -> Progress {
        if matches!(sent, Step::Memory) || matches!(received, Step::Memory) {
            // The peer waits for us.
            self.vigil.rest();
            return Progress::Memory;
        }
        if self.vigil.is_over(&self.lane.socket, now) {
            self.silent();
            return Progress::Done;
        }
        match (matches!(sent, Step::Blocked), self.awaited.is_empty()) {
            (true, true) => Progress::Wait(Interest::Write),
            (true, false) => Progress::Wait(Interest::Both),
            (false, _) => Progress::Wait(Interest::Read),
        }
    }
}
