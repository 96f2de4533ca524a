//! The engine, its connectors and its offloading: each token is compared with the model's.

#![allow(clippy::unwrap_used, reason = "helpers of tests, in which a panic is a finding")]

mod basics;
mod kvferry_adapter;
mod offload;
mod refengine;
mod survival;
