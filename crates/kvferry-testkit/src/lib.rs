//! Test support for kvferry: the conformance suite, processes, networks, memory and limits of time.
//!
//! | module | contents |
//! |---|---|
//! | [`suite`] | the conformance suite: a transport runs it by one macro line |
//! | [`fabric`] | the interface that the suite needs of a transport |
//! | [`agent`], [`file`](mod@file) | that interface over pairs of agents, and over a file between two agents |
//! | [`memory`], [`slow`] | memory with a model of its content, and memory that behaves like a device |
//! | [`region`] | regions of an agent in this process |
//! | [`process`] | peers in processes of their own, which a test kills, stops and inspects |
//! | [`forked`] | code in a forked process |
//! | [`user`] | another user of the host |
//! | [`hanging`] | a disk whose device can stop answering, or fail, and that records what survives a loss of power |
//! | [`network`], [`netem`] | two hosts that can be cut off from each other; delay, reordering and loss; a program in a network of its own |
//! | [`journal`] | log lines of the code under test |
//! | [`ports`] | a port at which no process listens, and one that stays with agents that restart |
//! | [`watchdog`] | abort of tests that hang, and waiting for what another thread does |
//! | [`broken`] | a small transport in memory, and the faults in it that the suite must notice |

pub mod agent;
pub mod broken;
mod broken_device;
pub mod fabric;
pub mod file;
pub mod forked;
pub mod hanging;
pub mod journal;
pub mod memory;
pub mod netem;
pub mod network;
pub mod pattern;
pub mod ports;
pub mod process;
pub mod region;
pub mod slow;
pub mod suite;
pub mod user;
pub mod violation;
pub mod watchdog;

pub use agent::AgentFabric;
pub use fabric::{Effort, Endpoint, Fabric, Failure, Pair, Way};
pub use file::FileFabric;
pub use journal::Journal;
pub use memory::{Memory, MemoryKind};
pub use violation::Violation;
pub use watchdog::{PATIENCE, Watchdog, eventually};
