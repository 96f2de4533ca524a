//! A consumer's request, read from bytes.

use kvferry_proto::fuzzing::Script;
use kvferry_proto::layout::{Group, Kind, Layout, NO_BLOCK};
use kvferry_proto::plan::Blocks;
use std::ops::Range;

/// The longest block table.
const TABLE_MAX: u64 = 256;

/// The most changes to block tables.
const EDITS_MAX: usize = 16;

/// Tokens asked for by a script that does not say.
const TOKENS: u64 = 64;

/// A consumer's request: tokens and block tables.
pub(super) struct Request {
    pub(super) tokens: Range<u64>,
    /// Token at which the request is cut into two parts.
    pub(super) cut: u64,
    /// Layer at which the layers are cut into two parts.
    pub(super) layer_cut: usize,
    /// Block tables of the producer, per group.
    pub(super) producer: Vec<Listed>,
    pub(super) consumer: Vec<Listed>,
}

impl Request {
    /// Block tables that have what is needed, as far as there are blocks for it, and then changes
    /// to them.
    pub(super) fn read(producer: &Layout, consumer: &Layout, script: &mut Script<'_>) -> Self {
        let scale = script.byte() % 24;
        let start = u64::from(script.byte()) << scale;
        let len = match script.short() {
            0 => TOKENS,
            len => len.into(),
        };
        let tokens = start..start + (len << scale);
        let cut = start + script.word() % ((len << scale) + 1);
        let layer_cut = script.byte().into();
        let [producer, consumer] = [producer, consumer].map(|layout| {
            let groups = layout.groups().iter();
            groups.map(|group| Listed::read(group, &tokens, script)).collect()
        });
        let mut request = Self { tokens, cut, layer_cut, producer, consumer };
        for _ in 0..EDITS_MAX {
            let tables = if script.flip() { &mut request.producer } else { &mut request.consumer };
            let at = script.below(tables.len().max(1));
            if let Some(table) = tables.get_mut(at).filter(|_| !script.is_empty()) {
                table.edit(script);
            }
        }
        request
    }
}

/// A block table.
pub(super) struct Listed {
    first: u32,
    ids: Vec<u32>,
}

impl Listed {
    fn read(group: &Group, tokens: &Range<u64>, script: &mut Script<'_>) -> Self {
        let (id, step) = (u64::from(script.byte()), u64::from(script.byte()));
        let prefix = group.local_tokens(tokens.start) / u64::from(group.block_tokens);
        let first = u32::try_from(prefix).ok().filter(|_| step % 2 == 1).unwrap_or_default();
        let count = group.local_blocks(tokens.end).saturating_sub(first.into()).min(TABLE_MAX);
        let nth = |n| ((id + n * (step / 2 + 1)) % u64::from(group.blocks)) as u32;
        Self { first, ids: (0..count).map(nth).collect() }
    }

    fn edit(&mut self, script: &mut Script<'_>) {
        let at = script.below(self.ids.len().clamp(1, TABLE_MAX as usize));
        match script.below(6) {
            0 => self.ids.truncate(at),
            1 => self.first = self.first.wrapping_add(script.byte().into()),
            2 => self.first = script.word() as u32,
            3 => self.ids.iter_mut().take(at).for_each(|id| *id = NO_BLOCK),
            4 => self.ids.insert(at.min(self.ids.len()), NO_BLOCK),
            _ => {
                let id = script.word() as u32;
                self.ids.iter_mut().skip(at).take(1).for_each(|old| *old = id);
            }
        }
    }

    pub(super) const fn blocks(&self) -> Blocks<'_> {
        Blocks { first: self.first, ids: self.ids.as_slice() }
    }

    pub(super) const fn len(&self) -> usize {
        self.ids.len()
    }

    /// The id of a block that is there.
    pub(super) fn id(&self, group: &Group, block: u64) -> Option<u32> {
        let at = usize::try_from(block.checked_sub(self.first.into())?).ok()?;
        self.ids.get(at).copied().filter(|&id| id < group.blocks)
    }

    /// Blocks that are there and may be copied, and their ids.
    pub(super) fn there(&self, group: &Group) -> Vec<(u64, u32)> {
        let first = u64::from(self.first);
        let listed = first..first + self.ids.len() as u64;
        let mut there: Vec<_> =
            listed.filter_map(|block| Some((block, self.id(group, block)?))).collect();
        if group.kind == Kind::State {
            // Earlier ones are states of earlier tokens.
            there.drain(..there.len().saturating_sub(1));
        }
        there
    }
}
