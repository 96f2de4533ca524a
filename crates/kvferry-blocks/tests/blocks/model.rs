//! The manager's policy, said naively: no queues, no free lists, no counters. All is looked for in all there is.
//!
//! A page is free if neither a block nor a sequence owns it and no copy that has not ended touches it; a slot likewise.
//! A copy may start when no earlier one that has not ended touches its target, or writes its source.

use crate::world::keys_of;
use kvferry_blocks::{Config, Key, PRIORITY_DEFAULT, Retention, RetentionConfig, Tier};
use std::collections::HashMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Primary { page: u32 },
    Secondary { slot: u32 },
    Offloading { slot: u32, copy: u64 },
    Onboarding { page: u32, copy: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Holder {
    Sequence(u64),
    Pin(u64),
    Copy(u64),
}

#[derive(Clone, Debug)]
pub(crate) struct Cached {
    pub(crate) parent: Option<Key>,
    pub(crate) salt: u64,
    pub(crate) tokens: Vec<u32>,
    pub(crate) place: Place,
    pub(crate) holders: Vec<Holder>,
    pub(crate) retention: Retention,
    pub(crate) until_ms: Option<u64>,
    pub(crate) last_use: u64,
    pub(crate) born: u64,
    /// Where the events say that it is.
    pub(crate) announced: Tier,
}

impl Cached {
    pub(crate) fn is_idle(&self) -> bool {
        matches!(self.place, Place::Primary { .. }) && self.holders.is_empty()
    }

    pub(crate) fn is_readable(&self) -> bool {
        matches!(self.place, Place::Primary { .. } | Place::Secondary { .. })
    }

    fn rank(&self) -> (u8, u64) {
        (self.retention.priority, self.last_use)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum At {
    Page(u32),
    Slot(u32),
}

#[derive(Clone, Debug)]
pub(crate) struct Copy {
    pub(crate) id: u64,
    pub(crate) group: usize,
    pub(crate) key: Key,
    pub(crate) from: At,
    pub(crate) to: At,
    pub(crate) tokens: u32,
    pub(crate) is_partial: bool,
    /// The block that it moves; its number tells it from a later block of the same key.
    pub(crate) born: u64,
    pub(crate) is_doomed: bool,
    pub(crate) waiters: Vec<u64>,
}

#[derive(Clone, Debug)]
pub(crate) struct Sequence {
    pub(crate) id: u64,
    pub(crate) salt: u64,
    pub(crate) retention: RetentionConfig,
    pub(crate) prompt_tokens: u32,
    pub(crate) tokens: Vec<u32>,
    pub(crate) reused: u32,
    /// Of each group: the page of each block, and its key if it is stored.
    pub(crate) rows: Vec<Vec<(u32, Option<Key>)>>,
}

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) pages: u32,
    pub(crate) slots: u32,
    pub(crate) cached: HashMap<Key, Cached>,
}

pub(crate) struct Model {
    pub(crate) block: usize,
    pub(crate) config: Config,
    pub(crate) groups: Vec<Group>,
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) pins: Vec<u64>,
    /// All that have not ended, and those of them that have started, each in order.
    pub(crate) copies: Vec<Copy>,
    pub(crate) started: Vec<u64>,
    pub(crate) now_ms: u64,
    count: u64,
}

impl Model {
    pub(crate) fn new(config: &Config) -> Self {
        let groups = config.groups.iter().map(|group| Group {
            pages: group.primary_blocks,
            slots: group.secondary_blocks,
            cached: HashMap::new(),
        });
        Self {
            block: config.tokens_per_block as usize,
            config: config.clone(),
            groups: groups.collect(),
            sequences: Vec::new(),
            pins: Vec::new(),
            copies: Vec::new(),
            started: Vec::new(),
            now_ms: 0,
            count: 0,
        }
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.count += 1;
        self.count
    }

