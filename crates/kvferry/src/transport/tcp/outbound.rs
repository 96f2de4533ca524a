//! The initiator's side of a stream: one lane's share of a transfer.
//!
//! [`Initiator`] decides which bytes come next in either direction; this module moves them between
//! the socket and the memory of the transfer.

use super::{digest_spans, forged, transmit_once};
use crate::error::{Error, ErrorKind};
use crate::memory::cursor::{Cursor, Lent, lent};
use crate::memory::pieces::Fault;
use crate::memory::stages::Wake;
use crate::notify::Notification;
use crate::transfer::batch::Frame;
use crate::transfer::drive::{Drive, Progress, RECEIVE_CHUNK, STEP_BYTES, Yielding};
use crate::transfer::job::{Job, Op};
use crate::transfer::lanes::Lane;
use crate::transfer::link::Link;
use crate::transport::refusal::{local_fault, refusal};
use kvferry_proto::lane::{Begin, Initiator, LaneError, Outcome, Receive};
use kvferry_proto::{Limits, RequestHeader, Timestamp, WireCode, WireDescriptor, frame};
use kvferry_sys::poll::Interest;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

pub(crate) struct Share {
    link: Arc<Link>,
    lane: Arc<Lane>,
    job: Arc<Job>,
    wake: Wake,
    limits: Limits,
    /// Requests carry their frames; a notification has none.
    requests: Initiator<Option<Frame>>,
    /// The memory of the write that is being sent.
    source: Option<Cursor>,
    /// The memory of the read whose answer is due.
    sink: Option<Cursor>,
    /// A notification to send once everything before it is answered.
    notification: Option<Notification>,
    yielding: Yielding,
    /// Set if the lane ends once no device copies for it.
    dying: bool,
    ended: bool,
}

enum Step {
    /// Continue at once.
    On,
    /// The socket is not ready.
    Blocked,
    Memory,
    /// The lane can't be used any more; the job has the error.
    Broken,
}

impl Share {
    pub(super) fn new(link: Arc<Link>, lane: Arc<Lane>, job: Arc<Job>, wake: Wake) -> Self {
        let limits = Limits::default();
        let requests = Initiator::new(job.id, link.checksum(), limits, lane.take_guard());
        let notification = job.bare_notification();
        Self {
            link,
            lane,
            job,
            wake,
            limits,
            requests,
            source: None,
            sink: None,
            notification,
            yielding: Yielding::default(),
            dying: false,
            ended: false,
        }
    }

    // ---- outgoing ----

    /// Begins the next request, if there is one and the pipeline is not full.
    fn begin_next(&mut self, now: Timestamp) -> bool {
        if !self.requests.can_begin() || self.yielding.before_frame(&self.link, &self.job) {
            return false;
        }
        if let Some(frame) = self.job.next_frame(&self.limits) {
            self.begin_frame(frame, now);
            return true;
        }
        if self.requests.outstanding() > 0 {
            return false;
        }
        let Some(notification) = self.notification.take() else { return false };
        self.begin(frame::Op::Notify, None, Some(&notification), now);
        true
    }

    fn budget_ms(&self, now: Timestamp) -> u32 {
        let left = self.job.deadline.saturating_since(now).as_millis();
        u32::try_from(left).unwrap_or(u32::MAX).max(1)
    }

    fn begin_frame(&mut self, frame: Frame, now: Timestamp) {
        let job = Arc::clone(&self.job);
        let op = match job.op {
            Op::Write => frame::Op::Write,
            Op::Read => frame::Op::Read,
        };
        let carries = job.carries_notification(&frame);
        let notification = job.notify.as_ref().filter(|_| carries);
        self.begin(op, Some(frame), notification, now);
        self.source =
            (job.op == Op::Write).then(|| job.cursor(&frame, &self.lane.gate, &self.wake));
    }

    fn begin(
        &mut self,
        op: frame::Op,
        part: Option<Frame>,
        notification: Option<&Notification>,
        now: Timestamp,
    ) {
        let descriptors = part.map_or(0, |part| part.descriptors);
        let mut head = self.lane.take_head_buffer();
        head.clear();
        head.reserve(RequestHeader::LEN + descriptors as usize * WireDescriptor::LEN);
        head.resize(RequestHeader::LEN, 0);
        if let Some(part) = &part {
            part.write_table(&self.job.batch, &mut head);
        }
        if let Some(n) = notification {
            let wire = frame::Notification { name: n.name.clone(), message: n.message.clone() };
            wire.write_to(&mut head, &self.limits).expect("its size was checked at submission");
        }
        let payload_len = part.map_or(0, |part| part.bytes);
        let budget_ms = self.budget_ms(now);
        self.requests.begin(Begin { op, descriptors, payload_len, budget_ms }, head, part);
    }

