//! Stores blocks: to the disk, or to host memory first.

use crate::behind::{NO_SPACE_MAX, RETRY_EVERY};
use crate::error::Result;
use crate::host::{self, Host, Taken};
use crate::index::{Entry, Member};
use crate::key::Key;
use crate::log;
use crate::memory::BlockMemory;
use crate::policy::Retention;
use crate::stats::Counters;
use crate::store::{CHUNK_BYTES, Inner, NotStored, Put, Refusal, Space, chunks};
use crate::sync::lock;
use crate::task_pool::after;
use crate::writer::{BlocksUnderWay, Candidate, NotWritten};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Parts of a call that are written while the sums of another one are computed.
pub(crate) const WRITE_BEHIND: usize = 16;
/// Interval at which a waiting thread repeats that it needs space: its last call may have come when nothing could be
/// freed.
const ASK_EVERY: Duration = Duration::from_millis(20);
/// Longest wait of the last blocks of a store that is closed for a keeper that does not answer.
const ANSWER_MAX: Duration = Duration::from_secs(if cfg!(test) { 60 } else { 10 });
/// Time for which it is remembered that no segment was freed, if nothing asks for space.
const DRY_FOR: Duration = Duration::from_secs(10);

/// A block of a prompt that is not in the store.
#[derive(Clone, Debug)]
pub(crate) struct Absent {
    key: Key,
    /// The key of the block before it.
    parent: Option<Key>,
    /// Check of the block's whole name.
    check: u64,
    memory: BlockMemory,
}

/// Limits of the wait for space.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Patience {
    /// End of the wait. `None`: it lasts as long as segments are freed, also while the store is being closed.
    until: Option<Instant>,
    /// Longest time in which no segment is freed. Time that other threads have waited in vain counts.
    dry: Duration,
    /// Shortest wait, even if `dry` has passed.
    last: Option<LastTry>,
}

/// Last chance of blocks while the store is being closed: the keeper looks once more for a segment that it can free.
#[derive(Clone, Copy, Debug)]
struct LastTry {
    since: Instant,
    /// [`crate::index::Index::vain_looks`] at that time.
    vain_looks: u32,
}

impl LastTry {
    fn left(&self, member: &Member) -> Duration {
        // A look that had begun before may have seen less than the next one.
        let has_looked = member.vain_looks().wrapping_sub(self.vain_looks) > 1;
        let in_all = if has_looked { RETRY_EVERY } else { ANSWER_MAX };
        in_all.saturating_sub(self.since.elapsed())
    }
}

impl Patience {
    /// Patience of blocks that wait in host memory.
    pub(crate) fn behind() -> Self {
        Self { until: None, dry: NO_SPACE_MAX, last: None }
    }

    /// Patience of blocks that wait there when the store is closed.
    pub(crate) fn last(member: &Member) -> Self {
        let last = LastTry { since: Instant::now(), vain_looks: member.vain_looks() };
        Self { last: Some(last), ..Self::behind() }
    }

    /// Patience of a put whose wait for space counts from `since`.
    pub(crate) fn of_put(store: &Inner, since: Instant) -> Self {
        let dry = match store.host {
            Some(_) => store.put_wait.max(NO_SPACE_MAX),
            None => store.put_wait,
        };
        Self { until: Some(after(since, dry)), dry, last: None }
    }
}

/// State that the threads of this process share while they wait for space.
#[derive(Debug, Default)]
pub(crate) struct Waits {
    dry: Mutex<Option<Dry>>,
    /// The store is being closed: no call waits for space any more.
    is_closing: AtomicBool,
    #[cfg(test)]
    count: std::sync::atomic::AtomicUsize,
}

/// No segment was free, and none was freed.
#[derive(Clone, Copy, Debug)]
struct Dry {
    /// [`crate::index::Index::freed`], all the time.
    freed: u32,
    since: Instant,
    /// Time at which space was last asked for.
    last: Instant,
}

impl Waits {
    /// Number of times that a thread has waited.
    #[cfg(test)]
    fn count(&self) -> usize {
        self.count.load(Relaxed)
    }

    /// No call waits for space from now on.
    pub(crate) fn end(&self) {
        self.is_closing.store(true, Relaxed);
    }

    /// Returns since when space is asked for in vain, while the count of freed segments is `freed`. Notes that it is
    /// asked for.
    fn dry_since(&self, freed: u32) -> Instant {
        let (mut dry, now) = (lock(&self.dry), Instant::now());
        let goes_on = |it: &Dry| it.freed == freed && now.duration_since(it.last) < DRY_FOR;
        let since = dry.filter(goes_on).map_or(now, |it| it.since);
        *dry = Some(Dry { freed, since, last: now });
        since
    }

