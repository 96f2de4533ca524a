//! Blocks for sequences: what is reused, and what is taken.

use super::BlockManager;
use crate::NONE;
use crate::config::Error;
use crate::group::Group;
use crate::key::Key;
use crate::retention::{RetentionConfig, Warning};
use crate::sequence::{SequenceId, SequenceRequest};
use crate::shared::Shared;
use crate::tree::Place;
use smallvec::SmallVec;

/// A request for the blocks of a new sequence.
#[derive(Clone, Copy, Debug)]
pub struct Request<'a> {
    /// Tokens of the prompt; at least one.
    pub prompt_tokens: u32,
    /// The keys of the prompt's full blocks.
    pub keys: &'a [Key],
    /// The prompt, for the reuse of a part of a block; or empty.
    pub tokens: &'a [u32],
    /// Identifies what the KV depends on besides the tokens: model, adapter, tenant. Parts of first blocks are reused
    /// under the same salt only.
    pub salt: u64,
    /// Retention of the sequence's blocks, and how they are offloaded.
    pub retention: &'a RetentionConfig,
}

/// The blocks of a new sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Identifies the sequence in all later calls.
    pub sequence: SequenceId,
    /// Tokens of the prompt that need not be computed, if the copies succeed. At least one token is left to compute.
    pub reused_tokens: u32,
    /// Whether the blocks may be used at once. Otherwise [`Action::Ready`](crate::Action::Ready) follows.
    pub is_ready: bool,
    /// A wish of the request that was replaced.
    pub warning: Option<Warning>,
}

/// Partial reuse of a node by one group.
#[derive(Clone, Copy, Debug)]
struct Partial {
    node: u32,
    /// The node's page becomes the sequence's; otherwise its tokens are copied.
    takes_over: bool,
}

/// Partial reuse in each group; empty if there is none.
type Partials = SmallVec<[Partial; 8]>;

impl BlockManager {
    /// Gives a sequence its blocks: the longest prefix of the prompt that all groups have, a part of the block behind
    /// it, and then blocks that are free or evicted. The last token is always left to compute.
    pub fn allocate(&mut self, request: &Request<'_>, now_ms: u64) -> Result<Allocation, Error> {
        self.advance(now_ms);
        let block = self.shared.tokens_per_block;
        check(request, block)?;
        let (file, warning) = request.retention.effective(self.shared.resets);
        let Request { prompt_tokens, salt, .. } = *request;
        let wish =
            SequenceRequest { retention: request.retention.clone(), file, prompt_tokens, salt };
        let at = self.sequences.open(wish);
        let reusable = ((request.prompt_tokens - 1) / block) as usize;
        let depth = self.match_prefix(at, &request.keys[..reusable.min(request.keys.len())]);
        let (mut tokens, mut partials) = self.find_partial(at, depth, request);
        let blocks = request.prompt_tokens.div_ceil(block) as usize;
        let mut room = self.has_room(at, depth, blocks, &partials);
        if room.is_err() && !partials.is_empty() {
            (tokens, partials) = (0, Partials::new());
            room = self.has_room(at, depth, blocks, &partials);
        }
        if let Err(error) = room {
            self.sequences.at_mut(at).rows.iter_mut().for_each(|row| row.nodes.clear());
            self.sequences.close(at);
            return Err(error);
        }
        let sequence = self.sequences.at_mut(at);
        sequence.reused_tokens = depth as u32 * block + tokens;
        let reused_tokens = sequence.reused_tokens;
        self.fill(at, blocks, tokens, &partials)?;
        Ok(Allocation {
            sequence: self.sequences.id(at),
            reused_tokens,
            is_ready: self.sequences.at(at).pending == 0,
            warning,
        })
    }

    /// Makes room for more tokens of a sequence, with their retention. Returns how many blocks it has got in each group;
    /// where these are not ready at once, [`Action::Ready`](crate::Action::Ready) follows.
    pub fn append(&mut self, sequence: SequenceId, tokens: u32, now_ms: u64) -> Result<u32, Error> {
        let at = self.sequence(sequence)?;
        self.advance(now_ms);
        let sequence = self.sequences.at(at);
        let had_blocks = sequence.rows[0].pages.len();
        let len_tokens = sequence.len_tokens.checked_add(tokens).ok_or_else(|| {
            Error::Request(format!("{tokens} tokens more: a sequence has at most {}", u32::MAX))
        })?;
        let blocks = len_tokens.div_ceil(self.shared.tokens_per_block) as usize;
        let needed = blocks.saturating_sub(had_blocks) as u32;
        for (group, number) in self.groups.iter().zip(0..) {
            let available = group.free_pages.len() as u32 + group.idle;
            if needed > available {
                return Err(Error::OutOfBlocks { group: number, needed, available });
            }
        }
        if let Err(group) = self.take_pages(at, blocks) {
            self.truncate(at, had_blocks);
            return Err(Error::AwaitTransfers { group });
        }
        self.sequences.at_mut(at).len_tokens = len_tokens;
        Ok(needed)
    }