    /// Sends one chunk of the current request.
    fn send(&mut self, budget: &mut usize) -> Step {
        let Some(transmit) = self.requests.transmit() else { return Step::On };
        let (socket, bytes) = (&self.lane.socket, transmit.bytes);
        let (mut sent, mut result) = transmit_once(socket, self.source.as_mut(), transmit);
        if matches!(result, Ok(Lent::NotReady)) && !bytes.is_empty() {
            // The head need not wait for the memory.
            result = lent(socket.send(bytes).inspect(|n| sent = *n)).map(|lent| match lent {
                Lent::Moved(_) => Lent::NotReady,
                other => other,
            });
        }
        if sent > 0
            && let Some(head) = self.requests.sent(sent)
        {
            self.source = None;
            self.lane.put_head_buffer(head);
        }
        match result {
            Ok(Lent::Moved(n)) => {
                *budget = budget.saturating_sub(n);
                Step::On
            }
            Ok(Lent::WouldBlock) => Step::Blocked,
            Ok(Lent::NotReady) => Step::Memory,
            Err(fault) => self.fault(fault),
        }
    }

    // ---- incoming ----

    /// Receives a part of the answer that is due.
    fn receive(&mut self, budget: &mut usize) -> Step {
        let answering = self.requests.answering().flatten();
        let (socket, mut received) = (&self.lane.socket, 0);
        let place = |frame: Frame| self.job.cursor(&frame, &self.lane.gate, &self.wake);
        let result = match (self.requests.receive(), answering) {
            (Receive::Nothing, _) => return Step::Blocked,
            (Receive::Bytes { into, payload }, Some(frame))
                if payload > 0 && self.job.batch.local.all_host() =>
            {
                // Payload for host memory is received in the same call.
                let sink = self.sink.get_or_insert_with(|| place(frame));
                let of_head = into.len();
                sink.lend(RECEIVE_CHUNK, &mut |spans| {
                    received = some(socket.recv_head_and_spans(into, spans)?)?;
                    Ok(received.saturating_sub(of_head))
                })
            }
            (Receive::Bytes { into, .. }, _) => {
                let result = socket.recv(into).and_then(some);
                lent(result.inspect(|n| received = *n)).map(|lent| match lent {
                    Lent::Moved(_) => Lent::Moved(0),
                    other => other,
                })
            }
            (Receive::Payload { mut digest, .. }, frame) => {
                let frame = frame.expect("only frames have payload");
                let sink = self.sink.get_or_insert_with(|| place(frame));
                sink.lend(RECEIVE_CHUNK, &mut |spans| {
                    received = some(socket.recv_spans(spans)?)?;
                    if let Some(digest) = &mut digest {
                        digest_spans(digest, spans, received);
                    }
                    Ok(received)
                })
            }
            (Receive::Flush, _) => {
                return match self.sink.as_mut().map_or(Ok(Lent::Moved(0)), Cursor::flush) {
                    Ok(Lent::NotReady) => Step::Memory,
                    Ok(_) => {
                        let outcome = self.requests.placed();
                        self.answered(outcome)
                    }
                    Err(fault) => self.fault(fault),
                };
            }
        };
        match result {
            Ok(Lent::Moved(n)) => {
                *budget = budget.saturating_sub(n);
                match self.requests.received(received) {
                    Ok(Some(outcome)) => self.answered(outcome),
                    Ok(None) => Step::On,
                    Err(error) => self.protocol(&error),
                }
            }
            Ok(Lent::WouldBlock) => Step::Blocked,
            Ok(Lent::NotReady) => Step::Memory,
            Err(fault) => self.fault(fault),
        }
    }

    /// Handles the end of a request.
    fn answered(&mut self, outcome: Outcome<Option<Frame>>) -> Step {
        self.sink = None;
        match outcome {
            Outcome::Done(Some(frame)) => {
                if let Some(notification) = self.job.acknowledged(&frame) {
                    self.notification = Some(notification);
                }
            }
            Outcome::Done(None) => self.job.noted(),
            Outcome::Refused { request, code, index } => {
                self.job.fail(self.refusal(code, index, request.as_ref()));
            }
            Outcome::Damaged { piece, .. } => {
                self.job.core.counters.checksum_errors.one();
                self.job.fail(
                    Error::new(ErrorKind::Checksum, "bytes from the peer were damaged in transit")
                        .with("piece", piece),
                );
            }
        }
        Step::On
    }

    // ---- what can go wrong ----

