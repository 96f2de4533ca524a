//! How fast the store is: `kvferry bench store`.
//!
//! Blocks through the store, beside the same blocks through the file transport in the same rounds: of equal
//! length, as many in a call, to and from the same file system. And the index by itself, with as many blocks as a
//! host may have.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use kvferry::{
    Access, Agent, Batch, DirectIo, FileOptions, Options, Region, TransportKind, Transports,
};
use kvferry_store::index::{Geometry, Index, Inserted, MAX_MEMBERS, New, RING_LEN};
use kvferry_store::policy::{Policy, Retention};
use kvferry_store::{BlockMemory, Key, Namespace, Retain, Store, StoreOptions};
use kvferry_sys::clock::process_cpu_time;

use crate::failure::Failure;
use crate::options::{Op, ROUNDS, StoreBench};
use crate::report::{Report, Row};
use crate::stats::Spread;
use crate::units;

/// The form of the report's JSON.
pub(super) const SCHEMA: &str = "kvferry.bench-store-speed/2";
/// Bytes of the blocks of one call.
const CALL_BYTES: u64 = 32 << 20;
/// Bytes of a segment of the store, and of a file beside it.
pub(super) const SEGMENT: u64 = 64 << 20;
/// Required share of the file transport's rate.
const SHARE: f64 = 0.85;
/// Blocks of the index, and of the store that is opened.
const INDEXED: u32 = 10_000_000;
const INDEXED_QUICK: u32 = 1_000_000;
const OPENED: u64 = 1_000_000;
const OPENED_QUICK: u64 = 50_000;
/// Operations on the index of which each is timed.
const TIMED: usize = 100_000;
const PREFIX: usize = 1000;

/// Until what was put is written, and how long an idle store is looked at.
const SETTLED: Duration = Duration::from_millis(500);
const IDLE: Duration = Duration::from_secs(1);
/// Longest CPU time of an idle store: the kernel's bookkeeping of a process that sleeps.
const IDLE_CPU_US: f64 = 100.0;
/// A fiftieth of what an engine's scheduler alone spends on a request of as many blocks: 1 µs for a block.
const MISS_CPU_US: f64 = PREFIX as f64 / 50.0;
const MISSED: u64 = 200;

type Hash = [u8; 32];

/// Measures what `options` ask for; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Check`] for a wrong byte; otherwise what the store failed with.
pub(super) fn measure(options: &StoreBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let rounds = options.effort.rounds();
    let place = Place::new(options)?;
    let mut remarks = vec![format!("folder: {}", place.folder.display())];
    let mut cases = Vec::new();
    for &block in &options.sizes {
        for direct in [DirectIo::Off, DirectIo::Auto] {
            cases.push(Case { block, direct });
        }
    }
    bar.inc_length((cases.len() * rounds) as u64 + 3);
    let mut rates: Vec<[[Vec<f64>; 2]; 2]> = cases.iter().map(|_| Default::default()).collect();
    for round in 0..rounds {
        for (case, rates) in cases.iter().zip(&mut rates) {
            bar.set_message(format!("round {}/{rounds}: {}", round + 1, case.name()));
            // In turns: what one has written, the device may still move during the other's.
            let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
            for who in order {
                let moved = match who {
                    0 => place.store(*case, round as u64)?,
                    _ => place.files(*case)?,
                };
                for (op, rate) in moved.into_iter().enumerate() {
                    rates[op][who].push(rate);
                }
            }
            bar.inc(1);
        }
    }
    let mut rows = Vec::new();
    for (case, rates) in cases.iter().zip(rates) {
        for (op, [ours, files]) in [Op::Write, Op::Read].into_iter().zip(rates) {
            let what = if op == Op::Write { "put" } else { "get" };
            let name = format!("{what} {}", case.name());
            let row = Row::new("store", name, "GB/s", Spread::of(ours));
            rows.push(row.at_least_of(SHARE, "files", Spread::of(files)));
        }
    }
    bar.set_message("the index");
    rows.extend(index(options.effort.quick)?);
    bar.inc(1);
    bar.set_message("nothing to do, and misses");
    rows.extend(place.costs(options.effort.quick)?);
    bar.inc(1);
    bar.set_message("opening");
    rows.extend(place.opening(options.effort.quick)?);
    bar.inc(1);
    remarks.push("put and get: with checksums, in calls of 32 MiB, by one thread".into());
    Ok(Report::new(SCHEMA, options.effort.quick, remarks, rows))
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) block: u64,
    pub(super) direct: DirectIo,
}

