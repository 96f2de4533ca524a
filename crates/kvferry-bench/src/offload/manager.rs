//! The block manager by itself, when its pools are full.
//!
//! Half of the blocks are primary, half secondary. Prompts have a part in common with earlier ones. A figure is the time of
//! a call, divided by the blocks that it concerns in all groups. The copies end at once; what that takes in the manager
//! is a figure of its own. Most allocations evict.

use kvferry_blocks::{
    Action, BlockManager, Config, Error, GroupConfig, Key, Outcome, Request, Retention,
    RetentionConfig, SequenceId, TokenRange, TransferId,
};
use std::time::Instant;

use super::calls::thread_cpu_us;
use crate::failure::Failure;
use crate::report::Row;
use crate::stats::{Spread, quantile_of};
use crate::units;

const RUNS: usize = 9;
const SAMPLES: usize = 400;
const TOKENS_PER_BLOCK: u32 = 16;
/// Blocks of a prompt in each group, and how many of these it has in common with others.
const BLOCKS: usize = 64;
const COMMON: usize = 16;
/// Prompts from this number on have nothing in common.
const ALONE: usize = 1 << 40;
const SUBTREES: usize = 1 << 42;
const GROUPS: usize = 8;
const ALL_BLOCKS: usize = 1_000_000;
const RUNS_QUICK: usize = 2;
/// Required of one block.
const P50_MAX_US: f64 = 2.0;
const P99_MAX_US: f64 = 20.0;

/// Measures a manager of a million blocks; few runs if `quick`.
pub(super) fn rows(quick: bool) -> Result<Vec<Row>, Failure> {
    let (blocks, runs) = (ALL_BLOCKS, if quick { RUNS_QUICK } else { RUNS });
    let pool = u32::try_from(blocks / GROUPS / 2).expect("blocks in a group");
    let group = GroupConfig { primary_blocks: pool, secondary_blocks: pool };
    let config = Config { events: 1 << 14, ..Config::new(TOKENS_PER_BLOCK, vec![group; GROUPS]) };
    let manager = BlockManager::new(&config).map_err(|e| Failure::Failed(e.to_string()))?;
    let mut engine = Engine::new(manager, GROUPS);
    let mut prompts = 0;
    // Each prompt adds the blocks that it has not in common.
    while prompts < (2 * pool as usize).div_ceil(BLOCKS - COMMON) + 100 {
        engine.serve(prompts, None);
        prompts += 1;
    }
    let mut figures: [Figure; 11] = [
        Figure::new("match"),
        Figure::new("allocate, one block in each group"),
        Figure::new("free, one block in each group"),
        Figure::new("allocate, all evicted and offloaded"),
        Figure::new("allocate, a quarter reused"),
        Figure::new("allocate, all onboarded"),
        Figure::new("finished"),
        Figure::new("append one block"),
        Figure::new("store"),
        Figure::new("free"),
        Figure::new("allocate, while a subtree is removed"),
    ];
    for _ in 0..runs {
        for _ in 0..SAMPLES {
            engine.serve(prompts, Some(&mut figures));
            prompts += 1;
        }
        figures.iter_mut().for_each(Figure::end_run);
    }
    for run in 0..runs {
        engine.subtree(run * pool as usize, pool as usize, &mut figures);
        figures[SUBTREE].end_run();
    }
    figures
        .into_iter()
        .map(|figure| figure.rows(blocks))
        .collect::<Result<Vec<_>, _>>()
        .map(|rows| rows.into_iter().flatten().collect())
}

const MATCH: usize = 0;
const ONE: usize = 1;
const FREE_ONE: usize = 2;
const FRESH: usize = 3;
const REUSED: usize = 4;
const ONBOARDED: usize = 5;
const FINISHED: usize = 6;
const APPEND: usize = 7;
const STORE: usize = 8;
const FREE: usize = 9;
const SUBTREE: usize = 10;

type Figures<'a> = Option<&'a mut [Figure; 11]>;

struct Engine {
    manager: BlockManager,
    groups: u32,
    retention: [RetentionConfig; 4],
    copies: Vec<TransferId>,
    now_ms: u64,
}

