//! A store of real segments that a trace drives, for what a full store costs in hits: `kvferry bench store --trace`.
//!
//! It has the index, the writer and the keeper of [`Store`](crate::Store), and none of its threads: the keeper frees
//! space where a put finds none, and the time is the trace's. So a replay has the same hits each time. Blocks are short,
//! and segments have the length that they have by default: 1 MiB at least.

use crate::core::Core;
use crate::error::{Error, Result};
use crate::gc::keeper::{Keeper, Replayed};
use crate::gc::sealing::SealScope;
use crate::index::{Inserted, New};
use crate::key::Key;
use crate::log::Block;
use crate::memory::BlockMemory;
use crate::opening::Opening;
use crate::opening::recover;
use crate::options::StoreOptions;
use crate::policy;
use crate::writer::{Candidate, NotWritten, Writer};
use kvferry::{Access, Agent};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

/// Bytes of a block: long enough that the pages which the log adds are few.
const BLOCK_BYTES: u32 = 16 << 10;
const MIB: u64 = 1 << 20;
/// Calls of the keeper until a put gives up.
const TRIES: usize = 64;

pub use crate::gc::keeper::Press;

/// A store without threads.
#[derive(Debug)]
pub struct Replay {
    core: Arc<Core>,
    writer: Writer,
    keeper: Keeper,
    press: Press,
    memory: BlockMemory,
    sum: u64,
    /// Blocks that found no space.
    refused: u64,
    agent: Agent,
}

impl Replay {
    /// Makes a store of `blocks` blocks in a directory.
    ///
    /// # Errors
    /// As [`Store::open`](crate::Store::open).
    pub fn new(directory: &Path, blocks: u64, press: Press) -> Result<Self> {
        let agent = Agent::builder().start().map_err(Error::from)?;
        let bytes = blocks * u64::from(BLOCK_BYTES);
        let options = StoreOptions::new(directory, bytes + MIB)
            .blocks_max(u32::try_from(2 * blocks).unwrap_or(u32::MAX));
        let opening = Opening::new(&agent, &options)?;
        let superblock = opening.open_superblock()?;
        let disk = opening.disk(&superblock, true)?;
        let failed = |source| Error::Directory { path: directory.to_path_buf(), source };
        let index = recover::fill(&disk, &superblock, options.geometry(None)?)?;
        let member = index.join().map_err(failed)?;
        let core = Arc::new(Core::new(disk, superblock, member));
        let region = agent.allocate(BLOCK_BYTES as usize, Access::NONE).map_err(Error::from)?;
        let memory = BlockMemory::new(&region, 0, BLOCK_BYTES.into());
        let sum = memory.sum()?;
        let mut keeper = Keeper::new(Arc::clone(&core));
        keeper.replay(Replayed { now_ms: 0, press });
        let writer = Writer::default();
        Ok(Self { core, writer, keeper, press, memory, sum, refused: 0, agent })
    }

    /// A request at `now_ms` uses the blocks of `chain`, the first of its prompt first, and stores those that are
    /// missing. Returns how many, from the beginning, were stored before.
    pub fn request(&mut self, now_ms: u64, chain: &[policy::Key]) -> usize {
        let core = Arc::clone(&self.core);
        let keys: Vec<_> = chain.iter().map(|key| Key([*key, *key])).collect();
        self.keeper.replay(Replayed { now_ms, press: self.press });
        let mut found = Vec::new();
        core.member.find_prefix(&keys, &mut found);
        let slots: Vec<_> = found.iter().map(|it| it.slot).collect();
        let missing = u32::try_from(chain.len() - slots.len()).unwrap_or(u32::MAX);
        core.member.note_used(now_ms, missing, &slots);
        let before = slots.last().copied();
        let mut parent = before;
        // What is behind a missing block may be there.
        let is_new = |key: &&Key| core.member.find(key).is_none();
        let new: Vec<_> = keys[slots.len()..].iter().filter(is_new).collect();
        let candidates: Vec<_> = new.iter().map(|key| self.candidate(**key)).collect();
        let mut rest = candidates.as_slice();
        while !rest.is_empty() {
            let Some(begun) = self.begin(rest) else {
                self.refused += rest.len() as u64;
                break;
            };
            let count = begun.count();
            let (mut added, first_parent) = (Vec::new(), parent);
            let _ = begun.end(&core, |segment, records| {
                for record in records {
                    let new = New {
                        sum: record.block.sum,
                        parent,
                        page: core.superblock.geometry.place(segment, record.page),
                        len: record.block.len,
                        retention: record.block.retention,
                        now: u32::try_from(now_ms / 1000).unwrap_or(u32::MAX),
                    };
                    if let Inserted::New(slot) = core.member.insert(Key(record.block.key), new) {
                        added.push(slot);
                        parent = Some(slot);
                    }
                }
            });
            core.counters.bytes_written.fetch_add(count as u64 * u64::from(BLOCK_BYTES), Relaxed);
            core.member.note_added(now_ms, first_parent, &added);
            rest = &rest[count..];
        }
        if new.len() + slots.len() < keys.len() {
            let there = |key: &Key| core.member.find(key).map(|it| it.slot);
            let behind: Vec<_> = keys[slots.len()..].iter().map_while(there).collect();
            core.member.note_added(now_ms, before, &behind);
        }
        found.len()
    }

