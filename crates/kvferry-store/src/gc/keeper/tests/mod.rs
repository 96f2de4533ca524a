//! Tests of the keeper.

mod deaths;
mod pressure;

use super::copy::page_bytes;
use super::*;
use crate::fault_points::Op;
use crate::gc::sealing::SealScope;
use crate::index::{New, Segment};
use crate::key::Key;
use crate::log::format::{bytes_of, pages_of};
use crate::log::{Block, Disk};
use crate::memory::BlockMemory;
use crate::opening::Opening;
use crate::opening::recover;
use crate::options::StoreOptions;
use crate::power::recorder::{Event, Fault, Recording};
use crate::writer::{Candidate, Writer};
use crc_fast::CrcAlgorithm;
use kvferry::{Access, Agent, Region};
use kvferry_sys::sync::Mutex;
use kvferry_testkit::PATIENCE;
use std::ops::RangeInclusive;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

const LEN: u32 = 60_000;

struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A store of segments of 1 MiB, without threads.
fn core(name: &str) -> (Arc<Core>, Agent, Folder) {
    let name = format!("kvferry-keeper-{name}-{}", std::process::id());
    let folder = Folder(std::env::temp_dir().join(name));
    let _ = std::fs::remove_dir_all(&folder.0);
    let agent = Agent::builder().start().expect("an agent");
    let options = StoreOptions::new(&folder.0, 24 << 20).segment_bytes(1 << 20);
    let opening = Opening::new(&agent, &options).expect("directories");
    let superblock = opening.open_superblock().expect("a superblock");
    let disk = opening.disk(&superblock, true).expect("files");
    let geometry = options.geometry(None).expect("in bounds");
    let index = recover::fill(&disk, &superblock, geometry).expect("an index");
    let member = index.join().expect("a member");
    (Arc::new(Core::new(disk, superblock, member)), agent, folder)
}

/// Puts a block with these bytes. Returns its segment.
fn put(core: &Core, writer: &Writer, pool: &Region, key: u64) -> u32 {
    put_long(core, writer, pool, key, LEN)
}

fn put_long(core: &Core, writer: &Writer, pool: &Region, key: u64, len: u32) -> u32 {
    let mut bytes = vec![0; len as usize];
    fastrand::Rng::with_seed(key).fill(&mut bytes);
    pool.write_at(0, &bytes).expect("inside");
    let memory = BlockMemory::new(pool, 0, len.into());
    let sum = memory.sum().expect("registered");
    let (parent, check, namespace, retention, time) = (None, 0, 7, 0, 0);
    let block = Block { key: [key, key], parent, sum, check, namespace, len, retention, time };
    let mut to = 0;
    let writing = writer.begin(core, &[Candidate { block, memory }]).expect("room");
    let written = writing.end(core, |segment, new| {
        let page = core.superblock.geometry.place(segment, new[0].page);
        let new = New { sum, parent: None, page, len, retention, now: 0 };
        core.member.insert(Key([key, key]), new);
        to = segment;
    });
    assert!(written.is_ok(), "{written:?} of {key}");
    to
}

/// Puts blocks of `LEN` bytes, all with the same ones, into one extent of a new segment. Returns the segment.
fn put_together(core: &Core, pool: &Region, keys: RangeInclusive<u64>) -> u32 {
    let memory = BlockMemory::new(pool, 0, LEN.into());
    let sum = memory.sum().expect("registered");
    let candidate = |key: u64| {
        let (parent, check, namespace, retention, time) = (None, 0, 7, 0, 0);
        let (len, key) = (LEN, [key, key]);
        let block = Block { key, parent, sum, check, namespace, len, retention, time };
        Candidate { block, memory: memory.clone() }
    };
    let blocks: Vec<_> = keys.map(candidate).collect();
    let writer = Writer::default();
    let writing = writer.begin(core, &blocks).expect("room");
    assert_eq!(writing.count(), blocks.len());
    let mut to = 0;
    let written = writing.end(core, |segment, records| {
        for record in records {
            let page = core.superblock.geometry.place(segment, record.page);
            let new = New { sum, parent: None, page, len: LEN, retention: 0, now: 0 };
            core.member.insert(Key(record.block.key), new);
        }
        to = segment;
    });
    assert!(written.is_ok(), "{written:?}");
    writer.seal(core, SealScope::All);
    to
}

