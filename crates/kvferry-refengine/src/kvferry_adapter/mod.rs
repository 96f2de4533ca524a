//! kvferry's connector behind the seam. This adapter only translates.
//!
//! A [`KvferryAdapter`] is one engine's: a [`Scheduler`] and, per rank, an [`Agent`] and a [`Worker`] whose
//! KV lies in the agent's memory ([`RegionMemory`]). The caller provides the agents, with transports,
//! addresses and secrets. The halves share nothing: the engine carries bytes between them.
//!
//! | call of the seam | becomes |
//! |---|---|
//! | `allocate_kv_memory` | a region that peers may read |
//! | `register_kv_caches` | [`Worker::start`] |
//! | `get_handshake_metadata`, `set_xfer_handshake_metadata` | [`Worker::rank_metadata`], [`Scheduler::set_ranks`] |
//! | `on_new_request`, `prompt_tokens_to_prefill` | [`Scheduler::arrived`] |
//! | `get_num_new_matched_tokens` | [`Scheduler::matched`] |
//! | `update_state_after_alloc` | [`Scheduler::allocated`] |
//! | `build_connector_meta` | [`Scheduler::step`] |
//! | `handle_preemptions` | [`Worker::apply_after`] |
//! | `start_load_kv` | [`Worker::fetch`] |
//! | `save_kv_layer` | [`Worker::layer_computed`], unless [`KvferryAdapterConfig::layer_events`] is off |
//! | `wait_for_save` | [`Worker::step_computed`] |
//! | `get_transfer_results` | [`Worker::reports`] |
//! | `update_connector_output` | [`Scheduler::reported`], [`Scheduler::sent`], [`Scheduler::received`] |
//! | `request_finished` | [`Scheduler::finished`] |
//! | `reset_cache` | [`Scheduler::reset_cache`] |

mod gpu;
mod memory;
mod vllm;

pub use gpu::GpuMemory;
pub use memory::RegionMemory;

use crate::config::EngineConfig;
use crate::contract::vllm::Connector;
use crate::layout::BlockId;
use kvferry::Agent;
use kvferry_connector::{
    Announce, EngineId, GroupRule, IdleLimit, Limits, Model, Scheduler, SchedulerConfig, Stats,
    Worker, WorkerConfig, WorkerObserver,
};
use kvferry_proto::WireCode;
use kvferry_sys::sync::Mutex;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// Settings of both halves.
#[derive(Clone, Debug)]
pub struct KvferryAdapterConfig {
    /// See [`SchedulerConfig::timeout`].
    pub timeout: Duration,
    /// See [`SchedulerConfig::eager`]. If false, the tokens that a producer's request generated are its
    /// side data: four bytes per token, little-endian.
    pub eager: bool,
    /// See [`WorkerConfig::announce`].
    pub announce: Announce,
    /// Bounds of the protocol.
    pub limits: Limits,
    /// Whether the engine calls the worker halves per layer. With full CUDA graphs it calls them per
    /// step only.
    pub layer_events: bool,
    /// See [`SchedulerConfig::idle`].
    pub idle: Option<IdleLimit>,
    /// Number of the GPU whose memory has the caches; without one, they are in the agent's memory.
    pub gpu: Option<i32>,
}

impl Default for KvferryAdapterConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            eager: true,
            // Tests have small caches.
            announce: Announce::Layers { pieces: 2, least_bytes: 0 },
            limits: Limits::default(),
            layer_events: true,
            idle: None,
            gpu: None,
        }
    }
}

/// The connector of one engine: makes the halves and gives access to them.
#[derive(Clone, Debug)]
pub struct KvferryAdapter {
    config: KvferryAdapterConfig,
    engine: EngineConfig,
    agents: Vec<Agent>,
    scheduler: Arc<Mutex<Scheduler>>,
    /// The worker halves that have started.
    workers: Vec<Arc<OnceLock<Worker>>>,
}

