//! Eviction: selects the nodes that leave when a page is wanted, and removes dead nodes.

use super::{AGE_BITS, BACKGROUND_PER_BLOCK, Group};
use crate::NONE;
use crate::events::{EventKind, Tier};
use crate::shared::Shared;
use crate::transfer::{Action, Block, Discard, Job, Kind};
use crate::tree::Place;

/// A page that was taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) page: u32,
    /// The offload that still reads it.
    pub(crate) vacated_by: Option<u32>,
}

impl Group {
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
        // A block that a reset has left is yet to die, and no prompt finds it.
        let is_stale = self.tree.node(victim).file.resets != shared.resets;
        let slot = match priority >= shared.offload_priority_min && !is_stale {
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

    /// Removes a node and its descendants from lookup. Blocks in use are freed when their last use ends. Of many nodes,
    /// some are freed in later calls.
    pub(crate) fn kill(&mut self, at: u32, shared: &mut Shared) {
        self.kill_one(at, shared);
        self.reap(shared.background_per_call, shared);
    }

    /// No node can be found any more.
    pub(crate) fn kill_all(&mut self, shared: &mut Shared) {
        loop {
            let first = self.tree.children(NONE).next();
            let Some(first) = first else { break };
            self.kill_one(first, shared);
        }
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

    /// Frees the node's slot.
    pub(crate) fn free_slot(&mut self, at: u32, shared: &mut Shared) {
        let node = self.tree.node_mut(at);
        let slot = std::mem::replace(&mut node.slot, NONE);
        if slot == NONE {
            return;
        }
        if let Some(directory) = node.file.directory.clone() {
            let (key, mode, group, resets) =
                (node.key, node.file.mode, self.index, node.file.resets);
            // The block may have been computed and offloaded again since this node died.
            let file = &self.tree.node(at).file;
            let other = self.tree.find(key).map(|other| self.tree.node(other));
            let is_needed = other.is_some_and(|other| other.slot != NONE && other.file == *file);
            if is_needed {
                return self.free_slots.push(slot);
            }
            let discard = Discard { directory, mode, group, key, resets };
            shared.actions.push_back(Action::Discard(discard));
        }
        self.free_slots.push(slot);
    }
}
