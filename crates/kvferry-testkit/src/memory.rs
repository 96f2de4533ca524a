//! Memory with a model of what it should hold.
//!
//! ```text
//! mapping  | guard, poisoned | the bytes under test ........ | guard, poisoned |
//!                            ^ offset 0                      ^ len
//! expected                   | what they should be ......... |
//! ```
//!
//! A test changes memory through [`Memory::refill`], [`Memory::mark`] or [`Memory::store`], or lets a
//! transport do it and updates the model with [`Memory::expect_copy`]. [`Memory::check`] compares
//! every byte, the guards included. The bytes are only copied, never borrowed: a transport may
//! write them at any time.

use crate::pattern::{MARKER, Pattern};
use crate::slow::{DeviceFault, Direction, SlowMemory};
use crate::violation::{Violation, ensure};
use kvferry_sys::HostSpan;
use kvferry_sys::map::Mapping;
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::fmt;
use std::io;
use std::sync::Arc;

/// Poisoned bytes before and after the memory.
pub const GUARD_BYTES: usize = 8192;

const GUARD: Pattern = Pattern::new(0x6061_7264);

/// The kind of memory that a scenario runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Plain host memory.
    Host,
    /// Memory that behaves like a device ([`SlowMemory`]).
    Slow,
    /// The same, with an error that the suite must notice.
    Broken(DeviceFault),
}

impl MemoryKind {
    /// Every kind that keeps its promises.
    pub const ALL: [Self; 2] = [Self::Host, Self::Slow];
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Slow => "slow",
            Self::Broken(_) => "broken",
        })
    }
}

/// Guarded memory with a model of what it should hold. Clones are the same memory.
#[derive(Clone)]
pub struct Memory(Arc<Inner>);

struct Inner {
    mapping: Arc<Mapping>,
    len: usize,
    device: Option<SlowMemory>,
    expected: Mutex<Vec<u8>>,
}

impl Memory {
    /// `len` bytes of a kind, holding a fresh pattern.
    pub fn new(kind: MemoryKind, len: usize) -> Self {
        let mapping =
            Arc::new(Mapping::anonymous(len + 2 * GUARD_BYTES).expect("the machine has memory"));
        let guard = GUARD.bytes(GUARD_BYTES);
        mapping.span(0, GUARD_BYTES).copy_from(&guard);
        mapping.span(GUARD_BYTES + len, GUARD_BYTES).copy_from(&guard);
        let slow = |fault| {
            SlowMemory::with_fault(Arc::clone(&mapping), GUARD_BYTES, len, len as u64, fault)
        };
        let device = match kind {
            MemoryKind::Host => None,
            MemoryKind::Slow => Some(slow(None)),
            MemoryKind::Broken(fault) => Some(slow(Some(fault))),
        };
        let memory =
            Self(Arc::new(Inner { mapping, len, device, expected: Mutex::new(Vec::new()) }));
        memory.refill();
        memory
    }

    /// Bytes under test.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// The kind of memory; a device with an error is slow memory, too.
    pub fn kind(&self) -> MemoryKind {
        if self.0.device.is_some() { MemoryKind::Slow } else { MemoryKind::Host }
    }

    /// The device behind slow memory.
    pub fn device(&self) -> Option<&SlowMemory> {
        self.0.device.as_ref()
    }

