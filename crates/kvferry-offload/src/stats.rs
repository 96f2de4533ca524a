//! Counters of a driver.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of a driver since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks that were copied from the engine's pages to secondary.
    pub offloaded: u64,
    /// Blocks that were copied from secondary to the engine's pages, parts of blocks among them.
    pub onboarded: u64,
    /// Parts of blocks that were copied within the engine's pages.
    pub copied: u64,
    /// Copies that failed.
    pub failed: u64,
    /// Bytes of all copies that were made.
    pub bytes: u64,
    /// Offloads of these that found their block in the block store.
    pub present: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) offloaded: AtomicU64,
    pub(crate) onboarded: AtomicU64,
    pub(crate) copied: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) bytes: AtomicU64,
    pub(crate) present: AtomicU64,
}

impl Counters {
    pub(crate) fn read(&self) -> Stats {
        Stats {
            offloaded: self.offloaded.load(Relaxed),
            onboarded: self.onboarded.load(Relaxed),
            copied: self.copied.load(Relaxed),
            failed: self.failed.load(Relaxed),
            bytes: self.bytes.load(Relaxed),
            present: self.present.load(Relaxed),
        }
    }
}
