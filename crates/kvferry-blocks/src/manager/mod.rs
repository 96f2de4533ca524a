//! [`BlockManager`], its queries, pins, and what ends a sequence.

mod allocate;
mod check;
mod finish;
mod store;

pub use allocate::{Allocation, Request};

use crate::NONE;
use crate::config::{Config, Error};
use crate::events::{Event, EventKind};
use crate::group::Group;
use crate::key::Key;
use crate::sequence::{SequenceId, Sequences};
use crate::shared::Shared;
use crate::transfer::Action;
use crate::tree::{Place, Tree};

/// Names a pin until it ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PinId(u64);

/// The number serves languages that lack such types.
impl From<PinId> for u64 {
    fn from(id: PinId) -> Self {
        id.0
    }
}

/// A number that no manager has given names no pin.
impl From<u64> for PinId {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

/// Nodes that are held, in each group.
#[derive(Debug)]
struct Pinned {
    generation: u32,
    is_open: bool,
    nodes: Vec<Vec<u32>>,
}

/// Result of a lookup of a prompt's prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// Blocks that all groups have.
    pub blocks: u32,
    /// Blocks among these that at least one group would have to onboard.
    pub secondary_blocks: u32,
}

/// Usage of a group's pools. The other blocks are in use, or under transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Primary blocks without content.
    pub primary_free: u32,
    /// Primary blocks with content that no sequence uses: they can be reused, or evicted.
    pub primary_cached: u32,
    /// Secondary blocks without content.
    pub secondary_free: u32,
}

/// Decides which blocks sequences have, which are reused, and which leave. See the [crate's documentation](crate).
#[derive(Debug)]
pub struct BlockManager {
    groups: Vec<Group>,
    shared: Shared,
    sequences: Sequences,
    pins: Vec<Pinned>,
    free_pins: Vec<u32>,
    partial_reuse: bool,
    copy_on_partial_reuse: bool,
}

/// Input: these methods, and `allocate`, `append`, `store`, `free` and `finished`, change the manager's state.
impl BlockManager {
    /// Makes a manager with empty pools.
    pub fn new(config: &Config) -> Result<Self, Error> {
        config.check()?;
        let mut shared = Shared::new(config);
        let mut groups = Vec::with_capacity(config.groups.len());
        for (at, group) in config.groups.iter().enumerate() {
            let (pages, slots) = (group.primary_blocks, group.secondary_blocks);
            let nodes = pages as usize + slots as usize;
            // Partial reuse begins with a candidate of the first group.
            let keeps_tokens = config.partial_reuse && at == 0;
            let tree = Tree::new(nodes, config.tokens_per_block as usize, keeps_tokens);
            let created = EventKind::Created { primary_blocks: pages, secondary_blocks: slots };
            shared.events.push(at as u16, created);
            groups.push(Group::new(at as u16, pages, slots, tree));
        }
        Ok(Self {
            sequences: Sequences::new(groups.len()),
            groups,
            shared,
            pins: Vec::new(),
            free_pins: Vec::new(),
            partial_reuse: config.partial_reuse,
            copy_on_partial_reuse: config.copy_on_partial_reuse,
        })
    }

    /// Time passes: retentions end, of each group at most [`Config::background_per_call`]. All calls with a time do the
    /// same. Returns whether work is left that was put off; then an idle engine may call it again.
    pub fn advance(&mut self, now_ms: u64) -> bool {
        self.shared.now_ms = self.shared.now_ms.max(now_ms);
        let mut is_late = false;
        for group in &mut self.groups {
            let most = self.shared.background_per_call;
            is_late |= group.expire(most, &mut self.shared);
            is_late |= group.reap(most, &mut self.shared);
        }
        is_late
    }

    /// The stored blocks of a sequence stay in primary until [`BlockManager::unpin`], also when it is freed.
    pub fn pin(&mut self, sequence: SequenceId) -> Result<PinId, Error> {
        let sequence = self.sequences.at(self.sequence(sequence)?);
        if sequence.pending > 0 {
            return Err(Error::NotReady { transfers: sequence.pending });
        }
        let at = self.free_pins.pop().unwrap_or_else(|| {
            let nodes = self.groups.iter().map(|_| Vec::new()).collect();
            self.pins.push(Pinned { generation: 0, is_open: false, nodes });
            self.pins.len() as u32 - 1
        });
        let pin = &mut self.pins[at as usize];
        pin.is_open = true;
        for ((group, row), nodes) in self.groups.iter_mut().zip(&sequence.rows).zip(&mut pin.nodes)
        {
            nodes.extend_from_slice(&row.nodes);
            nodes.iter().for_each(|&node| group.hold(node));
        }
        Ok(PinId(u64::from(pin.generation) << 32 | u64::from(at)))
    }

    /// Ends a pin.
    pub fn unpin(&mut self, pin: PinId, now_ms: u64) -> Result<(), Error> {
        let at = pin.0 as u32;
        let pinned = self.pins.get_mut(at as usize).ok_or(Error::UnknownPin)?;
        if !pinned.is_open || u64::from(pinned.generation) != pin.0 >> 32 {
            return Err(Error::UnknownPin);
        }
        pinned.is_open = false;
        pinned.generation = pinned.generation.wrapping_add(1);
        self.advance(now_ms);
        let pinned = &mut self.pins[at as usize];
        for (group, nodes) in self.groups.iter_mut().zip(&mut pinned.nodes) {
            while let Some(node) = nodes.pop() {
                group.unhold(node, &mut self.shared);
            }
        }
        self.free_pins.push(at);
        Ok(())
    }
}

