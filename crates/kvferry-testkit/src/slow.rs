//! Memory that behaves like a device: copies run later, on another thread, in parts and out of
//! order. It records misuse that would damage data silently on a real device.
//!
//! One worker thread per memory copies a random part of a random pending copy at a time, so
//! copies overtake each other and are torn while they run. Misuses are:
//!
//! - a copy that starts or still runs after the owner took the memory back ([`SlowMemory::free`]);
//! - two running copies of the same device bytes or the same staging bytes, if one of them writes
//!   those bytes;
//! - a copy beyond the memory, or of more pieces than a batch may have.

mod addresses;
mod fault;

pub use fault::DeviceFault;

use addresses::Addresses;
use fastrand::Rng;
use kvferry::{After, Device, DeviceCopy, DeviceMemory, DevicePiece, Happened, StagePool};
use kvferry_sys::HostSpan;
use kvferry_sys::map::Mapping;
use kvferry_sys::sync::{Condvar, Mutex, MutexGuard};
use std::any::Any;
use std::fmt;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;

/// Bytes of the largest part.
const PART_BYTES: usize = 96 * 1024;

/// Pieces of one batch, at most.
const PIECES_MAX: usize = 128;
/// So few and so small that large transfers wait for stages.
const STAGE_BYTES: usize = 256 * 1024;
const STAGES: usize = 6;

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
    /// `None`: the memory's addresses are the device's own, from zero on.
    addresses: Option<Arc<Addresses>>,
    // Ends the worker when the last clone is dropped.
    _handle: Arc<Handle>,
}

struct Handle(Arc<Shared>);

struct Shared {
    mapping: Arc<Mapping>,
    base: usize,
    len: usize,
    stages: Arc<StagePool>,
    fault: Option<DeviceFault>,
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    copies: Vec<Copy>,
    waits: Vec<(After, Happened)>,
    next_serial: u64,
    /// The last part of a copy that was completed without it.
    owed: Option<(Direction, Part)>,
    rng: Rng,
    held: bool,
    failing: usize,
    losing: usize,
    freed: bool,
    ended: bool,
    misuse: Vec<String>,
    /// Copies, and their pieces, that were ever started.
    calls: usize,
    pieces: usize,
}

/// Bytes of the device, and the host memory that they are copied to or from.
#[derive(Clone, Copy)]
struct Part {
    offset: usize,
    host: HostSpan,
}

struct Copy {
    serial: u64,
    direction: Direction,
    /// The bytes of the device, sorted.
    device: Vec<Range<usize>>,
    staging: Range<usize>,
    /// What is left to be copied.
    parts: Vec<Part>,
    /// How many parts are left when it fails, if it does.
    fails_at: Option<usize>,
    done: Done,
}

impl Copy {
    fn conflict(&self, other: &Self) -> Option<&'static str> {
        let one_writes = |way| self.direction == way || other.direction == way;
        if one_writes(Direction::In) && any_overlap(&self.device, &other.device) {
            Some("the same device bytes")
        } else if one_writes(Direction::Out) && overlap(&self.staging, &other.staging) {
            Some("the same staging bytes")
        } else {
            None
        }
    }
}

/// Whether a range of one sorted list overlaps one of the other.
fn any_overlap(a: &[Range<usize>], b: &[Range<usize>]) -> bool {
    let (mut a, mut b) = (a.iter().peekable(), b.iter().peekable());
    while let (Some(one), Some(other)) = (a.peek(), b.peek()) {
        if overlap(one, other) {
            return true;
        }
        if one.end < other.end {
            a.next()
        } else {
            b.next()
        };
    }
    false
}

