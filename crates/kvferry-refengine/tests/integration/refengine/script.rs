//! Connectors with scripted answers that record their calls.

use kvferry_refengine::contract::RequestView;
use kvferry_refengine::contract::vllm::{
    Connector, ConnectorMeta, ConnectorOutput, Match, SchedulerConnector, SchedulerOutput,
    TransferResults, WorkerConnector,
};
use kvferry_refengine::{
    BlockId, BlockPins, KvCaches, LayerEvent, Params, Rank, RequestId, RequestStatus,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};

/// The script and the record of a connector.
#[derive(Clone, Debug, Default)]
pub(crate) struct Script(Arc<Mutex<State>>);

#[derive(Debug, Default)]
pub(crate) struct State {
    /// No tokens if there is none.
    pub(crate) answer: Option<Match>,
    pub(crate) prompt_cut: Option<usize>,
    /// The answer of `request_finished`.
    pub(crate) holds: bool,
    pub(crate) params: Option<Params>,
    pub(crate) finished_count: Option<usize>,
    pub(crate) pending: bool,
    /// The report of each rank after the next step.
    pub(crate) results: BTreeMap<usize, TransferResults>,
    pub(crate) invalid: BTreeMap<usize, Vec<BlockId>>,
    pub(crate) worker_meta: Option<Vec<u8>>,
    pub(crate) log: Vec<String>,
    pub(crate) outputs: Vec<ConnectorOutput>,
    pub(crate) plans: Vec<SchedulerOutput>,
    pub(crate) pins: Option<BlockPins>,
    pub(crate) statuses: Vec<RequestStatus>,
}

impl Script {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub(crate) fn connector(&self, ranks: usize) -> Connector {
        Connector {
            scheduler: Box::new(Half(self.clone(), usize::MAX)),
            workers: (0..ranks).map(|rank| Box::new(Half(self.clone(), rank)) as Box<_>).collect(),
        }
    }

    pub(crate) fn matches(&self, tokens: usize, load_async: bool) {
        self.state().answer = Some(Match::Tokens { tokens, load_async });
    }

    pub(crate) fn sent(&self, rank: usize, id: &str) {
        self.state().results.entry(rank).or_default().finished_sending.push(id.into());
    }

    pub(crate) fn received(&self, rank: usize, id: &str) {
        self.state().results.entry(rank).or_default().finished_recving.push(id.into());
    }

    pub(crate) fn failed(&self, rank: usize, id: &str) {
        self.state().results.entry(rank).or_default().failed_recving.push(id.into());
    }

    pub(crate) fn take_log(&self) -> Vec<String> {
        std::mem::take(&mut self.state().log)
    }
}

/// The scheduler half, or the worker half of a rank.
struct Half(Script, usize);

impl Half {
    fn log(&self, call: impl std::fmt::Display) {
        let who = if self.1 == usize::MAX { "s".into() } else { self.1.to_string() };
        self.0.state().log.push(format!("{who} {call}"));
    }
}

impl SchedulerConnector for Half {
    fn bind_block_pools(&mut self, pools: BlockPins) {
        self.log("bind_block_pools");
        self.0.state().pins = Some(pools);
    }

    fn get_finished_count(&mut self) -> Option<usize> {
        self.0.state().finished_count
    }

    fn set_xfer_handshake_metadata(&mut self, ranks: &[(Rank, Vec<u8>)]) {
        self.log(format!("set_xfer_handshake_metadata {}", ranks.len()));
    }

    fn on_new_request(&mut self, request: &RequestView<'_>) {
        self.log(format!("on_new_request {}", request.id));
    }

    fn prompt_tokens_to_prefill(&mut self, request: &RequestView<'_>) -> usize {
        self.0.state().prompt_cut.unwrap_or(request.prompt.len())
    }

    fn get_num_new_matched_tokens(&mut self, request: &RequestView<'_>, computed: usize) -> Match {
        self.log(format!("get_num_new_matched_tokens {} {computed}", request.id));
        self.0.state().answer.unwrap_or(Match::NONE)
    }

    fn update_state_after_alloc(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
        num_external_tokens: usize,
    ) {
        let blocks = block_ids[0].len();
        self.log(format!("update_state_after_alloc {} {blocks} {num_external_tokens}", request.id));
    }

    fn build_connector_meta(&mut self, output: &SchedulerOutput) -> Vec<u8> {
        self.log("build_connector_meta");
        self.0.state().plans.push(output.clone());
        output.step.to_le_bytes().to_vec()
    }

    fn update_connector_output(&mut self, output: &ConnectorOutput) {
        self.log("update_connector_output");
        self.0.state().outputs.push(output.clone());
    }

    fn request_finished(
        &mut self,
        request: &RequestView<'_>,
        block_ids: &[Vec<BlockId>],
    ) -> (bool, Option<Params>) {
        self.log(format!("request_finished {} {}", request.id, block_ids[0].len()));
        let mut state = self.0.state();
        state.statuses.push(request.status);
        (state.holds, state.params.clone())
    }

    fn has_pending_work(&mut self) -> bool {
        self.0.state().pending
    }

    fn take_events(&mut self) -> Vec<serde_json::Value> {
        self.log("take_events");
        vec![]
    }

    fn shutdown(&mut self) {
        self.log("shutdown");
    }
}

impl WorkerConnector for Half {
    fn register_kv_caches(&mut self, _caches: &Arc<KvCaches>) {
        self.log("register_kv_caches");
    }

    fn get_handshake_metadata(&mut self) -> Vec<u8> {
        self.log("get_handshake_metadata");
        vec![1]
    }

    fn handle_preemptions(&mut self, _meta: &ConnectorMeta) {
        self.log("handle_preemptions");
    }

    fn bind_connector_metadata(&mut self, meta: &ConnectorMeta) {
        self.log("bind_connector_metadata");
        let latest = self.0.state().plans.last().unwrap().step;
        assert_eq!(**meta, latest.to_le_bytes());
    }

    fn clear_connector_metadata(&mut self) {
        self.log("clear_connector_metadata");
    }

    fn start_load_kv(&mut self) {
        self.log("start_load_kv");
    }

    fn wait_for_layer_load(&mut self, layer: usize) {
        self.log(format!("wait_for_layer_load {layer}"));
    }

    fn save_kv_layer(&mut self, layer: usize, _computed: &LayerEvent) {
        self.log(format!("save_kv_layer {layer}"));
    }

    fn wait_for_save(&mut self) {
        self.log("wait_for_save");
    }

    fn get_transfer_results(&mut self, finished_req_ids: &[RequestId]) -> TransferResults {
        self.log(format!("get_transfer_results {}", finished_req_ids.len()));
        self.0.state().results.remove(&self.1).unwrap_or_default()
    }

    fn get_block_ids_with_load_errors(&mut self) -> Vec<BlockId> {
        self.log("get_block_ids_with_load_errors");
        self.0.state().invalid.remove(&self.1).unwrap_or_default()
    }

    fn build_connector_worker_meta(&mut self) -> Option<Vec<u8>> {
        self.log("build_connector_worker_meta");
        self.0.state().worker_meta.clone()
    }

    fn shutdown(&mut self) {
        self.log("shutdown");
    }
}
