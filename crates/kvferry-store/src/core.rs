//! What the parts of a store in one process share.

use crate::clock::Clock;
use crate::disk::Directories;
use crate::index::{Entry, Member, MemberId, Segment, SegmentState};
use crate::keeper::free_wanted;
use crate::key::Key;
use crate::log::{self, Superblock};
use crate::stats::Counters;
use crate::sync::lock;
use rustc_hash::FxHashSet;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Milliseconds between two log lines about faults of the disks.
const FAULTS_EVERY_MS: u64 = 10_000;

#[derive(Debug, Default)]
struct Connections {
    open: FxHashSet<MemberId>,
    closed: FxHashSet<MemberId>,
}

#[derive(Debug)]
pub(crate) struct Core {
    pub(crate) disk: Directories,
    pub(crate) superblock: Superblock,
    pub(crate) member: Member,
    pub(crate) clock: Clock,
    pub(crate) counters: Counters,
    /// What the keeper knows of the processes that were connected to it.
    connections: Mutex<Connections>,
    /// When a fault may be logged again.
    quiet_until_ms: AtomicU64,
}

impl Core {
    pub(crate) fn new(disk: Directories, superblock: Superblock, member: Member) -> Self {
        let clock = Clock::from_word(member.clock());
        let (counters, quiet_until_ms) = (Counters::default(), AtomicU64::new(0));
        Counters::add(&counters.lost_directories, disk.lost());
        let connections = Mutex::default();
        Self { disk, superblock, member, clock, counters, connections, quiet_until_ms }
    }

    /// A member has connected to this process.
    pub(crate) fn connected(&self, member: MemberId) {
        let mut connections = lock(&self.connections);
        connections.open.insert(member);
        connections.closed.remove(&member);
    }

    /// The connection of a member has ended: if its process was killed, the last of its threads has closed it.
    pub(crate) fn hung_up(&self, member: MemberId) {
        let mut connections = lock(&self.connections);
        connections.open.remove(&member);
        let joined: FxHashSet<_> = self.member.members().collect();
        connections.closed.retain(|it| joined.contains(it));
        connections.closed.insert(member);
    }

    /// Whether no thread of a member that has died can write any more. Its mark is that of one thread; another one
    /// may be waiting for a device.
    pub(crate) fn has_ended(&self, dead: MemberId) -> bool {
        let connections = lock(&self.connections);
        let is_open = connections.open.contains(&dead);
        connections.closed.contains(&dead) || !is_open && !self.member.has_threads(dead)
    }

    /// The block that a put finds, under a name of this check. One that may be torn is compared with its sum, and
    /// leaves if it is not whole: the put stores it again.
    pub(crate) fn find_whole(&self, key: &Key, check: impl Fn() -> u64) -> Option<Entry> {
        loop {
            let entry = self.member.find(key)?;
            let (segment, page) = self.superblock.geometry.locate(entry.page);
            if !self.member.is_unverified(segment) {
                return Some(entry);
            }
            let sum = log::recover::sum_of(&self.disk, segment, page, entry.len);
            if sum.as_ref().is_ok_and(|sum| sum ^ check() == entry.sum) {
                return Some(entry);
            }
            // Not, if the keeper has moved it meanwhile: then it was whole.
            if self.member.remove(&entry) {
                self.torn(segment, &entry, sum.err().as_ref());
                return None;
            }
            if self.member.find(key) == Some(entry) {
                // A process that is stopped holds its lock.
                return None;
            }
        }
    }

    /// Notes that a block was removed which was torn, as a crash does to what is being written, or can't be read.
    pub(crate) fn torn(&self, segment: u32, entry: &Entry, error: Option<&io::Error>) {
        if let Some(error) = error {
            self.fault("read a block of", segment, error);
            Counters::add(&self.counters.failed, 1);
        }
        self.member.note_removed(entry.slot);
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

    /// Logs that no space can be freed.
    pub(crate) fn stuck(&self) {
        let is_held = |segment: &Segment| segment.state.owner().is_some();
        let held = self.member.segments().filter(|(_, segment)| is_held(segment)).count();
        let (all, file) = (self.member.geometry().segments, self.disk.path_of(0));
        let directory = file.parent().unwrap_or(&file).display();
        tracing::warn!(
            "the store in {directory} can't free space: {held} of its {all} segments are being \
             written; it needs more segments than processes that put blocks: give it a larger \
             capacity, or make it anew with shorter segments"
        );
    }

    /// Whether a fault may be logged now.
    fn may_log(&self) -> bool {
        let now = self.clock.now_ms();
        let until = self.quiet_until_ms.load(Relaxed);
        let next = now + FAULTS_EVERY_MS;
        now >= until && self.quiet_until_ms.compare_exchange(until, next, Relaxed, Relaxed).is_ok()
    }
}
