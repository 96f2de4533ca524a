//! Registered memory.

use crate::error::{Error, ErrorKind, Result};
use crate::memory::device::DeviceMemory;
use crate::memory::gate::Stuck;
use crate::memory::user::{Copier, Keys};
use crate::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use crate::sync::{Arc, Mutex, MutexGuard};
use kvferry_proto::pack;
use kvferry_proto::{Incarnation, RegionId};
use kvferry_sys::map::Mapping;
use kvferry_sys::shared::Shared;
use kvferry_sys::span::HostSpan;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::OnceLock;

/// What peers may do with a region. The agent's own transfers need no permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Access {
    /// Peers may read.
    pub read: bool,
    /// Peers may write.
    pub write: bool,
}

impl Access {
    /// Only the agent itself has access.
    pub const NONE: Self = Self { read: false, write: false };
    /// Peers may read.
    pub const READ: Self = Self { read: true, write: false };
    /// Peers may write.
    pub const WRITE: Self = Self { read: false, write: true };
    /// Peers may read and write.
    pub const READ_WRITE: Self = Self { read: true, write: true };

    pub(super) fn allows(self, need: Self) -> bool {
        (self.read || !need.read) && (self.write || !need.write)
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match (self.read, self.write) {
            (false, false) => "none",
            (true, false) => "r",
            (false, true) => "w",
            (true, true) => "rw",
        })
    }
}

pub(crate) enum Backing {
    /// Host memory of the caller, promised by `Agent::register`.
    Borrowed,
    /// Host memory that kvferry allocated.
    Owned(Mapping),
    /// Host memory that kvferry allocated, and that other processes of this host may map as far as
    /// the region's access allows.
    Shared(Arc<Shared>),
    /// Memory that is copied through the stages of its device.
    Device(DeviceMemory),
}

pub(crate) struct RegionInner {
    pub(crate) id: RegionId,
    pub(crate) incarnation: Incarnation,
    pub(crate) base: usize,
    pub(crate) len: usize,
    pub(crate) access: Access,
    /// What transports keep for the memory. Before `backing`: it ends before memory is unmapped.
    pub(crate) keys: Keys,
    pub(crate) backing: Backing,
    pub(super) name: OnceLock<String>,
    pub(super) alive: AtomicBool,
    /// Copies in progress of devices, files and other threads ([`RegionUse`]).
    pub(super) copies: AtomicUsize,
    pub(super) quarantine: Mutex<Quarantine>,
}

/// Whether a copier may still be inside an unregistered region.
#[derive(Debug, Default)]
pub(super) enum Quarantine {
    /// The region is registered, or all copiers had left when it was unregistered.
    #[default]
    Never,
    /// The unregistering thread waits for the copiers.
    Leaving,
    /// Copiers of memory users and of this process that were seen and have not left.
    Inside(Vec<Arc<dyn Copier>>, Vec<Stuck>),
    Lifted,
}

impl RegionInner {
    pub(crate) fn is_device(&self) -> bool {
        matches!(self.backing, Backing::Device(_))
    }

    /// Whether the memory has addresses of this process.
    pub(crate) fn has_addresses(&self) -> bool {
        self.base != 0
    }

