//! The driver of an engine's offloading, on the block manager and a store.

#![allow(clippy::unwrap_used, reason = "a panic fails the test")]

mod driver;
mod weights;
