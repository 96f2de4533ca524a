//! Memory that is cut into extents of any length, in whole pages.

use crate::error::Result;
use crate::memory::{BlockMemory, PAGE};
use kvferry::{Access, Agent, Region};
use kvferry_sys::sync::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

#[derive(Debug)]
pub(super) struct Arena {
    agent: Agent,
    region: Region,
    free: Mutex<Free>,
}

impl Arena {
    pub(super) fn new(agent: &Agent, bytes: u64) -> Result<Arc<Self>> {
        let len = usize::try_from(bytes).unwrap_or(usize::MAX);
        let region = agent.allocate(len, Access::NONE)?;
        let mut free = Free::default();
        free.give(0, bytes);
        Ok(Arc::new(Self { agent: agent.clone(), region, free: Mutex::new(free) }))
    }

    /// An extent of at least `len` bytes; `None` if no free range is as long.
    pub(super) fn take(self: &Arc<Self>, len: u64) -> Option<Extent> {
        let len = len.next_multiple_of(PAGE as u64);
        let at = self.free.lock().take(len)?;
        Some(Extent { arena: Arc::clone(self), at, len })
    }

    /// Bytes of all extents.
    pub(super) fn used(&self) -> u64 {
        self.region.len() as u64 - self.free.lock().bytes
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // Fails if the agent was shut down, which unregistered it.
        let _ = self.agent.unregister(&self.region);
    }
}

/// A part of an arena, which is free again when this is dropped.
#[derive(Debug)]
pub(crate) struct Extent {
    arena: Arc<Arena>,
    at: u64,
    len: u64,
}

impl Extent {
    /// Memory of the extent's first `len` bytes.
    pub(crate) fn memory(&self, len: u64) -> BlockMemory {
        debug_assert!(len <= self.len);
        BlockMemory::new(&self.arena.region, self.at, len)
    }

    /// Copies a block to it. Returns the block's sum, of the bytes that were copied.
    pub(crate) fn fill_and_sum(&self, from: &BlockMemory) -> Result<u64> {
        debug_assert!(from.len() <= self.len);
        from.copy_and_sum(&self.arena.region, self.at)
    }
}

impl Drop for Extent {
    fn drop(&mut self) {
        self.arena.free.lock().give(self.at, self.len);
    }
}

/// The ranges that are free. None touches another one.
#[derive(Debug, Default)]
struct Free {
    /// The length of each, by where it begins.
    ranges: BTreeMap<u64, u64>,
    /// The same, by length.
    by_len: BTreeSet<(u64, u64)>,
    bytes: u64,
}

impl Free {
    /// Takes `len` bytes of the shortest range that has as many, the first of equals.
    fn take(&mut self, len: u64) -> Option<u64> {
        let (whole, at) = *self.by_len.range((len, 0)..).next()?;
        self.remove(at, whole);
        if whole > len {
            self.insert(at + len, whole - len);
        }
        Some(at)
    }

    fn give(&mut self, at: u64, len: u64) {
        let (mut at, mut len) = (at, len);
        if let Some((&before, &its_len)) = self.ranges.range(..at).next_back()
            && before + its_len == at
        {
            self.remove(before, its_len);
            (at, len) = (before, its_len + len);
        }
        if let Some(&behind) = self.ranges.get(&(at + len)) {
            self.remove(at + len, behind);
            len += behind;
        }
        self.insert(at, len);
    }

    fn insert(&mut self, at: u64, len: u64) {
        self.ranges.insert(at, len);
        self.by_len.insert((len, at));
        self.bytes += len;
    }

    fn remove(&mut self, at: u64, len: u64) {
        self.ranges.remove(&at);
        self.by_len.remove(&(len, at));
        self.bytes -= len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_never_overlap_and_what_is_given_back_is_whole_again() {
        const LEN: u64 = 1000;
        let mut rng = fastrand::Rng::with_seed(1);
        let mut free = Free::default();
        free.give(0, LEN);
        let mut owner = vec![false; 1000];
        let mut taken: Vec<(u64, u64)> = Vec::new();
        for _ in 0..20_000 {
            if rng.bool() {
                let len = rng.u64(1..60);
                match free.take(len) {
                    Some(at) => {
                        for place in at..at + len {
                            assert!(!std::mem::replace(&mut owner[place as usize], true));
                        }
                        taken.push((at, len));
                    }
                    None => {
                        let longest = owner.split(|used| *used).map(<[bool]>::len).max();
                        assert!((longest.unwrap_or(0) as u64) < len, "a range is as long");
                    }
                }
            } else if !taken.is_empty() {
                let (at, len) = taken.swap_remove(rng.usize(..taken.len()));
                owner[at as usize..(at + len) as usize].fill(false);
                free.give(at, len);
            }
            let used: u64 = taken.iter().map(|(_, len)| len).sum();
            assert_eq!(free.bytes, LEN - used);
        }
        taken.into_iter().for_each(|(at, len)| free.give(at, len));
        assert_eq!(free.ranges.into_iter().collect::<Vec<_>>(), [(0, LEN)]);
    }
}
