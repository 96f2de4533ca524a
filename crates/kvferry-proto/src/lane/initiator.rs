//! The initiator's end of a lane.

use super::{Receiving, Sending, Transmit};
use crate::code::WireCode;
use crate::frame::{
    Flags, FrameError, Limits, Op, PieceDigest, RequestHeader, ResponseHeader, WireDescriptor,
};
use crate::id::TransferId;
use crate::keyed::{Forged, Guard};
use thiserror::Error;

/// Requests sent ahead of their answers on one lane.
pub const PIPELINE: usize = 4;

/// Parameters of a new request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Begin {
    /// The operation.
    pub op: Op,
    /// Descriptors in the table; zero for [`Op::Notify`].
    pub descriptors: u32,
    /// Sum of the descriptors' lengths, in bytes.
    pub payload_len: u64,
    /// Milliseconds until the initiator gives up; 0 for unknown.
    pub budget_ms: u32,
}

/// The next data to receive.
#[derive(Debug)]
pub enum Receive<'a> {
    /// No answer is outstanding.
    Nothing,
    /// The rest of an answer's head or trailer, into `into`. Behind it, in the same call if the
    /// driver can, at most `payload` bytes into the memory of the request that
    /// [`Initiator::answering`] names.
    Bytes {
        /// Never empty.
        into: &'a mut [u8],
        /// 0 unless the answer's payload may follow and nothing else can. If the answer turns out
        /// to be a refusal, these bytes were never sent, and the memory is unchanged.
        payload: u64,
    },
    /// Payload, into the memory of the request that [`Initiator::answering`] names.
    Payload {
        /// Bytes that have not arrived; at least 1.
        left: u64,
        /// Digest to feed with the bytes that arrive, if there are checksums.
        digest: Option<&'a mut PieceDigest>,
    },
    /// Nothing from the socket: all payload has arrived. [`Initiator::placed`] when all of it is
    /// in the request's memory and no copy into it is under way.
    Flush,
}

/// Result of a request. Every request ends at most once, in the order in which they began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the variants say what the fields are")]
pub enum Outcome<T> {
    /// The request was done; for a read, the bytes are in place.
    Done(T),
    /// The target refused it. `index` is the descriptor of the request's table that failed, if one did;
    /// else 0.
    Refused { request: T, code: WireCode, index: u32 },
    /// A read whose bytes differ from their checksums, first in the checksummed piece `piece`. The
    /// stream stays in step.
    Damaged { request: T, piece: usize },
}

/// Violation of the protocol by the peer. The lane is of no further use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
#[allow(missing_docs, reason = "the messages name the fields")]
pub enum LaneError {
    /// The head of the answer is malformed.
    #[error("a malformed answer: {0}")]
    Malformed(#[from] FrameError),
    /// The answer names another transfer.
    #[error("an answer to transfer {got} instead of {expected}")]
    Transfer { got: TransferId, expected: TransferId },
    /// The answer's payload has another length than was asked for.
    #[error("an answer with {got} payload bytes instead of {expected}")]
    Length { got: u64, expected: u64 },
    /// The answer has checksums that were not asked for, or lacks those that were.
    #[error("an answer whose checksum flag differs from the request's")]
    Checksums,
    /// Bytes follow a refusal that was the last answer due.
    #[error("bytes after a refusal")]
    AfterRefusal,
}

impl From<Forged> for LaneError {
    fn from(forged: Forged) -> Self {
        Self::Malformed(forged.into())
    }
}

/// A request that was begun and has not ended.
#[derive(Debug)]
struct Pending<T> {
    request: T,
    /// Payload bytes of the answer.
    expects: u64,
}

/// An answer on its way in.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one per lane; a box would allocate for each read")]
enum Answer {
    Head { bytes: [u8; ResponseHeader::KEYED_LEN], at: usize },
    Payload(Receiving),
    Flush { damaged: Option<usize> },
}

impl Answer {
    const START: Self = Self::Head { bytes: [0; ResponseHeader::KEYED_LEN], at: 0 };
}

/// The end of a lane that sends the requests of one transfer.
///
/// `T` is the driver's name for a request. See [the module](super) for how it is driven.
#[derive(Debug)]
pub struct Initiator<T> {
    transfer: TransferId,
    flags: Flags,
    limits: Limits,
    guard: Guard,
    sending: Option<Sending<Vec<u8>>>,
    /// Begun and not ended, oldest first. The last one may be still on its way out.
    pending: Pipeline<Pending<T>>,
    answer: Answer,
}

impl<T: Copy> Initiator<T> {
    /// A lane on which no request is under way. With `checksum`, payload of reads and writes carries
    /// checksums. `guard` is the stream's, as the last transfer on it left it.
    pub const fn new(transfer: TransferId, checksum: bool, limits: Limits, guard: Guard) -> Self {
        Self {
            transfer,
            flags: Flags::with_checksum(checksum),
            limits,
            guard,
            sending: None,
            pending: Pipeline::new(),
            answer: Answer::START,
        }
    }

