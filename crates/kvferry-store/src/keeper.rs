//! Frees space: what the keeper does, on its worker thread.
//!
//! Some segments are kept free, for the processes that put blocks. When fewer are, the segment with the least
//! in it is collected: what lives in it is copied to a segment of the keeper's own. Before that, blocks are
//! evicted until so little is in it that copying is worth it. Writers leave the last free segment to the
//! keeper.

use crate::core::Core;
use crate::disk::is_of_device;
use crate::index::{Entry, Event, Segment, SegmentState, SlotId};
use crate::key::Key;
use crate::log::format::{EXTENT_RECORDS, bytes_of, pages_of};
use crate::log::{self, Appender, Disk, Record};
use crate::policy::{Kept, Policy, Retention};
use crate::stats::Counters;
use crate::writer::{begin_segment, seal};
use crc_fast::CrcAlgorithm;
use rustc_hash::FxHashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The part of a segment's pages that may live when it is collected. The more, the more is kept, and the more
/// is copied for each new block: at most four times as much.
const LIVE_SHARE: f64 = 0.8;
/// Segments that may be collected one after another, each of which needs another segment for what it held. More
/// of them mean that their blocks fill segments badly, and that copying them gains nothing.
const FRUITLESS_MAX: u32 = 8;
/// Pages of a segment that are not data, at least: headers and the footer.
const OVERHEAD_PAGES: u32 = 4;
/// Pages that are evicted before the segments are looked at again, as a part of a segment.
const EVICTED_SHARE: u32 = 8;
/// The part of the index's slots that blocks may take.
const SLOT_SHARE: f64 = 0.98;
/// Free segments: for each process, and of all segments at most. Two at least, because writers leave one to
/// the keeper.
const FREE_PER_PROCESS: u32 = 2;
const FREE_SHARE: u32 = 8;
/// Huge pages that are made each time the keeper looks: what waits for it waits for so many milliseconds, at most.
const HUGE_PAGES: usize = 16;
/// Data that is copied at once.
const COPY_BYTES: usize = 4 << 20;
/// Blocks of a segment that can't be read, until the segment counts as unreadable: a device that fails may take
/// seconds for each.
const UNREADABLE_MAX: u32 = 16;
/// How often withheld segments are tried again, while space is needed.
const RETRY_EVERY: Duration = Duration::from_secs(1);

/// How often, and how many times, the keeper looks for a segment to copy to until it takes none as free.
const LAST_EVERY: Duration = Duration::from_millis(1);
const LAST_TRIES: u32 = 5;

#[derive(Debug)]
pub(crate) struct Keeper {
    core: Arc<Core>,
    policy: Policy,
    pins: Pins,
    /// Where what lives is copied to.
    own: Option<Appender>,
    /// Counts the segments that were begun for it.
    begun: u64,
    /// Blocks of the segment that is collected that can't be read.
    unreadable: u32,
    /// When withheld segments were last tried.
    retried_at: Option<Instant>,
}

impl Keeper {
    /// Of a process that has just become the keeper.
    pub(crate) fn new(core: Arc<Core>) -> Self {
        let policy = rebuild(&core);
        let pins = Pins::default();
        let mut keeper =
            Self { core, policy, pins, own: None, begun: 0, unreadable: 0, retried_at: None };
        keeper.repair();
        keeper
    }

    /// Gives back what processes have left that died.
    pub(crate) fn repair(&mut self) {
        let member = &self.core.member;
        let dead: Vec<_> = member.members().filter(|it| member.has_died(*it)).collect();
        if dead.is_empty() {
            return;
        }
        for dead in dead {
            if self.drain(dead.number) {
                self.policy = rebuild(&self.core);
                self.pins = Pins::default();
            }
            for (number, segment) in self.core.member.held_by(dead) {
                // What it wrote is as good as before. Nothing may live where it was about to write.
                let to = match segment.live_blocks {
                    0 => self.core.freed(number),
                    _ => SegmentState::Sealed,
                };
                self.core.member.set_segment(number, segment.state, to);
            }
            // If it fails, the next process that leaves has it tried again.
            self.core.member.sweep(dead);
        }
        self.core.member.recount();
    }

