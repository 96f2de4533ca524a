//! Runs, and which of them may lose their last block now.

use super::Slot;
use super::retention::Retention;
use super::reuse::{ClassId, IntervalId};
use std::collections::BTreeSet;

/// The level of blocks that leave even if there is room. Above it, each priority has a level.
const DUE: u8 = 0;
const LEVELS: usize = Retention::PRIORITY_MAX as usize + 2;
const NOWHERE: u32 = u32::MAX;

/// Consecutive blocks of a chain that were last used together, equally often, and are to stay equally
/// long.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The other blocks of the run are those before it.
    pub(super) last: Slot,
    /// Zero: the entry is free.
    pub(super) len: u32,
    /// Number of blocks in the run before any of them left.
    pub(super) whole: u32,
    /// Number of uses of the run's blocks, and the time of the last.
    pub(super) uses: u32,
    pub(super) used_at: u64,
    pub(super) interval: IntervalId,
    pub(super) class: ClassId,
    /// [`Retention::to_bits`].
    retention: u32,
    /// Index in the candidates of its level.
    place: u32,
    level: u8,
    is_in_pool: bool,
    /// Set if the run's end has left and is remembered, or is not worth remembering.
    pub(super) is_remembered: bool,
}

/// Parameters of a run to form.
#[derive(Clone, Copy, Debug)]
pub(super) struct New {
    pub(super) last: Slot,
    pub(super) len: u32,
    pub(super) uses: u32,
    pub(super) used_at: u64,
    pub(super) interval: IntervalId,
    pub(super) class: ClassId,
    pub(super) retention: Retention,
}

impl Run {
    pub(super) fn retention(&self) -> Retention {
        Retention::from_bits(self.retention)
    }

    /// The order of levels is that of leaving.
    pub(super) fn level(&self) -> u8 {
        self.level
    }

    pub(super) fn is_candidate(&self) -> bool {
        self.place != NOWHERE
    }

    /// Whether its blocks leave even if there is room.
    pub(super) fn is_due(&self) -> bool {
        self.level == DUE
    }
}

/// A run is a *candidate* while no block is behind its last one.
#[derive(Debug)]
pub(super) struct Runs {
    runs: Vec<Run>,
    free: Vec<u32>,
    /// Candidates, indexed by level.
    candidates: Vec<Vec<u32>>,
    /// Set of the levels that have candidates: a bit for each.
    levels: u128,
    /// Ends of retentions in seconds, with the run.
    ends: BTreeSet<(u32, u32)>,
    /// Candidates of the lowest level that were found to be worth little.
    pool: Vec<u32>,
    /// Run of the pool whose blocks leave one after the other.
    chosen: Option<u32>,
}

impl Runs {
    pub(super) fn new() -> Self {
        Self {
            runs: Vec::new(),
            free: Vec::new(),
            candidates: vec![Vec::new(); LEVELS],
            levels: 0,
            ends: BTreeSet::new(),
            pool: Vec::new(),
            chosen: None,
        }
    }

    pub(super) fn get(&self, id: u32) -> &Run {
        let run = &self.runs[id as usize];
        debug_assert!(run.len > 0, "blocks and candidates name runs that exist");
        run
    }

    pub(super) fn get_mut(&mut self, id: u32) -> &mut Run {
        &mut self.runs[id as usize]
    }

    /// Entries, of which some are free.
    pub(super) fn entries(&self) -> usize {
        self.runs.len()
    }

    pub(super) fn form(&mut self, new: New, now_ms: u64) -> u32 {
        // As it is kept: with a valid priority, and its end rounded up.
        let kept = Retention::from_bits(new.retention.to_bits());
        let retention = kept.at(now_ms);
        let run = Run {
            last: new.last,
            len: new.len,
            whole: new.len,
            uses: new.uses,
            used_at: new.used_at,
            interval: new.interval,
            class: new.class,
            retention: retention.unwrap_or(kept).to_bits(),
            place: NOWHERE,
            level: level(retention),
            is_in_pool: false,
            is_remembered: false,
        };
        self.add(run)
    }

