//! Tests of segments whose directory hangs.

use super::*;
use crate::core::Core;
use crate::gc::sealing::seal;
use crate::index::{Inserted, New, SegmentState};
use crate::key::Key;
use crate::log::Disk;
use crate::opening::Opening;
use crate::opening::recover;
use crate::options::StoreOptions;
use crate::tiers::host::{self, HostTier};
use crate::writer::begin_segment;
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::sync::mpsc;

/// No operation takes as long.
const HANG_AFTER: Duration = Duration::from_secs(3600);
/// Longer than any operation may take.
const DAY: Duration = Duration::from_secs(24 * 3600);

struct Bench {
    folder: PathBuf,
    agent: Agent,
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.agent.shutdown();
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Bench {
    fn new(name: &str) -> Self {
        let name = format!("kvferry-disk-{name}-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        Self { folder, agent: Agent::builder().start().expect("an agent") }
    }

    /// A store in two directories, without threads that free space.
    fn open(&self) -> Core {
        self.open_with(HANG_AFTER)
    }

    fn open_with(&self, hang_after: Duration) -> Core {
        let options = StoreOptions::new(self.folder.join("a"), 12 << 20)
            .and_directory(self.folder.join("b"))
            .segment_bytes(1 << 20)
            .hang_after(hang_after);
        let opening = Opening::new(&self.agent, &options).expect("directories");
        let superblock = opening.open_superblock().expect("a superblock");
        let disk = opening.disk(&superblock, true).expect("files");
        let geometry = options.geometry(None).expect("in bounds");
        let index = recover::fill(&disk, &superblock, geometry).expect("an index");
        Core::new(disk, superblock, index.join().expect("a member"))
    }
}

/// An operation on a segment that hangs until the sender is used or dropped, and ends as `run` says then. It was given up.
fn hang_with<T: Send + 'static>(
    disk: &Directories,
    segment: u32,
    what: device::OperationKind,
    run: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> mpsc::Sender<()> {
    let (release, held) = mpsc::channel();
    let (tell, told) = mpsc::channel();
    let device = disk.of(segment);
    let waits = move |_: &Device| {
        let _ = tell.send(());
        let _ = held.recv();
        run()
    };
    std::thread::scope(|scope| {
        let op = scope.spawn(|| device.carry_out(Pace::Quick, what, Some(segment), waits));
        told.recv().expect("it has begun");
        device.gate.age(DAY);
        assert!(is_hang(&op.join().expect("no panic").err().expect("it does not end")));
    });
    release
}

fn hang(disk: &Directories, segment: u32) -> mpsc::Sender<()> {
    hang_with(disk, segment, device::OperationKind::Other, || Ok(()))
}

#[test]
fn a_segment_is_neither_used_nor_given_away_until_what_was_given_up_on_it_has_ended() {
    let bench = Bench::new("held");
    let core = bench.open();
    let mine = SegmentState::Active(core.member.id());
    let segments = [(); 2].map(|()| core.member.claim().expect("one is free"));
    assert_eq!(segments, [0, 1]);
    segments.iter().for_each(|it| core.disk.ensure(*it).expect("no device fails"));
    let release = hang(&core.disk, 1);
    assert!(core.disk.is_held(1) && core.disk.hangs(1) && !core.disk.hangs(0));
    assert_eq!((core.disk.hanging(), core.disk.writable()), (1, vec![true, false]));
    let refused = core.disk.write_at(1, 0, &[0; 4096]).expect_err("it hangs");
    assert!(is_hang(&refused) && is_of_device(&refused), "{refused}");
    core.disk.write_at(0, 0, &[0; 4096]).expect("the other directory works");
    assert!(core.settle(1, mine, SegmentState::Withheld));
    assert!(core.settle(0, mine, SegmentState::Withheld));
    core.settle_late();
    assert!(core.awaits_device(), "more is to be done");
    assert_eq!(core.member.segment(0).state, SegmentState::Withheld);
    assert_eq!(core.member.segment(1).state, mine);
    release.send(()).expect("it waits");
    eventually("it has ended", || {
        core.settle_late();
        !core.awaits_device()
    });
    assert_eq!(core.member.segment(1).state, SegmentState::Withheld);
    eventually("it is well again", || !core.disk.hangs(1));
    core.disk.write_at(1, 0, &[0; 4096]).expect("the directory answers");
}

#[test]
fn segments_are_begun_in_other_directories_than_one_that_hangs() {
    let bench = Bench::new("begun");
    let core = bench.open();
    let release = hang(&core.disk, 1);
    for _ in 0..3 {
        let begun = begin_segment(&core, 0).expect("no fault of this process");
        assert_eq!(begun.expect("one is free").segment() % 2, 0);
    }
    assert_eq!(core.member.segment(3).state, SegmentState::Withheld);
    drop(release);
}

#[test]
fn a_sync_that_fails_after_it_was_given_up_is_not_followed_by_one_that_succeeds() {
    let bench = Bench::new("late-sync");
    let core = bench.open();
    core.disk.ensure(1).expect("no device fails");
    let fails = || Err::<(), _>(io::Error::from_raw_os_error(EIO));
    let release = hang_with(&core.disk, 1, device::OperationKind::Sync, fails);
    assert!(!core.member.is_unsynced(1));
    drop(release);
    eventually("it has ended", || !core.disk.is_held(1) && !core.disk.hangs(1));
    let late = core.disk.sync(1).expect_err("blocks may be lost");
    assert_eq!(late.raw_os_error(), Some(EIO));
    core.disk.sync(1).expect("it was told");
    assert!(core.member.is_unsynced(1), "also for the processes that open the file later");
}

#[test]
fn a_sync_that_was_given_up_and_fails_for_want_of_descriptors_loses_no_block() {
    const EMFILE: i32 = 24;
    let bench = Bench::new("late-descriptors");
    let core = bench.open();
    core.disk.ensure(1).expect("no device fails");
    let fails = || Err::<(), _>(io::Error::from_raw_os_error(EMFILE));
    let release = hang_with(&core.disk, 1, device::OperationKind::Sync, fails);
    drop(release);
    eventually("it has ended", || !core.disk.is_held(1) && !core.disk.hangs(1));
    core.disk.sync(1).expect("it is tried again");
    assert!(!core.member.is_unsynced(1));
}

#[test]
fn a_segment_with_a_failed_sync_is_not_given_away_while_a_write_that_was_given_up_is_under_way() {
    let bench = Bench::new("held-unsynced");
    let core = bench.open();
    let begin = || begin_segment(&core, 0).expect("no fault of this process").expect("one is free");
    let mut own = [begin(), begin()].into_iter().find(|it| it.segment() == 1).expect("the second");
    let mine = SegmentState::Active(core.member.id());
    core.member.note_unsynced(1);
    let release = hang(&core.disk, 1);
    assert!(!seal(&core, &mut own));
    assert_eq!(core.member.segment(1).state, mine);
    drop(release);
    eventually("it has ended", || !core.disk.is_held(1) && !core.disk.hangs(1));
    assert!(seal(&core, &mut own));
    assert_eq!(core.member.segment(1).state, SegmentState::Sealed);
}

#[test]
fn memory_of_a_write_that_was_given_up_is_kept_until_its_device_has_answered() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = Bench::new("kept");
    let path = bench.folder.join("b");
    std::fs::create_dir_all(&path).expect("a folder");
    let Some(device) = HangingDisk::mount(&path) else { return };
    let core = bench.open();
    core.disk.ensure(1).expect("no device fails");
    let host = HostTier::new(&bench.agent, 1 << 20).expect("memory");
    let extent = host.reserve(0, PAGE as u64, false).expect("it is empty");
    let block = Arc::new(host::Block::new(Key([1, 2]), 0, 0, PAGE as u64, extent));
    let write = || {
        let memory = block.memory().kept_by(block.clone());
        core.disk.begin_write(1, (PAGE as u64, &[1; PAGE]), &[(2 * PAGE as u64, memory)])
    };
    // The file is open and locked then.
    write().end().expect("no device fails");
    eventually("its memory is given back", || Arc::strong_count(&block) == 1);
    device.hold();
    let writing = write();
    core.disk.of(1).gate.age(DAY);
    assert!(is_hang(&writing.end().expect_err("the device does not answer")));
    assert!(core.disk.is_held(1) && Arc::strong_count(&block) == 2, "the device may read it");
    device.release();
    eventually("it has ended", || !core.disk.is_held(1) && Arc::strong_count(&block) == 1);
    core.disk.wait_quiet();
}

#[test]
fn a_directory_is_left_when_its_device_has_answered_and_not_when_a_caller_looks() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = Bench::new("answered");
    let core = bench.open();
    [0, 1].iter().for_each(|it| core.disk.ensure(*it).expect("no device fails"));
    let memory = bench.agent.allocate(2 * PAGE, Access::NONE).expect("memory");
    let page = |at: usize| BlockMemory::new(&memory, (at * PAGE) as u64, PAGE as u64);
    let release = hang(&core.disk, 1);
    let reading = core.disk.begin_read(&[(0, 0, page(0))]);
    core.disk.all[0].gate.wait_quiet();
    assert!(core.disk.begin_read(&[(0, 0, page(0)), (1, 0, page(1))]).end().is_err());
    core.disk.all[0].gate.wait_quiet();
    reading.end().expect("no device fails");
    drop(release);
    eventually("it is well again", || core.disk.hanging() == 0);
    core.disk.read_blocks(&[(0, 0, page(0)), (1, 0, page(1))]).expect("both answer");
}

