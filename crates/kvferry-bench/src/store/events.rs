//! How late a process learns of blocks that another one puts, and of those that leave: `kvferry bench store --rows events`.
//!
//! A second process puts blocks and has them evicted. This one follows the store as an engine does that reports to a
//! router: one thread gathers, and wakes another one, which takes the reports. A lag is the time from the return of a put,
//! or from the removal of a block, until the report is taken.
//!
//! The second process finds removals by looking all its blocks up between two puts. A removal counts from the beginning
//! of the last look that found the block, so its lag is too long by the time from one look to the next, and never too
//! short.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use indicatif::ProgressBar;
use kvferry::{Access, Agent, Region, TransportKind, Transports};
use kvferry_store::{BlockMemory, Namespace, Retain, Space, Store, StoreOptions, Watch};
use serde::{Deserialize, Serialize};

use super::speed::{Place, failed, prompt};
use crate::child::{self, Child, answer_parent};
use crate::failure::Failure;
use crate::helper;
use crate::machine::shared_clock;
use crate::options::StoreBench;
use crate::report::{Report, Row};
use crate::stats::{Spread, quantile_of};
use crate::units;

/// The form of the report's JSON.
pub(super) const SCHEMA: &str = "kvferry.bench-store-events/1";
/// Longest time from a change until its report is taken.
const LAG_MS: f64 = 100.0;
/// Blocks that are put in a round. As many leave a full store.
const BLOCKS: u64 = 1_000;
const BLOCKS_QUICK: u64 = 100;
const BLOCK_BYTES: u64 = 64 << 10;
const SEGMENT: u64 = 1 << 20;
/// Bytes of a full store: some 750 blocks.
const FULL: u64 = 48 << 20;
/// Pause between two puts.
const PAUSE: Duration = Duration::from_millis(1);
/// Longest time that a put waits for space, as the adapters have it.
const PUT_WAIT: Duration = Duration::from_secs(2);
/// Reports that an engine's step takes: as `KVFerryOffloadingSpec` has it.
const BUDGET: usize = 2048;
/// Longest time that the other process may take for a round.
const PATIENCE: Duration = Duration::from_secs(120);
/// Time without a report after which those that are missing do not come.
const SILENCE: Duration = Duration::from_secs(10);

/// Number of a block; its hash is made of it.
type Number = u64;
/// Nanoseconds of the clock that all processes share.
type Moment = u64;

/// Measures the lag of reports; `bar` shows the progress.
///
/// # Errors
/// [`Failure::Check`] for a report that does not come; otherwise the store's or the other process's failure.
pub(super) fn measure(options: &StoreBench, bar: &ProgressBar) -> Result<Report, Failure> {
    let (rounds, quick) = (options.effort.rounds(), options.effort.quick);
    let count = if quick { BLOCKS_QUICK } else { BLOCKS };
    let place = Place::new(options)?;
    bar.inc_length(2 * rounds as u64);
    // Of a store that fills up in the last round at the earliest.
    let spacious = (2 * rounds as u64 * count * BLOCK_BYTES).next_multiple_of(SEGMENT) + FULL;
    let mut rows = Vec::new();
    for (name, capacity) in [("not full", spacious), ("full", FULL)] {
        let folder = place.folder.join("events");
        let mut follower = Follower::start(&place.agent, &folder, capacity)?;
        if capacity == FULL {
            // Until blocks leave it.
            while follower.round(BLOCKS_QUICK)?.removed.is_empty() {}
        }
        let mut lags = Vec::new();
        for round in 0..rounds {
            bar.set_message(format!("a store that is {name}, round {}/{rounds}", round + 1));
            let mut of_round = follower.round(count)?;
            while capacity == FULL && (of_round.removed.len() as u64) < count {
                of_round.removed.extend(follower.round(BLOCKS_QUICK)?.removed);
            }
            lags.push(of_round);
            bar.inc(1);
        }
        // Ends its threads.
        follower.store.close();
        drop(follower);
        let _ = std::fs::remove_dir_all(&folder);
        let count = units::count(count);
        rows.extend(rows_of(
            &format!("{count} blocks put into a store that is {name}"),
            lags.iter_mut().map(|lags| &mut lags.stored),
        ));
        if capacity == FULL {
            rows.extend(rows_of(
                &format!("{count} blocks or more that leave it"),
                lags.iter_mut().map(|lags| &mut lags.removed),
            ));
        }
    }
    let remarks = vec![
        format!("folder: {}", place.folder.display()),
        "another process puts, in calls of one block; a removal counts from when the block was last found".into(),
    ];
    Ok(Report::new(SCHEMA, quick, remarks, rows))
}