    /// Takes the events, and frees space if there is too little.
    pub(crate) fn look(&mut self, is_stopping: &AtomicBool) {
        self.hear();
        self.evict_due();
        self.keep_slots();
        self.keep_segments(is_stopping);
        self.core.member.collapse(HUGE_PAGES);
    }

    /// Takes the events of all processes.
    fn hear(&mut self) {
        let mut lost = false;
        for number in 0..crate::index::MAX_MEMBERS {
            lost |= self.drain(u8::try_from(number).expect("few members"));
        }
        let is_behind = (self.policy.len() as u64) < self.core.member.live() / 10 * 9;
        if lost || is_behind {
            self.policy = rebuild(&self.core);
            self.pins = Pins::default();
        }
        self.pins.follow(&self.core, &mut self.policy);
    }

    /// Takes the events of a process. Returns whether the policy must be made anew.
    fn drain(&mut self, number: u8) -> bool {
        let (member, policy) = (&self.core.member, &mut self.policy);
        let drained = member.drain(number, |event| match event {
            Event::Used { now_ms, missing, slots } => {
                policy.used(now_ms, slots, missing as usize);
            }
            Event::Added { now_ms, parent, slots } => {
                let entries: Vec<_> = slots.iter().filter_map(|slot| member.entry(*slot)).collect();
                let mut parent = parent;
                for alike in entries.chunk_by(|one, next| one.retention == next.retention) {
                    let blocks: Vec<_> = alike.iter().map(|it| (it.slot, it.key.0[0])).collect();
                    let retention = Retention::from_bits(alike[0].retention);
                    policy.added(now_ms, parent, &blocks, retention);
                    parent = alike.last().map(|it| it.slot);
                }
            }
            Event::Removed { slot } => {
                if member.entry(slot).is_none() {
                    policy.removed(slot);
                }
            }
        });
        drained.rebuild
    }

    fn evict_due(&mut self) {
        let now = self.core.clock.now_ms();
        let member = &self.core.member;
        let key_of = |slot| member.entry(slot).map_or(0, |entry| entry.key.0[0]);
        while let Some(slot) = self.policy.evict_due(now, key_of) {
            remove(&self.core, slot);
        }
    }

    /// Evicts one block. Returns its pages; `None` if no block can leave.
    fn evict(&mut self) -> Option<u32> {
        let now = self.core.clock.now_ms();
        let member = &self.core.member;
        let key_of = |slot| member.entry(slot).map_or(0, |entry| entry.key.0[0]);
        let slot = self.policy.evict(now, key_of)?;
        Some(remove(&self.core, slot))
    }

    fn keep_slots(&mut self) {
        let slots = f64::from(self.core.member.geometry().slots);
        while self.core.member.live() as f64 > slots * SLOT_SHARE && self.evict().is_some() {}
    }

    fn keep_segments(&mut self, is_stopping: &AtomicBool) {
        let geometry = self.core.member.geometry();
        let wanted = self.core.wanted_segments();
        if self.core.free_segments() < wanted && self.core.withheld_segments() > 0 {
            self.retry_withheld();
        }
        if self.core.free_segments() < wanted {
            // A process that died while no keeper was there to see it may have left some.
            self.repair();
        }
        let (mut limit, mut fruitless) = (geometry.pages_per_segment, 0);
        loop {
            if self.core.free_segments() >= wanted || is_stopping.load(Relaxed) {
                return;
            }
            if self.own.is_none()
                && let Err(e) = self.begin_own()
            {
                self.core.fault("begin", 0, &e);
            }
            let Some((number, segment)) = self.least_filled() else { return };
            if segment.live_pages <= limit.min(worth(geometry.pages_per_segment, &segment)) {
                let begun = self.begun;
                if !self.collect_one(number) {
                    return;
                }
                fruitless = if self.begun == begun { 0 } else { fruitless + 1 };
                if fruitless > FRUITLESS_MAX {
                    limit = segment.live_pages - segment.live_pages.div_ceil(EVICTED_SHARE);
                    fruitless = 0;
                }
                continue;
            }
            if self.waits_for_seal() {
                // Nothing in them can leave before. The write that ends wakes this thread.
                return;
            }
            // What was put since then may be worth less than all that is known.
            self.hear();
            let mut excess = geometry.pages_per_segment / EVICTED_SHARE;
            while excess > 0 {
                let Some(pages) = self.evict() else { return };
                excess = excess.saturating_sub(pages);
            }
        }
    }

