//! Stores in several directories.

mod networks;

use crate::faults::{Tmpfs, warned};
use crate::{Engine, Folder, MIB, options, prompt};
use kvferry_store::{Error, StoreOptions};
use kvferry_testkit::{PATIENCE, Watchdog, eventually};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

const LEN: u64 = 64 << 10;
const PROMPTS: u64 = 24;
const BLOCKS: usize = 6;

/// The directories of a store, in a folder.
fn directories(folder: &Folder, names: &[&str]) -> StoreOptions {
    directories_in(folder.path(), names)
}

fn directories_in(folder: &Path, names: &[&str]) -> StoreOptions {
    let mut paths = names.iter().map(|name| folder.join(name));
    let first = options(&paths.next().expect("a name"), 24 * MIB);
    paths.fold(first, StoreOptions::and_directory)
}

/// Puts blocks into a store, which is closed then.
fn made(options: &StoreOptions) {
    let engine = Engine::open(options, LEN);
    let stored: usize = (0..PROMPTS).map(|seed| engine.put(&prompt(seed, BLOCKS), 0).stored).sum();
    assert_eq!(stored, PROMPTS as usize * BLOCKS);
}

fn found(engine: &Engine) -> usize {
    let one = |seed, at| engine.get(&prompt(seed, at + 1), at);
    (0..PROMPTS).flat_map(|seed| (0..BLOCKS).map(move |at| one(seed, at))).sum()
}

/// All files below a folder, with their bytes.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("it can be read").path();
        match path.is_dir() {
            true => files.extend(self::files(&path)),
            false => drop(files.insert(path.clone(), std::fs::read(path).expect("a file"))),
        }
    }
    files
}

/// What is wrong with a directory, by its name.
fn refused(folder: &Folder, names: &[&str]) -> (String, String) {
    let before = files(folder.path());
    let refused = Engine::try_open(&directories(folder, names), LEN).err();
    assert!(files(folder.path()) == before, "{names:?}: nothing is changed");
    match refused {
        Some(Error::Format { path, what }) => {
            let name = path.file_name().expect("a name").to_str().expect("plain letters");
            (name.to_owned(), what)
        }
        other => panic!("{names:?}: {other:?}"),
    }
}

/// Makes a store what a release wrote that knew format 2.
fn downgrade_to_2(folder: &Folder, names: &[&str]) {
    for name in names {
        let file = folder.path().join(name).join("kvferry.store");
        let mut bytes = std::fs::read(&file).expect("a superblock");
        bytes.truncate(56);
        bytes[8..16].copy_from_slice(b"\x02\0\0\0\xfd\xff\xff\xff");
        let sum = crc_fast::crc64_nvme(&bytes);
        bytes.extend(sum.to_le_bytes());
        std::fs::write(file, bytes).expect("written");
    }
}

/// Makes a store what the first release wrote: its first directory has a superblock of format 1, the others none.
fn downgrade(folder: &Folder, names: &[&str]) {
    for (number, name) in names.iter().enumerate() {
        let file = folder.path().join(name).join("kvferry.store");
        let mut bytes = std::fs::read(&file).expect("a superblock");
        if number > 0 {
            std::fs::remove_file(file).expect("it was read");
            continue;
        }
        bytes.truncate(48);
        bytes[8..16].copy_from_slice(b"\x01\0\0\0\xfe\xff\xff\xff");
        let sum = crc_fast::crc64_nvme(&bytes);
        bytes.extend(sum.to_le_bytes());
        std::fs::write(file, bytes).expect("written");
    }
}

#[test]
fn directories_may_be_given_in_any_order() {
    let folder = Folder::new("order");
    made(&directories(&folder, &["a", "b", "c"]));
    for names in [["a", "b", "c"], ["b", "c", "a"], ["c", "b", "a"], ["b", "a", "c"]] {
        let engine = Engine::open(&directories(&folder, &names), LEN);
        assert_eq!(found(&engine), PROMPTS as usize * BLOCKS, "{names:?}");
        // Also while another process has it open.
        let other = Engine::open(&directories(&folder, &["c", "a", "b"]), LEN);
        assert_eq!(found(&other), PROMPTS as usize * BLOCKS, "{names:?}");
    }
}

