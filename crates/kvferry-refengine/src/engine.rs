//! The engine: a scheduler, its ranks, and the connector between.

use crate::config::{ConfigError, EngineConfig, Launch, Rank};
use crate::contract::vllm::{ConnectorMeta, ConnectorOutput};
use crate::contract::{Channel, Violation, trt, vllm};
use crate::layout::{BlockId, KvCaches, RankLayout};
use crate::lockstep::lockstep;
use crate::memory::{HeapMemory, KvMemory};
use crate::model::Attention;
use crate::quorum::{Countdown, Intersection, Report};
use crate::request::{Output, Request, RequestId, RequestStatus, SubmitError};
use crate::scheduler::{Plan, Scheduler, Seam};
use crate::worker::{Forward, LayerEvent, Ranks};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;

/// What moves an engine's KV.
#[derive(Debug)]
pub enum Connector {
    /// Nobody.
    None,
    /// Driven as by vLLM.
    Vllm(vllm::Connector),
    /// Driven as by TensorRT-LLM.
    Trt(trt::Connector),
}

/// Why an engine cannot go on as if nothing were wrong.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The connector broke a promise. The step was completed without it; there may be more of them
    /// in [`Engine::violations`].
    #[error(transparent)]
    Violation(#[from] Violation),
    /// TensorRT-LLM: a worker gave up. Nothing more can be done with this engine.
    #[error("rank {rank}: {fault}")]
    Worker {
        /// Which rank.
        rank: Rank,
        /// Why.
        fault: trt::WorkerFault,
    },
}

/// Something that should be nobody's, and is not.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("requests {requests:?} and blocks {blocks:?} (pool, block) are still held")]
pub struct Leak {
    /// Requests that live, or whose blocks are held.
    pub requests: Vec<RequestId>,
    /// Blocks with users.
    pub blocks: Vec<(usize, BlockId)>,
}

/// What a step did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepReport {
    /// Tokens computed.
    pub tokens: usize,
    /// Requests that have not ended.
    pub unfinished: usize,
    /// Requests that have ended, and whose blocks the connector still holds.
    pub held: usize,
}

enum Workers {
    None,
    Vllm { workers: Vec<Box<dyn vllm::WorkerConnector>>, countdown: Countdown },
    Trt { workers: Vec<Box<dyn trt::WorkerConnector>>, saved: Intersection, loaded: Intersection },
}

/// An engine.
pub struct Engine {
    config: EngineConfig,
    ranks: Arc<Ranks>,
    scheduler: Scheduler,
    workers: Workers,
    scribbles: u64,
    violations: Vec<Violation>,
    events: Vec<serde_json::Value>,
}

impl Engine {
    /// Sets an engine up, and introduces its connector's halves to it and each other.
    ///
    /// # Errors
    /// If numbers do not fit, or the connector not the engine.
    pub fn new(config: EngineConfig, connector: Connector) -> Result<Self, ConfigError> {
        config.validate()?;
        let ranks = config.ranks();
        let (seam, mut workers) = match connector {
            Connector::None => (Seam::None, Workers::None),
            Connector::Vllm(vllm::Connector { scheduler, workers }) => {
                let workers = Workers::Vllm { workers, countdown: Countdown::default() };
                (Seam::Vllm(scheduler), workers)
            }
            Connector::Trt(trt::Connector { scheduler, workers }) => {
                let saved = Intersection::new(Channel::Sending);
                let loaded = Intersection::new(Channel::Recving);
                (Seam::Trt(scheduler), Workers::Trt { workers, saved, loaded })
            }
        };
        let count = match &workers {
            Workers::None => ranks.len(),
            Workers::Vllm { workers, .. } => workers.len(),
            Workers::Trt { workers, .. } => workers.len(),
        };
        if count != ranks.len() {
            return Err(ConfigError::Workers { workers: count, ranks: ranks.len() });
        }
        if let Seam::Trt(_) = seam {
            let state = config.model.groups.iter().any(|it| it.attention == Attention::State);
            for (refused, what) in [(config.pp > 1, "PP"), (state, "states")] {
                if refused {
                    return Err(ConfigError::NotWithTrt { what });
                }
            }
        }
        let caches = workers.caches(&config, &ranks)?;
        let mut scheduler = Scheduler::new(&config, seam);
        workers.introduce(&caches, &mut scheduler);
        Ok(Self {
            ranks: Arc::new(Ranks::new(config.model.clone(), config.tp, caches)),
            config,
            scheduler,
            workers,
            scribbles: 0,
            violations: vec![],
            events: vec![],
        })
    }