fn key(prompt: usize, block: usize) -> Key {
    let mixed = (prompt as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ block as u64;
    let mixed = (mixed ^ mixed >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    Key([mixed ^ mixed >> 29, (prompt as u64) << 20 | block as u64])
}

/// The first blocks are those of one of the prompts before.
fn keys(prompt: usize, common: usize) -> Vec<Key> {
    let shared = (0..common).map(|block| key(prompt - prompt % 8, block));
    shared.chain((common..BLOCKS).map(|block| key(prompt, block))).collect()
}

impl Engine {
    fn new(manager: BlockManager, groups: usize) -> Self {
        let of = |priority, duration_ms| {
            let retention = Retention { priority, duration_ms };
            RetentionConfig::new([TokenRange { start: 0, end: None, retention }])
                .expect("a right range")
        };
        let retention = [of(35, None), of(50, Some(200)), of(35, None), of(80, Some(1000))];
        Self { manager, groups: groups as u32, retention, copies: Vec::new(), now_ms: 0 }
    }

    /// Several prompts that need different things; what each call takes.
    fn serve(&mut self, prompt: usize, mut figures: Figures<'_>) {
        let all = self.groups * BLOCKS as u32;
        let fresh = keys(prompt + ALONE, 0);
        self.request(&fresh, prompt, FRESH, figures.as_deref_mut());
        let short = [key(prompt, BLOCKS)];
        self.request(&short, prompt, ONE, figures.as_deref_mut());
        let shared = keys(prompt, COMMON);
        self.request(&shared, prompt, REUSED, figures.as_deref_mut());
        // Of a prompt that is in secondary by now.
        let before = keys(prompt - prompt.min(self.depth()) + ALONE, 0);
        let began = Clocks::now();
        let found = self.manager.find_prefix(&before);
        let took = began.elapsed();
        if found.blocks == BLOCKS as u32 && found.secondary_blocks + 1 >= found.blocks {
            if let Some(figures) = figures.as_deref_mut() {
                figures[MATCH].add(took, all);
            }
            self.request(&before, prompt, ONBOARDED, figures);
        }
    }

    /// Many blocks are behind one of a low priority. When they have left primary, it is removed, and they are with it.
    fn subtree(&mut self, number: usize, pool: usize, figures: &mut [Figure; 11]) {
        let wishes = self.retention.clone();
        let retention = Retention { priority: 10, duration_ms: None };
        let first = TokenRange { start: 0, end: Some(1), retention };
        self.retention = [(); 4].map(|()| RetentionConfig::new([first]).expect("a right range"));
        let root = key(SUBTREES + number, 0);
        for child in 1..pool / 2 {
            self.request(&[root, key(SUBTREES + number, child)], 0, SUBTREE, None);
        }
        self.retention = wishes;
        for other in 0..2 * pool / BLOCKS {
            let keys = keys(SUBTREES + number + 1 + other, 0);
            self.request(&keys, other, SUBTREE, Some(&mut *figures));
        }
        assert_eq!(self.manager.find_prefix(&[root]).blocks, 0, "it was removed");
    }

    /// Number of prompts since the use of the blocks in the middle of secondary.
    fn depth(&self) -> usize {
        let usage = self.manager.usage(0).expect("a group");
        let primary = usage.primary_cached as usize + usage.primary_free as usize;
        primary * 3 / 2 / (2 * BLOCKS)
    }

    fn request(&mut self, keys: &[Key], prompt: usize, kind: usize, mut figures: Figures<'_>) {
        self.now_ms += 1;
        let blocks = keys.len() as u32;
        let prompt_tokens = blocks * TOKENS_PER_BLOCK;
        let retention = self.retention[prompt % self.retention.len()].clone();
        let request = Request { prompt_tokens, keys, tokens: &[], salt: 0, retention: &retention };
        let began = Clocks::now();
        let allocated = self.manager.allocate(&request, self.now_ms);
        let took = began.elapsed();
        let allocated = allocated.expect("one sequence at a time");
        let all = self.groups * blocks;
        if let Some(figures) = figures.as_deref_mut() {
            figures[kind].add(took, all);
        }
        self.finish(figures.as_deref_mut());
        let id = allocated.sequence;
        self.append(id, figures.as_deref_mut()).expect("blocks for one sequence");
        let began = Clocks::now();
        let stored = self.manager.store(id, keys, &[]).expect("right keys");
        let took = began.elapsed();
        assert_eq!(stored, blocks);
        let new = blocks - allocated.reused_tokens / TOKENS_PER_BLOCK;
        let began = Clocks::now();
        self.manager.free(id, &[], &[], self.now_ms).expect("it runs");
        let freed = began.elapsed();
        if let Some(figures) = figures {
            if new > 0 && kind != ONE {
                figures[STORE].add(took, self.groups * new);
            }
            figures[if kind == ONE { FREE_ONE } else { FREE }].add(freed, all);
        }
        while self.manager.poll_event().is_some() {}
    }

    fn append(&mut self, id: SequenceId, mut figures: Figures<'_>) -> Result<(), Error> {
        let began = Clocks::now();
        let blocks = self.manager.append(id, TOKENS_PER_BLOCK, self.now_ms)?;
        if let Some(figures) = figures.as_deref_mut() {
            figures[APPEND].add(began.elapsed(), self.groups * blocks);
        }
        self.finish(figures);
        Ok(())
    }

    /// Ends all copies.
    fn finish(&mut self, mut figures: Figures<'_>) {
        loop {
            while let Some(action) = self.manager.poll_action() {
                if let Action::Copy(transfer) = action {
                    self.copies.push(transfer.id);
                }
            }
            if self.copies.is_empty() {
                break;
            }
            for copy in self.copies.drain(..) {
                let began = Clocks::now();
                self.manager.finished(copy, Outcome::Done, self.now_ms).expect("once");
                let took = began.elapsed();
                if let Some(figures) = figures.as_deref_mut() {
                    figures[FINISHED].add(took, 1);
                }
            }
        }
    }
}

/// Clocks at the start of a call.
struct Clocks {
    cpu_us: f64,
    wall: Instant,
}

/// Times that a call took, in microseconds.
#[derive(Clone, Copy)]
struct CallTimes {
    cpu: f64,
    wall: f64,
}

impl Clocks {
    fn now() -> Self {
        Self { wall: Instant::now(), cpu_us: thread_cpu_us() }
    }

    fn elapsed(&self) -> CallTimes {
        let cpu = thread_cpu_us() - self.cpu_us;
        CallTimes { cpu, wall: self.wall.elapsed().as_nanos() as f64 / 1e3 }
    }
}

/// The times of an operation for one block, in microseconds.
struct Figure {
    name: &'static str,
    cpu: Vec<f64>,
    wall: Vec<f64>,
    /// Values of each run: the median and the 99th percentile of the processor time, and the 99th of the wall time.
    runs: [Vec<f64>; 3],
}

impl Figure {
    fn new(name: &'static str) -> Self {
        Self { name, cpu: Vec::new(), wall: Vec::new(), runs: Default::default() }
    }

    fn add(&mut self, took: CallTimes, blocks: u32) {
        self.cpu.push(took.cpu / f64::from(blocks));
        self.wall.push(took.wall / f64::from(blocks));
    }

    fn end_run(&mut self) {
        if !self.cpu.is_empty() {
            self.runs[0].push(quantile_of(&mut self.cpu, 0.5));
            self.runs[1].push(quantile_of(&mut self.cpu, 0.99));
            self.runs[2].push(quantile_of(&mut self.wall, 0.99));
        }
        self.cpu.clear();
        self.wall.clear();
    }

    fn rows(self, blocks: usize) -> Result<[Row; 3], Failure> {
        let [p50, p99, wall] = self.runs;
        if p50.is_empty() {
            return Err(Failure::Failed(format!("{} was not measured", self.name)));
        }
        let of = format!("{} blocks in {GROUPS} groups", units::count(blocks as u64));
        let name = |part| format!("{}, {of}: {part}", self.name);
        let row = |part, runs| Row::new("manager", name(part), "µs", Spread::of(runs));
        Ok([
            row("CPU p50", p50).at_most(P50_MAX_US),
            row("CPU p99", p99).at_most(P99_MAX_US),
            row("wall p99", wall),
        ])
    }
}
