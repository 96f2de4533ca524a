//! The ids of asynchronous transfers.
//!
//! Mooncake's ids are addresses of its batches, and a stale one corrupts memory. These ids are
//! numbers, unique in the process across engines; an id that is not in the table is an error.

use kvferry::Transfer;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// The most transfers whose outcome was not asked for. More calls fail until the caller asks for the
/// outcome of some.
const UNCLAIMED_MAX: usize = 65_536;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Transfers whose outcome was not asked for yet, by id.
#[derive(Debug, Default)]
pub(crate) struct Handles(HashMap<u64, Transfer>);

impl Handles {
    /// Adds a transfer and returns its id, or the transfer if the table is full.
    pub(crate) fn add(&mut self, transfer: Transfer) -> Result<u64, Transfer> {
        if self.is_full() {
            return Err(transfer);
        }
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        self.0.insert(id, transfer);
        Ok(id)
    }

    pub(crate) fn is_full(&self) -> bool {
        self.0.len() >= UNCLAIMED_MAX
    }

    pub(crate) fn get(&self, id: u64) -> Option<&Transfer> {
        self.0.get(&id)
    }

    pub(crate) fn take(&mut self, id: u64) -> Option<Transfer> {
        self.0.remove(&id)
    }

    /// Undoes `take`.
    pub(crate) fn put_back(&mut self, id: u64, transfer: Transfer) {
        self.0.insert(id, transfer);
    }
}
