//! The stream ids that were used in a session. Each may open one stream.

use crate::id::StreamId;

/// Ids less than this below the highest one are tracked; lower ones count as used.
const WINDOW: usize = 1024;
const WORD: usize = u64::BITS as usize;

/// A sliding window over the ids of a session, as for replay protection in packet protocols. The
/// initiator counts up, connections may arrive out of order, and the memory is fixed.
#[derive(Clone, Debug)]
pub(super) struct StreamWindow {
    /// The highest id seen, plus one.
    end: u64,
    /// Bit `id % WINDOW` of each id in `end - WINDOW..end`: used.
    used: [u64; WINDOW / WORD],
}

impl StreamWindow {
    pub(super) const fn new() -> Self {
        Self { end: 0, used: [0; WINDOW / WORD] }
    }

    /// Marks `stream` used; `false` if it was used before, or is too old to tell.
    pub(super) fn use_up(&mut self, stream: StreamId) -> bool {
        let id = u64::from(stream.0);
        if id >= self.end {
            // The skipped ids and this one replace ids that leave the window.
            for fresh in self.end.max((id + 1).saturating_sub(WINDOW as u64))..=id {
                self.set(fresh, false);
            }
            self.end = id + 1;
        } else if id + (WINDOW as u64) < self.end || self.is_set(id) {
            return false;
        }
        self.set(id, true);
        true
    }

    fn is_set(&self, id: u64) -> bool {
        let (word, bit) = Self::place(id);
        self.used[word] & bit != 0
    }

    fn set(&mut self, id: u64, used: bool) {
        let (word, bit) = Self::place(id);
        if used {
            self.used[word] |= bit;
        } else {
            self.used[word] &= !bit;
        }
    }

    const fn place(id: u64) -> (usize, u64) {
        let slot = (id % WINDOW as u64) as usize;
        (slot / WORD, 1 << (slot % WORD))
    }
}
