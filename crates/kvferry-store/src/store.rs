//! [`Store`]: blocks of KV on local disks, shared by the processes of a host.

use crate::core::Core;
use crate::disk::Directories;
use crate::error::{Error, Result};
use crate::index::{Entry, Inserted, New, SlotId};
use crate::key::{Identity, Key, Namespace};
use crate::log::{self, Disk, Superblock};
use crate::membership::{Membership, join};
use crate::memory::BlockMemory;
use crate::options::StoreOptions;
use crate::pending::{Pending, Pool};
use crate::policy::{Retention, Then};
use crate::recover;
use crate::stats::{Counters, Stats};
use crate::worker::Worker;
use crate::writer::{Candidate, NotWritten};
use kvferry::Agent;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

/// Threads that read and write in the background, and bytes of puts that may wait for them.
const IO_THREADS: usize = 4;
const WAITING_BYTES: u64 = 256 << 20;
/// Bytes that one thread reads or writes while another computes the sums of as many.
const CHUNK_BYTES: u64 = 2 << 20;

/// A store of KV blocks. Clones are the same store. All methods may be called from any thread.
///
/// A block is found by its [`Namespace`] and its hash. Its bytes come back as they were put, or not at all:
/// every read is compared with the checksum of the put. What a disk does wrong costs hits, and nothing else:
/// such blocks are missed, and counted ([`Store::stats`]).
///
/// Several processes of a host may open the same directories, and see each other's blocks at once. A process
/// that is killed loses what it was writing.
///
/// ```
/// use kvferry::{Access, Agent};
/// use kvferry_store::{BlockMemory, Namespace, Retain, Store, StoreOptions};
///
/// # let folder = std::env::temp_dir().join(format!("kvferry-store-doc-{}", std::process::id()));
/// let agent = Agent::builder().name("offload").start()?;
/// let pool = agent.allocate(1 << 20, Access::NONE)?;
/// let store = Store::open(&agent, &StoreOptions::new(&folder, 64 << 20))?;
/// let kv = store.space(&Namespace::new("llama-3.1-8b@0e9e39f").shard(0, 1));
///
/// // The blocks of a prompt, by the engine's hashes.
/// let prompt = [[1u8; 32], [2; 32], [3; 32]];
/// let memory = |block: u64| BlockMemory::new(&pool, block * 65_536, 65_536);
/// let put = kv.put(&prompt, 0, &[memory(0), memory(1)], Retain::default())?;
/// assert_eq!(put.stored, 2);
///
/// // A later request begins as this one did.
/// assert_eq!(kv.lookup(&prompt)?, 2);
/// assert_eq!(kv.get(&prompt, 0, &[memory(8), memory(9), memory(10)])?, 2);
/// store.close();
/// # std::fs::remove_dir_all(&folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Store(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    core: Arc<Core>,
    worker: Arc<Worker>,
    membership: Membership,
    pool: Pool,
    /// For parts of calls; these have no parts themselves.
    parts: Pool,
    capacity: u64,
    is_closed: AtomicBool,
    /// Held, shared, by each call that reads or writes, and alone by `close`: what such a call wrote after another
    /// process had opened the store again could be in that process's way.
    calls: RwLock<()>,
    forks: u32,
}

