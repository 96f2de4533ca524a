//! The engine: a scheduler, its ranks, and the connector between them.

mod offload;
mod phases;
mod workers;

use crate::config::{ConfigError, EngineConfig, Rank};
use crate::contract::vllm::ConnectorMeta;
use crate::contract::{Violation, vllm};
use crate::layout::{BlockId, KvCaches};
use crate::lockstep::lockstep;
use crate::quorum::{Countdown, Report};
use crate::request::{Output, Request, RequestId, RequestStatus, SubmitError};
use crate::scheduler::{Plan, Scheduler, Seam};
use crate::worker::{Forward, Ranks};
use kvferry_blocks::RetentionConfig;
use phases::{Phase, Step, VllmRank, vllm_phases};
use std::fmt;
use std::sync::Arc;
use thiserror::Error;
use workers::Workers;

/// The connector of an engine.
#[derive(Debug)]
pub enum Connector {
    /// No connector.
    None,
    /// Called as by vLLM.
    Vllm(vllm::Connector),
}

/// Requests and blocks that were not given back.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("requests {requests:?} and blocks {blocks:?} (pool, block) are still held")]
pub struct Leak {
    /// Requests that are live, or whose blocks are held.
    pub requests: Vec<RequestId>,
    /// Blocks with users, as (pool, block). With a block manager, also blocks that copies concern; it does not say which.
    pub blocks: Vec<(usize, BlockId)>,
}

/// The result of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepReport {
    /// Tokens computed.
    pub tokens: usize,
    /// Requests that have not ended.
    pub unfinished: usize,
    /// Ended requests whose blocks the connector still holds.
    pub held: usize,
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
    on_layer: Option<LayerHook>,
}

/// Called with each layer before it is computed (false), and once it has been launched (true).
type LayerHook = Box<dyn Fn(usize, bool) + Send + Sync>;

impl Engine {
    /// Sets up an engine and its connector's halves.
    ///
    /// # Errors
    /// The settings contradict each other or the connector.
    pub fn new(config: EngineConfig, connector: Connector) -> Result<Self, ConfigError> {
        config.validate()?;
        let ranks = config.ranks();
        let (seam, mut workers) = match connector {
            Connector::None => (Seam::None, Workers::None),
            Connector::Vllm(vllm::Connector { scheduler, workers }) => {
                let (count, ranks) = (workers.len(), ranks.len());
                if count != ranks {
                    return Err(ConfigError::Workers { workers: count, ranks });
                }
                let workers = Workers::Vllm { workers, countdown: Countdown::default() };
                (Seam::Vllm(scheduler), workers)
            }
        };
        let caches = workers.caches(&config, &ranks)?;
        let mut scheduler = Scheduler::new(&config, seam);
        workers.register(&caches, &mut scheduler);
        Ok(Self {
            ranks: Arc::new(Ranks::new(config.model.clone(), config.tp, caches)),
            config,
            scheduler,
            workers,
            scribbles: 0,
            violations: vec![],
            events: vec![],
            on_layer: None,
        })
    }

    /// The engine's settings.
    pub fn config(&self) -> &EngineConfig {
        &self.config
    }

    /// Submits a request.
    ///
    /// # Errors
    /// The request is invalid, or could never be served. The connector does not get it then: see
    /// [`Engine::reject`].
    pub fn submit(&mut self, request: Request) -> Result<(), SubmitError> {
        self.scheduler.submit(request, RetentionConfig::default())
    }

    /// Rejects a request before it is scheduled. The connector gets it as aborted, so that the other side
    /// frees the request's KV. vLLM's `notify_kv_transfer_request_rejected`.
    ///
    /// # Errors
    /// A live request has this id.
    pub fn reject(&mut self, request: Request) -> Result<(), SubmitError> {
        self.scheduler.reject(request)
    }

    /// Aborts a request in any state. False if it is unknown or has ended.
    pub fn abort(&mut self, id: &RequestId) -> bool {
        self.scheduler.abort(id)
    }

    /// The state of a request; `None` once it has ended and its blocks are free.
    pub fn status(&self, id: &RequestId) -> Option<RequestStatus> {
        self.scheduler.status(id)
    }

    /// The blocks of a request, per group.
    pub fn blocks(&self, id: &RequestId) -> Option<&[Vec<BlockId>]> {
        self.scheduler.tables(id)
    }

    /// Caches of a rank.
    ///
    /// # Panics
    /// If there is no such rank.
    pub fn caches(&self, rank: Rank) -> &Arc<KvCaches> {
        &self.ranks.caches[rank.pp * self.config.tp + rank.tp]
    }

    /// Takes the outputs since the last call.
    pub fn take_outputs(&mut self) -> Vec<Output> {
        std::mem::take(&mut self.scheduler.outputs)
    }

    /// Takes the connector's cache events since the last call.
    pub fn take_events(&mut self) -> Vec<serde_json::Value> {
        std::mem::take(&mut self.events)
    }

    /// Calls `hook` with each layer of a step behind vLLM's seam, on the thread of the first rank: before
    /// the layer is computed with false, and once it has been launched with true. The connector learns of
    /// the layer afterwards.
    pub fn on_layer(&mut self, hook: impl Fn(usize, bool) + Send + Sync + 'static) {
        self.on_layer = Some(Box::new(hook));
    }

    /// Breaches of the contract so far.
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// Number of times that a request has lost its blocks to another.
    pub fn preemptions(&self) -> u64 {
        self.scheduler.preemptions
    }

