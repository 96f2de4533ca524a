//! Pages of the reference engine to a block store and back: by the block manager, and directly.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::{Agent, TransportKind, Transports};
use kvferry_blocks::{
    Action, BlockManager, Config, GroupConfig, Key, Request, Retention, RetentionConfig,
    SequenceId, TokenRange, TransferMode,
};
use kvferry_offload::{Driver, Options};
use kvferry_refengine::offload::EnginePages;
use kvferry_refengine::{
    BlockId, EngineConfig, GroupCache, GroupSpec, KvCaches, ModelSpec, Rank, RankLayout,
};
use kvferry_store::{BlockMemory, Namespace, Retain, Store, StoreOptions};

use super::calls::Calls;
use crate::failure::Failure;
use crate::options::OffloadBench;
use crate::units;

/// Bytes of the pages of one prompt, and of one call to the store.
pub(super) const CALL_BYTES: u64 = 32 << 20;
const SEGMENT: u64 = 64 << 20;
const TOKENS: usize = 16;
const MARK: u64 = 0x9e37_79b9_7f4a_7c15;
/// Copies that the scheduler takes in one call.
const TAKEN_MAX: usize = 64;
/// Time limit of a copy.
const LONG: Duration = Duration::from_secs(60);

/// The pages of a model.
#[derive(Clone, Debug)]
pub(super) struct Case {
    config: EngineConfig,
    page_bytes: u64,
    /// Pages of one prompt.
    pages: usize,
}

impl Case {
    pub(super) fn all() -> [Self; 2] {
        [Self::new(8, 4, 128), Self::new(32, 8, 256)]
    }

    fn new(layers: usize, heads: usize, head_bytes: usize) -> Self {
        let model = ModelSpec::new(vec![GroupSpec::full(heads, head_bytes)], layers);
        let mut config = EngineConfig::new(model);
        config.groups = vec![GroupCache::new(TOKENS, 2)];
        let layout = RankLayout::new(&config, Rank { pp: 0, tp: 0 });
        // Of two blocks, the first of which stands for none.
        let page_bytes = layout.storages.iter().sum::<usize>() as u64 / 2;
        let pages = usize::try_from((CALL_BYTES / page_bytes).max(1)).expect("few");
        // One more page for the token that is always computed.
        config.groups = vec![GroupCache::new(TOKENS, 1 + pages + 1)];
        Self { config, page_bytes, pages }
    }

    pub(super) fn name(&self) -> String {
        units::bytes(self.page_bytes)
    }

    fn key(&self, prompt: u64, page: usize) -> Key {
        let number = prompt * self.pages as u64 + page as u64;
        Key([number.wrapping_mul(MARK), number ^ MARK.rotate_left(32)])
    }

    fn keys(&self, prompt: u64) -> Vec<Key> {
        (0..self.pages).map(|page| self.key(prompt, page)).collect()
    }
}

