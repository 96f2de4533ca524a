//! kvferry's Python bindings.
//!
//! This library contains every class; `cdylib/` makes it the module `kvferry._kvferry`, and the
//! package in `python/` adds what needs no native code (exceptions, buffers, asyncio, the signatures
//! of Mooncake). The bindings translate and decide nothing. Three rules hold everywhere:
//!
//! - A call that may block goes through `blocking`: it detaches from the interpreter, ends on
//!   Ctrl-C, and turns the core's error into the exception of its kind.
//! - A thread that is attached to the interpreter waits only for locks that attached threads hold
//!   for a few instructions. So neither a deadlock with the interpreter's lock nor a lock left held
//!   in a forked child is possible.
//! - Native threads never call Python.
//!
//! | module | what is in it |
//! |---|---|
//! | `agent`, `shared` | `Agent`, and the buffers that are registered with it |
//! | `memory` | `Region`, `RemoteRegion`, Python buffers as memory |
//! | `peer` | `Peer`, `PeerSummary` |
//! | `batch` | `Batch`, and reading lists of addresses |
//! | `transfer` | `Transfer`, `TransferStats` |
//! | `files` | `FileRegion`, `Files` |
//! | `store` | `Store`, `Space` |
//! | `store_blocks` | `Blocks`, and reading hashes and the memory of blocks |
//! | `store_pending` | `Pending`, `Put` |
//! | `store_watch` | `Watch` |
//! | `block_manager`, `retention` | `BlockManager`, `Allocation`, `RetentionConfig` |
//! | `notification` | `Notification` |
//! | `connector` | `SchedulerHalf`, `WorkerHalf`, `Exchange`: what engines' connectors are made of |
//! | `mooncake` | `MooncakeEngine`, which `kvferry.mooncake` is made of |
//! | `blocking`, `error`, `log` | the rules above, exceptions, `KVFERRY_LOG` |

mod agent;
mod batch;
mod block_manager;
mod blocking;
mod connector;
mod error;
mod files;
mod log;
mod memory;
mod mooncake;
mod notification;
mod order;
mod peer;
mod retention;
mod shared;
mod store;
mod store_blocks;
mod store_pending;
mod store_watch;
mod transfer;

use pyo3::prelude::*;

/// Adds all classes to the Python module.
///
/// # Errors
/// What Python raises while the classes are created.
pub fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    log::start();
    kvferry_mooncake::link();
    kvferry_sys::thread::choose_cpus()?;
    blocking::stop_agents_at_exit(module)?;
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("READS_INTS_DIRECTLY", connector::ints::are_read_directly(module.py()))?;
    module.add_class::<agent::Agent>()?;
    module.add_class::<batch::Batch>()?;
    module.add_class::<block_manager::Allocation>()?;
    module.add_class::<block_manager::BlockManager>()?;
    module.add_class::<files::FileRegion>()?;
    module.add_class::<files::Files>()?;
    module.add_class::<memory::Region>()?;
    module.add_class::<memory::RemoteRegion>()?;
    module.add_class::<notification::Notification>()?;
    module.add_class::<transfer::TransferStats>()?;
    module.add_class::<peer::Peer>()?;
    module.add_class::<peer::PeerSummary>()?;
    module.add_class::<retention::RetentionConfig>()?;
    module.add_class::<transfer::Transfer>()?;
    module.add_class::<store::Store>()?;
    module.add_class::<store::Space>()?;
    module.add_class::<store::Pin>()?;
    module.add_class::<store_watch::Watch>()?;
    module.add_class::<store_blocks::Blocks>()?;
    module.add_class::<store_pending::Pending>()?;
    module.add_class::<store_pending::Put>()?;
    module.add_class::<mooncake::NativeEngine>()?;
    module.add_class::<connector::scheduler::SchedulerHalf>()?;
    module.add_class::<connector::worker::WorkerHalf>()?;
    module.add_class::<connector::exchange::Exchange>()?;
    module.add_function(pyo3::wrap_pyfunction!(connector::scheduler::prompt_id, module)?)?;
    module.add_function(pyo3::wrap_pyfunction!(connector::scheduler::counted_reasons, module)?)?;
    module.add_function(pyo3::wrap_pyfunction!(log::log_to_stderr, module)?)
}