    /// Whether this process has full segments that this thread has not sealed, and so can't collect.
    fn waits_for_seal(&self) -> bool {
        let held = self.core.member.held_by(self.core.member.id());
        let active = held.filter(|(_, it)| matches!(it.state, SegmentState::Active(_))).count();
        active > 1 + usize::from(self.own.is_some())
    }

    /// Tries whether withheld segments can be used again, one after another in each directory until one fails.
    fn retry_withheld(&mut self) {
        if self.retried_at.is_some_and(|at| at.elapsed() < RETRY_EVERY) {
            return;
        }
        self.retried_at = Some(Instant::now());
        let core = &self.core;
        let mine = SegmentState::Collecting(core.member.id());
        let mut failing = Vec::new();
        for (number, segment) in core.member.segments() {
            let directory = core.disk.number_of(number);
            if segment.state != SegmentState::Withheld
                || failing.contains(&directory)
                || !core.member.set_segment(number, SegmentState::Withheld, mine)
            {
                continue;
            }
            let free = || log::free(&core.disk, number).map_err(io::Error::other);
            let to = match core.disk.ensure(number).and_then(|()| free()) {
                Ok(()) => SegmentState::Free,
                Err(_) => {
                    failing.push(directory);
                    SegmentState::Withheld
                }
            };
            core.member.set_segment(number, mine, to);
        }
    }

    /// The segment to collect: one that can be used again then.
    fn least_filled(&self) -> Option<(u32, Segment)> {
        let writable = self.core.disk.writable();
        let may_be = |(number, segment): &(u32, Segment)| {
            segment.state == SegmentState::Sealed && writable[self.core.disk.number_of(*number)]
        };
        let segments = self.core.member.segments().filter(may_be);
        segments.min_by_key(|(_, segment)| (segment.live_pages, segment.incarnation))
    }

    /// Frees a sealed segment. False if it stays as it is.
    fn collect_one(&mut self, number: u32) -> bool {
        let mine = SegmentState::Collecting(self.core.member.id());
        if !self.core.member.set_segment(number, SegmentState::Sealed, mine) {
            return false;
        }
        let to = match self.collect(number) {
            Ok(Collected::All) if self.core.member.segment(number).live_blocks == 0 => {
                SegmentState::Free
            }
            // Its headers are damaged: they do not name all blocks.
            Ok(Collected::All) => match self.drop_blocks(number, |counters| &counters.corrupt) {
                true => SegmentState::Free,
                false => SegmentState::Sealed,
            },
            Ok(Collected::NotAll) => SegmentState::Sealed,
            Ok(Collected::NoRoom) => match self.drop_blocks(number, |counters| &counters.evicted) {
                true => SegmentState::Free,
                false => SegmentState::Sealed,
            },
            // This process is short of descriptors or memory.
            Err(e) if !is_of_device(&e) => {
                self.core.fault("collect", number, &e);
                SegmentState::Sealed
            }
            Err(e) => {
                self.core.fault("collect", number, &e);
                match self.drop_blocks(number, |counters| &counters.failed) {
                    true => SegmentState::Withheld,
                    false => SegmentState::Sealed,
                }
            }
        };
        let to = if to == SegmentState::Free { self.core.freed(number) } else { to };
        if to != SegmentState::Sealed {
            self.core.disk.close(number);
        }
        self.core.member.set_segment(number, mine, to) && to != SegmentState::Sealed
    }