/// The bytes of the device that pieces have, as sorted ranges that do not overlap.
fn sorted(pieces: &[DevicePiece]) -> Vec<Range<usize>> {
    let start = |piece: &DevicePiece| usize::try_from(piece.address).expect("inside the memory");
    let mut ranges: Vec<_> = pieces.iter().map(|p| start(p)..start(p) + p.len).collect();
    ranges.sort_by_key(|range| range.start);
    ranges.dedup_by(|next, range| {
        let is_beside = next.start <= range.end;
        if is_beside {
            range.end = range.end.max(next.end);
        }
        is_beside
    });
    ranges
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Completes the waits whose edges have happened.
    fn look_at_waits(&self) {
        let is_over = |(after, happened): &mut (After, Happened)| {
            !happened.is_needed() || edges(after).flatten().all(|edge| edge.state().has_happened)
        };
        let over: Vec<_> = self.state().waits.extract_if(.., is_over).collect();
        over.into_iter().for_each(|(_, happened)| happened.complete(Ok(())));
    }

    fn copy(&self, direction: Direction, part: Part, buffer: &mut [u8]) {
        let buffer = &mut buffer[..part.host.len()];
        let device = self.mapping.span(self.base + part.offset, buffer.len());
        match direction {
            Direction::Out => {
                device.copy_to(buffer);
                part.host.copy_from(buffer);
            }
            Direction::In => {
                part.host.copy_to(buffer);
                device.copy_from(buffer);
            }
        }
    }

    fn work(&self) {
        let mut buffer = vec![0; PART_BYTES];
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
            let Some(serial) = state.choose() else {
                state = self.changed.wait(state, None);
                continue;
            };
            let delay = match state.rng.u8(..) {
                0..=15 => Duration::from_micros(30),
                16 => Duration::from_millis(1),
                _ => Duration::ZERO,
            };
            if !delay.is_zero() {
                drop(state);
                thread::sleep(delay);
                state = self.state();
                if state.held || state.ended {
                    continue;
                }
            }
            // Only this thread removes copies.
            let copy = state.copy(serial);
            let (direction, part) = (copy.direction, copy.parts.pop());
            if let Some(part) = part {
                drop(state);
                self.copy(direction, part, &mut buffer);
                state = self.state();
            }
            let copy = state.copy(serial);
            if self.fault == Some(DeviceFault::EarlyCompletion) && copy.parts.len() == 1 {
                let owed = (copy.direction, copy.parts.remove(0));
                state.owed = Some(owed);
            }
            let copy = state.copy(serial);
            let fails = copy.fails_at == Some(copy.parts.len());
            if fails || copy.parts.is_empty() {
                let at = state.position(serial);
                let copy = state.copies.swap_remove(at);
                drop(state);
                let failure = || io::Error::other("the device failed this copy on purpose");
                (copy.done)(if fails { Err(failure()) } else { Ok(()) });
                state = self.state();
            }
        }
    }
}

impl State {
    /// The copy to go on with, if the device makes progress.
    fn choose(&mut self) -> Option<u64> {
        if self.held {
            return None;
        }
        let serials: Vec<_> = self.copies.iter().map(|copy| copy.serial).collect();
        (!serials.is_empty()).then(|| serials[self.rng.usize(..serials.len())])
    }

    fn position(&self, serial: u64) -> usize {
        let at = self.copies.iter().position(|copy| copy.serial == serial);
        at.expect("a copy stays until it ends")
    }

    fn copy(&mut self, serial: u64) -> &mut Copy {
        let at = self.position(serial);
        &mut self.copies[at]
    }
}

/// What transfers of any [`SlowMemory`] can wait for: [`After::all`] takes it.
#[derive(Default)]
pub struct Edge(Mutex<EdgeState>);

#[derive(Default)]
struct EdgeState {
    has_happened: bool,
    /// Devices whose transfers wait for it.
    devices: Vec<Weak<Shared>>,
}

impl Edge {
    fn state(&self) -> MutexGuard<'_, EdgeState> {
        self.0.lock()
    }

    /// Lets the transfers that wait for it go on.
    pub fn happen(&self) {
        let mut state = self.state();
        state.has_happened = true;
        let devices = std::mem::take(&mut state.devices);
        drop(state);
        devices.iter().filter_map(Weak::upgrade).for_each(|device| device.look_at_waits());
    }
}

impl fmt::Debug for Edge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Edge[happened: {}]", self.state().has_happened)
    }
}