impl BlockManager {
    /// Forgets all stored blocks: after new weights were loaded, no KV of the old ones may be reused. No sequence and no pin
    /// may be open. Copies in progress end as usual. Unlike other calls it takes time for each first block of a prompt.
    ///
    /// A block that is stored later has another name ([`Transfer::resets`](crate::Transfer::resets)) than one that was
    /// stored before, where the keys are equal, too.
    pub fn reset(&mut self) -> Result<(), Error> {
        let sequences = self.sequences.iter().count();
        let pins = self.pins.iter().filter(|pin| pin.is_open).count();
        if sequences + pins > 0 {
            return Err(Error::InUse { sequences, pins });
        }
        self.shared.resets = self.shared.resets.wrapping_add(1);
        for group in &mut self.groups {
            group.kill_all(&mut self.shared);
        }
        Ok(())
    }
}

/// Output: actions and events.
impl BlockManager {
    /// The next thing to do, in order. The caller takes them until there is none, after each call that changes
    /// something.
    pub fn poll_action(&mut self) -> Option<Action> {
        self.shared.actions.pop_front()
    }

    /// The next event of the cache.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.events.pop()
    }

    /// Events that were dropped since the manager was made, because the caller did not take them.
    pub fn events_dropped(&self) -> u64 {
        self.shared.events.dropped()
    }
}

/// Queries.
impl BlockManager {
    /// The blocks of a sequence in a group: numbers of the primary pool. None: no such sequence or group.
    pub fn blocks(&self, sequence: SequenceId, group: u16) -> Option<&[u32]> {
        let sequence = self.sequences.at(self.sequences.find(sequence)?);
        Some(&sequence.rows.get(usize::from(group))?.pages)
    }

    /// Whether all blocks of a sequence may be used. None: no such sequence.
    pub fn is_ready(&self, sequence: SequenceId) -> Option<bool> {
        Some(self.sequences.at(self.sequences.find(sequence)?).pending == 0)
    }

    /// Tokens at the start of a sequence's blocks that need not be computed, if the copies that it waits for succeed: what
    /// the last [`Action::Cut`](crate::Action::Cut) said, or its [`Allocation`]. None: no such sequence.
    pub fn reused_tokens(&self, sequence: SequenceId) -> Option<u32> {
        Some(self.sequences.at(self.sequences.find(sequence)?).reused_tokens)
    }

    /// Counts the blocks of a prompt that could be reused. The policy does not count it as a use.
    pub fn find_prefix(&self, keys: &[Key]) -> Match {
        let mut parents = [NONE; 16];
        let mut more = vec![NONE; self.groups.len().saturating_sub(parents.len())];
        let mut found = Match::default();
        for &key in keys {
            let mut needs_onboarding = false;
            for (group, parent) in self.groups.iter().zip(parents.iter_mut().chain(&mut more)) {
                let Some(node) = group.child(*parent, key) else { return found };
                needs_onboarding |= group.tree.node(node).place != Place::Primary;
                *parent = node;
            }
            found.blocks += 1;
            found.secondary_blocks += u32::from(needs_onboarding);
        }
        found
    }

    /// Usage of a group's pools. None: no such group.
    pub fn usage(&self, group: u16) -> Option<Usage> {
        let group = self.groups.get(usize::from(group))?;
        Some(Usage {
            primary_free: group.free_pages.len() as u32,
            primary_cached: group.idle,
            secondary_free: group.free_slots.len() as u32,
        })
    }

    fn sequence(&self, id: SequenceId) -> Result<u32, Error> {
        self.sequences.find(id).ok_or(Error::UnknownSequence)
    }
}

impl BlockManager {
    /// Takes all blocks from `blocks` on from a sequence. The deepest one is the oldest, for eviction.
    fn truncate(&mut self, at: u32, blocks: usize) {
        let sequence = self.sequences.at_mut(at);
        for (group, row) in self.groups.iter_mut().zip(&mut sequence.rows) {
            while row.pages.len() > blocks {
                let page = row.pages.pop().expect("longer than the blocks that stay");
                let transfer;
                match row.nodes.len() > row.pages.len() {
                    true => {
                        let node = row.nodes.pop().expect("longer than the pages");
                        let known = group.tree.node(node);
                        transfer = known.transfer;
                        if known.page != page {
                            group.free_page(page, &mut self.shared);
                        }
                        forget_waiter(&mut self.shared, transfer, at, &mut sequence.pending);
                        group.unhold(node, &mut self.shared);
                    }
                    false => {
                        transfer = group.busy[page as usize];
                        forget_waiter(&mut self.shared, transfer, at, &mut sequence.pending);
                        group.free_page(page, &mut self.shared);
                    }
                }
            }
        }
    }
}

fn forget_waiter(shared: &mut Shared, transfer: u32, sequence: u32, pending: &mut u32) {
    if *pending > 0 && shared.transfers.forget_waiter(transfer, sequence) {
        *pending -= 1;
    }
}
