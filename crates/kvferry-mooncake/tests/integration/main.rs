//! Stock Mooncake's protocol: the conformance suite between two agents, and the wire.

#![allow(missing_docs, reason = "tests")]

mod conformance;
mod wire;

kvferry_testkit::child_processes!(kvferry_mooncake::link());
