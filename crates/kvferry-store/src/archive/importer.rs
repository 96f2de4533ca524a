//! Puts the blocks of a stream into a store.

use super::format::Record;
use super::reader::{Reader, StreamItem};
use crate::error::{Error, Result};
use crate::log::Block;
use crate::memory::BlockMemory;
use crate::policy::{OnExpiry, Retention};
use crate::store::Store;
use crate::writer::Candidate;
use kvferry::{Access, Agent, Region};
use std::io::Read;
use std::time::{Duration, Instant};

/// Memory for blocks that are written at once.
const MEMORY_BYTES: usize = 16 << 20;
/// Longest time that a block waits for space.
const SPACE_TIMEOUT: Duration = Duration::from_secs(10);
const SPACE_EVERY: Duration = Duration::from_millis(2);

/// Counts and result of an import.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// Stored now.
    pub stored: u64,
    /// Bytes of records that were right.
    pub bytes: u64,
    /// Not stored, because they were there.
    pub present: u64,
    /// Not stored, because no space was free, or a segment has no room for a block of this length.
    pub refused: u64,
    /// Not stored, because of a device's error.
    pub failed: u64,
    /// Not stored, because their retention has ended.
    pub expired: u64,
    /// Not stored, because they are of another namespace than the one that was asked for.
    pub others: u64,
    /// Places of the stream where something is not as it was exported.
    pub damaged: u64,
    /// Records that the stream should have and that were not right.
    pub missing: u64,
    /// The stream was cut: it has no end.
    pub is_cut: bool,
    /// The error that ended reading before the end of the stream.
    pub read_error: Option<String>,
    /// Bytes of the stream that were read.
    pub read_bytes: u64,
}

impl Imported {
    /// Whether all of the stream was right.
    pub fn is_whole(&self) -> bool {
        let Self { damaged, missing, is_cut, read_error, .. } = self;
        *damaged == 0 && *missing == 0 && !is_cut && read_error.is_none()
    }
}

/// Puts the blocks of an exported stream, or those of one namespace, into a store, and tells `progress` so far.
/// Blocks that are there are not written again. Other processes may use the store meanwhile.
///
/// Each block is compared with its sum. What is damaged is skipped: all records that are right are imported.
///
/// # Errors
/// `InvalidArgument` if `from` is not an exported stream, or a later release's; `Closed`; `Agent`.
pub fn import(
    agent: &Agent,
    store: &Store,
    namespace: Option<u64>,
    from: impl Read,
    mut progress: impl FnMut(&Imported),
) -> Result<Imported> {
    let mut reader = Reader::new(from);
    let memory = agent.allocate(MEMORY_BYTES, Access::NONE)?;
    let mut run =
        Run { agent, store, memory, used: 0, chain: Vec::new(), done: Imported::default() };
    loop {
        match reader.next() {
            Ok(Some(StreamItem::Record(record, data))) => {
                if namespace.is_some_and(|it| it != record.block.namespace) {
                    run.done.others += 1;
                } else {
                    run.add(&record, &data)?;
                }
            }
            Ok(Some(StreamItem::Damage)) => run.done.damaged += 1,
            Ok(Some(StreamItem::Newer(version))) => {
                run.flush()?;
                return Err(Error::InvalidArgument(format!(
                    "the export has format {version}, which a later release wrote; import it with that \
                     release"
                )));
            }
            Ok(None) => break,
            Err(error) => {
                run.done.read_error = Some(error.to_string());
                break;
            }
        }
        run.done.read_bytes = reader.consumed();
        progress(&run.done);
    }
    run.flush()?;
    if !reader.is_stream() && run.done.read_error.is_none() {
        let what = "this is not a kvferry export, or nothing of it is right";
        return Err(Error::InvalidArgument(what.into()));
    }
    run.done.missing = reader.missing();
    run.done.is_cut = !reader.has_end();
    run.done.read_bytes = reader.consumed();
    Ok(run.done)
}

struct Run<'a> {
    agent: &'a Agent,
    store: &'a Store,
    memory: Region,
    /// Bytes of the memory that the chain takes.
    used: usize,
    /// Blocks that are not there, each the parent of the next.
    chain: Vec<Candidate>,
    done: Imported,
}

impl Run<'_> {
    fn add(&mut self, record: &Record, data: &[u8]) -> Result<()> {
        self.done.bytes += data.len() as u64;
        let (created_ms, now_s) = self.store.times();
        let Some(block) = rebased(record, created_ms, now_s) else {
            self.done.expired += 1;
            return Ok(());
        };
        let follows = self.chain.last().is_some_and(|last| block.parent == Some(last.block.key));
        if !follows || self.used + data.len() > self.memory.len() {
            self.flush()?;
        }
        if self.store.has(&block)? {
            self.done.present += 1;
            return Ok(());
        }
        if block.len > self.store.max_block_bytes() {
            self.done.refused += 1;
            return Ok(());
        }
        if data.len() > self.memory.len() {
            self.memory = self.agent.allocate(data.len(), Access::NONE)?;
        }
        self.memory.write_at(self.used, data)?;
        let memory = BlockMemory::new(&self.memory, self.used as u64, data.len() as u64);
        self.used += data.len();
        self.chain.push(Candidate { block, memory });
        Ok(())
    }

    /// Writes what was added.
    fn flush(&mut self) -> Result<()> {
        self.used = 0;
        let chain = std::mem::take(&mut self.chain);
        let mut refused = self.put(&chain)?;
        let began = Instant::now();
        while refused > 0 && began.elapsed() < SPACE_TIMEOUT {
            // Space is being freed.
            std::thread::sleep(SPACE_EVERY);
            refused = 0;
            for one in chain.chunks(1) {
                if !self.store.has(&one[0].block)? {
                    refused += self.put(one)?;
                }
            }
        }
        self.done.refused += refused;
        Ok(())
    }

    /// Writes blocks, each the parent of the next. Returns how many were refused.
    fn put(&mut self, chain: &[Candidate]) -> Result<u64> {
        let put = self.store.put_chain(chain)?;
        self.done.stored += put.stored as u64;
        self.done.present += put.present as u64;
        self.done.failed += put.failed as u64;
        Ok(put.refused as u64)
    }
}

/// The block with its times on the clock of a store that was made at `created_ms`. `None` if it was to leave before
/// now.
pub(super) fn rebased(record: &Record, created_ms: u64, now_s: u32) -> Option<Block> {
    let rebase = |seconds: u32| {
        let unix_ms = i128::from(record.created_ms) + i128::from(seconds) * 1000;
        let seconds = (unix_ms - i128::from(created_ms)).max(0) / 1000;
        u32::try_from(seconds).unwrap_or(u32::MAX)
    };
    let mut retention = Retention::from_bits(record.block.retention);
    if let Some(until_s) = retention.until_s {
        let until_s = rebase(until_s);
        retention = match retention.then {
            _ if until_s > now_s => Retention { until_s: Some(until_s), ..retention },
            OnExpiry::Leave => return None,
            OnExpiry::Default => Retention::DEFAULT,
        };
    }
    let time = rebase(record.block.time).min(now_s);
    Some(Block { retention: retention.to_bits(), time, ..record.block })
}
