//! Sequences, and the blocks that each holds.

use crate::retention::{FilePlace, Retention, RetentionConfig};

/// Names a sequence until it is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SequenceId(pub(crate) u64);

/// The number serves languages that lack such types.
impl From<SequenceId> for u64 {
    fn from(id: SequenceId) -> Self {
        id.0
    }
}

/// A number that no manager has given names no sequence.
impl From<u64> for SequenceId {
    fn from(number: u64) -> Self {
        Self(number)
    }
}

/// The blocks of a sequence in one group.
#[derive(Debug, Default)]
pub(crate) struct Row {
    /// The primary blocks, in the order of the tokens.
    pub(crate) pages: Vec<u32>,
    /// The nodes of the first blocks. Where a node has another page than the sequence, another sequence has computed
    /// the same block, and the page is the sequence's own.
    pub(crate) nodes: Vec<u32>,
}

/// Parts of a request that its sequence keeps.
#[derive(Debug, Default)]
pub(crate) struct SequenceRequest {
    pub(crate) retention: RetentionConfig,
    pub(crate) file: FilePlace,
    pub(crate) prompt_tokens: u32,
    pub(crate) salt: u64,
}

#[derive(Debug)]
pub(crate) struct Sequence {
    generation: u32,
    is_open: bool,
    pub(crate) wish: SequenceRequest,
    pub(crate) len_tokens: u32,
    pub(crate) reused_tokens: u32,
    /// Transfers that it waits for.
    pub(crate) pending: u32,
    /// Rows, indexed by group.
    pub(crate) rows: Vec<Row>,
}

impl SequenceRequest {
    /// None: the request says nothing of the block of this token.
    pub(crate) fn retention_at(&self, token: u32) -> Option<Retention> {
        match token < self.prompt_tokens {
            true => self.retention.at(token),
            false => Some(self.retention.decode_retention()),
        }
    }
}

/// All sequences. A slot keeps the memory of its rows for the next sequence.
#[derive(Debug)]
pub(crate) struct Sequences {
    slots: Vec<Sequence>,
    free: Vec<u32>,
    groups: usize,
}

impl Sequences {
    pub(crate) fn new(groups: usize) -> Self {
        Self { slots: Vec::new(), free: Vec::new(), groups }
    }

    pub(crate) fn open(&mut self, wish: SequenceRequest) -> u32 {
        let at = match self.free.pop() {
            Some(at) => at,
            None => {
                self.slots.push(Sequence {
                    generation: 0,
                    is_open: false,
                    wish: SequenceRequest::default(),
                    len_tokens: 0,
                    reused_tokens: 0,
                    pending: 0,
                    rows: (0..self.groups).map(|_| Row::default()).collect(),
                });
                self.slots.len() as u32 - 1
            }
        };
        let slot = &mut self.slots[at as usize];
        slot.is_open = true;
        slot.len_tokens = wish.prompt_tokens;
        slot.wish = wish;
        slot.reused_tokens = 0;
        slot.pending = 0;
        at
    }

    /// Closes a sequence, whose rows must be empty.
    pub(crate) fn close(&mut self, at: u32) {
        let slot = &mut self.slots[at as usize];
        debug_assert!(slot.rows.iter().all(|row| row.pages.is_empty() && row.nodes.is_empty()));
        slot.is_open = false;
        slot.generation = slot.generation.wrapping_add(1);
        self.free.push(at);
    }

    pub(crate) fn id(&self, at: u32) -> SequenceId {
        SequenceId(u64::from(self.slots[at as usize].generation) << 32 | u64::from(at))
    }

    pub(crate) fn find(&self, id: SequenceId) -> Option<u32> {
        let at = id.0 as u32;
        let slot = self.slots.get(at as usize)?;
        (slot.is_open && u64::from(slot.generation) == id.0 >> 32).then_some(at)
    }

    pub(crate) fn at(&self, at: u32) -> &Sequence {
        &self.slots[at as usize]
    }

    pub(crate) fn at_mut(&mut self, at: u32) -> &mut Sequence {
        &mut self.slots[at as usize]
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Sequence)> {
        let slots = self.slots.iter().enumerate();
        slots.filter(|(_, slot)| slot.is_open).map(|(at, slot)| (at as u32, slot))
    }
}
