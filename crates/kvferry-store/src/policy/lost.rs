//! Blocks behind a removed block leave, unless they are found again. Both are one walk over all blocks, when it matters.

use super::blocks::Link;
use super::{Policy, Slot};

#[derive(Clone, Copy, PartialEq, Eq)]
enum RunBefore {
    /// No run is before it, and nothing is lost.
    Nothing,
    Run(u32),
    Lost,
}

impl Policy {
    /// A put has found these blocks in the index, in the order of its prompt, the first behind `parent`: they are the
    /// blocks that were added, and where their links differ, this one holds from now on. So they, and what is behind
    /// them, are not due to leave any more for a block that was missing before them. It is no use of them.
    ///
    /// Slots that the policy does not know are passed over: see [`Policy::added`].
    pub fn found(&mut self, now_ms: u64, parent: Option<Slot>, slots: &[Slot]) {
        self.now = self.now.max(now_ms);
        let is_slot = |slot: Slot| (slot as usize) < self.blocks.slots();
        if parent.is_some_and(|parent| !is_slot(parent)) {
            return;
        }
        let slots = &slots[..slots.iter().take_while(|slot| is_slot(**slot)).count()];
        let (mut before, mut was_due) = (parent, false);
        for &slot in slots {
            let link = Link::from(before);
            before = Some(slot);
            if !self.blocks.is_known(slot) || self.blocks.link(slot) == link {
                continue;
            }
            if let Link::Behind(parent) = link
                && self.is_behind(parent, slot)
            {
                // It would close a circle.
                continue;
            }
            let run = self.blocks.run(slot).expect("it is known");
            was_due |= self.runs.get(run).is_due();
            self.move_behind(slot, link);
        }
        if was_due {
            self.let_found_stay();
        }
    }

    /// Has what is behind removed blocks leave. Does nothing most of the time.
    pub(super) fn settle(&mut self) {
        if self.holes.is_empty() {
            return;
        }
        let holes = std::mem::take(&mut self.holes);
        for slot in self.blocks.all_slots() {
            if !self.blocks.is_known(slot) {
                continue;
            }
            if let Some(hole) = self.blocks.before(slot).filter(|before| holes.contains(before)) {
                self.blocks.set_link(slot, Link::Lost);
                self.blocks.drop_child(hole);
            }
        }
        self.make_lost_due();
    }

    /// Makes all runs due that are behind a lost link, however far.
    pub(super) fn make_lost_due(&mut self) {
        for (id, is_lost) in (0..).zip(self.lost_runs()) {
            if is_lost {
                self.runs.make_due(id);
            }
        }
    }

    /// Gives due runs the level of their retention if they are behind no lost link any more.
    pub(super) fn let_found_stay(&mut self) {
        self.settle();
        for (id, is_lost) in (0..).zip(self.lost_runs()) {
            if !is_lost {
                self.runs.let_stay(id, self.now);
            }
        }
    }

    /// Says of each entry of the runs whether its run is behind a lost link, however far.
    fn lost_runs(&self) -> Vec<bool> {
        let mut before = vec![RunBefore::Nothing; self.runs.entries()];
        for slot in self.blocks.all_slots() {
            let Some(id) = self.blocks.run(slot) else { continue };
            match self.blocks.link(slot) {
                Link::Root => (),
                Link::Lost => before[id as usize] = RunBefore::Lost,
                Link::Behind(parent) => {
                    if let Some(parent) = self.blocks.run(parent).filter(|parent| *parent != id) {
                        before[id as usize] = RunBefore::Run(parent);
                    }
                }
            }
        }
        let mut path = Vec::new();
        for start in 0..before.len() {
            let mut at = start;
            while let RunBefore::Run(next) = before[at] {
                path.push(at);
                at = next as usize;
            }
            let end = before[at];
            path.drain(..).for_each(|at| before[at] = end);
        }
        before.into_iter().map(|before| before == RunBefore::Lost).collect()
    }
}
