//! A connector between an engine and a store of blocks, for one rank and one group of layers.
//!
//! The scheduler half asks the store how much of a prompt it has; the worker half reads these blocks into the
//! engine's pages before the step computes on them, and puts the blocks that the step has filled. Both are
//! synchronous: what a step costs contains them. Only blocks of prompts are put.

use kvferry_sys::sync::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry::{Access, Agent, Region};
use kvferry_refengine::contract::RequestView;
use kvferry_refengine::contract::vllm::{
    Connector, ConnectorMeta, ConnectorOutput, Match, SchedulerConnector, SchedulerOutput,
    TransferResults, WorkerConnector,
};
use kvferry_refengine::kvferry_adapter::RegionMemory;
use kvferry_refengine::{BlockId, KvCaches, KvMemory, Params, Rank, RankLayout, RequestId};
use kvferry_store::{BlockMemory, Put, Result, Retain, Space};
use rustix::process::{Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

type Hash = [u8; 32];

/// Counters of both halves, for the report.
#[derive(Debug, Default)]
pub(super) struct Counts {
    /// Tokens of each prompt that the engine did not compute.
    pub(super) reused: BTreeMap<RequestId, Reused>,
    /// Sum of the results of all puts.
    pub(super) put: Put,
    /// The first call to the store that failed.
    pub(super) failure: Option<String>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Reused {
    /// Tokens that the engine had in its own cache.
    pub(super) cached_tokens: usize,
    /// Tokens that were read from the store.
    pub(super) loaded_tokens: usize,
}

/// The same value in both halves and at the caller.
pub(super) type Shared = Arc<Mutex<Counts>>;

/// A fault that the worker half causes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Fault {
    None,
    /// SIGKILL while blocks are put: see [`Worker::put_and_kill`].
    Kill,
    /// A flipped byte in the first block of each load, after it was read.
    Flip,
}

/// Makes both halves and their counters.
pub(super) fn connector(
    agent: &Agent,
    space: &Space,
    block_tokens: usize,
    fault: Fault,
) -> (Connector, Shared) {
    let shared = Shared::default();
    let scheduler = Scheduler {
        space: space.clone(),
        block_tokens,
        asked: BTreeMap::new(),
        prompts: BTreeMap::new(),
        step: Step::default(),
        shared: shared.clone(),
    };
    let worker = Worker {
        agent: agent.clone(),
        space: space.clone(),
        block_tokens,
        regions: BTreeMap::new(),
        layout: None,
        step: Step::default(),
        not_loaded: Vec::new(),
        fault,
        shared: shared.clone(),
    };
    let connector = Connector { scheduler: Box::new(scheduler), workers: vec![Box::new(worker)] };
    (connector, shared)
}

/// Reads and puts of the worker half in one step.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Step {
    loads: Vec<Blocks>,
    puts: Vec<Blocks>,
}

/// Blocks of a prompt, and where they are in the engine's cache.
#[derive(Debug, Serialize, Deserialize)]
struct Blocks {
    id: RequestId,
    /// The hashes of the prompt's blocks, also of those before and after.
    prompt: Vec<Hash>,
    /// The number of the first block in the prompt.
    first: usize,
    blocks: Vec<BlockId>,
}

/// A prompt that is being computed.
struct Prompt {
    hashes: Vec<Hash>,
    blocks: Vec<BlockId>,
    /// Blocks, from the first, that are not to be put: they came from a cache, or have been put.
    kept: usize,
}

struct Scheduler {
    space: Space,
    block_tokens: usize,
    /// Tokens in the engine's own cache, when it last asked for more.
    asked: BTreeMap<RequestId, usize>,
    prompts: BTreeMap<RequestId, Prompt>,
    step: Step,
    shared: Shared,
}

impl Scheduler {
    fn put_filled(&mut self, id: &RequestId, computed: usize) {
        let Some(prompt) = self.prompts.get_mut(id) else { return };
        let filled = (computed / self.block_tokens).min(prompt.hashes.len());
        if filled <= prompt.kept {
            return;
        }
        self.step.puts.push(Blocks {
            id: id.clone(),
            prompt: prompt.hashes[..filled].to_vec(),
            first: prompt.kept,
            blocks: prompt.blocks[prompt.kept..filled].to_vec(),
        });
        prompt.kept = filled;
    }
}

