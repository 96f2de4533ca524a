//! Tests of how the keeper treats the remains of dead processes, and pins.

use super::*;
use crate::bench::Bench;
use crate::fault_points::Op;
use crate::gc::sealing::SealScope;
use crate::index::{Entry, New};
use crate::log::{self, Block};
use crate::memory::BlockMemory;
use crate::opening::Opening;
use crate::opening::recover;
use crate::options::StoreOptions;
use crate::power::recorder::{Event as Recorded, Fault, Killed, Recording};
use crate::tiers::disk::is_of_device;
use crate::writer::{Candidate, NotWritten, Writer, begin_segment};
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use rustc_hash::FxHashSet;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};

const LEN: u32 = 60_000;
const HOUR: u32 = 3600;

fn bench(name: &str) -> Bench {
    Bench::new(&format!("deaths-{name}"), LEN as usize)
}

impl Bench {
    /// Processes without threads, that open the store of the folder after all others have ended.
    fn cores<const N: usize>(&self) -> [Arc<Core>; N] {
        let options = StoreOptions::new(&self.folder, 12 << 20).segment_bytes(1 << 20);
        let opening = Opening::new(&self.agent, &options).expect("directories");
        let superblock = opening.open_superblock().expect("a superblock");
        let disk = || opening.disk(&superblock, true).expect("files");
        let segment_bytes = superblock.geometry.segment_bytes();
        let geometry = options.geometry(Some(segment_bytes)).expect("in bounds");
        let index = recover::fill(&disk(), &superblock, geometry).expect("an index");
        let core = || Core::new(disk(), superblock, index.join().expect("a member"));
        [(); N].map(|()| Arc::new(core()))
    }

    /// Puts a block with bytes of its own. Returns its segment.
    fn write(&self, core: &Core, writer: &Writer, key: u64) -> u32 {
        self.try_put(core, writer, key).expect("no device fails")
    }

    fn try_put(&self, core: &Core, writer: &Writer, key: u64) -> Result<u32, NotWritten> {
        let mut bytes = vec![0; LEN as usize];
        fastrand::Rng::with_seed(key).fill(&mut bytes);
        self.pool.write_at(0, &bytes).expect("inside");
        let memory = BlockMemory::new(&self.pool, 0, LEN.into());
        let sum = memory.sum().expect("registered");
        let (parent, check, namespace, retention, time) = (None, 0, 7, 0, 0);
        let key = [key, key];
        let block = Block { key, parent, sum, check, namespace, len: LEN, retention, time };
        let writing = writer.begin(core, &[Candidate { block, memory }]).expect("room");
        let mut to = 0;
        let written = writing.end(core, |segment, records| {
            let page = core.superblock.geometry.place(segment, records[0].page);
            let new = New { sum, parent: None, page, len: LEN, retention, now: 0 };
            core.member.insert(Key(key), new);
            to = segment;
        });
        written.map(|()| to)
    }
}

fn find(core: &Core, key: u64) -> Option<Entry> {
    core.member.find(&Key([key, key]))
}

/// Overwrites the start of a block, as a loss of power during its write may.
fn tear(core: &Core, key: u64) {
    let (segment, page) = core.superblock.geometry.locate(find(core, key).expect("put").page);
    let file = std::fs::File::options().write(true).open(core.disk.path_of(segment));
    file.expect("it exists").write_all_at(&[0; 9000], bytes_of(page)).expect("written");
}

