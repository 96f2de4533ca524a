//! Fills the index from the disk.

use crate::clock::Clock;
use crate::error::{Error, Result};
use crate::index::{self, Entry, Index, Inserted, Member, New};
use crate::key::Key;
use crate::log::recover::{Scanned, verify};
use crate::log::{self, Disk, Superblock};
use crate::options::Geometry;
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::{Directories, is_of_device};
use std::collections::{BTreeMap, BTreeSet};
use std::error::Error as _;
use std::io;
use std::sync::Arc;

/// Makes the index of a store that no other process has open. Segments that can't be read are left out; their
/// blocks are missed.
pub(crate) fn fill(
    disk: &Directories,
    superblock: &Superblock,
    geometry: Geometry,
) -> Result<Arc<Index>> {
    let failed = |source| Error::Directory { path: disk.path_of(0), source };
    let beyond = disk.discard_others(geometry.segments).map_err(failed)?;
    if beyond > 0 {
        tracing::warn!(
            "the store was opened with a smaller capacity than before: {beyond} segments beyond it were removed, with \
             their blocks"
        );
    }
    let index = Index::create(index::Geometry {
        slots: geometry.blocks_max,
        segments: geometry.segments,
        pages_per_segment: superblock.geometry.pages(),
    });
    let index = Arc::new(index.map_err(failed)?);
    disk.share(&index);
    let member = index.join().map_err(failed)?;
    let mut scanned = list(disk, superblock, geometry, &index)?;
    // In the order in which they were written: a parent is there before what is behind it, mostly.
    scanned.sort_by_key(|it| it.header.incarnation);
    let newest_ms = scanned.iter().flat_map(|it| {
        let begun_ms = it.header.created_ms.saturating_sub(superblock.created_ms);
        let put_ms = it.records.iter().map(|it| u64::from(it.block.time) * 1000);
        put_ms.chain([begun_ms])
    });
    let clock = Clock::begin(superblock.created_ms, newest_ms.max().unwrap_or(0));
    index.set_clock(clock.to_word());
    let sealed = scanned.iter().filter(|it| it.is_sealed).map(|it| it.header.segment);
    let sealed: BTreeSet<u32> = sealed.collect();
    for it in &scanned {
        member.restore_segment(it.header.segment, it.header.incarnation);
        // The keeper seals it. Until then a put looks whether what it finds there is whole.
        if !it.is_sealed {
            member.note_unverified(it.header.segment);
            // Its sync may have failed, which no process remembers.
            disk.forget_cached(it.header.segment);
        }
    }
    let mut filler = Filler { disk, superblock, member: &member, sealed, synced: BTreeMap::new() };
    let mut room = geometry.blocks_max as usize;
    let fits = |it: &&Scanned| {
        let left = room.checked_sub(it.records.len());
        room = left.unwrap_or(0);
        left.is_some()
    };
    let newest = scanned.iter().rev().take_while(fits).count();
    let (older, newest) = scanned.split_at(scanned.len() - newest);
    let _ = newest.iter().all(|it| filler.insert(it));
    // Blocks that are there twice have left room.
    if !older.iter().rev().all(|it| filler.insert(it)) {
        let blocks: usize = older.iter().chain(newest).map(|it| it.records.len()).sum();
        let capacity = geometry.blocks_max;
        tracing::warn!(
            "segments hold {blocks} blocks, index capacity {capacity}: the oldest are not indexed"
        );
    }
    drop(member);
    Ok(index)
}

/// Lists the blocks of all segments. Segments that can't be read are withheld.
fn list(
    disk: &Directories,
    superblock: &Superblock,
    geometry: Geometry,
    index: &Index,
) -> Result<Vec<Scanned>> {
    let mut unreadable = Vec::new();
    let scanned = log::recover::scan_all(disk, superblock)
        .map_err(|e| Error::Directory { path: disk.path_of(0), source: io::Error::other(e) })?
        .into_iter()
        // Others are left where files can't be removed.
        .filter(|(segment, _)| *segment < geometry.segments)
        .filter_map(|(segment, scanned)| match scanned {
            Ok(scanned) => scanned,
            Err(error) => {
                // The keeper frees it once it can be written. Until then its footer names what is in it.
                index.withhold_segment(segment);
                unreadable.push((segment, error));
                None
            }
        })
        .collect();
    // Once all were listed: a directory may have been lost by that. What is in its segments is not known.
    for segment in (0..geometry.segments).filter(|it| disk.is_in_lost_directory(*it)) {
        index.withhold_segment(segment);
    }
    if let Some((segment, error)) = unreadable.first() {
        let (file, others) = (disk.path_of(*segment), unreadable.len() - 1);
        let file = file.display();
        let error = error.source().map_or_else(|| error.to_string(), ToString::to_string);
        tracing::warn!(
            error,
            "the store can't read {file}, nor {others} other segments; their blocks are missed"
        );
    }
    Ok(scanned)
}

/// Puts blocks of segments into the index.
struct Filler<'a> {
    disk: &'a Directories,
    superblock: &'a Superblock,
    member: &'a Member,
    /// Segments that are sealed.
    sealed: BTreeSet<u32>,
    /// Whether segments could be synced, of those for which that was tried.
    synced: BTreeMap<u32, bool>,
}

impl Filler<'_> {
    /// Inserts a segment's blocks. False if the index is full.
    fn insert(&mut self, it: &Scanned) -> bool {
        it.records.iter().all(|record| {
            let block = &record.block;
            let parent = block.parent.and_then(|key| self.member.find(&Key(key)));
            let new = New {
                sum: block.sum,
                parent: parent.map(|entry| entry.slot),
                page: self.superblock.geometry.place(it.header.segment, record.page),
                len: block.len,
                retention: block.retention,
                now: block.time,
            };
            match self.member.insert(Key(block.key), new) {
                Inserted::Full => return false,
                // Each whole copy is as good. What a sealed segment lists was synced before; in others, a block may
                // be torn that is whole where it was before. They are synced before a copy replaces another: the
                // keeper frees a segment in which no block lives, and that is durable at once.
                Inserted::Exists(there) => {
                    let (segment, _) = self.superblock.geometry.locate(there.page);
                    let alone = || Scanned { records: vec![*record], ..it.clone() };
                    let is_whole = it.is_sealed
                        || !self.sealed.contains(&segment)
                            && verify(self.disk, &alone()).is_empty()
                            && self.sync(it.header.segment);
                    if is_whole {
                        replace(self.member, &there, new);
                    }
                }
                Inserted::New(_) | Inserted::Contended => {}
            }
            true
        })
    }

    /// Syncs a segment, once. False if that fails.
    fn sync(&mut self, segment: u32) -> bool {
        let Self { disk, member, synced, .. } = self;
        *synced.entry(segment).or_insert_with(|| match disk.sync(segment) {
            Ok(()) => true,
            Err(error) => {
                let file = disk.path_of(segment);
                tracing::warn!(%error, "the store can't sync {}", file.display());
                if is_of_device(&error) && !is_hang(&error) {
                    member.note_unsynced(segment);
                }
                false
            }
        })
    }
}

/// A block gives way to another copy of it.
fn replace(member: &Member, there: &Entry, new: New) {
    if (there.sum, there.len) == (new.sum, new.len) {
        member.relocate(there, new.page);
    } else if member.remove(there) {
        member.insert(there.key, new);
    }
}
