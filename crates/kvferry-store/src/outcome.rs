//! What becomes of the blocks of a put.

/// Result of a put. The counts add up to the blocks that were given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Put {
    /// Stored now. With a tier in host memory, blocks may be there only, until they are written.
    pub stored: usize,
    /// Not stored, because they were there.
    pub present: usize,
    /// Not stored, for one of the reasons below.
    pub refused: usize,
    /// Not stored, because of a device's error.
    pub failed: usize,
    /// Refused because no segment was free.
    pub refused_no_space: usize,
    /// Refused because a stopped process holds a lock of the index, for longer than the put may wait.
    pub refused_contended: usize,
    /// Refused because the index had no room.
    pub refused_index_full: usize,
    /// Refused before the put began: too much waited, the put has waited for too long, or it was cancelled.
    pub refused_waiting: usize,
}

impl Put {
    pub(crate) fn refuse(&mut self, why: Refusal, blocks: usize) {
        self.refused += blocks;
        *match why {
            Refusal::NoSpace => &mut self.refused_no_space,
            Refusal::Contended => &mut self.refused_contended,
            Refusal::IndexFull => &mut self.refused_index_full,
            Refusal::Waiting => &mut self.refused_waiting,
        } += blocks;
    }

    pub(crate) fn note_not_stored(&mut self, why: NotStored, blocks: usize) {
        match why {
            NotStored::Refused(why) => self.refuse(why, blocks),
            NotStored::Failed => self.failed += blocks,
        }
    }

    /// Counts a block that waits in host memory: `left` says why it could not be written, if that was tried.
    pub(crate) fn note_waiting(&mut self, left: Option<NotStored>) {
        match left {
            Some(why) => self.note_not_stored(why, 1),
            None => self.present += 1,
        }
    }
}

/// Reason why blocks were not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotStored {
    Refused(Refusal),
    /// A device failed.
    Failed,
}

/// Reason why blocks were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NoSpace,
    Contended,
    IndexFull,
    Waiting,
}
