//! Has a store take empty directories in the place of lost ones, while no process has it open.
//!
//! An [`Adoption`] holds the store's locks: processes that open the store wait until it is dropped. What it would do, it
//! says before it does it ([`Adoption::empty`]).

use crate::error::{Error, Result};
use crate::gc::clean::{ExclusiveLocks, alone};
use crate::log::{Superblock, superblock};
use crate::opening::directories::{ArrangedDirectories, Directory, FileOwners, State, arrange};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// A store that no process has open, and the directories that it can take.
#[derive(Debug)]
pub struct Adoption {
    arranged: ArrangedDirectories,
    superblock: Superblock,
    empty: Vec<Empty>,
    _alone: ExclusiveLocks,
}

/// An empty directory in the place of a lost one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Empty {
    /// The directory.
    pub path: PathBuf,
    /// The number that it gets.
    pub number: u32,
    /// Whether a file system is mounted there. If not, its segments are on that of the folder above.
    pub is_mounted: bool,
}

impl Adoption {
    /// Locks the store in `directories`, all of them, and looks for those that are empty. Changes nothing.
    ///
    /// # Errors
    /// `InvalidArgument` without a directory; `InUse` if a process has the store open, or is opening it; `Directory` if a
    /// directory can't be read, or does not exist; `Format` if they have no store, or are not the directories of one.
    pub fn open(directories: &[PathBuf]) -> Result<Self> {
        let Some(first) = directories.first() else {
            return Err(Error::InvalidArgument("no directory was given".into()));
        };
        let before = look(directories)?;
        let Some(superblock) = before.superblock else {
            let what = format!("no store is here: a store's directory has {}", superblock::FILE);
            return Err(Error::Format { path: first.clone(), what });
        };
        let alone = alone(&before.readable(), &superblock)?;
        // Another process may have adopted them meanwhile.
        let arranged = look(directories)?;
        let empty = (0..)
            .zip(&arranged.directories)
            .filter(|(_, it)| matches!(it.state, State::Empty))
            .map(|(number, Directory { path, .. })| {
                let is_mounted = is_mounted(path);
                Empty { path: path.clone(), number, is_mounted }
            });
        let empty = empty.collect();
        Ok(Self { arranged, superblock, empty, _alone: alone })
    }

    /// The empty directories, in the order of their numbers.
    pub fn empty(&self) -> &[Empty] {
        &self.empty
    }

    /// Number of directories that the store has.
    pub fn directories(&self) -> u32 {
        self.arranged.count()
    }

    /// The store's random id.
    pub fn store(&self) -> [u8; 16] {
        self.superblock.store
    }

    /// Makes the empty directories the store's. A process that opens the store uses them then.
    ///
    /// # Errors
    /// `Directory` with the first one that can't be written to. Those before it are the store's.
    pub fn carry_out(mut self) -> Result<()> {
        let (directories, bounds) = (self.arranged.count(), self.arranged.bounds());
        for (number, directory) in (0..directories).zip(&mut self.arranged.directories) {
            if matches!(directory.state, State::Empty) {
                let new = Superblock { directory: number, directories, ..self.superblock };
                directory.mark(new, bounds)?;
            }
        }
        Ok(())
    }
}

/// The directories of the store, all of which can be read.
fn look(directories: &[PathBuf]) -> Result<ArrangedDirectories> {
    let mut arranged = arrange(directories, FileOwners::Own)?;
    let lost = arranged.directories.iter().position(|it| matches!(it.state, State::Lost(_)));
    if let Some(lost) = lost
        && let Directory { path, state: State::Lost(source), .. } =
            arranged.directories.swap_remove(lost)
    {
        return Err(Error::Directory { path, source });
    }
    Ok(arranged)
}

/// Whether a directory is on another file system than the folder above it.
fn is_mounted(directory: &Path) -> bool {
    let above = directory.join("..");
    match (directory.metadata(), above.metadata()) {
        (Ok(here), Ok(above)) => here.dev() != above.dev(),
        _ => false,
    }
}
