//! [`Store`]: blocks of KV on local disks, shared by the processes of a host.

use crate::core::Core;
use crate::error::{Error, Result};
use crate::gc::worker::Worker;
use crate::key::{Key, Namespace};
use crate::log::{self, Superblock};
use crate::membership::{JoinedIndex, Membership, join};
use crate::open_store::OpenStore;
use crate::opening::Opening;
use crate::opening::recover;
use crate::options::StoreOptions;
use crate::outcome::Put;
use crate::space::{KeepsOpen, Space};
use crate::stats::{Counters, Stats};
use crate::threads::parallel::Parallel;
use crate::threads::task_pool::TaskPool;
use crate::tiers::disk::Directories;
use crate::tiers::disk::gate::is_hang;
use crate::tiers::host::write_behind::WriteBehind;
use crate::tiers::host::{HOST_BYTES_MIN, HostTier};
use crate::tiers::objects::Tier;
use crate::waits::SpaceWaits;
use crate::writer::Candidate;
use kvferry::Agent;
use kvferry_sys::sync::Mutex;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Threads that read in the background, and as many that write.
const IO_THREADS: usize = 4;
/// Tries to open a store that other processes make meanwhile, with their directories in another order.
const OVERTAKEN_MAX: u32 = 3;

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
pub struct Store(Arc<OpenStore>, Arc<OpenHandle>);

/// Handle of a user's clones of a store, which the store's own threads do not hold: the last one that is dropped closes
/// the store, and returns when that is done.
#[derive(Debug)]
struct OpenHandle(Arc<OpenStore>);

impl KeepsOpen for OpenHandle {}

impl Drop for OpenHandle {
    fn drop(&mut self) {
        close(&self.0);
    }
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
        let mut opening = Opening::new(agent, options)?;
        let mut joined = join_or_fill(&opening, options);
        for _ in 0..OVERTAKEN_MAX {
            // Of several directories, one that hangs is lost in the next try.
            let has_lost = options.directories.len() > 1
                && matches!(&joined, Err(Error::Directory { source, .. }) if is_hang(source));
            if !(opening.is_overtaken() || has_lost) {
                break;
            }
            opening = Opening::new(agent, options)?;
            joined = join_or_fill(&opening, options);
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
            bytes => Some(Arc::new(HostTier::new(agent, bytes)?)),
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
        let inner = OpenStore {
            core,
            worker,
            membership,
            objects,
            pool: TaskPool::new(IO_THREADS, options.hang_after),
            in_order: Mutex::default(),
            host,
            behind: WriteBehind::default(),
            waits: SpaceWaits::default(),
            put_wait: options.put_wait,
            puts: TaskPool::new(IO_THREADS, options.hang_after),
            parallel: Parallel::new(cores.min(IO_THREADS), options.hang_after),
            flights: Arc::default(),
            capacity: options.capacity.min(StoreOptions::capacity_max(segment_bytes)),
            hang_after: options.hang_after,
            is_closed: AtomicBool::new(false),
            closing: Mutex::default(),
            forks: kvferry_sys::fd::forks(),
        };
        let inner = Arc::new(inner);
        let open = Arc::new(OpenHandle(Arc::clone(&inner)));
        Ok(Self(inner, open))
    }

    pub(crate) fn inner(&self) -> &Arc<OpenStore> {
        &self.0
    }

