//! The pools, the tree and the eviction queues of one group.
//!
//! A page (a block of the primary pool) is free, or has one owner: a node, or a sequence. A slot (a block of the
//! secondary pool) is free, or a node's. A transfer never owns a block. When an offload takes a node's page away, the
//! page belongs at once to whoever wanted it, who waits for the transfer (`busy`); if nobody wants it any more, the
//! transfer's end frees it.
//!
//! What is held has a prefix that is held. A node in primary has its prefix in primary. So a node can leave primary if
//! it has no child there, and secondary if it has no child at all, and both queues have only such nodes.

use crate::NONE;
use crate::events::{EventKind, Tier};
use crate::heap::IndexedHeap;
use crate::key::Key;
use crate::retention::{FilePlace, PRIORITY_DEFAULT, Retention};
use crate::shared::Shared;
use crate::transfer::{Action, Block, Job, Kind, file_name};
use crate::tree::{Place, Tree};

/// Below the priority in a key of an eviction queue: counts of releases.
const AGE_BITS: u32 = 56;

/// Retentions that end when a block is taken, or released with a retention: more than one, so that they are made up for.
/// As many nodes with a dead parent die when a block is taken.
const BACKGROUND_PER_BLOCK: u32 = 2;

/// A page for whoever asked for one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) page: u32,
    /// The offload that still reads it.
    pub(crate) vacated_by: Option<u32>,
}

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) index: u16,
    pub(crate) tree: Tree,
    pub(crate) free_pages: Vec<u32>,
    pub(crate) free_slots: Vec<u32>,
    /// Slots in all.
    slots: usize,
    /// Of pages of sequences: the transfer that must end before the page is used or freed.
    pub(crate) busy: Vec<u32>,
    pub(crate) primary_queue: IndexedHeap,
    pub(crate) secondary_queue: IndexedHeap,
    /// When the retention of nodes that nobody holds ends.
    pub(crate) expiring: IndexedHeap,
    /// Nodes in primary that nobody holds.
    pub(crate) idle: u32,
    /// Dead nodes whose children are yet to die. These can't be found by a prompt any more.
    reaped: Vec<u32>,
}

impl Group {
    pub(crate) fn new(index: u16, pages: u32, slots: u32, tree: Tree) -> Self {
        let nodes = pages as usize + slots as usize;
        Self {
            index,
            tree,
            free_pages: (0..pages).rev().collect(),
            free_slots: (0..slots).rev().collect(),
            slots: slots as usize,
            busy: vec![NONE; pages as usize],
            primary_queue: IndexedHeap::new(nodes),
            secondary_queue: IndexedHeap::new(nodes),
            expiring: IndexedHeap::new(nodes),
            idle: 0,
            reaped: Vec::new(),
        }
    }

    /// Nodes that there can be.
    pub(crate) fn nodes_max(&self) -> usize {
        self.busy.len() + self.slots
    }

    /// Puts a node into the queue where it belongs now, or into none.
    pub(crate) fn requeue(&mut self, at: u32) {
        let node = self.tree.node(at);
        let is_free = node.holders == 0;
        let (primary, secondary) = match node.place {
            Place::Primary => (is_free && node.primary_children == 0, false),
            Place::Secondary => (false, is_free && node.first_child == NONE),
            Place::Offloading | Place::Onboarding | Place::Dead => (false, false),
        };
        let key = u64::from(node.retention.priority) << AGE_BITS | node.last_use;
        for (queue, is_in) in
            [(&mut self.primary_queue, primary), (&mut self.secondary_queue, secondary)]
        {
            match is_in {
                true => queue.insert(at, key),
                false => _ = queue.remove(at),
            }
        }
    }

    /// One more sequence, pin or copy needs the node.
    pub(crate) fn hold(&mut self, at: u32) {
        let node = self.tree.node_mut(at);
        node.holders += 1;
        if node.holders == 1 {
            self.idle -= u32::from(node.place == Place::Primary);
            self.primary_queue.remove(at);
            self.secondary_queue.remove(at);
            self.expiring.remove(at);
        }
    }

    /// One less. The last one begins the time of its retention.
    pub(crate) fn unhold(&mut self, at: u32, shared: &mut Shared) {
        let node = self.tree.node_mut(at);
        node.holders -= 1;
        if node.place == Place::Dead {
            return self.retire(at, shared);
        }
        if node.holders > 0 {
            return;
        }
        node.last_use = shared.next_tick();
        self.idle += u32::from(node.place == Place::Primary);
        if let Retention { priority, duration_ms: Some(duration_ms) } = node.retention
            && priority != PRIORITY_DEFAULT
        {
            self.expiring.insert(at, shared.now_ms.saturating_add(duration_ms));
            self.expire(BACKGROUND_PER_BLOCK, shared);
        }
        self.requeue(at);
    }

    /// Changes what a node is worth.
    pub(crate) fn retain(&mut self, at: u32, retention: Retention, shared: &mut Shared) {
        let node = self.tree.node_mut(at);
        let (key, old) = (node.key, node.retention.priority);
        node.retention = retention;
        if old != retention.priority {
            let new = retention.priority;
            shared.events.push(self.index, EventKind::Reprioritized { key, old, new });
        }
    }

