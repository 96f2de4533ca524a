//! Memory: regions, the gates that stop copiers, and the cursors that transports send from and
//! receive into.
//!
//! This is the only module of the crate with `unsafe`. The argument for it:
//!
//! 1. The caller of `Agent::register` promises that a range stays mapped until it is unregistered.
//! 2. A span of the range exists only inside a gate, after its region was seen alive inside that
//!    gate ([`cursor`]).
//! 3. `unregister` marks the region dead and then waits until every gate was seen empty ([`gate`])
//!    and until started device copies have ended ([`device`]).
//!
//! So no span outlives the promise.
//!
//! Processes of this host that copy directly follow the same rules, with gates and a table in
//! shared memory ([`registry`], [`writers`]).

pub(crate) mod cursor;
pub(crate) mod device;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub(crate) mod gate;
pub(crate) mod held;
pub(crate) mod region;
pub(crate) mod registry;
pub(crate) mod remote;
pub(crate) mod writers;

pub use device::{CopyDone, DeviceMemory};
pub use region::{Access, Region, RemoteRegion};

/// An agent's memory: its regions, and their copiers.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) regions: region::RegionTable,
    /// Copiers of this process.
    pub(crate) gates: gate::Gates,
    /// Processes of this host that copy to and from this agent's memory directly.
    pub(crate) writers: writers::Writers,
}
