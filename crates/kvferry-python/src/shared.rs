//! The core's agent as the objects of Python share it, with the buffers that it may access.

use crate::blocking::Stop;
use crate::error;
use crate::order::Orders;
use kvferry::ErrorKind;
use kvferry_sys::sync::Mutex;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::sync::Arc;

/// A registered Python buffer.
struct Hold {
    region: kvferry::Region,
    buffer: Py<PyAny>,
}

/// The core's agent, and the Python buffers that it may access.
pub(crate) struct Shared {
    agent: kvferry::Agent,
    /// The buffers, by region id. Threads that are attached to the interpreter hold the lock for a
    /// few instructions only.
    holds: Mutex<HashMap<u32, Hold>>,
    /// Work that comes before transfers that name none themselves.
    after: Mutex<Arc<Orders>>,
    pid: u32,
}

impl Shared {
    pub(crate) fn new(agent: kvferry::Agent) -> Self {
        let pid = std::process::id();
        Self { agent, holds: Mutex::default(), after: Mutex::default(), pid }
    }

    /// The agent, also in a forked process: for what it was started with.
    pub(crate) fn core(&self) -> &kvferry::Agent {
        &self.agent
    }

    /// True if this process was forked from the one that started the agent.
    pub(crate) fn is_forked(&self) -> bool {
        std::process::id() != self.pid
    }

    /// The agent, unless this process was forked from the one that started it.
    pub(crate) fn agent(&self, py: Python<'_>) -> PyResult<&kvferry::Agent> {
        if !self.is_forked() {
            return Ok(&self.agent);
        }
        Err(error::new(
            py,
            ErrorKind::Forked,
            "this process was forked from the one that started the agent; start another here",
        ))
    }
}

impl Stop for Shared {
    fn stop(&self) {
        if !self.is_forked() {
            self.agent.shutdown();
        }
    }
}

impl Shared {
    /// Keeps the buffer of a region until the region is released.
    pub(crate) fn hold(&self, region: &kvferry::Region, buffer: Py<PyAny>) {
        self.holds.lock().insert(region.id().0, Hold { region: region.clone(), buffer });
    }

    /// Puts this work before transfers that name none themselves.
    pub(crate) fn set_after(&self, after: Orders) {
        let before = std::mem::replace(&mut *self.after.lock(), Arc::new(after));
        // After the lock is released: freeing an object may run Python code that calls the agent.
        drop(before);
    }

    /// The work before a transfer: what it names, else the agent's.
    pub(crate) fn after(&self, named: Orders) -> Arc<Orders> {
        if named.all().is_empty() { Arc::clone(&self.after.lock()) } else { Arc::new(named) }
    }

    /// Releases the buffers of regions that are no longer registered.
    pub(crate) fn release(&self, regions: &[kvferry::Region]) {
        let mut released = Vec::new();
        let mut holds = self.holds.lock();
        let ours = |region: &&kvferry::Region| {
            let ended = !region.is_in_use();
            region.remote().incarnation == self.agent.incarnation() && ended
        };
        for region in regions.iter().filter(ours) {
            released.extend(holds.remove(&region.id().0));
        }
        drop(holds);
        // After the lock is released: freeing a buffer may run Python code that calls the agent.
        drop(released);
    }

    /// Releases all buffers, after the agent was shut down.
    pub(crate) fn release_all(&self) {
        let released = std::mem::take(&mut *self.holds.lock());
        for Hold { region, buffer } in released.into_values() {
            if region.is_in_use() {
                // A process or a device that does not answer may still write to it: never free it.
                std::mem::forget(buffer);
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.is_forked() {
            // In a forked child nothing accesses the buffers, and a thread of the parent may have held
            // any lock of the agent at the fork.
            return;
        }
        // Release the buffers only after every copier has stopped. The dropping thread may be attached
        // to the interpreter: detach while native threads are joined.
        let stop = || self.stop();
        if Python::try_attach(|py| py.detach(stop)).is_none() {
            self.stop();
        }
        self.release_all();
    }
}
