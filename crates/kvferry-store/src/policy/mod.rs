//! Which blocks stay when a tier is full.
//!
//! Prompts are chains of blocks; a block is of use only behind its whole prefix. So blocks leave from
//! the ends of chains, and no block leaves before those behind it.
//!
//! Blocks that were used together, with the same history, form a *run*. A run is worth what it is
//! expected to bring for the place it takes: the best ratio, over all times to come, of the
//! probability that it is used again by then to the expected time that it is kept until then (the
//! Gittins index of a job that is either used or given up). The probabilities are learned while the
//! cache is used, by *class* of run and by age ([`reuse`]). Classes tell apart the turns of a
//! conversation, prompts that many requests share, and prompts that come once: after an answer, a
//! conversation goes on within minutes or never, which an order by last use does not see.
//!
//! The run that is worth least leaves, from its end. It may be one of the request that has just come:
//! so the policy decides about admission, too.
//!
//! What has left is remembered for a while ([`ghosts`]), so that a block that comes back has its
//! history, and the time of its absence is learned from.

mod ghosts;
mod reuse;
#[cfg(test)]
mod tests;

use fastrand::Rng;
use ghosts::{Ghost, Ghosts};
use reuse::{ClassId, IntervalId, Reuse, Traits};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// A block's name: of its content and of all before it. Equal keys are the same block.
pub type Key = u64;

/// Runs that are compared when one has to leave. All of them would be a little better, and slower
/// without bound.
const SAMPLE: usize = 256;
/// Runs that are remembered after they have left, as a share of the capacity; and at least.
const REMEMBERED: f64 = 0.5;
const REMEMBERED_MIN: usize = 4096;
/// The choice of samples is the same in every run.
const SEED: u64 = 20_251_123;

/// A cached block.
#[derive(Debug)]
struct Block {
    run: u32,
    /// Cached blocks directly behind it.
    children: u32,
    parent: Option<Key>,
}

/// Consecutive blocks of a chain that were last used together, and equally often.
#[derive(Debug)]
struct Run {
    /// The first is the nearest to the chain's beginning.
    blocks: VecDeque<Key>,
    class: ClassId,
    /// When they were last used, and how often they have been.
    used_at: u64,
    uses: u32,
    interval: IntervalId,
    /// How many blocks it had at first.
    len: u32,
    /// Its place among the candidates, if its last block has no cached block behind it.
    candidate: Option<usize>,
    /// Its end has left and is remembered.
    is_remembered: bool,
}

/// What is known of a block when it is used.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    /// Zero: nothing.
    uses: u32,
    used_at: u64,
}

/// The blocks of a tier of bounded size, and their order of leaving.
#[derive(Debug)]
pub struct Policy {
    capacity: usize,
    blocks: FxHashMap<Key, Block>,
    runs: Vec<Option<Run>>,
    free: Vec<u32>,
    /// Runs whose end may leave.
    candidates: Vec<u32>,
    ghosts: Ghosts,
    reuse: Reuse,
    rng: Rng,
    /// The time of the last request.
    now: u64,
}

impl Policy {
    /// A tier of `capacity` blocks, one at least.
    pub fn new(capacity: usize) -> Self {
        let capacity = capacity.max(1);
        let remembered = ((capacity as f64 * REMEMBERED) as usize).max(REMEMBERED_MIN);
        Self {
            capacity,
            blocks: FxHashMap::default(),
            runs: Vec::new(),
            free: Vec::new(),
            candidates: Vec::new(),
            ghosts: Ghosts::new(remembered),
            reuse: Reuse::new(remembered),
            rng: Rng::with_seed(SEED),
            now: 0,
        }
    }

