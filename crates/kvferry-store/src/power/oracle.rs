//! What a store must have after a loss of power, or a kill, at a moment of its record.

use super::recorder::{Event, Note};
use super::{content, hash};
use crate::fault_points::Op;
use crate::log::PAGE_BYTES;
use crate::{Key, Namespace};
use rustc_hash::FxHashMap;
use std::path::{Path, PathBuf};

#[derive(Debug, Default)]
pub(super) struct Oracle {
    blocks: FxHashMap<u64, BlockHistory>,
    by_key: FxHashMap<[u64; 2], u64>,
    /// Blocks that are being written, by the step.
    writing: FxHashMap<usize, Vec<Copy>>,
    /// Segments that are being synced, and since when.
    syncing: FxHashMap<usize, (PathBuf, usize)>,
    /// Files that are being synced.
    flushing: FxHashMap<usize, PathBuf>,
    /// Written blocks that no sync covers.
    written: Vec<Copy>,
    now: usize,
}

/// Moments are counts of events.
#[derive(Debug, Default)]
struct BlockHistory {
    /// Puts that stored the block: begin, end and process of each.
    stored: Vec<(usize, usize, usize)>,
    evicted: usize,
    /// Moment at which the write began of the last copy that a sync covers.
    durable: usize,
    /// Moment at which the last put began that a call of `sync` or `close` covers.
    synced: usize,
}

#[derive(Debug)]
struct Copy {
    block: u64,
    path: PathBuf,
    began: usize,
    ended: usize,
}

impl Oracle {
    pub(super) fn new(events: &[Event]) -> Self {
        let mut oracle = Self { now: 1, ..Self::default() };
        let identity = Namespace::new("model").identity();
        for event in events {
            if let Event::Note(Note::Stored { block, .. }) = event {
                let Key(key) = identity.key(&hash(*block)).expect("a hash");
                oracle.by_key.insert(key, *block);
                oracle.blocks.entry(*block).or_default();
            }
        }
        oracle
    }

    /// Ids of all blocks that are ever stored, in order.
    pub(super) fn blocks(&self) -> Vec<u64> {
        let mut blocks: Vec<_> = self.blocks.keys().copied().collect();
        blocks.sort_unstable();
        blocks
    }

    pub(super) fn block_of(&self, key: [u64; 2]) -> Option<u64> {
        self.by_key.get(&key).copied()
    }

    pub(super) fn advance(&mut self, event: &Event) {
        let now = self.now;
        self.now += 1;
        match event {
            Event::Begin(step, Op::Write { path, pieces }) => {
                let blocks = pieces.iter().filter_map(|(_, bytes)| self.block_in(bytes));
                let copy = |block| Copy { block, path: path.clone(), began: now, ended: 0 };
                let copies = blocks.map(copy).collect();
                self.writing.insert(*step, copies);
            }
            Event::Begin(step, Op::Sync(path)) => {
                self.flushing.insert(*step, path.clone());
            }
            Event::Begin(step, Op::SyncSegment(path)) => {
                self.syncing.insert(*step, (path.clone(), now));
            }
            Event::Begin(_, Op::Evicted(_, key)) => {
                if let Some(known) = self.by_key.get(key).and_then(|it| self.blocks.get_mut(it)) {
                    known.evicted = now;
                }
            }
            Event::End(step, is_ok) => {
                let copies = self.writing.remove(step).unwrap_or_default().into_iter();
                self.written.extend(copies.filter(|_| *is_ok).map(|it| Copy { ended: now, ..it }));
                if let Some(path) = self.flushing.remove(step)
                    && !*is_ok
                {
                    // No later sync covers them.
                    self.written.retain(|it| it.path != path);
                }
                if let Some((path, since)) = self.syncing.remove(step)
                    && *is_ok
                {
                    let is_covered = |it: &Copy| it.path == path && it.ended < since;
                    for copy in self.written.extract_if(.., |it| is_covered(it)) {
                        let known = self.blocks.get_mut(&copy.block).expect("known");
                        known.durable = known.durable.max(copy.began);
                    }
                }
            }
            Event::Note(Note::Stored { process, block, began }) => {
                // Moments begin at 1.
                let stored = (*process, *began + 1, now);
                self.blocks.get_mut(block).expect("known").stored.push(stored);
            }
            Event::Note(Note::Synced { process, began }) => {
                for known in self.blocks.values_mut() {
                    let covered =
                        known.stored.iter().filter(|it| it.0 == *process && it.2 <= *began);
                    let last = covered.map(|it| it.1).max().unwrap_or(0);
                    known.synced = known.synced.max(last);
                }
            }
            Event::Begin(..) => {}
        }
    }

    /// All processes are killed, and the files are in a copy of their folder from now on.
    pub(super) fn end_processes(&mut self, copy: &Path) {
        self.writing.clear();
        self.syncing.clear();
        self.flushing.clear();
        let above = |path: &Path| match path.components().rev().nth(2) {
            Some(it) if it.as_os_str() == "disk" => 3,
            _ => 2,
        };
        for written in &mut self.written {
            let below: Vec<_> =
                written.path.components().rev().take(above(&written.path)).collect();
            written.path = copy.join(below.into_iter().rev().collect::<PathBuf>());
        }
    }

    fn block_in(&self, bytes: &[u8]) -> Option<u64> {
        let block = u64::from_le_bytes(bytes.first_chunk().copied()?);
        self.blocks.get(&block)?;
        let content = content(block);
        let pages = content.len().next_multiple_of(PAGE_BYTES);
        (bytes.len() == pages && bytes.starts_with(&content)).then_some(block)
    }

    /// Describes the recorded history of a block.
    pub(super) fn history(&self, block: u64) -> String {
        let written: Vec<_> = self.written.iter().filter(|it| it.block == block).collect();
        format!("{:?}, written and not synced: {written:?}", self.blocks[&block])
    }

    /// Reason why a block must be there after a loss of power; `None` if it need not be.
    pub(super) fn survives_power(&self, block: u64) -> Option<&'static str> {
        let known = &self.blocks[&block];
        if known.synced > known.evicted {
            return Some("a call of `sync` or `close` covers it");
        }
        // A put that began before the block left may have ended after that.
        let is_stored = known.stored.iter().any(|it| it.1 > known.evicted);
        (is_stored && known.durable > known.evicted).then_some("its segment was synced")
    }

    /// Reason why a block must be there after a kill; `None` if it need not be.
    pub(super) fn survives_kill(&self, block: u64) -> Option<&'static str> {
        let known = &self.blocks[&block];
        let is_stored = known.stored.iter().any(|it| it.1 > known.evicted);
        is_stored.then_some("a put of it had returned")
    }
}