    /// Ends the retention of at most `most` nodes. Returns whether there are more to end.
    pub(crate) fn expire(&mut self, most: u32, shared: &mut Shared) -> bool {
        for done in 0.. {
            match self.expiring.peek() {
                Some((until_ms, _)) if until_ms > shared.now_ms => break,
                Some(_) if done == most => return true,
                Some((_, at)) => {
                    self.expiring.remove(at);
                    self.retain(at, Retention::DEFAULT, shared);
                    self.requeue(at);
                }
                None => break,
            }
        }
        false
    }

    /// A page that is free, or that the node gives up which is worth least. None: all are held.
    pub(crate) fn take_page(&mut self, shared: &mut Shared) -> Option<Taken> {
        if self.free_pages.is_empty() {
            self.expire(BACKGROUND_PER_BLOCK, shared);
            self.reap(BACKGROUND_PER_BLOCK, shared);
        }
        if let Some(page) = self.free_pages.pop() {
            return Some(Taken { page, vacated_by: None });
        }
        let (key, victim) = self.primary_queue.peek()?;
        let priority = (key >> AGE_BITS) as u8;
        let slot = match priority >= shared.offload_priority_min {
            true => self.take_slot(priority, shared),
            false => None,
        };
        let Some(slot) = slot else {
            self.kill(victim, shared);
            let page = self.free_pages.pop().expect("the victim's page");
            return Some(Taken { page, vacated_by: None });
        };
        // A block behind the victim may have left to make room, which has queued it again.
        self.primary_queue.remove(victim);
        self.idle -= 1;
        let node = self.tree.node_mut(victim);
        let page = std::mem::replace(&mut node.page, NONE);
        let (key, parent, file) = (node.key, node.parent, node.file.clone());
        let job = Job {
            kind: Kind::Offload,
            group: self.index,
            from: Block { tier: Tier::Primary, index: page },
            to: Block { tier: Tier::Secondary, index: slot },
            node: victim,
            tokens: shared.tokens_per_block,
            key,
            file,
        };
        let transfer = shared.start(job, [None; 2]);
        let node = self.tree.node_mut(victim);
        node.place = Place::Offloading;
        node.slot = slot;
        node.transfer = transfer;
        self.primary_child_left(parent);
        Some(Taken { page, vacated_by: Some(transfer) })
    }

    /// A slot that is free, or of a node that is not worth more than a node of this priority.
    fn take_slot(&mut self, priority: u8, shared: &mut Shared) -> Option<u32> {
        if self.free_slots.is_empty() {
            let (key, least) = self.secondary_queue.peek()?;
            if (key >> AGE_BITS) as u8 > priority {
                return None;
            }
            self.kill(least, shared);
        }
        self.free_slots.pop()
    }

    pub(crate) fn primary_child_left(&mut self, parent: u32) {
        if parent != NONE {
            self.tree.node_mut(parent).primary_children -= 1;
            self.requeue(parent);
        }
    }

    pub(crate) fn primary_child_came(&mut self, parent: u32) {
        if parent != NONE {
            self.tree.node_mut(parent).primary_children += 1;
        }
    }

    /// The node and all behind it can't be found any more. What they own is freed when it is in no use; what many nodes
    /// own, in later calls.
    pub(crate) fn kill(&mut self, at: u32, shared: &mut Shared) {
        self.kill_one(at, shared);
        self.reap(shared.background_per_call, shared);
    }

    /// The node can't be found any more. Its children have a dead parent, so no prompt finds them.
    pub(crate) fn kill_one(&mut self, at: u32, shared: &mut Shared) {
        self.tree.detach(at);
        self.tree.forget(at);
        self.primary_queue.remove(at);
        self.secondary_queue.remove(at);
        self.expiring.remove(at);
        let node = self.tree.node_mut(at);
        let was_idle = node.place == Place::Primary && node.holders == 0;
        self.idle -= u32::from(was_idle);
        let (parent, was_in_primary) = (node.parent, node.place.is_in_primary());
        node.place = Place::Dead;
        shared.events.push(self.index, EventKind::Removed { key: node.key });
        if node.first_child != NONE {
            node.is_reaped = true;
            self.reaped.push(at);
        }
        self.retire(at, shared);
        match parent {
            NONE => {}
            _ if was_in_primary => self.primary_child_left(parent),
            _ => self.requeue(parent),
        }
    }

    /// At most `most` nodes die whose parents are dead. Returns whether there are more.
    pub(crate) fn reap(&mut self, most: u32, shared: &mut Shared) -> bool {
        let mut left = most;
        while let Some(&parent) = self.reaped.last() {
            match self.tree.node(parent).first_child {
                NONE => {
                    self.reaped.pop();
                    self.tree.node_mut(parent).is_reaped = false;
                    self.retire(parent, shared);
                }
                _ if left == 0 => return true,
                child => {
                    left -= 1;
                    self.kill_one(child, shared);
                }
            }
        }
        false
    }

