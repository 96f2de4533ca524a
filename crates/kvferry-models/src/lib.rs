//! Oracles for kvferry's decoders and models of its state machines.
//!
//! | module | what it is for |
//! |---|---|
//! | [`decoders`] | one entry per decoder of bytes from a peer, each with an oracle |
//! | [`models`] | one entry per state machine: operations and faults against a simple oracle |
//! | [`engines`] | small engines, for tests of whole engines |
//! | [`pair`] | both ends of a session and the network between them, in virtual time |
//! | [`lane_pair`] | both ends of a lane, their memories and the network between them, in virtual time |
//! | [`lane_ends`] | both ends of a lane and nothing else, to measure |
//! | [`mutate`] | seeded mutations of kept inputs, for a toolchain without a fuzzer |
//!
//! Every entry is a function of bytes that panics on a finding. [`TARGETS`] lists them all: the
//! tests of this crate replay the kept corpus and seeded mutations of it on any toolchain, and
//! `fuzz/` hands the same functions to libFuzzer.
#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]
#![allow(missing_docs, reason = "helpers of tests: documented where a name does not say it")]

pub mod decoders;
pub mod engines;
pub mod lane_ends;
pub mod lane_pair;
pub mod models;
pub mod mutate;
pub mod pair;

#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Name of the target in `fuzz/fuzz_targets` and `fuzz/corpus`.
    pub name: &'static str,
    /// Panics on a finding.
    pub run: fn(&[u8]),
    /// The first inputs: what an honest peer sends.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Seeded mutations in a run of the tests; fewer for targets whose runs take longer.
    pub mutations: u32,
}

macro_rules! targets {
    ($($name:ident: $run:expr, $seeds:expr, $mutations:literal;)*) => {
        /// Every target there is.
        pub const TARGETS: &[Target] = &[$(Target {
            name: stringify!($name),
            run: $run,
            seeds: $seeds,
            mutations: $mutations,
        }),*];
    };
}

targets! {
    request: decoders::frames::request, decoders::frames::request_seeds, 200_000;
    response: decoders::frames::response, decoders::frames::response_seeds, 200_000;
    checksums: decoders::frames::checksums, decoders::frames::checksums_seeds, 300;
    notification: decoders::frames::notification, decoders::frames::notification_seeds, 100_000;
    message: decoders::messages::message, decoders::messages::message_seeds, 60_000;
    handoff_message: decoders::handoff::message, decoders::handoff::message_seeds, 60_000;
    engine_handshake_message: decoders::engine_handshake::message, decoders::engine_handshake::message_seeds, 40_000;
    layouts: decoders::layouts::layouts, decoders::layouts::seeds, 40_000;
    maps: decoders::layouts::maps, models::random_seeds, 20_000;
    topologies: decoders::topologies::topologies, decoders::layouts::engine_seeds, 40_000;
    routings: decoders::topologies::routings, models::random_seeds, 8_000;
    opening: decoders::messages::opening, decoders::messages::opening_seeds, 40_000;
    session_bytes: decoders::session::bytes, decoders::session::seeds, 20_000;
    session_model: |bytes| models::session::MODEL.fuzz(bytes), models::session::seeds, 10_000;
    lane_model: |bytes| models::lane::MODEL.fuzz(bytes), models::lane::seeds, 10_000;
    directory_message: decoders::directory::message, decoders::directory::message_seeds, 40_000;
    directory_model: |bytes| models::directory::MODEL.fuzz(bytes), models::random_seeds, 2_000;
    task_message: decoders::tasks::message, decoders::tasks::message_seeds, 40_000;
    tasks_model: |bytes| models::tasks::MODEL.fuzz(bytes), models::random_seeds, 2_000;
    rank_message: decoders::rank_message::message, decoders::rank_message::seeds, 20_000;
    handoff_model: |bytes| models::handoff::MODEL.fuzz(bytes), models::random_seeds, 3_000;
    engine_handshake_model: |bytes| models::engine_handshake::MODEL.fuzz(bytes), models::random_seeds, 1_000;
    exchange_model: kvferry_connector::fuzzing::exchange, models::random_seeds, 1_000;
    admission_model: |bytes| models::admission::MODEL.fuzz(bytes), models::random_seeds, 4_000;
    outbox_model: |bytes| models::parts::OUTBOX.fuzz(bytes), models::random_seeds, 400;
    inbox_model: |bytes| models::parts::INBOX.fuzz(bytes), models::random_seeds, 100;
    heartbeat_model: |bytes| models::parts::HEARTBEAT.fuzz(bytes), models::random_seeds, 4_000;
    stream_window_model: |bytes| models::parts::STREAM_WINDOW.fuzz(bytes), models::random_seeds, 4_000;
    mooncake_handshake: kvferry_mooncake::fuzzing::mooncake_handshake, decoders::agent::handshakes, 60_000;
    mooncake_data: kvferry_mooncake::fuzzing::mooncake_data, decoders::agent::data, 20_000;
    mooncake_layout: kvferry_mooncake::fuzzing::mooncake_layout, models::random_seeds, 1_000;
    remote_region: kvferry::fuzzing::remote_region, decoders::agent::regions, 20_000;
    service: kvferry::fuzzing::service, decoders::agent::services, 20_000;
    config: decoders::agent::config, decoders::agent::configs, 60_000;
    regions: kvferry::fuzzing::regions, models::random_seeds, 40_000;
    cutter: kvferry::fuzzing::cutter, models::random_seeds, 4_000;
}

/// Runs a target by its name.
///
/// # Panics
/// On a finding, and for a name that no target has.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name).expect("a target's name");
    (target.run)(bytes);
}
