//! TensorRT-LLM's connector, `KvCacheConnectorScheduler` and `KvCacheConnectorWorker`, as plain
//! data.
//!
//! # The order of calls
//! ```text
//! once       workers    allocate_kv_memory, register_kv_caches
//! request    scheduler  get_num_new_matched_tokens (exactly once), update_state_after_alloc
//! iteration  scheduler  build_connector_meta
//!            workers    bind_connector_meta, start_load_kv,
//!                       (wait_for_layer_load, save_kv_layer) per layer, forward_done,
//!                       wait_for_save
//!            scheduler  request_finished of what ended
//!            workers    get_finished
//! ```
//! The scheduler half exists at rank 0 only; what it returns is broadcast. A request counts as loaded or
//! saved when all ranks have reported it: the intersection of the reports so far. A rank may report
//! only ids that were handed to `get_finished`, each once.
//!
//! A worker cannot report a failed load. It returns a [`WorkerFault`], which ends the engine. Requests
//! are never preempted (`GUARANTEED_NO_EVICT`): a request is admitted when all blocks that it may need
//! are free. Requests that load or save cannot be
//! cancelled: an abort of one takes effect when its transfer ends.

use super::RequestView;
use crate::config::Rank;
use crate::layout::{BlockId, KvCaches};
use crate::memory::KvMemory;
use crate::request::RequestStatus;
use crate::worker::LayerEvent;
use std::sync::Arc;
use thiserror::Error;

/// `LlmRequestState`. Exhaustive on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RequestState {
    /// The prompt is being computed, or waits for its computation.
    ContextInit,
    /// The request generates tokens.
    GenerationInProgress,
    /// The request's KV is being loaded.
    DisaggGenerationTransInProgress,
    /// The request has ended, and its KV is being saved.
    DisaggContextTransInProgress,
    /// The request has ended.
    GenerationComplete,
}

impl RequestState {
    /// TensorRT-LLM's name of a status; `saving` is for a finished request.
    pub const fn of(request: &RequestView<'_>, saving: bool) -> Self {
        match request.status {
            RequestStatus::Waiting | RequestStatus::Preempted => Self::ContextInit,
            RequestStatus::WaitingForRemoteKvs => Self::DisaggGenerationTransInProgress,
            RequestStatus::Running if request.tokens.len() > request.prompt.len() => {
                Self::GenerationInProgress
            }
            RequestStatus::Running => Self::ContextInit,
            RequestStatus::Finished(_) if saving => Self::DisaggContextTransInProgress,
            RequestStatus::Finished(_) => Self::GenerationComplete,
        }
    }
}

/// A block id as TensorRT-LLM writes it: -1 for a page that is freed or out of the window.
pub(crate) fn page(block: BlockId) -> i32 {
    if block.is_null() { -1 } else { i32::try_from(block.0).expect("fewer than 2^31 blocks") }
}

/// News of a request in an iteration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestData {
    /// Number of the request.
    pub request_id: u64,
    /// Tokens since the last time; the first time, all.
    pub new_tokens: Vec<u32>,
    /// Pages since the last time, per layer group; the first time, all.
    pub new_block_ids: Vec<Vec<i32>>,
    /// Tokens in the cache before the iteration; the first time, without those that the connector
    /// loads in it.
    pub computed_position: usize,
    /// Tokens to compute.
    pub num_scheduled_tokens: usize,
}

/// An iteration. Requests that load asynchronously are not in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SchedulerOutput {
    /// Requests that were in no iteration before.
    pub new_requests: Vec<RequestData>,
    /// The others: only what has changed.
    pub cached_requests: Vec<RequestData>,
}

/// A worker half failed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{reason}")]
pub struct WorkerFault {
    /// Reason for the failure.
    pub reason: String,
}

/// The scheduler half: at rank 0 only.
pub trait SchedulerConnector: Send {
    /// Returns the number of tokens beyond `num_computed_tokens` that it can load, fewer than the whole prompt, and
    /// whether it loads asynchronously, which must be false without tokens. Called exactly once per request.
    fn get_num_new_matched_tokens(
        &mut self,
        request: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> (usize, bool);

    /// The request has got pages: all of them per layer group.
    fn update_state_after_alloc(&mut self, request: &RequestView<'_>, block_ids: &[Vec<i32>]);

    /// Returns the metadata of this iteration for the worker halves.
    fn build_connector_meta(&mut self, output: &SchedulerOutput) -> Vec<u8>;

    /// A request has ended. Returns whether its pages are being saved; they are kept until then.
    fn request_finished(&mut self, request: &RequestView<'_>, block_ids: &[Vec<i32>]) -> bool;
}

/// The worker half: one per rank.
pub trait WorkerConnector: Send {
    /// Memory for a storage, if the connector allocates it. TensorRT-LLM has no such call.
    fn allocate_kv_memory(
        &mut self,
        _rank: Rank,
        _storage: usize,
        _len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        None
    }

    /// Receives this rank's pools, with their layout.
    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>);

    /// The metadata of the iteration.
    fn bind_connector_meta(&mut self, meta: &Arc<[u8]>);

    /// Begins the loads of this iteration; before the forward pass.
    ///
    /// # Errors
    /// If it cannot go on. The engine ends.
    fn start_load_kv(&mut self) -> Result<(), WorkerFault>;

    /// A layer is about to be computed.
    fn wait_for_layer_load(&mut self, _layer: usize) {}

    /// A layer was launched; `computed` happens when it is done.
    fn save_kv_layer(&mut self, _layer: usize, _computed: &LayerEvent) {}

    /// The end of the forward pass: `register_forward_pass_callable`.
    fn forward_done(&mut self) {}

    /// Returns once pages of running requests may be overwritten.
    fn wait_for_save(&mut self) {}

    /// Takes the ids whose save or load has begun since the last call. Returns those, of all that were
    /// ever handed in, that this rank has saved and loaded since.
    ///
    /// # Errors
    /// If it cannot go on. The engine ends.
    fn get_finished(
        &mut self,
        finished_gen_req_ids: &[u64],
        started_loading_req_ids: &[u64],
    ) -> Result<(Vec<u64>, Vec<u64>), WorkerFault>;
}

/// A connector for TensorRT-LLM's seam.
pub type Connector = super::Connector<dyn SchedulerConnector, dyn WorkerConnector>;
