//! The adapter behind TensorRT-LLM's seam. The ids of requests are their numbers.

use super::{RankHalf, ended, generated, request};
use crate::config::Rank;
use crate::contract::RequestView;
use crate::contract::trt::{
    RequestData, SchedulerConnector, SchedulerOutput, WorkerConnector, WorkerFault,
};
use crate::layout::KvCaches;
use crate::memory::KvMemory;
use crate::worker::LayerEvent;
use kvferry_connector::{Match, NULL_BLOCK, Notes, Reports, Scheduled};
use kvferry_sys::sync::Mutex;
use rustc_hash::FxHashMap;
use std::sync::Arc;

/// Reports of the ranks to the scheduler half at rank 0, in place of an all-gather.
#[derive(Clone)]
pub(super) struct Exchange(Arc<Mutex<Gathered>>);

struct Gathered {
    half: Arc<Mutex<kvferry_connector::Scheduler>>,
    ranks: usize,
    /// The metadata of each rank that has started.
    metadata: Vec<(usize, Vec<u8>)>,
    /// Number of ranks that have reported a request as sent, by request.
    sent: FxHashMap<String, usize>,
    received: FxHashMap<String, usize>,
}

impl Exchange {
    pub(super) fn new(ranks: usize, half: Arc<Mutex<kvferry_connector::Scheduler>>) -> Self {
        Self(Arc::new(Mutex::new(Gathered {
            half,
            ranks,
            metadata: vec![],
            sent: FxHashMap::default(),
            received: FxHashMap::default(),
        })))
    }

    fn started(&self, rank: usize, of_rank: Vec<u8>) {
        let mut gathered = self.0.lock();
        let Gathered { half, ranks, metadata, .. } = &mut *gathered;
        metadata.push((rank, of_rank));
        if metadata.len() == *ranks {
            metadata.sort_unstable();
            let metadata = metadata.drain(..).map(|(_, of_rank)| of_rank).collect();
            half.lock().set_ranks(metadata).expect("the ranks of one engine fit each other");
        }
    }

    fn report(&self, rank: usize, reports: &Reports) {
        let mut gathered = self.0.lock();
        let Gathered { half, ranks, sent, received, .. } = &mut *gathered;
        let mut half = half.lock();
        if let Some(notes) = &reports.notes {
            half.reported(rank, notes);
        }
        half.sent(counted(sent, &reports.sent, *ranks));
        half.received(counted(received, &reports.received, *ranks));
    }
}

/// Requests that all ranks have reported with this report.
fn counted<'a>(
    counts: &mut FxHashMap<String, usize>,
    names: &'a [String],
    ranks: usize,
) -> impl Iterator<Item = &'a str> {
    names.iter().map(String::as_str).filter(move |name| {
        let count = counts.entry((*name).to_owned()).or_default();
        *count += 1;
        let complete = *count == ranks;
        if complete {
            counts.remove(*name);
        }
        complete
    })
}

pub(super) struct Scheduler {
    half: Arc<Mutex<kvferry_connector::Scheduler>>,
    eager: bool,
    /// Tokens to load of each request: TensorRT-LLM does not repeat the number when the request gets blocks.
    matched: FxHashMap<u64, u64>,
}

impl Scheduler {
    pub(super) fn new(half: Arc<Mutex<kvferry_connector::Scheduler>>, eager: bool) -> Self {
        Self { half, eager, matched: FxHashMap::default() }
    }
}

fn numbers(pages: &[Vec<i32>]) -> Vec<Vec<u32>> {
    let number = |page: &i32| u32::try_from(*page).unwrap_or(NULL_BLOCK);
    pages.iter().map(|group| group.iter().map(number).collect()).collect()
}

