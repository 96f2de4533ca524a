//! Engines in processes of their own that are killed, stopped, restarted and cut off at each step of
//! a handoff: the other side's request ends in time and with the reason, its engine lives on, all
//! blocks come back, and the next request works.

#[path = "../basics/mod.rs"]
#[allow(dead_code, reason = "shared with other test binaries")]
mod basics;
mod process;
mod relay;
mod soak;
mod steps;
