//! Drains the events of all processes into the policy.

use super::Keeper;
use super::condemned::Condemned;
use super::policy_feed::{Pins, add, found, rebuild, recall};
use crate::index::Event;

impl Keeper {
    /// Takes the events of all processes.
    pub(super) fn drain_events(&mut self) {
        let mut lost = false;
        for number in 0..crate::index::MAX_MEMBERS {
            lost |= self.drain(u8::try_from(number).expect("few members"));
        }
        let known = self.policy.len() as u64 + self.condemned.len();
        let is_behind = known < self.core.member.live() / 10 * 9;
        if lost || is_behind {
            self.begin_anew();
        }
        let freed = self.pins.follow(&self.core, &mut self.policy, &mut self.condemned);
        for slot in freed {
            if self.kept.is_empty() {
                break;
            }
            if let Some(entry) = self.core.member.entry(slot) {
                self.kept.remove(&self.core.superblock.geometry.locate(entry.page).0);
            }
        }
    }

    /// Reads from the index which blocks there are.
    pub(super) fn begin_anew(&mut self) {
        self.policy = rebuild(&self.core);
        self.condemned = Condemned::new(self.core.member.geometry());
        self.pins = Pins::default();
        self.kept.clear();
    }

    /// Takes the events of a process. Returns whether the policy must be made anew.
    pub(super) fn drain(&mut self, number: u8) -> bool {
        let (core, policy, condemned) = (&self.core, &mut self.policy, &mut self.condemned);
        let member = &core.member;
        let drained = member.drain(number, |event| match event {
            Event::Used { now_ms, missing, slots } => {
                let known = slots.iter().take_while(|slot| !condemned.contains(**slot)).count();
                let (known, others) = slots.split_at(known);
                policy.used(now_ms, known, missing as usize + others.len());
                // To the policy they had left, and come back.
                recall(core, policy, condemned, now_ms, known.last().copied(), others);
            }
            Event::Added { now_ms, parent, slots } => {
                for slot in slots {
                    match member.entry(*slot) {
                        Some(entry) => _ = condemned.remove(&entry),
                        None => _ = condemned.forget(*slot),
                    }
                }
                add(core, policy, now_ms, parent, slots);
            }
            Event::Found { now_ms, parent, slots } => {
                found(core, policy, condemned, now_ms, parent, slots);
            }
            Event::Removed { slot } => {
                if member.entry(slot).is_none() {
                    policy.removed(slot);
                    condemned.forget(slot);
                }
            }
        });
        drained.rebuild
    }
}
