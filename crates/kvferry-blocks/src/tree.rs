//! The radix tree of a group's stored blocks.
//!
//! A node is a block that can be reused; its parent is the block before it. Keys are chained, so a key names a path, and
//! one table finds nodes by key. Nodes, table and lists are arrays of a fixed size: nothing is allocated or
//! rehashed while the manager is used.

use crate::NONE;
use crate::key::Key;
use crate::retention::{FilePlace, PRIORITY_DEFAULT, Retention};

/// Children that are compared with a prompt's tokens when a block is to be reused in part: the newest ones.
pub(crate) const PARTIAL_CANDIDATES: usize = 32;

/// Place of a node's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The content is in `page`.
    Primary,
    /// The content is in `slot`.
    Secondary,
    /// A transfer copies it to `slot`. The page is no longer the node's.
    Offloading,
    /// A transfer copies it from `slot` to `page`.
    Onboarding,
    /// It can't be found any more. `page` and `slot` are free when no holder and no transfer is left.
    Dead,
}

impl Place {
    /// Counts as a child of its parent that needs the parent in a page.
    pub(crate) fn is_in_primary(self) -> bool {
        matches!(self, Self::Primary | Self::Onboarding)
    }
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) key: Key,
    pub(crate) parent: u32,
    hash_next: u32,
    pub(crate) first_child: u32,
    next_sibling: u32,
    prev_sibling: u32,
    /// Children that are in primary.
    pub(crate) primary_children: u32,
    /// Blocks before it.
    pub(crate) depth: u32,
    /// Sequences, pins and partial copies that use it.
    pub(crate) holders: u32,
    /// Copies among the holders that read the slot. The node keeps its slot until they have ended.
    pub(crate) slot_readers: u32,
    pub(crate) page: u32,
    pub(crate) slot: u32,
    /// The last transfer that concerns its place.
    pub(crate) transfer: u32,
    has_tokens: bool,
    /// It is dead, and its children are yet to die: its number is not used again before.
    pub(crate) is_reaped: bool,
    /// Salt of the request that stored the block.
    salt: u64,
    pub(crate) place: Place,
    pub(crate) retention: Retention,
    /// The manager's release counter when the last holder let the node go.
    pub(crate) last_use: u64,
    /// File mode, directory and reset count under which the block was stored. It is offloaded there.
    pub(crate) file: FilePlace,
}

#[derive(Debug)]
pub(crate) struct Tree {
    nodes: Vec<Node>,
    free: Vec<u32>,
    buckets: Vec<u32>,
    first_root: u32,
    /// Tokens of each node; empty if they are not kept.
    tokens: Vec<u32>,
    tokens_per_block: usize,
    capacity: usize,
}

impl Tree {
    pub(crate) fn new(capacity: usize, tokens_per_block: usize, keeps_tokens: bool) -> Self {
        let tokens = if keeps_tokens { vec![0; capacity * tokens_per_block] } else { Vec::new() };
        Self {
            nodes: Vec::with_capacity(capacity),
            free: Vec::with_capacity(capacity),
            buckets: vec![NONE; (capacity * 2).next_power_of_two()],
            first_root: NONE,
            tokens,
            tokens_per_block,
            capacity,
        }
    }

    pub(crate) fn node(&self, node: u32) -> &Node {
        &self.nodes[node as usize]
    }

    pub(crate) fn node_mut(&mut self, node: u32) -> &mut Node {
        &mut self.nodes[node as usize]
    }