/// Whether a block is in the index, and its bytes are right.
fn is_right(core: &Core, key: u64) -> bool {
    let Some(entry) = core.member.find(&Key([key, key])) else { return false };
    let (segment, page) = core.superblock.geometry.locate(entry.page);
    let mut data = vec![0; page_bytes(entry.len)];
    core.disk.read_at(segment, bytes_of(page), &mut data).expect("it was copied");
    crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &data) == entry.sum
}

#[test]
fn a_block_that_cannot_be_read_when_its_segment_is_collected_costs_only_itself() {
    for is_sealed in [true, false] {
        let (core, agent, _folder) = core("unreadable");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        let writer = Writer::default();
        let segments: Vec<_> = (1..=12).map(|key| put(&core, &writer, &pool, key)).collect();
        assert!(segments.iter().all(|it| *it == segments[0]));
        let segment = segments[0];
        if is_sealed {
            writer.seal(&core, SealScope::All);
        } else {
            // Its process was killed: it has no footer.
            let mine = SegmentState::Active(core.member.id());
            assert!(core.member.set_segment(segment, mine, SegmentState::Sealed));
        }
        // A file that is cut can't be read behind the cut. 4 blocks are behind.
        let (_, cut) = core
            .superblock
            .geometry
            .locate(core.member.find(&Key([9, 9])).expect("put above").page);
        let path = core.disk.path_of(segment);
        let file = std::fs::File::options().write(true).open(&path).expect("it exists");
        file.set_len(bytes_of(cut)).expect("it is cut");
        let mut keeper = Keeper::new(Arc::clone(&core));
        assert!(keeper.collect_one(segment, None));
        let right: Vec<_> = (1..=12).map(|key| is_right(&core, key)).collect();
        assert_eq!(right, [[true; 8].as_slice(), &[false; 4]].concat(), "{is_sealed}");
        let stats = core.counters.read();
        assert_eq!((stats.failed, stats.corrupt), (4, 0), "{stats:?}");
        assert_eq!(core.member.segment(segment).state, SegmentState::Free);
        // It is used again.
        let writer = Writer::default();
        for key in 100..150 {
            put(&core, &writer, &pool, key);
        }
        assert!((100..150).all(|key| is_right(&core, key)));
        keeper.stop();
    }
}

#[test]
fn a_block_that_fits_into_the_active_segment_does_not_wait_for_another_to_be_made() {
    let (core, agent, _folder) = core("create");
    let pools = [(); 2].map(|()| agent.allocate(900 << 10, Access::NONE).expect("memory"));
    let writer = Writer::default();
    let first = put_long(&core, &writer, &pools[0], 1, 800 << 10);
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let held = core.disk.hold_creates(0);
        let (core, writer, pools) = (&core, &writer, &pools);
        let long = scope.spawn(|| put_long(core, writer, &pools[0], 2, 800 << 10));
        let active = || core.member.held_by(core.member.id()).count();
        while active() < 2 {
            assert!(!long.is_finished());
            std::thread::yield_now();
        }
        scope.spawn(move || done.send(put(core, writer, &pools[1], 3)));
        let short = is_done.recv_timeout(PATIENCE / 2);
        assert!(!long.is_finished());
        drop(held);
        assert_eq!(short, Ok(first));
        assert_ne!(long.join().expect("it is stored"), first);
    });
    assert!((1..=3).all(|key| is_right(&core, key)));
}

/// Puts blocks of a segment each.
fn fill(core: &Core, writer: &Writer, pool: &Region, segments: u64) {
    for key in 1..=segments {
        put_long(core, writer, pool, key, 900_000);
    }
}

fn unsealed(core: &Core) -> usize {
    let held = core.member.held_by(core.member.id());
    held.filter(|(_, it)| matches!(it.state, SegmentState::Active(_))).count()
}

#[test]
fn while_puts_go_on_an_eighth_of_the_store_waits_for_its_seal() {
    let (core, agent, _folder) = core("excess");
    let pool = agent.allocate(900_000, Access::NONE).expect("memory");
    let writer = Writer::default();
    fill(&core, &writer, &pool, 8);
    assert_eq!(unsealed(&core), 8, "each has a segment");
    writer.seal(&core, SealScope::Excess);
    // The segment that is written to, and an eighth of 23.
    assert_eq!(core.member.geometry().segments, 23);
    assert_eq!(unsealed(&core), 1 + 2);
    assert!(writer.has_full());
    writer.seal(&core, SealScope::Full);
    assert_eq!(unsealed(&core), 1);
    assert!(!writer.has_full());
    writer.seal(&core, SealScope::All);
    assert_eq!(unsealed(&core), 0);
    assert!((1..=8).all(|key| is_right(&core, key)));
    agent.shutdown();
}

