//! Collects segments: chooses one, moves what is worth keeping, and frees it.

use super::copy::Collected;
use super::evict::{evict, is_there};
use super::pressure::LIVE_SHARE;
use super::{Fruitless, Keeper, RETRY_EVERY};
use crate::core::{FREE_PER_PROCESS, FREE_SHARE};
use crate::index::{Entry, Segment, SegmentState};
use crate::key::Key;
use crate::log::{self, Record};
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::is_of_device;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

/// Segments that may be collected one after another, each of which needs another segment for what it held. More
/// of them mean that their blocks fill segments badly, and that copying them gains nothing.
const FRUITLESS_MAX: u32 = 8;
/// Pages of a segment that are not data, at least: headers and the footer.
const OVERHEAD_PAGES: u32 = 4;
/// Pages that are condemned before the segments are looked at again, as a part of a segment.
const EVICTED_SHARE: u32 = 8;
/// Pages that are condemned at most for each segment that is freed while puts wait, in segments. The more, the sooner
/// little is left to copy, and the longer puts wait until then.
const CONDEMNED_MAX: u32 = 2;
/// Segments of a store whose keeper has two own segments, at least: of a smaller store, one more that is not full is a
/// part that counts.
const TWO_OWN_MIN: u32 = 32;
/// The most segments that the keeper fails to free each time it looks.
const KEPT_MAX: usize = 8;

impl Keeper {
    /// Pages of a segment's blocks that are worth keeping.
    pub(super) fn worthy(&self, number: u32, segment: &Segment) -> u32 {
        segment.live_pages.saturating_sub(self.condemned.pages(number))
    }

    /// Frees a segment, if there are too few. Returns whether there still are.
    pub(super) fn keep_segments(&mut self, is_stopping: &AtomicBool) -> bool {
        let is_freed = self.free_segment(is_stopping);
        if !is_freed {
            self.fruitless = Fruitless::default();
            if self.core.free_segments() < self.wanted() {
                self.core.member.note_vain_look();
            }
        }
        is_freed
    }

    /// Frees a segment. False if there are enough, or if none can be freed now.
    pub(super) fn free_segment(&mut self, is_stopping: &AtomicBool) -> bool {
        let geometry = self.core.member.geometry();
        let wanted = self.wanted();
        self.is_stuck = false;
        if self.core.free_segments() < wanted && self.core.withheld_segments() > 0 {
            self.retry_withheld();
        }
        if self.core.free_segments() < wanted {
            self.rescue();
            // A process that died while no keeper was there to see it may have left some.
            self.repair();
        }
        let usable = geometry.segments as usize - self.core.withheld_segments();
        if self.core.withheld_segments() > 0 && usable <= self.core.wanted_segments() {
            // The file system is full. If all blocks left, puts would still find no segment.
            return false;
        }
        // A segment that can't be freed, as its blocks are pinned or a stopped process holds their locks, would be the
        // best victim again.
        self.kept.retain(|_, since| since.elapsed() < RETRY_EVERY);
        let most_kept = self.kept.len() + KEPT_MAX;
        // Pages that may still be condemned for the segment, while puts wait for it.
        let mut budget = geometry.pages_per_segment * CONDEMNED_MAX;
        loop {
            if self.core.free_segments() >= self.wanted() {
                self.pressure.relax();
                return false;
            }
            if is_stopping.load(Relaxed) {
                return false;
            }
            // What was put or used since then may change what leaves.
            self.drain_events();
            let pressed = self.pressed();
            if self.own.is_none()
                && self.other.is_none()
                && let Err(e) = self.begin_own()
            {
                self.core.fault("begin", 0, &e);
            }
            if self.kept.len() >= most_kept {
                return false;
            }
            if self.victim(|_, _| true).is_none() {
                self.is_stuck = self.core.disk.is_any_writable();
                return false;
            }
            let share = pressed.unwrap_or(LIVE_SHARE);
            let limit = self.fruitless.limit.unwrap_or(geometry.pages_per_segment);
            let is_worth = |number, it: &Segment| {
                let most = worth(geometry.pages_per_segment, it, share);
                self.worthy(number, it) <= most.min(limit) && !self.kept.contains_key(&number)
            };
            if let Some((number, segment)) = self.victim(is_worth) {
                let begun = self.begun;
                if !self.collect_one(number, None) {
                    self.kept.insert(number, Instant::now());
                    continue;
                }
                if pressed.is_some() {
                    self.pressure.fall();
                    return true;
                }
                let count = &mut self.fruitless.count;
                *count = if self.begun == begun { 0 } else { *count + 1 };
                if *count > FRUITLESS_MAX {
                    let worthy = self.worthy(number, &segment);
                    let limit = worthy.saturating_sub(worthy.div_ceil(EVICTED_SHARE));
                    self.fruitless = Fruitless { count: 0, limit: Some(limit) };
                }
                return true;
            }
            if pressed.is_none() && self.waits_for_seal() {
                // Nothing in them can leave before. The write that ends wakes this thread.
                return false;
            }
            let mut excess = geometry.pages_per_segment / EVICTED_SHARE;
            if pressed.is_some() {
                excess = excess.min(budget);
                budget -= excess;
            }
            while excess > 0 {
                let Some(pages) = self.condemn() else { break };
                excess = excess.saturating_sub(pages);
            }
            if excess == 0 && (pressed.is_none() || budget > 0) {
                continue;
            }
            // No more blocks may leave, or puts have waited long enough.
            let Some(share) = pressed else { return false };
            let may_be = |number, _: &Segment| !self.kept.contains_key(&number);
            let Some((number, _)) = self.victim(may_be) else { return false };
            if self.collect_one(number, Some(share)) {
                self.pressure.fall();
                return true;
            }
            self.kept.insert(number, Instant::now());
        }
    }

