//! Copies that the caller is to make, and what waits for them.
//!
//! A transfer waits for others in two cases: the page that it writes is still read by an offload, or the block that it
//! reads is still written by one. It is handed out when these have ended.

use crate::NONE;
use crate::events::Tier;
use crate::key::Key;
use crate::retention::{FilePlace, TransferMode};
use crate::sequence::SequenceId;
use smallvec::SmallVec;
use std::sync::Arc;

/// A block of a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Block {
    /// The pool.
    pub tier: Tier,
    /// Index of the block in the pool, from 0.
    pub index: u32,
}

/// Names a transfer until it is finished.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TransferId(pub(crate) u64);

/// A copy to make. Until [`BlockManager::finished`](crate::BlockManager::finished), neither block is used otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Identifies the transfer for [`BlockManager::finished`](crate::BlockManager::finished).
    pub id: TransferId,
    /// The group of both blocks.
    pub group: u16,
    /// Source of the copy. In a file mode, a secondary block stands for the file.
    pub from: Block,
    /// Destination of the copy.
    pub to: Block,
    /// Number of tokens to copy, from the start of the block.
    pub tokens: u32,
    /// The name of what is copied.
    pub key: Key,
    /// Way in which the block is copied. Between two primary blocks: [`TransferMode::Dram`].
    pub mode: TransferMode,
    /// Directory of the file, in a file mode.
    pub directory: Option<Arc<str>>,
    /// Resets of the manager before the block was stored. With the key and the group it names the content: a block of the
    /// same key that was stored before a reset has other bytes.
    pub resets: u32,
}

impl Transfer {
    /// File name in the directory, in a file mode. It depends on the block's content only, never on its place.
    pub fn file_name(&self) -> String {
        file_name(self.key, self.group, self.resets)
    }
}

/// The file of a block is no longer needed. A later copy may write it again: files of one name are in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Discard {
    /// Directory of the file.
    pub directory: Arc<str>,
    /// Mode by which the block was offloaded.
    pub mode: TransferMode,
    /// The group of the block.
    pub group: u16,
    /// The block's name.
    pub key: Key,
    /// The manager's resets, as in [`Transfer::resets`].
    pub resets: u32,
}

impl Discard {
    /// Name of the file; see [`Transfer::file_name`].
    pub fn file_name(&self) -> String {
        file_name(self.key, self.group, self.resets)
    }
}

fn file_name(key: Key, group: u16, resets: u32) -> String {
    format!("{key}-{group}-{resets}.kv")
}

/// Outcome of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The target has the bytes. A caller that keeps checksums has verified them.
    Done,
    /// The target has nothing of use.
    Failed,
}

/// An operation for the caller, which takes operations in order.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Action {
    /// Make this copy, and call [`BlockManager::finished`](crate::BlockManager::finished) when it has ended.
    Copy(Transfer),
    /// A secondary block outside memory is no longer needed.
    Discard(Discard),
    /// All blocks of a sequence may be used: the first `reused_tokens` tokens of them need not be computed.
    Ready {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens at the start of the blocks whose KV is present.
        reused_tokens: u32,
    },
    /// A copy for a sequence has failed: fewer tokens are reused. The sequence has its first `blocks` blocks only,
    /// [`BlockManager::append`](crate::BlockManager::append) gives it others.
    Cut {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens at the start of the blocks whose KV is present once the sequence is ready.
        reused_tokens: u32,
        /// Blocks that the sequence has left, in each group.
        blocks: u32,
    },
}

/// Purpose of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A node leaves its page, which already belongs to a sequence or to another node.
    Offload,
    /// A node gets a page.
    Onboard,
    /// Part of a node is copied to a page of a sequence.
    Partial,
}

/// Description of a transfer, without its dependencies.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) kind: Kind,
    pub(crate) group: u16,
    pub(crate) from: Block,
    pub(crate) to: Block,
    pub(crate) node: u32,
    pub(crate) tokens: u32,
    pub(crate) key: Key,
    pub(crate) file: FilePlace,
}

