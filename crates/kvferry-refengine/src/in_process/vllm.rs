//! Both halves behind vLLM's seam.

use super::{FailureKey, InProcess, LoadMode, Order};
use crate::config::EngineConfig;
use crate::contract::RequestView;
use crate::contract::vllm::{
    ConnectorMeta, ConnectorOutput, Match, SchedulerConnector, SchedulerOutput, TransferResults,
    WorkerConnector,
};
use crate::layout::{BlockId, KvCaches};
use crate::request::{FinishReason, Params, RequestId, RequestStatus};
use rustc_hash::{FxHashMap, FxHashSet};
use serde_json::json;
use std::sync::Arc;

pub(super) struct Scheduler {
    in_process: InProcess,
    engine: usize,
    ranks: usize,
    has_state: bool,
    /// Requests whose offer has been taken: it is not taken twice.
    taken: FxHashSet<RequestId>,
    metadata: Vec<Order>,
    loading: FxHashSet<RequestId>,
}

fn is_producer(request: &RequestView<'_>) -> bool {
    let asks = request.params.and_then(|params| params.get("do_remote_decode"));
    asks.is_some_and(|asks| asks == true)
}

fn transfer(request: &RequestView<'_>) -> Option<u64> {
    request.params?.get("transfer")?.as_u64()
}

impl Scheduler {
    pub(super) fn new(in_process: InProcess, engine: usize, config: &EngineConfig) -> Self {
        Self {
            in_process,
            engine,
            ranks: config.ranks().len(),
            has_state: config.model.has_state(),
            taken: FxHashSet::default(),
            metadata: vec![],
            loading: FxHashSet::default(),
        }
    }
}

impl SchedulerConnector for Scheduler {
    fn prompt_tokens_to_prefill(&mut self, request: &RequestView<'_>) -> usize {
        let cut = self.has_state && is_producer(request) && request.prompt.len() > 1;
        request.prompt.len() - usize::from(cut)
    }

    fn get_num_new_matched_tokens(
        &mut self,
        request: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> Match {
        let Some(transfer) = transfer(request).filter(|_| !self.taken.contains(request.id)) else {
            return Match::NONE;
        };
        let hub = self.in_process.hub();
        let load_async = hub.mode != LoadMode::Sync;
        let most = request.prompt.len() - usize::from(!load_async || self.has_state);
        let there = hub.offers.get(&transfer).map_or(0, |offer| offer.tokens.min(most));
        let tokens = there.saturating_sub(num_computed_tokens);
        Match::Tokens { tokens, load_async: load_async && tokens > 0 }
    }

    fn update_state_after_alloc(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
        num_external_tokens: usize,
    ) {
        let Some(transfer) = transfer(request) else { return };
        if !self.taken.insert(request.id.clone()) {
            return;
        }
        let mut hub = self.in_process.hub();
        if num_external_tokens == 0 {
            // All tokens are cached: the producer need not wait.
            hub.release(transfer);
            return;
        }
        let load_async = hub.mode != LoadMode::Sync;
        if load_async {
            self.loading.insert(request.id.clone());
        }
        let end = match load_async {
            true => request.prompt.len() - usize::from(self.has_state),
            false => request.prompt.len() - 1,
        };
        let end = end.min(hub.offers[&transfer].tokens);
        self.metadata.push(Order {
            request: request.id.clone(),
            transfer,
            first: end - num_external_tokens,
            end,
            blocks: block_ids.to_vec(),
            load_async,
            fails: hub.fault(transfer, self.ranks),
        });
    }

    fn build_connector_meta(&mut self, _output: &SchedulerOutput) -> Vec<u8> {
        serde_json::to_vec(&std::mem::take(&mut self.metadata)).expect("metadata are plain data")
    }

    fn update_connector_output(&mut self, output: &ConnectorOutput) {
        for id in &output.finished_recving {
            self.loading.remove(id);
        }
    }

    fn request_finished(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
    ) -> (bool, Option<Params>) {
        let mut hub = self.in_process.hub();
        if let Some(transfer) = transfer(request) {
            if !self.taken.remove(request.id) {
                hub.release(transfer);
            }
            return (false, None);
        }
        // A request that stopped early is not handed over.
        let whole = request.status == RequestStatus::Finished(FinishReason::Length);
        if !is_producer(request) || !whole {
            return (false, None);
        }
        let transfer = hub.offer(self.engine, request, block_ids);
        let params = [("do_remote_prefill", json!(true)), ("transfer", json!(transfer))];
        let params = params.map(|(name, value)| (name.to_owned(), value));
        (true, Some(Params::from_iter(params)))
    }

    fn has_pending_work(&mut self) -> bool {
        let hub = self.in_process.hub();
        let sent = (0..self.ranks).any(|rank| hub.sent.contains_key(&(self.engine, rank)));
        sent || !self.loading.is_empty()
            || hub.offers.values().any(|offer| offer.engine == self.engine)
    }
}

pub(super) struct Worker {
    in_process: InProcess,
    engine: usize,
    rank: usize,
    caches: Option<Arc<KvCaches>>,
    steps: u64,
    /// What this step loads synchronously.
    metadata: Vec<Order>,
    /// What is loaded later, and when.
    later: Vec<(u64, Order)>,
    invalid: FxHashMap<RequestId, BlockId>,
}

impl Worker {
    pub(super) fn new(in_process: InProcess, engine: usize, rank: usize) -> Self {
        Self {
            in_process,
            engine,
            rank,
            caches: None,
            steps: 0,
            metadata: vec![],
            later: vec![],
            invalid: FxHashMap::default(),
        }
    }

