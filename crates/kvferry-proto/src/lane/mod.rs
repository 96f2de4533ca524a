//! A lane: one data stream, on which an initiator's requests are answered in order by a target.
//!
//! Two state machines, one per end: [`Initiator`] sends requests ahead of their answers and takes
//! the answers in; [`Target`] takes requests in, one at a time, and answers them. What crosses the
//! stream is defined in [`crate::frame`].
//!
//! ```text
//! initiator                                  target
//!   head | payload | trailer  ---------->    head complete: accept or refuse
//!   head | payload | trailer  ---------->    payload into memory, trailer compared
//!                             <----------    answer, for a read with payload and trailer
//!                             <----------    answer
//! ```
//!
//! # Payload never passes through
//!
//! The machines hold heads and checksum trailers, at most one of each, and *count* payload: they
//! say how many payload bytes come next and in which direction, the driver moves them between the
//! socket and memory by its own means, and reports how many it moved. With checksums the
//! driver also feeds the [`PieceDigest`] it is lent with exactly the bytes it moved, in order.
//!
//! # How a driver runs them
//!
//! The methods fall into four classes.
//!
//! * **What happened** goes in: [`Initiator::begin`], [`Initiator::sent`], [`Initiator::received`],
//!   [`Initiator::placed`]; [`Target::accept`], [`Target::refuse`], [`Target::sent`],
//!   [`Target::received`], [`Target::placed`], [`Target::answer`], [`Target::fail`],
//!   [`Target::abandon`].
//! * **What to do next** comes out: [`Initiator::transmit`] and [`Initiator::receive`], which are
//!   independent of each other; [`Target::poll`], which is one thing at a time.
//! * **Time** does not occur: a lane has no timer. Deadlines belong to the transfer, whose driver
//!   stops using the lane; silence belongs to the session.
//! * **Queries** change nothing: [`Initiator::can_begin`], [`Initiator::answering`],
//!   [`Initiator::outstanding`], [`Initiator::is_between`], [`Target::is_between`].
//!
//! A driver asks what to do next, does as much of it as the socket and the memory allow without
//! waiting, says how much that was, and asks again, until the socket or the memory has to be waited
//! for. A count of zero is allowed and changes nothing. More than was offered panics: the driver
//! would have sent or overwritten bytes that are not the request's.
//!
//! # When a lane ends
//!
//! An error of [`Initiator::received`] or [`Target::poll`] means that the peer does not keep to the
//! protocol; no byte after it can be trusted, and the driver closes the stream. A stream that is
//! closed or reset in the middle of a request needs no method: the driver drops the machine. What
//! [`Initiator::outstanding`] counts is then unanswered, and may or may not have been applied.

mod initiator;
mod target;

pub use initiator::{Begin, Initiator, LaneError, Outcome, PIPELINE, Receive};
pub use target::{Malformed, Next, Placed, Request, Target};

use crate::frame::{PieceDigest, trailer_len};
use crate::keyed::{Forged, Guard, Seal, TAG_LEN};

/// The next data to send: `bytes`, and behind them, in the same call if the driver can, `payload`
/// bytes of the request's memory.
#[derive(Debug)]
pub struct Transmit<'a> {
    /// The rest of a head or of a trailer. Empty while only payload is left.
    pub bytes: &'a [u8],
    /// Payload bytes not sent yet.
    pub payload: u64,
    /// Digest to feed with the payload bytes that are sent, if there are checksums.
    pub digest: Option<&'a mut PieceDigest>,
}

/// A message on its way out: head, payload, trailer.
#[derive(Debug)]
struct Sending<H> {
    head: H,
    head_at: usize,
    payload: u64,
    digest: Option<PieceDigest>,
    trailer: Vec<u8>,
    trailer_at: usize,
}

impl<H: AsRef<[u8]>> Sending<H> {
    fn new(head: H, payload: u64, checksum: bool) -> Self {
        let digest = (checksum && payload > 0).then(PieceDigest::new);
        Self { head, head_at: 0, payload, digest, trailer: Vec::new(), trailer_at: 0 }
    }

