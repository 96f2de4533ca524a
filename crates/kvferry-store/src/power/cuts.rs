//! Loss of power, and kills, at each step.

use super::oracle::Oracle;
use super::recorder::{Event, Note, Recording};
use super::world::World;
use super::{CAPACITY, Engine, Folder, PATIENCE, Process, bytes_of_segments, options};
use crate::fault_points::Op;
use crate::log::superblock::{FILE, downgrade_bytes};
use fastrand::Rng;
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::time::{Duration, Instant};

/// Cuts are tried in so many passes, each through the whole record.
const PASSES: usize = 31;
/// Time limit of the tests that `make test` runs.
const QUICK: Duration = Duration::from_secs(8);
/// Cuts at each event that take longer hang.
const HANGS: Duration = Duration::from_secs(1800);
/// Events at which a record is cut at least, however long that takes.
const AT_LEAST: usize = 8;
/// Kills leave all that was written, so there is less to try.
const KILLS_EVERY: usize = 3;
/// Tries one cut alone: `CUT:SEED`.
const ALONE: &str = "KVFERRY_POWER_CUT";

/// Recorded operations of stores, and the files before them.
struct Record {
    before: World,
    events: Vec<Event>,
}

impl Record {
    fn of(name: &str, prepare: impl FnOnce(&Path), work: impl FnOnce(&Path, &Recording)) -> Self {
        let root = Folder::new(name);
        prepare(&root.0);
        let before = World::of(&root.0).expect("files that were just made");
        let recording = Recording::start(&root.0);
        work(&root.0, &recording);
        Self { before, events: recording.take() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cut {
    Power,
    Kill,
}

/// Counts over all cuts.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) cuts: usize,
    /// Blocks that had to be there, and were.
    pub(super) kept: usize,
    /// Blocks that did not have to be there, and were.
    lucky: usize,
    /// Blocks that had to be there, and left when the store was opened.
    left: usize,
    corrupt: u64,
}

impl Seen {
    /// True if blocks that must stay and others have stayed.
    fn is_worth_it(&self) -> bool {
        self.kept > self.cuts && self.lucky > 0
    }

    /// True once the time is over and the cuts show something, or [`PATIENCE`] is over.
    fn is_enough(&self, began: Instant, time: Duration) -> bool {
        let elapsed = began.elapsed();
        elapsed > time && (self.is_worth_it() || elapsed > PATIENCE)
    }
}

/// Two threads, two processes, blocks that leave and are put again, a second opening.
fn busy_store(root: &Path, recording: &Recording) {
    let (engine, second) = (Engine::start(), Engine::start());
    let process = Process::open(&engine, &options(root), 0).expect("a store");
    std::thread::scope(|scope| {
        for thread in 0..2 {
            let process = &process;
            scope.spawn(move || {
                let mut rng = Rng::with_seed(thread);
                let first = 1 + thread * 1000;
                let mut next = first;
                while next < first + 120 {
                    let count = rng.u64(1..=3);
                    let blocks: Vec<_> = (next..next + count).collect();
                    next += count;
                    process.put(recording, thread as usize, &blocks);
                    if rng.u32(0..6) == 0 {
                        // It may have left.
                        let again = rng.u64(first..next);
                        process.put(recording, thread as usize, &[again]);
                    }
                    if rng.u32(0..12) == 0 {
                        process.sync(recording);
                    }
                }
            });
        }
        let other = Process::open(&second, &options(root), 1).expect("a second process");
        for block in 3000..3040 {
            other.put(recording, 2, &[block]);
            // It may be there already, in a segment of the other process.
            other.put(recording, 2, &[block - 2999]);
            if block % 20 == 0 {
                other.sync(recording);
            }
        }
        other.close(recording);
    });
    process.close(recording);
    // A second opening, of which the last part is not synced when the power fails.
    let process = Process::open(&engine, &options(root), 2).expect("a store");
    for block in 4000..4050 {
        process.put(recording, 0, &[block]);
        process.put(recording, 0, &[block - 3900]);
        if block == 4030 {
            process.sync(recording);
        }
    }
    process.close(recording);
}

/// Blocks that it has.
const BEFORE: std::ops::Range<u64> = 1..60;

/// A store of format 1 that is upgraded when it is opened.
fn upgraded_store(root: &Path, recording: &Recording) {
    let engine = Engine::start();
    BEFORE.for_each(|block| recording.note(Note::Stored { process: 0, block, began: 0 }));
    recording.note(Note::Synced { process: 0, began: recording.now() });
    let process = Process::open(&engine, &options(root), 1).expect("a store of format 1");
    for block in 100..130 {
        process.put(recording, 0, &[block]);
    }
    process.close(recording);
}

fn make_store_of_format_1(root: &Path) {
    let engine = Engine::start();
    let process = Process::open(&engine, &options(root), 0).expect("a store");
    BEFORE.for_each(|block| engine.must_have(&process.kv, 0, block).expect("it is stored"));
    process.store.close();
    let first = root.join("disk/0").join(FILE);
    let bytes = std::fs::read(&first).expect("a superblock");
    std::fs::write(&first, downgrade_bytes(&bytes)).expect("written");
    for other in ["disk/1", "other"] {
        std::fs::remove_file(root.join(other).join(FILE)).expect("it exists");
    }
}

/// Opens the store that a cut has left.
pub(super) fn judge(
    engine: &Engine,
    folder: &Path,
    oracle: &Oracle,
    cut: Cut,
    seen: &mut Seen,
) -> Result<(), String> {
    let recording = Recording::start(folder);
    let process = Process::open(engine, &options(folder), 0)
        .map_err(|e| format!("the store does not open: {}", causes(&e)))?;
    let mut missing = Vec::new();
    for block in oracle.blocks() {
        let must = match cut {
            Cut::Power => oracle.survives_power(block),
            Cut::Kill => oracle.survives_kill(block),
        };
        let is_there = engine.get(&process.kv, 0, block)?;
        seen.kept += usize::from(is_there && must.is_some());
        seen.lucky += usize::from(is_there && must.is_none());
        missing.extend(must.filter(|_| !is_there).map(|why| (block, why)));
    }
    (9000..9003).try_for_each(|block| engine.must_have(&process.kv, 0, block))?;
    let stats = process.store.stats();
    seen.corrupt += stats.corrupt;
    let bytes = stats.disk_bytes.max(bytes_of_segments(folder));
    if bytes > CAPACITY {
        return Err(format!("{bytes} bytes are more than the capacity"));
    }
    if stats.failed > 0 {
        return Err(format!("no device fails, but {stats:?}"));
    }
    process.store.close();
    let left: Vec<_> = recording.evicted().iter().filter_map(|key| oracle.block_of(*key)).collect();
    let must_be: Vec<_> = missing.iter().filter(|it| !left.contains(&it.0)).collect();
    seen.left += missing.len() - must_be.len();
    match must_be.first() {
        None => Ok(()),
        Some((block, why)) => {
            let count = must_be.len();
            let history = oracle.history(*block);
            Err(format!(
                "block {block} is missed, and {} more: {why}; {history}; {stats:?}",
                count - 1
            ))
        }
    }
}

fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let _ = write!(text, ": {next}");
        cause = next.source();
    }
    text
}