#[test]
fn a_torn_block_of_a_segment_that_nobody_sealed_is_not_present_and_is_not_sealed_as_a_whole_one() {
    let bench = bench("torn");
    let [core] = bench.cores();
    let writer = Writer::default();
    let segments = [1, 2, 3].map(|key| bench.write(&core, &writer, key));
    assert!(segments.iter().all(|it| *it == segments[0]));
    tear(&core, 2);
    drop((writer, core));
    // A put that comes before the keeper has looked.
    let [core] = bench.cores();
    assert!(find(&core, 2).is_some());
    let is_whole = [1, 2, 3].map(|key| core.find_whole(&Key([key, key]), || 0).is_some());
    assert_eq!(is_whole, [true, false, true]);
    let stats = core.counters.read();
    assert_eq!((stats.corrupt, stats.failed), (0, 0), "no device did that");
    drop(core);
    let [core] = bench.cores();
    let mut keeper = Keeper::new(Arc::clone(&core));
    keeper.run_until_idle();
    assert!(!core.member.is_open(segments[0]));
    assert_eq!([1, 2, 3].map(|key| find(&core, key).is_some()), [true, false, true]);
    let scanned = log::recover::scan(&core.disk, &core.superblock, segments[0]);
    let scanned = scanned.expect("it can be read").expect("it is in use");
    let keys: Vec<_> = scanned.records.iter().map(|it| it.block.key[0]).collect();
    assert_eq!((scanned.is_sealed, keys), (true, vec![1, 3]));
}

#[test]
fn a_block_that_is_put_again_after_a_crash_has_torn_it_survives_the_next_crash() {
    let bench = bench("torn-twice");
    let [core] = bench.cores();
    bench.write(&core, &Writer::default(), 2);
    tear(&core, 2);
    drop(core);
    let [core] = bench.cores();
    let mut keeper = Keeper::new(Arc::clone(&core));
    keeper.run_until_idle();
    assert!(core.find_whole(&Key([2, 2]), || 0).is_none(), "it is put again");
    let writer = Writer::default();
    bench.write(&core, &writer, 2);
    writer.sync(&core).expect("no device fails");
    drop((keeper, writer, core));
    let [core] = bench.cores();
    let entry = core.find_whole(&Key([2, 2]), || 0).expect("it was put and synced");
    let (segment, page) = core.superblock.geometry.locate(entry.page);
    let sum = log::recover::sum_of(&core.disk, segment, page, LEN).expect("it can be read");
    assert_eq!(sum, entry.sum);
}

#[test]
fn a_keeper_holds_a_segment_while_it_seals_what_a_dead_process_has_left() {
    let bench = bench("holds");
    let [core] = bench.cores();
    let segment = bench.write(&core, &Writer::default(), 1);
    drop(core);
    let recording = Recording::start(&bench.folder);
    let mine = |core: &Core| SegmentState::Collecting(core.member.id());
    let (mut held, mut steps) = (0, 0);
    loop {
        let [core] = bench.cores();
        let mut keeper = Keeper::new(Arc::clone(&core));
        recording.kill_after(Some(steps));
        let looked = catch_unwind(AssertUnwindSafe(|| keeper.run_once(&AtomicBool::new(false))));
        recording.kill_after(None);
        let Err(panic) = looked else { break };
        panic.downcast::<Killed>().expect("no other panic");
        // As another process sees it when the keeper is in the middle of it.
        held += usize::from(core.member.segment(segment).state == mine(&core));
        keeper.abandon();
        assert_eq!(core.member.segment(segment).state, SegmentState::Sealed);
        steps += 1;
    }
    // It reads the segment, and syncs it, writes its footer and syncs that.
    assert!(held >= 4, "{held} of {steps} steps");
    let [core] = bench.cores();
    let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
    assert!(scanned.expect("it can be read").expect("it is in use").is_sealed);
}

#[test]
fn a_segment_in_which_a_block_lives_is_not_freed_because_a_death_has_left_its_counter_at_zero() {
    let bench = bench("counter");
    let [dies, keeps] = bench.cores();
    let segment = bench.write(&dies, &Writer::default(), 1);
    dies.member.forget_live(segment);
    dies.die();
    let keeper = Keeper::new(Arc::clone(&keeps));
    let segment = keeper.core.member.segment(segment);
    assert_eq!((segment.state, segment.live_blocks), (SegmentState::Sealed, 1));
    let sum = find(&keeps, 1).expect("it lives").sum;
    let (segment, page) = keeps.superblock.geometry.locate(find(&keeps, 1).expect("it lives").page);
    let there = log::recover::sum_of(&keeps.disk, segment, page, LEN);
    assert_eq!(there.expect("it can be read"), sum);
}

