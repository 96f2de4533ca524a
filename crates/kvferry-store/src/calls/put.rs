//! Stores blocks: to the disk, or to host memory first.

use crate::calls::writing::Writing;
use crate::error::{Error, Result};
use crate::index::{Entry, SlotId};
use crate::key::Key;
use crate::log;
use crate::memory::BlockMemory;
use crate::outcome::{NotStored, Put, Refusal};
use crate::pending::Pending;
use crate::policy::{OnExpiry, Retention};
use crate::space::{CHUNK_BYTES, Space, check_range, chunks, own};
use crate::stats::Counters;
use crate::threads::task_pool::{Load, Turn, after};
use crate::tiers::host::{self, HostTier, TakenIn};
use crate::waits::Patience;
use crate::writer::Candidate;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bounds of the puts that wait for these threads, and those beyond which a put is refused whose `wait` is zero. A put
/// that waits holds its caller's memory, and the hashes and places of its blocks.
const PUTS_MAX: Load = Load { bytes: 2 << 30, blocks: 1 << 16 };
const PUTS_MAX_WITHOUT_WAIT: Load = Load { bytes: 256 << 20, ..PUTS_MAX };

/// A block of a prompt that is not in the store.
#[derive(Clone, Debug)]
pub(crate) struct AbsentBlock {
    key: Key,
    /// The key of the block before it.
    parent: Option<Key>,
    /// Check of the block's whole name.
    check: u64,
    memory: BlockMemory,
}

/// What the blocks of a call are to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockSet {
    /// Consecutive blocks of one prompt.
    OfPrompt,
    /// Blocks of any prompts.
    Separate,
}

/// Place of a block that is put, if the store has it.
enum BlockPlace {
    OnDisk(Entry),
    No,
    /// In host memory, from where it is to be written; with the reason why the last try failed.
    Waits(Option<NotStored>),
}

/// Retention of blocks: what TensorRT-LLM's `KvCacheRetentionConfig` says of a range of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retain {
    /// 0 to 100; blocks of a lower priority leave first. 35 by default.
    pub priority: u8,
    /// Time after the put at which the retention ends; rounded up to 16 seconds. `None`: never.
    pub duration: Option<Duration>,
    /// Treatment of the blocks after the end.
    pub then: OnExpiry,
}

impl Default for Retain {
    fn default() -> Self {
        let Retention { priority, then, .. } = Retention::DEFAULT;
        Self { priority, duration: None, then }
    }
}

impl Retain {
    fn retention(self, now_ms: u64) -> Retention {
        let until = |duration: Duration| {
            let until_ms = u128::from(now_ms) + duration.as_millis();
            u32::try_from(until_ms.div_ceil(1000)).unwrap_or(u32::MAX)
        };
        let (priority, then) = (self.priority, self.then);
        Retention { priority, until_s: self.duration.map(until), then }
    }
}

