//! kvferry's connector behind both seams: adapters that translate, and decide nothing.
//!
//! A [`Ferry`] is one engine's: a [`Scheduler`] and, per rank, an [`Agent`] and a [`Worker`] whose
//! KV lies in the agent's memory ([`RegionMemory`]). The agents are the caller's, and with them
//! transports, addresses and secrets. The halves share nothing: what goes from one to the other
//! goes through the engine, as bytes.
//!
//! | call of the seam | becomes |
//! |---|---|
//! | `allocate_kv_memory` | a region that peers may read |
//! | `register_kv_caches` | [`Worker::start`] |
//! | `get_handshake_metadata`, `set_xfer_handshake_metadata` | [`Worker::card`], [`Scheduler::introduce`] |
//! | `get_num_new_matched_tokens` | [`Scheduler::matched`] |
//! | `update_state_after_alloc` | [`Scheduler::allocated`] |
//! | `build_connector_meta` | [`Scheduler::step`] |
//! | `handle_preemptions`; TensorRT-LLM: `bind_connector_meta` | [`Worker::obey`] |
//! | `start_load_kv` | [`Worker::fetch`] |
//! | `save_kv_layer` | [`Worker::layer_computed`], unless [`FerryConfig::layer_events`] is off |
//! | `wait_for_save` | [`Worker::step_computed`] |
//! | `get_transfer_results`; TensorRT-LLM: `get_finished` | [`Worker::reports`] |
//! | `update_connector_output` | [`Scheduler::reported`], [`Scheduler::sent`], [`Scheduler::received`] |
//! | `request_finished` | [`Scheduler::finished`] |
//!
//! # What TensorRT-LLM's seam lacks
//! * A way for the ranks to say something to the scheduler half. An exchange within the process
//!   takes the place of the collective calls that connectors make there: all ranks make the same
//!   calls in the same order.
//! * A way to say that a load failed. `get_finished` returns a
//!   [`WorkerFault`](crate::contract::trt::WorkerFault) that names the request, the code and the
//!   reason, and the engine ends: anything else would claim wrong bytes.
//! * Parameters of a response: a consumer has to be given the transfer's id and the producer's
//!   address by whoever gave the producer the id.

mod memory;
mod trt;
mod vllm;

pub use memory::RegionMemory;

use crate::config::EngineConfig;
use crate::contract;
use crate::contract::RequestView;
use crate::layout::{BlockId, KvCaches};
use crate::memory::KvMemory;
use crate::request::{FinishReason, RequestStatus};
use crate::worker::LayerEvent;
use kvferry::{Access, Agent, Region};
use kvferry_connector::{
    Announce, Computed, EngineId, Finish, GroupRule, Limits, NULL_BLOCK, Scheduler,
    SchedulerConfig, Watch, Worker, WorkerConfig,
};
use kvferry_proto::WireCode;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// How the halves of an engine work.
#[derive(Clone, Debug)]
pub struct FerryConfig {
    /// See [`SchedulerConfig::timeout`].
    pub timeout: Duration,
    /// See [`SchedulerConfig::eager`]. If not, what a producer's request has said goes along as side
    /// data, four bytes per token, the lowest first.
    pub eager: bool,
    /// See [`WorkerConfig::announce`].
    pub announce: Announce,
    /// Bounds of the protocol.
    pub limits: Limits,
    /// Whether the worker halves are told of layers, and not only of steps: with full CUDA graphs
    /// engines make no calls per layer.
    pub layer_events: bool,
}

impl Default for FerryConfig {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(30),
            eager: true,
            announce: Announce::Layers { pieces: 2 },
            limits: Limits::default(),
            layer_events: true,
        }
    }
}

/// One engine's connector, for whoever gives its halves to the engine and looks into them.
#[derive(Clone, Debug)]
pub struct Ferry {
    config: FerryConfig,
    engine: EngineConfig,
    agents: Vec<Agent>,
    scheduler: Arc<Mutex<Scheduler>>,
    /// Those that have started.
    workers: Vec<Arc<OnceLock<Worker>>>,
}

impl Ferry {
    /// The connector of an engine whose ranks, in their order, have these agents. The engine's life
    /// is that of its first rank's agent.
    ///
    /// # Panics
    /// If there are not as many agents as ranks.
    pub fn new(engine: &EngineConfig, agents: Vec<Agent>, config: FerryConfig) -> Self {
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

    /// Both halves as vLLM wants them; once.
    pub fn vllm(&self) -> contract::vllm::Connector {
        let scheduler = self.scheduler.clone();
        let scheduler = vllm::Scheduler::new(scheduler, self.engine.ranks(), self.config.eager);
        let workers = (0..self.workers.len()).map(|rank| vllm::Worker::new(self.half(rank)));
        contract::vllm::Connector {
            scheduler: Box::new(scheduler),
            workers: workers.map(|worker| Box::new(worker) as Box<_>).collect(),
        }
    }

    /// Both halves as TensorRT-LLM wants them; once.
    pub fn trt(&self) -> contract::trt::Connector {
        let exchange = trt::Exchange::new(self.workers.len(), self.scheduler.clone());
        let scheduler = trt::Scheduler::new(self.scheduler.clone(), self.config.eager);
        let workers = (0..self.workers.len())
            .map(|rank| trt::Worker::new(self.half(rank), rank, exchange.clone()));
        contract::trt::Connector {
            scheduler: Box::new(scheduler),
            workers: workers.map(|worker| Box::new(worker) as Box<_>).collect(),
        }
    }

    fn half(&self, rank: usize) -> RankHalf {
        let FerryConfig { announce, limits, layer_events, .. } = self.config.clone();
        RankHalf {
            agent: self.agents[rank].clone(),
            config: WorkerConfig { rank, announce, limits },
            layer_events,
            regions: vec![],
            worker: self.workers[rank].clone(),
            layers: vec![],
            last: None,
        }
    }

    /// Where a rank's agent listens: any rank's is a consumer's `remote_address`.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn address(&self, rank: usize) -> &str {
        self.agents[rank].advertised()
    }

