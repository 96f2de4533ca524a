//! Memory: regions, the gates that stop copiers, and the cursors that transports move bytes by.
//!
//! This is the only module of the crate with `unsafe` in it. The argument that holds it together:
//!
//! 1. `Agent::register`'s caller promises that a range stays mapped until it is unregistered.
//! 2. A span of it exists only inside a gate, after its region was seen alive inside that gate
//!    ([`cursor`]).
//! 3. `unregister` marks the region dead and then waits until every gate was seen outside
//!    ([`gate`]); device copies that were started are waited for too ([`device`]).
//!
//! So no span outlives the promise.
//!
//! Processes of this host that copy by themselves keep to the same rules with gates and a table in
//! shared memory ([`registry`], [`writers`]).

pub(crate) mod cursor;
pub(crate) mod device;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub(crate) mod gate;
pub(crate) mod region;
mod register;
pub(crate) mod registry;
pub(crate) mod remote;
pub(crate) mod writers;

pub use device::{CopyDone, DeviceMemory};
pub use region::{Access, Region, RemoteRegion};