    /// How it was set up.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Takes a request.
    ///
    /// # Errors
    /// If it makes no sense, or could never be served. The connector is then not told of it: see
    /// [`Engine::reject`].
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        self.scheduler.submit(request)
    }

    /// Refuses a request before it could be scheduled, and tells the connector, as if it had been
    /// aborted: so that the other side frees what it keeps for it. vLLM's
    /// `notify_kv_transfer_request_rejected`.
    ///
    /// # Errors
    /// If a live request is called so.
    pub fn reject(&mut self, request: Request) -> Result<(), SubmitError> {
        self.scheduler.reject(request)
    }

    /// Aborts a request, in whichever state; whether there was one to abort.
    pub fn abort(&mut self, id: &RequestId) -> bool {
        self.scheduler.abort(id)
    }

    /// Where a request is; `None` once it has ended and nobody holds its blocks.
    pub fn status(&self, id: &RequestId) -> Option<RequestStatus> {
        self.scheduler.status(id)
    }

    /// Per group, the blocks of a request.
    pub fn blocks(&self, id: &RequestId) -> Option<&[Vec<BlockId>]> {
        self.scheduler.tables(id)
    }

    /// One rank's caches.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn caches(&self, rank: Rank) -> &Arc<KvCaches> {
        &self.ranks.caches[rank.pp * self.config.tp + rank.tp]
    }

    /// What requests have said since the last call.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.scheduler.outputs)
    }

    /// The connector's cache events since the last call.
    pub fn take_events(&mut self) -> Vec<serde_json::Value> {
        std::mem::take(&mut self.events)
    }

    /// Every promise that the connector has broken so far.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// How often a request has lost its blocks to others.
    pub fn preemptions(&self) -> u64 {
        self.scheduler.preemptions
    }

    /// Whether another step would do anything.
    pub fn has_work(&mut self) -> bool {
        if self.scheduler.unfinished() > 0 || self.scheduler.has_news() {
            return true;
        }
        match self.scheduler.seam() {
            Seam::None => false,
            Seam::Vllm(connector) => connector.has_pending_work(),
            // TensorRT-LLM's loop goes on as long as a request is in transmission.
            Seam::Trt(_) => self.scheduler.held() > 0,
        }
    }

    /// Forgets all cached blocks, if nobody uses any, and has the connector forget its own;
    /// whether that was possible.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let own = self.scheduler.cache.reset();
        let theirs = match self.scheduler.seam() {
            Seam::Vllm(connector) => connector.reset_cache(),
            Seam::None | Seam::Trt(_) => true,
        };
        own && theirs
    }

    /// Whether everything has been given back.
    ///
    /// # Errors
    /// What has not.
    pub fn check_empty(&self) -> Result<(), Leak> {
        let (requests, blocks) = (self.scheduler.live(), self.scheduler.cache.used());
        if requests.is_empty() && blocks.is_empty() {
            Ok(())
        } else {
            Err(Leak { requests, blocks })
        }
    }

    /// One step: schedules, computes, hears what the ranks report.
    ///
    /// # Errors
    /// The first promise that the connector has broken in it.
    pub fn step(&mut self) -> Result<StepReport, EngineError> {
        let plan = self.scheduler.schedule();
        let batch = self.scheduler.batch(&plan);
        let forward = (!batch.is_empty()).then(|| Arc::new(Forward::new(&self.ranks, batch)));
        match &self.workers {
            Workers::None => {
                let void = self.drain_void();
                self.ranks.caches.iter().for_each(|caches| scribble(caches, &void));
                let sampled = forward.map_or_else(Vec::new, |forward| forward.finish());
                self.scheduler.update(&plan, &sampled, &[]);
            }
            Workers::Vllm { .. } => self.step_vllm(&plan, forward.as_ref()),
            Workers::Trt { .. } => self.step_trt(&plan, forward.as_ref())?,
        }
        let new = std::mem::take(&mut self.scheduler.violations);
        let first = new.first().cloned();
        self.violations.extend(new);
        match first {
            Some(violation) => Err(violation.into()),
            None => Ok(StepReport {
                tokens: plan.tokens(),
                unfinished: self.scheduler.unfinished(),
                held: self.scheduler.held(),
            }),
        }
    }

    /// Blocks whose contents nobody may count on any more: they are filled with what fits nothing,
    /// so that bytes that were not loaded are never right by chance.
    fn drain_void(&mut self) -> Vec<Void> {
        let void = self.scheduler.cache.drain_void().into_iter();
        void.map(|(group, block)| {
            self.scribbles += 1;
            Void { group, block, seed: self.scribbles }
        })
        .collect()
    }

    fn step_vllm(&mut self, plan: &Plan, forward: Option<&Arc<Forward>>) {
        let output = self.scheduler.vllm_output(plan);
        let void = self.drain_void();
        let Seam::Vllm(connector) = self.scheduler.seam() else { return };
        let meta: ConnectorMeta = connector.build_connector_meta(&output).into();
        let expected = connector.get_finished_count().unwrap_or(self.ranks.caches.len());
        let Workers::Vllm { workers, countdown } = &mut self.workers else { return };

        let phases = vllm_phases(&self.ranks, self.config.launch, forward, plan.has_sync_loads);
        let mut halves: Vec<_> = self
            .ranks
            .caches
            .iter()
            .zip(workers)
            .map(|(caches, worker)| VllmRank {
                rank: caches.layout.rank,
                caches,
                worker: &mut **worker,
                report: Report::default(),
            })
            .collect();
        let ranks = &self.ranks;
        lockstep(self.config.threads, &mut halves, &phases, |half, phase, first| match phase {
            Phase::Scribble => scribble(half.caches, &void),
            phase => half.perform(*phase, first, ranks, forward, &meta, &plan.finished),
        });
        let reports = halves.into_iter().map(|half| (half.rank, half.report)).collect();
        let sampled = forward.map_or_else(Vec::new, |forward| forward.finish());

        let blocks: Vec<_> = self.config.groups.iter().map(|group| group.blocks).collect();
        let output = countdown.count(reports, expected, &blocks, &mut self.scheduler);
        self.scheduler.update(plan, &sampled, &output.invalid_block_ids);
        if let Seam::Vllm(connector) = self.scheduler.seam() {
            if !output.is_empty() {
                connector.update_connector_output(&output);
            }
            self.events.extend(connector.take_events());
        }
        self.scheduler.transferred(&output);
    }

    fn step_trt(&mut self, plan: &Plan, forward: Option<&Arc<Forward>>) -> Result<(), EngineError> {
        let output = self.scheduler.trt_output(plan);
        let Seam::Trt(connector) = self.scheduler.seam() else { return Ok(()) };
        let meta: Arc<[u8]> = connector.build_connector_meta(&output).into();
        let void = self.drain_void();
        self.ranks.caches.iter().for_each(|caches| scribble(caches, &void));
        let Workers::Trt { workers, saved, loaded } = &mut self.workers else { return Ok(()) };

        let phases = trt_phases(&self.ranks, self.config.launch, forward);
        let mut halves: Vec<_> = self
            .ranks
            .caches
            .iter()
            .zip(workers)
            .map(|(caches, worker)| TrtRank {
                rank: caches.layout.rank,
                worker: &mut **worker,
                fault: None,
                finished: (vec![], vec![]),
            })
            .collect();
        let ranks = &self.ranks;
        lockstep(self.config.threads, &mut halves, &phases, |half, phase, first| {
            half.perform(*phase, first, ranks, forward, &meta);
        });
        check_faults(&halves)?;
        let sampled = forward.map_or_else(Vec::new, |forward| forward.finish());
        self.scheduler.update(plan, &sampled, &[]);

        let saving = self.scheduler.take_saving();
        lockstep(self.config.threads, &mut halves, &[()], |half, (), _| {
            match half.worker.get_finished(&saving, &plan.loading) {
                Ok(finished) => half.finished = finished,
                Err(fault) => half.fault = Some(fault),
            }
        });
        check_faults(&halves)?;
        saved.hand_in(&saving);
        loaded.hand_in(&plan.loading);
        for half in &halves {
            saved.report(half.rank, &half.finished.0, &mut self.scheduler);
            loaded.report(half.rank, &half.finished.1, &mut self.scheduler);
        }
        let ids = |numbers: Vec<u64>, scheduler: &Scheduler| {
            numbers.into_iter().filter_map(|number| scheduler.number_to_id(number)).collect()
        };
        let count = halves.len();
        let output = ConnectorOutput {
            finished_sending: ids(saved.take_complete(count), &self.scheduler),
            finished_recving: ids(loaded.take_complete(count), &self.scheduler),
            ..ConnectorOutput::default()
        };
        self.scheduler.transferred(&output);
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Workers::Vllm { workers, .. } = &mut self.workers {
            for worker in workers {
                worker.shutdown();
            }
        }
        if let Seam::Vllm(connector) = self.scheduler.seam() {
            connector.shutdown();
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine")
            .field("ranks", &self.ranks.caches.len())
            .field("unfinished", &self.scheduler.unfinished())
            .field("held", &self.scheduler.held())
            .finish_non_exhaustive()
    }
}