    /// Copies what lives in a segment.
    fn collect(&mut self, segment: u32) -> io::Result<Collected> {
        let core = Arc::clone(&self.core);
        let scanned = log::recover::scan(&core.disk, &core.superblock, segment);
        let records = scanned.map_err(log::Error::into_io)?.map_or(Vec::new(), |it| it.records);
        let live: Vec<(Entry, Record)> = records
            .into_iter()
            .filter_map(|record| {
                let entry = core.member.find(&Key(record.block.key))?;
                let here = core.superblock.geometry.place(segment, record.page);
                (entry.page == here).then_some((entry, record))
            })
            .collect();
        self.unreadable = 0;
        let mut rest = live.as_slice();
        while !rest.is_empty() {
            let mut bytes = 0;
            let fits = |(entry, _): &&(Entry, Record)| {
                bytes += bytes_of(pages_of(entry.len));
                bytes <= COPY_BYTES as u64
            };
            let count = rest.iter().take(EXTENT_RECORDS).take_while(fits).count().max(1);
            let (some, others) = rest.split_at(count);
            match self.copy(segment, some)? {
                Collected::All => {}
                other => return Ok(other),
            }
            rest = others;
        }
        // What was copied is on the disk before its old place is written again.
        if let Some(own) = &self.own {
            let synced = core.disk.sync(own.segment());
            synced.inspect_err(|_| core.member.note_unsynced(own.segment()))?;
        }
        Ok(Collected::All)
    }

