//! The protocol, both ends in one thread and in virtual time. No test sleeps.

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
