//! Host memory that the kernel or another thread touches beyond one call: of a read or write of a
//! file that is under way.

use crate::memory::cursor::{Piece, Pieces, Position};
use crate::memory::gate::Gate;
use crate::memory::region::RegionInner;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use kvferry_sys::span::HostSpan;

/// Why memory can't be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotHeld {
    /// The region was unregistered.
    Unregistered,
    /// The memory is a device's, or was never registered.
    Unsupported,
}

/// A use of a region's memory. `unregister` returns only after it has been dropped.
#[derive(Debug)]
pub(crate) struct Held(Arc<RegionInner>);

impl Held {
    /// The memory of `pieces` at `at`, which belongs to one piece. The span is valid until the value
    /// is dropped. A gate has one copier at a time: the caller.
    pub(crate) fn new(
        pieces: &Pieces,
        gate: &Gate,
        at: Position,
        len: usize,
    ) -> Result<(Self, HostSpan), NotHeld> {
        let piece: &Piece = &pieces.pieces[at.piece];
        let region = match pieces.regions.get(piece.region as usize) {
            Some(region) if !region.is_device() => region,
            _ => return Err(NotHeld::Unsupported),
        };
        let _inside = gate.enter().map_err(|_| NotHeld::Unregistered)?;
        // Counted before the look: a thread that unregisters the region marks it first and looks at the
        // count after that, so one of the two sees the other. That holds for a region of another agent,
        // too, which does not know this gate.
        region.copies.fetch_add(1, Ordering::SeqCst);
        let held = Self(Arc::clone(region));
        if !region.is_alive() {
            return Err(NotHeld::Unregistered);
        }
        Ok((held, region.span(piece.offset + at.within, len)))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.copies.fetch_sub(1, Ordering::SeqCst);
    }
}
