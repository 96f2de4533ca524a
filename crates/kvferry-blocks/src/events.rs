//! KV events for routers and monitors.

use crate::key::Key;
use std::collections::VecDeque;

/// A tier of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Tier {
    /// The engine's pages. TensorRT-LLM's cache level 0.
    Primary,
    /// Host memory, or files. TensorRT-LLM's cache level 1.
    Secondary,
}

/// A change of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// The pools of a group exist. The first events of a manager, one for each group.
    Created {
        /// Blocks of the primary pool.
        primary_blocks: u32,
        /// Blocks of the secondary pool.
        secondary_blocks: u32,
    },
    /// A block can be reused.
    Stored {
        /// The block's name.
        key: Key,
        /// The block before it. None: it is the first of its prompt.
        parent: Option<Key>,
        /// Tokens in the block.
        tokens: u32,
        /// 0 to 100.
        priority: u8,
    },
    /// A block can no longer be reused.
    Removed {
        /// The block's name.
        key: Key,
    },
    /// A block has moved, which means that its copy has succeeded, or its priority has changed.
    Updated {
        /// The block's name.
        key: Key,
        /// None: it has not moved.
        tier: Option<Diff<Tier>>,
        /// None: it has the same priority.
        priority: Option<Diff<u8>>,
    },
}

impl EventKind {
    pub(crate) fn offloaded(key: Key) -> Self {
        let tier = Some(Diff { old: Tier::Primary, new: Tier::Secondary });
        Self::Updated { key, tier, priority: None }
    }

    pub(crate) fn onboarded(key: Key) -> Self {
        let tier = Some(Diff { old: Tier::Secondary, new: Tier::Primary });
        Self::Updated { key, tier, priority: None }
    }
}

/// A value that has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Diff<T> {
    /// The old value.
    pub old: T,
    /// The new value.
    pub new: T,
}

/// An event of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Counts up by one for each event of a manager, those that were dropped included.
    pub id: u64,
    /// The group whose blocks are concerned.
    pub group: u16,
    /// The change.
    pub kind: EventKind,
}

/// The newest events. When it is full, the oldest one is dropped.
#[derive(Debug)]
pub(crate) struct EventRing {
    events: VecDeque<Event>,
    capacity: usize,
    next_id: u64,
    dropped: u64,
}

impl EventRing {
    pub(crate) fn new(capacity: usize) -> Self {
        Self { events: VecDeque::with_capacity(capacity), capacity, next_id: 0, dropped: 0 }
    }

    pub(crate) fn push(&mut self, group: u16, kind: EventKind) {
        let event = Event { id: self.next_id, group, kind };
        self.next_id += 1;
        if self.events.len() == self.capacity {
            self.dropped += 1;
            if self.events.pop_front().is_none() {
                return;
            }
        }
        self.events.push_back(event);
    }

    pub(crate) fn pop(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_ring_drops_its_oldest_events_and_counts_them() {
        let removed = |n| EventKind::Removed { key: Key([n, 0]) };
        let mut ring = EventRing::new(3);
        (0..5).for_each(|n| ring.push(1, removed(n)));
        assert_eq!(ring.dropped(), 2);
        let left: Vec<_> = std::iter::from_fn(|| ring.pop()).collect();
        let wanted: Vec<_> = (2..5).map(|n| Event { id: n, group: 1, kind: removed(n) }).collect();
        assert_eq!(left, wanted);
        ring.push(0, removed(9));
        assert_eq!(ring.pop().map(|event| event.id), Some(5));
        assert_eq!(ring.dropped(), 2);
    }

    #[test]
    fn a_ring_without_capacity_only_counts() {
        let mut ring = EventRing::new(0);
        ring.push(0, EventKind::Removed { key: Key::default() });
        assert_eq!((ring.pop(), ring.dropped()), (None, 1));
    }
}
