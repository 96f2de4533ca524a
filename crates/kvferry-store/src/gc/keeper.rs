//! Frees space: what the keeper does, on its worker thread.
//!
//! Some segments are kept free, for the processes that put blocks: more, the faster they put and the longer it takes
//! to free one. When fewer are free, blocks are *condemned*, in the order of the policy, until little in some segment is
//! worth keeping. That segment is collected: what is worth keeping is copied to a segment of the keeper's own, and the
//! rest leaves with the segment. Until then a condemned block is found as before, and is kept if a request uses it.
//! Writers leave the last free segment to the keeper.
//!
//! # Pressure
//! To copy four fifths of a segment costs four bytes read and written for each byte that is put. A device that is
//! filled at its own rate has no time for that. So while puts find no free segment, more blocks are condemned, and less
//! of each segment is copied: the part falls with each segment that is freed while puts still wait, down to a part that
//! leaves puts half of the device, and rises again once enough segments are free. To condemn many blocks takes time:
//! while puts wait, so many are condemned for each segment that is freed, and what else is too much to copy is dropped
//! where it is, by its worth.
//!
//! # Two own segments
//! To free a segment is cheap where all of its blocks have come to be worth little at about the same time. So blocks
//! that are copied go to one of two segments of the keeper's own, by whether they are worth more or less than most
//! that were copied lately. Where no other segment is free, and in a small store, one serves for both.

mod condemned;
mod copies;

use crate::core::{Core, FREE_PER_PROCESS, FREE_SHARE};
use crate::index::{Entry, Event, MemberId, Segment, SegmentState, SlotId};
use crate::key::Key;
use crate::log::format::{EXTENT_RECORDS, bytes_of, pages_of};
use crate::log::{self, Appender, Disk, Record};
use crate::policy::{Kept, Policy, Retention, Then};
use crate::stats::Counters;
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::{is_of_device, is_written_late};
use crate::writer::{begin_segment, note_failed_sync, seal};
use crc_fast::CrcAlgorithm;
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use condemned::Condemned;
use copies::Sources;

/// The part of a segment's pages that may live when it is collected. The more, the more is kept, and the more
/// is copied for each new block: at most four times as much.
const LIVE_SHARE: f64 = 0.8;
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
/// The part of the index's slots that blocks may take.
const SLOT_SHARE: f64 = 0.98;
/// What is copied of a segment, at most, while puts find no free segment: the factor by which it falls with each
/// segment, what it is at least, and by how much it rises each time when enough segments are free. With the least,
/// some 0.4 bytes are copied for each byte that is put (`kvferry bench store --trace`).
const PRESSURE_FALL: f64 = 0.85;
const PRESSURE_LEAST: f64 = 0.35;
const PRESSURE_RISE: f64 = 0.02;
/// A put that found no free segment counts for so long: it may be tried again.
const PRESSURE_FOR: Duration = Duration::from_secs(1);
/// Longest wait of puts before they count as pressure.
const PRESSURE_AFTER: Duration = Duration::from_millis(50);
/// Period over which the rate of puts is measured, and the weight of the last measurement in the rate.
const RATE_EVERY: Duration = Duration::from_millis(250);
const RATE_NEW: f64 = 0.25;
/// Segments that are kept free, beside those for each process, in segments that are put while one is freed.
const FREE_AHEAD: f64 = 2.0;
/// Huge pages that are made each time the keeper looks: what waits for it waits for so many milliseconds, at most.
const HUGE_PAGES: usize = 16;
/// Segments of a store whose keeper has two own segments, at least: of a smaller store, one more that is not full is a
/// part that counts.
const TWO_OWN_MIN: u32 = 32;
/// Blocks that were copied last, whose worths are compared with those of the next ones.
const WORTHS: usize = 4096;
/// Data that is copied at once.
const COPY_BYTES: usize = 4 << 20;
/// Blocks of a segment that can't be read, until the segment counts as unreadable: a device that fails may take
/// seconds for each.
const UNREADABLE_MAX: u32 = 16;
/// Interval between tries of withheld segments, and of those that could not be freed, while space is needed.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// The most segments that the keeper fails to free each time it looks.
const KEPT_MAX: usize = 8;
/// Interval and number of the keeper's looks for a segment to copy to, until it takes none as free.
const LAST_EVERY: Duration = Duration::from_millis(1);
const LAST_TRIES: u32 = 5;

#[derive(Debug)]
pub(crate) struct Keeper {
    core: Arc<Core>,
    policy: Policy,
    condemned: Condemned,
    pins: Pins,
    /// Appender that receives live blocks of collected segments.
    own: Option<Appender>,
    /// The own segment of the other worth.
    other: Option<Appender>,
    /// Whether `own` is for blocks that are worth more, and `other` for those that are worth less.
    is_for_more: bool,
    worths: Worths,
    /// Counts the segments that were begun for it.
    begun: u64,
    sources: Sources,
    /// Segments that could not be freed, and when. They are tried again after [`RETRY_EVERY`], and when a lease of a
    /// block in them has ended.
    kept: FxHashMap<u32, Instant>,
    /// Blocks of the segment that is collected that can't be read.
    unreadable: u32,
    /// Time of the last try of withheld segments.
    retried_at: Option<Instant>,
    /// Space is wanted, and all segments are being written.
    is_stuck: bool,
    /// [`Keeper::awaits_end`].
    awaits_end: bool,
    /// [`Keeper::goes_on`].
    goes_on: bool,
    fruitless: Fruitless,
    left: Left,
    pressure: Pressure,
    pace: Pace,
    /// Data that is being copied.
    buffer: Vec<u8>,
    /// The segment that is collected.
    collecting: Option<u32>,
    replayed: Option<Replayed>,
}

/// Pressure of puts on the keeper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Press {
    /// The keeper has all the time that it wants.
    Not,
    /// Puts wait all the time.
    Always,
}

/// Clock and pressure of the keeper of a replay, instead of the time and of puts that wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Replayed {
    pub(crate) now_ms: u64,
    pub(crate) press: Press,
}

