//! Peers of which something is expected.

use super::PeerId;
use std::collections::HashMap;

/// How many handoffs each peer takes part in.
#[derive(Debug, Default)]
pub(super) struct Watched(HashMap<PeerId, usize>);

impl Watched {
    /// One more; true if it is the first.
    pub(super) fn add(&mut self, peer: PeerId) -> bool {
        let count = self.0.entry(peer).or_default();
        *count += 1;
        *count == 1
    }

    /// One less; true if it was the last.
    pub(super) fn remove(&mut self, peer: PeerId) -> bool {
        let count = self.0.get_mut(&peer).expect("it was added");
        *count -= 1;
        if *count == 0 {
            self.0.remove(&peer);
            return true;
        }
        false
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }
}
