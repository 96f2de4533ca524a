//! State that all parts of an open store share within one process.

use crate::clock::Clock;
use crate::index::{Entry, Member, MemberId, Segment, SegmentState};
use crate::key::Key;
use crate::log::{self, Appender, Superblock};
use crate::stats::Counters;
use crate::threads::task_pool::LOOK_EVERY;
use crate::tiers::disk::gate::is_hang;
use crate::tiers::disk::{Directories, is_of_device};
use kvferry_sys::sync::{Mutex, RwLock};
use rustc_hash::FxHashSet;
use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Free segments: for each process, and of all segments at most. Two at least, because writers leave one to
/// the keeper.
pub(crate) const FREE_PER_PROCESS: u32 = 2;
pub(crate) const FREE_SHARE: u32 = 8;
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
    /// Members whose connections to this process, the keeper, are open, and those whose connections have closed.
    connections: Mutex<Connections>,
    /// Segments with an operation in progress that was given up: number, state until the operation ends, and state
    /// afterwards.
    late: Mutex<Vec<(u32, SegmentState, SegmentState)>>,
    /// Segments of the keeper's own that could not be sealed as their directory hangs.
    unsealed: Mutex<Vec<Appender>>,
    /// Held, shared, by each call that reads or writes, and alone by the store's `close`: what such a call wrote after
    /// another process had opened the store again could be in that process's way.
    pub(crate) calls: RwLock<()>,
    /// Time before which no other fault is logged.
    quiet_until_ms: AtomicU64,
}

impl Core {
    pub(crate) fn new(disk: Directories, superblock: Superblock, member: Member) -> Self {
        let clock = Clock::from_word(member.clock());
        let (counters, quiet_until_ms) = (Counters::default(), AtomicU64::new(0));
        Counters::add(&counters.lost_directories, disk.lost());
        let (connections, late, unsealed) = Default::default();
        Self {
            disk,
            superblock,
            member,
            clock,
            counters,
            connections,
            late,
            unsealed,
            calls: RwLock::new(()),
            quiet_until_ms,
        }
    }

    /// A member has connected to this process.
    pub(crate) fn connected(&self, member: MemberId) {
        let mut connections = self.connections.lock();
        connections.open.insert(member);
        connections.closed.remove(&member);
    }

    /// The connection of a member has ended: if its process was killed, the last of its threads has closed it.
    pub(crate) fn hung_up(&self, member: MemberId) {
        let mut connections = self.connections.lock();
        connections.open.remove(&member);
        let joined: FxHashSet<_> = self.member.members().collect();
        connections.closed.retain(|it| joined.contains(it));
        connections.closed.insert(member);
    }

    /// Whether no thread of a member that has died can write any more. Its mark is that of one thread; another one
    /// may be waiting for a device.
    pub(crate) fn has_ended(&self, dead: MemberId) -> bool {
        let connections = self.connections.lock();
        let is_open = connections.open.contains(&dead);
        connections.closed.contains(&dead) || !is_open && !self.member.has_threads(dead)
    }

    /// Whether a device may still be carrying out what a member has begun to write whose threads have ended.
    pub(crate) fn is_writing_late(&self, dead: MemberId) -> bool {
        let is_late = |(number, it): (u32, Segment)| {
            matches!(it.state, SegmentState::Active(_)) && self.disk.is_written_late(number)
        };
        self.member.held_by(dead).any(is_late)
    }

    /// Leaves what a process leaves that is killed.
    #[cfg(test)]
    pub(crate) fn die(&self) {
        self.disk.close_all();
        self.member.die();
    }

    /// The number of the block's directory.
    pub(crate) fn directory_of(&self, entry: &Entry) -> usize {
        self.disk.number_of(self.superblock.geometry.locate(entry.page).0)
    }

    /// True if the directory of the block hangs.
    pub(crate) fn hangs(&self, entry: &Entry) -> bool {
        self.disk.hangs(self.superblock.geometry.locate(entry.page).0)
    }

    /// Number of leading blocks whose directories do not hang.
    pub(crate) fn readable(&self, found: &[Entry]) -> usize {
        if found.is_empty() || !self.disk.is_any_hanging() {
            return found.len();
        }
        found.iter().take_while(|it| !self.hangs(it)).count()
    }

