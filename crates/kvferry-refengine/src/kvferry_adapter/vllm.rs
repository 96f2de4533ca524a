//! The halves of the adapter.

use super::{GpuMemory, RegionMemory};
use crate::config::Rank;
use crate::contract::RequestView;
use crate::contract::vllm::{
    ConnectorMeta, ConnectorOutput, Match, SchedulerConnector, SchedulerOutput, TransferResults,
    WorkerConnector,
};
use crate::layout::{BlockId, KvCaches};
use crate::memory::KvMemory;
use crate::request::{FinishReason, Params, RequestId, RequestStatus};
use crate::worker::LayerEvent;
use kvferry::{Access, After, Agent, Region};
use kvferry_connector::{ComputeEvent, PromptId, Scheduled, WorkerConfig};
use kvferry_sys::sync::Mutex;
use std::sync::{Arc, OnceLock};

pub(super) struct Scheduler {
    half: Arc<Mutex<kvferry_connector::Scheduler>>,
    ranks: Vec<Rank>,
    eager: bool,
}

impl Scheduler {
    pub(super) const fn new(
        half: Arc<Mutex<kvferry_connector::Scheduler>>,
        ranks: Vec<Rank>,
        eager: bool,
    ) -> Self {
        Self { half, ranks, eager }
    }
}

fn ids(requests: &[RequestId]) -> impl Iterator<Item = &str> {
    requests.iter().map(RequestId::as_str)
}

/// Block numbers, 0 where there is no block.
fn numbers(blocks: &[Vec<BlockId>]) -> Vec<Vec<u32>> {
    blocks.iter().map(|group| group.iter().map(|block| block.0).collect()).collect()
}

fn request<'a>(view: &RequestView<'a>) -> kvferry_connector::Request<'a> {
    kvferry_connector::Request {
        id: view.id.as_str(),
        prompt_tokens: view.prompt.len() as u64,
        max_tokens: view.max_tokens as u64,
        params: view.params,
        prompt: view.params.map(|_| PromptId::new(&[], view.prompt)),
    }
}

/// Reason for the end of a request, in the connector's terms.
fn reason(view: &RequestView<'_>) -> kvferry_connector::FinishReason {
    match view.status {
        RequestStatus::Finished(FinishReason::Length) => kvferry_connector::FinishReason::Length,
        RequestStatus::Finished(FinishReason::Stop) => kvferry_connector::FinishReason::Stop,
        RequestStatus::Finished(FinishReason::Error) => kvferry_connector::FinishReason::Error,
        _ => kvferry_connector::FinishReason::Abort,
    }
}

/// The tokens that a request has generated, as side data.
fn generated(view: &RequestView<'_>) -> Vec<u8> {
    view.tokens[view.prompt.len()..].iter().flat_map(|token| token.to_le_bytes()).collect()
}

impl SchedulerConnector for Scheduler {
    fn set_xfer_handshake_metadata(&mut self, ranks: &[(Rank, Vec<u8>)]) {
        let metadata = ranks.iter().map(|(_, metadata)| metadata.clone()).collect();
        self.half.lock().set_ranks(metadata).expect("the ranks of one engine fit each other");
    }

    fn on_new_request(&mut self, view: &RequestView<'_>) {
        self.half.lock().arrived(&request(view));
    }

    fn prompt_tokens_to_prefill(&mut self, view: &RequestView<'_>) -> usize {
        let tokens = self.half.lock().arrived(&request(view));
        usize::try_from(tokens).expect("no more than the prompt has")
    }