    /// Adds blocks behind the last one of a run, if they are alike and of the same time.
    pub(super) fn lengthen(&mut self, id: u32, new: &New) -> bool {
        let run = self.get_mut(id);
        let is_like = run.class == new.class
            && (run.uses, run.used_at) == (new.uses, new.used_at)
            && run.retention == new.retention.to_bits()
            && run.level != DUE
            && !run.is_remembered;
        if is_like {
            run.last = new.last;
            run.len += new.len;
            run.whole += new.len;
        }
        is_like
    }

    /// A run of `len` blocks that leave the run `id`, whose last block stays where it is.
    pub(super) fn divide(&mut self, id: u32, last: Slot, len: u32) -> u32 {
        self.get_mut(id).len -= len;
        let of = *self.get(id);
        // Its end is not the one that was observed.
        self.add(Run { last, len, place: NOWHERE, is_in_pool: false, is_remembered: true, ..of })
    }

    fn add(&mut self, run: Run) -> u32 {
        let id = match self.free.pop() {
            Some(id) => {
                self.runs[id as usize] = run;
                id
            }
            None => {
                self.runs.push(run);
                u32::try_from(self.runs.len() - 1).expect("fewer runs than slots")
            }
        };
        if let Some(until_s) = run.retention().until_s {
            self.ends.insert((until_s, id));
        }
        id
    }

    /// Takes `len` blocks out of a run; without blocks, it ends.
    pub(super) fn shrink(&mut self, id: u32, len: u32) {
        let run = self.get_mut(id);
        run.len -= len;
        if run.len == 0 {
            let until_s = run.retention().until_s;
            self.leave(id);
            if let Some(until_s) = until_s {
                self.ends.remove(&(until_s, id));
            }
            self.free.push(id);
        }
    }

    /// Makes a run a candidate. The pool is emptied if it is of a higher level.
    pub(super) fn enter(&mut self, id: u32) {
        let run = &mut self.runs[id as usize];
        if run.is_candidate() {
            return;
        }
        let candidates = &mut self.candidates[usize::from(run.level)];
        run.place = u32::try_from(candidates.len()).expect("fewer runs than slots");
        candidates.push(id);
        let level = run.level;
        self.levels |= 1 << level;
        if self.pool.first().is_some_and(|pooled| self.get(*pooled).level > level) {
            self.set_pool(Vec::new());
        }
    }

    pub(super) fn leave(&mut self, id: u32) {
        let run = &mut self.runs[id as usize];
        let place = std::mem::replace(&mut run.place, NOWHERE);
        if place == NOWHERE {
            return;
        }
        let level = run.level;
        if std::mem::take(&mut run.is_in_pool) {
            self.pool.retain(|pooled| *pooled != id);
        }
        let candidates = &mut self.candidates[usize::from(level)];
        candidates.swap_remove(place as usize);
        if let Some(moved) = candidates.get(place as usize) {
            self.runs[*moved as usize].place = place;
        } else if candidates.is_empty() {
            self.levels &= !(1 << level);
        }
        if self.chosen == Some(id) {
            self.chosen = None;
        }
    }

    /// Has the blocks of a run leave even if there is room.
    pub(super) fn make_due(&mut self, id: u32) {
        self.set_level(id, DUE);
    }

    /// Has the blocks of a run that was due leave by its retention again.
    pub(super) fn let_stay(&mut self, id: u32, now_ms: u64) {
        let run = &self.runs[id as usize];
        if run.len > 0 && run.is_due() {
            self.set_level(id, level(run.retention().at(now_ms)));
        }
    }

    fn set_level(&mut self, id: u32, level: u8) {
        let was_candidate = self.get(id).is_candidate();
        self.leave(id);
        self.get_mut(id).level = level;
        if was_candidate {
            self.enter(id);
        }
    }

