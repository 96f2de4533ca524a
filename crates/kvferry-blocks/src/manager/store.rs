//! Blocks that were computed can be reused, and sequences end.

use super::BlockManager;
use crate::NONE;
use crate::config::Error;
use crate::events::EventKind;
use crate::group::Group;
use crate::key::Key;
use crate::sequence::{Row, SequenceId, SequenceRequest};
use crate::shared::Shared;
use crate::tree::Place;

impl BlockManager {
    /// The first blocks of a sequence are computed, and can be reused from now on. `keys` are those of the sequence's
    /// blocks from its first one; those that were stored already are compared. `tokens` are the sequence's, or empty.
    ///
    /// Returns how many blocks of the sequence are stored in all groups. They may be fewer than `keys`: a block that a
    /// transfer still concerns, and those behind it, are not stored now.
    pub fn store(
        &mut self,
        sequence: SequenceId,
        keys: &[Key],
        tokens: &[u32],
    ) -> Result<u32, Error> {
        let at = self.sequence(sequence)?;
        self.store_at(at, keys, tokens)
    }

    /// Ends a sequence, after [`BlockManager::store`]. For a sequence that was aborted, the caller gives the keys of what
    /// is computed, or none. Stored blocks stay in the cache until they are evicted.
    pub fn free(
        &mut self,
        sequence: SequenceId,
        keys: &[Key],
        tokens: &[u32],
        now_ms: u64,
    ) -> Result<(), Error> {
        let at = self.sequence(sequence)?;
        self.store_at(at, keys, tokens)?;
        self.advance(now_ms);
        self.truncate(at, 0);
        self.sequences.close(at);
        Ok(())
    }

    fn store_at(&mut self, at: u32, keys: &[Key], tokens: &[u32]) -> Result<u32, Error> {
        self.check_store(at, keys, tokens)?;
        let sequence = self.sequences.at_mut(at);
        let mut stored = usize::MAX;
        for (group, row) in self.groups.iter_mut().zip(&mut sequence.rows) {
            group.store(row, &sequence.wish, keys, tokens, &mut self.shared);
            stored = stored.min(row.nodes.len());
        }
        Ok(stored as u32)
    }

    fn check_store(&self, at: u32, keys: &[Key], tokens: &[u32]) -> Result<(), Error> {
        let sequence = self.sequences.at(at);
        let block = self.shared.tokens_per_block as usize;
        let (given, full) = (keys.len(), sequence.len_tokens as usize / block);
        if given > full {
            return Err(Error::Request(format!(
                "{given} keys for a sequence of {} tokens: it has {full} full blocks",
                sequence.len_tokens
            )));
        }
        if !tokens.is_empty() && tokens.len() < given * block {
            return Err(Error::Request(format!(
                "{} tokens for {given} full blocks: give {} or more, or none",
                tokens.len(),
                given * block
            )));
        }
        for (group, row) in self.groups.iter().zip(&sequence.rows) {
            let mut pairs = (0..).zip(row.nodes.iter().zip(keys));
            let other = pairs.find(|(_, (node, key))| group.tree.node(**node).key != **key);
            if let Some((block, _)) = other {
                return Err(Error::KeyMismatch { block });
            }
        }
        Ok(())
    }
}

impl Group {
    /// Adds the blocks of a row to the tree, up to the first one that can't be now.
    fn store(
        &mut self,
        row: &mut Row,
        wish: &SequenceRequest,
        keys: &[Key],
        tokens: &[u32],
        shared: &mut Shared,
    ) {
        let block = shared.tokens_per_block;
        for (at, &key) in keys.iter().enumerate().skip(row.nodes.len()) {
            let page = row.pages[at];
            if self.busy[page as usize] != NONE {
                return;
            }
            let parent = at.checked_sub(1).map_or(NONE, |before| row.nodes[before]);
            let first_token = at as u32 * block;
            let found = self.tree.find(key);
            // A node whose prefix was removed, or that a reset has left, is yet to die.
            let is_orphan = found.is_some_and(|node| {
                self.is_orphan(node) || self.tree.node(node).file.resets != shared.resets
            });
            if let (Some(node), true) = (found, is_orphan) {
                self.kill_one(node, shared);
            }
            let node = match found.filter(|_| !is_orphan) {
                Some(node) => match self.adopt(node, parent, page, shared) {
                    true => node,
                    false => return,
                },
                None => {
                    while self.tree.is_full() && self.reap(1, shared) {}
                    if self.tree.is_full() {
                        return;
                    }
                    let from = first_token as usize;
                    let tokens = tokens.get(from..from + block as usize).unwrap_or_default();
                    let node = self.tree.link(key, parent, tokens, wish.salt);
                    let known = self.tree.node_mut(node);
                    known.place = Place::Primary;
                    known.page = page;
                    known.holders = 1;
                    known.file = wish.file.clone();
                    known.retention = wish.retention_at(first_token).unwrap_or_default();
                    let priority = known.retention.priority;
                    let parent_key = (parent != NONE).then(|| self.tree.node(parent).key);
                    self.primary_child_came(parent);
                    shared.events.push(
                        self.index,
                        EventKind::Stored { key, parent: parent_key, tokens: block, priority },
                    );
                    row.nodes.push(node);
                    continue;
                }
            };
            if let Some(retention) = wish.retention_at(first_token) {
                self.retain(node, retention, shared);
            }
            row.nodes.push(node);
        }
    }

    fn is_orphan(&self, at: u32) -> bool {
        let parent = self.tree.node(at).parent;
        parent != NONE && self.tree.node(parent).place == Place::Dead
    }

    /// Holds a node that another sequence has stored, of the same content as `page`. A node in secondary gets the page.
    /// False: the node is on its way, or its prefix is another one.
    fn adopt(&mut self, at: u32, parent: u32, page: u32, shared: &mut Shared) -> bool {
        let node = self.tree.node(at);
        match node.place {
            _ if node.parent != parent => false,
            Place::Primary => {
                self.hold(at);
                true
            }
            Place::Secondary if node.holders == 0 => {
                self.hold(at);
                self.free_slot(at, shared);
                let node = self.tree.node_mut(at);
                node.place = Place::Primary;
                node.page = page;
                let kind = EventKind::onboarded(node.key);
                self.primary_child_came(parent);
                shared.events.push(self.index, kind);
                true
            }
            _ => false,
        }
    }
}
