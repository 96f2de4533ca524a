//! The store as its users have it: real files, real processes.

mod directories;
mod events;
mod faults;
mod hanging;
mod host;
mod names;
mod objects;
mod owners;
mod processes;
mod sentences;

use kvferry::{Access, Agent, Region};
use kvferry_store::{BlockMemory, Namespace, Put, Retain, Space, Store, StoreOptions};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// A folder of its own, removed at the end.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let name = format!("kvferry-store-{name}-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).expect("a folder for temporary files");
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) const MIB: u64 = 1 << 20;
/// Blocks that an engine's memory has room for.
pub(crate) const POOL: usize = 64;

/// An engine with memory for blocks of one length.
pub(crate) struct Engine {
    pub(crate) agent: Agent,
    pub(crate) store: Store,
    pub(crate) kv: Space,
    pool: Region,
    len: u64,
}

pub(crate) fn options(folder: &Path, capacity: u64) -> StoreOptions {
    // The disk of a loaded machine takes seconds for a write.
    let unlimited = Duration::from_secs(3600);
    StoreOptions::new(folder, capacity).segment_bytes(MIB).hang_after(unlimited)
}

impl Engine {
    pub(crate) fn open(options: &StoreOptions, len: u64) -> Self {
        Self::try_open(options, len).expect("a store")
    }

    pub(crate) fn try_open(options: &StoreOptions, len: u64) -> kvferry_store::Result<Self> {
        let agent = Agent::builder().name("engine").start()?;
        let pool = agent.allocate(POOL * usize::try_from(len).expect("short"), Access::NONE)?;
        let store = Store::open(&agent, options)?;
        let kv = store.space(&Namespace::new("model"));
        Ok(Self { agent, store, kv, pool, len })
    }

    pub(crate) fn memory(&self, block: usize) -> BlockMemory {
        BlockMemory::new(&self.pool, block as u64 * self.len, self.len)
    }

    /// The first bytes of a block's memory.
    pub(crate) fn part(&self, block: usize, len: u64) -> BlockMemory {
        BlockMemory::new(&self.pool, block as u64 * self.len, len)
    }

    fn memories(&self, count: usize) -> Vec<BlockMemory> {
        (0..count).map(|block| self.memory(block)).collect()
    }

    /// Puts blocks of a prompt, each with the bytes of its hash.
    pub(crate) fn put(&self, prompt: &[[u8; 32]], first: usize) -> Put {
        for (at, hash) in prompt[first..].iter().enumerate() {
            self.fill(at, &content(hash, self.len));
        }
        let memory = self.memories(prompt.len() - first);
        self.kv.put(prompt, first, &memory, Retain::default()).expect("a put")
    }

    pub(crate) fn fill(&self, block: usize, bytes: &[u8]) {
        let at = block * usize::try_from(self.len).expect("short");
        self.pool.write_at(at, bytes).expect("inside the pool");
    }

    pub(crate) fn bytes(&self, block: usize) -> Vec<u8> {
        let len = usize::try_from(self.len).expect("short");
        let mut bytes = vec![0; len];
        self.pool.read_at(block * len, &mut bytes).expect("inside the pool");
        bytes
    }

    /// Gets blocks of a prompt and compares them. Returns how many there were.
    pub(crate) fn get(&self, prompt: &[[u8; 32]], first: usize) -> usize {
        let memory = self.memories(prompt.len() - first);
        let got = self.kv.get(prompt, first, &memory).expect("a get");
        for (at, hash) in prompt[first..first + got].iter().enumerate() {
            assert!(self.bytes(at) == content(hash, self.len), "block {at} is not what was put");
        }
        got
    }
}

/// The bytes of the block with a hash.
pub(crate) fn content(hash: &[u8; 32], len: u64) -> Vec<u8> {
    let seed = u64::from_le_bytes(hash[..8].try_into().expect("8 bytes"));
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut bytes = vec![0; usize::try_from(len).expect("short")];
    rng.fill(&mut bytes);
    bytes
}

/// The hashes of a prompt: they chain.
pub(crate) fn prompt(seed: u64, blocks: usize) -> Vec<[u8; 32]> {
    let mut hash = *blake3::hash(&seed.to_le_bytes()).as_bytes();
    let mut prompt = Vec::with_capacity(blocks);
    for _ in 0..blocks {
        prompt.push(hash);
        hash = *blake3::hash(&hash).as_bytes();
    }
    prompt
}