    /// Whether a request may begin: the last one has left, and fewer than [`PIPELINE`] wait for
    /// their answers.
    pub const fn can_begin(&self) -> bool {
        self.sending.is_none() && self.pending.len < PIPELINE
    }

    /// Begins a request. `head` is [`RequestHeader::LEN`] bytes that are overwritten here, the
    /// descriptor table, and the encoded notification, if there is one; the allocation comes back
    /// from [`Initiator::sent`].
    ///
    /// # Panics
    /// If [`Initiator::can_begin`] is false, or `head` is shorter than `begin` says.
    pub fn begin(&mut self, begin: Begin, mut head: Vec<u8>, request: T) {
        assert!(self.can_begin(), "a request may only begin when the last one has left");
        let table_end = RequestHeader::LEN + begin.descriptors as usize * WireDescriptor::LEN;
        let header = RequestHeader {
            op: begin.op,
            flags: if begin.op == Op::Notify { Flags::NONE } else { self.flags },
            descriptors: begin.descriptors,
            notify_len: u32::try_from(head.len() - table_end).expect("bounded by the limits"),
            payload_len: begin.payload_len,
            transfer: self.transfer,
            budget_ms: begin.budget_ms,
            head_crc: 0,
        };
        match self.guard.outgoing() {
            Some(seal) => header.seal_keyed(&mut head, seal),
            None => {
                let sealed = header.seal(&head[RequestHeader::LEN..table_end], &head[table_end..]);
                head[..RequestHeader::LEN].copy_from_slice(&sealed);
            }
        }
        let checksum = header.flags.contains(Flags::CHECKSUM);
        self.sending = Some(Sending::new(head, header.payload_follows(), checksum));
        let expects = if begin.op == Op::Read { begin.payload_len } else { 0 };
        self.pending.push(Pending { request, expects });
    }

    // ---- outgoing ----

    /// Returns the next bytes to send; `None` if there are none.
    pub fn transmit(&mut self) -> Option<Transmit<'_>> {
        self.sending.as_mut().map(Sending::transmit)
    }

    /// Records that `bytes` of the bytes that [`Initiator::transmit`] offered were sent. Returns
    /// the head's allocation when the whole request has left.
    ///
    /// # Panics
    /// If that is more than was offered.
    pub fn sent(&mut self, bytes: usize) -> Option<Vec<u8>> {
        let sending = self.sending.as_mut().expect("something was offered");
        sending.sent(bytes, self.guard.outgoing());
        self.sending.take_if(|sending| sending.is_done()).map(|sending| sending.head)
    }

    // ---- incoming ----

