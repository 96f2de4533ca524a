//! Files that are links, other users', or open to other users.

use crate::faults::warned;
use crate::{Engine, Folder, MIB, options, prompt};
use kvferry_store::Error;
use kvferry_store::inspect::{Files, State};
use kvferry_testkit::user::with_files_of_another_user;
use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

const LEN: u64 = 64 << 10;
const BLOCKS: usize = 6;
const OTHER_USER: u32 = 65_534;

fn segment(folder: &Folder, number: u32) -> PathBuf {
    folder.path().join(format!("segment-{number:08}"))
}

/// Puts prompts that fill some segments, and finds them.
fn fill(engine: &Engine, first: u64) {
    for seed in first..first + 8 {
        assert_eq!(engine.put(&prompt(seed, BLOCKS), 0).stored, BLOCKS);
        assert_eq!(engine.get(&prompt(seed, BLOCKS), 0), BLOCKS);
    }
}

/// Leaves a store with blocks in the folder.
fn made(folder: &Folder) {
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!(engine.put(&prompt(1, BLOCKS), 0).stored, BLOCKS);
}

fn mode(path: &Path) -> u32 {
    path.metadata().expect("it exists").permissions().mode() & 0o7777
}

fn set_mode(path: &Path, mode: u32) {
    std::fs::set_permissions(path, Permissions::from_mode(mode)).expect("it exists");
}

fn is_root(what: &str) -> bool {
    let is_root = kvferry_sys::unix::user() == 0;
    if !is_root {
        println!("SKIPPED: {what}: needs root");
    }
    is_root
}

#[test]
fn a_link_in_the_place_of_a_segment_is_not_followed_and_a_segment_takes_its_place() {
    let (folder, elsewhere) = (Folder::new("link"), Folder::new("link-elsewhere"));
    let victim = elsewhere.path().join("victim");
    let bytes = vec![7; usize::try_from(MIB).expect("short")];
    std::fs::write(&victim, &bytes).expect("written");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!(engine.put(&prompt(1, BLOCKS), 0).stored, BLOCKS);
    for number in (0..24).filter(|number| !segment(&folder, *number).exists()) {
        symlink(&victim, segment(&folder, number)).expect("a link");
    }
    fill(&engine, 1000);
    drop(engine);
    // One that is there when the store is opened.
    std::fs::remove_file(segment(&folder, 0)).expect("it was made");
    symlink(&victim, segment(&folder, 0)).expect("a link");
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    fill(&engine, 2000);
    assert_eq!(engine.store.stats().failed, 0);
    assert!(segment(&folder, 0).symlink_metadata().is_ok_and(|it| it.is_file()));
    assert!(std::fs::read(&victim).expect("it is there") == bytes, "nothing was written to it");
}

#[test]
fn a_link_in_the_place_of_what_says_that_a_directory_is_a_stores_is_refused() {
    let (folder, elsewhere) = (Folder::new("super-link"), Folder::new("super-link-elsewhere"));
    made(&folder);
    let superblock = folder.path().join("kvferry.store");
    let victim = elsewhere.path().join("kvferry.store");
    std::fs::rename(&superblock, &victim).expect("it exists");
    symlink(&victim, &superblock).expect("a link");
    match Engine::try_open(&options(folder.path(), 24 * MIB), LEN).err() {
        Some(Error::Format { path, what }) => {
            assert_eq!(path, folder.path());
            assert!(what.contains("kvferry.store is a link: remove it"), "{what}");
        }
        other => panic!("{other:?}"),
    }
    for file in ["join", "members"] {
        let (folder, at) = (Folder::new("lock-link"), elsewhere.path().join(file));
        symlink(&at, folder.path().join(file)).expect("a link");
        assert!(Engine::try_open(&options(folder.path(), 24 * MIB), LEN).is_err(), "{file}");
        assert!(!at.exists(), "{file}: nothing is made behind a link");
    }
}

