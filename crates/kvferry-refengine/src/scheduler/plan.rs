//! The plan of a step.

use crate::layout::BlockId;
use crate::request::RequestId;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    New,
    Resumed,
    Running,
}

#[derive(Debug)]
pub(super) struct Item {
    pub(super) number: u64,
    pub(super) admission: Admission,
    pub(super) count: usize,
    pub(super) new_blocks: Vec<Vec<BlockId>>,
}

/// The computations and loads of one step.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    pub(super) items: Vec<Item>,
    pub(super) preempted: Vec<RequestId>,
    pub(crate) finished: Vec<RequestId>,
    pub(crate) has_sync_loads: bool,
}

impl Plan {
    pub(crate) fn tokens(&self) -> usize {
        self.items.iter().map(|item| item.count).sum()
    }
}
