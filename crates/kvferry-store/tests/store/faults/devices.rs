//! Devices that answer writes and syncs with an error.

use super::{LEN, fill};
use crate::{Engine, Folder, MIB, options, prompt};
use kvferry::DirectIo;
use kvferry_store::StoreOptions;
use kvferry_testkit::eventually;
use kvferry_testkit::hanging::HangingDisk;
use std::path::Path;

/// Length of blocks whose last page is not whole: with direct I/O, it goes through the page cache and the others past it.
const ODD_LEN: u64 = LEN + 100;

fn with(folder: &Path, direct: DirectIo) -> StoreOptions {
    options(folder, 24 * MIB).direct(direct)
}

#[test]
fn blocks_that_a_device_fails_to_write_are_counted_and_missed_and_those_before_them_are_kept() {
    for direct in [DirectIo::Off, DirectIo::Auto] {
        let folder = Folder::new(&format!("failing-writes-{direct:?}"));
        let Some(disk) = HangingDisk::mount(folder.path()) else { return };
        let engine = Engine::open(&with(folder.path(), direct), ODD_LEN);
        let (kept, other) = (prompt(1, 2), prompt(2, 2));
        assert_eq!(engine.put(&kept, 0).stored, 2);
        engine.store.sync().expect("the device works");
        disk.fail_writes();
        let put = engine.put(&other, 0);
        assert_eq!((put.stored, put.present, put.refused, put.failed), (0, 0, 0, 2), "{direct:?}");
        assert_eq!((engine.get(&other, 0), engine.get(&kept, 0)), (0, 2), "{direct:?}");
        let stats = engine.store.stats();
        assert_eq!((stats.failed, stats.stored, stats.blocks), (2, 2, 2), "{stats:?}");
        disk.mend();
        eventually("they are put again", || {
            let put = engine.put(&other, 0);
            put.stored + put.present == 2
        });
        drop(engine);
        let engine = Engine::open(&with(folder.path(), direct), ODD_LEN);
        assert_eq!((engine.get(&other, 0), engine.get(&kept, 0)), (2, 2), "{direct:?}");
        assert_eq!(engine.store.stats().corrupt, 0);
    }
}

/// A store whose device has failed one sync, of the segment that one block is in, and works since then.
fn failed_once(folder: &Folder, disk: &HangingDisk, direct: DirectIo) -> Engine {
    let engine = Engine::open(&with(folder.path(), direct), ODD_LEN);
    assert_eq!(engine.put(&prompt(1, 1), 0).stored, 1);
    disk.fail_syncs(1);
    assert!(engine.store.sync().is_err(), "{direct:?}: the device has said so");
    assert_eq!(disk.syncs_to_fail(), 0);
    engine
}

#[test]
fn after_a_device_has_failed_one_sync_each_sync_fails_until_the_keeper_has_moved_the_blocks() {
    for direct in [DirectIo::Off, DirectIo::Auto] {
        let folder = Folder::new(&format!("failing-syncs-{direct:?}"));
        let Some(disk) = HangingDisk::mount(folder.path()) else { return };
        let engine = failed_once(&folder, &disk, direct);
        for _ in 0..2 {
            assert!(engine.store.sync().is_err(), "{direct:?}: the device does not say so again");
        }
        assert_eq!(engine.get(&prompt(1, 1), 0), 1, "there is power");
        eventually("the blocks have left the segment", || {
            fill(&engine, ODD_LEN, 40 * MIB);
            engine.store.sync().is_ok()
        });
        assert_eq!(engine.store.stats().corrupt, 0);
    }
}

#[test]
fn blocks_of_a_device_that_has_failed_one_sync_are_read_from_it_when_the_store_is_opened_again() {
    for direct in [DirectIo::Off, DirectIo::Auto] {
        let folder = Folder::new(&format!("failed-sync-{direct:?}"));
        let Some(disk) = HangingDisk::mount(folder.path()) else { return };
        drop(failed_once(&folder, &disk, direct));
        let engine = Engine::open(&with(folder.path(), direct), ODD_LEN);
        engine.store.sync().expect("the device works");
        assert_eq!(engine.get(&prompt(1, 1), 0), 1, "{direct:?}");
        assert_eq!(engine.store.stats().corrupt, 0);
    }
}