impl Keeper {
    /// Creates the keeper in a process that has become it; rebuilds the policy from the index.
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let policy = rebuild(&core);
        let condemned = Condemned::new(core.member.geometry());
        let pins = Pins::default();
        let (pressure, pace) = (Pressure::new(&core), Pace::new(&core));
        let mut keeper = Self {
            core,
            policy,
            condemned,
            pins,
            own: None,
            other: None,
            is_for_more: false,
            worths: Worths::default(),
            begun: 0,
            sources: Sources::default(),
            kept: FxHashMap::default(),
            unreadable: 0,
            retried_at: None,
            is_stuck: false,
            awaits_end: false,
            goes_on: false,
            fruitless: Fruitless::default(),
            left: Left::default(),
            pressure,
            pace,
            buffer: Vec::new(),
            collecting: None,
            replayed: None,
        };
        keeper.repair();
        keeper
    }

    /// Sets the time, and how hard puts press.
    pub(crate) fn replay(&mut self, replayed: Replayed) {
        self.replayed = Some(replayed);
    }

    fn now_ms(&self) -> u64 {
        self.replayed.map_or_else(|| self.core.clock.now_ms(), |it| it.now_ms)
    }

    /// True while puts wait for space.
    pub(crate) fn is_pressed(&mut self) -> bool {
        self.pressed().is_some()
    }

    /// The part of a segment's pages that is copied at most. `None`: there is no pressure.
    fn pressed(&mut self) -> Option<f64> {
        match self.replayed {
            Some(Replayed { press: Press::Not, .. }) => None,
            Some(Replayed { press: Press::Always, .. }) => Some(PRESSURE_LEAST),
            None => self.pressure.copied(&self.core),
        }
    }

    /// Gives back what processes have left that died.
    pub(crate) fn repair(&mut self) {
        let core = Arc::clone(&self.core);
        let (dead, awaited): (Vec<_>, Vec<_>) = core
            .member
            .members()
            .filter(|it| core.member.has_died(*it))
            .partition(|it| core.has_ended(*it) && !core.is_writing_late(*it));
        self.awaits_end = !awaited.is_empty();
        if dead.is_empty() {
            return;
        }
        self.left.next = 0;
        // All of them, before anything is freed.
        let living = self.living();
        let is_kept = dead.iter().map(|it| self.keep_left(*it, &living)).collect::<Vec<_>>();
        for (dead, is_kept) in dead.into_iter().zip(is_kept) {
            if !is_kept {
                // Nothing of it is given to another one before.
                self.awaits_end = true;
                continue;
            }
            if self.drain(dead.number) {
                self.begin_anew();
            }
            for (number, segment) in core.member.held_by(dead) {
                // What it wrote is as good as before. Nothing may live where it was about to write.
                let to = match living.contains(&number) {
                    true => SegmentState::Sealed,
                    false => self.free(number, Some(&living)),
                };
                core.settle(number, segment.state, to);
            }
            // If it fails, the next process that leaves has it tried again.
            core.member.sweep(dead);
        }
        core.member.recount();
    }

    /// Whether, when this last looked, space was wanted and processes held all segments that have blocks.
    pub(crate) fn is_stuck(&self) -> bool {
        self.is_stuck
    }

    /// Whether the last look has left work to the next one, which is to begin at once.
    pub(crate) fn goes_on(&self) -> bool {
        self.goes_on
    }

    /// Whether a process was killed that has threads left, or something on a device that hangs.
    pub(crate) fn awaits_end(&self) -> bool {
        self.awaits_end
    }

    /// The segments in which blocks live. Their counters may be wrong after a death.
    fn living(&self) -> FxHashSet<u32> {
        let segment = |entry: Entry| self.core.superblock.geometry.locate(entry.page).0;
        self.core.member.iter().map(segment).collect()
    }

    /// Syncs what a dead process was writing. False if a device hangs.
    fn keep_left(&self, dead: MemberId, living: &FxHashSet<u32>) -> bool {
        let core = &self.core;
        for (number, segment) in core.member.held_by(dead) {
            if !matches!(segment.state, SegmentState::Active(_)) || !living.contains(&number) {
                continue;
            }
            core.member.note_open(number, true);
            match core.disk.sync(number) {
                Ok(()) => core.member.note_copies(number, false),
                Err(e) => {
                    core.fault("sync", number, &e);
                    if is_hang(&e) {
                        return false;
                    }
                    note_failed_sync(core, number, &e);
                }
            }
        }
        true
    }

    /// Seals a segment that a dead process has not sealed. Returns whether there may be more: to read one takes its time.
    fn seal_left(&mut self, is_stopping: &AtomicBool) -> bool {
        if self.left.failed_at.is_some_and(|at| at.elapsed() < RETRY_EVERY) {
            return false;
        }
        let core = Arc::clone(&self.core);
        for number in std::mem::take(&mut self.left.next)..core.member.geometry().segments {
            if is_stopping.load(Relaxed) {
                return false;
            }
            // Of those without a sync: a device that has failed to write pages may report the next one of them as done,
            // and they are lost.
            if !core.member.is_open(number) || core.member.is_unsynced(number) {
                continue;
            }
            let mine = SegmentState::Collecting(core.member.id());
            if !core.member.set_segment(number, SegmentState::Sealed, mine) {
                continue;
            }
            self.collecting = Some(number);
            let sealed = seal_left(&core, number, is_stopping);
            self.collecting = None;
            if let Ok(true) = sealed {
                core.member.note_open(number, false);
            }
            core.settle(number, mine, SegmentState::Sealed);
            match sealed {
                Ok(true) => {}
                // It is being stopped.
                Ok(false) => return false,
                Err(e) => {
                    core.fault("seal", number, &e);
                    self.left.has_failed = true;
                }
            }
            self.left.next = number + 1;
            return true;
        }
        let has_failed = std::mem::take(&mut self.left.has_failed);
        self.left.failed_at = has_failed.then(Instant::now);
        false
    }

    /// Takes the events, and frees a segment if there are too few. What else is to be done is left to the next look
    /// ([`Keeper::goes_on`]): puts that take each segment at once must not keep this thread from its other work.
    pub(crate) fn look(&mut self, is_stopping: &AtomicBool) {
        self.hear();
        self.evict_due();
        self.keep_slots();
        let frees_more = self.keep_segments(is_stopping);
        let seals_more = self.seal_left(is_stopping);
        self.goes_on = frees_more || seals_more;
        self.core.member.collapse(HUGE_PAGES);
    }

    /// Looks until nothing is left to do.
    pub(crate) fn look_at_all(&mut self) {
        let is_stopping = AtomicBool::new(false);
        self.look(&is_stopping);
        while self.goes_on {
            self.look(&is_stopping);
        }
    }

    /// Takes the events of all processes.
    fn hear(&mut self) {
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
    fn begin_anew(&mut self) {
        self.policy = rebuild(&self.core);
        self.condemned = Condemned::new(self.core.member.geometry());
        self.pins = Pins::default();
        self.kept.clear();
    }

    /// Takes the events of a process. Returns whether the policy must be made anew.
    fn drain(&mut self, number: u8) -> bool {
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
            Event::Removed { slot } => {
                if member.entry(slot).is_none() {
                    policy.removed(slot);
                    condemned.forget(slot);
                }
            }
        });
        drained.rebuild
    }

    fn evict_due(&mut self) {
        let now = self.now_ms();
        let member = &self.core.member;
        let key_of = |slot| member.entry(slot).map_or(0, |entry| entry.key.0[0]);
        while let Some(slot) = self.policy.evict_due(now, key_of) {
            remove(&self.core, slot);
        }
    }

    /// Gives up one block, which leaves with its segment. Returns its pages; `None` if no block can leave.
    fn condemn(&mut self) -> Option<u32> {
        let slot = self.give_up()?;
        let Some(entry) = self.core.member.entry(slot) else { return Some(0) };
        match Retention::from_bits(entry.retention).then {
            Then::Default => self.condemned.add(&entry),
            // Nothing would see to it that it is not found later.
            Then::Leave => remove(&self.core, slot),
        }
        Some(pages_of(entry.len))
    }

    /// The next block by the policy, which forgets it.
    fn give_up(&mut self) -> Option<SlotId> {
        let now = self.now_ms();
        let member = &self.core.member;
        let key_of = |slot| member.entry(slot).map_or(0, |entry| entry.key.0[0]);
        self.policy.evict(now, key_of)
    }

    fn keep_slots(&mut self) {
        let slots = f64::from(self.core.member.geometry().slots);
        while self.core.member.live() as f64 > slots * SLOT_SHARE {
            let Some(slot) = self.condemned.any().or_else(|| self.give_up()) else { return };
            match self.core.member.entry(slot) {
                Some(entry) => _ = self.condemned.remove(&entry),
                None => _ = self.condemned.forget(slot),
            }
            remove(&self.core, slot);
        }
    }

    /// Pages of a segment's blocks that are worth keeping.
    fn worthy(&self, number: u32, segment: &Segment) -> u32 {
        segment.live_pages.saturating_sub(self.condemned.pages(number))
    }

    /// Frees a segment, if there are too few. Returns whether there still are.
    fn keep_segments(&mut self, is_stopping: &AtomicBool) -> bool {
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
    fn free_segment(&mut self, is_stopping: &AtomicBool) -> bool {
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
            self.hear();
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
    fn wanted(&mut self) -> usize {
        let segments = self.core.member.geometry().segments;
        let most = (segments / FREE_SHARE).max(FREE_PER_PROCESS) as usize;
        let wanted = self.core.wanted_segments();
        if self.replayed.is_some() {
            return wanted;
        }
        wanted.max(most.min(wanted + self.pace.ahead(&self.core, self.begun)))
    }

    /// Whether this process has full segments that this thread has not sealed, and so can't collect.
    fn waits_for_seal(&self) -> bool {
        let held = self.core.member.held_by(self.core.member.id());
        // Those that can't be sealed, as their directory hangs, are not waited for.
        let is_active = |(number, it): &(u32, Segment)| {
            matches!(it.state, SegmentState::Active(_)) && !self.core.disk.hangs(*number)
        };
        let active = held.filter(is_active).count();
        active > 1 + self.own.iter().chain(&self.other).count()
    }

    /// Tries whether withheld segments can be used again, one after another in each directory until one fails. A lock
    /// keeps back its own segment alone.
    fn retry_withheld(&mut self) {
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

    /// The segment to collect, of those that can be used again then: where the most space is gained for what is copied,
    /// and for the longest time. What has lived for long goes on to live, and what is new may leave by itself soon.
    fn victim(&self, may_be: impl Fn(u32, &Segment) -> bool) -> Option<(u32, Segment)> {
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

    fn collect_or_drop(&mut self, number: u32, share: Option<f64>) -> bool {
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

    /// Gives back the segments of a keeper that has panicked: the next one seals and collects them.
    pub(crate) fn abandon(&mut self) {
        let member = &self.core.member;
        if let Some(number) = self.collecting.take() {
            let mine = SegmentState::Collecting(member.id());
            member.set_segment(number, mine, SegmentState::Sealed);
        }
        for own in [self.own.take(), self.other.take()].into_iter().flatten() {
            member.note_open(own.segment(), true);
            let mine = SegmentState::Active(member.id());
            member.set_segment(own.segment(), mine, SegmentState::Sealed);
        }
    }

    /// Copies what lives in a segment. Blocks beyond `share` of its pages are removed.
    fn collect(&mut self, segment: u32, share: Option<f64>) -> io::Result<Collected> {
        let core = Arc::clone(&self.core);
        let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
        let scanned = scanned.map_err(log::Error::into_io)?;
        let unreadable = scanned.as_ref().and_then(|it| it.unreadable.clone());
        if let Some(error) = &unreadable {
            core.fault("read the headers of", segment, error);
        }
        let records = scanned.map_or(Vec::new(), |it| it.records);
        // Blocks may have been pinned since the segment was chosen.
        self.hear();
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
        self.hear();
        let mut is_left = false;
        for (entry, _) in &condemned {
            if core.member.pins_changed() != self.pins.changed {
                self.hear();
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

    /// Removes blocks of a segment that are worth least, until the others take no more than `share` of its pages. False,
    /// and nothing is removed, if so much may not leave that copying the rest is not worth it.
    fn thin(&mut self, live: &mut Vec<(Entry, Record)>, share: f64) -> bool {
        let core = Arc::clone(&self.core);
        let room = f64::from(core.member.geometry().pages_per_segment) * share;
        let mut pages: u64 = live.iter().map(|(entry, _)| u64::from(pages_of(entry.len))).sum();
        let (now, mut held) = (self.now_ms(), self.policy.held());
        let is_held = |(entry, _): &&(Entry, Record)| held.contains(&entry.slot);
        let stays: u64 =
            live.iter().filter(is_held).map(|(entry, _)| u64::from(pages_of(entry.len))).sum();
        if stays as f64 > f64::from(core.member.geometry().pages_per_segment) * LIVE_SHARE {
            return false;
        }
        let mut order: Vec<_> = live
            .iter()
            .filter(|it| !is_held(it))
            .map(|(entry, _)| (self.policy.standing(now, entry.slot), *entry))
            .collect();
        order.sort_unstable_by(|(a, _), (b, _)| a.total_cmp(b));
        let mut removed = FxHashSet::default();
        for (_, entry) in order {
            if pages as f64 <= room {
                break;
            }
            if core.member.pins_changed() != self.pins.changed {
                self.hear();
                held = self.policy.held();
            }
            if held.contains(&entry.slot) {
                continue;
            }
            if evict(&core, &entry) {
                self.policy.removed(entry.slot);
                pages -= u64::from(pages_of(entry.len));
                removed.insert(entry.slot);
            }
        }
        live.retain(|(entry, _)| !removed.contains(&entry.slot));
        true
    }

    /// Blocks that are worth less than most that were copied lately, and the others.
    fn by_worth(&mut self, live: Vec<(Entry, Record)>) -> [(bool, Vec<(Entry, Record)>); 2] {
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
    fn switch(&mut self, is_for_more: bool) {
        if self.is_for_more != is_for_more {
            std::mem::swap(&mut self.own, &mut self.other);
            self.is_for_more = is_for_more;
        }
    }

    fn copy_all(&mut self, from: u32, blocks: &[(Entry, Record)]) -> io::Result<Collected> {
        let mut rest = blocks;
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(entry, _): &&(Entry, Record)| {
                bytes += bytes_of(pages_of(entry.len));
                bytes <= COPY_BYTES as u64
            };
            let count = rest.iter().take(EXTENT_RECORDS).take_while(fits).count().max(1);
            let (some, others) = rest.split_at(count);
            match self.copy(from, some)? {
                Collected::All => {}
                other => return Ok(other),
            }
            rest = others;
        }
        Ok(Collected::All)
    }

    /// Copies blocks of a segment to the keeper's own. A block that can't be read is removed.
    fn copy(&mut self, from: u32, blocks: &[(Entry, Record)]) -> io::Result<Collected> {
        let mut buffer = std::mem::take(&mut self.buffer);
        let copied = self.copy_through(&mut buffer, from, blocks);
        self.buffer = buffer;
        copied
    }

    fn copy_through(
        &mut self,
        buffer: &mut Vec<u8>,
        from: u32,
        blocks: &[(Entry, Record)],
    ) -> io::Result<Collected> {
        let core = Arc::clone(&self.core);
        let bytes: usize = blocks.iter().map(|(entry, _)| page_bytes(entry.len)).sum();
        if buffer.len() < bytes {
            buffer.resize(bytes, 0);
        }
        let (mut right, mut filled) = (Vec::with_capacity(blocks.len()), 0);
        let are_neighbours = |(_, one): &(Entry, Record), (_, next): &(Entry, Record)| {
            one.end() == u64::from(next.page)
        };
        for run in blocks.chunk_by(are_neighbours) {
            let bytes: usize = run.iter().map(|(entry, _)| page_bytes(entry.len)).sum();
            let at = bytes_of(run[0].1.page);
            let is_read = core.disk.read_at(from, at, &mut buffer[filled..filled + bytes]).is_ok();
            // Where the last block of the run is that was looked at. Blocks that are right follow each other.
            let mut there = filled;
            for (entry, record) in run {
                let len = page_bytes(entry.len);
                let data = &mut buffer[there..there + len];
                // Of neighbours that can't be read at once, most can be read alone.
                let read = match is_read {
                    true => Ok(()),
                    false => core.disk.read_at(from, bytes_of(record.page), data),
                };
                if let Err(e) = read {
                    self.unreadable += 1;
                    if !is_of_device(&e) || is_hang(&e) || self.unreadable > UNREADABLE_MAX {
                        return Err(e);
                    }
                    core.fault("read a block of", from, &e);
                    if core.member.remove(entry) {
                        Counters::add(&core.counters.failed, 1);
                        self.policy.removed(entry.slot);
                    }
                    there += len;
                    continue;
                }
                let sum = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, data) ^ record.block.check;
                if sum == entry.sum {
                    if there > filled {
                        buffer.copy_within(there..there + len, filled);
                    }
                    right.push((entry, record));
                    filled += len;
                } else if core.member.remove(entry) {
                    core.fault("verify a block of", from, &"its bytes are not what was put");
                    Counters::add(&core.counters.corrupt, 1);
                    core.member.note_removed(entry.slot);
                }
                there += len;
            }
        }
        let (mut rest, mut data) = (right.as_slice(), &buffer[..filled]);
        while !rest.is_empty() {
            let described: Vec<_> = rest.iter().map(|(_, record)| record.block).collect();
            let planned = self.own.as_mut().and_then(|own| own.plan(&described));
            let Some(extent) = planned else {
                match self.begin_own() {
                    Ok(true) => continue,
                    Ok(false) => {}
                    // Such as: the disk is full. The segment that is collected exists, and can be begun.
                    Err(e) => core.fault("begin a segment after", from, &e),
                }
                return Ok(Collected::NoRoom);
            };
            let (at, header) = extent.header();
            let to = extent.segment();
            // First: whoever is the next keeper knows it.
            core.member.note_copies(to, true);
            self.sources.note_copied(&core.member, from, to);
            let some = &rest[..extent.records().len()];
            let bytes = some.iter().map(|(entry, _)| page_bytes(entry.len)).sum();
            let (now, behind) = data.split_at(bytes);
            // The blocks of an extent follow each other.
            let first = bytes_of(extent.records()[0].page);
            let written = core.disk.write_at(to, at, &header.0);
            let written = written.and_then(|()| core.disk.write_at(to, first, now));
            let mut is_moved = true;
            if written.is_ok() {
                for (record, (entry, _)) in extent.records().iter().zip(some) {
                    let page = core.superblock.geometry.place(to, record.page);
                    // Not, if the block was removed meanwhile, or a stopped process holds its lock.
                    is_moved &= core.member.relocate(entry, page) || !is_there(&core, entry);
                    core.counters.bytes_collected.fetch_add(entry.len.into(), Relaxed);
                }
            }
            let count = some.len();
            self.own.as_mut().expect("it planned").finished(extent, written.is_ok());
            if let Err(e) = written {
                core.fault("write", to, &e);
                self.stop();
                return Ok(Collected::NotAll);
            }
            if !is_moved {
                return Ok(Collected::NotAll);
            }
            (rest, data) = (&rest[count..], behind);
        }
        Ok(Collected::All)
    }

    /// Begins another segment of the keeper's own. If none is free, that of the other worth takes its place. False if
    /// there is none either.
    fn begin_own(&mut self) -> io::Result<bool> {
        seal_own(&self.core, &mut self.own);
        // A writer that takes the last segment gives it back at once.
        for _ in 0..LAST_TRIES {
            self.own = begin_segment(&self.core, 0)?;
            if self.own.is_some() {
                break;
            }
            std::thread::sleep(LAST_EVERY);
        }
        match &self.own {
            Some(own) => {
                self.begun += 1;
                self.sources.begin(own.segment());
            }
            None => self.own = self.other.take(),
        }
        Ok(self.own.is_some())
    }

    /// Whether blocks of a segment are pinned, or before one that is.
    fn has_pinned(&mut self, segment: u32) -> bool {
        self.hear();
        let (geometry, member) = (self.core.superblock.geometry, &self.core.member);
        let is_here = |slot: &SlotId| {
            member.entry(*slot).is_some_and(|entry| geometry.locate(entry.page).0 == segment)
        };
        self.policy.pinned().iter().any(is_here)
    }

    /// Removes the blocks of a segment, and counts them. False if some could not be removed.
    fn drop_blocks(&mut self, segment: u32, counter: fn(&Counters) -> &AtomicU64) -> bool {
        let core = Arc::clone(&self.core);
        let mut is_empty = true;
        for entry in core.member.iter() {
            if core.superblock.geometry.locate(entry.page).0 != segment {
                continue;
            }
            if core.member.remove(&entry) {
                self.policy.removed(entry.slot);
                self.condemned.remove(&entry);
                core.disk.note_evicted(entry.key.0);
                Counters::add(counter(&core.counters), 1);
            } else {
                is_empty &= !is_there(&core, &entry);
            }
        }
        is_empty
    }

    /// Seals the keeper's own segments.
    pub(crate) fn stop(&mut self) {
        seal_own(&self.core, &mut self.own);
        seal_own(&self.core, &mut self.other);
    }
}

fn seal_own(core: &Core, own: &mut Option<Appender>) {
    if let Some(mut own) = own.take()
        && !seal(core, &mut own)
    {
        core.keep_unsealed(own);
    }
}

/// Worths of the blocks that were copied last.
#[derive(Debug, Default)]
struct Worths(VecDeque<f64>);

impl Worths {
    /// Takes further ones in. Half of those that are known are worth less than the result.
    fn middle(&mut self, further: &[f64]) -> f64 {
        self.0.extend(further);
        self.0.drain(..self.0.len().saturating_sub(WORTHS));
        let mut known: Vec<_> = self.0.iter().copied().collect();
        let middle = known.len() / 2;
        match known.is_empty() {
            true => 0.0,
            false => *known.select_nth_unstable_by(middle, f64::total_cmp).1,
        }
    }
}

/// Segments that were collected one after another, each of which needed another segment for what it held.
#[derive(Debug, Default)]
struct Fruitless {
    count: u32,
    /// Pages worth keeping of the next segment that is collected, at most. `None`: as many as of any.
    limit: Option<u32>,
}

/// Progress in sealing the segments of dead processes.
#[derive(Debug, Default)]
struct Left {
    /// The next segment to look at.
    next: u32,
    /// Set if a segment before `next` could not be sealed.
    has_failed: bool,
    /// End of the last pass over all segments, if one of them could not be sealed.
    failed_at: Option<Instant>,
}

/// Part of a segment that is copied while puts find no free segment.
#[derive(Debug)]
struct Pressure {
    /// [`crate::index::Index::no_space`] when it was last read.
    seen: u32,
    /// Times since which puts find no free segment, and at which one last found none.
    since: Option<(Instant, Instant)>,
    share: f64,
}

impl Pressure {
    fn new(core: &Core) -> Self {
        Self { seen: core.member.no_space(), since: None, share: LIVE_SHARE }
    }

    /// The part of a segment's pages that is copied at most. `None`: there is no pressure.
    fn copied(&mut self, core: &Core) -> Option<f64> {
        let (seen, now) = (core.member.no_space(), Instant::now());
        if seen != self.seen {
            self.seen = seen;
            let since = self.since.filter(|(_, last)| now - *last < PRESSURE_FOR);
            self.since = Some((since.map_or(now, |(since, _)| since), now));
        }
        let (since, last) = self.since?;
        let is_pressed = now - last < PRESSURE_FOR && now - since >= PRESSURE_AFTER;
        is_pressed.then_some(self.share)
    }

    /// A segment was freed, and it is not enough.
    fn fall(&mut self) {
        self.share = (self.share * PRESSURE_FALL).max(PRESSURE_LEAST);
    }

    /// Enough segments are free.
    fn relax(&mut self) {
        self.share = (self.share + PRESSURE_RISE).min(LIVE_SHARE);
    }
}

/// Rate at which segments are put, and the time that it takes to free one.
#[derive(Debug)]
struct Pace {
    /// Time of the last measurement, and the incarnations and own segments that were begun until then.
    at: Instant,
    incarnations: u64,
    begun: u64,
    /// Segments in a second.
    rate: f64,
    seconds_to_free: f64,
}

impl Pace {
    fn new(core: &Core) -> Self {
        let (at, incarnations) = (Instant::now(), core.member.next_incarnation());
        Self { at, incarnations, begun: 0, rate: 0.0, seconds_to_free: 0.0 }
    }

    fn freed_one(&mut self, took: Duration) {
        self.seconds_to_free += (took.as_secs_f64() - self.seconds_to_free) * RATE_NEW;
    }

    /// Segments that are to be free for what is put while others are freed. `begun`: segments of the keeper's own that
    /// were begun.
    fn ahead(&mut self, core: &Core, begun: u64) -> usize {
        let passed = self.at.elapsed();
        if passed >= RATE_EVERY {
            let incarnations = core.member.next_incarnation();
            let all = incarnations.saturating_sub(self.incarnations) as f64;
            let put = (all - begun.saturating_sub(self.begun) as f64).max(0.0);
            let (rate, passed) = (put / passed.as_secs_f64(), passed.as_secs_f64());
            // What was measured over a long time counts for more.
            let part = 1.0 - (1.0 - RATE_NEW).powf(passed / RATE_EVERY.as_secs_f64());
            self.rate += (rate - self.rate) * part;
            (self.at, self.incarnations, self.begun) = (Instant::now(), incarnations, begun);
        }
        (self.rate * self.seconds_to_free * FREE_AHEAD).ceil() as usize
    }
}

/// The leases that the policy knows of.
#[derive(Debug, Default)]
struct Pins {
    slots: FxHashSet<SlotId>,
    /// [`crate::index::Index::pins_changed`] when they were read.
    changed: u64,
    /// End of the lease that ends first, in seconds of the store's time. 0 while the policy does not know a leased
    /// block.
    ends_s: u32,
}

impl Pins {
    /// Pins what is leased, and unpins what is not any more. Returns the blocks that a lease has kept which has ended.
    fn follow(
        &mut self,
        core: &Core,
        policy: &mut Policy,
        condemned: &mut Condemned,
    ) -> FxHashSet<SlotId> {
        let (now, changed) = (core.clock.now_s(), core.member.pins_changed());
        if changed == self.changed && now < self.ends_s {
            return FxHashSet::default();
        }
        let leased: Vec<_> = core.member.pins(now).collect();
        let slots: FxHashSet<_> = leased.iter().map(|(slot, _)| *slot).collect();
        let mut ended = Vec::new();
        self.slots.retain(|slot| {
            let is_leased = slots.contains(slot);
            if !is_leased {
                policy.unpin(*slot);
                ended.push(*slot);
            }
            is_leased
        });
        let mut all_known = true;
        for slot in slots {
            if !self.slots.contains(&slot) {
                recall_with_those_before(core, policy, condemned, slot);
                match policy.pin(slot) {
                    true => _ = self.slots.insert(slot),
                    // Its event is still to come, or it has left.
                    false => all_known = false,
                }
            }
        }
        self.changed = changed;
        let ends = leased.iter().map(|(_, until_s)| *until_s).min().unwrap_or(u32::MAX);
        self.ends_s = if all_known { ends } else { 0 };
        policy.with_those_before(ended.into_iter())
    }
}

/// Like [`recall`], for a block and those before it in its prompt.
fn recall_with_those_before(
    core: &Core,
    policy: &mut Policy,
    condemned: &mut Condemned,
    slot: SlotId,
) {
    let (mut chain, mut at) = (Vec::new(), Some(slot));
    while let Some(entry) = at.and_then(|slot| core.member.entry(slot))
        && condemned.remove(&entry)
    {
        chain.push(entry.slot);
        at = entry.parent;
    }
    chain.reverse();
    let parent = at.filter(|slot| policy.contains(*slot));
    let now_ms = core.clock.now_ms();
    add(core, policy, now_ms, parent, &chain);
}

/// Result of copying a segment's blocks.
enum Collected {
    /// Nothing lives in it, unless its headers are damaged.
    All,
    /// No block that the headers list lives in it. Some of those could not be read.
    Listed,
    /// A block could not be moved: a process that is stopped holds its lock, or it could not be written.
    NotAll,
    /// No segment is free to copy to.
    NoRoom,
    /// Too many blocks may not leave for others.
    TooMuch,
}

/// Pages that may live in a segment that is collected: a share of what blocks of its length can fill.
fn worth(pages_per_segment: u32, segment: &Segment, share: f64) -> u32 {
    let mean = segment.live_pages.checked_div(segment.live_blocks).unwrap_or(0).max(1);
    let room = pages_per_segment.saturating_sub(OVERHEAD_PAGES);
    (f64::from(room / mean * mean) * share) as u32
}

/// Seals a segment whose process has ended, and which this one holds. A restart takes what a footer lists for whole. Blocks that the index has
/// were written whole, unless it has them from the disk: those are compared with their sums, and leave if they are
/// torn. False if the keeper is stopped meanwhile.
fn seal_left(core: &Core, segment: u32, is_stopping: &AtomicBool) -> io::Result<bool> {
    let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
    let Some(mut scanned) = scanned.map_err(log::Error::into_io)? else { return Ok(true) };
    if let Some(error) = scanned.unreadable {
        // Its footer would not list all blocks.
        return Err(io::Error::other(error));
    }
    let is_unverified = core.member.is_unverified(segment);
    let (mut whole, mut unreadable) = (Vec::with_capacity(scanned.records.len()), 0);
    for record in scanned.records {
        let here = core.superblock.geometry.place(segment, record.page);
        let entry = core.member.find(&Key(record.block.key)).filter(|it| it.page == here);
        let Some(entry) = entry else { continue };
        if is_unverified {
            if is_stopping.load(Relaxed) {
                return Ok(false);
            }
            match log::recover::sum_of(&core.disk, segment, record.page, record.block.len) {
                Ok(sum) if sum ^ record.block.check == entry.sum => {}
                Err(e) if !is_of_device(&e) || is_hang(&e) || unreadable == UNREADABLE_MAX => {
                    return Err(e);
                }
                torn => {
                    unreadable += u32::from(torn.is_err());
                    if core.member.remove(&entry) {
                        core.torn(segment, &entry, torn.err().as_ref());
                    } else if is_there(core, &entry) {
                        // A process that is stopped holds its lock.
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                    continue;
                }
            }
        }
        whole.push(record);
    }
    scanned.records = whole;
    let sealed = log::recover::seal(&core.disk, &core.superblock, &mut scanned);
    sealed.map_err(log::Error::into_io).inspect_err(|e| note_failed_sync(core, segment, e))?;
    Ok(true)
}

/// Whether a block is where it was. It may have been used since.
fn is_there(core: &Core, entry: &Entry) -> bool {
    let now = core.member.entry(entry.slot);
    now.is_some_and(|now| now.key == entry.key && now.page == entry.page)
}

fn page_bytes(len: u32) -> usize {
    usize::try_from(bytes_of(pages_of(len))).expect("at most a segment")
}

/// Removes the block of a slot from the index.
fn remove(core: &Core, slot: SlotId) {
    if let Some(entry) = core.member.entry(slot) {
        evict(core, &entry);
    }
}

/// Removes a block from the index. False if it is not where it was, or a stopped process holds its lock.
fn evict(core: &Core, entry: &Entry) -> bool {
    core.disk.note_evicted(entry.key.0);
    let is_removed = core.member.remove(entry);
    Counters::add(&core.counters.evicted, usize::from(is_removed));
    is_removed
}

/// Tells the policy of blocks that came, in the order of their prompt.
fn add(core: &Core, policy: &mut Policy, now_ms: u64, parent: Option<SlotId>, slots: &[SlotId]) {
    let entries: Vec<_> = slots.iter().filter_map(|slot| core.member.entry(*slot)).collect();
    let mut parent = parent;
    for alike in entries.chunk_by(|one, next| one.retention == next.retention) {
        let blocks: Vec<_> = alike.iter().map(|it| (it.slot, it.key.0[0])).collect();
        let retention = Retention::from_bits(alike[0].retention);
        policy.added(now_ms, parent, &blocks, retention);
        parent = alike.last().map(|it| it.slot);
    }
}

/// Tells the policy of blocks that it had given up, and that are wanted again.
fn recall(
    core: &Core,
    policy: &mut Policy,
    condemned: &mut Condemned,
    now_ms: u64,
    parent: Option<SlotId>,
    slots: &[SlotId],
) {
    if slots.is_empty() {
        return;
    }
    for entry in slots.iter().filter_map(|slot| core.member.entry(*slot)) {
        condemned.remove(&entry);
    }
    add(core, policy, now_ms, parent, slots);
}

/// A policy of the blocks that the index has.
fn rebuild(core: &Core) -> Policy {
    let kept = |entry: Entry| Kept {
        slot: entry.slot,
        parent: entry.parent,
        used_at_ms: u64::from(entry.used_at) * 1000,
        retention: Retention::from_bits(entry.retention),
    };
    let slots = core.member.geometry().slots as usize;
    Policy::rebuild(slots, core.member.iter().map(kept))
}

#[cfg(test)]
mod deaths;
#[cfg(test)]
mod pressure;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::New;
    use crate::log::Block;
    use crate::memory::BlockMemory;
    use crate::opening::Opening;
    use crate::opening::recover;
    use crate::options::StoreOptions;
    use crate::writer::{Candidate, Which, Writer};
    use kvferry::{Access, Agent, Region};
    use kvferry_testkit::PATIENCE;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::path::PathBuf;

    const LEN: u32 = 60_000;

    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A store of segments of 1 MiB, without threads.
    fn core(name: &str) -> (Arc<Core>, Agent, Folder) {
        let name = format!("kvferry-keeper-{name}-{}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        let _ = std::fs::remove_dir_all(&folder.0);
        let agent = Agent::builder().start().expect("an agent");
        let options = StoreOptions::new(&folder.0, 24 << 20).segment_bytes(1 << 20);
        let opening = Opening::new(&agent, &options).expect("directories");
        let superblock = opening.open_superblock().expect("a superblock");
        let disk = opening.disk(&superblock, true).expect("files");
        let geometry = options.geometry(None).expect("in bounds");
        let index = recover::fill(&disk, &superblock, geometry).expect("an index");
        let member = index.join().expect("a member");
        (Arc::new(Core::new(disk, superblock, member)), agent, folder)
    }

    /// Puts a block with these bytes. Returns its segment.
    fn put(core: &Core, writer: &Writer, pool: &Region, key: u64) -> u32 {
        put_long(core, writer, pool, key, LEN)
    }

    fn put_long(core: &Core, writer: &Writer, pool: &Region, key: u64, len: u32) -> u32 {
        let mut bytes = vec![0; len as usize];
        fastrand::Rng::with_seed(key).fill(&mut bytes);
        pool.write_at(0, &bytes).expect("inside");
        let memory = BlockMemory::new(pool, 0, len.into());
        let sum = memory.sum().expect("registered");
        let (parent, check, namespace, retention, time) = (None, 0, 7, 0, 0);
        let block = Block { key: [key, key], parent, sum, check, namespace, len, retention, time };
        let mut to = 0;
        let writing = writer.begin(core, &[Candidate { block, memory }]).expect("room");
        let written = writing.end(core, |segment, new| {
            let page = core.superblock.geometry.place(segment, new[0].page);
            let new = New { sum, parent: None, page, len, retention, now: 0 };
            core.member.insert(Key([key, key]), new);
            to = segment;
        });
        assert!(written.is_ok(), "{written:?} of {key}");
        to
    }

    /// Whether a block is in the index, and its bytes are right.
    fn is_right(core: &Core, key: u64) -> bool {
        let Some(entry) = core.member.find(&Key([key, key])) else { return false };
        let (segment, page) = core.superblock.geometry.locate(entry.page);
        let mut data = vec![0; page_bytes(entry.len)];
        core.disk.read_at(segment, bytes_of(page), &mut data).expect("it was copied");
        crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &data) == entry.sum
    }

    #[test]
    fn a_block_that_cannot_be_read_when_its_segment_is_collected_costs_only_itself() {
        for is_sealed in [true, false] {
            let (core, agent, _folder) = core("unreadable");
            let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
            let writer = Writer::default();
            let segments: Vec<_> = (1..=12).map(|key| put(&core, &writer, &pool, key)).collect();
            assert!(segments.iter().all(|it| *it == segments[0]));
            let segment = segments[0];
            if is_sealed {
                writer.seal(&core, Which::All);
            } else {
                // Its process was killed: it has no footer.
                let mine = SegmentState::Active(core.member.id());
                assert!(core.member.set_segment(segment, mine, SegmentState::Sealed));
            }
            // A file that is cut can't be read behind the cut. 4 blocks are behind.
            let (_, cut) = core
                .superblock
                .geometry
                .locate(core.member.find(&Key([9, 9])).expect("put above").page);
            let path = core.disk.path_of(segment);
            let file = std::fs::File::options().write(true).open(&path).expect("it exists");
            file.set_len(bytes_of(cut)).expect("it is cut");
            let mut keeper = Keeper::new(Arc::clone(&core));
            assert!(keeper.collect_one(segment, None));
            let right: Vec<_> = (1..=12).map(|key| is_right(&core, key)).collect();
            assert_eq!(right, [[true; 8].as_slice(), &[false; 4]].concat(), "{is_sealed}");
            let stats = core.counters.read();
            assert_eq!((stats.failed, stats.corrupt), (4, 0), "{stats:?}");
            assert_eq!(core.member.segment(segment).state, SegmentState::Free);
            // It is used again.
            let writer = Writer::default();
            for key in 100..150 {
                put(&core, &writer, &pool, key);
            }
            assert!((100..150).all(|key| is_right(&core, key)));
            keeper.stop();
        }
    }

    #[test]
    fn a_block_that_fits_into_the_active_segment_does_not_wait_for_another_to_be_made() {
        let (core, agent, _folder) = core("create");
        let pools = [(); 2].map(|()| agent.allocate(900 << 10, Access::NONE).expect("memory"));
        let writer = Writer::default();
        let first = put_long(&core, &writer, &pools[0], 1, 800 << 10);
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let held = core.disk.hold_creates(0);
            let (core, writer, pools) = (&core, &writer, &pools);
            let long = scope.spawn(|| put_long(core, writer, &pools[0], 2, 800 << 10));
            let active = || core.member.held_by(core.member.id()).count();
            while active() < 2 {
                assert!(!long.is_finished());
                std::thread::yield_now();
            }
            scope.spawn(move || done.send(put(core, writer, &pools[1], 3)));
            let short = is_done.recv_timeout(PATIENCE / 2);
            assert!(!long.is_finished());
            drop(held);
            assert_eq!(short, Ok(first));
            assert_ne!(long.join().expect("it is stored"), first);
        });
        assert!((1..=3).all(|key| is_right(&core, key)));
    }

    /// Puts blocks of a segment each.
    fn fill(core: &Core, writer: &Writer, pool: &Region, segments: u64) {
        for key in 1..=segments {
            put_long(core, writer, pool, key, 900_000);
        }
    }

    fn unsealed(core: &Core) -> usize {
        let held = core.member.held_by(core.member.id());
        held.filter(|(_, it)| matches!(it.state, SegmentState::Active(_))).count()
    }

    #[test]
    fn while_puts_go_on_an_eighth_of_the_store_waits_for_its_seal() {
        let (core, agent, _folder) = core("excess");
        let pool = agent.allocate(900_000, Access::NONE).expect("memory");
        let writer = Writer::default();
        fill(&core, &writer, &pool, 8);
        assert_eq!(unsealed(&core), 8, "each has a segment");
        writer.seal(&core, Which::Excess);
        // The segment that is written to, and an eighth of 23.
        assert_eq!(core.member.geometry().segments, 23);
        assert_eq!(unsealed(&core), 1 + 2);
        assert!(writer.has_full());
        writer.seal(&core, Which::Full);
        assert_eq!(unsealed(&core), 1);
        assert!(!writer.has_full());
        writer.seal(&core, Which::All);
        assert_eq!(unsealed(&core), 0);
        assert!((1..=8).all(|key| is_right(&core, key)));
        agent.shutdown();
    }

    #[test]
    fn when_puts_pause_or_space_is_short_full_segments_are_sealed() {
        for (segments, is_short) in [(3, false), (20, true)] {
            let (core, agent, _folder) = core(&format!("pause-{segments}"));
            let pool = agent.allocate(900_000, Access::NONE).expect("memory");
            let worker = crate::gc::worker::Worker::start(Arc::clone(&core)).expect("a thread");
            fill(&core, &worker.writer, &pool, segments);
            worker.wake();
            let began = Instant::now();
            while worker.writer.has_full() {
                assert!(began.elapsed() < PATIENCE / 2, "{} wait", unsealed(&core));
                std::thread::sleep(Duration::from_millis(1));
                if is_short {
                    // The puts go on.
                    worker.writer.note_begun();
                }
            }
            worker.stop();
            agent.shutdown();
        }
    }

    #[test]
    fn after_a_sync_that_failed_each_sync_fails_until_the_blocks_have_left() {
        let (core, agent, _folder) = core("sync");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        for is_sealed in [true, false] {
            let writer = Writer::default();
            let segment = put(&core, &writer, &pool, 1);
            assert!(writer.sync(&core).is_ok());
            // A file that is gone can't be synced.
            std::fs::remove_file(core.disk.path_of(segment)).expect("it exists");
            core.disk.close(segment);
            if is_sealed {
                writer.seal(&core, Which::All);
            }
            for _ in 0..2 {
                let (failed, _) = writer.sync(&core).expect_err("it can't be synced");
                assert_eq!(failed, segment);
            }
            let entry = core.member.find(&Key([1, 1])).expect("it is in the index");
            assert!(core.member.remove(&entry));
            if is_sealed {
                assert!(writer.sync(&core).is_ok());
            }
            put(&core, &Writer::default(), &pool, 2);
            let entry = core.member.find(&Key([2, 2])).expect("it is in the index");
            core.member.remove(&entry);
        }
        // What the keeper has copied concerns each process.
        let writer = Writer::default();
        let segment = put(&core, &writer, &pool, 3);
        assert!(writer.sync(&core).is_ok());
        core.member.note_unsynced(segment);
        assert!(writer.sync(&core).is_err());
        let entry = core.member.find(&Key([3, 3])).expect("it is in the index");
        core.member.remove(&entry);
        assert!(writer.sync(&core).is_ok());
    }

    /// A keeper whose store has no threads, and blocks of a prompt each in its segments.
    fn filled(core: &Core, writer: &Writer, pool: &Region, blocks: std::ops::RangeInclusive<u64>) {
        for key in blocks {
            put(core, writer, pool, key);
            let entry = core.member.find(&Key([key, key])).expect("put above");
            core.member.note_added(core.clock.now_ms(), None, &[entry.slot]);
        }
        writer.seal(core, Which::All);
    }

    #[test]
    fn a_block_that_the_policy_gives_up_is_found_until_its_segment_is_freed_and_kept_if_it_is_used()
    {
        let (core, agent, _folder) = core("condemned");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        let writer = Writer::default();
        filled(&core, &writer, &pool, 1..=40);
        let mut keeper = Keeper::new(Arc::clone(&core));
        keeper.hear();
        while keeper.condemn().is_some() {}
        assert_eq!((keeper.policy.len(), keeper.condemned.len()), (0, 40));
        assert!((1..=40).all(|key| is_right(&core, key)), "they are found");
        // One is used, and one is pinned.
        let slot = |key| core.member.find(&Key([key, key])).expect("it is there").slot;
        core.member.note_used(core.clock.now_ms(), 0, &[slot(7)]);
        let now_s = core.clock.now_s();
        let pin = core.member.pin(slot(8), now_s, now_s + 3600).expect("room");
        keeper.hear();
        assert_eq!((keeper.policy.len(), keeper.condemned.len()), (2, 38));
        let of = |key| {
            core.superblock
                .geometry
                .locate(core.member.find(&Key([key, key])).expect("there").page)
                .0
        };
        let segment = of(7);
        assert_eq!(of(8), segment);
        let worthy = keeper.worthy(segment, &core.member.segment(segment));
        assert_eq!(worthy, 2 * pages_of(LEN));
        let others: Vec<_> = (1..=40).filter(|key| of(*key) != segment).collect();
        assert!(keeper.collect_one(segment, None));
        let is_kept = |key: &u64| [7, 8].contains(key) || others.contains(key);
        for key in 1..=40 {
            assert_eq!(is_right(&core, key), is_kept(&key), "{key}");
        }
        assert_eq!(core.counters.read().evicted, 38 - others.len() as u64);
        assert_eq!(keeper.condemned.len(), others.len() as u64);
        assert_eq!(keeper.condemned.pages(segment), 0);
        core.member.unpin(&pin);
        keeper.stop();
        agent.shutdown();
    }

    #[test]
    fn segments_of_a_keeper_that_has_panicked_are_sealed_and_collected_by_the_next() {
        let (core, agent, _folder) = core("panicked");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        let writer = Writer::default();
        filled(&core, &writer, &pool, 1..=40);
        let segment_of = |key| {
            let entry = core.member.find(&Key([key, key])).expect("it is there");
            core.superblock.geometry.locate(entry.page).0
        };
        let mut keeper = Keeper::new(Arc::clone(&core));
        keeper.hear();
        assert!(keeper.collect_one(segment_of(1), None));
        let (own, next) = (segment_of(1), segment_of(40));
        let mine = SegmentState::Collecting(core.member.id());
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            assert!(core.member.set_segment(next, SegmentState::Sealed, mine));
            keeper.collecting = Some(next);
            panic!("as while it copies");
        }));
        assert!(panicked.is_err());
        keeper.abandon();
        drop(keeper);
        let mut keeper = Keeper::new(Arc::clone(&core));
        assert!(!keeper.waits_for_seal());
        keeper.look_at_all();
        for segment in [own, next] {
            assert_eq!(core.member.segment(segment).state, SegmentState::Sealed);
            assert!(!core.member.is_open(segment));
            assert!(keeper.collect_one(segment, None));
        }
        assert!((1..=40).all(|key| is_right(&core, key)));
        keeper.stop();
        agent.shutdown();
    }
}
