//! The engine compared with its model's output, and its seams with their contracts.
#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

#[path = "../basics/mod.rs"]
mod basics;
mod contract;
mod flips;
mod handoffs;
mod kit;
mod scenarios;
mod script;
mod tokens;
mod trt;