    /// See [`Worker::watch`].
    ///
    /// # Panics
    /// If there is no such rank, or its engine has not been set up yet.
    pub fn watch(&self, rank: usize, watch: Arc<dyn Watch>) {
        self.workers[rank].get().expect("the engine is set up").watch(watch);
    }

    /// See [`Scheduler::take_side_data`].
    pub fn take_side_data(&self, request: &str) -> Vec<Vec<u8>> {
        lock(&self.scheduler).take_side_data(request)
    }

    /// See [`Scheduler::outcomes`].
    pub fn outcomes(&self) -> Vec<(WireCode, u64)> {
        lock(&self.scheduler).outcomes().to_vec()
    }

    /// What each half keeps, by its name and that of the gauge.
    pub fn gauges(&self) -> Vec<(String, usize)> {
        let named = |half: &str, gauges: Vec<(&'static str, usize)>| {
            let name = |(name, value)| (format!("{half}: {name}"), value);
            gauges.into_iter().map(name).collect::<Vec<_>>()
        };
        let mut all = named("scheduler", lock(&self.scheduler).gauges());
        for (rank, worker) in self.workers.iter().enumerate() {
            if let Some(worker) = worker.get() {
                all.extend(named(&format!("rank {rank}"), worker.gauges()));
            }
        }
        all
    }
}

/// What both seams' worker halves have in common.
struct RankHalf {
    agent: Agent,
    config: WorkerConfig,
    layer_events: bool,
    /// One per storage of the rank.
    regions: Vec<Region>,
    worker: Arc<OnceLock<Worker>>,
    /// The rank's layers, counted over the model.
    layers: Vec<usize>,
    /// Of the last layer of this step.
    last: Option<LayerEvent>,
}

impl RankHalf {
    fn allocate(&mut self, len: usize) -> Arc<dyn KvMemory> {
        let region = self.agent.allocate(len, Access::READ).expect("there is memory for the cache");
        self.regions.push(region.clone());
        Arc::new(RegionMemory::new(region))
    }

    fn register(&mut self, caches: &KvCaches) {
        let regions: Vec<_> = self.regions.iter().map(|it| (it.id(), it.len() as u64)).collect();
        let layout = caches.layout.layout(&regions).expect("the regions are the rank's storages");
        let worker = Worker::start(&self.agent, layout, &self.regions, self.config.clone());
        let started = self.worker.set(worker.expect("the agent is nobody else's"));
        started.expect("caches are registered once");
        self.layers = caches.layout.layers.iter().map(|layer| layer.index).collect();
    }

    fn worker(&self) -> &Worker {
        self.worker.get().expect("caches are registered first")
    }

    fn obey(&self, orders: &[u8]) {
        self.worker().obey(orders).expect("the scheduler half's orders");
    }

    fn layer_computed(&mut self, layer: usize, computed: &LayerEvent) {
        if self.layer_events {
            let place = self.layers.iter().position(|it| *it == layer);
            let place = place.expect("hooks are called of a rank's own layers");
            self.worker().layer_computed(place, Some(Box::new(computed.clone())));
        }
        self.last = Some(computed.clone());
    }

    fn step_computed(&mut self) {
        let last = self.last.take().map(|event| Box::new(event) as Box<dyn Computed>);
        self.worker().step_computed(last);
    }
}

impl Computed for LayerEvent {
    fn is_ready(&self) -> bool {
        Self::is_ready(self)
    }

    fn wait(&self) {
        Self::wait(self);
    }
}

fn lock<T>(shared: &Mutex<T>) -> MutexGuard<'_, T> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Blocks as orders have them.
fn numbers(blocks: &[Vec<BlockId>]) -> Vec<Vec<u32>> {
    let number = |block: &BlockId| if block.is_null() { NULL_BLOCK } else { block.0 };
    blocks.iter().map(|group| group.iter().map(number).collect()).collect()
}

fn request<'a>(id: &'a str, view: &RequestView<'a>) -> kvferry_connector::Request<'a> {
    kvferry_connector::Request { id, prompt_tokens: view.prompt.len() as u64, params: view.params }
}

/// How a request ended that did.
fn finish(view: &RequestView<'_>) -> Finish {
    match view.status {
        RequestStatus::Finished(FinishReason::Length) => Finish::Length,
        RequestStatus::Finished(FinishReason::Stop) => Finish::Stop,
        RequestStatus::Finished(FinishReason::Error) => Finish::Error,
        _ => Finish::Abort,
    }
}

/// What a request has said.
fn said(view: &RequestView<'_>) -> Vec<u8> {
    view.tokens[view.prompt.len()..].iter().flat_map(|token| token.to_le_bytes()).collect()
}
