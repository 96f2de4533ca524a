//! The target's end of a lane.

use super::{Receiving, Sending, Transmit, take, whole_trailer_len};
use crate::code::WireCode;
use crate::frame::{
    AnswerBytes, Flags, FrameError, Limits, Notification, Op, PieceDigest, RequestHeader,
    ResponseHeader, WireDescriptor, verify_head,
};
use crate::id::TransferId;
use crate::keyed::Guard;
use crate::time::Timestamp;
use std::time::Duration;
use thiserror::Error;

/// A header, and the one descriptor that most small requests have: received in one call.
const OPENING: usize = RequestHeader::LEN + WireDescriptor::LEN;

/// Bytes of a head for which there is room before they arrive: the tables of most requests. A longer
/// head gets room as it arrives, from the driver ([`Next::Grow`]): an announced length alone allocates no
/// more than this.
const HEAD_STEP: usize = 16 * 1024;

/// The largest buffer for heads that is kept from one request to the next: the table of some 1 500
/// descriptors.
const HEAD_KEPT: usize = 24 * 1024;

/// Longest time that a request whose head is complete may go without a byte. The initiator's budget is capped by it,
/// because the peer chooses that number.
const BUDGET_MAX: Duration = Duration::from_secs(600);

/// The next step of the driver of a [`Target`].
#[derive(Debug)]
pub enum Next<'a> {
    /// Receive the rest of a head or trailer. The slice is never empty.
    Receive(&'a mut [u8]),
    /// The buffer for the head is full, and more of the head is to come. Call [`Target::grow`] with the
    /// bytes that the buffer may have, or [`Target::exhausted`].
    Grow {
        /// Bytes of the head that have arrived.
        have: usize,
        /// Bytes of the whole head.
        whole: usize,
    },
    /// Decide about a request: [`Target::accept`] or [`Target::refuse`].
    Decide(Request<'a>),
    /// Receive payload into the memory of the request.
    Payload {
        /// Payload that arrived together with bytes before it. If there is any, these bytes are to
        /// be copied to the memory, and nothing is to be received.
        early: &'a [u8],
        /// Payload bytes that are not in the memory yet, `early` included; at least 1.
        left: u64,
        /// Digest to feed with the payload bytes, if there are checksums.
        digest: Option<&'a mut PieceDigest>,
    },
    /// Receive and discard at most so many bytes; at least 1. They belong to a refused request.
    Discard(u64),
    /// Nothing from the socket: [`Target::placed`] as soon as everything received is in the memory
    /// and no copy into it is under way.
    Flush,
    /// Send the answer; with payload from the memory of the request, if it is a read.
    Transmit(Transmit<'a>),
    /// Nothing. [`Target::answer`] is due, or the lane is of no further use: an answer was
    /// abandoned, or a head was malformed.
    Nothing,
}

/// A request whose head is complete and passed its checksum.
#[derive(Debug)]
pub struct Request<'a> {
    /// The request's header.
    pub header: RequestHeader,
    /// The descriptor table, [`WireDescriptor::LEN`] bytes per descriptor.
    pub table: &'a [u8],
}

/// Result of receiving a request's payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placed {
    /// All of it is in place. [`Target::answer`] is due, after the notification was delivered.
    Written {
        /// Notification for this agent's user.
        notification: Option<Notification>,
        /// Payload bytes.
        bytes: u64,
    },
    /// Payload differs from its checksums. The answer reports it.
    Damaged {
        /// The first checksummed piece that differs.
        piece: u64,
    },
    /// The request was refused by [`Target::fail`] while payload arrived. The answer says so.
    Refused,
}

/// A malformed head. No byte after it can be trusted: send `answer`, if that needs no waiting, and
/// close the stream.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("a malformed request: {error}")]
pub struct Malformed {
    /// The error in the head.
    pub error: FrameError,
    /// The encoded answer.
    pub answer: AnswerBytes,
}

