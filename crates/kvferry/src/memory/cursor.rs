//! Cursors over the bytes of a batch: transports send from a cursor and receive into one.
//!
//! A transport sees ready host spans and nothing else. A span is lent inside the copier's gate,
//! after its region was seen alive, for the duration of one call. So a transport can't hold a span
//! for longer than a revoker waits (see [`gate`](super::gate)).

use crate::memory::device::Direction;
use crate::memory::gate::Gate;
use crate::memory::pieces::{Fault, MemoryFault, Piece, Pieces, Position};
use crate::memory::stages::Wake;
use crate::memory::staging::Staging;
use kvferry_sys::socket::SPANS_MAX;
use kvferry_sys::span::HostSpan;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::sync::Arc;

thread_local! {
    static SPANS: Cell<Vec<HostSpan>> = const { Cell::new(Vec::new()) };
}

/// The result of asking for spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lent {
    /// Number of bytes moved.
    Moved(usize),
    /// The socket, or another recipient of the spans, is not ready.
    WouldBlock,
    /// The memory is not ready; it calls the waker once it may be.
    NotReady,
}

/// Uses lent spans; returns how many of their bytes it moved.
type UseSpans<'a> = dyn FnMut(&[HostSpan]) -> io::Result<usize> + 'a;

/// A call that moved bytes, as the result of [`Cursor::lend`].
pub fn lent(result: io::Result<usize>) -> Result<Lent, Fault> {
    match result {
        Ok(moved) => Ok(Lent::Moved(moved)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Lent::WouldBlock),
        Err(e) => Err(Fault::Io(e)),
    }
}

/// A range of a batch's pieces, read or written once from start to end.
pub struct Cursor {
    direction: Direction,
    pieces: Arc<Pieces>,
    gate: Arc<Gate>,
    at: Position,
    remaining: u64,
    staging: Option<Staging>,
}

impl fmt::Debug for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cursor[{:?}, {} bytes left]", self.direction, self.remaining)
    }
}

impl Cursor {
    /// `len` bytes from `at` on, touched inside `gate`. Memory that was not ready calls `wake` once
    /// it may be.
    pub(crate) fn new(
        direction: Direction,
        pieces: Arc<Pieces>,
        at: Position,
        len: u64,
        gate: Arc<Gate>,
        wake: Wake,
    ) -> Self {
        let staging = (!pieces.all_host()).then(|| Staging::new(direction, wake));
        Self { direction, pieces, gate, at, remaining: len, staging }
    }

    /// Bytes not yet moved.
    pub fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Lends at most `limit` bytes that are ready to `use_spans`, which may lend those of another cursor meanwhile.
    ///
    /// # Errors
    /// The memory can't be used any more, the copier was stopped, or `use_spans` failed with an
    /// error other than `WouldBlock`.
    pub fn lend(&mut self, limit: usize, use_spans: &mut UseSpans<'_>) -> Result<Lent, Fault> {
        if self.remaining == 0 {
            return Ok(Lent::Moved(0));
        }
        self.at.leave_ended(&self.pieces);
        if self.pieces.is_host(&self.pieces.pieces[self.at.piece]) {
            self.walk_host(limit, use_spans)
        } else {
            self.walk_device(limit, use_spans)
        }
    }

    /// The transport begins to wait for its peer without a call of [`Cursor::lend`] that would block, such as for answers
    /// before it sends more. Host memory that other transfers of a device need is given back to them, which
    /// may take a second call: then this one calls the waker. The next `lend` has the bytes copied again.
    ///
    /// # Errors
    /// The memory can't be used any more, or the copier was stopped.
    pub fn park(&mut self) -> Result<(), Fault> {
        self.staging.as_mut().map_or(Ok(()), |staging| staging.park(&self.pieces, &self.gate))
    }

