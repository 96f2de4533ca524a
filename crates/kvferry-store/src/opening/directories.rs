//! The directories of a store, and their order.
//!
//! Each directory says which store it belongs to, which number it has there, and how many directories there are: its
//! superblock. So the caller may give the directories in any order. [`arrange`] reads the superblocks and changes
//! nothing; what does not fit is refused. [`ArrangedDirectories::mark`] writes the superblocks that are missing.
//!
//! Directories may lack a superblock:
//! - all of them, if there is no store yet;
//! - some of them, if making the store was interrupted: no directory has an id then;
//! - all but number 0 in a store of format 1, whose segments tell where they belong, by their numbers;
//! - an empty one, in the place of one that was lost. It gets the number that no other has.
//!
//! A directory that can't be read is lost: the store goes on without its segments. So is an empty one, unless the
//! caller asks for it to be adopted: a device may not be mounted, and its folder be on the system's disk.

use crate::error::{Error, Result};
use crate::log::format::VERSION;
use crate::log::{self, PAGE_BYTES, SegmentHeader, Superblock, superblock};
use crate::opening::owner::FileUser;
use crate::tiers::disk::gate::{Bounds, ask_all, is_hang};
use kvferry_sys::private;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Fewer segments than these do not show that a store of format 1 has more directories than were given.
const TELLING_SEGMENTS: usize = 4;
/// Counts of directories that are looked for there.
const COUNTS: usize = 16;

/// The directories of a store.
#[derive(Debug)]
pub(crate) struct ArrangedDirectories {
    /// The superblock of the directory with the lowest number, among those that have one. `None`: there is no store
    /// yet.
    pub(crate) superblock: Option<Superblock>,
    /// The version of that superblock.
    pub(crate) format: u32,
    /// The directories, ordered by number.
    pub(crate) directories: Vec<Directory>,
    /// Whether making the store was interrupted.
    pub(crate) is_being_made: bool,
    /// Whether empty directories take the places of lost ones. False at first.
    pub(crate) adopts: bool,
    /// Time limit of a directory that is written to. No limit at first.
    pub(crate) limit: Duration,
}

#[derive(Debug)]
pub(crate) struct Directory {
    pub(crate) path: PathBuf,
    pub(crate) state: State,
    /// The id that its superblock has; 0: none.
    pub(crate) id: u64,
}

#[derive(Debug)]
pub(crate) enum State {
    /// The directory has a superblock of this release's format, with an id.
    Marked,
    /// The directory has a superblock that says which one it is, but of an earlier format, or without an id.
    Old,
    /// The directory belongs to the store, but has no superblock that says which one it is.
    Unmarked,
    /// The directory is empty. It may be the folder that a device was mounted at.
    Empty,
    /// The directory cannot be read.
    Lost(io::Error),
}

/// Contents of a directory.
enum FoundStore {
    Store(Superblock, u32),
    /// No superblock.
    Segments(Segments),
    Lost(io::Error),
}

#[derive(Default)]
struct Segments {
    numbers: BTreeSet<u32>,
    /// The stores that their headers name.
    stores: BTreeSet<[u8; 16]>,
}

/// Owners whose stores are accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileOwners {
    /// Only this process's user: another user's store is refused.
    Own,
    Any,
}

/// Reads what the directories are.
///
/// # Errors
/// `Format`, with the directory that is not as it must be; `Directory` if there is no store and one of
/// the directories can't be read.
pub(crate) fn arrange(paths: &[PathBuf], whose: FileOwners) -> Result<ArrangedDirectories> {
    arrange_found(paths, paths.iter().map(|path| look(path, whose)).collect())
}

/// Like [`arrange`], but only for stores of this process's user. Of several directories, one that does not answer
/// within `limit` is lost. Those of `hanging` are not asked.
pub(crate) fn arrange_within(
    paths: &[PathBuf],
    limit: Duration,
    mut hanging: BTreeMap<PathBuf, io::Error>,
) -> Result<ArrangedDirectories> {
    let known: BTreeSet<PathBuf> = hanging.keys().cloned().collect();
    let ask = move |path: &Path| match known.contains(path) {
        true => Err(io::ErrorKind::TimedOut.into()),
        false => Ok(look(path, FileOwners::Own)),
    };
    let mut lost = |(answer, path): (io::Result<LookedAt>, &PathBuf)| {
        answer.unwrap_or_else(|error| {
            let error = hanging.remove(path).unwrap_or(error);
            LookedAt { directory: None, found: Ok(FoundStore::Lost(error)) }
        })
    };
    let looked = ask_all(paths, Bounds::of(paths.len(), limit), ask);
    arrange_found(paths, looked.into_iter().zip(paths).map(&mut lost).collect())
}

