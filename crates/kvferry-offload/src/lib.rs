//! Makes the copies that kvferry's block manager asks for, on threads of its own.
//!
//! [`kvferry_blocks::BlockManager`] decides; a [`Driver`] carries out. The engine's scheduler hands the manager's
//! actions to [`Driver::submit`], and gives what [`Driver::take_finished`] returns back to the manager. Neither call
//! waits for a copy, a file or a thread.
//!
//! | mode of a transfer | where its secondary block is |
//! |---|---|
//! | `Dram` | in host memory, which the driver allocates |
//! | `PosixDebugFallback` | in a file of the request's directory, one for each block, named by its content |
//! | `Gds` | in a block store ([`kvferry_store`]) in the request's directory: no file for each block, direct I/O if wanted |
//!
//! # Threads
//!
//! One thread copies within memory. Others carry out what concerns directories. What concerns one directory is carried
//! out in the order of the actions, by one thread at a time, so a directory that does not answer delays the copies of
//! [`Options::directory_threads`] directories at most, and none within memory.
//!
//! # Names
//!
//! A block is written under a name that covers its key, its group, the namespace of [`Options::new`], random bytes of the
//! driver, and how often the manager was reset. Bytes of other weights are never found under it, whether or not keys name
//! the weights.
//!
//! # Failures
//!
//! A copy that can't be made is [`Outcome::Failed`](kvferry_blocks::Outcome::Failed), and costs hits only. What was read
//! is compared with a checksum before it is [`Outcome::Done`](kvferry_blocks::Outcome::Done). The first failure of a
//! directory, and the first after a success, is logged; [`Driver::stats`] counts all.
#![forbid(unsafe_code)]

mod carrier;
mod carry;
mod driver;
mod files;
mod folder;
mod host;
mod names;
mod options;
mod pages;
mod queue;
mod stats;
mod stored;

pub use driver::Driver;
pub use options::{Error, Fault, Intercept, Options};
pub use pages::{Pages, Piece};
pub use stats::Stats;
