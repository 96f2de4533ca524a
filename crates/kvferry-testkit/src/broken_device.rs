//! The conformance suite on memory of a device with an error.

use crate::fabric::Fabric;
use crate::memory::MemoryKind;
use crate::slow::DeviceFault;
use crate::suite::Scenario;
use crate::watchdog::PATIENCE;
use std::sync::Arc;

impl DeviceFault {
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
