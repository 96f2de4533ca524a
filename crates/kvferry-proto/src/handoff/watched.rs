//! Peers that something waits for, and whose heartbeat must run.

use super::PeerId;
use std::collections::HashMap;

/// The number of handoffs, or tasks, of each peer.
#[derive(Debug, Default)]
pub(crate) struct Watched(HashMap<PeerId, usize>);

impl Watched {
    /// Adds one. Returns whether it is the first.
    pub(crate) fn add(&mut self, peer: PeerId) -> bool {
        let count = self.0.entry(peer).or_default();
        *count += 1;
        *count == 1
    }

    /// Whether there is one.
    pub(crate) fn contains(&self, peer: PeerId) -> bool {
        self.0.contains_key(&peer)
    }

    /// Removes one. Returns whether it was the last.
    pub(crate) fn remove(&mut self, peer: PeerId) -> bool {
        let count = self.0.get_mut(&peer).expect("it was added");
        *count -= 1;
        if *count == 0 {
            self.0.remove(&peer);
            return true;
        }
        false
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
