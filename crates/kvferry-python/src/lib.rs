//! kvferry's Python bindings.
//!
//! This library holds every class; `cdylib/` wraps it into the module `kvferry._kvferry`, and the
//! package in `python/` adds what is better said in Python (exceptions, buffers, asyncio). The
//! bindings translate and decide nothing. Three rules hold everywhere:
//!
//! - A call that may block goes through `blocking`: it detaches from the interpreter, answers
//!   Ctrl-C, and turns the core's error into the exception of its kind.
//! - No lock of ours is waited for while attached to the interpreter, unless it is only ever held
//!   for a few instructions by threads that are attached too. So neither a deadlock with the
//!   interpreter's lock nor a lock left held in a forked child is possible.
//! - Native threads never call Python.
//!
//! | module | what is in it |
//! |---|---|
//! | `agent` | `Agent`, and what keeps it and the buffers registered with it alive |
//! | `memory` | `Region`, `RemoteRegion`, Python buffers as memory |
//! | `peer` | `Peer`, `PeerSummary`, `Moved` |
//! | `batch` | `Batch`, lists of addresses |
//! | `transfer` | `Transfer` |
//! | `notification` | `Notification` |
//! | `mooncake` | the surface of `mooncake.engine` |
//! | `blocking`, `aside`, `error`, `log` | the rules above, exceptions, `KVFERRY_LOG` |

mod agent;
mod aside;
mod batch;
mod blocking;
mod error;
mod log;
mod memory;
mod mooncake;
mod notification;
mod peer;
mod transfer;

use pyo3::prelude::*;

/// Fills the Python module.
///
/// # Errors
/// Whatever Python raises while the classes are made.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::start();
    blocking::stop_agents_at_exit(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add_class::<agent::Agent>()?;
    module.add_class::<batch::Batch>()?;
    module.add_class::<memory::Region>()?;
    module.add_class::<memory::RemoteRegion>()?;
    module.add_class::<notification::Notification>()?;
    module.add_class::<peer::Moved>()?;
    module.add_class::<peer::Peer>()?;
    module.add_class::<peer::PeerSummary>()?;
    module.add_class::<transfer::Transfer>()?;
    mooncake::add_to(module)
}
