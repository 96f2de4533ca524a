//! Pages of nodes that come back, and of sequences.

use super::Group;
use crate::NONE;
use crate::events::Tier;
use crate::retention::FilePlace;
use crate::shared::Shared;
use crate::transfer::{Block, Job, Kind};
use crate::tree::Place;

impl Group {
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

    /// Takes the page of a node without a holder; the node is gone.
    pub(crate) fn take_over(&mut self, at: u32, shared: &mut Shared) -> u32 {
        let page = std::mem::replace(&mut self.tree.node_mut(at).page, NONE);
        self.kill(at, shared);
        page
    }

    /// Frees a page that a sequence owns, at once or when its transfer ends.
    pub(crate) fn free_page(&mut self, page: u32, shared: &mut Shared) {
        match self.busy[page as usize] {
            NONE => self.free_pages.push(page),
            transfer => shared.transfers.entry(transfer).frees_page = true,
        }
    }

    /// Ends the use of a sequence's page by a transfer.
    pub(crate) fn page_settled(&mut self, page: u32, transfer: u32, frees_page: bool) {
        if self.busy[page as usize] == transfer {
            self.busy[page as usize] = NONE;
            if frees_page {
                self.free_pages.push(page);
            }
        }
    }
}
