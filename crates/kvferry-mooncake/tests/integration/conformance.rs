//! The conformance suite for stock Mooncake's protocol, between two agents.

use kvferry_testkit::slow::DeviceFault;
use kvferry_testkit::{AgentFabric, Effort, Fabric};
use std::sync::Arc;

fn fabric() -> AgentFabric {
    kvferry_mooncake::link();
    AgentFabric {
        settings: &[("mooncake", "true")],
        has_sessions: false,
        effort: Effort::Brief,
        ..AgentFabric::new("mooncake")
    }
}

// Mooncake's protocol names memory by its address.
kvferry_testkit::conformance!(mooncake, fabric(), host: Host, addressed: Addressed);

#[test]
fn every_fault_of_a_device_is_caught_by_the_promise_it_breaks() {
    let fabric: Arc<dyn Fabric> = Arc::new(fabric());
    for fault in DeviceFault::ALL {
        println!("{fault:?}: {}", fault.found_in(&fabric));
    }
}
