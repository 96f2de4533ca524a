//! A keeper that is killed alone, at each of its steps, while the process that put the blocks goes on; then the power
//! fails.

use super::cuts::{Cut, Seen, judge};
use super::oracle::Oracle;
use super::recorder::{Event, Fault, Killed, Note, Recording};
use super::world::World;
use super::{Engine, Folder, content, hash, options};
use crate::core::Core;
use crate::gc::keeper::Keeper;
use crate::gc::sealing::SealScope;
use crate::index::{New, SegmentState};
use crate::key::{Identity, Namespace};
use crate::log;
use crate::opening::Opening;
use crate::opening::recover;
use crate::policy::Retention;
use crate::writer::{Candidate, Writer};
use fastrand::Rng;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCKS: std::ops::Range<u64> = 1..70;
/// Time limit of the tests that `make test` runs.
const TIME: Duration = Duration::from_secs(8);
/// Kills of a keeper at least, however long they take.
const AT_LEAST: usize = 8;
/// Kills of a keeper at each of its steps that take longer hang.
const HANGS: Duration = Duration::from_secs(1800);
/// Losses of power after each kill, beside the one at the end.
const CUTS: usize = 3;

/// Syncs of the device while the first keeper runs. They succeed after that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Syncs {
    Work,
    FailOnce,
    Fail,
}

/// Two processes that share a store, without threads.
struct ProcessPair {
    keeper: Arc<Core>,
    other: Arc<Core>,
}

impl ProcessPair {
    fn open(engine: &Engine, root: &Path) -> Self {
        let options = options(root);
        let opening = Opening::new(&engine.agent, &options).expect("directories");
        let superblock = opening.open_superblock().expect("a superblock");
        let geometry = options.geometry(Some(superblock.geometry.segment_bytes()));
        let disk = || opening.disk(&superblock, true).expect("files");
        let index = recover::fill(&disk(), &superblock, geometry.expect("in bounds"));
        let index = index.expect("an index");
        let core = || Core::new(disk(), superblock, index.join().expect("a member"));
        Self { keeper: Arc::new(core()), other: Arc::new(core()) }
    }
}

fn put(core: &Core, writer: &Writer, engine: &Engine, identity: &Identity, block: u64) {
    let bytes = content(block);
    engine.pool.write_at(0, &bytes).expect("inside the pool");
    let memory = engine.memory(0, 0, bytes.len());
    let (hash, len) = (hash(block), u32::try_from(bytes.len()).expect("short"));
    let (key, check) = (identity.key(&hash).expect("a hash"), identity.check(&hash));
    let sum = memory.sum().expect("registered") ^ check;
    let (parent, time, namespace) = (None, core.clock.now_s(), identity.id);
    let retention = Retention::DEFAULT.to_bits();
    let record = log::Block { key: key.0, parent, sum, check, namespace, len, retention, time };
    let writing = writer.begin(core, &[Candidate { block: record, memory }]).expect("room");
    let written = writing.end(core, |segment, records| {
        let page = core.superblock.geometry.place(segment, records[0].page);
        core.member.insert(key, New { sum, parent: None, page, len, retention, now: time });
    });
    written.expect("no device fails");
}

/// Frees all sealed segments, one after another.
fn collect_all(keeper: &mut Keeper, core: &Core) {
    for (number, segment) in core.member.segments().collect::<Vec<_>>() {
        if segment.state == SegmentState::Sealed {
            // As without pressure, and dropping blocks instead of copying them.
            keeper.collect_one(number, [None, Some(0.4), Some(0.0)][number as usize % 3]);
        }
    }
}

/// Result of running a keeper that is to be killed.
enum Run {
    /// All events, and how many there were when the keeper was killed.
    Killed(Vec<Event>, usize),
    /// The keeper ended before. It has so many steps.
    Ended(usize),
}

/// Records a keeper that is killed after `steps` steps, while syncs behave as `syncs` says.
fn record(engine: &Engine, root: &Path, recording: &Recording, steps: usize, syncs: Syncs) -> Run {
    let two = ProcessPair::open(engine, root);
    let (identity, writer) = (Namespace::new("model").identity(), Writer::default());
    let mut began = 0;
    for block in BLOCKS {
        began = recording.now();
        put(&two.other, &writer, engine, &identity, block);
        recording.note(Note::Stored { process: 0, block, began });
    }
    began = began.max(recording.now());
    writer.seal(&two.other, SealScope::Full);
    writer.sync(&two.other).expect("no device fails");
    recording.note(Note::Synced { process: 0, began });
    // What was not sealed is what a process leaves that was killed.
    for (number, segment) in two.other.member.held_by(two.other.member.id()) {
        two.other.member.note_open(number, true);
        two.other.disk.unlock_at_end(number);
        assert!(two.other.member.set_segment(number, segment.state, SegmentState::Sealed));
    }
    if syncs != Syncs::Work {
        let (at, _) = recording.injected();
        let stays = syncs == Syncs::Fail;
        recording.fail(Some(Fault { at, stays, errno: 5, is_of_syncs: true }));
    }
    recording.kill_after(Some(steps));
    let collecting = || {
        let mut keeper = Keeper::new(Arc::clone(&two.keeper));
        collect_all(&mut keeper, &two.keeper);
    };
    let ended = catch_unwind(AssertUnwindSafe(collecting));
    let left = recording.kill_left();
    recording.kill_after(None);
    recording.fail(None);
    let Err(panic) = ended else {
        return Run::Ended(steps - left.expect("a kill reaches the keeper"));
    };
    panic.downcast::<Killed>().expect("no other panic");
    two.keeper.die();
    let killed_at = recording.now();
    // The other one becomes the keeper, and then goes on.
    let mut keeper = Keeper::new(Arc::clone(&two.other));
    let began = recording.now();
    if writer.sync(&two.other).is_ok() {
        recording.note(Note::Synced { process: 0, began });
    } else {
        assert_ne!(syncs, Syncs::Work, "no device fails");
    }
    collect_all(&mut keeper, &two.other);
    keeper.run_until_idle();
    Run::Killed(recording.take(), killed_at)
}

