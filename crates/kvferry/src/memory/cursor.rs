//! Cursors over the bytes of a batch: transports send from a cursor and receive into one.
//!
//! A transport sees ready host spans and nothing else. A span is lent inside the copier's gate,
//! after its region was seen alive, for the duration of one call. So a transport can't hold a span
//! for longer than a revoker waits (see [`gate`](super::gate)).

use crate::callback::contain;
use crate::memory::device::{Copy, Stage, Wake};
use crate::memory::gate::{Gate, Touches};
use crate::memory::region::{Backing, RegionInner};
use kvferry_proto::WireCode;
use kvferry_sys::map::Mapping;
use kvferry_sys::socket::SPANS_MAX;
use kvferry_sys::span::HostSpan;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

/// Bytes of one staging buffer for device memory.
const STAGE_BYTES: u64 = 512 * 1024;
/// Number of a batch's last regions that are compared with a new piece's: about as many as a model
/// has layers.
const LOOK_BACK: usize = 128;
/// Staging buffers that one cursor uses at the same time, at most.
const STAGES: usize = 4;

thread_local! {
    static SPANS: RefCell<Vec<HostSpan>> = const { RefCell::new(Vec::new()) };
}

/// A contiguous piece of a batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    /// Index into [`Pieces::regions`], or [`Piece::RAW`].
    pub(crate) region: u32,
    /// Offset in the region; for unregistered memory an address of this process.
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Piece {
    /// Memory that the caller promised but did not register.
    pub(crate) const RAW: u32 = u32::MAX;
}

/// The local memory of a batch, in order.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) regions: Vec<Arc<RegionInner>>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: u64,
}

impl Pieces {
    /// Appends a piece of a region.
    pub(crate) fn push(&mut self, region: &Arc<RegionInner>, offset: u64, len: u64) {
        // Searching further back would cost more than a second entry does.
        let known = self.regions.iter().enumerate().rev().take(LOOK_BACK);
        let known = known.into_iter().find(|(_, r)| Arc::ptr_eq(r, region)).map(|(i, _)| i);
        let index = known.unwrap_or_else(|| {
            self.regions.push(Arc::clone(region));
            self.regions.len() - 1
        });
        let region = u32::try_from(index).expect("fewer regions than descriptors");
        self.push_piece(Piece { region, offset, len });
    }

    /// Appends unregistered memory.
    ///
    /// # Safety
    /// The range stays valid for as long as a cursor over these pieces is used: until their
    /// transfer has its outcome.
    pub(crate) unsafe fn push_raw(&mut self, addr: *mut u8, len: u64) {
        self.push_piece(Piece { region: Piece::RAW, offset: addr as u64, len });
    }

    fn push_piece(&mut self, piece: Piece) {
        self.bytes += piece.len;
        self.pieces.push(piece);
    }

    /// Removes all pieces; keeps the allocation.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.regions.clear();
        self.bytes = 0;
    }

    /// Regions that a copier of these pieces touches.
    pub(crate) fn touches(&self) -> Touches {
        Touches::of(self.regions.iter().map(|region| region.id))
    }

    fn is_host(&self, piece: &Piece) -> bool {
        piece.region == Piece::RAW || !self.regions[piece.region as usize].is_device()
    }

    pub(crate) fn all_host(&self) -> bool {
        !self.regions.iter().any(|region| region.is_device())
    }
}

/// The position of a byte in the pieces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) piece: usize,
    pub(crate) within: u64,
}

impl Position {
    /// Moves on to the next piece with bytes if the current one has ended.
    pub(crate) fn leave_ended(&mut self, pieces: &Pieces) {
        while pieces.pieces[self.piece].len == self.within {
            *self = Self { piece: self.piece + 1, within: 0 };
        }
    }

    /// Moves on by `bytes`.
    pub(crate) fn advance(&mut self, pieces: &Pieces, mut bytes: u64) {
        while bytes > 0 {
            let piece = &pieces.pieces[self.piece];
            let part = bytes.min(piece.len - self.within);
            self.advance_within(piece, part);
            bytes -= part;
        }
    }

