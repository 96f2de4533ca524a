//! The initiator's side of a stream: one lane's share of a transfer.

use crate::error::{Error, ErrorKind};
use crate::memory::cursor::{Fault, Gather, Lent, Scatter, Sink, Source};
use crate::memory::device::Wake;
use crate::notify::Notification;
use crate::session::link::{Lane, Link};
use crate::transfer::batch::Frame;
use crate::transfer::job::{Job, Op};
use crate::transport::{Drive, Progress, RECEIVE_CHUNK, SEND_CHUNK, TURN, local_fault, refusal};
use kvferry_proto::{
    Flags, Limits, PieceDigest, RequestHeader, ResponseHeader, Timestamp, WireCode, WireDescriptor,
    frame,
};
use kvferry_sys::poll::Interest;
use kvferry_sys::socket::Socket;
use smallvec::SmallVec;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// Requests sent ahead of their answers on one lane.
const PIPELINE: usize = 4;

pub(crate) struct Share {
    link: Arc<Link>,
    lane: Arc<Lane>,
    job: Arc<Job>,
    wake: Wake,
    limits: Limits,
    flags: Flags,
    tx: Option<Tx>,
    /// Sent, not answered. `None` is a notification.
    sent: SmallVec<[Option<Frame>; PIPELINE]>,
    rx: Rx,
    /// Where the payload of the answer at hand goes, if it may come with its head in one call.
    ahead: Option<Scatter>,
    /// A notification to be sent when everything before it was answered.
    notification: Option<Notification>,
    /// A frame was sent on this lane.
    began: bool,
    /// The lane goes to others once everything sent was answered.
    yields: bool,
    ended: bool,
}

/// A request on its way out.
struct Tx {
    frame: Option<Frame>,
    head: Vec<u8>,
    head_at: usize,
    source: Option<Gather>,
    digest: Option<PieceDigest>,
    trailer: Option<Vec<u8>>,
    trailer_at: usize,
}

/// An answer on its way in.
enum Rx {
    Head { bytes: [u8; ResponseHeader::LEN], at: usize },
    Payload { sink: Scatter, digest: Option<PieceDigest> },
    Trailer { sink: Scatter, digest: PieceDigest, bytes: Vec<u8>, at: usize },
    Flush { sink: Scatter },
}

impl Rx {
    const fn start() -> Self {
        Self::Head { bytes: [0; ResponseHeader::LEN], at: 0 }
    }
}

/// What a step came to.
enum Step {
    /// Go on at once.
    On,
    /// The socket has to be waited for.
    Blocked,
    /// The memory has to be waited for.
    Memory,
    /// The lane can't be used any more; the job was told.
    Broken,
}

impl Share {
    pub(super) fn new(link: Arc<Link>, lane: Arc<Lane>, job: Arc<Job>, wake: Wake) -> Self {
        let flags = Flags::with_checksum(link.checksum());
        let notification = job.bare_notification();
        Self {
            link,
            lane,
            job,
            wake,
            limits: Limits::default(),
            flags,
            tx: None,
            sent: SmallVec::new(),
            rx: Rx::start(),
            ahead: None,
            notification,
            began: false,
            yields: false,
            ended: false,
        }
    }

    // ---- outgoing ----

    /// The next request, if there is one and the pipeline has room.
    fn next_request(&mut self, now: Timestamp) -> Option<Tx> {
        if self.sent.len() >= PIPELINE || self.yielding() {
            return None;
        }
        if let Some(frame) = self.job.next_frame(&self.limits) {
            return Some(self.request(frame, now));
        }
        if self.sent.is_empty()
            && let Some(notification) = self.notification.take()
        {
            return Some(self.bare(&notification, now));
        }
        None
    }

    /// Whether others should have the lane before this job goes on with its next frame.
    fn yielding(&mut self) -> bool {
        if self.began && !self.yields {
            self.yields = self.link.has_waiters() && !self.job.is_handed_out();
        }
        self.began = true;
        self.yields
    }

    fn budget_ms(&self, now: Timestamp) -> u32 {
        let left = self.job.deadline.saturating_since(now).as_millis();
        u32::try_from(left).unwrap_or(u32::MAX).max(1)
    }