    /// Copies blocks of a segment to the keeper's own. A block that can't be read is removed.
    fn copy(&mut self, from: u32, blocks: &[(Entry, Record)]) -> io::Result<Collected> {
        let core = Arc::clone(&self.core);
        let mut right = Vec::with_capacity(blocks.len());
        for (entry, record) in blocks {
            let mut data = vec![0; page_bytes(entry.len)];
            if let Err(e) = core.disk.read_at(from, bytes_of(record.page), &mut data) {
                self.unreadable += 1;
                if !is_of_device(&e) || self.unreadable > UNREADABLE_MAX {
                    return Err(e);
                }
                core.fault("read a block of", from, &e);
                if core.member.remove(entry) {
                    Counters::add(&core.counters.failed, 1);
                    self.policy.removed(entry.slot);
                }
                continue;
            }
            let sum = crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &data) ^ record.block.check;
            if sum == entry.sum {
                right.push((entry, record, data));
            } else if core.member.remove(entry) {
                core.fault("verify a block of", from, &"its bytes are not what was put");
                Counters::add(&core.counters.corrupt, 1);
                core.member.note_removed(entry.slot);
            }
        }
        let mut rest = right.as_slice();
        while !rest.is_empty() {
            let described: Vec<_> = rest.iter().map(|(_, record, _)| record.block).collect();
            let planned = self.own.as_mut().and_then(|own| own.plan(&described));
            let Some(extent) = planned else {
                match self.begin_own() {
                    Ok(true) => continue,
                    Ok(false) => {}
                    // Such as: the disk is full. The segment that is collected exists, and can be begun.
                    Err(e) => core.fault("begin a segment after", from, &e),
                }
                return Ok(Collected::NoRoom);
            };
            let (at, header) = extent.header();
            let to = extent.segment();
            let some = &rest[..extent.records().len()];
            let mut written = core.disk.write_at(to, at, &header.0);
            for (record, (.., data)) in extent.records().iter().zip(some) {
                written =
                    written.and_then(|()| core.disk.write_at(to, bytes_of(record.page), data));
            }
            let mut is_moved = true;
            if written.is_ok() {
                for (record, (entry, ..)) in extent.records().iter().zip(some) {
                    let page = core.superblock.geometry.place(to, record.page);
                    // Not, if the block was removed meanwhile, or a stopped process holds its lock.
                    is_moved &= core.member.relocate(entry, page) || !is_there(&core, entry);
                    core.counters.bytes_collected.fetch_add(entry.len.into(), Relaxed);
                }
            }
            let count = some.len();
            self.own.as_mut().expect("it planned").finished(extent, written.is_ok());
            if let Err(e) = written {
                core.fault("write", to, &e);
                self.stop();
                return Ok(Collected::NotAll);
            }
            if !is_moved {
                return Ok(Collected::NotAll);
            }
            rest = &rest[count..];
        }
        Ok(Collected::All)
    }

    /// Begins another segment of the keeper's own. False if none is free.
    fn begin_own(&mut self) -> io::Result<bool> {
        self.stop();
        // A writer that takes the last segment gives it back at once.
        for _ in 0..LAST_TRIES {
            self.own = begin_segment(&self.core, 0)?;
            if self.own.is_some() {
                break;
            }
            std::thread::sleep(LAST_EVERY);
        }
        self.begun += u64::from(self.own.is_some());
        Ok(self.own.is_some())
    }

    /// Removes the blocks of a segment, and counts them. False if some could not be removed.
    fn drop_blocks(&mut self, segment: u32, counter: fn(&Counters) -> &AtomicU64) -> bool {
        let core = Arc::clone(&self.core);
        let mut is_empty = true;
        for entry in core.member.iter() {
            if core.superblock.geometry.locate(entry.page).0 != segment {
                continue;
            }
            if core.member.remove(&entry) {
                self.policy.removed(entry.slot);
                core.disk.note_evicted(entry.key.0);
                Counters::add(counter(&core.counters), 1);
            } else {
                is_empty &= !is_there(&core, &entry);
            }
        }
        is_empty
    }

    /// Seals the keeper's own segment.
    pub(crate) fn stop(&mut self) {
        if let Some(mut own) = self.own.take()
            && !seal(&self.core, &mut own)
        {
            self.core.member.note_unsynced(own.segment());
        }
    }
}

/// The leases that the policy knows of.
#[derive(Debug, Default)]
struct Pins {
    slots: FxHashSet<SlotId>,
    /// [`crate::index::Index::pins_changed`] when they were read.
    changed: u64,
    /// When the first of them ends.
    ends_s: u32,
}

impl Pins {
    /// Pins what is leased, and unpins what is not any more.
    fn follow(&mut self, core: &Core, policy: &mut Policy) {
        let (now, changed) = (core.clock.now_s(), core.member.pins_changed());
        if changed == self.changed && now < self.ends_s {
            return;
        }
        let leased: Vec<_> = core.member.pins(now).collect();
        let slots: FxHashSet<_> = leased.iter().map(|(slot, _)| *slot).collect();
        self.slots.retain(|slot| {
            let is_leased = slots.contains(slot);
            if !is_leased {
                policy.unpin(*slot);
            }
            is_leased
        });
        let mut all_known = true;
        for slot in slots {
            if !self.slots.contains(&slot) {
                match policy.pin(slot) {
                    true => _ = self.slots.insert(slot),
                    // Its event is still to come, or it has left.
                    false => all_known = false,
                }
            }
        }
        self.changed = changed;
        let ends = leased.iter().map(|(_, until_s)| *until_s).min().unwrap_or(u32::MAX);
        self.ends_s = if all_known { ends } else { 0 };
    }
}

/// Segments that the keeper of so many processes keeps free.
pub(crate) fn free_wanted(processes: u32, segments: u32) -> u32 {
    let most = (segments / FREE_SHARE).max(FREE_PER_PROCESS);
    processes.saturating_mul(FREE_PER_PROCESS).clamp(FREE_PER_PROCESS, most)
}