#[test]
fn where_the_copies_of_a_dead_keeper_can_not_be_synced_their_old_places_are_not_free() {
    let bench = bench("unsynced-copies");
    let [dies, keeps] = bench.cores();
    let writer = Writer::default();
    let old = bench.write(&dies, &writer, 1);
    writer.seal(&dies, SealScope::All);
    let collecting = SegmentState::Collecting(dies.member.id());
    assert!(dies.member.set_segment(old, SegmentState::Sealed, collecting));
    let own = bench.write(&dies, &writer, 2);
    assert_ne!(own, old);
    // As if the block had been moved.
    dies.member.note_copies(own, true);
    let (from, to) = (find(&dies, 1).expect("put"), find(&dies, 2).expect("put"));
    assert!(dies.member.remove(&to) && dies.member.relocate(&from, to.page));
    // A file that is gone can't be synced.
    std::fs::remove_file(keeps.disk.path_of(own)).expect("it exists");
    dies.die();
    let _keeper = Keeper::new(Arc::clone(&keeps));
    assert_eq!(keeps.member.unsynced(), Some(own));
    assert_eq!(keeps.member.segment(old).state, SegmentState::Withheld);
}

#[test]
fn a_pin_that_is_taken_while_the_keeper_looks_keeps_its_block_at_any_pressure() {
    for is_room in [true, false] {
        let bench = bench(&format!("pins-{is_room}"));
        let [core] = bench.cores();
        let writer = Writer::default();
        let segments = [1, 2, 3].map(|key| bench.write(&core, &writer, key));
        writer.seal(&core, SealScope::All);
        let mut keeper = Keeper::new(Arc::clone(&core));
        let slot = find(&core, 2).expect("put").slot;
        let now = core.clock.now_s();
        let _pin = core.member.pin(slot, now, now + HOUR).expect("room for a lease");
        if is_room {
            assert!(keeper.collect_one(segments[0], Some(0.0)));
            assert_eq!([1, 2, 3].map(|key| find(&core, key).is_some()), [false, true, false]);
        } else {
            while core.member.claim().is_some() {}
            assert!(!keeper.collect_one(segments[0], None));
            assert_eq!(core.member.segment(segments[0]).state, SegmentState::Sealed);
            assert!(find(&core, 2).is_some());
        }
    }
}

/// Puts blocks from a key on until the segment changes. Returns the first key behind it.
fn fill(bench: &Bench, core: &Core, writer: &Writer, from: u64, count: u64) -> (u32, u64) {
    let segments: FxHashSet<_> =
        (from..from + count).map(|key| bench.write(core, writer, key)).collect();
    writer.seal(core, SealScope::All);
    assert_eq!(segments.len(), 1, "{count} blocks fit");
    (*segments.iter().next().expect("one"), from + count)
}

/// The disk fails syncs from now on: once, or until it is told otherwise.
fn fail_syncs(recording: &Recording, stays: bool) {
    let (at, _) = recording.injected();
    recording.fail(Some(Fault { at, stays, errno: 5, is_of_syncs: true }));
}

#[test]
fn a_segment_that_cannot_be_freed_is_not_the_only_one_that_is_tried() {
    // Blocks that are pinned where nothing can be copied to, and a block that a stopped process holds.
    for is_pinned in [true, false] {
        let bench = bench(&format!("tried-{is_pinned}"));
        let [core, other] = bench.cores();
        let writer = Writer::default();
        let (stays, next) = fill(&bench, &core, &writer, 1, 3);
        let (leaves, _) = fill(&bench, &core, &writer, next, 6);
        let slot = find(&core, 2).expect("put").slot;
        let now = core.clock.now_s();
        let mut keeper = Keeper::new(Arc::clone(&core));
        let pin = is_pinned.then(|| core.member.pin(slot, now, now + HOUR).expect("room"));
        let key = Key([2, 2]);
        let held = (!is_pinned).then(|| other.member.hold_stripe(&key));
        // No segment is free: what can't be copied must leave.
        while core.member.claim().is_some() {}
        keeper.run_until_idle();
        let state = |segment| core.member.segment(segment).state;
        assert_eq!(state(stays), SegmentState::Sealed, "pinned: {is_pinned}");
        assert_ne!(state(leaves), SegmentState::Sealed, "pinned: {is_pinned}");
        assert!(find(&core, 2).is_some());
        drop((pin, held));
    }
}