    /// Blocks that are cached.
    pub fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Whether no block is cached.
    pub fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }

    /// Whether a block is cached.
    pub fn contains(&self, key: Key) -> bool {
        self.blocks.contains_key(&key)
    }

    /// A request at `now` (milliseconds, on any clock) uses the blocks of `chain`, the first of its prompt
    /// first. Returns how many of them, from the beginning, were cached. What is cached of the chain
    /// afterwards is what the policy keeps: the caller stores the blocks that [`Policy::contains`] names,
    /// and drops those of `left`, to which the blocks that had to leave are added.
    ///
    /// A clock that goes back counts as one that stands still. A key that is twice in the chain ends it.
    pub fn request(&mut self, now: u64, chain: &[Key], left: &mut Vec<Key>) -> usize {
        self.now = now.max(self.now);
        let chain = self.well_formed(chain);
        let hits = chain.iter().take_while(|key| self.blocks.contains_key(key)).count();
        let known = self.look_up(chain);
        let classes = self.classes(chain, &known);
        self.form_runs(chain, &known, &classes);
        self.reuse.pass_time(self.now);
        while self.blocks.len() > self.capacity {
            self.evict(left);
        }
        hits
    }

    /// The part of a chain in which every cached block has the parent that it was cached with, and no
    /// block is twice.
    fn well_formed<'a>(&self, chain: &'a [Key]) -> &'a [Key] {
        let mut seen = rustc_hash::FxHashSet::default();
        let mut parent = None;
        for (i, key) in chain.iter().enumerate() {
            let agrees = self.blocks.get(key).is_none_or(|block| block.parent == parent);
            if !agrees || !seen.insert(*key) {
                return &chain[..i];
            }
            parent = Some(*key);
        }
        chain
    }

    fn run(&self, id: u32) -> &Run {
        self.runs[id as usize].as_ref().expect("blocks and candidates name runs that exist")
    }

    fn run_mut(&mut self, id: u32) -> &mut Run {
        self.runs[id as usize].as_mut().expect("blocks and candidates name runs that exist")
    }

    /// What is known of the blocks of a chain, cached or not. Ends the intervals of what is used again.
    fn look_up(&mut self, chain: &[Key]) -> Vec<Known> {
        let mut known = vec![Known::default(); chain.len()];
        for (i, key) in chain.iter().enumerate() {
            if let Some(block) = self.blocks.get(key) {
                let run = self.run(block.run);
                known[i] = Known { uses: run.uses, used_at: run.used_at };
                // A run is observed by its end: what is used of a chain is used from its beginning.
                if run.blocks.back() == Some(key) && !run.is_remembered {
                    let interval = run.interval;
                    self.reuse.used(interval, self.now);
                }
            }
            if let Some(ghost) = self.ghosts.take(*key) {
                self.reuse.used(ghost.interval, self.now);
                // The ghost stands for its whole run.
                for j in (0..=i).rev().take(ghost.len as usize) {
                    if known[j].uses == 0 {
                        known[j] = Known { uses: ghost.uses, used_at: ghost.used_at };
                    } else if j < i {
                        break;
                    }
                }
            }
        }
        known
    }

    fn classes(&mut self, chain: &[Key], known: &[Known]) -> Vec<ClassId> {
        let continued = known.iter().take_while(|it| it.uses > 0).count();
        let turns = continued.checked_sub(1).map_or(0, |last| known[last].uses);
        let new = chain.len() - continued;
        let traits = |i: usize| Traits {
            uses: known[i].uses + 1,
            is_end: i + 1 == chain.len(),
            new,
            turns,
            gap: self.now - known[i].used_at,
        };
        (0..chain.len()).map(traits).map(|traits| self.reuse.class(traits)).collect()
    }

    /// Moves the blocks of a chain to new runs.
    fn form_runs(&mut self, chain: &[Key], known: &[Known], classes: &[ClassId]) {
        let mut formed = Vec::new();
        let mut first = 0;
        while first < chain.len() {
            let alike =
                |i: &usize| classes[*i] == classes[first] && known[*i].uses == known[first].uses;
            let len = (first..chain.len()).take_while(alike).count();
            let id = self.free.pop().unwrap_or_else(|| {
                self.runs.push(None);
                u32::try_from(self.runs.len() - 1).expect("fewer runs than blocks of 2^32")
            });
            for i in first..first + len {
                self.leave_run(chain[i]);
                let parent = i.checked_sub(1).map(|before| chain[before]);
                if let Some(block) = self.blocks.get_mut(&chain[i]) {
                    block.run = id;
                } else {
                    self.blocks.insert(chain[i], Block { run: id, children: 0, parent });
                    if let Some(parent) = parent.and_then(|parent| self.blocks.get_mut(&parent)) {
                        parent.children += 1;
                    }
                }
            }
            self.runs[id as usize] = Some(Run {
                blocks: chain[first..first + len].iter().copied().collect(),
                class: classes[first],
                used_at: self.now,
                uses: known[first].uses + 1,
                interval: self.reuse.begin(self.now, classes[first]),
                len: u32::try_from(len).unwrap_or(u32::MAX),
                candidate: None,
                is_remembered: false,
            });
            formed.push(id);
            first += len;
        }
        for id in formed {
            self.become_candidate(id);
        }
    }

    /// Takes a block that is used again out of its run, whose first it is.
    fn leave_run(&mut self, key: Key) {
        let Some(id) = self.blocks.get(&key).map(|block| block.run) else { return };
        let run = self.run_mut(id);
        let first = run.blocks.pop_front();
        debug_assert_eq!(first, Some(key), "a chain is used from its beginning");
        if run.blocks.is_empty() {
            self.end_run(id);
        }
    }

    fn end_run(&mut self, id: u32) {
        self.leave_candidates(id);
        self.runs[id as usize] = None;
        self.free.push(id);
    }

    /// Makes a run a candidate if nothing is behind its last block.
    fn become_candidate(&mut self, id: u32) {
        let run = self.run(id);
        let last = run.blocks.back().expect("runs have blocks");
        if run.candidate.is_none() && self.blocks[last].children == 0 {
            self.run_mut(id).candidate = Some(self.candidates.len());
            self.candidates.push(id);
        }
    }

    fn leave_candidates(&mut self, id: u32) {
        let Some(place) = self.run_mut(id).candidate.take() else { return };
        self.candidates.swap_remove(place);
        if let Some(moved) = self.candidates.get(place).copied() {
            self.run_mut(moved).candidate = Some(place);
        }
    }

    /// The candidate that is worth least, of a sample. The oldest of equals.
    fn least_worth(&mut self) -> u32 {
        let all = self.candidates.len();
        let mut least: Option<(f64, u64, u32)> = None;
        for i in 0..all.min(SAMPLE) {
            let place = if all <= SAMPLE { i } else { self.rng.usize(..all) };
            let id = self.candidates[place];
            let run = self.run(id);
            let worth = self.reuse.worth(run.class, self.now - run.used_at);
            let candidate = (worth, run.used_at, id);
            if least.is_none_or(|least| candidate < least) {
                least = Some(candidate);
            }
        }
        least.expect("the end of a chain is a candidate").2
    }

    /// Has blocks leave from the end of one run.
    fn evict(&mut self, left: &mut Vec<Key>) {
        let id = self.least_worth();
        while self.blocks.len() > self.capacity {
            let run = self.run_mut(id);
            let key = run.blocks.pop_back().expect("runs have blocks");
            let is_empty = run.blocks.is_empty();
            if !std::mem::replace(&mut run.is_remembered, true) {
                let (uses, used_at, len) = (run.uses, run.used_at, run.len);
                let interval = run.interval;
                self.ghosts.remember(key, Ghost { uses, used_at, len, interval });
            }
            if is_empty {
                self.end_run(id);
            }
            let parent = self.blocks.remove(&key).and_then(|block| block.parent);
            left.push(key);
            let Some(parent) = parent.and_then(|parent| self.blocks.get_mut(&parent)) else {
                return;
            };
            parent.children -= 1;
            let (children, run_of_parent) = (parent.children, parent.run);
            if run_of_parent != id {
                // The run was used up; perhaps the end of the one before it may leave now.
                self.become_candidate(run_of_parent);
                return;
            }
            if children > 0 {
                self.leave_candidates(id);
                return;
            }
        }
    }
}
