//! What the parts of a store in one process share.

use crate::clock::Clock;
use crate::disk::Directories;
use crate::index::{Member, Segment, SegmentState};
use crate::keeper::free_wanted;
use crate::log::{self, Superblock};
use crate::stats::Counters;
use std::fmt::Display;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Milliseconds between two log lines about faults of the disks.
const FAULTS_EVERY_MS: u64 = 10_000;

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) disk: Directories,
    pub(crate) superblock: Superblock,
    pub(crate) member: Member,
    pub(crate) clock: Clock,
    pub(crate) counters: Counters,
    /// When a fault may be logged again.
    quiet_until_ms: AtomicU64,
}

impl Core {
    pub(crate) fn new(disk: Directories, superblock: Superblock, member: Member) -> Self {
        let clock = Clock::from_word(member.clock());
        let (counters, quiet_until_ms) = (Counters::default(), AtomicU64::new(0));
        Counters::add(&counters.lost_directories, disk.lost());
        Self { disk, superblock, member, clock, counters, quiet_until_ms }
    }

    /// Segments that no process uses.
    pub(crate) fn free_segments(&self) -> usize {
        let is_free = |segment: &Segment| segment.state == SegmentState::Free;
        self.member.segments().filter(|(_, segment)| is_free(segment)).count()
    }

    /// Segments that no process can use at the moment.
    pub(crate) fn withheld_segments(&self) -> usize {
        let is_withheld = |segment: &Segment| segment.state == SegmentState::Withheld;
        self.member.segments().filter(|(_, segment)| is_withheld(segment)).count()
    }

    /// Segments that the keeper keeps free, for the processes that have the store open.
    pub(crate) fn wanted_segments(&self) -> usize {
        let processes = u32::try_from(self.member.members().count()).unwrap_or(u32::MAX);
        let withheld = u32::try_from(self.withheld_segments()).unwrap_or(u32::MAX);
        free_wanted(processes, self.member.geometry().segments.saturating_sub(withheld)) as usize
    }

    /// Frees a segment, in which no block lives, on the disk. Returns the state that it is to have.
    pub(crate) fn freed(&self, segment: u32) -> SegmentState {
        match log::free(&self.disk, segment) {
            Ok(()) => SegmentState::Free,
            // Its process died before it made the file.
            Err(log::Error::Segment { source, .. }) if source.kind() == ErrorKind::NotFound => {
                SegmentState::Free
            }
            Err(e) => {
                self.fault("free", segment, &e);
                SegmentState::Withheld
            }
        }
    }

    /// Logs that a device failed, unless that was just said.
    pub(crate) fn fault(&self, doing: &str, segment: u32, error: &impl Display) {
        if self.may_log() {
            let file = self.disk.path_of(segment);
            let file = file.display();
            tracing::warn!(%error, "the store can't {doing} {file}; its blocks are missed");
        }
    }

    /// Logs that a segment can't be begun, unless a fault was just logged.
    pub(crate) fn withheld(&self, segment: u32, error: &impl Display) {
        if self.may_log() {
            let file = self.disk.path_of(segment);
            let file = file.display();
            tracing::warn!(%error, "the store can't begin {file}; it has less space for now");
        }
    }

    /// Whether a fault may be logged now.
    fn may_log(&self) -> bool {
        let now = self.clock.now_ms();
        let until = self.quiet_until_ms.load(Relaxed);
        let next = now + FAULTS_EVERY_MS;
        now >= until && self.quiet_until_ms.compare_exchange(until, next, Relaxed, Relaxed).is_ok()
    }
}
