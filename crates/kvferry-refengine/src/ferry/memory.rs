//! KV caches in memory that peers may read.

use crate::memory::KvMemory;
use kvferry::Region;

/// Memory that an agent allocated.
#[derive(Debug)]
pub struct RegionMemory(Region);

impl RegionMemory {
    /// The memory of a region that [`kvferry::Agent::allocate`] made.
    pub const fn new(region: Region) -> Self {
        Self(region)
    }
}

impl KvMemory for RegionMemory {
    fn bytes(&self) -> usize {
        self.0.len()
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.0.read_at(at, out).expect("it lies within");
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.0.write_at(at, bytes).expect("it lies within");
    }
}