struct Void {
    group: usize,
    block: BlockId,
    seed: u64,
}

fn scribble(caches: &KvCaches, void: &[Void]) {
    for Void { group, block, seed } in void {
        let Rank { pp, tp } = caches.layout.rank;
        caches.scribble(*group, *block, seed << 32 | (pp as u64) << 16 | tp as u64);
    }
}

fn check_faults(halves: &[TrtRank<'_>]) -> Result<(), EngineError> {
    for half in halves {
        if let Some(fault) = &half.fault {
            return Err(EngineError::Worker { rank: half.rank, fault: fault.clone() });
        }
    }
    Ok(())
}

impl Workers {
    fn caches(
        &mut self,
        config: &EngineConfig,
        ranks: &[Rank],
    ) -> Result<Vec<Arc<KvCaches>>, ConfigError> {
        let mut all = vec![];
        for (at, rank) in ranks.iter().copied().enumerate() {
            let layout = RankLayout::new(config, rank);
            let mut storages = vec![];
            for (storage, len) in layout.storages.iter().copied().enumerate() {
                let memory = match self {
                    Self::None => None,
                    Self::Vllm { workers, .. } => {
                        workers[at].allocate_kv_memory(rank, storage, len)
                    }
                    Self::Trt { workers, .. } => workers[at].allocate_kv_memory(rank, storage, len),
                };
                let memory: Arc<dyn KvMemory> =
                    memory.unwrap_or_else(|| Arc::new(HeapMemory::new(len)));
                if memory.bytes() != len {
                    let (wanted_bytes, len_bytes) = (len, memory.bytes());
                    return Err(ConfigError::Memory { rank, len_bytes, wanted_bytes });
                }
                storages.push(memory);
            }
            all.push(Arc::new(KvCaches { layout, storages }));
        }
        Ok(all)
    }

    fn introduce(&mut self, caches: &[Arc<KvCaches>], scheduler: &mut Scheduler) {
        match self {
            Self::None => {}
            Self::Trt { workers, .. } => {
                for (worker, caches) in workers.iter_mut().zip(caches) {
                    worker.register_kv_caches(caches);
                }
            }
            Self::Vllm { workers, .. } => {
                for (worker, caches) in workers.iter_mut().zip(caches) {
                    worker.register_kv_caches(caches);
                }
                let pins = scheduler.cache.pins();
                let Seam::Vllm(connector) = scheduler.seam() else { return };
                connector.bind_block_pools(pins);
                connector.get_finished_count();
                let handshakes: Vec<_> = workers
                    .iter_mut()
                    .zip(caches)
                    .map(|(worker, caches)| (caches.layout.rank, worker.get_handshake_metadata()))
                    .collect();
                connector.set_xfer_handshake_metadata(&handshakes);
            }
        }
    }
}

/// What all ranks do together, one after the other; each is over on all ranks before the next
/// begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    HandlePreemptions,
    Scribble,
    Bind,
    StartLoad,
    WaitForLayer(usize),
    Compute(usize),
    SaveLayer(usize),
    ForwardDone,
    WaitForSave,
    Report,
}

