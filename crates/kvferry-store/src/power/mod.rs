//! Power that fails, and errors of devices, at each step of whole stores on real files.
//!
//! A [`recorder`] notes what stores do with their files, and a [`world`] makes of that what disks may have after a
//! loss of power. There the store is opened, and must give back what it promised.

mod cuts;
mod errors;
mod keeper;
mod oracle;
pub(crate) mod recorder;
mod world;

use crate::{BlockMemory, Namespace, Put, Retain, Space, Store, StoreOptions};
use kvferry::{Access, Agent, Region};
use kvferry_sys::sync::Mutex;
use recorder::{Note, Recording};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Ten segments.
const CAPACITY: u64 = (10 << 20) + (1 << 16);
/// Memory of one block.
const ROOM: u64 = 84 << 10;
/// Blocks that a thread has memory for.
const ROOMS: usize = 4;
/// Time limit for what takes a moment.
const PATIENCE: Duration = Duration::from_secs(60);

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        // Tests may run in one process.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Relaxed);
        let name = format!("kvferry-power-{name}-{}-{number}", std::process::id());
        // Nothing here needs a device: all that is lost is lost on purpose.
        let shared = Path::new("/dev/shm");
        let above = if shared.is_dir() { shared.to_path_buf() } else { std::env::temp_dir() };
        let path = above.join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder for temporary files");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A store in three directories, of which two have the same one above.
fn options(root: &Path) -> StoreOptions {
    StoreOptions::new(root.join("disk/0"), CAPACITY)
        .and_directory(root.join("disk/1"))
        .and_directory(root.join("other"))
        .segment_bytes(MIB)
}

fn hash(block: u64) -> [u8; 32] {
    *blake3::hash(&block.to_le_bytes()).as_bytes()
}

/// The bytes of a block: 4 to 80 KiB.
fn content(block: u64) -> Arc<[u8]> {
    static KNOWN: Mutex<BTreeMap<u64, Arc<[u8]>>> = Mutex::new(BTreeMap::new());
    Arc::clone(KNOWN.lock().entry(block).or_insert_with(|| new_content(block).into()))
}

fn new_content(block: u64) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(block);
    let mut bytes = vec![0; rng.usize(1..=20) * 4096 - rng.usize(0..3) * 100];
    rng.fill(&mut bytes);
    bytes[..8].copy_from_slice(&block.to_le_bytes());
    bytes
}

/// Parts of an engine that processes share: an agent, and memory for a few blocks of each thread.
struct Engine {
    agent: Agent,
    pool: Region,
}

impl Engine {
    fn start() -> Self {
        let agent = Agent::builder().name("engine").start().expect("an agent");
        let bytes = ROOM * ROOMS as u64 * 4;
        let pool = agent.allocate(usize::try_from(bytes).expect("short"), Access::NONE);
        Self { agent, pool: pool.expect("memory") }
    }

    fn memory(&self, thread: usize, at: usize, len: usize) -> BlockMemory {
        BlockMemory::new(&self.pool, ROOM * (thread * ROOMS + at) as u64, len as u64)
    }

    fn put(&self, kv: &Space, thread: usize, blocks: &[u64]) -> crate::Result<Put> {
        let prompt: Vec<_> = blocks.iter().map(|it| hash(*it)).collect();
        let fill = |(at, block): (usize, &u64)| {
            let bytes = content(*block);
            let offset = ROOM as usize * (thread * ROOMS + at);
            self.pool.write_at(offset, &bytes).expect("inside the pool");
            self.memory(thread, at, bytes.len())
        };
        let memory: Vec<_> = blocks.iter().enumerate().map(fill).collect();
        let priority = if blocks[0].is_multiple_of(5) { 80 } else { 35 };
        kv.put(&prompt, 0, &memory, Retain { priority, ..Retain::default() })
    }

    /// Whether a block is there; an error if its bytes are not those that were put.
    fn get(&self, kv: &Space, thread: usize, block: u64) -> Result<bool, String> {
        let bytes = content(block);
        let memory = [self.memory(thread, 0, bytes.len())];
        let got = kv.get(&[hash(block)], 0, &memory).map_err(|e| format!("a get failed: {e}"))?;
        let mut read = vec![0; bytes.len()];
        let offset = ROOM as usize * thread * ROOMS;
        self.pool.read_at(offset, &mut read).expect("inside the pool");
        if got == 1 && *read != *bytes {
            return Err(format!("block {block} came back with other bytes"));
        }
        Ok(got == 1)
    }

    /// Puts a block until it is there: while segments are freed, puts are refused, and a block may leave again.
    fn must_have(&self, kv: &Space, thread: usize, block: u64) -> Result<(), String> {
        let began = Instant::now();
        loop {
            let put = self.put(kv, thread, &[block]).map_err(|e| format!("a put failed: {e}"))?;
            if put.stored + put.present == 1 && self.get(kv, thread, block)? {
                return Ok(());
            }
            if began.elapsed() > PATIENCE {
                return Err(format!("no put works: {put:?}"));
            }
            std::thread::yield_now();
        }
    }
}

/// A store that is open.
struct Process<'a> {
    engine: &'a Engine,
    store: Store,
    kv: Space,
    number: usize,
}

impl<'a> Process<'a> {
    fn open(engine: &'a Engine, options: &StoreOptions, number: usize) -> crate::Result<Self> {
        let store = Store::open(&engine.agent, options)?;
        let kv = store.space(&Namespace::new("model"));
        Ok(Self { engine, store, kv, number })
    }

    /// Puts blocks until all are stored at once, or were there, and notes which ones.
    fn put(&self, recording: &Recording, thread: usize, blocks: &[u64]) {
        let since = Instant::now();
        loop {
            let began = recording.now();
            let put = self.engine.put(&self.kv, thread, blocks).expect("memory is registered");
            // A block that is present is promised as one that is stored.
            if put.stored + put.present == blocks.len() {
                for block in blocks {
                    let process = self.number;
                    recording.note(Note::Stored { process, block: *block, began });
                }
            }
            if put.refused == 0 {
                return;
            }
            assert!(since.elapsed() < PATIENCE, "{:?}", self.store.stats());
            std::thread::yield_now();
        }
    }

    fn sync(&self, recording: &Recording) {
        let began = recording.now();
        self.store.sync().expect("no device fails");
        recording.note(Note::Synced { process: self.number, began });
    }

    fn close(self, recording: &Recording) {
        let began = recording.now();
        self.store.close();
        recording.note(Note::Synced { process: self.number, began });
        let stats = self.store.stats();
        assert_eq!(stats.failed, 0, "{stats:?}");
    }
}

/// Bytes of all files of segments below a folder.
fn bytes_of_segments(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    let bytes = |entry: std::fs::DirEntry| match entry.file_type() {
        Ok(it) if it.is_dir() => bytes_of_segments(&entry.path()),
        _ if entry.file_name().to_string_lossy().starts_with("segment-") => {
            entry.metadata().map_or(0, |it| it.len())
        }
        _ => 0,
    };
    entries.flatten().map(bytes).sum()
}
