//! kvferry moves KV cache between the processes of LLM serving.
//!
//! An [`Agent`] is one endpoint in a process. It registers memory ([`Region`]), connects to peers
//! ([`Peer`]), and moves batches of scattered ranges between its memory and theirs ([`Batch`],
//! [`Transfer`]). Every transfer ends exactly once. After its end kvferry does not touch its memory.
//!
//! The folder `examples/` has complete programs.
//!
//! # Where to look
//!
//! | for | open |
//! |---|---|
//! | registering memory, and stopping copiers before memory is reused | `memory/` |
//! | connecting to peers, heartbeats, streams | `session/` |
//! | the states of a transfer | `transfer/` |
//! | how a batch crosses a network, how it gets to a file | the folder of each transport in `transport/` |
//! | transports of other crates, such as the one for stock Mooncake peers | [`transport`] |
//! | the protocols themselves, without I/O | the crate `kvferry-proto` |

mod address;
mod agent;
mod builder;
mod callback;
mod config;
mod core;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
mod host;
#[cfg(all(loom, test))]
mod interleavings;
#[macro_use]
#[doc(hidden)]
pub mod log_limit;
mod memory;
mod notify;
mod peer;
mod peer_memory;
mod quota;
mod reactor;
mod register;
mod session;
mod stats;
mod suspend;
mod sync;
mod transfer;
pub mod transport;
mod users;

pub use address::AdvertisedBy;
pub use agent::Agent;
pub use builder::AgentBuilder;
pub use config::{CONFIG_VERSION, Checksum, Config};
pub use error::{Error, ErrorKind, Result};
pub use kvferry_proto::{Incarnation, RegionId, Secret};
pub use kvferry_sys::HostSpan;
pub use memory::{Access, Region, RemoteRegion};
pub use memory::{After, Device, DeviceCopy, DeviceMemory, DevicePiece, Happened, StagePool};
pub use notify::Notification;
pub use peer::{Peer, PeerSummary};
pub use session::channel::{Channel, Message, MessageHandler, Receipt, Watch};
pub use stats::Stats;
#[doc(hidden)]
pub use transfer::staged;
pub use transfer::{Batch, Capabilities, Fence, Options, Transfer, TransferStats, TransportKind};
pub use transport::Transports;
pub use transport::file::{DirectIo, FileOptions, FileRegion, Files};
pub use transport::settings::{TransportSetting, TransportSettings};