#[test]
fn when_puts_pause_or_space_is_short_full_segments_are_sealed() {
    for (segments, is_short) in [(3, false), (20, true)] {
        let (core, agent, _folder) = core(&format!("pause-{segments}"));
        let pool = agent.allocate(900_000, Access::NONE).expect("memory");
        let worker = crate::gc::worker::Worker::start(Arc::clone(&core)).expect("a thread");
        fill(&core, &worker.writer, &pool, segments);
        worker.wake();
        let began = Instant::now();
        while worker.writer.has_full() {
            assert!(began.elapsed() < PATIENCE / 2, "{} wait", unsealed(&core));
            std::thread::sleep(Duration::from_millis(1));
            if is_short {
                // The puts go on.
                worker.writer.note_begun();
            }
        }
        worker.stop();
        agent.shutdown();
    }
}

#[test]
fn after_a_sync_that_failed_each_sync_fails_until_the_blocks_have_left() {
    let (core, agent, _folder) = core("sync");
    let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
    for is_sealed in [true, false] {
        let writer = Writer::default();
        let segment = put(&core, &writer, &pool, 1);
        assert!(writer.sync(&core).is_ok());
        // A file that is gone can't be synced.
        std::fs::remove_file(core.disk.path_of(segment)).expect("it exists");
        core.disk.close(segment);
        if is_sealed {
            writer.seal(&core, SealScope::All);
        }
        for _ in 0..2 {
            let (failed, _) = writer.sync(&core).expect_err("it can't be synced");
            assert_eq!(failed, segment);
        }
        let entry = core.member.find(&Key([1, 1])).expect("it is in the index");
        assert!(core.member.remove(&entry));
        if is_sealed {
            assert!(writer.sync(&core).is_ok());
        }
        put(&core, &Writer::default(), &pool, 2);
        let entry = core.member.find(&Key([2, 2])).expect("it is in the index");
        core.member.remove(&entry);
    }
    // What the keeper has copied concerns each process.
    let writer = Writer::default();
    let segment = put(&core, &writer, &pool, 3);
    assert!(writer.sync(&core).is_ok());
    core.member.note_unsynced(segment);
    assert!(writer.sync(&core).is_err());
    let entry = core.member.find(&Key([3, 3])).expect("it is in the index");
    core.member.remove(&entry);
    assert!(writer.sync(&core).is_ok());
}

#[test]
fn a_sync_between_the_unlocking_of_a_segment_that_was_not_sealed_and_the_note_of_that_covers_it() {
    // A device that fails once: it says nothing of the loss when it is asked again. A process that is short of
    // descriptors once: nothing is lost.
    for (errno, is_lost) in [(5, true), (24, false)] {
        let (core, agent, folder) = core("seal-race");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        let writer = Arc::new(Writer::default());
        let segment = put(&core, &writer, &pool, 1);
        let path = core.disk.path_of(segment);
        let recording = Arc::new(Recording::start(&folder.0));
        recording.fail(Some(Fault { at: 0, stays: false, errno, is_of_syncs: true }));
        let found = Arc::new(Mutex::new(None));
        let of_hook =
            (Arc::clone(&core), Arc::clone(&writer), Arc::clone(&recording), Arc::clone(&found));
        crate::writer::race::when_unlocked(move || {
            let (core, writer, recording, found) = of_hook;
            recording.take();
            let synced = writer.sync(&core).map_err(|(segment, _)| segment);
            *found.lock() = Some((synced, recording.take()));
        });
        writer.seal(&core, SealScope::All);
        let (synced, events) = found.lock().take().expect("the segment was unlocked");
        assert_eq!(synced, if is_lost { Err(segment) } else { Ok(()) });
        let is_sync =
            |it: &Event| matches!(it, Event::Begin(_, Op::SyncSegment(of)) if *of == path);
        assert_eq!(events.iter().filter(|it| is_sync(it)).count(), 1, "the sync asks the device");
        // As long as its blocks are in the store.
        assert_eq!(writer.sync(&core).is_err(), is_lost);
        assert_eq!(recording.injected().1.len(), 1);
        agent.shutdown();
    }
}

