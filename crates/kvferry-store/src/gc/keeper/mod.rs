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
//! # Threads
//! One thread frees segments; under pressure, a second one seals meanwhile what puts have filled. More threads would not
//! copy at the same time: they would share the policy, the own segments and the index's locks, and the device has little to
//! copy then, some 0.4 bytes for each byte that is put. What is copied is read and written in runs of neighbours, many
//! blocks in one call.
//!
//! # Two own segments
//! To free a segment is cheap where all of its blocks have come to be worth little at about the same time. So blocks
//! that are copied go to one of two segments of the keeper's own, by whether they are worth more or less than most
//! that were copied lately. Where no other segment is free, and in a small store, one serves for both.

mod collect;
mod condemned;
mod copy;
mod drain;
mod evict;
mod inherit;
mod policy_feed;
mod pressure;
mod sources;
mod withhold;

use crate::core::Core;
use crate::gc::sealing::seal;
use crate::index::SegmentState;
use crate::log::Appender;
use crate::policy::Policy;
use condemned::Condemned;
use policy_feed::{Pins, rebuild};
use pressure::{PRESSURE_LEAST, Pace, Pressure};
use rustc_hash::FxHashMap;
use sources::Sources;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

/// Huge pages that are made each time the keeper looks: what waits for it waits for so many milliseconds, at most.
const HUGE_PAGES: usize = 16;
/// Blocks that were copied last, whose worths are compared with those of the next ones.
const WORTHS: usize = 4096;
/// Interval between tries of withheld segments, and of those that could not be freed, while space is needed.
const RETRY_EVERY: Duration = Duration::from_secs(1);

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
    left: SealProgress,
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
            left: SealProgress::default(),
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

    /// Takes the events, and frees a segment if there are too few. Other work is left to the next call
    /// ([`Keeper::goes_on`]): puts that take each segment at once must not keep this thread from its other work.
    pub(crate) fn run_once(&mut self, is_stopping: &AtomicBool) {
        self.drain_events();
        self.evict_due();
        self.keep_slots();
        let frees_more = self.keep_segments(is_stopping);
        let seals_more = self.seal_left(is_stopping);
        self.goes_on = frees_more || seals_more;
        self.core.member.collapse(HUGE_PAGES);
    }

    /// Runs until nothing is left to do.
    pub(crate) fn run_until_idle(&mut self) {
        let is_stopping = AtomicBool::new(false);
        self.run_once(&is_stopping);
        while self.goes_on {
            self.run_once(&is_stopping);
        }
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

    /// Seals the keeper's own segments.
    pub(crate) fn stop(&mut self) {
        seal_own(&self.core, &mut self.own);
        seal_own(&self.core, &mut self.other);
    }
}

/// Seals one of the keeper's own segments. One that can't be sealed is kept until it can.
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
struct SealProgress {
    /// The next segment to look at.
    next: u32,
    /// Set if a segment before `next` could not be sealed.
    has_failed: bool,
    /// End of the last pass over all segments, if one of them could not be sealed.
    failed_at: Option<Instant>,
}

#[cfg(test)]
mod tests;