/// The events of a record at which it is cut.
struct Coverage {
    seen: Seen,
    /// Events at which it was cut, and all at which it could be.
    events: usize,
    of: usize,
}

impl Coverage {
    /// Prints what was done, and checks that it shows something.
    fn report(&self) {
        println!("cut at {} of {} events", self.events, self.of);
        is_worth_it(&self.seen);
        assert!(self.events >= AT_LEAST.min(self.of), "{} of {}", self.events, self.of);
    }

    fn is_whole(&self) -> bool {
        self.events == self.of
    }
}

/// Cuts the record at each event, or at [`AT_LEAST`], as many as there is `time` for, and as show something. Without a
/// `time`, at each.
fn cut_everywhere(record: &Record, time: Option<Duration>) -> Coverage {
    let alone = std::env::var(ALONE).ok().and_then(|it| {
        let (cut, seed) = it.split_once(':')?;
        Some((cut.parse::<usize>().ok()?, seed.parse::<u64>().ok()?))
    });
    let seed = alone.map_or_else(|| fastrand::u64(..), |it| it.1);
    let engine = Engine::start();
    let began = Instant::now();
    let syncs: Vec<_> = record.events.iter().filter_map(sync_step).collect();
    let is_sync = BTreeSet::from_iter(syncs);
    let may_cut = |at: usize, event: &Event| {
        // All others change neither what may be lost nor what is promised.
        let changes = match event {
            Event::Begin(_, op) => !matches!(op, Op::Evicted(..)) && !op.is_sync(),
            Event::End(step, _) => is_sync.contains(step),
            Event::Note(_) => true,
        };
        changes && alone.is_none_or(|it| it.0 == at)
    };
    let of = record.events.iter().enumerate().filter(|(at, event)| may_cut(*at, event)).count();
    let mut done = Coverage { seen: Seen::default(), events: 0, of };
    for pass in 0..PASSES {
        // Spread over the whole record, also if there is no time for all passes.
        let pass = (pass * 12) % PASSES;
        let (mut world, mut oracle) = (record.before.clone(), Oracle::new(&record.events));
        for (at, event) in record.events.iter().enumerate() {
            world.advance(event);
            oracle.advance(event);
            if at % PASSES != pass || !may_cut(at, event) {
                continue;
            }
            match time {
                Some(time) if done.events >= AT_LEAST && done.seen.is_enough(began, time) => {
                    return done;
                }
                Some(_) => {}
                None => assert!(began.elapsed() < HANGS, "{} of {of} events", done.events),
            }
            for cut in [Cut::Power, Cut::Kill] {
                if cut == Cut::Kill && !at.is_multiple_of(KILLS_EVERY) && alone.is_none() {
                    continue;
                }
                let mut rng = Rng::with_seed(seed ^ at as u64);
                let folder = Folder::new("cut");
                let made = match cut {
                    Cut::Power => world.power_cut(&mut rng, &folder.0),
                    Cut::Kill => world.kill(&mut rng, &folder.0),
                };
                made.expect("room for the files of a store");
                if let Err(what) = judge(&engine, &folder.0, &oracle, cut, &mut done.seen) {
                    fail(record, cut, at, seed, &what);
                }
                done.seen.cuts += 1;
            }
            done.events += 1;
        }
    }
    done
}

