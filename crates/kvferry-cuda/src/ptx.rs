//! The kernel that copies jobs, as text for the driver's compiler.
//!
//! Its entry takes the address of an array of [`Job`](crate::Job)s, in the layout of
//! [`Job::to_bytes`](crate::Job::to_bytes) at a multiple of 8, and their number, a `u32`. It needs a device of compute
//! capability 7.0 or more, and a driver of CUDA 11.0 or later. It uses no shared memory.

/// The entry of [`TEXT`].
pub const ENTRY: &str = "kvferry_copy";

/// The entry of [`text_of_constant_sources`].
pub const ENTRY_OF_CONSTANT_SOURCES: &str = "kvferry_copy_nc";

/// The kernel.
pub const TEXT: &str = include_str!("copy.ptx");

/// Threads of a block: eight warps.
pub const THREADS: u32 = 256;

/// The kernel for sources, and an array of jobs, that nothing writes while it runs: it may read them through the cache
/// for constant data. Not for copies whose destination may be a source.
pub fn text_of_constant_sources() -> String {
    TEXT.replace(ENTRY, ENTRY_OF_CONSTANT_SOURCES).replace("ld.global.", "ld.global.nc.")
}

/// Blocks of a launch that copies so many jobs: one warp for each, but not more than `blocks_max` blocks.
pub fn blocks(jobs: u32, blocks_max: u32) -> u32 {
    jobs.div_ceil(THREADS / 32).clamp(1, blocks_max.max(1))
}