    /// Moves on by `bytes` of the current piece, which is `piece` and has as many left.
    pub(crate) fn advance_within(&mut self, piece: &Piece, bytes: u64) {
        self.within += bytes;
        if self.within == piece.len {
            *self = Self { piece: self.piece + 1, within: 0 };
        }
    }
}

/// The result of asking for spans.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lent {
    /// Number of bytes moved.
    Moved(usize),
    /// The socket, or another recipient of the spans, is not ready.
    WouldBlock,
    /// The memory is not ready; it calls the waker once it may be.
    NotReady,
}

/// The reason why memory can't be used any more.
#[derive(Debug)]
pub(crate) enum Fault {
    /// The memory of a descriptor can't be used any more.
    Memory {
        /// `Revoked` or `Internal`.
        code: WireCode,
        /// The index of the descriptor in the batch.
        index: u32,
    },
    /// The copier was stopped.
    Shut,
    /// The recipient of the spans failed.
    Io(io::Error),
}

/// Whether a cursor's memory is read or written.
#[derive(Clone, Copy)]
pub(crate) enum Direction {
    /// The memory is read: its bytes are sent.
    Out,
    /// The memory is written: it receives bytes.
    In,
}

/// Uses lent spans; returns how many of their bytes it moved.
type UseSpans<'a> = dyn FnMut(&[HostSpan]) -> io::Result<usize> + 'a;

/// A call that moved bytes, as the result of [`Cursor::lend`].
pub(crate) fn lent(result: io::Result<usize>) -> Result<Lent, Fault> {
    match result {
        Ok(moved) => Ok(Lent::Moved(moved)),
        Err(e) if e.kind() == io::ErrorKind::WouldBlock => Ok(Lent::WouldBlock),
        Err(e) => Err(Fault::Io(e)),
    }
}

/// A range of a batch's pieces, read or written once from start to end.
pub(crate) struct Cursor {
    direction: Direction,
    pieces: Arc<Pieces>,
    gate: Arc<Gate>,
    at: Position,
    remaining: u64,
    staging: Option<Staging>,
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
        let staging = (!pieces.all_host()).then(|| Staging::new(wake, at, len));
        Self { direction, pieces, gate, at, remaining: len, staging }
    }

    /// Bytes not yet moved.
    pub(crate) fn remaining(&self) -> u64 {
        self.remaining
    }

    /// Lends at most `limit` bytes that are ready to `use_spans`.
    ///
    /// # Errors
    /// The memory can't be used any more, the copier was stopped, or `use_spans` failed with an
    /// error other than `WouldBlock`.
    pub(crate) fn lend(
        &mut self,
        limit: usize,
        use_spans: &mut UseSpans<'_>,
    ) -> Result<Lent, Fault> {
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

    /// Whether all received bytes are in place. Called when no bytes remain.
    ///
    /// # Errors
    /// A copy to the device failed, or the memory can't be used any more.
    pub(crate) fn flush(&mut self) -> Result<Lent, Fault> {
        self.staging.as_mut().map_or(Ok(Lent::Moved(0)), Staging::flush)
    }

    fn walk_host(&mut self, limit: usize, use_spans: &mut UseSpans<'_>) -> Result<Lent, Fault> {
        let gate = Arc::clone(&self.gate);
        let _inside = gate.enter_to(self.pieces.touches()).map_err(|_| Fault::Shut)?;
        SPANS.with_borrow_mut(|spans| {
            spans.clear();
            self.gather(limit, spans)?;
            let lent = lent(use_spans(spans))?;
            if let Lent::Moved(moved) = lent {
                self.advance(moved);
            }
            Ok(lent)
        })
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
                spans.push(
                    self.host_span(piece, within, len, &mut alive).map_err(|code| {
                        Fault::Memory { code, index: index_of(self.at.piece + i) }
                    })?,
                );
            }
            budget -= len;
            within = 0;
        }
        Ok(())
    }

    /// `alive` is the region that was last seen alive inside this gate.
    fn host_span(
        &self,
        piece: &Piece,
        within: u64,
        len: u64,
        alive: &mut u32,
    ) -> Result<HostSpan, WireCode> {
        let len = usize::try_from(len).expect("bounded by the limit of the call");
        if piece.region == Piece::RAW {
            let at = usize::try_from(piece.offset + within).expect("an address of this process");
            // SAFETY: the caller of `Pieces::push_raw` promised the range until the transfer's
            // outcome, and a cursor is used only before it.
            return Ok(unsafe { HostSpan::new(at as *mut u8, len) });
        }
        let region = &self.pieces.regions[piece.region as usize];
        if *alive != piece.region {
            if !region.is_alive() {
                return Err(WireCode::Revoked);
            }
            *alive = piece.region;
        }
        Ok(region.span(piece.offset + within, len))
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
            Direction::Out => staging.fetch(&self.pieces, &self.gate)?,
            Direction::In => staging.free_span(&self.pieces, self.at, self.remaining)?,
        };
        let Some(span) = ready else { return Ok(Lent::NotReady) };
        if self.gate.is_shut() {
            return Err(Fault::Shut);
        }
        let span = span.truncated(span.len().min(limit));
        let lent = lent(use_spans(&[span]))?;
        let Lent::Moved(moved) = lent else { return Ok(lent) };
        // The bytes have left the socket, whether their copy succeeds or not, so they count as
        // moved.
        let staged = match self.direction {
            Direction::Out => {
                staging.taken(moved);
                Ok(())
            }
            Direction::In => staging.filled(moved, &self.pieces, &self.gate),
        };
        self.advance(moved);
        staged.map(|()| lent)
    }
}

