//! Removes what a store does not need, and seals its segments, while no process has it open.
//!
//! A [`Cleaner`] holds the store's locks: processes that open the store wait until it is dropped. It first
//! plans; a [`Plan`] is a list of [`Step`]s, which are carried out or only shown.
//!
//! Only whole segments are removed. The files do not say which blocks were evicted, so no block is.

use crate::core::free_wanted;
use crate::error::{Error, Result};
use crate::inspect::{Files, Segment, State, sync_directory};
use crate::log::recover::{self, Fault, Scanned};
use crate::log::{Disk, Record, Superblock, superblock};
use crate::membership::elect::{self, TakenAddress};
use crate::membership::{self, Locks};
use crate::options::StoreOptions;
use crate::tiers::disk::gate::Bounds;
use kvferry_sys::unix::Channel;
use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

/// Longest wait for a lock: a process that ends may hold one for a moment.
const LOCK_TIMEOUT: Duration = Duration::from_millis(200);

/// A store that no process has open.
#[derive(Debug)]
pub struct Cleaner {
    files: Files,
    segments: Vec<Segment>,
    _alone: ExclusiveLocks,
}

/// Locks that keep processes from opening a store.
#[derive(Debug)]
pub(crate) struct ExclusiveLocks {
    _locks: [Locks; 2],
    /// The store's beacon. `None`: another user's program has it.
    _beacon: Option<Channel>,
}

/// Locks a store that no process has open. `directories` are those that can be read.
pub(crate) fn alone(directories: &[PathBuf], superblock: &Superblock) -> Result<ExclusiveLocks> {
    let first = &directories[0];
    let in_use = || Error::InUse { path: first.clone() };
    // As a process that joins: `join` first, so that none meets `members` locked by a process that
    // is no member. In all directories: a process may have them open that could read only some of them.
    let lock = |name: &'static str| {
        let bounds = Bounds::of(directories.len(), Duration::MAX);
        let files = membership::lock_files(directories, name, bounds)?;
        for file in files.iter() {
            membership::wait_until(LOCK_TIMEOUT, || file.try_exclusive())
                .map_err(|source| Error::Directory { path: first.join(name), source })?
                .ok_or_else(in_use)?;
        }
        Ok::<_, Error>(files)
    };
    let _locks = [lock(membership::JOIN)?, lock(membership::MEMBERS)?];
    // A process may have opened the store while none of these directories could be read.
    let taken = elect::take(&elect::beacon(superblock.store));
    let _beacon = match taken.map_err(|_| in_use())? {
        TakenAddress::Now(beacon) => Some(beacon),
        TakenAddress::ByOwnUser => return Err(in_use()),
        TakenAddress::ByOther => None,
    };
    Ok(ExclusiveLocks { _locks, _beacon })
}

/// Removals beside those of files that the store does not need.
#[derive(Clone, Copy, Debug, Default)]
pub struct CleanOptions {
    /// The oldest segments, until a process can open the store with this capacity and lose nothing.
    pub capacity: Option<u64>,
    /// The segments that have only blocks of this namespace: its [`id`](crate::Namespace::id).
    pub namespace: Option<u64>,
}

/// Steps that [`Cleaner::plan`] proposes.
#[derive(Debug, Default)]
pub struct Plan {
    /// The steps, in the order in which they must be carried out.
    pub steps: Vec<Step>,
    /// Blocks of the namespace that stay, because their segments have blocks of others.
    pub namespace_blocks_left: u64,
    /// Segments that stay because they can't be read, or are another store's.
    pub segments_left: u64,
}

/// A change of one file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Remove a file.
    Remove {
        /// The file.
        path: PathBuf,
        /// Bytes that it takes on the device.
        disk_bytes: u64,
        /// Blocks in it.
        blocks: u64,
        /// Reason why the file is not needed.
        why: RemovalReason,
    },
    /// Write the footer of a segment whose process was killed. A start then reads it at once.
    Seal {
        /// The segment.
        segment: u32,
        /// Path of the segment's file.
        path: PathBuf,
    },
    /// Give a segment a number below the capacity's count of segments: a process that opens the store
    /// removes those above it.
    Renumber {
        /// The segment.
        segment: u32,
        /// Path of the segment's file.
        path: PathBuf,
        /// The segment's new number.
        to: u32,
    },
}