#[test]
fn processes_that_make_a_store_at_once_with_its_directories_in_another_order_make_one() {
    for _ in 0..15 {
        let folder = Folder::new("at-once");
        let orders = [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"], ["c", "b", "a"]];
        let with = orders.map(|names| directories(&folder, &names));
        let engines: Vec<_> = std::thread::scope(|scope| {
            let opened: Vec<_> =
                with.iter().map(|with| scope.spawn(|| Engine::open(with, LEN))).collect();
            opened.into_iter().map(|it| it.join().expect("a store")).collect()
        });
        assert_eq!(engines[0].put(&prompt(1, BLOCKS), 0).stored, BLOCKS);
        for engine in &engines {
            assert_eq!(engine.get(&prompt(1, BLOCKS), 0), BLOCKS);
            assert_eq!(engine.store.stats().processes, 4);
        }
    }
}

#[test]
fn directories_that_are_not_those_of_one_store_are_refused_and_nothing_is_changed() {
    let folder = Folder::new("refused");
    made(&directories(&folder, &["a", "b", "c"]));
    made(&directories(&folder, &["d", "e"]));
    let copied = folder.path().join("copy");
    std::fs::create_dir(&copied).expect("a folder");
    for (from, bytes) in files(&folder.path().join("b")) {
        std::fs::write(copied.join(from.file_name().expect("a file")), bytes).expect("written");
    }
    let stray = folder.path().join("stray");
    std::fs::create_dir(&stray).expect("a folder");
    let segment = "segment-00000001";
    std::fs::copy(folder.path().join("b").join(segment), stray.join(segment)).expect("a copy");
    std::os::unix::fs::symlink(folder.path().join("a"), folder.path().join("link"))
        .expect("a link");

    let refused = |names: &[&str]| refused(&folder, names);
    let cases: &[(&[&str], &str, &str)] = &[
        (&["a"], "a", "has 3 directories, 1 were given: give all of them"),
        (&["b", "a"], "b", "has 3 directories, 2 were given"),
        (&["a", "b", "c", "new"], "a", "has 3 directories, 4 were given"),
        (&["a", "b", "a"], "a", "given twice"),
        (&["link", "b", "a"], "a", "given twice"),
        (&["a", "d", "c"], "d", "another store"),
        (&["new", "a", "b", "d"], "d", "another store"),
        (&["new", "b"], "b", "has 3 directories, 2 were given"),
        (&["d", "b"], "b", "another store"),
        (&["a", "b", "copy"], "copy", "one is a copy"),
        (&["stray"], "stray", "segments of a store"),
        (&["new", "stray"], "stray", "segments of a store"),
        (&["d", "stray"], "stray", "segments of another store"),
    ];
    for (names, path, what) in cases {
        let (named, said) = refused(names);
        assert!(named == *path && said.contains(what), "{names:?}: {named}: {said}");
    }
    assert!(!folder.path().join("new").exists(), "no directory is made");
    assert_eq!(found(&Engine::open(&directories(&folder, &["a", "b", "c"]), LEN)), 144);
    assert_eq!(found(&Engine::open(&directories(&folder, &["e", "d"]), LEN)), 144);
}

#[test]
fn a_store_of_format_1_that_seems_to_lack_directories_can_be_opened_by_its_owner() {
    let folder = Folder::new("format-1-gaps");
    made(&directories(&folder, &["a"]));
    downgrade(&folder, &["a"]);
    // As after `kvferry store gc --namespace`.
    for segment in (1..24).step_by(2) {
        let _ = std::fs::remove_file(folder.path().join(format!("a/segment-{segment:08}")));
    }
    let (_, said) = refused(&folder, &["a"]);
    assert!(said.ends_with("make an empty file segment-00000001 in it"), "{said}");
    std::fs::write(folder.path().join("a/segment-00000001"), "").expect("written");
    let engine = Engine::open(&directories(&folder, &["a"]), LEN);
    assert!(found(&engine) > BLOCKS);
}

#[test]
fn a_store_of_format_1_is_upgraded_and_has_its_blocks() {
    for (given, names) in [
        (["a", "b", "c"], ["a", "b", "c"]),
        (["c", "a", "b"], ["a", "b", "c"]),
        (["b", "c", "a"], ["a", "b", "c"]),
    ] {
        let folder = Folder::new("format-1");
        made(&directories(&folder, &names));
        downgrade(&folder, &names);
        for (wrong, what) in [
            (&["a"][..], "with 3 directories, 1 were given"),
            (&["a", "b"], "not those of"),
            (&["a", "b", "c", "d"], "not those of"),
        ] {
            let (_, said) = refused(&folder, wrong);
            assert!(said.contains(what), "{wrong:?}: {said}");
        }
        let engine = Engine::open(&directories(&folder, &given), LEN);
        assert_eq!(found(&engine), PROMPTS as usize * BLOCKS);
        drop(engine);
        for (number, name) in (0u32..).zip(names) {
            let file = folder.path().join(name).join("kvferry.store");
            let bytes = std::fs::read(file).expect("a superblock");
            assert_eq!((bytes[8], bytes.len()), (3, 72));
            assert_eq!(bytes[48..56], [number.to_le_bytes(), 3u32.to_le_bytes()].concat());
        }
        assert_eq!(found(&Engine::open(&directories(&folder, &given), LEN)), 144);
    }
}

/// Puts the blocks again and again until all are found.
fn put_until_found(engine: &Engine) {
    let began = Instant::now();
    while found(engine) < PROMPTS as usize * BLOCKS {
        for seed in 0..PROMPTS {
            engine.put(&prompt(seed, BLOCKS), 0);
        }
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
    }
}

fn has_segments(directory: &Path) -> bool {
    let names = std::fs::read_dir(directory).expect("a folder").map(|it| it.expect("a file"));
    names.into_iter().any(|it| it.file_name().to_string_lossy().starts_with("segment-"))
}

#[test]
fn a_directory_that_is_lost_costs_its_own_blocks_and_an_empty_one_takes_its_place() {
    let names = ["a", "b", "c"];
    for lost in names {
        let folder = Folder::new("lost");
        let with = directories(&folder, &names);
        made(&with);
        let (path, away) = (folder.path().join(lost), folder.path().join("away"));
        std::fs::rename(&path, &away).expect("it exists");
        if lost == "b" {
            std::fs::write(&path, "no directory").expect("written");
        }
        let (engine, warnings) = warned(|| Engine::open(&with, LEN));
        let stats = engine.store.stats();
        assert_eq!((warnings.len(), stats.lost_directories), (1, 1), "{warnings:?}");
        let there = found(&engine);
        assert!((1..PROMPTS as usize * BLOCKS).contains(&there), "{there}");
        put_until_found(&engine);
        let other = Engine::open(&directories(&folder, &["c", "b", "a"]), LEN);
        assert_eq!(found(&other), PROMPTS as usize * BLOCKS);
        assert_eq!(engine.store.stats().corrupt, 0);
        drop((engine, other));
        assert_eq!(path.exists(), lost == "b", "no directory is made in its place");
        let _ = std::fs::remove_file(&path);
        std::fs::create_dir(&path).expect("a folder");
        let engine = Engine::open(&with.clone().adopt_empty(true), LEN);
        assert_eq!(engine.store.stats().lost_directories, 0);
        assert_eq!(found(&engine), PROMPTS as usize * BLOCKS);
        for seed in 100..130 {
            engine.put(&prompt(seed, BLOCKS), 0);
        }
        assert!(has_segments(&path), "{lost} was adopted");
    }
}

#[test]
fn a_directory_that_fails_while_in_use_costs_its_own_blocks_until_it_is_back() {
    let folder = Folder::new("fails");
    let with = directories(&folder, &["a", "b", "c"]);
    let engine = Engine::open(&with, LEN);
    put_until_found(&engine);
    let (path, away) = (folder.path().join("b"), folder.path().join("away"));
    std::fs::rename(&path, &away).expect("it exists");
    // As an empty mount point.
    std::fs::create_dir(&path).expect("a folder");
    for seed in 1000..1100 {
        engine.put(&prompt(seed, BLOCKS), 0);
    }
    put_until_found(&engine);
    assert!(!has_segments(&path), "nothing is written to what is not the store's");
    std::fs::remove_dir(&path).expect("it is empty");
    std::fs::rename(&away, &path).expect("it exists");
    let segments = || std::fs::read_dir(&path).expect("a folder").count();
    let (before, began) = (segments(), Instant::now());
    let mut seed = 2000;
    while segments() == before && engine.store.stats().disk_bytes < 22 * MIB {
        engine.put(&prompt(seed, BLOCKS), 0);
        seed += 1;
        assert!(began.elapsed() < PATIENCE / 2, "{:?}", engine.store.stats());
    }
    put_until_found(&engine);
    assert_eq!(engine.store.stats().corrupt, 0);
}

#[test]
fn a_process_joins_where_the_first_directory_was_lost_after_others_had_opened_the_store() {
    for lost in ["a", "b", "c"] {
        let folder = Folder::new("lost-later");
        let with = directories(&folder, &["a", "b", "c"]);
        made(&with);
        let engine = Engine::open(&with, LEN);
        let (path, away) = (folder.path().join(lost), folder.path().join("away"));
        std::fs::rename(&path, &away).expect("it exists");
        let other = Engine::open(&with, LEN);
        assert_eq!(other.store.stats().processes, 2, "{lost}");
        assert!(found(&other) >= BLOCKS, "{lost}");
        drop((engine, other));
    }
}

#[test]
fn a_directory_that_comes_back_gives_neither_a_second_keeper_nor_a_way_to_clean_a_store_in_use() {
    let folder = Folder::new("back");
    let with = directories(&folder, &["a", "b", "c"]);
    made(&with);
    let (path, away) = (folder.path().join("a"), folder.path().join("away"));
    std::fs::rename(&path, &away).expect("it exists");
    let engine = Engine::open(&with, LEN);
    std::fs::rename(&away, &path).expect("it exists");
    let paths = ["a", "b", "c"].map(|name| folder.path().join(name));
    let cleaned = kvferry_store::clean::Cleaner::open(&paths);
    assert!(matches!(cleaned, Err(Error::InUse { .. })), "{cleaned:?}");
    // Of another network namespace, this process could not ask the keeper; its locks say that there is one.
    let members = ["a", "b", "c"].map(|name| {
        let path = folder.path().join(name).join("members");
        kvferry_sys::lock::LockFile::open(&path).expect("a file")
    });
    let free = members.each_ref().map(|it| it.try_exclusive().expect("locks"));
    assert!(free.contains(&false), "{free:?}");
    drop(members);
    let other = Engine::open(&with, LEN);
    assert_eq!((other.store.stats().processes, other.store.stats().is_keeper), (2, 0));
    drop((engine, other));
}

#[test]
fn a_directory_that_the_store_makes_and_the_files_in_it_are_for_their_user_alone() {
    use std::os::unix::fs::PermissionsExt;
    let folder = Folder::new("modes");
    made(&directories(&folder, &["a/b", "c"]));
    let mode = |path: &Path| path.metadata().expect("it exists").permissions().mode() & 0o777;
    for name in ["a/b", "c"] {
        let path = folder.path().join(name);
        assert_eq!(mode(&path), 0o700, "{name}");
        for file in files(&path).into_keys() {
            assert_eq!(mode(&file), 0o600, "{}", file.display());
        }
    }
}

#[test]
fn a_store_of_format_2_is_upgraded_and_each_directory_gets_an_id() {
    let names = ["a", "b", "c"];
    let folder = Folder::new("format-2");
    let with = directories(&folder, &names);
    made(&with);
    downgrade_to_2(&folder, &names);
    assert_eq!(found(&Engine::open(&with, LEN)), PROMPTS as usize * BLOCKS);
    let mut ids = std::collections::BTreeSet::new();
    for name in names {
        let bytes = std::fs::read(folder.path().join(name).join("kvferry.store")).expect("a file");
        assert_eq!((bytes[8], bytes.len()), (3, 72));
        ids.insert(bytes[56..64].to_vec());
    }
    assert!(ids.len() == 3 && !ids.contains(&vec![0; 8]), "{ids:?}");
    // A device that is not mounted when the store is upgraded.
    downgrade_to_2(&folder, &names);
    let (path, away) = (folder.path().join("b"), folder.path().join("away"));
    std::fs::rename(&path, &away).expect("it exists");
    std::fs::create_dir(&path).expect("a folder");
    let engine = Engine::open(&with, LEN);
    assert_eq!(engine.store.stats().lost_directories, 1);
    drop(engine);
    std::fs::remove_dir(&path).expect("it is empty");
    std::fs::rename(&away, &path).expect("it exists");
    assert_eq!(found(&Engine::open(&with, LEN)), PROMPTS as usize * BLOCKS);
}

/// The segments in a directory, with their bytes.
fn segments(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = files(directory);
    files.retain(|path, _| path.to_string_lossy().contains("segment-"));
    files
}

#[test]
fn the_folder_below_a_device_that_is_not_mounted_is_lost_and_the_device_is_used_once_it_is_there() {
    let folder = Folder::new("unmounted");
    let with = directories(&folder, &["a", "b", "c"]);
    made(&with);
    let (path, away) = (folder.path().join("b"), folder.path().join("away"));
    std::fs::rename(&path, &away).expect("it exists");
    std::fs::create_dir(&path).expect("a folder");
    let (engine, warnings) = warned(|| Engine::open(&with, LEN));
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    let said = format!("the store has lost {}", path.display());
    assert!(warnings[0].contains(&said), "{warnings:?}");
    for what in ["it is empty: mount its device", "kvferry store adopt", "adopt_empty"] {
        assert!(warnings[0].contains(what), "{warnings:?}");
    }
    // The one that comes second adopts nothing: the first one goes on without the directory.
    let other = Engine::open(&with.clone().adopt_empty(true), LEN);
    for engine in [&engine, &other] {
        assert_eq!(engine.store.stats().lost_directories, 1);
        put_until_found(engine);
    }
    for seed in 1000..1100 {
        engine.put(&prompt(seed, BLOCKS), 0);
        other.put(&prompt(seed + 100, BLOCKS), 0);
    }
    assert!(!has_segments(&path) && !path.join("kvferry.store").exists(), "nothing is adopted");
    drop(other);
    std::fs::remove_dir_all(&path).expect("it exists");
    std::fs::rename(&away, &path).expect("it exists");
    let other = Engine::open(&with, LEN);
    assert_eq!(other.store.stats().lost_directories, 0);
    let before = segments(&path);
    let mut seed = 2000;
    eventually("the device is written to", || {
        seed += 1;
        engine.put(&prompt(seed, BLOCKS), 0);
        segments(&path) != before
    });
    put_until_found(&engine);
    put_until_found(&other);
    assert_eq!(engine.store.stats().corrupt + other.store.stats().corrupt, 0);
    drop((engine, other));
    assert_eq!(Engine::open(&with, LEN).store.stats().lost_directories, 0);
}

#[test]
fn a_store_that_must_exist_is_not_made_anew_in_the_folder_below_its_device() {
    let folder = Folder::new("must-exist");
    for names in [&["a"][..], &["b", "c"]] {
        let with = directories(&folder, names);
        let must = with.clone().must_exist(true);
        let paths: Vec<_> = names.iter().map(|it| folder.path().join(it)).collect();
        let refused = || match Engine::try_open(&must, LEN).err() {
            Some(error @ Error::NoStore { .. }) => error.to_string(),
            other => panic!("{names:?}: {other:?}"),
        };
        for path in &paths {
            assert!(refused().contains(&path.display().to_string()), "{}", refused());
            assert!(!path.exists(), "nothing is made");
        }
        made(&with);
        let away: Vec<_> = paths.iter().map(|it| it.with_extension("away")).collect();
        for (path, away) in paths.iter().zip(&away) {
            std::fs::rename(path, away).expect("it exists");
            std::fs::create_dir(path).expect("a folder");
        }
        assert!(refused().contains("mount the device"), "{}", refused());
        assert!(paths.iter().all(|it| files(it).is_empty()), "nothing is changed");
        for (path, away) in paths.iter().zip(&away) {
            std::fs::remove_dir(path).expect("it is empty");
            std::fs::rename(away, path).expect("it exists");
        }
        assert_eq!(found(&Engine::open(&must, LEN)), PROMPTS as usize * BLOCKS);
    }
}

#[test]
fn a_device_that_is_mounted_over_an_adopted_directory_is_told_apart() {
    let folder = Folder::new("mounted-over");
    let with = directories(&folder, &["a", "b", "c"]);
    made(&with);
    let path = folder.path().join("b");
    let (device, below) = (folder.path().join("device"), folder.path().join("below"));
    std::fs::rename(&path, &device).expect("it exists");
    std::fs::create_dir(&path).expect("a folder");
    let engine = Engine::open(&with.clone().adopt_empty(true), LEN);
    put_until_found(&engine);
    let mut seed = 1000;
    eventually("the directory is used", || {
        seed += 1;
        engine.put(&prompt(seed, BLOCKS), 0);
        has_segments(&path)
    });
    std::fs::rename(&path, &below).expect("it exists");
    std::fs::rename(&device, &path).expect("it exists");
    let before = segments(&path);
    assert!(!before.is_empty());
    let (other, warnings) = warned(|| Engine::open(&with, LEN));
    assert_eq!(other.store.stats().lost_directories, 1, "{warnings:?}");
    let said = "b is not on the device that the other processes of the store found there";
    assert!(warnings.len() == 1 && warnings[0].contains(said), "{warnings:?}");
    for seed in 3000..3100 {
        engine.put(&prompt(seed, BLOCKS), 0);
        other.put(&prompt(seed + 100, BLOCKS), 0);
    }
    for engine in [&engine, &other] {
        put_until_found(engine);
        assert_eq!(engine.store.stats().corrupt, 0);
    }
    drop((engine, other));
    assert!(segments(&path) == before, "no file of the device was changed or read as another");
    // From the next start on, the device is used.
    let engine = Engine::open(&with, LEN);
    assert_eq!((engine.store.stats().lost_directories, engine.store.stats().corrupt), (0, 0));
    put_until_found(&engine);
    assert_eq!(engine.store.stats().corrupt, 0);
}

/// A folder at which a device is mounted, and unmounted when this is dropped.
struct Mount(PathBuf);

impl Mount {
    fn new(device: &Path, at: &Path) -> Self {
        run(Command::new("mount").arg("--bind").args([device, at]));
        Self(at.to_path_buf())
    }
}

impl Drop for Mount {
    /// Files of it that are open stay open.
    fn drop(&mut self) {
        run(Command::new("umount").arg("-l").arg(&self.0));
    }
}

fn run(command: &mut Command) {
    let done = command.output().expect("a program of each system");
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
}

#[test]
fn while_a_device_is_unmounted_three_others_serve_and_it_is_used_again_once_it_is_mounted() {
    let Some(device) = Tmpfs::mount("unmounts-device", 32 << 10) else { return };
    let folder = Folder::new("unmounts");
    let with = directories(&folder, &["a", "b", "c", "d"]);
    let path = folder.path().join("b");
    std::fs::create_dir(&path).expect("a folder");
    let mount = Mount::new(device.path(), &path);
    let engine = Engine::open(&with, LEN);
    put_until_found(&engine);
    let of_device = || segments(device.path());
    assert!(!of_device().is_empty() && engine.store.stats().lost_directories == 0);

    drop(mount);
    assert!(files(&path).is_empty(), "the folder below the device");
    let (other, warnings) = warned(|| Engine::open(&with, LEN));
    assert_eq!(other.store.stats().lost_directories, 1, "{warnings:?}");
    for seed in 1000..1100 {
        engine.put(&prompt(seed, BLOCKS), 0);
        other.put(&prompt(seed + 100, BLOCKS), 0);
    }
    for engine in [&engine, &other] {
        put_until_found(engine);
        assert_eq!(engine.store.stats().corrupt, 0);
    }
    assert!(files(&path).is_empty(), "nothing is written to the folder below the device");

    // The process that has the store open uses it again.
    let mut mount = Mount::new(device.path(), &path);
    let before = of_device();
    let mut seed = 2000;
    eventually("the device is written to", || {
        seed += 1;
        engine.put(&prompt(seed, BLOCKS), 0);
        of_device() != before
    });
    put_until_found(&engine);
    put_until_found(&other);
    assert_eq!(engine.store.stats().corrupt + other.store.stats().corrupt, 0);
    drop((engine, other));
    let (engine, warnings) = warned(|| Engine::open(&with, LEN));
    assert_eq!((engine.store.stats().lost_directories, warnings), (0, Vec::new()));
    drop(engine);

    // Unmounted while no process has the store open: its blocks are missed, and come back.
    let mut seeds = 3000..;
    let mut come_back = || {
        let engine = Engine::open(&with, LEN);
        for seed in seeds.by_ref().take(20) {
            engine.put(&prompt(seed, BLOCKS), 0);
        }
        put_until_found(&engine);
        drop(engine);
        let count = || {
            let (engine, warnings) = warned(|| Engine::open(&with, LEN));
            assert_eq!(engine.store.stats().corrupt, 0);
            (found(&engine), warnings)
        };
        run(Command::new("umount").arg("-l").arg(&mount.0));
        let (without, warnings) = count();
        let said = format!("the store has lost {}", path.display());
        assert!(warnings.len() == 1 && warnings[0].contains(&said), "{warnings:?}");
        assert!(files(&path).is_empty());
        std::mem::forget(std::mem::replace(&mut mount, Mount::new(device.path(), &path)));
        let (with, _) = count();
        println!("{without} without the device, {with} with it");
        without < with
    };
    // The keeper may have removed all of these blocks that were on the device.
    assert!((0..20).any(|_| come_back()), "no block of the device is missed");
}

#[test]
fn an_empty_directory_is_adopted_only_where_its_number_is_certain() {
    let folder = Folder::new("adopt-beside-lost");
    made(&directories(&folder, &["a", "b", "c"]));
    let (lost, away) = (folder.path().join("b"), folder.path().join("away"));
    std::fs::rename(&lost, &away).expect("it exists");
    let empty = folder.path().join("c");
    std::fs::remove_dir_all(&empty).expect("it exists");
    std::fs::create_dir(&empty).expect("a folder");
    // In another order than when it was made: the places tell nothing.
    let with = directories(&folder, &["c", "a", "b"]).adopt_empty(true);
    let (engine, warnings) = warned(|| Engine::open(&with, LEN));
    assert_eq!(engine.store.stats().lost_directories, 2);
    let said = "it is empty, and is not adopted while another directory of the store is lost";
    assert!(warnings.iter().any(|it| it.contains(said)), "{warnings:?}");
    assert!(found(&engine) > 0);
    drop(engine);
    std::fs::rename(&away, &lost).expect("it exists");
    let engine = Engine::open(&with, LEN);
    assert_eq!(engine.store.stats().lost_directories, 0);
    assert!(found(&engine) > 0 && empty.join("kvferry.store").exists());
    put_until_found(&engine);
    assert_eq!(engine.store.stats().corrupt, 0);
}

#[test]
fn a_pipe_in_the_place_of_what_says_that_a_directory_is_a_stores_is_refused_and_not_waited_for() {
    let _watchdog = Watchdog::new(PATIENCE);
    let folder = Folder::new("super-pipe");
    let with = directories(&folder, &["a", "b"]);
    made(&with);
    let superblock = folder.path().join("b").join("kvferry.store");
    std::fs::remove_file(&superblock).expect("it exists");
    let made = Command::new("mkfifo").arg(&superblock).status().expect("a program of each system");
    assert!(made.success());
    match Engine::try_open(&with.hang_after(PATIENCE * 2), LEN).err() {
        Some(Error::Format { path, what }) => {
            assert_eq!(path, folder.path().join("b"));
            assert!(what.contains("is not a regular file"), "{what}");
        }
        other => panic!("{other:?}"),
    }
}