#[test]
fn a_sync_of_its_own_segment_that_failed_costs_the_keeper_one_segment() {
    let bench = bench("own-sync");
    let [core] = bench.cores();
    let writer = Writer::default();
    let (first, next) = fill(&bench, &core, &writer, 1, 3);
    let (second, next) = fill(&bench, &core, &writer, next, 3);
    let mut keeper = Keeper::new(Arc::clone(&core));
    let recording = Recording::start(&bench.folder);
    fail_syncs(&recording, false);
    keeper.collect_one(first, None);
    assert_eq!(recording.injected().1.len(), 1);
    assert_eq!(core.member.segment(first).state, SegmentState::Withheld);
    assert!(keeper.collect_one(second, None));
    assert_eq!(core.member.segment(second).state, SegmentState::Free);
    assert!((1..next).all(|key| find(&core, key).is_some()));
    keeper.stop();
}

#[test]
fn a_segment_that_leases_have_kept_is_tried_again_when_they_have_ended() {
    let bench = bench("kept");
    let [core] = bench.cores();
    let writer = Writer::default();
    let (segment, _) = fill(&bench, &core, &writer, 1, 3);
    let slot = find(&core, 2).expect("put").slot;
    let now = core.clock.now_s();
    let mut keeper = Keeper::new(Arc::clone(&core));
    let pin = core.member.pin(slot, now, now + HOUR).expect("room");
    // No segment is free: what can't be copied must leave.
    while core.member.claim().is_some() {}
    keeper.run_until_idle();
    assert!(keeper.kept.contains_key(&segment));
    keeper.kept.insert(segment, Instant::now() + Duration::from_secs(HOUR.into()));
    keeper.run_until_idle();
    assert_eq!(core.member.segment(segment).state, SegmentState::Sealed);
    core.member.unpin(&pin);
    keeper.run_until_idle();
    assert_ne!(core.member.segment(segment).state, SegmentState::Sealed);
}

#[test]
fn a_segment_is_not_freed_whose_copies_were_lost_when_the_keeper_s_own_segment_was_full() {
    // Without room for a second own segment, the blocks that are not copied leave.
    for is_room in [true, false] {
        let bench = bench(&format!("own-unsynced-{is_room}"));
        let [core] = bench.cores();
        let writer = Writer::default();
        let (first, next) = fill(&bench, &core, &writer, 1, 12);
        let (second, _) = fill(&bench, &core, &writer, next, 12);
        let mut keeper = Keeper::new(Arc::clone(&core));
        assert!(keeper.collect_one(first, None));
        let own = keeper.own.as_ref().expect("it copied to it").segment();
        if !is_room {
            while core.member.claim().is_some() {}
        }
        let recording = Recording::start(&bench.folder);
        fail_syncs(&recording, false);
        let is_freed = keeper.collect_one(second, None);
        let (_, injected) = recording.injected();
        assert_eq!(injected.len(), 1, "the own segment was sealed on the way: {injected:?}");
        assert_eq!(core.member.unsynced(), Some(own));
        let state = core.member.segment(second).state;
        assert!(
            !matches!(state, SegmentState::Free),
            "{is_freed}: its blocks are on the disk in it alone"
        );
        assert_eq!(state, SegmentState::Withheld);
        keeper.retried_at = None;
        keeper.retry_withheld();
        let state = core.member.segment(second).state;
        assert_eq!(state, SegmentState::Withheld, "until they have left");
    }
}

#[test]
fn a_segment_of_a_dead_process_whose_sync_has_failed_is_not_sealed_by_a_later_one() {
    let bench = bench("left-unsynced");
    let [core] = bench.cores();
    let segment = bench.write(&core, &Writer::default(), 1);
    drop(core);
    let [core] = bench.cores();
    let mut keeper = Keeper::new(Arc::clone(&core));
    let recording = Recording::start(&bench.folder);
    fail_syncs(&recording, true);
    keeper.run_until_idle();
    recording.fail(None);
    assert_eq!(core.member.unsynced(), Some(segment));
    keeper.left.failed_at = None;
    keeper.run_until_idle();
    assert!(core.member.is_open(segment), "syncs of a put that finds the block go on failing");
    let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
    assert!(!scanned.expect("it can be read").expect("it is in use").is_sealed);
    assert!(find(&core, 1).is_some());
}

