//! The bytes that KV caches lie in.

use std::fmt;
use std::sync::{PoisonError, RwLock};

/// Memory of a KV cache: that of the engine, or registered memory of whoever moves the bytes.
///
/// Any thread may read and write at any time. What a read sees that overlaps a write of another
/// thread is unspecified, byte by byte; nothing else is.
pub trait KvMemory: fmt::Debug + Send + Sync {
    /// How many bytes there are.
    fn bytes(&self) -> usize;

    /// Copies `out.len()` bytes that begin at `at`.
    ///
    /// # Panics
    /// If they do not lie within.
    fn read(&self, at: usize, out: &mut [u8]);

    /// Overwrites what begins at `at`.
    ///
    /// # Panics
    /// If it does not lie within.
    fn write(&self, at: usize, bytes: &[u8]);
}

/// Memory of this process.
pub struct HeapMemory(RwLock<Box<[u8]>>);

impl HeapMemory {
    /// So many bytes, all zero.
    pub fn new(bytes: usize) -> Self {
        Self(RwLock::new(vec![0; bytes].into_boxed_slice()))
    }
}

impl KvMemory for HeapMemory {
    fn bytes(&self) -> usize {
        self.0.read().unwrap_or_else(PoisonError::into_inner).len()
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        let bytes = self.0.read().unwrap_or_else(PoisonError::into_inner);
        out.copy_from_slice(&bytes[at..at + out.len()]);
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        let mut memory = self.0.write().unwrap_or_else(PoisonError::into_inner);
        memory[at..at + bytes.len()].copy_from_slice(bytes);
    }
}

impl fmt::Debug for HeapMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HeapMemory").field("bytes", &self.bytes()).finish()
    }
}