/// How the copying of a segment ended.
enum Collected {
    /// Nothing lives in it.
    All,
    /// A block could not be moved: a process that is stopped holds its lock, or it could not be written.
    NotAll,
    /// No segment is free to copy to.
    NoRoom,
}

/// Pages that may live in a segment that is collected: a share of what blocks of its length can fill.
fn worth(pages_per_segment: u32, segment: &Segment) -> u32 {
    let mean = segment.live_pages.checked_div(segment.live_blocks).unwrap_or(0).max(1);
    let room = pages_per_segment.saturating_sub(OVERHEAD_PAGES);
    (f64::from(room / mean * mean) * LIVE_SHARE) as u32
}

/// Whether a block is where it was. It may have been used since.
fn is_there(core: &Core, entry: &Entry) -> bool {
    let now = core.member.entry(entry.slot);
    now.is_some_and(|now| now.key == entry.key && now.page == entry.page)
}

fn page_bytes(len: u32) -> usize {
    usize::try_from(bytes_of(pages_of(len))).expect("at most a segment")
}

/// Removes the block of a slot from the index. Returns its pages.
fn remove(core: &Core, slot: u32) -> u32 {
    let Some(entry) = core.member.entry(slot) else { return 0 };
    if !core.member.remove(&entry) {
        return 0;
    }
    core.disk.note_evicted(entry.key.0);
    Counters::add(&core.counters.evicted, 1);
    pages_of(entry.len)
}

