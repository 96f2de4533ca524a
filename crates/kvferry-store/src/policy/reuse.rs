//! How likely a run is used again, by class and age: learned, and forgotten slowly.
//!
//! Time since the last use is divided into bins, two per octave of milliseconds. For each class and
//! bin two counts are kept: how many runs were still waiting when they reached that age, and how many
//! were used again in it. Their ratio is the hazard. A class with few observations borrows from the
//! more general class above it: classes form a tree of [`LEVELS`] levels, of which each adds one trait.
//!
//! Observation: each use of a run begins an *interval*, which ends when the run's last block is used
//! again. A bounded number of intervals is kept, the latest; one cursor per bin walks over them as
//! they reach that age. An interval that is dropped before counts for the ages that it has reached.

use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// Half octaves of milliseconds: 2^24 ms are more than four hours.
const BINS: usize = 48;
const LEVELS: usize = 5;
/// Classes of all levels at most: further ones share the class above them.
const NODES_MAX: usize = 4096;
/// Observations that the class above stands for, at each level; it has seen more, so it counts more
/// the more special the class is.
const BORROWED: [f32; LEVELS] = [1.0, 2.0, 4.0, 8.0, 16.0];
/// The weight of a bin's neighbours.
const NEIGHBOURS: f32 = 0.25;
/// Number of requests after which observed counts are multiplied by `FORGET`.
const LEARN_EVERY: u32 = 50;
const FORGET: f32 = 0.98;
const HAZARD_MAX: f32 = 0.999;

/// Traits of a use, which determine the class of the block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    /// Number of uses of the block, including this one.
    pub(super) uses: u32,
    /// Whether it is the last of its prompt.
    pub(super) is_end: bool,
    /// Blocks of the request that were not known before.
    pub(super) new: usize,
    /// Number of earlier uses of the last known block of the request: of a conversation, its turns.
    pub(super) turns: u32,
    /// Milliseconds since the block was used before.
    pub(super) gap: u64,
}

impl Traits {
    /// Path of the class: a number per level, the most telling first.
    fn path(self) -> [u8; LEVELS] {
        let few = |n: u32| {
            let size = if n <= 4 { n } else { 2 + bits(u64::from(n)) };
            u8::try_from(size.min(12)).expect("at most 12")
        };
        let history = match self.uses {
            1 => few(self.turns.min(15)),
            _ => 16 + u8::try_from(bin(self.gap) / 4).expect("at most 12"),
        };
        [0, few(self.uses), u8::from(self.is_end), level_of_new(self.new), history]
    }
}

/// The place of [`Traits::new`] in a path.
const LEVEL_OF_NEW: usize = 3;

fn level_of_new(new: usize) -> u8 {
    u8::try_from(bits(new as u64).min(7)).expect("at most 7")
}

/// Significant bits of a number.
fn bits(n: u64) -> u32 {
    u64::BITS - n.leading_zeros()
}

/// The bin of an age.
fn bin(age: u64) -> usize {
    let age = age.saturating_add(1);
    let octave = age.ilog2();
    let is_upper_half = u128::from(age).pow(2) >= 1 << (2 * octave + 1);
    (2 * octave as usize + usize::from(is_upper_half)).min(BINS - 1)
}

/// The age at which a bin begins.
fn begin(bin: usize) -> f64 {
    2f64.powf(bin as f64 / 2.0) - 1.0
}

/// A class of the lowest level that it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct ClassId(u32);

/// An interval, numbered from the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct IntervalId(u64);

impl IntervalId {
    /// Id of an interval that is not observed.
    pub(super) const NONE: Self = Self(u64::MAX);
}

#[derive(Debug)]
struct Interval {
    began: u64,
    class: ClassId,
    is_open: bool,
}

#[derive(Clone, Debug)]
struct Counts {
    waiting: [f32; BINS],
    used: [f32; BINS],
}

#[derive(Debug)]
struct Class {
    path: [u8; LEVELS],
    /// Node at each level; the last levels may share one.
    nodes: [u32; LEVELS],
    /// Expected uses per millisecond kept, at the beginning of each bin.
    worth: [f64; BINS + 1],
}

#[derive(Debug)]
pub(super) struct Reuse {
    capacity: usize,
    intervals: VecDeque<Interval>,
    /// The number of the first of `intervals`.
    first: u64,
    /// Next interval to reach each bin.
    cursors: [u64; BINS],
    /// Index into `counts`, by a node's level and path.
    nodes: FxHashMap<(u8, [u8; LEVELS]), u32>,
    counts: Vec<Counts>,
    class_of: FxHashMap<[u32; LEVELS], ClassId>,
    classes: Vec<Class>,
    begins: [f64; BINS + 1],
    requests: u32,
}

