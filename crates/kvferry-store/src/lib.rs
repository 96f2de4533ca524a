//! kvferry's store of KV blocks.
//!
//! What is here: the [`policy`], which decides what stays in a tier of bounded size. It is a value:
//! no clock, no I/O, no thread. `kvferry bench store --trace FILE` replays a trace with it.

#![forbid(unsafe_code)]

pub mod policy;