#[test]
fn a_segment_of_a_killed_process_is_given_to_no_other_while_one_of_its_threads_may_write() {
    let bench = bench("threads");
    let [dies, keeps] = bench.cores();
    // It has taken a segment, and what it writes there is under way.
    let segment = dies.member.claim().expect("one is free");
    let held = SegmentState::Active(dies.member.id());
    dies.member.die_in_part();
    let mut keeper = Keeper::new(Arc::clone(&keeps));
    let state = || keeps.member.segment(segment).state;
    assert!(keeper.awaits_end() && state() == held, "its process, this one, runs");
    keeps.connected(dies.member.id());
    dies.member.forget_process();
    keeper.repair();
    assert!(keeper.awaits_end() && state() == held, "it is connected");
    keeps.hung_up(dies.member.id());
    keeper.repair();
    assert!(!keeper.awaits_end());
    assert_eq!(state(), SegmentState::Free);
}

/// Locks a segment like an operation that the kernel has not completed, of a process that has ended.
fn write_late(core: &Core, segment: u32) -> std::fs::File {
    let file = std::fs::File::open(core.disk.path_of(segment)).expect("it exists");
    file.try_lock_shared().expect("no other process has it alone");
    file
}

#[test]
fn a_segment_of_a_killed_process_is_given_to_no_other_while_a_device_may_write_to_it() {
    let bench = bench("late");
    let [dies, keeps] = bench.cores();
    let segment = bench.write(&dies, &Writer::default(), 1);
    let held = SegmentState::Active(dies.member.id());
    assert!(dies.member.remove(&find(&dies, 1).expect("put")));
    let under_way = write_late(&dies, segment);
    dies.die();
    let mut keeper = Keeper::new(Arc::clone(&keeps));
    let state = || keeps.member.segment(segment).state;
    assert!(keeper.awaits_end() && state() == held);
    drop(under_way);
    keeper.repair();
    assert!(!keeper.awaits_end());
    assert_eq!(state(), SegmentState::Free);
}

#[test]
fn a_segment_is_not_begun_while_a_device_may_write_to_it_and_is_used_after_that() {
    let bench = bench("late-open");
    let [core] = bench.cores();
    let segment = core.member.claim().expect("one is free");
    core.disk.ensure(segment).expect("no device fails");
    drop(core);
    // All processes have ended.
    let [core] = bench.cores();
    let state = || core.member.segment(segment).state;
    assert_eq!(state(), SegmentState::Free);
    let under_way = write_late(&core, segment);
    let begun = begin_segment(&core, 0).expect("no fault of this process").expect("one is free");
    assert_ne!(begun.segment(), segment);
    assert_eq!(state(), SegmentState::Withheld);
    let other = core.member.geometry().segments - 1;
    core.member.withhold_segment(other);
    let mut keeper = Keeper::new(Arc::clone(&core));
    for is_free in [false, true] {
        keeper.retried_at = None;
        keeper.retry_withheld();
        assert_eq!(state() == SegmentState::Free, is_free);
        assert_eq!(core.member.segment(other).state, SegmentState::Free, "it has no lock");
        drop(under_way.try_clone().expect("a descriptor"));
        under_way.unlock().expect("locked");
    }
}

#[test]
fn a_segment_that_a_process_has_sealed_is_used_by_others() {
    let bench = bench("unlocked");
    let [one, other] = bench.cores();
    let writer = Writer::default();
    let segment = bench.write(&one, &writer, 1);
    let refused = other.disk.ensure(segment).expect_err("it is being written");
    assert!(is_of_device(&refused), "{refused}");
    writer.seal(&one, SealScope::All);
    other.disk.ensure(segment).expect("it is sealed");
}