/// The hashes of the blocks that the first `tokens` tokens fill.
fn hashes(request: &RequestView<'_>, tokens: usize, block_tokens: usize) -> Vec<Hash> {
    request.block_hashes[0].iter().take(tokens / block_tokens).map(|hash| hash.0).collect()
}

impl SchedulerConnector for Scheduler {
    fn get_num_new_matched_tokens(
        &mut self,
        request: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> Match {
        self.asked.insert(request.id.clone(), num_computed_tokens);
        // The last token is computed in any case: the next one follows from it.
        let usable = hashes(request, request.prompt.len() - 1, self.block_tokens);
        // A store that was closed has no blocks.
        let found = self.space.lookup(&usable).unwrap_or(0) * self.block_tokens;
        match found.saturating_sub(num_computed_tokens) {
            0 => Match::NONE,
            tokens => Match::Tokens { tokens, load_async: false },
        }
    }

    fn update_state_after_alloc(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
        num_external_tokens: usize,
    ) {
        let cached_tokens = self.asked.remove(request.id).unwrap_or(0);
        let hashes = hashes(request, request.prompt.len(), self.block_tokens);
        let first = cached_tokens / self.block_tokens;
        let kept = first + num_external_tokens / self.block_tokens;
        if kept > first {
            self.step.loads.push(Blocks {
                id: request.id.clone(),
                prompt: hashes.clone(),
                first,
                blocks: block_ids[0][first..kept].to_vec(),
            });
        }
        self.prompts.insert(request.id.clone(), Prompt { hashes, blocks: Vec::new(), kept });
        let reused = Reused { cached_tokens, loaded_tokens: 0 };
        self.shared.lock().reused.insert(request.id.clone(), reused);
    }

    fn build_connector_meta(&mut self, output: &SchedulerOutput) -> Vec<u8> {
        let scheduled = |id| output.num_scheduled_tokens.get(id).copied().unwrap_or(0);
        for new in &output.scheduled_new_reqs {
            if let Some(prompt) = self.prompts.get_mut(&new.id) {
                prompt.blocks.clone_from(&new.block_ids[0]);
            }
            self.put_filled(&new.id, new.num_computed_tokens + scheduled(&new.id));
        }
        for cached in &output.scheduled_cached_reqs {
            if let Some(prompt) = self.prompts.get_mut(&cached.id) {
                if cached.resumed {
                    prompt.blocks.clear();
                }
                prompt.blocks.extend(&cached.block_ids[0]);
            }
            self.put_filled(&cached.id, cached.num_computed_tokens + scheduled(&cached.id));
        }
        let step = std::mem::take(&mut self.step);
        serde_json::to_vec(&step).expect("lists of numbers have a JSON form")
    }

    /// The engine computes a prompt again from the first block that was not loaded on. These blocks are put.
    fn update_connector_output(&mut self, output: &ConnectorOutput) {
        for prompt in self.prompts.values_mut() {
            let missing = |block: &BlockId| output.invalid_block_ids.contains(block);
            if let Some(at) = prompt.blocks.iter().position(missing) {
                prompt.kept = prompt.kept.min(at);
            }
        }
    }

    fn request_finished(
        &mut self,
        request: &RequestView<'_>,
        _block_ids: &[Vec<BlockId>],
    ) -> (bool, Option<Params>) {
        self.asked.remove(request.id);
        self.prompts.remove(request.id);
        (false, None)
    }
}

struct Worker {
    agent: Agent,
    space: Space,
    block_tokens: usize,
    /// The memory of each storage.
    regions: BTreeMap<usize, Region>,
    layout: Option<RankLayout>,
    step: Step,
    not_loaded: Vec<BlockId>,
    fault: Fault,
    shared: Shared,
}

impl Worker {
    /// Memory of each block: a piece for each plane of each layer.
    fn memory(&self, blocks: &[BlockId]) -> Vec<BlockMemory> {
        let layout = self.layout.as_ref().expect("caches are registered before the first step");
        let planes = || layout.layers.iter().flat_map(|layer| &layer.planes);
        let whole = |block: &BlockId| {
            planes().fold(BlockMemory::default(), |memory, plane| {
                let len = plane.heads * plane.tokens * plane.bytes;
                let offset = plane.offset(*block, 0, 0);
                memory.and(&self.regions[&plane.storage], offset as u64, len as u64)
            })
        };
        blocks.iter().map(whole).collect()
    }

