//! The initiator's side of a data connection: one lane's share of a transfer.
//!
//! Requests are sent ahead of their answers, up to a window of requests and bytes. One system call
//! sends the heads and payloads of many requests, and one receives the statuses and payloads of
//! many reads. Answers come in the order of the requests.
//!
//! **Completion.** A peer of version 2 answers a write when its bytes are in place. A peer of
//! version 1 does not answer writes, but serves a connection's requests in their order, so a read
//! of one byte after the writes is answered when they are in place. That read is the barrier used
//! here, after every few MiB and at the end. (An acknowledgement of all bytes by the peer's kernel,
//! see `Socket::unacknowledged`, would prove nothing: stock initiators of version 1 return even
//! before that, while their bytes are still on the way.) If a version 1 peer refuses a write, it
//! ends the connection.
//!
//! **Silence.** While the peer owes an answer, its kernel has to acknowledge a byte, or the peer
//! has to send one, within each silence window. The kernel of a stopped process takes what its
//! buffers hold, and then nothing. While this side waits for memory of a device, the peer owes the
//! acknowledgement of what was sent, and answers to reads.

mod end;

use super::layout::{self, Answer, Awaited, Layout, Outgoing, STATUSES};
use super::peer::MooncakePeer;
use super::stall_detector::StallDetector;
use super::wire::{Opcode, Request, Status};
use end::Dying;
use kvferry::Notification;
use kvferry::transport::{
    Cursor, Drive, Fault, Frame, Job, Lane, Lent, Link, Op, Part, Parts, Progress, RECEIVE_CHUNK,
    SEND_CHUNK, STEP_BYTES, Wake, Yielding, lent,
};
use kvferry_proto::{Limits, Timestamp};
use kvferry_sys::HostSpan;
use kvferry_sys::poll::{self, Interest, Ready};
use kvferry_sys::vectors::{RecvVector, SendVector};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

/// Requests without an answer, at most.
const WINDOW_REQUESTS: usize = 512;
/// Payload bytes of requests without an answer, unless one request has more.
const WINDOW_BYTES: u64 = 16 << 20;
/// Payload bytes of one request; longer ranges are divided, so that the peer's answers show
/// progress.
const REQUEST_BYTES_MAX: u64 = 8 << 20;
/// Payload bytes between two barriers, with peers of version 1.
const BARRIER_BYTES: u64 = 4 << 20;
/// Requests between two barriers.
const BARRIER_REQUESTS: u32 = 128;
/// Descriptors of one frame, at most.
const FRAME_PARTS_MAX: u32 = 4096;

pub(super) struct Share {
    peer: Arc<MooncakePeer>,
    link: Arc<Link>,
    lane: Arc<Lane>,
    job: Arc<Job>,
    wake: Wake,
    limits: Limits,
    /// The peer answers every request with a status (version 2).
    statuses: bool,
    /// The frame whose requests are being made.
    making: Option<Making>,
    /// The pair that the last request was made for.
    last_made: usize,
    /// Requests that are not completely sent, in order.
    out: VecDeque<Outgoing>,
    /// Payload bytes of `out`.
    out_bytes: u64,
    /// The memory of the frame being made, for writes.
    source: Option<Cursor>,
    /// Requests that are not completely answered, in order.
    awaited: VecDeque<Awaited>,
    /// Payload bytes of `awaited`, in either direction.
    awaited_bytes: u64,
    /// The destinations of reads: a sink for each incomplete frame.
    sinks: VecDeque<Cursor>,
    /// The received part of the next answer's status.
    status: [u8; Status::LEN],
    status_at: usize,
    /// Payload bytes that the current answer still lacks.
    payload_left: u64,
    /// All bytes of a frame have arrived, but device copies are in progress.
    flushing: Option<Frame>,
    /// The socket took nothing at the last attempt to send.
    is_full: bool,
    /// Sending failed; what the peer sent before is still read.
    unsendable: Option<io::Error>,
    stall_detector: StallDetector,
    /// A notification to send once everything before it is answered.
    notification: Option<Notification>,
    yielding: Yielding,
    /// The lane is gone. The share ends when no device copies for it any more.
    dying: Option<Dying>,
    ended: bool,
}

/// A frame, and the progress of making its requests.
struct Making {
    frame: Frame,
    parts: Parts,
    /// Requests and bytes since the last barrier, and the first pair of them.
    unfenced: (u32, u64, usize),
}

enum Step {
    /// Bytes moved.
    On,
    /// There was nothing to do.
    Idle,
    /// The socket is not ready.
    Blocked,
    Memory,
    /// The lane is gone: [`Share::finish`] ends the share.
    Over,
}

