//! Copies of a batch's device memory through its device's stages, without a peer.
//!
//! Benches measure by these what a transport does with a device's memory, without what it does with the bytes. The
//! copies of one call run ahead of each other as the copies of one share of a transfer do.

use crate::memory::cursor::{Cursor, Lent};
use crate::memory::device::Direction;
use crate::memory::gate::Gate;
use crate::memory::pieces::{Fault, Position};
use crate::memory::stages::Wake;
use crate::reactor::now;
use crate::sync::{Condvar, Mutex};
use crate::transfer::batch::Batch;
use crate::transfer::caller::COPY_LINGER;
use kvferry_sys::span::HostSpan;
use std::io;
use std::sync::Arc;

/// Copies the local memory of the batch out of its device. `send` gets the bytes of each stage, in their order.
///
/// # Errors
/// `InvalidInput` for a batch with host memory or with edges; the device's error.
pub fn copy_out(batch: &Batch, send: &mut dyn FnMut(HostSpan)) -> io::Result<()> {
    copy(batch, Direction::Out, send)
}

/// Copies into the local memory of the batch. `receive` fills each stage, in the order of the bytes.
///
/// # Errors
/// Those of [`copy_out`].
pub fn copy_in(batch: &Batch, receive: &mut dyn FnMut(HostSpan)) -> io::Result<()> {
    copy(batch, Direction::In, receive)
}

/// Tells a thread that waits that memory may be ready.
#[derive(Default)]
struct Bell {
    has_rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.has_rung.lock() = true;
        self.changed.notify_one();
    }

    /// Waits for the bell. The thread stays awake for [`COPY_LINGER`] first, as the callers of transfers do.
    fn wait(&self) {
        let began = now();
        while now().saturating_since(began) < COPY_LINGER {
            if std::mem::take(&mut *self.has_rung.lock()) {
                return;
            }
            std::thread::yield_now();
        }
        let rung = self.has_rung.lock();
        *self.changed.wait_while(rung, None, |has_rung| !*has_rung) = false;
    }
}

fn copy(
    batch: &Batch,
    direction: Direction,
    use_stage: &mut dyn FnMut(HostSpan),
) -> io::Result<()> {
    let pieces = &batch.local;
    // The gate below is unknown to revokers of host memory. Only copies, which hold the region, touch memory of a
    // device.
    let is_of_devices = (0..pieces.pieces.len()).all(|piece| pieces.device(piece).is_some());
    if !is_of_devices || pieces.has_edges() {
        let what = "the batch has host memory, or edges";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let bell = Arc::new(Bell::default());
    let ring = Arc::clone(&bell);
    let wake: Wake = Arc::new(move || ring.ring());
    let (at, len) = (Position::default(), pieces.bytes);
    let mut cursor = Cursor::new(direction, Arc::clone(pieces), at, len, Gate::new(), wake);
    while cursor.remaining() > 0 {
        let lent = cursor.lend(usize::MAX, &mut |spans| {
            spans.iter().for_each(|span| use_stage(*span));
            Ok(spans.iter().map(HostSpan::len).sum())
        });
        if lent.map_err(to_io)? == Lent::NotReady {
            bell.wait();
        }
    }
    while direction == Direction::In && cursor.flush().map_err(to_io)? == Lent::NotReady {
        bell.wait();
    }
    Ok(())
}

fn to_io(fault: Fault) -> io::Error {
    match fault {
        Fault::Memory(fault) => {
            fault.device.unwrap_or_else(|| io::Error::other("the region was unregistered"))
        }
        Fault::Shut => io::Error::other("the copier was stopped"),
        Fault::Io(error) => error,
    }
}
