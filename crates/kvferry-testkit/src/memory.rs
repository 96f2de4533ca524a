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
use kvferry::DeviceMemory;
use kvferry_sys::HostSpan;
use kvferry_sys::map::Mapping;
use kvferry_sys::sync::{Mutex, MutexGuard};
use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};

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
    /// The same with addresses of this process, as a GPU's memory has them.
    Addressed,
    /// The same with an error that the suite must notice.
    Broken(DeviceFault),
    /// Memory of a device that the test program provides ([`provide`]). It can't be held or made to fail.
    Provided,
}

/// Memory of a device, as the test that provides it sees the bytes.
pub trait ProvidedMemory: Send + Sync {
    /// Reads the bytes from `at` on.
    fn load(&self, at: usize, bytes: &mut [u8]);

    /// Writes bytes from `at` on.
    fn store(&self, at: usize, bytes: &[u8]);

    /// `len` bytes from `at` on, to be registered.
    fn memory(&self, at: usize, len: usize) -> DeviceMemory;

    /// The address of the byte at `at`, if [`ProvidedMemory::memory`] has addresses of this process.
    fn address(&self, at: usize) -> Option<u64>;

    /// Errors of the users of the device since it was made.
    fn misuse(&self) -> Vec<String>;
}

/// Makes memory of so many bytes.
type MakeMemory = fn(usize) -> Arc<dyn ProvidedMemory>;

static PROVIDED: OnceLock<MakeMemory> = OnceLock::new();

/// Has [`MemoryKind::Provided`] stand for memory that `make` makes, in this process.
pub fn provide(make: MakeMemory) {
    PROVIDED.get_or_init(|| make);
}

impl MemoryKind {
    /// The kinds that every fabric has.
    pub const ALL: [Self; 2] = [Self::Host, Self::Slow];
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Host => "host",
            Self::Slow => "slow",
            Self::Addressed => "addressed",
            Self::Broken(_) => "broken",
            Self::Provided => "provided",
        })
    }
}

/// Guarded memory with a model of what it should hold. Clones are the same memory.
#[derive(Clone)]
pub struct Memory(Arc<Inner>);

struct Inner {
    bytes: Bytes,
    len: usize,
    device: Option<SlowMemory>,
    expected: Mutex<Vec<u8>>,
}

/// The bytes under test, and the guards around them.
enum Bytes {
    Mapped(Arc<Mapping>),
    Provided(Arc<dyn ProvidedMemory>),
}

impl Bytes {
    fn load(&self, at: usize, bytes: &mut [u8]) {
        match self {
            Self::Mapped(mapping) => mapping.span(at, bytes.len()).copy_to(bytes),
            Self::Provided(memory) => memory.load(at, bytes),
        }
    }

    fn store(&self, at: usize, bytes: &[u8]) {
        match self {
            Self::Mapped(mapping) => mapping.span(at, bytes.len()).copy_from(bytes),
            Self::Provided(memory) => memory.store(at, bytes),
        }
    }
}

