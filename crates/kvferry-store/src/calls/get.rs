//! Reads blocks: from host memory, from the disk, or together with another call.

use crate::calls::put::BlockSet;
use crate::calls::single_flight::JoinedLoads;
use crate::error::Result;
use crate::index::Entry;
use crate::key::Key;
use crate::log::{self, Disk};
use crate::memory::{BlockMemory, padded};
use crate::pending::Pending;
use crate::policy::Retention;
use crate::space::{CHUNK_BYTES, Space, check_range, chunks};
use crate::stats::Counters;
use crate::threads::parallel::IsLast;
use crate::tiers::disk::{UnderWay, may_move};
use crate::tiers::host::{self, Extent, HostTier};
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Parts of a call that are read from a device while another one is compared with its sums, and their bytes.
const READ_AHEAD: usize = 32;
const READ_BYTES: u64 = 1 << 20;
/// Bytes of a part that mostly stay in a processor's cache until they are compared; a shorter one costs more calls.
const CACHED_BYTES: u64 = 1 << 20;

/// Blocks that a call wants.
#[derive(Debug)]
pub(crate) struct WantedBlocks {
    /// Keys of the prompt, from its beginning to the last block that is wanted.
    pub(crate) keys: Vec<Key>,
    /// The first block that is wanted.
    pub(crate) first: usize,
    /// Check of the name of each block that is wanted, and its memory.
    pub(crate) checks: Vec<u64>,
    pub(crate) memory: Vec<BlockMemory>,
    /// Blocks of the prompt in all.
    pub(crate) prompt: usize,
    pub(crate) set: BlockSet,
}

impl WantedBlocks {
    fn count(&self) -> usize {
        self.memory.len()
    }

    fn key(&self, block: usize) -> Key {
        self.keys[self.first + block]
    }

    /// The block of the prompt before this one.
    fn before(&self, block: usize) -> Option<Key> {
        let before = (self.first + block).checked_sub(1).filter(|_| self.set == BlockSet::OfPrompt);
        before.map(|at| self.keys[at])
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = (Key, u64)> {
        (0..self.count()).map(|block| (self.key(block), self.checks[block]))
    }

    pub(crate) fn blocks(&self) -> impl Iterator<Item = (Key, u64, &BlockMemory)> {
        self.names().zip(&self.memory).map(|((key, check), memory)| (key, check, memory))
    }
}

/// A block that this call reads.
#[derive(Clone)]
struct OwnRead {
    block: usize,
    entry: Entry,
    memory: BlockMemory,
    check: u64,
}

/// Result of reading a block.
enum ReadOutcome {
    Right,
    /// The block was moved: it may be right at its new place.
    Moved(Entry),
    Wrong,
}

/// Whether blocks were read.
///
/// # Errors
/// If the device may still write to their memory, as the agent was shut down.
fn is_read(read: io::Result<()>) -> Result<bool> {
    match read {
        Ok(()) => Ok(true),
        Err(e) => may_move(&e).map_or(Ok(false), |e| Err(e.into())),
    }
}

impl Space {
    /// Reads blocks of a prompt into memory: those from the `first` on, one for each memory. Returns how many
    /// were read, one after another from the first: 0 if a block before is missing. Memory behind these may
    /// have been written, with anything. Blocks the thread until then.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`; `Agent` for memory that is not registered.
    pub fn get<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
    ) -> Result<usize> {
        let _call = self.store.enter()?;
        let wanted = self.wanted(prompt, first, memory)?;
        let joined = self.store.flights.join(wanted.blocks());
        self.load(&wanted, joined)
    }

