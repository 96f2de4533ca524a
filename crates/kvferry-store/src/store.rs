//! [`Store`]: blocks of KV on local disks, shared by the processes of a host.

mod prefetch;

use crate::behind::Behind;
use crate::core::Core;
use crate::error::{Error, Result};
use crate::flights::Flights;
use crate::gate::is_hang;
use crate::get::Wanted;
use crate::host::{HOST_BYTES_MIN, Host};
use crate::index::{Entry, Inserted, New, PinId, SlotId};
use crate::key::{Identity, Key, Namespace};
use crate::log;
use crate::membership::{Membership, join};
use crate::memory::BlockMemory;
use crate::objects::Tier;
use crate::opening::Opening;
use crate::options::StoreOptions;
use crate::pending::Pending;
use crate::policy::{Retention, Then};
use crate::put::{Patience, Waits};
use crate::recover;
use crate::stats::{Counters, Stats};
use crate::sync::lock;
use crate::task_pool::{Load, TaskPool, Turn, after};
use crate::team::Team;
use crate::worker::Worker;
use crate::writer::Candidate;
use kvferry::Agent;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLockReadGuard};
use std::time::{Duration, Instant};

/// Threads that read in the background, and as many that write.
const IO_THREADS: usize = 4;
/// Bounds of the puts that wait for these threads, and those beyond which a put is refused whose `wait` is zero. A put
/// that waits holds its caller's memory, and the hashes and places of its blocks.
const PUTS_MAX: Load = Load { bytes: 2 << 30, blocks: 1 << 16 };
const PUTS_MAX_WITHOUT_WAIT: Load = Load { bytes: 256 << 20, ..PUTS_MAX };
/// Blocks of a prompt that are looked for first. Most prompts have none, or many more.
const FIRST_WINDOW: usize = 16;
/// Tries to open a store that other processes make meanwhile, with their directories in another order.
const OVERTAKEN_MAX: u32 = 3;
/// Bytes that one thread reads or writes while another computes the sums of as many.
pub(crate) const CHUNK_BYTES: u64 = 2 << 20;

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
pub struct Store(Arc<Inner>, Arc<Open>);

