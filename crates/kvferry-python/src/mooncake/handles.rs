//! The ids of asynchronous transfers.
//!
//! Mooncake's ids are addresses of its batches, and a stale one corrupts memory. These are numbers
//! that are never used twice in a process, by no engine; one that is not, or no longer, in the
//! table is simply unknown.

use kvferry::Transfer;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ids that may wait to be asked for. Beyond it the caller has lost track, and gets none until it
/// asks for some.
const UNCLAIMED_MAX: usize = 65_536;

static NEXT: AtomicU64 = AtomicU64::new(1);

/// Transfers that nobody has asked the outcome of yet.
#[derive(Debug, Default)]
pub(crate) struct Handles(HashMap<u64, Transfer>);

impl Handles {
    /// Gives the transfer an id; gives it back if there are too many.
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