fn vllm_phases(
    ranks: &Ranks,
    launch: Launch,
    forward: Option<&Arc<Forward>>,
    has_sync_loads: bool,
) -> Vec<Phase> {
    let mut phases = vec![Phase::HandlePreemptions, Phase::Scribble, Phase::Bind];
    let layers = layer_phases(ranks, launch, forward);
    if has_sync_loads {
        phases.push(Phase::StartLoad);
        phases.extend(layers);
    } else {
        // What is only loaded for later steps is begun once the computing has been launched.
        phases.extend(layers);
        phases.push(Phase::StartLoad);
    }
    phases.extend([Phase::WaitForSave, Phase::Report]);
    phases
}

fn trt_phases(ranks: &Ranks, launch: Launch, forward: Option<&Arc<Forward>>) -> Vec<Phase> {
    let mut phases = vec![Phase::Bind, Phase::StartLoad];
    phases.extend(layer_phases(ranks, launch, forward));
    if forward.is_some() {
        phases.push(Phase::ForwardDone);
    }
    phases.push(Phase::WaitForSave);
    phases
}

/// What is launched and not computed in a phase is computed when all are over, unless somebody
/// waits for it.
fn layer_phases(ranks: &Ranks, launch: Launch, forward: Option<&Arc<Forward>>) -> Vec<Phase> {
    let layers = if forward.is_some() { 0..ranks.model.layers.len() } else { 0..0 };
    let mut phases = vec![];
    for layer in layers {
        phases.push(Phase::WaitForLayer(layer));
        if launch == Launch::Eager {
            phases.push(Phase::Compute(layer));
        }
        phases.push(Phase::SaveLayer(layer));
    }
    phases
}

