//! Due times of handoffs.

use super::HandoffId;
use crate::time::Timestamp;
use std::collections::BTreeSet;

/// Due times, at most one per handoff, in ascending order.
#[derive(Debug, Default)]
pub(super) struct Schedule(BTreeSet<(Timestamp, HandoffId)>);

impl Schedule {
    /// Moves `id` from one due time to another; `None` is never.
    pub(super) fn set(
        &mut self,
        id: &HandoffId,
        due: &mut Option<Timestamp>,
        to: Option<Timestamp>,
    ) {
        if *due == to {
            return;
        }
        if let Some(at) = due.take() {
            self.0.remove(&(at, id.clone()));
        }
        if let Some(at) = to {
            self.0.insert((at, id.clone()));
        }
        *due = to;
    }

    /// The earliest due time.
    pub(super) fn next(&self) -> Option<Timestamp> {
        self.0.first().map(|(at, _)| *at)
    }

    /// Removes and returns the handoff with the earliest due time, if that has passed.
    pub(super) fn pop(&mut self, now: Timestamp) -> Option<HandoffId> {
        if self.next()? > now {
            return None;
        }
        self.0.pop_first().map(|(_, id)| id)
    }
}