    fn transmit(&mut self) -> Transmit<'_> {
        let head = &self.head.as_ref()[self.head_at..];
        if !head.is_empty() || self.payload > 0 {
            return Transmit { bytes: head, payload: self.payload, digest: self.digest.as_mut() };
        }
        Transmit { bytes: &self.trailer[self.trailer_at..], payload: 0, digest: None }
    }

    /// `seal` tags the trailer.
    fn sent(&mut self, bytes: usize, seal: Option<&mut Seal>) {
        let of_head = bytes.min(self.head.as_ref().len() - self.head_at);
        self.head_at += of_head;
        let rest = bytes - of_head;
        if self.payload > 0 {
            self.payload = take(self.payload, rest);
        } else {
            self.trailer_at += rest;
            assert!(self.trailer_at <= self.trailer.len(), "more was sent than was offered");
        }
        if self.payload == 0
            && self.head_at == self.head.as_ref().len()
            && let Some(digest) = self.digest.take()
        {
            self.trailer = digest.finish_trailer();
            if let Some(seal) = seal {
                seal.seal_end(&mut self.trailer);
            }
        }
    }

    fn is_done(&self) -> bool {
        self.head_at == self.head.as_ref().len()
            && self.payload == 0
            && self.digest.is_none()
            && self.trailer_at == self.trailer.len()
    }
}

/// Payload on its way in, with the trailer behind it.
#[derive(Debug)]
struct Receiving {
    payload: u64,
    digest: Option<PieceDigest>,
    /// Bytes of the trailer that have not arrived.
    trailer_left: usize,
    /// Allocated when the payload has arrived: an announced length alone allocates nothing.
    trailer: Vec<u8>,
}

impl Receiving {
    fn new(payload: u64, checksum: bool, guard: &Guard) -> Self {
        let checksum = checksum && payload > 0;
        let trailer = if checksum { whole_trailer_len(trailer_len(payload), guard) } else { 0 };
        Self {
            payload,
            digest: checksum.then(PieceDigest::new),
            trailer_left: usize::try_from(trailer).expect("the limits bound the payload"),
            trailer: Vec::new(),
        }
    }

    /// Room for the rest of the trailer, once all payload is there.
    fn trailer(&mut self) -> Option<&mut [u8]> {
        if self.payload > 0 || self.trailer_left == 0 {
            return None;
        }
        if self.trailer.is_empty() {
            self.trailer.resize(self.trailer_left, 0);
        }
        let at = self.trailer.len() - self.trailer_left;
        Some(&mut self.trailer[at..])
    }

    fn received(&mut self, bytes: usize) {
        if self.payload > 0 {
            self.payload = take(self.payload, bytes);
        } else {
            let left = self.trailer_left.checked_sub(bytes);
            self.trailer_left = left.expect("no more arrives than there is room for");
        }
    }

    /// Payload and trailer bytes that have not arrived.
    const fn left(&self) -> u64 {
        self.payload + self.trailer_left as u64
    }

    /// The first piece that differs from its checksum. Asked once, when nothing is left.
    ///
    /// # Errors
    /// The trailer's tag does not fit.
    fn damaged(&mut self, seal: Option<&mut Seal>) -> Result<Option<usize>, Forged> {
        let Some(digest) = self.digest.take() else { return Ok(None) };
        if let Some(seal) = seal {
            let at = self.trailer.len() - TAG_LEN;
            seal.open(&mut self.trailer, at)?;
            self.trailer.truncate(at);
        }
        Ok(digest.verify(&self.trailer).err())
    }
}

/// Bytes of a trailer with its tag; none if there is no trailer.
const fn whole_trailer_len(trailer_len: u64, guard: &Guard) -> u64 {
    if trailer_len > 0 && guard.is_keyed() { trailer_len + TAG_LEN as u64 } else { trailer_len }
}

fn take(left: u64, bytes: usize) -> u64 {
    left.checked_sub(bytes as u64).expect("no more payload is moved than was offered")
}