/// Whether a rank holds a layer.
fn holds(ranks: &Ranks, rank: Rank, layer: usize) -> bool {
    ranks.places[layer].0 == rank.pp
}

struct VllmRank<'a> {
    rank: Rank,
    caches: &'a KvCaches,
    worker: &'a mut dyn vllm::WorkerConnector,
    report: Report,
}

impl VllmRank<'_> {
    fn perform(
        &mut self,
        phase: Phase,
        first: bool,
        ranks: &Ranks,
        forward: Option<&Arc<Forward>>,
        meta: &ConnectorMeta,
        finished: &[RequestId],
    ) {
        match phase {
            Phase::HandlePreemptions => self.worker.handle_preemptions(meta),
            Phase::Bind => self.worker.bind_connector_metadata(meta),
            Phase::StartLoad => self.worker.start_load_kv(),
            Phase::WaitForLayer(layer) if holds(ranks, self.rank, layer) => {
                self.worker.wait_for_layer_load(layer);
            }
            Phase::SaveLayer(layer) if holds(ranks, self.rank, layer) => {
                let forward = forward.expect("layers are of a forward pass").clone();
                self.worker.save_kv_layer(layer, &LayerEvent { forward, layer });
            }
            Phase::Compute(layer) if first => {
                forward.expect("layers are of a forward pass").run_through(layer);
            }
            Phase::WaitForSave => self.worker.wait_for_save(),
            Phase::Report => {
                let results = self.worker.get_transfer_results(finished);
                let invalid = self.worker.get_block_ids_with_load_errors();
                let meta = self.worker.build_connector_worker_meta();
                self.report = Report { results, invalid, meta };
                self.worker.clear_connector_metadata();
            }
            Phase::WaitForLayer(_)
            | Phase::SaveLayer(_)
            | Phase::Compute(_)
            | Phase::Scribble
            | Phase::ForwardDone => {}
        }
    }
}

struct TrtRank<'a> {
    rank: Rank,
    worker: &'a mut dyn trt::WorkerConnector,
    fault: Option<trt::WorkerFault>,
    finished: (Vec<u64>, Vec<u64>),
}

impl TrtRank<'_> {
    fn perform(
        &mut self,
        phase: Phase,
        first: bool,
        ranks: &Ranks,
        forward: Option<&Arc<Forward>>,
        meta: &Arc<[u8]>,
    ) {
        match phase {
            Phase::Bind => self.worker.bind_connector_meta(meta),
            Phase::StartLoad => {
                if let Err(fault) = self.worker.start_load_kv() {
                    self.fault = Some(fault);
                }
            }
            Phase::WaitForLayer(layer) if holds(ranks, self.rank, layer) => {
                self.worker.wait_for_layer_load(layer);
            }
            Phase::SaveLayer(layer) if holds(ranks, self.rank, layer) => {
                let forward = forward.expect("layers are of a forward pass").clone();
                self.worker.save_kv_layer(layer, &LayerEvent { forward, layer });
            }
            Phase::Compute(layer) if first => {
                forward.expect("layers are of a forward pass").run_through(layer);
            }
            Phase::ForwardDone => self.worker.forward_done(),
            Phase::WaitForSave => self.worker.wait_for_save(),
            Phase::WaitForLayer(_)
            | Phase::SaveLayer(_)
            | Phase::Compute(_)
            | Phase::HandlePreemptions
            | Phase::Scribble
            | Phase::Report => {}
        }
    }
}