fn index_of(piece: usize) -> u32 {
    u32::try_from(piece).unwrap_or(u32::MAX)
}

/// Staging buffers between device memory and a socket.
struct Staging {
    wake: Wake,
    free: Vec<Mapping>,
    made: usize,
    /// Copies from the device, in the order of the bytes (out), or to it, in any order (in).
    copies: VecDeque<Staged>,
    /// Out: where the next copy starts, and how many bytes no copy was started for.
    ahead: Position,
    ahead_left: u64,
    /// In: the buffer being filled.
    filling: Option<Filling>,
}

struct Staged {
    copy: Arc<Copy>,
    piece: usize,
    len: usize,
    /// Out: how many of its bytes were sent.
    taken: usize,
}

struct Filling {
    buffer: Mapping,
    start: Position,
    len: usize,
    filled: usize,
}

impl Staging {
    fn new(wake: Wake, at: Position, len: u64) -> Self {
        Self {
            wake,
            free: Vec::new(),
            made: 0,
            copies: VecDeque::new(),
            ahead: at,
            ahead_left: len,
            filling: None,
        }
    }

    fn buffer(&mut self) -> Result<Option<Mapping>, Fault> {
        if let Some(buffer) = self.free.pop() {
            return Ok(Some(buffer));
        }
        if self.made == STAGES {
            return Ok(None);
        }
        let bytes = usize::try_from(STAGE_BYTES).expect("a small constant");
        let buffer = Mapping::anonymous(bytes).map_err(Fault::Io)?;
        self.made += 1;
        Ok(Some(buffer))
    }

    fn failed(piece: usize, e: &io::Error) -> Fault {
        tracing::warn!(piece, error = %e, "a copy between device and staging memory failed");
        Fault::Memory { code: WireCode::Internal, index: index_of(piece) }
    }

    /// Starts a copy of the part of `piece` at `within`, inside the gate.
    fn start(
        &self,
        pieces: &Pieces,
        gate: &Arc<Gate>,
        at: Position,
        len: usize,
        buffer: Mapping,
        direction: Direction,
    ) -> Result<Staged, Fault> {
        let piece = pieces.pieces[at.piece];
        let region = &pieces.regions[piece.region as usize];
        let Backing::Device(device) = &region.backing else {
            unreachable!("only device pieces are staged");
        };
        let _inside = gate.enter().map_err(|_| Fault::Shut)?;
        if !region.is_alive() {
            return Err(Fault::Memory { code: WireCode::Revoked, index: index_of(at.piece) });
        }
        let copy = Copy::start(buffer, region, gate, &self.wake);
        let (offset, stage) = (piece.offset + at.within, Stage::new(&copy, len));
        // If the call panics, the copy fails once the device drops or completes the stage.
        contain("a device's copy", || match direction {
            Direction::Out => device.copy_out(offset, stage),
            Direction::In => device.copy_in(offset, stage),
        });
        Ok(Staged { copy, piece: at.piece, len, taken: 0 })
    }

