//! Takes over what dead processes have left.

use super::copy::UNREADABLE_MAX;
use super::evict::is_there;
use super::{Keeper, RETRY_EVERY};
use crate::core::Core;
use crate::gc::sealing::note_failed_sync;
use crate::index::{Entry, MemberId, SegmentState};
use crate::key::Key;
use crate::log::{self, Disk};
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::is_of_device;
use rustc_hash::FxHashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Instant;

impl Keeper {
    /// Releases the segments and slots of processes that have died.
    pub(crate) fn repair(&mut self) {
        let core = Arc::clone(&self.core);
        let (dead, awaited): (Vec<_>, Vec<_>) = core
            .member
            .members()
            .filter(|it| core.member.has_died(*it))
            .partition(|it| core.has_ended(*it) && !core.is_writing_late(*it));
        self.awaits_end = !awaited.is_empty();
        if dead.is_empty() {
            return;
        }
        self.left.next = 0;
        // All of them, before anything is freed.
        let living = self.living();
        let is_kept = dead.iter().map(|it| self.keep_left(*it, &living)).collect::<Vec<_>>();
        for (dead, is_kept) in dead.into_iter().zip(is_kept) {
            if !is_kept {
                // Nothing of it is given to another one before.
                self.awaits_end = true;
                continue;
            }
            if self.drain(dead.number) {
                self.begin_anew();
            }
            for (number, segment) in core.member.held_by(dead) {
                // Blocks that it published stay valid. Space that it did not publish is freed.
                let to = match living.contains(&number) {
                    true => SegmentState::Sealed,
                    false => self.free(number, Some(&living)),
                };
                core.settle(number, segment.state, to);
            }
            // If it fails, the next process that leaves has it tried again.
            core.member.sweep(dead);
        }
        core.member.recount();
    }

    /// The segments in which blocks live. Their counters may be wrong after a death.
    pub(super) fn living(&self) -> FxHashSet<u32> {
        let segment = |entry: Entry| self.core.superblock.geometry.locate(entry.page).0;
        self.core.member.iter().map(segment).collect()
    }

    /// Syncs what a dead process was writing. False if a device hangs.
    pub(super) fn keep_left(&self, dead: MemberId, living: &FxHashSet<u32>) -> bool {
        let core = &self.core;
        for (number, segment) in core.member.held_by(dead) {
            if !matches!(segment.state, SegmentState::Active(_)) || !living.contains(&number) {
                continue;
            }
            core.member.note_open(number, true);
            match core.disk.sync(number) {
                Ok(()) => core.member.note_copies(number, false),
                Err(e) => {
                    core.fault("sync", number, &e);
                    if is_hang(&e) {
                        return false;
                    }
                    note_failed_sync(core, number, &e);
                }
            }
        }
        true
    }

    /// Seals a segment that a dead process has not sealed. Returns whether there may be more: to read one takes its time.
    pub(super) fn seal_left(&mut self, is_stopping: &AtomicBool) -> bool {
        if self.left.failed_at.is_some_and(|at| at.elapsed() < RETRY_EVERY) {
            return false;
        }
        let core = Arc::clone(&self.core);
        for number in std::mem::take(&mut self.left.next)..core.member.geometry().segments {
            if is_stopping.load(Relaxed) {
                return false;
            }
            // Of those without a sync: a device that has failed to write pages may report the next one of them as done,
            // and they are lost.
            if !core.member.is_open(number) || core.member.is_unsynced(number) {
                continue;
            }
            let mine = SegmentState::Collecting(core.member.id());
            if !core.member.set_segment(number, SegmentState::Sealed, mine) {
                continue;
            }
            self.collecting = Some(number);
            let sealed = seal_left(&core, number, is_stopping);
            self.collecting = None;
            if let Ok(true) = sealed {
                core.member.note_open(number, false);
            }
            core.settle(number, mine, SegmentState::Sealed);
            match sealed {
                Ok(true) => {}
                // It is being stopped.
                Ok(false) => return false,
                Err(e) => {
                    core.fault("seal", number, &e);
                    self.left.has_failed = true;
                }
            }
            self.left.next = number + 1;
            return true;
        }
        let has_failed = std::mem::take(&mut self.left.has_failed);
        self.left.failed_at = has_failed.then(Instant::now);
        false
    }
}

/// Seals a segment whose process has ended, and which this one holds. A restart takes what a footer lists for whole. Blocks that the index has
/// were written whole, unless it has them from the disk: those are compared with their sums, and leave if they are
/// torn. False if the keeper is stopped meanwhile.
fn seal_left(core: &Core, segment: u32, is_stopping: &AtomicBool) -> io::Result<bool> {
    let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
    let Some(mut scanned) = scanned.map_err(log::Error::into_io)? else { return Ok(true) };
    if let Some(error) = scanned.unreadable {
        // Its footer would not list all blocks.
        return Err(io::Error::other(error));
    }
    let is_unverified = core.member.is_unverified(segment);
    let (mut whole, mut unreadable) = (Vec::with_capacity(scanned.records.len()), 0);
    for record in scanned.records {
        let here = core.superblock.geometry.place(segment, record.page);
        let entry = core.member.find(&Key(record.block.key)).filter(|it| it.page == here);
        let Some(entry) = entry else { continue };
        if is_unverified {
            if is_stopping.load(Relaxed) {
                return Ok(false);
            }
            match log::recover::sum_of(&core.disk, segment, record.page, record.block.len) {
                Ok(sum) if sum ^ record.block.check == entry.sum => {}
                Err(e) if !is_of_device(&e) || is_hang(&e) || unreadable == UNREADABLE_MAX => {
                    return Err(e);
                }
                torn => {
                    unreadable += u32::from(torn.is_err());
                    if core.member.remove(&entry) {
                        core.torn(segment, &entry, torn.err().as_ref());
                    } else if is_there(core, &entry) {
                        // A process that is stopped holds its lock.
                        return Err(io::ErrorKind::WouldBlock.into());
                    }
                    continue;
                }
            }
        }
        whole.push(record);
    }
    scanned.records = whole;
    let sealed = log::recover::seal(&core.disk, &core.superblock, &mut scanned);
    sealed.map_err(log::Error::into_io).inspect_err(|e| note_failed_sync(core, segment, e))?;
    Ok(true)
}