impl Reuse {
    /// Observes at most `capacity` intervals.
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            intervals: VecDeque::new(),
            first: 0,
            cursors: [0; BINS],
            nodes: FxHashMap::default(),
            counts: Vec::new(),
            class_of: FxHashMap::default(),
            classes: Vec::new(),
            begins: std::array::from_fn(begin),
            requests: 0,
        }
    }

    pub(super) fn class(&mut self, traits: Traits) -> ClassId {
        self.class_of_path(traits.path())
    }

    /// The class that differs from `class` in [`Traits::new`].
    pub(super) fn class_with_new(&mut self, class: ClassId, new: usize) -> ClassId {
        let mut path = self.classes[class.0 as usize].path;
        path[LEVEL_OF_NEW] = level_of_new(new);
        self.class_of_path(path)
    }

    fn class_of_path(&mut self, path: [u8; LEVELS]) -> ClassId {
        let mut nodes = [0; LEVELS];
        for level in 0..LEVELS {
            let mut prefix = [0; LEVELS];
            prefix[..=level].copy_from_slice(&path[..=level]);
            let key = (u8::try_from(level).expect("few levels"), prefix);
            let next = u32::try_from(self.counts.len()).expect("at most NODES_MAX");
            nodes[level] = match self.nodes.get(&key) {
                Some(node) => *node,
                None if level > 0 && self.counts.len() >= NODES_MAX => nodes[level - 1],
                None => {
                    let nothing = Counts { waiting: [0.0; BINS], used: [0.0; BINS] };
                    self.counts.push(nothing);
                    self.nodes.insert(key, next);
                    next
                }
            };
        }
        if let Some(class) = self.class_of.get(&nodes) {
            return *class;
        }
        let class = ClassId(u32::try_from(self.classes.len()).expect("at most NODES_MAX"));
        let worth = self.worths(&nodes);
        self.classes.push(Class { path, nodes, worth });
        self.class_of.insert(nodes, class);
        class
    }

    /// Begins an interval: a run is used.
    pub(super) fn begin(&mut self, now: u64, class: ClassId) -> IntervalId {
        if self.intervals.len() == self.capacity {
            self.intervals.pop_front();
            self.first += 1;
        }
        self.intervals.push_back(Interval { began: now, class, is_open: true });
        IntervalId(self.first + self.intervals.len() as u64 - 1)
    }

    /// Observes an interval as one of another class from now on.
    pub(super) fn move_to(&mut self, interval: IntervalId, class: ClassId) {
        if let Some(interval) = self.interval_mut(interval) {
            interval.class = class;
        }
    }

    fn interval_mut(&mut self, interval: IntervalId) -> Option<&mut Interval> {
        let at = usize::try_from(interval.0.checked_sub(self.first)?).ok()?;
        self.intervals.get_mut(at)
    }

    /// Ends an interval: the run is used again.
    pub(super) fn used(&mut self, interval: IntervalId, now: u64) {
        let Some(ended) = self.interval_mut(interval) else { return };
        if !std::mem::replace(&mut ended.is_open, false) {
            return;
        }
        let (class, reached) = (ended.class, bin(now.saturating_sub(ended.began)));
        for node in distinct(&self.classes[class.0 as usize].nodes) {
            let counts = &mut self.counts[node as usize];
            counts.used[reached] += 1.0;
            for (bin, cursor) in self.cursors.iter().enumerate().take(reached + 1) {
                // What the cursor has passed was counted as waiting there.
                if *cursor <= interval.0 {
                    counts.waiting[bin] += 1.0;
                }
            }
        }
    }

    /// Observes what has reached the next age, and learns from time to time. Once for each request.
    pub(super) fn pass_time(&mut self, now: u64) {
        for (bin_of_cursor, cursor) in self.cursors.iter_mut().enumerate() {
            *cursor = (*cursor).max(self.first);
            while let Some(interval) = usize::try_from(*cursor - self.first)
                .ok()
                .and_then(|at| self.intervals.get(at))
                .filter(|interval| bin(now.saturating_sub(interval.began)) >= bin_of_cursor)
            {
                if interval.is_open {
                    for node in distinct(&self.classes[interval.class.0 as usize].nodes) {
                        self.counts[node as usize].waiting[bin_of_cursor] += 1.0;
                    }
                }
                *cursor += 1;
            }
        }
        if self.requests.is_multiple_of(LEARN_EVERY) {
            for counts in &mut self.counts {
                counts.waiting.iter_mut().chain(&mut counts.used).for_each(|n| *n *= FORGET);
            }
            for class in 0..self.classes.len() {
                self.classes[class].worth = self.worths(&self.classes[class].nodes);
            }
        }
        self.requests = self.requests.wrapping_add(1);
    }

    pub(super) fn bytes(&self) -> usize {
        self.intervals.capacity() * size_of::<Interval>()
            + self.counts.capacity() * size_of::<Counts>()
            + self.classes.capacity() * size_of::<Class>()
    }

    /// Worth of a block of a class that was last used `age` milliseconds ago: expected uses per
    /// millisecond kept.
    pub(super) fn worth(&self, class: ClassId, age: u64) -> f64 {
        let worth = &self.classes[class.0 as usize].worth;
        let bin = bin(age);
        let (begin, end) = (self.begins[bin], self.begins[bin + 1]);
        let part = ((age as f64 - begin) / (end - begin)).clamp(0.0, 1.0);
        worth[bin] * (1.0 - part) + worth[bin + 1] * part
    }

    /// The probability to be used in each bin, for what has reached it: from the most general class to the
    /// most special.
    fn hazards(&self, nodes: &[u32; LEVELS]) -> [f32; BINS] {
        let mut hazards = [0.0; BINS];
        for (level, node) in nodes.iter().enumerate() {
            if level > 0 && nodes[level - 1] == *node {
                break;
            }
            let Counts { waiting, used } = &self.counts[*node as usize];
            let smooth = |counts: &[f32; BINS], bin: usize| {
                let before = bin.checked_sub(1).map_or(0.0, |before| counts[before]);
                let after = counts.get(bin + 1).copied().unwrap_or_default();
                counts[bin] + NEIGHBOURS * (before + after)
            };
            hazards = std::array::from_fn(|bin| {
                let (waiting, used) = (smooth(waiting, bin), smooth(used, bin));
                let borrowed = BORROWED[level];
                ((used + borrowed * hazards[bin]) / (waiting + borrowed)).min(HAZARD_MAX)
            });
        }
        hazards
    }

    /// For each bin, the best over all later ones of: the probability to be used by then, by the expected
    /// time kept until then.
    fn worths(&self, nodes: &[u32; LEVELS]) -> [f64; BINS + 1] {
        let hazards = self.hazards(nodes);
        let length = |bin: usize| self.begins[bin + 1] - self.begins[bin];
        let best_from = |first: usize| {
            let (mut waits, mut kept, mut best) = (1.0, 0.0, 0.0);
            for (bin, hazard) in hazards.iter().enumerate().skip(first) {
                let waits_after = waits * (1.0 - f64::from(*hazard));
                kept += length(bin) * (waits + waits_after) / 2.0;
                waits = waits_after;
                best = f64::max(best, (1.0 - waits) / kept);
            }
            best
        };
        std::array::from_fn(best_from)
    }
}