    /// Reads blocks that are of any prompts, in any order, into memory, one hash for each memory. Returns for each whether
    /// it was read. Else as [`Space::get`].
    ///
    /// # Errors
    /// As [`Space::get`].
    pub fn get_each<H: AsRef<[u8]>>(
        &self,
        hashes: &[H],
        memory: &[BlockMemory],
    ) -> Result<Vec<bool>> {
        let _call = self.store.enter()?;
        check_range(hashes.len(), 0, memory)?;
        let mut is_read = Vec::with_capacity(memory.len());
        while is_read.len() < memory.len() {
            let from = is_read.len();
            let rest = &hashes[from..memory.len()];
            let wanted =
                WantedBlocks { set: BlockSet::Separate, ..self.wanted(rest, 0, &memory[from..])? };
            let joined = self.store.flights.join(wanted.blocks());
            is_read.resize(from + self.load(&wanted, joined)?, true);
            if is_read.len() < memory.len() {
                is_read.push(false);
            }
        }
        Ok(is_read)
    }

    /// As [`Space::get`], in the background. The memory belongs to the store until the operation has ended.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`. All others are the operation's outcome.
    pub fn get_async<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
    ) -> Result<Pending<usize>> {
        let wanted = self.wanted(prompt, first, memory)?;
        self.store.check()?;
        let (pending, promise) = Pending::new();
        let _in_order = self.store.in_order.lock();
        let joined = self.store.flights.join(wanted.blocks());
        let space = self.for_task();
        let task = move || {
            let call = space.store.enter();
            promise.finish(call.and_then(|_call| space.load(&wanted, joined)));
        };
        self.store.pool.submit(task)?;
        Ok(pending)
    }

    fn wanted<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
    ) -> Result<WantedBlocks> {
        check_range(prompt.len(), first, memory)?;
        let end = first + memory.len();
        let checks = prompt[first..end].iter().map(|hash| self.identity.check(hash.as_ref()));
        Ok(WantedBlocks {
            keys: self.keys(&prompt[..end])?,
            first,
            checks: checks.collect(),
            memory: memory.to_vec(),
            prompt: prompt.len(),
            set: BlockSet::OfPrompt,
        })
    }

    /// Loads blocks; returns how many, from the first, are there.
    pub(crate) fn load(&self, wanted: &WantedBlocks, mut joined: JoinedLoads) -> Result<usize> {
        let core = &self.store.core;
        let found = self.find(&wanted.keys);
        match wanted.set {
            BlockSet::OfPrompt => {
                self.note_use(&wanted.keys, &found, wanted.prompt - found.len());
            }
            BlockSet::Separate => {
                for (key, entry) in wanted.keys.iter().zip(&found) {
                    self.note_use(std::slice::from_ref(key), std::slice::from_ref(entry), 0);
                }
                if found.len() < wanted.prompt {
                    self.note_use(&[], &[], 1);
                }
            }
        }
        Counters::add(&core.counters.asked, wanted.count());
        let places = found.get(wanted.first..).unwrap_or_default();
        let mut is_there = vec![false; wanted.count()];
        self.copy_from_host(wanted, places, &mut joined, &mut is_there);
        let own = |(block, place): (usize, &Option<Entry>)| {
            let own = self.own(wanted, block, place.as_ref()?);
            let fits = u64::from(own.entry.len) == own.memory.len();
            (fits && joined.leads(block)).then_some(own)
        };
        let own: Vec<OwnRead> = places.iter().enumerate().filter_map(own).collect();
        let read = self.read_own(&own, &mut joined, &mut is_there);
        // The calls that wait for blocks which this one could not load go on by themselves.
        (0..wanted.count()).for_each(|block| joined.land(block, None));
        read?;
        for (block, place) in places.iter().enumerate() {
            let is_right = |entry: &Entry| {
                let sum = wanted.memory[block].sum();
                sum.is_ok_and(|sum| sum ^ wanted.checks[block] == entry.sum)
            };
            // The call that leads it may wait for another block, in any directory.
            let hangs = || core.disk.is_any_hanging();
            // Compared once more: the memory that it was copied from is another caller's.
            if joined.wait(block, hangs) && place.as_ref().is_none_or(is_right) {
                is_there[block] = true;
                Counters::add(&core.counters.shared_hits, 1);
            } else if let Some(entry) = place
                && !is_there[block]
                && is_there[..block].iter().all(|is_there| *is_there)
                && u64::from(entry.len) == wanted.memory[block].len()
            {
                // Another call could not read it, or this one after a block that is there now.
                let own = self.own(wanted, block, entry);
                is_there[block] = self.is_right(&own, self.read_one(&own)?)?;
            }
        }
        let right = is_there.iter().take_while(|is_there| **is_there).count();
        self.keep_in_host(wanted, &own, &is_there[..right]);
        let bytes: u64 = wanted.memory[..right].iter().map(BlockMemory::len).sum();
        Counters::add(&core.counters.hits, right);
        core.counters.bytes_read.fetch_add(bytes, Relaxed);
        Ok(right)
    }

    fn own(&self, wanted: &WantedBlocks, block: usize, entry: &Entry) -> OwnRead {
        let memory = wanted.memory[block].clone();
        OwnRead { block, entry: *entry, memory, check: wanted.checks[block] }
    }

    fn copy_from_host(
        &self,
        wanted: &WantedBlocks,
        places: &[Option<Entry>],
        joined: &mut JoinedLoads,
        is_there: &mut [bool],
    ) {
        let Some(host) = &self.store.host else { return };
        for (block, held) in host.find(wanted.names().take(places.len())).into_iter().enumerate() {
            let Some(held) = held else { continue };
            let memory = &wanted.memory[block];
            if joined.leads(block) && memory.copy_from(&held.memory()).is_ok() {
                is_there[block] = true;
                Counters::add(&self.store.core.counters.host_hits, 1);
                joined.land(block, Some((memory, wanted.checks[block])));
            }
        }
    }

    /// Reads blocks that this call leads, and ends their loads. Stops at the first one that is wrong. While some
    /// are compared with their sums, the next ones are read.
    fn read_own(
        &self,
        own: &[OwnRead],
        joined: &mut JoinedLoads,
        is_there: &mut [bool],
    ) -> Result<()> {
        let disk = &self.store.core.disk;
        let is_cached = !disk.is_direct();
        let part_bytes = if is_cached { CACHED_BYTES } else { READ_BYTES };
        let mut parts = chunks(own, part_bytes, |own| own.entry.len);
        let mut end = |part: &[OwnRead], right: usize| {
            for own in &part[..right] {
                is_there[own.block] = true;
                joined.land(own.block, Some((&own.memory, own.check)));
            }
        };
        let Some(first) = parts.next() else { return Ok(()) };
        let second = parts.next();
        let mut parts = second.into_iter().chain(parts);
        if is_cached && second.is_some() {
            // Copied by the processors: each compares what it has copied.
            let parts: Vec<Vec<OwnRead>> =
                std::iter::once(first).chain(parts).map(<[OwnRead]>::to_vec).collect();
            let count = parts.len();
            let (space, parts) = (self.for_task(), Arc::new(parts));
            let read = Arc::clone(&parts);
            let results = self.store.parallel.share(count, move |part| {
                let own = &read[part];
                let right = space.read_part(own);
                let is_last = !right.as_ref().is_ok_and(|right| *right == own.len());
                (right, if is_last { IsLast::Yes } else { IsLast::No })
            });
            for (part, right) in parts.iter().zip(results) {
                end(part, right.unwrap_or(Ok(0))?);
            }
            return Ok(());
        }
        let mut ahead: VecDeque<(&[OwnRead], UnderWay)> = VecDeque::with_capacity(READ_AHEAD);
        let begin = |part| (part, disk.begin_read(&self.places(part)));
        ahead.extend(parts.by_ref().take(READ_AHEAD).map(begin));
        // By this thread, which has nothing else to do.
        let (mut now, mut right) = (first, self.read_part(first)?);
        loop {
            end(now, right);
            let Some((part, reading)) = ahead.pop_front().filter(|_| right == now.len()) else {
                return Ok(());
            };
            ahead.extend(parts.next().map(begin));
            let is_read = is_read(reading.end())?;
            (now, right) = (part, self.judge_all(part, is_read)?);
        }
    }

    /// Reads blocks by this thread. Returns how many are right, from the first.
    fn read_part(&self, part: &[OwnRead]) -> Result<usize> {
        let disk = &self.store.core.disk;
        let [own] = part else {
            return self.judge_all(part, is_read(disk.read_blocks(&self.places(part)))?);
        };
        // A block that does not fit into the processor's cache is compared as it is copied.
        let len = own.memory.len();
        let step = if disk.is_direct() { len } else { CACHED_BYTES };
        let (segment, at, _) = self.place(&own.entry, &own.memory);
        Counters::add(&self.store.core.counters.disk_reads, 1);
        let mut crc = 0;
        for done in (0..len).step_by(usize::try_from(step).expect("a block's length")) {
            let memory = own.memory.part(done, step.min(len - done));
            if !is_read(disk.read_blocks(&[(segment, at + done, memory.clone())]))? {
                return self.judge_all(part, false);
            }
            crc = memory.crc(crc)?;
        }
        let read = self.judge_sum(own, padded(crc, len))?;
        Ok(usize::from(self.is_right(own, read)?))
    }

    /// Number of leading blocks that are right, in a part that was read.
    fn judge_all(&self, part: &[OwnRead], is_read: bool) -> Result<usize> {
        for (at, own) in part.iter().enumerate() {
            // One by one where the part can't be read, to find what can.
            let read = if is_read { self.judge(own)? } else { self.read_one(own)? };
            if !self.is_right(own, read)? {
                return Ok(at);
            }
        }
        Ok(part.len())
    }

    /// Whether a block is right, where it was read or, if it was moved, where it is now.
    fn is_right(&self, own: &OwnRead, read: ReadOutcome) -> Result<bool> {
        let read = match read {
            ReadOutcome::Moved(moved) => self.read_one(&OwnRead { entry: moved, ..own.clone() })?,
            read => read,
        };
        Ok(matches!(read, ReadOutcome::Right))
    }

    /// Brings blocks of a prompt, from its beginning, from the disk to host memory. This is no use of them. Stops
    /// where none can leave for them.
    pub(crate) fn warm(&self, keys: &[Key], checks: &[u64]) -> Result<()> {
        let Some(host) = &self.store.host else { return Ok(()) };
        let now = self.store.core.clock.now_ms();
        let found = self.find(keys);
        let held = host.find(keys.iter().copied().zip(checks.iter().copied()));
        let absent = |(block, entry): (usize, Option<Entry>)| {
            entry.filter(|_| held[block].is_none()).map(|entry| (block, entry))
        };
        let absent: Vec<_> = found.into_iter().enumerate().filter_map(absent).collect();
        for part in chunks(&absent, CHUNK_BYTES, |(_, entry)| entry.len) {
            let (mut own, mut extents) = (Vec::new(), Vec::new());
            for (block, entry) in part {
                let len = u64::from(entry.len);
                let Some(extent) = host.reserve(now, len, false) else { break };
                let (memory, check) = (extent.memory(len), checks[*block]);
                own.push(OwnRead { block: *block, entry: *entry, memory, check });
                extents.push(extent);
            }
            let read = is_read(self.store.core.disk.read_blocks(&self.places(&own)));
            let right = match read.and_then(|is_read| self.judge_all(&own, is_read)) {
                Ok(right) => right,
                Err(e) => {
                    // A device may still write to them.
                    std::mem::forget(extents);
                    return Err(e);
                }
            };
            for (own, extent) in own.iter().zip(extents).take(right) {
                add_to_host(host, now, own, extent, own.block.checked_sub(1).map(|at| keys[at]));
            }
            if right < part.len() {
                break;
            }
        }
        Ok(())
    }

    /// Keeps blocks that were read, from the first, in host memory.
    fn keep_in_host(&self, wanted: &WantedBlocks, own: &[OwnRead], is_there: &[bool]) {
        let Some(host) = &self.store.host else { return };
        let now = self.store.core.clock.now_ms();
        for own in own.iter().take_while(|own| own.block < is_there.len()) {
            if host.prefix(&[own.entry.key]) == 1 {
                continue;
            }
            let Some(extent) = host.reserve(now, own.memory.len(), false) else { return };
            // The caller can have changed its memory since it was compared, so it is compared again.
            let sum = extent.fill_and_sum(&own.memory);
            if sum.is_ok_and(|sum| sum ^ own.check == own.entry.sum) {
                add_to_host(host, now, own, extent, wanted.before(own.block));
            }
        }
    }

    fn places(&self, part: &[OwnRead]) -> Vec<(u32, u64, BlockMemory)> {
        Counters::add(&self.store.core.counters.disk_reads, part.len());
        part.iter().map(|own| self.place(&own.entry, &own.memory)).collect()
    }

    fn place(&self, entry: &Entry, memory: &BlockMemory) -> (u32, u64, BlockMemory) {
        let (segment, page) = self.store.core.superblock.geometry.locate(entry.page);
        (segment, log::format::bytes_of(page), memory.clone())
    }

    fn read_one(&self, own: &OwnRead) -> Result<ReadOutcome> {
        let core = &self.store.core;
        let place = self.place(&own.entry, &own.memory);
        let (segment, at, _) = place;
        Counters::add(&core.counters.disk_reads, 1);
        match core.disk.read_blocks(&[place]) {
            Ok(()) => self.judge(own),
            Err(e) if may_move(&e).is_some() => Err(may_move(&e).expect("matched").into()),
            Err(e) => {
                // Memory that is not registered is the caller's fault, and this says so.
                own.memory.sum()?;
                core.fault("read", segment, &e);
                Counters::add(&core.counters.failed, 1);
                // It leaves, so that it can be put again.
                if core.disk.is_lost(segment, at, own.entry.len) && core.member.remove(&own.entry) {
                    core.member.note_removed(own.entry.slot);
                }
                Ok(ReadOutcome::Wrong)
            }
        }
    }

    /// Compares what was read with the sum.
    fn judge(&self, own: &OwnRead) -> Result<ReadOutcome> {
        self.judge_sum(own, own.memory.sum()?)
    }

    /// A block that is damaged leaves the store. `sum`: of what was read.
    fn judge_sum(&self, own: &OwnRead, sum: u64) -> Result<ReadOutcome> {
        let core = &self.store.core;
        let entry = &own.entry;
        if sum ^ own.check == entry.sum {
            return Ok(ReadOutcome::Right);
        }
        match core.member.find(&entry.key) {
            Some(now) if now != *entry && now.page != entry.page && now.len == entry.len => {
                Ok(ReadOutcome::Moved(now))
            }
            Some(now) if now.page == entry.page && now.slot == entry.slot => {
                let (segment, _) = core.superblock.geometry.locate(entry.page);
                if core.member.remove(&now) {
                    core.fault("verify a block of", segment, &"its bytes are not what was put");
                    Counters::add(&core.counters.corrupt, 1);
                    core.member.note_removed(entry.slot);
                }
                Ok(ReadOutcome::Wrong)
            }
            _ => Ok(ReadOutcome::Wrong),
        }
    }
}

/// Adds a block whose bytes are in `extent`. `before`: the block of its prompt before it.
fn add_to_host(host: &HostTier, now_ms: u64, own: &OwnRead, extent: Extent, before: Option<Key>) {
    let sum = own.entry.sum ^ own.check;
    let new = host::Block::new(own.entry.key, own.check, sum, own.memory.len(), extent);
    let retention = Retention::from_bits(own.entry.retention);
    host.add(now_ms, before, &[Arc::new(new)], retention);
}