fn sync_step(event: &Event) -> Option<usize> {
    match event {
        Event::Begin(step, op) if op.is_sync() => Some(*step),
        _ => None,
    }
}

/// A process that opens a store which others have left behind. It puts again some blocks that it has found, and some
/// that it has not. Returns those that it has found.
fn go_on(root: &Path, recording: &Recording, engine: &Engine, blocks: &[u64]) -> Vec<u64> {
    let process = Process::open(engine, &options(root), 7).expect("a store");
    let is_there = |block: &u64| engine.get(&process.kv, 0, *block).expect("its bytes");
    let (found, missed): (Vec<_>, Vec<_>) = blocks.iter().partition(|block| is_there(block));
    for block in 5000..5030 {
        process.put(recording, 0, &[block]);
        if let Some(missed) = missed.get(block as usize - 5000) {
            process.put(recording, 0, &[*missed]);
        }
        if let Some(again) = found.get(block as usize % 11 * 3) {
            process.put(recording, 0, &[*again]);
        }
        if block == 5020 {
            process.sync(recording);
        }
    }
    process.close(recording);
    found
}

/// Ends a record's processes at some event, lets another process go on, and cuts the power there.
fn go_on_and_cut(record: &Record, first: Cut, time: Duration) -> Seen {
    let (engine, mut seen, began) = (Engine::start(), Seen::default(), Instant::now());
    let blocks = Oracle::new(&record.events).blocks();
    let mut rng = Rng::new();
    let seed = rng.get_seed();
    // Before, there is no store.
    let is_note = |event: &Event| matches!(event, Event::Note(_));
    let from = record.events.iter().position(is_note).expect("something was put");
    while !seen.is_enough(began, time) {
        let mut world = record.before.clone();
        let ended_at = rng.usize(from..record.events.len());
        record.events[..ended_at].iter().for_each(|event| world.advance(event));
        let root = Folder::new("ended");
        let before = match first {
            Cut::Power => world.power_cut(&mut rng, &root.0).and_then(|()| World::of(&root.0)),
            Cut::Kill => world.kill_and_go_on(&mut rng, &root.0),
        };
        let before = before.expect("room for a store");
        let recording = Recording::start(&root.0);
        let found = go_on(&root.0, &recording, &engine, &blocks);
        // What was promised before.
        let mut events = match first {
            Cut::Kill => record.events[..ended_at].to_vec(),
            // What the first loss of power has left is durable.
            Cut::Power => {
                let stored = |block| Event::Note(Note::Stored { process: 9, block, began: 0 });
                let synced = Event::Note(Note::Synced { process: 9, began: usize::MAX });
                found.into_iter().map(stored).chain([synced]).collect()
            }
        };
        let notes = events.len();
        events.extend(recording.take().into_iter().map(|event| event.later(notes)));
        drop(recording);
        let record = Record { before, events };
        let cuts = [(); 3].map(|()| rng.usize(notes..record.events.len()));
        let (mut world, mut oracle) = (record.before.clone(), Oracle::new(&record.events));
        for (at, event) in record.events.iter().enumerate() {
            if at == notes {
                oracle.end_processes(&root.0);
            }
            oracle.advance(event);
            if at < notes {
                continue;
            }
            world.advance(event);
            if cuts.contains(&at) || at + 1 == record.events.len() {
                let folder = Folder::new("cut");
                world.power_cut(&mut rng, &folder.0).expect("room for a store");
                if let Err(what) = judge(&engine, &folder.0, &oracle, Cut::Power, &mut seen) {
                    let what = format!("after {first:?} at event {ended_at}, {what}");
                    fail(&record, Cut::Power, at, seed, &what);
                }
                seen.cuts += 1;
            }
        }
    }
    seen
}