    /// Remaining time to wait.
    fn left(&self, member: &Member, freed: u32, patience: Patience) -> Duration {
        let waited = self.dry_since(freed).elapsed();
        let left = patience.dry.saturating_sub(waited);
        match patience.until {
            Some(_) if self.is_closing.load(Relaxed) => Duration::ZERO,
            Some(until) => left.min(until.saturating_duration_since(Instant::now())),
            None => left.max(patience.last.map_or(Duration::ZERO, |it| it.left(member))),
        }
    }
}

/// Place of a block that is put, if the store has it.
enum There {
    OnDisk(Entry),
    No,
    /// In host memory, from where it is to be written; with the reason why the last try failed.
    Waits(Option<NotStored>),
}

impl Space {
    /// `first`: the number of the first block of `memory` in the prompt. `since`: see [`Patience::of_put`].
    pub(crate) fn store_blocks<H: AsRef<[u8]>>(
        &self,
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
                There::OnDisk(entry) => {
                    put.present += 1;
                    found.push(entry);
                    continue;
                }
                There::Waits(left) => {
                    put.note_waiting(left);
                    continue;
                }
                There::No => {}
            }
            let parent = at.checked_sub(1).map(|before| keys[before]);
            absent.push(Absent { key: keys[at], parent, check: check(), memory: memory.clone() });
        }
        self.store.worker.writer.note_present(core, found.iter());
        let patience = Patience::of_put(&self.store, since);
        let first_absent = absent.first().map(|it| it.key);
        let (waiting, outcome) = match &self.store.host {
            Some(host) => self.put_behind(host, absent, retention, patience, &mut put),
            None => (0, self.put_now(&absent, retention, patience, &mut put)),
        };
        if let Some(first) = first_absent {
            self.note_found(&keys, &first, &found);
        }
        // What waits is counted once it is on the disk.
        Counters::add(&core.counters.stored, put.stored - waiting);
        core.counters.add_not_stored(&put);
        outcome.map(|()| put)
    }

    /// Tells the keeper of blocks that a put has found behind a missing one, which is there again: they are as good as
    /// new ones. Without that the keeper, to which they had left with the missing one, would soon free them.
    fn note_found(&self, keys: &[Key], first_absent: &Key, found: &[Entry]) {
        let Some(first) = keys.iter().position(|it| it == first_absent) else { return };
        let (before, behind) = keys.split_at(first);
        if !found.iter().any(|it| behind.contains(&it.key)) {
            return;
        }
        let member = &self.store.core.member;
        let there = |key: &Key| member.find(key).map(|it| it.slot);
        let slots: Vec<_> = behind.iter().map_while(there).collect();
        self.note_added(before.last().and_then(there), &slots);
    }

    fn is_there(&self, key: &Key, check: impl Fn() -> u64) -> There {
        // First: it is on the disk before it waits no more.
        let waits = self.store.host.as_ref().and_then(|host| host.waits(key));
        if let Some(entry) = self.store.core.find_whole(key, check) {
            return There::OnDisk(entry);
        }
        match waits {
            Some(left) => There::Waits(left),
            // One that is in host memory all the same has left the disk.
            None => There::No,
        }
    }

    /// Copies blocks to host memory, from where they are written. Those for which there is no room are written after
    /// them, while the caller waits. Returns how many wait.
    fn put_behind(
        &self,
        host: &Host,
        absent: Vec<Absent>,
        retention: Retention,
        patience: Patience,
        put: &mut Put,
    ) -> (usize, Result<()>) {
        let (mut waiting, mut outcome) = (0, Ok(()));
        let mut rest = absent.as_slice();
        while let Some((first, others)) = rest.split_first() {
            match self.take_in(host, first, retention) {
                Ok(Taken::Now) => waiting += 1,
                // Another call was faster.
                Ok(Taken::Before(left)) => put.note_waiting(left),
                Ok(Taken::No) => break,
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
    fn take_in(&self, host: &Host, absent: &Absent, retention: Retention) -> Result<Taken> {
        let (now, len) = (self.store.core.clock.now_ms(), absent.memory.len());
        let record = |block: &host::Block| {
            let len = u32::try_from(block.len).expect("checked when the block was put");
            self.record(absent, len, block.sum, retention)
        };
        // It may be there: it was got, or it has left the disk since.
        let taken = host.wait(absent.key, absent.check, record);
        if taken != Taken::No {
            return Ok(taken);
        }
        let Some(extent) = host.reserve(now, len, true) else { return Ok(Taken::No) };
        let sum = extent.fill_and_sum(&absent.memory)?;
        let block = Arc::new(host::Block::new(absent.key, absent.check, sum, len, extent));
        host.add(now, absent.parent, std::slice::from_ref(&block), retention);
        Ok(host.wait(absent.key, absent.check, record))
    }

    /// Writes blocks to the disk. While some are written, the sums of the next ones are computed.
    fn put_now(
        &self,
        absent: &[Absent],
        retention: Retention,
        patience: Patience,
        put: &mut Put,
    ) -> Result<()> {
        let mut writing = Writing::new(self, patience);
        let mut outcome = Ok(());
        for part in
            chunks(absent, CHUNK_BYTES, |it| u32::try_from(it.memory.len()).unwrap_or(u32::MAX))
        {
            let candidate = |absent: &Absent| {
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

    /// Writes blocks whose sums are known, each behind the one before it. True if some of them failed because a
    /// directory hangs.
    pub(crate) fn write_all(&self, new: &[Candidate], patience: Patience, put: &mut Put) -> bool {
        let mut writing = Writing::new(self, patience);
        for part in chunks(new, CHUNK_BYTES, |it| it.block.len) {
            writing.write(part, put);
        }
        writing.end(put)
    }

    /// Metadata to write with a block. `sum` is the checksum of its bytes.
    fn record(&self, absent: &Absent, len: u32, sum: u64, retention: Retention) -> log::Block {
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

/// Blocks of a call that are being written, in their order. Dropping it waits for them.
struct Writing<'a> {
    space: &'a Space,
    patience: Patience,
    under_way: VecDeque<BlocksUnderWay>,
    /// Blocks were not written because a directory hangs.
    hangs: bool,
}

impl<'a> Writing<'a> {
    fn new(space: &'a Space, patience: Patience) -> Self {
        Self { space, patience, under_way: VecDeque::new(), hangs: false }
    }

    fn write(&mut self, new: &[Candidate], put: &mut Put) {
        let store = &self.space.store;
        let mut rest = new;
        while !rest.is_empty() {
            let freed = store.core.member.freed();
            match store.worker.writer.begin(&store.core, rest) {
                Ok(begun) => {
                    rest = &rest[begun.count()..];
                    self.under_way.push_back(begun);
                }
                Err(NotWritten::Full) => {
                    if !self.wait_for_space(freed, put) {
                        put.refuse(Refusal::NoSpace, rest.len());
                        return;
                    }
                }
                Err(NotWritten::Failed | NotWritten::Hangs) => {
                    put.failed += rest.len();
                    store.wake_keeper();
                    return;
                }
            }
            while self.under_way.len() > WRITE_BEHIND {
                self.end_first(put);
            }
        }
    }

    /// Waits until a segment is freed, if none was since the count was `freed`. False if that takes too long.
    fn wait_for_space(&mut self, freed: u32, put: &mut Put) -> bool {
        let store = &self.space.store;
        let member = &store.core.member;
        member.note_no_space();
        if !store.waits.left(member, freed, self.patience).is_zero() {
            #[cfg(test)]
            store.waits.count.fetch_add(1, Relaxed);
            // A segment can't be sealed, and so not be freed, while a write into it has not ended.
            while !self.under_way.is_empty() {
                self.end_first(put);
            }
        }
        loop {
            // Its own full segments may be what is to be freed.
            store.worker.wake();
            store.wake_keeper();
            let left = store.waits.left(member, freed, self.patience);
            if member.wait_freed(freed, left.min(ASK_EVERY), || false) {
                return !left.is_zero();
            }
            if left.is_zero() {
                return false;
            }
        }
    }

    fn end_first(&mut self, put: &mut Put) {
        let Some(first) = self.under_way.pop_front() else { return };
        let (space, count) = (self.space, first.count());
        let ended = first.end(&space.store.core, |segment, records| {
            space.publish(segment, records, put);
            if let Some(objects) = &space.store.objects {
                objects.stored(segment, records);
            }
        });
        if let Err(why) = ended {
            put.failed += count;
            self.hangs |= why == NotWritten::Hangs;
        }
    }

    /// Waits for the end of all. True if some failed because a directory hangs.
    fn end(mut self, put: &mut Put) -> bool {
        while !self.under_way.is_empty() {
            self.end_first(put);
        }
        let store = &self.space.store;
        if store.worker.writer.is_awaited() {
            store.worker.wake();
            store.wake_keeper();
        }
        self.hangs
    }
}

#[cfg(test)]
mod tests;