    fn load(&mut self, load: &Blocks) -> Result<()> {
        let read = self.space.get(&load.prompt, load.first, &self.memory(&load.blocks));
        let count = *read.as_ref().unwrap_or(&0);
        if count < load.blocks.len() {
            self.not_loaded.extend(&load.blocks[count..]);
            // What this step computes after the missing blocks is wrong. The engine computes it again.
            self.step.puts.retain(|put| put.id != load.id);
        }
        if self.fault == Fault::Flip {
            self.flip(load.blocks[0])?;
        }
        if let Some(reused) = self.shared.lock().reused.get_mut(&load.id) {
            reused.loaded_tokens = count * self.block_tokens;
        }
        read.map(|_| ())
    }

    fn flip(&self, block: BlockId) -> Result<()> {
        let layout = self.layout.as_ref().expect("caches are registered before the first step");
        let plane = &layout.layers[0].planes[0];
        let (region, at) = (&self.regions[&plane.storage], plane.offset(block, 0, 0));
        let mut byte = [0];
        region.read_at(at, &mut byte)?;
        region.write_at(at, &[!byte[0]])?;
        Ok(())
    }

    fn put(&self, put: &Blocks) -> Result<()> {
        let memory = self.memory(&put.blocks);
        if self.fault == Fault::Kill {
            return self.put_and_kill(put, &memory);
        }
        let outcome = self.space.put(&put.prompt, put.first, &memory, Retain::default())?;
        let all = &mut self.shared.lock().put;
        all.stored += outcome.stored;
        all.present += outcome.present;
        all.refused += outcome.refused;
        all.failed += outcome.failed;
        Ok(())
    }

    /// Puts half of the blocks, and kills the process at a random moment while another thread puts more. The moment
    /// comes after a fifth to four fifths of the time that the first half took. The last blocks would come after
    /// these: so the kill is never too late, however late this thread gets a processor.
    fn put_and_kill(&self, put: &Blocks, memory: &[BlockMemory]) -> Result<()> {
        let half = memory.len() / 2;
        let most = (memory.len() - memory.len().div_ceil(8)).max(half);
        let began = Instant::now();
        self.space.put(&put.prompt, put.first, &memory[..half], Retain::default())?;
        let wait = began.elapsed().mul_f64(0.2 + 0.6 * fastrand::f64());
        let rest = put.first + half;
        let began = Instant::now();
        let (memory, retain) = (&memory[half..most], Retain::default());
        let _writing = self.space.put_async(&put.prompt, rest, memory, retain, Duration::ZERO)?;
        while began.elapsed() < wait {
            std::hint::spin_loop();
        }
        // The parent process sees how this one ended.
        let _ = kill_process(getpid(), Signal::KILL);
        Ok(())
    }

    fn note(&self, outcome: Result<()>) {
        if let Err(error) = outcome {
            self.shared.lock().failure.get_or_insert_with(|| error.to_string());
        }
    }
}

impl WorkerConnector for Worker {
    fn allocate_kv_memory(
        &mut self,
        _rank: Rank,
        storage: usize,
        len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        match self.agent.allocate(len_bytes, Access::NONE) {
            Ok(region) => {
                self.regions.insert(storage, region.clone());
                Some(Arc::new(RegionMemory::new(region)))
            }
            Err(error) => {
                self.note(Err(error.into()));
                None
            }
        }
    }

    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>) {
        self.layout = Some(caches.layout.clone());
    }

    fn bind_connector_metadata(&mut self, meta: &ConnectorMeta) {
        self.step = serde_json::from_slice(meta).expect("the scheduler half wrote it");
    }

    fn start_load_kv(&mut self) {
        for load in std::mem::take(&mut self.step.loads) {
            let outcome = self.load(&load);
            self.note(outcome);
        }
    }

    fn wait_for_save(&mut self) {
        for put in std::mem::take(&mut self.step.puts) {
            let outcome = self.put(&put);
            self.note(outcome);
        }
    }

    fn get_transfer_results(&mut self, _finished_req_ids: &[RequestId]) -> TransferResults {
        TransferResults::default()
    }

    fn get_block_ids_with_load_errors(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.not_loaded)
    }
}