#[test]
fn a_segment_is_neither_sealed_nor_begun_after_the_agent_has_left_a_write_to_its_device() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = bench("left");
    std::fs::create_dir_all(&bench.folder).expect("a folder");
    let Some(disk) = HangingDisk::mount(&bench.folder) else { return };
    let [core] = bench.cores();
    let writer = Writer::default();
    let segment = bench.write(&core, &writer, 1);
    disk.hold();
    std::thread::scope(|scope| {
        let (core, writer, bench) = (&core, &writer, &bench);
        let (tell, told) = std::sync::mpsc::channel();
        // The thread itself ends once the device has answered.
        scope.spawn(move || tell.send(bench.try_put(core, writer, 2)));
        eventually("the device is asked", || disk.is_asked());
        bench.agent.shutdown();
        let put = told.recv();
        disk.release();
        assert!(put.expect("no panic").is_err(), "it can't be known whether it was written");
    });
    writer.seal(&core, SealScope::All);
    let mine = SegmentState::Active(core.member.id());
    assert_eq!(core.member.segment(segment).state, mine);
    core.wait_quiet();
    assert_eq!(core.member.segment(segment).state, SegmentState::Sealed);
    let file = std::fs::File::open(core.disk.path_of(segment)).expect("it exists");
    assert!(file.try_lock().is_err(), "another process that begins the segment finds a lock");
}

#[test]
fn what_an_earlier_try_has_copied_is_on_the_disk_before_its_segment_is_freed() {
    let bench = bench("copied-before");
    let [core, other] = bench.cores();
    let writer = Writer::default();
    let (segment, _) = fill(&bench, &core, &writer, 1, 3);
    let mut keeper = Keeper::new(Arc::clone(&core));
    let held = other.member.hold_stripe(&Key([3, 3]));
    assert!(!keeper.collect_one(segment, None));
    drop(held);
    let (to, _) = core.superblock.geometry.locate(find(&core, 1).expect("put").page);
    assert_ne!(to, segment, "it was copied");
    // Nothing is left that would have to be copied.
    assert!(core.member.remove(&find(&core, 3).expect("put")));
    let recording = Recording::start(&bench.folder);
    assert!(keeper.collect_one(segment, None));
    let path = core.disk.path_of(to);
    let is_sync = |it: &Recorded| matches!(it, Recorded::Begin(_, Op::Sync(of)) if *of == path);
    assert!(recording.take().iter().any(is_sync), "{} was not synced", path.display());
}

/// A keeper has copied blocks 1 and 2 of a segment to one of its own, and could not move the third, which has left since.
/// No segment is free. Returns the segment, and where the copies are.
fn copied_in_part(bench: &Bench, keeper: &mut Keeper, other: &Core, third: &Core) -> (u32, u32) {
    let (old, _) = fill(bench, other, &Writer::default(), 1, 3);
    let held = third.member.hold_stripe(&Key([3, 3]));
    assert!(!keeper.collect_one(old, None));
    drop(held);
    let (own, _) = other.superblock.geometry.locate(find(other, 1).expect("put").page);
    assert_ne!(own, old, "it was copied");
    assert!(other.member.remove(&find(other, 3).expect("put")));
    while other.member.claim().is_some() {}
    (old, own)
}

