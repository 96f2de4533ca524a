//! kvferry moves KV cache between the processes of LLM serving.
//!
//! An [`Agent`] is one endpoint in a process. It registers memory ([`Region`]), meets peers
//! ([`Peer`]), and moves batches of scattered ranges between its memory and theirs ([`Batch`],
//! [`Transfer`]). Every transfer ends exactly once; when it ended, its memory is its owner's again.
//!
//! # Where to look
//!
//! | for | open |
//! |---|---|
//! | registering memory, and stopping copiers for certain | `memory/` |
//! | meeting peers, heartbeats, streams | `session/` |
//! | a transfer's life | `transfer/` |
//! | how a batch crosses TCP | `transport/tcp/` |
//! | stock Mooncake peers | `transport/mooncake/` |
//! | the protocols themselves, without I/O | the crate `kvferry-proto` |

mod address;
mod agent;
mod channel;
mod config;
mod error;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
#[cfg(all(loom, test))]
mod interleavings;
mod memory;
mod notify;
mod peer;
mod reactor;
mod session;
mod stats;
mod sync;
mod transfer;
mod transport;

pub use address::AdvertisedBy;
pub use agent::{Agent, AgentBuilder};
pub use channel::{Channel, Correspondent, Watch};
pub use config::{CONFIG_VERSION, Checksum, Config, SecretString};
pub use error::{Error, ErrorKind, Result};
pub use kvferry_proto::{Incarnation, RegionId};
pub use kvferry_sys::HostSpan;
pub use memory::{Access, CopyDone, DeviceMemory, Region, RemoteRegion};
pub use notify::Notification;
pub use peer::{Peer, PeerSummary};
pub use stats::Stats;
pub use transfer::{Batch, Moved, Options, Transfer};
pub use transport::{Capabilities, Fence, TransportKind, Transports};
