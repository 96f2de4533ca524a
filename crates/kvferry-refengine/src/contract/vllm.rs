//! vLLM's connector, `KVConnectorBase_V1` of 0.32, as plain data.
//!
//! # The order of calls
//! ```text
//! once, workers    allocate_kv_memory (get_mem_pool_context), register_kv_caches
//!       scheduler  bind_block_pools, get_finished_count
//!       both       get_handshake_metadata -> set_xfer_handshake_metadata
//! request          on_new_request, get_num_new_matched_tokens.., update_state_after_alloc
//! step, scheduler  build_connector_meta
//!       workers    handle_preemptions, bind_connector_metadata, start_load_kv,
//!                  (wait_for_layer_load, save_kv_layer) per layer, wait_for_save,
//!                  get_transfer_results, get_block_ids_with_load_errors,
//!                  build_connector_worker_meta, clear_connector_metadata
//!       scheduler  update_connector_output, take_events
//! end              request_finished, exactly once per request
//! ```
//! Without a token to compute, a step calls everything but the layers. Where nothing is loaded
//! synchronously, `start_load_kv` comes after the layers. What the layers compute may only have been
//! launched by then, and not be done when the step's last call returns: see
//! [`crate::Launch::Deferred`] and [`LayerEvent`].
//!
//! # Whose blocks when
//! * Blocks of an asynchronous load are the connector's from the `start_load_kv` of the step whose
//!   metadata names them until all ranks reported it finished, whatever becomes of the request.
//!   Before that `start_load_kv` the engine may still overwrite them.
//! * Blocks of a finished request are the connector's if `request_finished` says so, until all ranks
//!   reported it sent.
//! * Blocks of a preempted request are the connector's until `handle_preemptions` returns.
//! * Other blocks may change after `wait_for_save`.

use super::RequestView;
use crate::block_pool::BlockPins;
use crate::config::Rank;
use crate::layout::{BlockId, KvCaches};
use crate::memory::KvMemory;
use crate::request::{Params, RequestId};
use crate::worker::LayerEvent;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What a connector has of a request. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Not known yet: ask in a later step.
    Unknown,
    /// So many tokens beyond those computed.
    Tokens {
        /// How many.
        tokens: usize,
        /// Whether they are loaded while others compute. Must be false without tokens.
        load_async: bool,
    },
}

impl Match {
    /// Nothing.
    pub const NONE: Self = Self::Tokens { tokens: 0, load_async: false };
}

/// A request's first appearance in a step, or its first after a load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewRequestData {
    /// Its id.
    pub id: RequestId,
    /// Its prompt.
    pub prompt: Vec<u32>,
    /// Per group, all its blocks.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Tokens in the cache before the step.
    pub num_computed_tokens: usize,
}

/// A request that workers know already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedRequestData {
    /// Its id.
    pub id: RequestId,
    /// Whether it was preempted: then `block_ids` are all its blocks, not only what is new.
    pub resumed: bool,
    /// Per group, its new blocks.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Tokens in the cache before the step.
    pub num_computed_tokens: usize,
    /// Tokens it has said.
    pub num_output_tokens: usize,
}

/// What a step does.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerOutput {
    /// Counts steps.
    pub step: u64,
    /// Requests that workers do not know.
    pub scheduled_new_reqs: Vec<NewRequestData>,
    /// Requests that they do.
    pub scheduled_cached_reqs: Vec<CachedRequestData>,
    /// Tokens to be computed of each.
    pub num_scheduled_tokens: BTreeMap<RequestId, usize>,
    /// Requests that ended since the last step.
    pub finished_req_ids: Vec<RequestId>,
    /// Requests that lost their blocks in this step.
    pub preempted_req_ids: Vec<RequestId>,
    /// Whether a request of this step computes on what is loaded in this step.
    pub has_sync_kv_loads: bool,
}

/// Opaque to the engine, from the scheduler half to the worker halves.
pub type ConnectorMeta = Arc<[u8]>;

/// What a rank reports after a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferResults {
    /// Requests whose blocks this rank no longer reads.
    pub finished_sending: Vec<RequestId>,
    /// Requests whose blocks this rank no longer writes.
    pub finished_recving: Vec<RequestId>,
    /// Those of `finished_recving` that did not get all their bytes.
    pub failed_recving: Vec<RequestId>,
}

/// What all ranks reported, counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectorOutput {
    /// Requests that all ranks have sent.
    pub finished_sending: Vec<RequestId>,
    /// Requests that all ranks have received.
    pub finished_recving: Vec<RequestId>,
    /// Those of `finished_recving` that at least one rank failed to receive.
    pub failed_recving: Vec<RequestId>,
    /// Blocks that at least one rank failed to load.
    pub invalid_block_ids: Vec<BlockId>,
    /// What worker halves have to say to the scheduler half. vLLM merges it on the way.
    pub worker_meta: Vec<(Rank, Vec<u8>)>,
}

impl ConnectorOutput {
    /// Whether there is nothing in it: then the scheduler half is not called.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The scheduler half: one per engine, in the scheduler's process.
pub trait SchedulerConnector: Send {
    /// References to blocks, to keep some by itself.
    fn bind_block_pools(&mut self, _pools: BlockPins) {}

