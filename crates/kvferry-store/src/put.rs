//! Stores blocks: to the disk, or to host memory first.

use crate::error::{Error, Result};
use crate::host;
use crate::index::SlotId;
use crate::key::Key;
use crate::log;
use crate::memory::BlockMemory;
use crate::pending::Pending;
use crate::policy::Retention;
use crate::stats::Counters;
use crate::store::{CHUNK_BYTES, Put, Space, chunks};
use crate::writer::{BlocksUnderWay, Candidate, NotWritten};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering::AcqRel;

/// Parts of a call that are written while the sums of another one are computed.
const WRITE_BEHIND: usize = 16;

/// A block of a prompt that is not in the store.
#[derive(Clone, Debug)]
pub(crate) struct Absent {
    key: Key,
    /// The key of the block before it.
    parent: Option<Key>,
    /// Of the whole name.
    check: u64,
    memory: BlockMemory,
}

impl Space {
    /// `first`: the number of the first block of `memory` in the prompt.
    pub(crate) fn store_blocks<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retention: Retention,
    ) -> Result<Put> {
        let core = &self.store.core;
        let keys = self.keys(&prompt[first.saturating_sub(1)..first + memory.len()])?;
        let offset = first.min(1);
        let mut put = Put::default();
        let mut absent = Vec::new();
        for (block, memory) in memory.iter().enumerate() {
            let at = offset + block;
            if self.is_there(&keys[at]) {
                put.present += 1;
                continue;
            }
            let parent = at.checked_sub(1).map(|before| keys[before]);
            let check = self.identity.check(prompt[first + block].as_ref());
            absent.push(Absent { key: keys[at], parent, check, memory: memory.clone() });
        }
        let outcome = match &self.store.host {
            Some(host) => self.put_behind(host, absent, retention, &mut put),
            None => self.put_now(&absent, retention, &mut put),
        };
        Counters::add(&core.counters.stored, put.stored);
        Counters::add(&core.counters.present, put.present);
        Counters::add(&core.counters.refused, put.refused);
        Counters::add(&core.counters.failed, put.failed);
        outcome.map(|()| put)
    }

    fn is_there(&self, key: &Key) -> bool {
        let in_host = |host: &Arc<host::Host>| host.prefix(&[*key]) == 1;
        self.store.core.member.find(key).is_some() || self.store.host.as_ref().is_some_and(in_host)
    }

    /// Copies blocks to host memory, from where they are written. Those for which there is no room are written
    /// behind them, while the caller waits.
    fn put_behind(
        &self,
        host: &Arc<host::Host>,
        absent: Vec<Absent>,
        retention: Retention,
        put: &mut Put,
    ) -> Result<()> {
        let now = self.store.core.clock.now_ms();
        let (mut taken, mut blocks) = (Vec::new(), Vec::new());
        let mut rest = absent.into_iter();
        let (mut beyond, mut outcome) = (None, Ok(()));
        for absent in rest.by_ref() {
            let len = absent.memory.len();
            let Some(extent) = host.reserve(now, len, true) else {
                beyond = Some(absent);
                break;
            };
            let filled = extent.fill_and_sum(&absent.memory);
            let new =
                filled.and_then(|sum| self.candidate(&absent, extent.memory(len), sum, retention));
            match new {
                Ok(new) => taken.push(new),
                Err(e) => {
                    outcome = Err(e);
                    break;
                }
            }
            let block = Arc::new(host::Block::new(absent.key, absent.check, len, extent));
            // One by one, so that the next reservation knows of it.
            host.add(now, absent.parent, std::slice::from_ref(&block), retention, true);
            blocks.push(block);
        }
        put.stored += taken.len();
        if !taken.is_empty() {
            let (space, host) = (self.for_task(), Arc::clone(host));
            let task = move || {
                // What was not written is counted, and stays in host memory as long as there is room.
                let mut put = Put::default();
                space.write_all(&taken, &mut put);
                let counters = &space.store.core.counters;
                Counters::add(&counters.refused, put.refused);
                Counters::add(&counters.failed, put.failed);
                space.store.lost.fetch_or(put.failed > 0, AcqRel);
                host.written(blocks.iter().map(|block| block.key));
            };
            self.store.behind.submit(0, false, Box::new(task))?;
        }
        let beyond: Vec<_> = beyond.into_iter().chain(rest).collect();
        if beyond.is_empty() || outcome.is_err() {
            return outcome;
        }
        let (pending, promise) = Pending::new();
        let space = self.for_task();
        let task = move || {
            let mut put = Put::default();
            promise.finish(space.put_now(&beyond, retention, &mut put).map(|()| put));
        };
        self.store.behind.submit(0, false, Box::new(task))?;
        put.add(ended(pending)?);
        Ok(())
    }

    /// Writes blocks to the disk. While some are written, the sums of the next ones are computed.
    fn put_now(&self, absent: &[Absent], retention: Retention, put: &mut Put) -> Result<()> {
        let mut writing = Writing::new(self, absent.first().and_then(|it| it.parent));
        let mut outcome = Ok(());
        for part in
            chunks(absent, CHUNK_BYTES, |it| u32::try_from(it.memory.len()).unwrap_or(u32::MAX))
        {
            let candidate = |absent: &Absent| {
                let sum = absent.memory.sum()?;
                self.candidate(absent, absent.memory.clone(), sum, retention)
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

    /// Writes blocks whose sums are known, each behind the one before it.
    pub(crate) fn write_all(&self, new: &[Candidate], put: &mut Put) {
        let parent = new.first().and_then(|it| it.block.parent).map(Key);
        let mut writing = Writing::new(self, parent);
        for part in chunks(new, CHUNK_BYTES, |it| it.block.len) {
            writing.write(part, put);
        }
        writing.end(put);
    }

    fn candidate(
        &self,
        absent: &Absent,
        memory: BlockMemory,
        sum: u64,
        retention: Retention,
    ) -> Result<Candidate> {
        let block = log::Block {
            key: absent.key.0,
            parent: absent.parent.map(|key| key.0),
            sum: sum ^ absent.check,
            check: absent.check,
            namespace: self.identity.id,
            len: memory.checked_len()?,
            retention: retention.to_bits(),
            time: self.store.core.clock.now_s(),
        };
        Ok(Candidate { block, memory })
    }
}

/// Blocks of a call that are being written, in their order. Dropping it waits for them.
struct Writing<'a> {
    space: &'a Space,
    /// The block behind which the next one is published.
    parent: Option<SlotId>,
    under_way: VecDeque<BlocksUnderWay>,
}

impl<'a> Writing<'a> {
    fn new(space: &'a Space, parent: Option<Key>) -> Self {
        let parent = parent.and_then(|key| space.store.core.member.find(&key));
        Self { space, parent: parent.map(|it| it.slot), under_way: VecDeque::new() }
    }

    fn write(&mut self, new: &[Candidate], put: &mut Put) {
        let store = &self.space.store;
        let mut rest = new;
        while !rest.is_empty() {
            match store.worker.writer.begin(&store.core, rest) {
                Ok(begun) => {
                    rest = &rest[begun.count()..];
                    self.under_way.push_back(begun);
                }
                Err(why) => {
                    match why {
                        NotWritten::Full => put.refused += rest.len(),
                        NotWritten::Failed => put.failed += rest.len(),
                    }
                    store.wake_keeper();
                    return;
                }
            }
            while self.under_way.len() > WRITE_BEHIND {
                self.end_first(put);
            }
        }
    }

    fn end_first(&mut self, put: &mut Put) {
        let Some(first) = self.under_way.pop_front() else { return };
        let (space, count) = (self.space, first.count());
        let parent = &mut self.parent;
        let ended = first.end(&space.store.core, |segment, records| {
            *parent = space.publish(segment, records, *parent, put);
            if let Some(objects) = &space.store.objects {
                objects.stored(segment, records);
            }
        });
        if ended.is_err() {
            put.failed += count;
        }
    }

    fn end(mut self, put: &mut Put) {
        while !self.under_way.is_empty() {
            self.end_first(put);
        }
        let store = &self.space.store;
        if store.worker.writer.is_awaited() {
            store.worker.wake();
            store.wake_keeper();
        }
    }
}

/// The outcome of an operation that only this call waits for.
fn ended<T: Clone>(operation: Pending<T>) -> Result<T> {
    let outcome = operation.wait(None).ok_or(Error::Closed)?;
    drop(operation);
    match Arc::try_unwrap(outcome) {
        Ok(outcome) => outcome,
        Err(shared) => shared.as_ref().as_ref().cloned().map_err(|_| Error::Closed),
    }
}
