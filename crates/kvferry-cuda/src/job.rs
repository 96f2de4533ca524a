//! Copies of contiguous bytes.

use serde::{Deserialize, Serialize};

/// Direction of a copy: memory of the device is read, or written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Direction {
    /// Memory of the device is copied to host memory.
    Out,
    /// Host memory is copied to memory of the device.
    In,
}

/// A copy of contiguous bytes. The kernel reads an array of jobs in this layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Job {
    /// The device's address of the first byte that is read. For host memory, the address at which it is mapped.
    pub src: u64,
    /// The device's address of the first byte that is written.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

impl Job {
    /// Bytes of a job in the kernel's array.
    pub const BYTES: usize = 24;

    /// The job as the kernel reads it.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (word, value) in words.iter_mut().zip([self.src, self.dst, self.len]) {
            *word = value.to_le_bytes();
        }
        bytes
    }

    /// The unit in which the kernel copies the job, but for its first and last bytes.
    pub fn unit(&self) -> Unit {
        match (self.src ^ self.dst) % 16 {
            0 => Unit::Sixteen,
            8 => Unit::Eight,
            4 | 12 => Unit::Four,
            _ => Unit::One,
        }
    }

    /// True if the bytes of both sides are followed by those of `next`.
    pub(crate) fn is_before(&self, next: &Self) -> bool {
        self.src + self.len == next.src && self.dst + self.len == next.dst
    }
}

/// Bytes that one thread of the kernel copies by one instruction. A job has the largest unit, of those up to 16 bytes,
/// that divides the distance of its addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unit {
    /// 1 byte.
    One,
    /// 4 bytes.
    Four,
    /// 8 bytes.
    Eight,
    /// 16 bytes.
    Sixteen,
}

impl Unit {
    /// Times that the kernel needs for a byte, relative to that in units of 16 bytes: as many more instructions.
    pub fn slowdown(self) -> f64 {
        match self {
            Self::One => 16.0,
            Self::Four => 4.0,
            Self::Eight => 2.0,
            Self::Sixteen => 1.0,
        }
    }
}
