//! Layouts and plans, held against a copy byte by byte.
#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

mod coalescing;
mod engine;
mod layouts;
mod naive;
mod requests;
mod topologies;