impl Store {
    /// Opens the store in the directories of `options`, or makes it. Blocks until it is read from the disk,
    /// if this is the first process that opens it.
    ///
    /// The memory of blocks must be of regions of `agent`.
    ///
    /// # Errors
    /// `InvalidArgument`; `Directory`, `Format` and `Busy`; `Agent` if the agent was shut down.
    pub fn open(agent: &Agent, options: &StoreOptions) -> Result<Self> {
        for path in &options.directories {
            let failed = |source| Error::Directory { path: path.clone(), source };
            std::fs::create_dir_all(path).map_err(failed)?;
        }
        let first = &options.directories[0];
        let disk = |superblock: &Superblock| {
            let bytes = superblock.geometry.segment_bytes();
            Directories::new(agent, &options.directories, bytes, options.direct)
        };
        let (superblock, joined) = join(
            first,
            || open_superblock(first, options),
            |superblock| {
                let geometry = options.geometry(Some(superblock.geometry.segment_bytes()))?;
                recover::fill(&disk(superblock)?, superblock, geometry)
            },
        )?;
        let failed = |source| Error::Directory { path: first.clone(), source };
        let member = joined.index.join().map_err(failed)?;
        let core = Arc::new(Core::new(disk(&superblock)?, superblock, member));
        let worker = Worker::start(Arc::clone(&core)).map_err(failed)?;
        let membership = Membership::start(joined, Arc::clone(&worker))
            .inspect_err(|_| worker.stop())
            .map_err(failed)?;
        let inner = Inner {
            core,
            worker,
            membership,
            pool: Pool::new(IO_THREADS, WAITING_BYTES),
            parts: Pool::new(IO_THREADS, u64::MAX),
            capacity: options.capacity,
            is_closed: AtomicBool::new(false),
            calls: RwLock::new(()),
            forks: kvferry_sys::fd::forks(),
        };
        Ok(Self(Arc::new(inner)))
    }

    /// The blocks of a namespace.
    pub fn space(&self, namespace: &Namespace) -> Space {
        Space { store: Arc::clone(&self.0), identity: namespace.identity() }
    }

    /// Returns when the blocks that this process has put before would survive a loss of power. Without it,
    /// that is so once their segment is full, or the store is closed; a process that is killed loses no
    /// block that was put.
    ///
    /// # Errors
    /// `Closed`; `Directory` with the error of a device.
    pub fn sync(&self) -> Result<()> {
        let _call = self.0.enter()?;
        let path = self.0.core.disk.path_of(0);
        self.0.worker.writer.sync(&self.0.core).map_err(|source| Error::Directory { path, source })
    }

    /// What this process has done, and what the store holds.
    pub fn stats(&self) -> Stats {
        let core = &self.0.core;
        Stats {
            blocks: core.member.live(),
            disk_bytes: core.disk.bytes(),
            capacity_bytes: self.0.capacity,
            processes: core.member.members().count() as u64,
            is_keeper: u64::from(self.0.membership.is_keeper()),
            ..core.counters.read()
        }
    }

    /// Carries out what waits in the background, and seals what this process has written. Later calls fail with
    /// `Closed`. Idempotent; the last clone that is dropped closes the store, too.
    pub fn close(&self) {
        self.0.close();
    }
}

/// The superblock of a directory's store, which is made if there is none.
fn open_superblock(directory: &Path, options: &StoreOptions) -> Result<Superblock> {
    let path = || directory.to_path_buf();
    let format = |e: log::Error| match e {
        log::Error::Directory { source, .. } => Error::Directory { path: path(), source },
        other => Error::Format { path: path(), what: other.to_string() },
    };
    if let Some(found) = Superblock::open(directory).map_err(format)? {
        return Ok(found);
    }
    let bytes = options.geometry(None)?.segment_bytes;
    let new = Superblock {
        store: kvferry_sys::random::bytes()
            .map_err(|source| Error::Directory { path: path(), source })?,
        geometry: log::Geometry::new(bytes).expect("`StoreOptions::geometry` keeps the bounds"),
        created_ms: crate::clock::Clock::unix_ms(),
    };
    new.write(directory).map_err(format)?;
    Ok(new)
}

impl Inner {
    fn check(&self) -> Result<()> {
        let is_closed = self.is_closed.load(Ordering::Acquire);
        if is_closed || kvferry_sys::fd::forked_since(self.forks) {
            return Err(Error::Closed);
        }
        Ok(())
    }

