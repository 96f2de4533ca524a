//! The seam between memory and what reaches it by other means than this process's own copiers:
//! processes of this host, network cards, devices, the kernel.
//!
//! A transport adds a [`MemoryUser`] when it starts. The agent reports every region to it; it names its
//! [`Copier`]s: processes or devices that copy by themselves. `unregister` waits for the copiers that touch
//! the region, and keeps the range in quarantine if one does not leave.
//!
//! A [`RegionKey`] is what a transport keeps for one region: a registration with the kernel, a network
//! card or a library, a handle that was given to a peer. It is attached at the first use that needs it
//! ([`Keys::get`]) and lives as long as the region's handles. Before memory returns to its owner
//! (invariant I2), the key is *revoked*: processes that hold the memory through it are told to let go.
//! Then it is *released*, until nothing reaches the memory through it.
//!
//! | transport | memory user | key |
//! |---|---|---|
//! | `local` | the table of regions for other processes, which are its copiers | processes that have mapped the region: `revoke` tells them to unmap it |
//! | `file` | – | ranges registered with rings of io_uring: `release` ends them |
//! | one for verbs | – | a memory region per card, whose remote key peers ask for: `release` deregisters it |
//! | one for CUDA IPC | – | the exported handle and its importers: `revoke` asks them to close it, `release` is true once they have, or are gone |
//! | one for cuFile | – | the registered buffer: `release` deregisters it |

use crate::memory::region::RegionInner;
use crate::sync::{Arc, OnceLock};
use kvferry_proto::{RegionId, Timestamp};
use std::any::Any;
use std::fmt;

/// A part of the agent through which processes or devices reach memory beside the agent's own copiers.
///
/// The methods are called with the table of regions locked: they do not block, and do not use the table.
pub(crate) trait MemoryUser: fmt::Debug + Send + Sync {
    /// A region was registered.
    fn registered(&self, region: &RegionInner);

    /// A region was unregistered and is marked dead. Copiers that look for it after this call do not find
    /// it.
    fn unregistered(&self, region: &RegionInner);

    /// The copiers that may touch one of these regions now (`None`: any region). Every later one finds
    /// the region unregistered.
    fn copiers(&self, regions: Option<&[RegionId]>) -> Vec<Arc<dyn Copier>>;

    /// Whether memory that the agent allocates is to be of a kind that other processes can map.
    fn maps_memory(&self) -> bool;

    /// The agent was shut down.
    fn closed(&self);
}

/// A copier that touched memory when it was looked at, and may still do so.
pub(crate) trait Copier: fmt::Debug + Send + Sync {
    /// The peer in errors and logs.
    fn name(&self) -> &str;

    /// Whether the copier has left the memory since, or can't touch any more.
    fn is_left(&self) -> bool;

    /// Waits until the copier has left, at most until `until`. Looks at least once.
    fn wait(&self, until: Timestamp) -> bool;
}

/// What a transport keeps for one region of memory.
pub(crate) trait RegionKey: Any + Send + Sync {
    /// The region was unregistered: tells processes that hold the memory through the key to let go. Called
    /// once, before [`RegionKey::release`]. Nothing may begin to hold the memory after this call. Perhaps
    /// the table of regions is locked: it does not block, and does not use the table.
    fn revoke(&self) {}

    /// Ends what reaches the memory through the key, and refuses later uses of the key. Returns whether
    /// nothing reaches the memory any more; while it returns false, it is called again. Called when no use of the region is
    /// under way ([`RegionUse`](crate::memory::region::RegionUse)), under the conditions of [`RegionKey::revoke`].
    fn release(&self) -> bool;
}

/// The keys of one region, at most one of each type.
#[derive(Default)]
pub(crate) struct Keys(OnceLock<Box<Node>>);

struct Node {
    key: Box<dyn RegionKey>,
    revoked: OnceLock<()>,
    others: Keys,
}

impl Node {
    fn revoke(&self) {
        self.revoked.get_or_init(|| self.key.revoke());
    }

    fn release(&self) -> bool {
        // The key may have been attached after the others were revoked.
        self.revoke();
        self.key.release()
    }
}

impl Keys {
    /// The key of this type; the first call makes it.
    ///
    /// The caller holds the region meanwhile ([`RegionUse`](crate::memory::region::RegionUse)), so that the key is
    /// revoked and released before the memory returns to its owner. Otherwise the key looks whether the
    /// region is alive, under the lock under which it is revoked.
    pub(crate) fn get<K: RegionKey>(&self, make: impl Fn() -> K) -> &K {
        let mut keys = self;
        loop {
            let new = || {
                let (revoked, others) = (OnceLock::new(), Self::default());
                Box::new(Node { key: Box::new(make()), revoked, others })
            };
            let node = keys.0.get_or_init(new);
            let key: &dyn Any = &*node.key;
            if let Some(key) = key.downcast_ref() {
                return key;
            }
            keys = &node.others;
        }
    }

    fn iter(&self) -> impl Iterator<Item = &Node> {
        std::iter::successors(self.0.get(), |node| node.others.0.get()).map(|node| &**node)
    }

    /// See [`RegionKey::revoke`].
    pub(crate) fn revoke(&self) {
        self.iter().for_each(Node::revoke);
    }

    /// Releases every key, and revokes those that have not been; false if one has to be released again.
    pub(crate) fn release(&self) -> bool {
        // Each of them, though one before it is held.
        self.iter().filter(|node| !node.release()).count() == 0
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Keys[{}]", self.iter().count())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

    /// A key that something holds until the test says otherwise.
    #[derive(Default)]
    pub(crate) struct Clinging {
        pub(crate) revoked: AtomicUsize,
        pub(crate) let_go: AtomicBool,
    }

    impl RegionKey for Clinging {
        fn revoke(&self) {
            self.revoked.fetch_add(1, Ordering::SeqCst);
        }

        fn release(&self) -> bool {
            self.let_go.load(Ordering::SeqCst)
        }
    }

    /// Another type of key, which counts its releases.
    #[derive(Default)]
    struct Counting(AtomicUsize);

    impl RegionKey for Counting {
        fn release(&self) -> bool {
            self.0.fetch_add(1, Ordering::SeqCst);
            true
        }
    }

    #[test]
    fn a_region_has_one_key_of_each_type_and_all_of_them_are_asked_to_let_go() {
        let keys = Keys::default();
        assert!(keys.release(), "there is none");
        let first: *const Clinging = keys.get(Clinging::default);
        let other: *const Counting = keys.get(Counting::default);
        assert!(std::ptr::eq(first, keys.get(Clinging::default)));
        assert!(std::ptr::eq(other, keys.get(Counting::default)));
        keys.revoke();
        assert!(!keys.release(), "one is held");
        keys.get(Clinging::default).let_go.store(true, Ordering::SeqCst);
        assert!(keys.release());
        assert_eq!(keys.get(Clinging::default).revoked.load(Ordering::SeqCst), 1);
        assert_eq!(
            keys.get(Counting::default).0.load(Ordering::SeqCst),
            2,
            "also behind one that is held"
        );
    }
}
