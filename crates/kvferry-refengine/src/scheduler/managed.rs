//! Blocks by kvferry's block manager.
//!
//! A request gets the blocks of all its tokens when it is admitted. If copies must end before it may use them, it waits
//! as for a load; one that runs and gets more blocks is left out of steps meanwhile. No call here waits for a copy.

use super::Scheduler;
use super::entry::{Entry, Load};
use super::schedule::{Admitted, Growth};
use crate::layout::BlockId;
use crate::offload::{Managed, ManagedRequest};
use crate::request::RequestStatus;
use kvferry_blocks::{Action, Error, Request, SequenceId};

/// Copies that a step takes, at most, so that it is not held up.
const TAKEN_MAX: usize = 64;

impl Entry {
    /// True if the request has blocks that a copy still reads.
    pub(super) fn waits_for_pages(&self) -> bool {
        self.held.as_ref().is_some_and(|held| !held.is_ready)
    }
}

impl Scheduler {
    /// Gives the manager copies that have ended, and does what follows. Returns how many; there may be more.
    pub(crate) fn take_ended_copies(&mut self) -> usize {
        let Some(managed) = &mut self.managed else { return 0 };
        let now = managed.clock.now_ms();
        let ended = managed.driver.take_finished(TAKEN_MAX);
        let count = ended.len();
        for (id, outcome) in ended {
            let known = managed.manager.finished(id, outcome, now);
            known.expect("a driver ends each copy once");
        }
        self.carry_out_actions();
        count
    }

    /// Does what the manager asks for: copies are handed to the driver's threads.
    pub(crate) fn carry_out_actions(&mut self) {
        let mut copies = Vec::new();
        while let Some(action) = self.managed.as_mut().and_then(|it| it.manager.poll_action()) {
            match action {
                Action::Ready { sequence, reused_tokens } => {
                    self.became_ready(sequence, reused_tokens as usize);
                }
                Action::Cut { sequence, blocks, .. } => self.was_cut(sequence, blocks as usize),
                action => copies.push(action),
            }
        }
        if let Some(managed) = &self.managed {
            managed.driver.submit(copies);
        }
    }

    pub(super) fn admit_managed(&mut self, number: u64, budget: usize) -> Admitted {
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        let managed = self.managed.as_mut().expect("called with a block manager");
        if entry.held.is_none() {
            let keys = managed.keys(&entry.hashes[0]);
            let request = Request {
                prompt_tokens: count(entry.tokens.len()),
                keys: &keys,
                tokens: &entry.tokens,
                salt: managed.salt(),
                retention: &entry.retention,
            };
            let allocation = match managed.manager.allocate(&request, managed.clock.now_ms()) {
                Ok(allocation) => allocation,
                Err(Error::OutOfBlocks { .. } | Error::AwaitTransfers { .. }) => {
                    return Admitted::NoRoom;
                }
                Err(error) => unreachable!("a request of an engine: {error}"),
            };
            let reused = allocation.reused_tokens as usize;
            managed.owners.insert(allocation.sequence, number);
            managed.warn(&entry.id, allocation.warning);
            entry.held = Some(ManagedRequest {
                sequence: allocation.sequence,
                is_ready: allocation.is_ready,
                tokens: entry.tokens.len(),
                stored: 0,
                clean: reused.div_ceil(managed.block_tokens),
            });
            read_tables(managed, entry);
            if !allocation.is_ready {
                entry.status = RequestStatus::WaitingForRemoteKvs;
                entry.load = Some(Load { tokens: reused, valid: reused, done: false });
                return Admitted::Loading;
            }
            (entry.computed, entry.cached) = (reused, reused);
        }
        let most = budget.min(self.limits.chunk_tokens);
        let count = (entry.tokens.len() - entry.computed).min(most);
        use_pages(managed, entry);
        Admitted::Running(Self::start(entry, count, vec![]))
    }

    pub(super) fn grow_managed(&mut self, number: u64, more: usize) -> Growth {
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        let managed = self.managed.as_mut().expect("called with a block manager");
        let needed = entry.computed + more;
        let held = entry.held.as_mut().expect("a running request has blocks");
        if needed > held.tokens {
            let now = managed.clock.now_ms();
            match managed.manager.append(held.sequence, count(needed - held.tokens), now) {
                Ok(_) => {}
                Err(Error::AwaitTransfers { .. }) => return Growth::Later,
                Err(Error::OutOfBlocks { .. }) => return Growth::NoRoom,
                Err(error) => unreachable!("a sequence of an engine: {error}"),
            }
            held.tokens = needed;
            held.is_ready = managed.manager.is_ready(held.sequence) == Some(true);
            read_tables(managed, entry);
        }
        if entry.waits_for_pages() {
            return Growth::Later;
        }
        use_pages(managed, entry);
        Growth::Now(vec![])
    }

