//! How a process opens the directories of a store: it finds out what they are, and the first process marks them.

pub mod adopt;
pub(crate) mod directories;
pub(crate) mod owner;
pub(crate) mod recover;

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::fault_points::{Op, step, sync_directory};
use crate::log::{self, Superblock};
use crate::membership::{JOIN_TIMEOUT, wait_until};
use crate::opening::directories::{ArrangedDirectories, Directory, State, arrange_within};
use crate::options::StoreOptions;
use crate::tiers::disk::Directories;
use crate::tiers::disk::gate::{Bounds, GivenUp, ask_all, is_hang};
use kvferry::Agent;
use kvferry_sys::sync::Mutex;
use std::collections::BTreeMap;
use std::fs::{DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// A store that is being opened.
pub(crate) struct Opening<'a> {
    agent: &'a Agent,
    options: &'a StoreOptions,
    arranged: Mutex<ArrangedDirectories>,
    /// The directories that can be read have changed since they were locked.
    is_overtaken: AtomicBool,
}

impl<'a> Opening<'a> {
    /// Looks at the directories. Where there is no store yet, they are made if they do not exist.
    pub(crate) fn new(agent: &'a Agent, options: &'a StoreOptions) -> Result<Self> {
        let arranged = look(options, BTreeMap::new())?;
        if arranged.superblock.is_none() {
            // Before anything is made.
            may_make(options)?;
            options.geometry(None)?;
            for path in &options.directories {
                let of_thread = path.clone();
                let make = move |given_up: &GivenUp| make_directory(&of_thread, given_up);
                let made = arranged.bounds().write(path, make);
                made.map_err(|source| Error::Directory { path: path.clone(), source })?;
            }
        }
        let is_overtaken = AtomicBool::new(false);
        Ok(Self { agent, options, arranged: Mutex::new(arranged), is_overtaken })
    }

    /// Whether the store has to be opened once more.
    pub(crate) fn is_overtaken(&self) -> bool {
        self.is_overtaken.load(Ordering::Relaxed)
    }

    /// The directories whose files the processes lock.
    pub(crate) fn readable(&self) -> Vec<PathBuf> {
        self.arranged.lock().readable()
    }

    /// Time limit for a directory's answer, if there are several.
    pub(crate) fn bounds(&self) -> Bounds {
        Bounds::of(self.options.directories.len(), self.options.hang_after)
    }

    pub(crate) fn first(&self) -> PathBuf {
        self.readable().swap_remove(0)
    }

    /// The store's superblock, which is made if there is none. The caller has locked the directories that can be read.
    pub(crate) fn open_superblock(&self) -> Result<Superblock> {
        // Another process may have made the store since it was looked at, with the directories in another order.
        let _locks = match self.arranged.lock().superblock {
            None => lock_all(&self.options.directories, self.bounds())?,
            Some(_) => Vec::new(),
        };
        // Other processes wait for the locks meanwhile. So none waits here once more for a directory that hangs.
        let mut now = look(self.options, self.take_hanging())?;
        let first = self.first();
        // Their order may be another one, as another process may have made the store.
        let sorted = |mut paths: Vec<PathBuf>| {
            paths.sort_unstable();
            paths
        };
        if sorted(now.readable()) != sorted(self.readable()) {
            self.is_overtaken.store(true, Ordering::Relaxed);
            let detail = "; the directories have changed meanwhile: try again".into();
            return Err(Error::Busy { path: first, detail });
        }
        let superblock = match now.superblock {
            Some(superblock) => superblock,
            None => {
                // It may have been unmounted since it was looked at.
                may_make(self.options)?;
                now.make(self.new_superblock()?)?
            }
        };
        *self.arranged.lock() = now;
        Ok(superblock)
    }

    /// The directories that were found to hang, with the error of each.
    fn take_hanging(&self) -> BTreeMap<PathBuf, io::Error> {
        let mut arranged = self.arranged.lock();
        let hanging = arranged.directories.iter_mut().filter_map(|it| match &mut it.state {
            State::Lost(error) if is_hang(error) => {
                let kind = error.kind();
                Some((it.path.clone(), std::mem::replace(error, kind.into())))
            }
            _ => None,
        });
        hanging.collect()
    }

    fn new_superblock(&self) -> Result<Superblock> {
        let bytes = self.options.geometry(None)?.segment_bytes;
        Ok(Superblock {
            store: kvferry_sys::random::bytes()
                .map_err(|source| Error::Directory { path: self.first(), source })?,
            geometry: log::Geometry::new(bytes).expect("`StoreOptions::geometry` keeps the bounds"),
            created_ms: Clock::unix_ms(),
            directory: 0,
            directories: 1,
            id: 0,
        })
    }

