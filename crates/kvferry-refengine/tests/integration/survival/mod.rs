//! Engines in their own processes that are killed, stopped, restarted and partitioned at each step of a
//! handoff. The other side's request ends in time and with the reason, its engine continues, all blocks
//! are given back, and the next request works.

mod process;
mod relay;
mod soak;
mod steps;
