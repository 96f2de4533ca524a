//! Faults: of disks, of the caller, and of processes that end in the middle.

mod closing;
mod devices;

use crate::{Engine, Folder, MIB, POOL, content, options, prompt};
use kvferry::Access;
use kvferry_store::{BlockMemory, Error, Namespace, Put, Retain, Store};
use kvferry_testkit::forked::in_forked_process;
use kvferry_testkit::hanging::HangingDisk;
use kvferry_testkit::{Journal, PATIENCE, eventually};
use std::fs::{File, Permissions};
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};
use tracing::Level;

const LEN: u64 = 64 << 10;
/// Prompts that a test puts, and blocks of each.
const PROMPTS: u64 = 24;
const BLOCKS: usize = 6;

fn put_all(engine: &Engine) -> Put {
    let mut all = Put::default();
    for seed in 0..PROMPTS {
        let put = engine.put(&prompt(seed, BLOCKS), 0);
        all.stored += put.stored;
        all.present += put.present;
        all.refused += put.refused;
        all.failed += put.failed;
    }
    all
}

/// Leaves a store in the folder with what `put_all` puts.
fn drop_after_put(folder: &Folder) {
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!(put_all(&engine).stored, PROMPTS as usize * BLOCKS);
}

/// Gets each block by itself. `Engine::get` compares the bytes.
fn get_all(engine: &Engine) -> usize {
    let one = |seed, at| engine.get(&prompt(seed, at + 1), at);
    (0..PROMPTS).flat_map(|seed| (0..BLOCKS).map(move |at| one(seed, at))).sum()
}

fn segments(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).expect("a folder").map(|it| it.expect("a file").path());
    let is_segment = |path: &PathBuf| path.to_string_lossy().contains("segment-");
    let mut segments: Vec<_> = files.filter(is_segment).collect();
    segments.sort();
    segments
}

/// A small file system, mounted at a folder.
pub(crate) struct Tmpfs(Folder);

impl Tmpfs {
    /// `None`, with a line that says so, if this process may not mount.
    pub(crate) fn mount(name: &str, kib: u64) -> Option<Self> {
        Self::mount_with(name, &format!("size={kib}k"))
    }

    fn mount_with(name: &str, how: &str) -> Option<Self> {
        let folder = Folder::new(name);
        let mut mount = Command::new("mount");
        mount.args(["-t", "tmpfs", "-o", how, "kvferry"]).arg(folder.path());
        if mount.output().is_ok_and(|done| done.status.success()) {
            return Some(Self(folder));
        }
        println!("SKIPPED: {name}: this process may not mount a tmpfs with {how}");
        None
    }

    pub(crate) fn path(&self) -> &Path {
        self.0.path()
    }

    fn grow(&self, kib: u64) {
        self.remount(&format!("size={kib}k"));
    }

