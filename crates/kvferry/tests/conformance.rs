//! Every transport keeps every promise: one line per transport and setting.

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
// Device memory is out of reach within the host: it goes over tcp.
kvferry_testkit::conformance!(local, AgentFabric::new("local,tcp"));
// Its protocol reaches addresses, and device memory has none.
kvferry_testkit::conformance!(mooncake, AgentFabric::new("mooncake").brief(), host: Host);