    /// Whether another step would do anything.
    pub fn has_work(&mut self) -> bool {
        if self.scheduler.unfinished() > 0 || self.scheduler.has_news() {
            return true;
        }
        match &mut self.scheduler.seam {
            Seam::None => false,
            Seam::Vllm(connector) => connector.has_pending_work(),
        }
    }

    /// Empties the prefix cache and the connector's. False if blocks are in use in either.
    pub fn reset_prefix_cache(&mut self) -> bool {
        let own = match &mut self.scheduler.managed {
            Some(managed) => managed.manager.reset().is_ok(),
            None => self.scheduler.cache.reset(),
        };
        let theirs = match &mut self.scheduler.seam {
            Seam::None => true,
            Seam::Vllm(connector) => connector.reset_cache(),
        };
        own && theirs
    }

    /// Checks that all requests and blocks have been given back.
    ///
    /// # Errors
    /// Those that have not.
    pub fn check_empty(&self) -> Result<(), Leak> {
        let requests = self.scheduler.live();
        let blocks = match &self.scheduler.managed {
            Some(managed) => managed.used(),
            None => self.scheduler.cache.used(),
        };
        if requests.is_empty() && blocks.is_empty() {
            Ok(())
        } else {
            Err(Leak { requests, blocks })
        }
    }

    /// One step: schedules, computes, and counts what the ranks report.
    ///
    /// # Errors
    /// The first breach of the contract in this step. The step is complete; [`Engine::violations`] may have
    /// more.
    pub fn step(&mut self) -> Result<StepReport, Violation> {
        let plan = self.scheduler.schedule();
        let batch = self.scheduler.batch(&plan);
        let forward = (!batch.is_empty()).then(|| Arc::new(Forward::new(&self.ranks, batch)));
        match &self.workers {
            Workers::None => {
                let void = self.drain_void();
                self.ranks.caches.iter().for_each(|caches| scribble(caches, &void));
                let sampled = forward.map_or_else(Vec::new, |forward| forward.finish());
                self.scheduler.update(&plan, &sampled, &[]);
                self.scheduler.carry_out_actions();
            }
            Workers::Vllm { .. } => self.step_vllm(&plan, forward.as_ref()),
        }
        let new = std::mem::take(&mut self.scheduler.violations);
        let first = new.first().cloned();
        self.violations.extend(new);
        match first {
            Some(violation) => Err(violation),
            None => Ok(StepReport {
                tokens: plan.tokens(),
                unfinished: self.scheduler.unfinished(),
                held: self.scheduler.held(),
            }),
        }
    }

    /// Takes the blocks whose content became invalid. They are overwritten, so that a block that is not
    /// loaded never has the right bytes of an earlier request.
    fn drain_void(&mut self) -> Vec<VoidBlock> {
        let mut void = self.scheduler.cache.drain_void();
        if let Some(managed) = &mut self.scheduler.managed {
            void.append(&mut managed.void);
        }
        void.into_iter()
            .map(|(group, block)| {
                self.scribbles += 1;
                VoidBlock { group, block, seed: self.scribbles }
            })
            .collect()
    }

    fn step_vllm(&mut self, plan: &Plan, forward: Option<&Arc<Forward>>) {
        let output = self.scheduler.vllm_output(plan);
        let void = self.drain_void();
        let Seam::Vllm(connector) = &mut self.scheduler.seam else { return };
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
                caches,
                worker: &mut **worker,
                report: Report::default(),
            })
            .collect();
        let (step, on_layer) = (Step { ranks: &self.ranks, forward }, self.on_layer.as_ref());
        lockstep(self.config.threads, &mut halves, &phases, |half, phase, first| match phase {
            Phase::Scribble => scribble(half.caches, &void),
            Phase::Compute(layer) if first => step.compute(*layer),
            phase => {
                if let (true, Some(hook)) = (first, on_layer) {
                    match *phase {
                        Phase::WaitForLayer(layer) => hook(layer, false),
                        Phase::SaveLayer(layer) => hook(layer, true),
                        _ => {}
                    }
                }
                half.perform(*phase, &step, &meta, &plan.finished);
            }
        });
        let report = |half: VllmRank<'_>| (half.caches.layout.rank, half.report);
        let reports = halves.into_iter().map(report).collect();
        let sampled = forward.map_or_else(Vec::new, |forward| forward.finish());

        let blocks: Vec<_> = self.config.groups.iter().map(|group| group.blocks).collect();
        let output = countdown.count(reports, expected, &blocks, &mut self.scheduler);
        self.scheduler.update(plan, &sampled, &output.invalid_block_ids);
        if let Seam::Vllm(connector) = &mut self.scheduler.seam {
            if !output.is_empty() {
                connector.update_connector_output(&output);
            }
            self.events.extend(connector.take_events());
        }
        self.scheduler.transferred(&output);
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        if let Workers::Vllm { workers, .. } = &mut self.workers {
            for worker in workers {
                worker.shutdown();
            }
        }
        if let Seam::Vllm(connector) = &mut self.scheduler.seam {
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

struct VoidBlock {
    group: usize,
    block: BlockId,
    seed: u64,
}

fn scribble(caches: &KvCaches, void: &[VoidBlock]) {
    for VoidBlock { group, block, seed } in void {
        let Rank { pp, tp } = caches.layout.rank;
        caches.scribble(*group, *block, seed << 32 | (pp as u64) << 16 | tp as u64);
    }
}
