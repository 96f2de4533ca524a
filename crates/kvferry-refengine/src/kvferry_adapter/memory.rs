//! KV caches in regions that peers may read.

use crate::memory::KvMemory;
use kvferry::Region;

/// A region as memory of a KV cache.
#[derive(Debug)]
pub struct RegionMemory(Region);

impl RegionMemory {
    /// `region` is from [`kvferry::Agent::allocate`].
    pub const fn new(region: Region) -> Self {
        Self(region)
    }
}

impl KvMemory for RegionMemory {
    fn bytes(&self) -> usize {
        self.0.len()
    }

    fn read(&self, at: usize, out: &mut [u8]) {
        self.0.read_at(at, out).expect("within the region");
    }

    fn write(&self, at: usize, bytes: &[u8]) {
        self.0.write_at(at, bytes).expect("within the region");
    }
}
