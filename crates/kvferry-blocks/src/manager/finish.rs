//! The end of a transfer, and what follows from it.

use super::BlockManager;
use crate::NONE;
use crate::config::Error;
use crate::events::{EventKind, Tier};
use crate::transfer::{Action, Job, Kind, Outcome, TransferId};
use crate::tree::Place;
use smallvec::SmallVec;

/// Blocks that a sequence loses by a failed transfer.
#[derive(Clone, Copy, Debug)]
struct Cut {
    /// Blocks that are still reused.
    blocks: u32,
    /// The others are the sequence's own, to compute.
    keeps_blocks: bool,
}

impl BlockManager {
    /// A copy has ended. After a failed onboard, the block and all behind it can't be found any more, and each sequence
    /// that waited for it keeps what is before it ([`Action::Cut`]). After a failed offload, the block is gone.
    pub fn finished(&mut self, id: TransferId, outcome: Outcome, now_ms: u64) -> Result<(), Error> {
        let at = self.shared.transfers.find(id).ok_or(Error::UnknownTransfer)?;
        self.advance(now_ms);
        let mut ended: SmallVec<[(u32, Outcome); 4]> = SmallVec::new();
        ended.push((at, outcome));
        while let Some((at, outcome)) = ended.pop() {
            let entry = self.shared.transfers.entry(at);
            let waiters = std::mem::take(&mut entry.waiters);
            let dependents = std::mem::take(&mut entry.dependents);
            let frees_page = entry.frees_page;
            let job = entry.job.clone().expect("an open transfer");
            let cut = match job.kind {
                Kind::Offload => self.offloaded(at, &job, outcome, &dependents, frees_page),
                Kind::Onboard => self.onboarded(&job, outcome),
                Kind::Partial => self.copied(at, &job, outcome, frees_page),
            };
            self.tell(&waiters, cut);
            for next in dependents {
                let entry = self.shared.transfers.entry(next);
                entry.blocked_on -= 1;
                if entry.blocked_on == 0 {
                    let is_doomed = entry.is_doomed;
                    match is_doomed || self.is_unwanted(next) {
                        true => ended.push((next, Outcome::Failed)),
                        false => self.shared.hand_out(next),
                    }
                }
            }
            self.shared.transfers.close(at);
        }
        Ok(())
    }

    /// Whether a transfer is for a block that can't be found any more.
    fn is_unwanted(&self, transfer: u32) -> bool {
        let job = self.shared.transfers.job(transfer);
        let node = self.groups[usize::from(job.group)].tree.node(job.node);
        job.kind == Kind::Onboard && node.place == Place::Dead
    }

    fn offloaded(
        &mut self,
        at: u32,
        job: &Job,
        outcome: Outcome,
        dependents: &[u32],
        frees_page: bool,
    ) -> Option<Cut> {
        let (group, shared) = (&mut self.groups[usize::from(job.group)], &mut self.shared);
        group.page_settled(job.from.index, at, frees_page);
        let node = group.tree.node_mut(job.node);
        if outcome == Outcome::Done && node.place != Place::Dead {
            shared.events.push(job.group, EventKind::offloaded(job.key));
        }
        if node.transfer != at {
            // The node is wanted again: what will read the slot is among the dependents.
            let onboard = node.transfer;
            if outcome == Outcome::Failed && dependents.contains(&onboard) {
                shared.transfers.entry(onboard).is_doomed = true;
            }
            return None;
        }
        node.transfer = NONE;
        match (node.place, outcome) {
            (Place::Dead, _) => group.retire(job.node, shared),
            (_, Outcome::Failed) => group.kill(job.node, shared),
            (_, Outcome::Done) => {
                node.place = Place::Secondary;
                group.requeue(job.node);
            }
        }
        None
    }

    fn onboarded(&mut self, job: &Job, outcome: Outcome) -> Option<Cut> {
        let (group, shared) = (&mut self.groups[usize::from(job.group)], &mut self.shared);
        let node = group.tree.node_mut(job.node);
        node.transfer = NONE;
        let (depth, holders) = (node.depth, node.holders);
        match (node.place, outcome) {
            (Place::Dead, _) => group.retire(job.node, shared),
            (_, Outcome::Failed) => {
                group.kill(job.node, shared);
                return Some(Cut { blocks: depth, keeps_blocks: false });
            }
            (_, Outcome::Done) => {
                node.place = Place::Primary;
                group.idle += u32::from(holders == 0);
                if node.slot_readers == 0 {
                    group.free_slot(job.node, shared);
                }
                group.requeue(job.node);
                shared.events.push(job.group, EventKind::onboarded(job.key));
            }
        }
        None
    }

    fn copied(&mut self, at: u32, job: &Job, outcome: Outcome, frees_page: bool) -> Option<Cut> {
        let (group, shared) = (&mut self.groups[usize::from(job.group)], &mut self.shared);
        group.page_settled(job.to.index, at, frees_page);
        let node = group.tree.node_mut(job.node);
        let depth = node.depth;
        if job.from.tier == Tier::Secondary {
            node.slot_readers -= 1;
            match (node.place, outcome) {
                (Place::Secondary, Outcome::Failed) => group.kill(job.node, shared),
                // It was onboarded meanwhile.
                (Place::Primary, _) if node.slot_readers == 0 => {
                    group.free_slot(job.node, shared);
                }
                _ => {}
            }
        }
        group.unhold(job.node, shared);
        let cut = Cut { blocks: depth, keeps_blocks: true };
        (outcome == Outcome::Failed).then_some(cut)
    }

    /// Ends the sequences' wait for a transfer.
    fn tell(&mut self, waiters: &[u32], cut: Option<Cut>) {
        for &at in waiters {
            self.sequences.at_mut(at).pending -= 1;
            if let Some(cut) = cut {
                self.cut(at, cut);
            }
            let sequence = self.sequences.at(at);
            if sequence.pending == 0 {
                let id = self.sequences.id(at);
                let reused_tokens = sequence.reused_tokens;
                self.shared.actions.push_back(Action::Ready { sequence: id, reused_tokens });
            }
        }
    }

    /// A sequence reuses what is before a block only.
    fn cut(&mut self, at: u32, cut: Cut) {
        let tokens = cut.blocks * self.shared.tokens_per_block;
        if !cut.keeps_blocks {
            self.truncate(at, cut.blocks as usize);
            self.sequences.at_mut(at).len_tokens = tokens;
        }
        let sequence = self.sequences.at_mut(at);
        sequence.reused_tokens = sequence.reused_tokens.min(tokens);
        let action = Action::Cut {
            sequence: self.sequences.id(at),
            reused_tokens: self.sequences.at(at).reused_tokens,
            blocks: self.sequences.at(at).rows[0].pages.len() as u32,
        };
        self.shared.actions.push_back(action);
    }
}