    fn request(&self, frame: Frame, now: Timestamp) -> Tx {
        let job = &*self.job;
        let op = match job.op {
            Op::Write => frame::Op::Write,
            Op::Read => frame::Op::Read,
        };
        let notification =
            if job.carries_notification(&frame) { job.notify.as_ref() } else { None };
        let head = self.head(op, Some(&frame), notification, now);
        let source = (job.op == Op::Write).then(|| {
            Gather::new(
                Arc::clone(&job.batch.local),
                frame.at,
                frame.bytes,
                Arc::clone(&self.lane.gate),
                Arc::clone(&self.wake),
            )
        });
        let digest =
            (source.is_some() && self.flags.contains(Flags::CHECKSUM)).then(PieceDigest::new);
        Tx { frame: Some(frame), head, head_at: 0, source, digest, trailer: None, trailer_at: 0 }
    }

    fn bare(&self, notification: &Notification, now: Timestamp) -> Tx {
        let head = self.head(frame::Op::Notify, None, Some(notification), now);
        Tx {
            frame: None,
            head,
            head_at: 0,
            source: None,
            digest: None,
            trailer: None,
            trailer_at: 0,
        }
    }

    fn head(
        &self,
        op: frame::Op,
        part: Option<&Frame>,
        notification: Option<&Notification>,
        now: Timestamp,
    ) -> Vec<u8> {
        const LEN: usize = RequestHeader::LEN;
        let table = part.map_or(0, |p| p.descriptors as usize * WireDescriptor::LEN);
        let mut head = self.lane.take_room();
        head.clear();
        head.reserve(LEN + table);
        head.resize(LEN, 0);
        if let Some(part) = part {
            part.write_table(&self.job.batch, &mut head);
        }
        let table_end = head.len();
        if let Some(n) = notification {
            let wire = frame::Notification { name: n.name.clone(), message: n.message.clone() };
            wire.write_to(&mut head, &self.limits).expect("its size was checked when it was given");
        }
        let header = RequestHeader {
            op,
            flags: if op == frame::Op::Notify { Flags::NONE } else { self.flags },
            descriptors: part.map_or(0, |p| p.descriptors),
            notify_len: u32::try_from(head.len() - table_end).expect("bounded by the limits"),
            payload_len: part.map_or(0, |p| p.bytes),
            transfer: self.job.id,
            budget_ms: self.budget_ms(now),
            head_crc: 0,
        };
        let sealed = header.seal(&head[LEN..table_end], &head[table_end..]);
        head[..LEN].copy_from_slice(&sealed);
        head
    }

    /// Sends one chunk of the request at hand.
    fn send(&mut self, turn: &mut usize) -> Step {
        let Some(tx) = &mut self.tx else { return Step::On };
        let socket = &self.lane.socket;
        let result = match &mut tx.source {
            Some(source) if source.remaining() > 0 => {
                let (head, head_at, digest) = (&tx.head, &mut tx.head_at, &mut tx.digest);
                source.lend(SEND_CHUNK, &mut |spans| {
                    let rest = &head[*head_at..];
                    let sent = socket.send_spans(rest, spans)?;
                    let of_head = sent.min(rest.len());
                    *head_at += of_head;
                    let payload = sent - of_head;
                    if let Some(digest) = digest {
                        digest_spans(digest, spans, payload);
                    }
                    Ok(payload)
                })
            }
            _ => send_plain(socket, tx),
        };
        match result {
            Ok(Lent::Moved(n)) => {
                *turn = turn.saturating_sub(n);
                Step::On
            }
            Ok(Lent::WouldBlock) => Step::Blocked,
            Ok(Lent::NotReady) if tx.head_at < tx.head.len() => {
                // The head need not wait for the memory.
                match socket.send(&tx.head[tx.head_at..]) {
                    Ok(n) => {
                        tx.head_at += n;
                        Step::Memory
                    }
                    Err(e) if e.kind() == io::ErrorKind::WouldBlock => Step::Blocked,
                    Err(e) => self.lost(e),
                }
            }
            Ok(Lent::NotReady) => Step::Memory,
            Err(fault) => self.fault(fault),
        }
    }

    // ---- incoming ----

    /// Where payload goes that is received in the same call as its answer's head. Only if nothing
    /// else can follow should the answer turn out to be a refusal: a stream carries nothing after
    /// the answer to its last request.
    fn place_ahead(&self) -> Option<Scatter> {
        let frame = self.sent.first()?.as_ref()?;
        let alone = self.tx.is_none() && self.sent.len() == 1 && self.job.op == Op::Read;
        (alone && !self.flags.contains(Flags::CHECKSUM) && self.job.batch.local.all_host())
            .then(|| self.place(frame))
    }

