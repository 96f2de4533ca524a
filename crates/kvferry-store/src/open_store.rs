//! State of a store that this process has open. All calls and background threads share it.

use crate::calls::single_flight::SingleFlight;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::gc::worker::Worker;
use crate::membership::Membership;
use crate::threads::parallel::Parallel;
use crate::threads::task_pool::TaskPool;
use crate::tiers::host::HostTier;
use crate::tiers::host::write_behind::WriteBehind;
use crate::tiers::objects::Tier;
use crate::waits::{NO_SPACE_MAX, Patience, SpaceWaits};
use kvferry_sys::sync::{Mutex, RwLockReadGuard};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// A store that this process has open.
#[derive(Debug)]
pub(crate) struct OpenStore {
    pub(crate) core: Arc<Core>,
    pub(crate) worker: Arc<Worker>,
    pub(crate) membership: Membership,
    pub(crate) objects: Option<Tier>,
    pub(crate) pool: TaskPool,
    /// Tasks of the pool join the loads that are under way in the order in which they wait for it.
    pub(crate) in_order: Mutex<()>,
    pub(crate) host: Option<Arc<HostTier>>,
    /// Writes what is in host memory.
    pub(crate) behind: WriteBehind,
    pub(crate) waits: SpaceWaits,
    pub(crate) put_wait: Duration,
    /// Puts in the background that may wait for their turn or for space, and would keep loads from the threads of `pool`.
    pub(crate) puts: TaskPool,
    pub(crate) flights: Arc<SingleFlight>,
    pub(crate) parallel: Parallel,
    pub(crate) capacity: u64,
    /// [`StoreOptions::hang_after`].
    pub(crate) hang_after: Duration,
    pub(crate) is_closed: AtomicBool,
    /// Held by the call that closes the store, until it is closed.
    pub(crate) closing: Mutex<()>,
    pub(crate) forks: u32,
}

impl OpenStore {
    pub(crate) fn check(&self) -> Result<()> {
        let is_closed = self.is_closed.load(Ordering::Acquire);
        if is_closed || self.is_forked() {
            return Err(Error::Closed);
        }
        Ok(())
    }

    /// Whether this is a child of the process that opened the store.
    pub(crate) fn is_forked(&self) -> bool {
        kvferry_sys::fd::forked_since(self.forks)
    }

    /// Begins a call, during which the store is not closed.
    pub(crate) fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        self.check()?;
        let call = self.core.calls.read();
        self.check()?;
        Ok(call)
    }

    /// Patience of a put whose wait for space counts from `since`.
    pub(crate) fn patience(&self, since: Instant) -> Patience {
        match self.host {
            Some(_) => Patience::of_put(self.put_wait.max(NO_SPACE_MAX), since),
            None => Patience::of_put(self.put_wait, since),
        }
    }

    /// Number of blocks in host memory that could not be written at the last try.
    pub(crate) fn unwritten(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.left(u64::MAX))
    }

    /// Has the keeper look at what it must do.
    pub(crate) fn wake_keeper(&self) {
        if self.membership.is_keeper() {
            self.worker.wake();
        } else {
            self.membership.wake_keeper();
        }
    }
}