#[derive(Debug)]
enum State {
    /// The header has not arrived completely.
    Header,
    /// The table or the notification has not arrived completely.
    Rest(RequestHeader),
    Decide(RequestHeader),
    Payload(Receiving),
    /// The rest of a refused request. `memory`: copies into its memory may be under way.
    Discard {
        left: u64,
        refusal: ResponseHeader,
        memory: bool,
    },
    /// Copies into memory may be under way; then `Ok` waits for the answer's code.
    Flush(Result<(), ResponseHeader>),
    Answer,
    Sending(Sending<AnswerBytes>),
    Nothing,
}

/// The end of a lane that serves requests, in order, one at a time.
///
/// A refused request is received to its end and discarded, so that the stream stays in step and
/// later requests on it are served. See [the module](super) for how it is driven.
#[derive(Debug)]
pub struct Target {
    limits: Limits,
    /// Payload must have checksums.
    checksum: bool,
    guard: Guard,
    state: State,
    /// Header, table and notification. Its length is what was ever needed and may be kept.
    head: Vec<u8>,
    head_at: usize,
    /// Bytes that arrived behind what was asked for.
    early: Vec<u8>,
    /// Transfer id of the current request.
    transfer: TransferId,
    bytes: u64,
    notification: Option<Notification>,
    /// Time that the initiator of the current request waits.
    budget: Duration,
    /// Bytes that were ever received or sent, and how many of them [`Target::stalls_at`] has seen.
    moved: u64,
    seen: u64,
    seen_at: Timestamp,
}

impl Target {
    /// A lane on which nothing was received but `early`, which came with the stream's opening. With
    /// `checksum`, payload without checksums is refused, as malformed: the session has agreed on
    /// them.
    pub const fn new(limits: Limits, checksum: bool, guard: Guard, early: Vec<u8>) -> Self {
        Self {
            limits,
            checksum,
            guard,
            state: State::Header,
            head: Vec::new(),
            head_at: 0,
            early,
            transfer: TransferId(0),
            bytes: 0,
            notification: None,
            budget: Duration::ZERO,
            moved: 0,
            // So that the first look finds progress.
            seen: u64::MAX,
            seen_at: Timestamp::from_nanos(0),
        }
    }

