//! The protocol's state machines in virtual time, and plans held against a copy byte by byte.

#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

mod plans;
mod protocol;