/// Handle of a user's clones of a store, which the store's own threads do not hold: the last one that is dropped closes
/// the store, and returns when that is done.
#[derive(Debug)]
struct Open(Arc<Inner>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.close();
    }
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) core: Arc<Core>,
    pub(crate) worker: Arc<Worker>,
    membership: Membership,
    pub(crate) objects: Option<Tier>,
    pool: TaskPool,
    /// Tasks of the pool join the loads that are under way in the order in which they wait for it.
    in_order: Mutex<()>,
    pub(crate) host: Option<Arc<Host>>,
    /// Writes what is in host memory.
    pub(crate) behind: Behind,
    pub(crate) waits: Waits,
    pub(crate) put_wait: Duration,
    /// Puts in the background that may wait for their turn or for space, and would keep loads from the threads of `pool`.
    puts: TaskPool,
    flights: Arc<Flights>,
    pub(crate) team: Team,
    capacity: u64,
    /// [`StoreOptions::hang_after`].
    pub(crate) hang_after: Duration,
    is_closed: AtomicBool,
    /// Held by the call that closes the store, until it is closed.
    closing: Mutex<()>,
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
        if (1..HOST_BYTES_MIN).contains(&options.host_bytes) {
            return Err(Error::InvalidArgument(format!(
                "a tier in host memory has {HOST_BYTES_MIN} bytes or more, got {}",
                options.host_bytes
            )));
        }
        if options.hang_after.is_zero() {
            let what = "hang_after is the time that an operation may take: give more than 0";
            return Err(Error::InvalidArgument(what.into()));
        }
        let join = |opening: &Opening<'_>| {
            // What the first process has found out of the directories counts while it has the store open.
            let mut filled = None;
            let joined = join(
                &opening.readable(),
                options.hang_after,
                || opening.open_superblock(),
                |superblock| {
                    let segment_bytes = superblock.geometry.segment_bytes();
                    let geometry = options.geometry(Some(segment_bytes))?;
                    let (asked, most) =
                        (options.capacity, StoreOptions::capacity_max(segment_bytes));
                    if asked > most {
                        tracing::warn!(
                            "the store uses {most} of its capacity of {asked} bytes: it can't have \
                             more, with segments of {segment_bytes} bytes"
                        );
                    }
                    let disk = opening.disk(superblock, true)?;
                    let index = recover::fill(&disk, superblock, geometry)?;
                    // Most of them are not used soon.
                    disk.close_files();
                    filled = Some(disk);
                    Ok(index)
                },
            );
            joined.map(|(superblock, joined)| (superblock, joined, filled))
        };
        let mut opening = Opening::new(agent, options)?;
        let mut joined = join(&opening);
        for _ in 0..OVERTAKEN_MAX {
            // Of several directories, one that hangs is lost in the next try.
            let has_lost = options.directories.len() > 1
                && matches!(&joined, Err(Error::Directory { source, .. }) if is_hang(source));
            if !(opening.is_overtaken() || has_lost) {
                break;
            }
            opening = Opening::new(agent, options)?;
            joined = join(&opening);
        }
        let first = opening.first();
        let (superblock, joined, filled) = joined?;
        let segment_bytes = superblock.geometry.segment_bytes();
        let disk = match filled {
            Some(disk) => disk,
            None => opening.disk(&superblock, false)?,
        };
        disk.share(&joined.index);
        let failed = |source| Error::Directory { path: first.clone(), source };
        // Without it, the statistics begin with 0.
        let _ = disk.count_files();
        let host = match options.host_bytes {
            0 => None,
            bytes => Some(Arc::new(Host::new(agent, bytes)?)),
        };
        let member = joined.index.join().map_err(failed)?;
        let core = Arc::new(Core::new(disk, superblock, member));
        let worker = Worker::start(Arc::clone(&core)).map_err(failed)?;
        let membership = Membership::start(joined, Arc::clone(&worker))
            .inspect_err(|_| worker.stop())
            .map_err(failed)?;
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let started = options.objects.as_ref().map(|tier| Tier::start(tier, &core)).transpose();
        let objects = started
            .inspect_err(|_| {
                worker.stop();
                membership.stop(|| false);
            })
            .map_err(failed)?;
        let inner = Inner {
            core,
            worker,
            membership,
            objects,
            pool: TaskPool::new(IO_THREADS, options.hang_after),
            in_order: Mutex::default(),
            host,
            behind: Behind::default(),
            waits: Waits::default(),
            put_wait: options.put_wait,
            puts: TaskPool::new(IO_THREADS, options.hang_after),
            team: Team::new(cores.min(IO_THREADS), options.hang_after),
            flights: Arc::default(),
            capacity: options.capacity.min(StoreOptions::capacity_max(segment_bytes)),
            hang_after: options.hang_after,
            is_closed: AtomicBool::new(false),
            closing: Mutex::default(),
            forks: kvferry_sys::fd::forks(),
        };
        let inner = Arc::new(inner);
        let open = Arc::new(Open(Arc::clone(&inner)));
        Ok(Self(inner, open))
    }

    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.0
    }

    /// The blocks of a namespace.
    pub fn space(&self, namespace: &Namespace) -> Space {
        let (store, open) = (Arc::clone(&self.0), Some(Arc::clone(&self.1)));
        Space { store, identity: namespace.identity(), _open: open }
    }

    /// Returns when the blocks that this process has put before would survive a loss of power. Without it,
    /// that is so once their segment is full, or the store is closed; a process that is killed loses no
    /// block that was put.
    ///
    /// # Errors
    /// `Closed`; `Directory` with the error of a device, also if it came earlier, and until the blocks that it
    /// concerns have left the store; of several directories, one that hangs ([`StoreOptions::hang_after`]).
    pub fn sync(&self) -> Result<()> {
        let _call = self.0.enter()?;
        let core = &self.0.core;
        let drain = |host: &Arc<Host>| self.0.behind.drain(&Space::of_task(&self.0), host);
        let unwritten = self.0.host.as_ref().map_or(0, drain);
        if unwritten > 0 {
            let mut what = format!("{unwritten} blocks in host memory could not be written");
            let (path, hangs) = core.disk.find_hanging().unzip();
            if let Some(hangs) = hangs {
                what = format!("{what}: {hangs}");
            }
            let (path, source) =
                (path.unwrap_or_else(|| core.disk.path_of(0)), io::Error::other(what));
            return Err(Error::Directory { path, source });
        }
        let failed =
            |(segment, source)| Error::Directory { path: core.disk.path_of(segment), source };
        self.0.worker.writer.sync(core).map_err(failed)
    }

    /// Writes blocks that come with their names, each the parent of the next.
    pub(crate) fn put_chain(&self, blocks: &[Candidate]) -> Result<Put> {
        let _call = self.0.enter()?;
        let mut put = Put::default();
        // A space only for its store: the names are in the blocks.
        let patience = Patience::of_put(&self.0, Instant::now());
        self.space(&Namespace::new("")).write_all(blocks, patience, &mut put);
        let counters = &self.0.core.counters;
        Counters::add(&counters.stored, put.stored);
        counters.add_not_stored(&put);
        Ok(put)
    }

    /// Whether a block is there.
    pub(crate) fn has(&self, block: &log::Block) -> Result<bool> {
        let _call = self.0.enter()?;
        Ok(self.0.core.find_whole(&Key(block.key), || block.check).is_some())
    }

    /// The longest block that a segment has room for.
    pub(crate) fn max_block_bytes(&self) -> u32 {
        self.0.core.superblock.geometry.max_block_bytes()
    }

    /// Creation time of the store in Unix milliseconds, and the seconds since.
    pub(crate) fn times(&self) -> (u64, u32) {
        (self.0.core.superblock.created_ms, self.0.core.clock.now_s())
    }

    /// What this process has done, and what the store holds. All zero in a forked child. Waits for no device.
    pub fn stats(&self) -> Stats {
        if self.0.is_forked() {
            // A thread of the parent may have held one of the locks at the fork.
            return Stats::default();
        }
        let core = &self.0.core;
        let held = self.0.host.as_ref().map(|host| host.held()).unwrap_or_default();
        Stats {
            blocks: core.member.live(),
            disk_bytes: core.disk.bytes(),
            hanging_directories: core.disk.hanging() as u64,
            capacity_bytes: self.0.capacity,
            host_blocks: held.blocks,
            host_bytes: held.bytes,
            waiting_bytes: held.waiting,
            unwritten_blocks: self.0.unwritten() as u64,
            processes: core.member.members().count() as u64,
            is_keeper: u64::from(self.0.membership.is_keeper()),
            uploads_waiting: self.0.objects.as_ref().map_or(0, Tier::uploads_waiting) as u64,
            is_away: self.0.objects.as_ref().is_some_and(Tier::is_away).into(),
            ..core.counters.read()
        }
    }

    /// Carries out what waits in the background, uploads blocks for a bounded time
    /// ([`ObjectTier::close_timeout`](crate::objects::ObjectTier::close_timeout)), seals what this process has
    /// written, and syncs what its puts have found. Later calls fail with `Closed`. Idempotent: every call returns when
    /// the store is closed. The last clone that is dropped closes the store, too.
    ///
    /// Where one of several directories hangs, what is under way is waited for during
    /// [`StoreOptions::hang_after`]. Calls that wait for that directory's device go on to wait; processes that open the
    /// store later can join it once they have ended.
    pub fn close(&self) {
        self.0.close();
    }
}

