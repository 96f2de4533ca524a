//! Tests of the keeper's other work while puts take each segment that it frees.

use super::*;
use crate::core::FREE_SHARE;
use crate::fault_points::Op;
use crate::gc::sealing::{SealScope, unsealed_max};
use crate::gc::worker::Worker;
use crate::index::{Inserted, New, Segment};
use crate::log::Block;
use crate::memory::BlockMemory;
use crate::opening::Opening;
use crate::opening::recover;
use crate::options::StoreOptions;
use crate::policy::{OnExpiry, Retention};
use crate::power::recorder::{Event as Recorded, Recording};
use crate::writer::{Candidate, NotWritten, Writer};
use kvferry::{Access, Agent};
use kvferry_testkit::{PATIENCE, Watchdog};
use rustc_hash::FxHashSet;
use std::path::PathBuf;

const LEN: u32 = 60_000;
const SEGMENTS: u64 = 40;

/// A store without threads, and blocks of the same bytes for it.
struct Bench {
    folder: PathBuf,
    agent: Agent,
    memory: BlockMemory,
    sum: u64,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.agent.shutdown();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Bench {
    /// Opens the store in so many processes.
    fn new<const N: usize>(name: &str) -> (Self, [Arc<Core>; N]) {
        let name = format!("kvferry-pressure-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        let agent = Agent::builder().start().expect("an agent");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        let memory = BlockMemory::new(&pool, 0, LEN.into());
        let sum = memory.sum().expect("registered");
        let bench = Self { folder, agent, memory, sum };
        let options = StoreOptions::new(&bench.folder, SEGMENTS << 20).segment_bytes(1 << 20);
        let opening = Opening::new(&bench.agent, &options).expect("directories");
        let superblock = opening.open_superblock().expect("a superblock");
        let disk = || opening.disk(&superblock, true).expect("files");
        let geometry = options.geometry(None).expect("in bounds");
        let index = recover::fill(&disk(), &superblock, geometry).expect("an index");
        let core = || Core::new(disk(), superblock, index.join().expect("a member"));
        let cores = [(); N].map(|()| Arc::new(core()));
        (bench, cores)
    }

    /// Puts a block. False if no segment is free.
    fn put(&self, core: &Core, writer: &Writer, key: u64, retention: Retention) -> bool {
        let (sum, retention) = (self.sum, retention.to_bits());
        let (parent, check, namespace, time) = (None, 0, 7, 0);
        let block =
            Block { key: [key, key], parent, sum, check, namespace, len: LEN, retention, time };
        let writing = match writer.begin(core, &[Candidate { block, memory: self.memory.clone() }])
        {
            Ok(writing) => writing,
            Err(NotWritten::Full) => return false,
            Err(e) => panic!("{e:?}"),
        };
        let written = writing.end(core, |segment, records| {
            let page = core.superblock.geometry.place(segment, records[0].page);
            let new = New { sum, parent: None, page, len: LEN, retention, now: 0 };
            let Inserted::New(slot) = core.member.insert(Key([key, key]), new) else {
                panic!("it is new")
            };
            core.member.note_added(core.clock.now_ms(), None, &[slot]);
        });
        written.expect("no device fails");
        true
    }

    /// Fills the store, whose keeper `worker` then is. Returns the next key.
    fn fill(&self, core: &Core, worker: &Worker) -> u64 {
        let first = (0..).find(|key| !self.put(core, &worker.writer, *key, Retention::DEFAULT));
        worker.writer.seal(core, SealScope::All);
        crate::membership::Keep::became_keeper(worker);
        first.expect("the store is full")
    }

    /// Puts a block, once a segment is free for it.
    fn put_pressing(&self, core: &Core, worker: &Worker, key: u64) {
        loop {
            let freed = core.member.freed();
            if self.put(core, &worker.writer, key, Retention::DEFAULT) {
                return;
            }
            core.member.note_no_space();
            worker.wake();
            core.member.wait_freed(freed, Duration::from_millis(20), || false);
        }
    }
}

#[test]
fn while_puts_press_durations_end_and_what_a_dead_process_held_comes_back() {
    let (bench, [core, other, dying]) = Bench::new("look");
    let (writer, its) = (Writer::default(), Writer::default());
    // It is no block that leaves before.
    let priority = Retention::PRIORITY_MAX;
    let ends = Retention { priority, until_s: Some(3600), then: OnExpiry::Leave };
    assert!(bench.put(&core, &writer, 0, ends));
    assert!(bench.put(&dying, &its, 1, Retention::DEFAULT));
    assert!((2..).any(|key| !bench.put(&core, &writer, key, Retention::DEFAULT)));
    writer.seal(&core, SealScope::All);
    let mut keeper = Keeper::new(Arc::clone(&core));
    let (press, is_stopping) = (Press::Always, AtomicBool::new(false));
    keeper.replay(Replayed { now_ms: 0, press });
    assert!(core.free_segments() + 2 < core.wanted_segments());
    keeper.run_once(&is_stopping);
    assert!(keeper.goes_on());
    let member = dying.member.id();
    assert!(core.member.members().any(|it| it == member));
    dying.die();
    keeper.replay(Replayed { now_ms: 3600 * 1000, press });
    let due = core.member.find(&Key([0, 0]));
    assert!(due.is_some());
    keeper.run_once(&is_stopping);
    assert!(keeper.goes_on() && core.free_segments() < core.wanted_segments());
    assert_eq!(core.member.find(&Key([0, 0])), None);
    assert!(core.member.members().all(|it| it != member));
    // What the dead process held.
    keeper.run_until_idle();
    let is_left = |(number, it): (u32, Segment)| {
        it.state == SegmentState::Sealed && core.member.is_open(number)
    };
    assert!(!core.member.segments().any(is_left));
    keeper.stop();
    drop(other);
}

#[test]
fn while_puts_press_full_segments_are_sealed() {
    let (bench, [core]) = Bench::new("sealed");
    let _watchdog = Watchdog::new(PATIENCE);
    let worker = Worker::start(Arc::clone(&core)).expect("a thread");
    let first = bench.fill(&core, &worker);
    let segments = core.member.geometry().segments;
    // The segments that are free when the thread begins to seal, and when it goes on to free one, and the one.
    let most = unsealed_max(&core) + 2 * (1 + (segments / FREE_SHARE) as usize);
    assert!(most < segments as usize / 2);
    let turnovers = 2 * u64::from(segments);
    let begun = || core.member.next_incarnation();
    for key in first.. {
        bench.put_pressing(&core, &worker, key);
        let full = worker.writer.full();
        assert!(full <= most, "{full} segments wait for their seal");
        if begun() > turnovers {
            break;
        }
    }
    worker.stop();
}

#[test]
fn while_puts_press_segments_are_sealed_beside_the_freeing_of_others() {
    let (bench, [core]) = Bench::new("beside");
    let _watchdog = Watchdog::new(PATIENCE);
    let worker = Worker::start(Arc::clone(&core)).expect("a thread");
    let first = bench.fill(&core, &worker);
    let recording = Recording::start(&bench.folder);
    // On a device that syncs at once, such as memory, no two syncs would be seen beside each other.
    recording.slow_syncs(Duration::from_millis(20));
    let mut syncs = FxHashSet::default();
    // One thread alone would begin a sync only when the one before has ended.
    let mut is_beside = |event| match event {
        Recorded::Begin(step, Op::SyncSegment(_)) => syncs.insert(step) && syncs.len() > 1,
        Recorded::End(step, _) => {
            syncs.remove(&step);
            false
        }
        _ => false,
    };
    for key in first.. {
        bench.put_pressing(&core, &worker, key);
        if recording.take().into_iter().any(&mut is_beside) {
            break;
        }
    }
    worker.stop();
}

#[test]
fn the_faster_segments_are_put_and_the_longer_it_takes_to_free_one_the_more_are_kept_free() {
    let (bench, [core]) = Bench::new("pace");
    let (writer, mut next) = (Writer::default(), 0);
    let mut put_segments = |count: u64| {
        let until = core.member.next_incarnation() + count;
        while core.member.next_incarnation() < until {
            assert!(bench.put(&core, &writer, next, Retention::DEFAULT));
            next += 1;
        }
    };
    let least = core.wanted_segments();
    let most = core.member.geometry().segments as usize / FREE_SHARE as usize;
    assert!(least + 2 <= most, "{least} {most}");
    let mut keeper = Keeper::new(Arc::clone(&core));
    let began = Instant::now();
    let at = |seconds| began + Duration::from_secs(seconds);
    assert_eq!(keeper.wanted_at(at(1)), least, "nothing is put");
    // To free one takes no time that counts.
    put_segments(2);
    assert_eq!(keeper.wanted_at(at(2)), least);
    // Of 2 segments a second, less than 1 while one is freed; twice as many are kept free.
    keeper.pace.freed_one(Duration::from_secs(1));
    put_segments(2);
    assert_eq!(keeper.wanted_at(at(3)), least + 1);
    (0..20).for_each(|_| keeper.pace.freed_one(Duration::from_millis(400)));
    assert_eq!(keeper.wanted_at(at(3)), least + 2);
    put_segments(9);
    assert_eq!(keeper.wanted_at(at(4)), most, "an eighth of the store at most");
    // What the keeper copies to is not put.
    let mut copies = Keeper::new(Arc::clone(&core));
    copies.pace.freed_one(Duration::from_secs(1));
    put_segments(4);
    copies.begun += 4;
    assert_eq!(copies.wanted_at(Instant::now() + Duration::from_secs(1)), least);
}

#[test]
fn a_keeper_frees_as_many_segments_as_the_pace_of_puts_asks_for() {
    let (bench, [core]) = Bench::new("ahead");
    let writer = Writer::default();
    let first = (0..).find(|key| !bench.put(&core, &writer, *key, Retention::DEFAULT));
    writer.seal(&core, SealScope::All);
    let mut keeper = Keeper::new(Arc::clone(&core));
    keeper.run_until_idle();
    let least = core.wanted_segments();
    assert_eq!(core.free_segments(), least);
    let next = first.expect("the store is full");
    assert!((next..next + 10).all(|key| bench.put(&core, &writer, key, Retention::DEFAULT)));
    writer.seal(&core, SealScope::All);
    // As on a slow device.
    (0..20).for_each(|_| keeper.pace.freed_one(Duration::from_secs(60)));
    let later = Instant::now() + Duration::from_secs(1);
    let wanted = keeper.wanted_at(later);
    assert!(wanted > least, "{wanted}");
    keeper.run_until_idle();
    assert_eq!(core.free_segments(), wanted);
    keeper.stop();
}
