//! The adapter behind vLLM's seam.

use super::{RankHalf, ended, generated, numbers, request};
use crate::config::Rank;
use crate::contract::RequestView;
use crate::contract::vllm::{
    ConnectorMeta, ConnectorOutput, Match, SchedulerConnector, SchedulerOutput, TransferResults,
    WorkerConnector,
};
use crate::layout::{BlockId, KvCaches};
use crate::memory::KvMemory;
use crate::request::{Params, RequestId};
use crate::worker::LayerEvent;
use kvferry_connector::Scheduled;
use kvferry_sys::sync::Mutex;
use std::sync::Arc;

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

impl SchedulerConnector for Scheduler {
    fn set_xfer_handshake_metadata(&mut self, ranks: &[(Rank, Vec<u8>)]) {
        let metadata = ranks.iter().map(|(_, metadata)| metadata.clone()).collect();
        self.half.lock().set_ranks(metadata).expect("the ranks of one engine fit each other");
    }

    fn on_new_request(&mut self, view: &RequestView<'_>) {
        self.half.lock().arrived(&request(view.id.as_str(), view));
    }

    fn prompt_tokens_to_prefill(&mut self, view: &RequestView<'_>) -> usize {
        let tokens = self.half.lock().arrived(&request(view.id.as_str(), view));
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
        let (id, blocks) = (view.id.as_str(), numbers(block_ids));
        let finished = ended(&mut self.half.lock(), id, view, &blocks, side_data);
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
    half: RankHalf,
    notes: Option<Vec<u8>>,
}

impl Worker {
    pub(super) const fn new(half: RankHalf) -> Self {
        Self { half, notes: None }
    }
}

impl WorkerConnector for Worker {
    fn allocate_kv_memory(
        &mut self,
        _rank: Rank,
        _storage: usize,
        len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        Some(self.half.allocate(len_bytes))
    }

    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>) {
        self.half.register(caches);
    }

    fn get_handshake_metadata(&mut self) -> Vec<u8> {
        self.half.worker().rank_metadata().to_vec()
    }

    fn handle_preemptions(&mut self, meta: &ConnectorMeta) {
        self.half.apply(meta);
    }

    /// The metadata have been applied: `handle_preemptions` is called in every step.
    fn bind_connector_metadata(&mut self, _meta: &ConnectorMeta) {}

    fn start_load_kv(&mut self) {
        self.half.worker().fetch();
    }

    fn save_kv_layer(&mut self, layer: usize, computed: &LayerEvent) {
        self.half.layer_computed(layer, computed);
    }

    fn wait_for_save(&mut self) {
        self.half.step_computed();
    }

    fn get_transfer_results(&mut self, _finished_req_ids: &[RequestId]) -> TransferResults {
        let reports = self.half.worker().reports();
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