    /// How many ranks must report a request before it counts; all of them if `None`. Asked again
    /// before each step's reports are counted.
    fn get_finished_count(&mut self) -> Option<usize> {
        None
    }

    /// What every worker half returned from `get_handshake_metadata`.
    fn set_xfer_handshake_metadata(&mut self, _ranks: &[(Rank, Vec<u8>)]) {}

    /// A request has arrived.
    fn on_new_request(&mut self, _request: &RequestView<'_>) {}

    /// How much of the prompt to prefill; asked once, after `on_new_request`. The consumer of a
    /// prompt computes its last token again. A state cannot be taken back by one token, so a
    /// producer of states leaves out the last: vLLM's connectors cut the request's prompt in place.
    fn prompt_tokens_to_prefill(&mut self, request: &RequestView<'_>) -> usize {
        request.prompt.len()
    }

    /// How many tokens beyond `num_computed_tokens` it can load. May be asked several times before
    /// a request is admitted, again after a preemption and again after a failed load; must have no
    /// side effects. A synchronous load leaves at least the last token; so does any load of a model
    /// that keeps a state.
    fn get_num_new_matched_tokens(
        &mut self,
        request: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> Match;

    /// The request has blocks, per group all of them, with [`BlockId::NULL`] where nothing is to be
    /// loaded; `num_external_tokens` of its tokens are the connector's to load. Called again with 0
    /// when a request goes on after an asynchronous load.
    fn update_state_after_alloc(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
        num_external_tokens: usize,
    );

    /// What worker halves are to do in this step. Resets what was gathered for it.
    fn build_connector_meta(&mut self, output: &SchedulerOutput) -> Vec<u8>;

    /// What the workers reported; called unless that is empty.
    fn update_connector_output(&mut self, _output: &ConnectorOutput) {}

    /// A request ended, with these blocks per group; exactly once per request, also if it was
    /// never scheduled, or never taken ([`crate::Engine::reject`]: an id not heard of before).
    /// Whether the blocks are the connector's until it is reported sent, and what is returned in
    /// the response.
    fn request_finished(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
    ) -> (bool, Option<Params>);

    /// Whether the engine must go on stepping although no request runs:
    /// `has_pending_block_frees() or has_pending_push_work()`.
    fn has_pending_work(&mut self) -> bool {
        false
    }

    /// Cache events since the last call.
    fn take_events(&mut self) -> Vec<serde_json::Value> {
        vec![]
    }

    /// The prefix cache is emptied; whether the connector's could be, too.
    fn reset_cache(&mut self) -> bool {
        true
    }

    /// The engine ends.
    fn shutdown(&mut self) {}
}

/// The worker half: one per rank, each in a process of its own.
pub trait WorkerConnector: Send {
    /// Memory for a storage, if the connector wants to own it: vLLM's `get_mem_pool_context`.
    fn allocate_kv_memory(
        &mut self,
        _rank: Rank,
        _storage: usize,
        _len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        None
    }

    /// This rank's caches; once, before everything else but `allocate_kv_memory`.
    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>);

    /// What the scheduler half, or a peer, needs in order to reach this rank.
    fn get_handshake_metadata(&mut self) -> Vec<u8> {
        vec![]
    }

    /// Called every step, before `bind_connector_metadata`: whatever still reads blocks of requests
    /// preempted in this step must have stopped when it returns.
    fn handle_preemptions(&mut self, _meta: &ConnectorMeta) {}

    /// The metadata of the step.
    fn bind_connector_metadata(&mut self, meta: &ConnectorMeta);

    /// The step is over.
    fn clear_connector_metadata(&mut self) {}

    /// Begins the loads of this step.
    fn start_load_kv(&mut self);

    /// Layer `layer` (counted over the model) is about to be computed: what is loaded
    /// synchronously must be there when it returns.
    fn wait_for_layer_load(&mut self, _layer: usize) {}

    /// Layer `layer` is computed once `computed` says so.
    fn save_kv_layer(&mut self, _layer: usize, _computed: &LayerEvent) {}

    /// Once per step, also without tokens. After it, blocks may be overwritten unless they are the
    /// connector's.
    fn wait_for_save(&mut self) {}

    /// What ended on this rank since the last step. Each id once per channel, and only ids whose
    /// `request_finished` returned true, or whose load is asynchronous. `finished_req_ids` are the
    /// requests that ended since the last step.
    fn get_transfer_results(&mut self, finished_req_ids: &[RequestId]) -> TransferResults;

    /// Blocks that could not be loaded; only with a single group.
    fn get_block_ids_with_load_errors(&mut self) -> Vec<BlockId> {
        vec![]
    }

    /// Something to say to the scheduler half.
    fn build_connector_worker_meta(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// The engine ends.
    fn shutdown(&mut self) {}
}

/// Both halves.
pub struct Connector {
    /// The scheduler half.
    pub scheduler: Box<dyn SchedulerConnector>,
    /// The worker half of each rank, in the order of [`crate::EngineConfig::ranks`].
    pub workers: Vec<Box<dyn WorkerConnector>>,
}

impl std::fmt::Debug for Connector {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connector").field("workers", &self.workers.len()).finish_non_exhaustive()
    }
}
