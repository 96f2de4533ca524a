//! The pools, the tree and the eviction queues of one group.
//!
//! A page (a block of the primary pool) is free, or has one owner: a node, or a sequence. A slot (a block of the
//! secondary pool) is free, or a node's. A transfer never owns a block. When an offload takes a node's page away, the
//! page belongs at once to the sequence or the node that takes it, which waits for the transfer (`busy`). If a sequence
//! gives up the page before, the transfer's end frees it.
//!
//! What is held has a prefix that is held. A node in primary has its prefix in primary. So a node can leave primary if
//! it has no child there, and secondary if it has no child at all, and both queues have only such nodes.

mod evict;
mod pages;

use crate::NONE;
use crate::events::{Diff, EventKind};
use crate::heap::IndexedHeap;
use crate::key::Key;
use crate::retention::{PRIORITY_DEFAULT, Retention};
use crate::shared::Shared;
use crate::tree::{Place, Tree};

/// Below the priority in a key of an eviction queue: counts of releases.
const AGE_BITS: u32 = 56;

/// Retentions that end when a block is taken, or released with a retention: more than one, so that they are made up for.
/// As many nodes with a dead parent die when a block is taken.
const BACKGROUND_PER_BLOCK: u32 = 2;

#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) index: u16,
    pub(crate) tree: Tree,
    pub(crate) free_pages: Vec<u32>,
    pub(crate) free_slots: Vec<u32>,
    /// Slots in all.
    slots: usize,
    /// Transfer that must end before a sequence's page is used or freed, indexed by page.
    pub(crate) busy: Vec<u32>,
    pub(crate) primary_queue: IndexedHeap,
    pub(crate) secondary_queue: IndexedHeap,
    /// Times, in milliseconds, at which the retentions of nodes without a holder end.
    pub(crate) expiring: IndexedHeap,
    /// Nodes in primary without a holder.
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

    /// Adds a holder: a sequence, pin or copy that needs the node.
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

    /// Removes a holder. When the last one goes, the duration of the node's retention begins.
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
            let priority = Some(Diff { old, new: retention.priority });
            shared.events.push(self.index, EventKind::Updated { key, tier: None, priority });
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

    /// Whether a node's content can be read now.
    pub(crate) fn is_readable(&self, at: u32) -> bool {
        matches!(self.tree.node(at).place, Place::Primary | Place::Secondary)
    }

    /// The node of a key behind a node.
    pub(crate) fn child(&self, parent: u32, key: Key) -> Option<u32> {
        self.tree.find(key).filter(|&at| self.tree.node(at).parent == parent)
    }
}