    fn remount(&self, how: &str) {
        let mut mount = Command::new("mount");
        mount.args(["-o", &format!("remount,{how}")]).arg(self.0.path());
        // The kernel gives back the files of an io_uring a little after it was closed.
        let began = Instant::now();
        loop {
            let done = mount.output().expect("mount runs");
            if done.status.success() {
                return;
            }
            let why = String::from_utf8_lossy(&done.stderr);
            assert!(began.elapsed() < PATIENCE / 2, "{why}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Puts prompts until `bytes` were stored. The store must free space for them.
fn fill(engine: &Engine, len: u64, bytes: u64) {
    let (mut stored, mut seed, began) = (0, 1000, Instant::now());
    while stored < bytes {
        let put = engine.put(&prompt(seed, 2), 0);
        stored += put.stored as u64 * len;
        if put.refused > 0 {
            assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
        seed += 1;
    }
}

#[test]
fn the_smallest_store_frees_space() {
    let folder = Folder::new("smallest");
    let engine = Engine::open(&options(folder.path(), 9 * MIB), LEN);
    fill(&engine, LEN, 40 * MIB);
}

#[test]
fn blocks_that_fill_segments_badly_leave_too() {
    // Two of these fit into a segment, and leave a fifth of it unused.
    let len = 400 << 10;
    let folder = Folder::new("badly");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), len);
    fill(&engine, len, 60 * MIB);
    engine.store.close();
}

#[test]
fn a_disk_that_others_fill_costs_puts_and_once_it_has_space_again_they_work() {
    let Some(disk) = Tmpfs::mount("full", 16 << 10) else { return };
    let engine = Engine::open(&options(disk.0.path(), 24 * MIB), LEN);
    for seed in 0..4 {
        assert_eq!(engine.put(&prompt(seed, BLOCKS), 0).stored, BLOCKS);
    }
    let others = disk.0.path().join("others");
    // It writes until the disk is full.
    let _ = std::fs::write(&others, vec![1; 16 << 20]);
    let put = put_all(&engine);
    assert!(put.refused > 0 && put.failed == 0, "{put:?}");
    assert!(get_all(&engine) > 0, "{:?}", engine.store.stats());
    std::fs::remove_file(&others).expect("written above");
    let began = Instant::now();
    while get_all(&engine) < PROMPTS as usize * BLOCKS {
        assert_eq!(put_all(&engine).failed, 0);
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_disk_that_is_full_when_a_segment_is_made_costs_no_other_segment() {
    let Some(disk) = Tmpfs::mount("last-segment", 7600) else { return };
    // Eight segments, of which seven fit.
    let engine = Engine::open(&options(disk.0.path(), 9 * MIB), LEN);
    let put_all = || {
        for seed in 0..PROMPTS {
            let prompt = prompt(seed, BLOCKS);
            engine.put(&prompt, 0);
            engine.get(&prompt, 0);
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    (0..20).for_each(|_| put_all());
    // At each moment, some segments have just been freed. One that is lost never has blocks again.
    let began = Instant::now();
    while engine.store.stats().blocks <= 40 {
        put_all();
        assert!(began.elapsed() < PATIENCE, "{:?}", engine.store.stats());
    }
    assert_eq!(engine.store.stats().corrupt, 0);
    disk.grow(16 << 10);
    eventually("blocks are stored again", || {
        fill(&engine, LEN, 40 * MIB);
        engine.store.stats().blocks > 40
    });
}

#[test]
fn on_a_disk_that_is_smaller_than_the_capacity_new_blocks_replace_old_ones() {
    let Some(disk) = Tmpfs::mount("smaller", 12 << 10) else { return };
    let engine = Engine::open(&options(disk.0.path(), 24 * MIB), LEN);
    for round in 0..4 {
        fill(&engine, LEN, 20 * MIB);
        let first = 10_000 * (1 + round);
        for seed in first..first + 4 {
            let prompt = prompt(seed, BLOCKS);
            let began = Instant::now();
            while engine.get(&prompt, 0) < BLOCKS {
                engine.put(&prompt, 0);
                assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
            }
        }
    }
    let stats = engine.store.stats();
    assert_eq!((stats.failed, stats.corrupt), (0, 0), "{stats:?}");
    assert!(stats.blocks * LEN > 5 * MIB && stats.disk_bytes <= 12 * MIB, "{stats:?}");
    // With more space, there are more segments.
    disk.grow(32 << 10);
    let began = Instant::now();
    while engine.store.stats().disk_bytes < 22 * MIB {
        fill(&engine, LEN, MIB);
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
    }
}

#[test]
fn under_a_quota_that_is_smaller_than_the_capacity_new_blocks_replace_old_ones() {
    let how = "size=64m,mode=777,usrquota,usrquota_block_hardlimit=12m";
    let Some(disk) = Tmpfs::mount_with("quota", how) else { return };
    as_plain_user("plain_user_has_a_quota", disk.0.path());
}

#[test]
#[ignore = "needs a user who has a quota: the test above"]
fn plain_user_has_a_quota() {
    let Some(folder) = std::env::var_os("KVFERRY_STORE_TEST_PLAIN") else { return };
    new_blocks_replace_old_ones(&Path::new(&folder).join("store"));
}

#[test]
fn where_a_device_answers_that_a_quota_is_reached_new_blocks_replace_old_ones() {
    let folder = Folder::new("quota-of-device");
    let Some(disk) = HangingDisk::mount(folder.path()) else { return };
    disk.quota(12 * MIB);
    new_blocks_replace_old_ones(folder.path());
}

/// A store in a folder with a quota of 12 MiB.
fn new_blocks_replace_old_ones(folder: &Path) {
    let engine = Engine::open(&options(folder, 24 * MIB), LEN);
    fill(&engine, LEN, 60 * MIB);
    let stats = engine.store.stats();
    assert_eq!((stats.failed, stats.corrupt), (0, 0), "{stats:?}");
    assert!(stats.blocks * LEN > 5 * MIB && stats.disk_bytes <= 12 * MIB, "{stats:?}");
}

#[test]
fn blocks_of_a_segment_that_is_cut_or_deleted_are_missed_and_can_be_put_again() {
    for is_deleted in [false, true] {
        let folder = Folder::new("cut");
        drop_after_put(&folder);
        let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
        let segments = segments(folder.path());
        for segment in &segments[1..4] {
            match is_deleted {
                true => std::fs::remove_file(segment).expect("it exists"),
                false => {
                    let file = File::options().write(true).open(segment).expect("it exists");
                    file.set_len(100_000).expect("it is cut");
                }
            }
        }
        let there = get_all(&engine);
        let all = PROMPTS as usize * BLOCKS;
        assert!((all / 2..all).contains(&there), "{there}");
        assert!(engine.store.stats().failed > 0);
        // A block is found missing once those before it are there again.
        let rounds = (0..3 * BLOCKS).take_while(|_| {
            assert_eq!(put_all(&engine).failed, 0);
            get_all(&engine) < all
        });
        assert!(rounds.count() < 3 * BLOCKS, "{:?}", engine.store.stats());
        // The space is used again.
        fill(&engine, LEN, 60 * MIB);
        assert_eq!(engine.store.stats().corrupt, 0);
    }
}

/// Runs an ignored test of this file as a user who is bound by permissions.
fn as_plain_user(name: &str, folder: &Path) {
    let this = std::env::current_exe().expect("the path of this program");
    let mut other = Command::new("setpriv");
    other.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]);
    other.arg(this).args(["--exact", &format!("faults::{name}"), "--ignored", "--nocapture"]);
    let Ok(done) = other.env("KVFERRY_STORE_TEST_PLAIN", folder).current_dir("/").output() else {
        println!("SKIPPED: {name}: this system has no setpriv");
        return;
    };
    let said = String::from_utf8_lossy(&done.stdout);
    // This user may not become another one, or that one may not run this program.
    if !said.contains("running 1 test") {
        let why = String::from_utf8_lossy(&done.stderr);
        println!("SKIPPED: {name}: can't run as another user: {why}");
        return;
    }
    assert!(done.status.success(), "{said}{}", String::from_utf8_lossy(&done.stderr));
}

fn set_mode(paths: &[PathBuf], mode: u32) {
    for path in paths {
        std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("own files");
    }
}

#[test]
fn a_store_that_its_user_may_only_read_opens_and_its_blocks_are_read() {
    as_plain_user("plain_user_reads", &std::env::temp_dir());
}

#[test]
#[ignore = "needs a user who is bound by permissions: the test above"]
fn plain_user_reads() {
    if std::env::var_os("KVFERRY_STORE_TEST_PLAIN").is_none() {
        return;
    }
    let folder = Folder::new("plain");
    drop_after_put(&folder);
    // New files can't be made, but those that exist can be written to: the store lives in them.
    let all: Vec<_> = std::fs::read_dir(folder.path()).expect("a folder").flatten().collect();
    let files: Vec<_> = all.iter().map(|file| file.path()).collect();
    let directory = [folder.path().to_path_buf()];
    set_mode(&directory, 0o555);
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!(get_all(&engine), PROMPTS as usize * BLOCKS);
    fill(&engine, LEN, 20 * MIB);
    assert_eq!(segments(folder.path()).len() + 4, files.len(), "no segment was made");
    put_all(&engine);
    let there = get_all(&engine);
    assert!(there > 0, "{:?}", engine.store.stats());
    drop(engine);
    // No file can be written to.
    set_mode(&files, 0o444);
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let there = get_all(&engine);
    assert!(there > 0, "{:?}", engine.store.stats());
    let put = engine.put(&prompt(PROMPTS, BLOCKS), 0);
    assert_eq!(put.failed, BLOCKS, "{put:?}");
    assert_eq!(get_all(&engine), there, "nothing was evicted in vain");
    // Segments are opened again for writing once they can be.
    set_mode(&files, 0o644);
    let began = Instant::now();
    while engine.get(&prompt(PROMPTS, BLOCKS), 0) < BLOCKS {
        engine.put(&prompt(PROMPTS, BLOCKS), 0);
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
    }
    assert_eq!(engine.store.stats().corrupt, 0);
    set_mode(&directory, 0o755);
    drop(engine);
    // While it is in use.
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let there = get_all(&engine);
    set_mode(&files, 0o444);
    assert_eq!(get_all(&engine), there);
    assert_eq!(engine.put(&prompt(PROMPTS + 1, BLOCKS), 0).failed, 0, "to a new segment");
}

#[test]
fn a_store_on_a_file_system_that_is_read_only_opens_and_its_blocks_are_read() {
    let Some(disk) = Tmpfs::mount("read-only", 32 << 10) else { return };
    drop_after_put(&disk.0);
    let with = options(disk.0.path(), 24 * MIB);
    disk.remount("ro");
    let engine = Engine::open(&with, LEN);
    let other = Engine::open(&with, LEN);
    for engine in [&engine, &other] {
        assert_eq!(get_all(engine), PROMPTS as usize * BLOCKS);
        for seed in PROMPTS..PROMPTS * 2 {
            let put = engine.put(&prompt(seed, BLOCKS), 0);
            assert_eq!(put.failed, BLOCKS, "{put:?}");
        }
        assert_eq!(get_all(engine), PROMPTS as usize * BLOCKS, "nothing was evicted in vain");
    }
    // A store of another format, or of a smaller capacity, can't be changed here.
    drop((engine, other));
    let engine = Engine::open(&options(disk.0.path(), 9 * MIB), LEN);
    assert!((1..PROMPTS as usize * BLOCKS).contains(&get_all(&engine)));
    drop(engine);
    let engine = Engine::open(&with, LEN);
    assert_eq!(get_all(&engine), PROMPTS as usize * BLOCKS);
    disk.remount("rw");
    let began = Instant::now();
    while engine.get(&prompt(PROMPTS, BLOCKS), 0) < BLOCKS {
        engine.put(&prompt(PROMPTS, BLOCKS), 0);
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
    }
    assert_eq!(get_all(&engine), PROMPTS as usize * BLOCKS);
}

#[test]
fn a_directory_that_is_removed_under_a_store_costs_hits_and_nothing_else() {
    let folder = Folder::new("removed");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!(put_all(&engine).stored, PROMPTS as usize * BLOCKS);
    std::fs::remove_dir_all(folder.path()).expect("it exists");
    for _ in 0..40 {
        let put = put_all(&engine);
        assert_eq!(put.stored + put.present + put.refused + put.failed, PROMPTS as usize * BLOCKS);
        get_all(&engine);
    }
    engine.store.close();
}

#[test]
fn flipped_bytes_of_segments_are_never_read_as_a_block_and_are_counted() {
    let folder = Folder::new("flipped");
    for seed in 0..8 {
        let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
        put_all(&engine);
        let mut rng = fastrand::Rng::with_seed(seed);
        let flip = |rng: &mut fastrand::Rng| {
            for path in segments(folder.path()) {
                let file = File::options().read(true).write(true).open(path).expect("a segment");
                for _ in 0..4 {
                    // One of two is in a page of the log: the first, or the last.
                    let at = match rng.u8(..4) {
                        0 => rng.u64(..4096),
                        1 => MIB - 1 - rng.u64(..4096),
                        _ => rng.u64(..MIB),
                    };
                    let mut byte = [0];
                    file.read_exact_at(&mut byte, at).expect("inside");
                    file.write_all_at(&[byte[0] ^ (1 << rng.u8(..8))], at).expect("inside");
                }
            }
        };
        flip(&mut rng);
        let before = get_all(&engine);
        let corrupt = engine.store.stats().corrupt;
        assert!(corrupt > 0 && before > 0, "{before} there, {corrupt} corrupt");
        flip(&mut rng);
        fill(&engine, LEN, 30 * MIB);
        get_all(&engine);
        drop(engine);
        flip(&mut rng);
        let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
        get_all(&engine);
    }
}

#[test]
fn a_newer_store_and_what_is_no_store_are_refused() {
    let folder = Folder::new("format");
    drop(Engine::open(&options(folder.path(), 24 * MIB), LEN));
    let file = folder.path().join("kvferry.store");
    let right = std::fs::read(&file).expect("made by the store");
    let mut newer = right.clone();
    newer[8..12].copy_from_slice(&9u32.to_le_bytes());
    newer[12..16].copy_from_slice(&(!9u32).to_le_bytes());
    for wrong in [newer, b"[package]".to_vec(), right[..40].to_vec()] {
        std::fs::write(&file, &wrong).expect("written");
        match Engine::try_open(&options(folder.path(), 24 * MIB), LEN) {
            Err(Error::Format { path, .. }) => assert_eq!(path, folder.path()),
            other => panic!("{:?}", other.err()),
        }
        assert_eq!(std::fs::read(&file).expect("there"), wrong, "it is as it was");
    }
    std::fs::write(&file, right).expect("written");
    drop(Engine::open(&options(folder.path(), 24 * MIB), LEN));
}

#[test]
fn namespaces_with_equal_hashes_have_blocks_of_their_own() {
    let folder = Folder::new("equal-hashes");
    let engine = Engine::open(&options(folder.path(), 32 * MIB), LEN);
    let prompt = prompt(1, 1);
    let spaces: Vec<_> =
        (0..4).map(|shard| engine.store.space(&Namespace::new("model").shard(shard, 4))).collect();
    for (at, space) in spaces.iter().enumerate() {
        engine.fill(at, &content(&[at as u8; 32], LEN));
        let put = space.put(&prompt, 0, &[engine.memory(at)], Retain::default());
        assert_eq!(put.expect("a put").stored, 1);
    }
    for (at, space) in spaces.iter().enumerate() {
        assert_eq!(space.get(&prompt, 0, &[engine.memory(10)]).expect("a get"), 1);
        assert!(engine.bytes(10) == content(&[at as u8; 32], LEN));
    }
}

#[test]
fn sixteen_threads_get_one_block_a_thousand_times() {
    let folder = Folder::new("one-block");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let prompt = prompt(1, 1);
    engine.put(&prompt, 0);
    std::thread::scope(|scope| {
        for thread in 0..16 {
            let (engine, prompt) = (&engine, &prompt);
            scope.spawn(move || {
                for _ in 0..1000 / 16 {
                    engine.fill(thread, &[0; 16]);
                    let got = engine.kv.get(prompt, 0, &[engine.memory(thread)]);
                    assert_eq!(got.expect("a get"), 1);
                    assert!(engine.bytes(thread) == content(&prompt[0], LEN));
                }
            });
        }
    });
    assert_eq!(engine.store.stats().hits, 16 * (1000 / 16));
}

#[test]
fn memory_that_is_not_registered_is_an_error_and_costs_no_block() {
    let folder = Folder::new("unregistered");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let prompt = prompt(1, 2);
    engine.put(&prompt[..1], 0);
    let region = engine.agent.allocate(2 * LEN as usize, Access::NONE).expect("memory");
    engine.agent.unregister(&region).expect("registered");
    let memory = [BlockMemory::new(&region, 0, LEN), BlockMemory::new(&region, LEN, LEN)];
    let got = engine.kv.get(&prompt[..1], 0, &memory[..1]);
    assert!(matches!(got, Err(Error::Agent(_))), "{got:?}");
    let put = engine.kv.put(&prompt, 1, &memory[1..], Retain::default());
    assert!(matches!(put, Err(Error::Agent(_))), "{put:?}");
    let stats = engine.store.stats();
    assert_eq!((stats.failed, stats.corrupt, stats.blocks), (0, 0, 1));
    assert_eq!(engine.get(&prompt, 0), 1);
}

#[test]
fn calls_in_a_forked_process_fail_and_the_parent_goes_on() {
    let folder = Folder::new("forked");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let prompt = prompt(1, 4);
    engine.put(&prompt, 0);
    let memory = [engine.memory(0)];
    let watch = engine.store.watch(&[vec![engine.kv.clone()]]).expect("a watch");
    watch.add(0, &prompt).expect("a group");
    assert!(watch.reports() > 0 && engine.store.stats().stored > 0);
    let refused = in_forked_process(|| {
        let calls = [
            engine.kv.lookup(&prompt).err(),
            engine.kv.get(&prompt, 0, &memory).err(),
            engine.kv.put(&prompt, 0, &memory, Retain::default()).err(),
            engine.kv.get_async(&prompt, 0, &memory).err(),
            engine.kv.put_async(&prompt, 0, &memory, Retain::default(), Duration::ZERO).err(),
            engine.store.sync().err(),
            watch.add(0, &prompt).err(),
            watch.gather(Duration::MAX).err(),
            watch.reset(&[]).err(),
        ];
        let is_empty = watch.take(100).is_empty() && watch.reports() == 0;
        let has_stats = engine.store.stats() != kvferry_store::Stats::default();
        if has_stats || !is_empty {
            return 0;
        }
        engine.store.close();
        calls.iter().flatten().filter(|e| matches!(e, Error::Closed)).count() as u8
    });
    assert_eq!(refused, Some(9));
    assert_eq!(engine.get(&prompt, 0), 4);
    drop(watch);
    assert_eq!(put_all(&engine).stored, PROMPTS as usize * BLOCKS - 4);
    // The forked process did not keep the store.
    drop(engine);
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!((engine.get(&prompt, 0), engine.store.stats().is_keeper), (4, 1));
}

#[test]
fn an_operation_that_runs_during_a_fork_is_closed_in_the_forked_process() {
    let folder = Folder::new("forked-pending");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let prompt = prompt(1, 8);
    let memory: Vec<_> = (0..8).map(|block| engine.memory(block)).collect();
    let done =
        engine.kv.put_async(&prompt, 0, &memory, Retain::default(), Duration::ZERO).expect("a put");
    assert!(done.wait(None).is_some());
    // Many, so that some still wait.
    let gets = || engine.kv.get_async(&prompt, 0, &memory).expect("a get");
    let gets: Vec<_> = (0..200).map(|_| gets()).collect();
    let ended = in_forked_process(|| {
        let is_known = done.wait(None).is_some_and(|it| it.is_ok());
        let ended = |it: &&kvferry_store::Pending<usize>| it.wait(None).is_some();
        u8::from(is_known) + gets.iter().filter(ended).count() as u8
    });
    assert_eq!(ended, Some(201));
    for get in gets {
        assert_eq!(*get.wait(None).expect("it ends").as_ref().as_ref().expect("no error"), 8);
    }
}

#[test]
fn a_store_with_more_blocks_than_it_may_have_keeps_those_of_the_newest_segments() {
    let folder = Folder::new("newest");
    let with = |blocks| options(folder.path(), 24 * MIB).blocks_max(blocks);
    let engine = Engine::open(&with(4096), 4096);
    for seed in 0..300 {
        assert_eq!(engine.put(&prompt(seed, BLOCKS), 0).stored, BLOCKS);
    }
    drop(engine);
    let engine = Engine::open(&with(1024), 4096);
    let there = |seeds: std::ops::Range<u64>| -> usize {
        seeds.map(|seed| engine.get(&prompt(seed, BLOCKS), 0)).sum()
    };
    assert_eq!(there(180..300), 120 * BLOCKS, "{:?}", engine.store.stats());
    assert_eq!(there(0..50), 0);
    // Those that were left out leave their segments.
    drop(engine);
    let engine = Engine::open(&with(1024), LEN);
    fill(&engine, LEN, 40 * MIB);
    assert_eq!(engine.store.stats().corrupt, 0);
}

#[test]
fn an_operation_in_the_background_with_a_wrong_argument_is_refused_at_once() {
    let folder = Folder::new("wrong");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let prompt = prompt(1, 2);
    let region = engine.agent.allocate(4096, Access::NONE).expect("memory");
    let long = [(); 2].map(|()| BlockMemory::new(&region, 0, u64::MAX));
    for memory in [&long[..], &[engine.memory(0), engine.memory(1), engine.memory(2)]] {
        let put = engine.kv.put_async(&prompt, 0, memory, Retain::default(), Duration::ZERO);
        assert!(matches!(put, Err(Error::InvalidArgument(_))));
        let get = engine.kv.get_async(&prompt, 0, memory);
        assert!(matches!(get, Err(Error::InvalidArgument(_))));
    }
}

/// The warnings of the store while this thread runs `run`.
pub(crate) fn warned<T>(run: impl FnOnce() -> T) -> (T, Vec<String>) {
    let warnings = Journal::new("kvferry_store", Level::WARN);
    let done = tracing::subscriber::with_default(warnings.clone(), run);
    (done, warnings.take())
}

#[test]
fn many_faults_of_a_disk_are_one_log_line() {
    let folder = Folder::new("one-line");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!(put_all(&engine).stored, PROMPTS as usize * BLOCKS);
    for segment in segments(folder.path()) {
        let file = File::options().write(true).open(segment).expect("it exists");
        file.set_len(4096).expect("it is cut");
    }
    // Each prompt at once: a line that comes 10 s later is another one.
    let get = |seed| engine.get(&prompt(seed, BLOCKS), 0);
    let (there, warnings) = warned(|| (0..PROMPTS).map(get).sum::<usize>());
    assert_eq!((there, warnings.len()), (0, 1), "{warnings:?}");
    // A footer that is written behind the cut makes the file whole again: then it reads as zeros.
    let stats = engine.store.stats();
    assert!(stats.failed + stats.corrupt >= PROMPTS, "{stats:?}");
}

#[test]
fn a_store_with_more_processes_than_segments_takes_new_blocks() {
    let folder = Folder::new("more-processes");
    // Eight segments.
    let with = options(folder.path(), 9 * MIB);
    let engines: Vec<_> = (0..10).map(|_| Engine::open(&with, LEN)).collect();
    for round in 0..4 {
        for (number, engine) in (0u64..).zip(&engines) {
            let (one, began) = (prompt(1 + round * 100 + number, 2), Instant::now());
            loop {
                let put = engine.put(&one, 0);
                if put.stored + put.present == 2 {
                    break;
                }
                assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}
