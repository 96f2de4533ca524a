//! Writes blocks to the disk, and waits for space where there is none.

use crate::index::{self, Entry, Inserted, New, SlotId};
use crate::key::Key;
use crate::log;
use crate::outcome::{Put, Refusal};
use crate::space::{CHUNK_BYTES, Space, chunks};
use crate::waits::Patience;
use crate::writer::{BlocksUnderWay, Candidate, NotWritten};
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Parts of a call that are written while the sums of another one are computed.
pub(crate) const WRITE_BEHIND: usize = 16;
/// Interval at which a waiting thread repeats that it needs space: its last call may have come when nothing could be
/// freed.
const ASK_EVERY: Duration = Duration::from_millis(20);

impl Space {
    /// Writes blocks whose sums are known, each behind the one before it. True if some of them failed because a
    /// directory hangs.
    pub(crate) fn write_all(&self, new: &[Candidate], patience: Patience, put: &mut Put) -> bool {
        let mut writing = Writing::new(self, patience);
        for part in chunks(new, CHUNK_BYTES, |it| it.block.len) {
            writing.write(part, put);
        }
        writing.end(put)
    }

    /// Puts written blocks into the index. Without a `patience`, no lock is waited for.
    pub(crate) fn publish(
        &self,
        segment: u32,
        records: &[log::Record],
        patience: Option<Patience>,
        put: &mut Put,
    ) {
        let core = &self.store.core;
        // The last block of the index, with its key. Blocks between two of these may have been there before.
        let mut last: Option<(Key, SlotId)> = None;
        let (mut parent, mut slots) = (None, Vec::with_capacity(records.len()));
        for record in records {
            let block = &record.block;
            let named = block.parent.map(Key);
            let before = match last {
                Some((key, slot)) if named == Some(key) => Some(slot),
                _ => named.and_then(|key| core.member.find(&key)).map(|it| it.slot),
            };
            if before != slots.last().copied().or(parent) {
                self.note_added(parent, &slots);
                slots.clear();
            }
            if slots.is_empty() {
                parent = before;
            }
            let new = New {
                sum: block.sum,
                parent: before,
                page: core.superblock.geometry.place(segment, record.page),
                len: block.len,
                retention: block.retention,
                now: block.time,
            };
            match self.insert(Key(block.key), new, patience) {
                Inserted::New(slot) => {
                    put.stored += 1;
                    core.counters.bytes_written.fetch_add(block.len.into(), Relaxed);
                    slots.push(slot);
                    last = Some((Key(block.key), slot));
                }
                Inserted::Exists(entry) => {
                    put.present += 1;
                    if !self.replace_unverified(&entry, segment, new) {
                        self.store.worker.writer.note_present(core, std::iter::once(&entry));
                    }
                    last = Some((Key(block.key), entry.slot));
                }
                Inserted::Full => {
                    put.refuse(Refusal::IndexFull, 1);
                    self.store.wake_keeper();
                }
                Inserted::Contended => put.refuse(Refusal::Contended, 1),
            }
        }
        self.note_added(parent, &slots);
    }

    /// Puts a block into the index. Its lock may be held by a thread that waits for a processor: it is tried again for as
    /// long as `patience` lasts.
    fn insert(&self, key: Key, new: New, patience: Option<Patience>) -> Inserted {
        loop {
            let inserted = self.store.core.member.insert(key, new);
            let waits = || patience.is_some_and(|it| self.store.waits.may_wait_for_lock(it));
            if inserted != Inserted::Contended || !waits() {
                return inserted;
            }
            #[cfg(test)]
            self.store.waits.lock_tries.fetch_add(1, Relaxed);
            // As long as the try before: a lock that is held for longer takes half of a processor.
            std::thread::sleep(index::PATIENCE);
        }
    }

    /// Has the index name the copy of a block that was just written, if the one before may be torn.
    fn replace_unverified(&self, there: &Entry, segment: u32, new: New) -> bool {
        let core = &self.store.core;
        let (before, _) = core.superblock.geometry.locate(there.page);
        if !core.member.is_unverified(before) || (there.sum, there.len) != (new.sum, new.len) {
            return false;
        }
        // The one before may be the only one on the disk.
        core.member.note_copies(segment, true);
        core.member.relocate(there, new.page)
    }
}

/// Blocks of a call that are being written, in their order. Dropping it waits for them.
pub(super) struct Writing<'a> {
    space: &'a Space,
    patience: Patience,
    under_way: VecDeque<BlocksUnderWay>,
    /// Blocks were not written because a directory hangs.
    hangs: bool,
}

impl<'a> Writing<'a> {
    pub(super) fn new(space: &'a Space, patience: Patience) -> Self {
        Self { space, patience, under_way: VecDeque::new(), hangs: false }
    }

    pub(super) fn write(&mut self, new: &[Candidate], put: &mut Put) {
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
            store.waits.note_wait();
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
        let (space, count, patience) = (self.space, first.count(), Some(self.patience));
        let ended = first.end(&space.store.core, |segment, records| {
            space.publish(segment, records, patience, put);
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
    pub(super) fn end(mut self, put: &mut Put) -> bool {
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
