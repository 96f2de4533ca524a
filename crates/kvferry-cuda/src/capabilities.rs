//! Methods and limits of the planner.

use crate::job::Job;

/// Methods that a device, its driver and the caller allow, and their limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// The driver has the batch call.
    pub batch: bool,
    /// The kernel, if it is loaded and host memory is mapped.
    pub kernel: Option<KernelLimits>,
    /// Memory of the device through which bytes go out, or come in. Used with the kernel only.
    pub staging: Option<Staging>,
    /// Single copies that the stream may hold, at most: beyond about 1 000, each call takes a hundred times as long.
    pub outstanding_max: u32,
    /// Whether copies that follow each other on both sides become one. Not where neighbours may be two allocations: the
    /// driver refuses a copy across them.
    pub merges: bool,
}

/// Limits of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelLimits {
    /// Jobs of one launch, at most: 128 to 2^24.
    pub jobs_max: u32,
    /// Bytes of one job, at most: a multiple of 128. Longer copies are divided, so that several warps share one.
    pub slice_bytes: u64,
}

/// A buffer in the device's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Staging {
    /// Its first byte, at a multiple of 128.
    pub address: u64,
    /// Bytes, at least 4096.
    pub bytes: u64,
}

/// What lengths and addresses of a kernel's jobs are cut at: a cache line of the device.
pub(crate) const LINE: u64 = 128;

/// Slices that a copy is divided into, at most. The kernel does not copy what is longer.
pub(crate) const SLICES_MAX: u64 = 64;

impl Capabilities {
    /// The copy engine with the batch call, nothing else.
    pub const ENGINE: Self =
        Self { batch: true, kernel: None, staging: None, outstanding_max: 512, merges: true };

    /// The first limit that is out of range, in words.
    pub(crate) fn fault(&self) -> Option<&'static str> {
        let staging_is_aligned = |s: Staging| s.address.is_multiple_of(LINE) && s.bytes >= 4096;
        if self.outstanding_max == 0 {
            return Some("no copy may be outstanding");
        }
        if !self
            .kernel
            .is_none_or(|kernel| (128..=KernelLimits::JOBS_MAX).contains(&kernel.jobs_max))
        {
            return Some("a launch has fewer than 128 jobs, or more than 16777216");
        }
        if !self.kernel.is_none_or(KernelLimits::has_whole_slices) {
            return Some("a kernel's slice is no multiple of 128 bytes, or more than 1 GiB");
        }
        if !self.staging.is_none_or(staging_is_aligned) {
            return Some("the device's staging is not at a multiple of 128, or below 4096 bytes");
        }
        let wraps = self.staging.is_some_and(|s| s.address.checked_add(s.bytes).is_none());
        wraps.then_some("the device's staging ends beyond the last address")
    }
}

impl KernelLimits {
    /// The largest number of jobs of a launch. The kernel counts further in 32 bits.
    const JOBS_MAX: u32 = 1 << 24;

    /// The largest slice, so that no product of slices overflows.
    const SLICE_BYTES_MAX: u64 = 1 << 30;

    fn has_whole_slices(self) -> bool {
        self.slice_bytes.is_multiple_of(LINE)
            && (1..=Self::SLICE_BYTES_MAX).contains(&self.slice_bytes)
    }

    /// Adds the jobs into which a copy is divided for the kernel. All but the last end at a line of 128 bytes.
    ///
    /// # Panics
    /// If a slice has fewer than 128 bytes.
    pub fn divide(&self, job: &Job, jobs: &mut Vec<Job>) {
        assert!(self.slice_bytes >= LINE, "a slice has whole lines");
        let Job { mut src, mut dst, mut len } = *job;
        while len > self.slice_bytes {
            let part = self.slice_bytes - dst % LINE;
            jobs.push(Job { src, dst, len: part });
            (src, dst, len) = (src + part, dst + part, len - part);
        }
        jobs.push(Job { src, dst, len });
    }

    /// True if the kernel copies jobs of so many bytes.
    pub(crate) fn takes(&self, bytes: u64) -> bool {
        bytes <= self.slice_bytes * SLICES_MAX
    }

    /// Jobs of a copy of `len` bytes, which it takes, to an address. They end at lines.
    pub(crate) fn slices(&self, dst: u64, len: u64) -> u64 {
        if len <= self.slice_bytes { 1 } else { (dst % LINE + len).div_ceil(self.slice_bytes) }
    }
}
