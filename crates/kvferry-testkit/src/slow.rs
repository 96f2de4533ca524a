//! Memory that behaves like a device: copies run later, on another thread, in pieces and out of
//! order. It records misuse that would damage data silently on a real device.
//!
//! One worker thread per memory copies a random piece of a random pending copy at a time, so
//! copies overtake each other and are torn while they run. Misuses are:
//!
//! - a copy that starts or still runs after the owner took the memory back ([`SlowMemory::free`]);
//! - two running copies of the same device bytes or the same staging bytes, if one of them writes
//!   those bytes;
//! - a copy beyond the memory.

use fastrand::Rng;
use kvferry_sys::HostSpan;
use kvferry_sys::map::Mapping;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

/// Bytes of the largest piece.
const PIECE_BYTES: usize = 96 * 1024;

/// The direction of a copy, seen from the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Copies from the device to host memory.
    Out,
    /// Copies from host memory to the device.
    In,
}

/// Called once, on the worker thread, when the copy has ended.
pub type Done = Box<dyn FnOnce(io::Result<()>) + Send>;

/// Device-like memory. Clones are the same memory.
#[derive(Clone)]
pub struct SlowMemory {
    shared: Arc<Shared>,
    // Ends the worker when the last clone is dropped.
    _handle: Arc<Handle>,
}

struct Handle(Arc<Shared>);

struct Shared {
    mapping: Arc<Mapping>,
    base: usize,
    len: usize,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    copies: Vec<Copy>,
    rng: Rng,
    held: bool,
    failing: usize,
    freed: bool,
    ended: bool,
    misuse: Vec<String>,
}

struct Copy {
    direction: Direction,
    offset: usize,
    host: HostSpan,
    pieces: Vec<Range<usize>>,
    done: Done,
}

impl Copy {
    fn device(&self) -> Range<usize> {
        self.offset..self.offset + self.host.len()
    }

    fn staging(&self) -> Range<usize> {
        let start = self.host.as_ptr() as usize;
        start..start + self.host.len()
    }

    fn conflict(&self, other: &Self) -> Option<&'static str> {
        let one_writes = |way| self.direction == way || other.direction == way;
        if one_writes(Direction::In) && overlap(&self.device(), &other.device()) {
            Some("the same device bytes")
        } else if one_writes(Direction::Out) && overlap(&self.staging(), &other.staging()) {
            Some("the same staging bytes")
        } else {
            None
        }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copy_piece(&self, direction: Direction, offset: usize, host: HostSpan, buffer: &mut [u8]) {
        let device = self.mapping.span(self.base + offset, buffer.len());
        match direction {
            Direction::Out => {
                device.copy_to(buffer);
                host.copy_from(buffer);
            }
            Direction::In => {
                host.copy_to(buffer);
                device.copy_from(buffer);
            }
        }
    }

    fn work(&self) {
        let mut buffer = vec![0; PIECE_BYTES];
        let mut state = self.state();
        loop {
            if state.ended {
                let abandoned = std::mem::take(&mut state.copies);
                drop(state);
                for copy in abandoned {
                    (copy.done)(Err(io::Error::other("the device was dropped")));
                }
                return;
            }
            if state.held || state.copies.is_empty() {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let delay = match state.rng.u8(..) {
                0..=15 => Duration::from_micros(30),
                16 => Duration::from_millis(1),
                _ => Duration::ZERO,
            };
            if !delay.is_zero() {
                drop(state);
                thread::sleep(delay);
                state = self.state();
                if state.held || state.ended || state.copies.is_empty() {
                    continue;
                }
            }
            let pending = state.copies.len();
            let chosen = state.rng.usize(..pending);
            let copy = &mut state.copies[chosen];
            let piece = copy.pieces.pop();
            let (direction, offset, host) = (copy.direction, copy.offset, copy.host);
            if let Some(piece) = piece {
                drop(state);
                let at = tail(host, piece.start);
                let buffer = &mut buffer[..piece.len()];
                self.copy_piece(direction, offset + piece.start, at, buffer);
                state = self.state();
            }
            // Only this thread removes copies, and new ones are appended: the index is still valid.
            if state.copies[chosen].pieces.is_empty() {
                let copy = state.copies.swap_remove(chosen);
                let result = if state.failing > 0 {
                    state.failing -= 1;
                    Err(io::Error::other("the device failed this copy on purpose"))
                } else {
                    Ok(())
                };
                drop(state);
                (copy.done)(result);
                state = self.state();
            }
        }
    }
}

fn tail(span: HostSpan, from: usize) -> HostSpan {
    // SAFETY: a part of a valid span, from an offset inside it to its end.
    unsafe { HostSpan::new(span.as_ptr().wrapping_add(from), span.len() - from) }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.state().ended = true;
        self.0.changed.notify_all();
    }
}

impl SlowMemory {
    /// Device memory made of `len` bytes of `mapping` from `base` on. The same `seed` gives the
    /// same delays and orders.
    pub fn new(mapping: Arc<Mapping>, base: usize, len: usize, seed: u64) -> Self {
        let shared = Arc::new(Shared {
            mapping,
            base,
            len,
            state: Mutex::new(State {
                copies: Vec::new(),
                rng: Rng::with_seed(seed),
                held: false,
                failing: 0,
                freed: false,
                ended: false,
                misuse: Vec::new(),
            }),
            changed: Condvar::new(),
        });
        let worker = Arc::clone(&shared);
        thread::Builder::new()
            .name("slow-memory".into())
            .spawn(move || worker.work())
            .expect("the machine has room for one more thread");
        Self { _handle: Arc::new(Handle(Arc::clone(&shared))), shared }
    }