    /// Begins a call, during which the store is not closed.
    fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        self.check()?;
        let call = self.calls.read().unwrap_or_else(PoisonError::into_inner);
        self.check()?;
        Ok(call)
    }

    fn close(&self) {
        if kvferry_sys::fd::forked_since(self.forks) {
            return;
        }
        // First, so that what waits is carried out, and does not find the store closed.
        self.pool.close();
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Calls that began before end; none begins.
        drop(self.calls.write());
        self.parts.close();
        self.worker.stop();
        self.membership.stop();
    }

    /// Carries out a part of a call on another thread.
    fn beside<T: Send + Sync + 'static>(
        &self,
        part: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<Pending<T>> {
        let (pending, promise) = Pending::new();
        self.parts.submit(0, false, Box::new(move || promise.finish(part())))?;
        Ok(pending)
    }

    /// Has the keeper look at what it must do.
    fn wake_keeper(&self) {
        if self.membership.is_keeper() {
            self.worker.wake();
        } else {
            self.membership.wake_keeper();
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

/// How long blocks are to stay: what TensorRT-LLM's `KvCacheRetentionConfig` says of a range of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retain {
    /// 0 to 100; blocks of a lower priority leave first. 35 by default.
    pub priority: u8,
    /// When it ends, after the put; rounded up to 16 seconds. `None`: never.
    pub duration: Option<Duration>,
    /// What blocks are when it has ended.
    pub then: Then,
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

/// What became of the blocks of a put. They add up to the blocks that were given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Put {
    /// Stored now.
    pub stored: usize,
    /// Not stored, because they were there.
    pub present: usize,
    /// Not stored, because no space was free.
    pub refused: usize,
    /// Not stored, because of a device's error.
    pub failed: usize,
}

impl Put {
    fn add(&mut self, other: Self) {
        self.stored += other.stored;
        self.present += other.present;
        self.refused += other.refused;
        self.failed += other.failed;
    }
}

/// The blocks of one namespace of a store. Clones are the same.
///
/// A prompt is given by the hashes of its blocks, the first block first. Hashes have 16 to 64 bytes.
#[derive(Clone, Debug)]
pub struct Space {
    store: Arc<Inner>,
    identity: Identity,
}

/// How a read of a block ended.
enum Read {
    Right,
    /// The block was moved: it may be right at its new place.
    Moved(Entry),
    Wrong,
}

impl Space {
    /// How many blocks of a prompt, from its beginning, are in the store. This is no use of them: call
    /// [`Space::touch`] where they are not read because the engine has them.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a hash that is too short or too long.
    pub fn lookup<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<usize> {
        let _call = self.store.enter()?;
        Ok(self.find(&self.keys(prompt)?).len())
    }

    /// Counts as a use of the blocks of a prompt that are in the store. Returns how many.
    ///
    /// # Errors
    /// As [`Space::lookup`].
    pub fn touch<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<usize> {
        let _call = self.store.enter()?;
        let found = self.find(&self.keys(prompt)?);
        self.note_use(&found, prompt.len() - found.len());
        Ok(found.len())
    }

    /// Reads blocks of a prompt into memory: those from the `first` on, one for each memory. Returns how many
    /// were read, one after another from the first: 0 if a block before is missing. Memory behind these may
    /// have been written, with anything. Blocks the thread until then.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`; `Agent` for memory that is not registered.
    pub fn get<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
    ) -> Result<usize> {
        let _call = self.store.enter()?;
        check_range(prompt.len(), first, memory)?;
        let found = self.find(&self.keys(prompt)?);
        self.note_use(&found, prompt.len() - found.len());
        let counters = &self.store.core.counters;
        Counters::add(&counters.asked, memory.len());
        let entries = found.get(first..).unwrap_or_default();
        let wanted: Vec<_> = entries
            .iter()
            .zip(memory)
            .take_while(|(entry, memory)| u64::from(entry.len) == memory.len())
            .collect();
        let checks = prompt[first..].iter().map(|hash| self.identity.check(hash.as_ref()));
        let read = self.read(&wanted, checks)?;
        let bytes: u64 = memory[..read].iter().map(BlockMemory::len).sum();
        Counters::add(&counters.hits, read);
        counters.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        Ok(read)
    }

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
        let keys = self.keys(&prompt[first.saturating_sub(1)..first + memory.len()])?;
        let (before, keys) = keys.split_at(first.min(1));
        let retention = retain.retention(core.clock.now_ms());
        let mut put = Put::default();
        let mut parent = before.first().and_then(|key| core.member.find(key)).map(|it| it.slot);
        let mut absent = Vec::new();
        for (at, (key, memory)) in keys.iter().zip(memory).enumerate() {
            match core.member.find(key) {
                Some(there) => {
                    put.present += 1;
                    if absent.is_empty() {
                        parent = Some(there.slot);
                    }
                }
                None => absent.push((first + at, memory)),
            }
        }
        // While some blocks are written, the sums of the next ones are computed.
        let mut under_way: Option<Pending<(Put, Option<SlotId>)>> = None;
        let mut rest =
            chunks(&absent, |(_, memory)| u32::try_from(memory.len()).unwrap_or(u32::MAX));
        let mut outcome = Ok(());
        let mut chunk = rest.next();
        while let Some(now) = chunk {
            chunk = rest.next();
            let new = now
                .iter()
                .map(|(at, memory)| self.candidate(prompt, *at, memory, retention))
                .collect::<Result<Vec<_>>>();
            if let Some(earlier) = under_way.take() {
                let (some, last) = ended(earlier)?;
                put.add(some);
                parent = last;
            }
            match (new, chunk) {
                (Ok(new), Some(_)) => {
                    let (space, parent) = (self.clone(), parent);
                    let write = move || Ok(space.write(&new, parent));
                    under_way = Some(self.store.beside(write)?);
                }
                (Ok(new), None) => put.add(self.write(&new, parent).0),
                (Err(e), _) => {
                    outcome = Err(e);
                    break;
                }
            }
        }
        Counters::add(&core.counters.stored, put.stored);
        Counters::add(&core.counters.present, put.present);
        Counters::add(&core.counters.refused, put.refused);
        Counters::add(&core.counters.failed, put.failed);
        outcome.map(|()| put)
    }

    fn candidate<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        at: usize,
        memory: &BlockMemory,
        retention: Retention,
    ) -> Result<Candidate> {
        let hash = prompt[at].as_ref();
        let before = at.checked_sub(1).map(|before| self.identity.key(prompt[before].as_ref()));
        let check = self.identity.check(hash);
        let block = log::Block {
            key: self.identity.key(hash)?.0,
            parent: before.transpose()?.map(|key| key.0),
            sum: memory.sum()? ^ check,
            check,
            namespace: self.identity.id,
            len: memory.checked_len()?,
            retention: retention.to_bits(),
            time: self.store.core.clock.now_s(),
        };
        Ok(Candidate { block, memory: memory.clone() })
    }

    /// As [`Space::get`], in the background. The memory belongs to the store until the operation has ended.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`. All others are the operation's outcome.
    pub fn get_async<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
    ) -> Result<Pending<usize>> {
        check_range(prompt.len(), first, memory)?;
        let (pending, promise) = Pending::new();
        let (space, prompt, memory) = (self.clone(), own(prompt), memory.to_vec());
        let task = move || promise.finish(space.get(&prompt, first, &memory));
        self.store.check()?;
        self.store.pool.submit(0, false, Box::new(task))?;
        Ok(pending)
    }

    /// As [`Space::put`], in the background. The memory belongs to the store until the operation has ended.
    /// Where 256 MiB wait to be written, it ends at once, and all blocks are refused.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`. All others are the operation's outcome.
    pub fn put_async<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retain: Retain,
    ) -> Result<Pending<Put>> {
        check_range(prompt.len(), first, memory)?;
        let (pending, promise) = Pending::new();
        let (space, prompt, memory) = (self.clone(), own(prompt), memory.to_vec());
        let (bytes, count) = (memory.iter().map(BlockMemory::len).sum(), memory.len());
        self.store.check()?;
        let task = move || promise.finish(space.put(&prompt, first, &memory, retain));
        if !self.store.pool.submit(bytes, true, Box::new(task))? {
            Counters::add(&self.store.core.counters.refused, count);
            let (refused, promise) = Pending::new();
            promise.finish(Ok(Put { refused: count, ..Put::default() }));
            return Ok(refused);
        }
        Ok(pending)
    }

    fn keys<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<Vec<Key>> {
        prompt.iter().map(|hash| self.identity.key(hash.as_ref())).collect()
    }

    /// The blocks of the longest prefix that is there.
    fn find(&self, keys: &[Key]) -> Vec<Entry> {
        let mut found = Vec::with_capacity(keys.len());
        self.store.core.member.find_prefix(keys, &mut found);
        found
    }

    fn note_use(&self, found: &[Entry], missing: usize) {
        let core = &self.store.core;
        let now = core.clock.now_s();
        for entry in found {
            core.member.touch(entry, now);
        }
        let slots: Vec<_> = found.iter().map(|entry| entry.slot).collect();
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        if core.member.note_used(core.clock.now_ms(), missing, &slots) {
            self.store.wake_keeper();
        }
    }

    /// Reads blocks; returns how many, from the first, were right. While the sums of some are computed, the
    /// next ones are read.
    fn read(
        &self,
        wanted: &[(&Entry, &BlockMemory)],
        checks: impl Iterator<Item = u64>,
    ) -> Result<usize> {
        let mut checks = checks;
        let mut right = 0;
        let mut rest = chunks(wanted, |(entry, _)| entry.len);
        let mut chunk = rest.next();
        let mut under_way = None;
        while let Some(now) = chunk {
            let is_read = match under_way.take() {
                Some(earlier) => ended(earlier)?,
                None => self.store.core.disk.read_blocks(&self.places(now)).is_ok(),
            };
            chunk = rest.next();
            if let Some(next) = chunk {
                let (core, places) = (Arc::clone(&self.store.core), self.places(next));
                let read = move || Ok(core.disk.read_blocks(&places).is_ok());
                under_way = Some(self.store.beside(read)?);
            }
            let count = self.judge_all(now, &mut checks, is_read);
            right += count.as_ref().map_or(0, |count| *count);
            if !count.as_ref().is_ok_and(|count| *count == now.len()) {
                // The memory is the caller's again when this returns.
                under_way.map_or(Ok(true), ended)?;
                return count.map(|_| right);
            }
        }
        Ok(right)
    }

    /// How many of the blocks that were read are right, from the first.
    fn judge_all(
        &self,
        wanted: &[(&Entry, &BlockMemory)],
        checks: &mut impl Iterator<Item = u64>,
        is_read: bool,
    ) -> Result<usize> {
        for (at, ((entry, memory), check)) in wanted.iter().zip(checks).enumerate() {
            let mut read = match is_read {
                true => self.judge(entry, memory, check)?,
                // One by one, to find what can be read.
                false => self.read_one(entry, memory, check)?,
            };
            if let Read::Moved(moved) = read {
                read = self.read_one(&moved, memory, check)?;
            }
            match read {
                Read::Right => {}
                Read::Moved(_) | Read::Wrong => return Ok(at),
            }
        }
        Ok(wanted.len())
    }

    fn places(&self, wanted: &[(&Entry, &BlockMemory)]) -> Vec<(u32, u64, BlockMemory)> {
        wanted.iter().map(|(entry, memory)| self.place(entry, memory)).collect()
    }

    fn place(&self, entry: &Entry, memory: &BlockMemory) -> (u32, u64, BlockMemory) {
        let (segment, page) = self.store.core.superblock.geometry.locate(entry.page);
        (segment, log::format::bytes_of(page), memory.clone())
    }

    fn read_one(&self, entry: &Entry, memory: &BlockMemory, check: u64) -> Result<Read> {
        let core = &self.store.core;
        let place = self.place(entry, memory);
        let (segment, at, _) = place;
        match core.disk.read_blocks(&[place]) {
            Ok(()) => self.judge(entry, memory, check),
            Err(e) => {
                // Memory that is not registered is the caller's fault, and this says so.
                memory.sum()?;
                core.fault("read", segment, &e);
                Counters::add(&core.counters.failed, 1);
                // It leaves, so that it can be put again.
                if core.disk.is_lost(segment, at, entry.len) && core.member.remove(entry) {
                    core.member.note_removed(entry.slot);
                }
                Ok(Read::Wrong)
            }
        }
    }

    /// Compares what was read with the sum. A block that is damaged leaves the store.
    fn judge(&self, entry: &Entry, memory: &BlockMemory, check: u64) -> Result<Read> {
        let core = &self.store.core;
        if memory.sum()? ^ check == entry.sum {
            return Ok(Read::Right);
        }
        match core.member.find(&entry.key) {
            Some(now) if now != *entry && now.page != entry.page && now.len == entry.len => {
                Ok(Read::Moved(now))
            }
            Some(now) if now.page == entry.page && now.slot == entry.slot => {
                let (segment, _) = core.superblock.geometry.locate(entry.page);
                if core.member.remove(&now) {
                    core.fault("verify a block of", segment, &"its bytes are not what was put");
                    Counters::add(&core.counters.corrupt, 1);
                    core.member.note_removed(entry.slot);
                }
                Ok(Read::Wrong)
            }
            _ => Ok(Read::Wrong),
        }
    }

    /// Writes blocks and puts them into the index. Returns the slot of the last one, too.
    fn write(&self, new: &[Candidate], parent: Option<SlotId>) -> (Put, Option<SlotId>) {
        let core = &self.store.core;
        let mut put = Put::default();
        let (mut parent, mut rest) = (parent, new);
        while !rest.is_empty() {
            let (count, done) = self.store.worker.writer.write(core, rest, |segment, records| {
                parent = self.publish(segment, records, parent, &mut put);
            });
            match done {
                Ok(()) => {}
                Err(NotWritten::Full) => {
                    put.refused += count;
                    self.store.wake_keeper();
                }
                Err(NotWritten::Failed) => put.failed += count,
            }
            rest = &rest[count..];
        }
        if self.store.worker.writer.has_full() {
            self.store.worker.wake();
            self.store.wake_keeper();
        }
        (put, parent)
    }

    /// Puts written blocks into the index. Returns the slot of the last one.
    fn publish(
        &self,
        segment: u32,
        records: &[log::Record],
        parent: Option<SlotId>,
        put: &mut Put,
    ) -> Option<SlotId> {
        let core = &self.store.core;
        let (mut before, mut slots) = (parent, Vec::with_capacity(records.len()));
        for record in records {
            let block = &record.block;
            let new = New {
                sum: block.sum,
                parent: before,
                page: core.superblock.geometry.place(segment, record.page),
                len: block.len,
                retention: block.retention,
                now: block.time,
            };
            match core.member.insert(Key(block.key), new) {
                Inserted::New(slot) => {
                    put.stored += 1;
                    core.counters.bytes_written.fetch_add(block.len.into(), Ordering::Relaxed);
                    slots.push(slot);
                    before = Some(slot);
                }
                Inserted::Exists(entry) => {
                    put.present += 1;
                    before = Some(entry.slot);
                }
                Inserted::Full => {
                    put.refused += 1;
                    self.store.wake_keeper();
                }
                Inserted::Contended => put.refused += 1,
            }
        }
        if !slots.is_empty() && core.member.note_added(core.clock.now_ms(), parent, &slots) {
            self.store.wake_keeper();
        }
        before
    }
}