    pub(super) fn quarantine(&self) -> MutexGuard<'_, Quarantine> {
        let mut quarantine = self.quarantine.lock();
        if let Quarantine::Inside(copiers, own) = &mut *quarantine {
            copiers.retain(|copier| !copier.is_left());
            own.retain(|gate| !gate.is_left());
            if copiers.is_empty() && own.is_empty() && self.is_released() {
                *quarantine = Quarantine::Lifted;
            }
        }
        quarantine
    }

    /// Releases the keys of an unregistered region once no copy is counted. False while a copy is, or
    /// while something holds the memory through a key.
    pub(super) fn is_released(&self) -> bool {
        // A key gets to the memory while a copy is counted, so none does after this.
        self.copies.load(Ordering::SeqCst) == 0 && self.keys.release()
    }

    /// Whether copiers had not left the region when the thread that unregistered it gave up its wait, and still
    /// have not.
    pub(crate) fn is_quarantined(&self) -> bool {
        matches!(*self.quarantine(), Quarantine::Inside(..))
    }

    /// The memory, if peers may map it: writable with [`Access::write`], otherwise read-only.
    pub(crate) fn shared(&self) -> Option<&Arc<Shared>> {
        match &self.backing {
            Backing::Shared(shared) if self.access != Access::NONE => Some(shared),
            _ => None,
        }
    }

    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::SeqCst)
    }

    /// A span of host memory.
    ///
    /// The caller holds a gate, has seen the region alive inside it, and has checked the range.
    pub(crate) fn span(&self, offset: u64, len: usize) -> HostSpan {
        let offset = usize::try_from(offset).expect("the caller checked the range");
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "the caller checked the range"
        );
        debug_assert!(!matches!(self.backing, Backing::Device(_)), "host memory only");
        // SAFETY: the range is inside the region. A borrowed region is mapped until it is
        // unregistered (`Agent::register`'s contract), an owned one until its last handle is
        // dropped; and `unregister` returns only after the caller has left the gate it holds, and after
        // `keys` were released, which ends registrations of the span.
        unsafe { HostSpan::new((self.base as *mut u8).add(offset), len) }
    }
}

impl fmt::Debug for RegionInner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.backing {
            Backing::Borrowed => "borrowed",
            Backing::Owned(_) => "owned",
            Backing::Shared(_) => "shared",
            Backing::Device(_) => "device",
        };
        write!(
            f,
            "Region[{} {kind} {:#x}+{:#x} {}{}]",
            self.id,
            self.base,
            self.len,
            self.access,
            if self.is_alive() { "" } else { " unregistered" }
        )
    }
}

/// A use of a region's memory. `unregister` returns only after it has been dropped.
#[derive(Debug)]
pub(crate) struct RegionUse(Arc<RegionInner>);

impl RegionUse {
    /// Begins a use of the region; `None` if it was unregistered.
    pub(crate) fn begin(region: &Arc<RegionInner>) -> Option<Self> {
        // Counted before the look: a thread that unregisters the region marks it first and looks at the
        // count after that, so one of the two sees the other. That holds for a region of another agent,
        // too, which does not know this gate.
        region.copies.fetch_add(1, Ordering::SeqCst);
        let held = Self(Arc::clone(region));
        region.is_alive().then_some(held)
    }

    /// The region, whose memory and keys can be used until the value is dropped.
    pub(crate) fn region(&self) -> &RegionInner {
        &self.0
    }
}

