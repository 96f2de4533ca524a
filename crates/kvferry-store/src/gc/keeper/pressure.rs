//! Pressure of puts on the keeper, and the pace at which segments are put and freed.

use crate::core::Core;
use std::time::{Duration, Instant};

/// The part of a segment's pages that may live when it is collected. The more, the more is kept, and the more
/// is copied for each new block: at most four times as much.
pub(super) const LIVE_SHARE: f64 = 0.8;
/// What is copied of a segment, at most, while puts find no free segment: the factor by which it falls with each
/// segment, what it is at least, and by how much it rises each time when enough segments are free. With the least,
/// some 0.4 bytes are copied for each byte that is put (`kvferry bench store --trace`).
const PRESSURE_FALL: f64 = 0.85;
pub(super) const PRESSURE_LEAST: f64 = 0.35;
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

/// Part of a segment that is copied while puts find no free segment.
#[derive(Debug)]
pub(super) struct Pressure {
    /// [`crate::index::Index::no_space`] when it was last read.
    seen: u32,
    /// Times since which puts find no free segment, and at which one last found none.
    since: Option<(Instant, Instant)>,
    share: f64,
}

impl Pressure {
    pub(super) fn new(core: &Core) -> Self {
        Self { seen: core.member.no_space(), since: None, share: LIVE_SHARE }
    }

    /// The part of a segment's pages that is copied at most. `None`: there is no pressure.
    pub(super) fn copied(&mut self, core: &Core) -> Option<f64> {
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
    pub(super) fn fall(&mut self) {
        self.share = (self.share * PRESSURE_FALL).max(PRESSURE_LEAST);
    }

    /// Enough segments are free.
    pub(super) fn relax(&mut self) {
        self.share = (self.share + PRESSURE_RISE).min(LIVE_SHARE);
    }
}

/// Rate at which segments are put, and the time that it takes to free one.
#[derive(Debug)]
pub(super) struct Pace {
    /// Time of the last measurement, and the incarnations and own segments that were begun until then.
    at: Instant,
    incarnations: u64,
    begun: u64,
    /// Segments in a second.
    rate: f64,
    seconds_to_free: f64,
}

impl Pace {
    pub(super) fn new(core: &Core) -> Self {
        let (at, incarnations) = (Instant::now(), core.member.next_incarnation());
        Self { at, incarnations, begun: 0, rate: 0.0, seconds_to_free: 0.0 }
    }

    pub(super) fn freed_one(&mut self, took: Duration) {
        self.seconds_to_free += (took.as_secs_f64() - self.seconds_to_free) * RATE_NEW;
    }

    /// Segments that are to be free for what is put while others are freed. `begun`: segments of the keeper's own that
    /// were begun until `now`.
    pub(super) fn ahead(&mut self, core: &Core, begun: u64, now: Instant) -> usize {
        let passed = now.saturating_duration_since(self.at);
        if passed >= RATE_EVERY {
            let incarnations = core.member.next_incarnation();
            let all = incarnations.saturating_sub(self.incarnations) as f64;
            let put = (all - begun.saturating_sub(self.begun) as f64).max(0.0);
            let (rate, passed) = (put / passed.as_secs_f64(), passed.as_secs_f64());
            // What was measured over a long time counts for more.
            let part = 1.0 - (1.0 - RATE_NEW).powf(passed / RATE_EVERY.as_secs_f64());
            self.rate += (rate - self.rate) * part;
            (self.at, self.incarnations, self.begun) = (now, incarnations, begun);
        }
        (self.rate * self.seconds_to_free * FREE_AHEAD).ceil() as usize
    }
}