    pub(crate) fn is_touched(&self, group: usize, at: At) -> bool {
        self.copies.iter().any(|copy| copy.group == group && (copy.from == at || copy.to == at))
    }

    pub(crate) fn free_pages(&self, group: usize) -> Vec<u32> {
        let cached = self.groups[group].cached.values();
        let of_blocks = cached.filter_map(|cached| match cached.place {
            Place::Primary { page } | Place::Onboarding { page, .. } => Some(page),
            _ => None,
        });
        let of_sequences =
            self.sequences.iter().flat_map(|it| it.rows[group].iter().map(|block| block.0));
        let owned: Vec<u32> = of_blocks.chain(of_sequences).collect();
        let pages = 0..self.groups[group].pages;
        pages
            .filter(|&page| !owned.contains(&page) && !self.is_touched(group, At::Page(page)))
            .collect()
    }

    pub(crate) fn free_slots(&self, group: usize) -> Vec<u32> {
        let cached = self.groups[group].cached.values();
        let owned: Vec<u32> = cached
            .filter_map(|cached| match cached.place {
                Place::Secondary { slot } | Place::Offloading { slot, .. } => Some(slot),
                _ => None,
            })
            .collect();
        let slots = 0..self.groups[group].slots;
        slots
            .filter(|&slot| !owned.contains(&slot) && !self.is_touched(group, At::Slot(slot)))
            .collect()
    }

    pub(crate) fn children(&self, group: usize, parent: Option<Key>) -> Vec<(Key, &Cached)> {
        let cached = self.groups[group].cached.iter();
        cached.filter(|(_, it)| it.parent == parent).map(|(key, it)| (*key, it)).collect()
    }

    pub(crate) fn child(&self, group: usize, parent: Option<Key>, key: Key) -> Option<&Cached> {
        self.groups[group].cached.get(&key).filter(|cached| cached.parent == parent)
    }

    pub(crate) fn cached(&mut self, group: usize, key: Key) -> &mut Cached {
        self.groups[group].cached.get_mut(&key).expect("a block that can be found")
    }

    pub(crate) fn hold(&mut self, group: usize, key: Key, holder: Holder) {
        let cached = self.cached(group, key);
        cached.holders.push(holder);
        cached.until_ms = None;
    }

    /// Nothing happens if the block can't be found any more.
    pub(crate) fn unhold(&mut self, group: usize, key: Key, holder: Holder) {
        let (now_ms, tick) = (self.now_ms, self.next());
        let Some(cached) = self.groups[group].cached.get_mut(&key) else { return };
        let Some(at) = cached.holders.iter().position(|it| *it == holder) else { return };
        cached.holders.remove(at);
        if cached.holders.is_empty() {
            cached.last_use = tick;
            let duration_ms = cached.retention.duration_ms;
            let is_limited = cached.retention.priority != PRIORITY_DEFAULT;
            cached.until_ms = duration_ms.filter(|_| is_limited).map(|ms| now_ms + ms);
        }
    }

    pub(crate) fn advance(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        for cached in self.groups.iter_mut().flat_map(|group| group.cached.values_mut()) {
            if cached.until_ms.is_some_and(|until_ms| until_ms <= now_ms) {
                cached.retention = Retention::DEFAULT;
                cached.until_ms = None;
            }
        }
    }

    /// A block and all behind it can't be found any more.
    pub(crate) fn remove(&mut self, group: usize, key: Key) {
        self.groups[group].cached.remove(&key);
        let children: Vec<Key> =
            self.children(group, Some(key)).into_iter().map(|(key, _)| key).collect();
        children.into_iter().for_each(|key| self.remove(group, key));
    }

    fn least(&self, group: usize, accepts: impl Fn(Key, &Cached) -> bool) -> Option<Key> {
        let cached = self.groups[group].cached.iter();
        let accepted = cached.filter(|(key, it)| it.holders.is_empty() && accepts(**key, it));
        accepted.min_by_key(|(_, it)| it.rank()).map(|(key, _)| *key)
    }