    /// Segments that are to be free: for each process, and for what is put while others are freed.
    pub(super) fn wanted(&mut self) -> usize {
        self.wanted_at(Instant::now())
    }

    pub(super) fn wanted_at(&mut self, now: Instant) -> usize {
        let segments = self.core.member.geometry().segments;
        let most = (segments / FREE_SHARE).max(FREE_PER_PROCESS) as usize;
        let wanted = self.core.wanted_segments();
        if self.replayed.is_some() {
            return wanted;
        }
        wanted.max(most.min(wanted + self.pace.ahead(&self.core, self.begun, now)))
    }

    /// Whether this process has full segments that this thread has not sealed, and so can't collect.
    pub(super) fn waits_for_seal(&self) -> bool {
        let held = self.core.member.held_by(self.core.member.id());
        // Those that can't be sealed, as their directory hangs, are not waited for.
        let is_active = |(number, it): &(u32, Segment)| {
            matches!(it.state, SegmentState::Active(_)) && !self.core.disk.hangs(*number)
        };
        let active = held.filter(is_active).count();
        active > 1 + self.own.iter().chain(&self.other).count()
    }

    /// The segment to collect, of those that can be used again then: where the most space is gained for what is copied,
    /// and for the longest time. What has lived for long goes on to live, and what is new may leave by itself soon.
    pub(super) fn victim(&self, may_be: impl Fn(u32, &Segment) -> bool) -> Option<(u32, Segment)> {
        let (writable, holding) = (self.core.disk.writable(), self.holding());
        let is_usable = |(number, segment): &(u32, Segment)| {
            segment.state == SegmentState::Sealed
                && writable[self.core.disk.number_of(*number)]
                && !self.core.disk.is_held(*number)
                && !self.is_held(*number, segment, &holding)
        };
        let pages = f64::from(self.core.member.geometry().pages_per_segment);
        let next = self.core.member.next_incarnation();
        let gain = |(number, segment): &(u32, Segment)| {
            let live = f64::from(self.worthy(*number, segment)) / pages;
            let age = next.saturating_sub(segment.incarnation) as f64;
            (1.0 - live) * age / (1.0 + live)
        };
        let segments =
            self.core.member.segments().filter(is_usable).filter(|it| may_be(it.0, &it.1));
        segments
            .max_by(|a, b| gain(a).total_cmp(&gain(b)).then(b.1.incarnation.cmp(&a.1.incarnation)))
    }

    /// Frees a sealed segment. Of its pages, `share` at most are copied, if given. False if it stays as it is.
    pub(crate) fn collect_one(&mut self, number: u32, share: Option<f64>) -> bool {
        let began = Instant::now();
        let is_freed = self.collect_or_drop(number, share);
        self.pace.freed_one(began.elapsed());
        is_freed
    }

