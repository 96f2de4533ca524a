//! The race checker: two accesses to the same bytes, at least one a write, that no edge orders.
//!
//! The order is computed from the calls, not from what the engines happened to do: an access is
//! recorded when its operation is submitted, with the steps that happened before it. A finding
//! therefore does not depend on luck. Only a PTX kernel whose dry run failed is recorded when it
//! runs.

use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use crate::clocks::{Actor, Clock};

/// Bytes of addresses that share one list of accesses.
const BUCKET: u64 = 1 << 20;
/// The most accesses that one list keeps. The oldest go first.
const BUCKET_RECORDS: usize = 4096;
/// The most findings kept.
const FINDINGS: usize = 1000;

/// One step of a host thread or stream, as the checker orders it.
#[derive(Debug)]
pub(crate) struct Point {
    pub(crate) actor: Actor,
    /// The actor's step that ends with this access.
    pub(crate) step: u64,
    /// Steps that had happened for certain before the access could begin.
    pub(crate) before: Arc<Clock>,
    pub(crate) what: String,
}

impl Point {
    fn happened_before(&self, later: &Self) -> bool {
        later.before.of(self.actor) >= self.step
    }

    fn is_unordered(&self, other: &Self) -> bool {
        !self.happened_before(other) && !other.happened_before(self)
    }
}

/// Bytes `start..end` that one access touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Touch {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) write: bool,
}

impl Touch {
    pub(crate) fn new(start: u64, len: u64, write: bool) -> Self {
        Self { start, end: start.saturating_add(len), write }
    }

    fn conflicts(&self, other: &Self) -> bool {
        (self.write || other.write) && self.start < other.end && other.start < self.end
    }

    /// Whether a race with `other` is also a race with this access, when this one is later.
    fn covers(&self, other: &Self) -> bool {
        self.start <= other.start && other.end <= self.end && (self.write || !other.write)
    }

    fn verb(&self) -> &'static str {
        if self.write { "writes" } else { "reads" }
    }
}

#[derive(Debug)]
struct Record {
    touch: Touch,
    point: Arc<Point>,
}

#[derive(Debug)]
struct HostThread {
    actor: Actor,
    step: u64,
    clock: Clock,
}

/// The accesses so far and what is wrong with them.
#[derive(Debug, Default)]
pub(crate) struct Checker {
    actors: Actor,
    hosts: FxHashMap<u64, HostThread>,
    tokens: FxHashMap<u64, Clock>,
    buckets: FxHashMap<u64, Vec<Record>>,
    findings: Vec<String>,
    pairs: FxHashSet<(Actor, u64, Actor, u64)>,
    retired: Vec<Actor>,
    /// Kernels in flight whose accesses are not known yet.
    pub(crate) unknown: u64,
    /// Accesses that a full list has dropped.
    pub(crate) dropped: u64,
    /// Findings, those beyond the most kept included.
    pub(crate) found: u64,
}

impl Checker {
    pub(crate) fn new_actor(&mut self) -> Actor {
        self.actors += 1;
        self.actors
    }

    fn host(&mut self, thread: u64) -> &mut HostThread {
        let actors = &mut self.actors;
        self.hosts.entry(thread).or_insert_with(|| {
            *actors += 1;
            let mut clock = Clock::default();
            clock.set(*actors, 1);
            HostThread { actor: *actors, step: 1, clock }
        })
    }

    /// Steps that the host thread knows to have happened.
    pub(crate) fn host_clock(&mut self, thread: u64) -> Clock {
        self.host(thread).clock.clone()
    }

    /// The host thread has seen the end of what `clock` tells.
    pub(crate) fn host_join(&mut self, thread: u64, clock: &Clock) {
        self.host(thread).clock.join(clock);
    }

    /// Ends the host thread's step: what it touches later is not ordered before what it has
    /// submitted.
    pub(crate) fn host_step(&mut self, thread: u64) {
        let host = self.host(thread);
        host.step += 1;
        let (actor, step) = (host.actor, host.step);
        host.clock.set(actor, step);
    }

    /// The host thread's present step.
    pub(crate) fn host_point(&mut self, thread: u64, what: String) -> Arc<Point> {
        let host = self.host(thread);
        let before = Arc::new(host.clock.clone());
        Arc::new(Point { actor: host.actor, step: host.step, before, what })
    }

    /// Publishes what the thread knows under `token`.
    pub(crate) fn release(&mut self, thread: u64, token: u64) {
        let clock = self.host_clock(thread);
        self.tokens.entry(token).or_default().join(&clock);
        self.host_step(thread);
    }

    /// Learns what was published under `token`.
    pub(crate) fn acquire(&mut self, thread: u64, token: u64) {
        if let Some(clock) = self.tokens.get(&token).cloned() {
            self.host_join(thread, &clock);
        }
    }

    /// Compares the accesses with all before them, then keeps them.
    pub(crate) fn record(&mut self, touches: &[Touch], point: &Arc<Point>) {
        for touch in touches.iter().filter(|touch| touch.start < touch.end) {
            for bucket in touch.start / BUCKET..=(touch.end - 1) / BUCKET {
                let clipped = Touch {
                    start: touch.start.max(bucket * BUCKET),
                    end: touch.end.min((bucket + 1) * BUCKET),
                    write: touch.write,
                };
                self.record_in(bucket, clipped, point);
            }
        }
    }

