//! Cursors over the bytes of a batch: transports send from a cursor and receive into one.
//!
//! A transport sees ready host spans and nothing else. A span is lent inside the copier's gate,
//! after its region was seen alive, for the duration of one call. So a transport can't hold a span
//! for longer than a revoker waits (see [`gate`](super::gate)).

use crate::memory::device::{After, DeviceMemory, Wait, Wake};
use crate::memory::gate::{Gate, Touches};
use crate::memory::region::{Backing, RegionInner};
use crate::memory::staging::Staging;
use kvferry_proto::WireCode;
use kvferry_sys::socket::SPANS_MAX;
use kvferry_sys::span::HostSpan;
use std::cell::Cell;
use std::fmt;
use std::io;
use std::sync::Arc;

/// Number of a batch's last regions that are compared with a new piece's: about as many as a model
/// has layers.
const LOOK_BACK: usize = 128;

thread_local! {
    static SPANS: Cell<Vec<HostSpan>> = const { Cell::new(Vec::new()) };
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
#[derive(Clone, Debug, Default)]
pub(crate) struct Pieces {
    pub(crate) regions: Vec<Arc<RegionInner>>,
    pub(crate) pieces: Vec<Piece>,
    pub(crate) bytes: u64,
    /// What has to happen before a device reads or writes the memory.
    pub(crate) after: After,
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
        self.after = After::default();
    }

    /// Regions that a copier of these pieces touches.
    pub(crate) fn touches(&self) -> Touches {
        Touches::of(self.regions.iter().map(|region| region.id))
    }

    fn is_host(&self, piece: &Piece) -> bool {
        piece.region == Piece::RAW || !self.regions[piece.region as usize].is_device()
    }

    /// The device memory of a piece, by its index; `None` for host memory.
    pub(super) fn device(&self, piece: usize) -> Option<&DeviceMemory> {
        match &self.regions.get(self.pieces[piece].region as usize)?.backing {
            Backing::Device(memory) => Some(memory),
            _ => None,
        }
    }

    /// Whether a device has to wait before the memory is touched.
    pub(crate) fn has_edges(&self) -> bool {
        !self.after.edges().is_empty() && !self.all_host()
    }

    /// Asks each device to wait for the edges, and to call `wake` once they have happened.
    pub(crate) fn wait_for_edges(&self, wake: &Wake) -> Vec<Arc<Wait>> {
        let mut asked: Vec<&DeviceMemory> = Vec::new();
        for region in &self.regions {
            if let Backing::Device(memory) = &region.backing
                && !asked.iter().any(|other| other.is_beside(memory))
            {
                asked.push(memory);
            }
        }
        asked.into_iter().map(|memory| Wait::start(&*memory.device, &self.after, wake)).collect()
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
pub enum Lent {
    /// Number of bytes moved.
    Moved(usize),
    /// The socket, or another recipient of the spans, is not ready.
    WouldBlock,
    /// The memory is not ready; it calls the waker once it may be.
    NotReady,
}

/// The reason why memory can't be used any more.
#[derive(Debug)]
pub enum Fault {
    /// The memory of a descriptor can't be used any more.
    Memory(MemoryFault),
    /// The copier was stopped.
    Shut,
    /// The recipient of the spans failed.
    Io(io::Error),
}

/// The reason why memory of a descriptor can't be used any more.
#[derive(Debug)]
pub struct MemoryFault {
    /// `Revoked` or `Internal`.
    pub code: WireCode,
    /// The index of the descriptor in the batch.
    pub(crate) index: u32,
    /// The error of the device that failed to copy it.
    pub(crate) device: Option<io::Error>,
}

impl MemoryFault {
    /// The region of a piece was unregistered.
    pub(super) fn revoked(piece: usize) -> Self {
        Self { code: WireCode::Revoked, index: index_of(piece), device: None }
    }
}

/// Whether a cursor's memory is read or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// The memory is read: its bytes are sent.
    Out,
    /// The memory is written: it receives bytes.
    In,
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
        if let Ok(Lent::Moved(moved)) = result {
            self.advance(moved);
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

pub(super) fn index_of(piece: usize) -> u32 {
    u32::try_from(piece).unwrap_or(u32::MAX)
}