/// The nodes of a class without those that stand for a level that it has not.
fn distinct(nodes: &[u32; LEVELS]) -> impl Iterator<Item = u32> + use<> {
    let nodes = *nodes;
    (0..LEVELS)
        .filter(move |level| *level == 0 || nodes[level - 1] != nodes[*level])
        .map(move |level| nodes[level])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_are_half_octaves() {
        for (age, expected) in
            [(0, 0), (1, 2), (2, 3), (3, 4), (4, 4), (5, 5), (7, 6), (u64::MAX, 47)]
        {
            assert_eq!(bin(age), expected, "{age}");
        }
        for age in 0..100_000u64 {
            let bin = bin(age);
            let within = begin(bin)..begin(bin + 1);
            assert!(bin == BINS - 1 || within.contains(&(age as f64)), "{age} in {within:?}");
        }
    }

    fn traits(new: usize) -> Traits {
        Traits { uses: 1, is_end: false, new, turns: 0, gap: 0 }
    }

    #[test]
    fn a_class_that_comes_back_is_worth_more_until_the_age_at_which_it_does() {
        let mut reuse = Reuse::new(10_000);
        let (returns, never) = (reuse.class(traits(1)), reuse.class(traits(64)));
        assert_ne!(returns, never);
        for request in 0..500u64 {
            let now = request * 10_000;
            let interval = reuse.begin(now, returns);
            reuse.begin(now, never);
            reuse.pass_time(now);
            reuse.used(interval, now + 5_000);
        }
        assert!(reuse.worth(returns, 0) > 20.0 * reuse.worth(never, 0));
        assert!(reuse.worth(returns, 3_000) > reuse.worth(returns, 0), "the use is nearer");
        assert!(reuse.worth(returns, 60_000) < reuse.worth(returns, 0), "it did not come");
    }

    #[test]
    fn an_interval_counts_for_the_class_to_which_it_was_moved() {
        let mut reuse = Reuse::new(100);
        let (before, class) = (reuse.class(traits(64)), reuse.class(traits(0)));
        assert_eq!(reuse.class_with_new(before, 0), class);
        let interval = reuse.begin(0, before);
        reuse.move_to(interval, class);
        reuse.used(interval, 5_000);
        let used = |class: ClassId| {
            let [.., node] = reuse.classes[class.0 as usize].nodes;
            reuse.counts[node as usize].used.iter().sum::<f32>()
        };
        assert_eq!((used(before), used(class)), (0.0, 1.0));
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut reuse = Reuse::new(100);
        for request in 0..10_000u32 {
            let class = reuse.class(Traits {
                uses: request,
                is_end: request % 2 == 0,
                new: request as usize % 300,
                turns: request % 40,
                gap: u64::from(request).pow(3),
            });
            reuse.begin(u64::from(request), class);
            reuse.pass_time(u64::from(request));
        }
        assert!(reuse.intervals.len() <= 100);
        assert!(reuse.counts.len() <= NODES_MAX + LEVELS);
    }
}
