//! When an engine computes the layers of a step.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_refengine::contract::vllm::{ConnectorMeta, TransferResults, WorkerConnector};
use kvferry_refengine::{BlockId, KvCaches, KvMemory, LayerEvent, Rank, RequestId};

use crate::machine::shared_clock;

/// Moments of the latest step, in nanoseconds of the shared clock. Written by the engine's thread, read
/// by any.
#[derive(Debug, Default)]
pub struct LayerTimes {
    began: AtomicU64,
    ended: AtomicU64,
}

impl LayerTimes {
    /// When the step's first layer began.
    pub fn began(&self) -> u64 {
        self.began.load(Ordering::Relaxed)
    }

    /// When the step's last layer had been computed, before the worker half learns of it.
    pub fn ended(&self) -> u64 {
        self.ended.load(Ordering::Relaxed)
    }

    /// Wraps a worker half, which then records the steps of a model with `layers` layers.
    pub fn of(
        self: &Arc<Self>,
        inner: Box<dyn WorkerConnector>,
        layers: usize,
    ) -> Box<dyn WorkerConnector> {
        Box::new(Timed { inner, layers, times: Arc::clone(self) })
    }
}

fn note(moment: &AtomicU64) {
    let now = u64::try_from(shared_clock().as_nanos()).unwrap_or(u64::MAX);
    moment.store(now, Ordering::Relaxed);
}

struct Timed {
    inner: Box<dyn WorkerConnector>,
    layers: usize,
    times: Arc<LayerTimes>,
}

impl WorkerConnector for Timed {
    fn allocate_kv_memory(
        &mut self,
        rank: Rank,
        storage: usize,
        len_bytes: usize,
    ) -> Option<Arc<dyn KvMemory>> {
        self.inner.allocate_kv_memory(rank, storage, len_bytes)
    }

    fn register_kv_caches(&mut self, caches: &Arc<KvCaches>) {
        self.inner.register_kv_caches(caches);
    }

    fn get_handshake_metadata(&mut self) -> Vec<u8> {
        self.inner.get_handshake_metadata()
    }

    fn handle_preemptions(&mut self, meta: &ConnectorMeta) {
        self.inner.handle_preemptions(meta);
    }

    fn bind_connector_metadata(&mut self, meta: &ConnectorMeta) {
        self.inner.bind_connector_metadata(meta);
    }

    fn clear_connector_metadata(&mut self) {
        self.inner.clear_connector_metadata();
    }

    fn start_load_kv(&mut self) {
        self.inner.start_load_kv();
    }

    fn wait_for_layer_load(&mut self, layer: usize) {
        if layer == 0 {
            note(&self.times.began);
        }
        self.inner.wait_for_layer_load(layer);
    }

    fn save_kv_layer(&mut self, layer: usize, computed: &LayerEvent) {
        if layer + 1 == self.layers {
            note(&self.times.ended);
        }
        self.inner.save_kv_layer(layer, computed);
    }

    fn wait_for_save(&mut self) {
        self.inner.wait_for_save();
    }

    fn get_transfer_results(&mut self, finished: &[RequestId]) -> TransferResults {
        self.inner.get_transfer_results(finished)
    }

    fn get_block_ids_with_load_errors(&mut self) -> Vec<BlockId> {
        self.inner.get_block_ids_with_load_errors()
    }

    fn build_connector_worker_meta(&mut self) -> Option<Vec<u8>> {
        self.inner.build_connector_worker_meta()
    }

    fn shutdown(&mut self) {
        self.inner.shutdown();
    }
}