fn rows_of<'a>(what: &str, rounds: impl Iterator<Item = &'a mut Vec<f64>>) -> [Row; 3] {
    let mut parts = [const { Vec::new() }; 3];
    for lags in rounds {
        for (part, at) in parts.iter_mut().zip([0.5, 0.99, 1.0]) {
            part.push(quantile_of(lags, at));
        }
    }
    let [p50, p99, most] = parts.map(Spread::of);
    let row = |name, lag| Row::new("events", format!("{what}: {name}"), "ms", lag);
    [row("p50", p50), row("p99", p99).at_most(LAG_MS), row("max", most).at_most(LAG_MS)]
}

/// Lags of a round, in milliseconds.
#[derive(Default)]
struct Lags {
    stored: Vec<f64>,
    removed: Vec<f64>,
}

/// The reports that this process takes, and the process that puts.
struct Follower {
    writer: Child,
    store: Store,
    watch: Arc<Watch>,
    reports: mpsc::Receiver<(Change, Moment)>,
    next: Number,
    changed: HashMap<Change, Moment>,
    taken: HashMap<Change, Moment>,
}

/// A block that was stored, or removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Change {
    block: Number,
    is_removed: bool,
}

impl Follower {
    fn start(agent: &Agent, folder: &Path, capacity: u64) -> Result<Follower, Failure> {
        let mut writer = helper::spawn(&["events"])?;
        // It opens the store first, so it is the keeper.
        writer.ask::<_, ()>(&Ask::Start { folder: folder.to_owned(), capacity })?;
        let store = Store::open(agent, &options(folder, capacity)).map_err(failed)?;
        let watch = store.watch(&[vec![store.space(&namespace())]]).map_err(failed)?;
        let watch = Arc::new(watch);
        let (wake, woken) = mpsc::channel();
        let (send, reports) = mpsc::channel();
        let gathering = Arc::clone(&watch);
        std::thread::spawn(move || {
            // Until the store is closed.
            while let Ok(made) = gathering.gather(PATIENCE) {
                if made > 0 && wake.send(()).is_err() {
                    return;
                }
            }
        });
        let taking = Arc::clone(&watch);
        std::thread::spawn(move || {
            while let Ok(()) = woken.recv() {
                while taking.reports() > 0 {
                    let taken = taking.take(BUDGET);
                    let now = moment();
                    for change in taken.iter().flat_map(changes) {
                        let _ = send.send((change, now));
                    }
                }
            }
        });
        let (changed, taken) = (HashMap::new(), HashMap::new());
        Ok(Follower { writer, store, watch, reports, next: 0, changed, taken })
    }

    /// Has `count` blocks put, and waits for the reports of all that has changed.
    fn round(&mut self, count: u64) -> Result<Lags, Failure> {
        let first = self.next;
        self.next += count;
        let names: Vec<_> = (first..self.next).map(hash).collect();
        self.watch.add(0, &names).map_err(failed)?;
        let changed: Vec<(Change, Moment)> =
            self.writer.ask_within(&Ask::Put { first, count }, PATIENCE)?;
        self.changed.extend(changed);
        let mut lags = Lags::default();
        loop {
            self.changed.retain(|change, at| {
                let Some(taken) = self.taken.remove(change) else { return true };
                // The report may be taken before the put has returned.
                let lag = taken.saturating_sub(*at) as f64 / 1e6;
                if change.is_removed { &mut lags.removed } else { &mut lags.stored }.push(lag);
                false
            });
            if self.changed.is_empty() {
                return Ok(lags);
            }
            match self.reports.recv_timeout(SILENCE) {
                Ok(report) => {
                    self.taken.extend([report].into_iter().chain(self.reports.try_iter()))
                }
                Err(_) => self.give_up()?,
            }
        }
    }

