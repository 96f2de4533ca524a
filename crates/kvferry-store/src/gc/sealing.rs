//! Seals segments: what is in them is on the disk then, and a restart finds it in one read.

use crate::core::Core;
use crate::index::SegmentState;
use crate::log::{self, Appender};
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::is_of_device;
use std::io;

/// Segments that are to be sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SealScope {
    /// Full segments, except for the last ones while puts go on: a sync beside them halves their throughput.
    Excess,
    /// Full segments.
    Full,
    /// Full segments, and the one that is not full.
    All,
}

/// Bytes of full segments that wait until the puts pause, at most. No more than an eighth of the store.
const UNSEALED_BYTES: u64 = 1 << 30;

/// Full segments that wait until the puts pause, at most.
pub(crate) fn unsealed_max(core: &Core) -> usize {
    let geometry = core.superblock.geometry;
    let bytes = UNSEALED_BYTES
        .min(geometry.segment_bytes() * u64::from(core.member.geometry().segments) / 8);
    usize::try_from(bytes / geometry.segment_bytes()).unwrap_or(usize::MAX)
}

/// Seals a segment. One that can't be sealed is as good while there is power, and slower to open after a restart.
/// That is noted for all processes. A segment that could not be synced gets no footer: a device that has failed to write
/// pages may report the next sync of them as done, and a restart takes what a footer lists for whole. False if its
/// directory hangs, a write that was given up is under way in it, or it can't be unlocked: it is still this process's, and to
/// be sealed later. What is written late must not land in what another process has put there.
pub(crate) fn seal(core: &Core, appender: &mut Appender) -> bool {
    let segment = appender.segment();
    if core.disk.is_held(segment) {
        return false;
    }
    if core.member.is_unsynced(segment) {
        core.member.note_open(segment, true);
    } else if let Err(e) = appender.seal(&core.disk).map_err(log::Error::into_io) {
        core.fault("seal", segment, &e);
        if is_hang(&e) {
            return false;
        }
        core.member.note_open(segment, true);
        note_failed_sync(core, segment, &e);
    }
    if let Err(e) = core.disk.unlock(segment) {
        core.fault("unlock", segment, &e);
        return false;
    }
    let mine = SegmentState::Active(core.member.id());
    core.member.set_segment(segment, mine, SegmentState::Sealed);
    true
}

/// Notes for all processes that a segment could not be synced, unless this process was short of descriptors or memory,
/// or the device hangs: then the next sync tells.
pub(crate) fn note_failed_sync(core: &Core, segment: u32, error: &io::Error) {
    if is_of_device(error) && !is_hang(error) {
        core.member.note_unsynced(segment);
    }
}