/// A policy of the blocks that the index has.
fn rebuild(core: &Core) -> Policy {
    let kept = |entry: Entry| Kept {
        slot: entry.slot,
        parent: entry.parent,
        used_at_ms: u64::from(entry.used_at) * 1000,
        retention: Retention::from_bits(entry.retention),
    };
    let slots = core.member.geometry().slots as usize;
    Policy::rebuild(slots, core.member.iter().map(kept))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::New;
    use crate::log::Block;
    use crate::memory::BlockMemory;
    use crate::opening::Opening;
    use crate::options::StoreOptions;
    use crate::recover;
    use crate::writer::{Candidate, Which, Writer};
    use kvferry::{Access, Agent, Region};
    use std::path::PathBuf;

    const LEN: u32 = 60_000;

    struct Folder(PathBuf);

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    /// A store of segments of 1 MiB, without threads.
    fn core(name: &str) -> (Arc<Core>, Agent, Folder) {
        let name = format!("kvferry-keeper-{name}-{}", std::process::id());
        let folder = Folder(std::env::temp_dir().join(name));
        let _ = std::fs::remove_dir_all(&folder.0);
        let agent = Agent::builder().start().expect("an agent");
        let options = StoreOptions::new(&folder.0, 24 << 20).segment_bytes(1 << 20);
        let opening = Opening::new(&agent, &options).expect("directories");
        let superblock = opening.open_superblock().expect("a superblock");
        let disk = opening.disk(&superblock, true).expect("files");
        let geometry = options.geometry(None).expect("in bounds");
        let index = recover::fill(&disk, &superblock, geometry).expect("an index");
        let member = index.join().expect("a member");
        (Arc::new(Core::new(disk, superblock, member)), agent, folder)
    }

    /// Puts a block with these bytes. Returns its segment.
    fn put(core: &Core, writer: &Writer, pool: &Region, key: u64) -> u32 {
        put_long(core, writer, pool, key, LEN)
    }

    fn put_long(core: &Core, writer: &Writer, pool: &Region, key: u64, len: u32) -> u32 {
        let mut bytes = vec![0; len as usize];
        fastrand::Rng::with_seed(key).fill(&mut bytes);
        pool.write_at(0, &bytes).expect("inside");
        let memory = BlockMemory::new(pool, 0, len.into());
        let sum = memory.sum().expect("registered");
        let (parent, check, namespace, retention, time) = (None, 0, 7, 0, 0);
        let block = Block { key: [key, key], parent, sum, check, namespace, len, retention, time };
        let mut to = 0;
        let writing = writer.begin(core, &[Candidate { block, memory }]).expect("room");
        let written = writing.end(core, |segment, new| {
            let page = core.superblock.geometry.place(segment, new[0].page);
            let new = New { sum, parent: None, page, len, retention, now: 0 };
            core.member.insert(Key([key, key]), new);
            to = segment;
        });
        assert!(written.is_ok(), "{written:?} of {key}");
        to
    }

    /// Whether a block is in the index, and its bytes are right.
    fn is_right(core: &Core, key: u64) -> bool {
        let Some(entry) = core.member.find(&Key([key, key])) else { return false };
        let (segment, page) = core.superblock.geometry.locate(entry.page);
        let mut data = vec![0; page_bytes(entry.len)];
        core.disk.read_at(segment, bytes_of(page), &mut data).expect("it was copied");
        crc_fast::checksum(CrcAlgorithm::Crc64Nvme, &data) == entry.sum
    }

    #[test]
    fn a_block_that_cannot_be_read_when_its_segment_is_collected_costs_only_itself() {
        for is_sealed in [true, false] {
            let (core, agent, _folder) = core("unreadable");
            let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
            let writer = Writer::default();
            let segments: Vec<_> = (1..=12).map(|key| put(&core, &writer, &pool, key)).collect();
            assert!(segments.iter().all(|it| *it == segments[0]));
            let segment = segments[0];
            if is_sealed {
                writer.seal(&core, Which::All);
            } else {
                // Its process was killed: it has no footer.
                let mine = SegmentState::Active(core.member.id());
                assert!(core.member.set_segment(segment, mine, SegmentState::Sealed));
            }
            // A file that is cut can't be read behind the cut. 4 blocks are behind.
            let (_, cut) = core
                .superblock
                .geometry
                .locate(core.member.find(&Key([9, 9])).expect("put above").page);
            let path = core.disk.path_of(segment);
            let file = std::fs::File::options().write(true).open(&path).expect("it exists");
            file.set_len(bytes_of(cut)).expect("it is cut");
            let mut keeper = Keeper::new(Arc::clone(&core));
            assert!(keeper.collect_one(segment));
            let right: Vec<_> = (1..=12).map(|key| is_right(&core, key)).collect();
            assert_eq!(right, [[true; 8].as_slice(), &[false; 4]].concat(), "{is_sealed}");
            let stats = core.counters.read();
            assert_eq!(stats.failed + stats.corrupt, 4, "{stats:?}");
            assert_eq!(core.member.segment(segment).state, SegmentState::Free);
            // It is used again.
            let writer = Writer::default();
            for key in 100..150 {
                put(&core, &writer, &pool, key);
            }
            assert!((100..150).all(|key| is_right(&core, key)));
            keeper.stop();
        }
    }

    #[test]
    fn a_block_that_fits_into_the_active_segment_does_not_wait_for_another_to_be_made() {
        let (core, agent, _folder) = core("create");
        let pools = [(); 2].map(|()| agent.allocate(900 << 10, Access::NONE).expect("memory"));
        let writer = Writer::default();
        let first = put_long(&core, &writer, &pools[0], 1, 800 << 10);
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::scope(|scope| {
            let held = core.disk.hold_creates();
            let (core, writer, pools) = (&core, &writer, &pools);
            let long = scope.spawn(|| put_long(core, writer, &pools[0], 2, 800 << 10));
            let active = || core.member.held_by(core.member.id()).count();
            while active() < 2 {
                assert!(!long.is_finished());
                std::thread::yield_now();
            }
            scope.spawn(move || done.send(put(core, writer, &pools[1], 3)));
            let short = is_done.recv_timeout(Duration::from_secs(20));
            assert!(!long.is_finished());
            drop(held);
            assert_eq!(short, Ok(first));
            assert_ne!(long.join().expect("it is stored"), first);
        });
        assert!((1..=3).all(|key| is_right(&core, key)));
    }

    /// Puts blocks of a segment each.
    fn fill(core: &Core, writer: &Writer, pool: &Region, segments: u64) {
        for key in 1..=segments {
            put_long(core, writer, pool, key, 900_000);
        }
    }

    fn unsealed(core: &Core) -> usize {
        let held = core.member.held_by(core.member.id());
        held.filter(|(_, it)| matches!(it.state, SegmentState::Active(_))).count()
    }

    #[test]
    fn while_puts_go_on_an_eighth_of_the_store_waits_for_its_seal() {
        let (core, agent, _folder) = core("excess");
        let pool = agent.allocate(900_000, Access::NONE).expect("memory");
        let writer = Writer::default();
        fill(&core, &writer, &pool, 8);
        assert_eq!(unsealed(&core), 8, "each has a segment");
        writer.seal(&core, Which::Excess);
        // The segment that is written to, and an eighth of 23.
        assert_eq!(core.member.geometry().segments, 23);
        assert_eq!(unsealed(&core), 1 + 2);
        assert!(writer.has_full());
        writer.seal(&core, Which::Full);
        assert_eq!(unsealed(&core), 1);
        assert!(!writer.has_full());
        writer.seal(&core, Which::All);
        assert_eq!(unsealed(&core), 0);
        assert!((1..=8).all(|key| is_right(&core, key)));
        agent.shutdown();
    }

    #[test]
    fn when_puts_pause_or_space_is_short_full_segments_are_sealed() {
        for (segments, is_short) in [(3, false), (20, true)] {
            let (core, agent, _folder) = core(&format!("pause-{segments}"));
            let pool = agent.allocate(900_000, Access::NONE).expect("memory");
            let worker = crate::worker::Worker::start(Arc::clone(&core)).expect("a thread");
            fill(&core, &worker.writer, &pool, segments);
            worker.wake();
            let began = Instant::now();
            while worker.writer.has_full() {
                assert!(began.elapsed() < Duration::from_secs(20), "{} wait", unsealed(&core));
                std::thread::sleep(Duration::from_millis(1));
                if is_short {
                    // The puts go on.
                    worker.writer.note_begun();
                }
            }
            worker.stop();
            agent.shutdown();
        }
    }

    #[test]
    fn after_a_sync_that_failed_each_sync_fails_until_the_blocks_have_left() {
        let (core, agent, _folder) = core("sync");
        let pool = agent.allocate(LEN as usize, Access::NONE).expect("memory");
        for is_sealed in [true, false] {
            let writer = Writer::default();
            let segment = put(&core, &writer, &pool, 1);
            assert!(writer.sync(&core).is_ok());
            // A file that is gone can't be synced.
            std::fs::remove_file(core.disk.path_of(segment)).expect("it exists");
            core.disk.close(segment);
            if is_sealed {
                writer.seal(&core, Which::All);
            }
            for _ in 0..2 {
                let (failed, _) = writer.sync(&core).expect_err("it can't be synced");
                assert_eq!(failed, segment);
            }
            let entry = core.member.find(&Key([1, 1])).expect("it is in the index");
            assert!(core.member.remove(&entry));
            if is_sealed {
                assert!(writer.sync(&core).is_ok());
            }
            put(&core, &Writer::default(), &pool, 2);
            let entry = core.member.find(&Key([2, 2])).expect("it is in the index");
            core.member.remove(&entry);
        }
        // What the keeper has copied concerns each process.
        let writer = Writer::default();
        let segment = put(&core, &writer, &pool, 3);
        assert!(writer.sync(&core).is_ok());
        core.member.note_unsynced(segment);
        assert!(writer.sync(&core).is_err());
        let entry = core.member.find(&Key([3, 3])).expect("it is in the index");
        core.member.remove(&entry);
        assert!(writer.sync(&core).is_ok());
    }
}
