//! The tier in host memory: blocks of this process, in front of the disk.
//!
//! It belongs to one process, unlike the disk tier: no other process can reuse its memory while it is copied, and
//! a process that dies leaves nothing behind. A block that is copied out is held by a reference; its memory is
//! free once the block has left and the last reference is dropped.
//!
//! What is put is copied here, and its caller goes on. It is *waiting* until it is on the disk, and does not
//! leave before: the tier owns its bytes, and no other copy is ever written in their place. At most half of the tier
//! waits: what is put beyond that goes to the disk directly. [`crate::tiers::host::write_behind`] writes what waits.

mod arena;
pub(crate) mod write_behind;

pub(crate) use arena::Extent;

use crate::error::Result;
use crate::key::Key;
use crate::log;
use crate::memory::{BlockMemory, Owner, PAGE};
use crate::outcome::NotStored;
use crate::policy::{Policy, Retention, Slot};
use arena::Arena;
use kvferry::Agent;
use kvferry_sys::sync::Mutex;
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of a tier, at least.
pub(crate) const HOST_BYTES_MIN: u64 = 1 << 20;
/// Blocks of a tier, at most.
const BLOCKS_MAX: u64 = 1 << 24;
/// The part of the tier that may wait to be written.
const WAITING_SHARE: u64 = 2;
/// Shortest and longest pause before another try of a block whose lock a stopped process holds: each try writes its
/// bytes anew.
const AGAIN_MIN: Duration = Duration::from_secs(1);
const AGAIN_MAX: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct HostTier {
    arena: Arc<Arena>,
    bytes: u64,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    policy: Policy,
    slots: FxHashMap<Key, Slot>,
    blocks: Vec<Option<Arc<Block>>>,
    free: Vec<Slot>,
    /// Blocks that wait, by a number that rises with each. Their slots are pinned.
    waiting: BTreeMap<u64, Waiting>,
    /// The number of each.
    numbers: FxHashMap<Key, u64>,
    waiting_bytes: u64,
    next_number: u64,
}

/// A block that is not on the disk yet.
#[derive(Clone, Debug)]
pub(crate) struct Waiting {
    /// Keeps the memory that is written.
    pub(crate) block: Arc<Block>,
    pub(crate) record: log::Block,
    /// Reason why the last try to write the block failed.
    pub(crate) left: Option<NotStored>,
    /// Keys of the blocks on the disk that follow this one in its prompt, where a put has found some.
    behind: Vec<Key>,
    /// Time of the next try, and the pause before it. `None`: the block is tried when others are.
    again: Option<(Instant, Duration)>,
}

/// Result of asking that a block wait for its write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TakenIn {
    /// The block did not wait before; it waits from here on.
    Now,
    /// The block waited before. The reason is that of its last failed write.
    Before(Option<NotStored>),
    /// The block is not in the tier, or too many bytes wait.
    No,
}

/// A block in host memory. Its bytes do not change.
#[derive(Debug)]
pub(crate) struct Block {
    pub(crate) key: Key,
    /// Check of the block's whole name.
    pub(crate) check: u64,
    /// Checksum of the block's bytes alone.
    pub(crate) sum: u64,
    pub(crate) len: u64,
    extent: Extent,
}

impl Owner for Block {}

impl Block {
    /// `extent` has the block's bytes.
    pub(crate) fn new(key: Key, check: u64, sum: u64, len: u64, extent: Extent) -> Self {
        Self { key, check, sum, len, extent }
    }

    pub(crate) fn memory(&self) -> BlockMemory {
        self.extent.memory(self.len)
    }
}

/// Usage of a tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TierUsage {
    pub(crate) blocks: u64,
    pub(crate) bytes: u64,
    pub(crate) waiting: u64,
}

impl HostTier {
    pub(crate) fn new(agent: &Agent, bytes: u64) -> Result<Self> {
        let blocks = (bytes / PAGE as u64).clamp(1, BLOCKS_MAX);
        let blocks = usize::try_from(blocks).expect("at most 2^24");
        let state = State {
            policy: Policy::new(blocks),
            slots: FxHashMap::default(),
            blocks: Vec::new(),
            free: Vec::new(),
            waiting: BTreeMap::new(),
            numbers: FxHashMap::default(),
            waiting_bytes: 0,
            next_number: 0,
        };
        Ok(Self { arena: Arena::new(agent, bytes)?, bytes, state: Mutex::new(state) })
    }

    pub(crate) fn held(&self) -> TierUsage {
        let state = self.state.lock();
        let (blocks, waiting) = (state.slots.len() as u64, state.waiting_bytes);
        TierUsage { blocks, bytes: self.arena.used(), waiting }
    }

