//! The conformance suite for stock Mooncake's protocol, between two agents.

use kvferry_testkit::{AgentFabric, Effort};

fn fabric() -> AgentFabric {
    kvferry_mooncake::link();
    AgentFabric {
        settings: &[("mooncake", "true")],
        has_sessions: false,
        effort: Effort::Brief,
        ..AgentFabric::new("mooncake")
    }
}

// Mooncake's protocol needs addresses, and device memory has none.
kvferry_testkit::conformance!(mooncake, fabric(), host: Host);
