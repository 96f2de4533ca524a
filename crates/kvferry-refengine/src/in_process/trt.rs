//! Both halves behind TensorRT-LLM's seam.

use super::{InProcess, Order};
use crate::contract::RequestView;
use crate::contract::trt::{SchedulerConnector, SchedulerOutput, WorkerConnector, WorkerFault};
use crate::layout::{BlockId, KvCaches};
use crate::request::{FinishReason, RequestStatus};
use rustc_hash::{FxHashMap, FxHashSet};
use std::sync::Arc;

pub(super) struct Scheduler {
    in_process: InProcess,
    engine: usize,
    produces: bool,
    /// By request: its transfer, and which tokens it loads.
    claimed: FxHashMap<u64, (u64, std::ops::Range<usize>)>,
    metadata: Vec<Order>,
}

impl Scheduler {
    pub(super) fn new(in_process: InProcess, engine: usize, produces: bool) -> Self {
        Self { in_process, engine, produces, claimed: FxHashMap::default(), metadata: vec![] }
    }

    /// The oldest offer of the same prompt that no request has claimed.
    fn find(&self, request: &RequestView<'_>) -> Option<(u64, usize)> {
        let hub = self.in_process.hub();
        let claimed: FxHashSet<_> = self.claimed.values().map(|(transfer, _)| *transfer).collect();
        let mut offers = hub.offers.iter().filter(|(id, _)| !claimed.contains(id));
        offers.find(|(_, it)| it.prompt == request.prompt).map(|(id, it)| (*id, it.tokens))
    }
}

fn blocks(pages: &[Vec<i32>]) -> Vec<Vec<BlockId>> {
    let block = |page: &i32| u32::try_from(*page).map_or(BlockId::NULL, BlockId);
    pages.iter().map(|group| group.iter().map(block).collect()).collect()
}

impl SchedulerConnector for Scheduler {
    fn get_num_new_matched_tokens(
        &mut self,
        request: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> (usize, bool) {
        if self.produces {
            return (0, false);
        }
        let Some((transfer, tokens)) = self.find(request) else { return (0, false) };
        let end = tokens.min(request.prompt.len() - 1);
        let mut hub = self.in_process.hub();
        if end <= num_computed_tokens {
            hub.release(transfer);
            return (0, false);
        }
        self.claimed.insert(request.number, (transfer, num_computed_tokens..end));
        (end - num_computed_tokens, hub.is_async())
    }

    fn update_state_after_alloc(&mut self, request: &RequestView<'_>, block_ids: &[Vec<i32>]) {
        let Some((transfer, tokens)) = self.claimed.get(&request.number).cloned() else { return };
        let mut hub = self.in_process.hub();
        let load_async = hub.is_async();
        // Workers know how many ranks there are: any of them may fail.
        let ranks = hub.engines[self.engine].len();
        self.metadata.push(Order {
            request: request.id.clone(),
            number: request.number,
            transfer,
            first: tokens.start,
            end: tokens.end,
            blocks: blocks(block_ids),
            load_async,
            fails: hub.fault(transfer, ranks),
        });
    }

    fn build_connector_meta(&mut self, _output: &SchedulerOutput) -> Vec<u8> {
        serde_json::to_vec(&std::mem::take(&mut self.metadata)).expect("metadata are plain data")
    }

    fn request_finished(&mut self, request: &RequestView<'_>, block_ids: &[Vec<i32>]) -> bool {
        if !self.produces {
            if self.claimed.remove(&request.number).is_none()
                && let Some((transfer, _)) = self.find(request)
            {
                self.in_process.hub().release(transfer);
            }
            return false;
        }
        let whole = request.status == RequestStatus::Finished(FinishReason::Length);
        if whole {
            self.in_process.hub().offer(self.engine, request, &blocks(block_ids));
        }
        whole
    }
}

pub(super) struct Worker {
    in_process: InProcess,
    engine: usize,
    rank: usize,
    caches: Option<Arc<KvCaches>>,
    steps: u64,
    metadata: Vec<Order>,
    later: Vec<(u64, Order)>,
    /// Handed in, and not yet reported.
    saving: FxHashSet<u64>,
    loading: FxHashSet<u64>,
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
            saving: FxHashSet::default(),
            loading: FxHashSet::default(),
        }
    }

    fn load(&self, order: &Order) -> Result<(), WorkerFault> {
        if order.fails == Some(self.rank) {
            return Err(WorkerFault { reason: format!("transfer {} failed", order.transfer) });
        }
        let caches = self.caches.as_ref().expect("caches are registered first");
        let mut hub = self.in_process.hub();
        for layer in &caches.layout.layers {
            hub.copy(order, caches, layer, false);
        }
        let ranks = hub.engines[self.engine].len();
        hub.read(order.transfer, ranks);
        Ok(())
    }
}

impl WorkerConnector for Worker {
    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>) {
        self.in_process.hub().engines[self.engine][self.rank] = Some(caches.clone());
        self.caches = Some(caches.clone());
    }

    fn bind_connector_meta(&mut self, meta: &Arc<[u8]>) {
        self.steps += 1;
        self.metadata = serde_json::from_slice(meta).expect("the scheduler half's metadata");
    }

    fn start_load_kv(&mut self) -> Result<(), WorkerFault> {
        for order in std::mem::take(&mut self.metadata) {
            if order.load_async {
                let delay = self.in_process.hub().delay(order.transfer, self.rank);
                self.later.push((self.steps + delay, order));
            } else {
                self.load(&order)?;
            }
        }
        Ok(())
    }

    fn get_finished(
        &mut self,
        finished_gen_req_ids: &[u64],
        started_loading_req_ids: &[u64],
    ) -> Result<(Vec<u64>, Vec<u64>), WorkerFault> {
        self.saving.extend(finished_gen_req_ids);
        self.loading.extend(started_loading_req_ids);
        let steps = self.steps;
        let (due, later) = std::mem::take(&mut self.later)
            .into_iter()
            .partition::<Vec<_>, _>(|(due, _)| *due <= steps);
        self.later = later;
        let mut loaded = vec![];
        for (_, order) in due {
            self.load(&order)?;
            assert!(self.loading.remove(&order.number), "loads are handed in when they begin");
            loaded.push(order.number);
        }
        let sent = self.in_process.hub().take_sent(self.engine, self.rank);
        let saved: Vec<_> = sent.into_iter().map(|(_, number)| number).collect();
        assert!(saved.iter().all(|it| self.saving.remove(it)), "saves are handed in at the end");
        Ok((saved, loaded))
    }
}
