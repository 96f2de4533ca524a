//! What kvferry's tests are built from.
//!
//! | module | what it is for |
//! |---|---|
//! | [`suite`] | the conformance suite that admits a transport: one macro line per transport |
//! | [`fabric`] | what the suite needs of a transport |
//! | [`agent`] | the fabric over real agents |
//! | [`memory`], [`slow`] | memory that knows what it should hold, and memory that acts like a device |
//! | [`process`] | peers in processes of their own, to be killed, stopped and looked into |
//! | [`network`], [`weather`] | two hosts that can be cut off, and a network that delays, reorders and loses |
//! | [`watchdog`] | tests that end, and bounds of time on a busy machine |
//! | [`broken`] | a small transport in memory, and all the ways to break it that the suite must notice |

pub mod agent;
pub mod broken;
pub mod fabric;
pub mod memory;
pub mod network;
pub mod pattern;
pub mod process;
pub mod slow;
pub mod suite;
pub mod violation;
pub mod watchdog;
pub mod weather;

pub use agent::AgentFabric;
pub use fabric::{Effort, Endpoint, Fabric, Failure, Pair};
pub use memory::{Memory, MemoryKind};
pub use violation::Violation;
pub use watchdog::{Watchdog, stretched};