    /// Frees what a dead node owns, unless it is in use.
    pub(crate) fn retire(&mut self, at: u32, shared: &mut Shared) {
        let node = self.tree.node_mut(at);
        // Copies that read the slot do not need the page.
        if node.holders > node.slot_readers || node.transfer != NONE {
            return;
        }
        let is_done = node.holders == 0;
        match std::mem::replace(&mut node.page, NONE) {
            NONE => {}
            page => self.free_pages.push(page),
        }
        if is_done {
            self.free_slot(at, shared);
            if !self.tree.node(at).is_reaped {
                self.tree.release(at);
            }
        }
    }

    /// The node no longer needs its slot.
    pub(crate) fn free_slot(&mut self, at: u32, shared: &mut Shared) {
        let node = self.tree.node_mut(at);
        let slot = std::mem::replace(&mut node.slot, NONE);
        if slot == NONE {
            return;
        }
        if let Some(directory) = node.file.directory.clone() {
            let (key, group) = (node.key, self.index);
            // The block may have been computed and offloaded again since this node died.
            let other = self.tree.find(key).map(|other| self.tree.node(other));
            let is_needed = other.is_some_and(|other| {
                other.slot != NONE && other.file.directory.as_ref() == Some(&directory)
            });
            if is_needed {
                return self.free_slots.push(slot);
            }
            let file_name = file_name(key, group);
            shared.actions.push_back(Action::Discard { directory, group, file_name });
        }
        self.free_slots.push(slot);
    }

    /// Brings a node back that a sequence holds. False: no page is left.
    pub(crate) fn onboard(&mut self, at: u32, shared: &mut Shared) -> bool {
        let Some(taken) = self.take_page(shared) else { return false };
        let node = self.tree.node(at);
        let (key, parent, file) = (node.key, node.parent, node.file.clone());
        let offload = (node.place == Place::Offloading).then_some(node.transfer);
        let job = Job {
            kind: Kind::Onboard,
            group: self.index,
            from: Block { tier: Tier::Secondary, index: node.slot },
            to: Block { tier: Tier::Primary, index: taken.page },
            node: at,
            tokens: shared.tokens_per_block,
            key,
            file,
        };
        let transfer = shared.start(job, [offload, taken.vacated_by]);
        let node = self.tree.node_mut(at);
        node.place = Place::Onboarding;
        node.page = taken.page;
        node.transfer = transfer;
        self.primary_child_came(parent);
        true
    }

    /// Copies the first tokens of a node to a page of a sequence. The node is held until the copy has ended. None: no
    /// page is left.
    pub(crate) fn copy_part(
        &mut self,
        at: u32,
        tokens: u32,
        shared: &mut Shared,
    ) -> Option<(u32, u32)> {
        let taken = self.take_page(shared)?;
        let node = self.tree.node(at);
        let (from, file) = match node.place {
            Place::Primary => {
                (Block { tier: Tier::Primary, index: node.page }, FilePlace::default())
            }
            _ => (Block { tier: Tier::Secondary, index: node.slot }, node.file.clone()),
        };
        let (key, is_in_slot) = (node.key, from.tier == Tier::Secondary);
        self.tree.node_mut(at).slot_readers += u32::from(is_in_slot);
        let job = Job {
            kind: Kind::Partial,
            group: self.index,
            from,
            to: Block { tier: Tier::Primary, index: taken.page },
            node: at,
            tokens,
            key,
            file,
        };
        let transfer = shared.start(job, [taken.vacated_by, None]);
        self.busy[taken.page as usize] = transfer;
        Some((taken.page, transfer))
    }

    /// Takes the page of a node that nobody uses; the node is gone.
    pub(crate) fn take_over(&mut self, at: u32, shared: &mut Shared) -> u32 {
        let page = std::mem::replace(&mut self.tree.node_mut(at).page, NONE);
        self.kill(at, shared);
        page
    }

    /// A sequence no longer needs a page of its own.
    pub(crate) fn free_page(&mut self, page: u32, shared: &mut Shared) {
        match self.busy[page as usize] {
            NONE => self.free_pages.push(page),
            transfer => shared.transfers.entry(transfer).frees_page = true,
        }
    }

    /// A transfer no longer touches the page of a sequence.
    pub(crate) fn page_settled(&mut self, page: u32, transfer: u32, frees_page: bool) {
        if self.busy[page as usize] == transfer {
            self.busy[page as usize] = NONE;
            if frees_page {
                self.free_pages.push(page);
            }
        }
    }

    /// Whether a node's content can be read now.
    pub(crate) fn is_readable(&self, at: u32) -> bool {
        matches!(self.tree.node(at).place, Place::Primary | Place::Secondary)
    }

    /// The node of a key behind a node.
    pub(crate) fn child(&self, parent: u32, key: Key) -> Option<u32> {
        self.tree.find(key).filter(|&at| self.tree.node(at).parent == parent)
    }
}