    /// The block that a put finds, under a name of this check. One that may be torn is compared with its sum, and
    /// leaves if it is not whole: the put stores it again. One that can't be compared at the moment stays, and is not
    /// taken for whole: the put stores another copy, which takes its place.
    pub(crate) fn find_whole(&self, key: &Key, check: impl Fn() -> u64) -> Option<Entry> {
        loop {
            let entry = self.member.find(key)?;
            let (segment, page) = self.superblock.geometry.locate(entry.page);
            if !self.member.is_unverified(segment) {
                return Some(entry);
            }
            let sum = log::recover::sum_of(&self.disk, segment, page, entry.len);
            match &sum {
                Ok(sum) if sum ^ check() == entry.sum => return Some(entry),
                // This process is short of descriptors or memory, or the device hangs.
                Err(e) if !is_of_device(e) || is_hang(e) => {
                    self.fault("read a block of", segment, e);
                    return None;
                }
                _ => {}
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

    /// Frees a segment without live blocks on the disk. Returns the state that it is to have.
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

    /// Changes the state of a segment that this process holds, once no operation on it is in progress that was given up:
    /// what is written late must not land in what another process has put there.
    pub(crate) fn settle(&self, segment: u32, from: SegmentState, to: SegmentState) -> bool {
        if !self.disk.is_held(segment) {
            return self.member.set_segment(segment, from, to);
        }
        // Also of a process that has ended, whose number is given to another one.
        let mine = SegmentState::Collecting(self.member.id());
        let is_mine = from.owner() == Some(self.member.id());
        if !is_mine && !self.member.set_segment(segment, from, mine) {
            return false;
        }
        self.late.lock().push((segment, if is_mine { from } else { mine }, to));
        true
    }

    /// Does what waits for operations that were given up.
    pub(crate) fn settle_late(&self) {
        let late = std::mem::take(&mut *self.late.lock());
        let (held, ended): (Vec<_>, Vec<_>) =
            late.into_iter().partition(|(segment, ..)| self.disk.is_held(*segment));
        for (segment, from, to) in ended {
            self.member.set_segment(segment, from, to);
        }
        self.late.lock().extend(held);
    }

    /// True while given-up operations or unsealed segments wait for a device.
    pub(crate) fn awaits_device(&self) -> bool {
        !self.late.lock().is_empty() || !self.unsealed.lock().is_empty()
    }

    /// Keeps a segment of the keeper's own that can't be sealed now.
    pub(crate) fn keep_unsealed(&self, own: Appender) {
        self.unsealed.lock().push(own);
    }

    /// Seals what [`Core::keep_unsealed`] was given, where the directories do not hang any more.
    pub(crate) fn seal_kept(&self, seal: impl Fn(&Self, &mut Appender) -> bool) {
        for mut own in std::mem::take(&mut *self.unsealed.lock()) {
            if self.disk.hangs(own.segment()) || !seal(self, &mut own) {
                self.keep_unsealed(own);
            }
        }
    }

    /// Returns when no call is in progress, or `gives_up` says so. To be called once none begins.
    pub(crate) fn wait_for_calls(&self, gives_up: impl Fn() -> bool) {
        while self.calls.try_write().is_none() {
            if gives_up() {
                return;
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }

    /// Returns when no call and no operation on a file is in progress, also one that was given up. The segments that
    /// this process holds are given back then.
    pub(crate) fn wait_quiet(&self) {
        drop(self.calls.write());
        self.disk.wait_quiet();
        self.leave_segments();
    }

    /// Gives back the segments that this process holds, which is about to leave: the keeper seals them. No operation on
    /// them is in progress.
    fn leave_segments(&self) {
        self.settle_late();
        for (segment, it) in self.member.held_by(self.member.id()) {
            self.disk.unlock_at_end(segment);
            self.member.note_open(segment, true);
            self.member.set_segment(segment, it.state, SegmentState::Sealed);
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

    /// Logs that no space can be freed. False, and it does not, if a fault was just logged.
    pub(crate) fn stuck(&self) -> bool {
        if !self.may_log() {
            return false;
        }
        let is_held = |segment: &Segment| segment.state.owner().is_some();
        let held = self.member.segments().filter(|(_, segment)| is_held(segment)).count();
        let (all, file) = (self.member.geometry().segments, self.disk.path_of(0));
        let directory = file.parent().unwrap_or(&file).display();
        tracing::warn!(
            "the store in {directory} can't free space: {held} of its {all} segments are being \
             written; it needs more segments than processes that put blocks: give it a larger \
             capacity, or make it anew with shorter segments"
        );
        true
    }

    /// Whether a fault may be logged now.
    fn may_log(&self) -> bool {
        let now = self.clock.now_ms();
        let until = self.quiet_until_ms.load(Relaxed);
        let next = now + FAULTS_EVERY_MS;
        now >= until && self.quiet_until_ms.compare_exchange(until, next, Relaxed, Relaxed).is_ok()
    }
}

/// Segments that the keeper of so many processes keeps free.
pub(crate) fn free_wanted(processes: u32, segments: u32) -> u32 {
    let most = (segments / FREE_SHARE).max(FREE_PER_PROCESS);
    processes.saturating_mul(FREE_PER_PROCESS).clamp(FREE_PER_PROCESS, most)
}
