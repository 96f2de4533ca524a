//! Errors that a device could have.

use crate::fabric::Fabric;
use crate::memory::MemoryKind;
use crate::suite::Scenario;
use crate::watchdog::PATIENCE;
use std::sync::Arc;

/// An error that a device could have. The conformance suite must notice each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DeviceFault {
    /// Completes a copy before its last part, which it copies when the next copy starts.
    EarlyCompletion,
    /// Leaves out one part of a copy that has several.
    LostPiece,
    /// Copies pieces from the device to the stage in the reverse order.
    ReversedPieces,
}

impl DeviceFault {
    /// Every fault.
    pub const ALL: [Self; 3] = [Self::EarlyCompletion, Self::LostPiece, Self::ReversedPieces];

    /// The name of the scenario that must find it.
    pub const fn breaks(self) -> &'static str {
        match self {
            Self::EarlyCompletion => "done_means_all_bytes_are_there",
            Self::LostPiece | Self::ReversedPieces => "scattered_blocks_land_where_they_were_aimed",
        }
    }

    /// What the suite finds wrong with memory of a device with the fault, on a fabric.
    ///
    /// # Panics
    /// If it finds no wrong byte: a transfer that fails or does not end may have other reasons.
    pub fn found_in(self, fabric: &Arc<dyn Fabric>) -> String {
        let scenario = Scenario::named(self.breaks()).expect("a fault names a scenario");
        let found = scenario.run_within(fabric, MemoryKind::Broken(self), PATIENCE);
        let name = fabric.name();
        let Err(violation) = found else { panic!("{self:?} is not noticed: {name}") };
        let violation = violation.to_string();
        assert!(violation.contains(" should be 0x"), "{self:?}, {name}: {violation}");
        violation
    }
}