impl Case {
    pub(super) fn name(self) -> String {
        let direct = if self.direct == DirectIo::Off { "page cache" } else { "direct" };
        format!("{}, {direct}", units::bytes(self.block))
    }

    fn in_call(self) -> usize {
        usize::try_from((CALL_BYTES / self.block).max(1)).expect("few")
    }
}

pub(super) struct Place {
    pub(super) agent: Agent,
    pub(super) folder: PathBuf,
    memory: Region,
    pub(super) bytes: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Place {
    pub(super) fn new(options: &StoreBench) -> Result<Self, Failure> {
        let agent = Agent::builder()
            .name("bench-store")
            .transports(Transports::only(TransportKind::TCP))
            .start()?;
        let folder = options.folder.clone().unwrap_or_else(std::env::temp_dir);
        let folder = folder.join(format!("kvferry-bench-store-{}", std::process::id()));
        std::fs::create_dir_all(&folder)
            .map_err(|e| Failure::Failed(format!("{}: {e}", folder.display())))?;
        let largest = options.sizes.iter().copied().fold(CALL_BYTES, u64::max);
        let len = usize::try_from(2 * largest).expect("a few blocks");
        let memory = agent.allocate(len, Access::NONE)?;
        let default = if options.effort.quick { 128 << 20 } else { 1 << 30 };
        let bytes = options.bytes.unwrap_or(default).next_multiple_of(CALL_BYTES);
        Ok(Self { agent, folder, memory, bytes })
    }

    pub(super) fn calls(&self, case: Case) -> u64 {
        (self.bytes / (case.block * case.in_call() as u64)).max(1)
    }

    pub(super) fn blocks(&self, case: Case) -> Vec<BlockMemory> {
        let blocks = 0..case.in_call() as u64;
        blocks.map(|at| BlockMemory::new(&self.memory, at * case.block, case.block)).collect()
    }

    /// Writes a mark at the start of each block of a call.
    pub(super) fn mark(&self, case: Case, call: u64) -> Result<(), Failure> {
        for at in 0..case.in_call() as u64 {
            let number = call * case.in_call() as u64 + at;
            let offset = usize::try_from(at * case.block).expect("in memory");
            self.memory.write_at(offset, &(number ^ MARK).to_le_bytes())?;
        }
        Ok(())
    }

    fn check(&self, case: Case, call: u64) -> Result<(), Failure> {
        self.check_first(case, call, case.in_call())
    }

    /// Whether the first `blocks` of a call are those that [`Place::mark`] has made.
    pub(super) fn check_first(&self, case: Case, call: u64, blocks: usize) -> Result<(), Failure> {
        for at in 0..blocks as u64 {
            let number = call * case.in_call() as u64 + at;
            let offset = usize::try_from(at * case.block).expect("in memory");
            let mut bytes = [0; 8];
            self.memory.read_at(offset, &mut bytes)?;
            if u64::from_le_bytes(bytes) != number ^ MARK {
                return Err(Failure::Check(format!("{}: a wrong block", case.name())));
            }
        }
        Ok(())
    }

    /// GB/s of puts and of gets, through the store.
    fn store(&self, case: Case, seed: u64) -> Result<[f64; 2], Failure> {
        let folder = self.folder.join("store");
        let _ = std::fs::remove_dir_all(&folder);
        let options = StoreOptions::new(&folder, 4 * self.bytes + (1 << 30))
            .segment_bytes(SEGMENT)
            .direct(case.direct);
        let store = Store::open(&self.agent, &options).map_err(failed)?;
        let space = store.space(&Namespace::new("bench"));
        let memory = self.blocks(case);
        let prompts: Vec<Vec<Hash>> =
            (0..self.calls(case)).map(|call| prompt(seed << 32 | call, case.in_call())).collect();
        let rate = |op: Op| -> Result<f64, Failure> {
            let mut seconds = 0.0;
            for (call, prompt) in prompts.iter().enumerate() {
                let call = call as u64;
                if op == Op::Write {
                    self.mark(case, call)?;
                }
                let began = Instant::now();
                let done = match op {
                    Op::Write => {
                        let put = space.put(prompt, 0, &memory, Retain::default());
                        put.map_err(failed)?.stored
                    }
                    Op::Read => space.get(prompt, 0, &memory).map_err(failed)?,
                };
                seconds += began.elapsed().as_secs_f64();
                if done != prompt.len() {
                    return Err(Failure::Failed(format!("{}: {done} blocks", case.name())));
                }
                if op == Op::Read {
                    self.check(case, call)?;
                }
            }
            Ok(self.moved(case) / seconds / 1e9)
        };
        let rates = [rate(Op::Write)?, rate(Op::Read)?];
        store.close();
        let _ = std::fs::remove_dir_all(&folder);
        Ok(rates)
    }

    fn moved(&self, case: Case) -> f64 {
        (self.calls(case) * case.in_call() as u64 * case.block) as f64
    }

    /// GB/s of writes and of reads, through the file transport: of a file of the length of a segment, one
    /// after another.
    fn files(&self, case: Case) -> Result<[f64; 2], Failure> {
        let per_file = SEGMENT / (case.block * case.in_call() as u64);
        let path = |file: u64| self.folder.join(format!("file-{file}"));
        let rate = |op: Op| -> Result<f64, Failure> {
            let (mut seconds, mut open) = (0.0, None);
            for call in 0..self.calls(case) {
                if op == Op::Write {
                    self.mark(case, call)?;
                }
                let began = Instant::now();
                if call % per_file == 0 {
                    let options = FileOptions::create(SEGMENT).direct(case.direct);
                    open = Some(self.agent.open_file(path(call / per_file), &options)?);
                }
                let file = open.as_ref().expect("opened with the first call").remote();
                let mut batch = Batch::with_capacity(case.in_call());
                let at = call % per_file * case.in_call() as u64;
                for block in 0..case.in_call() as u64 {
                    let near = block * case.block;
                    batch.push(&self.memory, near, &file, (at + block) * case.block, case.block)?;
                }
                let (files, options) = (self.agent.files(), Options::default());
                match op {
                    Op::Write => files.write(&batch, &options)?,
                    Op::Read => files.read(&batch, &options)?,
                };
                seconds += began.elapsed().as_secs_f64();
                if op == Op::Read {
                    self.check(case, call)?;
                }
            }
            Ok(self.moved(case) / seconds / 1e9)
        };
        let rates = [rate(Op::Write)?, rate(Op::Read)?];
        for file in 0..=self.calls(case) / per_file {
            let _ = std::fs::remove_file(path(file));
        }
        Ok(rates)
    }

    /// The processor time that an open store takes while it gets no calls, and for requests whose blocks it does not
    /// have.
    fn costs(&self, quick: bool) -> Result<Vec<Row>, Failure> {
        let cpu = || {
            let used = process_cpu_time(std::process::id());
            used.map_err(|e| Failure::Failed(format!("the processor time of this process: {e}")))
        };
        let folder = self.folder.join("costs");
        let options = StoreOptions::new(&folder, self.bytes + (1 << 30)).segment_bytes(SEGMENT);
        let store = Store::open(&self.agent, &options).map_err(failed)?;
        let space = store.space(&Namespace::new("bench"));
        let memory = self.blocks(Case { block: 128 << 10, direct: DirectIo::Off });
        space.put(&prompt(1, memory.len()), 0, &memory, Retain::default()).map_err(failed)?;
        std::thread::sleep(SETTLED);
        let mut idle = Vec::new();
        for _ in 0..if quick { 1 } else { ROUNDS } {
            let before = cpu()?;
            std::thread::sleep(IDLE);
            idle.push((cpu()? - before).as_secs_f64() * 1e6 / IDLE.as_secs_f64());
        }
        let idle = Row::new("around", "nothing to do", "µs/s", Spread::of(idle));
        let prompts: Vec<_> = (0..MISSED).map(|at| prompt(100 + at, PREFIX)).collect();
        let mut missed = Vec::new();
        for _ in 0..ROUNDS {
            let before = cpu()?;
            for prompt in &prompts {
                let found = space.lookup(prompt).map_err(failed)?;
                if found + space.touch(prompt).map_err(failed)? > 0 {
                    return Err(Failure::Check("a block that was never put".into()));
                }
            }
            missed.push((cpu()? - before).as_secs_f64() * 1e6 / prompts.len() as f64);
        }
        let name = format!("CPU of a request of {PREFIX} blocks that misses");
        let missed = Row::new("around", name, "µs", Spread::of(missed)).at_most(MISS_CPU_US);
        store.close();
        let _ = std::fs::remove_dir_all(&folder);
        Ok(vec![idle.at_most(IDLE_CPU_US), missed])
    }

    /// Seconds to open a store that was closed, and one whose process was killed.
    fn opening(&self, quick: bool) -> Result<Vec<Row>, Failure> {
        let count = if quick { OPENED_QUICK } else { OPENED };
        let mut rows = Vec::new();
        for (how, bound) in [("a close", 1.0), ("SIGKILL", 5.0)] {
            let folder = self.folder.join("opened");
            let _ = std::fs::remove_dir_all(&folder);
            let is_killed = how == "SIGKILL";
            let filled = Command::new("/proc/self/exe")
                .args(["bench", "store", "--fill", &count.to_string(), "--folder"])
                .arg(&folder)
                .args(is_killed.then_some("--quick"))
                .stdout(Stdio::null())
                .status()
                .map_err(|e| Failure::Failed(format!("cannot start a second process: {e}")))?;
            if filled.success() == is_killed {
                return Err(Failure::Failed(format!("the process that fills a store: {filled}")));
            }
            let began = Instant::now();
            let store = Store::open(&self.agent, &opened(&folder, count)).map_err(failed)?;
            let seconds = began.elapsed().as_secs_f64();
            let blocks = store.stats().blocks;
            let expected = count / IN_FILL * IN_FILL;
            if blocks != expected {
                return Err(Failure::Check(format!("{blocks} of {expected} blocks after {how}")));
            }
            store.close();
            let _ = std::fs::remove_dir_all(&folder);
            let name = format!("open after {how}, {} blocks", units::count(blocks));
            let row = Row::new("around", name, "s", Spread::of(vec![seconds]));
            rows.push(if quick { row } else { row.at_most(bound) });
        }
        Ok(rows)
    }
}

/// Blocks of a call of [`fill`].
const IN_FILL: u64 = 1000;

fn opened(folder: &Path, count: u64) -> StoreOptions {
    StoreOptions::new(folder, count * 3 * 4096 + (1 << 30))
        .segment_bytes(SEGMENT)
        .blocks_max(u32::try_from(2 * count).expect("a few million"))
}

/// Puts `count` blocks of 4 KiB into a store. Then closes it, or kills this process: another one measures how
/// long opening takes after that.
///
/// # Errors
/// What the store failed with.
pub fn fill(folder: &Path, count: u64, is_killed: bool) -> Result<(), Failure> {
    let agent = Agent::builder()
        .name("bench-store")
        .transports(Transports::only(TransportKind::TCP))
        .start()?;
    let len = usize::try_from(IN_FILL * 4096).expect("a few MiB");
    let memory = agent.allocate(len, Access::NONE)?;
    let store = Store::open(&agent, &opened(folder, count)).map_err(failed)?;
    let space = store.space(&Namespace::new("bench"));
    let blocks: Vec<_> =
        (0..IN_FILL).map(|at| BlockMemory::new(&memory, at * 4096, 4096)).collect();
    for call in 0..count / IN_FILL {
        let prompt = prompt(call, blocks.len());
        let put = space.put(&prompt, 0, &blocks, Retain::default()).map_err(failed)?;
        if put.stored != blocks.len() {
            return Err(Failure::Failed(format!("a put of {} blocks: {put:?}", blocks.len())));
        }
    }
    if is_killed {
        let this = rustix::process::getpid();
        let sent = rustix::process::kill_process(this, rustix::process::Signal::KILL);
        sent.map_err(|e| Failure::Failed(format!("SIGKILL: {e}")))?;
    }
    store.close();
    Ok(())
}

const MARK: u64 = 0x9e37_79b9_7f4a_7c15;

pub(super) fn failed(error: kvferry_store::Error) -> Failure {
    Failure::Failed(error.to_string())
}

pub(super) fn prompt(seed: u64, blocks: usize) -> Vec<Hash> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let hash = |_| {
        let mut hash = [0; 32];
        rng.fill(&mut hash);
        hash
    };
    (0..blocks).map(hash).collect()
}