impl Inner {
    pub(crate) fn check(&self) -> Result<()> {
        let is_closed = self.is_closed.load(Ordering::Acquire);
        if is_closed || self.is_forked() {
            return Err(Error::Closed);
        }
        Ok(())
    }

    /// Whether this is a child of the process that opened the store.
    pub(crate) fn is_forked(&self) -> bool {
        kvferry_sys::fd::forked_since(self.forks)
    }

    /// Begins a call, during which the store is not closed.
    pub(crate) fn enter(&self) -> Result<RwLockReadGuard<'_, ()>> {
        self.check()?;
        let call = self.core.calls.read().unwrap_or_else(PoisonError::into_inner);
        self.check()?;
        Ok(call)
    }

    fn close(self: &Arc<Self>) {
        if kvferry_sys::fd::forked_since(self.forks) {
            return;
        }
        // Puts wait for space no longer. First, so that what waits is carried out, and does not find the store closed.
        self.waits.end();
        self.behind.hurry();
        // What is under way in other directories gets as long as a device may take.
        let began = Instant::now();
        let gives_up = || began.elapsed() >= self.hang_after && self.core.disk.is_any_given_up();
        self.pool.close_unless(gives_up);
        self.puts.close_unless(gives_up);
        // Only here: a task that a pool has just carried out may have closed the store, too. A second call waits here
        // until the first one has closed it.
        let _closing = lock(&self.closing);
        if self.is_closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.core.member.wake_subscribers();
        // Calls that began before end; none begins.
        self.core.wait_for_calls(gives_up);
        self.behind.close_unless(&Space::of_task(self), gives_up);
        let given_up = self.host.as_ref().map_or(Vec::new(), |host| host.give_up());
        if !given_up.is_empty() {
            let count = given_up.len();
            tracing::warn!("the store is closed with {count} blocks that could not be written");
        }
        let mut lost = Put::default();
        given_up.into_iter().for_each(|why| lost.note_not_stored(why, 1));
        self.core.counters.add_not_stored(&lost);
        self.team.close_unless(gives_up);
        if let Some(objects) = &self.objects {
            objects.close();
        }
        self.worker.stop();
        // Blocks that a put has found are in segments of other processes.
        if let Err((segment, error)) = self.worker.writer.sync(&self.core) {
            self.core.fault("sync", segment, &error);
        }
        self.core.disk.close_gates();
        self.membership.stop(gives_up);
    }

    /// Number of blocks in host memory that could not be written at the last try.
    fn unwritten(&self) -> usize {
        self.host.as_ref().map_or(0, |host| host.left(u64::MAX))
    }

    /// Has the keeper look at what it must do.
    pub(crate) fn wake_keeper(&self) {
        if self.membership.is_keeper() {
            self.worker.wake();
        } else {
            self.membership.wake_keeper();
        }
    }
}