    /// Number of leading `keys` whose blocks are in the tier.
    pub(crate) fn prefix(&self, keys: &[Key]) -> usize {
        let state = self.state.lock();
        keys.iter().take_while(|key| state.slots.contains_key(key)).count()
    }

    /// Finds those of these blocks that are in the tier. A block of another name that has the same key does not
    /// count.
    pub(crate) fn find(&self, names: impl Iterator<Item = (Key, u64)>) -> Vec<Option<Arc<Block>>> {
        let state = self.state.lock();
        let find = |(key, check)| {
            let slot = *state.slots.get(&key)?;
            state.blocks[slot as usize].as_ref().filter(|block| block.check == check).cloned()
        };
        names.map(find).collect()
    }

    /// A request used these blocks, the first of its prompt first; `missing` more were nowhere.
    pub(crate) fn note_use(&self, now_ms: u64, keys: &[Key], missing: usize) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let chain: Vec<Slot> = keys.iter().map_while(|key| state.slots.get(key).copied()).collect();
        state.policy.used(now_ms, &chain, keys.len() - chain.len() + missing);
    }

    /// Memory for a block of `len` bytes, for which others leave. `None` if none can, or if the block is to
    /// wait and too many do.
    pub(crate) fn reserve(&self, now_ms: u64, len: u64, is_waiting: bool) -> Option<Extent> {
        let mut state = self.state.lock();
        let most = self.bytes / WAITING_SHARE;
        // One that is as long would have all others leave.
        if len > most || is_waiting && state.waiting_bytes + len > most {
            return None;
        }
        loop {
            if let Some(extent) = self.arena.take(len) {
                return Some(extent);
            }
            // Dropped without the lock of the arena's free ranges, which this takes.
            drop(state.evict(now_ms)?);
        }
    }

    /// Takes in blocks that follow each other in a prompt, the first behind `parent`. Those that are here are
    /// left out.
    pub(crate) fn add(
        &self,
        now_ms: u64,
        parent: Option<Key>,
        blocks: &[Arc<Block>],
        retention: Retention,
    ) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut parent = parent.and_then(|key| state.slots.get(&key).copied());
        let mut added = Vec::with_capacity(blocks.len());
        for block in blocks {
            if let Some(slot) = state.slots.get(&block.key) {
                if added.is_empty() {
                    parent = Some(*slot);
                }
                continue;
            }
            let Some(slot) = state.free_slot(now_ms) else { break };
            added.push((slot, block.key.0[0]));
            state.slots.insert(block.key, slot);
            state.blocks[slot as usize] = Some(Arc::clone(block));
        }
        state.policy.added(now_ms, parent, &added, retention);
    }

    /// Has a block wait that is here, under this name. `record` says what is written with it.
    pub(crate) fn wait(
        &self,
        key: Key,
        check: u64,
        record: impl FnOnce(&Block) -> log::Block,
    ) -> TakenIn {
        let mut state = self.state.lock();
        let state = &mut *state;
        if let Some(number) = state.numbers.get(&key) {
            return TakenIn::Before(state.waiting[number].left);
        }
        let Some(slot) = state.slots.get(&key).copied() else { return TakenIn::No };
        let block = state.blocks[slot as usize].as_ref().expect("of a slot in use");
        let waiting_bytes = state.waiting_bytes + block.len;
        if block.check != check || waiting_bytes > self.bytes / WAITING_SHARE {
            return TakenIn::No;
        }
        let (block, record) = (Arc::clone(block), record(block));
        let waiting = Waiting { block, record, left: None, behind: Vec::new(), again: None };
        state.policy.pin(slot);
        state.waiting_bytes = waiting_bytes;
        state.waiting.insert(state.next_number, waiting);
        state.numbers.insert(key, state.next_number);
        state.next_number += 1;
        TakenIn::Now
    }

    /// Whether a block waits, and why it could not be written, if that was tried.
    pub(crate) fn waits(&self, key: &Key) -> Option<Option<NotStored>> {
        let state = self.state.lock();
        state.numbers.get(key).map(|number| state.waiting[number].left)
    }

    /// Notes blocks on the disk that are behind one that waits, for [`HostTier::written`]. False if `key` does not wait.
    pub(crate) fn note_behind(&self, key: &Key, behind: &[Key]) -> bool {
        let mut state = self.state.lock();
        let state = &mut *state;
        let number = state.numbers.get(key);
        let Some(waiting) = number.and_then(|number| state.waiting.get_mut(number)) else {
            return false;
        };
        waiting.behind = behind.to_vec();
        true
    }

    /// The number that the next block gets which waits.
    pub(crate) fn next_number(&self) -> u64 {
        self.state.lock().next_number
    }

    /// Blocks that wait with these numbers and follow each other in a prompt: the first, and others while all are no
    /// longer than `bytes_max`. Without those that are to be tried after `now`, if it is given.
    pub(crate) fn next_waiting(
        &self,
        numbers: Range<u64>,
        bytes_max: u64,
        now: Option<Instant>,
    ) -> Vec<(u64, Waiting)> {
        let state = self.state.lock();
        let (mut chain, mut bytes): (Vec<(u64, Waiting)>, _) = (Vec::new(), 0);
        let is_due = |(_, it): &(&u64, &Waiting)| {
            now.zip(it.again).is_none_or(|(now, (again, _))| now >= again)
        };
        for (number, waiting) in state.waiting.range(numbers).filter(is_due) {
            bytes += waiting.block.len;
            if let Some((_, last)) = chain.last()
                && (bytes > bytes_max || waiting.record.parent != Some(last.record.key))
            {
                break;
            }
            chain.push((*number, waiting.clone()));
        }
        chain
    }

    /// Ends the wait of blocks, which may then leave. Returns those with noted blocks behind them, and these blocks.
    pub(crate) fn written(&self, numbers: impl Iterator<Item = u64>) -> Vec<(Key, Vec<Key>)> {
        let mut state = self.state.lock();
        let state = &mut *state;
        let mut joined = Vec::new();
        for number in numbers {
            let Some(waiting) = state.waiting.remove(&number) else { continue };
            let key = waiting.block.key;
            state.numbers.remove(&key);
            state.waiting_bytes -= waiting.block.len;
            let slot = state.slots.get(&key).expect("it is pinned");
            state.policy.unpin(*slot);
            if !waiting.behind.is_empty() {
                joined.push((key, waiting.behind));
            }
        }
        joined
    }

    /// Notes why blocks with these numbers could not be written, if they still wait.
    pub(crate) fn leave(&self, numbers: Range<u64>, why: NotStored) {
        for (_, waiting) in self.state.lock().waiting.range_mut(numbers) {
            waiting.left = Some(why);
        }
    }

    /// Like [`HostTier::leave`], but the blocks are tried again after a pause, which doubles with each try.
    pub(crate) fn leave_for_long(&self, numbers: impl Iterator<Item = u64>, why: NotStored) {
        let mut state = self.state.lock();
        for number in numbers {
            let Some(waiting) = state.waiting.get_mut(&number) else { continue };
            let after = waiting.again.map_or(AGAIN_MIN, |(_, last)| (last * 2).min(AGAIN_MAX));
            waiting.left = Some(why);
            waiting.again = Some((Instant::now() + after, after));
        }
    }

    /// Whether a block waits with a number below this.
    pub(crate) fn has_waiting(&self, below: u64) -> bool {
        self.state.lock().waiting.range(..below).next().is_some()
    }

    /// Number of waiting blocks with numbers below `below` that could not be written at the last try.
    pub(crate) fn left(&self, below: u64) -> usize {
        self.state.lock().waiting.range(..below).filter(|(_, it)| it.left.is_some()).count()
    }

    /// No block waits any more. Returns why those that did could not be written.
    pub(crate) fn give_up(&self) -> Vec<NotStored> {
        let waiting: Vec<_> = {
            let state = self.state.lock();
            let why = |it: &Waiting| it.left.unwrap_or(NotStored::Failed);
            state.waiting.iter().map(|(number, it)| (*number, why(it))).collect()
        };
        drop(self.written(waiting.iter().map(|(number, _)| *number)));
        waiting.into_iter().map(|(_, why)| why).collect()
    }
}

impl State {
    /// Has the block leave that is worth least. `None`: none can.
    fn evict(&mut self, now_ms: u64) -> Option<Arc<Block>> {
        let blocks = &self.blocks;
        let key_of = |slot: Slot| {
            blocks.get(slot as usize).and_then(Option::as_ref).map_or(0, |block| block.key.0[0])
        };
        let slot = self.policy.evict(now_ms, key_of)?;
        let block = self.blocks[slot as usize].take().expect("the policy knows blocks only");
        self.slots.remove(&block.key);
        self.free.push(slot);
        Some(block)
    }

    fn free_slot(&mut self, now_ms: u64) -> Option<Slot> {
        if let Some(slot) = self.free.pop() {
            return Some(slot);
        }
        if self.blocks.len() < BLOCKS_MAX as usize {
            self.blocks.push(None);
            return Slot::try_from(self.blocks.len() - 1).ok();
        }
        drop(self.evict(now_ms)?);
        self.free.pop()
    }
}