#[test]
fn a_segment_of_another_user_is_neither_read_nor_written_to() {
    if !is_root("a segment of another user") {
        return;
    }
    let folder = Folder::new("other-segment");
    made(&folder);
    let theirs: Vec<_> = (0..24).map(|it| segment(&folder, it)).filter(|it| it.exists()).collect();
    for path in &theirs {
        chown(path, Some(OTHER_USER), None).expect("root may");
    }
    let before: Vec<_> = theirs.iter().map(|it| std::fs::read(it).expect("a file")).collect();
    let opening = || Engine::open(&options(folder.path(), 24 * MIB), LEN);
    let (engine, warnings) = warned(opening);
    let file = theirs[0].display();
    let text = format!(
        "{file} belongs to user {OTHER_USER} and has mode 0600; this process runs as user 0"
    );
    assert!(warnings.iter().any(|it| it.contains(&text)), "{warnings:?}");
    assert_eq!(engine.get(&prompt(1, BLOCKS), 0), 0);
    // The other segments are used.
    fill(&engine, 1000);
    drop(engine);
    for (path, before) in theirs.iter().zip(before) {
        assert!(std::fs::read(path).expect("it is there") == before, "{}", path.display());
    }
    // It may be looked at.
    let files = Files::open(&[folder.path().to_owned()]).expect("a store");
    let is_used = |it: &kvferry_store::inspect::Segment| {
        theirs.contains(&it.path) && matches!(it.state, State::Used(_))
    };
    assert!(files.segments().expect("they can be listed").iter().any(is_used));
}

#[test]
fn a_store_of_another_user_is_refused_with_its_owner_and_what_to_do() {
    if !is_root("a store of another user") {
        return;
    }
    let folder = Folder::new("other-store");
    made(&folder);
    let superblock = folder.path().join("kvferry.store");
    chown(&superblock, Some(OTHER_USER), None).expect("root may");
    let said = |refused: Option<Error>| match refused {
        Some(Error::Format { what, .. }) => {
            assert!(
                what.contains("kvferry.store belongs to user 65534 and has mode 0600"),
                "{what}"
            );
            assert!(what.contains("run it as the file's owner"), "{what}");
        }
        other => panic!("{other:?}"),
    };
    said(Engine::try_open(&options(folder.path(), 24 * MIB), LEN).err());
    said(kvferry_store::clean::Cleaner::open(&[folder.path().to_owned()]).err());
    assert!(Files::open(&[folder.path().to_owned()]).is_ok(), "it may be looked at");
}

#[test]
fn access_that_others_have_to_files_of_the_store_is_taken_away() {
    let folder = Folder::new("access");
    made(&folder);
    let first = segment(&folder, 0);
    let superblock = folder.path().join("kvferry.store");
    set_mode(&first, 0o664);
    set_mode(&superblock, 0o644);
    let engine = Engine::open(&options(folder.path(), 24 * MIB), LEN);
    assert_eq!(engine.get(&prompt(1, BLOCKS), 0), BLOCKS);
    assert_eq!((mode(&first), mode(&superblock)), (0o600, 0o600));
}

#[test]
fn a_directory_in_which_others_can_replace_files_is_warned_about_once() {
    let folder = Folder::new("open-directory");
    made(&folder);
    let with = options(folder.path(), 24 * MIB);
    let text = |mode: u32| {
        let path = folder.path().display();
        format!(
            "the store in {path} is not safe from other users: its mode is {mode:04o}: other users can \
             replace its files; take their write permission away (chmod go-w)"
        )
    };
    for (mode, is_open) in [
        (0o700, false),
        (0o755, false),
        (0o770, true),
        (0o757, true),
        (0o2775, true),
        (0o1777, false),
    ] {
        set_mode(folder.path(), mode);
        let (engine, warnings) = warned(|| Engine::open(&with, LEN));
        assert_eq!(warnings.len(), usize::from(is_open), "{mode:o}: {warnings:?}");
        assert!(warnings.iter().all(|it| it.contains(&text(mode))), "{warnings:?}");
        // A process that joins does not say it again.
        let (other, warnings) = warned(|| Engine::open(&with, LEN));
        assert_eq!(warnings, [""; 0], "{mode:o}");
        drop((engine, other));
    }
    if is_root("a directory of another user") {
        set_mode(folder.path(), 0o755);
        chown(folder.path(), Some(OTHER_USER), None).expect("root may");
        let (_engine, warnings) = warned(|| Engine::open(&with, LEN));
        assert!(
            warnings.len() == 1 && warnings[0].contains("belongs to user 65534"),
            "{warnings:?}"
        );
    }
}

#[test]
fn a_file_system_that_gives_files_to_another_user_has_stores_of_this_one() {
    let folder = Folder::new("squash");
    set_mode(folder.path(), 0o777);
    with_files_of_another_user("files on NFS with root_squash", || {
        let with = options(&folder.path().join("store"), 24 * MIB);
        for found in [0, BLOCKS] {
            let (engine, warnings) = warned(|| Engine::open(&with, LEN));
            assert_eq!(warnings, [""; 0]);
            assert_eq!(engine.get(&prompt(1, BLOCKS), 0), found);
            engine.put(&prompt(1, BLOCKS), 0);
        }
        let superblock = folder.path().join("store/kvferry.store");
        assert_eq!(superblock.metadata().expect("it was made").uid(), OTHER_USER);
    });
}