/// Retention of blocks: what TensorRT-LLM's `KvCacheRetentionConfig` says of a range of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retain {
    /// 0 to 100; blocks of a lower priority leave first. 35 by default.
    pub priority: u8,
    /// Time after the put at which the retention ends; rounded up to 16 seconds. `None`: never.
    pub duration: Option<Duration>,
    /// Treatment of the blocks after the end.
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

/// Result of a put. The counts add up to the blocks that were given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Put {
    /// Stored now. With a tier in host memory, blocks may be there only, until they are written.
    pub stored: usize,
    /// Not stored, because they were there.
    pub present: usize,
    /// Not stored, for one of the reasons below.
    pub refused: usize,
    /// Not stored, because of a device's error.
    pub failed: usize,
    /// Refused because no segment was free.
    pub refused_no_space: usize,
    /// Refused because a stopped process holds a lock of the index.
    pub refused_contended: usize,
    /// Refused because the index had no room.
    pub refused_index_full: usize,
    /// Refused before the put began: too much waited, the put has waited for too long, or it was cancelled.
    pub refused_waiting: usize,
}

impl Put {
    pub(crate) fn refuse(&mut self, why: Refusal, blocks: usize) {
        self.refused += blocks;
        *match why {
            Refusal::NoSpace => &mut self.refused_no_space,
            Refusal::Contended => &mut self.refused_contended,
            Refusal::IndexFull => &mut self.refused_index_full,
            Refusal::Waiting => &mut self.refused_waiting,
        } += blocks;
    }
}

impl Put {
    pub(crate) fn note_not_stored(&mut self, why: NotStored, blocks: usize) {
        match why {
            NotStored::Refused(why) => self.refuse(why, blocks),
            NotStored::Failed => self.failed += blocks,
        }
    }

    /// Counts a block that waits in host memory: `left` says why it could not be written, if that was tried.
    pub(crate) fn note_waiting(&mut self, left: Option<NotStored>) {
        match left {
            Some(why) => self.note_not_stored(why, 1),
            None => self.present += 1,
        }
    }
}