    /// Ends what has ended by now.
    pub(super) fn expire(&mut self, now_ms: u64) {
        while let Some(&(until_s, id)) = self.ends.first() {
            if u64::from(until_s) * 1000 > now_ms {
                return;
            }
            self.ends.pop_first();
            let run = self.get_mut(id);
            let retention = run.retention().at(now_ms);
            if let Some(retention) = retention {
                run.retention = retention.to_bits();
            }
            if run.level != DUE {
                self.set_level(id, level(retention));
            }
        }
    }

    /// The candidates of the lowest level, and whether that is of blocks that are due.
    pub(super) fn lowest(&self) -> Option<(&[u32], bool)> {
        let lowest = self.levels.trailing_zeros() as usize;
        self.candidates.get(lowest).map(|candidates| (&candidates[..], lowest == usize::from(DUE)))
    }

    /// The last blocks of runs whose level is above the lowest of the candidates, not counting what is due.
    pub(super) fn ends_above_lowest(&self) -> impl Iterator<Item = Slot> + '_ {
        let lowest = (self.levels & !(1 << DUE)).trailing_zeros();
        self.runs
            .iter()
            .filter(move |it| it.len > 0 && u32::from(it.level) > lowest)
            .map(|it| it.last)
    }

    /// The pool is empty as soon as it is not of the lowest level.
    pub(super) fn pool(&self) -> &[u32] {
        &self.pool
    }

    /// Replaces the pool by candidates of the lowest level; the first is chosen.
    pub(super) fn set_pool(&mut self, pool: Vec<u32>) {
        for id in std::mem::replace(&mut self.pool, pool) {
            self.runs[id as usize].is_in_pool = false;
        }
        for id in &self.pool {
            self.runs[*id as usize].is_in_pool = true;
        }
        self.chosen = self.pool.first().copied();
    }

    pub(super) fn chosen(&self) -> Option<u32> {
        self.chosen
    }

    pub(super) fn forget_chosen(&mut self) {
        self.chosen = None;
    }

    pub(super) fn bytes(&self) -> usize {
        let candidates: usize = self.candidates.iter().map(Vec::capacity).sum();
        // A set's node is half full at worst.
        self.runs.capacity() * size_of::<Run>()
            + (self.free.capacity() + candidates) * size_of::<u32>()
            + 2 * self.ends.len() * size_of::<(u32, u32)>()
    }
}

/// The level of a retention, or of none.
fn level(retention: Option<Retention>) -> u8 {
    retention.map_or(DUE, |retention| retention.priority + 1)
}

#[cfg(test)]
impl Runs {
    pub(super) fn iter(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().filter(|run| run.len > 0)
    }

    /// Everything that the fields say of each other.
    pub(super) fn check(&self, now_ms: u64, may_lose_its_last: impl Fn(&Run) -> bool) {
        assert_eq!(self.iter().count() + self.free.len(), self.runs.len());
        let (mut ends, mut candidates) = (0, 0);
        for (id, run) in (0..).zip(&self.runs).filter(|(_, run)| run.len > 0) {
            assert_eq!(run.is_candidate(), may_lose_its_last(run));
            if run.is_candidate() {
                assert_eq!(self.candidates[usize::from(run.level)][run.place as usize], id);
                candidates += 1;
            }
            let retention = run.retention();
            if let Some(until_s) = retention.until_s {
                let is_over = u64::from(until_s) * 1000 <= now_ms;
                assert!(self.ends.contains(&(until_s, id)) || is_over);
                ends += usize::from(self.ends.contains(&(until_s, id)));
            }
            assert_eq!(run.is_in_pool, self.pool.contains(&id));
            assert!([DUE, retention.priority + 1].contains(&run.level));
        }
        assert_eq!(ends, self.ends.len());
        assert_eq!(candidates, self.candidates.iter().map(Vec::len).sum::<usize>());
        for (level, candidates) in self.candidates.iter().enumerate() {
            assert_eq!(self.levels >> level & 1 == 1, !candidates.is_empty());
        }
        for pooled in self.pool.iter().map(|id| self.get(*id)) {
            assert!(pooled.is_candidate());
            assert_eq!(u32::from(pooled.level), self.levels.trailing_zeros());
        }
        assert!(self.chosen.is_none_or(|id| self.pool.contains(&id)));
    }
}