#[test]
fn a_full_store_frees_no_segment_that_alone_may_have_what_a_dead_keeper_has_copied() {
    let bench = bench("copies-unsynced");
    let [dies, keeps, third] = bench.cores();
    let mut keeper = Keeper::new(Arc::clone(&dies));
    let (old, own) = copied_in_part(&bench, &mut keeper, &keeps, &third);
    drop(keeper);
    // Where nothing can be copied to, they would be dropped.
    let now = keeps.clock.now_s();
    let slots = [1, 2].map(|key| find(&keeps, key).expect("put").slot);
    let pins = slots.map(|slot| keeps.member.pin(slot, now, now + HOUR).expect("room"));
    dies.die();
    let recording = Recording::start(&bench.folder);
    fail_syncs(&recording, true);
    let mut keeper = Keeper::new(Arc::clone(&keeps));
    let state = || keeps.member.segment(old).state;
    let is_kept = || matches!(state(), SegmentState::Sealed | SegmentState::Withheld);
    for _ in 0..2 {
        keeper.run_once(&AtomicBool::new(false));
        assert!(is_kept(), "{:?}", state());
        assert_eq!(keeps.member.unsynced(), Some(own));
        recording.fail(None);
        (keeper.retried_at, keeper.kept) = (None, FxHashMap::default());
    }
    // Another keeper knows it, too.
    keeper.abandon();
    let mut keeper = Keeper::new(Arc::clone(&keeps));
    keeper.run_once(&AtomicBool::new(false));
    assert!(is_kept(), "{:?}", state());
    for (key, pin) in [1, 2].into_iter().zip(&pins) {
        keeps.member.unpin(pin);
        assert!(keeps.member.remove(&find(&keeps, key).expect("it is kept")));
    }
    (keeper.retried_at, keeper.kept) = (None, FxHashMap::default());
    keeper.run_once(&AtomicBool::new(false));
    assert!(!is_kept(), "{:?}", state());
}

#[test]
fn what_a_keeper_could_not_sync_is_moved_to_where_it_can_be() {
    let bench = bench("rescued");
    let [dies, keeps, third] = bench.cores();
    let mut keeper = Keeper::new(Arc::clone(&dies));
    let (old, own) = copied_in_part(&bench, &mut keeper, &keeps, &third);
    drop(keeper);
    dies.die();
    let recording = Recording::start(&bench.folder);
    fail_syncs(&recording, false);
    let mut keeper = Keeper::new(Arc::clone(&keeps));
    assert_eq!(keeps.member.unsynced(), Some(own));
    let mine = SegmentState::Active(keeps.member.id());
    let (free, _) = keeps.member.held_by(keeps.member.id()).next().expect("claimed above");
    assert!(keeps.member.set_segment(free, mine, SegmentState::Free));
    keeper.run_once(&AtomicBool::new(false));
    assert_eq!(keeps.member.unsynced(), None, "a sync works again");
    let of = |key| keeps.superblock.geometry.locate(find(&keeps, key).expect("kept").page).0;
    assert!([1, 2].iter().all(|key| ![old, own].contains(&of(*key))));
}

#[test]
fn what_a_keeper_has_copied_that_has_panicked_is_on_the_disk_before_the_old_place_is_free() {
    let bench = bench("panicked");
    let [core, other, third] = bench.cores();
    let mut keeper = Keeper::new(Arc::clone(&core));
    let (old, own) = copied_in_part(&bench, &mut keeper, &other, &third);
    keeper.abandon();
    let recording = Recording::start(&bench.folder);
    let mut keeper = Keeper::new(Arc::clone(&core));
    keeper.run_once(&AtomicBool::new(false));
    let events = recording.take();
    let (old, own) = (core.disk.path_of(old), core.disk.path_of(own));
    let at = |is: &dyn Fn(&Op) -> bool| {
        events.iter().position(|it| matches!(it, Recorded::Begin(_, op) if is(op)))
    };
    let synced = at(&|op| matches!(op, Op::Sync(path) if *path == own));
    let freed = at(&|op| matches!(op, Op::Write { path, .. } if *path == old));
    assert!(freed.is_some() && synced.is_some() && synced < freed, "{synced:?}, {freed:?}");
}

#[test]
fn a_segment_whose_sync_has_failed_gets_no_footer_that_a_restart_would_believe() {
    let bench = bench("no-footer");
    let [core] = bench.cores();
    let writer = Writer::default();
    let segment = bench.write(&core, &writer, 1);
    let recording = Recording::start(&bench.folder);
    fail_syncs(&recording, false);
    writer.sync(&core).expect_err("the device fails");
    writer.seal(&core, SealScope::All);
    assert_eq!(core.member.segment(segment).state, SegmentState::Sealed);
    writer.sync(&core).expect_err("its block may be lost");
    let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
    assert!(!scanned.expect("it can be read").expect("it is in use").is_sealed);
    drop((writer, core));
    let [core] = bench.cores();
    assert!(core.member.is_unverified(segment), "what is there is compared with its sums");
}