/// A keeper whose store has no threads, and blocks of a prompt each in its segments.
fn filled(core: &Core, writer: &Writer, pool: &Region, blocks: RangeInclusive<u64>) {
    for key in blocks {
        put(core, writer, pool, key);
        let entry = core.member.find(&Key([key, key])).expect("put above");
        core.member.note_added(core.clock.now_ms(), None, &[entry.slot]);
    }
    writer.seal(core, SealScope::All);
}

#[test]
fn a_block_that_the_policy_gives_up_is_found_until_its_segment_is_freed_and_kept_if_it_is_used() {
    let (core, agent, _folder) = core("condemned");
    let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
    let writer = Writer::default();
    filled(&core, &writer, &pool, 1..=40);
    let mut keeper = Keeper::new(Arc::clone(&core));
    keeper.drain_events();
    while keeper.condemn().is_some() {}
    assert_eq!((keeper.policy.len(), keeper.condemned.len()), (0, 40));
    assert!((1..=40).all(|key| is_right(&core, key)), "they are found");
    // One is used, and one is pinned.
    let slot = |key| core.member.find(&Key([key, key])).expect("it is there").slot;
    core.member.note_used(core.clock.now_ms(), 0, &[slot(7)]);
    let now_s = core.clock.now_s();
    let pin = core.member.pin(slot(8), now_s, now_s + 3600).expect("room");
    keeper.drain_events();
    assert_eq!((keeper.policy.len(), keeper.condemned.len()), (2, 38));
    let of = |key| {
        core.superblock.geometry.locate(core.member.find(&Key([key, key])).expect("there").page).0
    };
    let segment = of(7);
    assert_eq!(of(8), segment);
    let worthy = keeper.worthy(segment, &core.member.segment(segment));
    assert_eq!(worthy, 2 * pages_of(LEN));
    let others: Vec<_> = (1..=40).filter(|key| of(*key) != segment).collect();
    assert!(keeper.collect_one(segment, None));
    let is_kept = |key: &u64| [7, 8].contains(key) || others.contains(key);
    for key in 1..=40 {
        assert_eq!(is_right(&core, key), is_kept(&key), "{key}");
    }
    assert_eq!(core.counters.read().evicted, 38 - others.len() as u64);
    assert_eq!(keeper.condemned.len(), others.len() as u64);
    assert_eq!(keeper.condemned.pages(segment), 0);
    core.member.unpin(&pin);
    keeper.stop();
    agent.shutdown();
}

#[test]
fn the_segment_with_the_most_space_to_gain_for_what_is_copied_times_its_age_is_collected_next() {
    let (core, agent, _folder) = core("victim");
    let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
    let writer = Writer::default();
    let first = put(&core, &writer, &pool, 1);
    let mut key = 2;
    while put(&core, &writer, &pool, key) == first {
        key += 1;
    }
    // Three segments with as many blocks each, from the oldest to the newest.
    let each = key - 1;
    assert!(each >= 12, "{each}");
    (key + 1..=3 * each).for_each(|key| _ = put(&core, &writer, &pool, key));
    writer.seal(&core, SealScope::All);
    let entry = |key: u64| core.member.find(&Key([key, key])).expect("put above");
    let segments = [1, each + 1, 2 * each + 1].map(|first| {
        let of = |key| core.superblock.geometry.locate(entry(key).page).0;
        assert_eq!(of(first), of(first + each - 1));
        of(first)
    });
    let keeper = Keeper::new(Arc::clone(&core));
    let victim = || {
        let (number, _) = keeper.victim(|_, _| true).expect("they are sealed");
        segments.iter().position(|it| *it == number).expect("one of them")
    };
    // Leaves so many blocks in a segment.
    let leave = |at: u64, blocks: u64| {
        for key in at * each + 1 + blocks..=(at + 1) * each {
            if let Some(entry) = core.member.find(&Key([key, key])) {
                core.member.remove(&entry);
            }
        }
    };
    assert_eq!(victim(), 0, "of equal ones, the oldest");
    leave(2, 3);
    assert_eq!(victim(), 2, "the newest, of which little is copied");
    leave(0, 7);
    assert_eq!(victim(), 0, "more is copied, but it has lived for three times as long");
    // Space times age would still say the oldest.
    leave(1, 3);
    assert_eq!(victim(), 1, "less than half is copied, for less than twice the age");
    let other = |number, _: &Segment| number != segments[1];
    assert_eq!(keeper.victim(other).map(|it| it.0), Some(segments[0]));
    agent.shutdown();
}

