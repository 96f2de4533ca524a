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
const TIME: Duration = Duration::from_secs(8);
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

/// Records a keeper that is killed after `steps` steps, while syncs behave as `syncs` says. Returns the events, and how
/// many there were when it was killed; `None` if it has fewer steps.
fn record(
    engine: &Engine,
    root: &Path,
    recording: &Recording,
    steps: usize,
    syncs: Syncs,
) -> Option<(Vec<Event>, usize)> {
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
    recording.kill_after(None);
    recording.fail(None);
    ended.err()?.downcast::<Killed>().expect("no other panic");
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
    Some((recording.take(), killed_at))
}

/// Kills the keeper after each of these steps, and cuts the power at some of the events behind.
fn kill_and_cut(steps: impl Iterator<Item = usize>, syncs: Syncs, time: Duration) -> Seen {
    let (engine, mut seen, began) = (Engine::start(), Seen::default(), Instant::now());
    let mut rng = Rng::new();
    let seed = rng.get_seed();
    for steps in steps {
        if began.elapsed() > time {
            break;
        }
        let root = Folder::new("keeper-killed");
        let before = World::of(&root.0).expect("an empty folder");
        let recording = Recording::start(&root.0);
        let Some((events, killed_at)) = record(&engine, &root.0, &recording, steps, syncs) else {
            break;
        };
        drop(recording);
        let cuts = [(); CUTS].map(|()| rng.usize(killed_at..events.len()));
        let (mut world, mut oracle) = (before, Oracle::new(&events));
        for (at, event) in events.iter().enumerate() {
            world.advance(event);
            oracle.advance(event);
            if cuts.contains(&at) || at + 1 == events.len() {
                let folder = Folder::new("cut");
                world.power_cut(&mut rng, &folder.0).expect("room for a store");
                if let Err(what) = judge(&engine, &folder.0, &oracle, Cut::Power, &mut seen) {
                    let near: Vec<_> = events[killed_at.saturating_sub(3)..=at].iter().collect();
                    let near: Vec<_> = near.iter().map(|it| it.in_short()).collect();
                    panic!(
                        "keeper killed after {steps} steps, syncs {syncs:?}, at event {killed_at}; power at {at} \
                         of {}, seed {seed}: {what}\n{near:#?}",
                        events.len()
                    );
                }
                seen.cuts += 1;
            }
        }
    }
    println!("{seen:?}");
    assert!(seen.kept > seen.cuts, "the cuts show nothing: {seen:?}");
    seen
}

#[test]
fn what_a_process_has_synced_survives_a_kill_of_the_keeper_and_a_loss_of_power() {
    // From another step on each time, as there may be no time for all of them.
    let first = fastrand::usize(0..20);
    kill_and_cut((first..).step_by(2), Syncs::Work, TIME / 2);
    kill_and_cut((0..first + 1).rev(), Syncs::Work, TIME / 2);
}

#[test]
#[ignore = "slow: make test-slow"]
fn what_a_process_has_synced_survives_a_kill_of_the_keeper_at_each_step_and_a_loss_of_power() {
    kill_and_cut(0.., Syncs::Work, Duration::from_secs(110));
}

#[test]
fn what_a_process_has_synced_survives_failed_syncs_of_a_keeper_its_kill_and_a_loss_of_power() {
    for syncs in [Syncs::FailOnce, Syncs::Fail] {
        let first = fastrand::usize(0..20);
        kill_and_cut((first..).step_by(3), syncs, TIME / 2);
    }
}

#[test]
#[ignore = "slow: make test-slow"]
fn what_a_process_has_synced_survives_failed_syncs_of_a_keeper_and_its_kill_at_each_step() {
    for syncs in [Syncs::FailOnce, Syncs::Fail] {
        kill_and_cut(0.., syncs, Duration::from_secs(55));
    }
}