/// The edges of [`SlowMemory::edge`]; `None` for each other one.
fn edges(after: &After) -> impl Iterator<Item = Option<&Edge>> {
    after.edges().iter().map(|edge| edge.downcast_ref())
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
        Self::with(mapping, base, len, seed, STAGES, None)
    }

    /// The same, with so many stages.
    pub fn with_stages(
        mapping: Arc<Mapping>,
        base: usize,
        len: usize,
        seed: u64,
        stages: usize,
    ) -> Self {
        Self::with(mapping, base, len, seed, stages, None)
    }

    /// The same, with an error.
    pub fn with_fault(
        mapping: Arc<Mapping>,
        base: usize,
        len: usize,
        seed: u64,
        fault: Option<DeviceFault>,
    ) -> Self {
        Self::with(mapping, base, len, seed, STAGES, fault)
    }

    fn with(
        mapping: Arc<Mapping>,
        base: usize,
        len: usize,
        seed: u64,
        stages: usize,
        fault: Option<DeviceFault>,
    ) -> Self {
        let shared = Arc::new(Shared {
            mapping,
            base,
            len,
            stages: StagePool::new(STAGE_BYTES, stages).expect("the machine has memory"),
            fault,
            state: Mutex::new(State {
                copies: Vec::new(),
                waits: Vec::new(),
                next_serial: 0,
                owed: None,
                rng: Rng::with_seed(seed),
                held: false,
                failing: 0,
                losing: 0,
                freed: false,
                ended: false,
                misuse: Vec::new(),
                calls: 0,
                pieces: 0,
            }),
            changed: Condvar::new(),
        });
        let worker = Arc::clone(&shared);
        thread::Builder::new()
            .name("slow-memory".into())
            .spawn(move || worker.work())
            .expect("the machine has room for one more thread");
        Self { _handle: Arc::new(Handle(Arc::clone(&shared))), addresses: None, shared }
    }

    /// Bytes of the device memory.
    pub fn len(&self) -> usize {
        self.shared.len
    }

    /// Whether the memory has no bytes.
    pub fn is_empty(&self) -> bool {
        self.shared.len == 0
    }

    /// All of the memory, to be registered with an agent.
    pub fn memory(&self) -> DeviceMemory {
        self.part(0, self.len())
    }

    /// `len` bytes of the memory from `offset` on.
    pub fn part(&self, offset: usize, len: usize) -> DeviceMemory {
        let device = Arc::new(self.clone());
        match self.address() {
            Some(start) => DeviceMemory::new(device, start + offset as u64, len as u64)
                .with_process_addresses(),
            None => DeviceMemory::new(device, offset as u64, len as u64),
        }
    }

    /// How many copies were started, and how many pieces they had.
    pub fn started(&self) -> (usize, usize) {
        let state = self.shared.state();
        (state.calls, state.pieces)
    }

    /// An edge that has not happened, and what waits for it.
    pub fn edge() -> (Arc<Edge>, After) {
        let edge = Arc::new(Edge::default());
        let after = After::all([Arc::clone(&edge) as Arc<dyn Any + Send + Sync>]);
        (edge, after)
    }

    /// Starts to copy `pieces` of the memory, which lie one after the other in `host`, and returns; the worker
    /// thread calls `done` when the copy has ended. `host` must stay valid until then.
    pub fn start(&self, direction: Direction, pieces: &[DevicePiece], host: HostSpan, done: Done) {
        let mut state = self.shared.state();
        (state.calls, state.pieces) = (state.calls + 1, state.pieces + pieces.len());
        if pieces.len() > PIECES_MAX {
            state.misuse.push(format!("a copy of {} pieces", pieces.len()));
        }
        let is_inside = |piece: &DevicePiece| {
            let end = piece.address.checked_add(piece.len as u64);
            end.is_some_and(|end| end <= self.shared.len as u64)
        };
        if let Some(piece) = pieces.iter().find(|piece| !is_inside(piece)) {
            let len = self.shared.len;
            state.misuse.push(format!("a copy of {piece:?}, outside {len}"));
            drop(state);
            done(Err(io::Error::from(io::ErrorKind::InvalidInput)));
            return;
        }
        if state.freed {
            state.misuse.push(format!("a copy of {pieces:?} started after the memory was freed"));
        }
        if let Some((direction, part)) = state.owed.take() {
            self.shared.copy(direction, part, &mut vec![0; PART_BYTES]);
        }
        let start = host.as_ptr() as usize;
        let mut copy = Copy {
            serial: state.next_serial,
            direction,
            device: sorted(pieces),
            staging: start..start + host.len(),
            parts: self.parts(direction, pieces, host),
            fails_at: None,
            done,
        };
        state.next_serial += 1;
        state.rng.shuffle(&mut copy.parts);
        if self.shared.fault == Some(DeviceFault::LostPiece) && copy.parts.len() > 1 {
            copy.parts.pop();
        }
        if state.failing > 0 {
            state.failing -= 1;
            copy.fails_at = Some(copy.parts.len() / 2);
        }
        let conflict = state.copies.iter().find_map(|other| copy.conflict(other));
        if let Some(what) = conflict {
            let range = &copy.device;
            state.misuse.push(format!("two copies touch {what} at {range:?} at the same time"));
        }
        state.copies.push(copy);
        drop(state);
        self.shared.changed.notify_all();
    }

    fn start_batch(&self, direction: Direction, copy: DeviceCopy) {
        let mut state = self.shared.state();
        if state.losing > 0 {
            state.losing -= 1;
            drop(state);
            std::mem::forget(copy);
            return;
        }
        drop(state);
        // SAFETY: the worker calls `done`, which owns the batch, when it has stopped to use the span.
        let host = unsafe { HostSpan::new(copy.as_ptr(), copy.len()) };
        let mut pieces = copy.pieces().to_vec();
        let start = self.address().unwrap_or(0);
        // An address before the memory becomes one beyond it, which is misuse.
        pieces.iter_mut().for_each(|piece| piece.address = piece.address.wrapping_sub(start));
        self.start(direction, &pieces, host, Box::new(|result| copy.complete(result)));
    }

    /// What is to be copied where, in parts of at most [`PART_BYTES`].
    fn parts(&self, direction: Direction, pieces: &[DevicePiece], host: HostSpan) -> Vec<Part> {
        let mut pieces = pieces.to_vec();
        if direction == Direction::Out && self.shared.fault == Some(DeviceFault::ReversedPieces) {
            pieces.reverse();
        }
        let mut parts = Vec::with_capacity(pieces.len());
        let mut rest = host;
        for piece in pieces {
            let (mut of_piece, after) = rest.split_at(piece.len);
            rest = after;
            let mut offset = usize::try_from(piece.address).expect("inside the memory");
            while !of_piece.is_empty() {
                let (host, left) = of_piece.split_at(of_piece.len().min(PART_BYTES));
                parts.push(Part { offset, host });
                offset += host.len();
                of_piece = left;
            }
        }
        parts
    }

    /// Copies, and returns when the copy has ended.
    pub fn copy_now(&self, direction: Direction, offset: u64, host: HostSpan) -> io::Result<()> {
        let (tell, told) = std::sync::mpsc::channel();
        let done = Box::new(move |result| drop(tell.send(result)));
        let piece = DevicePiece { address: offset, len: host.len() };
        self.start(direction, &[piece], host, done);
        told.recv().unwrap_or_else(|_| Err(io::Error::other("the device was dropped")))
    }

    /// Stops the device: copies can be started but make no progress.
    pub fn hold(&self) {
        self.shared.state().held = true;
    }

    /// True if the device makes no progress.
    pub fn is_held(&self) -> bool {
        self.shared.state().held
    }

    /// Lets a stopped device continue.
    pub fn release(&self) {
        self.shared.state().held = false;
        self.shared.changed.notify_all();
    }

    /// Makes the next `copies` copies that are started fail when half of their parts are copied.
    pub fn fail_next(&self, copies: usize) {
        self.shared.state().failing = copies;
    }

    /// Makes the device lose the next `batches` batches: they never end.
    pub fn lose_next(&self, batches: usize) {
        self.shared.state().losing = batches;
    }

    /// Batches that the device will lose.
    pub fn losing(&self) -> usize {
        self.shared.state().losing
    }

    /// Transfers that wait for edges.
    pub fn waiting(&self) -> usize {
        let state = self.shared.state();
        state.waits.iter().filter(|(_, happened)| happened.is_needed()).count()
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

impl Device for SlowMemory {
    fn stages(&self) -> Arc<StagePool> {
        Arc::clone(&self.shared.stages)
    }

    fn pieces_max(&self) -> usize {
        PIECES_MAX
    }

    fn copy_out(&self, copy: DeviceCopy) {
        self.start_batch(Direction::Out, copy);
    }

    fn copy_in(&self, copy: DeviceCopy) {
        self.start_batch(Direction::In, copy);
    }

    fn wait_for(&self, after: &After, happened: Happened) {
        if edges(after).any(|edge| edge.is_none()) {
            let what = "an edge of another kind of device";
            return happened.complete(Err(io::Error::new(io::ErrorKind::InvalidInput, what)));
        }
        self.shared.state().waits.push((after.clone(), happened));
        for edge in edges(after).flatten() {
            edge.state().devices.push(Arc::downgrade(&self.shared));
        }
        self.shared.look_at_waits();
    }

    fn awaited(&self, after: &After) -> Option<String> {
        let at = edges(after).flatten().position(|edge| !edge.state().has_happened)?;
        Some(format!("slow edge {}", at + 1))
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

    fn piece(address: u64, len: usize) -> DevicePiece {
        DevicePiece { address, len }
    }

    #[test]
    fn a_copy_arrives_whole_and_only_later() {
        let len = 3 * PART_BYTES + 17;
        let (device, mapping) = memory(len);
        let buffer = staging(len);
        let bytes = Pattern::new(3).bytes(len);
        buffer.span(0, len).copy_from(&bytes);
        device.hold();
        let (tell, told) = std::sync::mpsc::channel();
        let done = Box::new(move |r: io::Result<()>| tell.send(r.is_ok()).expect("awaited"));
        let (first, rest) = (piece(len as u64 - 100, 100), piece(0, len - 100));
        let host = buffer.span(0, len);
        device.start(Direction::In, &[first, rest], host, done);
        assert_eq!(device.pending(), 1);
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err());
        device.release();
        assert!(told.recv().expect("the copy ends"));
        let mut arrived = vec![0; len];
        mapping.span(0, len).copy_to(&mut arrived);
        assert!(arrived == [&bytes[100..], &bytes[..100]].concat());
        assert!(device.misuse().is_empty());
    }

    #[test]
    fn misuse_is_recorded() {
        let (device, _mapping) = memory(1000);
        let buffer = staging(1000);
        device.hold();
        let start = |way, offset, at: usize, len: usize| {
            let (pieces, host) = ([piece(offset, len)], buffer.span(at, len));
            device.start(way, &pieces, host, Box::new(drop));
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
