//! The engine compared with its model's output, and its seams with their contracts.
#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

#[path = "../basics/mod.rs"]
#[allow(dead_code, reason = "shared with other test binaries")]
mod basics;
mod contract;
mod flips;
mod kit;
mod loads;
mod script;
mod tokens;
mod trt;