    /// Returns the next data to receive.
    pub fn receive(&mut self) -> Receive<'_> {
        if self.outstanding() == 0 {
            return Receive::Nothing;
        }
        let head_len = self.head_len();
        let pending = self.pending.first().expect("something is outstanding");
        match &mut self.answer {
            Answer::Head { bytes, at } => {
                let alone = self.sending.is_none() && self.pending.len == 1;
                let ahead = alone && !self.flags.contains(Flags::CHECKSUM);
                let payload = if ahead { pending.expects } else { 0 };
                Receive::Bytes { into: &mut bytes[*at..head_len], payload }
            }
            Answer::Payload(receiving) => {
                if receiving.payload > 0 {
                    let (left, digest) = (receiving.payload, receiving.digest.as_mut());
                    return Receive::Payload { left, digest };
                }
                let into = receiving.trailer().expect("left as soon as the trailer is complete");
                Receive::Bytes { into, payload: 0 }
            }
            Answer::Flush { .. } => Receive::Flush,
        }
    }

    /// Records that `bytes` of the bytes that [`Initiator::receive`] asked for have arrived.
    /// Returns the outcome of the oldest request, if that ended it.
    ///
    /// # Errors
    /// The peer broke the protocol; the lane is of no further use.
    ///
    /// # Panics
    /// If that is more than there was room for.
    pub fn received(&mut self, bytes: usize) -> Result<Option<Outcome<T>>, LaneError> {
        let head_len = self.head_len();
        match &mut self.answer {
            Answer::Head { bytes: head, at } => {
                let of_head = bytes.min(head_len - *at);
                *at += of_head;
                if *at < head_len {
                    return Ok(None);
                }
                let head = *head;
                self.answer = Answer::START;
                self.answered(head, bytes - of_head)
            }
            Answer::Payload(receiving) => {
                receiving.received(bytes);
                if receiving.left() == 0 {
                    let damaged = receiving.damaged(self.guard.incoming())?;
                    self.answer = Answer::Flush { damaged };
                }
                Ok(None)
            }
            Answer::Flush { .. } => {
                assert_eq!(bytes, 0, "nothing was asked for");
                Ok(None)
            }
        }
    }

    /// The payload of the answer is in place, or, for one that ends as [`Outcome::Damaged`], no
    /// copy of it is under way.
    ///
    /// # Panics
    /// If [`Initiator::receive`] did not ask for it.
    pub fn placed(&mut self) -> Outcome<T> {
        let Answer::Flush { damaged } = std::mem::replace(&mut self.answer, Answer::START) else {
            panic!("payload is placed when all of it has arrived");
        };
        let request = self.pending.pop().request;
        damaged.map_or(Outcome::Done(request), |piece| Outcome::Damaged { request, piece })
    }

    /// Ends this use of the stream, between requests: the guard, for the next transfer on it.
    ///
    /// # Panics
    /// If [`Initiator::is_between`] is false: nothing more can be said on the stream.
    pub fn release(&mut self) -> Guard {
        assert!(self.is_between(), "a stream is given back between two requests");
        if self.sending.take().is_some()
            && let Some(seal) = self.guard.outgoing()
        {
            seal.take_back();
        }
        std::mem::replace(&mut self.guard, Guard::Crc)
    }

    // ---- queries ----

    /// The request whose answer is due: the oldest that has left completely and has not ended.
    pub fn answering(&self) -> Option<T> {
        let pending = self.pending.first().filter(|_| self.outstanding() > 0);
        pending.map(|pending| pending.request)
    }

    /// Requests that have left completely and have not ended.
    pub const fn outstanding(&self) -> usize {
        self.pending.len - self.sending.is_some() as usize
    }

    /// Whether no byte of a request is under way in either direction, so that the stream can carry
    /// the requests of another transfer.
    pub fn is_between(&self) -> bool {
        self.outstanding() == 0
            && self.sending.as_ref().is_none_or(|sending| sending.head_at == 0)
            && matches!(self.answer, Answer::Head { at: 0, .. })
    }

    /// Bytes of an answer's header.
    const fn head_len(&self) -> usize {
        if self.guard.is_keyed() { ResponseHeader::KEYED_LEN } else { ResponseHeader::LEN }
    }

    /// The head of an answer is complete; `ahead` bytes of payload came in the same call.
    fn answered(
        &mut self,
        mut head: [u8; ResponseHeader::KEYED_LEN],
        ahead: usize,
    ) -> Result<Option<Outcome<T>>, LaneError> {
        let header = match self.guard.incoming() {
            Some(seal) => ResponseHeader::decode_keyed(&mut head, &self.limits, seal)?,
            None => {
                let head = head.first_chunk().expect("longer than a header");
                ResponseHeader::decode(head, &self.limits)?
            }
        };
        if header.transfer != self.transfer {
            let (got, expected) = (header.transfer, self.transfer);
            return Err(LaneError::Transfer { got, expected });
        }
        let &Pending { request, expects } = self.pending.first().expect("an answer was due");
        if !header.code.is_ok() {
            if ahead > 0 {
                return Err(LaneError::AfterRefusal);
            }
            self.pending.pop();
            let (code, index) = (header.code, header.index);
            return Ok(Some(Outcome::Refused { request, code, index }));
        }
        if header.payload_len != expects {
            return Err(LaneError::Length { got: header.payload_len, expected: expects });
        }
        let checksum = expects > 0 && self.flags.contains(Flags::CHECKSUM);
        if header.flags.contains(Flags::CHECKSUM) != checksum {
            return Err(LaneError::Checksums);
        }
        if expects == 0 {
            assert_eq!(ahead, 0, "no payload was asked for");
            self.pending.pop();
            return Ok(Some(Outcome::Done(request)));
        }
        self.answer = Answer::Payload(Receiving::new(expects, checksum, &self.guard));
        if ahead > 0 { self.received(ahead) } else { Ok(None) }
    }
}

/// A queue of at most [`PIPELINE`] entries, without an allocation.
#[derive(Debug)]
struct Pipeline<P> {
    slots: [Option<P>; PIPELINE],
    first: usize,
    len: usize,
}

impl<P> Pipeline<P> {
    const fn new() -> Self {
        Self { slots: [const { None }; PIPELINE], first: 0, len: 0 }
    }

    const fn first(&self) -> Option<&P> {
        self.slots[self.first].as_ref()
    }

    fn push(&mut self, entry: P) {
        assert!(self.len < PIPELINE, "the pipeline is full");
        self.slots[(self.first + self.len) % PIPELINE] = Some(entry);
        self.len += 1;
    }

    fn pop(&mut self) -> P {
        let entry = self.slots[self.first].take().expect("the pipeline is not empty");
        self.first = (self.first + 1) % PIPELINE;
        self.len -= 1;
        entry
    }
}