    /// The files. The first process that opens the store marks the directories that are not, and says which ones
    /// are lost, and in which ones other users can replace files.
    pub(crate) fn disk(&self, superblock: &Superblock, is_first: bool) -> Result<Directories> {
        let mut arranged = self.arranged.lock();
        if is_first {
            arranged.mark();
        }
        // Also where another process has the store open and this one asks to adopt them: that process goes on without.
        arranged.lose_empty();
        if is_first {
            let is_lost = |it: &&Directory| matches!(it.state, State::Lost(_));
            for directory in arranged.directories.iter().filter(is_lost) {
                if let State::Lost(error) = &directory.state {
                    let path = directory.path.display();
                    tracing::warn!(%error, "the store has lost {path}; its blocks are missed");
                }
            }
            let there = arranged.directories.iter().filter(|it| !is_lost(it));
            let there: Vec<_> = there.map(|it| it.path.clone()).collect();
            let ways = ask_all(&there, arranged.bounds(), |it| Ok(owner::way_in(it)));
            for (path, way) in there.iter().zip(ways) {
                if let Ok(Some(way)) = way {
                    let path = path.display();
                    tracing::warn!("the store in {path} is not safe from other users: {way}");
                }
            }
        }
        let StoreOptions { direct, hang_after, .. } = *self.options;
        Directories::new(self.agent, &arranged.directories, superblock, direct, hang_after)
    }
}

fn may_make(options: &StoreOptions) -> Result<()> {
    match options.must_exist {
        true => Err(Error::NoStore { paths: options.directories.clone() }),
        false => Ok(()),
    }
}

/// `hanging`: the directories that are known to hang.
fn look(
    options: &StoreOptions,
    hanging: BTreeMap<PathBuf, io::Error>,
) -> Result<ArrangedDirectories> {
    let arranged = arrange_within(&options.directories, options.hang_after, hanging)?;
    Ok(ArrangedDirectories { adopts: options.adopt_empty, limit: options.hang_after, ..arranged })
}

/// Makes a directory unless it exists. It survives a loss of power then: a store whose files were synced is gone if
/// its directory is.
fn make_directory(path: &Path, given_up: &GivenUp) -> io::Result<()> {
    let above = |path: &Path| match path.parent() {
        Some(above) if above.as_os_str().is_empty() => Some(PathBuf::from(".")),
        above => above.map(Path::to_path_buf),
    };
    // Also if it exists: a process may have been killed behind this step.
    let mut unsynced: Vec<_> = above(path).into_iter().collect();
    while let Some(last) = unsynced.last()
        && !last.exists()
        && let Some(next) = above(last)
    {
        unsynced.push(next);
    }
    let make = || {
        if let Some(above) = above(path) {
            std::fs::create_dir_all(above)?;
        }
        // For this user alone: who may write here may replace what is read.
        match DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
            made => made,
        }
    };
    step(|| Op::MakeDirectory(path.to_path_buf()), make)?;
    for directory in unsynced {
        given_up.check()?;
        match sync_directory(&directory) {
            // One that this user may not read was not made by this user.
            Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {}
            synced => synced?,
        }
    }
    Ok(())
}

