//! Memory of GPUs in transfers, on the fake driver.

#![cfg(any(debug_assertions, feature = "testing"))]

mod bytes;
mod calibrate;
mod faults;
mod kernel;
mod kit;
mod order;
mod refused;
mod suite;