fn fail(record: &Record, cut: Cut, at: usize, seed: u64, what: &str) -> ! {
    let from = at.saturating_sub(30);
    let mut before = String::new();
    for (at, event) in (from..).zip(&record.events[from..=at]) {
        let _ = match event {
            Event::Begin(step, Op::Write { path, pieces }) => {
                let pieces: Vec<_> = pieces.iter().map(|(at, it)| (*at, it.len())).collect();
                writeln!(before, "{at}: step {step}: write {} {pieces:?}", path.display())
            }
            event => writeln!(before, "{at}: {event:?}"),
        };
    }
    panic!(
        "{cut:?} at event {at} of {}, seed {seed}: {what}\n{before}\
         {ALONE}={at}:{seed} tries this cut alone; threads may record another order then",
        record.events.len()
    );
}

fn is_worth_it(seen: &Seen) {
    println!("{seen:?}");
    assert!(seen.is_worth_it(), "the cuts show nothing: {seen:?}");
}

#[test]
fn after_a_loss_of_power_or_a_kill_blocks_that_were_promised_are_there_and_none_is_wrong() {
    let record = Record::of("busy", |_| {}, busy_store);
    cut_everywhere(&record, Some(QUICK)).report();
}

#[test]
#[ignore = "slow: make test-slow"]
fn after_a_loss_of_power_or_a_kill_at_each_step_promised_blocks_are_there_and_none_is_wrong() {
    let record = Record::of("busy-all", |_| {}, busy_store);
    let coverage = cut_everywhere(&record, None);
    coverage.report();
    assert!(coverage.is_whole());
}

#[test]
fn what_was_promised_before_all_processes_were_killed_survives_a_later_loss_of_power() {
    let record = Record::of("kill-and-cut", |_| {}, busy_store);
    is_worth_it(&go_on_and_cut(&record, Cut::Kill, QUICK / 2));
}

#[test]
fn what_a_loss_of_power_has_left_survives_another_one() {
    let record = Record::of("cut-twice", |_| {}, busy_store);
    is_worth_it(&go_on_and_cut(&record, Cut::Power, QUICK / 2));
}

#[test]
fn a_loss_of_power_or_a_kill_during_an_upgrade_loses_no_block() {
    let record = Record::of("upgrade", make_store_of_format_1, upgraded_store);
    cut_everywhere(&record, Some(QUICK / 2)).report();
}

#[test]
#[ignore = "slow: make test-slow"]
fn a_loss_of_power_or_a_kill_at_each_step_of_an_upgrade_loses_no_block() {
    let record = Record::of("upgrade-all", make_store_of_format_1, upgraded_store);
    let coverage = cut_everywhere(&record, None);
    coverage.report();
    assert!(coverage.is_whole());
}