/// Reason to remove a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovalReason {
    /// An interrupted write left it.
    Temporary,
    /// The file has no valid header: the segment was never used, or the header is damaged.
    Header,
    /// The file does not have the length of a segment.
    Length,
    /// The segment has no block.
    Empty,
    /// The segment has only blocks of the namespace.
    Namespace,
    /// The segment is among the oldest, and the capacity is smaller.
    Capacity,
}

impl Cleaner {
    /// Locks the store in `directories`, all of them, and scans its segments.
    ///
    /// # Errors
    /// As [`Files::open`]; `InUse` if a process has the store open, or is opening it; `Format` if a segment is
    /// in a directory that is not its own.
    pub fn open(directories: &[PathBuf]) -> Result<Self> {
        let files = Files::open_to_write(directories)?;
        let directories = files.directories();
        let first = &directories[0];
        let _alone = alone(directories, files.superblock())?;
        let segments = files.segments()?;
        for segment in &segments {
            let place = segment.number as usize % directories.len();
            if segment.path.parent() != Some(&directories[place]) {
                let what = format!(
                    "{} belongs in another directory: move or remove it",
                    segment.path.display()
                );
                return Err(Error::Format { path: first.clone(), what });
            }
        }
        Ok(Self { files, segments, _alone })
    }

    /// Plans the steps that clean the store.
    ///
    /// # Errors
    /// `InvalidArgument` for a capacity that no process could open the store with.
    pub fn plan(&self, wishes: CleanOptions) -> Result<Plan> {
        let mut plan = Plan::default();
        for directory in self.files.directories() {
            let temporary = directory.join(superblock::NEW_FILE);
            if let Ok(metadata) = temporary.metadata() {
                let (disk_bytes, why) = (metadata.len(), RemovalReason::Temporary);
                plan.steps.push(Step::Remove { path: temporary, disk_bytes, blocks: 0, why });
            }
        }
        let mut kept = Vec::new();
        let mut taken = BTreeSet::new();
        for segment in &self.segments {
            match &segment.state {
                State::Free => plan.steps.push(remove(segment, 0, RemovalReason::Header)),
                State::WrongLength(_) => plan.steps.push(remove(segment, 0, RemovalReason::Length)),
                State::OfAnotherStore | State::Unreadable(_) => {
                    plan.segments_left += 1;
                    taken.insert(segment.number);
                }
                State::Used(scanned) if scanned.records.is_empty() => {
                    plan.steps.push(remove(segment, 0, RemovalReason::Empty));
                }
                State::Used(scanned) => {
                    let is_wanted = |id| scanned.records.iter().any(|it| it.block.namespace != id);
                    if wishes.namespace.is_none_or(is_wanted) {
                        kept.push((segment, scanned));
                    } else {
                        let blocks = scanned.records.len();
                        plan.steps.push(remove(segment, blocks, RemovalReason::Namespace));
                    }
                }
            }
        }
        let mut renumbered = Vec::new();
        if let Some(capacity) = wishes.capacity {
            let options = StoreOptions::new(&self.files.directories()[0], capacity);
            let bytes = self.files.superblock().geometry.segment_bytes();
            let segments = options.geometry(Some(bytes))?.segments;
            // Else that process would evict blocks at once.
            let segments = segments - free_wanted(1, segments);
            (kept, renumbered) = self.shrink(kept, &taken, segments, &mut plan);
        }
        for (segment, scanned) in &kept {
            if !scanned.is_sealed {
                let (segment, path) = (segment.number, segment.path.clone());
                plan.steps.push(Step::Seal { segment, path });
            }
            let theirs =
                scanned.records.iter().filter(|it| Some(it.block.namespace) == wishes.namespace);
            plan.namespace_blocks_left += theirs.count() as u64;
        }
        plan.steps.extend(renumbered);
        Ok(plan)
    }