    fn refusal(&self, code: WireCode, index: u32, frame: Option<&Frame>) -> Error {
        let pair = frame.map(|frame| frame.pair_of(&self.job.batch, index));
        refusal(&self.link, &self.job.batch, code, pair)
    }

    fn lost(&self, e: io::Error) -> Step {
        let fault = self.link.lanes.fault_of(self.lane.id);
        let error = match (self.link.end(), fault) {
            (_, Some(fault)) => {
                let frame = self.requests.answering().flatten();
                self.refusal(fault.code, fault.index, frame.as_ref())
            }
            (Some(end), None) => end.clone(),
            (None, None) => Error::new(ErrorKind::PeerReset, "the connection to the peer broke")
                .with("peer", &self.link.address)
                .caused_by(e),
        };
        self.job.fail(error);
        Step::Broken
    }

    fn protocol(&self, error: &LaneError) -> Step {
        if self.link.is_keyed() {
            self.job.fail(forged(&self.link).with("detail", error));
            self.link.close(WireCode::Forged, forged(&self.link));
            return Step::Broken;
        }
        self.job.fail(
            Error::new(ErrorKind::Protocol, format!("the peer sent {error}"))
                .with("peer", &self.link.address),
        );
        Step::Broken
    }

    fn fault(&self, fault: Fault) -> Step {
        match fault {
            Fault::Io(e) => self.lost(e),
            Fault::Shut => self.lost(io::ErrorKind::ConnectionAborted.into()),
            Fault::Memory(fault) => {
                self.job.fail(local_fault(fault));
                Step::Broken
            }
        }
    }

    /// Ends the share. If requests are in progress, ends the lane, too.
    fn end(&mut self) -> Progress {
        if !self.requests.is_between() {
            return self.broken();
        }
        if self.lane.gate.has_copies() {
            return Progress::Memory;
        }
        self.ended = true;
        self.lane.put_guard(self.requests.release());
        self.link.put(Arc::clone(&self.lane));
        if self.yielding.yields() && !self.job.is_stopped() {
            return if self.job.share_yielded() { Progress::Yielded } else { Progress::Done };
        }
        self.job.share_ended(&self.link, None);
        Progress::Done
    }

    /// Ends the share and its lane once no device copies for it: after the outcome, no byte arrives
    /// any more.
    fn broken(&mut self) -> Progress {
        self.dying = true;
        self.lane.gate.shut();
        if self.lane.gate.has_copies() {
            return Progress::Memory;
        }
        self.ended = true;
        self.link.kill(&self.lane);
        self.job.share_ended(&self.link, Some(self.lane.id));
        Progress::Done
    }
}

/// The number of received bytes; zero means that the peer has ended the stream.
fn some(received: usize) -> io::Result<usize> {
    if received == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(received) }
}

impl Drive for Share {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.lane.socket.as_fd())
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        if self.ended {
            return Progress::Done;
        }
        if self.dying {
            return self.broken();
        }
        let mut budget = STEP_BYTES;
        let (mut wants_write, mut source_waits, mut sink_waits) = (false, false, false);
        // Sending first: an answer can't arrive before its request was sent.
        let answers_may_wait = self.requests.outstanding() == 0;
        loop {
            if self.job.is_stopped() {
                return self.end();
            }
            if self.requests.transmit().is_none() && !self.begin_next(now) {
                break;
            }
            match self.send(&mut budget) {
                Step::On => {}
                Step::Blocked => {
                    wants_write = true;
                    break;
                }
                Step::Memory => {
                    source_waits = true;
                    break;
                }
                Step::Broken => return self.broken(),
            }
            if budget == 0 {
                return Progress::Again;
            }
        }
        let is_idle = self.requests.outstanding() == 0 && self.requests.transmit().is_none();
        if !answers_may_wait || is_idle {
            loop {
                if self.job.is_stopped() {
                    return self.end();
                }
                if self.requests.outstanding() == 0 {
                    if self.requests.transmit().is_some() {
                        break;
                    }
                    if !self.begin_next(now) {
                        return self.end();
                    }
                    return Progress::Again;
                }
                match self.receive(&mut budget) {
                    Step::On => {}
                    Step::Blocked => break,
                    Step::Memory => {
                        sink_waits = true;
                        break;
                    }
                    Step::Broken => return self.broken(),
                }
                if budget == 0 {
                    return Progress::Again;
                }
            }
        }
        match (wants_write, self.requests.outstanding() > 0) {
            (true, true) => Progress::Wait(Interest::Both),
            (true, false) => Progress::Wait(Interest::Write),
            (false, answer_due) if sink_waits || (source_waits && !answer_due) => Progress::Memory,
            (false, _) => Progress::Wait(Interest::Read),
        }
    }
}