    fn bucket(&self, key: Key) -> usize {
        let mixed = (key.0[0] ^ key.0[1].rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (mixed >> 32) as usize & (self.buckets.len() - 1)
    }

    pub(crate) fn find(&self, key: Key) -> Option<u32> {
        let mut at = self.buckets[self.bucket(key)];
        while at != NONE {
            let node = self.node(at);
            if node.key == key {
                return Some(at);
            }
            at = node.hash_next;
        }
        None
    }

    /// Whether all nodes are in use. Each owns a block, or has children that are yet to die.
    pub(crate) fn is_full(&self) -> bool {
        self.free.is_empty() && self.nodes.len() == self.capacity
    }

    /// A node that can be found. The tree must not be full. Its caller sets its place.
    pub(crate) fn link(&mut self, key: Key, parent: u32, tokens: &[u32], salt: u64) -> u32 {
        let bucket = self.bucket(key);
        let sibling = *self.first_child(parent);
        let node = Node {
            key,
            parent,
            hash_next: self.buckets[bucket],
            first_child: NONE,
            next_sibling: sibling,
            prev_sibling: NONE,
            primary_children: 0,
            depth: if parent == NONE { 0 } else { self.node(parent).depth + 1 },
            holders: 0,
            slot_readers: 0,
            page: NONE,
            slot: NONE,
            transfer: NONE,
            has_tokens: !tokens.is_empty() && !self.tokens.is_empty(),
            is_reaped: false,
            salt,
            place: Place::Dead,
            retention: Retention { priority: PRIORITY_DEFAULT, duration_ms: None },
            last_use: 0,
            file: FilePlace::default(),
        };
        let at = match self.free.pop() {
            Some(at) => {
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        };
        if self.node(at).has_tokens {
            let from = at as usize * self.tokens_per_block;
            self.tokens[from..from + tokens.len()].copy_from_slice(tokens);
        }
        self.buckets[bucket] = at;
        *self.first_child(parent) = at;
        if sibling != NONE {
            self.node_mut(sibling).prev_sibling = at;
        }
        at
    }

    fn first_child(&mut self, parent: u32) -> &mut u32 {
        match parent {
            NONE => &mut self.first_root,
            parent => &mut self.nodes[parent as usize].first_child,
        }
    }

    /// Takes a node from its parent.
    pub(crate) fn detach(&mut self, at: u32) {
        let node = self.node(at);
        let (parent, next, previous) = (node.parent, node.next_sibling, node.prev_sibling);
        match previous {
            NONE => *self.first_child(parent) = next,
            previous => self.node_mut(previous).next_sibling = next,
        }
        if next != NONE {
            self.node_mut(next).prev_sibling = previous;
        }
    }

    /// Removes the node from the table of keys.
    pub(crate) fn forget(&mut self, at: u32) {
        let next = self.node(at).hash_next;
        let bucket = self.bucket(self.node(at).key);
        let mut before = self.buckets[bucket];
        if before == at {
            self.buckets[bucket] = next;
            return;
        }
        while self.node(before).hash_next != at {
            before = self.node(before).hash_next;
        }
        self.node_mut(before).hash_next = next;
    }

    /// The number may be used by another node.
    pub(crate) fn release(&mut self, at: u32) {
        let node = self.node_mut(at);
        node.file = FilePlace::default();
        self.free.push(at);
    }

    /// The newest first.
    pub(crate) fn children(&self, parent: u32) -> impl Iterator<Item = u32> {
        let first = match parent {
            NONE => self.first_root,
            parent => self.node(parent).first_child,
        };
        let listed = |at: u32| (at != NONE).then_some(at);
        std::iter::successors(listed(first), move |&at| listed(self.node(at).next_sibling))
    }

    /// Among the newest children that can be read, finds the one with the longest common prefix with `tokens`. Returns
    /// it and the length of that prefix.
    pub(crate) fn longest_common(
        &self,
        parent: u32,
        tokens: &[u32],
        salt: u64,
    ) -> Option<(u32, usize)> {
        let mut best = None;
        for child in self.children(parent).take(PARTIAL_CANDIDATES) {
            let node = self.node(child);
            // A parent has one salt.
            let is_salted = parent != NONE || node.salt == salt;
            let is_readable = matches!(node.place, Place::Primary | Place::Secondary);
            if !(node.has_tokens && is_salted && is_readable) {
                continue;
            }
            let from = child as usize * self.tokens_per_block;
            let own = &self.tokens[from..from + self.tokens_per_block];
            let common = own.iter().zip(tokens).take_while(|(own, wanted)| own == wanted).count();
            if common > best.map_or(0, |(_, most)| most) {
                best = Some((child, common));
            }
        }
        best
    }

    /// Nodes that can be found, for checks.
    pub(crate) fn live(&self) -> impl Iterator<Item = (u32, &Node)> {
        let nodes = self.nodes.iter().enumerate().map(|(at, node)| (at as u32, node));
        nodes.filter(|(_, node)| node.place != Place::Dead)
    }

    /// Nodes that own a page or a slot and can't be found, for checks.
    pub(crate) fn dead(&self) -> impl Iterator<Item = (u32, &Node)> {
        let nodes = self.nodes.iter().enumerate().map(|(at, node)| (at as u32, node));
        nodes
            .filter(|(_, node)| node.place == Place::Dead && (node.page, node.slot) != (NONE, NONE))
    }
}
