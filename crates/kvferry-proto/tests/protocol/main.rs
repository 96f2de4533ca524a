//! The protocol, both ends in one thread and in virtual time. No test sleeps.
#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

mod admission;
mod authentication;
mod codecs;
mod control;
mod frames;
mod handshake;
mod hostile;
mod lane;
mod liveness;
mod relay;
mod stream_proofs;
mod tasks;

use kvferry_models::pair;
