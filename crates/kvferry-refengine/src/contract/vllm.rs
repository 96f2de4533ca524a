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
//! A step without tokens to compute makes all calls but those of layers. Without a synchronous load,
//! `start_load_kv` comes after the layers. The layers may only be launched by then, and may still
//! compute when the step's last call returns: see [`crate::Launch::Deferred`] and [`LayerEvent`].
//!
//! # Who owns blocks when
//! * The connector owns the blocks of an asynchronous load from the `start_load_kv` of the step whose
//!   metadata names them until all ranks have reported it finished, even if the request ends. Before
//!   that `start_load_kv` the engine may overwrite them.
//! * The connector owns the blocks of a finished request if `request_finished` returned true, until all
//!   ranks have reported it sent.
//! * The blocks of a preempted request, and of an ended one that is not held, may be overwritten before
//!   `handle_preemptions` is called.
//! * Other blocks may change after `wait_for_save`.

use super::RequestView;
use crate::block_pool::BlockPins;
use crate::config::Rank;
use crate::layout::{BlockId, KvCaches};
use crate::memory::KvMemory;
use crate::request::{Params, RequestId};
use crate::worker::LayerEvent;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// Tokens of a request that a connector can load. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Match {
    /// Not known yet: ask in a later step.
    Unknown,
    /// Tokens beyond the computed ones.
    Tokens {
        /// Number of tokens.
        tokens: usize,
        /// True if the tokens are loaded while other requests compute. Must be false without tokens.
        load_async: bool,
    },
}

impl Match {
    /// No tokens.
    pub const NONE: Self = Self::Tokens { tokens: 0, load_async: false };
}

/// A request's first appearance in a step, or its first after a load.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say the rest")]
pub struct NewRequestData {
    pub id: RequestId,
    pub prompt: Vec<u32>,
    /// Ids of all blocks of the request, per group.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Tokens in the cache before the step.
    pub num_computed_tokens: usize,
}

/// A request that workers know already.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedRequestData {
    /// Id of the request.
    pub id: RequestId,
    /// True if the request was preempted: `block_ids` are then all its blocks, not only new ones.
    pub resumed: bool,
    /// Ids of the request's new blocks, per group.
    pub block_ids: Vec<Vec<BlockId>>,
    /// Tokens in the cache before the step.
    pub num_computed_tokens: usize,
    /// Tokens generated so far.
    pub num_output_tokens: usize,
}

/// A step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerOutput {
    /// The number of the step.
    pub step: u64,
    /// Requests that workers do not know.
    pub scheduled_new_reqs: Vec<NewRequestData>,
    /// Requests that workers know.
    pub scheduled_cached_reqs: Vec<CachedRequestData>,
    /// Tokens to compute of each.
    pub num_scheduled_tokens: BTreeMap<RequestId, usize>,
    /// Requests that ended since the last step.
    pub finished_req_ids: Vec<RequestId>,
    /// Requests that lost their blocks in this step.
    pub preempted_req_ids: Vec<RequestId>,
    /// A request of this step computes on KV that is loaded in this step.
    pub has_sync_kv_loads: bool,
}

/// Metadata from the scheduler half to the worker halves; opaque to the engine.
pub type ConnectorMeta = Arc<[u8]>;

/// A rank's report after a step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TransferResults {
    /// Requests whose blocks this rank has finished reading.
    pub finished_sending: Vec<RequestId>,
    /// Requests whose blocks this rank has finished writing.
    pub finished_recving: Vec<RequestId>,
    /// Requests of `finished_recving` that did not get all their bytes.
    pub failed_recving: Vec<RequestId>,
}

/// Reports of all ranks, combined.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConnectorOutput {
    /// Requests that all ranks have sent.
    pub finished_sending: Vec<RequestId>,
    /// Requests that all ranks have received.
    pub finished_recving: Vec<RequestId>,
    /// Requests of `finished_recving` that at least one rank failed to receive.
    pub failed_recving: Vec<RequestId>,
    /// Blocks that at least one rank failed to load.
    pub invalid_block_ids: Vec<BlockId>,
    /// Metadata of the worker halves for the scheduler half. vLLM merges it on the way.
    pub worker_meta: Vec<(Rank, Vec<u8>)>,
}

impl ConnectorOutput {
    /// Whether it is empty: then the scheduler half is not called.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The scheduler half: one per engine, in the scheduler's process.
pub trait SchedulerConnector: Send {
    /// Lets the connector keep blocks.
    fn bind_block_pools(&mut self, _pools: BlockPins) {}

    /// Number of ranks that must report a request before it counts; all of them if `None`. Asked again before each
    /// step's reports are counted.
    fn get_finished_count(&mut self) -> Option<usize> {
        None
    }

