//! The conformance suite for every transport: one line per transport and setting.

use kvferry::Checksum;
use kvferry_testkit::AgentFabric;

kvferry_testkit::conformance!(tcp, AgentFabric::new("tcp"));
kvferry_testkit::conformance!(
    tcp_checksummed,
    AgentFabric::new("tcp").brief().checksum(Checksum::On)
);
kvferry_testkit::conformance!(
    tcp_with_a_secret_and_one_thread,
    AgentFabric::new("tcp").brief().streams(3).io_threads(1).secret("one")
);
// `local` can't reach device memory: it goes over tcp.
kvferry_testkit::conformance!(local, AgentFabric::new("local,tcp"));
// Mooncake's protocol needs addresses, and device memory has none.
kvferry_testkit::conformance!(mooncake, AgentFabric::new("mooncake").brief(), host: Host);
