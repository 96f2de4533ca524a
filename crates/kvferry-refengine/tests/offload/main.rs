//! An engine whose blocks the block manager decides on: each token and each KV value is compared with the model's.
#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

#[path = "../basics/mod.rs"]
#[allow(dead_code, reason = "shared with other test binaries")]
mod basics;
mod directories;
mod failures;
mod faults;
mod kit;
mod retention;
mod reuse;
mod scheduler;
mod soak;