fn arrange_found(paths: &[PathBuf], looked: Vec<LookedAt>) -> Result<ArrangedDirectories> {
    refuse_repeated(paths.iter().zip(&looked))?;
    let found = looked.into_iter().map(|it| it.found).collect::<Result<Vec<_>>>()?;
    let stores = paths.iter().zip(&found).filter_map(|(path, found)| match found {
        FoundStore::Store(superblock, version) => Some((path, *superblock, *version)),
        _ => None,
    });
    let stores: Vec<_> = stores.collect();
    let Some((reference, known)) = refuse_mixed(&stores, paths.len())? else {
        return none_yet(paths, found);
    };
    let first = stores.iter().min_by_key(|(_, superblock, _)| superblock.directory);
    let (_, superblock, format) = *first.expect("there is a store");
    let numbers = number_all(paths, &found, reference, &known)?;
    let is_being_made = stores.iter().all(|(_, it, version)| *version == VERSION && it.id == 0);
    let has_unmarked = is_being_made || stores.iter().any(|(_, _, version)| *version == 1);
    let mut directories: Vec<_> = paths
        .iter()
        .zip(found)
        .zip(numbers)
        .map(|((path, found), number)| {
            let id = if let FoundStore::Store(it, _) = &found { it.id } else { 0 };
            let state = match found {
                FoundStore::Store(_, VERSION) if id != 0 => State::Marked,
                FoundStore::Store(_, 1) => State::Unmarked,
                FoundStore::Store(..) => State::Old,
                FoundStore::Segments(it) if it.numbers.is_empty() && !has_unmarked => State::Empty,
                FoundStore::Segments(_) => State::Unmarked,
                FoundStore::Lost(error) => State::Lost(error),
            };
            (number, Directory { path: path.clone(), state, id })
        })
        .collect();
    directories.sort_by_key(|(number, _)| *number);
    let directories = directories.into_iter().map(|(_, it)| it).collect();
    let superblock = Some(superblock);
    let (adopts, limit) = (false, Duration::MAX);
    Ok(ArrangedDirectories { superblock, format, directories, is_being_made, adopts, limit })
}

impl ArrangedDirectories {
    /// The directories whose files the processes lock: those that are not lost; the first one if all are.
    pub(crate) fn readable(&self) -> Vec<PathBuf> {
        let is_there = |it: &&Directory| match it.state {
            State::Lost(_) => false,
            State::Empty => self.adopts_empty(),
            _ => true,
        };
        let there = self.directories.iter().filter(is_there).map(|it| it.path.clone());
        let there: Vec<_> = there.collect();
        if there.is_empty() { vec![self.directories[0].path.clone()] } else { there }
    }

    /// Whether empty directories are adopted. They are not while a directory is lost: directories may be given in any
    /// order, so it is unknown which of the missing numbers is the lost directory's, and that number must not be
    /// reused.
    fn adopts_empty(&self) -> bool {
        self.adopts && !self.directories.iter().any(|it| matches!(it.state, State::Lost(_)))
    }

    /// Makes a store of directories that are none. They get ids once all have a superblock: until the first has its id,
    /// a later call goes on with directories that have no superblock.
    pub(crate) fn make(&mut self, new: Superblock) -> Result<Superblock> {
        let superblock = Superblock { directories: self.count(), directory: 0, id: 0, ..new };
        self.mark_without_ids(superblock)?;
        let bounds = self.bounds();
        for (number, directory) in (0..).zip(&mut self.directories) {
            directory.mark(Superblock { directory: number, ..superblock }, bounds)?;
        }
        self.superblock = Some(superblock);
        Ok(superblock)
    }

    /// The first step of making a store: each directory without a superblock gets one.
    fn mark_without_ids(&mut self, superblock: Superblock) -> Result<()> {
        let bounds = self.bounds();
        for (number, directory) in (0..).zip(&mut self.directories) {
            if matches!(directory.state, State::Unmarked) {
                let new = Superblock { directory: number, id: 0, ..superblock };
                directory.write(new, bounds)?;
                directory.state = State::Old;
            }
        }
        Ok(())
    }

