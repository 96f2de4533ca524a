//! kvferry's store of KV blocks.
//!
//! [`Store`] keeps blocks on local disks, for all processes of a host. Its parts, each on its own:
//! - [`policy`] decides which blocks leave. It is a value: no clock, no I/O, no thread. `kvferry bench
//!   store --trace FILE` replays a trace with it.
//! - [`index`] tells the processes where each block lies, in memory that they share.
//! - [`log`] writes blocks to segments on a disk and finds them again after a restart.
//! - [`objects`] uploads blocks to an object store and fetches them from it.
//! - [`inspect`] reads a store's files, and [`clean`] removes what it does not need, without an agent: `kvferry
//!   store`.
//! - [`archive`] writes blocks of a store to a stream, and puts them into another store.
//!
//! The life of a block: [`Space::put`] computes its sum, writes it to this process's segment, and inserts it
//! into the index. [`Space::get`] finds it there, reads it, and compares the sum. The *keeper*, one of the
//! processes, hears of both from all of them, and frees space: it removes the blocks that are worth least
//! from the index, and copies what is left of a segment to another one.
//!
//! Any process can subscribe to the blocks that come and go, for routers: [`Store::events`] by keys, [`Store::watch`]
//! by an engine's names.
//!
//! Two tiers may be around the disk: host memory of the process, in front of it, and an object store ([`objects`]).
//!
//! No block is pinned while it is read. A reader that is overtaken by the keeper finds a wrong sum, looks again,
//! and finds the block at its new place, or misses it.

#![forbid(unsafe_code)]

pub mod archive;
#[cfg(test)]
mod bench;
mod calls;
mod clock;
mod core;
mod error;
mod events;
mod fault_points;
mod gc;
pub mod index;
pub mod inspect;
mod key;
pub mod log;
mod membership;
mod memory;
mod open_store;
mod opening;
mod options;
mod outcome;
mod pending;
pub mod policy;
#[cfg(test)]
mod power;
pub mod replay;
mod space;
mod stats;
mod store;
mod threads;
mod tiers;
mod waits;
mod watch;
mod writer;

pub use calls::pin::Pin;
pub use calls::put::Retain;
pub use error::{Error, Result};
pub use events::{Event, Events, Polled};
pub use gc::clean;
pub use key::{HASH_LEN_MAX, HASH_LEN_MIN, Key, Namespace};
pub use memory::{BLOCK_LEN_MAX, BlockMemory};
pub use opening::adopt;
pub use options::StoreOptions;
pub use outcome::Put;
pub use pending::Pending;
pub use policy::OnExpiry;
pub use space::Space;
pub use stats::Stats;
pub use store::Store;
pub use tiers::objects;
pub use watch::{Report, Watch};