    /// The result of `get_handshake_metadata` of every worker half.
    fn set_xfer_handshake_metadata(&mut self, _ranks: &[(Rank, Vec<u8>)]) {}

    /// A request has arrived.
    fn on_new_request(&mut self, _request: &RequestView<'_>) {}

    /// Number of the prompt's tokens to prefill; asked once, after `on_new_request`. The consumer of a prompt computes
    /// its last token again. A state cannot be taken back by one token, and a window moves on with the last token, so a
    /// producer of these leaves out the last: vLLM's connectors cut the request's prompt in place.
    fn prompt_tokens_to_prefill(&mut self, request: &RequestView<'_>) -> usize {
        request.prompt.len()
    }

    /// Number of tokens beyond `num_computed_tokens` that it can load. May be asked several times before a request is
    /// admitted, again after a preemption and again after a failed load; must have no side effects. A synchronous load
    /// leaves at least the last token; so does any load of a model that keeps a state.
    fn get_num_new_matched_tokens(
        &mut self,
        request: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> Match;

    /// The request has got blocks: all of them per group, with [`BlockId::NULL`] where nothing is
    /// loaded. The connector loads `num_external_tokens` of its tokens. Called again with 0 when a
    /// request continues after an asynchronous load.
    fn update_state_after_alloc(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
        num_external_tokens: usize,
    );

    /// Returns the metadata of this step for the worker halves. Resets the state gathered for the step.
    fn build_connector_meta(&mut self, output: &SchedulerOutput) -> Vec<u8>;

    /// Receives the reports of the workers. Not called if they are empty.
    fn update_connector_output(&mut self, _output: &ConnectorOutput) {}

    /// A request has ended, with these blocks per group, without those that have left the windows: exactly once per
    /// request, even if it was never scheduled or was rejected ([`crate::Engine::reject`]: the id is new then). Returns
    /// whether the connector owns the blocks until the request is reported sent, and the response's parameters.
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

    /// The engine empties its prefix cache. Returns whether the connector emptied its own.
    fn reset_cache(&mut self) -> bool {
        true
    }

    /// The engine ends.
    fn shutdown(&mut self) {}
}

/// The worker half: one per rank, each in a process of its own.
pub trait WorkerConnector: Send {
    /// Memory for a storage, if the connector allocates it: vLLM's `get_mem_pool_context`.
    fn allocate_kv_memory(
        &mut self,
        _rank: Rank,
        _storage: usize,
        _len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        None
    }

    /// Receives this rank's caches. Called once, before everything else but `allocate_kv_memory`.
    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>);

    /// Returns the data that the scheduler half, or a peer, needs in order to reach this rank.
    fn get_handshake_metadata(&mut self) -> Vec<u8> {
        vec![]
    }

    /// Called every step, before `bind_connector_metadata`. When it returns, what is read of blocks of
    /// requests preempted in this step must no longer be accepted.
    fn handle_preemptions(&mut self, _meta: &ConnectorMeta) {}

    /// The metadata of the step.
    fn bind_connector_metadata(&mut self, meta: &ConnectorMeta);

    /// The step is over.
    fn clear_connector_metadata(&mut self) {}

    /// Begins the loads of this step.
    fn start_load_kv(&mut self);

    /// Layer `layer` (numbered over the model) is about to be computed. When this returns, its
    /// synchronous loads must be done.
    fn wait_for_layer_load(&mut self, _layer: usize) {}

    /// Layer `layer` was launched; `computed` happens when it is done.
    fn save_kv_layer(&mut self, _layer: usize, _computed: &LayerEvent) {}

    /// Once per step, even without tokens. Afterwards blocks may be overwritten unless the connector
    /// owns them.
    fn wait_for_save(&mut self) {}

    /// Returns the transfers that ended on this rank since the last step. Each id once per channel, and only ids whose
    /// `request_finished` returned true, or whose load is asynchronous. `finished_req_ids` are the requests that ended
    /// since the last step.
    fn get_transfer_results(&mut self, finished_req_ids: &[RequestId]) -> TransferResults;

    /// Blocks that could not be loaded; only with a single group.
    fn get_block_ids_with_load_errors(&mut self) -> Vec<BlockId> {
        vec![]
    }

    /// Metadata for the scheduler half.
    fn build_connector_worker_meta(&mut self) -> Option<Vec<u8>> {
        None
    }

    /// The engine ends.
    fn shutdown(&mut self) {}
}

/// The two halves of a connector.
pub struct Connector {
    /// The scheduler half.
    pub scheduler: Box<dyn SchedulerConnector>,
    /// The worker half of each rank, in the order of [`crate::EngineConfig::ranks`].
    pub workers: Vec<Box<dyn WorkerConnector>>,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector").field("workers", &self.workers.len()).finish_non_exhaustive()
    }
}