    /// Marks the directories of a store that are not: that upgrades an earlier format, goes on with the making of a
    /// store that was interrupted, and adopts empty directories, if that was asked for. The first one is marked last:
    /// until then, a release that knows format 1 only opens a store of format 1.
    ///
    /// Where a directory can't be written to, its blocks are read as before. One that hangs is lost.
    pub(crate) fn mark(&mut self) {
        let (count, bounds) = (self.count(), self.bounds());
        let Some(superblock) = self.superblock else { return };
        if self.is_being_made {
            if let Err(error) = self.mark_without_ids(superblock) {
                tracing::warn!(%error, "the store can't be made completely");
                return;
            }
            if self.directories.iter().any(|it| matches!(it.state, State::Lost(_))) {
                // It gets its superblock once it can be read, as no directory has an id until then.
                return;
            }
        }
        let adopts_empty = self.adopts_empty();
        for (number, directory) in (0..count).zip(&mut self.directories).rev() {
            let is_marked = match directory.state {
                State::Marked | State::Lost(_) => true,
                State::Empty => !adopts_empty,
                State::Old | State::Unmarked => false,
            };
            if is_marked {
                continue;
            }
            let new = Superblock { directory: number, directories: count, ..superblock };
            let is_unmarked = matches!(directory.state, State::Unmarked);
            if let Err(error) = directory.mark(new, bounds) {
                let path = directory.path.display();
                tracing::warn!(%error, "the store can't write what it is to {path}");
                if is_unmarked {
                    // A later one would be a step of the upgrade that an older release does not expect.
                    return;
                }
            }
        }
    }

    /// Directories that are empty, and were not adopted, are lost.
    pub(crate) fn lose_empty(&mut self) {
        let is_refused = self.adopts && !self.adopts_empty();
        for directory in &mut self.directories {
            if matches!(directory.state, State::Empty) {
                let error = if is_refused { is_empty_beside_lost() } else { is_empty() };
                directory.state = State::Lost(error);
            }
        }
    }

    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.directories.len()).expect("a caller names fewer directories")
    }

    pub(crate) fn bounds(&self) -> Bounds {
        Bounds::of(self.directories.len(), self.limit)
    }
}

impl Directory {
    /// Writes a superblock with a new id.
    pub(crate) fn mark(&mut self, new: Superblock, bounds: Bounds) -> Result<()> {
        let failed = |source| Error::Directory { path: self.path.clone(), source };
        let id = u64::from_le_bytes(kvferry_sys::random::bytes().map_err(failed)?).max(1);
        self.write(Superblock { id, ..new }, bounds)?;
        (self.state, self.id) = (State::Marked, id);
        Ok(())
    }

    /// Writes a superblock. The directory is lost if it hangs meanwhile.
    fn write(&mut self, new: Superblock, bounds: Bounds) -> Result<()> {
        let path = self.path.clone();
        bounds.write(&self.path, move |given_up| new.replace(&path, given_up)).map_err(|source| {
            if is_hang(&source) {
                self.state = State::Lost(source.kind().into());
            }
            Error::Directory { path: self.path.clone(), source }
        })
    }
}

/// The error of a store's directory that is empty.
pub(crate) fn is_empty() -> io::Error {
    let what = "it is empty: mount its device, or, if the device is gone, let the directory take \
                its place by `kvferry store adopt` with all directories of the store, or by \
                opening the store with `adopt_empty`";
    io::Error::new(io::ErrorKind::NotFound, what)
}

/// The error of an empty directory that is not adopted, although asked for, because another one is lost.
fn is_empty_beside_lost() -> io::Error {
    let what = "it is empty, and is not adopted while another directory of the store is lost, as its \
                number can't be told: open the store again once the other one can be read, or let \
                both be empty";
    io::Error::new(io::ErrorKind::NotFound, what)
}

/// The state of a directory, and its numbers in the system.
struct LookedAt {
    /// The numbers of its file system, and in it; `None` if it can't be read.
    directory: Option<(u64, u64)>,
    found: Result<FoundStore>,
}

/// Reads what a directory is.
fn look(path: &Path, whose: FileOwners) -> LookedAt {
    let directory = fs::metadata(path).ok().map(|it| (it.dev(), it.ino()));
    LookedAt { directory, found: find(path, whose) }
}