/// Locks directories, so that no other process makes a store of them, whatever it calls the first. A file system
/// that has no locks of directories does without.
fn lock_all(paths: &[PathBuf], bounds: Bounds) -> Result<Vec<File>> {
    let mut in_order = BTreeMap::new();
    let open = |path: &Path| {
        let directory = File::open(path)?;
        directory.metadata().map(|it| ((it.dev(), it.ino()), directory))
    };
    for (path, opened) in paths.iter().zip(ask_all(paths, bounds, open)) {
        let failed = |source| Error::Directory { path: path.clone(), source };
        let (number, directory) = opened.map_err(failed)?;
        in_order.insert(number, directory);
    }
    let directories: Vec<_> = in_order.into_values().collect();
    for directory in &directories {
        let is_locked = || match directory.try_lock() {
            Err(TryLockError::WouldBlock) => Ok(false),
            Ok(()) | Err(TryLockError::Error(_)) => Ok(true),
        };
        let busy = || {
            let detail = "; one has been making a store of its directories for a minute".into();
            Error::Busy { path: paths[0].clone(), detail }
        };
        let failed = |source| Error::Directory { path: paths[0].clone(), source };
        wait_until(JOIN_TIMEOUT, is_locked).map_err(failed)?.ok_or_else(busy)?;
    }
    Ok(directories)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Store;
    use crate::bench::Bench;
    use crate::log::superblock;
    use crate::membership::{elect, join};
    use kvferry_testkit::hanging::HangingDisk;
    use kvferry_testkit::{PATIENCE, Watchdog};
    use std::time::Duration;

    /// The disks of a store in two directories, both in memory: one answers also while the machine's disk is busy. `None`
    /// where they can't be mounted.
    fn two_in_memory(bench: &Bench) -> Option<([HangingDisk; 2], StoreOptions)> {
        let [first, second] = ["a", "b"].map(|it| bench.folder.join(it));
        for path in [&first, &second] {
            std::fs::create_dir_all(path).expect("a folder");
        }
        let disks = [HangingDisk::mount(&first)?, HangingDisk::mount(&second)?];
        let options = StoreOptions::new(&first, 12 << 20)
            .and_directory(&second)
            .segment_bytes(1 << 20)
            // A thread of this process that serves a healthy one may be as late.
            .hang_after(Duration::from_secs(5));
        Some((disks, options))
    }

    #[test]
    fn a_directory_that_was_found_to_hang_is_not_asked_again_while_others_wait_for_the_locks() {
        let _watchdog = Watchdog::new(PATIENCE);
        let bench = Bench::new("opening", 1 << 20);
        let Some(([_other, disk], options)) = two_in_memory(&bench) else { return };
        let first = &options.directories[0];
        Store::open(&bench.agent, &options).expect("a store").close();
        disk.hold();
        let opening = Opening::new(&bench.agent, &options).expect("directories");
        assert_eq!(opening.readable(), std::slice::from_ref(first));
        disk.release();
        opening.open_superblock().expect("the directories are as they were found");
        assert_eq!(opening.readable(), std::slice::from_ref(first));
        assert!(!opening.is_overtaken());
    }

    #[test]
    fn the_last_directory_that_is_left_of_several_is_not_waited_for_when_it_hangs() {
        let _watchdog = Watchdog::new(PATIENCE);
        let bench = Bench::new("last-one", 1 << 20);
        let Some(([lost, disk], options)) = two_in_memory(&bench) else { return };
        Store::open(&bench.agent, &options).expect("a store").close();
        drop(lost);
        std::fs::remove_dir_all(&options.directories[0]).expect("it is not mounted");
        let opening = Opening::new(&bench.agent, &options).expect("directories");
        let left = opening.readable();
        assert_eq!(left, options.directories[1..]);
        disk.hold();
        let joined = join(
            &left,
            opening.bounds(),
            || opening.open_superblock(),
            |_| unreachable!("no lock was opened"),
        );
        match joined.err() {
            Some(Error::Directory { path, source }) => {
                assert!(is_hang(&source) && path.starts_with(&left[0]), "{source}");
            }
            other => panic!("{other:?}"),
        }
        assert!(elect::announced(&left, opening.bounds()).is_empty());
        let opened = Store::open(&bench.agent, &options);
        assert!(matches!(opened, Err(Error::Directory { .. })), "{opened:?}");
        disk.release();
        let store = Store::open(&bench.agent, &options).expect("a store");
        assert_eq!(store.stats().lost_directories, 1);
        // Also when it is closed.
        disk.hold();
        store.close();
        disk.release();
    }

    /// A store in two directories, of which the second hangs when its `superblocks`-th superblock is to take its place.
    /// What is there before is made by `before`.
    fn open_while_a_superblock_is_written(
        name: &str,
        superblocks: usize,
        before: impl FnOnce(&Bench, &StoreOptions),
    ) {
        let bench = Bench::new(name, 1 << 20);
        let Some(([_other, disk], options)) = two_in_memory(&bench) else { return };
        before(&bench, &options);
        disk.hold_at_rename(superblocks);
        let store = Store::open(&bench.agent, &options).expect("a store without a directory");
        assert_eq!((disk.lost(), store.stats().lost_directories), (1, 1));
        store.close();
        disk.release();
        let store = Store::open(&bench.agent, &options).expect("a store");
        assert_eq!(store.stats().lost_directories, 0, "no directory was lost for good");
        store.close();
    }

    // Each in a test of its own: a process that mounts such a disk closes files of one that hangs.

    #[test]
    fn a_directory_that_hangs_at_its_first_superblock_is_left_out() {
        let _watchdog = Watchdog::new(PATIENCE);
        open_while_a_superblock_is_written("superblock-0", 0, |_, _| ());
    }

    #[test]
    fn a_directory_that_hangs_at_its_second_superblock_is_left_out() {
        let _watchdog = Watchdog::new(PATIENCE);
        open_while_a_superblock_is_written("superblock-1", 1, |_, _| ());
    }

    #[test]
    fn a_directory_that_hangs_while_its_superblock_is_upgraded_is_left_out() {
        let _watchdog = Watchdog::new(PATIENCE);
        open_while_a_superblock_is_written("superblock-old", 0, |bench, options| {
            Store::open(&bench.agent, options).expect("a store").close();
            for directory in &options.directories {
                let file = directory.join(superblock::FILE);
                let bytes = std::fs::read(&file).expect("a superblock");
                std::fs::write(file, superblock::downgrade_to_2(&bytes)).expect("written");
            }
        });
    }
}
