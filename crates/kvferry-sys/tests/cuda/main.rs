//! `kvferry_sys::cuda` against stubs of the driver's library, without a GPU.

#![cfg(any(debug_assertions, feature = "testing"))]

mod contexts;
mod copies;
mod device;
mod errors;
mod events;
mod kit;
mod loading;
mod memory;