#[test]
fn a_block_that_may_be_torn_in_a_directory_that_hangs_is_put_once_more() {
    let bench = Bench::new("unverified");
    let core = bench.open();
    let key = Key([1, 2]);
    let page = core.superblock.geometry.place(1, 2);
    let new = New { sum: 3, parent: None, page, len: 4096, retention: 0, now: 0 };
    assert!(matches!(core.member.insert(key, new), Inserted::New(_)));
    assert!(core.find_whole(&key, || 0).is_some());
    core.member.note_unverified(1);
    let release = hang(&core.disk, 1);
    assert!(core.find_whole(&key, || 0).is_none());
    assert!(core.member.find(&key).is_some(), "it may be whole");
    drop(release);
}

#[test]
fn a_device_that_hangs_while_a_file_is_synced_is_known_to_hang_as_soon_as_by_a_read() {
    let _watchdog = Watchdog::new(PATIENCE);
    let bench = Bench::new("asked");
    let hangs = bench.folder.join("b");
    std::fs::create_dir_all(&hangs).expect("a folder");
    let Some(device) = HangingDisk::mount(&hangs) else { return };
    // In memory, too: it answers also while the machine's disk is busy.
    let other = bench.folder.join("a");
    std::fs::create_dir_all(&other).expect("a folder");
    let _other = HangingDisk::mount(&other).expect("as the other");
    let hang_after = Duration::from_secs(5);
    let core = bench.open_with(hang_after);
    core.disk.ensure(1).expect("no device fails");
    device.hold();
    let given_up = core.disk.sync(1).expect_err("it does not end");
    assert!(is_hang(&given_up), "{given_up}");
    let first = core.disk.of(1).gate.first_limit();
    device.release();
    // Longer than `hang_after` where this thread had no processor for a time.
    assert!(first.is_some_and(|it| it < hang_after * 6), "a read shows it, and not the sync");
    eventually("it is well again", || !core.disk.hangs(1));
    core.disk.wait_quiet();
}

#[test]
fn a_panic_of_an_operation_is_that_of_its_caller() {
    let bench = Bench::new("panic");
    let core = bench.open();
    let run = |_: &Device| -> io::Result<()> { std::panic::resume_unwind(Box::new("here")) };
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        core.disk.of(1).patiently(Pace::Quick, None, run)
    }));
    let panic = caught.expect_err("it panics");
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"here"));
    assert_eq!(core.disk.hanging(), 0);
    core.disk.wait_quiet();
}