impl Drop for RegionUse {
    fn drop(&mut self) {
        self.0.copies.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Registered memory of this agent. A handle: clones are the same region, and dropping them does
/// not unregister it.
#[derive(Clone, Debug)]
pub struct Region(pub(crate) Arc<RegionInner>);

impl Region {
    /// The name that [`Agent::name_region`](crate::Agent::name_region) gave it.
    pub fn name(&self) -> Option<&str> {
        self.0.name.get().map(String::as_str)
    }

    /// The region's id, unique within this agent's incarnation.
    pub fn id(&self) -> RegionId {
        self.0.id
    }

    /// The start address in this process; zero for device memory whose addresses mean something to its device only.
    pub fn addr(&self) -> usize {
        self.0.base
    }

    /// The length in bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Always false: an empty region can't be registered.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Access that peers have to the region.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// Whether the memory is a device's, which the processor can't access.
    pub fn is_device(&self) -> bool {
        self.0.is_device()
    }

    /// The memory of the region, if it is a device's.
    pub fn device_memory(&self) -> Option<&DeviceMemory> {
        match &self.0.backing {
            Backing::Device(memory) => Some(memory),
            _ => None,
        }
    }

    /// Whether the region is still registered.
    pub fn is_registered(&self) -> bool {
        self.0.is_alive()
    }

    /// Whether the region was unregistered, and something may still touch its memory: an unresponsive
    /// process of this host, a copy of a device or a file, or what the thread that unregisters it waits
    /// for. The memory must not be used for anything else until this is false.
    pub fn is_quarantined(&self) -> bool {
        matches!(*self.0.quarantine(), Quarantine::Leaving | Quarantine::Inside(..))
    }

    /// True if the region is registered or quarantined: something may touch its memory, which must stay as it is.
    pub fn is_in_use(&self) -> bool {
        // In this order: a region that is unregistered is quarantined before it is no longer registered.
        self.is_registered() || self.is_quarantined()
    }

    /// The description that a peer needs to name this region in its transfers.
    pub fn remote(&self) -> RemoteRegion {
        RemoteRegion {
            incarnation: self.0.incarnation,
            id: self.0.id,
            addr: self.0.base as u64,
            len: self.0.len as u64,
            access: self.0.access,
        }
    }

    fn owned(&self, offset: usize, len: usize) -> Result<HostSpan> {
        if offset.checked_add(len).is_none_or(|end| end > self.0.len) {
            return Err(self.out_of_bounds(offset as u64, len as u64));
        }
        match &self.0.backing {
            Backing::Owned(map) => Ok(map.span(offset, len)),
            Backing::Shared(shared) => Ok(shared.span(offset, len)),
            Backing::Borrowed | Backing::Device(_) => Err(Error::new(
                ErrorKind::Unsupported,
                "the region's memory was not allocated by kvferry",
            )),
        }
    }

    /// Copies `bytes` into memory that [`Agent::allocate`](crate::Agent::allocate) made.
    ///
    /// # Errors
    /// `OutOfBounds`; `Unsupported` if kvferry did not allocate the memory.
    pub fn write_at(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.owned(offset, bytes.len()).map(|span| span.copy_from(bytes))
    }

    /// Copies memory that [`Agent::allocate`](crate::Agent::allocate) made into `bytes`.
    ///
    /// A transfer may write the memory at the same time; each byte has its value at the time of its
    /// copy.
    ///
    /// # Errors
    /// `OutOfBounds`; `Unsupported` if kvferry did not allocate the memory.
    pub fn read_at(&self, offset: usize, bytes: &mut [u8]) -> Result<()> {
        self.owned(offset, bytes.len()).map(|span| span.copy_to(bytes))
    }

    pub(crate) fn out_of_bounds(&self, offset: u64, len: u64) -> Error {
        Error::new(ErrorKind::OutOfBounds, "the range reaches beyond its region")
            .with("region", self.0.id)
            .with("offset", offset)
            .with("len", len)
            .with("region_len", self.0.len)
    }
}

/// A peer's region, as its owner described it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RemoteRegion {
    /// The incarnation of the peer that owns the region; later incarnations refuse the description.
    pub incarnation: Incarnation,
    /// The region's id at its owner.
    pub id: RegionId,
    /// The start address in the owner's process; zero for memory without one.
    pub addr: u64,
    /// The length in bytes.
    pub len: u64,
    /// Access that peers have to the region.
    pub access: Access,
}

impl RemoteRegion {
    /// The description as bytes, to be sent to a peer by any means.
    pub fn to_bytes(&self) -> Vec<u8> {
        pack::encode(self)
    }

    /// Parses the bytes of [`RemoteRegion::to_bytes`].
    ///
    /// # Errors
    /// `InvalidArgument` if the bytes are not a region's description.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        pack::decode(bytes).map_err(|e| Error::invalid("not a region's description").caused_by(e))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::table::RegionTable;

    #[test]
    fn a_description_round_trips_through_bytes_and_json() {
        let table = RegionTable::default();
        let incarnation = Incarnation(u128::MAX - 7);
        let region =
            table.insert(incarnation, 0x1000, 16, Access::READ, Backing::Borrowed).expect("free");
        let described = region.remote();
        assert_eq!(RemoteRegion::from_bytes(&described.to_bytes()).expect("ours"), described);
        let longer = [described.to_bytes(), vec![0]].concat();
        assert!(RemoteRegion::from_bytes(&longer).is_err(), "trailing bytes are refused");
        let json = serde_json::to_string(&described).expect("plain fields");
        assert!(json.contains("\"fffffffffffffffffffffffffffffff8\""), "{json}");
        let back: RemoteRegion = serde_json::from_str(&json).expect("ours");
        assert_eq!(back, described);
        let cut = json.replace("fffffff8", "");
        assert!(serde_json::from_str::<RemoteRegion>(&cut).is_err(), "{cut}");
    }
}