/// The index by itself, full.
fn index(quick: bool) -> Result<Vec<Row>, Failure> {
    let failed = |e: std::io::Error| Failure::Failed(format!("the index: {e}"));
    let blocks = if quick { INDEXED_QUICK } else { INDEXED };
    let geometry = Geometry { slots: blocks, segments: 1 << 10, pages_per_segment: 1 << 16 };
    let index = Arc::new(Index::create(geometry).map_err(failed)?);
    let member = index.join().map_err(failed)?;
    let mut rng = fastrand::Rng::with_seed(1);
    let new =
        |at: u32| New { sum: at.into(), parent: None, page: at, len: 4096, retention: 0, now: 0 };
    let keys: Vec<Key> = (0..blocks).map(|_| Key([rng.u64(..), rng.u64(..)])).collect();
    for (at, key) in (0..).zip(&keys) {
        let inserted = member.insert(*key, new(at));
        if !matches!(inserted, Inserted::New(_)) {
            return Err(Failure::Failed(format!("the index: {inserted:?} of {key:?}")));
        }
    }
    // As the keeper does.
    while index.collapse(1) {}
    let chosen: Vec<Key> = (0..TIMED).map(|_| keys[rng.usize(..keys.len())]).collect();
    let mut rows = Vec::new();
    let mut timed = |what: &str, each: &mut dyn FnMut(&Key)| {
        let mut nanoseconds: Vec<f64> = chosen
            .iter()
            .map(|key| {
                let began = Instant::now();
                each(key);
                began.elapsed().as_nanos() as f64
            })
            .collect();
        nanoseconds.sort_by(f64::total_cmp);
        for (part, at, bound) in [("p50", 0.5, 2.0), ("p99", 0.99, 20.0)] {
            let value = nanoseconds[(nanoseconds.len() as f64 * at) as usize] / 1e3;
            let name = format!("{what}, {} blocks: {part}", units::count(blocks.into()));
            rows.push(Row::new("index", name, "µs", Spread::of(vec![value])).at_most(bound));
        }
    };
    timed("find", &mut |key| {
        std::hint::black_box(index.find(key));
    });
    timed("touch", &mut |key| {
        if let Some(entry) = index.find(key) {
            index.touch(&entry, 1);
        }
    });
    timed("remove", &mut |key| {
        if let Some(entry) = index.find(key) {
            member.remove(&entry);
        }
    });
    timed("insert", &mut |key| {
        member.insert(*key, new(0));
    });
    let mut microseconds = Vec::new();
    let mut found = Vec::with_capacity(PREFIX);
    for at in 0..200 {
        let first = at * (keys.len() - PREFIX) / 200;
        let prefix = &keys[first..first + PREFIX];
        found.clear();
        let began = Instant::now();
        let len = index.find_prefix(prefix, &mut found);
        microseconds.push(began.elapsed().as_nanos() as f64 / 1e3);
        std::hint::black_box(len);
    }
    let name = format!("prefix of {PREFIX} of {} blocks", units::count(blocks.into()));
    rows.push(Row::new("index", name, "µs", Spread::of(microseconds)).at_most(100.0));
    let mut policy = Policy::new(blocks as usize);
    for first in (0..blocks).step_by(PREFIX) {
        let chain = first..blocks.min(first + PREFIX as u32);
        let chain: Vec<_> = chain.map(|slot| (slot, slot.into())).collect();
        policy.added(first.into(), None, &chain, Retention::DEFAULT);
    }
    let rings = MAX_MEMBERS * RING_LEN;
    let bytes = (index.memory().len() - rings + policy.bytes()) as f64 / f64::from(blocks);
    let name = format!("memory of a block in chains of {PREFIX}, with the policy's");
    rows.push(Row::new("index", name, "B", Spread::of(vec![bytes])).at_most(64.0));
    Ok(rows)
}