impl Space {
    /// Stores blocks of a prompt: those from the `first` on, one for each memory. Blocks that are there are
    /// not written again. Where no space is free, or a device fails, blocks are not stored. The memory may be
    /// changed when this returns. Blocks the thread until then.
    ///
    /// A block that is stored replaces others by and by, as the store is full: [`Retain`] says which.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`; `Agent` for memory that is not registered.
    pub fn put<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retain: Retain,
    ) -> Result<Put> {
        self.put_since(BlockSet::OfPrompt, prompt, first, memory, retain, Instant::now())
    }

    /// Stores blocks that are of any prompts, in any order: the store keeps each for itself, and none of them leaves
    /// because another one has left. Else as [`Space::put`], with one hash for each memory.
    ///
    /// # Errors
    /// As [`Space::put`].
    pub fn put_each<H: AsRef<[u8]>>(
        &self,
        hashes: &[H],
        memory: &[BlockMemory],
        retain: Retain,
    ) -> Result<Put> {
        self.put_since(BlockSet::Separate, hashes, 0, memory, retain, Instant::now())
    }

    /// Like [`Space::put`]; the wait for space counts from `since`.
    fn put_since<H: AsRef<[u8]>>(
        &self,
        set: BlockSet,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retain: Retain,
        since: Instant,
    ) -> Result<Put> {
        let _call = self.store.enter()?;
        check_range(prompt.len(), first, memory)?;
        let core = &self.store.core;
        let len_max = core.superblock.geometry.max_block_bytes();
        if let Some(long) = memory.iter().find(|it| it.len() > len_max.into()) {
            return Err(Error::InvalidArgument(format!(
                "a block of {} bytes does not fit into a segment of the store, which has room for \
                 {len_max}",
                long.len()
            )));
        }
        let retention = retain.retention(core.clock.now_ms());
        self.store_blocks(set, prompt, first, memory, retention, since)
    }

    /// As [`Space::put`], in the background. The memory belongs to the store until the operation has ended.
    ///
    /// Four puts are carried out at a time, the others wait for their turn, in the order of the calls. Where none has begun
    /// for [`StoreOptions::hang_after`](crate::StoreOptions::hang_after), one more is carried out, up to eight in all. A
    /// further thread ends once five have nothing to do at the same time, so that four are left.
    /// `wait` is for how long this one may wait for its turn: if it has not begun by then, it ends, and all its blocks are
    /// refused ([`Put::refused_waiting`]). Beyond 2 GiB or 65 536 blocks of puts that wait, it is refused at once. With a
    /// `wait` of zero it is refused at once beyond 256 MiB, and otherwise waits for its turn however long that takes. A put
    /// of any size may wait alone. [`StoreOptions::put_wait`](crate::StoreOptions::put_wait) counts from its turn, or from
    /// the call if `wait` is zero.
    ///
    /// [`Pending::cancel`] ends a put that has not begun. Closing the store carries out the puts that wait, each unless
    /// its `wait` ends first.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`. All others are the operation's outcome.
    pub fn put_async<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retain: Retain,
        wait: Duration,
    ) -> Result<Pending<Put>> {
        check_range(prompt.len(), first, memory)?;
        self.store.check()?;
        let load = Load { bytes: memory.iter().map(BlockMemory::len).sum(), blocks: memory.len() };
        // The blocks, and the one before them.
        let begin = first.saturating_sub(1);
        let prompt = own(&prompt[begin..first + memory.len()]);
        let (space, memory, first) = (self.for_task(), memory.to_vec(), first - begin);
        let called = Instant::now();
        let until = (!wait.is_zero()).then(|| after(called, wait));
        let put = move |turn| match turn {
            Turn::Begun => {
                // The wait for space comes after the wait for the turn, which may have been short.
                let since = until.map_or(called, |_| Instant::now());
                space.put_since(BlockSet::OfPrompt, &prompt, first, &memory, retain, since)
            }
            Turn::GivenUp => {
                let mut put = Put::default();
                put.refuse(Refusal::Waiting, memory.len());
                space.store.core.counters.add_not_stored(&put);
                Ok(put)
            }
        };
        let (pending, promise) = Pending::new();
        let may_wait =
            until.is_some() || !self.store.put_wait.is_zero() || self.store.host.is_some();
        let pool = if may_wait { &self.store.puts } else { &self.store.pool };
        let bounds = if until.is_some() { PUTS_MAX } else { PUTS_MAX_WITHOUT_WAIT };
        let task = Box::new(move |turn| promise.finish(put(turn)));
        if let Some(ticket) = pool.submit_within(bounds, load, until, task)? {
            pending.set_ticket(ticket);
        }
        Ok(pending)
    }

    /// `first`: the number of the first block of `memory` in the prompt. `since`: the wait for space counts from then.
    fn store_blocks<H: AsRef<[u8]>>(
        &self,
        set: BlockSet,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retention: Retention,
        since: Instant,
    ) -> Result<Put> {
        let core = &self.store.core;
        let keys = self.keys(&prompt[first.saturating_sub(1)..first + memory.len()])?;
        let offset = first.min(1);
        let mut put = Put::default();
        let (mut absent, mut found) = (Vec::new(), Vec::new());
        for (block, memory) in memory.iter().enumerate() {
            let at = offset + block;
            let check = || self.identity.check(prompt[first + block].as_ref());
            match self.is_there(&keys[at], check) {
                BlockPlace::OnDisk(entry) => {
                    put.present += 1;
                    found.push((at, entry));
                    continue;
                }
                BlockPlace::Waits(left) => {
                    put.note_waiting(left);
                    continue;
                }
                BlockPlace::No => {}
            }
            let before = at.checked_sub(1).filter(|_| set == BlockSet::OfPrompt);
            let parent = before.map(|before| keys[before]);
            absent.push(AbsentBlock {
                key: keys[at],
                parent,
                check: check(),
                memory: memory.clone(),
            });
        }
        self.store.worker.writer.note_present(core, found.iter().map(|(_, entry)| entry));
        let patience = self.store.patience(since);
        let (waiting, outcome) = match &self.store.host {
            Some(host) => self.put_behind(host, absent, retention, patience, &mut put),
            None => (0, self.put_now(&absent, retention, patience, &mut put)),
        };
        if set == BlockSet::OfPrompt {
            self.join_found(&keys, &found);
        }
        // What waits is counted once it is on the disk.
        Counters::add(&core.counters.stored, put.stored - waiting);
        core.counters.add_not_stored(&put);
        outcome.map(|()| put)
    }

    /// Puts blocks that were found, by their places in `keys`, behind the blocks before them, which may have been missing
    /// and been put again. Without this, the keeper would soon free the found blocks, which had left with the missing one.
    fn join_found(&self, keys: &[Key], found: &[(usize, Entry)]) {
        for chain in found.chunk_by(|(one, _), (next, _)| one + 1 == *next) {
            let (first, _) = chain[0];
            let before = first.checked_sub(1).and_then(|before| {
                let behind = &keys[first..first + chain.len()];
                self.slot_before(&keys[before], behind)
            });
            let chain: Vec<_> = chain.iter().map(|(_, entry)| *entry).collect();
            self.join_chain(before, &chain);
        }
    }

    /// The slot of the block before `behind`. `None` if the block waits in host memory, which joins `behind` to it once
    /// it is written, or if the store does not have it.
    fn slot_before(&self, key: &Key, behind: &[Key]) -> Option<SlotId> {
        let on_disk = || self.store.core.member.find(key).map(|it| it.slot);
        let waits = || self.store.host.as_ref().is_some_and(|host| host.note_behind(key, behind));
        on_disk().or_else(|| if waits() { None } else { on_disk() })
    }

    /// Puts blocks behind one that was written, as far as they are still there.
    pub(crate) fn join_behind(&self, key: &Key, behind: &[Key]) {
        let member = &self.store.core.member;
        let chain: Vec<_> = behind.iter().map_while(|key| member.find(key)).collect();
        self.join_chain(member.find(key).map(|it| it.slot), &chain);
    }

    /// Puts each block of a chain behind the one before it, and the first one behind `before`.
    fn join_chain(&self, before: Option<SlotId>, chain: &[Entry]) {
        let member = &self.store.core.member;
        let parents = std::iter::once(before).chain(chain.iter().map(|entry| Some(entry.slot)));
        // The keeper may know nothing of a block that was put again before the first.
        let mut first = before.map(|before| (0, before));
        for (at, (entry, parent)) in chain.iter().zip(parents).enumerate() {
            if let Some(parent) = parent.filter(|parent| entry.parent != Some(*parent)) {
                member.set_parent(entry, Some(parent));
                first.get_or_insert((at, parent));
            }
        }
        if let Some((first, parent)) = first {
            let there = |entry: &Entry| member.find(&entry.key).map(|it| it.slot);
            let slots: Vec<_> = chain[first..].iter().map_while(there).collect();
            self.note_found(Some(parent), &slots);
        }
    }

    fn is_there(&self, key: &Key, check: impl Fn() -> u64) -> BlockPlace {
        // First: it is on the disk before it waits no more.
        let waits = self.store.host.as_ref().and_then(|host| host.waits(key));
        if let Some(entry) = self.store.core.find_whole(key, check) {
            return BlockPlace::OnDisk(entry);
        }
        match waits {
            Some(left) => BlockPlace::Waits(left),
            // One that is in host memory all the same has left the disk.
            None => BlockPlace::No,
        }
    }

    /// Copies blocks to host memory, from where they are written. Those for which there is no room are written after
    /// them, while the caller waits. Returns how many wait.
    fn put_behind(
        &self,
        host: &HostTier,
        absent: Vec<AbsentBlock>,
        retention: Retention,
        patience: Patience,
        put: &mut Put,
    ) -> (usize, Result<()>) {
        let (mut waiting, mut outcome) = (0, Ok(()));
        let mut rest = absent.as_slice();
        while let Some((first, others)) = rest.split_first() {
            match self.take_in(host, first, retention) {
                Ok(TakenIn::Now) => waiting += 1,
                // Another call was faster.
                Ok(TakenIn::Before(left)) => put.note_waiting(left),
                Ok(TakenIn::No) => break,
                Err(e) => {
                    outcome = Err(e);
                    break;
                }
            }
            rest = others;
        }
        put.stored += waiting;
        if waiting > 0 || !rest.is_empty() {
            let asked = self.store.behind.ask(self);
            if !rest.is_empty() && outcome.is_ok() {
                // The blocks before them are on the disk first, mostly.
                self.store.behind.wait(host, asked, host.next_number(), patience.until);
                outcome = self.put_now(rest, retention, patience, put);
            }
        }
        (waiting, outcome)
    }

    /// Has a block wait in host memory.
    fn take_in(
        &self,
        host: &HostTier,
        absent: &AbsentBlock,
        retention: Retention,
    ) -> Result<TakenIn> {
        let (now, len) = (self.store.core.clock.now_ms(), absent.memory.len());
        let record = |block: &host::Block| {
            let len = u32::try_from(block.len).expect("checked when the block was put");
            self.record(absent, len, block.sum, retention)
        };
        // It may be there: it was got, or it has left the disk since.
        let taken = host.wait(absent.key, absent.check, record);
        if taken != TakenIn::No {
            return Ok(taken);
        }
        let Some(extent) = host.reserve(now, len, true) else { return Ok(TakenIn::No) };
        let sum = extent.fill_and_sum(&absent.memory)?;
        let block = Arc::new(host::Block::new(absent.key, absent.check, sum, len, extent));
        host.add(now, absent.parent, std::slice::from_ref(&block), retention);
        Ok(host.wait(absent.key, absent.check, record))
    }

    /// Writes blocks to the disk. While some are written, the sums of the next ones are computed.
    fn put_now(
        &self,
        absent: &[AbsentBlock],
        retention: Retention,
        patience: Patience,
        put: &mut Put,
    ) -> Result<()> {
        let mut writing = Writing::new(self, patience);
        let mut outcome = Ok(());
        for part in
            chunks(absent, CHUNK_BYTES, |it| u32::try_from(it.memory.len()).unwrap_or(u32::MAX))
        {
            let candidate = |absent: &AbsentBlock| {
                let (memory, len) = (absent.memory.clone(), absent.memory.checked_len()?);
                let block = self.record(absent, len, memory.sum()?, retention);
                Ok(Candidate { block, memory })
            };
            match part.iter().map(candidate).collect::<Result<Vec<_>>>() {
                Ok(new) => writing.write(&new, put),
                Err(e) => {
                    outcome = Err(e);
                    break;
                }
            }
        }
        writing.end(put);
        outcome
    }

    /// Metadata to write with a block. `sum` is the checksum of its bytes.
    fn record(&self, absent: &AbsentBlock, len: u32, sum: u64, retention: Retention) -> log::Block {
        log::Block {
            key: absent.key.0,
            parent: absent.parent.map(|key| key.0),
            sum: sum ^ absent.check,
            check: absent.check,
            namespace: self.identity.id,
            len,
            retention: retention.to_bits(),
            time: self.store.core.clock.now_s(),
        }
    }
}

#[cfg(test)]
mod tests;