    /// A page, perhaps one that a copy still reads.
    pub(crate) fn take_page(&mut self, group: usize) -> Option<u32> {
        if let Some(&page) = self.free_pages(group).first() {
            return Some(page);
        }
        let victim = self.least(group, |key, cached| {
            let children = self.children(group, Some(key));
            let is_in_primary =
                |it: &Cached| matches!(it.place, Place::Primary { .. } | Place::Onboarding { .. });
            cached.is_idle() && !children.iter().any(|(_, child)| is_in_primary(child))
        })?;
        let cached = self.cached(group, victim).clone();
        let Place::Primary { page } = cached.place else { unreachable!("a victim is in primary") };
        match self.take_slot(group, cached.retention.priority) {
            None => self.remove(group, victim),
            Some(slot) => {
                let ends = (At::Page(page), At::Slot(slot));
                let copy = self.copy(group, victim, ends, self.block as u32, false);
                self.cached(group, victim).place = Place::Offloading { slot, copy };
            }
        }
        Some(page)
    }

    fn take_slot(&mut self, group: usize, priority: u8) -> Option<u32> {
        if priority < self.config.secondary_offload_min_priority {
            return None;
        }
        if let Some(&slot) = self.free_slots(group).first() {
            return Some(slot);
        }
        let least = self.least(group, |key, cached| {
            let is_leaf = self.children(group, Some(key)).is_empty();
            matches!(cached.place, Place::Secondary { .. }) && is_leaf
        })?;
        if self.cached(group, least).retention.priority > priority {
            return None;
        }
        self.remove(group, least);
        self.free_slots(group).first().copied()
    }

    /// A new copy of a block; it starts if it may.
    pub(crate) fn copy(
        &mut self,
        group: usize,
        key: Key,
        (from, to): (At, At),
        tokens: u32,
        is_partial: bool,
    ) -> u64 {
        let id = self.next();
        let born = self.cached(group, key).born;
        self.copies.push(Copy {
            id,
            group,
            key,
            from,
            to,
            tokens,
            is_partial,
            born,
            is_doomed: false,
            waiters: Vec::new(),
        });
        if self.may_start(id) {
            self.started.push(id);
        }
        id
    }

    pub(crate) fn may_start(&self, id: u64) -> bool {
        let copy = self.copies.iter().find(|copy| copy.id == id).expect("it has not ended");
        self.copies.iter().take_while(|it| it.id != id).all(|it| {
            it.group != copy.group || it.to != copy.from && it.from != copy.to && it.to != copy.to
        })
    }

    pub(crate) fn sequence(&mut self, id: u64) -> &mut Sequence {
        self.sequences.iter_mut().find(|it| it.id == id).expect("it runs")
    }

    pub(crate) fn is_ready(&self, id: u64) -> bool {
        !self.copies.iter().any(|copy| copy.waiters.contains(&id))
    }

    /// Takes all blocks from `blocks` on from a sequence, the deepest one first.
    pub(crate) fn truncate(&mut self, id: u64, blocks: usize) {
        for group in 0..self.groups.len() {
            while self.sequence(id).rows[group].len() > blocks {
                let (page, key) = self.sequence(id).rows[group].pop().expect("longer");
                for copy in self.copies.iter_mut().filter(|copy| copy.group == group) {
                    if copy.to == At::Page(page) || copy.from == At::Page(page) {
                        copy.waiters.retain(|waiter| *waiter != id);
                    }
                }
                if let Some(key) = key {
                    self.unhold(group, key, Holder::Sequence(id));
                }
            }
        }
    }

    pub(crate) fn keys(&self, id: u64, computed: usize) -> Vec<Key> {
        let sequence = self.sequences.iter().find(|it| it.id == id).expect("it runs");
        keys_of(sequence.salt, &sequence.tokens[..computed], self.block)
    }
}