impl Memory {
    /// `len` bytes of a kind, holding a fresh pattern.
    pub fn new(kind: MemoryKind, len: usize) -> Self {
        let whole = len + 2 * GUARD_BYTES;
        let mapped = || Arc::new(Mapping::anonymous(whole).expect("the machine has memory"));
        let slow = |fault| {
            let mapping = mapped();
            let device =
                SlowMemory::with_fault(Arc::clone(&mapping), GUARD_BYTES, len, len as u64, fault);
            (Bytes::Mapped(mapping), device)
        };
        let addressed = |fault| {
            let (bytes, device) = slow(fault);
            (bytes, Some(device.with_addresses()))
        };
        let (bytes, device) = match kind {
            MemoryKind::Host => (Bytes::Mapped(mapped()), None),
            MemoryKind::Slow => {
                let (bytes, device) = slow(None);
                (bytes, Some(device))
            }
            MemoryKind::Addressed => addressed(None),
            MemoryKind::Broken(fault) => addressed(Some(fault)),
            MemoryKind::Provided => {
                let make = PROVIDED.get().expect("the test program provides memory");
                (Bytes::Provided(make(whole)), None)
            }
        };
        let guard = GUARD.bytes(GUARD_BYTES);
        bytes.store(0, &guard);
        bytes.store(GUARD_BYTES + len, &guard);
        let memory = Self(Arc::new(Inner { bytes, len, device, expected: Mutex::new(Vec::new()) }));
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

    /// The kind of memory; a device with addresses or with an error is slow memory, too.
    pub fn kind(&self) -> MemoryKind {
        match &self.0.bytes {
            Bytes::Provided(_) => MemoryKind::Provided,
            Bytes::Mapped(_) if self.0.device.is_some() => MemoryKind::Slow,
            Bytes::Mapped(_) => MemoryKind::Host,
        }
    }

    /// The device behind slow memory.
    pub fn device(&self) -> Option<&SlowMemory> {
        self.0.device.as_ref()
    }

    /// What is registered of memory of a device; `None` for host memory.
    pub fn device_memory(&self) -> Option<DeviceMemory> {
        match &self.0.bytes {
            Bytes::Provided(memory) => Some(memory.memory(GUARD_BYTES, self.len())),
            Bytes::Mapped(_) => self.device().map(SlowMemory::memory),
        }
    }

    /// The address of offset 0 by which callers name the memory, if it has addresses of this process.
    pub fn address(&self) -> Option<u64> {
        match (&self.0.bytes, &self.0.device) {
            (_, Some(device)) => device.address(),
            (Bytes::Provided(memory), None) => memory.address(GUARD_BYTES),
            (Bytes::Mapped(_), None) => Some(self.as_ptr().expose_provenance() as u64),
        }
    }

    /// The start of the bytes of offset 0. Slow memory must not be accessed through it.
    pub fn as_ptr(&self) -> *mut u8 {
        self.span(0, self.len()).as_ptr()
    }

    /// A span of the memory, for a transport's raw access.
    ///
    /// # Panics
    /// If the memory is provided: it has no address in this process.
    pub fn span(&self, offset: usize, len: usize) -> HostSpan {
        self.assert_inside(offset, len);
        match &self.0.bytes {
            Bytes::Mapped(mapping) => mapping.span(GUARD_BYTES + offset, len),
            Bytes::Provided(_) => panic!("provided memory has no address in this process"),
        }
    }

    fn expected(&self) -> MutexGuard<'_, Vec<u8>> {
        self.0.expected.lock()
    }

    /// Reads `len` bytes of the memory at `offset`.
    pub fn load(&self, offset: usize, len: usize) -> Vec<u8> {
        self.assert_inside(offset, len);
        let mut bytes = vec![0; len];
        self.0.bytes.load(GUARD_BYTES + offset, &mut bytes);
        bytes
    }

    fn assert_inside(&self, offset: usize, len: usize) {
        assert!(offset <= self.len() && len <= self.len() - offset, "outside the memory");
    }

    /// Writes as the owner of the memory; the model expects the bytes from here on.
    pub fn store(&self, offset: usize, bytes: &[u8]) {
        self.assert_inside(offset, bytes.len());
        self.0.bytes.store(GUARD_BYTES + offset, bytes);
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
        self.0.bytes.store(GUARD_BYTES, &content);
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
            self.0.bytes.load(GUARD_BYTES + at, piece);
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
            self.0.bytes.load(at, &mut guard);
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
        let misuse = match &self.0.bytes {
            Bytes::Provided(memory) => memory.misuse(),
            Bytes::Mapped(_) => self.device().map(SlowMemory::misuse).unwrap_or_default(),
        };
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
        let whole = self.len() + 2 * GUARD_BYTES;
        let at = GUARD_BYTES.saturating_add_signed(offset).min(whole);
        let mut bytes = vec![0; buffer.len().min(whole - at)];
        match direction {
            Direction::Out => {
                self.0.bytes.load(at, &mut bytes);
                buffer.copy_from(&bytes);
            }
            Direction::In => {
                buffer.truncated(bytes.len()).copy_to(&mut bytes);
                self.0.bytes.store(at, &bytes);
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({}, {} bytes)", self.kind(), self.len())
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
