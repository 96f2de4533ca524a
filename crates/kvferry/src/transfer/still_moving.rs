//! Copies, reads and writes that use a share's memory after the share has ended.

use crate::memory::gate::Gate;
use crate::sync::{Arc, Weak};
use crate::transfer::lanes::Lane;

/// Copies of devices, and reads and writes of files, that a share has given up: they use the memory of its transfer until
/// they end.
#[derive(Debug, Default)]
pub struct StillMoving {
    /// Counts the copies.
    gate: Option<Arc<Gate>>,
    /// Alive while an operation on a file is.
    operations: Option<Weak<()>>,
}

impl StillMoving {
    /// The copies that this gate counts.
    pub(crate) fn copies(gate: &Arc<Gate>) -> Self {
        Self { gate: Some(Arc::clone(gate)), operations: None }
    }

    /// The copies that this gate counts, and the operations that hold this value.
    pub(crate) fn new(gate: &Arc<Gate>, operations: &Arc<()>) -> Self {
        Self { operations: Some(Arc::downgrade(operations)), ..Self::copies(gate) }
    }

    /// The same, with the copies of a share's lane.
    pub(crate) fn with_lane(self, lane: Option<&Arc<Lane>>) -> Self {
        let gate = lane.map(|lane| Arc::clone(&lane.gate));
        Self { gate: gate.or(self.gate), ..self }
    }

    /// True if all have ended.
    pub(crate) fn is_over(&self) -> bool {
        let has_operations = self.operations.as_ref().is_some_and(|it| it.strong_count() > 0);
        !has_operations && self.gate.as_ref().is_none_or(|gate| gate.is_quiet())
    }
}
