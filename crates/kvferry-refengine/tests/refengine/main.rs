//! The engine, held against what its model says without one, and its seams against what they
//! promise.
#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

#[path = "../basics/mod.rs"]
mod basics;
mod contract;
mod flips;
mod handoffs;
mod kit;
mod layouts;
mod scenarios;
mod script;
mod tokens;
mod trt;
