//! Within one host: the initiator copies, the peer takes no part.
//!
//! Bytes move by `process_vm_writev` and `process_vm_readv`, or, to and from memory that the peer
//! allocated through kvferry, by plain copies to the same memory mapped here. There is no message
//! per transfer: which ranges may be touched is looked up in a table that the peer keeps in shared
//! memory (`crate::memory::registry`).
//!
//! **Fence.** Reads write our own memory, inside a gate of ours: `Local`. Writes are one-sided
//! into standing registered memory: `PeerExit`. The initiator copies inside a gate that the peer
//! can see (`crate::memory::writers`), a bounded piece at a time; the peer's `unregister` clears
//! the region's entry and waits until the gate was left or this process is gone. If neither
//! happens within the silence limit, the range is quarantined.
//!
//! **Whose memory.** A process number proves nothing. The peer is found by a name that only its
//! incarnation listens at, both prove the session's key, and random bytes that the peer only says
//! the address of are read under its number. From then on the number is the peer's for as long as
//! the connection is up, since it closes before the number can be used again; that is looked at
//! again before every copy that comes more than [`SURE_FOR`] after the last look. A number is not
//! given to somebody else so soon, because the kernel hands out all others first.
//!
//! What remains is this process being stopped between the look and the system call, for as long as
//! it takes the peer to exit and its number to be used again by a process of the same user; a piece
//! of at most [`CHUNK`] bytes would be copied there, if something is mapped at its address.

mod attach;
mod copier;
mod copy;
mod direct;
mod serve;
mod share;

pub(crate) use attach::attach;
pub(crate) use copy::{Targets, Unreached};
pub(crate) use direct::copy_all;
pub(crate) use serve::{LocalListener, listen, unmap};
pub(crate) use share::LocalShare;

use crate::error::{Error, ErrorKind};
use crate::memory::gate::Gate;
use crate::memory::registry::RegistryView;
use crate::memory::writers::WriterPage;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use kvferry_proto::{Incarnation, LocalPacket, RegionId, Timestamp};
use kvferry_sys::fd::Fd;
use kvferry_sys::shared::Shared;
use kvferry_sys::unix::Channel;
use rustc_hash::{FxHashMap, FxHashSet};
use std::time::Duration;

/// Bytes copied inside a gate at a time: what a peer that unregisters waits for, a tenth of a
/// millisecond. More in one call is no faster.
pub(crate) const CHUNK: usize = 512 * 1024;

/// How long a peer that was seen alive is taken to be.
const SURE_FOR: Duration = Duration::from_millis(1);

/// The abstract name an agent listens at.
fn name_of(incarnation: Incarnation) -> String {
    format!("kvferry/{incarnation}")
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A peer on this host whose memory can be reached.
#[derive(Debug)]
pub(crate) struct LocalPeer {
    pid: i32,
    /// Whether the kernel lets us copy by process number, and why not.
    vm: Result<(), String>,
    channel: Arc<Channel>,
    /// The handler of the channel, on the control thread.
    pub(crate) handler: u64,
    pidfd: Fd,
    registry: RegistryView,
    page: WriterPage,
    /// Memory of the peer that is mapped here, by region.
    maps: RwLock<FxHashMap<u32, Arc<Shared>>>,
    asked: Mutex<FxHashSet<u32>>,
    /// Gates for our own memory that nobody uses.
    gates: Mutex<Vec<Arc<Gate>>>,
    seen_alive: AtomicU64,
    /// Nothing may be copied any more.
    detached: AtomicBool,
}

impl LocalPeer {
    /// Why the kernel does not let us copy by process number, if it does not.
    pub(crate) fn obstacle(&self) -> Option<&str> {
        self.vm.as_ref().err().map(String::as_str)
    }

    /// From now on nothing is copied; what is being copied is not waited for.
    pub(crate) fn detach(&self) {
        self.detached.store(true, Ordering::SeqCst);
    }

    /// Whether it can be used.
    pub(crate) fn is_attached(&self) -> bool {
        !self.detached.load(Ordering::SeqCst)
    }

    /// Whether the process number is the peer's, with an error that says why not.
    fn check_alive(&self, now: Timestamp) -> Result<(), Error> {
        let seen = Timestamp::from_nanos(self.seen_alive.load(Ordering::Relaxed));
        if now.saturating_since(seen) < SURE_FOR && now >= seen {
            return Ok(());
        }
        if self.registry.is_closed() || self.channel.is_gone(&self.pidfd) {
            return Err(self.loss("the peer's process is gone".into()));
        }
        // When the look began.
        self.seen_alive.store(now.as_nanos(), Ordering::Relaxed);
        Ok(())
    }

    /// How a peer that is gone left: it may have said goodbye.
    fn loss(&self, how: String) -> Error {
        self.farewell().unwrap_or_else(|| Error::new(ErrorKind::PeerReset, how))
    }

    /// What a peer that was shut down has left to say.
    fn farewell(&self) -> Option<Error> {
        let closed = self.registry.is_closed();
        closed.then(|| Error::new(ErrorKind::PeerClosed, "the peer was shut down"))
    }

    /// A gate for our own memory.
    fn take_gate(&self, core: &crate::agent::Core) -> Arc<Gate> {
        lock(&self.gates).pop().unwrap_or_else(|| core.gates.gate())
    }

    fn put_gate(&self, gate: Arc<Gate>) {
        lock(&self.gates).push(gate);
    }

    /// The memory of a shared region, if it is mapped; otherwise asks for it, once.
    fn map_of(&self, region: RegionId) -> Option<Arc<Shared>> {
        let maps = self.maps.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(map) = maps.get(&region.0) {
            return Some(Arc::clone(map));
        }
        drop(maps);
        if lock(&self.asked).insert(region.0)
            && self.channel.send(&LocalPacket::Map { region }.encode(), &[]).is_err()
        {
            // Too many are asked for at once: the next transfer asks again.
            lock(&self.asked).remove(&region.0);
        }
        None
    }

    fn set_map(&self, region: RegionId, map: Option<Shared>) {
        let mut maps = self.maps.write().unwrap_or_else(PoisonError::into_inner);
        match map {
            Some(map) => drop(maps.insert(region.0, Arc::new(map))),
            None => drop(maps.remove(&region.0)),
        }
    }
}