/// Lets all operations, or only syncs, fail for want of descriptors until the fault is taken back.
fn be_short_of_descriptors(recording: &Recording, is_of_syncs: bool) {
    let (at, _) = recording.injected();
    recording.fail(Some(Fault { at, stays: true, errno: 24, is_of_syncs }));
}

#[test]
fn a_want_of_descriptors_fails_a_sync_once_and_marks_no_segment() {
    let bench = bench("descriptors");
    let [core] = bench.cores();
    let writer = Writer::default();
    let segment = bench.write(&core, &writer, 1);
    let recording = Recording::start(&bench.folder);
    be_short_of_descriptors(&recording, true);
    writer.sync(&core).expect_err("it can't open a file");
    writer.seal(&core, SealScope::All);
    writer.sync(&core).expect_err("it is not sealed");
    recording.fail(None);
    assert_eq!(core.member.unsynced(), None);
    recording.take();
    writer.sync(&core).expect("the device works");
    let path = core.disk.path_of(segment);
    let is_sync = |it: &Recorded| matches!(it, Recorded::Begin(_, Op::Sync(of)) if *of == path);
    assert!(recording.take().iter().any(is_sync));
    let mut keeper = Keeper::new(Arc::clone(&core));
    keeper.run_once(&AtomicBool::new(false));
    assert!(!core.member.is_open(segment), "it is sealed");
}

#[test]
fn a_block_that_can_not_be_compared_for_want_of_descriptors_stays() {
    let bench = bench("compared");
    let [core] = bench.cores();
    bench.write(&core, &Writer::default(), 1);
    drop(core);
    let [core] = bench.cores();
    let recording = Recording::start(&bench.folder);
    be_short_of_descriptors(&recording, false);
    assert!(core.find_whole(&Key([1, 1]), || 0).is_none());
    recording.fail(None);
    assert!(core.find_whole(&Key([1, 1]), || 0).is_some());
}

#[test]
fn a_segment_with_copies_that_have_all_left_it_is_not_synced_before_another_one_is_freed() {
    let bench = bench("copies-left");
    let [core] = bench.cores();
    let segment = bench.write(&core, &Writer::default(), 1);
    drop(core);
    let [core] = bench.cores();
    assert!(core.member.has_copies(segment), "which ones were copied is not known");
    let mut keeper = Keeper::new(Arc::clone(&core));
    let free = core.member.claim().expect("one is free");
    let is_synced = |recording: &Recording| {
        let path = core.disk.path_of(segment);
        let is_sync = |it: &Recorded| matches!(it, Recorded::Begin(_, Op::Sync(of)) if *of == path);
        recording.take().iter().any(is_sync)
    };
    for lives in [true, false] {
        core.member.note_unverified(segment);
        if !lives {
            assert!(core.member.remove(&find(&core, 1).expect("put")));
        }
        let recording = Recording::start(&bench.folder);
        assert_eq!(keeper.free(free, None), SegmentState::Free);
        assert_eq!(is_synced(&recording), lives);
    }
}

#[test]
fn a_segment_is_not_lost_because_the_process_that_opens_the_store_is_short_of_descriptors() {
    for (errno, is_lost) in [(24, false), (5, true)] {
        let bench = bench(&format!("sync-{errno}"));
        let [core] = bench.cores();
        // As where all processes were killed while the keeper copied the block.
        let segments = [(); 2].map(|()| bench.write(&core, &Writer::default(), 1));
        assert_ne!(segments[0], segments[1]);
        drop(core);
        let recording = Recording::start(&bench.folder);
        recording.fail(Some(Fault { at: 0, stays: true, errno, is_of_syncs: true }));
        let [core] = bench.cores();
        assert_eq!(recording.injected().1.len(), 1, "the block is in two segments");
        recording.fail(None);
        let unsynced = segments.iter().filter(|it| core.member.is_unsynced(**it)).count();
        assert_eq!(unsynced, usize::from(is_lost), "{errno}");
        assert!(core.find_whole(&Key([1, 1]), || 0).is_some());
    }
}