    /// Other requests may reuse the blocks that a request has computed.
    pub(super) fn store_computed(&mut self, number: u64) {
        let entry = self.requests.get_mut(&number).expect("queues name live requests");
        let (Some(managed), Some(held)) = (&mut self.managed, &mut entry.held) else { return };
        let full = entry.computed / managed.block_tokens;
        if full > held.stored {
            let keys = managed.keys(&entry.hashes[0][..full]);
            let stored = managed.manager.store(held.sequence, &keys, &entry.tokens);
            held.stored = stored.expect("keys of the sequence") as usize;
        }
    }

    /// Takes all blocks of a request.
    pub(super) fn release(&mut self, number: u64) {
        let entry = self.requests.get_mut(&number).expect("only live requests have blocks");
        let (Some(managed), Some(held)) = (&mut self.managed, entry.held.take()) else {
            self.cache.release(&mut entry.tables);
            return;
        };
        let full = entry.computed / managed.block_tokens;
        let keys = managed.keys(&entry.hashes[0][..full]);
        let now = managed.clock.now_ms();
        let freed = managed.manager.free(held.sequence, &keys, &entry.tokens, now);
        freed.expect("keys of the sequence");
        managed.owners.remove(&held.sequence);
        entry.tables.blocks.iter_mut().for_each(Vec::clear);
    }

    fn became_ready(&mut self, sequence: SequenceId, reused: usize) {
        let Some(managed) = &mut self.managed else { return };
        // Requests that were aborted have no sequence any more.
        let Some(number) = managed.owners.get(&sequence).copied() else { return };
        let entry = self.requests.get_mut(&number).expect("owners are live requests");
        let held = entry.held.as_mut().expect("an owner has blocks");
        held.is_ready = managed.manager.is_ready(sequence) == Some(true);
        let Some(load) = entry.load.filter(|load| !load.done) else { return };
        entry.load = Some(Load { valid: reused, ..load });
        held.clean = reused.div_ceil(managed.block_tokens);
        let missing = entry.tokens.len() - held.tokens;
        if missing > 0 && held.is_ready {
            let now = managed.clock.now_ms();
            if managed.manager.append(sequence, count(missing), now).is_err() {
                // It is admitted anew when there is room.
                self.release(number);
                let entry = self.entry_mut(number);
                entry.status = entry.status_of_waiting();
                entry.load = None;
                return;
            }
            held.tokens = entry.tokens.len();
            held.is_ready = managed.manager.is_ready(sequence) == Some(true);
            read_tables(managed, entry);
        }
        if let (false, Some(load)) = (entry.waits_for_pages(), &mut entry.load) {
            load.done = true;
        }
    }

    fn was_cut(&mut self, sequence: SequenceId, blocks: usize) {
        let Some(managed) = &mut self.managed else { return };
        let Some(number) = managed.owners.get(&sequence).copied() else { return };
        let entry = self.requests.get_mut(&number).expect("owners are live requests");
        let held = entry.held.as_mut().expect("an owner has blocks");
        held.tokens = held.tokens.min(blocks * managed.block_tokens);
        read_tables(managed, entry);
    }
}

impl Entry {
    pub(super) fn status_of_waiting(&self) -> RequestStatus {
        if self.preempted { RequestStatus::Preempted } else { RequestStatus::Waiting }
    }
}

fn count(tokens: usize) -> u32 {
    u32::try_from(tokens).expect("requests have fewer tokens than a u32")
}

/// Block 0 of the engine stands for none; the manager counts from 0.
fn read_tables(managed: &Managed, entry: &mut Entry) {
    let Some(held) = &entry.held else { return };
    for (group, table) in (0..).zip(&mut entry.tables.blocks) {
        let pages = managed.manager.blocks(held.sequence, group).unwrap_or_default();
        table.clear();
        table.extend(pages.iter().map(|page| BlockId(page + 1)));
    }
}

/// The request computes on its blocks from now on: what is not reused has no bytes of other requests.
fn use_pages(managed: &mut Managed, entry: &mut Entry) {
    let Some(held) = &mut entry.held else { return };
    for (group, table) in entry.tables.blocks.iter().enumerate() {
        managed.void.extend(table.iter().skip(held.clean).map(|block| (group, *block)));
    }
    held.clean = held.clean.max(entry.tables.blocks[0].len());
}