    /// Returns the next step.
    ///
    /// # Errors
    /// The peer broke the protocol; the lane is of no further use.
    pub fn poll(&mut self) -> Result<Next<'_>, Malformed> {
        while self.advance()? {}
        Ok(match &mut self.state {
            State::Header => Next::Receive(&mut self.head[self.head_at..OPENING]),
            State::Rest(header) => {
                let whole = head_len(header);
                let room = self.head.len().min(whole);
                if self.head_at == room {
                    return Ok(Next::Grow { have: room, whole });
                }
                Next::Receive(&mut self.head[self.head_at..room])
            }
            State::Decide(header) => {
                let table = &self.head[RequestHeader::LEN..][..header.table_len()];
                Next::Decide(Request { header: *header, table })
            }
            State::Payload(receiving) => {
                if receiving.payload > 0 {
                    let left = receiving.payload;
                    let early = self.early.len().min(usize::try_from(left).unwrap_or(usize::MAX));
                    let (early, digest) = (&self.early[..early], receiving.digest.as_mut());
                    return Ok(Next::Payload { early, left, digest });
                }
                Next::Receive(receiving.trailer().expect("left when the trailer is complete"))
            }
            State::Discard { left, .. } => Next::Discard(*left),
            State::Flush(_) => Next::Flush,
            State::Sending(sending) => Next::Transmit(sending.transmit()),
            State::Answer | State::Nothing => Next::Nothing,
        })
    }

    // ---- what happened ----

    /// Records that `bytes` of the bytes that [`Target::poll`] asked for were received, or copied from the `early`
    /// ones.
    ///
    /// # Panics
    /// If that is more than there was room for.
    pub fn received(&mut self, bytes: usize) {
        self.moved += bytes as u64;
        match &mut self.state {
            State::Header => {
                self.head_at += bytes;
                assert!(self.head_at <= OPENING, "more arrived than there was room for");
            }
            State::Rest(header) => {
                self.head_at += bytes;
                assert!(self.head_at <= head_len(header), "more arrived than there was room for");
            }
            State::Payload(receiving) => {
                if receiving.payload > 0 && !self.early.is_empty() {
                    self.early.drain(..bytes);
                }
                receiving.received(bytes);
            }
            State::Discard { left, .. } => *left = take(*left, bytes),
            _ => assert_eq!(bytes, 0, "nothing was asked for"),
        }
    }

    /// Records that `bytes` of the bytes that [`Target::poll`] offered were sent.
    ///
    /// # Panics
    /// If that is more than was offered.
    pub fn sent(&mut self, bytes: usize) {
        let State::Sending(sending) = &mut self.state else { panic!("nothing was offered") };
        sending.sent(bytes, self.guard.outgoing());
        self.moved += bytes as u64;
        if sending.is_done() {
            self.budget = Duration::ZERO;
            self.head_at = 0;
            self.state = State::Header;
        }
    }

    /// Gives the buffer for the head at hand `bytes`, more than it has; at most the whole head counts.
    ///
    /// # Panics
    /// If [`Target::poll`] did not ask for it.
    pub fn grow(&mut self, bytes: usize) {
        let State::Rest(header) = &self.state else { panic!("no head is being received") };
        let bytes = bytes.clamp(self.head.len() + 1, head_len(header));
        self.head.reserve_exact(bytes - self.head.len());
        self.head.resize(bytes, 0);
    }

    /// There is no memory for the head at hand. Returns the answer: send it, if that needs no waiting,
    /// and close the stream.
    ///
    /// # Panics
    /// If [`Target::poll`] did not ask for memory.
    pub fn exhausted(&mut self) -> AnswerBytes {
        let State::Rest(header) = &self.state else { panic!("no head is being received") };
        let answer = answer(header.transfer, WireCode::Busy);
        self.state = State::Nothing;
        answer.encode_with(self.guard.outgoing())
    }

    /// Serves the request that [`Next::Decide`] showed. Its payload follows, in one direction or
    /// the other; of a notification alone, none.
    ///
    /// # Panics
    /// If no request waits for a decision.
    pub fn accept(&mut self) {
        let header = self.decided();
        let checksum = header.flags.contains(Flags::CHECKSUM);
        self.state = match header.op {
            Op::Write => State::Payload(Receiving::new(header.payload_len, checksum, &self.guard)),
            Op::Read => {
                let mut ok = answer(header.transfer, WireCode::Ok);
                ok.payload_len = header.payload_len;
                ok.flags = Flags::with_checksum(checksum);
                let head = ok.encode_with(self.guard.outgoing());
                State::Sending(Sending::new(head, header.payload_len, checksum))
            }
            Op::Notify => State::Flush(Ok(())),
        };
    }

    /// Refuses the request that [`Next::Decide`] showed, because of the descriptor `index`; 0 if
    /// it is none's fault.
    ///
    /// # Panics
    /// If no request waits for a decision.
    pub fn refuse(&mut self, code: WireCode, index: u32) {
        let header = self.decided();
        let trailer = whole_trailer_len(header.trailer_follows(), &self.guard);
        let left = header.payload_follows() + trailer;
        if trailer > 0 {
            self.skip_trailer();
        }
        let refusal = ResponseHeader { index, ..answer(header.transfer, code) };
        self.state = State::Discard { left, refusal, memory: false };
    }

    /// The memory of the request can't be used any more, because of the descriptor `index`. What
    /// is left of the request is discarded; the first failure decides what the answer says.
    ///
    /// # Panics
    /// If no payload is being received or placed.
    pub fn fail(&mut self, code: WireCode, index: u32) {
        let refusal = ResponseHeader { index, ..answer(self.transfer, code) };
        match &mut self.state {
            State::Payload(receiving) => {
                let (left, has_trailer) = (receiving.left(), receiving.digest.is_some());
                self.state = State::Discard { left, refusal, memory: true };
                if has_trailer {
                    self.skip_trailer();
                }
            }
            State::Flush(result) => *result = result.and(Err(refusal)),
            _ => panic!("no memory of a request is in use"),
        }
    }

    /// Everything that was received for the request is in its memory, or never will be: no copy
    /// into it is under way.
    ///
    /// # Panics
    /// If [`Target::poll`] did not ask for it.
    pub fn placed(&mut self) -> Placed {
        let State::Flush(result) = self.state else {
            panic!("payload is placed when all of it has arrived");
        };
        match result {
            Ok(()) => {
                self.state = State::Answer;
                let notification = self.notification.take();
                Placed::Written { notification, bytes: self.bytes }
            }
            Err(refusal) => {
                self.send(&refusal);
                match refusal.code {
                    WireCode::Checksum => Placed::Damaged { piece: refusal.aux },
                    _ => Placed::Refused,
                }
            }
        }
    }

    /// Answers a request that was [`Placed::Written`].
    ///
    /// # Panics
    /// If there is none.
    pub fn answer(&mut self, code: WireCode) {
        assert!(matches!(self.state, State::Answer), "no request waits for its answer");
        self.send(&answer(self.transfer, code));
    }

    /// Memory can't be read any more in the middle of an answer. Its head promised bytes that
    /// can't be sent: nothing more can be said on this stream.
    pub fn abandon(&mut self) {
        self.state = State::Nothing;
    }

    // ---- queries ----

    /// Whether the stream is between two requests, with no byte of the next.
    pub fn is_between(&self) -> bool {
        matches!(self.state, State::Header) && self.head_at == 0 && self.early.is_empty()
    }

    /// Bytes of memory that this value holds for heads and for payload that came early.
    pub const fn held_bytes(&self) -> usize {
        self.head.capacity() + self.early.capacity()
    }

    // ---- time ----

    /// Time when the current request ends if no further byte of it moves; `None` between requests. While the head
    /// arrives, which takes memory, the limit is `silence`. After that it is the time that the initiator waits, at most
    /// ten minutes, or `silence` if that is longer. The driver calls this before it waits for the socket, and closes
    /// the stream if the time has come.
    pub fn stalls_at(&mut self, silence: Duration, now: Timestamp) -> Option<Timestamp> {
        if self.is_between() {
            return None;
        }
        if self.seen != self.moved {
            (self.seen, self.seen_at) = (self.moved, now);
        }
        let is_head = matches!(self.state, State::Header | State::Rest(_));
        Some(self.seen_at + if is_head { silence } else { self.budget.max(silence) })
    }

    // ---- inside ----

    /// Does what needs neither socket nor memory; whether that changed what is next.
    fn advance(&mut self) -> Result<bool, Malformed> {
        match &mut self.state {
            State::Header => {
                if self.head.len() < OPENING {
                    self.head.resize(OPENING, 0);
                }
                move_early(&mut self.early, &mut self.head[..OPENING], &mut self.head_at);
                match self.head.first_chunk::<{ RequestHeader::LEN }>() {
                    Some(bytes) if self.head_at >= RequestHeader::LEN => {
                        let decoded = if self.guard.is_keyed() {
                            RequestHeader::decode_keyed(bytes, &self.limits)
                        } else {
                            RequestHeader::decode(bytes, &self.limits)
                        };
                        match decoded {
                            Ok(header) => self.header(header),
                            Err(error) => return Err(self.malformed(TransferId(0), error)),
                        }
                        Ok(true)
                    }
                    _ => Ok(false),
                }
            }
            State::Rest(header) => {
                let (header, len) = (*header, head_len(header));
                let at_once = len.min(HEAD_STEP);
                if self.head.len() < at_once {
                    self.head.reserve_exact(at_once - self.head.len());
                    self.head.resize(at_once, 0);
                }
                let room = self.head.len().min(len);
                move_early(&mut self.early, &mut self.head[..room], &mut self.head_at);
                if self.head_at < len {
                    return Ok(false);
                }
                match self.verified(&header) {
                    Ok(notification) => self.notification = notification,
                    Err(error) => return Err(self.malformed(header.transfer, error)),
                }
                self.state = State::Decide(header);
                Ok(true)
            }
            State::Payload(receiving) => {
                if let Some(trailer) = receiving.trailer() {
                    let mut at = 0;
                    move_early(&mut self.early, trailer, &mut at);
                    receiving.received(at);
                }
                if receiving.left() > 0 {
                    return Ok(false);
                }
                let damaged = match receiving.damaged(self.guard.incoming()) {
                    Ok(damaged) => damaged.map(|piece| ResponseHeader {
                        aux: piece as u64,
                        ..answer(self.transfer, WireCode::Checksum)
                    }),
                    Err(forged) => return Err(self.malformed(self.transfer, forged.into())),
                };
                self.state = State::Flush(damaged.map_or(Ok(()), Err));
                Ok(true)
            }
            State::Discard { left, refusal, memory } => {
                let early = self.early.len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                self.early.drain(..early);
                *left -= early as u64;
                if *left > 0 {
                    return Ok(false);
                }
                let (refusal, memory) = (*refusal, *memory);
                if memory {
                    self.state = State::Flush(Err(refusal));
                } else {
                    self.send(&refusal);
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// A header is complete. What arrived behind a head that is shorter than an opening belongs to
    /// the next request.
    fn header(&mut self, header: RequestHeader) {
        self.budget = Duration::from_millis(header.budget_ms.into()).min(BUDGET_MAX);
        let len = head_len(&header);
        if self.head_at > len {
            self.early.splice(0..0, self.head[len..self.head_at].iter().copied());
            self.head_at = len;
        }
        self.state = State::Rest(header);
    }

    fn verified(&mut self, header: &RequestHeader) -> Result<Option<Notification>, FrameError> {
        let whole = &mut self.head[..head_len(header)];
        if let Some(seal) = self.guard.incoming() {
            RequestHeader::open_keyed(whole, seal)?;
        }
        let (head, rest) = whole.split_first_chunk().expect("the head is at least a header");
        let (table, notify) = rest.split_at(header.table_len());
        if !self.guard.is_keyed() {
            verify_head(head, table, notify)?;
        }
        if self.checksum && header.op != Op::Notify && !header.flags.contains(Flags::CHECKSUM) {
            return Err(FrameError::Inconsistent("payload without the checksums agreed on"));
        }
        (!notify.is_empty()).then(|| Notification::decode(notify)).transpose()
    }

    fn malformed(&mut self, transfer: TransferId, error: FrameError) -> Malformed {
        self.state = State::Nothing;
        let answer = answer(transfer, error.code()).encode_with(self.guard.outgoing());
        Malformed { error, answer }
    }

    /// Takes the request that was decided about. Its table is not needed any more.
    fn decided(&mut self) -> RequestHeader {
        let State::Decide(header) = self.state else { panic!("no request waits for a decision") };
        (self.transfer, self.bytes) = (header.transfer, header.payload_len);
        if self.head.len() > HEAD_KEPT {
            self.head = Vec::new();
        }
        header
    }

    /// A trailer is discarded with what is left of its request; its tag still counts.
    fn skip_trailer(&mut self) {
        if let Some(seal) = self.guard.incoming() {
            seal.skip();
        }
    }

    fn send(&mut self, answer: &ResponseHeader) {
        // Of a request that was refused.
        self.notification = None;
        let head = answer.encode_with(self.guard.outgoing());
        self.state = State::Sending(Sending::new(head, 0, false));
    }
}

fn answer(transfer: TransferId, code: WireCode) -> ResponseHeader {
    ResponseHeader { code, flags: Flags::NONE, transfer, index: 0, aux: 0, payload_len: 0 }
}

/// Bytes of header, table and notification.
const fn head_len(header: &RequestHeader) -> usize {
    RequestHeader::LEN + header.table_len() + header.notify_len as usize
}

/// Moves early bytes to where they belong.
fn move_early(early: &mut Vec<u8>, into: &mut [u8], at: &mut usize) {
    let n = early.len().min(into.len() - *at);
    if n > 0 {
        into[*at..*at + n].copy_from_slice(&early[..n]);
        early.drain(..n);
        *at += n;
    }
}