pub(super) struct Place {
    agent: Agent,
    folder: PathBuf,
    bytes: u64,
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

impl Place {
    pub(super) fn new(options: &OffloadBench) -> Result<Arc<Self>, Failure> {
        let agent = Agent::builder()
            .name("bench-offload")
            .transports(Transports::only(TransportKind::TCP))
            .start()?;
        let folder = options.folder.clone().unwrap_or_else(std::env::temp_dir);
        let folder = folder.join(format!("kvferry-bench-offload-{}", std::process::id()));
        std::fs::create_dir_all(&folder)
            .map_err(|e| Failure::Failed(format!("{}: {e}", folder.display())))?;
        let default = if options.effort.quick { 128 << 20 } else { 512 << 20 };
        let bytes = options.bytes.unwrap_or(default).next_multiple_of(CALL_BYTES);
        Ok(Arc::new(Self { agent, folder, bytes }))
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    fn prompts(&self, case: &Case) -> u64 {
        (self.bytes / (case.page_bytes * case.pages as u64)).max(1)
    }

    fn gigabytes(&self, case: &Case) -> f64 {
        (self.prompts(case) * case.pages as u64 * case.page_bytes) as f64 / 1e9
    }

    fn capacity(&self) -> u64 {
        4 * self.bytes + (1 << 30)
    }

    /// GB/s of offloads and of onboards. Each begins when the scheduler allocates, and ends when the sequence is ready.
    pub(super) fn managed(
        &self,
        case: &Case,
        round: u64,
        calls: &mut Calls,
    ) -> Result<[f64; 2], Failure> {
        let folder = self.folder.join("managed");
        let _ = std::fs::remove_dir_all(&folder);
        let EnginePages { caches, pages, .. } = EnginePages::allocate(&self.agent, &case.config)?;
        let prompts = self.prompts(case);
        let secondary = u32::try_from((prompts + 1) * case.pages as u64).expect("few");
        let primary_blocks = u32::try_from(case.pages + 1).expect("few");
        let group = GroupConfig { primary_blocks, secondary_blocks: secondary };
        let manager = BlockManager::new(&Config::new(TOKENS as u32, [group])).map_err(failed)?;
        let options = Options::new(Namespace::new("bench"))
            .store_bytes(self.capacity())
            .segment_bytes(SEGMENT);
        let driver = Driver::start(&self.agent, pages, &[secondary], options).map_err(failed)?;
        let wish = |priority| {
            let retention = Retention { priority, duration_ms: None };
            RetentionConfig::new([TokenRange { start: 0, end: None, retention }])
                .and_then(|config| config.transfer(TransferMode::Gds, folder.to_str()))
                .map_err(failed)
        };
        let (kept, dropped) = (wish(50)?, wish(0)?);
        let mut engine = Scheduler { case, manager, driver, calls, now_ms: 0 };
        let first = (round << 32) | 1;
        let (mut offloading, mut onboarding) = (0.0, 0.0);
        for prompt in 0..=prompts {
            // Each prompt pushes the one before out; the last one is dropped, not offloaded.
            let wish = if prompt == prompts { &dropped } else { &kept };
            let (sequence, seconds) = engine.start(first + prompt, wish, 0)?;
            offloading += if prompt > 0 { seconds } else { 0.0 };
            engine.mark(&caches[0], sequence, first + prompt);
            engine.end(first + prompt, sequence)?;
        }
        let stats = engine.driver.stats();
        if (stats.offloaded, stats.present) != (prompts * case.pages as u64, 0) {
            return Err(Failure::Failed(format!("blocks were not offloaded: {stats:?}")));
        }
        for prompt in 0..prompts {
            let reused = case.pages * TOKENS;
            let (sequence, seconds) = engine.start(first + prompt, &dropped, reused)?;
            onboarding += seconds;
            engine.check(&caches[0], sequence, first + prompt)?;
            engine.end(first + prompt, sequence)?;
        }
        drop(engine);
        let _ = std::fs::remove_dir_all(&folder);
        let moved = self.gigabytes(case);
        Ok([moved / offloading, moved / onboarding])
    }

    /// GB/s of puts and of gets of the same pages, on a thread such as the driver's.
    pub(super) fn direct(self: &Arc<Self>, case: &Case, round: u64) -> Result<[f64; 2], Failure> {
        let (place, case) = (Arc::clone(self), case.clone());
        let body = move || place.put_and_get(&case, round);
        let thread = kvferry_sys::thread::spawn("kvferry-direct".into(), body).map_err(failed)?;
        thread.join().map_err(|_| Failure::Failed("the thread of the store has panicked".into()))?
    }

    fn put_and_get(&self, case: &Case, round: u64) -> Result<[f64; 2], Failure> {
        let folder = self.folder.join("direct");
        let _ = std::fs::remove_dir_all(&folder);
        let EnginePages { caches, pages, .. } = EnginePages::allocate(&self.agent, &case.config)?;
        let options = StoreOptions::new(&folder, self.capacity()).segment_bytes(SEGMENT);
        let store = Store::open(&self.agent, &options).map_err(failed)?;
        let space = store.space(&Namespace::new("bench"));
        let count = u32::try_from(case.pages).expect("few");
        // A manager that evicts one prompt for the next gives its pages out backwards and forwards in turns.
        let order = |prompt: u64| -> Vec<u32> {
            let page = |at| if prompt.is_multiple_of(2) { count - 1 - at } else { at };
            (0..count).map(page).collect()
        };
        let memory_of = |order: &[u32]| -> Vec<BlockMemory> {
            order.iter().map(|&page| pages.memory(0, page)).collect()
        };
        let first = (round << 32) | 1;
        let hashes = |prompt: u64| -> Vec<[u8; 16]> {
            let hash = |key: Key| (u128::from(key.0[0]) << 64 | u128::from(key.0[1])).to_be_bytes();
            case.keys(first + prompt).into_iter().map(hash).collect()
        };
        let mut seconds = [0.0, 0.0];
        for prompt in 0..self.prompts(case) {
            let order = order(prompt);
            for (at, page) in order.iter().enumerate() {
                set(&caches[0], *page, case.key(first + prompt, at));
            }
            let (hashes, memory) = (hashes(prompt), memory_of(&order));
            let began = Instant::now();
            let put = space.put(&hashes, 0, &memory, Retain::default()).map_err(failed)?;
            seconds[0] += began.elapsed().as_secs_f64();
            if put.stored != case.pages {
                return Err(Failure::Failed(format!("blocks were not stored: {put:?}")));
            }
        }
        for prompt in 0..self.prompts(case) {
            let order = order(prompt);
            let (hashes, memory) = (hashes(prompt), memory_of(&order));
            let began = Instant::now();
            let read = space.get(&hashes, 0, &memory).map_err(failed)?;
            seconds[1] += began.elapsed().as_secs_f64();
            let is_right = |at: usize| is(&caches[0], order[at], case.key(first + prompt, at));
            if read != case.pages || !(0..case.pages).all(is_right) {
                return Err(Failure::Check(format!("{}: a wrong block of the store", case.name())));
            }
        }
        store.close();
        let _ = std::fs::remove_dir_all(&folder);
        Ok(seconds.map(|seconds| self.gigabytes(case) / seconds))
    }
}

/// Calls the manager and the driver as an engine's scheduler does.
struct Scheduler<'a> {
    case: &'a Case,
    manager: BlockManager,
    driver: Driver,
    calls: &'a mut Calls,
    now_ms: u64,
}

impl Scheduler<'_> {
    /// Starts a request. Returns when its pages are ready, and how many seconds that took.
    fn start(
        &mut self,
        prompt: u64,
        retention: &RetentionConfig,
        reused: usize,
    ) -> Result<(SequenceId, f64), Failure> {
        let keys = self.case.keys(prompt);
        let prompt_tokens = u32::try_from(keys.len() * TOKENS + 1).expect("few");
        let request = Request { prompt_tokens, keys: &keys, tokens: &[], salt: 0, retention };
        self.now_ms += 1;
        let (manager, driver, now_ms) = (&mut self.manager, &self.driver, self.now_ms);
        let began = Instant::now();
        let allocated = self.calls.time("allocate", || manager.allocate(&request, now_ms));
        let allocated = allocated.map_err(failed)?;
        self.calls.time("hand copies out", || driver.submit(actions(manager)));
        while manager.is_ready(allocated.sequence) != Some(true) {
            if !driver.wait(LONG) {
                return Err(Failure::Failed("a copy does not end".into()));
            }
            let taken = self.calls.time("take what has ended", || {
                for (id, outcome) in driver.take_finished(TAKEN_MAX) {
                    manager.finished(id, outcome, now_ms)?;
                }
                driver.submit(actions(manager));
                Ok::<(), kvferry_blocks::Error>(())
            });
            taken.map_err(failed)?;
        }
        let seconds = began.elapsed().as_secs_f64();
        if allocated.reused_tokens as usize != reused || driver.stats().failed > 0 {
            let what = format!("{} tokens reused of {reused}", allocated.reused_tokens);
            return Err(Failure::Failed(format!("{what}: {:?}", driver.stats())));
        }
        Ok((allocated.sequence, seconds))
    }