    fn place(&self, frame: &Frame) -> Scatter {
        Scatter::new(
            Arc::clone(&self.job.batch.local),
            frame.at,
            frame.bytes,
            Arc::clone(&self.lane.gate),
            Arc::clone(&self.wake),
        )
    }

    /// Takes in the head of an answer, and the first of its payload if that may come along.
    fn receive_head(&mut self, turn: &mut usize) -> Step {
        if self.ahead.is_none() {
            self.ahead = self.place_ahead();
        }
        let socket = &self.lane.socket;
        let Rx::Head { bytes, at } = &mut self.rx else { unreachable!("checked by the caller") };
        let mut of_head = 0;
        let result = match &mut self.ahead {
            Some(sink) => sink.lend(RECEIVE_CHUNK, &mut |spans| {
                let n = socket.recv_head_and_spans(&mut bytes[*at..], spans)?;
                of_head = n.min(bytes.len() - *at);
                if n == 0 { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(n - of_head) }
            }),
            None => match socket.recv(&mut bytes[*at..]) {
                Ok(0) => Err(Fault::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(n) => {
                    of_head = n;
                    Ok(Lent::Moved(0))
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Lent::WouldBlock),
                Err(e) => Err(Fault::Io(e)),
            },
        };
        match result {
            Ok(Lent::Moved(n)) => {
                *at += of_head;
                *turn = turn.saturating_sub(n);
                if *at < ResponseHeader::LEN {
                    return Step::On;
                }
                let bytes = *bytes;
                self.rx = Rx::start();
                self.answer(&bytes)
            }
            Ok(Lent::WouldBlock) => Step::Blocked,
            Ok(Lent::NotReady) => Step::Memory,
            Err(fault) => self.fault(fault),
        }
    }

    /// Takes in one piece of the answer at hand.
    fn receive(&mut self, turn: &mut usize) -> Step {
        let socket = &self.lane.socket;
        match &mut self.rx {
            Rx::Head { .. } => self.receive_head(turn),
            Rx::Payload { sink, digest } => {
                let result = sink.lend(RECEIVE_CHUNK, &mut |spans| {
                    let n = socket.recv_spans(spans)?;
                    if n == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    if let Some(digest) = digest {
                        digest_spans(digest, spans, n);
                    }
                    Ok(n)
                });
                match result {
                    Ok(Lent::Moved(n)) => {
                        *turn = turn.saturating_sub(n);
                        if sink.remaining() == 0 {
                            self.payload_complete();
                        }
                        Step::On
                    }
                    Ok(Lent::WouldBlock) => Step::Blocked,
                    Ok(Lent::NotReady) => Step::Memory,
                    Err(fault) => self.fault(fault),
                }
            }
            Rx::Trailer { bytes, at, .. } => match socket.recv(&mut bytes[*at..]) {
                Ok(0) => self.lost(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => {
                    *at += n;
                    if *at < bytes.len() { Step::On } else { self.trailer_complete() }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => Step::Blocked,
                Err(e) => self.lost(e),
            },
            Rx::Flush { sink } => match sink.flush() {
                Ok(Lent::NotReady) => Step::Memory,
                Ok(_) => {
                    self.rx = Rx::start();
                    self.frame_done()
                }
                Err(fault) => self.fault(fault),
            },
        }
    }

    fn answer(&mut self, bytes: &[u8; ResponseHeader::LEN]) -> Step {
        let header = match ResponseHeader::decode(bytes, &self.limits) {
            Ok(header) => header,
            Err(e) => return self.protocol(format!("an answer that is none: {e}")),
        };
        if header.transfer != self.job.id {
            return self.protocol("an answer to another request".into());
        }
        let Some(frame) = self.sent.first().copied() else {
            return self.protocol("an answer that nothing asked for".into());
        };
        let ahead = self.ahead.take();
        let came_along =
            ahead.as_ref().zip(frame).is_some_and(|(sink, frame)| sink.remaining() < frame.bytes);
        if !header.code.is_ok() {
            if came_along {
                return self.protocol("bytes after a refusal".into());
            }
            self.sent.remove(0);
            self.job.fail(self.refusal(header.code, header.index, frame.as_ref()));
            return Step::On;
        }
        let expected = match (self.job.op, &frame) {
            (Op::Read, Some(frame)) => frame.bytes,
            _ => 0,
        };
        if header.payload_len != expected {
            return self.protocol(format!(
                "an answer with {} bytes where {expected} were asked for",
                header.payload_len
            ));
        }
        match frame {
            Some(frame) if expected > 0 => {
                let checksum = header.flags.contains(Flags::CHECKSUM);
                if checksum && came_along {
                    return self.protocol("checksums that were not asked for".into());
                }
                let sink = ahead.unwrap_or_else(|| self.place(&frame));
                self.rx = Rx::Payload { sink, digest: checksum.then(PieceDigest::new) };
                Step::On
            }
            _ => self.frame_done(),
        }
    }

    fn payload_complete(&mut self) {
        let Rx::Payload { sink, digest } = std::mem::replace(&mut self.rx, Rx::start()) else {
            unreachable!("called while payload arrives");
        };
        self.rx = match digest {
            Some(digest) => {
                let len = usize::try_from(frame::trailer_len(digest.len())).expect("small");
                Rx::Trailer { sink, digest, bytes: vec![0; len], at: 0 }
            }
            None => Rx::Flush { sink },
        };
    }

    fn trailer_complete(&mut self) -> Step {
        let Rx::Trailer { sink, digest, bytes, .. } = std::mem::replace(&mut self.rx, Rx::start())
        else {
            unreachable!("called while a trailer arrives");
        };
        match digest.verify(&bytes) {
            Ok(()) => {
                self.rx = Rx::Flush { sink };
                Step::On
            }
            Err(piece) => {
                self.job.core.counters.checksum_errors.one();
                self.job.fail(
                    Error::new(ErrorKind::Checksum, "bytes were damaged on the way from the peer")
                        .with("piece", piece),
                );
                // The stream is in step; the bytes are not to be used, and the outcome says so.
                self.sent.remove(0);
                Step::On
            }
        }
    }

    fn frame_done(&mut self) -> Step {
        if let Some(frame) = self.sent.remove(0)
            && let Some(notification) = self.job.acknowledged(&frame)
        {
            self.notification = Some(notification);
        }
        Step::On
    }

    // ---- what can go wrong ----

    fn refusal(&self, code: WireCode, index: u32, frame: Option<&Frame>) -> Error {
        let pair = frame.map(|frame| frame.pair_of(&self.job.batch, index));
        refusal(&self.link, &self.job.batch, code, pair)
    }

    fn lost(&self, e: io::Error) -> Step {
        let fault = self.link.fault_of(self.lane.id);
        let error = match (self.link.end(), fault) {
            (_, Some(fault)) => {
                let frame = self.sent.first().and_then(Option::as_ref);
                self.refusal(fault.code, fault.index, frame)
            }
            (Some(end), None) => end.clone(),
            (None, None) => Error::new(ErrorKind::PeerReset, "the connection to the peer broke")
                .with("peer", &self.link.address)
                .caused_by(e),
        };
        self.job.fail(error);
        Step::Broken
    }

    fn protocol(&self, what: String) -> Step {
        self.job.fail(
            Error::new(ErrorKind::Protocol, format!("the peer sent {what}"))
                .with("peer", &self.link.address),
        );
        Step::Broken
    }

    fn fault(&self, fault: Fault) -> Step {
        match fault {
            Fault::Io(e) => self.lost(e),
            Fault::Shut => self.lost(io::ErrorKind::ConnectionAborted.into()),
            Fault::Memory { code, index } => {
                self.job.fail(local_fault(code, index));
                Step::Broken
            }
        }
    }

    /// Ends the share: with requests under way, the lane dies with it.
    fn end(&mut self) -> Progress {
        if self.ended {
            return Progress::Done;
        }
        self.ended = true;
        let clean = self.tx.as_ref().is_none_or(|tx| tx.head_at == 0)
            && self.sent.is_empty()
            && matches!(self.rx, Rx::Head { at: 0, .. });
        if clean && self.yields && !self.job.is_stopped() {
            self.link.put(Arc::clone(&self.lane));
            return if self.job.share_yielded() { Progress::Yielded } else { Progress::Done };
        }
        if clean {
            self.link.put(Arc::clone(&self.lane));
            self.job.share_ended(&self.link, None);
        } else {
            self.link.kill(&self.lane);
            self.job.share_ended(&self.link, Some(self.lane.id));
        }
        Progress::Done
    }

    fn broken(&mut self) -> Progress {
        if self.ended {
            return Progress::Done;
        }
        self.ended = true;
        self.link.kill(&self.lane);
        self.job.share_ended(&self.link, Some(self.lane.id));
        Progress::Done
    }
}

fn send_plain(socket: &Socket, tx: &mut Tx) -> Result<Lent, Fault> {
    let (bytes, at) = if tx.head_at < tx.head.len() {
        (&tx.head[..], &mut tx.head_at)
    } else {
        if tx.trailer.is_none() {
            tx.trailer = tx.digest.take().map(PieceDigest::finish_trailer);
        }
        match &tx.trailer {
            Some(trailer) => (&trailer[..], &mut tx.trailer_at),
            None => return Ok(Lent::Moved(0)),
        }
    };
    match socket.send(&bytes[*at..]) {
        Ok(n) => {
            *at += n;
            Ok(Lent::Moved(n))
        }
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Lent::WouldBlock),
        Err(e) => Err(Fault::Io(e)),
    }
}

/// Adds the first `len` bytes of the spans to a digest, right after they were moved.
pub(super) fn digest_spans(digest: &mut PieceDigest, spans: &[kvferry_sys::HostSpan], len: usize) {
    let mut left = len;
    for span in spans {
        let n = span.len().min(left);
        span.truncated(n).for_each_copy(|bytes| digest.update(bytes));
        left -= n;
        if left == 0 {
            return;
        }
    }
}

impl Tx {
    fn is_done(&self) -> bool {
        self.head_at == self.head.len()
            && self.source.as_ref().is_none_or(|s| s.remaining() == 0)
            && self.digest.is_none()
            && self.trailer.as_ref().is_none_or(|t| self.trailer_at == t.len())
    }
}

impl Drive for Share {
    fn fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.lane.socket.as_fd())
    }