/// Reason why blocks were not stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotStored {
    Refused(Refusal),
    /// A device failed.
    Failed,
}

/// Reason why blocks were refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    NoSpace,
    Contended,
    IndexFull,
    Waiting,
}

/// A lease of blocks: they stay in the store until it is dropped, or ends.
#[derive(Debug)]
pub struct Pin {
    store: Arc<Inner>,
    id: Option<PinId>,
    blocks: usize,
}

impl Pin {
    /// Number of pinned blocks, from the beginning of the prompt.
    pub fn blocks(&self) -> usize {
        self.blocks
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        if let Some(id) = &self.id
            && !kvferry_sys::fd::forked_since(self.store.forks)
        {
            self.store.core.member.unpin(id);
        }
    }
}

/// The blocks of one namespace of a store. Clones are the same.
///
/// A prompt is given by the hashes of its blocks, the first block first. Hashes have 16 to 64 bytes.
#[derive(Clone, Debug)]
pub struct Space {
    pub(crate) store: Arc<Inner>,
    pub(crate) identity: Identity,
    /// Keeps the store open. `None` in a task of the store itself.
    _open: Option<Arc<Open>>,
}

impl Space {
    /// Clone for a task in the background, which the store waits for when it is closed.
    pub(crate) fn for_task(&self) -> Self {
        Self { store: Arc::clone(&self.store), identity: self.identity.clone(), _open: None }
    }

    /// Space of a task whose blocks come with their names.
    fn of_task(store: &Arc<Inner>) -> Self {
        let identity = Namespace::new("").identity();
        Self { store: Arc::clone(store), identity, _open: None }
    }

    /// How many blocks of a prompt, from its beginning, are in the store. Those of a directory that is known to hang,
    /// and those behind them, do not count: a get would miss them. This is no use of them: call [`Space::touch`] where
    /// they are not read because the engine has them.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a hash that is too short or too long.
    pub fn lookup<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<usize> {
        let _call = self.store.enter()?;
        let (keys, found) = self.find_prompt(prompt)?;
        Ok(self.readable(&keys, &found))
    }

    /// Counts as a use of the blocks of a prompt that are in the store, also of a directory that hangs. Returns how
    /// many.
    ///
    /// # Errors
    /// As [`Space::lookup`].
    pub fn touch<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<usize> {
        let _call = self.store.enter()?;
        let (keys, found) = self.find_prompt(prompt)?;
        self.note_use(&keys, &found, prompt.len() - found.len());
        Ok(found.len())
    }

    /// Keeps the blocks of a prompt that are on the disk, from its beginning, until the value is dropped or
    /// `lease` has passed, whichever is first: a process that dies keeps nothing for longer. The pin says how many
    /// blocks they are: none while all processes together hold 4096 leases. Blocks of a directory that hangs do not
    /// count, as in [`Space::lookup`], and are not kept.
    ///
    /// A block that leaves at this moment may be counted and gone: [`Space::get`] tells. What a device loses is
    /// lost.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument` for a hash that is too short or too long.
    pub fn pin<H: AsRef<[u8]>>(&self, prompt: &[H], lease: Duration) -> Result<Pin> {
        let _call = self.store.enter()?;
        let core = &self.store.core;
        let keys = self.keys(prompt)?;
        let on_disk = |keys| self.find(keys).into_iter().map_while(|entry| entry).collect();
        let mut found: Vec<Entry> = on_disk(&keys);
        found.truncate(core.readable(&found));
        let now = core.clock.now_s();
        let seconds = lease.as_secs().saturating_add(u64::from(lease.subsec_nanos() > 0));
        let until =
            now.saturating_add(u32::try_from(seconds).unwrap_or(u32::MAX)).saturating_add(1);
        let id = found.last().and_then(|last| core.member.pin(last.slot, now, until));
        let blocks = match &id {
            Some(_) => on_disk(&keys[..found.len()]).len(),
            None => 0,
        };
        Ok(Pin { store: Arc::clone(&self.store), id, blocks })
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
        let wanted = self.wanted(prompt, first, memory)?;
        let joined = self.store.flights.join(wanted.blocks());
        self.load(&wanted, joined)
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
        self.put_since(prompt, first, memory, retain, Instant::now())
    }