    /// Fills the sequence's rows with the nodes of the longest prefix that all groups have. They are not held yet.
    fn match_prefix(&mut self, at: u32, keys: &[Key]) -> usize {
        let sequence = self.sequences.at_mut(at);
        let mut depth = keys.len();
        for (group, row) in self.groups.iter().zip(&mut sequence.rows) {
            let mut parent = NONE;
            for &key in &keys[..depth] {
                let Some(node) = group.child(parent, key) else { break };
                row.nodes.push(node);
                parent = node;
            }
            depth = row.nodes.len();
        }
        sequence.rows.iter_mut().for_each(|row| row.nodes.truncate(depth));
        depth
    }

    /// Returns the number of tokens of the block behind the prefix that can be reused, and how each group reuses them.
    fn find_partial(&self, at: u32, depth: usize, request: &Request<'_>) -> (u32, Partials) {
        let none = (0, Partials::new());
        if !self.partial_reuse {
            return none;
        }
        let block = self.shared.tokens_per_block;
        let rows = &self.sequences.at(at).rows;
        let parent = |group: usize| rows[group].nodes.last().copied().unwrap_or(NONE);
        // The last token of the prompt is computed.
        let most = (request.prompt_tokens - 1 - depth as u32 * block).min(block);
        let first = &self.groups[0];
        let by_key = request.keys.get(depth).and_then(|&key| first.child(parent(0), key));
        let candidate = match by_key.filter(|&node| first.is_readable(node)) {
            Some(node) => Some((node, most as usize)),
            None => {
                let from = depth * block as usize;
                let tokens = request.tokens.get(from..from + most as usize).unwrap_or_default();
                first.tree.longest_common(parent(0), tokens, request.salt)
            }
        };
        let Some((node, tokens @ 1..)) = candidate else { return none };
        let key = first.tree.node(node).key;
        let of_group = |(at, group): (usize, &Group)| {
            let node = group.child(parent(at), key).filter(|&node| group.is_readable(node))?;
            let known = group.tree.node(node);
            let takes_over =
                known.place == Place::Primary && known.holders == 0 && known.first_child == NONE;
            (takes_over || self.copy_on_partial_reuse).then_some(Partial { node, takes_over })
        };
        let partials: Option<Partials> = self.groups.iter().enumerate().map(of_group).collect();
        partials.map_or(none, |partials| (tokens as u32, partials))
    }

    /// Whether each group has enough pages that are free or evictable.
    fn has_room(
        &self,
        at: u32,
        depth: usize,
        blocks: usize,
        partials: &Partials,
    ) -> Result<(), Error> {
        let rows = &self.sequences.at(at).rows;
        for (number, (group, row)) in self.groups.iter().zip(rows).enumerate() {
            let mut needed = (blocks - depth) as u32;
            let mut available = group.free_pages.len() as u32 + group.idle;
            for &node in &row.nodes {
                let node = group.tree.node(node);
                match node.place {
                    Place::Primary if node.holders == 0 => available -= 1,
                    Place::Secondary | Place::Offloading => needed += 1,
                    _ => {}
                }
            }
            if let Some(partial) = partials.get(number) {
                let node = group.tree.node(partial.node);
                available -= u32::from(node.place == Place::Primary && node.holders == 0);
                needed -= u32::from(partial.takes_over);
            }
            if needed > available {
                return Err(Error::OutOfBlocks { group: number as u16, needed, available });
            }
        }
        Ok(())
    }

    /// Holds what was matched, brings it to primary, and takes the other pages.
    fn fill(
        &mut self,
        at: u32,
        blocks: usize,
        tokens: u32,
        partials: &Partials,
    ) -> Result<(), Error> {
        let mut parts: SmallVec<[u32; 8]> = SmallVec::new();
        for number in 0..self.groups.len() {
            self.hold_prefix(at, number);
            let (group, shared) = (&mut self.groups[number], &mut self.shared);
            match partials.get(number) {
                Some(partial) if partial.takes_over => {
                    parts.push(group.take_over(partial.node, shared));
                }
                Some(partial) => {
                    group.hold(partial.node);
                    parts.push(NONE);
                }
                None => {}
            }
        }
        let filled = self.onboard_prefix(at);
        let filled = filled.and_then(|()| self.add_parts(at, tokens, partials, &mut parts));
        if let Err(group) = filled.and_then(|()| self.take_pages(at, blocks)) {
            self.give_back(at, partials, &parts);
            return Err(Error::AwaitTransfers { group });
        }
        Ok(())
    }

