//! This agent's memory, as processes of this host reach it.

use super::registry::Registry;
use super::writers::{Writer, Writers};
use crate::memory::region::RegionInner;
use crate::memory::user::{Copier, MemoryUser, RegionKey};
use crate::sync::{Arc, Mutex, Weak};
use kvferry_proto::{LocalPacket, RegionId, WireCode};
use kvferry_sys::alive::AliveMark;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// The table of regions, and the processes that copy.
#[derive(Debug)]
pub(super) struct OwnMemory {
    registry: Mutex<Registry>,
    pub(super) writers: Writers,
}

impl OwnMemory {
    pub(super) fn new(registry: Registry) -> Arc<Self> {
        Arc::new(Self { registry: Mutex::new(registry), writers: Writers::default() })
    }

    /// A read-only descriptor of the table, for a writer.
    pub(super) fn registry_fd(&self) -> io::Result<OwnedFd> {
        self.registry.lock().fd().try_clone_to_owned()
    }

    /// A mark by which writers learn that this thread has ended.
    pub(super) fn mark_alive(&self) -> io::Result<AliveMark> {
        self.registry.lock().mark_alive()
    }
}

impl MemoryUser for OwnMemory {
    fn registered(&self, region: &RegionInner) {
        self.registry.lock().publish(region);
    }

    fn unregistered(&self, region: &RegionInner) {
        self.registry.lock().retract(region.id);
    }

    fn copiers(&self, regions: Option<&[RegionId]>) -> Vec<Arc<dyn Copier>> {
        let inside = self.writers.inside(regions).into_iter();
        inside.map(|gate| Arc::new(gate) as Arc<dyn Copier>).collect()
    }

    fn maps_memory(&self) -> bool {
        true
    }

    fn closed(&self) {
        self.registry.lock().close();
    }
}

/// The processes that have mapped a region's memory.
struct Lent {
    region: RegionId,
    writers: Mutex<Vec<Weak<Writer>>>,
}

impl RegionKey for Lent {
    /// Tells the processes to unmap the region. One whose socket is full keeps the memory mapped until it
    /// asks for other memory or its session ends.
    fn revoke(&self) {
        let mut writers = self.writers.lock();
        for writer in writers.drain(..).filter_map(|writer| writer.upgrade()) {
            let unmap = LocalPacket::Unmapped { region: self.region };
            let _ = writer.channel.send(&unmap.encode(), &[]);
        }
    }

    /// The gates tell whether a process still copies; memory that it merely has mapped, it does not touch.
    fn release(&self) -> bool {
        true
    }
}

/// Sends a writer the memory of a region, if it is registered.
pub(super) fn lend(writer: &Arc<Writer>, id: RegionId, region: Option<&RegionInner>) {
    let answer = |code, len, fds: &[BorrowedFd<'_>]| {
        writer.channel.send(&LocalPacket::Mapped { region: id, code, len }.encode(), fds).is_ok()
    };
    if let Some((region, shared)) = region.and_then(|region| Some((region, region.shared()?))) {
        let lent = region.keys.get(|| Lent { region: id, writers: Mutex::default() });
        // `Lent::revoke` runs after the region was marked dead, and takes the same lock. Either it finds
        // the entry made here, and its message follows this one, or this function sees that the region is
        // dead.
        let mut writers = lent.writers.lock();
        if region.is_alive() {
            writers.retain(|other| other.strong_count() > 0);
            let is_new =
                !writers.iter().any(|other| std::ptr::eq(other.as_ptr(), &raw const **writer));
            if answer(WireCode::Ok, shared.len() as u64, &[shared.as_fd()]) && is_new {
                writers.push(Arc::downgrade(writer));
            }
            return;
        }
    }
    answer(WireCode::UnknownRegion, 0, &[]);
}

#[cfg(test)]
mod tests {
    use super::super::writers::WriterPage;
    use super::*;
    use crate::memory::region::{Access, Backing, Region};
    use crate::memory::table::RegionTable;
    use kvferry_proto::Incarnation;
    use kvferry_proto::local::PACKET_LEN;
    use kvferry_sys::shared::Shared;
    use kvferry_sys::unix::Channel;

    fn allocate(table: &RegionTable) -> Region {
        let shared = Shared::create("kvferry-test", 4096).expect("memory");
        let (base, len) = (shared.as_ptr() as usize, shared.len());
        let backing = Backing::Shared(Arc::new(shared));
        table.insert(Incarnation(1), base, len, Access::READ_WRITE, backing).expect("no overlap")
    }

    fn next(channel: &Channel) -> LocalPacket {
        let mut buffer = [0; PACKET_LEN];
        let len = channel.recv(&mut buffer).expect("a packet").len;
        LocalPacket::decode(&buffer[..len]).expect("well formed")
    }

    #[test]
    fn memory_that_is_sent_while_its_region_is_unregistered_is_revoked_or_not_sent() {
        let name = format!("kvferry-lend-{}", std::process::id());
        let listener = Channel::listen(name.as_bytes()).expect("a free name");
        let there = Channel::connect(name.as_bytes()).expect("just made");
        let here = Arc::new(listener.accept().expect("connected"));
        let page = WriterPage::create().expect("memory");
        let fd = page.fd().try_clone_to_owned().expect("a descriptor");
        let writer = Arc::new(Writer::open(fd, here, "test".into()).expect("a page of gates"));
        let table = RegionTable::default();
        let region = allocate(&table);
        let (id, inner) = (region.id(), &*region.0);
        for _ in 0..2 {
            lend(&writer, id, Some(inner));
            assert!(matches!(next(&there), LocalPacket::Mapped { code: WireCode::Ok, .. }));
        }
        table.remove(&region).expect("registered");
        inner.keys.revoke();
        assert_eq!(next(&there), LocalPacket::Unmapped { region: id });
        // Looked up before the region was removed, sent afterwards.
        lend(&writer, id, Some(inner));
        let refused = LocalPacket::Mapped { region: id, code: WireCode::UnknownRegion, len: 0 };
        assert_eq!(next(&there), refused, "one message for two mappings, and none follows");
        let lent = inner.keys.get(|| Lent { region: id, writers: Mutex::default() });
        assert!(lent.writers.lock().is_empty(), "no mapping is left to be revoked");
    }
}