    /// Like [`Space::put`]; the wait for space counts from `since`.
    fn put_since<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retain: Retain,
        since: Instant,
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
        let retention = retain.retention(core.clock.now_ms());
        self.store_blocks(prompt, first, memory, retention, since)
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
        let wanted = self.wanted(prompt, first, memory)?;
        self.store.check()?;
        let (pending, promise) = Pending::new();
        let _in_order = lock(&self.store.in_order);
        let joined = self.store.flights.join(wanted.blocks());
        let space = self.for_task();
        let task = move || {
            let call = space.store.enter();
            promise.finish(call.and_then(|_call| space.load(&wanted, joined)));
        };
        self.store.pool.submit(task)?;
        Ok(pending)
    }

    /// As [`Space::put`], in the background. The memory belongs to the store until the operation has ended.
    ///
    /// Four puts are carried out at a time, the others wait for their turn, in the order of the calls. `wait` is for how
    /// long this one may: if it has not begun by then, it ends, and all its blocks are refused
    /// ([`Put::refused_waiting`]). Where puts of 2 GiB or 65 536 blocks wait, it is refused at once. With a `wait` of
    /// zero it is refused at once where 256 MiB wait, and otherwise waits for its turn however long that takes. A put of
    /// any size may wait alone. [`StoreOptions::put_wait`](crate::StoreOptions::put_wait) counts from the end of `wait`.
    ///
    /// [`Pending::cancel`] ends a put that has not begun. Closing the store carries out the puts that wait, each unless
    /// its `wait` ends first.
    ///
    /// # Errors
    /// `Closed`; `InvalidArgument`. All others are the operation's outcome.
    pub fn put_async<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
        retain: Retain,
        wait: Duration,
    ) -> Result<Pending<Put>> {
        check_range(prompt.len(), first, memory)?;
        self.store.check()?;
        let load = Load { bytes: memory.iter().map(BlockMemory::len).sum(), blocks: memory.len() };
        // The blocks, and the one before them.
        let begin = first.saturating_sub(1);
        let prompt = own(&prompt[begin..first + memory.len()]);
        let (space, memory, first) = (self.for_task(), memory.to_vec(), first - begin);
        let called = Instant::now();
        let until = (!wait.is_zero()).then(|| after(called, wait));
        let put = move |turn| match turn {
            Turn::Begun => {
                space.put_since(&prompt, first, &memory, retain, until.unwrap_or(called))
            }
            Turn::GivenUp => {
                let mut put = Put::default();
                put.refuse(Refusal::Waiting, memory.len());
                space.store.core.counters.add_not_stored(&put);
                Ok(put)
            }
        };
        let (pending, promise) = Pending::new();
        let may_wait =
            until.is_some() || !self.store.put_wait.is_zero() || self.store.host.is_some();
        let pool = if may_wait { &self.store.puts } else { &self.store.pool };
        let bounds = if until.is_some() { PUTS_MAX } else { PUTS_MAX_WITHOUT_WAIT };
        let task = Box::new(move |turn| promise.finish(put(turn)));
        if let Some(ticket) = pool.submit_within(bounds, load, until, task)? {
            pending.set_ticket(ticket);
        }
        Ok(pending)
    }

    pub(crate) fn keys<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<Vec<Key>> {
        let mut keys = Vec::with_capacity(prompt.len());
        for hash in prompt {
            keys.push(self.identity.key(hash.as_ref())?);
        }
        Ok(keys)
    }

    fn wanted<H: AsRef<[u8]>>(
        &self,
        prompt: &[H],
        first: usize,
        memory: &[BlockMemory],
    ) -> Result<Wanted> {
        check_range(prompt.len(), first, memory)?;
        let end = first + memory.len();
        let checks = prompt[first..end].iter().map(|hash| self.identity.check(hash.as_ref()));
        Ok(Wanted {
            keys: self.keys(&prompt[..end])?,
            first,
            checks: checks.collect(),
            memory: memory.to_vec(),
            prompt: prompt.len(),
        })
    }

    /// Like [`Space::find`], but also returns the keys that were computed to find the end of the prefix.
    fn find_prompt<H: AsRef<[u8]>>(&self, prompt: &[H]) -> Result<(Vec<Key>, Vec<Option<Entry>>)> {
        for hash in prompt {
            Identity::check_hash(hash.as_ref())?;
        }
        let (mut keys, mut found) = (Vec::new(), Vec::new());
        let mut window = FIRST_WINDOW;
        loop {
            let end = prompt.len().min(keys.len() + window);
            keys.extend(self.keys(&prompt[keys.len()..end])?);
            found.extend(self.find(&keys[found.len()..]));
            if found.len() < keys.len() || end == prompt.len() {
                return Ok((keys, found));
            }
            window *= 4;
        }
    }

    /// The blocks of the longest prefix that is there. Those that are in host memory only have no entry.
    pub(crate) fn find(&self, keys: &[Key]) -> Vec<Option<Entry>> {
        // Their memory grows with what is found: a miss costs next to nothing.
        let (mut entries, mut found) = (Vec::new(), Vec::new());
        loop {
            entries.clear();
            self.store.core.member.find_prefix(&keys[found.len()..], &mut entries);
            found.extend(entries.iter().copied().map(Some));
            let Some(host) = &self.store.host else { return found };
            let in_host = host.prefix(&keys[found.len()..]);
            if in_host == 0 {
                return found;
            }
            found.extend(std::iter::repeat_n(None, in_host));
        }
    }

    /// Number of leading blocks of `found` that a get can read: the rest is behind one whose directory hangs.
    pub(crate) fn readable(&self, keys: &[Key], found: &[Option<Entry>]) -> usize {
        let core = &self.store.core;
        if found.is_empty() || !core.disk.is_any_hanging() {
            return found.len();
        }
        let in_host = |key| self.store.host.as_ref().is_some_and(|host| host.prefix(&[key]) == 1);
        let is_there = |(key, entry): &(&Key, &Option<Entry>)| {
            entry.is_none_or(|entry| !core.hangs(&entry)) || in_host(**key)
        };
        keys.iter().zip(found).take_while(is_there).count()
    }

    pub(crate) fn note_use(&self, keys: &[Key], found: &[Option<Entry>], missing: usize) {
        let core = &self.store.core;
        let (now, now_ms) = (core.clock.now_s(), core.clock.now_ms());
        let on_disk = || found.iter().flatten();
        on_disk().for_each(|entry| core.member.touch(entry, now));
        let slots: Vec<_> = on_disk().map(|entry| entry.slot).collect();
        let missing = u32::try_from(missing).unwrap_or(u32::MAX);
        if core.member.note_used(now_ms, missing, &slots) {
            self.store.wake_keeper();
        }
        if let Some(host) = &self.store.host {
            host.note_use(now_ms, &keys[..found.len()], missing as usize);
        }
    }

    /// Puts written blocks into the index.
    pub(crate) fn publish(&self, segment: u32, records: &[log::Record], put: &mut Put) {
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
            match core.member.insert(Key(block.key), new) {
                Inserted::New(slot) => {
                    put.stored += 1;
                    core.counters.bytes_written.fetch_add(block.len.into(), Ordering::Relaxed);
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

    /// Tells the keeper of blocks that came, each behind the one before it.
    pub(crate) fn note_added(&self, parent: Option<SlotId>, slots: &[SlotId]) {
        let core = &self.store.core;
        if !slots.is_empty() && core.member.note_added(core.clock.now_ms(), parent, slots) {
            self.store.wake_keeper();
        }
    }
}

/// Cuts blocks into parts of at least `part_bytes`.
pub(crate) fn chunks<T>(
    blocks: &[T],
    part_bytes: u64,
    len: impl Fn(&T) -> u32,
) -> impl Iterator<Item = &[T]> {
    let mut rest = blocks;
    std::iter::from_fn(move || {
        let mut bytes = 0;
        let is_more = |block: &&T| {
            let is_more = bytes < part_bytes;
            bytes += u64::from(len(block));
            is_more
        };
        let count = rest.iter().take_while(is_more).count();
        let (chunk, others) = rest.split_at(count);
        rest = others;
        (count > 0).then_some(chunk)
    })
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