    /// Holds the nodes of the matched prefix, and applies the request's retention to them.
    fn hold_prefix(&mut self, at: u32, number: usize) {
        let sequence = self.sequences.at(at);
        let (group, shared) = (&mut self.groups[number], &mut self.shared);
        for (block, &node) in (0..).zip(&sequence.rows[number].nodes) {
            group.hold(node);
            if let Some(retention) = sequence.wish.retention_at(block * shared.tokens_per_block) {
                group.retain(node, retention, shared);
            }
        }
    }

    /// Gives the nodes that are held a page each, the first one first. The error is the group that has none left.
    fn onboard_prefix(&mut self, at: u32) -> Result<(), u16> {
        let sequence = self.sequences.at_mut(at);
        for (number, (group, row)) in (0u16..).zip(self.groups.iter_mut().zip(&mut sequence.rows)) {
            for &node in &row.nodes {
                let place = group.tree.node(node).place;
                let is_secondary = matches!(place, Place::Secondary | Place::Offloading);
                if is_secondary && !group.onboard(node, &mut self.shared) {
                    return Err(number);
                }
                let known = group.tree.node(node);
                row.pages.push(known.page);
                if known.place == Place::Onboarding {
                    self.shared.transfers.entry(known.transfer).waiters.push(at);
                    sequence.pending += 1;
                }
            }
        }
        Ok(())
    }

    /// The block of which a part is reused. What was dealt with is taken from `parts`.
    fn add_parts(
        &mut self,
        at: u32,
        tokens: u32,
        partials: &Partials,
        parts: &mut SmallVec<[u32; 8]>,
    ) -> Result<(), u16> {
        let sequence = self.sequences.at_mut(at);
        for (number, partial) in partials.iter().enumerate().rev() {
            let (group, row) = (&mut self.groups[number], &mut sequence.rows[number]);
            let Some(&page) = parts.last() else { break };
            if page != NONE {
                row.pages.push(page);
            } else {
                let copy = group.copy_part(partial.node, tokens, &mut self.shared);
                let (page, transfer) = copy.ok_or(number as u16)?;
                row.pages.push(page);
                self.shared.transfers.entry(transfer).waiters.push(at);
                sequence.pending += 1;
            }
            parts.pop();
        }
        Ok(())
    }

    /// Fills all rows of a sequence up to `blocks` with pages of its own. The error is the group that has none left.
    fn take_pages(&mut self, at: u32, blocks: usize) -> Result<(), u16> {
        let sequence = self.sequences.at_mut(at);
        for (number, (group, row)) in (0u16..).zip(self.groups.iter_mut().zip(&mut sequence.rows)) {
            while row.pages.len() < blocks {
                let taken = group.take_page(&mut self.shared).ok_or(number)?;
                row.pages.push(taken.page);
                if let Some(transfer) = taken.vacated_by {
                    wait(&mut self.shared, group, taken.page, transfer, at);
                    sequence.pending += 1;
                }
            }
        }
        Ok(())
    }

    /// Undoes what was done for a sequence that can't have all of its blocks. Copies that have begun go on.
    fn give_back(&mut self, at: u32, partials: &Partials, parts: &[u32]) {
        for (number, &page) in parts.iter().enumerate() {
            let (group, shared) = (&mut self.groups[number], &mut self.shared);
            match page {
                NONE => group.unhold(partials[number].node, shared),
                page => group.free_page(page, shared),
            }
        }
        // Nodes without a page yet are released as those that have one.
        for (group, row) in self.groups.iter_mut().zip(&mut self.sequences.at_mut(at).rows) {
            while row.nodes.len() > row.pages.len() {
                let node = row.nodes.pop().expect("longer than the pages");
                group.unhold(node, &mut self.shared);
            }
        }
        self.truncate(at, 0);
        self.sequences.close(at);
    }
}

/// A sequence waits until the offload of a page has ended that it was given.
fn wait(shared: &mut Shared, group: &mut Group, page: u32, transfer: u32, sequence: u32) {
    group.busy[page as usize] = transfer;
    shared.transfers.entry(transfer).waiters.push(sequence);
}

fn check(request: &Request<'_>, block: u32) -> Result<(), Error> {
    let Request { prompt_tokens, keys, tokens, .. } = *request;
    if prompt_tokens == 0 {
        return Err(Error::Request("a prompt has at least one token".into()));
    }
    let full = (prompt_tokens / block) as usize;
    if keys.len() != full {
        let given = keys.len();
        return Err(Error::Request(format!(
            "{given} keys for a prompt of {prompt_tokens} tokens: {full} are needed, one for each full block of {block}"
        )));
    }
    if !tokens.is_empty() && tokens.len() != prompt_tokens as usize {
        let given = tokens.len();
        return Err(Error::Request(format!(
            "{given} tokens for a prompt of {prompt_tokens}: give all of them, or none"
        )));
    }
    Ok(())
}