    /// Keeps the newest segments of each directory: as many as have numbers below `segments`, but for those in
    /// `taken`. Returns them, and the steps that give them such numbers.
    fn shrink<'a>(
        &self,
        kept: Vec<Used<'a>>,
        taken: &BTreeSet<u32>,
        segments: u32,
        plan: &mut Plan,
    ) -> (Vec<Used<'a>>, Vec<Step>) {
        let directories = self.files.directories().len();
        let (mut still_kept, mut renumbered) = (Vec::new(), Vec::new());
        for directory in 0..directories {
            let is_here = |number: u32| number as usize % directories == directory;
            let mut here: Vec<_> =
                kept.iter().copied().filter(|(segment, _)| is_here(segment.number)).collect();
            here.sort_by_key(|(_, scanned)| std::cmp::Reverse(scanned.header.incarnation));
            let places = (0..segments).filter(|it| is_here(*it) && !taken.contains(it));
            let mut places: BTreeSet<u32> = places.collect();
            for (segment, scanned) in here.split_off(places.len().min(here.len())).into_iter().rev()
            {
                plan.steps.push(remove(segment, scanned.records.len(), RemovalReason::Capacity));
            }
            for (segment, _) in &here {
                places.remove(&segment.number);
            }
            let above = here.iter().filter(|(segment, _)| segment.number >= segments);
            for ((segment, _), to) in above.zip(places) {
                let (segment, path) = (segment.number, segment.path.clone());
                renumbered.push(Step::Renumber { segment, path, to });
            }
            still_kept.extend(here);
        }
        (still_kept, renumbered)
    }

    /// Carries the steps of a plan out, in their order, and tells `done` of each. One that fails does not
    /// end the others.
    ///
    /// # Errors
    /// `Directory` if the removals could not be made durable.
    pub fn carry_out(
        mut self,
        plan: &Plan,
        mut done: impl FnMut(&Step, io::Result<()>),
    ) -> Result<()> {
        for step in &plan.steps {
            let outcome = match step {
                Step::Remove { path, .. } => std::fs::remove_file(path),
                Step::Seal { segment, .. } => self.seal(*segment),
                Step::Renumber { segment, path, to } => self.renumber(*segment, path, *to),
            };
            done(step, outcome);
        }
        for path in self.files.directories() {
            let failed = |source| Error::Directory { path: path.clone(), source };
            sync_directory(path).map_err(failed)?;
        }
        Ok(())
    }

    fn used(&mut self, segment: u32) -> io::Result<&mut Scanned> {
        let mut segments = self.segments.iter_mut();
        match segments.find(|it| it.number == segment).map(|it| &mut it.state) {
            Some(State::Used(scanned)) => Ok(scanned),
            _ => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn seal(&mut self, segment: u32) -> io::Result<()> {
        let superblock = *self.files.superblock();
        let mut scanned = self.used(segment)?.clone();
        // A loss of power may have torn some. What a footer lists is taken for whole.
        let faults = recover::verify(self.files.disk(), &scanned);
        let is_torn = |record: &Record| {
            faults.iter().any(|(it, fault)| it == record && matches!(fault, Fault::Sum))
        };
        scanned.records.retain(|record| !is_torn(record));
        recover::seal(self.files.disk(), &superblock, &mut scanned).map_err(io::Error::other)
    }

    /// The segment's number is in the header and in the file's name. If the power fails between the two
    /// writes, the segment is lost.
    fn renumber(&mut self, segment: u32, path: &std::path::Path, to: u32) -> io::Result<()> {
        let old = self.used(segment)?.header;
        let new = crate::log::SegmentHeader { segment: to, ..old };
        let new_path = path.with_file_name(superblock::segment_file(to));
        if new_path.try_exists()? {
            return Err(io::ErrorKind::AlreadyExists.into());
        }
        let disk = self.files.disk();
        disk.write_at(segment, 0, &new.encode().0)?;
        disk.sync(segment)?;
        std::fs::rename(path, new_path).inspect_err(|_| {
            let _ = disk.write_at(segment, 0, &old.encode().0);
        })
    }
}

/// A segment that has blocks.
type Used<'a> = (&'a Segment, &'a Scanned);

fn remove(segment: &Segment, blocks: usize, why: RemovalReason) -> Step {
    let (path, disk_bytes) = (segment.path.clone(), segment.disk_bytes);
    Step::Remove { path, disk_bytes, blocks: blocks as u64, why }
}
