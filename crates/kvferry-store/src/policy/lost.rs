//! Finds the blocks behind a removed block, by one walk over all blocks, when it matters.

use super::Policy;
use super::blocks::Link;

#[derive(Clone, Copy, PartialEq, Eq)]
enum RunBefore {
    /// No run is before it, and nothing is lost.
    Nothing,
    Run(u32),
    Lost,
}

impl Policy {
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
        for (id, before) in (0..).zip(before) {
            if before == RunBefore::Lost {
                self.runs.make_due(id);
            }
        }
    }
}