/// Cuts blocks into parts of [`CHUNK_BYTES`], which are worth a thread of their own.
fn chunks<T>(blocks: &[T], len: impl Fn(&T) -> u32) -> impl Iterator<Item = &[T]> {
    let mut rest = blocks;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let is_more = |block: &&T| {
            let is_more = bytes < CHUNK_BYTES;
            bytes += u64::from(len(block));
            is_more
        };
        let count = rest.iter().take_while(is_more).count();
        let (chunk, others) = rest.split_at(count);
        rest = others;
        (count > 0).then_some(chunk)
    })
}

/// The outcome of an operation of [`Inner::beside`].
fn ended<T: Clone>(operation: Pending<T>) -> Result<T> {
    let outcome = operation.wait(None).ok_or(Error::Closed)?;
    drop(operation);
    match Arc::try_unwrap(outcome) {
        Ok(outcome) => outcome,
        Err(shared) => shared.as_ref().as_ref().cloned().map_err(|_| Error::Closed),
    }
}

fn own<H: AsRef<[u8]>>(prompt: &[H]) -> Vec<Vec<u8>> {
    prompt.iter().map(|hash| hash.as_ref().to_vec()).collect()
}

fn check_range(prompt: usize, first: usize, memory: &[BlockMemory]) -> Result<()> {
    if first.checked_add(memory.len()).is_none_or(|end| end > prompt) {
        return Err(Error::InvalidArgument(format!(
            "memory for {} blocks from number {first} on, but the prompt has {prompt}",
            memory.len()
        )));
    }
    memory.iter().try_for_each(|memory| memory.checked_len().map(|_| ()))
}
