//! Memory of KV caches.

use kvferry_sys::sync::RwLock;
use std::fmt;

/// Memory of a KV cache: the engine's, or registered memory of the connector.
///
/// Any thread may read and write at any time. A read that overlaps a write of another thread returns
/// unspecified bytes in the overlap.
pub trait KvMemory: fmt::Debug + Send + Sync {
    /// The length in bytes.
    fn bytes(&self) -> usize;

    /// Copies `out.len()` bytes from offset `at`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    fn read(&self, at: usize, out: &mut [u8]);

    /// Overwrites bytes from offset `at`.
    ///
    /// # Panics
    /// If the range is out of bounds.
    fn write(&self, at: usize, bytes: &[u8]);
}

/// Memory of this process.
pub struct HeapMemory(RwLock<Box<[u8]>>);

impl HeapMemory {
    /// Zeroed memory.
    pub fn new(bytes: usize) -> Self {
        Self(RwLock::new(vec![0; bytes].into_boxed_slice()))
    }
}

impl KvMemory for HeapMemory {
    fn bytes(&self) -> usize {
        self.0.read().len()
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        let bytes = self.0.read();
        out.copy_from_slice(&bytes[at..at + out.len()]);
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let mut memory = self.0.write();
        memory[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl fmt::Debug for HeapMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapMemory").field("bytes", &self.bytes()).finish()
    }
}