    /// The blocks of a namespace.
    pub fn space(&self, namespace: &Namespace) -> Space {
        Space::new(Arc::clone(&self.0), namespace.identity(), self.1.clone())
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
        let drain = |host: &Arc<HostTier>| self.0.behind.drain(&Space::of_task(&self.0), host);
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

    /// Waits until the blocks that this process has put before are uploaded to the object store, or dropped.
    /// False if `timeout` passed first. True at once without an object store.
    ///
    /// # Errors
    /// `Closed`.
    pub fn flush_objects(&self, timeout: Duration) -> Result<bool> {
        self.0.check()?;
        Ok(self.0.objects.as_ref().is_none_or(|objects| objects.flush(timeout)))
    }

    /// Writes blocks that come with their names, each the parent of the next.
    pub(crate) fn put_chain(&self, blocks: &[Candidate]) -> Result<Put> {
        let _call = self.0.enter()?;
        let mut put = Put::default();
        // A space only for its store: the names are in the blocks.
        let patience = self.0.patience(Instant::now());
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
    /// ([`ObjectTier::close_timeout`](crate::tiers::objects::ObjectTier::close_timeout)), seals what this process has
    /// written, and syncs what its puts have found. Later calls fail with `Closed`. Idempotent: every call returns when
    /// the store is closed. The last clone that is dropped closes the store, too.
    ///
    /// Where one of several directories hangs, what is under way is waited for during
    /// [`StoreOptions::hang_after`]. Calls that wait for that directory's device go on to wait; processes that open the
    /// store later can join it once they have ended.
    pub fn close(&self) {
        close(&self.0);
    }
}

/// Joins the processes that have the store open, or is the first and fills the index. What the first process has found
/// out of the directories counts while it has the store open.
fn join_or_fill(
    opening: &Opening<'_>,
    options: &StoreOptions,
) -> Result<(Superblock, JoinedIndex, Option<Directories>)> {
    let mut filled = None;
    let fill = |superblock: &Superblock| {
        let segment_bytes = superblock.geometry.segment_bytes();
        let geometry = options.geometry(Some(segment_bytes))?;
        let (asked, most) = (options.capacity, StoreOptions::capacity_max(segment_bytes));
        if asked > most {
            tracing::warn!(
                "the store uses {most} of its capacity of {asked} bytes: it can't have more, with \
                 segments of {segment_bytes} bytes"
            );
        }
        let disk = opening.disk(superblock, true)?;
        let index = recover::fill(&disk, superblock, geometry)?;
        // Most of them are not used soon.
        disk.close_files();
        filled = Some(disk);
        Ok(index)
    };
    let open_superblock = || opening.open_superblock();
    let joined = join(&opening.readable(), opening.bounds(), open_superblock, fill);
    joined.map(|(superblock, joined)| (superblock, joined, filled))
}

fn close(store: &Arc<OpenStore>) {
    if kvferry_sys::fd::forked_since(store.forks) {
        return;
    }
    // Puts wait for space no longer. First, so that what waits is carried out, and does not find the store closed.
    store.waits.end();
    store.behind.hurry();
    // What is under way in other directories gets as long as a device may take.
    let began = Instant::now();
    let gives_up = || began.elapsed() >= store.hang_after && store.core.disk.is_any_given_up();
    store.pool.close_unless(gives_up);
    store.puts.close_unless(gives_up);
    // Only here: a task that a pool has just carried out may have closed the store, too. A second call waits here
    // until the first one has closed it.
    let _closing = store.closing.lock();
    if store.is_closed.swap(true, Ordering::AcqRel) {
        return;
    }
    store.core.member.wake_subscribers();
    // Calls that began before end; none begins.
    store.core.wait_for_calls(gives_up);
    store.behind.close_unless(&Space::of_task(store), gives_up);
    let given_up = store.host.as_ref().map_or(Vec::new(), |host| host.give_up());
    if !given_up.is_empty() {
        let count = given_up.len();
        tracing::warn!("the store is closed with {count} blocks that could not be written");
    }
    let mut lost = Put::default();
    given_up.into_iter().for_each(|why| lost.note_not_stored(why, 1));
    store.core.counters.add_not_stored(&lost);
    store.parallel.close_unless(gives_up);
    if let Some(objects) = &store.objects {
        objects.close();
    }
    store.worker.stop();
    // Blocks that a put has found are in segments of other processes.
    if let Err((segment, error)) = store.worker.writer.sync(&store.core) {
        store.core.fault("sync", segment, &error);
    }
    store.core.disk.close_gates();
    store.membership.stop(gives_up);
}