    /// Forgets blocks that came and left before the watch looked, which are not reported.
    ///
    /// # Errors
    /// [`Failure::Check`] if another report is missing.
    fn give_up(&mut self) -> Result<(), Failure> {
        let other = |it: &Change| Change { is_removed: !it.is_removed, ..*it };
        let missing = self.changed.keys().filter(|it| !self.changed.contains_key(&other(it)));
        match missing.count() {
            0 => {
                self.changed.clear();
                Ok(())
            }
            missing => {
                Err(Failure::Check(format!("{missing} changes of a store are not reported")))
            }
        }
    }
}

/// The changes of a report.
fn changes(report: &kvferry_store::Report) -> impl Iterator<Item = Change> + '_ {
    let is_removed = report.is_removed;
    report.hashes.iter().map(move |hash| Change { block: number(hash), is_removed })
}

#[derive(Debug, Serialize, Deserialize)]
enum Ask {
    /// The first ask: opens the store.
    Start { folder: PathBuf, capacity: u64 },
    /// Puts these blocks. Answers them with the moment at which each put had returned, and the blocks that were found
    /// to be removed meanwhile.
    Put { first: Number, count: u64 },
}

/// The store of the other process, which its space keeps open.
struct Writer {
    space: Space,
    memory: Region,
    /// Blocks that were found at the last look, and when they were put.
    live: Vec<(Number, Moment)>,
    /// Begin of the last look.
    looked: Moment,
    /// Dropped last.
    _agent: Agent,
}

/// The helper `events`.
pub(crate) fn run_writer() -> Result<(), Failure> {
    let mut writer = None;
    answer_parent(|ask| match (ask, &mut writer) {
        (Ask::Start { folder, capacity }, writer) => {
            *writer = Some(Writer::start(&folder, capacity)?);
            child::value(&())
        }
        (Ask::Put { first, count }, Some(writer)) => child::value(&writer.put(first, count)?),
        (Ask::Put { .. }, None) => Err(Failure::Usage("the store is not open".into())),
    })
}

impl Writer {
    fn start(folder: &Path, capacity: u64) -> Result<Writer, Failure> {
        let agent = Agent::builder().transports(Transports::only(TransportKind::TCP)).start()?;
        let memory = agent.allocate(BLOCK_BYTES as usize, Access::NONE)?;
        let store = Store::open(&agent, &options(folder, capacity)).map_err(failed)?;
        let space = store.space(&namespace());
        Ok(Writer { space, memory, live: Vec::new(), looked: moment(), _agent: agent })
    }

    fn put(&mut self, first: Number, count: u64) -> Result<Vec<(Change, Moment)>, Failure> {
        let memory = [BlockMemory::new(&self.memory, 0, BLOCK_BYTES)];
        // When blocks left since the last call is not known.
        self.look(&mut Vec::new())?;
        let mut changes = Vec::new();
        for block in first..first + count {
            let put =
                self.space.put(&[hash(block)], 0, &memory, Retain::default()).map_err(failed)?;
            let now = moment();
            if put.stored == 1 {
                changes.push((Change { block, is_removed: false }, now));
                self.live.push((block, now));
            }
            self.look(&mut changes)?;
            std::thread::sleep(PAUSE);
        }
        Ok(changes)
    }

    /// Looks all blocks up.
    fn look(&mut self, changes: &mut Vec<(Change, Moment)>) -> Result<(), Failure> {
        let began = moment();
        for at in (0..self.live.len()).rev() {
            let (block, put) = self.live[at];
            if self.space.lookup(&[hash(block)]).map_err(failed)? == 0 {
                changes.push((Change { block, is_removed: true }, put.max(self.looked)));
                self.live.swap_remove(at);
            }
        }
        self.looked = began;
        Ok(())
    }
}

fn options(folder: &Path, capacity: u64) -> StoreOptions {
    StoreOptions::new(folder, capacity).segment_bytes(SEGMENT).put_wait(PUT_WAIT)
}

fn namespace() -> Namespace {
    Namespace::new("bench")
}

/// The hash of a block. Its last bytes are the number.
fn hash(block: Number) -> [u8; 32] {
    let [mut hash] = prompt(block, 1)[..] else { unreachable!("one block") };
    hash[24..].copy_from_slice(&block.to_le_bytes());
    hash
}

fn number(hash: &[u8]) -> Number {
    let bytes = hash.last_chunk().expect("a hash of 32 bytes");
    Number::from_le_bytes(*bytes)
}

fn moment() -> Moment {
    u64::try_from(shared_clock().as_nanos()).unwrap_or(u64::MAX)
}
