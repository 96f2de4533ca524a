//! Secondary blocks in host memory.

use crate::pages::Pages;
use kvferry::{Access, Agent, Region};
use kvferry_blocks::{Tier, Transfer};

/// A region for each group that has secondary blocks. Its pages are taken at the first touch: in file modes, none is.
#[derive(Debug)]
pub(crate) struct Host {
    groups: Vec<Option<Region>>,
}

impl Host {
    pub(crate) fn new(agent: &Agent, pages: &Pages, blocks: &[u32]) -> kvferry::Result<Self> {
        let mut groups = Vec::with_capacity(blocks.len());
        for (group, blocks) in blocks.iter().enumerate() {
            let bytes = pages.page_bytes(group).saturating_mul(u64::from(*blocks));
            let len = usize::try_from(bytes).unwrap_or(usize::MAX);
            groups.push(match len {
                0 => None,
                len => Some(agent.allocate_private(len, Access::NONE)?),
            });
        }
        Ok(Self { groups })
    }

    /// Copies a block to, from or within the engine's pages. A part of a block is copied as the whole block: the sequence
    /// computes the other tokens over it.
    pub(crate) fn carry(&self, pages: &Pages, transfer: &Transfer) -> kvferry::Result<()> {
        let group = usize::from(transfer.group);
        let block = |index: u32| {
            let region = self.groups[group].as_ref().expect("a group with secondary blocks");
            (region, u64::from(index) * pages.page_bytes(group))
        };
        match (transfer.from.tier, transfer.to.tier) {
            (Tier::Primary, Tier::Primary) => {
                pages.copy(group, transfer.from.index, transfer.to.index)
            }
            (Tier::Primary, Tier::Secondary) => {
                let (region, offset) = block(transfer.to.index);
                pages.gather(group, transfer.from.index, region, offset)
            }
            (Tier::Secondary, _) => {
                let (region, offset) = block(transfer.from.index);
                pages.scatter(group, transfer.to.index, region, offset)
            }
        }
    }
}