    /// The address of offset 0. Slow memory must not be accessed through it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.span(0, self.len()).as_ptr()
    }

    /// A span of the memory, for a transport's raw access.
    pub fn span(&self, offset: usize, len: usize) -> HostSpan {
        assert!(offset <= self.len() && len <= self.len() - offset, "outside the memory");
        self.0.mapping.span(GUARD_BYTES + offset, len)
    }

    fn expected(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.expected.lock()
    }

    /// Reads `len` bytes of the memory at `offset`.
    pub fn load(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.span(offset, len).copy_to(&mut bytes);
        bytes
    }

    /// Writes as the owner of the memory; the model expects the bytes from here on.
    pub fn store(&self, offset: usize, bytes: &[u8]) {
        self.span(offset, bytes.len()).copy_from(bytes);
        self.expected()[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Fills the memory with a fresh pattern, which the model expects from here on.
    pub fn refill(&self) {
        self.fill_with(Pattern::fresh().bytes(self.len()));
    }

    /// Fills the memory with [`MARKER`], which the model expects from here on.
    pub fn mark(&self) {
        self.fill_with(vec![MARKER; self.len()]);
    }

    fn fill_with(&self, content: Vec<u8>) {
        self.span(0, self.len()).copy_from(&content);
        *self.expected() = content;
    }

    /// Makes the model expect the current content: for outcomes after which any part may have
    /// arrived.
    pub fn accept(&self) {
        *self.expected() = self.load(0, self.len());
    }

    /// Makes the model expect the current content of a range.
    pub fn accept_range(&self, offset: usize, len: usize) {
        let now = self.load(offset, len);
        self.expected()[offset..offset + len].copy_from_slice(&now);
    }

    /// Whether any byte is [`MARKER`].
    pub fn holds_marker(&self) -> bool {
        self.load(0, self.len()).contains(&MARKER)
    }

    /// Copies `len` bytes from the model of `source` to this model.
    pub fn expect_copy(&self, offset: usize, source: &Self, source_offset: usize, len: usize) {
        if Arc::ptr_eq(&self.0, &source.0) {
            self.expected().copy_within(source_offset..source_offset + len, offset);
            return;
        }
        let source = source.expected();
        self.expected()[offset..offset + len]
            .copy_from_slice(&source[source_offset..source_offset + len]);
    }

    /// Compares every byte, guards included, with the model.
    pub fn check(&self, what: &str) -> Result<(), Violation> {
        let expected = self.expected();
        let mut piece = vec![0; (256 * 1024).min(self.len().max(1))];
        for at in (0..self.len()).step_by(piece.len()) {
            let piece_len = piece.len().min(self.len() - at);
            let piece = &mut piece[..piece_len];
            self.span(at, piece.len()).copy_to(piece);
            let wanted = &expected[at..at + piece.len()];
            if piece != wanted {
                let differ = piece.iter().zip(wanted).filter(|(a, b)| a != b).count();
                let first = piece.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(0);
                return Err(Violation::new(format!(
                    "{what}: byte {} of {} is {:#04x}, should be {:#04x} ({differ} of the {} \
                     bytes from {at} on differ)",
                    at + first,
                    self.len(),
                    piece[first],
                    wanted[first],
                    piece.len(),
                )));
            }
        }
        drop(expected);
        self.check_guards(what)
    }

    /// Compares the guards with what they were filled with.
    pub fn check_guards(&self, what: &str) -> Result<(), Violation> {
        let wanted = GUARD.bytes(GUARD_BYTES);
        let mut guard = vec![0; GUARD_BYTES];
        for (side, at) in [("before", 0), ("after", GUARD_BYTES + self.len())] {
            self.0.mapping.span(at, GUARD_BYTES).copy_to(&mut guard);
            let differs = guard.iter().zip(&wanted).position(|(a, b)| a != b);
            ensure!(
                differs.is_none(),
                "{what}: the guard {side} the memory was written, first at its byte {differs:?}"
            );
        }
        Ok(())
    }

    /// Checks that slow memory was used as a device allows.
    pub fn check_misuse(&self) -> Result<(), Violation> {
        let misuse = self.device().map(SlowMemory::misuse).unwrap_or_default();
        ensure!(misuse.is_empty(), "the device was misused: {}", misuse.join("; "));
        Ok(())
    }

    /// A copy by a transport: `offset` counts from the memory's start and may reach into the
    /// guards. On slow memory it takes as long as the device needs.
    pub fn transport_copy(
        &self,
        direction: Direction,
        offset: isize,
        buffer: HostSpan,
    ) -> io::Result<()> {
        let inside = usize::try_from(offset)
            .is_ok_and(|at| at.checked_add(buffer.len()).is_some_and(|end| end <= self.len()));
        if let (Some(device), true) = (self.device(), inside) {
            return device.copy_now(direction, offset as u64, buffer);
        }
        let at = GUARD_BYTES.saturating_add_signed(offset).min(self.0.mapping.len());
        let len = buffer.len().min(self.0.mapping.len() - at);
        let mut bytes = vec![0; len];
        let span = self.0.mapping.span(at, len);
        match direction {
            Direction::Out => {
                span.copy_to(&mut bytes);
                buffer.copy_from(&bytes);
            }
            Direction::In => {
                buffer.truncated(len).copy_to(&mut bytes);
                span.copy_from(&bytes);
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({}, {} bytes at {:p})", self.kind(), self.len(), self.as_ptr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_byte_and_a_changed_guard_are_noticed() {
        let memory = Memory::new(MemoryKind::Host, 1000);
        memory.check("untouched").expect("as it was filled");
        let byte = memory.load(999, 1)[0];
        memory.span(999, 1).copy_from(&[byte ^ 1]);
        let violation = memory.check("touched").expect_err("a byte changed");
        assert!(violation.to_string().contains("byte 999"), "{violation}");
        memory.refill();
        let outside = Memory::new(MemoryKind::Host, 1);
        let (value, at) = ([0xFF], isize::try_from(memory.len()).expect("small"));
        outside.store(0, &value);
        memory.transport_copy(Direction::In, at, outside.span(0, 1)).expect("no device");
        assert!(memory.check("guard").is_err());
    }
}