    fn end(&mut self, prompt: u64, sequence: SequenceId) -> Result<(), Failure> {
        let keys = self.case.keys(prompt);
        let (manager, driver, now_ms) = (&mut self.manager, &self.driver, self.now_ms);
        let ended = self.calls.time("store and free", || {
            manager.store(sequence, &keys, &[])?;
            manager.free(sequence, &keys, &[], now_ms)?;
            driver.submit(actions(manager));
            Ok::<(), kvferry_blocks::Error>(())
        });
        while manager.poll_event().is_some() {}
        ended.map_err(failed)
    }

    fn pages(&self, sequence: SequenceId) -> Vec<u32> {
        self.manager.blocks(sequence, 0).unwrap_or_default().to_vec()
    }

    fn mark(&self, caches: &KvCaches, sequence: SequenceId, prompt: u64) {
        for (at, page) in self.pages(sequence).into_iter().take(self.case.pages).enumerate() {
            set(caches, page, self.case.key(prompt, at));
        }
    }

    fn check(&self, caches: &KvCaches, sequence: SequenceId, prompt: u64) -> Result<(), Failure> {
        let pages = self.pages(sequence);
        let is_right = |at| is(caches, pages[at], self.case.key(prompt, at));
        match (0..self.case.pages).all(is_right) {
            true => Ok(()),
            false => Err(Failure::Check(format!("{}: a wrong onboarded block", self.case.name()))),
        }
    }
}

fn actions(manager: &mut BlockManager) -> impl Iterator<Item = Action> {
    std::iter::from_fn(|| manager.poll_action())
}

/// Indices of the layers of a page that are marked: the first and the last.
fn marks(caches: &KvCaches) -> [usize; 2] {
    [0, caches.layout.layers.len() - 1]
}

fn set(caches: &KvCaches, page: u32, key: Key) {
    for layer in marks(caches) {
        let view = &caches.layout.layers[layer];
        let mut row = caches.row(view, 0, BlockId(page + 1), 0, 0);
        row[..8].copy_from_slice(&key.0[0].to_le_bytes());
        row[8..16].copy_from_slice(&key.0[1].to_le_bytes());
        caches.set_row(view, 0, BlockId(page + 1), 0, 0, &row);
    }
}

fn is(caches: &KvCaches, page: u32, key: Key) -> bool {
    marks(caches).into_iter().all(|layer| {
        let row = caches.row(&caches.layout.layers[layer], 0, BlockId(page + 1), 0, 0);
        row[..8] == key.0[0].to_le_bytes() && row[8..16] == key.0[1].to_le_bytes()
    })
}

fn failed(error: impl std::fmt::Display) -> Failure {
    Failure::Failed(error.to_string())
}
