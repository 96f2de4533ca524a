//! The target's end of a lane.

use super::{Receiving, Sending, Transmit, take};
use crate::code::WireCode;
use crate::frame::{
    Flags, FrameError, Limits, Notification, Op, PieceDigest, RequestHeader, ResponseHeader,
    WireDescriptor, verify_head,
};
use crate::id::TransferId;
use thiserror::Error;

/// A header, and the one descriptor that most small requests have: received in one call.
const OPENING: usize = RequestHeader::LEN + WireDescriptor::LEN;

/// The largest buffer for heads that is kept from one request to the next, in bytes.
const HEAD_KEPT: usize = 256 * 1024;

/// What a target does next.
#[derive(Debug)]
pub enum Next<'a> {
    /// Receive the rest of a head or trailer. The slice is never empty.
    Receive(&'a mut [u8]),
    /// Decide about a request: [`Target::accept`] or [`Target::refuse`].
    Decide(Request<'a>),
    /// Receive payload into the memory of the request.
    Payload {
        /// Payload that arrived together with bytes before it. If there is any, these bytes are to
        /// be copied to the memory, and nothing is to be received.
        early: &'a [u8],
        /// Payload bytes that are not in the memory yet, `early` included; at least 1.
        left: u64,
        /// To be fed with the payload bytes, if there are checksums.
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
    /// Its header.
    pub header: RequestHeader,
    /// The descriptor table, [`WireDescriptor::LEN`] bytes per descriptor.
    pub table: &'a [u8],
}

/// What became of the payload of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placed {
    /// All of it is in place. [`Target::answer`] is due, after the notification was delivered.
    Written {
        /// For this agent's user.
        notification: Option<Notification>,
        /// Payload bytes.
        bytes: u64,
    },
    /// It differs from its checksums. The answer says so.
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
    /// What is wrong.
    pub error: FrameError,
    /// The encoded answer.
    pub answer: [u8; ResponseHeader::LEN],
}

#[derive(Debug)]
enum State {
    /// The header has not arrived completely.
    Header,
    /// The table or the notification has not arrived completely.
    Rest(RequestHeader),
    Decide(RequestHeader),
    Payload(Receiving),
    /// What is left of a refused request. `memory`: copies into its memory may be under way.
    Discard {
        left: u64,
        refusal: ResponseHeader,
        memory: bool,
    },
    /// Copies into memory may be under way; then `Ok` waits for the answer's code.
    Flush(Result<(), ResponseHeader>),
    Answer,
    Sending(Sending<[u8; ResponseHeader::LEN]>),
    Nothing,
}

/// The end of a lane that serves requests, in order, one at a time.
///
/// A refused request is received to its end and discarded, so that the stream stays in step and
/// later requests on it are served. See [the module](super) for how it is driven.
#[derive(Debug)]
pub struct Target {
    limits: Limits,
    state: State,
    /// Header, table and notification. Its length is what was ever needed and may be kept.
    head: Vec<u8>,
    head_at: usize,
    /// Bytes that arrived behind what was asked for.
    early: Vec<u8>,
    /// Of the request at hand.
    transfer: TransferId,
    bytes: u64,
    notification: Option<Notification>,
}

impl Target {
    /// A lane on which nothing was received but `early`, which came with the stream's opening.
    pub const fn new(limits: Limits, early: Vec<u8>) -> Self {
        Self {
            limits,
            state: State::Header,
            head: Vec::new(),
            head_at: 0,
            early,
            transfer: TransferId(0),
            bytes: 0,
            notification: None,
        }
    }

    /// What to do next.
    ///
    /// # Errors
    /// The peer broke the protocol; the lane is of no further use.
    pub fn poll(&mut self) -> Result<Next<'_>, Malformed> {
        while self.advance()? {}
        Ok(match &mut self.state {
            State::Header => Next::Receive(&mut self.head[self.head_at..OPENING]),
            State::Rest(header) => Next::Receive(&mut self.head[self.head_at..head_len(header)]),
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

    /// So many bytes of what [`Target::poll`] asked for were received, or copied from the `early`
    /// ones.
    ///
    /// # Panics
    /// If that is more than there was room for.
    pub fn received(&mut self, bytes: usize) {
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

    /// So many bytes of what [`Target::poll`] offered were sent.
    ///
    /// # Panics
    /// If that is more than was offered.
    pub fn sent(&mut self, bytes: usize) {
        let State::Sending(sending) = &mut self.state else { panic!("nothing was offered") };
        sending.sent(bytes);
        if sending.is_done() {
            self.head_at = 0;
            self.state = State::Header;
        }
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
            Op::Write => State::Payload(Receiving::new(header.payload_len, checksum)),
            Op::Read => {
                let mut ok = answer(header.transfer, WireCode::Ok);
                ok.payload_len = header.payload_len;
                ok.flags = Flags::with_checksum(checksum);
                State::Sending(Sending::new(ok.encode(), header.payload_len, checksum))
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
        let left = header.payload_follows() + header.trailer_follows();
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
                let left = receiving.left();
                self.state = State::Discard { left, refusal, memory: true };
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
                        match RequestHeader::decode(bytes, &self.limits) {
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
                move_early(&mut self.early, &mut self.head[..len], &mut self.head_at);
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
                let damaged = receiving.damaged().map(|piece| ResponseHeader {
                    aux: piece as u64,
                    ..answer(self.transfer, WireCode::Checksum)
                });
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
        let len = head_len(&header);
        if self.head_at > len {
            self.early.splice(0..0, self.head[len..self.head_at].iter().copied());
            self.head_at = len;
        }
        if self.head.len() < len {
            self.head.resize(len, 0);
        }
        self.state = State::Rest(header);
    }

    fn verified(&self, header: &RequestHeader) -> Result<Option<Notification>, FrameError> {
        let (head, rest) = self.head[..head_len(header)]
            .split_first_chunk()
            .expect("the head is at least a header");
        let (table, notify) = rest.split_at(header.table_len());
        verify_head(head, table, notify)?;
        (!notify.is_empty()).then(|| Notification::decode(notify)).transpose()
    }

    fn malformed(&mut self, transfer: TransferId, error: FrameError) -> Malformed {
        self.state = State::Nothing;
        Malformed { error, answer: answer(transfer, error.code()).encode() }
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

    fn send(&mut self, answer: &ResponseHeader) {
        // Of a request that was refused.
        self.notification = None;
        self.state = State::Sending(Sending::new(answer.encode(), 0, false));
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