/// Keepers that are killed, and losses of power at some of the events behind.
struct Kills {
    engine: Engine,
    syncs: Syncs,
    rng: Rng,
    /// Keepers that were killed.
    count: usize,
    seen: Seen,
}

impl Kills {
    fn new(syncs: Syncs) -> Self {
        let (engine, rng) = (Engine::start(), Rng::new());
        Self { engine, syncs, rng, count: 0, seen: Seen::default() }
    }

    /// Number of steps of a keeper that is not killed. It may differ by a few from one keeper to the next: which blocks
    /// are dropped depends on the time.
    fn steps(&self) -> usize {
        let root = Folder::new("keeper-steps");
        let recording = Recording::start(&root.0);
        match record(&self.engine, &root.0, &recording, usize::MAX, self.syncs) {
            Run::Ended(steps) => steps,
            Run::Killed(..) => unreachable!("it has fewer steps"),
        }
    }

    /// Kills a keeper after `steps` steps, and cuts the power. False if it has no more steps than these.
    fn kill_and_cut(&mut self, steps: usize) -> bool {
        let root = Folder::new("keeper-killed");
        let before = World::of(&root.0).expect("an empty folder");
        let recording = Recording::start(&root.0);
        let run = record(&self.engine, &root.0, &recording, steps, self.syncs);
        let Run::Killed(events, killed_at) = run else { return false };
        drop(recording);
        let seed = self.rng.get_seed();
        let cuts = [(); CUTS].map(|()| self.rng.usize(killed_at..events.len()));
        let (mut world, mut oracle) = (before, Oracle::new(&events));
        for (at, event) in events.iter().enumerate() {
            world.advance(event);
            oracle.advance(event);
            if cuts.contains(&at) || at + 1 == events.len() {
                let folder = Folder::new("cut");
                world.power_cut(&mut self.rng, &folder.0).expect("room for a store");
                let judged = judge(&self.engine, &folder.0, &oracle, Cut::Power, &mut self.seen);
                if let Err(what) = judged {
                    let near: Vec<_> = events[killed_at.saturating_sub(3)..=at].iter().collect();
                    let near: Vec<_> = near.iter().map(|it| it.in_short()).collect();
                    panic!(
                        "keeper killed after {steps} steps, syncs {:?}, at event {killed_at}; power at {at} of {}, \
                         seed {seed}: {what}\n{near:#?}",
                        self.syncs,
                        events.len()
                    );
                }
                self.seen.cuts += 1;
            }
        }
        self.count += 1;
        true
    }

    /// Prints what was done of the `steps` that there are.
    fn report(&self, steps: usize) {
        let Self { syncs, count, seen, .. } = self;
        println!("syncs {syncs:?}: killed at {count} of {steps} steps; {seen:?}");
        assert!(seen.kept > seen.cuts, "the cuts show nothing: {seen:?}");
    }
}

/// Kills keepers at some of their steps, [`AT_LEAST`] and as many as there is time for: other ones each time.
fn kill_at_some_steps(syncs: Syncs, time: Duration) {
    let mut kills = Kills::new(syncs);
    let mut order: Vec<_> = (0..kills.steps()).collect();
    fastrand::shuffle(&mut order);
    let began = Instant::now();
    for steps in &order {
        if kills.count >= AT_LEAST && began.elapsed() > time {
            break;
        }
        kills.kill_and_cut(*steps);
    }
    kills.report(order.len());
    assert!(kills.count >= AT_LEAST, "{} kills only, of {} steps", kills.count, order.len());
}

/// Kills keepers at each of their steps, from the first to the last.
fn kill_at_each_step(syncs: Syncs) {
    let (mut kills, began) = (Kills::new(syncs), Instant::now());
    while kills.kill_and_cut(kills.count) {
        assert!(began.elapsed() < HANGS, "{} kills, and no end", kills.count);
    }
    // The last keeper has ended before it was to be killed.
    kills.report(kills.count);
    assert!(kills.count >= AT_LEAST, "{} steps are too few for a keeper", kills.count);
}

#[test]
fn what_a_process_has_synced_survives_a_kill_of_the_keeper_and_a_loss_of_power() {
    kill_at_some_steps(Syncs::Work, TIME);
}

#[test]
#[ignore = "slow: make test-slow"]
fn what_a_process_has_synced_survives_a_kill_of_the_keeper_at_each_step_and_a_loss_of_power() {
    kill_at_each_step(Syncs::Work);
}

#[test]
fn what_a_process_has_synced_survives_failed_syncs_of_a_keeper_its_kill_and_a_loss_of_power() {
    for syncs in [Syncs::FailOnce, Syncs::Fail] {
        kill_at_some_steps(syncs, TIME / 2);
    }
}

#[test]
#[ignore = "slow: make test-slow"]
fn what_a_process_has_synced_survives_failed_syncs_of_a_keeper_and_its_kill_at_each_step() {
    for syncs in [Syncs::FailOnce, Syncs::Fail] {
        kill_at_each_step(syncs);
    }
}