    /// Bytes of the device memory.
    pub fn len(&self) -> usize {
        self.shared.len
    }

    /// Whether the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.shared.len == 0
    }

    /// Starts a copy between the memory at `offset` and `host`, and returns; the worker thread calls
    /// `done` when it has ended. `host` must stay valid until then.
    pub fn start(&self, direction: Direction, offset: u64, host: HostSpan, done: Done) {
        let mut state = self.shared.state();
        let end = usize::try_from(offset).ok().and_then(|at| at.checked_add(host.len()));
        let offset = offset as usize;
        if end.is_none_or(|end| end > self.shared.len) {
            let len = self.shared.len;
            state.misuse.push(format!("a copy of {} at {offset}, outside {len}", host.len()));
            drop(state);
            done(Err(io::Error::from(io::ErrorKind::InvalidInput)));
            return;
        }
        if state.freed {
            state.misuse.push(format!("a copy at {offset} started after the memory was freed"));
        }
        let mut pieces: Vec<_> = (0..host.len())
            .step_by(PIECE_BYTES)
            .map(|at| at..(at + PIECE_BYTES).min(host.len()))
            .collect();
        state.rng.shuffle(&mut pieces);
        let copy = Copy { direction, offset, host, pieces, done };
        let conflict = state.copies.iter().find_map(|other| copy.conflict(other));
        if let Some(what) = conflict {
            state.misuse.push(format!("two copies touch {what} at {offset} at the same time"));
        }
        state.copies.push(copy);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Copies, and returns when the copy has ended.
    pub fn copy_now(&self, direction: Direction, offset: u64, host: HostSpan) -> io::Result<()> {
        let (tell, told) = std::sync::mpsc::channel();
        self.start(direction, offset, host, Box::new(move |result| drop(tell.send(result))));
        told.recv().unwrap_or_else(|_| Err(io::Error::other("the device was dropped")))
    }

    /// Stops the device: copies can be started but make no progress.
    pub fn hold(&self) {
        self.shared.state().held = true;
    }

    /// Lets a stopped device continue.
    pub fn release(&self) {
        self.shared.state().held = false;
        self.shared.changed.notify_all();
    }

    /// Makes the next `copies` copies report a failure.
    pub fn fail_next(&self, copies: usize) {
        self.shared.state().failing = copies;
    }

    /// Copies that were started and have not ended.
    pub fn pending(&self) -> usize {
        self.shared.state().copies.len()
    }

    /// Copies that write the device's memory and have not ended.
    pub fn pending_in(&self) -> usize {
        let state = self.shared.state();
        state.copies.iter().filter(|copy| copy.direction == Direction::In).count()
    }

    /// The owner takes the memory back: any copy from here on is misuse.
    pub fn free(&self) {
        let mut state = self.shared.state();
        state.freed = true;
        let pending = state.copies.len();
        if pending > 0 {
            state.misuse.push(format!("the memory was freed while {pending} copies were running"));
        }
    }

    /// The recorded misuses.
    pub fn misuse(&self) -> Vec<String> {
        self.shared.state().misuse.clone()
    }
}

impl fmt::Debug for SlowMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SlowMemory({} bytes, {} pending)", self.len(), self.pending())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pattern::Pattern;

    fn memory(len: usize) -> (SlowMemory, Arc<Mapping>) {
        let mapping = Arc::new(Mapping::anonymous(len).expect("memory"));
        (SlowMemory::new(Arc::clone(&mapping), 0, len, 1), mapping)
    }

    fn staging(len: usize) -> Mapping {
        Mapping::anonymous(len).expect("memory")
    }

    #[test]
    fn a_copy_arrives_whole_and_only_later() {
        let len = 3 * PIECE_BYTES + 17;
        let (device, mapping) = memory(len);
        let buffer = staging(len);
        buffer.span(0, len).copy_from(&Pattern::new(3).bytes(len));
        device.hold();
        let (tell, told) = std::sync::mpsc::channel();
        device.start(
            Direction::In,
            0,
            buffer.span(0, len),
            Box::new(move |r| tell.send(r.is_ok()).expect("the test waits")),
        );
        assert_eq!(device.pending(), 1);
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
        device.release();
        assert!(told.recv().expect("the copy ends"));
        let mut bytes = vec![0; len];
        mapping.span(0, len).copy_to(&mut bytes);
        assert!(bytes == Pattern::new(3).bytes(len));
        assert!(device.misuse().is_empty());
    }

    #[test]
    fn misuse_is_recorded() {
        let (device, _mapping) = memory(1000);
        let buffer = staging(1000);
        device.hold();
        let start = |way, offset, at: usize, len: usize| {
            device.start(way, offset, buffer.span(at, len), Box::new(drop));
        };
        start(Direction::Out, 0, 0, 100);
        start(Direction::Out, 50, 100, 100);
        assert_eq!(device.misuse(), Vec::<String>::new(), "two reads may overlap");
        start(Direction::In, 80, 300, 10);
        start(Direction::Out, 500, 50, 10);
        start(Direction::In, 990, 400, 20);
        device.free();
        start(Direction::In, 700, 500, 1);
        let misuse = device.misuse();
        assert_eq!(misuse.len(), 5, "{misuse:#?}");
        device.release();
    }
}
