//! The driver's calls, as programs make them.

#![allow(clippy::unwrap_used, reason = "a failed call fails the test")]

mod captures;
mod copies;
mod driver;
mod faults;
mod modules;
mod processes;
mod profiles;
mod races;
mod time;
mod vmm;