fn find(path: &Path, whose: FileOwners) -> Result<FoundStore> {
    let read = match whose {
        FileOwners::Own => Superblock::read_own(path, &FileUser::default()),
        FileOwners::Any => Superblock::read(path),
    };
    match read {
        Ok(Some((superblock, version))) => Ok(match list(path) {
            Ok(()) => FoundStore::Store(superblock, version),
            Err(error) => FoundStore::Lost(error),
        }),
        Ok(None) => Ok(look_at_segments(path).map_or_else(FoundStore::Lost, FoundStore::Segments)),
        Err(log::Error::Directory { source, .. }) => Ok(FoundStore::Lost(source)),
        Err(error) => Err(log_error(path, error)),
    }
}

/// Fails if a directory can't be listed.
fn list(path: &Path) -> io::Result<()> {
    fs::read_dir(path)?.try_for_each(|entry| entry.map(drop))
}

fn look_at_segments(path: &Path) -> io::Result<Segments> {
    let mut segments = Segments::default();
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(number) = name.to_str().and_then(superblock::segment_of) else { continue };
        segments.numbers.insert(number);
        let mut page = [0; PAGE_BYTES];
        let read =
            private::open(&entry.path(), false).and_then(|file| file.read_exact_at(&mut page, 0));
        segments.stores.extend(read.ok().and_then(|()| SegmentHeader::store_of(&page)));
    }
    Ok(segments)
}

fn refuse_repeated<'a>(looked: impl Iterator<Item = (&'a PathBuf, &'a LookedAt)>) -> Result<()> {
    let mut seen = BTreeSet::new();
    for (path, look) in looked {
        // The same directory under two names, such as by a link or a bind mount, has the same number.
        let Some(directory) = look.directory else { continue };
        if !seen.insert(directory) {
            return Err(format(path, "it was given twice: give each directory of a store once"));
        }
    }
    Ok(())
}