    /// Out: starts copies ahead of the position, and returns the bytes that are ready to be sent.
    fn fetch(&mut self, pieces: &Pieces, gate: &Arc<Gate>) -> Result<Option<HostSpan>, Fault> {
        while self.ahead_left > 0 && self.copies.len() < STAGES {
            let piece = pieces.pieces[self.ahead.piece];
            let left = piece.len - self.ahead.within;
            if left == 0 || pieces.is_host(&piece) {
                let skip = left.min(self.ahead_left);
                self.ahead_left -= skip;
                self.ahead = Position { piece: self.ahead.piece + 1, within: 0 };
                continue;
            }
            let Some(buffer) = self.buffer()? else { break };
            let len = left.min(self.ahead_left).min(STAGE_BYTES);
            let at = self.ahead;
            let size = usize::try_from(len).expect("at most one staging buffer");
            self.copies.push_back(self.start(pieces, gate, at, size, buffer, Direction::Out)?);
            self.ahead_left -= len;
            self.ahead.within += len;
        }
        let front =
            self.copies.front().expect("while device bytes remain, a copy of them is in progress");
        match front.copy.outcome() {
            None => Ok(None),
            Some(Ok(())) => Ok(Some(front.copy.span(front.taken, front.len - front.taken))),
            Some(Err(e)) => Err(Self::failed(front.piece, &e)),
        }
    }

    fn taken(&mut self, bytes: usize) {
        let front = self.copies.front_mut().expect("bytes were taken from it");
        front.taken += bytes;
        if front.taken == front.len {
            let done = self.copies.pop_front().expect("looked at above");
            self.recycle(done);
        }
    }

    fn recycle(&mut self, staged: Staged) {
        match staged.copy.into_buffer() {
            Some(buffer) => self.free.push(buffer),
            // The device still holds the completion for a moment: leave this buffer to it and
            // allocate another one.
            None => self.made -= 1,
        }
    }

    /// In: the rest of the buffer that is being filled, or a new buffer.
    fn free_span(
        &mut self,
        pieces: &Pieces,
        at: Position,
        remaining: u64,
    ) -> Result<Option<HostSpan>, Fault> {
        if self.filling.is_none() {
            self.reap()?;
            let Some(buffer) = self.buffer()? else { return Ok(None) };
            let left = pieces.pieces[at.piece].len - at.within;
            let len = left.min(remaining).min(STAGE_BYTES);
            let len = usize::try_from(len).expect("at most one staging buffer");
            self.filling = Some(Filling { buffer, start: at, len, filled: 0 });
        }
        let filling = self.filling.as_ref().expect("set above");
        Ok(Some(filling.buffer.span(filling.filled, filling.len - filling.filled)))
    }

    fn filled(&mut self, bytes: usize, pieces: &Pieces, gate: &Arc<Gate>) -> Result<(), Fault> {
        let filling = self.filling.as_mut().expect("bytes were received into it");
        filling.filled += bytes;
        if filling.filled < filling.len {
            return Ok(());
        }
        let full = self.filling.take().expect("looked at above");
        let (start, len) = (full.start, full.len);
        let staged = self.start(pieces, gate, start, len, full.buffer, Direction::In)?;
        self.copies.push_back(staged);
        Ok(())
    }

    /// In: takes back the buffers of copies that have ended.
    fn reap(&mut self) -> Result<(), Fault> {
        for _ in 0..self.copies.len() {
            let staged = self.copies.pop_front().expect("counted");
            match staged.copy.outcome() {
                None => self.copies.push_back(staged),
                Some(Ok(())) => self.recycle(staged),
                Some(Err(e)) => return Err(Self::failed(staged.piece, &e)),
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<Lent, Fault> {
        self.reap()?;
        Ok(if self.copies.is_empty() { Lent::Moved(0) } else { Lent::NotReady })
    }
}
