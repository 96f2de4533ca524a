//! Memory of GPUs in transfers, on the fake driver or a real one: `KVFERRY_TEST_GPU`, see `machine.rs`.

#![cfg(any(debug_assertions, feature = "testing"))]

mod absent;
mod bytes;
mod calibrate;
mod contexts;
mod fake;
mod fallbacks;
mod faults;
mod files;
mod forked;
mod hardware;
mod inputs;
mod kernel;
mod kit;
mod machine;
mod order;
mod overlap;
mod pins;
mod ptx;
mod real;
mod refused;
mod released;
mod segments;
mod stress;
mod suite;

kvferry_testkit::child_processes!();