    fn get_num_new_matched_tokens(
        &mut self,
        view: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> Match {
        let computed = num_computed_tokens as u64;
        match self.half.lock().matched(view.id.as_str(), computed) {
            kvferry_connector::Match::Unknown => Match::Unknown,
            kvferry_connector::Match::Tokens(tokens) => {
                let tokens = usize::try_from(tokens).expect("no more than the prompt has");
                Match::Tokens { tokens, load_async: tokens > 0 }
            }
        }
    }

    fn update_state_after_alloc(
        &mut self,
        view: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
        num_external_tokens: usize,
    ) {
        let external = num_external_tokens as u64;
        self.half.lock().allocated(view.id.as_str(), external, &numbers(block_ids));
    }

    fn build_connector_meta(&mut self, output: &SchedulerOutput) -> Vec<u8> {
        let mut half = self.half.lock();
        let tokens = |id| output.num_scheduled_tokens[id] as u64;
        let new = output
            .scheduled_new_reqs
            .iter()
            .map(|it| (&it.id, true, &it.block_ids, it.num_computed_tokens));
        let cached = output.scheduled_cached_reqs.iter();
        let cached = cached.map(|it| (&it.id, it.resumed, &it.block_ids, it.num_computed_tokens));
        let scheduled: Vec<_> = new
            .chain(cached)
            .filter(|(id, ..)| half.produces(id.as_str()))
            .map(|(id, all, blocks, computed)| Scheduled {
                request: id.as_str(),
                computed: computed as u64,
                tokens: tokens(id),
                all,
                blocks: numbers(blocks),
            })
            .collect();
        half.step(scheduled, ids(&output.preempted_req_ids)).encode()
    }

    fn update_connector_output(&mut self, output: &ConnectorOutput) {
        let mut half = self.half.lock();
        for (rank, notes) in &output.worker_meta {
            let rank = self.ranks.iter().position(|it| it == rank);
            half.reported(rank.expect("a rank of this engine"), notes);
        }
        half.sent(ids(&output.finished_sending));
        half.received(ids(&output.finished_recving));
    }

    fn request_finished(
        &mut self,
        view: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
    ) -> (bool, Option<Params>) {
        let side_data = (!self.eager).then(|| generated(view));
        let blocks = numbers(block_ids);
        let mut half = self.half.lock();
        // It may have been rejected before it arrived.
        half.arrived(&request(view));
        let finished = half.finished(view.id.as_str(), reason(view), Some(&blocks), side_data);
        let finished = finished.unwrap_or_default();
        (finished.held, finished.params)
    }

    fn reset_cache(&mut self) -> bool {
        self.half.lock().reset_cache();
        true
    }

    fn has_pending_work(&mut self) -> bool {
        self.half.lock().has_pending_work()
    }
}

pub(super) struct Worker {
    pub(super) agent: Agent,
    pub(super) config: WorkerConfig,
    /// See [`super::KvferryAdapterConfig::layer_events`].
    pub(super) layer_events: bool,
    pub(super) gpu: Option<i32>,
    /// Regions of the rank, one per storage.
    pub(super) regions: Vec<Region>,
    pub(super) half: Arc<OnceLock<kvferry_connector::Worker>>,
    /// The rank's layers, numbered over the model.
    pub(super) layers: Vec<usize>,
    /// Event of the last layer of this step.
    pub(super) last: Option<LayerEvent>,
    pub(super) notes: Option<Vec<u8>>,
}

impl Worker {
    fn half(&self) -> &kvferry_connector::Worker {
        self.half.get().expect("caches are registered first")
    }
}

impl WorkerConnector for Worker {
    fn allocate_kv_memory(
        &mut self,
        _rank: Rank,
        _storage: usize,
        len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        if let Some(device) = self.gpu {
            let memory = GpuMemory::new(&self.agent, device, len_bytes);
            let memory = memory.expect("the GPU can be used and has memory for the cache");
            self.regions.push(memory.region().clone());
            return Some(Arc::new(memory));
        }
        let region = self.agent.allocate(len_bytes, Access::READ);
        let region = region.expect("there is memory for the cache");
        self.regions.push(region.clone());
        Some(Arc::new(RegionMemory::new(region)))
    }

    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>) {
        let regions: Vec<_> = self.regions.iter().map(|it| (it.id(), it.len() as u64)).collect();
        let layout = caches.layout.layout(&regions).expect("the regions are the rank's storages");
        let config = self.config.clone();
        let half = kvferry_connector::Worker::start(&self.agent, layout, &self.regions, config);
        let started = self.half.set(half.expect("the agent has no other message handler"));
        started.expect("caches are registered once");
        self.layers = caches.layout.layers.iter().map(|layer| layer.index).collect();
    }

    fn get_handshake_metadata(&mut self) -> Vec<u8> {
        self.half().rank_metadata().to_vec()
    }

    fn handle_preemptions(&mut self, meta: &ConnectorMeta) {
        // The engine waits for each of its accesses to a GPU's memory.
        let after = || Ok(After::host());
        self.half().apply_after(meta, after).expect("the scheduler half's metadata");
    }

    /// The metadata have been applied: `handle_preemptions` is called in every step.
    fn bind_connector_metadata(&mut self, _meta: &ConnectorMeta) {}

    fn start_load_kv(&mut self) {
        self.half().fetch();
    }

    fn save_kv_layer(&mut self, layer: usize, computed: &LayerEvent) {
        if self.layer_events {
            let place = self.layers.iter().position(|it| *it == layer);
            let place = place.expect("hooks are called for the rank's own layers");
            self.half().layer_computed(place, Some(Box::new(computed.clone())));
        }
        self.last = Some(computed.clone());
    }

    fn wait_for_save(&mut self) {
        let last = self.last.take().map(|event| Box::new(event) as Box<dyn ComputeEvent>);
        self.half().step_computed(last);
    }

    fn get_transfer_results(&mut self, _finished_req_ids: &[RequestId]) -> TransferResults {
        let reports = self.half().reports();
        self.notes = reports.notes;
        let ids = |names: Vec<String>| names.into_iter().map(RequestId::from).collect();
        TransferResults {
            finished_sending: ids(reports.sent),
            finished_recving: ids(reports.received),
            failed_recving: ids(reports.failed),
        }
    }

    fn build_connector_worker_meta(&mut self) -> Option<Vec<u8>> {
        self.notes.take()
    }
}

impl ComputeEvent for LayerEvent {
    fn is_ready(&self) -> bool {
        Self::is_ready(self)
    }

    fn wait(&self, _: &dyn Fn() -> bool) {
        Self::wait(self);
    }
}