    fn caches(&self) -> Arc<KvCaches> {
        self.caches.clone().expect("caches are registered first")
    }

    /// Copies all layers of an order. Returns the block that was left out.
    fn copy(&self, order: &Order) -> Option<BlockId> {
        let (caches, hub) = (self.caches(), self.in_process.hub());
        let fails = order.fails == Some(self.rank);
        let mut left_out = None;
        for layer in &caches.layout.layers {
            left_out = hub.copy(order, &caches, layer, fails).or(left_out);
        }
        left_out
    }
}

impl WorkerConnector for Worker {
    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>) {
        self.in_process.hub().engines[self.engine][self.rank] = Some(caches.clone());
        self.caches = Some(caches.clone());
    }

    fn bind_connector_metadata(&mut self, meta: &ConnectorMeta) {
        self.steps += 1;
        let metadata: Vec<Order> =
            serde_json::from_slice(meta).expect("the scheduler half's metadata");
        let (later, now) = metadata.into_iter().partition(|order| order.load_async);
        self.metadata = now;
        let hub = self.in_process.hub();
        for order in Vec::from_iter::<Vec<Order>>(later) {
            self.later.push((self.steps + hub.delay(order.transfer, self.rank), order));
        }
    }

    fn start_load_kv(&mut self) {}

    fn wait_for_layer_load(&mut self, layer: usize) {
        let (caches, hub) = (self.caches(), self.in_process.hub());
        let view = caches.layout.layers.iter().find(|it| it.index == layer);
        let view = view.expect("hooks are called for the rank's own layers");
        for order in &self.metadata {
            let left_out = hub.copy(order, &caches, view, order.fails == Some(self.rank));
            if let Some(block) = left_out {
                self.invalid.insert(order.request.clone(), block);
            }
        }
    }

    fn wait_for_save(&mut self) {
        let mut hub = self.in_process.hub();
        let ranks = hub.engines[self.engine].len();
        for order in self.metadata.drain(..) {
            hub.read(order.transfer, ranks);
        }
    }

    fn get_transfer_results(&mut self, _finished_req_ids: &[RequestId]) -> TransferResults {
        let mut results = TransferResults::default();
        let steps = self.steps;
        let due: Vec<_> = self.later.extract_if(.., |(due, _)| *due <= steps).collect();
        for (_, order) in due {
            let left_out = self.copy(&order);
            let mut hub = self.in_process.hub();
            let ranks = hub.engines[self.engine].len();
            match (hub.faults.key, left_out) {
                (FailureKey::Request, Some(_)) => {
                    results.failed_recving.push(order.request.clone())
                }
                (FailureKey::Block, Some(block)) => {
                    self.invalid.insert(order.request.clone(), block);
                }
                (_, None) => {}
            }
            results.finished_recving.push(order.request);
            hub.read(order.transfer, ranks);
        }
        let sent = self.in_process.hub().sent.remove(&(self.engine, self.rank));
        results.finished_sending = sent.unwrap_or_default();
        results
    }

    fn get_block_ids_with_load_errors(&mut self) -> Vec<BlockId> {
        self.invalid.drain().map(|(_, block)| block).collect()
    }
}