    /// Whether all received bytes are in place. Called when no bytes remain.
    ///
    /// # Errors
    /// A copy to the device failed, or the memory can't be used any more.
    pub fn flush(&mut self) -> Result<Lent, Fault> {
        let is_flushed = self.staging.as_mut().map_or(Ok(true), Staging::flush)?;
        Ok(if is_flushed { Lent::Moved(0) } else { Lent::NotReady })
    }

    fn walk_host(&mut self, limit: usize, use_spans: &mut UseSpans<'_>) -> Result<Lent, Fault> {
        let gate = Arc::clone(&self.gate);
        let _inside = gate.enter_to(self.pieces.touches()).map_err(|_| Fault::Shut)?;
        // Taken, not borrowed: `use_spans` may lend from another cursor.
        let mut spans = SPANS.take();
        spans.clear();
        let result = self.gather(limit, &mut spans).and_then(|()| lent(use_spans(&spans)));
        SPANS.set(spans);
        match result {
            Ok(Lent::Moved(moved)) => self.advance(moved),
            Ok(Lent::WouldBlock) => self.park()?,
            _ => {}
        }
        result
    }

    /// Collects host spans from the current position on; stops before device memory.
    fn gather(&self, limit: usize, spans: &mut Vec<HostSpan>) -> Result<(), Fault> {
        let mut budget = self.remaining.min(limit as u64);
        let mut within = self.at.within;
        let mut alive = Piece::RAW;
        for (i, piece) in self.pieces.pieces[self.at.piece..].iter().enumerate() {
            if budget == 0 || spans.len() == SPANS_MAX || !self.pieces.is_host(piece) {
                break;
            }
            let len = (piece.len - within).min(budget);
            if len > 0 {
                let span = self.host_span(piece, within, len, &mut alive);
                spans.push(
                    span.ok_or_else(|| Fault::Memory(MemoryFault::revoked(self.at.piece + i)))?,
                );
            }
            budget -= len;
            within = 0;
        }
        Ok(())
    }

    /// `None` if the region was unregistered. `alive` is the region that was last seen alive inside this gate.
    fn host_span(&self, piece: &Piece, within: u64, len: u64, alive: &mut u32) -> Option<HostSpan> {
        let len = usize::try_from(len).expect("bounded by the limit of the call");
        if piece.region == Piece::RAW {
            let at = usize::try_from(piece.offset + within).expect("an address of this process");
            // SAFETY: the caller of `Pieces::push_raw` promised the range until the transfer's
            // outcome, and a cursor is used only before it.
            return Some(unsafe { HostSpan::new(at as *mut u8, len) });
        }
        let region = &self.pieces.regions[piece.region as usize];
        if *alive != piece.region {
            if !region.is_alive() {
                return None;
            }
            *alive = piece.region;
        }
        Some(region.span(piece.offset + within, len))
    }

    fn advance(&mut self, moved: usize) {
        let moved = moved as u64;
        assert!(moved <= self.remaining, "a transport moved more bytes than it was lent");
        self.remaining -= moved;
        self.at.advance(&self.pieces, moved);
    }

    fn walk_device(&mut self, limit: usize, use_spans: &mut UseSpans<'_>) -> Result<Lent, Fault> {
        let staging = self.staging.as_mut().expect("made for pieces that are not all host");
        let ready = match self.direction {
            Direction::Out => staging.fetch(&self.pieces, &self.gate, self.at, self.remaining)?,
            Direction::In => staging.free_span(&self.pieces, self.at, self.remaining)?,
        };
        let Some(span) = ready else { return Ok(Lent::NotReady) };
        if self.gate.is_shut() {
            return Err(Fault::Shut);
        }
        let span = span.truncated(span.len().min(limit));
        let lent = lent(use_spans(&[span]))?;
        let Lent::Moved(moved) = lent else {
            staging.park(&self.pieces, &self.gate)?;
            return Ok(lent);
        };
        // The bytes have left the socket, whether their copy succeeds or not, so they count as
        // moved.
        let staged = staging.moved(moved, &self.pieces, &self.gate);
        self.advance(moved);
        staged.map(|()| lent)
    }
}