impl KvferryAdapter {
    /// The connector of an engine whose ranks have these agents, in their order. The first agent's
    /// incarnation is the engine's id.
    ///
    /// # Panics
    /// If there are not as many agents as ranks.
    pub fn new(engine: &EngineConfig, agents: Vec<Agent>, config: KvferryAdapterConfig) -> Self {
        let ranks = engine.ranks().len();
        assert_eq!(agents.len(), ranks, "every rank has an agent");
        let groups = engine.model.groups.iter().zip(&engine.groups).map(|(group, cache)| {
            let block_tokens = u32::try_from(cache.block_tokens);
            let block_tokens = block_tokens.expect("tokens of a block are counted in 32 bits");
            GroupRule { kind: group.attention.kind(), block_tokens }
        });
        let scheduler = SchedulerConfig {
            groups: groups.collect(),
            ranks,
            timeout: config.timeout,
            eager: config.eager,
            recomputed_tokens: 0,
            null_block: Some(BlockId::NULL.0),
            idle: config.idle,
        };
        let id = EngineId(agents[0].incarnation().0);
        Self {
            config,
            engine: engine.clone(),
            agents,
            scheduler: Arc::new(Mutex::new(Scheduler::new(scheduler, id))),
            workers: (0..ranks).map(|_| Arc::default()).collect(),
        }
    }

    /// Makes the halves for vLLM's seam. To be called once.
    pub fn vllm(&self) -> Connector {
        let scheduler = self.scheduler.clone();
        let scheduler = vllm::Scheduler::new(scheduler, self.engine.ranks(), self.config.eager);
        let workers = (0..self.workers.len()).map(|rank| self.worker(rank));
        Connector {
            scheduler: Box::new(scheduler),
            workers: workers.map(|worker| Box::new(worker) as Box<_>).collect(),
        }
    }

    fn worker(&self, rank: usize) -> vllm::Worker {
        let KvferryAdapterConfig { announce, limits, layer_events, gpu, .. } = self.config.clone();
        vllm::Worker {
            agent: self.agents[rank].clone(),
            config: WorkerConfig {
                rank,
                model: Model::default(),
                announce,
                limits,
                producers: None,
            },
            layer_events,
            gpu,
            regions: vec![],
            half: self.workers[rank].clone(),
            layers: vec![],
            last: None,
            notes: None,
        }
    }

    /// `host:port` of a rank's agent. Any rank's can be a consumer's `remote_address`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn address(&self, rank: usize) -> &str {
        self.agents[rank].advertised()
    }

    /// See [`Worker::set_observer`].
    ///
    /// # Panics
    /// If there is no such rank, or its engine has not been set up yet.
    pub fn set_observer(&self, rank: usize, observer: Arc<dyn WorkerObserver>) {
        self.workers[rank].get().expect("the engine is set up").set_observer(observer);
    }

    /// See [`Scheduler::take_side_data`].
    pub fn take_side_data(&self, request: &str) -> Vec<Vec<u8>> {
        self.scheduler.lock().take_side_data(request)
    }

    /// See [`Scheduler::outcomes`].
    pub fn outcomes(&self) -> Vec<(WireCode, u64)> {
        self.scheduler.lock().outcomes().to_vec()
    }

    /// See [`Scheduler::take_stats`].
    pub fn take_stats(&self) -> Stats {
        self.scheduler.lock().take_stats()
    }

    /// Counts of what each half keeps, by its name and the gauge's.
    pub fn gauges(&self) -> Vec<(String, usize)> {
        let named = |half: &str, gauges: Vec<(&'static str, usize)>| {
            let name = |(name, value)| (format!("{half}: {name}"), value);
            gauges.into_iter().map(name).collect::<Vec<_>>()
        };
        let mut all = named("scheduler", self.scheduler.lock().gauges());
        for (rank, worker) in self.workers.iter().enumerate() {
            if let Some(worker) = worker.get() {
                all.extend(named(&format!("rank {rank}"), worker.gauges()));
            }
        }
        all
    }
}