    fn progress(&mut self, now: Timestamp) -> Progress {
        if self.ended {
            return Progress::Done;
        }
        let mut turn = TURN;
        let mut wants_write = false;
        let mut wants_memory = false;
        // Outgoing first: an answer can't be there before its request is.
        let answers_may_wait = self.sent.is_empty();
        loop {
            if self.job.is_stopped() {
                return self.end();
            }
            if self.tx.is_none() {
                self.tx = self.next_request(now);
            }
            if self.tx.is_none() {
                break;
            }
            match self.send(&mut turn) {
                Step::On => {}
                Step::Blocked => {
                    wants_write = true;
                    break;
                }
                Step::Memory => {
                    wants_memory = true;
                    break;
                }
                Step::Broken => return self.broken(),
            }
            if let Some(tx) = self.tx.take_if(|tx| tx.is_done()) {
                self.sent.push(tx.frame);
                self.lane.put_room(tx.head);
            }
            if turn == 0 {
                return Progress::Again;
            }
        }
        if !answers_may_wait || (self.sent.is_empty() && self.tx.is_none()) {
            loop {
                if self.job.is_stopped() {
                    return self.end();
                }
                if self.sent.is_empty() {
                    if self.tx.is_some() {
                        break;
                    }
                    self.tx = self.next_request(now);
                    if self.tx.is_none() {
                        return self.end();
                    }
                    return Progress::Again;
                }
                match self.receive(&mut turn) {
                    Step::On => {}
                    Step::Blocked => break,
                    Step::Memory => {
                        wants_memory = true;
                        break;
                    }
                    Step::Broken => return self.broken(),
                }
                if turn == 0 {
                    return Progress::Again;
                }
            }
        }
        match (wants_write, self.sent.is_empty(), wants_memory) {
            (false, _, true) if matches!(self.rx, Rx::Flush { .. }) || self.sent.is_empty() => {
                Progress::Memory
            }
            (true, true, _) => Progress::Wait(Interest::Write),
            (true, false, _) => Progress::Wait(Interest::Both),
            (false, _, true) if matches!(self.rx, Rx::Payload { .. }) => Progress::Memory,
            (false, _, _) => Progress::Wait(Interest::Read),
        }
    }
}
