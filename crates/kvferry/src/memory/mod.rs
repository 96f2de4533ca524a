//! Memory: regions, the gates that stop copiers, and the cursors that transports send from and
//! receive into.
//!
//! This is the only module of the crate with `unsafe`. The argument for it:
//!
//! 1. The caller of `Agent::register` promises that a range stays mapped until it is unregistered.
//! 2. A span of the range exists only inside a gate, after its region was seen alive inside that
//!    gate ([`cursor`]).
//! 3. `unregister` marks the region dead and then waits until every gate was seen empty ([`gate`]),
//!    until started device copies have ended ([`device`]), and until transports have released what they
//!    keep for the region ([`user`]).
//!
//! So no span outlives the promise.

pub(crate) mod cursor;
pub(crate) mod device;
#[cfg(feature = "fuzzing")]
pub(crate) mod fuzzing;
pub(crate) mod gate;
pub(crate) mod held;
pub(crate) mod packed;
pub(crate) mod pieces;
pub(crate) mod region;
pub(crate) mod remote;
pub(crate) mod stages;
mod staging;
pub(crate) mod table;
pub(crate) mod user;

pub use device::{After, Device, DeviceCopy, DeviceMemory, DevicePiece, Happened};
pub use region::{Access, Region, RemoteRegion};
pub use stages::StagePool;

use crate::sync::Arc;
use cursor::Cursor;
use device::Direction;
use kvferry_proto::{RegionId, Timestamp, WireCode};
use pieces::{Pieces, Position};
use smallvec::SmallVec;

/// Copiers that may still touch memory that was unregistered.
#[derive(Debug)]
pub(crate) struct Unquiet {
    /// Copiers of this process that hang.
    pub(crate) stuck: Vec<gate::Stuck>,
    /// A region that a device or a file operation still copies, or that a transport has not released.
    pub(crate) copied: Option<RegionId>,
    /// Copiers of other processes and of devices.
    pub(crate) occupied: Vec<Arc<dyn user::Copier>>,
}

/// An agent's memory: its regions, and their copiers.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) regions: table::RegionTable,
    /// Copiers of this process.
    pub(crate) gates: gate::Gates,
}

impl Memory {
    /// See [`Core::cursor_at`](crate::core::Core::cursor_at).
    pub(crate) fn cursor_at(
        &self,
        direction: Direction,
        addr: u64,
        len: u64,
        gate: &Arc<gate::Gate>,
        wake: &stages::Wake,
    ) -> Result<Cursor, WireCode> {
        let need = match direction {
            Direction::In => Access::WRITE,
            Direction::Out => Access::READ,
        };
        let mut pieces = Pieces::default();
        let tables = self.regions.read();
        // The table takes lengths of native descriptors; longer ranges are checked here.
        let head = u32::try_from(len).unwrap_or(u32::MAX);
        let (region, offset) = tables.resolve(RegionId::ABSOLUTE, addr, head, need)?;
        let end = offset.checked_add(len).ok_or(WireCode::Overflow)?;
        if end > region.len as u64 {
            return Err(WireCode::Straddles);
        }
        if len > 0 {
            pieces.push(region, offset, len);
        }
        let (gate, wake) = (Arc::clone(gate), Arc::clone(wake));
        Ok(Cursor::new(direction, Arc::new(pieces), Position::default(), len, gate, wake))
    }

    /// Waits until nothing touches these regions, which were removed from the table, at most until `until`.
    /// Copiers of other regions count as well if `are_all`.
    ///
    /// All that may be inside is noted first, so that one copier that hangs has no other one that has left
    /// since be reported. If anything may still touch them then, they are in quarantine when this returns.
    pub(crate) fn quiesce<'a>(
        &self,
        removed: impl IntoIterator<Item = &'a Region, IntoIter: Clone>,
        are_all: bool,
        until: Timestamp,
    ) -> Unquiet {
        let removed = removed.into_iter();
        let ids: SmallVec<[RegionId; 16]> = removed.clone().map(Region::id).collect();
        let concerned = (!are_all).then_some(&ids[..]);
        let mut stuck = self.gates.inside(concerned);
        let mut occupied = self.regions.copiers(concerned);
        removed.clone().for_each(|region| region.0.keys.revoke());
        stuck.retain(|copier| !copier.wait(until));
        // Copies of devices and files that were started before the removal end on their own, or hang.
        let copied = table::RegionTable::wait_for_release(removed.clone(), until);
        occupied.retain(|copier| !copier.wait(until));
        if !stuck.is_empty() || copied.is_some() || !occupied.is_empty() {
            self.regions.quarantine(removed, &occupied, &stuck);
        }
        Unquiet { stuck, copied, occupied }
    }
}
