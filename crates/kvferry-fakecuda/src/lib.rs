#![doc = include_str!("../README.md")]

mod abi;
mod clocks;
mod config;
pub mod control;
mod copies;
mod counters;
mod devices;
mod exports;
mod faults;
mod gauges;
mod host;
mod ipc;
mod kernels;
mod memory;
mod modules;
mod moves;
mod ops;
mod ptx;
mod races;
mod scheduler;
mod segments;
mod state;
mod streams;
mod submit;
mod thread;
mod timeline;
mod vmm;

pub use faults::{Effect, Fault};
pub use memory::{FREED, IN_FLIGHT, UNWRITTEN};