    fn begin(&mut self, blocks: &[Candidate]) -> Option<crate::writer::BlocksUnderWay> {
        for _ in 0..TRIES {
            match self.writer.begin(&self.core, blocks) {
                Ok(begun) => return Some(begun),
                Err(NotWritten::Full) => {
                    self.writer.seal(&self.core, SealScope::Full);
                    self.keeper.run_until_idle();
                }
                Err(NotWritten::Failed | NotWritten::Hangs) => return None,
            }
        }
        None
    }

    fn candidate(&self, key: Key) -> Candidate {
        let block = Block {
            key: key.0,
            parent: None,
            sum: self.sum,
            check: 0,
            namespace: 0,
            len: BLOCK_BYTES,
            retention: policy::Retention::DEFAULT.to_bits(),
            time: 0,
        };
        Candidate { block, memory: self.memory.clone() }
    }

    /// Bytes that the keeper has copied, for each byte that was put.
    pub fn copied(&self) -> f64 {
        let stats = self.core.counters.read();
        stats.bytes_collected as f64 / (stats.bytes_written as f64).max(1.0)
    }

    /// Blocks that found no space.
    pub fn refused(&self) -> u64 {
        self.refused
    }
}

impl Drop for Replay {
    fn drop(&mut self) {
        self.keeper.stop();
        self.writer.seal(&self.core, SealScope::All);
        self.agent.shutdown();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::Keyed;

    const BLOCKS: u64 = 4096;
    /// Hits in points of the blocks that were asked for.
    const LESS_AT_MOST: f64 = 2.0;

    /// Conversations of several turns, each of which has the prompt before it and more, and prompts that come once.
    fn requests() -> Vec<(u64, Vec<u64>)> {
        let mut rng = fastrand::Rng::with_seed(7);
        let (mut requests, mut next, mut conversations) = (Vec::new(), 1_u64 << 32, Vec::new());
        for at in 0..4000_u64 {
            let is_new = conversations.is_empty() || rng.f64() < 0.5;
            let index = match is_new {
                true => {
                    // One of few system prompts.
                    let system = rng.u64(..8) * 1000;
                    conversations.push((system..system + 6).collect::<Vec<u64>>());
                    conversations.len() - 1
                }
                false => conversations.len() - 1 - rng.usize(..conversations.len().min(60)),
            };
            let more = rng.u64(4..24);
            conversations[index].extend(next..next + more);
            next += more;
            requests.push((at * 900, conversations[index].clone()));
        }
        requests
    }

    #[test]
    fn puts_that_wait_all_the_time_cost_few_hits_and_little_copying() {
        let requests = requests();
        let asked: usize = requests.iter().map(|(_, chain)| chain.len()).sum();
        let longest = requests.iter().map(|(_, chain)| chain.len()).max().expect("some");
        let (mut exact, mut left) = (Keyed::new(BLOCKS as usize, longest), Vec::new());
        let exact: usize =
            requests.iter().map(|(at, chain)| exact.request(*at, chain, &mut left)).sum();
        let name = format!("kvferry-replay-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        let mut replay = Replay::new(&folder, BLOCKS, Press::Always).expect("a store");
        let hits: usize = requests.iter().map(|(at, chain)| replay.request(*at, chain)).sum();
        let [exact, hits] = [exact, hits].map(|it| 100.0 * it as f64 / asked as f64);
        let copied = replay.copied();
        println!("{exact:.2} %, in segments {hits:.2} %, {copied:.2} bytes copied for each");
        assert_eq!(replay.refused(), 0);
        assert!(hits >= exact - LESS_AT_MOST, "{hits} instead of {exact} %");
        assert!(copied < 1.0, "{copied}");
        drop(replay);
        let _ = std::fs::remove_dir_all(&folder);
    }
}