#[derive(Debug)]
pub(crate) struct Entry {
    /// None: the entry is free.
    pub(crate) job: Option<Job>,
    generation: u32,
    is_issued: bool,
    /// Transfers that must end before this one starts.
    pub(crate) blocked_on: u32,
    /// A transfer that wrote the source has failed: this one will fail without being handed out.
    pub(crate) is_doomed: bool,
    /// The page that it reads (offload) or writes (partial copy) has no owner any more.
    pub(crate) frees_page: bool,
    /// Sequences that are not ready before it has ended.
    pub(crate) waiters: SmallVec<[u32; 4]>,
    pub(crate) dependents: SmallVec<[u32; 2]>,
}

/// The transfers that have not ended.
#[derive(Debug, Default)]
pub(crate) struct Transfers {
    entries: Vec<Entry>,
    free: Vec<u32>,
}

impl Transfers {
    /// A new one. It is handed out by [`Transfers::issue`], not before all that it depends on have ended.
    pub(crate) fn open(&mut self, job: Job, after: [Option<u32>; 2]) -> u32 {
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                self.entries.push(Entry {
                    job: None,
                    generation: 0,
                    is_issued: false,
                    blocked_on: 0,
                    is_doomed: false,
                    frees_page: false,
                    waiters: SmallVec::new(),
                    dependents: SmallVec::new(),
                });
                self.entries.len() as u32 - 1
            }
        };
        for before in after.into_iter().flatten() {
            self.entries[before as usize].dependents.push(id);
        }
        let entry = &mut self.entries[id as usize];
        entry.job = Some(job);
        entry.is_issued = false;
        entry.is_doomed = false;
        entry.frees_page = false;
        entry.blocked_on = after.into_iter().flatten().count() as u32;
        id
    }

    /// Marks the transfer as issued, and returns it for the caller.
    pub(crate) fn issue(&mut self, id: u32) -> Transfer {
        let entry = &mut self.entries[id as usize];
        entry.is_issued = true;
        let job = entry.job.as_ref().expect("an open transfer");
        Transfer {
            id: TransferId(u64::from(entry.generation) << 32 | u64::from(id)),
            group: job.group,
            from: job.from,
            to: job.to,
            tokens: job.tokens,
            key: job.key,
            mode: job.file.mode,
            directory: job.file.directory.clone(),
            resets: job.file.resets,
        }
    }

    /// None: no transfer of this name was handed out, or it has ended.
    pub(crate) fn find(&self, id: TransferId) -> Option<u32> {
        let at = id.0 as u32;
        let entry = self.entries.get(at as usize)?;
        let is_it = u64::from(entry.generation) == id.0 >> 32 && entry.is_issued;
        (is_it && entry.job.is_some()).then_some(at)
    }

    pub(crate) fn entry(&mut self, id: u32) -> &mut Entry {
        &mut self.entries[id as usize]
    }

    pub(crate) fn job(&self, id: u32) -> &Job {
        self.entries[id as usize].job.as_ref().expect("an open transfer")
    }

    /// Forgets it.
    pub(crate) fn close(&mut self, id: u32) {
        let entry = &mut self.entries[id as usize];
        entry.job = None;
        entry.generation = entry.generation.wrapping_add(1);
        entry.waiters.clear();
        entry.dependents.clear();
        self.free.push(id);
    }

    /// Removes a sequence from those that wait for a transfer. False if it did not wait.
    pub(crate) fn forget_waiter(&mut self, id: u32, sequence: u32) -> bool {
        if id == NONE {
            return false;
        }
        let waiters = &mut self.entries[id as usize].waiters;
        let at = waiters.iter().position(|&waiter| waiter == sequence);
        at.map(|at| waiters.remove(at)).is_some()
    }

    pub(crate) fn open_jobs(&self) -> impl Iterator<Item = (u32, &Entry, &Job)> {
        let entries = self.entries.iter().enumerate();
        entries.filter_map(|(id, entry)| Some((id as u32, entry, entry.job.as_ref()?)))
    }
}
