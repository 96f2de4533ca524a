//! Repair after the death of a member: its slots, locks and segments' counters.

use super::layout::{self, MemberId};
use super::member::Member;
use super::segment::{SegmentState, weight};
use super::slot::State;
use super::stripe::EXIT_GRACE;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

impl Member {
    /// Frees the slots and locks that a dead member held, then its number. It looks at every slot that was
    /// ever used: 10 million take about 0.1 s. A keeper that dies meanwhile leaves the rest to the next.
    ///
    /// False: the member has not died; or a slot could not be freed, because the member that
    /// holds its lock is stopped.
    ///
    /// The member's segments stay its own ([`super::Index::held_by`]); its events can still be drained.
    pub fn sweep(&self, dead: MemberId) -> bool {
        if !self.has_died(dead) {
            return false;
        }
        std::thread::sleep(EXIT_GRACE);
        // First: what it has changed is published also where a slot can't be freed.
        self.unlock_dead(dead);
        self.unsubscribe_dead(dead);
        let taken = &self.layout.taken_slots;
        for id in 0..self.high_water() {
            let slot = self.slot(id);
            match slot.version().state() {
                State::Held(number) if number == dead.number => {
                    if self.free_held_by(number, &slot).is_err() {
                        return false;
                    }
                    taken.repair(&self.shared, id);
                }
                // Wrong if a member is about to hold the slot; then the bit is set by the next try.
                State::Free => taken.repair(&self.shared, id),
                State::Held(_) | State::Live => {}
            }
        }
        for (number, segment) in self.segments() {
            if segment.state == SegmentState::Free {
                self.layout.taken_segments.repair(&self.shared, number);
            }
        }
        self.forget(dead);
        true
    }

    /// Counts the live blocks again, in the index and in each segment. Returns the number of counters that
    /// other members changed meanwhile: these stay as they were.
    pub fn recount(&self) -> usize {
        let load = |segment| self.live_in(segment).load(Acquire);
        let before: Vec<u64> = (0..self.geometry().segments).map(load).collect();
        let live_before = self.live();
        let mut counted = vec![0; before.len()];
        let mut live = 0;
        for entry in self.iter() {
            live += 1;
            if let Some(segment) = self.segment_of(entry.page) {
                counted[segment as usize] += weight(entry.len);
            }
        }
        let live_word = self.shared.word(layout::LIVE);
        let mut changed =
            usize::from(live_word.compare_exchange(live_before, live, Relaxed, Relaxed).is_err());
        for (segment, (before, counted)) in (0..).zip(before.into_iter().zip(counted)) {
            let word = self.live_in(segment);
            changed +=
                usize::from(word.compare_exchange(before, counted, Relaxed, Relaxed).is_err());
        }
        changed
    }
}
