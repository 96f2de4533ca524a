//! The conformance suite for every transport: one line per transport and setting.

use kvferry::Checksum;
use kvferry_testkit::{AgentFabric, Effort, FileFabric};

const BRIEF: AgentFabric = AgentFabric { effort: Effort::Brief, ..AgentFabric::new("tcp") };

kvferry_testkit::conformance!(tcp, AgentFabric::new("tcp"));
kvferry_testkit::conformance!(tcp_checksummed, AgentFabric { checksum: Checksum::On, ..BRIEF });
kvferry_testkit::conformance!(
    tcp_with_a_secret_and_one_thread,
    AgentFabric { streams: Some(3), io_threads: Some(1), secret: Some("one"), ..BRIEF }
);
// `local` can't reach device memory of the peer: such transfers go over tcp.
kvferry_testkit::conformance!(local, AgentFabric::new("local,tcp"));
kvferry_testkit::conformance!(
    local_to_host,
    AgentFabric { far_in_host: true, transports: "local,tcp", ..BRIEF },
    slow: Slow
);
// Memory of a device with addresses of this process, which the CPU must not touch.
kvferry_testkit::conformance!(tcp_by_address, BRIEF, addressed: Addressed);
kvferry_testkit::conformance!(
    local_by_address,
    AgentFabric { transports: "local,tcp", ..BRIEF },
    addressed: Addressed
);
kvferry_testkit::conformance!(file, FileFabric { engine: "auto" });
kvferry_testkit::conformance!(file_posix, FileFabric { engine: "posix" });