#[test]
fn each_run_of_neighbours_is_copied_with_one_read_and_each_extent_with_one_write() {
    let (core, agent, folder) = core("runs");
    let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
    let segments = [1..=16, 17..=32].map(|keys| put_together(&core, &pool, keys));
    let is_kept = |key: &u64| !key.is_multiple_of(4);
    for key in (1..=32).filter(|key| !is_kept(key)) {
        let entry = core.member.find(&Key([key, key])).expect("put above");
        assert!(core.member.remove(&entry));
    }
    let mut keeper = Keeper::new(Arc::clone(&core));
    let recording = Recording::start(&folder.0);
    // The first 12 blocks leave room for 4 in the keeper's own segment.
    for (segment, extents) in segments.into_iter().zip([&[12][..], &[4, 8]]) {
        let path = core.disk.path_of(segment);
        let scanned = crate::log::recover::scan(&core.disk, &core.superblock, segment);
        let records = scanned.expect("it is read").expect("it is in use").records;
        assert_eq!(records.len(), 16);
        let to_scan = recording.reads(&path);
        recording.take();
        assert!(keeper.collect_one(segment, None));
        // The collection has scanned it as well.
        assert_eq!(recording.reads(&path) - 2 * to_scan, 4, "four runs of three blocks");
        let data = |event: Event| match event {
            Event::Begin(_, Op::Write { pieces, .. }) => {
                let [(_, bytes)] = &pieces[..] else { panic!("{} pieces", pieces.len()) };
                // Not a header or a footer.
                (bytes.len() >= page_bytes(LEN)).then(|| bytes.len() / page_bytes(LEN))
            }
            _ => None,
        };
        let written: Vec<_> = recording.take().into_iter().filter_map(data).collect();
        assert_eq!(written, extents);
    }
    assert!((1..=32).all(|key| is_right(&core, key) == is_kept(&key)));
    keeper.stop();
    agent.shutdown();
}

#[test]
fn segments_of_a_keeper_that_has_panicked_are_sealed_and_collected_by_the_next() {
    let (core, agent, _folder) = core("panicked");
    let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
    let writer = Writer::default();
    filled(&core, &writer, &pool, 1..=40);
    let segment_of = |key| {
        let entry = core.member.find(&Key([key, key])).expect("it is there");
        core.superblock.geometry.locate(entry.page).0
    };
    let mut keeper = Keeper::new(Arc::clone(&core));
    keeper.drain_events();
    assert!(keeper.collect_one(segment_of(1), None));
    let (own, next) = (segment_of(1), segment_of(40));
    let mine = SegmentState::Collecting(core.member.id());
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        assert!(core.member.set_segment(next, SegmentState::Sealed, mine));
        keeper.collecting = Some(next);
        panic!("as while it copies");
    }));
    assert!(panicked.is_err());
    keeper.abandon();
    drop(keeper);
    let mut keeper = Keeper::new(Arc::clone(&core));
    assert!(!keeper.waits_for_seal());
    keeper.run_until_idle();
    for segment in [own, next] {
        assert_eq!(core.member.segment(segment).state, SegmentState::Sealed);
        assert!(!core.member.is_open(segment));
        assert!(keeper.collect_one(segment, None));
    }
    assert!((1..=40).all(|key| is_right(&core, key)));
    keeper.stop();
    agent.shutdown();
}

#[test]
fn what_is_behind_a_block_that_a_put_finds_behind_another_one_stays() {
    let (core, agent, _folder) = core("found");
    let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
    let writer = Writer::default();
    (1..=6).for_each(|key| _ = put(&core, &writer, &pool, key));
    let slot = |key| core.member.find(&Key([key, key])).expect("it is there").slot;
    let now_ms = core.clock.now_ms();
    let mut keeper = Keeper::new(Arc::clone(&core));
    core.member.note_added(now_ms, None, &[slot(1), slot(2)]);
    core.member.note_added(now_ms, None, &[slot(3), slot(4), slot(5)]);
    // One of the found ones has been given up, and comes back.
    keeper.drain_events();
    while keeper.policy.contains(slot(5)) {
        keeper.condemn().expect("nothing is pinned");
    }
    core.member.note_added(now_ms, None, &[slot(6)]);
    core.member.note_found(now_ms, Some(slot(6)), &[slot(3), slot(4), slot(5), slot(1)]);
    keeper.run_until_idle();
    assert!((1..=6).all(|key| is_right(&core, key)));
    assert!([6, 3, 4, 5, 1].into_iter().all(|key| keeper.policy.contains(slot(key))));
    assert!(!keeper.condemned.contains(slot(5)));
}