    pub(super) fn collect_or_drop(&mut self, number: u32, share: Option<f64>) -> bool {
        let mine = SegmentState::Collecting(self.core.member.id());
        if !self.core.member.set_segment(number, SegmentState::Sealed, mine) {
            return false;
        }
        self.collecting = Some(number);
        let to = match self.collect(number, share) {
            Ok(Collected::All | Collected::Listed)
                if self.core.member.segment(number).live_blocks == 0 =>
            {
                SegmentState::Free
            }
            // Its headers are damaged: they do not name all blocks.
            Ok(Collected::All) => match self.drop_blocks(number, |counters| &counters.corrupt) {
                true => SegmentState::Free,
                false => SegmentState::Sealed,
            },
            Ok(Collected::Listed) => match self.drop_blocks(number, |counters| &counters.failed) {
                true => SegmentState::Free,
                false => SegmentState::Sealed,
            },
            Ok(Collected::NotAll | Collected::TooMuch) => SegmentState::Sealed,
            Ok(Collected::NoRoom) if self.has_pinned(number) => SegmentState::Sealed,
            Ok(Collected::NoRoom) => match self.drop_blocks(number, |counters| &counters.evicted) {
                true => SegmentState::Free,
                false => SegmentState::Sealed,
            },
            // This process is short of descriptors or memory, or the blocks are there again later.
            Err(e) if !is_of_device(&e) || is_hang(&e) => {
                self.core.fault("collect", number, &e);
                SegmentState::Sealed
            }
            Err(e) => {
                self.core.fault("collect", number, &e);
                match self.drop_blocks(number, |counters| &counters.failed) {
                    true => SegmentState::Withheld,
                    false => SegmentState::Sealed,
                }
            }
        };
        let to = match to {
            SegmentState::Free => self.free(number, None),
            to => to,
        };
        if to != SegmentState::Sealed {
            self.condemned.freed(number);
            self.core.disk.close(number);
        }
        self.collecting = None;
        self.core.settle(number, mine, to) && to != SegmentState::Sealed
    }

    /// Copies what lives in a segment. Blocks beyond `share` of its pages are removed.
    pub(super) fn collect(&mut self, segment: u32, share: Option<f64>) -> io::Result<Collected> {
        let core = Arc::clone(&self.core);
        let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
        let scanned = scanned.map_err(log::Error::into_io)?;
        let unreadable = scanned.as_ref().and_then(|it| it.unreadable.clone());
        if let Some(error) = &unreadable {
            core.fault("read the headers of", segment, error);
        }
        let records = scanned.map_or(Vec::new(), |it| it.records);
        // Blocks may have been pinned since the segment was chosen.
        self.drain_events();
        let (condemned, mut live): (Vec<_>, Vec<(Entry, Record)>) = records
            .into_iter()
            .filter_map(|record| {
                let entry = core.member.find(&Key(record.block.key))?;
                let here = core.superblock.geometry.place(segment, record.page);
                (entry.page == here).then_some((entry, record))
            })
            .partition(|(entry, _)| self.condemned.contains(entry.slot));
        if let Some(share) = share
            && !self.thin(&mut live, share)
        {
            return Ok(Collected::TooMuch);
        }
        self.unreadable = 0;
        for (is_for_more, blocks) in self.by_worth(live) {
            if blocks.is_empty() {
                continue;
            }
            self.switch(is_for_more);
            match self.copy_all(segment, &blocks)? {
                Collected::All => {}
                other => return Ok(other),
            }
        }
        self.drain_events();
        let mut is_left = false;
        for (entry, _) in &condemned {
            if core.member.pins_changed() != self.pins.changed {
                self.drain_events();
            }
            // Not, if it is wanted again: it was pinned or used meanwhile.
            let may_leave = self.condemned.remove(entry);
            if !(may_leave && evict(&core, entry)) && is_there(&core, entry) {
                is_left = true;
                if may_leave {
                    // A stopped process holds its lock.
                    self.condemned.add(entry);
                }
            }
        }
        Ok(match unreadable {
            _ if is_left => Collected::NotAll,
            None => Collected::All,
            Some(_) => Collected::Listed,
        })
    }

    /// Blocks that are worth less than most that were copied lately, and the others.
    pub(super) fn by_worth(
        &mut self,
        live: Vec<(Entry, Record)>,
    ) -> [(bool, Vec<(Entry, Record)>); 2] {
        if self.core.member.geometry().segments < TWO_OWN_MIN {
            return [(false, live), (true, Vec::new())];
        }
        let now = self.now_ms();
        let worths: Vec<_> =
            live.iter().map(|(entry, _)| self.policy.standing(now, entry.slot).worth()).collect();
        let middle = self.worths.middle(&worths);
        let (more, less): (Vec<_>, Vec<_>) =
            live.into_iter().zip(worths).partition(|(_, worth)| *worth >= middle);
        let blocks = |of: Vec<((Entry, Record), f64)>| of.into_iter().map(|(it, _)| it).collect();
        [(false, blocks(less)), (true, blocks(more))]
    }

    /// Has the own segment be the one for blocks that are worth more, or less.
    pub(super) fn switch(&mut self, is_for_more: bool) {
        if self.is_for_more != is_for_more {
            std::mem::swap(&mut self.own, &mut self.other);
            self.is_for_more = is_for_more;
        }
    }
}

/// Pages that may live in a segment that is collected: a share of what blocks of its length can fill.
fn worth(pages_per_segment: u32, segment: &Segment, share: f64) -> u32 {
    let mean = segment.live_pages.checked_div(segment.live_blocks).unwrap_or(0).max(1);
    let room = pages_per_segment.saturating_sub(OVERHEAD_PAGES);
    (f64::from(room / mean * mean) * share) as u32
}