/// Compares the superblocks. Returns the path of one and the superblock with what all share; `None` without any.
fn refuse_mixed<'a>(
    stores: &[(&'a PathBuf, Superblock, u32)],
    given: usize,
) -> Result<Option<(&'a PathBuf, Superblock)>> {
    // Formats from version 2 on say how many directories there are.
    let numbered = stores.iter().find(|(.., version)| *version > 1);
    let Some((reference, known, version)) = numbered.or(stores.first()) else { return Ok(None) };
    for (path, superblock, _) in stores {
        if superblock.store != known.store {
            let what = format!(
                "it belongs to another store than {}: give the directories of one store",
                reference.display()
            );
            return Err(format(path, what));
        }
        let is_alike = |it: &Superblock| {
            let known = (known.geometry, known.created_ms, known.directories);
            (it.geometry, it.created_ms, it.directories) == known || it.directories == 0
        };
        if !is_alike(superblock) {
            let what = format!(
                "its kvferry.store does not agree with that of {}: one is a copy of an earlier \
                 state; give the directories that were last used",
                reference.display()
            );
            return Err(format(path, what));
        }
    }
    if *version > 1 && known.directories as usize != given {
        let what = format!(
            "the store has {} directories, {given} were given: give all of them, also one that is \
             lost",
            known.directories
        );
        return Err(format(reference, what));
    }
    Ok(Some((*reference, *known)))
}

/// The directories of a store that does not exist yet, in the order in which they were given.
fn none_yet(paths: &[PathBuf], found: Vec<FoundStore>) -> Result<ArrangedDirectories> {
    let mut directories = Vec::new();
    for (path, found) in paths.iter().zip(found) {
        match found {
            FoundStore::Lost(source) if source.kind() != io::ErrorKind::NotFound => {
                return Err(Error::Directory { path: path.clone(), source });
            }
            FoundStore::Segments(segments) if !segments.stores.is_empty() => {
                let what = "it has segments of a store whose kvferry.store is not in the \
                            directories that were given: give all directories of the store, or \
                            remove the segments";
                return Err(format(path, what));
            }
            _ => directories.push(Directory { path: path.clone(), state: State::Unmarked, id: 0 }),
        }
    }
    let (superblock, is_being_made, adopts, limit) = (None, true, false, Duration::MAX);
    Ok(ArrangedDirectories {
        superblock,
        format: VERSION,
        directories,
        is_being_made,
        adopts,
        limit,
    })
}

/// The number of each directory.
fn number_all(
    paths: &[PathBuf],
    found: &[FoundStore],
    reference: &Path,
    known: &Superblock,
) -> Result<Vec<usize>> {
    let count = paths.len();
    let mut by_number: Vec<Option<usize>> = vec![None; count];
    let mut take = |at: usize, number: usize| match by_number[number].replace(at) {
        None => Ok(()),
        Some(other) => {
            let what = format!(
                "it is directory {number} of the store, as {} is: one is a copy; give the \
                 original, and the store's other directories",
                paths[other].display()
            );
            Err(format(&paths[at], what))
        }
    };
    for (at, found) in found.iter().enumerate() {
        match found {
            FoundStore::Store(superblock, _) => take(at, superblock.directory as usize)?,
            FoundStore::Segments(segments) if !segments.numbers.is_empty() => {
                let number = number_by_segments(&paths[at], segments, count, reference, known)?;
                take(at, number)?;
            }
            FoundStore::Segments(_) | FoundStore::Lost(_) => {}
        }
    }
    // What says nothing has its own place, or one that is left.
    let silent: Vec<_> = (0..count).filter(|at| !by_number.contains(&Some(*at))).collect();
    for at in &silent {
        by_number[*at].get_or_insert(*at);
    }
    for at in silent {
        if !by_number.contains(&Some(at)) {
            let place = by_number.iter_mut().find(|it| it.is_none());
            *place.expect("as many numbers as directories") = Some(at);
        }
    }
    let mut numbers = vec![0; count];
    for (number, at) in by_number.into_iter().enumerate() {
        numbers[at.expect("each number was given")] = number;
    }
    if known.directories == 0 {
        refuse_too_few(paths, &numbers)?;
    }
    Ok(numbers)
}

/// The number of a directory without a superblock: its segments have it modulo the count.
fn number_by_segments(
    path: &Path,
    segments: &Segments,
    count: usize,
    reference: &Path,
    known: &Superblock,
) -> Result<usize> {
    if segments.stores.iter().any(|store| *store != known.store) {
        let what = format!(
            "it has segments of another store than {}: give the directories of one store",
            reference.display()
        );
        return Err(format(path, what));
    }
    let numbers: BTreeSet<_> = segments.numbers.iter().map(|it| *it as usize % count).collect();
    match (numbers.first(), numbers.len()) {
        (Some(number), 1) => Ok(*number),
        _ => {
            let what = format!(
                "its segments are not those of one of {count} directories: give all directories \
                 that the store was made with"
            );
            Err(format(path, what))
        }
    }
}

/// A store of format 1 does not say how many directories it has. Its segments do, mostly: their numbers have
/// no gaps.
fn refuse_too_few(paths: &[PathBuf], numbers: &[usize]) -> Result<()> {
    let mut segments = Vec::new();
    for (path, number) in paths.iter().zip(numbers) {
        let Ok(found) = look_at_segments(path) else { continue };
        if found.numbers.iter().any(|it| *it as usize % paths.len() != *number) {
            let what = format!(
                "its segments are not those of the directory with number {number} of {}: give all \
                 directories that the store was made with",
                paths.len()
            );
            return Err(format(path, what));
        }
        segments.extend(found.numbers.into_iter().map(|it| (it as usize, *number)));
    }
    let has = |count: usize| segments.iter().all(|(segment, number)| segment % count == *number);
    let more = (paths.len() + 1..=COUNTS).find(|count| has(*count));
    match more {
        Some(count) if segments.len() >= TELLING_SEGMENTS => {
            let at = numbers.iter().position(|number| *number == 0).unwrap_or(0);
            let what = format!(
                "its segments are those of a store with {count} directories, {} were given: give \
                 all of them; if there are no others, make an empty file {} in it",
                paths.len(),
                superblock::segment_file(u32::try_from(paths.len()).unwrap_or(u32::MAX))
            );
            Err(format(&paths[at], what))
        }
        _ => Ok(()),
    }
}

fn format(path: &Path, what: impl Into<String>) -> Error {
    Error::Format { path: path.to_path_buf(), what: what.into() }
}

fn log_error(path: &Path, error: log::Error) -> Error {
    match error {
        log::Error::Directory { source, .. } => {
            Error::Directory { path: path.to_path_buf(), source }
        }
        other => format(path, other.to_string()),
    }
}

#[cfg(test)]
mod tests;
