//! A policy of blocks that are there already.

use super::blocks::Link;
use super::reuse::{IntervalId, Traits};
use super::runs::New;
use super::{Policy, Retention, Slot};
use rustc_hash::FxHashMap;

/// A block that an index holds.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Slot of the block.
    pub slot: Slot,
    /// The slot of the block before it in its prompt.
    pub parent: Option<Slot>,
    /// Time of the block's last use.
    pub used_at_ms: u64,
    /// Retention with which the block was stored.
    pub retention: Retention,
}

/// Groups of blocks of the same time and retention. Until runs are formed, blocks have a group instead of
/// a run.
#[derive(Default)]
struct Groups {
    of: FxHashMap<(u64, u32), u32>,
    all: Vec<(u64, Retention)>,
}

impl Groups {
    fn group(&mut self, kept: &Kept) -> u32 {
        *self.of.entry((kept.used_at_ms, kept.retention.to_bits())).or_insert_with(|| {
            self.all.push((kept.used_at_ms, kept.retention));
            u32::try_from(self.all.len() - 1).expect("fewer groups than slots")
        })
    }
}

impl Policy {
    /// A policy that knows what `kept` names, in any order. It has learned nothing yet, so blocks leave by
    /// priority and last use until it has. A block whose parent is not kept is due to leave.
    pub fn rebuild(slots: usize, kept: impl IntoIterator<Item = Kept>) -> Self {
        let mut policy = Self::new(slots);
        let groups = policy.read(kept);
        policy.cut_circles();
        let is_continued = policy.count_children();
        policy.form_runs_of_groups(&groups, &is_continued);
        policy.make_lost_due();
        policy
    }

    fn read(&mut self, kept: impl IntoIterator<Item = Kept>) -> Groups {
        let mut groups = Groups::default();
        for kept in kept {
            if kept.slot as usize >= self.blocks.slots() || self.blocks.is_known(kept.slot) {
                continue;
            }
            let link = match kept.parent {
                Some(parent) if parent as usize >= self.blocks.slots() => Link::Lost,
                parent => Link::from(parent),
            };
            self.blocks.insert(kept.slot, link, groups.group(&kept));
            self.now = self.now.max(kept.used_at_ms);
        }
        groups
    }

    /// Parents that were read while slots were used again may close a circle.
    fn cut_circles(&mut self) {
        const UNSEEN: Slot = Slot::MAX;
        let mut seen_from = vec![UNSEEN; self.blocks.slots()];
        for start in self.blocks.all_slots() {
            if !self.blocks.is_known(start) {
                continue;
            }
            let mut slot = start;
            while seen_from[slot as usize] == UNSEEN {
                seen_from[slot as usize] = start;
                match self.blocks.before(slot) {
                    None => break,
                    Some(parent) if seen_from[parent as usize] == start => {
                        self.blocks.set_link(slot, Link::Lost);
                        break;
                    }
                    Some(parent) => slot = parent,
                }
            }
        }
    }

    /// Counts the blocks behind each block. Says which have one of their own group behind them.
    fn count_children(&mut self) -> Vec<bool> {
        let mut is_continued = vec![false; self.blocks.slots()];
        for slot in self.blocks.all_slots() {
            let (Some(group), Some(parent)) = (self.blocks.run(slot), self.blocks.before(slot))
            else {
                continue;
            };
            match self.blocks.run(parent) {
                None => self.blocks.set_link(slot, Link::Lost),
                Some(group_before) => {
                    self.blocks.add_child(parent);
                    is_continued[parent as usize] |= group_before == group;
                }
            }
        }
        is_continued
    }

    /// Forms runs: each is a way from a block with none of its group behind it, towards the beginning of
    /// its prompt, as far as blocks are of its group and in no run yet.
    fn form_runs_of_groups(&mut self, groups: &Groups, is_continued: &[bool]) {
        let nothing = Traits { uses: 1, is_end: false, new: 0, turns: 0, gap: 0 };
        let class = self.reuse.class(nothing);
        let mut is_in_run = vec![false; self.blocks.slots()];
        for last in self.blocks.all_slots() {
            if is_continued[last as usize] {
                continue;
            }
            let Some(group) = self.blocks.run(last) else { continue };
            let is_of_run =
                |slot: &Slot| !is_in_run[*slot as usize] && self.blocks.run(*slot) == Some(group);
            let way = std::iter::successors(Some(last), |slot| self.blocks.before(*slot));
            let len = way.take_while(is_of_run).count();
            let (used_at, retention) = groups.all[group as usize];
            let new = New {
                last,
                len: u32::try_from(len).expect("fewer blocks than slots"),
                uses: 1,
                used_at,
                interval: IntervalId::NONE,
                class,
                retention,
            };
            let id = self.runs.form(new, self.now);
            let mut block = Some(last);
            for _ in 0..len {
                let of_run = block.expect("it was there before");
                self.blocks.set_run(of_run, id);
                is_in_run[of_run as usize] = true;
                block = self.blocks.before(of_run);
            }
            self.review(id);
        }
    }
}
