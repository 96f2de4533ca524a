//! Segments that must stay because blocks that were copied from them may not be on the disk elsewhere.
//!
//! The index remembers which segments have copies that no sync covers ([`Index::has_copies`]), so that it outlives the
//! keeper that made them. No segment is freed before they are synced. Where that fails, segments are held back until
//! the copies have left the segment that could not be synced: all segments, except for those of which this keeper knows
//! that nothing was copied from them to there.
//!
//! [`Index::has_copies`]: crate::index::Index::has_copies

use super::{Keeper, RETRY_EVERY, seal_own};
use crate::gc::sealing::note_failed_sync;
use crate::index::{Segment, SegmentState};
use crate::log::Disk;
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::{EIO, is_of_device, is_written_late};
use rustc_hash::FxHashSet;
use std::io;
use std::sync::Arc;
use std::time::Instant;

/// A segment with copies that could not be synced.
#[derive(Clone, Copy, Debug)]
pub(super) struct Holding {
    number: u32,
    incarnation: u64,
}

impl Keeper {
    /// Tries whether withheld segments can be used again, one after another in each directory until one fails. A lock
    /// keeps back its own segment alone.
    pub(super) fn retry_withheld(&mut self) {
        if self.retried_at.is_some_and(|at| at.elapsed() < RETRY_EVERY) {
            return;
        }
        self.retried_at = Some(Instant::now());
        let core = Arc::clone(&self.core);
        let mine = SegmentState::Collecting(core.member.id());
        let (mut failing, holding) = (Vec::new(), self.holding());
        for (number, segment) in core.member.segments() {
            let directory = core.disk.number_of(number);
            if segment.state != SegmentState::Withheld
                || failing.contains(&directory)
                || self.is_held(number, &segment, &holding)
                || !core.member.set_segment(number, SegmentState::Withheld, mine)
            {
                continue;
            }
            let ensured = core.disk.ensure(number);
            let is_locked = ensured.as_ref().is_err_and(is_written_late);
            let to = match ensured {
                Ok(()) => self.free(number, None),
                Err(_) => SegmentState::Withheld,
            };
            let to = match to {
                SegmentState::Free => to,
                _ => {
                    if !is_locked {
                        failing.push(directory);
                    }
                    SegmentState::Withheld
                }
            };
            core.settle(number, mine, to);
        }
    }

    /// Frees a segment in which no block lives. All segments are freed here. Returns the state that it is to have.
    /// `living`: the segments in which blocks live, where their counters may be wrong.
    pub(super) fn free(&mut self, number: u32, living: Option<&FxHashSet<u32>>) -> SegmentState {
        let synced = self.sync_copies(number, living);
        for own in [&mut self.own, &mut self.other] {
            if own.as_ref().is_some_and(|it| self.core.member.is_unsynced(it.segment())) {
                seal_own(&self.core, own);
            }
        }
        match synced {
            Ok(()) => {
                self.sources.0.remove(&number);
                self.core.freed(number)
            }
            Err(e) => {
                self.core.fault("keep the copies of", number, &e);
                match is_of_device(&e) && !is_hang(&e) {
                    true => SegmentState::Withheld,
                    false => SegmentState::Sealed,
                }
            }
        }
    }

    /// Returns when all blocks that may have been copied from a segment are on the disk elsewhere.
    fn sync_copies(&mut self, from: u32, living: Option<&FxHashSet<u32>>) -> io::Result<()> {
        let core = Arc::clone(&self.core);
        let mut outcome = Ok(());
        for (number, segment) in core.member.segments() {
            if !core.member.has_copies(number) || !self.sources.may_be(from, number) {
                continue;
            }
            let lives = living.map_or(segment.live_blocks > 0, |it| it.contains(&number));
            if core.member.is_unsynced(number) {
                if lives {
                    outcome = outcome.and(Err(io::Error::from_raw_os_error(EIO)));
                }
                continue;
            }
            if !lives && segment.state == SegmentState::Sealed {
                // All copies have left it. Its device may hang.
                continue;
            }
            match core.disk.sync(number) {
                Ok(()) => {
                    // A writer may have put a further block in the place of another one meanwhile.
                    let is_others = matches!(segment.state, SegmentState::Active(_))
                        && !self.sources.0.contains_key(&number);
                    if !is_others {
                        core.member.note_copies(number, false);
                        self.sources.synced(number);
                    }
                }
                Err(e) => {
                    note_failed_sync(&core, number, &e);
                    outcome = outcome.and(Err(e));
                }
            }
        }
        outcome
    }

    /// The segments that hold others back.
    pub(super) fn holding(&self) -> Vec<Holding> {
        let member = &self.core.member;
        let is_lost = |(number, segment): &(u32, Segment)| {
            segment.live_blocks > 0 && member.is_unsynced(*number) && member.has_copies(*number)
        };
        let holding = member.segments().filter(is_lost);
        holding.map(|(number, it)| Holding { number, incarnation: it.incarnation }).collect()
    }

    /// Whether a segment is held back. Of segments that hold back all others, the newest one is not: its blocks are
    /// moved first.
    pub(super) fn is_held(&self, number: u32, segment: &Segment, holding: &[Holding]) -> bool {
        let is_one = holding.iter().any(|it| it.number == number);
        let by = |it: &Holding| {
            self.sources.may_be(number, it.number)
                && !(is_one && it.incarnation < segment.incarnation)
        };
        holding.iter().any(by)
    }

    /// Moves what lives in segments that hold others back to where it can be synced.
    pub(super) fn rescue(&mut self) {
        let core = Arc::clone(&self.core);
        self.kept.retain(|_, since| since.elapsed() < RETRY_EVERY);
        let holding = self.holding();
        for Holding { number, .. } in holding.iter().rev() {
            let segment = core.member.segment(*number);
            let is_room = self.own.is_some() || core.free_segments() > 0;
            if segment.state != SegmentState::Sealed
                || !is_room
                || self.kept.contains_key(number)
                || self.is_held(*number, &segment, &self.holding())
            {
                continue;
            }
            // While the device fails, the next place would be lost as well.
            if core.disk.sync(*number).is_err() || !self.collect_one(*number, None) {
                self.kept.insert(*number, Instant::now());
            }
        }
    }
}