impl SchedulerConnector for Scheduler {
    fn get_num_new_matched_tokens(
        &mut self,
        view: &RequestView<'_>,
        num_computed_tokens: usize,
    ) -> (usize, bool) {
        let (id, computed) = (view.number.to_string(), num_computed_tokens as u64);
        let mut half = self.half.lock();
        // There is no other call for its arrival.
        half.arrived(&request(&id, view));
        // There is no second match: compute what is not known now.
        let Match::Tokens(tokens) = half.matched(&id, computed) else { return (0, false) };
        drop(half);
        // The last token of the prompt is always computed here.
        let most = view.prompt.len() as u64 - 1 - computed;
        let tokens = tokens.min(most);
        self.matched.insert(view.number, tokens);
        (usize::try_from(tokens).expect("no more than the prompt has"), tokens > 0)
    }

    fn update_state_after_alloc(&mut self, view: &RequestView<'_>, block_ids: &[Vec<i32>]) {
        let Some(external) = self.matched.remove(&view.number) else { return };
        self.half.lock().allocated(&view.number.to_string(), external, &numbers(block_ids));
    }

    fn build_connector_meta(&mut self, output: &SchedulerOutput) -> Vec<u8> {
        let mut half = self.half.lock();
        let new = output.new_requests.iter().map(|data| (data, true));
        let cached = output.cached_requests.iter().map(|data| (data, false));
        let named: Vec<(String, &RequestData, bool)> = new
            .chain(cached)
            .map(|(data, all)| (data.request_id.to_string(), data, all))
            .filter(|(id, ..)| half.produces(id))
            .collect();
        let scheduled = named.iter().map(|(id, data, all)| Scheduled {
            request: id,
            computed: data.computed_position as u64,
            tokens: data.num_scheduled_tokens as u64,
            all: *all,
            blocks: numbers(&data.new_block_ids),
        });
        half.step(scheduled, []).encode()
    }

    fn request_finished(&mut self, view: &RequestView<'_>, block_ids: &[Vec<i32>]) -> bool {
        self.matched.remove(&view.number);
        let side_data = (!self.eager).then(|| generated(view));
        let (id, blocks) = (view.number.to_string(), numbers(block_ids));
        ended(&mut self.half.lock(), &id, view, &blocks, side_data).held
    }
}

pub(super) struct Worker {
    half: RankHalf,
    rank: usize,
    exchange: Exchange,
}

impl Worker {
    pub(super) const fn new(half: RankHalf, rank: usize, exchange: Exchange) -> Self {
        Self { half, rank, exchange }
    }
}

/// The reasons of failed loads.
fn fault(reports: &Reports) -> Option<WorkerFault> {
    let name = reports.failed.first()?;
    let notes = reports.notes.as_deref().and_then(|notes| Notes::decode(notes).ok());
    let fetched = notes.and_then(|it| it.fetched.into_iter().find(|it| it.request == *name));
    let why = fetched.map_or_else(String::new, |it| format!(": {}: {}", it.code, it.detail));
    Some(WorkerFault { reason: format!("the KV of request {name} could not be fetched{why}") })
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
        self.exchange.started(self.rank, self.half.worker().rank_metadata().to_vec());
    }

    fn bind_connector_meta(&mut self, meta: &Arc<[u8]>) {
        self.half.apply(meta);
    }

    fn start_load_kv(&mut self) -> Result<(), WorkerFault> {
        self.half.worker().fetch();
        Ok(())
    }

    fn save_kv_layer(&mut self, layer: usize, computed: &LayerEvent) {
        self.half.layer_computed(layer, computed);
    }

    fn wait_for_save(&mut self) {
        self.half.step_computed();
    }

    fn get_finished(
        &mut self,
        _finished_gen_req_ids: &[u64],
        _started_loading_req_ids: &[u64],
    ) -> Result<(Vec<u64>, Vec<u64>), WorkerFault> {
        let reports = self.half.worker().reports();
        if let Some(fault) = fault(&reports) {
            return Err(fault);
        }
        self.exchange.report(self.rank, &reports);
        let ids = |names: &[String]| {
            let numbers = names.iter().map(|name| name.parse().expect("requests have numbers"));
            numbers.collect()
        };
        Ok((ids(&reports.sent), ids(&reports.received)))
    }
}