    fn record_in(&mut self, bucket: u64, touch: Touch, point: &Arc<Point>) {
        let prune = self.unknown == 0;
        let mut races = Vec::new();
        let records = self.buckets.entry(bucket).or_default();
        records.retain(|old| {
            if old.point.actor == point.actor && old.point.step == point.step {
                return true;
            }
            if old.touch.conflicts(&touch) && old.point.is_unordered(point) {
                races.push((old.touch, old.point.clone()));
            }
            !(prune && touch.covers(&old.touch) && old.point.happened_before(point))
        });
        records.push(Record { touch, point: point.clone() });
        if records.len() > BUCKET_RECORDS {
            records.remove(0);
            self.dropped += 1;
        }
        for (old_touch, old) in races {
            if self.pairs.insert((old.actor, old.step, point.actor, point.step)) {
                let (start, end) = (touch.start.max(old_touch.start), touch.end.min(old_touch.end));
                self.find(format!(
                    "race on {start:#x}..{end:#x}:\n  {} {}\n  {} {}\n  no edge orders them",
                    old.what,
                    old_touch.verb(),
                    point.what,
                    touch.verb()
                ));
            }
        }
    }

    /// Compares accesses that have no order among themselves, such as the entries of a batch.
    pub(crate) fn check_within(&mut self, touches: &[Touch], what: &str) {
        let mut sorted = touches.to_vec();
        sorted.sort_by_key(|touch| touch.start);
        // The furthest end of a read and of a write so far.
        let (mut read_end, mut write_end) = (0, 0);
        for touch in sorted {
            if touch.start < write_end || touch.write && touch.start < read_end {
                let start = touch.start;
                self.find(format!(
                    "overlap within {what} at {start:#x}: nothing orders its accesses"
                ));
                return;
            }
            let end = if touch.write { &mut write_end } else { &mut read_end };
            *end = touch.end.max(*end);
        }
    }

    /// Forgets accesses to bytes that no longer exist.
    pub(crate) fn forget_range(&mut self, start: u64, len: u64) {
        let end = start + len;
        for bucket in start / BUCKET..=(end.max(start + 1) - 1) / BUCKET {
            if let Some(records) = self.buckets.get_mut(&bucket) {
                records.retain(|r| r.touch.end <= start || end <= r.touch.start);
            }
        }
    }

    /// Marks an actor as ended. Returns actors that no access names any more, now and then.
    pub(crate) fn retire(&mut self, actor: Actor) -> Vec<Actor> {
        self.retired.push(actor);
        if self.retired.len() < 256 {
            return Vec::new();
        }
        let used: FxHashSet<Actor> =
            self.buckets.values().flatten().map(|record| record.point.actor).collect();
        let (kept, gone) = self.retired.iter().partition(|actor| used.contains(actor));
        self.retired = kept;
        for host in self.hosts.values_mut() {
            for &actor in &gone {
                host.clock.forget(actor);
            }
        }
        gone
    }

    pub(crate) fn find(&mut self, text: String) {
        self.found += 1;
        if self.findings.len() < FINDINGS {
            self.findings.push(text);
        }
    }

    pub(crate) fn findings(&self) -> &[String] {
        &self.findings
    }

    pub(crate) fn clear_findings(&mut self) {
        self.findings.clear();
        self.pairs.clear();
        self.found = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(checker: &mut Checker, actor: Actor, step: u64, knows: &[(Actor, u64)]) -> Arc<Point> {
        let _ = checker;
        let mut before = Clock::default();
        for &(actor, step) in knows {
            before.set(actor, step);
        }
        Arc::new(Point { actor, step, before: Arc::new(before), what: format!("{actor}.{step}") })
    }

    #[test]
    fn an_edge_between_a_write_and_a_read_makes_them_clean() {
        let mut checker = Checker::default();
        let write = point(&mut checker, 1, 1, &[]);
        checker.record(&[Touch::new(0x1000, 64, true)], &write);
        let ordered = point(&mut checker, 2, 1, &[(1, 1)]);
        checker.record(&[Touch::new(0x1020, 64, false)], &ordered);
        assert!(checker.findings().is_empty());
        let unordered = point(&mut checker, 3, 1, &[]);
        checker.record(&[Touch::new(0x1030, 1, false)], &unordered);
        assert_eq!(checker.findings().len(), 1);
        assert!(checker.findings()[0].contains("1.1 writes"), "{}", checker.findings()[0]);
    }

    #[test]
    fn a_later_access_that_covers_an_earlier_one_replaces_it_and_still_finds_its_races() {
        let mut checker = Checker::default();
        for step in 1..100 {
            let write = point(&mut checker, 1, step, &[(1, step - 1)]);
            checker.record(&[Touch::new(0, 4096, true)], &write);
        }
        assert_eq!(checker.buckets[&0].len(), 1);
        let reader = point(&mut checker, 2, 1, &[(1, 98)]);
        checker.record(&[Touch::new(0, 1, false)], &reader);
        assert_eq!(checker.findings().len(), 1);
    }

    #[test]
    fn overlapping_entries_of_one_batch_are_found() {
        let mut checker = Checker::default();
        let clean = [Touch::new(0, 8, true), Touch::new(8, 8, true), Touch::new(100, 8, false)];
        checker.check_within(&clean, "batch");
        assert!(checker.findings().is_empty());
        checker.check_within(&[Touch::new(0, 9, false), Touch::new(8, 8, true)], "batch");
        checker.check_within(&[Touch::new(0, 9, true), Touch::new(8, 8, true)], "batch");
        checker.check_within(&[Touch::new(0, 90, true), Touch::new(1, 1, false)], "batch");
        assert_eq!(checker.found, 3);
    }
}