impl Share {
    pub(super) fn new(
        peer: Arc<MooncakePeer>,
        link: Arc<Link>,
        lane: Arc<Lane>,
        job: Arc<Job>,
        wake: Wake,
    ) -> Self {
        let notification = job.bare_notification();
        Self {
            statuses: peer.acknowledges,
            stall_detector: StallDetector::new(link.core.silence()),
            limits: Limits { descriptors_max: FRAME_PARTS_MAX, ..Limits::default() },
            notification,
            peer,
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
            is_full: false,
            unsendable: None,
            yielding: Yielding::default(),
            dying: None,
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

    /// Begins the next frame, if there is one and all payload of the last one was sent.
    fn next_frame(&mut self) -> bool {
        if self.out_bytes > 0 || self.yielding.before_frame(&self.link, &self.job) {
            return false;
        }
        let Some(frame) = self.job.next_frame(&self.limits) else { return false };
        let memory = self.job.cursor(&frame, &self.lane.gate, &self.wake);
        match self.job.op {
            Op::Write => self.source = Some(memory),
            Op::Read => self.sinks.push_back(memory),
        }
        self.making = Some(Making { frame, parts: frame.parts(), unfenced: (0, 0, 0) });
        true
    }

    fn make_one(&mut self) {
        let making = self.making.as_mut().expect("the caller has begun a frame");
        let part = self.job.next_part(&mut making.parts, REQUEST_BYTES_MAX);
        let Part { pair, offset: addr, len: size, .. } =
            part.expect("a frame with no range left is not being made");
        self.last_made = pair;
        let last_of = making.parts.is_empty().then_some(making.frame);
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
                let first = if requests == 0 { pair } else { first };
                let (requests, bytes) = (requests + 1, bytes + size);
                let fence =
                    last_of.is_some() || bytes >= BARRIER_BYTES || requests >= BARRIER_REQUESTS;
                making.unfenced = if fence { (0, 0, 0) } else { (requests, bytes, first) };
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

    /// Sends one chunk of `out`.
    fn send(&mut self, budget: &mut usize) -> Step {
        if self.out.is_empty() || self.unsendable.is_some() {
            return Step::Idle;
        }
        // A check of the peer comes without room in the socket. Its device would copy in vain.
        if self.is_full && !self.is_ready(Interest::Write) {
            return match self.source.as_mut().map(Cursor::park) {
                Some(Err(fault)) => self.fault(fault),
                _ => Step::Blocked,
            };
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
            _ => lent(send(&[])),
        };
        self.sent(sent);
        self.is_full = matches!(result, Ok(Lent::WouldBlock));
        match result {
            Ok(Lent::Moved(n)) => {
                *budget = budget.saturating_sub(n.max(Request::LEN));
                Step::On
            }
            Ok(Lent::WouldBlock) => Step::Blocked,
            Ok(Lent::NotReady) => Step::Memory,
            Err(Fault::Io(e)) => {
                // The peer may have refused a request before the connection broke.
                self.unsendable = Some(e);
                Step::Idle
            }
            Err(fault) => self.fault(fault),
        }
    }

    /// Polls the socket without waiting.
    fn is_ready(&self, interest: Interest) -> bool {
        let ready = poll::wait_one(self.lane.socket.as_fd(), interest, Some(Duration::ZERO));
        ready.is_ok_and(Ready::any)
    }

    /// Removes `sent` bytes from `out`.
    fn sent(&mut self, mut sent: usize) {
        self.stall_detector.sent += sent as u64;
        while sent > 0 {
            let front = self.out.front_mut().expect("no more was sent than there is");
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

    /// Receives some of the answers.
    fn receive(&mut self, budget: &mut usize) -> Step {
        if let Some(frame) = self.flushing {
            return self.flush(&frame);
        }
        match self.awaited.front() {
            None => match self.unsendable.take() {
                Some(e) => self.lost(e),
                None => Step::Idle,
            },
            Some(front) if front.kind == Answer::Payload => self.receive_payload(budget),
            Some(_) => self.receive_statuses(),
        }
    }

    /// Receives as many statuses and barriers as have arrived.
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
        self.stall_detector.received += n as u64;
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

    /// Receives a status and payload for each of several reads.
    fn receive_payload(&mut self, budget: &mut usize) -> Step {
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
        self.stall_detector.received += came as u64;
        match result {
            Ok(Lent::Moved(n)) => {
                *budget = budget.saturating_sub(n.max(Status::LEN));
                self.came(came, &slots)
            }
            Ok(Lent::WouldBlock) => self.unanswered(),
            Ok(Lent::NotReady) => Step::Memory,
            Err(Fault::Io(e)) => self.lost(e),
            Err(fault) => self.fault(fault),
        }
    }

    /// Payload bytes that may arrive for the front frame.
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

    /// Accounts for `came` bytes of answers that were received in place.
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

    /// The front read is complete. Returns its frame if that is complete, too.
    fn read(&mut self) -> Option<Frame> {
        let read = self.awaited.pop_front().expect("its answer was received");
        self.awaited_bytes -= read.bytes;
        self.payload_left = self.awaited.front().map_or(0, |next| next.bytes);
        read.last_of
    }

    fn flush(&mut self, frame: &Frame) -> Step {
        let sink = self.sinks.front_mut().expect("a sink stays until it is flushed");
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

    /// The front write or barrier was answered.
    fn answered(&mut self) {
        let done = self.awaited.pop_front().expect("its answer was received");
        self.awaited_bytes -= done.bytes;
        if let Some(frame) = done.last_of {
            self.acknowledged(&frame);
        }
    }

    fn acknowledged(&mut self, frame: &Frame) {
        let behind = self.job.acknowledged(frame);
        let carried = self.job.carries_notification(frame);
        // This connection carries only data: the notification always follows on another one.
        let notification = if carried { self.job.notify.clone() } else { behind };
        if notification.is_some() {
            self.job.owe_note();
            self.notification = notification;
        }
    }

    /// There is nothing to receive; after a failed send, there will never be.
    fn unanswered(&mut self) -> Step {
        match self.unsendable.take() {
            Some(e) => self.lost(e),
            None => Step::Blocked,
        }
    }

    // ---- what can go wrong ----

    /// Handles a complete status; `Some` if the share has ended. `more` bytes arrived after it.
    fn check(&mut self, more: usize) -> Option<Step> {
        match Status::decode(self.status) {
            Ok(Status::Done) => None,
            Ok(status) if more == 0 => Some(self.refused(status)),
            Ok(_) => Some(self.protocol("bytes after a refusal")),
            Err(e) => Some(self.protocol(e)),
        }
    }
}

impl Drive for Share {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.lane.socket.as_fd())
    }

    fn check_at(&self) -> Option<Timestamp> {
        let is_over = self.ended || self.dying.is_some();
        if is_over { None } else { self.stall_detector.next() }
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        if self.ended {
            return Progress::Done;
        }
        if self.dying.is_some() {
            return self.finish();
        }
        let mut budget = STEP_BYTES;
        // Sending first: answers can't arrive before their requests were sent.
        let mut answers_may_wait = self.awaited.is_empty();
        loop {
            if self.job.is_stopped() {
                return self.end();
            }
            self.make();
            let sent = self.send(&mut budget);
            if matches!(sent, Step::Over) {
                return self.finish();
            }
            if matches!(sent, Step::On) && answers_may_wait && budget > 0 {
                continue;
            }
            if answers_may_wait && self.out.is_empty() && !self.awaited.is_empty() {
                return self.waits(&sent, &Step::Blocked, now);
            }
            answers_may_wait = false;
            let received = self.receive(&mut budget);
            if matches!(received, Step::Over) {
                return self.finish();
            }
            if self.is_clean() && self.making.is_none() && !self.more() {
                return self.end();
            }
            if budget == 0 {
                return Progress::Again;
            }
            if !matches!(sent, Step::On) && !matches!(received, Step::On) {
                return self.waits(&sent, &received, now);
            }
        }
    }
}

impl Share {
    /// Whether this lane has more to move.
    fn more(&mut self) -> bool {
        self.make();
        !self.awaited.is_empty()
    }

    /// True if the peer has to go on although this side waits for memory.
    fn is_owed(&self) -> bool {
        match self.job.op {
            Op::Write => self.lane.socket.unacknowledged().is_ok_and(|bytes| bytes > 0),
            // Bytes that have arrived may be what keeps the peer from reading further requests.
            Op::Read => !self.awaited.is_empty() && !self.is_ready(Interest::Read),
        }
    }

    /// The event to wait for.
    fn waits(&mut self, sent: &Step, received: &Step, now: Timestamp) -> Progress {
        let lacks_memory = matches!(sent, Step::Memory) || matches!(received, Step::Memory);
        if lacks_memory && !self.is_owed() {
            // The peer waits for this side.
            self.stall_detector.rest();
            return Progress::Memory;
        }
        // While the window is full, other transfers can use what was read ahead.
        if !lacks_memory
            && self.out_bytes == 0
            && let Some(Err(fault)) = self.source.as_mut().map(Cursor::park)
        {
            self.fault(fault);
            return self.finish();
        }
        if self.stall_detector.is_over(&self.lane.socket, now) {
            self.silent();
            return self.finish();
        }
        if lacks_memory {
            return Progress::Memory;
        }
        match (matches!(sent, Step::Blocked), self.awaited.is_empty()) {
            (true, true) => Progress::Wait(Interest::Write),
            (true, false) => Progress::Wait(Interest::Both),
            (false, _) => Progress::Wait(Interest::Read),
        }
    }
}

#[cfg(test)]
mod tests;
